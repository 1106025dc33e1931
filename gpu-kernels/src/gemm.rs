//! Linear layers for many rows: `y[row, n] = Σ_k x[row, k] · w[n, k]` on Hopper's warpgroup products, for prompts. bf16 in, f32 sums.
//!
//! # Shape of the work
//! A block of three warpgroups stays on its multiprocessor and takes tiles of [`TILE_ROWS`] = 128 rows × `N` = 128 or 256 features, one
//! after another:
//!
//! ```text
//! warpgroup 2   one lane: x [128 × 64] and w [N × 64] ──copy engine──► ring of slots in shared memory   (runs ahead, across tiles)
//! warpgroup 0   rows 0..64   ┐ wgmma m64nNk16, four a slot, sums in N/2 registers a lane;
//! warpgroup 1   rows 64..128 ┘ then the epilogue
//! ```
//!
//! Tiles go down a band of [`Gemm::band`] tile rows before they go right, so that blocks which run at the same time share rows and features in L2. In
//! the `_pair` kernels two neighbouring blocks take tiles one above the other, and each loads half of the features' tile for both.
//! What lies beyond `n` or `x` arrives as zeros.
//!
//! Norms are folded into the products as [`norm`](crate::norm) says; [`row_scales`] makes the factors of rows from the sums of squares.
//!
//! # Epilogues
//! | kernels | of the sums, times the row's factor |
//! |---|---|
//! | `gemm_qkv_*` | queries, keys and values: normalised, rotated, and put where attention reads them ([`qkv`](crate::qkv)) |
//! | `gemm_swiglu_*` | with half of the tile's features gates and half their ups: `silu(gate) · up`, bf16 |
//! | `gemm_add_*` | added to the residual stream, with what the norm that comes next wants |
//!
//! The residual stream passes through the ring, too: after the last slot of a tile the producer fills slots with the tile's part of it, [`BOX`]
//! features each, while the tensor cores still work. The epilogue adds in place, and the copy engine stores from there. (Read and
//! written by plain accesses it cost 11 µs a tile, a quarter of the product with k = 4,096.)
//!
//! # Order
//! An output is one chain over k in the tensor core's accumulator, whatever tile it is in: all kernels here agree bit for bit (tested).
//!
//! # Ladder
//! 1. `linear`: 64 rows a launch, every strip reads the activations again. A third of the bandwidth, a twentieth of the tensor cores.
//! 2. This.

use cuda_std::bulk::{self, Barrier};
use cuda_std::cluster::{self, PeerBarrier};
use cuda_std::shared::{self, Shared};
use cuda_std::tensor::{self, TensorMap, swizzled};
use cuda_std::wgmma::{self, Operand};
use cuda_std::{Global, GlobalMut, bf16, kernel, math, mma, thread, warp};

use crate::linear::STRIP;
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::norm::Norm;
use crate::qkv::SplitHeads;

/// Rows of a tile. Whatever a kernel writes has room for whole tiles of rows; those beyond `m` are not specified.
pub const TILE_ROWS: u32 = 128;
/// Input features of a slot of the ring; the input size is a multiple of it.
pub const DEPTH: u32 = tensor::ROW;
/// Features of an output tile that is stored at a time; the output size is a multiple of it.
pub const BOX: u32 = tensor::ROW;
/// Features of a tile of weights.
pub const WEIGHT_ROWS: u32 = 128;
/// Threads of a block.
pub const THREADS: u32 = 384;

const GROUP: u32 = 128;
/// Rows of a warpgroup.
const GROUP_ROWS: u32 = 64;
const X_BYTES: u32 = TILE_ROWS * DEPTH * 2;
const BOX_BYTES: u32 = GROUP_ROWS * BOX * 2;

