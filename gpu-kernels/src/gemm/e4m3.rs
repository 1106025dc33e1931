//! GEMMs of e4m3: codes of rows and of weights, each [`GROUP`] inputs with a scale of their own.
//!
//! ```text
//! y[row, n] = Σ_g  x_scale[g, row] · w_scale[n / 128, g] · Σ_{k in g} x[row, k] · w[n, k]
//! ```
//!
//! The inner sum is the tensor core's, which adds e4m3 with some 14 bits of mantissa; so it is added in f32, times its
//! scales, after every stage. Both operands lie as two codes lie in a bf16's place: a stage has 128 inputs instead of 64,
//! in as many bytes, with its scales behind them.
//!
//! # Order
//! Groups are dealt to [`K_PARTIALS`] split-K partials as slices of bf16 are: a partial is the sum, from its first group
//! to its last, of `fma(inner sum, x_scale · w_scale, partial)`, and an output the sum of the partials from first to
//! last. What an inner sum comes to does not depend on which operand is A, nor on how many rows there are; so the
//! decode kernel can make the same.
//!
//! A lane has its inner sums, its partials and its totals in 64 accumulators each. While one warpgroup adds, the other
//! multiplies.

use cuda_std::shared::{self, Shared};
use cuda_std::wgmma::{self, Cores, Operand};
use cuda_std::{Global, bulk, math, thread};

use super::epilogue::{Epilogue, Half, elected};
use super::{BOX_BYTES, DEPTH, Gemm, Inputs, STEP_BYTES, Tiles, WEIGHT_ROWS, X_BYTES, free, gemm_of, wait};
use super::{GROUP_ROWS, TILE_ROWS};
use crate::linear::{K_PARTIALS, N_TILE};
use crate::ring::{Ring, Shape};
use crate::stream::TOGETHER;

/// Inputs that share a scale.
pub const GROUP: u32 = 128;
const _: () = assert!(GROUP == 2 * DEPTH && TOGETHER * N_TILE == WEIGHT_ROWS && WEIGHT_ROWS == 128);

/// Where scales lie.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct E4m3 {
    /// `[k / 128, x_rows]`: of each row, with room for whole tiles of rows.
    pub x_scales: Global<f32>,
    /// `[weight rows / 128, k / 128, 4]`: of 128 weight rows; of a gated matrix first the gates', then the ups'. The last
    /// two of four are not read.
    pub w_scales: Global<f32>,
    /// Rows that there is room for: whole tiles.
    pub x_rows: u32,
    /// Groups of a weight row.
    pub groups: u32,
}

/// Parameters of the GEMMs of e4m3: as [`Gemm`], with pairs of codes where that has bf16.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct GemmE4m3 {
    /// Its `x` and `stream` have pairs of codes, its `k` counts pairs.
    pub gemm: Gemm,
    /// The scales.
    pub scales: E4m3,
}

/// Of a stage's rows, and of its weights.
const X_SCALES: u32 = TILE_ROWS * 4;
const W_SCALES: u32 = 16;
/// Bytes of a stage's rows and weights.
const CODES: u32 = X_BYTES + WEIGHT_ROWS * DEPTH * 2;

/// Repeats a body for each of a lane's 64 sums, number `4 J + E`: of its row `E / 2`, and of the eight weight rows `J`.
macro_rules! each_sum {
    ($what:block) => {
        unroll!(J < 16; {
            unroll!(E < 4; $what);
        });
    };
}

impl Inputs for E4m3 {
    // Swizzled rows begin at multiples of 1,024.
    const TAIL_BYTES: u32 = 1024;
    const COPIED: u32 = X_SCALES + W_SCALES;

    #[inline(always)]
    fn ring(_: u32) -> Shape {
        RING
    }

