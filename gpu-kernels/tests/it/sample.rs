//! The sampler against a plain one, token for token.

use crate::common::{Random, RowBuffers, Teams, run_resident};
use cuda_std::emulator::Buffer;
use gpu_kernels::sample::{
    self, Choice, GENERATED, PROMPTED, SHARED_BYTES, Sample, SampleEach, Settings, UNIT_MASS, mass_of, random,
};
use gpu_kernels::step::NO_TOKEN;
use proptest::prelude::*;

/// The token that the module's documentation promises, found by sorting.
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

/// Rows of logits `[rows, vocab]`, the rows' tokens, and into how many slices each row is cut.
struct LogitRows<'a> {
    logits: &'a [f32],
    vocab: usize,
    uses: &'a [u32],
    tokens: &'a [u32],
    splits: u32,
}

/// Runs the kernel over rows from `first_row` on, twice, as it must leave its scratch memory as it found it.
fn choose(given: &LogitRows, s: Settings, seed: u64, first_row: u32) -> Vec<u32> {
    let &LogitRows { logits, vocab, uses, tokens, splits } = given;
    let count = tokens.len() as u32;
    let rows = RowBuffers::new(&tokens.iter().enumerate().map(|(r, &t)| (t, 100 + r as u32, 0)).collect::<Vec<_>>());
    let logits = Buffer::from_slice(logits);
    let uses = Buffer::from_slice(uses);
    let sampled = Buffer::from_slice(&vec![7777; tokens.len()]);
    // If rows are not cut, there are two CTAs at most.
    let teams = Teams::new(if splits == 1 { (count - first_row).min(2) } else { count - first_row }, splits);
    let params = Sample {
        rows: rows.rows(),
        logits: logits.ptr(),
        uses: uses.ptr(),
        sampled: sampled.ptr_mut(),
        settings: Settings { seed, ..s },
        split: teams.split(),
        vocab: vocab as u32,
        first_row,
    };
    run_resident::<sample::sample>(teams.grid(), SHARED_BYTES, seed, params);
    let first = sampled.to_vec();
    run_resident::<sample::sample>(teams.grid(), SHARED_BYTES, seed.rotate_left(9), params);
    assert_eq!(sampled.to_vec(), first);
    first
}

