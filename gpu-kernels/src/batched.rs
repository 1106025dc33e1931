//! A decode step of many sequences in one launch, on Hopper's `wgmma`. It gives the bits of [`linear`](crate::linear)
//! and [`attention`](crate::attention).
//!
//! As in the [decode kernel](crate::decode), memory is read without a pause: weights, and keys and values of earlier
//! steps, depend on nothing that a step does. The step is a list of [phases](Phase) in memory. Between two phases all
//! CTAs wait at a grid barrier:
//!
//! ```text
//! warp 8         weights: 64 inputs of 8 N-tiles; pages of keys and values ──bulk copies──► ring of stages of 16 KiB
//! warp 9         activations [ROWS × 64] by TMA; an item's queries     ──► rings of stages of ROWS × 128 bytes
//! warps 10, 11   norm factors; the tile scheduler of attention; then a step's keys and values, into the cache
//! warps 0 to 7   consumers: MMAs and epilogues; they wait at the grid barriers
//! ```
//!
//! Warp 8 passes grid barriers without stopping, but for one wait in a phase of attention: before its first item from
//! the [pool]. With more than 64 rows a tile it also keeps step with the other CTA of its cluster. The other
//! producers wait at grid barriers: what they bring is written in the phases before.
//!
//! # GEMMs
//! A CTA takes tiles of 128 output features (8 N-tiles) × `ROWS` rows. `ROWS` is 64, 96 or 128; with codes 64 or 128;
//! with packed weights 64. Each of two warpgroups multiplies 64 of the features, `wgmma m64nROWSk16`, with both
//! operands in shared memory: weights as core matrices, as they lie in a chunk of the [decode kernel](crate::decode),
//! activations swizzled. With 64 rows, and with codes also with 128, weights go through registers, so that a stage is
//! released before it is multiplied. The epilogue works in registers.
//!
//! In [`linear`](crate::linear), warp `w` of 4 adds up the slices `w, w + 4, …` in the tensor core, and the warps'
//! split-K partials are added from first to last. Here one warpgroup computes the same split-K partials one after
//! another: all slices of split-K index 0, then of index 1, and so on. It adds each finished split-K partial to its
//! totals. On Hopper `wgmma` and `mma.sync` give the same bits for the same 16 products. (Measured: 4 × 4,096 sums of
//! 4,096 products, plain, of equal sign and spread over 24 binary orders; the order within the 16 does not matter.)
//! `linear` loads 16 bytes at a time, which determines the 16 inputs of an instruction. Activations are kept in that
//! order: see [`slot`](crate::linear::slot).
//!
//! Full waves of tiles, one tile a CTA, run like that. The tiles that are left are split along K into two or four parts
//! each, where that pays ([`Share`]). Each part finishes its own share of the rows. It gives the other parts its
//! split-K partials of their rows, and adds up those of its own rows, in order. Two parts are the two CTAs of a
//! cluster, which send partials into each other's shared memory (`peer.rs`). Four parts exchange them through global
//! memory, which L2 holds.
//!
//! # Attention
//! `attention.rs` says what an item is, and `tile_scheduler.rs` how items are assigned to CTAs.
//!
//! # Safety
//! All threads of every CTA of a cooperative launch call what is unsafe here, with the [threads](THREADS), the clusters
//! and the shared memory that the kernel asks for, which is `Memory` of its `ROWS`. `p` is that launch's parameter
//! block. Memory is as it says, a `phase` is one of its phases, and nobody but this launch writes there, or reads what
//! the launch writes, until it ends. The CTAs wait for each other: all of them run at once.

/// Reads or sets four accumulators from `$first` on: a lane's sums of a group of eight rows.
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

/// Reads a field of a phase where it is needed: a kept copy would take a register.
macro_rules! field {
    ($phase:expr, $name:ident: $t:ty) => {
        $phase.cast::<u8>().at(core::mem::offset_of!(Phase, $name)).cast::<$t>().load_nc(0)
    };
}

