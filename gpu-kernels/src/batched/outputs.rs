//! The epilogues of the batched kernel's GEMMs.
//!
//! [`main_loop::multiply`](super::main_loop::multiply) calls [`put`] for each unit, when the lower accumulators hold
//! complete sums. Weights are A, so the 64 rows of a warpgroup's C are features, and its columns are rows of
//! activations. Warp `w` of the 8 has N-tile `w` of the tile. With `g = lane / 4` and `t = lane % 4`, a lane has for
//! every group `j` of eight rows:
//!
//! ```text
//!                       row 8 j + 2 t         row 8 j + 2 t + 1
//! feature g             accumulator 4 j       accumulator 4 j + 1         of a gate-up N-tile: the gate
//! feature g + 8         accumulator 4 j + 2   accumulator 4 j + 3         its up
//! ```
//!
//! f32 outputs (`Write`, and the residual of `Add`) are stored from there: eight lanes with one `t` have eight
//! neighbouring features of a row. Activations, in bf16, are packed in pairs of rows and then transposed, 8 × 8, so
//! that a lane has pairs of features of one row:
//!
//! ```text
//! before    lane (g, t)    feature g        rows 8 j + 2 t and the next
//! after     lane (g, t)    row 8 j + g      features 2 t and the next
//! ```
//!
//! In the order of [`slot`] the pair of features `2 t + 8` lies right behind the pair `2 t`. So `Add`, which has both,
//! stores them at once.
//!
//! | kind | output | to |
//! |---|---|---|
//! | `Write` | `sum · factor + bias`, f32 | [`Phase::y`] |
//! | `Best` | the best [`rank`] of each row | [`BatchedStep::best`], by way of [`Memory::BEST`] |
//! | `Add` | `x += sum`; `bf16(x · weight)`; the N-tile's `Σ x²` | [`Residual`](crate::norm::Residual) |
//! | `SwiGlu` | `swiglu(gate · factor, up · factor)`, bf16 | [`activation`](crate::workspace::Workspace::activation) |
//!
//! A quarter of the tile's groups is finished at a time. What the next quarter is added to is loaded before the stores
//! of this one.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of a consumer warp call what is unsafe here, for a unit that the CTA
//! has; the lanes exchange what they have. Each output is one lane's in the whole grid. The rows that a unit finishes
//! are `groups` groups of eight, from group `first` on; a group `j` is counted from that one, and below `groups`. What
//! outputs are added to, and rows' factors, were waited for.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, bf16, device, math, mma, shared, thread, warp, wgmma};

use super::phases::{GemmPhase, Unit};
use super::{BatchedStep, MAX_BATCHED_ROWS, Memory, Phase, PhaseKind};
use crate::gate::swiglu;
use crate::linear::{N_TILE, slot};
use crate::sample::{key, rank};

/// A lane's outputs of a tile, and where they go: features `g` and `g + 8` of its warp's N-tile (of a gate-up N-tile: a
/// gate and its up), for rows `8 j + 2 t` and `8 j + 2 t + 1` of every eight. Addresses are computed once a tile: while
/// an epilogue computes for each output, no MMAs run.
///
/// Activations are transposed between lanes before they are stored. Then a lane has features `2 t` and `2 t + 1`, and
/// the two that are 8 further, of row `8 j + g`.
pub struct Outputs {
    n_tile: u32,
    /// Where `Write` writes, or `Add` adds to, at the lane's first row and feature; the other feature is 8 elements
    /// further.
    sums: GlobalMut<u8>,
    /// Where activations go, at the first row and feature that the lane has after the transposition.
    activations: GlobalMut<u8>,
    /// Bytes from a row to the next, of `sums` and of `activations`.
    strides: [u32; 2],
    /// Where the N-tile's sum of squares goes, at the first row whose sum the lane has in the end.
    squares: GlobalMut<u8>,
    /// Where the factor of the lane's first row lies, from the start of dynamic shared memory.
    factors: u32,
    /// `rows`: how many rows there are, counted from the lane's first in `sums`, in `activations` and in `squares`;
    /// none if the matrix has no such N-tile. `there`: whether the matrix has the lane's two features; with `Add` it
    /// always has.
    rows: [u32; 3],
    there: [bool; 2],
    g: u32,
    /// The weights of the norm that comes next, for the lane's two features; with `Write`, their biases.
    weight: [f32; 2],
}

