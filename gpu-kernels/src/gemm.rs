//! Linear layers for many rows: `y[row, n] = Σ_k x[row, k] · w[n, k]` on Hopper's warpgroup products, for prompts. bf16 in, f32 sums.
//!
//! # Shape of the work
//! A block of three warpgroups stays on its multiprocessor and takes tiles of [`TILE_ROWS`] = 128 rows × `N` = 128, 192 or 256 features, one
//! after another:
//!
//! ```text
//! warpgroup 2   one lane: x [128 × 64] and w [N × 64] ──────TMA──────► ring of slots in shared memory   (runs ahead, across tiles)
//! warpgroup 0   rows 0..64   ┐ wgmma m64nNk16, four a slot, sums in N/2 registers a lane;
//! warpgroup 1   rows 64..128 ┘ then the epilogue
//! ```
//!
//! Tiles go down a band of [`Gemm::band`] tile rows before they go right, so that blocks which run at the same time share rows and features in L2. In
//! the `_pair` kernels two neighbouring blocks take tiles one above the other, and each loads half of the features' tile for both. In the `_eight` kernels four
//! blocks one above the other share features, and two side by side share rows:
//!
//! ```text
//!                  features 0 .. 256      256 .. 512
//! rows   0 .. 128  block 0                block 4        rows: the one or the other loads them for both, step by step in turn
//! rows 128 .. 256  block 1                block 5
//! rows 256 .. 384  block 2                block 6
//! rows 384 .. 512  block 3                block 7        features: in each step two of the four load a half
//! ```
//!
//! Not every multiprocessor finds seven neighbours, so pairs do the rest beside them in a launch of their own ([`Beside`]).
//! What lies beyond `n` or `x` arrives as zeros.
//!
//! Heads have 128 features and are finished whole. So in the `_n192` kernels, whose blocks take one tile each, two neighbours have three times 128 features between them, and the
//! middle ones are multiplied with the upper 64 rows by one and with the lower 64 by the other:
//!
//! ```text
//! features          0 .. 128   128 .. 256   256 .. 384
//! rows  0 ..  64   └─────── block 0 ──────┘ └─ block 1 ┘     (warpgroups 0)
//! rows 64 .. 128   └─ block 0 ┘ └─────── block 1 ──────┘     (warpgroups 1)
//! ```
//!
//! Norms are fused into the products as [`norm`](crate::norm) says. Whoever finishes a tile adds up the squares of its rows while its first products run;
//! so that these are few, `add` leaves one sum for [`SPAN`] features.
//!
//! # Epilogues
//! | kernels | of the sums, times the row's factor |
//! |---|---|
//! | `gemm_qkv_*` | queries, keys and values: normalised, rotated, and put where attention reads them ([`qkv`](crate::qkv)) |
//! | `gemm_swiglu_*` | with half of the tile's features gates and half their ups: `silu(gate) · up`, bf16 |
//! | `gemm_add_*` | added to the residual stream, with what the norm that comes next wants |
//! | `gemm_plain_*` | rounded to bf16, without a factor: what others' products do, to be compared with them |
//!
//! What an epilogue reads from memory first, its lanes load into registers while products run.
//!
//! The kernels may be launched early ([`launches`]): before they wait for the launches ahead they fetch the first slots' weights.
//!
//! # Order
//! An output is one chain over k in the tensor core's accumulator, whatever tile it is in: all kernels here agree bit for bit (tested).
//!
//! # Ladder
//! 1. `linear`: 64 rows a launch, every strip reads the activations again. A third of the bandwidth, a twentieth of the tensor cores.
//! 2. This.

use cuda_std::bulk;
use cuda_std::cluster::{self, PeerBarrier};
use cuda_std::shared;
use cuda_std::tensor::{self, TensorMap};
use cuda_std::wgmma::{self, Operand};
use cuda_std::{Global, bf16, kernel, launches, thread, warp};

use crate::norm::{Norm, Residual};
use crate::qkv::SplitHeads;
use crate::ring::{Ring, Shape};