mod alone;
mod attention;
mod factors;
mod k_partial;
mod kernels;
mod main_loop;
mod newest;
mod outputs;
mod peer;
mod phases;
mod pool;
mod producer;
mod tile_scheduler;

pub use alone::attend_batch;
pub(crate) use k_partial::{InPairs, MainLoop, OfCodes, OfPlain};
pub use kernels::*;
pub use phases::{Phase, PhaseKind, Share};

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::bulk::{self, Barrier};
use cuda_std::cluster;
use cuda_std::shared::{self, Shared};
use cuda_std::tensor::TensorMap;
use cuda_std::{Global, GlobalMut, bf16, device, thread, warp, wgmma};

use crate::HOPPER_SHARED_BYTES;
use crate::attention::Attend;
use crate::embedding::embed_elements;
use crate::linear::{K_PARTIALS, SLICE};
use crate::qkv::SplitHeads;
use crate::ring::{Ring, Shape};
use crate::stream::{GROUP_N_TILES, SLICE_BYTES};
use crate::waiting;
use crate::weights::{BatchedFormat, Lossless};
use crate::workspace::Workspace;

/// Most rows of a launch with GEMMs. One of attention alone may have more, up to the 4,096 that an item can tell apart.
pub const MAX_BATCHED_ROWS: u32 = 512;
/// Threads of a CTA.
pub const THREADS: u32 = 384;
/// CTAs of a cluster. If a tile is split into two parts, they are the two CTAs of one cluster.
pub const CLUSTER: u32 = 2;
/// N-tiles of a tile.
pub const TILE_N_TILES: u32 = GROUP_N_TILES;

/// Split-K partials of an output: number `i` is the sum over the K-slices whose number is `i` modulo this.
const K_SPLITS: u32 = K_PARTIALS;
/// Words of the grid barrier's counters, of attention's pool, and of the rows' factors, in this order.
const GRID_BARRIER_WORDS: u32 = 4 + 2 * MAX_BATCHED_ROWS;
/// Consumer warps.
const WARPS: u32 = 8;
const CONSUMERS: u32 = WARPS * 32;
/// Registers of a lane, after the warpgroups have given or taken some.
const CONSUMER_REGISTERS: u32 = 208;
const PRODUCER_REGISTERS: u32 = 88;
// A CTA shares out the registers that it was launched with, 168 a lane. Asking for more would wait forever.
const _: () = assert!(256 * CONSUMER_REGISTERS + 128 * PRODUCER_REGISTERS <= 384 * 168);
const GROUP: u32 = 128;
const WEIGHT_BYTES: u32 = TILE_N_TILES * SLICE_BYTES;
/// Bytes of the items of attention that a warp looks up at a time: 32.
const ITEMS_BYTES: u32 = 32 * 32;
/// The named barrier of all consumers; the warpgroups have barriers 1 and 2.
const ALL: u32 = 3;

/// Layout of a CTA's shared memory, with `ROWS` rows a tile.
struct Memory<const ROWS: u32>;