/// Parameters of the products of this module. Grid: at most one block a multiprocessor, for `_pair` kernels an even number.
/// Shared memory: [`Gemm::shared_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Gemm {
    /// `x`, bf16 `[rows, k]`, in tiles of [`TILE_ROWS`] rows.
    pub x: Global<TensorMap>,
    /// The weights, bf16 `[n, k]`, in tiles of [`WEIGHT_ROWS`]; the gate's for `swiglu`.
    pub weight: Global<TensorMap>,
    /// The up projection's weights, likewise: `swiglu` alone.
    pub up: Global<TensorMap>,
    /// What is written in bf16, `[rows, n]` in tiles of 64 rows: by `swiglu` the activations, by `add` the scaled residual stream. Not used by `qkv`.
    pub out: Global<TensorMap>,
    /// `[rows]` what sums are multiplied by, or null for 1. Not used by `add`.
    pub scales: Global<f32>,
    /// What heads are made with and where they go, `qkv` alone; its `qkv` is not used.
    pub heads: SplitHeads,
    /// What `add` adds to: the residual stream, f32 `[rows, n]`, as rows of `2 n` bf16 in tiles of 64 rows.
    pub residual: Global<TensorMap>,
    /// `[rows, n / 16]` sums of squares of the residual stream: `add` alone.
    pub squares: GlobalMut<f32>,
    /// `[n]` the weight of the norm that comes next: `add` alone.
    pub next_norm: Global<bf16>,
    /// Rows.
    pub m: u32,
    /// Output features.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// Tile rows in a band.
    pub band: u32,
}

impl Gemm {
    /// Slots of the ring for tiles of `n` features.
    const fn stages(n: u32) -> u32 {
        if n == 256 { 4 } else { 6 }
    }

    const fn stage_bytes(n: u32) -> u32 {
        X_BYTES + n * DEPTH * 2
    }

    /// Dynamic shared memory of a block with tiles of `n` features: the ring, two boxes of output for each warpgroup, barriers.
    pub const fn shared_bytes(n: u32) -> u32 {
        Self::stages(n) * (Self::stage_bytes(n) + 16) + 4 * BOX_BYTES
    }
}

/// Slots that a producer fills and consumers free, and the barriers between them.
#[derive(Clone, Copy)]
struct Ring {
    start: Shared<u8>,
    full: Shared<u64>,
    stages: u32,
    stage_bytes: u32,
    slot: u32,
    parity: u32,
}

impl Ring {
    fn slot(&self) -> Shared<u8> {
        Shared::from_raw(self.start.addr() + self.slot * self.stage_bytes)
    }

    fn full(&self, slot: u32) -> Barrier {
        Barrier::at(Shared::from_raw(self.full.addr() + slot * 8))
    }

    fn empty(&self, slot: u32) -> Barrier {
        self.full(self.stages + slot)
    }

    fn advance(&mut self) {
        self.slot += 1;
        if self.slot == self.stages {
            (self.slot, self.parity) = (0, self.parity ^ 1);
        }
    }
}

/// All tiles: which a block takes, and where they are.
#[derive(Clone, Copy)]
struct Tiles {
    rows: u32,
    columns: u32,
    band: u32,
    next: u32,
    step: u32,
}

impl Iterator for Tiles {
    /// (row of tiles, column of tiles)
    type Item = (u32, u32);

    #[inline(always)]
    fn next(&mut self) -> Option<(u32, u32)> {
        let turn = self.next;
        if turn >= self.rows * self.columns {
            return None;
        }
        self.next += self.step;
        let in_band = self.band * self.columns;
        // SAFETY: there are tiles, so neither is zero; the launcher's band is not.
        unsafe { core::hint::assert_unchecked(in_band != 0) };
        let first = turn / in_band * self.band;
        let height = self.band.min(self.rows - first);
        // SAFETY: `first` is the first row of a band that has this tile.
        unsafe { core::hint::assert_unchecked(height != 0) };
        let within = turn % in_band;
        Some((first + within % height, within / height))
    }
}

/// One warpgroup's half of a tile: where it is, and what a lane of it needs to place its sums.
struct Half {
    /// First row and first column of this tile's.
    row: u32,
    column: u32,
    /// Which of the two boxes comes next.
    turn: u32,
    /// The barrier of the warpgroup.
    barrier: u32,
    /// Two boxes of 64 × 64 in shared memory.
    staging: Shared<u8>,
    /// Whether this lane issues the stores.
    elected: bool,
    /// The `empty` barriers of the ring in each block of the cluster.
    free: [PeerBarrier; 2],
    /// The slot that the newest store reads from, if any.
    stored: Option<u32>,
}

impl Half {
    /// The first of the two rows whose sums the lane holds; the other is 8 further.
    #[inline(always)]
    fn lane_row(&self) -> u32 {
        self.row + thread::warp_id() % 4 * 16 + thread::lane_id() / 4
    }

    /// Waits until the next box can be overwritten.
    #[inline(always)]
    fn begin_box(&self) {
        if self.elected {
            bulk::wait_read::<1>();
        }
        thread::sync_named(self.barrier, GROUP);
    }