/// Rows of a tile. Whatever a kernel writes has room for whole tiles of rows; those beyond `m` are not specified.
pub const TILE_ROWS: u32 = 128;
/// Input features of a slot of the ring; the input size is a multiple of it.
pub const DEPTH: u32 = tensor::ROW;
/// Features of an output tile that are finished at a time; the output size is a multiple of it, and of 128 for `qkv` and `add`.
pub const BOX: u32 = tensor::ROW;
/// Features whose squares `add` adds up for the norm that comes next: the sums of a row stand at the beginning of its part of [`Residual::squares`].
pub const SPAN: u32 = 128;
/// Features of a tile of weights.
pub const WEIGHT_ROWS: u32 = 128;
/// Threads of a block.
pub const THREADS: u32 = 384;

/// Weight rows that a tile of `n` loads.
const fn loaded(n: u32) -> u32 {
    if n == 128 { 128 } else { 256 }
}

mod beside;
mod epilogue;

pub use beside::Beside;

use epilogue::{Add, Epilogue, Half, Next, Plain, Qkv, SwiGlu, elected, features};

const GROUP: u32 = 128;
/// Rows of a warpgroup.
const GROUP_ROWS: u32 = 64;
const X_BYTES: u32 = TILE_ROWS * DEPTH * 2;
const BOX_BYTES: u32 = GROUP_ROWS * BOX * 2;
/// TMA's, of swizzled tiles.
const BOX_ALIGNMENT: u32 = 1024;

/// Parameters of the products of this module. Grid: at most one block a multiprocessor, for `_pair` and `_eight` kernels whole clusters; for `_n192` kernels two for every 384 features of every tile of rows.
/// Shared memory: [`Gemm::shared_bytes`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Gemm {
    /// `x`, bf16 `[rows, k]`, in tiles of [`TILE_ROWS`] rows.
    pub x: Global<TensorMap>,
    /// The weights, bf16 `[n, k]`, in tiles of [`WEIGHT_ROWS`]; the gate's for `swiglu`.
    pub weight: Global<TensorMap>,
    /// The up projection's weights, likewise: `swiglu` alone.
    pub up: Global<TensorMap>,
    /// The activations, bf16 `[rows, n]` in tiles of 64 rows: `swiglu` and `plain`.
    pub out: Global<TensorMap>,
    /// What each row has yet to be divided by, if anything: `qkv` and `swiglu`. Its squares are the first [`Gemm::spans`] of a row.
    pub norm: Norm,
    /// How many of a row's sums of squares are added up: all, or those that `add` leaves.
    pub spans: u32,
    /// What heads are made with and where they go, `qkv` alone; its `qkv` is not used.
    pub heads: SplitHeads,
    /// What `add` adds to, `n` features wide.
    pub residual: Residual,
    /// `[n]` the weight of the norm that comes next: `add` alone.
    pub next_norm: Global<bf16>,
    /// Rows from here on are computed: a multiple of [`TILE_ROWS`].
    pub first_row: u32,
    /// Up to here.
    pub m: u32,
    /// Output features from here on are computed: a multiple of 128.
    pub first_feature: u32,
    /// Up to here.
    pub n: u32,
    /// Input features.
    pub k: u32,
    /// Rows of clusters' tiles in a band.
    pub band: u32,
    /// The other launch of the same product, if there is one.
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

    /// Dynamic shared memory of a block with tiles of `n` weight rows: the ring, two boxes of output for each warpgroup.
    pub const fn shared_bytes(n: u32) -> u32 {
        Self::boxes(n) + 4 * BOX_BYTES
    }
}

/// All tiles: which a block takes, and where they are.
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
        let block = thread::fresh(thread::block_idx_x());
        let together = self.together[0] * self.together[1];
        let turn = (block + self.taken * thread::fresh(thread::grid_dim_x())) / together;
        // Found again each time: kept throughout they would take registers of epilogues.
        let [rows, columns] = [0, 1].map(|i| (thread::fresh(self.end[i]) - self.first[i]).div_ceil(self.size[i]));
        if turn >= rows * columns {
            return None;
        }
        self.taken += 1;
        let in_band = self.band * columns;
        // SAFETY: there are tiles, so neither is zero; the launcher's band is not.
        unsafe { core::hint::assert_unchecked(in_band != 0) };
        let first = turn / in_band * self.band;
        let height = self.band.min(rows - first);
        // SAFETY: `first` is the first row of a band that has this tile.
        unsafe { core::hint::assert_unchecked(height != 0) };
        let within = turn % in_band;
        let (row, column) = (first + within % height, within / height);
        let place = [block % self.together[0], block % together / self.together[0]];
        let at = |i: usize, tile: u32| self.first[i] + place[i] * self.apart[i] + tile * self.size[i];
        Some((at(0, row), at(1, column)))
    }
}

