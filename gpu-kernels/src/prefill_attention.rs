//! Grouped-query attention for prompts: many query rows over the paged cache, on Hopper's `wgmma`.
//!
//! # Shape of the work
//! A CTA takes one query head and [`TILE_ROWS`] = 128 consecutive rows of one sequence. It walks over the keys that the
//! last of these rows sees, [`KEYS`] = 128 at a time (two pages):
//!
//! ```text
//! warpgroup 2   one lane: pages of K and of V ──────TMA──────► two stages each in shared memory
//! warpgroup 0   rows 0..64   ┐ S[64, 128 keys] = Q · Kᵀ      wgmma, both from shared memory
//! warpgroup 1   rows 64..128 ┘ P = exp2(S − max), in registers; masked keys give exact zeros
//!                              O[64, 128]     += P · V       wgmma, P from registers
//! ```
//!
//! `Q · Kᵀ` of the next keys begins before `P · V` of these: softmax runs while the tensor cores do both (Shah et al.,
//! 2024, "FlashAttention-3"; the running maximum: Milakov and Gimelshein, 2018, "Online normalizer calculation for
//! softmax").
//!
//! Two query heads of one key-value head may be a pair of CTAs (a cluster). Each CTA of the pair loads every other
//! page, and TMA puts the page into both.
//!
//! The kernel reads the cache where it lies: a page of a head is 64 rows of keys, then 64 rows of values (see
//! [`kv`](crate::kv)). One tensor map describes both, in tiles that have half of a row's dimensions. They arrive in the
//! swizzle that `wgmma` reads. It sums over the rows of keys, and over the columns of values.
//!
//! # Order
//! Keys are cut into blocks by position alone, from key 0 on, and rows do not mix. So a row's result depends on its own
//! keys alone: neither on how the prompt is cut into chunks, nor on the row's place in its tile (tested).
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses and maps are as it says. The whole CTA begins in `attend`, which
//! makes all barriers before anyone waits for one. One lane of warpgroup 2 calls `produce`. Whole warpgroups 0 and 1
//! call `consume` and what it calls. Producer and consumers take the tile's blocks of keys in the same order, and the
//! same number of them. Accumulators are the warpgroup's own, and are read when the MMAs that write them have been
//! waited for.

use cuda_std::bulk::{self, Barrier};
use cuda_std::cluster::{self, PeerBarrier};
use cuda_std::shared::{self, Shared};
use cuda_std::tensor::{self, TensorMap, swizzled};
use cuda_std::wgmma::{self, Columns, Operand};
use cuda_std::{Global, GlobalMut, bf16, dependent_launch, device, kernel, math, thread, warp};

use crate::e4m3::{self, CodedRows};
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS};
use crate::{quad, waiting};

/// Rows of a tile.
pub const TILE_ROWS: u32 = 128;
/// Keys of a block of keys.
pub const KEYS: u32 = 128;
/// Threads of a CTA.
pub const THREADS: u32 = 384;
/// Dynamic shared memory of a CTA: the queries, two stages of keys and of values, barriers.
pub const SHARED_BYTES: u32 = BARRIERS + BARRIER_COUNT * 8;

/// Threads of a warpgroup.
const GROUP: u32 = 128;
/// Rows of a warpgroup.
const GROUP_ROWS: u32 = 64;
/// Bytes of a row of half of the dimensions, as TMA loads it.
const ROW_BYTES: u32 = tensor::ROW * 2;
/// Bytes of a warpgroup's queries: two halves of the dimensions, each 64 rows of 128 bytes. The outputs take their
/// place at the end.
const QUERY_BYTES: u32 = 2 * GROUP_ROWS * ROW_BYTES;
/// Bytes of a block's keys or values: two halves of the dimensions, 128 rows each.
const STAGE_BYTES: u32 = 2 * KEYS * ROW_BYTES;
const HALF_STAGE: u32 = STAGE_BYTES / 2;
/// Stages of the ring of keys, and of that of values.
const STAGES: u32 = 2;
// Where things begin, in bytes from the start of shared memory: the queries at 0.
const KEY_STAGES: u32 = 2 * QUERY_BYTES;
const VALUE_STAGES: u32 = KEY_STAGES + STAGES * STAGE_BYTES;
const BARRIERS: u32 = VALUE_STAGES + STAGES * STAGE_BYTES;
// Numbers of barriers: a ring has one for each stage that says it is full, and one that says it is empty.
const KEY_BARRIERS: u32 = 0;
const VALUE_BARRIERS: u32 = 2 * STAGES;
const QUERIES_FULL: u32 = 4 * STAGES;
const BARRIER_COUNT: u32 = QUERIES_FULL + 1;
/// The first of two named barriers, one for each warpgroup that multiplies.
const WARPGROUP_BARRIERS: u32 = 1;
const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// Consecutive rows of one sequence: the first row, how many, the sequence, and the first row's position.
#[derive(Clone, Copy, Debug)]
struct Tile {
    row: u32,
    rows: u32,
    sequence: u32,
    position: u32,
}

