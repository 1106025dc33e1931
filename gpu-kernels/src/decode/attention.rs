//! Attention within the decode kernel. Keys and values come through the ring, and consumers put this step's own into
//! their pages there ([`heads`](super::heads)).
//!
//! # Safety
//! As for all [consumers](super::consumer): all lanes of the eight warps call what is unsafe here, in the same order,
//! since they synchronise. Shares and tiles are the step's. The ring's next stages have the pages of the current share,
//! keys first; the producer knows the share from the same [`Units`]. A warp reads a page once it has waited for it, or
//! has synchronised with a warp that has. Every warp releases every page once. In scratch memory the queries come
//! first. Behind them lies what queries and keys are made with, and later the tiles' weights or sums: either is written
//! only when all have synchronised since they read the other.

use core::ops::Range;

use cuda_std::{bulk, device, shared, thread, warp};

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
use super::WGMMA;
use super::consumer::{Consumer, sync};
use super::producer::{Share, Units, are_few};
use super::tree::PairRows;
use super::{Mark, SCRATCH, SEQUENCES, THREADS, TREE, WARPS, sequences};
use crate::activations::element_at;
use crate::attention::{
    Attend, DimSums, Divisor, PAIRS, QUARTER, SPLIT, SoftmaxWeights, Tile, TileWeights, WARP_KEYS, WarpAttention,
    add_values, eight_values, keys_from, reduce_few, score_tiles, values_from, weigh,
};
use crate::exchange::WordKind;
use crate::kv::{HEAD_DIM, PAGE_TOKENS, PageLayout};
use crate::ring::Ring;

/// Tiles of pairs whose queries fit in shared memory at a time.
pub const TILES: u32 = 4;
/// Bytes of a query, a key or a value.
pub const QUERY: u32 = HEAD_DIM * 2;
/// Bytes of shared memory for queries.
pub const QUERY_BYTES: u32 = TILES * PAIRS * QUERY;
/// How pages lie in the ring's stages.
pub const LAYOUT: PageLayout = PageLayout::HALVES;
const _: () = assert!(2 * TileWeights::BYTES <= Attend::SHARED_BYTES);

/// What a CTA has prepared in shared memory for attention.
struct Prepared {
    /// The key-value head whose queries are there.
    kv_head: u32,
    /// The tiles whose queries are there.
    tiles: Range<u32>,
    /// Whether what queries and keys are made with is there.
    staged: bool,
    /// Which of two places the next tile's weights go to.
    place: u32,
    /// How many of the two places nobody reads any more.
    free: u32,
    /// How many shares [`attend_all`](Consumer::attend_all) has taken.
    turn: u32,
}

