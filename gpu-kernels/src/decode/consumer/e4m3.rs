//! Products of weights and activations in e4m3, whose order [`crate::e4m3`] tells.
//!
//! `wgmma` takes 64 rows of A: here 16 features of four slices, 128 inputs each, which follow each other in a stage.
//! B's columns are the same four slices of each row. So of the products a quarter is wanted: a warpgroup's warp `w` has
//! those of slice `w`, and then, of the next four, of slice `w + 4`. These inner sums meet in shared memory, where a
//! lane adds those of an output from first to last. The two warpgroups take every other N-tile.
//!
//! Of several rows the grid makes codes of all activations once, between two grid barriers; then each block reads them,
//! a chunk of 1,024 inputs at a time. One row's become codes where they are read:
//!
//! ```text
//! some rows  [slices 0 to 3, then 4 to 7][pair of rows][16 bytes of a slice][row of the pair][slice of four][byte]
//! one row    [16 bytes of a slice][slice of eight][byte]
//! ```
//!
//! The columns of one row's slices 4 to 7 begin 64 bytes further than those of 0 to 3; what lies beyond is not wanted.

use cuda_std::shared::{self, Shared};
use cuda_std::wgmma::{self, Cores};
use cuda_std::{Global, bulk, math, thread, warp};

use super::one::{ask_for_factor, sync_with_factor};
use super::{Addend, Consumer, Output, Part, Products, slot, sync};
use crate::decode::attention::QUERY_BYTES;
use crate::decode::exchange::{Word, WordKind, Words};
use crate::decode::{DecodeStep, Mark, Matrix, SCRATCH, SCRATCH_BYTES, WARPS};
use crate::e4m3::{self, CHUNK_INPUTS, GROUP, Inputs};
use crate::linear::N_TILE;
use crate::ring::Ring;
use crate::step::MAX_DECODE_ROWS;
use crate::stream::{N_TILES, SLICE_BYTES, SLICES, STEP_BYTES};
use crate::weights::E4m3;

/// Lanes of a warpgroup.
const HALF: u32 = WARPS / 2 * 32;
/// Most N-tiles of a warpgroup.
const OWN: usize = N_TILES as usize / 2;

/// The weights' scales of a turn: `[n_tile][lower and upper features][slice]`, a lane of a warpgroup's each.
const WEIGHT_SCALES: u32 = N_TILES * 2 * SLICES;
const _: () = assert!(WEIGHT_SCALES == HALF);

/// Of some rows: codes of a chunk; their scales, `[row][slice]`; the weights'; each warpgroup's inner sums,
/// `[slice][row][feature]`.
const CODES: u32 = SCRATCH;
const SCALES: u32 = CODES + Inputs::CHUNK_CODES;
const W_SCALES: u32 = SCALES + Inputs::CHUNK_SCALES * 4;
const SUMS: u32 = W_SCALES + WEIGHT_SCALES * 4;
const SUMS_BYTES: u32 = SLICES * MAX_DECODE_ROWS * N_TILE * 4;
const _: () = assert!(SUMS + 2 * SUMS_BYTES <= SCRATCH + SCRATCH_BYTES);

/// Turns of one row whose input is asked for at a time.
const ASKED: usize = 4;
/// Of one row: two places of outputs, `[n_tile][feature]`; two of codes, with the columns that are not wanted behind
/// them; their scales, `[turn][slice]`; the weights', `[turn]`; inner sums.
const ONE_TOTALS: u32 = N_TILES * N_TILE * 4;
const ONE_CODES: u32 = SCRATCH + 2 * ONE_TOTALS;
const ONE_CODES_BYTES: u32 = ASKED as u32 * CHUNK_INPUTS + SECOND_OF_ONE;
const ONE_SCALES: u32 = ONE_CODES + 2 * ONE_CODES_BYTES;
const ONE_SCALES_BYTES: u32 = ASKED as u32 * SLICES * 4;
const ONE_W_SCALES: u32 = ONE_SCALES + 2 * ONE_SCALES_BYTES;
const ONE_W_SCALES_BYTES: u32 = ASKED as u32 * WEIGHT_SCALES * 4;
const ONE_SUMS: u32 = ONE_W_SCALES + 2 * ONE_W_SCALES_BYTES;
const ONE_SUMS_BYTES: u32 = SLICES * N_TILE * 4;
// As `ONE_BYTES` of products of fragments.
const _: () = assert!(ONE_SUMS + 2 * ONE_SUMS_BYTES <= SCRATCH + QUERY_BYTES);
/// From one row's columns of slice 0 on to those of slice 4 on.
const SECOND_OF_ONE: u32 = SLICES / 2 * 16;

