//! Linear layers for many rows: `y[row, n] = Σ_k x[row, k] · w[n, k]` on Hopper's `wgmma`, for prompts. bf16 in, f32
//! sums.
//!
//! # Shape of the work
//! The kernel is persistent and warp-specialised: a block of three warpgroups stays on its SM and takes tiles of
//! [`TILE_ROWS`] = 128 rows × `N` = 128, 192 or 256 features, one after another:
//!
//! ```text
//! warpgroup 2   one lane: x [128 × 64] by TMA, w [N × 64] by bulk copies ──► ring of stages; runs ahead, across tiles
//! warpgroup 0   rows 0..64   ┐ wgmma m64nNk16, four a stage, sums in N/2 registers a lane;
//! warpgroup 1   rows 64..128 ┘ then the epilogue
//! ```
//!
//! Tiles go down a band of [`Gemm::band`] tile rows before they go right, so that blocks which run at the same time
//! share rows and features in L2. In the `_2x1` kernels two neighbouring blocks take tiles one above the other, and
//! each loads half of the features' tile for both. In the `_4x2` kernels four blocks one above the other share
//! features, and two side by side share rows:
//!
//! ```text
//!                  features 0 .. 256      256 .. 512
//! rows   0 .. 128  block 0                block 4        rows: the two load them for both in turn
//! rows 128 .. 256  block 1                block 5
//! rows 256 .. 384  block 2                block 6
//! rows 384 .. 512  block 3                block 7        features: in each step two of the four load a half
//! ```
//!
//! Not every SM finds seven neighbours, so clusters of 2 × 1 do the rest beside them in a launch of their own
//! ([`Beside`]). What lies beyond `n` or `x` arrives as zeros.
//!
//! Heads have 128 features and are finished whole. So in the `_n192` kernels, whose blocks take one tile each, two
//! neighbours have three times 128 features between them, and the middle ones are multiplied with the upper 64 rows by
//! one and with the lower 64 by the other:
//!
//! ```text
//! features          0 .. 128   128 .. 256   256 .. 384
//! rows  0 ..  64   └─────── block 0 ──────┘ └─ block 1 ┘     (warpgroups 0)
//! rows 64 .. 128   └─ block 0 ┘ └─────── block 1 ──────┘     (warpgroups 1)
//! ```
//!
//! Norms are fused into the GEMMs as [`norm`](crate::norm) says. A warpgroup adds up the squares of its tile's rows
//! while its first MMAs run. So that these are few, `add` leaves one sum for [`SPAN`] features.
//!
//! # Epilogues
//! | kernels | of the sums, times the row's factor |
//! |---|---|
//! | `gemm_qkv_*` | queries, keys and values: normalised, rotated, put where attention reads ([`qkv`](crate::qkv)) |
//! | `gemm_write_*` | written in f32 |
//! | `gemm_swiglu_*` | with half of the tile's features gates and half their ups: `silu(gate) · up`, bf16 |
//! | `gemm_add_*` | added to the residual stream, with what the norm that comes next wants |
//!
//! What an epilogue reads from memory first, its lanes load into registers while MMAs run.
//!
//! The `_e4m3` kernels make them of [e4m3](crate::e4m3), with scales for every 128 inputs, in tiles of 128 weight rows.
//!
//! The kernels may be launched early ([`dependent_launch`]): before they wait for the launches ahead they fetch the
//! first stages' weights.
//!
//! # Order
//! An output is the sum that [`linear`](crate::linear) makes, bit for bit: slices of 64 input features form
//! [`K_PARTIALS`] split-K partials in the tensor core's accumulator, which are added from first to last. Here a tile is
//! multiplied one split-K partial after another, and the sum of those that are done are the tile's *totals*: of tiles
//! of 128 weight rows in registers beside the accumulators, of wider ones three quarters in registers and a quarter in
//! shared memory, where the epilogue's boxes are when there are no totals. The weights lie as the [decode
//! kernel](crate::decode) has them, activations in the order of [`slot`](crate::linear::slot): so an instruction
//! multiplies the same 16 inputs everywhere.
//!
//! # Ladder
//! 1. `linear`: 64 rows a launch, every N-tile reads the activations again. A third of the bandwidth, a twentieth of
//!    the tensor cores.
//! 2. This.
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses, maps and grid are as it says. The whole block begins in
//! `gemm_of`, which makes the ring's barriers before anyone waits for one. `produce` is one lane's of warpgroup 2. What
//! multiplies is called by whole warpgroups 0 and 1, each with the tiles that `produce` takes, in the same order. A
//! warpgroup's accumulators, and its part of shared memory behind the ring, are its own; MMAs that write the
//! accumulators have been waited for when these are read. Each warpgroup frees every stage once, when it is done with
//! it.

use core::marker::PhantomData;

