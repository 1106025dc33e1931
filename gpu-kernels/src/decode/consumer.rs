//! What the consumers do with the chunks: GEMMs with their epilogues, and the grid barriers between them.

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod e4m3;
mod one;
mod outputs;

use core::marker::PhantomData;
use core::ops::Range;

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, bf16, bulk, mma, shared, thread, warp};

use super::producer::Units;
use super::{ARRIVALS, BEST, CHUNK_FEATURES, DecodeStep, FACTORS, Mark, Matrix, N_TILES, RING, SCRATCH, WARPS, Walk};
use crate::attention::Divisor;
use crate::embedding::{embed_each, embed_elements};
use crate::linear::{K_PARTIALS, N_TILE, SLICE};
use crate::norm::Norm;
use crate::ring::Ring;
use crate::step::MAX_DECODE_ROWS;
use crate::waiting;
use crate::weights::{FragmentFormat, WeightFormat, WeightFragments};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub use e4m3::OfCodes;
pub use one::{ONE_BYTES, factors};
pub use outputs::pair_with_next;
use outputs::{Addend, Output};

/// Bytes of the partial sums of a wave, `[n_tile][k_partial][row][feature]`.
pub const PARTIAL_BYTES: u32 = N_TILES * K_PARTIALS * MAX_DECODE_ROWS * N_TILE * 4;

/// The consumers' state; of rows that are [so](super::CHAIN) to each other.
pub struct Consumer<'a, const ROWS: u8> {
    pub p: &'a DecodeStep,
    /// Rows.
    pub count: u32,
    /// The first sequence flag of the step's [words](crate::exchange).
    pub flag: u32,
    /// Which of two places partial sums of one row go to.
    turn: u32,
    pub ring: Ring,
    rows: Divisor,
    walk: Walk,
}

/// The 8 consumer warps of a block meet.
#[inline(always)]
pub fn sync() {
    thread::sync_named(1, WARPS * 32);
}

/// Gives a chunk back, for the whole warp, by the lanes that are told to. TMA must not overwrite what is still being
/// read: without the fence it did.
#[inline(always)]
unsafe fn release(chunk: Ring, arrives: bool) {
    // SAFETY: the caller's word.
    unsafe {
        bulk::fence_proxy_async();
        warp::sync_warp();
        if arrives {
            chunk.empty().arrive();
        }
    }
}

/// What falls to a warp: of the GEMMs' [split-K partials](crate::linear#order) the one numbered `k_split`, whose slices
/// of a chunk are `k_split` and `k_split + 4`. A split-K partial's two warps, one of each half of the block, deal
/// N-tiles between them if rows are one tile of 8, or fragments are [costly](FragmentFormat::COSTLY), or else the two
/// tiles.
#[derive(Clone, Copy)]
struct Duty<F, const TILES: usize> {
    lane: u32,
    warp_id: u32,
    format: PhantomData<F>,
}

/// Where an N-tile's part of a turn lies.
#[derive(Clone, Copy)]
struct Tile {
    stage: Ring,
    /// Which of the stage's chunks it is.
    chunk: u32,
    /// Whether the stage is done with when it has been read.
    ends: bool,
}

/// The N-tile that a warp multiplies next, and the one behind it.
struct Ready {
    weights: WeightFragments,
    tile: Tile,
    behind: Tile,
    /// Whether the stage of the one behind has been seen to be full.
    is_full: bool,
}

/// N-tiles of a warp, of a number that is found out as it goes.
const ANY: usize = 0;

/// A lane's fragments of activations for a split-K partial's instructions of a chunk, `[slice][half of a slice]`: two
/// instructions' each.
type Columns = [[[u32; 4]; 2]; 2];

/// The `i`-th instruction's.
#[inline(always)]
const fn columns_of(columns: &Columns, i: usize) -> [u32; 2] {
    let words = &columns[i / 4][i / 2 % 2];
    [words[i % 2 * 2], words[i % 2 * 2 + 1]]
}

impl<F: FragmentFormat, const TILES: usize> Duty<F, TILES> {
    /// Whether a split-K partial's warps deal N-tiles.
    const BY_N_TILES: bool = TILES == 1 || F::COSTLY;
    /// Tiles of rows of a warp.
    const OWN_TILES: usize = if Self::BY_N_TILES { TILES } else { 1 };
    /// Most N-tiles of a warp.
    const OWN_N_TILES: usize = if Self::BY_N_TILES { N_TILES as usize / 2 } else { N_TILES as usize };
    /// Lanes of a warp that give a chunk back: it takes [`WARPS`] arrivals, and if it is a half's alone, only four
    /// warps read it.
    const ARRIVALS: u32 = if Self::BY_N_TILES { 2 } else { 1 };

