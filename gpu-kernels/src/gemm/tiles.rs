//! Which tiles a block takes, in which order, and which part of their sums.
//!
//! Blocks (or pairs of blocks: groups) take whole tiles in turns. If the last turn has too few for all, each group takes the same [`Gemm::share`] of
//! the slots of that turn's tiles instead, as they come:
//!
//! ```text
//! slots of the last turn's tiles   |------- tile 0 -------|------- tile 1 -------|
//! groups                           |------ 0 ------|------ 1 ------|----- 2 -----|
//! ```
//!
//! A chain that ends within a tile is left in memory, accumulators as they are, and another group goes on with it: the same additions in the same
//! order as in one block. So that nobody waits, a group begins with the tile that it leaves to others, and ends with the one that others left to it. (In
//! this picture group 1 ends with tile 0 and begins with tile 1.) What it neither begins nor ends it takes after its first whole tile, if it has more than
//! one.

use cuda_std::shared::{self, Shared};

use super::{DEPTH, Gemm, NOTE_BYTES};
use crate::ring::Ring;

/// A tile, and the part of the sums that is to be done: of the input features from `from` to `to`.
#[derive(Clone, Copy)]
pub struct Piece {
    /// First row and feature.
    pub row: u32,
    pub column: u32,
    pub from: u32,
    pub to: u32,
    /// Its number among tiles that are shared, if it is not whole.
    pub shared: u32,
}

impl Piece {
    /// Behind the last one.
    pub const END: Self = Self { row: 0, column: 0, from: 0, to: 0, shared: 0 };

    /// The slot's note.
    #[inline(always)]
    unsafe fn place<const N: u32>(ring: &Ring) -> Shared<u8> {
        unsafe { shared::dynamic(Gemm::notes(N) + ring.stage() * NOTE_BYTES) }
    }

    /// Leaves a note for those who wait for the slot: all that it can be told from is computed once, by the warp that has time for it.
    #[inline(always)]
    pub unsafe fn note<const N: u32>(&self, ring: &Ring) {
        unsafe {
            let place = Self::place::<N>(ring);
            place.store16(0, [self.row, self.column, self.from, self.to]);
            place.cast::<u32>().store(4, self.shared);
        }
    }

    /// What the note of a full slot says.
    #[inline(always)]
    pub unsafe fn read<const N: u32>(ring: &Ring) -> Self {
        unsafe {
            let place = Self::place::<N>(ring);
            let [row, column, from, to] = place.load16(0);
            Self { row, column, from, to, shared: place.cast::<u32>().load(4) }
        }
    }
}

/// What a block's group takes.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// Tile rows and columns; a pair of tiles counts as one.
    pub rows: u32,
    pub columns: u32,
    /// Tile rows in a band.
    pub band: u32,
    /// This group, and how many there are.
    pub group: u32,
    pub groups: u32,
    /// Of tile (0, 0): its first row and feature.
    pub origin: [u32; 2],
    /// Rows and features from a tile to the next.
    pub size: [u32; 2],
    /// Input features of a whole tile, and of a group's share of the last turn; no share, and tiles are whole.
    pub k: u32,
    pub share: u32,
    /// Pieces taken so far.
    pub taken: u32,
}

impl Tiles {
    /// That part of the `number`-th tile.
    #[inline(always)]
    fn piece(&self, number: u32, from: u32, to: u32, shared: u32) -> Piece {
        let in_band = self.band * self.columns;
        // SAFETY: there are tiles, so neither is zero; the launcher's band is not.
        unsafe { core::hint::assert_unchecked(in_band != 0) };
        let first = number / in_band * self.band;
        let height = self.band.min(self.rows - first);
        // SAFETY: `first` is the first row of a band that has this tile.
        unsafe { core::hint::assert_unchecked(height != 0) };
        let within = number % in_band;
        let (row, column) = (first + within % height, within / height);
        let [row, column] = [self.origin[0] + row * self.size[0], self.origin[1] + column * self.size[1]];
        Piece { row, column, from, to, shared }
    }
}

impl Iterator for Tiles {
    type Item = Piece;

    #[inline(always)]
    fn next(&mut self) -> Option<Piece> {
        let all = self.rows * self.columns;
        if self.share == 0 {
            let number = self.group + self.taken * self.groups;
            self.taken += 1;
            return (number < all).then(|| self.piece(number, 0, self.k, 0));
        }
        // SAFETY: a launch has blocks, and products have input features.
        unsafe { core::hint::assert_unchecked(self.groups != 0 && self.k != 0) };
        let (turns, shared) = (all / self.groups, all % self.groups);
        // The group's share begins within this tile.
        let begin = self.group * self.share;
        let (tile, from) = (begin / self.k, begin % self.k);
        let to = (from + self.share).min(self.k);
        let first_shared = turns * self.groups;
        // How many whole tiles come before the piece that another group began.
        let before = if to == self.k { turns } else { (turns > 1) as u32 };
        loop {
            let turn = self.taken;
            self.taken += 1;
            if turn == 0 {
                // The tile that is begun for others.
                let (tile, to) = if from == 0 { (tile, to) } else { (tile + 1, (from + self.share).max(self.k) - self.k) };
                if tile < shared && to > 0 {
                    return Some(self.piece(first_shared + tile, 0, to, tile));
                }
            } else if turn == before + 1 {
                if tile < shared && from > 0 {
                    return Some(self.piece(first_shared + tile, from, to, tile));
                }
            } else if turn <= turns + 1 {
                let whole = turn - 1 - (turn > before) as u32;
                return Some(self.piece(self.group + whole * self.groups, 0, self.k, 0));
            } else {
                return None;
            }
        }
    }
}

impl Gemm {
    /// Input features of a group's share of the tiles of the last turn, when `groups` take `tiles` with `k` input features; 0 if there is nothing to share.
    /// It is no less than half a tile, so that few pieces are parts of one.
    pub const fn share(tiles: u32, groups: u32, k: u32) -> u32 {
        let (shared, slots) = (tiles % groups, k / DEPTH);
        if tiles < groups || shared == 0 || slots < 2 {
            return 0;
        }
        let (even, half) = ((shared * slots).div_ceil(groups), slots.div_ceil(2));
        DEPTH * if even > half { even } else { half }
    }
}
