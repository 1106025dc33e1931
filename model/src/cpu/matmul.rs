//! Linear maps with weights as they are stored.

use rayon::prelude::*;

use super::dot::{self, Simd};
use crate::checkpoint::{Dtype, Tensor};
use crate::{Error, Weight};

/// A weight matrix in place, `[outputs, inputs]`; a vector is a matrix of one row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matrix<'a> {
    float: Float,
    inputs: usize,
    data: &'a [u8],
}

/// The number formats that are multiplied with.
#[derive(Debug, Clone, Copy)]
enum Float {
    Bf16,
    F16,
    F32,
}

/// A quantised matrix, converted to bf16.
#[derive(Debug)]
pub(super) struct Converted {
    inputs: usize,
    data: Vec<u8>,
}

impl Converted {
    /// Reads and converts the matrix, on all threads.
    ///
    /// # Errors
    /// As [`Weight::read_bf16`].
    pub(super) fn new(weight: &Weight<'_>) -> Result<Self, Error> {
        const PIECE: usize = 1 << 20;
        let piece = weight.unit() * PIECE.div_ceil(weight.unit());
        let mut data = vec![0; 2 * weight.elements()];
        let pieces = data.par_chunks_mut(2 * piece).enumerate();
        pieces.try_for_each(|(i, out)| weight.read_bf16(i * piece, out))?;
        Ok(Self { inputs: weight.shape().last().copied().unwrap_or(0), data })
    }

    pub(super) fn matrix(&self) -> Matrix<'_> {
        Matrix { float: Float::Bf16, inputs: self.inputs, data: &self.data }
    }
}

/// A linear map and where its result goes.
pub(super) struct Output<'a> {
    pub(super) weight: Matrix<'a>,
    /// `[rows, outputs]`.
    pub(super) out: &'a mut [f32],
}

impl<'a> Matrix<'a> {
    /// A tensor of floats, in place. Quantised matrices are `Converted` instead.
    pub(super) fn new(tensor: &Tensor<'a>) -> Self {
        let float = match tensor.dtype {
            Dtype::Bf16 => Float::Bf16,
            Dtype::F16 => Float::F16,
            Dtype::F32 => Float::F32,
            Dtype::F8E4m3 | Dtype::I32 | Dtype::I64 | Dtype::Bool => {
                unreachable!("{} holds {}", tensor.name, tensor.dtype)
            }
        };
        Matrix { float, inputs: tensor.shape.last().copied().unwrap_or(0), data: tensor.data }
    }

    fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.inputs * if matches!(self.float, Float::F32) { 4 } else { 2 };
        &self.data[row * bytes..][..bytes]
    }

    /// One row, widened.
    pub(super) fn row_f32(&self, row: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.inputs];
        self.widen(Simd::Portable, row, &mut out);
        out
    }

    fn widen(&self, simd: Simd, row: usize, out: &mut [f32]) {
        let bytes = self.row(row);
        match self.float {
            Float::Bf16 => dot::widen_bf16(simd, bytes, out),
            Float::F16 => dot::widen_f16(simd, bytes, out),
            Float::F32 => {
                for (out, &w) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *out = f32::from_le_bytes(w);
                }
            }
        }
    }

    /// Dot product of a row with `x`, `[inputs]`.
    fn dot(&self, simd: Simd, row: usize, x: &[f32]) -> f32 {
        let bytes = self.row(row);
        match self.float {
            Float::Bf16 => dot::dot_bf16(simd, bytes, x),
            Float::F16 => dot::dot_f16(simd, bytes, x),
            Float::F32 => dot::dot_f32_bytes(simd, bytes, x),
        }
    }
}

/// Multiply-adds of one task: large enough that handing it to a thread is a small part of it.
const TASK: usize = 1 << 17;

/// Least number of outputs of a task, when there are several rows: a tile of `x` is used that often.
const COLUMNS: usize = 16;

/// Elements of `x` that stay in L1 beside a row of weights.
const TILE: usize = 1 << 12;

/// `out[r, n] = weight[n] · x[r]` for several maps of the same input; `x` is `[rows, inputs]`.
///
/// A task takes some of the outputs `n`. It computes them for all rows while their weights are in cache.
pub(super) fn matmul(simd: Simd, x: &[f32], rows: usize, outputs: Vec<Output<'_>>) {
    let inputs = x.len() / rows;
    let columns_per_task = (TASK / (inputs * rows)).max(if rows == 1 { 1 } else { COLUMNS });
    if rows == 1 {
        let tasks: Vec<_> = outputs
            .into_iter()
            .flat_map(|Output { weight, out }| {
                let chunks = out.chunks_mut(columns_per_task).enumerate();
                chunks.map(move |(i, chunk)| (weight, i * columns_per_task, chunk))
            })
            .collect();
        run(tasks, |(weight, first, out)| {
            for (n, out) in out.iter_mut().enumerate() {
                *out = weight.dot(simd, first + n, x);
            }
        });
        return;
    }
    for Output { weight, out } in outputs {
        // Threads write the transpose, `[outputs, rows]`, in which a task's share is contiguous.
        let columns = out.len() / rows;
        let mut transposed = vec![0.0; out.len()];
        let tasks: Vec<_> = transposed.chunks_mut(columns_per_task * rows).enumerate().collect();
        run(tasks, |(task, out)| {
            // Widens the task's weights once, then goes over `x`, as many rows at a time as L1 holds.
            let mut wide = vec![0.0; columns_per_task * inputs];
            let wide = &mut wide[..out.len() / rows * inputs];
            for (n, wide) in wide.chunks_exact_mut(inputs).enumerate() {
                weight.widen(simd, task * columns_per_task + n, wide);
            }
            let tile = (TILE / inputs).max(2);
            for first in (0..rows).step_by(tile) {
                let tile = tile.min(rows - first);
                let x = &x[first * inputs..][..tile * inputs];
                for (wide, out) in wide.chunks_exact(inputs).zip(out.chunks_exact_mut(rows)) {
                    column(simd, wide, x, &mut out[first..][..tile]);
                }
            }
        });
        for (r, out) in out.chunks_exact_mut(columns).enumerate() {
            for (n, out) in out.iter_mut().enumerate() {
                *out = transposed[n * rows + r];
            }
        }
    }
}

/// Dot products of one weight row with every row of `x`, `[out.len(), w.len()]`.
fn column(simd: Simd, w: &[f32], x: &[f32], out: &mut [f32]) {
    let row = |r: usize| &x[r * w.len()..][..w.len()];
    let (pairs, last) = out.as_chunks_mut::<2>();
    for (i, pair) in pairs.iter_mut().enumerate() {
        (pair[0], pair[1]) = dot::dot2_f32(simd, w, row(2 * i), row(2 * i + 1));
    }
    if let [out] = last {
        *out = dot::dot_f32(simd, w, row(2 * pairs.len()));
    }
}

/// Runs every task, on all threads if there is more than one.
fn run<T: Send>(mut tasks: Vec<T>, f: impl Fn(T) + Sync + Send) {
    if tasks.len() == 1 {
        tasks.drain(..).for_each(f);
    } else {
        tasks.into_par_iter().for_each(f);
    }
}
