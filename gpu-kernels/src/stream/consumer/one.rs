//! Products of a step of one row, whose input comes as [words](super::super::exchange).

use cuda_std::{mma, shared, thread, warp};

use super::{Consumer, Old, Output, Part, load, release, sync};
use crate::linear::{SLICE, STRIP};
use crate::norm::Norm;
use crate::ring::Ring;
use crate::stream::exchange::Kind;
use crate::stream::{CHUNK_FEATURES, FACTORS, Mark, Matrix, SCRATCH, STRIPS, WARPS};

/// Bytes of the partial sums that meet at a time, `[strip][warp][feature]`.
const ONE_PARTIAL: u32 = 8 * WARPS * STRIP * 4;
/// Behind two of these, which take turns: what a warp has of a product's input at a time, [`ASKED`] slices of 64 elements.
const STAGED: u32 = SCRATCH + 2 * ONE_PARTIAL;
const ASKED: usize = 8;
/// Bytes of scratch memory for one row.
pub const ONE_BYTES: u32 = STAGED - SCRATCH + ASKED as u32 * WARPS * SLICE * 2;

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
                Matrix::Qkv | Matrix::GateUp | Matrix::Head => (self.taken_in(Kind::Scaled, part.index), warp_id == 0),
            };
            let squares = self.taken_in(Kind::Squares, part.index);
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
                    let mut found = [squares.nothing(); 8];
                    if normed {
                        unroll!(I < 8; {
                            let i = lane + 32 * I as u32;
                            if i < squares.len {
                                found[I] = squares.ask(i);
                            }
                        });
                    }
                    let mut acc = [[0f32; 4]; STRIPS as usize];
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
                    // Of two places one after the other: a warp that is ahead meets the others once more before it comes back to this one.
                    self.turn ^= 1;
                    if normed {
                        let mut sum = 0.0;
                        let mut at = lane;
                        loop {
                            squares.settle(&mut found, |i| at + 32 * i as u32);
                            unroll!(I < 8; {
                                sum += f32::from_bits(found[I].bits());
                            });
                            at += 256;
                            if at - lane >= squares.len {
                                break;
                            }
                            unroll!(I < 8; {
                                let i = at + 32 * I as u32;
                                found[I] = if i < squares.len { squares.ask(i) } else { squares.nothing() };
                            });
                        }
                        let norm = Norm { dim: thread::fresh(p.residual.dim), eps: p.eps, ..Norm::default() };
                        let factor = norm.inverse_rms_of(sum);
                        if lane == 0 {
                            shared::dynamic::<f32>(FACTORS).store(part.factor() as usize, factor);
                        }
                    }
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
                    sync();
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
