//! Products of a step of several rows, whose input is in memory.
//!
//! [`gemm`](Consumer::gemm) runs a matrix's GEMM and its epilogue. [`Consumer::run`] calls it for each matrix in turn,
//! by way of [`of_some`](super::Products::of_some). Weights are A (16 features), and rows of activations are B (8 rows
//! a tile, `TILES` tiles). What a warp multiplies is its [`Duty`]:
//!
//! ```text
//! slice of a chunk     0  1  2  3  4  5  6  7
//! split-K partial      0  1  2  3  0  1  2  3
//!
//!                 one tile of rows, or costly fragments      otherwise, and always with a short ring
//! warp w < 4      partial w, N-tiles 0, 2, 4, 6, all rows    partial w, all N-tiles, rows 0 to 7
//! warp w + 4      partial w, N-tiles 1, 3, 5, 7, all rows    partial w, all N-tiles, rows 8 to 15
//! ```
//!
//! A warp loads its activations from memory into registers, in the [layout](crate::activations) made for that, one turn
//! ahead. Scratch memory has the sums of a wave, `[n_tile][k_partial][row][feature]`, of `8 TILES` rows and 16
//! features. In a split-K partial's `[row][feature]` a sum lies at its [`slot`].
//!
//! # Order of events
//! 1. If fragments are costly, a warp makes those of its first N-tile. (With a short ring it does not.)
//! 2. The CTA waits at the grid barrier for the input.
//! 3. The warp loads its activations of turn 0. In a matrix's first wave, and if the input has a norm, warp `w` also
//!    loads the squares of rows `w` and `w + 8`.
//! 4. In each turn the warp loads its activations of the next turn, loads its weights, multiplies, and releases the
//!    stages. After turn 0 or in turn 1 it stores its rows' norm factors.
//! 5. The warp stores its sums; all synchronise. A thread has every 256th output of the part. It adds the four split-K
//!    partials, from first to last, and [puts out](Consumer::put) the result. All synchronise.
//! 6. The next wave begins with step 1, without the grid barrier.
//!
//! # Safety
//! `p` is a launch's parameter block, of a step of 1 to `TILES` times 8 rows. All lanes of the eight consumer warps
//! call what is unsafe here, in the same order, since they synchronise. The CTA has arrived with its part of the
//! matrix's input, and so will all others. Scratch memory is free when a product begins, and when it ends.

use cuda_std::{device, shared, thread};

use super::duty::{Columns, Duty};
use super::{Addend, Consumer, Part, sync};
use crate::activations::{HALF_STRIDE, SLICE_STRIDE, row_at};
use crate::decode::problem::Problem;
use crate::decode::{FACTORS, N_TILES, SCRATCH, SLICES, WARPS};
use crate::linear::{K_PARTIALS, N_TILE, SLICE};
use crate::norm::Norm;
use crate::weights::FragmentFormat;

