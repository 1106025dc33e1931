//! How attention falls to the blocks, found once a step: it is the same in all layers.
//!
//! A *run* is the splits of a tile and a key-value head; an item is one of them. All runs stand in a line, head by head (so that blocks that are far apart read
//! neighbouring memory at about the same time), and the line's pages are shared out evenly: a block has the items whose middle page is in its share. So most
//! runs are whole: one block has them, and combines them by itself. A block's last run may go on in the next block, though, and its first may be the rest of one that began earlier. A block takes what *goes on* first, then its whole runs, then the
//! *rest*: what the rest lacks has been in memory for long when it is wanted.

use cuda_std::{thread, warp};

use super::attention::{Item, parts};
use super::{Memory, WideStep};
use crate::attention::SPLIT;
use crate::kv::PAGE_TOKENS;
use crate::waiting;

/// Pages of a split.
const PAGES: u32 = SPLIT / PAGE_TOKENS;
/// Words of an item in [`WideStep::items`]: its [words](Item::words), and the [indices](crate::kv::Cache::block_index) of its pages.
pub const ITEM_WORDS: u32 = 8;

/// What a block has: numbers of items in the line.
#[derive(Clone, Copy)]
struct Deal {
    first: u32,
    count: u32,
    /// How many of them are the rest of a run that began in an earlier block.
    rest: u32,
    /// How many of them are of a run that goes on in the next block.
    goes_on: u32,
}

impl Deal {
    /// Where in the line the block's `n`-th item is.
    #[inline(always)]
    const fn place(&self, n: u32) -> u32 {
        let Self { first, count, rest, goes_on } = *self;
        first
            + if n < goes_on {
                count - goes_on + n
            } else if n < count - rest {
                rest + n - goes_on
            } else {
                n - (count - rest)
            }
    }
}

/// A lane's part of 32 tiles that follow each other.
#[derive(Clone, Copy)]
struct Tiles {
    first_row: u32,
    /// None, if the lane has no tile.
    rows: u32,
    /// The position of its last row.
    last: u32,
    /// Pages and splits of one key-value head; of those before it among the 32, and of all 32.
    before: [u32; 2],
    all: [u32; 2],
}

