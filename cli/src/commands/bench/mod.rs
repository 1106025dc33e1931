//! `warpdraft bench`: the kernels beside the card's limits.

mod json;
mod plot;
mod table;

use anyhow::Context;
use benches::cases::{attention, ceilings, decode, linear, ngram, token_copy};
use benches::{Event, Limits, Row};
use host::device::{Device, DeviceOptions};
use host::{DeviceChoice, Error};

use crate::progress::Progress;
use crate::resolve::bench::{Bench, Group};
use crate::unfinished::Unfinished;
use crate::{Ending, loading, output};

/// What to use without a card.
const EMULATOR: &str =
    "`--device emulator` runs each kernel once on the CPU, at a small size, and checks it (it times nothing)";

/// All results, for the table, JSON and the plot.
struct Outcome<'a> {
    device: &'a str,
    /// How often each case was measured; `None` on the emulator.
    repeats: Option<usize>,
    limits: Limits,
    rows: &'a [Row],
}

/// Runs the command.
///
/// # Errors
/// If there is no card, too little memory, a wrong result, a plot that cannot be written, or a closed pipe.
pub fn run(command: Bench) -> anyhow::Result<Ending> {
    loading::start_log(command.report)?;
    let device = open(command.device, &command.options)?;
    let total: usize = command.groups.iter().map(|group| group.cases(&device)).sum();
    let progress = Progress::new("benchmarks", command.report.is_told());
    let mut done = 0;
    let mut watch = |event: Event<'_>| match event {
        Event::Begin(label) => progress.cases(done, total, &label.to_string()),
        Event::Done(_) => done += 1,
    };
    let mut bench = benches::Bench::new(&device, command.repeats, &mut watch)?;
    for group in &command.groups {
        match group {
            Group::Ceilings(sizes) => ceilings::run(&mut bench, *sizes)?,
            Group::Linear(sizes) => linear::run(&mut bench, sizes)?,
            Group::Attention(sizes) => attention::run(&mut bench, sizes)?,
            Group::Decode(sizes) => decode::run(&mut bench, sizes)?,
            Group::TokenCopy(sizes) => token_copy::run(&mut bench, sizes)?,
            Group::Ngram(sizes) => ngram::run(&mut bench, sizes)?,
        }
    }
    let (repeats, limits) = (bench.is_timed().then_some(command.repeats), *bench.limits());
    let rows = bench.into_rows();
    // The bar must be gone before the table is printed.
    drop(progress);
    let outcome = Outcome { device: device.name(), repeats, limits, rows: &rows };
    if let Some(path) = &command.plot {
        let svg = plot::draw(&outcome)?;
        let write = |mut file: Unfinished| file.write(svg.as_bytes()).and_then(|()| file.replace(path));
        let written = Unfinished::beside(path).and_then(write);
        written.with_context(|| format!("cannot write the plot to {}", path.display()))?;
    }
    if command.report.json {
        output::print_json(&json::of(&outcome), true)?;
    } else {
        output::print(&table::table(&outcome))?;
    }
    Ok(Ending::Done)
}

fn open(choice: DeviceChoice, options: &DeviceOptions) -> anyhow::Result<Device> {
    let ordinal = match choice {
        DeviceChoice::Emulator => return choice.open(options)?.context("the emulator is a device"),
        DeviceChoice::Auto if host::device::cards()?.is_empty() => {
            anyhow::bail!("no CUDA card was found, and benchmarks measure one; {EMULATOR}")
        }
        DeviceChoice::Cuda(ordinal) => ordinal,
        DeviceChoice::Auto | DeviceChoice::Cpu => 0,
    };
    Device::cuda_with(ordinal, options).map_err(|error| match error {
        Error::NoCuda { reason } => anyhow::anyhow!("no usable CUDA card: {reason}; {EMULATOR}"),
        other => other.into(),
    })
}
