//! Attention of the rows of many sequences: the bits of [`attention`](crate::attention), with keys and values streamed through shared memory.
//!
//! # Shape of the work
//! An *item* is what a block of [`attend`](crate::attention::attend) does: a tile of rows of one sequence, a key-value head, a split of 256 keys. Blocks take
//! items in turn, all sequences' first splits before any's second:
//!
//! ```text
//! warp 16         an item's queries, and its pages of keys and of values, 16 KiB each ──bulk copies──► rings in shared memory
//! warps 0 to 7    items 0, 2, 4, …   ┐ a warp 32 keys, as in `attend`; their sums meet in shared memory: while one group's do,
//! warps 8 to 15   items 1, 3, 5, …   ┘ the other multiplies
//! warps 17, 18    one for each group: counts the finished splits of a tile, and combines those of one that is complete
//! ```
//!
//! There is no launch for combining, and memory streams on meanwhile.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::bulk::{self, Barrier};
use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, kernel, launches, thread, warp, wgmma};

use crate::attention::{Attend, Divisor, Found, PAIRS, SPLIT, Tile, attend_keys, combine_head_by_warp, reduce};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::ring::{Ring, Shape};

/// Threads of a block.
pub const ATTEND_THREADS: u32 = 640;

/// Warps of a group.
const WARPS: u32 = 8;
const GROUPS: u32 = 2;
const PRODUCER: u32 = GROUPS * WARPS;
/// Registers of a lane once warpgroups know what they are.
const CONSUMER_REGISTERS: u32 = 104;
const HELPER_REGISTERS: u32 = 64;
// A block shares out what it was launched with: 96 a lane. Asking for more waits forever.
const _: () = assert!(512 * CONSUMER_REGISTERS + 128 * HELPER_REGISTERS <= ATTEND_THREADS * 96);
/// A slot holds a page of a head's keys, or of its values.
const PAGES: Shape = Shape { stages: 10, bytes: PAGE_TOKENS * HEAD_DIM * 2 };
/// Pages under way at a time. The copy engine serves them side by side, and with all of the ring asked for, 64 sequences of 1,040 tokens took 139 µs a layer
/// on an H100, with 2, 3 and 5 pages 128, 123 and 136.
const UNDER_WAY: u32 = 3;
const QUERY: u32 = HEAD_DIM * 2;
/// Queries and descriptions of items, on their way from the producer to a group.
const QUERIES: Mailbox = Mailbox { start: PAGES.shared_bytes(), slots: 4, bytes: PAIRS * QUERY + Item::BYTES };
/// Descriptions of items that are done, on their way from a group to the warp that counts: two each.
const DONE: Mailbox = Mailbox { start: QUERIES.end(), slots: 4, bytes: Item::BYTES };
/// What groups reduce in.
const SCRATCH: u32 = DONE.end();

/// Slots in shared memory, each with a barrier that says it is full and one that says it is free.
#[derive(Clone, Copy)]
struct Mailbox {
    start: u32,
    slots: u32,
    bytes: u32,
}

impl Mailbox {
    const fn barriers(self) -> u32 {
        self.start + self.slots * self.bytes
    }

    const fn end(self) -> u32 {
        self.barriers() + 2 * self.slots * 8
    }

    /// One lane makes the barriers: a slot is full after one arrival, or as many as there are `writers`, and free after `readers`.
    #[inline(always)]
    unsafe fn init(self, writers: u32, readers: u32) {
        let mut turn = 0;
        while turn < self.slots {
            unsafe {
                self.full(turn).init(writers);
                self.empty(turn).init(readers);
            }
            turn += 1;
        }
    }

    #[inline(always)]
    unsafe fn full(self, turn: u32) -> Barrier {
        unsafe { Barrier::at(shared::dynamic(self.barriers() + turn % self.slots * 8)) }
    }

    #[inline(always)]
    unsafe fn empty(self, turn: u32) -> Barrier {
        unsafe { Barrier::at(shared::dynamic(self.barriers() + (self.slots + turn % self.slots) * 8)) }
    }

