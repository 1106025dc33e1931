//! A tile of many pairs against a split of the keys: each warp weighs its own keys, and then adds the values of all
//! keys in its own dimensions.
//!
//! What the warps exchange is weights, an eighth of what their sums would take, and they meet once a tile. Sums are
//! those of [`reduce`](super::reduce), term by term.

use core::ops::Range;

use cuda_std::shared::{self, Shared};
use cuda_std::{math, mma, thread};

use super::warps::put_sum;
use super::{Attend, PAIRS, SoftmaxWeights, Tile, WARPS, weight};
use crate::kv::HEAD_DIM;

/// Tiles of eight dimensions of a warp.
pub(crate) const OWN_TILES: usize = (HEAD_DIM / 8 / WARPS) as usize;

/// The weights of a tile in shared memory, `[warp][half of its keys][lane]`, 16 bytes each; then `[pair][warp]` maxima,
/// and as many normalisers. Two of them take turns: while some warps still read one, others write the other.
#[derive(Clone, Copy)]
pub(crate) struct TileWeights(u32);

impl TileWeights {
    const WEIGHTS: u32 = WARPS * 2 * 32 * 16;
    const SCALES: u32 = WARPS * PAIRS * 4;
    /// Bytes of one.
    pub const BYTES: u32 = Self::WEIGHTS + 2 * Self::SCALES;

    /// Those of a tile with this number, of two that begin at byte `start`.
    #[inline(always)]
    pub const fn new(start: u32, tile: u32) -> Self {
        Self(start + tile % 2 * Self::BYTES)
    }

    #[inline(always)]
    unsafe fn scales(&self) -> Shared<f32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(self.0 + Self::WEIGHTS) }
    }

    /// Leaves what a warp weighs its keys by.
    #[inline(always)]
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

    /// What a warp begins to add, once all warps have left their weights.
    #[inline(always)]
    pub unsafe fn begin(self, tile: &Tile) -> DimSums {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, warp) = (thread::opaque(tile.lane), thread::opaque(tile.warp_id));
            let scales = self.scales();
            let tops = [0, 1].map(|half| {
                let of = scales.at(((lane / 4 + 8 * half) * WARPS) as usize);
                let (a, b) = (of.load16(0).map(f32::from_bits), of.load16(4).map(f32::from_bits));
                let max = |a: f32, b: f32| math::max(a, b);
                max(max(max(a[0], a[1]), max(a[2], a[3])), max(max(b[0], b[1]), max(b[2], b[3])))
            });
            DimSums {
                weights: self,
                lane,
                first: warp * OWN_TILES as u32,
                tops,
                norms: [0.0; 2],
                all: Default::default(),
            }
        }
    }
}

/// The sums of a tile's pairs in a warp's own dimensions.
pub(crate) struct DimSums {
    weights: TileWeights,
    lane: u32,
    /// The first of its tiles of eight dimensions.
    first: u32,
    tops: [f32; 2],
    norms: [f32; 2],
    all: [[f32; 4]; OWN_TILES],
}

impl DimSums {
    /// Adds the values of the keys of an even number of warps: first to last, once each. `sums(warp, weights, n)` gives
    /// those over a warp's keys of the eight dimensions from `8 n` on, as the tensor core leaves them.
    #[inline(always)]
    pub unsafe fn add(&mut self, warps: Range<u32>, sums: impl Fn(u32, &[[u32; 4]; 2], u32) -> [f32; 4]) {
        // SAFETY: the caller's word.
        unsafe {
            let scales = self.weights.scales();
            let of = [0, 1].map(|half| scales.at(((self.lane / 4 + 8 * half) * WARPS) as usize));
            let words = shared::dynamic::<u32>(self.weights.0);
            let mut warp = warps.start;
            while warp < warps.end {
                // Two at a time: with more, registers are short.
                thread::keep_rolled();
                unroll!(W < 2; {
                    let warp = warp + W as u32;
                    let mut factors = [0f32; 2];
                    unroll!(I < 2; {
                        let norm = of[I].load((WARPS * PAIRS + warp) as usize);
                        factors[I] = weight(of[I].load(warp as usize), self.tops[I]);
                        self.norms[I] = math::fma(norm, factors[I], self.norms[I]);
                    });
                    let weights = [0, 1].map(|half| words.load16((((warp * 2 + half) * 32 + self.lane) * 4) as usize));
                    unroll!(N < OWN_TILES of 2; {
                        let found = sums(warp, &weights, self.first + N as u32);
                        unroll!(E < 4; {
                            self.all[N][E] = math::fma(found[E], factors[E / 2], self.all[N][E]);
                        });
                    });
                });
                warp += 2;
            }
        }
    }

    /// Puts them where [`reduce`](super::reduce) does.
    #[inline(always)]
    pub unsafe fn put(
        &self,
        p: &Attend,
        tile: &Tile,
        position: impl Fn(u32) -> u32,
        put: impl Fn(usize, u32, u32),
        keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    ) {
        let (g, t) = (self.lane / 4, self.lane % 4);
        unroll!(I < 2; {
            let pair = g + 8 * I as u32;
            if pair < tile.pairs {
                unroll!(N < OWN_TILES of 2; {
                    let d = 8 * (self.first + N as u32) + 2 * t;
                    let sum = [self.all[N][2 * I], self.all[N][2 * I + 1]];
                    let scale = [self.tops[I], self.norms[I]];
                    // SAFETY: the caller's word.
                    unsafe { put_sum(p, tile, pair, d, (sum, scale), position(tile.row(pair)), &put, &keep) };
                });
            }
        });
    }
}

/// The sums of eight dimensions over a warp's keys, so weighed: `values` are those keys' in these dimensions.
#[inline(always)]
pub(crate) fn add_eight(weights: &[[u32; 4]; 2], values: [u32; 4]) -> [f32; 4] {
    let o = mma::m16n8k16_bf16([0.0; 4], weights[0], [values[0], values[1]]);
    mma::m16n8k16_bf16(o, weights[1], [values[2], values[3]])
}
