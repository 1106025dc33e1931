//! Attention of the rows of many sequences: the bits of [`attention`](crate::attention), with keys and values streamed through shared memory.
//!
//! An *item* is what a block of [`attend`](crate::attention::attend) does: a tile of rows of one sequence, a key-value head, a split of 256 keys. Blocks take
//! items in turn. All sequences' first splits come first: where contexts are long, this step adds no keys to them, and their pages are there before the projections are.
//! Then come the others, sequence by sequence: small ones, at the ends of contexts, take warps longer than memory, and have large ones between them.
//! A page is given back as soon as its two warps have used it.

use cuda_std::shared::{self, Shared};
use cuda_std::{bf16, bulk, thread, warp};

use super::{ALL, Memory, Rings, WARPS, WideStep};
use crate::attention::{Divisor, Found, PAIRS, SPLIT, Tile, attend_keys, combine_head_by_warp, reduce};
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::ring::Ring;

const QUERY: u32 = HEAD_DIM * 2;
/// A page of a head's keys, or of its values.
const PAGE_BYTES: u32 = PAGE_TOKENS * QUERY;
/// Where in a slot of the rows' ring an item is described: behind its queries.
const DESCRIPTION: u32 = PAIRS * QUERY;

const _: () = assert!(PAGE_BYTES == super::WEIGHT_BYTES);
const _: () = assert!(DESCRIPTION + 16 <= Memory::<64>::ROW_RING.bytes);

/// One tile, key-value head and split.
#[derive(Clone, Copy)]
pub struct Item {
    pub kv_head: u32,
    split: u32,
    first_row: u32,
    /// None: the end.
    rows: u32,
    /// The position of the tile's last row.
    last: u32,
    /// Which page table.
    pub sequence: u32,
    /// Whether this step may add to its keys.
    pub is_fresh: bool,
}

impl Item {
    /// The words of its description.
    #[inline(always)]
    const fn words(&self) -> [u32; 4] {
        [self.kv_head, self.split, self.first_row << 16 | self.rows, self.last]
    }

    #[inline(always)]
    unsafe fn read(from: Shared<u32>) -> Self {
        let [kv_head, split, rows, last] = unsafe { from.load16(0) };
        Self { kv_head, split, first_row: rows >> 16, rows: rows & 0xffff, last, sequence: 0, is_fresh: false }
    }

    /// The first of its pages among its sequence's.
    #[inline(always)]
    pub const fn first_page(&self) -> u32 {
        self.split * (SPLIT / PAGE_TOKENS)
    }

    /// Its pages.
    #[inline(always)]
    pub fn pages(&self) -> u32 {
        (self.last / PAGE_TOKENS + 1 - self.first_page()).min(SPLIT / PAGE_TOKENS)
    }
}

/// A producer's warp walks the block's items: each lane looks one up, and then they are visited one after another by all.
#[inline(always)]
pub unsafe fn walk(p: &WideStep, mut visit: impl FnMut(&Item)) {
    unsafe {
        let lane = thread::fresh(thread::lane_id());
        let (kv_heads, tiles, grid) = (p.kv_heads, p.tile_count, thread::grid_dim_x());
        let all = p.splits * tiles * kv_heads;
        let mut first = thread::block_idx_x();
        while first < all {
            let number = first + lane * grid;
            // Head, split, rows, last position, sequence; and whether there is one, and it is fresh.
            let mut found = [0u32; 5];
            let (mut valid, mut is_fresh) = (false, false);
            if number < all {
                core::hint::assert_unchecked(kv_heads > 0);
                let of_head = number / kv_heads;
                // First splits, then tile by tile what is left of each.
                let (mut tile, mut split) = (of_head, 0);
                if of_head >= tiles {
                    let left = p.splits - 1;
                    core::hint::assert_unchecked(left > 0);
                    tile = (of_head - tiles) / left;
                    split = 1 + of_head - tiles - tile * left;
                }
                let first_row = p.tiles.load(2 * tile as usize);
                let rows = p.tiles.load(2 * tile as usize + 1);
                let last = p.rows.positions.load((first_row + rows - 1) as usize);
                valid = split * SPLIT <= last;
                // Before the tile's rows there are at most as many of the same sequence as there are at all.
                is_fresh = (split + 1) * SPLIT + first_row + rows > last + 1;
                let sequence = p.rows.sequences.load(first_row as usize);
                found = [number - of_head * kv_heads, split, first_row << 16 | rows, last, sequence];
            }
            let mut there = warp::ballot(valid);
            let fresh = warp::ballot(is_fresh);
            while there != 0 {
                let from = there.trailing_zeros();
                there &= there - 1;
                let [kv_head, split, rows, last, sequence] = found.map(|word| warp::shuffle_idx(word, from));
                let is_fresh = fresh >> from & 1 != 0;
                visit(&Item { kv_head, split, first_row: rows >> 16, rows: rows & 0xffff, last, sequence, is_fresh });
            }
            first += 32 * grid;
        }
    }
}

/// One lane loads an item's pages, keys first; `blocks` are their [indices](Cache::block_index). All keep count.
#[inline(always)]
pub unsafe fn load_pages(cache: &Cache, mut ring: Ring, item: &Item, blocks: [u32; 4]) -> Ring {
    unsafe {
        let lane = thread::fresh(thread::lane_id());
        let pages = item.pages();
        let mut kind = 0;
        while kind < 2 {
            unroll!(I < 4; {
                if (I as u32) < pages {
                    if lane == 0 {
                        ring.wait_under_way(super::producer::UNDER_WAY);
                        ring.wait_empty();
                        // Of keys those that there are; values lie by dimension.
                        let keys = (item.last + 1 - (item.first_page() + I as u32) * PAGE_TOKENS).min(PAGE_TOKENS);
                        let bytes = if kind == 0 { keys * QUERY } else { PAGE_BYTES };
                        ring.full().arrive_expect_tx(bytes);
                        let from = (blocks[I] * 2 + kind) as usize * (PAGE_TOKENS * HEAD_DIM) as usize;
                        bulk::copy_to_shared(ring.slot(), cache.pages.read().at(from).cast(), bytes, ring.full());
                    }
                    ring = ring.ahead(1);
                }
            });
            kind += 1;
        }
        ring
    }
}

