//! bf16 weights in some 11.2 bits, without loss.
//!
//! Of a weight's 16 bits the exponent's eight say little: the weights of a matrix are spread around zero, and nine in
//! ten of them have one of four exponents (Zhang et al., 2025, "70% Size, 100% Accuracy", make use of that with codes
//! of variable length). Here every weight has 11 bits: its lower byte (the exponent's last bit and the mantissa) as it
//! is, the sign, and two bits that say which of four neighbouring pairs of exponents it has. A weight with another
//! exponent is an *escape*: it stands in a list beside, and is put in its place when the others are unpacked. Lists
//! have room for as many as nearly every tile has; what is beyond that is in a list of the whole model.
//!
//! Which pairs of exponents there are depends on whether the first is even. So a matrix whose weights fit better that
//! way is stored doubled, and its sums are halved: both are exact.
//!
//! # Layout
//! A *tile* is what a warp unpacks at a time: the two [slices](crate::linear::SLICE) of a split-K partial in a chunk,
//! 2,048 weights. The tiles of 8 N-tiles that have a split-K partial in common lie together in a *region*; regions are
//! in the order of the plain stream's chunks of 8 N-tiles, four of each, one a split-K partial:
//!
//! ```text
//! region   [8 N-tiles] first slice [8 N-tiles] list [8 N-tiles] second slice
//! slice    low    [2][lane][16]  bytes   the weights' lower bytes, in the order of a lane's fragments
//!          codes  [3][lane]      words   code of weight j of fragment f < 3 in bits 4 j to 4 j + 2 of word f; the
//!                                        bits of those of fragment 3 in bits 4 j + 3: of word 0 the last bit, of word
//!                                        2 the first
//! list     [2]    words  see below
//!          [..]   u16    place among the slice's bytes: 10, sign: 1, the upper exponent bits' distance from `top`: 5
//! ```
//!
//! A code is the sign and by how much the upper seven bits of the exponent are above the slice's `base`. An escape that
//! is 31 below `top` has zeros there. A list's first two words, by bits:
//!
//! ```text
//! 0  escapes: 10    those of the first slice: 10    its base: 7              place in the model's list, upper bits: 5
//! 1  place in the model's list, lower bits: 18      second slice's base: 7   top: 7
//! ```

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod batched;
mod pack;

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, math, tensor, thread, warp};

pub use self::pack::{MOST_BEYOND, MOST_ESCAPES, Pack, Unpack, count_escapes, pack_weights, unpack_weights};
use super::{FragmentFormat, WeightFormat, WeightFragments};
use crate::decode::{DecodeStep, OfFragments};
use crate::linear::K_PARTIALS;
use crate::ring::Ring;
use crate::stream::{TOGETHER, Wave};

/// Weights of a tile.
pub const TILE_WEIGHTS: u32 = 2048;
/// Bytes of a slice of a tile: lower bytes, and codes.
pub const PACKED_SLICE: u32 = LOW_BYTES + 3 * 32 * 4;
/// Regions for each chunk of 8 N-tiles.
pub const REGIONS: u32 = K_PARTIALS;

const LOW_BYTES: u32 = 1024;
const TILE_BYTES: u32 = 2 * PACKED_SLICE;
/// Of a list, before its entries.
const HEADER_BYTES: u32 = 8;
/// What is further below `top` than that cannot be packed.
pub const FURTHEST: u32 = 30;
/// Lower bits of a place in the model's list.
const MORE_BITS: u32 = 18;
/// An escape with zeros in its exponent's upper bits.
const ZERO: u32 = 31;

/// Where the packed weights of a model are.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Lossless {
    /// All [regions](self#layout).
    pub regions: Global<u8>,
    /// Escapes beyond lists' room.
    pub more: Global<u16>,
    /// `[matrices]`: what a matrix's sums are multiplied with, 1 or, if it is stored doubled, 0.5.
    pub scales: Global<f32>,
    /// Bytes of a tile's list: a multiple of 16.
    pub list_bytes: u32,
}

impl Lossless {
    /// Bytes of a region with lists of so many bytes.
    #[must_use]
    #[inline(always)]
    pub const fn region_bytes(list_bytes: u32) -> u32 {
        TOGETHER * (TILE_BYTES + list_bytes)
    }