    /// Gives back the slot of the store before the newest `PENDING`, once it was read.
    #[inline(always)]
    unsafe fn release<const PENDING: usize>(&mut self) {
        if self.elected
            && let Some(slot) = self.stored
        {
            bulk::wait_read::<PENDING>();
            unsafe {
                self.free[0].at(slot).arrive();
                if self.free[1] != self.free[0] {
                    self.free[1].at(slot).arrive();
                }
            }
        }
        self.stored = None;
    }

    fn place(&self) -> Shared<u8> {
        Shared::from_raw(self.staging.addr() + self.turn * BOX_BYTES)
    }

    /// Puts 16 columns of the box into shared memory: `words` are the lane's pairs of columns as the accumulators order them.
    #[inline(always)]
    unsafe fn put(&self, sixteenth: usize, words: [u32; 4]) {
        let lane = thread::lane_id();
        let row = thread::warp_id() % 4 * 16 + lane % 16;
        let offset = swizzled(row * BOX * 2 + (sixteenth as u32 * 2 + lane / 16) * 16);
        unsafe { mma::stmatrix_x4(self.place().at(offset as usize), words) }
    }

    /// Stores the box at a column of the output.
    #[inline(always)]
    unsafe fn end_box(&mut self, map: Global<TensorMap>, column: u32) {
        bulk::fence_proxy_async();
        thread::sync_named(self.barrier, GROUP);
        if self.elected {
            unsafe { tensor::store(map, [column, self.row], self.place()) };
            bulk::commit();
        }
        self.turn ^= 1;
    }
}

/// What becomes of the sums of one warpgroup.
trait Epilogue {
    /// Whether half of a tile's features are gates, and half their ups.
    const GATED: bool;
    /// Whether the residual stream follows a tile's slots in the ring.
    const ADDS: bool = false;
    /// What [`ahead`](Self::ahead) loads.
    type Ahead: Copy;

    /// Loads what [`finish`](Self::finish) wants from memory, while the last products run.
    unsafe fn ahead<const N: usize>(p: &Gemm, half: &Half) -> Self::Ahead;

    /// All `N` columns of the half.
    unsafe fn finish<const N: usize>(p: &Gemm, half: &mut Half, ring: &mut Ring, ahead: &Self::Ahead);
}

/// Output features of a tile of `n` weight rows.
const fn features<E: Epilogue>(n: u32) -> u32 {
    if E::GATED { n / 2 } else { n }
}

/// The factors of the lane's two rows.
#[inline(always)]
unsafe fn scales(p: &Gemm, row: u32) -> [f32; 2] {
    if p.scales.is_null() {
        return [1.0; 2];
    }
    // Rows beyond m have no factor, nor need one.
    let load = |row: u32| unsafe { p.scales.load(row.min(p.m - 1) as usize) };
    [load(row), load(row + 8)]
}

/// The four sums of the lane in half a strip: 8 columns of two rows.
macro_rules! sums {
    ($first:expr) => {
        [
            [wgmma::get::<{ $first }>(), wgmma::get::<{ $first + 1 }>()],
            [wgmma::get::<{ $first + 2 }>(), wgmma::get::<{ $first + 3 }>()],
        ]
    };
}

struct Qkv;

/// The head of queries or keys whose sums begin at accumulator `$first`, normalised and rotated, into shared memory: rows of 256 bytes, in two
/// boxes. Sums are fetched when they are needed, and words put away at once: there are no registers for copies.
macro_rules! put_rotated {
    ($first:expr, $p:ident, $half:ident, $rows:ident, $scales:ident, $norm:ident) => {{
        let (pair, line) = (thread::lane_id() % 4, thread::warp_id() % 4 * 16 + thread::lane_id() / 4);
        unroll!(R < 2; {
            macro_rules! sum {
                ($j:expr) => {
                    [
                        wgmma::get::<{ $first + 4 * ($j) + 2 * R }>() * $scales[R],
                        wgmma::get::<{ $first + 4 * ($j) + 2 * R + 1 }>() * $scales[R],
                    ]
                };
            }
            let mut squares = 0.0;
            unroll!(J < 16; {
                let x = sum!(J);
                squares = math::fma(x[0], x[0], math::fma(x[1], x[1], squares));
            });
            let scale = 1.0 / math::sqrt(quad_sum(squares) / HEAD_DIM as f32 + $p.heads.eps);
            let position = $p.heads.rows.positions.load($rows[R] as usize);
            let angles = position as usize * (HEAD_DIM / 2) as usize + 2 * pair as usize;
            let cos = $p.heads.cos.at(angles).cast::<[f32; 2]>();
            let sin = $p.heads.sin.at(angles).cast::<[f32; 2]>();
            let weight = $norm.at(2 * pair as usize).cast::<u32>();
            let row = (line + 8 * R as u32) * BOX * 2 + pair * 4;
            unroll!(J < 8; {
                // Pairs of dimensions that turn together: 8 j + 2 pair + c, and 64 more.
                let (low, high) = (sum!(J), sum!(J + 8));
                let (cos, sin) = (cos.load(4 * J), sin.load(4 * J));
                let weights = [weight.load(4 * J), weight.load(4 * J + 32)].map(math::unpack_bf16);
                let a = [low[0] * scale * weights[0][0], low[1] * scale * weights[0][1]];
                let b = [high[0] * scale * weights[1][0], high[1] * scale * weights[1][1]];
                let to = $half.staging.at(swizzled(row + J as u32 * 16) as usize).cast::<u32>();
                to.store(0, math::pack_bf16(a[0] * cos[0] - b[0] * sin[0], a[1] * cos[1] - b[1] * sin[1]));
                let turned = math::pack_bf16(b[0] * cos[0] + a[0] * sin[0], b[1] * cos[1] + a[1] * sin[1]);
                to.store((BOX_BYTES / 4) as usize, turned);
            });
        });
    }};
}