/// In e4m3.
pub struct OfCodes;

impl Products<E4m3> for OfCodes {
    #[inline(always)]
    unsafe fn of_one<const TREE: bool>(consumer: &mut Consumer<'_, TREE>, part: Part, first: (Output, Addend)) {
        // SAFETY: the caller's word.
        unsafe { consumer.e4m3_of_one(part, first) }
    }

    #[inline(always)]
    unsafe fn of_some<const TREE: bool, const TILES: usize, const GROUP: usize>(
        consumer: &mut Consumer<'_, TREE>,
        part: Part,
        old: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            // One tile is of one row alone, which does not come here.
            if TILES > 1 {
                consumer.e4m3_of_some::<TILES, 64>(part, old);
            }
        }
    }
}

/// Rows that `N` columns are of.
const fn rows(n: u32) -> u32 {
    if n == 8 { 1 } else { n / 4 }
}

/// The larger of two magnitudes of each half, bf16 as whole numbers.
#[inline(always)]
fn larger(largest: u32, word: u32) -> u32 {
    largest.max(word & 0x7fff).max(word >> 16 & 0x7fff)
}

/// Four codes: those of a pair of elements, and of another.
#[inline(always)]
fn codes(low: u32, high: u32, inverse: f32) -> u32 {
    let ([a, b], [c, d]) = (math::unpack_bf16(low), math::unpack_bf16(high));
    math::pack_e4m3([a * inverse, b * inverse, c * inverse, d * inverse])
}

/// What the block has of a turn's input.
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
    /// The next turn's, of one row.
    #[inline(always)]
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
    /// Which of the two it is.
    half: u32,
    /// A lane's number in it.
    lane: u32,
    /// Where inner sums meet.
    sums: Shared<f32>,
    /// The weights' scales.
    scales: Global<f32>,
    /// Groups of the inputs.
    groups: u32,
    /// Rows that are there.
    count: u32,
}

impl<const N: u32> Warpgroup<N> {
    #[inline(always)]
    unsafe fn new(p: &DecodeStep, index: u32, count: u32) -> Self {
        let thread = thread::opaque(thread::thread_idx_x());
        let half = thread / HALF;
        let sums = if N == 8 { ONE_SUMS + half * ONE_SUMS_BYTES } else { SUMS + half * SUMS_BYTES };
        let groups = e4m3::groups(p.shape(p.matrix(index)).1);
        // SAFETY: the caller's word.
        unsafe {
            let scales = p.e4m3.scales.at(scales_at(p, index));
            Self { half, lane: thread % HALF, sums: shared::dynamic(sums), scales, groups, count }
        }
    }

    /// The warpgroup's lanes meet.
    #[inline(always)]
    fn sync(&self) {
        thread::sync_named(8 + self.half, HALF);
    }

    /// How many of the block's N-tiles are its.
    #[inline(always)]
    const fn n_tiles(&self, mine: u32) -> u32 {
        (mine + 1 - self.half) / 2
    }

    /// One of the weights' scales that a block's N-tiles have in a turn, of [`WEIGHT_SCALES`] a lane's; zero beyond the
    /// last group and N-tile.
    #[inline(always)]
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

