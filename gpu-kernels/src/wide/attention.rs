//! Attention of the rows of many sequences: the bits of [`attention`](crate::attention), a warp for each part of the work.
//!
//! An *item* is a tile of rows of one sequence, a key-value head and a split of 256 keys: what a block of [`attend`](crate::attention::attend) does. Here one warp does it, 32 keys
//! after another, with keys and values loaded straight into the registers that the tensor core takes them from:
//!
//! ```text
//! keys of 32 tokens    ──► scores ──► weights ─┐
//! the next 32, under way all this time         ├─► merged with what there was
//! their values         ────────────────────────┘
//! ```
//!
//! No warp waits for another, so eight of them hide each other's waiting. Items come from a [list](super::list), the large ones first; a warp takes its first one by its number, and the
//! others by a counter that all share.
//!
//! # Queries, keys and values of a step
//! They are made from what the projection left where they are wanted: an item's queries by the warp that has it, and a step's key and value by each warp that has their token among its own, in place of
//! what it loaded for it. The cache gets them when attention is over.
//!
//! # Combining
//! What a warp finds of one split of several goes to memory, and is counted there; who finds that this was the last of a row and head combines them. Nobody waits.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, math, thread, warp};

use super::{Memory, Phase, WARPS, WideStep};
use crate::attention::{
    Attend, Divisor, PAIRS, Running, SPLIT, TILE_KEYS, Tile, WARP_KEYS, combine_by_warp, key_of, score_keys, weigh,
};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::packed::{Form, Loaded, dimension_of, load_packed, load_plain, unpack, value_fragments};
use crate::qkv::{Factors, Weight, pack_value};

const ROW_BYTES: u32 = HEAD_DIM * 2;
/// Elements of a page's keys for a head, or of its values.
const KIND: usize = (PAGE_TOKENS * HEAD_DIM) as usize;
/// Beside an item's page, its [index](crate::kv::Cache::block_index): whether it may be [packed](WideStep::packed).
pub const PACKED: u32 = 1 << 31;
/// A warp's part of shared memory: an item's queries, and a key or a value of the step.
pub const WARP_BYTES: u32 = (PAIRS + 1) * ROW_BYTES;
/// Pages of a split.
pub const SPLIT_PAGES: usize = (SPLIT / PAGE_TOKENS) as usize;

/// One tile, key-value head and split.
#[derive(Clone, Copy)]
pub struct Item {
    pub kv_head: u32,
    pub split: u32,
    pub first_row: u32,
    pub rows: u32,
    /// Rows before them of the same sequence.
    pub rows_before: u32,
    /// The position of the tile's last row.
    pub last: u32,
    /// Whether this step adds to its keys.
    pub is_fresh: bool,
}

impl Item {
    /// As four words.
    #[inline(always)]
    pub const fn words(&self) -> [u32; 4] {
        let first = self.kv_head << 17 | self.split << 1 | self.is_fresh as u32;
        [first, self.rows_before << 16 | self.rows, self.first_row, self.last]
    }

    /// From its [words](Self::words).
    #[inline(always)]
    pub const fn new([first, rows, first_row, last]: [u32; 4]) -> Self {
        Self {
            kv_head: first >> 17,
            split: first >> 1 & 0xffff,
            first_row,
            rows: rows & 0xffff,
            rows_before: rows >> 16,
            last,
            is_fresh: first & 1 != 0,
        }
    }

    /// Where one of its rows stands: of the last, and so of a single one, it is known.
    #[inline(always)]
    unsafe fn position(&self, p: &WideStep, row: u32) -> u32 {
        if row + 1 == self.first_row + self.rows {
            self.last
        } else {
            // SAFETY: one of the step's rows.
            unsafe { p.work.rows.positions.load(row as usize) }
        }
    }

    /// The first of its pages among its sequence's.
    #[inline(always)]
    pub const fn first_page(&self) -> u32 {
        self.split * SPLIT_PAGES as u32
    }

    /// Its pages.
    #[inline(always)]
    pub fn pages(&self) -> u32 {
        (self.last / PAGE_TOKENS + 1 - self.first_page()).min(SPLIT_PAGES as u32)
    }

