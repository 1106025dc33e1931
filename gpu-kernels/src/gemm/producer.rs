//! The producer, which fills the ring: rows by TMA, weights by bulk copies.
//!
//! # Safety
//! As for [the whole](super).

use cuda_std::{bulk, device, tensor};

use super::epilogue::Epilogue;
use super::tile_scheduler::{InOrder, Tiles};
use super::{DEPTH, Gemm, Inputs, WEIGHT_ROWS, X_BYTES, loaded, wait};
use crate::linear::{K_PARTIALS, N_TILE};
use crate::ring::Ring;
use crate::stream::{GROUP_N_TILES, SLICES_APART, Slices};

/// The slice that is multiplied after this one. With split-K partials: the next slice of the same partial, or the first
/// slice of the next partial.
#[device]
const fn slice_after<I: Inputs>(slice: u32, slices: u32) -> u32 {
    match slice + K_PARTIALS < slices {
        _ if !I::SPLIT => slice + 1,
        true => slice + K_PARTIALS,
        false => slice % K_PARTIALS + 1,
    }
}

/// One lane keeps the ring full. Its CTA is at `down` and `across` in its cluster.
///
/// # Safety
/// One lane of the CTA calls it, once. `inputs` are of the launch, `tiles` those that the CTA's warpgroups take, and
/// `down` and `across` are the CTA's place in its cluster, `[0, 0]` without one.
#[device]
pub unsafe fn produce<E: Epilogue, I: Inputs, const N: u32, const DOWN: u32, const ACROSS: u32>(
    p: &Gemm,
    inputs: I,
    tiles: Tiles,
    [down, across]: [u32; 2],
) {
    // SAFETY: the caller's word.
    unsafe {
        let mut ring = Ring::producer(I::ring(N));
        tensor::acquire(p.x);
        let slices = p.slices();
        let parts = const { loaded(N) / WEIGHT_ROWS };
        // The first N-tile of the tile at `column`, or the N-tile `more` further. Behind the matrix, the last ones
        // again.
        let n_tile_of = |column: u32, more: u32| {
            let n_tile = column * (if E::GATED { 2 } else { 1 }) / N_TILE;
            (n_tile + more).min((p.n_tiles - 1) / GROUP_N_TILES * GROUP_N_TILES)
        };
        let weights_of = |column: u32| {
            [0, GROUP_N_TILES].map(|more| Slices::new(p.base, p.blocks, p.n_tiles, p.k, n_tile_of(column, more)))
        };
        // CTAs one above the other share weights, and CTAs side by side share rows: they take turns to load for all of
        // them.
        let load_weights = |ring: &Ring, weights: &[Slices; 2], step: u32, slice: u32| {
            let full = ring.full();
            full.arrive_expect_tx(I::ring(N).bytes - I::TAIL_BYTES + I::COPIED);
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
            while begun < I::ring(N).stages.min(slices) {
                load_weights(&ring, &weights, begun, slice);
                slice = slice_after::<I>(slice, slices);
                ring = ring.ahead(1);
                begun += 1;
            }
        }
        wait::<DOWN, ACROSS>(p);
        if DOWN * ACROSS > 1 {
            p.beside.go_on();
        }
        for (row, column) in InOrder::<E>::new(tiles) {
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
                inputs.load_tail(&ring, [row, n_tile_of(column, 0)], slice);
                ring = ring.ahead(1);
                slice = slice_after::<I>(slice, slices);
                step += 1;
            }
        }
        if DOWN * ACROSS > 1 {
            p.beside.end();
        }
    }
}
