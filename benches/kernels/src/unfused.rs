//! What was fused into its neighbours since, in launches of its own: the first rung of the ladder, kept to measure what
//! the fusion gained (the example `ablation`).
//!
//! - [`rms_norm`] reads the residual stream once more and writes the normalised input of the next GEMM; today its
//!   halves are in whoever writes the residual and in the GEMM ([`norm`](gpu_kernels::norm)).
//! - [`silu_mul`] reads the gate's and the up projection's outputs; today one GEMM makes both
//!   ([`linear::swiglu_8`](gpu_kernels::linear::swiglu_8)).

use cuda_std::{kernel, math, shared, thread};
use gpu_kernels::gate::{SiluMul, swiglu};
use gpu_kernels::linear::N_TILE;
use gpu_kernels::norm::{RmsNorm, warp_sum};

const THREADS: u32 = RmsNorm::THREADS;

/// `y = x / sqrt(mean(x²) + eps) · weight`.
#[kernel(threads = 256, module = "bench")]
pub unsafe fn rms_norm(p: RmsNorm) {
    unsafe {
        let row = thread::block_idx_y();
        if row >= p.rows.count.load(0) {
            return;
        }
        let start = row as usize * p.dim as usize;
        let (x, y) = (p.x.at(start), p.y.at(start));
        let mut squares = 0.0;
        let mut i = thread::thread_idx_x();
        while i < p.dim {
            let x = x.load(i as usize);
            squares += x * x;
            i += THREADS;
        }
        let sums = shared::dynamic::<f32>(0);
        let sum = warp_sum(squares);
        if thread::lane_id() == 0 {
            sums.store(thread::warp_id() as usize, sum);
        }
        thread::sync_threads();
        let mut total = 0.0;
        let mut warp = 0;
        while warp < THREADS / 32 {
            total += sums.load(warp as usize);
            warp += 1;
        }
        let inverse = 1.0 / math::sqrt(total / p.dim as f32 + p.eps);
        let mut i = thread::thread_idx_x();
        while i < p.dim {
            let weight = math::from_bf16(p.weight.load(i as usize));
            y.store(i as usize, math::to_bf16(x.load(i as usize) * inverse * weight));
            i += THREADS;
        }
    }
}

/// `y = silu(gate) ∘ up`.
#[kernel(threads = 256, module = "bench")]
pub unsafe fn silu_mul(p: SiluMul) {
    unsafe {
        let (row, i) = (thread::block_idx_y(), thread::block_idx_x() * THREADS + thread::thread_idx_x());
        if row < p.rows.count.load(0) && i < p.n {
            let half = N_TILE / 2;
            let gate = ((row * p.n.div_ceil(half) + i / half) * N_TILE + i % half) as usize;
            let y = math::to_bf16(swiglu(p.x.load(gate), p.x.load(gate + half as usize)));
            p.y.store(row as usize * p.n as usize + i as usize, y);
        }
    }
}
