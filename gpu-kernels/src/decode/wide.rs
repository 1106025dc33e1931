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

use cuda_std::shared::{self, Shared};
use cuda_std::tensor::swizzled;
use cuda_std::wgmma::{self, Columns, Operand};
use cuda_std::{bulk, math, mma, thread, warp};

use super::attention::{QUERY, QUERY_BYTES};
use super::consumer::{Consumer, sync};
use super::producer::Share;
use super::{SCRATCH, SCRATCH_BYTES, SEQUENCES, TREE};
use crate::attention::{ALL_PAIRS, Attend, Divisor, PAIRS, SPLIT, Tile, WARP_KEYS, put_sum, weigh_keys, weight};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};

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
const _: () = assert!(2 * HALF_BYTES == QUERY_BYTES && ALL_PAIRS * QUERY == QUERY_BYTES);
// Two places: one warpgroup may be a share ahead.
const _: () = assert!(QUERY_BYTES + 2 * 2 * SCALES <= SCRATCH_BYTES);

/// Whether a share goes this way, of a step of `count` rows of which the first stands at `root`: where it is of all rows,
/// and these see the same keys.
#[inline(always)]
pub const fn takes<const ROWS: u8>(share: &Share, count: u32, (group, tile_rows): (u32, u32), root: u32) -> bool {
    let pairs = count * group;
    let all = share.tiles.start == 0 && share.tiles.end * tile_rows >= count;
    // Rows of a tree differ in the keys behind the root.
    let alike = ROWS != TREE || (share.split + 1) * SPLIT <= root + 1;
    ROWS != SEQUENCES && all && alike && PAIRS < pairs && pairs <= ALL_PAIRS
}

/// Scores of the 64 keys of a stage, in the first or second half of the upper accumulators: begun.
#[inline(always)]
unsafe fn begin_scores<const SECOND: bool>(queries: Operand, keys: Operand) {
    // SAFETY: the caller's word.
    unsafe {
        unroll!(I < 8; {
            // Four steps of 16 dimensions in each half.
            let at = (I / 4) as u32 * HALF_BYTES + (I % 4) as u32 * 32;
            wgmma::mma_n64::<SECOND>(queries.advance(at), keys.advance(at), I != 0);
        });
    }
}

/// A window's weighted values, likewise: begun, and closed as a group.
#[inline(always)]
unsafe fn begin_values<const SECOND: bool>(weights: Operand, values: Columns) {
    // SAFETY: the caller's word.
    unsafe {
        unroll!(I < 2; {
            let i = I as u32;
            wgmma::mma_n64_columns::<SECOND>(weights.advance(i * 32), values.advance(i * 16 * ROW_BYTES), I != 0);
        });
        wgmma::commit();
    }
}

/// What a window's scores are, as [`weigh_keys`] takes them.
macro_rules! scores {
    ($window:expr) => {{
        let mut s = [[0f32; 4]; 4];
        unroll!(J < 4; {
            s[J] = [
                wgmma::get::<{ 64 + 16 * $window + 4 * J }>(),
                wgmma::get::<{ 65 + 16 * $window + 4 * J }>(),
                wgmma::get::<{ 66 + 16 * $window + 4 * J }>(),
                wgmma::get::<{ 67 + 16 * $window + 4 * J }>(),
            ];
        });
        s
    }};
}

/// A lane's sums: two pairs, dimensions `8 j + 2 t` and one on of its warpgroup's.
struct Sums {
    all: [[f32; 4]; 8],
    tops: [f32; 2],
    norms: [f32; 2],
}

