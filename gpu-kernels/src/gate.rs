//! The gate of a layer's feed-forward network.

use cuda_std::{Global, GlobalMut, bf16, math};

use crate::step::Rows;

/// SwiGLU of a gate and an up: `silu(gate) · up`. By an approximate reciprocal: a division is five times the
/// instructions, and every output has one.
#[inline(always)]
pub fn swiglu(gate: f32, up: f32) -> f32 {
    gate * math::rcp(1.0 + math::exp(-gate)) * up
}

/// Parameters of SwiGLU in a launch of its own, `silu_mul` of `bench-kernels`: `y = silu(gate) ∘ up`. Grid: (n / 256
/// rounded up, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct SiluMul {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, n in eights, 16]`: of each N-tile eight gates, then their ups.
    pub x: Global<f32>,
    /// `[rows, n]`, written.
    pub y: GlobalMut<bf16>,
    /// Features.
    pub n: u32,
}
