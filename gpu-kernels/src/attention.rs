//! Grouped-query attention over the paged cache, for any number of query rows and a cache of any length.
//!
//! # Shape of the work
//! The cache is cut into splits of [`SPLIT`] = 256 keys. A CTA of [`attend`] takes one key-value head, one split and
//! one tile of up to 16 (row, query head) pairs that share the head; each of its 8 warps takes 32 keys:
//!
//! ```text
//! S[16 pairs, 32 keys] = Q · Kᵀ     tensor cores, head size 128
//! P = exp2(S − max)                 in registers; masked keys give exact zeros
//! O[16 pairs, 128]     = P · V      tensor cores
//! ```
//!
//! The warps' results are added in shared memory, first to last. A row whose keys end in the first split is finished
//! then. For other rows the CTA writes its sum, its maximum and its normaliser, and [`combine`] adds the splits (flash
//! decoding: Dao et al., 2023, "Flash-Decoding for long-context inference"; the running maximum: Milakov and
//! Gimelshein, 2018, "Online normalizer calculation for softmax").
//!
//! # Order
//! A score is summed over its dimensions in order, 16 an instruction, and values are summed over their keys in the same
//! way. `wgmma`, which reads both from shared memory, gives the same bits.
//!
//! A row's result depends on its own keys alone: splits and warps are cut by key position, and pairs do not mix.
//! [`combine`] distributes the splits round-robin over 8 warps. Each warp adds its own splits from first to last, and
//! then the warps' sums are added from first to last.
//!
//! # Safety
//! What is not a kernel is called in a launch whose parameter block, `p` or `self`, is as its documentation says. The
//! rows, pairs and splits that are named are among the CTA's. Keys, values and splits' parts are there when they are
//! asked for, the warp that asks can see them, and nobody writes them before it is done.

mod by_dims;
mod few_pairs;
mod splits;
mod warps;

use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, mma, shared, thread, warp};

use crate::kv::{Cache, HEAD_DIM, PageLayout, place};
use crate::linear::place_of;
use crate::step::Rows;
pub(crate) use by_dims::{DimSums, TileWeights, add_eight};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
pub(crate) use few_pairs::{FewSums, add_few, by_pair, key_quads_from, quads_of, score_few, value_quads_from};
pub use splits::combine;
pub(crate) use splits::{combine_by_warp, combine_head};
use warps::PAIR_STRIDE;
pub(crate) use warps::{QUARTER, reduce, reduce_few};

/// Keys of a CTA of [`attend`].
pub const SPLIT: u32 = 256;
/// (row, query head) pairs of a CTA of [`attend`].
pub const PAIRS: u32 = 16;
/// Pairs that `wgmma` takes at a time.
pub(crate) const ALL_PAIRS: u32 = 64;
const WARPS: u32 = 8;
/// Keys of a warp.
pub(crate) const WARP_KEYS: u32 = SPLIT / WARPS;
const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// Tiles of eight dimensions of a head.
const DIM_TILES: usize = HEAD_DIM as usize / 8;

