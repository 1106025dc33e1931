//! Multiplies one split-K partial of a unit of the batched kernel's GEMMs. Each [kind of format](MainLoop) has a loop
//! that takes the stages from the rings and leaves the sums in the upper accumulators.
//!
//! # Safety
//! As for the [main loop](super::main_loop).

use cuda_std::wgmma::{self, Cores, Operand};
use cuda_std::{Global, bf16, device, thread};

use super::{BatchedStep, GROUP, Phase, Rings, WEIGHT_BYTES};
use crate::ring::Ring;
use crate::stream::STEP_BYTES;
use crate::weights::{BatchedFormat, CodedFormat, LoadedFormat, PairedFormat, Plain, WeightFragments, put_fragments};

/// A split-K partial to multiply.
pub(crate) struct KPartial {
    number: u32,
    /// Its stages in each of the two rings.
    depth: u32,
    /// Whether its weights are [bf16](Phase::plain) although the kernel reads codes.
    is_plain: bool,
}

impl KPartial {
    /// Split-K partial `number` of a phase, with `depth` stages.
    #[device]
    pub unsafe fn new<F: BatchedFormat>(phase: Global<Phase>, number: u32, depth: u32) -> Self {
        // SAFETY: the caller's word.
        let is_plain = F::PLAIN_HEAD && unsafe { !field!(phase, plain: Global<bf16>).is_null() };
        Self { number, depth, is_plain }
    }
}

/// Multiplies a split-K partial, into the upper accumulators.
///
/// # Safety
/// The rings' next stages are those of this split-K partial.
#[device]
pub unsafe fn multiply<F: BatchedFormat, const TILES: usize>(p: &BatchedStep, rings: &mut Rings, of: &KPartial) {
    if of.depth == 0 {
        // The matrix has fewer slices than there are split-K indices.
        unroll!(J < TILES of 16; {
            accumulators!(64 + 4 * J, [0.0; 4]);
        });
    } else {
        // SAFETY: the caller's word.
        unsafe { F::MainLoop::multiply::<TILES>(p, rings, of, thread::opaque(thread::lane_id())) }
    }
}

/// The main loop of a weight format.
pub(crate) trait MainLoop<F> {
    /// Multiplies a split-K partial, into the upper accumulators of `TILES` times 8 rows.
    ///
    /// # Safety
    /// The rings' next stages are those of this split-K partial, at least one. `lane` is the lane's number.
    unsafe fn multiply<const TILES: usize>(p: &BatchedStep, rings: &mut Rings, of: &KPartial, lane: u32);
}

/// The main loop of bf16 weights. With 64 rows a tile they go through registers; with more, `wgmma` reads them from
/// shared memory.
pub(crate) struct OfPlain;

impl MainLoop<Plain> for OfPlain {
    #[device]
    unsafe fn multiply<const TILES: usize>(p: &BatchedStep, rings: &mut Rings, of: &KPartial, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            if TILES == 8 {
                multiply_loaded::<Plain, TILES>(p, rings, of, lane);
            } else {
                multiply_shared::<TILES>(rings, of.depth, lane);
            }
        }
    }
}

/// The main loop of weights that take long to unpack: two stages at a time.
pub(crate) struct InPairs;

impl<F: PairedFormat> MainLoop<F> for InPairs {
    #[device]
    unsafe fn multiply<const TILES: usize>(p: &BatchedStep, rings: &mut Rings, of: &KPartial, lane: u32) {
        // SAFETY: the caller's word.
        unsafe { multiply_pairs::<F, TILES>(p, rings, of, lane) }
    }
}

/// The main loop of codes, and of the bf16 head beside them.
pub(crate) struct OfCodes;

impl<F: CodedFormat> MainLoop<F> for OfCodes {
    #[device]
    unsafe fn multiply<const TILES: usize>(p: &BatchedStep, rings: &mut Rings, of: &KPartial, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            if of.is_plain {
                multiply_loaded::<Plain, TILES>(p, rings, of, lane);
            } else {
                multiply_coded::<F, TILES>(rings, of, lane);
            }
        }
    }
}

