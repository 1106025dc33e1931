//! What the consumers do with the chunks: products and their epilogues, and the meetings between them.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, bf16, bulk, math, mma, shared, thread, warp};

use super::ring::{PATIENCE, Ring};
use super::{ARRIVALS, BEST, CHUNK_FEATURES, FACTORS, Mark, Matrix, SCRATCH, STRIPS, StreamStep, WARPS, Walk};
use crate::embedding::{Embed, embed_elements};
use crate::kv::HEAD_DIM;
use crate::linear::{SLICE, STRIP};
use crate::norm::Norm;
use crate::sample::rank;

/// Bytes of the partial sums that meet at a time.
pub const PARTIAL_BYTES: u32 = 8 * WARPS * 8 * STRIP * 4;

/// The consumers' state.
pub struct Consumer<'a> {
    pub p: &'a StreamStep,
    /// Rows.
    pub count: u32,
    /// The last row's position.
    pub last: u32,
    pub ring: Ring,
    walk: Walk,
}

/// The 8 consumer warps of a block meet.
#[inline(always)]
pub fn sync() {
    thread::sync_named(1, WARPS * 32);
}

/// Gives a chunk back, for the whole warp, by the lanes that are told to. The copy engine must not overwrite what is still being read: without the fence
/// it did.
#[inline(always)]
unsafe fn release(chunk: &Ring, arrives: bool) {
    unsafe {
        bulk::fence_proxy_async();
        warp::sync_warp();
        if arrives {
            chunk.empty().arrive();
        }
    }
}

/// Where a partial sum lies among a warp's `[row][feature]`: such that neither the stores of a tensor core's layout nor the loads of whole rows meet a
/// bank of shared memory twice.
#[inline(always)]
const fn slot(row: u32, feature: u32) -> u32 {
    (row ^ (row >> 1 & 1)) * STRIP + (feature ^ ((row >> 2 & 1) * 8))
}

impl<'a> Consumer<'a> {
    #[inline(always)]
    pub fn new(p: &'a StreamStep, count: u32, last: u32) -> Self {
        let ring = Ring { stage: 0, parity: 0 };
        Self { p, count, last, ring, walk: Walk::new(thread::grid_dim_x()) }
    }

    /// The position of the first row; the others follow it.
    #[inline(always)]
    pub const fn first_position(&self) -> u32 {
        self.last + 1 - self.count
    }

    /// All layers and the head. The activations of `AHEAD` turns are in registers at a time: of the one in use and of those under way.
    #[inline(always)]
    pub unsafe fn run<const TILES: usize, const AHEAD: usize>(&mut self) {
        unsafe {
            self.mark(Mark::Begin);
            self.embed();
            self.mark(Mark::Embedded);
            self.meet();
            let mut index = 0;
            loop {
                let matrix = self.p.matrix(index);
                if matrix == Matrix::Output {
                    self.attention(index / 4);
                }
                self.product::<TILES, AHEAD>(matrix, index / 4);
                self.mark(match matrix {
                    Matrix::Qkv => Mark::Qkv,
                    Matrix::Output => Mark::Output,
                    Matrix::GateUp => Mark::GateUp,
                    Matrix::Down => Mark::Down,
                    Matrix::Head => Mark::Head,
                });
                index += 1;
                if index == self.p.matrices() {
                    break;
                }
                self.meet();
            }
            let row = thread::thread_idx_x();
            if row < self.count {
                let best = self.p.counters.at(StreamStep::BEST).cast::<u64>();
                let here = shared::dynamic::<u64>(BEST).load(row as usize);
                atomic::fetch_max(best, row as usize, here, Ordering::Relaxed, Scope::Device);
            }
        }
    }

    /// Notes the time, where a trace was asked for.
    #[inline(always)]
    pub unsafe fn mark(&self, mark: Mark) {
        unsafe {
            if !self.p.trace.is_null() && thread::thread_idx_x() == 0 {
                let len = StreamStep::trace_len(self.p.layer_count);
                let trace = self.p.trace.at((thread::block_idx_x() * len) as usize);
                let marks = trace.load(0) + 1;
                trace.store(marks as usize, thread::global_timer() & !0 >> 8 | (mark as u64) << 56);
                trace.store(0, marks);
            }
        }
    }

