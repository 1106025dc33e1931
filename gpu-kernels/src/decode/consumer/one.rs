//! Products of a step of one row, whose input comes as [words](crate::exchange).
//!
//! [`gemm_of_one`](Consumer::gemm_of_one) runs a matrix's GEMM and its epilogue. [`Consumer::run`] calls it for each
//! matrix in turn, by way of [`of_one`](super::Products::of_one). The row is the first of the tensor core's 8 columns;
//! the others are not used. Two warps share a split-K partial. Each asks for one of the partial's two slices of the
//! input, and multiplies both by its own N-tiles:
//!
//! ```text
//! slice of a chunk        0     1     2     3     4     5     6     7
//! asked for by warp       0     1     2     3     4     5     6     7      a lane has one word, of two elements
//! in split-K partial      0     1     2     3     0     1     2     3
//! multiplied by warps     0, 4  1, 5  2, 6  3, 7  0, 4  1, 5  2, 6  3, 7   0 to 3: N-tiles 0, 2, 4, 6 of the part
//!                                                                          4 to 7: N-tiles 1, 3, 5, 7
//! ```
//!
//! Scratch memory has `[n_tile][k_partial][feature]`, the split-K partials of a wave. Behind them it has
//! `[warp][turn][element]`, each warp's slice of the input of up to [`ASKED`] turns.
//!
//! # Order of events
//! In each wave of which the CTA has N-tiles:
//!
//! 1. All wait until the last outputs of the wave before are written: [`begin_part`](Consumer::begin_part).
//! 2. A warp asks for its words of the first turns, and for what its outputs are added to. In a matrix's first wave,
//!    and if the input has a norm, the consumers tell the warp of [`factors`] that the norm's factor is wanted.
//! 3. If all weights of the warp fit into its registers ([`HELD`]), it loads them now, while the words come. If not, it
//!    loads them turn by turn.
//! 4. The warp waits for its words, puts them into shared memory, and synchronises with its split-K partial's other
//!    warp. If there are more turns, it asks for their words. Then it multiplies the turns that are there. This repeats
//!    until the last turn.
//! 5. Each lane with the row's column (`lane % 4` is 0) stores its sums. All synchronise, with the warp of [`factors`]
//!    if they have asked for the factor.
//! 6. Each thread adds the four split-K partials of one output, and [puts it out](Consumer::put_sums_of_one).
//!
//! A CTA without an N-tile in the wave [waits for one word of the input](Consumer::pass_by) instead.
//!
//! # Safety
//! `p` is the parameter block of a step of one row. All lanes of the eight consumer warps call what is unsafe here, in
//! the same order, since they synchronise; [`factors`] is for one other warp of the CTA, which synchronises with them
//! once for each norm. Scratch memory is free when a product begins, and the consumers synchronise before they write
//! what others may still read there. Words are those of the step: each word that is waited for is put by a CTA that
//! runs beside this one, or was put by a launch before.

use cuda_std::bulk::Barrier;
use cuda_std::shared::{self, Shared};
use cuda_std::{device, mma, thread, warp};

use super::duty::{Columns, Duty, columns_of, release};
use super::{Addend, Consumer, Output, Part, sync};
use crate::decode::problem::Problem;
use crate::decode::{DecodeStep, FACTOR_WANTED, FACTORS, Mark, Matrix, SCRATCH, WARPS, barrier};
use crate::exchange::{Word, WordKind, Words};
use crate::linear::{K_PARTIALS, N_TILE, SLICE};
use crate::stream::{CHUNK_FEATURES, N_TILES};
use crate::waiting;
use crate::weights::{FragmentFormat, WeightFragments};

