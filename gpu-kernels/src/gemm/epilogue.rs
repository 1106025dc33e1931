//! What becomes of a tile's sums.

use cuda_std::bulk;
use cuda_std::shared::Shared;
use cuda_std::tensor::{self, TensorMap, swizzled};
use cuda_std::{Global, GlobalMut, bf16, math, mma, thread, warp, wgmma};

use super::{BOX, BOX_BYTES, GROUP, Gemm};
use crate::gate::swiglu;
use crate::kv::{HEAD_DIM, PAGE_TOKENS, place};
use crate::norm::SPAN;
use crate::quad;

/// One warpgroup's half of a tile: where it is, and what a lane of it needs to place its sums.
pub struct Half {
    /// First row of the tile.
    pub tile_row: u32,
    /// First row of this half.
    pub row: u32,
    /// First column of it.
    pub column: u32,
    /// Which of the two boxes comes next.
    pub turn: u32,
    /// The barrier of the warpgroup.
    pub barrier: u32,
    /// Two boxes of 64 × 64 in shared memory.
    pub staging: Shared<u8>,
}

/// Whether this lane issues its warpgroup's stores.
#[inline(always)]
pub fn elected() -> bool {
    thread::opaque(thread::thread_idx_x()).is_multiple_of(GROUP)
}

impl Half {
    /// The first of the two rows whose sums the lane holds; the other is 8 further.
    #[inline(always)]
    fn lane_row(&self) -> u32 {
        let (lane, warp) = place_in_group();
        self.row + warp * 16 + lane / 4
    }

    /// Waits until boxes are read that may still be stored, and all lanes are done with what they had there.
    ///
    /// # Safety
    /// All lanes of the half's group call it.
    #[inline(always)]
    pub unsafe fn finish_stores(&self) {
        if elected() {
            bulk::wait_read::<0>();
        }
        thread::sync_named(self.barrier, GROUP);
    }

    fn place(&self) -> Shared<u8> {
        Shared::from_raw(self.staging.addr() + self.turn * BOX_BYTES)
    }

    /// Puts 16 columns of the box into shared memory: `words` are the lane's pairs of columns as the accumulators order
    /// them.
    #[inline(always)]
    unsafe fn put(&self, sixteenth: usize, words: [u32; 4]) {
        let lane = thread::lane_id();
        let row = thread::warp_id() % 4 * 16 + lane % 16;
        let offset = swizzled(row * BOX * 2 + lane / 16 * 16) ^ (sixteenth as u32 * 32);
        // SAFETY: the caller's word.
        unsafe { mma::stmatrix_x4(self.place().at(offset as usize), words) }
    }

    /// Puts the lane's part of half of the box of one of its rows into shared memory, which lies side by side in the
    /// order of [`slot`](crate::linear::slot).
    #[inline(always)]
    unsafe fn put_slots(&self, half: u32, row: u32, words: [u32; 4]) {
        let (lane, warp) = place_in_group();
        let row = warp * 16 + lane / 4 + 8 * row;
        let offset = swizzled(row * BOX * 2 + (half * 4 + lane % 4) * 16);
        // SAFETY: the caller's word.
        unsafe { self.place().at(offset as usize).store16(0, words) }
    }

    /// Stores the lane's part of box `b`, if there is one in the output: with `SLOTS` as [`put_slots`](Self::put_slots)
    /// takes it, half by half and row by row.
    ///
    /// # Safety
    /// The output's map is as [`Gemm`] says; all lanes of the warpgroup call it.
    #[inline(always)]
    pub unsafe fn put_box<const SLOTS: bool>(&mut self, p: &Gemm, b: usize, words: BoxWords) {
        if self.column + b as u32 * BOX < p.n {
            // SAFETY: the caller's word.
            unsafe {
                unroll!(Q < 4; {
                    if SLOTS {
                        self.put_slots(Q as u32 / 2, Q as u32 % 2, words[Q]);
                    } else {
                        self.put(Q, words[Q]);
                    }
                });
                self.store_box(p.out, b as u32);
            }
        }
    }

