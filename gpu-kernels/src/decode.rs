//! The forward pass of a decode step in one launch, which keeps memory busy throughout.
//!
//! Decode is bound by memory: each step reads every weight, every key and every value once. With a launch for each
//! operator, memory idles between launches. Here one cooperative launch of a persistent, warp-specialised kernel runs
//! all layers, with one CTA on each SM:
//!
//! ```text
//! warp 9        the norm's factor, if there is one row
//! warp 8        producer   weights, key and value pages ──bulk copies──► ring of 12 × 16 KiB in shared memory
//! warps 0 to 7  consumers  ring ──► tensor cores ──► epilogue; at a boundary only these wait for other CTAs
//! ```
//!
//! Neither the weights nor the keys and values of earlier steps depend on this step's activations. So the producer does
//! not stop at a grid barrier: while consumers synchronise or reduce, it fills the ring. A layer has five grid barriers
//! (`┃`), and one more where a context has several splits:
//!
//! ```text
//! QKV ┃ heads, attention ┃ (combine, where a context has several splits ┃) output ┃ gate, up ┃ down ┃
//! ```
//!
//! With e4m3 weights and several rows, each GEMM has one more: between the making of its input's codes and their use.
//!
//! A step of one row has no grid barriers, unless the ring is short: CTAs [exchange](crate::exchange) its activations
//! as words that carry a sequence flag.
//!
//! Weights lie in memory in the order in which the whole grid consumes them: see [`stream`](crate::stream). The keys of
//! one head in a page are as many bytes as a chunk of weights, and so are its values. So they go through the same ring.
//!
//! # Order
//! Slices form four split-K partials, which are added in the order of [`linear`](crate::linear). Attention shares its
//! code with [`attention`](crate::attention). So this kernel gives the bits of the unfused path, whatever the grid.
//!
//! Two warps compute each split-K partial, from two slices of a chunk. Each of the two takes every other N-tile. With a
//! short ring, each takes all N-tiles for 8 of the rows instead; so it does in kernels for up to 16 rows where plain
//! weights are not loaded ahead, which are those for long contexts, and for plain heads beside other layers.
//!
//! # Named barriers
//! A CTA has 16 named barriers. Each group of warps that synchronises by itself has a number of its own:
//!
//! | barrier | warps | who waits there |
//! |---|---|---|
//! | 0 | all 12 | once, before the roles part: `sync_threads` in `run` |
//! | 1 | 0 to 7 | the consumers: `sync` in `consumer.rs`; attention's `reduce_few` and `combine_head` use it, too |
//! | 2 | 0 to 7, and 9 | one row: the consumers and the warp of the norm's factor, `sync_with_factor` in `one.rs` |
//! | 4 + `w` | `w` and `w + 4` | one row: the two warps of split-K partial `w`, 0 to 3: `Duty::sync` in `one.rs` |
//! | 8, 9 | 0 to 3, 4 to 7 | e4m3: the warps of a warpgroup, `Warpgroup::sync` in `consumer/e4m3.rs` |
//!
//! Number 3 and those from 10 on are free.
//!
//! # Safety
//! All threads of every CTA of a cooperative launch call what is unsafe here. The launch has the [threads](THREADS) and
//! the shared memory that the kernel asks for: [`SHARED_BYTES`], or with a short ring [`SHORT_SHARED_BYTES`]. `p` is
//! that launch's parameter block. Memory is as `p` says, and until the launch ends nobody else writes there, or reads
//! what the launch writes. All CTAs run at once, since they wait for each other. A `layer` is below the number of
//! layers, and `count` is the step's rows, at least 1.

/// The numbers of [named barriers](self#named-barriers), the first of several.
mod barrier {
    pub const CONSUMERS: u32 = 1;
    pub const FACTOR: u32 = 2;
    pub const K_PARTIALS: u32 = 4;
    pub const WARPGROUPS: u32 = 8;
}

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
use cuda_std::{Global, GlobalMut, bf16, bulk, device, shared, thread, warp};

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

/// Threads of a CTA.
pub const THREADS: u32 = 384;
/// Dynamic shared memory of a CTA.
pub const SHARED_BYTES: u32 = shared_bytes(false);
/// Dynamic shared memory of a CTA in the kernels with a [short ring](short): all that a CTA of compute capability 12.0
/// may have.
pub const SHORT_SHARED_BYTES: u32 = shared_bytes(true);