use cuda_std::bulk;
use cuda_std::cluster::{self, PeerBarrier};
use cuda_std::shared::{self, Shared};
use cuda_std::tensor::{self, TensorMap};
use cuda_std::wgmma::{self, Cores, Operand};
use cuda_std::{Global, GlobalMut, bf16, dependent_launch, kernel, thread, warp};

use crate::e4m3::CodedRows;
use crate::linear::{K_PARTIALS, N_TILE};
use crate::norm::{Norm, Residual};
use crate::qkv::SplitHeads;
use crate::ring::{Ring, Shape};
use crate::stream::{SLICES_APART, STEP_BYTES, Slices, TOGETHER};

/// Rows of a tile. Whatever a kernel writes has room for whole tiles of rows; those beyond `m` are not specified.
pub const TILE_ROWS: u32 = 128;
/// Input features of a stage of the ring; the input size is a multiple of it.
pub const DEPTH: u32 = tensor::ROW;
/// Features of an output tile that are finished at a time; the output size is a multiple of it, and of 128 for `qkv`
/// and `add`.
pub const BOX: u32 = tensor::ROW;
/// Features whose squares are added up for the norm that comes next, beside those of N-tiles: see [`Residual::spans`].
pub const SPAN: u32 = crate::norm::SPAN;
/// Weight rows that are loaded together.
pub const WEIGHT_ROWS: u32 = TOGETHER * N_TILE;
/// Threads of a block.
pub const THREADS: u32 = 384;

/// Weight rows that a tile of `n` loads.
const fn loaded(n: u32) -> u32 {
    if n == 128 { 128 } else { 256 }
}

mod beside;
mod e4m3;
pub mod epilogue;

pub use crate::e4m3::GROUP as SCALED_INPUTS;
pub use beside::Beside;
pub use e4m3::{E4m3, GemmE4m3, gemm_add_e4m3, gemm_add_shared_e4m3, gemm_e4m3, gemm_qkv_e4m3};
pub use e4m3::{gemm_swiglu_coded_e4m3, gemm_swiglu_e4m3, gemm_write_e4m3, gemm_write_shared_e4m3};

use epilogue::{Add, Epilogue, Half, Next, Qkv, SwiGlu, Write, elected, features};

/// Threads of a warpgroup.
pub const GROUP: u32 = 128;
/// Rows of a warpgroup.
const GROUP_ROWS: u32 = 64;
const X_BYTES: u32 = TILE_ROWS * DEPTH * 2;
const BOX_BYTES: u32 = GROUP_ROWS * BOX * 2;
/// TMA's, of swizzled tiles.
const BOX_ALIGNMENT: u32 = 1024;
/// Of a quarter of a tile of 256 weight rows: 32 for each lane that multiplies.
const TOTALS_BYTES: u32 = 2 * GROUP * 32 * 4;
const _: () = assert!(SLICES_APART == WEIGHT_ROWS * DEPTH * 2);

/// Parameters of the GEMMs of this module. Grid: at most one block an SM, for `_2x1` and `_4x2` kernels whole clusters;
/// for `_n192` kernels two for every 384 features of every tile of rows. Shared memory: [`Gemm::shared_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Gemm {
    /// `x`, bf16 `[rows, k]`, each row in the order of [`slot`](crate::linear::slot), in tiles of [`TILE_ROWS`] rows.
    pub x: Global<TensorMap>,
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them.
    pub stream: Global<bf16>,
    /// The matrix's first [`Wave::base`](crate::stream::Wave::base).
    pub base: u64,
    /// Blocks that the weights were laid out for.
    pub blocks: u32,
    /// N-tiles of the whole matrix.
    pub n_tiles: u32,
    /// The activations, bf16 `[rows, n]` in tiles of 64 rows: `swiglu`, in the order of [`slot`](crate::linear::slot),
    /// and `plain`.
    pub out: Global<TensorMap>,
    /// `write` alone: `[rows, n]`, whole tiles of rows.
    pub y: GlobalMut<f32>,
    /// What each row has yet to be divided by, if anything: `qkv`, `write` and `swiglu`. Its squares are sums over
    /// [`SPAN`] elements, as [`Residual::spans`] has them.
    pub norm: Norm,
    /// `[n]`: what is added to each row when it was multiplied by its factor, `qkv` and `write` alone, and not with
    /// `_n192` kernels; null for nothing.
    pub bias: Global<bf16>,
    /// What heads are made with and where they go, `qkv` alone; its `qkv` is not used.
    pub heads: SplitHeads,
    /// What `add` adds to, `n` features wide.
    pub residual: Residual,
    /// `[n]` the weight of the norm that comes next: `add` alone.
    pub next_norm: Global<bf16>,
    /// Where `add` of e4m3 puts the norm's input as codes, and `swiglu_coded` its activation, `n` of a row; with `add`
    /// null where it is wanted in bf16.
    pub codes: CodedRows,
    /// Rows from here on are computed: a multiple of [`TILE_ROWS`].
    pub first_row: u32,
    /// Up to here.
    pub m: u32,
    /// Output features from here on are computed: a multiple of 128.
    pub first_feature: u32,
    /// Up to here.
    pub n: u32,
    /// Input features; of e4m3 two count as one.
    pub k: u32,
    /// Rows of clusters' tiles in a band, at least one.
    pub band: u32,
    /// The other launch of the same GEMM, if there is one.
    pub beside: Beside,
}