    /// Waits until the consumers of every block are here, and shows each what the others wrote.
    #[inline(always)]
    pub unsafe fn meet(&self) {
        unsafe {
            sync();
            if thread::thread_idx_x() == 0 {
                let counters = self.p.counters;
                atomic::fetch_add(counters, 0, 1, Ordering::Release, Scope::Device);
                let arrivals = shared::dynamic::<u32>(ARRIVALS);
                let all = arrivals.load(0) + thread::grid_dim_x();
                arrivals.store(0, all);
                let mut polls = 0;
                while atomic::load(counters, 0, Ordering::Acquire, Scope::Device) < all {
                    polls += 1;
                    if polls == PATIENCE {
                        thread::trap();
                    }
                }
            }
            sync();
            self.mark(Mark::Met);
        }
    }

    /// The embedding of every row, spread over the grid.
    #[inline(always)]
    unsafe fn embed(&self) {
        unsafe {
            let p = self.p;
            let norm = Global::from_raw(p.layer_word(0, 0));
            let embed = Embed { rows: p.rows, table: p.embed, residual: p.residual, norm, vocab: p.vocab };
            let grid = self.walk.grid;
            core::hint::assert_unchecked(grid > 0);
            let stride = grid * WARPS * 32;
            let mut row = 0;
            while row < self.count {
                // Of another row, other blocks take the beginning.
                let block = (thread::block_idx_x() + row * (p.residual.dim / (WARPS * 32))) % grid;
                embed_elements(&embed, row, block * (WARPS * 32) + thread::thread_idx_x(), stride);
                row += 1;
            }
        }
    }

    /// The input of a matrix: its first row, and the norm that it has yet to be divided by.
    #[inline(always)]
    fn input(&self, matrix: Matrix) -> (Global<bf16>, Norm) {
        let p = self.p;
        match matrix {
            Matrix::Output => (p.attended.read(), Norm::default()),
            Matrix::Down => (p.activation.read(), Norm::default()),
            Matrix::Qkv | Matrix::GateUp | Matrix::Head => {
                (p.residual.scaled.read(), Norm { squares: p.residual.squares.read(), dim: p.residual.dim, eps: p.eps })
            }
        }
    }