/// The head of values whose sums begin at accumulator `$first`, into shared memory with dimensions as rows: 64 tokens side by side.
macro_rules! put_values {
    ($first:expr, $half:ident, $scales:ident) => {{
        let (lane, warp) = (thread::lane_id(), thread::warp_id() % 4);
        unroll!(Q < 8; {
            let mut words = [0; 4];
            unroll!(H < 2; {
                let s = sums!($first + 8 * Q + 4 * H);
                words[2 * H] = math::pack_bf16(s[0][0] * $scales[0], s[0][1] * $scales[0]);
                words[2 * H + 1] = math::pack_bf16(s[1][0] * $scales[1], s[1][1] * $scales[1]);
            });
            let dimension = Q as u32 * 16 + lane / 16 * 8 + lane % 8;
            let at = swizzled(dimension * BOX * 2 + (warp * 2 + lane / 8 % 2) * 16);
            mma::stmatrix_x4_trans($half.staging.at(at as usize), words);
        });
    }};
}

/// The sum of `v` over the four lanes of a row.
#[inline(always)]
fn quad_sum(v: f32) -> f32 {
    let v = v + warp::shuffle_xor(v, 1);
    v + warp::shuffle_xor(v, 2)
}

/// Stores a head of queries or keys from shared memory.
#[inline(always)]
unsafe fn store_rows(p: &Gemm, half: &Half, head: u32) {
    unsafe {
        let (lane, warp) = (thread::lane_id(), thread::warp_id() % 4);
        // A warp stores the rows that it put there, two at a time.
        warp::sync_warp();
        let piece = lane % 16;
        unroll!(I < 8; {
            let line = warp * 16 + I as u32 * 2 + lane / 16;
            let row = half.row + line;
            let from = half.staging.at((piece / 8 * BOX_BYTES + swizzled(line * BOX * 2 + piece % 8 * 16)) as usize);
            let values = from.load16(0);
            if row < p.m {
                let to = if head < p.heads.q_heads {
                    p.heads.q.at((row as usize * p.heads.q_heads as usize + head as usize) * HEAD_DIM as usize)
                } else {
                    let position = p.heads.rows.positions.load(row as usize);
                    let sequence = p.heads.rows.sequences.load(row as usize);
                    p.heads.cache.key(sequence, position, head - p.heads.q_heads)
                };
                to.store16((piece * 8) as usize, values);
            }
        });
    }
}

