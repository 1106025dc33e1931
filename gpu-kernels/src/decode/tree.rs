//! Attention of a step whose rows are a [tree](crate::tree).
//!
//! All rows see the same keys from before the step. After the root, each row sees the keys of its own path, in the
//! columns of their positions. A score is the same in any column: so scores against all of the step's keys are computed
//! once, and each row's are moved to its columns. A sum of values depends on the order of its columns: so the rows of a
//! tile are taken one after another, each with its own values.
//!
//! # Safety
//! `p` is the parameter block of a step whose rows have paths. If they branch, all their slots are in one split; those
//! of a chain may lie in two. [`bring`] comes first, before the CTA synchronises. All lanes of a consumer warp call
//! everything else that is unsafe here, for a share whose pages are the ring's next stages. The pages that are read
//! were waited for, the step's own keys and values are in them, and nobody releases them meanwhile. A row is below the
//! step's rows.

use cuda_std::{device, mma, shared, thread, warp};

use super::attention::LAYOUT;
use super::consumer::Consumer;
use super::{DecodeStep, PATHS};
use crate::attention::{
    Attend, PAIRS, SPLIT, SoftmaxWeights, Tile, WARP_KEYS, add_eight, eight_values, key_chunk, keys_from, score_tiles,
    weigh,
};
use crate::kv::PAGE_TOKENS;
use crate::ring::Ring;
use crate::step::MAX_DECODE_ROWS;
use crate::tree::Path;

/// Brings the rows' paths into shared memory, by the lanes of a warp.
///
/// # Safety
/// All lanes of a warp may call it, before the CTA synchronises. `count` is the step's rows.
#[device]
pub unsafe fn bring(p: &DecodeStep, count: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let row = thread::lane_id();
        if row < count {
            shared::dynamic::<u64>(PATHS).store(row as usize, p.work.rows.path(row).word());
        }
    }
}

/// The path to a row.
///
/// # Safety
/// The row is below the step's rows, whose paths were [brought](bring), and the CTA has synchronised since.
#[device]
pub unsafe fn path(row: u32) -> Path {
    // SAFETY: the caller's word: written before the roles parted.
    Path::from_word(unsafe { shared::dynamic::<u64>(PATHS).load(row as usize) })
}

/// The slot where a row of this path has the key of `position`, where the root's position is `root`.
#[device]
fn slot(path: Path, root: u32, position: u32) -> u32 {
    let depth = position.wrapping_sub(root);
    // Keys beyond the row are masked.
    if depth <= path.depth() { root + path.row_at(depth) } else { position }
}

/// A lane's part of sixteen pairs' scores against the keys of the step's rows, as the tensor core leaves them.
pub type RowScores = [[f32; 4]; 2];

/// The rows of sixteen pairs.
#[derive(Clone, Copy)]
pub struct PairRows {
    /// The first pair's row.
    first: u32,
    /// One beyond the last pair's row.
    end: u32,
    /// The rows of a lane's two pairs.
    of_lane: [u32; 2],
}

