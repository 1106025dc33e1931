//! The errors of the engine.

use gpu_kernels::linear::N_TILE;

/// An error of this crate. The message says what is wrong and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// CUDA was asked for, but no card can be used.
    #[error("no usable CUDA card: {reason}; use --device cpu, or mend the driver")]
    NoCuda {
        /// What was missing.
        reason: String,
    },
    /// The file of kernels that replaces the built-in ones cannot be read.
    #[error(
        "the kernels of --kernels {path} cannot be read: {reason}; name a file of PTX or machine code, or leave the flag out"
    )]
    Kernels {
        /// The file.
        path: String,
        /// What the system reported.
        reason: String,
    },
    /// A file of kernels was given, but there is no card to load them on.
    #[error(
        "the kernels of --kernels {path} are for a CUDA card, and there is none here; leave the flag out, or use --device cuda"
    )]
    KernelsWithoutCard {
        /// The file.
        path: String,
    },
    /// A kernel in the given file takes other parameters than this program passes.
    #[error(
        "kernel {kernel} of {path} takes other parameters than this program hands it; build both from the same \
         parameter blocks, or leave --kernels out"
    )]
    KernelLayout {
        /// The kernel.
        kernel: String,
        /// The file.
        path: String,
    },
    /// The given file has none of this program's kernels.
    #[error(
        "--kernels {path} has no kernel of this program that tells its parameters; name a file of kernels that this \
         version built, or leave --kernels out"
    )]
    KernelsMissing {
        /// The file.
        path: String,
    },
    /// A kernel was launched whose module is not among those that the device was opened with.
    #[error("this device was opened without the module {module}: open it with `DeviceOptions::modules` that have it")]
    NoModule {
        /// The module.
        module: String,
    },
    /// A built-in kernel takes other parameters than the host passes.
    #[error(
        "kernel {kernel} was built from other sources than the rest of this program; build it anew, after `cargo clean`"
    )]
    KernelsBuiltWrongly {
        /// The kernel.
        kernel: String,
    },
    /// An answer with a form cannot go on past the form's end.
    #[error("an answer of a given form ends where the form does; leave --ignore-eos (`ignore_eos`) out, or the form")]
    FormWithoutEnd,
    /// The form was compiled for another model.
    #[error("the form of the answer was compiled for another model; compile it with `Forms` of this one")]
    FormOfAnother,
    /// The form could not be followed further than some token of the answer.
    #[error("{reason}; ask for a simpler form")]
    FormLost {
        /// Why not.
        reason: String,
    },
    /// A sequence has more end tokens than a device compares with.
    #[error(
        "the sequence has {count} end tokens, and on a GPU at most {most} work; use --device cpu, or name fewer as \
         eos_token_id in generation_config.json"
    )]
    StopTokens {
        /// End tokens of the sequence.
        count: usize,
        /// The most that a device takes.
        most: usize,
    },
    /// The driver refused a call, or a kernel failed.
    #[error("the CUDA driver failed while {doing}: {reason}")]
    Driver {
        /// What was being done, or the kernel's name.
        doing: String,
        /// What the driver reported.
        reason: String,
    },
    /// There was too little memory on the card for an allocation.
    #[error("the card has {} free and {} more are needed; use a shorter --context or a smaller model", gib(*.free), gib(*.wanted))]
    OutOfMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free.
        free: u64,
    },
    /// An array would have more elements than any memory.
    #[error(
        "{what} would be larger than any memory; use a shorter --context, a smaller --cache-tokens, or fewer --sequences or --step-rows"
    )]
    TooLarge {
        /// What would be too large.
        what: &'static str,
    },
    /// The model and its cache do not fit on the device. Checked before anything is loaded.
    #[error(
        "this model needs {} on {device} ({} of weights, {} of cache for {context} tokens), and {} are free; \
         use a shorter --context, a smaller model, or --device cpu",
        gib(*.weights + *.cache), gib(*.weights), gib(*.cache), gib(*.free)
    )]
    ModelTooLarge {
        /// The name of the device.
        device: String,
        /// Bytes of weights.
        weights: u64,
        /// Bytes of cache and working memory.
        cache: u64,
        /// The context that the cache is for.
        context: usize,
        /// Bytes free.
        free: u64,
    },
    /// A batch's cache does not fit on the card beside the model.
    #[error(
        "a cache of {tokens} tokens needs {}, and the card has {} left beside the model; use a smaller --cache-tokens, a shorter --context, \
         or fewer --sequences",
        gib(*.wanted), gib(*.free)
    )]
    CacheTooLarge {
        /// Tokens that were asked for, or that one sequence needs.
        tokens: usize,
        /// Bytes that these tokens take.
        wanted: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The keys and values of a context do not fit in the machine's memory.
    #[error(
        "--context {context} needs {} of memory for keys and values on the CPU, and the machine has {} for \
         them; use a shorter --context",
        gib(*.wanted), gib(*.memory)
    )]
    CpuContextTooLarge {
        /// The context.
        context: usize,
        /// Bytes that its keys and values take.
        wanted: u64,
        /// Bytes of memory of the machine, less those of weights that are decoded into it.
        memory: u64,
    },
    /// A batch's cache and host tier do not fit in memory, on the CPU or the emulator.
    #[error(
        "the cache (--cache-tokens) and what is kept aside (--swap-tokens) need {}, and the machine has {} of memory \
         for them; use fewer tokens, or a \
         shorter --context",
        gib(*.wanted), gib(*.memory)
    )]
    CpuCacheTooLarge {
        /// Bytes of the cache and the host tier together.
        wanted: u64,
        /// Bytes that are available for them.
        memory: u64,
    },
    /// The pinned memory of a batch's host tier could not be allocated.
    #[error("--swap-tokens needs {} of memory that stays where it is, which could not be had ({reason}); use fewer, or 0", gib(*.wanted))]
    HostTier {
        /// Bytes asked for.
        wanted: u64,
        /// What the system or the driver reported.
        reason: String,
    },
    /// The kernels do not cover a shape of the model.
    #[error("the GPU kernels need {what} (this model has {found}); use --device cpu")]
    Unsupported {
        /// What the kernels need.
        what: &'static str,
        /// What the model has.
        found: usize,
    },
    /// Weights on a device are missing, or do not have the sizes of this model's.
    #[error(
        "the weights on the device are not of this model: {what} has {found} elements there, and {expected} are needed; upload them to this \
         device from the same checkpoint"
    )]
    Weights {
        /// Which weights.
        what: &'static str,
        /// Elements that there are on the device.
        found: usize,
        /// Elements that the model has.
        expected: usize,
    },
    /// A matrix on a device does not have the shape of this model's.
    #[error(
        "the weights on the device are not of this model: the {what} has {} rows of {} inputs there, and {} of {} are needed; upload \
         them to this device from the same checkpoint",
        .found[0] * N_TILE as usize, .found[1], .expected[0] * N_TILE as usize, .expected[1]
    )]
    WeightShape {
        /// Which matrix.
        what: &'static str,
        /// N-tiles, of 16 rows each, and inputs that there are on the device; zeros if the matrix is not there.
        found: [usize; 2],
        /// N-tiles and inputs that the model has.
        expected: [usize; 2],
    },
    /// Weights were to be packed to a size that packing does not have.
    #[error(
        "weights cannot be packed with lists of {list_bytes} bytes: lists have a multiple of 16, and at most {most}; take the size \
         from `PackedSize::of`"
    )]
    PackedSize {
        /// Bytes of a list that were asked for.
        list_bytes: u32,
        /// The most bytes of a list.
        most: u32,
    },
    /// The model computed a number that is NaN or infinite, so no token can be chosen.
    #[error(
        "the model's {what} for position {position} are not finite numbers (NaN or infinity): the weights or the config do not fit each other, or \
         are damaged; compare the files with their source"
    )]
    NotFinite {
        /// What was computed: the logits, or a layer's output.
        what: String,
        /// The token's position, from 0 on.
        position: usize,
    },
    /// The prompt does not fit in the context.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}, one of them for the answer; \
         shorten the prompt or raise --context (this model's most is {most})"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that the context holds.
        context: usize,
        /// The longest context that the model allows.
        most: usize,
    },
    /// The prompt is so much too long that it was not tokenised to its end.
    #[error(
        "the prompt has {least} tokens or more and the context holds {context}, one of them for the answer; \
         shorten the prompt or raise --context (this model's most is {most})"
    )]
    PromptFarTooLong {
        /// A lower bound of the prompt's tokens.
        least: usize,
        /// Tokens that the context holds.
        context: usize,
        /// The longest context that the model allows.
        most: usize,
    },
    /// The context is longer than the model was made for.
    #[error("--context {context} is more than the {most} positions that this model was made for")]
    ContextTooLong {
        /// What was asked for.
        context: usize,
        /// The longest context that the model allows.
        most: usize,
    },
    /// The context has no room for a prompt and an answer.
    #[error("a context of {context} has no room for a prompt and an answer; give 2 tokens or more")]
    ContextTooShort {
        /// What was asked for.
        context: usize,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty; give at least one token of text")]
    EmptyPrompt,
    /// A setting of drafting is out of range.
    #[error("{what}")]
    Draft {
        /// Which setting, and what to give instead.
        what: String,
    },
    /// The draft model and the model have different vocabularies.
    #[error(
        "the draft model has another vocabulary: token {id} is {draft} there, and {model} in the model that it would draft \
         for; choose a draft model of the same family"
    )]
    DraftVocabulary {
        /// The first token that differs.
        id: u32,
        /// The token's text in the model.
        model: String,
        /// The token's text in the draft model.
        draft: String,
    },
    /// The draft model cannot be used, for the reason within.
    #[error("the draft model: {0}")]
    DraftModel(Box<Error>),
    /// The draft model does not fit beside the model. Checked before anything is loaded.
    #[error(
        "the draft model needs {} on {device} ({} of weights, {} of cache for {context} tokens), and the model leaves {}; use a \
         smaller draft model, a shorter --context, or --draft ngram",
        gib(*.weights + *.cache), gib(*.weights), gib(*.cache), gib(*.left)
    )]
    DraftModelTooLarge {
        /// The name of the device.
        device: String,
        /// Bytes of weights.
        weights: u64,
        /// Bytes of cache and working memory.
        cache: u64,
        /// The context that the cache is for.
        context: usize,
        /// Bytes that the model leaves free.
        left: u64,
    },
    /// A queue whose work is being recorded was asked for something that cannot be recorded.
    #[error("{doing} cannot be recorded to be launched again; do it before, or behind")]
    Recording {
        /// What it was asked for.
        doing: &'static str,
    },
    /// A kernel did something that the emulator detects as an error.
    #[error("under the emulator, {0}")]
    Emulator(String),
    /// The device stopped answering.
    #[error("the device made no progress for {seconds} seconds; it may be hung (see the system log)")]
    Stalled {
        /// How long the host waited, in seconds.
        seconds: u64,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// An error in the checkpoint.
    #[error(transparent)]
    Model(model::Error),
}

