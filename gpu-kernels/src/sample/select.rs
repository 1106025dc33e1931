//! Where, from the best logit downwards, weights first add up to a target: a radix select over the slices of a team.
//!
//! A pass makes a histogram of the ranks in question, in up to [`BINS`] bins of equal width. The bin in which the sum
//! reaches the target holds the ranks in question of the next pass, until a bin is as narrow as is asked for. Logits of
//! a row lie close together, so two or three passes do.
//!
//! # Safety
//! Whole CTAs call these functions, all of a team with the same question, weights and target, since they wait for each
//! other. Rows are as [`row`](super::row) asks. A CTA has [`SHARED_BYTES`](super::SHARED_BYTES) of dynamic shared
//! memory to itself; its histogram and its words of results are in use until [`select`] returns, and afterwards until
//! the CTA has synchronised.

use core::marker::PhantomData;

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::Shared;
use cuda_std::{shared, thread, warp};

use super::row::{Change, Row};

use super::team::{Team, block_totals, running_total};
use super::{HISTOGRAM, RESULT, THREADS};
use crate::sample::mass::{masses_of, rank, ranked_logit};

/// Bins of a histogram.
pub(super) const BINS: u32 = 2048;
// Words of results: the bin in which the goal is reached, the sum with it, the sum without it, and the goal.
const BIN: usize = 0;
const SUM: usize = 1;
const ABOVE: usize = 2;
const GOAL: usize = 3;

/// Bins of a thread: those after its first.
const OWN: usize = (BINS / THREADS) as usize;

/// Ranks to select from.
pub(crate) trait Ranks {
    /// Hands a thread's ranks from `low` to `high` to `f`, with their weights. Others may come, too, with none.
    ///
    /// # Safety
    /// The ranks are of a row as [`row`](super::row) asks.
    unsafe fn each_between(&self, low: u64, high: u64, weight: impl Weight, f: impl FnMut(u64, u64));
}

/// All of a slice.
pub(crate) struct All<C: Change>(pub Row, pub PhantomData<C>);

