//! A decode step's forward pass in one launch: memory is read without a pause.
//!
//! Decode is bound by reading every weight, and every key and value, once a step. Launch by launch, memory idles at
//! every boundary; here one cooperative launch of a persistent, warp-specialised kernel, a block on each SM, runs all
//! layers:
//!
//! ```text
//! warp 9        the norm's factor, if there is one row
//! warp 8        producer   weights, key and value pages ──bulk copies──► ring of 12 × 16 KiB in shared memory
//! warps 0 to 7  consumers  ring ──► tensor cores ──► epilogue; at a boundary only these wait for other blocks
//! ```
//!
//! Neither weights nor the cache of earlier steps depend on this step's activations, so the producer passes every
//! boundary without stopping: while consumers synchronise or reduce, the ring fills. A layer has five boundaries:
//!
//! ```text
//! QKV ┃ heads, attention ┃ (combine, where a context has several splits ┃) output ┃ gate, up ┃ down ┃
//! ```
//!
//! A single row needs none of them: blocks [exchange](crate::exchange) it as words that carry a sequence flag.
//!
//! Weights lie in memory in the order in which the whole grid consumes them: see [`stream`](crate::stream). A page's
//! keys of one head have the size of a chunk of weights too, and so have its values.
//!
//! # Order
//! Slices form split-K partials, which are added in the order of [`linear`](crate::linear).
//! [`attention`](crate::attention) shares its code: this kernel gives the bits of the unfused path, whatever the grid.
//! Two warps have each of the four split-K partials, and take two slices of a chunk. Each takes every other N-tile; or
//! with a short ring, and with plain weights of more than 8 rows in long contexts, all N-tiles for 8 of the rows.
//!
//! # Safety
//! All threads of every block of a cooperative launch call what is unsafe here, with the [threads](THREADS) and the
//! shared memory that the kernel asks for: [`SHARED_BYTES`], or of a short ring [`SHORT_SHARED_BYTES`]. `p` is that
//! launch's parameter block. Memory is as it says, and nobody but this launch writes there, or reads what the launch
//! writes, until it ends. The blocks wait for each other: all of them run at once. A `layer` is below the number of
//! layers, and `count` is the step's rows, at least 1.

mod attention;
mod combine;
mod consumer;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod e4m3;
mod exchange;
#[cfg(not(target_arch = "nvptx64"))]
mod formats;
mod heads;
mod kernels;
mod problem;
mod producer;
mod sequences;
#[cfg(not(cuda_arch = "sm_90a"))]
mod short;
mod tree;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod wgmma_attention;

use cuda_std::bulk::Barrier;
#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::tensor;
use cuda_std::tensor::TensorMap;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
use cuda_std::wgmma;
use cuda_std::{Global, GlobalMut, bf16, bulk, shared, thread, warp};

use crate::attention::{Attend, SPLIT};
use crate::eagle::{EagleStep, Taps};
use crate::exchange::Exchange;
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::linear::{K_PARTIALS, N_TILE};
use crate::ring::{Ring, Shape};
use crate::step::MAX_DECODE_ROWS;
use crate::stream::{CHUNK_BYTES, N_TILES, SLICE_BYTES, SLICES, Walk};
use crate::weights::{Lossless, WeightFormat};
use crate::workspace::Workspace;
use consumer::Consumer;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub(crate) use consumer::OfCodes;
pub(crate) use consumer::{OfFragments, Products};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub use e4m3::{
    decode_1_e4m3, decode_1_e4m3_lossless_head, decode_16_e4m3, decode_16_sequences_e4m3, decode_tree_e4m3,
};
#[cfg(not(target_arch = "nvptx64"))]
pub use formats::{DecodeKernels, Short};
pub use kernels::*;
use problem::Problem;
use producer::{Units, produce};
#[cfg(not(cuda_arch = "sm_90a"))]
pub use short::*;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub use wgmma_attention::{decode_16_wgmma, decode_16_wgmma_lossless, decode_tree_wgmma, decode_tree_wgmma_lossless};

/// Threads of a block.
pub const THREADS: u32 = 384;
/// Dynamic shared memory of a block.
pub const SHARED_BYTES: u32 = shared_bytes(false);
/// The same of the kernels with a [short ring](short): all that a block of compute capability 12.0 may have.
pub const SHORT_SHARED_BYTES: u32 = shared_bytes(true);

/// The same, with a short ring or not, and whether that comes first or last.
const fn shared_bytes(short: bool) -> u32 {
    (END - SCRATCH).next_multiple_of(1024) + stages(short) * CHUNK_BYTES
}