/// Bytes of the partial sums of a wave, `[n_tile][k_partial][feature]`.
const ONE_PARTIAL: u32 = N_TILES * K_PARTIALS * N_TILE * 4;
/// Behind the partial sums: the slices of a product's input that each warp has at a time, [`ASKED`] slices of 64
/// elements.
const STAGED: u32 = SCRATCH + ONE_PARTIAL;
const ASKED: usize = 8;
/// Bytes of one warp's slices there, `[warp][turn][element]`.
const STAGED_BYTES: u32 = ASKED as u32 * SLICE * 2;
/// Bytes of scratch memory for one row.
pub const ONE_BYTES: u32 = STAGED - SCRATCH + WARPS * STAGED_BYTES;

/// Where the factor of a matrix's norm lies: in one of two places, since the next factor comes while one is read.
#[device]
pub(super) fn factor_place(matrix: Matrix) -> usize {
    (matrix == Matrix::GateUp).into()
}

/// Chunks whose weights a warp can hold in registers. If it has at most this many in a part, it loads all at once.
const HELD: usize = 4;

/// The consumers synchronise with the warp that finds the factor of a norm, at
/// [barrier](crate::decode#named-barriers) 2.
#[device]
pub(super) fn sync_with_factor() {
    thread::sync_named(barrier::FACTOR, (WARPS + 1) * 32);
}

impl<F: FragmentFormat, const SHORT: bool> Duty<F, 1, SHORT> {
    /// The two warps of a split-K partial synchronise, at one of [barriers](crate::decode#named-barriers) 4 to 7.
    #[device]
    fn sync(&self) {
        thread::sync_named(barrier::K_PARTIALS + self.k_split(), WARPS / K_PARTIALS * 32);
    }

    /// Puts the words of a warp's slices, from the first turn on, into shared memory, where both warps of its split-K
    /// partial find them.
    ///
    /// # Safety
    /// Both warps of the split-K partial call it, and have read what they staged before.
    #[device]
    unsafe fn stage<const N: usize>(&self, words: &[Word; N]) {
        // SAFETY: the caller's word.
        unsafe {
            let to = shared::dynamic::<u32>(STAGED + self.warp_id * STAGED_BYTES + self.lane * 4);
            unroll!(I < N of 8; {
                to.store(I * (SLICE / 2) as usize, words[I].bits());
            });
        }
        self.sync();
    }

    /// Where in shared memory a lane finds its part of the slices that the split-K partial's two warps staged, from the
    /// first turn on.
    ///
    /// # Safety
    /// It is read only once both warps of the split-K partial have [staged](Self::stage) their words, and for turns
    /// that these are of.
    #[device]
    unsafe fn staged(&self) -> Shared<u32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(STAGED + self.k_split() * STAGED_BYTES + self.lane % 4 * 16) }
    }

    /// Multiplies `OWN` N-tiles, whose weights are in registers, `chunks` chunks, with the input from `from` on.
    ///
    /// # Safety
    /// The warp holds the weights of `chunks` chunks, turn by turn of `OWN` N-tiles each; `from` is
    /// [where](Self::staged) the input of the first turn is.
    #[device]
    unsafe fn held<const OWN: usize>(
        acc: &mut [[f32; 4]; N_TILES as usize],
        weights: &[WeightFragments; HELD],
        chunks: u32,
        from: Shared<u32>,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            unroll!(T < HELD of 4; {
                if (T + 1) * OWN <= HELD && ((T * OWN) as u32) < chunks {
                    let columns = columns(from.at(T * (SLICE / 2) as usize));
                    unroll!(I < 8; {
                        unroll!(S < OWN of 2; {
                            acc[S] = mma::m16n8k16_bf16(acc[S], weights[T * OWN + S][I], columns_of(&columns, I));
                        });
                    });
                }
            });
        }
    }
}

/// A lane's fragments of a turn's input. `from` is where the lane's part of the first slice lies.
///
/// # Safety
/// Both warps of the split-K partial have staged the turn, whose part for this lane is at `from`.
#[device]
unsafe fn columns(from: Shared<u32>) -> Columns {
    // The second slice, half a chunk on, was staged by the other warp of the split-K partial.
    let next = (K_PARTIALS * STAGED_BYTES / 4) as usize;
    // SAFETY: the caller's word.
    unsafe { [[from.load16(0), from.load16(16)], [from.load16(next), from.load16(next + 16)]] }
}