/// The tiles of `rows` rows of a sequence, as [`PrefillAttention::tiles`] wants them. The first row is `row`, at
/// position `position`. Tiles have `height` rows each, at most [`TILE_ROWS`]; any height gives the same bits.
#[cfg(not(target_arch = "nvptx64"))]
pub fn tiles(row: u32, rows: u32, sequence: u32, position: u32, height: u32) -> alloc::vec::Vec<[u32; 4]> {
    let starts = (0..rows).step_by(height as usize);
    starts.map(|at| [row + at, height.min(rows - at), sequence, position + at]).collect()
}

/// The matrix that [`PrefillAttention::pages`] describes: a layer's cache of `elements` elements at `address`.
#[cfg(not(target_arch = "nvptx64"))]
#[must_use]
pub const fn pages(address: u64, elements: usize) -> tensor::Matrix {
    let rows = elements as u64 / HEAD_DIM as u64;
    // TMA need not swizzle: pages lie swizzled in memory.
    tensor::Matrix { address, rows, columns: HEAD_DIM as u64, tile_rows: PAGE_TOKENS, swizzled: false }
}

/// Parameters of [`prefill_attention`] and [`prefill_attention_2x1`]. Grid: (query heads, tiles). Shared memory:
/// [`SHARED_BYTES`]. They may be launched early ([`dependent_launch`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PrefillAttention {
    /// `[tiles, 4]`: consecutive rows of one sequence each: the first row, how many (at most [`TILE_ROWS`]), the
    /// sequence, the first row's position. 16-byte aligned. CTAs begin with the last tiles, so the tiles with the most
    /// keys belong at the end.
    pub tiles: Global<u32>,
    /// The queries, bf16 `[rows, q_heads · 128]`, in tiles of 64 rows.
    pub q: Global<TensorMap>,
    /// The layer's cache as a matrix, which [`pages`] makes. A page's keys of a head are two tiles, half of the
    /// dimensions each; its values are the next two.
    pub pages: Global<TensorMap>,
    /// The same cache, for its page tables. It has the keys and values of these rows already.
    pub cache: Cache,
    /// `[rows, q_heads · 128]`, each row in the order of [`slot`](crate::linear::slot).
    pub out: GlobalMut<bf16>,
    /// Where the output goes as codes instead, for a model whose GEMMs are e4m3: a head is a group. Null codes: it goes
    /// to `out`.
    pub codes: CodedRows,
    /// Query heads.
    pub q_heads: u32,
    /// What scores are multiplied by: 1 / √128.
    pub scale: f32,
}

/// The ring of keys or that of values: one lane fills its stages, and both warpgroups release them, in a cluster those
/// of both CTAs. (The [`ring`](crate::ring) of other kernels has one CTA, and stages that warps release.)
#[derive(Clone, Copy)]
struct BlockRing {
    stages: u32,
    barriers: u32,
    /// How many blocks of keys went through the ring before.
    block: u32,
}

impl BlockRing {
    /// # Safety
    /// The CTA has [`SHARED_BYTES`].
    #[device]
    unsafe fn of_keys() -> Self {
        // SAFETY: the caller's word.
        unsafe { Self::new(KEY_STAGES, KEY_BARRIERS) }
    }

