//! The tile scheduler of attention. It runs once a step: the schedule is the same in all layers, apart from the pool at
//! its end.
//!
//! A *run* is the splits of a tile and a key-value head. An item is one of these splits. All runs stand in a line, head
//! by head, so that CTAs which are far apart in the line read neighbouring memory at about the same time. The last runs
//! are the [pool](super::pool). The scheduler shares out the pages of the other runs evenly: a CTA has the items whose
//! middle page is in its share. So most of these runs are whole: one CTA has all items of the run, and combines them by
//! itself.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of a warp call what is unsafe here, each with its own number as `lane`.
//! Each item of the line is written by one warp of the grid, and read by others when they have waited for it: items of
//! the CTA at [`Memory::scheduled`], and items of the pool when all CTAs have put theirs.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, device, thread, warp};

use super::attention::{Item, PACKED, parts};
use super::{BatchedStep, Memory};
use crate::attention::SPLIT;
use crate::kv::PAGE_TOKENS;
use crate::waiting;

/// Pages of a split.
const PAGES: u32 = SPLIT / PAGE_TOKENS;
/// Words of an item in [`BatchedStep::items`]: its [words](Item::words), and its pages as
/// [`load_pages`](super::attention::load_pages) takes them.
pub const ITEM_WORDS: u32 = 8;
/// Pages of the pool for each CTA: about as many as some CTAs are ahead of others when they finish their own pages. Not
/// more, since a page from the pool costs a CTA more time than one of its own.
const POOL_PAGES: u32 = 4;
/// There is a pool if each CTA has at least `POOL_SHARE · POOL_PAGES` pages, and runs have at most `POOL_SPLITS` splits
/// on average. In a short step, or with long contexts, a pool gains nothing.
const POOL_SHARE: u32 = 12;
const POOL_SPLITS: u32 = 8;

/// The items of a CTA, and those of the pool: the first number in the line, and how many.
#[derive(Clone, Copy)]
pub struct Assignment {
    pub first: u32,
    pub count: u32,
    pub pool_first: u32,
    pub pool_count: u32,
}

impl Assignment {
    /// Loads the assignment that a warp of the CTA has stored.
    ///
    /// # Safety
    /// The CTA's share is known: it was waited for.
    #[device]
    unsafe fn load<const ROWS: u32>() -> Self {
        // SAFETY: the caller's word.
        Self::new(unsafe { Memory::<ROWS>::assignment().load16(0) })
    }

    /// From its [words](Self::words).
    #[device]
    pub const fn new([first, count, pool_first, pool_count]: [u32; 4]) -> Self {
        Self { first, count, pool_first, pool_count }
    }

    /// As four words.
    #[device]
    pub const fn words(&self) -> [u32; 4] {
        [self.first, self.count, self.pool_first, self.pool_count]
    }

    /// Stores the assignment for the CTA's other warps.
    ///
    /// # Safety
    /// One lane of the CTA calls it, before it says that the share is known.
    #[device]
    unsafe fn store<const ROWS: u32>(&self) {
        // SAFETY: the caller's word.
        unsafe { Memory::<ROWS>::assignment().store16(0, self.words()) };
    }
}

/// One of 32 successive tiles, as a lane holds it.
#[derive(Clone, Copy)]
struct Tiles {
    first_row: u32,
    /// 0 if the lane has no tile.
    rows: u32,
    /// The position of the tile's last row.
    last: u32,
    /// Pages and splits of one key-value head: of the tiles before this one among the 32, and of all 32.
    before: [u32; 2],
    all: [u32; 2],
}