/// Waits until what the launches ahead left can be read. Blocks alone have nobody beside them.
#[inline(always)]
unsafe fn wait<const DOWN: u32, const ACROSS: u32>(p: &Gemm) {
    if DOWN * ACROSS > 1 {
        unsafe { p.beside.wait() };
    } else {
        launches::wait();
    }
}

/// One lane keeps the ring full, of a block at `down` and `across` in its cluster.
#[inline(always)]
unsafe fn produce<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(
    p: &Gemm,
    tiles: Tiles,
    [down, across]: [u32; 2],
) {
    unsafe {
        let mut ring = Ring::producer(Gemm::ring(N));
        tensor::acquire(p.x);
        tensor::acquire(p.weight);
        if E::GATED {
            tensor::acquire(p.up);
        }
        // Blocks one above the other share weights, blocks side by side rows: in each step one of them loads for all.
        let load_weights = |ring: &Ring, column: u32, k: u32| {
            let full = ring.full();
            full.arrive_expect_tx(Gemm::ring(N).bytes);
            let parts = loaded(N) / WEIGHT_ROWS;
            let mut part = 0;
            while part < parts {
                if (k / DEPTH * parts + part) % DOWN == down {
                    let to = ring.slot().at((X_BYTES + part * WEIGHT_ROWS * DEPTH * 2) as usize);
                    let (map, feature) = match (E::GATED, part) {
                        (false, _) => (p.weight, column + part * WEIGHT_ROWS),
                        (true, 0) => (p.weight, column),
                        (true, _) => (p.up, column),
                    };
                    if DOWN > 1 {
                        tensor::load_multicast(to, map, [k, feature], full, ((1 << DOWN) - 1) << (across * DOWN));
                    } else {
                        tensor::load(to, map, [k, feature], full);
                    }
                }
                part += 1;
            }
        };
        let load_rows = |ring: &Ring, row: u32, k: u32| {
            if ACROSS == 1 {
                tensor::load(ring.slot(), p.x, [k, row], ring.full());
            } else if k / DEPTH % ACROSS == across {
                let all = (0..ACROSS).fold(0, |all, i| all | 1 << (i * DOWN));
                tensor::load_multicast(ring.slot(), p.x, [k, row], ring.full(), all << down);
            }
        };
        // The first slots' weights do not depend on the launches ahead.
        let mut begun = 0;
        if let Some((_, column)) = tiles.clone().next() {
            let mut ring = ring;
            while begun < Gemm::ring(N).stages.min(p.k / DEPTH) {
                load_weights(&ring, column, begun * DEPTH);
                ring = ring.ahead(1);
                begun += 1;
            }
        }
        wait::<DOWN, ACROSS>(p);
        if DOWN * ACROSS > 1 {
            p.beside.go_on();
        }
        for (row, column) in tiles {
            let mut k = 0;
            while k < p.k {
                if begun > 0 {
                    begun -= 1;
                } else {
                    ring.wait_empty();
                    load_weights(&ring, column, k);
                }
                load_rows(&ring, row, k);
                ring = ring.ahead(1);
                k += DEPTH;
            }
        }
        if DOWN * ACROSS > 1 {
            p.beside.end();
        }
    }
}

/// Begins the products of the ring's slot, which is full, and waits for those of the slot before.
#[inline(always)]
unsafe fn multiply<const WIDTH: u32>(ring: &Ring, x: Operand, weight: Operand, first: bool) {
    unsafe {
        let offset = ring.offset();
        let (x, weight) = (x.advance(offset), weight.advance(offset));
        wgmma::fence();
        unroll!(I < 4; {
            let (x, weight) = (x.advance(I as u32 * 32), weight.advance(I as u32 * 32));
            let keep = I != 0 || !first;
            if WIDTH == 256 {
                wgmma::mma_n256(x, weight, keep);
            } else {
                wgmma::mma_n128(x, weight, keep);
            }
        });
        wgmma::commit();
        wgmma::wait::<1>();
    }
}

