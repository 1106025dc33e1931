//! Adds the splits of a context: by a CTA, or by one warp in the same order.
//!
//! # Safety
//! `p` is a launch's parameter block, as that says it is. The 8 warps from the CTA's first on call [`combine_head`]
//! whole and together, for the same head of the same row, since they synchronise at `barrier`, which nobody else uses
//! meanwhile. The row has as many splits as its position says, all of them were kept in `p`'s memory, and the CTA has
//! waited for that. From byte `scratch` of dynamic shared memory on, a multiple of 16, there are
//! [`Attend::COMBINE_SHARED_BYTES`] that nobody else touches until the function returns.

use cuda_std::{bf16, device, kernel, math, shared, thread, warp};

use super::warps::sync;
use super::{Attend, SPLIT, WARPS, weight};
use crate::kv::HEAD_DIM;

/// Adds the splits of each row and head that has more than one, and normalises.
#[kernel(threads = 256)]
pub unsafe fn combine(p: Attend) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let row = thread::block_idx_y();
        if row < p.rows.count.load(0) {
            let position = p.rows.positions.load(row as usize);
            let put = |pair, d, x| p.out.store(pair * HEAD_DIM as usize + d as usize, x);
            combine_head(&p, row, thread::block_idx_x(), position, (thread::lane_id(), thread::warp_id()), put, (0, 1));
        }
    }
}

/// The largest maximum of a row and head. A split's maximum comes first in its `scale`. All lanes of a warp call it
/// together.
#[device]
fn top_score(splits: u32, lane: u32, scale: impl Fn(u32) -> [f32; 2]) -> f32 {
    let mut top = f32::NEG_INFINITY;
    let mut s = lane;
    while s < splits {
        top = math::max(top, scale(s)[0]);
        s += 32;
    }
    let mut mask = 16;
    while mask > 0 {
        top = math::max(top, warp::shuffle_xor(top, mask));
        mask /= 2;
    }
    top
}

/// [`combine`] for one head of the row at `position`, by the 8 warps from the CTA's first on. Shared memory from
/// `scratch` on is free again when it returns. `put(pair, d, x)` takes the result of dimension `d` of a pair, numbered
/// among all rows' heads; neighbouring lanes put neighbouring dimensions.
#[device]
pub(crate) unsafe fn combine_head(
    p: &Attend,
    row: u32,
    head: u32,
    position: u32,
    (lane, warp_id): (u32, u32),
    put: impl Fn(usize, u32, bf16),
    (scratch, barrier): (u32, u32),
) {
    // SAFETY: the caller's word.
    unsafe {
        let splits = position / SPLIT + 1;
        if splits == 1 {
            return;
        }
        let pair = row as usize * p.q_heads as usize + head as usize;
        let sums = |s| p.part(pair, s);
        let scale = |s| p.part_scale(pair, s);
        // Four dimensions a lane, of eight splits at a time.
        let load = |first: u32| {
            let (mut words, mut scales) = ([[0u32; 4]; 8], [[f32::NEG_INFINITY, 0.0]; 8]);
            unroll!(I < 8; {
                let s = first + I as u32 * WARPS;
                if s < splits {
                    words[I] = sums(s).load16(lane as usize * 4);
                    scales[I] = scale(s);
                }
            });
            (words, scales)
        };
        // The first splits are asked for before anything is waited for.
        let (mut words, mut scales) = load(warp_id);
        let top = top_score(splits, lane, scale);
        let (mut sum, mut norm) = ([0f32; 4], 0f32);
        let mut s = warp_id;
        while s < splits {
            unroll!(I < 8; {
                let factor = weight(scales[I][0], top);
                unroll!(D < 4; {
                    sum[D] = math::fma(f32::from_bits(words[I][D]), factor, sum[D]);
                });
                norm = math::fma(scales[I][1], factor, norm);
            });
            s += 8 * WARPS;
            if s < splits {
                (words, scales) = load(s);
            }
        }
        let partial = shared::dynamic::<f32>(scratch);
        let norms = partial.at((WARPS * HEAD_DIM) as usize);
        partial.store16((warp_id * HEAD_DIM + lane * 4) as usize, sum.map(f32::to_bits));
        if lane == 0 {
            norms.store(warp_id as usize, norm);
        }
        sync(barrier);
        let d = warp_id * 32 + lane;
        if d < HEAD_DIM {
            let (mut sum, mut norm) = (0f32, 0f32);
            unroll!(W < 8; {
                sum += partial.load(W * HEAD_DIM as usize + d as usize);
                norm += norms.load(W);
            });
            put(pair, d, math::to_bf16(sum / norm));
        }
        sync(barrier);
    }
}

/// [`combine`] for a row and head by one warp, which does the work of the 8 warps and adds in the same order.
/// `words(s)` gives four dimensions of a split's sums, from `4 · lane` on, and `scale(s)` its maximum and normaliser.
/// `put(d, word)` takes the result of dimensions `d` and `d + 1`.
#[device]
pub(crate) fn combine_by_warp(
    splits: u32,
    lane: u32,
    words: impl Fn(u32) -> [u32; 4],
    scale: impl Fn(u32) -> [f32; 2],
    put: impl Fn(u32, u32),
) {
    // The sums of eight splits, and their scales, one split a lane.
    let load = |first: u32| {
        let mut parts = [[0u32; 4]; WARPS as usize];
        unroll!(W < 8; {
            let s = first + W as u32;
            if s < splits {
                parts[W] = words(s);
            }
        });
        let (s, mut own) = (first + lane, [f32::NEG_INFINITY, 0.0]);
        if lane < WARPS && s < splits {
            own = scale(s);
        }
        (parts, own)
    };
    // The first eight splits are asked for before anything is waited for. Contexts up to 2,048 have no more.
    let (mut loaded, mut own) = load(0);
    let top = top_score(splits, lane, &scale);
    // The sums that each of the 8 warps would have, and their normalisers, one a lane.
    let (mut parts, mut norms) = ([[0f32; 4]; WARPS as usize], 0f32);
    let mut first = 0;
    loop {
        let factors = weight(own[0], top);
        norms = math::fma(own[1], factors, norms);
        unroll!(W < 8; {
            let factor = warp::shuffle_idx(factors, W as u32);
            unroll!(D < 4; {
                parts[W][D] = math::fma(f32::from_bits(loaded[W][D]), factor, parts[W][D]);
            });
        });
        first += WARPS;
        if first >= splits {
            break;
        }
        (loaded, own) = load(first);
    }
    let (mut sum, mut norm) = ([0f32; 4], 0f32);
    unroll!(W < 8; {
        unroll!(D < 4; {
            sum[D] += parts[W][D];
        });
        norm += warp::shuffle_idx(norms, W as u32);
    });
    unroll!(I < 2; {
        put(lane * 4 + 2 * I as u32, math::pack_bf16(sum[2 * I] / norm, sum[2 * I + 1] / norm));
    });
}
