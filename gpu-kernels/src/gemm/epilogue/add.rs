//! Adds a tile's sums to the residual stream, and prepares the norm that comes next.
//!
//! A warp has 16 rows of the tile, and takes them in *units* of eight rows by [`SPAN`] features. It rearranges a unit's
//! sums in its own part of shared memory. So it loads and stores whole rows of 512 bytes, and needs no barrier across
//! warps.
//!
//! A tile of 256 features has four units. If another tile follows, the warp adds only the first at once. Of the others,
//! one waits in shared memory and two in registers. They are added beside the next tile's MMAs, two rows a step. All
//! this ends within the next tile's first split-K partial, since later its totals take those registers. For a CTA's
//! last tile, the residual stream of two units is loaded at once; that of the other two follows into the registers of
//! sums that were put away.
//!
//! A unit's features are a [group](e4m3::GROUP) of e4m3: where the next GEMM multiplies codes, the unit's rows become
//! codes at once.
//!
//! # Safety
//! As for [all epilogues](super): `p` is the launch's parameter block, and its residual stream has room for whole tiles
//! of rows, with [`spans`](crate::norm::Residual::spans). Whole warps call these functions, each for its own 16 rows of
//! the tile, which nobody else reads or writes meanwhile. A unit is of the tile. The warp's part of shared memory holds
//! the unit that is added, and neither totals nor boxes.

use cuda_std::shared::{self, Shared};
use cuda_std::{device, thread, warp, wgmma};

use super::{Epilogue, Half, Next};
use crate::e4m3;
use crate::gemm::{Gemm, SPAN, TOTALS_BYTES};
use crate::norm::{lane_element, lane_weights, scaled_lane};

/// Adds to the residual stream. With `IN_CODES` the norm's input is written as [codes](Gemm::codes).
pub struct AddTo<const IN_CODES: bool>;
/// Adds to the residual stream, and writes the norm's input in bf16.
pub type Add = AddTo<false>;

/// The lane and its warp in the CTA: the warp has 16 rows of the tile.
#[device]
fn place_in_block() -> (u32, u32) {
    let thread = thread::opaque(thread::thread_idx_x());
    (thread % 32, thread / 32)
}

/// Rows of a warp.
const WARP_ROWS: u32 = 16;
/// Rows of a unit: the upper or the lower half of a warp's rows.
const UNIT_ROWS: u32 = 8;
/// Bytes of a row of a unit's sums.
const ROW_BYTES: u32 = SPAN * 4;

/// The lane's four features of each row of a unit.
type UnitRows = [[f32; 4]; 8];

/// The lane's sums of a unit, as the accumulators hold them: two columns of one row in each of 16 groups of eight.
type Sums = [[f32; 2]; 16];

/// Where a unit is: its first row as the first warp has it, and its first feature.
#[derive(Clone, Copy)]
struct Unit {
    row: u32,
    column: u32,
}

impl Unit {
    /// The unit of a tile whose first row and feature are `row` and `column`: `span` numbers its features, `half` its
    /// rows.
    #[device]
    const fn of((row, column): (u32, u32), span: u32, half: u32) -> Self {
        Self { row: row + half * UNIT_ROWS, column: column + span * SPAN }
    }

    /// Row `i` of this warp's unit.
    #[device]
    fn row(self, i: u32) -> u32 {
        self.row + place_in_block().1 * WARP_ROWS + i
    }

    /// The weights of the next norm for the lane's features.
    #[device]
    unsafe fn norm(self, p: &Gemm) -> [u32; 2] {
        // SAFETY: the caller's word.
        unsafe { lane_weights(p.next_norm, self.column, place_in_block().0) }
    }

    /// The residual stream at the lane's features of row `i`.
    #[device]
    unsafe fn load_row(self, p: &Gemm, i: u32) -> [f32; 4] {
        // SAFETY: the caller's word.
        unsafe { p.residual.load_lane(self.row(i), self.column, place_in_block().0) }
    }

    #[device]
    unsafe fn load_rows(self, p: &Gemm) -> UnitRows {
        let mut x = [[0.0; 4]; 8];
        unroll!(I < 8; {
            // SAFETY: the caller's word.
            x[I] = unsafe { self.load_row(p, I as u32) };
        });
        x
    }

