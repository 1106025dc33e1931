//! The arguments as they are typed. Help, usage errors and shell completions all come from these definitions.

pub mod batch;
#[cfg(feature = "bench")]
pub mod bench;
pub mod form;

use std::num::IntErrorKind;
use std::path::PathBuf;

use clap::{ArgAction, Parser, Subcommand, ValueHint};
use clap_complete::Shell;
use host::device::{DeviceOptions, KernelFile, Level};
use host::{DeviceChoice, ModelDraft, NgramDraft};
use model::Sampling;

/// Runs Qwen3, Qwen2 and Llama models, on a GPU if there is one.
#[derive(Debug, Parser)]
#[command(name = "warpdraft", version, after_help = EXAMPLES, propagate_version = true, args_override_self = true)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Continue a prompt, or answer it with --chat
    #[command(after_help = GENERATE_EXAMPLES)]
    Generate(GenerateArgs),
    /// Hold a conversation
    #[command(after_help = CHAT_EXAMPLES)]
    Chat(ChatArgs),
    /// Show what a checkpoint holds and what it needs
    #[command(after_help = INSPECT_EXAMPLES)]
    Inspect(InspectArgs),
    /// Answer a file of requests, many at once
    #[command(after_help = batch::EXAMPLES)]
    Batch(Box<batch::BatchArgs>),
    /// Measure the kernels beside the card's limits
    #[cfg(feature = "bench")]
    #[command(after_help = bench::EXAMPLES)]
    Bench(bench::BenchArgs),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions(CompletionsArgs),
    /// Write the manual pages, for packages
    #[command(hide = true)]
    Manual(ManualArgs),
}

const EXAMPLES: &str = "\
Examples:
  warpdraft generate \"Once upon a time\"              the demo model, which comes with the program
  warpdraft chat --model Qwen/Qwen3-8B                a model from the Hugging Face hub
  warpdraft batch requests.jsonl -o results.jsonl     a file of requests, many at once
  warpdraft inspect --model ./my-checkpoint           will it fit?";

const GENERATE_EXAMPLES: &str = "\
Examples:
  warpdraft generate --echo --temperature 0 \"impl fmt::Display for Point {\"
  warpdraft generate --model Qwen/Qwen3-8B --chat --no-think \"Name three rivers.\"
  warpdraft generate --file essay.txt --max-tokens 1000 > continued.txt
  warpdraft generate --chat --no-think --choice yes,no \"Is a whale a fish?\"
  warpdraft generate --chat --json-schema person.json \"Invent a person.\"
  warpdraft generate --model Qwen/Qwen3-8B --draft model:Qwen/Qwen3-0.6B --file essay.txt
  git diff | warpdraft generate --chat --system \"Write a commit message.\" --model Qwen/Qwen3-8B
  warpdraft generate --json --seed 7 \"impl Drop for Guard {\" | jq .statistics
  warpdraft generate --file essay.txt --profile profile.json   where the time went, for ui.perfetto.dev

Standard output gets the generated text and nothing else; the summary goes to standard error.";

const CHAT_EXAMPLES: &str = "\
Examples:
  warpdraft chat --model Qwen/Qwen3-8B
  warpdraft chat --model Qwen/Qwen3-0.6B --system \"Answer in one sentence.\" --no-think
  printf 'My name is Ada.\\nWhat is my name?\\n' | warpdraft chat --model Qwen/Qwen3-8B --quiet

Keys are those of a shell: arrows, Ctrl-R to search what was typed before, Ctrl-A, Ctrl-E and so on. Alt-Enter begins a new
line, and pasted lines are one turn. Ctrl-C stops an answer; at the prompt it clears the line, and twice it leaves, as Ctrl-D does.
Lines that are commands: /help, /clear, /think, /no-think, /quit; Tab completes them.";

const INSPECT_EXAMPLES: &str = "\
Examples:
  warpdraft inspect
  warpdraft inspect Qwen/Qwen3-8B --context 32768
  warpdraft inspect ./my-checkpoint --tensors --check
  warpdraft inspect --model ./my-checkpoint --json | jq .parameters";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  d=~/.local/share/bash-completion/completions; mkdir -p $d
  warpdraft completions bash > $d/warpdraft
  d=~/.zfunc; mkdir -p $d
  warpdraft completions zsh > $d/_warpdraft
  d=~/.config/fish/completions; mkdir -p $d
  warpdraft completions fish > $d/warpdraft.fish

zsh reads ~/.zfunc if ~/.zshrc has these lines: fpath+=~/.zfunc; autoload -Uz compinit && compinit";

