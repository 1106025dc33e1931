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

mod attention;

pub use attention::{ATTEND_THREADS, WideAttend, wide_attend};

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::bulk::{self, Barrier};
use cuda_std::shared;
use cuda_std::tensor::{self, TensorMap};
use cuda_std::wgmma::{self, Operand};
use cuda_std::{Global, GlobalMut, bf16, kernel, launches, math, thread, warp};

use crate::embedding::Embed;
use crate::linear::{SLICE, STRIP, slot};
use crate::norm::{Norm, Residual};
use crate::qkv::{HEADS_PER_BLOCK, SplitHeads, split_head};
use crate::ring::{Ring, Shape};
use crate::step::Rows;
use crate::stream::{CHUNK_BYTES, CHUNK_FEATURES, Pass, STRIPS};

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

/// The barrier that says that the factors are there.
#[inline(always)]
unsafe fn factors_ready<const ROWS: u32>() -> Barrier {
    unsafe { Barrier::at(shared::dynamic(Wide::ring(ROWS).shared_bytes())) }
}

/// Slices of a residue.
#[inline(always)]
fn depth(p: &Wide, residue: u32) -> u32 {
    (p.k / SLICE + RESIDUES - 1 - residue) / RESIDUES
}

/// The warp that loads weights: a lane a strip.
#[inline(always)]
unsafe fn produce_weights<const ROWS: u32>(p: &Wide) {
    unsafe {
        let lane = thread::lane_id();
        let (pass_strips, chunks) = (STRIPS * p.blocks, p.k.div_ceil(CHUNK_FEATURES));
        let mut ring = Ring::producer(Wide::ring(ROWS));
        let mut number = thread::block_idx_x();
        while let Some(unit) = p.unit(number, ROWS) {
            number += thread::fresh(thread::grid_dim_x());
            // Of a last, partial tile the last strip again, which nobody reads.
            let strip = (unit.strip + lane % TILE_STRIPS).min(p.strips - 1);
            core::hint::assert_unchecked(p.blocks > 0 && pass_strips > 0);
            let number = strip / pass_strips;
            let within = strip - number * pass_strips;
            core::hint::assert_unchecked(p.blocks > 0);
            let i = within / p.blocks;
            let place = within - i * p.blocks;
            let base = p.base + u64::from(number) * u64::from(pass_strips * chunks);
            let strips = (p.strips - number * pass_strips).min(pass_strips);
            let pass = Pass { base, rotation: 0, strips, depth: chunks };
            let mut residue = unit.residue;
            while residue < unit.end {
                let mut turn = 0;
                while turn < depth(p, residue) {
                    ring.wait_empty();
                    if lane == 0 {
                        ring.full().arrive_expect_tx(WEIGHT_BYTES);
                    }
                    warp::sync_warp();
                    if lane < TILE_STRIPS {
                        let chunk = pass.chunk(turn, i, place, p.blocks);
                        let from = chunk * u64::from(CHUNK_BYTES) + u64::from(residue * SLICE_BYTES);
                        let to = ring.slot().at((lane * SLICE_BYTES) as usize);
                        bulk::copy_to_shared(to, p.stream.cast().at(from as usize), SLICE_BYTES, ring.full());
                    }
                    ring = ring.ahead(1);
                    turn += 1;
                }
                residue += 1;
            }
        }
    }
}

/// The lane that loads activations.
#[inline(always)]
unsafe fn produce_rows<const ROWS: u32>(p: &Wide) {
    unsafe {
        tensor::acquire(p.x);
        let mut ring = Ring::producer(Wide::ring(ROWS));
        let mut number = thread::block_idx_x();
        while let Some(unit) = p.unit(number, ROWS) {
            number += thread::fresh(thread::grid_dim_x());
            let mut residue = unit.residue;
            while residue < unit.end {
                let mut turn = 0;
                while turn < depth(p, residue) {
                    ring.wait_empty();
                    ring.full().arrive_expect_tx(ROWS * SLICE * 2);
                    let to = ring.slot().at(WEIGHT_BYTES as usize);
                    tensor::load(to, p.x, [(turn * RESIDUES + residue) * SLICE, unit.row], ring.full());
                    ring = ring.ahead(1);
                    turn += 1;
                }
                residue += 1;
            }
        }
    }
}

