//! What brings weights and pages, rows and queries, and the rows' factors.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of the warp that is named call what is unsafe here, once for each
//! launch or phase, when the block has synchronised behind its barriers. Each ring has one warp that fills it. What
//! other blocks write it copies when it has waited at the grid barrier; weights nobody writes during the launch, and
//! pages only when all blocks are done with their phase.

use cuda_std::tensor::TensorMap;
use cuda_std::{Global, GlobalMut, bf16, bulk, tensor, thread, warp};

use super::attention::{Item, find_forms, load_pages, make_queries, send_end};
use super::peer::keep_step;
use super::phases::GemmPhase;
use super::pool::{Asking, PoolMessages};
use super::tile_scheduler::{load, schedule, take_up, walk};
use super::{BatchedStep, K_SPLITS, Memory, Phase, PhaseKind, factors};
use crate::linear::SLICE;
use crate::qkv::{Factors, append};
use crate::ring::Ring;
use crate::stream::{CHUNK_FEATURES, N_TILES, TOGETHER, Wave};
use crate::weights::{BatchedFormat, Plain, StageSources};

/// Stages of pages under way at a time: see the [decode kernel](crate::decode)'s producer.
const PAGES_UNDER_WAY: u32 = 5;

/// Likewise of weights: with more than 64 rows a tile memory is not the limit, what counts is that they are there, and
/// as many come as have room.
const fn weights_under_way<const ROWS: u32>() -> u32 {
    if ROWS == 64 { 4 } else { Memory::<ROWS>::RING.stages }
}

/// Stages that are copied ahead. What has room in the ring is copied while blocks still finish the phase before, and
/// all that they exchange there waits in line with copies: so the first ones come one after another, and are there in
/// time none the less.
const AHEAD: u32 = 8;

/// How many stages may be under way of a phase that has filled so many, the first of which come `alone`.
const fn under_way(filled: u32, alone: u32, most: u32) -> u32 {
    if filled < alone {
        1
    } else if filled < AHEAD {
        2
    } else {
        most
    }
}

/// How many of a phase's stages come alone. Of tiles of 64 rows fewer, and fewest beside gate and up, whose parts
/// exchange within a cluster.
const fn alone<const ROWS: u32>(before: u32) -> u32 {
    match before {
        _ if ROWS > 64 => AHEAD,
        PhaseKind::SWIGLU => 2,
        _ => 6,
    }
}

/// The warp that loads weights and pages: what a step adds to pages comes there after attention.
///
/// # Safety
/// All lanes of one warp beside the consumers call it, once.
#[inline(always)]
pub unsafe fn produce<F: BatchedFormat, const ROWS: u32>(p: &BatchedStep) {
    // SAFETY: the caller's word.
    unsafe {
        let mut ring = Ring::producer(Memory::<ROWS>::RING);
        let mut before = PhaseKind::EMBED;
        let mut asking = Asking::new::<ROWS>();
        // How often the two blocks' lanes have synchronised.
        let mut steps = 0;
        let mut number = 0;
        while number < p.phase_count {
            let phase = p.phases.at(number as usize);
            let kind = field!(phase, kind: u32);
            let alone = alone::<ROWS>(before);
            if PhaseKind::is_gemm(kind) {
                ring = produce_weights::<F, ROWS>(p, &GemmPhase::new(phase), ring, alone, &mut steps);
            } else if kind == PhaseKind::ATTEND {
                let cache = p.work.cache(field!(phase, pages: GlobalMut<bf16>));
                let mut filled = 0;
                walk::<ROWS, 2, ()>(
                    |item| (load(p, item), ()),
                    |_, ()| {},
                    || {},
                    |assignment| asking.next(p, number, assignment),
                    |_, [item, pages]| {
                        let item = Item::new(item);
                        let under_way = |i| under_way(filled + i, alone, PAGES_UNDER_WAY);
                        ring = load_pages(&cache, ring, &item, pages, under_way);
                        filled += 2 * item.pages();
                    },
                );
            }
            before = kind;
            number += 1;
        }
    }
}

