//! Attention of a step whose rows are of several sequences, one row each.
//!
//! A tile of pairs is a row, and a unit is a split of one key-value head of the row's own sequence. Units are dealt by
//! row, then key-value head, then split, so that a block has consecutive splits.

use cuda_std::{shared, thread, warp};

use super::producer::Share;
use super::{DecodeStep, PATHS};
use crate::attention::SPLIT;
use crate::kv::PAGE_TOKENS;
use crate::step::MAX_DECODE_ROWS;

/// Brings the rows' positions into shared memory, by the lanes of a warp; and gives the last of them.
#[inline(always)]
pub unsafe fn bring(p: &DecodeStep, count: u32) -> u32 {
    // SAFETY: the caller's word.
    unsafe {
        let row = thread::lane_id();
        let mut last = 0;
        if row < count {
            last = p.work.rows.positions.load(row as usize);
            shared::dynamic::<u32>(PATHS).store(row as usize, last);
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
    // SAFETY: written before the roles parted.
    unsafe { shared::dynamic::<u32>(PATHS).load(row as usize) }
}

/// Units of the first `rows` rows, of so many key-value heads.
#[inline(always)]
pub unsafe fn units(rows: u32, kv_heads: u32) -> u32 {
    let (mut all, mut row) = (0, 0);
    while row < rows {
        // SAFETY: the caller's word.
        all += unsafe { position(row) } / SPLIT + 1;
        row += 1;
    }
    all * kv_heads
}

/// The unit with this number, of a step that has it.
#[inline(always)]
pub unsafe fn unit(mut number: u32, kv_heads: u32) -> Share {
    let mut row = 0;
    loop {
        // SAFETY: the caller's word.
        let last = unsafe { position(row) };
        let splits = last / SPLIT + 1;
        if number < kv_heads * splits {
            let (kv_head, split) = (number / splits, number % splits);
            let pages = ((last - split * SPLIT) / PAGE_TOKENS + 1).min(SPLIT / PAGE_TOKENS);
            return Share { kv_head, split, pages, tiles: row..row + 1 };
        }
        number -= kv_heads * splits;
        row += 1;
    }
}
