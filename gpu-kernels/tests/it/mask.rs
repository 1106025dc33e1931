//! Masks set the logits of the tokens that they rule out to minus infinity, and change nothing else.

use crate::common::{Random, run};
use cuda_std::emulator::Buffer;
use gpu_kernels::mask::{self, MaskLogits};

#[test]
fn what_a_mask_rules_out_is_minus_infinity_and_nothing_else_changes() {
    for (seed, vocab) in [(1, 1usize), (2, 31), (3, 2048), (4, 5003)] {
        let mut random = Random::new(seed);
        let rows = 5;
        let mut logits = random.floats(rows * vocab);
        // NaN and infinity stay: they are for the sampler to find.
        logits[vocab] = f32::NAN;
        logits[3 * vocab] = f32::INFINITY;
        let masked = [3u32, 1];
        let words = MaskLogits::words(vocab as u32);
        let mut masks = vec![0u32; masked.len() * words];
        for (entry, &row) in masks.chunks_exact_mut(words).zip(&masked) {
            entry[0] = row;
            entry[MaskLogits::BITS..].fill_with(|| random.bits() as u32 & random.bits() as u32);
        }
        let bits = |i: usize, token: usize| masks[i * words + MaskLogits::BITS + token / 32] >> (token % 32) & 1 == 1;
        let (given, there) = (Buffer::from_slice(&logits), Buffer::from_slice(&masks));
        let params = MaskLogits { logits: given.ptr_mut(), masks: there.ptr(), vocab: vocab as u32 };
        let grid = [MaskLogits::blocks(vocab as u32), masked.len() as u32, 1];
        run::<mask::mask_logits>(grid, 0, seed, params);
        for (at, (&before, after)) in logits.iter().zip(given.to_vec()).enumerate() {
            let (row, token) = (at / vocab, at % vocab);
            let ruled_out = masked.iter().position(|&m| m as usize == row).is_some_and(|i| !bits(i, token));
            let expected = if ruled_out && before < f32::INFINITY { f32::NEG_INFINITY } else { before };
            assert_eq!(after.to_bits(), expected.to_bits(), "row {row}, token {token} of {vocab}");
        }
    }
}
