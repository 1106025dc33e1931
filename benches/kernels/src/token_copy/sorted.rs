//! The copies that take the pairs sorted by source.
//!
//! A warp takes 32 sorted pairs at a time, one in each lane, and passes them round by shuffles.
//!
//! # Safety
//! A launch has memory as its parameter block says. Lanes may store to one record at once, where pairs share a
//! destination; nobody reads it meanwhile.

use cuda_std::{Global, device, kernel, thread, warp};
use gpu_kernels::unroll;

use super::{Index, MLA_UNITS, NONE, PAGE_UNITS, Regions, THREADS, UNIT_BYTES, copy_record};

/// Threads of a CTA of the grouped copy. A warp has up to eight records in flight, so four warps on each of a few SMs
/// are enough, and most registers are left to the kernels of other queues.
pub const GROUPED_THREADS: u32 = 128;
/// Records of a group: eight times 656 bytes are 41 lines of 128 bytes; fewer records are not whole lines.
pub const GROUP: u32 = 1 << GROUP_SHIFT;
/// The logarithm of `GROUP`: the [`super::Sort::shift`] that brings groups together without ordering their records.
pub const GROUP_SHIFT: u32 = 3;
/// Rounds of 32 units in which a warp reads a group.
const GROUP_ROUNDS: usize = (GROUP * MLA_UNITS).div_ceil(32) as usize;

/// Parameters of the kernels of this module. Grid: any. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct SortedCopy<I> {
    /// `[total]` the pairs that `token_copy_scatter` wrote, all of them in their regions.
    pub sorted: Global<u64>,
    /// `[1]` how many pairs there are.
    pub total: Global<u32>,
    /// The two regions. Records that do not fit the kernel are not copied.
    pub regions: Regions<I>,
}

impl<I: Index> SortedCopy<I> {
    /// Calls `body` with the warp's next pairs, one in each lane, and their number, until there are no more.
    ///
    /// # Safety
    /// As the parameter block says. Whole CTAs of so many `warps` call it.
    #[device]
    unsafe fn for_each_32(&self, warps: u32, body: impl Fn(u32, u32, u32)) {
        // SAFETY: the caller's word.
        let total = unsafe { self.total.load(0) } as u64;
        let step = thread::grid_dim_x() as u64 * warps as u64 * 32;
        let mut first = (thread::block_idx_x() as u64 * warps as u64 + thread::warp_id() as u64) * 32;
        while first < total {
            let i = first + thread::lane_id() as u64;
            // SAFETY: the caller's word; there are so many pairs.
            let pair = if i < total { unsafe { self.sorted.load(i as usize) } } else { u64::MAX };
            let left = total - first;
            body(pair as u32, (pair >> 32) as u32, if left < 32 { left as u32 } else { 32 });
            first += step;
        }
    }
}

/// One warp a record. A record that is in the registers already is not read again. `UNITS` is the size of a record, or
/// 0 for any.
///
/// # Safety
/// As the parameter block says. Whole CTAs of [`THREADS`] call it. `ROUNDS` of 32 units hold `UNITS`.
#[device]
unsafe fn copy<I: Index, const UNITS: u32, const ROUNDS: usize>(p: &SortedCopy<I>) {
    // SAFETY: the caller's word. The first `count` lanes have pairs, both of whose records are in their regions; these
    // fit, so that a unit below `UNITS` is of its record, and aligned.
    unsafe {
        if !p.regions.fit(UNITS) {
            return;
        }
        let lane = thread::lane_id();
        p.for_each_32(THREADS / 32, |src, dst, count| {
            let mut held = NONE;
            let mut data = [[0u32; 4]; ROUNDS];
            let mut i = 0;
            while i < count {
                let pair = (warp::shuffle_idx(src, i) as u64, warp::shuffle_idx(dst, i) as u64);
                let (from, to) = p.regions.records(pair, UNITS);
                if UNITS == 0 {
                    copy_record::<ROUNDS>(from, to, p.regions.units(0));
                } else {
                    if pair.0 as u32 != held {
                        unroll!(R < ROUNDS; {
                            let unit = lane + 32 * R as u32;
                            if unit < UNITS {
                                data[R] = from.load16((unit * UNIT_BYTES) as usize);
                            }
                        });
                        held = pair.0 as u32;
                    }
                    unroll!(R < ROUNDS; {
                        let unit = lane + 32 * R as u32;
                        if unit < UNITS {
                            to.store16((unit * UNIT_BYTES) as usize, data[R]);
                        }
                    });
                }
                i += 1;
            }
            if lane < count {
                p.regions.note((src as u64, dst as u64));
            }
        });
    }
}

