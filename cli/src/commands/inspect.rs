//! `warpdraft inspect`: what a checkpoint holds, and what it will need.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use host::device::{Capabilities, CardInfo};
use host::forward::{Footprint, Forward};
use host::{Coding, MatrixFormat, PackedSize, WeightStorage, gib};
use model::checkpoint::{MatrixOutline, OutlineTensor};
use model::{Checkpoint, Config, GenerationConfig, OpenOptions, Outline};
use serde::Serialize;

use crate::resolve::Inspect;
use crate::{Ending, loading, output};

/// Memory of a card that this program cannot use for data: roughly the driver's context and the kernels.
const DRIVER_BYTES: u64 = 512 << 20;

/// Runs the command.
///
/// # Errors
/// If anything is wrong with the files, or a pipe is closed.
pub fn run(command: Inspect) -> anyhow::Result<Ending> {
    loading::start_log(command.report)?;
    // Of a model on the hub only the config and headers are fetched, unless its weights are to be read.
    let elsewhere =
        if command.check { None } else { loading::outline(&command.source, command.weights, command.report)? };
    let findings = match elsewhere {
        Some(outline) => Findings::of(outline, None, &command)?,
        None => {
            let options = OpenOptions { check_finite: command.check, weights: command.weights };
            let checkpoint = loading::open(&command.source, options, command.report)?;
            Findings::of(checkpoint.outline()?, Some(&checkpoint), &command)?
        }
    };
    if command.report.json {
        output::print_json(&findings, true)?;
    } else {
        output::print(&findings.to_string())?;
    }
    Ok(Ending::Done)
}

/// Everything that is shown. Also the fields of `--json`.
#[derive(Serialize)]
struct Findings {
    model: String,
    architecture: Architecture,
    parameters: usize,
    stored_bytes: u64,
    dtypes: BTreeMap<String, usize>,
    files: Vec<File>,
    weights: WeightsSummary,
    weights_checked: bool,
    /// Null, as are the next two, for a model that is not on this machine.
    tokenizer_tokens: Option<usize>,
    chat_template: Option<bool>,
    generation: Option<Generation>,
    memory: Memory,
    cpu: CpuMemory,
    cards: Vec<Card>,
    /// Why no card can run the model, if none can.
    gpu_unsupported: Option<String>,
    /// Contradictions between the files.
    warnings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<Tensor>>,
}

#[derive(Serialize)]
struct Architecture {
    name: &'static str,
    layers: usize,
    hidden_size: usize,
    intermediate_size: usize,
    query_heads: usize,
    key_value_heads: usize,
    head_size: usize,
    head_norms: bool,
    query_key_value_biases: bool,
    vocabulary: usize,
    most_positions: usize,
    rope_theta: f64,
    rope_scaling: Option<Scaling>,
    tied_embeddings: bool,
}

#[derive(Serialize)]
struct Scaling {
    kind: &'static str,
    #[serde(skip)]
    name: &'static str,
    factor: f64,
    original_positions: usize,
}

#[derive(Serialize)]
struct File {
    name: String,
    tensors: usize,
    tensor_bytes: u64,
}

/// How weights are stored and read.
#[derive(Serialize)]
struct WeightsSummary {
    /// The value of `--weights`.
    mode: String,
    /// `quant_method` of the checkpoint; null if it has none.
    quantization: Option<String>,
    kinds: Vec<Kind>,
    /// Bytes of the weights that a decode step reads: bf16, whatever they are stored as.
    step_bytes: u64,
    /// Bytes of the same weights in their formats.
    step_format_bytes: u64,
}

/// All weights of one kind.
#[derive(Serialize)]
struct Kind {
    kind: &'static str,
    format: String,
    weights: u64,
    stored_bytes: u64,
    format_bytes: u64,
    bits_per_weight: f64,
}

impl WeightsSummary {
    fn of(config: &Config, matrices: &[MatrixOutline], command: &Inspect) -> Self {
        // Of an untied embedding, a step reads only one row.
        let read = matrices.iter().filter(|m| config.tie_word_embeddings || m.kind != "embedding");
        let kind = |matrix: &MatrixOutline| Kind {
            kind: matrix.kind,
            format: matrix.format.clone(),
            weights: matrix.weights,
            stored_bytes: matrix.stored_bytes,
            format_bytes: matrix.format_bytes,
            bits_per_weight: 8.0 * matrix.format_bytes as f64 / matrix.weights as f64,
        };
        Self {
            mode: command.weights.to_string(),
            quantization: config.quantization.as_ref().map(|quantization| quantization.method.clone()),
            kinds: matrices.iter().map(kind).collect(),
            step_bytes: config.step_weight_bytes(2) as u64,
            step_format_bytes: read.map(|matrix| matrix.format_bytes).sum(),
        }
    }
}

