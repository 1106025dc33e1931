//! Products for many rows against a plain triple loop, under the emulator: tiles, edges, epilogues.

mod common;

use common::{Random, relative_error, run, widen};
use cuda_std::emulator::Buffer;
use cuda_std::tensor::{Matrix, TensorMap};
use cuda_std::{Kernel, bf16};
use gpu_kernels::gemm::{self, Gemm, RowScales, TILE_ROWS, WEIGHT_ROWS};
use gpu_kernels::linear::STRIP;
use gpu_kernels::norm::{Norm, Residual};

/// `[rows, n]` in f64, each row times its factor.
fn reference(x: &[bf16], w: &[bf16], k: usize, scales: &[f32]) -> Vec<f32> {
    let dot = |x: &[bf16], w: &[bf16]| x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum::<f64>();
    x.chunks(k).zip(scales).flat_map(|(x, s)| w.chunks(k).map(move |w| (dot(x, w) * f64::from(*s)) as f32)).collect()
}

struct Case {
    m: usize,
    n: usize,
    k: usize,
    x: Vec<bf16>,
    /// `[n, k]`.
    w: Vec<bf16>,
    up: Vec<bf16>,
    scales: Vec<f32>,
    norm: Vec<bf16>,
    before: Vec<f32>,
}

struct Results {
    y: Vec<f32>,
    out: Vec<bf16>,
    squares: Vec<f32>,
}

impl Case {
    fn new(m: usize, n: usize, k: usize) -> Self {
        let mut random = Random::new((m * 1_000_003 + n * 1009 + k) as u64);
        let [x, w, up, norm] = [m * k, n * k, n * k, n].map(|len| random.bf16s(len));
        let scales = random.floats(m).into_iter().map(|s| s + 1.5).collect();
        let before = random.floats(m.next_multiple_of(TILE_ROWS as usize) * n);
        Self { m, n, k, x, w, up, scales, norm, before }
    }

    fn map(address: u64, rows: usize, columns: usize, tile_rows: u32) -> Buffer<TensorMap> {
        let matrix = Matrix { address, rows: rows as u64, columns: columns as u64, tile_rows };
        Buffer::from_slice(&[TensorMap::emulated(&matrix)])
    }

    /// Runs `K` with tiles of `width` weight rows on `blocks` blocks.
    fn run<K: Kernel<Params = Gemm>>(&self, width: u32, blocks: u32) -> Results {
        let Self { m, n, k, .. } = *self;
        let rows = m.next_multiple_of(TILE_ROWS as usize);
        let [x, w, up, norm] = [&self.x, &self.w, &self.up, &self.norm].map(|v| Buffer::from_slice(v));
        let scales = Buffer::from_slice(&self.scales);
        let y = Buffer::from_slice(&self.before).named("y");
        let out = Buffer::<bf16>::new_poisoned(rows * n).named("out");
        let squares = Buffer::<f32>::new_poisoned(rows * n / STRIP as usize).named("squares");
        let x_map = Self::map(x.ptr().addr(), m, k, TILE_ROWS);
        let [weight, up_map] = [&w, &up].map(|w| Self::map(w.ptr().addr(), n, k, WEIGHT_ROWS));
        // One row fewer than whole tiles: the last must not be written.
        let out_map = Self::map(out.ptr().addr(), rows - 1, n, 64);
        let residual = Residual { x: y.ptr_mut(), scaled: out.ptr_mut(), squares: squares.ptr_mut(), dim: n as u32 };
        let params = Gemm {
            x: x_map.ptr(),
            weight: weight.ptr(),
            up: up_map.ptr(),
            out: out_map.ptr(),
            scales: scales.ptr(),
            y: y.ptr_mut(),
            residual,
            next_norm: norm.ptr(),
            m: m as u32,
            n: n as u32,
            k: k as u32,
            band: 2,
        };
        run::<K>([blocks, 1, 1], Gemm::shared_bytes(width), (m + n) as u64, params);
        let last = &out.as_slice()[(rows - 1) * n..];
        assert!(last.iter().all(|v| v.to_bits() == u16::MAX), "what lies beyond the output is not written");
        let squares = squares.as_slice()[..m * n / STRIP as usize].to_vec();
        Results { y: y.as_slice()[..m * n].to_vec(), out: out.as_slice()[..m * n].to_vec(), squares }
    }
}

