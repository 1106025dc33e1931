//! Adds a tile's sums to the residual stream, and prepares the norm that comes next.
//!
//! A warp has 16 rows of the tile, and takes them eight at a time by [`SPAN`] features: a unit. It turns a unit's sums in its own part of shared memory, so
//! that it loads and stores whole rows of 512 bytes, with no barrier across warps. A tile of 256 features has four units. If another tile follows, only the
//! first is added at once, with its residual stream in registers before the products are done; the others wait, one in shared memory and two in registers, and are
//! added a row a step of the next tile's products. Of a block's last tile the residual stream of two units is there at once, that of the others is loaded
//! into the registers of sums that were put away.

use cuda_std::shared::{self, Shared};
use cuda_std::{math, thread, warp, wgmma};

use super::{Epilogue, Half, Next};
use crate::gemm::{Gemm, SPAN};
use crate::linear::STRIP;

/// The residual stream.
pub struct Add;

/// The lane and its warp in the block: a warp's rows are 16 of the tile's.
#[inline(always)]
fn place_in_block() -> (u32, u32) {
    let thread = thread::fresh(thread::thread_idx_x());
    (thread % 32, thread / 32)
}

/// Rows of a warp.
const WARP_ROWS: u32 = 16;
/// Rows of a unit: of those of a warp, the upper or the lower half.
const UNIT_ROWS: u32 = 8;
/// Bytes of a row of a unit's sums.
const ROW_BYTES: u32 = SPAN * 4;

/// Four features of each row of a unit.
type Rows = [[f32; 4]; 8];

/// The lane's sums of a unit: 16 times two columns of a row.
type Sums = [[f32; 2]; 16];

/// Where a unit is: its first row in the first warp, and its first feature.
#[derive(Clone, Copy)]
struct Unit {
    row: u32,
    column: u32,
}

impl Unit {
    /// The unit of a tile whose first row and feature are `row` and `column`.
    #[inline(always)]
    const fn of((row, column): (u32, u32), span: u32, half: u32) -> Self {
        Self { row: row + half * UNIT_ROWS, column: column + span * SPAN }
    }

    /// The element of the residual stream at which the lane's features begin in its first row.
    #[inline(always)]
    fn element(self, p: &Gemm) -> u32 {
        let (lane, warp) = place_in_block();
        (self.row + warp * WARP_ROWS) * p.residual.dim + self.column + lane * 4
    }

    /// The norm's weights of the lane's features.
    #[inline(always)]
    unsafe fn norm(self, p: &Gemm) -> [u32; 2] {
        let column = self.column + place_in_block().0 * 4;
        unsafe { p.next_norm.at(column as usize).cast::<[u32; 2]>().load(0) }
    }

    /// Stores the rows' sums of squares: row `i`'s from lane `i`.
    #[inline(always)]
    unsafe fn store_squares(self, p: &Gemm, sum: f32) {
        let (lane, warp) = place_in_block();
        let row = self.row + warp * WARP_ROWS + lane;
        if lane < UNIT_ROWS {
            unsafe { p.residual.squares.store((row * (p.residual.dim / STRIP) + self.column / SPAN) as usize, sum) };
        }
    }
}

#[inline(always)]
unsafe fn load_row(p: &Gemm, element: u32) -> [f32; 4] {
    unsafe { p.residual.x.load16(element as usize) }.map(f32::from_bits)
}

#[inline(always)]
unsafe fn load_rows(p: &Gemm, unit: Unit) -> Rows {
    let element = unit.element(p);
    let mut x = [[0.0; 4]; 8];
    unroll!(I < 8; {
        x[I] = unsafe { load_row(p, element + I as u32 * p.residual.dim) };
    });
    x
}

/// The warp's own part of shared memory: a unit's sums, the 16-byte chunks of a row permuted by its number.
#[inline(always)]
fn staging(n: u32) -> u32 {
    let boxes = unsafe { shared::dynamic::<u8>(Gemm::boxes(n)) };
    boxes.addr() + place_in_block().1 * UNIT_ROWS * ROW_BYTES
}

const fn permutation(row: u32) -> u32 {
    row % 4 * 32
}

#[inline(always)]
fn put(n: u32, sums: Sums) {
    let (line, pair) = (place_in_block().0 / 4, place_in_block().0 % 4);
    let at = staging(n) + line * ROW_BYTES + ((pair * 8) ^ permutation(line));
    unroll!(J < 16; {
        // The chunk's number is permuted in its two lowest places of 32 bytes.
        let to: Shared<[f32; 2]> = Shared::from_raw((at ^ (J as u32 % 4 * 32)) + J as u32 / 4 * 128);
        unsafe { to.store(0, sums[J]) };
    });
    warp::sync_warp();
}