#[derive(Serialize)]
struct Generation {
    eos_token_ids: Vec<u32>,
    sample: bool,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

/// What a card must have memory for. If the cards of this machine differ, this is the most that one of them needs.
#[derive(Serialize)]
struct Memory {
    context: usize,
    weight_bytes: u64,
    /// Bytes of the weights of a quantised model from Hopper on, if memory is scarce; null for other models.
    code_bytes: Option<u64>,
    /// Whether codes are all that is kept of matrices on Hopper.
    #[serde(skip)]
    codes_alone: bool,
    /// Bytes of the matrices packed without loss, estimated from a sample of the model's weights. Null if they cannot
    /// be packed, are codes, or are not on this machine.
    packed_bytes: Option<u64>,
    /// Bytes of the same matrices as bf16.
    packed_from_bytes: Option<u64>,
    /// Bytes of all weights if matrices are kept only in packed form, which is done from Hopper on if memory is scarce.
    packed_alone_bytes: Option<u64>,
    kv_bytes_per_token: usize,
    working_bytes: u64,
    total_bytes: u64,
}

/// What a run on the CPU has in memory, for the same context.
#[derive(Serialize)]
struct CpuMemory {
    weight_bytes: u64,
    /// Whether weights are decoded into memory, rather than mapped.
    #[serde(skip)]
    decodes: bool,
    kv_bytes_per_token: usize,
    total_bytes: u64,
}

impl CpuMemory {
    fn of(config: &Config, matrices: &[MatrixOutline], context: usize) -> Self {
        let bytes = |matrix: &MatrixOutline| if matrix.quantized { 2 * matrix.weights } else { matrix.stored_bytes };
        let weight_bytes = matrices.iter().map(bytes).sum();
        let kv_bytes_per_token = config.kv_bytes_per_token(size_of::<f32>());
        let total_bytes = weight_bytes + kv_bytes_per_token as u64 * context as u64;
        Self { weight_bytes, decodes: matrices.iter().any(|matrix| matrix.quantized), kv_bytes_per_token, total_bytes }
    }
}

/// What decides whether a card has room for a model.
struct Needs<'a> {
    config: &'a Config,
    context: usize,
    /// The weights as codes alone, if they have codes.
    coded: Option<WeightStorage>,
    /// The weights packed without loss alone, if they can be.
    packed: Option<WeightStorage>,
    /// Whether packed weights were asked for.
    is_asked: bool,
}

#[derive(Serialize)]
struct Card {
    device: String,
    name: String,
    memory_bytes: u64,
    compute_capability: String,
    fits: bool,
    /// Longest context that fits; 0 if none does.
    longest_context: usize,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: usize,
    file: String,
}

impl Findings {
    /// What the outline and the cards tell. `checkpoint` is given if the model is on this machine.
    fn of(outline: Outline, checkpoint: Option<&Checkpoint>, command: &Inspect) -> Result<Self, host::Error> {
        let config = &outline.config;
        let context = command.load.context_for(config)?;
        let cards = host::device::cards()?;
        let footprint = Footprint::of(config, context, cards.iter().any(has_gemms));
        let coding = Coding::of_outline(&outline.matrices).filter(|_| command.load.options.lossless != Some(false));
        let coded = coding.map(|coding| WeightStorage::only(MatrixFormat::Coded(coding)));
        let may_pack = coding.is_none() && command.load.options.lossless != Some(false);
        let may_pack = may_pack && Forward::check(config).is_ok();
        // Errors in reading weights are for loading, or `--check`, to report.
        let size = |checkpoint| PackedSize::of(checkpoint, PackedSize::SAMPLED).ok().flatten();
        let packed = checkpoint.filter(|_| may_pack).and_then(size);
        let packed_alone = packed.map(|size| WeightStorage::only(MatrixFormat::Packed(size)));
        let memory = Memory {
            context,
            weight_bytes: footprint.weights,
            codes_alone: coding.is_some_and(|coding| coding.in_blocks),
            code_bytes: coded.map(|_| footprint.keeping(config, coded).weights),
            packed_bytes: packed.map(|size| size.packed),
            packed_from_bytes: packed.map(|size| size.plain),
            packed_alone_bytes: packed_alone.map(|_| footprint.keeping(config, packed_alone).weights),
            kv_bytes_per_token: config.kv_bytes_per_token(2),
            working_bytes: footprint.working,
            total_bytes: footprint.weights + footprint.working,
        };
        let is_asked = command.load.options.lossless == Some(true);
        let needs = Needs { config, context, coded, packed: packed_alone, is_asked };
        let tensor = |tensor: OutlineTensor| Tensor {
            name: tensor.name,
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape,
            bytes: tensor.bytes,
            file: tensor.file,
        };
        let tensors: Vec<Tensor> = outline.tensors.into_iter().map(tensor).collect();
        let mut dtypes = BTreeMap::new();
        for tensor in &tensors {
            *dtypes.entry(tensor.dtype.clone()).or_default() += 1;
        }
        Ok(Self {
            model: command.source.to_string(),
            architecture: Architecture::of(config),
            parameters: config.parameter_count(),
            stored_bytes: tensors.iter().map(|tensor| tensor.bytes as u64).sum(),
            dtypes,
            files: files(&tensors),
            weights: WeightsSummary::of(config, &outline.matrices, command),
            weights_checked: command.check,
            tokenizer_tokens: checkpoint.map(|checkpoint| checkpoint.tokenizer.vocab_size()),
            chat_template: checkpoint.map(|checkpoint| checkpoint.chat_template.is_some()),
            generation: checkpoint.map(|checkpoint| Generation::of(&checkpoint.generation)),
            cards: cards.into_iter().map(|card| Card::of(card, &needs)).collect(),
            cpu: CpuMemory::of(config, &outline.matrices, context),
            memory,
            gpu_unsupported: Forward::check(config).err().map(|error| error.to_string()),
            warnings: outline.warnings,
            tensors: command.tensors.then_some(tensors),
        })
    }
}

