//! Linear layers for many rows: `y[row, n] = Σ_k x[row, k] · w[n, k]` on Hopper's `wgmma`, for prompts. bf16 in, f32
//! sums.
//!
//! # Shape of the work
//! The kernel is persistent and warp-specialised: a CTA of three warpgroups stays on its SM and takes tiles of
//! [`TILE_ROWS`] = 128 rows × `N` = 128, 192 or 256 features, one after another:
//!
//! ```text
//! warpgroup 2   one lane: x [128 × 64] by TMA, w [N × 64] by bulk copies ──► ring of stages; runs ahead, across tiles
//! warpgroup 0   rows 0..64   ┐ wgmma m64nNk16, four a stage, sums in N/2 registers a lane;
//! warpgroup 1   rows 64..128 ┘ then the epilogue
//! ```
//!
//! Tiles are handed out down a band of [`Gemm::band`] tile rows before they go right. So CTAs that run at the same time
//! share rows and features in L2. In the `_2x1` kernels, two neighbouring CTAs take tiles one above the other, and each
//! loads half of the features' tile for both. In the `_4x2` kernels, four CTAs one above the other share features, and
//! two side by side share rows:
//!
//! ```text
//!                  features 0 .. 256      256 .. 512
//! rows   0 .. 128  CTA 0                  CTA 4          rows: the two load them for both in turn
//! rows 128 .. 256  CTA 1                  CTA 5
//! rows 256 .. 384  CTA 2                  CTA 6
//! rows 384 .. 512  CTA 3                  CTA 7          features: in each step two of the four load a half
//! ```
//!
//! Not every SM has seven free neighbours. So clusters of 2 × 1 do the rest, in a launch of their own that runs beside
//! the other ([`Beside`]). What lies beyond `n` or `x` arrives as zeros.
//!
//! Heads have 128 features, and a warpgroup finishes whole heads. In the `_n192` kernels each CTA takes one tile, and
//! two neighbours have three heads between them. One CTA multiplies the middle head by the upper 64 rows, the other by
//! the lower 64:
//!
//! ```text
//! features          0 .. 128   128 .. 256   256 .. 384
//! rows  0 ..  64   └──────── CTA 0 ───────┘ └── CTA 1 ─┘     (warpgroups 0)
//! rows 64 .. 128   └── CTA 0 ─┘ └──────── CTA 1 ───────┘     (warpgroups 1)
//! ```
//!
//! Norms are fused into the GEMMs as [`norm`](crate::norm) says. A warpgroup adds up the squares of its tile's rows
//! while its first MMAs run. `add` writes one sum of squares for [`SPAN`] features, so that there are few to add up.
//!
//! # Epilogues
//! | kernels | of the sums, times the row's factor |
//! |---|---|
//! | `gemm_qkv_*` | queries, keys and values: normalised, rotated, put where attention reads ([`qkv`](crate::qkv)) |
//! | `gemm_write_*` | written in f32 |
//! | `gemm_swiglu_*` | with half of the tile's features gates and half their ups: `silu(gate) · up`, bf16 |
//! | `gemm_swiglu_coded_e4m3` | as `gemm_swiglu_*`, in codes with a scale for each group |
//! | `gemm_add_*` | added to the residual stream, with what the norm that comes next wants |
//!
//! While MMAs run, the lanes load into registers what the epilogue needs first.
//!
//! The `_e4m3` kernels multiply [e4m3](crate::e4m3), with scales for every 128 inputs, in tiles of 128 weight rows.
//!
//! The kernels may be launched early ([`dependent_launch`]): they fetch the first stages' weights before they wait for
//! the launches ahead.
//!
//! # Order
//! An output has the bits of [`linear`](crate::linear): slices of 64 input features form [`K_PARTIALS`] split-K
//! partials in the tensor core's accumulator, which are added from first to last. This kernel multiplies a tile one
//! split-K partial after another. The sums of the finished partials are the tile's *totals*. With tiles of 128 weight
//! rows, totals stay in registers beside the accumulators. With wider ones, three quarters stay in registers and a
//! quarter in shared memory, which holds the epilogue's boxes when there are no totals. The weights lie as for the
//! [decode kernel](crate::decode), and activations in the order of [`slot`](crate::linear::slot): so an instruction
//! multiplies the same 16 inputs everywhere.
//!
//! # Ladder
//! 1. `linear`: 64 rows a launch, and every N-tile reads the activations again. It reaches a third of the bandwidth and
//!    a twentieth of the tensor cores' rate.
//! 2. This module.
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses, maps and grid are as it says. The whole CTA begins in `gemm_of`,
//! which makes the ring's barriers before anyone waits for one. One lane of warpgroup 2 calls [`produce`]. Whole
//! warpgroups 0 and 1 call what multiplies, each with the tiles that [`produce`] takes, in the same order. A
//! warpgroup's accumulators, and its part of shared memory behind the ring, are its own; MMAs that write the
//! accumulators have been waited for when these are read. Each warpgroup releases every stage once, when it is done
//! with it; where its warps load from a stage, each warp does.

