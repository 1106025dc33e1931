//! Formats of weights in the [decode kernel](crate::decode): how a chunk lies in memory and in a stage of the ring, and
//! how it is multiplied. From most formats a warp makes bf16 fragments for the tensor core, and the GEMM is the same
//! for all of these; e4m3 is multiplied as it is.
//!
//! | format | bits a weight | |
//! |---|---|---|
//! | [`Plain`] | 16 | as [`lay_out`](crate::stream::lay_out) leaves them |
//! | [`Lossless`] | 11.1 to 11.5 | exponents in two bits, with a list of those that do not fit |
//! | `E4m3` | 8 | FP8 codes with a scale for 128 × 128, multiplied [by such codes](crate::e4m3) |
//! | [`quantized`] FP8 | 8.25 | FP8 codes and scales for each output, multiplied as bf16 |
//! | [`quantized`] int4 | 4.25 | codes, scales and zeros |
//!
//! To add a format, write a type here that implements [`WeightFormat`], and [`FragmentFormat`] if it becomes fragments
//! (and `BatchedFormat` for steps of many sequences); a kernel that makes weights of it; a line for each kernel that is
//! to read it; and a line that lists these kernels.
//!
//! # Safety
//! `p` is a launch's parameter block, and its weights are as that says. A whole warp calls what is unsafe here, each
//! lane with its own number: a producer's to fill a stage that is empty, a consumer's to load from one that is full,
//! which nobody fills or releases meanwhile.

// These need `wgmma`.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod batched;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod e4m3;
pub mod lossless;
pub mod quantized;

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, bf16, bulk, device, mma, thread, warp};

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub(crate) use batched::{BatchedFormat, CodedFormat, LoadedFormat, PairedFormat, StageSources, put_fragments};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub use e4m3::E4m3;
pub use lossless::Lossless;
pub use quantized::Quantized;
#[cfg(not(cuda_arch = "sm_90a"))]
pub(crate) use quantized::SHALLOW;
pub(crate) use quantized::{DEEP, Fp8, Int4};

use crate::decode::{DecodeStep, OfFragments, Products};
use crate::linear::K_PARTIALS;
use crate::ring::Ring;
use crate::stream::{CHUNK_BYTES, SLICE_BYTES, SLICES, SLICES_APART, STEP_BYTES, Wave, fragment_row};

/// A lane's weight fragments for a warp's part of a chunk, the slices `k_partial` and `k_partial + 4`: those of four
/// MMAs for each slice.
pub(crate) type WeightFragments = [[u32; 4]; 8];

/// How the decode kernels read weights.
pub(crate) trait WeightFormat: Copy {
    /// How they are multiplied.
    type Products: Products<Self>;

    /// Whether the head is not in this format, but plain. (For the decode kernel it may also be packed beside layers in
    /// a format that is not: see [`DecodeStep::lossless`].)
    const PLAIN_HEAD: bool = false;

    /// Chunks of a stage: consecutive ones of an N-tile. If an N-tile's chunks are no multiple of this, its last stage
    /// has fewer.
    const CHUNKS: u32 = 1;

    /// Bytes of a stage: at least those of a page's keys or values, and a multiple of the alignment that TMA asks of
    /// its destination.
    const STAGE_BYTES: u32 = CHUNK_BYTES;

    /// Stages that may be under way in place of one of [`Plain`]: 2 if they have about half of its bytes.
    const UNDER_WAY: u32 = 1;

    /// How many stages may be under way in a step of one row, to be multiplied by [`UNDER_WAY`](Self::UNDER_WAY): until
    /// a matrix has filled the ring once, and after that. If consumers are nearly as slow as memory, the words that
    /// CTAs exchange arrive sooner with fewer.
    const UNDER_WAY_OF_ONE: [u32; 2] = [3, 7];

    /// Inputs that take the place of one bf16.
    const INPUTS: u32 = 1;

    /// Starts the copies of an N-tile's chunks, from `q` on, to a stage. A whole warp does it.
    ///
    /// # Safety
    /// `p` is a launch's parameter block, and the wave and N-tile are of its weights. The stage is empty.
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32);
}

/// A format whose weights become fragments of bf16.
pub(crate) trait FragmentFormat: WeightFormat {
    /// Whether fragments cost so much work that no two warps should make the same ones: a warp then takes all rows of
    /// every other N-tile, and not half of the rows of every N-tile.
    const COSTLY: bool;

    /// Whether making fragments overwrites the stage, which otherwise is only read.
    const IN_PLACE: bool = false;

    /// Whether two N-tiles are multiplied side by side, each fragment as soon as it is made of its
    /// [`Chunk`](Self::Chunk). If not, a chunk's fragments are made while those of the chunk before are multiplied.
    const BY_PAIRS: bool = false;

    /// For formats that are multiplied by pairs: all that a lane's fragments of a chunk are made of.
    type Chunk: Copy + Default;

    /// Loads what a lane's fragments of a chunk are made of.
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    #[device]
    unsafe fn load_chunk(_chunk: (&Ring, u32), _k_partial: u32, _lane: u32) -> Self::Chunk {
        Self::Chunk::default()
    }

    /// Makes the `i`-th fragment of a chunk.
    #[device]
    fn fragment(_chunk: &Self::Chunk, _i: usize) -> [u32; 4] {
        [0; 4]
    }

    /// Makes the fragments of a split-K partial's slices of a chunk in this stage, which is full. Meanwhile it calls
    /// `beside` with the numbers from 0 to 7, in order. There the caller multiplies the fragments of the chunk before,
    /// so that the MMAs overlap with the making of the new fragments.
    ///
    /// # Safety
    /// `p` is a launch's parameter block. The whole warp calls it, having waited for the stage, which nobody fills or
    /// releases meanwhile.
    unsafe fn load(
        p: &DecodeStep,
        chunk: (&Ring, u32),
        k_partial: u32,
        lane: u32,
        beside: impl FnMut(usize),
    ) -> WeightFragments;

    /// The factor for the sums of the matrix with this index.
    ///
    /// # Safety
    /// `p` is a launch's parameter block, whose weights have the matrix.
    unsafe fn scale(p: &DecodeStep, index: u32) -> f32;
}

/// bf16, as core matrices. With `AHEAD` fragments are loaded like [costly](FragmentFormat::COSTLY) ones, an N-tile
/// ahead of those that are multiplied. This is for kernels of up to 16 rows whose attention leaves registers for it.
#[derive(Clone, Copy)]
pub struct Plain<const AHEAD: bool = false>;

impl<const AHEAD: bool> WeightFormat for Plain<AHEAD> {
    type Products = OfFragments;

    #[device]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe { Plain::<false>::fill_from(p.stream, ring, wave, n_tile, q) }
    }
}

impl<const AHEAD: bool> FragmentFormat for Plain<AHEAD> {
    const COSTLY: bool = AHEAD;
    type Chunk = ();

    #[device]
    unsafe fn load(
        _: &DecodeStep,
        (stage, _): (&Ring, u32),
        k_partial: u32,
        lane: u32,
        mut beside: impl FnMut(usize),
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
        unroll!(I < 8; {
            beside(I);
        });
        weights
    }

    #[device]
    unsafe fn scale(_: &DecodeStep, _: u32) -> f32 {
        1.0
    }
}

impl Plain {
    /// Starts the copies of an N-tile's chunk of this stream.
    ///
    /// # Safety
    /// As for [`fill`](WeightFormat::fill), of a stream that has the wave.
    #[device]
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
}
