//! The main loop of the batched kernel's GEMMs, and the exchange of split-K partials where a tile is split.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of the consumers' two warpgroups call what is unsafe here, in the same
//! order: a warpgroup issues MMAs together, and both warpgroups take the same stages. The rings are where the phase's
//! next stages begin, which the producers fill in the order of the CTA's units. All lanes have declared the
//! accumulators. Between what begins MMAs and what waits for them, nobody else uses the accumulators or the registers
//! of fragments that the MMAs read. Whoever begins MMAs has waited for their stages, and releases these when the MMAs
//! are done.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, device, thread, wgmma};

use super::k_partial::{self, KPartial};
use super::outputs::QUARTER;
use super::outputs::{Outputs, put};
use super::peer::Peer;
use super::phases::{GemmPhase, Unit};
use super::{BatchedStep, GROUP, K_SPLITS, Memory, Odd, Phase, PhaseKind, Rings};
use crate::waiting;
use crate::weights::BatchedFormat;

/// A GEMM with its epilogue. `arrivals` counts the parts of each half of a split tile.
///
/// # Safety
/// All consumers of every CTA call it, for the same phase, a GEMM of this `kind`, when all CTAs have done the phases
/// before. `arrivals` are zero, and nobody zeroes them before all have done this one; `odd` counts what came before.
#[device]
pub unsafe fn multiply<F: BatchedFormat, const ROWS: u32, const TILES: usize>(
    p: &BatchedStep,
    phase: Global<Phase>,
    kind: u32,
    rings: &mut Rings,
    arrivals: GlobalMut<u32>,
    odd: &mut Odd,
) {
    // SAFETY: the caller's word.
    unsafe {
        let gemm = GemmPhase::new(phase);
        let parity = odd.of(Odd::NORMED);
        // Called before the CTA's first epilogue, and even if the CTA has none: no warp may be a phase behind this
        // barrier.
        let ready = || {
            if PhaseKind::is_normed(kind) {
                waiting::for_phase(Memory::<ROWS>::factors_ready(), parity);
            }
        };
        let mut number = thread::block_idx_x();
        while let Some(unit) = gemm.unit(number, ROWS) {
            number += thread::opaque(thread::grid_dim_x());
            let share = &gemm.share;
            let part = share.part(&unit);
            let groups = if share.is_whole(&unit) { TILES as u32 } else { share.groups::<TILES>() };
            let first = part * groups;
            let begin = || {
                let outputs = Outputs::new::<ROWS>(p, &gemm, &unit, kind, first, groups);
                let old = outputs.olds::<TILES>(kind, 0);
                (outputs, old)
            };
            zero_totals::<TILES>();
            let mut k_split = unit.k_split;
            // Runs at least once. If accumulators might have no value here, the compiler would keep their registers
            // over all phases.
            loop {
                let of = KPartial::new::<F>(phase, k_split, gemm.depth(k_split));
                k_partial::multiply::<F, TILES>(p, rings, &of);
                k_split += 1;
                // In a part that is not the first, the last split-K partial stays apart from the totals.
                if part == 0 || k_split < unit.end {
                    unroll!(J < TILES of 16; {
                        let (total, k_partial) = (accumulators!(4 * J), accumulators!(64 + 4 * J));
                        accumulators!(4 * J, [0, 1, 2, 3].map(|i| total[i] + k_partial[i]));
                    });
                }
                if k_split == unit.end {
                    break;
                }
            }
            let (outputs, old);
            if share.is_whole(&unit) {
                (outputs, old) = begin();
            } else if share.is_in_cluster() {
                let peer = Peer::<ROWS>::new(odd.of(Odd::EXCHANGES));
                peer.open(2 - part);
                (outputs, old) = begin();
                peer.exchange::<TILES>(part);
                odd.count(Odd::EXCHANGES);
            } else {
                let partial = Partial::new::<TILES>(p, &unit, arrivals);
                partial.leave::<TILES>(part);
                (outputs, old) = begin();
                partial.wait();
                partial.add::<TILES>(part);
            }
            ready();
            let scale = if F::SCALED { field!(phase, scale: f32) } else { 1.0 };
            match kind {
                PhaseKind::WRITE => {
                    put::<ROWS, TILES, { PhaseKind::WRITE }>(p, &unit, &outputs, first, groups, (old, scale))
                }
                PhaseKind::BEST => {
                    put::<ROWS, TILES, { PhaseKind::BEST }>(p, &unit, &outputs, first, groups, (old, scale))
                }
                PhaseKind::ADD => {
                    put::<ROWS, TILES, { PhaseKind::ADD }>(p, &unit, &outputs, first, groups, (old, scale))
                }
                _ => put::<ROWS, TILES, { PhaseKind::SWIGLU }>(p, &unit, &outputs, first, groups, (old, scale)),
            }
        }
        ready();
    }
}

/// Sets the totals, which are in the lower accumulators, to zero.
#[device]
fn zero_totals<const TILES: usize>() {
    unroll!(J < TILES of 16; {
        accumulators!(4 * J, [0.0; 4]);
    });
}

/// Where a warpgroup's split-K partials of a tile in four parts lie in memory:
/// `[k_partial][rows / 8][lane of the warpgroup]`, four sums each. A part writes those of the rows that the other parts
/// finish.
struct Partial {
    /// The lane's first sums.
    first: GlobalMut<f32>,
    /// Elements of a split-K partial, over both warpgroups.
    stride: u32,
    /// Number of the warpgroup's half among all split tiles' halves.
    half: u32,
    /// For each half, how many parts have written their split-K partials.
    arrivals: GlobalMut<u32>,
}

