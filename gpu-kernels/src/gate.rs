//! The gate of a layer's feed-forward network.

use cuda_std::device;
use cuda_std::math;

/// SwiGLU: `silu(gate) · up`. It uses an approximate reciprocal, because every output needs one and a division takes
/// five times as many instructions.
#[device]
pub fn swiglu(gate: f32, up: f32) -> f32 {
    gate * math::rcp(1.0 + math::exp(-gate)) * up
}
