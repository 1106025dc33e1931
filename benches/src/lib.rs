//! Everything that only measures: benchmarks of each kernel beside the limit of the card that it runs on, and the
//! operators that answer nobody's request.
//!
//! - [`Bench`] is the harness: it checks a case, times it, and sets it beside what the card can do. [`cases`] are what
//!   `warpdraft bench` runs in it.
//! - [`ngram`] and [`token_copy`] are the published operators over whole batches and regions, with their ladders.
//! - [`gemm`] and [`unfused`] are what the forward pass is compared with.
//! - `benches/kernels` has their device routines. They are a PTX module of their own, [`MODULES`], which a device is
//!   [opened](device) with.
//!
//! The examples measure more than a command should: `cargo run --release --package benches --example NAME`. `cargo
//! bench --package benches` are Criterion's, of the host-side parts.

pub mod cases;
pub mod gemm;
mod harness;
pub mod ngram;
mod pool;
pub mod random;
mod repository;
mod script;
mod statistics;
mod subject;
pub mod token_copy;
pub mod unfused;

use host::device::{Device, DeviceOptions, Image};

pub use harness::{Bench, BenchError, Case, Event, Figures, Label, Limit, LimitKind, Limits, Path, Row, Unit, Work};
pub use pool::Pool;
pub use random::Random;
pub use repository::{demo, repository, text};
pub use script::draft_by_script;
pub use statistics::Samples;
pub use subject::{Arguments, tokens};

/// The kernels of `benches/kernels`, for each level that a card may have: what [`DeviceOptions::modules`] takes.
pub static MODULES: &[Image] = &include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Options of a device that has the kernels for measuring too.
pub fn options() -> DeviceOptions {
    DeviceOptions { modules: MODULES, ..DeviceOptions::default() }
}

/// CUDA card `ordinal`, with the kernels for measuring.
///
/// # Errors
/// As [`Device::cuda`].
pub fn device(ordinal: u32) -> Result<Device, host::Error> {
    Device::cuda_with(ordinal, &options())
}
