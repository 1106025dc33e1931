//! Lossless packing of bf16 weights, into some 11.2 bits each.
//!
//! The eight exponent bits of a weight carry little information: the weights of a matrix are spread around zero, and
//! nine in ten of them have one of four exponents (Zhang et al., 2025, "70% Size, 100% Accuracy", make use of that with
//! codes of variable length). Here every weight has 11 bits: its lower byte (the exponent's last bit and the mantissa)
//! as it is, the sign, and two bits that say which of four neighbouring pairs of exponents it has. A weight with
//! another exponent is an *escape*: it stands in a list beside the codes, and is put in its place when the other
//! weights are unpacked. Each tile has a list, with room for as many escapes as nearly every tile has. Escapes beyond
//! that are in one list of the whole model.
//!
//! A pair begins with an even exponent. A matrix whose weights would fit better into pairs that begin with an odd one
//! is stored doubled, and its sums are halved: both are exact.
//!
//! # Layout
//! A *tile* is what a warp unpacks at a time: the two [slices](crate::linear::SLICE) of a split-K partial in a chunk,
//! 2,048 weights. N-tiles' chunks lie in the order of the plain stream. A chunk is contiguous, and the decode kernels
//! take it by one copy: it has four tiles, one for each split-K partial. Each slice lies beside its tile's list, so the
//! step of many sequences takes a slice and the list of 8 N-tiles by a box of 8 rows:
//!
//! ```text
//! tile     first slice, list, second slice
//! slice    low    [2][lane][16]  bytes   the weights' lower bytes, in the order of a lane's fragments
//!          codes  [3][lane]      words   code of weight j of fragment f < 3 in bits 4 j to 4 j + 2 of word f; the
//!                                        bits of those of fragment 3 in bits 4 j + 3: of word 0 the last bit, of word
//!                                        2 the first
//! list     [2]    words  see below
//!          [..]   u16    place among the slice's bytes: 10, sign: 1, the upper exponent bits' distance from `top`: 5
//! ```
//!
//! A code is the sign, and by how much the upper seven bits of the exponent are above the slice's `base`. In an escape
//! the distance 31 from `top` says that these seven bits are zeros. The bits of a list's first two words, the lowest
//! first:
//!
//! ```text
//! 0  escapes: 10    those of the first slice: 10    its base: 7              place in the model's list, upper bits: 5
//! 1  place in the model's list, lower bits: 18      second slice's base: 7   top: 7
//! ```
//!
//! # Safety
//! A whole warp calls what is unsafe here. A tile that it unpacks is in shared memory, complete, as the layout says.
//! One warp unpacks it in place, and so only once each time that it was copied there; nobody else uses its slices
//! meanwhile. The model's list has all escapes for which tiles' lists have no room.

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod batched;
mod pack;

use cuda_std::shared::{self, Shared};
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::tensor;
use cuda_std::{Global, bulk, device, math, thread, warp};

pub use self::pack::{MOST_BEYOND, MOST_ESCAPES, Pack, Unpack, count_escapes, pack_weights, unpack_weights};
use super::{FragmentFormat, WeightFormat, WeightFragments};
use crate::decode::{DecodeStep, OfFragments};
use crate::linear::K_PARTIALS;
use crate::ring::Ring;
use crate::stream::{GROUP_N_TILES, Wave};

/// Weights of a tile.
pub const TILE_WEIGHTS: u32 = 2048;
/// Bytes of a slice of a tile: lower bytes, and codes.
pub const PACKED_SLICE: u32 = LOW_BYTES + 3 * 32 * 4;

const LOW_BYTES: u32 = 1024;
/// Bytes of a list before its entries.
const HEADER_BYTES: u32 = 8;
/// An escape further below `top` than that cannot be packed, unless its exponent's upper bits are zeros.
pub const FURTHEST: u32 = 30;
/// How many bits of a place in the model's list are in the second word.
const MORE_BITS: u32 = 18;
/// In place of a distance from `top`: the upper bits of the escape's exponent are zeros.
const ZERO: u32 = 31;

/// Where the packed weights of a model are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Lossless {
    /// All [tiles](self#layout).
    pub tiles: Global<u8>,
    /// Escapes for which tiles' lists have no room.
    pub more: Global<u16>,
    /// `[matrices]`: what a matrix's sums are multiplied with, 1 or, if it is stored doubled, 0.5.
    pub scales: Global<f32>,
    /// Bytes of a tile's list: a multiple of 16.
    pub list_bytes: u32,
}

impl Lossless {
    /// Bytes of a tile whose list has `list_bytes`.
    #[must_use]
    #[device]
    pub const fn tile_bytes(list_bytes: u32) -> u32 {
        2 * PACKED_SLICE + list_bytes
    }

