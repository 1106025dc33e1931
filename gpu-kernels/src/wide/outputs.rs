//! What becomes of sums.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, bf16, math, shared, thread, warp, wgmma};

use super::phases::{Product, Unit};
use super::{Kind, MAX_WIDE_ROWS, Memory, Phase, WideStep};
use crate::gate::swiglu;
use crate::linear::{STRIP, slot};
use crate::sample::{key, rank};

/// What a lane has of a tile's outputs: features `g` and `g + 8` of its warp's strip (of a gate-up strip: a gate and its up), for rows `8 j + 2 t` and one
/// on of every eight. Where they go is found once a tile: what an epilogue computes for an output is time in which no products run.
pub struct Outputs {
    strip: u32,
    /// Of the lane's first row and feature: what `Write` writes, or `Add` adds to; the other feature is 8 elements on.
    sums: GlobalMut<u8>,
    /// Likewise: the activations that come of it; of `Add`, those of the other feature are [`SLOTS_APART`] elements on.
    activations: GlobalMut<u8>,
    /// Bytes from a row of these to the next.
    strides: [u32; 2],
    /// Of the strip and the lane's first row: the sum of squares.
    squares: GlobalMut<u8>,
    /// Where the lane's first row has its factor, from the start of dynamic shared memory.
    factors: u32,
    /// The lane's rows that there are, counted from its first on in all of these, none where the matrix has no such strip; and whether its features are: `Add` has no others.
    rows: u32,
    there: [bool; 2],
    g: u32,
    /// Of the norm that comes next.
    weight: [f32; 2],
}

/// Most groups of eight rows in a quarter of a tile.
pub const QUARTER: usize = 4;

/// Elements between a feature and the one 8 further, in the order of [`slot`], where the first is below 8 of 16.
const SLOTS_APART: u32 = slot(8);
const _: () = assert!(slot(16 + 7 + 8) - slot(16 + 7) == SLOTS_APART);

impl Outputs {
    /// Those of some groups of eight rows of a tile, from the `first` on.
    #[inline(always)]
    pub unsafe fn new<const ROWS: u32>(
        p: &WideStep,
        product: &Product,
        unit: &Unit,
        kind: u32,
        first: u32,
        groups: u32,
    ) -> Self {
        unsafe {
            // Loaded again: over the products it would take a register.
            let count = p.rows.count.load(0).min(MAX_WIDE_ROWS);
            let lane = thread::fresh(thread::lane_id());
            let (g, t) = (lane / 4, lane % 4);
            let strip = unit.strip + thread::fresh(thread::warp_id());
            let n = field!(product.phase, n: u32);
            let row = unit.row + 8 * first + 2 * t;
            let feature = strip * if kind == Kind::SWIGLU { STRIP / 2 } else { STRIP } + g;
            let at = |feature: u32| row as usize * n as usize + feature as usize;
            let mut weight = [0.0; 2];
            let (mut sums, mut activations) = (GlobalMut::default(), GlobalMut::default());
            match kind {
                Kind::WRITE => sums = field!(product.phase, y: GlobalMut<f32>).at(at(feature)),
                Kind::BEST => {}
                Kind::SWIGLU => activations = p.activation.at(at(slot(feature))),
                _ => {
                    (sums, activations) = (p.residual.x.at(at(feature)), p.residual.scaled.at(at(slot(feature))));
                    if strip < product.strips {
                        let norm = field!(product.phase, norm: Global<bf16>);
                        weight = [0, 8].map(|i| math::from_bf16(norm.load_nc((feature + i) as usize)));
                    }
                }
            }
            let squares = row as usize * (n / STRIP) as usize + strip as usize;
            Self {
                strip,
                sums: sums.cast(),
                activations: activations.cast(),
                strides: [n * 4, n * 2],
                squares: p.residual.squares.at(squares).cast(),
                factors: Memory::<ROWS>::FACTORS + row * 4,
                rows: if strip < product.strips { count.saturating_sub(row).min(8 * groups - 2 * t) } else { 0 },
                there: [feature < n, feature + 8 < n],
                g,
                weight,
            }
        }
    }

