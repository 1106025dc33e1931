//! Linear layers for few rows: `y[row, n] = Σ_k x[row, k] · w[n, k]`, weights read once, in the
//! [layout](crate::stream) that all kernels share.
//!
//! # Shape of the work
//! A block owns an N-tile of 16 output features. Its [`K_PARTIALS`] = 4 warps distribute the slices of [`SLICE`] = 64
//! input features among themselves and feed them to the tensor cores: `mma.m16n8k16` with the weights as A (16
//! features) and the token rows as B (8 rows a tile, `TILES` tiles). A sum over k does not depend on where its terms
//! stand as long as A and B agree, so a lane loads 16 contiguous bytes of a row and uses them as the four k-pairs that
//! it must supply; the weights lie so that a warp loads a register of all its lanes as 128 contiguous bytes. No shared
//! memory, no shuffles.
//!
//! The input of a layer that follows a norm is not normalised yet: the sums are multiplied by the row's factor at the
//! end (see [`norm`](crate::norm)).
//!
//! # Order
//! An output is the sum over its warp's slices, in order, in the tensor core's accumulator, then over the 4 warps from
//! first to last. A column of B never meets another, so a row's result is the same bits whatever rows share the launch
//! and however many tiles there are: [`linear_8`] and [`linear_64`] agree (tested).
//!
//! # Ladder
//! 1. A thread an output (the reference in the tests).
//! 2. This: tensor cores, weights streamed by plain loads, one launch an operator.
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses are as it says, with no more N-tiles in the grid than the matrix
//! has. What is not a kernel is called by the whole block, all of its warps together, since they synchronise. They have
//! [`Linear::shared_bytes`] of dynamic shared memory to themselves, and the block's N-tile of every row of the output.

use cuda_std::{Global, GlobalMut, bf16, kernel, math, mma, shared, thread};

use crate::gate;
use crate::norm::{Norm, Residual};
use crate::step::Rows;
use crate::stream::{STEP_BYTES, StreamMatrix, core_word};

/// Input features that a warp takes at a time; slice `s` goes to warp `s % 4`. The input size is a multiple of twice
/// this.
pub const SLICE: u32 = 64;
/// Output features of a block.
pub const N_TILE: u32 = 16;
/// Split-K partials of products that an output is the sum of: a warp each.
pub const K_PARTIALS: u32 = 4;
/// Threads of a block: a warp for each split-K partial.
const THREADS: u32 = K_PARTIALS * 32;
/// Slices of a warp's turn. Of four, or of four while the next four are under way, few rows gain nothing: warps have
/// more registers then, and so there are fewer of them.
const TOGETHER: u32 = 2;

/// Parameters of the kernels of this module. Grid: the matrix's N-tiles. Shared memory: [`Linear::shared_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Linear {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, k]`, 16-byte aligned.
    pub x: Global<bf16>,
    /// The weights; gate and up in `swiglu_*`. Input features are a multiple of twice [`SLICE`].
    pub weights: StreamMatrix,
    /// What the input has yet to be divided by.
    pub norm: Norm,
    /// `[rows, n]`: written by `linear_*` alone.
    pub y: GlobalMut<f32>,
    /// `[rows, n]`: written by `swiglu_*` alone.
    pub activation: GlobalMut<bf16>,
    /// Added to by `linear_add_*` alone; its size is `n`.
    pub residual: Residual,
    /// `[n]`: the weight of the norm that comes after `linear_add_*`.
    pub next_norm: Global<bf16>,
    /// `[n]`: what `linear_*` adds; null for nothing.
    pub bias: Global<bf16>,
    /// Output features; of gate and up, those of each.
    pub n: u32,
    /// First row to compute: the head, which skips rows whose logits nobody asked for.
    pub first_row: u32,
}

impl Linear {
    /// Dynamic shared memory for a launch of up to `rows` rows: the partial sums of every warp, and each row's factor.
    pub const fn shared_bytes(rows: u32) -> u32 {
        let rows = rows.div_ceil(8) * 8;
        (K_PARTIALS * N_TILE + 1) * rows * 4
    }
}

