//! Attention of the rows of many sequences: the bits of [`attention`](crate::attention), a warp for each part of the work.
//!
//! An *item* is a tile of rows of one sequence, a key-value head and a split of 256 keys: what a block of [`attend`](crate::attention::attend) does. Here one warp does it, 32 keys
//! after another, with keys and values loaded straight into the registers that the tensor core takes them from:
//!
//! ```text
//! keys of 32 tokens    ──► scores ──► weights ─┐
//! the next 32, under way all this time         ├─► merged with what there was
//! their values         ────────────────────────┘
//!
//! Sᵀ[32 keys, 8 pairs] = K · Qᵀ     keys are rows: few pairs of a row and a head are columns, of which an instruction has eight
//! Oᵀ[128, 8 pairs]     = Vᵀ · Pᵀ
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
use cuda_std::{Global, GlobalMut, bf16, bulk, math, mma, thread, warp};

use super::{Memory, Phase, WARPS, WideStep};
use crate::attention::{
    Divisor, LOG2_E, Merge, PAIRS, SCALE, SPLIT, TILE_KEYS, Tile, WARP_KEYS, combine_by_warp, key_of, weight,
};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::packed::{
    Form, Loaded, dimension_of, load_keys, load_packed, load_values, unpack, value_fragments, value_key,
};
use crate::qkv::{Factors, pack_value};

const ROW_BYTES: u32 = HEAD_DIM * 2;
/// Elements of a page's keys for a head, or of its values.
const KIND: usize = (PAGE_TOKENS * HEAD_DIM) as usize;
/// Beside an item's page, its [index](crate::kv::Cache::block_index): whether it may be [packed](WideStep::packed).
pub const PACKED: u32 = 1 << 31;
/// A warp's part of shared memory: an item's queries, a key or a value of the step, the item, its turns, and its pages.
pub const WARP_BYTES: u32 = PAGES + SPLIT_PAGES as u32 * 16;
const NEWEST: u32 = PAIRS * ROW_BYTES;
const ITEM: u32 = NEWEST + ROW_BYTES;
/// How many turns there are, and how many with keys that all pairs see.
const TURNS: u32 = ITEM + 16;
/// Of each page where it is, and how it lies.
const PAGES: u32 = TURNS + 16;
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
}

/// A warp at work on an item. What it knows of it is in shared memory, from where it is asked again: registers are for keys and values, and what is spilled has a load's counter with them, so that
/// whoever waits for it waits for memory.
struct Work<'a> {
    p: &'a WideStep,
    phase: Global<Phase>,
    /// The warp's part of shared memory.
    memory: Shared<u8>,
}

/// Where a page's keys for a head are, and how they and its values lie.
#[derive(Clone, Copy)]
struct Page {
    keys: Global<bf16>,
    form: Form,
}

/// Queries that a warp makes at a time.
const TOGETHER: usize = 4;

