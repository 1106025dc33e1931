//! Which decode kernels read a format, for the host, which launches them.

use core::marker::PhantomData;

use cuda_std::Kernel;

use super::*;
use crate::weights::{E4m3, Fp8, Int4, Lossless, Plain, Quantized};

/// The decode kernels that read a format.
pub trait DecodeKernels {
    /// For a step of one row.
    type One: Kernel<Params = DecodeStep>;
    /// For a step of one row, where the head alone is [packed](Lossless). For formats that have no such kernel it is
    /// [`One`](Self::One).
    type OneLosslessHead: Kernel<Params = DecodeStep>;
    /// For 2 to 8 rows of a sequence.
    type Few: Kernel<Params = DecodeStep>;
    /// For 2 to 16 rows of a sequence.
    type Many: Kernel<Params = DecodeStep>;
    /// For 2 to 16 rows of a sequence that may be a tree.
    type Tree: Kernel<Params = DecodeStep>;
    /// For 2 to 8 rows of several sequences.
    type FewSequences: Kernel<Params = DecodeStep>;
    /// For 2 to 16 rows of several sequences.
    type Sequences: Kernel<Params = DecodeStep>;
    /// For long contexts, launched beside [`Many`](Self::Many), if the format [has](Self::HAS_LONG) such a kernel.
    type ManyLong: Kernel<Params = DecodeStep>;
    /// For long contexts, launched beside [`Tree`](Self::Tree), if the format [has](Self::HAS_LONG) such a kernel.
    type TreeLong: Kernel<Params = DecodeStep>;
    /// Whether there are kernels for [long contexts](DecodeStep::is_long), with attention by `wgmma`.
    const HAS_LONG: bool;
}

/// The kernels with a [short ring](SHORT_SHARED_BYTES) that read a format.
pub struct Short<F>(PhantomData<F>);

/// Implements [`DecodeKernels`] from a line for each format: its kernels in the order of the trait, then those that
/// only some formats have.
macro_rules! decode_kernels {
    ($($format:ty: $($kernel:ident)* $(, long $many_long:ident $tree_long:ident)? $(, head $head:ident)?;)*) => {
        $( decode_kernels!(of $format: $($kernel)* $(, long $many_long $tree_long)? $(, head $head)?); )*
    };
    (of $format:ty: $one:ident $few:ident $many:ident $tree:ident $few_sequences:ident $sequences:ident) => {
        decode_kernels!(of $format, false: $one $one $few $many $tree $few_sequences $sequences $many $tree);
    };
    (of $format:ty: $one:ident $few:ident $many:ident $tree:ident $few_sequences:ident $sequences:ident,
        head $head:ident) => {
        decode_kernels!(of $format, false: $one $head $few $many $tree $few_sequences $sequences $many $tree);
    };
    (of $format:ty: $one:ident $few:ident $many:ident $tree:ident $few_sequences:ident $sequences:ident,
        long $many_long:ident $tree_long:ident) => {
        decode_kernels!(of $format, true: $one $one $few $many $tree $few_sequences $sequences $many_long $tree_long);
    };
    (of $format:ty: $one:ident $few:ident $many:ident $tree:ident $few_sequences:ident $sequences:ident,
        long $many_long:ident $tree_long:ident, head $head:ident) => {
        decode_kernels!(of $format, true: $one $head $few $many $tree $few_sequences $sequences $many_long $tree_long);
    };
    (of $format:ty, $has_long:literal: $one:ident $head:ident $few:ident $many:ident $tree:ident
        $few_sequences:ident $sequences:ident $many_long:ident $tree_long:ident) => {
        impl DecodeKernels for $format {
            type One = $one;
            type OneLosslessHead = $head;
            type Few = $few;
            type Many = $many;
            type Tree = $tree;
            type FewSequences = $few_sequences;
            type Sequences = $sequences;
            type ManyLong = $many_long;
            type TreeLong = $tree_long;
            const HAS_LONG: bool = $has_long;
        }
    };
}

decode_kernels! {
    Plain: decode_1 decode_8 decode_16 decode_tree decode_8_sequences decode_16_sequences,
        long decode_16_wgmma decode_tree_wgmma, head decode_1_lossless_head;
    Lossless: decode_1_lossless decode_8_lossless decode_16_lossless decode_tree_lossless
        decode_8_sequences_lossless decode_16_sequences_lossless,
        long decode_16_wgmma_lossless decode_tree_wgmma_lossless;
    E4m3: decode_1_e4m3 decode_16_e4m3 decode_16_e4m3 decode_tree_e4m3
        decode_16_sequences_e4m3 decode_16_sequences_e4m3, head decode_1_e4m3_lossless_head;
    Quantized<Fp8>: decode_1_fp8 decode_8_fp8 decode_16_fp8 decode_tree_fp8
        decode_8_sequences_fp8 decode_16_sequences_fp8, head decode_1_fp8_lossless_head;
    Quantized<Int4<1>>: decode_1_int4 decode_8_int4 decode_16_int4 decode_tree_int4
        decode_8_sequences_int4 decode_16_sequences_int4, head decode_1_int4_lossless_head;
    Quantized<Int4<2>>: decode_1_int4_f16 decode_8_int4_f16 decode_16_int4_f16 decode_tree_int4_f16
        decode_8_sequences_int4_f16 decode_16_sequences_int4_f16, head decode_1_int4_f16_lossless_head;
    Short<Plain>: decode_short decode_short decode_short decode_tree_short
        decode_sequences_short decode_sequences_short;
    Short<Quantized<Fp8>>: decode_short_fp8 decode_short_fp8 decode_short_fp8 decode_tree_short_fp8
        decode_sequences_short_fp8 decode_sequences_short_fp8;
    Short<Quantized<Int4<1>>>: decode_short_int4 decode_short_int4 decode_short_int4 decode_tree_short_int4
        decode_sequences_short_int4 decode_sequences_short_int4;
    Short<Quantized<Int4<2>>>: decode_short_int4_f16 decode_short_int4_f16 decode_short_int4_f16
        decode_tree_short_int4_f16 decode_sequences_short_int4_f16 decode_sequences_short_int4_f16;
}