#[test]
fn writes_scaled_products() {
    for (m, n, k, blocks) in [(1, 64, 64, 1), (200, 192, 192, 2), (130, 320, 448, 3)] {
        let case = Case::new(m, n, k);
        let want = reference(&case.x, &case.w, k, &case.scales);
        let small = case.run::<gemm::gemm_write_n128>(128, blocks);
        assert!(relative_error(small.y.clone(), &want) < 1e-5, "{m} {n} {k}");
        let large = case.run::<gemm::gemm_write_n256>(256, blocks);
        assert_eq!(small.y, large.y, "{m} {n} {k}");
    }
}

#[test]
fn gates() {
    for (m, n, k, blocks) in [(5, 64, 64, 1), (150, 192, 128, 2)] {
        let case = Case::new(m, n, k);
        let [gate, up] = [&case.w, &case.up].map(|w| reference(&case.x, w, k, &case.scales));
        let want: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let got = case.run::<gemm::gemm_swiglu_n256>(256, blocks);
        assert!(relative_error(widen(&got.out), &want) < 1.0 / 256.0, "{m} {n} {k}");
    }
}

#[test]
fn adds_and_prepares_the_norm() {
    for (m, n, k, blocks) in [(3, 64, 64, 1), (140, 320, 192, 2)] {
        let case = Case::new(m, n, k);
        let mut want = reference(&case.x, &case.w, k, &vec![1.0; m]);
        want.iter_mut().zip(&case.before).for_each(|(w, b)| *w += b);
        let small = case.run::<gemm::gemm_add_n128>(128, blocks);
        assert!(relative_error(small.y.clone(), &want) < 1e-5, "{m} {n} {k}");
        let xw: Vec<bf16> =
            small.y.iter().enumerate().map(|(i, v)| bf16::from_f32(v * case.norm[i % n].to_f32())).collect();
        assert_eq!(small.out, xw, "{m} {n} {k}");
        let squares: Vec<f32> = small.y.chunks(STRIP as usize).map(|s| s.iter().map(|v| v * v).sum()).collect();
        assert!(relative_error(small.squares.clone(), &squares) < 1e-6, "{m} {n} {k}");
        let large = case.run::<gemm::gemm_add_n256>(256, blocks);
        assert_eq!((small.y, small.out, small.squares), (large.y, large.out, large.squares), "{m} {n} {k}");
    }
}

#[test]
fn a_row_is_the_same_bits_in_any_company() {
    let case = Case::new(150, 64, 128);
    let all = case.run::<gemm::gemm_write_n128>(128, 2);
    let pick = 131;
    let alone = Case {
        m: 1,
        x: case.x[pick * case.k..][..case.k].to_vec(),
        scales: vec![case.scales[pick]],
        before: case.before[..TILE_ROWS as usize * 64].to_vec(),
        ..case
    };
    let one = alone.run::<gemm::gemm_write_n256>(256, 1);
    assert_eq!(one.y, all.y[pick * 64..][..64]);
}

#[test]
fn factors_of_rows() {
    let (m, strips) = (19, 70);
    let squares: Vec<f32> = Random::new(1).floats(m * strips).into_iter().map(f32::abs).collect();
    let buffer = Buffer::from_slice(&squares);
    let scales = Buffer::<f32>::new_poisoned(m);
    let norm = Norm { squares: buffer.ptr(), dim: strips as u32 * STRIP, eps: 1e-6 };
    let params = RowScales { norm, scales: scales.ptr_mut(), m: m as u32 };
    run::<gemm::row_scales>([1, 3, 1], 0, 7, params);
    let want: Vec<f32> = squares
        .chunks(strips)
        .map(|row| (1.0 / (row.iter().map(|v| f64::from(*v)).sum::<f64>() / (strips * 16) as f64 + 1e-6).sqrt()) as f32)
        .collect();
    assert!(relative_error(scales.as_slice().iter().copied(), &want) < 1e-6);
}
