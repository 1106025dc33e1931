//! Packing a matrix of the plain stream, and unpacking it into one.
//!
//! # Safety
//! `p` is a launch's parameter block, and the grid is as that says. A whole warp calls what is unsafe here, for an
//! N-tile and a split-K partial that nobody else takes.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, shared, thread, warp};

use super::{FURTHEST, HEADER_BYTES, LOW_BYTES, Lossless, MORE_BITS, PACKED_SLICE, Place, ZERO, code_words};
use crate::linear::K_PARTIALS;
use crate::stream::{CHUNK_BYTES, GROUP_N_TILES, SLICE_BYTES, SLICES_APART, STEP_BYTES, core_word};

/// A lane's part of a tile of the plain stream: `[fragment][register]`.
#[derive(Clone, Copy)]
struct Tile {
    words: [[u32; 4]; 8],
    /// Whether it can be packed at all.
    fits: bool,
}

/// Which values of a slice's upper exponent bits have codes: four from `base` on. The others are escapes.
#[derive(Clone, Copy)]
struct Window {
    base: u32,
    /// The largest value of an escape.
    top: u32,
    /// The least value of an escape that is not zero.
    least: u32,
    /// How many escapes there are.
    escapes: u32,
}

/// The upper seven bits of the exponent of each of a word's two weights.
#[device]
fn uppers(word: u32) -> [u32; 2] {
    [word >> 8 & 0x7f, word >> 24 & 0x7f]
}

/// A word's two weights doubled, and whether both doubled weights are finite.
#[device]
fn doubled(word: u32) -> (u32, bool) {
    let one = |bits: u32| {
        let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
        // A subnormal number is doubled as an integer.
        (sign | if rest < 0x80 { rest << 1 } else { rest + 0x80 }, rest < 0x7f00)
    };
    let ((low, low_fits), (high, high_fits)) = (one(word & 0xffff), one(word >> 16));
    (low | high << 16, low_fits && high_fits)
}

/// The inverse of [`doubled`].
#[device]
fn halved(word: u32) -> u32 {
    let one = |bits: u32| {
        let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
        sign | if rest < 0x100 { rest >> 1 } else { rest - 0x80 }
    };
    one(word & 0xffff) | one(word >> 16) << 16
}

impl Tile {
    /// Loads the tile of a split-K partial, of the N-tile with this number among those that lie together.
    ///
    /// # Safety
    /// All lanes of the warp call it. The stream has the chunk of 8 N-tiles, and nobody writes it during the launch;
    /// `k_partial` is below [`K_PARTIALS`], `n_tile` below [`GROUP_N_TILES`].
    #[device]
    unsafe fn load(stream: Global<bf16>, group: u32, k_partial: u32, n_tile: u32, lane: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let from = stream.cast::<u8>().at(group as usize * (GROUP_N_TILES * CHUNK_BYTES) as usize);
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

    /// The tile with doubled weights.
    #[device]
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
    #[device]
    fn windows(&self) -> [Window; 2] {
        let [a, b, c, d, e, f, g, h] = self.words;
        [Window::of([a, b, c, d]), Window::of([e, f, g, h])]
    }

    /// How many escapes there are, or [`MOST_ESCAPES`] if the tile cannot be packed.
    #[device]
    fn escapes(&self, windows: &[Window; 2]) -> u32 {
        let (top, least) = (windows[0].top.max(windows[1].top), windows[0].least.min(windows[1].least));
        let fits = warp::all(self.fits) && top <= least + FURTHEST;
        if fits { (windows[0].escapes + windows[1].escapes).min(MOST_ESCAPES) } else { MOST_ESCAPES }
    }
}

impl Window {
    /// The window with the fewest escapes, of those that end at a slice's largest exponent or a little below. A warp
    /// finds it together.
    #[device]
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
        let largest = warp::max(largest);
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
                best = Self { base, top: warp::max(top), least: 0x7f - warp::max(0x7f - least), escapes };
            }
            tried += 1;
        }
        best
    }
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
    /// `[2][2]`: for the matrix as it is, and for it doubled, how many escapes there are, and how many tiles cannot be
    /// packed. `count_escapes` adds to these numbers.
    pub counts: GlobalMut<u32>,
    /// Where the packed matrix goes; zeros before. Only `pack_weights` uses this and what follows, up to `list_bytes`.
    pub tiles: GlobalMut<u8>,
    /// Where escapes go for which tiles' lists have no room.
    pub more: GlobalMut<u16>,
    /// `[2]`: how many escapes came to `more`, or would have if it had room; and how many tiles were not packed because
    /// they cannot be.
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
    /// Whether the matrix is stored doubled: if then fewer tiles cannot be packed, or equally many and there are fewer
    /// escapes.
    ///
    /// # Safety
    /// [`count_escapes`] has counted, in a launch before.
    #[device]
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
        let group = p.first + thread::block_idx_y();
        let mut tile = Tile::load(p.stream, group, thread::block_idx_x(), thread::warp_id(), lane);
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
        let group = p.first + thread::block_idx_y();
        let doubles = p.doubles();
        if [n_tile, lane, group, k_partial] == [0; 4] {
            p.scale.store(0, if doubles { 0.5 } else { 1.0 });
        }
        let tile = Tile::load(p.stream, group, k_partial, n_tile, lane);
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
        let place = p.tiles.at(Lossless::tile_at(group, n_tile, k_partial, p.list_bytes) as usize);
        let list = place.at(PACKED_SLICE as usize).cast::<u16>();
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
            let slice = place.at(S * (PACKED_SLICE + p.list_bytes) as usize);
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
                        // The last sum is not read.
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
/// N-tile; dynamic shared memory: eight times [`Lossless::tile_bytes`].
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

/// Unpacks weights into plain ones.
#[kernel(threads = 256)]
pub unsafe fn unpack_weights(p: Unpack) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (lane, n_tile, k_partial) = (thread::lane_id(), thread::warp_id(), thread::block_idx_x());
        let group = thread::block_idx_y();
        let list_bytes = p.weights.list_bytes;
        let mut matrix = p.matrix;
        unroll!(I < 3; {
            matrix += u32::from(group >= p.bounds[I]);
        });
        let doubled = p.weights.scales.load_nc(matrix as usize) != 1.0;
        let from = Lossless::tile_at(p.first + group, n_tile, k_partial, list_bytes);
        let from = p.weights.tiles.at(from as usize);
        let bytes = Lossless::tile_bytes(list_bytes);
        let own = n_tile * bytes;
        let mut byte = lane * 16;
        while byte < bytes {
            shared::dynamic::<u32>(own + byte).store16(0, from.at(byte as usize).cast::<u32>().load16_nc(0));
            byte += 32 * 16;
        }
        warp::sync_warp();
        let slices = [0, PACKED_SLICE + list_bytes].map(|slice| shared::dynamic(own + slice));
        let place = Place { slices, which: 0, list: shared::dynamic(own + PACKED_SLICE) };
        let weights: [[[u32; 4]; 4]; 2] = place.unpack(&p.weights, lane, |_| {});
        let to = p.stream.cast::<u8>().at(group as usize * (GROUP_N_TILES * CHUNK_BYTES) as usize);
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
