//! The batched decode kernels: for each weight format, and for each height of tiles.

#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::Kernel;

use super::{BatchedStep, CLUSTER, THREADS, batched};
use crate::weights::{Fp8, Int4, Lossless, Plain, Quantized};

entry_points! {
    (threads = THREADS, min_blocks = 1, cluster = CLUSTER) of BatchedStep:

    /// The phases of a step of up to 64 rows.
    batched_64: batched::<Plain, 64, 8>;
    /// [`batched_64`] for packed weights.
    batched_64_lossless: batched::<Lossless, 64, 8>;
    /// [`batched_64`] for FP8 codes.
    batched_64_fp8: batched::<Quantized<Fp8>, 64, 8>;
    /// [`batched_64`] for int4 codes.
    batched_64_int4: batched::<Quantized<Int4<1>>, 64, 8>;
    /// [`batched_64_int4`] for scales of two parts.
    batched_64_int4_f16: batched::<Quantized<Int4<2>>, 64, 8>;
    /// The phases of a step of up to 192 rows.
    batched_96: batched::<Plain, 96, 12>;
    /// The phases of a step of up to [`MAX_BATCHED_ROWS`](super::MAX_BATCHED_ROWS) rows.
    batched_128: batched::<Plain, 128, 16>;
    /// [`batched_128`] for FP8 codes.
    batched_128_fp8: batched::<Quantized<Fp8>, 128, 16>;
    /// [`batched_128`] for int4 codes.
    batched_128_int4: batched::<Quantized<Int4<1>>, 128, 16>;
    /// [`batched_128_int4`] for scales of two parts.
    batched_128_int4_f16: batched::<Quantized<Int4<2>>, 128, 16>;
}

/// The kernels that read the codes of a format.
#[cfg(not(target_arch = "nvptx64"))]
pub trait CodedKernels {
    /// The kernel for up to 64 rows.
    type Of64: Kernel<Params = BatchedStep>;
    /// The kernel for more rows.
    type Of128: Kernel<Params = BatchedStep>;
}

#[cfg(not(target_arch = "nvptx64"))]
impl CodedKernels for Quantized<Fp8> {
    type Of64 = batched_64_fp8;
    type Of128 = batched_128_fp8;
}

#[cfg(not(target_arch = "nvptx64"))]
impl CodedKernels for Quantized<Int4<1>> {
    type Of64 = batched_64_int4;
    type Of128 = batched_128_int4;
}

#[cfg(not(target_arch = "nvptx64"))]
impl CodedKernels for Quantized<Int4<2>> {
    type Of64 = batched_64_int4_f16;
    type Of128 = batched_128_int4_f16;
}
