//! GEMMs of e4m3: codes of rows and of weights, in groups of [`GROUP`] inputs that each have a scale.
//!
//! ```text
//! y[row, n] = Σ_g  x_scale[g, row] · w_scale[n / 128, g] · Σ_{k in g} x[row, k] · w[n, k]
//! ```
//!
//! The tensor core computes the inner sum. It adds e4m3 with some 14 bits of mantissa, so after every stage the kernel
//! adds the inner sum in f32, times its scales. Two codes lie where a bf16 would: a stage has 128 inputs instead of 64,
//! in as many bytes, with its scales behind them.
//!
//! # Order
//! An output is the sum, from the first group to the last, of `fma(inner sum, x_scale · w_scale, sum)`. The bits of an
//! inner sum depend neither on which operand is A nor on the number of rows.
//!
//! # Pipeline
//! A lane has 64 outputs, and two sets of 64 inner sums. While it adds one set to the outputs, the tensor cores
//! multiply the next stage into the other.
//!
//! # Safety
//! As for [the GEMMs of bf16](super), and the scales are as [`E4m3`] says. Whole warpgroups call what multiplies; each
//! of them has outputs and two sets of inner sums in its accumulators. The scales of a stage are read by ordinary
//! loads, for which no `wgmma` waits: so each warp releases a stage, when its loads are done.

use cuda_std::shared::{self, Shared};
use cuda_std::wgmma::{self, Cores, Operand};
use cuda_std::{Global, bulk, device, kernel, math, tensor, thread, warp};

use super::epilogue::{AddTo, Epilogue, Half, Next, Qkv, SwiGlu, SwiGluCoded, Write, elected};
use super::tile_scheduler::{InOrder, Tiles};
use super::{BOX_BYTES, DEPTH, GROUP_ROWS, Gemm, Inputs, THREADS, TILE_ROWS, WEIGHT_ROWS, X_BYTES, gemm_of, wait};
use crate::e4m3::GROUP;
use crate::linear::N_TILE;
use crate::ring::{Ring, Shape};
use crate::stream::{GROUP_N_TILES, STEP_BYTES};

const _: () = assert!(GROUP == 2 * DEPTH && GROUP_N_TILES * N_TILE == WEIGHT_ROWS && WEIGHT_ROWS == 128);

/// The scales of a GEMM's operands.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct E4m3 {
    /// `[groups, x_rows]`: the scales of the rows, with room for whole tiles of rows.
    pub x_scales: Global<f32>,
    /// The matrix's [`Weights::scales`](crate::e4m3::Weights::scales).
    pub w_scales: Global<f32>,
    /// Rows that `x_scales` has room for: whole tiles.
    pub x_rows: u32,
    /// Groups of a row: an even number.
    pub groups: u32,
}

/// Parameters of the GEMMs of e4m3: as [`Gemm`], with pairs of codes in place of bf16.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct GemmE4m3 {
    /// Its `x` and `stream` have pairs of codes. Its `k` counts pairs, 64 for each of the [groups](E4m3::groups).
    /// Beyond the matrix's inputs the map and the stream have zeros, with scales of zero.
    pub gemm: Gemm,
    /// The scales.
    pub scales: E4m3,
}

/// Bytes of a stage's scales: of its rows, and of its weights.
const X_SCALES: u32 = TILE_ROWS * 4;
const W_SCALES: u32 = 16;
/// Bytes of a stage behind its rows and weights. A multiple of 1,024, since swizzled rows begin at such multiples.
const TAIL_BYTES: u32 = 1024;
/// Bytes of a stage's rows and weights.
const CODES: u32 = X_BYTES + WEIGHT_ROWS * DEPTH * 2;
const RING: Shape = Shape::new(0, 5, CODES + TAIL_BYTES);
// The epilogue's boxes lie where they lie with bf16.
const _: () = assert!(RING.end() <= Gemm::boxes(128));