    /// # Safety
    /// As for [`of_keys`](Self::of_keys).
    #[device]
    unsafe fn of_values() -> Self {
        // SAFETY: the caller's word.
        unsafe { Self::new(VALUE_STAGES, VALUE_BARRIERS) }
    }

    /// # Safety
    /// As for [`of_keys`](Self::of_keys). `stages` and `first_barrier` are those of keys or of values.
    #[device]
    unsafe fn new(stages: u32, first_barrier: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let barriers = shared::dynamic::<u64>(BARRIERS + first_barrier * 8);
            Self { stages: shared::dynamic::<u8>(stages).addr(), barriers: barriers.addr(), block: 0 }
        }
    }

    /// The memory of the block's stage.
    #[device]
    fn stage_buffer(&self) -> Shared<u8> {
        Shared::from_raw(self.stages + self.block % STAGES * STAGE_BYTES)
    }

    /// The barrier whose phase ends when the stage is full.
    #[device]
    fn full(&self) -> Barrier {
        Barrier::at(Shared::from_raw(self.barriers + self.block % STAGES * 8))
    }

    /// The barrier whose phase ends when the stage is empty.
    #[device]
    fn empty(&self) -> Barrier {
        Barrier::at(Shared::from_raw(self.barriers + (STAGES + self.block % STAGES) * 8))
    }

    /// Releases the stage, in every CTA whose copies land here. `free` is the first stage's `empty` barrier, in one of
    /// these CTAs; for each of them one lane of the warpgroup has `tells`.
    ///
    /// # Safety
    /// The lane's warpgroup has waited for the stage, and its MMAs that read it are done. `free` is as said above, of
    /// CTAs that are still there.
    #[device]
    unsafe fn release(&mut self, free: PeerBarrier, tells: bool) {
        // SAFETY: the caller's word.
        unsafe { free.at(self.block % STAGES).arrive_if(tells) };
        self.block += 1;
    }

    #[device]
    fn parity(&self) -> u32 {
        self.block / STAGES % 2
    }

    /// Makes the barriers, before anyone waits. The warpgroups of `cluster` CTAs release each stage.
    ///
    /// # Safety
    /// One lane of the CTA calls it, once.
    #[device]
    unsafe fn init(&self, cluster: u32) {
        let mut i = 0;
        while i < STAGES {
            let at = |place: u32| Barrier::at(Shared::from_raw(self.barriers + place * 8));
            // SAFETY: the caller's word.
            unsafe {
                at(i).init(1);
                at(STAGES + i).init(2 * cluster);
            }
            i += 1;
        }
    }

    /// Waits until the stage is full.
    ///
    /// # Safety
    /// The barriers were [made](Self::init), and the CTA has synchronised since.
    #[device]
    unsafe fn wait_full(&self) {
        // SAFETY: the caller's word.
        unsafe { waiting::for_phase(self.full(), self.parity()) }
    }

    /// Waits until the stage is free, and has its barrier expect a whole stage of bytes.
    ///
    /// # Safety
    /// As for [`wait_full`](Self::wait_full), and the lane is the one that fills. It starts copies of so many bytes
    /// next, or in a cluster its part of them.
    #[device]
    unsafe fn begin_fill(&self) {
        // SAFETY: the caller's word.
        unsafe {
            waiting::for_phase(self.empty(), self.parity() ^ 1);
            self.full().arrive_expect_tx(STAGE_BYTES);
        }
    }
}

/// `unroll!` over the 16 groups in which a lane holds scores (of 8 keys each) or outputs (of 8 dimensions each).
/// Accumulators `4 G` and `4 G + 1` belong to the lane's first row, the next two to its second.
macro_rules! groups {
    ($g:ident; $body:block) => {
        unroll!($g < 16; $body)
    };
}

/// A lane's running softmax of its two rows: the greatest score so far, and the lane's own share of the sum of weights.
#[derive(Clone, Copy)]
struct Running {
    top: [f32; 2],
    norm: [f32; 2],
}