impl Prepared {
    /// Places for the weights of `N` tiles, and whether a barrier must come before they are written.
    #[device]
    fn places<const N: usize>(&mut self) -> ([TileWeights; N], bool) {
        let (place, barrier) = (self.place, self.free < N as u32);
        // All warps synchronise once they have written these weights. By then they have read all earlier weights, so
        // every other place is free.
        (self.place, self.free) = (place + N as u32, 2 - N as u32);
        let mut places = [TileWeights::at(0); N];
        unroll!(T < N of 2; {
            let place = (place + T as u32) % 2;
            places[T] = TileWeights::at(SCRATCH + QUERY_BYTES + place * TileWeights::BYTES);
        });
        (places, barrier)
    }
}

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// What a CTA can do for attention of several rows before the projections are there: it loads its units, and stages
    /// what queries and keys are made with.
    ///
    /// # Safety
    /// Nobody uses scratch memory behind the queries any more.
    #[device]
    pub unsafe fn before_attention(&self, layer: u32) -> Units {
        // SAFETY: the caller's word.
        unsafe {
            let units = Units::load::<ROWS>(self.place);
            if !units.is_empty() {
                self.stage(layer);
            }
            units
        }
    }

    /// The CTA's part of attention, from the projections to the next grid barrier, which it leaves to the caller. The
    /// splits are combined by then.
    ///
    /// # Safety
    /// All consumers of every CTA call it, with the CTA's units for the layer. Unless `ONE`,
    /// [`before_attention`](Self::before_attention) comes before, and a grid barrier has shown the projections. Scratch
    /// memory is free, but for what `before_attention` left.
    #[device]
    pub unsafe fn attention<const VECTORS: usize, const ONE: bool, const ATTENTION: u8>(
        &mut self,
        layer: u32,
        mut units: Units,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let attend = self.p.work.attend();
            let mut prepared = Prepared { kv_head: 0, tiles: 0..0, staged: true, place: 0, free: 2, turn: 0 };
            let assigned = (units.group, units.tile_rows);
            let are_whole = ROWS == SEQUENCES && units.are_whole();
            if ONE && units.is_empty() {
                // Waits here, as in `pass_by`: polling for later words would slow down the other CTAs.
                self.put_out(WordKind::Heads, 4 * layer).expect();
            }
            while let Some(share) = units.take::<ROWS, ATTENTION, SHORT>(self.p.work.kv_heads) {
                #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
                if ATTENTION == WGMMA {
                    self.share_of_all::<VECTORS>(&attend, layer, units.group, &share, &mut prepared);
                    continue;
                }
                self.share::<VECTORS, ONE>(&attend, layer, assigned, &share, units.is_empty(), &mut prepared);
                if are_whole {
                    self.combine_share(&attend, &share, units.group.value);
                }
            }
            self.mark(Mark::Attended);
            if Units::last() >= SPLIT && !are_whole {
                if ONE {
                    self.combine_of_one(layer);
                } else {
                    self.grid_barrier();
                    self.combine_of_some(&attend);
                }
                self.mark(Mark::Combined);
            }
        }
    }

    /// One beyond the last row of a share's sequence.
    #[device]
    pub unsafe fn end_of(&self, share: &Share) -> u32 {
        // SAFETY: the caller's word: the share's rows are there.
        if ROWS == SEQUENCES { unsafe { sequences::end(share.first_row) } } else { self.count }
    }

    /// Attention of a share's tiles of pairs against up to four pages of a key-value head.
    ///
    /// # Safety
    /// All consumers call it, for the units' next share. `prepared` is what the shares before it in this layer left.
    #[device]
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
            let &Share { kv_head, split, pages, ref tiles, .. } = share;
            let mut tile = tiles.start;
            // With a short ring: rows whose values go into the ring once the keys have left it.
            let mut later = 0..0;
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
                    // This step's keys in this split, up to the last row of the share's tiles.
                    let own = if tile == tiles.start {
                        let own = self.own_rows(share);
                        let reached = share.first_row + (tiles.end - share.first_tile) * tile_rows;
                        own.start..own.end.min(reached).max(own.start)
                    } else {
                        0..0
                    };
                    if fresh.start < fresh.end || own.start < own.end {
                        if !ONE && !prepared.staged {
                            // Other warps may still read weights there.
                            sync();
                            self.stage(layer);
                            sync();
                        }
                        if SHORT {
                            later = own.clone();
                        }
                        self.vectors::<VECTORS, ONE, false>(layer, share, (group, tile_rows), fresh, own, warp_id);
                        sync();
                    }
                }
                let tile_at = |tile: u32| {
                    let first_row = share.first_row + (tile - share.first_tile) * tile_rows;
                    let pairs = tile_rows.min(self.end_of(share) - first_row) * group.value;
                    Tile { kv_head, split, group, first_row, pairs, lane, warp_id }
                };
                let (here, first) = (tile_at(tile), tile);
                if if ONE { here.pairs <= QUARTER } else { are_few::<ROWS>(tile_rows, group) } {
                    tile += 1;
                    let is_end = tile == tiles.end;
                    self.attend_few::<ONE>(attend, layer, &here, (first % TILES, pages, later.clone()), is_end);
                    if !is_end || !is_last {
                        sync();
                    }
                } else {
                    // Only a share's first tiles wait for the ring's stages.
                    let wait = (first == tiles.start).then(|| later.clone());
                    if !ONE && first + 1 < tiles.end {
                        tile += 2;
                        let both = [here, tile_at(first + 1)];
                        self.attend_many::<ONE, 2>(attend, layer, &both, (first, pages, wait), prepared.places());
                    } else {
                        tile += 1;
                        self.attend_many::<ONE, 1>(attend, layer, &[here], (first, pages, wait), prepared.places());
                    }
                    if tile == tiles.end {
                        self.release(self.values_after(pages) + pages, lane);
                    }
                }
                prepared.staged = false;
            }
        }
    }

    /// The step's rows of a share's sequence whose keys are in the share's split.
    #[device]
    unsafe fn own_rows(&self, share: &Share) -> Range<u32> {
        // SAFETY: the caller's word.
        let (first, count) = unsafe { (self.slot(share.first_row), self.end_of(share) - share.first_row) };
        let end = (share.split * SPLIT + SPLIT).min(first + count).saturating_sub(first);
        let start = (share.split * SPLIT).max(first) - first;
        share.first_row + start..share.first_row + end.max(start)
    }

    /// Attention of all of the step's pairs, by `wgmma`, against up to four pages of a key-value head.
    ///
    /// # Safety
    /// As for [`share`](Self::share), of a step that is for attention by `wgmma`.
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    #[device]
    unsafe fn share_of_all<const VECTORS: usize>(
        &mut self,
        attend: &Attend,
        layer: u32,
        group: Divisor,
        share: &Share,
        prepared: &mut Prepared,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let own = self.own_rows(share);
            let is_fresh = prepared.kv_head != share.kv_head || prepared.tiles.is_empty();
            if is_fresh || own.start < own.end {
                if !prepared.staged {
                    // Other warps may still read what is there.
                    sync();
                    self.stage(layer);
                    sync();
                }
                let warp_id = thread::opaque(thread::warp_id());
                let tiles = if is_fresh { 0..1 } else { 0..0 };
                self.vectors::<VECTORS, false, true>(layer, share, (group, self.count), tiles, own, warp_id);
                bulk::fence_proxy_async();
                sync();
            }
            (prepared.kv_head, prepared.tiles, prepared.staged) = (share.kv_head, 0..1, false);
            self.attend_all(attend, share, group, prepared.turn);
            prepared.turn += 1;
        }
    }

    /// Attention of a tile of few pairs, against the keys and values in the ring's next stages, `pages` stages each. At
    /// the `end` of a share it releases the stages: with several rows before the results are written, with one row
    /// after that, since other CTAs wait for the results.
    ///
    /// # Safety
    /// All consumers call it. The tile's queries are at `slot`, the step's keys are in their pages, and all have
    /// synchronised since. The values of `own` rows come later. The tile has at most [`QUARTER`] pairs.
    #[device]
    unsafe fn attend_few<const ONE: bool>(
        &mut self,
        attend: &Attend,
        layer: u32,
        tile: &Tile,
        (slot, pages, own): (u32, u32, Range<u32>),
        end: bool,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let mut found = WarpAttention::NOTHING;
            if SHORT {
                let (page, mut weights) = (self.page_of(tile, pages), [SoftmaxWeights::NOTHING]);
                if let Some(page) = page {
                    let keys = self.ring.ahead(page);
                    keys.wait_full();
                    weights = self.weigh(attend, &[*tile], slot, keys);
                }
                self.release_keys(tile, pages, own);
                sync();
                if let Some(page) = page {
                    let values = self.ring.ahead(page);
                    values.wait_full();
                    found = add_values(&weights[0], values_of(tile, values));
                }
            } else if let Some(page) = self.page_of(tile, pages) {
                let (keys, values) = (self.ring.ahead(page), self.ring.ahead(pages + page));
                keys.wait_full();
                values.wait_full();
                let values = values_of(tile, values);
                let [weights] = self.weigh(attend, &[*tile], slot, keys);
                found = add_values(&weights, values);
            }
            if !ONE && end {
                self.release(self.values_after(pages) + pages, tile.lane);
            }
            let put = |pair: usize, d: u32, word: u32| self.put_attended::<ONE>(attend, layer, pair, d, word);
            let position = self.slots();
            let keep = |_, pair, d, sum, scale| {
                self.keep_part::<ONE>(attend, layer, (pair, tile.split), (d, sum, scale));
            };
            reduce_few(attend, tile, &found, position, put, keep, (SCRATCH + QUERY_BYTES, 1));
            if ONE && end {
                self.release(2 * pages, tile.lane);
            }
        }
    }

    /// Attention of `N` tiles of more pairs, one or two, from tile `first` on, against the same stages as in
    /// [`attend_few`](Self::attend_few). It releases only the keys of a short ring. If there is a `wait`, it waits for
    /// the stages, and puts the values of the rows in `wait` into a short ring. The tiles' weights go to `places`; with
    /// `barrier`, the consumers synchronise before that.
    ///
    /// # Safety
    /// As for [`attend_few`](Self::attend_few), of tiles from `first` on, of any number of pairs. Without `wait` the
    /// pages were waited for. `places` are free, behind a barrier if the flag beside says so.
    #[device]
    unsafe fn attend_many<const ONE: bool, const N: usize>(
        &mut self,
        attend: &Attend,
        layer: u32,
        tiles: &[Tile; N],
        (first, pages, wait): (u32, u32, Option<Range<u32>>),
        (places, barrier): ([TileWeights; N], bool),
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let tile = &tiles[0];
            // The first warp whose keys may differ from row to row. In a chain there is none.
            let apart = if ROWS == TREE && !ONE { self.apart(tile.split) } else { WARPS };
            // Waits even if no row here reaches this warp's keys: rows of later tiles may, and these do not wait again.
            let page = tile.first_key() % SPLIT / PAGE_TOKENS;
            if wait.is_some() && page < pages {
                self.ring.ahead(page).wait_full();
            }
            let mut weights = [SoftmaxWeights::NOTHING; N];
            // The last tile's rows reach furthest.
            if let Some(page) = self.page_of(&tiles[N - 1], pages) {
                let keys = self.ring.ahead(page);
                if ROWS == TREE && !ONE && tile.warp_id >= apart {
                    unroll!(T < N of 2; {
                        let queries = queries_of(tile.lane, (first + T as u32) % TILES);
                        weights[T] = self.weigh_paths(attend, &tiles[T], queries, (keys, pages));
                    });
                } else {
                    weights = self.weigh(attend, tiles, first, keys);
                }
            }
            if barrier {
                sync();
            }
            unroll!(T < N of 2; {
                places[T].leave(&tiles[T], &weights[T]);
            });
            let skip = self.values_after(pages);
            if let Some(own) = wait {
                if SHORT {
                    self.release_keys(tile, pages, own);
                }
                // One lane waits for each page, since each look at a barrier takes its time.
                if tile.lane < pages {
                    self.ring.ahead(skip + tile.lane).wait_full();
                }
                warp::sync_warp();
            }
            sync();
            let warps = pages * (PAGE_TOKENS / WARP_KEYS);
            let alike = apart.min(warps) & !1;
            let mut sums = DimSums::<N>::new(places, tile.lane, tile.warp_id);
            sums.add(alike, |warp, n| {
                let values = self.ring.ahead(skip + warp * WARP_KEYS / PAGE_TOKENS).offset();
                eight_values(LAYOUT, values, warp * WARP_KEYS % PAGE_TOKENS + tile.lane)(n)
            });
            if ROWS == TREE && !ONE {
                let first = |warp: u32| tile.split * SPLIT + warp * WARP_KEYS;
                sums.add_apart(alike..warps, |warp, i, weights, n| {
                    let rows = PairRows::of(&tiles[i], 0);
                    self.add_paths(&rows, (first(warp), skip, tile.lane), weights, n)
                });
            }
            let put = |pair: usize, d: u32, word: u32| self.put_attended::<ONE>(attend, layer, pair, d, word);
            let keep = |_, pair, d, sum, scale| {
                self.keep_part::<ONE>(attend, layer, (pair, tile.split), (d, sum, scale));
            };
            sums.put(attend, tiles, self.slots(), put, keep);
        }
    }

    /// How many stages ahead in the ring the values are. They come behind the `pages` stages of keys, which a [short
    /// ring](super::short) has released already.
    #[device]
    fn values_after(&self, pages: u32) -> u32 {
        if SHORT { 0 } else { pages }
    }

    /// Releases `pages` stages of keys, so that values may come there, and puts the values of the step's `own` rows
    /// into the pages that come.
    ///
    /// # Safety
    /// All consumers call it, and no longer read the share's keys. `own` are rows whose values are in the share's
    /// split.
    #[device]
    unsafe fn release_keys(&mut self, tile: &Tile, pages: u32, own: Range<u32>) {
        // SAFETY: the caller's word.
        unsafe {
            self.release(pages, tile.lane);
            self.put_values(tile.kv_head, own, tile.warp_id);
        }
    }

    /// The page of the split that has this warp's keys, if a row of the tile reaches them.
    #[device]
    unsafe fn page_of(&self, tile: &Tile, pages: u32) -> Option<u32> {
        let rows = tile.group.divide(tile.pairs - 1).0 + 1;
        let page = tile.first_key() % SPLIT / PAGE_TOKENS;
        // SAFETY: the caller's word.
        (page < pages && tile.first_key() <= unsafe { self.slot(tile.first_row + rows - 1) }).then_some(page)
    }

    /// Puts two dimensions of a pair's result where the output projection reads it.
    ///
    /// # Safety
    /// `pair` is one of the step's, `d` even and below [`HEAD_DIM`]; no other lane puts these.
    #[device]
    unsafe fn put_attended<const ONE: bool>(&self, attend: &Attend, layer: u32, pair: usize, d: u32, word: u32) {
        // SAFETY: the caller's word.
        unsafe {
            if ONE {
                let attended = self.put_out(WordKind::Attended, 4 * layer);
                attended.put((pair as u32 * HEAD_DIM + d) / 2, word);
            } else {
                let (pair, heads) = (pair as u32, attend.q_heads);
                cuda_std::assume(heads > 0);
                self.put_pair(pair / heads, pair % heads, d, word);
            }
        }
    }

    /// [`put_attended`](Self::put_attended) for a row and a head, in a step of several rows.
    ///
    /// # Safety
    /// As for [`put_attended`](Self::put_attended).
    #[device]
    pub(super) unsafe fn put_pair(&self, row: u32, head: u32, d: u32, word: u32) {
        let at = element_at(row, head * HEAD_DIM + d);
        // SAFETY: the caller's word.
        unsafe { self.p.work.attended.cast().store(at / 2, word) }
    }

    /// Releases the ring's next `chunks` stages, which this warp has used, in any order. A lane releases each.
    ///
    /// # Safety
    /// All lanes of the warp call it, and read these chunks no more. They are the ring's next, at most 32.
    #[device]
    unsafe fn release(&mut self, chunks: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            // TMA writes here next.
            bulk::fence_proxy_async();
            warp::sync_warp();
            if lane < chunks {
                let chunk = self.ring.ahead(lane);
                // Every warp has seen every chunk arrive before it releases it.
                chunk.wait_full();
                chunk.empty().arrive();
            }
            self.ring = self.ring.ahead(chunks);
        }
    }

    /// [`release`](Self::release) of chunks that the warp knows to have arrived: it has waited for each, or has
    /// synchronised with a warp that did. Lanes have [fenced](bulk::fence_proxy_async) what they stored there, and what
    /// they read by ordinary loads.
    ///
    /// # Safety
    /// As for [`release`](Self::release), of such chunks.
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    #[device]
    pub(super) unsafe fn release_seen(&mut self, chunks: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            warp::sync_warp();
            // For lanes that do not arrive this may lie beyond the ring; it is not accessed then.
            self.ring.ahead(lane).empty().arrive_if(lane < chunks);
            self.ring = self.ring.ahead(chunks);
        }
    }

    /// The softmax weights of a warp's keys, which are in the ring, for the pairs of tiles from `first` on.
    ///
    /// # Safety
    /// All lanes of a warp call it. `keys` is the stage with the warp's keys, and was waited for; the tiles' queries
    /// are in place, and all have synchronised since.
    #[device]
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
            let first_key = keys.offset() + LAYOUT.row(tile.first_key() % PAGE_TOKENS);
            let keys = keys_from(LAYOUT, first_key, WARP_KEYS - 1, lane);
            let position = self.slots();
            let queries = |tile: usize, j: usize| queries_of(lane, (first + tile as u32) % TILES)(j);
            let scores = score_tiles::<N, 4>(queries, keys);
            let mut weights = [SoftmaxWeights::NOTHING; N];
            unroll!(T < N of 2; {
                weights[T] = weigh(attend, &tiles[T], &position, scores[T]);
            });
            weights
        }
    }
}

