//! Copies of tiles of a tensor between global and shared memory, by the copy engine (sm_90a).
//!
//! A [`TensorMap`] says where a tensor of bf16 lies and what a tile of it is. A tile is rows of 64 elements, 128 bytes each, and lands
//! in shared memory row after row in the 128-byte swizzle that `wgmma` reads without bank conflicts: the 16-byte chunk `c` of
//! row `r` lies at chunk `c ^ (r % 8)` of that row ([`swizzled`]). What lies beyond the tensor's edge is read as zeros, and not written.
//!
//! Under the emulator a map holds a plain description in place of the driver's encoding, and the copies are done from that.

use crate::Global;
use crate::bulk::Barrier;
use crate::shared::Shared;
use crate::target;

/// Elements in a row of a tile.
pub const ROW: u32 = 64;

/// A tensor map as the copy engine reads it; made by the driver (or [`TensorMap::emulated`]), opaque here. Kernels take its address.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct TensorMap(pub [u64; 16]);

/// A tensor of bf16 and its tiles: what a [`TensorMap`] is made from. Dimension 0 is contiguous.
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Elements in each dimension; 1 where there is none.
    pub sizes: [u64; 4],
    /// Bytes from one element to the next in dimensions 1 to 3, multiples of 16.
    pub strides: [u64; 3],
    /// Elements of a tile in dimensions 1 to 3; in dimension 0 there are [`ROW`].
    pub tile: [u32; 3],
    /// Dimensions: 2 or 4.
    pub rank: u32,
}

#[cfg(not(target_arch = "nvptx64"))]
impl Tensor {
    /// A row-major matrix `[rows, columns]`, in tiles of `tile_rows` rows.
    #[must_use]
    pub fn matrix(address: u64, rows: usize, columns: usize, tile_rows: u32) -> Self {
        let row = columns as u64 * 2;
        Self {
            address,
            sizes: [columns as u64, rows as u64, 1, 1],
            strides: [row, row * rows as u64, row * rows as u64],
            tile: [tile_rows, 1, 1],
            rank: 2,
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl TensorMap {
    /// Marks a map as one of the emulator's.
    const EMULATED: u64 = 0x656d_756c_6174_6564;

    /// The map that the emulator reads.
    #[must_use]
    pub fn emulated(tensor: &Tensor) -> Self {
        let Tensor { address, sizes, strides, tile, rank } = *tensor;
        let mut words = [0; 16];
        words[0] = Self::EMULATED;
        words[1] = address;
        words[2..6].copy_from_slice(&sizes);
        words[6..9].copy_from_slice(&strides);
        words[9..12].copy_from_slice(&tile.map(u64::from));
        words[12] = u64::from(rank);
        Self(words)
    }

    /// The tensor of an emulator's map.
    #[must_use]
    pub fn tensor(&self) -> Option<Tensor> {
        let words = &self.0;
        (words[0] == Self::EMULATED).then(|| Tensor {
            address: words[1],
            sizes: [2, 3, 4, 5].map(|i| words[i]),
            strides: [6, 7, 8].map(|i| words[i]),
            tile: [9, 10, 11].map(|i| words[i] as u32),
            rank: words[12] as u32,
        })
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

/// Starts a copy of the tile at column `x`, row `y` of a matrix, whose bytes count towards `barrier`
/// (`cp.async.bulk.tensor.2d`). One lane issues it. All bytes of a tile count, beyond the edge or not.
///
/// # Safety
/// `map` was [`acquire`]d and has rank 2; `destination` is a multiple of 1,024 with room for the tile; the tensor is not written, nor
/// the destination used, before the phase has ended.
#[inline(always)]
#[track_caller]
pub unsafe fn load_2d<T>(destination: Shared<T>, map: Global<TensorMap>, [x, y]: [u32; 2], barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_2d(destination.addr(), map.addr(), x, y, barrier.place().addr()) }
}

/// As [`load_2d`], for a map of rank 4.
///
/// # Safety
/// As [`load_2d`].
#[inline(always)]
#[track_caller]
pub unsafe fn load_4d<T>(destination: Shared<T>, map: Global<TensorMap>, at: [u32; 4], barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_4d(destination.addr(), map.addr(), at, barrier.place().addr()) }
}

/// As [`load_2d`] into every block of the cluster whose bit is set in `blocks`, at the same place and towards the same barrier in each
/// (`.multicast::cluster`). The emulator has no clusters, and takes 1 alone.
///
/// # Safety
/// As [`load_2d`], for each of the blocks.
#[inline(always)]
#[track_caller]
pub unsafe fn load_2d_multicast<T>(
    destination: Shared<T>,
    map: Global<TensorMap>,
    [x, y]: [u32; 2],
    barrier: Barrier,
    blocks: u16,
) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_2d_multicast(destination.addr(), map.addr(), x, y, barrier.place().addr(), blocks) }
}

/// As [`load_2d_multicast`], for a map of rank 4.
///
/// # Safety
/// As [`load_2d_multicast`].
#[inline(always)]
#[track_caller]
pub unsafe fn load_4d_multicast<T>(
    destination: Shared<T>,
    map: Global<TensorMap>,
    at: [u32; 4],
    barrier: Barrier,
    blocks: u16,
) {
    // SAFETY: the caller's.
    unsafe { target::tensor_load_4d_multicast(destination.addr(), map.addr(), at, barrier.place().addr(), blocks) }
}

/// Starts the copy of a tile to column `x`, row `y` of a matrix, as part of the lane's open group
/// ([`bulk::commit`](crate::bulk::commit), [`bulk::wait_read`](crate::bulk::wait_read)). What was written to the tile by ordinary stores
/// was fenced by its writers ([`bulk::fence_proxy_async`](crate::bulk::fence_proxy_async)).
///
/// # Safety
/// As [`load_2d`], the other way; the source is not written before its group was waited for.
#[inline(always)]
#[track_caller]
pub unsafe fn store_2d<T>(map: Global<TensorMap>, [x, y]: [u32; 2], source: Shared<T>) {
    // SAFETY: the caller's.
    unsafe { target::tensor_store_2d(map.addr(), x, y, source.addr()) }
}