/// Stores a head of values from shared memory.
#[inline(always)]
unsafe fn store_values(p: &Gemm, half: &Half, kv_head: u32) {
    unsafe {
        let (lane, warp) = (thread::lane_id(), thread::warp_id() % 4);
        thread::sync_named(half.barrier, GROUP);
        // A lane stores eight rows' values of a dimension at a time.
        let eighth = lane % 8;
        let row = half.row + eighth * 8;
        if row >= p.m {
            return;
        }
        let rows = (p.m - row).min(8);
        let place = |row: u32| {
            let position = p.heads.rows.positions.load(row as usize);
            (p.heads.rows.sequences.load(row as usize), position)
        };
        let (sequence, position) = place(row);
        let last = place(row + rows - 1);
        // They lie together if they are consecutive tokens of one sequence from a multiple of eight on.
        let together = rows == 8 && last == (sequence, position + 7) && position.is_multiple_of(8);
        unroll!(I < 8; {
            let dimension = I as u32 * 16 + warp * 4 + lane / 8;
            let from = half.staging.at(swizzled(dimension * BOX * 2 + eighth * 16) as usize);
            if together {
                let to = p.heads.cache.value(sequence, position, kv_head);
                to.store16((dimension * PAGE_TOKENS) as usize, from.load16(0));
            } else {
                let mut i = 0;
                while i < rows {
                    let (sequence, position) = place(row + i);
                    let to = p.heads.cache.value(sequence, position, kv_head);
                    to.store((dimension * PAGE_TOKENS) as usize, from.cast::<bf16>().load(i as usize));
                    i += 1;
                }
            }
        });
    }
}

impl Epilogue for Qkv {
    const GATED: bool = false;
    /// The factors of the lane's two rows.
    type Ahead = [f32; 2];

    #[inline(always)]
    unsafe fn ahead<const N: usize>(p: &Gemm, half: &Half) -> [f32; 2] {
        unsafe { scales(p, half.lane_row()) }
    }

    #[inline(always)]
    unsafe fn finish<const N: usize>(p: &Gemm, half: &mut Half, _ring: &mut Ring, scales: &[f32; 2]) {
        unsafe {
            let row = half.lane_row();
            // Rows beyond m are made as the last one, and not stored.
            let rows = [row.min(p.m - 1), (row + 8).min(p.m - 1)];
            let (q_heads, kv_heads) = (p.heads.q_heads, p.heads.cache.kv_heads);
            macro_rules! head {
                ($index:literal) => {
                    let head = half.column / HEAD_DIM + $index;
                    if $index * 128 < N && head * HEAD_DIM < p.n {
                        // Others may still be storing the head before.
                        thread::sync_named(half.barrier, GROUP);
                        if head < q_heads + kv_heads {
                            let norm = if head < q_heads { p.heads.q_norm } else { p.heads.k_norm };
                            put_rotated!(($index * 64), p, half, rows, scales, norm);
                            store_rows(p, half, head);
                        } else {
                            put_values!(($index * 64), half, scales);
                            store_values(p, half, head - q_heads - kv_heads);
                        }
                    }
                };
            }
            head!(0);
            head!(1);
        }
    }
}

struct SwiGlu;

impl Epilogue for SwiGlu {
    const GATED: bool = true;
    /// The factors of the lane's two rows.
    type Ahead = [f32; 2];

    #[inline(always)]
    unsafe fn ahead<const N: usize>(p: &Gemm, half: &Half) -> [f32; 2] {
        unsafe { scales(p, half.lane_row()) }
    }

    #[inline(always)]
    unsafe fn finish<const N: usize>(p: &Gemm, half: &mut Half, _ring: &mut Ring, scales: &[f32; 2]) {
        unsafe {
            // Of one row of the lane, two features: their gates stand in the lower half of the accumulators, their ups in the upper.
            let gated = |gate: [[f32; 2]; 2], up: [[f32; 2]; 2], row: usize| {
                let one = |c: usize| {
                    let g = gate[row][c] * scales[row];
                    g * math::rcp(1.0 + math::exp(-g)) * (up[row][c] * scales[row])
                };
                math::pack_bf16(one(0), one(1))
            };
            unroll!(B < 2; {
                if half.column + B as u32 * BOX < p.n {
                    half.begin_box();
                    unroll!(Q < 4; {
                        let (gate, up) = (sums!(B * 32 + Q * 8), sums!(B * 32 + Q * 8 + 64));
                        let (gate_8, up_8) = (sums!(B * 32 + Q * 8 + 4), sums!(B * 32 + Q * 8 + 68));
                        let words = [
                            gated(gate, up, 0),
                            gated(gate, up, 1),
                            gated(gate_8, up_8, 0),
                            gated(gate_8, up_8, 1),
                        ];
                        half.put(Q, words);
                    });
                    half.end_box(p.out, half.column + B as u32 * BOX);
                }
            });
        }
    }
}

struct Add;

impl Epilogue for Add {
    const GATED: bool = false;
    const ADDS: bool = true;
    /// The norm's weights of the lane's columns, two to a word.
    type Ahead = [u32; 32];

