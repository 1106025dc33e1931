//! GEMMs of weights and activations in e4m3. [`crate::e4m3`] tells the order of the sums.
//!
//! `wgmma` takes 64 rows of A: here an N-tile's 16 features of four slices, of 128 inputs each, which follow each other
//! in a stage. B's columns are the same four slices of each row of activations. Only the products of a slice with
//! itself are wanted, a quarter of all: warp `w` of a warpgroup has those of slice `w`, and then, of the next four
//! slices, those of slice `w + 4`. These inner sums meet in shared memory, where one lane adds those of an output from
//! first to last. Each of the two warpgroups takes every other N-tile.
//!
//! How activations become codes, and where these lie, differs for [several rows](several_rows) and [one](one_row).
//!
//! # Safety
//! `p` is the parameter block of a launch whose layers are in e4m3. All lanes of the consumers' two warpgroups call
//! what is unsafe here, in the same order, since they synchronise. With `N` = 8 the step has one row, otherwise at most
//! `N / 4`. `part` is a part of a matrix of a layer, not of the head. Scratch memory is the consumers' alone. The
//! tensor core reads codes there once they were written and fenced, and the consumers have synchronised since.

mod one_row;
mod several_rows;

use cuda_std::shared::{self, Shared};
use cuda_std::wgmma::{self, Cores};
use cuda_std::{Global, device, math, thread, warp};

use super::{Addend, Consumer, Part, Products};
use crate::decode::{DecodeStep, Matrix, WARPS, barrier};
use crate::e4m3::{self, CHUNK_INPUTS, GROUP};
use crate::linear::N_TILE;
use crate::ring::Ring;
use crate::stream::{N_TILES, SLICE_BYTES, SLICES, STEP_BYTES};
use crate::weights::E4m3;

/// Lanes of a warpgroup.
const HALF: u32 = WARPS / 2 * 32;
/// Most N-tiles of a warpgroup.
const OWN: usize = N_TILES as usize / 2;

/// Scales of the weights in a turn, `[n_tile][lower and upper features][slice]`: one for each lane of a warpgroup.
const WEIGHT_SCALES: u32 = N_TILES * 2 * SLICES;
const _: () = assert!(WEIGHT_SCALES == HALF);

/// Products of codes in e4m3.
pub struct OfCodes;

impl Products<E4m3> for OfCodes {
    #[device]
    unsafe fn of_one<const ROWS: u8, const SHORT: bool>(consumer: &mut Consumer<'_, ROWS, SHORT>, part: Part) {
        // SAFETY: the caller's word.
        unsafe { consumer.e4m3_of_one(part) }
    }

    #[device]
    unsafe fn of_some<const ROWS: u8, const SHORT: bool, const TILES: usize>(
        consumer: &mut Consumer<'_, ROWS, SHORT>,
        part: Part,
        old: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            // Kernels with one tile of rows run steps of one row, which do not come here.
            if TILES > 1 {
                consumer.e4m3_of_some::<TILES, 64>(part, old);
            }
        }
    }
}

/// Rows of activations that `n` columns are made of.
const fn rows(n: u32) -> u32 {
    if n == 8 { 1 } else { n / 4 }
}

/// The largest of `largest` and the magnitudes of a word's two bf16, compared as whole numbers.
#[device]
fn larger(largest: u32, word: u32) -> u32 {
    largest.max(word & 0x7fff).max(word >> 16 & 0x7fff)
}

/// What the CTA has staged for a turn: its input, and the weights' scales.
#[derive(Clone, Copy)]
struct Staged {
    /// The columns' codes.
    codes: Shared<u8>,
    /// `[row][slice]`
    scales: Shared<f32>,
    /// [`WEIGHT_SCALES`].
    w_scales: Shared<f32>,
}

impl Staged {
    /// What is staged for the next turn, in a step of one row.
    ///
    /// # Safety
    /// Another turn was staged behind this one, or nothing is read there.
    #[device]
    unsafe fn next(self) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            Self {
                codes: self.codes.at(CHUNK_INPUTS as usize),
                scales: self.scales.at(SLICES as usize),
                w_scales: self.w_scales.at(WEIGHT_SCALES as usize),
            }
        }
    }
}

/// A warpgroup's part of a matrix.
#[derive(Clone, Copy)]
struct Warpgroup<const N: u32> {
    /// Which of the two warpgroups it is.
    half: u32,
    /// The lane's number in the warpgroup.
    lane: u32,
    /// Where inner sums are combined.
    sums: Shared<f32>,
    /// The weights' scales.
    scales: Global<f32>,
    /// Groups of the inputs.
    groups: u32,
    /// Rows that are there.
    count: u32,
}

impl<const N: u32> Warpgroup<N> {
    /// The part of this thread's warpgroup.
    ///
    /// # Safety
    /// `index` is a layer's matrix; the step has `count` rows, 1 if `N` is 8.
    #[device]
    unsafe fn new(p: &DecodeStep, index: u32, count: u32) -> Self {
        let thread = thread::opaque(thread::thread_idx_x());
        let half = thread / HALF;
        let sums = if N == 8 {
            one_row::SUMS + half * one_row::SUMS_BYTES
        } else {
            several_rows::SUMS + half * several_rows::SUMS_BYTES
        };
        let groups = e4m3::groups(p.shape(p.matrix(index)).1);
        // SAFETY: the caller's word.
        unsafe {
            let scales = p.e4m3.scales.at(scales_at(p, index));
            Self { half, lane: thread % HALF, sums: shared::dynamic(sums), scales, groups, count }
        }
    }

