//! Formats of weights in the [decode kernel](crate::decode): how a chunk lies in memory and in a stage of the ring, and
//! how it is multiplied. Of most formats a warp makes fragments for the tensor core, which are bf16, and the GEMM is
//! the same; e4m3 is multiplied as it is.
//!
//! | format | bits a weight | |
//! |---|---|---|
//! | [`Plain`] | 16 | as [`lay_out`](crate::stream::lay_out) leaves them |
//! | [`Lossless`] | 11.1 to 11.5 | exponents in two bits, with a list of those that do not fit |
//! | [`E4m3`] | 8 | FP8 codes with a scale for 128 × 128, multiplied [by such codes](crate::e4m3) |
//! | [`quantized`] FP8 | 8.25 | FP8 codes and scales for each output, multiplied as bf16 |
//! | [`quantized`] int4 | 4.25 | codes, scales and zeros |
//!
//! To add one: a type here that implements [`WeightFormat`], and [`FragmentFormat`] if it becomes fragments (and
//! [`BatchedFormat`] for steps of many sequences), a kernel that makes it, and a line for each kernel that is to read
//! it.

pub mod lossless;
pub mod quantized;

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, bf16, bulk, mma, thread, warp, wgmma};

pub use lossless::Lossless;
pub(crate) use quantized::{Fp8, Int4, Quantized};

use crate::batched::{BatchedStep, Phase};
use crate::decode::{DecodeStep, OfCodes, OfFragments, Products};
use crate::linear::K_PARTIALS;
use crate::ring::Ring;
use crate::stream::{CHUNK_BYTES, SLICE_BYTES, SLICES, SLICES_APART, STEP_BYTES, Wave, fragment_row};

/// A lane's fragments of weights for what a warp takes of a chunk, the slices `k_partial` and `k_partial + 4`: four
/// instructions of each.
pub(crate) type WeightFragments = [[u32; 4]; 8];

/// How the decode kernels read weights.
pub(crate) trait WeightFormat: Copy {
    /// What multiplies them.
    type Products: Products<Self>;

    /// The format of the head's weights.
    type Head: WeightFormat;

    /// Whether that is another one.
    const OTHER_HEAD: bool = false;

    /// Chunks of a stage: an N-tile's next ones. If its chunks are no multiple, the last stage has fewer.
    const CHUNKS: u32 = 1;

    /// How many maps there are of the weights, as TMA reads them.
    const MAPS: usize;

    /// How many stages may be under way for each one of [`Plain`].
    const UNDER_WAY: u32 = 1;

    /// Inputs in the place of a bf16.
    const INPUTS: u32 = 1;

    /// Starts the copies of an N-tile's chunks from `q` on to a stage: a whole warp does it.
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32);
}

/// A format whose weights become fragments of bf16.
pub(crate) trait FragmentFormat: WeightFormat {
    /// Whether fragments cost so much work that no two warps should make the same ones: a warp then takes all rows of
    /// every other N-tile, and not half of the rows of every N-tile.
    const COSTLY: bool;

    /// The fragments of a split-K partial's slices of a chunk in this stage, which is full. `beside` is called twice,
    /// with 0 and 1, where shared memory is waited for.
    unsafe fn load(
        p: &DecodeStep,
        chunk: (&Ring, u32),
        k_partial: u32,
        lane: u32,
        beside: impl FnMut(u32),
    ) -> WeightFragments;

    /// What the sums of the matrix with this index have to be multiplied with.
    unsafe fn scale(p: &DecodeStep, index: u32) -> f32;
}

/// How the batched decode kernels read weights.
pub(crate) trait BatchedFormat: FragmentFormat {
    /// How many stages have as many bytes as one of [`Plain`], or nearly.
    const STAGES: u32 = 1;

    /// Where the stages of the batched decode kernel are: those of [`TOGETHER`](crate::stream::TOGETHER) N-tiles from
    /// `n_tile` on.
    unsafe fn stages(p: &BatchedStep, wave: &Wave, n_tile: u32) -> StageSources;

    /// The fragments of a warp's N-tile of a stage of this split-K partial, which is full, into the registers of four
    /// instructions from `FIRST` on: 0 for the partial's stages with an even number, and 4.
    unsafe fn load_fragments<const FIRST: usize>(p: &BatchedStep, stage: Shared<u8>, k_partial: u32, lane: u32);

    /// Whether stages are unpacked in pairs, by [`unpack_pair`](Self::unpack_pair), as long as there are two.
    const PAIRED: bool = false;

    /// The fragments of a warp's N-tile of two stages of a split-K partial, which are full, the first with an even
    /// number.
    unsafe fn unpack_pair(_: &BatchedStep, _stages: [Shared<u8>; 2], _lane: u32) -> WeightFragments {
        WeightFragments::default()
    }

    /// What the sums of a phase have to be multiplied with.
    unsafe fn scale_of(phase: Global<Phase>) -> f32;
}

/// Stages of weights for the batched decode kernel, of 8 N-tiles: a slice of each.
#[derive(Clone, Copy)]
pub(crate) struct StageSources {
    /// The first one of the first split-K partial.
    pub first: Global<u8>,
    /// Bytes from the first one of split-K partial 0 to those of 1 and 2; that of 3 is as far from 2's as 1's from 0's.
    pub k_partials: [u32; 2],
    /// From a stage of a split-K partial with an even number to the one after it, and from that to the next.
    pub apart: [u64; 2],
    /// Of a stage.
    pub bytes: u32,
}

