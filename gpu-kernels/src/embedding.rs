//! Token embedding: the residual stream begins as `table[token[row], :]`, widened to f32.
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses are as it says, and `row` is one of its rows. Functions that are
//! not kernels are called by whole warps, with neighbouring lanes at neighbouring elements, from a multiple of 32 on.
//! The hidden size is a multiple of 32, too, because squares are added over lanes. Each element of a row is one lane's,
//! and nobody reads it before they have synchronised.

use cuda_std::{Global, bf16, device, kernel, math, thread};

use crate::linear::place_of;
use crate::norm::{Residual, SPAN, lane_element, lane_weights, scaled_lane};
use crate::step::Rows;

/// Parameters of [`embed`] and [`embed_spans`]. Grid: (1, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Embed {
    /// The rows of this step.
    pub rows: Rows,
    /// `[vocab, dim]`.
    pub table: Global<bf16>,
    /// Written.
    pub residual: Residual,
    /// `[dim]`, the weight of the first norm.
    pub norm: Global<bf16>,
    /// Rows of the table; a token id beyond it (a bug) reads its last row rather than other memory.
    pub vocab: u32,
}

/// Gathers the embedding of each row's token.
#[kernel(threads = 256)]
pub unsafe fn embed(p: Embed) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let row = thread::block_idx_y();
        if row < p.rows.count.load(0) {
            embed_elements::<false>(&p, row, thread::thread_idx_x(), 256);
        }
    }
}

/// As `embed`, but for [`gemm`](crate::gemm): scaled rows are in the order of [`slot`](crate::linear::slot), and
/// squares are added up for each span, too.
#[kernel(threads = 256)]
pub unsafe fn embed_spans(p: Embed) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let row = thread::block_idx_y();
        if row < p.rows.count.load(0) {
            let (lane, dim) = (thread::lane_id(), p.residual.dim);
            let token = p.rows.tokens.load(row as usize).min(p.vocab - 1);
            let source = p.table.at(token as usize * dim as usize + lane_element(lane) as usize);
            let mut first = thread::warp_id() * SPAN;
            while first < dim {
                let pairs = source.at(first as usize).cast::<u32>();
                let [low, high] = [0, 4].map(|i| math::unpack_bf16(pairs.load_nc(i)));
                let weights = lane_weights(p.norm, first, lane);
                let x = [low[0], low[1], high[0], high[1]];
                let square = p.residual.put_lane(row, first, lane, x);
                p.residual.scaled_of_lane(row, first, lane).store(0, scaled_lane(x, weights));
                p.residual.put_sums(row, first, lane, square);
                first += 8 * SPAN;
            }
        }
    }
}

/// Embeds every `stride`-th element of a row from `first` on. `first` and `stride` are such that the lanes of a warp
/// have 32 neighbouring elements. With `SLOTS` the scaled row is in the order of [`slot`](crate::linear::slot).
#[device]
pub(crate) unsafe fn embed_elements<const SLOTS: bool>(p: &Embed, row: u32, first: u32, stride: u32) {
    // SAFETY: the caller's word.
    unsafe {
        embed_each(p, row, first, stride, |weight, i, x| {
            let place = row as usize * p.residual.dim as usize + place_of::<SLOTS>(i);
            p.residual.put_at(weight, row, i, place, x, true);
        });
    }
}

/// Calls `put` with every `stride`-th element of a row's embedding from `first` on: with its weight in the norm, its
/// index, and its value. `first` and `stride` are such that the lanes of a warp have 32 neighbouring elements.
#[device]
pub(crate) unsafe fn embed_each(p: &Embed, row: u32, first: u32, stride: u32, put: impl Fn(bf16, u32, f32)) {
    // SAFETY: the caller's word.
    unsafe {
        let dim = p.residual.dim;
        let token = p.rows.tokens.load(row as usize).min(p.vocab - 1);
        let source = p.table.at(token as usize * dim as usize);
        let mut i = first;
        while i < dim {
            let (weight, x) = (p.norm.load_nc(i as usize), math::from_bf16(source.load_nc(i as usize)));
            put(weight, i, x);
            i += stride;
        }
    }
}
