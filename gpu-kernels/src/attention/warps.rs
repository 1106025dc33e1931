//! Adds what a CTA's warps found in one split, by way of shared memory.
//!
//! # Safety
//! `p` is a launch's parameter block, as that says it is, and the tile is of its rows, of at least one pair. The 8
//! warps of the tile, numbers 0 to 7, call these functions whole and together, with the same tile but for their lane
//! and number, since they synchronise at `barrier`, which nobody else uses meanwhile. From byte `scratch` of dynamic
//! shared memory on, a multiple of 16, they have room for [`Attend::SHARED_BYTES`], which nobody else touches from the
//! first warp's call to the last one's return. `put` and `keep` may be called for every pair of the tile, of each two
//! dimensions by one lane.

use cuda_std::shared::{self, Shared};
use cuda_std::{device, math, thread, warp};

use super::{Attend, DIM_TILES, PAIRS, SPLIT, Tile, WARPS, WarpAttention, weight};
use crate::kv::HEAD_DIM;

/// Pairs whose sums are combined in shared memory at a time.
pub(crate) const QUARTER: u32 = PAIRS / 4;
/// Words from one pair's sums to the next: eight more than they take, so that a warp's stores have no bank conflicts.
pub(super) const PAIR_STRIDE: u32 = HEAD_DIM + 8;

/// The 8 warps that work on a tile synchronise; a CTA may have other warps with other work, and barriers of theirs.
#[device]
pub(super) fn sync(barrier: u32) {
    thread::sync_named(barrier, WARPS * 32);
}

/// Adds what the CTA's warps found, first to last. For rows that end in the first split this is the result, which `put`
/// takes; for others it is the split's part, which `keep` takes. `position(row)` is a row's position.
///
/// `put(pair, d, word)` takes the results of dimensions `d` and `d + 1` of a pair, numbered among all rows' heads, as
/// bf16. `keep(pair, place, d, sum, scale)` takes a split's sums in these dimensions, with its maximum and normaliser,
/// of a pair of the tile; `place` is the pair's number among all rows' heads. Shared memory from `scratch` on is free
/// again when `reduce` returns.
#[device]
pub(crate) unsafe fn reduce(
    p: &Attend,
    tile: &Tile,
    found: &WarpAttention,
    position: impl Fn(u32) -> u32,
    put: impl Fn(usize, u32, u32),
    keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    (scratch, barrier): (u32, u32),
) {
    // SAFETY: the caller's word.
    unsafe {
        // Opaque to the compiler, so that it does not keep addresses in registers over a loop around this.
        let (lane, warp_id) = (thread::opaque(tile.lane), thread::opaque(tile.warp_id));
        let (g, t) = (lane / 4, lane % 4);
        let sums = shared::dynamic::<f32>(scratch);
        // `[pair][warp]` maxima, and then as many normalisers. Once all are there, each maximum is replaced by the
        // warp's factor, and a pair's first two normalisers by the pair's maximum and normaliser.
        let tops = sums.at((WARPS * QUARTER * PAIR_STRIDE) as usize);
        let norms = tops.at((WARPS * PAIRS) as usize);
        if t == 0 {
            unroll!(I < 2; {
                let at = ((g + 8 * I as u32) * WARPS + warp_id) as usize;
                tops.store(at, found.top[I]);
                norms.store(at, found.norm[I]);
            });
        }
        sync(barrier);
        // Eight lanes a pair.
        let thread = warp_id * 32 + lane;
        if warp_id < PAIRS * WARPS / 32 {
            let (own, part) = (tops.load(thread as usize), norms.load(thread as usize));
            let mut top = own;
            unroll!(M < 3; {
                top = math::max(top, warp::shuffle_xor(top, 1 << M));
            });
            let factor = weight(own, top);
            let mut norm = 0f32;
            let mut other = lane / WARPS * WARPS;
            let end = other + WARPS;
            while other < end {
                unroll!(W < 4; {
                    let other = other + W as u32;
                    norm = math::fma(warp::shuffle_idx(part, other), warp::shuffle_idx(factor, other), norm);
                });
                // Not unrolled further: that would take registers from the sums.
                other = thread::opaque(other) + 4;
            }
            tops.store(thread as usize, factor);
            if lane % WARPS < 2 {
                norms.store(thread as usize, if lane % WARPS == 0 { top } else { norm });
            }
        }
        unroll!(R < 4; {
            let first = R as u32 * QUARTER;
            if first < tile.pairs {
                if g / QUARTER == R as u32 % 2 {
                    let to = sums.at(((warp_id * QUARTER + g % QUARTER) * PAIR_STRIDE + 2 * t) as usize).cast();
                    unroll!(N < DIM_TILES of 16; {
                        to.store(N * 4, [found.o[N][R / 2 * 2], found.o[N][R / 2 * 2 + 1]]);
                    });
                }
                sync(barrier);
                // 64 threads a pair, each with two dimensions.
                let (quarter, d) = (thread / 64, 2 * (thread % 64));
                let pair = first + quarter;
                if pair < tile.pairs {
                    let mut sum = [0f32; 2];
                    let from = sums.at((quarter * PAIR_STRIDE + d) as usize).cast::<[f32; 2]>();
                    unroll!(W < 8; {
                        let factor = tops.load((pair * WARPS) as usize + W);
                        let o = from.load(W * (QUARTER * PAIR_STRIDE / 2) as usize);
                        sum = [math::fma(o[0], factor, sum[0]), math::fma(o[1], factor, sum[1])];
                    });
                    let (top, norm) = (norms.load((pair * WARPS) as usize), norms.load((pair * WARPS) as usize + 1));
                    put_sum(p, tile, pair, d, (sum, [top, norm]), position(tile.row(pair)), &put, &keep);
                }
                sync(barrier);
            }
        });
    }
}

