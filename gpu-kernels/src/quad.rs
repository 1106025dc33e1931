//! What the four lanes do together that have a row between them in the tensor core's layouts.

use cuda_std::{math, warp};

/// The sum of `v` over the four lanes, the same bits in each.
#[inline(always)]
pub(crate) fn sum(v: f32) -> f32 {
    let v = v + warp::shuffle_xor(v, 1);
    v + warp::shuffle_xor(v, 2)
}

/// The largest `v` of the four lanes.
#[inline(always)]
pub(crate) fn max(v: f32) -> f32 {
    let v = math::max(v, warp::shuffle_xor(v, 1));
    math::max(v, warp::shuffle_xor(v, 2))
}
