//! Attention of the rows of many sequences: the bits of [`attention`](crate::attention), with keys and values streamed through shared memory.
//!
//! # Shape of the work
//! An *item* is what a block of [`attend`](crate::attention::attend) does: a tile of rows of one sequence, a key-value head, a split of 256 keys. Blocks take
//! items in turn, all sequences' first splits before any's second:
//!
//! ```text
//! warp 8         an item's queries, and its pages of keys and of values, 16 KiB each ──bulk copies──► rings in shared memory
//! warps 0 to 7   32 keys each, as `attend`; their sums meet in shared memory
//! ```
//!
//! Of a tile with several splits the block that finishes last combines them: there is no launch for it, and the memory streams on meanwhile.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, kernel, thread, warp};

use crate::attention::{Attend, Found, PAIRS, SPLIT, Tile, attend_keys, combine_head, reduce};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::ring::{Ring, Shape};

/// Threads of a block.
pub const ATTEND_THREADS: u32 = 288;

const WARPS: u32 = 8;
/// A slot holds a page of a head's keys, or of its values.
const PAGES: Shape = Shape { stages: 12, bytes: PAGE_TOKENS * HEAD_DIM * 2 };
const QUERY: u32 = HEAD_DIM * 2;
/// Queries and descriptions of items.
const ITEMS: u32 = PAGES.shared_bytes();
const ITEM_BYTES: u32 = PAIRS * QUERY + 16;
const ITEM_SLOTS: u32 = 2;
const ITEM_BARRIERS: u32 = ITEMS + ITEM_SLOTS * ITEM_BYTES;
/// What consumers reduce in.
const SCRATCH: u32 = ITEM_BARRIERS + 2 * ITEM_SLOTS * 8;
const TOLD: u32 = SCRATCH + Attend::SHARED_BYTES;

/// Parameters of [`wide_attend`]. Grid: at most one block a multiprocessor. Shared memory: [`WideAttend::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WideAttend {
    /// As for [`attend`](crate::attention::attend) and [`combine`](crate::attention::combine); `out` is written in the order of [`slot`](crate::linear::slot).
    pub attend: Attend,
    /// `[tile_count, 2]`: the first row of a tile and how many; they are of one sequence, at ascending positions, and at most
    /// [`Attend::tile_rows`]. 8-byte aligned.
    pub tiles: Global<u32>,
    /// How many tiles there are.
    pub tile_count: u32,
    /// `[tiles, kv_heads]`, zero before and after.
    pub arrivals: GlobalMut<u32>,
    /// Splits of the longest sequence, or more.
    pub splits: u32,
}

impl WideAttend {
    /// Dynamic shared memory of a block.
    pub const SHARED_BYTES: u32 = TOLD + 16;
}

/// One tile, key-value head and split, as the producer tells it to the consumers.
#[derive(Clone, Copy)]
struct Item {
    tile: u32,
    kv_head: u32,
    split: u32,
    first_row: u32,
    rows: u32,
    /// The position of the tile's last row.
    last: u32,
}

impl Item {
    /// The words of its description: rows are few, and so are heads.
    #[inline(always)]
    const fn words(&self) -> [u32; 4] {
        [self.tile << 16 | self.kv_head, self.split, self.first_row << 16 | self.rows, self.last]
    }

    #[inline(always)]
    const fn from_words(words: [u32; 4]) -> Self {
        let [tile, split, rows, last] = words;
        Self { tile: tile >> 16, kv_head: tile & 0xffff, split, first_row: rows >> 16, rows: rows & 0xffff, last }
    }

    /// Pages of its split.
    #[inline(always)]
    fn pages(&self) -> u32 {
        ((self.last - self.split * SPLIT) / PAGE_TOKENS + 1).min(SPLIT / PAGE_TOKENS)
    }
}

/// A slot for an item's queries and description.
#[derive(Clone, Copy)]
struct ItemSlot {
    turn: u32,
}

impl ItemSlot {
    #[inline(always)]
    unsafe fn full(&self) -> bulk::Barrier {
        unsafe { bulk::Barrier::at(shared::dynamic(ITEM_BARRIERS + self.turn % ITEM_SLOTS * 8)) }
    }

    #[inline(always)]
    unsafe fn empty(&self) -> bulk::Barrier {
        unsafe { bulk::Barrier::at(shared::dynamic(ITEM_BARRIERS + (ITEM_SLOTS + self.turn % ITEM_SLOTS) * 8)) }
    }

    #[inline(always)]
    fn parity(&self) -> u32 {
        self.turn / ITEM_SLOTS % 2
    }

