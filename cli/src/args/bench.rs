//! The arguments of `bench`.

use std::path::PathBuf;

use benches::WeightsArgument;
use benches::token_copy::Variant;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Subcommand, ValueEnum, ValueHint};
use host::DeviceChoice;
use host::device::{DeviceOptions, Level};
use model::Config;

use super::{at_least_one, bytes, shared_memory, trusted};

pub const EXAMPLES: &str = "\
Examples:
  warpdraft bench all --plot bench.svg               everything, at the published sizes
  warpdraft bench linear --shape 5120x27648 --rows 1,16
  warpdraft bench attention --context 131072 --json | jq '.rows[] | {name, size, ratio}'
  warpdraft bench all --device emulator              checks every kernel once, without a card

Each case is checked, then timed by device events over inputs that change, so that no cache helps. The limits are measured in the
same run; ratio is the least possible time ÷ the measured one.";

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub what: BenchCommand,
    #[command(flatten)]
    pub run: BenchRunArgs,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// The card itself: reading, copying, the bus, the tensor cores, a launch
    Ceilings(CeilingsArgs),
    /// Linear layers of Qwen3-8B for few rows: GB/s of weights
    Linear(LinearArgs),
    /// Attention over the paged cache: GB/s of keys and values
    Attention(AttentionArgs),
    /// A whole decode step of a Qwen3 shape with random weights: µs a step
    Decode(DecodeArgs),
    /// The token-record gather from pinned host memory: GiB/s of payload
    TokenCopy(TokenCopyArgs),
    /// Drafting by n-gram match over batches: µs a call
    Ngram(NgramArgs),
    /// All of them, at the published sizes
    All,
}

/// Where and how often, and what becomes of the figures.
#[derive(Debug, clap::Args)]
pub struct BenchRunArgs {
    /// auto (the first CUDA card), cuda, cuda:N, or emulator (each kernel once on the CPU, small, to check it; no
    /// times) [default: what the variable WARPDRAFT_DEVICE says, else auto]
    #[arg(long, value_name = "DEVICE", global = true)]
    pub device: Option<DeviceChoice>,
    /// Load the kernels of this file, PTX or machine code, instead of those that are built in; it is trusted
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, hide_short_help = true, global = true)]
    pub kernels: Option<PathBuf>,
    /// Run the kernels of this level, sm_80, sm_90 or sm_90a [default: the card's]
    #[arg(long, value_name = "LEVEL", hide_short_help = true, global = true)]
    pub level: Option<Level>,
    /// With kernels of sm_80 or sm_90, use no more shared memory of a CTA than so many bytes, such as 99KiB
    #[arg(long, value_name = "SIZE", value_parser = shared_memory, hide_short_help = true, global = true)]
    pub shared_memory: Option<u32>,
    /// From Hopper on and on the emulator, run a decode step as a launch for each operator
    #[arg(long, hide_short_help = true, global = true)]
    pub unfused: bool,
    /// How decode steps read the weights
    #[arg(long, value_parser = weights(), value_name = "HOW", default_value = "plain", global = true)]
    pub weights: WeightsArgument,
    /// Measurements of each case; the median is shown
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one, allow_negative_numbers = true, global = true)]
    pub repeats: usize,
    /// Draw the figures: a roofline, and a bar for each case
    #[arg(long, value_name = "FILE.svg", value_hint = ValueHint::FilePath, global = true)]
    pub plot: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long, global = true)]
    pub json: bool,
    /// No progress
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

impl BenchRunArgs {
    /// The device options that these arguments call for.
    pub fn options(&self) -> DeviceOptions {
        let Self { kernels, level, shared_memory, unfused, weights, .. } = self;
        DeviceOptions {
            level: *level,
            shared_bytes: *shared_memory,
            unfused: *unfused,
            lossless: weights.lossless,
            kernels: kernels.as_ref().map(trusted),
            ..benches::options()
        }
    }
}

/// Arguments of `bench ceilings`.
#[derive(Debug, Default, clap::Args)]
pub struct CeilingsArgs {
    /// Bytes to read, and to copy, in device memory, such as 4GiB [default: 4GiB]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub bytes: Option<u64>,
    /// Bytes to move over the bus, each way [default: 164MiB]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub bus_bytes: Option<u64>,
}

/// Arguments of `bench linear`.
#[derive(Debug, Default, clap::Args)]
pub struct LinearArgs {
    /// Input × output features (may be given several times, or with commas) [default: the five of Qwen3-8B]
    #[arg(long, value_name = "KxN", value_parser = shape, value_delimiter = ',')]
    pub shape: Vec<(usize, usize)>,
    /// Token rows, 1 to 64, with commas [default: 1,8,16,64]
    #[arg(long, value_name = "M", value_delimiter = ',')]
    pub rows: Vec<u32>,
}