    /// How often a warp takes 32 of its keys.
    #[inline(always)]
    fn turns(&self) -> u32 {
        ((self.last - self.split * SPLIT) / WARP_KEYS + 1).min(SPLIT / WARP_KEYS)
    }
}

/// What a warp has of an item, beside its keys and values.
struct Work<'a> {
    p: &'a WideStep,
    phase: Global<Phase>,
    item: Item,
    attend: &'a Attend,
    group: Divisor,
    /// Of the item's pages one each in the first lanes: its index, and how it lies.
    page: u32,
    form: Form,
    /// A lane's part of the norm of keys.
    key_norm: Weight,
    /// The item's queries, and behind them a key or a value of the step.
    memory: Shared<bf16>,
}

/// Keys or values of 32 tokens as a lane loaded them, and how they lie.
#[derive(Clone, Copy)]
struct Part {
    loaded: Loaded,
    form: Form,
}

/// Queries that a warp makes at a time.
const TOGETHER: usize = 4;

impl Work<'_> {
    /// Makes the item's queries from what the projection left.
    #[inline(always)]
    unsafe fn make_queries(&self, weight: Weight) {
        unsafe {
            let (p, item, group) = (self.p, &self.item, self.group.value);
            let heads = p.work.heads();
            let mut row = 0;
            while row < item.rows {
                let position = item.position(p, item.first_row + row);
                let factors = Factors::of(weight, p.work.cos, p.work.sin, position);
                let mut first = 0;
                while first < group {
                    // Beyond the last, the last again.
                    let head = |i: u32| item.kv_head * group + (first + i).min(group - 1);
                    let x = [0, 1, 2, 3].map(|i| heads.load(item.first_row + row, head(i)));
                    let scales = heads.scales(&x);
                    unroll!(I < 4; {
                        let number = first + I as u32;
                        if number < group {
                            let to = self.memory.at(((row * group + number) * HEAD_DIM) as usize);
                            heads.vector(0, x[I], scales[I], || factors).store_shared(to, 0);
                        }
                    });
                    first += TOGETHER as u32;
                }
                row += 1;
            }
            warp::sync_warp();
        }
    }

    /// Where the step's key or value is put.
    #[inline(always)]
    unsafe fn newest(&self) -> Shared<bf16> {
        unsafe { self.memory.at((PAIRS * HEAD_DIM) as usize) }
    }

    /// Begins to load the keys (0) or values (1) of a turn.
    #[inline(always)]
    unsafe fn load(&self, kind: usize, turn: u32) -> Part {
        unsafe {
            let of = turn * WARP_KEYS / PAGE_TOKENS;
            let (block, form) = (warp::shuffle_idx(self.page, of), Form(warp::shuffle_idx(self.form.0, of)));
            let pages = field!(self.phase, pages: GlobalMut<bf16>).read();
            let page = pages.at((block as usize * 2 + kind) * KIND);
            let token = turn * WARP_KEYS % PAGE_TOKENS;
            let lane = thread::fresh(thread::lane_id());
            let loaded =
                if form.is_packed() { load_packed(page.cast(), token, lane) } else { load_plain(page, token, lane) };
            Part { loaded, form }
        }
    }

    /// Puts the step's keys or values that are among those of a turn, from `first_key` on, in the place of what was there.
    #[inline(always)]
    unsafe fn put_newest(&self, kind: usize, first_key: u32, part: &mut Part) {
        if !self.item.is_fresh {
            return;
        }
        unsafe {
            let (p, item) = (self.p, &self.item);
            let heads = p.work.heads();
            let (mut row, mut position) = (item.first_row + item.rows - 1, item.last);
            while first_key <= position {
                if position < first_key + WARP_KEYS {
                    let lane = thread::fresh(thread::lane_id());
                    if kind == 0 {
                        let head = heads.q_heads + item.kv_head;
                        let x = heads.load(row, head);
                        let [scale] = heads.scales(&[x]);
                        let factors = || Factors::of(self.key_norm, p.work.cos, p.work.sin, position);
                        heads.vector(head, x, scale, factors).store_shared(self.newest(), 0);
                    } else {
                        let words = pack_value(heads.load_value(row, item.kv_head, lane * 4));
                        self.newest().cast().store(lane as usize, words);
                    }
                    warp::sync_warp();
                    let (key, own) = (position - first_key, key_of(lane / 4));
                    unroll!(J < 4; {
                        if TILE_KEYS[J] + own == key {
                            unroll!(I < 4; {
                                part.loaded[I][J] = self.newest().load16((lane % 4 * 8) as usize + 32 * I);
                            });
                        }
                    });
                    warp::sync_warp();
                }
                if row + item.rows_before == item.first_row {
                    break;
                }
                row -= 1;
                // A row of the tile's sequence.
                position = p.work.rows.positions.load(row as usize);
            }
        }
    }

    /// The tile, for a turn.
    #[inline(always)]
    fn tile(&self, turn: u32) -> Tile {
        let Item { kv_head, split, first_row, rows, .. } = self.item;
        let (group, lane) = (self.group, thread::fresh(thread::lane_id()));
        Tile { kv_head, split, group, first_row, pairs: rows * group.value, lane, warp_id: turn }
    }

    /// Scores of a turn's keys, and what values are weighed by.
    #[inline(always)]
    unsafe fn weigh<const HALVES: usize>(&self, tile: &Tile, keys: &Part) -> crate::attention::Weights {
        let (g, t) = (tile.lane / 4, tile.lane % 4);
        let query = |i: usize, j: usize| {
            let pair = g + 8 * i as u32;
            if i < HALVES && pair < tile.pairs {
                unsafe { self.memory.load16((pair * HEAD_DIM + 8 * t) as usize + 32 * j) }
            } else {
                [0; 4]
            }
        };
        let scores = if keys.form.is_packed() {
            score_keys(query, |i| unpack(&keys.loaded, i, keys.form.base(0)))
        } else {
            score_keys(query, |i| keys.loaded[i])
        };
        weigh(self.attend, tile, |row| unsafe { self.item.position(self.p, row) }, scores)
    }

    /// What the warp finds of the split for the first `HALVES` times eight pairs. With few pairs there are registers for keys and values to come.
    #[inline(always)]
    unsafe fn find<const HALVES: usize>(&self, first_keys: Part) -> Running {
        unsafe {
            let mut running = Running::NOTHING;
            let turns = self.item.turns();
            let mut keys = first_keys;
            let mut turn = 0;
            loop {
                let mut values = self.load(1, turn);
                let tile = self.tile(turn);
                self.put_newest(0, tile.first_key(), &mut keys);
                let weights = self.weigh::<HALVES>(&tile, &keys);
                let more = turn + 1 < turns;
                if more {
                    keys = self.load(0, turn + 1);
                }
                self.put_newest(1, tile.first_key(), &mut values);
                if values.form.is_packed() {
                    running.add::<HALVES>(&weights, |i| unpack(&values.loaded, i, values.form.base(1)));
                } else {
                    running.add::<HALVES>(&weights, |i| value_fragments(&values.loaded, i));
                }
                if !more {
                    return running;
                }
                turn += 1;
            }
        }
    }

    /// Puts what was found where it belongs: results of rows that end in the first split, and a part of others; and combines those of which all parts are there.
    #[inline(always)]
    unsafe fn finish<const HALVES: usize>(&self, running: &Running) {
        unsafe {
            let (p, a, item) = (self.p, self.attend, &self.item);
            let tile = self.tile(0);
            let (g, t) = (tile.lane / 4, tile.lane % 4);
            unroll!(H < 2; {
                let pair = g + 8 * H as u32;
                if H < HALVES && pair < tile.pairs {
                    let (position, place) = (item.position(p, tile.row(pair)), tile.place(a, pair));
                    let scale = [running.top[H], running.norm[H]];
                    unroll!(I < 4; {
                        unroll!(W < 4; {
                            let o = running.o[4 * I + W];
                            let (sum, d) = ([o[2 * H], o[2 * H + 1]], dimension_of(I as u32, W as u32, 2 * t));
                            if position < SPLIT {
                                if item.split == 0 {
                                    let word = math::pack_bf16(sum[0] / scale[1], sum[1] / scale[1]);
                                    a.put::<true>(place, d, word);
                                }
                            } else if position / SPLIT >= item.split {
                                a.keep(item.split, place, d, sum, scale);
                            }
                        });
                    });
                }
            });
            if item.last < SPLIT {
                return;
            }
            warp::sync_warp();
            // A lane counts for a pair.
            let mut complete = false;
            if tile.lane < tile.pairs {
                let splits = item.position(p, tile.row(tile.lane)) / SPLIT + 1;
                if splits > 1 && item.split < splits {
                    let counter = p.split_arrivals().at(tile.place(a, tile.lane));
                    complete = atomic::fetch_add(counter, 0, 1, Ordering::AcqRel, Scope::Device) + 1 == splits;
                    if complete {
                        // For the next layer, which begins when all have met.
                        counter.store(0, 0);
                    }
                }
            }
            let mut complete = warp::ballot(complete);
            // What one lane saw the others see behind this.
            warp::sync_warp();
            while complete != 0 {
                let pair = complete.trailing_zeros();
                complete &= complete - 1;
                let place = tile.place(a, pair);
                let splits = item.position(p, tile.row(pair)) / SPLIT + 1;
                let words = |s| a.part(place, s).load16(tile.lane as usize * 4);
                let put = |d, word| a.put::<true>(place, d, word);
                combine_by_warp(splits, tile.lane, words, |s| a.part_scale(place, s), put);
            }
        }
    }
}

