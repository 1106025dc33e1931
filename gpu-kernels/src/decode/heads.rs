//! Makes the queries for attention within the step, and the keys and values that this step adds.
//!
//! While there are fewer combinations of key-value head and split than CTAs, the tiles of one go to several CTAs. Each
//! of these CTAs makes the keys and values that this step adds, for itself. They are written to the cache later, when
//! no CTA's copies read there any more. In a step of one row only one CTA needs them, and it also writes them to the
//! cache.
//!
//! # Safety
//! As for all [consumers](super::consumer). A `row` is below the step's rows, and a layer below the number of layers.
//! All that the projection of queries, keys and values leaves was waited for: at a grid barrier, or in a step of one
//! row word by word. Pages of the cache have room for every row's slot, and each row's keys and values there are
//! written by one warp of the grid.

use core::ops::Range;

use cuda_std::{GlobalMut, bf16, device, shared, thread};

use super::attention::{LAYOUT, QUERY, QUERY_BYTES, TILES};
use super::consumer::Consumer;
use super::producer::Share;
use super::{SCRATCH, SEQUENCES, TREE, WARPS, sequences};
use crate::attention::{ALL_PAIRS, Divisor, PAIRS, SPLIT};
use crate::exchange::{Word, WordKind, Words};
use crate::kv::{HEAD_DIM, PAGE_TOKENS, place};
use crate::qkv::{Factors, pack_value};
use crate::ring::Ring;
use crate::step::MAX_DECODE_ROWS;

