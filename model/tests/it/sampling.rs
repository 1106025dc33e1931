//! Properties of the sampler.

use model::Sampling;
use model::sampling::{LEAST_TEMPERATURE, UNIT_MASS, argmax, mass, mass_below, random};
use proptest::prelude::*;

const FREE: Sampling = Sampling {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    seed: 0,
};

/// Logits with many ties, as bf16 heads make them.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec((-40..40i32).prop_map(|i| i as f32 / 4.0), 1..60)
}

/// The set that the definition keeps, worked out for each value by itself, without the sorted prefix.
fn kept(logits: &[f32], s: &Sampling) -> Vec<bool> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let above = |l: f32| logits.iter().filter(|&&m| m > l).count();
    let mut kept: Vec<bool> = logits.iter().map(|&l| s.top_k == 0 || above(l) < s.top_k as usize).collect();
    let total: u64 = logits.iter().zip(&kept).filter(|(_, k)| **k).map(|(&l, _)| mass_below(l, max)).sum();
    if s.top_p < 1.0 {
        let wanted = ((s.top_p as f64 * total as f64) as u64).max(1);
        // A value stays if the values strictly above it do not reach the share.
        let mass_above = |l: f32| -> u64 { logits.iter().filter(|&&m| m > l).map(|&m| mass_below(m, max)).sum() };
        for (k, &l) in kept.iter_mut().zip(logits) {
            *k &= mass_above(l) < wanted;
        }
    }
    if s.min_p > 0.0 {
        let least = ((s.min_p as f64 * UNIT_MASS as f64) as u64).max(1);
        for (k, &l) in kept.iter_mut().zip(logits) {
            *k &= mass_below(l, max) >= least;
        }
    }
    kept
}

proptest! {
    #[test]
    fn draws_by_the_definition(
        logits in logits(), temperature in 0.1..3f32, top_k in 0..20u32, top_p in 0.01..=1f32,
        min_p in 0.0..0.5f32, seed: u64, position in 0..5usize,
    ) {
        let s = Sampling { temperature, top_k, top_p, min_p, seed, ..FREE };
        s.check().unwrap();
        let scaled: Vec<f32> = logits.iter().map(|l| l / temperature).collect();
        let max = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let kept = kept(&scaled, &s);
        let masses: Vec<u64> = scaled.iter().zip(&kept).map(|(&l, &k)| if k { mass_below(l, max) } else { 0 }).collect();
        let total: u64 = masses.iter().sum();
        let target = ((random(seed, position as u64) as u128 * total as u128) >> 64) as u64;
        let mut running = 0;
        let expected = masses.iter().position(|m| { running += m; running > target }).unwrap();
        prop_assert_eq!(s.sample(&logits, &vec![0; position], &[]), expected as u32);
    }

    #[test]
    fn one_choice_left_is_the_largest(logits in logits(), seed: u64) {
        let best = argmax(&logits);
        prop_assert_eq!(Sampling { seed, ..Sampling::default() }.sample(&logits, &[], &[]), best);
        // Ties of the largest are kept, but nothing else is.
        for s in [Sampling { top_k: 1, ..FREE }, Sampling { top_p: 1e-6, ..FREE }, Sampling { min_p: 1.0, ..FREE }] {
            let token = Sampling { seed, ..s }.sample(&logits, &[], &[]);
            prop_assert_eq!(logits[token as usize], logits[best as usize]);
        }
    }

    /// The same history and seed give the same token, wherever the prompt ends within it.
    #[test]
    fn depends_on_position_alone(logits in logits(), history in prop::collection::vec(0..60u32, 0..8), cut in any::<prop::sample::Index>(), seed: u64) {
        let s = Sampling { seed, repetition_penalty: 1.3, ..FREE };
        let (prompt, output) = history.split_at(cut.index(history.len() + 1));
        prop_assert_eq!(s.sample(&logits, prompt, output), s.sample(&logits, &history, &[]));
    }

    #[test]
    fn penalties(logits in logits(), prompt in prop::collection::vec(0..70u32, 0..6), output in prop::collection::vec(0..70u32, 0..6)) {
        let s = Sampling { repetition_penalty: 2.0, presence_penalty: 0.5, frequency_penalty: 0.25, ..FREE };
        let mut changed = logits.clone();
        s.penalise(&mut changed, &prompt, &output);
        for (token, (&before, &after)) in logits.iter().zip(&changed).enumerate() {
            let token = token as u32;
            let mut expected = before;
            if prompt.contains(&token) || output.contains(&token) {
                expected = if before > 0.0 { before / 2.0 } else { before * 2.0 };
            }
            let times = output.iter().filter(|t| **t == token).count();
            if times > 0 {
                expected -= 0.5 + 0.25 * times as f32;
            }
            prop_assert_eq!(after, expected);
        }
    }

    #[test]
    fn mass_is_the_exponential(delta in -28.0..=0f32) {
        let exact = (delta as f64).exp() * UNIT_MASS as f64;
        prop_assert!((mass(delta) as f64 - exact).abs() <= 1.0 + exact * 1e-15, "{} {}", mass(delta), exact);
        prop_assert!(mass(delta) >= mass(delta.next_down()));
    }

    #[test]
    fn any_bits_are_answered(bits in prop::collection::vec(any::<u32>(), 0..20), temperature in 0.0..2f32, top_k in 0..4u32, top_p in 0.01..=1f32) {
        let logits: Vec<f32> = bits.iter().map(|b| f32::from_bits(*b)).collect();
        let token = Sampling { temperature, top_k, top_p, ..FREE }.sample(&logits, &[], &[]);
        prop_assert!((token as usize) < logits.len().max(1));
        if logits.iter().any(|l| *l > f32::NEG_INFINITY) {
            prop_assert!(!logits[token as usize].is_nan());
        }
    }
}