/// Where an element of a row of activations goes when the inputs that one tensor core instruction multiplies are to be
/// neighbours, in the order of its slots (see [`batched`](crate::batched)). Here, lane `t` of four loads inputs
/// `8 t .. 8 t + 8` of 32 and gives the first four to one instruction, the others to the next; of four, the first two
/// go to slots `2 t` and `2 t + 1`, the others 8 further.
#[inline(always)]
#[must_use]
pub const fn slot(element: u32) -> u32 {
    let (t, step, high, low) = (element >> 3 & 3, element >> 2 & 1, element >> 1 & 1, element & 1);
    element & !31 | step << 4 | high << 3 | t << 1 | low
}

/// Where an element of a row goes: in the order of [`slot`], or as it comes.
#[inline(always)]
pub(crate) const fn place_of<const SLOTS: bool>(element: u32) -> usize {
    (if SLOTS { slot(element) } else { element }) as usize
}

/// One warp's split-K partial of the block's N-tile. Leaves the partial sums of the block in shared memory,
/// `[warp][row][feature]`, and synchronises at a barrier.
///
/// # Safety
/// `count` is what [`rows_here`] says, and not 0.
#[inline(always)]
unsafe fn partial_sums<const TILES: usize>(p: &Linear, count: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let lane = thread::lane_id();
        let warp = thread::warp_id();
        let (g, t) = (lane / 4, lane % 4);
        let k_size = p.weights.k;
        let (slices_at, own) = p.weights.slices(thread::block_idx_x());
        let weights = p.weights.stream.cast::<u8>().at((own + lane * 4) as usize);
        let mut acc = [[0f32; 4]; TILES];
        let mut slice = warp;
        let slices = k_size / SLICE;
        let turn = TOGETHER * K_PARTIALS;
        // The fragments of a turn's slices, four instructions of each; of the last turn's some slices may not be.
        let fetch = |slice: u32| {
            let mut fragments = [[0u32; 4]; 4 * TOGETHER as usize];
            unroll!(S < 2; {
                let slice = slice + S as u32 * K_PARTIALS;
                if slice < slices {
                    let words = weights.at(slices_at.at(slice) as usize).cast::<u32>();
                    unroll!(I < 4; {
                        unroll!(R < 4; {
                            let word = I as u32 * STEP_BYTES / 4 + core_word(R as u32);
                            fragments[4 * S + I][R] = words.load_stream(word as usize);
                        });
                    });
                }
            });
            fragments
        };
        // The next turn's are under way while these are multiplied.
        let mut next = fetch(slice);
        while slice < slices {
            let fragments = next;
            next = fetch(slice + turn);
            let k = (slice * SLICE + t * 8) as usize;
            unroll!(T < TILES of 8; {
                let row = T as u32 * 8 + g;
                let x = p.x.at((p.first_row + row) as usize * k_size as usize + k);
                // Half a slice: what a lane loads of a row is two instructions' inputs.
                unroll!(J < 4; {
                    if slice + J as u32 / 2 * K_PARTIALS < slices {
                        let at = (J / 2) * (K_PARTIALS * SLICE) as usize + (J % 2) * 32;
                        let b = if row < count { x.load16(at) } else { [0; 4] };
                        acc[T] = mma::m16n8k16_bf16(acc[T], fragments[2 * J], [b[0], b[1]]);
                        acc[T] = mma::m16n8k16_bf16(acc[T], fragments[2 * J + 1], [b[2], b[3]]);
                    }
                });
            });
            slice += turn;
        }
        // An accumulator holds features g and g + 8 of rows 2t and 2t + 1.
        let partial = shared::dynamic::<f32>(0);
        unroll!(T < TILES of 8; {
            let at = (warp * (TILES as u32 * 8) + T as u32 * 8 + 2 * t) * N_TILE + g;
            partial.store(at as usize, acc[T][0]);
            partial.store((at + N_TILE) as usize, acc[T][1]);
            partial.store((at + 8) as usize, acc[T][2]);
            partial.store((at + N_TILE + 8) as usize, acc[T][3]);
        });
        if !p.norm.squares.is_null() {
            let factors = partial.at((K_PARTIALS * N_TILE) as usize * TILES * 8);
            let mut row = warp;
            while row < count {
                let factor = p.norm.inverse_rms(p.first_row + row);
                if lane == 0 {
                    factors.store(row as usize, factor);
                }
                row += K_PARTIALS;
            }
        }
        thread::sync_threads();
    }
}

