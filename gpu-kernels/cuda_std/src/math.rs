//! Arithmetic for which the hardware has an instruction.
//!
//! What is named approximate below differs between the device and the host in the last bits; all else is the same.

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
    /// 2 to the power of `x`, approximate; subnormals are zero (`ex2.approx.ftz.f32`).
    exp2;
    /// The logarithm to base 2, approximate; subnormals are zero (`lg2.approx.ftz.f32`).
    log2;
    /// 1 / `x`, approximate; subnormals are zero (`rcp.approx.ftz.f32`).
    rcp;
    /// 1 / sqrt(`x`), approximate; subnormals are zero (`rsqrt.approx.ftz.f32`).
    rsqrt;
    /// The square root, rounded to nearest (`sqrt.rn.f32`).
    sqrt;
    /// The absolute value (`abs.f32`).
    abs;
}

/// `a * b + c`, rounded once (`fma.rn.f32`).
#[inline(always)]
#[must_use]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    target::fma(a, b, c)
}

/// e to the power of `x`, approximate: [`exp2`] of `x` log2(e).
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    exp2(x * LOG2_E)
}

/// The greater; the other if one is not a number (`max.f32`).
#[inline(always)]
#[must_use]
pub fn max(a: f32, b: f32) -> f32 {
    a.max(b)
}

/// The less; the other if one is not a number (`min.f32`).
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

/// Four numbers as e4m3, a byte each, the first in the lowest; rounded to nearest even, beyond 448 that
/// (`cvt.rn.satfinite.e4m3x2.f32`).
#[inline(always)]
#[must_use]
pub fn pack_e4m3(x: [f32; 4]) -> u32 {
    target::pack_e4m3(x)
}

/// `a * b + c` of both bf16 of a word, each rounded once to nearest even (`fma.rn.bf16x2`).
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

/// Rounded to nearest even (`cvt.rn.bf16.f32`); what is not a number becomes 0x7fff.
#[inline(always)]
#[must_use]
pub fn to_bf16(x: f32) -> bf16 {
    bf16::from_bits(target::pack_bf16(x, 0.0) as u16)
}

/// Exactly.
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

/// How many bits are set (`popc.b32`).
#[inline(always)]
#[must_use]
pub fn popc(x: u32) -> u32 {
    x.count_ones()
}

/// How many leading bits are zero (`clz.b32`).
#[inline(always)]
#[must_use]
pub fn clz(x: u32) -> u32 {
    x.leading_zeros()
}

/// The bits in reverse order (`brev.b32`).
#[inline(always)]
#[must_use]
pub fn brev(x: u32) -> u32 {
    x.reverse_bits()
}

/// A word's lower half twice, and its upper half twice. As moves of halves (`mov.b32` with a vector of two), which the
/// assembler makes a part of what multiplies pairs of 16-bit numbers; a [permutation](permute) is an instruction.
#[inline(always)]
#[must_use]
pub fn broadcast_halves(word: u32) -> [u32; 2] {
    target::broadcast_halves(word)
}

/// Four bytes of eight, those of `low` and then those of `high`: byte `i` of the result is the one whose number bits
/// `4 i` to `4 i + 2` of `which` are (`prmt.b32`). Bit `4 i + 3` is zero.
#[inline(always)]
#[must_use]
pub fn permute(low: u32, high: u32, which: u32) -> u32 {
    target::permute(low, high, which)
}