impl Work<'_> {
    /// The item.
    #[inline(always)]
    unsafe fn item(&self) -> Item {
        Item::new(unsafe { self.memory.at(ITEM as usize).load16(0) })
    }

    /// Takes up an item, whose words and pages these are.
    #[inline(always)]
    unsafe fn begin(&self, words: [u32; 4], blocks: [u32; SPLIT_PAGES]) {
        unsafe {
            let lane = thread::fresh(thread::lane_id());
            let pages = field!(self.phase, pages: GlobalMut<bf16>).read();
            unroll!(I < 4; {
                if lane == I as u32 {
                    let block = blocks[I] & !PACKED;
                    let form = if blocks[I] & PACKED != 0 {
                        field!(self.phase, forms: Global<u32>).load(block as usize)
                    } else {
                        Form::RAW.0
                    };
                    let keys = pages.at(block as usize * 2 * KIND).addr();
                    let words = [keys as u32, (keys >> 32) as u32, form, 0];
                    self.memory.at(PAGES as usize + I * 16).store16(0, words);
                }
            });
            if lane == 0 {
                self.memory.at(ITEM as usize).store16(0, words);
            }
            warp::sync_warp();
            let item = self.item();
            let turns = self.seen(item.first_row + item.rows - 1).div_ceil(WARP_KEYS);
            let seen_by_all = self.seen(item.first_row) / WARP_KEYS;
            if lane == 0 {
                self.memory.at(TURNS as usize).cast().store(0, [turns, seen_by_all]);
            }
            warp::sync_warp();
        }
    }

    /// Query heads that share a key-value head.
    #[inline(always)]
    fn group(&self) -> Divisor {
        Divisor::new(self.p.work.group())
    }

    /// Makes the item's queries from what the projection left.
    #[inline(always)]
    unsafe fn make_queries(&self) {
        unsafe {
            let (p, item, group) = (self.p, self.item(), self.p.work.group());
            let heads = p.work.heads();
            let weight = Factors::load_weight(field!(self.phase, norm: Global<bf16>));
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
                            let to = self.memory.at(((row * group + number) * ROW_BYTES) as usize);
                            heads.vector(0, x[I], scales[I], || factors).store_shared(to.cast(), 0);
                        }
                    });
                    first += TOGETHER as u32;
                }
                row += 1;
            }
            // Scores are made for eight at a time.
            let mut pair = item.rows * group;
            while !pair.is_multiple_of(8) {
                let lane = thread::fresh(thread::lane_id());
                self.memory.at((pair * ROW_BYTES) as usize).cast().store(lane as usize, [0u32; 2]);
                pair += 1;
            }
            warp::sync_warp();
        }
    }

    /// Where the step's key or value is put.
    #[inline(always)]
    unsafe fn newest(&self) -> Shared<bf16> {
        unsafe { self.memory.at(NEWEST as usize).cast() }
    }

    /// How many turns there are, and how many with keys that all pairs see.
    #[inline(always)]
    unsafe fn turns(&self) -> [u32; 2] {
        unsafe { self.memory.at(TURNS as usize).cast().load(0) }
    }

    /// The page of a turn's keys, or any beyond the split.
    #[inline(always)]
    unsafe fn page(&self, turn: u32) -> Page {
        let number = turn * WARP_KEYS / PAGE_TOKENS % SPLIT_PAGES as u32;
        let [low, high, form, _] = unsafe { self.memory.at((PAGES + number * 16) as usize).load16(0) };
        Page { keys: Global::from_raw(u64::from(high) << 32 | u64::from(low)), form: Form(form) }
    }

    /// Puts the step's keys or values that are among those of a turn in the place of what was there.
    #[inline(always)]
    unsafe fn put_newest(&self, kind: usize, turn: u32, loaded: &mut Loaded) {
        unsafe {
            let (p, item) = (self.p, self.item());
            if !item.is_fresh {
                return;
            }
            let first_key = item.split * SPLIT + turn * WARP_KEYS;
            let heads = p.work.heads();
            let (mut row, mut position) = (item.first_row + item.rows - 1, item.last);
            while first_key <= position {
                if position < first_key + WARP_KEYS {
                    let lane = thread::fresh(thread::lane_id());
                    if kind == 0 {
                        let head = heads.q_heads + item.kv_head;
                        let x = heads.load(row, head);
                        let [scale] = heads.scales(&[x]);
                        let weight = Factors::load_weight(field!(self.phase, key_norm: Global<bf16>));
                        let factors = || Factors::of(weight, p.work.cos, p.work.sin, position);
                        heads.vector(head, x, scale, factors).store_shared(self.newest(), 0);
                    } else {
                        let words = pack_value(heads.load_value(row, item.kv_head, lane * 4));
                        self.newest().cast().store(lane as usize, words);
                    }
                    warp::sync_warp();
                    let (key, newest) = (position - first_key, self.newest());
                    unroll!(J < 4; {
                        if kind == 0 {
                            if TILE_KEYS[J] + key_of(lane / 4) == key {
                                unroll!(I < 4; {
                                    loaded[I][J] = newest.load16((lane % 4 * 8) as usize + 32 * I);
                                });
                            }
                        } else {
                            unroll!(K < 4; {
                                if value_key(J, K, lane) == key {
                                    loaded[J][K] = newest.load16((lane / 4 * 8) as usize + K % 2 * 64);
                                }
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

    /// The tile.
    #[inline(always)]
    fn tile(&self) -> Tile {
        let Item { kv_head, split, first_row, rows, .. } = unsafe { self.item() };
        let (group, lane) = (self.group(), thread::fresh(thread::lane_id()));
        Tile { kv_head, split, group, first_row, pairs: rows * group.value, lane, warp_id: 0 }
    }

    /// How many of the split's keys each of the lane's pairs attends to; all for a pair that there is not.
    #[inline(always)]
    unsafe fn limits(&self, first_pair: u32) -> [u32; 2] {
        let tile = self.tile();
        [0, 1].map(|c| {
            let pair = first_pair + pair_of(tile.lane) + c;
            if pair < tile.pairs { unsafe { self.seen(tile.row(pair)) } } else { SPLIT }
        })
    }

    /// How many of the split's keys a row attends to.
    #[inline(always)]
    unsafe fn seen(&self, row: u32) -> u32 {
        unsafe {
            let item = self.item();
            (item.position(self.p, row) + 1).saturating_sub(item.split * SPLIT).min(SPLIT)
        }
    }

    /// The lane's part of the queries of eight pairs, as B of the tensor core.
    #[inline(always)]
    unsafe fn queries(&self, first_pair: u32) -> [[u32; 4]; 4] {
        let lane = thread::fresh(thread::lane_id());
        unsafe {
            let queries = self.memory.at(((first_pair + lane / 4) * ROW_BYTES + lane % 4 * 16) as usize);
            [0, 1, 2, 3].map(|i: usize| queries.load16(64 * i))
        }
    }

    /// What the warp finds of the split for eight pairs.
    #[inline(always)]
    unsafe fn find(&self, first_pair: u32) -> Running {
        unsafe {
            let mut page = self.page(0);
            let (mut keys, mut values) = (page.load(0, 0), page.load(1, 0));
            if first_pair == 0 {
                self.make_queries();
            }
            let mut queries = self.queries(first_pair);
            let [mut turns, mut seen_by_all] = self.turns();
            let mut running = Running::NOTHING;
            let mut turn = 0;
            loop {
                let (form, more, masked) = (page.form, turn + 1 < turns, turn >= seen_by_all);
                self.put_newest(0, turn, &mut keys);
                let scores = score(&queries, &keys, form);
                let weights = if masked {
                    weigh::<true>(scores, turn * WARP_KEYS, self.limits(first_pair))
                } else {
                    weigh::<false>(scores, 0, [SPLIT; 2])
                };
                // Behind what goes by shared memory and other lanes, which would wait in line behind loads.
                let next = self.page(turn + 1);
                if more {
                    keys = next.load(0, turn + 1);
                }
                self.put_newest(1, turn, &mut values);
                if form.is_packed() {
                    running.add(&weights, |i| unpack(&values, i, form.base(1)));
                } else {
                    running.add(&weights, |i| value_fragments(&values, i));
                }
                if !more {
                    return running;
                }
                // A warp's loads have few counters, and what waits for keys waits for values as well: so these come once a turn, and not between.
                (queries, page) = (self.queries(first_pair), next);
                [turns, seen_by_all] = self.turns();
                values = next.load(1, turn + 1);
                turn += 1;
            }
        }
    }

    /// Puts what was found where it belongs: results of rows that end in the first split, and a part of others.
    #[inline(always)]
    unsafe fn put(&self, first_pair: u32, running: &Running) {
        unsafe {
            let (p, a, item) = (self.p, &self.p.work.attend(), self.item());
            let tile = self.tile();
            unroll!(C < 2; {
                let pair = first_pair + pair_of(tile.lane) + C as u32;
                if pair < tile.pairs {
                    let (position, place) = (item.position(p, tile.row(pair)), tile.place(a, pair));
                    unroll!(D < 8; {
                        let sum = [running.o[D][C], running.o[D][2 + C]];
                        let d = dimension_of(D as u32 / 2, D as u32 % 2 * 2, tile.lane / 4);
                        if position >= SPLIT {
                            if position / SPLIT >= item.split {
                                a.keep(item.split, place, d, sum, [running.top[C], running.norm[C]]);
                            }
                        } else if item.split == 0 {
                            let norm = running.norm[C];
                            a.put::<true>(place, d, math::pack_bf16(sum[0] / norm, sum[1] / norm));
                        }
                    });
                }
            });
        }
    }

    /// Counts what was put of one split of several, and combines the splits of pairs of which all are there.
    #[inline(always)]
    unsafe fn finish(&self) {
        unsafe {
            let (p, a, item) = (self.p, &self.p.work.attend(), self.item());
            let tile = self.tile();
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

impl Page {
    /// Begins to load a lane's part of the keys (0) or values (1) of a turn.
    #[inline(always)]
    unsafe fn load(&self, kind: usize, turn: u32) -> Loaded {
        unsafe {
            let page = self.keys.at(kind * KIND);
            let (token, lane) = (turn * WARP_KEYS % PAGE_TOKENS, thread::fresh(thread::lane_id()));
            if self.form.is_packed() {
                load_packed(page.cast(), token, lane)
            } else if kind == 0 {
                load_keys(page, token, lane)
            } else {
                load_values(page, token, lane)
            }
        }
    }
}

/// The first of the two pairs of eight whose scores and sums a lane has.
#[inline(always)]
const fn pair_of(lane: u32) -> u32 {
    2 * (lane % 4)
}

/// Scores of 32 keys as the tensor core leaves them: of 16 keys, and of the other 16, that of column `lane / 4` of one tile of eight for two pairs, and that of the next tile.
type Scores = [[f32; 4]; 2];

/// Scores of 32 keys.
#[inline(always)]
fn score(queries: &[[u32; 4]; 4], keys: &Loaded, form: Form) -> Scores {
    let mut scores = [[0f32; 4]; 2];
    let mut add = |query: [u32; 4], k: [[u32; 4]; 4]| {
        unroll!(M < 2; {
            let (low, high) = (k[2 * M], k[2 * M + 1]);
            let a = [low[0], high[0], low[1], high[1]];
            let s = mma::m16n8k16_bf16(scores[M], a, [query[0], query[1]]);
            let a = [low[2], high[2], low[3], high[3]];
            scores[M] = mma::m16n8k16_bf16(s, a, [query[2], query[3]]);
        });
    };
    if form.is_packed() {
        unroll!(I < 4; {
            add(queries[I], unpack(keys, I, form.base(0)));
        });
    } else {
        unroll!(I < 4; {
            add(queries[I], keys[I]);
        });
    }
    scores
}

/// What the values of 32 keys are weighed by.
struct Weights {
    /// `exp2(score − top)` as B of the tensor core: a word for each tile of eight keys.
    words: [u32; 4],
    top: [f32; 2],
    norm: [f32; 2],
}

/// What pairs weigh keys with these scores by: the bits of [`attention`](crate::attention)'s. `MASKED`: some pair does not see all of the keys, which are those from the split's `first` on.
#[inline(always)]
fn weigh<const MASKED: bool>(mut scores: Scores, first: u32, limits: [u32; 2]) -> Weights {
    let key = first + key_of(thread::fresh(thread::lane_id()) / 4);
    let (mut top, mut norm) = ([f32::NEG_INFINITY; 2], [0.0; 2]);
    unroll!(P < 2; {
        unroll!(J < 4; {
            let score = &mut scores[J / 2][J % 2 * 2 + P];
            *score *= SCALE * LOG2_E;
            if MASKED && key + 8 * J as u32 >= limits[P] {
                *score = f32::NEG_INFINITY;
            }
            top[P] = math::max(top[P], *score);
        });
    });
    unroll!(M < 3; {
        top = top.map(|top| math::max(top, warp::shuffle_xor(top, 4 << M)));
    });
    unroll!(P < 2; {
        unroll!(J < 4; {
            let score = &mut scores[J / 2][J % 2 * 2 + P];
            *score = if MASKED { weight(*score, top[P]) } else { math::exp2(*score - top[P]) };
            norm[P] += *score;
        });
    });
    let mut words = [0; 4];
    unroll!(J < 4; {
        let score = |p: usize| scores[J / 2][J % 2 * 2 + p];
        words[J] = mma::transpose(math::pack_bf16(score(0), score(1)));
    });
    unroll!(M < 3; {
        norm = norm.map(|norm| norm + warp::shuffle_xor(norm, 4 << M));
    });
    Weights { words, top, norm }
}

/// What a warp found of a split so far, for eight pairs.
#[derive(Clone, Copy)]
struct Running {
    /// Weighted sums of values: of 16 dimensions each, those of column `lane / 4` of one of two eights of values' fragments for two pairs, and of the other.
    o: [[f32; 4]; 8],
    top: [f32; 2],
    norm: [f32; 2],
}

impl Running {
    /// Of no keys.
    const NOTHING: Self = Self { o: [[0.0; 4]; 8], top: [f32::NEG_INFINITY; 2], norm: [0.0; 2] };

    /// Merges the values of 32 more keys, so weighed. `values(i)` gives the fragments of four eights of dimensions.
    #[inline(always)]
    fn add(&mut self, weights: &Weights, values: impl Fn(usize) -> [[u32; 4]; 4]) {
        let merges = [0, 1].map(|p| Merge::new(self.top[p], weights.top[p]));
        self.top = [0, 1].map(|p| math::max(self.top[p], weights.top[p]));
        self.norm = [0, 1].map(|p: usize| merges[p].add(self.norm[p], weights.norm[p]));
        unroll!(I < 4; {
            let (values, b) = (values(I), weights.words);
            unroll!(H < 2; {
                let (v, w) = (values[2 * H], values[2 * H + 1]);
                let o = mma::m16n8k16_bf16([0.0; 4], [v[0], w[0], v[1], w[1]], [b[0], b[1]]);
                let o = mma::m16n8k16_bf16(o, [v[2], w[2], v[3], w[3]], [b[2], b[3]]);
                let sums = &mut self.o[2 * I + H];
                unroll!(E < 4; {
                    sums[E] = merges[E % 2].add(sums[E], o[E]);
                });
            });
        });
    }
}

/// The consumers' part of a phase: a warp takes one item after another.
#[inline(always)]
pub unsafe fn attend<const ROWS: u32>(p: &WideStep, phase: Global<Phase>, odd: u32) {
    unsafe {
        let warp_id = thread::fresh(thread::warp_id());
        let work = Work { p, phase, memory: shared::dynamic(warp_id * WARP_BYTES) };
        let (block, grid) = (thread::fresh(thread::block_idx_x()), thread::fresh(thread::grid_dim_x()));
        if thread::fresh(thread::thread_idx_x()) == 0 && block == 0 {
            // For the attention to come, which begins when all have met.
            p.item_counters().store(1 - odd as usize, 0);
        }
        let count = super::list::count(p);
        let mut number = warp_id * grid + block;
        while number < count {
            let [words, blocks] = super::list::load(p, number);
            // Asked for early: it takes a trip to memory.
            let mut next = 0;
            if thread::fresh(thread::lane_id()) == 0 {
                next = atomic::fetch_add(p.item_counters(), odd as usize, 1, Ordering::Relaxed, Scope::Device);
            }
            work.begin(words, blocks);
            // Eight at a time: of more pairs keys and values are loaded again.
            let mut pair = 0;
            while pair < work.item().rows * p.work.group() {
                work.put(pair, &work.find(pair));
                warp::sync_warp();
                pair += 8;
            }
            work.finish();
            warp::sync_warp();
            number = WARPS * thread::fresh(thread::grid_dim_x()) + warp::shuffle_idx(next, 0);
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
