//! The tiles that a CTA takes, and their order.
//!
//! Turns go down a band of [`Tiles::band`] rows of tiles before they go right; then comes the next band. The last band
//! may be lower. A turn is one tile of each of the CTAs that take neighbouring tiles: [`Tiles::cluster_shape`], one CTA
//! if they are not in clusters. (It is two tiles of a CTA where an epilogue takes them [in pairs](Epilogue::IN_PAIRS).)
//! With bands of two rows of turns:
//!
//! ```text
//! features ──►            a turn of a cluster of 4 × 2
//! rows    0   2   4   6     CTA 0   CTA 4
//!   │     1   3   5   7     CTA 1   CTA 5
//!   ▼     8   9  10  11     CTA 2   CTA 6
//!                           CTA 3   CTA 7
//! ```
//!
//! CTA `b` of a grid of `grid` has the turns of `b`, `b + grid`, `b + 2 grid` and so on, each divided by the number of
//! CTAs of a turn. So CTAs that run at the same time have turns that follow each other: they share the band's rows, and
//! few columns of weights. All roles of a CTA have an iterator of their own, and so the same tiles in the same order.
//! In a cluster a tile may lie beyond the matrix; its sums are not stored.

use core::marker::PhantomData;

use cuda_std::device;
use cuda_std::thread;

use super::epilogue::Epilogue;

/// Iterates over the tiles of a CTA. `gemm_of` makes it, and has the launcher's word for a band of at least one row of
/// tiles.
#[derive(Clone, Copy)]
pub struct Tiles {
    pub(super) band: u32,
    /// CTAs that take neighbouring tiles: how many one above the other, and how many side by side.
    pub(super) cluster_shape: [u32; 2],
    /// Tiles taken so far.
    pub(super) taken: u32,
    /// The first row and feature of all tiles, and their ends.
    pub(super) first: [u32; 2],
    pub(super) end: [u32; 2],
    /// Rows and features from the tile of one such CTA to the next CTA's.
    pub(super) apart: [u32; 2],
    /// Rows and features of what these CTAs take together in one turn.
    pub(super) size: [u32; 2],
}

impl Iterator for Tiles {
    /// The first row and feature of a tile.
    type Item = (u32, u32);

    #[device]
    fn next(&mut self) -> Option<(u32, u32)> {
        let block = thread::opaque(thread::block_idx_x());
        let ctas = self.cluster_shape[0] * self.cluster_shape[1];
        let turn = (block + self.taken * thread::opaque(thread::grid_dim_x())) / ctas;
        // Recomputed each time: kept across tiles, they would take registers from the epilogues.
        let [rows, columns] = [0, 1].map(|i| (thread::opaque(self.end[i]) - self.first[i]).div_ceil(self.size[i]));
        if turn >= rows * columns {
            return None;
        }
        self.taken += 1;
        let in_band = self.band * columns;
        // SAFETY: a turn is below their product, so neither rows nor columns are zero; a band is not, see `Tiles`.
        unsafe { cuda_std::assume(in_band != 0) };
        let first = turn / in_band * self.band;
        let height = self.band.min(rows - first);
        // SAFETY: `first` is the first row of a band that has this tile, and so below `rows`; a band is not empty.
        unsafe { cuda_std::assume(height != 0) };
        let within = turn % in_band;
        let (row, column) = (first + within % height, within / height);
        let place = [block % self.cluster_shape[0], block % ctas / self.cluster_shape[0]];
        let at = |i: usize, tile: u32| self.first[i] + place[i] * self.apart[i] + tile * self.size[i];
        Some((at(0, row), at(1, column)))
    }
}

/// Tiles in the order of a CTA's work. Where an epilogue takes two side by side, they come one after the other.
pub struct InOrder<E> {
    tiles: Tiles,
    /// The second tile of a pair, if it comes next.
    second: Option<(u32, u32)>,
    epilogue: PhantomData<E>,
}

impl<E: Epilogue> InOrder<E> {
    #[device]
    pub const fn new(tiles: Tiles) -> Self {
        Self { tiles, second: None, epilogue: PhantomData }
    }
}

impl<E: Epilogue> Iterator for InOrder<E> {
    type Item = (u32, u32);

    #[device]
    fn next(&mut self) -> Option<(u32, u32)> {
        if !E::IN_PAIRS {
            return self.tiles.next();
        }
        if let Some(second) = self.second.take() {
            return Some(second);
        }
        let (row, column) = self.tiles.next()?;
        self.second = Some((row, column + self.tiles.size[1] / 2));
        Some((row, column))
    }
}
