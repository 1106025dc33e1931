//! A first launch of each kind.

use cuda_std::emulator::{Buffer, EmulatorError, Launch, launch};
use cuda_std::{Global, GlobalMut, kernel, mma, shared, thread, warp};

/// Parameters of the kernels here.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Io {
    input: Global<f32>,
    output: GlobalMut<f32>,
}

/// Sums each block's 256 elements by shuffles and shared memory.
#[kernel(threads = 256)]
pub unsafe fn block_sum(p: Io) {
    // SAFETY: the buffers have an element for each lane, and for each block.
    unsafe {
        let i = thread::block_idx_x() * 256 + thread::thread_idx_x();
        let mut sum = p.input.load(i as usize);
        let mut mask = 16;
        while mask > 0 {
            sum += warp::shuffle_xor(sum, mask);
            mask /= 2;
        }
        let partial = shared::dynamic::<f32>(0);
        if thread::lane_id() == 0 {
            partial.store(thread::warp_id() as usize, sum);
        }
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            let mut total = 0.0;
            for w in 0..8 {
                total += partial.load(w);
            }
            p.output.store(thread::block_idx_x() as usize, total);
        }
    }
}

#[test]
fn blocks_sum() {
    let input: Vec<f32> = (0..2560).map(|i| (i % 37) as f32).collect();
    let expected: Vec<f32> = input.chunks(256).map(|block| block.iter().sum()).collect();
    let buffer = Buffer::from_slice(&input);
    for seed in 0..20 {
        let output = Buffer::<f32>::new_poisoned(10);
        let how = Launch { shared_bytes: 32, seed, ..Launch::new(10, 256) };
        let report = launch::<block_sum>(&how, Io { input: buffer.ptr(), output: output.ptr_mut() }).unwrap();
        assert_eq!(output.as_slice(), expected);
        assert_eq!((report.bytes_loaded, report.bytes_stored, report.barriers), (10240, 40, 2560));
    }
}

/// As above without the barrier.
#[kernel(threads = 64)]
pub unsafe fn race(p: Io) {
    // SAFETY: deliberately broken; the emulator notices.
    unsafe {
        let partial = shared::dynamic::<f32>(0);
        partial.store(thread::thread_idx_x() as usize, p.input.load(0));
        p.output.store(thread::thread_idx_x() as usize, partial.load(63 - thread::thread_idx_x() as usize));
    }
}

#[test]
fn a_missing_barrier_is_a_race() {
    let input = Buffer::from_slice(&[1.0f32]);
    let output = Buffer::<f32>::new_poisoned(64);
    let how = Launch { shared_bytes: 256, ..Launch::new(1, 64) };
    let error = launch::<race>(&how, Io { input: input.ptr(), output: output.ptr_mut() }).unwrap_err();
    let text = error.to_string();
    println!("{text}");
    assert!(matches!(error, EmulatorError::Race { .. } | EmulatorError::Misuse { .. }), "{text}");
}

/// One product of tiles.
#[kernel(threads = 32)]
pub unsafe fn product(p: Io) {
    // SAFETY: fragments of 16 and 8 bytes a lane, and 16 of C.
    unsafe {
        let lane = thread::lane_id() as usize;
        let a = p.input.load16(lane * 4);
        let b = p.input.cast::<u64>().load(64 + lane);
        let d = mma::m16n8k16_bf16([1.0; 4], a, [b as u32, (b >> 32) as u32]);
        p.output.store16(lane * 4, d.map(f32::to_bits));
    }
}

#[test]
fn tiles_multiply() {
    let input = Buffer::from_slice(&[0x3f80_3f80u32; 192]);
    let output = Buffer::<f32>::new_poisoned(128);
    let params = Io { input: input.ptr().cast(), output: output.ptr_mut() };
    launch::<product>(&Launch::new(1, 32), params).unwrap();
    assert_eq!(output.as_slice(), [17.0; 128]);
}
