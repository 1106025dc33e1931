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
//! # When tiles do not fill the card
//! Whole rounds of tiles, one a block, run as above. What is left is split by residues into [`Share::groups`] parts a tile, so that every block has work: parts
//! leave their chains in memory (L2, in truth), and the part that comes last adds all of them, in order.

mod attention;

pub use attention::{ATTEND_THREADS, WideAttend, wide_attend};

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::bulk::{self, Barrier};
use cuda_std::shared;
use cuda_std::tensor::{self, TensorMap};
use cuda_std::wgmma::{self, Operand};
use cuda_std::{Global, GlobalMut, bf16, kernel, math, thread, warp};

use crate::embedding::Embed;
use crate::linear::{SLICE, STRIP, slot};
use crate::norm::{Norm, Residual};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Tiles that a block does whole: full rounds.
    pub whole: u32,
    /// Parts of every other tile.
    pub groups: u32,
}

impl Share {
    /// Of `tiles` over `grid` blocks: the split with the shortest last round, and of equal ones the coarsest.
    #[inline(always)]
    #[must_use]
    pub const fn new(tiles: u32, grid: u32) -> Self {
        // SAFETY: a grid has blocks.
        unsafe { core::hint::assert_unchecked(grid > 0) };
        let left = tiles % grid;
        let (mut groups, mut best, mut tried) = (1, u32::MAX, 1);
        while tried <= RESIDUES {
            let time = (left * tried).div_ceil(grid) * (RESIDUES / tried);
            if time < best {
                (groups, best) = (tried, time);
            }
            tried *= 2;
        }
        Self { whole: tiles - left, groups }
    }

    /// Chains that the parts of a tile leave in memory: the first part leaves one, its total.
    #[inline(always)]
    const fn chains(&self) -> u32 {
        // SAFETY: at least 1.
        unsafe { core::hint::assert_unchecked(self.groups > 0) };
        1 + RESIDUES - RESIDUES / self.groups
    }
}