/// Two warps find the factors of all rows, four at a time.
#[inline(always)]
unsafe fn find_factors<const ROWS: u32>(p: &Wide, which: u32) {
    unsafe {
        let count = p.rows.count.load(0).min(MAX_WIDE_ROWS);
        let factors = shared::dynamic::<f32>(Wide::factors(ROWS));
        let mut row = which * 4;
        while row < count {
            let mut found = p.norm.lane_squares([0, 1, 2, 3].map(|i| (row + i).min(count - 1)));
            unroll!(I < 4; {
                found[I] = p.norm.inverse_rms_of(found[I]);
            });
            unroll!(I < 4; {
                if thread::lane_id() == I as u32 {
                    factors.store(row as usize + I, found[I]);
                }
            });
            row += 8;
        }
        warp::sync_warp();
        factors_ready::<ROWS>().arrive_if(thread::lane_id() == 0);
    }
}

/// Polls of a wait before the step is given up: seconds, where a product takes microseconds.
const PATIENCE: u32 = 1 << 23;

/// What is done with sums.
const WRITE: u32 = 0;
const ADD: u32 = 1;
const SWIGLU: u32 = 2;

/// A warpgroup multiplies what comes, and finishes its half of each tile. Chains are in the upper accumulators, totals in the lower.
#[inline(always)]
unsafe fn consume<const ROWS: u32, const TILES: usize, const KIND: u32>(p: &Wide) {
    unsafe {
        let mut ring = Ring::consumer(Wide::ring(ROWS));
        let mut number = thread::block_idx_x();
        // Of a split tile the share that is still to be finished: others' chains arrive while the next unit is multiplied. (128 rows leave no
        // registers for that.)
        let mut unfinished: Option<Unit> = None;
        loop {
            let next = p.unit(number, ROWS);
            number += thread::fresh(thread::grid_dim_x());
            let mut split = None;
            if let Some(unit) = next {
                let partial = Partial::new::<TILES>(p, &unit);
                let mut chain = if unit.residue == 0 { 0 } else { unit.residue - p.share.residues() + 1 };
                zero_totals::<TILES>();
                let mut residue = unit.residue;
                while residue < unit.end {
                    multiply_chain::<TILES>(&mut ring, depth(p, residue));
                    if unit.residue == 0 {
                        unroll!(J < TILES of 16; {
                            wgmma::set::<{ 4 * J }>(wgmma::get::<{ 4 * J }>() + wgmma::get::<{ 64 + 4 * J }>());
                            wgmma::set::<{ 4 * J + 1 }>(wgmma::get::<{ 4 * J + 1 }>() + wgmma::get::<{ 65 + 4 * J }>());
                            wgmma::set::<{ 4 * J + 2 }>(wgmma::get::<{ 4 * J + 2 }>() + wgmma::get::<{ 66 + 4 * J }>());
                            wgmma::set::<{ 4 * J + 3 }>(wgmma::get::<{ 4 * J + 3 }>() + wgmma::get::<{ 67 + 4 * J }>());
                        });
                    } else {
                        unroll!(J < TILES of 16; {
                            partial.store(p, chain, J as u32, [
                                wgmma::get::<{ 64 + 4 * J }>(),
                                wgmma::get::<{ 65 + 4 * J }>(),
                                wgmma::get::<{ 66 + 4 * J }>(),
                                wgmma::get::<{ 67 + 4 * J }>(),
                            ]);
                        });
                        chain += 1;
                    }
                    residue += 1;
                }
                if unit.end - unit.residue == RESIDUES {
                    finish_whole::<ROWS, TILES, KIND>(p, &Outputs::new::<KIND>(p, &unit, ROWS));
                } else {
                    if unit.residue == 0 {
                        unroll!(J < TILES of 16; {
                            partial.store(p, 0, J as u32, [
                                wgmma::get::<{ 4 * J }>(),
                                wgmma::get::<{ 4 * J + 1 }>(),
                                wgmma::get::<{ 4 * J + 2 }>(),
                                wgmma::get::<{ 4 * J + 3 }>(),
                            ]);
                        });
                    }
                    partial.arrive(p);
                    if ROWS == 64 {
                        split = Some(unit);
                    } else {
                        finish_share::<ROWS, TILES, KIND>(p, &unit);
                    }
                }
            }
            if ROWS == 64
                && let Some(before) = unfinished
            {
                finish_share::<ROWS, TILES, KIND>(p, &before);
            }
            unfinished = split;
            if next.is_none() {
                return;
            }
        }
    }
}