    #[inline(always)]
    unsafe fn ahead<const N: usize>(p: &Gemm, half: &Half) -> [u32; 32] {
        unsafe {
            let mut words = [0; 32];
            let norm = p.next_norm.at((half.column + thread::lane_id() % 4 * 2) as usize).cast::<u32>();
            unroll!(B < 4; {
                if B * 64 < N && half.column + B as u32 * BOX < p.n {
                    unroll!(J < 8; {
                        words[B * 8 + J] = norm.load(B * 32 + J * 4);
                    });
                }
            });
            words
        }
    }

    #[inline(always)]
    unsafe fn finish<const N: usize>(p: &Gemm, half: &mut Half, ring: &mut Ring, norm: &[u32; 32]) {
        unsafe {
            let pair = thread::lane_id() % 4;
            let line = thread::warp_id() % 4 * 16 + thread::lane_id() / 4;
            let strips = (p.n / STRIP) as usize;
            let squares = p.squares.at(half.lane_row() as usize * strips + (half.column / STRIP + pair) as usize);
            let inside = half.row < p.m;
            unroll!(B < 4; {
                let column = half.column + B as u32 * BOX;
                if B * 64 < N && column < p.n {
                    ring.full(ring.slot).wait(ring.parity);
                    // Two boxes of 32 features in f32 for each warpgroup.
                    let boxes: Shared<u8> = ring.slot().at((half.barrier - 1) as usize * 2 * BOX_BYTES as usize);
                    half.begin_box();
                    // Of each strip, for the two rows.
                    let mut sums = [[0f32; 2]; 4];
                    unroll!(Q < 4; {
                        let mut words = [0; 4];
                        unroll!(H < 2; {
                            const J: usize = Q * 2 + H;
                            let s = sums!(B * 32 + J * 4);
                            let w = math::unpack_bf16(norm[B * 8 + J]);
                            unroll!(R < 2; {
                                let row = (line + 8 * R as u32) * BOX * 2;
                                let offset = swizzled(row + J as u32 % 4 * 32 + pair * 8) + J as u32 / 4 * BOX_BYTES;
                                let x = boxes.at(offset as usize).cast::<[f32; 2]>();
                                let old = x.load(0);
                                let new = [old[0] + s[R][0], old[1] + s[R][1]];
                                x.store(0, new);
                                sums[Q][R] = math::fma(new[0], new[0], math::fma(new[1], new[1], sums[Q][R]));
                                words[H * 2 + R] = math::pack_bf16(new[0] * w[0], new[1] * w[1]);
                            });
                        });
                        half.put(Q, words);
                        unroll!(R < 2; {
                            sums[Q][R] = quad_sum(sums[Q][R]);
                        });
                    });
                    // Each lane of a row stores one of the four strips.
                    let mut own = sums[0];
                    unroll!(Q < 4; {
                        if Q as u32 == pair {
                            own = sums[Q];
                        }
                    });
                    if inside {
                        squares.store(B * 4, own[0]);
                        squares.store(B * 4 + 8 * strips, own[1]);
                    }
                    bulk::fence_proxy_async();
                    thread::sync_named(half.barrier, GROUP);
                    if half.elected {
                        if inside {
                            tensor::store(p.residual, [2 * column, half.row], boxes);
                            tensor::store(p.residual, [2 * column + BOX, half.row], boxes.at(BOX_BYTES as usize));
                            tensor::store(p.out, [column, half.row], half.place());
                        }
                        bulk::commit();
                    }
                    half.turn ^= 1;
                    half.release::<1>();
                    half.stored = Some(ring.slot);
                    ring.advance();
                }
            });
        }
    }
}

