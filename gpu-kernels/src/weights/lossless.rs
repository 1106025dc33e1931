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

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, kernel, math, tensor, thread, warp};

use super::{FragmentFormat, WeightFormat, WeightFragments};
use crate::decode::{DecodeStep, OfFragments};
use crate::linear::K_PARTIALS;
use crate::ring::Ring;
use crate::stream::{CHUNK_BYTES, SLICE_BYTES, SLICES_APART, STEP_BYTES, TOGETHER, Wave, core_word};

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
            // Before something comes that would be given back, all lanes have seen that there is room.
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

/// A tile of the plain stream, a lane's part of it: `[fragment][register]`.
#[derive(Clone, Copy)]
struct Tile {
    words: [[u32; 4]; 8],
    /// Whether it can be packed at all.
    fits: bool,
}

/// Which upper exponent bits have codes, of a slice, and which have none.
#[derive(Clone, Copy)]
struct Window {
    base: u32,
    /// The largest of an escape.
    top: u32,
    /// The least of an escape that is not zero.
    least: u32,
    /// How many escapes there are.
    escapes: u32,
}

/// The upper seven bits of the exponent of each of a word's two weights.
#[inline(always)]
fn uppers(word: u32) -> [u32; 2] {
    [word >> 8 & 0x7f, word >> 24 & 0x7f]
}

/// Twice a word's two weights, and whether that can be had.
#[inline(always)]
fn doubled(word: u32) -> (u32, bool) {
    let one = |bits: u32| {
        let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
        // What has no leading one is doubled as a number.
        (sign | if rest < 0x80 { rest << 1 } else { rest + 0x80 }, rest < 0x7f00)
    };
    let ((low, low_fits), (high, high_fits)) = (one(word & 0xffff), one(word >> 16));
    (low | high << 16, low_fits && high_fits)
}

/// The inverse of [`doubled`].
#[inline(always)]
fn halved(word: u32) -> u32 {
    let one = |bits: u32| {
        let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
        sign | if rest < 0x100 { rest >> 1 } else { rest - 0x80 }
    };
    one(word & 0xffff) | one(word >> 16) << 16
}

impl Tile {
    /// The tile of an N-tile of those that lie together, of a split-K partial.
    #[inline(always)]
    unsafe fn load(stream: Global<bf16>, together: u32, k_partial: u32, n_tile: u32, lane: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let from = stream.cast::<u8>().at(together as usize * (TOGETHER * CHUNK_BYTES) as usize);
            let mut tile = Self { words: [[0; 4]; 8], fits: true };
            unroll!(F < 8; {
                let slice = k_partial + F as u32 / 4 * K_PARTIALS;
                let from = from.at((slice * SLICES_APART + n_tile * SLICE_BYTES + F as u32 % 4 * STEP_BYTES) as usize);
                unroll!(R < 4; {
                    tile.words[F][R] = from.cast::<u32>().load_nc((core_word(R as u32) + lane) as usize);
                });
            });
            tile
        }
    }

    /// The same doubled.
    #[inline(always)]
    fn doubled(mut self) -> Self {
        unroll!(F < 8; {
            unroll!(R < 4; {
                let (twice, fits) = doubled(self.words[F][R]);
                self.words[F][R] = twice;
                self.fits &= fits;
            });
        });
        self
    }

    /// The two slices' windows.
    #[inline(always)]
    fn windows(&self) -> [Window; 2] {
        let [a, b, c, d, e, f, g, h] = self.words;
        [Window::of([a, b, c, d]), Window::of([e, f, g, h])]
    }

    /// How many escapes there are, or [`MOST_ESCAPES`] if the tile cannot be packed.
    #[inline(always)]
    fn escapes(&self, windows: &[Window; 2]) -> u32 {
        let (top, least) = (windows[0].top.max(windows[1].top), windows[0].least.min(windows[1].least));
        let fits = warp::all(self.fits) && top <= least + FURTHEST;
        if fits { (windows[0].escapes + windows[1].escapes).min(MOST_ESCAPES) } else { MOST_ESCAPES }
    }
}