    /// Once the warpgroup has filled a box, and the box before can be overwritten, stores it: it is the `b`-th of the
    /// half's columns.
    #[inline(always)]
    unsafe fn store_box(&mut self, out: Global<TensorMap>, b: u32) {
        bulk::fence_proxy_async();
        // By now TMA has read it, or soon. Lanes that store nothing have nothing to wait for: a branch for one of them
        // would keep operands' descriptors of the main loop from uniform registers.
        bulk::wait_read::<0>();
        thread::sync_named(self.barrier, GROUP);
        // SAFETY: the caller's word.
        unsafe { tensor::store_if(elected(), out, [self.column + b * BOX, self.row], self.place()) };
        bulk::commit();
        self.turn ^= 1;
    }
}

/// A lane's pairs of columns of a box, as [`Half::put`] takes them.
pub type BoxWords = [[u32; 4]; 4];

/// What becomes of the sums of one warpgroup.
pub trait Epilogue {
    /// Whether half of a tile's features are gates, and half their ups.
    const GATED: bool;
    /// Whether a block takes two tiles side by side, one after the other.
    const IN_PAIRS: bool = false;
    /// What [`early`](Self::early) loads.
    type Early: Copy;
    /// What [`ahead`](Self::ahead) loads.
    type Ahead: Copy;

    /// Loads what [`ahead`](Self::ahead) computes from, as the tile begins.
    ///
    /// # Safety
    /// Memory is as the parameter block says, and the half is of one of its tiles.
    unsafe fn early(p: &Gemm, half: &Half) -> Self::Early;

    /// Loads and computes what [`finish`](Self::finish) or [`finish_last`](Self::finish_last) wants first, while MMAs
    /// run; anything for a tile that is not `inside`.
    ///
    /// # Safety
    /// As for [`early`](Self::early), of the same tile; all lanes of the half's group call it.
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, inside: bool, early: Self::Early) -> Self::Ahead;

    /// All `N` columns of the half. As soon as it can do without the accumulators it begins the GEMMs of the `next`
    /// tile, and goes on with them step by step.
    ///
    /// # Safety
    /// As for [`ahead`](Self::ahead), of the same tile, whose GEMMs the accumulators hold.
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, ahead: Self::Ahead, next: &mut impl Next);

    /// Whether a block's last tile is finished by [`finish_last`](Self::finish_last).
    const LAST_APART: bool = false;

    /// As [`finish`](Self::finish), without a next tile.
    ///
    /// # Safety
    /// As for [`finish`](Self::finish).
    #[inline(always)]
    unsafe fn finish_last<const N: u32>(_: &Gemm, _: &Half, _: Self::Ahead) {}
}

/// The GEMMs of the tile that comes next, if one does.
pub trait Next {
    /// Whether there may be one.
    const FOLLOWS: bool = true;

    /// Begins them, once: accumulators are no more the last tile's.
    ///
    /// # Safety
    /// All lanes of the group call it, and nobody needs the accumulators.
    unsafe fn begin(&mut self);
    /// Goes on with them, if there are more.
    ///
    /// # Safety
    /// All lanes of the group call it, after [`begin`](Self::begin).
    unsafe fn step(&mut self);
}

/// None beside this.
impl Next for () {
    const FOLLOWS: bool = false;

    #[inline(always)]
    unsafe fn begin(&mut self) {}

    #[inline(always)]
    unsafe fn step(&mut self) {}
}

/// Output features of a tile of `n` weight rows.
pub const fn features<E: Epilogue>(n: u32) -> u32 {
    if E::GATED { n / 2 } else { n }
}

/// Sums of squares of the lane's two rows, every fourth of a row.
type Squares = [[f32; 2]; 8];

/// Eight of them from number `first` on, zeros behind the last.
#[inline(always)]
unsafe fn load_squares(p: &Gemm, row: u32, first: u32) -> Squares {
    let spans = p.norm.dim / SPAN;
    // Rows beyond m have no factor, nor need one.
    let rows = [row, row + 8].map(|row| row.min(p.m - 1) * spans);
    let mut squares = [[0f32; 2]; 8];
    unroll!(I < 8; {
        let at = first + 4 * I as u32 + thread::lane_id() % 4;
        if at < spans {
            // SAFETY: the caller's word.
            squares[I] = rows.map(|row| unsafe { p.norm.squares.load((row + at) as usize) });
        }
    });
    squares
}