/// Arguments of `generate`.
#[derive(Debug, clap::Args)]
pub struct GenerateArgs {
    /// Text to continue; `-` or none reads standard input
    #[arg(value_name = "PROMPT", conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Read the prompt from a file, or with `-` from standard input (one newline at its end is left out)
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    /// Put the prompt into the model's chat template, as what the user says
    #[arg(long)]
    pub chat: bool,
    /// Instructions before the conversation
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,
    /// Let the model think before it answers (the default)
    #[arg(long, requires = "chat", overrides_with = "no_think")]
    pub think: bool,
    /// Have the model answer without thinking first
    #[arg(long, requires = "chat", overrides_with = "think")]
    pub no_think: bool,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub form: form::FormArgs,
    /// Print the prompt before its continuation
    #[arg(long, conflicts_with_all = ["chat", "json"], help_heading = "Output")]
    pub echo: bool,
    /// Write where the time went, for ui.perfetto.dev or chrome://tracing (steps are then waited for one by one)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Output")]
    pub profile: Option<PathBuf>,
}

/// Arguments of `chat`.
#[derive(Debug, clap::Args)]
pub struct ChatArgs {
    /// Instructions before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Let the model think before it answers (the default)
    #[arg(long, overrides_with = "no_think")]
    pub think: bool,
    /// Have the model answer without thinking first
    #[arg(long, overrides_with = "think")]
    pub no_think: bool,
    /// Keep nothing of what is typed for later conversations
    #[arg(long)]
    pub no_history: bool,
    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub form: form::FormArgs,
}

/// What `inspect` looks at.
const INSPECTION: &str = "Inspection";

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {
    /// The model, as with --model
    #[arg(value_name = "MODEL", conflicts_with = "model", value_hint = ValueHint::DirPath)]
    pub which: Option<String>,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of context to reckon memory for [default: 8192, or the model's most]
    #[arg(long, value_name = "N", value_parser = context, allow_negative_numbers = true, help_heading = INSPECTION)]
    pub context: Option<usize>,
    /// List every tensor
    #[arg(long, help_heading = INSPECTION)]
    pub tensors: bool,
    /// Read every weight, to find NaN and infinity
    #[arg(long, help_heading = INSPECTION)]
    pub check: bool,
    /// No progress
    #[arg(long, short, help_heading = "Output")]
    pub quiet: bool,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: Shell,
}

/// Arguments of `manual`.
#[derive(Debug, clap::Args)]
pub struct ManualArgs {
    /// The folder that gets a page for each command
    #[arg(value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub folder: PathBuf,
}

/// What every command that generates text takes.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub answer: AnswerArgs,
    #[command(flatten)]
    pub draft: DraftArgs,
    #[command(flatten)]
    pub report: ReportArgs,
}

/// Which model.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// A checkpoint's directory, a hub id such as Qwen/Qwen3-8B, or `demo` [default: what the variable WARPDRAFT_MODEL
    /// says, else demo]
    #[arg(long, short, value_name = "MODEL", value_hint = ValueHint::DirPath)]
    pub model: Option<String>,
    /// Branch, tag or commit of a model on the hub
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// What the layers' matrices are to be: as the checkpoint has them, or rounded while loading
    #[arg(long, value_enum, value_name = "HOW", default_value_t = WeightsKind::Auto)]
    pub weights: WeightsKind,
}

/// What the matrices of layers are to be; embedding, head and norms stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WeightsKind {
    /// As they are stored; on the device packed without loss beside that, where steps are faster so and memory has room
    Auto,
    /// As they are stored
    Plain,
    /// As they are stored, packed without loss, and in no other form: the least memory
    Packed,
    /// FP8 (e4m3) with a scale for each block of 128 × 128
    Fp8,
    /// Int4 by round to nearest, in groups of 128 inputs
    Int4,
}

impl WeightsKind {
    /// The device options that these weights call for; the rest is taken from `others`.
    pub fn device_options(self, others: DeviceOptions) -> DeviceOptions {
        match self {
            Self::Auto | Self::Fp8 | Self::Int4 => others,
            Self::Plain => DeviceOptions { lossless: Some(false), ..others },
            Self::Packed => DeviceOptions { lossless: Some(true), plain_beside: Some(false), ..others },
        }
    }
}

/// Where to run, and with how much room.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// auto (the first CUDA card, else the CPU), cpu, cuda, cuda:N, or emulator (the GPU's kernels on the CPU; slow)
    /// [default: what the variable WARPDRAFT_DEVICE says, else auto]
    #[arg(long, value_name = "DEVICE", value_hint = ValueHint::Other)]
    pub device: Option<DeviceChoice>,
    /// Most tokens of prompt and answer together [default: 8192, or the model's most if that is less; in a batch on a
    /// card the model's most, as far as there is memory]
    #[arg(long, value_name = "N", value_parser = context, allow_negative_numbers = true)]
    pub context: Option<usize>,
    #[command(flatten)]
    pub kernels: KernelArgs,
}