    /// This warp's.
    #[inline(always)]
    fn new() -> Self {
        Self {
            lane: thread::opaque(thread::lane_id()),
            warp_id: thread::opaque(thread::warp_id()),
            format: PhantomData,
        }
    }

    /// The number of its split-K partial.
    #[inline(always)]
    const fn k_split(&self) -> u32 {
        self.warp_id % K_PARTIALS
    }

    /// The half of the block that it belongs to.
    #[inline(always)]
    const fn half(&self) -> u32 {
        self.warp_id / K_PARTIALS
    }

    /// The first row.
    #[inline(always)]
    const fn first_row(&self) -> u32 {
        if Self::BY_N_TILES { 0 } else { 8 * self.half() }
    }

    /// Its `s`-th N-tile of the block's.
    #[inline(always)]
    const fn n_tile(&self, s: u32) -> u32 {
        if Self::BY_N_TILES { 2 * s + self.half() } else { s }
    }

    /// How many of the block's N-tiles are its.
    #[inline(always)]
    const fn n_tiles(&self, mine: u32) -> u32 {
        if Self::BY_N_TILES { (mine + 1 - self.half()) / 2 } else { mine }
    }

    /// Its weights of a chunk, once that is there. A barrier tells a phase from the next alone, and the stage's chunk
    /// before this one may have been the other half's, for which this warp did not wait. It came: this warp had one of
    /// the last three chunks, or met the block since, and the producer has no more than 9 under way.
    #[inline(always)]
    unsafe fn load(&self, p: &DecodeStep, stage: &Ring) -> WeightFragments {
        // SAFETY: the caller's word.
        unsafe {
            stage.wait_likely_full();
            F::load(p, (stage, 0), self.k_split(), self.lane, |_| {})
        }
    }

    /// Whether a stage is done with when its chunk of a turn of `depth` has been read.
    #[inline(always)]
    const fn ends_stage(turn: u32, depth: u32) -> bool {
        F::CHUNKS == 1 || turn % F::CHUNKS + 1 == F::CHUNKS || turn + 1 == depth
    }

    /// Stages from one turn's first to the next one's.
    #[inline(always)]
    const fn stages(turn: u32, part: &Part) -> u32 {
        if Self::ends_stage(turn, part.depth) { part.mine } else { 0 }
    }

    /// Its `s`-th N-tile of a turn whose first stage is the ring's next.
    #[inline(always)]
    fn tile(&self, part: &Part, (ring, turn): (Ring, u32), s: u32) -> Tile {
        let ends = Self::ends_stage(turn, part.depth);
        Tile { stage: ring.ahead(self.n_tile(s)), chunk: turn % F::CHUNKS, ends }
    }

    /// If fragments are costly, those of the first N-tile of a part, whose first stage is the ring's next:
    /// [`costly`](Self::costly) has the next ones ready when it multiplies.
    #[inline(always)]
    unsafe fn begin(&self, p: &DecodeStep, ring: &Ring, part: &Part) -> Ready {
        let own = self.n_tiles(part.mine);
        let tile = self.tile(part, (*ring, 0), 0);
        let behind = if own > 1 {
            self.tile(part, (*ring, 0), 1)
        } else {
            self.tile(part, (ring.ahead(Self::stages(0, part)), 1), 0)
        };
        let mut ready = Ready { weights: [[0; 4]; 8], tile, behind, is_full: false };
        if F::COSTLY && own > 0 {
            // SAFETY: the caller's word.
            unsafe {
                ready.weights = self.load(p, &tile.stage);
                self.release_loaded(&tile);
            }
        }
        ready
    }

    /// Gives a stage back that ends with this N-tile, whose fragments are there, if they were made in the stage.
    #[inline(always)]
    unsafe fn release_loaded(&self, tile: &Tile) {
        if F::IN_PLACE {
            // SAFETY: the caller's word.
            unsafe { release(tile.stage, self.lane < Self::ARRIVALS && tile.ends) }
        }
    }

    /// Gives a stage back that ends with this N-tile, the `S`-th, which was multiplied, unless that is done.
    #[inline(always)]
    unsafe fn release_multiplied<const S: usize>(&self, tile: &Tile, acc: &[[f32; 4]; N_TILES as usize]) {
        if !F::IN_PLACE {
            let last = acc[S * Self::OWN_TILES + Self::OWN_TILES - 1];
            // SAFETY: the caller's word.
            unsafe { tile.stage.release_behind(last[0], self.lane < Self::ARRIVALS && tile.ends) }
        }
    }

