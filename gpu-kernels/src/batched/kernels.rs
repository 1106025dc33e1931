//! The batched decode kernels: of each format, for tiles of so many rows.

use cuda_std::kernel;

use super::{BatchedStep, CLUSTER, THREADS, batched};
use crate::weights::{Fp8, Int4, Lossless, Plain, Quantized};

/// The phases of a step of up to 64 rows.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_64(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Plain, 64, 8>(&p) }
}

/// [`batched_64`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_64_lossless(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Lossless, 64, 8>(&p) }
}

/// [`batched_64`], of codes in FP8.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_64_fp8(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Quantized<Fp8>, 64, 8>(&p) }
}

/// [`batched_64`], of codes in int4.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_64_int4(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Quantized<Int4<1>>, 64, 8>(&p) }
}

/// [`batched_64_int4`] with scales of two parts.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_64_int4_f16(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Quantized<Int4<2>>, 64, 8>(&p) }
}

/// The phases of a step of up to 192 rows.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_96(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Plain, 96, 12>(&p) }
}

/// The phases of a step of up to [`MAX_BATCHED_ROWS`](super::MAX_BATCHED_ROWS) rows.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_128(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Plain, 128, 16>(&p) }
}

/// [`batched_128`], of codes in FP8.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_128_fp8(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Quantized<Fp8>, 128, 16>(&p) }
}

/// [`batched_128`], of codes in int4.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_128_int4(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Quantized<Int4<1>>, 128, 16>(&p) }
}

/// [`batched_128_int4`] with scales of two parts.
#[kernel(threads = THREADS, min_blocks = 1, cluster = CLUSTER)]
pub unsafe fn batched_128_int4_f16(p: BatchedStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { batched::<Quantized<Int4<2>>, 128, 16>(&p) }
}