/// Dynamic shared memory with a `short` ring or a long one. The size is the same whether the ring comes first or last.
const fn shared_bytes(short: bool) -> u32 {
    (END - SCRATCH).next_multiple_of(1024) + stages(short) * CHUNK_BYTES
}

const WARPS: u32 = 8;
// How the rows of a step relate: values of `ROWS`.
/// Rows of one sequence, at consecutive positions.
const CHAIN: u8 = 0;
/// Rows of one sequence that may be a [tree](crate::tree).
const TREE: u8 = 1;
/// Rows of several sequences. The rows of one sequence lie together, at consecutive positions.
const SEQUENCES: u8 = 2;
// Which steps of several rows a kernel runs, by the attention that is best for them: values of `ATTENTION`.
/// All steps.
const ANY: u8 = 0;
/// The steps that `WGMMA` leaves; all steps, if no kernel with attention by `wgmma` is launched.
const MMA: u8 = 1;
/// The steps that are better with attention by `wgmma`.
const WGMMA: u8 = 2;
/// Stages of the ring, of [`CHUNK_BYTES`] each. Formats with larger stages have fewer.
const STAGES: u32 = 12;
/// Stages of a short ring, for CTAs with less shared memory: they hold a split's keys, or its values.
const SHORT_STAGES: u32 = SPLIT_PAGES;
/// Pages of a split.
const SPLIT_PAGES: u32 = SPLIT / PAGE_TOKENS;
/// Whether the ring comes first in shared memory, as on Hopper, whose kernels have no register to spare for where it
/// begins. On other cards it comes last, so that it may be shorter.
const RING_IS_FIRST: bool = cfg!(cuda_arch = "sm_90a");
/// Scratch memory, which consumers share beside the ring: the partial sums of a GEMM, or the queries and partial sums
/// of attention. It is aligned so that `wgmma` may read queries there.
const SCRATCH: u32 = if RING_IS_FIRST { STAGES * CHUNK_BYTES } else { 0 };
const SCRATCH_BYTES: u32 = attention::QUERY_BYTES + Attend::SHARED_BYTES;
/// The ring's full and empty barriers.
const BARRIERS: u32 = SCRATCH + SCRATCH_BYTES;
/// Each row's norm factor. A step of one row has two: the first is for the norms of a layer's input and of the head's,
/// the second for the norm after attention.
const FACTORS: u32 = BARRIERS + 2 * STAGES * 8;
/// Each row's best logit so far.
const BEST: u32 = FACTORS + MAX_DECODE_ROWS * 4;
/// The grid barrier's count of arrivals when this CTA last passed it.
const ARRIVALS: u32 = BEST + MAX_DECODE_ROWS * 8;
/// The CTA's [`Units`] of attention.
const UNITS: u32 = ARRIVALS + 8;
/// Each row's path in a tree. With several sequences: each row's position, and the end of its sequence's rows.
const PATHS: u32 = UNITS + 32;
const PATHS_END: u32 = PATHS + MAX_DECODE_ROWS * 8;
/// The matrices' [`Problem`]s.
const PROBLEMS: u32 = PATHS_END.next_multiple_of(16);
/// For a step of one row: the barrier at which the warp that computes a norm's factor waits until consumers want it.
const FACTOR_WANTED: u32 = PROBLEMS + Matrix::COUNT * Problem::BYTES;
const END: u32 = FACTOR_WANTED + 8;

/// Stages of a `short` ring or a long one, of [`CHUNK_BYTES`] each.
const fn stages(short: bool) -> u32 {
    if short { SHORT_STAGES } else { STAGES }
}

/// The shape of the ring, with the stages of a format.
const fn ring<F: WeightFormat>(short: bool) -> Shape {
    let start = if RING_IS_FIRST { 0 } else { END.next_multiple_of(1024) };
    let bytes = F::STAGE_BYTES;
    Shape { start, stages: stages(short) * CHUNK_BYTES / bytes, bytes, barriers: BARRIERS }
}

