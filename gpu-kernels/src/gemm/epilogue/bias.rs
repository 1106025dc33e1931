//! Biases of GEMMs, added to the sums before anything else becomes of them.
//!
//! # Safety
//! As for [all epilogues](super), before any of the sums is used: the accumulators hold `N` columns of the half, and no
//! MMAs are under way.

use cuda_std::{math, thread, wgmma};

use super::{Half, Next};
use crate::gemm::Gemm;

/// If the GEMM has a bias, each sum of the half is multiplied by its row's factor, and the bias added: what is left to
/// multiply by is returned. What needs no bias passes by; so do blocks of one tile (`_n192`), which lack the registers.
#[inline(always)]
pub unsafe fn add<const N: u32, T: Next>(p: &Gemm, half: &Half, scales: [f32; 2], _: &T) -> [f32; 2] {
    if !T::FOLLOWS || p.bias.is_null() {
        return scales;
    }
    // The lane's pairs of features are 8 apart.
    let first = half.column + 2 * (thread::opaque(thread::lane_id()) % 4);
    unroll!(B < 4; {
        unroll!(J < 8; {
            // A GEMM with a bias has whole N-tiles of features: pairs are there or not.
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
