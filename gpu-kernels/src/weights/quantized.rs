//! FP8 and int4 weights: codes, with a scale for each 128 inputs of an output.
//!
//! On every path of the program, an FP8 weight is `bf16(code × scale)`, and an int4 weight is
//! `bf16((code − zero) × scale)`, rounded once. Here that is packed arithmetic on two weights at a time. A scale of
//! int4 is a bf16, and so is its product with the zero. Or it is the sum of two bf16, `high + low`, of which `low` has
//! so few bits that its product with a code is exact: scales in f16 are such sums.
//!
//! A code's bits are read as a bf16 `c`, which has the code's value times a power of two. The inverse power is a part
//! of the stored scale, `s`, `h` or `l` here:
//!
//! ```text
//! int4        c = code · 2^-133, in upper rows · 2^-129     weight · 2^-8 = c · s − z    s = scale · 2^125, or · 2^121
//!                                                                                       z = zero · scale · 2^-8
//! int4, f16   c = (code − zero) / 64                        weight = c · h + bf16(c · l)     h + l = scale · 64
//! FP8         c = code · 2^-120                             weight = c · s               s = scale · 2^120
//! ```
//!
//! # Layout
//! N-tiles' chunks lie in the order of the plain stream. A chunk is contiguous, and the decode kernels take it by one
//! copy. It has four *groups* of 128 inputs, whose two slices share their scales. Each slice's codes lie beside the
//! scales, so the step of many sequences takes a slice's codes and scales of 8 N-tiles by a box of 8 rows:
//!
//! ```text
//! group    codes of slice 2 g    scales    codes of slice 2 g + 1
//! codes    [part][lane][16 bytes]     1 part of int4, 2 of FP8
//! scales   [row 16] words             see `Scale`
//! ```
//!
//! A lane's codes of a slice are those of its four fragments, in order: for each fragment one word of int4, or two of
//! FP8. In a word of int4, weight `h` of register `r` has four bits from bit `16 h + 4 r` on. In the first word of FP8,
//! weights `h` of registers 0 and 1 have bytes `2 h` and `2 h + 1`; in the second word, those of registers 2 and 3.
//!
//! # Safety
//! A whole warp calls what is unsafe here: a producer's to fill a stage that is empty, a consumer's to load from one
//! that has whole chunks of codes, as the layout says. Codes are only read: two warps may load the same.

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod batched;
mod quantize;

#[cfg(not(target_arch = "nvptx64"))]
pub use quantize::CodeKernels;
pub use quantize::{
    Dequantize, Quantize, dequantize_fp8, dequantize_int4, dequantize_int4_f16, quantize_fp8, quantize_int4,
    quantize_int4_f16,
};

use core::marker::PhantomData;

use cuda_std::shared::{self, Shared};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::tensor;
use cuda_std::{bf16, bulk, device, math, thread, warp};

use super::{FragmentFormat, WeightFormat, WeightFragments};
use crate::decode::{DecodeStep, OfFragments};
use crate::linear::{K_PARTIALS, N_TILE, SLICE};
use crate::ring::Ring;
use crate::stream::{CHUNK_BYTES, CHUNK_FEATURES, GROUP_N_TILES, Wave};

/// Inputs that share a scale.
pub const GROUP: u32 = 128;
/// Groups of a chunk.
pub const GROUPS: u32 = CHUNK_FEATURES / GROUP;
/// Bytes of an N-tile's scales of a group.
const SCALE_BYTES: u32 = N_TILE * 4;
const _: () = assert!(GROUP == 2 * SLICE);

/// A kind of codes.
pub trait Code: Copy {
    /// Bits of one.
    const BITS: u32;
    /// Chunks that a [usual](USUAL) stage has.
    const CHUNKS: u32;
    /// How many bf16 a scale is the sum of.
    const PARTS: u32;
    /// A scale is stored multiplied by this.
    const FACTOR: f32;
    /// A weight is what [`decode`](Self::decode) makes, times this: a power of two.
    const UNIT: f32 = 1.0;
    /// Bytes of an N-tile's slice.
    const SLICE_BYTES: u32 = SLICE * N_TILE / 8 * Self::BITS;
    /// Bytes of a group.
    const GROUP_BYTES: u32 = 2 * Self::SLICE_BYTES + SCALE_BYTES;
    /// Bytes of an N-tile's chunk.
    const BYTES: u32 = GROUPS * Self::GROUP_BYTES;

    /// The code of the weight `w`, if that is a code times the scale; otherwise any code.
    fn encode(w: f32, scale: Scale) -> u32;