    /// Adds row `i` of the unit in shared memory to `x`, and stores the result. Returns the lane's sum of squares, and
    /// what the norm that comes next reads; that is stored here too, unless it will be `IN_CODES`.
    ///
    /// # Safety
    /// `i` is below [`UNIT_ROWS`]. `from` is the lane's first chunk in the warp's part of shared memory, where the
    /// whole unit [was put](put); `x` and `norm` are of the row.
    #[device]
    unsafe fn add_row<const IN_CODES: bool>(
        self,
        p: &Gemm,
        from: u32,
        i: u32,
        x: [f32; 4],
        norm: [u32; 2],
    ) -> (f32, [u32; 2]) {
        // SAFETY: the caller's word.
        unsafe {
            let from = Shared::<u8>::from_raw((from ^ permutation(i)) + i * ROW_BYTES);
            let s = from.load16(0).map(f32::from_bits);
            let new = [x[0] + s[0], x[1] + s[1], x[2] + s[2], x[3] + s[3]];
            let (row, lane) = (self.row(i), place_in_block().0);
            let square = p.residual.put_lane(row, self.column, lane, new);
            let scaled = scaled_lane(new, norm);
            if !IN_CODES {
                p.residual.scaled_of_lane(row, self.column, lane).store(0, scaled);
            }
            (square, scaled)
        }
    }
}

/// The warp's own part of shared memory: a unit's sums. The 16-byte chunks of a row are permuted by the row's number. A
/// chunk is what a lane [has](crate::norm::lane_element) of a row.
#[device]
fn staging(n: u32) -> u32 {
    // SAFETY: an address, from which nothing is read here.
    let boxes = unsafe { shared::dynamic::<u8>(Gemm::boxes(n)) };
    // With wide tiles it lies among the totals of the warp's own lanes.
    let bytes = if n == 128 { UNIT_ROWS * ROW_BYTES } else { TOTALS_BYTES / 8 };
    boxes.addr() + place_in_block().1 * bytes
}

/// What the offset of a chunk is XORed with in this row, so that the stores of two rows have no bank conflict.
const fn permutation(row: u32) -> u32 {
    row % 2 * 64
}

/// Puts a unit's sums into the warp's part of shared memory.
///
/// # Safety
/// The lanes have passed a barrier of the warp since one read what lies there. `n` is the number of weight rows that
/// the tile is multiplied by, 128 or 256.
#[device]
unsafe fn put(n: u32, sums: Sums) {
    let (line, pair) = (place_in_block().0 / 4, place_in_block().0 % 4);
    let at = staging(n) + line * ROW_BYTES + ((pair * 16) ^ permutation(line));
    unroll!(S < 8; {
        // The chunks of an N-tile come from the four lanes of a row.
        let to: Shared<u8> = Shared::from_raw(at ^ (S as u32 % 2 * 64));
        let ([a, b], [c, d]) = (sums[2 * S], sums[2 * S + 1]);
        // SAFETY: the caller's word.
        unsafe { to.at(S / 2 * 128).store16(0, [a, b, c, d].map(f32::to_bits)) };
    });
    warp::sync_warp();
}

/// The lane's sums of a unit, from the accumulators of its span and of its half of the rows.
macro_rules! sums_of {
    ($span:expr, $half:expr) => {{
        let mut s: Sums = [[0.0; 2]; 16];
        unroll!(J < 16; {
            s[J] = [wgmma::get::<{ $span * 64 + J * 4 + $half * 2 }>(), wgmma::get::<{ $span * 64 + J * 4 + $half * 2 + 1 }>()];
        });
        s
    }};
}

impl<const IN_CODES: bool> Epilogue for AddTo<IN_CODES> {
    const GATED: bool = false;
    type Early = ();
    /// The residual stream of both units, with tiles of 128 features only; and the norm's weights of the first span.
    type Ahead = ([UnitRows; 2], [u32; 2]);

    #[device]
    unsafe fn early(_: &Gemm, _: &Half) {}

