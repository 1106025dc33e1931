//! As the batched decode kernels read them.

use cuda_std::shared::Shared;
use cuda_std::thread;

use super::{Lossless, PACKED_SLICE, Place, REGIONS};
use crate::batched::BatchedStep;
use crate::stream::{TOGETHER, Wave};
use crate::weights::batched::put_slice;
use crate::weights::{BatchedFormat, StageSources, WeightFragments};

impl BatchedFormat for Lossless {
    const SCALED: bool = true;

    /// The first slices and the lists, then the lists again and the second ones.
    #[inline(always)]
    unsafe fn stages(p: &BatchedStep, wave: &Wave, n_tile: u32) -> StageSources {
        let list_bytes = p.lossless.list_bytes;
        let region_bytes = Self::region_bytes(list_bytes);
        let region = |q| u64::from(wave.together(n_tile, q) * REGIONS) * u64::from(region_bytes);
        let within = u64::from(TOGETHER * PACKED_SLICE);
        StageSources {
            // SAFETY: the caller's word.
            first: unsafe { p.lossless.regions.at(region(0) as usize) },
            k_partials: [region_bytes, 2 * region_bytes],
            apart: [within, region(1) - region(0) - within],
            bytes: TOGETHER * (PACKED_SLICE + list_bytes),
        }
    }

    #[inline(always)]
    unsafe fn load_fragments<const FIRST: usize>(p: &BatchedStep, stage: Shared<u8>, _: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let list_bytes = p.lossless.list_bytes;
            let (slices, lists) = if FIRST == 0 { (0, TOGETHER * PACKED_SLICE) } else { (TOGETHER * list_bytes, 0) };
            let tile = Place {
                slices: [stage.at((slices + warp_id * PACKED_SLICE) as usize)],
                which: FIRST as u32 / 4,
                list: stage.at((lists + warp_id * list_bytes) as usize).cast(),
            };
            let [weights] = tile.unpack(&p.lossless, lane, |_| {});
            put_slice::<FIRST>(weights);
        }
    }

    const PAIRED: bool = true;

    #[inline(always)]
    unsafe fn unpack_pair(p: &BatchedStep, stages: [Shared<u8>; 2], lane: u32) -> WeightFragments {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let (slice, list_bytes) = (warp_id * PACKED_SLICE, p.lossless.list_bytes);
            let first = stages[0].at(slice as usize);
            let second = stages[1].at((TOGETHER * list_bytes + slice) as usize);
            let list = stages[0].at((TOGETHER * PACKED_SLICE + warp_id * list_bytes) as usize).cast();
            let place = Place { slices: [first, second], which: 0, list };
            let [[a, b, c, d], [e, f, g, h]] = place.unpack(&p.lossless, lane, |_| {});
            [a, b, c, d, e, f, g, h]
        }
    }
}
