//! The main loop of a warpgroup: it multiplies one stage after another, adds split-K partials to totals, and runs the
//! epilogue of each tile beside the next tile's first MMAs.
//!
//! [`consume`] is the role of warpgroups 0 and 1. Each has 64 of the tile's 128 rows and `WIDTH` of its weight rows.
//! The [producer](super::producer) brings a tile's slices split-K partial by split-K partial. A lane's sums go like
//! this (`pₖ` are those of partial `k`):
//!
//! ```text
//! time ──►
//! MMAs          p₀ ─────────────► p₁ ──────► p₂ ──────► p₃ ──────►               p₀ of the next tile ───►
//! accumulators  p₀                p₁         p₂         p₃         t + p₃        p₀
//! totals t          t = p₀            t + p₁     t + p₂
//! epilogue      loads: early, ahead¹                    ahead²     reads sums    writes them, step by step
//!                                                                           begin ▲     ▲ step  ▲ step
//! ```
//!
//! ¹ With tiles of 256 weight rows, before there are totals, which need the registers. ² With 128, before `p₃`.
//!
//! Within a split-K partial the MMAs of one stage run while those of the next are issued; then the first of the two is
//! released. Between two partials the warpgroup waits for all MMAs, and adds. [`Next::begin`] begins the next tile as
//! soon as the epilogue no longer needs the accumulators, and [`Next::step`] goes on by a stage. After the CTA's last
//! tile, `begin` begins MMAs that nobody needs.
//!
//! | `WIDTH` | accumulators | totals |
//! |---|---|---|
//! | 128 | 0 to 63 | accumulators 64 to 127 |
//! | 256 | 0 to 127 | accumulators from [`wgmma::SPARE`] on, for the first 96; shared memory for the other 32 |
//!
//! The shared memory of totals is that of the epilogue's boxes. So TMA must have read the boxes before totals go there,
//! and lanes must have read the totals before boxes go there.
//!
//! # Safety
//! As for [the whole](super).

use cuda_std::cluster::PeerBarrier;
use cuda_std::shared::{self, Shared};
use cuda_std::wgmma::{self, Cores, Operand};
use cuda_std::{bulk, device, tensor, thread, warp};

use super::epilogue::{Epilogue, Half, Next, elected};
use super::tile_scheduler::Tiles;
use super::{BOX_BYTES, DEPTH, GROUP, GROUP_ROWS, Gemm, TOTALS_BYTES, WEIGHT_ROWS, X_BYTES, loaded, wait};
use crate::linear::K_PARTIALS;
use crate::ring::Ring;
use crate::stream::STEP_BYTES;

/// Begins the MMAs of the ring's stage.
///
/// # Safety
/// The stage is full, or it was and nobody fills it again. `x` and `weight` are the warpgroup's operands in the first
/// stage. With `first`, nobody needs the sums in the accumulators.
#[device]
unsafe fn multiply<const WIDTH: u32>(ring: &Ring, x: Operand, weight: Cores, first: bool) {
    // SAFETY: the caller's word.
    unsafe {
        let offset = ring.offset();
        let (x, weight) = (x.advance(offset), weight.advance(offset));
        wgmma::fence();
        unroll!(I < 4; {
            let (x, weight) = (x.advance(I as u32 * 32), weight.advance(I as u32 * STEP_BYTES));
            let keep = I != 0 || !first;
            if WIDTH == 256 {
                wgmma::mma_n256(x, weight, keep);
            } else {
                wgmma::mma_n128_by_cores(x, weight, keep);
            }
        });
        wgmma::commit();
    }
}

/// Releases a stage in every CTA of the cluster whose copies also land here: lane `i` of the warpgroup tells CTA `i`.
///
/// # Safety
/// The warpgroup has waited for the stage, and its MMAs that read it are done.
#[device]
unsafe fn free<const DOWN: u32, const ACROSS: u32>(ring: Ring) {
    let lane = thread::thread_idx_x() % GROUP;
    let blocks = DOWN * ACROSS;
    let (peer, own) = if blocks > 1 { (lane % blocks, thread::block_idx_x() % blocks) } else { (0, 0) };
    let shares = ACROSS == 1 || peer % DOWN == own % DOWN || peer / DOWN == own / DOWN;
    // SAFETY: the caller's word.
    unsafe { PeerBarrier::new(ring.empty(), peer).arrive_if(lane < blocks && shares) }
}