    /// Adds the GEMMs of instruction `i` of an N-tile's fragments to the accumulators of its `s`-th N-tile.
    #[inline(always)]
    fn multiply(
        acc: &mut [[f32; 4]; N_TILES as usize],
        weights: &WeightFragments,
        columns: &[Columns; TILES],
        (s, i): (usize, usize),
    ) {
        unroll!(T < (Self::OWN_TILES) of 2; {
            let sum = &mut acc[s * Self::OWN_TILES + T];
            *sum = mma::m16n8k16_bf16(*sum, weights[i], columns_of(&columns[T], i));
        });
    }

    /// Brings the accumulators of the next of `own` N-tiles to the front: after so many times each is where it was.
    #[inline(always)]
    fn rotate(acc: &mut [[f32; 4]; N_TILES as usize], own: u32) {
        unroll!(T < (Self::OWN_TILES) of 2; {
            let first = acc[T];
            unroll!(S < 4; {
                let next = if S < 3 { acc[(S + 1) % 4 * Self::OWN_TILES + T] } else { first };
                acc[S * Self::OWN_TILES + T] = if S as u32 + 1 == own { first } else { next };
            });
        });
    }

    /// Multiplies the fragments that are ready, of its `S`-th N-tile. Meanwhile those of the one behind it are made;
    /// behind that comes `next`.
    #[inline(always)]
    unsafe fn costly_step<const S: usize>(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        columns: &[Columns; TILES],
        ready: &mut Ready,
        next: Tile,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let Ready { weights, tile, behind, is_full } = *ready;
            if !is_full {
                behind.stage.wait_likely_full();
            }
            let mut is_full = false;
            ready.weights = F::load(p, (&behind.stage, behind.chunk), self.k_split(), self.lane, |i| {
                Self::multiply(acc, &weights, columns, (S, i));
                if i == 4 {
                    // Asked now, since an answer takes its time.
                    is_full = next.stage.is_full();
                }
            });
            self.release_multiplied::<S>(&tile, acc);
            self.release_loaded(&behind);
            (ready.tile, ready.behind, ready.is_full) = (behind, next, is_full);
        }
    }

    /// Multiplies the fragments of the last N-tile of a part.
    #[inline(always)]
    unsafe fn costly_end<const S: usize>(
        &self,
        acc: &mut [[f32; 4]; N_TILES as usize],
        columns: &[Columns; TILES],
        ready: &Ready,
    ) {
        unroll!(I < 8; {
            Self::multiply(acc, &ready.weights, columns, (S, I));
        });
        // SAFETY: the caller's word.
        unsafe { self.release_multiplied::<S>(&ready.tile, acc) }
    }

    /// [`turn`](Self::turn) by turn of fragments that are costly; `columns` gives each turn's. `ready` is of the first
    /// turn's first N-tile, and then of the turn behind the last, unless that was the part's last.
    #[inline(always)]
    unsafe fn costly(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            // The numbers that most shapes have. What depends on one is decided here, and not in each turn.
            match self.n_tiles(thread::opaque(part.mine)) {
                1 if F::CHUNKS == 2 => self.costly_stages(p, acc, (ring, part, turns), columns, ready),
                1 => self.costly_of::<1>(p, acc, (ring, part, turns), columns, ready),
                2 => self.costly_of::<2>(p, acc, (ring, part, turns), columns, ready),
                4 => self.costly_of::<4>(p, acc, (ring, part, turns), columns, ready),
                _ => self.costly_of::<ANY>(p, acc, (ring, part, turns), columns, ready),
            }
        }
    }

    /// The same of `OWN` N-tiles, or of any number.
    #[inline(always)]
    unsafe fn costly_of<const OWN: usize>(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        mut columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let depth = part.depth;
            let mut turn = turns.start;
            while turn < turns.end {
                let columns = columns(turn);
                let (here, then) = ((*ring, turn), (ring.ahead(Self::stages(turn, part)), turn + 1));
                if OWN == ANY {
                    self.costly_turn(p, acc, (part, here, then), &columns, ready);
                }
                unroll!(S < OWN of 4; {
                    let next = if S + 2 < OWN {
                        self.tile(part, here, S as u32 + 2)
                    } else if OWN > 1 {
                        self.tile(part, then, (S + 2 - OWN) as u32)
                    } else {
                        self.tile(part, (then.0.ahead(Self::stages(turn + 1, part)), turn + 2), 0)
                    };
                    if S + 1 < OWN || turn + 1 < depth {
                        self.costly_step::<S>(p, acc, &columns, ready, next);
                    } else {
                        self.costly_end::<S>(acc, &columns, ready);
                    }
                });
                *ring = then.0;
                turn += 1;
            }
        }
    }

    /// The same of one N-tile, where a stage has the chunks of two turns: a stage at a time, so that there is less to
    /// ask, to find out and to give back. `turns` begins with a stage.
    #[inline(always)]
    unsafe fn costly_stages(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        mut columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let depth = part.depth;
            let mut turn = turns.start;
            while turn < turns.end {
                let first = columns(turn);
                let stage = ring.ahead(self.n_tile(0));
                *ring = ring.ahead(part.mine);
                let next = ring.ahead(self.n_tile(0));
                ready.tile = Tile { stage, chunk: 0, ends: true };
                if turn + 1 == depth {
                    self.costly_end::<0>(acc, &first, ready);
                    break;
                }
                let mut is_full = false;
                let lower = ready.weights;
                let upper = F::load(p, (&stage, 1), self.k_split(), self.lane, |i| {
                    Self::multiply(acc, &lower, &first, (0, i));
                    if i == 4 {
                        // Asked now, since an answer takes its time.
                        is_full = next.is_full();
                    }
                });
                let second = columns(turn + 1);
                turn += 2;
                if turn == depth {
                    ready.weights = upper;
                    self.costly_end::<0>(acc, &second, ready);
                    break;
                }
                if !is_full {
                    next.wait_likely_full();
                }
                ready.weights = F::load(p, (&next, 0), self.k_split(), self.lane, |i| {
                    Self::multiply(acc, &upper, &second, (0, i));
                });
                self.release_multiplied::<0>(&ready.tile, acc);
            }
        }
    }

    /// A turn of any number of such N-tiles, in one loop.
    #[inline(always)]
    unsafe fn costly_turn(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (part, here, then): (&Part, (Ring, u32), (Ring, u32)),
        columns: &[Columns; TILES],
        ready: &mut Ready,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let own = self.n_tiles(thread::opaque(part.mine));
            let last = then.1 == part.depth;
            let mut s = 0;
            while s < if last { own.saturating_sub(1) } else { own } {
                thread::keep_rolled();
                let next = if s + 2 < own { self.tile(part, here, s + 2) } else { self.tile(part, then, s + 2 - own) };
                self.costly_step::<0>(p, acc, columns, ready, next);
                Self::rotate(acc, own);
                s += 1;
            }
            if last && own > 0 {
                self.costly_end::<0>(acc, columns, ready);
                Self::rotate(acc, own);
            }
        }
    }

    /// The GEMMs of a turn, whose chunks are in the ring's next stages: adds those of its own `s`-th N-tile to
    /// `acc[s]`, or of more tiles of rows to those from `acc[s · tiles]` on. For fragments that are not costly.
    #[inline(always)]
    unsafe fn turn(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part): (&mut Ring, &Part),
        columns: &[Columns; TILES],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let mine = part.mine;
            // Found again for each turn: conditions kept over all turns crowd out others.
            let own = self.n_tiles(thread::opaque(mine));
            // Two N-tiles at a time, where there are: of a split-K partial of GEMMs each waits for the one before it.
            unroll!(P < (2 * TILES) of 4; {
                let s = 2 * P;
                let chunk = ring.ahead(self.n_tile(s as u32));
                if s as u32 + 1 < own {
                    let next = ring.ahead(self.n_tile(s as u32 + 1));
                    let (low, high) = (self.load(p, &chunk), self.load(p, &next));
                    release(if self.lane < Self::ARRIVALS { chunk } else { next }, self.lane < 2 * Self::ARRIVALS);
                    unroll!(I < 8; {
                        let b = columns_of(&columns[0], I);
                        acc[s] = mma::m16n8k16_bf16(acc[s], low[I], b);
                        acc[s + 1] = mma::m16n8k16_bf16(acc[s + 1], high[I], b);
                    });
                } else if (s as u32) < own {
                    let a = self.load(p, &chunk);
                    release(chunk, self.lane < Self::ARRIVALS);
                    unroll!(I < 8; {
                        acc[s] = mma::m16n8k16_bf16(acc[s], a[I], columns_of(&columns[0], I));
                    });
                }
            });
            *ring = ring.ahead(mine);
        }
    }
}

