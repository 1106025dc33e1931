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
//! The warps' results meet in shared memory and are added, first to last. A row whose keys end in the first split is finished by then; of others the block
//! writes its sum, its maximum and its normaliser, and [`combine`] adds the splits (flash decoding: Dao et al., 2023, "Flash-Decoding
//! for long-context inference"; the running maximum: Milakov and Gimelshein, 2018, "Online normalizer calculation for softmax").
//!
//! # Which keys a lane holds
//! Column `n` of key tile `j` is key `8 · (n / 2) + 2 · j + n % 2` of the warp's 32. Then a lane's scores are those of 8
//! contiguous keys, `8t..8t + 8`, and one 16-byte load of the transposed values matches them.
//!
//! # Order
//! A row's result depends on its own keys alone: splits and warps are cut by key position, and a pair never meets another. [`combine`] deals the splits
//! to 8 warps in turn; each adds its own from first to last, and then the warps are added from first to last.

use cuda_std::{Global, GlobalMut, bf16, kernel, math, mma, shared, thread, warp};

use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::linear::place_of;
use crate::quad;
use crate::step::Rows;

/// Keys of a block of [`attend`].
pub const SPLIT: u32 = 256;
/// (row, query head) pairs of a block of [`attend`].
pub const PAIRS: u32 = 16;
const WARPS: u32 = 8;
/// Keys of a warp.
pub(crate) const WARP_KEYS: u32 = SPLIT / WARPS;
const LOG2_E: f32 = core::f32::consts::LOG2_E;
const TILES: usize = HEAD_DIM as usize / 8;

/// Parameters of [`attend`] and [`combine`]. [`attend`]: grid (key-value heads, splits, tiles of pairs), shared memory
/// [`Attend::SHARED_BYTES`]. [`combine`]: grid (query heads, rows), shared memory [`Attend::COMBINE_SHARED_BYTES`]; not needed when every position is below [`SPLIT`].
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
    /// `[rows, q_heads, 128]`, the result.
    pub out: GlobalMut<bf16>,
    /// Splits that a row of `sums` has room for.
    pub splits: u32,
    /// Query heads.
    pub q_heads: u32,
    /// What scores are multiplied by: 1 / √128.
    pub scale: f32,
}

impl Attend {
    /// Dynamic shared memory of [`attend`]: the sums of a quarter of the pairs, and each warp's maxima and normalisers.
    pub const SHARED_BYTES: u32 = (WARPS * QUARTER * PAIR_STRIDE + 2 * WARPS * PAIRS) * 4;
    /// Dynamic shared memory of [`combine`]: the sums of every warp, and their normalisers.
    pub const COMBINE_SHARED_BYTES: u32 = WARPS * (HEAD_DIM + 1) * 4;

    /// Rows in a tile of pairs when `group` query heads share a key-value head.
    pub const fn tile_rows(group: u32) -> u32 {
        PAIRS / group
    }

    /// Tiles for `rows` rows.
    pub const fn tiles(rows: u32, group: u32) -> u32 {
        rows.div_ceil(Self::tile_rows(group))
    }

    /// Keeps dimensions `d` and one on of a split's sums for a pair among all rows' heads, and with the first of them its maximum and normaliser.
    #[inline(always)]
    pub(crate) unsafe fn keep(&self, split: u32, pair: usize, d: u32, sum: [f32; 2], scale: [f32; 2]) {
        unsafe {
            let at = pair * self.splits as usize + split as usize;
            let to = self.sums.at(at * HEAD_DIM as usize + d as usize);
            to.store(0, sum[0]);
            to.store(1, sum[1]);
            if d == 0 {
                self.scales.cast().store(at, scale);
            }
        }
    }

    /// The sums of a split for a pair among all rows' heads.
    #[inline(always)]
    pub(crate) unsafe fn part(&self, pair: usize, split: u32) -> Global<f32> {
        unsafe { self.sums.read().at((pair * self.splits as usize + split as usize) * HEAD_DIM as usize) }
    }

