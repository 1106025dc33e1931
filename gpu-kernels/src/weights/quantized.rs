//! FP8 and int4 weights as codes, with scales for each 128 inputs of an output.
//!
//! A weight is `bf16(code × scale)` of FP8, `bf16((code − zero) × scale)` of int4, rounded once, on every path of the
//! program. Here that is packed arithmetic on two weights at a time. A scale is a bf16, or, of int4, the sum of two,
//! `high + low`, of which the lower one has so few bits that its product with a code is exact: scales in f16 are such
//! sums.
//!
//! ```text
//! int4           c = code − zero                           c × scale
//! int4, f16      likewise                                  c × high + bf16(c × low)
//! FP8            c = the code's bits as those of a bf16,   c × scale, of which 2^120 is a part
//!                2^-120 of its value
//! ```
//!
//! # Layout
//! A chunk, an N-tile's 512 inputs, lies in one piece: chunk `q` of N-tile `n` of a [`Wave`] is number
//! `base + n · depth + q`. Of int4 two chunks come to a stage at a time.
//!
//! ```text
//! chunk    codes   [split-K partial 4][part][lane][16 bytes]    2 parts of int4, 4 of FP8
//!          scales  [group 4][row 16]  words                     see `Scale`
//! ```
//!
//! A lane's codes of a split-K partial are those of its eight fragments, in order: a word a fragment of int4, two of
//! FP8. In a word of int4 weight `h` of register `r` has bits `16 h + 4 r` on; in those of FP8 weights `h` of registers
//! 0 and 1 (2 and 3) have bytes `2 h` and `2 h + 1` of the first (second) word.

use core::marker::PhantomData;

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, kernel, math, thread, warp};

use super::{Plain, WeightFormat, WeightFragments};
use crate::decode::DecodeStep;
use crate::linear::{K_PARTIALS, N_TILE, SLICE};
use crate::ring::Ring;
use crate::stream::{CHUNK_BYTES, CHUNK_FEATURES, SLICES, SLICES_APART, STEP_BYTES, Wave, core_word};

/// Inputs that share a scale.
pub const GROUP: u32 = 128;
/// Groups of a chunk.
const GROUPS: u32 = CHUNK_FEATURES / GROUP;
/// Bytes of a chunk's scales.
const SCALE_BYTES: u32 = GROUPS * N_TILE * 4;
/// Weights of a chunk.
const CHUNK_WEIGHTS: u32 = CHUNK_FEATURES * N_TILE;

/// What codes are.
pub trait Code: Copy {
    /// Bits of one.
    const BITS: u32;
    /// Chunks of a stage.
    const CHUNKS: u32;
    /// Of how many bf16 a scale is the sum.
    const PARTS: u32;
    /// What a scale is multiplied with to be stored.
    const FACTOR: f32;
    /// Bytes of a chunk.
    const BYTES: u32 = CHUNK_WEIGHTS / 8 * Self::BITS + SCALE_BYTES;

    /// The code of the weight `w`, one of those that the scale makes; any if it is none.
    fn encode(w: f32, scale: Scale) -> u32;

    /// Puts a fragment's codes, `[register][half]`, into words: the first alone of int4.
    fn join(codes: [[u32; 2]; 4]) -> [u32; 2];

    /// A fragment of the codes in these words, by the scales of its lower and upper eight rows. `zero` is zero, which
    /// the assembler does not know: a constant that has it stays in a register.
    fn decode(words: [u32; 2], scales: &[Factors; 2], zero: u32) -> [u32; 4];
}

/// A scale and a zero as they are stored. The upper bf16 is the scale's high part. The lower one is minus (128 + zero);
/// or if there are two parts, the low part, of which the last five bits are zeros, and hold the zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale(pub u32);

/// Of a word the bits of the zero.
const ZERO_BITS: u32 = 0x1f;
/// -128 as a bf16; with those bits, minus (128 + zero).
const LEAST: u32 = 0xc300;

impl Scale {
    /// The word of a scale and a zero; none if the scale is no such sum, or the zero is beyond 16.
    #[must_use]
    pub fn new<C: Code>(scale: f32, zero: u8) -> Option<Self> {
        let scale = scale * C::FACTOR;
        // Cut off, not rounded: parts of one sign leave a zero its sign.
        let high = bf16::from_bits((scale.to_bits() >> 16) as u16);
        let low = bf16::from_f32(scale - high.to_f32());
        let low_bits = u32::from(low.to_bits());
        // With as few bits as a code has room for beside it.
        let fits = scale.is_finite()
            && high.to_f32() + low.to_f32() == scale
            && low_bits & if C::PARTS == 1 { 0x7fff } else { ZERO_BITS } == 0
            && zero <= 16;
        let low_bits = if C::PARTS == 1 { LEAST } else { low_bits };
        fits.then(|| Self(u32::from(high.to_bits()) << 16 | low_bits | u32::from(zero)))
    }