/// Where a partial sum lies among a split-K partial's `[row][feature]`: such that neither the stores of a tensor core's
/// layout nor the loads of whole rows meet a bank of shared memory twice.
#[inline(always)]
const fn slot(row: u32, feature: u32) -> u32 {
    (row ^ (row >> 1 & 1)) * N_TILE + (feature ^ ((row >> 2 & 1) * 8))
}

impl<'a, const ROWS: u8> Consumer<'a, ROWS> {
    #[inline(always)]
    pub fn new(p: &'a DecodeStep, count: u32, flag: u32) -> Self {
        let ring = Ring::consumer(RING);
        let (rows, walk) = (Divisor::new(count), Walk::new(thread::grid_dim_x()));
        Self { p, count, flag, turn: 0, ring, rows, walk }
    }

    /// The position of the first row; the others follow it, or have the slots that do.
    #[inline(always)]
    pub fn first_position(&self) -> u32 {
        // SAFETY: left there before the roles parted.
        unsafe { Units::last() + 1 - self.count }
    }

    /// All layers and the head. Activations come to registers `GROUP` turns at a time: while those of one group are in
    /// use, those of the next are under way. `ONE` row is exchanged with other blocks as [words with a sequence
    /// flag](crate::exchange), others through memory with grid barriers.
    #[inline(always)]
    pub unsafe fn run<F: WeightFormat, const TILES: usize, const GROUP: usize, const ONE: bool>(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            self.mark(Mark::Begin);
            self.embed::<ONE>();
            self.mark(Mark::Embedded);
            if !ONE {
                self.grid_barrier();
            }
            let mut index = 0;
            let mut part = self.part::<F>(index, 0);
            let mut old = if ONE { Default::default() } else { self.first_addends(&part) };
            let mut first = if ONE { self.first_of_one(&part) } else { Default::default() };
            loop {
                let (matrix, layer) = (self.p.matrix(index), index / 4);
                match (ONE, F::OTHER_HEAD && matrix == Matrix::Head) {
                    (true, false) => F::Products::of_one(self, part, first),
                    (true, true) => <F::Head as WeightFormat>::Products::of_one(self, part, first),
                    (false, false) => F::Products::of_some::<ROWS, TILES, GROUP>(self, part, old),
                    (false, true) => {
                        <F::Head as WeightFormat>::Products::of_some::<ROWS, TILES, GROUP>(self, part, old);
                    }
                }
                self.mark(match self.p.matrix(thread::opaque(index)) {
                    Matrix::Qkv => Mark::Qkv,
                    Matrix::Output => Mark::Output,
                    Matrix::GateUp => Mark::GateUp,
                    Matrix::Down => Mark::Down,
                    Matrix::Head => Mark::Head,
                });
                index += 1;
                if index == self.p.matrices() {
                    break;
                }
                if ONE {
                    if matrix == Matrix::Qkv {
                        // Scratch memory is free.
                        sync();
                        self.attention::<1, true>(layer, Units::load());
                    }
                    part = self.part::<F>(index, 0);
                    first = self.first_of_one(&part);
                    continue;
                }
                // Between arrival and wait comes what needs nothing of this phase from the other blocks.
                self.arrive();
                if matrix == Matrix::Qkv {
                    let units = self.before_attention(layer);
                    self.wait();
                    if TILES == 1 {
                        self.attention::<4, false>(layer, units);
                    } else {
                        self.attention::<8, false>(layer, units);
                    }
                    self.arrive();
                } else if matrix == Matrix::Output {
                    self.append(layer);
                }
                // Nobody writes any more what the first outputs will be added to; and the weight of a norm comes from
                // far.
                part = self.part::<F>(index, 0);
                old = self.first_addends(&part);
                self.wait();
            }
            if ONE {
                sync();
                one::ask_for_factor(0);
            }
            let row = thread::thread_idx_x();
            if row < self.count {
                let best = self.p.counters.at(DecodeStep::BEST).cast::<u64>();
                let here = shared::dynamic::<u64>(BEST).load(row as usize);
                atomic::fetch_max(best, row as usize, here, Ordering::Relaxed, Scope::Device);
            }
            if ONE {
                self.use_up_flags();
            }
        }
    }

    /// Notes the time, where a trace was asked for.
    #[inline(always)]
    pub unsafe fn mark(&self, mark: Mark) {
        // SAFETY: the caller's word.
        unsafe {
            if !self.p.trace.is_null() && thread::opaque(thread::thread_idx_x()) == 0 {
                let len = DecodeStep::trace_len(self.p.layer_count);
                let trace = self.p.trace.at((thread::block_idx_x() * len) as usize);
                let marks = trace.load(0) + 1;
                trace.store(marks as usize, thread::global_timer() & !0 >> 8 | (mark as u64) << 56);
                trace.store(0, marks);
            }
        }
    }

    /// Waits until the consumers of every block are here, and shows each what the others wrote.
    #[inline(always)]
    pub unsafe fn grid_barrier(&self) {
        // SAFETY: the caller's word.
        unsafe {
            self.arrive();
            self.wait();
        }
    }

    /// Tells the other blocks that this one is here, with all that it wrote. The block's consumers have met when it
    /// returns.
    #[inline(always)]
    unsafe fn arrive(&self) {
        // SAFETY: the caller's word.
        unsafe {
            sync();
            // Found again, here and where else one thread acts for the block: kept over the whole step, it would crowd
            // out what GEMMs need.
            if thread::opaque(thread::thread_idx_x()) == 0 {
                atomic::fetch_add(self.p.counters, 0, 1, Ordering::Release, Scope::Device);
            }
        }
    }

    /// [`wait_for_all`](Self::wait_for_all), with a mark.
    #[inline(always)]
    unsafe fn wait(&self) {
        // SAFETY: the caller's word.
        unsafe {
            self.wait_for_all();
            self.mark(Mark::GridBarrier);
        }
    }

    /// Waits until every block has arrived.
    #[inline(always)]
    unsafe fn wait_for_all(&self) {
        // SAFETY: the caller's word.
        unsafe {
            if thread::opaque(thread::thread_idx_x()) == 0 {
                let arrivals = shared::dynamic::<u32>(ARRIVALS);
                let all = arrivals.load(0) + thread::grid_dim_x();
                arrivals.store(0, all);
                waiting::for_count(self.p.counters, 0, all);
            }
            sync();
        }
    }

    /// The embedding of every row, spread over the grid.
    #[inline(always)]
    unsafe fn embed<const ONE: bool>(&self) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            if p.eagle.is_wanted() {
                return;
            }
            let norm = p.input_norm(0);
            let embed = p.work.embed(norm);
            let grid = self.walk.grid;
            cuda_std::assume(grid > 0);
            let stride = grid * WARPS * 32;
            let mut row = 0;
            while row < self.count {
                // Of another row, other blocks take the beginning.
                let block = (thread::block_idx_x() + row * (p.work.residual.dim / (WARPS * 32))) % grid;
                let first = block * (WARPS * 32);
                // A row's token is not waited for where none of its elements are made.
                if first < p.work.residual.dim {
                    let first = first + thread::thread_idx_x();
                    if ONE {
                        embed_each(&embed, row, first, stride, |weight, i, x| self.put_words(0, i, weight, x, true));
                    } else {
                        embed_elements::<false>(&embed, row, first, stride);
                    }
                    if p.taps.are_wanted() {
                        let at = (self.sequence(row), self.slot(row));
                        embed_each(&embed, row, first, stride, |_, i, x| p.taps.put(at, 0, i, x));
                    }
                }
                row += 1;
            }
        }
    }

    /// The input of a matrix: its first row, and the norm that it has yet to be divided by.
    #[inline(always)]
    fn input(&self, matrix: Matrix) -> (Global<bf16>, Norm) {
        let p = self.p;
        match matrix {
            Matrix::Output => (p.work.attended.read(), Norm::default()),
            Matrix::Down => (p.work.activation.read(), Norm::default()),
            Matrix::Qkv if p.eagle.is_wanted() => (p.eagle.pairs, Norm::default()),
            Matrix::Qkv | Matrix::GateUp | Matrix::Head => (p.work.residual.scaled.read(), p.work.norm()),
        }
    }

    /// This block's part of the next wave, over the matrix at `index` from `first_n_tile` on.
    #[inline(always)]
    fn part<F: WeightFormat>(&mut self, index: u32, first_n_tile: u32) -> Part {
        let (grid, block) = (self.walk.grid, thread::block_idx_x());
        let matrix = self.p.matrix(index);
        let (n_tiles, k) = self.p.shape(matrix);
        let inputs = if F::OTHER_HEAD && matrix == Matrix::Head { F::Head::INPUTS } else { F::INPUTS };
        let wave = self.walk.wave(n_tiles - first_n_tile, k.div_ceil(inputs));
        let place = wave.place(block, grid);
        let (mine, end) = (wave.mine(place, grid), first_n_tile + wave.n_tiles);
        Part { matrix, index, first_n_tile, end, depth: wave.depth, place, mine }
    }

    /// A GEMM over all its waves, of which this is the first, and what becomes of its outputs; `old` is what the first
    /// of them are added to.
    #[inline(always)]
    unsafe fn gemm<F: FragmentFormat, const TILES: usize, const GROUP: usize>(
        &mut self,
        mut part: Part,
        mut old: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let matrix = part.matrix;
            // What follows from these is found again for each matrix, not kept over all layers in registers.
            let duty = Duty::<F, TILES>::new();
            let Duty { lane, warp_id, .. } = duty;
            let (g, t) = (lane / 4, lane % 4);
            let scale = F::scale(self.p, part.index);
            cuda_std::assume(self.count > 0);
            let (n_tiles, k) = self.p.shape(matrix);
            cuda_std::assume(k > 0);
            let (x, norm) = self.input(matrix);
            let count = self.count;
            let first_feature = duty.k_split() * SLICE + t * 8;
            // Columns without a row compute the last row again, which nobody reads.
            let mut first_of_row = [0; TILES];
            unroll!(T < (Duty::<F, TILES>::OWN_TILES) of 2; {
                first_of_row[T] = (duty.first_row() + 8 * T as u32 + g).min(count - 1) * k;
            });
            // This warp's slices of its rows in a group of turns. Beyond the end of a row the weights are zero, and any
            // of its elements will do: there is no condition on a load.
            let fetch = |turn: u32| {
                let mut b: [[Columns; TILES]; GROUP] = [[[[[0; 4]; 2]; 2]; TILES]; GROUP];
                unroll!(A < GROUP of 4; {
                    unroll!(C < 2; {
                        let feature = (turn + A as u32) * CHUNK_FEATURES + C as u32 * (K_PARTIALS * SLICE) + first_feature;
                        let feature = if feature < k { feature } else { t * 8 };
                        unroll!(T < (Duty::<F, TILES>::OWN_TILES) of 2; {
                            let x = x.at((first_of_row[T] + feature) as usize);
                            b[A][T][C] = [x.load16(0), x.load16(32)];
                        });
                    });
                });
                b
            };
            let mut ring = self.ring;
            loop {
                let mut b = fetch(0);
                let mut acc = [[0f32; 4]; N_TILES as usize];
                let normed = part.first_n_tile == 0 && !norm.squares.is_null() && warp_id < count;
                let mut squares = [0f32; TILES];
                if normed {
                    let mut rows = [0; TILES];
                    unroll!(T < TILES of 2; {
                        rows[T] = (warp_id + T as u32 * WARPS).min(count - 1);
                    });
                    squares = norm.lane_squares(rows);
                }
                let mut turn = 0;
                if F::COSTLY {
                    let mut ready = duty.begin(self.p, &ring, &part);
                    let columns = |turn: u32| {
                        let next = fetch(turn + 1);
                        if normed && turn == 1 {
                            self.put_factors(norm, squares, lane, warp_id);
                        }
                        core::mem::replace(&mut b, next)[0]
                    };
                    turn = part.depth;
                    duty.costly(self.p, &mut acc, (&mut ring, &part, 0..turn), columns, &mut ready);
                    if normed && turn == 1 {
                        self.put_factors(norm, squares, lane, warp_id);
                    }
                }
                while turn < part.depth {
                    // A warp counts its loads under way; it cannot wait for the older ones alone. So they come in
                    // groups.
                    let next = fetch(turn + GROUP as u32);
                    unroll!(A < GROUP of 4; {
                        let turn = turn + A as u32;
                        if turn < part.depth {
                            duty.turn(self.p, &mut acc, (&mut ring, &part), &b[A]);
                        }
                    });
                    if normed && turn == 0 {
                        self.put_factors(norm, squares, lane, warp_id);
                    }
                    b = next;
                    turn += GROUP as u32;
                }
                self.epilogue::<F, TILES>(&acc, &part, scale, old);
                if part.end == n_tiles {
                    break;
                }
                part = self.part::<F>(part.index, part.end);
                old = self.first_addends(&part);
            }
            self.ring = ring;
        }
    }

    /// Puts a warp's rows' norm factors where all find them after they next meet.
    #[inline(always)]
    unsafe fn put_factors<const TILES: usize>(&self, norm: Norm, squares: [f32; TILES], lane: u32, warp_id: u32) {
        // SAFETY: the caller's word.
        unsafe {
            unroll!(T < TILES of 2; {
                let (row, factor) = (warp_id + T as u32 * WARPS, norm.inverse_rms_of(squares[T]));
                if lane == 0 && row < self.count {
                    shared::dynamic::<f32>(FACTORS).store(row as usize, factor);
                }
            });
        }
    }

    /// Adds the split-K partials' sums, and puts them where they belong.
    #[inline(always)]
    unsafe fn epilogue<F: FragmentFormat, const TILES: usize>(
        &self,
        acc: &[[f32; 4]; N_TILES as usize],
        part: &Part,
        scale: f32,
        ahead: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            if part.mine == 0 {
                return;
            }
            // Found again: kept from before the GEMM, addresses would crowd out accumulators.
            let duty = Duty::<F, TILES>::new();
            let lane = duty.lane;
            let (g, t) = (lane / 4, lane % 4);
            // `[n_tile][k_partial][row][feature]`
            let partial = shared::dynamic::<f32>(SCRATCH);
            let k_partial_words = TILES as u32 * 8 * N_TILE;
            unroll!(S < (Duty::<F, TILES>::OWN_N_TILES) of 8; {
                if (S as u32) < duty.n_tiles(part.mine) {
                    let to = partial.at(((duty.n_tile(S as u32) * K_PARTIALS + duty.k_split()) * k_partial_words) as usize);
                    unroll!(T < (Duty::<F, TILES>::OWN_TILES) of 2; {
                        unroll!(E < 4; {
                            let row = duty.first_row() + 8 * T as u32 + 2 * t + E as u32 % 2;
                            if row < self.count {
                                let sum = acc[S * Duty::<F, TILES>::OWN_TILES + T][E];
                                to.store(slot(row, g + E as u32 / 2 * 8) as usize, sum);
                            }
                        });
                    });
                }
            });
            self.put_sums::<{ K_PARTIALS as usize }>(part, k_partial_words, scale, ahead);
        }
    }

    /// Adds `PARTIALS` sums of each output, whose rows and features lie in [`slot`]s of so many words, and puts them
    /// where they belong.
    #[inline(always)]
    unsafe fn put_sums<const PARTIALS: usize>(&self, part: &Part, words: u32, scale: f32, ahead: [Addend; 2]) {
        // SAFETY: the caller's word.
        unsafe {
            let partial = shared::dynamic::<f32>(SCRATCH);
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let outputs = self.outputs(part);
            let within = !(!0 << outputs.width_log2);
            let mut e = warp_id * 32 + lane;
            let mut output = outputs.at(e);
            let mut old = ahead[0];
            sync();
            // A warp stays together: it holds two N-tiles of the residual.
            while e - lane < outputs.total {
                let sum = |feature: u32| {
                    let from =
                        partial.at((output.n_tile * PARTIALS as u32 * words + slot(output.row, feature)) as usize);
                    let mut sum = 0.0;
                    unroll!(C < PARTIALS of 4; {
                        sum += from.load(C * words as usize);
                    });
                    sum * scale
                };
                let feature = output.feature & within;
                self.put::<false>(part, &output, sum(feature), old, || sum(feature + 8));
                e += WARPS * 32;
                output = outputs.at(e);
                old = if e < 2 * WARPS * 32 { ahead[1] } else { self.addend::<false>(part, &output) };
            }
            sync();
        }
    }
}

