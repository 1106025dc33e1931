//! Attention of up to [`ALL_PAIRS`] pairs against a split of the keys, by `wgmma`, which Hopper alone has: keys and
//! values are read from shared memory where they came, once for all pairs.
//!
//! ```text
//! warpgroup w   S[64 pairs, 128 keys]  = Q · Kᵀ    of pages 2 w and 2 w + 1 of the split
//!               P = exp2(S − max), for each 32 keys a maximum; where the page's keys were, which nobody reads again
//! both meet
//! warpgroup w   O[64 pairs, 64 dims]  += P · V     of all keys, 32 at a time; dimensions from 64 w on
//! ```
//!
//! Windows of 32 keys are what a warp of [`attend`](crate::attention::attend) has, and are added as it adds them: term
//! by term the sums are those of [`DimSums`](crate::attention::DimSums).
//!
//! It has kernels of its own, for contexts where that is worth it: in one kernel with the other way it takes registers
//! from GEMMs. The device alone knows which a step wants, so both are launched.

use cuda_std::shared::{self, Shared};
use cuda_std::tensor::swizzled;
use cuda_std::wgmma::{self, Columns, Operand};
use cuda_std::{bulk, kernel, math, mma, thread, warp};

use super::attention::{QUERY, QUERY_BYTES};
use super::consumer::{Consumer, sync};
use super::producer::Share;
use super::{CHAIN, DecodeStep, SCRATCH, SCRATCH_BYTES, THREADS, WIDE, decode};
use crate::attention::{
    ALL_PAIRS, Attend, Divisor, PAIRS, SPLIT, SoftmaxWeights, Tile, WARP_KEYS, weigh_windows, weight,
};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::ring::Ring;
use crate::weights::{Lossless, Plain};

/// Windows of a split.
const WINDOWS: u32 = SPLIT / WARP_KEYS;
/// Windows of a page.
const OF_PAGE: u32 = PAGE_TOKENS / WARP_KEYS;
/// Bytes of half a head's dimensions.
const ROW_BYTES: u32 = HEAD_DIM;
/// Where half of all queries, or of a page, ends.
const HALF_BYTES: u32 = ALL_PAIRS * ROW_BYTES;
/// `[pair][window]` maxima, and then normalisers.
const SCALES: u32 = ALL_PAIRS * WINDOWS * 4;
// Queries lie as the keys of a page do.
const _: () = assert!(2 * HALF_BYTES == QUERY_BYTES && ALL_PAIRS * QUERY == QUERY_BYTES && ALL_PAIRS == PAGE_TOKENS);
// Two places: one warpgroup may be a share ahead.
const _: () = assert!(QUERY_BYTES + 2 * 2 * SCALES <= SCRATCH_BYTES);

/// [`decode_16`](super::decode_16), of long contexts.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_wide(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        wgmma::declare();
        decode::<Plain, 2, CHAIN, WIDE>(&p);
    }
}

/// [`decode_16_wide`], of packed weights.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn decode_16_wide_lossless(p: DecodeStep) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        wgmma::declare();
        decode::<Lossless, 2, CHAIN, WIDE>(&p);
    }
}

/// Scores of the 64 keys of a stage, in the first or second half of the upper accumulators: begun, and closed as a
/// group.
#[inline(always)]
unsafe fn begin_scores<const SECOND: bool>(queries: Operand, keys: Operand) {
    // SAFETY: the caller's word.
    unsafe {
        unroll!(I < 8; {
            // Four steps of 16 dimensions in each half.
            let at = (I / 4) as u32 * HALF_BYTES + (I % 4) as u32 * 32;
            wgmma::mma_n64::<SECOND>(queries.advance(at), keys.advance(at), I != 0);
        });
        wgmma::commit();
    }
}

/// A window's weighted values, likewise: begun, and closed as a group.
#[inline(always)]
unsafe fn begin_values<const SECOND: bool>((weights, values): (Operand, Columns)) {
    // SAFETY: the caller's word.
    unsafe {
        unroll!(I < 2; {
            let i = I as u32;
            wgmma::mma_n64_columns::<SECOND>(weights.advance(i * 32), values.advance(i * 16 * ROW_BYTES), I != 0);
        });
        wgmma::commit();
    }
}

/// The scores of a warpgroup's windows of a page, as [`weigh_windows`] takes them.
macro_rules! scores {
    ($page:expr) => {{
        let mut s = [[[0f32; 4]; 4]; 2];
        unroll!(W < 2; {
            unroll!(J < 4; {
                s[W][J] = [
                    wgmma::get::<{ 64 + 32 * $page + 16 * W + 4 * J }>(),
                    wgmma::get::<{ 65 + 32 * $page + 16 * W + 4 * J }>(),
                    wgmma::get::<{ 66 + 32 * $page + 16 * W + 4 * J }>(),
                    wgmma::get::<{ 67 + 32 * $page + 16 * W + 4 * J }>(),
                ];
            });
        });
        s
    }};
}

