//! Linear layers for the rows of many sequences: the bits of [`linear`](crate::linear), on Hopper's warpgroup products.
//!
//! # Shape of the work
//! A block takes 128 output features (a *tile*: 8 strips) × `ROWS` = 64 or 128 rows at a time. The weights are read where the
//! [stream](crate::stream) has them:
//!
//! ```text
//! warp 8         weights, a slice of 64 inputs of 8 strips: 8 × 2 KiB ──bulk copies──┐
//! warp 9         activations [ROWS × 64]                     ──copy engine──────────┴─► ring of slots in shared memory
//! warps 10, 11   the rows' norm factors
//! warps 0 to 3   strips 0 to 3 ┐ wgmma m64nROWSk16: weights from registers (their lanes' fragments, as they lie in a chunk),
//! warps 4 to 7   strips 4 to 7 ┘                    activations from shared memory; then the epilogue, in registers
//! ```
//!
//! # The order of a sum
//! In [`linear`](crate::linear) warp `w` of 8 chains the slices `w, w + 8, …` in the tensor core, and the warps' sums are added from first to last. Here one
//! warpgroup does the same chains one after another: all slices of *residue* 0, then of residue 1, …, and adds each finished chain to its totals. On Hopper
//! `wgmma` and `mma.sync` give the same bits for the same 16 products (measured: 4 × 4,096 sums of 4,096 products, plain, of equal sign and spread over
//! 24 binary orders; and the order within the 16 does not matter). Which 16 inputs an instruction takes follows from `linear`'s loads of 16 bytes; activations are
//! kept in that order, see [`slot`].
//!
//! # From one launch to the next
//! Weights depend on nothing that a step does. So a launch begins as soon as blocks of the one before end (programmatic dependent launch), and fills its ring
//! with weights; everything else waits until that launch is done. The number of rows is older than both.
//!
//! # When tiles do not fill the card
//! Whole rounds of tiles, one a block, run as above. What is left is split by residues into [`Share::parts`] a tile, so that every block has work: parts
//! leave their chains in memory (L2, in truth), and each adds those of its share of the rows, in order, once all are there: if it can,
//! after its next unit. So all blocks are resident together.

/// Four accumulators from this one on, got or set: a lane's sums of a group of eight rows.
macro_rules! accumulators {
    ($first:expr) => {
        [
            wgmma::get::<{ $first }>(),
            wgmma::get::<{ $first + 1 }>(),
            wgmma::get::<{ $first + 2 }>(),
            wgmma::get::<{ $first + 3 }>(),
        ]
    };
    ($first:expr, $values:expr) => {{
        let values: [f32; 4] = $values;
        wgmma::set::<{ $first }>(values[0]);
        wgmma::set::<{ $first + 1 }>(values[1]);
        wgmma::set::<{ $first + 2 }>(values[2]);
        wgmma::set::<{ $first + 3 }>(values[3]);
    }};
}

mod attention;
mod consumer;
mod outputs;
mod producer;

pub use attention::{ATTEND_THREADS, WideAttend, wide_attend};

use cuda_std::tensor::TensorMap;
use cuda_std::{Global, GlobalMut, bf16, bulk, kernel, launches, math, thread, wgmma};

use crate::embedding::Embed;
use crate::linear::{SLICE, STRIP, slot};
use crate::norm::{Norm, Residual};
use crate::qkv::{HEADS_PER_BLOCK, SplitHeads, split_head};
use crate::ring::{Ring, Shape};
use crate::step::Rows;
use consumer::consume;
use producer::{factors_ready, find_factors, produce_rows, produce_weights};

/// Most rows of a step.
pub const MAX_WIDE_ROWS: u32 = 256;
/// Threads of a block.
pub const THREADS: u32 = 384;
/// Strips of a tile.
pub const TILE_STRIPS: u32 = 8;

const RESIDUES: u32 = 8;
/// Registers of a lane once warpgroups know what they are.
const CONSUMER_REGISTERS: u32 = 208;
const PRODUCER_REGISTERS: u32 = 88;
// A block shares out what it was launched with: 168 a lane. Asking for more waits forever.
const _: () = assert!(256 * CONSUMER_REGISTERS + 128 * PRODUCER_REGISTERS <= 384 * 168);
const GROUP: u32 = 128;
/// Bytes of a strip's slice.
const SLICE_BYTES: u32 = SLICE * STRIP * 2;
const WEIGHT_BYTES: u32 = TILE_STRIPS * SLICE_BYTES;

/// Polls of a wait before the step is given up: seconds, where a product takes microseconds.
const PATIENCE: u32 = 1 << 23;

/// What is done with sums.
const WRITE: u32 = 0;
const ADD: u32 = 1;
const SWIGLU: u32 = 2;

/// How tiles fall to blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Tiles that a block does whole: full rounds.
    pub whole: u32,
    /// Every other tile has `1 << shift` parts.
    pub shift: u32,
}

