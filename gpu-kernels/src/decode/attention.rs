//! Attention within the step: keys and values come through the ring, and this step's own are put into their pages
//! there.
//!
//! As long as there are fewer (key-value head, split) pairs than blocks, tiles of the same pair go to blocks of their
//! own: each then makes the keys and values that this step adds once more for itself. They reach the cache later, when
//! no block's copies read it any more. Of a step of one row a single block needs them, and it takes them there.

use core::ops::Range;

use cuda_std::{GlobalMut, bf16, bulk, shared, thread, warp};

use super::consumer::{Consumer, pair_with_next, sync};
use super::exchange::{Word, WordKind, Words};
use super::producer::{Share, Units};
use super::{Mark, SCRATCH, THREADS, WARPS, tree};
use crate::attention::{
    Attend, DimSums, Divisor, PAIRS, QUARTER, SPLIT, SoftmaxWeights, TILE_KEYS, Tile, TileWeights, WARP_KEYS,
    WarpAttention, add_values, combine_head, eight_values, key_of, reduce_few, score_tiles, value_of, values_from,
    weigh,
};
use crate::kv::{HEAD_DIM, PAGE_TOKENS, place};
use crate::qkv::{Factors, pack_value};
use crate::ring::Ring;
use crate::step::MAX_DECODE_ROWS;

/// Tiles of pairs whose queries are in shared memory at a time.
const TILES: u32 = 4;
/// Pieces of four dimensions that a lane takes of a step's values.
const VALUES: usize = (MAX_DECODE_ROWS * HEAD_DIM / 4 / (WARPS * 32)) as usize;
/// Bytes of a query, a key or a value.
pub const QUERY: u32 = HEAD_DIM * 2;
/// Bytes of shared memory for queries.
pub const QUERY_BYTES: u32 = TILES * PAIRS * QUERY;
const _: () = assert!(2 * TileWeights::BYTES <= Attend::SHARED_BYTES);
/// Until weights or sums meet there: each row's 64 cosines and 64 sines, then the weights of the queries' and of the
/// keys' norm.
const STAGE: u32 = SCRATCH + QUERY_BYTES;
const STAGE_NORMS: u32 = STAGE + MAX_DECODE_ROWS * HEAD_DIM * 4;

/// What a block has in shared memory for attention.
struct Prepared {
    /// Queries: of which key-value head,
    kv_head: u32,
    /// and of which tiles.
    tiles: Range<u32>,
    /// What queries and keys are made with.
    staged: bool,
    /// Where the next tile's weights go, of two places,
    place: u32,
    /// and how many of them nobody reads any more.
    free: u32,
}

impl Prepared {
    /// Places for the weights of so many tiles; a barrier may have to come before they are written.
    #[inline(always)]
    fn places<const N: usize>(&mut self) -> ([TileWeights; N], bool) {
        let (place, wait) = (self.place, self.free < N as u32);
        // The barrier behind a tile's weights is also behind what was read before.
        (self.place, self.free) = (place + N as u32, 2 - N as u32);
        let mut places = [TileWeights::at(0); N];
        unroll!(T < N of 2; {
            let place = (place + T as u32) % 2;
            places[T] = TileWeights::at(SCRATCH + QUERY_BYTES + place * TileWeights::BYTES);
        });
        (places, wait)
    }
}