    #[inline(always)]
    unsafe fn queries(&self) -> Shared<bf16> {
        unsafe { shared::dynamic(ITEMS + self.turn % ITEM_SLOTS * ITEM_BYTES) }
    }

    #[inline(always)]
    unsafe fn description(&self) -> Shared<u32> {
        unsafe { shared::dynamic(ITEMS + self.turn % ITEM_SLOTS * ITEM_BYTES + PAIRS * QUERY) }
    }
}

/// Query heads that share a key-value head.
#[inline(always)]
fn group_of(p: &Attend) -> u32 {
    // SAFETY: the model has heads, at most 16 to a key-value head.
    unsafe {
        core::hint::assert_unchecked(p.cache.kv_heads > 0);
        let group = p.q_heads / p.cache.kv_heads;
        core::hint::assert_unchecked(group > 0 && group <= PAIRS);
        group
    }
}

/// The warp that loads: each lane looks one item up, and then the warp issues them one after another.
#[inline(always)]
unsafe fn produce(p: &WideAttend) {
    unsafe {
        let a = &p.attend;
        let lane = thread::lane_id();
        let group = group_of(a);
        let (kv_heads, tiles, grid) = (a.cache.kv_heads, p.tile_count, thread::grid_dim_x());
        core::hint::assert_unchecked(kv_heads > 0);
        let all = p.splits * tiles * kv_heads;
        let mut ring = Ring::producer(PAGES);
        let mut slot = ItemSlot { turn: 0 };
        let mut first = thread::block_idx_x();
        while first < all {
            let number = first + lane * grid;
            let mut item = Item { tile: 0, kv_head: 0, split: 0, first_row: 0, rows: 0, last: 0 };
            let mut blocks = [0u32; 4];
            let mut valid = false;
            if number < all {
                core::hint::assert_unchecked(tiles > 0);
                (item.kv_head, item.tile, item.split) =
                    (number % kv_heads, number / kv_heads % tiles, number / kv_heads / tiles);
                item.first_row = p.tiles.load(2 * item.tile as usize);
                item.rows = p.tiles.load(2 * item.tile as usize + 1);
                item.last = a.rows.positions.load((item.first_row + item.rows - 1) as usize);
                valid = item.split * SPLIT <= item.last;
                if valid {
                    let sequence = a.rows.sequences.load(item.first_row as usize);
                    unroll!(I < 4; {
                        if (I as u32) < item.pages() {
                            let index = item.split * (SPLIT / PAGE_TOKENS) + I as u32;
                            blocks[I] = a.cache.block_index(sequence, index, item.kv_head);
                        }
                    });
                }
            }
            let mut there = warp::ballot(valid);
            while there != 0 {
                let from = there.trailing_zeros();
                there &= there - 1;
                let words = item.words().map(|word| warp::shuffle_idx(word, from));
                let blocks = blocks.map(|block| warp::shuffle_idx(block, from));
                if lane == 0 {
                    let item = Item::from_words(words);
                    load_item(p, ring, slot, &item, blocks, group);
                }
                // All lanes keep count.
                ring = ring.ahead(2 * Item::from_words(words).pages());
                slot.turn += 1;
            }
            first += 32 * grid;
        }
        if lane == 0 {
            // An item without rows: the end.
            slot.empty().wait(slot.parity() ^ 1);
            slot.description().store16(0, [0; 4]);
            slot.full().arrive();
        }
    }
}

/// One lane: waits for room, and loads an item.
#[inline(always)]
unsafe fn load_item(p: &WideAttend, mut ring: Ring, slot: ItemSlot, item: &Item, blocks: [u32; 4], group: u32) {
    unsafe {
        let a = &p.attend;
        slot.empty().wait(slot.parity() ^ 1);
        slot.description().store16(0, item.words());
        let bytes = group * QUERY;
        slot.full().arrive_expect_tx(item.rows * bytes);
        let mut row = 0;
        while row < item.rows {
            let from = ((item.first_row + row) * a.q_heads + item.kv_head * group) * HEAD_DIM;
            let to = slot.queries().at((row * group * HEAD_DIM) as usize);
            bulk::copy_to_shared(to.cast(), a.q.at(from as usize).cast(), bytes, slot.full());
            row += 1;
        }
        let pages = item.pages();
        // Keys first.
        let mut kind = 0;
        while kind < 2 {
            unroll!(I < 4; {
                if (I as u32) < pages {
                    ring.wait_empty();
                    ring.full().arrive_expect_tx(PAGES.bytes);
                    let from = (blocks[I] * 2 + kind) as usize * (PAGE_TOKENS * HEAD_DIM) as usize;
                    bulk::copy_to_shared(ring.slot(), a.cache.pages.read().at(from).cast(), PAGES.bytes, ring.full());
                    ring = ring.ahead(1);
                }
            });
            kind += 1;
        }
    }
}

