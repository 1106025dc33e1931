//! GEMMs for the rows of many sequences: the same bits as `linear`, whatever the tiles and the grid.

use crate::common::{Random, RowBuffers, laid_out, reordered, run, run_batched};
use cuda_std::emulator::Buffer;
use cuda_std::tensor::{Matrix, TensorMap};
use cuda_std::{GlobalMut, Kernel, bf16};
use gpu_kernels::batched::{BatchedStep, MAX_BATCHED_ROWS, Phase, PhaseKind, Share};
use gpu_kernels::linear::{self, Linear};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::sample::rank;
use gpu_kernels::stream::{N_TILES, StreamMatrix, Walk};
use gpu_kernels::workspace::Workspace;
use proptest::prelude::*;

/// Number of blocks that weights are laid out for.
const BLOCKS: u32 = 3;

/// What the kernels wrote.
#[derive(PartialEq)]
struct Outputs {
    y: Vec<f32>,
    activation: Vec<bf16>,
    scaled: Vec<bf16>,
    squares: Vec<f32>,
    /// The rank of each row's best token, if the batched step finds it.
    best: Vec<u64>,
}

/// A matrix and what it is multiplied with.
struct Case {
    rows: usize,
    n: usize,
    k: usize,
    x: Vec<bf16>,
    weight: Vec<bf16>,
    up: Vec<bf16>,
    before: Vec<f32>,
    squares: Vec<f32>,
    next_norm: Vec<bf16>,
}

/// Splits the left-over tiles into as many parts as there are blocks for, so that parts meet even in short GEMMs.
fn split(tiles: u32, grid: u32) -> Share {
    let left = tiles % grid;
    let shift = (0..=2).rev().find(|&shift| left << shift <= grid).expect("fewer tiles than blocks");
    Share { whole: tiles - left, shift }
}

impl Case {
    fn new(rows: usize, n: usize, k: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let [x, weight, up, next_norm] = [rows * k, n * k, n * k, n].map(|len| random.bf16s(len));
        let before = random.floats(rows * n);
        let squares = random.floats(rows * k / 16).into_iter().map(|s| s + 1.5).collect();
        Self { rows, n, k, x, weight, up, before, squares, next_norm }
    }

    fn outputs(&self) -> (Buffer<f32>, Buffer<bf16>, Buffer<bf16>, Buffer<f32>) {
        let len = self.rows * self.n;
        (
            Buffer::from_slice(&self.before),
            Buffer::from_slice(&vec![bf16::ZERO; len]),
            Buffer::from_slice(&vec![bf16::ZERO; len]),
            Buffer::from_slice(&vec![0.0; len.div_ceil(16)]),
        )
    }

    /// The matrix, or gate and up together, with something before it in the stream.
    fn weights(&self, gated: bool) -> (Buffer<bf16>, StreamMatrix) {
        let walk = Walk { chunks: 5, ..Walk::new(BLOCKS) };
        laid_out(&self.weight, gated.then_some(&self.up), self.k as u32, walk)
    }

    /// The outputs of `linear` for gate and up, or for the matrix alone. There may be a norm before it, and a bias, for
    /// which the weights of the next norm serve.
    fn by_linear<K: Kernel<Params = Linear>>(&self, [gated, norm, bias]: [bool; 3]) -> Outputs {
        let (_stream, weights) = self.weights(gated);
        let mut all = Outputs { y: vec![], activation: vec![], scaled: vec![], squares: vec![], best: vec![] };
        // In groups of 64 rows.
        for first in (0..self.rows).step_by(64) {
            let count = 64.min(self.rows - first);
            let part = |v: &[f32], width: usize| v[first * width..][..count * width].to_vec();
            let case = Self {
                rows: count,
                x: self.x[first * self.k..][..count * self.k].to_vec(),
                before: part(&self.before, self.n),
                squares: part(&self.squares, self.k / 16),
                weight: self.weight.clone(),
                up: self.up.clone(),
                next_norm: self.next_norm.clone(),
                ..*self
            };
            let rows = RowBuffers::sequence(0, count as u32);
            let (y, activation, scaled, squares) = case.outputs();
            let [x, next] = [&case.x, &case.next_norm].map(|v| Buffer::from_slice(v));
            let before = Buffer::from_slice(&case.squares);
            let params = Linear {
                rows: rows.rows(),
                x: x.ptr(),
                weights,
                norm: if norm {
                    Norm { squares: before.ptr(), dim: self.k as u32, eps: 1e-6 }
                } else {
                    Norm::default()
                },
                y: y.ptr_mut(),
                activation: activation.ptr_mut(),
                residual: Residual {
                    x: y.ptr_mut(),
                    scaled: scaled.ptr_mut(),
                    squares: squares.ptr_mut(),
                    spans: Default::default(),
                    dim: self.n as u32,
                },
                next_norm: next.ptr(),
                bias: if bias { next.ptr() } else { Default::default() },
                n: self.n as u32,
                first_row: 0,
            };
            run::<K>([weights.n_tiles, 1, 1], Linear::shared_bytes(64), 1, params);
            all.y.extend(y.to_vec());
            all.activation.extend(activation.to_vec());
            all.scaled.extend(scaled.to_vec());
            all.squares.extend(&squares.to_vec()[..count * self.n / 16]);
        }
        all
    }