/// Parameters of [`attend`] and [`combine`]. [`attend`]: grid (key-value heads, splits, tiles of pairs), shared memory
/// [`Attend::SHARED_BYTES`]. [`combine`]: grid (query heads, rows), shared memory [`Attend::COMBINE_SHARED_BYTES`]; not
/// needed when every position is below [`SPLIT`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Attend {
    /// The rows of this step; rows of a tile belong to one sequence, at ascending positions.
    pub rows: Rows,
    /// `[rows, q_heads, 128]`.
    pub q: Global<bf16>,
    /// The layer's cache, with the keys of these rows in it.
    pub cache: Cache,
    /// `[rows, q_heads, splits, 128]`: sums of values, each weighted by `exp2(score − maximum)`.
    pub sums: GlobalMut<f32>,
    /// `[rows, q_heads, splits, 2]`: the maximum score, as an exponent of two, and the sum of weights.
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

    /// Writes dimensions `d` and `d + 1` of a split's sums for a pair, numbered among all rows' heads. With `d` = 0 it
    /// also writes the maximum and the normaliser.
    ///
    /// # Safety
    /// The split is below [`splits`](Self::splits), and `d` is even. One lane alone has these dimensions of this part,
    /// and nobody reads it before they have synchronised.
    #[device]
    pub(crate) unsafe fn keep(&self, split: u32, pair: usize, d: u32, sum: [f32; 2], scale: [f32; 2]) {
        // SAFETY: the caller's word.
        unsafe {
            let at = pair * self.splits as usize + split as usize;
            let to = self.sums.at(at * HEAD_DIM as usize + d as usize);
            to.cast().store(0, sum);
            if d == 0 {
                self.scales.cast().store(at, scale);
            }
        }
    }

    /// [`keep`](Self::keep) for four dimensions from `d` on, a multiple of 4.
    ///
    /// # Safety
    /// As for [`keep`](Self::keep).
    #[device]
    pub(crate) unsafe fn keep_four(&self, split: u32, pair: usize, d: u32, sums: [f32; 4], scale: [f32; 2]) {
        // SAFETY: the caller's word.
        unsafe {
            let at = pair * self.splits as usize + split as usize;
            self.sums.store16(at * HEAD_DIM as usize + d as usize, sums.map(f32::to_bits));
            if d == 0 {
                self.scales.cast().store(at, scale);
            }
        }
    }

    /// The sums of a split for a pair, numbered among all rows' heads.
    ///
    /// # Safety
    /// The split is below [`splits`](Self::splits). Whoever reads the sums has waited for all that [kept](Self::keep)
    /// them.
    #[device]
    pub(crate) unsafe fn part(&self, pair: usize, split: u32) -> Global<f32> {
        // SAFETY: the caller's word.
        unsafe { self.sums.read().at((pair * self.splits as usize + split as usize) * HEAD_DIM as usize) }
    }

    /// The maximum and the normaliser of a split for a pair.
    ///
    /// # Safety
    /// As for [`part`](Self::part); what kept the split has been waited for.
    #[device]
    pub(crate) unsafe fn part_scale(&self, pair: usize, split: u32) -> [f32; 2] {
        // SAFETY: the caller's word.
        unsafe { self.scales.cast().load(pair * self.splits as usize + split as usize) }
    }

    /// Writes dimensions `d` and `d + 1` of the result of a pair, numbered among all rows' heads. With `SLOTS`
    /// dimensions are in the order of [`slot`](crate::linear::slot).
    ///
    /// # Safety
    /// One lane alone has these dimensions of the pair, and `d` is even.
    #[device]
    pub(crate) unsafe fn put<const SLOTS: bool>(&self, pair: usize, d: u32, word: u32) {
        // SAFETY: the caller's word.
        unsafe { self.out.at(pair * HEAD_DIM as usize).cast().store(place_of::<SLOTS>(d) / 2, word) }
    }
}

/// `exp2(a − b)`, and 0 where `a` is the maximum of nothing.
#[device]
pub(crate) fn weight(a: f32, b: f32) -> f32 {
    if a == f32::NEG_INFINITY { 0.0 } else { math::exp2(a - b) }
}

/// A warp's result for its 32 keys. A lane holds parts of pairs `g` and `g + 8`, where `g = lane / 4`.
#[derive(Clone, Copy)]
pub(crate) struct WarpAttention {
    /// Weighted sums of values, as the tensor core leaves them: dimensions `8n + 2t` and the next, for both pairs,
    /// where `t = lane % 4`.
    o: [[f32; 4]; DIM_TILES],
    /// The largest score of each pair.
    top: [f32; 2],
    /// The sum of weights of each pair.
    norm: [f32; 2],
}

impl WarpAttention {
    /// The result for no keys.
    pub const NOTHING: Self = Self { o: [[0.0; 4]; DIM_TILES], top: [f32::NEG_INFINITY; 2], norm: [0.0; 2] };
}

/// Division by a small number that is known once. The number comes first in memory.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Divisor {
    pub value: u32,
    inverse: u32,
}