    /// The maps for the decode kernel: of the slices, and of the lists, of so many `regions` at `address`.
    #[cfg(not(target_arch = "nvptx64"))]
    #[must_use]
    pub fn maps(address: u64, regions: u64, list_bytes: u32) -> [tensor::Array; 2] {
        let (slice, list, n_tiles) = (u64::from(PACKED_SLICE), u64::from(list_bytes), u64::from(TOGETHER));
        let (second, region) = (n_tiles * (slice + list), Self::region_bytes(list_bytes).into());
        [
            tensor::Array {
                address,
                sizes: [slice / 8, n_tiles, 2, regions],
                strides: [slice, second, region],
                extent: [PACKED_SLICE / 8, 1, 2, K_PARTIALS],
            },
            tensor::Array {
                address: address + n_tiles * slice,
                sizes: [list / 8, n_tiles, 1, regions],
                strides: [list, n_tiles * list, region],
                extent: [list_bytes / 8, 1, 1, K_PARTIALS],
            },
        ]
    }

    /// Escapes for which a list of so many bytes has room.
    #[must_use]
    #[inline(always)]
    pub const fn room(list_bytes: u32) -> u32 {
        (list_bytes - HEADER_BYTES) / 2
    }
}

/// The bits of a word's bytes that are signs.
const SIGNS: u32 = 0x8080_8080;
/// Of each code the bit that is the fourth fragment's.
const FOURTH: u32 = 0x8888_8888;

/// The codes of a slice's four fragments, from its three words.
#[inline(always)]
fn codes(words: [u32; 3]) -> [u32; 4] {
    let one = words[1] & FOURTH | (words[0] >> 1) & !FOURTH;
    let two = words[2] & FOURTH | (one >> 1) & !FOURTH;
    [words[0], words[1], words[2], two >> 1]
}

/// Its inverse: three words of codes, each in the lower three bits of a nibble.
#[inline(always)]
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
    /// The fragments. Upper bytes pass through the place of the lower ones, so nobody else may read them. `beside` is
    /// called with the numbers from 0 to 7 in turn, as in [`FragmentFormat::load`].
    #[inline(always)]
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

    /// Puts the escapes in their places among the upper bytes; `own` is the one with the lane's number, if there is
    /// one.
    #[inline(always)]
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
            // Seldom; and a list may have less room than there are lanes.
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
#[inline(always)]
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
    #[inline(always)]
    unsafe fn tile(&self, stage: &Ring, k_partial: u32) -> Place<2> {
        // SAFETY: the caller's word.
        unsafe {
            let tile: Shared<u8> = shared::dynamic(stage.offset() + k_partial * TILE_BYTES);
            let list = shared::dynamic(stage.offset() + K_PARTIALS * TILE_BYTES + k_partial * self.list_bytes);
            Place { slices: [tile, tile.at(PACKED_SLICE as usize)], which: 0, list }
        }
    }
}

/// In a stage of the ring: the tiles of the four split-K partials, then their lists.
impl WeightFormat for Lossless {
    type Products = OfFragments;
    type Head = Self;
    const MAPS: usize = 2;

    #[inline(always)]
    unsafe fn fill(p: &DecodeStep, ring: &Ring, wave: &Wave, n_tile: u32, q: u32) {
        // SAFETY: the caller's word.
        unsafe {
            // Before something comes that would be released, all lanes have seen that there is room.
            warp::sync_warp();
            if thread::opaque(thread::lane_id()) == 0 {
                ring.full().arrive_expect_tx(K_PARTIALS * (TILE_BYTES + p.lossless.list_bytes));
                let at = [0, n_tile % TOGETHER, 0, wave.together(n_tile, q) * REGIONS];
                tensor::load_box_once(ring.stage_buffer(), p.maps, at, ring.full());
                let lists = ring.stage_buffer().at((K_PARTIALS * TILE_BYTES) as usize);
                tensor::load_box_once(lists, p.maps.at(1), at, ring.full());
            }
        }
    }
}

impl FragmentFormat for Lossless {
    const COSTLY: bool = true;
    const IN_PLACE: bool = true;

    #[inline(always)]
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

    #[inline(always)]
    unsafe fn scale(p: &DecodeStep, index: u32) -> f32 {
        // SAFETY: the caller's word.
        unsafe { p.lossless.scales.load_nc(index as usize) }
    }
}
