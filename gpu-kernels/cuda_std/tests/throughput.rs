//! How fast the emulator is. Run with `cargo test --release -p cuda_std --test throughput -- --ignored --nocapture`.

use std::time::Instant;

use cuda_std::emulator::{Buffer, Launch, launch};
use cuda_std::{Global, GlobalMut, Kernel, kernel, mma, shared, thread, warp};

/// Parameters of the kernels here.
#[repr(C)]
#[derive(Clone, Copy, cuda_std::Layout)]
pub struct Work {
    input: Global<u32>,
    output: GlobalMut<u32>,
    rounds: u32,
}

/// Products of tiles, with operands from global memory as in a GEMM.
#[kernel(threads = 256)]
pub unsafe fn products(p: Work) {
    // SAFETY: every index is below 4,096 words.
    unsafe {
        let thread = thread::thread_idx_x() as usize;
        let mut c = [0.0; 4];
        for round in 0..p.rounds as usize {
            let a = p.input.load16_nc((thread * 4 + round * 16) % 4096);
            let b = p.input.cast::<u64>().load_nc((thread + round * 8) % 2048);
            c = mma::m16n8k16_bf16(c, a, [b as u32, (b >> 32) as u32]);
        }
        p.output.store(thread, c[0].to_bits());
    }
}

/// Loads of global memory, a word at a time.
#[kernel(threads = 256)]
pub unsafe fn loads(p: Work) {
    // SAFETY: every index is below 4,096 words.
    unsafe {
        let thread = thread::thread_idx_x() as usize;
        let mut sum = 0u32;
        for round in 0..p.rounds as usize {
            sum = sum.wrapping_add(p.input.load((thread + round * 256) % 4096));
        }
        p.output.store(thread, sum);
    }
}

/// Stores to and loads from shared memory with barriers between.
#[kernel(threads = 256)]
pub unsafe fn exchanges(p: Work) {
    // SAFETY: a word for each lane.
    unsafe {
        let thread = thread::thread_idx_x();
        let words = shared::dynamic::<u32>(0);
        let mut sum = thread;
        for _ in 0..p.rounds {
            words.store(thread as usize, sum);
            thread::sync_threads();
            sum = sum.wrapping_add(words.load(255 - thread as usize));
            thread::sync_threads();
        }
        p.output.store(thread as usize, sum);
    }
}

/// Shuffles.
#[kernel(threads = 256)]
pub unsafe fn shuffles(p: Work) {
    // SAFETY: a word for each lane.
    unsafe {
        let mut sum = thread::thread_idx_x();
        for round in 0..p.rounds {
            sum = sum.wrapping_add(warp::shuffle_xor(sum, round % 32));
        }
        p.output.store(thread::thread_idx_x() as usize, sum);
    }
}

fn rate<K: Kernel<Params = Work>>(what: &str, rounds: u32, operations: f64) {
    let input = Buffer::from_slice(&[0x3f80_3f80u32; 4096]);
    let output = Buffer::<u32>::new_poisoned(256);
    let params = Work { input: input.ptr(), output: output.ptr_mut(), rounds };
    let started = Instant::now();
    let report = launch::<K>(&Launch { shared_bytes: 1024, ..Launch::new(1, 256) }, params).unwrap();
    let seconds = started.elapsed().as_secs_f64();
    let steps = report.steps as f64 / seconds / 1e6;
    println!(
        "{:8.3} million {what} a second ({steps:.1} million steps)",
        operations * f64::from(rounds) / seconds / 1e6
    );
}

#[test]
#[ignore = "a measurement"]
fn throughput() {
    rate::<products>("mma with their two loads a lane", 20_000, 8.0);
    rate::<loads>("loads of a lane", 100_000, 256.0);
    rate::<exchanges>("shared stores and loads of a lane, and two barriers", 5_000, 512.0);
    rate::<shuffles>("shuffles of a warp", 20_000, 8.0);
}
