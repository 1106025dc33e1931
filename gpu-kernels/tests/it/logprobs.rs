//! Notes for log-probabilities against sorting, and their masses against the exponential function.

use crate::common::{Random, Teams, run, run_resident};
use cuda_std::emulator::Buffer;
use gpu_kernels::logprobs::{self, MOST, Note, NoteLogits, Wanted};
use gpu_kernels::sample::{SHARED_BYTES, mass};
use proptest::prelude::*;

/// Logits of a row, with equal ones among them.
fn row(vocab: usize, random: &mut Random) -> Vec<f32> {
    // Adding 0.0 makes -0.0 zero: sorting would tell the two apart.
    random.floats(vocab).iter().map(|l| (l * 40.0).round() / 4.0 + 0.0).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..Default::default() })]

    #[test]
    fn notes_say_what_sorting_does(
        // Also fewer tokens than are asked for.
        vocab in prop_oneof![1..30usize, 1..3000usize],
        // With a short period so many logits are equal that there is no room for all of them among the candidates.
        period in prop_oneof![Just(3000usize), 2..20usize],
        rows in 1..4usize,
        wanted in prop::collection::vec((0..4usize, 0..MOST + 1, 0..6usize), 1..5),
        splits in prop::sample::select(vec![1u32, 1, 2, 4]),
        seed in any::<u64>(),
    ) {
        let mut random = Random::new(seed);
        let again = |row: Vec<f32>| row.iter().copied().take(period).cycle().take(vocab).collect::<Vec<f32>>();
        let all: Vec<Vec<f32>> = (0..rows).map(|_| again(row(vocab, &mut random))).collect();
        let logits = Buffer::from_slice(&all.concat());
        let sampled: Vec<u32> = (0..6).map(|i| (seed.rotate_left(7 * i) % vocab as u64) as u32).collect();
        let entries: Vec<[u32; Wanted::WORDS]> =
            wanted.iter().map(|&(row, top, choice)| [row % rows, top, choice].map(|word| word as u32)).collect();
        let (list, tokens) = (Buffer::from_slice(&entries.concat()), Buffer::from_slice(&sampled));
        // If rows are not split, there are fewer CTAs than rows.
        let teams = Teams::new(if splits == 1 { entries.len().min(2) as u32 } else { entries.len() as u32 }, splits);
        let notes = Buffer::from_slice(&vec![u32::MAX; entries.len() * Note::WORDS]);
        let params = NoteLogits {
            logits: logits.ptr(),
            wanted: list.ptr(),
            sampled: tokens.ptr(),
            notes: notes.ptr_mut(),
            split: teams.split(),
            vocab: vocab as u32,
            noted: entries.len() as u32,
        };
        run_resident::<logprobs::note_logits>(teams.grid(), SHARED_BYTES, seed, params);
        run::<logprobs::note_chosen>([1, 1, 1], 0, seed, params);

        for (note, [row, top, choice]) in notes.to_vec().chunks(Note::WORDS).zip(entries) {
            let row = &all[row as usize];
            let mut order: Vec<u32> = (0..vocab as u32).collect();
            order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
            let max = row[order[0] as usize];
            let total = u64::from(note[Note::TOTAL]) | u64::from(note[Note::TOTAL + 1]) << 32;
            prop_assert_eq!(f32::from_bits(note[Note::CHOSEN]), row[sampled[choice as usize] as usize]);
            prop_assert_eq!(f32::from_bits(note[Note::MAX]), max);
            prop_assert_eq!(total, row.iter().map(|&l| mass(l, max)).sum::<u64>());
            let exact: f64 = row.iter().map(|&l| f64::from(l - max).exp()).sum();
            let found = total as f64 / 2f64.powi(40);
            prop_assert!((found / exact - 1.0).abs() < 1e-8, "{} and {}", found, exact);
            for (n, pair) in note[Note::TOP..].chunks(2).enumerate() {
                let expected = match order.get(n) {
                    _ if n >= top as usize => [u32::MAX; 2],
                    Some(&token) => [token, row[token as usize].to_bits()],
                    // There are no more tokens, so nobody reads this part of the note.
                    None => continue,
                };
                prop_assert_eq!(pair, expected);
            }
        }
    }
}