    /// Their maximum and normaliser.
    #[inline(always)]
    pub(crate) unsafe fn part_scale(&self, pair: usize, split: u32) -> [f32; 2] {
        unsafe { self.scales.cast().load(pair * self.splits as usize + split as usize) }
    }

    /// Puts dimensions `d` and one on of the results of a pair among all rows' heads; with `SLOTS` in the order of [`slot`](crate::linear::slot).
    #[inline(always)]
    pub(crate) unsafe fn put<const SLOTS: bool>(&self, pair: usize, d: u32, word: u32) {
        unsafe { self.out.at(pair * HEAD_DIM as usize).cast().store(place_of::<SLOTS>(d) / 2, word) }
    }
}

/// Pairs whose sums meet in shared memory at a time.
pub(crate) const QUARTER: u32 = PAIRS / 4;
/// Words between two pairs' sums: eight more than they take, so that a warp's stores meet every bank once.
const PAIR_STRIDE: u32 = HEAD_DIM + 8;

/// The 8 warps that work on a tile meet; a block may have other warps with other work, and barriers of theirs.
#[inline(always)]
fn sync(barrier: u32) {
    thread::sync_named(barrier, WARPS * 32);
}

/// `exp2(a − b)`, and 0 where `a` is the maximum of nothing.
#[inline(always)]
fn weight(a: f32, b: f32) -> f32 {
    if a == f32::NEG_INFINITY { 0.0 } else { math::exp2(a - b) }
}

/// What a warp found among its 32 keys. A lane holds parts of pairs `g` and `g + 8`, where `g = lane / 4`.
#[derive(Clone, Copy)]
pub(crate) struct Found {
    /// Weighted sums of values, as the tensor core leaves them: dimensions `8n + 2t` and one on, for both pairs.
    o: [[f32; 4]; TILES],
    /// The largest score of each pair.
    top: [f32; 2],
    /// The sum of weights of each pair.
    norm: [f32; 2],
}

impl Found {
    /// Of no keys.
    pub const NOTHING: Self = Self { o: [[0.0; 4]; TILES], top: [f32::NEG_INFINITY; 2], norm: [0.0; 2] };
}

/// Division by a small number that is known once. Its value comes first.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Divisor {
    pub value: u32,
    inverse: u32,
}

impl Divisor {
    /// By `value`, at most 256.
    #[inline(always)]
    pub fn new(value: u32) -> Self {
        // At least 1, so that this cannot panic.
        Self { value, inverse: 65536 / value.max(1) + 1 }
    }

    /// `n / value` and the remainder, for `n` below `65536 / value`: the inverse is too large by less than `1 / n`.
    #[inline(always)]
    pub const fn divide(&self, n: u32) -> (u32, u32) {
        let quotient = (n * self.inverse) >> 16;
        (quotient, n - quotient * self.value)
    }
}

/// The tile of (row, query head) pairs that a block works on.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub kv_head: u32,
    pub split: u32,
    /// Query heads of a key-value head.
    pub group: Divisor,
    pub first_row: u32,
    /// `rows · group`.
    pub pairs: u32,
    pub lane: u32,
    pub warp_id: u32,
}

impl Tile {
    /// First key of this warp.
    #[inline(always)]
    pub fn first_key(&self) -> u32 {
        self.split * SPLIT + self.warp_id * WARP_KEYS
    }

    /// The row of a pair.
    #[inline(always)]
    pub const fn row(&self, pair: u32) -> u32 {
        self.first_row + self.group.divide(pair).0
    }

    /// The place of a pair among all rows' heads.
    #[inline(always)]
    pub const fn place(&self, p: &Attend, pair: u32) -> usize {
        let (row, head) = self.group.divide(pair);
        (self.first_row + row) as usize * p.q_heads as usize + (self.kv_head * self.group.value + head) as usize
    }
}