/// A lane's part of the values of a warp's keys, from a page of values that was loaded whole.
///
/// # Safety
/// The stage has the warp's values, and was waited for; nobody releases it before the last one was asked for.
#[device]
unsafe fn values_of(tile: &Tile, page: Ring) -> impl Fn(usize) -> [[u32; 4]; 4] {
    let first = LAYOUT.row(tile.first_key() % PAGE_TOKENS);
    // SAFETY: the caller's word.
    unsafe { values_from(LAYOUT, page.offset() + first, WARP_KEYS - 1, tile.lane) }
}

/// Clears all places for queries before any query is there, since [`queries_of`] reads whole tiles. `thread` is this
/// thread's number in the CTA.
///
/// # Safety
/// All threads of the CTA call it, before the CTA synchronises.
#[device]
pub unsafe fn clear_queries(thread: u32) {
    let mut at = thread * 16;
    while at < QUERY_BYTES {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic::<u32>(SCRATCH + at).store16(0, [0; 4]) };
        at += THREADS * 16;
    }
}

/// A lane's part of the queries of the tile at this `slot` in shared memory, as [`score_tiles`] takes them. Pairs that
/// the tile does not have may be anything: no other pair's results depend on them, and theirs are not used.
///
/// # Safety
/// `slot` is below [`TILES`]. The CTA has synchronised since all places were [cleared](clear_queries), and nobody
/// writes these meanwhile.
#[device]
pub unsafe fn queries_of(lane: u32, slot: u32) -> impl Fn(usize) -> [[u32; 4]; 2] {
    // SAFETY: the caller's word: there are so many slots.
    let queries = unsafe { shared::dynamic::<u32>(SCRATCH + slot * PAIRS * QUERY + lane * 16) };
    // SAFETY: the caller's word.
    move |j| [0, 1].map(|m| unsafe { queries.load16((2 * j + m) * 128) })
}