// In all loops the first stage is separate, so that overwriting the accumulators is a constant. The assembler then
// knows that their old contents are dead, and gives their registers to the work between split-K partials.

/// With 96 or 128 rows a tile: `wgmma` reads weights from shared memory, and the MMAs of two stages are under way.
///
/// # Safety
/// `depth` is at least 1.
#[device]
unsafe fn multiply_shared<const TILES: usize>(rings: &mut Rings, depth: u32, lane: u32) {
    // SAFETY: the caller's word.
    unsafe {
        begin_products::<TILES>(rings, false);
        let mut turn = 1;
        while turn < depth {
            let next = rings.ahead();
            begin_products::<TILES>(&next, true);
            wgmma::wait::<1>();
            rings.release(lane);
            *rings = next;
            turn += 1;
        }
        wgmma::wait::<0>();
        rings.release(lane);
        *rings = rings.ahead();
    }
}

/// With 64 rows a tile, and for the bf16 head beside codes: weights go through registers, so that their stages are
/// released before they are multiplied. Fragments are loaded into one half of their registers while MMAs read the other
/// half.
///
/// # Safety
/// The split-K partial has at least one stage.
#[device]
unsafe fn multiply_loaded<F: LoadedFormat, const TILES: usize>(
    p: &BatchedStep,
    rings: &mut Rings,
    of: &KPartial,
    lane: u32,
) {
    // SAFETY: the caller's word.
    unsafe {
        let Rings { ring, rows, .. } = rings;
        load_weights::<F, 0>(p, ring, lane);
        rows.wait_full();
        begin_loaded::<TILES, 0>(rows, false);
        let mut turn = 1;
        while turn < of.depth {
            load_weights::<F, 4>(p, ring, lane);
            end_loaded(rows, lane);
            rows.wait_full();
            begin_loaded::<TILES, 4>(rows, true);
            turn += 1;
            if turn == of.depth {
                break;
            }
            load_weights::<F, 0>(p, ring, lane);
            end_loaded(rows, lane);
            rows.wait_full();
            begin_loaded::<TILES, 0>(rows, true);
            turn += 1;
        }
        end_loaded(rows, lane);
    }
}

/// For codes: the next stage's codes are loaded while the MMAs of this stage are issued.
///
/// # Safety
/// The split-K partial has at least one stage.
#[device]
unsafe fn multiply_coded<F: CodedFormat, const TILES: usize>(rings: &mut Rings, of: &KPartial, lane: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let Rings { ring, rows, .. } = rings;
        ring.wait_full();
        let mut codes = F::load_codes(ring.stage_buffer(), of.number, lane);
        // A stage, but not the last. Whether it is the first is a constant in each call.
        macro_rules! multiply {
            ($first:literal, $keep:literal) => {{
                let (next, ahead) = (ring.ahead(1), if $keep { rows.ahead(1) } else { *rows });
                // Polled before they are needed, to hide the latency of the answers.
                let (has_next, has_rows) = (next.is_full(), ahead.is_full());
                release_codes::<F, $first>(codes, ring, lane);
                if $keep {
                    end_loaded(rows, lane);
                }
                if !has_next {
                    ring.wait_full();
                }
                codes = F::load_codes(ring.stage_buffer(), of.number, lane);
                if !has_rows {
                    rows.wait_full();
                }
                begin_loaded::<TILES, $first>(rows, $keep);
            }};
        }
        macro_rules! multiply_last {
            ($first:literal, $keep:literal) => {{
                release_codes::<F, $first>(codes, ring, lane);
                if $keep {
                    end_loaded(rows, lane);
                }
                rows.wait_full();
                begin_loaded::<TILES, $first>(rows, $keep);
            }};
        }
        if of.depth == 1 {
            multiply_last!(0, false);
        } else {
            multiply!(0, false);
            let mut turn = 2;
            loop {
                if turn == of.depth {
                    multiply_last!(4, true);
                    break;
                }
                multiply!(4, true);
                turn += 1;
                if turn == of.depth {
                    multiply_last!(0, true);
                    break;
                }
                multiply!(0, true);
                turn += 1;
            }
        }
        end_loaded(rows, lane);
    }
}