/// A warpgroup's products: where they are in the ring, and in their tile.
struct Products<'a, const WIDTH: u32, const DOWN: u32, const ACROSS: u32> {
    p: &'a Gemm,
    tiles: Tiles,
    ring: Ring,
    /// The slot before.
    previous: Ring,
    /// What of the tile was begun.
    k: u32,
    x: Operand,
    weight: Operand,
    /// First row and feature of the tile; none after the last.
    at: Option<(u32, u32)>,
}

impl<const WIDTH: u32, const DOWN: u32, const ACROSS: u32> Products<'_, WIDTH, DOWN, ACROSS> {
    #[inline(always)]
    unsafe fn free(ring: Ring) {
        // Lane `i` of a warpgroup tells block `i` of the cluster, if its copies also land here, that a slot is free.
        let lane = thread::thread_idx_x() % GROUP;
        let blocks = DOWN * ACROSS;
        let (peer, own) = if blocks > 1 { (lane % blocks, thread::block_idx_x() % blocks) } else { (0, 0) };
        let shares = ACROSS == 1 || peer % DOWN == own % DOWN || peer / DOWN == own / DOWN;
        unsafe { PeerBarrier::new(ring.empty(), peer).arrive_if(lane < blocks && shares) }
    }

    #[inline(always)]
    unsafe fn go_on(&mut self) {
        unsafe {
            self.ring.wait_full();
            multiply::<WIDTH>(&self.ring, self.x, self.weight, false);
            // The slot before is read, the one just started is not.
            Self::free(self.previous);
            self.previous = self.ring;
            self.ring = self.ring.ahead(1);
            self.k += DEPTH;
        }
    }

    #[inline(always)]
    unsafe fn go_on_to(&mut self, k: u32) {
        while self.k < k {
            unsafe { self.go_on() };
        }
    }

    /// All that are left, and waits for them.
    #[inline(always)]
    unsafe fn end(&mut self) {
        unsafe {
            self.go_on_to(self.p.k);
            wgmma::wait::<0>();
            Self::free(self.previous);
        }
    }
}

impl<const WIDTH: u32, const DOWN: u32, const ACROSS: u32> Next for Products<'_, WIDTH, DOWN, ACROSS> {
    #[inline(always)]
    unsafe fn begin(&mut self) {
        unsafe {
            self.at = self.tiles.next();
            let some = self.at.is_some();
            // After the last tile those of a slot that was multiplied already, for nothing: if products were under way after some tiles and not after others, the
            // assembler would not let them run beside anything.
            let slot = if some { self.ring } else { self.previous };
            if some {
                slot.wait_full();
            }
            // The first slot apart: that it does not add to what was in the accumulators is a constant then, and the assembler knows that
            // epilogues have the registers of accumulators they are done with.
            multiply::<WIDTH>(&slot, self.x, self.weight, true);
            self.previous = slot;
            self.ring = slot.ahead(1);
            self.k = if some { DEPTH } else { self.p.k };
        }
    }

    #[inline(always)]
    unsafe fn step(&mut self) {
        if self.k < self.p.k {
            unsafe { self.go_on() };
        }
    }
}

