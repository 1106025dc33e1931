//! Epilogues: what a GEMM does with a tile's sums.
//!
//! The [main loop](super) leaves the sums of a warpgroup's half of a tile in its accumulators, 64 rows × `N` weight
//! rows. Rows of activations are A, and weights are B. Warp `w` of the warpgroup has rows `16 w` to `16 w + 15`. With
//! `g = lane / 4` and `t = lane % 4`, a lane has for every eight columns `j`, half an N-tile:
//!
//! ```text
//!                       column 8 j + 2 t      column 8 j + 2 t + 1
//! row 16 w + g          accumulator 4 j       accumulator 4 j + 1
//! row 16 w + g + 8      accumulator 4 j + 2   accumulator 4 j + 3
//! ```
//!
//! So four lanes share a row, and have every fourth pair of its columns. Of a gate-up N-tile, columns 0 to 7 are gates
//! and columns 8 to 15 their ups: `j` even and `j + 1` are a gate and its up, in one lane, and give feature `4 j + 2 t`
//! and the next.
//!
//! | epilogue | from accumulators to memory |
//! |---|---|
//! | [`Write`] | each lane stores its pairs of f32 |
//! | [`SwiGlu`] | bf16 into a box of 64 × 64 in shared memory, in the order of slots; TMA stores the box |
//! | [`Add`] | eight rows × [`SPAN`] features through the warp's own part of shared memory; then whole rows |
//! | [`AddTo<true>`](AddTo) | as [`Add`]; a unit's rows also become codes |
//! | [`SwiGluCoded`] | of two tiles, since a group of codes is: the first waits in shared memory; lanes store codes |
//! | [`Qkv`] | a head's norm and rotation in registers; then 16 rows of a head through shared memory |
//!
//! Each begins the [next tile](Next) as soon as it needs the accumulators no more.
//!
//! # Safety
//! What is here is called in a GEMM, by whole warpgroups 0 and 1 of its CTAs. `p` is the launch's parameter block, and
//! memory is as that says, with room for whole tiles of rows. A [`Half`] is of one of the CTA's tiles, whose rows and
//! columns its warpgroup alone writes. The warpgroup has the half's staging memory and barrier to itself.

use cuda_std::bulk;
use cuda_std::shared::Shared;
use cuda_std::tensor::{self, TensorMap, swizzled};
use cuda_std::{Global, device, math, mma, thread, warp, wgmma};

use super::{BOX, BOX_BYTES, GROUP, Gemm};
use crate::gate::swiglu;
use crate::norm::SPAN;

/// One warpgroup's half of a tile: its place, and what a lane needs to put its sums there.
pub struct Half {
    /// First row of the tile.
    pub tile_row: u32,
    /// First row of this half.
    pub row: u32,
    /// First column of this half.
    pub column: u32,
    /// Which of the two boxes is filled next.
    pub turn: u32,
    /// Number of the warpgroup's named barrier.
    pub barrier: u32,
    /// Two boxes of 64 rows × 64 columns of bf16 in shared memory.
    pub staging: Shared<u8>,
}

/// Whether this lane issues its warpgroup's stores.
#[device]
pub fn elected() -> bool {
    thread::opaque(thread::thread_idx_x()).is_multiple_of(GROUP)
}

impl Half {
    /// The first of the two rows whose sums the lane holds; the other is 8 further.
    #[device]
    fn lane_row(&self) -> u32 {
        let (lane, warp) = place_in_group();
        self.row + warp * 16 + lane / 4
    }

    /// Waits until TMA has read all boxes that it still stores, and until all lanes are done with the boxes' memory.
    ///
    /// # Safety
    /// All lanes of the half's group call it.
    #[device]
    pub unsafe fn finish_stores(&self) {
        if elected() {
            bulk::wait_read::<0>();
        }
        thread::sync_named(self.barrier, GROUP);
    }

    fn place(&self) -> Shared<u8> {
        Shared::from_raw(self.staging.addr() + self.turn * BOX_BYTES)
    }

