//! Products of a step of one row, whose input comes as [words](super::super::exchange).

use cuda_std::shared::{self, Shared};
use cuda_std::{mma, thread, warp};

use super::{Consumer, Old, Output, Part, load, release, sync};
use crate::linear::{SLICE, STRIP};
use crate::norm::Norm;
use crate::ring::Ring;
use crate::stream::exchange::{Kind, Words};
use crate::stream::{CHUNK_FEATURES, FACTORS, Mark, Matrix, SCRATCH, STRIPS, StreamStep, WARPS};

/// Bytes of the partial sums that meet at a time, `[strip][warp][feature]`.
const ONE_PARTIAL: u32 = 8 * WARPS * STRIP * 4;
/// Behind two of these, which take turns: what a warp has of a product's input at a time, [`ASKED`] slices of 64 elements.
const STAGED: u32 = SCRATCH + 2 * ONE_PARTIAL;
const ASKED: usize = 8;
/// Bytes of scratch memory for one row.
pub const ONE_BYTES: u32 = STAGED - SCRATCH + ASKED as u32 * WARPS * SLICE * 2;

/// Behind the stamp that it is asked of, the factor of the norm.
pub const FACTOR: usize = 1;
/// Chunks whose weights a lane has room for: all of a product's, where they are so few.
const HELD: usize = 6;

/// The consumers meet with the warp that finds the factor of a norm.
#[inline(always)]
fn sync_with_factor() {
    thread::sync_named(2, (WARPS + 1) * 32);
}

/// The products of `MINE` strips, whose weights are in registers, with the fragments from `from` on.
#[inline(always)]
unsafe fn chains<const MINE: usize>(
    acc: &mut [[f32; 4]; STRIPS as usize],
    weights: &[[[u32; 4]; 4]; HELD],
    chunks: u32,
    from: Shared<u32>,
) {
    unsafe {
        unroll!(T < HELD of 8; {
            if (T + 1) * MINE <= HELD && ((T * MINE) as u32) < chunks {
                let from = from.at(T * (SLICE / 2) as usize);
                let b = [from.load16(0), from.load16(16)];
                unroll!(I < 4; {
                    let b = [b[I / 2][I % 2 * 2], b[I / 2][I % 2 * 2 + 1]];
                    unroll!(S < MINE of 4; {
                        acc[S] = mma::m16n8k16_bf16(acc[S], weights[T * MINE + S][I], b);
                    });
                });
            }
        });
    }
}

/// What another warp of the block does for the products of one row: it finds the factor of each norm, when it is asked for.
#[inline(always)]
pub unsafe fn factors(p: &StreamStep) {
    unsafe {
        let lane = thread::lane_id();
        let place = shared::dynamic::<u32>(FACTORS);
        loop {
            sync_with_factor();
            let stamp = place.load(0);
            if stamp == 0 {
                return;
            }
            let squares = Words::of(p, Kind::Squares, stamp);
            let (mut sum, mut i) = (0.0, lane);
            while i - lane < squares.len {
                let mut found = [squares.nothing(); 2];
                unroll!(I < 2; {
                    if i + 32 * (I as u32) < squares.len {
                        found[I] = squares.ask(i + 32 * I as u32);
                    }
                });
                squares.settle(&mut found, |k| i + 32 * k as u32);
                unroll!(I < 2; {
                    sum += f32::from_bits(found[I].bits());
                });
                i += 64;
            }
            let norm = Norm { dim: p.residual.dim, eps: p.eps, ..Norm::default() };
            let factor = norm.inverse_rms_of(sum);
            if lane == 0 {
                place.store(FACTOR, factor.to_bits());
            }
            sync_with_factor();
        }
    }
}

/// Asks the warp that does so for the factor of the squares with this stamp; of none, it is done.
#[inline(always)]
pub unsafe fn ask_for_factor(stamp: u32) {
    unsafe {
        if thread::thread_idx_x() == 0 {
            shared::dynamic::<u32>(FACTORS).store(0, stamp);
        }
        sync_with_factor();
    }
}

