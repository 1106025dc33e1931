//! Grouped-query attention over the paged cache, for any number of query rows and a cache of any length.
//!
//! # Shape of the work
//! The cache is cut into splits of [`SPLIT`] = 256 keys. A block of [`attend`] takes one key-value head, one split and one tile of
//! up to 16 (row, query head) pairs that share the head; each of its 8 warps takes 32 keys:
//!
//! ```text
//! S[16 pairs, 32 keys] = Q · Kᵀ     tensor cores, head size 128
//! P = exp2(S − max)                 in registers; masked keys give exact zeros
//! O[16 pairs, 128]     = P · V      tensor cores
//! ```
//!
//! The warps' results meet in shared memory, first to last; the block writes its sum, its maximum and its
//! normaliser, and [`combine`] adds the splits of each row, first to last (flash decoding: Dao et al., 2023, "Flash-Decoding
//! for long-context inference"; the running maximum: Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax").
//!
//! # Which keys a lane holds
//! Column `n` of key tile `j` is key `8 · (n / 2) + 2 · j + n % 2` of the warp's 32. Then a lane's scores are those of 8
//! contiguous keys, `8t..8t + 8`, and one 16-byte load of the transposed values matches them.
//!
//! # Order
//! A row's result depends on its own keys alone: splits, warps and tiles are cut by key position, and a pair never meets another.

use cuda_std::{Global, GlobalMut, bf16, kernel, math, mma, shared, thread, warp};

use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::step::Rows;

/// Keys of a block of [`attend`].
pub const SPLIT: u32 = 256;
/// (row, query head) pairs of a block of [`attend`].
pub const PAIRS: u32 = 16;
const WARPS: u32 = 8;
const WARP_KEYS: u32 = SPLIT / WARPS;
const LOG2_E: f32 = core::f32::consts::LOG2_E;
const TILES: usize = HEAD_DIM as usize / 8;

/// Parameters of [`attend`]. Grid: (key-value heads, splits, tiles of pairs). Shared memory: [`Attend::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    /// The rows of this step; rows of a tile belong to one sequence, at ascending positions.
    pub rows: Rows,
    /// `[rows, q_heads, 128]`.
    pub q: Global<bf16>,
    /// The layer's cache, with the keys of these rows in it.
    pub cache: Cache,
    /// `[rows, q_heads, splits, 128]`: sums of values, each weighted by `exp2(score − maximum)`.
    pub sums: GlobalMut<f32>,
    /// `[rows, q_heads, splits, 2]`: the maximum score (in powers of two) and the sum of weights.
    pub scales: GlobalMut<f32>,
    /// Splits that a row of `sums` has room for.
    pub splits: u32,
    /// Query heads.
    pub q_heads: u32,
    /// What scores are multiplied by: 1 / √128.
    pub scale: f32,
}

impl Attend {
    /// Dynamic shared memory: the sums of all pairs, and each warp's maxima and normalisers.
    pub const SHARED_BYTES: u32 = (PAIRS * HEAD_DIM + 2 * WARPS * PAIRS) * 4;

    /// Rows in a tile of pairs when `group` query heads share a key-value head.
    pub const fn tile_rows(group: u32) -> u32 {
        PAIRS / group
    }

    /// Tiles for `rows` rows.
    pub const fn tiles(rows: u32, group: u32) -> u32 {
        rows.div_ceil(Self::tile_rows(group))
    }
}

/// The 8 warps of a block of [`attend`] meet; a block may have other warps with other work.
#[inline(always)]
fn sync() {
    thread::sync_named(1, WARPS * 32);
}

/// The sum of `v` over the four lanes that hold one pair's scores.
#[inline(always)]
unsafe fn quad_sum(v: f32) -> f32 {
    let v = v + warp::shuffle_xor(v, 1);
    v + warp::shuffle_xor(v, 2)
}

#[inline(always)]
unsafe fn quad_max(v: f32) -> f32 {
    let v = math::max(v, warp::shuffle_xor(v, 1));
    math::max(v, warp::shuffle_xor(v, 2))
}

/// `exp2(a − b)`, and 0 where `a` is the maximum of nothing.
#[inline(always)]
fn weight(a: f32, b: f32) -> f32 {
    if a == f32::NEG_INFINITY { 0.0 } else { math::exp2(a - b) }
}

/// The queries of one row of A (a pair): four times 16 bytes.
#[inline(always)]
unsafe fn load_query(q: Global<bf16>, valid: bool, t: u32) -> [[u32; 4]; 4] {
    let mut out = [[0; 4]; 4];
    unroll!(J < 4; {
        if valid {
            out[J] = unsafe { q.load16((t * 8) as usize + 32 * J) };
        }
    });
    out
}