impl Gemm {
    /// The ring for tiles of `n` weight rows.
    const fn ring(n: u32) -> Shape {
        Shape::new(0, if n == 128 { 6 } else { 4 }, X_BYTES + loaded(n) * DEPTH * 2)
    }

    /// Where the boxes begin, with tiles of `n` weight rows.
    const fn boxes(n: u32) -> u32 {
        Self::ring(n).end().next_multiple_of(BOX_ALIGNMENT)
    }

    /// Dynamic shared memory of a block with tiles of `n` weight rows: the ring, two boxes of output for each
    /// warpgroup, or totals.
    pub const fn shared_bytes(n: u32) -> u32 {
        Self::boxes(n) + if n == 128 { 4 * BOX_BYTES } else { TOTALS_BYTES }
    }

    /// Slices of the sum.
    #[inline(always)]
    fn slices(&self) -> u32 {
        self.k / DEPTH
    }

    /// K-slices of a split-K partial.
    #[inline(always)]
    fn k_partial(&self, k_partial: u32) -> u32 {
        (self.slices() + K_PARTIALS - 1 - k_partial) / K_PARTIALS
    }
}

// What a block of an H100 may have; and a box is one half's totals at most.
const _: () = assert!(Gemm::shared_bytes(256) <= 232_448 && Gemm::shared_bytes(128) <= 232_448);
const _: () = assert!(4 * BOX_BYTES <= TOTALS_BYTES);

/// All tiles: which a block takes, and where they are. `gemm_of` makes them, and has the launcher's word for a band of
/// at least one row of tiles.
#[derive(Clone, Copy)]
struct Tiles {
    band: u32,
    /// Blocks that take tiles together: one above the other, and side by side.
    together: [u32; 2],
    /// Tiles taken so far.
    taken: u32,
    /// The first row and feature of all, and the last.
    first: [u32; 2],
    end: [u32; 2],
    /// Rows and features from the tile of one of them to the next one's.
    apart: [u32; 2],
    /// Rows and features from a tile to the next.
    size: [u32; 2],
}

impl Iterator for Tiles {
    /// The first row and feature.
    type Item = (u32, u32);

    #[inline(always)]
    fn next(&mut self) -> Option<(u32, u32)> {
        let block = thread::opaque(thread::block_idx_x());
        let together = self.together[0] * self.together[1];
        let turn = (block + self.taken * thread::opaque(thread::grid_dim_x())) / together;
        // Found again each time: kept throughout they would take registers of epilogues.
        let [rows, columns] = [0, 1].map(|i| (thread::opaque(self.end[i]) - self.first[i]).div_ceil(self.size[i]));
        if turn >= rows * columns {
            return None;
        }
        self.taken += 1;
        let in_band = self.band * columns;
        // SAFETY: a turn is below their product, so neither rows nor columns are zero; a band is not, see `Tiles`.
        unsafe { cuda_std::assume(in_band != 0) };
        let first = turn / in_band * self.band;
        let height = self.band.min(rows - first);
        // SAFETY: `first` is the first row of a band that has this tile, and so below `rows`; a band is not empty.
        unsafe { cuda_std::assume(height != 0) };
        let within = turn % in_band;
        let (row, column) = (first + within % height, within / height);
        let place = [block % self.together[0], block % together / self.together[0]];
        let at = |i: usize, tile: u32| self.first[i] + place[i] * self.apart[i] + tile * self.size[i];
        Some((at(0, row), at(1, column)))
    }
}

/// Tiles in the order of a block's work: of those that it takes side by side one after another.
struct InOrder<E> {
    tiles: Tiles,
    /// What comes next of those.
    second: Option<(u32, u32)>,
    epilogue: PhantomData<E>,
}

impl<E: Epilogue> InOrder<E> {
    #[inline(always)]
    const fn new(tiles: Tiles) -> Self {
        Self { tiles, second: None, epilogue: PhantomData }
    }
}

impl<E: Epilogue> Iterator for InOrder<E> {
    type Item = (u32, u32);

    #[inline(always)]
    fn next(&mut self) -> Option<(u32, u32)> {
        if !E::IN_PAIRS {
            return self.tiles.next();
        }
        if let Some(second) = self.second.take() {
            return Some(second);
        }
        let (row, column) = self.tiles.next()?;
        self.second = Some((row, column + self.tiles.size[1] / 2));
        Some((row, column))
    }
}