impl Consumer<'_> {
    /// [`product`](Self::product) of one row: a warp asks for its slices of the input as words, eight a lane at a time, and puts what came into shared memory, where
    /// each lane finds its fragments. What does not need them is done while they come.
    #[inline(always)]
    pub(super) unsafe fn product_of_one(&mut self, mut part: Part, mut first: (Output, Old)) {
        unsafe {
            let p = self.p;
            let matrix = part.matrix;
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
            let (g, t) = (lane / 4, lane % 4);
            let (input, normed) = match matrix {
                Matrix::Output => (self.taken_in(Kind::Attended, part.index), false),
                Matrix::Down => (self.taken_in(Kind::Activation, part.index), false),
                Matrix::Qkv | Matrix::GateUp | Matrix::Head => (self.taken_in(Kind::Scaled, part.index), true),
            };
            let strips = p.shape(matrix).0;
            // This lane's word of a turn.
            let place = |turn: u32| turn * (CHUNK_FEATURES / 2) + warp_id * (SLICE / 2) + lane;
            // What lies beyond a row's end is multiplied by zero.
            let ask = |turn: u32| {
                let mut words = [input.nothing(); ASKED];
                unroll!(I < ASKED of 8; {
                    let i = place(turn + I as u32);
                    if i < input.len {
                        words[I] = input.ask(i);
                    }
                });
                words
            };
            let staged = STAGED + warp_id * (ASKED as u32 * SLICE * 2);
            let load = |chunk: &Ring| load(chunk, lane, warp_id);
            let mut ring = self.ring;
            loop {
                if part.mine > 0 {
                    let mut words = ask(0);
                    let normed = normed && part.first_strip == 0;
                    if normed {
                        ask_for_factor(self.stamp + part.index);
                    }
                    let mut acc = [[0f32; 4]; STRIPS as usize];
                    let chunks = part.mine * part.depth;
                    if part.mine <= 3 && chunks <= HELD as u32 {
                        // All weights come to registers while the words are waited for.
                        let mut weights = [[[0u32; 4]; 4]; HELD];
                        unroll!(H < HELD of 8; {
                            if (H as u32) < chunks {
                                weights[H] = load(&ring.ahead(H as u32));
                            }
                        });
                        release(ring.ahead(lane.min(chunks)), lane < chunks);
                        ring = ring.ahead(chunks);
                        input.settle(&mut words, |i| place(i as u32));
                        self.mark(Mark::Met);
                        let to = shared::dynamic::<u32>(staged + lane * 4);
                        unroll!(I < ASKED of 8; {
                            to.store(I * (SLICE / 2) as usize, words[I].bits());
                        });
                        warp::sync_warp();
                        let from = shared::dynamic::<u32>(staged + t * 16);
                        match part.mine {
                            1 => chains::<1>(&mut acc, &weights, chunks, from),
                            2 => chains::<2>(&mut acc, &weights, chunks, from),
                            _ => chains::<3>(&mut acc, &weights, chunks, from),
                        }
                        // All have read their fragments before others come there.
                        warp::sync_warp();
                    } else {
                        let mut turn = 0;
                        while turn < part.depth {
                            input.settle(&mut words, |i| place(turn + i as u32));
                            if turn == 0 && part.first_strip == 0 {
                                self.mark(Mark::Met);
                            }
                            let to = shared::dynamic::<u32>(staged + lane * 4);
                            unroll!(I < ASKED of 8; {
                                to.store(I * (SLICE / 2) as usize, words[I].bits());
                            });
                            warp::sync_warp();
                            let next = turn + ASKED as u32;
                            if next < part.depth {
                                words = ask(next);
                            }
                            let end = part.depth.min(next);
                            let mut from = staged + t * 16;
                            while turn < end {
                                let b = shared::dynamic::<u32>(from);
                                let b = [b.load16(0), b.load16(16)];
                                from += SLICE * 2;
                                turn += 1;
                                unroll!(P < 4; {
                                    let strip = 2 * P;
                                    if strip as u32 + 1 < part.mine {
                                        let next = ring.ahead(1);
                                        let (low, high) = (load(&ring), load(&next));
                                        release(if lane == 0 { ring } else { next }, lane < 2);
                                        unroll!(I < 4; {
                                            let b = [b[I / 2][I % 2 * 2], b[I / 2][I % 2 * 2 + 1]];
                                            acc[strip] = mma::m16n8k16_bf16(acc[strip], low[I], b);
                                            acc[strip + 1] = mma::m16n8k16_bf16(acc[strip + 1], high[I], b);
                                        });
                                        ring = ring.ahead(2);
                                    } else if (strip as u32) < part.mine {
                                        let a = load(&ring);
                                        release(ring, lane == 0);
                                        unroll!(I < 4; {
                                            let b = [b[I / 2][I % 2 * 2], b[I / 2][I % 2 * 2 + 1]];
                                            acc[strip] = mma::m16n8k16_bf16(acc[strip], a[I], b);
                                        });
                                        ring = ring.ahead(1);
                                    }
                                });
                            }
                            // All have read their fragments before others come there.
                            warp::sync_warp();
                        }
                    }
                    // Of two places one after the other: a warp that is ahead meets the others once more before it comes back to this one.
                    self.turn ^= 1;
                    // Of the columns the first is the row.
                    let partial = shared::dynamic::<f32>(SCRATCH + self.turn * ONE_PARTIAL);
                    if t == 0 {
                        let to = partial.at((warp_id * STRIP + g) as usize);
                        unroll!(S < 8; {
                            if (S as u32) < part.mine {
                                to.store(S * (WARPS * STRIP) as usize, acc[S][0]);
                                to.store(S * (WARPS * STRIP) as usize + 8, acc[S][2]);
                            }
                        });
                    }
                    if normed {
                        sync_with_factor();
                    } else {
                        sync();
                    }
                    let (output, old) = first;
                    // A warp stays together: it holds two strips of the residual.
                    if warp::any(output.valid) {
                        let within = if matrix == Matrix::GateUp { STRIP / 2 - 1 } else { STRIP - 1 };
                        let sum = |feature: u32| {
                            let from = partial.at((output.strip * WARPS * STRIP + feature) as usize);
                            let mut sum = 0.0;
                            unroll!(W < 8; {
                                sum += from.load(W * STRIP as usize);
                            });
                            sum
                        };
                        let feature = output.feature & within;
                        self.put::<true>(&part, &output, sum(feature), old, || sum(feature + 8));
                    }
                }
                if part.mine == 0 {
                    // Asking for what comes after it, again and again, would slow down those who have a part in it.
                    input.expect();
                }
                if part.end == strips {
                    break;
                }
                part = self.part(part.index, part.end);
                first = self.first_of_one(&part);
            }
            self.ring = ring;
        }
    }

    /// This lane's output of a part of one row, and what it is combined with.
    #[inline(always)]
    pub(super) unsafe fn first_of_one(&self, part: &Part) -> (Output, Old) {
        let width_log2 = if part.matrix == Matrix::GateUp { STRIP / 2 } else { STRIP }.ilog2();
        let e = thread::fresh(thread::thread_idx_x());
        let valid = e < part.mine << width_log2;
        let strip = if valid { e >> width_log2 } else { 0 };
        let first = (part.first_strip + part.place + strip * self.walk.grid) << width_log2;
        let output = Output { row: 0, strip, feature: first + (e & !(!0 << width_log2)), valid };
        (output, unsafe { self.old::<true>(part, &output) })
    }
}