/// One lane keeps the ring full.
#[inline(always)]
unsafe fn produce<E: Epilogue, const N: u32, const CLUSTER: u32>(p: &Gemm, mut ring: Ring, tiles: Tiles, rank: u32) {
    unsafe {
        tensor::acquire(p.x);
        tensor::acquire(p.weight);
        if E::GATED {
            tensor::acquire(p.up);
        }
        if E::ADDS {
            tensor::acquire(p.residual);
        }
        let blocks = (1u16 << CLUSTER) - 1;
        for (tile_row, tile_column) in tiles {
            let row = (tile_row * CLUSTER + rank) * TILE_ROWS;
            let mut k = 0;
            while k < p.k {
                let full = ring.full(ring.slot);
                ring.empty(ring.slot).wait(ring.parity ^ 1);
                full.arrive_expect_tx(Gemm::stage_bytes(N));
                let x = ring.slot();
                tensor::load(x, p.x, [k, row], full);
                // All tiles of weights, or the one that this block loads for both of its pair.
                let mut part = rank;
                while part < N / WEIGHT_ROWS {
                    let to: Shared<u8> = Shared::from_raw(x.addr() + X_BYTES + part * WEIGHT_ROWS * DEPTH * 2);
                    let (map, feature) = match (E::GATED, part) {
                        (false, _) => (p.weight, tile_column * N + part * WEIGHT_ROWS),
                        (true, 0) => (p.weight, tile_column * WEIGHT_ROWS),
                        (true, _) => (p.up, tile_column * WEIGHT_ROWS),
                    };
                    if CLUSTER > 1 {
                        tensor::load_multicast(to, map, [k, feature], full, blocks);
                    } else {
                        tensor::load(to, map, [k, feature], full);
                    }
                    part += CLUSTER;
                }
                ring.advance();
                k += DEPTH;
            }
            let mut column = tile_column * N;
            while E::ADDS && column < p.n.min(tile_column * N + N) {
                let full = ring.full(ring.slot);
                ring.empty(ring.slot).wait(ring.parity ^ 1);
                full.arrive_expect_tx(4 * BOX_BYTES);
                unroll!(I < 4; {
                    let at = [2 * column + I as u32 % 2 * BOX, row + I as u32 / 2 * GROUP_ROWS];
                    tensor::load(ring.slot().at(I * BOX_BYTES as usize), p.residual, at, full);
                });
                ring.advance();
                column += BOX;
            }
        }
    }
}

/// Begins the products of the ring's slot once it is full, and waits for those of the slot before.
#[inline(always)]
unsafe fn multiply<const N: u32>(ring: &Ring, x: Operand, weight: Operand, first: bool) {
    unsafe {
        ring.full(ring.slot).wait(ring.parity);
        let offset = ring.slot * ring.stage_bytes;
        let (x, weight) = (x.advance(offset), weight.advance(offset));
        wgmma::fence();
        unroll!(I < 4; {
            let (x, weight) = (x.advance(I as u32 * 32), weight.advance(I as u32 * 32));
            let keep = I != 0 || !first;
            if N == 256 {
                wgmma::mma_n256(x, weight, keep);
            } else {
                wgmma::mma_n128(x, weight, keep);
            }
        });
        wgmma::commit();
        wgmma::wait::<1>();
    }
}

/// A warpgroup multiplies what comes, and finishes its half of each tile.
#[inline(always)]
unsafe fn consume<E: Epilogue, const N: u32, const CLUSTER: u32>(p: &Gemm, mut ring: Ring, tiles: Tiles, rank: u32) {
    unsafe {
        let group = thread::warp_id() / 4;
        let lane = thread::thread_idx_x() % GROUP;
        let first = Operand::at(ring.start);
        let (x, weight) = (first.advance(group * GROUP_ROWS * DEPTH * 2), first.advance(X_BYTES));
        // Lane `i` of a warpgroup tells block `i` of the cluster, whose copies also land here, that a slot is free.
        let free = PeerBarrier::new(ring.empty(0), if CLUSTER > 1 { lane % CLUSTER } else { 0 });
        let tells = lane < CLUSTER;
        let staging = ring.start.addr() + ring.stages * ring.stage_bytes + group * 2 * BOX_BYTES;
        let elected = lane == 0;
        let mut half = Half {
            row: 0,
            column: 0,
            turn: 0,
            barrier: 1 + group,
            staging: Shared::from_raw(staging),
            elected,
            free: [PeerBarrier::new(ring.empty(0), 0), PeerBarrier::new(ring.empty(0), CLUSTER - 1)],
            stored: None,
        };
        if elected && !p.out.is_null() {
            tensor::acquire(p.out);
        }
        if elected && E::ADDS {
            tensor::acquire(p.residual);
        }
        for (tile_row, tile_column) in tiles {
            // The first slot apart: that it does not add to what was in the accumulators is a constant then, and the assembler knows that
            // epilogues have the registers of accumulators they are done with.
            multiply::<N>(&ring, x, weight, true);
            half.release::<0>();
            let mut previous = ring.slot;
            ring.advance();
            let mut k = DEPTH;
            while k < p.k {
                multiply::<N>(&ring, x, weight, false);
                // The slot before is read, the one just started is not.
                free.at(previous).arrive_if(tells);
                previous = ring.slot;
                ring.advance();
                k += DEPTH;
            }
            let row = (tile_row * CLUSTER + rank) * TILE_ROWS;
            (half.row, half.column) = (row + group * GROUP_ROWS, tile_column * features::<E>(N));
            macro_rules! end_tile {
                ($n:literal) => {
                    let ahead = E::ahead::<$n>(p, &half);
                    wgmma::wait::<0>();
                    free.at(previous).arrive_if(tells);
                    // The last pair of blocks may have one tile; what passes through the ring passes through the other's as well.
                    if row < p.m || E::ADDS {
                        E::finish::<$n>(p, &mut half, &mut ring, &ahead);
                    }
                };
            }
            if N == 256 {
                end_tile!(256);
            } else {
                end_tile!(128);
            }
        }
        if elected {
            bulk::wait::<0>();
        }
    }
}

