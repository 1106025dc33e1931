//! A consumer warp's part of a GEMM whose weights become fragments in registers: its split-K partial, its N-tiles, and
//! its MMAs, turn by turn. A turn is one chunk of each of the CTA's N-tiles; a trip once around the ring is a phase.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of a consumer warp call what is unsafe here, each warp for its own
//! duty, and all eight for the same parts and turns in the same order. The ring is at the first of the part's chunks
//! that have yet to be multiplied; the producer fills their stages with weights of the format `F`. The warp loads its
//! own slices of a chunk once, and then takes part in the chunk's release. Nobody else releases for it.

use core::marker::PhantomData;
use core::ops::Range;

use cuda_std::{bulk, device, mma, thread, warp};

use super::Part;
use crate::decode::{DecodeStep, N_TILES};
use crate::linear::K_PARTIALS;
use crate::ring::Ring;
use crate::weights::{FragmentFormat, WeightFragments};

/// As [`Ring::release`], by a branch. In these kernels the predicated form has registers spilled.
///
/// # Safety
/// As for [`Ring::release`].
#[device]
pub(super) unsafe fn release(chunk: Ring, arrives: bool) {
    // SAFETY: the caller's word.
    unsafe {
        bulk::fence_proxy_async();
        warp::sync_warp();
        if arrives {
            chunk.empty().arrive();
        }
    }
}

/// A warp's part of a GEMM: the [split-K partial](crate::linear#order) numbered `k_split`, whose slices of a chunk are
/// `k_split` and `k_split + 4`. Two warps share a split-K partial, one in each half of the CTA. If the rows are one
/// tile of 8, or fragments are [costly](FragmentFormat::COSTLY), each of the two takes half of the N-tiles. Otherwise,
/// and always with a [short](crate::decode) ring, each takes one of the two tiles of rows.
#[derive(Clone, Copy)]
pub(super) struct Duty<F, const TILES: usize, const SHORT: bool> {
    pub(super) lane: u32,
    pub(super) warp_id: u32,
    format: PhantomData<F>,
}

/// Where an N-tile's chunk of a turn lies.
#[derive(Clone, Copy)]
struct Tile {
    stage: Ring,
    /// Which of the stage's chunks it is.
    chunk: u32,
    /// Whether the stage can be released once this chunk has been read.
    ends: bool,
}

/// The N-tile that a warp multiplies next, and where the one after it lies.
pub(super) struct Ready<F: FragmentFormat> {
    /// The fragments of the next N-tile.
    pub(super) weights: WeightFragments,
    /// For formats that are multiplied [by pairs](super::pairs): the codes of the next two N-tiles.
    pub(super) codes: [F::Chunk; 2],
    tile: Tile,
    behind: Tile,
    /// Whether the stage of `behind` has been seen to be full.
    is_full: bool,
}

/// The number of N-tiles of a warp is known only at run time.
const ANY: usize = 0;

/// A lane's fragments of activations for a split-K partial's instructions of a chunk, `[slice][half of a slice]`. Each
/// entry serves two instructions.
pub(super) type Columns = [[[u32; 4]; 2]; 2];

/// The fragment for the `i`-th instruction.
#[device]
pub(super) const fn columns_of(columns: &Columns, i: usize) -> [u32; 2] {
    let words = &columns[i / 4][i / 2 % 2];
    [words[i % 2 * 2], words[i % 2 * 2 + 1]]
}

impl<F: FragmentFormat, const TILES: usize, const SHORT: bool> Duty<F, TILES, SHORT> {
    /// Whether the two warps of a split-K partial distribute N-tiles between them, and not tiles of rows.
    const BY_N_TILES: bool = !SHORT && (TILES == 1 || F::COSTLY);
    /// Tiles of rows of a warp.
    pub(super) const OWN_TILES: usize = if Self::BY_N_TILES { TILES } else { 1 };
    /// Most N-tiles of a warp.
    pub(super) const OWN_N_TILES: usize = if Self::BY_N_TILES { N_TILES as usize / 2 } else { N_TILES as usize };
    /// Lanes of a warp that arrive to release a stage. A stage takes `WARPS` arrivals; if the warps distribute N-tiles,
    /// only the four warps of one half read it.
    pub(super) const ARRIVALS: u32 = if Self::BY_N_TILES { 2 } else { 1 };

    /// The duty of this warp.
    #[device]
    pub(super) fn new() -> Self {
        Self {
            lane: thread::opaque(thread::lane_id()),
            warp_id: thread::opaque(thread::warp_id()),
            format: PhantomData,
        }
    }

