//! The kernels that measure the card must do what they say, or the limits would be wrong.

use crate::common::{Random, relative_error, run};
use bench_kernels::ceilings::{self, CopyAll, MMA_THREADS, Multiply, Nothing, ReadAll, THREADS, UNIT_BYTES};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;

const WARPS: usize = THREADS as usize / 32;

fn words(units: usize, seed: u64) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..units * 4).map(|_| random.bits() as u32).collect()
}

#[test]
fn every_unit_is_read_once() {
    // Fewer than the lanes, a round of eight and a tail, and two blocks.
    for (blocks, units) in [(1, 5), (1, 9 * 1024 + 17), (2, 17 * 1024 + 1)] {
        let data = words(units, units as u64);
        let from = Buffer::from_slice(&data);
        let sums = Buffer::<u32>::new_poisoned(blocks as usize * WARPS);
        let params = ReadAll { from: from.ptr().cast(), sums: sums.ptr_mut(), units: units as u64 };
        run::<ceilings::ceiling_read>([blocks, 1, 1], 0, 1, params);
        let read = sums.to_vec().into_iter().fold(0, |sum, word| sum ^ word);
        assert_eq!(read, data.iter().fold(0, |sum, word| sum ^ word), "{blocks} blocks, {units} units");
    }
}

#[test]
fn every_unit_is_copied() {
    for (blocks, units) in [(1, 5), (1, 9 * 1024 + 17), (2, 17 * 1024 + 1)] {
        let data = words(units, units as u64);
        let from = Buffer::from_slice(&data);
        let to = Buffer::<u32>::new_poisoned(data.len());
        let params = CopyAll { from: from.ptr().cast(), to: to.ptr_mut().cast(), units: units as u64 };
        run::<ceilings::ceiling_copy>([blocks, 1, 1], 0, 2, params);
        assert_eq!(to.to_vec(), data, "{blocks} blocks, {units} units");
    }
    assert_eq!(UNIT_BYTES, 16);
}

/// Element (`row`, `k`) of A fragment `which`, as the fragment layout of `mma` says.
fn a_element(operands: &[bf16], which: usize, row: usize, k: usize) -> f64 {
    let lane = row % 8 * 4 + k % 8 / 2;
    let word = row / 8 + 2 * (k / 8);
    operands[(lane * 16 + which * 4 + word) * 2 + k % 2].to_f64()
}

/// Element (`k`, `column`) of B fragment `which`.
fn b_element(operands: &[bf16], which: usize, k: usize, column: usize) -> f64 {
    let lane = column * 4 + k % 8 / 2;
    operands[(lane * 16 + 8 + which * 2 + k / 8) * 2 + k % 2].to_f64()
}

#[test]
fn the_products_are_all_made() {
    let (blocks, rounds) = (1, 3);
    let operands = Random::new(3).bf16s(32 * 32);
    let input = Buffer::from_slice(&operands);
    let sums = Buffer::<f32>::new_poisoned((blocks * MMA_THREADS) as usize);
    let params = Multiply { operands: input.ptr().cast(), sums: sums.ptr_mut(), rounds };
    run::<ceilings::ceiling_mma>([blocks, 1, 1], 0, 3, params);
    let expected: Vec<f32> = (0..MMA_THREADS as usize)
        .map(|thread| {
            let (group, pair) = (thread % 32 / 4, thread % 4);
            let mut sum = 0.0;
            for (a, b) in (0..2).flat_map(|a| (0..4).map(move |b| (a, b))) {
                for (row, column) in
                    [(group, 2 * pair), (group, 2 * pair + 1), (group + 8, 2 * pair), (group + 8, 2 * pair + 1)]
                {
                    let terms = (0..16).map(|k| a_element(&operands, a, row, k) * b_element(&operands, b, k, column));
                    sum += terms.sum::<f64>();
                }
            }
            (sum * f64::from(rounds)) as f32
        })
        .collect();
    assert!(relative_error(sums.to_vec(), &expected) < 1e-5);
    assert_eq!(Multiply::operations(1, 1), 8 * 8 * 4096);
}

#[test]
fn an_empty_launch_runs() {
    run::<ceilings::ceiling_launch>([1, 1, 1], 0, 4, Nothing { nothing: 0 });
}