/// Most groups of eight rows in a quarter of a tile.
pub const QUARTER: usize = 4;

// After the transposition a lane's activations of a row lie side by side, in the order of [`slot`]. With `Add` the
// second pair, of features 8 further, lies right behind the first.
const _: () = assert!(slot(1) == slot(0) + 1 && slot(8) == slot(0) + 2 && slot(16 + 6 + 8) == slot(16 + 6) + 2);

impl Outputs {
    /// The outputs of `groups` groups of eight rows of a tile, from group `first` on.
    ///
    /// # Safety
    /// `kind` is the phase's, a GEMM; `unit` is one of its units.
    #[device]
    pub unsafe fn new<const ROWS: u32>(
        p: &BatchedStep,
        gemm: &GemmPhase,
        unit: &Unit,
        kind: u32,
        first: u32,
        groups: u32,
    ) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            // Loaded again: kept over the MMAs, it would take a register.
            let count = p.work.rows.count.load(0).min(MAX_BATCHED_ROWS);
            let lane = thread::opaque(thread::lane_id());
            let (g, t) = (lane / 4, lane % 4);
            let n_tile = unit.n_tile + thread::opaque(thread::warp_id());
            let n = field!(gemm.phase, n: u32);
            let tile_row = unit.row + 8 * first;
            let squares_row = squares_row::<ROWS>(g, t);
            let feature = n_tile * if kind == PhaseKind::SWIGLU { N_TILE / 2 } else { N_TILE };
            let at = |row: u32, feature: u32| (tile_row + row) as usize * n as usize + feature as usize;
            let (sums_at, activations_at) = (at(2 * t, feature + g), at(g, slot(feature + 2 * t)));
            let mut weight = [0.0; 2];
            let (mut sums, mut activations) = (GlobalMut::default(), GlobalMut::default());
            match kind {
                PhaseKind::WRITE => {
                    sums = field!(gemm.phase, y: GlobalMut<f32>).at(sums_at);
                    let bias = field!(gemm.phase, norm: Global<bf16>);
                    // Adding -0 changes no bit.
                    weight = [-0.0; 2];
                    if !bias.is_null() && n_tile < gemm.n_tiles {
                        weight = [0, 8].map(|i| math::from_bf16(bias.load_nc((feature + g + i) as usize)));
                    }
                }
                PhaseKind::BEST => {}
                PhaseKind::SWIGLU => activations = p.work.activation.at(activations_at),
                _ => {
                    (sums, activations) = (p.work.residual.x.at(sums_at), p.work.residual.scaled.at(activations_at));
                    if n_tile < gemm.n_tiles {
                        let norm = field!(gemm.phase, norm: Global<bf16>);
                        weight = [0, 8].map(|i| math::from_bf16(norm.load_nc((feature + g + i) as usize)));
                    }
                }
            }
            let squares = (tile_row + squares_row) as usize * (n / N_TILE) as usize + n_tile as usize;
            let rows = if n_tile < gemm.n_tiles { count.saturating_sub(tile_row).min(8 * groups) } else { 0 };
            Self {
                n_tile,
                sums: sums.cast(),
                activations: activations.cast(),
                strides: [n * 4, n * 2],
                squares: p.work.residual.squares.at(squares).cast(),
                factors: Memory::<ROWS>::FACTORS + (tile_row + 2 * t) * 4,
                rows: [2 * t, g, squares_row].map(|row| rows.saturating_sub(row)),
                there: [feature + g < n, feature + g + 8 < n],
                g,
                weight,
            }
        }
    }

    /// Where a row lies that is `row` rows behind the lane's first, with `stride` bytes from row to row.
    ///
    /// # Safety
    /// The row is one of the unit's: nothing is read or written beyond the rows that there are.
    #[device]
    unsafe fn of_row(first: GlobalMut<u8>, row: u32, stride: u32) -> GlobalMut<u8> {
        // Opaque, so that the compiler sees two factors of 32 bits, which one instruction multiplies.
        // SAFETY: the caller's word.
        unsafe { first.at(row as usize * thread::opaque(stride) as usize) }
    }

    /// Loads what the lane's outputs of rows `8 j …` are added to.
    #[device]
    unsafe fn old(&self, kind: u32, j: u32) -> [f32; 4] {
        let mut old = [0f32; 4];
        if kind == PhaseKind::ADD {
            unroll!(R < 2; {
                let row = 8 * j + R as u32;
                // SAFETY: the caller's word.
                unsafe {
                    let from = Self::of_row(self.sums, row, self.strides[0]).cast::<f32>();
                    [old[R], old[2 + R]] = [0, 8].map(|i| from.load_if(row < self.rows[0], i, 0.0));
                }
            });
        }
        old
    }

    /// Loads what the outputs of a quarter of a tile's rows, from group `j` on, are added to.
    ///
    /// # Safety
    /// The unit has the groups from `j` on, a quarter of a tile's at most.
    #[device]
    pub unsafe fn olds<const TILES: usize>(&self, kind: u32, j: u32) -> [[f32; 4]; QUARTER] {
        let mut old = [[0f32; 4]; QUARTER];
        unroll!(I < 4; {
            if I < TILES / 4 {
                // SAFETY: the caller's word.
                old[I] = unsafe { self.old(kind, j + I as u32) };
            }
        });
        old
    }

    /// The norm's factors of the lane's rows `8 j …`.
    ///
    /// # Safety
    /// The phase has factors, and the warp has waited for them.
    #[device]
    unsafe fn factors(&self, j: u32) -> [f32; 2] {
        // Rows that do not exist have a word there, too.
        // SAFETY: the caller's word.
        unsafe { shared::dynamic::<[f32; 2]>(self.factors).load(4 * j as usize) }
    }

    /// Stores the lane's f32 outputs of rows `8 j …`.
    #[device]
    unsafe fn put_sums(&self, j: u32, sums: [f32; 4]) {
        unroll!(R < 2; {
            let row = 8 * j + R as u32;
            unroll!(F < 2; {
                // SAFETY: the caller's word.
                unsafe {
                    let to = Self::of_row(self.sums, row, self.strides[0]).cast::<f32>();
                    to.store_if(row < self.rows[0] && self.there[F], 8 * F, sums[2 * F + R]);
                }
            });
        });
    }

    /// Transposes activations of rows `8 j …` between lanes, and stores them. Each word has one feature of two rows.
    #[device]
    unsafe fn put_activations<const N: usize>(&self, j: u32, words: [u32; N]) {
        // SAFETY: the caller's word.
        let to = unsafe { Self::of_row(self.activations, 8 * j, self.strides[1]) };
        let there = 8 * j < self.rows[1];
        let turned = words.map(mma::transpose);
        // SAFETY: the caller's word.
        unsafe {
            if N == 2 {
                to.cast::<[u32; 2]>().store_if(there, 0, [turned[0], turned[N - 1]]);
            } else {
                to.cast::<u32>().store_if(there, 0, turned[0]);
            }
        }
    }

    /// Finishes and stores a quarter of a tile's sums, from group `j` on. A warp calls it together.
    ///
    /// # Safety
    /// As for [`olds`](Self::olds). `KIND` is the phase's, but not `Best`; `sums` are complete, and `old` is what
    /// [`olds`](Self::olds) gave.
    #[device]
    unsafe fn put<const TILES: usize, const KIND: u32>(
        &self,
        j: u32,
        sums: [[f32; 4]; QUARTER],
        old: [[f32; 4]; QUARTER],
    ) {
        let mut squares = [0f32; 2 * QUARTER];
        unroll!(I < 4; {
            if I < TILES / 4 {
                let (j, sums) = (j + I as u32, sums[I]);
                // SAFETY: the caller's word.
                let [f0, f1] = if PhaseKind::is_normed(KIND) { unsafe { self.factors(j) } } else { [1.0; 2] };
                match KIND {
                    PhaseKind::WRITE => {
                        let [b0, b1] = self.weight;
                        let sums = [sums[0] * f0 + b0, sums[1] * f1 + b0, sums[2] * f0 + b1, sums[3] * f1 + b1];
                        // SAFETY: the caller's word.
                        unsafe { self.put_sums(j, sums) }
                    }
                    PhaseKind::SWIGLU => {
                        let [low, high] = [swiglu(sums[0] * f0, sums[2] * f0), swiglu(sums[1] * f1, sums[3] * f1)];
                        // SAFETY: the caller's word.
                        unsafe { self.put_activations(j, [math::pack_bf16(low, high)]) };
                    }
                    _ => {
                        let x = [0, 1, 2, 3].map(|i| old[I][i] + sums[i]);
                        squares[2 * I] = x[0] * x[0] + x[2] * x[2];
                        squares[2 * I + 1] = x[1] * x[1] + x[3] * x[3];
                        let scaled = [0, 1].map(|f| {
                            math::pack_bf16(x[2 * f] * self.weight[f], x[2 * f + 1] * self.weight[f])
                        });
                        // SAFETY: the caller's word.
                        unsafe {
                            self.put_sums(j, x);
                            self.put_activations(j, scaled);
                        }
                    }
                }
            }
        });
        if KIND == PhaseKind::ADD {
            let sum = n_tile_squares::<TILES>(squares);
            // If a quarter has fewer rows than lanes have values of `g`, only the first lanes store a sum.
            let mine = match TILES {
                8 => self.g < 4,
                12 => self.g < 6,
                _ => true,
            };
            // SAFETY: the caller's word.
            unsafe {
                let to = Self::of_row(self.squares, 8 * j, self.strides[0] / N_TILE).cast();
                to.store_if(mine && 8 * j < self.rows[2], 0, sum);
            }
        }
    }
}

