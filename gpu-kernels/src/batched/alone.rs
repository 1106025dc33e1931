//! Attention of a step in a launch of its own, where each sequence has one row: two CTAs on an SM, so that one has work
//! while the other waits.
//!
//! The roles are those of the whole step: warps 0 to 7 take 32 keys of an item each, warp 8 loads pages, warp 9 finds
//! the CTA's items, makes queries, and puts the step's keys and values into the cache at the end. With half of an SM's
//! registers and shared memory, keys and values are read from their pages piece by piece, and the sums of a piece go to
//! shared memory at once. The bits are those of the whole step.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, dependent_launch, kernel, thread, warp};

use super::attention::{DESCRIPTION, FORMS, Item, Newest, SLOT_BYTES, are_there, load_pages};
use super::pool::{Asking, PoolMessages};
use super::producer::describe_items;
use super::tile_scheduler::{load, schedule, take_up, walk};
use super::{ALL, ALONE, BatchedStep, CONSUMERS, Memory, Phase, WARPS};
use crate::attention::{
    Attend, Divisor, Few, QUARTER, SPLIT, SoftmaxWeights, TILE_KEYS, Tile, WARP_KEYS, add_values_each, combine_by_warp,
    key_of, score_keys, values_from, weigh_some,
};
use crate::kv::{HEAD_DIM, PAGE_TOKENS, place};
use crate::packed::{Form, Half, bring_rest, is_cut};
use crate::qkv::{Factors, append};
use crate::ring::{Ring, Shape};
use crate::waiting;

/// Threads of a CTA.
const THREADS: u32 = CONSUMERS + 2 * 32;
/// CTAs that an SM is to hold.
pub const CTAS_PER_SM: u32 = 2;
/// Query heads of a key-value head, at most.
pub const PAIRS: u32 = QUARTER;

/// Items, then what consumers reduce in; pages follow.
pub(super) const ITEMS: Shape = Shape::new(0, 3, SLOT_BYTES);
pub(super) const SCRATCH: u32 = ITEMS.end() + super::ITEMS_BYTES;
pub(super) const END: u32 = SCRATCH + Attend::SHARED_BYTES;
/// Stages of pages.
pub(super) const STAGES: u32 = 5;

// An SM of an H100 has 228 KiB, of which a CTA takes one for the system.
const _: () = assert!(CTAS_PER_SM * (BatchedStep::ATTEND_SHARED_BYTES + 1024) <= 228 * 1024);

/// One phase, [`PhaseKind::Attend`](super::PhaseKind::Attend), of tiles of one row and at most
/// [`BatchedStep::ATTEND_PAIRS`] query heads a key-value head. All CTAs of the grid are resident at once. Grid: at most
/// [`BatchedStep::ATTEND_CTAS_PER_SM`] CTAs an SM; shared memory: [`BatchedStep::ATTEND_SHARED_BYTES`]. It may be
/// launched early ([`dependent_launch`]). [`arrivals`](BatchedStep::arrivals) are zero before and after.
#[kernel(threads = 320, min_blocks = 2)]
pub unsafe fn attend_batch(p: BatchedStep) {
    const { assert!(THREADS == 320 && CTAS_PER_SM == 2) };
    unsafe {
        if thread::thread_idx_x() == 0 {
            Ring::init(ITEMS, WARPS);
            Ring::init(Memory::<ALONE>::RING, WARPS);
            Ring::init(Memory::<ALONE>::MESSAGES, 1);
            Memory::<ALONE>::scheduled().init(1);
            Memory::<ALONE>::asked().store(0, 0);
            bulk::fence_init();
        }
        thread::sync_threads();
        dependent_launch::wait();
        dependent_launch::allow_next();
        let warp_id = thread::warp_id();
        if warp_id < WARPS {
            attend(&p);
            // All that this CTA wrote comes before its arrival.
            thread::sync_named(ALL, CONSUMERS);
            if thread::opaque(thread::thread_idx_x()) == 0 {
                atomic::fetch_add(p.grid_barriers(), 0, 1, Ordering::Release, Scope::Device);
            }
        } else if warp_id == WARPS {
            pages(&p);
        } else {
            if p.is_scheduled == 0 {
                schedule::<ALONE>(&p);
            } else {
                take_up::<ALONE>(&p);
            }
            describe_items::<ALONE>(&p, 0, &mut Ring::producer(ITEMS), &mut PoolMessages::new::<ALONE>());
            // Nobody's copies read these pages any more then.
            p.grid_barrier(1);
            append(&p.split_heads(p.phases), thread::block_idx_x(), thread::grid_dim_x());
            clear(&p);
        }
    }
}

