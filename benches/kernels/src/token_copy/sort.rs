//! Checks pairs, and sorts them.
//!
//! A counting sort in three launches. `token_copy_count` counts the pairs in each bucket of neighbouring records, and
//! keeps the rank of each pair in its bucket. `token_copy_scan` turns the counts into positions. `token_copy_scatter`
//! writes each pair to its bucket's position plus its rank. Buckets are in order within a chunk of [`SCAN_CHUNK`]. The
//! chunks are in the order in which their CTAs came to add their sums: the copy needs no more order than that, and no
//! CTA waits for another. Within a bucket, and so within a repeated record, pairs may come in any order.
//!
//! # Safety
//! A launch has memory and shared memory as its parameter block says. The three launches of a sort run one after
//! another, with the same pairs and buckets, and nobody else writes these arrays meanwhile. CTAs have [`SORT_THREADS`].

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, device, kernel, shared, thread, warp};
use gpu_kernels::unroll;

use super::{Index, NONE, Pairs};

/// Threads of a CTA of the kernels of this module: half of what an SM's registers allow, which leaves room for the
/// kernels of other queues.
pub const SORT_THREADS: u32 = 512;
const WARPS: u32 = SORT_THREADS / 32;
/// Counts that a CTA scans at a time, eight a thread; the number of counts is padded to a multiple of it.
pub const SCAN_CHUNK: u32 = SORT_THREADS * 8;
/// Dynamic shared memory of the scan: the warps' sums, and where the chunk begins.
pub const SCAN_SHARED_BYTES: u32 = (WARPS + 1) * 4;
/// Pairs for which a thread has memory accesses in flight at the same time.
const AT_ONCE: usize = 4;

/// Parameters of `token_copy_check`. Grid: any. No shared memory. Only counts refusals.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Check<I> {
    /// The pairs to check.
    pub pairs: Pairs<I>,
}

/// Parameters of `token_copy_count` and `token_copy_scatter`. Grid: any. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Sort<I> {
    /// The pairs to sort; refused pairs are left out. Regions have fewer than 2³² − 1 records, and there are fewer
    /// pairs than that.
    pub pairs: Pairs<I>,
    /// `[buckets]`: zero before the count; then the number of pairs in each bucket; after the scan, where each bucket
    /// begins.
    pub counts: GlobalMut<u32>,
    /// `[pairs]` the rank of each pair in its bucket.
    pub ranks: GlobalMut<u32>,
    /// `[pairs]` the pairs in order: the source in the low half, the destination in the high one. Out.
    pub sorted: GlobalMut<u64>,
    /// A bucket is `2^shift` neighbouring records.
    pub shift: u32,
    /// 0 to sort by source, 1 by destination.
    pub by_destination: u32,
}

/// Parameters of [`token_copy_scan`]. Grid: any; more than a CTA for each [`SCAN_CHUNK`] is of no use. Shared memory:
/// [`SCAN_SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Scan {
    /// `[chunks * SCAN_CHUNK]` counts, 16-byte aligned; replaced by where each bucket begins.
    pub counts: GlobalMut<u32>,
    /// `[1]` zero before; then the number of pairs sorted.
    pub total: GlobalMut<u32>,
    /// Chunks of counts.
    pub chunks: u32,
}

impl<I: Index> Sort<I> {
    #[device]
    fn bucket(&self, (src, dst): (u64, u64)) -> usize {
        ((if self.by_destination == 0 { src } else { dst }) >> self.shift) as usize
    }
}

/// This thread's first pair, and the distance to its next.
#[device]
fn stride() -> (u64, u64) {
    let first = thread::block_idx_x() as u64 * SORT_THREADS as u64 + thread::thread_idx_x() as u64;
    (first, thread::grid_dim_x() as u64 * SORT_THREADS as u64)
}

/// Counts refusals.
///
/// # Safety
/// As the parameter block says.
#[device]
unsafe fn check<I: Index>(p: &Check<I>) {
    let (mut first, step) = stride();
    while first < p.pairs.count {
        let mut pairs = [(0, 0); AT_ONCE];
        unroll!(J < AT_ONCE; {
            // SAFETY: the caller's word.
            pairs[J] = unsafe { p.pairs.get(first + J as u64 * step) };
        });
        unroll!(J < AT_ONCE; {
            if first + (J as u64) * step < p.pairs.count && !p.pairs.has(pairs[J]) {
                // SAFETY: the caller's word.
                unsafe { p.pairs.refuse(1) };
            }
        });
        first += AT_ONCE as u64 * step;
    }
}

/// Counts the pairs of each bucket, and keeps their ranks.
///
/// # Safety
/// As the parameter block says.
#[device]
unsafe fn count<I: Index>(p: &Sort<I>) {
    // SAFETY: the caller's word. A pair in its regions has a bucket, whose count changes by atomics alone; one lane
    // stores the pair's rank.
    unsafe {
        let (mut first, step) = stride();
        while first < p.pairs.count {
            let mut pairs = [(0, 0); AT_ONCE];
            let mut ranks = [NONE; AT_ONCE];
            unroll!(J < AT_ONCE; {
                pairs[J] = p.pairs.get(first + J as u64 * step);
            });
            unroll!(J < AT_ONCE; {
                if p.pairs.has(pairs[J]) {
                    let bucket = p.bucket(pairs[J]);
                    ranks[J] = atomic::fetch_add(p.counts, bucket, 1, Ordering::Relaxed, Scope::Device);
                }
            });
            unroll!(J < AT_ONCE; {
                let i = first + J as u64 * step;
                if i < p.pairs.count {
                    p.ranks.store(i as usize, ranks[J]);
                    if ranks[J] == NONE {
                        p.pairs.refuse(1);
                    }
                }
            });
            first += AT_ONCE as u64 * step;
        }
    }
}

