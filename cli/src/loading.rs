//! From a model's name to a running engine, with progress.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Context;
use host::batch::{Batch, BatchOptions};
use host::{DeviceChoice, DraftCheckpoint, Engine, LoadOptions};
use model::checkpoint::OpenOptions;
use model::source::HubOptions;
use model::{Checkpoint, DownloadProgress, Outline, Source, WeightsMode};
use tracing_subscriber::EnvFilter;

use crate::interrupt::Deferred;
use crate::output::note;
use crate::progress::Progress;
use crate::resolve::{DraftSource, Report};

/// Finds the checkpoint, downloads it if necessary, and opens it. If the model is to be loaded, loading checks for NaN
/// and infinity; opening then need not.
///
/// # Errors
/// If anything is wrong with the files or the download.
pub fn open(source: &Source, options: OpenOptions, report: Report) -> Result<Checkpoint, model::Error> {
    let progress = Progress::new(&format!("opening {source}"), report.is_told());
    let begun = Instant::now();
    let opened = source.resolve_with(&HubOptions::default(), options, &mut |download| {
        progress.bytes(download.bytes, download.total_bytes);
    });
    drop(progress);
    tracing::debug!("opening the checkpoint: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    if let Ok(checkpoint) = &opened {
        warn(&checkpoint.warnings);
        if report.is_verbose() {
            let (bytes, tensors) = (host::gib(checkpoint.stored_bytes()), checkpoint.tensors().len());
            note(&format!("opened {source} in {:.2} s: {bytes} in {tensors} tensors", begun.elapsed().as_secs_f64()));
        }
    }
    opened
}

/// Opens the draft model or head, if there is one. A draft model's weights are read when they are loaded.
///
/// # Errors
/// As [`open`].
pub fn open_draft(source: Option<&DraftSource>, report: Report) -> Result<Option<DraftCheckpoint>, model::Error> {
    let options = OpenOptions { check_finite: false, ..OpenOptions::default() };
    Ok(match source {
        None => None,
        Some(DraftSource::Model(source)) => Some(open(source, options, report)?.into()),
        Some(DraftSource::Eagle3(source)) => {
            let progress = Progress::new(&format!("opening {source}"), report.is_told());
            let told = &mut |download: DownloadProgress| progress.bytes(download.bytes, download.total_bytes);
            Some(source.resolve_head(&HubOptions::default(), told)?.into())
        }
    })
}

/// What can be known about a model on the hub without fetching it; `None` for a model on this machine.
///
/// # Errors
/// If anything is wrong with the hub or with what it has.
pub fn outline(source: &Source, weights: WeightsMode, report: Report) -> Result<Option<Outline>, model::Error> {
    let progress = Progress::new(&format!("reading about {source}"), report.is_told());
    let outline = source.outline(&HubOptions::default(), weights);
    drop(progress);
    if let Ok(Some(outline)) = &outline {
        warn(&outline.warnings);
    }
    outline
}

fn warn(warnings: &[String]) {
    for warning in warnings {
        note(&format!("warpdraft: warning: {warning}"));
    }
}

/// Loads the model onto its device.
///
/// # Errors
/// As [`open`]; also if there is no such device, it is too small, or the user interrupts.
pub fn load(checkpoint: Checkpoint, options: LoadOptions, report: Report) -> Result<Engine, host::Error> {
    announce_cpu(&checkpoint, options.device, report);
    let begun = Instant::now();
    let engine = with_progress(report, |progress| Engine::load(checkpoint, options, progress))?;
    tell_loaded(&engine.device(), engine.context(), begun, report);
    Ok(engine)
}

/// Loads the model for a batch.
///
/// # Errors
/// As [`load`].
pub fn load_batch(
    checkpoint: Checkpoint,
    load: LoadOptions,
    options: BatchOptions,
    report: Report,
) -> Result<Batch, host::Error> {
    announce_cpu(&checkpoint, load.device, report);
    let begun = Instant::now();
    let batch = with_progress(report, |progress| Batch::load(checkpoint, load, options, progress))?;
    tell_loaded(&batch.device(), batch.context(), begun, report);
    Ok(batch)
}

/// Says, before the wait, that the model will run on the CPU and how slow it will be, if nobody asked for the CPU.
fn announce_cpu(checkpoint: &Checkpoint, device: DeviceChoice, report: Report) {
    let without_card = device == DeviceChoice::Auto && host::device::cards().is_ok_and(|cards| cards.is_empty());
    if !without_card || !report.is_told() {
        return;
    }
    note(&format!("no usable CUDA card: running on the CPU{}", slowness(checkpoint)));
}

/// How long a token takes on a CPU, if that is long. Each token reads all weights, and few machines read more than
/// about 20 GB a second.
fn slowness(checkpoint: &Checkpoint) -> String {
    const BYTES_A_SECOND: f64 = 20e9;
    let element = checkpoint.cpu_bytes() as f64 / checkpoint.config.parameter_count() as f64;
    let bytes = checkpoint.config.step_weight_bytes(1) as f64 * element;
    let seconds = bytes / BYTES_A_SECOND;
    if seconds < 0.05 {
        return String::new();
    }
    format!(", where each token takes {seconds:.1} s or more (it reads {} of weights)", host::gib(bytes as u64))
}

fn tell_loaded(device: &str, context: usize, begun: Instant, report: Report) {
    if report.is_verbose() {
        let seconds = begun.elapsed().as_secs_f64();
        note(&format!("loaded on {device} in {seconds:.2} s, with room for {context} tokens"));
    }
}

/// Shows the progress of `load`, and lets an interrupt stop it.
fn with_progress<T>(
    report: Report,
    load: impl FnOnce(&mut host::Progress<'_>) -> Result<T, host::Error>,
) -> Result<T, host::Error> {
    let progress = Progress::new("loading", report.is_told());
    let interrupt = Deferred::new();
    let begun = Instant::now();
    let loaded = load(&mut |done, total| {
        progress.bytes(done, total);
        if interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    tracing::debug!("loading the model, all in all: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    if interrupt.asked() { Err(host::Error::Interrupted) } else { Ok(loaded) }
}

/// Sends the log of all crates to standard error: warnings, or with `--verbose` also what is being done. `RUST_LOG`
/// overrides both.
///
/// # Errors
/// If `RUST_LOG` is not a valid filter.
pub fn start_log(report: Report) -> anyhow::Result<()> {
    let default = if report.is_verbose() { "warn,warpdraft=debug,host=debug,model=debug" } else { "warn" };
    let filter = match std::env::var("RUST_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text)
            .with_context(|| format!("the variable RUST_LOG ({text}) is not a filter such as `host=debug`"))?,
        _ => EnvFilter::new(default),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
        .log_internal_errors(false)
        .without_time()
        .init();
    Ok(())
}