/// Adds row `i` of the unit in shared memory to `x`, and stores it at `element`: the lane's sum of squares.
#[inline(always)]
unsafe fn add_row(p: &Gemm, from: u32, i: u32, x: [f32; 4], norm: [u32; 2], element: u32) -> f32 {
    unsafe {
        let from = Shared::<u8>::from_raw((from ^ permutation(i)) + i * ROW_BYTES);
        let s = from.load16(0).map(f32::from_bits);
        let new = [x[0] + s[0], x[1] + s[1], x[2] + s[2], x[3] + s[3]];
        p.residual.x.store16(element as usize, new.map(f32::to_bits));
        let [w0, w1] = norm.map(math::unpack_bf16);
        let words = [math::pack_bf16(new[0] * w0[0], new[1] * w0[1]), math::pack_bf16(new[2] * w1[0], new[3] * w1[1])];
        p.residual.scaled.at(element as usize).cast::<[u32; 2]>().store(0, words);
        math::fma(new[0], new[0], new[1] * new[1]) + math::fma(new[2], new[2], new[3] * new[3])
    }
}

macro_rules! sums_of {
    ($span:expr, $half:expr) => {{
        let mut s: Sums = [[0.0; 2]; 16];
        unroll!(J < 16; {
            s[J] = [wgmma::get::<{ $span * 64 + J * 4 + $half * 2 }>(), wgmma::get::<{ $span * 64 + J * 4 + $half * 2 + 1 }>()];
        });
        s
    }};
}

impl Epilogue for Add {
    const GATED: bool = false;
    type Early = ();
    /// Of the first units.
    type Ahead = ([Rows; 2], [u32; 2]);

    #[inline(always)]
    unsafe fn early(_: &Gemm, _: &Half) {}

    #[inline(always)]
    unsafe fn ahead<const N: u32, const NEXT: bool>(p: &Gemm, half: &Half, inside: bool, (): ()) -> Self::Ahead {
        let unit = |half_of_rows| Unit::of((half.tile_row, half.column), 0, half_of_rows);
        let (mut x, mut norm) = ([[[0.0; 4]; 8]; 2], [0; 2]);
        unsafe {
            if inside {
                norm = unit(0).norm(p);
                x[0] = load_rows(p, unit(0));
                if N == 128 || !NEXT {
                    x[1] = load_rows(p, unit(1));
                }
            }
        }
        (x, norm)
    }

    #[inline(always)]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, ahead: Self::Ahead, next: &mut impl Next) {
        let tile = (half.tile_row, half.column);
        unsafe {
            if N > 128 {
                finish_beside(p, tile, ahead, next);
            } else {
                finish_all::<N>(p, tile, ahead);
                next.begin();
            }
        }
    }

    const LAST_APART: bool = true;

    #[inline(always)]
    unsafe fn finish_last<const N: u32>(p: &Gemm, half: &Half, ahead: Self::Ahead) {
        unsafe { finish_all::<N>(p, (half.tile_row, half.column), ahead) }
    }
}

/// Adds all units, of which the residual stream of the first two is there.
#[inline(always)]
#[allow(unused_assignments, reason = "every unit but the last two loads for another")]
unsafe fn finish_all<const N: u32>(p: &Gemm, tile: (u32, u32), (x, norm): <Add as Epilogue>::Ahead) {
    unsafe {
        let second = N > 128 && tile.1 + SPAN < p.n;
        let mut x = [x[0], x[1], [[0.0; 4]; 8], [[0.0; 4]; 8]];
        let mut norm = [norm, [0; 2]];
        macro_rules! unit {
            ($span:literal, $half:literal) => {{
                put(N, sums_of!($span, $half));
                add_unit(p, N, Unit::of(tile, $span, $half), x[2 * $span + $half], norm[$span], || {
                    if $span == 0 && N > 128 {
                        // Without a second span, the first again, so that there is no branch.
                        let unit = Unit::of(tile, u32::from(second), $half);
                        x[2 + $half] = load_rows(p, unit);
                        if $half == 0 {
                            norm[1] = unit.norm(p);
                        }
                    }
                });
            }};
        }
        unit!(0, 0);
        unit!(0, 1);
        if second {
            unit!(1, 0);
            unit!(1, 1);
        }
    }
}

