//! A radix select over the slices of a team: finds where weights, added up from the best logit downwards, reach a
//! target.
//!
//! A pass makes a histogram of the ranks in question, in up to [`BINS`] bins of equal width. In the next pass the ranks
//! of the bin in which the sum reaches the target are in question, and so on until a bin is as narrow as is asked for.
//! Logits of a row lie close together, so two or three passes do.
//!
//! # Safety
//! Whole CTAs call these functions, all of a team with the same question, weights and target, since they wait for each
//! other. Rows are as [`row`](super::row) asks. A CTA has [`SHARED_BYTES`](super::SHARED_BYTES) of dynamic shared
//! memory to itself; its histogram and its words of results are in use until [`select`] returns, and afterwards until
//! the CTA has synchronised.

use core::marker::PhantomData;

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::Shared;
use cuda_std::{device, shared, thread, warp};

use super::row::{Change, Row};

use super::team::{Team, block_totals};
use super::{HISTOGRAM, RESULT, THREADS};
use crate::sample::mass::{masses_of, rank, ranked_logit};

/// Bins of a histogram.
pub(super) const BINS: u32 = 2048;
// Words of results: the bin in which the goal is reached, the sum with it, the sum without it, and the goal.
const BIN: usize = 0;
const SUM: usize = 1;
const ABOVE: usize = 2;
const GOAL: usize = 3;

/// Bins of a thread: consecutive ones.
const OWN: usize = (BINS / THREADS) as usize;

/// Ranks to select from.
pub(crate) trait Ranks {
    /// Calls `f` with a thread's ranks from `low` to `high`, and their weights. `f` may also get other ranks, with
    /// weight 0.
    ///
    /// # Safety
    /// The ranks are of a row as [`row`](super::row) asks.
    unsafe fn each_between(&self, low: u64, high: u64, weight: impl Weight, f: impl FnMut(u64, u64));
}

/// The ranks of all logits of a slice.
pub(crate) struct All<C: Change>(pub Row, pub PhantomData<C>);

impl<C: Change> Ranks for All<C> {
    #[device]
    unsafe fn each_between(&self, low: u64, high: u64, weight: impl Weight, mut f: impl FnMut(u64, u64)) {
        // SAFETY: the caller's word.
        unsafe {
            // No logit has a key below that of minus infinity.
            let lowest = rank(f32::NEG_INFINITY, u32::MAX);
            let [least, most] = [low.max(lowest), high].map(ranked_logit);
            // Some tokens with the least or the greatest of these logits may not be in question.
            self.0.each_weighed::<C>(
                |logit| logit >= least && logit <= most,
                |logits| weight.of(logits),
                |token, logit, weight| {
                    let rank = rank(logit, token);
                    f(rank, if rank >= low && rank <= high { weight } else { 0 });
                },
            );
        }
    }
}

/// One rank of each thread.
pub(crate) struct One(pub u64);

impl Ranks for One {
    #[device]
    unsafe fn each_between(&self, low: u64, high: u64, weight: impl Weight, mut f: impl FnMut(u64, u64)) {
        if self.0 >= low && self.0 <= high {
            f(self.0, weight.of(&[ranked_logit(self.0)])[0]);
        }
    }
}

/// What ranks weigh.
pub(crate) trait Weight: Copy {
    /// 32-bit words of a bin.
    const WORDS: u32;

    /// What these logits weigh.
    fn of<const N: usize>(self, logits: &[f32; N]) -> [u64; N];

    /// Adds a weight to a bin of the CTA's histogram. The words of a bin lie `BINS` apart.
    ///
    /// # Safety
    /// `bins` are the CTA's, and `bin` is below [`BINS`].
    unsafe fn add(bins: Shared<u32>, bin: u32, weight: u64);

    /// A bin's sum.
    ///
    /// # Safety
    /// As for [`add`](Self::add); nobody adds any more.
    unsafe fn sum(bins: Shared<u32>, bin: u32) -> u64;
}

/// Adds to one word of a bin.
///
/// # Safety
/// `bins` are the CTA's, with this word, and `bin` is below [`BINS`].
#[device]
unsafe fn add_word(bins: Shared<u32>, word: u32, bin: u32, value: u32) {
    // SAFETY: the caller's word.
    unsafe {
        atomic::fetch_add(bins, (word * BINS + bin) as usize, value, Ordering::Relaxed, Scope::Block);
    }
}

/// One word of a bin.
///
/// # Safety
/// As for [`add_word`]; nobody adds any more.
#[device]
unsafe fn word(bins: Shared<u32>, word: u32, bin: u32) -> u64 {
    // SAFETY: the caller's word.
    unsafe { u64::from(bins.load((word * BINS + bin) as usize)) }
}

/// Every logit counts one.
#[derive(Clone, Copy)]
pub(crate) struct Count;

impl Weight for Count {
    const WORDS: u32 = 1;

    #[device]
    fn of<const N: usize>(self, _: &[f32; N]) -> [u64; N] {
        [1; N]
    }

    #[device]
    unsafe fn add(bins: Shared<u32>, bin: u32, _: u64) {
        // SAFETY: the caller's word.
        unsafe { add_word(bins, 0, bin, 1) }
    }

    #[device]
    unsafe fn sum(bins: Shared<u32>, bin: u32) -> u64 {
        // SAFETY: the caller's word.
        unsafe { word(bins, 0, bin) }
    }
}