    /// Runs a batched step with tiles of `tile_rows` rows on `grid` blocks. It has one GEMM, or two if it finds best
    /// tokens.
    fn by_batched(&self, kind: PhaseKind, tile_rows: u32, grid: u32, bias: bool) -> Outputs {
        let gated = kind == PhaseKind::SwiGlu;
        let k = self.k as u32;
        let next = Buffer::from_slice(&self.next_norm);
        let x = Buffer::from_slice(&reordered(&self.x, self.k, false));
        let (_stream, StreamMatrix { stream, base, n_tiles, .. }) = self.weights(gated);
        let rows = RowBuffers::sequence(0, self.rows as u32);
        let (y, activation, scaled, squares) = self.outputs();
        let before = Buffer::from_slice(&self.squares);
        let matrix = Matrix::dense(x.ptr().addr(), self.rows as u64, self.k as u64, tile_rows);
        let best = Buffer::<u64>::new_poisoned(if kind == PhaseKind::Best { MAX_BATCHED_ROWS as usize } else { 0 });
        let map = Buffer::from_slice(&[TensorMap::emulated(&matrix)]);
        let row_tiles = (self.rows as u32).div_ceil(tile_rows);
        let partials = Buffer::<f32>::new_poisoned(BatchedStep::partial_len(tile_rows, grid));
        let arrivals = Buffer::from_slice(&vec![0; BatchedStep::arrivals_len(grid, 0, 0)]);
        let phase = Phase {
            n_tiles,
            n: self.n as u32,
            k,
            share: split(Share::tiles(n_tiles, row_tiles), grid),
            base,
            x: map.ptr(),
            y: y.ptr_mut(),
            norm: if kind == PhaseKind::Add || bias { next.ptr() } else { Default::default() },
            row_tiles,
            ..Phase::new(kind)
        };
        // Best tokens are found after a grid barrier, so another GEMM comes first.
        let list = [Phase { kind: PhaseKind::Write, ..phase }, phase];
        let list = if kind == PhaseKind::Best { &list[..] } else { &list[1..] };
        let phases = Buffer::from_slice(Phase::words(list));
        // The squares by which the input has yet to be normalised, or those that the step writes.
        let (dim, squares_of) = if kind == PhaseKind::Add { (self.n, &squares) } else { (self.k, &before) };
        let work = Workspace {
            rows: rows.rows(),
            residual: Residual {
                x: y.ptr_mut(),
                scaled: scaled.ptr_mut(),
                squares: squares_of.ptr_mut(),
                spans: Default::default(),
                dim: dim as u32,
            },
            activation: activation.ptr_mut(),
            eps: 1e-6,
            head_norm: 1,
            ..Workspace::default()
        };
        let params = BatchedStep {
            work,
            phases: phases.ptr().cast(),
            phase_count: list.len() as u32,
            blocks: BLOCKS,
            stream,
            partials: partials.ptr_mut(),
            arrivals: arrivals.ptr_mut(),
            best: if kind == PhaseKind::Best { best.ptr_mut() } else { GlobalMut::default() },
            ..BatchedStep::default()
        };
        run_batched(tile_rows, grid, 3, params);
        assert!(arrivals.to_vec().iter().all(|&left| left == 0));
        Outputs {
            y: y.to_vec(),
            activation: reordered(&activation.to_vec(), self.n, true),
            scaled: reordered(&scaled.to_vec(), self.n, true),
            squares: squares.to_vec()[..self.rows * self.n / 16].to_vec(),
            best: best.to_vec().into_iter().take(self.rows).collect(),
        }
    }