    /// Puts 16 columns of the box into shared memory. `words` are the lane's pairs of columns, in the order of the
    /// accumulators.
    ///
    /// # Safety
    /// Nothing that lies in the box is still to be stored. `sixteenth` is below 4.
    #[device]
    unsafe fn put(&self, sixteenth: usize, words: [u32; 4]) {
        let lane = thread::lane_id();
        let row = thread::warp_id() % 4 * 16 + lane % 16;
        let offset = swizzled(row * BOX * 2 + lane / 16 * 16) ^ (sixteenth as u32 * 32);
        // SAFETY: the caller's word.
        unsafe { mma::stmatrix_x4(self.place().at(offset as usize), words) }
    }

    /// Puts the lane's four words of one row of half a box into shared memory. In the order of
    /// [`slot`](crate::linear::slot) they lie side by side.
    ///
    /// # Safety
    /// Nothing that lies in the box is still to be stored. `half` and `row` are below 2.
    #[device]
    unsafe fn put_slots(&self, half: u32, row: u32, words: [u32; 4]) {
        let (lane, warp) = place_in_group();
        let row = warp * 16 + lane / 4 + 8 * row;
        let offset = swizzled(row * BOX * 2 + (half * 4 + lane % 4) * 16);
        // SAFETY: the caller's word.
        unsafe { self.place().at(offset as usize).store16(0, words) }
    }

    /// Puts the lane's part of box `b` into shared memory and stores the box, if the output has these columns. With
    /// `SLOTS`, `words` are as [`put_slots`](Self::put_slots) takes them, half by half and row by row.
    ///
    /// # Safety
    /// The output's map is as [`Gemm`] says; all lanes of the warpgroup call it.
    #[device]
    pub unsafe fn put_box<const SLOTS: bool>(&mut self, p: &Gemm, b: usize, words: BoxWords) {
        if self.column + b as u32 * BOX < p.n {
            // SAFETY: the caller's word.
            unsafe {
                unroll!(Q < 4; {
                    if SLOTS {
                        self.put_slots(Q as u32 / 2, Q as u32 % 2, words[Q]);
                    } else {
                        self.put(Q, words[Q]);
                    }
                });
                self.store_box(p.out, b as u32);
            }
        }
    }

    /// Stores box `b` of the half's columns, once the whole warpgroup has filled it and the box before can be
    /// overwritten.
    ///
    /// # Safety
    /// All lanes of the warpgroup call it, and have put their parts of the box. The map is of the output, which has
    /// these columns.
    #[device]
    unsafe fn store_box(&mut self, out: Global<TensorMap>, b: u32) {
        bulk::fence_proxy_async();
        // TMA has read the previous box by now, or soon will have. Lanes that store nothing have nothing to wait for.
        // There is no branch for them: it would keep the main loop's operand descriptors out of uniform registers.
        bulk::wait_read::<0>();
        thread::sync_named(self.barrier, GROUP);
        // SAFETY: the caller's word.
        unsafe { tensor::store_if(elected(), out, [self.column + b * BOX, self.row], self.place()) };
        bulk::commit();
        self.turn ^= 1;
    }
}

/// A lane's part of a box: its pairs of columns, as [`Half::put`] takes them.
pub type BoxWords = [[u32; 4]; 4];

/// An epilogue of one warpgroup.
pub trait Epilogue {
    /// Whether half of a tile's weight rows are gates, and half their ups.
    const GATED: bool;
    /// Whether a CTA takes two tiles side by side, one after the other.
    const IN_PAIRS: bool = false;
    /// What [`early`](Self::early) loads.
    type Early: Copy;
    /// What [`ahead`](Self::ahead) loads.
    type Ahead: Copy;

    /// Loads the inputs of [`ahead`](Self::ahead), as the tile begins.
    ///
    /// # Safety
    /// Memory is as the parameter block says, and the half is of one of its tiles.
    unsafe fn early(p: &Gemm, half: &Half) -> Self::Early;