/// One lane describes an item to the consumers and loads its queries.
#[inline(always)]
pub unsafe fn load_queries(p: &WideStep, ring: &Ring, item: &Item) {
    unsafe {
        if thread::fresh(thread::lane_id()) != 0 {
            return;
        }
        let group = p.group();
        ring.wait_empty();
        ring.slot().at(DESCRIPTION as usize).cast::<u32>().store16(0, item.words());
        let bytes = group * QUERY;
        ring.full().arrive_expect_tx(item.rows * bytes);
        let mut row = 0;
        while row < item.rows {
            let from = ((item.first_row + row) * p.q_heads + item.kv_head * group) * HEAD_DIM;
            let to = ring.slot().at((row * bytes) as usize);
            bulk::copy_to_shared(to, p.q.read().at(from as usize).cast(), bytes, ring.full());
            row += 1;
        }
    }
}

/// One lane tells the consumers that there are no more items.
#[inline(always)]
pub unsafe fn send_end(ring: &Ring) {
    unsafe {
        if thread::fresh(thread::lane_id()) == 0 {
            ring.wait_empty();
            ring.slot().at(DESCRIPTION as usize).cast::<u32>().store16(0, [0; 4]);
            ring.full().arrive();
        }
    }
}

/// The consumers' part: one item after another.
#[inline(always)]
pub unsafe fn attend<const ROWS: u32>(p: &WideStep, rings: &mut Rings) {
    unsafe {
        let a = &p.attend();
        let position = |row: u32| p.rows.positions.load(row as usize);
        loop {
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
            rings.rows.wait_full();
            let slot = rings.rows.slot();
            let item = Item::read(slot.at(DESCRIPTION as usize).cast());
            if item.rows == 0 {
                give_back(&rings.rows, lane);
                rings.rows = rings.rows.ahead(1);
                return;
            }
            let group = p.group();
            let Item { kv_head, split, first_row, rows, .. } = item;
            let here =
                Tile { kv_head, split, group: Divisor::new(group), first_row, pairs: rows * group, lane, warp_id };
            let pages = item.pages();
            let page = here.first_key() % SPLIT / PAGE_TOKENS;
            // The pages of others: this warp has no use for them. All warps meet before the next item, so nobody gets ahead.
            let own = page < pages && (lane == page || lane == pages + page);
            if lane < 2 * pages && !own {
                rings.ring.ahead(lane).empty().arrive();
            }
            warp::sync_warp();
            let mut found = Found::NOTHING;
            if page < pages {
                let (keys_slot, values_slot) = (rings.ring.ahead(page), rings.ring.ahead(pages + page));
                keys_slot.wait_full();
                let (g, t) = (lane / 4, (lane % 4) as usize);
                let first = here.first_key() % PAGE_TOKENS;
                let queries = slot.cast::<bf16>();
                let keys = shared::dynamic::<bf16>(keys_slot.offset() + first * QUERY);
                let values = shared::dynamic::<bf16>(values_slot.offset()).at(first as usize);
                let query = |i: usize, j: usize| {
                    let pair = g + 8 * i as u32;
                    if pair < here.pairs { queries.load16((pair * HEAD_DIM) as usize + t * 8 + 32 * j) } else { [0; 4] }
                };
                // Keys beyond the last were not loaded.
                let there = item.last - here.first_key().min(item.last);
                let key = |k: u32, j: usize| {
                    if k <= there { keys.load16((k * HEAD_DIM) as usize + t * 8 + 32 * j) } else { [0; 4] }
                };
                let value = |d: u32| values.load16((d * PAGE_TOKENS) as usize + 8 * t);
                let between = || {
                    give_back(&keys_slot, lane);
                    values_slot.wait_full();
                };
                if here.first_key() <= item.last {
                    found = attend_keys(a, &here, position, query, key, between, value);
                } else {
                    between();
                }
                give_back(&values_slot, lane);
            }
            give_back(&rings.rows, lane);
            rings.rows = rings.rows.ahead(1);
            rings.ring = rings.ring.ahead(2 * pages);
            let put = |pair, d, word| a.put::<true>(pair, d, word);
            reduce(a, &here, &found, position, put, Memory::<ROWS>::SCRATCH, ALL);
        }
    }
}

/// Gives a slot back, for the warp. The copy engine writes there next.
#[inline(always)]
unsafe fn give_back(slot: &Ring, lane: u32) {
    unsafe {
        bulk::fence_proxy_async();
        warp::sync_warp();
        slot.empty().arrive_if(lane == 0);
    }
}

/// Combines the splits of every row and head, a warp of the grid each.
#[inline(always)]
pub unsafe fn combine(p: &WideStep) {
    unsafe {
        let a = &p.attend();
        let (all, grid) = (p.rows.count.load(0) * p.q_heads, thread::grid_dim_x());
        let mut item = thread::block_idx_x() + thread::warp_id() * grid;
        while item < all {
            core::hint::assert_unchecked(p.q_heads > 0);
            let row = item / p.q_heads;
            combine_head_by_warp::<true>(a, row, item - row * p.q_heads, thread::fresh(thread::lane_id()));
            item += WARPS * grid;
        }
    }
}