/// The first accumulator of the outputs, and that of the second set of inner sums.
const OUTPUTS: usize = 128;
const SECOND_SET: usize = 64;

/// Repeats a body for each of a lane's 64 outputs. Number `4 J + E` is of the lane's row `E / 2`, and of the `J`-th
/// eight weight rows.
macro_rules! each_output {
    ($what:block) => {
        unroll!(J < 16; {
            unroll!(E < 4; $what);
        });
    };
}

/// Adds the inner sums from accumulator `$first` on to the outputs, times their scales.
macro_rules! add_scaled {
    ($first:expr, $scales:expr) => {
        each_output!({
            let inner = wgmma::get::<{ $first + 4 * J + E }>();
            let sum = wgmma::get::<{ OUTPUTS + 4 * J + E }>();
            wgmma::set::<{ OUTPUTS + 4 * J + E }>(math::fma(inner, $scales[E / 2][J % 2], sum));
        });
    };
}

/// A stage's scales, as a lane loads them: those of its two rows, and those of the weights.
struct StageScales {
    x: [f32; 2],
    w: [f32; 2],
}

impl StageScales {
    /// Releases the stage, and returns the products of row and weight scales, `[row][which weight scale]`. They are
    /// computed before the release, so the scales have been read by then; but no sooner, to hide the latency of the
    /// loads.
    ///
    /// # Safety
    /// All lanes of the warp call it, once for each stage. These are the stage's, and the MMAs that read it are done.
    #[device]
    unsafe fn release(self, ring: &Ring) -> [[f32; 2]; 2] {
        let products = self.x.map(|x| self.w.map(|w| f32::from_bits(thread::opaque((x * w).to_bits()))));
        // SAFETY: the caller's word.
        unsafe { ring.release_unfenced() };
        products
    }
}

/// A warpgroup's operands in the ring's first stage.
#[derive(Clone, Copy)]
struct Operands {
    x: Operand,
    weight: Cores,
}

impl Operands {
    /// Begins the inner sums of the ring's stage, in the first set or the `SECOND`. It waits for the stage unless that
    /// was found `full`. Also loads the stage's scales.
    ///
    /// # Safety
    /// The warpgroup calls it, and the set's MMAs are done and their sums added. `full` holds only if the stage was
    /// found so. The stage is [released](StageScales::release) after the MMAs are done.
    #[device]
    unsafe fn multiply<E: Epilogue, const SECOND: bool>(self, ring: &Ring, full: bool) -> StageScales {
        // SAFETY: the caller's word.
        unsafe {
            if !full {
                ring.wait_full();
            }
            let offset = ring.offset();
            let (x, weight) = (self.x.advance(offset), self.weight.advance(offset));
            wgmma::fence();
            unroll!(I < 4; {
                let (x, weight) = (x.advance(I as u32 * 32), weight.advance(I as u32 * STEP_BYTES));
                wgmma::mma_e4m3_n128::<SECOND>(x, weight, I != 0);
            });
            wgmma::commit();
            let thread = thread::opaque(thread::thread_idx_x());
            let row = thread / 32 * 16 + thread % 32 / 4;
            let tail: Shared<f32> = ring.stage_buffer().at(CODES as usize).cast();
            let x = [tail.load(row as usize), tail.load(row as usize + 8)];
            let w = tail.at(TILE_ROWS as usize).cast::<[f32; 2]>().load(0);
            StageScales { x, w: if E::GATED { w } else { [w[0]; 2] } }
        }
    }