impl Window {
    /// Of the windows below a slice's largest exponent the one with the fewest escapes. A warp finds it together.
    #[inline(always)]
    fn of(slice: [[u32; 4]; 4]) -> Self {
        /// How many are tried.
        const TRIED: u32 = 8;
        let mut largest = 0;
        unroll!(F < 4; {
            unroll!(R < 4; {
                let [a, b] = uppers(slice[F][R]);
                largest = largest.max(a).max(b);
            });
        });
        let largest = max_of_warp(largest);
        let mut best = Self { base: 0, top: 0, least: 0, escapes: u32::MAX };
        let mut tried = 0;
        while tried < TRIED {
            let base = largest.saturating_sub(3 + tried);
            let (mut escapes, mut top, mut least) = (0, 0, 0x7f);
            unroll!(F < 4; {
                unroll!(R < 4; {
                    unroll!(E < 2; {
                        let upper = uppers(slice[F][R])[E];
                        if upper.wrapping_sub(base) > 3 {
                            escapes += 1;
                            top = top.max(upper);
                            if upper != 0 {
                                least = least.min(upper);
                            }
                        }
                    });
                });
            });
            unroll!(M < 5; {
                escapes += warp::shuffle_xor(escapes, 16 >> M);
            });
            if escapes < best.escapes {
                best = Self { base, top: max_of_warp(top), least: 0x7f - max_of_warp(0x7f - least), escapes };
            }
            tried += 1;
        }
        best
    }
}

#[inline(always)]
fn max_of_warp(mut x: u32) -> u32 {
    unroll!(M < 5; {
        x = x.max(warp::shuffle_xor(x, 16 >> M));
    });
    x
}

/// A tile that cannot be packed counts as having so many escapes: one that can has fewer.
pub const MOST_ESCAPES: u32 = 1 << 10;
/// Most escapes beyond lists' room.
pub const MOST_BEYOND: u64 = 1 << (MORE_BITS + 5);

/// Parameters of [`count_escapes`] and [`pack_weights`]. Grid: (4 split-K partials, chunks of 8 N-tiles); a warp for
/// each N-tile.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Pack {
    /// A matrix, as [`lay_out`](crate::stream::lay_out) left it.
    pub stream: Global<bf16>,
    /// `[2][2]`: of the matrix as it is, and doubled, how many escapes there are, and how many tiles cannot be packed;
    /// `count_escapes` adds to them.
    pub counts: GlobalMut<u32>,
    /// Where the matrix goes, zeros; `pack_weights` alone, as all that follows.
    pub regions: GlobalMut<u8>,
    /// Where escapes beyond lists' room go.
    pub more: GlobalMut<u16>,
    /// `[2]`: how many came there, or would have; and how many tiles were not packed because they cannot be.
    pub notes: GlobalMut<u32>,
    /// What the matrix's sums are multiplied with.
    pub scale: GlobalMut<f32>,
    /// How many escapes have room in `more`.
    pub more_room: u32,
    /// Bytes of a tile's list: a multiple of 16.
    pub list_bytes: u32,
    /// The first of the matrix's chunks of 8 N-tiles.
    pub first: u32,
}

impl Pack {
    /// Whether the matrix is stored doubled: where fewer tiles cannot be packed, or they have fewer escapes.
    #[inline(always)]
    unsafe fn doubles(&self) -> bool {
        // SAFETY: the caller's word.
        unsafe {
            let [escapes, unfit, of_doubled, unfit_doubled] = [0, 1, 2, 3].map(|i| self.counts.read().load(i));
            unfit_doubled < unfit || unfit_doubled == unfit && of_doubled < escapes
        }
    }
}