/// The factors of the lane's two rows, `1 / rms` of each, of which the four lanes of a row [loaded](load_squares) the
/// first squares; added as [`norm`](crate::norm) has it.
#[inline(always)]
unsafe fn scales(p: &Gemm, row: u32, mut squares: Squares) -> [f32; 2] {
    let mut next = 32;
    while next < p.norm.dim / SPAN {
        // SAFETY: the caller's word.
        let more = unsafe { load_squares(p, row, next) };
        unroll!(I < 8; {
            squares[I] = [0, 1].map(|r| squares[I][r] + more[I][r]);
        });
        next += 32;
    }
    [0, 1].map(|r| {
        let four = [0, 1, 2, 3].map(|i: usize| squares[i][r] + squares[i + 4][r]);
        let mut sum = (four[0] + four[2]) + (four[1] + four[3]);
        sum += warp::shuffle_xor(sum, 2);
        sum += warp::shuffle_xor(sum, 1);
        p.norm.inverse_rms_of_sum(sum)
    })
}

/// The four sums of the lane in half an N-tile: 8 columns of two rows.
macro_rules! sums {
    ($first:expr) => {
        [
            [wgmma::get::<{ $first }>(), wgmma::get::<{ $first + 1 }>()],
            [wgmma::get::<{ $first + 2 }>(), wgmma::get::<{ $first + 3 }>()],
        ]
    };
}

mod add;
mod bias;

pub use add::{Add, AddTo};

/// The lane and its warp in the warpgroup, so that what depends on them is computed where it is used: kept over the
/// whole tile it would take registers that there are not.
#[inline(always)]
fn place_in_group() -> (u32, u32) {
    let thread = thread::opaque(thread::thread_idx_x()) % GROUP;
    (thread % 32, thread / 32)
}

/// Queries, keys and values.
pub struct Qkv;

/// Bytes of a row of a head.
const ROW_BYTES: u32 = HEAD_DIM * 2;

/// What [`Qkv`] has ahead: the factors and positions of the lane's two rows.
#[derive(Clone, Copy)]
pub struct HeadsAhead {
    scales: [f32; 2],
    positions: [u32; 2],
}

/// Cosines and sines at `position` of the lane's dimensions, `8 j + 2 pair` and the next.
#[inline(always)]
unsafe fn angles(p: &Gemm, position: u32) -> [[f32; 2]; 16] {
    // SAFETY: the caller's word.
    unsafe {
        let first = position as usize * (HEAD_DIM / 2) as usize + 2 * (thread::lane_id() % 4) as usize;
        let (cos, sin) = (p.heads.cos.at(first).cast::<[f32; 2]>(), p.heads.sin.at(first).cast::<[f32; 2]>());
        let mut angles = [[0.0; 2]; 16];
        unroll!(J < 8; {
            angles[J] = cos.load(4 * J);
            angles[J + 8] = sin.load(4 * J);
        });
        angles
    }
}

/// The norm of a head of queries or keys, from the lane's first dimension on.
#[inline(always)]
unsafe fn head_norm(p: &Gemm, head: u32) -> Global<u32> {
    let norm = if head < p.heads.q_heads { p.heads.q_norm } else { p.heads.k_norm };
    // SAFETY: the caller's word.
    unsafe { norm.at((2 * (thread::opaque(thread::lane_id()) % 4)) as usize).cast() }
}

/// The factor that normalises the head whose sums begin at accumulator `$first`, in row `$r` of the lane; the row's
/// own, where heads have no norm.
macro_rules! head_factor {
    ($first:expr, $r:expr, $p:ident, $scale:expr) => {{
        // Four split-K partials: one would be mostly waiting.
        let mut squares = [0f32; 4];
        unroll!(J < 16; {
            let x = [wgmma::get::<{ $first + 4 * J + 2 * $r }>(), wgmma::get::<{ $first + 4 * J + 2 * $r + 1 }>()];
            squares[J % 4] = math::fma(x[0], x[0], math::fma(x[1], x[1], squares[J % 4]));
        });
        let sum = quad::sum((squares[0] + squares[1]) + (squares[2] + squares[3])) * ($scale * $scale);
        let normed = $scale * math::rsqrt(sum / HEAD_DIM as f32 + $p.heads.eps);
        if $p.heads.head_norm == 0 { $scale } else { normed }
    }};
}