impl StageSources {
    /// The first stage of a split-K partial.
    #[inline(always)]
    pub unsafe fn of(&self, k_partial: u32) -> Global<u8> {
        let [odd, second] = self.k_partials;
        // SAFETY: the caller's word.
        unsafe { self.first.at((k_partial % 2 * odd + k_partial / 2 * second) as usize) }
    }
}

/// Puts a slice's fragments into the registers of four instructions from `FIRST` on.
#[inline(always)]
fn put_slice<const FIRST: usize>(weights: [[u32; 4]; 4]) {
    macro_rules! put {
        ($($i:literal)*) => {
            $(
                if FIRST == 0 {
                    wgmma::put_fragment::<$i>(weights[$i / 4][$i % 4]);
                } else {
                    wgmma::put_fragment::<{ 16 + $i }>(weights[$i / 4][$i % 4]);
                }
            )*
        };
    }
    put!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
}

/// Puts two slices' fragments into the registers of eight instructions.
#[inline(always)]
pub(crate) fn put_fragments([a, b, c, d, e, f, g, h]: WeightFragments) {
    put_slice::<0>([a, b, c, d]);
    put_slice::<4>([e, f, g, h]);
}

/// bf16, as core matrices.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl WeightFormat for Plain {
    type Products = OfFragments;
    type Head = Self;
    const MAPS: usize = 0;

    #[inline(always)]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe { Self::fill_from(p.stream, ring, wave, n_tile, q) }
    }
}

impl FragmentFormat for Plain {
    const COSTLY: bool = false;

    #[inline(always)]
    unsafe fn load(
        _: &DecodeStep,
        (stage, _): (&Ring, u32),
        k_partial: u32,
        lane: u32,
        mut beside: impl FnMut(u32),
    ) -> WeightFragments {
        let mut weights = [[0; 4]; 8];
        // SAFETY: the caller's word.
        unsafe {
            let from: Shared<u8> = shared::dynamic(stage.offset() + k_partial * SLICE_BYTES + fragment_row(lane));
            unroll!(I < 8; {
                let (slice, step) = (I as u32 / 4 * K_PARTIALS, I as u32 % 4);
                weights[I] = mma::ldmatrix_x4(from.at((slice * SLICE_BYTES + step * STEP_BYTES) as usize));
            });
        }
        beside(0);
        beside(1);
        weights
    }

    #[inline(always)]
    unsafe fn scale(_: &DecodeStep, _: u32) -> f32 {
        1.0
    }
}

impl Plain {
    /// Starts the copies of an N-tile's chunk of this stream.
    #[inline(always)]
    unsafe fn fill_from(stream: Global<bf16>, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let from = stream.cast().at(wave.slice(n_tile, q * SLICES) as usize);
            let lane = thread::opaque(thread::lane_id());
            if lane == 0 {
                ring.full().arrive_expect_tx(CHUNK_BYTES);
            }
            warp::sync_warp();
            if lane < SLICES {
                let to = ring.stage_buffer().at((lane * SLICE_BYTES) as usize);
                bulk::copy_to_shared_once(to, from.at((lane * SLICES_APART) as usize), SLICE_BYTES, ring.full());
            }
        }
    }

    /// The stages of 8 N-tiles from `n_tile` on, of a matrix in this stream.
    #[inline(always)]
    pub unsafe fn stages_of(stream: Global<bf16>, wave: &Wave, n_tile: u32) -> StageSources {
        let first = wave.slice(n_tile, 0);
        let within = wave.slice(n_tile, K_PARTIALS) - first;
        let beyond = wave.slice(n_tile, 2 * K_PARTIALS) - first - within;
        // SAFETY: the caller's word.
        let first = unsafe { stream.cast().at(first as usize) };
        StageSources {
            first,
            k_partials: [SLICES_APART, 2 * SLICES_APART],
            apart: [within, beyond],
            bytes: SLICES_APART,
        }
    }
}

impl BatchedFormat for Plain {
    #[inline(always)]
    unsafe fn stages(p: &BatchedStep, wave: &Wave, n_tile: u32) -> StageSources {
        // SAFETY: the caller's word.
        unsafe { Self::stages_of(p.stream, wave, n_tile) }
    }

    #[inline(always)]
    unsafe fn load_fragments<const FIRST: usize>(_: &BatchedStep, stage: Shared<u8>, _: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let from = stage.at((warp_id * SLICE_BYTES + fragment_row(lane)) as usize);
            let step = STEP_BYTES as usize;
            if FIRST == 0 {
                wgmma::load_fragments::<0, u8>(from);
                wgmma::load_fragments::<1, u8>(from.at(step));
                wgmma::load_fragments::<2, u8>(from.at(2 * step));
                wgmma::load_fragments::<3, u8>(from.at(3 * step));
            } else {
                wgmma::load_fragments::<4, u8>(from);
                wgmma::load_fragments::<5, u8>(from.at(step));
                wgmma::load_fragments::<6, u8>(from.at(2 * step));
                wgmma::load_fragments::<7, u8>(from.at(3 * step));
            }
        }
    }

    #[inline(always)]
    unsafe fn scale_of(_: Global<Phase>) -> f32 {
        1.0
    }
}

/// e4m3, multiplied by activations in e4m3.
#[derive(Clone, Copy)]
pub(crate) struct E4m3;

impl WeightFormat for E4m3 {
    type Products = OfCodes;
    type Head = Plain;
    const OTHER_HEAD: bool = true;
    const MAPS: usize = 0;
    const INPUTS: u32 = 2;

    #[inline(always)]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe { Plain::fill_from(p.e4m3.codes, ring, wave, n_tile, q) }
    }
}
