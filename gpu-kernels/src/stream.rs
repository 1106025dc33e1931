//! A decode step's forward pass in one launch: the weights are streamed, and never stop.
//!
//! Decode is bound by reading every weight once a step. Launch by launch, memory idles at every boundary; here one cooperative launch of a
//! block on each multiprocessor runs all layers:
//!
//! ```text
//! warp 8        producer   weights ──bulk copies──► ring of 12 × 16 KiB in shared memory        (runs ahead of everything)
//! warps 0 to 7  consumers  ring ──► tensor cores ──► epilogue; at a boundary only these meet the other blocks
//! ```
//!
//! Weights do not depend on activations, so the producer passes every boundary without stopping: while consumers meet, normalise or
//! attend, the ring fills (192 KiB a block is 8 µs of an H100's memory).
//!
//! # Layout of the weights
//! A *strip* is 16 output features; a *chunk* is a strip's 512 input features, 16 KiB: for each of the 8 warps its [slice](crate::linear::SLICE), and of a
//! slice each lane's A fragments, 16 bytes contiguous. A *pass* is a matrix or a part of one: up to [`STRIPS`] strips a block, dealt in rotation that continues from pass to pass, so
//! that totals match. Memory holds the chunks in the order in which the whole grid consumes them: by input chunk, then by a block's strip,
//! then by block. Strips that a block lacks leave a hole. Within a gate-up strip rows 0 to 7 are gate features and rows 8 to 15 their
//! up features, so that SwiGLU stays in the lane's block. [`lay_out`] makes this order from a checkpoint's.
//!
//! # Order
//! Slices go to warps, and sums over warps run, as in [`linear`](crate::linear): this kernel gives its bits, whatever the grid.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::bulk::{self, Barrier};
use cuda_std::shared;
use cuda_std::{Global, GlobalMut, bf16, kernel, math, mma, thread, warp};

use crate::attention::{Attend, Combine, SPLIT, attend_block, combine_dimension};
use crate::kv::{Cache, HEAD_DIM};
use crate::linear::{SLICE, STRIP};
use crate::norm::inverse_rms;
use crate::qkv::{SplitHeads, split_head};
use crate::step::{MAX_DECODE_ROWS, Rows};

/// Bytes of a chunk.
pub const CHUNK_BYTES: u32 = 16384;
/// Input features of a chunk.
pub const CHUNK_FEATURES: u32 = WARPS * SLICE;
/// Most strips of a block in a pass: what the accumulators have room for.
pub const STRIPS: u32 = 8;
/// Words of a layer's entry in [`StreamStep::layers`].
pub const LAYER_WORDS: usize = 5;
/// Threads of a block.
pub const THREADS: u32 = 288;
/// Dynamic shared memory of a block.
pub const SHARED_BYTES: u32 = SCALES + MAX_DECODE_ROWS * 4 + 16;

const WARPS: u32 = 8;
const STAGES: u32 = 12;
const SCRATCH: u32 = STAGES * CHUNK_BYTES;
const SCRATCH_BYTES: u32 = 32768;
const BARRIERS: u32 = SCRATCH + SCRATCH_BYTES;
const SCALES: u32 = BARRIERS + 2 * STAGES * 8;
/// Polls of a wait before the step is given up: seconds, where a step takes milliseconds.
const PATIENCE: u32 = 1 << 23;

/// How a matrix's strips fall to blocks and memory: walked alike by the producer, the consumers and [`lay_out`]'s caller.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    /// Blocks.
    pub grid: u32,
    /// Chunks passed so far, holes included: where the next pass begins.
    pub chunks: u64,
    /// The block that gets the next pass's first strip.
    pub rotation: u32,
}

/// One pass of a [`Walk`].
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Where it begins in memory, in chunks.
    pub base: u64,
    /// The block that gets its first strip.
    pub rotation: u32,
    /// Strips.
    pub strips: u32,
    /// Chunks of a strip.
    pub depth: u32,
}

