//! The warp that keeps the ring of a GEMM full, and the wait for the launches ahead.

use cuda_std::tensor;
use cuda_std::{bulk, dependent_launch};

use super::epilogue::Epilogue;
use super::{DEPTH, Gemm, Tiles, WEIGHT_ROWS, X_BYTES, loaded};
use crate::decode::{SLICES_APART, Slices, TOGETHER};
use crate::linear::{K_PARTIALS, N_TILE};
use crate::ring::Ring;

/// Waits until what the launches ahead left can be read. Blocks alone have nobody beside them.
#[inline(always)]
pub(super) unsafe fn wait<const DOWN: u32, const ACROSS: u32>(p: &Gemm) {
    if DOWN * ACROSS > 1 {
        // SAFETY: the caller's word.
        unsafe { p.beside.wait() };
    } else {
        dependent_launch::wait();
    }
}

/// The slice that is multiplied after this one: the next of its split-K partial, or the first of the next split-K
/// partial.
#[inline(always)]
const fn slice_after(slice: u32, slices: u32) -> u32 {
    if slice + K_PARTIALS < slices { slice + K_PARTIALS } else { slice % K_PARTIALS + 1 }
}

/// One lane keeps the ring full, of a block at `down` and `across` in its cluster.
#[inline(always)]
pub(super) unsafe fn produce<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(
    p: &Gemm,
    tiles: Tiles,
    [down, across]: [u32; 2],
) {
    // SAFETY: the caller's word.
    unsafe {
        let mut ring = Ring::producer(Gemm::ring(N));
        tensor::acquire(p.x);
        let slices = p.slices();
        let parts = const { loaded(N) / WEIGHT_ROWS };
        // A tile's weights; behind the matrix the last ones again.
        let weights_of = |column: u32| {
            let n_tile = column * (if E::GATED { 2 } else { 1 }) / N_TILE;
            let last = (p.n_tiles - 1) / TOGETHER * TOGETHER;
            [0, TOGETHER].map(|more| Slices::new(p.base, p.blocks, p.n_tiles, p.k, (n_tile + more).min(last)))
        };
        // Blocks one above the other share weights, blocks side by side rows: in each step one of them loads for all.
        let load_weights = |ring: &Ring, weights: &[Slices; 2], step: u32, slice: u32| {
            let full = ring.full();
            full.arrive_expect_tx(Gemm::ring(N).bytes);
            let mut part = 0;
            while part < parts {
                if (step * parts + part) % DOWN == down {
                    let to = ring.stage_buffer().at((X_BYTES + part * SLICES_APART) as usize);
                    let from = p.stream.cast().at(weights[part as usize].at(slice) as usize);
                    if DOWN > 1 {
                        let blocks = ((1 << DOWN) - 1) << (across * DOWN);
                        bulk::copy_to_shared_multicast(to, from, SLICES_APART, full, blocks);
                    } else {
                        bulk::copy_to_shared(to, from, SLICES_APART, full);
                    }
                }
                part += 1;
            }
        };
        let load_rows = |ring: &Ring, row: u32, step: u32, slice: u32| {
            let at = [slice * DEPTH, row];
            if ACROSS == 1 {
                tensor::load(ring.stage_buffer(), p.x, at, ring.full());
            } else if step % ACROSS == across {
                let all = (0..ACROSS).fold(0, |all, i| all | 1 << (i * DOWN));
                tensor::load_multicast(ring.stage_buffer(), p.x, at, ring.full(), all << down);
            }
        };
        // The first stages' weights do not depend on the launches ahead.
        let mut begun = 0;
        if let Some((_, column)) = tiles.clone().next() {
            let (mut ring, weights, mut slice) = (ring, weights_of(column), 0);
            while begun < Gemm::ring(N).stages.min(slices) {
                load_weights(&ring, &weights, begun, slice);
                slice = slice_after(slice, slices);
                ring = ring.ahead(1);
                begun += 1;
            }
        }
        wait::<DOWN, ACROSS>(p);
        if DOWN * ACROSS > 1 {
            p.beside.go_on();
        }
        for (row, column) in tiles {
            let weights = weights_of(column);
            let (mut step, mut slice) = (0, 0);
            while step < slices {
                if begun > 0 {
                    begun -= 1;
                } else {
                    ring.wait_empty();
                    load_weights(&ring, &weights, step, slice);
                }
                load_rows(&ring, row, step, slice);
                ring = ring.ahead(1);
                slice = slice_after(slice, slices);
                step += 1;
            }
        }
        if DOWN * ACROSS > 1 {
            p.beside.end();
        }
    }
}
