//! As the batched decode kernels read them.

use cuda_std::shared::Shared;
use cuda_std::thread;

use super::{Code, Quantized, SCALE_BYTES, both_factors, load_slice, regions_at, scales_at, second_at, words};
use crate::batched::BatchedStep;
use crate::stream::{SLICES_APART, TOGETHER, Wave};
use crate::weights::batched::put_slice;
use crate::weights::{BatchedFormat, StageSources};

impl<C: Code> BatchedFormat for Quantized<C> {
    const STAGES: u32 = SLICES_APART / (TOGETHER * (C::SLICE_BYTES + SCALE_BYTES)) + 1;
    const SCALED: bool = C::UNIT != 1.0;

    #[inline(always)]
    unsafe fn stages(p: &BatchedStep, wave: &Wave, n_tile: u32) -> StageSources {
        let region = |q| regions_at::<C>(wave.together(n_tile, q));
        let within = u64::from(2 * C::REGION_BYTES);
        StageSources {
            // SAFETY: the caller's word.
            first: unsafe { p.codes.at(region(0) as usize) },
            k_partials: [scales_at::<C>(), C::REGION_BYTES],
            apart: [within, region(1) - region(0) - within],
            bytes: second_at::<C>(),
        }
    }

    /// Codes and scales; of every second split-K partial scales and codes.
    #[inline(always)]
    unsafe fn load_fragments<const FIRST: usize>(_: &BatchedStep, stage: Shared<u8>, k_partial: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let is_odd = !k_partial.is_multiple_of(2);
            let codes = if is_odd { TOGETHER * SCALE_BYTES } else { 0 } + warp_id * C::SLICE_BYTES;
            let scales = if is_odd { 0 } else { scales_at::<C>() } + warp_id * SCALE_BYTES;
            let (codes, scales) = load_slice::<C>(stage.at(codes as usize), stage.at(scales as usize), lane);
            let factors = both_factors::<C>(scales);
            let mut weights = [[0; 4]; 4];
            unroll!(F < 4; {
                weights[F] = C::decode(words::<C>(&codes, F), &factors);
            });
            put_slice::<FIRST>(weights);
        }
    }
}