/// Decodes a stage's codes into the fragment registers of four steps from `FIRST` on, and releases the stage.
///
/// # Safety
/// As for [`load_weights`]; the codes are those of the ring's stage.
#[device]
unsafe fn release_codes<F: CodedFormat, const FIRST: usize>(codes: F::Codes, ring: &mut Ring, lane: u32) {
    F::put_codes::<FIRST>(codes);
    // SAFETY: the caller's word.
    unsafe { ring.release_loaded(F::mix(codes), lane == 0) };
    *ring = ring.ahead(1);
}

/// For weights that take long to unpack: fragments of two stages are unpacked at once, while MMAs read those of the two
/// stages before.
#[device]
unsafe fn multiply_pairs<F: PairedFormat, const TILES: usize>(
    p: &BatchedStep,
    rings: &mut Rings,
    of: &KPartial,
    lane: u32,
) {
    // SAFETY: the caller's word.
    unsafe {
        let Rings { ring, rows, .. } = rings;
        if of.depth < 2 {
            load_weights::<F, 0>(p, ring, lane);
            rows.wait_full();
            begin_loaded::<TILES, 0>(rows, false);
            end_loaded(rows, lane);
            return;
        }
        ring.wait_full_pair();
        let (weights, [mut has_next, has_rows]) = unpack_pair::<F>(p, ring, rows, lane);
        put_fragments(weights);
        if !has_rows {
            rows.wait_full_pair();
        }
        begin_pair::<TILES>(rows, false);
        let mut turn = 2;
        while turn + 1 < of.depth {
            if !has_next {
                ring.wait_full_pair();
            }
            let ahead = rows.ahead(2);
            let (weights, full) = unpack_pair::<F>(p, ring, &ahead, lane);
            has_next = full[0];
            end_pair(rows, lane);
            put_fragments(weights);
            if !full[1] {
                rows.wait_full_pair();
            }
            begin_pair::<TILES>(rows, true);
            turn += 2;
        }
        end_pair(rows, lane);
        if turn < of.depth {
            load_weights::<F, 0>(p, ring, lane);
            rows.wait_full();
            begin_loaded::<TILES, 0>(rows, true);
            end_loaded(rows, lane);
        }
    }
}

/// Unpacks two stages of weights, which are full, and releases them. Also returns whether the next two stages are full,
/// and whether `rows` and the stage after it are: polled before they are needed, to hide the latency of the answers.
///
/// # Safety
/// The ring's next two stages are of one split-K partial, and the first has an even number in it.
#[device]
unsafe fn unpack_pair<F: PairedFormat>(
    p: &BatchedStep,
    ring: &mut Ring,
    rows: &Ring,
    lane: u32,
) -> (WeightFragments, [bool; 2]) {
    // SAFETY: the caller's word.
    unsafe {
        let stages = [ring.stage_buffer(), ring.ahead(1).stage_buffer()];
        let weights = F::unpack_pair(p, stages, lane);
        let next = ring.ahead(2);
        let full = [next.is_full_pair(), rows.is_full_pair()];
        ring.release_pair(lane == 0);
        *ring = next;
        (weights, full)
    }
}

