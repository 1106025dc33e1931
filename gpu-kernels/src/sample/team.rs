//! The CTAs that work on one row of logits: who has which slice of the vocabulary, and what they tell each other.
//!
//! Split over the vocabulary as split-K splits a GEMM: each CTA reduces its slice, and results are combined in
//! [scratch](SCRATCH_WORDS) memory. All CTAs are resident at once, so they may wait for each other there. A row that
//! one CTA has alone needs none of it.
//!
//! # Safety
//! A team is of a launch whose CTAs are all resident at once. Its scratch is as the launch's parameters say, and no
//! other team's. Whole CTAs call these functions, all threads of each, unless they say otherwise; what waits for the
//! team is called by all of its CTAs, equally often and in the same order. Results go through words of the CTA's shared
//! memory that nobody else uses meanwhile.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, shared, thread, warp};

use super::select::BINS;
use super::{RESULT, THREADS, TOTALS, WARPS};
use crate::waiting;

/// Most CTAs of a row.
pub const MOST_SPLITS: u32 = 64;
/// Logits for each thread that make a slice worth a CTA.
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

/// CTAs a row for a launch over `rows` rows of `vocab` logits on a card where `resident` CTAs run at once.
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
    /// `scratch`: the row's. The team has at least one CTA.
    #[inline(always)]
    pub fn new(splits: u32, rank: u32, scratch: GlobalMut<u64>) -> Self {
        Self { splits, rank, scratch, syncs: 0 }
    }

    /// A team of this CTA alone, after the [last](Self::is_last) one has [reset](Self::reset) it.
    #[inline(always)]
    pub fn alone(&self) -> Self {
        Self::new(1, 0, self.scratch)
    }

    /// This CTA's slice of the vocabulary: its first token, and the one after its last.
    #[inline(always)]
    pub fn slice(&self, vocab: u32) -> (u32, u32) {
        // SAFETY: a team has a CTA, see `new`.
        unsafe { cuda_std::assume(self.splits > 0) };
        let len = vocab.div_ceil(self.splits);
        let first = self.rank * len;
        (first.min(vocab), (first + len).min(vocab))
    }

    #[inline(always)]
    unsafe fn arrivals(&self) -> GlobalMut<u32> {
        // SAFETY: the caller's word.
        unsafe { self.scratch.at(ARRIVALS).cast() }
    }

    /// Waits for the team, and shows each CTA what the others wrote.
    #[inline(always)]
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

    /// Whether this CTA is the last of the team to come here, and so sees what all of them wrote. The others have
    /// nothing more to do. The team's scratch is as it was before the launch then, but for candidates and what the
    /// caller still reads.
    #[inline(always)]
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

    /// Leaves the scratch as the next launch wants to find it: by the CTA that is [last](Self::is_last).
    ///
    /// # Safety
    /// This CTA is the team's last: the others are done with its scratch.
    #[inline(always)]
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

    /// The largest of a value over the team, known to every thread.
    #[inline(always)]
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
    #[inline(always)]
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
    #[inline(always)]
    pub unsafe fn total(&self) -> u64 {
        // SAFETY: the caller's word.
        unsafe { atomic::load(self.scratch, TOTAL, Ordering::Relaxed, Scope::Device) }
    }

    /// Of the CTAs' totals: the sum of those of slices before this CTA's, and of all.
    #[inline(always)]
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
    #[inline(always)]
    pub unsafe fn nominate(&self, rank: u64) {
        // SAFETY: the caller's word.
        unsafe {
            let place = atomic::fetch_add(self.scratch.at(COUNT).cast::<u32>(), 0, 1, Ordering::Relaxed, Scope::Device);
            if place < MOST_CANDIDATES {
                self.scratch.store(CANDIDATES + place as usize, rank);
            }
        }
    }

    /// The same under a condition.
    ///
    /// # Safety
    /// As for [`nominate`](Self::nominate).
    #[inline(always)]
    pub unsafe fn nominate_if(&self, condition: bool, rank: u64) {
        if condition {
            // SAFETY: the caller's word.
            unsafe { self.nominate(rank) };
        }
    }

    /// How many there are, for the [last](Self::is_last) CTA: if more than the list has room for, some are missing
    /// there.
    ///
    /// # Safety
    /// This CTA is the team's last.
    #[inline(always)]
    pub unsafe fn nominated(&self) -> u32 {
        // SAFETY: the caller's word.
        unsafe { atomic::load(self.scratch.at(COUNT).cast::<u32>(), 0, Ordering::Relaxed, Scope::Device) }
    }

    /// A candidate's rank.
    ///
    /// # Safety
    /// Any lane may call it, of the team's last CTA, for one of those that were [nominated](Self::nominated) and had
    /// room.
    #[inline(always)]
    pub unsafe fn candidate(&self, i: u32) -> u64 {
        // SAFETY: the caller's word.
        unsafe { self.scratch.load(CANDIDATES + i as usize) }
    }

    /// The histogram between this barrier and the next. There are three: one is read while the next is added to, and a
    /// third is made zero.
    #[inline(always)]
    unsafe fn histogram(&self, syncs: u32) -> GlobalMut<u64> {
        // SAFETY: the caller's word.
        unsafe { self.scratch.at(HISTOGRAMS + (syncs % 3 * BINS) as usize) }
    }

    #[inline(always)]
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

    /// Adds the CTAs' histograms, of which this thread knows these bins, `first` and those after it: the team's.
    ///
    /// # Safety
    /// Each bin is one thread's, and below [`BINS`]. The histogram was made zero: the team has synchronised in
    /// [`max`](Self::max) or here last.
    #[inline(always)]
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

/// The largest of a value over the block, known to every thread.
#[inline(always)]
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

/// The sum of a value over the block, known to every thread.
#[inline(always)]
pub(super) unsafe fn block_total(v: u64) -> u64 {
    // SAFETY: the caller's word.
    unsafe {
        let (_, all) = block_totals(warp_total(v));
        all
    }
}

/// Of what each warp has, `own` to all of its lanes: the sum over the warps before this one, and over all.
#[inline(always)]
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

/// The sum of a value over the warp.
///
/// # Safety
/// All lanes of the warp call it.
#[inline(always)]
pub(super) unsafe fn warp_total(mut v: u64) -> u64 {
    let mut mask = 16;
    while mask > 0 {
        v += warp::shuffle_xor(v, mask);
        mask /= 2;
    }
    v
}

/// The sum over the lanes up to and including this one.
///
/// # Safety
/// All lanes of the warp call it.
#[inline(always)]
pub(super) unsafe fn running_total(mut v: u64) -> u64 {
    let mut delta = 1;
    while delta < 32 {
        let before = warp::shuffle_up(v, delta);
        if thread::lane_id() >= delta {
            v += before;
        }
        delta *= 2;
    }
    v
}