impl Tiles {
    /// Loads the 32 tiles from `first` on.
    #[device]
    unsafe fn load(p: &BatchedStep, first: u32, lane: u32) -> Self {
        let (mut first_row, mut rows, mut last, mut own) = (0, 0, 0, [0; 2]);
        if first + lane < p.tile_count {
            // SAFETY: the caller's word.
            unsafe {
                [first_row, rows] = p.tiles.cast::<[u32; 2]>().load((first + lane) as usize);
                last = p.work.rows.positions.load((first_row + rows - 1) as usize);
            }
            own = [last / PAGE_TOKENS + 1, last / SPLIT + 1];
        }
        let mut up_to = own;
        unroll!(M < 5; {
            let others = up_to.map(|n| warp::shuffle_up(n, 1 << M));
            if lane >= 1 << M {
                up_to = [up_to[0] + others[0], up_to[1] + others[1]];
            }
        });
        let before = [up_to[0] - own[0], up_to[1] - own[1]];
        Self { first_row, rows, last, before, all: up_to.map(|n| warp::shuffle_idx(n, 31)) }
    }

    /// The lane whose tile has split number `split` of all splits of the 32 tiles.
    #[device]
    fn lane_of(&self, split: u32) -> u32 {
        let mut lane = 0;
        unroll!(I < 5; {
            let next = lane + (16 >> I);
            if warp::shuffle_idx(self.before[1], next) <= split {
                lane = next;
            }
        });
        lane
    }
}

/// A lane's split, one of the splits of 32 tiles.
#[derive(Clone, Copy)]
struct Split {
    /// Number of its tile among the 32.
    tile: u32,
    first_row: u32,
    rows: u32,
    last: u32,
    /// The first row of its sequence.
    since: u32,
    split: u32,
    /// Pages of the tiles before its own, as `Tiles::before` counts them.
    run: u32,
}

impl Split {
    /// Gives each lane split `number` of all splits of the tiles. `since` is the first row of the sequence of the
    /// lane's tile.
    #[device]
    fn of(tiles: &Tiles, since: u32, number: u32) -> Self {
        let tile = tiles.lane_of(number);
        let of = |n| warp::shuffle_idx(n, tile);
        let [run, first_item] = tiles.before.map(of);
        Self {
            tile,
            first_row: of(tiles.first_row),
            rows: of(tiles.rows),
            last: of(tiles.last),
            since: of(since),
            split: number - first_item,
            run,
        }
    }

    /// Number of splits of its run.
    #[device]
    const fn count(&self) -> u32 {
        self.last / SPLIT + 1
    }

    /// Makes the item. The CTA has the run's splits from `first_split` on.
    ///
    /// # Safety
    /// The lane has one of the step's tiles.
    #[device]
    unsafe fn item(
        &self,
        p: &BatchedStep,
        kv_head: u32,
        first_split: u32,
        is_last: bool,
        (is_whole, on_chip): (bool, bool),
    ) -> Item {
        let Self { first_row, rows, last, since, split, .. } = *self;
        Item {
            kv_head,
            split,
            first_split,
            first_row,
            rows,
            rows_before: first_row - since,
            last,
            on_chip,
            is_whole,
            is_last: is_last && self.count() > 1,
            // SAFETY: the caller's word: one of the step's rows.
            is_fresh: unsafe { p.work.rows.positions.load(since as usize) } < (split + 1) * SPLIT,
        }
    }
}

/// Computes the CTA's items, and the CTA's part of the pool's items, and puts them where [`walk`] reads them. One warp
/// calls it.
///
/// # Safety
/// All lanes of one warp of each CTA call it, once in a launch, when the CTA has synchronised behind its barriers.
#[device]
pub unsafe fn schedule<const ROWS: u32>(p: &BatchedStep) {
    // SAFETY: the caller's word.
    unsafe {
        let (lane, block) = (thread::opaque(thread::lane_id()), thread::block_idx_x());
        let all = count_all(p, lane);
        let pool = Pool::find(p, all, lane);
        let assignment = assign(p, all, &pool, (block, thread::grid_dim_x()), parts::<ROWS>());
        if lane == 0 {
            assignment.store::<ROWS>();
            if !p.assignments.is_null() {
                p.assignments.store16(4 * block as usize, assignment.words());
            }
        }
        warp::sync_warp();
        Memory::<ROWS>::scheduled().arrive_if(lane == 0);
        pool.put(p, assignment.pool_first, lane);
    }
}

