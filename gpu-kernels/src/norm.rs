//! RMSNorm without a pass of its own: `y = x / sqrt(mean(x²) + eps) · weight` is fused into its neighbours.
//!
//! A kernel that writes an element of the residual stream also writes what the next linear layer reads,
//! `bf16(x · weight)`. For every N-tile of [`N_TILE`] elements it also writes the sum of their squares. The division is
//! by one number for each row, and a GEMM is linear: so the linear layer multiplies its f32 sums by the row's `1 / rms`
//! at the end. No GEMM waits for its input's norm.
//!
//! # Order
//! Every kernel adds squares in one order. Within an N-tile, elements are added in pairs 8 apart, then 1, 2 and 4
//! apart. Within a span, N-tiles are added in pairs 1, 2 and 4 apart. Within a row, spans 32 apart are added one after
//! another; the 32 sums are then added in pairs 16, 8, 4, 2 and 1 apart.
//!
//! # Safety
//! Rows and elements that are named are among those that the [`Residual`] or [`Norm`] has memory for. A function that
//! writes is called by one lane for each element or sum, and nobody reads what it wrote before they have synchronised.
//! A function that reads is called when those who wrote have been waited for. A function that adds squares over lanes
//! is called by whole warps.

use cuda_std::{Global, GlobalMut, bf16, device, math, thread, warp};

use crate::linear::{N_TILE, slot};

/// Elements of a span: eight N-tiles.
pub const SPAN: u32 = 8 * N_TILE;

/// The residual stream, and what is kept beside it, and written with it, for the norm that comes next.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Residual {
    /// `[rows, dim]`.
    pub x: GlobalMut<f32>,
    /// `[rows, dim]`: `x` times the weight of the norm that comes next.
    pub scaled: GlobalMut<bf16>,
    /// `[rows, dim / N_TILE]`: sums of squares of `x`. 16-byte aligned.
    pub squares: GlobalMut<f32>,
    /// `[rows, dim / SPAN]`: sums of `squares` over each span, which [`gemm`](crate::gemm) writes and reads; null where
    /// nobody needs them.
    pub spans: GlobalMut<f32>,
    /// Hidden size, a multiple of [`SPAN`].
    pub dim: u32,
}

impl Residual {
    /// What a reader of `scaled` still has to divide by.
    #[device]
    #[must_use]
    pub const fn norm(&self, eps: f32) -> Norm {
        Norm { squares: self.squares.read(), dim: self.dim, eps }
    }

    /// Writes an element of `row`: `x`, its product with `weight`, and the N-tile's sum of squares. `weight` is the
    /// element's in the norm that comes next. 16 neighbouring lanes write the 16 elements of an N-tile, and all lanes
    /// of the warp call it together; lanes that are not `valid` write nothing.
    ///
    /// # Safety
    /// As [`put_at`](Self::put_at) says.
    #[device]
    pub(crate) unsafe fn put(&self, weight: bf16, row: u32, element: u32, x: f32, valid: bool) {
        // SAFETY: the caller's word.
        unsafe { self.put_at(weight, row, element, (row * self.dim + element) as usize, x, valid) }
    }

    /// As [`put`](Self::put), but the scaled element goes to index `place` of `scaled`.
    ///
    /// # Safety
    /// All lanes of the warp call it. Each half of the warp has an N-tile's elements in order, which are all `valid` or
    /// none. There is such a row and such a place, and `element` is below [`dim`](Self::dim).
    #[device]
    pub(crate) unsafe fn put_at(&self, weight: bf16, row: u32, element: u32, place: usize, x: f32, valid: bool) {
        // SAFETY: the caller's word.
        unsafe {
            let squares = n_tile_squares(x);
            if valid {
                let first = row as usize * self.dim as usize;
                self.x.store(first + element as usize, x);
                self.scaled.store(place, math::to_bf16(x * math::from_bf16(weight)));
                if element.is_multiple_of(N_TILE) {
                    self.squares.store((first + element as usize) / N_TILE as usize, squares);
                }
            }
        }
    }
}

