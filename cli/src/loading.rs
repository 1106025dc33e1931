//! From a model's name to a running engine, with progress on the way.

use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Context;
use host::batch::{Batch, BatchOptions};
use host::{Engine, LoadOptions};
use model::checkpoint::OpenOptions;
use model::source::HubOptions;
use model::{Checkpoint, Source};
use tracing_subscriber::EnvFilter;

use crate::interrupt::Deferred;
use crate::progress::Progress;
use crate::resolve::Report;

/// Finds the checkpoint, downloads it if need be, and opens it. `check` reads every weight, to find NaN and
/// infinity; a model that is about to be loaded is checked then.
///
/// # Errors
/// Whatever is wrong with the files or the download.
pub fn open(source: &Source, check: bool, report: Report) -> Result<Checkpoint, model::Error> {
    let progress = Progress::new(&format!("opening {source}"), report.is_told());
    let options = OpenOptions { check_finite: check };
    let begun = Instant::now();
    let opened = source.resolve_with(&HubOptions::default(), options, &mut |download| {
        progress.bytes(download.bytes, download.total_bytes);
    });
    tracing::debug!("opening the checkpoint: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    opened
}

/// Loads the model where it is to run.
///
/// # Errors
/// As [`open`]; no such device, or one too small; an interrupt.
pub fn load(checkpoint: Checkpoint, options: LoadOptions, report: Report) -> Result<Engine, host::Error> {
    with_progress(report, |progress| Engine::load(checkpoint, options, progress))
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
    with_progress(report, |progress| Batch::load(checkpoint, load, options, progress))
}

/// Shows how far `load` is, and has an interrupt stop it.
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

/// Sends the log of all crates to standard error: warnings, or with `--verbose` what is being done; `RUST_LOG` overrules both.
///
/// # Errors
/// If `RUST_LOG` cannot be understood.
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
        .log_internal_errors(false)
        .without_time()
        .init();
    Ok(())
}
