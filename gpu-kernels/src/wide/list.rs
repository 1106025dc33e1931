//! The items of attention, listed once a step: they are the same in all layers.
//!
//! Items that are whole splits come first, then the last splits of all tiles: what is taken last is to be small. Either part goes head by head, so that warps that work side by side read neighbouring
//! memory.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{thread, warp};

use super::WideStep;
use super::attention::{Item, PACKED, SPLIT_PAGES};
use crate::attention::SPLIT;

/// Words of an item in [`WideStep::items`]: its [words](Item::words), and its pages.
pub const ITEM_WORDS: u32 = 8;

/// A lane's part of 32 tiles that follow each other.
#[derive(Clone, Copy)]
struct Tiles {
    first_row: u32,
    /// None, if the lane has no tile.
    rows: u32,
    /// The position of its last row.
    last: u32,
    /// Splits of one key-value head; of those before it among the 32, and of all 32.
    before: u32,
    all: u32,
}

impl Tiles {
    #[inline(always)]
    unsafe fn load(p: &WideStep, first: u32, lane: u32) -> Self {
        let (mut first_row, mut rows, mut last, mut own) = (0, 0, 0, 0);
        if first + lane < p.tile_count {
            unsafe {
                [first_row, rows] = p.tiles.cast::<[u32; 2]>().load((first + lane) as usize);
                last = p.work.rows.positions.load((first_row + rows - 1) as usize);
            }
            own = last / SPLIT + 1;
        }
        let mut up_to = own;
        unroll!(M < 5; {
            let others = warp::shuffle_up(up_to, 1 << M);
            if lane >= 1 << M {
                up_to += others;
            }
        });
        Self { first_row, rows, last, before: up_to - own, all: warp::shuffle_idx(up_to, 31) }
    }

    /// Tiles among the 32.
    #[inline(always)]
    fn count(p: &WideStep, first: u32) -> u32 {
        (p.tile_count - first).min(32)
    }

    /// The lane whose tile has this split of all.
    #[inline(always)]
    fn lane_of(&self, split: u32) -> u32 {
        let mut lane = 0;
        unroll!(I < 5; {
            let next = lane + (16 >> I);
            if warp::shuffle_idx(self.before, next) <= split {
                lane = next;
            }
        });
        lane
    }
}

/// Lists the items, each block its part of them, and counts them. One warp of each block does it.
#[inline(always)]
pub unsafe fn make(p: &WideStep) {
    unsafe {
        let lane = thread::fresh(thread::lane_id());
        let (block, grid) = (thread::block_idx_x(), thread::grid_dim_x());
        let heads = p.work.kv_heads;
        // Whole splits of a head: all splits but each tile's last.
        let mut whole = 0;
        let mut first = 0;
        while first < p.tile_count {
            whole += Tiles::load(p, first, lane).all - Tiles::count(p, first);
            first += 32;
        }
        if block == 0 && lane == 0 {
            p.item_counters().store(2, heads * (whole + p.tile_count));
        }
        let (mut first, mut before, mut turn) = (0, 0, 0);
        while first < p.tile_count {
            let mut tiles = None;
            let mut head = 0;
            while head < heads {
                if turn % grid == block {
                    let tiles = *tiles.get_or_insert_with(|| Tiles::load(p, first, lane));
                    list(p, &tiles, first, head, [head * whole + before, heads * whole + head * p.tile_count + first]);
                }
                turn += 1;
                head += 1;
            }
            first += 32;
            if first < p.tile_count {
                before += Tiles::load(p, first - 32, lane).all - 32;
            }
        }
        warp::sync_warp();
        if lane == 0 {
            atomic::fetch_add(p.item_counters(), 3, 1, Ordering::Release, Scope::Device);
        }
    }
}

/// Lists the items of 32 tiles from the `first` on, of a head: whole splits from one number on, and tiles' last splits from another.
#[inline(always)]
unsafe fn list(p: &WideStep, tiles: &Tiles, first: u32, kv_head: u32, [whole, last_ones]: [u32; 2]) {
    unsafe {
        let lane = thread::fresh(thread::lane_id());
        let since = if first + lane < p.tile_count { first_row(p, tiles.first_row) } else { 0 };
        let mut i = 0;
        while i < tiles.all {
            // Beyond the last, the last again.
            let number = (i + lane).min(tiles.all - 1);
            let tile = tiles.lane_of(number);
            let of = |n| warp::shuffle_idx(n, tile);
            let (first_row, rows, last, since) = (of(tiles.first_row), of(tiles.rows), of(tiles.last), of(since));
            let split = number - of(tiles.before);
            let item = Item {
                kv_head,
                split,
                first_row,
                rows,
                rows_before: first_row - since,
                last,
                is_fresh: p.work.rows.positions.load(since as usize) < (split + 1) * SPLIT,
            };
            if i + lane < tiles.all {
                let place = if split == last / SPLIT { last_ones + tile } else { whole + number - tile };
                put(p, &item, place);
            }
            i += 32;
        }
    }
}

/// The first row of a sequence, of which this is a row: a sequence's rows follow each other.
#[inline(always)]
unsafe fn first_row(p: &WideStep, row: u32) -> u32 {
    unsafe {
        let mut first = row;
        let sequence = p.work.rows.sequences.load(first as usize);
        while first > 0 && p.work.rows.sequences.load((first - 1) as usize) == sequence {
            first -= 1;
        }
        first
    }
}

/// Puts an item into the list.
#[inline(always)]
unsafe fn put(p: &WideStep, item: &Item, number: u32) {
    unsafe {
        let cache = p.work.cache(Default::default());
        let sequence = p.work.rows.sequences.load(item.first_row as usize);
        let mut blocks = [0; SPLIT_PAGES];
        unroll!(I < 4; {
            if (I as u32) < item.pages() {
                let page = cache.page(sequence, item.first_page() + I as u32);
                let is_packed = p.packed.load(page as usize) != 0;
                blocks[I] = (page * cache.kv_heads + item.kv_head) | if is_packed { PACKED } else { 0 };
            }
        });
        let to = p.items.at((number * ITEM_WORDS) as usize);
        to.store16(0, item.words());
        to.store16(4, blocks);
    }
}

/// How many items there are, once all blocks have listed theirs.
#[inline(always)]
pub unsafe fn count(p: &WideStep) -> u32 {
    unsafe { p.item_counters().load(2) }
}

/// An item of the list, as it was [put] there: its words, and its pages.
#[inline(always)]
pub unsafe fn load(p: &WideStep, number: u32) -> [[u32; 4]; 2] {
    unsafe {
        let from = p.items.at((number * ITEM_WORDS) as usize);
        [from.load16(0), from.load16(4)]
    }
}
