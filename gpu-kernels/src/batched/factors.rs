//! The norm factors of the rows. One warp of the grid computes each row's factor. It goes to every CTA as a word of 8
//! bytes: the factor, and a sequence flag that no word at its place had before in this step. As in the [decode
//! kernel](crate::decode)'s exchange, a warp that needs a word reads it until it has the sequence flag.
//!
//! No word is overwritten too early: the consumers of every CTA have a GEMM's factors before they end its phase, and
//! the next factors are computed behind the grid barrier.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of the CTA's two helping warps call what is unsafe here, for each GEMM
//! that wants factors, and those of every other CTA do. The consumers read factors when they have waited for both
//! warps, and are done with them before the CTA ends the phase.

use cuda_std::{device, shared, thread, warp};

use super::phases::{GemmPhase, Unit};
use super::{BatchedStep, MAX_BATCHED_ROWS, Memory};
use crate::exchange::Words;

/// Helping warps of a CTA, which share this work.
pub const WARPS: u32 = 2;
/// Words that a lane reads.
const WORDS: usize = (MAX_BATCHED_ROWS / (WARPS * 32)) as usize;

/// The tiles of rows that the CTA's units have, as a bit mask.
///
/// # Safety
/// `gemm` is one of the launch's, with at most 32 tiles of rows.
#[device]
pub unsafe fn wanted_rows<const ROWS: u32>(gemm: &GemmPhase) -> u32 {
    let (mut wanted, mut unit) = (0, thread::block_idx_x());
    while let Some(Unit { row, .. }) = gemm.unit(unit, ROWS) {
        wanted |= 1 << (row / ROWS);
        unit += thread::grid_dim_x();
    }
    wanted
}

/// Computes the factors of this warp's rows. Then fetches its half of the factors that the CTA wants into shared
/// memory. All CTAs have done the phases before `phase`.
///
/// # Safety
/// All lanes of both warps call it; `which` is 0 for one and 1 for the other. All CTAs have done the phases before, and
/// the warp has waited for that; so the rows' squares are there, and nobody reads the factors before these any more.
#[device]
pub unsafe fn share<const ROWS: u32>(p: &BatchedStep, phase: u32, wanted: u32, which: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let words = Words::at(p.factor_words(), MAX_BATCHED_ROWS, phase + 1);
        let (lane, grid) = (thread::opaque(thread::lane_id()), thread::grid_dim_x());
        // Loaded here: kept over the phases, it would take registers.
        let count = p.work.rows.count.load(0).min(MAX_BATCHED_ROWS);
        let mut row = thread::block_idx_x() + which * grid;
        while row < count {
            let factor = p.work.norm().inverse_rms(row);
            if lane == 0 {
                words.put(row, factor.to_bits());
            }
            row += WARPS * grid;
        }
        warp::sync_warp();
        let row = |k: usize| (k as u32 * WARPS + which) * 32 + lane;
        let mut found = [words.nothing(); WORDS];
        unroll!(K < WORDS of 8; {
            if row(K) < count && wanted >> (row(K) / ROWS) & 1 == 1 {
                found[K] = words.ask(row(K));
            }
        });
        words.settle(&mut found, row);
        let factors = shared::dynamic::<f32>(Memory::<ROWS>::FACTORS);
        unroll!(K < WORDS of 8; {
            factors.store(row(K) as usize, f32::from_bits(found[K].bits()));
        });
        warp::sync_warp();
        Memory::<ROWS>::factors_ready().arrive_if(lane == 0);
    }
}