    #[device]
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, inside: bool, (): ()) -> Self::Ahead {
        let unit = |half_of_rows| Unit::of((half.tile_row, half.column), 0, half_of_rows);
        let (mut x, mut norm) = ([[[0.0; 4]; 8]; 2], [0; 2]);
        // SAFETY: the caller's word.
        unsafe {
            if inside {
                norm = unit(0).norm(p);
                if N == 128 {
                    x = [unit(0).load_rows(p), unit(1).load_rows(p)];
                }
            }
        }
        (x, norm)
    }

    #[device]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, ahead: Self::Ahead, next: &mut impl Next) {
        let tile = (half.tile_row, half.column);
        // SAFETY: the caller's word.
        unsafe {
            if N > 128 {
                finish_beside(p, tile, ahead.1, next);
            } else {
                finish_all::<N, IN_CODES>(p, tile, ahead);
                next.begin();
            }
        }
    }

    const LAST_APART: bool = true;

    #[device]
    unsafe fn finish_last<const N: u32>(p: &Gemm, half: &Half, ahead: Self::Ahead) {
        // SAFETY: the caller's word.
        unsafe { finish_all::<N, IN_CODES>(p, (half.tile_row, half.column), ahead) }
    }
}

/// Adds all units. With tiles of 128 features, the residual stream of both is in `x` already.
///
/// # Safety
/// The accumulators hold the tile's sums, and no MMAs are under way. `N` is 128 or 256.
#[device]
#[allow(unused_assignments, reason = "every unit but the last two loads for another")]
unsafe fn finish_all<const N: u32, const IN_CODES: bool>(
    p: &Gemm,
    tile: (u32, u32),
    (x, norm): <Add as Epilogue>::Ahead,
) {
    // SAFETY: the caller's word.
    unsafe {
        let second = N > 128 && tile.1 + SPAN < p.n;
        let mut x = [x[0], x[1], [[0.0; 4]; 8], [[0.0; 4]; 8]];
        if N > 128 {
            (x[0], x[1]) = (Unit::of(tile, 0, 0).load_rows(p), Unit::of(tile, 0, 1).load_rows(p));
        }
        let mut norm = [norm, [0; 2]];
        macro_rules! unit {
            ($span:literal, $half:literal) => {{
                put(N, sums_of!($span, $half));
                let unit = Unit::of(tile, $span, $half);
                add_unit::<IN_CODES>(p, N, unit, x[2 * $span + $half], norm[$span], || {
                    if $span == 0 && N > 128 {
                        // Without a second span, loads the first again, so that there is no branch.
                        let unit = Unit::of(tile, u32::from(second), $half);
                        x[2 + $half] = unit.load_rows(p);
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

/// Adds the first unit at once, and the others beside the MMAs of the `next` tile. Until then the second unit waits in
/// shared memory, and those of the second span in registers.
///
/// # Safety
/// The accumulators hold the sums of a tile of 256 features, and no MMAs are under way. The whole warpgroup calls it:
/// `next` needs it.
#[device]
unsafe fn finish_beside(p: &Gemm, tile: (u32, u32), norm: [u32; 2], next: &mut impl Next) {
    // SAFETY: the caller's word.
    unsafe {
        let first = Unit::of(tile, 0, 0);
        let x = first.load_rows(p);
        put(256, sums_of!(0, 0));
        add_unit::<false>(p, 256, first, x, norm, || {});
        put(256, sums_of!(0, 1));
        let sums = [sums_of!(1, 0), sums_of!(1, 1)];
        next.begin();
        let mut add = |unit: Unit, norm: [u32; 2]| {
            let mut x = [unit.load_row(p, 0), unit.load_row(p, 1)];
            let mut i = 0;
            while i < thread::opaque(UNIT_ROWS) {
                next.step();
                unroll!(R < 2; {
                    let lane = place_in_block().0;
                    let (square, _) = unit.add_row::<false>(p, staging(256) + lane * 16, i, x[R], norm);
                    p.residual.put_sums(unit.row(i), unit.column, lane, square);
                    // The next two rows' loads run beside the MMAs of a step.
                    if i + 2 < UNIT_ROWS {
                        x[R] = unit.load_row(p, i + 2);
                    }
                    i += 1;
                });
            }
            warp::sync_warp();
        };
        let unit = Unit::of(tile, 0, 1);
        add(unit, norm);
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

/// Adds the unit in shared memory to `x`. Calls `load` only after the first rows have waited for earlier loads: the
/// assembler counts loads with one counter, and would else wait for these as well.
///
/// # Safety
/// The unit [was put](put), for the same `n`; `x` and `norm` are what `p` has of it. What `load` reads is there.
#[device]
unsafe fn add_unit<const IN_CODES: bool>(
    p: &Gemm,
    n: u32,
    unit: Unit,
    x: UnitRows,
    norm: [u32; 2],
    mut load: impl FnMut(),
) {
    // SAFETY: the caller's word.
    unsafe {
        let lane = place_in_block().0;
        let from = staging(n) + lane * 16;
        let (mut squares, mut scaled) = ([0.0; 8], [[0; 2]; 8]);
        unroll!(I < 8; {
            if I == 3 {
                load();
            }
            (squares[I], scaled[I]) = unit.add_row::<IN_CODES>(p, from, I as u32, x[I], norm);
        });
        if IN_CODES {
            put_codes(p, unit, scaled);
        }
        // Four lanes have an N-tile. Of its sums, each lane stores those of rows `lane % 4` and `lane % 4 + 4`.
        let [first, second] =
            [[0, 1, 2, 3], [4, 5, 6, 7]].map(|rows| sum_of_four(rows.map(|i: usize| squares[i]), lane % 4));
        let row = unit.row(lane % 4);
        p.residual.put_n_tile(row, unit.column + lane_element(lane), first);
        p.residual.put_n_tile(row + 4, unit.column + lane_element(lane), second);
        // The span's sum, of row `lane % 8`.
        let mut sum = pick_sum(lane / 4 % 2, 4, first, second);
        sum += warp::shuffle_xor(sum, 8);
        sum += warp::shuffle_xor(sum, 16);
        if lane < UNIT_ROWS {
            p.residual.put_span(unit.row(lane), unit.column, sum);
        }
        warp::sync_warp();
    }
}

/// Writes the input of the next norm for a unit: as codes, or as bf16 where the launch wants no codes.
///
/// # Safety
/// `scaled` are the lane's parts of the unit's rows. [`codes`](Gemm::codes) is null, or has room for whole tiles of
/// rows.
#[device]
unsafe fn put_codes(p: &Gemm, unit: Unit, scaled: [[u32; 2]; 8]) {
    // SAFETY: the caller's word.
    unsafe {
        let lane = place_in_block().0;
        let are_wanted = !p.codes.codes.is_null();
        // Lane `i`, and every eighth lane from there on, computes the scale of row `i`.
        let mut most = 0;
        unroll!(I < 8; {
            let of_row = warp::max(e4m3::largest_bits(scaled[I]));
            most = if lane % UNIT_ROWS == I as u32 { of_row } else { most };
        });
        let [scale, inverse] = e4m3::scale_of(f32::from_bits(most));
        unroll!(I < 8; {
            let row = unit.row(I as u32);
            let code = e4m3::codes_of_four(scaled[I], warp::shuffle_idx(inverse, I as u32));
            let to = p.residual.scaled_of_lane(row, unit.column, lane);
            to.store_if(!are_wanted, 0, scaled[I]);
            p.codes.of_lane(p.residual.dim, row, unit.column, lane).store_if(are_wanted, 0, code);
        });
        p.codes.put_scale_if(are_wanted && lane < UNIT_ROWS, unit.row(lane), unit.column, scale);
    }
}

/// Four lanes hold four numbers each. Returns the sum over the lanes of number `pair`.
#[device]
fn sum_of_four(v: [f32; 4], pair: u32) -> f32 {
    pick_sum(pair / 2, 2, pick_sum(pair % 2, 1, v[0], v[1]), pick_sum(pair % 2, 1, v[2], v[3]))
}

/// The sum over two lanes of their `a`s or of their `b`s. The lanes differ in bit `mask`. `which` is that bit: the lane
/// that has 0 gets the sum of `a`, the other one that of `b`.
#[device]
fn pick_sum(which: u32, mask: u32, a: f32, b: f32) -> f32 {
    // With bit operations, so that the compiler makes no branch.
    let bits = 0u32.wrapping_sub(which);
    let pick = |bits: u32| f32::from_bits(a.to_bits() & !bits | b.to_bits() & bits);
    pick(bits) + warp::shuffle_xor(pick(!bits), mask)
}
