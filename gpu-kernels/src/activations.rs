//! The layout of the inputs of the [decode kernel](crate::decode)'s GEMMs, in a step of several rows.
//!
//! A warp loads the fragments of eight rows at a time: of each row 64 contiguous bytes, 16 for each of four lanes. In
//! row-major order such a load would touch eight half L2 lines. So what one load takes is contiguous:
//!
//! ```text
//! [slice of 64 features][rows 0 to 7, then 8 to 15][half of the slice][row][32 features]
//! ```

use crate::linear::SLICE;
use crate::step::MAX_DECODE_ROWS;
use cuda_std::device;

/// Rows of a tile, the columns of a tensor core instruction.
pub const TILE_ROWS: u32 = 8;
/// Contiguous features of a row.
pub const HALF: u32 = SLICE / 2;
/// Elements from the first half of a slice to the second.
pub const HALF_STRIDE: u32 = TILE_ROWS * HALF;
/// Elements from one tile of rows to the next.
const TILE_STRIDE: u32 = 2 * HALF_STRIDE;
/// Elements from a slice to the next.
pub const SLICE_STRIDE: u32 = MAX_DECODE_ROWS / TILE_ROWS * TILE_STRIDE;

/// Where a row's first 32 features lie, in elements.
#[device]
pub const fn row_at(row: u32) -> u32 {
    row / TILE_ROWS * TILE_STRIDE + row % TILE_ROWS * HALF
}

/// Where an element lies. The elements of an aligned group of 32 features are contiguous.
#[device]
pub const fn element_at(row: u32, feature: u32) -> usize {
    let (slice, half, element) = (feature / SLICE, feature / HALF % 2, feature % HALF);
    (slice * SLICE_STRIDE + row_at(row) + half * HALF_STRIDE + element) as usize
}

const _: () = assert!(SLICE_STRIDE == MAX_DECODE_ROWS * SLICE);