/// The number of pages and of splits of a key-value head, over all tiles.
#[device]
pub unsafe fn count_all(p: &BatchedStep, lane: u32) -> [u32; 2] {
    let (mut all, mut first) = ([0; 2], 0);
    while first < p.tile_count {
        // SAFETY: the caller's word.
        let some = unsafe { Tiles::load(p, first, lane) }.all;
        all = [all[0] + some[0], all[1] + some[1]];
        first += 32;
    }
    all
}

/// Computes the items of sharer `number`, where `sharers` CTAs or warps share all items outside the pool, and puts them
/// into the line. `all` are the [pages and splits](count_all) of a head. A whole run stays on chip if it has at most
/// `parts` sums. A whole warp calls it, and sees the items afterwards.
///
/// # Safety
/// All lanes of the warp call it. `all` and `pool` are of these tiles, the same for all sharers; `number` is below
/// `sharers`, and no other warp has it.
#[device]
pub unsafe fn assign(
    p: &BatchedStep,
    all: [u32; 2],
    pool: &Pool,
    (number, sharers): (u32, u32),
    parts: u32,
) -> Assignment {
    // SAFETY: the caller's word.
    unsafe {
        let lane = thread::opaque(thread::lane_id());
        cuda_std::assume(sharers > 0);
        let pages = all[0] * p.work.kv_heads - pool.all[0];
        let (share, left) = (pages / sharers, pages % sharers);
        let begin = number * share + number.min(left);
        let end = begin + share + u32::from(number < left);

        let pool_first = all[1] * p.work.kv_heads - pool.all[1];
        let mut assignment = Assignment { first: 0, count: 0, pool_first, pool_count: pool.all[1] };
        let mut kv_head = if begin < end { begin / all[0].max(1) } else { p.work.kv_heads };
        while kv_head < p.work.kv_heads && kv_head * all[0] < end {
            // Pages and splits of the heads and tiles before.
            let mut before = all.map(|n| kv_head * n);
            let mut first = 0;
            while first < p.tile_count && before[0] < end {
                let tiles = Tiles::load(p, first, lane);
                let splits = if begin < before[0] + tiles.all[0] { tiles.all[1] } else { 0 };
                let since = if splits > 0 { first_row(p, &tiles) } else { 0 };
                let mut i = 0;
                while i < splits {
                    // Lanes beyond the last split take the last one.
                    let of_32 = (i + lane).min(splits - 1);
                    let split = Split::of(&tiles, since, of_32);
                    let (run, pages, count) = (before[0] + split.run, split.last / PAGE_TOKENS + 1, split.count());
                    let middle = |split: u32| run + split * PAGES + (pages - split * PAGES).min(PAGES) / 2;
                    let own = i + lane < splits && (begin..end).contains(&middle(split.split));
                    if own {
                        let (begins, ends) = (begin <= middle(0), middle(count - 1) < end);
                        let next = split.split + 1;
                        let is_last = if ends { next == count } else { end <= middle(next) };
                        // The first split of the run whose middle page is in this share.
                        let first_split = if begins { 0 } else { (begin - run - PAGES / 2).div_ceil(PAGES) };
                        let fits = count * split.rows * p.work.group() <= parts;
                        let whole = begins && ends;
                        let item = split.item(p, kv_head, first_split, is_last, (whole, whole && fits));
                        put(p, &item, before[1] + of_32);
                    }
                    let owned = warp::ballot(own);
                    if assignment.count == 0 {
                        assignment.first = before[1] + i + owned.trailing_zeros();
                    }
                    assignment.count += owned.count_ones();
                    i += 32;
                }
                before = [before[0] + tiles.all[0], before[1] + tiles.all[1]];
                first += 32;
            }
            kv_head += 1;
        }
        warp::sync_warp();
        assignment
    }
}

/// As [`schedule`], for a launch that takes over the schedule of an earlier one. One warp calls it.
///
/// # Safety
/// As for [`schedule`]; a launch before has left the share of each CTA, and all items.
#[device]
pub unsafe fn take_up<const ROWS: u32>(p: &BatchedStep) {
    // SAFETY: the caller's word.
    unsafe {
        let lane = thread::opaque(thread::lane_id());
        if lane == 0 {
            let words = p.assignments.load16(4 * thread::block_idx_x() as usize);
            Memory::<ROWS>::assignment().store16(0, words);
        }
        warp::sync_warp();
        Memory::<ROWS>::scheduled().arrive_if(lane == 0);
        if lane == 0 {
            // Counts the CTA as done with the pool's items, which are there already.
            atomic::fetch_add(p.pool_words(), 1, 1, Ordering::Release, Scope::Device);
        }
    }
}