/// The row of a quarter of a tile of `ROWS` rows whose sum of squares a lane has after [`n_tile_squares`].
#[device]
const fn squares_row<const ROWS: u32>(g: u32, t: u32) -> u32 {
    let sum = if ROWS == 64 { g % 4 } else { g };
    8 * (sum / 2) + 2 * t + sum % 2
}

/// Adds up squares over an N-tile, in the order of [`norm`](crate::norm): elements 8 apart first, which the lane has
/// done, then the lanes of all `g`, the nearest first. A lane begins with two sums for each group of rows of a quarter.
/// Each step leaves it with half as many, and in the end with the `g`-th, or with the `g % 4`-th if there are four.
#[device]
fn n_tile_squares<const TILES: usize>(sums: [f32; 2 * QUARTER]) -> f32 {
    let lane = thread::opaque(thread::lane_id());
    let halve = |two: [f32; 2], mask: u32| {
        let [own, other] = if lane & mask == 0 { two } else { [two[1], two[0]] };
        own + warp::shuffle_xor(other, mask)
    };
    if TILES > 8 {
        let four = [0, 1, 2, 3].map(|i| halve([sums[2 * i], sums[2 * i + 1]], 4));
        let two = [0, 1].map(|i| halve([four[2 * i], four[2 * i + 1]], 8));
        halve(two, 16)
    } else {
        let two = [0, 1].map(|i| halve([sums[2 * i], sums[2 * i + 1]], 4));
        let one = halve(two, 8);
        one + warp::shuffle_xor(one, 16)
    }
}