    /// Multiplies all groups of a tile, from the ring's next stage on. In the end the outputs are in the lowest
    /// accumulators.
    ///
    /// # Safety
    /// The warpgroup calls it for the tile that the ring's next stages are of, with as many groups as these, an even
    /// number and not 0. No MMAs are under way.
    #[device]
    unsafe fn tile<E: Epilogue>(self, ring: &mut Ring, groups: u32) {
        // SAFETY: the caller's word.
        unsafe {
            each_output!({
                wgmma::set::<{ OUTPUTS + 4 * J + E }>(0.0);
            });
            let mut even = self.multiply::<E, false>(ring, false);
            let mut full = ring.ahead(1).is_full();
            // The last two groups come after the loop. If MMAs were under way in some turns and not in others, the
            // assembler would serialise them.
            let mut pairs = groups / 2 - 1;
            while pairs > 0 {
                let second = ring.ahead(1);
                let odd = self.multiply::<E, true>(&second, full);
                wgmma::wait::<1>();
                let scales = even.release(ring);
                *ring = second.ahead(1);
                // Polled before the sums are added, to hide the latency of the answer.
                full = ring.is_full();
                add_scaled!(0, scales);
                even = self.multiply::<E, false>(ring, full);
                wgmma::wait::<1>();
                let scales = odd.release(&second);
                full = ring.ahead(1).is_full();
                add_scaled!(SECOND_SET, scales);
                pairs -= 1;
            }
            let second = ring.ahead(1);
            let odd = self.multiply::<E, true>(&second, full);
            wgmma::wait::<0>();
            let (even, odd) = (even.release(ring), odd.release(&second));
            add_scaled!(0, even);
            add_scaled!(SECOND_SET, odd);
            *ring = second.ahead(1);
            each_output!({
                wgmma::set::<{ 4 * J + E }>(wgmma::get::<{ OUTPUTS + 4 * J + E }>());
            });
        }
    }
}

/// A next tile whose MMAs begin after the epilogue: the second set of inner sums takes the registers that a next tile
/// would need.
struct Apart;

impl Next for Apart {
    #[device]
    unsafe fn begin(&mut self) {}

    #[device]
    unsafe fn step(&mut self) {}
}

/// Waits for `stages` stages and releases them, without reading them.
///
/// # Safety
/// The warpgroup calls it. As many stages come as `stages` says.
#[device]
unsafe fn skip(ring: &mut Ring, mut stages: u32) {
    while stages > 0 {
        // SAFETY: the caller's word; nothing was read.
        unsafe {
            ring.wait_full();
            ring.release_unfenced();
        }
        *ring = ring.ahead(1);
        stages -= 1;
    }
}

/// The operands of a tile that `SHARERS` neighbouring CTAs take. If there are two, each multiplies half of the rows: a
/// warpgroup that has the tensor cores to itself takes less time.
#[derive(Clone, Copy)]
struct SharedBy<const SHARERS: u32>(E4m3);

impl<const SHARERS: u32> Inputs for SharedBy<SHARERS> {
    const TAIL_BYTES: u32 = TAIL_BYTES;
    const COPIED: u32 = X_SCALES + W_SCALES;
    const SPLIT: bool = false;
    const SHARERS: u32 = SHARERS;
    const RELEASES: u32 = 8;

    #[device]
    fn ring(_: u32) -> Shape {
        RING
    }