/// How consumers multiply weights of a format.
pub trait Products<F: WeightFormat> {
    /// One row's, over all waves of a matrix, of which `part` is the first; and what becomes of the outputs.
    unsafe fn of_one<const ROWS: u8>(consumer: &mut Consumer<'_, ROWS>, part: Part, first: (Output, Addend));

    /// The same of up to `TILES` times 8 rows; `old` is what the first outputs are added to.
    unsafe fn of_some<const ROWS: u8, const TILES: usize, const GROUP: usize>(
        consumer: &mut Consumer<'_, ROWS>,
        part: Part,
        old: [Addend; 2],
    );
}

/// By fragments in registers.
pub struct OfFragments;

impl<F: FragmentFormat> Products<F> for OfFragments {
    #[inline(always)]
    unsafe fn of_one<const ROWS: u8>(consumer: &mut Consumer<'_, ROWS>, part: Part, first: (Output, Addend)) {
        // SAFETY: the caller's word.
        unsafe { consumer.gemm_of_one::<F>(part, first) }
    }

    #[inline(always)]
    unsafe fn of_some<const ROWS: u8, const TILES: usize, const GROUP: usize>(
        consumer: &mut Consumer<'_, ROWS>,
        part: Part,
        old: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe { consumer.gemm::<F, TILES, GROUP>(part, old) }
    }
}

/// A block's part of a wave.
#[derive(Clone, Copy)]
pub struct Part {
    matrix: Matrix,
    /// The matrix's place in the stream.
    index: u32,
    /// The wave's first N-tile, and one beyond its last.
    first_n_tile: u32,
    end: u32,
    /// Chunks of an N-tile.
    depth: u32,
    /// The block's place in the rotation.
    place: u32,
    /// Its N-tiles.
    mine: u32,
}