/// Begins `S = Q · Kᵀ` in the lower accumulators, and does not wait for it.
///
/// # Safety
/// The queries and the keys are there. Nobody needs the lower accumulators, and no MMAs write them.
#[device]
unsafe fn begin_scores(queries: Operand, keys: Operand) {
    // SAFETY: the caller's word.
    unsafe {
        unroll!(I < 8; {
            // Four steps of 16 dimensions in each half.
            let (half, step) = ((I / 4) as u32, (I % 4) as u32 * 32);
            let q = queries.advance(half * (QUERY_BYTES / 2) + step);
            wgmma::mma_n128(q, keys.advance(half * HALF_STAGE + step), I != 0);
        });
        wgmma::commit();
    }
}

/// Begins `O += P · V` in the upper accumulators, and does not wait for it.
///
/// # Safety
/// The values are there, and the weights in their place. With `keep` the upper accumulators hold the outputs so far.
#[device]
unsafe fn begin_outputs(values: Shared<u8>, keep: bool) {
    // SAFETY: the caller's word.
    unsafe {
        let values = Columns::at(values, HALF_STAGE);
        unroll!(I < 8; {
            // Steps of 16 tokens.
            wgmma::mma_n128_columns::<I>(values.advance(I as u32 * 16 * ROW_BYTES), keep || I != 0);
        });
        wgmma::commit();
    }
}

/// A lane's weights of 128 keys: `[group of 8 keys][row][key]`, two keys of each group in each of its two rows.
type KeyWeights = [[[f32; 2]; 2]; 16];

/// Turns the scores of the keys from `key` on into weights. Also returns, for each of the two rows, the factor that the
/// outputs so far must be multiplied by. `limit` is the last key that each row sees; `None` if both see all of them.
///
/// # Safety
/// The lower accumulators hold the scores, and their MMAs are done. All lanes of the warp call it.
#[device]
unsafe fn weigh(running: &mut Running, scale: f32, key: u32, limit: Option<[u32; 2]>) -> (KeyWeights, [f32; 2]) {
    let mut s = [[[0f32; 2]; 2]; 16];
    groups!(G; {
        s[G] = [[wgmma::get::<{ 4 * G }>(), wgmma::get::<{ 4 * G + 1 }>()], [
            wgmma::get::<{ 4 * G + 2 }>(),
            wgmma::get::<{ 4 * G + 3 }>(),
        ]];
    });
    if let Some(limit) = limit {
        let first = key + thread::lane_id() % 4 * 2;
        groups!(G; {
            unroll!(R < 2; {
                unroll!(C < 2; {
                    if first + 8 * G as u32 + C as u32 > limit[R] {
                        s[G][R][C] = f32::NEG_INFINITY;
                    }
                });
            });
        });
    }
    let mut factors = [0f32; 2];
    unroll!(R < 2; {
        let mut top = running.top[R];
        groups!(G; {
            top = math::max(top, math::max(s[G][R][0], s[G][R][1]));
        });
        let top = quad::max(top);
        factors[R] = math::exp2((running.top[R] - top) * scale);
        running.top[R] = top;
        // Key 0 is in the first block and every row sees it, so this is finite.
        let offset = -top * scale;
        let mut norm = 0.0;
        groups!(G; {
            s[G][R] = s[G][R].map(|score| math::exp2(math::fma(score, scale, offset)));
            norm += s[G][R][0] + s[G][R][1];
        });
        running.norm[R] = math::fma(running.norm[R], factors[R], norm);
    });
    (s, factors)
}

/// Puts the weights where `P · V` takes them from. The `P · V` before is done by then: if fragments were written while
/// MMAs are under way, the assembler would serialise the MMAs.
#[device]
fn set_weights(weights: &KeyWeights) {
    groups!(G; {
        wgmma::set_fragment::<{ 2 * G }>(weights[G][0][0], weights[G][0][1]);
        wgmma::set_fragment::<{ 2 * G + 1 }>(weights[G][1][0], weights[G][1][1]);
    });
}

/// Multiplies the outputs of the lane's two rows by a factor each.
#[device]
fn scale_outputs(factors: [f32; 2]) {
    groups!(G; {
        wgmma::set::<{ 64 + 4 * G }>(wgmma::get::<{ 64 + 4 * G }>() * factors[0]);
        wgmma::set::<{ 65 + 4 * G }>(wgmma::get::<{ 65 + 4 * G }>() * factors[0]);
        wgmma::set::<{ 66 + 4 * G }>(wgmma::get::<{ 66 + 4 * G }>() * factors[1]);
        wgmma::set::<{ 67 + 4 * G }>(wgmma::get::<{ 67 + 4 * G }>() * factors[1]);
    });
}