const WARPS: u32 = 8;
// What the rows of a step are to each other.
/// Of one sequence, one behind the other.
const CHAIN: u8 = 0;
/// Of one sequence, and perhaps a [tree](crate::tree).
const TREE: u8 = 1;
/// Of several sequences: those of one lie together, one behind the other.
const SEQUENCES: u8 = 2;
// Which steps of several rows a kernel runs, by the attention that is best for them.
/// All.
const ANY: u8 = 0;
/// All but those for attention by `wgmma`, where it has a kernel.
const MMA: u8 = 1;
/// Those.
const WGMMA: u8 = 2;
/// Stages of the ring, of [`CHUNK_BYTES`]; of formats with larger ones there are fewer.
const STAGES: u32 = 12;
/// The same where a block has less shared memory: a split's keys, or its values.
const SHORT_STAGES: u32 = SPLIT_PAGES;
/// Pages of a split.
const SPLIT_PAGES: u32 = SPLIT / PAGE_TOKENS;
/// Whether the ring comes first in shared memory, and not last, where it may be shorter. Hopper's kernels have no
/// register to spare for where it begins.
const RING_IS_FIRST: bool = cfg!(cuda_arch = "sm_90a");
/// What consumers share beside the ring: partial sums of a GEMM, or the queries and partial sums of attention. It
/// begins where `wgmma` may read queries.
const SCRATCH: u32 = if RING_IS_FIRST { STAGES * CHUNK_BYTES } else { 0 };
const SCRATCH_BYTES: u32 = attention::QUERY_BYTES + Attend::SHARED_BYTES;
/// The ring's.
const BARRIERS: u32 = SCRATCH + SCRATCH_BYTES;
/// Each row's norm factor. Of one row: that of a layer's input, and of the head's, then that after attention.
const FACTORS: u32 = BARRIERS + 2 * STAGES * 8;
/// Each row's best logit so far.
const BEST: u32 = FACTORS + MAX_DECODE_ROWS * 4;
/// How many arrivals the grid barrier had counted when the last one ended.
const ARRIVALS: u32 = BEST + MAX_DECODE_ROWS * 8;
/// What falls to the block in attention.
const UNITS: u32 = ARRIVALS + 8;
/// The words of the rows' paths; of several sequences, each row's position, and where the rows of its sequence end.
const PATHS: u32 = UNITS + 32;
const PATHS_END: u32 = PATHS + MAX_DECODE_ROWS * 8;
/// The matrices' [`Problem`]s.
const PROBLEMS: u32 = PATHS_END.next_multiple_of(16);
/// Of one row: who finds a norm's factor waits for this until others want it.
const FACTOR_WANTED: u32 = PROBLEMS + Matrix::COUNT * Problem::BYTES;
const END: u32 = FACTOR_WANTED + 8;

/// Stages of the ring, which is short or not, of [`CHUNK_BYTES`].
const fn stages(short: bool) -> u32 {
    if short { SHORT_STAGES } else { STAGES }
}

/// The ring, of a format's stages.
const fn ring<F: WeightFormat>(short: bool) -> Shape {
    let start = if RING_IS_FIRST { 0 } else { END.next_multiple_of(1024) };
    let bytes = F::STAGE_BYTES;
    Shape { start, stages: stages(short) * CHUNK_BYTES / bytes, bytes, barriers: BARRIERS }
}