/// The warps that compute.
#[inline(always)]
unsafe fn consume(p: &WideAttend) {
    unsafe {
        let a = &p.attend;
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let group = group_of(a);
        let mut ring = Ring::consumer(PAGES);
        let mut slot = ItemSlot { turn: 0 };
        loop {
            slot.full().wait(slot.parity());
            let item = Item::from_words(slot.description().load16(0));
            if item.rows == 0 {
                return;
            }
            let queries = slot.queries();
            let here = Tile {
                kv_head: item.kv_head,
                split: item.split,
                group,
                first_row: item.first_row,
                pairs: item.rows * group,
                lane,
                warp_id,
            };
            let pages = item.pages();
            let page = here.first_key() % SPLIT / PAGE_TOKENS;
            let mut found = Found::NOTHING;
            if here.first_key() <= item.last {
                let (keys, values) = (ring.ahead(page), ring.ahead(pages + page));
                keys.wait_full();
                values.wait_full();
                let (g, t) = (lane / 4, (lane % 4) as usize);
                let first = here.first_key() % PAGE_TOKENS;
                let keys = shared::dynamic::<bf16>(keys.offset() + first * QUERY);
                let values = shared::dynamic::<bf16>(values.offset()).at(first as usize);
                let query = |i: usize, j: usize| {
                    let pair = g + 8 * i as u32;
                    if pair < here.pairs { queries.load16((pair * HEAD_DIM) as usize + t * 8 + 32 * j) } else { [0; 4] }
                };
                let key = |k: u32, j: usize| keys.load16((k * HEAD_DIM) as usize + t * 8 + 32 * j);
                let value = |d: u32| values.load16((d * PAGE_TOKENS) as usize + 8 * t);
                found = attend_keys(a, &here, query, key, value);
            }
            // Every warp has seen every page arrive before it gives it back: a lane a page. The copy engine writes there next.
            bulk::fence_proxy_async();
            warp::sync_warp();
            if lane < 2 * pages {
                let page = ring.ahead(lane);
                page.wait_full();
                page.empty().arrive();
            }
            slot.empty().arrive_if(lane == 0);
            ring = ring.ahead(2 * pages);
            slot.turn += 1;
            reduce::<true>(a, &here, &found, SCRATCH);
            let splits = item.last / SPLIT + 1;
            if splits > 1 && last_to_arrive(p, item.tile * a.cache.kv_heads + item.kv_head, splits) {
                let mut i = 0;
                while i < here.pairs {
                    let (row, head) = (item.first_row + i / group, item.kv_head * group + i % group);
                    combine_head::<true>(a, row, head, (lane, warp_id), SCRATCH);
                    i += 1;
                }
            }
        }
    }
}

/// Whether this block's split is the last of `splits`; then what the others wrote is seen.
#[inline(always)]
unsafe fn last_to_arrive(p: &WideAttend, which: u32, splits: u32) -> bool {
    unsafe {
        let told = shared::dynamic::<u32>(TOLD);
        thread::sync_named(1, WARPS * 32);
        if thread::thread_idx_x() == 0 {
            thread::fence_device();
            let before = atomic::fetch_add(p.arrivals, which as usize, 1, Ordering::AcqRel, Scope::Device);
            if before + 1 == splits {
                p.arrivals.store(which as usize, 0);
            }
            thread::fence_device();
            told.store(0, before + 1);
        }
        thread::sync_named(1, WARPS * 32);
        told.load(0) == splits
    }
}

/// Attention of all tiles over all their keys.
#[kernel(threads = ATTEND_THREADS, min_blocks = 1)]
pub unsafe fn wide_attend(p: WideAttend) {
    unsafe {
        if p.tile_count == 0 {
            return;
        }
        if thread::thread_idx_x() == 0 {
            Ring::init(PAGES, 1, WARPS);
            unroll!(I < 2; {
                let slot = ItemSlot { turn: I as u32 };
                slot.full().init(1);
                slot.empty().init(WARPS);
            });
            bulk::fence_init();
        }
        thread::sync_threads();
        if thread::warp_id() == WARPS {
            produce(&p);
        } else {
            consume(&p);
        }
    }
}

// What a block of an H100 may have.
const _: () = assert!(WideAttend::SHARED_BYTES <= 232_448 && ITEM_SLOTS == 2);
