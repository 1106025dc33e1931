//! The decode kernels of layers in FP8 whose weights' scales are of 128 × 128. They multiply in the tensor cores' FP8,
//! by `wgmma`, which Hopper alone has.
//!
//! # Safety
//! The same as for all [decode kernels](super).

use cuda_std::wgmma;

use super::{ANY, CHAIN, DecodeStep, SEQUENCES, THREADS, TREE, decode, decode_one};
use crate::weights::{E4m3, Lossless, Plain, WeightFormat};

/// A step of one row.
#[inline(always)]
unsafe fn decode_one_e4m3<H: WeightFormat>(p: &DecodeStep) {
    wgmma::declare();
    // SAFETY: the caller's word.
    unsafe { decode_one::<E4m3<H>>(p) }
}

/// A step of several.
#[inline(always)]
unsafe fn decode_e4m3<const ROWS: u8>(p: &DecodeStep) {
    wgmma::declare();
    // SAFETY: the caller's word.
    unsafe { decode::<E4m3, 2, ROWS, ANY>(p) }
}

entry_points! {
    (threads = THREADS, min_blocks = 1) of DecodeStep:

    /// [`decode_1`](super::decode_1), of layers in FP8 whose weights' scales are of 128 × 128.
    decode_1_e4m3: decode_one_e4m3::<Plain>;
    /// [`decode_1_e4m3`], with a packed head.
    decode_1_e4m3_lossless_head: decode_one_e4m3::<Lossless>;
    /// [`decode_16`](super::decode_16), of such layers. Fewer rows take it as well.
    decode_16_e4m3: decode_e4m3::<CHAIN>;
    /// [`decode_tree`](super::decode_tree), of such layers.
    decode_tree_e4m3: decode_e4m3::<TREE>;
    /// [`decode_16_sequences`](super::decode_16_sequences), of such layers.
    decode_16_sequences_e4m3: decode_e4m3::<SEQUENCES>;
}