/// Parameters of all kernels of this module. Cooperative; grid: the CTAs that the weights were [laid
/// out](crate::stream::lay_out) for. Shared memory: [`SHARED_BYTES`]; with a short ring [`SHORT_SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct DecodeStep {
    /// The rows, and what else every whole step has. There are at most 8 or 16, as the kernel says: of one sequence
    /// at consecutive positions; for [`decode_tree`] a [tree](crate::tree); for [`decode_16_sequences`] of several
    /// sequences. The input of a GEMM of several rows lies in [whole lines](crate::activations), with room for
    /// [`MAX_DECODE_ROWS`] rows however few a step has.
    pub work: Workspace,
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them: for each layer QKV, output, gate-up, down; then
    /// the head.
    pub stream: Global<bf16>,
    /// The weights, packed: all of them for the kernels that read such layers; for the others the head, or nothing.
    pub lossless: Lossless,
    /// The layers' matrices as [codes](crate::weights::quantized#layout), for the kernels that read them.
    pub codes: Global<u8>,
    /// The layers' matrices in e4m3, for the kernels that multiply in it.
    pub e4m3: crate::e4m3::Weights,
    /// Where the kernels that multiply in e4m3 put the codes of their inputs, in a step of several rows.
    pub inputs: crate::e4m3::Inputs,
    /// The chunk at which the head begins in its own stream, for kernels that read the head in another format than the
    /// layers; 0 for kernels for one row with a packed head.
    pub head_base: u64,
    /// `[layers]` addresses of the layers' cache pages, as [`Cache::pages`].
    pub pages: Global<u64>,
    /// The tensor map by which TMA reads the pages of all layers: see [`page_array`].
    pub page_map: Global<TensorMap>,
    /// The weights of all norms. Each layer has those of the input's norm `[hidden]`, the norm after attention
    /// `[hidden]`, the queries' `[128]` and the keys' `[128]` (ones where heads have none). The final norm's `[hidden]`
    /// come last.
    pub norms: Global<bf16>,
    /// `[layers, (q_heads + 2 · kv_heads) · 128]`: the biases of queries, keys and values; null if there are none.
    pub biases: Global<bf16>,
    /// `[rows, vocab]`, the result.
    pub logits: GlobalMut<f32>,
    /// [`DecodeStep::COUNTERS`] words, zero at the start. At the end the words from [`DecodeStep::BEST`] on hold the
    /// [rank](crate::sample::rank) of each row's best token, as `u64`.
    pub counters: GlobalMut<u32>,
    /// `[blocks, trace_len(layers)]`: how many points a CTA's first consumer thread has passed, zero at the start, then
    /// a word for each of them, as [`Mark`] says. Null if nobody wants a trace.
    pub trace: GlobalMut<u64>,
    /// Where CTAs exchange the activations of a step of one row.
    pub exchange: Exchange,
    /// Which hidden states are kept for a head that drafts from them; the address is null if none are.
    pub taps: Taps,
    /// What a pass of a drafting head begins with; addresses are null in a model's steps.
    pub eagle: EagleStep,
    /// Input features of the projections of queries, keys and values: the hidden size, or twice that for a drafting
    /// head.
    pub qkv_inputs: u32,
    /// 1 if a kernel for long contexts is launched as well, which runs the steps that are for it; else 0.
    pub has_wgmma_attention: u32,
    /// Layers.
    pub layer_count: u32,
    /// Intermediate size.
    pub intermediate: u32,
}

/// The array that [`DecodeStep::page_map`] describes: the cache at `address`, of `layers` layers of `elements` each. A
/// box has the keys, or the values, of some tokens of one head, in half of the dimensions.
#[cfg(not(target_arch = "nvptx64"))]
#[must_use]
pub const fn page_array(address: u64, layers: usize, elements: usize) -> tensor::Array {
    // The dimensions: words of 8 bytes, rows, halves of a row, layers.
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
    /// Attention's output, added to the residual.
    Output,
    /// Gate and up.
    GateUp,
    /// Down, added to the residual.
    Down,
    /// The head.
    Head,
}

impl Matrix {
    /// How many matrices there are.
    const COUNT: u32 = 5;

    /// Whether the matrix's outputs are added to the residual.
    #[device]
    const fn is_added(self) -> bool {
        // By number: from names the compiler would make a jump table.
        self as u32 % 2 == 1
    }

    /// The matrix with this number.
    #[device]
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

/// A point that a CTA passes. A word of [`DecodeStep::trace`] has the point's number in its top 8 bits, above
/// [`thread::global_timer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Mark {
    /// The step begins.
    Begin = 1,
    /// The embedding is written.
    Embedded,
    /// The QKV GEMM and its epilogue are done.
    Qkv,
    /// The output GEMM and its epilogue are done.
    Output,
    /// The gate-up GEMM and its epilogue are done.
    GateUp,
    /// The down GEMM and its epilogue are done.
    Down,
    /// The head's GEMM and its epilogue are done.
    Head,
    /// The CTA's share of attention is done.
    Attended,
    /// The CTA's share of combining is done.
    Combined,
    /// The CTAs have passed the grid barrier; in a step of one row, the first words of a GEMM's input have come.
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

