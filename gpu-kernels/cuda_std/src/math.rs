//! Arithmetic for which the hardware has an instruction.
//!
//! Functions called approximate below differ between device and host in the last bits. All others give the same bits.

use half::bf16;

use crate::target;

/// log2(e).
const LOG2_E: f32 = core::f32::consts::LOG2_E;

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            #[must_use]
            pub fn $name(x: f32) -> f32 {
                target::$name(x)
            }
        )*
    };
}

unary! {
    /// 2 to the power of `x`, approximate; subnormals are flushed to zero (`ex2.approx.ftz.f32`).
    exp2;
    /// The logarithm of `x` to base 2, approximate; subnormals are flushed to zero (`lg2.approx.ftz.f32`).
    log2;
    /// 1 / `x`, approximate; subnormals are flushed to zero (`rcp.approx.ftz.f32`).
    rcp;
    /// 1 / sqrt(`x`), approximate; subnormals are flushed to zero (`rsqrt.approx.ftz.f32`).
    rsqrt;
    /// The square root of `x`, rounded to nearest (`sqrt.rn.f32`).
    sqrt;
    /// The absolute value of `x` (`abs.f32`).
    abs;
}

/// `a * b + c`, rounded once (`fma.rn.f32`).
#[inline(always)]
#[must_use]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    target::fma(a, b, c)
}

/// e to the power of `x`, approximate: [`exp2`] of `x` times log2(e).
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    exp2(x * LOG2_E)
}

/// The greater of the two; if one is NaN, the other (`max.f32`).
#[inline(always)]
#[must_use]
pub fn max(a: f32, b: f32) -> f32 {
    a.max(b)
}

/// The lesser of the two; if one is NaN, the other (`min.f32`).
#[inline(always)]
#[must_use]
pub fn min(a: f32, b: f32) -> f32 {
    a.min(b)
}

/// Two numbers as bf16, rounded to nearest even, `low` in the low half (`cvt.rn.bf16x2.f32`).
#[inline(always)]
#[must_use]
pub fn pack_bf16(low: f32, high: f32) -> u32 {
    target::pack_bf16(low, high)
}

/// Four numbers as e4m3, one byte each, the first in the lowest byte (`cvt.rn.satfinite.e4m3x2.f32`). They are rounded
/// to nearest even; magnitudes beyond 448 become 448.
#[inline(always)]
#[must_use]
pub fn pack_e4m3(x: [f32; 4]) -> u32 {
    target::pack_e4m3(x)
}

/// `a * b + c` for each of the two bf16 in a word, rounded once to nearest even (`fma.rn.bf16x2`).
#[inline(always)]
#[must_use]
pub fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    target::fma_bf16x2(a, b, c)
}

/// The two bf16 of a word, the low half first.
#[inline(always)]
#[must_use]
pub fn unpack_bf16(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// `x` as bf16, rounded to nearest even (`cvt.rn.bf16x2.f32`, of which half is used). NaN becomes 0x7fff.
#[inline(always)]
#[must_use]
pub fn to_bf16(x: f32) -> bf16 {
    bf16::from_bits(target::pack_bf16(x, 0.0) as u16)
}

/// `x` as f32, exactly.
#[inline(always)]
#[must_use]
pub fn from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The upper half of the 128-bit product (`mul.hi.u64`).
#[inline(always)]
#[must_use]
pub fn mul_hi_u64(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

/// How many bits of `x` are set (`popc.b32`).
#[inline(always)]
#[must_use]
pub fn popc(x: u32) -> u32 {
    x.count_ones()
}

/// How many leading bits of `x` are zero (`clz.b32`).
#[inline(always)]
#[must_use]
pub fn clz(x: u32) -> u32 {
    x.leading_zeros()
}

/// The bits of `x` in reverse order (`brev.b32`).
#[inline(always)]
#[must_use]
pub fn brev(x: u32) -> u32 {
    x.reverse_bits()
}

/// Two words: the lower half of `word` twice, and its upper half twice. They are written as moves of halves (`mov.b32`
/// with a vector of two), which the assembler folds into the instruction that multiplies pairs of 16-bit numbers. A
/// [permutation](permute) would be an instruction of its own.
#[inline(always)]
#[must_use]
pub fn broadcast_halves(word: u32) -> [u32; 2] {
    target::broadcast_halves(word)
}

/// Picks four bytes out of eight (`prmt.b32`): bytes 0 to 3 are those of `low`, bytes 4 to 7 those of `high`. Byte `i`
/// of the result is the byte whose number is in bits `4 i` to `4 i + 2` of `which`. Bit `4 i + 3` must be zero.
#[inline(always)]
#[must_use]
pub fn permute(low: u32, high: u32, which: u32) -> u32 {
    target::permute(low, high, which)
}
