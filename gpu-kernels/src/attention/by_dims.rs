//! Attention of tiles of many pairs against a split of the keys. Each warp computes the softmax weights of its own
//! keys, and then adds the values of all keys in its own dimensions.
//!
//! So the warps exchange weights, an eighth of the bytes of their sums. Up to two tiles are taken at a time: each key
//! and value is read from shared memory once for both, and one tile's products fill the other's latencies. The sums are
//! those of [`reduce`](super::reduce), term by term.
//!
//! # Safety
//! The 8 warps of a CTA, numbers 0 to 7, call these functions, whole and for the same tiles of the same launch; `p` is
//! its parameter block, as that says it is. A place of weights is [`TileWeights::BYTES`] of dynamic shared memory at a
//! multiple of 16. All 8 warps leave their weights and synchronise before one reads any, and all are done with reading
//! when a place is written again.

use core::ops::Range;

use cuda_std::shared::{self, Shared};
use cuda_std::{device, math, mma, thread};

use super::warps::put_sum;
use super::{Attend, PAIRS, SoftmaxWeights, Tile, WARPS, weight};
use crate::kv::HEAD_DIM;

/// Tiles of eight dimensions of a warp.
pub(crate) const OWN_TILES: usize = (HEAD_DIM / 8 / WARPS) as usize;

/// The weights of a tile in shared memory, `[warp][half of its keys][lane]`, 16 bytes each; then `[pair][warp]` maxima,
/// and as many normalisers.
#[derive(Clone, Copy)]
pub(crate) struct TileWeights(u32);

impl TileWeights {
    const WEIGHTS: u32 = WARPS * 2 * 32 * 16;
    const SCALES: u32 = WARPS * PAIRS * 4;
    /// Bytes of a tile's weights.
    pub const BYTES: u32 = Self::WEIGHTS + 2 * Self::SCALES;

    /// The weights at byte `start` of dynamic shared memory.
    #[device]
    pub const fn at(start: u32) -> Self {
        Self(start)
    }

    #[device]
    unsafe fn scales(&self) -> Shared<f32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(self.0 + Self::WEIGHTS) }
    }

    /// Leaves a warp's weights for its own keys.
    ///
    /// # Safety
    /// Nobody reads the place any more, or yet. `weights` are this warp's.
    #[device]
    pub unsafe fn leave(&self, tile: &Tile, weights: &SoftmaxWeights) {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, warp) = (tile.lane, tile.warp_id);
            let words = shared::dynamic::<u32>(self.0);
            unroll!(H < 2; {
                words.store16((((warp * 2 + H as u32) * 32 + lane) * 4) as usize, weights.words[H]);
            });
            if lane.is_multiple_of(4) {
                let scales = self.scales();
                unroll!(I < 2; {
                    let at = ((lane / 4 + 8 * I as u32) * WARPS + warp) as usize;
                    scales.store(at, weights.top[I]);
                    scales.store((WARPS * PAIRS) as usize + at, weights.norm[I]);
                });
            }
        }
    }
}

/// What a lane needs to add the values of one warp's keys, for each tile.
#[derive(Clone, Copy)]
struct Window<const N: usize> {
    weights: [[[u32; 4]; 2]; N],
    tops: [[f32; 2]; N],
    norms: [[f32; 2]; N],
}

/// The sums of `N` tiles' pairs, two at most, in a warp's own dimensions.
pub(crate) struct DimSums<const N: usize> {
    weights: [TileWeights; N],
    lane: u32,
    /// The first of the warp's tiles of eight dimensions.
    first: u32,
    tops: [[f32; 2]; N],
    norms: [[f32; 2]; N],
    all: [[[f32; 4]; OWN_TILES]; N],
}

impl<const N: usize> DimSums<N> {
    /// Sums of no keys for warp `warp`, and the largest maximum of each pair. All warps have left their weights.
    ///
    /// # Safety
    /// All 8 warps have left the weights of all tiles, and synchronised.
    #[device]
    pub unsafe fn new(weights: [TileWeights; N], lane: u32, warp: u32) -> Self {
        let (lane, warp) = (thread::opaque(lane), thread::opaque(warp));
        let mut tops = [[0f32; 2]; N];
        unroll!(T < N of 2; {
            unroll!(I < 2; {
                // SAFETY: the caller's word.
                let [a, b] = unsafe {
                    let of = weights[T].scales().at(((lane / 4 + 8 * I as u32) * WARPS) as usize);
                    [of.load16(0), of.load16(4)].map(|words| words.map(f32::from_bits))
                };
                let max = |a: f32, b: f32| math::max(a, b);
                tops[T][I] = max(max(max(a[0], a[1]), max(a[2], a[3])), max(max(b[0], b[1]), max(b[2], b[3])));
            });
        });
        let first = warp * OWN_TILES as u32;
        Self { weights, lane, first, tops, norms: [[0.0; 2]; N], all: [[[0.0; 4]; OWN_TILES]; N] }
    }