    /// Puts a fragment's codes, `[register][half]`, into words. Int4 uses only the first.
    fn join(codes: [[u32; 2]; 4]) -> [u32; 2];

    /// Makes a fragment of the codes in these words, with the scales of its lower and upper eight rows. Weights are in
    /// [`UNIT`](Self::UNIT)s.
    fn decode(words: [u32; 2], scales: &[Factors; 2]) -> [u32; 4];

    /// As [`decode`](Self::decode), but the weights themselves, not in [`UNIT`](Self::UNIT)s.
    #[device]
    fn decode_whole(words: [u32; 2], scales: &[Factors; 2]) -> [u32; 4] {
        let mut fragment = Self::decode(words, scales);
        if Self::UNIT != 1.0 {
            let unit = (Self::UNIT.to_bits() >> 16) * 0x1_0001;
            unroll!(R < 4; {
                fragment[R] = math::fma_bf16x2(fragment[R], unit, NOTHING);
            });
        }
        fragment
    }
}

/// A scale and a zero as they are stored. The upper bf16 is the scale's high part. With one part, the lower bf16 is
/// minus the zero times the scale, in [units](Code::UNIT). With two parts, it is the low part, whose last five bits are
/// zeros and so have room for the zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale(pub u32);

/// The bits of a scale's word that hold the zero, if scales have two parts.
const ZERO_BITS: u32 = 0x1f;
/// The step of int4 codes before they are multiplied by a scale of two parts: 2^-133, the last place of the least bf16,
/// times 2^127, the largest power of two.
const STEP: f32 = 1.0 / 64.0;
/// The least scale, as it is stored. Smaller ones would make weights that are not exact in units.
const LEAST: f32 = f32::from_bits((127 + 25) << 23);
/// 1/16 as two bf16.
const SIXTEENTHS: u32 = 0x3d80_3d80;
/// Factors, as two bf16, that make steps of the codes in the last four bits, and of those in the four bits before them.
const STEPS: [u32; 2] = [0x7f00_7f00, 0x7d00_7d00];

impl Scale {
    /// The word of a scale and a zero. `None` if the scale is not a sum of [`PARTS`](Code::PARTS) bf16 or is beyond
    /// what is exact, if the zero is above 16, or if there is one part and the product of scale and zero is no bf16.
    #[must_use]
    pub fn new<C: Code>(scale: f32, zero: u8) -> Option<Self> {
        let of_zero = -scale * f32::from(zero) / C::UNIT;
        let scale = scale * C::FACTOR;
        // Truncated, not rounded, so that both parts have the same sign: then a product that is zero keeps its sign.
        let high = bf16::from_bits((scale.to_bits() >> 16) as u16);
        let low = bf16::from_f32(scale - high.to_f32());
        let low_bits = u32::from(low.to_bits());
        let low_bits = if C::PARTS == 2 {
            // It must have so few bits that its product with a code is exact; then there is room for the zero, too.
            (low_bits & ZERO_BITS == 0).then_some(low_bits | u32::from(zero))
        } else {
            let of_zero = of_zero.to_bits();
            (low_bits & 0x7fff == 0 && of_zero & 0xffff == 0).then_some(of_zero >> 16)
        };
        let fits = scale.is_finite()
            && high.to_f32() + low.to_f32() == scale
            && zero <= 16
            && (C::UNIT == 1.0 || scale == 0.0 || math::abs(scale) >= LEAST);
        low_bits.filter(|_| fits).map(|low_bits| Self(u32::from(high.to_bits()) << 16 | low_bits))
    }

    /// The scale.
    #[device]
    fn value<C: Code>(self) -> f32 {
        let [low, high] = math::unpack_bf16(self.0 & !ZERO_BITS);
        (if C::PARTS == 1 { high } else { high + low }) / C::FACTOR
    }

    #[device]
    fn zero<C: Code>(self) -> f32 {
        if C::PARTS == 2 {
            return (self.0 & ZERO_BITS) as f32;
        }
        let [of_zero, _] = math::unpack_bf16(self.0);
        let value = self.value::<C>();
        if value == 0.0 { 0.0 } else { -of_zero * C::UNIT / value }
    }

