//! Copies fixed-size records between two regions by `(src, dst)` index pairs: the way of cache records back from pinned
//! host memory, and out to it.
//!
//! A record is a multiple of 16 bytes. Regions are addresses that the device can reach, so the same kernel gathers from
//! host memory, scatters to it, and moves records within the device. The published figures are for records of
//! [`MLA_RECORD_BYTES`] = 656 bytes.
//!
//! # Shape of the work
//! A warp takes a record, 16 bytes a lane, so that a record of 656 bytes is 41 *units* in two rounds. All of a lane's
//! loads are issued before its first store: a load from host memory takes over a microsecond, and waits of the same
//! lane must not add up. Warps stride over the pairs, and read the indices of the next pair while the current one is
//! under way.
//!
//! # Ladder
//! 1. `token_copy_bytewise_i32`: a thread a record, a byte at a time; every byte is a request of its own.
//! 2. `token_copy_i32`: a warp a record of any size.
//! 3. `token_copy_656_i32`: the size known to the compiler, which leaves no loop, and one comparison.
//!
//! Plain loads that may stay in L1 are the fastest of those measured (bulk copies and streaming loads are slower):
//! neighbouring records share lines of 128 bytes, and repeated ones all of theirs.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, kernel, thread};

/// Bytes of a multi-head latent attention cache record: 512 fp8 values, 4 fp32 scales, 64 bf16 values.
pub const MLA_RECORD_BYTES: u32 = 512 + 4 * 4 + 64 * 2;
/// Record sizes and region addresses are multiples of this: what a lane moves at a time.
pub const UNIT_BYTES: u32 = 16;

/// Threads of a block.
pub const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
const MLA_UNITS: u32 = MLA_RECORD_BYTES / UNIT_BYTES;

/// A record number.
pub trait Index: Copy {
    /// The number; a negative one becomes larger than any region.
    fn record(self) -> u64;
}
impl Index for i32 {
    #[inline(always)]
    fn record(self) -> u64 {
        self as i64 as u64
    }
}
impl Index for i64 {
    #[inline(always)]
    fn record(self) -> u64 {
        self as u64
    }
}

/// Parameters of every kernel of this module. Grid: any; see [`blocks`]. No shared memory.
///
/// A pair whose source or destination is outside its region is not copied, but counted. So is every pair when a region
/// or the record size is not a multiple of [`UNIT_BYTES`], or the size is not the one that the kernel is for. Records
/// of the two regions must not overlap. Where two pairs have one destination, each unit there comes from either.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TokenCopy<I> {
    /// `[src_records, record_bytes]` the region to read.
    pub src: Global<u8>,
    /// `[dst_records, record_bytes]` the region to write.
    pub dst: GlobalMut<u8>,
    /// `[pairs]` record numbers in `src`.
    pub src_index: Global<I>,
    /// `[pairs]` record numbers in `dst`.
    pub dst_index: Global<I>,
    /// `[1]`: the number of pairs not copied is added to it. May be null.
    pub errors: GlobalMut<u32>,
    /// Pairs.
    pub pairs: u64,
    /// Records in `src`.
    pub src_records: u64,
    /// Records in `dst`.
    pub dst_records: u64,
    /// Bytes of a record.
    pub record_bytes: u32,
}

/// A grid for `pairs` pairs, a warp each, on a device with `multiprocessors`: no more blocks than can run at once. For
/// the bytewise kernels, whose threads stride too, it is just as good.
pub const fn blocks(pairs: u64, multiprocessors: u32) -> u32 {
    let wanted = pairs.div_ceil(WARPS as u64);
    let resident = multiprocessors as u64 * (2048 / THREADS) as u64;
    let blocks = if wanted < resident { wanted } else { resident };
    if blocks == 0 { 1 } else { blocks as u32 }
}

impl<I: Index> TokenCopy<I> {
    /// Whether every unit of every record is aligned.
    #[inline(always)]
    fn is_aligned(&self) -> bool {
        (self.src.addr() | self.dst.addr() | self.record_bytes as u64).is_multiple_of(UNIT_BYTES as u64)
    }

    /// The records of pair `i`, or numbers that are in no region when there is no such pair.
    #[inline(always)]
    unsafe fn pair(&self, i: u64) -> (u64, u64) {
        if i < self.pairs {
            unsafe { (self.src_index.load(i as usize).record(), self.dst_index.load(i as usize).record()) }
        } else {
            (u64::MAX, u64::MAX)
        }
    }

    /// Where the two records of a pair start, if both are in their regions.
    #[inline(always)]
    unsafe fn records(&self, (src, dst): (u64, u64)) -> Option<(Global<u8>, GlobalMut<u8>)> {
        if src < self.src_records && dst < self.dst_records {
            let size = self.record_bytes as u64;
            Some(unsafe { (self.src.at((src * size) as usize), self.dst.at((dst * size) as usize)) })
        } else {
            None
        }
    }