/// One lane loads, a stage by one copy: a warp that came together again for each stage, or a lane with four copies to
/// begin, would take longer for a stage than the products of 128 rows do.
///
/// # Safety
/// All lanes of the warp call it. The ring is where the phase before left it; `steps` are those of all phases before.
#[inline(always)]
unsafe fn produce_weights<F: BatchedFormat, const ROWS: u32>(
    p: &BatchedStep,
    gemm: &GemmPhase,
    mut ring: Ring,
    alone: u32,
    steps: &mut u32,
) -> Ring {
    // SAFETY: the caller's word.
    unsafe {
        if thread::opaque(thread::lane_id()) == 0 {
            if F::BY_BOXES {
                tensor::acquire(p.boxes);
            }
            let (wave_n_tiles, chunks) = (N_TILES * p.blocks, gemm.k.div_ceil(CHUNK_FEATURES));
            let first = field!(gemm.phase, base: u64);
            let plain = if F::OTHER_HEAD { field!(gemm.phase, plain: Global<bf16>) } else { Global::default() };
            let mut filled = 0;
            let mut number = thread::block_idx_x();
            while let Some(unit) = gemm.unit(number, ROWS) {
                number += thread::opaque(thread::grid_dim_x());
                // A wave has whole tiles, all but the last.
                cuda_std::assume(p.blocks > 0 && wave_n_tiles > 0);
                let passed = unit.n_tile / wave_n_tiles * wave_n_tiles;
                let base = first + u64::from(passed) * u64::from(chunks);
                let n_tiles = (gemm.n_tiles - passed).min(wave_n_tiles);
                let wave = Wave { base, rotation: 0, n_tiles, depth: chunks };
                // Found before the loops: what a producer does for a stage is time that memory waits.
                let n_tile = unit.n_tile - passed;
                let by_boxes = F::BY_BOXES && plain.is_null();
                let stages = StageSources::new(if F::BY_BOXES { plain } else { p.stream }, &wave, n_tile);
                let bytes = if by_boxes { F::stage_bytes(p) } else { <Plain>::stage_bytes(p) };
                let mut k_split = unit.k_split;
                while k_split < unit.end {
                    // A tile of few rows is done sooner: over a long phase its block got so far ahead that all weights
                    // were read twice.
                    if ROWS > 64 && gemm.is_of_both(&unit) {
                        keep_step::<ROWS>(*steps % 2);
                        *steps += 1;
                    }
                    let mut weights = stages.of(k_split);
                    let mut first = wave.together(n_tile, 0) * TOGETHER;
                    let (mut turn, depth) = (0, gemm.depth(k_split));
                    while turn < depth {
                        // Boxes have few bytes, and consumers would wait for them: they are not held back.
                        if !by_boxes {
                            let most = under_way(filled, alone, weights_under_way::<ROWS>());
                            // Where nothing is held back, there is one barrier less to ask.
                            if most < Memory::<ROWS>::RING.stages {
                                ring.wait_under_way(most);
                            }
                        }
                        ring.wait_empty();
                        ring.full().arrive_expect_tx(bytes);
                        // Of a last, partial tile with what lies behind it: there is room for it, and nobody uses it.
                        // With more rows other blocks have other rows for the same weights.
                        let (to, full) = (ring.stage_buffer(), ring.full());
                        if by_boxes {
                            let [word, quarter] = F::box_at(k_split, turn % 2 == 1);
                            let at = [word, quarter, first, 0];
                            if ROWS == 64 {
                                tensor::load_box_once(to, p.boxes, at, full);
                            } else {
                                tensor::load_box(to, p.boxes, at, full);
                            }
                            first += if turn % 2 == 0 { 0 } else { n_tiles.next_multiple_of(TOGETHER) };
                        } else {
                            if ROWS == 64 {
                                bulk::copy_to_shared_once(to, weights, bytes, full);
                            } else {
                                bulk::copy_to_shared(to, weights, bytes, full);
                            }
                            let [within, beyond] = stages.apart;
                            weights = weights.at(if turn % 2 == 0 { within } else { beyond } as usize);
                        }
                        ring = ring.ahead(1);
                        filled += 1;
                        turn += 1;
                    }
                    k_split += 1;
                }
            }
        }
        warp::sync_warp();
        ring.of_lane(0)
    }
}

/// The warp that brings what other blocks wrote: activations, and queries.
///
/// # Safety
/// All lanes of one warp beside the consumers call it, once.
#[inline(always)]
pub unsafe fn produce_rows<const ROWS: u32>(p: &BatchedStep) {
    // SAFETY: the caller's word.
    unsafe {
        let mut ring = Ring::producer(Memory::<ROWS>::ROW_RING);
        let mut items = Ring::producer(Memory::<ROWS>::ITEM_RING);
        let mut told = PoolMessages::new::<ROWS>();
        let mut number = 0;
        while number < p.phase_count {
            let phase = p.phases.at(number as usize);
            let kind = field!(phase, kind: u32);
            if kind == PhaseKind::ATTEND {
                describe_items::<ROWS>(p, number, &mut items, &mut told);
            } else if PhaseKind::is_gemm(kind) {
                // Before the grid barrier what does not depend on it.
                let (gemm, map) = (GemmPhase::new(phase), field!(phase, x: Global<TensorMap>));
                if thread::lane_id() == 0 {
                    tensor::acquire(map);
                }
                p.grid_barrier(number);
                ring = produce_activations::<ROWS>(&gemm, map, ring);
            }
            number += 1;
        }
    }
}