    /// The products of a stage's chunk with a turn's columns: gives the stage back, and leaves the inner sums where the
    /// warpgroup finds them.
    #[inline(always)]
    unsafe fn multiply(&self, stage: &Ring, columns: Shared<u8>) {
        // SAFETY: the caller's word.
        unsafe {
            // From a shuffle the assembler knows that a warp's lanes agree, as descriptors need it.
            let (stage, columns) = (stage.of_lane(0), Shared::<u8>::from_raw(warp::shuffle_idx(columns.addr(), 0)));
            stage.wait_full();
            let (weights, columns) = (Cores::at(stage.stage_buffer()), Cores::at(columns));
            Self::four_slices(weights, columns);
            // All have added what the chunk before left.
            self.sync();
            self.put_inner_sums(0);
            let second = if N == 8 { SECOND_OF_ONE } else { N / 8 * 1024 };
            Self::four_slices(weights.advance(SLICES / 2 * SLICE_BYTES), columns.advance(second));
            if self.lane % 32 < 2 {
                stage.empty().arrive();
            }
            self.put_inner_sums(4);
        }
    }

    /// Those of four slices, and waits for them.
    #[inline(always)]
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

    /// Leaves the inner sums of this warp's slice of the four from `first` on.
    #[inline(always)]
    unsafe fn put_inner_sums(&self, first: u32) {
        let (warp_id, g, t) = (self.lane / 32, self.lane % 32 / 4, self.lane % 4);
        // Of the two columns that a lane has side by side, one is of this warp's slice, or none is.
        let (odd, wanted) = (warp_id % 2 == 1, t % 2 == warp_id / 2);
        unroll!(J < (N as usize / 8) of 8; {
            let row = 2 * J as u32 + t / 2;
            // Not behind a condition, where the assembler would run products one after another.
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

    /// A lane's outputs, of its row and the eighth after it, with a chunk's inner sums added, by the scales of the turn
    /// and the N-tile.
    #[inline(always)]
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

    /// The chunks of so many turns, which are in the ring's next stages, for all of the warpgroup's N-tiles. A lane has
    /// the outputs of each.
    #[inline(always)]
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

    /// Adds what all left to the first outputs, and brings those of the next of `own` N-tiles to the front: after all
    /// of them each is where it was.
    #[inline(always)]
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
    /// Which N-tile of the matrix is the block's `i`-th.
    #[inline(always)]
    fn n_tile(&self, i: u32) -> u32 {
        self.first_n_tile + self.place + i * thread::grid_dim_x()
    }
}

/// Where the scales of the matrix at `index` begin.
#[inline(always)]
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

/// What a lane has of some rows' codes of a chunk: four times 16 bytes, and a scale.
type Codes = ([[u32; 4]; 4], f32);

impl<const TREE: bool> Consumer<'_, TREE> {
    /// Makes codes of all rows' activations, `[count, k]`, spread over the grid: a warp takes four groups of a row at a
    /// time. Groups beyond `k` in the last chunk are zeros.
    #[inline(always)]
    unsafe fn encode_rows(&self, x: Global<cuda_std::bf16>, k: u32) {
        let (lane, grid) = (thread::opaque(thread::lane_id()), thread::grid_dim_x());
        let (part, group) = (lane % 8, lane / 8);
        let halves = 2 * k.div_ceil(CHUNK_INPUTS);
        let mut item = thread::block_idx_x() + grid * thread::opaque(thread::warp_id());
        // SAFETY: the caller's word.
        unsafe {
            cuda_std::assume(halves > 0);
            while item < self.count * halves {
                let (row, half) = (item / halves, item % halves);
                let element = half * (CHUNK_INPUTS / 2) + lane * 16;
                let mut words = [[0; 4]; 2];
                if element < k {
                    let x = x.at((row * k + element) as usize);
                    words = [x.load16(0), x.load16(8)];
                }
                let mut largest = 0;
                unroll!(W < 8; {
                    largest = larger(largest, words[W / 4][W % 4]);
                });
                // Eight lanes have a group.
                unroll!(M < 3; {
                    largest = largest.max(warp::shuffle_xor(largest, 1 << M));
                });
                let [scale, inverse] = e4m3::scale_of(f32::from_bits(largest << 16));
                let set = half % 2 * (MAX_DECODE_ROWS / 2) + row / 2;
                let at = (set * 8 + part / 2 * 2) * 128 + (row % 2 * 4 + group) * 16 + part % 2 * 4;
                let to = self.p.inputs.codes.at((half / 2 * Inputs::CHUNK_CODES + at) as usize).cast::<u32>();
                unroll!(W < 4; {
                    to.store(W / 2 * 32 + W % 2 * 2, codes(words[0][W], words[1][W], inverse));
                });
                if part == 0 {
                    let at = half / 2 * Inputs::CHUNK_SCALES + row * SLICES + half % 2 * 4 + group;
                    self.p.inputs.scales.store(at as usize, scale);
                }
                item += grid * WARPS;
            }
        }
    }

    /// This lane's codes of a chunk; zeros of rows and chunks that are not there.
    #[inline(always)]
    unsafe fn fetch(&self, chunk: u32, chunks: u32) -> Codes {
        let thread = thread::opaque(thread::thread_idx_x());
        let (mut codes, mut scale) = ([[0; 4]; 4], 0.0);
        if chunk < chunks {
            // SAFETY: the caller's word.
            unsafe {
                let from = self.p.inputs.codes.read().at((chunk * Inputs::CHUNK_CODES) as usize).cast::<u32>();
                unroll!(I < 4; {
                    let unit = thread + I as u32 * (WARPS * 32);
                    if Self::row_of(unit) < self.count {
                        codes[I] = from.load16((unit * 4) as usize);
                    }
                });
                if thread / SLICES < self.count {
                    scale = self.p.inputs.scales.read().load((chunk * Inputs::CHUNK_SCALES + thread) as usize);
                }
            }
        }
        (codes, scale)
    }

    /// The row that 16 bytes of a chunk's codes are of, by their number.
    #[inline(always)]
    const fn row_of(unit: u32) -> u32 {
        unit / 64 % (MAX_DECODE_ROWS / 2) * 2 + unit % 8 / 4
    }

    /// Puts them where the block's consumers find them.
    #[inline(always)]
    unsafe fn stage_codes(&self, (codes, scale): &Codes, is_first: bool) {
        let thread = thread::opaque(thread::thread_idx_x());
        // SAFETY: the caller's word.
        unsafe {
            let to = shared::dynamic::<u32>(CODES);
            unroll!(I < 4; {
                let unit = thread + I as u32 * (WARPS * 32);
                // Rows that are not there have zeros, left once.
                if Self::row_of(unit) < self.count || is_first {
                    to.store16((unit * 4) as usize, codes[I]);
                }
            });
            if thread / SLICES < self.count {
                shared::dynamic::<f32>(SCALES).store(thread as usize, *scale);
            }
        }
    }

    /// A GEMM of up to `TILES` times 8 rows, over all its waves, of which `part` is the first, and what becomes of its
    /// outputs; `old` is what the first of them are added to. `N` is four times as many columns.
    #[inline(always)]
    unsafe fn e4m3_of_some<const TILES: usize, const N: u32>(&mut self, mut part: Part, mut old: [Addend; 2]) {
        // SAFETY: the caller's word.
        unsafe {
            let group = Warpgroup::<N>::new(self.p, part.index, self.count);
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let (n_tiles, k) = self.p.shape(part.matrix);
            cuda_std::assume(self.count > 0);
            let (x, norm) = self.input(part.matrix);
            self.encode_rows(x, k);
            self.arrive();
            self.wait_for_all();
            let (count, chunks) = (self.count, k.div_ceil(CHUNK_INPUTS));
            let mut ring = self.ring;
            loop {
                if part.mine > 0 {
                    let mut codes = self.fetch(0, chunks);
                    let mut w_scale = group.weight_scale(&part, 0);
                    let normed = part.first_n_tile == 0 && !norm.squares.is_null() && warp_id < count;
                    let mut squares = [0f32; TILES];
                    if normed {
                        let mut rows = [0; TILES];
                        unroll!(T < TILES of 2; {
                            rows[T] = (warp_id + T as u32 * WARPS).min(count - 1);
                        });
                        squares = norm.lane_squares(rows);
                    }
                    let mut totals = [[0f32; 2]; OWN];
                    let mut turn = 0;
                    while turn < part.depth {
                        if turn > 0 {
                            // All have multiplied what lies there.
                            sync();
                        }
                        if normed && turn == 0 {
                            self.put_factors(norm, squares, lane, warp_id);
                        }
                        self.stage_codes(&codes, turn == 0);
                        // Both warpgroups have the same.
                        if group.half == 0 {
                            shared::dynamic::<f32>(W_SCALES).store(group.lane as usize, w_scale);
                        }
                        bulk::fence_proxy_async();
                        sync();
                        codes = self.fetch(turn + 1, chunks);
                        w_scale = group.weight_scale(&part, turn + 1);
                        let staged = Staged {
                            codes: shared::dynamic(CODES),
                            scales: shared::dynamic(SCALES),
                            w_scales: shared::dynamic(W_SCALES),
                        };
                        group.turns((&mut ring, part.mine, 1), staged, &mut totals);
                        turn += 1;
                    }
                    sync();
                    let words = TILES as u32 * 8 * N_TILE;
                    unroll!(S < 4; {
                        if (S as u32) < group.n_tiles(part.mine) {
                            let n_tile = 2 * S as u32 + group.half;
                            let to = shared::dynamic::<f32>(SCRATCH).at((n_tile * words) as usize);
                            unroll!(R < TILES of 2; {
                                let row = group.lane / N_TILE + 8 * R as u32;
                                if row < count {
                                    to.store(slot(row, group.lane % N_TILE) as usize, totals[S][R]);
                                }
                            });
                        }
                    });
                    self.put_sums::<1>(&part, words, 1.0, old);
                }
                if part.end == n_tiles {
                    break;
                }
                part = self.part::<E4m3>(part.index, part.end);
                old = self.first_addends(&part);
            }
            self.ring = ring;
        }
    }

    /// The same of one row, whose input comes as words: a warp asks for a slice of each turn's, and makes its codes.
    #[inline(always)]
    unsafe fn e4m3_of_one(&mut self, mut part: Part, mut first: (Output, Addend)) {
        // SAFETY: the caller's word.
        unsafe {
            let group = Warpgroup::<8>::new(self.p, part.index, 1);
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let (input, normed) = match part.matrix {
                Matrix::Output => (self.taken_in(WordKind::Attended, part.index), false),
                Matrix::Down => (self.taken_in(WordKind::Activation, part.index), false),
                Matrix::Qkv | Matrix::GateUp | Matrix::Head => (self.taken_in(WordKind::Scaled, part.index), true),
            };
            let n_tiles = self.p.shape(part.matrix).0;
            // A lane's word with this number: of two of each turn, which are to be neighbours as codes.
            let first_word = lane / 4 * 8 + lane % 4;
            let place = |turn: u32, i: usize| {
                (turn + i as u32 / 2) * (CHUNK_INPUTS / 2) + warp_id * (GROUP / 2) + first_word + i as u32 % 2 * 4
            };
            let mut ring = self.ring;
            loop {
                if part.mine > 0 {
                    // New to the compiler, which would keep these addresses from wave to wave.
                    let mut words = ask_for(&input, |i| place(thread::opaque(0), i));
                    let w_scales = |turn: u32| [0, 2].map(|more| group.weight_scale(&part, turn + group.half + more));
                    let mut next_scales = w_scales(0);
                    let normed = normed && part.first_n_tile == 0;
                    if normed {
                        ask_for_factor(self.flag + part.index);
                    }
                    let mut totals = [[0f32; 2]; OWN];
                    let (mut turn, mut buffer) = (0, 0);
                    while turn < part.depth {
                        input.settle(&mut words, |i| place(turn, i));
                        if turn == 0 && part.first_n_tile == 0 {
                            self.mark(Mark::GridBarrier);
                        }
                        let staged = Staged {
                            codes: shared::dynamic(ONE_CODES + buffer * ONE_CODES_BYTES),
                            scales: shared::dynamic(ONE_SCALES + buffer * ONE_SCALES_BYTES),
                            w_scales: shared::dynamic(ONE_W_SCALES + buffer * ONE_W_SCALES_BYTES),
                        };
                        stage_words(&words, &staged, lane, warp_id);
                        unroll!(I < 2; {
                            let i = group.lane + (group.half + 2 * I as u32) * WEIGHT_SCALES;
                            staged.w_scales.store(i as usize, next_scales[I]);
                        });
                        // Two places one after the other: when one is written again, all have met behind its reading.
                        buffer ^= 1;
                        bulk::fence_proxy_async();
                        sync();
                        let end = part.depth.min(turn + ASKED as u32);
                        if end < part.depth {
                            words = ask_for(&input, |i| place(end, i));
                            next_scales = w_scales(end);
                        }
                        group.turns((&mut ring, part.mine, end - turn), staged, &mut totals);
                        turn = end;
                    }
                    // As of products of fragments.
                    self.turn ^= 1;
                    let partial = shared::dynamic::<f32>(SCRATCH + self.turn * ONE_TOTALS);
                    if group.lane < N_TILE {
                        unroll!(S < 4; {
                            if (S as u32) < group.n_tiles(part.mine) {
                                let n_tile = 2 * S as u32 + group.half;
                                partial.store((n_tile * N_TILE + group.lane) as usize, totals[S][0]);
                            }
                        });
                    }
                    if normed {
                        sync_with_factor();
                    } else {
                        sync();
                    }
                    self.put_sums_of_one::<1>(&part, partial, 1.0, first);
                } else {
                    // Asking for what comes after it, again and again, would slow down those who have a part in it.
                    input.expect();
                }
                if part.end == n_tiles {
                    break;
                }
                part = self.part::<E4m3>(part.index, part.end);
                first = self.first_of_one(&part);
            }
            self.ring = ring;
        }
    }
}

/// Asks for a lane's words of the next turns; of those beyond the input there are none.
#[inline(always)]
unsafe fn ask_for(input: &Words, place: impl Fn(usize) -> u32) -> [Word; 2 * ASKED] {
    let mut words = [input.nothing(); 2 * ASKED];
    unroll!(I < 8; {
        let i = place(I);
        if i < input.len {
            // SAFETY: the caller's word.
            words[I] = unsafe { input.ask(i) };
        }
    });
    words
}

/// Makes codes of a warp's slice of each turn for the consumers of the block, and zeros of the columns behind them.
#[inline(always)]
unsafe fn stage_words(words: &[Word; 2 * ASKED], staged: &Staged, lane: u32, warp_id: u32) {
    if warp_id == 0 && lane < SECOND_OF_ONE / 4 {
        // SAFETY: the caller's word.
        unsafe { staged.codes.at(ASKED * CHUNK_INPUTS as usize).cast::<u32>().store(lane as usize, 0) };
    }
    unroll!(I < 4; {
        let (low, high) = (words[2 * I].bits(), words[2 * I + 1].bits());
        let mut largest = larger(larger(0, low), high);
        unroll!(M < 5; {
            largest = largest.max(warp::shuffle_xor(largest, 1 << M));
        });
        let [scale, inverse] = e4m3::scale_of(f32::from_bits(largest << 16));
        let core = lane / 8 * 2 + lane / 2 % 2;
        let at = (core * SLICES + warp_id) * 16 + lane % 2 * 8 + lane / 4 % 2 * 4;
        // SAFETY: the caller's word.
        unsafe {
            let to = staged.codes.at(I * CHUNK_INPUTS as usize + at as usize);
            to.cast::<u32>().store(0, codes(low, high, inverse));
            if lane == 0 {
                staged.scales.store(I * SLICES as usize + warp_id as usize, scale);
            }
        }
    });
}