impl<const ROWS: u32> Memory<ROWS> {
    /// The ring of activations of GEMMs.
    const ROW_RING: Shape = Shape::new(0, if ROWS <= 96 { 8 } else { 6 }, ROWS * SLICE * 2);
    /// Where attention reduces: the end of that ring's memory. A producer loads activations only when all CTAs are done
    /// with the phase before, so the two do not collide.
    const SCRATCH: u32 = Self::ROW_RING.barriers - Attend::SHARED_BYTES;
    /// Items of attention that a warp has looked up, with the forms of their pages.
    const ITEMS: u32 = Self::SCRATCH - ITEMS_BYTES;
    /// The ring of items of attention, in the stages of the activations before `ITEMS`.
    const ITEM_RING: Shape =
        Shape { stages: Self::ITEMS / Self::ROW_RING.bytes, barriers: Self::ROW_RING.end(), ..Self::ROW_RING };
    /// The ring of messages that one producer sends another about attention's pool.
    const MESSAGES: Shape = pool::messages(Self::ITEM_RING.end().next_multiple_of(16));
    /// The ring of weights, or of pages.
    const RING: Shape = Shape::new(Self::MESSAGES.end().next_multiple_of(128), Self::STAGES, WEIGHT_BYTES);
    const STAGES: u32 = if ROWS == 64 { 10 } else { 8 };
    /// Where the barrier lies that says that the rows' factors are there.
    const FACTORS_READY: u32 = Self::RING.end();
    /// Where the barrier lies that says that the CTA's share of attention is known; that share lies behind it.
    const SCHEDULED: u32 = (Self::FACTORS_READY + 8).next_multiple_of(16);
    /// The rows' factors.
    const FACTORS: u32 = Self::SCHEDULED + 32;
    /// The best token that the CTA knows of for each row, of one tile of rows: see `outputs.rs`.
    const BEST: u32 = Self::FACTORS + MAX_BATCHED_ROWS * 4;
    /// Barriers for what the other CTA of the cluster sends: see `peer.rs`.
    const PEER: u32 = Self::BEST + ROWS * 4;
    const BYTES: u32 = Self::PEER + peer::BARRIERS * 8;

    /// The barrier that says that the rows' factors are there.
    unsafe fn factors_ready() -> Barrier {
        // SAFETY: the caller's word.
        unsafe { Barrier::at(shared::dynamic(Self::FACTORS_READY)) }
    }

    /// The barrier that says that the CTA's share of attention is known.
    unsafe fn scheduled() -> Barrier {
        // SAFETY: the caller's word.
        unsafe { Barrier::at(shared::dynamic(Self::SCHEDULED)) }
    }

    /// The CTA's share of attention.
    ///
    /// # Safety
    /// It is written before [`scheduled`](Self::scheduled) says so, and read after that.
    unsafe fn assignment() -> Shared<u32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(Self::SCHEDULED + 16) }
    }

    /// Where the warp that describes items keeps those that it has looked up.
    ///
    /// # Safety
    /// One warp uses it, in a phase of attention: in other phases activations come there.
    unsafe fn items() -> Shared<u32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(Self::ITEMS) }
    }
}

// The keys and values of an item of attention, four pages each, are in the ring at once.
const _: () =
    assert!(Memory::<64>::RING.stages >= 8 && Memory::<96>::RING.stages >= 8 && Memory::<128>::RING.stages >= 8);
const _: () = assert!(
    Memory::<64>::BYTES <= HOPPER_SHARED_BYTES
        && Memory::<96>::BYTES <= HOPPER_SHARED_BYTES
        && Memory::<128>::BYTES <= HOPPER_SHARED_BYTES
);