/// Attention of the tile's pairs over this warp's 32 keys. `position(row)` is where a row stands; `query(i, j)` gives 16 bytes of pair `g + 8 i` from
/// dimension `8 t + 32 j` on; `key(k, j)` likewise of the `k`-th key from the warp's first on; `value(d)` dimension `d` of keys `8 t..8 t + 8`.
/// `between` is called when the keys are done with.
#[inline(always)]
pub(crate) fn attend_keys(
    p: &Attend,
    tile: &Tile,
    position: impl Fn(u32) -> u32,
    query: impl Fn(usize, usize) -> [u32; 4],
    key: impl Fn(u32, usize) -> [u32; 4],
    between: impl FnOnce(),
    value: impl Fn(u32) -> [u32; 4],
) -> Found {
    let (g, t) = (tile.lane / 4, tile.lane % 4);
    let mut found = Found::NOTHING;
    let mut s = [[0f32; 4]; 4];
    unroll!(I < 4; {
        let (l, h) = (query(0, I), query(1, I));
        unroll!(J < 4; {
            // A key beyond the last row's is masked below; the cache there is zeroed or stale, never unmapped: a
            // page holds 64 keys, and the warp's 32 never cross one.
            let b = key(8 * (g / 2) + 2 * J as u32 + g % 2, I);
            s[J] = mma::m16n8k16_bf16(s[J], [l[0], h[0], l[1], h[1]], [b[0], b[1]]);
            s[J] = mma::m16n8k16_bf16(s[J], [l[2], h[2], l[3], h[3]], [b[2], b[3]]);
        });
    });
    between();
    let limit = |pair: u32| {
        if pair < tile.pairs { position(tile.row(pair)) as i32 } else { -1 }
    };
    let limit = [limit(g), limit(g + 8)];
    let scale = p.scale * LOG2_E;
    let first = tile.first_key() + 8 * t;
    unroll!(I < 2; {
        unroll!(J < 8; {
            let score = &mut s[J / 2][2 * I + J % 2];
            *score = if (first + J as u32) as i32 <= limit[I] { *score * scale } else { f32::NEG_INFINITY };
            found.top[I] = math::max(found.top[I], *score);
        });
        found.top[I] = quad::max(found.top[I]);
        unroll!(J < 8; {
            let score = &mut s[J / 2][2 * I + J % 2];
            *score = weight(*score, found.top[I]);
            found.norm[I] += *score;
        });
        found.norm[I] = quad::sum(found.norm[I]);
    });
    // A's k-pairs are the key tiles: (0, 1) then (2, 3), as the values have them.
    let pack = |a: [f32; 4], b: [f32; 4]| {
        [
            math::pack_bf16(a[0], a[1]),
            math::pack_bf16(a[2], a[3]),
            math::pack_bf16(b[0], b[1]),
            math::pack_bf16(b[2], b[3]),
        ]
    };
    let (p0, p1) = (pack(s[0], s[1]), pack(s[2], s[3]));
    unroll!(N < TILES of 16; {
        let b = value(N as u32 * 8 + g);
        found.o[N] = mma::m16n8k16_bf16(found.o[N], p0, [b[0], b[1]]);
        found.o[N] = mma::m16n8k16_bf16(found.o[N], p1, [b[2], b[3]]);
    });
    found
}