impl Divisor {
    /// Division by `value`, at most 256.
    #[device]
    pub fn new(value: u32) -> Self {
        // At least 1, so that this cannot panic.
        Self { value, inverse: 65536 / value.max(1) + 1 }
    }

    /// `n / value` and the remainder, for `n` below `65536 / value`: `n` times the inverse's error is then too small.
    #[device]
    pub const fn divide(&self, n: u32) -> (u32, u32) {
        let quotient = (n * self.inverse) >> 16;
        (quotient, n - quotient * self.value)
    }
}

/// The tile of (row, query head) pairs that a CTA works on.
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
    #[device]
    pub fn first_key(&self) -> u32 {
        self.split * SPLIT + self.warp_id * WARP_KEYS
    }

    /// The row of a pair.
    #[device]
    pub const fn row(&self, pair: u32) -> u32 {
        self.first_row + self.group.divide(pair).0
    }

    /// The last key that a pair sees: the `position` of its row. For a pair that does not exist it is -1: no key.
    #[device]
    pub fn last_key(&self, pair: u32, position: impl Fn(u32) -> u32) -> i32 {
        if pair < self.pairs { position(self.row(pair)) as i32 } else { -1 }
    }

    /// The place of a pair among all rows' heads.
    #[device]
    pub const fn place(&self, p: &Attend, pair: u32) -> usize {
        let (row, head) = self.group.divide(pair);
        (self.first_row + row) as usize * p.q_heads as usize + (self.kv_head * self.group.value + head) as usize
    }
}

/// The first keys of a warp's four tiles of eight.
pub(crate) const TILE_KEYS: [u32; 4] = [0, 8, 16, 24];

/// A lane's part of the softmax weights of a warp's 32 keys.
#[derive(Clone, Copy)]
pub(crate) struct SoftmaxWeights {
    /// `exp2(score − top)` as operand A of the tensor core: for the first 16 keys, which are two tiles, and for the
    /// other 16.
    pub words: [[u32; 4]; 2],
    pub top: [f32; 2],
    pub norm: [f32; 2],
}

impl SoftmaxWeights {
    /// The weights of no keys.
    pub const NOTHING: Self = Self { words: [[0; 4]; 2], top: [f32::NEG_INFINITY; 2], norm: [0.0; 2] };
}

/// Scores of a warp's 32 keys: four tiles of eight keys, as the tensor core leaves them. `query(i, j)` gives four words
/// of pair `g + 8 i`; word `w` has dimensions `32 j + 8 w + 2 t` and the next. `keys(i)` gives the same four words for
/// key `g` of each tile, of dimensions from `32 i` on.
#[device]
pub(crate) fn score_keys(
    query: impl Fn(usize, usize) -> [u32; 4],
    keys: impl Fn(usize) -> [[u32; 4]; 4],
) -> [[f32; 4]; 4] {
    let fragments = |_, j| {
        let (l, h) = (query(0, j), query(1, j));
        [[l[0], h[0], l[1], h[1]], [l[2], h[2], l[3], h[3]]]
    };
    let [s] = score_tiles::<1, 4>(fragments, keys);
    s
}

/// Where a lane's word of a query lies in a tile whose queries are stored as [`score_tiles`] takes them: `[32
/// dimensions][its first or second fragment][lane]`, 16 bytes each. The word has dimensions `2 · lane` and the next,
/// below 64. The word with the dimensions 64 further lies [`QUERY_HALF`] words on.
#[device]
pub(crate) const fn query_word(pair: u32, lane: u32) -> u32 {
    let (j, m, x, t) = (lane / 16, lane % 16 / 8, lane % 8 / 4, lane % 4);
    ((2 * j + m) * 32 + pair % 8 * 4 + t) * 4 + 2 * x + pair / 8
}

/// Words from a query's word to the one with the dimensions 64 further: see [`query_word`].
pub(crate) const QUERY_HALF: u32 = 4 * 32 * 4;

