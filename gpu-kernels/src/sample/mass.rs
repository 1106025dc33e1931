//! The parts of a draw, as plain functions that the host shares: ranks of logits, their masses, and random numbers.

use cuda_std::device;
use cuda_std::math;

use crate::step::NO_TOKEN;

/// The mass of the likeliest token.
pub const UNIT_MASS: u64 = 1 << 40;
/// A logit that lies this far below the largest, or further, has no mass.
pub(super) const REACH: f64 = 28.001;

/// The random 64-bit number of the token at `position` of a sequence with this `seed`: two rounds of SplitMix64
/// (Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators"), the first for the stream, the
/// second for its element.
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

/// An integer that orders as the logit does, with NaN above everything, since it must not go unnoticed.
#[device]
pub(crate) fn key(logit: f32) -> u32 {
    // The addition makes -0 and 0, which are equal, one key.
    let bits = (logit + 0.0).to_bits();
    if logit.is_nan() {
        u32::MAX
    } else if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// The logit of a [`key`].
#[device]
pub(super) fn logit(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

/// An integer that orders tokens by logit. Of equal logits the lowest token has the highest rank.
#[device]
pub fn rank(logit: f32, token: u32) -> u64 {
    u64::from(key(logit)) << 32 | u64::from(!token)
}

/// The token of a [`rank`].
#[device]
pub fn ranked_token(rank: u64) -> u32 {
    !(rank as u32)
}

/// The logit of a [`rank`].
#[device]
pub fn ranked_logit(rank: u64) -> f32 {
    logit((rank >> 32) as u32)
}

/// The token of the best [`rank`] of a row; [`NO_TOKEN`] if its logit is NaN or infinite, so that there is nothing to
/// choose by.
#[device]
pub fn best_token(best: u64) -> u32 {
    let key = (best >> 32) as u32;
    let finite = key > self::key(f32::NEG_INFINITY) && key < self::key(f32::INFINITY);
    if finite { ranked_token(best) } else { NO_TOKEN }
}

/// The mass of a logit in a row whose largest is `max`, a finite number; the largest itself has [`UNIT_MASS`].
#[device]
pub fn mass(logit: f32, max: f32) -> u64 {
    mass_of(logit - max)
}

/// `⌊e^delta · 2⁴⁰⌋` for `delta ≤ 0`; 0 below −28 and for NaN.
///
/// Additions and multiplications of f64 alone, never fused: the CPU sampler in `model` computes the same bits (tested).
#[device]
pub fn mass_of(delta: f32) -> u64 {
    masses_of(&[delta])[0]
}

/// [`mass_of`] each. Each step is done for all of them before the next one, so that latencies overlap.
#[device]
pub(crate) fn masses_of<const N: usize>(deltas: &[f32; N]) -> [u64; N] {
    // e^x = 2^n · e^r with n = round(x / ln 2). The high part of ln 2 ends in zero bits, so that n times it is exact.
    const LN2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let (mut whole, mut rest, mut sums) = ([0; N], [0.0; N], [0.0; N]);
    unroll!(I < N of 4; {
        // The mass of −28 is 0. Everything below it, and NaN, becomes −28 here, so its mass is 0, too.
        let x = f64::from(math::max(deltas[I], -28.0));
        whole[I] = (x * core::f64::consts::LOG2_E - 0.5) as i32;
        rest[I] = x - f64::from(whole[I]) * LN2_HIGH - f64::from(whole[I]) * LN2_LOW;
    });
    // The Taylor series of e^r, up to r¹³.
    macro_rules! horner {
        ($($factorial:literal)*) => { $( unroll!(I < N of 4; {
            sums[I] = sums[I] * rest[I] + 1.0 / $factorial;
        }); )* };
    }
    horner!(6_227_020_800.0 479_001_600.0 39_916_800.0 3_628_800.0 362_880.0 40_320.0 5_040.0 720.0 120.0 24.0 6.0 2.0 1.0 1.0);
    let mut masses = [0; N];
    unroll!(I < N of 4; {
        let scale = f64::from_bits(((1023 + 40 + whole[I]) as u64) << 52);
        masses[I] = ((sums[I] * scale) as u64).min(UNIT_MASS);
    });
    masses
}

/// `part` of `whole`, rounded down, and at least 1.
pub(super) fn share(part: f32, whole: u64) -> u64 {
    ((part as f64 * whole as f64) as u64).max(1)
}