/// The most pieces of a step's values that a lane takes. A piece is four dimensions.
const VALUES: usize = (MAX_DECODE_ROWS * HEAD_DIM / 4 / (WARPS * 32)) as usize;
/// Where [`stage`](Consumer::stage) puts what queries and keys are made with: each row's 64 cosines and 64 sines, then
/// the weights of the queries' and of the keys' norm. Later softmax weights or sums lie there.
const STAGE: u32 = SCRATCH + QUERY_BYTES;
const STAGE_NORMS: u32 = STAGE + MAX_DECODE_ROWS * HEAD_DIM * 4;

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// Loads into shared memory what queries and keys are made with: cosines, sines, norm weights. All see them after
    /// the next barrier. The last warps take the first rows, since the first warp has other work.
    ///
    /// # Safety
    /// All consumers call it. Nobody uses the memory behind queries before they have synchronised.
    #[device]
    pub unsafe fn stage(&self, layer: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let mut row = WARPS - 1 - warp_id;
            if row == 1 {
                let weights = p.head_norms(layer).load16_nc(lane as usize * 8);
                shared::dynamic::<bf16>(STAGE_NORMS).store16(lane as usize * 8, weights);
            }
            while row < self.count {
                let from = if lane < 16 { p.work.cos } else { p.work.sin };
                let angles = from.at(self.position(row) as usize * (HEAD_DIM / 2) as usize);
                let words = angles.load16_nc(lane as usize % 16 * 4);
                shared::dynamic::<f32>(STAGE).store16((row * HEAD_DIM + lane * 4) as usize, words);
                row += WARPS;
            }
        }
    }

    /// A lane's factors for a query, or a key, of `row`, out of what [`stage`](Self::stage) brought.
    ///
    /// # Safety
    /// [`stage`](Self::stage) has brought them, the consumers have synchronised since, and nothing else came there.
    #[device]
    unsafe fn factors_of(&self, row: u32, is_key: bool) -> Factors {
        // SAFETY: the caller's word.
        unsafe {
            let lane = thread::opaque(thread::lane_id()) as usize;
            let weights = shared::dynamic(STAGE_NORMS + if is_key { QUERY } else { 0 });
            let angles = shared::dynamic(STAGE + row * (HEAD_DIM * 4));
            Factors {
                weight: [weights.load(lane), weights.load(lane + 32)],
                cos: angles.load(lane),
                sin: angles.load(lane + 32),
            }
        }
    }

    /// Makes the queries of `tiles`, and puts the keys and values of this step's `own` rows into their pages in the
    /// ring. If `ONE`, it also puts these into the cache, which nobody copies from any more by then. A warp makes whole
    /// queries and keys, `N` at a time. With `WGMMA` there is one tile: it has all queries, as rows for `wgmma`.
    ///
    /// # Safety
    /// All consumers call it, for the share that comes next in the ring, and synchronise before queries, keys or values
    /// are read. `tiles` are at most as many as there are places for queries, and nobody reads what is in these places
    /// any more. `own` are rows whose keys are in the share's split. [`stage`](Self::stage) came before, unless `ONE`.
    #[device]
    pub unsafe fn vectors<const N: usize, const ONE: bool, const WGMMA: bool>(
        &self,
        layer: u32,
        share: &Share,
        (group, tile_rows): (Divisor, u32),
        tiles: Range<u32>,
        own: Range<u32>,
        warp_id: u32,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            let heads = p.work.heads();
            let words = self.put_out(WordKind::Heads, 4 * layer);
            let keys = own.end - own.start;
            let most = if WGMMA { ALL_PAIRS } else { PAIRS };
            let pairs = tiles.len() as u32 * most;
            let pairs = if ONE { group.value.min(pairs) } else { pairs };
            let all = keys + pairs;
            let end = self.end_of(share);
            // The keys come first, then each tile's pairs. Of each: row, head, and whether it exists.
            let vector_of = |i: u32| {
                if i < keys {
                    (own.start + i, p.work.q_heads + share.kv_head, true)
                } else {
                    let (tile, pair) = (tiles.start + (i - keys) / most, (i - keys) % most);
                    let (of_tile, head) = group.divide(pair);
                    let row = share.first_row + (tile - share.first_tile) * tile_rows + of_tile;
                    (row, share.kv_head * group.value + head, of_tile < tile_rows && row < end && i < all)
                }
            };
            // A lane takes four dimensions of a row's value.
            let value = |i: usize| {
                if ONE {
                    let last = warp_id + 1 == WARPS && i == 0;
                    return (if last { own.start } else { own.end }, thread::lane_id() * 4);
                }
                (own.start + i as u32 * WARPS + warp_id, thread::lane_id() * 4)
            };
            let value_words = |d: u32| {
                let first = (p.work.q_heads + p.work.kv_heads + share.kv_head) * HEAD_DIM + d;
                move |i: usize| first + i as u32
            };
            let mut values = [[0f32; 4]; VALUES];
            let mut value_asked = [[words.nothing(); 4]; VALUES];
            // A short ring takes the values later.
            let valued = if SHORT { own.start } else { own.end };
            unroll!(I < VALUES of 2; {
                let (row, d) = value(I);
                if row < valued {
                    if ONE {
                        value_asked[I] = ask(words, value_words(d));
                    } else {
                        values[I] = heads.load_value(row, share.kv_head, d);
                    }
                }
            });
            // The addresses in the cache are found while the words come.
            let (mut key_to, mut value_to) = (GlobalMut::default(), GlobalMut::default());
            if ONE && value(0).0 < own.end {
                value_to = p.cache(layer).value(p.work.rows.sequences.load(0), self.first_position(), share.kv_head);
            }
            let mut first = warp_id;
            while first < all {
                let mut x = [[[0f32; 2]; 2]; N];
                let mut asked = [[words.nothing(); 4]; N];
                unroll!(I < N of 8; {
                    let (row, head, valid) = vector_of(first + I as u32 * WARPS);
                    if valid {
                        if ONE {
                            asked[I] = ask(words, head_words(head));
                        } else {
                            x[I] = heads.load(row, head);
                        }
                    }
                });
                let mut factors = [Factors::default(); N];
                if ONE {
                    let position = self.first_position();
                    unroll!(I < N of 8; {
                        let is_key = first + (I as u32 * WARPS) < keys;
                        let norm = p.head_norms(layer).at(if is_key { HEAD_DIM } else { 0 } as usize);
                        factors[I] = Factors::load(norm, p.work.cos, p.work.sin, position);
                    });
                    if first < keys {
                        key_to = p.cache(layer).key(p.work.rows.sequences.load(0), position, share.kv_head);
                    }
                    unroll!(I < N of 8; {
                        let (_, head, _) = vector_of(first + I as u32 * WARPS);
                        words.settle(&mut asked[I], head_words(head));
                        let [x0, x1, x2, x3] = asked[I].map(|word| f32::from_bits(word.bits()));
                        x[I] = [[x0, x1], [x2, x3]];
                    });
                }
                let scales = heads.scales(&x);
                unroll!(I < N of 8; {
                    let i = first + I as u32 * WARPS;
                    let (row, head, valid) = vector_of(i);
                    if valid {
                        let factors = || if ONE { factors[I] } else { self.factors_of(row, i < keys) };
                        let vector = heads.vector(head, x[I], scales[I], factors);
                        if WGMMA && i >= keys {
                            // Queries lie as the rows of a page do.
                            vector.store_in_page(LAYOUT, SCRATCH, i - keys);
                        } else if i >= keys {
                            let slot = (tiles.start * PAIRS + i - keys) % (TILES * PAIRS);
                            let tile = shared::dynamic(SCRATCH + slot / PAIRS * PAIRS * QUERY);
                            vector.store_query(tile, slot % PAIRS);
                        } else {
                            let (chunk, token) = self.own_place(row, 0);
                            vector.store_in_page(LAYOUT, chunk.offset(), token);
                            if ONE {
                                vector.store(key_to, token);
                            }
                        }
                    }
                });
                first += N as u32 * WARPS;
            }
            unroll!(I < VALUES of 2; {
                let (row, d) = value(I);
                if ONE && I == 0 {
                    words.settle(&mut value_asked[I], value_words(d));
                    values[I] = value_asked[I].map(|word| f32::from_bits(word.bits()));
                }
                if row < valued {
                    let (chunk, token) = self.own_place(row, share.pages);
                    let words = pack_value(values[I]);
                    shared::dynamic(chunk.offset() + LAYOUT.chunk(token, d / 8) + d % 8 * 2).store(0, words);
                    if ONE {
                        value_to.cast().store(place(token, d) as usize / 4, words);
                    }
                }
            });
        }
    }

    /// Puts the values of this step's `own` rows into their pages, which are the ring's next. All see them after the
    /// next barrier.
    ///
    /// # Safety
    /// All consumers call it, and synchronise before values are read. The share's keys were released, and `own` are
    /// rows whose values are in the share's split.
    #[device]
    pub unsafe fn put_values(&self, kv_head: u32, own: Range<u32>, warp_id: u32) {
        let (heads, d) = (self.p.work.heads(), thread::opaque(thread::lane_id()) * 4);
        let mut row = own.start + warp_id;
        while row < own.end {
            // SAFETY: the caller's word.
            unsafe {
                let (chunk, token) = self.own_place(row, 0);
                let words = pack_value(heads.load_value(row, kv_head, d));
                shared::dynamic(chunk.offset() + LAYOUT.chunk(token, d / 8) + d % 8 * 2).store(0, words);
            }
            row += WARPS;
        }
    }

    /// Where in the ring the key or value of this step's `row` goes: its page, and its token there. The pages of its
    /// kind begin `skip` stages ahead. It waits for the page, since the page's copy must not come afterwards.
    ///
    /// # Safety
    /// The row's slot is in the split whose pages come next in the ring.
    #[device]
    unsafe fn own_place(&self, row: u32, skip: u32) -> (Ring, u32) {
        // SAFETY: the caller's word.
        let position = unsafe { self.slot(row) };
        let chunk = self.ring.ahead(position % SPLIT / PAGE_TOKENS + skip);
        // SAFETY: the caller's word.
        unsafe { chunk.wait_full() };
        (chunk, position % PAGE_TOKENS)
    }

    /// A row's position.
    #[device]
    unsafe fn position(&self, row: u32) -> u32 {
        // SAFETY: the caller's word.
        unsafe { if ROWS == TREE { self.depth_position(row) } else { self.slot(row) } }
    }

    /// The sequence of a row.
    #[device]
    pub unsafe fn sequence(&self, row: u32) -> u32 {
        // SAFETY: the caller's word.
        unsafe { self.p.work.rows.sequences.load(if ROWS == SEQUENCES { row as usize } else { 0 }) }
    }

    /// Whether no later row is of the same sequence.
    #[device]
    pub unsafe fn is_last_of_sequence(&self, row: u32) -> bool {
        // SAFETY: the caller's word.
        row + 1 == if ROWS == SEQUENCES { unsafe { sequences::end(row) } } else { self.count }
    }

    /// The slot for a row's keys and values: its position, or in a tree the first row's position plus the row's number.
    #[device]
    pub unsafe fn slot(&self, row: u32) -> u32 {
        self.slots()(row)
    }

    /// The slot of any row, as a function.
    #[device]
    pub fn slots(&self) -> impl Fn(u32) -> u32 {
        let first = if ROWS == SEQUENCES { 0 } else { self.first_position() };
        // SAFETY: positions were left there before the roles parted, and the caller asks for rows of the step alone.
        move |row| if ROWS == SEQUENCES { unsafe { sequences::position(row) } } else { first + row }
    }

    /// Puts the keys and values of a step of several rows into the cache, after attention. Each warp of the grid takes
    /// a vector at a time; last warps come first.
    ///
    /// # Safety
    /// All consumers of every CTA call it, after a grid barrier that follows the layer's attention, and before they
    /// arrive at the grid barrier after which the projections of the next layer are written.
    #[device]
    pub unsafe fn append(&self, layer: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            let (heads, cache) = (p.work.heads(), p.cache(layer));
            let each = 2 * p.work.kv_heads;
            cuda_std::assume(each > 0);
            let grid = thread::grid_dim_x();
            let mut i = thread::block_idx_x() + grid * (WARPS - 1 - thread::warp_id());
            while i < self.count * each {
                let (row, kv_head) = (i / each, i % each);
                let head = p.work.q_heads + kv_head;
                let (slot, position) = (self.slot(row), self.position(row));
                let sequence = self.sequence(row);
                let to: GlobalMut<bf16> = if kv_head >= p.work.kv_heads {
                    cache.value(sequence, slot, kv_head - p.work.kv_heads)
                } else {
                    cache.key(sequence, slot, kv_head)
                };
                let k_norm = p.head_norms(layer).at(HEAD_DIM as usize);
                let x = heads.load(row, head);
                let [scale] = heads.scales(&[x]);
                let vector = heads.vector(head, x, scale, || Factors::load(k_norm, p.work.cos, p.work.sin, position));
                vector.store(to, slot);
                i += grid * WARPS;
            }
        }
    }
}

/// The places of a lane's words of `head`, counted over all three kinds, in the order of `Heads::load`.
#[device]
fn head_words(head: u32) -> impl Fn(usize) -> u32 {
    let first = head * HEAD_DIM + thread::opaque(thread::lane_id()) * 2;
    move |i| first + i as u32 % 2 + i as u32 / 2 * (HEAD_DIM / 2)
}

/// Asks for four words.
///
/// # Safety
/// There are the four words.
#[device]
unsafe fn ask(words: Words, place: impl Fn(usize) -> u32) -> [Word; 4] {
    let mut asked = [words.nothing(); 4];
    unroll!(I < 4; {
        // SAFETY: the caller's word.
        asked[I] = unsafe { words.ask(place(I)) };
    });
    asked
}