    /// A matrix product over all its passes, and what becomes of its outputs.
    #[inline(always)]
    unsafe fn product<const TILES: usize, const AHEAD: usize>(&mut self, matrix: Matrix, layer: u32) {
        unsafe {
            let (grid, block) = (thread::grid_dim_x(), thread::block_idx_x());
            // What follows from these is found again for each matrix, not kept over all layers in registers.
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
            let (g, t) = (lane / 4, lane % 4);
            core::hint::assert_unchecked(self.count > 0);
            let (strips, k) = self.p.shape(matrix);
            core::hint::assert_unchecked(k > 0);
            let (x, norm) = self.input(matrix);
            let first_feature = warp_id * SLICE + t * 8;
            // This warp's slice of every row in turn `q`. Columns without a row compute the last row again, which nobody reads; beyond the end of a row
            // the weights are zero, and any of its elements will do: a condition would make the compiler wait for the load where it ends.
            let fetch = |q: u32| {
                let mut b = [[[0u32; 4]; 2]; TILES];
                let feature = q * CHUNK_FEATURES + first_feature;
                let feature = if feature < k { feature } else { first_feature % k };
                unroll!(T < TILES of 2; {
                    let row = (T as u32 * 8 + g).min(self.count - 1);
                    let x = x.at((row * k + feature) as usize);
                    b[T] = [x.load16(0), x.load16(32)];
                });
                b
            };
            // A lane's part of a chunk.
            let load = |ring: &Ring| {
                ring.wait_full();
                let from = shared::dynamic::<u32>(ring.offset() + warp_id * (SLICE * STRIP * 2) + lane * 16);
                [from.load16(0), from.load16(128), from.load16(256), from.load16(384)]
            };
            let mut ring = self.ring;
            let mut first_strip = 0;
            while first_strip < strips {
                let pass = self.walk.pass(strips - first_strip, k);
                let place = pass.place(block, grid);
                let mine = pass.mine(place, grid);
                let mut acc = [[[0f32; 4]; TILES]; STRIPS as usize];
                let mut b = [[[[0u32; 4]; 2]; TILES]; AHEAD];
                unroll!(A < AHEAD of 4; {
                    if A + 1 < AHEAD {
                        b[A] = fetch(A as u32);
                    }
                });
                if first_strip == 0 && !norm.squares.is_null() {
                    self.factors(norm, lane, warp_id);
                }
                let mut turn = 0;
                while turn < pass.depth {
                    unroll!(A < AHEAD of 4; {
                        let q = turn + A as u32;
                        if q < pass.depth {
                            b[(A + AHEAD - 1) % AHEAD] = fetch(q + AHEAD as u32 - 1);
                            // Two chains of products at a time, of strips or of tiles: each waits for the one before it.
                            unroll!(P < 4; {
                                let strip = 2 * P;
                                if TILES == 1 && strip as u32 + 1 < mine {
                                    let next = ring.ahead(1);
                                    let (low, high) = (load(&ring), load(&next));
                                    release(if lane == 0 { &ring } else { &next }, lane < 2);
                                    unroll!(I < 4; {
                                        unroll!(T < TILES of 2; {
                                            let b = [b[A][T][I / 2][I % 2 * 2], b[A][T][I / 2][I % 2 * 2 + 1]];
                                            acc[strip][T] = mma::m16n8k16_bf16(acc[strip][T], low[I], b);
                                            acc[strip + 1][T] = mma::m16n8k16_bf16(acc[strip + 1][T], high[I], b);
                                        });
                                    });
                                    ring = ring.ahead(2);
                                } else {
                                    unroll!(S < 2; {
                                        if ((strip + S) as u32) < mine {
                                            let a = load(&ring);
                                            release(&ring, lane == 0);
                                            unroll!(I < 4; {
                                                unroll!(T < TILES of 2; {
                                                    let b = [b[A][T][I / 2][I % 2 * 2], b[A][T][I / 2][I % 2 * 2 + 1]];
                                                    let sum = &mut acc[strip + S][T];
                                                    *sum = mma::m16n8k16_bf16(*sum, a[I], b);
                                                });
                                            });
                                            ring = ring.ahead(1);
                                        }
                                    });
                                }
                            });
                        }
                    });
                    turn += AHEAD as u32;
                }
                self.epilogue::<TILES>(&acc, &Part { matrix, layer, first_strip, place, mine });
                first_strip += pass.strips;
            }
            self.ring = ring;
        }
    }

    /// Finds every row's norm factor; known to all after they next meet.
    #[inline(always)]
    unsafe fn factors(&self, norm: Norm, lane: u32, warp_id: u32) {
        unsafe {
            let factors = shared::dynamic::<f32>(FACTORS);
            let mut row = warp_id;
            while row < self.count {
                let factor = norm.inverse_rms(row);
                if lane == 0 {
                    factors.store(row as usize, factor);
                }
                row += WARPS;
            }
        }
    }

    /// Adds the warps' sums, a few strips at a time, and puts them where they belong.
    #[inline(always)]
    unsafe fn epilogue<const TILES: usize>(&self, acc: &[[[f32; 4]; TILES]; STRIPS as usize], part: &Part) {
        unsafe {
            // Found again: kept from before the product, addresses would crowd out accumulators.
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
            let (g, t) = (lane / 4, lane % 4);
            // `[strip][warp][row][feature]`
            let partial = shared::dynamic::<f32>(SCRATCH);
            let warp_words = TILES as u32 * 8 * STRIP;
            let batch = STRIPS / TILES as u32;
            unroll!(R < TILES of 2; {
                let first = R as u32 * batch;
                if first < part.mine {
                    unroll!(S < 8; {
                        if S as u32 / batch == R as u32 && (S as u32) < part.mine {
                            let to = partial.at(((S as u32 % batch * WARPS + warp_id) * warp_words) as usize);
                            unroll!(T < TILES of 2; {
                                unroll!(E < 4; {
                                    let row = T as u32 * 8 + 2 * t + E as u32 % 2;
                                    if row < self.count {
                                        to.store(slot(row, g + E as u32 / 2 * 8) as usize, acc[S][T][E]);
                                    }
                                });
                            });
                        }
                    });
                    let here = (part.mine - first).min(batch);
                    let width = if part.matrix == Matrix::GateUp { STRIP / 2 } else { STRIP };
                    let total = here * self.count * width;
                    let mut e = warp_id * 32 + lane;
                    let mut output = self.output(part, first, width, e, total);
                    let mut old = self.old(part, &output);
                    sync();
                    // A warp stays together: it holds two strips of the residual.
                    while e - lane < total {
                        let sum = |feature: u32| {
                            let from = partial.at((output.strip * WARPS * warp_words + slot(output.row, feature)) as usize);
                            let mut sum = 0.0;
                            unroll!(W < 8; {
                                sum += from.load(W * warp_words as usize);
                            });
                            sum
                        };
                        self.put(part, &output, sum(output.feature % width), old, || sum(output.feature % width + 8));
                        e += WARPS * 32;
                        output = self.output(part, first, width, e, total);
                        old = self.old(part, &output);
                    }
                    sync();
                }
            });
        }
    }

