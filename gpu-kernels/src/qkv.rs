//! Between the QKV projection and attention: per-head RMSNorm of queries and keys, rotary embedding, and the append of
//! keys and values to the cache.
//!
//! One warp a head and row. A lane holds dimensions `2l`, `2l + 1` and their rotary partners `64 + 2l`, `65 + 2l`: the
//! rotation stays in the lane, and only the norm's sum crosses lanes.
//!
//! ```text
//! rotated[d]      = x[d]      · cos[position, d] − x[d + 64] · sin[position, d]        d < 64
//! rotated[d + 64] = x[d + 64] · cos[position, d] + x[d]      · sin[position, d]
//! ```

use cuda_std::{Global, GlobalMut, bf16, kernel, math, thread};

use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::norm::warp_sum;
use crate::step::Rows;

/// Heads of a block of [`split_heads`].
pub const HEADS_PER_BLOCK: u32 = 4;
const HALF: u32 = HEAD_DIM / 2;

/// Parameters of [`split_heads`]. Grid: (heads of all three kinds / [`HEADS_PER_BLOCK`] rounded up, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SplitHeads {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, (q_heads + 2 · kv_heads) · 128]`: queries, keys, values.
    pub qkv: Global<f32>,
    /// `[128]`.
    pub q_norm: Global<bf16>,
    /// `[128]`.
    pub k_norm: Global<bf16>,
    /// `[positions, 64]` cosines.
    pub cos: Global<f32>,
    /// `[positions, 64]` sines.
    pub sin: Global<f32>,
    /// `[rows, q_heads, 128]`.
    pub q: GlobalMut<bf16>,
    /// Where keys and values go.
    pub cache: Cache,
    /// Query heads.
    pub q_heads: u32,
    /// Added to the mean of squares.
    pub eps: f32,
}

impl SplitHeads {
    /// Heads of all three kinds.
    #[inline(always)]
    pub const fn heads(&self) -> u32 {
        self.q_heads + 2 * self.cache.kv_heads
    }
}

/// Normalises, rotates and places every head of every row.
#[kernel(threads = 128)]
pub unsafe fn split_heads(p: SplitHeads) {
    unsafe {
        let row = thread::block_idx_y();
        let head = thread::block_idx_x() * HEADS_PER_BLOCK + thread::warp_id();
        if row < p.rows.count.load(0) && head < p.heads() {
            split_head(&p, row, head);
        }
    }
}

/// One warp's work: one head of one row.
#[inline(always)]
pub(crate) unsafe fn split_head(p: &SplitHeads, row: u32, head: u32) {
    unsafe {
        let position = p.rows.positions.load(row as usize);
        let sequence = p.rows.sequences.load(row as usize);
        let x = p.qkv.at((row as usize * p.heads() as usize + head as usize) * HEAD_DIM as usize);
        let d = (thread::lane_id() * 2) as usize;
        let h = d + HALF as usize;
        let v = [x.load(d), x.load(d + 1), x.load(h), x.load(h + 1)];

        if head >= p.q_heads + p.cache.kv_heads {
            let to = p.cache.value(sequence, position, head - p.q_heads - p.cache.kv_heads);
            to.store(d * PAGE_TOKENS as usize, math::to_bf16(v[0]));
            to.store((d + 1) * PAGE_TOKENS as usize, math::to_bf16(v[1]));
            to.store(h * PAGE_TOKENS as usize, math::to_bf16(v[2]));
            to.store((h + 1) * PAGE_TOKENS as usize, math::to_bf16(v[3]));
            return;
        }

        let is_query = head < p.q_heads;
        let weight = if is_query { p.q_norm } else { p.k_norm };
        let squares = warp_sum(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]);
        let scale = 1.0 / math::sqrt(squares / HEAD_DIM as f32 + p.eps);
        let normed = |v: f32, i: usize| v * scale * math::from_bf16(weight.load(i));
        let n = [normed(v[0], d), normed(v[1], d + 1), normed(v[2], h), normed(v[3], h + 1)];

        let angle = position as usize * HALF as usize + d;
        let (c0, s0) = (p.cos.load(angle), p.sin.load(angle));
        let (c1, s1) = (p.cos.load(angle + 1), p.sin.load(angle + 1));
        let low = math::pack_bf16(n[0] * c0 - n[2] * s0, n[1] * c1 - n[3] * s1);
        let high = math::pack_bf16(n[2] * c0 + n[0] * s0, n[3] * c1 + n[1] * s1);
        let to = if is_query {
            p.q.at((row as usize * p.q_heads as usize + head as usize) * HEAD_DIM as usize)
        } else {
            p.cache.key(sequence, position, head - p.q_heads)
        };
        to.at(d).cast::<u32>().store(0, low);
        to.at(h).cast::<u32>().store(0, high);
    }
}
