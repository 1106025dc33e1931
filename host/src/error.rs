//! Why the engine could not do what was asked.

/// An error of this crate; each is a sentence that names the thing and the mend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// CUDA was asked for and there is none to use.
    #[error("no usable CUDA card: {reason}; use --device cpu, or mend the driver")]
    NoCuda {
        /// What was missing.
        reason: String,
    },
    /// The file of kernels to use instead of those that are built in cannot be read.
    #[error(
        "the kernels of --kernels {path} cannot be read: {reason}; name a file of PTX or machine code, or leave the flag out"
    )]
    Kernels {
        /// The file.
        path: String,
        /// The system's words.
        reason: String,
    },
    /// There is a file of kernels and no card to load them on.
    #[error(
        "the kernels of --kernels {path} are for a CUDA card, and there is none here; leave the flag out, or use --device cuda"
    )]
    KernelsWithoutCard {
        /// The file.
        path: String,
    },
    /// A kernel of that file takes other parameters than this program gives it.
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
    /// That file has none of this program's kernels.
    #[error(
        "--kernels {path} has no kernel of this program that tells its parameters; name a file of kernels that this \
         version built, or leave --kernels out"
    )]
    KernelsMissing {
        /// The file.
        path: String,
    },
    /// A kernel was launched whose module the device was not opened with.
    #[error("this device was opened without the module {module}: open it with `DeviceOptions::modules` that have it")]
    NoModule {
        /// The module.
        module: String,
    },
    /// A kernel that is built in takes other parameters than the host gives it.
    #[error(
        "kernel {kernel} was built from other sources than the rest of this program; build it anew, after `cargo clean`"
    )]
    KernelsBuiltWrongly {
        /// The kernel.
        kernel: String,
    },
    /// An answer cannot have a form and go on past its end.
    #[error("an answer of a given form ends where the form does; leave --ignore-eos (`ignore_eos`) out, or the form")]
    FormWithoutEnd,
    /// A form was compiled for another model.
    #[error("the form of the answer was compiled for another model; compile it with `Forms` of this one")]
    FormOfAnother,
    /// A form could be followed up to a token of an answer, and no further.
    #[error("{reason}; ask for a simpler form")]
    FormLost {
        /// What gave up.
        reason: String,
    },
    /// The driver refused or a kernel failed.
    #[error("the CUDA driver failed while {doing}: {reason}")]
    Driver {
        /// What was being done, or the kernel's name.
        doing: String,
        /// The driver's words.
        reason: String,
    },
    /// An allocation did not fit.
    #[error("the card has {} free and {} more are needed; use a shorter --context or a smaller model", gib(*.free), gib(*.wanted))]
    OutOfMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free.
        free: u64,
    },
    /// The model and its cache will not fit; said before anything is loaded.
    #[error(
        "this model needs {} on {device} ({} of weights, {} of cache for {context} tokens), and {} are free; \
         use a shorter --context, a smaller model, or --device cpu",
        gib(*.weights + *.cache), gib(*.weights), gib(*.cache), gib(*.free)
    )]
    ModelTooLarge {
        /// Where.
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
    /// A batch's cache does not fit beside the model.
    #[error(
        "a cache of {tokens} tokens needs {}, and the card has {} left beside the model; use a smaller --cache-tokens, a shorter --context, \
         or fewer --sequences",
        gib(*.wanted), gib(*.free)
    )]
    CacheTooLarge {
        /// Tokens that were asked for, or that one sequence needs.
        tokens: usize,
        /// Bytes that they take.
        wanted: u64,
        /// Bytes that there are.
        free: u64,
    },
    /// A context's keys and values do not fit into the machine's memory.
    #[error(
        "--context {context} needs {} of memory for keys and values on the CPU, and the machine has {}; use a \
         shorter --context",
        gib(*.wanted), gib(*.memory)
    )]
    CpuContextTooLarge {
        /// The context.
        context: usize,
        /// Bytes that it takes.
        wanted: u64,
        /// Bytes that there are.
        memory: u64,
    },
    /// A batch's cache on the CPU or the emulator does not fit into memory.
    #[error(
        "the cache (--cache-tokens) and what is kept aside (--swap-tokens) need {}, and the machine has {} of memory \
         for them; use fewer tokens, or a \
         shorter --context",
        gib(*.wanted), gib(*.memory)
    )]
    CpuCacheTooLarge {
        /// Bytes of both.
        wanted: u64,
        /// Bytes that there are.
        memory: u64,
    },
    /// A batch's host tier could not be had.
    #[error("--swap-tokens needs {} of memory that stays where it is, which could not be had ({reason}); use fewer, or 0", gib(*.wanted))]
    HostTier {
        /// Bytes.
        wanted: u64,
        /// What was said.
        reason: String,
    },
    /// A shape that the kernels do not cover.
    #[error("the GPU kernels need {what} (this model has {found}); use --device cpu")]
    Unsupported {
        /// What they need.
        what: &'static str,
        /// What there is.
        found: usize,
    },
    /// Weights on a device that are not of the model that they are said to be of, or not there.
    #[error(
        "the weights on the device are not of this model: {what} has {found} elements there, and {expected} are needed; upload them to this \
         device from the same checkpoint"
    )]
    Weights {
        /// Which.
        what: &'static str,
        /// Elements that there are on the device.
        found: usize,
        /// Elements that the model has.
        expected: usize,
    },
    /// What the model computed is no finite number: no token can be chosen by it.
    #[error(
        "the model's {what} for position {position} are not finite numbers (NaN or infinity): the weights or the config do not fit each other, or \
         are damaged; compare the files with their source"
    )]
    NotFinite {
        /// What: the logits, or a layer's output.
        what: String,
        /// The token's position, from 0 on.
        position: usize,
    },
    /// The prompt does not fit.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}, one of them for the answer; \
         shorten the prompt or raise --context (this model's most is {most})"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that fit.
        context: usize,
        /// What the model allows.
        most: usize,
    },
    /// The prompt is so long that its tokens were not made.
    #[error(
        "the prompt has {least} tokens or more and the context holds {context}, one of them for the answer; \
         shorten the prompt or raise --context (this model's most is {most})"
    )]
    PromptFarTooLong {
        /// Tokens of the prompt, at least.
        least: usize,
        /// Tokens that fit.
        context: usize,
        /// What the model allows.
        most: usize,
    },
    /// A context longer than the model was made for.
    #[error("--context {context} is more than the {most} positions that this model was made for")]
    ContextTooLong {
        /// What was asked for.
        context: usize,
        /// What the model allows.
        most: usize,
    },
    /// Nothing to continue.
    #[error("the prompt is empty; give at least one token of text")]
    EmptyPrompt,
    /// A drafting setting out of range.
    #[error("{what}")]
    Draft {
        /// Which, and what would do.
        what: String,
    },
    /// A draft model's tokens are not those of the model.
    #[error(
        "the draft model has another vocabulary: token {id} is {draft} there, and {model} in the model that it would draft \
         for; choose a draft model of the same family"
    )]
    DraftVocabulary {
        /// The first token that differs.
        id: u32,
        /// What it is in the model.
        model: String,
        /// What it is in the draft model.
        draft: String,
    },
    /// What is wrong with a draft model.
    #[error("the draft model: {0}")]
    DraftModel(Box<Error>),
    /// A draft model does not fit beside the model; said before anything is loaded.
    #[error(
        "the draft model needs {} on {device} ({} of weights, {} of cache for {context} tokens), and the model leaves {}; use a \
         smaller draft model, a shorter --context, or --draft ngram",
        gib(*.weights + *.cache), gib(*.weights), gib(*.cache), gib(*.left)
    )]
    DraftModelTooLarge {
        /// Where.
        device: String,
        /// Bytes of weights.
        weights: u64,
        /// Bytes of cache and working memory.
        cache: u64,
        /// The context that the cache is for.
        context: usize,
        /// Bytes that there are beside the model.
        left: u64,
    },
    /// Something that cannot be recorded, by a queue whose work is.
    #[error("{doing} cannot be recorded to be launched again; do it before, or behind")]
    Recording {
        /// What.
        doing: &'static str,
    },
    /// A kernel misbehaved under the emulator.
    #[error("under the emulator, {0}")]
    Emulator(String),
    /// The device stopped answering.
    #[error("the device made no progress for {seconds} seconds; it may be hung (see the system log)")]
    Stalled {
        /// How long it was waited for.
        seconds: u64,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// The checkpoint.
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
    /// For `map_err`: a `cust` error while `doing` something.
    pub(crate) fn driver(doing: &str) -> impl FnOnce(cust::error::CudaError) -> Self {
        let doing = doing.to_owned();
        move |error| Self::Driver { doing, reason: error.to_string() }
    }
}

/// Bytes for a person.
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