/// Compares a lane's outputs of the head with the best tokens of their rows.
struct Best {
    /// The lane's first row in the step's `best`.
    all: GlobalMut<u64>,
    /// Where [`Memory::BEST`] has that row, from the start of dynamic shared memory.
    here: u32,
    /// The number of the tile of rows.
    tile: u32,
    /// The lane's first feature.
    feature: u32,
}

/// A word of [`Memory::BEST`] is a key with the number of the tile of rows in place of its lowest bits, since a CTA may
/// come to rows of another tile. So of two words of the same tile, the greater has the greater key.
const TAGS: u32 = 4;
const _: () = assert!(MAX_BATCHED_ROWS <= TAGS * 128);

impl Best {
    /// For a unit's rows, from group `first` on.
    ///
    /// # Safety
    /// The phase is `Best`, and `outputs` are those of the unit from the group `first` on.
    #[device]
    unsafe fn new<const ROWS: u32>(p: &BatchedStep, outputs: &Outputs, unit: &Unit, first: u32) -> Self {
        let first = 8 * first + 2 * (thread::opaque(thread::lane_id()) % 4);
        Self {
            // SAFETY: the caller's word: there is a word for each row.
            all: unsafe { p.best.at((unit.row + first) as usize) },
            here: Memory::<ROWS>::BEST + first * 4,
            tile: unit.row / ROWS,
            feature: outputs.n_tile * N_TILE + outputs.g,
        }
    }

