//! Attention of up to [`ALL_PAIRS`] pairs against a split of the keys, by `wgmma`, which only Hopper has. Keys and
//! values are read in the stages where they came, once for all pairs.
//!
//! ```text
//! warpgroup w   S[64 pairs, 128 keys]  = Q · Kᵀ    of pages 2 w and 2 w + 1 of the split
//!               P = exp2(S − max), a maximum for each 32 keys; stored over the page's keys, which are no longer read
//! both synchronise
//! warpgroup w   O[64 pairs, 64 dims]  += P · V     of all keys, 32 at a time; dimensions from 64 w on
//! ```
//!
//! A window of 32 keys is what a warp of [`attend`](crate::attention::attend) has. Windows are added in the same order
//! as there: term by term the sums are those of [`DimSums`](crate::attention::DimSums).
//!
//! It has kernels of its own, for contexts where it pays: in one kernel with attention by `mma` it would take registers
//! from GEMMs. Only the device knows which kernel a step is for, so both are launched.
//!
//! # Safety
//! As for other [attention](super::attention). All lanes of the consumers' two warpgroups call what is unsafe here, in
//! the same order: a whole warpgroup runs each product. Operands are complete in shared memory. What stores wrote there
//! was fenced, and all have synchronised since. Nobody writes or releases operands before the product was waited for.

use cuda_std::shared::{self, Shared};
use cuda_std::tensor::swizzled;
use cuda_std::wgmma::{self, Columns, Operand};
use cuda_std::{bulk, device, math, mma, thread, warp};

use super::attention::{LAYOUT, QUERY, QUERY_BYTES};
use super::consumer::{Consumer, sync};
use super::producer::Share;
use super::tree::{PairRows, RowScores};
use super::{CHAIN, DecodeStep, SCRATCH, SCRATCH_BYTES, THREADS, TREE, WGMMA, decode};
use crate::attention::{
    ALL_PAIRS, Attend, Divisor, PAIRS, SPLIT, SoftmaxWeights, Tile, WARP_KEYS, weigh_windows, weight,
};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::ring::Ring;
use crate::weights::{Lossless, Plain, WeightFormat};

/// Windows of a split.
const WINDOWS: u32 = SPLIT / WARP_KEYS;
/// Windows of a page.
const OF_PAGE: u32 = PAGE_TOKENS / WARP_KEYS;
/// Bytes of a row: half of a head's dimensions.
const ROW_BYTES: u32 = HEAD_DIM;
/// Bytes of one half of the dimensions, of all queries or of a page's keys or values.
const HALF_BYTES: u32 = ALL_PAIRS * ROW_BYTES;
/// Bytes of the `[pair][window]` maxima; as many bytes of normalisers follow.
const SCALES: u32 = ALL_PAIRS * WINDOWS * 4;
// Queries lie as the keys of a page do.
const _: () = assert!(2 * HALF_BYTES == QUERY_BYTES && ALL_PAIRS * QUERY == QUERY_BYTES && ALL_PAIRS == PAGE_TOKENS);
// There are two places for maxima and normalisers, since one warpgroup may be a share ahead.
const _: () = assert!(QUERY_BYTES + 2 * 2 * SCALES <= SCRATCH_BYTES);

/// Runs a step in a long context.
#[device]
unsafe fn decode_long<F: WeightFormat, const ROWS: u8>(p: &DecodeStep) {
    wgmma::declare();
    // SAFETY: the caller's word.
    unsafe { decode::<F, 2, ROWS, WGMMA>(p) }
}

entry_points! {
    (threads = THREADS, min_blocks = 1) of DecodeStep:

    /// [`decode_16`](super::decode_16), for long contexts.
    decode_16_wgmma: decode_long::<Plain, CHAIN>;
    /// [`decode_16_wgmma`], of packed weights.
    decode_16_wgmma_lossless: decode_long::<Lossless, CHAIN>;
    /// [`decode_tree`](super::decode_tree), for long contexts.
    decode_tree_wgmma: decode_long::<Plain, TREE>;
    /// [`decode_tree_wgmma`], of packed weights.
    decode_tree_wgmma_lossless: decode_long::<Lossless, TREE>;
}

