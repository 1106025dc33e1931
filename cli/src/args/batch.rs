//! The arguments of `batch`.

use std::collections::HashMap;
use std::path::PathBuf;

use clap::{Subcommand, ValueHint};
use host::DeviceChoice;
use host::batch::BatchOptions;

use super::{RunArgs, at_least_one};

/// Examples for `batch --help`.
pub const EXAMPLES: &str = "\
Examples:
  warpdraft batch requests.jsonl -o results.jsonl --model Qwen/Qwen3-8B
  warpdraft batch requests.jsonl.zst -o results.jsonl.zst --ordered --json > metrics.json
  zcat requests.jsonl.gz | warpdraft batch - -o - --quiet | jq '.response.body.choices[0]'
  warpdraft batch requests.jsonl -o results.jsonl --devices all
  warpdraft batch requests.jsonl -o part-2.jsonl --shard 2/8         the third of eight shares
  warpdraft batch merge part-*.jsonl -o results.jsonl

A run that was stopped, by whatever, is taken up again by the same command: what is in the output is not done again.";

const MERGE_EXAMPLES: &str = "\
Examples:
  warpdraft batch merge part-*.jsonl -o results.jsonl
  warpdraft batch merge part-*.jsonl.gz -o results.jsonl.gz --requests requests.jsonl";

/// Arguments of `batch`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BatchArgs {
    #[command(subcommand)]
    pub command: Option<BatchCommand>,
    /// Requests, a JSON object a line, in OpenAI's batch format or as {"prompt": …}; `-` is standard input; .gz and
    /// .zst are read
    #[arg(value_name = "REQUESTS", required = true, value_hint = ValueHint::FilePath)]
    pub requests: Option<PathBuf>,
    /// Where results go, a JSON object a line; `-` is standard output; a name with .gz or .zst is written so
    #[arg(long, short, value_name = "RESULTS", required = true, value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    /// Write results in the order of the requests, not as they come
    #[arg(long)]
    pub ordered: bool,
    /// Do share I of N, counted from 0; a request is always in the same share
    #[arg(long, value_name = "I/N", value_parser = shard)]
    pub shard: Option<Shard>,
    /// Let the model think before it answers messages (the default)
    #[arg(long, overrides_with = "no_think")]
    pub think: bool,
    /// Have the model answer messages without thinking first
    #[arg(long, overrides_with = "think")]
    pub no_think: bool,
    #[command(flatten)]
    pub run: RunArgs,
    /// Several devices, each with requests of its own: `all` (every CUDA card), or a list such as cuda:0,cuda:1;
    /// --device counts no more then
    #[arg(long, value_name = "DEVICES", value_parser = devices, help_heading = "Device")]
    pub devices: Option<Devices>,
    // This must come last: arguments after it would get its heading.
    #[command(flatten)]
    pub size: SizeArgs,
}

/// What a batch may use.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Batch (changes the speed, never the text)")]
pub struct SizeArgs {
    /// Most requests that are answered at once, up to 1024 [default: 512 to 1024 on an H200, as memory allows; 512 on
    /// an H100, else 256; 32 on the CPU]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(BatchOptions::MOST_SEQUENCES)))]
    pub sequences: Option<u32>,
    /// Most tokens of a step, of prompts and answers together [default: 8192 on Hopper, else 256; 128 on the CPU]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub step_rows: Option<u32>,
    /// Tokens that the cache holds, of all requests together; at least a context [default: what there is memory for; 1
    /// GiB on the CPU]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = at_least_one)]
    pub cache_tokens: Option<usize>,
    /// Tokens that are kept aside when the cache is full, rather than computed again [default: as many, on a card up to
    /// 4 GiB]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub swap_tokens: Option<usize>,
    /// Draft while a step has fewer rows than this
    #[arg(long, value_name = "N", allow_negative_numbers = true, default_value_t = BatchOptions::DRAFT_ROWS)]
    pub draft_rows: u32,
}

/// The commands within `batch`.
#[derive(Debug, Subcommand)]
pub enum BatchCommand {
    /// Put the results of shards together, in the order of the requests
    #[command(after_help = MERGE_EXAMPLES)]
    Merge(MergeArgs),
}

/// Arguments of `batch merge`.
#[derive(Debug, clap::Args)]
pub struct MergeArgs {
    /// Results of shards
    #[arg(value_name = "RESULTS", required = true, value_hint = ValueHint::FilePath)]
    pub shards: Vec<PathBuf>,
    /// Where all of them go: a new file, or `-`
    #[arg(long, short, value_name = "RESULTS", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Check that every one of these requests has its result
    #[arg(long, value_name = "REQUESTS", value_hint = ValueHint::FilePath)]
    pub requests: Option<PathBuf>,
    /// No summary
    #[arg(long, short)]
    pub quiet: bool,
}

/// A share of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which share, counted from 0.
    pub index: u64,
    /// How many shares there are.
    pub count: u64,
}

/// Which devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// Every CUDA card.
    All,
    /// The devices of a list.
    These(Vec<DeviceChoice>),
}

fn devices(text: &str) -> Result<Devices, String> {
    if text == "all" {
        return Ok(Devices::All);
    }
    let (mut devices, mut cards) = (Vec::new(), HashMap::new());
    for name in text.split(',') {
        let device = name.parse()?;
        let card = match device {
            DeviceChoice::Auto => Some(0),
            DeviceChoice::Cuda(number) => Some(number),
            DeviceChoice::Cpu | DeviceChoice::Emulator => None,
        };
        // A card has memory for one model and its cache.
        if let Some(card) = card
            && let Some(other) = cards.insert(card, name)
        {
            return Err(format!("cuda:{card} is there twice, as {other} and {name}; name each card once"));
        }
        devices.push(device);
    }
    Ok(Devices::These(devices))
}

fn shard(text: &str) -> Result<Shard, String> {
    let numbers = text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
    match numbers {
        Some((index, count)) if index < count => Ok(Shard { index, count }),
        Some((_, 0)) => Err("there must be a share or more, as in 0/1".into()),
        Some((_, count)) => {
            Err(format!("the first number must be less than the second; shares count from 0 to {count} - 1"))
        }
        None => Err("it must be two numbers, as in 0/4".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_card_of_a_list_is_there_once() {
        let these = |devices: &[DeviceChoice]| Ok(Devices::These(devices.to_vec()));
        assert_eq!(devices("all"), Ok(Devices::All));
        assert_eq!(devices("cuda,cuda:2"), these(&[DeviceChoice::Cuda(0), DeviceChoice::Cuda(2)]));
        // These have no memory of their own that could be full.
        assert_eq!(devices("cpu,cpu"), these(&[DeviceChoice::Cpu; 2]));
        for (list, said) in [
            ("cuda:1,cuda:1", "cuda:1 is there twice, as cuda:1 and cuda:1"),
            ("cuda,cuda:1,cuda:0", "cuda:0 is there twice, as cuda and cuda:0"),
            ("cuda:0,auto", "cuda:0 is there twice, as cuda:0 and auto"),
        ] {
            let error = devices(list).unwrap_err();
            assert!(error.contains(said) && error.ends_with("name each card once"), "{list}: {error}");
        }
        assert!(devices("cuda:0,gpu").is_err());
    }
}