/// Adds the first unit, and all others beside the products of the `next` tile: the second waits in shared memory, those of the second span in registers.
#[inline(always)]
unsafe fn finish_beside(p: &Gemm, tile: (u32, u32), (x, norm): <Add as Epilogue>::Ahead, next: &mut impl Next) {
    unsafe {
        put(256, sums_of!(0, 0));
        add_unit(p, 256, Unit::of(tile, 0, 0), x[0], norm, || {});
        put(256, sums_of!(0, 1));
        let sums = [sums_of!(1, 0), sums_of!(1, 1)];
        next.begin();
        let mut add = |unit: Unit, norm: [u32; 2]| {
            let mut element = unit.element(p);
            let mut x = [load_row(p, element), load_row(p, element + p.residual.dim)];
            let (mut i, mut squares) = (0, 0.0);
            while i < thread::fresh(UNIT_ROWS) {
                unroll!(R < 2; {
                    next.step();
                    let lane = place_in_block().0;
                    let square = sum_of_row(add_row(p, staging(256) + lane * 16, i, x[R], norm, element));
                    if lane == i {
                        squares = square;
                    }
                    // What is added two rows on comes while the products of two steps run.
                    if i + 2 < UNIT_ROWS {
                        x[R] = load_row(p, element + 2 * p.residual.dim);
                    }
                    i += 1;
                    element += p.residual.dim;
                });
            }
            unit.store_squares(p, squares);
            warp::sync_warp();
        };
        let unit = Unit::of(tile, 0, 1);
        add(unit, unit.norm(p));
        if tile.1 + SPAN < p.n {
            let unit = Unit::of(tile, 1, 0);
            let norm = unit.norm(p);
            put(256, sums[0]);
            add(unit, norm);
            put(256, sums[1]);
            add(Unit::of(tile, 1, 1), norm);
        }
    }
}

/// Adds the unit in shared memory to `x`; calls `load` after the first rows waited for what was loaded before: the assembler counts loads with one counter, and
/// else would wait for those as well.
#[inline(always)]
unsafe fn add_unit(p: &Gemm, n: u32, unit: Unit, x: Rows, norm: [u32; 2], mut load: impl FnMut()) {
    unsafe {
        let lane = place_in_block().0;
        let from = staging(n) + lane * 16;
        let element = unit.element(p);
        let mut squares = [0.0; 8];
        unroll!(I < 8; {
            if I == 3 {
                load();
            }
            squares[I] = add_row(p, from, I as u32, x[I], norm, element + I as u32 * p.residual.dim);
        });
        unit.store_squares(p, sum_of_rows(squares, lane));
        warp::sync_warp();
    }
}

/// The sum of `v` over all lanes.
#[inline(always)]
fn sum_of_row(mut v: f32) -> f32 {
    unroll!(I < 5; {
        v += warp::shuffle_xor(v, 1 << I);
    });
    v
}

/// Of eight numbers in each lane, the sum over all lanes of number `lane % 8`, added in the order of [`sum_of_row`].
#[inline(always)]
fn sum_of_rows(v: [f32; 8], lane: u32) -> f32 {
    let [first, second] = [[v[0], v[1], v[2], v[3]], [v[4], v[5], v[6], v[7]]].map(|four| sum_of_four(four, lane % 4));
    let mut sum = pick_sum(lane / 4 % 2, 4, first, second);
    sum += warp::shuffle_xor(sum, 8);
    sum + warp::shuffle_xor(sum, 16)
}

/// Of four numbers in each of four lanes, the sum over the lanes of number `pair`.
#[inline(always)]
fn sum_of_four(v: [f32; 4], pair: u32) -> f32 {
    pick_sum(pair / 2, 2, pick_sum(pair % 2, 1, v[0], v[1]), pick_sum(pair % 2, 1, v[2], v[3]))
}

/// `a` (where `which` is 0) or `b` of two lanes that differ in bit `mask`, whose `which` that bit is: the sum of both lanes'.
#[inline(always)]
fn pick_sum(which: u32, mask: u32, a: f32, b: f32) -> f32 {
    // By bits, so that no branch comes of it.
    let bits = 0u32.wrapping_sub(which);
    let pick = |bits: u32| f32::from_bits(a.to_bits() & !bits | b.to_bits() & bits);
    pick(bits) + warp::shuffle_xor(pick(!bits), mask)
}
