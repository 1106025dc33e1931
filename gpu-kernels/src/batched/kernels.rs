//! The batched decode kernels: of each format, for tiles of so many rows.

use super::{BatchedStep, CLUSTER, THREADS, batched};
use crate::weights::{Fp8, Int4, Lossless, Plain, Quantized};

entry_points! {
    (threads = THREADS, min_blocks = 1, cluster = CLUSTER) of BatchedStep:

    /// The phases of a step of up to 64 rows.
    batched_64: batched::<Plain, 64, 8>;
    /// [`batched_64`], of packed weights.
    batched_64_lossless: batched::<Lossless, 64, 8>;
    /// [`batched_64`], of codes in FP8.
    batched_64_fp8: batched::<Quantized<Fp8>, 64, 8>;
    /// [`batched_64`], of codes in int4.
    batched_64_int4: batched::<Quantized<Int4<1>>, 64, 8>;
    /// [`batched_64_int4`] with scales of two parts.
    batched_64_int4_f16: batched::<Quantized<Int4<2>>, 64, 8>;
    /// The phases of a step of up to 192 rows.
    batched_96: batched::<Plain, 96, 12>;
    /// The phases of a step of up to [`MAX_BATCHED_ROWS`](super::MAX_BATCHED_ROWS) rows.
    batched_128: batched::<Plain, 128, 16>;
    /// [`batched_128`], of codes in FP8.
    batched_128_fp8: batched::<Quantized<Fp8>, 128, 16>;
    /// [`batched_128`], of codes in int4.
    batched_128_int4: batched::<Quantized<Int4<1>>, 128, 16>;
    /// [`batched_128_int4`] with scales of two parts.
    batched_128_int4_f16: batched::<Quantized<Int4<2>>, 128, 16>;
}
