//! How the batched decode kernels read weights.
//!
//! # Safety
//! The same as for all [formats](super). Each of the eight consumer warps loads the N-tile of a stage that has its
//! number. No MMA reads the registers that are written.

use cuda_std::shared::Shared;
use cuda_std::{Global, bf16, thread, wgmma};

use super::{FragmentFormat, Plain, WeightFragments};
use crate::batched::{BatchedStep, MainLoop, OfPlain};
use crate::linear::K_PARTIALS;
use crate::stream::{SLICE_BYTES, SLICES_APART, STEP_BYTES, Wave, fragment_row};

/// How the batched decode kernels read weights.
pub(crate) trait BatchedFormat: FragmentFormat {
    /// How they are multiplied.
    type MainLoop: MainLoop<Self>;

    /// Whether a stage, a slice of [`TOGETHER`](crate::stream::TOGETHER) N-tiles, is a box of
    /// [`BatchedStep::boxes`], and not one piece of memory.
    const BY_BOXES: bool = true;

    /// Bytes of a stage.
    fn stage_bytes(p: &BatchedStep) -> u32;

    /// Where in its N-tiles' chunks the box of a stage begins: at which word, and in which quarter. The split-K
    /// partial's stages with an even number and an odd one take turns.
    fn box_at(k_partial: u32, is_odd: bool) -> [u32; 2];

    /// Whether sums are multiplied with their phase's [scale](crate::batched::Phase::scale).
    const SCALED: bool = false;
}

/// A format of which a stage becomes fragments at once.
pub(crate) trait LoadedFormat: BatchedFormat {
    /// The fragments of a warp's N-tile of a stage of this split-K partial, which is full, into the registers of four
    /// instructions from `FIRST` on: 0 for the partial's stages with an even number, and 4.
    ///
    /// # Safety
    /// `p` is a launch's parameter block. The whole warp calls it, having waited for the stage, which nobody fills or
    /// releases meanwhile; no MMA reads these registers.
    unsafe fn load_fragments<const FIRST: usize>(p: &BatchedStep, stage: Shared<u8>, lane: u32);
}

/// A format of which two stages at a time are unpacked, as long as there are two.
pub(crate) trait PairedFormat: LoadedFormat {
    /// The fragments of a warp's N-tile of two stages of a split-K partial, which are full, the first with an even
    /// number.
    ///
    /// # Safety
    /// As for [`load_fragments`](LoadedFormat::load_fragments), of both stages.
    unsafe fn unpack_pair(p: &BatchedStep, stages: [Shared<u8>; 2], lane: u32) -> WeightFragments;
}

/// A format of codes, which are loaded a stage before fragments are made of them.
pub(crate) trait CodedFormat: BatchedFormat {
    /// What a lane has of a stage.
    type Codes: Copy;

    /// Loads those of a warp's N-tile of a stage of this split-K partial.
    ///
    /// # Safety
    /// The whole warp calls it, having waited for the stage, which nobody fills or releases before all lanes have them.
    unsafe fn load_codes(stage: Shared<u8>, k_partial: u32, lane: u32) -> Self::Codes;

    /// Puts their fragments into the registers of four instructions from `FIRST` on, as
    /// [`load_fragments`](LoadedFormat::load_fragments) does.
    fn put_codes<const FIRST: usize>(codes: Self::Codes);

    /// A word for which all of them must have been loaded: it depends on a word of each load, which ends as a whole.
    fn mix(codes: Self::Codes) -> u32;
}

/// Stages of plain weights for the batched decode kernel, of 8 N-tiles: a slice of each.
#[derive(Clone, Copy)]
pub(crate) struct StageSources {
    /// The first one of the first split-K partial.
    first: Global<u8>,
    /// From a stage of a split-K partial with an even number to the one after it, and from that to the next.
    pub apart: [u64; 2],
}

impl StageSources {
    /// Those of 8 N-tiles from `n_tile` on, of a matrix in this stream.
    ///
    /// # Safety
    /// The stream has the wave, and the wave the N-tile, which is a multiple of [`TOGETHER`](crate::stream::TOGETHER);
    /// or nothing is read there.
    #[inline(always)]
    pub unsafe fn new(stream: Global<bf16>, wave: &Wave, n_tile: u32) -> Self {
        let first = wave.slice(n_tile, 0);
        let within = wave.slice(n_tile, K_PARTIALS) - first;
        let beyond = wave.slice(n_tile, 2 * K_PARTIALS) - first - within;
        // SAFETY: the caller's word.
        Self { first: unsafe { stream.cast().at(first as usize) }, apart: [within, beyond] }
    }

    /// The first stage of a split-K partial.
    ///
    /// # Safety
    /// `k_partial` is below [`K_PARTIALS`].
    #[inline(always)]
    pub unsafe fn of(&self, k_partial: u32) -> Global<u8> {
        // SAFETY: the caller's word.
        unsafe { self.first.at((k_partial * SLICES_APART) as usize) }
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

impl BatchedFormat for Plain {
    type MainLoop = OfPlain;
    const BY_BOXES: bool = false;

    #[inline(always)]
    fn stage_bytes(_: &BatchedStep) -> u32 {
        SLICES_APART
    }

    #[inline(always)]
    fn box_at(_: u32, _: bool) -> [u32; 2] {
        [0; 2]
    }
}

impl LoadedFormat for Plain {
    #[inline(always)]
    unsafe fn load_fragments<const FIRST: usize>(_: &BatchedStep, stage: Shared<u8>, lane: u32) {
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