impl Walk {
    /// At the start.
    pub const fn new(grid: u32) -> Self {
        Self { grid, chunks: 0, rotation: 0 }
    }

    /// The next pass: as many of the `left` strips as a pass takes, of `k` input features.
    #[inline(always)]
    pub fn pass(&mut self, left: u32, k: u32) -> Pass {
        // SAFETY: a grid has blocks.
        unsafe { core::hint::assert_unchecked(self.grid > 0) };
        let strips = left.min(STRIPS * self.grid);
        let depth = k.div_ceil(CHUNK_FEATURES);
        let pass = Pass { base: self.chunks, rotation: self.rotation, strips, depth };
        let rounds = strips.div_ceil(self.grid);
        self.chunks += rounds as u64 * self.grid as u64 * depth as u64;
        self.rotation = (self.rotation + strips) % self.grid;
        pass
    }
}

impl Pass {
    /// A block's place in the pass's rotation: strip `i · grid + place` is its `i`-th.
    #[inline(always)]
    fn place(&self, block: u32, grid: u32) -> u32 {
        if block >= self.rotation { block - self.rotation } else { block + grid - self.rotation }
    }

    /// Strips of the block at `place`.
    #[inline(always)]
    fn mine(&self, place: u32, grid: u32) -> u32 {
        // SAFETY: a grid has blocks.
        unsafe { core::hint::assert_unchecked(grid > 0) };
        if place < self.strips { (self.strips - place).div_ceil(grid) } else { 0 }
    }

    /// The chunk in memory of input chunk `q` of a block's `i`-th strip.
    #[inline(always)]
    pub fn chunk(&self, q: u32, i: u32, place: u32, grid: u32) -> u64 {
        // SAFETY: a grid has blocks.
        unsafe { core::hint::assert_unchecked(grid > 0) };
        let rounds = self.strips.div_ceil(grid);
        self.base + ((q * rounds + i) as u64) * grid as u64 + place as u64
    }
}

/// Parameters of [`lay_out`]. Grid: (strips of the pass, depth of the pass).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LayOut {
    /// `[n, k]` as in the checkpoint; the gate's when `up` is not null.
    pub weight: Global<bf16>,
    /// `[n, k]` the up projection's; null otherwise.
    pub up: Global<bf16>,
    /// The stream.
    pub stream: GlobalMut<bf16>,
    /// [`Pass::base`].
    pub base: u64,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// The matrix's first strip in this pass.
    pub first_strip: u32,
    /// [`Pass::strips`].
    pub strips: u32,
    /// Blocks of the step.
    pub blocks: u32,
}

/// Copies a pass's weights into the order of the stream; what lies beyond the matrix becomes zero.
#[kernel(threads = 256)]
pub unsafe fn lay_out(p: LayOut) {
    unsafe {
        let (strip, q) = (thread::block_idx_x(), thread::block_idx_y());
        core::hint::assert_unchecked(p.blocks > 0);
        let pass = Pass { base: p.base, rotation: 0, strips: p.strips, depth: 0 };
        let chunk = pass.chunk(q, strip / p.blocks, strip % p.blocks, p.blocks);
        let to = p.stream.at((chunk * (CHUNK_BYTES / 2) as u64) as usize);
        let mut fragment = thread::thread_idx_x();
        while fragment < CHUNK_BYTES / 16 {
            let lane = fragment % 32;
            let (g, t) = (lane / 4, lane % 4);
            let step = fragment / 32 % 4;
            let k = q * CHUNK_FEATURES + fragment / 128 * SLICE + step / 2 * 32 + t * 8 + step % 2 * 4;
            let strip = p.first_strip + strip;
            let (low_row, high_row, high) = if p.up.is_null() {
                (strip * STRIP + g, strip * STRIP + 8 + g, p.weight)
            } else {
                (strip * (STRIP / 2) + g, strip * (STRIP / 2) + g, p.up)
            };
            let words = |matrix: Global<bf16>, row: u32| {
                if row < p.n && k < p.k {
                    let at = matrix.at(row as usize * p.k as usize + k as usize).cast::<u32>();
                    [at.load(0), at.load(1)]
                } else {
                    [0; 2]
                }
            };
            let (l, h) = (words(p.weight, low_row), words(high, high_row));
            to.store16(fragment as usize * 8, [l[0], h[0], l[1], h[1]]);
            fragment += 256;
        }
    }
}

