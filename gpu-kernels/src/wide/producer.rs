//! What brings weights, rows and their factors.

use cuda_std::bulk::{self, Barrier};
use cuda_std::{shared, tensor, thread, warp};

use super::{MAX_WIDE_ROWS, RESIDUES, SLICE_BYTES, TILE_STRIPS, WEIGHT_BYTES, Wide};
use crate::linear::SLICE;
use crate::ring::Ring;
use crate::stream::{CHUNK_BYTES, CHUNK_FEATURES, Pass, STRIPS};

/// The barrier that says that the factors are there.
#[inline(always)]
pub unsafe fn factors_ready<const ROWS: u32>() -> Barrier {
    unsafe { Barrier::at(shared::dynamic(Wide::ring(ROWS).shared_bytes())) }
}

/// Slices of a residue.
#[inline(always)]
pub fn depth(p: &Wide, residue: u32) -> u32 {
    (p.k / SLICE + RESIDUES - 1 - residue) / RESIDUES
}

/// The warp that loads weights: a lane a strip.
#[inline(always)]
pub unsafe fn produce_weights<const ROWS: u32>(p: &Wide) {
    unsafe {
        let lane = thread::lane_id();
        let (pass_strips, chunks) = (STRIPS * p.blocks, p.k.div_ceil(CHUNK_FEATURES));
        let mut ring = Ring::producer(Wide::ring(ROWS));
        let mut number = thread::block_idx_x();
        while let Some(unit) = p.unit(number, ROWS) {
            number += thread::fresh(thread::grid_dim_x());
            // Of a last, partial tile the last strip again, which nobody reads.
            let strip = (unit.strip + lane % TILE_STRIPS).min(p.strips - 1);
            core::hint::assert_unchecked(p.blocks > 0 && pass_strips > 0);
            let number = strip / pass_strips;
            let within = strip - number * pass_strips;
            core::hint::assert_unchecked(p.blocks > 0);
            let i = within / p.blocks;
            let place = within - i * p.blocks;
            let base = p.base + u64::from(number) * u64::from(pass_strips * chunks);
            let strips = (p.strips - number * pass_strips).min(pass_strips);
            let pass = Pass { base, rotation: 0, strips, depth: chunks };
            let mut residue = unit.residue;
            while residue < unit.end {
                let mut turn = 0;
                while turn < depth(p, residue) {
                    ring.wait_empty();
                    if lane == 0 {
                        ring.full().arrive_expect_tx(WEIGHT_BYTES);
                    }
                    warp::sync_warp();
                    if lane < TILE_STRIPS {
                        let chunk = pass.chunk(turn, i, place, p.blocks);
                        let from = chunk * u64::from(CHUNK_BYTES) + u64::from(residue * SLICE_BYTES);
                        let to = ring.slot().at((lane * SLICE_BYTES) as usize);
                        bulk::copy_to_shared(to, p.stream.cast().at(from as usize), SLICE_BYTES, ring.full());
                    }
                    ring = ring.ahead(1);
                    turn += 1;
                }
                residue += 1;
            }
        }
    }
}

/// The lane that loads activations.
#[inline(always)]
pub unsafe fn produce_rows<const ROWS: u32>(p: &Wide) {
    unsafe {
        tensor::acquire(p.x);
        let mut ring = Ring::producer(Wide::ring(ROWS));
        let mut number = thread::block_idx_x();
        while let Some(unit) = p.unit(number, ROWS) {
            number += thread::fresh(thread::grid_dim_x());
            let mut residue = unit.residue;
            while residue < unit.end {
                let mut turn = 0;
                while turn < depth(p, residue) {
                    ring.wait_empty();
                    ring.full().arrive_expect_tx(ROWS * SLICE * 2);
                    let to = ring.slot().at(WEIGHT_BYTES as usize);
                    tensor::load(to, p.x, [(turn * RESIDUES + residue) * SLICE, unit.row], ring.full());
                    ring = ring.ahead(1);
                    turn += 1;
                }
                residue += 1;
            }
        }
    }
}

/// Two warps find the factors of all rows, four at a time.
#[inline(always)]
pub unsafe fn find_factors<const ROWS: u32>(p: &Wide, which: u32) {
    unsafe {
        let count = p.rows.count.load(0).min(MAX_WIDE_ROWS);
        let factors = shared::dynamic::<f32>(Wide::factors(ROWS));
        let mut row = which * 4;
        while row < count {
            let mut found = p.norm.lane_squares([0, 1, 2, 3].map(|i| (row + i).min(count - 1)));
            unroll!(I < 4; {
                found[I] = p.norm.inverse_rms_of(found[I]);
            });
            unroll!(I < 4; {
                if thread::lane_id() == I as u32 {
                    factors.store(row as usize + I, found[I]);
                }
            });
            row += 8;
        }
        warp::sync_warp();
        factors_ready::<ROWS>().arrive_if(thread::lane_id() == 0);
    }
}