/// One output: the sum over warps, first to last, of its partial sums, times the row's factor.
///
/// # Safety
/// The block has come out of [`partial_sums`], and has written nothing else there since. `row` is below its `count`,
/// and `feature` below [`N_TILE`].
#[inline(always)]
unsafe fn sum_of_warps<const TILES: usize>(p: &Linear, row: u32, feature: u32) -> f32 {
    // SAFETY: the caller's word.
    unsafe {
        let partial = shared::dynamic::<f32>(0);
        let mut sum = 0.0;
        let mut w = 0;
        while w < K_PARTIALS {
            sum += partial.load(((w * (TILES as u32 * 8) + row) * N_TILE + feature) as usize);
            w += 1;
        }
        if !p.norm.squares.is_null() {
            sum *= partial.load((K_PARTIALS * N_TILE) as usize * TILES * 8 + row as usize);
        }
        sum
    }
}

/// Rows that this launch computes: at most `TILES * 8`, from `first_row` on.
#[inline(always)]
unsafe fn rows_here<const TILES: usize>(p: &Linear) -> u32 {
    // SAFETY: the caller's word.
    let count = unsafe { p.rows.count.load(0) };
    count.saturating_sub(p.first_row).min(TILES as u32 * 8)
}

#[inline(always)]
unsafe fn linear<const TILES: usize, const ADD: bool>(p: &Linear) {
    // SAFETY: the caller's word.
    unsafe {
        let count = rows_here::<TILES>(p);
        if count == 0 {
            return;
        }
        let first = thread::block_idx_x() * N_TILE;
        partial_sums::<TILES>(p, count);
        let mut e = thread::thread_idx_x();
        // A warp stays together: it holds two N-tiles of the residual.
        while e - e % 32 < count * N_TILE {
            let valid = e < count * N_TILE;
            let (row, feature) = (if valid { e / N_TILE } else { 0 }, e % N_TILE);
            let sum = sum_of_warps::<TILES>(p, row, feature);
            let (row, feature) = (p.first_row + row, first + feature);
            let at = row as usize * p.n as usize + feature as usize;
            if ADD {
                let old = if valid { p.residual.x.load(at) } else { 0.0 };
                p.residual.put(p.next_norm.load_nc(feature as usize), row, feature, old + sum, valid);
            } else if valid && feature < p.n {
                // Adding -0 changes no bit.
                let bias = if p.bias.is_null() { -0.0 } else { math::from_bf16(p.bias.load_nc(feature as usize)) };
                p.y.store(at, sum + bias);
            }
            e += THREADS;
        }
    }
}

#[inline(always)]
unsafe fn swiglu<const TILES: usize>(p: &Linear) {
    // SAFETY: the caller's word.
    unsafe {
        let count = rows_here::<TILES>(p);
        if count == 0 {
            return;
        }
        let first = thread::block_idx_x() * (N_TILE / 2);
        partial_sums::<TILES>(p, count);
        let mut e = thread::thread_idx_x();
        while e < count * (N_TILE / 2) {
            let (row, feature) = (e / (N_TILE / 2), e % (N_TILE / 2));
            if first + feature < p.n {
                let gate = sum_of_warps::<TILES>(p, row, feature);
                let up = sum_of_warps::<TILES>(p, row, feature + N_TILE / 2);
                let at = (p.first_row + row) as usize * p.n as usize + (first + feature) as usize;
                p.activation.store(at, math::to_bf16(gate::swiglu(gate, up)));
            }
            e += THREADS;
        }
    }
}

macro_rules! widths {
    ($($tiles:literal $rows:literal $linear:ident $add:ident $swiglu:ident;)*) => { $(
        #[doc = concat!("`y = x · wᵀ` for up to ", $rows, " rows.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $linear(p: Linear) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { linear::<$tiles, false>(&p) }
        }
        #[doc = concat!("`residual += x · wᵀ` for up to ", $rows, " rows; `n` is a multiple of 16.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $add(p: Linear) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { linear::<$tiles, true>(&p) }
        }
        #[doc = concat!("`activation = silu(x · gateᵀ) ∘ (x · upᵀ)` for up to ", $rows, " rows.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $swiglu(p: Linear) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { swiglu::<$tiles>(&p) }
        }
    )* };
}

widths! {
    1 "8" linear_8 linear_add_8 swiglu_8;
    2 "16" linear_16 linear_add_16 swiglu_16;
    8 "64" linear_64 linear_add_64 swiglu_64;
}