    /// The word with one part of this one with two; none if the low part is not zero.
    #[must_use]
    pub const fn coarse(self) -> Option<Self> {
        if self.0 & 0x7fff & !ZERO_BITS == 0 { Some(Self(self.0 & (0xffff_0000 | ZERO_BITS) | LEAST)) } else { None }
    }

    /// The scale times [`Code::FACTOR`].
    #[inline(always)]
    fn value<C: Code>(self) -> f32 {
        let [low, high] = math::unpack_bf16(self.0 & !ZERO_BITS);
        if C::PARTS == 1 { high } else { high + low }
    }

    #[inline(always)]
    fn zero(self) -> u32 {
        self.0 & ZERO_BITS
    }

    /// As [`Code::decode`] takes it.
    #[inline(always)]
    pub fn factors<C: Code>(self) -> Factors {
        let (low, high) = (math::permute(self.0, self.0, 0x1010), math::permute(self.0, self.0, 0x3232));
        if C::PARTS == 1 {
            return Factors { high, low: 0, zero: low };
        }
        let zero_bits = ZERO_BITS << 16 | ZERO_BITS;
        Factors { high, low: low & !zero_bits, zero: low & zero_bits | LEAST << 16 | LEAST }
    }
}

/// A scale and a zero, each twice in a word.
#[derive(Clone, Copy)]
pub struct Factors {
    high: u32,
    low: u32,
    /// Minus (128 + zero).
    zero: u32,
}

/// Two bf16 that are `-0`: a product is added to it where it is all that is wanted.
const NOTHING: u32 = 0x8000_8000;
/// Two bf16 that are 1.
const ONES: u32 = 0x3f80_3f80;

impl Factors {
    /// Two whole numbers, or codes of FP8, times the scale, rounded once.
    #[inline(always)]
    fn scaled<C: Code>(&self, c: u32) -> u32 {
        let low = if C::PARTS == 1 { NOTHING } else { math::fma_bf16x2(c, self.low, NOTHING) };
        math::fma_bf16x2(c, self.high, low)
    }
}

/// Whole numbers from 0 to 15, with scales that are the sum of so many bf16.
#[derive(Clone, Copy)]
pub struct Int4<const PARTS: u32>;

impl<const PARTS: u32> Code for Int4<PARTS> {
    const BITS: u32 = 4;
    const CHUNKS: u32 = 2;
    const PARTS: u32 = PARTS;
    const FACTOR: f32 = 1.0;

    #[inline(always)]
    fn encode(w: f32, scale: Scale) -> u32 {
        let value = scale.value::<Self>();
        let steps = if value == 0.0 { 0.0 } else { w / value };
        // Rounded as numbers above zero are when they are cut off.
        let code = (steps + scale.zero() as f32 + 0.5) as i32;
        code.clamp(0, 15) as u32
    }

    #[inline(always)]
    fn join(codes: [[u32; 2]; 4]) -> [u32; 2] {
        let mut word = 0;
        unroll!(R < 4; {
            word |= codes[R][0] << (4 * R) | codes[R][1] << (16 + 4 * R);
        });
        [word, 0]
    }