impl Partial {
    /// The place of a unit's split-K partials.
    ///
    /// # Safety
    /// The unit's tile is in four parts, and has its place among [`partials`](BatchedStep::partials) and
    /// [`arrivals`](BatchedStep::arrivals).
    #[device]
    unsafe fn new<const TILES: usize>(p: &BatchedStep, unit: &Unit, arrivals: GlobalMut<u32>) -> Self {
        // Recomputed here: kept over the GEMM, it would take registers.
        let thread = thread::opaque(thread::thread_idx_x());
        let (group, thread) = (thread / GROUP, thread % GROUP);
        let words = TILES as u32 * GROUP * 4;
        let first = (unit.split * K_SPLITS * 2 + group) * words + thread * 4;
        Self {
            // SAFETY: the caller's word: there is memory for the split-K partials of all split tiles.
            first: unsafe { p.partials.at(first as usize) },
            stride: 2 * words,
            half: 2 * unit.split + group,
            arrivals,
        }
    }

    /// Where the lane's sums of group `j` of eight rows lie, of split-K partial `k_partial`.
    ///
    /// # Safety
    /// `k_partial` is below [`K_SPLITS`], and `j` below the groups of eight rows of a tile.
    #[device]
    unsafe fn place(&self, k_partial: u32, j: u32) -> GlobalMut<f32> {
        // Two steps: where `j` is known at compile time, the second is a constant offset of the instruction.
        // SAFETY: the caller's word.
        unsafe { self.first.at((k_partial * self.stride) as usize).at((j * GROUP * 4) as usize) }
    }

    /// Writes a part's finished split-K partial to memory for the rows of the other parts. Moves the sums of its own
    /// rows to the first of the lower accumulators.
    ///
    /// # Safety
    /// All lanes of the warpgroup call it, once for a unit, which is this `part`; its split-K partial is in the upper
    /// accumulators.
    #[device]
    unsafe fn leave<const TILES: usize>(&self, part: u32) {
        macro_rules! keep {
            ($j:ident, $groups:literal) => {
                if TILES == 4 * $groups && ($j / $groups) as u32 == part {
                    accumulators!(4 * ($j % $groups), accumulators!(64 + 4 * $j));
                }
            };
        }
        unroll!(J < TILES of 16; {
            if (J / (TILES / 4)) as u32 != part {
                // SAFETY: the caller's word.
                let (place, sums) = (unsafe { self.place(part, J as u32) }, accumulators!(64 + 4 * J));
                if TILES == 8 {
                    // Kept in L2, which would otherwise write them back to memory before they are overwritten. With 128
                    // rows a tile, attention would lose more by that than GEMMs gain.
                    // SAFETY: the caller's word.
                    unsafe { place.store16_kept(0, sums.map(f32::to_bits)) };
                } else {
                    // SAFETY: the caller's word.
                    unsafe { place.store16(0, sums.map(f32::to_bits)) };
                }
            }
            keep!(J, 2);
            keep!(J, 3);
            keep!(J, 4);
        });
        // SAFETY: the caller's word.
        unsafe {
            thread::sync_named(1 + self.half % 2, GROUP);
            if thread::opaque(thread::thread_idx_x()).is_multiple_of(GROUP) {
                atomic::fetch_add(self.arrivals, self.half as usize, 1, Ordering::Release, Scope::Device);
            }
        }
    }

    /// Waits until all parts have written their split-K partials.
    ///
    /// # Safety
    /// All lanes of the warpgroup call it, when they have [left](Self::leave) theirs.
    #[device]
    unsafe fn wait(&self) {
        // SAFETY: the caller's word.
        unsafe {
            // A warp polls that is not the one whose arrival has to wait for its stores.
            if thread::opaque(thread::thread_idx_x()) % GROUP == 32 {
                waiting::for_count(self.arrivals, self.half as usize, K_SPLITS);
            }
            thread::sync_named(1 + self.half % 2, GROUP);
        }
    }

    /// Adds the split-K partials of this part's own rows, first to last, into the lower accumulators, where its own
    /// split-K partial is. It loads all of them without branches: with a branch for each, it would wait for one load
    /// after another.
    ///
    /// # Safety
    /// All lanes of the warpgroup call it, when they have [waited](Self::wait); its own sums are where
    /// [`leave`](Self::leave) put them.
    #[device]
    unsafe fn add<const TILES: usize>(&self, part: u32) {
        let groups = TILES as u32 / 4;
        let mut others = [[[0f32; 4]; 3]; QUARTER];
        unroll!(J < 4; {
            if J < TILES / 4 {
                unroll!(K < 3; {
                    let k_partial = K as u32 + u32::from(K as u32 >= part);
                    // SAFETY: the caller's word.
                    let place = unsafe { self.place(k_partial, part * groups + J as u32) };
                    // SAFETY: the caller's word.
                    others[J][K] = unsafe { place.load16(0) }.map(f32::from_bits);
                });
            }
        });
        unroll!(J < 4; {
            if J < TILES / 4 {
                let own = accumulators!(4 * J);
                let mut sums = [0f32; 4];
                unroll!(C < 4; {
                    // The C-th of all: this part's own, one before it, or one behind it.
                    let k_partial = if C as u32 == part {
                        own
                    } else if C < 3 && part > C as u32 {
                        others[J][C]
                    } else {
                        others[J][C.saturating_sub(1)]
                    };
                    unroll!(E < 4; {
                        sums[E] += k_partial[E];
                    });
                });
                accumulators!(4 * J, sums);
            }
        });
    }
}