/// The sum of the squares of an N-tile's elements, which 16 neighbouring lanes hold. All lanes of the warp call it.
#[device]
pub(crate) fn n_tile_squares(x: f32) -> f32 {
    let mut squares = x * x;
    unroll!(M < 4; {
        squares += warp::shuffle_xor(squares, [8, 1, 2, 4][M]);
    });
    squares
}

/// The first of a lane's four elements within a span: the lane has this element, the next, and the two that are 8
/// further. Four neighbouring lanes have an N-tile. In the order of [`slot`](crate::linear::slot) a lane's four lie
/// side by side.
#[device]
pub(crate) fn lane_element(lane: u32) -> u32 {
    lane / 4 * N_TILE + lane % 4 * 2
}

/// A norm's weights for a lane's four [elements](lane_element) of the span that begins at `first`, in pairs.
///
/// # Safety
/// The span that begins at `first` is one of the norm's, and `lane` is below 32.
#[device]
pub(crate) unsafe fn lane_weights(norm: Global<bf16>, first: u32, lane: u32) -> [u32; 2] {
    // SAFETY: the caller's word.
    let pairs = unsafe { norm.at((first + lane_element(lane)) as usize).cast::<u32>() };
    // SAFETY: the caller's word.
    [0, 4].map(|i| unsafe { pairs.load_nc(i) })
}

/// A lane's four elements times their [weights](lane_weights) in the norm that comes next, in pairs of bf16.
#[device]
pub(crate) fn scaled_lane(x: [f32; 4], weights: [u32; 2]) -> [u32; 2] {
    let [w0, w1] = weights.map(math::unpack_bf16);
    [math::pack_bf16(x[0] * w0[0], x[1] * w0[1]), math::pack_bf16(x[2] * w1[0], x[3] * w1[1])]
}

impl Residual {
    /// The lane's four elements of the span of `row` that begins at `first`.
    ///
    /// # Safety
    /// There is such a row, `first` is a multiple of [`SPAN`] below [`dim`](Self::dim), and `lane` is below 32.
    #[device]
    pub(crate) unsafe fn load_lane(&self, row: u32, first: u32, lane: u32) -> [f32; 4] {
        // SAFETY: the caller's word.
        unsafe {
            let from = self.x.at(row as usize * self.dim as usize + (first + lane_element(lane)) as usize);
            let [low, high]: [[f32; 2]; 2] = [0, 4].map(|i| from.cast().load(i));
            [low[0], low[1], high[0], high[1]]
        }
    }

    /// Writes the lane's four elements of the span of `row` that begins at `first`. Returns the sum of their squares.
    ///
    /// # Safety
    /// As for [`load_lane`](Self::load_lane), and nobody else uses these elements meanwhile.
    #[device]
    pub(crate) unsafe fn put_lane(&self, row: u32, first: u32, lane: u32, x: [f32; 4]) -> f32 {
        // SAFETY: the caller's word.
        unsafe {
            let to = self.x.at(row as usize * self.dim as usize + (first + lane_element(lane)) as usize).cast();
            to.store(0, [x[0], x[1]]);
            to.store(4, [x[2], x[3]]);
        }
        (x[0] * x[0] + x[2] * x[2]) + (x[1] * x[1] + x[3] * x[3])
    }

    /// Where a lane's four [scaled](scaled_lane) elements go: they lie in the order of [`slot`](crate::linear::slot).
    ///
    /// # Safety
    /// As for [`load_lane`](Self::load_lane).
    #[device]
    pub(crate) unsafe fn scaled_of_lane(&self, row: u32, first: u32, lane: u32) -> GlobalMut<[u32; 2]> {
        let at = row as usize * self.dim as usize + slot(first + lane_element(lane)) as usize;
        // SAFETY: the caller's word.
        unsafe { self.scaled.at(at).cast() }
    }

    /// Stores the sum of squares of the N-tile that has `element`.
    ///
    /// # Safety
    /// There is such a row, and `element` is below [`dim`](Self::dim).
    #[device]
    pub(crate) unsafe fn put_n_tile(&self, row: u32, element: u32, sum: f32) {
        // SAFETY: the caller's word.
        unsafe { self.squares.store((row * (self.dim / N_TILE) + element / N_TILE) as usize, sum) }
    }