/// The barrier at which the warp that computes a norm's factor waits until the factor is wanted. If it polled for the
/// squares earlier, it would slow down the CTAs that have yet to write them.
///
/// # Safety
/// It is used once the CTA has synchronised, which makes the barrier.
#[device]
unsafe fn wanted() -> Barrier {
    // SAFETY: the CTA's place for it.
    unsafe { Barrier::at(shared::dynamic(FACTOR_WANTED)) }
}

/// Tells the warp that finds factors that a norm's factor is wanted.
///
/// # Safety
/// All consumers call it, once for each norm, and [synchronise](sync_with_factor) with the warp that finds the factor
/// before they do so again.
#[device]
pub(super) unsafe fn want_factor() {
    if thread::opaque(thread::thread_idx_x()) == 0 {
        // SAFETY: the caller's word.
        unsafe { wanted().arrive() };
    }
}

/// What the warp that finds factors does in a step of one row: it finds the factor of each norm. `flag` is the step's
/// first sequence flag.
///
/// # Safety
/// All lanes of one warp beside the consumers call it, once, when the CTA has synchronised. `flag` is the
/// [first](crate::exchange::Exchange::first_flag) of the step.
#[device]
pub unsafe fn factors(p: &DecodeStep, flag: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let lane = thread::lane_id();
        let (mut index, mut parity) = (0, 0);
        while index < p.matrices() {
            let matrix = p.matrix(index);
            if Problem::load(matrix).is_normed {
                waiting::for_phase(wanted(), parity);
                parity ^= 1;
                let factor = factor(p, &p.exchange.words(WordKind::Squares, flag + index), lane);
                if lane == 0 {
                    shared::dynamic::<f32>(FACTORS).store(factor_place(matrix), factor);
                }
                sync_with_factor();
            }
            index += 2;
        }
    }
}