/// Parameters of [`decode_1`], [`decode_8`], [`decode_16`] and [`decode_tree`]. Cooperative; grid: the blocks that the
/// weights were [laid out](crate::stream::lay_out) for. Shared memory: [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct DecodeStep {
    /// The rows, at most 8 or 16: of one sequence, at consecutive positions, or of [`decode_tree`] a
    /// [tree](crate::tree), or of [`decode_16_sequences`] of several sequences; and what else every whole step has.
    /// What GEMMs of several rows read lies in [whole lines](crate::activations), and has room for
    /// [`MAX_DECODE_ROWS`] rows however few a step has.
    pub work: Workspace,
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them: for each layer QKV, output, gate-up, down; then
    /// the head.
    pub stream: Global<bf16>,
    /// The same, packed: all of them, or the head alone for kernels that read codes and a packed head.
    pub lossless: Lossless,
    /// The layers' matrices as [codes](crate::weights::quantized#layout): of the kernels that read them.
    pub codes: Global<u8>,
    /// The same in e4m3: of the kernels that multiply so.
    pub e4m3: crate::e4m3::Weights,
    /// Where their inputs' codes are, of several rows.
    pub inputs: crate::e4m3::Inputs,
    /// The chunk at which the head begins, of the stream or of what is packed, whichever has it: of the kernels that
    /// read codes of the layers' matrices.
    pub head_base: u64,
    /// `[layers]` addresses of the layers' cache pages, as [`Cache::pages`].
    pub pages: Global<u64>,
    /// How TMA reads all of them: see [`page_array`].
    pub page_map: Global<TensorMap>,
    /// The weights of all norms: for each layer the input's `[hidden]`, that after attention `[hidden]`, the queries'
    /// `[128]` and the keys' `[128]` (ones where heads have none); then the final norm's `[hidden]`.
    pub norms: Global<bf16>,
    /// `[layers, (q_heads + 2 · kv_heads) · 128]`: the biases of queries, keys and values; null if there are none.
    pub biases: Global<bf16>,
    /// `[rows, vocab]`, the result.
    pub logits: GlobalMut<f32>,
    /// [`DecodeStep::COUNTERS`] words, zero at the start. At the end those from [`DecodeStep::BEST`] on hold, as `u64`,
    /// the [rank](crate::sample::rank) of each row's best token.
    pub counters: GlobalMut<u32>,
    /// `[blocks, trace_len(layers)]`: how many points a block's first consumer passed, zero at the start, and when;
    /// null when nobody asks.
    pub trace: GlobalMut<u64>,
    /// Where blocks exchange a single row.
    pub exchange: Exchange,
    /// Which hidden states are left for a head that drafts from them; the address is null where none are.
    pub taps: Taps,
    /// What a pass of such a head begins with; addresses are null in a model's steps.
    pub eagle: EagleStep,
    /// Input features of the projections of queries, keys and values: the hidden size, or of a head twice as many.
    pub qkv_inputs: u32,
    /// Whether a kernel for long contexts is launched as well, and has the steps that are for it: 1 or 0.
    pub has_wgmma_attention: u32,
    /// Layers.
    pub layer_count: u32,
    /// Intermediate size.
    pub intermediate: u32,
}

/// What [`DecodeStep::page_map`] describes: the cache of `layers` layers of `elements` each at `address`. A box has
/// half of the dimensions of some tokens' keys, or values, of a head.
#[cfg(not(target_arch = "nvptx64"))]
#[must_use]
pub const fn page_array(address: u64, layers: usize, elements: usize) -> tensor::Array {
    // Words of 8 bytes; rows; their halves; layers.
    let (row, half) = (HEAD_DIM as u64 * 2, HEAD_DIM as u64);
    let sizes = [half / 8, elements as u64 / HEAD_DIM as u64, 2, layers as u64];
    let extent = [HEAD_DIM / 8, producer::PIECE_TOKENS, 1, 1];
    tensor::Array { address, sizes, strides: [row, half, elements as u64 * 2], extent }
}

/// The matrices of a layer, in the order of the stream, and the head.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Matrix {
    /// Queries, keys and values.
    Qkv,
    /// The attention's output, into the residual.
    Output,
    /// Gate and up.
    GateUp,
    /// Down, into the residual.
    Down,
    /// The head.
    Head,
}

impl Matrix {
    /// How many there are.
    const COUNT: u32 = 5;

    /// Whether its outputs are added to the residual.
    #[inline(always)]
    const fn is_added(self) -> bool {
        // Not by names, of which the compiler would make a table of places to jump to.
        self as u32 % 2 == 1
    }

    /// That with this number.
    #[inline(always)]
    const fn numbered(number: u32) -> Self {
        match number {
            0 => Self::Qkv,
            1 => Self::Output,
            2 => Self::GateUp,
            3 => Self::Down,
            _ => Self::Head,
        }
    }
}

/// A point that a block passes; a word of [`DecodeStep::trace`] has it in its top 8 bits, above
/// [`thread::global_timer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mark {
    /// The step begins.
    Begin = 1,
    /// The embedding is written.
    Embedded,
    /// A GEMM and its epilogue are done: QKV.
    Qkv,
    /// Likewise: output.
    Output,
    /// Likewise: gate and up.
    GateUp,
    /// Likewise: down.
    Down,
    /// Likewise: the head.
    Head,
    /// The block's share of attention is done.
    Attended,
    /// The block's share of combining is done.
    Combined,
    /// The blocks have passed the grid barrier.
    GridBarrier,
}

impl Mark {
    /// All of them, in order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::Begin,
        Self::Embedded,
        Self::Qkv,
        Self::Output,
        Self::GateUp,
        Self::Down,
        Self::Head,
        Self::Attended,
        Self::Combined,
        Self::GridBarrier,
    ];

    /// What a block did until it passed this point.
    pub fn work(self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Embedded => "embed",
            Self::Qkv => "qkv",
            Self::Output => "output",
            Self::GateUp => "gate, up",
            Self::Down => "down",
            Self::Head => "head",
            Self::Attended => "attend",
            Self::Combined => "combine",
            Self::GridBarrier => "grid barrier",
        }
    }
}

