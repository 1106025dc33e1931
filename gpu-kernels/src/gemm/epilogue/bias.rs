//! Adds biases to a GEMM's sums, before the epilogue uses them.
//!
//! # Safety
//! As for [all epilogues](super), before any of the sums is used: the accumulators hold `N` columns of the half, and no
//! MMAs are under way.

use cuda_std::{device, math, thread, wgmma};

use super::{Half, Next};
use crate::gemm::Gemm;

/// If the GEMM has a bias, multiplies each sum of the half by its row's factor, adds the bias, and returns ones as
/// factors. Without a bias it returns `scales`. Kernels whose CTAs take one tile (`_n192`) have no biases, since they
/// lack the registers.
#[device]
pub unsafe fn add<const N: u32, T: Next>(p: &Gemm, half: &Half, scales: [f32; 2], _: &T) -> [f32; 2] {
    if !T::FOLLOWS || p.bias.is_null() {
        return scales;
    }
    // A lane has every fourth pair of features: they are 8 apart.
    let first = half.column + 2 * (thread::opaque(thread::lane_id()) % 4);
    unroll!(B < 4; {
        unroll!(J < 8; {
            // A GEMM with a bias has whole N-tiles of features: both features of a pair exist, or neither.
            let feature = first + (B * 64 + J * 8) as u32;
            if (B as u32) * 64 < N && feature < p.n {
                // SAFETY: the caller's word.
                let bias = math::unpack_bf16(unsafe { p.bias.at(feature as usize).cast::<u32>().load_nc(0) });
                unroll!(R < 2; {
                    unroll!(C < 2; {
                        let sum = wgmma::get::<{ B * 32 + J * 4 + 2 * R + C }>() * scales[R] + bias[C];
                        wgmma::set::<{ B * 32 + J * 4 + 2 * R + C }>(sum);
                    });
                });
            }
        });
    });
    [1.0; 2]
}
