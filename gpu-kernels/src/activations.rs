//! Where the input of a GEMM of several rows lies.
//!
//! A warp loads the fragments of eight rows, of each the 16 bytes that four lanes have beside each other. Row by row
//! such a load would be eight half lines of L2. So what one load takes lies in one piece:
//!
//! ```text
//! [slice of 64 features][rows 0 to 7, then 8 to 15][half of the slice][row][32 features]
//! ```

use crate::linear::SLICE;
use crate::step::MAX_DECODE_ROWS;

/// Rows of a tile, the columns of a tensor core instruction.
pub const TILE_ROWS: u32 = 8;
/// Features of a row that lie side by side.
pub const HALF: u32 = SLICE / 2;
/// Elements from a half of a slice to the other.
pub const HALF_STRIDE: u32 = TILE_ROWS * HALF;
/// Elements from a tile of rows to the other.
const TILE_STRIDE: u32 = 2 * HALF_STRIDE;
/// Elements from a slice to the next.
pub const SLICE_STRIDE: u32 = MAX_DECODE_ROWS / TILE_ROWS * TILE_STRIDE;

/// Where a row's first 32 features lie, in elements.
#[inline(always)]
pub const fn row_at(row: u32) -> u32 {
    row / TILE_ROWS * TILE_STRIDE + row % TILE_ROWS * HALF
}

/// Where an element lies. Its next neighbours lie beside it, up to a multiple of 32.
#[inline(always)]
pub const fn element_at(row: u32, feature: u32) -> usize {
    let (slice, half, element) = (feature / SLICE, feature / HALF % 2, feature % HALF);
    (slice * SLICE_STRIDE + row_at(row) + half * HALF_STRIDE + element) as usize
}

const _: () = assert!(SLICE_STRIDE == MAX_DECODE_ROWS * SLICE);