    /// The byte at which an N-tile's tile of a split-K partial begins. `group` is the number of the chunk of 8
    /// N-tiles that has it.
    #[device]
    const fn tile_at(group: u32, n_tile: u32, k_partial: u32, list_bytes: u32) -> u64 {
        let chunk = (group * GROUP_N_TILES + n_tile % GROUP_N_TILES) as u64;
        (chunk * K_PARTIALS as u64 + k_partial as u64) * Self::tile_bytes(list_bytes) as u64
    }

    /// The array as which the step of many sequences reads the `chunks` chunks of N-tiles at `address`. A box is a
    /// slice of each of [`GROUP_N_TILES`] N-tiles, with the lists beside them.
    #[cfg(not(target_arch = "nvptx64"))]
    #[must_use]
    pub const fn stages(address: u64, chunks: u64, list_bytes: u32) -> tensor::Array {
        let tile = Self::tile_bytes(list_bytes) as u64;
        let chunk = K_PARTIALS as u64 * tile;
        tensor::Array {
            address,
            sizes: [tile / 8, K_PARTIALS as u64, chunks, 1],
            strides: [tile, chunk, chunk * chunks],
            extent: [(PACKED_SLICE + list_bytes) / 8, 1, GROUP_N_TILES, 1],
        }
    }

    /// Escapes for which a list of `list_bytes` has room.
    #[must_use]
    #[device]
    pub const fn room(list_bytes: u32) -> u32 {
        (list_bytes - HEADER_BYTES) / 2
    }
}

/// The sign bits of a word of four upper bytes.
const SIGNS: u32 = 0x8080_8080;
/// In a word of codes: the bits that belong to the fourth fragment.
const FOURTH: u32 = 0x8888_8888;

/// The codes of a slice's four fragments, from its three words.
#[device]
fn codes(words: [u32; 3]) -> [u32; 4] {
    let one = words[1] & FOURTH | (words[0] >> 1) & !FOURTH;
    let two = words[2] & FOURTH | (one >> 1) & !FOURTH;
    [words[0], words[1], words[2], two >> 1]
}

/// The inverse of [`codes`]: the three words, from four fragments' codes, each in the lower three bits of a nibble.
#[device]
fn code_words(codes: [u32; 4]) -> [u32; 3] {
    let bit = |b: u32| (codes[3] >> b & 0x1111_1111) << 3;
    [codes[0] | bit(0), codes[1] | bit(1), codes[2] | bit(2)]
}

/// Where `N` slices of a tile lie, from the one numbered `which` on, and the tile's list.
#[derive(Clone, Copy)]
struct Place<const N: usize> {
    slices: [Shared<u8>; N],
    which: u32,
    list: Shared<u32>,
}

impl<const N: usize> Place<N> {
    /// Unpacks the slices into fragments. Upper bytes pass through the place of the lower ones, so nobody else may read
    /// these. With two slices `beside` is called with the numbers from 0 to 7, as in [`FragmentFormat::load`].
    ///
    /// # Safety
    /// All lanes of the warp call it, once. The slices and the list are complete, and no other warp reads or writes the
    /// slices before it returns.
    #[device]
    unsafe fn unpack(&self, p: &Lossless, lane: u32, mut beside: impl FnMut(usize)) -> [[[u32; 4]; 4]; N] {
        // SAFETY: the caller's word.
        unsafe {
            let header = self.list.cast::<[u32; 2]>().load(0);
            let last = Lossless::room(p.list_bytes) - 1;
            let escape = self.list.cast::<u16>().load((HEADER_BYTES / 2 + lane.min(last)) as usize);
            let bytes = |slice: usize, k: usize| self.slices[slice].at(k * 512 + lane as usize * 16);
            let mut low = [[[0; 4]; 2]; N];
            let mut words = [[0; 3]; N];
            unroll!(S < N of 2; {
                low[S] = [bytes(S, 0).load16(0), bytes(S, 1).load16(0)];
                let from = self.slices[S].at(LOW_BYTES as usize).cast::<u32>().at(lane as usize);
                words[S] = [from.load(0), from.load(32), from.load(64)];
            });
            unroll!(S < N of 2; {
                beside(S);
                let base = if self.which + S as u32 == 0 { header[0] >> 20 } else { header[1] >> MORE_BITS };
                let base = (base & 0x7f) * 0x0101_0101 + 0x0302_0100;
                let table = [base, base | SIGNS];
                let codes = codes(words[S]);
                let mut high = [[0; 4]; 2];
                unroll!(F < 4; {
                    let code = codes[F] & !FOURTH;
                    high[F / 2][F % 2 * 2] = math::permute(table[0], table[1], code);
                    high[F / 2][F % 2 * 2 + 1] = math::permute(table[0], table[1], code >> 16);
                });
                bytes(S, 0).store16(0, high[0]);
                bytes(S, 1).store16(0, high[1]);
            });
            beside(2);
            warp::sync_warp();
            self.patch(p, header, u32::from(escape), lane);
            warp::sync_warp();
            let mut high = [[[0; 4]; 2]; N];
            unroll!(S < N of 2; {
                high[S] = [bytes(S, 0).load16(0), bytes(S, 1).load16(0)];
            });
            beside(3);
            let mut weights = [[[0; 4]; 4]; N];
            unroll!(F < 4; {
                beside(4 + F);
                weights[0][F] = merge(low[0], high[0], F);
            });
            unroll!(F < 4; {
                weights[N - 1][F] = merge(low[N - 1], high[N - 1], F);
            });
            weights
        }
    }

