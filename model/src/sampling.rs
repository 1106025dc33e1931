//! The sampler: the plain version, against which the GPU kernel is written and tested.
//!
//! It makes one token of one row of logits: penalties, temperature, top-k, top-p, min-p, draw. The probability of a
//! token is an integer *mass* ([`mass`]), `floor(e^(logit - max) × 2^40)`. Integers add up to the same total in any
//! order, so a parallel sampler gives exactly the same answer, and what is kept depends on the values of the logits
//! alone, never on their order.
//!
//! The random number of a draw is a function of the seed and of the token's position in its sequence ([`random`]), not
//! of how many draws came before. That makes sampling with drafts simple. A drafted token is a point mass: the draft
//! distribution gives it probability 1. Speculative sampling (Leviathan, Kalman and Matias, *Fast Inference from
//! Transformers via Speculative Decoding*, ICML 2023) accepts a draft `x` with probability `min(1, p(x) / q(x)) = p(x)`
//! and on rejection draws from `p` with `x` left out. Drawing `y` from `p` and accepting while `y = x` does just that:
//! `y = x` with probability `p(x)`, and given `y ≠ x`, `y` follows `p` without `x`. So each row is sampled with its own
//! position's number as if there were no drafts, and drafts are accepted while they agree: the output is not only
//! distributed as without drafting, it is the same text for the same seed.

use std::collections::HashMap;

use crate::Error;
use crate::form::is_allowed;

/// How a token is chosen. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0, or less than [`LEAST_TEMPERATURE`], picks the largest logit.
    pub temperature: f32,
    /// Keeps the tokens whose logit is at least the `top_k`-th largest (ties are all kept); 0 keeps all.
    pub top_k: u32,
    /// Keeps the likeliest tokens that together have this share of the mass that top-k kept; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens that are at least this share as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive logits and multiplies the negative logits of every token in the prompt or the output; 1 is
    /// off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token in the output, once however often it came; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from the logit of every token in the output, once for each time that it came; 0 is off.
    pub frequency_penalty: f32,
    /// Seed of the random numbers; equal seeds give equal output.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// Mass of the likeliest token: 1.0 in fixed point with 40 fraction bits. 152 thousand of them fit a u64 64 times over.
pub const UNIT_MASS: u64 = 1 << 40;

/// Temperatures below this one are greedy, as their limit is. Dividing by one of them could make several logits
/// infinite, and so equal. Dividing by this one does so only to logits above 3 × 10^8, which no model has.
pub const LEAST_TEMPERATURE: f32 = 1e-30;

impl Sampling {
    /// Checks that every setting is in its range.
    ///
    /// # Errors
    /// [`Error::SamplingRange`].
    pub fn check(&self) -> Result<(), Error> {
        for (setting, value, reason, ok) in [
            (
                "temperature",
                self.temperature,
                "it must be a finite number, 0 (greedy) or more",
                self.temperature >= 0.0 && self.temperature.is_finite(),
            ),
            ("top_p", self.top_p, "it must be above 0 and at most 1", self.top_p > 0.0 && self.top_p <= 1.0),
            ("min_p", self.min_p, "it must be at least 0 and at most 1", (0.0..=1.0).contains(&self.min_p)),
            (
                "repetition_penalty",
                self.repetition_penalty,
                "it must be a finite number above 0",
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                "it must be a finite number",
                self.presence_penalty.is_finite(),
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                "it must be a finite number",
                self.frequency_penalty.is_finite(),
            ),
        ] {
            if !ok {
                return Err(Error::SamplingRange { setting, value, reason });
            }
        }
        Ok(())
    }

    /// Whether penalties need the tokens that came before.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether the token is the one with the largest logit after penalties: no random number, no top-k, top-p or min-p.
    pub fn is_greedy(&self) -> bool {
        self.temperature < LEAST_TEMPERATURE
    }

    /// Whether the token is the one with the largest logit, whatever came before.
    pub fn takes_best(&self) -> bool {
        self.is_greedy() && !self.has_penalties()
    }

    /// Chooses the token after `prompt` and `output` from its `logits`, `[vocab]`.
    ///
    /// The token's position, which its random number depends on, is `prompt.len() + output.len()`. NaN never wins, and
    /// if all logits are NaN or -inf the answer is token 0. An empty row answers 0 too.
    pub fn sample(&self, logits: &[f32], prompt: &[u32], output: &[u32]) -> u32 {
        self.sample_allowed(logits, None, prompt, output)
    }

    /// As `sample`, but if there is a [mask](crate::form::mask_words), tokens that it does not allow are treated as if
    /// their logits were -inf.
    pub fn sample_allowed(&self, logits: &[f32], mask: Option<&[u32]>, prompt: &[u32], output: &[u32]) -> u32 {
        let mut logits = logits.to_vec();
        if let Some(mask) = mask {
            let ruled_out = logits.iter_mut().zip(0..).filter(|(_, token)| !is_allowed(mask, *token));
            ruled_out.for_each(|(logit, _)| *logit = f32::NEG_INFINITY);
        }
        self.penalise(&mut logits, prompt, output);
        if self.is_greedy() {
            return argmax(&logits);
        }
        for logit in &mut logits {
            *logit /= self.temperature;
        }
        let kept = Filtered::new(&logits, self);
        kept.draw(&logits, random(self.seed, (prompt.len() + output.len()) as u64))
    }

