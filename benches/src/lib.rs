//! Everything that only measures: benchmarks, which compare each kernel with the limit of the card that it runs on, and
//! operators that serve no request.
//!
//! - [`Bench`] is the harness: it checks a case, times it, and compares it with what the card can do. [`cases`] are
//!   what `warpdraft bench` runs in it.
//! - [`ngram`] and [`token_copy`] are the published operators over whole batches and regions, with their ladders.
//! - [`gemm`] and [`unfused`] are what the forward pass is compared with.
//! - `benches/kernels` has their device routines. They are a PTX module of their own, [`MODULES`], with which a device
//!   is [opened](device).
//!
//! The examples measure more than a command should: `cargo run --release --package benches --example NAME`.
//! `cargo bench --package benches` runs Criterion's benchmarks of the host-side parts.

pub mod cases;
pub mod forms;
pub mod gemm;
mod harness;
pub mod ngram;
mod pool;
pub mod random;
mod repository;
mod run;
mod script;
mod statistics;
mod subject;
pub mod token_copy;

use host::device::{Device, DeviceOptions, Image};

pub use harness::{Bench, BenchError, Case, Event, Figures, Label, Limit, LimitKind, Limits, Path, Row, Unit, Work};
pub use pool::Pool;
pub use random::Random;
pub use repository::{demo, repository, text};
pub use run::Run;
pub use script::draft_by_script;
pub use statistics::Samples;
pub use subject::{Arguments, WeightsArgument, shape, tokens};

/// The kernels of `benches/kernels`, for each level that a card may have: what [`DeviceOptions::modules`] takes.
pub static MODULES: &[Image] = &include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Options of a device that has the kernels for measuring too.
pub fn options() -> DeviceOptions {
    DeviceOptions { modules: MODULES, lossless: Some(false), plain_beside: Some(false), ..DeviceOptions::default() }
}

/// CUDA card `ordinal`, with the kernels for measuring.
///
/// # Errors
/// As [`Device::cuda`].
pub fn device(ordinal: u32) -> Result<Device, host::Error> {
    Device::cuda_with(ordinal, &options())
}

#[cfg(test)]
mod tests {
    use cuda_std::Kernel;

    use super::MODULES;

    #[test]
    fn kernels_take_what_the_host_hands_them() {
        fn has<K: Kernel>(levels: &[&str]) {
            let digests = |arch: &str| {
                let images = MODULES.iter().filter(|image| (image.arch, image.module) == (arch, K::MODULE));
                let found = images.flat_map(|image| image.layouts).find(|(kernel, _)| *kernel == K::NAME);
                found.map(|(_, digest)| *digest)
            };
            for arch in ["sm_80", "sm_90", "sm_90a"] {
                let expected = levels.contains(&arch).then_some(K::LAYOUT);
                assert_eq!(digests(arch), expected, "{} for {arch}", K::NAME);
            }
        }
        let all = ["sm_80", "sm_90", "sm_90a"];
        has::<bench_kernels::ceilings::ceiling_mma>(&all);
        has::<bench_kernels::ngram::ngram_match_mixed_i64>(&all);
        has::<bench_kernels::ngram::peers::ngram_scan_share_i64>(&all);
        has::<bench_kernels::token_copy::token_copy_grouped_656_i32>(&all);
        has::<bench_kernels::script::draft_script>(&all);
        has::<bench_kernels::gemm::gemm_plain_4x2>(&["sm_90a"]);
        // The kernels of `gpu-kernels` are not built a second time.
        let others = MODULES.iter().flat_map(|image| image.layouts).filter(|(kernel, _)| *kernel == "sample");
        assert_eq!(others.count(), 0);
    }
}