/// [`score_keys`] of at most two tiles of pairs, and at most four of keys. `queries(tile, j)` gives operand A of the
/// tensor core for the 16 dimensions from `32 j` on, and for the next 16.
#[device]
pub(crate) fn score_tiles<const N: usize, const KEYS: usize>(
    queries: impl Fn(usize, usize) -> [[u32; 4]; 2],
    keys: impl Fn(usize) -> [[u32; 4]; KEYS],
) -> [[[f32; 4]; KEYS]; N] {
    let mut s = [[[0f32; 4]; KEYS]; N];
    unroll!(I < 4; {
        let keys = keys(I);
        unroll!(T < N of 2; {
            let a = queries(T, I);
            unroll!(J < KEYS of 4; {
                let b = keys[J];
                s[T][J] = mma::m16n8k16_bf16(s[T][J], a[0], [b[0], b[1]]);
                s[T][J] = mma::m16n8k16_bf16(s[T][J], a[1], [b[2], b[3]]);
            });
        });
    });
    s
}

/// The softmax weights of the tile's pairs for keys with the scores `s`. `position(row)` is a row's position.
#[device]
pub(crate) fn weigh(p: &Attend, tile: &Tile, position: impl Fn(u32) -> u32, s: [[f32; 4]; 4]) -> SoftmaxWeights {
    weigh_some::<2>(p, tile, position, s)
}

/// [`weigh`] of a tile of at most `8 · HALVES` pairs.
#[device]
pub(crate) fn weigh_some<const HALVES: usize>(
    p: &Attend,
    tile: &Tile,
    position: impl Fn(u32) -> u32,
    s: [[f32; 4]; 4],
) -> SoftmaxWeights {
    let g = tile.lane / 4;
    let second = if HALVES == 1 { -1 } else { tile.last_key(g + 8, &position) };
    let last = [tile.last_key(g, &position), second];
    let [weights] = weigh_windows::<1, HALVES>(p, tile.first_key(), tile.lane, last, [s]);
    weights
}

/// [`weigh_some`] of `N` windows of 32 keys, four at most, which follow each other from key `first` on. A lane's two
/// pairs see keys up to `last`. Work on one window fills the latencies of the others.
#[device]
pub(crate) fn weigh_windows<const N: usize, const HALVES: usize>(
    p: &Attend,
    first: u32,
    lane: u32,
    last: [i32; 2],
    mut s: [[[f32; 4]; 4]; N],
) -> [SoftmaxWeights; N] {
    let scale = p.scale * LOG2_E;
    let first = first + 2 * (lane % 4);
    let (mut tops, mut offsets, mut norms) = ([[f32::NEG_INFINITY; 2]; N], [[0f32; 2]; N], [[0f32; 2]; N]);
    unroll!(W < N of 4; {
        unroll!(I < HALVES of 2; {
            unroll!(J < 8; {
                let score = &mut s[W][J / 2][2 * I + J % 2];
                let key = first + W as u32 * WARP_KEYS + (J / 2 * 8 + J % 2) as u32;
                if key as i32 > last[I] {
                    *score = f32::NEG_INFINITY;
                }
                tops[W][I] = math::max(tops[W][I], *score);
            });
        });
    });
    unroll!(M < 2; {
        unroll!(W < N of 4; {
            unroll!(I < HALVES of 2; {
                tops[W][I] = math::max(tops[W][I], warp::shuffle_xor(tops[W][I], 1 << M));
            });
        });
    });
    unroll!(W < N of 4; {
        unroll!(I < HALVES of 2; {
            tops[W][I] *= scale;
            // Without keys all weights are 0.
            offsets[W][I] = if tops[W][I] == f32::NEG_INFINITY { 0.0 } else { -tops[W][I] };
        });
    });
    unroll!(J < 8; {
        unroll!(W < N of 4; {
            unroll!(I < HALVES of 2; {
                let score = &mut s[W][J / 2][2 * I + J % 2];
                *score = math::exp2(math::fma(*score, scale, offsets[W][I]));
                norms[W][I] += *score;
            });
        });
    });
    unroll!(M < 2; {
        unroll!(W < N of 4; {
            unroll!(I < HALVES of 2; {
                norms[W][I] += warp::shuffle_xor(norms[W][I], 1 << M);
            });
        });
    });
    // A's sixteen keys are two tiles: 0 and 1, then 2 and 3, as the values have them.
    let high = |s: [f32; 4]| if HALVES == 1 { 0 } else { math::pack_bf16(s[2], s[3]) };
    let pack = |a: [f32; 4], b: [f32; 4]| [math::pack_bf16(a[0], a[1]), high(a), math::pack_bf16(b[0], b[1]), high(b)];
    let mut weights = [SoftmaxWeights::NOTHING; N];
    unroll!(W < N of 4; {
        let words = [pack(s[W][0], s[W][1]), pack(s[W][2], s[W][3])];
        weights[W] = SoftmaxWeights { words, top: tops[W], norm: norms[W] };
    });
    weights
}