#[inline(always)]
unsafe fn gemm<E: Epilogue, const N: u32, const CLUSTER: u32>(p: &Gemm) {
    unsafe {
        wgmma::declare();
        let stages = Gemm::stages(N);
        let stage_bytes = Gemm::stage_bytes(N);
        let start = shared::dynamic::<u8>(0);
        let full = shared::dynamic::<u64>(stages * stage_bytes + 4 * BOX_BYTES);
        let ring = Ring { start, full, stages, stage_bytes, slot: 0, parity: 0 };
        if thread::thread_idx_x() == 0 {
            let mut slot = 0;
            while slot < stages {
                ring.full(slot).init(1);
                // Two warpgroups of each block.
                ring.empty(slot).init(2 * CLUSTER);
                slot += 1;
            }
            bulk::fence_init();
        }
        let rank = if CLUSTER > 1 { cluster::rank() } else { 0 };
        if CLUSTER > 1 {
            cluster::sync();
        } else {
            thread::sync_threads();
        }
        let tiles = Tiles {
            rows: p.m.div_ceil(TILE_ROWS * CLUSTER),
            columns: p.n.div_ceil(features::<E>(N)),
            band: p.band,
            next: thread::block_idx_x() / CLUSTER,
            step: thread::grid_dim_x() / CLUSTER,
        };
        if thread::warp_id() < 8 {
            wgmma::take_registers::<232>();
            consume::<E, N, CLUSTER>(p, ring, tiles, rank);
        } else {
            wgmma::give_registers::<40>();
            if thread::warp_id() == 8 && warp::elect() {
                produce::<E, N, CLUSTER>(p, ring, tiles, rank);
            }
        }
        if CLUSTER > 1 {
            // No block ends while another may still write to it.
            cluster::sync();
        }
    }
}

macro_rules! kernels {
    ($($epilogue:ty: $what:literal, $($n:literal $name:ident)* pair $pair:ident;)*) => { $(
        $(
            #[doc = concat!($what, " Tiles of ", $n, " weight rows.")]
            #[kernel(threads = THREADS, min_blocks = 1)]
            pub unsafe fn $name(p: Gemm) {
                unsafe { gemm::<$epilogue, $n, 1>(&p) }
            }
        )*
        #[doc = concat!($what, " Tiles of 256 weight rows, blocks in pairs.")]
        #[kernel(threads = THREADS, min_blocks = 1, cluster = 2)]
        pub unsafe fn $pair(p: Gemm) {
            unsafe { gemm::<$epilogue, 256, 2>(&p) }
        }
    )* };
}

kernels! {
    Qkv: "Queries, keys and values from `x · wᵀ`, sums of each row times its factor.", 128 gemm_qkv_n128 256 gemm_qkv_n256 pair gemm_qkv_pair;
    SwiGlu: "`out = silu(x · weightᵀ) ∘ (x · upᵀ)`, sums of each row times its factor.", 256 gemm_swiglu_n256 pair gemm_swiglu_pair;
    Add: "The residual stream plus `x · wᵀ`.", 128 gemm_add_n128 256 gemm_add_n256 pair gemm_add_pair;
}

/// Parameters of [`row_scales`]. Grid: (1, rows / 8 rounded up).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowScales {
    /// The norm of the rows.
    pub norm: Norm,
    /// `[rows]` what it multiplies each by.
    pub scales: GlobalMut<f32>,
    /// Rows.
    pub m: u32,
}

/// The factor of each row of a norm: a warp a row.
#[kernel(threads = 256)]
pub unsafe fn row_scales(p: RowScales) {
    unsafe {
        let row = thread::block_idx_y() * 8 + thread::warp_id();
        if row >= p.m {
            return;
        }
        let scale = p.norm.inverse_rms(row);
        if thread::lane_id() == 0 {
            p.scales.store(row as usize, scale);
        }
    }
}