impl DecodeStep {
    /// Where in [`counters`](Self::counters) the best tokens begin.
    pub const BEST: usize = 2;
    /// Where in it blocks count that are done with a step of one row.
    const DONE: usize = 1;
    /// Words of [`counters`](Self::counters): the grid barrier's, the blocks that are done, and a `u64` for each row.
    pub const COUNTERS: usize = Self::BEST + 2 * MAX_DECODE_ROWS as usize;

    /// Sequence flags that a step of one row takes: for the embedding, and for each matrix but the head.
    #[inline(always)]
    pub const fn flags(layers: u32) -> u32 {
        4 * layers + 1
    }

    /// Whether a context of so many splits is long: each of a grid's blocks would have a whole one of a head.
    #[inline(always)]
    #[must_use]
    pub const fn is_long(kv_heads: u32, splits: u32, blocks: u32) -> bool {
        kv_heads * splits >= blocks
    }

    /// Elements of a layer's [`norms`](Self::norms).
    pub const fn layer_norms(hidden: u32) -> usize {
        (2 * hidden + 2 * HEAD_DIM) as usize
    }

    /// Most words of a block's trace.
    pub const fn trace_len(layers: u32) -> u32 {
        5 + 12 * layers
    }

    /// Matrices of the model.
    #[inline(always)]
    fn matrices(&self) -> u32 {
        4 * self.layer_count + 1
    }

    /// The matrix at this place in the stream.
    #[inline(always)]
    fn matrix(&self, index: u32) -> Matrix {
        Matrix::numbered(if index == 4 * self.layer_count { Matrix::Head as u32 } else { index % 4 })
    }

    /// Whether a matrix's input has yet to be divided by its norm.
    #[inline(always)]
    const fn is_normed(&self, matrix: Matrix) -> bool {
        match matrix {
            Matrix::Qkv => !self.eagle.is_wanted(),
            Matrix::GateUp | Matrix::Head => true,
            Matrix::Output | Matrix::Down => false,
        }
    }

    /// N-tiles and input features of a matrix.
    #[inline(always)]
    fn shape(&self, matrix: Matrix) -> (u32, u32) {
        let q = self.work.q_heads * HEAD_DIM;
        let hidden = self.work.residual.dim;
        let (n, k) = match matrix {
            Matrix::Qkv => (q + 2 * self.work.kv_heads * HEAD_DIM, self.qkv_inputs),
            Matrix::Output => (hidden, q),
            Matrix::GateUp => (2 * self.intermediate, hidden),
            Matrix::Down => (hidden, self.intermediate),
            Matrix::Head => (self.work.vocab, hidden),
        };
        (n.div_ceil(N_TILE), k)
    }

    /// The norm of a layer's input; of the layer after the last, the final one.
    ///
    /// # Safety
    /// `layer` is at most the number of layers.
    #[inline(always)]
    unsafe fn input_norm(&self, layer: u32) -> Global<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.norms.at(layer as usize * Self::layer_norms(thread::opaque(self.work.residual.dim))) }
    }

    /// The norm after a layer's attention.
    #[inline(always)]
    unsafe fn post_attention_norm(&self, layer: u32) -> Global<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.input_norm(layer).at(self.work.residual.dim as usize) }
    }

    /// The norms of a layer's queries and keys.
    #[inline(always)]
    unsafe fn head_norms(&self, layer: u32) -> Global<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.input_norm(layer).at(2 * thread::opaque(self.work.residual.dim) as usize) }
    }

    /// A layer's cache.
    #[inline(always)]
    unsafe fn cache(&self, layer: u32) -> Cache {
        // SAFETY: the caller's word; the list has the address of each layer's pages.
        self.work.cache(unsafe { GlobalMut::from_raw(self.pages.load_nc(layer as usize)) })
    }
}

/// A step of one row: of others nothing.
#[inline(always)]
unsafe fn decode_one<F: WeightFormat>(p: &DecodeStep) {
    // SAFETY: the caller's word.
    unsafe {
        if p.work.rows.count.load(0) == 1 {
            run::<F, 1, true, CHAIN, ANY, false>(p, 1);
        }
    }
}