    /// Counts pairs that are not copied.
    #[inline(always)]
    unsafe fn refuse(&self, count: u32) {
        if !self.errors.is_null() {
            unsafe { atomic::fetch_add(self.errors, 0, count, Ordering::Relaxed, Scope::Device) };
        }
    }

    /// Counts all pairs, once a launch.
    #[inline(always)]
    unsafe fn refuse_all(&self) {
        if thread::block_idx_x() == 0 && thread::thread_idx_x() == 0 {
            unsafe { self.refuse(self.pairs.min(u32::MAX as u64) as u32) };
        }
    }
}

/// One warp's copy of a record of `units` units, `ROUNDS` units a lane at a time.
#[inline(always)]
unsafe fn copy_record<const ROUNDS: usize>(from: Global<u8>, to: GlobalMut<u8>, units: u32) {
    let mut first = thread::lane_id();
    while first < units {
        let mut data = [[0u32; 4]; ROUNDS];
        let mut round = 0;
        while round < ROUNDS {
            let unit = first + 32 * round as u32;
            if unit < units {
                data[round] = unsafe { from.load16((unit * UNIT_BYTES) as usize) };
            }
            round += 1;
        }
        let mut round = 0;
        while round < ROUNDS {
            let unit = first + 32 * round as u32;
            if unit < units {
                unsafe { to.store16((unit * UNIT_BYTES) as usize, data[round]) };
            }
            round += 1;
        }
        first += 32 * ROUNDS as u32;
    }
}

/// A warp a record. `UNITS` is the size of a record, or 0 for any.
#[inline(always)]
unsafe fn copy<I: Index, const UNITS: u32, const ROUNDS: usize>(p: &TokenCopy<I>) {
    unsafe {
        if !p.is_aligned() || (UNITS != 0 && p.record_bytes != UNITS * UNIT_BYTES) {
            p.refuse_all();
            return;
        }
        let units = if UNITS != 0 { UNITS } else { p.record_bytes / UNIT_BYTES };
        let step = thread::grid_dim_x() as u64 * WARPS as u64;
        let mut i = thread::block_idx_x() as u64 * WARPS as u64 + thread::warp_id() as u64;
        let mut pair = p.pair(i);
        while i < p.pairs {
            let next = p.pair(i + step);
            if let Some((from, to)) = p.records(pair) {
                copy_record::<ROUNDS>(from, to, units);
            } else if thread::lane_id() == 0 {
                p.refuse(1);
            }
            pair = next;
            i += step;
        }
    }
}

/// A thread a record, a byte at a time.
#[inline(always)]
unsafe fn copy_bytewise<I: Index>(p: &TokenCopy<I>) {
    unsafe {
        if !p.is_aligned() {
            p.refuse_all();
            return;
        }
        let step = thread::grid_dim_x() as u64 * THREADS as u64;
        let mut i = thread::block_idx_x() as u64 * THREADS as u64 + thread::thread_idx_x() as u64;
        while i < p.pairs {
            if let Some((from, to)) = p.records(p.pair(i)) {
                let mut byte = 0;
                while byte < p.record_bytes as usize {
                    to.store(byte, from.load(byte));
                    byte += 1;
                }
            } else {
                p.refuse(1);
            }
            i += step;
        }
    }
}

macro_rules! kernels {
    ($($index:ty: $any:ident $mla:ident $bytewise:ident;)*) => { $(
        #[doc = concat!("Copies records of any size by `", stringify!($index), "` pairs, a warp a record.")]
        #[kernel(threads = THREADS)]
        pub unsafe fn $any(p: TokenCopy<$index>) {
            unsafe { copy::<$index, 0, 4>(&p) }
        }
        #[doc = concat!("Copies records of [`MLA_RECORD_BYTES`] by `", stringify!($index), "` pairs, a warp a record.")]
        #[kernel(threads = THREADS)]
        pub unsafe fn $mla(p: TokenCopy<$index>) {
            unsafe { copy::<$index, MLA_UNITS, 2>(&p) }
        }
        #[doc = concat!("Copies records by `", stringify!($index), "` pairs, a byte at a time: the baseline.")]
        #[kernel(threads = THREADS)]
        pub unsafe fn $bytewise(p: TokenCopy<$index>) {
            unsafe { copy_bytewise(&p) }
        }
    )* };
}

kernels! {
    i32: token_copy_i32 token_copy_656_i32 token_copy_bytewise_i32;
    i64: token_copy_i64 token_copy_656_i64 token_copy_bytewise_i64;
}