/// Parameters of [`batched_64`], [`batched_96`], [`batched_128`], and of their variants for other weights. Cooperative.
/// Grid: at most one CTA an SM, in whole clusters. Shared memory: [`BatchedStep::shared_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct BatchedStep {
    /// The part that every whole-step kernel has. Activations are in the order of [`slot`](crate::linear::slot).
    pub work: Workspace,
    /// The phases, in order.
    pub phases: Global<Phase>,
    /// Number of phases.
    pub phase_count: u32,
    /// CTAs that the weights were [laid out](crate::stream::lay_out) for.
    pub blocks: u32,
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them.
    pub stream: Global<bf16>,
    /// The weights packed, for the kernels that read them packed.
    pub lossless: Lossless,
    /// The tensor map of packed weights or [codes](crate::weights::quantized), whose boxes are stages: for the kernels
    /// that read them.
    pub boxes: Global<TensorMap>,
    /// `[tile_count, 2]`: the first row of a tile, and its number of rows. The rows of a tile are of one sequence, at
    /// ascending positions, and at most [`Attend::tile_rows`]. A sequence's rows follow each other, and so do its
    /// tiles. 8-byte aligned.
    pub tiles: Global<u32>,
    /// `[pages]`: 1 for a page that is [packed](crate::packed), 0 for others. No row of this step has its token in a
    /// packed page.
    pub packed: Global<u32>,
    /// [`BatchedStep::items_len`] words, for the items of attention.
    pub items: GlobalMut<u32>,
    /// `[blocks, 4]`: the share of each CTA in attention; for [`attend_batch`], that of each warp. Needed where the
    /// phases of a step are launches of their own; null otherwise.
    pub assignments: GlobalMut<u32>,
    /// [`BatchedStep::partial_len`] elements, for split-K partials of split tiles.
    pub partials: GlobalMut<f32>,
    /// [`BatchedStep::arrivals_len`] words, zero before and after.
    pub arrivals: GlobalMut<u32>,
    /// `[MAX_BATCHED_ROWS]`: the [rank](crate::sample::rank) of each row's best token, which `Best` computes; null
    /// where no phase is `Best`. The launch zeroes it first. But if its first phase is `Best`, an earlier launch of the
    /// step has zeroed it.
    pub best: GlobalMut<u64>,
    /// `[blocks, phases]`: when a CTA finished each phase, by [`thread::global_timer`]; null when nobody asks.
    pub trace: GlobalMut<u64>,
    /// Number of `tiles`.
    pub tile_count: u32,
    /// 1 if an earlier launch with the same rows has left [`assignments`](Self::assignments) and
    /// [`items`](Self::items).
    pub is_scheduled: u32,
}

impl BatchedStep {
    /// Dynamic shared memory of [`attend_batch`].
    pub const ATTEND_SHARED_BYTES: u32 = alone::SHARED_BYTES;
    /// Most query heads of a key-value head in [`attend_batch`].
    pub const ATTEND_PAIRS: u32 = alone::PAIRS;
    /// Warps of a CTA of [`attend_batch`].
    pub const ATTEND_WARPS: u32 = alone::WARPS;

    /// Bytes of dynamic shared memory of a CTA of the kernel for `rows` = 64, 96 or 128 rows a tile.
    #[must_use]
    pub const fn shared_bytes(rows: u32) -> u32 {
        match rows {
            64 => Memory::<64>::BYTES,
            96 => Memory::<96>::BYTES,
            _ => Memory::<128>::BYTES,
        }
    }

    /// Elements of [`partials`](Self::partials) for any matrix and any number of tiles of `rows` rows, on a grid of
    /// `grid` CTAs.
    #[must_use]
    pub const fn partial_len(rows: u32, grid: u32) -> usize {
        // Fewer tiles than CTAs are left to split, and they are split only where that shortens the last wave.
        let mut most = 0;
        let mut tiles = 1;
        while tiles < grid {
            // The larger K is, the more parts a tile has: this is the most.
            let share = Share::new(tiles, rows, grid, 1 << 20);
            if share.shift == 2 && tiles * K_SPLITS > most {
                most = tiles * K_SPLITS;
            }
            tiles += 1;
        }
        (most * 2 * 64 * rows) as usize
    }

    /// Words of [`arrivals`](Self::arrivals) on a grid of `grid` CTAs, for up to `rows` rows. In order: for both halves
    /// of each tile that may be split, how many parts have left their split-K partials, in two sets that GEMMs use in
    /// turn; the grid barrier's counter, and how many CTAs are done; two words of attention's pool; two words of each
    /// row's norm factor; for each row and query head, how many splits of attention are in memory.
    #[must_use]
    pub const fn arrivals_len(grid: u32, rows: u32, q_heads: u32) -> usize {
        4 * grid as usize + (GRID_BARRIER_WORDS + rows * q_heads) as usize
    }

    /// Words of [`items`](Self::items) for `tiles` tiles that have at most `splits` splits each.
    #[must_use]
    pub const fn items_len(tiles: usize, kv_heads: usize, splits: usize) -> usize {
        tiles * kv_heads * splits * tile_scheduler::ITEM_WORDS as usize
    }

