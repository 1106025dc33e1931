//! What `bench` measures. Sizes come from the flags; without flags they are the published sizes, or small ones on the
//! emulator.

use std::path::PathBuf;

use anyhow::bail;
use benches::cases::{attention, ceilings, decode, linear, ngram, token_copy};
use benches::ngram::{Hit, Published};
use host::DeviceChoice;
use host::device::{Device, DeviceOptions};
use model::format::Code;

use super::{Detail, Report, chosen_device};
use crate::args::bench::{
    AttentionArgs, BenchArgs, BenchCommand, CeilingsArgs, DecodeArgs, HitName, LinearArgs, NgramArgs, OrderName,
    TokenCopyArgs,
};
use crate::unfinished::folder_of;

/// What `bench` does.
#[derive(Debug)]
pub struct Bench {
    /// The device; never the CPU.
    pub device: DeviceChoice,
    /// How the device is opened.
    pub options: DeviceOptions,
    /// Measurements of each case.
    pub repeats: usize,
    /// What to measure, in order.
    pub groups: Vec<Group>,
    /// Where to draw the figures.
    pub plot: Option<PathBuf>,
    /// What to report.
    pub report: Report,
}

/// A benchmark with its sizes.
#[derive(Debug)]
pub enum Group {
    /// The card itself.
    Ceilings(ceilings::CeilingSizes),
    /// Linear layers.
    Linear(linear::LinearSizes),
    /// Attention.
    Attention(attention::AttentionSizes),
    /// A decode step.
    Decode(decode::DecodeSizes),
    /// The token-record gather.
    TokenCopy(token_copy::TokenCopySizes),
    /// Drafting by n-gram match.
    Ngram(ngram::NgramSizes),
}

impl Group {
    /// How many rows it gives on a device.
    pub fn cases(&self, device: &Device) -> usize {
        match self {
            Self::Ceilings(sizes) => sizes.cases(device),
            Self::Linear(sizes) => sizes.cases(),
            Self::Attention(sizes) => sizes.cases(),
            Self::Decode(sizes) => sizes.cases(),
            Self::TokenCopy(sizes) => sizes.cases(),
            Self::Ngram(sizes) => sizes.cases(),
        }
    }
}

/// Resolves the arguments of `bench`.
///
/// # Errors
/// If the device is unknown or has no kernels, or the plot cannot be written where it should go.
pub fn bench(args: BenchArgs) -> anyhow::Result<Bench> {
    let run = args.run;
    let device = chosen_device(run.device)?;
    if device == DeviceChoice::Cpu {
        bail!(
            "benchmarks measure the GPU's kernels, and --device cpu runs none; use --device cuda, or emulator to check them"
        );
    }
    if let Some(plot) = run.plot.as_ref().filter(|plot| !folder_of(plot).is_dir() || plot.is_dir()) {
        bail!("--plot {}: not a place for a file; name a file in a folder that exists", plot.display());
    }
    let small = device == DeviceChoice::Emulator;
    let all = matches!(args.what, BenchCommand::All);
    let named = match args.what {
        BenchCommand::Ceilings(args) => vec![ceilings_group(&args, small)],
        BenchCommand::Linear(args) => vec![linear_group(args, small)],
        BenchCommand::Attention(args) => vec![attention_group(args, small)],
        BenchCommand::Decode(args) => vec![decode_group(args, run.weights.code, small)],
        BenchCommand::TokenCopy(args) => vec![token_copy_group(args, small)],
        BenchCommand::Ngram(args) => vec![ngram_group(&args, small)],
        BenchCommand::All => vec![
            linear_group(LinearArgs::default(), small),
            attention_group(AttentionArgs::default(), small),
            decode_group(DecodeArgs::default(), run.weights.code, small),
            token_copy_group(TokenCopyArgs::default(), small),
            ngram_group(&NgramArgs::default(), small),
        ],
    };
    // On a card the limits are part of every run. The emulator has no limits, and only checks what was asked for.
    let own = matches!(named[..], [Group::Ceilings(_)]);
    let limits = (!own && (all || !small)).then(|| ceilings_group(&CeilingsArgs::default(), small));
    Ok(Bench {
        device,
        options: run.options(),
        repeats: run.repeats,
        groups: limits.into_iter().chain(named).collect(),
        plot: run.plot,
        report: Report { detail: if run.quiet { Detail::Quiet } else { Detail::Normal }, json: run.json },
    })
}

fn ceilings_group(args: &CeilingsArgs, small: bool) -> Group {
    let default = if small { ceilings::CeilingSizes::SMALL } else { ceilings::CeilingSizes::PUBLISHED };
    Group::Ceilings(ceilings::CeilingSizes {
        bytes: args.bytes.unwrap_or(default.bytes),
        bus_bytes: args.bus_bytes.unwrap_or(default.bus_bytes),
        ..default
    })
}

/// `given`, or `default` if it is empty.
fn or<T>(given: Vec<T>, default: Vec<T>) -> Vec<T> {
    if given.is_empty() { default } else { given }
}