    #[inline(always)]
    const fn parity(self, turn: u32) -> u32 {
        turn / self.slots % 2
    }

    #[inline(always)]
    unsafe fn wait_full(self, turn: u32) {
        unsafe { self.full(turn).wait(self.parity(turn)) }
    }

    #[inline(always)]
    unsafe fn wait_empty(self, turn: u32) {
        unsafe { self.empty(turn).wait(self.parity(turn) ^ 1) }
    }

    /// A slot: an item's description, then its queries.
    #[inline(always)]
    unsafe fn slot(self, turn: u32) -> Shared<u32> {
        unsafe { shared::dynamic(self.start + turn % self.slots * self.bytes) }
    }
}

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
    pub const SHARED_BYTES: u32 = SCRATCH + GROUPS * Attend::SHARED_BYTES;
}

/// One tile, key-value head and split.
#[derive(Clone, Copy)]
struct Item {
    tile: u32,
    kv_head: u32,
    split: u32,
    first_row: u32,
    /// None: the end.
    rows: u32,
    /// The position of the tile's last row.
    last: u32,
    /// The ring's slot that has its first page.
    stage: u32,
    /// What the full barriers are waited for with: that slot's parity.
    parity: u32,
}

impl Item {
    /// Of a description.
    const BYTES: u32 = 16;
    /// The end.
    const NONE: Self = Self { tile: 0, kv_head: 0, split: 0, first_row: 0, rows: 0, last: 0, stage: 0, parity: 0 };

    /// The words of its description: there are at most 256 rows, and not many heads and splits.
    #[inline(always)]
    const fn words(&self) -> [u32; 4] {
        [
            self.tile << 16 | self.kv_head,
            self.stage << 24 | self.parity << 23 | self.split,
            self.first_row << 16 | self.rows,
            self.last,
        ]
    }

    #[inline(always)]
    const fn from_words(words: [u32; 4]) -> Self {
        let [tile, split, rows, last] = words;
        Self {
            tile: tile >> 16,
            kv_head: tile & 0xffff,
            split: split & 0x7f_ffff,
            first_row: rows >> 16,
            rows: rows & 0xffff,
            last,
            stage: split >> 24,
            parity: split >> 23 & 1,
        }
    }

    #[inline(always)]
    unsafe fn read(from: Shared<u32>) -> Self {
        Self::from_words(unsafe { from.load16(0) })
    }

    /// Pages of its split.
    #[inline(always)]
    fn pages(&self) -> u32 {
        ((self.last - self.split * SPLIT) / PAGE_TOKENS + 1).min(SPLIT / PAGE_TOKENS)
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
        let mut turn = 0;
        let mut first = thread::block_idx_x();
        while first < all {
            let number = first + lane * grid;
            let mut item = Item::NONE;
            let mut blocks = [0u32; 4];
            let mut valid = false;
            if number < all {
                core::hint::assert_unchecked(kv_heads > 0);
                let of_head = number / kv_heads;
                item.kv_head = number - of_head * kv_heads;
                core::hint::assert_unchecked(tiles > 0);
                item.split = of_head / tiles;
                item.tile = of_head - item.split * tiles;
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
                    load_item(p, ring, turn, &item, blocks, group);
                }
                // All lanes keep count.
                ring = ring.ahead(2 * Item::from_words(words).pages());
                turn += 1;
            }
            first += 32 * grid;
        }
        // The end, to both groups.
        let mut group = 0;
        while lane == 0 && group < GROUPS {
            QUERIES.wait_empty(turn);
            QUERIES.slot(turn).store16(0, Item::NONE.words());
            QUERIES.full(turn).arrive();
            turn += 1;
            group += 1;
        }
    }
}