    /// The grid barrier's counters. Recomputed wherever it is needed: kept over the phases, it would take registers.
    #[device]
    unsafe fn grid_barriers(&self) -> GlobalMut<u32> {
        // SAFETY: the caller's word.
        unsafe { self.arrivals.at(4 * thread::opaque(thread::grid_dim_x()) as usize) }
    }

    /// Two counters of attention's pool: how many items have been asked for in this step, and how many CTAs have
    /// written their part of the pool's items.
    #[device]
    unsafe fn pool_words(&self) -> GlobalMut<u32> {
        // SAFETY: the caller's word.
        unsafe { self.grid_barriers().at(2) }
    }

    /// The words of each row's norm factor.
    #[device]
    unsafe fn factor_words(&self) -> GlobalMut<u64> {
        // SAFETY: the caller's word.
        unsafe { self.grid_barriers().at(4).cast() }
    }

    /// For each row and query head whose splits several CTAs have, how many of them are in memory.
    #[device]
    unsafe fn split_arrivals(&self) -> GlobalMut<u32> {
        // SAFETY: the caller's word.
        unsafe { self.arrivals.at((4 * thread::grid_dim_x() + GRID_BARRIER_WORDS) as usize) }
    }

    /// For each half of a split tile, how many parts have left their split-K partials. GEMMs with even and `odd`
    /// numbers have a set each.
    #[device]
    unsafe fn part_arrivals(&self, odd: u32) -> GlobalMut<u32> {
        // SAFETY: the caller's word.
        unsafe { self.arrivals.at((odd * 2 * thread::grid_dim_x()) as usize) }
    }

    /// CTA 0 zeroes [`best`](Self::best), with `threads` threads.
    ///
    /// # Safety
    /// [`best`](Self::best) is not null. The first `threads` threads of CTA 0 call it, each once, before a barrier of
    /// the grid or the launch's end stands between it and those that use it.
    #[device]
    unsafe fn zero_best(&self, threads: u32) {
        if thread::block_idx_x() == 0 {
            let mut row = thread::thread_idx_x();
            while row < MAX_BATCHED_ROWS {
                // SAFETY: the caller's word.
                unsafe { self.best.store(row as usize, 0) };
                row += threads;
            }
        }
    }

    /// One lane waits until all CTAs have done the phases before this one, and sees what they wrote. Its later copies
    /// by TMA see that, too.
    ///
    /// # Safety
    /// `phase` is a phase's number, or how many there are. CTAs arrive at the barrier behind each of their phases.
    #[device]
    unsafe fn wait_for(&self, phase: u32) {
        // SAFETY: the caller's word.
        unsafe {
            waiting::long_for_count(self.grid_barriers(), 0, phase * thread::grid_dim_x());
            bulk::fence_proxy_async_global();
        }
    }

    /// A warp [waits](Self::wait_for) until all CTAs have done the phases before `phase`. Its first lane sees what they
    /// wrote.
    ///
    /// # Safety
    /// As for [`wait_for`](Self::wait_for); all lanes of the warp call it.
    #[device]
    unsafe fn grid_barrier(&self, phase: u32) {
        if thread::lane_id() == 0 {
            // SAFETY: the caller's word.
            unsafe { self.wait_for(phase) };
        }
        warp::sync_warp();
    }

    /// What a layer's keys and values are made from, and where they go.
    ///
    /// # Safety
    /// The phase is one of attention.
    #[device]
    unsafe fn split_heads(&self, phase: Global<Phase>) -> SplitHeads {
        // SAFETY: the caller's word.
        let (k_norm, pages) = unsafe { (field!(phase, key_norm: Global<bf16>), field!(phase, pages: GlobalMut<bf16>)) };
        self.work.split_heads(k_norm, self.work.cache(pages))
    }
}

/// The consumers' positions in their rings.
#[derive(Clone, Copy)]
pub(crate) struct Rings {
    /// Weights, or pages.
    ring: Ring,
    /// Activations.
    rows: Ring,
    /// Items of attention.
    items: Ring,
}

