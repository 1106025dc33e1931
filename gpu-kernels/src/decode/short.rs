//! The decode kernels for cards whose CTAs have less shared memory than Hopper's: 99 KiB from compute capability 12.0
//! on, where the ring has [4 stages](super::SHORT_STAGES) instead of 12.
//!
//! A split's keys fill the ring. Consumers compute scores from them and release the stages, and the split's values come
//! into the same stages. For tiles that are not scored together the keys are copied again, from L2.
//!
//! A barrier tells only two successive phases apart, so no warp may skip the ring once around. Every warp therefore
//! reads every chunk of a GEMM, whatever the number of rows, and one row runs like several.
//!
//! # Safety
//! As for all [decode kernels](super), with [`SHORT_SHARED_BYTES`](super::SHORT_SHARED_BYTES).

use super::{ANY, CHAIN, DecodeStep, SEQUENCES, THREADS, TREE, run};
use crate::step::MAX_DECODE_ROWS;
use crate::weights::{Fp8, FragmentFormat, Int4, Plain, Quantized, SHALLOW};
use cuda_std::device;

/// Runs a step of any number of rows.
#[device]
unsafe fn decode<F: FragmentFormat, const ROWS: u8>(p: &DecodeStep) {
    // A stage in which fragments are made must be read by one half of the CTA alone; here both halves read every stage.
    // And a turn may have more N-tiles than there are stages, so each must be free after the turn.
    const { assert!(!F::IN_PLACE && F::CHUNKS == 1) };
    // SAFETY: the caller's word.
    unsafe {
        let count = p.work.rows.count.load(0).min(MAX_DECODE_ROWS);
        if count > 0 {
            run::<F, 2, false, false, ROWS, ANY, true>(p, count);
        }
    }
}

entry_points! {
    (threads = THREADS, min_blocks = 1) of DecodeStep:

    /// The forward pass of 1 to 16 rows. Shared memory, as for all kernels of this module: [`SHORT_SHARED_BYTES`].
    ///
    /// [`SHORT_SHARED_BYTES`]: super::SHORT_SHARED_BYTES
    decode_short: decode::<Plain, CHAIN>;
    /// [`decode_short`], of layers in FP8.
    decode_short_fp8: decode::<Quantized<Fp8, SHALLOW>, CHAIN>;
    /// [`decode_short`], of layers in int4.
    decode_short_int4: decode::<Quantized<Int4<1>, SHALLOW>, CHAIN>;
    /// [`decode_short_int4`], with scales in f16.
    decode_short_int4_f16: decode::<Quantized<Int4<2>, SHALLOW>, CHAIN>;
    /// The forward pass of 1 to 16 rows that may be a tree.
    decode_tree_short: decode::<Plain, TREE>;
    /// [`decode_tree_short`], of layers in FP8.
    decode_tree_short_fp8: decode::<Quantized<Fp8, SHALLOW>, TREE>;
    /// [`decode_tree_short`], of layers in int4.
    decode_tree_short_int4: decode::<Quantized<Int4<1>, SHALLOW>, TREE>;
    /// [`decode_tree_short_int4`], with scales in f16.
    decode_tree_short_int4_f16: decode::<Quantized<Int4<2>, SHALLOW>, TREE>;
    /// The forward pass of 1 to 16 rows of several sequences.
    decode_sequences_short: decode::<Plain, SEQUENCES>;
    /// [`decode_sequences_short`], of layers in FP8.
    decode_sequences_short_fp8: decode::<Quantized<Fp8, SHALLOW>, SEQUENCES>;
    /// [`decode_sequences_short`], of layers in int4.
    decode_sequences_short_int4: decode::<Quantized<Int4<1>, SHALLOW>, SEQUENCES>;
    /// [`decode_sequences_short_int4`], with scales in f16.
    decode_sequences_short_int4_f16: decode::<Quantized<Int4<2>, SHALLOW>, SEQUENCES>;
}
