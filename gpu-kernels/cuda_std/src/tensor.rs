//! Copies of tiles of a matrix between global and shared memory, by TMA (sm_90a).
//!
//! A [`TensorMap`] says where a matrix of bf16 lies and what a tile of it is. A tile is rows of 64 elements, 128 bytes
//! each, and lands in shared memory row after row; mostly in the 128-byte swizzle that `wgmma` reads without bank
//! conflicts: the 16-byte chunk `c` of row `r` lies at chunk `c ^ (r % 8)` of that row ([`swizzled`]). What lies beyond
//! the matrix's edge is read as zeros, and not written: memory is not asked for it.
//!
//! Under the emulator a map holds a plain description in place of the driver's encoding, and the copies are done from
//! that.

use crate::Global;
use crate::bulk::Barrier;
use crate::shared::Shared;
use crate::target;

/// Elements in a row of a tile.
pub const ROW: u32 = 64;

/// A tensor map as TMA reads it; made by the driver (or [`TensorMap::emulated`]), opaque here. Kernels take its
/// address.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct TensorMap(pub [u64; 16]);

/// A matrix of bf16 and its tiles: what a [`TensorMap`] is made from.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Rows, one after another in memory.
    pub rows: u64,
    /// Elements of a row, a multiple of 8.
    pub columns: u64,
    /// Rows of a tile, at most 256; it has [`ROW`] columns.
    pub tile_rows: u32,
    /// Whether tiles are swizzled.
    pub swizzled: bool,
}

#[cfg(not(target_arch = "nvptx64"))]
impl Matrix {
    /// `rows` of `columns` elements at `address`, one row right after another, in swizzled tiles of `tile_rows` rows.
    #[must_use]
    pub const fn dense(address: u64, rows: u64, columns: u64, tile_rows: u32) -> Self {
        Self { address, rows, columns, tile_rows, swizzled: true }
    }

    /// Whether TMA can address it: the conditions of the driver's `cuTensorMapEncodeTiled`.
    ///
    /// # Errors
    /// What must be so and is not, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        let Self { address, rows, columns, tile_rows, .. } = *self;
        check_tensor(address, &[columns, rows], &[columns.saturating_mul(2)], &[ROW, tile_rows])
    }
}

/// What [`Matrix::check`] and [`Array::check`] ask, of sizes, strides and boxes from the innermost dimension on.
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

/// An array of 8-byte words in four dimensions, and the boxes that are copied of it: what a [`TensorMap`] for
/// [`load_box`] is made from. Of all four, the first dimension is the innermost.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// Address of the first word, a multiple of 16.
    pub address: u64,
    /// Words in each dimension.
    pub sizes: [u64; 4],
    /// Bytes from one to the next in each dimension but the first, multiples of 16.
    pub strides: [u64; 3],
    /// Words of a box in each dimension, at most 256; of the first an even number.
    pub extent: [u32; 4],
}

#[cfg(not(target_arch = "nvptx64"))]
impl Array {
    /// Whether TMA can address it: see [`Matrix::check`].
    ///
    /// # Errors
    /// What must be so and is not, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        check_tensor(self.address, &self.sizes, &self.strides, &self.extent)?;
        if self.extent[0].is_multiple_of(2) { Ok(()) } else { Err("a row of a box is a multiple of 16 bytes") }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl TensorMap {
    /// Marks a map as one of the emulator's.
    const EMULATED: u64 = 0x656d_756c_6174_6564;
    /// Marks it as that of an [`Array`].
    const EMULATED_ARRAY: u64 = Self::EMULATED + 1;

    /// The map of an array that the emulator reads.
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

    /// The array of an emulator's map.
    #[must_use]
    pub fn array(&self) -> Option<Array> {
        let [mark, address, a, b, c, d, e, f, g, h, i, j, k, ..] = self.0;
        let extent = [h, i, j, k].map(|n| n as u32);
        let array = Array { address, sizes: [a, b, c, d], strides: [e, f, g], extent };
        (mark == Self::EMULATED_ARRAY).then_some(array)
    }

    /// The map that the emulator reads.
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

    /// The matrix of an emulator's map.
    #[must_use]
    pub fn matrix(&self) -> Option<Matrix> {
        let [mark, address, rows, columns, tile_rows, swizzled, ..] = self.0;
        let matrix = Matrix { address, rows, columns, tile_rows: tile_rows as u32, swizzled: swizzled != 0 };
        (mark == Self::EMULATED).then_some(matrix)
    }
}

/// Where byte `offset` of a tile lies, from its start: the 16-byte chunks of a row are permuted by the row's number.
#[inline(always)]
#[must_use]
pub const fn swizzled(offset: u32) -> u32 {
    offset ^ ((offset >> 7 & 7) << 4)
}

/// Makes a map that the host wrote to device memory visible to the copies of this lane
/// (`fence.proxy.tensormap::generic.acquire.gpu`).
///
/// # Safety
/// `map` is the address of a map, a multiple of 64.
#[inline(always)]
#[track_caller]
pub unsafe fn acquire(map: Global<TensorMap>) {
    // SAFETY: the caller's.
    unsafe { target::tensor_acquire(map.addr()) }
}

/// Starts a copy of the tile at column `x`, row `y`, whose bytes count towards `barrier`
/// (`cp.async.bulk.tensor.2d`). One lane issues it. All bytes of a tile count, beyond the edge or not.
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

/// Starts a copy of the box of an array that begins at word `at`, one row after another and so on, whose bytes count
/// towards `barrier` (`cp.async.bulk.tensor.4d`). One lane issues it.
///
/// # Safety
/// As [`load`], of tiles that are not swizzled.
#[inline(always)]
#[track_caller]
pub unsafe fn load_box<T>(destination: Shared<T>, map: Global<TensorMap>, at: [u32; 4], barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_box(destination.addr(), map.addr(), at, barrier.place().addr()) }
}

/// As [`load_box`]. Nobody reads the box again soon: it is the first to leave L2.
///
/// # Safety
/// As [`load_box`].
#[inline(always)]
#[track_caller]
pub unsafe fn load_box_once<T>(destination: Shared<T>, map: Global<TensorMap>, at: [u32; 4], barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_box_once(destination.addr(), map.addr(), at, barrier.place().addr()) }
}

/// As [`load`] into every block of the cluster whose bit is set in `blocks`, at the same place and towards the same
/// barrier in each (`.multicast::cluster`).
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

/// Starts the copy of a tile to column `x`, row `y`, as part of the lane's open group
/// ([`bulk::commit`](crate::bulk::commit), [`bulk::wait_read`](crate::bulk::wait_read)). What was written to the tile
/// by ordinary stores was fenced by its writers ([`bulk::fence_proxy_async`](crate::bulk::fence_proxy_async)).
///
/// # Safety
/// As [`load`], the other way; the source is not written before its group was waited for.
#[inline(always)]
#[track_caller]
pub unsafe fn store<T>(map: Global<TensorMap>, [x, y]: [u32; 2], source: Shared<T>) {
    // SAFETY: the caller's.
    unsafe { store_if(true, map, [x, y], source) }
}

/// As [`store`], where `condition` holds. No branch comes of it.
///
/// # Safety
/// As [`store`], where `condition` holds.
#[inline(always)]
#[track_caller]
pub unsafe fn store_if<T>(condition: bool, map: Global<TensorMap>, [x, y]: [u32; 2], source: Shared<T>) {
    // SAFETY: the caller's.
    unsafe { target::tensor_store_if(condition, map.addr(), x, y, source.addr()) }
}
