//! Between the QKV projection and attention: per-head RMSNorm of queries and keys, rotary embedding, and the append of
//! keys and values to the cache.
//!
//! One warp has one head of one row. Lane `l` holds dimensions `2l`, `2l + 1` and their rotary partners `64 + 2l`,
//! `65 + 2l`: the rotation stays in the lane, and only the norm's sum crosses lanes.
//!
//! ```text
//! rotated[d]      = x[d]      · cos[position, d] − x[d + 64] · sin[position, d]        d < 64
//! rotated[d + 64] = x[d + 64] · cos[position, d] + x[d]      · sin[position, d]
//! ```
//!
//! # Safety
//! Whole warps call what is not a kernel, with the same arguments in all lanes. Rows and heads that are named are among
//! those of the launch's parameter block, whose addresses are as it says; positions are within the tables of cosines
//! and sines. The projection's output is there, and nobody writes it meanwhile. What a warp writes is its alone, and
//! nobody reads it before they have synchronised.

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, thread, warp};

use crate::attention::{QUERY_HALF, query_word};
use crate::kv::{Cache, HEAD_DIM, PageLayout, place};
use crate::step::Rows;

/// Heads of a CTA of [`split_heads`].
pub const HEADS_PER_BLOCK: u32 = 4;
const HALF: u32 = HEAD_DIM / 2;

/// Parameters of [`split_heads`]. Grid: (heads of all three kinds / [`HEADS_PER_BLOCK`] rounded up, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct SplitHeads {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, (q_heads + 2 · kv_heads) · 128]`: queries, keys, values.
    pub qkv: Global<f32>,
    /// `[128]`: the weights of the queries' norm; ones without [`head_norm`](Self::head_norm).
    pub q_norm: Global<bf16>,
    /// `[128]`: the weights of the keys' norm; ones without [`head_norm`](Self::head_norm).
    pub k_norm: Global<bf16>,
    /// `[positions, 64]` cosines.
    pub cos: Global<f32>,
    /// `[positions, 64]` sines.
    pub sin: Global<f32>,
    /// `[rows, q_heads, 128]`: the queries, as attention reads them.
    pub q: GlobalMut<bf16>,
    /// Where keys and values go.
    pub cache: Cache,
    /// Query heads.
    pub q_heads: u32,
    /// Added to the mean of squares.
    pub eps: f32,
    /// 1 if queries and keys have norms, 0 if they are rotated as they are.
    pub head_norm: u32,
}

impl SplitHeads {
    /// Heads of all three kinds: queries, keys and values.
    #[device]
    pub const fn heads(&self) -> u32 {
        self.q_heads + 2 * self.cache.kv_heads
    }

    #[device]
    fn all(&self) -> Heads {
        let Self { qkv, q_heads, eps, head_norm, cache, .. } = *self;
        Heads { qkv, q_heads, kv_heads: cache.kv_heads, eps, head_norm }
    }
}

/// Normalises and rotates queries and keys, and writes every head of every row to where attention reads it.
#[kernel(threads = 128)]
pub unsafe fn split_heads(p: SplitHeads) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let row = thread::block_idx_y();
        let head = thread::block_idx_x() * HEADS_PER_BLOCK + thread::warp_id();
        if row < p.rows.count.load(0) && head < p.heads() {
            split_some(&p, [HeadOf { row, head }]);
        }
    }
}

/// A head of a row.
#[derive(Clone, Copy)]
struct HeadOf {
    row: u32,
    head: u32,
}