/// As [`choose`], by the kernel for many sequences. Rows go from last to first, and `uses` is the second of two slots.
/// If rows are not cut, there are fewer CTAs than rows.
fn choose_each(given: &LogitRows, s: Settings, seed: u64) -> Vec<u32> {
    let &LogitRows { logits, vocab, uses, tokens, splits } = given;
    let rows = RowBuffers::new(&tokens.iter().enumerate().map(|(r, &t)| (t, 7 * r as u32, 0)).collect::<Vec<_>>());
    let choice = |row: u32| Choice { row, drafts: 1, slot: 1, position: 100 + row, settings: Settings { seed, ..s } };
    let choices: Vec<u32> = (0..tokens.len() as u32).rev().flat_map(|row| choice(row).words()).collect();
    let others = vec![7 * GENERATED; vocab];
    let (logits, uses) = (Buffer::from_slice(logits), Buffer::from_slice(&[&others, uses].concat()));
    let (choices, sampled) = (Buffer::from_slice(&choices), Buffer::from_slice(&vec![7777; tokens.len()]));
    let teams = Teams::new(if splits == 1 { 2 } else { tokens.len() as u32 }, splits);
    let params = SampleEach {
        rows: rows.rows(),
        logits: logits.ptr(),
        uses: uses.ptr(),
        choices: choices.ptr(),
        sampled: sampled.ptr_mut(),
        split: teams.split(),
        vocab: vocab as u32,
        count: tokens.len() as u32,
    };
    run_resident::<sample::sample_each>(teams.grid(), SHARED_BYTES, seed, params);
    sampled.to_vec().into_iter().rev().collect()
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
        splits in prop::sample::select(vec![1u32, 1, 2, 3, 5]),
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
        let given = LogitRows { logits: &logits, vocab, uses: &uses, tokens: &tokens, splits };
        let got = choose(&given, s, seed, 0);
        prop_assert_eq!(&choose_each(&given, s, seed), &got);
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

/// One row without a history.
fn one(logits: &[f32], s: Settings, seed: u64, splits: u32) -> u32 {
    let uses = vec![0; logits.len()];
    choose(&LogitRows { logits, vocab: logits.len(), uses: &uses, tokens: &[0], splits }, s, seed, 0)[0]
}

/// Top-k keeps more tokens than candidates have room for, or cuts among many equal logits, or reaches tokens without
/// mass.
#[test]
fn many_are_kept_by_any_setting() {
    let mut r = Random::new(1);
    let spread: Vec<f32> = r.floats(5000).into_iter().map(|v| v * 3.0).collect();
    let equal = vec![1.25f32; 3000];
    let periodic: Vec<f32> = r.floats(64).into_iter().cycle().take(4000).collect();
    let far: Vec<f32> =
        (0..2000).map(|i| if i % 97 == 0 { 5.0 + (i as f32) / 1e4 } else { -40.0 - i as f32 }).collect();
    for (name, logits) in [("spread", spread), ("equal", equal), ("periodic", periodic), ("far", far)] {
        for (top_k, top_p, min_p) in [
            (1500, 0.7, 0.0),
            (1500, 1.0, 0.0),
            (30, 0.9, 0.0),
            (600, 0.99, 0.3),
            (0, 0.5, 0.0),
            (0, 1.0, 0.05),
            (0, 1.0, 0.0),
        ] {
            let s = Settings { temperature: 0.9, top_k, top_p, min_p, ..Settings::GREEDY };
            for (seed, splits) in [(3, 1), (4, 3)] {
                let want = reference(&logits, &vec![0; logits.len()], s, random(seed, 101));
                assert_eq!(one(&logits, s, seed, splits), want, "{name} {top_k} {top_p} {min_p} {splits}");
            }
        }
    }
}

#[test]
fn greedy_takes_the_first_of_equals() {
    let mut logits = vec![-1.0f32; 3000];
    logits[1700] = 2.0;
    logits[2900] = 2.0;
    for splits in [1, 2] {
        assert_eq!(one(&logits, Settings::GREEDY, 0, splits), 1700);
    }
}

#[test]
fn there_is_no_token_without_finite_logits() {
    for (wrong, splits) in [(f32::NAN, 1), (f32::INFINITY, 3)] {
        let mut logits = vec![-1.0f32; 3000];
        logits[5] = wrong;
        for s in [Settings::GREEDY, Settings { temperature: 0.7, top_k: 20, top_p: 0.9, ..Settings::GREEDY }] {
            assert_eq!(one(&logits, s, 8, splits), NO_TOKEN, "{wrong} {s:?}");
        }
    }
    assert_eq!(one(&[f32::NEG_INFINITY; 40], Settings::GREEDY, 0, 1), NO_TOKEN);
    // A single token that is impossible is no fault.
    assert_eq!(one(&[1.0, f32::NEG_INFINITY], Settings { temperature: 1.0, ..Settings::GREEDY }, 0, 1), 0);
}

#[test]
fn rows_before_the_first_get_no_token() {
    let s = Settings { temperature: 1.0, top_k: 1, ..Settings::GREEDY };
    let logits: Vec<f32> = (0..300).map(|i| (i % 100) as f32).collect();
    let given = LogitRows { logits: &logits, vocab: 100, uses: &[0; 100], tokens: &[1, 2, 3], splits: 1 };
    assert_eq!(choose(&given, s, 9, 2), [7777, 7777, 99]);
}

#[test]
fn rows_are_split_as_far_as_it_pays() {
    let vocab = 151_936;
    // A card with room for 264 CTAs.
    for (rows, splits) in [(1, 64), (8, 33), (16, 16), (64, 4), (132, 2), (133, 1), (256, 1), (1000, 1)] {
        assert_eq!(sample::splits(rows, 264, vocab), splits, "{rows} rows");
    }
    assert_eq!(sample::splits(1, 264, 1024), 1);
    assert_eq!(sample::splits(1, 264, 1025), 2);
}

#[test]
fn the_draws_follow_the_distribution() {
    // Chi-square over 8 tokens, 7 degrees of freedom: 24.3 is exceeded once in a thousand seeds.
    let s = Settings { temperature: 0.8, ..Settings::GREEDY };
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