    /// The warpgroup's lanes synchronise, at [barrier](crate::decode#named-barriers) 8 or 9.
    #[device]
    fn sync(&self) {
        thread::sync_named(barrier::WARPGROUPS + self.half, HALF);
    }

    /// How many of the CTA's `mine` N-tiles are the warpgroup's.
    #[device]
    const fn n_tiles(&self, mine: u32) -> u32 {
        (mine + 1 - self.half) / 2
    }

    /// The lane's one of the [`WEIGHT_SCALES`] that the CTA's N-tiles have in a turn; zero beyond the last group or
    /// N-tile.
    ///
    /// # Safety
    /// `part` is of the warpgroup's matrix.
    #[device]
    unsafe fn weight_scale(&self, part: &Part, turn: u32) -> f32 {
        let i = self.lane;
        let (n_tile, upper, group) = (i / (2 * SLICES), i / SLICES % 2, turn * SLICES + i % SLICES);
        if n_tile >= part.mine || group >= self.groups {
            return 0.0;
        }
        let block = part.n_tile(n_tile) / (GROUP / N_TILE) * self.groups + group;
        // SAFETY: the caller's word.
        unsafe { self.scales.load_nc((block * 4 + upper) as usize) }
    }

    /// Multiplies a stage's chunk by a turn's columns, releases the stage, and leaves the inner sums where the
    /// warpgroup finds them.
    ///
    /// # Safety
    /// All lanes of the warpgroup call it. The stage has, or will have, an N-tile of the warpgroup's, which is yet to
    /// be multiplied; `columns` are its turn's codes, complete and fenced.
    #[device]
    unsafe fn multiply(&self, stage: &Ring, columns: Shared<u8>) {
        // SAFETY: the caller's word.
        unsafe {
            // From a shuffle, so that the assembler knows that a warp's lanes agree on them: descriptors need that.
            let (stage, columns) = (stage.of_lane(0), Shared::<u8>::from_raw(warp::shuffle_idx(columns.addr(), 0)));
            stage.wait_full();
            let (weights, columns) = (Cores::at(stage.stage_buffer()), Cores::at(columns));
            Self::four_slices(weights, columns);
            // Waits until all lanes have added what the chunk before left.
            self.sync();
            self.put_inner_sums(0);
            let second = if N == 8 { one_row::SECOND } else { N / 8 * 1024 };
            Self::four_slices(weights.advance(SLICES / 2 * SLICE_BYTES), columns.advance(second));
            if self.lane % 32 < 2 {
                stage.empty().arrive();
            }
            self.put_inner_sums(4);
        }
    }

    /// Multiplies four slices, and waits for the products.
    ///
    /// # Safety
    /// All lanes of the warpgroup call it. Both operands are complete in shared memory, and nobody writes them before
    /// it returns.
    #[device]
    unsafe fn four_slices(weights: Cores, columns: Cores) {
        // SAFETY: the caller's word.
        unsafe {
            wgmma::fence();
            unroll!(I < 4; {
                let (a, b) = (weights.advance(I as u32 * STEP_BYTES), columns.advance(I as u32 * STEP_BYTES));
                match N {
                    8 => wgmma::mma_e4m3_n8_cores(a, b, I != 0),
                    _ => wgmma::mma_e4m3_n64_cores(a, b, I != 0),
                }
            });
            wgmma::commit();
            wgmma::wait::<0>();
        }
    }

    /// Leaves the inner sums of this warp's slice, one of the four from `first` on, in shared memory.
    ///
    /// # Safety
    /// The accumulators have the products of the four slices from `first`, 0 or 4, on. All lanes of the warpgroup have
    /// [added](Self::added) what lay there.
    #[device]
    unsafe fn put_inner_sums(&self, first: u32) {
        let (warp_id, g, t) = (self.lane / 32, self.lane % 32 / 4, self.lane % 4);
        // A lane has two columns side by side. One of them is of this warp's slice, or none is.
        let (odd, wanted) = (warp_id % 2 == 1, t % 2 == warp_id / 2);
        unroll!(J < (N as usize / 8) of 8; {
            let row = 2 * J as u32 + t / 2;
            // Without a condition, behind which the assembler would run the products one after another.
            let found = if N == 8 {
                let [a, b] = [wgmma::get::<{ 64 + 4 * J }>(), wgmma::get::<{ 65 + 4 * J }>()];
                [a, b, wgmma::get::<{ 66 + 4 * J }>(), wgmma::get::<{ 67 + 4 * J }>()]
            } else {
                let [a, b] = [wgmma::get::<{ 4 * J }>(), wgmma::get::<{ 4 * J + 1 }>()];
                [a, b, wgmma::get::<{ 4 * J + 2 }>(), wgmma::get::<{ 4 * J + 3 }>()]
            };
            let (even_column, odd_column) = ([found[0], found[2]], [found[1], found[3]]);
            let [low, high] = [0, 1].map(|i| if odd { odd_column[i] } else { even_column[i] });
            if wanted && row < self.count {
                // SAFETY: the caller's word.
                unsafe {
                    let to = self.sums.at((((first + warp_id) * rows(N) + row) * N_TILE + g) as usize);
                    to.store(0, low);
                    to.store(8, high);
                }
            }
        });
    }