/// Parameters of [`stream_8`] and [`stream_16`]. Cooperative; grid: blocks as [`lay_out`] was told. Shared memory: [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StreamStep {
    /// The rows of this step: at most 8 or 16.
    pub rows: Rows,
    /// The weights, as [`lay_out`] left them: for each layer QKV, output, gate-up, down; then the head.
    pub stream: Global<bf16>,
    /// `[layers, LAYER_WORDS]` addresses: input norm, query norm, key norm, post-attention norm, cache pages.
    pub layers: Global<u64>,
    /// `[vocab, hidden]`, as in the checkpoint.
    pub embed: Global<bf16>,
    /// `[hidden]`.
    pub final_norm: Global<bf16>,
    /// `[positions, 64]` cosines.
    pub cos: Global<f32>,
    /// `[positions, 64]` sines.
    pub sin: Global<f32>,
    /// Page tables, as [`Cache::tables`].
    pub tables: Global<u32>,
    /// `[rows, hidden]`.
    pub residual: GlobalMut<f32>,
    /// `[rows, (q_heads + 2 · kv_heads) · 128]`.
    pub qkv: GlobalMut<f32>,
    /// `[rows, q_heads · 128]`.
    pub q: GlobalMut<bf16>,
    /// As [`Attend::sums`].
    pub sums: GlobalMut<f32>,
    /// As [`Attend::scales`].
    pub scales: GlobalMut<f32>,
    /// `[rows, q_heads · 128]`.
    pub attended: GlobalMut<bf16>,
    /// `[rows, intermediate]`.
    pub activation: GlobalMut<bf16>,
    /// `[rows, vocab]`, the result.
    pub logits: GlobalMut<f32>,
    /// [`StreamStep::counters`] words, zero at the start.
    pub counters: GlobalMut<u32>,
    /// Layers.
    pub layer_count: u32,
    /// Hidden size.
    pub hidden: u32,
    /// Intermediate size.
    pub intermediate: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Key-value heads.
    pub kv_heads: u32,
    /// Tokens.
    pub vocab: u32,
    /// Entries of a page table.
    pub table_stride: u32,
    /// As [`Attend::splits`].
    pub splits: u32,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// The matrices of a layer, in the order of the stream, and the head.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Matrix {
    Qkv,
    Output,
    GateUp,
    Down,
    Head,
}

impl StreamStep {
    /// Counters that a step needs: the grid's meetings, and one for each tile of attention.
    pub const fn counters(kv_heads: u32) -> u32 {
        1 + kv_heads * MAX_DECODE_ROWS
    }

    /// Strips and input features of a matrix.
    #[inline(always)]
    fn shape(&self, matrix: Matrix) -> (u32, u32) {
        let q = self.q_heads * HEAD_DIM;
        let (n, k) = match matrix {
            Matrix::Qkv => (q + 2 * self.kv_heads * HEAD_DIM, self.hidden),
            Matrix::Output => (self.hidden, q),
            Matrix::GateUp => (2 * self.intermediate, self.hidden),
            Matrix::Down => (self.hidden, self.intermediate),
            Matrix::Head => (self.vocab, self.hidden),
        };
        (n.div_ceil(STRIP), k)
    }
}

/// Where a role stands in the ring.
#[derive(Clone, Copy)]
struct Ring {
    stage: u32,
    parity: u32,
}