/// Counts the escapes of tiles as they are, and doubled.
#[kernel(threads = 256)]
pub unsafe fn count_escapes(p: Pack) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let lane = thread::lane_id();
        let together = p.first + thread::block_idx_y();
        let mut tile = Tile::load(p.stream, together, thread::block_idx_x(), thread::warp_id(), lane);
        let mut doubled = 0;
        loop {
            let escapes = tile.escapes(&tile.windows());
            if lane == 0 {
                let (place, count) = if escapes < MOST_ESCAPES { (0, escapes) } else { (1, 1) };
                atomic::fetch_add(p.counts, 2 * doubled + place, count, Ordering::Relaxed, Scope::Device);
            }
            if doubled == 1 {
                return;
            }
            tile = tile.doubled();
            doubled = 1;
        }
    }
}

/// Packs tiles, doubled if that is better for the matrix by what was counted.
#[kernel(threads = 256)]
pub unsafe fn pack_weights(p: Pack) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (lane, n_tile, k_partial) = (thread::lane_id(), thread::warp_id(), thread::block_idx_x());
        let together = p.first + thread::block_idx_y();
        let doubles = p.doubles();
        if [n_tile, lane, together, k_partial] == [0; 4] {
            p.scale.store(0, if doubles { 0.5 } else { 1.0 });
        }
        let tile = Tile::load(p.stream, together, k_partial, n_tile, lane);
        let tile = if doubles { tile.doubled() } else { tile };
        let windows = tile.windows();
        if tile.escapes(&windows) == MOST_ESCAPES {
            if lane == 0 {
                atomic::fetch_add(p.notes, 1, 1, Ordering::Relaxed, Scope::Device);
            }
            return;
        }
        let count = windows[0].escapes + windows[1].escapes;
        let top = windows[0].top.max(windows[1].top);
        let region =
            (together as usize * REGIONS as usize + k_partial as usize) * Lossless::region_bytes(p.list_bytes) as usize;
        let region = p.regions.at(region);
        let list = region.at((TOGETHER * PACKED_SLICE + n_tile * p.list_bytes) as usize).cast::<u16>();
        let room = Lossless::room(p.list_bytes);
        let mut more = 0;
        if count > room {
            if lane == 0 {
                more = atomic::fetch_add(p.notes, 0, count - room, Ordering::Relaxed, Scope::Device);
            }
            more = warp::shuffle_idx(more, 0);
        }
        let mut escapes = 0;
        unroll!(S < 2; {
            let second = S as u32 * TOGETHER * (PACKED_SLICE + p.list_bytes);
            let slice = region.at((second + n_tile * PACKED_SLICE) as usize);
            let mut slice_codes = [0u32; 4];
            unroll!(F < 4; {
                let words = tile.words[4 * S + F];
                unroll!(H < 2; {
                    let low = math::permute(words[2 * H], words[2 * H + 1], 0x6420);
                    let high = math::permute(words[2 * H], words[2 * H + 1], 0x7531);
                    let at = F as u32 / 2 * 512 + lane * 16 + (F as u32 % 2 * 2 + H as u32) * 4;
                    slice.at(at as usize).cast::<u32>().store(0, low);
                    unroll!(B < 4; {
                        let byte = high >> (8 * B as u32) & 0xff;
                        let above = (byte & 0x7f).wrapping_sub(windows[S].base);
                        let escapes_here = above > 3;
                        let code = byte >> 7 << 2 | if escapes_here { 0 } else { above };
                        slice_codes[F] |= code << (4 * (4 * H + B) as u32);
                        let all = warp::ballot(escapes_here);
                        if escapes_here {
                            let i = escapes + math::popc(all & !(!0 << lane));
                            let upper = byte & 0x7f;
                            let below = if upper == 0 { ZERO } else { top - upper };
                            let entry = ((at + B as u32) | (byte >> 7 << 10) | (below << 11)) as u16;
                            if i < room {
                                list.store((HEADER_BYTES / 2 + i) as usize, entry);
                            } else if more + i - room < p.more_room {
                                p.more.store((more + i - room) as usize, entry);
                            }
                        }
                        // Of the last ones nobody asks.
                        #[allow(unused_assignments)]
                        {
                            escapes += math::popc(all);
                        }
                    });
                });
            });
            let words = code_words(slice_codes);
            unroll!(C < 3; {
                slice.at(LOW_BYTES as usize).cast::<u32>().store(C * 32 + lane as usize, words[C]);
            });
        });
        if lane == 0 {
            let (high, low) = (more >> MORE_BITS, more & ((1 << MORE_BITS) - 1));
            list.cast::<u32>().store(0, count | windows[0].escapes << 10 | windows[0].base << 20 | high << 27);
            list.cast::<u32>().store(1, low | windows[1].base << MORE_BITS | top << 25);
        }
    }
}