    /// The number of the warp's split-K partial.
    #[device]
    pub(super) const fn k_split(&self) -> u32 {
        self.warp_id % K_PARTIALS
    }

    /// The half of the CTA that the warp belongs to.
    #[device]
    pub(super) const fn half(&self) -> u32 {
        self.warp_id / K_PARTIALS
    }

    /// The warp's first row.
    #[device]
    pub(super) const fn first_row(&self) -> u32 {
        if Self::BY_N_TILES { 0 } else { 8 * self.half() }
    }

    /// Which of the CTA's N-tiles is the warp's `s`-th.
    #[device]
    pub(super) const fn n_tile(&self, s: u32) -> u32 {
        if Self::BY_N_TILES { 2 * s + self.half() } else { s }
    }

    /// How many of the CTA's `mine` N-tiles are the warp's.
    #[device]
    pub(super) const fn n_tiles(&self, mine: u32) -> u32 {
        if Self::BY_N_TILES { (mine + 1 - self.half()) / 2 } else { mine }
    }

    /// Waits for a stage, and loads the warp's fragments of the stage's `chunk`-th chunk.
    ///
    /// A full barrier tells only two successive phases apart. The stage's previous fill may have been for the other
    /// half of the CTA, and then this warp has not waited for it. But that fill has ended: this warp has waited for one
    /// of the last three stages, or has synchronised with the CTA since, and no more than 9 of the 12 stages are under
    /// way. The [producer](crate::decode::producer#phases-of-full-barriers) has the whole argument.
    ///
    /// # Safety
    /// The stage has, or will have, an N-tile of the warp's, which it has not loaded yet. `chunk` is one of the
    /// stage's.
    #[device]
    pub(super) unsafe fn load(&self, p: &DecodeStep, stage: &Ring, chunk: u32) -> WeightFragments {
        // SAFETY: the caller's word.
        unsafe {
            stage.wait_likely_full();
            F::load(p, (stage, chunk), self.k_split(), self.lane, |_| {})
        }
    }

    /// Whether a stage can be released once its chunk of this turn, of `depth` turns in all, has been read.
    #[device]
    const fn ends_stage(turn: u32, depth: u32) -> bool {
        F::CHUNKS == 1 || turn % F::CHUNKS + 1 == F::CHUNKS || turn + 1 == depth
    }

    /// Stages from the first one of this turn to the first one of the next.
    #[device]
    const fn stages(turn: u32, part: &Part) -> u32 {
        if Self::ends_stage(turn, part.problem.depth) { part.mine } else { 0 }
    }

    /// Where the warp's `s`-th N-tile of a turn lies. The turn's first stage is the ring's next.
    #[device]
    fn tile(&self, part: &Part, (ring, turn): (Ring, u32), s: u32) -> Tile {
        let ends = Self::ends_stage(turn, part.problem.depth);
        Tile { stage: ring.ahead(self.n_tile(s)), chunk: turn % F::CHUNKS, ends }
    }

    /// Begins a part, whose first stage is the ring's next. If fragments are costly and the ring is not short, it loads
    /// those of the first N-tile, or the codes of the first pair: [`costly`](Self::costly) makes fragments while it
    /// multiplies those before. Otherwise it loads nothing.
    ///
    /// # Safety
    /// `ring` is where the part's first turn begins, and nothing of the part was loaded.
    #[device]
    pub(super) unsafe fn begin(&self, p: &DecodeStep, ring: &Ring, part: &Part) -> Ready<F> {
        let own = self.n_tiles(part.mine);
        let tile = self.tile(part, (*ring, 0), 0);
        let behind = if own > 1 {
            self.tile(part, (*ring, 0), 1)
        } else {
            self.tile(part, (ring.ahead(Self::stages(0, part)), 1), 0)
        };
        let mut ready = Ready { weights: [[0; 4]; 8], codes: Default::default(), tile, behind, is_full: false };
        if F::BY_PAIRS && own > 0 {
            // SAFETY: the caller's word.
            ready.codes = unsafe { self.first_codes(ring, own) };
        } else if F::COSTLY && !SHORT && own > 0 {
            // SAFETY: the caller's word.
            unsafe {
                ready.weights = self.load(p, &tile.stage, 0);
                self.release_in_place(&tile);
            }
        }
        ready
    }

