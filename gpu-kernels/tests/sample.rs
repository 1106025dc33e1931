//! The sampler against a plain one, token for token.

mod common;

use common::{Random, RowBuffers, run};
use cuda_std::emulator::Buffer;
use gpu_kernels::sample::{
    self, Choice, GENERATED, PROMPTED, Sample, SampleEach, Settings, UNIT_MASS, mass_of, random,
};
use proptest::prelude::*;

/// The token that the module's documentation promises, by sorting.
fn reference(logits: &[f32], uses: &[u32], s: Settings, number: u64) -> u32 {
    let mut l: Vec<f32> = logits.to_vec();
    for (l, uses) in l.iter_mut().zip(uses) {
        if *uses != 0 {
            *l = if *l > 0.0 { *l / s.repetition_penalty } else { *l * s.repetition_penalty };
        }
        if uses / GENERATED != 0 {
            *l -= s.presence_penalty;
            *l -= s.frequency_penalty * (uses / GENERATED) as f32;
        }
    }
    let max = l.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if s.temperature == 0.0 {
        return l.iter().position(|&v| v == max).unwrap_or(0) as u32;
    }
    l.iter_mut().for_each(|v| *v /= s.temperature);
    let max = max / s.temperature;
    let mass = |v: f32| if v == max { UNIT_MASS } else { mass_of(v - max) };
    let mut sorted = l.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    if s.top_k > 0 && (s.top_k as usize) < l.len() {
        let floor = sorted[s.top_k as usize - 1];
        sorted.retain(|&v| v >= floor);
    }
    if s.top_p < 1.0 {
        let total: u64 = sorted.iter().map(|&v| mass(v)).sum();
        let target = ((s.top_p as f64 * total as f64) as u64).max(1);
        let mut reached = 0;
        let last = sorted.iter().position(|&v| {
            reached += mass(v);
            reached >= target
        });
        let floor = sorted[last.unwrap_or(sorted.len() - 1)];
        sorted.retain(|&v| v >= floor);
    }
    let least = if s.min_p > 0.0 { ((s.min_p as f64 * UNIT_MASS as f64) as u64).max(1) } else { 0 };
    sorted.retain(|&v| mass(v) >= least);
    let floor = sorted[sorted.len() - 1];
    let weigh = |v: f32| if v >= floor { mass(v) } else { 0 };
    let total: u64 = l.iter().map(|&v| weigh(v)).sum();
    let target = ((number as u128 * total as u128) >> 64) as u64;
    let mut reached = 0;
    l.iter()
        .position(|&v| {
            reached += weigh(v);
            reached > target
        })
        .unwrap_or(0) as u32
}

/// Runs the kernel over rows of `logits`, `[rows, vocab]`, whose tokens are `tokens`.
fn choose(
    logits: &[f32],
    vocab: usize,
    uses: &[u32],
    tokens: &[u32],
    s: Settings,
    seed: u64,
    first_row: u32,
) -> Vec<u32> {
    let count = tokens.len() as u32;
    let rows = RowBuffers::new(&tokens.iter().enumerate().map(|(r, &t)| (t, 100 + r as u32, 0)).collect::<Vec<_>>());
    let logits = Buffer::from_slice(logits);
    let uses = Buffer::from_slice(uses);
    let sampled = Buffer::from_slice(&vec![u32::MAX; tokens.len()]);
    let params = Sample {
        rows: rows.rows(),
        logits: logits.ptr_mut(),
        uses: uses.ptr(),
        sampled: sampled.ptr_mut(),
        settings: Settings { seed, ..s },
        vocab: vocab as u32,
        first_row,
    };
    run::<sample::sample>([1, count - first_row, 1], Sample::SHARED_BYTES, seed, params);
    sampled.as_slice().to_vec()
}

/// The same by the kernel for many sequences: the rows from last to first, flags in the second slot of two.
fn choose_each(logits: &[f32], vocab: usize, uses: &[u32], tokens: &[u32], s: Settings, seed: u64) -> Vec<u32> {
    let rows = RowBuffers::new(&tokens.iter().enumerate().map(|(r, &t)| (t, 7 * r as u32, 0)).collect::<Vec<_>>());
    let choice = |row: u32| Choice { row, drafts: 1, slot: 1, position: 100 + row, settings: Settings { seed, ..s } };
    let choices: Vec<u32> = (0..tokens.len() as u32).rev().flat_map(|row| choice(row).words()).collect();
    let others = vec![7 * GENERATED; vocab];
    let (logits, uses) = (Buffer::from_slice(logits), Buffer::from_slice(&[&others, uses].concat()));
    let (choices, sampled) = (Buffer::from_slice(&choices), Buffer::from_slice(&vec![u32::MAX; tokens.len()]));
    let params = SampleEach {
        rows: rows.rows(),
        logits: logits.ptr_mut(),
        uses: uses.ptr(),
        choices: choices.ptr(),
        sampled: sampled.ptr_mut(),
        vocab: vocab as u32,
    };
    run::<sample::sample_each>([tokens.len() as u32, 1, 1], Sample::SHARED_BYTES, seed, params);
    sampled.as_slice().iter().rev().copied().collect()
}