/// The consumers' part of a phase: a warp takes one item after another.
#[inline(always)]
pub unsafe fn attend<const ROWS: u32>(p: &WideStep, phase: Global<Phase>, odd: u32) {
    unsafe {
        let attend = &p.work.attend();
        let group = Divisor::new(p.work.group());
        let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
        let norm = Factors::load_weight(field!(phase, norm: Global<bf16>));
        let key_norm = Factors::load_weight(field!(phase, key_norm: Global<bf16>));
        let memory = shared::dynamic::<bf16>(warp_id * WARP_BYTES);
        let (block, grid) = (thread::fresh(thread::block_idx_x()), thread::fresh(thread::grid_dim_x()));
        if block == 0 && warp_id == 0 && lane == 0 {
            // For the attention to come, which begins when all have met.
            p.item_counters().store(1 - odd as usize, 0);
        }
        let count = super::list::count(p);
        let mut number = warp_id * grid + block;
        while number < count {
            // Asked for early: it takes a trip to memory.
            let mut next = 0;
            if lane == 0 {
                next = atomic::fetch_add(p.item_counters(), odd as usize, 1, Ordering::Relaxed, Scope::Device);
            }
            let [words, pages] = super::list::load(p, number);
            let item = Item::new(words);
            let mut page = pages[0];
            unroll!(I < 4; {
                if lane == I as u32 {
                    page = pages[I];
                }
            });
            let mut form = Form::RAW;
            if page & PACKED != 0 {
                page &= !PACKED;
                form = Form(field!(phase, forms: Global<u32>).load(page as usize));
            }
            let work = Work { p, phase, item, attend, group, page, form, key_norm, memory };
            let keys = work.load(0, 0);
            work.make_queries(norm);
            if item.rows * group.value <= PAIRS / 2 {
                work.finish::<1>(&work.find::<1>(keys));
            } else {
                work.finish::<2>(&work.find::<2>(keys));
            }
            number = WARPS * grid + warp::shuffle_idx(next, 0);
        }
        // Activations come where queries were.
        bulk::fence_proxy_async();
    }
}

const _: () = assert!(
    WARPS * WARP_BYTES <= Memory::<64>::ROW_RING.barriers
        && WARPS * WARP_BYTES <= Memory::<96>::ROW_RING.barriers
        && WARPS * WARP_BYTES <= Memory::<128>::ROW_RING.barriers
);