/// Attention of one tile of pairs over one split of the keys.
#[kernel(threads = 256)]
pub unsafe fn attend(p: Attend) {
    let lane = (thread::lane_id(), thread::warp_id());
    unsafe { attend_block(&p, thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z(), lane, 0) }
}

/// The work of one block of [`attend`], by the 8 warps from the block's first on, with shared memory from `scratch` on.
/// The caller says which lane of which warp it is.
#[inline(always)]
pub(crate) unsafe fn attend_block(
    p: &Attend,
    kv_head: u32,
    split: u32,
    tile: u32,
    (lane, warp_id): (u32, u32),
    scratch: u32,
) {
    unsafe {
        let count = p.rows.count.load(0);
        core::hint::assert_unchecked(p.cache.kv_heads > 0);
        let group = p.q_heads / p.cache.kv_heads;
        core::hint::assert_unchecked(group > 0 && group <= PAIRS);
        let tile_rows = Attend::tile_rows(group);
        let first_row = tile * tile_rows;
        if first_row >= count {
            return;
        }
        let rows = tile_rows.min(count - first_row);
        let sequence = p.rows.sequences.load(first_row as usize);
        let last = p.rows.positions.load((first_row + rows - 1) as usize);
        if split * SPLIT > last {
            return;
        }
        let (g, t) = (lane / 4, lane % 4);
        let key0 = split * SPLIT + warp_id * WARP_KEYS;

        // The two pairs whose scores this lane holds.
        let pairs = rows * group;
        let pair = [g, g + 8];
        let query = |i: usize| {
            let row = first_row + pair[i] / group;
            let head = kv_head * group + pair[i] % group;
            p.q.at((row as usize * p.q_heads as usize + head as usize) * HEAD_DIM as usize)
        };
        let valid = [pair[0] < pairs, pair[1] < pairs];
        let limit = |i: usize| {
            if valid[i] { p.rows.positions.load((first_row + pair[i] / group) as usize) as i32 } else { -1 }
        };
        let limit = [limit(0), limit(1)];

        let mut o = [[0f32; 4]; TILES];
        let mut top = [f32::NEG_INFINITY; 2];
        let mut norm = [0f32; 2];
        if key0 <= last {
            let a = [load_query(query(0), valid[0], t), load_query(query(1), valid[1], t)];
            let mut s = [[0f32; 4]; 4];
            unroll!(J < 4; {
                // A key beyond the last row's is masked below; the cache there is zeroed or stale, never unmapped: a
                // page holds 64 keys, and the warp's 32 never cross one.
                let key = p.cache.key(sequence, key0 + 8 * (g / 2) + 2 * J as u32 + g % 2, kv_head);
                unroll!(I < 4; {
                    let b = key.load16((t * 8) as usize + 32 * I);
                    let (l, h) = (a[0][I], a[1][I]);
                    s[J] = mma::m16n8k16_bf16(s[J], [l[0], h[0], l[1], h[1]], [b[0], b[1]]);
                    s[J] = mma::m16n8k16_bf16(s[J], [l[2], h[2], l[3], h[3]], [b[2], b[3]]);
                });
            });
            let scale = p.scale * LOG2_E;
            unroll!(I < 2; {
                unroll!(J < 8; {
                    let key = key0 + 8 * t + J as u32;
                    let score = &mut s[J / 2][2 * I + J % 2];
                    *score = if key as i32 <= limit[I] { *score * scale } else { f32::NEG_INFINITY };
                    top[I] = math::max(top[I], *score);
                });
                top[I] = quad_max(top[I]);
                unroll!(J < 8; {
                    let score = &mut s[J / 2][2 * I + J % 2];
                    *score = weight(*score, top[I]);
                    norm[I] += *score;
                });
                norm[I] = quad_sum(norm[I]);
            });
            // A's k-pairs are the key tiles: (0, 1) then (2, 3), as the value loads below have them.
            let p0 = [
                math::pack_bf16(s[0][0], s[0][1]),
                math::pack_bf16(s[0][2], s[0][3]),
                math::pack_bf16(s[1][0], s[1][1]),
                math::pack_bf16(s[1][2], s[1][3]),
            ];
            let p1 = [
                math::pack_bf16(s[2][0], s[2][1]),
                math::pack_bf16(s[2][2], s[2][3]),
                math::pack_bf16(s[3][0], s[3][1]),
                math::pack_bf16(s[3][2], s[3][3]),
            ];
            let values = p.cache.value(sequence, key0, kv_head).at((8 * t) as usize);
            unroll!(N < TILES; {
                let b = values.load16((N * 8 + g as usize) * PAGE_TOKENS as usize);
                o[N] = mma::m16n8k16_bf16(o[N], p0, [b[0], b[1]]);
                o[N] = mma::m16n8k16_bf16(o[N], p1, [b[2], b[3]]);
            });
        }

        // The block's maximum and normaliser for each pair.
        let sums = shared::dynamic::<f32>(scratch);
        let tops = shared::dynamic::<f32>(scratch + PAIRS * HEAD_DIM * 4);
        let norms = tops.at((WARPS * PAIRS) as usize);
        if t == 0 {
            tops.store((warp_id * PAIRS + pair[0]) as usize, top[0]);
            tops.store((warp_id * PAIRS + pair[1]) as usize, top[1]);
            norms.store((warp_id * PAIRS + pair[0]) as usize, norm[0]);
            norms.store((warp_id * PAIRS + pair[1]) as usize, norm[1]);
        }
        sync();
        let block_top = |pair: u32| {
            let mut m = f32::NEG_INFINITY;
            let mut w = 0;
            while w < WARPS {
                m = math::max(m, tops.load((w * PAIRS + pair) as usize));
                w += 1;
            }
            m
        };
        let factor = [weight(top[0], block_top(pair[0])), weight(top[1], block_top(pair[1]))];

        // First warp to last. Later warps have nothing to add once the keys end.
        let mut w = 0;
        while w < WARPS && split * SPLIT + w * WARP_KEYS <= last {
            if w == warp_id {
                unroll!(N < TILES; {
                    unroll!(E < 4; {
                        let column = N * 8 + 2 * t as usize + E % 2;
                        let to = sums.at(pair[E / 2] as usize * HEAD_DIM as usize + column);
                        let old = if w == 0 { 0.0 } else { to.load(0) };
                        to.store(0, math::fma(o[N][E], factor[E / 2], old));
                    });
                });
            }
            sync();
            w += 1;
        }

        let place = |pair: u32| {
            let row = first_row + pair / group;
            let head = kv_head * group + pair % group;
            (row as usize * p.q_heads as usize + head as usize) * p.splits as usize + split as usize
        };
        let mut e = thread::thread_idx_x();
        while e < pairs * HEAD_DIM {
            let to = place(e / HEAD_DIM) * HEAD_DIM as usize + (e % HEAD_DIM) as usize;
            p.sums.store(to, sums.load(e as usize));
            e += WARPS * 32;
        }
        let pair = thread::thread_idx_x();
        if pair < pairs {
            let m = block_top(pair);
            let mut norm = 0.0;
            let mut w = 0;
            while w < WARPS {
                let at = (w * PAIRS + pair) as usize;
                norm = math::fma(norms.load(at), weight(tops.load(at), m), norm);
                w += 1;
            }
            p.scales.store(place(pair) * 2, m);
            p.scales.store(place(pair) * 2 + 1, norm);
        }
    }
}

