//! Weights in e4m3, multiplied by activations in e4m3.
//!
//! # Safety
//! What is unsafe here asks what [`WeightFormat`] says.

use cuda_std::device;

use super::{Plain, WeightFormat};
use crate::decode::{DecodeStep, OfCodes};
use crate::ring::Ring;
use crate::stream::Wave;

/// e4m3, as [`EncodeE4m3`](crate::e4m3::EncodeE4m3) leaves it.
#[derive(Clone, Copy)]
pub struct E4m3;

impl WeightFormat for E4m3 {
    type Products = OfCodes;
    const PLAIN_HEAD: bool = true;
    const INPUTS: u32 = 2;
    const UNDER_WAY_OF_ONE: [u32; 2] = [2, 4];

    #[device]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe { Plain::<false>::fill_from(p.e4m3.codes, ring, wave, n_tile, q) }
    }
}