    /// A row's place from that of the lane's first, so many bytes from row to row.
    #[inline(always)]
    unsafe fn of_row(first: GlobalMut<u8>, row: u32, stride: u32) -> GlobalMut<u8> {
        // Both factors are seen to have 32 bits where they are multiplied: one instruction.
        unsafe { first.at(row as usize * thread::fresh(stride) as usize) }
    }

    /// What the lane's outputs of rows `8 j …` are added to.
    #[inline(always)]
    unsafe fn old(&self, kind: u32, j: u32) -> [f32; 4] {
        let mut old = [0f32; 4];
        if kind == Kind::ADD {
            unroll!(R < 2; {
                let row = 8 * j + R as u32;
                if row < self.rows {
                    let from = unsafe { Self::of_row(self.sums, row, self.strides[0]) }.cast::<f32>();
                    (old[R], old[2 + R]) = unsafe { (from.load(0), from.load(8)) };
                }
            });
        }
        old
    }

    /// Of a quarter of a tile's rows, from group `j` on.
    #[inline(always)]
    pub unsafe fn olds<const TILES: usize>(&self, kind: u32, j: u32) -> [[f32; 4]; QUARTER] {
        let mut old = [[0f32; 4]; QUARTER];
        unroll!(I < 4; {
            if I < TILES / 4 {
                old[I] = unsafe { self.old(kind, j + I as u32) };
            }
        });
        old
    }

    /// The norm's factors of the lane's rows `8 j …`.
    #[inline(always)]
    unsafe fn factors(&self, j: u32) -> [f32; 2] {
        if 8 * j >= self.rows {
            return [1.0; 2];
        }
        // They are found for four rows at a time, so there is one for the second, too.
        unsafe { shared::dynamic::<[f32; 2]>(self.factors).load(4 * j as usize) }
    }

    /// Puts the lane's sums of rows `8 j …` where they belong. A warp does it together.
    #[inline(always)]
    unsafe fn put<const KIND: u32>(&self, j: u32, sums: [f32; 4], old: [f32; 4]) {
        unsafe {
            let factors = if Kind::is_normed(KIND) { self.factors(j) } else { [1.0; 2] };
            unroll!(R < 2; {
                let row = 8 * j + R as u32;
                let valid = row < self.rows;
                match KIND {
                    Kind::WRITE => {
                        let to = Self::of_row(self.sums, row, self.strides[0]).cast::<f32>();
                        unroll!(F < 2; {
                            if valid && self.there[F] {
                                to.store(8 * F, sums[2 * F + R] * factors[R]);
                            }
                        });
                    }
                    Kind::SWIGLU => {
                        let (gate, up) = (sums[R] * factors[R], sums[2 + R] * factors[R]);
                        if valid && self.there[0] {
                            let to = Self::of_row(self.activations, row, self.strides[1]);
                            to.cast().store(0, math::to_bf16(swiglu(gate, up)));
                        }
                    }
                    _ => {
                        let x = [old[R] + sums[R], old[2 + R] + sums[2 + R]];
                        // As `Residual::put` adds a strip's squares: eight apart first, then the lanes of a group of eight.
                        let mut squares = x[0] * x[0] + x[1] * x[1];
                        let mut mask = 16;
                        while mask > 2 {
                            squares += warp::shuffle_xor(squares, mask);
                            mask /= 2;
                        }
                        if valid {
                            let to = Self::of_row(self.sums, row, self.strides[0]).cast::<f32>();
                            let scaled = Self::of_row(self.activations, row, self.strides[1]).cast::<bf16>();
                            unroll!(F < 2; {
                                to.store(8 * F, x[F]);
                                scaled.store(F * SLOTS_APART as usize, math::to_bf16(x[F] * self.weight[F]));
                            });
                        }
                        if valid && self.g == 0 {
                            Self::of_row(self.squares, row, self.strides[0] / STRIP).cast().store(0, squares);
                        }
                    }
                }
            });
        }
    }
}