/// One lane: waits for room, and loads an item.
#[inline(always)]
unsafe fn load_item(p: &WideAttend, mut ring: Ring, turn: u32, item: &Item, blocks: [u32; 4], group: u32) {
    unsafe {
        let (stage, parity) = ring.consumer_place();
        let item = &Item { stage, parity, ..*item };
        let a = &p.attend;
        QUERIES.wait_empty(turn);
        let slot = QUERIES.slot(turn);
        slot.store16(0, item.words());
        let bytes = group * QUERY;
        QUERIES.full(turn).arrive_expect_tx(item.rows * bytes);
        let mut row = 0;
        while row < item.rows {
            let from = ((item.first_row + row) * a.q_heads + item.kv_head * group) * HEAD_DIM;
            let to = slot.cast::<u8>().at((Item::BYTES + row * bytes) as usize);
            bulk::copy_to_shared(to, a.q.at(from as usize).cast(), bytes, QUERIES.full(turn));
            row += 1;
        }
        let pages = item.pages();
        // Keys first.
        let mut kind = 0;
        while kind < 2 {
            unroll!(I < 4; {
                if (I as u32) < pages {
                    ring.wait_under_way(UNDER_WAY);
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

/// A group of warps that compute.
#[inline(always)]
unsafe fn consume(p: &WideAttend) {
    unsafe {
        let a = &p.attend;
        let mut turn = thread::warp_id() / WARPS;
        let position = |row: u32| a.rows.positions.load(row as usize);
        loop {
            // New to the compiler: what follows from these is found for each item, not kept.
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()) % WARPS);
            QUERIES.wait_full(turn);
            let slot = QUERIES.slot(turn);
            let item = Item::read(slot);
            if item.rows == 0 {
                post(turn, &item, lane, warp_id);
                return;
            }
            let queries = slot.at(Item::BYTES as usize / 4).cast::<bf16>();
            let here = tile_of(&item, group_of(a), lane, warp_id);
            let pages = item.pages();
            let page = here.first_key() % SPLIT / PAGE_TOKENS;
            let ring = Ring::at(PAGES, item.stage, item.parity);
            let (keys_slot, values_slot) = (ring.ahead(page), ring.ahead(pages + page));
            let mut found = Found::NOTHING;
            if here.first_key() <= item.last {
                keys_slot.wait_full_after_last_turn();
                let (g, t) = (lane / 4, (lane % 4) as usize);
                let first = here.first_key() % PAGE_TOKENS;
                let keys = shared::dynamic::<bf16>(keys_slot.offset() + first * QUERY);
                let values = shared::dynamic::<bf16>(values_slot.offset()).at(first as usize);
                let query = |i: usize, j: usize| {
                    let pair = g + 8 * i as u32;
                    if pair < here.pairs { queries.load16((pair * HEAD_DIM) as usize + t * 8 + 32 * j) } else { [0; 4] }
                };
                let key = |k: u32, j: usize| keys.load16((k * HEAD_DIM) as usize + t * 8 + 32 * j);
                let value = |d: u32| {
                    // Two loads under way are enough; more would crowd out sums.
                    if (d / 8).is_multiple_of(2) {
                        warp::sync_warp();
                    }
                    values.load16((d * PAGE_TOKENS) as usize + 8 * t)
                };
                let between = || {
                    give_back(&keys_slot, lane);
                    values_slot.wait_full_after_last_turn();
                };
                found = attend_keys(a, &here, position, query, key, between, value);
                give_back(&values_slot, lane);
            } else if page < pages {
                for slot in [&keys_slot, &values_slot] {
                    slot.wait_last_turn();
                    give_back(slot, lane);
                }
            }
            // All of it again: during the products it would take registers.
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
            let (group, warp_id) = (warp_id / WARPS, warp_id % WARPS);
            let item = Item::read(QUERIES.slot(thread::fresh(turn)));
            let here = tile_of(&item, group_of(a), lane, warp_id);
            reduce::<true>(a, &here, &found, position, SCRATCH + group * Attend::SHARED_BYTES, 1 + group);
            post(thread::fresh(turn), &item, lane, warp_id);
            warp::sync_warp();
            QUERIES.empty(thread::fresh(turn)).arrive_if(lane == 0);
            turn = thread::fresh(turn + GROUPS);
        }
    }
}

#[inline(always)]
fn tile_of(item: &Item, group: u32, lane: u32, warp_id: u32) -> Tile {
    let &Item { kv_head, split, first_row, rows, .. } = item;
    Tile { kv_head, split, group: Divisor::new(group), first_row, pairs: rows * group, lane, warp_id }
}

/// Gives a page back, when its two warps both have. The copy engine writes there next.
#[inline(always)]
unsafe fn give_back(page: &Ring, lane: u32) {
    unsafe {
        bulk::fence_proxy_async();
        warp::sync_warp();
        page.empty().arrive_if(lane == 0);
    }
}

/// Tells the warp that counts that the item of this turn is done: all warps' stores come before.
#[inline(always)]
unsafe fn post(turn: u32, item: &Item, lane: u32, warp_id: u32) {
    unsafe {
        DONE.wait_empty(turn);
        if warp_id == 0 && lane == 0 {
            DONE.slot(turn).store16(0, item.words());
        }
        warp::sync_warp();
        DONE.full(turn).arrive_if(lane == 0);
    }
}

/// The warp that counts for a group.
#[inline(always)]
unsafe fn combine(p: &WideAttend, group: u32) {
    unsafe {
        let a = &p.attend;
        let mut turn = group;
        loop {
            let lane = thread::fresh(thread::lane_id());
            DONE.wait_full(turn);
            let item = Item::read(DONE.slot(turn));
            if item.rows == 0 {
                return;
            }
            let splits = item.last / SPLIT + 1;
            let mut before = 0;
            if lane == 0 && splits > 1 {
                let which = (item.tile * a.cache.kv_heads + item.kv_head) as usize;
                thread::fence_device();
                before = atomic::fetch_add(p.arrivals, which, 1, Ordering::AcqRel, Scope::Device);
                if before + 1 == splits {
                    p.arrivals.store(which, 0);
                }
                thread::fence_device();
            }
            warp::sync_warp();
            if splits > 1 && warp::shuffle_idx(before, 0) + 1 == splits {
                let (mut row, mut head) = (0, 0);
                loop {
                    // Read again for each: a head needs the registers.
                    let item = Item::read(DONE.slot(thread::fresh(turn)));
                    if row == item.rows {
                        break;
                    }
                    let heads = group_of(a);
                    let first = item.kv_head * heads;
                    combine_head_by_warp::<true>(a, item.first_row + row, first + head, thread::fresh(lane));
                    head += 1;
                    if head == heads {
                        (row, head) = (row + 1, 0);
                    }
                }
            }
            warp::sync_warp();
            DONE.empty(turn).arrive_if(lane == 0);
            turn += GROUPS;
        }
    }
}

/// Attention of all tiles over all their keys.
#[kernel(threads = ATTEND_THREADS, min_blocks = 1)]
pub unsafe fn wide_attend(p: WideAttend) {
    unsafe {
        launches::allow_next();
        if thread::thread_idx_x() == 0 {
            Ring::init(PAGES, 1, WARPS / (SPLIT / PAGE_TOKENS));
            QUERIES.init(1, WARPS);
            DONE.init(WARPS, 1);
            bulk::fence_init();
        }
        thread::sync_threads();
        launches::wait();
        let warp_id = thread::warp_id();
        if warp_id < PRODUCER {
            wgmma::take_registers::<CONSUMER_REGISTERS>();
            consume(&p);
        } else {
            wgmma::give_registers::<HELPER_REGISTERS>();
            if warp_id == PRODUCER {
                produce(&p);
            } else if warp_id <= PRODUCER + GROUPS {
                combine(&p, warp_id - PRODUCER - 1);
            }
        }
    }
}

// What a block of an H100 may have.
const _: () = assert!(WideAttend::SHARED_BYTES <= 232_448);