    /// For formats that make fragments in the stage: releases the stage of an N-tile whose fragments are loaded, if
    /// this chunk ends the stage.
    ///
    /// # Safety
    /// The N-tile was loaded last, and its stage is yet to be released.
    #[device]
    unsafe fn release_in_place(&self, tile: &Tile) {
        if F::IN_PLACE {
            // SAFETY: the caller's word.
            unsafe { release(tile.stage, self.lane < Self::ARRIVALS && tile.ends) }
        }
    }

    /// For the other formats: releases the stage of the warp's `S`-th N-tile once it is multiplied, if this chunk ends
    /// the stage.
    ///
    /// # Safety
    /// The N-tile was loaded, and then multiplied into the `S`-th sums, and its stage is yet to be released.
    #[device]
    unsafe fn release_multiplied<const S: usize>(&self, tile: &Tile, acc: &[[f32; 4]; N_TILES as usize]) {
        if !F::IN_PLACE {
            let last = acc[S * Self::OWN_TILES + Self::OWN_TILES - 1];
            // SAFETY: the caller's word.
            unsafe { tile.stage.release_behind(last[0], self.lane < Self::ARRIVALS && tile.ends) }
        }
    }

    /// Adds the products of fragment `i` of an N-tile to the accumulators of the warp's `s`-th N-tile.
    #[device]
    pub(super) fn multiply(
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

    /// Rotates the accumulators of the warp's `own` N-tiles, so that the next N-tile's come to the front. After `own`
    /// calls each is where it was.
    #[device]
    fn rotate(acc: &mut [[f32; 4]; N_TILES as usize], own: u32) {
        unroll!(T < (Self::OWN_TILES) of 2; {
            let first = acc[T];
            unroll!(S < 4; {
                let next = if S < 3 { acc[(S + 1) % 4 * Self::OWN_TILES + T] } else { first };
                acc[S * Self::OWN_TILES + T] = if S as u32 + 1 == own { first } else { next };
            });
        });
    }

    /// Multiplies the fragments that are ready, of the warp's `S`-th N-tile, and meanwhile makes those of the N-tile
    /// after it. `next` is the N-tile after that one.
    ///
    /// # Safety
    /// Fragments are costly. `ready` is of the N-tile whose sums are the `S`-th, and `next` is the N-tile two after it.
    #[device]
    unsafe fn costly_step<const S: usize>(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        columns: &[Columns; TILES],
        ready: &mut Ready<F>,
        next: Tile,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let Ready { weights, tile, behind, is_full, .. } = *ready;
            if !is_full {
                behind.stage.wait_likely_full();
            }
            let mut is_full = false;
            ready.weights = F::load(p, (&behind.stage, behind.chunk), self.k_split(), self.lane, |i| {
                Self::multiply(acc, &weights, columns, (S, i));
                if i == 4 {
                    // Asked ahead, since an answer takes its time.
                    is_full = next.stage.is_full();
                }
            });
            self.release_multiplied::<S>(&tile, acc);
            self.release_in_place(&behind);
            (ready.tile, ready.behind, ready.is_full) = (behind, next, is_full);
        }
    }

    /// Multiplies the fragments of the last N-tile of a part.
    ///
    /// # Safety
    /// As for [`costly_step`](Self::costly_step), of the part's last N-tile.
    #[device]
    unsafe fn costly_end<const S: usize>(
        &self,
        acc: &mut [[f32; 4]; N_TILES as usize],
        columns: &[Columns; TILES],
        ready: &Ready<F>,
    ) {
        unroll!(I < 8; {
            Self::multiply(acc, &ready.weights, columns, (S, I));
        });
        // SAFETY: the caller's word.
        unsafe { self.release_multiplied::<S>(&ready.tile, acc) }
    }

