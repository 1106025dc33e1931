//! The producers: warps that load weights and pages, activations and queries, and the rows' factors.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of the warp that is named call what is unsafe here, once for each
//! launch or phase, when the CTA has synchronised behind its barriers. Each ring has one warp that fills it. A producer
//! copies what other CTAs write only when it has waited at the grid barrier. Nobody writes weights during the launch,
//! and pages are written only when all CTAs are done with their phase.

use cuda_std::tensor::TensorMap;
use cuda_std::{Global, GlobalMut, bf16, bulk, device, tensor, thread, warp};

use super::attention::{Item, find_forms, load_pages, make_queries, send_end};
use super::peer::keep_step;
use super::phases::GemmPhase;
use super::pool::{Asking, PoolMessages};
use super::tile_scheduler::{load, schedule, take_up, walk};
use super::{BatchedStep, K_SPLITS, Memory, Phase, PhaseKind, factors};
use crate::linear::SLICE;
use crate::qkv::{Factors, append};
use crate::ring::Ring;
use crate::stream::{CHUNK_FEATURES, GROUP_N_TILES, N_TILES, Wave};
use crate::weights::{BatchedFormat, Plain, StageSources};

/// Most stages of pages under way at a time: see the [decode kernel](crate::decode)'s producer.
const PAGES_UNDER_WAY: u32 = 5;

/// Most stages of weights under way at a time. With more than 64 rows a tile memory is not the limit: what counts is
/// that the weights are there, so as many are loaded as have room.
const fn weights_under_way<const ROWS: u32>() -> u32 {
    if ROWS == 64 { 4 } else { Memory::<ROWS>::RING.stages }
}

/// Stages at the beginning of a phase of which only one or two may be under way. They fill the ring while CTAs still
/// finish the phase before, and what these CTAs exchange queues up behind the copies. Loaded so slowly, the stages
/// still arrive in time.
const AHEAD: u32 = 8;

/// How many stages may be under way in a phase that has filled `filled` stages. The first `alone` of them come one at a
/// time.
const fn under_way(filled: u32, alone: u32, most: u32) -> u32 {
    if filled < alone {
        1
    } else if filled < AHEAD {
        2
    } else {
        most
    }
}

/// How many of a phase's first stages come one at a time, after a phase of kind `before`. With tiles of 64 rows they
/// are fewer. They are fewest after gate and up, whose parts exchange within a cluster.
const fn alone<const ROWS: u32>(before: u32) -> u32 {
    match before {
        _ if ROWS > 64 => AHEAD,
        PhaseKind::SWIGLU => 2,
        _ => 6,
    }
}