/// Waits until what the launches ahead left can be read. Blocks alone have nobody beside them.
///
/// # Safety
/// Where blocks are in clusters, [`Gemm::beside`] is as [`Beside::wait`] asks.
#[inline(always)]
unsafe fn wait<const DOWN: u32, const ACROSS: u32>(p: &Gemm) {
    if DOWN * ACROSS > 1 {
        // SAFETY: the caller's word.
        unsafe { p.beside.wait() };
    } else {
        dependent_launch::wait();
    }
}

/// The slice that is multiplied after this one: of split-K partials the next of its own, or the first of the next.
#[inline(always)]
const fn slice_after<I: Inputs>(slice: u32, slices: u32) -> u32 {
    match slice + K_PARTIALS < slices {
        _ if !I::SPLIT => slice + 1,
        true => slice + K_PARTIALS,
        false => slice % K_PARTIALS + 1,
    }
}

/// What is multiplied.
trait Inputs: Copy {
    /// Bytes of a stage behind its rows and weights, of which so many are copied there.
    const TAIL_BYTES: u32;
    const COPIED: u32;
    /// Stages of a ring of `n` weight rows.
    fn ring(n: u32) -> Shape;
    /// Starts the copies to a stage's tail, for the tile at a row and an N-tile.
    ///
    /// # Safety
    /// The lane is the one that fills this stage, which is free, and whose full barrier expects
    /// [`COPIED`](Self::COPIED) bytes beside the others. The row and the slice are of a tile of the launch, the N-tile
    /// one of the matrix.
    unsafe fn load_tail(self, ring: &Ring, at: [u32; 2], slice: u32);
    /// Whether a tile's slices come split-K partial by partial, not one after another.
    const SPLIT: bool;
    /// Blocks that take the same tile, each for some of its rows.
    const SHARERS: u32;
    /// A warpgroup multiplies what comes, and finishes its part of each tile.
    ///
    /// # Safety
    /// Warpgroups 0 and 1 of the block call it, once, with registers for the accumulators. `tiles` are those that the
    /// block's producer takes.
    unsafe fn consume<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm, tiles: Tiles);
}

/// bf16, with nothing beside it.
#[derive(Clone, Copy)]
struct Bf16;

impl Inputs for Bf16 {
    const TAIL_BYTES: u32 = 0;
    const COPIED: u32 = 0;
    const SPLIT: bool = true;
    const SHARERS: u32 = 1;

    #[inline(always)]
    fn ring(n: u32) -> Shape {
        Gemm::ring(n)
    }

    #[inline(always)]
    unsafe fn load_tail(self, _: &Ring, _: [u32; 2], _: u32) {}

    #[inline(always)]
    unsafe fn consume<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm, tiles: Tiles) {
        // SAFETY: the caller's word.
        unsafe {
            if N != 192 {
                consume::<E, N, N, DOWN, ACROSS>(p, tiles);
            } else if thread::warp_id() / 4 == thread::block_idx_x() % 2 {
                consume::<E, N, 256, DOWN, ACROSS>(p, tiles);
            } else {
                consume::<E, N, 128, DOWN, ACROSS>(p, tiles);
            }
        }
    }
}