impl PairRows {
    /// The rows of the sixteen pairs of a tile from pair `first` on.
    #[device]
    pub fn of(tile: &Tile, first: u32) -> Self {
        let last = tile.pairs - 1;
        let row = |pair: u32| tile.row(pair.min(last));
        let g = first + tile.lane / 4;
        // Pairs that do not exist have the last one's row.
        Self { first: row(first), end: row(first + PAIRS - 1) + 1, of_lane: [row(g), row(g + 8)] }
    }
}

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// Whether a split has positions after the root's.
    #[device]
    pub fn has_paths(&self, split: u32) -> bool {
        (split + 1) * SPLIT > self.first_position() + 1
    }

    /// The first window of a split in which keys may differ from row to row: the one that has the position after the
    /// root's. A window has [`WARP_KEYS`] keys.
    #[device]
    pub fn apart(&self, split: u32) -> u32 {
        (self.first_position() + 1).saturating_sub(split * SPLIT) / WARP_KEYS
    }

    /// The position of a row of a tree.
    #[device]
    pub unsafe fn depth_position(&self, row: u32) -> u32 {
        // SAFETY: the caller's word.
        self.first_position() + unsafe { path(row) }.depth()
    }

    /// Scores of sixteen pairs against the keys of the step's rows, which are in the pages of the split in the ring's
    /// next stages. The products and their order are those of scores against other keys.
    ///
    /// # Safety
    /// All lanes of a warp call it. The ring's next `pages` stages have, or will have, the keys of `split`, in which a
    /// row of the step has its key; `queries` may be called.
    #[device]
    pub unsafe fn score_rows(
        &self,
        (split, pages): (u32, u32),
        lane: u32,
        queries: impl Fn(usize) -> [[u32; 4]; 2],
    ) -> RowScores {
        // SAFETY: the caller's word.
        unsafe {
            if lane < pages {
                self.ring.ahead(lane).wait_full();
            }
            warp::sync_warp();
            let root = self.first_position();
            // Rows that are in another split, or do not exist, have some other key: nobody asks for their scores.
            let first = root.max(split * SPLIT);
            let last = (root + self.count - 1).min(split * SPLIT + SPLIT - 1);
            let keys = [0, 8].map(|row| {
                let slot = (root + row + lane % 8).max(first).min(last);
                (page_of(&self.ring, 0, slot), slot % PAGE_TOKENS)
            });
            let keys = |i: usize| {
                keys.map(|(page, key)| {
                    mma::ldmatrix_x4(shared::dynamic::<u8>(page + LAYOUT.chunk(key, key_chunk(i, lane))))
                })
            };
            let [scores] = score_tiles::<1, 2>(|_, j| queries(j), keys);
            scores
        }
    }

    /// Puts the scores of each row's own path into the columns of their positions, for the 32 keys from `first` on.
    /// Until then these columns have the scores of slots.
    ///
    /// # Safety
    /// All lanes of a warp call it, with the same `first`. `from` are the scores of the same pairs.
    #[device]
    pub unsafe fn take_paths(&self, rows: &PairRows, first: u32, lane: u32, from: RowScores, to: &mut [[f32; 4]; 4]) {
        let first = first.wrapping_sub(self.first_position());
        if first.wrapping_add(WARP_KEYS - 1) >= MAX_DECODE_ROWS + WARP_KEYS - 1 {
            // An early return, since code that is jumped over in one piece need not be fetched.
            return;
        }
        // SAFETY: the caller's word.
        let paths = rows.of_lane.map(|row| unsafe { path(row) });
        unroll!(J < 4; {
            let first = first.wrapping_add(8 * J as u32);
            // Eight columns that end before the root, or begin beyond the deepest row, have nothing to take.
            if first.wrapping_add(7) < MAX_DECODE_ROWS + 7 {
                unroll!(E < 4; {
                    let depth = first.wrapping_add(2 * (lane % 4) + E as u32 % 2);
                    let row = paths[E / 2].row_at(depth);
                    // Which of the pair's lanes has the score; it is in one of four registers there.
                    let holder = (lane & !3) | (row % 8 / 2);
                    let found = |i: usize, e: usize| warp::shuffle_idx(from[i][E / 2 * 2 + e], holder);
                    let [low, high] = [0, 1].map(|i| {
                        let [even, odd] = [found(i, 0), found(i, 1)];
                        if row.is_multiple_of(2) { even } else { odd }
                    });
                    // Keys beyond the row are masked.
                    if depth <= paths[E / 2].depth() {
                        to[J][E] = if row < 8 { low } else { high };
                    }
                });
            }
        });
    }

    /// The softmax weights of a warp's keys, with each row's own path. The ring's next `pages` stages have the pages of
    /// the split's keys; the warp's own are in the stage `keys`.
    ///
    /// # Safety
    /// As for [`score_rows`](Self::score_rows). The tile's `warp_id` is the warp's, and the page of its keys was waited
    /// for.
    #[device]
    pub unsafe fn weigh_paths(
        &self,
        attend: &Attend,
        tile: &Tile,
        queries: impl Fn(usize) -> [[u32; 4]; 2],
        (keys, pages): (Ring, u32),
    ) -> SoftmaxWeights {
        // SAFETY: the caller's word.
        unsafe {
            let lane = tile.lane;
            let of_rows = self.score_rows((tile.split, pages), lane, &queries);
            let first_key = keys.offset() + LAYOUT.row(tile.first_key() % PAGE_TOKENS);
            let keys = keys_from(LAYOUT, first_key, WARP_KEYS - 1, lane);
            let [mut scores] = score_tiles::<1, 4>(|_, j| queries(j), keys);
            self.take_paths(&PairRows::of(tile, 0), tile.first_key(), lane, of_rows, &mut scores);
            weigh(attend, tile, |row: u32| self.depth_position(row), scores)
        }
    }

    /// The weighted sums of values over the 32 keys from `first` on, which may differ from row to row: of `N` times
    /// eight dimensions from `8 n` on, `N` at most 8. The pages of the split's values begin `skip` stages further in
    /// the ring.
    ///
    /// # Safety
    /// All lanes of a warp call it, with the same arguments but for their rows. The pages of values were waited for,
    /// and have the slot of each of the 32 keys that a row sees; for other keys anything is read there.
    #[device]
    pub unsafe fn add_paths<const N: usize>(
        &self,
        rows: &PairRows,
        (first, skip, lane): (u32, u32, u32),
        weights: &[[u32; 4]; 2],
        n: u32,
    ) -> [[f32; 4]; N] {
        // SAFETY: the caller's word.
        unsafe {
            let root = self.first_position();
            // Where no paths part, all rows have the first row's values.
            let end = if first + WARP_KEYS > root + 1 { rows.end } else { rows.first + 1 };
            let (mut sums, mut row) = ([[0f32; 4]; N], rows.first);
            while row < end {
                thread::keep_rolled();
                let slot = slot(path(row), root, first + lane);
                let values = eight_values(LAYOUT, page_of(&self.ring, skip, slot), slot % PAGE_TOKENS);
                unroll!(J < N of 8; {
                    let found = add_eight(weights, values(n + J as u32));
                    unroll!(E < 4; {
                        if row == rows.first || rows.of_lane[E / 2] == row {
                            sums[J][E] = found[E];
                        }
                    });
                });
                row += 1;
            }
            sums
        }
    }
}

/// Where in shared memory the page with a slot's key begins, if `skip` is 0. If the pages of values begin `skip` stages
/// further, the page with its value.
#[device]
fn page_of(ring: &Ring, skip: u32, slot: u32) -> u32 {
    ring.ahead(skip + slot % SPLIT / PAGE_TOKENS).offset()
}