/// Adds what the block's warps found, first to last, and puts it where it belongs: the result of rows that end in the first split, and
/// the split's part of others. `position(row)` is where a row stands; `put(pair, d, word)` takes the results of dimensions `d` and one on of a pair among all rows'
/// heads, as bf16; `keep(pair, place, d, sum, scale)` the sums of a split, with its maximum and normaliser, of a pair of the tile that has this place among
/// all rows' heads. Shared memory from `scratch` on is free again when it returns.
#[inline(always)]
pub(crate) unsafe fn reduce(
    p: &Attend,
    tile: &Tile,
    found: &Found,
    position: impl Fn(u32) -> u32,
    put: impl Fn(usize, u32, u32),
    keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    (scratch, barrier): (u32, u32),
) {
    unsafe {
        // New to the compiler: addresses found here are not kept over a loop around this.
        let (lane, warp_id) = (thread::fresh(tile.lane), thread::fresh(tile.warp_id));
        let (g, t) = (lane / 4, lane % 4);
        let sums = shared::dynamic::<f32>(scratch);
        // `[pair][warp]`; once all are there, a warp's factor and the pair's maximum and normaliser in place of them.
        let tops = sums.at((WARPS * QUARTER * PAIR_STRIDE) as usize);
        let norms = tops.at((WARPS * PAIRS) as usize);
        if t == 0 {
            unroll!(I < 2; {
                let at = ((g + 8 * I as u32) * WARPS + warp_id) as usize;
                tops.store(at, found.top[I]);
                norms.store(at, found.norm[I]);
            });
        }
        sync(barrier);
        // Eight lanes a pair.
        let thread = warp_id * 32 + lane;
        if warp_id < PAIRS * WARPS / 32 {
            let (own, part) = (tops.load(thread as usize), norms.load(thread as usize));
            let mut top = own;
            unroll!(M < 3; {
                top = math::max(top, warp::shuffle_xor(top, 1 << M));
            });
            let factor = weight(own, top);
            let mut norm = 0f32;
            let mut other = lane / WARPS * WARPS;
            let end = other + WARPS;
            while other < end {
                unroll!(W < 4; {
                    let other = other + W as u32;
                    norm = math::fma(warp::shuffle_idx(part, other), warp::shuffle_idx(factor, other), norm);
                });
                // Not written out further: that would crowd out sums.
                other = thread::fresh(other) + 4;
            }
            tops.store(thread as usize, factor);
            if lane % WARPS < 2 {
                norms.store(thread as usize, if lane % WARPS == 0 { top } else { norm });
            }
        }
        unroll!(R < 4; {
            let first = R as u32 * QUARTER;
            if first < tile.pairs {
                if g / QUARTER == R as u32 % 2 {
                    let to = sums.at(((warp_id * QUARTER + g % QUARTER) * PAIR_STRIDE + 2 * t) as usize).cast();
                    unroll!(N < TILES of 16; {
                        to.store(N * 4, [found.o[N][R / 2 * 2], found.o[N][R / 2 * 2 + 1]]);
                    });
                }
                sync(barrier);
                // 64 threads a pair, each with two dimensions.
                let (quarter, d) = (thread / 64, 2 * (thread % 64));
                let pair = first + quarter;
                if pair < tile.pairs {
                    let mut sum = [0f32; 2];
                    let from = sums.at((quarter * PAIR_STRIDE + d) as usize).cast::<[f32; 2]>();
                    unroll!(W < 8; {
                        let factor = tops.load((pair * WARPS) as usize + W);
                        let o = from.load(W * (QUARTER * PAIR_STRIDE / 2) as usize);
                        sum = [math::fma(o[0], factor, sum[0]), math::fma(o[1], factor, sum[1])];
                    });
                    let (top, norm) = (norms.load((pair * WARPS) as usize), norms.load((pair * WARPS) as usize + 1));
                    put_sum(p, tile, pair, d, (sum, [top, norm]), position(tile.row(pair)), &put, &keep);
                }
                sync(barrier);
            }
        });
    }
}