/// The pool: the last runs of the line, all of the last key-value head.
pub struct Pool {
    /// The first of the 32 tiles among which the pool begins, and the pool's first tile.
    group: u32,
    tile: u32,
    /// Splits of these 32 tiles that come before the pool.
    skipped: u32,
    /// Pages and splits of the pool.
    all: [u32; 2],
}

impl Pool {
    /// An empty pool.
    #[device]
    pub const fn none(p: &BatchedStep) -> Self {
        Self { group: p.tile_count, tile: p.tile_count, skipped: 0, all: [0; 2] }
    }

    /// Computes the pool's size and start. `all` are the pages and splits of a head.
    #[device]
    unsafe fn find(p: &BatchedStep, all: [u32; 2], lane: u32) -> Self {
        let wanted = thread::grid_dim_x() * POOL_PAGES;
        // The pool does not go beyond one head.
        let is_worth = wanted * POOL_SHARE <= all[0] * p.work.kv_heads && all[1] <= POOL_SPLITS * p.tile_count;
        let wanted = if is_worth { wanted.min(all[0]) } else { 0 };
        let mut pool = Self::none(p);
        while pool.all[0] < wanted {
            // Takes in the whole group of 32 tiles before, or its end.
            pool.group = (pool.group - 1) / 32 * 32;
            // SAFETY: the caller's word.
            let tiles = unsafe { Tiles::load(p, pool.group, lane) };
            let up_to = |lane_before: u32| pool.all[0] + tiles.all[0] - lane_before;
            let begins = warp::ballot(tiles.rows > 0 && up_to(tiles.before[0]) >= wanted);
            let from = 31 - (begins | 1).leading_zeros();
            let [pages, splits] = tiles.before.map(|n| warp::shuffle_idx(n, from));
            pool.skipped = splits;
            pool.all = [pool.all[0] + tiles.all[0] - pages, pool.all[1] + tiles.all[1] - splits];
            pool.tile = pool.group + from;
        }
        pool
    }

    /// Puts the pool's items into the line. The last splits of all runs, which may be short, come behind the others:
    /// the last items to be taken ought to be small. All CTAs share the work.
    ///
    /// # Safety
    /// All lanes of one warp of each CTA call it. `to` is the number of the pool's first item in the line.
    #[device]
    unsafe fn put(&self, p: &BatchedStep, to: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let (block, grid) = (thread::block_idx_x(), thread::grid_dim_x());
            let tiles_of_pool = p.tile_count - self.tile;
            let (mut first, mut done, mut turn) = (self.group, 0, 0);
            let mut skipped = self.skipped;
            while first < p.tile_count {
                let tiles = Tiles::load(p, first, lane);
                let mut i = skipped;
                while i < tiles.all[1] {
                    if turn % grid == block {
                        let since = first_row(p, &tiles);
                        let number = (i + lane).min(tiles.all[1] - 1);
                        let split = Split::of(&tiles, since, number);
                        // How many runs of the pool end before this one.
                        let runs = first + split.tile - self.tile;
                        let item = split.item(p, p.work.kv_heads - 1, split.split, true, (false, false));
                        let place = if split.split + 1 == split.count() {
                            self.all[1] - tiles_of_pool + runs
                        } else {
                            done + number - skipped - runs
                        };
                        if i + lane < tiles.all[1] {
                            put(p, &item, to + place);
                        }
                    }
                    turn += 1;
                    i += 32;
                }
                done += tiles.all[1] - skipped;
                skipped = 0;
                first += 32;
            }
            warp::sync_warp();
            if lane == 0 {
                atomic::fetch_add(p.pool_words(), 1, 1, Ordering::Release, Scope::Device);
            }
        }
    }
}

