//! The gate of a layer's feed-forward network.

use cuda_std::math;

/// SwiGLU of a gate and an up: `silu(gate) · up`. By an approximate reciprocal: a division is five times the
/// instructions, and every output has one.
#[inline(always)]
pub fn swiglu(gate: f32, up: f32) -> f32 {
    gate * math::rcp(1.0 + math::exp(-gate)) * up
}
