//! The CTAs that work on one row of logits: which slice of the vocabulary each has, and how they exchange results.
//!
//! A row is split over the vocabulary as split-K splits a GEMM: each CTA reduces its slice, and results are combined in
//! [scratch](SCRATCH_WORDS) memory. All CTAs are resident at once, so they may wait for each other there. A row that
//! one CTA has alone needs no combining.
//!
//! # Safety
//! A team is of a launch whose CTAs are all resident at once. Its scratch is as the launch's parameters say, and no
//! other team's. Whole CTAs call these functions, all threads of each, unless they say otherwise; what waits for the
//! team is called by all of its CTAs, equally often and in the same order. Results go through words of the CTA's shared
//! memory that nobody else uses meanwhile.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, device, shared, thread, warp};

use super::select::BINS;
use super::{RESULT, THREADS, TOTALS, WARPS};
use crate::waiting;

/// Most CTAs of a row.
pub const MOST_SPLITS: u32 = 64;
/// A slice is worth a CTA if each of its threads has at least this many logits.
const LEAST_LOGITS: u32 = 4;
/// Most candidates that one CTA chooses from: one a thread.
pub(crate) const MOST_CANDIDATES: u32 = THREADS;

// Words of a row's scratch memory, of 64 bits.
const ARRIVALS: usize = 0;
const BEST: usize = 1;
const COUNT: usize = 2;
const TOTAL: usize = 3;
/// Words of a team's scratch that are zero between launches: the first ones.
pub const ZEROED_WORDS: usize = 4;
const SPLIT_TOTALS: usize = ZEROED_WORDS;
const CANDIDATES: usize = SPLIT_TOTALS + MOST_SPLITS as usize;
const HISTOGRAMS: usize = CANDIDATES + MOST_CANDIDATES as usize;
/// Words of 64 bits that the CTAs of a row share.
pub const SCRATCH_WORDS: usize = HISTOGRAMS + 3 * BINS as usize;

/// CTAs for each row, in a launch over `rows` rows of `vocab` logits on a card where `resident` CTAs run at once.
pub const fn splits(rows: u32, resident: u32, vocab: u32) -> u32 {
    let most = [resident / if rows == 0 { 1 } else { rows }, MOST_SPLITS, vocab.div_ceil(LEAST_LOGITS * THREADS)];
    let (mut least, mut i) = (most[0], 1);
    while i < most.len() {
        least = if most[i] < least { most[i] } else { least };
        i += 1;
    }
    if least == 0 { 1 } else { least }
}

/// One CTA's view of the team.
pub(crate) struct Team {
    splits: u32,
    /// Which slice is this CTA's.
    pub rank: u32,
    scratch: GlobalMut<u64>,
    /// How often the team has synchronised.
    syncs: u32,
}

impl Team {
    /// This CTA's view of a team of `splits` CTAs in which it has the slice `rank`. `scratch` is the row's.
    ///
    /// # Safety
    /// `splits` is at least 1, and `rank` below it.
    #[device]
    pub unsafe fn new(splits: u32, rank: u32, scratch: GlobalMut<u64>) -> Self {
        Self { splits, rank, scratch, syncs: 0 }
    }

    /// A team of this CTA alone, which was the [last](Self::is_last) of the team and has [reset](Self::reset) its
    /// scratch.
    #[device]
    pub fn alone(&self) -> Self {
        // SAFETY: the first of one.
        unsafe { Self::new(1, 0, self.scratch) }
    }

    /// This CTA's slice of the vocabulary: its first token, and the one after its last.
    #[device]
    pub fn slice(&self, vocab: u32) -> (u32, u32) {
        // SAFETY: a team has a CTA, see `new`.
        unsafe { cuda_std::assume(self.splits > 0) };
        let len = vocab.div_ceil(self.splits);
        let first = self.rank * len;
        (first.min(vocab), (first + len).min(vocab))
    }

    #[device]
    unsafe fn arrivals(&self) -> GlobalMut<u32> {
        // SAFETY: the caller's word.
        unsafe { self.scratch.at(ARRIVALS).cast() }
    }

