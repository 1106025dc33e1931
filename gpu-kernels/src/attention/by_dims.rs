//! A tile of many pairs against a split of the keys: each warp weighs its own keys, and then adds the values of all
//! keys in its own dimensions.
//!
//! What the warps exchange is weights, an eighth of what their sums would take, and they meet once a tile. Sums are
//! those of [`reduce`](super::reduce), term by term.

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

    /// Adds all keys' values in the warp's dimensions, once all warps have left their weights, and puts the sums where
    /// [`reduce`](super::reduce) does. `sums(warp, weights, n)` gives the sums over a warp's keys of the eight dimensions
    /// from `8 n` on, as the tensor core leaves them, of each of the first `warps`: an even number.
    #[inline(always)]
    pub unsafe fn add(
        &self,
        p: &Attend,
        tile: &Tile,
        warps: u32,
        position: impl Fn(u32) -> u32,
        sums: impl Fn(u32, &[[u32; 4]; 2], u32) -> [f32; 4],
        put: impl Fn(usize, u32, u32),
        keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, own) = (thread::opaque(tile.lane), thread::opaque(tile.warp_id) * OWN_TILES as u32);
            let (g, t) = (lane / 4, lane % 4);
            let scales = self.scales();
            let of = [0, 1].map(|half| scales.at(((g + 8 * half) * WARPS) as usize));
            let tops = of.map(|of| {
                let (a, b) = (of.load16(0).map(f32::from_bits), of.load16(4).map(f32::from_bits));
                let max = |a: f32, b: f32| math::max(a, b);
                max(max(max(a[0], a[1]), max(a[2], a[3])), max(max(b[0], b[1]), max(b[2], b[3])))
            });
            let words = shared::dynamic::<u32>(self.0);
            let (mut all, mut norms, mut warp) = ([[0f32; 4]; OWN_TILES], [0f32; 2], 0);
            while warp < warps {
                // Two at a time: with more, registers are short.
                thread::keep_rolled();
                unroll!(W < 2; {
                    let warp = warp + W as u32;
                    let mut factors = [0f32; 2];
                    unroll!(I < 2; {
                        factors[I] = weight(of[I].load(warp as usize), tops[I]);
                        norms[I] = math::fma(of[I].load((WARPS * PAIRS + warp) as usize), factors[I], norms[I]);
                    });
                    let weights = [0, 1].map(|half| words.load16((((warp * 2 + half) * 32 + lane) * 4) as usize));
                    unroll!(N < OWN_TILES of 2; {
                        let found = sums(warp, &weights, own + N as u32);
                        unroll!(E < 4; {
                            all[N][E] = math::fma(found[E], factors[E / 2], all[N][E]);
                        });
                    });
                });
                warp += 2;
            }
            unroll!(I < 2; {
                let pair = g + 8 * I as u32;
                if pair < tile.pairs {
                    unroll!(N < OWN_TILES of 2; {
                        let (d, sum) = (8 * (own + N as u32) + 2 * t, [all[N][2 * I], all[N][2 * I + 1]]);
                        put_sum(p, tile, pair, d, (sum, [tops[I], norms[I]]), position(tile.row(pair)), &put, &keep);
                    });
                }
            });
        }
    }
}

/// The sums of eight dimensions over a warp's keys, so weighed: `values` are those keys' in these dimensions.
#[inline(always)]
pub(crate) fn add_eight(weights: &[[u32; 4]; 2], values: [u32; 4]) -> [f32; 4] {
    let o = mma::m16n8k16_bf16([0.0; 4], weights[0], [values[0], values[1]]);
    mma::m16n8k16_bf16(o, weights[1], [values[2], values[3]])
}