    /// Puts the escapes in their places among the upper bytes. `own` is the escape with the lane's number, if there is
    /// one.
    ///
    /// # Safety
    /// As for [`unpack`](Self::unpack); the slices' upper bytes lie where the lower ones were. `header` is the list's,
    /// and `own` its entry with the lane's number.
    #[device]
    unsafe fn patch(&self, p: &Lossless, header: [u32; 2], own: u32, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let (count, of_first) = (header[0] & 0x3ff, header[0] >> 10 & 0x3ff);
            let top = header[1] >> 25;
            let put = |i: u32, entry: u32| {
                let slice = u32::from(i >= of_first).wrapping_sub(self.which);
                if slice < N as u32 {
                    let below = entry >> 11;
                    let high = if below == ZERO { 0 } else { top - below };
                    let slice = if slice == 0 { self.slices[0] } else { self.slices[N - 1] };
                    slice.store((entry & 0x3ff) as usize, (high | (entry >> 10 & 1) << 7) as u8);
                }
            };
            let room = Lossless::room(p.list_bytes);
            if lane < count.min(room) {
                put(lane, own);
            }
            // More escapes than lanes or than room are rare. A list may have less room than there are lanes.
            let mut i = if lane < room { lane + 32 } else { lane };
            while i < count {
                let entry = if i < room {
                    self.list.cast::<u16>().load((HEADER_BYTES / 2 + i) as usize)
                } else {
                    let more = header[0] >> 27 << MORE_BITS | header[1] & ((1 << MORE_BITS) - 1);
                    p.more.load_nc((more + i - room) as usize)
                };
                put(i, u32::from(entry));
                i += 32;
            }
        }
    }
}

/// A fragment of a slice, from its lower and upper bytes.
#[device]
fn merge(low: [[u32; 4]; 2], high: [[u32; 4]; 2], fragment: usize) -> [u32; 4] {
    let mut words = [0; 4];
    unroll!(H < 2; {
        let place = fragment % 2 * 2 + H;
        let (low, high) = (low[fragment / 2][place], high[fragment / 2][place]);
        words[2 * H] = math::permute(low, high, 0x5140);
        words[2 * H + 1] = math::permute(low, high, 0x7362);
    });
    words
}

impl Lossless {
    /// The tile of a split-K partial in a stage of the decode kernel's ring.
    ///
    /// # Safety
    /// The stage has a packed chunk of these weights, and `k_partial` is below [`K_PARTIALS`].
    #[device]
    unsafe fn tile(&self, stage: &Ring, k_partial: u32) -> Place<2> {
        // SAFETY: the caller's word.
        unsafe {
            let tile_bytes = Self::tile_bytes(self.list_bytes);
            let tile: Shared<u8> = shared::dynamic(stage.offset() + k_partial * tile_bytes);
            let second = tile.at((PACKED_SLICE + self.list_bytes) as usize);
            Place { slices: [tile, second], which: 0, list: tile.at(PACKED_SLICE as usize).cast() }
        }
    }
}

impl WeightFormat for Lossless {
    type Products = OfFragments;

    #[device]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe {
            // All lanes must have seen that the stage is empty before it is filled: consumers may then release it, and
            // a lane that looks too late would miss the phase.
            warp::sync_warp();
            if thread::opaque(thread::lane_id()) == 0 {
                let list_bytes = p.lossless.list_bytes;
                let bytes = K_PARTIALS * Self::tile_bytes(list_bytes);
                let from = p.lossless.tiles.at(Self::tile_at(wave.group(n_tile, q), n_tile, 0, list_bytes) as usize);
                ring.full().arrive_expect_tx(bytes);
                bulk::copy_to_shared_once(ring.stage_buffer(), from, bytes, ring.full());
            }
        }
    }
}

impl FragmentFormat for Lossless {
    type Chunk = ();
    const COSTLY: bool = true;
    const IN_PLACE: bool = true;

    #[device]
    unsafe fn load(
        p: &DecodeStep,
        (stage, _): (&Ring, u32),
        k_partial: u32,
        lane: u32,
        beside: impl FnMut(usize),
    ) -> WeightFragments {
        // SAFETY: the caller's word.
        unsafe {
            let [[a, b, c, d], [e, f, g, h]] = p.lossless.tile(stage, k_partial).unpack(&p.lossless, lane, beside);
            [a, b, c, d, e, f, g, h]
        }
    }

    #[device]
    unsafe fn scale(p: &DecodeStep, index: u32) -> f32 {
        // SAFETY: the caller's word.
        unsafe { p.lossless.scales.load_nc(index as usize) }
    }
}