/// One lane keeps the ring full, of a block at `down` and `across` in its cluster.
///
/// # Safety
/// One lane of the block calls it, once. `inputs` are of the launch, `tiles` those that the block's warpgroups take,
/// and `down` and `across` are the block's place in its cluster, `[0, 0]` without one.
#[inline(always)]
unsafe fn produce<E: Epilogue, I: Inputs, const N: u32, const DOWN: u32, const ACROSS: u32>(
    p: &Gemm,
    inputs: I,
    tiles: Tiles,
    [down, across]: [u32; 2],
) {
    // SAFETY: the caller's word.
    unsafe {
        let mut ring = Ring::producer(I::ring(N));
        tensor::acquire(p.x);
        let slices = p.slices();
        let parts = const { loaded(N) / WEIGHT_ROWS };
        // The first N-tile of a tile, or the one so many further; behind the matrix the last ones again.
        let n_tile_of = |column: u32, more: u32| {
            let n_tile = column * (if E::GATED { 2 } else { 1 }) / N_TILE;
            (n_tile + more).min((p.n_tiles - 1) / TOGETHER * TOGETHER)
        };
        let weights_of = |column: u32| {
            [0, TOGETHER].map(|more| Slices::new(p.base, p.blocks, p.n_tiles, p.k, n_tile_of(column, more)))
        };
        // Blocks one above the other share weights, blocks side by side rows: in each step one of them loads for all.
        let load_weights = |ring: &Ring, weights: &[Slices; 2], step: u32, slice: u32| {
            let full = ring.full();
            full.arrive_expect_tx(I::ring(N).bytes - I::TAIL_BYTES + I::COPIED);
            let mut part = 0;
            while part < parts {
                if (step * parts + part) % DOWN == down {
                    let to = ring.stage_buffer().at((X_BYTES + part * SLICES_APART) as usize);
                    let from = p.stream.cast().at(weights[part as usize].at(slice) as usize);
                    if DOWN > 1 {
                        let blocks = ((1 << DOWN) - 1) << (across * DOWN);
                        bulk::copy_to_shared_multicast(to, from, SLICES_APART, full, blocks);
                    } else {
                        bulk::copy_to_shared(to, from, SLICES_APART, full);
                    }
                }
                part += 1;
            }
        };
        let load_rows = |ring: &Ring, row: u32, step: u32, slice: u32| {
            let at = [slice * DEPTH, row];
            if ACROSS == 1 {
                tensor::load(ring.stage_buffer(), p.x, at, ring.full());
            } else if step % ACROSS == across {
                let all = (0..ACROSS).fold(0, |all, i| all | 1 << (i * DOWN));
                tensor::load_multicast(ring.stage_buffer(), p.x, at, ring.full(), all << down);
            }
        };
        // The first stages' weights do not depend on the launches ahead.
        let mut begun = 0;
        if let Some((_, column)) = tiles.clone().next() {
            let (mut ring, weights, mut slice) = (ring, weights_of(column), 0);
            while begun < I::ring(N).stages.min(slices) {
                load_weights(&ring, &weights, begun, slice);
                slice = slice_after::<I>(slice, slices);
                ring = ring.ahead(1);
                begun += 1;
            }
        }
        wait::<DOWN, ACROSS>(p);
        if DOWN * ACROSS > 1 {
            p.beside.go_on();
        }
        for (row, column) in InOrder::<E>::new(tiles) {
            let weights = weights_of(column);
            let (mut step, mut slice) = (0, 0);
            while step < slices {
                if begun > 0 {
                    begun -= 1;
                } else {
                    ring.wait_empty();
                    load_weights(&ring, &weights, step, slice);
                }
                load_rows(&ring, row, step, slice);
                inputs.load_tail(&ring, [row, n_tile_of(column, 0)], slice);
                ring = ring.ahead(1);
                slice = slice_after::<I>(slice, slices);
                step += 1;
            }
        }
        if DOWN * ACROSS > 1 {
            p.beside.end();
        }
    }
}

/// Begins the MMAs of the ring's stage, which is full.
///
/// # Safety
/// The stage is full, or it was and nobody fills it again. `x` and `weight` are the warpgroup's operands in the first
/// stage. Nobody needs the accumulators' sums if this is the `first`.
#[inline(always)]
unsafe fn multiply<const WIDTH: u32>(ring: &Ring, x: Operand, weight: Cores, first: bool) {
    // SAFETY: the caller's word.
    unsafe {
        let offset = ring.offset();
        let (x, weight) = (x.advance(offset), weight.advance(offset));
        wgmma::fence();
        unroll!(I < 4; {
            let (x, weight) = (x.advance(I as u32 * 32), weight.advance(I as u32 * STEP_BYTES));
            let keep = I != 0 || !first;
            if WIDTH == 256 {
                wgmma::mma_n256(x, weight, keep);
            } else {
                wgmma::mma_n128_by_cores(x, weight, keep);
            }
        });
        wgmma::commit();
    }
}

/// Tells every block of the cluster whose copies also land here that a stage is free: lane `i` of a warpgroup block
/// `i`.
///
/// # Safety
/// The warpgroup has waited for the stage, and its MMAs that read it are done.
#[inline(always)]
unsafe fn free<const DOWN: u32, const ACROSS: u32>(ring: Ring) {
    let lane = thread::thread_idx_x() % GROUP;
    let blocks = DOWN * ACROSS;
    let (peer, own) = if blocks > 1 { (lane % blocks, thread::block_idx_x() % blocks) } else { (0, 0) };
    let shares = ACROSS == 1 || peer % DOWN == own % DOWN || peer / DOWN == own / DOWN;
    // SAFETY: the caller's word.
    unsafe { PeerBarrier::new(ring.empty(), peer).arrive_if(lane < blocks && shares) }
}

/// A warpgroup's main loop: where it is in the ring, and in its tile.
struct MainLoop<'a, const WIDTH: u32, const DOWN: u32, const ACROSS: u32> {
    p: &'a Gemm,
    tiles: Tiles,
    ring: Ring,
    /// The stage before.
    previous: Ring,
    /// Stages of the split-K partial that are not begun.
    left: u32,
    x: Operand,
    weight: Cores,
    /// First row and feature of the tile; none after the last.
    at: Option<(u32, u32)>,
}