    fn check(&self, grid: u32) {
        for tile_rows in [64, 96, 128] {
            let biased = self.by_linear::<linear::linear_64>([false, true, true]);
            assert!(
                biased.y == self.by_batched(PhaseKind::Write, tile_rows, grid, true).y,
                "write with a bias, {tile_rows}"
            );
            let want = self.by_linear::<linear::linear_64>([false, true, false]);
            assert!(want.y == self.by_batched(PhaseKind::Write, tile_rows, grid, false).y, "write, {tile_rows}");
            assert!(want.y != biased.y);
            let best = |row: &[f32]| row.iter().zip(0..).map(|(&logit, token)| rank(logit, token)).max();
            let best: Vec<_> = want.y.chunks(self.n).filter_map(best).collect();
            assert_eq!(best, self.by_batched(PhaseKind::Best, tile_rows, grid, false).best, "best, {tile_rows}");
            let want = self.by_linear::<linear::linear_add_64>([false; 3]);
            assert!(want == self.by_batched(PhaseKind::Add, tile_rows, grid, false), "add, {tile_rows}");
            let want = self.by_linear::<linear::swiglu_64>([true, true, false]).activation;
            assert!(
                want == self.by_batched(PhaseKind::SwiGlu, tile_rows, grid, false).activation,
                "swiglu, {tile_rows}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn bits_of_linear(rows in 1usize..150, n_tiles in 1usize..11, chunks in 1usize..11, pairs in 1u32..7, seed: u64) {
        Case::new(rows, n_tiles.next_multiple_of(2) * 16, chunks * 128, seed).check(2 * pairs);
    }
}

/// Of equal logits the first is the best. Here all logits of some rows are zeros, of either sign.
#[test]
fn the_first_of_equals_is_best() {
    let mut case = Case::new(70, 64 * 16, 128, 11);
    for row in [0, 3, 66] {
        case.x[row * 128..][..128].fill(bf16::ZERO);
    }
    case.check(4);
}

/// Several passes of the stream, with whole and split tiles in one launch.
#[test]
fn bits_of_linear_over_passes() {
    let n_tiles = (N_TILES * BLOCKS) as usize + 13;
    Case::new(9, n_tiles.next_multiple_of(2) * 16, 256, 7).check(4);
}

/// Two tiles of rows, the second a short one. The two blocks of a cluster take whole tiles of the same features and
/// keep in step; then come tiles that are split.
#[test]
fn blocks_with_the_same_weights() {
    let case = Case::new(133, 24 * 16, 256, 5);
    case.check(4);
    case.check(2);
}

/// No other split would make the rounds of parts shorter, counting also what parts exchange. A tile has no more parts
/// than there are blocks.
#[test]
fn the_last_round_is_short() {
    for (grid, k, rows) in
        [(1, 64, 64), (3, 512, 128), (108, 4096, 64), (132, 4096, 128), (132, 4096, 64), (132, 12288, 128)]
    {
        for tiles in 1..4 * grid {
            let Share { whole, shift } = Share::new(tiles, rows, grid, k);
            assert!(whole % grid == 0 && tiles - whole < grid && 1 << shift <= 4.min(grid));
            let slots = (k / 64).div_ceil(4);
            let time = |shift: u32| {
                let parts = (tiles - whole) << shift;
                let exchange = if rows == 64 { [0, 5, 12] } else { [0, 10, 28] };
                parts.div_ceil(grid) * (slots * (4 >> shift) + exchange[shift as usize])
            };
            let other = (0..3).filter(|other| 1 << other <= grid).map(time).min();
            assert_eq!(Some(time(shift)), other, "{tiles} tiles of {k} on {grid} blocks");
            // What a block receives from the other block of its cluster lies where its next activations would, so there
            // is one round at most.
            assert!(shift != 1 || (tiles - whole) << shift <= grid, "{tiles} tiles of {k} on {grid} blocks");
        }
    }
}