/// [`reduce`] of a tile of at most [`QUARTER`] pairs, with the same bits. The warps synchronise only once, so shared
/// memory from `scratch` on is free again after they have synchronised once more.
///
/// # Safety
/// The tile has at most [`QUARTER`] pairs. The 8 warps synchronise once more before anyone writes to the shared memory
/// again.
#[device]
pub(crate) unsafe fn reduce_few(
    p: &Attend,
    tile: &Tile,
    found: &WarpAttention,
    position: impl Fn(u32) -> u32,
    put: impl Fn(usize, u32, u32),
    keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    (scratch, barrier): (u32, u32),
) {
    // SAFETY: the caller's word.
    unsafe {
        let few = Few::new(thread::opaque(tile.lane), thread::opaque(tile.warp_id), scratch);
        few.leave_scale(found.top[0], found.norm[0]);
        if few.holds() {
            unroll!(N < DIM_TILES of 16; {
                few.leave(N, found.o[N]);
            });
        }
        sync(barrier);
        few.add(p, tile, position, put, keep);
    }
}

/// What the warps of a tile of at most [`QUARTER`] pairs found, in shared memory.
#[derive(Clone, Copy)]
struct Few {
    lane: u32,
    warp_id: u32,
    scratch: u32,
}

impl Few {
    /// For a lane, from byte `scratch` on.
    #[device]
    const fn new(lane: u32, warp_id: u32, scratch: u32) -> Self {
        Self { lane, warp_id, scratch }
    }

    /// Whether the lane has results of a pair. It is computed anew each time: if the compiler knew the answer on both
    /// sides of a barrier, it might write the barrier twice.
    #[device]
    fn holds(&self) -> bool {
        thread::opaque(self.lane) / 4 < QUARTER
    }

