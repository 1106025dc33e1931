//! Linear layers against a plain triple loop, and kernels for different numbers of rows against each other.

use crate::common::{Random, RowBuffers, laid_out, relative_error, run, widen};
use cuda_std::emulator::Buffer;
use cuda_std::{Kernel, bf16};
use gpu_kernels::decode::{DecodeStep, Matrix};
use gpu_kernels::linear::{self, Linear, N_TILE};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::stream::{CHUNK_FEATURES, Walk};
use proptest::prelude::*;

/// Number of blocks that weights are laid out for.
const BLOCKS: u32 = 1;

/// The product `[rows, n]` in f64.
fn reference(x: &[bf16], w: &[bf16], rows: usize, n: usize, k: usize) -> Vec<f32> {
    let mut y = vec![0.0; rows * n];
    for r in 0..rows {
        for f in 0..n {
            let terms = (0..k).map(|i| x[r * k + i].to_f64() * w[f * k + i].to_f64());
            y[r * n + f] = terms.sum::<f64>() as f32;
        }
    }
    y
}

/// What a kernel wrote. Each kernel writes only some of these.
struct Outputs {
    y: Vec<f32>,
    activation: Buffer<bf16>,
    scaled: Buffer<bf16>,
    squares: Buffer<f32>,
}

struct Case {
    rows: usize,
    n: usize,
    k: usize,
    x: Vec<bf16>,
    w: Vec<bf16>,
    up: Vec<bf16>,
}

impl Case {
    fn new(rows: usize, n: usize, k: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let [x, w, up] = [rows * k, n * k, n * k].map(|len| random.bf16s(len));
        Self { rows, n, k, x, w, up }
    }

    /// Runs `K` for rows from `first_row` on; `y` is what the output (or the residual) holds before.
    fn run<K: Kernel<Params = Linear>>(&self, width: u32, y: &[f32], first_row: u32) -> Outputs {
        self.run_gated::<K>(width, None, y, first_row)
    }

    /// As [`run`](Self::run), with an up projection.
    fn run_gated<K: Kernel<Params = Linear>>(
        &self,
        width: u32,
        up: Option<&[bf16]>,
        y: &[f32],
        first_row: u32,
    ) -> Outputs {
        let rows = RowBuffers::sequence(0, self.rows as u32);
        let x = Buffer::from_slice(&self.x);
        // The matrix lies behind another one, and is laid out for so few blocks that it takes several waves.
        let mut walk = Walk::new(BLOCKS);
        walk.wave(3, 640);
        let (_stream, weights) = laid_out(&self.w, up, self.k as u32, walk);
        let y = Buffer::from_slice(y);
        let next_norm = Buffer::from_slice(&self.next_norm());
        let activation = Buffer::<bf16>::new_poisoned(self.rows * self.n);
        let scaled = Buffer::<bf16>::new_poisoned(self.rows * self.n);
        let squares = Buffer::<f32>::new_poisoned((self.rows * self.n).div_ceil(16));
        let params = Linear {
            rows: rows.rows(),
            x: x.ptr(),
            weights,
            norm: Norm::default(),
            y: y.ptr_mut(),
            activation: activation.ptr_mut(),
            residual: Residual {
                x: y.ptr_mut(),
                scaled: scaled.ptr_mut(),
                squares: squares.ptr_mut(),
                spans: Default::default(),
                dim: self.n as u32,
            },
            next_norm: next_norm.ptr(),
            bias: Default::default(),
            n: self.n as u32,
            first_row,
        };
        run::<K>([weights.n_tiles, 1, 1], Linear::shared_bytes(width), self.n as u64, params);
        Outputs { y: y.to_vec(), activation, scaled, squares }
    }