/// Loads a stage's fragments into the registers of four steps from `FIRST` on, and releases the stage.
///
/// # Safety
/// `FIRST` is 0 for the split-K partial's stages with an even number, and 4 for the others. No MMA reads these
/// registers.
#[device]
unsafe fn load_weights<F: LoadedFormat, const FIRST: usize>(p: &BatchedStep, ring: &mut Ring, lane: u32) {
    // SAFETY: the caller's word.
    unsafe {
        ring.wait_full();
        F::load_fragments::<FIRST>(p, ring.stage_buffer(), lane);
        ring.release(lane == 0);
        *ring = ring.ahead(1);
    }
}

/// Begins the MMAs of the rows' stage, which is full, with the fragments of four steps from `FIRST` on.
///
/// # Safety
/// The fragments are those of the same inputs as the rows.
#[device]
unsafe fn begin_loaded<const TILES: usize, const FIRST: usize>(rows: &Ring, keep: bool) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::fence();
        multiply_stage::<TILES, FIRST>(rows, keep);
        wgmma::commit();
    }
}

/// Begins the MMAs of the rows' stage and the next one, which are full, with the fragments of eight steps.
#[device]
unsafe fn begin_pair<const TILES: usize>(rows: &Ring, keep: bool) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::fence();
        multiply_stage::<TILES, 0>(rows, keep);
        multiply_stage::<TILES, 4>(&rows.ahead(1), true);
        wgmma::commit();
    }
}

/// Issues the MMAs of a stage of rows with the fragments of four steps from `FIRST` on.
///
/// # Safety
/// The rows' stage was waited for, and the registers are fenced.
#[device]
unsafe fn multiply_stage<const TILES: usize, const FIRST: usize>(rows: &Ring, keep: bool) {
    // SAFETY: the caller's word.
    unsafe {
        let x = Operand::at(rows.stage_buffer());
        macro_rules! multiply {
            ($mma:ident: $($step:literal)*) => {{
                $( wgmma::$mma::<$step>(x.advance($step % 4 * 32), keep || $step % 4 != 0); )*
            }};
        }
        match (TILES, FIRST) {
            (8, 0) => multiply!(mma_n64_upper: 0 1 2 3),
            (8, _) => multiply!(mma_n64_upper: 4 5 6 7),
            (_, 0) => multiply!(mma_n128_upper: 0 1 2 3),
            (_, _) => multiply!(mma_n128_upper: 4 5 6 7),
        }
    }
}

/// Waits for the MMAs, and releases the stage of rows that they have read.
///
/// # Safety
/// The MMAs of this stage of rows are the last that were begun.
#[device]
unsafe fn end_loaded(rows: &mut Ring, lane: u32) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::wait::<0>();
        rows.empty().arrive_if(lane == 0);
        *rows = rows.ahead(1);
    }
}

/// As `end_loaded`, for two stages of rows.
#[device]
unsafe fn end_pair(rows: &mut Ring, lane: u32) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::wait::<0>();
        rows.empty().arrive_if(lane == 0);
        rows.ahead(1).empty().arrive_if(lane == 0);
        *rows = rows.ahead(2);
    }
}

/// Begins the MMAs of a stage of weights and one of rows, once both are full.
///
/// # Safety
/// `rings` are at the stages to be multiplied; those before may be under way.
#[device]
unsafe fn begin_products<const TILES: usize>(rings: &Rings, keep: bool) {
    // SAFETY: the caller's word.
    unsafe {
        rings.ring.wait_full();
        rings.rows.wait_full();
        let group = thread::opaque(thread::thread_idx_x()) / GROUP;
        let weights = Cores::at(rings.ring.stage_buffer()).advance(group * (WEIGHT_BYTES / 2));
        let x = Operand::at(rings.rows.stage_buffer());
        wgmma::fence();
        unroll!(I < 4; {
            let (weights, x, keep) = (weights.advance(I as u32 * STEP_BYTES), x.advance(I as u32 * 32), keep || I != 0);
            if TILES == 12 {
                wgmma::mma_n96_cores(weights, x, keep);
            } else {
                wgmma::mma_n128_cores(weights, x, keep);
            }
        });
        wgmma::commit();
    }
}