/// One warp's work: `N` heads, whose loads are issued together.
///
/// # Safety
/// The rows' positions have pages in the cache.
#[device]
unsafe fn split_some<const N: usize>(p: &SplitHeads, which: [HeadOf; N]) {
    // SAFETY: the caller's word.
    unsafe {
        let heads = p.all();
        let mut x = [[[0f32; 2]; 2]; N];
        let mut positions = [0u32; N];
        let mut sequences = [0u32; N];
        unroll!(I < N of 4; {
            let HeadOf { row, head } = which[I];
            x[I] = heads.load(row, head);
            positions[I] = p.rows.positions.load(row as usize);
            sequences[I] = p.rows.sequences.load(row as usize);
        });
        let mut factors = [Factors::default(); N];
        unroll!(I < N of 4; {
            let norm = if which[I].head < p.q_heads { p.q_norm } else { p.k_norm };
            factors[I] = Factors::load(norm, p.cos, p.sin, positions[I]);
        });
        let scales = heads.scales(&x);
        unroll!(I < N of 4; {
            let HeadOf { row, head } = which[I];
            let vector = heads.vector(head, x[I], scales[I], || factors[I]);
            if head < p.q_heads {
                vector.store(p.q.at((row as usize * p.q_heads as usize + head as usize) * HEAD_DIM as usize), 0);
            } else if head < p.q_heads + p.cache.kv_heads {
                vector.store(p.cache.key(sequences[I], positions[I], head - p.q_heads), positions[I]);
            } else {
                let kv_head = head - p.q_heads - p.cache.kv_heads;
                vector.store(p.cache.value(sequences[I], positions[I], kv_head), positions[I]);
            }
        });
    }
}

/// Appends keys and values to the cache: [`split_some`] for the key and the value of every row and key-value head whose
/// number, `row · kv_heads + head`, is `first` plus a multiple of `step`.
///
/// # Safety
/// As for [`split_some`], of all rows. `step` is not 0, and nobody else has the same numbers.
#[device]
pub(crate) unsafe fn append(p: &SplitHeads, first: u32, step: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let all = p.rows.count.load(0) * p.cache.kv_heads;
        let mut item = first;
        while item < all {
            cuda_std::assume(p.cache.kv_heads > 0);
            let row = item / p.cache.kv_heads;
            let head = p.q_heads + item - row * p.cache.kv_heads;
            split_some(p, [head, head + p.cache.kv_heads].map(|head| HeadOf { row, head }));
            item += step;
        }
    }
}

/// What the heads of a layer are made from; a part of [`SplitHeads`].
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub qkv: Global<f32>,
    pub q_heads: u32,
    pub kv_heads: u32,
    pub eps: f32,
    pub head_norm: u32,
}

/// A lane's part of a norm's weights, dimensions as in [`HeadVector`].
pub(crate) type Weight = [[bf16; 2]; 2];

/// A lane's part of what a query or a key is multiplied by, dimensions as in [`HeadVector`].
#[derive(Clone, Copy, Default)]
pub(crate) struct Factors {
    /// The norm's weights.
    pub weight: Weight,
    pub cos: [f32; 2],
    pub sin: [f32; 2],
}

impl Factors {
    /// The factors of `position`.
    ///
    /// # Safety
    /// The norm has [`HEAD_DIM`] weights, at a multiple of 4 bytes.
    #[device]
    pub unsafe fn load(norm: Global<bf16>, cos: Global<f32>, sin: Global<f32>, position: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe { Self::of(Self::load_weight(norm), cos, sin, position) }
    }

    /// A lane's part of the norm's weights.
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    #[device]
    pub unsafe fn load_weight(norm: Global<bf16>) -> Weight {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, norm) = (thread::opaque(thread::lane_id()) as usize, norm.cast());
            [norm.load_nc(lane), norm.load_nc(lane + (HALF / 2) as usize)]
        }
    }

    /// The factors of `position`, with weights that are already loaded.
    ///
    /// # Safety
    /// The tables of cosines and sines have this position.
    #[device]
    pub unsafe fn of(weight: Weight, cos: Global<f32>, sin: Global<f32>, position: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let angle = (position * (HALF / 2) + thread::opaque(thread::lane_id())) as usize;
            Self { weight, cos: cos.cast().load_nc(angle), sin: sin.cast().load_nc(angle) }
        }
    }
}