/// Where a partial sum lies among a split-K partial's `[row][feature]`. There are no bank conflicts, neither when a
/// tensor core's layout is stored nor when whole rows are loaded.
#[device]
pub(super) const fn slot(row: u32, feature: u32) -> u32 {
    (row ^ (row >> 1 & 1)) * N_TILE + (feature ^ ((row >> 2 & 1) * 8))
}

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// Runs a GEMM and its epilogue over all waves. `part` is the CTA's part of the first wave, and `old` is what its
    /// first outputs are added to.
    ///
    /// # Safety
    /// As for [`of_some`](super::Products::of_some).
    #[device]
    pub(super) unsafe fn gemm<F: FragmentFormat, const TILES: usize>(&mut self, mut part: Part, mut old: [Addend; 2]) {
        // SAFETY: the caller's word.
        unsafe {
            // Made anew for each matrix: what is computed from it would take registers if it were kept over all layers.
            let duty = Duty::<F, TILES, SHORT>::new();
            let Duty { lane, warp_id, .. } = duty;
            let (g, t) = (lane / 4, lane % 4);
            let scale = F::scale(self.p, part.index);
            cuda_std::assume(self.count > 0);
            let Problem { x, k, is_normed, .. } = part.problem;
            cuda_std::assume(k > 0);
            let norm = if is_normed { self.p.work.norm() } else { Norm::default() };
            let count = self.count;
            let first_slice = duty.k_split();
            let slices = k.div_ceil(SLICE);
            // Columns without a row compute the last row again; nobody reads those results.
            let mut first_of_row = [0; TILES];
            unroll!(T < (Duty::<F, TILES, SHORT>::OWN_TILES) of 2; {
                first_of_row[T] = row_at((duty.first_row() + 8 * T as u32 + g).min(count - 1)) + t * 8;
            });
            // Loads this warp's slices of its rows for a turn. It runs a turn ahead: with more under way, each load
            // takes longer. Beyond the end of a row weights are zero, and any elements of the row will do. So no load
            // has a condition.
            let fetch = |turn: u32| {
                let mut b: [Columns; TILES] = [[[[0; 4]; 2]; 2]; TILES];
                unroll!(C < 2; {
                    let slice = turn * SLICES + C as u32 * K_PARTIALS + first_slice;
                    let slice = if slice < slices { slice } else { 0 };
                    unroll!(T < (Duty::<F, TILES, SHORT>::OWN_TILES) of 2; {
                        let x = x.at((first_of_row[T] + slice * SLICE_STRIDE) as usize);
                        b[T][C] = [x.load16(0), x.load16(HALF_STRIDE as usize)];
                    });
                });
                b
            };
            let mut ring = self.ring;
            // The first weights do not wait for the other CTAs.
            let mut ready = duty.begin(self.p, &ring, &part);
            self.wait();
            loop {
                let mut b = fetch(0);
                let mut acc = [[0f32; 4]; N_TILES as usize];
                let normed = part.first_n_tile == 0 && !norm.squares.is_null() && warp_id < count;
                let mut squares = [0f32; TILES];
                if normed {
                    let mut rows = [0; TILES];
                    unroll!(T < TILES of 2; {
                        rows[T] = (warp_id + T as u32 * WARPS).min(count - 1);
                    });
                    squares = norm.lane_squares(rows);
                }
                let mut turn = 0;
                if F::COSTLY && !SHORT {
                    let columns = |turn: u32| {
                        let next = fetch(turn + 1);
                        if normed && turn == 1 {
                            self.put_factors(norm, squares, lane, warp_id);
                        }
                        core::mem::replace(&mut b, next)
                    };
                    turn = part.problem.depth;
                    duty.costly::<false>(self.p, &mut acc, (&mut ring, &part, 0..turn), columns, &mut ready);
                    if normed && turn == 1 {
                        self.put_factors(norm, squares, lane, warp_id);
                    }
                }
                while turn < part.problem.depth {
                    let next = fetch(turn + 1);
                    duty.turn(self.p, &mut acc, (&mut ring, &part), &b);
                    if normed && turn == 0 {
                        self.put_factors(norm, squares, lane, warp_id);
                    }
                    b = next;
                    turn += 1;
                }
                self.epilogue::<F, TILES>(&acc, &part, scale, old);
                if part.is_last() {
                    break;
                }
                part = self.part(part.index, part.end);
                old = self.first_addends(&part);
                ready = duty.begin(self.p, &ring, &part);
            }
            self.ring = ring;
        }
    }

    /// Puts the norm factors of a warp's rows where all find them after the next barrier.
    ///
    /// # Safety
    /// All lanes of the warp call it, and the warp's number is below the step's rows. `squares` are a lane's parts of
    /// the squares of rows `warp_id + 8 T`. Nobody reads the factors of the previous matrix any more, and all
    /// synchronise before these are read.
    #[device]
    pub(super) unsafe fn put_factors<const TILES: usize>(
        &self,
        norm: Norm,
        squares: [f32; TILES],
        lane: u32,
        warp_id: u32,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            unroll!(T < TILES of 2; {
                let (row, factor) = (warp_id + T as u32 * WARPS, norm.inverse_rms_of(squares[T]));
                if lane == 0 && row < self.count {
                    shared::dynamic::<f32>(FACTORS).store(row as usize, factor);
                }
            });
        }
    }

    /// Adds the split-K partials, and puts the outputs where they belong.
    ///
    /// # Safety
    /// `acc` has the warp's sums of the part; `ahead` are the part's [first addends](Self::first_addends).
    #[device]
    unsafe fn epilogue<F: FragmentFormat, const TILES: usize>(
        &self,
        acc: &[[f32; 4]; N_TILES as usize],
        part: &Part,
        scale: f32,
        ahead: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            if part.mine == 0 {
                return;
            }
            // Recomputed here: keeping the addresses live across the GEMM would take registers from the accumulators.
            let duty = Duty::<F, TILES, SHORT>::new();
            let lane = duty.lane;
            let (g, t) = (lane / 4, lane % 4);
            // `[n_tile][k_partial][row][feature]`
            let partial = shared::dynamic::<f32>(SCRATCH);
            let k_partial_words = TILES as u32 * 8 * N_TILE;
            unroll!(S < (Duty::<F, TILES, SHORT>::OWN_N_TILES) of 8; {
                if (S as u32) < duty.n_tiles(part.mine) {
                    let to = partial.at(((duty.n_tile(S as u32) * K_PARTIALS + duty.k_split()) * k_partial_words) as usize);
                    unroll!(T < (Duty::<F, TILES, SHORT>::OWN_TILES) of 2; {
                        unroll!(E < 4; {
                            let row = duty.first_row() + 8 * T as u32 + 2 * t + E as u32 % 2;
                            if row < self.count {
                                let sum = acc[S * Duty::<F, TILES, SHORT>::OWN_TILES + T][E];
                                to.store(slot(row, g + E as u32 / 2 * 8) as usize, sum);
                            }
                        });
                    });
                }
            });
            self.put_sums::<{ K_PARTIALS as usize }>(part, k_partial_words, scale, ahead);
        }
    }

    /// Adds the `PARTIALS` partial sums of each output, and puts the outputs where they belong. An output's sums are
    /// `words` words apart, each at the [`slot`] of its row and feature.
    ///
    /// # Safety
    /// The warp has put its sums of the part into scratch memory: `PARTIALS` for each output, `words` words apart. All
    /// eight warps call it; here they synchronise first.
    #[device]
    pub(super) unsafe fn put_sums<const PARTIALS: usize>(
        &self,
        part: &Part,
        words: u32,
        scale: f32,
        ahead: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let partial = shared::dynamic::<f32>(SCRATCH);
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let outputs = self.outputs(part);
            let within = !(!0 << outputs.width_log2);
            let mut e = warp_id * 32 + lane;
            let mut output = outputs.at(e);
            let mut old = ahead[0];
            sync();
            // A warp stays together: it holds two N-tiles of the residual, whose squares it adds by shuffles.
            while e - lane < outputs.total {
                let sum = |feature: u32| {
                    let from =
                        partial.at((output.n_tile * PARTIALS as u32 * words + slot(output.row, feature)) as usize);
                    let mut sum = 0.0;
                    unroll!(C < PARTIALS of 4; {
                        sum += from.load(C * words as usize);
                    });
                    sum * scale
                };
                let feature = output.feature & within;
                self.put::<false>(part, &output, sum(feature), old, || sum(feature + 8));
                e += WARPS * 32;
                output = outputs.at(e);
                old = if e < 2 * WARPS * 32 { ahead[1] } else { self.addend::<false>(part, &output) };
            }
            sync();
        }
    }
}