/// Parameters of [`combine`]. Grid: (query heads, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    /// The rows of this step.
    pub rows: Rows,
    /// As [`Attend::sums`].
    pub sums: Global<f32>,
    /// As [`Attend::scales`].
    pub scales: Global<f32>,
    /// `[rows, q_heads, 128]`.
    pub out: GlobalMut<bf16>,
    /// As [`Attend::splits`].
    pub splits: u32,
    /// Query heads.
    pub q_heads: u32,
}

/// Adds the splits of a row and head, first to last, and normalises. One thread a dimension.
#[kernel(threads = 128)]
pub unsafe fn combine(p: Combine) {
    unsafe {
        let row = thread::block_idx_y();
        if row < p.rows.count.load(0) {
            combine_dimension(&p, row, thread::block_idx_x(), thread::thread_idx_x() as usize);
        }
    }
}

/// One dimension of one row and head of [`combine`].
#[inline(always)]
pub(crate) unsafe fn combine_dimension(p: &Combine, row: u32, head: u32, d: usize) {
    unsafe {
        let splits = p.rows.positions.load(row as usize) / SPLIT + 1;
        let pair = row as usize * p.q_heads as usize + head as usize;
        let scales = p.scales.at(pair * p.splits as usize * 2);
        let sums = p.sums.at(pair * p.splits as usize * HEAD_DIM as usize);
        let mut top = f32::NEG_INFINITY;
        let mut s = 0;
        while s < splits as usize {
            top = math::max(top, scales.load(2 * s));
            s += 1;
        }
        let (mut sum, mut norm) = (0f32, 0f32);
        let mut s = 0;
        while s < splits as usize {
            let factor = weight(scales.load(2 * s), top);
            sum = math::fma(sums.load(s * HEAD_DIM as usize + d), factor, sum);
            norm = math::fma(scales.load(2 * s + 1), factor, norm);
            s += 1;
        }
        p.out.store(pair * HEAD_DIM as usize + d, math::to_bf16(sum / norm));
    }
}