/// A lane's part of a head, in pairs of bf16.
type HeadWords = [u32; 32];

/// Row `$r` of the lane of the head of queries or keys whose sums begin at accumulator `$first`, normalised and
/// rotated, to its half of `$words`: eight times a pair of dimensions, and the pair that is 64 further.
macro_rules! rotate {
    ($words:expr, $first:expr, $r:expr, $factor:expr, $norm:expr, $angles:expr) => {{
        macro_rules! scaled {
            ($j:expr) => {{
                let x = [wgmma::get::<{ $first + 4 * ($j) + 2 * $r }>(), wgmma::get::<{ $first + 4 * ($j) + 2 * $r + 1 }>()];
                let w = math::unpack_bf16($norm.load(4 * ($j)));
                [x[0] * $factor * w[0], x[1] * $factor * w[1]]
            }};
        }
        unroll!(J < 8; {
            // Pairs of dimensions that turn together: 8 j + 2 pair + c, and 64 more.
            let (a, b) = (scaled!(J), scaled!(J + 8));
            let (cos, sin) = ($angles[J], $angles[J + 8]);
            $words[$r * 16 + 2 * J] = math::pack_bf16(a[0] * cos[0] - b[0] * sin[0], a[1] * cos[1] - b[1] * sin[1]);
            $words[$r * 16 + 2 * J + 1] = math::pack_bf16(b[0] * cos[0] + a[0] * sin[0], b[1] * cos[1] + a[1] * sin[1]);
        });
    }};
}

/// The head of values whose sums begin at accumulator `$first`, in the order of [`rotate`].
macro_rules! scale_values {
    ($words:expr, $first:expr, $scales:expr) => {
        unroll!(J < 8; {
            unroll!(H < 2; {
                let s = sums!($first + 4 * J + 32 * H);
                unroll!(R < 2; {
                    $words[R * 16 + 2 * J + H] = math::pack_bf16(s[R][0] * $scales[R], s[R][1] * $scales[R]);
                });
            });
        })
    };
}

/// Puts a head into the warp's part of shared memory at `to`, 16 rows of 256 bytes, their 16-byte chunks permuted by
/// their numbers.
#[inline(always)]
unsafe fn put_rows(to: u32, words: HeadWords) {
    let (lane, _) = place_in_group();
    let (row, pair) = (lane / 4, lane % 4);
    let place = to + row * ROW_BYTES + row * 16 + pair * 4;
    unroll!(R < 2; {
        unroll!(J < 8; {
            let to: Shared<u32> = Shared::from_raw((place ^ (J as u32 * 16)) + R as u32 * 8 * ROW_BYTES);
            // SAFETY: the caller's word.
            unsafe {
                to.store(0, words[R * 16 + 2 * J]);
                to.store(32, words[R * 16 + 2 * J + 1]);
            }
        });
    });
}

/// Stores eight of a warp's rows of a head from shared memory at `from`, where [`put_rows`] left them: the rows from
/// `first` on. Lanes `4 i` to `4 i + 3` know row `i`'s place in the cache.
#[inline(always)]
unsafe fn store_rows(p: &Gemm, from: u32, first: u32, head: u32, position: u32, page: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let (lane, _) = place_in_group();
        let (piece, second) = (lane % 16, lane / 16);
        macro_rules! store {
            ($line:ident, $to:expr) => {
                unroll!(I < 4; {
                    let $line = I as u32 * 2 + second;
                    let values = Shared::<u8>::from_raw(from + $line * ROW_BYTES + ((piece ^ $line) * 16)).load16(0);
                    let (to, d): (GlobalMut<bf16>, u32) = $to;
                    if first + $line < p.m {
                        to.store16(d as usize, values);
                    }
                })
            };
        }
        if head < p.heads.q_heads {
            let row = p.heads.q.at((first as usize * p.heads.q_heads as usize + head as usize) * HEAD_DIM as usize);
            store!(line, (row.at((line * p.heads.q_heads * HEAD_DIM) as usize), piece * 8));
        } else {
            let (cache, head) = (&p.heads.cache, head - p.heads.q_heads);
            store!(line, {
                let [position, page] = [position, page].map(|v| warp::shuffle_idx(v, line * 4));
                let is_key = head < cache.kv_heads;
                let block = page + if is_key { head } else { head - cache.kv_heads };
                let to = if is_key { cache.key_in(block, position) } else { cache.value_in(block, position) };
                (to, place(position, piece * 8))
            });
        }
    }
}