/// Begins the products for the scores of a stage's 64 keys, in the first or second half of the upper accumulators, and
/// closes them as a group.
///
/// # Safety
/// All lanes of a warpgroup call it, behind [`fence`](wgmma::fence), and nobody reads or writes this half of the
/// accumulators before they wait.
#[device]
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

/// Begins the products for a window's weighted values, in the first or second half of the upper accumulators, and
/// closes them as a group.
///
/// # Safety
/// As for [`begin_scores`].
#[device]
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

/// Reads the scores of the two windows of a warpgroup's page from the accumulators, as [`weigh_windows`] takes them.
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

/// A lane's sums for two pairs: in entry `j` of dimensions `8 j + 2 t` and the next, in its warpgroup's half.
type Sums = [[f32; 4]; 8];

/// Regroups sums as `[16 dimensions][pair]` four neighbouring dimensions, so that these are stored at once. Of two
/// neighbouring lanes, the even one gets four of the first eight dimensions, and the odd one four of the others. All
/// lanes of a warp call it together.
#[device]
fn in_fours(sums: Sums, lane: u32) -> [[[f32; 4]; 2]; 4] {
    // By bits: of a condition the compiler may make a branch, and lanes that diverge have to be gathered for each
    // shuffle.
    let of_upper = thread::opaque(0u32.wrapping_sub(lane % 2));
    let choose = |lower: u32, upper: u32| lower & !of_upper | upper & of_upper;
    let mut fours = [[[0f32; 4]; 2]; 4];
    unroll!(C < 4; {
        unroll!(I < 2; {
            unroll!(E < 2; {
                let (lower, upper) = (sums[2 * C][2 * I + E].to_bits(), sums[2 * C + 1][2 * I + E].to_bits());
                let other = warp::shuffle_xor(choose(upper, lower), 1);
                fours[C][I][E] = f32::from_bits(choose(lower, other));
                fours[C][I][2 + E] = f32::from_bits(choose(other, upper));
            });
        });
    });
    fours
}

/// Adds a window's sums, times their factors, from the first or second half of the upper accumulators.
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

/// For a lane's two pairs: what the sums of each window are multiplied by, the largest maxima, and the normalisers.
struct Factors {
    windows: [[f32; 2]; WINDOWS as usize],
    tops: [f32; 2],
    norms: [f32; 2],
}