impl Ring {
    #[inline(always)]
    unsafe fn full(&self) -> Barrier {
        unsafe { Barrier::at(shared::dynamic(BARRIERS + self.stage * 8)) }
    }

    #[inline(always)]
    unsafe fn empty(&self) -> Barrier {
        unsafe { Barrier::at(shared::dynamic(BARRIERS + (STAGES + self.stage) * 8)) }
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.stage += 1;
        if self.stage == STAGES {
            self.stage = 0;
            self.parity ^= 1;
        }
    }
}

/// Waits for a phase of a barrier; gives the step up rather than hang.
#[inline(always)]
unsafe fn wait(barrier: Barrier, parity: u32) {
    unsafe {
        let mut polls = 0;
        while !barrier.try_wait(parity) {
            polls += 1;
            if polls == PATIENCE {
                thread::trap();
            }
        }
    }
}

/// The producer: one lane walks every pass and keeps the ring full.
#[inline(always)]
unsafe fn produce(p: &StreamStep) {
    unsafe {
        let (block, grid) = (thread::block_idx_x(), thread::grid_dim_x());
        let mut walk = Walk::new(grid);
        // The first turn finds every stage empty.
        let mut ring = Ring { stage: 0, parity: 1 };
        let mut index = 0;
        let matrices = 4 * p.layer_count + 1;
        while index < matrices {
            let matrix = match index % 4 {
                _ if index == matrices - 1 => Matrix::Head,
                0 => Matrix::Qkv,
                1 => Matrix::Output,
                2 => Matrix::GateUp,
                _ => Matrix::Down,
            };
            let (mut left, k) = p.shape(matrix);
            while left > 0 {
                let pass = walk.pass(left, k);
                left -= pass.strips;
                let place = pass.place(block, grid);
                let mine = pass.mine(place, grid);
                let mut q = 0;
                while q < pass.depth {
                    let mut i = 0;
                    while i < mine {
                        wait(ring.empty(), ring.parity);
                        ring.full().arrive_expect_tx(CHUNK_BYTES);
                        let from = (pass.chunk(q, i, place, grid) * (CHUNK_BYTES / 2) as u64) as usize;
                        let to = shared::dynamic::<u8>(ring.stage * CHUNK_BYTES);
                        bulk::copy_to_shared(to, p.stream.at(from).cast(), CHUNK_BYTES, ring.full());
                        ring.advance();
                        i += 1;
                    }
                    q += 1;
                }
            }
            index += 1;
        }
    }
}

/// The consumers' state.
struct Consumer<'a> {
    p: &'a StreamStep,
    count: u32,
    walk: Walk,
    ring: Ring,
    meetings: u32,
}

/// The 8 consumer warps of a block meet.
#[inline(always)]
fn sync() {
    thread::sync_named(1, WARPS * 32);
}