    #[inline(always)]
    fn decode(words: [u32; 2], scales: &[Factors; 2], zero: u32) -> [u32; 4] {
        let codes = 0x000f_000f | zero;
        let mut fragment = [0; 4];
        unroll!(R < 4; {
            // 128 + code.
            let code = words[0] >> (4 * R as u32) & codes | 0x4300_4300;
            let scale = &scales[R % 2];
            fragment[R] = scale.scaled::<Self>(math::fma_bf16x2(code, ONES, scale.zero));
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

    #[inline(always)]
    fn encode(w: f32, scale: Scale) -> u32 {
        // The least number with a leading one, and what is added to a number below it so that its last place is 2^-9.
        const LEAST: f32 = 1.0 / 64.0;
        const SHIFT: f32 = 16384.0;
        let scale = scale.value::<Self>() / Self::FACTOR;
        let value = if scale == 0.0 { 0.0 } else { math::abs(w) / math::abs(scale) };
        let bits = if value < LEAST {
            (value + SHIFT).to_bits() - SHIFT.to_bits()
        } else {
            let bits = value.to_bits();
            // To the nearest with three bits behind the leading one.
            ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).saturating_sub((127 - 7) << 3).min(0x7e)
        };
        bits | (w.to_bits() ^ scale.to_bits()) >> 24 & 0x80
    }

    #[inline(always)]
    fn join(codes: [[u32; 2]; 4]) -> [u32; 2] {
        let word = |r: usize| codes[r][0] | codes[r + 1][0] << 8 | codes[r][1] << 16 | codes[r + 1][1] << 24;
        [word(0), word(2)]
    }

    #[inline(always)]
    fn decode(words: [u32; 2], scales: &[Factors; 2], _: u32) -> [u32; 4] {
        const SIGNS: u32 = 0x8000_8000;
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

/// Codes of the layers' matrices. The head is [`Plain`].
#[derive(Clone, Copy)]
pub(crate) struct Quantized<C>(PhantomData<C>);

/// The codes of a split-K partial's slices of a chunk: how many 16 bytes a lane has.
const fn parts<C: Code>() -> u32 {
    C::BITS / 2
}

/// Where in a chunk a lane's scale of a slice is, of its lower rows.
#[inline(always)]
const fn scale_at<C: Code>(slice: u32, lane: u32) -> u32 {
    C::BYTES - SCALE_BYTES + (slice * SLICE / GROUP * N_TILE + lane / 4) * 4
}

/// The words of a fragment among a lane's `codes`.
#[inline(always)]
fn words<C: Code, const F: usize>(codes: &[[u32; 4]; 4]) -> [u32; 2] {
    if C::BITS == 4 { [codes[F / 4][F % 4], 0] } else { [codes[F / 2][F % 2 * 2], codes[F / 2][F % 2 * 2 + 1]] }
}

impl<C: Code> WeightFormat for Quantized<C> {
    type Head = Plain;
    const COSTLY: bool = true;
    const MAPS: usize = 0;
    const OTHER_HEAD: bool = true;
    const CHUNKS: u32 = C::CHUNKS;
    const UNDER_WAY: u32 = 2;

    #[inline(always)]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe {
            // Before something comes that would be given back, all lanes have seen that there is room.
            warp::sync_warp();
            if thread::opaque(thread::lane_id()) == 0 {
                let bytes = C::BYTES * (wave.depth - q).min(C::CHUNKS);
                let chunk = wave.base + u64::from(n_tile * wave.depth + q);
                ring.full().arrive_expect_tx(bytes);
                let from = p.codes.at((chunk * u64::from(C::BYTES)) as usize);
                bulk::copy_to_shared_once(ring.stage_buffer(), from, bytes, ring.full());
            }
        }
    }

    #[inline(always)]
    unsafe fn load(
        _: &DecodeStep,
        (stage, chunk): (&Ring, u32),
        k_partial: u32,
        lane: u32,
        mut beside: impl FnMut(u32),
    ) -> WeightFragments {
        // SAFETY: the caller's word.
        unsafe {
            let chunk: Shared<u8> = shared::dynamic(stage.offset() + chunk * C::BYTES);
            let from = chunk.at(((k_partial * parts::<C>() * 32 + lane) * 16) as usize);
            let mut codes = [[0; 4]; 4];
            unroll!(I < 4; {
                if (I as u32) < parts::<C>() {
                    codes[I] = from.load16(I * 512);
                }
            });
            let scale = |s: u32| {
                let at = chunk.at(scale_at::<C>(k_partial + s * K_PARTIALS, lane) as usize).cast::<u32>();
                [Scale(at.load(0)), Scale(at.load(8))]
            };
            let scales = [scale(0), scale(1)];
            let factors = scales.map(|scales| scales.map(Scale::factors::<C>));
            let zero = thread::unknown_zero();
            let mut weights = [[0; 4]; 8];
            beside(0);
            unroll!(F < 8; {
                weights[F] = C::decode(words::<C, F>(&codes), &factors[F / 4], zero);
            });
            beside(1);
            weights
        }
    }

    #[inline(always)]
    unsafe fn scale(_: &DecodeStep, _: u32) -> f32 {
        1.0
    }
}

/// Parameters of [`quantize_int4`], [`quantize_int4_f16`] and [`quantize_fp8`]. Grid: (N-tiles of the
/// wave, depth of the wave).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Quantize {
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them.
    pub stream: Global<bf16>,
    /// `[n_tiles, depth · 4, 16]`: the scales of the wave's N-tiles by groups of 128 inputs and by rows. Zero beyond
    /// the matrix.
    pub scales: Global<u32>,
    /// Chunks of codes.
    pub codes: GlobalMut<u8>,
    /// To which is added how many weights are none that the scales make.
    pub strange: GlobalMut<u32>,
    /// [`Wave::base`].
    pub base: u64,
    /// [`Wave::n_tiles`].
    pub n_tiles: u32,
    /// [`Wave::depth`].
    pub depth: u32,
}

/// Finds the codes of weights, by the scales that made them. A code is the quotient to the nearest: a weight is its
/// code's value but for 2^-9 of it.
#[inline(always)]
unsafe fn quantize<C: Code>(p: &Quantize) {
    // SAFETY: the caller's word.
    unsafe {
        let (lane, k_partial) = (thread::lane_id(), thread::warp_id());
        let (n_tile, q) = (thread::block_idx_x(), thread::block_idx_y());
        let wave = Wave { base: p.base, rotation: 0, n_tiles: p.n_tiles, depth: p.depth };
        let chunk = p.base + u64::from(n_tile * p.depth + q);
        let to = p.codes.at((chunk * u64::from(C::BYTES)) as usize);
        let scales = p.scales.at(((n_tile * p.depth + q) * GROUPS * N_TILE) as usize);
        let mut codes = [[0; 4]; 4];
        let mut strange = false;
        unroll!(F < 8; {
            let slice = k_partial + F as u32 / 4 * K_PARTIALS;
            let from = wave.slice(n_tile, q * SLICES) + u64::from(slice * SLICES_APART + F as u32 % 4 * STEP_BYTES);
            let from = p.stream.cast::<u8>().at(from as usize).cast::<u32>();
            let scale = |half: u32| {
                Scale(scales.load_nc((slice * SLICE / GROUP * N_TILE + lane / 4 + 8 * half) as usize))
            };
            let scale = [scale(0), scale(1)];
            let mut words = [0; 4];
            let mut found = [[0; 2]; 4];
            unroll!(R < 4; {
                words[R] = from.load_nc((core_word(R as u32) + lane) as usize);
                found[R] = math::unpack_bf16(words[R]).map(|w| C::encode(w, scale[R % 2]));
            });
            let joined = C::join(found);
            let again = C::decode(joined, &scale.map(Scale::factors::<C>), 0);
            unroll!(R < 4; {
                strange |= again[R] != words[R];
            });
            if C::BITS == 4 {
                codes[F / 4][F % 4] = joined[0];
            } else {
                codes[F / 2][F % 2 * 2] = joined[0];
                codes[F / 2][F % 2 * 2 + 1] = joined[1];
            }
        });
        unroll!(I < 4; {
            if (I as u32) < parts::<C>() {
                let at = ((k_partial * parts::<C>() + I as u32) * 32 + lane) * 16;
                unroll!(W < 4; {
                    to.at(at as usize).cast::<u32>().store(W, codes[I][W]);
                });
            }
        });
        let thread = thread::thread_idx_x();
        if thread < GROUPS * N_TILE {
            let at = C::BYTES - SCALE_BYTES + thread * 4;
            to.at(at as usize).cast::<u32>().store(0, scales.load_nc(thread as usize));
        }
        if warp::any(strange) && lane == 0 {
            atomic::fetch_add(p.strange, 0, 1, Ordering::Relaxed, Scope::Device);
        }
    }
}

/// The codes of int4 weights.
#[kernel(threads = 128)]
pub unsafe fn quantize_int4(p: Quantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { quantize::<Int4<1>>(&p) }
}

/// The same where scales have two parts.
#[kernel(threads = 128)]
pub unsafe fn quantize_int4_f16(p: Quantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { quantize::<Int4<2>>(&p) }
}

/// The codes of FP8 weights.
#[kernel(threads = 128)]
pub unsafe fn quantize_fp8(p: Quantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { quantize::<Fp8>(&p) }
}

const _: () = assert!(Int4::<1>::CHUNKS * Int4::<1>::BYTES <= CHUNK_BYTES && Fp8::CHUNKS * Fp8::BYTES <= CHUNK_BYTES);