impl Rings {
    /// One stage further in the two rings that GEMMs read.
    #[device]
    const fn ahead(&self) -> Self {
        Self { ring: self.ring.ahead(1), rows: self.rows.ahead(1), ..*self }
    }

    /// A warp releases the stages of both rings. Only `wgmma` has read them, and the warp has waited for it, so no
    /// fence is needed.
    ///
    /// # Safety
    /// All lanes of a consumer warp call it, `lane` is each one's, and the warp has waited for the products that read
    /// the two stages.
    #[device]
    unsafe fn release(&self, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            self.ring.empty().arrive_if(lane == 0);
            self.rows.empty().arrive_if(lane == 0);
        }
    }
}

/// For each kind of event, whether its count is odd. Each has one bit, so that all stay in one register over the
/// phases.
#[derive(Clone, Copy, Default)]
struct Odd(u32);

impl Odd {
    /// GEMMs.
    const GEMMS: u32 = 1;
    /// GEMMs with norm factors.
    const NORMED: u32 = 2;
    /// Exchanges within the cluster.
    const EXCHANGES: u32 = 4;

    /// 1 if the count is odd.
    #[device]
    const fn of(self, what: u32) -> u32 {
        (self.0 / what) & 1
    }

    /// Counts one more.
    #[device]
    const fn count(&mut self, what: u32) {
        self.0 ^= what;
    }
}

/// A CTA's part of a step: assigns the warps' roles.
#[device]
unsafe fn batched<F: BatchedFormat, const ROWS: u32, const TILES: usize>(p: &BatchedStep) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::declare();
        if p.work.rows.count.load(0) == 0 {
            return;
        }
        let warp_id = thread::warp_id();
        if thread::thread_idx_x() == 0 {
            Ring::init(Memory::<ROWS>::ROW_RING, WARPS);
            Ring::init(Memory::<ROWS>::ITEM_RING, WARPS);
            Ring::init(Memory::<ROWS>::RING, WARPS);
            Memory::<ROWS>::factors_ready().init(factors::WARPS);
            Memory::<ROWS>::scheduled().init(1);
            peer::init::<ROWS>();
            Ring::init(Memory::<ROWS>::MESSAGES, 1);
            bulk::fence_init();
        }
        let thread = thread::thread_idx_x();
        if thread < ROWS {
            shared::dynamic::<u32>(Memory::<ROWS>::BEST).store(thread as usize, 0);
        }
        cluster::sync_made();
        if warp_id < WARPS {
            wgmma::take_registers::<CONSUMER_REGISTERS>();
            consume::<F, ROWS, TILES>(p);
        } else {
            wgmma::give_registers::<PRODUCER_REGISTERS>();
            match warp_id - WARPS {
                0 => producer::produce::<F, ROWS>(p),
                1 => producer::produce_rows::<ROWS>(p),
                which => producer::help::<ROWS>(p, which - 2),
            }
            thread::sync_threads();
        }
    }
}