impl Consumer<'_> {
    /// Waits until the consumers of every block are here, and shows each what the others wrote.
    #[inline(always)]
    unsafe fn meet(&mut self) {
        unsafe {
            self.meetings += 1;
            sync();
            if thread::thread_idx_x() == 0 {
                let counters = self.p.counters;
                atomic::fetch_add(counters, 0, 1, Ordering::Release, Scope::Device);
                let all = self.meetings * thread::grid_dim_x();
                let mut polls = 0;
                while atomic::load(counters, 0, Ordering::Acquire, Scope::Device) < all {
                    polls += 1;
                    if polls == PATIENCE {
                        thread::trap();
                    }
                }
            }
            sync();
        }
    }

    /// Finds every row's norm factor.
    #[inline(always)]
    unsafe fn norms(&self) {
        unsafe {
            let scales = shared::dynamic::<f32>(SCALES);
            let mut row = thread::warp_id();
            while row < self.count {
                let x = self.p.residual.read().at(row as usize * self.p.hidden as usize);
                let scale = inverse_rms(x, self.p.hidden, self.p.eps);
                if thread::lane_id() == 0 {
                    scales.store(row as usize, scale);
                }
                row += WARPS;
            }
            sync();
        }
    }

    /// Starts to load eight inputs of a row from feature `k` on: bf16, or f32 and the weight of the norm that comes first.
    #[inline(always)]
    unsafe fn fetch(&self, matrix: Matrix, norm: Global<bf16>, row: u32, k: u32) -> [[u32; 4]; 3] {
        unsafe {
            let (p, row, k) = (self.p, row as usize, k as usize);
            match matrix {
                Matrix::Output => [self.p.attended.load16(row * (p.q_heads * HEAD_DIM) as usize + k), [0; 4], [0; 4]],
                Matrix::Down => [self.p.activation.load16(row * p.intermediate as usize + k), [0; 4], [0; 4]],
                Matrix::Qkv | Matrix::GateUp | Matrix::Head => {
                    let x = self.p.residual.at(row * p.hidden as usize + k);
                    [x.load16(0), x.load16(4), norm.load16_nc(k)]
                }
            }
        }
    }

    /// What [`fetch`](Self::fetch) loaded, as bf16.
    #[inline(always)]
    unsafe fn finish(&self, matrix: Matrix, row: u32, [x0, x1, w]: [[u32; 4]; 3]) -> [u32; 4] {
        unsafe {
            if matrix == Matrix::Output || matrix == Matrix::Down {
                return x0;
            }
            let scale = shared::dynamic::<f32>(SCALES).load(row as usize);
            let pair = |a: u32, b: u32, w: u32| {
                let [w0, w1] = math::unpack_bf16(w);
                math::pack_bf16(f32::from_bits(a) * scale * w0, f32::from_bits(b) * scale * w1)
            };
            [pair(x0[0], x0[1], w[0]), pair(x0[2], x0[3], w[1]), pair(x1[0], x1[1], w[2]), pair(x1[2], x1[3], w[3])]
        }
    }

    /// A matrix product over all its passes, and what becomes of its outputs.
    #[inline(always)]
    unsafe fn matrix<const TILES: usize>(&mut self, matrix: Matrix, norm: Global<bf16>) {
        unsafe {
            let (grid, block) = (thread::grid_dim_x(), thread::block_idx_x());
            // What follows from these is found again for each matrix, not kept over all layers in registers.
            let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
            let (g, t) = (lane / 4, lane % 4);
            let (strips, k) = self.p.shape(matrix);
            core::hint::assert_unchecked(self.count > 0);
            // Columns without a row compute the last row again, which nobody reads.
            let row = |tile: usize| (tile as u32 * 8 + g).min(self.count - 1);
            let mut first_strip = 0;
            while first_strip < strips {
                let pass = self.walk.pass(strips - first_strip, k);
                let place = pass.place(block, grid);
                let mine = pass.mine(place, grid);
                let mut acc = [[[0f32; 4]; TILES]; STRIPS as usize];
                // This warp's slice of every row, one chunk ahead of its use.
                let mut ahead = [[[[0u32; 4]; 3]; 2]; TILES];
                let mut q = 0;
                while q <= pass.depth {
                    let mut b = [[[0u32; 4]; 2]; TILES];
                    let feature = q * CHUNK_FEATURES + warp_id * SLICE + t * 8;
                    // Fetched in the turn before, if it was there.
                    if q > 0 && feature - CHUNK_FEATURES < k {
                        unroll!(T < TILES; {
                            b[T][0] = self.finish(matrix, row(T), ahead[T][0]);
                            b[T][1] = self.finish(matrix, row(T), ahead[T][1]);
                        });
                    }
                    if feature < k {
                        unroll!(T < TILES; {
                            ahead[T][0] = self.fetch(matrix, norm, row(T), feature);
                            ahead[T][1] = self.fetch(matrix, norm, row(T), feature + 32);
                        });
                    }
                    if q == 0 {
                        q = 1;
                        continue;
                    }
                    unroll!(S < STRIPS as usize; {
                        if (S as u32) < mine {
                            wait(self.ring.full(), self.ring.parity);
                            let from = self.ring.stage * CHUNK_BYTES + warp_id * (SLICE * STRIP * 2) + lane * 16;
                            let from = shared::dynamic::<u32>(from);
                            unroll!(I < 4; {
                                let a = from.load16(I * 128);
                                unroll!(T < TILES; {
                                    let b = b[T][I / 2];
                                    acc[S][T] = mma::m16n8k16_bf16(acc[S][T], a, [b[I % 2 * 2], b[I % 2 * 2 + 1]]);
                                });
                            });
                            warp::sync_warp();
                            if lane == 0 {
                                self.ring.empty().arrive();
                            }
                            self.ring.advance();
                        }
                    });
                    q += 1;
                }

                // The sums over warps, a few strips at a time: `[strip][warp][row][feature]`.
                let batch = 8 / TILES as u32;
                let partial = shared::dynamic::<f32>(SCRATCH);
                let strip_words = WARPS * TILES as u32 * 8 * STRIP;
                unroll!(R < 2; {
                    let first = R as u32 * batch;
                    if first < mine {
                        unroll!(S < STRIPS as usize; {
                            if S as u32 / batch == R as u32 && (S as u32) < mine {
                                let at = (S as u32 % batch) * strip_words + warp_id * (TILES as u32 * 8 * STRIP) + g;
                                unroll!(T < TILES; {
                                    let at = at + (T as u32 * 8 + 2 * t) * STRIP;
                                    partial.store(at as usize, acc[S][T][0]);
                                    partial.store((at + STRIP) as usize, acc[S][T][1]);
                                    partial.store((at + 8) as usize, acc[S][T][2]);
                                    partial.store((at + STRIP + 8) as usize, acc[S][T][3]);
                                });
                            }
                        });
                        sync();
                        let here = (mine - first).min(batch);
                        let width = if matrix == Matrix::GateUp { STRIP / 2 } else { STRIP };
                        let mut e = thread::thread_idx_x();
                        while e < here * self.count * width {
                            let (feature, rest) = (e % width, e / width);
                            let (row, i) = (rest % self.count, rest / self.count);
                            let strip = first_strip + (first + i) * grid + place;
                            let sum = |feature: u32| {
                                let at = i * strip_words + row * STRIP + feature;
                                let mut sum = 0.0;
                                let mut w = 0;
                                while w < WARPS {
                                    sum += partial.load((at + w * (TILES as u32 * 8 * STRIP)) as usize);
                                    w += 1;
                                }
                                sum
                            };
                            self.output(matrix, row, strip * width + feature, sum(feature), |s| sum(feature + s));
                            e += WARPS * 32;
                        }
                        sync();
                    }
                });
                first_strip += pass.strips;
            }
        }
    }

    /// Puts one output where it belongs; `other(s)` is the sum `s` features on in the strip.
    #[inline(always)]
    unsafe fn output(&self, matrix: Matrix, row: u32, feature: u32, sum: f32, other: impl Fn(u32) -> f32) {
        unsafe {
            let (p, r, f) = (self.p, row as usize, feature as usize);
            match matrix {
                Matrix::Qkv => self.p.qkv.store(r * ((p.q_heads + 2 * p.kv_heads) * HEAD_DIM) as usize + f, sum),
                Matrix::Output | Matrix::Down => {
                    if feature < p.hidden {
                        let at = r * p.hidden as usize + f;
                        self.p.residual.store(at, self.p.residual.load(at) + sum);
                    }
                }
                Matrix::GateUp => {
                    if feature < p.intermediate {
                        let silu = sum / (1.0 + math::exp(-sum));
                        let up = other(STRIP / 2);
                        self.p.activation.store(r * p.intermediate as usize + f, math::to_bf16(silu * up));
                    }
                }
                Matrix::Head => {
                    if feature < p.vocab {
                        self.p.logits.store(r * p.vocab as usize + f, sum);
                    }
                }
            }
        }
    }

    /// The embedding of every row, spread over the grid.
    #[inline(always)]
    unsafe fn embed_rows(&self) {
        unsafe {
            let p = self.p;
            core::hint::assert_unchecked(p.hidden >= 8);
            let words = p.hidden / 8;
            core::hint::assert_unchecked(words > 0);
            let mut e = thread::block_idx_x() * (WARPS * 32) + thread::thread_idx_x();
            while e < self.count * words {
                let (row, i) = (e / words, e % words * 8);
                let token = p.rows.tokens.load(row as usize).min(p.vocab - 1);
                let from = self.p.embed.load16_nc(token as usize * p.hidden as usize + i as usize);
                let to = self.p.residual.at((row * p.hidden + i) as usize);
                unroll!(J < 4; {
                    let [low, high] = math::unpack_bf16(from[J]);
                    to.store(2 * J, low);
                    to.store(2 * J + 1, high);
                });
                e += thread::grid_dim_x() * (WARPS * 32);
            }
        }
    }

    /// Attention over the grid: a block takes a key-value head, a split and a tile at a time; the last block of a tile combines its splits.
    #[inline(always)]
    unsafe fn attention(&self, cache: Cache) {
        unsafe {
            let p = self.p;
            core::hint::assert_unchecked(p.kv_heads > 0);
            let group = p.q_heads / p.kv_heads;
            core::hint::assert_unchecked(group > 0 && group <= 16);
            let tile_rows = Attend::tile_rows(group);
            core::hint::assert_unchecked(tile_rows > 0);
            let tiles = self.count.div_ceil(tile_rows);
            core::hint::assert_unchecked(tiles > 0);
            let last = p.rows.positions.load((self.count - 1) as usize);
            let splits = last / SPLIT + 1;
            let attend = Attend {
                rows: p.rows,
                q: self.p.q.read(),
                cache,
                sums: self.p.sums,
                scales: self.p.scales,
                splits: p.splits,
                q_heads: p.q_heads,
                scale: 1.0 / math::sqrt(HEAD_DIM as f32),
            };
            let combine = Combine {
                rows: p.rows,
                sums: self.p.sums.read(),
                scales: self.p.scales.read(),
                out: self.p.attended,
                splits: p.splits,
                q_heads: p.q_heads,
            };
            let flag = shared::dynamic::<u32>(SCALES + MAX_DECODE_ROWS * 4);
            let mut item = thread::block_idx_x();
            while item < p.kv_heads * tiles * splits {
                let (kv_head, rest) = (item % p.kv_heads, item / p.kv_heads);
                let (tile, split) = (rest % tiles, rest / tiles);
                let first_row = tile * tile_rows;
                let rows = tile_rows.min(self.count - first_row);
                let last = p.rows.positions.load((first_row + rows - 1) as usize);
                // A tile's rows may end splits before the step's last row does.
                if split * SPLIT <= last {
                    let lane = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
                    attend_block(&attend, kv_head, split, tile, lane, SCRATCH);
                    sync();
                    if thread::thread_idx_x() == 0 {
                        let counter = (1 + kv_head * MAX_DECODE_ROWS + tile) as usize;
                        let before = atomic::fetch_add(self.p.counters, counter, 1, Ordering::AcqRel, Scope::Device);
                        let is_last = before == last / SPLIT;
                        if is_last {
                            atomic::store(self.p.counters, counter, 0, Ordering::Relaxed, Scope::Device);
                        }
                        flag.store(0, is_last as u32);
                    }
                    sync();
                    if flag.load(0) == 1 {
                        let mut e = thread::thread_idx_x();
                        while e < rows * group * HEAD_DIM {
                            let pair = e / HEAD_DIM;
                            let (row, head) = (first_row + pair / group, kv_head * group + pair % group);
                            combine_dimension(&combine, row, head, (e % HEAD_DIM) as usize);
                            e += WARPS * 32;
                        }
                    }
                    sync();
                }
                item += thread::grid_dim_x();
            }
        }
    }

    /// Norm, rotation and cache append of every head, spread over the grid's warps.
    #[inline(always)]
    unsafe fn heads(&self, q_norm: Global<bf16>, k_norm: Global<bf16>, cache: Cache) {
        unsafe {
            let p = self.p;
            let split = SplitHeads {
                rows: p.rows,
                qkv: self.p.qkv.read(),
                q_norm,
                k_norm,
                cos: self.p.cos,
                sin: self.p.sin,
                q: self.p.q,
                cache,
                q_heads: p.q_heads,
                eps: p.eps,
            };
            let heads = split.heads();
            core::hint::assert_unchecked(heads > 0);
            // Neighbouring warps of different blocks: few heads then spread over many multiprocessors.
            let mut item = thread::warp_id() * thread::grid_dim_x() + thread::block_idx_x();
            while item < self.count * heads {
                split_head(&split, item / heads, item % heads);
                item += thread::grid_dim_x() * WARPS;
            }
        }
    }

    /// All layers and the head.
    #[inline(always)]
    unsafe fn run<const TILES: usize>(&mut self) {
        unsafe {
            let p = self.p;
            self.embed_rows();
            self.meet();
            let mut layer = 0;
            while layer < p.layer_count {
                let words = self.p.layers.at(layer as usize * LAYER_WORDS);
                let norm = |i: usize| Global::<bf16>::from_raw(words.load(i));
                let cache = Cache {
                    pages: GlobalMut::from_raw(words.load(4)),
                    tables: self.p.tables,
                    table_stride: p.table_stride,
                    kv_heads: p.kv_heads,
                };
                self.norms();
                self.matrix::<TILES>(Matrix::Qkv, norm(0));
                self.meet();
                self.heads(norm(1), norm(2), cache);
                self.meet();
                self.attention(cache);
                self.meet();
                self.matrix::<TILES>(Matrix::Output, Global::from_raw(0));
                self.meet();
                self.norms();
                self.matrix::<TILES>(Matrix::GateUp, norm(3));
                self.meet();
                self.matrix::<TILES>(Matrix::Down, Global::from_raw(0));
                self.meet();
                layer += 1;
            }
            self.norms();
            self.matrix::<TILES>(Matrix::Head, self.p.final_norm);
        }
    }
}

