//! Copies of tiles of a matrix between global and shared memory, by TMA (sm_90 on).
//!
//! A [`TensorMap`] describes a matrix of bf16 and the shape of its tiles. A tile's rows have 64 elements, 128 bytes,
//! and lie in shared memory one after another. Most maps use the 128-byte swizzle, which `wgmma` reads without bank
//! conflicts: the 16-byte chunk `c` of row `r` lies at chunk `c ^ (r % 8)` of that row ([`swizzled`]). Elements beyond
//! the matrix's edge are read as zeros and not written; memory is not accessed for them. For [`load_box`] a map
//! describes an array of 8-byte words in four dimensions instead.
//!
//! Under the emulator a map holds a plain description in place of the driver's encoding, and copies go by that.

use crate::Global;
use crate::bulk::Barrier;
use crate::shared::Shared;
use crate::target;

/// Elements in a row of a tile.
pub const ROW: u32 = 64;

/// A tensor map as TMA reads it. The driver makes it (`cuTensorMapEncodeTiled`), or [`TensorMap::emulated`] for the
/// emulator; it is opaque here. Kernels take its address.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct TensorMap(pub [u64; 16]);

/// A matrix of bf16 and its tiles: what a [`TensorMap`] is made from.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Number of rows, which lie one after another in memory.
    pub rows: u64,
    /// Elements in a row, a multiple of 8.
    pub columns: u64,
    /// Rows in a tile, at most 256. A tile has [`ROW`] columns.
    pub tile_rows: u32,
    /// Whether tiles are swizzled.
    pub swizzled: bool,
}

#[cfg(not(target_arch = "nvptx64"))]
impl Matrix {
    /// A matrix at `address` with `rows` rows of `columns` elements, one right after another. Its tiles have
    /// `tile_rows` rows and are swizzled.
    #[must_use]
    pub const fn dense(address: u64, rows: u64, columns: u64, tile_rows: u32) -> Self {
        Self { address, rows, columns, tile_rows, swizzled: true }
    }

    /// Checks that TMA can address the matrix: the conditions of the driver's `cuTensorMapEncodeTiled`.
    ///
    /// # Errors
    /// The first condition that does not hold, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        let Self { address, rows, columns, tile_rows, .. } = *self;
        check_tensor(address, &[columns, rows], &[columns.saturating_mul(2)], &[ROW, tile_rows])
    }
}

/// Checks the conditions of [`Matrix::check`] and [`Array::check`]. Sizes, strides and extents of boxes are listed from
/// the innermost dimension on.
#[cfg(not(target_arch = "nvptx64"))]
fn check_tensor(address: u64, sizes: &[u64], strides: &[u64], extent: &[u32]) -> Result<(), &'static str> {
    let conditions = [
        (address.is_multiple_of(16), "the address is a multiple of 16"),
        (sizes.iter().all(|size| (1..=1 << 32).contains(size)), "each size is between 1 and 2^32"),
        (strides.iter().all(|stride| stride.is_multiple_of(16)), "each stride is a multiple of 16 bytes"),
        (strides.iter().all(|stride| *stride < 1 << 40), "each stride is below 2^40 bytes"),
        (extent.iter().all(|n| (1..=256).contains(n)), "each extent of a box is between 1 and 256"),
    ];
    conditions.into_iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, condition)| Err(condition))
}

/// An array of 8-byte words in four dimensions, and the shape of the boxes that are copied from it: what a
/// [`TensorMap`] for [`load_box`] is made from. The first dimension is the innermost.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// Address of the first word, a multiple of 16.
    pub address: u64,
    /// Number of words in each dimension.
    pub sizes: [u64; 4],
    /// Bytes from one index to the next, in each dimension but the first; multiples of 16.
    pub strides: [u64; 3],
    /// Words of a box in each dimension, at most 256; in the first dimension an even number.
    pub extent: [u32; 4],
}

