//! The decode kernels for layers in FP8 with a scale for each 128 × 128 weights. They multiply in FP8 on the tensor
//! cores, by `wgmma`, which only Hopper has.
//!
//! # Safety
//! As for all [decode kernels](super).

use cuda_std::device;
use cuda_std::wgmma;

use super::{ANY, CHAIN, DecodeStep, SEQUENCES, THREADS, TREE, decode, decode_one};
use crate::weights::E4m3;

/// Runs a step of one row.
#[device]
unsafe fn decode_one_e4m3<const PACKED_HEAD: bool>(p: &DecodeStep) {
    wgmma::declare();
    // SAFETY: the caller's word.
    unsafe { decode_one::<E4m3, PACKED_HEAD>(p) }
}

/// Runs a step of several rows.
#[device]
unsafe fn decode_e4m3<const ROWS: u8>(p: &DecodeStep) {
    wgmma::declare();
    // SAFETY: the caller's word.
    unsafe { decode::<E4m3, 2, ROWS, ANY>(p) }
}

entry_points! {
    (threads = THREADS, min_blocks = 1) of DecodeStep:

    /// [`decode_1`](super::decode_1), for layers in FP8 with a scale for each 128 × 128 weights.
    decode_1_e4m3: decode_one_e4m3::<false>;
    /// [`decode_1_e4m3`], with a packed head.
    decode_1_e4m3_lossless_head: decode_one_e4m3::<true>;
    /// [`decode_16`](super::decode_16), for layers as in [`decode_1_e4m3`]. It also runs steps of 2 to 8 rows: there is
    /// no narrower kernel.
    decode_16_e4m3: decode_e4m3::<CHAIN>;
    /// [`decode_tree`](super::decode_tree), for layers as in [`decode_1_e4m3`].
    decode_tree_e4m3: decode_e4m3::<TREE>;
    /// [`decode_16_sequences`](super::decode_16_sequences), for layers as in [`decode_1_e4m3`].
    decode_16_sequences_e4m3: decode_e4m3::<SEQUENCES>;
}