fn settings() -> impl Strategy<Value = Settings> {
    let off_or = |on: std::ops::Range<f32>, off: f32| prop_oneof![Just(off), on];
    (
        off_or(0.1..3.0, 0.0),
        prop_oneof![Just(0u32), 1..60u32],
        off_or(0.01..1.0, 1.0),
        off_or(0.0..0.5, 0.0),
        off_or(0.5..2.0, 1.0),
        off_or(-1.0..2.0, 0.0),
        off_or(-0.5..1.0, 0.0),
    )
        .prop_map(|(temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty)| {
            Settings {
                seed: 0,
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn chooses_what_the_plain_sampler_chooses(
        vocab in prop::sample::select(vec![1usize, 31, 1024, 1500, 2049]),
        rows in 1usize..4,
        // Few distinct values make ties.
        levels in prop::sample::select(vec![3.0f32, 50.0, 1e6]),
        s in settings(),
        seed: u64,
    ) {
        let mut r = Random::new(seed);
        let logits: Vec<f32> = r.floats(rows * vocab).into_iter().map(|v| (v * levels).round() / levels * 12.0).collect();
        let uses: Vec<u32> =
            (0..vocab).map(|_| [0, 0, PROMPTED, GENERATED, PROMPTED + 5 * GENERATED][r.below(5)]).collect();
        let tokens: Vec<u32> = (0..rows).map(|_| r.below(vocab) as u32).collect();
        let got = choose(&logits, vocab, &uses, &tokens, s, seed, 0);
        prop_assert_eq!(&choose_each(&logits, vocab, &uses, &tokens, s, seed), &got);
        for row in 0..rows {
            // Drafts before this row are part of its history.
            let mut uses = uses.clone();
            for &draft in &tokens[1..=row] {
                uses[draft as usize] += GENERATED;
            }
            let want = reference(&logits[row * vocab..][..vocab], &uses, s, random(seed, 101 + row as u64));
            prop_assert_eq!(got[row], want, "row {}", row);
        }
    }
}

#[test]
fn greedy_takes_the_first_of_equals_and_never_nan() {
    let s = Settings {
        seed: 0,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };
    let mut logits = vec![-1.0f32; 3000];
    logits[5] = f32::NAN;
    logits[1700] = 2.0;
    logits[2900] = 2.0;
    assert_eq!(choose(&logits, 3000, &[0; 3000], &[0], s, 0, 0), [1700]);
}

#[test]
fn rows_before_the_first_get_no_token() {
    let s = Settings {
        seed: 0,
        temperature: 1.0,
        top_k: 1,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };
    let logits: Vec<f32> = (0..300).map(|i| (i % 100) as f32).collect();
    assert_eq!(choose(&logits, 100, &[0; 100], &[1, 2, 3], s, 9, 2), [u32::MAX, u32::MAX, 99]);
}

#[test]
fn the_draws_follow_the_distribution() {
    // Chi-square over 8 tokens, 7 degrees of freedom: 24.3 is exceeded once in a thousand seeds.
    let s = Settings {
        seed: 0,
        temperature: 0.8,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };
    let logits: Vec<f32> = (0..8).map(|i| (i * 5 % 8) as f32 / 4.0).collect();
    let weights: Vec<f64> = logits.iter().map(|&l| (l as f64 / 0.8).exp()).collect();
    let total: f64 = weights.iter().sum();
    let draws = 4000;
    let mut counts = [0u32; 8];
    for seed in 0..draws {
        let kept: u64 = logits.iter().map(|&l| mass_of((l - 1.75) / 0.8)).sum();
        assert!(kept > 0);
        counts[reference(&logits, &[0; 8], s, random(seed, 101)) as usize] += 1;
    }
    let chi: f64 = counts
        .iter()
        .zip(&weights)
        .map(|(&c, w)| {
            let expected = draws as f64 * w / total;
            (c as f64 - expected).powi(2) / expected
        })
        .sum();
    assert!(chi < 24.3, "chi-square {chi}, counts {counts:?}");
}
