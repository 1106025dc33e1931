//! The decode kernels of formats whose weights become fragments in registers. Each format has kernels for one row, for
//! up to 8 and up to 16 rows of a sequence, for a tree, and for rows of several sequences.

use super::{ANY, CHAIN, DecodeStep, MMA, SEQUENCES, THREADS, TREE, decode, decode_one};
use crate::weights::{DEEP, Fp8, Int4, Lossless, Plain, Quantized};

entry_points! {
    (threads = THREADS, min_blocks = 1) of DecodeStep:

    /// The forward pass of one row. It has a kernel of its own, so that what several rows need takes none of its
    /// registers. The kernels for several rows leave a step of one row to it.
    decode_1: decode_one::<Plain, false>;
    /// [`decode_1`], with a packed head.
    decode_1_lossless_head: decode_one::<Plain, true>;
    /// [`decode_1`], of packed weights.
    decode_1_lossless: decode_one::<Lossless, false>;
    /// [`decode_1`], of layers in FP8.
    decode_1_fp8: decode_one::<Quantized<Fp8>, false>;
    /// [`decode_1`], of layers in int4.
    decode_1_int4: decode_one::<Quantized<Int4<1>, DEEP>, false>;
    /// [`decode_1_int4`], with scales in f16.
    decode_1_int4_f16: decode_one::<Quantized<Int4<2>, DEEP>, false>;
    /// [`decode_1_fp8`], with a packed head.
    decode_1_fp8_lossless_head: decode_one::<Quantized<Fp8>, true>;
    /// [`decode_1_int4`], with a packed head.
    decode_1_int4_lossless_head: decode_one::<Quantized<Int4<1>, DEEP>, true>;
    /// [`decode_1_int4_f16`], with a packed head.
    decode_1_int4_f16_lossless_head: decode_one::<Quantized<Int4<2>, DEEP>, true>;
    /// The forward pass of 2 to 8 rows.
    decode_8: decode::<Plain, 1, CHAIN, ANY>;
    /// The forward pass of 2 to 16 rows.
    decode_16: decode::<Plain<true>, 2, CHAIN, MMA>;
    /// [`decode_8`], of packed weights.
    decode_8_lossless: decode::<Lossless, 1, CHAIN, ANY>;
    /// [`decode_16`], of packed weights.
    decode_16_lossless: decode::<Lossless, 2, CHAIN, MMA>;
    /// [`decode_8`], of layers in FP8.
    decode_8_fp8: decode::<Quantized<Fp8>, 1, CHAIN, ANY>;
    /// [`decode_16`], of layers in FP8.
    decode_16_fp8: decode::<Quantized<Fp8>, 2, CHAIN, ANY>;
    /// [`decode_8`], of layers in int4.
    decode_8_int4: decode::<Quantized<Int4<1>>, 1, CHAIN, ANY>;
    /// [`decode_16`], of layers in int4.
    decode_16_int4: decode::<Quantized<Int4<1>>, 2, CHAIN, ANY>;
    /// [`decode_8_int4`], with scales in f16.
    decode_8_int4_f16: decode::<Quantized<Int4<2>>, 1, CHAIN, ANY>;
    /// [`decode_16_int4`], with scales in f16.
    decode_16_int4_f16: decode::<Quantized<Int4<2>>, 2, CHAIN, ANY>;
    /// The forward pass of 2 to 16 rows that may be a tree.
    decode_tree: decode::<Plain<true>, 2, TREE, MMA>;
    /// [`decode_tree`], of packed weights.
    decode_tree_lossless: decode::<Lossless, 2, TREE, MMA>;
    /// [`decode_tree`], of layers in FP8.
    decode_tree_fp8: decode::<Quantized<Fp8>, 2, TREE, ANY>;
    /// [`decode_tree`], of layers in int4.
    decode_tree_int4: decode::<Quantized<Int4<1>>, 2, TREE, ANY>;
    /// [`decode_tree`], of layers in int4 with scales in f16.
    decode_tree_int4_f16: decode::<Quantized<Int4<2>>, 2, TREE, ANY>;
    /// The forward pass of 2 to 8 rows of several sequences.
    decode_8_sequences: decode::<Plain, 1, SEQUENCES, ANY>;
    /// The forward pass of 2 to 16 rows of several sequences.
    decode_16_sequences: decode::<Plain<true>, 2, SEQUENCES, ANY>;
    /// [`decode_8_sequences`], of packed weights.
    decode_8_sequences_lossless: decode::<Lossless, 1, SEQUENCES, ANY>;
    /// [`decode_16_sequences`], of packed weights.
    decode_16_sequences_lossless: decode::<Lossless, 2, SEQUENCES, ANY>;
    /// [`decode_8_sequences`], of layers in FP8.
    decode_8_sequences_fp8: decode::<Quantized<Fp8>, 1, SEQUENCES, ANY>;
    /// [`decode_16_sequences`], of layers in FP8.
    decode_16_sequences_fp8: decode::<Quantized<Fp8>, 2, SEQUENCES, ANY>;
    /// [`decode_8_sequences`], of layers in int4.
    decode_8_sequences_int4: decode::<Quantized<Int4<1>>, 1, SEQUENCES, ANY>;
    /// [`decode_16_sequences`], of layers in int4.
    decode_16_sequences_int4: decode::<Quantized<Int4<1>>, 2, SEQUENCES, ANY>;
    /// [`decode_8_sequences`], of layers in int4 with scales in f16.
    decode_8_sequences_int4_f16: decode::<Quantized<Int4<2>>, 1, SEQUENCES, ANY>;
    /// [`decode_16_sequences`], of layers in int4 with scales in f16.
    decode_16_sequences_int4_f16: decode::<Quantized<Int4<2>>, 2, SEQUENCES, ANY>;
}