impl Scales {
    /// Where the maxima of the lane's `i`-th pair are; the normalisers are [`SCALES`] bytes on.
    ///
    /// # Safety
    /// `i` is below 2, and `at` one of the two places in scratch memory.
    #[device]
    unsafe fn of(self, i: usize) -> Shared<f32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic::<f32>(self.at + (self.pair + 8 * i as u32) * WINDOWS * 4) }
    }

    /// Leaves a window's maxima and normalisers.
    ///
    /// # Safety
    /// One lane of the four that have the pairs calls it, for a window of the split. Nobody reads this place any more.
    #[device]
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

    /// The factors of all windows, the largest maxima and the normalisers. A window without keys counts for nothing.
    ///
    /// # Safety
    /// All windows of the lane's pairs were left, and all consumers have synchronised since.
    #[device]
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

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// Attention of all pairs of the step against a share's keys and values in the ring's next stages, which it
    /// releases. The queries are in place. `turn` counts such shares.
    ///
    /// # Safety
    /// All consumers call it. The step has at most [`ALL_PAIRS`] pairs; their queries, and the keys and values that the
    /// step adds to the split, are in place and fenced, and all have synchronised since. `turn` grows by one from share
    /// to share.
    #[device]
    pub unsafe fn attend_all(&mut self, attend: &Attend, share: &Share, group: Divisor, turn: u32) {
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
            let (rows, mut of_rows) = (PairRows::of(&tile, of_half * PAIRS), [[0f32; 4]; 2]);
            let has_paths = ROWS == TREE && self.has_paths(split);
            if has_paths {
                let queries = |j: usize| {
                    let chunk = |m: u32| LAYOUT.chunk(of_half * PAIRS + lane % 16, 4 * j as u32 + 2 * m + lane / 16);
                    [0, 1].map(|m| mma::ldmatrix_x4(shared::dynamic::<u8>(SCRATCH + chunk(m))))
                };
                of_rows = self.score_rows((split, pages), lane, queries);
                // Weights will overwrite keys.
                sync();
            }
            self.weigh_all(attend, &tile, (ring, pages), scales, (&rows, of_rows), has_paths);
            // Every lane waits for all pages: lanes that waited for one page each would have to be gathered again,
            // which takes longer.
            ring.ahead(pages).wait_full_few(pages);
            bulk::fence_proxy_async();
            sync();
            let mut factors = scales.factors();
            if ROWS == TREE {
                // Windows in which rows have values of their own are left to `add_all_paths`.
                let apart = self.apart(split);
                unroll!(W < 8; {
                    if W as u32 >= apart {
                        factors.windows[W] = [0.0; 2];
                    }
                });
            }
            let mut sums = add_all(ring, pages, half, &factors);
            if has_paths {
                // Made anew: kept over the products, they would take registers from these.
                let tile = Tile { split: thread::opaque(split), pairs: thread::opaque(tile.pairs), ..tile };
                let scales = Scales { at: SCRATCH + QUERY_BYTES + thread::opaque(turn) % 2 * (2 * SCALES), pair };
                self.add_all_paths(&tile, (pages, half), scales, factors.tops, &mut sums);
                // Ordinary loads have read the stages, which TMA fills next.
                bulk::fence_proxy_async();
            }
            self.release_seen(2 * pages, lane);
            let position = self.slots();
            let sums = in_fours(sums, lane);
            unroll!(I < 2; {
                let pair = pair + 8 * I as u32;
                if pair < tile.pairs {
                    let (row, place) = (tile.row(pair), tile.place(attend, pair));
                    let (position, head) = (position(row), place as u32 - row * attend.q_heads);
                    let first = half * (HEAD_DIM / 2) + lane % 2 * 8 + lane % 4 / 2 * 4;
                    if position / SPLIT < split {
                        // The row has no keys here; a later one has.
                    } else if position < SPLIT {
                        let norm = factors.norms[I];
                        unroll!(C < 4; {
                            unroll!(H < 2; {
                                let [a, b] = [sums[C][I][2 * H] / norm, sums[C][I][2 * H + 1] / norm];
                                let d = first + 16 * C as u32 + 2 * H as u32;
                                self.put_pair(row, head, d, math::pack_bf16(a, b));
                            });
                        });
                    } else {
                        let scale = [factors.tops[I], factors.norms[I]];
                        unroll!(C < 4; {
                            attend.keep_four(split, place, first + 16 * C as u32, sums[C][I], scale);
                        });
                    }
                }
            });
        }
    }

    /// Makes the weights of all pairs for the keys of this warpgroup's two pages, and leaves them where these keys
    /// were.
    ///
    /// # Safety
    /// All consumers call it. With `has_paths` all have scored the rows' keys, and have synchronised since: weights
    /// overwrite keys.
    #[device]
    unsafe fn weigh_all(
        &self,
        attend: &Attend,
        tile: &Tile,
        (ring, pages): (Ring, u32),
        scales: Scales,
        (rows, of_rows): (&PairRows, RowScores),
        has_paths: bool,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, pair) = (tile.lane, scales.pair);
            // A page that does not exist is replaced by another stage, whose scores are masked, and which nobody
            // overwrites.
            let first = tile.warp_id / 4 * 2;
            let page = |i: u32| ring.ahead(if first + i < pages { first + i } else { pages });
            let stages = [page(0), page(1)];
            stages[0].wait_full_beside(&stages[1]);
            let queries = Operand::at(shared::dynamic::<u8>(SCRATCH));
            wgmma::fence();
            begin_scores::<false>(queries, Operand::at(stages[0].stage_buffer()));
            begin_scores::<true>(queries, Operand::at(stages[1].stage_buffer()));
            let slot = self.slots();
            let position = |row: u32| if ROWS == TREE { self.depth_position(row) } else { slot(row) };
            let last = [pair, pair + 8].map(|pair| tile.last_key(pair, position));
            unroll!(P < 2; {
                if P == 0 {
                    wgmma::wait::<1>();
                } else {
                    wgmma::wait::<0>();
                }
                let page = first + P as u32;
                let first_key = tile.split * SPLIT + page * PAGE_TOKENS;
                let mut scores = scores!(P);
                if has_paths && first_key + PAGE_TOKENS > self.first_position() {
                    unroll!(W < 2; {
                        self.take_paths(rows, first_key + W as u32 * WARP_KEYS, lane, of_rows, &mut scores[W]);
                    });
                }
                let weights = weigh_windows::<2, 2>(attend, first_key, lane, last, scores);
                unroll!(W < 2; {
                    if lane.is_multiple_of(4) {
                        scales.leave(page * OF_PAGE + W as u32, &weights[W]);
                    }
                    if page < pages {
                        // Other warps' products read these keys, too. They are of the same group: see `wgmma::wait`.
                        let to = stages[P].stage_buffer();
                        unroll!(H < 2; {
                            mma::stmatrix_x4(to.at(weights_at(pair, lane, W as u32, H as u32)), weights[W].words[H]);
                        });
                    }
                });
            });
        }
    }

    /// Adds what [`add_all`] has left out: the values of windows in which paths may part, in half of the dimensions. It
    /// uses `mma`, which lets each row have values of its own.
    ///
    /// # Safety
    /// All weights and their [`Scales`] were left, the pages of values waited for, and all consumers have synchronised
    /// since.
    #[device]
    unsafe fn add_all_paths(
        &self,
        tile: &Tile,
        (pages, half): (u32, u32),
        scales: Scales,
        tops: [f32; 2],
        sums: &mut Sums,
    ) {
        let rows = PairRows::of(tile, tile.warp_id % 4 * PAIRS);
        let mut window = self.apart(tile.split);
        // SAFETY: the caller's word.
        unsafe {
            while window < pages * OF_PAGE {
                thread::keep_rolled();
                let page = self.ring.ahead(window / OF_PAGE).stage_buffer();
                let weights =
                    [0, 1].map(|h| mma::ldmatrix_x4(page.at(weights_at(scales.pair, tile.lane, window % OF_PAGE, h))));
                let factors = [0, 1].map(|i| weight(scales.of(i).load(window as usize), tops[i]));
                let first = tile.split * SPLIT + window * WARP_KEYS;
                let found = self.add_paths::<8>(&rows, (first, pages, tile.lane), &weights, 8 * half);
                unroll!(J < 8; {
                    unroll!(E < 4; {
                        sums[J][E] = math::fma(found[J][E], factors[E / 2], sums[J][E]);
                    });
                });
                window += 1;
            }
        }
    }
}