/// [`reduce`] of a tile of at most [`QUARTER`] pairs, with the same bits: the warps meet once. Shared memory from `scratch` on is free again after they have met
/// once more.
#[inline(always)]
pub(crate) unsafe fn reduce_few(
    p: &Attend,
    tile: &Tile,
    found: &Found,
    position: impl Fn(u32) -> u32,
    put: impl Fn(usize, u32, u32),
    keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
    (scratch, barrier): (u32, u32),
) {
    unsafe {
        let (lane, warp_id) = (thread::fresh(tile.lane), thread::fresh(tile.warp_id));
        let (g, t) = (lane / 4, lane % 4);
        let sums = shared::dynamic::<f32>(scratch);
        // `[pair][warp]`
        let tops = sums.at((WARPS * QUARTER * PAIR_STRIDE) as usize);
        let norms = tops.at((WARPS * QUARTER) as usize);
        if g < QUARTER {
            if t == 0 {
                let at = (g * WARPS + warp_id) as usize;
                tops.store(at, found.top[0]);
                norms.store(at, found.norm[0]);
            }
            let to = sums.at(((warp_id * QUARTER + g) * PAIR_STRIDE + 2 * t) as usize).cast();
            unroll!(N < TILES of 16; {
                to.store(N * 4, [found.o[N][0], found.o[N][1]]);
            });
        }
        sync(barrier);
        // 64 threads a pair, each with two dimensions; each finds the warps' factors for itself.
        let thread = warp_id * 32 + lane;
        let (pair, d) = (thread / 64, 2 * (thread % 64));
        if pair < tile.pairs {
            let at = (pair * WARPS) as usize;
            let (own, parts) = ([tops.load16(at), tops.load16(at + 4)], [norms.load16(at), norms.load16(at + 4)]);
            let (mut top, mut norm, mut sum) = (f32::NEG_INFINITY, 0f32, [0f32; 2]);
            unroll!(W < 8; {
                top = math::max(top, f32::from_bits(own[W / 4][W % 4]));
            });
            let from = sums.at((pair * PAIR_STRIDE + d) as usize).cast::<[f32; 2]>();
            unroll!(W < 8; {
                let factor = weight(f32::from_bits(own[W / 4][W % 4]), top);
                let o = from.load(W * (QUARTER * PAIR_STRIDE / 2) as usize);
                norm = math::fma(f32::from_bits(parts[W / 4][W % 4]), factor, norm);
                sum = [math::fma(o[0], factor, sum[0]), math::fma(o[1], factor, sum[1])];
            });
            put_sum(p, tile, pair, d, (sum, [top, norm]), position(tile.row(pair)), &put, &keep);
        }
    }
}

/// Dimensions `d` and one on of what a pair, of a row at `position`, found in the split, with its maximum and normaliser: the result, if that is the first
/// split and the last one; otherwise a part to [`keep`](reduce).
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a part of two functions")]
unsafe fn put_sum(
    p: &Attend,
    tile: &Tile,
    pair: u32,
    d: u32,
    (sum, scale): ([f32; 2], [f32; 2]),
    position: u32,
    put: impl Fn(usize, u32, u32),
    keep: impl Fn(u32, usize, u32, [f32; 2], [f32; 2]),
) {
    let place = tile.place(p, pair);
    if position / SPLIT < tile.split {
        // The row has no keys here; a later one of the tile has.
    } else if position < SPLIT {
        put(place, d, math::pack_bf16(sum[0] / scale[1], sum[1] / scale[1]));
    } else {
        keep(pair, place, d, sum, scale);
    }
}

/// Attention of one tile of pairs over one split of the keys: tiles are cut from the first row on.
#[kernel(threads = 256)]
pub unsafe fn attend(p: Attend) {
    unsafe {
        let count = p.rows.count.load(0);
        core::hint::assert_unchecked(p.cache.kv_heads > 0);
        let group = p.q_heads / p.cache.kv_heads;
        core::hint::assert_unchecked(group > 0 && group <= PAIRS);
        let tile_rows = Attend::tile_rows(group);
        let first_row = thread::block_idx_z() * tile_rows;
        if first_row < count {
            attend_rows(&p, first_row, tile_rows.min(count - first_row));
        }
    }
}

/// Parameters of [`attend_tiles`]. Grid and shared memory as [`attend`]'s, with as many tiles as are listed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AttendTiles {
    /// What to attend to.
    pub attend: Attend,
    /// `[tiles, 2]`: a tile's first row, and its rows, at most [`Attend::tile_rows`]; those of a tile belong to one sequence, at ascending positions.
    pub tiles: Global<u32>,
}

/// The same for rows of many sequences, over tiles from a list.
#[kernel(threads = 256)]
pub unsafe fn attend_tiles(p: AttendTiles) {
    unsafe {
        let tile = p.tiles.at(2 * thread::block_idx_z() as usize);
        attend_rows(&p.attend, tile.load(0), tile.load(1));
    }
}