    /// Loads what the values of a warp's keys are added with: the tiles' weights, and their maxima and normalisers.
    ///
    /// # Safety
    /// `warp` is below 8.
    #[device]
    unsafe fn load(&self, warp: u32) -> Window<N> {
        let mut window = Window { weights: [[[0; 4]; 2]; N], tops: [[0.0; 2]; N], norms: [[0.0; 2]; N] };
        // SAFETY: the caller's word.
        unsafe {
            unroll!(T < N of 2; {
                let words = shared::dynamic::<u32>(self.weights[T].0);
                let word = |half: u32| (((warp * 2 + half) * 32 + self.lane) * 4) as usize;
                window.weights[T] = [0, 1].map(|half| words.load16(word(half)));
                unroll!(I < 2; {
                    let of = self.weights[T].scales().at(((self.lane / 4 + 8 * I as u32) * WARPS + warp) as usize);
                    window.tops[T][I] = of.load(0);
                    window.norms[T][I] = of.load((WARPS * PAIRS) as usize);
                });
            });
        }
        window
    }

    /// The factors of the sums over a warp's keys. It also adds the warp's normalisers.
    #[device]
    fn factors(&mut self, window: &Window<N>) -> [[f32; 2]; N] {
        let mut factors = [[0f32; 2]; N];
        unroll!(T < N of 2; {
            unroll!(I < 2; {
                factors[T][I] = weight(window.tops[T][I], self.tops[T][I]);
                self.norms[T][I] = math::fma(window.norms[T][I], factors[T][I], self.norms[T][I]);
            });
        });
        factors
    }

    /// Adds the weighted values of the keys of the first `warps` warps, an even number, first to last. `values(warp,
    /// n)` gives the values of a warp's keys in the eight dimensions from `8 n` on.
    ///
    /// # Safety
    /// `warps` is even, and at most 8. What `values` reads is there.
    #[device]
    pub unsafe fn add(&mut self, warps: u32, values: impl Fn(u32, u32) -> [u32; 4]) {
        let mut warp = 0;
        while warp < warps {
            // Two warps' keys at a time: with more, registers are short.
            thread::keep_rolled();
            unroll!(W < 2; {
                let warp = warp + W as u32;
                // SAFETY: the caller's word.
                let window = unsafe { self.load(warp) };
                let factors = self.factors(&window);
                unroll!(D < OWN_TILES of 2; {
                    let values = values(warp, self.first + D as u32);
                    unroll!(T < N of 2; {
                        self.add_found(T, D, factors[T], add_eight(&window.weights[T], values));
                    });
                });
            });
            warp += 2;
        }
    }

    /// Adds a warp's sums of eight dimensions to a tile's.
    #[device]
    fn add_found(&mut self, tile: usize, d: usize, factors: [f32; 2], found: [f32; 4]) {
        unroll!(E < 4; {
            let all = &mut self.all[tile][d][E];
            *all = math::fma(found[E], factors[E / 2], *all);
        });
    }

    /// Adds the weighted values of the keys of further warps, which differ between a tile's rows. `sums(warp, tile,
    /// weights, n)` gives the sums over a warp's keys of the dimensions from `8 n` on, as the tensor core leaves them.
    ///
    /// # Safety
    /// The warps are among the 8, and behind those of [`add`](Self::add). What `sums` reads is there.
    #[device]
    pub unsafe fn add_apart(
        &mut self,
        warps: Range<u32>,
        sums: impl Fn(u32, usize, &[[u32; 4]; 2], u32) -> [[f32; 4]; OWN_TILES],
    ) {
        let mut warp = warps.start;
        while warp < warps.end {
            thread::keep_rolled();
            // SAFETY: the caller's word.
            let window = unsafe { self.load(warp) };
            let factors = self.factors(&window);
            unroll!(T < N of 2; {
                let found = sums(warp, T, &window.weights[T], self.first);
                unroll!(D < OWN_TILES of 2; {
                    self.add_found(T, D, factors[T], found[D]);
                });
            });
            warp += 1;
        }
    }

    /// Puts the sums where [`reduce`](super::reduce) does.
    ///
    /// # Safety
    /// The tiles are those whose weights were added, all of them.
    #[device]
    pub unsafe fn put(
        &self,
        p: &Attend,
        tiles: &[Tile; N],
        position: impl Fn(u32) -> u32,
        put: impl Fn(usize, u32, u32),
        keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    ) {
        let (g, t) = (self.lane / 4, self.lane % 4);
        unroll!(T < N of 2; {
            let tile = &tiles[T];
            unroll!(I < 2; {
                let pair = g + 8 * I as u32;
                if pair < tile.pairs {
                    unroll!(D < OWN_TILES of 2; {
                        let d = 8 * (self.first + D as u32) + 2 * t;
                        let sum = [self.all[T][D][2 * I], self.all[T][D][2 * I + 1]];
                        let scale = [self.tops[T][I], self.norms[T][I]];
                        // SAFETY: the caller's word.
                        unsafe { put_sum(p, tile, pair, d, (sum, scale), position(tile.row(pair)), &put, &keep) };
                    });
                }
            });
        });
    }
}

/// The weighted sums of eight dimensions over a warp's keys. `values` are the keys' values in these dimensions.
#[device]
pub(crate) fn add_eight(weights: &[[u32; 4]; 2], values: [u32; 4]) -> [f32; 4] {
    let o = mma::m16n8k16_bf16([0.0; 4], weights[0], [values[0], values[1]]);
    mma::m16n8k16_bf16(o, weights[1], [values[2], values[3]])
}