/// A lane's part of one head of one row, ready for attention: dimensions `2l` and `2l + 1`, then `64 + 2l` and
/// `65 + 2l`, as bf16.
#[derive(Clone, Copy, Default)]
pub(crate) struct HeadVector {
    pub low: u32,
    pub high: u32,
    lane: u32,
}

impl Heads {
    /// A lane's part of one head of `row`, as the projection left it; dimensions as in [`HeadVector`]. `head` counts
    /// queries, then keys, then values.
    ///
    /// # Safety
    /// There is such a row and head.
    #[device]
    pub unsafe fn load(&self, row: u32, head: u32) -> [[f32; 2]; 2] {
        // SAFETY: the caller's word.
        unsafe {
            let heads = (self.q_heads + 2 * self.kv_heads) as usize;
            let lane = thread::opaque(thread::lane_id()) as usize;
            let x = self.qkv.at((row as usize * heads + head as usize) * HEAD_DIM as usize).cast();
            [x.load(lane), x.load(lane + (HALF / 2) as usize)]
        }
    }

    /// Dimensions `d` to `d + 3` of a row's value, as the projection left them; `d` is a multiple of 4.
    ///
    /// # Safety
    /// There is such a row and key-value head. `d` is below [`HEAD_DIM`], and may be another in each lane.
    #[device]
    pub unsafe fn load_value(&self, row: u32, kv_head: u32, d: u32) -> [f32; 4] {
        // SAFETY: the caller's word.
        unsafe {
            let heads = self.q_heads + 2 * self.kv_heads;
            let head = row * heads + self.q_heads + self.kv_heads + kv_head;
            self.qkv.load16(head as usize * HEAD_DIM as usize + d as usize).map(f32::from_bits)
        }
    }

    /// For each of a warp's `N` heads, the factor that makes its mean square 1; without a norm, 1.
    #[device]
    pub fn scales<const N: usize>(&self, x: &[[[f32; 2]; 2]; N]) -> [f32; N] {
        const { assert!(N.is_power_of_two() && N <= 8) };
        let mut squares = x.map(|[[x0, x1], [x2, x3]]| x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3);
        // As `warp_sum`, for all heads at once: their shuffles overlap.
        unroll!(M < 5; {
            let others = squares.map(|s| warp::shuffle_xor(s, 16 >> M));
            unroll!(I < N of 8; {
                squares[I] += others[I];
            });
        });
        // Every lane computes the root and the divisions of one head: `N` heads take no longer than one.
        let lane = thread::lane_id();
        let mut own = squares[0];
        unroll!(I < N of 8; {
            if lane % N as u32 == I as u32 {
                own = squares[I];
            }
        });
        let own = 1.0 / math::sqrt(own / HEAD_DIM as f32 + self.eps);
        let own = if self.head_norm == 0 { 1.0 } else { own };
        let mut scales = [own; N];
        if N > 1 {
            unroll!(I < N of 8; {
                scales[I] = warp::shuffle_idx(own, I as u32);
            });
        }
        scales
    }

    /// A head, ready for attention. Queries and keys are multiplied by their [scale](Self::scales) and rotated by
    /// `factors`; for values `factors` is not called.
    #[device]
    pub fn vector(&self, head: u32, x: [[f32; 2]; 2], scale: f32, factors: impl FnOnce() -> Factors) -> HeadVector {
        if head >= self.q_heads + self.kv_heads {
            return HeadVector::value(x);
        }
        let lane = thread::opaque(thread::lane_id());
        let [[x0, x1], [x2, x3]] = x;
        let Factors { weight: [[w0, w1], [w2, w3]], cos: [c0, c1], sin: [s0, s1] } = factors();
        let normed = |x: f32, weight: bf16| x * scale * math::from_bf16(weight);
        let (n0, n1, n2, n3) = (normed(x0, w0), normed(x1, w1), normed(x2, w2), normed(x3, w3));
        let low = math::pack_bf16(n0 * c0 - n2 * s0, n1 * c1 - n3 * s1);
        let high = math::pack_bf16(n2 * c0 + n0 * s0, n3 * c1 + n1 * s1);
        HeadVector { low, high, lane }
    }
}

