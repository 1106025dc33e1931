//! A whole decode step of a Qwen3 shape, with random weights: what `generate` repeats for every token.

mod tree;

use gpu_kernels::kv::PAGE_TOKENS;
use gpu_kernels::step::{self, MAX_DECODE_ROWS, PlanDecode, STATE_WORDS, SequenceState};
use model::format::{Code, Rounded};
use model::plan::Matrix;
use model::{CheckpointFormat, Config};

use self::tree::Tree;
use crate::random::random;
use crate::{Bench, BenchError, Case, Label, Path, Unit, Work};
use host::Error;
use host::forward::{Footprint, Forward, RowOutput};
use host::weights::DeviceWeights;

/// The shape, contexts and rows to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeSizes {
    /// The shape's name.
    pub name: String,
    /// The shape.
    pub config: Config,
    /// Tokens of the history, including those of the step: each number is a case for each of `rows`.
    pub contexts: Vec<u32>,
    /// Rows of the step: the newest token, and its drafts.
    pub rows: Vec<u32>,
    /// What the layers' weights are rounded to, if they are rounded.
    pub code: Option<Code>,
    /// Whether drafts are a tree.
    pub tree: bool,
}

impl DecodeSizes {
    /// Qwen3-8B.
    pub fn published() -> Self {
        let contexts = vec![128, 8192, 32_768];
        Self { name: "8B".into(), config: published("8B"), contexts, rows: vec![1, 16], code: None, tree: false }
    }

    /// A small shape, for checks on the emulator: one split of the context, and several.
    pub fn small() -> Self {
        let mut config = Config { vocab_size: 300, num_hidden_layers: 2, ..published("8B") };
        config.plan.resize(256, 384, (4, 2));
        Self { name: "small".into(), config, contexts: vec![40, 600], rows: vec![1, 5, 16], code: None, tree: false }
    }

    /// Number of cases of [`run`].
    pub fn cases(&self) -> usize {
        self.contexts.len() * self.rows.len()
    }

    fn check(&self) -> Result<(), BenchError> {
        for &rows in &self.rows {
            if rows == 0 || rows > MAX_DECODE_ROWS {
                return Err(BenchError::Size(format!("--rows {rows}: a decode step has 1 to {MAX_DECODE_ROWS} rows")));
            }
            if let Some(context) = self.contexts.iter().find(|&&context| context < rows) {
                return Err(BenchError::Size(format!("--context {context} is less than --rows {rows}")));
            }
        }
        Ok(())
    }
}

/// A published shape, which must exist.
fn published(name: &str) -> Config {
    Config::published(name).expect("a published shape")
}

