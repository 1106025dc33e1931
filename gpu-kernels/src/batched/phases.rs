//! The phases of a step, and how their tiles are shared out over the grid.
//!
//! The host writes a step's phases as a list (`host/src/forward/batched.rs`), and all CTAs go through it in order. A
//! grid barrier stands between two phases, so each reads what those before it wrote. Memory is that of
//! [`Workspace`](crate::workspace::Workspace); `hidden` is the residual stream's size, `heads` is
//! `q_heads + 2 · kv_heads`, and `w` is the weight of the norm that comes next:
//!
//! | phase | kind | reads | writes |
//! |---|---|---|---|
//! | embedding | `Embed` | tokens, `embed [vocab, hidden]` | the residual stream¹ |
//! | QKV | `Write` | `scaled [rows, hidden]`, `squares`, bias | `qkv [rows, heads · 128]`, f32 |
//! | attention | `Attend` | `qkv`, pages of keys and values | `attended [rows, q_heads · 128]`, bf16²; keys, values³ |
//! | output | `Add` | `attended`, `x` | the residual stream¹ |
//! | gate-up | `SwiGlu` | `scaled`, `squares` | `activation [rows, intermediate]`, bf16 |
//! | down | `Add` | `activation`, `x` | the residual stream¹ |
//! | head | `Write` or `Best` | `scaled`, `squares` | logits `[rows, vocab]`, f32; or `best [rows]`, a rank each |
//!
//! The five phases from QKV to down repeat for each layer. A launch may have a part of the list: none of the head where
//! no row is to be sampled; attention alone, or the last phases, where the layers' GEMMs are launches of their own.
//!
//! ¹ [`Residual`](crate::norm::Residual): `x [rows, hidden]` in f32, `scaled = bf16(x · w)` in the order of
//! [`slot`](crate::linear::slot), and `squares`, the sum of `x²` over each N-tile. `squares` go to the rows' norm
//! factors, by which the epilogues of `Write`, `Best` and `SwiGlu` multiply.
//!
//! ² Splits whose sums do not stay in shared memory go through `sums` and `scales`.
//!
//! ³ Those of the step's own rows. Two warps beside the consumers write them to the cache when all CTAs are done with
//! attention, while the consumers run the next phase.
//!
//! # Tiles of a GEMM
//! A tile has 8 N-tiles and 64, 96 or 128 rows. [`GemmPhase::unit`] counts down the tiles of rows first, then across
//! the features. A CTA takes every unit whose number is its own modulo the grid. The tiles of full waves are whole;
//! those of the last wave are in 1, 2 or 4 parts along K ([`Share`]). With 2 parts:
//!
//! ```text
//! unit                0   …   whole − 1 │ whole   whole + 1 │ whole + 2   whole + 3 │ …
//! tile                0   …   whole − 1 │ ───── whole ───── │ ───── whole + 1 ───── │
//! split-K indices   0 to 3      0 to 3  │ 0, 1      2, 3    │   0, 1        2, 3    │
//! ```
//!
//! # Safety
//! A `phase` is one of a launch's, which nobody writes while it runs.

use cuda_std::tensor::TensorMap;
use cuda_std::{Global, GlobalMut, bf16, device};

use super::{K_SPLITS, TILE_N_TILES};
use crate::linear::SLICE;

/// What a phase does.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, cuda_std::Layout)]
pub enum PhaseKind {
    /// The residual stream starts as the tokens' embeddings.
    Embed,
    /// `y = x · wᵀ`.
    Write,
    /// The [best token](super::BatchedStep::best) of each row of `x · wᵀ`.
    Best,
    /// `residual += x · wᵀ`; features are a multiple of 16.
    Add,
    /// `activation = silu(x · gateᵀ) ∘ (x · upᵀ)`.
    SwiGlu,
    /// Attention, from the output of the QKV projection on.
    Attend,
}

impl PhaseKind {
    pub(super) const EMBED: u32 = Self::Embed as u32;
    pub(super) const WRITE: u32 = Self::Write as u32;
    pub(super) const BEST: u32 = Self::Best as u32;
    pub(super) const ADD: u32 = Self::Add as u32;
    pub(super) const SWIGLU: u32 = Self::SwiGlu as u32;
    pub(super) const ATTEND: u32 = Self::Attend as u32;

    /// Whether this is one of the GEMMs.
    #[device]
    pub(super) const fn is_gemm(kind: u32) -> bool {
        matches!(kind, Self::WRITE..=Self::SWIGLU)
    }