/// Which kernels a device runs.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Device")]
pub struct KernelArgs {
    /// Load the kernels of this file, PTX or machine code, instead of those that are built in; it is trusted
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, hide_short_help = true)]
    pub kernels: Option<PathBuf>,
    /// Run the kernels of this level, sm_80, sm_90 or sm_90a, for tests of what other cards do [default: the card's]
    #[arg(long, value_name = "LEVEL", hide_short_help = true)]
    pub level: Option<Level>,
    /// With kernels of sm_80 or sm_90, use no more shared memory of a CTA than so many bytes, such as 99KiB: likewise
    #[arg(long, value_name = "SIZE", value_parser = shared_memory, hide_short_help = true)]
    pub shared_memory: Option<u32>,
    /// From Hopper on and on the emulator, run a decode step as a launch for each operator, for comparison
    #[arg(long, hide_short_help = true)]
    pub unfused: bool,
}

impl KernelArgs {
    /// The device options that these arguments call for.
    pub fn options(&self) -> DeviceOptions {
        let Self { kernels, level, shared_memory, unfused } = self;
        let kernels = kernels.as_ref().map(trusted);
        let (level, shared_bytes, unfused) = (*level, *shared_memory, *unfused);
        DeviceOptions { level, shared_bytes, unfused, kernels, ..DeviceOptions::default() }
    }
}

/// The file of `--kernels`.
pub fn trusted(path: &PathBuf) -> KernelFile {
    // SAFETY: whoever names it answers for it, as the flag's help says.
    unsafe { KernelFile::trusted(path) }
}

/// How the answer is made, and where it ends.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Answer")]
pub struct AnswerArgs {
    /// Most tokens to generate [default: 256; with a chat template, as many as the context holds]
    #[arg(long, short = 'n', value_name = "N", value_parser = at_least_one, allow_negative_numbers = true)]
    pub max_tokens: Option<usize>,
    /// Divides the logits; 0 is greedy [default: the checkpoint's]
    #[arg(long, short, value_name = "T", value_parser = setting(|all, value| all.temperature = value), allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all [default: the checkpoint's]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens that together have probability P; 1 keeps all [default: the checkpoint's]
    #[arg(long, value_name = "P", value_parser = setting(|all, value| all.top_p = value), allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the likeliest; 0 keeps all [default: the checkpoint's]
    #[arg(long, value_name = "P", value_parser = setting(|all, value| all.min_p = value), allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make every token of prompt and answer less likely by this factor; 1 is off [default: the checkpoint's]
    #[arg(long, value_name = "X", value_parser = setting(|all, value| all.repetition_penalty = value), allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Subtract this from the logit of every token in the answer; 0 is off
    #[arg(long, value_name = "X", default_value = "0", value_parser = setting(|all, value| all.presence_penalty = value), allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Subtract this for each time that the token is in the answer; 0 is off
    #[arg(long, value_name = "X", default_value = "0", value_parser = setting(|all, value| all.frequency_penalty = value), allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Seed of the random numbers; the same seed gives the same text [default: random, shown in the summary; batch: 0]
    #[arg(long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// End the answer before this text (may be given several times)
    #[arg(long, value_name = "TEXT", action = ArgAction::Append, allow_hyphen_values = true, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Go on past the model's end tokens
    #[arg(long)]
    pub ignore_eos: bool,
}

/// Drafting: fewer steps for the same text.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Drafting (changes the speed, never the text)")]
pub struct DraftArgs {
    /// Who proposes tokens ahead of the model: none, auto (what followed the same few tokens earlier in the text),
    /// ngram (the same), model:MODEL (a small model of the same family, where nothing like the text came earlier),
    /// model-only:MODEL, eagle3:HEAD (an EAGLE-3 head that was made for the model, likewise), or eagle3-only:HEAD
    #[arg(long, value_name = "HOW", default_value = "auto", value_hint = ValueHint::Other)]
    pub draft: DraftKind,
    /// Most drafts of a step, 1 to 15 [default: 7; 15 of a model or a head]
    #[arg(long, value_name = "N",
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=NgramDraft::MOST_TOKENS as i64))]
    pub draft_tokens: Option<u32>,
    /// Most drafts by a model or a head that follow each other
    #[arg(long, value_name = "N", default_value_t = ModelDraft::default().depth,
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=NgramDraft::MOST_TOKENS as i64))]
    pub draft_depth: u32,
    /// How many of the likeliest tokens after a draft by a model or a head may be drafts, 1 to 4: above 1 drafts are a
    /// tree (from Hopper on; elsewhere, and in batches, they are a chain)
    #[arg(long, value_name = "N", default_value_t = ModelDraft::default().branches,
          allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=ModelDraft::MOST_BRANCHES as i64))]
    pub draft_branches: u32,
    /// Run every draft that is proposed, however few of them were right of late
    #[arg(long)]
    pub draft_always: bool,
    /// Longest run of tokens to look for earlier in the text
    #[arg(long, value_name = "N", default_value_t = NgramDraft::default().max, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub ngram_max: u32,
    /// Shortest run of tokens to look for
    #[arg(long, value_name = "N", default_value_t = NgramDraft::default().min, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub ngram_min: u32,
}

