//! What becomes of a tile's sums.

use cuda_std::bulk;
use cuda_std::cluster::PeerBarrier;
use cuda_std::shared::Shared;
use cuda_std::tensor::{self, TensorMap, swizzled};
use cuda_std::{Global, bf16, math, mma, thread, warp, wgmma};

use super::{BOX, BOX_BYTES, GROUP, Gemm, Ring};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::linear::STRIP;

/// One warpgroup's half of a tile: where it is, and what a lane of it needs to place its sums.
pub struct Half {
    /// First row and first column of this tile's.
    pub row: u32,
    pub column: u32,
    /// Which of the two boxes comes next.
    pub turn: u32,
    /// The barrier of the warpgroup.
    pub barrier: u32,
    /// Two boxes of 64 × 64 in shared memory.
    pub staging: Shared<u8>,
    /// Whether this lane issues the stores.
    pub elected: bool,
    /// The `empty` barriers of the ring in each block of the cluster.
    pub free: [PeerBarrier; 2],
    /// The slot that the newest store reads from, if any.
    pub stored: Option<u32>,
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
    pub unsafe fn release<const PENDING: usize>(&mut self) {
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
pub trait Epilogue {
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
pub const fn features<E: Epilogue>(n: u32) -> u32 {
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

/// Queries, keys and values.
pub struct Qkv;

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

/// Gated activations.
pub struct SwiGlu;

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

/// The residual stream.
pub struct Add;

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