impl<const TREE: bool> Consumer<'_, TREE> {
    /// What a block can do for attention of several rows before it knows the projections.
    #[inline(always)]
    pub unsafe fn before_attention(&self, layer: u32) -> Units {
        // SAFETY: the caller's word.
        unsafe {
            let units = Units::load();
            if !units.is_empty() {
                self.stage(layer);
            }
            units
        }
    }

    /// Attention over the grid, from the projections to before the blocks' next barrier.
    #[inline(always)]
    pub unsafe fn attention<const VECTORS: usize, const ONE: bool>(&mut self, layer: u32, mut units: Units) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            // Of one row no grid barrier tells that all have combined what a layer before left here; one tells that of
            // the layer before that.
            let first =
                if ONE { thread::opaque(layer) % 2 * thread::opaque(p.work.q_heads) * p.work.splits } else { 0 };
            let first = first as usize;
            let all = p.work.attend();
            let (sums, scales) = (all.sums.at(first * HEAD_DIM as usize), all.scales.at(first * 2));
            let attend = Attend { sums, scales, ..all };
            let mut prepared = Prepared { kv_head: 0, tiles: 0..0, staged: true, place: 0, free: 2 };
            let dealt = (units.group, units.tile_rows);
            if ONE && units.is_empty() {
                // As in a product that a block has no N-tile of.
                self.put_out(WordKind::Heads, 4 * layer).expect();
            }
            while let Some(share) = units.take::<TREE>() {
                self.share::<VECTORS, ONE>(&attend, layer, dealt, &share, units.is_empty(), &mut prepared);
            }
            self.mark(Mark::Attended);
            if Units::last() >= SPLIT {
                self.grid_barrier();
                cuda_std::assume(p.work.q_heads > 0);
                let lane = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
                let mut item = thread::block_idx_x();
                while item < self.count * p.work.q_heads {
                    let row = item / p.work.q_heads;
                    let put = |pair: usize, d: u32, x: bf16| {
                        if ONE {
                            let word = pair_with_next(x);
                            if d.is_multiple_of(2) {
                                self.put_out(WordKind::Attended, 4 * layer).put((pair as u32 * HEAD_DIM + d) / 2, word);
                            }
                        } else {
                            p.work.attended.store(pair * HEAD_DIM as usize + d as usize, x);
                        }
                    };
                    combine_head(&attend, row, item % p.work.q_heads, self.first_position() + row, lane, put, SCRATCH);
                    item += thread::grid_dim_x();
                }
                self.mark(Mark::Combined);
            }
        }
    }

    /// Tiles of pairs against up to four pages of a key-value head.
    #[inline(always)]
    unsafe fn share<const VECTORS: usize, const ONE: bool>(
        &mut self,
        attend: &Attend,
        layer: u32,
        (group, tile_rows): (Divisor, u32),
        share: &Share,
        is_last: bool,
        prepared: &mut Prepared,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let &Share { kv_head, split, pages, ref tiles } = share;
            let first_position = self.first_position();
            let mut tile = tiles.start;
            while tile < tiles.end {
                if (tile - tiles.start).is_multiple_of(TILES) {
                    let batch = tile..tiles.end.min(tile + TILES);
                    let fresh = if prepared.kv_head == kv_head
                        && prepared.tiles.start <= batch.start
                        && batch.end <= prepared.tiles.end
                    {
                        0..0
                    } else {
                        prepared.kv_head = kv_head;
                        prepared.tiles = batch.clone();
                        batch
                    };
                    // Of this step's keys those of this split, up to where the tiles' rows end.
                    let own = if tile == tiles.start {
                        let end = (split * SPLIT + SPLIT).min(Units::last() + 1).saturating_sub(first_position);
                        let start = (split * SPLIT).max(first_position) - first_position;
                        start..end.min(tiles.end * tile_rows).max(start)
                    } else {
                        0..0
                    };
                    if fresh.start < fresh.end || own.start < own.end {
                        if !ONE && !prepared.staged {
                            // Some may still read weights there.
                            sync();
                            self.stage(layer);
                            sync();
                        }
                        self.vectors::<VECTORS, ONE>(layer, share, (group, tile_rows), fresh, own, warp_id);
                        sync();
                    }
                }
                let tile_at = |tile: u32| {
                    let first_row = tile * tile_rows;
                    let pairs = tile_rows.min(self.count - first_row) * group.value;
                    Tile { kv_head, split, group, first_row, pairs, lane, warp_id }
                };
                let (here, first) = (tile_at(tile), tile);
                if if ONE { here.pairs <= QUARTER } else { !TREE && tile_rows * group.value <= QUARTER } {
                    tile += 1;
                    let is_end = tile == tiles.end;
                    self.attend_few::<ONE>(attend, layer, &here, (first % TILES, pages), is_end);
                    if !is_end || !is_last {
                        sync();
                    }
                } else {
                    // A share's first tiles wait for what the ring brings.
                    let wait = first == tiles.start;
                    if !ONE && first + 1 < tiles.end {
                        tile += 2;
                        let both = [here, tile_at(first + 1)];
                        self.attend_many::<ONE, 2>(attend, layer, &both, (first, pages, wait), prepared.places());
                    } else {
                        tile += 1;
                        self.attend_many::<ONE, 1>(attend, layer, &[here], (first, pages, wait), prepared.places());
                    }
                    if tile == tiles.end {
                        self.release(2 * pages, lane);
                    }
                }
                prepared.staged = false;
            }
        }
    }

    /// A tile of few pairs, against the keys and values in the ring's next stages, of so many `pages` each. They are
    /// given back at the `end` of a share: of several rows before the results are there, and of one row, for which
    /// others wait, afterwards.
    #[inline(always)]
    unsafe fn attend_few<const ONE: bool>(
        &mut self,
        attend: &Attend,
        layer: u32,
        tile: &Tile,
        (slot, pages): (u32, u32),
        end: bool,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let mut found = WarpAttention::NOTHING;
            if let Some(page) = self.page_of(tile, pages) {
                let (keys, values) = (self.ring.ahead(page), self.ring.ahead(pages + page));
                keys.wait_full();
                values.wait_full();
                // All of the page was loaded.
                let first = tile.first_key() % PAGE_TOKENS * QUERY;
                let values = values_from(values.offset() + first, WARP_KEYS - 1, tile.lane);
                let [weights] = self.weigh(attend, &[*tile], slot, keys);
                found = add_values(&weights, values);
            }
            if !ONE && end {
                self.release(2 * pages, tile.lane);
            }
            let put = |pair: usize, d: u32, word: u32| self.put_attended::<ONE>(attend, layer, pair, d, word);
            let position = |row| self.first_position() + row;
            let keep = |_, pair, d, sum, scale| attend.keep(tile.split, pair, d, sum, scale);
            reduce_few(attend, tile, &found, position, put, keep, (SCRATCH + QUERY_BYTES, 1));
            if ONE && end {
                self.release(2 * pages, tile.lane);
            }
        }
    }

    /// `N` tiles of more pairs, two at most, from `first` on, likewise; nothing is given back. `wait`: for the ring's
    /// stages. Their weights go to `places`, maybe behind a barrier.
    #[inline(always)]
    unsafe fn attend_many<const ONE: bool, const N: usize>(
        &self,
        attend: &Attend,
        layer: u32,
        tiles: &[Tile; N],
        (first, pages, wait): (u32, u32, bool),
        (places, barrier): ([TileWeights; N], bool),
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let tile = &tiles[0];
            let root = self.first_position();
            // The first warp whose keys rows may differ in: of a chain none does.
            let apart = if TREE && !ONE { (root + 1).saturating_sub(tile.split * SPLIT) / WARP_KEYS } else { WARPS };
            // Rows of later tiles may reach keys that these do not.
            let page = tile.first_key() % SPLIT / PAGE_TOKENS;
            if wait && page < pages {
                self.ring.ahead(page).wait_full();
            }
            let mut weights = [SoftmaxWeights::NOTHING; N];
            // The last tile's rows reach furthest.
            if let Some(page) = self.page_of(&tiles[N - 1], pages) {
                if TREE && !ONE && tile.warp_id >= apart {
                    unroll!(T < N of 2; {
                        weights[T] = self.weigh_paths(attend, &tiles[T], (first + T as u32) % TILES, pages);
                    });
                } else {
                    weights = self.weigh(attend, tiles, first, self.ring.ahead(page));
                }
            }
            if barrier {
                sync();
            }
            unroll!(T < N of 2; {
                places[T].leave(&tiles[T], &weights[T]);
            });
            if wait {
                // A lane a page: looking takes its time.
                if tile.lane < pages {
                    self.ring.ahead(pages + tile.lane).wait_full();
                }
                warp::sync_warp();
            }
            sync();
            let warps = pages * (PAGE_TOKENS / WARP_KEYS);
            let alike = apart.min(warps) & !1;
            let key = value_of(tile.lane);
            let mut sums = DimSums::<N>::new(places, tile.lane, tile.warp_id);
            sums.add(alike, |warp, n| {
                let values = self.ring.ahead(pages + warp * WARP_KEYS / PAGE_TOKENS).offset();
                eight_values(values + (warp * WARP_KEYS % PAGE_TOKENS + key) * QUERY, key)(n)
            });
            if TREE && !ONE {
                let first = |warp: u32| tile.split * SPLIT + warp * WARP_KEYS;
                sums.add_apart(alike..warps, |warp, i, weights, n| {
                    self.add_paths(&tiles[i], (first(warp), pages), weights, n)
                });
            }
            let put = |pair: usize, d: u32, word: u32| self.put_attended::<ONE>(attend, layer, pair, d, word);
            let keep = |_, pair, d, sum, scale| attend.keep(tile.split, pair, d, sum, scale);
            sums.put(attend, tiles, |row| root + row, put, keep);
        }
    }

    /// Which of the split's pages has a warp's keys, if a row of the tile reaches them.
    #[inline(always)]
    fn page_of(&self, tile: &Tile, pages: u32) -> Option<u32> {
        let rows = tile.group.divide(tile.pairs - 1).0 + 1;
        let page = tile.first_key() % SPLIT / PAGE_TOKENS;
        (page < pages && tile.first_key() < self.first_position() + tile.first_row + rows).then_some(page)
    }

    /// Puts two dimensions of a pair's result where the output projection reads it.
    #[inline(always)]
    unsafe fn put_attended<const ONE: bool>(&self, attend: &Attend, layer: u32, pair: usize, d: u32, word: u32) {
        // SAFETY: the caller's word.
        unsafe {
            if ONE {
                let attended = self.put_out(WordKind::Attended, 4 * layer);
                attended.put((pair as u32 * HEAD_DIM + d) / 2, word);
            } else {
                attend.put::<false>(pair, d, word);
            }
        }
    }

    /// Gives so many chunks back that this warp has used, in any order: a lane a chunk.
    #[inline(always)]
    unsafe fn release(&mut self, chunks: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            // Every warp has seen every chunk arrive before it gives it back. TMA writes here next.
            bulk::fence_proxy_async();
            warp::sync_warp();
            if lane < chunks {
                let chunk = self.ring.ahead(lane);
                chunk.wait_full();
                chunk.empty().arrive();
            }
            self.ring = self.ring.ahead(chunks);
        }
    }

    /// What a warp weighs its keys by, which are in the ring, of tiles from `first` on.
    #[inline(always)]
    unsafe fn weigh<const N: usize>(
        &self,
        attend: &Attend,
        tiles: &[Tile; N],
        first: u32,
        keys: Ring,
    ) -> [SoftmaxWeights; N] {
        // SAFETY: the caller's word.
        unsafe {
            let tile = &tiles[0];
            let lane = tile.lane;
            let (g, t) = (lane / 4, lane % 4);
            let keys = shared::dynamic::<bf16>(keys.offset() + tile.first_key() % PAGE_TOKENS * QUERY);
            let first_position = self.first_position();
            let position = |row: u32| first_position + row;
            let key = |k: u32, i: usize| keys.load16((k * HEAD_DIM + place(k, 8 * t + 32 * i as u32)) as usize);
            let keys = |i: usize| TILE_KEYS.map(|first| key(first + key_of(g), i));
            let queries = |tile: usize, j: usize| queries_of(lane, (first + tile as u32) % TILES)(j);
            let scores = score_tiles::<N>(queries, keys);
            let mut weights = [SoftmaxWeights::NOTHING; N];
            unroll!(T < N of 2; {
                weights[T] = weigh(attend, &tiles[T], position, scores[T]);
            });
            weights
        }
    }

    /// Brings what queries and keys are made with into shared memory; known to all after they next meet. The first warp
    /// has something else to do when rows are few.
    #[inline(always)]
    unsafe fn stage(&self, layer: u32) {
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

    /// What a lane needs of that for a query, or a key, of `row`.
    #[inline(always)]
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

    /// Makes the queries of `tiles`, and puts the keys and values of `own` rows of this step into their pages in the
    /// ring; with `ONE` also into the cache, which nobody copies from any more then. Of queries and keys a warp makes a
    /// vector, `N` under way at a time.
    #[inline(always)]
    unsafe fn vectors<const N: usize, const ONE: bool>(
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
            let pairs = if ONE { group.value.min(tiles.len() as u32 * PAIRS) } else { tiles.len() as u32 * PAIRS };
            let all = keys + pairs;
            // The keys, then each tile's pairs: row, head, and whether there is one.
            let vector_of = |i: u32| {
                if i < keys {
                    (own.start + i, p.work.q_heads + share.kv_head, true)
                } else {
                    let (tile, pair) = (tiles.start + (i - keys) / PAIRS, (i - keys) % PAIRS);
                    let (row, head) = group.divide(pair);
                    let valid = row < tile_rows && tile * tile_rows + row < self.count;
                    (tile * tile_rows + row, share.kv_head * group.value + head, valid && i < all)
                }
            };
            // Of values a lane takes four dimensions.
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
            unroll!(I < VALUES of 2; {
                let (row, d) = value(I);
                if row < own.end {
                    if ONE {
                        value_asked[I] = ask(words, value_words(d));
                    } else {
                        values[I] = heads.load_value(row, share.kv_head, d);
                    }
                }
            });
            // Where in the cache they go is found while they are waited for.
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
                        if i >= keys {
                            let slot = (tiles.start * PAIRS + i - keys) % (TILES * PAIRS);
                            let tile = shared::dynamic(SCRATCH + slot / PAIRS * PAIRS * QUERY);
                            vector.store_query(tile, slot % PAIRS);
                        } else {
                            let (chunk, token) = self.own_place(row, 0);
                            vector.store_shared(shared::dynamic(chunk.offset() + token * QUERY), token);
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
                if row < own.end {
                    let (chunk, token) = self.own_place(row, share.pages);
                    let words = pack_value(values[I]);
                    let at = place(token, d) as usize / 4;
                    shared::dynamic::<bf16>(chunk.offset() + token * QUERY).cast().store(at, words);
                    if ONE {
                        value_to.cast().store(at, words);
                    }
                }
            });
        }
    }

    /// Where in the ring this step's `row` goes: in which page, whose pages of this kind begin `skip` chunks further,
    /// and as which token. The page is there: its copy must not come after.
    #[inline(always)]
    unsafe fn own_place(&self, row: u32, skip: u32) -> (Ring, u32) {
        let position = self.first_position() + row;
        let chunk = self.ring.ahead(position % SPLIT / PAGE_TOKENS + skip);
        // SAFETY: the caller's word.
        unsafe { chunk.wait_full() };
        (chunk, position % PAGE_TOKENS)
    }

    /// Where a row stands: its keys and values are put where they are the row's number behind the first.
    #[inline(always)]
    unsafe fn position(&self, row: u32) -> u32 {
        // SAFETY: the caller's word.
        self.first_position() + if TREE { unsafe { tree::path(row) }.depth() } else { row }
    }

    /// Puts the keys and values of a step of several rows into the cache, after attention: a warp of the grid a vector,
    /// last warps first.
    #[inline(always)]
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
                let (slot, position) = (self.first_position() + row, self.position(row));
                let sequence = p.work.rows.sequences.load(0);
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