    /// Whether this is one of the GEMMs whose input still has to be divided by its norm.
    #[device]
    pub(super) const fn is_normed(kind: u32) -> bool {
        Self::is_gemm(kind) && kind != Self::ADD
    }
}

/// A phase of a [step](super::BatchedStep). A field that does not name the phase's kind is not read.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Phase {
    /// What is done.
    pub kind: PhaseKind,
    /// GEMMs: N-tiles of the matrix.
    pub n_tiles: u32,
    /// GEMMs: output features; with `SwiGlu`, those of its result.
    pub n: u32,
    /// GEMMs: input features, a multiple of 64.
    pub k: u32,
    /// GEMMs: [`Share::new`] of all tiles over the grid.
    pub share: Share,
    /// GEMMs: the matrix's first [`Wave::base`](crate::stream::Wave::base).
    pub base: u64,
    /// GEMMs: the activations, bf16 `[rows, k]`, each row in the order of [`slot`](crate::linear::slot), in tiles of as
    /// many rows as the kernel's tiles have.
    pub x: Global<TensorMap>,
    /// `Write`: `[rows, n]`.
    pub y: GlobalMut<f32>,
    /// `Embed` and `Add`: the weight of the norm that comes next. `Attend`: the weight of the queries' norm. `Write`:
    /// the bias `[n]`, null for none.
    pub norm: Global<bf16>,
    /// `Attend`: the weight of the keys' norm.
    pub key_norm: Global<bf16>,
    /// `Attend`: the layer's cache pages, as [`Cache::pages`](crate::kv::Cache::pages).
    pub pages: GlobalMut<bf16>,
    /// `Attend`: `[pages, kv_heads]`, the [forms](crate::packed::Form) of the pages that are
    /// [packed](super::BatchedStep::packed).
    pub forms: Global<u32>,
    /// GEMMs: tiles of rows, enough for the most rows that the step may have.
    pub row_tiles: u32,
    /// GEMMs: the factor of all sums, in kernels whose [weights](crate::weights) are scaled.
    pub scale: f32,
    /// GEMMs in a kernel that reads codes: the bf16 weights of a matrix that has no codes, as
    /// [`lay_out`](crate::stream::lay_out) left them; null for other matrices.
    pub plain: Global<bf16>,
}

impl Phase {
    /// A phase of this kind whose other fields are zero, but for a scale of 1.
    #[must_use]
    pub fn new(kind: PhaseKind) -> Self {
        Self {
            kind,
            n_tiles: 0,
            n: 0,
            k: 0,
            share: Share { whole: 0, shift: 0 },
            base: 0,
            x: Default::default(),
            y: Default::default(),
            norm: Default::default(),
            key_norm: Default::default(),
            pages: Default::default(),
            forms: Default::default(),
            row_tiles: 0,
            scale: 1.0,
            plain: Default::default(),
        }
    }

    /// A list of phases as words, for device memory.
    #[must_use]
    pub const fn words(phases: &[Self]) -> &[u64] {
        // SAFETY: eight-byte fields and pairs of four-byte ones: nothing between them is padding.
        unsafe { core::slice::from_raw_parts(phases.as_ptr().cast(), size_of_val(phases) / 8) }
    }
}

/// How the tiles of a GEMM are shared out over CTAs.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, cuda_std::Layout)]
pub struct Share {
    /// Tiles that one CTA computes whole: those of full waves.
    pub whole: u32,
    /// Each of the other tiles has `1 << shift` parts.
    pub shift: u32,
}

/// How long the parts of a tile of `rows` rows take to exchange split-K partials, as a number of stages whose MMAs take
/// as long. Two parts (`shift` 1) exchange within a cluster, four (`shift` 2) through memory.
const fn exchange(shift: u32, rows: u32) -> u32 {
    match (shift, rows) {
        (0, _) => 0,
        (1, 64) => 5,
        (1, _) => 10,
        (_, 64) => 12,
        _ => 28,
    }
}