/// What a lane's outputs of the head are candidates for: the best tokens of its rows.
struct Best {
    /// Of the lane's first row.
    all: GlobalMut<u64>,
    /// Likewise, from the start of dynamic shared memory: [`Memory::BEST`].
    here: u32,
    /// The number of the tile of rows.
    tile: u32,
    /// The lane's first feature.
    feature: u32,
}

/// A word of [`Memory::BEST`] has the number of a tile of rows in place of a key's lowest bits: a block may come to rows of another tile. So it is at most the key.
const TAGS: u32 = 4;
const _: () = assert!(MAX_WIDE_ROWS <= TAGS * 128);

impl Best {
    #[inline(always)]
    unsafe fn new<const ROWS: u32>(p: &WideStep, outputs: &Outputs, unit: &Unit, first: u32) -> Self {
        let first = 8 * first + 2 * (thread::fresh(thread::lane_id()) % 4);
        Self {
            // SAFETY: there is a word for each row.
            all: unsafe { p.best.at((unit.row + first) as usize) },
            here: Memory::<ROWS>::BEST + first * 4,
            tile: unit.row / ROWS,
            feature: outputs.strip * STRIP + outputs.g,
        }
    }

    /// Looks at the lane's sums of rows `8 j …`. Few are better than what the block knows of already.
    #[inline(always)]
    unsafe fn look(&self, outputs: &Outputs, j: u32, sums: [f32; 4]) {
        unsafe {
            let factors = outputs.factors(j);
            let here = shared::dynamic::<u32>(self.here);
            unroll!(R < 2; {
                let row = 8 * j + R as u32;
                let logits = [sums[R] * factors[R], sums[2 + R] * factors[R]];
                let logit = |i: usize| if outputs.there[i] { logits[i] } else { f32::NEG_INFINITY };
                let word = (key(math::max(logit(0), logit(1))) / TAGS * TAGS) | self.tile;
                let is_behind = || {
                    let known = atomic::load(here, row as usize, Ordering::Relaxed, Scope::Block);
                    (known ^ word).is_multiple_of(TAGS) && known > word
                };
                if row < outputs.rows && !is_behind() {
                    atomic::fetch_max(here, row as usize, word, Ordering::Relaxed, Scope::Block);
                    // All blocks' atomics on a row come one after another: of a warp's lanes one goes on.
                    if !is_behind() {
                        let rank = |i: usize| {
                            if outputs.there[i] { rank(logits[i], self.feature + 8 * i as u32) } else { 0 }
                        };
                        let best = rank(0).max(rank(1));
                        atomic::fetch_max(self.all, row as usize, best, Ordering::Relaxed, Scope::Device);
                    }
                }
            });
        }
    }
}

/// Puts the sums in the lower accumulators where they belong, a quarter of a tile's rows at a time. `old` is what the first of these are added to, asked for before.
#[inline(always)]
pub unsafe fn put<const ROWS: u32, const TILES: usize, const KIND: u32>(
    p: &WideStep,
    unit: &Unit,
    outputs: &Outputs,
    first: u32,
    groups: u32,
    mut old: [[f32; 4]; QUARTER],
) {
    unsafe {
        if KIND == Kind::BEST {
            let best = Best::new::<ROWS>(p, outputs, unit, first);
            unroll!(J < TILES of 16; {
                if (J as u32) < groups {
                    best.look(outputs, J as u32, accumulators!(4 * J));
                }
            });
            return;
        }
        macro_rules! quarters {
            ($groups:tt) => {
                if TILES == 4 * $groups {
                    unroll!(H < 4; {
                        if H as u32 * $groups < groups {
                            let mut next = [[0f32; 4]; QUARTER];
                            if H < 3 && (H as u32 + 1) * $groups < groups {
                                next = outputs.olds::<TILES>(KIND, (H as u32 + 1) * $groups);
                            }
                            unroll!(J < $groups; {
                                let sums = accumulators!(4 * $groups * H + 4 * J);
                                outputs.put::<KIND>((H * $groups + J) as u32, sums, old[J]);
                            });
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
        quarters!(4);
    }
}
