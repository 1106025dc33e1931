//! Codes as the batched decode kernels read them.
//!
//! # Safety
//! What is unsafe here asks what [`CodedFormat`] says; a stage is a box of [`stages`](super::stages).

use cuda_std::device;
use cuda_std::shared::Shared;
use cuda_std::thread;

use super::{Code, Quantized, SCALE_BYTES, Scale, both_factors, load_slice, second_at, words};
use crate::batched::{BatchedStep, OfCodes};
use crate::linear::K_PARTIALS;
use crate::stream::GROUP_N_TILES;
use crate::weights::batched::put_slice;
use crate::weights::{BatchedFormat, CodedFormat};

impl<C: Code> BatchedFormat for Quantized<C> {
    type MainLoop = OfCodes;
    const SCALED: bool = C::UNIT != 1.0;

    #[device]
    fn stage_bytes(_: &BatchedStep) -> u32 {
        GROUP_N_TILES * second_at::<C>()
    }

    #[device]
    fn box_at(k_partial: u32, is_odd: bool) -> [u32; 2] {
        let [codes, scales] = [0, C::SLICE_BYTES / 8];
        [if k_partial.is_multiple_of(2) { codes } else { scales }, (k_partial + u32::from(is_odd) * K_PARTIALS) / 2]
    }
}

impl<C: Code> CodedFormat for Quantized<C> {
    type Codes = ([[u32; 4]; 2], [Scale; 2]);

    /// A stage has codes, then scales; for odd split-K partials it has scales, then codes.
    #[device]
    unsafe fn load_codes(stage: Shared<u8>, k_partial: u32, lane: u32) -> Self::Codes {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let is_odd = !k_partial.is_multiple_of(2);
            let stage = stage.at((warp_id * second_at::<C>()) as usize);
            let [codes, scales] = if is_odd { [SCALE_BYTES, 0] } else { [0, C::SLICE_BYTES] };
            load_slice::<C>(stage.at(codes as usize), stage.at(scales as usize), lane)
        }
    }

    #[device]
    fn put_codes<const FIRST: usize>((codes, scales): Self::Codes) {
        let factors = both_factors::<C>(scales);
        let mut weights = [[0; 4]; 4];
        unroll!(F < 4; {
            weights[F] = C::decode(words::<C>(&codes, F), &factors);
        });
        put_slice::<FIRST>(weights);
    }

    #[device]
    fn mix((codes, [lower, upper]): Self::Codes) -> u32 {
        lower.0 ^ upper.0 ^ codes[0][0] ^ if C::BITS == 8 { codes[1][0] } else { 0 }
    }
}
