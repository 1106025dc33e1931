//! Lossless weights as the batched decode kernels read them.
//!
//! # Safety
//! What is unsafe here asks what [`LoadedFormat`] says; a stage is a box of [`Lossless::stages`]. It is unpacked in
//! place, and so loaded once.

use cuda_std::device;
use cuda_std::shared::Shared;
use cuda_std::thread;

use super::{Lossless, PACKED_SLICE, Place};
use crate::batched::{BatchedStep, InPairs};
use crate::stream::GROUP_N_TILES;
use crate::weights::batched::put_slice;
use crate::weights::{BatchedFormat, LoadedFormat, PairedFormat, WeightFragments};

impl BatchedFormat for Lossless {
    type MainLoop = InPairs;
    const SCALED: bool = true;

    #[device]
    fn stage_bytes(p: &BatchedStep) -> u32 {
        GROUP_N_TILES * (PACKED_SLICE + p.lossless.list_bytes)
    }

    /// Even stages have first slices and lists; odd ones have the same lists and second slices.
    #[device]
    fn box_at(k_partial: u32, is_odd: bool) -> [u32; 2] {
        [if is_odd { PACKED_SLICE / 8 } else { 0 }, k_partial]
    }
}

impl LoadedFormat for Lossless {
    #[device]
    unsafe fn load_fragments<const FIRST: usize>(p: &BatchedStep, stage: Shared<u8>, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let list_bytes = p.lossless.list_bytes;
            let stage = stage.at((warp_id * (PACKED_SLICE + list_bytes)) as usize);
            let [slice, list] = if FIRST == 0 { [0, PACKED_SLICE] } else { [list_bytes, 0] };
            let (slice, list) = (stage.at(slice as usize), stage.at(list as usize).cast());
            let tile = Place { slices: [slice], which: FIRST as u32 / 4, list };
            let [weights] = tile.unpack(&p.lossless, lane, |_| {});
            put_slice::<FIRST>(weights);
        }
    }
}

impl PairedFormat for Lossless {
    #[device]
    unsafe fn unpack_pair(p: &BatchedStep, stages: [Shared<u8>; 2], lane: u32) -> WeightFragments {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let list_bytes = p.lossless.list_bytes;
            let [first, second] = stages.map(|stage| stage.at((warp_id * (PACKED_SLICE + list_bytes)) as usize));
            let (second, list) = (second.at(list_bytes as usize), first.at(PACKED_SLICE as usize).cast());
            let place = Place { slices: [first, second], which: 0, list };
            let [[a, b, c, d], [e, f, g, h]] = place.unpack(&p.lossless, lane, |_| {});
            [a, b, c, d, e, f, g, h]
        }
    }
}