impl Epilogue for Qkv {
    const GATED: bool = false;
    /// Of the lane's two rows.
    type Early = (Squares, [u32; 2]);
    type Ahead = HeadsAhead;

    #[inline(always)]
    unsafe fn early(p: &Gemm, half: &Half) -> (Squares, [u32; 2]) {
        let row = half.lane_row();
        // Rows beyond m are made as the last one, and not stored.
        // SAFETY: the caller's word.
        let position = |row: u32| unsafe { p.heads.rows.positions.load(row.min(p.m - 1) as usize) };
        // SAFETY: the caller's word.
        (unsafe { load_squares(p, row, 0) }, [position(row), position(row + 8)])
    }

    #[inline(always)]
    unsafe fn ahead<const N: u32>(
        p: &Gemm,
        half: &Half,
        _inside: bool,
        (squares, positions): Self::Early,
    ) -> HeadsAhead {
        // SAFETY: the caller's word.
        HeadsAhead { scales: unsafe { scales(p, half.lane_row(), squares) }, positions }
    }

    #[inline(always)]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, ahead: HeadsAhead, next: &mut impl Next) {
        // SAFETY: the caller's word.
        unsafe {
            let HeadsAhead { scales, positions } = ahead;
            let scales = bias::add::<N, _>(p, half, scales, next);
            let (q_heads, heads) = (p.heads.q_heads, p.n / HEAD_DIM);
            let rotated = (q_heads + p.heads.cache.kv_heads).min(heads);
            let first = half.column / HEAD_DIM;
            let mut words: [HeadWords; 2] = [[0; 32]; 2];
            let mut pages = [0; 2];
            if first + 1 >= q_heads {
                let row = half.lane_row();
                unroll!(R < 2; {
                    let sequence = p.heads.rows.sequences.load((row + 8 * R as u32).min(p.m - 1) as usize);
                    pages[R] = p.heads.cache.block_index(sequence, positions[R] / PAGE_TOKENS, 0);
                });
            }
            if first < rotated {
                let of_first = angles(p, positions[0]);
                let mut factors = [[0f32; 2]; 2];
                unroll!(R < 2; {
                    factors[0][R] = head_factor!(0, R, p, scales[R]);
                    if N > 128 {
                        factors[1][R] = head_factor!(64, R, p, scales[R]);
                    }
                });
                // A row of a head after the other, with its norm loaded in its turn: all at once there are not
                // registers enough.
                rotate!(words[0], 0, 0, factors[0][0], head_norm(p, first), of_first);
                warp::sync_warp();
                let of_second = angles(p, positions[1]);
                if N > 128 {
                    // Of values, too, which are made again below.
                    rotate!(words[1], 64, 0, factors[1][0], head_norm(p, first + 1), of_first);
                    warp::sync_warp();
                }
                rotate!(words[0], 0, 1, factors[0][1], head_norm(p, first), of_second);
                if N > 128 {
                    warp::sync_warp();
                    rotate!(words[1], 64, 1, factors[1][1], head_norm(p, first + 1), of_second);
                }
            } else {
                scale_values!(words[0], 0, scales);
            }
            if N > 128 && first + 1 >= rotated {
                scale_values!(words[1], 64, scales);
            }
            next.begin();
            // Others may still be storing the tile before.
            thread::sync_named(half.barrier, GROUP);
            unroll!(H < 2; {
                let head = first + H as u32;
                if H == 0 || N > 128 {
                    if head < heads {
                        let (_, warp) = place_in_group();
                        let staging = half.staging.addr() + warp * 16 * ROW_BYTES;
                        put_rows(staging, words[H]);
                        warp::sync_warp();
                        unroll!(R < 2; {
                            let eight = warp * 2 + R as u32;
                            store_rows(p, half.staging.addr() + eight * 8 * ROW_BYTES, half.row + eight * 8, head, positions[R], pages[R]);
                        });
                        warp::sync_warp();
                    }
                    next.step();
                }
            });
        }
    }
}

