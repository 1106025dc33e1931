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

use cuda_std::shared::Shared;
use cuda_std::{Global, GlobalMut, bf16, kernel, math, thread};

use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::norm::warp_sum;
use crate::step::Rows;

/// Heads of a block of [`split_heads`].
pub const HEADS_PER_BLOCK: u32 = 4;
const HALF: u32 = HEAD_DIM / 2;

/// Parameters of [`split_heads`]. Grid: (heads of all three kinds / [`HEADS_PER_BLOCK`] rounded up, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
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

    #[inline(always)]
    fn all(&self) -> Heads {
        Heads {
            qkv: self.qkv,
            q_norm: self.q_norm,
            k_norm: self.k_norm,
            cos: self.cos,
            sin: self.sin,
            q_heads: self.q_heads,
            kv_heads: self.cache.kv_heads,
            eps: self.eps,
        }
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
unsafe fn split_head(p: &SplitHeads, row: u32, head: u32) {
    unsafe {
        let position = p.rows.positions.load(row as usize);
        let sequence = p.rows.sequences.load(row as usize);
        let vector = p.all().vector(row, head, position);
        if head >= p.q_heads + p.cache.kv_heads {
            vector.store_value(p.cache.value(sequence, position, head - p.q_heads - p.cache.kv_heads));
        } else if head >= p.q_heads {
            vector.store(p.cache.key(sequence, position, head - p.q_heads));
        } else {
            vector.store(p.q.at((row as usize * p.q_heads as usize + head as usize) * HEAD_DIM as usize));
        }
    }
}

/// What the heads of a layer are made from; a part of [`SplitHeads`].
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub qkv: Global<f32>,
    pub q_norm: Global<bf16>,
    pub k_norm: Global<bf16>,
    pub cos: Global<f32>,
    pub sin: Global<f32>,
    pub q_heads: u32,
    pub kv_heads: u32,
    pub eps: f32,
}

/// A lane's part of one head of one row, ready for attention: dimensions `2l` and `2l + 1`, then `64 + 2l` and `65 + 2l`, as bf16.
#[derive(Clone, Copy)]
pub(crate) struct HeadVector {
    pub low: u32,
    pub high: u32,
    lane: u32,
}

impl Heads {
    /// Head `head` of all three kinds, of `row`, which is at `position`: queries and keys normalised and rotated. A warp makes it together.
    #[inline(always)]
    pub unsafe fn vector(&self, row: u32, head: u32, position: u32) -> HeadVector {
        unsafe {
            let heads = (self.q_heads + 2 * self.kv_heads) as usize;
            let lane = thread::fresh(thread::lane_id());
            let x = self.qkv.at((row as usize * heads + head as usize) * HEAD_DIM as usize);
            let d = (lane * 2) as usize;
            let h = d + HALF as usize;
            let v = [x.load(d), x.load(d + 1), x.load(h), x.load(h + 1)];
            if head >= self.q_heads + self.kv_heads {
                return HeadVector { low: math::pack_bf16(v[0], v[1]), high: math::pack_bf16(v[2], v[3]), lane };
            }
            let angle = position as usize * HALF as usize + d;
            let (c0, s0) = (self.cos.load_nc(angle), self.sin.load_nc(angle));
            let (c1, s1) = (self.cos.load_nc(angle + 1), self.sin.load_nc(angle + 1));
            let weight = if head < self.q_heads { self.q_norm } else { self.k_norm };
            let weight = [weight.load_nc(d), weight.load_nc(d + 1), weight.load_nc(h), weight.load_nc(h + 1)];

            let squares = warp_sum(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]);
            let scale = 1.0 / math::sqrt(squares / HEAD_DIM as f32 + self.eps);
            let normed = |i: usize| v[i] * scale * math::from_bf16(weight[i]);
            let n = [normed(0), normed(1), normed(2), normed(3)];
            let low = math::pack_bf16(n[0] * c0 - n[2] * s0, n[1] * c1 - n[3] * s1);
            let high = math::pack_bf16(n[2] * c0 + n[0] * s0, n[3] * c1 + n[1] * s1);
            HeadVector { low, high, lane }
        }
    }
}

impl HeadVector {
    /// The two words of a query or a key, and where they stand among its 64.
    #[inline(always)]
    const fn words(&self) -> [(usize, u32); 2] {
        [(self.lane as usize, self.low), ((self.lane + HALF / 2) as usize, self.high)]
    }

    /// The four elements of a value, and where they stand from its first: dimensions lie a page's tokens apart.
    #[inline(always)]
    const fn elements(&self) -> [(usize, bf16); 4] {
        let first = (self.lane * 2 * PAGE_TOKENS) as usize;
        let (page, half) = (PAGE_TOKENS as usize, (HALF * PAGE_TOKENS) as usize);
        [
            (first, bf16::from_bits(self.low as u16)),
            (first + page, bf16::from_bits((self.low >> 16) as u16)),
            (first + half, bf16::from_bits(self.high as u16)),
            (first + half + page, bf16::from_bits((self.high >> 16) as u16)),
        ]
    }

    /// Writes a query or a key: 128 contiguous elements.
    #[inline(always)]
    pub unsafe fn store(&self, to: GlobalMut<bf16>) {
        unroll!(I < 2; {
            let (i, word) = self.words()[I];
            unsafe { to.cast::<u32>().store(i, word) };
        });
    }

    /// Writes a value.
    #[inline(always)]
    pub unsafe fn store_value(&self, to: GlobalMut<bf16>) {
        unroll!(I < 4; {
            let (i, element) = self.elements()[I];
            unsafe { to.store(i, element) };
        });
    }

    /// [`store`](Self::store) to shared memory.
    #[inline(always)]
    pub unsafe fn store_shared(&self, to: Shared<bf16>) {
        unroll!(I < 2; {
            let (i, word) = self.words()[I];
            unsafe { to.cast::<u32>().store(i, word) };
        });
    }

    /// [`store_value`](Self::store_value) to shared memory.
    #[inline(always)]
    pub unsafe fn store_value_shared(&self, to: Shared<bf16>) {
        unroll!(I < 4; {
            let (i, element) = self.elements()[I];
            unsafe { to.store(i, element) };
        });
    }
}