/// The weighted sums of a warp's values. `values(i)` gives, for the four `n` from `4 i` on, dimension `8 n + g` of keys
/// `8 j + 2 t` and the next, in word `j`.
#[device]
pub(crate) fn add_values(weights: &SoftmaxWeights, values: impl Fn(usize) -> [[u32; 4]; 4]) -> WarpAttention {
    let mut found = WarpAttention { top: weights.top, norm: weights.norm, ..WarpAttention::NOTHING };
    unroll!(I < 4; {
        let values = values(I);
        unroll!(J < 4; {
            found.o[4 * I + J] = add_eight(&weights.words, values[J]);
        });
    });
    found
}

/// A lane's part of a warp's keys in shared memory, as [`score_tiles`] takes them. There are keys `0..=last`, whose
/// rows begin at byte `first` and lie as `layout` says. Keys beyond `last` are replaced by it.
///
/// # Safety
/// All lanes of a warp call this, and what it returns, with the same arguments but for their `lane`; `last` is below
/// 32. The rows are in dynamic shared memory, `first` is a multiple of 16, and nobody writes them until the last call
/// is done.
#[device]
pub(crate) unsafe fn keys_from(
    layout: PageLayout,
    first: u32,
    last: u32,
    lane: u32,
) -> impl Fn(usize) -> [[u32; 4]; 4] {
    let keys = TILE_KEYS.map(|tile| (tile + lane % 8).min(last));
    move |i| {
        keys.map(|key| {
            // SAFETY: the caller's word.
            unsafe { mma::ldmatrix_x4(shared::dynamic::<u8>(first + layout.chunk(key, key_chunk(i, lane)))) }
        })
    }
}

/// Which eight dimensions, of the 32 from `32 i` on, a lane gives `ldmatrix` the address of. The lane gives those of
/// key `lane % 8` of a tile.
#[device]
pub(crate) const fn key_chunk(i: usize, lane: u32) -> u32 {
    4 * i as u32 + lane / 8
}

/// A lane's part of a warp's values in shared memory, as [`add_values`] takes them. There are values of keys
/// `0..=last`, whose rows begin at byte `first` and lie as `layout` says. Keys beyond `last` are replaced by it.
///
/// # Safety
/// As for [`keys_from`].
#[device]
pub(crate) unsafe fn values_from(
    layout: PageLayout,
    first: u32,
    last: u32,
    lane: u32,
) -> impl Fn(usize) -> [[u32; 4]; 4] {
    // SAFETY: the caller's word.
    let eight = unsafe { eight_values(layout, first, lane.min(last)) };
    move |i| [0, 1, 2, 3].map(|j| eight(4 * i as u32 + j))
}

/// A lane's part of a warp's values in shared memory, in the eight dimensions from `8 n` on, for any `n`. The lane
/// gives the address of the row of token `key`; rows begin at byte `first` and lie as `layout` says.
///
/// # Safety
/// All lanes of a warp call this, and what it returns, with the same `n`, below 16. Every lane's row is in dynamic
/// shared memory, whole and at a multiple of 16 bytes, and nobody writes it until the last call is done.
#[device]
pub(crate) unsafe fn eight_values(layout: PageLayout, first: u32, key: u32) -> impl Fn(u32) -> [u32; 4] {
    move |n| {
        // SAFETY: the caller's word: eight dimensions of a row that is there.
        unsafe { mma::ldmatrix_x4_trans(shared::dynamic::<u8>(first + layout.chunk(key, n))) }
    }
}