/// Describes attention's items of a phase, and makes their queries.
///
/// # Safety
/// All lanes of the warp call it, for a phase of attention. Both rings are where the phase of attention before left
/// them.
#[inline(always)]
pub unsafe fn describe_items<const ROWS: u32>(p: &BatchedStep, number: u32, items: &mut Ring, told: &mut PoolMessages) {
    // SAFETY: the caller's word.
    unsafe {
        let phase = p.phases.at(number as usize);
        let weight = Factors::load_weight(field!(phase, norm: Global<bf16>));
        // Words and forms.
        let kept = |place: u32| Memory::<ROWS>::items().at((8 * place) as usize);
        walk::<ROWS, 0, _>(
            |item| ([], find_forms(p, number, load(p, item))),
            |place, [words, forms]| {
                kept(place).store16(0, words);
                kept(place).store16(4, forms);
            },
            || p.grid_barrier(number),
            |_| told.next(),
            |place, []| {
                let item = Item::new(kept(place).load16(0));
                make_queries(p, number, weight, items, &item, kept(place).at(4));
                *items = items.ahead(1);
            },
        );
        send_end(items);
        *items = items.ahead(1);
        // Activations come where items were kept.
        bulk::fence_proxy_async();
    }
}

/// One lane loads.
///
/// # Safety
/// All lanes of the warp call it. Its first lane has acquired the map and waited at the grid barrier, and the ring is
/// where the GEMM before left it.
#[inline(always)]
unsafe fn produce_activations<const ROWS: u32>(gemm: &GemmPhase, map: Global<TensorMap>, mut ring: Ring) -> Ring {
    // SAFETY: the caller's word.
    unsafe {
        if thread::opaque(thread::lane_id()) == 0 {
            let mut number = thread::block_idx_x();
            while let Some(unit) = gemm.unit(number, ROWS) {
                number += thread::opaque(thread::grid_dim_x());
                let mut k_split = unit.k_split;
                while k_split < unit.end {
                    let mut column = k_split * SLICE;
                    let (mut turn, depth) = (0, gemm.depth(k_split));
                    while turn < depth {
                        ring.wait_empty();
                        ring.full().arrive_expect_tx(Memory::<ROWS>::ROW_RING.bytes);
                        tensor::load(ring.stage_buffer(), map, [column, unit.row], ring.full());
                        ring = ring.ahead(1);
                        column += K_SPLITS * SLICE;
                        turn += 1;
                    }
                    k_split += 1;
                }
            }
        }
        warp::sync_warp();
        ring.of_lane(0)
    }
}

/// Two warps share in finding the rows' factors, before each product that wants them. After attention they put the
/// step's keys and values into the cache, and before everything one of them finds what the block has of attention.
///
/// # Safety
/// All lanes of two warps beside the consumers call it, once; `which` is 0 for the one and 1 for the other.
#[inline(always)]
pub unsafe fn help<const ROWS: u32>(p: &BatchedStep, which: u32) {
    // SAFETY: the caller's word.
    unsafe {
        if which == 1 {
            if p.is_scheduled == 0 {
                schedule::<ROWS>(p);
            } else {
                take_up::<ROWS>(p);
            }
        }
        let mut number = 0;
        while number < p.phase_count {
            let phase = p.phases.at(number as usize);
            let kind = field!(phase, kind: u32);
            if kind == PhaseKind::ATTEND {
                // Nobody's copies read these pages any more then.
                p.grid_barrier(number + 1);
                let grid = thread::grid_dim_x();
                append(&p.split_heads(phase), thread::block_idx_x() + which * grid, 2 * grid);
            } else if PhaseKind::is_normed(kind) {
                let wanted = factors::wanted_rows::<ROWS>(&GemmPhase::new(phase));
                p.grid_barrier(number);
                factors::share::<ROWS>(p, number, wanted, which);
            }
            number += 1;
        }
    }
}
