//! Attention of a step whose rows are of several sequences: those of one lie together, and follow each other.
//!
//! A unit is a tile of a sequence's rows against a split of one key-value head of that sequence. Units are assigned by
//! sequence, then key-value head, then split, then tile, so that a block's consecutive units share keys and values, or
//! come from consecutive splits. Where heads are about as many as blocks, a block takes whole ones and adds their
//! splits itself.
//!
//! # Safety
//! `p` is the parameter block of a step of several sequences. [`bring`] comes first. What else is unsafe here reads
//! what that left: the lanes of its warp may call it at once, all others when the block has synchronised. A row is
//! below the step's rows, `rows` is how many these are, and `tile_rows` is at least 1.

use cuda_std::{shared, thread, warp};

use super::producer::Share;
use super::{DecodeStep, PATHS};
use crate::attention::SPLIT;
use crate::kv::PAGE_TOKENS;
use crate::step::MAX_DECODE_ROWS;

/// Brings each row's position, and where the rows of its sequence end, into shared memory, by the lanes of a warp; and
/// gives the last position.
///
/// # Safety
/// All lanes of a warp call it, before the block synchronises. `count` is the step's rows, 1 to [`MAX_DECODE_ROWS`].
#[inline(always)]
pub unsafe fn bring(p: &DecodeStep, count: u32) -> u32 {
    // SAFETY: the caller's word.
    unsafe {
        let row = thread::lane_id();
        let (mut last, mut sequence) = (0, 0);
        if row < count {
            last = p.work.rows.positions.load(row as usize);
            sequence = p.work.rows.sequences.load(row as usize);
        }
        let before = warp::shuffle_up(sequence, 1);
        let begins = warp::ballot(row == 0 || row >= count || sequence != before);
        if row < count {
            // There are more lanes than rows, and the first of those that have none begins something.
            let end = row + 1 + (begins >> (row + 1)).trailing_zeros();
            shared::dynamic::<[u32; 2]>(PATHS).store(row as usize, [last, end]);
        }
        unroll!(M < 4; {
            last = last.max(warp::shuffle_xor(last, (MAX_DECODE_ROWS / 2) >> M));
        });
        warp::sync_warp();
        last
    }
}

/// A row's position.
#[inline(always)]
pub unsafe fn position(row: u32) -> u32 {
    // SAFETY: the caller's word: written by `bring`.
    unsafe { shared::dynamic::<[u32; 2]>(PATHS).load(row as usize)[0] }
}

/// The end of the rows of a row's sequence.
#[inline(always)]
pub unsafe fn end(row: u32) -> u32 {
    // SAFETY: as above.
    unsafe { shared::dynamic::<[u32; 2]>(PATHS).load(row as usize)[1] }
}

/// How far a sequence reaches.
struct Extent {
    /// One beyond its last row.
    end: u32,
    /// The last row's position.
    last: u32,
    splits: u32,
    /// Tiles of its rows.
    tiles: u32,
}

impl Extent {
    /// Of the sequence whose rows begin at `first`, where a tile has at most so many rows.
    ///
    /// # Safety
    /// `first` is the first row of a sequence.
    #[inline(always)]
    unsafe fn of(first: u32, tile_rows: u32) -> Self {
        // SAFETY: the caller's word; a tile has rows.
        unsafe {
            cuda_std::assume(tile_rows > 0);
            let (end, last) = (end(first), position(end(first) - 1));
            Self { end, last, splits: last / SPLIT + 1, tiles: (end - first).div_ceil(tile_rows) }
        }
    }

    /// Units of a key-value head.
    #[inline(always)]
    const fn units(&self) -> u32 {
        self.splits * self.tiles
    }
}

/// Units of the first `rows` rows, of so many key-value heads, where a tile has at most so many rows.
#[inline(always)]
pub unsafe fn units(rows: u32, kv_heads: u32, tile_rows: u32) -> u32 {
    let (mut all, mut first) = (0, 0);
    while first < rows {
        // SAFETY: the caller's word.
        let extent = unsafe { Extent::of(first, tile_rows) };
        (all, first) = (all + extent.units(), extent.end);
    }
    all * kv_heads
}

/// Key-value heads of all sequences together, and the most units that one has.
#[inline(always)]
pub unsafe fn heads(rows: u32, kv_heads: u32, tile_rows: u32) -> (u32, u32) {
    let (mut heads, mut most, mut first) = (0, 0, 0);
    while first < rows {
        // SAFETY: the caller's word.
        let extent = unsafe { Extent::of(first, tile_rows) };
        (heads, most, first) = (heads + kv_heads, most.max(extent.units()), extent.end);
    }
    (heads, most)
}

/// The number of the first unit of a head, of all sequences' together; or of all units, if there are no more heads.
#[inline(always)]
pub unsafe fn first_unit(mut head: u32, rows: u32, kv_heads: u32, tile_rows: u32) -> u32 {
    let (mut before, mut first) = (0, 0);
    while first < rows && head > 0 {
        // SAFETY: the caller's word.
        let extent = unsafe { Extent::of(first, tile_rows) };
        let of_sequence = head.min(kv_heads);
        before += of_sequence * extent.units();
        (head, first) = (head - of_sequence, extent.end);
    }
    before
}

/// The unit with this number, and those behind it up to `most` in all that share its keys and values, of a step that
/// has it.
///
/// # Safety
/// `number` is below the [`units`] of all rows: behind the last sequence it would look for more. `most` is at least 1.
#[inline(always)]
pub unsafe fn share(mut number: u32, most: u32, kv_heads: u32, tile_rows: u32) -> Share {
    let (mut first, mut first_tile) = (0, 0);
    loop {
        // SAFETY: the caller's word.
        let Extent { end, last, splits, tiles } = unsafe { Extent::of(first, tile_rows) };
        // SAFETY: a sequence has rows.
        unsafe { cuda_std::assume(tiles > 0) };
        if number < kv_heads * splits * tiles {
            let (item, tile) = (number / tiles, number % tiles);
            let (kv_head, split) = (item / splits, item % splits);
            let pages = ((last - split * SPLIT) / PAGE_TOKENS + 1).min(SPLIT / PAGE_TOKENS);
            let tiles = first_tile + tile..first_tile + tiles.min(tile + most);
            return Share { kv_head, split, pages, tiles, first_row: first, first_tile };
        }
        number -= kv_heads * splits * tiles;
        (first, first_tile) = (end, first_tile + tiles);
    }
}