/// Where in a page eight weights of a pair lie, of a window and half of its keys: the row that a lane gives `stmatrix`
/// and `ldmatrix`. Their matrices have eight pairs by eight keys. The second has the next eight pairs, and the other
/// two have the next eight keys.
#[device]
const fn weights_at(pair: u32, lane: u32, window: u32, half: u32) -> usize {
    let row = pair / PAIRS * PAIRS + lane % 16;
    swizzled(row * ROW_BYTES + window * (WARP_KEYS * 2) + half * 32 + lane / 16 * 16) as usize
}

/// Where a window's weights and values are, for a warpgroup's half of the dimensions.
///
/// # Safety
/// `page` is below `pages`, and `window` below 2.
#[device]
unsafe fn operands(ring: Ring, pages: u32, half: u32, page: u32, window: u32) -> (Operand, Columns) {
    // SAFETY: the caller's word.
    unsafe {
        let weights = Operand::at(ring.ahead(page).stage_buffer());
        let values = ring.ahead(pages + page).stage_buffer().at((half * HALF_BYTES) as usize);
        let values = Columns::at(values, HALF_BYTES);
        (weights.advance(window * WARP_KEYS * 2), values.advance(window * WARP_KEYS * ROW_BYTES))
    }
}

/// The weighted sums of all keys' values, in half of the dimensions.
///
/// # Safety
/// All lanes of a warpgroup call it. All weights were left and fenced, the pages of values waited for, and all
/// consumers have synchronised since.
#[device]
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
