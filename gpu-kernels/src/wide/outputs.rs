//! What becomes of sums.

use cuda_std::{Global, GlobalMut, bf16, math, shared, thread, warp, wgmma};

use super::phases::{Product, Unit};
use super::product::Partial;
use super::{Kind, MAX_WIDE_ROWS, Memory, Phase, RESIDUES, WideStep};
use crate::linear::{STRIP, slot};

/// What a lane has of a tile's outputs: features `g` and `g + 8` of its warp's strip (of a gate-up strip: a gate and its up), for rows `8 j + 2 t` and one
/// on of every eight.
pub struct Outputs {
    strip: u32,
    /// Strips of the matrix, and output features.
    strips: u32,
    n: u32,
    /// Where `Write` puts them.
    y: GlobalMut<f32>,
    /// The tile's first row, and how many there are.
    row: u32,
    rows: u32,
    g: u32,
    t: u32,
    features: [u32; 2],
    /// Of the norm that comes next.
    weight: [f32; 2],
}

impl Outputs {
    #[inline(always)]
    pub unsafe fn new<const KIND: u32>(p: &WideStep, product: &Product, unit: &Unit, rows: u32) -> Self {
        unsafe {
            // Loaded again: over the products it would take a register.
            let count = p.rows.count.load(0).min(MAX_WIDE_ROWS);
            let lane = thread::fresh(thread::lane_id());
            let (g, t) = (lane / 4, lane % 4);
            let strip = unit.strip + thread::fresh(thread::warp_id());
            let features = [strip * STRIP + g, strip * STRIP + g + 8];
            let mut weight = [0.0; 2];
            if KIND == Kind::ADD && strip < product.strips {
                let norm = field!(product.phase, norm: Global<bf16>);
                weight = features.map(|f| math::from_bf16(norm.load_nc(f as usize)));
            }
            Self {
                strip,
                strips: product.strips,
                n: field!(product.phase, n: u32),
                y: field!(product.phase, y: GlobalMut<f32>),
                row: unit.row,
                rows: count.saturating_sub(unit.row).min(rows),
                g,
                t,
                features,
                weight,
            }
        }
    }

    /// What the lane's outputs of rows `8 j …` are added to.
    #[inline(always)]
    pub unsafe fn old<const KIND: u32>(&self, p: &WideStep, j: u32) -> [f32; 4] {
        let mut old = [0f32; 4];
        if KIND == Kind::ADD {
            unroll!(I < 4; {
                let at = 8 * j + 2 * self.t + I as u32 % 2;
                if at < self.rows {
                    let at = (self.row + at) as usize * self.n as usize + self.features[I / 2] as usize;
                    old[I] = unsafe { p.residual.x.load(at) };
                }
            });
        }
        old
    }

    /// Puts the lane's sums of rows `8 j …` where they belong. A warp does it together.
    #[inline(always)]
    pub unsafe fn put<const ROWS: u32, const KIND: u32>(&self, p: &WideStep, j: u32, sums: [f32; 4], old: [f32; 4]) {
        unsafe {
            let n = self.n as usize;
            let y = self.y;
            unroll!(R < 2; {
                let at = 8 * j + 2 * self.t + R as u32;
                let valid = at < self.rows;
                let at = (self.row + at) as usize;
                let factor = if Kind::is_normed(KIND) && valid {
                    shared::dynamic::<f32>(Memory::<ROWS>::SCRATCH).load(at)
                } else {
                    1.0
                };
                match KIND {
                    Kind::WRITE => {
                        unroll!(F < 2; {
                            if valid && self.features[F] < self.n {
                                y.store(at * n + self.features[F] as usize, sums[2 * F + R] * factor);
                            }
                        });
                    }
                    Kind::SWIGLU => {
                        let feature = self.strip * (STRIP / 2) + self.g;
                        if valid && feature < self.n {
                            let (gate, up) = (sums[R] * factor, sums[2 + R] * factor);
                            let silu = gate / (1.0 + math::exp(-gate));
                            p.activation.store(at * n + slot(feature) as usize, math::to_bf16(silu * up));
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
                            unroll!(F < 2; {
                                p.residual.x.store(at * n + self.features[F] as usize, x[F]);
                                let to = at * n + slot(self.features[F]) as usize;
                                p.residual.scaled.store(to, math::to_bf16(x[F] * self.weight[F]));
                            });
                            if self.g == 0 {
                                p.residual.squares.store(at * (n / STRIP as usize) + self.strip as usize, squares);
                            }
                        }
                    }
                }
            });
        }
    }
}

/// Puts the totals of a whole tile where they belong, four groups of rows at a time.
#[inline(always)]
pub unsafe fn finish_whole<const ROWS: u32, const TILES: usize, const KIND: u32>(
    p: &WideStep,
    product: &Product,
    unit: &Unit,
) {
    unsafe {
        let outputs = Outputs::new::<KIND>(p, product, unit, ROWS);
        if outputs.strip >= outputs.strips {
            return;
        }
        unroll!(H < 4; {
            if 4 * H < TILES {
                let mut old = [[0f32; 4]; 4];
                unroll!(J < 4; {
                    old[J] = outputs.old::<KIND>(p, (4 * H + J) as u32);
                });
                unroll!(J < 4; {
                    let sums = accumulators!(16 * H + 4 * J);
                    outputs.put::<ROWS, KIND>(p, (4 * H + J) as u32, sums, old[J]);
                });
            }
        });
    }
}

/// Adds the chains of this part's share of a split tile's rows, first to last, and puts the sums where they belong; two groups of rows at a time,
/// one where accumulators leave no more registers.
#[inline(always)]
pub unsafe fn finish_share<const ROWS: u32, const TILES: usize, const KIND: u32>(
    p: &WideStep,
    product: &Product,
    unit: &Unit,
    arrivals: GlobalMut<u32>,
) {
    unsafe {
        let share = product.share;
        let outputs = Outputs::new::<KIND>(p, product, unit, ROWS);
        let partial = Partial::new::<TILES>(p, product, unit, arrivals);
        let rows = TILES as u32 >> share.shift;
        let mut j = (unit.residue << share.shift) / RESIDUES * rows;
        let end = j + rows;
        partial.wait(share.parts());
        if outputs.strip >= outputs.strips {
            return;
        }
        while j < end {
            let mut words = [[[0u32; 4]; RESIDUES as usize]; 2];
            let mut old = [[0f32; 4]; 2];
            unroll!(I < 2; {
                if I < 16 / TILES && j + (I as u32) < end {
                    unroll!(C < 8; {
                        if (C as u32) < share.chains() {
                            words[I][C] = partial.place(C as u32, j + I as u32).load16(0);
                        }
                    });
                    old[I] = outputs.old::<KIND>(p, j + I as u32);
                }
            });
            unroll!(I < 2; {
                if I < 16 / TILES && j + (I as u32) < end {
                    let mut sums = [0f32; 4];
                    unroll!(C < 8; {
                        if (C as u32) < share.chains() {
                            unroll!(E < 4; {
                                sums[E] += f32::from_bits(words[I][C][E]);
                            });
                        }
                    });
                    outputs.put::<ROWS, KIND>(p, j + I as u32, sums, old[I]);
                }
            });
            j += 16 / TILES as u32;
        }
    }
}