    /// Loads and computes what [`finish`](Self::finish) or [`finish_last`](Self::finish_last) needs first, while MMAs
    /// run. For a tile that is not `inside` the result may be anything.
    ///
    /// # Safety
    /// As for [`early`](Self::early), of the same tile; all lanes of the half's group call it.
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, inside: bool, early: Self::Early) -> Self::Ahead;

    /// Finishes all `N` columns of the half. As soon as it no longer needs the accumulators, it begins the MMAs of the
    /// `next` tile, and goes on with them step by step.
    ///
    /// # Safety
    /// As for [`ahead`](Self::ahead), of the same tile, whose sums the accumulators hold.
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, ahead: Self::Ahead, next: &mut impl Next);

    /// Whether [`finish_last`](Self::finish_last) finishes a CTA's last tile.
    const LAST_APART: bool = false;

    /// As [`finish`](Self::finish), for a tile that no other follows.
    ///
    /// # Safety
    /// As for [`finish`](Self::finish).
    #[device]
    unsafe fn finish_last<const N: u32>(_: &Gemm, _: &Half, _: Self::Ahead) {}
}

/// The main loop of the next tile, if there is one.
pub trait Next {
    /// Whether a next tile is possible.
    const FOLLOWS: bool = true;

    /// Begins the next tile's MMAs, which overwrite the accumulators. Called once for each tile.
    ///
    /// # Safety
    /// All lanes of the group call it, and nobody needs the accumulators.
    unsafe fn begin(&mut self);
    /// Goes on with the MMAs, if there are more.
    ///
    /// # Safety
    /// All lanes of the group call it, after [`begin`](Self::begin).
    unsafe fn step(&mut self);
}

/// No next tile.
impl Next for () {
    const FOLLOWS: bool = false;

    #[device]
    unsafe fn begin(&mut self) {}

    #[device]
    unsafe fn step(&mut self) {}
}

/// Output features of a tile of `n` weight rows.
pub const fn features<E: Epilogue>(n: u32) -> u32 {
    if E::GATED { n / 2 } else { n }
}

/// Sums of squares of the lane's two rows, `[span][row]`: four lanes share a row, and each has every fourth span.
type Squares = [[f32; 2]; 8];

/// Loads eight of the lane's spans, from number `first` on; zeros behind the last.
///
/// # Safety
/// There are rows, [`m`](Gemm::m) is not 0; the norm has squares of them all, or its `dim` is 0.
#[device]
unsafe fn load_squares(p: &Gemm, row: u32, first: u32) -> Squares {
    let spans = p.norm.dim / SPAN;
    // Rows beyond m need no factor: they read the last row's.
    let rows = [row, row + 8].map(|row| row.min(p.m - 1) * spans);
    let mut squares = [[0f32; 2]; 8];
    unroll!(I < 8; {
        let at = first + 4 * I as u32 + thread::lane_id() % 4;
        if at < spans {
            // SAFETY: the caller's word.
            squares[I] = rows.map(|row| unsafe { p.norm.squares.load((row + at) as usize) });
        }
    });
    squares
}

/// The factors `1 / rms` of the lane's two rows. `squares` are the first sums, which the four lanes of a row
/// [loaded](load_squares). Sums are added in the order of [`norm`](crate::norm).
///
/// # Safety
/// As for [`load_squares`]. All lanes of the warp call it, with the squares of the same rows.
#[device]
unsafe fn scales(p: &Gemm, row: u32, mut squares: Squares) -> [f32; 2] {
    let mut next = 32;
    while next < p.norm.dim / SPAN {
        // SAFETY: the caller's word.
        let more = unsafe { load_squares(p, row, next) };
        unroll!(I < 8; {
            squares[I] = [0, 1].map(|r| squares[I][r] + more[I][r]);
        });
        next += 32;
    }
    [0, 1].map(|r| {
        let four = [0, 1, 2, 3].map(|i: usize| squares[i][r] + squares[i + 4][r]);
        let mut sum = (four[0] + four[2]) + (four[1] + four[3]);
        sum += warp::shuffle_xor(sum, 2);
        sum += warp::shuffle_xor(sum, 1);
        p.norm.inverse_rms_of_sum(sum)
    })
}

/// The lane's four sums of 8 columns, half an N-tile: two columns in each of two rows.
macro_rules! sums {
    ($first:expr) => {
        [
            [wgmma::get::<{ $first }>(), wgmma::get::<{ $first + 1 }>()],
            [wgmma::get::<{ $first + 2 }>(), wgmma::get::<{ $first + 3 }>()],
        ]
    };
}

mod add;
mod bias;
mod heads;

pub use add::{Add, AddTo};
pub use heads::{HeadsAhead, Qkv};