    /// The factors that [`Code::decode`] takes, for a fragment's upper eight rows or its lower ones.
    #[device]
    pub fn factors<C: Code>(self, is_upper: bool) -> Factors {
        let [low, high] = math::broadcast_halves(self.0);
        if C::PARTS == 1 {
            // Codes of upper rows are in the four bits before those of lower ones.
            let high = if C::BITS == 4 && is_upper { math::fma_bf16x2(high, SIXTEENTHS, NOTHING) } else { high };
            return Factors { high, low: 0, zero: low };
        }
        let zero_bits = ZERO_BITS << 16 | ZERO_BITS;
        let zero = math::fma_bf16x2(low & zero_bits, STEPS[0] | SIGNS, NOTHING);
        Factors { high, low: low & !zero_bits, zero }
    }
}

/// A scale and a zero, each twice in a word.
#[derive(Clone, Copy)]
pub struct Factors {
    high: u32,
    low: u32,
    /// With two parts, minus the zero, in [steps](STEP); with one part, minus the zero times the scale.
    zero: u32,
}

/// The signs of two bf16.
const SIGNS: u32 = 0x8000_8000;

/// `-0` as two bf16: what a multiply-add adds if only the product is wanted.
const NOTHING: u32 = SIGNS;

impl Factors {
    /// Two whole numbers, or codes of FP8, times the scale, rounded once.
    #[device]
    fn scaled<C: Code>(&self, c: u32) -> u32 {
        let low = if C::PARTS == 1 { NOTHING } else { math::fma_bf16x2(c, self.low, NOTHING) };
        math::fma_bf16x2(c, self.high, low)
    }
}

/// Whole numbers from 0 to 15, with scales that are the sum of `PARTS` bf16.
#[derive(Clone, Copy)]
pub struct Int4<const PARTS: u32>;

impl<const PARTS: u32> Code for Int4<PARTS> {
    const BITS: u32 = 4;
    const CHUNKS: u32 = 2;
    const PARTS: u32 = PARTS;
    const FACTOR: f32 = if PARTS == 1 { f32::from_bits((127 + 125) << 23) } else { 1.0 / STEP };
    const UNIT: f32 = if PARTS == 1 { 256.0 } else { 1.0 };

    #[device]
    fn encode(w: f32, scale: Scale) -> u32 {
        let value = scale.value::<Self>();
        let steps = if value == 0.0 { 0.0 } else { w / value };
        // A half is added before truncation: that rounds numbers above zero to the nearest.
        let code = (steps + scale.zero::<Self>() + 0.5) as i32;
        code.clamp(0, 15) as u32
    }

    #[device]
    fn join(codes: [[u32; 2]; 4]) -> [u32; 2] {
        let mut word = 0;
        unroll!(R < 4; {
            word |= codes[R][0] << (4 * R) | codes[R][1] << (16 + 4 * R);
        });
        [word, 0]
    }

    #[device]
    fn decode(words: [u32; 2], scales: &[Factors; 2]) -> [u32; 4] {
        // Read as a bf16, eight bits are a whole number of 2^-133, even though the first of them is the exponent's last
        // bit.
        const CODES: [u32; 2] = [0x000f_000f, 0x00f0_00f0];
        let words = [words[0], words[0] >> 8];
        let mut fragment = [0; 4];
        unroll!(R < 4; {
            let (scale, code) = (&scales[R % 2], words[R / 2] & CODES[R % 2]);
            fragment[R] = if PARTS == 1 {
                math::fma_bf16x2(code, scale.high, scale.zero)
            } else {
                scale.scaled::<Self>(math::fma_bf16x2(code, STEPS[R % 2], scale.zero))
            };
        });
        fragment
    }
}

/// Numbers of e4m3.
#[derive(Clone, Copy)]
pub struct Fp8;

impl Code for Fp8 {
    const BITS: u32 = 8;
    const CHUNKS: u32 = 1;
    const PARTS: u32 = 1;
    const FACTOR: f32 = f32::from_bits((127 + 120) << 23);

