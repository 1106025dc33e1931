//! The schedule of attention in a step whose rows are of several sequences. The rows of one sequence lie together, at
//! consecutive positions.
//!
//! A unit is a tile of a sequence's rows against a split of one key-value head of that sequence. Units are assigned by
//! sequence, then key-value head, then split, then tile, so that a CTA's consecutive units share keys and values, or
//! come from consecutive splits. Where there are about as many heads as CTAs, a CTA takes whole heads and adds their
//! splits itself.
//!
//! # Safety
//! `p` is the parameter block of a step of several sequences. [`bring`] comes first. Everything else that is unsafe
//! here reads what `bring` left: the lanes of its warp may call it at once, all others once the CTA has synchronised. A
//! row is below the step's rows, `rows` is how many these are, and `tile_rows` is at least 1.

use cuda_std::{device, shared, thread, warp};

use super::producer::Share;
use super::{DecodeStep, PATHS};
use crate::attention::SPLIT;
use crate::kv::PAGE_TOKENS;
use crate::step::MAX_DECODE_ROWS;

/// Brings each row's position, and the end of its sequence's rows, into shared memory, by the lanes of a warp. Lanes 0
/// to 15 get the largest position.
///
/// # Safety
/// All lanes of a warp call it, before the CTA synchronises. `count` is the step's rows, 1 to [`MAX_DECODE_ROWS`].
#[device]
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
            // There are more lanes than rows, and lanes without a row count as beginnings.
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
#[device]
pub unsafe fn position(row: u32) -> u32 {
    // SAFETY: the caller's word: written by `bring`.
    unsafe { shared::dynamic::<[u32; 2]>(PATHS).load(row as usize)[0] }
}

/// One beyond the last row of a row's sequence.
#[device]
pub unsafe fn end(row: u32) -> u32 {
    // SAFETY: the caller's word: written by `bring`.
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
    /// The extent of the sequence whose rows begin at `first`, where a tile has at most `tile_rows` rows.
    ///
    /// # Safety
    /// `first` is the first row of a sequence.
    #[device]
    unsafe fn of(first: u32, tile_rows: u32) -> Self {
        // SAFETY: the caller's word; a tile has rows.
        unsafe {
            cuda_std::assume(tile_rows > 0);
            let (end, last) = (end(first), position(end(first) - 1));
            Self { end, last, splits: last / SPLIT + 1, tiles: (end - first).div_ceil(tile_rows) }
        }
    }

    /// Units of a key-value head.
    #[device]
    const fn units(&self) -> u32 {
        self.splits * self.tiles
    }
}

/// How many units the first `rows` rows have, with `kv_heads` key-value heads and tiles of at most `tile_rows` rows.
#[device]
pub unsafe fn units(rows: u32, kv_heads: u32, tile_rows: u32) -> u32 {
    let (mut all, mut first) = (0, 0);
    while first < rows {
        // SAFETY: the caller's word.
        let extent = unsafe { Extent::of(first, tile_rows) };
        (all, first) = (all + extent.units(), extent.end);
    }
    all * kv_heads
}

/// How many key-value heads all sequences have together, and the most units that one of them has.
#[device]
pub unsafe fn heads(rows: u32, kv_heads: u32, tile_rows: u32) -> (u32, u32) {
    let (mut heads, mut most, mut first) = (0, 0, 0);
    while first < rows {
        // SAFETY: the caller's word.
        let extent = unsafe { Extent::of(first, tile_rows) };
        (heads, most, first) = (heads + kv_heads, most.max(extent.units()), extent.end);
    }
    (heads, most)
}

/// The number of the first unit of `head`, which is numbered over all sequences; or how many units there are, if there
/// is no such head.
#[device]
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

/// The unit with this number, together with the units after it that share its keys and values: at most `most` in all.
/// The step has such a unit.
///
/// # Safety
/// `number` is below the [`units`] of all rows: otherwise it would look for more behind the last sequence. `most` is at
/// least 1.
#[device]
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
