//! Each intrinsic against its plain definition. `device/src/kernels.rs` holds the kernels.

mod common;

use common::kernels::*;
use common::{passes, run};
use cuda_std::emulator::{Buffer, Launch, launch};
use cuda_std::{GlobalMut, bf16, math};

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
    passes::<most>(one, 32, |_| 31);
    passes::<turned>(one, 32, |i| {
        let (row, column) = (i as u32 / 4, i as u32 % 4 * 2);
        (column * 8 + row) | ((column + 1) * 8 + row) << 16
    });
    passes::<elect>(one, 32, |i| (i == 0) as u32);
    passes::<indices>(one, 32, |i| i as u32 + 3200 + 100_000);
}

#[test]
fn blocks_know_their_place() {
    passes::<grid>(Launch { grid: [2, 3, 4], ..Launch::new(1, 64) }, 64 * 24, |i| {
        let block = i as u32 / 64;
        block % 2 + 10 * (block / 2 % 3) + 100 * (block / 6) + 4000
    });
}

#[test]
fn memory_holds_every_size() {
    let expected =
        [4, 5, 6, 7, 8, 9, 0xabcd_000a, 0xffff_ff0b, 0, 1, 2, 3, 16, 17, 18, 19, 16, 17, 18, 19, 23, u32::MAX, 10, 9];
    passes::<sizes>(Launch::new(1, 32), 64, |i| expected.get(i).copied().unwrap_or(u32::MAX));
}

#[test]
fn atomics_count() {
    let expected = [127 * 64, 127, -127i32 as u32, 127, 0, 256, 0, 128];
    passes::<atomics>(Launch::new(1, 128), 8, |i| expected[i]);
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
    let output = output.to_vec();
    for lane in 0..32 {
        for word in 0..4 {
            let (row, column) = (lane / 4 + word / 2 * 8, lane % 4 * 2 + word % 2);
            let c = if word == 0 { lane as f32 } else { word as f32 };
            let want = (0..16).fold(c, |sum, k| sum + a(row, k).to_f32() * b(k, column).to_f32());
            assert_eq!(output[lane * 4 + word], want, "C[{row}][{column}]");
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
    assert_eq!(math::broadcast_halves(0x1234_5678), [0x5678_5678, 0x1234_1234]);
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

#[test]
fn arithmetic_in_a_kernel() {
    let f = |x: f32| x.to_bits();
    let expected = [
        f(16.0),
        f(3.0),
        f(0.25),
        f(0.5),
        f(2.0),
        f(4.0),
        f(8.0),
        f(4.0),
        f(36.0),
        0x4100_4080,
        f(16.0),
        2802,
        9 << 28,
        13 * 15,
        f(1.0),
    ];
    passes::<arithmetic>(Launch::new(1, 32), 64, |i| expected.get(i).copied().unwrap_or(u32::MAX));
}

#[test]
fn the_rest_runs() {
    passes::<fences>(Launch::new(1, 64), 64, |_| 1);
    passes::<async_copies>(Launch::new(1, 64), 256, |i| i as u32 ^ 252);
    passes::<bulk_copies>(Launch::new(1, 64), 256, |i| i as u32 + 1);
}

#[test]
fn packed_arithmetic_rounds_once() {
    let one = |a: u16, b: u16, c: u16| {
        let twice = |x: u16| u32::from(x) << 16 | u32::from(x);
        let word = math::fma_bf16x2(twice(a), twice(b), twice(c));
        assert_eq!(word >> 16, word & 0xffff, "both halves");
        word as u16
    };
    let bits = |x: f32| bf16::from_f32(x).to_bits();
    assert_eq!(one(bits(3.0), bits(5.0), bits(-1.0)), bits(14.0));
    // 1 + 2^-8 is a tie, which goes to the even neighbour below. At an odd number a tie goes up.
    assert_eq!(one(bits(2f32.powi(-4)), bits(2f32.powi(-4)), bits(1.0)), bits(1.0));
    assert_eq!(one(0x3f81, 0x3f80, 0x3b80), 0x3f82);
    assert_eq!(one(0x3f81, 0x3f81, 0x3b00), 0x3f82, "1.015686035 + 2^-9");
    let (tie, least) = (bits(2f32.powi(-8)), 2f32.powi(-20));
    assert_eq!(one(bits(1.0 + 2f32.powi(-7)), tie, bits(1.0)), 0x3f81, "2^-8 and 2^-15");
    assert_eq!(one(bits(least), bits(least), tie), tie);
    assert_eq!(one(bits(1.0), bits(-0.0), bits(-0.0)), 0x8000);
    assert_eq!(one(bits(1.0), bits(-0.0), bits(0.0)), 0);
    // Subnormal operands are exact, too: here a code of FP8 times 2^120.
    assert_eq!(one(0x0010, bits(2f32.powi(120)), 0x8000), bits(2f32.powi(-9)));
    assert_eq!(one(0x7f80, bits(1.0), bits(1.0)), 0x7f80);
    assert_eq!(one(0x7f80, bits(0.0), bits(1.0)) & 0x7fff, 0x7fff);
}
