//! RMSNorm without a pass of its own: `y = x / sqrt(mean(x²) + eps) · weight` is fused into its neighbours.
//!
//! Whoever writes an element of the residual stream also writes what the next linear layer reads, `bf16(x · weight)`, and for every strip of
//! [`STRIP`] elements the sum of their squares. The division is by one number a row, and a product is linear: so the linear layer multiplies
//! its f32 sums by the row's `1 / rms` when it is done. Nothing waits for a whole row before the product begins.
//!
//! # Order
//! A strip's squares are added by a butterfly over 16 lanes, a row's strips by a butterfly over a warp: always in one order.

use cuda_std::{Global, GlobalMut, bf16, math, thread, warp};

use crate::linear::STRIP;

/// The residual stream and what is kept beside it for the norm that comes next. All of it is written by `put` alone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Residual {
    /// `[rows, dim]`.
    pub x: GlobalMut<f32>,
    /// `[rows, dim]`: `x` times the weight of the norm that comes next.
    pub scaled: GlobalMut<bf16>,
    /// `[rows, dim / STRIP]`: sums of squares of `x`. (Products of prompts leave fewer in a row, over [`SPAN`](crate::gemm::SPAN) elements each, before zeros.)
    pub squares: GlobalMut<f32>,
    /// Hidden size, a multiple of 128.
    pub dim: u32,
}

impl Residual {
    /// The norm that whoever reads the scaled rows has yet to divide by.
    #[inline(always)]
    #[must_use]
    pub const fn norm(&self, eps: f32) -> Norm {
        Norm { squares: self.squares.read(), dim: self.dim, eps }
    }

    /// Writes one element of `row`, whose `weight` in the norm to come is this. A strip's 16 elements are written by 16 neighbouring lanes, and every
    /// lane of the warp is here; those that are not `valid` write nothing.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, weight: bf16, row: u32, element: u32, x: f32, valid: bool) {
        unsafe { self.put_at(weight, row, element, element, x, valid) }
    }

    /// As [`put`](Self::put), with the scaled element at `place` of its row.
    #[inline(always)]
    pub(crate) unsafe fn put_at(&self, weight: bf16, row: u32, element: u32, place: u32, x: f32, valid: bool) {
        unsafe {
            let squares = strip_squares(x);
            if valid {
                let first = row as usize * self.dim as usize;
                self.x.store(first + element as usize, x);
                self.scaled.store(first + place as usize, math::to_bf16(x * math::from_bf16(weight)));
                if element.is_multiple_of(STRIP) {
                    self.squares.store((first + element as usize) / STRIP as usize, squares);
                }
            }
        }
    }
}

/// The sum of the squares of a strip's elements, which 16 neighbouring lanes hold; every lane of the warp is here.
#[inline(always)]
pub(crate) fn strip_squares(x: f32) -> f32 {
    let mut squares = x * x;
    let mut mask = STRIP / 2;
    while mask > 0 {
        squares += warp::shuffle_xor(squares, mask);
        mask /= 2;
    }
    squares
}

/// The norm that a linear layer's input has yet to be divided by.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Norm {
    /// As [`Residual::squares`]; null when the input needs no norm.
    pub squares: Global<f32>,
    /// Hidden size.
    pub dim: u32,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl Norm {
    /// What the sums of `row` are multiplied by: `1 / sqrt(mean(x²) + eps)`. Every lane of the warp gets it.
    #[inline(always)]
    pub(crate) unsafe fn inverse_rms(&self, row: u32) -> f32 {
        unsafe {
            let [squares] = self.lane_squares([row]);
            self.inverse_rms_of(squares)
        }
    }

    /// That, from the [squares](Self::lane_squares) of every lane.
    #[inline(always)]
    pub(crate) unsafe fn inverse_rms_of(&self, squares: f32) -> f32 {
        unsafe { 1.0 / math::sqrt(warp_sum(squares) / self.dim as f32 + self.eps) }
    }

    /// A lane's part of the sum of squares of each of `rows`.
    #[inline(always)]
    pub(crate) unsafe fn lane_squares<const N: usize>(&self, rows: [u32; N]) -> [f32; N] {
        unsafe {
            let strips = self.dim / STRIP;
            let mut sums = [0f32; N];
            let mut i = thread::lane_id();
            while i < strips {
                // Eight loads of every row under way at a time; zeros beyond the end change nothing.
                let mut here = [[0f32; 8]; N];
                unroll!(L < 8; {
                    let at = i + L as u32 * 32;
                    if at < strips {
                        unroll!(R < N of 4; {
                            here[R][L] = self.squares.load((rows[R] * strips + at) as usize);
                        });
                    }
                });
                unroll!(L < 8; {
                    unroll!(R < N of 4; {
                        sums[R] += here[R][L];
                    });
                });
                i += 256;
            }
            sums
        }
    }
}

/// The sum of `v` over a warp, the same bits in every lane: at each level both partners add the same two numbers.
#[inline(always)]
pub(crate) unsafe fn warp_sum(mut v: f32) -> f32 {
    let mut mask = 16;
    while mask > 0 {
        v += warp::shuffle_xor(v, mask);
        mask /= 2;
    }
    v
}