impl From<model::Error> for Error {
    fn from(error: model::Error) -> Self {
        match error {
            model::Error::OutputNotFinite { what, position } => Self::NotFinite { what, position },
            other => Self::Model(other),
        }
    }
}

impl From<model::Fault> for Error {
    fn from(fault: model::Fault) -> Self {
        model::Error::from(&fault).into()
    }
}

impl Error {
    /// For `map_err`: turns a `cust` error into [`Error::Driver`]. `doing` says what was being done.
    pub(crate) fn driver(doing: &str) -> impl FnOnce(cust::error::CudaError) -> Self {
        let doing = doing.to_owned();
        move |error| Self::Driver { doing, reason: error.to_string() }
    }
}

/// Formats bytes for a person, in MiB or GiB.
pub fn gib(bytes: u64) -> String {
    if bytes < 1 << 30 {
        format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64)
    } else {
        format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn a_card_too_small_is_said_with_the_figures() {
        let error = Error::ModelTooLarge {
            device: "NVIDIA T4".into(),
            weights: 15 << 30,
            cache: 3 << 29,
            context: 8192,
            free: 14 << 30,
        };
        assert_eq!(
            error.to_string(),
            "this model needs 16.5 GiB on NVIDIA T4 (15.0 GiB of weights, 1.5 GiB of cache for 8192 tokens), and 14.0 GiB are free; \
             use a shorter --context, a smaller model, or --device cpu"
        );
    }
}