/// Of one row of the lane two features of the gated activations, from their sums.
#[inline(always)]
fn gate_pair(gate: [f32; 2], up: [f32; 2], scale: f32) -> u32 {
    let one = |c: usize| swiglu(gate[c] * scale, up[c] * scale);
    math::pack_bf16(one(0), one(1))
}

/// Of box `$b` of the gated activations the lane's part, in the order of [`slot`](crate::linear::slot): of each half of
/// the box and each of its two rows four words, which lie side by side. Of an N-tile's sums the first eight columns are
/// gates, and the others their ups.
macro_rules! gated {
    ($b:expr, $scales:ident) => {{
        let mut words: BoxWords = [[0; 4]; 4];
        unroll!(H < 2; {
            unroll!(T < 4; {
                let (gate, up) = (sums!($b * 64 + H * 32 + T * 8), sums!($b * 64 + H * 32 + T * 8 + 4));
                unroll!(R < 2; {
                    words[2 * H + R][T] = gate_pair(gate[R], up[R], $scales[R]);
                });
            });
        });
        words
    }};
}

mod coded;

pub use coded::SwiGluCoded;

/// Gated activations.
pub struct SwiGlu;

impl Epilogue for SwiGlu {
    const GATED: bool = true;
    type Early = Squares;
    /// The factors of the lane's two rows.
    type Ahead = [f32; 2];

    #[inline(always)]
    unsafe fn early(p: &Gemm, half: &Half) -> Squares {
        // SAFETY: the caller's word.
        unsafe { load_squares(p, half.lane_row(), 0) }
    }

    #[inline(always)]
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, _inside: bool, squares: Squares) -> [f32; 2] {
        // SAFETY: the caller's word.
        unsafe { scales(p, half.lane_row(), squares) }
    }

    #[inline(always)]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, scales: [f32; 2], next: &mut impl Next) {
        // SAFETY: the caller's word.
        unsafe {
            let boxes = [gated!(0, scales), if N > 128 { gated!(1, scales) } else { [[0; 4]; 4] }];
            next.begin();
            // Where other lanes had totals.
            thread::sync_named(half.barrier, GROUP);
            unroll!(B < 2; {
                if B == 0 || N > 128 {
                    half.put_box::<true>(p, B, boxes[B]);
                    next.step();
                }
            });
        }
    }
}

/// The sums times their row's factor, in f32.
pub struct Write;

impl Epilogue for Write {
    const GATED: bool = false;
    type Early = Squares;
    /// The factors of the lane's two rows.
    type Ahead = [f32; 2];

    #[inline(always)]
    unsafe fn early(p: &Gemm, half: &Half) -> Squares {
        // SAFETY: the caller's word.
        unsafe { SwiGlu::early(p, half) }
    }

    #[inline(always)]
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, inside: bool, squares: Squares) -> [f32; 2] {
        // SAFETY: the caller's word.
        unsafe { SwiGlu::ahead::<N>(p, half, inside, squares) }
    }

    #[inline(always)]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, scales: [f32; 2], next: &mut impl Next) {
        // SAFETY: the caller's word.
        unsafe {
            let scales = bias::add::<N, _>(p, half, scales, next);
            let row = half.lane_row();
            let column = half.column + 2 * (thread::opaque(thread::lane_id()) % 4);
            let to = p.y.at(row as usize * p.n as usize + column as usize).cast::<[f32; 2]>();
            unroll!(B < 4; {
                if (B as u32) * BOX < N && half.column + B as u32 * BOX < p.n {
                    unroll!(J < 8; {
                        let sums = sums!(B * 32 + J * 4);
                        unroll!(R < 2; {
                            let pair = [sums[R][0] * scales[R], sums[R][1] * scales[R]];
                            // With rows beyond m, too: stores that not all lanes do would keep operands' descriptors of
                            // the main loop from uniform registers.
                            to.store(R * 4 * p.n as usize + B * 32 + J * 4, pair);
                        });
                    });
                }
            });
            next.begin();
        }
    }
}
