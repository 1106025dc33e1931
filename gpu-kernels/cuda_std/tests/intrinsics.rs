//! Each intrinsic against its plain definition.

mod common;

use common::{Io, passes, run};
use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::emulator::{Buffer, Launch, launch};
use cuda_std::{GlobalMut, bf16, kernel, math, mma, shared, thread, warp};

/// A kernel of one warp that stores one word a lane.
macro_rules! lanes {
    ($($(#[$doc:meta])* $name:ident |$p:ident, $lane:ident| $value:expr;)*) => {
        $(
            $(#[$doc])*
            #[kernel(threads = 32)]
            pub unsafe fn $name($p: Io) {
                let $lane = thread::lane_id();
                // SAFETY: a word for each lane.
                #[allow(unused_unsafe)]
                unsafe {
                    let value: u32 = $value;
                    $p.output.store($lane as usize, value);
                }
            }
        )*
    };
}

lanes! {
    /// `shuffle_xor`.
    xor |p, lane| warp::shuffle_xor(lane, 5);
    /// `shuffle_idx`, of another lane for each.
    idx |p, lane| warp::shuffle_idx(lane, lane * 7 + 40);
    /// `shuffle_up`.
    up |p, lane| warp::shuffle_up(lane, 3);
    /// `shuffle_down`.
    down |p, lane| warp::shuffle_down(lane, 3);
    /// Both words of a wide shuffle, and a float's.
    wide |p, lane| {
        let wide = warp::shuffle_xor(u64::from(lane) << 35 | u64::from(lane), 1);
        let signed = warp::shuffle_down(-(i64::from(lane)), 1);
        let float = warp::shuffle_idx(lane as f32, 31 - lane);
        (wide >> 35) as u32 * 10_000 + wide as u32 * 100 + float as u32 + (signed < 0) as u32 * 1_000_000
    };
    /// `ballot`.
    ballot |p, lane| warp::ballot(lane.is_multiple_of(3));
    /// `any` and `all`.
    votes |p, lane| {
        warp::any(lane == 9) as u32
            + 2 * warp::any(lane == 32) as u32
            + 4 * warp::all(lane < 32) as u32
            + 8 * warp::all(lane != 9) as u32
    };
    /// `elect`.
    elect |p, lane| warp::elect() as u32;
    /// What the lane is told of itself.
    indices |p, lane| {
        thread::thread_idx_x() + thread::block_dim_x() * 100 + thread::warp_id() * 10_000 + thread::grid_dim_x() * 100_000
    };
}

#[test]
fn warps_exchange() {
    let one = Launch::new(1, 32);
    passes::<xor>(one, 32, |i| i as u32 ^ 5);
    passes::<idx>(one, 32, |i| (i as u32 * 7 + 40) % 32);
    passes::<up>(one, 32, |i| if i < 3 { i as u32 } else { i as u32 - 3 });
    passes::<down>(one, 32, |i| if i > 28 { i as u32 } else { i as u32 + 3 });
    passes::<wide>(one, 32, |i| {
        let other = i as u32 ^ 1;
        other * 10_100 + (31 - i as u32) + 1_000_000
    });
    passes::<ballot>(one, 32, |_| (0..32).filter(|i| i % 3 == 0).map(|i| 1 << i).sum());
    passes::<votes>(one, 32, |_| 1 + 4);
    passes::<elect>(one, 32, |i| (i == 0) as u32);
    passes::<indices>(one, 32, |i| i as u32 + 3200 + 100_000);
}

/// Every index of a grid of three dimensions.
#[kernel(threads = 64)]
pub unsafe fn grid(p: Io) {
    // SAFETY: a word for each lane of the grid.
    unsafe {
        let (x, y, z) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
        let block = (z * thread::grid_dim_y() + y) * thread::grid_dim_x() + x;
        let i = block * 64 + thread::thread_idx_x();
        p.output.store(i as usize, x + 10 * y + 100 * z + 1000 * thread::grid_dim_z());
    }
}

#[test]
fn blocks_know_their_place() {
    passes::<grid>(Launch { grid: [2, 3, 4], ..Launch::new(1, 64) }, 64 * 24, |i| {
        let block = i as u32 / 64;
        block % 2 + 10 * (block / 2 % 3) + 100 * (block / 6) + 4000
    });
}

/// Loads and stores of each size, through both memories.
#[kernel(threads = 32)]
pub unsafe fn sizes(p: Io) {
    // SAFETY: offsets are within 64 words; one lane does it all.
    unsafe {
        if thread::lane_id() == 0 {
            let s = shared::dynamic::<u32>(128);
            s.store16(0, p.input.load16(4));
            s.cast::<u64>().store(2, p.input.cast::<u64>().load(4));
            s.cast::<u16>().store(12, p.input.cast::<u16>().load_nc(20));
            s.cast::<u16>().store(13, 0xabcd);
            s.cast::<u8>().store(28, p.input.cast::<u8>().load(44));
            for i in 29..32 {
                s.cast::<i8>().store(i, -1);
            }
            p.output.store16(0, s.load16(0));
            p.output.cast::<u64>().store(2, s.cast::<u64>().load(2));
            p.output.cast::<bf16>().store(12, s.cast::<bf16>().load(12));
            p.output.cast::<u16>().store(13, s.cast::<u16>().load(13));
            p.output.at(7).store(0, s.at(7).load(0));
            p.output.store16_stream(8, p.input.load16_nc(0));
            p.output.store16(12, p.input.load16_stream(16));
        }
    }
}

#[test]
fn memory_holds_every_size() {
    let expected = [4, 5, 6, 7, 8, 9, 0xabcd_000a, 0xffff_ff0b, 0, 1, 2, 3, 16, 17, 18, 19];
    passes::<sizes>(Launch::new(1, 32), 64, |i| expected.get(i).copied().unwrap_or(u32::MAX));
}

/// Every atomic operation, from all lanes.
#[kernel(threads = 128)]
pub unsafe fn atomics(p: Io) {
    // SAFETY: the counters are initialised, in shared memory by one lane before the barrier.
    unsafe {
        let thread = thread::thread_idx_x();
        let s = shared::dynamic::<i32>(0);
        if thread == 0 {
            s.store(0, 1000);
            s.store(1, -1000);
        }
        thread::sync_threads();
        let (relaxed, device) = (Ordering::Relaxed, Scope::Device);
        atomic::fetch_add(p.zeros, 0, thread, relaxed, device);
        atomic::fetch_max(p.zeros, 1, thread, relaxed, device);
        atomic::fetch_min(s, 0, -(thread as i32), relaxed, Scope::Block);
        atomic::fetch_max(s, 1, thread as i32, relaxed, Scope::Block);
        atomic::fetch_add(p.zeros.cast::<u64>(), 1, 1 << 33, relaxed, device);
        // A lock, taken by every lane in turn.
        while atomic::compare_exchange(p.zeros, 4, 0, 1, Ordering::Acquire, device) != 0 {
            thread::nanosleep(20);
        }
        p.zeros.store(5, p.zeros.load(5) + 1);
        atomic::exchange(p.zeros, 4, 0, Ordering::Release, device);
        thread::sync_threads();
        if thread == 0 {
            let minimum = atomic::load(s, 0, relaxed, Scope::Block);
            p.output.store16(0, [p.zeros.load(0), p.zeros.load(1), minimum as u32, s.load(1) as u32]);
            p.output.store16(4, [p.zeros.load(2), p.zeros.load(3), p.zeros.load(4), p.zeros.load(5)]);
        }
    }
}

#[test]
fn atomics_count() {
    let expected = [127 * 64, 127, -127i32 as u32, 127, 0, 256, 0, 128];
    passes::<atomics>(Launch::new(1, 128), 8, |i| expected[i]);
}

/// A product of tiles; A comes by `ldmatrix` from shared memory, B's columns transposed.
#[kernel(threads = 32)]
pub unsafe fn product(p: Io) {
    // SAFETY: A is the first 128 words, 16 rows of 16 bf16; B the next 64, 16 rows of 8; C and the result 128 words.
    unsafe {
        let lane = thread::lane_id();
        let s = shared::dynamic::<u32>(0);
        for i in 0..6 {
            s.store((i * 32 + lane) as usize, p.input.load((i * 32 + lane) as usize));
        }
        warp::sync_warp();
        // Matrices 0 to 3 of A: rows 0 to 7 and 8 to 15 of columns 0 to 7, then of columns 8 to 15.
        let a = mma::ldmatrix_x4(s.at((lane % 16 * 8 + lane / 16 * 4) as usize));
        // Two matrices of B, each twice.
        let b = mma::ldmatrix_x4_trans(s.at((128 + lane % 16 * 4) as usize));
        let c = [lane as f32, 1.0, 2.0, 3.0];
        p.output.store16(lane as usize * 4, mma::m16n8k16_bf16(c, a, [b[0], b[1]]).map(f32::to_bits));
    }
}

#[test]
fn tiles_multiply() {
    let value = |i: usize| bf16::from_f32(((i * 37 % 101) as f32 - 50.0) / 8.0);
    let (a, b) = (|row, column| value(row * 16 + column), |row, column| value(256 + row * 8 + column));
    let words: Vec<u32> =
        (0..192).map(|i| u32::from(value(2 * i).to_bits()) | u32::from(value(2 * i + 1).to_bits()) << 16).collect();
    let (input, output) = (Buffer::from_slice(&words), Buffer::<f32>::new_poisoned(128));
    let zeros = GlobalMut::default();
    let params = Io { input: input.ptr(), output: output.ptr_mut().cast(), zeros, n: 0 };
    launch::<product>(&Launch { shared_bytes: 1024, ..Launch::new(1, 32) }, params).unwrap();
    for lane in 0..32 {
        for word in 0..4 {
            let (row, column) = (lane / 4 + word / 2 * 8, lane % 4 * 2 + word % 2);
            let c = if word == 0 { lane as f32 } else { word as f32 };
            let want = (0..16).fold(c, |sum, k| sum + a(row, k).to_f32() * b(k, column).to_f32());
            assert_eq!(output.as_slice()[lane * 4 + word], want, "C[{row}][{column}]");
        }
    }
}

#[test]
fn arithmetic() {
    for (x, bits) in [
        (1.0f32, 0x3f80),
        (f32::from_bits(0x3f80_8000), 0x3f80),
        (f32::from_bits(0x3f81_8000), 0x3f82),
        (f32::from_bits(0x3f80_8001), 0x3f81),
        (f32::MAX, 0x7f80),
        (f32::NEG_INFINITY, 0xff80),
        (f32::NAN, 0x7fff),
        (-0.0, 0x8000),
        (f32::from_bits(1), 0),
    ] {
        assert_eq!(math::to_bf16(x).to_bits(), bits, "{x:e}");
        assert_eq!(math::pack_bf16(2.0, x), bits as u32 * 65536 + 0x4000, "{x:e}");
    }
    assert_eq!(math::unpack_bf16(0x4000_3f80), [1.0, 2.0]);
    assert_eq!(math::from_bf16(bf16::from_bits(0xc040)), -3.0);
    assert_eq!(math::mul_hi_u64(u64::MAX, u64::MAX), u64::MAX - 1);
    assert_eq!((math::popc(0xf0), math::clz(0xf0), math::brev(1)), (4, 24, 1 << 31));
    assert_eq!((math::max(1.0, f32::NAN), math::min(f32::NAN, 1.0)), (1.0, 1.0));
    assert_eq!((math::exp2(3.0), math::exp2(-140.0), math::log2(8.0), math::rcp(4.0)), (8.0, 0.0, 3.0, 0.25));
    assert_eq!((math::rsqrt(4.0), math::sqrt(9.0), math::abs(-1.0), math::fma(2.0, 3.0, 4.0)), (0.5, 3.0, 1.0, 10.0));
    assert!((math::exp(1.0) - std::f32::consts::E).abs() < 1e-6);
}

#[test]
fn the_seed_decides_the_order() {
    let trace = |seed| run::<atomics>(Launch { seed, ..Launch::new(1, 128) }, 8).result.unwrap().trace;
    let traces: Vec<u64> = (0..20).map(trace).collect();
    assert_eq!(traces, (0..20).map(trace).collect::<Vec<_>>(), "the same seeds, the same orders");
    let mut distinct = traces.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), traces.len(), "other seeds, other orders");
}

#[test]
fn a_report_counts() {
    let report = run::<grid>(Launch::new(2, 64), 128).result.unwrap();
    assert_eq!((report.bytes_loaded, report.bytes_stored, report.barriers, report.atomics), (0, 512, 0, 0));
    assert_eq!(report.steps, 128, "each lane runs once, to its end");
}