impl<const WIDTH: u32, const DOWN: u32, const ACROSS: u32> MainLoop<'_, WIDTH, DOWN, ACROSS> {
    /// Begins a split-K partial of so many stages, none of which is under way. What is in the accumulators counts no
    /// more.
    ///
    /// # Safety
    /// There is at least one stage, and it is the next in the ring.
    #[inline(always)]
    unsafe fn begin_k_partial(&mut self, stages: u32) {
        // SAFETY: the caller's word.
        unsafe {
            self.ring.wait_full();
            // Apart from `go_on`: that it does not add to what was in the accumulators is a constant then, and the
            // assembler knows that what comes between split-K partials has the registers of accumulators that it is
            // done with.
            multiply::<WIDTH>(&self.ring, self.x, self.weight, true);
            self.previous = self.ring;
            self.ring = self.ring.ahead(1);
            self.left = stages - 1;
        }
    }

    /// # Safety
    /// A stage of the split-K partial is [left](Self::left), and the one before it under way.
    #[inline(always)]
    unsafe fn go_on(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            self.ring.wait_full();
            multiply::<WIDTH>(&self.ring, self.x, self.weight, false);
            wgmma::wait::<1>();
            // The stage before is read, the one just started is not.
            free::<DOWN, ACROSS>(self.previous);
            self.previous = self.ring;
            self.ring = self.ring.ahead(1);
            self.left -= 1;
        }
    }

    /// All that are left of the split-K partial, and waits for them.
    ///
    /// # Safety
    /// The split-K partial was begun.
    #[inline(always)]
    unsafe fn end_k_partial(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            while self.left > 0 {
                self.go_on();
            }
            wgmma::wait::<0>();
            free::<DOWN, ACROSS>(self.previous);
        }
    }

    /// Where the lane keeps totals in shared memory.
    ///
    /// # Safety
    /// The lane is of a warpgroup that multiplies. Its warp alone uses what lies there.
    #[inline(always)]
    unsafe fn totals() -> Shared<u8> {
        // A warp's lie together, since it also stages outputs there: 16 bytes of each lane side by side.
        let thread = thread::opaque(thread::thread_idx_x());
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(Gemm::boxes(256) + thread / 32 * (TOTALS_BYTES / 8) + thread % 32 * 16) }
    }

    /// Adds a split-K partial, which is finished, to the totals, or begins them. The `LAST` leaves them in the
    /// accumulators.
    ///
    /// # Safety
    /// The split-K partial's MMAs are done. With `FIRST` there are no totals of the tile yet, and boxes that lay where
    /// they go have been stored; otherwise there are totals.
    #[inline(always)]
    unsafe fn fold<const FIRST: bool, const LAST: bool>() {
        // SAFETY: the caller's word.
        unsafe {
            macro_rules! fold {
                ($total:expr, $k_partial:expr) => {{
                    // Not a move: a zero has a sign.
                    let sum = if FIRST { 0.0 } else { wgmma::get::<{ $total }>() } + wgmma::get::<{ $k_partial }>();
                    if LAST { wgmma::set::<{ $k_partial }>(sum) } else { wgmma::set::<{ $total }>(sum) }
                }};
            }
            if WIDTH == 256 {
                unroll!(J < 6; {
                    unroll!(E < 16; {
                        fold!(wgmma::SPARE + 16 * J + E, 16 * J + E);
                    });
                });
                let totals = Self::totals();
                unroll!(J < 8; {
                    let place = totals.at(J * 32 * 16);
                    let old = if FIRST { [0.0; 4] } else { place.load16(0).map(f32::from_bits) };
                    let sums = [
                        old[0] + wgmma::get::<{ 96 + 4 * J }>(),
                        old[1] + wgmma::get::<{ 97 + 4 * J }>(),
                        old[2] + wgmma::get::<{ 98 + 4 * J }>(),
                        old[3] + wgmma::get::<{ 99 + 4 * J }>(),
                    ];
                    if LAST {
                        unroll!(E < 4; {
                            wgmma::set::<{ 96 + 4 * J + E }>(sums[E]);
                        });
                    } else {
                        place.store16(0, sums.map(f32::to_bits));
                    }
                });
                if LAST {
                    // The warp's epilogue uses that memory.
                    warp::sync_warp();
                }
            } else {
                unroll!(J < 16; {
                    unroll!(E < 4; {
                        fold!(64 + 4 * J + E, 4 * J + E);
                    });
                });
            }
        }
    }

    /// The next split-K partials of the tile up to number `end`, each into the totals.
    ///
    /// # Safety
    /// The split-K partials of the tile before `k_partial` are among its totals, at least one of them, and none is
    /// under way.
    #[inline(always)]
    unsafe fn go_on_to_k_partial(&mut self, k_partial: &mut u32, end: u32) {
        while *k_partial < end {
            let stages = self.p.k_partial(*k_partial);
            // A matrix may have fewer slices than split-K partials.
            if stages > 0 {
                // SAFETY: the caller's word.
                unsafe {
                    self.begin_k_partial(stages);
                    self.end_k_partial();
                    Self::fold::<false, false>();
                }
            }
            *k_partial += 1;
        }
    }

    /// The last split-K partial of the tile; then its sums are in the accumulators.
    ///
    /// # Safety
    /// All split-K partials of the tile but the last are among its totals, and none is under way.
    #[inline(always)]
    unsafe fn end(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            let stages = self.p.k_partial(K_PARTIALS - 1);
            if stages > 0 {
                self.begin_k_partial(stages);
                self.end_k_partial();
                Self::fold::<false, true>();
            } else {
                Self::zero();
                Self::fold::<false, true>();
            }
        }
    }

    /// An empty split-K partial.
    #[inline(always)]
    fn zero() {
        unroll!(J < 16; {
            unroll!(E < 4; {
                wgmma::set::<{ 4 * J + E }>(0.0);
                if WIDTH == 256 {
                    wgmma::set::<{ 64 + 4 * J + E }>(0.0);
                }
            });
        });
    }
}