    #[device]
    fn encode(w: f32, scale: Scale) -> u32 {
        // The least normal number, and what is added to a smaller one to make its last place 2^-9.
        const LEAST: f32 = 1.0 / 64.0;
        const SHIFT: f32 = 16384.0;
        let scale = scale.value::<Self>();
        let value = if scale == 0.0 { 0.0 } else { math::abs(w) / math::abs(scale) };
        let bits = if value < LEAST {
            (value + SHIFT).to_bits() - SHIFT.to_bits()
        } else {
            let bits = value.to_bits();
            // Rounds to the nearest number with three bits behind the leading one.
            ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).saturating_sub((127 - 7) << 3).min(0x7e)
        };
        bits | (w.to_bits() ^ scale.to_bits()) >> 24 & 0x80
    }

    #[device]
    fn join(codes: [[u32; 2]; 4]) -> [u32; 2] {
        let word = |r: usize| codes[r][0] | codes[r + 1][0] << 8 | codes[r][1] << 16 | codes[r + 1][1] << 24;
        [word(0), word(2)]
    }

    #[device]
    fn decode(words: [u32; 2], scales: &[Factors; 2]) -> [u32; 4] {
        const REST: u32 = 0x07f0_07f0;
        let mut fragment = [0; 4];
        unroll!(W < 2; {
            let word = words[W];
            fragment[2 * W] = scales[0].scaled::<Self>(word << 8 & SIGNS | word << 4 & REST);
            fragment[2 * W + 1] = scales[1].scaled::<Self>(word & SIGNS | word >> 4 & REST);
        });
        fragment
    }
}

/// Codes of the layers' matrices. `DEPTH` is how deep a stage is: [`SHALLOW`], [`USUAL`] or [`DEEP`].
#[derive(Clone, Copy)]
pub struct Quantized<C, const DEPTH: u8 = USUAL>(PhantomData<C>);

/// Stages of one chunk: for a ring that may have fewer stages than a turn has N-tiles. A stage of several chunks stays
/// in use for several turns, and would be waited for in vain.
pub const SHALLOW: u8 = 0;
/// Stages of [as many chunks](Code::CHUNKS) as [`CHUNK_BYTES`] have room for.
pub const USUAL: u8 = 1;
/// Stages of twice as many chunks, and more than [`CHUNK_BYTES`]: for one row, where consumers are quick enough to wait
/// for memory.
pub const DEEP: u8 = 2;

/// A lane's codes and its two scales, for each of its two slices of a chunk.
#[derive(Clone, Copy)]
pub(crate) struct ChunkCodes([([[u32; 4]; 2], [Scale; 2]); 2]);

impl Default for ChunkCodes {
    #[device]
    fn default() -> Self {
        Self([([[0; 4]; 2], [Scale(0); 2]); 2])
    }
}

/// How many pieces of 16 bytes a lane's codes of a slice have.
const fn parts<C: Code>() -> u32 {
    C::BITS / 4
}

/// Bytes from the beginning of a group to its second slice.
const fn second_at<C: Code>() -> u32 {
    C::SLICE_BYTES + SCALE_BYTES
}

/// Bytes from the beginning of a chunk to the codes of a slice, and to its scales.
#[device]
const fn slice_at<C: Code>(slice: u32) -> [u32; 2] {
    let group = slice / 2 * C::GROUP_BYTES;
    [group + slice % 2 * second_at::<C>(), group + C::SLICE_BYTES]
}

/// The byte at which an N-tile's chunk begins. `group` is the number of the chunk of 8 N-tiles that has it.
#[device]
const fn chunk_at<C: Code>(group: u32, n_tile: u32) -> u64 {
    (group * GROUP_N_TILES + n_tile % GROUP_N_TILES) as u64 * C::BYTES as u64
}

/// The words of fragment `f`, from a lane's `codes` of a slice.
#[device]
const fn words<C: Code>(codes: &[[u32; 4]; 2], f: usize) -> [u32; 2] {
    if C::BITS == 4 { [codes[0][f], 0] } else { [codes[f / 2][f % 2 * 2], codes[f / 2][f % 2 * 2 + 1]] }
}

/// Puts the `joined` words of fragment `F` among a lane's `codes` of a slice.
#[device]
fn put_words<C: Code, const F: usize>(codes: &mut [[u32; 4]; 2], joined: [u32; 2]) {
    if C::BITS == 4 {
        codes[0][F] = joined[0];
    } else {
        codes[F / 2][F % 2 * 2] = joined[0];
        codes[F / 2][F % 2 * 2 + 1] = joined[1];
    }
}

/// Factors of a fragment's lower and upper eight rows.
#[device]
fn both_factors<C: Code>([lower, upper]: [Scale; 2]) -> [Factors; 2] {
    [lower.factors::<C>(false), upper.factors::<C>(true)]
}