fn has_gemms(card: &CardInfo) -> bool {
    card.capabilities.is_some_and(|of| of.has_gemms())
}

impl Card {
    /// Whether `card` has room for a model, and for how long a context.
    fn of(card: CardInfo, needs: &Needs<'_>) -> Self {
        let &Needs { config, context, coded, packed, is_asked } = needs;
        // If there is no room for both, only the packed weights are kept.
        let packs = |of: Capabilities| of.has_full_ring() && (is_asked || WeightStorage::packing_pays(config, &of));
        let packed = packed.filter(|_| card.capabilities.is_some_and(packs));
        let kept = coded.or(packed);
        let kept = kept.filter(|_| card.capabilities.is_some_and(|of| of.has_decode_kernel()));
        let room = card.memory.saturating_sub(DRIVER_BYTES);
        let longest_context = longest_context(config, room, has_gemms(&card), kept);
        Self {
            device: format!("cuda:{}", card.ordinal),
            name: card.name,
            memory_bytes: card.memory,
            compute_capability: format!("{}.{}", card.capability.0, card.capability.1),
            fits: context <= longest_context,
            longest_context,
        }
    }
}

/// The longest context whose cache and working memory fit into `room` together with the weights. Found by bisection, as
/// memory grows with the context.
fn longest_context(config: &Config, room: u64, has_gemms: bool, kept: Option<WeightStorage>) -> usize {
    let fits = |context| {
        let footprint = Footprint::of(config, context, has_gemms).keeping(config, kept);
        footprint.weights + footprint.working <= room
    };
    let (mut fitting, mut least_not) = (0, config.max_position_embeddings + 1);
    while fitting + 1 < least_not {
        let middle = fitting.midpoint(least_not);
        if fits(middle) { fitting = middle } else { least_not = middle }
    }
    fitting
}

fn files(tensors: &[Tensor]) -> Vec<File> {
    let mut files: Vec<File> = Vec::new();
    // Tensors are listed shard by shard.
    for shard in tensors.chunk_by(|a, b| a.file == b.file) {
        files.push(File {
            name: shard[0].file.clone(),
            tensors: shard.len(),
            tensor_bytes: shard.iter().map(|t| t.bytes as u64).sum(),
        });
    }
    files
}

impl Architecture {
    fn of(config: &Config) -> Self {
        Self {
            name: config.family.architecture,
            layers: config.num_hidden_layers,
            hidden_size: config.plan.hidden,
            intermediate_size: config.plan.activation_size(),
            query_heads: config.plan.attention.query_heads,
            key_value_heads: config.plan.attention.key_value_heads,
            head_size: config.plan.attention.head_dim,
            head_norms: config.plan.attention.traits.head_norm,
            query_key_value_biases: config.plan.attention.traits.qkv_bias,
            vocabulary: config.vocab_size,
            most_positions: config.max_position_embeddings,
            rope_theta: config.rope_theta,
            rope_scaling: config.rope_scaling.map(|scaling| {
                let ((kind, name), (factor, original_positions)) = (scaling.names(), scaling.factor());
                Scaling { kind, name, factor, original_positions }
            }),
            tied_embeddings: config.tie_word_embeddings,
        }
    }
}