/// A logit weighs its [mass](super::mass) after division by the temperature. `max` is the row's largest logit after
/// that division.
#[derive(Clone, Copy)]
pub(super) struct Mass {
    pub max: f32,
    pub temperature: f32,
}

/// Bits of a mass that go into one word of a bin: `2^(32 − 14)` numbers of 14 bits add up without an overflow.
const WORD_BITS: u32 = 14;
/// Most logits of a row: as many as the words of a [`Mass`] in a histogram can add up.
pub const MOST_VOCAB: u32 = 1 << (32 - WORD_BITS);

impl Weight for Mass {
    const WORDS: u32 = 3;

    #[device]
    fn of<const N: usize>(self, logits: &[f32; N]) -> [u64; N] {
        masses_of(&logits.map(|logit| logit / self.temperature - self.max))
    }

    // Shared memory has no native atomic addition of 64 bits.
    #[device]
    unsafe fn add(bins: Shared<u32>, bin: u32, weight: u64) {
        // SAFETY: the caller's word.
        unsafe {
            let mask = (1 << WORD_BITS) - 1;
            add_word(bins, 0, bin, weight as u32 & mask);
            add_word(bins, 1, bin, (weight >> WORD_BITS) as u32 & mask);
            add_word(bins, 2, bin, (weight >> (2 * WORD_BITS)) as u32);
        }
    }

    #[device]
    unsafe fn sum(bins: Shared<u32>, bin: u32) -> u64 {
        // SAFETY: the caller's word.
        unsafe { word(bins, 0, bin) + (word(bins, 1, bin) << WORD_BITS) + (word(bins, 2, bin) << (2 * WORD_BITS)) }
    }
}

/// What is asked of a [`select`].
#[derive(Clone, Copy)]
pub(crate) struct Question {
    /// The lowest rank in question.
    pub low: u64,
    /// The highest rank in question.
    pub high: u64,
    /// A bin of `2^narrow` ranks is narrow enough: with 32 a bin is one logit, with 0 one token.
    pub narrow: u32,
    /// Any bin is narrow enough if the weights from its lowest rank upwards add up to no more than this.
    pub enough: u64,
}

/// Adds up weights from the highest rank in question downwards, until they reach the goal: `target` of the sum of all
/// of them. Returns the lowest rank of the bin in which they do; 0 if they do not, or if the goal is 0.
///
/// # Safety
/// The question's `low` is at most its `high`.
#[device]
pub(crate) unsafe fn select<W: Weight>(
    team: &mut Team,
    of: &impl Ranks,
    question: Question,
    weight: W,
    target: impl Fn(u64) -> u64,
) -> u64 {
    // SAFETY: the caller's word.
    unsafe {
        let Question { mut low, mut high, narrow, enough } = question;
        // Shared memory keeps two numbers between passes: the weight of all ranks above those in question, and the
        // goal.
        let result = shared::dynamic::<u64>(RESULT);
        let mut is_first = true;
        loop {
            // The shift that brings the largest distance from `high` below `BINS`.
            let shift = (64 - (high - low).leading_zeros()).saturating_sub(BINS.ilog2()).max(narrow);
            let bins = histogram(of, low, high, shift, weight);
            let bins = team.add_bins(thread::thread_idx_x() * OWN as u32, bins);
            let mut own = 0;
            unroll!(I < OWN of 8; {
                own += bins[I];
            });
            let upto = warp::inclusive_sum(own);
            let (before, all) = block_totals(warp::shuffle_idx(upto, 31));
            let (goal, above) = if is_first { (target(all), 0) } else { (result.load(GOAL), result.load(ABOVE)) };
            if is_first && (all < goal || goal == 0) {
                return 0;
            }
            is_first = false;
            thread::sync_threads();
            let mut sum = above + before + upto - own;
            if sum < goal && goal <= sum + own {
                let (mut bin, mut more) = (0, 0);
                unroll!(I < OWN of 8; {
                    if sum < goal {
                        (bin, more) = (I as u32, bins[I]);
                        sum += more;
                    }
                });
                result.store(BIN, u64::from(thread::thread_idx_x() * OWN as u32 + bin));
                result.store(SUM, sum);
                result.store(ABOVE, sum - more);
                result.store(GOAL, goal);
            }
            thread::sync_threads();
            let (bin, sum) = (result.load(BIN), result.load(SUM));
            high -= bin << shift;
            low = low.max(high.saturating_sub((1 << shift) - 1));
            if shift <= narrow || sum <= enough {
                return low;
            }
        }
    }
}

/// The CTA's histogram of the ranks from `low` to `high`, the highest ranks first. Returns this thread's [`OWN`] bins.
///
/// # Safety
/// `low` is at most `high`, and `high - low`, shifted, below [`BINS`].
#[device]
unsafe fn histogram<W: Weight>(of: &impl Ranks, low: u64, high: u64, shift: u32, weight: W) -> [u64; OWN] {
    // SAFETY: the caller's word.
    unsafe {
        let (bins, tid) = (shared::dynamic::<u32>(HISTOGRAM), thread::thread_idx_x());
        let mut i = tid;
        while i < W::WORDS * BINS {
            bins.store(i as usize, 0);
            i += THREADS;
        }
        thread::sync_threads();
        of.each_between(low, high, weight, |rank, weight| {
            if weight > 0 {
                W::add(bins, ((high - rank) >> shift) as u32, weight);
            }
        });
        thread::sync_threads();
        let mut own = [0; OWN];
        unroll!(I < OWN of 8; {
            own[I] = W::sum(bins, tid * OWN as u32 + I as u32);
        });
        own
    }
}
