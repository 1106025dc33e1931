//! How the batched decode kernels read weights.

use cuda_std::shared::Shared;
use cuda_std::{Global, bf16, thread, wgmma};

use super::{FragmentFormat, Plain, WeightFragments};
use crate::batched::BatchedStep;
use crate::linear::K_PARTIALS;
use crate::stream::{SLICE_BYTES, SLICES_APART, STEP_BYTES, Wave, fragment_row};

/// How the batched decode kernels read weights.
pub(crate) trait BatchedFormat: FragmentFormat {
    /// How many stages have as many bytes as one of [`Plain`], or nearly.
    const STAGES: u32 = 1;

    /// Where the stages of the batched decode kernel are: those of [`TOGETHER`](crate::stream::TOGETHER) N-tiles from
    /// `n_tile` on.
    ///
    /// # Safety
    /// `p` is a launch's parameter block, and the wave and N-tile are of its weights.
    unsafe fn stages(p: &BatchedStep, wave: &Wave, n_tile: u32) -> StageSources;

    /// The fragments of a warp's N-tile of a stage of this split-K partial, which is full, into the registers of four
    /// instructions from `FIRST` on: 0 for the partial's stages with an even number, and 4.
    ///
    /// # Safety
    /// `p` is a launch's parameter block. The whole warp calls it, having waited for the stage, which nobody fills or
    /// releases meanwhile; no MMA reads these registers.
    unsafe fn load_fragments<const FIRST: usize>(p: &BatchedStep, stage: Shared<u8>, k_partial: u32, lane: u32);

    /// Whether stages are unpacked in pairs, by [`unpack_pair`](Self::unpack_pair), as long as there are two.
    const PAIRED: bool = false;

    /// The fragments of a warp's N-tile of two stages of a split-K partial, which are full, the first with an even
    /// number.
    ///
    /// # Safety
    /// As for [`load_fragments`](Self::load_fragments), of both stages.
    unsafe fn unpack_pair(_: &BatchedStep, _stages: [Shared<u8>; 2], _lane: u32) -> WeightFragments {
        WeightFragments::default()
    }

    /// Whether sums are multiplied with their phase's [scale](crate::batched::Phase::scale).
    const SCALED: bool = false;
}

/// Stages of weights for the batched decode kernel, of 8 N-tiles: a slice of each.
#[derive(Clone, Copy)]
pub(crate) struct StageSources {
    /// The first one of the first split-K partial.
    pub first: Global<u8>,
    /// Bytes from the first one of split-K partial 0 to those of 1 and 2; that of 3 is as far from 2's as 1's from 0's.
    pub k_partials: [u32; 2],
    /// From a stage of a split-K partial with an even number to the one after it, and from that to the next.
    pub apart: [u64; 2],
    /// Of a stage.
    pub bytes: u32,
}

impl StageSources {
    /// The first stage of a split-K partial.
    #[inline(always)]
    pub unsafe fn of(&self, k_partial: u32) -> Global<u8> {
        let [odd, second] = self.k_partials;
        // SAFETY: the caller's word.
        unsafe { self.first.at((k_partial % 2 * odd + k_partial / 2 * second) as usize) }
    }
}

/// Puts a slice's fragments into the registers of four instructions from `FIRST` on.
#[inline(always)]
pub(super) fn put_slice<const FIRST: usize>(weights: [[u32; 4]; 4]) {
    macro_rules! put {
        ($($i:literal)*) => {
            $(
                if FIRST == 0 {
                    wgmma::put_fragment::<$i>(weights[$i / 4][$i % 4]);
                } else {
                    wgmma::put_fragment::<{ 16 + $i }>(weights[$i / 4][$i % 4]);
                }
            )*
        };
    }
    put!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
}

/// Puts two slices' fragments into the registers of eight instructions.
#[inline(always)]
pub(crate) fn put_fragments([a, b, c, d, e, f, g, h]: WeightFragments) {
    put_slice::<0>([a, b, c, d]);
    put_slice::<4>([e, f, g, h]);
}

impl Plain {
    /// The stages of 8 N-tiles from `n_tile` on, of a matrix in this stream.
    #[inline(always)]
    pub unsafe fn stages_of(stream: Global<bf16>, wave: &Wave, n_tile: u32) -> StageSources {
        let first = wave.slice(n_tile, 0);
        let within = wave.slice(n_tile, K_PARTIALS) - first;
        let beyond = wave.slice(n_tile, 2 * K_PARTIALS) - first - within;
        // SAFETY: the caller's word.
        let first = unsafe { stream.cast().at(first as usize) };
        StageSources {
            first,
            k_partials: [SLICES_APART, 2 * SLICES_APART],
            apart: [within, beyond],
            bytes: SLICES_APART,
        }
    }
}

impl BatchedFormat for Plain {
    #[inline(always)]
    unsafe fn stages(p: &BatchedStep, wave: &Wave, n_tile: u32) -> StageSources {
        // SAFETY: the caller's word.
        unsafe { Self::stages_of(p.stream, wave, n_tile) }
    }

    #[inline(always)]
    unsafe fn load_fragments<const FIRST: usize>(_: &BatchedStep, stage: Shared<u8>, _: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let warp_id = thread::opaque(thread::warp_id());
            let from = stage.at((warp_id * SLICE_BYTES + fragment_row(lane)) as usize);
            let step = STEP_BYTES as usize;
            if FIRST == 0 {
                wgmma::load_fragments::<0, u8>(from);
                wgmma::load_fragments::<1, u8>(from.at(step));
                wgmma::load_fragments::<2, u8>(from.at(2 * step));
                wgmma::load_fragments::<3, u8>(from.at(3 * step));
            } else {
                wgmma::load_fragments::<4, u8>(from);
                wgmma::load_fragments::<5, u8>(from.at(step));
                wgmma::load_fragments::<6, u8>(from.at(2 * step));
                wgmma::load_fragments::<7, u8>(from.at(3 * step));
            }
        }
    }
}