/// Adds a window's sums, of the first or second half of the upper accumulators.
macro_rules! add_window {
    ($sums:ident, $second:literal, $factors:expr) => {{
        let factors = $factors;
        unroll!(J < 8; {
            let found = [
                wgmma::get::<{ 64 + 32 * $second + 4 * J }>(),
                wgmma::get::<{ 65 + 32 * $second + 4 * J }>(),
                wgmma::get::<{ 66 + 32 * $second + 4 * J }>(),
                wgmma::get::<{ 67 + 32 * $second + 4 * J }>(),
            ];
            unroll!(E < 4; {
                $sums.all[J][E] = math::fma(found[E], factors[E / 2], $sums.all[J][E]);
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

impl Scales {
    #[inline(always)]
    unsafe fn of(self, i: usize, window: u32) -> Shared<f32> {
        let at = ((self.pair + 8 * i as u32) * WINDOWS + window) * 4;
        // SAFETY: the caller's word.
        unsafe { shared::dynamic::<f32>(self.at + at) }
    }

    #[inline(always)]
    unsafe fn leave(self, window: u32, tops: [f32; 2], norms: [f32; 2]) {
        unroll!(I < 2; {
            // SAFETY: the caller's word.
            unsafe {
                let to = self.of(I, window);
                to.store(0, tops[I]);
                to.store((SCALES / 4) as usize, norms[I]);
            }
        });
    }

    #[inline(always)]
    unsafe fn tops(self) -> [f32; 2] {
        [0, 1].map(|i| {
            // SAFETY: the caller's word.
            let [a, b] = unsafe { [self.of(i, 0).load16(0), self.of(i, 0).load16(4)] };
            let max = |a: u32, b: u32| math::max(f32::from_bits(a), f32::from_bits(b));
            let of_four = |x: [u32; 4]| math::max(max(x[0], x[1]), max(x[2], x[3]));
            math::max(of_four(a), of_four(b))
        })
    }
}

impl Sums {
    /// A window's factors; its normalisers are added.
    #[inline(always)]
    unsafe fn factors(&mut self, scales: Scales, window: u32) -> [f32; 2] {
        let mut factors = [0f32; 2];
        unroll!(I < 2; {
            // SAFETY: the caller's word.
            unsafe {
                let of = scales.of(I, window);
                factors[I] = weight(of.load(0), self.tops[I]);
                self.norms[I] = math::fma(of.load((SCALES / 4) as usize), factors[I], self.norms[I]);
            }
        });
        factors
    }
}

impl<const ROWS: u8> Consumer<'_, ROWS> {
    /// All pairs of the step against a share's keys and values in the ring's next stages, which nothing is released of.
    /// The queries are in place. `turn` counts such shares.
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
            self.weigh_all(attend, &tile, pages, half, scales);
            // A lane a page: looking takes its time.
            if lane < pages {
                self.ring.ahead(pages + lane).wait_full();
            }
            warp::sync_warp();
            bulk::fence_proxy_async();
            sync();
            let sums = self.add_all(pages, half, scales);
            let position = self.slots();
            let put = |pair: usize, d: u32, word: u32| attend.put::<false>(pair, d, word);
            let keep = |_, pair, d, sum, scale| attend.keep(split, pair, d, sum, scale);
            unroll!(I < 2; {
                let pair = pair + 8 * I as u32;
                if pair < tile.pairs {
                    unroll!(J < 8; {
                        let d = half * (HEAD_DIM / 2) + 8 * J as u32 + 2 * (lane % 4);
                        let sum = [sums.all[J][2 * I], sums.all[J][2 * I + 1]];
                        let scale = [sums.tops[I], sums.norms[I]];
                        put_sum(attend, &tile, pair, d, (sum, scale), position(tile.row(pair)), put, keep);
                    });
                }
            });
        }
    }

    /// What all pairs weigh the keys of two pages by, to where these keys were.
    #[inline(always)]
    unsafe fn weigh_all(&self, attend: &Attend, tile: &Tile, pages: u32, half: u32, scales: Scales) {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, pair) = (tile.lane, scales.pair);
            // Of a page that is not there another, whose keys are masked, and whose content nobody writes.
            let first = 2 * half;
            let page = |i: u32| self.ring.ahead(if first + i < pages { first + i } else { pages });
            let stages = [page(0), page(1)];
            stages[0].wait_full();
            stages[1].wait_full();
            let queries = Operand::at(shared::dynamic::<u8>(SCRATCH));
            wgmma::fence();
            begin_scores::<false>(queries, Operand::at(stages[0].stage_buffer()));
            begin_scores::<true>(queries, Operand::at(stages[1].stage_buffer()));
            wgmma::commit();
            let position = self.slots();
            let last = [pair, pair + 8].map(|pair| tile.last_key(pair, &position));
            wgmma::wait::<0>();
            // As `stmatrix` takes it: eight rows of eight keys, eight rows further, and eight keys.
            let row = scales.pair / PAIRS * PAIRS + lane % 16;
            unroll!(W < 4; {
                let (i, window) = (W as u32 / OF_PAGE, W as u32 % OF_PAGE);
                let number = first * OF_PAGE + W as u32;
                let first_key = tile.split * SPLIT + number * WARP_KEYS;
                let weights = weigh_keys::<2>(attend, first_key, lane, last, scores!(W));
                if lane % 4 == 0 {
                    scales.leave(number, weights.top, weights.norm);
                }
                if first + i < pages {
                    let to = stages[i as usize].stage_buffer();
                    unroll!(H < 2; {
                        let at = row * ROW_BYTES + window * (WARP_KEYS * 2) + H as u32 * 32 + lane / 16 * 16;
                        mma::stmatrix_x4(to.at(swizzled(at) as usize), weights.words[H]);
                    });
                }
            });
        }
    }

    /// All keys' values, so weighed, in half of the dimensions.
    #[inline(always)]
    unsafe fn add_all(&self, pages: u32, half: u32, scales: Scales) -> Sums {
        // SAFETY: the caller's word.
        unsafe {
            let mut sums = Sums { all: [[0.0; 4]; 8], tops: scales.tops(), norms: [0.0; 2] };
            let weights = |page: u32| Operand::at(self.ring.ahead(page).stage_buffer());
            let values = |page: u32| {
                let page = self.ring.ahead(pages + page).stage_buffer();
                Columns::at(page.at((half * HALF_BYTES) as usize), HALF_BYTES)
            };
            let mut page = 0;
            while page < pages {
                thread::keep_rolled();
                let (weights, values) = (weights(page), values(page));
                wgmma::fence();
                begin_values::<false>(weights, values);
                begin_values::<true>(weights.advance(WARP_KEYS * 2), values.advance(WARP_KEYS * ROW_BYTES));
                let factors = [0, 1].map(|window| sums.factors(scales, page * OF_PAGE + window));
                wgmma::wait::<1>();
                add_window!(sums, 0, factors[0]);
                wgmma::wait::<0>();
                add_window!(sums, 1, factors[1]);
                page += 1;
            }
            sums
        }
    }
}