/// A warpgroup's main loop: its position in the ring and in its tile.
struct MainLoop<'a, const WIDTH: u32, const DOWN: u32, const ACROSS: u32> {
    p: &'a Gemm,
    tiles: Tiles,
    ring: Ring,
    /// The stage before `ring`'s.
    previous: Ring,
    /// Stages of the split-K partial whose MMAs are not begun.
    left: u32,
    x: Operand,
    weight: Cores,
    /// First row and feature of the tile; `None` after the last tile.
    at: Option<(u32, u32)>,
}

impl<const WIDTH: u32, const DOWN: u32, const ACROSS: u32> MainLoop<'_, WIDTH, DOWN, ACROSS> {
    /// Begins a split-K partial of `stages` stages, none of which is under way. Overwrites the accumulators.
    ///
    /// # Safety
    /// There is at least one stage, and it is the next in the ring.
    #[device]
    unsafe fn begin_k_partial(&mut self, stages: u32) {
        // SAFETY: the caller's word.
        unsafe {
            self.ring.wait_full();
            // Separate from `go_on`, so that `first` is a constant: the assembler then knows that the accumulators' old
            // contents are dead, and gives their registers to the work between split-K partials.
            multiply::<WIDTH>(&self.ring, self.x, self.weight, true);
            self.previous = self.ring;
            self.ring = self.ring.ahead(1);
            self.left = stages - 1;
        }
    }

    /// Begins the next stage's MMAs, waits for those of the stage before, and releases that stage.
    ///
    /// # Safety
    /// A stage of the split-K partial is [left](Self::left), and the one before it under way.
    #[device]
    unsafe fn go_on(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            self.ring.wait_full();
            multiply::<WIDTH>(&self.ring, self.x, self.weight, false);
            wgmma::wait::<1>();
            // The MMAs of the stage before are done; those just begun are not.
            free::<DOWN, ACROSS>(self.previous);
            self.previous = self.ring;
            self.ring = self.ring.ahead(1);
            self.left -= 1;
        }
    }

    /// Multiplies the remaining stages of the split-K partial, and waits for all its MMAs.
    ///
    /// # Safety
    /// The split-K partial was begun.
    #[device]
    unsafe fn end_k_partial(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            while self.left > 0 {
                self.go_on();
            }
            wgmma::wait::<0>();
            free::<DOWN, ACROSS>(self.previous);
        }
    }

    /// Where the lane keeps totals in shared memory.
    ///
    /// # Safety
    /// The lane is of a warpgroup that multiplies. Its warp alone uses what lies there.
    #[device]
    unsafe fn totals() -> Shared<u8> {
        // A warp's totals lie together, since the warp also stages outputs there. Its lanes' 16-byte pieces lie side by
        // side.
        let thread = thread::opaque(thread::thread_idx_x());
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(Gemm::boxes(256) + thread / 32 * (TOTALS_BYTES / 8) + thread % 32 * 16) }
    }

    /// Adds a finished split-K partial to the totals. With `FIRST` it begins the totals; with `LAST` it leaves them in
    /// the accumulators.
    ///
    /// # Safety
    /// The split-K partial's MMAs are done. With `FIRST` there are no totals of the tile yet, and boxes that lay where
    /// they go have been stored; otherwise there are totals.
    #[device]
    unsafe fn fold<const FIRST: bool, const LAST: bool>() {
        // SAFETY: the caller's word.
        unsafe {
            macro_rules! fold {
                ($total:expr, $k_partial:expr) => {{
                    // Adds to zero instead of moving: it turns -0 into +0, as in the other kernels.
                    let sum = if FIRST { 0.0 } else { wgmma::get::<{ $total }>() } + wgmma::get::<{ $k_partial }>();
                    if LAST { wgmma::set::<{ $k_partial }>(sum) } else { wgmma::set::<{ $total }>(sum) }
                }};
            }
            if WIDTH == 256 {
                unroll!(J < 6; {
                    unroll!(E < 16; {
                        fold!(wgmma::SPARE + 16 * J + E, 16 * J + E);
                    });
                });
                let totals = Self::totals();
                unroll!(J < 8; {
                    let place = totals.at(J * 32 * 16);
                    let old = if FIRST { [0.0; 4] } else { place.load16(0).map(f32::from_bits) };
                    let sums = [
                        old[0] + wgmma::get::<{ 96 + 4 * J }>(),
                        old[1] + wgmma::get::<{ 97 + 4 * J }>(),
                        old[2] + wgmma::get::<{ 98 + 4 * J }>(),
                        old[3] + wgmma::get::<{ 99 + 4 * J }>(),
                    ];
                    if LAST {
                        unroll!(E < 4; {
                            wgmma::set::<{ 96 + 4 * J + E }>(sums[E]);
                        });
                    } else {
                        place.store16(0, sums.map(f32::to_bits));
                    }
                });
                if LAST {
                    // The epilogue of the warp uses the memory of these totals.
                    warp::sync_warp();
                }
            } else {
                unroll!(J < 16; {
                    unroll!(E < 4; {
                        fold!(64 + 4 * J + E, 4 * J + E);
                    });
                });
            }
        }
    }

    /// Multiplies the tile's split-K partials from `k_partial` to before `end`, and adds each to the totals.
    ///
    /// # Safety
    /// The split-K partials of the tile before `k_partial` are among its totals, at least one of them, and none is
    /// under way.
    #[device]
    unsafe fn go_on_to_k_partial(&mut self, k_partial: &mut u32, end: u32) {
        while *k_partial < end {
            let stages = self.p.k_partial(*k_partial);
            // A matrix may have fewer slices than split-K partials.
            if stages > 0 {
                // SAFETY: the caller's word.
                unsafe {
                    self.begin_k_partial(stages);
                    self.end_k_partial();
                    Self::fold::<false, false>();
                }
            }
            *k_partial += 1;
        }
    }

    /// Multiplies the tile's last split-K partial. Afterwards the accumulators hold the tile's sums.
    ///
    /// # Safety
    /// All split-K partials of the tile but the last are among its totals, and none is under way.
    #[device]
    unsafe fn end(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            let stages = self.p.k_partial(K_PARTIALS - 1);
            if stages > 0 {
                self.begin_k_partial(stages);
                self.end_k_partial();
                Self::fold::<false, true>();
            } else {
                Self::zero();
                Self::fold::<false, true>();
            }
        }
    }

    /// Sets the accumulators to an empty split-K partial.
    #[device]
    fn zero() {
        unroll!(J < 16; {
            unroll!(E < 4; {
                wgmma::set::<{ 4 * J + E }>(0.0);
                if WIDTH == 256 {
                    wgmma::set::<{ 64 + 4 * J + E }>(0.0);
                }
            });
        });
    }
}