#[cfg(not(target_arch = "nvptx64"))]
impl Array {
    /// Checks that TMA can address the array, as [`Matrix::check`] does for a matrix.
    ///
    /// # Errors
    /// The first condition that does not hold, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        check_tensor(self.address, &self.sizes, &self.strides, &self.extent)?;
        if self.extent[0].is_multiple_of(2) { Ok(()) } else { Err("a row of a box is a multiple of 16 bytes") }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl TensorMap {
    /// The first word of an emulated map of a [`Matrix`].
    const EMULATED: u64 = 0x656d_756c_6174_6564;
    /// The first word of an emulated map of an [`Array`].
    const EMULATED_ARRAY: u64 = Self::EMULATED + 1;

    /// Makes a map of an array for the emulator.
    ///
    /// # Panics
    /// If TMA could not address the array ([`Array::check`]).
    #[must_use]
    #[track_caller]
    pub fn emulated_array(array: &Array) -> Self {
        if let Err(condition) = array.check() {
            panic!("TMA needs that {condition}: {array:?}");
        }
        let mut words = [0; 16];
        (words[0], words[1]) = (Self::EMULATED_ARRAY, array.address);
        words[2..6].copy_from_slice(&array.sizes);
        words[6..9].copy_from_slice(&array.strides);
        words[9..13].copy_from_slice(&array.extent.map(u64::from));
        Self(words)
    }

    /// The array that an emulated map describes; `None` if it is no such map.
    #[must_use]
    pub fn array(&self) -> Option<Array> {
        let [mark, address, a, b, c, d, e, f, g, h, i, j, k, ..] = self.0;
        let extent = [h, i, j, k].map(|n| n as u32);
        let array = Array { address, sizes: [a, b, c, d], strides: [e, f, g], extent };
        (mark == Self::EMULATED_ARRAY).then_some(array)
    }

    /// Makes a map of a matrix for the emulator.
    ///
    /// # Panics
    /// If TMA could not address the matrix ([`Matrix::check`]).
    #[must_use]
    #[track_caller]
    pub fn emulated(matrix: &Matrix) -> Self {
        if let Err(condition) = matrix.check() {
            panic!("TMA needs that {condition}: {matrix:?}");
        }
        let Matrix { address, rows, columns, tile_rows, swizzled } = *matrix;
        let (tile_rows, swizzled) = (u64::from(tile_rows), u64::from(swizzled));
        let mut words = [0; 16];
        words[..6].copy_from_slice(&[Self::EMULATED, address, rows, columns, tile_rows, swizzled]);
        Self(words)
    }

    /// The matrix that an emulated map describes; `None` if it is no such map.
    #[must_use]
    pub fn matrix(&self) -> Option<Matrix> {
        let [mark, address, rows, columns, tile_rows, swizzled, ..] = self.0;
        let matrix = Matrix { address, rows, columns, tile_rows: tile_rows as u32, swizzled: swizzled != 0 };
        (mark == Self::EMULATED).then_some(matrix)
    }
}

/// Where byte `offset` of a swizzled tile lies, in bytes from the tile's start: the 16-byte chunks of a row are
/// permuted by the row's number.
#[inline(always)]
#[must_use]
pub const fn swizzled(offset: u32) -> u32 {
    offset ^ ((offset >> 7 & 7) << 4)
}

/// Makes a map that the host wrote to device memory visible to the copies of this lane, and of the block's other lanes
/// once they have synchronised with it (`fence.proxy.tensormap::generic.acquire.gpu`).
///
/// # Safety
/// `map` is the address of a map, a multiple of 64.
#[inline(always)]
#[track_caller]
pub unsafe fn acquire(map: Global<TensorMap>) {
    // SAFETY: the caller's.
    unsafe { target::tensor_acquire(map.addr()) }
}

/// Starts a copy of the tile at column `x`, row `y` into shared memory (`cp.async.bulk.tensor.2d`). One lane issues it.
/// The bytes count towards `barrier`: always those of a whole tile, even if it reaches beyond the edge.
///
/// # Safety
/// `map` was [`acquire`]d; `destination` is a multiple of 1,024, or of 128 if tiles are not swizzled, with room for the
/// tile; the matrix is not written, nor the destination used, before the phase has ended.
#[inline(always)]
#[track_caller]
pub unsafe fn load<T>(destination: Shared<T>, map: Global<TensorMap>, [x, y]: [u32; 2], barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load(destination.addr(), map.addr(), x, y, barrier.place().addr()) }
}

/// Starts a copy of the box of an array that begins at word `at`, into shared memory (`cp.async.bulk.tensor.4d`). One
/// lane issues it. The box's words lie there without gaps, the first dimension innermost. Its bytes count towards
/// `barrier`.
///
/// # Safety
/// As [`load`], of tiles that are not swizzled.
#[inline(always)]
#[track_caller]
pub unsafe fn load_box<T>(destination: Shared<T>, map: Global<TensorMap>, at: [u32; 4], barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_box(destination.addr(), map.addr(), at, barrier.place().addr()) }
}

/// As [`load_box`], for data that nobody reads again soon: it is the first to be evicted from L2.
///
/// # Safety
/// As [`load_box`].
#[inline(always)]
#[track_caller]
pub unsafe fn load_box_once<T>(destination: Shared<T>, map: Global<TensorMap>, at: [u32; 4], barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_box_once(destination.addr(), map.addr(), at, barrier.place().addr()) }
}

/// As [`load`], but into every block of the cluster whose bit is set in `blocks` (`.multicast::cluster`). In each block
/// the tile lands at the same address, and counts towards the barrier at the same address.
///
/// # Safety
/// As [`load`], for each of the blocks.
#[inline(always)]
#[track_caller]
pub unsafe fn load_multicast<T>(
    destination: Shared<T>,
    map: Global<TensorMap>,
    [x, y]: [u32; 2],
    barrier: Barrier,
    blocks: u16,
) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_multicast(destination.addr(), map.addr(), x, y, barrier.place().addr(), blocks) }
}

/// Starts a copy of a tile from shared memory to column `x`, row `y` of the matrix. It belongs to the lane's open group
/// ([`bulk::commit`](crate::bulk::commit), [`bulk::wait_read`](crate::bulk::wait_read)). If ordinary stores wrote the
/// tile, the lanes that wrote it must have called [`bulk::fence_proxy_async`](crate::bulk::fence_proxy_async).
///
/// # Safety
/// As [`load`], in the other direction; the source is not written before its group was waited for.
#[inline(always)]
#[track_caller]
pub unsafe fn store<T>(map: Global<TensorMap>, [x, y]: [u32; 2], source: Shared<T>) {
    // SAFETY: the caller's.
    unsafe { store_if(true, map, [x, y], source) }
}

/// As [`store`], if `condition` holds. The instruction is predicated: there is no branch.
///
/// # Safety
/// As [`store`], if `condition` holds.
#[inline(always)]
#[track_caller]
pub unsafe fn store_if<T>(condition: bool, map: Global<TensorMap>, [x, y]: [u32; 2], source: Shared<T>) {
    // SAFETY: the caller's.
    unsafe { target::tensor_store_if(condition, map.addr(), x, y, source.addr()) }
}