    /// A barrier of the team, behind which each CTA sees what the others wrote before it.
    #[device]
    unsafe fn team_barrier(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            self.syncs += 1;
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                atomic::fetch_add(self.arrivals(), 0, 1, Ordering::Release, Scope::Device);
                waiting::for_count(self.arrivals(), 0, self.syncs * self.splits);
            }
            thread::sync_threads();
        }
    }

    /// Whether this CTA is the last of the team to come here. The last one sees what all of them wrote, reads the
    /// results, and [resets](Self::reset) the scratch. The others have nothing more to do.
    #[device]
    pub unsafe fn is_last(&mut self) -> bool {
        // SAFETY: the caller's word.
        unsafe {
            if self.splits == 1 {
                thread::sync_threads();
                return true;
            }
            self.syncs += 1;
            thread::sync_threads();
            let told = shared::dynamic::<u32>(RESULT);
            if thread::thread_idx_x() == 0 {
                let before = atomic::fetch_add(self.arrivals(), 0, 1, Ordering::AcqRel, Scope::Device);
                told.store(0, u32::from(before + 1 == self.syncs * self.splits));
            }
            thread::sync_threads();
            told.load(0) == 1
        }
    }

    /// Leaves the scratch as the next launch needs it. The CTA that is [last](Self::is_last) calls it.
    ///
    /// # Safety
    /// This CTA is the team's last: the others are done with its scratch.
    #[device]
    pub unsafe fn reset(&self) {
        // SAFETY: the caller's word.
        unsafe {
            thread::sync_threads();
            let tid = thread::thread_idx_x() as usize;
            if tid < ZEROED_WORDS {
                self.scratch.store(tid, 0);
            }
            thread::sync_threads();
        }
    }

    /// The largest `v` over the team, known to every thread.
    #[device]
    pub unsafe fn max(&mut self, v: u64) -> u64 {
        // SAFETY: the caller's word.
        unsafe {
            let v = block_max(v);
            if self.splits == 1 {
                return v;
            }
            let best = self.scratch.at(BEST);
            if thread::thread_idx_x() == 0 {
                atomic::fetch_max(best, 0, v, Ordering::Relaxed, Scope::Device);
            }
            self.clear_next_histogram();
            self.team_barrier();
            atomic::load(best, 0, Ordering::Relaxed, Scope::Device)
        }
    }

    /// Adds a thread's part to the team's total, which the [last](Self::is_last) CTA finds in [`total`](Self::total).
    #[device]
    pub unsafe fn add_to_total(&self, v: u64) {
        // SAFETY: the caller's word.
        unsafe {
            let own = block_total(v);
            if thread::thread_idx_x() == 0 {
                atomic::fetch_add(self.scratch, TOTAL, own, Ordering::Relaxed, Scope::Device);
            }
        }
    }

    /// The sum of all that was [added](Self::add_to_total).
    ///
    /// # Safety
    /// This CTA is the team's last.
    #[device]
    pub unsafe fn total(&self) -> u64 {
        // SAFETY: the caller's word.
        unsafe { atomic::load(self.scratch, TOTAL, Ordering::Relaxed, Scope::Device) }
    }

    /// Sums of the CTAs' totals, of which `own` is this CTA's: over the slices before this one, and over all.
    #[device]
    pub unsafe fn totals(&mut self, own: u64) -> (u64, u64) {
        // SAFETY: the caller's word.
        unsafe {
            if self.splits == 1 {
                return (0, own);
            }
            let totals = self.scratch.at(SPLIT_TOTALS);
            if thread::thread_idx_x() == 0 {
                totals.store(self.rank as usize, own);
            }
            self.team_barrier();
            let (mut before, mut all) = (0, 0);
            let mut split = 0;
            while split < self.splits {
                let total = totals.load(split as usize);
                before += if split < self.rank { total } else { 0 };
                all += total;
                split += 1;
            }
            (before, all)
        }
    }

    /// Puts a candidate on the team's list, which has room for [`MOST_CANDIDATES`].
    ///
    /// # Safety
    /// Any lane may call it, before its CTA has asked whether it [is the last](Self::is_last).
    #[device]
    pub unsafe fn nominate(&self, rank: u64) {
        // SAFETY: the caller's word.
        unsafe {
            let place = atomic::fetch_add(self.scratch.at(COUNT).cast::<u32>(), 0, 1, Ordering::Relaxed, Scope::Device);
            if place < MOST_CANDIDATES {
                self.scratch.store(CANDIDATES + place as usize, rank);
            }
        }
    }

    /// [`nominate`](Self::nominate), if the condition holds.
    ///
    /// # Safety
    /// As for [`nominate`](Self::nominate).
    #[device]
    pub unsafe fn nominate_if(&self, condition: bool, rank: u64) {
        if condition {
            // SAFETY: the caller's word.
            unsafe { self.nominate(rank) };
        }
    }

    /// How many candidates were nominated, for the [last](Self::is_last) CTA. If there are more than the list has room
    /// for, some are missing in the list.
    ///
    /// # Safety
    /// This CTA is the team's last.
    #[device]
    pub unsafe fn nominated(&self) -> u32 {
        // SAFETY: the caller's word.
        unsafe { atomic::load(self.scratch.at(COUNT).cast::<u32>(), 0, Ordering::Relaxed, Scope::Device) }
    }

    /// A candidate's rank.
    ///
    /// # Safety
    /// Any lane may call it, of the team's last CTA, for one of those that were [nominated](Self::nominated) and had
    /// room.
    #[device]
    pub unsafe fn candidate(&self, i: u32) -> u64 {
        // SAFETY: the caller's word.
        unsafe { self.scratch.load(CANDIDATES + i as usize) }
    }

    /// The histogram between barrier number `syncs` and the next. There are three in turn: one may still be read while
    /// the next is added to, and the third is zeroed.
    #[device]
    unsafe fn histogram(&self, syncs: u32) -> GlobalMut<u64> {
        // SAFETY: the caller's word.
        unsafe { self.scratch.at(HISTOGRAMS + (syncs % 3 * BINS) as usize) }
    }

    /// Zeroes this CTA's part of the histogram that is used after the next barrier.
    #[device]
    unsafe fn clear_next_histogram(&self) {
        // SAFETY: the caller's word.
        unsafe {
            let next = self.histogram(self.syncs + 1);
            let mut bin = self.rank * THREADS + thread::thread_idx_x();
            while bin < BINS {
                next.store(bin as usize, 0);
                bin += self.splits * THREADS;
            }
        }
    }

    /// Adds up the CTAs' histograms. `bins` are this CTA's bins from `first` on, which this thread has; returned are
    /// the same bins of the team's histogram.
    ///
    /// # Safety
    /// Each bin is one thread's, and below [`BINS`]. The histogram was made zero: the team has synchronised in
    /// [`max`](Self::max) or here last.
    #[device]
    pub unsafe fn add_bins<const N: usize>(&mut self, first: u32, bins: [u64; N]) -> [u64; N] {
        // SAFETY: the caller's word.
        unsafe {
            if self.splits == 1 {
                return bins;
            }
            let all = self.histogram(self.syncs).at(first as usize);
            self.clear_next_histogram();
            unroll!(I < N of 8; {
                if bins[I] != 0 {
                    atomic::fetch_add(all, I, bins[I], Ordering::Relaxed, Scope::Device);
                }
            });
            self.team_barrier();
            let mut sums = [0; N];
            unroll!(I < N of 8; {
                sums[I] = atomic::load(all, I, Ordering::Relaxed, Scope::Device);
            });
            sums
        }
    }
}