/// Makes all places for queries something that can be read, before there are any: [`queries_of`] reads whole tiles.
/// `thread` of all of the block's.
#[inline(always)]
pub unsafe fn clear_queries(thread: u32) {
    let mut at = thread * 16;
    while at < QUERY_BYTES {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic::<u32>(SCRATCH + at).store16(0, [0; 4]) };
        at += THREADS * 16;
    }
}

/// A lane's parts of the queries of the tile at this `slot` in shared memory, as [`score_tiles`] wants them. Of pairs
/// that the tile has not they are anything: such rows meet no other, and count for nothing.
#[inline(always)]
pub unsafe fn queries_of(lane: u32, slot: u32) -> impl Fn(usize) -> [[u32; 4]; 2] {
    // SAFETY: the caller's, in both: there are so many slots.
    let queries = unsafe { shared::dynamic::<u32>(SCRATCH + slot * PAIRS * QUERY + lane * 16) };
    // SAFETY: the caller's word.
    move |j| [0, 1].map(|m| unsafe { queries.load16((2 * j + m) * 128) })
}

/// A lane's words of head `head` of all three kinds: as [`Heads::load`] has them.
#[inline(always)]
fn head_words(head: u32) -> impl Fn(usize) -> u32 {
    let first = head * HEAD_DIM + thread::opaque(thread::lane_id()) * 2;
    move |i| first + i as u32 % 2 + i as u32 / 2 * (HEAD_DIM / 2)
}

/// Asks for four words.
#[inline(always)]
unsafe fn ask(words: Words, place: impl Fn(usize) -> u32) -> [Word; 4] {
    let mut asked = [words.nothing(); 4];
    unroll!(I < 4; {
        // SAFETY: the caller's word.
        asked[I] = unsafe { words.ask(place(I)) };
    });
    asked
}