    #[device]
    unsafe fn load_tail(self, ring: &Ring, [row, n_tile]: [u32; 2], slice: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let (to, E4m3 { x_scales, w_scales, x_rows, groups }) = (ring.stage_buffer().at(CODES as usize), self.0);
            // A tile beyond the last takes the last tile's scales.
            let row = row.min(x_rows - TILE_ROWS);
            let x = x_scales.at((slice * x_rows + row) as usize).cast();
            bulk::copy_to_shared(to, x, X_SCALES, ring.full());
            let w = w_scales.at(((n_tile / GROUP_N_TILES * groups + slice) * 4) as usize).cast();
            bulk::copy_to_shared(to.at(X_SCALES as usize), w, W_SCALES, ring.full());
        }
    }

    #[device]
    unsafe fn consume<E: Epilogue, const N: u32, const DOWN: u32, const ACROSS: u32>(p: &Gemm, tiles: Tiles) {
        const { assert!(DOWN * ACROSS == 1, "a stage is released in its own CTA alone") };
        // SAFETY: the caller's word.
        unsafe {
            // A shuffle tells the assembler that a warp's lanes agree. So it knows that they take the same branches
            // below, and puts operand descriptors in uniform registers.
            let group = warp::shuffle_idx(thread::warp_id() / 4, 0);
            let first = shared::dynamic::<u8>(0);
            let operands = Operands {
                x: Operand::at(first).advance(group * GROUP_ROWS * DEPTH * 2),
                weight: Cores::at(first).advance(X_BYTES),
            };
            let mut ring = Ring::consumer(RING);
            let staging = shared::dynamic(Gemm::boxes(128) + group * 2 * BOX_BYTES);
            let mut half = Half { tile_row: 0, row: 0, column: 0, turn: 0, barrier: 1 + group, staging };
            if elected() && !p.out.is_null() {
                tensor::acquire(p.out);
            }
            wait::<DOWN, ACROSS>(p);
            for (row, column) in InOrder::<E>::new(tiles) {
                (half.tile_row, half.row, half.column) = (row, row + group * GROUP_ROWS, column);
                let is_own = SHARERS == 1 || thread::block_idx_x() % SHARERS == group;
                let inside = half.row < p.m && column < p.n && is_own;
                let early = E::early(p, &half);
                if inside {
                    // A shuffle here too, so that the lanes agree on the ring's position.
                    ring = ring.of_lane(0);
                    operands.tile::<E>(&mut ring, p.slices());
                } else {
                    // There are no rows for this warpgroup, or another CTA has them. It leaves the tensor cores to the
                    // other warpgroup.
                    skip(&mut ring, p.slices());
                }
                let ahead = E::ahead::<128>(p, &half, inside, early);
                if inside {
                    E::finish::<128>(p, &mut half, ahead, &mut Apart);
                }
            }
            if elected() {
                bulk::wait::<0>();
            }
        }
    }
}

/// A GEMM of e4m3 with an epilogue, in tiles of 128 weight rows, each of which `SHARERS` CTAs share.
///
/// # Safety
/// As the parameter block says. All threads of every CTA call it.
#[device]
pub unsafe fn gemm_e4m3<E: Epilogue, const SHARERS: u32>(p: &GemmE4m3) {
    // SAFETY: the caller's word.
    unsafe { gemm_of::<E, SharedBy<SHARERS>, 128, 1, 1>(&p.gemm, SharedBy(p.scales)) }
}

macro_rules! kernels {
    ($($epilogue:ty: $what:literal, $name:ident $($shared:ident)?;)*) => { $(
        #[doc = concat!($what, " Of e4m3.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $name(p: GemmE4m3) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { gemm_e4m3::<$epilogue, 1>(&p) }
        }
        $(
            #[doc = concat!($what, " Of e4m3, with two CTAs for each tile.")]
            #[kernel(threads = THREADS, min_blocks = 1)]
            pub unsafe fn $shared(p: GemmE4m3) {
                // SAFETY: the launcher's word: memory is as the parameter block says.
                unsafe { gemm_e4m3::<$epilogue, 2>(&p) }
            }
        )?
    )* };
}

kernels! {
    Qkv: "Queries, keys and values from `x · wᵀ`, sums of each row times its factor.", gemm_qkv_e4m3;
    Write: "`y = x · wᵀ`, sums of each row times its factor.", gemm_write_e4m3 gemm_write_shared_e4m3;
    SwiGlu: "`out = silu(x · gateᵀ) ∘ (x · upᵀ)`, sums of each row times its factor.", gemm_swiglu_e4m3;
    SwiGluCoded: "`out = silu(x · gateᵀ) ∘ (x · upᵀ)` as codes, sums of each row times its factor.", gemm_swiglu_coded_e4m3;
    AddTo<true>: "The residual stream plus `x · wᵀ`.", gemm_add_e4m3 gemm_add_shared_e4m3;
}