impl Share {
    /// Shares out `tiles` tiles of 64, 96 or 128 `rows` over `grid` CTAs, for a matrix with `k` input features. Chooses
    /// the split with the shortest last wave, and of equal ones the coarsest. A tile has no more parts than there are
    /// CTAs: a CTA waits for the other parts of its tile, and must not wait for one that it has to compute itself
    /// later. The CTAs are whole clusters: two parts are those of one cluster.
    ///
    /// # Panics
    /// If there are no CTAs: a bug of the caller.
    #[must_use]
    pub const fn new(tiles: u32, rows: u32, grid: u32, k: u32) -> Self {
        let left = tiles % grid;
        let depth = (k / SLICE).div_ceil(K_SPLITS);
        let (mut shift, mut best, mut tried) = (0, u32::MAX, 0);
        while K_SPLITS >> tried > 0 && 1 << tried <= grid {
            let part = (K_SPLITS >> tried) * depth + exchange(tried, rows);
            let time = (left << tried).div_ceil(grid) * part;
            if time < best {
                (shift, best) = (tried, time);
            }
            tried += 1;
        }
        Self { whole: tiles - left, shift }
    }

    /// Whether a tile that is not whole has two parts, which are the two CTAs of a cluster. It has four parts if not.
    #[device]
    pub(super) const fn is_in_cluster(&self) -> bool {
        self.shift == 1
    }

    /// Whether a unit is a whole tile.
    #[device]
    pub(super) const fn is_whole(&self, unit: &Unit) -> bool {
        unit.end - unit.k_split == K_SPLITS
    }

    /// Which part of its tile a unit is. The parts finish consecutive rows: each as many groups of eight as
    /// [`groups`](Self::groups) returns.
    #[device]
    pub(super) const fn part(&self, unit: &Unit) -> u32 {
        (unit.k_split << self.shift) / K_SPLITS
    }

    /// Groups of eight rows that a part finishes, of the `TILES` groups of a tile.
    #[device]
    pub(super) const fn groups<const TILES: usize>(&self) -> u32 {
        TILES as u32 >> self.shift
    }

    /// Tiles of a matrix of `n_tiles` N-tiles with `row_tiles` tiles of rows.
    #[device]
    #[must_use]
    pub const fn tiles(n_tiles: u32, row_tiles: u32) -> u32 {
        n_tiles.div_ceil(TILE_N_TILES) * row_tiles
    }
}

/// A tile or a part of it: its place, and the split-K indices `k_split` to before `end` that it multiplies.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    /// First N-tile.
    pub n_tile: u32,
    /// First row.
    pub row: u32,
    /// Number of its tile among the split tiles.
    pub split: u32,
    pub k_split: u32,
    pub end: u32,
}

/// What all roles need of a GEMM. Each reads it once a phase.
#[derive(Clone, Copy)]
pub(super) struct GemmPhase {
    pub phase: Global<Phase>,
    pub n_tiles: u32,
    pub k: u32,
    pub share: Share,
    row_tiles: u32,
}

impl GemmPhase {
    /// Reads it from a phase.
    ///
    /// # Safety
    /// The phase is a GEMM's: it has tiles of rows.
    #[device]
    pub unsafe fn new(phase: Global<Phase>) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let share = field!(phase, share: [u32; 2]);
            Self {
                phase,
                n_tiles: field!(phase, n_tiles: u32),
                k: field!(phase, k: u32),
                share: Share { whole: share[0], shift: share[1] },
                row_tiles: field!(phase, row_tiles: u32),
            }
        }
    }

    /// Unit `number`, with `rows` rows in a tile. A CTA has the units whose number is its own modulo the grid.
    #[device]
    pub fn unit(&self, number: u32, rows: u32) -> Option<Unit> {
        let Share { whole, shift } = self.share;
        let (tile, split, part, shift) = if number < whole {
            (number, 0, 0, 0)
        } else {
            let part = number - whole;
            (whole + (part >> shift), part >> shift, part & ((1 << shift) - 1), shift)
        };
        if tile >= Share::tiles(self.n_tiles, self.row_tiles) {
            return None;
        }
        let k_splits = K_SPLITS >> shift;
        let k_split = part * k_splits;
        // SAFETY: a GEMM has tiles of rows, and this was made of the phase of one.
        unsafe { cuda_std::assume(self.row_tiles > 0) };
        let across = tile / self.row_tiles;
        let (n_tile, row) = (across * TILE_N_TILES, (tile - across * self.row_tiles) * rows);
        Some(Unit { n_tile, row, split, k_split, end: k_split + k_splits })
    }

    /// Whether the two CTAs of a cluster multiply this unit's features, each by a tile of rows of its own.
    #[device]
    pub const fn is_of_both(&self, unit: &Unit) -> bool {
        self.row_tiles.is_multiple_of(2) && self.share.is_whole(unit)
    }

    /// K-slices of a split-K index.
    #[device]
    pub fn depth(&self, k_split: u32) -> u32 {
        (self.k / SLICE + K_SPLITS - 1 - k_split) / K_SPLITS
    }
}
