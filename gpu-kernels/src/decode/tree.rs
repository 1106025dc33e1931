//! Attention of a step whose rows are a [tree](crate::tree).
//!
//! Of keys that were there before the step every row meets the same. Of a warp's keys that reach further, a tile's rows
//! are taken one after another, each with the keys of its own path in the columns of their positions.

use cuda_std::{mma, shared, thread};

use super::attention::{LAYOUT, queries_of};
use super::consumer::Consumer;
use super::{DecodeStep, PATHS};
use crate::attention::{
    Attend, SPLIT, SoftmaxWeights, TILE_KEYS, Tile, WARP_KEYS, add_eight, eight_values, key_chunk, score_tiles, weigh,
};
use crate::kv::PAGE_TOKENS;
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

impl<const ROWS: u8> Consumer<'_, ROWS> {
    /// What a warp weighs its keys by, of the ring's next `pages` stages, which have the pages of the split's keys.
    #[inline(always)]
    pub unsafe fn weigh_paths(&self, attend: &Attend, tile: &Tile, queries: u32, pages: u32) -> SoftmaxWeights {
        // SAFETY: the caller's word.
        unsafe {
            let root = self.first_position();
            let mut page = 0;
            while page < pages {
                self.ring.ahead(page).wait_full();
                page += 1;
            }
            let g = tile.lane / 4;
            let rows_of_lane = [tile.group.divide(g).0, tile.group.divide(g + 8).0];
            let mut scores = [[0f32; 4]; 4];
            let mut row = 0;
            while row < rows_with_paths(tile, tile.first_key(), root) {
                let path = path(tile.first_row + row);
                let keys = TILE_KEYS.map(|first| {
                    let slot = slot(path, root, tile.first_key() + first + tile.lane % 8);
                    (page_of(&self.ring, 0, slot), slot % PAGE_TOKENS)
                });
                let tiles = |i: usize| {
                    keys.map(|(page, key)| {
                        let at = page + LAYOUT.chunk(key, key_chunk(i, tile.lane));
                        mma::ldmatrix_x4(shared::dynamic::<u8>(at))
                    })
                };
                let [found] = score_tiles::<1>(|_, j| queries_of(tile.lane, queries)(j), tiles);
                unroll!(J < 4; {
                    unroll!(E < 4; {
                        // The first row's are all rows', where there are no others.
                        if row == 0 || rows_of_lane[E / 2] == row {
                            scores[J][E] = found[J][E];
                        }
                    });
                });
                row += 1;
            }
            weigh(attend, tile, |row: u32| root + path(row).depth(), scores)
        }
    }

    /// The sums of eight dimensions from `8 n` on over a warp's keys from `first` on, so weighed, of rows whose keys
    /// differ there. The ring's next `pages` stages have the pages of the split's keys, and as many then its values.
    #[inline(always)]
    pub unsafe fn add_paths(
        &self,
        tile: &Tile,
        (first, pages): (u32, u32),
        weights: &[[u32; 4]; 2],
        n: u32,
    ) -> [f32; 4] {
        // SAFETY: the caller's word.
        unsafe {
            let (g, root) = (tile.lane / 4, self.first_position());
            let rows_of_lane = [tile.group.divide(g).0, tile.group.divide(g + 8).0];
            let (mut sums, mut row) = ([0f32; 4], 0);
            while row < rows_with_paths(tile, first, root) {
                let slot = slot(path(tile.first_row + row), root, first + tile.lane);
                let values = eight_values(LAYOUT, page_of(&self.ring, pages, slot), slot % PAGE_TOKENS);
                let found = add_eight(weights, values(n));
                unroll!(E < 4; {
                    if row == 0 || rows_of_lane[E / 2] == row {
                        sums[E] = found[E];
                    }
                });
                row += 1;
            }
            sums
        }
    }
}

/// Rows of a tile whose keys may differ among a warp's from `first` on; 1 if none do.
#[inline(always)]
fn rows_with_paths(tile: &Tile, first: u32, root: u32) -> u32 {
    if first + WARP_KEYS > root + 1 { tile.group.divide(tile.pairs - 1).0 + 1 } else { 1 }
}

/// Where in shared memory the page with the key of a slot begins; with its value, if the pages of values begin `skip`
/// stages further.
#[inline(always)]
fn page_of(ring: &Ring, skip: u32, slot: u32) -> u32 {
    ring.ahead(skip + slot % SPLIT / PAGE_TOKENS).offset()
}