#[inline(always)]
fn zero_totals<const TILES: usize>() {
    unroll!(J < TILES of 16; {
        wgmma::set::<{ 4 * J }>(0.0);
        wgmma::set::<{ 4 * J + 1 }>(0.0);
        wgmma::set::<{ 4 * J + 2 }>(0.0);
        wgmma::set::<{ 4 * J + 3 }>(0.0);
    });
}

/// Where a warpgroup's chains of a split tile lie in memory: `[chain][rows / 8][lane of the warpgroup]`, four sums each.
struct Partial {
    /// The first, in elements.
    first: u32,
    /// Elements of a chain, over both warpgroups.
    stride: u32,
    /// Number of the warpgroup's half among all split tiles' halves.
    half: u32,
}

impl Partial {
    #[inline(always)]
    fn new<const TILES: usize>(p: &Wide, unit: &Unit) -> Self {
        // Found again wherever it is wanted: over the products it would take registers.
        let thread = thread::fresh(thread::thread_idx_x());
        let (group, thread) = (thread / GROUP, thread % GROUP);
        let words = TILES as u32 * GROUP * 4;
        Self {
            first: (unit.split * p.share.chains() * 2 + group) * words + thread * 4,
            stride: 2 * words,
            half: 2 * unit.split + group,
        }
    }

    #[inline(always)]
    unsafe fn place(&self, p: &Wide, chain: u32, j: u32) -> GlobalMut<f32> {
        unsafe { p.partials.at((self.first + chain * self.stride + j * GROUP * 4) as usize) }
    }

    #[inline(always)]
    unsafe fn store(&self, p: &Wide, chain: u32, j: u32, sums: [f32; 4]) {
        unsafe { self.place(p, chain, j).store16(0, sums.map(f32::to_bits)) }
    }

    /// The warpgroup's chains are there.
    #[inline(always)]
    unsafe fn arrive(&self, p: &Wide) {
        unsafe {
            thread::sync_named(1 + self.half % 2, GROUP);
            if thread::fresh(thread::thread_idx_x()).is_multiple_of(GROUP) {
                thread::fence_device();
                atomic::fetch_add(p.arrivals, self.half as usize, 1, Ordering::Release, Scope::Device);
            }
        }
    }

    /// Waits until all parts' chains are there. The last to know sets the counters back.
    #[inline(always)]
    unsafe fn wait(&self, p: &Wide, parts: u32) {
        unsafe {
            if thread::fresh(thread::thread_idx_x()).is_multiple_of(GROUP) {
                let mut polls = 0;
                while atomic::load(p.arrivals, self.half as usize, Ordering::Acquire, Scope::Device) < parts {
                    polls += 1;
                    if polls == PATIENCE {
                        thread::trap();
                    }
                }
                let known = (2 * thread::fresh(thread::grid_dim_x()) + self.half) as usize;
                if atomic::fetch_add(p.arrivals, known, 1, Ordering::AcqRel, Scope::Device) + 1 == parts {
                    atomic::store(p.arrivals, known, 0, Ordering::Relaxed, Scope::Device);
                    atomic::store(p.arrivals, self.half as usize, 0, Ordering::Relaxed, Scope::Device);
                }
                thread::fence_device();
            }
            thread::sync_named(1 + self.half % 2, GROUP);
        }
    }
}

/// One residue's chain, into the upper accumulators: `depth` slots of the ring.
#[inline(always)]
unsafe fn multiply_chain<const TILES: usize>(ring: &mut Ring, depth: u32) {
    unsafe {
        let (lane, warp_id) = (thread::fresh(thread::lane_id()), thread::fresh(thread::warp_id()));
        if depth == 0 {
            // A matrix with fewer slices than residues.
            unroll!(J < TILES of 16; {
                wgmma::set::<{ 64 + 4 * J }>(0.0);
                wgmma::set::<{ 65 + 4 * J }>(0.0);
                wgmma::set::<{ 66 + 4 * J }>(0.0);
                wgmma::set::<{ 67 + 4 * J }>(0.0);
            });
            return;
        }
        // The first slot apart: that it does not add to what was in the accumulators is a constant then, and the assembler knows that what comes
        // between chains has their registers.
        multiply_slot::<TILES>(ring, false, lane, warp_id);
        let mut turn = 1;
        while turn < depth {
            multiply_slot::<TILES>(ring, true, lane, warp_id);
            turn += 1;
        }
    }
}