/// The warp that loads pages.
#[inline(always)]
unsafe fn pages(p: &BatchedStep) {
    unsafe {
        let mut ring = Ring::producer(Memory::<ALONE>::RING);
        let mut asking = Asking::new::<ALONE>();
        let cache = p.work.cache(field!(p.phases, pages: GlobalMut<bf16>));
        let mut asked = 0;
        walk::<ALONE, 2, ()>(
            |item| (load(p, item), ()),
            |_, ()| {},
            || {},
            |assignment| asking.next(p, 0, assignment),
            |_, [item, pages]| {
                let item = Item::new(item);
                ring = load_pages::<ALONE>(&cache, ring, &item, pages, |_| STAGES, asked);
                asked += 2 * item.pages();
            },
        );
    }
}

/// Waits for stage `number` of the launch. The ring has no room for an item, so that a warp may be more than a turn
/// ahead of the stage that it waits for, where a barrier's parity says nothing: it waits first until that was asked
/// for.
#[inline(always)]
unsafe fn wait(stage: &Ring, number: u32) {
    unsafe {
        let asked = || atomic::load(Memory::<ALONE>::asked(), 0, Ordering::Acquire, Scope::Block);
        waiting::until(|| asked() > number);
        stage.wait_full();
    }
}

/// A warp's stages of a page, its keys in the first and its values in the second.
struct Stages {
    rings: [Ring; 2],
    /// Which of the launch's stages they are.
    numbers: [u32; 2],
}

impl Stages {
    #[inline(always)]
    unsafe fn wait(&self, kind: usize) -> u32 {
        unsafe { wait(&self.rings[kind], self.numbers[kind]) };
        self.rings[kind].offset()
    }

    /// The others have no use for it: its two warps release it for all.
    #[inline(always)]
    unsafe fn release(&self, kind: usize, lane: u32) {
        unsafe { self.rings[kind].release(lane < WARPS / 2) };
    }
}

/// The consumers: one item after another.
#[inline(always)]
unsafe fn attend(p: &BatchedStep) {
    unsafe {
        let [mut ring, mut items] = [Memory::<ALONE>::RING, ITEMS].map(Ring::consumer);
        let a = &p.work.attend();
        let group = Divisor::new(p.work.group());
        // Stages of the items before.
        let mut seen = 0;
        loop {
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            items.wait_full();
            let stage = items.stage_buffer();
            let item = Item::new(stage.at(DESCRIPTION as usize).cast::<u32>().load16(0));
            if item.rows == 0 {
                return;
            }
            let Item { kv_head, split, first_row, .. } = item;
            let tile = Tile { kv_head, split, group, first_row, pairs: group.value, lane, warp_id };
            let few = Few::new(lane, warp_id, SCRATCH);
            let pages = item.pages();
            let page = tile.first_key() % SPLIT / PAGE_TOKENS;
            if page < pages {
                let stages = Stages {
                    rings: [ring.far_ahead(page), ring.far_ahead(pages + page)],
                    numbers: [seen + page, seen + pages + page],
                };
                let form = Form(stage.at(FORMS as usize).cast().load(page as usize));
                let slice = Slice { item, tile, form, stages, few, queries: stage.cast() };
                if form.is_packed() {
                    slice.find_in_packed(a);
                } else {
                    slice.find_in_plain(p, a);
                }
            } else {
                few.leave_scale(f32::NEG_INFINITY, 0.0);
                if few.holds() {
                    unroll!(N < 16; {
                        few.leave(N, [0.0; 4]);
                    });
                }
            }
            items.release(lane == 0);
            items = items.ahead(1);
            ring = ring.far_ahead(2 * pages);
            seen += 2 * pages;
            thread::sync_named(ALL, CONSUMERS);
            let put = |pair, d, word| a.put::<true>(pair, d, word);
            let keep = |_, place, d, sum, scale| a.keep(split, place, d, sum, scale);
            few.add(a, &tile, |_| item.last, put, keep);
            thread::sync_named(ALL, CONSUMERS);
            if item.is_last {
                combine(p, a, &item, &tile);
            }
        }
    }
}

/// What a warp has of an item.
struct Slice {
    item: Item,
    tile: Tile,
    form: Form,
    stages: Stages,
    few: Few,
    /// `[pairs, 128]`, and the newest key, if it [came](Item::brings_key) with them.
    queries: Shared<bf16>,
}

impl Slice {
    /// As [`score_keys`] asks: of four pairs at most, which are in the upper half of A.
    #[inline(always)]
    unsafe fn query(&self, i: usize, j: usize) -> [u32; 4] {
        let (pair, d) = (self.tile.lane / 4, 8 * (self.tile.lane % 4) + 32 * j as u32);
        if i == 0 && pair < self.tile.pairs {
            unsafe { self.queries.load16((pair * HEAD_DIM + d) as usize) }
        } else {
            [0; 4]
        }
    }

    /// Finds what the warp has in a packed page.
    #[inline(always)]
    unsafe fn find_in_packed(&self, a: &Attend) {
        unsafe {
            let Self { item, tile, form, stages, .. } = self;
            let token = tile.first_key() % PAGE_TOKENS;
            let piece = |page, kind| move |i| Half::load_fragments(page, token, tile.lane, i, form.base(kind));
            let scores = score_keys(|i, j| self.query(i, j), piece(stages.wait(0), 0));
            stages.release(0, tile.lane);
            let weights = weigh_some::<1>(a, tile, |_| item.last, scores);
            leave(&self.few, &weights, piece(stages.wait(1), 1));
            stages.release(1, tile.lane);
        }
    }