/// Parameters of [`unpack_weights`]. Grid: (4 split-K partials, chunks of 8 N-tiles of a layer); a warp for each
/// N-tile; dynamic shared memory: [`Lossless::region_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Unpack {
    /// The packed weights.
    pub weights: Lossless,
    /// Where a layer's matrices go, one after another, as [`lay_out`](crate::stream::lay_out) would leave them.
    pub stream: GlobalMut<bf16>,
    /// The chunk of 8 N-tiles of all weights at which the layer begins.
    pub first: u32,
    /// The number of its first matrix.
    pub matrix: u32,
    /// The chunks of the layer at which its second, third and fourth matrix begin.
    pub bounds: [u32; 3],
}

/// Makes plain weights of packed ones.
#[kernel(threads = 256)]
pub unsafe fn unpack_weights(p: Unpack) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (lane, n_tile, k_partial) = (thread::lane_id(), thread::warp_id(), thread::block_idx_x());
        let together = thread::block_idx_y();
        let list_bytes = p.weights.list_bytes;
        let mut matrix = p.matrix;
        unroll!(I < 3; {
            matrix += u32::from(together >= p.bounds[I]);
        });
        let doubled = p.weights.scales.load_nc(matrix as usize) != 1.0;
        let region = (p.first + together) as usize * REGIONS as usize + k_partial as usize;
        let region = p.weights.regions.at(region * Lossless::region_bytes(list_bytes) as usize);
        // Each warp has the places of its own tile, where that lies in the region.
        let second = TOGETHER * (PACKED_SLICE + list_bytes);
        let list = TOGETHER * PACKED_SLICE + n_tile * list_bytes;
        let slices = [0, second].map(|slice| slice + n_tile * PACKED_SLICE);
        for (at, bytes) in [(slices[0], PACKED_SLICE), (slices[1], PACKED_SLICE), (list, list_bytes)] {
            let mut byte = at + lane * 16;
            while byte < at + bytes {
                shared::dynamic::<u32>(byte).store16(0, region.at(byte as usize).cast::<u32>().load16_nc(0));
                byte += 32 * 16;
            }
        }
        warp::sync_warp();
        let place = Place { slices: slices.map(|at| shared::dynamic(at)), which: 0, list: shared::dynamic(list) };
        let weights: [[[u32; 4]; 4]; 2] = place.unpack(&p.weights, lane, |_| {});
        let to = p.stream.cast::<u8>().at(together as usize * (TOGETHER * CHUNK_BYTES) as usize);
        unroll!(S < 2; {
            let slice = k_partial + S as u32 * K_PARTIALS;
            let to = to.at((slice * SLICES_APART + n_tile * SLICE_BYTES) as usize).cast::<u32>();
            unroll!(F < 4; {
                unroll!(R < 4; {
                    let word = F as u32 * STEP_BYTES / 4 + core_word(R as u32) + lane;
                    let weights = weights[S][F][R];
                    to.store(word as usize, if doubled { halved(weights) } else { weights });
                });
            });
        });
    }
}
