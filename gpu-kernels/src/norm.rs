//! RMSNorm: `out[row, :] = x[row, :] / sqrt(mean(x[row, :]²) + eps) * weight`, rounded to bf16 once.
//!
//! One warp a row. The sum of squares has a fixed order: each lane sums the elements `4 (lane + 32 i) ..` in turn, four at a time, and a
//! butterfly adds the lanes.

use cuda_std::{Global, GlobalMut, bf16, kernel, math, thread, warp};

use crate::step::Rows;

/// Threads of [`rms_norm`].
const THREADS: u32 = 256;

/// Parameters of [`rms_norm`]. Grid: (1, rows).
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

/// What a row is multiplied by: `1 / sqrt(mean(x²) + eps)`, of `dim` elements (a multiple of 4) from `x` on, 16-byte aligned. Every lane of the warp
/// gets it.
#[inline(always)]
pub(crate) unsafe fn inverse_rms(x: Global<f32>, dim: u32, eps: f32) -> f32 {
    unsafe {
        let mut sum = 0.0;
        let mut i = thread::lane_id() * 4;
        while i < dim {
            // Eight loads under way at a time; zeros beyond the end change nothing.
            let mut words = [[0u32; 4]; 8];
            unroll!(L < 8; {
                let at = i + L as u32 * 128;
                if at < dim {
                    words[L] = x.load16(at as usize);
                }
            });
            unroll!(L < 8; {
                unroll!(J < 4; {
                    let v = f32::from_bits(words[L][J]);
                    sum = math::fma(v, v, sum);
                });
            });
            i += 1024;
        }
        1.0 / math::sqrt(warp_sum(sum) / dim as f32 + eps)
    }
}

/// Normalises each row.
#[kernel(threads = 256)]
pub unsafe fn rms_norm(p: RmsNorm) {
    unsafe {
        let row = thread::block_idx_y();
        if row >= p.rows.count.load(0) {
            return;
        }
        let x = p.x.at(row as usize * p.dim as usize);
        // Every warp finds it for itself: cheaper than a meeting.
        let scale = inverse_rms(x, p.dim, p.eps);
        let out = p.out.at(row as usize * p.dim as usize);
        let mut i = thread::thread_idx_x();
        while i < p.dim {
            let v = x.load(i as usize) * scale * math::from_bf16(p.weight.load(i as usize));
            out.store(i as usize, math::to_bf16(v));
            i += THREADS;
        }
    }
}