use cuda_std::tensor::{self, TensorMap};
use cuda_std::{Global, GlobalMut, bf16, bulk, cluster, dependent_launch, device, kernel, thread, warp, wgmma};

use crate::HOPPER_SHARED_BYTES;
use crate::e4m3::CodedRows;
use crate::linear::{K_PARTIALS, N_TILE};
use crate::norm::{Norm, Residual};
use crate::qkv::SplitHeads;
use crate::ring::{Ring, Shape};
use crate::stream::{GROUP_N_TILES, SLICES_APART};

/// Rows of a tile. All outputs have room for whole tiles of rows; rows beyond `m` have unspecified contents.
pub const TILE_ROWS: u32 = 128;
/// Input features of a stage of the ring; the input size is a multiple of it.
pub const DEPTH: u32 = tensor::ROW;
/// Features of an output tile that an epilogue finishes at a time. The output size is a multiple of it, and of 128 for
/// `qkv` and `add`.
pub const BOX: u32 = tensor::ROW;
/// Features with one sum of squares for the norm that comes next, in addition to the sums of N-tiles: see
/// [`Residual::spans`].
pub const SPAN: u32 = crate::norm::SPAN;
/// Weight rows that one copy loads.
pub const WEIGHT_ROWS: u32 = GROUP_N_TILES * N_TILE;
/// Threads of a CTA.
pub const THREADS: u32 = 384;

/// Weight rows that the kernel for tiles of `n` weight rows loads for each tile.
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
/// TMA wants swizzled tiles to begin at a multiple of this.
const BOX_ALIGNMENT: u32 = 1024;
/// Bytes of a quarter of the totals of a tile of 256 weight rows: 32 f32 for each lane that multiplies.
const TOTALS_BYTES: u32 = 2 * GROUP * 32 * 4;
const _: () = assert!(SLICES_APART == WEIGHT_ROWS * DEPTH * 2);

/// Parameters of the GEMMs of this module. Grid: at most one CTA an SM, in whole clusters for `_2x1` and `_4x2`
/// kernels. For `_n192` kernels: two CTAs for every 384 features of every tile of rows. Shared memory:
/// [`Gemm::shared_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Gemm {
    /// `x`, bf16 `[rows, k]`, each row in the order of [`slot`](crate::linear::slot), in tiles of [`TILE_ROWS`] rows.
    pub x: Global<TensorMap>,
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them.
    pub stream: Global<bf16>,
    /// The matrix's first [`Wave::base`](crate::stream::Wave::base).
    pub base: u64,
    /// CTAs that the weights were laid out for.
    pub blocks: u32,
    /// N-tiles of the whole matrix.
    pub n_tiles: u32,
    /// The activations that `swiglu` writes, and `plain` in `bench-kernels`: bf16 `[rows, n]`, in tiles of 64 rows.
    /// Those of `swiglu` are in the order of [`slot`](crate::linear::slot).
    pub out: Global<TensorMap>,
    /// `[rows, n]`, whole tiles of rows: written by `write` alone.
    pub y: GlobalMut<f32>,
    /// What `qkv`, `write` and `swiglu` still have to divide each row by, if anything. Its squares are sums over
    /// [`SPAN`] elements, as in [`Residual::spans`].
    pub norm: Norm,
    /// `[n]`: what `qkv` and `write` add to each row after they have multiplied it by its factor; null for nothing. The
    /// `_n192` kernels ignore it.
    pub bias: Global<bf16>,
    /// What `qkv` makes heads with, and where they go; its own field `qkv` is not used.
    pub heads: SplitHeads,
    /// What `add` adds to, `n` features wide.
    pub residual: Residual,
    /// `[n]`: the weight of the norm that comes next; `add` alone reads it.
    pub next_norm: Global<bf16>,
    /// Where `add` of e4m3 puts the norm's input as codes, and `swiglu_coded` its activation, `n` codes a row. Where it
    /// is null, `add` writes bf16.
    pub codes: CodedRows,
    /// First row to compute: a multiple of [`TILE_ROWS`].
    pub first_row: u32,
    /// End of the rows to compute.
    pub m: u32,
    /// First output feature to compute: a multiple of 128.
    pub first_feature: u32,
    /// End of the output features to compute.
    pub n: u32,
    /// Input features; with e4m3, pairs of them.
    pub k: u32,
    /// Height of a band, in tiles of a CTA or of a cluster; at least one.
    pub band: u32,
    /// The other launch of the same GEMM, if there is one.
    pub beside: Beside,
}

impl Gemm {
    /// The ring for tiles of `n` weight rows.
    const fn ring(n: u32) -> Shape {
        Shape::new(0, if n == 128 { 6 } else { 4 }, X_BYTES + loaded(n) * DEPTH * 2)
    }

    /// Where the epilogue's boxes begin, with tiles of `n` weight rows.
    const fn boxes(n: u32) -> u32 {
        Self::ring(n).end().next_multiple_of(BOX_ALIGNMENT)
    }

