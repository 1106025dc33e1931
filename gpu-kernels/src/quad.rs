//! Reductions over the four lanes that share a row in the tensor core's fragment layouts.

use cuda_std::{device, math, warp};

/// The sum of `v` over the four lanes, the same bits in each.
#[device]
pub(crate) fn sum(v: f32) -> f32 {
    let v = v + warp::shuffle_xor(v, 1);
    v + warp::shuffle_xor(v, 2)
}

/// The largest `v` of the four lanes.
#[device]
pub(crate) fn max(v: f32) -> f32 {
    let v = math::max(v, warp::shuffle_xor(v, 1));
    math::max(v, warp::shuffle_xor(v, 2))
}
