//! The decode kernels of layers in FP8 whose weights' scales are of 128 × 128. They multiply in the tensor cores' FP8,
//! by `wgmma`, which Hopper alone has.

use cuda_std::{kernel, wgmma};

use super::{ANY, CHAIN, DecodeStep, SEQUENCES, THREADS, TREE, decode, decode_one};
use crate::weights::E4m3;

/// [`decode_1`](super::decode_1), of layers in FP8 whose weights' scales are of 128 × 128.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_1_e4m3(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        wgmma::declare();
        decode_one::<E4m3>(&p);
    }
}

/// [`decode_16`](super::decode_16), of such layers. Fewer rows take it as well.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_e4m3(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        wgmma::declare();
        decode::<E4m3, 2, CHAIN, ANY>(&p);
    }
}

/// [`decode_tree`](super::decode_tree), of such layers.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_tree_e4m3(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        wgmma::declare();
        decode::<E4m3, 2, TREE, ANY>(&p);
    }
}

/// [`decode_16_sequences`](super::decode_16_sequences), of such layers.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_sequences_e4m3(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        wgmma::declare();
        decode::<E4m3, 2, SEQUENCES, ANY>(&p);
    }
}
