//! The benchmarks' kernels, run lane by lane under the emulator, against plain references.

mod ceilings;
#[path = "../../../../gpu-kernels/tests/it/common/mod.rs"]
mod common;
mod gemm;
mod ngram;
mod token_copy;