/// A lane's sums: two pairs, dimensions `8 j + 2 t` and one on of its warpgroup's.
type Sums = [[f32; 4]; 8];

/// Adds a window's sums, of the first or second half of the upper accumulators.
macro_rules! add_window {
    ($sums:ident, $second:literal, $factors:expr) => {{
        let factors: [f32; 2] = $factors;
        unroll!(J < 8; {
            let found = [
                wgmma::get::<{ 64 + 32 * $second + 4 * J }>(),
                wgmma::get::<{ 65 + 32 * $second + 4 * J }>(),
                wgmma::get::<{ 66 + 32 * $second + 4 * J }>(),
                wgmma::get::<{ 67 + 32 * $second + 4 * J }>(),
            ];
            unroll!(E < 4; {
                $sums[J][E] = math::fma(found[E], factors[E / 2], $sums[J][E]);
            });
        });
    }};
}

/// Maxima and normalisers of all pairs' windows, in one of two places.
#[derive(Clone, Copy)]
struct Scales {
    at: u32,
    /// The first of a lane's two pairs, which are eight apart.
    pair: u32,
}

/// What a lane's two pairs' windows are multiplied by, their largest maxima, and their normalisers.
struct Factors {
    windows: [[f32; 2]; WINDOWS as usize],
    tops: [f32; 2],
    norms: [f32; 2],
}

impl Scales {
    #[inline(always)]
    unsafe fn of(self, i: usize) -> Shared<f32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic::<f32>(self.at + (self.pair + 8 * i as u32) * WINDOWS * 4) }
    }

    #[inline(always)]
    unsafe fn leave(self, window: u32, weights: &SoftmaxWeights) {
        unroll!(I < 2; {
            // SAFETY: the caller's word.
            unsafe {
                let to = self.of(I).at(window as usize);
                to.store(0, weights.top[I]);
                to.store((SCALES / 4) as usize, weights.norm[I]);
            }
        });
    }

    /// A window's maximum and normaliser count for nothing where it has no keys.
    #[inline(always)]
    unsafe fn factors(self) -> Factors {
        let mut found = Factors { windows: [[0.0; 2]; WINDOWS as usize], tops: [0.0; 2], norms: [0.0; 2] };
        unroll!(I < 2; {
            // SAFETY: the caller's word.
            let [tops, norms] = unsafe {
                let (of, norms) = (self.of(I), self.of(I).at((SCALES / 4) as usize));
                [[of.load16(0), of.load16(4)], [norms.load16(0), norms.load16(4)]]
            };
            let mut top = f32::NEG_INFINITY;
            unroll!(W < 8; {
                top = math::max(top, f32::from_bits(tops[W / 4][W % 4]));
            });
            unroll!(W < 8; {
                let factor = weight(f32::from_bits(tops[W / 4][W % 4]), top);
                found.norms[I] = math::fma(f32::from_bits(norms[W / 4][W % 4]), factor, found.norms[I]);
                found.windows[W][I] = factor;
            });
            found.tops[I] = top;
        });
        found
    }
}