/// Attention of one tile of pairs over one split of the keys. Tiles are cut from the first row on.
#[kernel(threads = 256)]
pub unsafe fn attend(p: Attend) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let count = p.rows.count.load(0);
        cuda_std::assume(p.cache.kv_heads > 0);
        let group = p.q_heads / p.cache.kv_heads;
        cuda_std::assume(group > 0 && group <= PAIRS);
        let tile_rows = Attend::tile_rows(group);
        let first_row = thread::block_idx_z() * tile_rows;
        if first_row < count {
            attend_rows(&p, first_row, tile_rows.min(count - first_row));
        }
    }
}

/// Parameters of [`attend_tiles`]. Grid and shared memory as [`attend`]'s, with as many tiles as are listed.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct AttendTiles {
    /// What to attend to.
    pub attend: Attend,
    /// `[tiles, 2]`: a tile's first row, and its rows, at most [`Attend::tile_rows`]; those of a tile belong to one
    /// sequence, at ascending positions.
    pub tiles: Global<u32>,
}

/// [`attend`] for rows of many sequences, whose tiles come from a list.
#[kernel(threads = 256)]
pub unsafe fn attend_tiles(p: AttendTiles) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let tile = p.tiles.at(2 * thread::block_idx_z() as usize);
        attend_rows(&p.attend, tile.load(0), tile.load(1));
    }
}

/// A CTA's work: a tile of `rows` rows from `first_row` on.
///
/// # Safety
/// The whole CTA calls it, with [`Attend::SHARED_BYTES`] from the first byte of shared memory on. There are `rows`
/// rows, at least one and at most [`Attend::tile_rows`], of one sequence and at ascending positions.
#[device]
unsafe fn attend_rows(p: &Attend, first_row: u32, rows: u32) {
    // SAFETY: the caller's word.
    unsafe {
        cuda_std::assume(p.cache.kv_heads > 0);
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
        let (g, t) = (tile.lane / 4, tile.lane % 4);
        let key0 = tile.first_key();
        let mut found = WarpAttention::NOTHING;
        if key0 <= last {
            let query = |i: usize, j: usize| {
                let pair = g + 8 * i as u32;
                let mut words = [0; 4];
                if pair < tile.pairs {
                    let first = tile.place(p, pair) * (HEAD_DIM / 2) as usize + t as usize + 16 * j;
                    words = [0, 4, 8, 12].map(|w| p.q.cast::<u32>().load(first + w));
                }
                words
            };
            let keys = p.cache.key(sequence, key0, tile.kv_head);
            let values = p.cache.value(sequence, key0, tile.kv_head);
            // The warp's first key is a multiple of 32, so its `k`-th key is swizzled as the key of position `k` is.
            let row = |k: u32, d: u32| (k * HEAD_DIM + place(k, d)) as usize;
            // A key beyond the last row's is masked; the cache there is zeroed or stale, never unmapped: a
            // page holds 64 keys, and the warp's 32 never cross one.
            let key = |k: u32, d: u32| [0, 8, 16, 24].map(|w| keys.cast::<u32>().load(row(k, d + w) / 2));
            let keys = |i: usize| TILE_KEYS.map(|first| key(first + g, 2 * t + 32 * i as u32));
            let value = |n: u32| {
                let pairs = values.cast::<u32>();
                TILE_KEYS.map(|first| mma::transpose(pairs.load(row(first + g, 8 * n + 2 * t) / 2)))
            };
            let values = |i: usize| [0, 1, 2, 3].map(|j| value(4 * i as u32 + j));
            found = add_values(&weigh(p, &tile, position, score_keys(query, keys)), values);
        }
        let put = |pair, d, word| p.put::<false>(pair, d, word);
        let keep = |_, pair, d, sum, scale| p.keep(tile.split, pair, d, sum, scale);
        reduce(p, &tile, &found, position, put, keep, (0, 1));
    }
}