/// The ring's slot.
#[inline(always)]
unsafe fn multiply_slot<const TILES: usize>(ring: &mut Ring, keep: bool, lane: u32, warp_id: u32) {
    unsafe {
        ring.wait_full();
        // The assembler runs products one after another if fragments are loaded while others are under way; the other warpgroup
        // keeps the tensor cores busy.
        let weights = ring.slot().at((warp_id * SLICE_BYTES + lane * 16) as usize);
        wgmma::load_fragments::<0, u8>(weights);
        wgmma::load_fragments::<1, u8>(weights.at(512));
        wgmma::load_fragments::<2, u8>(weights.at(1024));
        wgmma::load_fragments::<3, u8>(weights.at(1536));
        let x = Operand::at(ring.slot().at(WEIGHT_BYTES as usize));
        wgmma::fence();
        product::<TILES, 0>(x, keep);
        product::<TILES, 1>(x.advance(32), true);
        product::<TILES, 2>(x.advance(64), true);
        product::<TILES, 3>(x.advance(96), true);
        wgmma::commit();
        wgmma::wait::<0>();
        // What was read by ordinary loads is fenced before the slot is given back: the copy engine writes there next.
        bulk::fence_proxy_async();
        warp::sync_warp();
        ring.empty().arrive_if(lane == 0);
        *ring = ring.ahead(1);
    }
}

#[inline(always)]
unsafe fn product<const TILES: usize, const STEP: usize>(x: Operand, keep: bool) {
    unsafe {
        if TILES == 8 {
            wgmma::mma_n64_upper::<STEP>(x, keep);
        } else {
            wgmma::mma_n128_upper::<STEP>(x, keep);
        }
    }
}

/// What a lane has of a tile's outputs: features `g` and `g + 8` of its warp's strip (of a gate-up strip: a gate and its up), for rows `8 j + 2 t` and one
/// on of every eight.
struct Outputs {
    strip: u32,
    /// The tile's first row, and how many there are.
    row: u32,
    rows: u32,
    g: u32,
    t: u32,
    features: [u32; 2],
    /// Of the norm that comes next.
    weight: [f32; 2],
}

impl Outputs {
    #[inline(always)]
    unsafe fn new<const KIND: u32>(p: &Wide, unit: &Unit, rows: u32) -> Self {
        unsafe {
            // Loaded again: over the products it would take a register.
            let count = p.rows.count.load(0).min(MAX_WIDE_ROWS);
            let lane = thread::fresh(thread::lane_id());
            let (g, t) = (lane / 4, lane % 4);
            let strip = unit.strip + thread::fresh(thread::warp_id());
            let features = [strip * STRIP + g, strip * STRIP + g + 8];
            let weight = if KIND == ADD && strip < p.strips {
                features.map(|f| math::from_bf16(p.next_norm.load_nc(f as usize)))
            } else {
                [0.0; 2]
            };
            Self { strip, row: unit.row, rows: count.saturating_sub(unit.row).min(rows), g, t, features, weight }
        }
    }

    /// What the lane's outputs of rows `8 j …` are added to.
    #[inline(always)]
    unsafe fn old<const KIND: u32>(&self, p: &Wide, j: u32) -> [f32; 4] {
        let mut old = [0f32; 4];
        if KIND == ADD {
            unroll!(I < 4; {
                let at = 8 * j + 2 * self.t + I as u32 % 2;
                if at < self.rows {
                    let at = (self.row + at) as usize * p.n as usize + self.features[I / 2] as usize;
                    old[I] = unsafe { p.residual.x.load(at) };
                }
            });
        }
        old
    }