/// The first row of a tile's sequence: a sequence's rows follow each other.
///
/// # Safety
/// The lane's tile is one of the step's, or none.
#[device]
unsafe fn first_row(p: &BatchedStep, tile: &Tiles) -> u32 {
    // SAFETY: the caller's word.
    unsafe {
        let mut first = tile.first_row;
        let sequence = p.work.rows.sequences.load(first as usize);
        while first > 0 && p.work.rows.sequences.load((first - 1) as usize) == sequence {
            first -= 1;
        }
        first
    }
}

/// A warp visits the CTA's items one after another, and then items that it gets from the pool.
///
/// | closure | who calls it, and when | does |
/// |---|---|---|
/// | `look_up(number)` | a lane for each of 32 own items; all lanes for one of the pool | returns words, and a rest |
/// | `begin()` | once, after the first look-up | waits for what `keep` and `visit` need |
/// | `keep(place, rest)` | the lane that looked up; of the pool, lane 0 | leaves the rest in one of 32 places |
/// | `from_pool(assignment)` | when own items are done, if there is a pool | the next number; `None` at the end |
/// | `visit(place, words)` | all lanes, for each item | the work |
///
/// # Safety
/// All lanes of the warp call it, once for a phase; the CTA's share becomes known without it. `look_up` may be called
/// for the CTA's items and those of the pool. All lanes together may call `visit` and the other functions.
#[device]
pub unsafe fn walk<const ROWS: u32, const N: usize, F: Default>(
    look_up: impl Fn(u32) -> ([[u32; 4]; N], F),
    keep: impl Fn(u32, F),
    begin: impl FnOnce(),
    mut from_pool: impl FnMut(&Assignment) -> Option<u32>,
    mut visit: impl FnMut(u32, [[u32; 4]; N]),
) {
    // SAFETY: the caller's word.
    unsafe {
        waiting::for_phase(Memory::<ROWS>::scheduled(), 0);
        let count = Memory::<ROWS>::assignment().load(1);
        let look_up_own = |done: u32| {
            let own = done + thread::opaque(thread::lane_id());
            let assignment = Assignment::load::<ROWS>();
            if own < assignment.count { look_up(assignment.first + own) } else { ([[0; 4]; N], F::default()) }
        };
        let keep = |place, rest, keeps: bool| {
            if keeps {
                keep(place, rest);
            }
            warp::sync_warp();
        };
        let (mut done, (mut words, rest)) = (0, look_up_own(0));
        begin();
        keep(thread::opaque(thread::lane_id()), rest, true);
        loop {
            let place = done % 32;
            let next = if done < count {
                words.map(|words| words.map(|word| warp::shuffle_idx(word, place)))
            } else {
                let assignment = Assignment::load::<ROWS>();
                if assignment.pool_count == 0 {
                    break;
                }
                let Some(number) = from_pool(&assignment) else { break };
                // All lanes look up the same item.
                let (next, rest) = look_up(number);
                keep(place, rest, thread::opaque(thread::lane_id()) == 0);
                next
            };
            visit(place, next);
            done += 1;
            if done % 32 == 0 {
                let rest;
                (words, rest) = look_up_own(done);
                keep(thread::opaque(thread::lane_id()), rest, true);
            }
        }
    }
}

/// Puts an item into the line.
///
/// # Safety
/// The item is one of the step's, and `number` is its own in the line.
#[device]
unsafe fn put(p: &BatchedStep, item: &Item, number: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let cache = p.work.cache(Default::default());
        let sequence = p.work.rows.sequences.load(item.first_row as usize);
        let mut blocks = [0; PAGES as usize];
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

/// Loads an item of the line as it was [put] there: its words, and its pages.
///
/// # Safety
/// The item was put, and shown to this warp.
#[device]
pub unsafe fn load(p: &BatchedStep, number: u32) -> [[u32; 4]; 2] {
    // SAFETY: the caller's word.
    let from: GlobalMut<u32> = unsafe { p.items.at((number * ITEM_WORDS) as usize) };
    // SAFETY: the caller's word.
    [0, 4].map(|at| unsafe { from.load16(at) })
}
