//! Linear layers for few rows: `y[row, n] = Σ_k x[row, k] · w[n, k]`, weights read once, in the
//! [layout](crate::stream) that all kernels share.
//!
//! # Shape of the work
//! A CTA owns an N-tile of 16 output features. Its [`K_PARTIALS`] = 4 warps distribute the slices of [`SLICE`] = 64
//! input features among themselves and feed them to the tensor cores: `mma.m16n8k16` with the weights as A (16
//! features) and the token rows as B (8 rows a tile, `TILES` tiles). A sum over k does not depend on where its terms
//! stand as long as A and B agree. So a lane loads 16 contiguous bytes of a row and uses them as the four k-pairs that
//! it must supply. The weights lie so that all lanes of a warp load one of their registers as 128 contiguous bytes. The
//! inputs need no shared memory and no shuffles.
//!
//! The input of a layer that follows a norm is not normalised yet: the sums are multiplied by the row's factor at the
//! end (see [`norm`](crate::norm)).
//!
//! # Order
//! An output is summed over its warp's slices first, in order, in the tensor core's accumulator. Then the sums of the 4
//! warps are added from first to last. A column of B never meets another. So the bits of a row depend neither on the
//! rows that share the launch nor on the number of tiles: [`linear_8`] and [`linear_64`] agree (tested).
//!
//! # Ladder
//! 1. One thread computes an output (the reference in the tests).
//! 2. This module: tensor cores, weights streamed by plain loads, one launch for each operator.
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses are as it says, with no more N-tiles in the grid than the matrix
//! has. What is not a kernel is called by the whole CTA, all of its warps together, since they synchronise. The CTA has
//! [`Linear::shared_bytes`] of dynamic shared memory to itself, and its N-tile of every row of the output.

use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, mma, shared, thread};

use crate::gate;
use crate::norm::{Norm, Residual};
use crate::step::Rows;
use crate::stream::{STEP_BYTES, StreamMatrix, core_word};

/// Input features that a warp takes at a time; slice `s` goes to warp `s % 4`. The input size is a multiple of twice
/// this.
pub const SLICE: u32 = 64;
/// Output features of a CTA.
pub const N_TILE: u32 = 16;
/// Split-K partials that an output is the sum of: one for each warp.
pub const K_PARTIALS: u32 = 4;
/// Threads of a CTA: a warp for each split-K partial.
const THREADS: u32 = K_PARTIALS * 32;
/// Slices that a warp multiplies at a time, while it loads as many for the next turn. Four would gain nothing with few
/// rows, with or without loading ahead: warps would need more registers, so fewer would fit on an SM.
const SLICES_IN_FLIGHT: u32 = 2;

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
    /// What the input still has to be divided by.
    pub norm: Norm,
    /// `[rows, n]`: written by `linear_*` alone.
    pub y: GlobalMut<f32>,
    /// `[rows, n]`: written by `swiglu_*` alone.
    pub activation: GlobalMut<bf16>,
    /// What `linear_add_*` adds to; the other kernels do not use it. Its size is `n`.
    pub residual: Residual,
    /// `[n]`: the weight of the norm that comes after `linear_add_*`.
    pub next_norm: Global<bf16>,
    /// `[n]`: what `linear_*` adds to each row; null for nothing.
    pub bias: Global<bf16>,
    /// Output features; with `swiglu_*` those of gate, which are as many as those of up.
    pub n: u32,
    /// First row to compute. The head uses it to skip rows whose logits nobody asked for.
    pub first_row: u32,
}

impl Linear {
    /// Bytes of dynamic shared memory for a launch of up to `rows` rows: the partial sums of every warp, and each row's
    /// factor.
    pub const fn shared_bytes(rows: u32) -> u32 {
        let rows = rows.div_ceil(8) * 8;
        (K_PARTIALS * N_TILE + 1) * rows * 4
    }
}

/// Where an element of a row of activations goes in *slot order*: the inputs that one tensor core instruction
/// multiplies are neighbours, in the order of its slots (see [`batched`](crate::batched)). In this module, lane `t` of
/// four loads inputs `8 t .. 8 t + 8` of 32. It gives the first four to one instruction and the other four to the next.
/// Of each four, the first two go to slots `2 t` and `2 t + 1`, and the other two go 8 slots further.
#[device]
#[must_use]
pub const fn slot(element: u32) -> u32 {
    let (t, step, high, low) = (element >> 3 & 3, element >> 2 & 1, element >> 1 & 1, element & 1);
    element & !31 | step << 4 | high << 3 | t << 1 | low
}

/// Where an element of a row goes: to its [`slot`] with `SLOTS`, else to its own index.
#[device]
pub(crate) const fn place_of<const SLOTS: bool>(element: u32) -> usize {
    (if SLOTS { slot(element) } else { element }) as usize
}

/// Each warp computes its split-K partial of the CTA's N-tile and leaves it in shared memory, `[warp][row][feature]`.
/// Where a norm comes before, the rows' factors go behind the partials. Ends with a barrier of the CTA.
///
/// # Safety
/// `count` is what [`rows_here`] says, and not 0.
#[device]
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
        let turn = SLICES_IN_FLIGHT * K_PARTIALS;
        // Loads the fragments of a turn's slices, four instructions for each slice. The last turn may have fewer
        // slices.
        let fetch = |slice: u32| {
            let mut fragments = [[0u32; 4]; 4 * SLICES_IN_FLIGHT as usize];
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
        // The next turn's fragments are under way while this turn's are multiplied.
        let mut next = fetch(slice);
        while slice < slices {
            let fragments = next;
            next = fetch(slice + turn);
            let k = (slice * SLICE + t * 8) as usize;
            unroll!(T < TILES of 8; {
                let row = T as u32 * 8 + g;
                let x = p.x.at((p.first_row + row) as usize * k_size as usize + k);
                // `J` counts half slices: one load of a row gives a lane the inputs of two instructions.
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
/// The CTA has come out of [`partial_sums`], and has written nothing else there since. `row` is below its `count`, and
/// `feature` below [`N_TILE`].
#[device]
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
#[device]
unsafe fn rows_here<const TILES: usize>(p: &Linear) -> u32 {
    // SAFETY: the caller's word.
    let count = unsafe { p.rows.count.load(0) };
    count.saturating_sub(p.first_row).min(TILES as u32 * 8)
}

#[device]
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
        // Whole warps go round together: `put` takes all lanes of a warp, which have two N-tiles of the residual.
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

#[device]
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