/// The lane and its warp in the warpgroup. Opaque, so that what depends on them is computed where it is used: kept over
/// the whole tile, it would take more registers than there are.
#[device]
fn place_in_group() -> (u32, u32) {
    let thread = thread::opaque(thread::thread_idx_x()) % GROUP;
    (thread % 32, thread / 32)
}

/// Two features of the gated activations of one row of the lane, from their sums.
#[device]
fn gate_pair(gate: [f32; 2], up: [f32; 2], scale: f32) -> u32 {
    let one = |c: usize| swiglu(gate[c] * scale, up[c] * scale);
    math::pack_bf16(one(0), one(1))
}

/// The lane's part of box `$b` of the gated activations, in the order of [`slot`](crate::linear::slot): four words,
/// which lie side by side, for each half of the box and each of the lane's two rows. Of an N-tile's sums, the first
/// eight columns are gates and the others their ups.
macro_rules! gated {
    ($b:expr, $scales:ident) => {{
        let mut words: BoxWords = [[0; 4]; 4];
        unroll!(H < 2; {
            unroll!(T < 4; {
                let (gate, up) = (sums!($b * 64 + H * 32 + T * 8), sums!($b * 64 + H * 32 + T * 8 + 4));
                unroll!(R < 2; {
                    words[2 * H + R][T] = gate_pair(gate[R], up[R], $scales[R]);
                });
            });
        });
        words
    }};
}

mod coded;

pub use coded::SwiGluCoded;

/// Gated activations: `silu(gate) · up`, in bf16.
pub struct SwiGlu;

impl Epilogue for SwiGlu {
    const GATED: bool = true;
    type Early = Squares;
    /// The factors of the lane's two rows.
    type Ahead = [f32; 2];

    #[device]
    unsafe fn early(p: &Gemm, half: &Half) -> Squares {
        // SAFETY: the caller's word.
        unsafe { load_squares(p, half.lane_row(), 0) }
    }

    #[device]
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, _inside: bool, squares: Squares) -> [f32; 2] {
        // SAFETY: the caller's word.
        unsafe { scales(p, half.lane_row(), squares) }
    }

    #[device]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, scales: [f32; 2], next: &mut impl Next) {
        // SAFETY: the caller's word.
        unsafe {
            let boxes = [gated!(0, scales), if N > 128 { gated!(1, scales) } else { [[0; 4]; 4] }];
            next.begin();
            // Other lanes had totals where the boxes are.
            thread::sync_named(half.barrier, GROUP);
            unroll!(B < 2; {
                if B == 0 || N > 128 {
                    half.put_box::<true>(p, B, boxes[B]);
                    next.step();
                }
            });
        }
    }
}

/// The sums times their row's factor, in f32.
pub struct Write;

impl Epilogue for Write {
    const GATED: bool = false;
    type Early = Squares;
    /// The factors of the lane's two rows.
    type Ahead = [f32; 2];

    #[device]
    unsafe fn early(p: &Gemm, half: &Half) -> Squares {
        // SAFETY: the caller's word.
        unsafe { SwiGlu::early(p, half) }
    }

    #[device]
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, inside: bool, squares: Squares) -> [f32; 2] {
        // SAFETY: the caller's word.
        unsafe { SwiGlu::ahead::<N>(p, half, inside, squares) }
    }

    #[device]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, scales: [f32; 2], next: &mut impl Next) {
        // SAFETY: the caller's word.
        unsafe {
            let scales = bias::add::<N, _>(p, half, scales, next);
            let row = half.lane_row();
            let column = half.column + 2 * (thread::opaque(thread::lane_id()) % 4);
            let to = p.y.at(row as usize * p.n as usize + column as usize).cast::<[f32; 2]>();
            unroll!(B < 4; {
                if (B as u32) * BOX < N && half.column + B as u32 * BOX < p.n {
                    unroll!(J < 8; {
                        let sums = sums!(B * 32 + J * 4);
                        unroll!(R < 2; {
                            let pair = [sums[R][0] * scales[R], sums[R][1] * scales[R]];
                            // Rows beyond m are written too: with stores for some lanes only, the main loop's operand
                            // descriptors would not be in uniform registers.
                            to.store(R * 4 * p.n as usize + B * 32 + J * 4, pair);
                        });
                    });
                }
            });
            next.begin();
        }
    }
}
