//! Choosing the token after each row: the largest logit, or a draw from the model's distribution.
//!
//! One block a row. Penalties, then temperature, top-k, top-p and min-p, in this order; what is left is drawn from by inverting the
//! cumulative distribution in vocabulary order.
//!
//! # Order
//! A token's mass is the integer `⌊exp(logit − max) · 2⁴⁰⌋`. Integer sums are associative, so histograms and totals come out the
//! same however the threads interleave. The random number is a function of the seed and of the token's position, so a draw depends on
//! the row's own history alone.
//!
//! # Why accepting a draft is a comparison
//! Rejection sampling accepts a draft `d` with probability `min(1, p(d) / q(d))`, and on refusal draws from the normalised excess of
//! `p` over `q` (Leviathan et al., 2023). An n-gram draft is proposed with certainty: `q(d) = 1`. Then it is accepted with
//! probability `p(d)`, and on refusal the draw is from `p` without `d`. Drawing from `p` and comparing does the same in one
//! stroke. And since the draw is the same with or without the draft, drafting does not change sampled output either.

use cuda_std::atomic::{Ordering, Scope};
use cuda_std::{Global, GlobalMut, atomic, kernel, math, shared, thread, warp};

use crate::step::Rows;

/// Of a token's uses, which are one word: it occurs in the prompt.
pub const PROMPTED: u32 = 1;
/// Each time that it occurs in the output adds this.
pub const GENERATED: u32 = 2;

pub(crate) const THREADS: u32 = 1024;
pub(crate) const WARPS: u32 = THREADS / 32;
/// The mass of the likeliest token.
pub const UNIT_MASS: u64 = 1 << 40;

/// Parameters of [`sample`]. Grid: (1, rows). Shared memory: [`Sample::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Sample {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, vocab]`; changed in place when not greedy.
    pub logits: GlobalMut<f32>,
    /// `[vocab]` uses of tokens: [`PROMPTED`], [`GENERATED`].
    pub uses: Global<u32>,
    /// `[rows]` the chosen tokens.
    pub sampled: GlobalMut<u32>,
    /// How it is chosen.
    pub settings: Settings,
    /// Tokens.
    pub vocab: u32,
    /// First row that needs a token.
    pub first_row: u32,
}

/// How a token is chosen.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, cuda_std::Layout)]
pub struct Settings {
    /// Chooses the random numbers.
    pub seed: u64,
    /// 0 takes the largest logit.
    pub temperature: f32,
    /// Keep the tokens whose logit is at least the k-th largest; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest tokens that together have this share; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of seen tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of generated tokens; 0 is off.
    pub presence_penalty: f32,
    /// Likewise, for each time that they were generated.
    pub frequency_penalty: f32,
}

impl Settings {
    /// From [`Choice::words`].
    #[inline(always)]
    unsafe fn load(words: Global<u32>) -> Self {
        unsafe {
            Self {
                seed: words.load(0) as u64 | (words.load(1) as u64) << 32,
                temperature: f32::from_bits(words.load(2)),
                top_k: words.load(3),
                top_p: f32::from_bits(words.load(4)),
                min_p: f32::from_bits(words.load(5)),
                repetition_penalty: f32::from_bits(words.load(6)),
                presence_penalty: f32::from_bits(words.load(7)),
                frequency_penalty: f32::from_bits(words.load(8)),
            }
        }
    }
}

impl Sample {
    /// A histogram of 256 masses, one total a warp, and two words of results.
    pub const SHARED_BYTES: u32 = (256 + WARPS + 2) * 8;
}