/// How tokens are drafted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftKind {
    /// Not at all: a token a step
    None,
    /// What followed the same few tokens earlier in the text
    Ngram,
    /// A model
    Model {
        /// As with --model.
        which: String,
        /// Whether only the model drafts, and the text is not searched.
        alone: bool,
    },
    /// An EAGLE-3 head
    Eagle3 {
        /// A directory or a hub id.
        which: String,
        /// Whether only the head drafts, and the text is not searched.
        alone: bool,
    },
}

impl std::str::FromStr for DraftKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let model = |which: &str, alone| Self::Model { which: which.into(), alone };
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            None if text == "auto" || text == "ngram" => Ok(Self::Ngram),
            Some(("eagle3" | "eagle3-only", "")) => Err(format!("{text} lacks the head, as in {text}./my-head")),
            Some(("eagle3", which)) => Ok(Self::Eagle3 { which: which.into(), alone: false }),
            Some(("eagle3-only", which)) => Ok(Self::Eagle3 { which: which.into(), alone: true }),
            Some(("model" | "model-only", "")) => Err(format!("{text} lacks the model, as in {text}Qwen/Qwen3-0.6B")),
            Some(("model", which)) => Ok(model(which, false)),
            Some(("model-only", which)) => Ok(model(which, true)),
            _ => Err(format!(
                "{text} is none of none, auto, ngram, model:MODEL, model-only:MODEL, eagle3:HEAD, eagle3-only:HEAD"
            )),
        }
    }
}

/// What is said beside the text.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Output")]
pub struct ReportArgs {
    /// No summary and no progress
    #[arg(long, short, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Also tokens per step, and what the program does (RUST_LOG chooses finer)
    #[arg(long, short)]
    pub verbose: bool,
    /// Print a JSON object instead of text: tokens, why it ended, statistics, device
    #[arg(long)]
    pub json: bool,
}

/// Parses a number of tokens that leaves room for a token of the prompt and one of the answer.
fn context(text: &str) -> Result<usize, String> {
    whole(text, 2)
}

/// Parses a whole number that is at least `least`.
fn whole(text: &str, least: usize) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(n) if n >= least => Ok(n),
        Err(error) if *error.kind() == IntErrorKind::PosOverflow => Err("it must be below 2^64".into()),
        _ => Err(format!("it must be a whole number, {least} or more")),
    }
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("it must be a whole number from 0 to {}", u64::MAX))
}

/// Parses a number of bytes, such as `4GiB` or `4096`.
fn bytes(text: &str) -> Result<u64, String> {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("", 1)];
    let (number, unit) =
        units.iter().find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit))).unwrap_or((text, 1));
    match number.trim().parse::<u64>().ok().and_then(|n| n.checked_mul(unit)) {
        None => Err("it must be a whole number, or one with KiB, MiB or GiB".into()),
        Some(0) => Err("it must be 1 or more".into()),
        Some(bytes) => Ok(bytes),
    }
}

/// Parses the bytes of shared memory that a CTA may use.
fn shared_memory(text: &str) -> Result<u32, String> {
    bytes(text)?.try_into().map_err(|_| "it must be less than 4GiB".into())
}

fn at_least_one(text: &str) -> Result<usize, String> {
    whole(text, 1)
}

/// A parser of a setting of the sampler. Its range is the one that [`Sampling::check`] knows.
fn setting(set: fn(&mut Sampling, f32)) -> impl Fn(&str) -> Result<f32, String> + Clone {
    move |text| {
        let value = text.parse().map_err(|_| "it must be a number".to_owned())?;
        let mut sampling = Sampling::default();
        set(&mut sampling, value);
        match sampling.check() {
            Ok(()) => Ok(value),
            Err(model::Error::SamplingRange { reason, .. }) => Err(reason.into()),
            Err(other) => Err(other.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::{Args, bytes};

    #[test]
    fn bytes_may_have_units() {
        assert_eq!(bytes("4GiB"), Ok(4 << 30));
        assert_eq!(bytes("164 MiB"), Ok(164 << 20));
        assert_eq!(bytes("656"), Ok(656));
        for bad in ["", "GiB", "-1", "1.5GiB", "4GB", "0", "99999999999GiB"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_definitions_are_consistent() {
        Args::command().debug_assert();
    }
}