/// Arguments of `bench attention`.
#[derive(Debug, Default, clap::Args)]
pub struct AttentionArgs {
    /// Tokens in the cache, with commas [default: 1024,8192,32768]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub context: Vec<u32>,
    /// Query rows, 1 to 64, with commas [default: 1,16]
    #[arg(long, value_name = "M", value_delimiter = ',')]
    pub rows: Vec<u32>,
    /// Query heads [default: 32]
    #[arg(long, value_name = "N")]
    pub query_heads: Option<u32>,
    /// Key-value heads [default: 8]
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<u32>,
}

/// Arguments of `bench decode`.
#[derive(Debug, Default, clap::Args)]
pub struct DecodeArgs {
    /// Which Qwen3: 0.6B, 1.7B, 4B, 8B, 14B or 32B; or another model's config.json, or the folder with it [default: 8B]
    #[arg(long, value_name = "SIZE", value_parser = benches::shape)]
    pub size: Option<(String, Config)>,
    /// Tokens of the history, with commas [default: 128,8192,32768]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub context: Vec<u32>,
    /// Rows of a step: the newest token and its drafts, 1 to 16, with commas [default: 1,16]
    #[arg(long, value_name = "M", value_delimiter = ',')]
    pub rows: Vec<u32>,
    /// Drafts are a tree: four tokens at each depth, of which the first has children
    #[arg(long)]
    pub tree: bool,
}

/// Arguments of `bench token-copy`.
#[derive(Debug, Default, clap::Args)]
pub struct TokenCopyArgs {
    /// Records to copy [default: 262144]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub records: Option<usize>,
    /// Records in the region on the host [default: 300000]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub slots: Option<usize>,
    /// Bytes of a record, a multiple of 16 [default: 656]
    #[arg(long, value_name = "N")]
    pub record_bytes: Option<u32>,
    /// In what order the sources come, with commas [default: all]
    #[arg(long, value_enum, value_name = "ORDER", value_delimiter = ',')]
    pub order: Vec<OrderName>,
    /// How to copy, by the names in the table, with commas [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub variant: Vec<Variant>,
}

/// In what order the sources come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OrderName {
    /// Drawn anew each time, so that some come twice
    Random,
    /// Each at most once, in random order
    Unique,
    /// One after the other
    Sequential,
}

/// Arguments of `bench ngram`: none for the published cases, or one case.
#[derive(Debug, Default, clap::Args)]
pub struct NgramArgs {
    /// Sequences [default: the published cases; with another flag, 32]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub batch: Option<usize>,
    /// Tokens of each prompt [default: likewise, 512]
    #[arg(long, value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub length: Option<usize>,
    /// Rows that the batch may put into a pass [default: likewise, 128]
    #[arg(long, value_name = "N")]
    pub threshold: Option<i32>,
    /// Where the match is [default: likewise, none: every token is read]
    #[arg(long, value_enum, value_name = "WHERE")]
    pub hit: Option<HitName>,
    /// Measure the published designs and the serial algorithm beside this one
    #[arg(long)]
    pub peers: bool,
}

/// Where the pattern stands a second time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum HitName {
    /// Near the start of the prompt
    PromptEarly,
    /// Near its end
    PromptLate,
    /// Near the start of the generated tokens
    GeneratedEarly,
    /// Near their end
    GeneratedLate,
    /// Nowhere
    None,
}

/// Parses the name of what decode steps read.
fn weights() -> impl TypedValueParser<Value = WeightsArgument> {
    let names = WeightsArgument::ALL.map(|(name, meaning, _)| PossibleValue::new(name).help(meaning));
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

/// Parses two numbers, such as `4096x6144`.
fn shape(text: &str) -> Result<(usize, usize), String> {
    text.split_once(['x', '×'])
        .and_then(|(k, n)| Some((k.trim().parse().ok()?, n.trim().parse().ok()?)))
        .ok_or_else(|| "it must be two numbers, such as 4096x6144".into())
}

#[cfg(test)]
mod tests {
    use super::shape;

    #[test]
    fn a_shape_is_two_numbers() {
        assert_eq!(shape("4096x6144"), Ok((4096, 6144)));
        assert_eq!(shape("4096×6144"), Ok((4096, 6144)));
        for bad in ["4096", "x", "4096x", "ax4", "-1x4"] {
            assert!(shape(bad).is_err(), "{bad}");
        }
    }
}