impl Share {
    /// Of `tiles` over `grid` blocks: the split with the shortest last round, and of equal ones the coarsest. No more parts than blocks: a block waits for
    /// a tile's parts, and would for a later one of its own.
    ///
    /// # Panics
    /// Without blocks: a bug of the caller.
    #[must_use]
    pub const fn new(tiles: u32, grid: u32) -> Self {
        let left = tiles % grid;
        let (mut shift, mut best, mut tried) = (0, u32::MAX, 0);
        while RESIDUES >> tried > 0 && 1 << tried <= grid {
            let time = (left << tried).div_ceil(grid) * (RESIDUES >> tried);
            if time < best {
                (shift, best) = (tried, time);
            }
            tried += 1;
        }
        Self { whole: tiles - left, shift }
    }

    /// Parts of a tile that is not whole.
    #[inline(always)]
    #[must_use]
    pub const fn parts(&self) -> u32 {
        1 << self.shift
    }

    /// Residues of a part.
    #[inline(always)]
    const fn residues(&self) -> u32 {
        RESIDUES >> self.shift
    }

    /// Chains that the parts of a tile leave in memory: the first part leaves one, its total.
    #[inline(always)]
    const fn chains(&self) -> u32 {
        1 + RESIDUES - self.residues()
    }
}

/// Parameters of the products of this module. Grid: at most one block a multiprocessor, all resident at once. Shared memory: [`Wide::shared_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Wide {
    /// The rows of this step.
    pub rows: Rows,
    /// The activations, bf16 `[rows, k]` with each row in the order of [`slot`], in tiles of `ROWS` rows.
    pub x: Global<TensorMap>,
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them.
    pub stream: Global<bf16>,
    /// The matrix's first [`Pass::base`].
    pub base: u64,
    /// Blocks that `lay_out` was told.
    pub blocks: u32,
    /// Strips of the matrix.
    pub strips: u32,
    /// Tiles of rows: for all rows that there may be.
    pub row_tiles: u32,
    /// [`Share::new`] of all tiles over the grid.
    pub share: Share,
    /// Output features: of `swiglu`, those of its result.
    pub n: u32,
    /// Input features, a multiple of 64.
    pub k: u32,
    /// What the input has yet to be divided by.
    pub norm: Norm,
    /// `[rows, n]`: written by `wide_linear_*` alone.
    pub y: GlobalMut<f32>,
    /// `[rows, n]` in the order of [`slot`]: written by `wide_swiglu_*` alone.
    pub activation: GlobalMut<bf16>,
    /// Added to by `wide_add_*` alone; its size is `n`, and its scaled rows are in the order of [`slot`].
    pub residual: Residual,
    /// `[n]`: the weight of the norm that comes after `wide_add_*`.
    pub next_norm: Global<bf16>,
    /// [`Wide::partial_len`] elements, for chains of split tiles.
    pub partials: GlobalMut<f32>,
    /// [`Wide::arrivals_len`] words, zero before and after.
    pub arrivals: GlobalMut<u32>,
}

impl Wide {
    /// A slot holds a slice of a tile's weights, and of the rows.
    const fn ring(rows: u32) -> Shape {
        Shape { stages: if rows == 64 { 9 } else { 7 }, bytes: WEIGHT_BYTES + rows * SLICE * 2 }
    }

    /// Behind the ring: a barrier that says that the rows' factors are there, and the factors.
    const fn factors(rows: u32) -> u32 {
        Self::ring(rows).shared_bytes() + 8
    }

    /// Dynamic shared memory of a block of the kernels for `rows` = 64 or 128 rows a tile.
    #[must_use]
    pub const fn shared_bytes(rows: u32) -> u32 {
        Self::factors(rows) + MAX_WIDE_ROWS * 4
    }

    /// Elements of [`partials`](Self::partials) for any matrix and any number of tiles of `rows` rows, on a grid of `grid` blocks.
    #[must_use]
    pub const fn partial_len(rows: u32, grid: u32) -> usize {
        // Fewer tiles than blocks are split, and only where that shortens the round.
        let mut most = 0;
        let mut tiles = 1;
        while tiles < grid {
            let share = Share::new(tiles, grid);
            if share.shift > 0 && tiles * share.chains() > most {
                most = tiles * share.chains();
            }
            tiles += 1;
        }
        (most * 2 * 64 * rows) as usize
    }

    /// Words of [`arrivals`](Self::arrivals) on a grid of `grid` blocks: for both halves of each tile that may be split, how many parts' chains are there,
    /// and how many parts know it.
    #[must_use]
    pub const fn arrivals_len(grid: u32) -> usize {
        4 * grid as usize
    }
}

/// A tile, or a part of it, and how to walk its slices.
#[derive(Clone, Copy)]
struct Unit {
    /// First strip.
    strip: u32,
    /// First row.
    row: u32,
    /// Number among split tiles.
    split: u32,
    residue: u32,
    end: u32,
}