/// One lane loads the queries, then keys and values in the order in which they are used.
///
/// # Safety
/// One lane of the CTA calls it, once. `head` is a query head, `tile` one of the launch's, and `blocks` how many blocks
/// of keys its last row sees. `queries_full` was made.
#[device]
unsafe fn produce<const CLUSTER: u32>(p: &PrefillAttention, tile: Tile, head: u32, blocks: u32, queries_full: Barrier) {
    // SAFETY: the caller's word.
    unsafe {
        cuda_std::assume(p.cache.kv_heads > 0);
        let group = p.q_heads / p.cache.kv_heads;
        cuda_std::assume(group > 0);
        let kv_head = head / group;
        tensor::acquire(p.q);
        tensor::acquire(p.pages);
        queries_full.arrive_expect_tx(2 * QUERY_BYTES);
        let queries = shared::dynamic::<u8>(0);
        unroll!(I < 4; {
            let (group, half) = (I as u32 / 2, I as u32 % 2);
            let to = queries.at((I as u32 * QUERY_BYTES / 2) as usize);
            let at = [head * HEAD_DIM + half * tensor::ROW, tile.row + group * GROUP_ROWS];
            tensor::load(to, p.q, at, queries_full);
        });
        let mut keys = BlockRing::of_keys();
        let mut values = BlockRing::of_values();
        let last_page = (tile.position + tile.rows - 1) / PAGE_TOKENS;
        // The number of a page of a head among all pages of all heads. The last block of keys may lack its second page:
        // it gets the first again, and the keys there are masked.
        let block_of = |page: u32| p.cache.block_index(tile.sequence, page.min(last_page), kv_head);
        // In a cluster this CTA loads every other page, for both CTAs.
        let rank = if CLUSTER > 1 { cluster::rank() } else { 0 };
        let load = |ring: &mut BlockRing, block: u32, kind: u32| {
            ring.begin_fill();
            let mut page = rank;
            while page < 2 {
                let row = (block_of(2 * block + page) * 2 + kind) * PAGE_TOKENS;
                unroll!(H < 2; {
                    let to = ring.stage_buffer().at((H as u32 * HALF_STAGE + page * PAGE_TOKENS * ROW_BYTES) as usize);
                    let at = [H as u32 * tensor::ROW, row];
                    if CLUSTER > 1 {
                        tensor::load_multicast(to, p.pages, at, ring.full(), (1 << CLUSTER) - 1);
                    } else {
                        tensor::load(to, p.pages, at, ring.full());
                    }
                });
                page += CLUSTER;
            }
            ring.block += 1;
        };
        let mut block = 0;
        while block <= blocks {
            if block < blocks {
                load(&mut keys, block, 0);
            }
            if block > 0 {
                load(&mut values, block - 1, 1);
            }
            block += 1;
        }
    }
}

/// The lane's quarter of the outputs of one of its rows, as four pairs of bf16. In the order of
/// [`slot`](crate::linear::slot) they lie side by side.
macro_rules! quarter_words {
    ($quarter:expr, $row:expr) => {{
        let mut words = [0; 4];
        unroll!(T < 4; {
            words[T] = math::pack_bf16(
                wgmma::get::<{ 64 + 16 * $quarter + 4 * T + 2 * $row }>(),
                wgmma::get::<{ 65 + 16 * $quarter + 4 * T + 2 * $row }>(),
            );
        });
        words
    }};
}