    /// Puts the lane's sums of rows `8 j …` where they belong. A warp does it together.
    #[inline(always)]
    unsafe fn put<const ROWS: u32, const KIND: u32>(&self, p: &Wide, j: u32, sums: [f32; 4], old: [f32; 4]) {
        unsafe {
            let n = p.n as usize;
            unroll!(R < 2; {
                let at = 8 * j + 2 * self.t + R as u32;
                let valid = at < self.rows;
                let at = (self.row + at) as usize;
                let factor = if !p.norm.squares.is_null() && valid {
                    shared::dynamic::<f32>(Wide::factors(ROWS)).load(at)
                } else {
                    1.0
                };
                match KIND {
                    WRITE => {
                        unroll!(F < 2; {
                            if valid && self.features[F] < p.n {
                                p.y.store(at * n + self.features[F] as usize, sums[2 * F + R] * factor);
                            }
                        });
                    }
                    SWIGLU => {
                        let feature = self.strip * (STRIP / 2) + self.g;
                        if valid && feature < p.n {
                            let (gate, up) = (sums[R] * factor, sums[2 + R] * factor);
                            let silu = gate / (1.0 + math::exp(-gate));
                            p.activation.store(at * n + slot(feature) as usize, math::to_bf16(silu * up));
                        }
                    }
                    _ => {
                        let x = [old[R] + sums[R], old[2 + R] + sums[2 + R]];
                        // As `Residual::put` adds a strip's squares: eight apart first, then the lanes of a group of eight.
                        let mut squares = x[0] * x[0] + x[1] * x[1];
                        let mut mask = 16;
                        while mask > 2 {
                            squares += warp::shuffle_xor(squares, mask);
                            mask /= 2;
                        }
                        if valid {
                            unroll!(F < 2; {
                                p.residual.x.store(at * n + self.features[F] as usize, x[F]);
                                let to = at * n + slot(self.features[F]) as usize;
                                p.residual.scaled.store(to, math::to_bf16(x[F] * self.weight[F]));
                            });
                            if self.g == 0 {
                                p.residual.squares.store(at * (n / STRIP as usize) + self.strip as usize, squares);
                            }
                        }
                    }
                }
            });
        }
    }
}

/// Waits for the rows' factors, where there are any.
#[inline(always)]
unsafe fn wait_for_factors<const ROWS: u32>(p: &Wide) {
    if !p.norm.squares.is_null() {
        unsafe { factors_ready::<ROWS>().wait(0) };
    }
}

/// Puts the totals of a whole tile where they belong, four groups of rows at a time.
#[inline(always)]
unsafe fn finish_whole<const ROWS: u32, const TILES: usize, const KIND: u32>(p: &Wide, outputs: &Outputs) {
    unsafe {
        wait_for_factors::<ROWS>(p);
        if outputs.strip >= p.strips {
            return;
        }
        unroll!(H < 4; {
            if 4 * H < TILES {
                let mut old = [[0f32; 4]; 4];
                unroll!(J < 4; {
                    old[J] = outputs.old::<KIND>(p, (4 * H + J) as u32);
                });
                unroll!(J < 4; {
                    let sums = [
                        wgmma::get::<{ 16 * H + 4 * J }>(),
                        wgmma::get::<{ 16 * H + 4 * J + 1 }>(),
                        wgmma::get::<{ 16 * H + 4 * J + 2 }>(),
                        wgmma::get::<{ 16 * H + 4 * J + 3 }>(),
                    ];
                    outputs.put::<ROWS, KIND>(p, (4 * H + J) as u32, sums, old[J]);
                });
            }
        });
    }
}

/// Adds the chains of this part's share of a split tile's rows, first to last, and puts the sums where they belong; two groups of rows at a time,
/// one where accumulators leave no more registers.
#[inline(always)]
unsafe fn finish_share<const ROWS: u32, const TILES: usize, const KIND: u32>(p: &Wide, unit: &Unit) {
    unsafe {
        let share = p.share;
        let outputs = Outputs::new::<KIND>(p, unit, ROWS);
        let partial = Partial::new::<TILES>(p, unit);
        let rows = TILES as u32 >> share.shift;
        let mut j = (unit.residue << share.shift) / RESIDUES * rows;
        let end = j + rows;
        wait_for_factors::<ROWS>(p);
        partial.wait(p, share.parts());
        if outputs.strip >= p.strips {
            return;
        }
        while j < end {
            let mut words = [[[0u32; 4]; RESIDUES as usize]; 2];
            let mut old = [[0f32; 4]; 2];
            unroll!(I < 2; {
                if I < 16 / TILES && j + (I as u32) < end {
                    unroll!(C < 8; {
                        if (C as u32) < p.share.chains() {
                            words[I][C] = partial.place(p, C as u32, j + I as u32).load16(0);
                        }
                    });
                    old[I] = outputs.old::<KIND>(p, j + I as u32);
                }
            });
            unroll!(I < 2; {
                if I < 16 / TILES && j + (I as u32) < end {
                    let mut sums = [0f32; 4];
                    unroll!(C < 8; {
                        if (C as u32) < p.share.chains() {
                            unroll!(E < 4; {
                                sums[E] += f32::from_bits(words[I][C][E]);
                            });
                        }
                    });
                    outputs.put::<ROWS, KIND>(p, j + I as u32, sums, old[I]);
                }
            });
            j += 16 / TILES as u32;
        }
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
