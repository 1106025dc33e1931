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
//! `gemm_of`, which makes the ring's barriers before anyone waits for one. [`produce`] is one lane's of warpgroup 2.
//! What multiplies is called by whole warpgroups 0 and 1, each with the tiles that [`produce`] takes, in the same
//! order. A warpgroup's accumulators, and its part of shared memory behind the ring, are its own; MMAs that write the
//! accumulators have been waited for when these are read. Each warpgroup frees every stage once, when it is done with
//! it; where its warps load from a stage, each of them does.

use cuda_std::tensor::{self, TensorMap};
use cuda_std::{Global, GlobalMut, bf16, bulk, cluster, dependent_launch, kernel, thread, warp, wgmma};

use crate::e4m3::CodedRows;
use crate::linear::{K_PARTIALS, N_TILE};
use crate::norm::{Norm, Residual};
use crate::qkv::SplitHeads;
use crate::ring::{Ring, Shape};
use crate::stream::{SLICES_APART, TOGETHER};

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
mod main_loop;
mod producer;
mod tile_scheduler;

pub use crate::e4m3::GROUP as SCALED_INPUTS;
pub use beside::Beside;
pub use e4m3::{E4m3, GemmE4m3, gemm_add_e4m3, gemm_add_shared_e4m3, gemm_e4m3, gemm_qkv_e4m3};
pub use e4m3::{gemm_swiglu_coded_e4m3, gemm_swiglu_e4m3, gemm_write_e4m3, gemm_write_shared_e4m3};

use self::epilogue::{Add, Epilogue, Qkv, SwiGlu, Write, features};
use self::main_loop::consume;
use self::producer::produce;
use self::tile_scheduler::Tiles;

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
    /// How often a block's consumers release a stage: each warpgroup once, or each warp.
    const RELEASES: u32;
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
    const RELEASES: u32 = 2;

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
            // By each block that shares weights or rows.
            Ring::init(I::ring(N), I::RELEASES * (DOWN + ACROSS - 1));
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
