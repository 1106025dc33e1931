//! Copies fixed-size records between two regions by `(src, dst)` index pairs. This is how cache records go out to
//! pinned host memory, and come back from it.
//!
//! A record is a multiple of 16 bytes. Regions are addresses that the device can reach, so the same kernel gathers from
//! host memory, scatters to it, and moves records within the device. A warp copies one record at a time, and a lane
//! issues all of its loads before its first store: loads from host memory take long, and this way a lane's waits do not
//! add up. The grid is a few CTAs that stride over the pairs: [`SMS`] SMs keep up with the bus.
//!
//! Batches move records of [`PAGE_RECORD_BYTES`]. The crate `bench-kernels` has the same kernel for records of any size
//! and of [`MLA_RECORD_BYTES`], and the ladder of slower and sorted copies; docs/reference/kernels/token-copy.md has
//! the figures, and what they teach.
//!
//! # Addresses out of range
//! Every kernel leaves a pair alone whose source or destination is outside its region, and counts it.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, device, kernel, thread};

/// Bytes of a multi-head latent attention cache record: 512 fp8 values, 4 fp32 scales, 64 bf16 values.
pub const MLA_RECORD_BYTES: u32 = 512 + 4 * 4 + 64 * 2;
/// Bytes of a page of the host's memory, the other record size that is known at compile time.
pub const PAGE_RECORD_BYTES: u32 = 4096;
/// Record sizes and region addresses are multiples of this: what a lane moves at a time.
pub const UNIT_BYTES: u32 = 16;

/// Units of a record of [`MLA_RECORD_BYTES`].
pub const MLA_UNITS: u32 = MLA_RECORD_BYTES / UNIT_BYTES;
/// Units of a record of [`PAGE_RECORD_BYTES`].
pub const PAGE_UNITS: u32 = PAGE_RECORD_BYTES / UNIT_BYTES;
/// Threads of a CTA of the kernels that load before they store: as many as a CTA can have, so that few CTAs on few SMs
/// keep enough loads in flight.
pub const THREADS: u32 = 1024;
/// SMs for a copy over the bus: it is no faster with more.
pub const SMS: u32 = 16;

/// A record number, as the caller keeps them.
pub trait Index: Copy {
    /// The number; a negative one becomes larger than any region.
    fn record(self) -> u64;

    /// Notes in a slot map that record `i` was copied to `record`. Several lanes may do so at once.
    ///
    /// # Safety
    /// The map has an element `i`.
    unsafe fn note(map: GlobalMut<Self>, i: u64, record: u64);
}

macro_rules! indices {
    ($($t:ty)*) => { $(
        impl Index for $t {
            #[device]
            fn record(self) -> u64 {
                self as i64 as u64
            }
            #[device]
            unsafe fn note(map: GlobalMut<Self>, i: u64, record: u64) {
                // SAFETY: the caller's word.
                unsafe { atomic::store(map, i as usize, record as $t, Ordering::Relaxed, Scope::Device) }
            }
        }
    )* };
}
indices!(i32 i64);

/// The index pairs, and how many records the two regions have.
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
    /// Pair `i`; if there is none, a pair outside of both regions.
    ///
    /// # Safety
    /// The lists are as long as [`count`](Self::count) says, and the counter is live or null.
    #[device]
    pub unsafe fn get(&self, i: u64) -> (u64, u64) {
        if i < self.count {
            // SAFETY: the caller's word.
            unsafe { (self.src.load(i as usize).record(), self.dst.load(i as usize).record()) }
        } else {
            (u64::MAX, u64::MAX)
        }
    }

    /// Whether both records of a pair are in their regions.
    #[device]
    pub fn has(&self, (src, dst): (u64, u64)) -> bool {
        src < self.src_records && dst < self.dst_records
    }

    /// Adds `count` to the number of pairs that are not copied.
    ///
    /// # Safety
    /// The lists are as long as [`count`](Self::count) says, and the counter is live or null.
    #[device]
    pub unsafe fn refuse(&self, count: u32) {
        if !self.refused.is_null() {
            // SAFETY: the caller's word.
            unsafe { atomic::fetch_add(self.refused, 0, count, Ordering::Relaxed, Scope::Device) };
        }
    }

    /// Counts all pairs as not copied, once a launch.
    ///
    /// # Safety
    /// The lists are as long as [`count`](Self::count) says, and the counter is live or null.
    #[device]
    pub unsafe fn refuse_all(&self) {
        if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 {
            // SAFETY: the caller's word.
            unsafe { self.refuse(self.count.min(u32::MAX as u64) as u32) };
        }
    }
}

/// The two regions of a copy.
///
/// Records of the two must not overlap. Nothing is copied, and every pair counted as refused, when a region or the
/// record size is not a multiple of [`UNIT_BYTES`], or the size is not the one that the kernel is for.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Regions<I> {
    /// `[src_records, record_bytes]` the region to read.
    pub src: Global<u8>,
    /// `[dst_records, record_bytes]` the region to write. Where two pairs have one destination, each unit there comes
    /// from either.
    pub dst: GlobalMut<u8>,
    /// `[src_records]` the slot map: where a source record was copied to; one of the places if it was copied to
    /// several. May be null.
    pub map: GlobalMut<I>,
    /// Bytes of a record.
    pub record_bytes: u32,
}