/// A block's work: a tile of `rows` rows from `first_row` on.
#[inline(always)]
unsafe fn attend_rows(p: &Attend, first_row: u32, rows: u32) {
    unsafe {
        core::hint::assert_unchecked(p.cache.kv_heads > 0);
        let group = p.q_heads / p.cache.kv_heads;
        let tile = Tile {
            kv_head: thread::block_idx_x(),
            split: thread::block_idx_y(),
            group: Divisor::new(group),
            first_row,
            pairs: rows * group,
            lane: thread::lane_id(),
            warp_id: thread::warp_id(),
        };
        let sequence = p.rows.sequences.load(first_row as usize);
        let last = p.rows.positions.load((first_row + rows - 1) as usize);
        if tile.split * SPLIT > last {
            return;
        }
        let position = |row: u32| p.rows.positions.load(row as usize);
        let (g, t) = (tile.lane / 4, (tile.lane % 4) as usize);
        let key0 = tile.first_key();
        let mut found = Found::NOTHING;
        if key0 <= last {
            let query = |i: usize, j: usize| {
                let pair = g + 8 * i as u32;
                if pair < tile.pairs {
                    p.q.load16(tile.place(p, pair) * HEAD_DIM as usize + t * 8 + 32 * j)
                } else {
                    [0; 4]
                }
            };
            let keys = p.cache.key(sequence, key0, tile.kv_head);
            let values = p.cache.value(sequence, key0, tile.kv_head);
            let key = |k: u32, j: usize| keys.load16((k * HEAD_DIM) as usize + t * 8 + 32 * j);
            let value = |d: u32| values.load16((d * PAGE_TOKENS) as usize + 8 * t);
            found = attend_keys(p, &tile, position, query, key, || {}, value);
        }
        let put = |pair, d, word| p.put::<false>(pair, d, word);
        let keep = |_, pair, d, sum, scale| p.keep(tile.split, pair, d, sum, scale);
        reduce(p, &tile, &found, position, put, keep, (0, 1));
    }
}

/// Adds the splits of each row and head that has more than one, and normalises.
#[kernel(threads = 256)]
pub unsafe fn combine(p: Attend) {
    unsafe {
        let row = thread::block_idx_y();
        if row < p.rows.count.load(0) {
            let position = p.rows.positions.load(row as usize);
            let put = |pair, d, x| p.out.store(pair * HEAD_DIM as usize + d as usize, x);
            combine_head(&p, row, thread::block_idx_x(), position, (thread::lane_id(), thread::warp_id()), put, 0);
        }
    }
}

/// The largest of a row and head's maxima, the first of each split's `scale`. A warp finds it together.
#[inline(always)]
fn top_score(splits: u32, lane: u32, scale: impl Fn(u32) -> [f32; 2]) -> f32 {
    let mut top = f32::NEG_INFINITY;
    let mut s = lane;
    while s < splits {
        top = math::max(top, scale(s)[0]);
        s += 32;
    }
    let mut mask = 16;
    while mask > 0 {
        top = math::max(top, warp::shuffle_xor(top, mask));
        mask /= 2;
    }
    top
}