/// Computes the outputs of a warpgroup's 64 rows, and stores them.
///
/// # Safety
/// Warpgroups 0 and 1 call it, once, with the arguments that [`produce`] has, and with registers for the accumulators.
#[device]
unsafe fn consume<const CLUSTER: u32>(p: &PrefillAttention, tile: Tile, head: u32, blocks: u32, queries_full: Barrier) {
    // SAFETY: the caller's word.
    unsafe {
        let group = thread::warp_id() / 4;
        let (lane, warp) = (thread::lane_id(), thread::warp_id() % 4);
        let own = shared::dynamic::<u8>(group * QUERY_BYTES);
        let queries = Operand::at(own);
        let mut keys = BlockRing::of_keys();
        let mut values = BlockRing::of_values();
        // Lane `i` of a warpgroup tells CTA `i` of the cluster that a stage is free: that CTA's copies land here too.
        let in_group = thread::thread_idx_x() % GROUP;
        let peer = if CLUSTER > 1 { in_group % CLUSTER } else { 0 };
        let (keys_free, values_free) = (PeerBarrier::new(keys.empty(), peer), PeerBarrier::new(values.empty(), peer));
        let tells = in_group < CLUSTER;
        let first = tile.position + group * GROUP_ROWS;
        let row = warp * 16 + lane / 4;
        let limit = [first + row, first + row + 8];
        // Masks a block of keys if some row of the warpgroup does not see all of it.
        let masks = |block: u32| if (block + 1) * KEYS > first { Some(limit) } else { None };
        let scale = p.scale * LOG2_E;
        let mut running = Running { top: [f32::NEG_INFINITY; 2], norm: [0.0; 2] };

        waiting::for_phase(queries_full, 0);
        keys.wait_full();
        wgmma::fence();
        begin_scores(queries, Operand::at(keys.stage_buffer()));
        wgmma::wait::<0>();
        keys.release(keys_free, tells);
        let (weights, _) = weigh(&mut running, scale, 0, masks(0));
        set_weights(&weights);

        let mut block = 1;
        while block < blocks {
            keys.wait_full();
            wgmma::fence();
            begin_scores(queries, Operand::at(keys.stage_buffer()));
            values.wait_full();
            begin_outputs(values.stage_buffer(), block > 1);
            wgmma::wait::<1>();
            keys.release(keys_free, tells);
            let (weights, factors) = weigh(&mut running, scale, block * KEYS, masks(block));
            wgmma::wait::<0>();
            values.release(values_free, tells);
            scale_outputs(factors);
            set_weights(&weights);
            block += 1;
        }
        values.wait_full();
        wgmma::fence();
        begin_outputs(values.stage_buffer(), blocks > 1);
        wgmma::wait::<0>();

        let norm = running.norm.map(|own| {
            let pairs = own + warp::shuffle_xor(own, 1);
            pairs + warp::shuffle_xor(pairs, 2)
        });
        scale_outputs(norm.map(|norm| 1.0 / norm));
        if p.codes.codes.is_null() {
            put_rows(p, tile, head, own);
        } else {
            put_codes(p, tile, head);
        }
    }
}

/// Stores the outputs of a warpgroup's rows in bf16. They go through `own`, the memory of the warpgroup's queries, so
/// that stores cover whole cache lines.
///
/// # Safety
/// The warpgroup calls it for its tile, when the upper accumulators hold the outputs and nobody reads `own` any more.
#[device]
unsafe fn put_rows(p: &PrefillAttention, tile: Tile, head: u32, own: Shared<u8>) {
    // SAFETY: the caller's word.
    unsafe {
        let group = thread::warp_id() / 4;
        let (lane, warp) = (thread::lane_id(), thread::warp_id() % 4);
        let row = warp * 16 + lane / 4;
        unroll!(B < 4; {
            unroll!(R < 2; {
                let offset = swizzled((row + 8 * R as u32) * ROW_BYTES + (B as u32 % 2 * 4 + lane % 4) * 16);
                own.at((offset + B as u32 / 2 * (QUERY_BYTES / 2)) as usize).store16(0, quarter_words!(B, R));
            });
        });
        thread::sync_named(WARPGROUP_BARRIERS + group, GROUP);
        // A warp stores two rows of 256 bytes at a time.
        let (half_row, piece) = (lane / 16, lane % 16);
        let out = p.out.at((head * HEAD_DIM + piece * 8) as usize);
        unroll!(I < 8; {
            let line = warp * 16 + I as u32 * 2 + half_row;
            let row = group * GROUP_ROWS + line;
            let offset = swizzled(line * ROW_BYTES + piece % 8 * 16) + piece / 8 * (QUERY_BYTES / 2);
            let words = own.at(offset as usize).load16(0);
            if row < tile.rows {
                out.store16((tile.row + row) as usize * (p.q_heads * HEAD_DIM) as usize, words);
            }
        });
    }
}

