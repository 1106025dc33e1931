//! The decode kernels of what a lane unpacks: of each format, for one row, for few and more rows of a sequence, for a
//! tree, and for rows of several sequences.

use cuda_std::kernel;

use super::{ANY, CHAIN, DecodeStep, NARROW, SEQUENCES, THREADS, TREE, decode, decode_one};
use crate::weights::{Fp8, Int4, Lossless, Plain, Quantized};

/// The forward pass of one row. It has a kernel of its own, so that what several rows need takes none of its registers;
/// those for several rows leave a step of one to it.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_1(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode_one::<Plain>(&p) }
}

/// [`decode_1`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_1_lossless(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode_one::<Lossless>(&p) }
}

/// [`decode_1`], of layers in FP8.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_1_fp8(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode_one::<Quantized<Fp8>>(&p) }
}

/// [`decode_1`], of layers in int4.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_1_int4(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode_one::<Quantized<Int4<1>>>(&p) }
}

/// [`decode_1_int4`], with scales in f16.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_1_int4_f16(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode_one::<Quantized<Int4<2>>>(&p) }
}

/// The forward pass of 2 to 8 rows.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Plain, 1, CHAIN, ANY>(&p) }
}

/// The forward pass of 2 to 16 rows.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Plain, 2, CHAIN, NARROW>(&p) }
}

/// [`decode_8`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_lossless(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Lossless, 1, CHAIN, ANY>(&p) }
}

/// [`decode_16`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_lossless(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Lossless, 2, CHAIN, NARROW>(&p) }
}

/// [`decode_8`], of layers in FP8.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_fp8(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Fp8>, 1, CHAIN, ANY>(&p) }
}

/// [`decode_16`], of layers in FP8.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_fp8(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Fp8>, 2, CHAIN, ANY>(&p) }
}

/// [`decode_8`], of layers in int4.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_int4(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<1>>, 1, CHAIN, ANY>(&p) }
}

/// [`decode_16`], of layers in int4.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_int4(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<1>>, 2, CHAIN, ANY>(&p) }
}

/// [`decode_8_int4`], with scales in f16.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_int4_f16(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<2>>, 1, CHAIN, ANY>(&p) }
}

/// [`decode_16_int4`], with scales in f16.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_int4_f16(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<2>>, 2, CHAIN, ANY>(&p) }
}

/// The forward pass of 2 to 16 rows that may be a tree.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_tree(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Plain, 2, TREE, ANY>(&p) }
}

/// [`decode_tree`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_tree_lossless(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Lossless, 2, TREE, ANY>(&p) }
}

/// [`decode_tree`], of layers in FP8.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_tree_fp8(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Fp8>, 2, TREE, ANY>(&p) }
}

/// [`decode_tree`], of layers in int4.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_tree_int4(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<1>>, 2, TREE, ANY>(&p) }
}

/// [`decode_tree`], of layers in int4 with scales in f16.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_tree_int4_f16(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<2>>, 2, TREE, ANY>(&p) }
}

/// The forward pass of 2 to 8 rows, each of a sequence of its own.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_sequences(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Plain, 1, SEQUENCES, ANY>(&p) }
}

/// The forward pass of 2 to 16 rows, each of a sequence of its own.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_sequences(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Plain, 2, SEQUENCES, ANY>(&p) }
}

/// [`decode_8_sequences`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_sequences_lossless(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Lossless, 1, SEQUENCES, ANY>(&p) }
}

/// [`decode_16_sequences`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_sequences_lossless(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Lossless, 2, SEQUENCES, ANY>(&p) }
}

/// [`decode_8_sequences`], of layers in FP8.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_sequences_fp8(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Fp8>, 1, SEQUENCES, ANY>(&p) }
}

/// [`decode_16_sequences`], of layers in FP8.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_sequences_fp8(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Fp8>, 2, SEQUENCES, ANY>(&p) }
}

/// [`decode_8_sequences`], of layers in int4.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_sequences_int4(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<1>>, 1, SEQUENCES, ANY>(&p) }
}

/// [`decode_16_sequences`], of layers in int4.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_sequences_int4(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<1>>, 2, SEQUENCES, ANY>(&p) }
}

/// [`decode_8_sequences`], of layers in int4 with scales in f16.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_8_sequences_int4_f16(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<2>>, 1, SEQUENCES, ANY>(&p) }
}

/// [`decode_16_sequences`], of layers in int4 with scales in f16.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_sequences_int4_f16(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { decode::<Quantized<Int4<2>>, 2, SEQUENCES, ANY>(&p) }
}