/// One head of the row at `position` of [`combine`], by the 8 warps from the block's first on, with shared memory from `scratch` on: free again when
/// it returns. `put(pair, d, x)` takes the result of dimension `d` of a pair among all rows' heads, neighbouring lanes neighbouring ones.
#[inline(always)]
pub(crate) unsafe fn combine_head(
    p: &Attend,
    row: u32,
    head: u32,
    position: u32,
    (lane, warp_id): (u32, u32),
    put: impl Fn(usize, u32, bf16),
    scratch: u32,
) {
    unsafe {
        let splits = position / SPLIT + 1;
        if splits == 1 {
            return;
        }
        let pair = row as usize * p.q_heads as usize + head as usize;
        let sums = |s| p.part(pair, s);
        let scale = |s| p.part_scale(pair, s);
        let top = top_score(splits, lane, scale);
        // Four dimensions a lane.
        let (mut sum, mut norm) = ([0f32; 4], 0f32);
        let mut s = warp_id;
        while s < splits {
            // Four splits under way at a time.
            let mut words = [[0u32; 4]; 4];
            let mut scales = [[f32::NEG_INFINITY, 0.0]; 4];
            unroll!(I < 4; {
                let s = s + I as u32 * WARPS;
                if s < splits {
                    words[I] = sums(s).load16(lane as usize * 4);
                    scales[I] = scale(s);
                }
            });
            unroll!(I < 4; {
                let factor = weight(scales[I][0], top);
                unroll!(D < 4; {
                    sum[D] = math::fma(f32::from_bits(words[I][D]), factor, sum[D]);
                });
                norm = math::fma(scales[I][1], factor, norm);
            });
            s += 4 * WARPS;
        }
        let partial = shared::dynamic::<f32>(scratch);
        let norms = partial.at((WARPS * HEAD_DIM) as usize);
        partial.store16((warp_id * HEAD_DIM + lane * 4) as usize, sum.map(f32::to_bits));
        if lane == 0 {
            norms.store(warp_id as usize, norm);
        }
        sync(1);
        let d = warp_id * 32 + lane;
        if d < HEAD_DIM {
            let (mut sum, mut norm) = (0f32, 0f32);
            unroll!(W < 8; {
                sum += partial.load(W * HEAD_DIM as usize + d as usize);
                norm += norms.load(W);
            });
            put(pair, d, math::to_bf16(sum / norm));
        }
        sync(1);
    }
}

/// What [`combine`] does for a row and head, by one warp: it does what the 8 would have done, and adds in the same order. `words(s)` gives four dimensions
/// of a split's sums, from `4 · lane` on, `scale(s)` its maximum and normaliser; `put(d, word)` takes the result of dimensions `d` and one on.
#[inline(always)]
pub(crate) fn combine_by_warp(
    splits: u32,
    lane: u32,
    words: impl Fn(u32) -> [u32; 4],
    scale: impl Fn(u32) -> [f32; 2],
    put: impl Fn(u32, u32),
) {
    // Eight splits' sums, and their scales, one split a lane.
    let load = |first: u32| {
        let mut parts = [[0u32; 4]; WARPS as usize];
        unroll!(W < 8; {
            let s = first + W as u32;
            if s < splits {
                parts[W] = words(s);
            }
        });
        let (s, mut own) = (first + lane, [f32::NEG_INFINITY, 0.0]);
        if lane < WARPS && s < splits {
            own = scale(s);
        }
        (parts, own)
    };
    // The first are asked for before anything is waited for: that is all for contexts up to 2,048.
    let (mut loaded, mut own) = load(0);
    let top = top_score(splits, lane, &scale);
    // What each of the 8 would have found, and their normalisers, one a lane.
    let (mut parts, mut norms) = ([[0f32; 4]; WARPS as usize], 0f32);
    let mut first = 0;
    loop {
        let factors = weight(own[0], top);
        norms = math::fma(own[1], factors, norms);
        unroll!(W < 8; {
            let factor = warp::shuffle_idx(factors, W as u32);
            unroll!(D < 4; {
                parts[W][D] = math::fma(f32::from_bits(loaded[W][D]), factor, parts[W][D]);
            });
        });
        first += WARPS;
        if first >= splits {
            break;
        }
        (loaded, own) = load(first);
    }
    let (mut sum, mut norm) = ([0f32; 4], 0f32);
    unroll!(W < 8; {
        unroll!(D < 4; {
            sum[D] += parts[W][D];
        });
        norm += warp::shuffle_idx(norms, W as u32);
    });
    unroll!(I < 2; {
        put(lane * 4 + 2 * I as u32, math::pack_bf16(sum[2 * I] / norm, sum[2 * I + 1] / norm));
    });
}
