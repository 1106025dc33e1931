//! Attention of a step whose rows are a [tree](crate::tree).
//!
//! Of keys that were there before the step every row meets the same. Of a tile that reaches further, a warp takes the
//! rows one after another, each with the keys of its own path in the columns of their positions.

use cuda_std::{bf16, shared, thread};

use super::attention::QUERY;
use super::consumer::Consumer;
use super::{DecodeStep, PATHS, SCRATCH};
use crate::attention::{
    Attend, PAIRS, SPLIT, TILE_KEYS, Tile, WarpAttention, add_values_each, key_of, score_keys, values_at, weigh,
};
use crate::kv::{HEAD_DIM, PAGE_TOKENS, place};
use crate::ring::Ring;
use crate::tree::Path;

/// Brings the rows' paths into shared memory, by the lanes of a warp.
#[inline(always)]
pub unsafe fn bring(p: &DecodeStep, count: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let row = thread::lane_id();
        if row < count {
            shared::dynamic::<u64>(PATHS).store(row as usize, p.work.rows.path(row).word());
        }
    }
}

/// The way to a row.
#[inline(always)]
pub unsafe fn path(row: u32) -> Path {
    // SAFETY: written before the roles parted.
    Path::from_word(unsafe { shared::dynamic::<u64>(PATHS).load(row as usize) })
}

/// The slot that the key of `position` lies in for a row of this path, where the root stands at `root`.
#[inline(always)]
fn slot(path: Path, root: u32, position: u32) -> u32 {
    let depth = position.wrapping_sub(root);
    // Keys beyond the row are masked.
    if depth <= path.depth() { root + path.row_at(depth) } else { position }
}

impl<const TREE: bool> Consumer<'_, TREE> {
    /// A warp's keys, from the ring, whose next `pages` stages have the pages of keys of the split, and as many after
    /// them its values.
    #[inline(always)]
    pub unsafe fn attend_paths(&self, attend: &Attend, tile: &Tile, queries: u32, pages: u32) -> WarpAttention {
        // SAFETY: the caller's word.
        unsafe {
            let root = self.first_position();
            let mut page = 0;
            while page < 2 * pages {
                self.ring.ahead(page).wait_full();
                page += 1;
            }
            let (g, t) = (tile.lane / 4, tile.lane % 4);
            let rows = tile.group.divide(tile.pairs - 1).0 + 1;
            let rows_of_lane = [tile.group.divide(g).0, tile.group.divide(g + 8).0];
            let queries = shared::dynamic::<bf16>(SCRATCH + queries * PAIRS * QUERY);
            let query = |i: usize, j: usize| {
                let pair = g + 8 * i as u32;
                let from = pair * HEAD_DIM + 8 * t + 32 * j as u32;
                if pair < tile.pairs { queries.load16(from as usize) } else { [0; 4] }
            };

            let mut scores = [[0f32; 4]; 4];
            let mut row = 0;
            while row < rows {
                let path = path(tile.first_row + row);
                let keys = TILE_KEYS.map(|first| {
                    let slot = slot(path, root, tile.first_key() + first + key_of(g));
                    (slot, shared::dynamic::<bf16>(vector(&self.ring, 0, slot)))
                });
                let tiles = |i: usize| keys.map(|(slot, key)| key.load16(place(slot, 8 * t + 32 * i as u32) as usize));
                let found = score_keys(query, tiles);
                unroll!(J < 4; {
                    unroll!(E < 4; {
                        if rows_of_lane[E / 2] == row {
                            scores[J][E] = found[J][E];
                        }
                    });
                });
                row += 1;
            }

            let position = |row: u32| root + path(row).depth();
            let weights = weigh(attend, tile, position, scores);
            let mut found = WarpAttention::of(&weights);
            let mut row = 0;
            while row < rows {
                let path = path(tile.first_row + row);
                let slot = slot(path, root, tile.first_key() + tile.lane / 8 * 8 + key_of(tile.lane % 8));
                let values = values_at(vector(&self.ring, pages, slot), slot);
                add_values_each(&weights, values, |n, o| {
                    unroll!(E < 4; {
                        if rows_of_lane[E / 2] == row {
                            found.o[n][E] = o[E];
                        }
                    });
                });
                row += 1;
            }
            found
        }
    }
}

/// Where in shared memory the key of a slot begins; its value, if the pages of values begin `skip` stages further.
#[inline(always)]
fn vector(ring: &Ring, skip: u32, slot: u32) -> u32 {
    ring.ahead(skip + slot % SPLIT / PAGE_TOKENS).offset() + slot % PAGE_TOKENS * QUERY
}