    /// The same in a page as it was written, perhaps in this step.
    #[inline(always)]
    unsafe fn find_in_plain(&self, p: &BatchedStep, a: &Attend) {
        unsafe {
            let Self { item, tile, stages, .. } = self;
            let (lane, first_key) = (tile.lane, tile.first_key());
            let first = first_key % PAGE_TOKENS * HEAD_DIM * 2;
            let page = stages.wait(0);
            let mut scores = [[0.0; 4]; 4];
            let has_keys = first_key <= item.last;
            // Those beyond the last were not loaded: the last instead, whose weight there is 0.
            let last = item.last - first_key.min(item.last);
            if has_keys {
                self.complete(p, page, 0);
                let keys = shared::dynamic::<bf16>(page + first);
                let key = |k: u32, d: u32| keys.load16((k * HEAD_DIM + place(k, d)) as usize);
                let piece = |i: usize| {
                    TILE_KEYS.map(|first| key((first + key_of(lane / 4)).min(last), 8 * (lane % 4) + 32 * i as u32))
                };
                scores = score_keys(|i, j| self.query(i, j), piece);
            }
            stages.release(0, lane);
            let weights = weigh_some::<1>(a, tile, |_| item.last, scores);
            let page = stages.wait(1);
            if has_keys {
                self.complete(p, page, 1);
                leave(&self.few, &weights, values_from(page + first, last, lane));
            } else {
                // All weights are 0, and nothing of this was loaded.
                leave(&self.few, &weights, |_| [[0; 4]; 4]);
            }
            stages.release(1, lane);
        }
    }

    /// Brings what a page's keys (0) or values (1) lack: what was not copied of it, and what this step adds.
    #[inline(always)]
    unsafe fn complete(&self, p: &BatchedStep, page: u32, kind: u32) {
        unsafe {
            let (item, first_key, lane) = (&self.item, self.tile.first_key(), self.tile.lane);
            if let Some(block) = self.form.beyond()
                && is_cut(first_key % PAGE_TOKENS)
            {
                let pages = field!(p.phases, pages: GlobalMut<bf16>);
                let from = pages.at((block * 2 + kind) as usize * (PAGE_TOKENS * HEAD_DIM) as usize);
                bring_rest(from.read(), page);
            }
            // The row's own, the last of its keys.
            if item.is_fresh && item.last - first_key < WARP_KEYS {
                let weight = Factors::load_weight(field!(p.phases, key_norm: Global<bf16>));
                let newest = Newest::load(p, weight, item, first_key, lane, self.queries);
                let page = shared::dynamic(page);
                if kind == 0 {
                    newest.put_keys(p, item, first_key, page, lane);
                } else {
                    newest.put_values(p, item, first_key, page, lane);
                }
            }
        }
    }
}

/// Leaves what a warp finds in its values.
#[inline(always)]
unsafe fn leave(few: &Few, weights: &SoftmaxWeights, values: impl Fn(usize) -> [[u32; 4]; 4]) {
    unsafe {
        few.leave_scale(weights.top[0], weights.norm[0]);
        add_values_each(weights, values, |n, o| {
            // Pinned here: the compiler would move a product to where some of the lanes alone are.
            let o = o.map(|sum| f32::from_bits(thread::opaque(sum.to_bits())));
            if few.holds() {
                few.leave(n, o);
            }
        });
    }
}

/// After the last split of a tile and head that this CTA has: combines the splits of its pairs, if all are there now, a
/// warp a pair.
#[inline(always)]
unsafe fn combine(p: &BatchedStep, a: &Attend, item: &Item, tile: &Tile) {
    let (lane, pair) = (thread::opaque(tile.lane), thread::opaque(tile.warp_id));
    if pair < tile.pairs {
        unsafe {
            let (splits, place) = (item.last / SPLIT + 1, tile.place(a, pair));
            if item.is_whole || are_there(p.split_arrivals().at(place), item, splits) {
                let words = |s| a.part(place, s).load16(lane as usize * 4);
                let put = |d, word| a.put::<true>(place, d, word);
                combine_by_warp(splits, lane, words, |s| a.part_scale(place, s), put);
            }
        }
    }
}

/// The last warp to get here sets the grid's counters back.
#[inline(always)]
unsafe fn clear(p: &BatchedStep) {
    unsafe {
        let (lane, grid_barriers) = (thread::opaque(thread::lane_id()), p.grid_barriers());
        if lane == 0
            && atomic::fetch_add(grid_barriers, 1, 1, Ordering::AcqRel, Scope::Device) + 1 == thread::grid_dim_x()
        {
            // Grid barriers, CTAs that are done, and the pool's.
            grid_barriers.store16(0, [0; 4]);
        }
        warp::sync_warp();
    }
}
