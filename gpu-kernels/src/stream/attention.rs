//! Attention within the step: keys and values come through the ring, and this step's own are put into their pages there.

use cuda_std::{Global, bf16, bulk, math, shared, thread, warp};

use super::consumer::{Consumer, sync};
use super::ring::{Items, Ring};
use super::{Mark, SCRATCH, WARPS};
use crate::attention::{Attend, Found, PAIRS, SPLIT, Tile, attend_keys, combine_head, reduce};
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::qkv::Heads;

/// Tiles of pairs whose queries are in shared memory at a time.
const TILES: u32 = 4;
/// Bytes of a query.
const QUERY: u32 = HEAD_DIM * 2;
/// Bytes of shared memory for queries.
pub const QUERY_BYTES: u32 = TILES * PAIRS * QUERY;

impl Consumer<'_> {
    /// Attention over the grid, from the projections to the blocks' next meeting.
    #[inline(always)]
    pub unsafe fn attention(&mut self, layer: u32) {
        unsafe {
            let p = self.p;
            let lane = (thread::lane_id(), thread::warp_id());
            let word = |i: usize| Global::<bf16>::from_raw(p.layer_word(layer, i));
            let cache = p.cache(layer);
            let attend = Attend {
                rows: p.rows,
                q: Global::from_raw(0),
                cache,
                sums: p.sums,
                scales: p.scales,
                out: p.attended,
                splits: p.splits,
                q_heads: p.q_heads,
                scale: 1.0 / math::sqrt(HEAD_DIM as f32),
            };
            let heads = Heads {
                qkv: p.qkv.read(),
                q_norm: word(1),
                k_norm: word(2),
                cos: p.cos,
                sin: p.sin,
                q_heads: p.q_heads,
                kv_heads: p.kv_heads,
                eps: p.eps,
            };
            let items = Items::new(p, self.last);
            // The head whose queries are in shared memory.
            let mut ready = u32::MAX;
            let mut item = items.first;
            while item < items.end {
                let (kv_head, split) = items.at(item);
                self.split(&attend, &heads, kv_head, split, items.pages(split), &mut ready);
                item += 1;
            }
            self.mark(Mark::Attended);
            self.meet();
            if items.splits > 1 {
                core::hint::assert_unchecked(p.q_heads > 0);
                let mut item = thread::block_idx_x();
                while item < self.count * p.q_heads {
                    combine_head(&attend, item / p.q_heads, item % p.q_heads, lane, SCRATCH);
                    item += thread::grid_dim_x();
                }
                self.mark(Mark::Combined);
                self.meet();
            }
        }
    }

    /// One key-value head's split: every row's query heads against up to four pages.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    unsafe fn split(&mut self, attend: &Attend, heads: &Heads, kv_head: u32, split: u32, pages: u32, ready: &mut u32) {
        unsafe {
            let p = self.p;
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
            core::hint::assert_unchecked(p.kv_heads > 0);
            let group = p.q_heads / p.kv_heads;
            core::hint::assert_unchecked(group > 0 && group <= PAIRS);
            let tile_rows = Attend::tile_rows(group);
            let tiles = Attend::tiles(self.count, group);
            let ring = self.ring;
            let first_position = self.first_position();
            // Rows whose own keys belong to this split.
            let from = (split * SPLIT).max(first_position) - first_position;
            let end = ((split + 1) * SPLIT).min(self.last + 1).saturating_sub(first_position);
            if from < end {
                self.put_in(heads, &attend.cache, kv_head, pages, from..end, warp_id);
            }
            let mut tile = 0;
            while tile < tiles {
                let fresh = tile.is_multiple_of(TILES) && (*ready != kv_head || tiles > TILES);
                if fresh {
                    self.prepare(
                        heads,
                        kv_head,
                        group,
                        tile * tile_rows,
                        (TILES * tile_rows).min(self.count - tile * tile_rows),
                        warp_id,
                    );
                    *ready = kv_head;
                }
                if fresh || (tile == 0 && from < end) {
                    sync();
                }
                let first_row = tile * tile_rows;
                let rows = tile_rows.min(self.count - first_row);
                let here = Tile { kv_head, split, group, first_row, pairs: rows * group, lane, warp_id };
                let page = here.first_key() % SPLIT / PAGE_TOKENS;
                let mut found = Found::NOTHING;
                if page < pages && here.first_key() < first_position + first_row + rows {
                    found = self.attend(attend, &here, tile % TILES, ring.ahead(page), ring.ahead(pages + page));
                }
                tile += 1;
                if tile == tiles {
                    // Every warp has seen every chunk arrive before it gives it back: a lane a chunk. The copy engine writes here next.
                    bulk::fence_proxy_async();
                    warp::sync_warp();
                    if lane < 2 * pages {
                        let chunk = ring.ahead(lane);
                        chunk.wait_full();
                        chunk.empty().arrive();
                    }
                    self.ring = ring.ahead(2 * pages);
                }
                reduce::<false>(attend, &here, &found, SCRATCH + QUERY_BYTES, 1);
            }
        }
    }

    /// A warp's keys, from the ring.
    #[inline(always)]
    unsafe fn attend(&self, attend: &Attend, tile: &Tile, slot: u32, keys: Ring, values: Ring) -> Found {
        unsafe {
            keys.wait_full();
            values.wait_full();
            let (g, t) = (tile.lane / 4, (tile.lane % 4) as usize);
            let first = tile.first_key() % PAGE_TOKENS;
            let queries = shared::dynamic::<bf16>(SCRATCH + slot * PAIRS * QUERY);
            let keys = shared::dynamic::<bf16>(keys.offset() + first * QUERY);
            let values = shared::dynamic::<bf16>(values.offset()).at(first as usize);
            let query = |i: usize, j: usize| {
                let pair = g + 8 * i as u32;
                if pair < tile.pairs { queries.load16((pair * HEAD_DIM) as usize + t * 8 + 32 * j) } else { [0; 4] }
            };
            let key = |k: u32, j: usize| keys.load16((k * HEAD_DIM) as usize + t * 8 + 32 * j);
            let value = |d: u32| {
                // Two loads under way are enough; more would crowd out sums.
                if (d / 8).is_multiple_of(2) {
                    warp::sync_warp();
                }
                values.load16((d * PAGE_TOKENS) as usize + 8 * t)
            };
            attend_keys(attend, tile, query, key, || {}, value)
        }
    }

    /// Normalises and rotates the queries of `rows` rows from `first_row` on that share a key-value head. A warp a query.
    #[inline(always)]
    unsafe fn prepare(&self, heads: &Heads, kv_head: u32, group: u32, first_row: u32, rows: u32, warp_id: u32) {
        unsafe {
            let tile_rows = Attend::tile_rows(group);
            core::hint::assert_unchecked(group > 0 && tile_rows > 0);
            let mut i = warp_id;
            while i < rows * group {
                let (row, head) = (i / group, i % group);
                let vector =
                    heads.vector(first_row + row, kv_head * group + head, self.first_position() + first_row + row);
                let pair = row / tile_rows * PAIRS + row % tile_rows * group + head;
                vector.store_shared(shared::dynamic(SCRATCH + pair * QUERY));
                i += WARPS;
            }
        }
    }

    /// Puts the keys and values of this step's `rows` into their pages, in the ring and in the cache. A warp a vector.
    #[inline(always)]
    unsafe fn put_in(
        &self,
        heads: &Heads,
        cache: &Cache,
        kv_head: u32,
        pages: u32,
        rows: core::ops::Range<u32>,
        warp_id: u32,
    ) {
        unsafe {
            let p = self.p;
            let sequence = p.rows.sequences.load(0);
            let mut i = 2 * rows.start + warp_id;
            while i < 2 * rows.end {
                let (row, is_value) = (i / 2, i % 2 == 1);
                let position = self.first_position() + row;
                let (page, token) = (position % SPLIT / PAGE_TOKENS, position % PAGE_TOKENS);
                let head = p.q_heads + kv_head + if is_value { p.kv_heads } else { 0 };
                let vector = heads.vector(row, head, position);
                let chunk = self.ring.ahead(page + if is_value { pages } else { 0 });
                // The copy must not come after.
                chunk.wait_full();
                if is_value {
                    vector.store_value_shared(shared::dynamic(chunk.offset() + token * 2));
                    vector.store_value(cache.value(sequence, position, kv_head));
                } else {
                    vector.store_shared(shared::dynamic(chunk.offset() + token * QUERY));
                    vector.store(cache.key(sequence, position, kv_head));
                }
                i += WARPS;
            }
        }
    }
}
