//! How the batched decode kernels read weights.
//!
//! A stage has one slice, 64 inputs, of 8 N-tiles. Consumer warp `w` makes the fragments of N-tile `w`: A of four MMAs
//! of 16 inputs each. It puts them into registers that `wgmma` reads by number ([`wgmma::FRAGMENTS`]): a stage with an
//! even number in its split-K partial into 0 to 15, one with an odd number into 16 to 31. So the fragments of one stage
//! are made while MMAs read those of the other. (Packed weights take both halves at a time.) With
//! `g = lane / 4` and `t = lane % 4`, MMA `i` of a stage reads:
//!
//! ```text
//! register   4 i          4 i + 1        4 i + 2          4 i + 3
//! feature    g            g + 8          g                g + 8
//! inputs     2 t and the next            2 t + 8 and the next         in the order of slots, from 16 i on
//! ```
//!
//! In a stage of [`Plain`] weights each register is a core matrix, 128 contiguous bytes:
//!
//! ```text
//! [N-tile of 8][features 0 to 7, then 8 to 15][MMA of 4][inputs 0 to 7, then 8 to 15][feature of 8][8 inputs]
//! ```
//!
//! The main loops are in `k_partial.rs` of [`batched`](crate::batched): a [`LoadedFormat`] makes the fragments of a
//! stage in one go, a [`PairedFormat`] those of two stages, and a [`CodedFormat`] first loads a stage's codes and
//! decodes them later. With 96 or 128 rows a tile, `wgmma` reads plain weights from the stage itself.
//!
//! # Safety
//! What is unsafe here asks the same as for all [formats](super). Each of the eight consumer warps loads the N-tile of
//! a stage that has its number. No MMA reads the registers that are written.

use cuda_std::shared::Shared;
use cuda_std::{Global, bf16, device, thread, wgmma};

use super::{FragmentFormat, Plain, WeightFragments};
use crate::batched::{BatchedStep, MainLoop, OfPlain};
use crate::linear::K_PARTIALS;
use crate::stream::{SLICE_BYTES, SLICES_APART, STEP_BYTES, Wave, fragment_row};

/// How the batched decode kernels read weights.
pub(crate) trait BatchedFormat: FragmentFormat {
    /// How they are multiplied.
    type MainLoop: MainLoop<Self>;

    /// Whether a stage, a slice of [`GROUP_N_TILES`](crate::stream::GROUP_N_TILES) N-tiles, is a box of
    /// [`BatchedStep::boxes`]; otherwise it is one contiguous piece of memory.
    const BY_BOXES: bool = true;

    /// Bytes of a stage.
    fn stage_bytes(p: &BatchedStep) -> u32;

    /// Where the box of a stage begins in the chunks of its N-tiles: at which word, and in which quarter. A split-K
    /// partial's stages have even and odd numbers in turn.
    fn box_at(k_partial: u32, is_odd: bool) -> [u32; 2];

    /// Whether sums are multiplied with their phase's [scale](crate::batched::Phase::scale).
    const SCALED: bool = false;
}

/// A format whose stages each become fragments in one go.
pub(crate) trait LoadedFormat: BatchedFormat {
    /// Loads the fragments of a warp's N-tile from a full stage of this split-K partial, into the registers of four
    /// MMAs from number `FIRST` on: 0 for the partial's stages with an even number, 4 for those with an odd one.
    ///
    /// # Safety
    /// `p` is a launch's parameter block. The whole warp calls it, having waited for the stage, which nobody fills or
    /// releases meanwhile; no MMA reads these registers.
    unsafe fn load_fragments<const FIRST: usize>(p: &BatchedStep, stage: Shared<u8>, lane: u32);
}

/// A format that is unpacked two stages at a time, as long as there are two.
pub(crate) trait PairedFormat: LoadedFormat {
    /// The fragments of a warp's N-tile from two full stages of a split-K partial, the first of which has an even
    /// number.
    ///
    /// # Safety
    /// As for [`load_fragments`](LoadedFormat::load_fragments), of both stages.
    unsafe fn unpack_pair(p: &BatchedStep, stages: [Shared<u8>; 2], lane: u32) -> WeightFragments;
}

/// A format of codes, which are loaded one stage ahead of the making of fragments.
pub(crate) trait CodedFormat: BatchedFormat {
    /// A lane's codes of a stage.
    type Codes: Copy;

    /// Loads the codes of a warp's N-tile from a stage of this split-K partial.
    ///
    /// # Safety
    /// The whole warp calls it, having waited for the stage, which nobody fills or releases before all lanes have them.
    unsafe fn load_codes(stage: Shared<u8>, k_partial: u32, lane: u32) -> Self::Codes;

    /// Makes fragments of codes, and puts them into the registers of four MMAs from number `FIRST` on, as
    /// [`load_fragments`](LoadedFormat::load_fragments) does.
    fn put_codes<const FIRST: usize>(codes: Self::Codes);

    /// A word that is there only when all codes have been loaded: it depends on one word of each load, and a load ends
    /// as a whole.
    fn mix(codes: Self::Codes) -> u32;
}

/// Where stages of plain weights lie for the batched decode kernel. A stage is a slice of each of 8 N-tiles.
#[derive(Clone, Copy)]
pub(crate) struct StageSources {
    /// The first stage of the first split-K partial.
    first: Global<u8>,
    /// Bytes from a split-K partial's stage with an even number to its next, and from one with an odd number to its
    /// next.
    pub apart: [u64; 2],
}

impl StageSources {
    /// The stages of 8 N-tiles from `n_tile` on, of a matrix in this stream.
    ///
    /// # Safety
    /// The stream has the wave, and the wave the N-tile, which is a multiple of
    /// [`GROUP_N_TILES`](crate::stream::GROUP_N_TILES); or nothing is read there.
    #[device]
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
    #[device]
    pub unsafe fn of(&self, k_partial: u32) -> Global<u8> {
        // SAFETY: the caller's word.
        unsafe { self.first.at((k_partial * SLICES_APART) as usize) }
    }
}

/// Puts a slice's fragments into the registers of four MMAs from number `FIRST` on.
#[device]
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

/// Puts two slices' fragments into the registers of eight MMAs.
#[device]
pub(crate) fn put_fragments([a, b, c, d, e, f, g, h]: WeightFragments) {
    put_slice::<0>([a, b, c, d]);
    put_slice::<4>([e, f, g, h]);
}

impl BatchedFormat for Plain {
    type MainLoop = OfPlain;
    const BY_BOXES: bool = false;

    #[device]
    fn stage_bytes(_: &BatchedStep) -> u32 {
        SLICES_APART
    }

    #[device]
    fn box_at(_: u32, _: bool) -> [u32; 2] {
        [0; 2]
    }
}

impl LoadedFormat for Plain {
    #[device]
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
