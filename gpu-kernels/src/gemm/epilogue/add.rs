//! Adds a tile's sums to the residual stream, and prepares the norm that comes next.
//!
//! A warp has 16 rows of the tile, in boxes of [`BOX`] features. It turns the sums of a box in its own part of shared memory, so that it loads and stores
//! whole lines, with no barrier across warps. The residual stream of two boxes is in registers before the products are done, that of the others is loaded
//! into the registers of sums that were put away.

use cuda_std::shared::{self, Shared};
use cuda_std::{math, thread, warp, wgmma};

use super::{Epilogue, Half};
use crate::gemm::{BOX, Gemm, SPAN};
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
/// Boxes of a tile whose part of the residual stream a lane holds at a time: so many are under way while the products run.
const HELD: usize = 2;
/// Bytes of a warp's row of a box of sums.
const SUMS_BYTES: u32 = BOX * 4;

/// Four features of each of a lane's rows in a box: a warp goes over its 16 rows two at a time, a lane over four features of every other row.
type FourOfRows = [[f32; 4]; 8];

/// The element of the residual stream at which the lane's first row begins in the tile's first box.
#[inline(always)]
fn first_element(p: &Gemm, half: &Half) -> u32 {
    let (lane, warp) = place_in_block();
    (half.tile_row + warp * WARP_ROWS + lane / 16) * p.n + half.column + lane % 16 * 4
}

/// The residual stream of a lane's rows in box `b`, whose first row begins at element `first` in the tile's first.
#[inline(always)]
unsafe fn load_rows(p: &Gemm, first: u32, b: usize) -> FourOfRows {
    let mut x = [[0.0; 4]; 8];
    unroll!(I < 8; {
        let at = first + I as u32 * 2 * p.n + b as u32 * BOX;
        x[I] = unsafe { p.residual.x.load16(at as usize) }.map(f32::from_bits);
    });
    x
}

/// The norm's weights of the lane's features in box `b`.
#[inline(always)]
unsafe fn load_norm(p: &Gemm, half: &Half, b: usize) -> [u32; 2] {
    let column = half.column + b as u32 * BOX + place_in_block().0 % 16 * 4;
    unsafe { p.next_norm.at(column as usize).cast::<[u32; 2]>().load(0) }
}

impl Epilogue for Add {
    const GATED: bool = false;
    type Early = ();
    /// Of the first boxes, the residual stream and the norm's weights of the lane's features.
    type Ahead = ([FourOfRows; HELD], [[u32; 2]; HELD]);

    #[inline(always)]
    unsafe fn early(_: &Gemm, _: &Half) {}

    #[inline(always)]
    unsafe fn ahead(p: &Gemm, half: &Half, inside: bool, (): ()) -> Self::Ahead {
        let mut x = [[[0.0; 4]; 8]; HELD];
        if inside {
            let first = first_element(p, half);
            unroll!(B < 2; {
                x[B] = unsafe { load_rows(p, first, B) };
            });
        }
        (x, unsafe { [load_norm(p, half, 0), load_norm(p, half, 1)] })
    }

    #[inline(always)]
    #[allow(unused_assignments, reason = "every box but the last two loads for another")]
    unsafe fn finish<const N: usize>(p: &Gemm, half: &mut Half, (x, norms): Self::Ahead) {
        unsafe {
            let mut x = [x[0], x[1], [[0.0; 4]; 8], [[0.0; 4]; 8]];
            let mut norms = [norms[0], norms[1], [0; 2], [0; 2]];
            let first = first_element(p, half);
            let (lane, warp) = place_in_block();
            // The warp's own part of shared memory: 16 rows of a box of sums, the 16-byte chunks of a row permuted by its number.
            let boxes = shared::dynamic::<u8>(Gemm::boxes(N as u32));
            let staging = boxes.addr() + warp * WARP_ROWS * SUMS_BYTES;
            let chunks_of = |row: u32| row % 4 * 2 * 16;
            let (line, pair) = (lane / 4, lane % 4);
            let put_at = staging + line * SUMS_BYTES + ((pair * 8) ^ chunks_of(line));
            let get_at = staging + lane / 16 * SUMS_BYTES + lane % 16 * 16;
            let second_half = N > 128 && half.column + 128 < p.n;
            let mut squares = [0f32; 8];
            macro_rules! finish_box {
                ($b:literal) => {
                    unroll!(J < 8; {
                        let sums = sums!($b * 32 + J * 4);
                        unroll!(R < 2; {
                            let to: Shared<[f32; 2]> = Shared::from_raw(put_at ^ (J as u32 * 32));
                            to.at(R * 8 * SUMS_BYTES as usize / 8).store(0, sums[R]);
                        });
                    });
                    warp::sync_warp();
                    let [w0, w1] = norms[$b].map(math::unpack_bf16);
                    unroll!(I < 8; {
                        // Into the registers of the sums that were put away. After the first rows waited for what was loaded before: the assembler counts loads with
                        // one counter, and else would wait for these there.
                        if I == 2 && $b < HELD && second_half {
                            x[($b + HELD) % 4] = load_rows(p, first, $b + HELD);
                            norms[($b + HELD) % 4] = load_norm(p, half, $b + HELD);
                        }
                        let row = I as u32 * 2 + lane / 16;
                        let from = Shared::<u8>::from_raw((get_at ^ chunks_of(row)) + I as u32 * 2 * SUMS_BYTES);
                        let s = from.load16(0).map(f32::from_bits);
                        let before = x[$b][I];
                        let new = [before[0] + s[0], before[1] + s[1], before[2] + s[2], before[3] + s[3]];
                        let at = (first + I as u32 * 2 * p.n + $b * BOX) as usize;
                        p.residual.x.store16(at, new.map(f32::to_bits));
                        let words = [
                            math::pack_bf16(new[0] * w0[0], new[1] * w0[1]),
                            math::pack_bf16(new[2] * w1[0], new[3] * w1[1]),
                        ];
                        p.residual.scaled.at(at).cast::<[u32; 2]>().store(0, words);
                        squares[I] += math::fma(new[0], new[0], new[1] * new[1])
                            + math::fma(new[2], new[2], new[3] * new[3]);
                    });
                    warp::sync_warp();
                    if $b % 2 == 1 {
                        // A row's 16 lanes have 4 features each of both boxes of a span.
                        let row = half.tile_row + warp * WARP_ROWS + (lane % 8) * 2 + lane / 16;
                        let place = row * (p.n / STRIP) + half.column / SPAN + $b / 2;
                        let sum = sum_of_span(squares, lane);
                        if lane & 8 == 0 {
                            p.residual.squares.store(place as usize, sum);
                        }
                        squares = [0.0; 8];
                    }
                };
            }
            finish_box!(0);
            finish_box!(1);
            if second_half {
                finish_box!(2);
                finish_box!(3);
            }
        }
    }
}

/// Of eight numbers in each of the 16 lanes of a row, the sum over the lanes of number `lane % 8`.
#[inline(always)]
fn sum_of_span(v: [f32; 8], lane: u32) -> f32 {
    let [first, second] = [[v[0], v[1], v[2], v[3]], [v[4], v[5], v[6], v[7]]].map(|four| sum_of_four(four, lane % 4));
    let sum = pick_sum(lane / 4 % 2, 4, first, second);
    sum + warp::shuffle_xor(sum, 8)
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
