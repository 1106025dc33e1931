//! Formats of weights in the [stream](crate::stream): how a chunk lies in memory and in a stage of the ring, and how a warp gets
//! its fragments for the tensor core from it. Whatever the format, the fragments are bf16, and the GEMM is the same.
//!
//! | format | bits a weight | |
//! |---|---|---|
//! | [`Plain`] | 16 | as [`lay_out`](crate::stream::lay_out) leaves them |
//! | [`Lossless`] | 11.1 to 11.5 | exponents in two bits, with a list of those that do not fit |
//!
//! To add one: a type here that implements [`WeightFormat`], a kernel that makes it, and a line for each kernel that is to read it.

pub mod lossless;

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, bulk, mma, thread, warp, wgmma};

pub use lossless::Lossless;

use crate::linear::CHAINS;
use crate::ring::Ring;
use crate::stream::{CHUNK_BYTES, Pass, SLICE_BYTES, SLICES, SLICES_APART, STEP_BYTES, StreamStep, fragment_row};
use crate::wide::{Phase, WideStep};

/// A lane's fragments of weights for what a warp takes of a chunk, the slices `chain` and `chain + 4`: four instructions of each.
pub(crate) type Weights = [[u32; 4]; 8];

/// How the decode kernels read weights.
pub(crate) trait WeightFormat: Copy {
    /// Whether fragments cost so much work that no two warps should make the same ones: a warp then takes all rows of every
    /// other strip, and not half of the rows of every strip.
    const COSTLY: bool;

    /// How many maps there are of the weights, as TMA reads them.
    const MAPS: usize;

    /// Starts the copies of chunk `q` of a strip to a stage: a whole warp does it.
    unsafe fn fill(p: &StreamStep, ring: &Ring, pass: &Pass, strip: u32, q: u32);

    /// The fragments of a chain's slices of the chunk in this stage, which is full. `beside` is called twice, with 0 and 1,
    /// where shared memory is waited for.
    unsafe fn load(p: &StreamStep, stage: &Ring, chain: u32, lane: u32, beside: impl FnMut(u32)) -> Weights;

    /// What the sums of the matrix with this index have to be multiplied with.
    unsafe fn scale(p: &StreamStep, index: u32) -> f32;

    /// Where the slots of the batched decode kernel are: those of [`TOGETHER`](crate::stream::TOGETHER) strips from `strip` on.
    unsafe fn slots(p: &WideStep, pass: &Pass, strip: u32) -> Slots;

    /// The fragments of a warp's strip of a slot, which is full, into the registers of four instructions from `FIRST` on: 0 for
    /// the slots of a chain with an even number, and 4.
    unsafe fn load_fragments<const FIRST: usize>(p: &WideStep, slot: Shared<u8>, lane: u32);

    /// What the sums of a phase have to be multiplied with.
    unsafe fn scale_of(phase: Global<Phase>) -> f32;
}

/// Slots of weights for the batched decode kernel, of 8 strips: a slice of each.
#[derive(Clone, Copy)]
pub(crate) struct Slots {
    /// The first one of the first chain.
    pub first: Global<u8>,
    /// Bytes from a chain's first one to the next chain's.
    pub chain: u32,
    /// From a slot of a chain with an even number to the one after it, and from that to the next.
    pub apart: [u64; 2],
    /// Of a slot.
    pub bytes: u32,
}

/// bf16, as core matrices.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl WeightFormat for Plain {
    const COSTLY: bool = false;
    const MAPS: usize = 0;

    #[inline(always)]
    unsafe fn fill(p: &StreamStep, ring: &Ring, pass: &Pass, strip: u32, q: u32) {
        unsafe {
            let from = p.stream.cast().at(pass.slice(strip, q * SLICES) as usize);
            let lane = thread::fresh(thread::lane_id());
            if lane == 0 {
                ring.full().arrive_expect_tx(CHUNK_BYTES);
            }
            warp::sync_warp();
            if lane < SLICES {
                let to = ring.slot().at((lane * SLICE_BYTES) as usize);
                bulk::copy_to_shared_once(to, from.at((lane * SLICES_APART) as usize), SLICE_BYTES, ring.full());
            }
        }
    }

    #[inline(always)]
    unsafe fn load(_: &StreamStep, stage: &Ring, chain: u32, lane: u32, mut beside: impl FnMut(u32)) -> Weights {
        let mut weights = [[0; 4]; 8];
        unsafe {
            let from: Shared<u8> = shared::dynamic(stage.offset() + chain * SLICE_BYTES + fragment_row(lane));
            unroll!(I < 8; {
                let (slice, step) = (I as u32 / 4 * CHAINS, I as u32 % 4);
                weights[I] = mma::ldmatrix_x4(from.at((slice * SLICE_BYTES + step * STEP_BYTES) as usize));
            });
        }
        beside(0);
        beside(1);
        weights
    }

    #[inline(always)]
    unsafe fn scale(_: &StreamStep, _: u32) -> f32 {
        1.0
    }

    #[inline(always)]
    unsafe fn slots(p: &WideStep, pass: &Pass, strip: u32) -> Slots {
        let first = pass.slice(strip, 0);
        let within = pass.slice(strip, CHAINS) - first;
        let beyond = pass.slice(strip, 2 * CHAINS) - first - within;
        let first = unsafe { p.stream.cast().at(first as usize) };
        Slots { first, chain: SLICES_APART, apart: [within, beyond], bytes: SLICES_APART }
    }

    #[inline(always)]
    unsafe fn load_fragments<const FIRST: usize>(_: &WideStep, slot: Shared<u8>, lane: u32) {
        unsafe {
            let warp_id = thread::fresh(thread::warp_id());
            let from = slot.at((warp_id * SLICE_BYTES + fragment_row(lane)) as usize);
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