/// A lane's codes of a slice, and its two scales, from shared memory.
///
/// # Safety
/// An N-tile's codes of a slice, and its scales, are complete there: [`SLICE_BYTES`](Code::SLICE_BYTES) and
/// [`SCALE_BYTES`] of shared memory. `lane` is below 32.
#[device]
unsafe fn load_slice<C: Code>(codes: Shared<u8>, scales: Shared<u8>, lane: u32) -> ([[u32; 4]; 2], [Scale; 2]) {
    // SAFETY: the caller's word.
    unsafe {
        let from = codes.at((lane * 16) as usize);
        let mut codes = [[0; 4]; 2];
        unroll!(I < 2; {
            if (I as u32) < parts::<C>() {
                codes[I] = from.load16(I * 512);
            }
        });
        let scales = scales.at((lane / 4 * 4) as usize).cast::<u32>();
        (codes, [Scale(scales.load(0)), Scale(scales.load(8))])
    }
}

/// The array as which the step of many sequences reads the `chunks` chunks of N-tiles at `address`. A box is a slice of
/// each of [`GROUP_N_TILES`] N-tiles, with the scales beside them.
#[cfg(not(target_arch = "nvptx64"))]
#[must_use]
pub const fn stages<C: Code>(address: u64, chunks: u64) -> tensor::Array {
    let [group, second] = [C::GROUP_BYTES as u64, second_at::<C>() as u64];
    tensor::Array {
        address,
        sizes: [group / 8, GROUPS as u64, chunks, 1],
        strides: [group, C::BYTES as u64, C::BYTES as u64 * chunks],
        extent: [second as u32 / 8, 1, GROUP_N_TILES, 1],
    }
}

impl<C: Code, const DEPTH: u8> WeightFormat for Quantized<C, DEPTH> {
    type Products = OfFragments;
    const PLAIN_HEAD: bool = true;
    const CHUNKS: u32 = match DEPTH {
        SHALLOW => 1,
        DEEP => 2 * C::CHUNKS,
        _ => C::CHUNKS,
    };
    const STAGE_BYTES: u32 = if DEPTH == DEEP { Self::CHUNKS * C::BYTES } else { CHUNK_BYTES };
    const UNDER_WAY: u32 = if DEPTH == DEEP { 1 } else { 2 };
    const UNDER_WAY_OF_ONE: [u32; 2] = if DEPTH == DEEP { [2, 4] } else { [3, 7] };

    #[device]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe {
            // All lanes must have seen that the stage is empty before it is filled: consumers may then release it, and
            // a lane that looks too late would miss the phase.
            warp::sync_warp();
            if thread::opaque(thread::lane_id()) == 0 {
                let chunks = (wave.depth - q).min(Self::CHUNKS);
                ring.full().arrive_expect_tx(chunks * C::BYTES);
                let mut i = 0;
                while i < chunks {
                    let from = p.codes.at(chunk_at::<C>(wave.group(n_tile, q + i), n_tile) as usize);
                    let to = ring.stage_buffer().at((i * C::BYTES) as usize);
                    bulk::copy_to_shared_once(to, from, C::BYTES, ring.full());
                    i += 1;
                }
            }
        }
    }
}

impl<C: Code, const DEPTH: u8> FragmentFormat for Quantized<C, DEPTH> {
    const COSTLY: bool = true;
    const BY_PAIRS: bool = DEPTH == DEEP;
    type Chunk = ChunkCodes;

    #[device]
    unsafe fn load_chunk((stage, chunk): (&Ring, u32), k_partial: u32, lane: u32) -> ChunkCodes {
        // SAFETY: the caller's word.
        unsafe {
            let chunk: Shared<u8> = shared::dynamic(stage.offset() + chunk * C::BYTES);
            let slice = |s: u32| {
                let [codes, scales] = slice_at::<C>(k_partial + s * K_PARTIALS);
                load_slice::<C>(chunk.at(codes as usize), chunk.at(scales as usize), lane)
            };
            ChunkCodes([slice(0), slice(1)])
        }
    }

    #[device]
    fn fragment(codes: &ChunkCodes, i: usize) -> [u32; 4] {
        let (codes, scales) = &codes.0[i / 4];
        C::decode(words::<C>(codes, i % 4), &both_factors::<C>(*scales))
    }

    #[device]
    unsafe fn load(
        _: &DecodeStep,
        chunk: (&Ring, u32),
        k_partial: u32,
        lane: u32,
        mut beside: impl FnMut(usize),
    ) -> WeightFragments {
        // SAFETY: the caller's word.
        let codes = unsafe { Self::load_chunk(chunk, k_partial, lane) };
        let mut weights = [[0; 4]; 8];
        unroll!(I < 8; {
            beside(I);
            weights[I] = Self::fragment(&codes, I);
        });
        weights
    }

    #[device]
    unsafe fn scale(_: &DecodeStep, _: u32) -> f32 {
        C::UNIT
    }
}