impl<C: Change> Ranks for All<C> {
    #[inline(always)]
    unsafe fn each_between(&self, low: u64, high: u64, weight: impl Weight, mut f: impl FnMut(u64, u64)) {
        // SAFETY: the caller's word.
        unsafe {
            // No logit has a key below that of the lowest.
            let lowest = rank(f32::NEG_INFINITY, u32::MAX);
            let [least, most] = [low.max(lowest), high].map(ranked_logit);
            // Of the outermost logits not every token may be in question.
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

/// One of each thread.
pub(crate) struct One(pub u64);

impl Ranks for One {
    #[inline(always)]
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

    /// Adds a weight to a bin of the block's histogram, word by word `BINS` apart.
    ///
    /// # Safety
    /// `bins` are the block's, and `bin` is below [`BINS`].
    unsafe fn add(bins: Shared<u32>, bin: u32, weight: u64);

    /// A bin's sum.
    ///
    /// # Safety
    /// As for [`add`](Self::add); nobody adds any more.
    unsafe fn sum(bins: Shared<u32>, bin: u32) -> u64;
}

/// # Safety
/// `bins` are the block's, with this word, and `bin` is below [`BINS`].
#[inline(always)]
unsafe fn add_word(bins: Shared<u32>, word: u32, bin: u32, value: u32) {
    // SAFETY: the caller's word.
    unsafe {
        atomic::fetch_add(bins, (word * BINS + bin) as usize, value, Ordering::Relaxed, Scope::Block);
    }
}

/// # Safety
/// As for [`add_word`]; nobody adds any more.
#[inline(always)]
unsafe fn word(bins: Shared<u32>, word: u32, bin: u32) -> u64 {
    // SAFETY: the caller's word.
    unsafe { u64::from(bins.load((word * BINS + bin) as usize)) }
}

/// Every logit counts one.
#[derive(Clone, Copy)]
pub(crate) struct Count;

impl Weight for Count {
    const WORDS: u32 = 1;

    #[inline(always)]
    fn of<const N: usize>(self, _: &[f32; N]) -> [u64; N] {
        [1; N]
    }

    #[inline(always)]
    unsafe fn add(bins: Shared<u32>, bin: u32, _: u64) {
        // SAFETY: the caller's word.
        unsafe { add_word(bins, 0, bin, 1) }
    }

    #[inline(always)]
    unsafe fn sum(bins: Shared<u32>, bin: u32) -> u64 {
        // SAFETY: the caller's word.
        unsafe { word(bins, 0, bin) }
    }
}

/// A logit weighs its [mass](super::mass) by a temperature, in a row with this largest logit after it.
#[derive(Clone, Copy)]
pub(super) struct Mass {
    pub max: f32,
    pub temperature: f32,
}

/// Bits of a word of a mass: `2^(32 − 14)` of them add up without a carry.
const WORD_BITS: u32 = 14;
/// Most logits of a row: what the words of a [`Mass`] in a histogram can add up.
pub const MOST_VOCAB: u32 = 1 << (32 - WORD_BITS);

impl Weight for Mass {
    const WORDS: u32 = 3;

    #[inline(always)]
    fn of<const N: usize>(self, logits: &[f32; N]) -> [u64; N] {
        masses_of(&logits.map(|logit| logit / self.temperature - self.max))
    }

    // Shared memory has no addition of 64 bits.
    #[inline(always)]
    unsafe fn add(bins: Shared<u32>, bin: u32, weight: u64) {
        // SAFETY: the caller's word.
        unsafe {
            let mask = (1 << WORD_BITS) - 1;
            add_word(bins, 0, bin, weight as u32 & mask);
            add_word(bins, 1, bin, (weight >> WORD_BITS) as u32 & mask);
            add_word(bins, 2, bin, (weight >> (2 * WORD_BITS)) as u32);
        }
    }

    #[inline(always)]
    unsafe fn sum(bins: Shared<u32>, bin: u32) -> u64 {
        // SAFETY: the caller's word.
        unsafe { word(bins, 0, bin) + (word(bins, 1, bin) << WORD_BITS) + (word(bins, 2, bin) << (2 * WORD_BITS)) }
    }
}

/// What is asked of a [`select`].
#[derive(Clone, Copy)]
pub(crate) struct Question {
    /// The ranks in question: from `low`…
    pub low: u64,
    /// …to `high`.
    pub high: u64,
    /// A bin of `2^narrow` ranks is narrow enough: 32 is a logit, 0 a token.
    pub narrow: u32,
    /// So is any if the weights from its lowest rank upwards add up to no more than this.
    pub enough: u64,
}

/// The lowest rank of the bin in which the weights of ranks, from the highest downwards, reach `target` of the sum of
/// all of them; 0 where they do not, or there is no target.
///
/// # Safety
/// The question's `low` is at most its `high`.
#[inline(always)]
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
        // What is kept between passes, by place in shared memory: the weights of ranks above those in question, and
        // what is to be reached.
        let result = shared::dynamic::<u64>(RESULT);
        let mut is_first = true;
        loop {
            // What the largest distance of a bin from the first must be shifted by to be below `BINS`.
            let shift = (64 - (high - low).leading_zeros()).saturating_sub(BINS.ilog2()).max(narrow);
            let bins = histogram(of, low, high, shift, weight);
            let bins = team.add_bins(thread::thread_idx_x() * OWN as u32, bins);
            let mut own = 0;
            unroll!(I < OWN of 8; {
                own += bins[I];
            });
            let upto = running_total(own);
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

/// The block's histogram of the ranks from `low` to `high`, the highest first, of which a thread is told [`OWN`] bins.
///
/// # Safety
/// `low` is at most `high`, and `high - low`, shifted, below [`BINS`].
#[inline(always)]
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