impl<const WIDTH: u32, const DOWN: u32, const ACROSS: u32> Next for MainLoop<'_, WIDTH, DOWN, ACROSS> {
    #[inline(always)]
    unsafe fn begin(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            self.at = self.tiles.next();
            let some = self.at.is_some();
            // After the last tile those of a stage that was multiplied already, for nothing: if MMAs were under way
            // after some tiles and not after others, the assembler would not let them run beside anything.
            let stage = if some { self.ring } else { self.previous };
            if some {
                stage.wait_full();
            }
            multiply::<WIDTH>(&stage, self.x, self.weight, true);
            self.previous = stage;
            self.ring = stage.ahead(1);
            self.left = if some { self.p.k_partial(0) - 1 } else { 0 };
        }
    }

    #[inline(always)]
    unsafe fn step(&mut self) {
        if self.left > 0 {
            // SAFETY: the caller's word.
            unsafe { self.go_on() };
        }
    }
}

/// A warpgroup multiplies what comes by `WIDTH` of the weight rows, and finishes its part of each tile.
///
/// # Safety
/// As [`Inputs::consume`] says, of tiles that are loaded for `N` weight rows; `WIDTH` is the same throughout a
/// warpgroup.
#[inline(always)]
unsafe fn consume<E: Epilogue, const N: u32, const WIDTH: u32, const DOWN: u32, const ACROSS: u32>(
    p: &Gemm,
    tiles: Tiles,
) {
    // SAFETY: the caller's word.
    unsafe {
        let group = thread::warp_id() / 4;
        // The first of the stage's weight rows that it multiplies.
        let from = || if WIDTH < loaded(N) { thread::opaque(thread::block_idx_x()) % 2 * WEIGHT_ROWS } else { 0 };
        let first = shared::dynamic::<u8>(0);
        let ring = Ring::consumer(Gemm::ring(N));
        let mut products: MainLoop<'_, WIDTH, DOWN, ACROSS> = MainLoop {
            p,
            tiles,
            ring,
            previous: ring,
            left: 0,
            x: Operand::at(first).advance(group * GROUP_ROWS * DEPTH * 2),
            weight: Cores::at(first).advance(X_BYTES + from() * DEPTH * 2),
            at: None,
        };
        let staging = shared::dynamic(Gemm::boxes(N) + group * if N == 128 { 2 * BOX_BYTES } else { TOTALS_BYTES / 2 });
        let mut half = Half { tile_row: 0, row: 0, column: 0, turn: 0, barrier: 1 + group, staging };
        if elected() && !p.out.is_null() {
            tensor::acquire(p.out);
        }
        wait::<DOWN, ACROSS>(p);
        if products.tiles.clone().next().is_none() {
            return;
        }
        products.begin();
        while let Some((row, column)) = products.at {
            (half.tile_row, half.row, half.column) = (row, row + group * GROUP_ROWS, column + from());
            // The last pair of blocks may have one tile.
            let inside = row < p.m && half.column < p.n;
            let early = E::early(p, &half);
            products.end_k_partial();
            if WIDTH == 256 && N == 256 {
                // Where boxes were that may not have been stored yet.
                half.finish_stores();
            }
            let mut k_partial = 1;
            // With few columns there are registers for what comes from memory; with many they hold totals.
            let ahead = if WIDTH == 256 {
                let ahead = E::ahead::<WIDTH>(p, &half, inside, early);
                MainLoop::<WIDTH, DOWN, ACROSS>::fold::<true, false>();
                ahead
            } else {
                MainLoop::<WIDTH, DOWN, ACROSS>::fold::<true, false>();
                products.go_on_to_k_partial(&mut k_partial, K_PARTIALS - 1);
                E::ahead::<WIDTH>(p, &half, inside, early)
            };
            products.go_on_to_k_partial(&mut k_partial, K_PARTIALS - 1);
            products.end();
            if E::LAST_APART && products.tiles.clone().next().is_none() {
                if inside {
                    E::finish_last::<WIDTH>(p, &half, ahead);
                }
                // Not by way of the wait below: sums are where MMAs would be that it waits for, and the assembler would
                // run all of them one after another.
                return;
            }
            if N == 192 {
                // A block takes one.
                if inside {
                    E::finish::<WIDTH>(p, &mut half, ahead, &mut ());
                }
                if elected() {
                    bulk::wait::<0>();
                }
                return;
            }
            if inside {
                E::finish::<WIDTH>(p, &mut half, ahead, &mut products);
            } else {
                products.begin();
            }
        }
        wgmma::wait::<0>();
        if elected() {
            bulk::wait::<0>();
        }
    }
}