/// The factor of a norm with these sums of squares, found by a warp.
///
/// # Safety
/// All lanes of a warp call it. `squares` are the words of a row's squares, which are put in this step.
#[device]
unsafe fn factor(p: &DecodeStep, squares: &Words, lane: u32) -> f32 {
    // SAFETY: the caller's word.
    unsafe {
        // In the end lane `l` has the spans that are `l % 8 · 4 + l / 8` modulo 32.
        let (mut sum, mut i) = (0.0, lane);
        while i - lane < squares.len {
            let place = |k: usize| i + 32 * k as u32;
            let mut found = squares.ask_for::<2>(place);
            squares.settle(&mut found, place);
            let two = found.map(|word| f32::from_bits(word.bits()));
            let [own, other] = if lane.is_multiple_of(2) { two } else { [two[1], two[0]] };
            let mut span = own + warp::shuffle_xor(other, 1);
            span += warp::shuffle_xor(span, 2);
            span += warp::shuffle_xor(span, 4);
            if lane / 2 % 4 == i / 64 % 4 {
                sum += span;
            }
            i += 64;
        }
        unroll!(M < 5; {
            sum += warp::shuffle_xor(sum, [4, 2, 1, 16, 8][M]);
        });
        p.work.norm().inverse_rms_of_sum(sum)
    }
}

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// [`gemm`](Self::gemm) of one row. A warp asks for its slice of the input of eight turns at a time: a lane has one
    /// word of each turn. It puts the words into shared memory, where the lanes of the split-K partial's two warps find
    /// their fragments. While it waits for words, it does what does not need them.
    ///
    /// # Safety
    /// As for [`of_one`](super::Products::of_one).
    #[device]
    pub(super) unsafe fn gemm_of_one<F: FragmentFormat>(&mut self, mut part: Part) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            let duty = Duty::<F, 1, SHORT>::new();
            let Duty { lane, warp_id, .. } = duty;
            let (g, t) = (lane / 4, lane % 4);
            let scale = F::scale(p, part.index);
            let input = part.problem.input(self.flag + part.index);
            // The place of this lane's word of a turn, from its first word on. What lies beyond a row's end is
            // multiplied by zero.
            let place = |turn: usize| turn as u32 * (CHUNK_FEATURES / 2);
            let mut ring = self.ring;
            loop {
                let normed = part.problem.is_normed && part.first_n_tile == 0;
                if part.mine > 0 {
                    self.begin_part();
                    // Opaque to the compiler, which would keep these addresses in registers from wave to wave.
                    let mut own_words = input.from(thread::opaque(warp_id * (SLICE / 2) + lane));
                    let mut words = own_words.ask_for::<ASKED>(place);
                    if normed {
                        want_factor();
                    }
                    let first = self.first_of_one(&part);
                    let mut acc = [[0f32; 4]; N_TILES as usize];
                    let own = duty.n_tiles(part.mine);
                    // Both halves of the CTA take the same branch, since they have to synchronise alike.
                    if !F::COSTLY && part.mine <= 4 && part.mine.div_ceil(2) * part.problem.depth <= HELD as u32 {
                        // All weights are loaded into registers while the words come.
                        let chunks = own * part.problem.depth;
                        let chunk = |i: u32| {
                            let (turn, s) = if own == 2 { (i / 2, i % 2) } else { (i, 0) };
                            ring.ahead(turn * part.mine + duty.n_tile(s))
                        };
                        let mut weights = [[[0u32; 4]; 8]; HELD];
                        unroll!(H < HELD of 4; {
                            if (H as u32) < chunks {
                                weights[H] = duty.load(p, &chunk(H as u32), 0);
                            }
                        });
                        // Two lanes release each chunk.
                        let arrives = lane / 2 < chunks;
                        release(chunk(if arrives { lane / 2 } else { 0 }), arrives);
                        ring = ring.ahead(part.mine * part.problem.depth);
                        // There are at most four turns.
                        let mut words = [words[0], words[1], words[2], words[3]];
                        own_words.settle(&mut words, place);
                        if part.first_n_tile == 0 {
                            self.mark(Mark::GridBarrier);
                        }
                        duty.stage::<HELD>(&words);
                        match own {
                            0 => {}
                            1 => Duty::<F, 1, SHORT>::held::<1>(&mut acc, &weights, chunks, duty.staged()),
                            _ => Duty::<F, 1, SHORT>::held::<2>(&mut acc, &weights, chunks, duty.staged()),
                        }
                    } else {
                        let mut ready = duty.begin(p, &ring, &part);
                        let mut turn = 0;
                        while turn < part.problem.depth {
                            own_words.settle(&mut words, place);
                            if turn == 0 {
                                if part.first_n_tile == 0 {
                                    self.mark(Mark::GridBarrier);
                                }
                            } else {
                                // Both warps have to read their fragments before new ones are put there. (Those of an
                                // earlier product all warps have read: they have synchronised since.)
                                duty.sync();
                            }
                            duty.stage(&words);
                            let next = turn + ASKED as u32;
                            if next < part.problem.depth {
                                own_words = own_words.from(place(ASKED));
                                words = own_words.ask_for(place);
                            }
                            let end = part.problem.depth.min(next);
                            let from = duty.staged();
                            let columns = |i: u32| [columns(from.at(((i - turn) * (SLICE / 2)) as usize))];
                            if F::COSTLY {
                                duty.costly::<true>(p, &mut acc, (&mut ring, &part, turn..end), columns, &mut ready);
                            } else {
                                let mut i = turn;
                                while i < end {
                                    duty.turn(p, &mut acc, (&mut ring, &part), &columns(i));
                                    i += 1;
                                }
                            }
                            turn = end;
                        }
                    }
                    // The first column is the row; the others are not used.
                    let partial = shared::dynamic::<f32>(SCRATCH);
                    if t == 0 {
                        unroll!(S < 4; {
                            if (S as u32) < own {
                                let to = partial.at(((duty.n_tile(S as u32) * K_PARTIALS + duty.k_split()) * N_TILE + g) as usize);
                                to.store(0, acc[S][0]);
                                to.store(8, acc[S][2]);
                            }
                        });
                    }
                    if normed {
                        sync_with_factor();
                    } else {
                        sync();
                    }
                    self.put_sums_of_one::<{ K_PARTIALS as usize }>(&part, partial, scale, first);
                } else {
                    self.pass_by(&input, normed);
                }
                if part.is_last() {
                    break;
                }
                part = self.part(part.index, part.end);
            }
            self.ring = ring;
        }
    }

    /// Waits for those of the CTA's warps that still write its last outputs. Before that, the other warps would poll in
    /// vain and slow down the grid. Afterwards nobody reads the old partial sums any more.
    #[device]
    pub(super) fn begin_part(&self) {
        sync();
    }

    /// What a CTA without an N-tile in this wave does.
    ///
    /// # Safety
    /// The CTA has no part in the wave, whose input `input` is.
    #[device]
    pub(super) unsafe fn pass_by(&self, input: &Words, normed: bool) {
        // SAFETY: the caller's word.
        unsafe {
            if normed {
                want_factor();
                sync_with_factor();
            }
            // Waits here: if it polled for what comes after this GEMM, it would slow down the CTAs that still run it.
            input.expect();
        }
    }

    /// Adds the `PARTIALS` partial sums of each output of a part, `[n_tile][partial][feature]`, and puts the outputs
    /// where they belong.
    ///
    /// # Safety
    /// `partial` has all sums of the part, and the consumers have synchronised since: with the warp that finds the
    /// factor, where the matrix's input has a norm. `output` and `old` are this lane's [first](Self::first_of_one).
    #[device]
    pub(super) unsafe fn put_sums_of_one<const PARTIALS: usize>(
        &self,
        part: &Part,
        partial: Shared<f32>,
        scale: f32,
        (output, old): (Output, Addend),
    ) {
        // SAFETY: the caller's word.
        unsafe {
            // A warp stays together: it holds two N-tiles of the residual, whose squares it adds by shuffles.
            if warp::any(output.valid) {
                let within = if part.matrix == Matrix::GateUp { N_TILE / 2 - 1 } else { N_TILE - 1 };
                let sum = |feature: u32| {
                    let from = partial.at((output.n_tile * PARTIALS as u32 * N_TILE + feature) as usize);
                    let mut sum = 0.0;
                    unroll!(C < PARTIALS of 4; {
                        sum += from.load(C * N_TILE as usize);
                    });
                    sum * scale
                };
                let feature = output.feature & within;
                self.put::<true>(part, &output, sum(feature), old, || sum(feature + 8));
            }
        }
    }

    /// This lane's output of a part of one row, and what it is added to.
    #[device]
    pub(super) unsafe fn first_of_one(&self, part: &Part) -> (Output, Addend) {
        // By arithmetic: a choice of two numbers the compiler would look up in memory.
        let width_log2 = N_TILE.ilog2() - u32::from(part.matrix == Matrix::GateUp);
        let e = thread::opaque(thread::thread_idx_x());
        let valid = e < part.mine << width_log2;
        let n_tile = if valid { e >> width_log2 } else { 0 };
        let first = (part.first_n_tile + part.place + n_tile * self.grid) << width_log2;
        let output = Output { row: 0, n_tile, feature: first + (e & !(!0 << width_log2)), valid };
        // SAFETY: the caller's word.
        (output, unsafe { self.addend::<true>(part, &output) })
    }
}