    /// Applies the penalties, to each token at once: repetition, presence, frequency.
    pub fn penalise(&self, logits: &mut [f32], prompt: &[u32], output: &[u32]) {
        if !self.has_penalties() {
            return;
        }
        // How often each token of the prompt or the output is in the output.
        let mut times: HashMap<u32, u32> = prompt.iter().map(|token| (*token, 0)).collect();
        for token in output {
            *times.entry(*token).or_default() += 1;
        }
        for (token, times) in times {
            let Some(logit) = logits.get_mut(token as usize) else {
                continue;
            };
            *logit = if *logit > 0.0 { *logit / self.repetition_penalty } else { *logit * self.repetition_penalty };
            if times > 0 {
                *logit -= self.presence_penalty;
                *logit -= self.frequency_penalty * times as f32;
            }
        }
    }
}

/// Index of the largest number. Of equal numbers the first wins, NaN never wins, and the answer is 0 if nothing wins.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best.0 {
            best = (logit, token);
        }
    }
    best.1 as u32
}

/// What top-k, top-p and min-p leave of one row: the tokens with a logit of at least `floor`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Filtered {
    max: f32,
    /// Least logit kept. All three filters keep a prefix of the logits in descending order, so one number describes it.
    floor: f32,
    /// Sum of the masses kept.
    total: u64,
}

impl Filtered {
    /// `logits` are those after penalties and temperature.
    fn new(logits: &[f32], sampling: &Sampling) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sorted: Vec<f32> = logits.iter().copied().filter(|l| !l.is_nan()).collect();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));

        let mut floor = f32::NEG_INFINITY;
        if let Some(&kth) = sampling.top_k.checked_sub(1).and_then(|k| sorted.get(k as usize)) {
            floor = kth;
        }
        sorted.truncate(sorted.partition_point(|&l| l >= floor));
        if sampling.top_p < 1.0 {
            let total: u64 = sorted.iter().map(|&l| mass_below(l, max)).sum();
            let wanted = share(sampling.top_p, total);
            let mut reached = 0u64;
            for values in sorted.chunk_by(|a, b| a == b) {
                reached += mass_below(values[0], max) * values.len() as u64;
                floor = values[0];
                if reached >= wanted {
                    break;
                }
            }
        }
        let least = if sampling.min_p > 0.0 { share(sampling.min_p, UNIT_MASS) } else { 0 };
        let kept = sorted.iter().copied().filter(|&l| l >= floor && mass_below(l, max) >= least);
        let (floor, total) = kept.fold((max, 0), |(floor, total), l| (f32::min(floor, l), total + mass_below(l, max)));
        Filtered { max, floor, total }
    }

    /// The first token in vocabulary order at which the running mass exceeds `random / 2^64` of the total.
    fn draw(&self, logits: &[f32], random: u64) -> u32 {
        let target = ((random as u128 * self.total as u128) >> 64) as u64;
        let mut reached = 0;
        for (token, &logit) in logits.iter().enumerate() {
            if logit >= self.floor {
                reached += mass_below(logit, self.max);
                if reached > target {
                    return token as u32;
                }
            }
        }
        0
    }
}

/// `part` of `whole`, rounded down, and at least 1: the mass that top-p must reach, or that min-p asks of a token.
///
/// In f64, whose operations are the same everywhere: `floor(part × whole)`, each factor and the product rounded to
/// nearest.
pub fn share(part: f32, whole: u64) -> u64 {
    ((part as f64 * whole as f64) as u64).max(1)
}

/// Mass of a logit in a row whose largest is `max`. The largest itself always has `UNIT_MASS`, even if it is infinite.
pub fn mass_below(logit: f32, max: f32) -> u64 {
    if logit == max && max > f32::NEG_INFINITY { UNIT_MASS } else { mass(logit - max) }
}

/// `floor(e^delta × 2^40)` for `delta ≤ 0`, where `e^delta` is the value computed here.
///
/// Uses only f64 addition and multiplication and whole-number steps, no library function, so that the same code on
/// another machine (without fused multiply-add) gives the same integer. NaN, and `delta` below -28 (mass under 1), give
/// 0.
pub fn mass(delta: f32) -> u64 {
    if delta.is_nan() || delta < -28.0 {
        return 0;
    }
    // e^x = 2^n e^r with n = round(x / ln 2) and |r| ≤ ln 2 / 2. LN2_HIGH has 21 zero bits at its end, so n × LN2_HIGH
    // is exact.
    const LN2_HIGH: f64 = f64::from_bits(0x3fe6_2e42_fee0_0000);
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = delta as f64;
    let n = (x * std::f64::consts::LOG2_E - 0.5) as i32;
    let r = x - n as f64 * LN2_HIGH - n as f64 * LN2_LOW;
    // Taylor to r^13 / 13!: the next term is below 1e-17 of the result.
    const INVERSE_FACTORIALS: [f64; 14] = [
        1.0 / 6_227_020_800.0,
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let mut sum = 0.0;
    for coefficient in INVERSE_FACTORIALS {
        sum = sum * r + coefficient;
    }
    // 2^(n + 40): n lies in -41..=0, so the exponent field is in range.
    let scale = f64::from_bits(((1023 + 40 + n) as u64) << 52);
    // The clamp keeps rounding just below delta = 0 from exceeding the mass of 0 itself.
    ((sum * scale) as u64).min(UNIT_MASS)
}

/// The random 64-bit number of the token at `position` of a sequence with this `seed`.
///
/// Two rounds of SplitMix64 (Steele, Lea and Flood, *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014): the
/// first spreads the seed into a stream's state, the second takes the stream's element `position`, which SplitMix64
/// reaches without the ones before it.
pub fn random(seed: u64, position: u64) -> u64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let state = mix(seed.wrapping_add(GOLDEN));
    mix(state.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN)))
}

/// SplitMix64's output function.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
