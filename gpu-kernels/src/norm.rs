//! RMSNorm: `out[row, :] = x[row, :] / sqrt(mean(x[row, :]²) + eps) * weight`, rounded to bf16 once.
//!
//! One block a row. The sum of squares has a fixed order: each thread sums its own elements, a butterfly adds the lanes of a
//! warp, and every thread adds the warps' sums from first to last.

use cuda_std::{Global, GlobalMut, bf16, kernel, math, shared, thread, warp};

use crate::step::Rows;

/// Threads of [`rms_norm`].
const THREADS: u32 = 256;

/// Parameters of [`rms_norm`]. Grid: (1, rows). Shared memory: [`RmsNorm::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, dim]`.
    pub x: Global<f32>,
    /// `[dim]`.
    pub weight: Global<bf16>,
    /// `[rows, dim]`.
    pub out: GlobalMut<bf16>,
    /// Hidden size.
    pub dim: u32,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl RmsNorm {
    /// One partial sum a warp.
    pub const SHARED_BYTES: u32 = THREADS / 32 * 4;
}

/// The sum of `v` over a warp, the same bits in every lane: at each level both partners add the same two numbers.
#[inline(always)]
pub(crate) unsafe fn warp_sum(mut v: f32) -> f32 {
    let mut mask = 16;
    while mask > 0 {
        v += warp::shuffle_xor(v, mask);
        mask /= 2;
    }
    v
}

/// Normalises each row.
#[kernel(threads = 256)]
pub unsafe fn rms_norm(p: RmsNorm) {
    unsafe {
        let row = thread::block_idx_y();
        if row >= p.rows.count.load(0) {
            return;
        }
        let tid = thread::thread_idx_x();
        let x = p.x.at(row as usize * p.dim as usize);
        let mut sum = 0.0;
        let mut i = tid;
        while i < p.dim {
            let v = x.load(i as usize);
            sum = math::fma(v, v, sum);
            i += THREADS;
        }
        let sum = warp_sum(sum);
        let sums = shared::dynamic::<f32>(0);
        if thread::lane_id() == 0 {
            sums.store(thread::warp_id() as usize, sum);
        }
        thread::sync_threads();
        let mut total = 0.0;
        let mut w = 0;
        while w < THREADS / 32 {
            total += sums.load(w as usize);
            w += 1;
        }
        let scale = 1.0 / math::sqrt(total / p.dim as f32 + p.eps);
        let out = p.out.at(row as usize * p.dim as usize);
        let mut i = tid;
        while i < p.dim {
            let v = x.load(i as usize) * scale * math::from_bf16(p.weight.load(i as usize));
            out.store(i as usize, math::to_bf16(v));
            i += THREADS;
        }
    }
}