    /// Bytes of dynamic shared memory of a CTA with tiles of `n` weight rows: the ring, then two boxes of output for
    /// each warpgroup. With wide tiles, totals lie in the place of the boxes.
    pub const fn shared_bytes(n: u32) -> u32 {
        Self::boxes(n) + if n == 128 { 4 * BOX_BYTES } else { TOTALS_BYTES }
    }

    /// K-slices of an output's sum.
    #[device]
    fn slices(&self) -> u32 {
        self.k / DEPTH
    }

    /// K-slices of split-K partial number `k_partial`.
    #[device]
    fn k_partial(&self, k_partial: u32) -> u32 {
        (self.slices() + K_PARTIALS - 1 - k_partial) / K_PARTIALS
    }
}

// The four boxes fit into the place of totals.
const _: () = assert!(Gemm::shared_bytes(256) <= HOPPER_SHARED_BYTES && Gemm::shared_bytes(128) <= HOPPER_SHARED_BYTES);
const _: () = assert!(4 * BOX_BYTES <= TOTALS_BYTES);

/// Waits until what the launches ahead wrote can be read. Kernels without clusters have no launch beside them.
///
/// # Safety
/// Where CTAs are in clusters, [`Gemm::beside`] is as [`Beside::wait`] asks.
#[device]
unsafe fn wait<const DOWN: u32, const ACROSS: u32>(p: &Gemm) {
    if DOWN * ACROSS > 1 {
        // SAFETY: the caller's word.
        unsafe { p.beside.wait() };
    } else {
        dependent_launch::wait();
    }
}

/// The kind of operands that a GEMM multiplies.
trait Inputs: Copy {
    /// Bytes of a stage behind its rows and weights, and how many of them copies fill.
    const TAIL_BYTES: u32;
    const COPIED: u32;
    /// The ring for tiles of `n` weight rows.
    fn ring(n: u32) -> Shape;
    /// Starts the copies to a stage's tail, for the tile at a row and an N-tile.
    ///
    /// # Safety
    /// The lane is the one that fills this stage, which is free, and whose full barrier expects
    /// [`COPIED`](Self::COPIED) bytes beside the others. The row and the slice are of a tile of the launch, the N-tile
    /// one of the matrix.
    unsafe fn load_tail(self, ring: &Ring, at: [u32; 2], slice: u32);
    /// Whether a tile's slices come split-K partial by split-K partial, or in order.
    const SPLIT: bool;
    /// CTAs that take the same tile, each for some of its rows.
    const SHARERS: u32;
    /// How often a CTA's consumers release each stage: once for each warpgroup, or once for each warp.
    const RELEASES: u32;
    /// A warpgroup's consumer role: it multiplies the stages that arrive, and finishes its part of each tile.
    ///
    /// # Safety
    /// Warpgroups 0 and 1 of the CTA call it, once, with registers for the accumulators. `tiles` are those that the
    /// CTA's producer takes.
    unsafe fn consume<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm, tiles: Tiles);
}

/// bf16 operands, which have no tail in a stage.
#[derive(Clone, Copy)]
struct Bf16;

impl Inputs for Bf16 {
    const TAIL_BYTES: u32 = 0;
    const COPIED: u32 = 0;
    const SPLIT: bool = true;
    const SHARERS: u32 = 1;
    const RELEASES: u32 = 2;

    #[device]
    fn ring(n: u32) -> Shape {
        Gemm::ring(n)
    }

    #[device]
    unsafe fn load_tail(self, _: &Ring, _: [u32; 2], _: u32) {}

    #[device]
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

/// A GEMM with an epilogue, in tiles of `N` weight rows; clusters of `DOWN` × `ACROSS` CTAs take theirs together. CTAs
/// have [`THREADS`] threads.
///
/// # Safety
/// As the parameter block says. All threads of every CTA call it.
#[device]
pub unsafe fn gemm<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm) {
    // SAFETY: the caller's word.
    unsafe { gemm_of::<E, Bf16, N, DOWN, ACROSS>(p, Bf16) }
}

/// Assigns the roles of a GEMM to the CTA's warps.
///
/// # Safety
/// All threads of every CTA call it, [`THREADS`] of each, in clusters of `DOWN` × `ACROSS` CTAs. `inputs` are as `p`'s
/// launch has them.
#[device]
unsafe fn gemm_of<E: Epilogue, I: Inputs, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm, inputs: I) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::declare();
        dependent_launch::allow_next();
        if thread::thread_idx_x() == 0 {
            // Every CTA that shares weights or rows with this one releases a stage, and so does this one.
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
            cluster_shape: if N == 192 { [1, 2] } else { [DOWN * I::SHARERS, ACROSS] },
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
            // No CTA ends while another may still write to it.
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
    SwiGlu: "`out = silu(x · gateᵀ) ∘ (x · upᵀ)`, sums of each row times its factor.", 256 gemm_swiglu_n256
        cluster 2 = 2 x 1 gemm_swiglu_2x1 cluster 8 = 4 x 2 gemm_swiglu_4x2;
    Add: "The residual stream plus `x · wᵀ`.", 128 gemm_add_n128 256 gemm_add_n256
        cluster 2 = 2 x 1 gemm_add_2x1 cluster 8 = 4 x 2 gemm_add_4x2;
}