    /// Adds a chunk's inner sums, multiplied by the scales of the turn and the N-tile, to a lane's outputs: the first
    /// is of the lane's row, the second of the eighth row after it.
    ///
    /// # Safety
    /// All inner sums of the N-tile's chunk are there, and the warpgroup has synchronised since. `n_tile` is below the
    /// CTA's.
    #[device]
    unsafe fn added(&self, staged: &Staged, n_tile: u32, mut totals: [f32; 2]) -> [f32; 2] {
        let lane = self.lane;
        // SAFETY: the caller's word.
        unsafe {
            let eight = |of: Shared<f32>| [of.load16(0), of.load16(4)].map(|words| words.map(f32::from_bits));
            let w_scales = eight(staged.w_scales.at(((2 * n_tile + lane / 8 % 2) * SLICES) as usize));
            unroll!(R < 2; {
                let row = lane / N_TILE + 8 * R as u32;
                if 8 * (R as u32) < rows(N) && row < self.count {
                    let sums = self.sums.at((row * N_TILE + lane % N_TILE) as usize);
                    let x_scales = eight(staged.scales.at((row * SLICES) as usize));
                    unroll!(S < 8; {
                        let inner = sums.load(S * (rows(N) * N_TILE) as usize);
                        totals[R] = math::fma(inner, x_scales[S / 4][S % 4] * w_scales[S / 4][S % 4], totals[R]);
                    });
                }
            });
        }
        totals
    }

    /// Multiplies the chunks of `turns` turns, which are in the ring's next stages, for all of the warpgroup's N-tiles.
    /// `totals` has a lane's outputs of each N-tile.
    ///
    /// # Safety
    /// All lanes of the warpgroup call it. `staged` has the first of the turns, which others follow if the step has one
    /// row; all consumers have synchronised since it was written. The ring is where the first turn's chunks begin, of
    /// which a turn has `mine`.
    #[device]
    unsafe fn turns(
        &self,
        (ring, mine, turns): (&mut Ring, u32, u32),
        mut staged: Staged,
        totals: &mut [[f32; 2]; OWN],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let own = self.n_tiles(mine);
            let mut stage = ring.ahead(self.half);
            let mut turn = 0;
            while turn < turns {
                *ring = ring.ahead(mine);
                turn += 1;
            }
            if own == 0 {
                return;
            }
            let (mut left, mut s) = (own * turns, 0);
            while left > 0 {
                self.multiply(&stage, staged.codes);
                self.add(&staged, 2 * s + self.half, own, totals);
                left -= 1;
                s += 1;
                // To the warpgroup's next N-tile, or the first one of the next turn.
                let is_last = s == own;
                stage = stage.ahead(if is_last { mine - 2 * (own - 1) } else { 2 });
                if is_last {
                    s = 0;
                    staged = staged.next();
                }
            }
        }
    }

    /// Adds the inner sums that all warps left to the first N-tile's outputs. Then it rotates the outputs of the `own`
    /// N-tiles, so that the next N-tile's come to the front. After `own` calls each is where it was.
    ///
    /// # Safety
    /// As for [`added`](Self::added), but that the warpgroup synchronises here. `own` is how many N-tiles it has.
    #[device]
    unsafe fn add(&self, staged: &Staged, n_tile: u32, own: u32, totals: &mut [[f32; 2]; OWN]) {
        self.sync();
        // SAFETY: the caller's word.
        let first = unsafe { self.added(staged, n_tile, totals[0]) };
        unroll!(S < 4; {
            let next = if S < 3 { totals[(S + 1) % 4] } else { first };
            totals[S] = if S as u32 + 1 == own { first } else { next };
        });
    }
}

impl Part {
    /// Which N-tile of the matrix is the CTA's `i`-th.
    #[device]
    fn n_tile(&self, i: u32) -> u32 {
        self.first_n_tile + self.place + i * thread::grid_dim_x()
    }
}

/// Where the scales of the matrix at `index` begin.
#[device]
fn scales_at(p: &DecodeStep, index: u32) -> usize {
    let len = |matrix: Matrix| {
        let (n_tiles, k) = p.shape(matrix);
        e4m3::scales_len(n_tiles, k)
    };
    let [qkv, output, gate_up, down] = [Matrix::Qkv, Matrix::Output, Matrix::GateUp, Matrix::Down].map(len);
    let within = match index % 4 {
        0 => 0,
        1 => qkv,
        2 => qkv + output,
        _ => qkv + output + gate_up,
    };
    ((index / 4) * (qkv + output + gate_up + down) + within) as usize
}