    /// What a CTA did until it passed this point.
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
    /// Where in [`counters`](Self::counters) CTAs count themselves when they are done with a step of one row.
    const DONE: usize = 1;
    /// Words of [`counters`](Self::counters): the grid barrier's, the CTAs that are done, and a `u64` for each row.
    pub const COUNTERS: usize = Self::BEST + 2 * MAX_DECODE_ROWS as usize;

    /// Sequence flags that a step of one row takes: one for the embedding, and one for each matrix but the head.
    #[device]
    pub const fn flags(layers: u32) -> u32 {
        4 * layers + 1
    }

    /// Whether a context of so many `splits` is long: each CTA of the grid would have at least one whole split of a
    /// head.
    #[device]
    #[must_use]
    pub const fn is_long(kv_heads: u32, splits: u32, blocks: u32) -> bool {
        kv_heads * splits >= blocks
    }

    /// Elements of a layer's [`norms`](Self::norms).
    pub const fn layer_norms(hidden: u32) -> usize {
        (2 * hidden + 2 * HEAD_DIM) as usize
    }

    /// Most words of a CTA's trace.
    pub const fn trace_len(layers: u32) -> u32 {
        // The number of marks; the beginning, the embedding, the head and its barrier. In a layer: four GEMMs with a
        // barrier each; attention, combining, and a barrier before each.
        5 + 12 * layers
    }

    /// Matrices in the stream: four for each layer, and the head.
    #[device]
    fn matrices(&self) -> u32 {
        4 * self.layer_count + 1
    }

    /// The matrix at this place in the stream.
    #[device]
    fn matrix(&self, index: u32) -> Matrix {
        Matrix::numbered(if index == 4 * self.layer_count { Matrix::Head as u32 } else { index % 4 })
    }

    /// Whether a kernel for layers in the format `F` reads a packed head. For one row each choice has a kernel of its
    /// own: what `PACKED_HEAD` says. Kernels for several rows choose at run time. But those with a short ring cannot
    /// read packed weights. And others would lack registers: those for plain layers, for rows of several sequences, and
    /// for cards after Hopper, where consumers cannot take other warps' registers.
    #[device]
    const fn packs_head<F: WeightFormat, const ROWS: u8, const PACKED_HEAD: bool, const SHORT: bool>(
        &self,
        one_row: bool,
    ) -> bool {
        let is_hopper = cfg!(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"));
        let may_choose = F::PLAIN_HEAD && !SHORT && ROWS != SEQUENCES && is_hopper;
        if one_row { PACKED_HEAD } else { may_choose && !self.lossless.tiles.is_null() }
    }

    /// Whether a matrix's input has yet to be divided by its norm.
    #[device]
    const fn is_normed(&self, matrix: Matrix) -> bool {
        match matrix {
            Matrix::Qkv => !self.eagle.is_wanted(),
            Matrix::GateUp | Matrix::Head => true,
            Matrix::Output | Matrix::Down => false,
        }
    }

    /// N-tiles and input features of a matrix.
    #[device]
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

    /// The weights of the norm of a layer's input. The layer after the last has the final norm's.
    ///
    /// # Safety
    /// `layer` is at most the number of layers.
    #[device]
    unsafe fn input_norm(&self, layer: u32) -> Global<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.norms.at(layer as usize * Self::layer_norms(thread::opaque(self.work.residual.dim))) }
    }

    /// The weights of the norm after a layer's attention.
    #[device]
    unsafe fn post_attention_norm(&self, layer: u32) -> Global<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.input_norm(layer).at(self.work.residual.dim as usize) }
    }

    /// The weights of the norms of a layer's queries and keys.
    #[device]
    unsafe fn head_norms(&self, layer: u32) -> Global<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.input_norm(layer).at(2 * thread::opaque(self.work.residual.dim) as usize) }
    }

    /// A layer's cache.
    #[device]
    unsafe fn cache(&self, layer: u32) -> Cache {
        // SAFETY: the caller's word; the list has the address of each layer's pages.
        self.work.cache(unsafe { GlobalMut::from_raw(self.pages.load_nc(layer as usize)) })
    }
}