    #[inline(always)]
    unsafe fn load_tail(self, ring: &Ring, [row, n_tile]: [u32; 2], slice: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let to = ring.stage_buffer().at(CODES as usize);
            // A tile behind all of them has the last ones' scales again.
            let row = row.min(self.x_rows - TILE_ROWS);
            let x = self.x_scales.at((slice * self.x_rows + row) as usize).cast();
            bulk::copy_to_shared(to, x, X_SCALES, ring.full());
            let w = self.w_scales.at(((n_tile / TOGETHER * self.groups + slice) * 4) as usize).cast();
            bulk::copy_to_shared(to.at(X_SCALES as usize), w, W_SCALES, ring.full());
        }
    }

    #[inline(always)]
    unsafe fn consume<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm, tiles: Tiles) {
        // SAFETY: the caller's word.
        unsafe {
            let group = thread::warp_id() / 4;
            let first = shared::dynamic::<u8>(0);
            let x = Operand::at(first).advance(group * GROUP_ROWS * DEPTH * 2);
            let weight = Cores::at(first).advance(X_BYTES);
            let mut ring = Ring::consumer(RING);
            let staging = shared::dynamic(Gemm::boxes(128) + group * 2 * BOX_BYTES);
            let mut half = Half { tile_row: 0, row: 0, column: 0, turn: 0, barrier: 1 + group, staging };
            if elected() && !p.out.is_null() {
                cuda_std::tensor::acquire(p.out);
            }
            wait::<DOWN, ACROSS>(p);
            for (row, column) in tiles {
                (half.tile_row, half.row, half.column) = (row, row + group * GROUP_ROWS, column);
                let inside = row < p.m && column < p.n;
                let early = E::early(p, &half);
                each_sum!({
                    wgmma::set::<{ TOTALS + 4 * J + E }>(0.0);
                });
                let mut k_partial = 0;
                while k_partial < K_PARTIALS {
                    each_sum!({
                        wgmma::set::<{ PARTIALS + 4 * J + E }>(0.0);
                    });
                    let mut left = p.k_partial(k_partial);
                    while left > 0 {
                        ring.wait_full();
                        multiply(&ring, x, weight);
                        let scales = stage_scales::<E>(&ring);
                        wgmma::wait::<0>();
                        bulk::fence_proxy_async();
                        free::<DOWN, ACROSS>(ring);
                        each_sum!({
                            let inner = wgmma::get::<{ 4 * J + E }>();
                            let partial = wgmma::get::<{ PARTIALS + 4 * J + E }>();
                            wgmma::set::<{ PARTIALS + 4 * J + E }>(math::fma(inner, scales[E / 2][J % 2], partial));
                        });
                        ring = ring.ahead(1);
                        left -= 1;
                    }
                    each_sum!({
                        let total = wgmma::get::<{ TOTALS + 4 * J + E }>() + wgmma::get::<{ PARTIALS + 4 * J + E }>();
                        wgmma::set::<{ TOTALS + 4 * J + E }>(total);
                    });
                    k_partial += 1;
                }
                each_sum!({
                    wgmma::set::<{ 4 * J + E }>(wgmma::get::<{ TOTALS + 4 * J + E }>());
                });
                let ahead = E::ahead::<128>(p, &half, inside, early);
                if inside {
                    E::finish::<128>(p, &mut half, ahead, &mut ());
                }
            }
            if elected() {
                bulk::wait::<0>();
            }
        }
    }
}

const RING: Shape = Shape::new(0, 5, CODES + E4m3::TAIL_BYTES);
// Boxes are where those of bf16 are.
const _: () = assert!(RING.end() <= Gemm::boxes(128));

/// Begins the inner sums of the ring's stage, which is full.
#[inline(always)]
unsafe fn multiply(ring: &Ring, x: Operand, weight: Cores) {
    // SAFETY: the caller's word.
    unsafe {
        let offset = ring.offset();
        let (x, weight) = (x.advance(offset), weight.advance(offset));
        wgmma::fence();
        unroll!(I < 4; {
            wgmma::mma_e4m3_n128(x.advance(I as u32 * 32), weight.advance(I as u32 * STEP_BYTES), I != 0);
        });
        wgmma::commit();
    }
}

/// The products of the scales of the lane's two rows and of the stage's weights: `[row][which of two]`.
#[inline(always)]
unsafe fn stage_scales<E: Epilogue>(ring: &Ring) -> [[f32; 2]; 2] {
    // SAFETY: the caller's word.
    unsafe {
        let thread = thread::opaque(thread::thread_idx_x());
        let row = thread / 32 * 16 + thread % 32 / 4;
        let tail: Shared<f32> = ring.stage_buffer().at(CODES as usize).cast();
        let x = [tail.load(row as usize), tail.load(row as usize + 8)];
        let w = tail.at(TILE_ROWS as usize).cast::<[f32; 2]>().load(0);
        let w = if E::GATED { w } else { [w[0]; 2] };
        x.map(|x| w.map(|w| x * w))
    }
}

/// Where partials and totals begin among the accumulators.
const PARTIALS: usize = 64;
const TOTALS: usize = 128;

/// A GEMM of e4m3 with an epilogue, in tiles of 128 weight rows; `DOWN` × `ACROSS` blocks take theirs together.
///
/// # Safety
/// As the parameter block says.
#[inline(always)]
pub unsafe fn gemm_e4m3<E: Epilogue, const DOWN: u32, const ACROSS: u32>(p: &GemmE4m3) {
    // SAFETY: the caller's word.
    unsafe { gemm_of::<E, E4m3, 128, DOWN, ACROSS>(&p.gemm, p.scales) }
}