impl Generation {
    fn of(config: &GenerationConfig) -> Self {
        Self {
            eos_token_ids: config.eos_token_ids.clone(),
            sample: config.do_sample == Some(true),
            temperature: config.temperature,
            top_k: config.top_k,
            top_p: config.top_p,
            min_p: config.min_p,
            repetition_penalty: config.repetition_penalty,
        }
    }
}

/// A line `key   value`, with the values aligned.
fn row(f: &mut fmt::Formatter<'_>, key: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(f, "  {key:<18} {value}")
}

fn count(parameters: usize) -> String {
    let n = parameters as f64;
    if n >= 1e9 { format!("{:.2} billion", n / 1e9) } else { format!("{:.2} million", n / 1e6) }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_model(f)?;
        self.fmt_files(f)?;
        self.weights.fmt(f)?;
        self.memory.fmt(f)?;
        self.cpu.fmt(f)?;
        self.fmt_cards(f)?;
        let Some(tensors) = &self.tensors else { return Ok(()) };
        writeln!(f, "\ntensors")?;
        let width = tensors.iter().map(|t| t.name.len()).max().unwrap_or(0);
        for tensor in tensors {
            let Tensor { name, dtype, shape, file, .. } = tensor;
            writeln!(f, "  {name:<width$}  {dtype:<7}  {:<16}  {file}", format!("{shape:?}"))?;
        }
        Ok(())
    }
}

impl Findings {
    fn fmt_model(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let a = &self.architecture;
        writeln!(f, "{}", self.model)?;
        row(f, "architecture", a.name)?;
        row(f, "parameters", format_args!("{} ({})", count(self.parameters), self.parameters))?;
        row(f, "layers", a.layers)?;
        row(f, "hidden size", a.hidden_size)?;
        row(f, "intermediate size", a.intermediate_size)?;
        let with = match (a.head_norms, a.query_key_value_biases) {
            (false, false) => "",
            (true, false) => ", with norms",
            (false, true) => ", with biases",
            (true, true) => ", with norms and biases",
        };
        let (query, key_value) = (a.query_heads, a.key_value_heads);
        row(f, "heads", format_args!("{query} query, {key_value} key-value, of size {}{with}", a.head_size))?;
        let tokens = self.tokenizer_tokens.map(|tokens| format!(", {tokens} tokens")).unwrap_or_default();
        row(f, "vocabulary", format_args!("{} rows{tokens}", a.vocabulary))?;
        row(f, "head", if a.tied_embeddings { "tied to the embedding" } else { "its own" })?;
        row(f, "most positions", a.most_positions)?;
        row(f, "rope theta", a.rope_theta)?;
        if let Some(scaling) = &a.rope_scaling {
            let Scaling { name, factor, original_positions, .. } = scaling;
            row(f, "rope scaling", format_args!("{name}, {factor} × {original_positions} positions"))?;
        }
        match (self.chat_template, &self.generation) {
            (Some(has), Some(generation)) => {
                row(f, "chat template", if has { "yes" } else { "none" })?;
                row(f, "generation", generation)?;
            }
            _ => row(
                f,
                "not read",
                "tokenizer, chat template and generation defaults: the model is not on this machine",
            )?,
        }
        Ok(())
    }

    fn fmt_files(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dtypes: Vec<String> = self.dtypes.iter().map(|(dtype, n)| format!("{n} {dtype}")).collect();
        let checked = if self.weights_checked { "; every weight is finite" } else { "" };
        writeln!(f, "\nfiles: {} of tensors ({}){checked}", gib(self.stored_bytes), dtypes.join(", "))?;
        for file in &self.files {
            row(f, &file.name, format_args!("{}, {} tensors", gib(file.tensor_bytes), file.tensors))?;
        }
        Ok(())
    }

    fn fmt_cards(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\ncards")?;
        if self.cards.is_empty() {
            writeln!(f, "  none found; it runs on the CPU")?;
        }
        for card in &self.cards {
            let fits = match (&self.gpu_unsupported, card.fits, card.longest_context) {
                (Some(_), _, _) => "cannot run it".into(),
                (None, true, longest) => format!("fits, with up to {longest} tokens of context"),
                (None, false, 0) => "too small".into(),
                (None, false, longest) => format!("fits with --context {longest} at most"),
            };
            let what =
                format!("{}, {}, compute capability {}", card.name, gib(card.memory_bytes), card.compute_capability);
            row(f, &card.device, format_args!("{what}: {fits}"))?;
        }
        match &self.gpu_unsupported {
            Some(reason) => writeln!(f, "  {reason}")?,
            None => row(f, "GPU kernels", format_args!("cover this model ({})", Forward::COVERED))?,
        }
        Ok(())
    }
}