impl<const ROWS: u8> Consumer<'_, ROWS> {
    /// All pairs of the step against a share's keys and values in the ring's next stages, of which nothing is
    /// released. The queries are in place. `turn` counts such shares.
    #[inline(always)]
    pub unsafe fn attend_all(&self, attend: &Attend, share: &Share, group: Divisor, turn: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let &Share { kv_head, split, pages, .. } = share;
            let lane = thread::opaque(thread::lane_id());
            // From a shuffle, so that descriptors are made of uniform registers.
            let warp_id = warp::shuffle_idx(thread::opaque(thread::warp_id()), 0);
            let (half, of_half) = (warp_id / 4, warp_id % 4);
            let tile = Tile { kv_head, split, group, first_row: 0, pairs: self.count * group.value, lane, warp_id };
            let pair = of_half * PAIRS + lane / 4;
            let scales = Scales { at: SCRATCH + QUERY_BYTES + turn % 2 * (2 * SCALES), pair };
            let ring = self.ring.agreed();
            self.weigh_all(attend, &tile, ring, pages, half, scales);
            // A lane a page: looking takes its time.
            if lane < pages {
                ring.ahead(pages + lane).wait_full();
            }
            warp::sync_warp();
            bulk::fence_proxy_async();
            sync();
            let factors = scales.factors();
            let sums = add_all(ring, pages, half, &factors);
            let position = self.slots();
            unroll!(I < 2; {
                let pair = pair + 8 * I as u32;
                if pair < tile.pairs {
                    let (position, place) = (position(tile.row(pair)), tile.place(attend, pair));
                    let dimension = |j: usize| half * (HEAD_DIM / 2) + 8 * j as u32 + 2 * (lane % 4);
                    if position / SPLIT < split {
                        // The row has no keys here; a later one has.
                    } else if position < SPLIT {
                        let norm = factors.norms[I];
                        unroll!(J < 8; {
                            let word = math::pack_bf16(sums[J][2 * I] / norm, sums[J][2 * I + 1] / norm);
                            attend.put::<false>(place, dimension(J), word);
                        });
                    } else {
                        let scale = [factors.tops[I], factors.norms[I]];
                        unroll!(J < 8; {
                            attend.keep(split, place, dimension(J), [sums[J][2 * I], sums[J][2 * I + 1]], scale);
                        });
                    }
                }
            });
        }
    }

    /// What all pairs weigh the keys of two pages by, to where these keys were.
    #[inline(always)]
    unsafe fn weigh_all(&self, attend: &Attend, tile: &Tile, ring: Ring, pages: u32, half: u32, scales: Scales) {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, pair) = (tile.lane, scales.pair);
            // Of a page that is not there another, whose keys are masked, and whose content nobody writes.
            let first = 2 * half;
            let page = |i: u32| ring.ahead(if first + i < pages { first + i } else { pages });
            let stages = [page(0), page(1)];
            stages[0].wait_full();
            stages[1].wait_full();
            let queries = Operand::at(shared::dynamic::<u8>(SCRATCH));
            wgmma::fence();
            begin_scores::<false>(queries, Operand::at(stages[0].stage_buffer()));
            begin_scores::<true>(queries, Operand::at(stages[1].stage_buffer()));
            let position = self.slots();
            let last = [pair, pair + 8].map(|pair| tile.last_key(pair, &position));
            // Most splits end before the step's first row.
            let last = ((tile.split + 1) * SPLIT > self.first_position() + 1).then_some(last);
            unroll!(P < 2; {
                if P == 0 {
                    wgmma::wait::<1>();
                } else {
                    wgmma::wait::<0>();
                }
                let page = first + P as u32;
                let first_key = tile.split * SPLIT + page * PAGE_TOKENS;
                let scores = scores!(P);
                let weights = if last.is_none() {
                    weigh_windows::<2, 2>(attend, first_key, lane, None, scores)
                } else {
                    weigh_windows::<2, 2>(attend, first_key, lane, last, scores)
                };
                // As `stmatrix` takes it: eight rows of eight keys, eight rows further, and eight keys.
                let row = pair / PAIRS * PAIRS + lane % 16;
                unroll!(W < 2; {
                    if lane.is_multiple_of(4) {
                        scales.leave(page * OF_PAGE + W as u32, &weights[W]);
                    }
                    if page < pages {
                        let to = stages[P].stage_buffer();
                        unroll!(H < 2; {
                            let at = row * ROW_BYTES + W as u32 * (WARP_KEYS * 2) + H as u32 * 32 + lane / 16 * 16;
                            mma::stmatrix_x4(to.at(swizzled(at) as usize), weights[W].words[H]);
                        });
                    }
                });
            });
        }
    }
}

/// Where a window's weights and values are, for a warpgroup's half of the dimensions.
#[inline(always)]
unsafe fn operands(ring: Ring, pages: u32, half: u32, page: u32, window: u32) -> (Operand, Columns) {
    // SAFETY: the caller's word.
    unsafe {
        let weights = Operand::at(ring.ahead(page).stage_buffer());
        let values = ring.ahead(pages + page).stage_buffer().at((half * HALF_BYTES) as usize);
        let values = Columns::at(values, HALF_BYTES);
        (weights.advance(window * WARP_KEYS * 2), values.advance(window * WARP_KEYS * ROW_BYTES))
    }
}

/// All keys' values, so weighed, in half of the dimensions.
#[inline(always)]
unsafe fn add_all(ring: Ring, pages: u32, half: u32, factors: &Factors) -> Sums {
    let mut sums = [[0f32; 4]; 8];
    // SAFETY: the caller's word.
    unsafe {
        if pages == SPLIT / PAGE_TOKENS {
            // One window's values are added while those of the next are multiplied.
            let operands = |window: u32| operands(ring, 4, half, window / OF_PAGE, window % OF_PAGE);
            wgmma::fence();
            begin_values::<false>(operands(0));
            begin_values::<true>(operands(1));
            unroll!(P < 4; {
                wgmma::wait::<1>();
                add_window!(sums, 0, factors.windows[2 * P]);
                if P < 3 {
                    wgmma::fence();
                    begin_values::<false>(operands(2 * P as u32 + 2));
                    wgmma::wait::<1>();
                } else {
                    wgmma::wait::<0>();
                }
                add_window!(sums, 1, factors.windows[2 * P + 1]);
                if P < 3 {
                    wgmma::fence();
                    begin_values::<true>(operands(2 * P as u32 + 3));
                }
            });
            return sums;
        }
        unroll!(P < 3; {
            if (P as u32) < pages {
                wgmma::fence();
                begin_values::<false>(operands(ring, pages, half, P as u32, 0));
                begin_values::<true>(operands(ring, pages, half, P as u32, 1));
                wgmma::wait::<1>();
                add_window!(sums, 0, factors.windows[2 * P]);
                wgmma::wait::<0>();
                add_window!(sums, 1, factors.windows[2 * P + 1]);
            }
        });
    }
    sums
}