/// The consumers' role: they walk the phases.
///
/// # Safety
/// All lanes of the eight consumer warps call it, once, when the cluster has synchronised behind the barriers, and
/// these lanes have zeroed [`Memory::BEST`], which is ordered by the barrier at the head of each phase. The other warps
/// synchronise with them at the end.
#[device]
unsafe fn consume<F: BatchedFormat, const ROWS: u32, const TILES: usize>(p: &BatchedStep) {
    // SAFETY: the caller's word.
    unsafe {
        let [ring, rows, items] =
            [Memory::<ROWS>::RING, Memory::<ROWS>::ROW_RING, Memory::<ROWS>::ITEM_RING].map(Ring::consumer);
        let mut rings = Rings { ring, rows, items };
        let mut odd = Odd::default();
        // All CTAs see the zeroes after the first grid barrier. Where the head runs alone, the launch ahead has zeroed.
        if !p.best.is_null() && field!(p.phases, kind: u32) != PhaseKind::BEST {
            p.zero_best(CONSUMERS);
        }
        let mut number = 0;
        while number < p.phase_count {
            // The same branch on the first lane comes again after the barrier. The thread's number is opaque: otherwise
            // the compiler might join the branches and write the barrier twice.
            if thread::opaque(thread::thread_idx_x()) == 0 {
                p.wait_for(number);
            }
            thread::sync_named(ALL, CONSUMERS);
            let phase = p.phases.at(number as usize);
            match field!(phase, kind: u32) {
                PhaseKind::EMBED => embed(p, phase),
                PhaseKind::ATTEND => attention::attend::<ROWS>(p, phase, &mut rings),
                kind => {
                    if thread::opaque(thread::thread_idx_x()) == 0 {
                        // Zeroes the other set of counts, for the next GEMM. All CTAs are done with its counts of the
                        // GEMM before.
                        let other = p.part_arrivals(odd.of(Odd::GEMMS) ^ 1).at(2 * thread::block_idx_x() as usize);
                        other.cast::<u64>().store(0, 0);
                    }
                    let arrivals = p.part_arrivals(odd.of(Odd::GEMMS));
                    main_loop::multiply::<F, ROWS, TILES>(p, phase, kind, &mut rings, arrivals, &mut odd);
                    odd.count(Odd::GEMMS);
                    if PhaseKind::is_normed(kind) {
                        odd.count(Odd::NORMED);
                    }
                }
            }
            // All that this CTA wrote comes before its arrival at the grid barrier.
            thread::sync_named(ALL, CONSUMERS);
            if thread::opaque(thread::thread_idx_x()) == 0 {
                atomic::fetch_add(p.grid_barriers(), 0, 1, Ordering::Release, Scope::Device);
                if !p.trace.is_null() {
                    let at = thread::block_idx_x() * p.phase_count + number;
                    p.trace.store(at as usize, thread::global_timer());
                }
            }
            number = thread::opaque(number) + 1;
        }
        // Nobody in the CTA waits for a grid barrier any more. The last CTA to get here resets the counters.
        thread::sync_threads();
        if thread::opaque(thread::warp_id()) == 0 {
            let (grid, lane) = (thread::grid_dim_x(), thread::lane_id());
            let grid_barriers = p.grid_barriers();
            let mut done = 0;
            if lane == 0 {
                done = atomic::fetch_add(grid_barriers, 1, 1, Ordering::AcqRel, Scope::Device) + 1;
            }
            // After this, all lanes see what lane 0 saw.
            warp::sync_warp();
            if warp::shuffle_idx(done, 0) == grid {
                // The counters of the grid barrier, of done CTAs, of the pool and of factors; and the counts of the
                // last GEMM.
                let counts = p.part_arrivals(odd.of(Odd::GEMMS) ^ 1);
                let mut i = lane;
                while i < GRID_BARRIER_WORDS.max(2 * grid) {
                    if i < GRID_BARRIER_WORDS {
                        grid_barriers.store(i as usize, 0);
                    }
                    if i < 2 * grid {
                        counts.store(i as usize, 0);
                    }
                    i += 32;
                }
            }
        }
    }
}

/// Writes the embedding of every row, spread over the grid.
///
/// # Safety
/// All consumers of every CTA call it.
#[device]
unsafe fn embed(p: &BatchedStep, phase: Global<Phase>) {
    // SAFETY: the caller's word.
    unsafe {
        let norm = field!(phase, norm: Global<bf16>);
        let dim = p.work.residual.dim;
        let embed = p.work.embed(norm);
        // A row is cut into pieces that have an element for each consumer thread.
        let count = p.work.rows.count.load(0);
        let pieces = dim.div_ceil(CONSUMERS);
        let mut item = thread::block_idx_x();
        while item < count * pieces {
            cuda_std::assume(pieces > 0);
            let row = item / pieces;
            let i = (item - row * pieces) * CONSUMERS + thread::thread_idx_x();
            embed_elements::<true>(&embed, row, i, dim);
            item += thread::grid_dim_x();
        }
    }
}
