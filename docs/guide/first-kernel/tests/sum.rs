//! The kernel on the CPU, lane by lane: it adds up, and the emulator finds what a forgotten barrier would break.

use cuda_std::emulator::{Buffer, EmulatorError, Launch, launch};
use cuda_std::{Kernel, kernel, thread, warp};
use first_kernel::{PTX, SHARED_BYTES, Sum, THREADS, sum};

const BLOCKS: u32 = 3;

/// What a kernel makes of 0, 1, 2, … under a seed, which decides in what order lanes run.
fn run<K: Kernel<Params = Sum>>(seed: u64) -> Result<Vec<f32>, EmulatorError> {
    let numbers: Vec<f32> = (0..BLOCKS * THREADS).map(|i| i as f32).collect();
    let input = Buffer::from_slice(&numbers).named("input");
    let sums = Buffer::<f32>::new_poisoned(BLOCKS as usize).named("sums");
    let how = Launch { shared_bytes: SHARED_BYTES, seed, ..Launch::new(BLOCKS, THREADS) };
    launch::<K>(&how, Sum { input: input.ptr(), sums: sums.ptr_mut() })?;
    Ok(sums.to_vec())
}

#[test]
fn blocks_add_up() {
    let block = |i: u32| (i * THREADS..(i + 1) * THREADS).map(|n| n as f32).sum();
    let expected: Vec<f32> = (0..BLOCKS).map(block).collect();
    for seed in 0..50 {
        assert_eq!(run::<sum>(seed).unwrap(), expected, "seed {seed}");
    }
}

/// [`sum`] with one barrier of the block; later, threads wait for their own warp alone.
#[kernel(threads = THREADS)]
pub unsafe fn sum_with_a_race(p: Sum) {
    let barrier = |adding| if adding == THREADS / 2 { thread::sync_threads() } else { warp::sync_warp() };
    // SAFETY: not kept: this is no barrier of the block, which is what the test is about.
    unsafe { kernels::add_up(p, barrier) }
}

#[test]
fn a_forgotten_barrier_is_found() {
    let mut found = 0;
    for seed in 0..20 {
        let Err(error) = run::<sum_with_a_race>(seed) else { continue };
        let text = error.to_string();
        assert!(text.contains("race on shared offset"), "{text}");
        assert!(text.contains("kernels/src/lib.rs"), "it says where: {text}");
        found += 1;
    }
    assert!(found >= 15, "only {found} of 20 seeds found it");
}

#[test]
fn the_device_has_the_kernel() {
    assert!(PTX.contains(".entry sum("), "{PTX}");
    assert!(PTX.contains("bar"), "no barrier: {PTX}");
}