impl Wide {
    /// Tiles of a matrix of `strips` strips and of so many tiles of rows.
    #[inline(always)]
    #[must_use]
    pub const fn tiles(strips: u32, row_tiles: u32) -> u32 {
        strips.div_ceil(TILE_STRIPS) * row_tiles
    }

    /// The unit of this number, with `rows` rows in a tile. A block has those that are its own number modulo the grid.
    #[inline(always)]
    fn unit(&self, number: u32, rows: u32) -> Option<Unit> {
        let Share { whole, shift } = self.share;
        let (tile, split, part, shift) = if number < whole {
            (number, 0, 0, 0)
        } else {
            let part = number - whole;
            (whole + (part >> shift), part >> shift, part & ((1 << shift) - 1), shift)
        };
        if tile >= Self::tiles(self.strips, self.row_tiles) {
            return None;
        }
        let residues = RESIDUES >> shift;
        let residue = part * residues;
        // SAFETY: a launch has rows.
        unsafe { core::hint::assert_unchecked(self.row_tiles > 0) };
        let across = tile / self.row_tiles;
        let (strip, row) = (across * TILE_STRIPS, (tile - across * self.row_tiles) * rows);
        Some(Unit { strip, row, split, residue, end: residue + residues })
    }
}

#[inline(always)]
unsafe fn wide<const ROWS: u32, const TILES: usize, const KIND: u32>(p: &Wide) {
    unsafe {
        wgmma::declare();
        launches::allow_next();
        if p.rows.count.load(0) == 0 {
            return;
        }
        let warp_id = thread::warp_id();
        if thread::thread_idx_x() == 0 {
            Ring::init(Wide::ring(ROWS), 2, 8);
            factors_ready::<ROWS>().init(2);
            bulk::fence_init();
        }
        thread::sync_threads();
        if warp_id < 8 {
            wgmma::take_registers::<CONSUMER_REGISTERS>();
            launches::wait();
            consume::<ROWS, TILES, KIND>(p);
        } else {
            wgmma::give_registers::<PRODUCER_REGISTERS>();
            match warp_id {
                8 => produce_weights::<ROWS>(p),
                9 => {
                    launches::wait();
                    if thread::lane_id() == 0 {
                        produce_rows::<ROWS>(p);
                    }
                }
                _ => {
                    launches::wait();
                    if KIND != ADD && !p.norm.squares.is_null() {
                        find_factors::<ROWS>(p, warp_id - 10);
                    }
                }
            }
        }
    }
}

macro_rules! widths {
    ($($rows:literal $tiles:literal $linear:ident $add:ident $swiglu:ident;)*) => { $(
        #[doc = concat!("`y = x · wᵀ`, ", stringify!($rows), " rows at a time.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $linear(p: Wide) {
            unsafe { wide::<$rows, $tiles, WRITE>(&p) }
        }
        #[doc = concat!("`residual += x · wᵀ`, ", stringify!($rows), " rows at a time; `n` is a multiple of 16.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $add(p: Wide) {
            unsafe { wide::<$rows, $tiles, ADD>(&p) }
        }
        #[doc = concat!("`activation = silu(x · gateᵀ) ∘ (x · upᵀ)`, ", stringify!($rows), " rows at a time.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $swiglu(p: Wide) {
            unsafe { wide::<$rows, $tiles, SWIGLU>(&p) }
        }
    )* };
}

widths! {
    64 8 wide_linear_64 wide_add_64 wide_swiglu_64;
    128 16 wide_linear_128 wide_add_128 wide_swiglu_128;
}

/// As [`embed`](crate::embedding::embed), with the scaled rows in the order of [`slot`]. Grid: (1, rows).
#[kernel(threads = 256)]
pub unsafe fn wide_embed(p: Embed) {
    unsafe {
        let row = thread::block_idx_y();
        if row < p.rows.count.load(0) {
            let dim = p.residual.dim;
            let token = p.rows.tokens.load(row as usize).min(p.vocab - 1);
            let source = p.table.at(token as usize * dim as usize);
            let mut i = thread::thread_idx_x();
            while i < dim {
                let x = math::from_bf16(source.load_nc(i as usize));
                p.residual.put_at(p.norm.load_nc(i as usize), row, i, slot(i), x, true);
                i += 256;
            }
        }
    }
}

/// As [`split_heads`](crate::qkv::split_heads), begun early.
#[kernel(threads = 128)]
pub unsafe fn wide_heads(p: SplitHeads) {
    unsafe {
        launches::allow_next();
        launches::wait();
        let row = thread::block_idx_y();
        let head = thread::block_idx_x() * HEADS_PER_BLOCK + thread::warp_id();
        if row < p.rows.count.load(0) && head < p.heads() {
            split_head(&p, row, head);
        }
    }
}

// What a block of an H100 may have.
const _: () = assert!(Wide::shared_bytes(64) <= 232_448 && Wide::shared_bytes(128) <= 232_448);