/// Writes each pair to its place.
///
/// # Safety
/// As the parameter block says: the ranks are those that [`count`] kept, and the counts positions.
#[device]
unsafe fn scatter<I: Index>(p: &Sort<I>) {
    // SAFETY: the caller's word. A pair that has a rank is in its regions, so that it has a bucket; where that begins
    // plus the rank is a place of the pair's own, of as many as there are pairs.
    unsafe {
        let (mut first, step) = stride();
        while first < p.pairs.count {
            let mut pairs = [(0, 0); AT_ONCE];
            let mut places = [NONE; AT_ONCE];
            unroll!(J < AT_ONCE; {
                let i = first + J as u64 * step;
                pairs[J] = p.pairs.get(i);
                if i < p.pairs.count {
                    places[J] = p.ranks.load(i as usize);
                }
            });
            unroll!(J < AT_ONCE; {
                if places[J] != NONE {
                    places[J] += p.counts.load(p.bucket(pairs[J]));
                }
            });
            unroll!(J < AT_ONCE; {
                if places[J] != NONE {
                    p.sorted.store(places[J] as usize, pairs[J].0 | pairs[J].1 << 32);
                }
            });
            first += AT_ONCE as u64 * step;
        }
    }
}

/// The sum of `value` over this lane and those below.
#[device]
fn running_sum(value: u32) -> u32 {
    let mut sum = value;
    let mut distance = 1;
    while distance < 32 {
        let below = warp::shuffle_up(sum, distance);
        sum += if thread::lane_id() >= distance { below } else { 0 };
        distance *= 2;
    }
    sum
}

/// Where four buckets in a row with these counts begin, if the first begins at `first`.
#[device]
fn positions(first: u32, counts: [u32; 4]) -> [u32; 4] {
    let second = first + counts[0];
    let third = second + counts[1];
    [first, second, third, third + counts[2]]
}

/// Turns counts into positions.
#[kernel(threads = 512, module = "bench")]
pub unsafe fn token_copy_scan(p: Scan) {
    // SAFETY: the launcher's word: memory is as the parameter block says. A thread has eight counts of a chunk to
    // itself. The whole CTA goes from barrier to barrier together, and there is one between each write of a word in
    // shared memory and the reads before and behind it.
    unsafe {
        let sums = shared::dynamic::<u32>(0);
        let begin = sums.at(WARPS as usize);
        let mut chunk = thread::block_idx_x();
        while chunk < p.chunks {
            let at = (chunk * SCAN_CHUNK + thread::thread_idx_x() * 8) as usize;
            let (low, high) = (p.counts.load16(at), p.counts.load16(at + 4));
            let low_sum = low[0] + low[1] + low[2] + low[3];
            let sum = low_sum + high[0] + high[1] + high[2] + high[3];
            let through = running_sum(sum);
            if thread::lane_id() == 31 {
                sums.store(thread::warp_id() as usize, through);
            }
            thread::sync_threads();
            // Every warp adds up the warps' sums for itself.
            let warp_sum = if thread::lane_id() < WARPS { sums.load(thread::lane_id() as usize) } else { 0 };
            let warps_through = running_sum(warp_sum);
            if thread::thread_idx_x() == 31 {
                begin.store(0, atomic::fetch_add(p.total, 0, warps_through, Ordering::Relaxed, Scope::Device));
            }
            let before = warp::shuffle_idx(warps_through - warp_sum, thread::warp_id()) + through - sum;
            thread::sync_threads();
            let first = begin.load(0) + before;
            p.counts.store16(at, positions(first, low));
            p.counts.store16(at + 4, positions(first + low_sum, high));
            // No thread may overwrite a sum that another thread has yet to read.
            thread::sync_threads();
            chunk += thread::grid_dim_x();
        }
    }
}

macro_rules! kernels {
    ($($index:ty: $check:ident $count:ident $scatter:ident;)*) => { $(
        #[doc = concat!("Counts the `", stringify!($index), "` pairs that a copy would refuse.")]
        #[kernel(threads = 512, module = "bench")]
        pub unsafe fn $check(p: Check<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { check(&p) }
        }
        #[doc = concat!("Counts the `", stringify!($index), "` pairs of each bucket.")]
        #[kernel(threads = 512, module = "bench")]
        pub unsafe fn $count(p: Sort<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { count(&p) }
        }
        #[doc = concat!("Writes `", stringify!($index), "` pairs where they belong.")]
        #[kernel(threads = 512, module = "bench")]
        pub unsafe fn $scatter(p: Sort<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says, after the sort's other launches.
            unsafe { scatter(&p) }
        }
    )* };
}

kernels! {
    i32: token_copy_check_i32 token_copy_count_i32 token_copy_scatter_i32;
    i64: token_copy_check_i64 token_copy_count_i64 token_copy_scatter_i64;
}
