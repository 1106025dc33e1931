//! Matrices whose weights and activations are both e4m3. Each block of [`GROUP`] × [`GROUP`] weights has a scale, and
//! so has each group of [`GROUP`] activations of a row.
//!
//! For weights and for activations, two codes take the place of one bf16: a slice of 64 bf16 places has the 128 codes
//! of one group. Byte `p` of a group is the element that in bf16 would have place `p % 64` of the group's slice
//! `p / 64`.
//!
//! # Order
//! An output adds up its groups from the first to the last: `sum = fma(inner, x_scale · w_scale, sum)`, where `inner`
//! is the tensor core's sum of a group's products. All kernels keep to this order, however many rows there are.

use cuda_std::{Global, GlobalMut, bf16, device, math};

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

/// Inputs that share a scale; of weights, as many outputs share it, too.
pub const GROUP: u32 = 128;
/// The largest number of e4m3.
const LARGEST: f32 = 448.0;
/// A group whose largest magnitude is less becomes zeros: the inverse of its scale would not be finite.
const LEAST: f32 = 1e-30;

/// Weights of the layers' matrices. Plain data; a part of parameter blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Weights {
    /// Pairs of codes, in the layout that [`lay_out`](crate::stream::lay_out) gives bf16: matrices of half as many
    /// inputs, one after another in their order.
    pub codes: Global<bf16>,
    /// `[weight rows / 128, groups, 4]` for each matrix, one after another. The first of the four is the scale of the
    /// lower eight features of each N-tile of the 128 weight rows, the second that of the upper eight; the two differ
    /// if these are gates and ups. The last two are not read. The number of groups is even, see [`groups`].
    pub scales: Global<f32>,
}

/// Inputs of a chunk of codes, which has eight slices of 128.
pub const CHUNK_INPUTS: u32 = SLICES * GROUP;

/// Where the decode kernel's CTAs find the codes of several rows' activations. Plain data; a part of parameter blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Inputs {
    /// `[chunks, CHUNK_CODES]`, 16-byte aligned: chunks of [`CHUNK_INPUTS`] inputs, in the order in which the kernel
    /// multiplies them.
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
    /// `[groups, x_rows]`: zeros for groups beyond `k`.
    pub scales: GlobalMut<f32>,
    /// Rows that there is room for: whole tiles.
    pub x_rows: u32,
}

impl CodedRows {
    /// Where a lane's four codes go, of the group of `row` that begins at element `first`. Rows are as long as the
    /// residual stream's, `dim`. The lane has the elements that [`lane_element`](crate::norm::lane_element) says.
    ///
    /// # Safety
    /// There is room for such a row of `dim` elements, `first` is a multiple of [`GROUP`] below `dim`, and `lane` is
    /// below 32; or nothing is stored there.
    #[device]
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
    #[device]
    pub(crate) unsafe fn put_scale_if(&self, condition: bool, row: u32, first: u32, scale: f32) {
        // SAFETY: the caller's word.
        unsafe { self.scales.store_if(condition, (first / GROUP * self.x_rows + row) as usize, scale) }
    }
}

/// The number of groups for `k` inputs, rounded up to an even one: the last group may be zeros with scale zero.
#[device]
#[must_use]
pub const fn groups(k: u32) -> u32 {
    k.div_ceil(2 * GROUP) * 2
}

/// Words of a matrix's [`Weights::scales`].
#[device]
#[must_use]
pub const fn scales_len(n_tiles: u32, k: u32) -> u32 {
    n_tiles.div_ceil(GROUP / crate::linear::N_TILE) * groups(k) * 4
}

/// The scale of a group of activations whose largest magnitude is `largest`; and its inverse, by which each activation
/// is multiplied before it is rounded.
#[device]
#[must_use]
pub fn scale_of(largest: f32) -> [f32; 2] {
    if largest < LEAST { [0.0; 2] } else { [largest * (1.0 / LARGEST), LARGEST / largest] }
}

/// The largest magnitude of sixteen bf16, given in pairs.
#[device]
#[must_use]
pub fn largest(pairs: &[u32; 8]) -> f32 {
    let mut largest = 0.0;
    unroll!(I < 8; {
        let [low, high] = math::unpack_bf16(pairs[I]);
        largest = math::max(largest, math::max(math::abs(low), math::abs(high)));
    });
    largest
}

/// The bits of the largest magnitude of four bf16, given in pairs, as an f32. Bits of magnitudes compare as the numbers
/// do.
#[device]
#[must_use]
pub fn largest_bits(pairs: [u32; 2]) -> u32 {
    let [a, b] = pairs.map(|pair| pair & 0x7fff_7fff);
    let low = (a << 16).max(b << 16);
    low.max((a & 0xffff_0000).max(b & 0xffff_0000))
}

/// The codes of four bf16, given in pairs, in their order. `inverse` is as for [`codes`].
#[device]
#[must_use]
pub fn codes_of_four(pairs: [u32; 2], inverse: f32) -> u32 {
    let [[a, b], [c, d]] = pairs.map(math::unpack_bf16);
    math::pack_e4m3([a * inverse, b * inverse, c * inverse, d * inverse])
}

/// The codes of sixteen bf16, given in pairs, in their order. `inverse` is the second number of their group's
/// [`scale_of`].
#[device]
#[must_use]
pub fn codes(pairs: &[u32; 8], inverse: f32) -> [u32; 4] {
    let mut codes = [0; 4];
    unroll!(I < 4; {
        codes[I] = codes_of_four([pairs[2 * I], pairs[2 * I + 1]], inverse);
    });
    codes
}
