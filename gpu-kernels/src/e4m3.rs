//! Matrices whose weights and activations are both e4m3, with scales: weights in blocks of [`GROUP`] × [`GROUP`],
//! activations in groups of [`GROUP`].
//!
//! Two codes lie where a bf16 would, for weights and for activations: a slice of 64 places has the codes of one group.
//! Byte `p` of a group is the element that has place `p % 64` of the bf16 slice `p / 64` of the group.
//!
//! # Order
//! An output is the sum, from the first group to the last, of `fma(inner sum, x_scale · w_scale, sum)`, where the inner
//! sum is the tensor core's, of a group's products. All kernels make it so, however many rows there are.

use cuda_std::{Global, GlobalMut, bf16, math};

use crate::linear::slot;
use crate::norm::lane_element;
use crate::step::MAX_DECODE_ROWS;
use crate::stream::SLICES;

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod encode;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod rows;

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub use encode::{EncodeE4m3, encode_e4m3};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub use rows::{QuantizeRows, quantize_rows};

/// Inputs that share a scale, and outputs of a weight's block.
pub const GROUP: u32 = 128;
/// The largest number of e4m3.
const LARGEST: f32 = 448.0;
/// Groups without a larger magnitude are zeros: what divides their elements would be no number.
const LEAST: f32 = 1e-30;

/// Weights of the layers' matrices. Plain data; a part of parameter blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Weights {
    /// Pairs of codes, as [`lay_out`](crate::stream::lay_out) leaves bf16: matrices of half as many inputs, one after
    /// another in their order.
    pub codes: Global<bf16>,
    /// `[weight rows / 128, groups, 4]` of each matrix, one after another: of 128 weight rows, the scale of the lower
    /// eight features of each N-tile and that of the upper eight, which differ where they are gates and ups. The last
    /// two of four are not read. Groups are an even number, see [`groups`].
    pub scales: Global<f32>,
}

/// Inputs of a chunk of codes, which has eight slices of 128.
pub const CHUNK_INPUTS: u32 = SLICES * GROUP;

/// Where the decode kernel's blocks find the codes of several rows' activations. Plain data; a part of parameter
/// blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Inputs {
    /// `[chunks, CHUNK_CODES]`, 16-byte aligned: of [`CHUNK_INPUTS`] inputs each, as the kernel multiplies them.
    pub codes: GlobalMut<u8>,
    /// `[chunks, rows, groups of the chunk]`.
    pub scales: GlobalMut<f32>,
}

impl Inputs {
    /// Bytes of a chunk's codes.
    pub const CHUNK_CODES: u32 = MAX_DECODE_ROWS * CHUNK_INPUTS;
    /// A chunk's scales.
    pub const CHUNK_SCALES: u32 = MAX_DECODE_ROWS * SLICES;
}

/// Codes of rows of activations, where GEMMs of many rows find them. Plain data; a part of parameter blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct CodedRows {
    /// `[x_rows, k]`, 16-byte aligned: each row in the order of [`slot`](crate::linear::slot), as
    /// [`e4m3`](crate::e4m3) says.
    pub codes: GlobalMut<u8>,
    /// `[groups, x_rows]`: of groups beyond `k` zeros.
    pub scales: GlobalMut<f32>,
    /// Rows that there is room for: whole tiles.
    pub x_rows: u32,
}

impl CodedRows {
    /// Where a lane's four codes of the group of `row` that begins at `first` go, of rows as long as the residual
    /// stream's: of elements as [`lane_element`](crate::norm::lane_element) says.
    ///
    /// # Safety
    /// There is room for such a row of `dim` elements, `first` is a multiple of [`GROUP`] below `dim`, and `lane` is
    /// below 32; or nothing is stored there.
    #[inline(always)]
    pub(crate) unsafe fn of_lane(&self, dim: u32, row: u32, first: u32, lane: u32) -> GlobalMut<u32> {
        let at = row as usize * dim as usize + slot(first + lane_element(lane)) as usize;
        // SAFETY: the caller's word.
        unsafe { self.codes.at(at).cast() }
    }

    /// Stores the scale of the group of `row` that begins at `first`, if `condition`.
    ///
    /// # Safety
    /// If the condition holds, `row` is below [`x_rows`](Self::x_rows), there is such a group, and its scale is this
    /// lane's alone.
    #[inline(always)]
    pub(crate) unsafe fn put_scale_if(&self, condition: bool, row: u32, first: u32, scale: f32) {
        // SAFETY: the caller's word.
        unsafe { self.scales.store_if(condition, (first / GROUP * self.x_rows + row) as usize, scale) }
    }
}

/// Groups of so many inputs: an even number, of which the last may be zeros with scale zero.
#[inline(always)]
#[must_use]
pub const fn groups(k: u32) -> u32 {
    k.div_ceil(2 * GROUP) * 2
}

/// Words of a matrix's [`Weights::scales`].
#[inline(always)]
#[must_use]
pub const fn scales_len(n_tiles: u32, k: u32) -> u32 {
    n_tiles.div_ceil(GROUP / crate::linear::N_TILE) * groups(k) * 4
}

/// The scale of a group of activations with this largest magnitude, and what each of them is multiplied with before it
/// is rounded.
#[inline(always)]
#[must_use]
pub fn scale_of(largest: f32) -> [f32; 2] {
    if largest < LEAST { [0.0; 2] } else { [largest * (1.0 / LARGEST), LARGEST / largest] }
}

/// Of sixteen bf16, in pairs, the largest magnitude.
#[inline(always)]
#[must_use]
pub fn largest(pairs: &[u32; 8]) -> f32 {
    let mut largest = 0.0;
    unroll!(I < 8; {
        let [low, high] = math::unpack_bf16(pairs[I]);
        largest = math::max(largest, math::max(math::abs(low), math::abs(high)));
    });
    largest
}

/// Of four bf16, in pairs, the bits of the largest magnitude: as of numbers, the larger are larger.
#[inline(always)]
#[must_use]
pub fn largest_bits(pairs: [u32; 2]) -> u32 {
    let [a, b] = pairs.map(|pair| pair & 0x7fff_7fff);
    let low = (a << 16).max(b << 16);
    low.max((a & 0xffff_0000).max(b & 0xffff_0000))
}

/// The codes of four bf16, in pairs, in their order: `inverse` is as for [`codes`].
#[inline(always)]
#[must_use]
pub fn codes_of_four(pairs: [u32; 2], inverse: f32) -> u32 {
    let [[a, b], [c, d]] = pairs.map(math::unpack_bf16);
    math::pack_e4m3([a * inverse, b * inverse, c * inverse, d * inverse])
}

/// The codes of sixteen bf16, in pairs, in their order: `inverse` is the second of their group's [`scale_of`].
#[inline(always)]
#[must_use]
pub fn codes(pairs: &[u32; 8], inverse: f32) -> [u32; 4] {
    let mut codes = [0; 4];
    unroll!(I < 4; {
        codes[I] = codes_of_four([pairs[2 * I], pairs[2 * I + 1]], inverse);
    });
    codes
}