/// Four dimensions of a value, as bf16.
#[device]
pub(crate) fn pack_value([x0, x1, x2, x3]: [f32; 4]) -> [u32; 2] {
    [math::pack_bf16(x0, x1), math::pack_bf16(x2, x3)]
}

impl HeadVector {
    /// A value, which is only rounded to bf16.
    #[device]
    fn value([[x0, x1], [x2, x3]]: [[f32; 2]; 2]) -> Self {
        Self { low: math::pack_bf16(x0, x1), high: math::pack_bf16(x2, x3), lane: thread::opaque(thread::lane_id()) }
    }

    /// The lane's two words, each with its index among the 64 words of the row of `position`.
    #[device]
    const fn words(&self, position: u32) -> [(usize, u32); 2] {
        let first = place(position, self.lane * 2) / 2;
        [(first as usize, self.low), ((first + HALF / 2) as usize, self.high)]
    }

    /// Writes the head as the row of `position`, each dimension at its [`place`]. With position 0, dimensions lie in
    /// order: so queries are stored.
    ///
    /// # Safety
    /// There is room for [`HEAD_DIM`] elements.
    #[device]
    pub unsafe fn store(&self, to: GlobalMut<bf16>, position: u32) {
        unroll!(I < 2; {
            let (i, word) = self.words(position)[I];
            // SAFETY: the caller's word.
            unsafe { to.cast::<u32>().store(i, word) };
        });
    }

    /// Writes the head as the row of `token` in a page in shared memory. The page begins at byte `page` of dynamic
    /// shared memory and has this `layout`.
    ///
    /// # Safety
    /// The page is in dynamic shared memory at a multiple of 16, and `token` below the tokens of a page.
    #[device]
    pub unsafe fn store_in_page(&self, layout: PageLayout, page: u32, token: u32) {
        unroll!(I < 2; {
            let to = page + layout.chunk(token, self.lane / 4 + (8 * I) as u32) + self.lane % 4 * 4;
            // SAFETY: the caller's word.
            unsafe { shared::dynamic::<u32>(to).store(0, [self.low, self.high][I]) };
        });
    }

    /// Writes a query to shared memory so that the elements from `32 j + 8 t` on are those that lane `t` of four takes
    /// together in [`score_keys`](crate::attention::score_keys).
    ///
    /// # Safety
    /// There is room for [`HEAD_DIM`] elements.
    #[device]
    pub unsafe fn store_for_words(&self, to: Shared<bf16>) {
        // SAFETY: the caller's word.
        unsafe {
            let word = self.lane / 16 * 16 + self.lane % 4 * 4 + self.lane % 16 / 4;
            let to = to.cast::<u32>().at(word as usize);
            to.store(0, self.low);
            to.store((HALF / 2) as usize, self.high);
        }
    }

    /// Writes a query into a tile of queries in shared memory, as query number `pair`: see [`query_word`].
    ///
    /// # Safety
    /// There is room for a tile of queries, of which `pair` is one.
    #[device]
    pub unsafe fn store_query(&self, tile: Shared<bf16>, pair: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let to = tile.cast::<u32>().at(query_word(pair, self.lane) as usize);
            to.store(0, self.low);
            to.store(QUERY_HALF as usize, self.high);
        }
    }

    /// [`store`](Self::store) to shared memory.
    ///
    /// # Safety
    /// There is room for [`HEAD_DIM`] elements.
    #[device]
    pub unsafe fn store_shared(&self, to: Shared<bf16>, position: u32) {
        unroll!(I < 2; {
            let (i, word) = self.words(position)[I];
            // SAFETY: the caller's word.
            unsafe { to.cast::<u32>().store(i, word) };
        });
    }
}