/// The role of the warp that loads weights and pages. It need not wait for this step's keys and values: they are
/// written to the pages after attention.
///
/// # Safety
/// All lanes of one warp beside the consumers call it, once.
#[device]
pub unsafe fn produce<F: BatchedFormat, const ROWS: u32>(p: &BatchedStep) {
    // SAFETY: the caller's word.
    unsafe {
        let mut ring = Ring::producer(Memory::<ROWS>::RING);
        let mut before = PhaseKind::EMBED;
        let mut asking = Asking::new::<ROWS>();
        // How often the lanes of the cluster's two CTAs have synchronised.
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

/// One lane loads a GEMM's weights, one copy a stage. If the warp reconverged for each stage, or one lane began four
/// copies, a stage would take longer than its MMAs do with 128 rows.
///
/// # Safety
/// All lanes of the warp call it. The ring is where the phase before left it; `steps` are those of all phases before.
#[device]
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
            let plain = if F::PLAIN_HEAD { field!(gemm.phase, plain: Global<bf16>) } else { Global::default() };
            let mut filled = 0;
            let mut number = thread::block_idx_x();
            while let Some(unit) = gemm.unit(number, ROWS) {
                number += thread::opaque(thread::grid_dim_x());
                // All waves but the last have whole tiles.
                cuda_std::assume(p.blocks > 0 && wave_n_tiles > 0);
                let passed = unit.n_tile / wave_n_tiles * wave_n_tiles;
                let base = first + u64::from(passed) * u64::from(chunks);
                let n_tiles = (gemm.n_tiles - passed).min(wave_n_tiles);
                let wave = Wave { base, rotation: 0, n_tiles, depth: chunks };
                // Computed before the loops: while a producer computes, memory waits.
                let n_tile = unit.n_tile - passed;
                let by_boxes = F::BY_BOXES && plain.is_null();
                let stages = StageSources::new(if F::BY_BOXES { plain } else { p.stream }, &wave, n_tile);
                let bytes = if by_boxes { F::stage_bytes(p) } else { <Plain>::stage_bytes(p) };
                let mut k_split = unit.k_split;
                while k_split < unit.end {
                    // A tile with few rows is done sooner. Over a long phase its CTA would get so far ahead that all
                    // weights would be read from memory twice.
                    if ROWS > 64 && gemm.is_of_both(&unit) {
                        keep_step::<ROWS>(*steps % 2);
                        *steps += 1;
                    }
                    let mut weights = stages.of(k_split);
                    let mut first = wave.group(n_tile, 0) * GROUP_N_TILES;
                    let (mut turn, depth) = (0, gemm.depth(k_split));
                    while turn < depth {
                        // Boxes have few bytes, and consumers would wait for them. So their number under way has no
                        // limit.
                        if !by_boxes {
                            let most = under_way(filled, alone, weights_under_way::<ROWS>());
                            // Without a limit there is one barrier less to poll.
                            if most < Memory::<ROWS>::RING.stages {
                                ring.wait_under_way(most);
                            }
                        }
                        ring.wait_empty();
                        ring.full().arrive_expect_tx(bytes);
                        // For a partial last tile this also copies what lies after it. The stream has room for that,
                        // and nobody uses it. With more than 64 rows, other CTAs read the same weights for other rows:
                        // L2 should keep them.
                        let (to, full) = (ring.stage_buffer(), ring.full());
                        if by_boxes {
                            let [word, quarter] = F::box_at(k_split, turn % 2 == 1);
                            let at = [word, quarter, first, 0];
                            if ROWS == 64 {
                                tensor::load_box_once(to, p.boxes, at, full);
                            } else {
                                tensor::load_box(to, p.boxes, at, full);
                            }
                            first += if turn % 2 == 0 { 0 } else { n_tiles.next_multiple_of(GROUP_N_TILES) };
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

/// The role of the warp that loads what other CTAs wrote: activations, and queries.
///
/// # Safety
/// All lanes of one warp beside the consumers call it, once.
#[device]
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
                // What does not depend on the grid barrier comes before it.
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

/// Describes a phase's items of attention to the consumers, and makes their queries.
///
/// # Safety
/// All lanes of the warp call it, for a phase of attention. Both rings are where the phase of attention before left
/// them.
#[device]
pub unsafe fn describe_items<const ROWS: u32>(p: &BatchedStep, number: u32, items: &mut Ring, told: &mut PoolMessages) {
    // SAFETY: the caller's word.
    unsafe {
        let phase = p.phases.at(number as usize);
        let weight = Factors::load_weight(field!(phase, norm: Global<bf16>));
        // Each place keeps an item's words, and then the forms of its pages.
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
        // TMA will write activations where the items were kept.
        bulk::fence_proxy_async();
    }
}

/// One lane loads a GEMM's activations.
///
/// # Safety
/// All lanes of the warp call it. Its first lane has acquired the map and waited at the grid barrier, and the ring is
/// where the GEMM before left it.
#[device]
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

/// The role of the two helping warps. Before each GEMM that needs the rows' norm factors, they share in computing them.
/// After attention they write the step's keys and values to the cache. At the start, one of them runs attention's tile
/// scheduler for the CTA.
///
/// # Safety
/// All lanes of two warps beside the consumers call it, once; `which` is 0 for the one and 1 for the other.
#[device]
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
                // From here on, nobody's copies read these pages any more.
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