fn linear_group(args: LinearArgs, small: bool) -> Group {
    let default = if small { linear::LinearSizes::small() } else { linear::LinearSizes::published() };
    let shapes = args.shape.into_iter().map(|(k, n)| linear::Shape::plain(k, n)).collect();
    Group::Linear(linear::LinearSizes { shapes: or(shapes, default.shapes), rows: or(args.rows, default.rows) })
}

fn attention_group(args: AttentionArgs, small: bool) -> Group {
    let default = if small { attention::AttentionSizes::small() } else { attention::AttentionSizes::published() };
    Group::Attention(attention::AttentionSizes {
        q_heads: args.query_heads.unwrap_or(default.q_heads),
        kv_heads: args.kv_heads.unwrap_or(default.kv_heads),
        contexts: or(args.context, default.contexts),
        rows: or(args.rows, default.rows),
    })
}

fn decode_group(args: DecodeArgs, code: Option<Code>, small: bool) -> Group {
    let default = if small { decode::DecodeSizes::small() } else { decode::DecodeSizes::published() };
    let (name, config) = args.size.unwrap_or((default.name, default.config));
    Group::Decode(decode::DecodeSizes {
        name,
        config,
        contexts: or(args.context, default.contexts),
        rows: or(args.rows, default.rows),
        code,
        tree: args.tree,
    })
}

fn token_copy_group(args: TokenCopyArgs, small: bool) -> Group {
    let default = if small { token_copy::TokenCopySizes::small() } else { token_copy::TokenCopySizes::published() };
    let orders = args.order.iter().map(|order| match order {
        OrderName::Random => token_copy::Order::Random,
        OrderName::Unique => token_copy::Order::Unique,
        OrderName::Sequential => token_copy::Order::Sequential,
    });
    let records = args.records.unwrap_or(default.records);
    Group::TokenCopy(token_copy::TokenCopySizes {
        records,
        slots: args.slots.unwrap_or(default.slots.max(records)),
        record_bytes: args.record_bytes.unwrap_or(default.record_bytes),
        orders: or(orders.collect(), default.orders),
        variants: or(args.variant, default.variants),
    })
}

fn ngram_group(args: &NgramArgs, small: bool) -> Group {
    let default = if small { ngram::NgramSizes::small() } else { ngram::NgramSizes::published() };
    let given = args.batch.is_some() || args.length.is_some() || args.threshold.is_some() || args.hit.is_some();
    let hit = match args.hit {
        Some(HitName::PromptEarly) => Hit::PromptEarly,
        Some(HitName::PromptLate) => Hit::PromptLate,
        Some(HitName::GeneratedEarly) => Hit::GeneratedEarly,
        Some(HitName::GeneratedLate) => Hit::GeneratedLate,
        None | Some(HitName::None) => Hit::None,
    };
    let one = Published {
        batch: args.batch.unwrap_or(if small { 4 } else { 32 }),
        length: args.length.unwrap_or(if small { 80 } else { 512 }),
        threshold: args.threshold.unwrap_or(128),
        hit,
    };
    let cases = if given { vec![one] } else { default.cases };
    Group::Ngram(ngram::NgramSizes { cases, peers: args.peers || default.peers })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, Command};

    fn bench_from(line: &[&str]) -> anyhow::Result<Bench> {
        let args = Args::try_parse_from(["warpdraft", "bench"].iter().chain(line))?;
        match args.command {
            Command::Bench(args) => bench(args),
            other => panic!("not bench: {other:?}"),
        }
    }

    #[test]
    fn a_card_gets_the_published_sizes_after_its_own_limits() {
        let bench = bench_from(&["linear", "--device", "cuda"]).unwrap();
        assert!(matches!(bench.groups[0], Group::Ceilings(ceilings::CeilingSizes::PUBLISHED)));
        let Group::Linear(sizes) = &bench.groups[1] else { panic!("{:?}", bench.groups) };
        assert_eq!(*sizes, linear::LinearSizes::published());
    }

    #[test]
    fn the_emulator_gets_small_sizes_and_what_was_asked_for() {
        let bench = bench_from(&["attention", "--device", "emulator", "--rows", "2,3"]).unwrap();
        let [Group::Attention(sizes)] = &bench.groups[..] else { panic!("{:?}", bench.groups) };
        assert_eq!(*sizes, attention::AttentionSizes { rows: vec![2, 3], ..attention::AttentionSizes::small() });
    }

    #[test]
    fn the_processor_has_no_kernels() {
        assert!(bench_from(&["all", "--device", "cpu"]).unwrap_err().to_string().contains("emulator"));
    }

    #[test]
    fn flags_may_stand_after_the_benchmark() {
        let bench = bench_from(&["ceilings", "--bytes", "1MiB", "--device", "emulator", "--repeats", "3"]).unwrap();
        assert_eq!(bench.repeats, 3);
        assert!(matches!(bench.groups[..], [Group::Ceilings(sizes)] if sizes.bytes == 1 << 20));
    }
}