impl fmt::Display for WeightsSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nweights, and bits of each with its scale")?;
        for Kind { kind, format, format_bytes, bits_per_weight, .. } in &self.kinds {
            row(
                f,
                &kind.replace('_', ", "),
                format_args!("{}, {bits_per_weight:.2} bits: {format}", gib(*format_bytes)),
            )?;
        }
        let (read, compact) = (gib(self.step_bytes), gib(self.step_format_bytes));
        let became = "as bf16, which every format becomes while loading";
        row(f, "a step reads", format_args!("{read} {became} ({compact} as it is)"))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nmemory on a card, for {} tokens of context", self.context)?;
        row(f, "weights", gib(self.weight_bytes))?;
        if let Some(bytes) = self.code_bytes {
            let when = if self.codes_alone { "on Hopper" } else { "from Hopper on where memory is scarce" };
            row(f, "  as codes", format_args!("{}, {when}", gib(bytes)))?;
        }
        if let (Some(packed), Some(plain)) = (self.packed_bytes, self.packed_from_bytes) {
            let share = 100.0 * packed as f64 / plain as f64;
            row(f, "  packed", format_args!("{} where packing pays, {share:.1} % of {}", gib(packed), gib(plain)))?;
        }
        if let Some(bytes) = self.packed_alone_bytes {
            row(f, "  packed alone", format_args!("{}, from Hopper on where memory is scarce", gib(bytes)))?;
        }
        let per_token = self.kv_bytes_per_token as f64 / 1024.0;
        row(
            f,
            "cache and work",
            format_args!("{} (keys and values: {per_token} KiB a token)", gib(self.working_bytes)),
        )?;
        row(f, "together", gib(self.total_bytes))
    }
}

impl fmt::Display for CpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weight_bytes, decodes, kv_bytes_per_token, total_bytes } = *self;
        let what = if decodes { "weights as bf16" } else { "weights, mapped from the files" };
        let (weights, cache) = (gib(weight_bytes), gib(total_bytes - weight_bytes));
        let per_token = kv_bytes_per_token as f64 / 1024.0;
        let cache = format!("{cache} of keys and values, {per_token} KiB a token");
        writeln!(f, "\nmemory on the CPU, for as many tokens: {} ({weights} of {what}; {cache})", gib(total_bytes))
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::from(if self.sample { "sampling" } else { "greedy" });
        if self.sample {
            for (name, value) in [
                ("temperature", self.temperature.map(|v| v.to_string())),
                ("top-k", self.top_k.map(|v| v.to_string())),
                ("top-p", self.top_p.map(|v| v.to_string())),
                ("min-p", self.min_p.map(|v| v.to_string())),
                ("repetition penalty", self.repetition_penalty.map(|v| v.to_string())),
            ] {
                if let Some(value) = value {
                    write!(text, ", {name} {value}")?;
                }
            }
        }
        write!(f, "{text}; ends at tokens {:?}", self.eos_token_ids)
    }
}

#[cfg(test)]
mod tests {
    use host::device::{Device, DeviceOptions, Level};

    use super::*;

    /// Prompts take working memory on a card that runs them in passes of many rows, and on no other: there may be both
    /// in a machine.
    #[test]
    fn each_card_is_judged_by_what_it_needs_itself() {
        let config = Checkpoint::demo().unwrap().config;
        let context = 1000;
        let needs = Needs { config: &config, context, coded: None, packed: None, is_asked: false };
        let [without, with] = [false, true].map(|has_gemms| {
            let Footprint { weights, working, .. } = Footprint::of(&config, context, has_gemms);
            weights + working
        });
        assert!(without < with);
        for (bytes, level, fits) in [
            (without, Level::Sm80, true),
            (without - 1, Level::Sm80, false),
            (without, Level::Sm90a, false),
            (with, Level::Sm90a, true),
        ] {
            let device = Device::emulator_with(0, &DeviceOptions { level: Some(level), ..DeviceOptions::default() });
            let card = Card::of(
                CardInfo {
                    ordinal: 1,
                    name: "a card".into(),
                    memory: bytes + DRIVER_BYTES,
                    capability: (8, 0),
                    capabilities: Some(*device.capabilities()),
                },
                &needs,
            );
            assert_eq!((card.fits, card.longest_context >= context), (fits, fits), "{level} with {bytes} bytes");
        }
    }
}