    /// Compares the lane's sums of a quarter of a tile's rows, from group `j` on, with the best so far. Few are better
    /// than what the CTA knows already, so the lane first reads what is known of all these rows.
    ///
    /// # Safety
    /// As for [`Outputs::olds`]; rows' factors were waited for, and `outputs` are those that this was made of.
    #[device]
    unsafe fn look<const TILES: usize>(&self, outputs: &Outputs, j: u32, sums: [[f32; 4]; QUARTER]) {
        // SAFETY: the caller's word.
        unsafe {
            let here = shared::dynamic::<u32>(self.here);
            let known = |row: u32| atomic::load(here, row as usize, Ordering::Relaxed, Scope::Block);
            let is_behind = |word: u32, known: u32| (known ^ word).is_multiple_of(TAGS) && known > word;
            let mut logits = [[0f32; 2]; 2 * QUARTER];
            let mut words = [0; 2 * QUARTER];
            let mut is_better = [false; 2 * QUARTER];
            unroll!(I < 4; {
                if I < TILES / 4 {
                    let factors = outputs.factors(j + I as u32);
                    unroll!(R < 2; {
                        let (i, row) = (2 * I + R, 8 * (j + I as u32) + R as u32);
                        let logit = |f: usize| {
                            if outputs.there[f] { sums[I][2 * f + R] * factors[R] } else { f32::NEG_INFINITY }
                        };
                        logits[i] = [logit(0), logit(1)];
                        words[i] = (key(logits[i][0]).max(key(logits[i][1])) / TAGS * TAGS) | self.tile;
                        // Both conditions are evaluated, without a branch.
                        is_better[i] = (row < outputs.rows[0]) & !is_behind(words[i], known(row));
                    });
                }
            });
            unroll!(I < 8; {
                let row = 8 * (j + (I / 2) as u32) + (I % 2) as u32;
                if is_better[I] {
                    atomic::fetch_max(here, row as usize, words[I], Ordering::Relaxed, Scope::Block);
                    // All CTAs' atomics on a row are serialised, so one lane of a warp should go on: the others find
                    // its word here.
                    if !is_behind(words[I], known(row)) {
                        let rank = |f: usize| {
                            if outputs.there[f] { rank(logits[I][f], self.feature + 8 * f as u32) } else { 0 }
                        };
                        let best = rank(0).max(rank(1));
                        atomic::fetch_max(self.all, row as usize, best, Ordering::Relaxed, Scope::Device);
                    }
                }
            });
        }
    }
}

/// Finishes and stores the sums in the lower accumulators, a quarter of a tile's rows at a time. They are first
/// multiplied by `scale`. `old` is what those of the first quarter are added to, loaded ahead.
///
/// # Safety
/// All lanes of the eight warps may call it, each warp by itself. The lower accumulators have complete sums, and no
/// MMAs are under way. `outputs` and `old` are of this unit and these groups, and rows' factors were waited for.
#[device]
pub unsafe fn put<const ROWS: u32, const TILES: usize, const KIND: u32>(
    p: &BatchedStep,
    unit: &Unit,
    outputs: &Outputs,
    first: u32,
    groups: u32,
    (mut old, scale): ([[f32; 4]; QUARTER], f32),
) {
    // SAFETY: the caller's word.
    unsafe {
        let best = if KIND == PhaseKind::BEST { Some(Best::new::<ROWS>(p, outputs, unit, first)) } else { None };
        macro_rules! quarters {
            ($groups:tt) => {
                if TILES == 4 * $groups {
                    unroll!(H < 4; {
                        if H as u32 * $groups < groups {
                            let mut next = [[0f32; 4]; QUARTER];
                            if H < 3 && (H as u32 + 1) * $groups < groups {
                                next = outputs.olds::<TILES>(KIND, (H as u32 + 1) * $groups);
                            }
                            let mut sums = [[0f32; 4]; QUARTER];
                            unroll!(J < $groups; {
                                sums[J] = accumulators!(4 * $groups * H + 4 * J).map(|sum: f32| sum * scale);
                            });
                            if let Some(best) = &best {
                                best.look::<TILES>(outputs, (H * $groups) as u32, sums);
                            } else {
                                outputs.put::<TILES, KIND>((H * $groups) as u32, sums, old);
                            }
                            #[allow(unused_assignments)]
                            {
                                old = next;
                            }
                        }
                    });
                }
            };
        }
        quarters!(2);
        quarters!(3);
        quarters!(4);
    }
}