/// Measures every context with every number of rows, after comparing the step in one launch with the step in many
/// launches.
///
/// # Errors
/// If the kernels cannot take the sizes, there is too little memory, the device fails, or bits differ.
pub fn run(bench: &mut Bench<'_>, sizes: &DecodeSizes) -> Result<(), BenchError> {
    sizes.check()?;
    let (device, config) = (bench.device(), &sizes.config);
    Forward::check(config)?;
    let capacity = sizes.contexts.iter().copied().max().unwrap_or(1).next_multiple_of(PAGE_TOKENS) as usize;
    let footprint = Footprint::of(config, capacity, false);
    bench.room_for(footprint.weights + footprint.working, "--size or --context")?;
    let mut forward = Forward::new(device, config, DeviceWeights::random_as(config, device, sizes.code)?, capacity)?;
    forward.fill_cache(&random(1 << 20, 5))?;
    let in_one_launch = forward.prepare_decode()?;
    let compact = forward.compact_bytes();
    let bytes = weight_bytes(config, sizes.code, compact);
    let saved = head_saved(config, forward.packed_head_bytes());
    let reads_either_head = sizes.code.is_some() && in_one_launch;
    let tokens: Vec<i32> = (0..capacity).map(|i| (i * 7919 % config.vocab_size) as i32).collect();
    let mut history = device.upload(&tokens)?;
    let drafts = device.upload(&tokens[..MAX_DECODE_ROWS as usize])?;
    let mut words = device.zeroed::<u32>(STATE_WORDS)?;
    let mut draft_rows = device.zeroed::<i32>(1)?;
    forward.prepare_tree()?;
    let tree = if forward.want_tree(sizes.tree) { Some(Tree::new(device, config.vocab_size as u32)?) } else { None };
    for &context in &sizes.contexts {
        for &rows in &sizes.rows {
            words.write(0, &[context - rows + 1, 0, 0, 0])?;
            draft_rows.write(0, &[rows as i32])?;
            let state = SequenceState { history: history.ptr_mut(), words: words.ptr_mut() };
            let plan = PlanDecode {
                rows: forward.rows(),
                state,
                drafts: drafts.ptr(),
                draft_rows: draft_rows.ptr(),
                counters: forward.counters(),
                cost: Default::default(),
            };
            let plan = || match tree.as_ref().filter(|_| rows > 1) {
                // SAFETY: the history has the tokens and room for one more.
                Some(tree) => unsafe { tree.enqueue_plan(&forward, state, rows, context) },
                // SAFETY: likewise, and rows have room for a step.
                None => unsafe { device.launch::<step::plan_decode>(1, 0, plan) },
            };
            let logits = || -> Result<Vec<f32>, Error> {
                let mut out = vec![0.0; rows as usize * config.vocab_size];
                forward.logits().read(0, &mut out)?;
                Ok(out)
            };
            let launch = |_| {
                plan()?;
                // SAFETY: the plan zeroes the counters.
                unsafe { forward.enqueue_decode(rows, context) }
            };
            let check = || {
                let found = logits()?;
                if let Some(tree) = tree.as_ref().filter(|_| rows > 1) {
                    let differ = tree.differing(&forward, &mut history, context - rows, &found)?;
                    return Ok((differ > 0).then(|| format!("{differ} of {} logits, bit for bit", found.len())));
                }
                plan()?;
                forward.enqueue(rows, context, RowOutput::LogitsFrom(0))?;
                let expected = logits()?;
                if let Some(strange) = expected.iter().find(|v| !v.is_finite()) {
                    return Ok(Some(format!("a logit is {strange}")));
                }
                let differ = found.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                Ok((differ > 0).then(|| format!("{differ} of {} logits, bit for bit", found.len())))
            };
            let kv = u64::from(context) * config.kv_bytes_per_token(2) as u64;
            let case = Case {
                label: Label {
                    bench: "decode",
                    name: format!(
                        "{}{}, {rows} row{}{}{}",
                        sizes.name,
                        match sizes.code {
                            None if compact.is_some() => " packed",
                            None => "",
                            Some(Code::E4m3) => " fp8",
                            Some(Code::Int4) => " int4",
                        },
                        if rows == 1 { "" } else { "s" },
                        if tree.is_some() && rows > 1 { ", a tree" } else { "" },
                        match (in_one_launch, sizes.code.is_some() && compact.is_none()) {
                            (false, _) => ", launches",
                            (true, true) => ", as bf16",
                            (true, false) => "",
                        }
                    ),
                    size: format!("context {context}"),
                },
                unit: Unit::Microseconds,
                work: Work {
                    bytes: bytes + kv - if rows == 1 || reads_either_head { saved } else { 0 },
                    operations: u64::from(rows) * config.step_weight_bytes(2) as u64,
                },
                path: Path::Read,
                sets: 1,
            };
            bench.case(case, launch, check)?;
        }
    }
    Ok(())
}

/// Bytes that a step need not read if the head is packed.
fn head_saved(config: &Config, packed: Option<u64>) -> u64 {
    packed.map_or(0, |packed| (2 * config.head().weights() as u64).saturating_sub(packed))
}

/// Bytes of the weights that a step reads. Quantised layers count as codes, with scales and zeros packed as tightly as
/// the published formats have them. Others count as what they are packed to, if they are packed.
fn weight_bytes(config: &Config, code: Option<Code>, packed: Option<u64>) -> u64 {
    let plain = config.step_weight_bytes(2) as u64;
    let Some(code) = code else {
        let matrices: u64 = config.gemms().map(|gemm| 2 * (gemm.weight_rows() * gemm.k) as u64).sum();
        return packed.map_or(plain, |packed| plain - matrices + packed);
    };
    let format = match code {
        Code::Int4 => Rounded::Int4,
        Code::E4m3 => Rounded::Fp8,
    };
    let layers = config.gemms().filter(|gemm| gemm.matrix != Matrix::Head);
    let saved = layers.map(|gemm| {
        let shape = [gemm.weight_rows(), gemm.k];
        2 * (shape[0] * shape[1]) as u64 - format.compact_bytes(shape, 0)
    });
    plain - saved.sum::<u64>()
}