impl<const WIDTH: u32, const DOWN: u32, const ACROSS: u32> Next for MainLoop<'_, WIDTH, DOWN, ACROSS> {
    #[device]
    unsafe fn begin(&mut self) {
        // SAFETY: the caller's word.
        unsafe {
            self.at = self.tiles.next();
            let some = self.at.is_some();
            // After the last tile, begins MMAs that nobody needs, of a stage that was multiplied already. If MMAs were
            // under way after some tiles and not after others, the assembler would let none of them run beside other
            // work.
            let stage = if some { self.ring } else { self.previous };
            if some {
                stage.wait_full();
            }
            multiply::<WIDTH>(&stage, self.x, self.weight, true);
            self.previous = stage;
            self.ring = stage.ahead(1);
            self.left = if some { self.p.k_partial(0) - 1 } else { 0 };
        }
    }

    #[device]
    unsafe fn step(&mut self) {
        if self.left > 0 {
            // SAFETY: the caller's word.
            unsafe { self.go_on() };
        }
    }
}

/// A warpgroup multiplies what arrives by `WIDTH` of the weight rows, and finishes its part of each tile.
///
/// # Safety
/// As [`Inputs::consume`](super::Inputs::consume) says, of tiles that are loaded for `N` weight rows; `WIDTH` is the
/// same throughout a warpgroup.
#[device]
pub unsafe fn consume<E: Epilogue, const N: u32, const WIDTH: u32, const DOWN: u32, const ACROSS: u32>(
    p: &Gemm,
    tiles: Tiles,
) {
    // SAFETY: the caller's word.
    unsafe {
        let group = thread::warp_id() / 4;
        // The first weight row of the stage that this warpgroup multiplies.
        let from = || if WIDTH < loaded(N) { thread::opaque(thread::block_idx_x()) % 2 * WEIGHT_ROWS } else { 0 };
        let first = shared::dynamic::<u8>(0);
        let ring = Ring::consumer(Gemm::ring(N));
        let mut products: MainLoop<'_, WIDTH, DOWN, ACROSS> = MainLoop {
            p,
            tiles,
            ring,
            previous: ring,
            left: 0,
            x: Operand::at(first).advance(group * GROUP_ROWS * DEPTH * 2),
            weight: Cores::at(first).advance(X_BYTES + from() * DEPTH * 2),
            at: None,
        };
        let staging = shared::dynamic(Gemm::boxes(N) + group * if N == 128 { 2 * BOX_BYTES } else { TOTALS_BYTES / 2 });
        let mut half = Half { tile_row: 0, row: 0, column: 0, turn: 0, barrier: 1 + group, staging };
        if elected() && !p.out.is_null() {
            tensor::acquire(p.out);
        }
        wait::<DOWN, ACROSS>(p);
        if products.tiles.clone().next().is_none() {
            return;
        }
        products.begin();
        // There is a first tile. This return, which is never taken, tells the compiler so, and saves registers.
        if products.at.is_none() {
            wgmma::wait::<0>();
            return;
        }
        while let Some((row, column)) = products.at {
            (half.tile_row, half.row, half.column) = (row, row + group * GROUP_ROWS, column + from());
            // A cluster's last tiles may lie beyond the matrix.
            let inside = row < p.m && half.column < p.n;
            let early = E::early(p, &half);
            products.end_k_partial();
            if WIDTH == 256 && N == 256 {
                // Totals go to where boxes were, which may not have been stored yet.
                half.finish_stores();
            }
            let mut k_partial = 1;
            // Narrow tiles have registers for what `ahead` loads beside the totals. With wide tiles it comes before the
            // totals, which need the registers.
            let ahead = if WIDTH == 256 {
                let ahead = E::ahead::<WIDTH>(p, &half, inside, early);
                MainLoop::<WIDTH, DOWN, ACROSS>::fold::<true, false>();
                ahead
            } else {
                MainLoop::<WIDTH, DOWN, ACROSS>::fold::<true, false>();
                products.go_on_to_k_partial(&mut k_partial, K_PARTIALS - 1);
                E::ahead::<WIDTH>(p, &half, inside, early)
            };
            products.go_on_to_k_partial(&mut k_partial, K_PARTIALS - 1);
            products.end();
            if E::LAST_APART && products.tiles.clone().next().is_none() {
                if inside {
                    E::finish_last::<WIDTH>(p, &half, ahead);
                }
                // Returns here, not by way of the wait below. On this path the accumulators hold sums instead of MMAs
                // to wait for, and the assembler would serialise all MMAs.
                return;
            }
            if N == 192 {
                // A CTA takes one tile.
                if inside {
                    E::finish::<WIDTH>(p, &mut half, ahead, &mut ());
                }
                if elected() {
                    bulk::wait::<0>();
                }
                return;
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