    /// Stores the sum of squares of the span that has `element`.
    ///
    /// # Safety
    /// As for [`put_n_tile`](Self::put_n_tile); [`spans`](Self::spans) is not null.
    #[device]
    pub(crate) unsafe fn put_span(&self, row: u32, element: u32, sum: f32) {
        // SAFETY: the caller's word.
        unsafe { self.spans.store((row * (self.dim / SPAN) + element / SPAN) as usize, sum) }
    }

    /// Adds up and stores the sums of squares of the span of `row` that begins at `first`, and of its N-tiles. `sum` is
    /// what [`put_lane`](Self::put_lane) returned to the lane: the squares of its four elements.
    ///
    /// # Safety
    /// All lanes of the warp call it, each with its own number as `lane`. There is such a row, `first` is a multiple of
    /// [`SPAN`] below [`dim`](Self::dim), and [`spans`](Self::spans) is not null.
    #[device]
    pub(crate) unsafe fn put_sums(&self, row: u32, first: u32, lane: u32, mut sum: f32) {
        // SAFETY: the caller's word.
        unsafe {
            sum += warp::shuffle_xor(sum, 1);
            sum += warp::shuffle_xor(sum, 2);
            if lane.is_multiple_of(4) {
                self.put_n_tile(row, first + lane_element(lane), sum);
            }
            sum += warp::shuffle_xor(sum, 4);
            sum += warp::shuffle_xor(sum, 8);
            sum += warp::shuffle_xor(sum, 16);
            if lane == 0 {
                self.put_span(row, first, sum);
            }
        }
    }
}

/// What a linear layer's input still has to be divided by.
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
    /// The factor for the sums of `row`: `1 / sqrt(mean(x²) + eps)`. Every lane of the warp gets it.
    ///
    /// # Safety
    /// All lanes of the warp call it. [`squares`](Self::squares) is not null, and has this row.
    #[device]
    pub(crate) unsafe fn inverse_rms(&self, row: u32) -> f32 {
        // SAFETY: the caller's word.
        unsafe {
            let [squares] = self.lane_squares([row]);
            self.inverse_rms_of(squares)
        }
    }

    /// As `inverse_rms`, from the [squares](Self::lane_squares) of every lane.
    ///
    /// # Safety
    /// All lanes of the warp call it.
    #[device]
    pub(crate) unsafe fn inverse_rms_of(&self, squares: f32) -> f32 {
        // SAFETY: the caller's word.
        self.inverse_rms_of_sum(unsafe { warp_sum(squares) })
    }

    /// As `inverse_rms`, from the sum of a row's squares.
    #[device]
    pub(crate) fn inverse_rms_of_sum(&self, squares: f32) -> f32 {
        1.0 / math::sqrt(squares / self.dim as f32 + self.eps)
    }

    /// A lane's part of the sum of squares of each of `rows`: every 32nd span, from the lane's number on.
    ///
    /// # Safety
    /// [`squares`](Self::squares) is not null, and has these rows, four at most.
    #[device]
    pub(crate) unsafe fn lane_squares<const N: usize>(&self, rows: [u32; N]) -> [f32; N] {
        // SAFETY: the caller's word.
        unsafe {
            let spans = self.dim / SPAN;
            let mut sums = [0f32; N];
            let mut span = thread::lane_id();
            while span < spans {
                let mut n_tiles = [[[0; 4]; 2]; N];
                unroll!(R < N of 4; {
                    let from = self.squares.at(((rows[R] * spans + span) * (SPAN / N_TILE)) as usize);
                    n_tiles[R] = [0, 4].map(|i| from.load16(i));
                });
                unroll!(R < N of 4; {
                    let [low, high] = n_tiles[R].map(|four| four.map(f32::from_bits));
                    let sum = |s: [f32; 4]| (s[0] + s[1]) + (s[2] + s[3]);
                    sums[R] += sum(low) + sum(high);
                });
                span += 32;
            }
            sums
        }
    }
}

/// The sum of `v` over a warp, the same bits in every lane: at each level both partners add the same two numbers.
///
/// # Safety
/// All lanes of the warp call it.
#[device]
pub unsafe fn warp_sum(mut v: f32) -> f32 {
    let mut mask = 16;
    while mask > 0 {
        v += warp::shuffle_xor(v, mask);
        mask /= 2;
    }
    v
}