    /// The weight of the norm that follows.
    fn next_norm(&self) -> Vec<bf16> {
        Random::new(self.n as u64).bf16s(self.n)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn equals_the_plain_product(rows in 1usize..=8, n in 1usize..200, chunks in 1usize..20, seed: u64) {
        let case = Case::new(rows, n, chunks * 128, seed);
        let y = case.run::<linear::linear_8>(8, &vec![f32::NAN; rows * n], 0).y;
        let want = reference(&case.x, &case.w, rows, n, case.k);
        prop_assert!(relative_error(y, &want) < 1e-5);
    }

    #[test]
    fn adds_into_the_residual(rows in 1usize..=16, seed: u64) {
        let case = Case::new(rows, 32, 256, seed);
        let before = Random::new(seed ^ 1).floats(rows * 32);
        let got = case.run::<linear::linear_add_16>(16, &before, 0);
        let mut want = reference(&case.x, &case.w, rows, 32, 256);
        want.iter_mut().zip(&before).for_each(|(w, b)| *w += b);
        prop_assert!(relative_error(got.y.clone(), &want) < 1e-5);
        // What the next norm reads: exactly the bits of the residual, times the norm's weight; and the squares of each
        // N-tile.
        let weights = case.next_norm().into_iter().cycle();
        let scaled: Vec<bf16> = got.y.iter().zip(weights).map(|(x, w)| bf16::from_f32(x * w.to_f32())).collect();
        prop_assert_eq!(got.scaled.to_vec(), scaled);
        let squares: Vec<f32> = got.y.chunks(16).map(|n_tile| n_tile.iter().map(|x| x * x).sum()).collect();
        prop_assert!(relative_error(got.squares.to_vec(), &squares) < 1e-6);
    }

    #[test]
    fn swiglu_of_two_products(rows in 1usize..=8, n in 1usize..30, seed: u64) {
        let case = Case::new(rows, n, 128, seed);
        let got = case.run_gated::<linear::swiglu_8>(8, Some(&case.up), &[0.0], 0).activation;
        let gate = reference(&case.x, &case.w, rows, n, 128);
        let up = reference(&case.x, &case.up, rows, n, 128);
        let want: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        // The result is rounded to bf16 once.
        prop_assert!(relative_error(widen(&got.to_vec()), &want) < 1.0 / 256.0);
    }

    #[test]
    fn a_row_is_the_same_bits_in_any_company(rows in 1usize..=64, seed: u64) {
        let case = Case::new(rows, 16, 1280, seed);
        let all = case.run::<linear::linear_64>(64, &vec![f32::NAN; rows * 16], 0).y;
        let pick = Random::new(seed).below(rows);
        let alone = Case { rows: 1, x: case.x[pick * case.k..][..case.k].to_vec(), ..case };
        let one = alone.run::<linear::linear_8>(8, &[f32::NAN; 16], 0).y;
        prop_assert_eq!(one, &all[pick * 16..][..16]);
    }
}

#[test]
fn rows_before_the_first_are_left_alone() {
    let case = Case::new(5, 16, 128, 3);
    let y = case.run::<linear::linear_8>(8, &[7.0; 80], 4).y;
    assert_eq!(y[..64], [7.0; 64]);
    let want = reference(&case.x, &case.w, 5, 16, 128);
    assert!(relative_error(y[64..].to_vec(), &want[64..]) < 1e-5);
}

#[test]
fn blocks_of_the_decode_kernel_have_the_n_tiles_that_the_layout_brings_them() {
    for grid in [1, 2, 3, 132] {
        let mut walk = Walk::new(grid);
        for n_tiles in 1..20 * grid {
            let mut p = DecodeStep::default();
            (p.work.vocab, p.work.residual.dim) = (n_tiles * N_TILE, CHUNK_FEATURES);
            let (each, more) = p.shares(Matrix::Head, grid);
            let mut left = n_tiles;
            let wave = loop {
                let wave = walk.wave(left, CHUNK_FEATURES);
                left -= wave.n_tiles;
                if left == 0 {
                    break wave;
                }
            };
            assert_eq!((wave.rotation + more) % grid, walk.rotation, "{n_tiles}, {grid}");
            for place in 0..grid {
                assert_eq!(each + u32::from(place < more), wave.mine(place, grid), "{n_tiles}, {grid}, {place}");
            }
        }
    }
}