impl<I: Index> Regions<I> {
    /// Whether every unit of every record is aligned, and the size is `units` units (0: any).
    #[device]
    pub fn fit(&self, units: u32) -> bool {
        (self.src.addr() | self.dst.addr() | self.record_bytes as u64).is_multiple_of(UNIT_BYTES as u64)
            && (units == 0 || self.record_bytes == units * UNIT_BYTES)
    }

    /// The size of a record in units, `units` if that is not 0.
    #[device]
    pub fn units(&self, units: u32) -> u32 {
        if units != 0 { units } else { self.record_bytes / UNIT_BYTES }
    }

    /// Where the two records of a pair start.
    ///
    /// # Safety
    /// Both are in their regions.
    #[device]
    pub unsafe fn records(&self, (src, dst): (u64, u64), units: u32) -> (Global<u8>, GlobalMut<u8>) {
        let size = (self.units(units) * UNIT_BYTES) as u64;
        // SAFETY: the caller's word.
        unsafe { (self.src.at((src * size) as usize), self.dst.at((dst * size) as usize)) }
    }

    /// Notes a pair in the slot map, if there is one. For one lane.
    ///
    /// # Safety
    /// The source is in its region, and the map is live or null.
    #[device]
    pub unsafe fn note(&self, (src, dst): (u64, u64)) {
        if !self.map.is_null() {
            // SAFETY: the caller's word.
            unsafe { I::note(self.map, src, dst) };
        }
    }
}

/// Parameters of the copies that take the pairs in the given order. Grid: any, since CTAs stride over the pairs; see
/// [`blocks`]. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct TokenCopy<I> {
    /// What to copy.
    pub pairs: Pairs<I>,
    /// From where to where.
    pub regions: Regions<I>,
}

/// How many CTAs of `threads` give each of `pairs` pairs a warp; `most` if that is fewer, and at least 1.
pub const fn blocks(pairs: u64, threads: u32, most: u32) -> u32 {
    let wanted = pairs.div_ceil((threads / 32) as u64);
    let blocks = if wanted < most as u64 { wanted } else { most as u64 };
    if blocks == 0 { 1 } else { blocks as u32 }
}

/// One warp's copy of a record of `units` units, `ROUNDS` units a lane at a time.
///
/// # Safety
/// Both records have so many units, and do not overlap.
#[device]
pub unsafe fn copy_record<const ROUNDS: usize>(from: Global<u8>, to: GlobalMut<u8>, units: u32) {
    let mut first = thread::lane_id();
    while first < units {
        let mut data = [[0u32; 4]; ROUNDS];
        unroll!(R < ROUNDS; {
            let unit = first + 32 * R as u32;
            if unit < units {
                // SAFETY: the caller's word.
                data[R] = unsafe { from.load16((unit * UNIT_BYTES) as usize) };
            }
        });
        unroll!(R < ROUNDS; {
            let unit = first + 32 * R as u32;
            if unit < units {
                // SAFETY: the caller's word.
                unsafe { to.store16((unit * UNIT_BYTES) as usize, data[R]) };
            }
        });
        first += 32 * ROUNDS as u32;
    }
}

/// Copies the records, one by each warp at a time. A warp reads its next pair while the current record is under way.
/// `UNITS` is the size of a record in units, or 0 for any.
///
/// # Safety
/// As the parameter block says; a CTA has [`THREADS`].
#[device]
pub unsafe fn copy<I: Index, const UNITS: u32, const ROUNDS: usize>(p: &TokenCopy<I>) {
    // SAFETY: the caller's word.
    unsafe {
        if !p.regions.fit(UNITS) {
            p.pairs.refuse_all();
            return;
        }
        let warps = THREADS / 32;
        let step = thread::grid_dim_x() as u64 * warps as u64;
        let mut i = thread::block_idx_x() as u64 * warps as u64 + thread::warp_id() as u64;
        let mut pair = p.pairs.get(i);
        while i < p.pairs.count {
            let next = p.pairs.get(i + step);
            if p.pairs.has(pair) {
                let (from, to) = p.regions.records(pair, UNITS);
                copy_record::<ROUNDS>(from, to, p.regions.units(UNITS));
                if thread::lane_id() == 0 {
                    p.regions.note(pair);
                }
            } else if thread::lane_id() == 0 {
                p.pairs.refuse(1);
            }
            pair = next;
            i += step;
        }
    }
}

/// Copies records of 4,096 bytes by `i32` pairs.
#[kernel(threads = 1024)]
pub unsafe fn token_copy_4096_i32(p: TokenCopy<i32>) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { copy::<_, PAGE_UNITS, 8>(&p) }
}