/// Runs a step of one row, with a packed head beside the layers if `PACKED_HEAD`. Does nothing if the step has another
/// number of rows.
#[device]
unsafe fn decode_one<F: WeightFormat, const PACKED_HEAD: bool>(p: &DecodeStep) {
    // SAFETY: the caller's word.
    unsafe {
        if p.work.rows.count.load(0) == 1 {
            run::<F, 1, true, PACKED_HEAD, CHAIN, ANY, false>(p, 1);
        }
    }
}

/// Runs a step of several rows. Does nothing if the step has one row, or if another kernel runs it.
#[device]
unsafe fn decode<F: WeightFormat, const TILES: usize, const ROWS: u8, const ATTENTION: u8>(p: &DecodeStep) {
    // SAFETY: the caller's word.
    unsafe {
        let count = p.work.rows.count.load(0).min(TILES as u32 * 8);
        if count > 1 && is_for::<ATTENTION>(p, count) {
            run::<F, TILES, false, false, ROWS, ATTENTION, false>(p, count);
        }
    }
}

/// Whether the kernel with this `ATTENTION` runs a step of `count` rows.
#[device]
unsafe fn is_for<const ATTENTION: u8>(p: &DecodeStep, count: u32) -> bool {
    // SAFETY: the caller's word.
    ATTENTION == ANY
        || (p.has_wgmma_attention != 0 && unsafe { producer::wants_wgmma(p, count) }) == (ATTENTION == WGMMA)
}

/// A CTA's part of a step of `count` rows; with a [short](short) ring if `SHORT`. For `PACKED_HEAD` see
/// [`packs_head`](DecodeStep::packs_head).
///
/// # Safety
/// The step has `count` rows, which relate as `ROWS` says: 1 if `ONE`, else at most `TILES` times 8 and
/// [`MAX_DECODE_ROWS`]. All threads of all CTAs call it, once in a launch; the step's counters are zero by then.
#[device]
unsafe fn run<
    F: WeightFormat,
    const TILES: usize,
    const ONE: bool,
    const PACKED_HEAD: bool,
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
            // The factor of inputs without a norm.
            shared::dynamic::<f32>(FACTORS).store(thread as usize, 1.0);
        }
        if ROWS == TREE && thread < 32 {
            tree::bring(p, count);
        }
        attention::clear_queries(thread);
        // By threads beside the consumers: thread 0 has the barriers to make.
        Problem::store_all::<F>(p, thread.wrapping_sub(WARPS * 32), thread::grid_dim_x());
        let flag = p.exchange.first_flag();
        thread::sync_threads();
        // The producer's warpgroup has three further warps, and their registers are of more use to consumers. The
        // warp's number comes from a shuffle: so the assembler knows that the lanes of a warp agree on it, and keeps
        // what they share in uniform registers. Otherwise 24 registers would not do.
        let warp_id = warp::shuffle_idx(thread::warp_id(), 0);
        if warp_id < WARPS {
            take_registers();
            Consumer::<ROWS, SHORT>::new::<F>(p, count, flag).run::<F, TILES, ONE, PACKED_HEAD, ATTENTION>();
        } else {
            give_registers();
            if warp_id == WARPS {
                produce::<F, ROWS, PACKED_HEAD, ATTENTION, SHORT>(p, ONE);
            } else if ONE && warp_id == WARPS + 1 {
                consumer::factors(p, flag);
            }
        }
    }
}

/// A consumer takes the registers that the warps beside the consumers give up. Only Hopper can move registers.
#[device]
fn take_registers() {
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    wgmma::take_registers::<240>();
}

/// A warp beside the consumers gives up registers for them. Only Hopper can move registers.
#[device]
fn give_registers() {
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
    wgmma::give_registers::<24>();
}

// With compute capability 12.0 a CTA may have 99 KiB of shared memory. A wave's partial sums fit into scratch memory.
const _: () = assert!(SHARED_BYTES <= crate::HOPPER_SHARED_BYTES && SHORT_SHARED_BYTES <= 99 << 10);
const _: () = assert!(consumer::PARTIAL_BYTES <= SCRATCH_BYTES);
const _: () = assert!(SCRATCH.is_multiple_of(1024) && BARRIERS.is_multiple_of(8));
const _: () = assert!(consumer::ONE_BYTES <= attention::QUERY_BYTES);
/// Slices of 16 × 64 bf16, two for each split-K partial.
const _: () = assert!(SLICE_BYTES * SLICES == CHUNK_BYTES && SLICES == 2 * K_PARTIALS);
/// A page's keys, or values, of one head.
const _: () = assert!(PAGE_TOKENS * HEAD_DIM * 2 == CHUNK_BYTES);