/// Parameters of the products of this module. Grid: at most one block a multiprocessor. Shared memory: [`Wide::shared_bytes`].
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

    /// Behind the ring: a barrier that says that the rows' factors are there, the factors, and a word for each warpgroup.
    const fn factors(rows: u32) -> u32 {
        Self::ring(rows).shared_bytes() + 8
    }

    /// Dynamic shared memory of a block of the kernels for `rows` = 64 or 128 rows a tile.
    #[must_use]
    pub const fn shared_bytes(rows: u32) -> u32 {
        Self::factors(rows) + MAX_WIDE_ROWS * 4 + 8
    }

    /// Elements of [`partials`](Self::partials) for any matrix of up to `row_tiles` tiles of `rows` rows, on a grid of `grid` blocks.
    #[must_use]
    pub const fn partial_len(row_tiles: u32, rows: u32, grid: u32) -> usize {
        // Fewer tiles than blocks are split, and only where that shortens the round.
        let mut most = 0;
        let mut tiles = row_tiles;
        while tiles < grid {
            let share = Share::new(tiles, grid);
            if share.groups > 1 && tiles * share.chains() > most {
                most = tiles * share.chains();
            }
            tiles += 1;
        }
        (most * 2 * 64 * rows) as usize
    }

    /// Words of [`arrivals`](Self::arrivals) on a grid of `grid` blocks: two for each tile that may be split.
    #[must_use]
    pub const fn arrivals_len(grid: u32) -> usize {
        2 * grid as usize
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

/// The units of a block, in order.
struct Units {
    share: Share,
    tiles: u32,
    row_tiles: u32,
    rows: u32,
    next: u32,
    grid: u32,
}

impl Units {
    #[inline(always)]
    unsafe fn new(p: &Wide, rows: u32, count: u32) -> Self {
        let grid = thread::grid_dim_x();
        let row_tiles = count.div_ceil(rows);
        let tiles = p.strips.div_ceil(TILE_STRIPS) * row_tiles;
        Self { share: Share::new(tiles, grid), tiles, row_tiles, rows, next: thread::block_idx_x(), grid }
    }
}

impl Iterator for Units {
    type Item = Unit;

    #[inline(always)]
    fn next(&mut self) -> Option<Unit> {
        let Self { share, tiles, row_tiles, rows, next, grid } = *self;
        // SAFETY: `Share` makes no fewer, and a launch has rows.
        unsafe { core::hint::assert_unchecked(share.groups > 0 && row_tiles > 0) };
        let (tile, split, group, groups) = if next < share.whole {
            (next, 0, 0, 1)
        } else {
            let part = next - share.whole;
            (share.whole + part / share.groups, part / share.groups, part % share.groups, share.groups)
        };
        if tile >= tiles {
            return None;
        }
        self.next += grid;
        // SAFETY: one or `share.groups`.
        unsafe { core::hint::assert_unchecked(groups > 0) };
        let residues = RESIDUES / groups;
        let residue = group * residues;
        let (strip, row) = (tile / row_tiles * TILE_STRIPS, tile % row_tiles * rows);
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
unsafe fn produce_weights<const ROWS: u32>(p: &Wide, units: Units) {
    unsafe {
        let lane = thread::lane_id();
        let (pass_strips, chunks) = (STRIPS * p.blocks, p.k.div_ceil(CHUNK_FEATURES));
        core::hint::assert_unchecked(p.blocks > 0 && pass_strips > 0);
        let mut ring = Ring::producer(Wide::ring(ROWS));
        for unit in units {
            // Of a last, partial tile the last strip again, which nobody reads.
            let strip = (unit.strip + lane % TILE_STRIPS).min(p.strips - 1);
            let (number, within) = (strip / pass_strips, strip % pass_strips);
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
                        let chunk = pass.chunk(turn, within / p.blocks, within % p.blocks, p.blocks);
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
unsafe fn produce_rows<const ROWS: u32>(p: &Wide, units: Units) {
    unsafe {
        tensor::acquire(p.x);
        let mut ring = Ring::producer(Wide::ring(ROWS));
        for unit in units {
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
unsafe fn find_factors<const ROWS: u32>(p: &Wide, count: u32, which: u32) {
    unsafe {
        let factors = shared::dynamic::<f32>(Wide::factors(ROWS));
        let mut row = which * 4;
        while row < count {
            let found = p.norm.inverse_rms_of([0, 1, 2, 3].map(|i| (row + i).min(count - 1)));
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

/// What is done with sums.
const WRITE: u32 = 0;
const ADD: u32 = 1;
const SWIGLU: u32 = 2;

/// A warpgroup's half of a unit.
struct Half {
    /// The warp's strip.
    strip: u32,
    row: u32,
    rows: u32,
    /// Group and lane of four, as accumulators are dealt.
    g: u32,
    t: u32,
}

/// A warpgroup multiplies what comes, and finishes its half of each tile. Chains are in the upper accumulators, totals in the lower.
#[inline(always)]
unsafe fn consume<const ROWS: u32, const TILES: usize, const KIND: u32>(p: &Wide, units: Units, count: u32) {
    unsafe {
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let group = warp_id / 4;
        let share = units.share;
        let mut ring = Ring::consumer(Wide::ring(ROWS));
        for unit in units {
            let half = Half {
                strip: unit.strip + warp_id,
                row: unit.row,
                rows: (count - unit.row).min(ROWS),
                g: lane / 4,
                t: lane % 4,
            };
            let whole = unit.end - unit.residue == RESIDUES;
            let mut chain = if unit.residue == 0 { 0 } else { unit.residue - RESIDUES / share.groups + 1 };
            let partial = |chain: u32| {
                let tile = (unit.split * share.chains() + chain) * 2 + group;
                p.partials.at(((tile * (TILES as u32) * GROUP + thread::thread_idx_x() % GROUP) * 4) as usize)
            };
            unroll!(J < TILES of 16; {
                wgmma::set::<{ 4 * J }>(0.0);
                wgmma::set::<{ 4 * J + 1 }>(0.0);
                wgmma::set::<{ 4 * J + 2 }>(0.0);
                wgmma::set::<{ 4 * J + 3 }>(0.0);
            });
            let mut residue = unit.residue;
            while residue < unit.end {
                multiply_chain::<TILES>(&mut ring, depth(p, residue), lane, warp_id);
                if unit.residue == 0 {
                    unroll!(J < TILES of 16; {
                        wgmma::set::<{ 4 * J }>(wgmma::get::<{ 4 * J }>() + wgmma::get::<{ 64 + 4 * J }>());
                        wgmma::set::<{ 4 * J + 1 }>(wgmma::get::<{ 4 * J + 1 }>() + wgmma::get::<{ 65 + 4 * J }>());
                        wgmma::set::<{ 4 * J + 2 }>(wgmma::get::<{ 4 * J + 2 }>() + wgmma::get::<{ 66 + 4 * J }>());
                        wgmma::set::<{ 4 * J + 3 }>(wgmma::get::<{ 4 * J + 3 }>() + wgmma::get::<{ 67 + 4 * J }>());
                    });
                } else {
                    let to = partial(chain);
                    unroll!(J < TILES of 16; {
                        let words = [
                            wgmma::get::<{ 64 + 4 * J }>(),
                            wgmma::get::<{ 65 + 4 * J }>(),
                            wgmma::get::<{ 66 + 4 * J }>(),
                            wgmma::get::<{ 67 + 4 * J }>(),
                        ];
                        to.store16(J * 4 * GROUP as usize, words.map(f32::to_bits));
                    });
                    chain += 1;
                }
                residue += 1;
            }
            if !whole {
                if unit.residue == 0 {
                    let to = partial(0);
                    unroll!(J < TILES of 16; {
                        let words = [
                            wgmma::get::<{ 4 * J }>(),
                            wgmma::get::<{ 4 * J + 1 }>(),
                            wgmma::get::<{ 4 * J + 2 }>(),
                            wgmma::get::<{ 4 * J + 3 }>(),
                        ];
                        to.store16(J * 4 * GROUP as usize, words.map(f32::to_bits));
                    });
                }
                if !last_to_arrive::<ROWS>(p, 2 * unit.split + group, share.groups, group) {
                    continue;
                }
                unroll!(J < TILES of 16; {
                    wgmma::set::<{ 4 * J }>(0.0);
                    wgmma::set::<{ 4 * J + 1 }>(0.0);
                    wgmma::set::<{ 4 * J + 2 }>(0.0);
                    wgmma::set::<{ 4 * J + 3 }>(0.0);
                });
                let mut chain = 0;
                while chain < share.chains() {
                    add_partial::<TILES>(partial(chain).read());
                    chain += 1;
                }
            }
            finish::<ROWS, TILES, KIND>(p, &half);
        }
    }
}

/// One residue's chain, into the upper accumulators: `depth` slots of the ring.
#[inline(always)]
unsafe fn multiply_chain<const TILES: usize>(ring: &mut Ring, depth: u32, lane: u32, warp_id: u32) {
    unsafe {
        let mut turn = 0;
        while turn < depth {
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
            product::<TILES, 0>(x, turn > 0);
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
            turn += 1;
        }
        if depth == 0 {
            unroll!(J < TILES of 16; {
                wgmma::set::<{ 64 + 4 * J }>(0.0);
                wgmma::set::<{ 65 + 4 * J }>(0.0);
                wgmma::set::<{ 66 + 4 * J }>(0.0);
                wgmma::set::<{ 67 + 4 * J }>(0.0);
            });
        }
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

/// Whether this warpgroup's part of a split tile is the last of `parts`; then what the others wrote is seen.
#[inline(always)]
unsafe fn last_to_arrive<const ROWS: u32>(p: &Wide, tile: u32, parts: u32, group: u32) -> bool {
    unsafe {
        let told = shared::dynamic::<u32>(Wide::factors(ROWS) + MAX_WIDE_ROWS * 4 + group * 4);
        thread::sync_named(1 + group, GROUP);
        if thread::thread_idx_x().is_multiple_of(GROUP) {
            thread::fence_device();
            let before = atomic::fetch_add(p.arrivals, tile as usize, 1, Ordering::AcqRel, Scope::Device);
            if before + 1 == parts {
                p.arrivals.store(tile as usize, 0);
            }
            thread::fence_device();
            told.store(0, before + 1);
        }
        thread::sync_named(1 + group, GROUP);
        told.load(0) == parts
    }
}

/// Adds a chain from memory to the totals.
#[inline(always)]
unsafe fn add_partial<const TILES: usize>(from: Global<f32>) {
    unsafe {
        let mut words = [[0u32; 4]; TILES];
        unroll!(J < TILES of 16; {
            words[J] = from.load16(J * 4 * GROUP as usize);
        });
        unroll!(J < TILES of 16; {
            let v = words[J].map(f32::from_bits);
            wgmma::set::<{ 4 * J }>(wgmma::get::<{ 4 * J }>() + v[0]);
            wgmma::set::<{ 4 * J + 1 }>(wgmma::get::<{ 4 * J + 1 }>() + v[1]);
            wgmma::set::<{ 4 * J + 2 }>(wgmma::get::<{ 4 * J + 2 }>() + v[2]);
            wgmma::set::<{ 4 * J + 3 }>(wgmma::get::<{ 4 * J + 3 }>() + v[3]);
        });
    }
}

/// Puts the totals where they belong. A lane has features `g` and `g + 8` of its warp's strip (of a gate-up strip: a gate and its up), for rows
/// `8 j + 2 t` and one on.
#[inline(always)]
unsafe fn finish<const ROWS: u32, const TILES: usize, const KIND: u32>(p: &Wide, half: &Half) {
    unsafe {
        let &Half { strip, row, rows, g, t } = half;
        let factors = shared::dynamic::<f32>(Wide::factors(ROWS));
        let scaled = !p.norm.squares.is_null();
        if scaled {
            factors_ready::<ROWS>().wait(0);
        }
        if strip >= p.strips {
            return;
        }
        let n = p.n as usize;
        // Four groups of eight rows at a time: what they are added to is loaded together.
        let features = [strip * STRIP + g, strip * STRIP + g + 8];
        unroll!(H < 4; {
            let mut old = [[0f32; 4]; 4];
            if KIND == ADD {
                unroll!(J < 4; {
                    unroll!(I < 4; {
                        let at = 8 * (4 * H + J) as u32 + 2 * t + I as u32 % 2;
                        if 4 * H + J < TILES && at < rows {
                            old[J][I] = p.residual.x.load((row + at) as usize * n + features[I / 2] as usize);
                        }
                    });
                });
            }
            let weight = if KIND == ADD {
                features.map(|f| math::from_bf16(p.next_norm.load_nc(f as usize)))
            } else {
                [0.0; 2]
            };
            unroll!(J < 4; {
                if 4 * H + J < TILES {
                    let sums = [
                        wgmma::get::<{ 16 * H + 4 * J }>(),
                        wgmma::get::<{ 16 * H + 4 * J + 1 }>(),
                        wgmma::get::<{ 16 * H + 4 * J + 2 }>(),
                        wgmma::get::<{ 16 * H + 4 * J + 3 }>(),
                    ];
                    unroll!(R < 2; {
                        let at = 8 * (4 * H + J) as u32 + 2 * t + R as u32;
                        let valid = at < rows;
                        let at = row + at;
                        let factor = if scaled && valid { factors.load(at as usize) } else { 1.0 };
                        match KIND {
                            WRITE => {
                                unroll!(F < 2; {
                                    if valid && features[F] < p.n {
                                        p.y.store(at as usize * n + features[F] as usize, sums[2 * F + R] * factor);
                                    }
                                });
                            }
                            SWIGLU => {
                                let feature = strip * (STRIP / 2) + g;
                                if valid && feature < p.n {
                                    let (gate, up) = (sums[R] * factor, sums[2 + R] * factor);
                                    let silu = gate / (1.0 + math::exp(-gate));
                                    p.activation.store(at as usize * n + slot(feature) as usize, math::to_bf16(silu * up));
                                }
                            }
                            _ => {
                                let x = [old[J][R] + sums[R], old[J][2 + R] + sums[2 + R]];
                                // As `Residual::put` adds a strip's squares: eight apart first, then the lanes of a group of eight.
                                let mut squares = x[0] * x[0] + x[1] * x[1];
                                let mut mask = 16;
                                while mask > 2 {
                                    squares += warp::shuffle_xor(squares, mask);
                                    mask /= 2;
                                }
                                if valid {
                                    unroll!(F < 2; {
                                        p.residual.x.store(at as usize * n + features[F] as usize, x[F]);
                                        let to = at as usize * n + slot(features[F]) as usize;
                                        p.residual.scaled.store(to, math::to_bf16(x[F] * weight[F]));
                                    });
                                    if g == 0 {
                                        p.residual.squares.store(at as usize * (n / STRIP as usize) + strip as usize, squares);
                                    }
                                }
                            }
                        }
                    });
                }
            });
        });
    }
}

#[inline(always)]
unsafe fn wide<const ROWS: u32, const TILES: usize, const KIND: u32>(p: &Wide) {
    unsafe {
        wgmma::declare();
        let count = p.rows.count.load(0).min(MAX_WIDE_ROWS);
        if count == 0 {
            return;
        }
        let warp_id = thread::warp_id();
        if thread::thread_idx_x() == 0 {
            Ring::init(Wide::ring(ROWS), 2, 8);
            factors_ready::<ROWS>().init(2);
            bulk::fence_init();
        }
        thread::sync_threads();
        let units = Units::new(p, ROWS, count);
        if warp_id < 8 {
            wgmma::take_registers::<CONSUMER_REGISTERS>();
            consume::<ROWS, TILES, KIND>(p, units, count);
        } else {
            wgmma::give_registers::<PRODUCER_REGISTERS>();
            match warp_id {
                8 => produce_weights::<ROWS>(p, units),
                9 => {
                    if thread::lane_id() == 0 {
                        produce_rows::<ROWS>(p, units);
                    }
                }
                _ => {
                    if KIND != ADD && !p.norm.squares.is_null() {
                        find_factors::<ROWS>(p, count, warp_id - 10);
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
                p.residual.put_at(p.norm, row, i, slot(i), x, true);
                i += 256;
            }
        }
    }
}

// What a block of an H100 may have.
const _: () = assert!(Wide::shared_bytes(64) <= 232_448 && Wide::shared_bytes(128) <= 232_448);