impl Tiles {
    #[inline(always)]
    unsafe fn load(p: &WideStep, first: u32, lane: u32) -> Self {
        let (mut first_row, mut rows, mut last, mut own) = (0, 0, 0, [0; 2]);
        if first + lane < p.tile_count {
            unsafe {
                [first_row, rows] = p.tiles.cast::<[u32; 2]>().load((first + lane) as usize);
                last = p.rows.positions.load((first_row + rows - 1) as usize);
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

    /// The lane whose tile has this split of all.
    #[inline(always)]
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

/// Finds the block's items and puts them where [`walk`] reads them. One warp does it.
#[inline(always)]
pub unsafe fn deal<const ROWS: u32>(p: &WideStep) {
    unsafe {
        let lane = thread::fresh(thread::lane_id());
        let cache = p.cache(Default::default());
        // Pages and splits of a key-value head.
        let mut all = [0; 2];
        let mut first = 0;
        while first < p.tile_count {
            let some = Tiles::load(p, first, lane).all;
            all = [all[0] + some[0], all[1] + some[1]];
            first += 32;
        }
        let (block, grid) = (thread::block_idx_x(), thread::grid_dim_x());
        core::hint::assert_unchecked(grid > 0);
        let pages = all[0] * p.kv_heads;
        let (share, left) = (pages / grid, pages % grid);
        let begin = block * share + block.min(left);
        let end = begin + share + u32::from(block < left);

        let mut deal = Deal { first: 0, count: 0, rest: 0, goes_on: 0 };
        let mut kv_head = if begin < end { begin / all[0].max(1) } else { p.kv_heads };
        while kv_head < p.kv_heads && kv_head * all[0] < end {
            // Pages and splits before.
            let mut before = all.map(|n| kv_head * n);
            let mut first = 0;
            while first < p.tile_count && before[0] < end {
                let tiles = Tiles::load(p, first, lane);
                let splits = if begin < before[0] + tiles.all[0] { tiles.all[1] } else { 0 };
                let since = if splits > 0 { first_row(p, &tiles) } else { 0 };
                let mut i = 0;
                while i < splits {
                    // Beyond the last, the last again.
                    let number = (i + lane).min(splits - 1);
                    let from = tiles.lane_of(number);
                    let of = |n| warp::shuffle_idx(n, from);
                    let [run, first_item] = [before[0] + of(tiles.before[0]), of(tiles.before[1])];
                    let (first_row, rows, last, since) =
                        (of(tiles.first_row), of(tiles.rows), of(tiles.last), of(since));
                    let (pages, splits_of_run) = (last / PAGE_TOKENS + 1, last / SPLIT + 1);
                    let split = number - first_item;
                    let middle = |split: u32| run + split * PAGES + (pages - split * PAGES).min(PAGES) / 2;
                    let own = i + lane < splits && (begin..end).contains(&middle(split));
                    let (begins, ends) = (begin <= middle(0), middle(splits_of_run - 1) < end);
                    if own {
                        let is_last = if ends { split + 1 == splits_of_run } else { end <= middle(split + 1) };
                        let fits = splits_of_run * rows * p.group() <= parts::<ROWS>();
                        let item = Item {
                            kv_head,
                            split,
                            // The first with that much before its middle.
                            first_split: if begins { 0 } else { (begin - run - PAGES / 2).div_ceil(PAGES) },
                            first_row,
                            rows,
                            rows_before: first_row - since,
                            last,
                            on_chip: begins && ends && fits,
                            goes_on: !ends,
                            is_last: is_last && splits_of_run > 1,
                            is_fresh: p.rows.positions.load(since as usize) < (split + 1) * SPLIT,
                        };
                        let sequence = p.rows.sequences.load(first_row as usize);
                        let mut blocks = [0; PAGES as usize];
                        unroll!(I < 4; {
                            if (I as u32) < item.pages() {
                                blocks[I] = cache.block_index(sequence, item.first_page() + I as u32, kv_head);
                            }
                        });
                        let to = p.items.at(((before[1] + number) * ITEM_WORDS) as usize);
                        to.store16(0, item.words());
                        to.store16(4, blocks);
                    }
                    let owned = warp::ballot(own);
                    if deal.count == 0 {
                        deal.first = before[1] + i + owned.trailing_zeros();
                    }
                    deal.count += owned.count_ones();
                    deal.goes_on += warp::ballot(own && !ends).count_ones();
                    deal.rest += warp::ballot(own && ends && !begins).count_ones();
                    i += 32;
                }
                before = [before[0] + tiles.all[0], before[1] + tiles.all[1]];
                first += 32;
            }
            kv_head += 1;
        }
        if lane == 0 {
            let Deal { first, count, rest, goes_on } = deal;
            Memory::<ROWS>::deal().store16(0, [first, count, rest, goes_on]);
        }
        warp::sync_warp();
        Memory::<ROWS>::dealt().arrive_if(lane == 0);
    }
}

/// The first row of a tile's sequence: a sequence's rows follow each other.
#[inline(always)]
unsafe fn first_row(p: &WideStep, tile: &Tiles) -> u32 {
    unsafe {
        let mut first = tile.first_row;
        let sequence = p.rows.sequences.load(first as usize);
        while first > 0 && p.rows.sequences.load((first - 1) as usize) == sequence {
            first -= 1;
        }
        first
    }
}

/// A warp walks the block's items: each lane looks one up, and then they are visited one after another by all: their [words](Item::words) and, if `N` is 2, the
/// indices of their pages. `begin` is called when the first are looked up.
#[inline(always)]
pub unsafe fn walk<const ROWS: u32, const N: usize>(
    p: &WideStep,
    begin: impl FnOnce(),
    mut visit: impl FnMut([[u32; 4]; N]),
) {
    unsafe {
        waiting::for_phase(Memory::<ROWS>::dealt(), 0);
        let count = Memory::<ROWS>::deal().load(1);
        let look_up = |done: u32| {
            let lane = thread::fresh(thread::lane_id());
            let [first, count, rest, goes_on] = Memory::<ROWS>::deal().load16(0);
            let deal = Deal { first, count, rest, goes_on };
            let mut words = [[0; 4]; N];
            if done + lane < count {
                let from = p.items.at((deal.place(done + lane) * ITEM_WORDS) as usize);
                unroll!(I < N of 2; {
                    words[I] = from.load16(4 * I);
                });
            }
            words
        };
        let (mut done, mut words) = (0, look_up(0));
        begin();
        while done < count {
            let end = (count - done).min(32);
            let mut i = 0;
            while i < end {
                visit(words.map(|words| words.map(|word| warp::shuffle_idx(word, i))));
                i += 1;
            }
            done += 32;
            words = look_up(done);
        }
    }
}