    /// The `e`-th output of a batch of strips.
    #[inline(always)]
    fn output(&self, part: &Part, first: u32, width: u32, e: u32, total: u32) -> Output {
        // SAFETY: a step has rows, and strips have features.
        unsafe { core::hint::assert_unchecked(self.count > 0 && width > 0) };
        let valid = e < total;
        let (feature, rest) = (e % width, if valid { e / width } else { 0 });
        let (row, strip) = (rest % self.count, rest / self.count);
        let place = part.first_strip + (first + strip) * self.walk.grid + part.place;
        Output { row, strip, feature: place * width + feature, valid }
    }

    /// The element of the residual that an output is added to: loaded before the sums are known.
    #[inline(always)]
    unsafe fn old(&self, part: &Part, output: &Output) -> f32 {
        let residual = &self.p.residual;
        if matches!(part.matrix, Matrix::Output | Matrix::Down) && output.valid {
            unsafe { residual.x.load((output.row * residual.dim + output.feature) as usize) }
        } else {
            0.0
        }
    }

    /// Puts one output where it belongs; `up` is the sum of the up feature beside a gate's.
    #[inline(always)]
    unsafe fn put(&self, part: &Part, output: &Output, sum: f32, old: f32, up: impl Fn() -> f32) {
        unsafe {
            let p = self.p;
            let &Output { row, feature, valid, .. } = output;
            let factor = || shared::dynamic::<f32>(FACTORS).load(row as usize);
            match part.matrix {
                Matrix::Qkv => {
                    if valid {
                        let heads = (p.q_heads + 2 * p.kv_heads) * HEAD_DIM;
                        p.qkv.store((row * heads + feature) as usize, sum * factor());
                    }
                }
                Matrix::Output | Matrix::Down => {
                    let norm = match part.matrix {
                        Matrix::Output => Global::from_raw(p.layer_word(part.layer, 3)),
                        _ if part.layer + 1 == p.layer_count => p.final_norm,
                        _ => Global::from_raw(p.layer_word(part.layer + 1, 0)),
                    };
                    p.residual.put(norm, row, feature, old + sum, valid);
                }
                Matrix::GateUp => {
                    if valid && feature < p.intermediate {
                        let (gate, up) = (sum * factor(), up() * factor());
                        let silu = gate / (1.0 + math::exp(-gate));
                        p.activation.store((row * p.intermediate + feature) as usize, math::to_bf16(silu * up));
                    }
                }
                Matrix::Head => {
                    let valid = valid && feature < p.vocab;
                    let logit = sum * factor();
                    if valid {
                        p.logits.store(row as usize * p.vocab as usize + feature as usize, logit);
                    }
                    let mut best = if valid { rank(logit, feature) } else { 0 };
                    let mut mask = STRIP / 2;
                    while mask > 0 {
                        best = best.max(warp::shuffle_xor(best, mask));
                        mask /= 2;
                    }
                    if output.valid && feature.is_multiple_of(STRIP) {
                        let bests = shared::dynamic::<u64>(BEST);
                        atomic::fetch_max(bests, row as usize, best, Ordering::Relaxed, Scope::Block);
                    }
                }
            }
        }
    }
}

/// A block's part of a pass.
struct Part {
    matrix: Matrix,
    layer: u32,
    first_strip: u32,
    place: u32,
    mine: u32,
}

/// One output of a batch of strips.
struct Output {
    row: u32,
    /// The strip within the batch.
    strip: u32,
    feature: u32,
    /// Whether there is one.
    valid: bool,
}