    /// Multiplies several turns of costly fragments, as [`turn`](Self::turn) multiplies one of others. `columns` gives
    /// each turn's activations. `ready` has the first N-tile of the first turn; afterwards it has that of the turn
    /// after the last, if the part has one. `ONE` is whether the kernel is for one row.
    ///
    /// # Safety
    /// Fragments are costly, and the ring is not short. `ready` is what [`begin`](Self::begin) returned, as the turns
    /// before `turns` have left it. The ring is at the first of `turns`.
    #[device]
    pub(super) unsafe fn costly<const ONE: bool>(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready<F>,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let own = self.n_tiles(thread::opaque(part.mine));
            if F::BY_PAIRS {
                return self.by_pairs(p, acc, (ring, part, turns), own, columns, ready);
            }
            // A constant number of N-tiles decides branches once, not in each turn. Kernels for one row have no code
            // for three, which few shapes need: it would push other code out of the SM's instruction cache.
            match own {
                1 if F::CHUNKS == 2 => self.costly_stages(p, acc, (ring, part, turns), columns, ready),
                1 => self.costly_of::<1>(p, acc, (ring, part, turns), columns, ready),
                2 => self.costly_of::<2>(p, acc, (ring, part, turns), columns, ready),
                3 if !ONE => self.costly_of::<3>(p, acc, (ring, part, turns), columns, ready),
                4 => self.costly_of::<4>(p, acc, (ring, part, turns), columns, ready),
                _ => self.costly_of::<ANY>(p, acc, (ring, part, turns), columns, ready),
            }
        }
    }

    /// [`costly`](Self::costly) for `OWN` N-tiles, or for any number of them.
    ///
    /// # Safety
    /// As for [`costly`](Self::costly); `OWN` is the warp's N-tiles, or `ANY`.
    #[device]
    unsafe fn costly_of<const OWN: usize>(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        mut columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready<F>,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let depth = part.problem.depth;
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

    /// [`costly`](Self::costly) for one N-tile, where a stage has the chunks of two turns. It takes a stage at a time,
    /// so there is less to wait for, to compute and to release. `turns` begins with a stage.
    ///
    /// # Safety
    /// As for [`costly`](Self::costly); the warp has one N-tile, and a stage two chunks.
    #[device]
    unsafe fn costly_stages(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        mut columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready<F>,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let depth = part.problem.depth;
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
                        // Asked ahead, since an answer takes its time.
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

    /// One turn of costly fragments, of any number of N-tiles, in one loop.
    ///
    /// # Safety
    /// As for [`costly`](Self::costly), of the turn `here`, behind which comes `then`.
    #[device]
    unsafe fn costly_turn(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (part, here, then): (&Part, (Ring, u32), (Ring, u32)),
        columns: &[Columns; TILES],
        ready: &mut Ready<F>,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let own = self.n_tiles(thread::opaque(part.mine));
            let last = then.1 == part.problem.depth;
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

    /// Multiplies a turn, whose chunks are in the ring's next stages, and adds the products of the warp's `s`-th N-tile
    /// to `acc[s]`. For fragments that are not costly, and for short rings: in both cases a warp has one tile of rows,
    /// and a stage one chunk.
    ///
    /// # Safety
    /// The part's turns before this one were taken, and nothing of this one was loaded.
    #[device]
    pub(super) unsafe fn turn(
        &self,
        p: &DecodeStep,
        acc: &mut [[f32; 4]; N_TILES as usize],
        (ring, part): (&mut Ring, &Part),
        columns: &[Columns; TILES],
    ) {
        // SAFETY: the caller's word.
        unsafe {
            // In two steps, since the chunks of a turn may be more than a short ring has stages. A macro, since a
            // function gives other machine code.
            macro_rules! ahead {
                ($n:expr) => {
                    if SHORT { ring.ahead($n / 2).ahead($n - $n / 2) } else { ring.ahead($n) }
                };
            }
            let mine = part.mine;
            // Computed anew in each turn: conditions that are kept over all turns would take registers from others.
            let own = self.n_tiles(thread::opaque(mine));
            // Two N-tiles at a time where possible: each MMA of an accumulator waits for the one before it.
            unroll!(P < (2 * TILES) of 4; {
                let s = 2 * P;
                let chunk = ahead!(self.n_tile(s as u32));
                if s as u32 + 1 < own {
                    let next = ahead!(self.n_tile(s as u32 + 1));
                    let (low, high) = (self.load(p, &chunk, 0), self.load(p, &next, 0));
                    let arrives = self.lane < 2 * Self::ARRIVALS;
                    release(if self.lane < Self::ARRIVALS { chunk } else { next }, arrives);
                    unroll!(I < 8; {
                        let b = columns_of(&columns[0], I);
                        acc[s] = mma::m16n8k16_bf16(acc[s], low[I], b);
                        acc[s + 1] = mma::m16n8k16_bf16(acc[s + 1], high[I], b);
                    });
                } else if (s as u32) < own {
                    let a = self.load(p, &chunk, 0);
                    release(chunk, self.lane < Self::ARRIVALS);
                    unroll!(I < 8; {
                        acc[s] = mma::m16n8k16_bf16(acc[s], a[I], columns_of(&columns[0], I));
                    });
                }
            });
            *ring = ahead!(mine);
        }
    }
}