/// A step of several rows: of one row nothing.
#[inline(always)]
unsafe fn decode<F: WeightFormat, const TILES: usize, const ROWS: u8, const ATTENTION: u8>(p: &DecodeStep) {
    // SAFETY: the caller's word.
    unsafe {
        let count = p.work.rows.count.load(0).min(TILES as u32 * 8);
        if count > 1 && is_for::<ATTENTION>(p, count) {
            run::<F, TILES, false, ROWS, ATTENTION, false>(p, count);
        }
    }
}

/// Whether a kernel of this width runs a step of `count` rows.
#[inline(always)]
unsafe fn is_for<const ATTENTION: u8>(p: &DecodeStep, count: u32) -> bool {
    // SAFETY: the caller's word.
    ATTENTION == ANY
        || (p.has_wgmma_attention != 0 && unsafe { producer::wants_wgmma(p, count) }) == (ATTENTION == WGMMA)
}

/// A block's part of a step of `count` rows; with a [short](short) ring if `SHORT`.
///
/// # Safety
/// The step has `count` rows, to each other as `ROWS` says: 1 if `ONE`, else at most `TILES` times 8 and
/// [`MAX_DECODE_ROWS`]. All threads of all blocks call it, once in a launch; the step's counters are zero by then.
#[inline(always)]
unsafe fn run<
    F: WeightFormat,
    const TILES: usize,
    const ONE: bool,
    const ROWS: u8,
    const ATTENTION: u8,
    const SHORT: bool,
>(
    p: &DecodeStep,
    count: u32,
) {
    // SAFETY: the caller's word.
    unsafe {
        let thread = thread::thread_idx_x();
        let mut last = 0;
        if ROWS == SEQUENCES && thread < 32 {
            last = sequences::bring(p, count);
        }
        if thread == 0 {
            Ring::init(ring::<F>(SHORT), WARPS);
            Barrier::at(shared::dynamic(FACTOR_WANTED)).init(1);
            bulk::fence_init();
            shared::dynamic::<u32>(ARRIVALS).store(0, 0);
            let units =
                if ROWS == SEQUENCES { Units::of_sequences(p, count, last) } else { Units::new::<ATTENTION>(p, count) };
            units.store();
        }
        if thread < MAX_DECODE_ROWS {
            shared::dynamic::<u64>(BEST).store(thread as usize, 0);
            // Of an input without a norm.
            shared::dynamic::<f32>(FACTORS).store(thread as usize, 1.0);
        }
        if ROWS == TREE && thread < 32 {
            tree::bring(p, count);
        }
        attention::clear_queries(thread);
        // By others than the thread that has the barriers to make.
        Problem::store_all::<F>(p, thread.wrapping_sub(WARPS * 32), thread::grid_dim_x());
        let flag = p.exchange.first_flag();
        thread::sync_threads();
        // The registers of the other three warps of the producer's group are of more use to consumers. From a shuffle
        // the assembler knows that a warp's lanes agree on it, and keeps what they share in uniform registers:
        // otherwise 24 would not do.
        let warp_id = warp::shuffle_idx(thread::warp_id(), 0);
        if warp_id < WARPS {
            take_registers();
            Consumer::<ROWS, SHORT>::new::<F>(p, count, flag).run::<F, TILES, ONE, ATTENTION>();
        } else {
            give_registers();
            if warp_id == WARPS {
                produce::<F, ROWS, ATTENTION, SHORT>(p, ONE);
            } else if ONE && warp_id == WARPS + 1 {
                consumer::factors(p, flag);
            }
        }
    }
}

/// A consumer takes the registers that the producer's warps leave. Only Hopper can.
#[inline(always)]
fn take_registers() {
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    wgmma::take_registers::<240>();
}

/// A warp beside consumers leaves them its registers, likewise.
#[inline(always)]
fn give_registers() {
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    wgmma::give_registers::<24>();
}

// What a block may have of compute capability 9.0, and of 12.0; and that a wave's partial sums fit.
const _: () = assert!(SHARED_BYTES <= 227 << 10 && SHORT_SHARED_BYTES <= 99 << 10);
const _: () = assert!(consumer::PARTIAL_BYTES <= SCRATCH_BYTES);
const _: () = assert!(SCRATCH.is_multiple_of(1024) && BARRIERS.is_multiple_of(8));
const _: () = assert!(consumer::ONE_BYTES <= attention::QUERY_BYTES);
/// Slices of 16 × 64 bf16, two of each split-K partial.
const _: () = assert!(SLICE_BYTES * SLICES == CHUNK_BYTES && SLICES == 2 * K_PARTIALS);
/// A page's keys, or values, of one head.
const _: () = assert!(PAGE_TOKENS * HEAD_DIM * 2 == CHUNK_BYTES);