/// The largest `v` over the CTA, known to every thread.
#[device]
pub(crate) unsafe fn block_max(mut v: u64) -> u64 {
    // SAFETY: the caller's word.
    unsafe {
        let mut mask = 16;
        while mask > 0 {
            v = v.max(warp::shuffle_xor(v, mask));
            mask /= 2;
        }
        let scratch = shared::dynamic::<u64>(TOTALS);
        thread::sync_threads();
        if thread::lane_id() == 0 {
            scratch.store(thread::warp_id() as usize, v);
        }
        thread::sync_threads();
        let mut w = 0;
        while w < WARPS {
            v = v.max(scratch.load(w as usize));
            w += 1;
        }
        v
    }
}

/// The sum of `v` over the CTA, known to every thread.
#[device]
pub(super) unsafe fn block_total(v: u64) -> u64 {
    // SAFETY: the caller's word.
    unsafe {
        let (_, all) = block_totals(warp_total(v));
        all
    }
}

/// Sums of the warps' values, of which all lanes of a warp pass theirs as `own`: over the warps before this one, and
/// over all.
#[device]
pub(super) unsafe fn block_totals(own: u64) -> (u64, u64) {
    // SAFETY: the caller's word.
    unsafe {
        let scratch = shared::dynamic::<u64>(TOTALS);
        thread::sync_threads();
        if thread::lane_id() == 0 {
            scratch.store(thread::warp_id() as usize, own);
        }
        thread::sync_threads();
        let (mut before, mut all) = (0, 0);
        let mut w = 0;
        while w < WARPS {
            let total = scratch.load(w as usize);
            before += if w < thread::warp_id() { total } else { 0 };
            all += total;
            w += 1;
        }
        (before, all)
    }
}

/// The sum of `v` over the warp, known to every lane.
///
/// # Safety
/// All lanes of the warp call it.
#[device]
pub(super) unsafe fn warp_total(mut v: u64) -> u64 {
    let mut mask = 16;
    while mask > 0 {
        v += warp::shuffle_xor(v, mask);
        mask /= 2;
    }
    v
}