#[test]
fn edges() {
    assert_eq!((mass(0.0), mass(-28.1), mass(f32::NEG_INFINITY), mass(f32::NAN)), (UNIT_MASS, 0, 0, 0));
    assert_eq!(mass_below(f32::INFINITY, f32::INFINITY), UNIT_MASS);
    assert_eq!(argmax(&[f32::NAN, 1.0, 2.0, 2.0, f32::NAN]), 2);
    assert_eq!(FREE.sample(&[f32::NEG_INFINITY, f32::NAN], &[], &[]), 0);
    assert_eq!(FREE.sample(&[0.0, f32::INFINITY, f32::NAN, 5.0], &[], &[]), 1);
    assert_eq!(FREE.sample(&[], &[], &[]), 0);
}

#[test]
fn random_numbers_are_fixed_for_ever() {
    // Worked out independently, with Python's integers.
    assert_eq!([random(0, 0), random(42, 7)], [0xa706dd2f4d197e6f, 0xbc16a3d4cc48678e]);
    let distinct: std::collections::HashSet<u64> = (0..64).flat_map(|s| (0..64).map(move |p| random(s, p))).collect();
    assert_eq!(distinct.len(), 64 * 64);
    let mean = (0..10_000).map(|p| random(1, p) as f64 / 2f64.powi(64)).sum::<f64>() / 10_000.0;
    assert!((mean - 0.5).abs() < 0.01, "{mean}");
}

#[test]
fn frequencies_follow_the_masses() {
    let logits = [0.0, (0.5f32).ln(), (0.25f32).ln(), f32::NEG_INFINITY];
    let mut counts = [0; 4];
    for seed in 0..20_000 {
        counts[Sampling { seed, ..FREE }.sample(&logits, &[1, 2], &[3]) as usize] += 1;
    }
    for (count, share) in counts.iter().zip([4.0 / 7.0, 2.0 / 7.0, 1.0 / 7.0, 0.0]) {
        assert!((*count as f64 / 20_000.0 - share).abs() < 0.015, "{counts:?}");
    }
}

#[test]
fn settings_out_of_range_are_refused() {
    for (s, name) in [
        (Sampling { temperature: -1.0, ..FREE }, "temperature"),
        (Sampling { temperature: f32::NAN, ..FREE }, "temperature"),
        (Sampling { top_p: 0.0, ..FREE }, "top_p"),
        (Sampling { top_p: 1.5, ..FREE }, "top_p"),
        (Sampling { min_p: -0.1, ..FREE }, "min_p"),
        (Sampling { repetition_penalty: 0.0, ..FREE }, "repetition_penalty"),
        (Sampling { presence_penalty: f32::INFINITY, ..FREE }, "presence_penalty"),
        (Sampling { frequency_penalty: f32::NAN, ..FREE }, "frequency_penalty"),
    ] {
        assert!(s.check().unwrap_err().to_string().contains(name));
    }
    Sampling::default().check().unwrap();
}

/// Dividing by such a temperature would make several logits infinite, each as likely as the largest.
#[test]
fn the_limit_of_small_temperatures_is_greedy() {
    let logits = [1.0, 40.0, 3.0, 39.5, -2.0, 40.5, 12.0];
    for temperature in [0.0, f32::from_bits(1), 1e-45, 1e-38, f32::MIN_POSITIVE, 1e-36, 9e-31, LEAST_TEMPERATURE, 1e-20]
    {
        for seed in 0..64 {
            let s = Sampling { temperature, seed, ..FREE };
            s.check().unwrap();
            assert_eq!(s.sample(&logits, &[], &[]), 5, "at {temperature:e}");
        }
    }
    // The temperature alone decides that it is greedy. Of ties the first wins.
    let tied = Sampling { temperature: 1e-38, seed: 3, ..FREE };
    assert!(tied.is_greedy() && tied.takes_best());
    assert_eq!(tied.sample(&[1.0, 5.0, 5.0, 5.0], &[], &[]), 1);
    assert!(!Sampling { temperature: LEAST_TEMPERATURE, ..FREE }.is_greedy());
}