    #[device]
    unsafe fn sums(&self) -> Shared<f32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(self.scratch) }
    }

    /// `[pair][warp]` maxima; normalisers follow.
    #[device]
    unsafe fn tops(&self) -> Shared<f32> {
        // SAFETY: the caller's word.
        unsafe { self.sums().at((WARPS * QUARTER * PAIR_STRIDE) as usize) }
    }

    /// Leaves the maximum and the normaliser of the lane's pair.
    #[device]
    unsafe fn leave_scale(&self, top: f32, norm: f32) {
        if self.holds() && self.lane.is_multiple_of(4) {
            // SAFETY: the caller's word.
            unsafe {
                let at = (self.lane / 4 * WARPS + self.warp_id) as usize;
                self.tops().store(at, top);
                self.tops().store((WARPS * QUARTER) as usize + at, norm);
            }
        }
    }

    /// A lane that [holds](Self::holds) something leaves its weighted sums of dimensions `8n + 2t` and the next.
    ///
    /// # Safety
    /// The lane [holds](Self::holds) something. `n` is below 16.
    #[device]
    unsafe fn leave(&self, n: usize, o: [f32; 4]) {
        let (g, t) = (self.lane / 4, self.lane % 4);
        // SAFETY: the caller's word.
        unsafe {
            let to = self.sums().at(((self.warp_id * QUARTER + g) * PAIR_STRIDE + 2 * t) as usize).cast();
            to.store(n * 4, [o[0], o[1]]);
        }
    }

    /// Adds what all warps left, and puts it where [`reduce`] does: 64 threads a pair, each with two dimensions; each
    /// finds the warps' factors for itself.
    ///
    /// # Safety
    /// All 8 warps have left what they found, and synchronised.
    #[device]
    unsafe fn add(
        &self,
        p: &Attend,
        tile: &Tile,
        position: impl Fn(u32) -> u32,
        put: impl Fn(usize, u32, u32),
        keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    ) {
        let thread = thread::opaque(self.warp_id) * 32 + thread::opaque(self.lane);
        let (pair, d) = (thread / 64, 2 * (thread % 64));
        if pair < tile.pairs {
            // SAFETY: the caller's word.
            unsafe {
                let (tops, at) = (self.tops(), (pair * WARPS) as usize);
                let norms = tops.at((WARPS * QUARTER) as usize);
                let (own, parts) = ([tops.load16(at), tops.load16(at + 4)], [norms.load16(at), norms.load16(at + 4)]);
                let (mut top, mut norm, mut sum) = (f32::NEG_INFINITY, 0f32, [0f32; 2]);
                unroll!(W < 8; {
                    top = math::max(top, f32::from_bits(own[W / 4][W % 4]));
                });
                let from = self.sums().at((pair * PAIR_STRIDE + d) as usize).cast::<[f32; 2]>();
                unroll!(W < 8; {
                    let factor = weight(f32::from_bits(own[W / 4][W % 4]), top);
                    let o = from.load(W * (QUARTER * PAIR_STRIDE / 2) as usize);
                    norm = math::fma(f32::from_bits(parts[W / 4][W % 4]), factor, norm);
                    sum = [math::fma(o[0], factor, sum[0]), math::fma(o[1], factor, sum[1])];
                });
                put_sum(p, tile, pair, d, (sum, [top, norm]), position(tile.row(pair)), &put, &keep);
            }
        }
    }
}

/// Puts dimensions `d` and `d + 1` of what a pair found in the split, with its maximum and normaliser. The pair's row
/// is at `position`. If the row ends in the first split, this is the result; otherwise it is a part to
/// [`keep`](reduce).
///
/// # Safety
/// The pair is one of the tile's. The lane alone has these dimensions, of the sum over all warps.
#[device]
#[expect(clippy::too_many_arguments, reason = "a part of two functions")]
pub(super) unsafe fn put_sum(
    p: &Attend,
    tile: &Tile,
    pair: u32,
    d: u32,
    (sum, scale): ([f32; 2], [f32; 2]),
    position: u32,
    put: impl Fn(usize, u32, u32),
    keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
) {
    let place = tile.place(p, pair);
    if position / SPLIT < tile.split {
        // The row has no keys here; a later one of the tile has.
    } else if position < SPLIT {
        put(place, d, math::pack_bf16(sum[0] / scale[1], sum[1] / scale[1]));
    } else {
        keep(pair, place, d, sum, scale);
    }
}