#[inline(always)]
unsafe fn stream<const TILES: usize>(p: &StreamStep) {
    unsafe {
        let count = p.rows.count.load(0).min(TILES as u32 * 8);
        if count == 0 {
            return;
        }
        if thread::thread_idx_x() == 0 {
            let mut stage = 0;
            while stage < STAGES {
                let ring = Ring { stage, parity: 0 };
                ring.full().init(1);
                ring.empty().init(WARPS);
                stage += 1;
            }
            bulk::fence_init();
        }
        thread::sync_threads();
        if thread::warp_id() == WARPS {
            if thread::lane_id() == 0 {
                produce(p);
            }
        } else {
            let ring = Ring { stage: 0, parity: 0 };
            let mut consumer = Consumer { p, count, walk: Walk::new(thread::grid_dim_x()), ring, meetings: 0 };
            consumer.run::<TILES>();
        }
    }
}

/// The forward pass of up to 8 rows.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn stream_8(p: StreamStep) {
    unsafe { stream::<1>(&p) }
}

/// The forward pass of up to 16 rows.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn stream_16(p: StreamStep) {
    unsafe { stream::<2>(&p) }
}

/// Where the launcher finds the scratch that consumers share; see [`SHARED_BYTES`].
const _: () = assert!(SHARED_BYTES <= 232_448 && Attend::SHARED_BYTES <= SCRATCH_BYTES);
/// Slices of 16 × 64 bf16, one for each warp.
const _: () = assert!(SLICE * STRIP * 2 * WARPS == CHUNK_BYTES);
