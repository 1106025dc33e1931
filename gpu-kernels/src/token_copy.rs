//! Copies fixed-size records between two regions by `(src, dst)` index pairs: the way of cache records back from pinned
//! host memory, and out to it.
//!
//! A record is a multiple of 16 bytes. Regions are addresses that the device can reach, so the same kernels gather from
//! host memory, scatter to it, and move records within the device. The published figures are for records of
//! [`MLA_RECORD_BYTES`] = 656 bytes. docs/reference/kernels/token-copy.md has the figures, and what they teach.
//!
//! # Ladder
//! Each of these copies the same pairs; [`ladder`] has the first five, [`sorted`] the others. `_i32` and `_i64` name the indices.
//! 1. `token_copy_bytewise`: a thread a record, a byte at a time; every byte is a request of its own.
//! 2. `token_copy_vectors`: a thread a record, 16 bytes at a time.
//! 3. `token_copy_warp`: a warp a record, 16 bytes a lane: a warp's loads are neighbours, and travel as whole lines.
//! 4. `token_copy` (any size), `token_copy_656`, `token_copy_4096`: all of a lane's loads before its first store. A load
//!    from host memory takes over a microsecond, and the waits of a lane no longer add up.
//! 5. The same with a grid of a few blocks that stride over the pairs: the bus is slow enough for sixteen multiprocessors.
//! 6. `token_copy_sorted`, `…_656`, `…_4096`: the pairs in order of their sources ([`sort`]), so that repeated records
//!    are read once, and the lines that neighbours share are still in L1.
//! 7. `token_copy_grouped_656`: eight neighbouring records are 41 whole lines. A warp reads them as such, each line once,
//!    and writes each record to as many places as want it.
//!
//! # Addresses out of range
//! Every kernel leaves a pair alone whose source or destination is outside its region, and counts it.

pub mod ladder;
pub mod sort;
pub mod sorted;

pub use ladder::*;
pub use sort::*;
pub use sorted::*;

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, thread};

/// Bytes of a multi-head latent attention cache record: 512 fp8 values, 4 fp32 scales, 64 bf16 values.
pub const MLA_RECORD_BYTES: u32 = 512 + 4 * 4 + 64 * 2;
/// Bytes of the other record that the compiler knows: a page of the host's memory.
pub const PAGE_RECORD_BYTES: u32 = 4096;
/// Record sizes and region addresses are multiples of this: what a lane moves at a time.
pub const UNIT_BYTES: u32 = 16;

const MLA_UNITS: u32 = MLA_RECORD_BYTES / UNIT_BYTES;
const PAGE_UNITS: u32 = PAGE_RECORD_BYTES / UNIT_BYTES;
/// No record: regions have fewer records than this.
const NONE: u32 = u32::MAX;

/// A record number, as the caller keeps them.
pub trait Index: Copy {
    /// The number; a negative one becomes larger than any region.
    fn record(self) -> u64;

    /// Notes in a slot map that record `i` was copied to `record`. Several lanes may at once.
    ///
    /// # Safety
    /// The map has an element `i`.
    unsafe fn note(map: GlobalMut<Self>, i: u64, record: u64);
}

macro_rules! indices {
    ($($t:ty)*) => { $(
        impl Index for $t {
            #[inline(always)]
            fn record(self) -> u64 {
                self as i64 as u64
            }
            #[inline(always)]
            unsafe fn note(map: GlobalMut<Self>, i: u64, record: u64) {
                unsafe { atomic::store(map, i as usize, record as $t, Ordering::Relaxed, Scope::Device) }
            }
        }
    )* };
}
indices!(i32 i64);

/// The pairs, and how large the regions are that they speak of.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Pairs<I> {
    /// `[count]` record numbers in the source.
    pub src: Global<I>,
    /// `[count]` record numbers in the destination.
    pub dst: Global<I>,
    /// Pairs.
    pub count: u64,
    /// Records in the source.
    pub src_records: u64,
    /// Records in the destination.
    pub dst_records: u64,
    /// `[1]`: the number of pairs refused is added to it. May be null.
    pub refused: GlobalMut<u32>,
}

impl<I: Index> Pairs<I> {
    /// Pair `i`, if there is one.
    #[inline(always)]
    unsafe fn get(&self, i: u64) -> (u64, u64) {
        if i < self.count {
            unsafe { (self.src.load(i as usize).record(), self.dst.load(i as usize).record()) }
        } else {
            (u64::MAX, u64::MAX)
        }
    }

    /// Whether both records of a pair are in their regions.
    #[inline(always)]
    fn has(&self, (src, dst): (u64, u64)) -> bool {
        src < self.src_records && dst < self.dst_records
    }

    /// Counts pairs that are not copied.
    #[inline(always)]
    unsafe fn refuse(&self, count: u32) {
        if !self.refused.is_null() {
            unsafe { atomic::fetch_add(self.refused, 0, count, Ordering::Relaxed, Scope::Device) };
        }
    }

    /// Counts all pairs, once a launch.
    #[inline(always)]
    unsafe fn refuse_all(&self) {
        if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 {
            unsafe { self.refuse(self.count.min(u32::MAX as u64) as u32) };
        }
    }
}

/// The two regions of a copy.
///
/// Records of the two must not overlap. Nothing is copied, and every pair counted as refused, when a region or the record
/// size is not a multiple of [`UNIT_BYTES`], or the size is not the one that the kernel is for.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Regions<I> {
    /// `[src_records, record_bytes]` the region to read.
    pub src: Global<u8>,
    /// `[dst_records, record_bytes]` the region to write. Where two pairs have one destination, each unit there comes from either.
    pub dst: GlobalMut<u8>,
    /// `[src_records]` the slot map: where a source record was copied to; one of the places if it was copied to several. May be null.
    pub map: GlobalMut<I>,
    /// Bytes of a record.
    pub record_bytes: u32,
}

impl<I: Index> Regions<I> {
    /// Whether every unit of every record is aligned, and the size is `units` units (0: any).
    #[inline(always)]
    fn fit(&self, units: u32) -> bool {
        (self.src.addr() | self.dst.addr() | self.record_bytes as u64).is_multiple_of(UNIT_BYTES as u64)
            && (units == 0 || self.record_bytes == units * UNIT_BYTES)
    }

    /// The size of a record in units, `units` if that is not 0.
    #[inline(always)]
    fn units(&self, units: u32) -> u32 {
        if units != 0 { units } else { self.record_bytes / UNIT_BYTES }
    }

    /// Where the two records of a pair start.
    #[inline(always)]
    unsafe fn records(&self, (src, dst): (u64, u64), units: u32) -> (Global<u8>, GlobalMut<u8>) {
        let size = (self.units(units) * UNIT_BYTES) as u64;
        unsafe { (self.src.at((src * size) as usize), self.dst.at((dst * size) as usize)) }
    }

    /// Notes a pair in the slot map, if there is one. For one lane.
    #[inline(always)]
    unsafe fn note(&self, (src, dst): (u64, u64)) {
        if !self.map.is_null() {
            unsafe { I::note(self.map, src, dst) };
        }
    }
}