/// A GEMM with an epilogue, in tiles of `N` weight rows; `DOWN` × `ACROSS` blocks take theirs together. Blocks have
/// [`THREADS`].
///
/// # Safety
/// As the parameter block says. All threads of every block call it.
#[inline(always)]
pub unsafe fn gemm<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm) {
    // SAFETY: the caller's word.
    unsafe { gemm_of::<E, Bf16, N, DOWN, ACROSS>(p, Bf16) }
}

/// The roles of a GEMM's warps.
///
/// # Safety
/// All threads of every block call it, [`THREADS`] of each, in clusters of `DOWN` × `ACROSS` blocks. `inputs` are as
/// `p`'s launch has them.
#[inline(always)]
unsafe fn gemm_of<E: Epilogue, I: Inputs, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm, inputs: I) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::declare();
        dependent_launch::allow_next();
        if thread::thread_idx_x() == 0 {
            // Two warpgroups free a stage, of each block that shares weights or rows.
            Ring::init(I::ring(N), 2 * (DOWN + ACROSS - 1));
            bulk::fence_init();
        }
        let cluster = DOWN * ACROSS > 1;
        let rank = if cluster { cluster::rank() } else { 0 };
        if cluster {
            cluster::sync_made();
        } else {
            thread::sync_threads();
        }
        let tiles = Tiles {
            band: p.band,
            together: if N == 192 { [1, 2] } else { [DOWN * I::SHARERS, ACROSS] },
            taken: 0,
            first: [p.first_row, p.first_feature],
            end: [p.m, p.n],
            apart: [if I::SHARERS > 1 { 0 } else { TILE_ROWS }, if N == 192 { WEIGHT_ROWS } else { features::<E>(N) }],
            size: [
                DOWN * TILE_ROWS,
                if N == 192 { 384 } else { ACROSS * features::<E>(N) * if E::IN_PAIRS { 2 } else { 1 } },
            ],
        };
        if thread::warp_id() < 8 {
            wgmma::take_registers::<240>();
            I::consume::<E, N, DOWN, ACROSS>(p, tiles);
        } else {
            wgmma::give_registers::<24>();
            if thread::warp_id() == 8 && warp::elect() {
                produce::<E, I, N, DOWN, ACROSS>(p, inputs, tiles, [rank % DOWN, rank / DOWN]);
            }
        }
        if cluster {
            // No block ends while another may still write to it.
            cluster::sync();
        }
    }
}

macro_rules! kernels {
    ($($epilogue:ty: $what:literal, $($n:literal $name:ident)* $(cluster $blocks:literal = $down:literal x $across:literal $cluster:ident)*;)*) => { $(
        $(
            #[doc = concat!($what, " Tiles of ", $n, " weight rows.")]
            #[kernel(threads = THREADS, min_blocks = 1)]
            pub unsafe fn $name(p: Gemm) {
                // SAFETY: the launcher's word: memory is as the parameter block says.
                unsafe { gemm::<$epilogue, $n, 1, 1>(&p) }
            }
        )*
        $(
            #[doc = concat!($what, " Tiles of 256 weight rows; clusters of ", $down, " one above the other, ", $across, " side by side.")]
            #[kernel(threads = THREADS, min_blocks = 1, cluster = $blocks)]
            pub unsafe fn $cluster(p: Gemm) {
                // SAFETY: the launcher's word: memory is as the parameter block says.
                unsafe { gemm::<$epilogue, 256, $down, $across>(&p) }
            }
        )*
    )* };
}

kernels! {
    Qkv: "Queries, keys and values from `x · wᵀ`, sums of each row times its factor.", 128 gemm_qkv_n128 192 gemm_qkv_n192 256 gemm_qkv_n256
        cluster 2 = 2 x 1 gemm_qkv_2x1 cluster 8 = 4 x 2 gemm_qkv_4x2;
    Write: "`y = x · wᵀ`, sums of each row times its factor.", 128 gemm_write_n128 192 gemm_write_n192 256 gemm_write_n256;
    SwiGlu: "`out = silu(x · weightᵀ) ∘ (x · upᵀ)`, sums of each row times its factor.", 256 gemm_swiglu_n256
        cluster 2 = 2 x 1 gemm_swiglu_2x1 cluster 8 = 4 x 2 gemm_swiglu_4x2;
    Add: "The residual stream plus `x · wᵀ`.", 128 gemm_add_n128 256 gemm_add_n256
        cluster 2 = 2 x 1 gemm_add_2x1 cluster 8 = 4 x 2 gemm_add_4x2;
}