/// A warpgroup multiplies what comes by `WIDTH` of the weight rows, and finishes its part of each tile.
#[inline(always)]
unsafe fn consume<E: Epilogue, const N: u32, const WIDTH: u32, const DOWN: u32, const ACROSS: u32>(
    p: &Gemm,
    tiles: Tiles,
) {
    unsafe {
        let group = thread::warp_id() / 4;
        // The first of the slot's weight rows that it multiplies.
        let from = || if WIDTH < loaded(N) { thread::fresh(thread::block_idx_x()) % 2 * WEIGHT_ROWS } else { 0 };
        let first = Operand::at(shared::dynamic::<u8>(0));
        let ring = Ring::consumer(Gemm::ring(N));
        let mut products: Products<'_, WIDTH, DOWN, ACROSS> = Products {
            p,
            tiles,
            ring,
            previous: ring,
            k: 0,
            x: first.advance(group * GROUP_ROWS * DEPTH * 2),
            weight: first.advance(X_BYTES + from() * DEPTH * 2),
            at: None,
        };
        let staging = shared::dynamic(Gemm::boxes(N) + group * 2 * BOX_BYTES);
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
            // Most of it half way: where tiles end all blocks store at once and fill their rings, and memory has enough to do.
            if WIDTH == 256 {
                products.go_on_to(p.k / 2);
            }
            if E::LAST_APART && products.tiles.clone().next().is_none() {
                let ahead = E::ahead::<WIDTH, false>(p, &half, inside, early);
                products.end();
                if inside {
                    E::finish_last::<WIDTH>(p, &half, ahead);
                }
                break;
            }
            let ahead = E::ahead::<WIDTH, true>(p, &half, inside, early);
            products.end();
            if N == 192 {
                // A block takes one.
                if inside {
                    E::finish::<WIDTH>(p, &mut half, ahead, &mut ());
                }
                break;
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

#[inline(always)]
unsafe fn gemm<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm) {
    unsafe {
        wgmma::declare();
        launches::allow_next();
        if thread::thread_idx_x() == 0 {
            // Two warpgroups free a slot, of each block that shares weights or rows.
            Ring::init(Gemm::ring(N), 2 * (DOWN + ACROSS - 1));
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
            together: if N == 192 { [1, 2] } else { [DOWN, ACROSS] },
            taken: 0,
            first: [p.first_row, p.first_feature],
            end: [p.m, p.n],
            apart: [TILE_ROWS, if N == 192 { WEIGHT_ROWS } else { features::<E>(N) }],
            size: [DOWN * TILE_ROWS, if N == 192 { 384 } else { ACROSS * features::<E>(N) }],
        };
        if thread::warp_id() < 8 {
            wgmma::take_registers::<240>();
            if N != 192 {
                consume::<E, N, N, DOWN, ACROSS>(p, tiles);
            } else if thread::warp_id() / 4 == thread::block_idx_x() % 2 {
                consume::<E, N, 256, DOWN, ACROSS>(p, tiles);
            } else {
                consume::<E, N, 128, DOWN, ACROSS>(p, tiles);
            }
        } else {
            wgmma::give_registers::<24>();
            if thread::warp_id() == 8 && warp::elect() {
                produce::<E, N, DOWN, ACROSS>(p, tiles, [rank % DOWN, rank / DOWN]);
            }
        }
        if cluster {
            // No block ends while another may still write to it.
            cluster::sync();
        }
    }
}

macro_rules! kernels {
    ($($epilogue:ty: $what:literal, in $home:literal, $($n:literal $name:ident)* $(cluster $blocks:literal = $down:literal x $across:literal $cluster:ident)*;)*) => { $(
        $(
            #[doc = concat!($what, " Tiles of ", $n, " weight rows.")]
            #[kernel(threads = THREADS, min_blocks = 1, module = $home)]
            pub unsafe fn $name(p: Gemm) {
                unsafe { gemm::<$epilogue, $n, 1, 1>(&p) }
            }
        )*
        $(
            #[doc = concat!($what, " Tiles of 256 weight rows; clusters of ", $down, " one above the other, ", $across, " side by side.")]
            #[kernel(threads = THREADS, min_blocks = 1, cluster = $blocks, module = $home)]
            pub unsafe fn $cluster(p: Gemm) {
                unsafe { gemm::<$epilogue, 256, $down, $across>(&p) }
            }
        )*
    )* };
}

kernels! {
    Qkv: "Queries, keys and values from `x · wᵀ`, sums of each row times its factor.", in "main", 128 gemm_qkv_n128 192 gemm_qkv_n192 256 gemm_qkv_n256
        cluster 2 = 2 x 1 gemm_qkv_pair cluster 8 = 4 x 2 gemm_qkv_eight;
    SwiGlu: "`out = silu(x · weightᵀ) ∘ (x · upᵀ)`, sums of each row times its factor.", in "main", 256 gemm_swiglu_n256
        cluster 2 = 2 x 1 gemm_swiglu_pair cluster 8 = 4 x 2 gemm_swiglu_eight;
    Add: "The residual stream plus `x · wᵀ`.", in "main", 128 gemm_add_n128 256 gemm_add_n256
        cluster 2 = 2 x 1 gemm_add_pair cluster 8 = 4 x 2 gemm_add_eight;
    Plain: "`out = x · wᵀ`.", in "bench", 128 gemm_plain_n128 192 gemm_plain_n192 256 gemm_plain_n256
        cluster 2 = 2 x 1 gemm_plain_pair cluster 8 = 4 x 2 gemm_plain_eight;
}