/// One warp for each group of eight records of 656 bytes, which it reads as whole lines.
///
/// Lane `l` holds unit `32 r + l` of the group in each round `r`. Lane `s`, below eight, also notes for record `s` of
/// the group which of the 32 pairs want it. The warp reads, once, what any pair wants. Then it writes each record to
/// the destination of the record's first pair, all records together; then to that of the second pair, and so on.
///
/// # Safety
/// As the parameter block says. Whole CTAs of [`GROUPED_THREADS`] call it.
#[device]
unsafe fn copy_grouped<I: Index>(p: &SortedCopy<I>) {
    // SAFETY: the caller's word. The first `count` lanes have pairs, both of whose records are in their regions; these
    // fit, so that units are aligned. A group is some pair's: it begins in the source, and of its records only those
    // that a pair wants are read. A place that is not `NONE` is some pair's destination.
    unsafe {
        if !p.regions.fit(MLA_UNITS) {
            return;
        }
        let lane = thread::lane_id();
        p.for_each_32(GROUPED_THREADS / 32, |src, dst, count| {
            let group = if lane < count { src >> GROUP_SHIFT } else { NONE };
            let mut left = warp::ballot(lane < count);
            while left != 0 {
                let this = warp::shuffle_idx(group, left.trailing_zeros());
                left &= !warp::ballot(group == this);
                let mut wanted = 0;
                unroll!(S < GROUP; {
                    let by = warp::ballot(group == this && src % GROUP == S as u32);
                    wanted = if lane == S as u32 { by } else { wanted };
                });
                let from = p.regions.src.at((this as u64 * (GROUP * MLA_UNITS * UNIT_BYTES) as u64) as usize);
                let mut data = [[0u32; 4]; GROUP_ROUNDS];
                unroll!(R < GROUP_ROUNDS; {
                    let unit = lane + 32 * R as u32;
                    // Lanes from the eighth on note nothing, so units past the eighth record are not read.
                    if warp::shuffle_idx(wanted, unit / MLA_UNITS) != 0 {
                        data[R] = from.load16((unit * UNIT_BYTES) as usize);
                    }
                });
                while warp::any(wanted != 0) {
                    let place = warp::shuffle_idx(dst, wanted.trailing_zeros());
                    let place = if wanted != 0 { place } else { NONE };
                    wanted &= wanted.wrapping_sub(1);
                    unroll!(R < GROUP_ROUNDS; {
                        let unit = lane + 32 * R as u32;
                        let record = unit / MLA_UNITS;
                        let place = warp::shuffle_idx(place, record);
                        if place != NONE {
                            let at = place as u64 * (MLA_UNITS * UNIT_BYTES) as u64;
                            let at = at + ((unit - record * MLA_UNITS) * UNIT_BYTES) as u64;
                            p.regions.dst.store16(at as usize, data[R]);
                        }
                    });
                }
            }
            if lane < count {
                p.regions.note((src as u64, dst as u64));
            }
        });
    }
}

macro_rules! kernels {
    ($($index:ty: $any:ident $mla:ident $page:ident $grouped:ident;)*) => { $(
        #[doc = concat!("Copies sorted records of any size, with a slot map of `", stringify!($index), "`.")]
        #[kernel(threads = 1024, module = "bench")]
        pub unsafe fn $any(p: SortedCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy::<_, 0, 4>(&p) }
        }
        #[doc = concat!("Copies sorted records of 656 bytes, with a slot map of `", stringify!($index), "`.")]
        #[kernel(threads = 1024, module = "bench")]
        pub unsafe fn $mla(p: SortedCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy::<_, MLA_UNITS, 2>(&p) }
        }
        #[doc = concat!("Copies sorted records of 4,096 bytes, with a slot map of `", stringify!($index), "`.")]
        #[kernel(threads = 1024, module = "bench")]
        pub unsafe fn $page(p: SortedCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy::<_, PAGE_UNITS, 8>(&p) }
        }
        #[doc = concat!("Copies sorted records of 656 bytes in groups of eight, with a slot map of `", stringify!($index), "`.")]
        #[kernel(threads = 128, module = "bench")]
        pub unsafe fn $grouped(p: SortedCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy_grouped(&p) }
        }
    )* };
}

kernels! {
    i32: token_copy_sorted_i32 token_copy_sorted_656_i32 token_copy_sorted_4096_i32 token_copy_grouped_656_i32;
    i64: token_copy_sorted_i64 token_copy_sorted_656_i64 token_copy_sorted_4096_i64 token_copy_grouped_656_i64;
}