/// Stores the outputs of a warpgroup's rows as codes, with a scale for each row.
///
/// # Safety
/// The warpgroup calls it for its tile, when the upper accumulators hold the outputs. `p` has codes.
#[device]
unsafe fn put_codes(p: &PrefillAttention, tile: Tile, head: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let group = thread::warp_id() / 4;
        let (lane, warp) = (thread::lane_id(), thread::warp_id() % 4);
        unroll!(R < 2; {
            let quarters = [quarter_words!(0, R), quarter_words!(1, R), quarter_words!(2, R), quarter_words!(3, R)];
            let mut most = 0;
            unroll!(B < 4; {
                let [a, b, c, d] = quarters[B];
                most = most.max(e4m3::largest_bits([a, b])).max(e4m3::largest_bits([c, d]));
            });
            most = most.max(warp::shuffle_xor(most, 1));
            most = most.max(warp::shuffle_xor(most, 2));
            let [scale, inverse] = e4m3::scale_of(f32::from_bits(most));
            let row = group * GROUP_ROWS + warp * 16 + lane / 4 + 8 * R as u32;
            let is_there = row < tile.rows;
            // The four lanes of a row store 32 of its codes at a time.
            let at = (tile.row + row) as usize * (p.q_heads * HEAD_DIM) as usize;
            let at = at + (head * HEAD_DIM + lane % 4 * 8) as usize;
            unroll!(B < 4; {
                let [a, b, c, d] = quarters[B];
                let codes = [e4m3::codes_of_four([a, b], inverse), e4m3::codes_of_four([c, d], inverse)];
                p.codes.codes.at(at + B * 32).cast().store_if(is_there, 0, codes);
            });
            p.codes.put_scale_if(is_there && lane % 4 == 0, tile.row + row, head * HEAD_DIM, scale);
        });
    }
}

/// What a CTA does: makes the barriers, and gives the warps their roles.
///
/// # Safety
/// All threads of every CTA call it, [`THREADS`] of each, in clusters of `CLUSTER` CTAs.
#[device]
unsafe fn attend<const CLUSTER: u32>(p: &PrefillAttention) {
    // SAFETY: the caller's word.
    unsafe {
        wgmma::declare();
        dependent_launch::allow_next();
        let head = thread::block_idx_x();
        let queries_full = Barrier::at(shared::dynamic(BARRIERS + QUERIES_FULL * 8));
        if thread::thread_idx_x() == 0 {
            queries_full.init(1);
            BlockRing::of_keys().init(CLUSTER);
            BlockRing::of_values().init(CLUSTER);
            bulk::fence_init();
        }
        if CLUSTER > 1 {
            cluster::sync_made();
        } else {
            thread::sync_threads();
        }
        dependent_launch::wait();
        let index = thread::grid_dim_y() - 1 - thread::block_idx_y();
        let [row, rows, sequence, position] = p.tiles.load16(index as usize * 4);
        let tile = Tile { row, rows, sequence, position };
        let blocks = (position + rows).div_ceil(KEYS);
        if thread::warp_id() < 8 {
            wgmma::take_registers::<240>();
            consume::<CLUSTER>(p, tile, head, blocks, queries_full);
        } else {
            wgmma::give_registers::<24>();
            if thread::warp_id() == 8 && warp::elect() {
                produce::<CLUSTER>(p, tile, head, blocks, queries_full);
            }
        }
        if CLUSTER > 1 {
            // No CTA ends while the other may still write to it.
            cluster::sync();
        }
    }
}

/// Attention of a tile of rows for a query head.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn prefill_attention(p: PrefillAttention) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { attend::<1>(&p) }
}

/// As [`prefill_attention`], with CTAs in pairs. The query heads of a key-value head must be even in number.
#[kernel(threads = THREADS, min_blocks = 1, cluster = 2)]
pub unsafe fn prefill_attention_2x1(p: PrefillAttention) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { attend::<2>(&p) }
}