/// The random 64-bit number of the token at `position` of a sequence with this `seed`: two rounds of SplitMix64 (Steele, Lea and
/// Flood, 2014, "Fast splittable pseudorandom number generators"), the first for the stream, the second for its element.
pub fn random(seed: u64, position: u64) -> u64 {
    const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
    let stream = mix(seed.wrapping_add(GOLDEN));
    mix(stream.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)))
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// An integer that orders as the logit does, with NaN below everything.
#[inline(always)]
pub(crate) fn key(logit: f32) -> u32 {
    // The addition makes -0 and 0, which are equal, one key.
    let bits = (logit + 0.0).to_bits();
    if logit.is_nan() {
        0
    } else if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// An integer that orders as the logits do, and equal logits by token, the lowest first.
#[inline(always)]
pub fn rank(logit: f32, token: u32) -> u64 {
    u64::from(key(logit)) << 32 | u64::from(!token)
}

/// The token of a [`rank`].
#[inline(always)]
pub fn ranked_token(rank: u64) -> u32 {
    !(rank as u32)
}

/// The logit of a [`rank`].
#[inline(always)]
pub fn ranked_logit(rank: u64) -> f32 {
    logit((rank >> 32) as u32)
}

/// The logit of a [`key`].
#[inline(always)]
fn logit(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

/// The mass of a logit in a row whose largest is `max`; the largest itself has [`UNIT_MASS`].
pub fn mass(logit: f32, max: f32) -> u64 {
    if logit == max { UNIT_MASS } else { mass_of(logit - max) }
}

/// `⌊e^delta · 2⁴⁰⌋` for `delta ≤ 0`; 0 below −28 and for NaN.
///
/// Additions and multiplications of f64 alone, never fused: the CPU sampler in `model` computes the same bits (tested).
pub fn mass_of(delta: f32) -> u64 {
    // NaN takes this branch too.
    if !matches!(delta.partial_cmp(&-28.0), Some(core::cmp::Ordering::Greater | core::cmp::Ordering::Equal)) {
        return 0;
    }
    // e^x = 2^n · e^r with n = round(x / ln 2). The high part of ln 2 ends in zero bits, so that n times it is exact.
    const LN2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = delta as f64;
    let n = (x * core::f64::consts::LOG2_E - 0.5) as i32;
    let r = x - n as f64 * LN2_HIGH - n as f64 * LN2_LOW;
    // Taylor, from r¹³ / 13! down.
    let mut sum = 0.0;
    macro_rules! horner {
        ($($factorial:literal)*) => { $( sum = sum * r + 1.0 / $factorial; )* };
    }
    horner!(6_227_020_800.0 479_001_600.0 39_916_800.0 3_628_800.0 362_880.0 40_320.0 5_040.0 720.0 120.0 24.0 6.0 2.0 1.0 1.0);
    let scale = f64::from_bits(((1023 + 40 + n) as u64) << 52);
    ((sum * scale) as u64).min(UNIT_MASS)
}

/// `part` of `whole`, rounded down, and at least 1.
fn share(part: f32, whole: u64) -> u64 {
    ((part as f64 * whole as f64) as u64).max(1)
}

/// The largest of a value over the block, known to every thread.
#[inline(always)]
pub(crate) unsafe fn block_max(mut v: u64, scratch: shared::Shared<u64>) -> u64 {
    unsafe {
        let mut mask = 16;
        while mask > 0 {
            v = v.max(warp::shuffle_xor(v, mask));
            mask /= 2;
        }
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
pub(crate) unsafe fn block_total(v: u64, scratch: shared::Shared<u64>) -> u64 {
    unsafe {
        let own = warp_total(v);
        thread::sync_threads();
        if thread::lane_id() == 0 {
            scratch.store(thread::warp_id() as usize, own);
        }
        thread::sync_threads();
        let (mut total, mut w) = (0, 0);
        while w < WARPS {
            total += scratch.load(w as usize);
            w += 1;
        }
        total
    }
}

/// The sum of a value over the warp.
#[inline(always)]
unsafe fn warp_total(mut v: u64) -> u64 {
    let mut mask = 16;
    while mask > 0 {
        v += warp::shuffle_xor(v, mask);
        mask /= 2;
    }
    v
}

/// The sum over the lanes up to and including this one.
#[inline(always)]
unsafe fn running_total(mut v: u64) -> u64 {
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

/// The row that a block works on, and where its scratch lies.
#[derive(Clone, Copy)]
struct Block {
    logits: GlobalMut<f32>,
    vocab: u32,
    histogram: shared::Shared<u64>,
    totals: shared::Shared<u64>,
    result: shared::Shared<u64>,
}

impl Block {
    /// The largest key `T` such that the weights of the keys from `T` upwards sum to at least `target`; 0 when all of
    /// them do not. Radix select, eight bits a pass.
    #[inline(always)]
    unsafe fn threshold(&self, target: u64, weigh: impl Fn(u32) -> u64) -> u32 {
        unsafe {
            let tid = thread::thread_idx_x();
            let mut prefix = 0u32;
            let mut needed = target;
            let mut shift = 24;
            loop {
                if tid < 256 {
                    self.histogram.store(tid as usize, 0);
                }
                thread::sync_threads();
                let mut i = tid;
                while i < self.vocab {
                    let k = key(self.logits.load(i as usize));
                    if shift == 24 || k >> (shift + 8) == prefix >> (shift + 8) {
                        let w = weigh(k);
                        if w > 0 {
                            let bin = ((k >> shift) & 255) as usize;
                            atomic::fetch_add(self.histogram, bin, w, Ordering::Relaxed, Scope::Block);
                        }
                    }
                    i += THREADS;
                }
                thread::sync_threads();
                // One warp walks the bins from the highest: eight a lane.
                if thread::warp_id() == 0 {
                    let lane = thread::lane_id();
                    let mut own = 0;
                    let mut b = 0;
                    while b < 8 {
                        own += self.histogram.load((255 - lane * 8 - b) as usize);
                        b += 1;
                    }
                    let upto = running_total(own);
                    let before = upto - own;
                    let all = warp::shuffle_idx(upto, 31);
                    if lane == 0 && all < needed {
                        // Not enough weight in all: keep everything.
                        self.result.store(0, 0);
                        self.result.store(1, 0);
                    }
                    if before < needed && needed <= upto {
                        let mut sum = before;
                        let mut bin = 255 - lane * 8;
                        loop {
                            let w = self.histogram.load(bin as usize);
                            if sum + w >= needed {
                                break;
                            }
                            sum += w;
                            bin -= 1;
                        }
                        self.result.store(0, bin as u64);
                        self.result.store(1, needed - sum);
                    }
                }
                thread::sync_threads();
                prefix |= (self.result.load(0) as u32) << shift;
                needed = self.result.load(1);
                if shift == 0 || needed == 0 {
                    thread::sync_threads();
                    return prefix;
                }
                shift -= 8;
            }
        }
    }

    /// The first token in vocabulary order whose running total of `weigh` exceeds `draw(total)`; `fallback` where nothing
    /// weighs anything.
    #[inline(always)]
    unsafe fn invert(&self, fallback: u32, weigh: impl Fn(f32) -> u64, draw: impl Fn(u64) -> u64) -> u32 {
        unsafe {
            let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
            // A warp takes a contiguous range, so that totals run in vocabulary order.
            let range = self.vocab.div_ceil(WARPS);
            let first = warp_id * range;
            let end = (first + range).min(self.vocab);
            let weight_at = |i: u32| if i < end { weigh(self.logits.load(i as usize)) } else { 0 };
            let mut own = 0;
            let mut base = first;
            while base < end {
                own += weight_at(base + lane);
                base += 32;
            }
            let own = warp_total(own);
            if lane == 0 {
                self.totals.store(warp_id as usize, own);
                if warp_id == 0 {
                    self.result.store(0, fallback as u64);
                }
            }
            thread::sync_threads();
            let (mut before, mut total) = (0, 0);
            let mut w = 0;
            while w < WARPS {
                let t = self.totals.load(w as usize);
                if w < warp_id {
                    before += t;
                }
                total += t;
                w += 1;
            }
            let r = draw(total);
            if before <= r && r < before + own {
                let mut base = first;
                loop {
                    let w = weight_at(base + lane);
                    let upto = before + running_total(w);
                    if upto - w <= r && r < upto {
                        self.result.store(0, (base + lane) as u64);
                    }
                    before = warp::shuffle_idx(upto, 31);
                    base += 32;
                    if r < before {
                        break;
                    }
                }
            }
            thread::sync_threads();
            self.result.load(0) as u32
        }
    }
}

/// Chooses the token after each row from `first_row` on.
#[kernel(threads = 1024, min_blocks = 1)]
pub unsafe fn sample(p: Sample) {
    unsafe {
        let row = p.first_row + thread::block_idx_y();
        if row >= p.rows.count.load(0) {
            return;
        }
        let position = p.rows.positions.load(row as usize);
        // Earlier drafts of this step are part of this row's history.
        let token = choose(&p, row, p.first_row + 1..row + 1, position);
        if thread::thread_idx_x() == 0 {
            p.sampled.store(row as usize, token);
        }
    }
}

/// How the token after one row of a batch is chosen: the words of a row of [`SampleEach::choices`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Which row of the logits.
    pub row: u32,
    /// The first of this step's rows whose tokens are drafts up to `row`; `row + 1` if `row` is none.
    pub drafts: u32,
    /// Which row of `uses`.
    pub slot: u32,
    /// Position of the row's token.
    pub position: u32,
    /// How it is chosen.
    pub settings: Settings,
}

impl Choice {
    /// Words of one.
    pub const WORDS: usize = 13;

    /// As the device reads it.
    pub const fn words(&self) -> [u32; Self::WORDS] {
        let s = &self.settings;
        [
            self.row,
            self.drafts,
            self.slot,
            self.position,
            s.seed as u32,
            (s.seed >> 32) as u32,
            s.temperature.to_bits(),
            s.top_k,
            s.top_p.to_bits(),
            s.min_p.to_bits(),
            s.repetition_penalty.to_bits(),
            s.presence_penalty.to_bits(),
            s.frequency_penalty.to_bits(),
        ]
    }
}

/// Parameters of [`sample_each`]. Grid: choices. Shared memory: [`Sample::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct SampleEach {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, vocab]`; changed in place when not greedy.
    pub logits: GlobalMut<f32>,
    /// `[slots, vocab]` uses of tokens: [`PROMPTED`], [`GENERATED`]; read for choices with penalties alone.
    pub uses: Global<u32>,
    /// `[choices, Choice::WORDS]`, each for another row.
    pub choices: Global<u32>,
    /// `[choices]` the chosen tokens.
    pub sampled: GlobalMut<u32>,
    /// Tokens.
    pub vocab: u32,
}

/// Chooses tokens after rows of many sequences, each by its own settings: as [`sample`] would.
#[kernel(threads = 1024, min_blocks = 1)]
pub unsafe fn sample_each(p: SampleEach) {
    unsafe {
        let choice = thread::block_idx_x() as usize;
        let words = p.choices.at(choice * Choice::WORDS);
        let (row, drafts, slot, position) = (words.load(0), words.load(1), words.load(2), words.load(3));
        let one = Sample {
            rows: p.rows,
            logits: p.logits,
            uses: p.uses.at(slot as usize * p.vocab as usize),
            sampled: p.sampled,
            settings: Settings::load(words.at(4)),
            vocab: p.vocab,
            first_row: 0,
        };
        let token = choose(&one, row, drafts..row + 1, position);
        if thread::thread_idx_x() == 0 {
            p.sampled.store(choice, token);
        }
    }
}

/// The token after a row whose own is at `position`. Its history is what `uses` tells, and the tokens of the rows `drafts`.
#[inline(always)]
unsafe fn choose(p: &Sample, row: u32, drafts: core::ops::Range<u32>, position: u32) -> u32 {
    unsafe {
        let (tid, s) = (thread::thread_idx_x(), &p.settings);
        let block = Block {
            logits: p.logits.at(row as usize * p.vocab as usize),
            vocab: p.vocab,
            histogram: shared::dynamic(0),
            totals: shared::dynamic(256 * 8),
            result: shared::dynamic((256 + WARPS) * 8),
        };

        // Penalties and temperature, and the first of the largest logits.
        let penalised = s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0;
        let mut best = 0u64;
        let mut i = tid;
        while i < p.vocab {
            let mut l = block.logits.load(i as usize);
            if penalised {
                let mut uses = p.uses.load(i as usize);
                let mut r = drafts.start;
                while r < drafts.end {
                    if p.rows.tokens.load(r as usize) == i {
                        uses += GENERATED;
                    }
                    r += 1;
                }
                if uses != 0 {
                    l = if l > 0.0 { l / s.repetition_penalty } else { l * s.repetition_penalty };
                }
                let times = uses / GENERATED;
                if times != 0 {
                    l -= s.presence_penalty;
                    l -= s.frequency_penalty * times as f32;
                }
            }
            if s.temperature > 0.0 {
                l /= s.temperature;
                block.logits.store(i as usize, l);
            }
            best = best.max(rank(l, i));
            i += THREADS;
        }
        let best = block_max(best, block.totals);
        let mut token = ranked_token(best);

        if s.temperature > 0.0 {
            let max = ranked_logit(best);
            thread::sync_threads();
            let mut floor = 0;
            if s.top_k > 0 && s.top_k < p.vocab {
                floor = block.threshold(s.top_k as u64, |_| 1);
            }
            if s.top_p < 1.0 {
                let weigh = |k: u32| if k >= floor { mass(logit(k), max) } else { 0 };
                let mut own = 0;
                let mut i = tid;
                while i < p.vocab {
                    own += weigh(key(block.logits.load(i as usize)));
                    i += THREADS;
                }
                let total = block_total(own, block.totals);
                floor = floor.max(block.threshold(share(s.top_p, total), weigh));
            }
            let least = if s.min_p > 0.0 { share(s.min_p, UNIT_MASS) } else { 0 };
            let weigh = |l: f32| {
                if key(l) < floor {
                    return 0;
                }
                let m = mass(l, max);
                if m >= least { m } else { 0 }
            };
            let number = random(s.seed, position as u64 + 1);
            token = block.invert(token, weigh, |total| math::mul_hi_u64(number, total));
        }
        token
    }
}
