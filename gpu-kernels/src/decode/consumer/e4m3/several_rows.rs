//! Several rows: the grid makes the codes of all activations once; then each CTA multiplies by them, a chunk at a time.
//! A chunk's codes lie like this, in device memory and then in shared memory:
//!
//! ```text
//! [slices 0 to 3, then 4 to 7][pair of rows][16 bytes of a slice][row of the pair][slice of four][byte]
//! ```
//!
//! # Safety
//! As for [both](super). The step has several rows, at most `TILES` times 8.

use cuda_std::{Global, bf16, bulk, device, shared, thread, warp};

use super::{OWN, Staged, WEIGHT_SCALES, Warpgroup, larger};
use crate::activations::element_at;
use crate::decode::consumer::some::slot;
use crate::decode::consumer::{Addend, Consumer, Part, sync};
use crate::decode::problem::Problem;
use crate::decode::{SCRATCH, SCRATCH_BYTES, WARPS};
use crate::e4m3::{self, CHUNK_INPUTS, Inputs};
use crate::linear::N_TILE;
use crate::norm::Norm;
use crate::step::MAX_DECODE_ROWS;
use crate::stream::SLICES;

/// Scratch memory has, in this order: a chunk's codes; their scales, `[row][slice]`; the weights' scales; each
/// warpgroup's inner sums, `[slice][row][feature]`.
const CODES: u32 = SCRATCH;
const SCALES: u32 = CODES + Inputs::CHUNK_CODES;
const W_SCALES: u32 = SCALES + Inputs::CHUNK_SCALES * 4;
pub const SUMS: u32 = W_SCALES + WEIGHT_SCALES * 4;
pub const SUMS_BYTES: u32 = SLICES * MAX_DECODE_ROWS * N_TILE * 4;
const _: () = assert!(SUMS + 2 * SUMS_BYTES <= SCRATCH + SCRATCH_BYTES);

/// A thread's share of a chunk's codes: four times 16 bytes, and one scale.
type Codes = ([[u32; 4]; 4], f32);

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// Makes codes of all rows' [activations](crate::activations), of `k` each, spread over the grid: a warp takes four
    /// groups of a row at a time. Groups beyond `k` in the last chunk are zeros.
    ///
    /// # Safety
    /// `x` has the rows, of `k` elements each, a multiple of 16, and all CTAs have shown what they wrote there. Nobody
    /// multiplies by the codes of the previous matrix any more.
    #[device]
    unsafe fn encode_rows(&self, x: Global<bf16>, k: u32) {
        let (lane, grid) = (thread::opaque(thread::lane_id()), thread::grid_dim_x());
        let (part, group) = (lane % 8, lane / 8);
        let halves = 2 * k.div_ceil(CHUNK_INPUTS);
        let mut item = thread::block_idx_x() + grid * thread::opaque(thread::warp_id());
        // SAFETY: the caller's word.
        unsafe {
            cuda_std::assume(halves > 0);
            while item < self.count * halves {
                let (row, half) = (item / halves, item % halves);
                let element = half * (CHUNK_INPUTS / 2) + lane * 16;
                let mut words = [[0; 4]; 2];
                if element < k {
                    let x = x.at(element_at(row, element));
                    words = [x.load16(0), x.load16(8)];
                }
                let mut largest = 0;
                unroll!(W < 8; {
                    largest = larger(largest, words[W / 4][W % 4]);
                });
                // Eight lanes share a group.
                unroll!(M < 3; {
                    largest = largest.max(warp::shuffle_xor(largest, 1 << M));
                });
                let [scale, inverse] = e4m3::scale_of(f32::from_bits(largest << 16));
                let set = half % 2 * (MAX_DECODE_ROWS / 2) + row / 2;
                let at = (set * 8 + part / 2 * 2) * 128 + (row % 2 * 4 + group) * 16 + part % 2 * 4;
                let to = self.p.inputs.codes.at((half / 2 * Inputs::CHUNK_CODES + at) as usize).cast::<u32>();
                unroll!(W < 4; {
                    to.store(W / 2 * 32 + W % 2 * 2, e4m3::codes_of_four([words[0][W], words[1][W]], inverse));
                });
                if part == 0 {
                    let at = half / 2 * Inputs::CHUNK_SCALES + row * SLICES + half % 2 * 4 + group;
                    self.p.inputs.scales.store(at as usize, scale);
                }
                item += grid * WARPS;
            }
        }
    }

    /// Loads this thread's codes of a chunk. Rows and chunks that do not exist have zeros.
    ///
    /// # Safety
    /// All CTAs have shown the codes of the matrix's input, which are `chunks` chunks.
    #[device]
    unsafe fn fetch(&self, chunk: u32, chunks: u32) -> Codes {
        let thread = thread::opaque(thread::thread_idx_x());
        let (mut codes, mut scale) = ([[0; 4]; 4], 0.0);
        if chunk < chunks {
            // SAFETY: the caller's word.
            unsafe {
                let from = self.p.inputs.codes.read().at((chunk * Inputs::CHUNK_CODES) as usize).cast::<u32>();
                unroll!(I < 4; {
                    let unit = thread + I as u32 * (WARPS * 32);
                    if Self::row_of(unit) < self.count {
                        codes[I] = from.load16((unit * 4) as usize);
                    }
                });
                if thread / SLICES < self.count {
                    scale = self.p.inputs.scales.read().load((chunk * Inputs::CHUNK_SCALES + thread) as usize);
                }
            }
        }
        (codes, scale)
    }

    /// The row of a chunk's `unit`-th 16 bytes of codes.
    #[device]
    const fn row_of(unit: u32) -> u32 {
        unit / 64 % (MAX_DECODE_ROWS / 2) * 2 + unit % 8 / 4
    }

    /// Puts a thread's codes where the CTA's consumers find them.
    ///
    /// # Safety
    /// All consumers have synchronised since the previous codes were multiplied, and since scratch memory was read.
    /// They fence and synchronise again before these codes are read. `is_first` is set with the first codes since
    /// something else lay there.
    #[device]
    unsafe fn stage_codes(&self, (codes, scale): &Codes, is_first: bool) {
        let thread = thread::opaque(thread::thread_idx_x());
        // SAFETY: the caller's word.
        unsafe {
            let to = shared::dynamic::<u32>(CODES);
            unroll!(I < 4; {
                let unit = thread + I as u32 * (WARPS * 32);
                // Rows that do not exist get their zeros once.
                if Self::row_of(unit) < self.count || is_first {
                    to.store16((unit * 4) as usize, codes[I]);
                }
            });
            if thread / SLICES < self.count {
                shared::dynamic::<f32>(SCALES).store(thread as usize, *scale);
            }
        }
    }

    /// Runs a GEMM of up to `TILES` times 8 rows, and its epilogue, over all waves. `part` is the CTA's part of the
    /// first wave, and `old` is what its first outputs are added to. `N`, the number of columns, is four times that
    /// number of rows.
    ///
    /// # Safety
    /// As for [`of_some`](crate::decode::Products::of_some).
    #[device]
    pub unsafe fn e4m3_of_some<const TILES: usize, const N: u32>(&mut self, mut part: Part, mut old: [Addend; 2]) {
        // SAFETY: the caller's word.
        unsafe {
            let group = Warpgroup::<N>::new(self.p, part.index, self.count);
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let Problem { x, k, is_normed, .. } = part.problem;
            cuda_std::assume(self.count > 0);
            let norm = if is_normed { self.p.work.norm() } else { Norm::default() };
            self.wait();
            self.encode_rows(x, k);
            self.arrive();
            self.wait_for_all();
            let (count, chunks) = (self.count, k.div_ceil(CHUNK_INPUTS));
            let mut ring = self.ring;
            loop {
                if part.mine > 0 {
                    let mut codes = self.fetch(0, chunks);
                    let mut w_scale = group.weight_scale(&part, 0);
                    let normed = part.first_n_tile == 0 && !norm.squares.is_null() && warp_id < count;
                    let mut squares = [0f32; TILES];
                    if normed {
                        let mut rows = [0; TILES];
                        unroll!(T < TILES of 2; {
                            rows[T] = (warp_id + T as u32 * WARPS).min(count - 1);
                        });
                        squares = norm.lane_squares(rows);
                    }
                    let mut totals = [[0f32; 2]; OWN];
                    let mut turn = 0;
                    while turn < part.problem.depth {
                        if turn > 0 {
                            // Waits until all have multiplied what lies there.
                            sync();
                        }
                        if normed && turn == 0 {
                            self.put_factors(norm, squares, lane, warp_id);
                        }
                        self.stage_codes(&codes, turn == 0);
                        // Both warpgroups have the same scales; one stores them.
                        if group.half == 0 {
                            shared::dynamic::<f32>(W_SCALES).store(group.lane as usize, w_scale);
                        }
                        bulk::fence_proxy_async();
                        sync();
                        codes = self.fetch(turn + 1, chunks);
                        w_scale = group.weight_scale(&part, turn + 1);
                        let staged = Staged {
                            codes: shared::dynamic(CODES),
                            scales: shared::dynamic(SCALES),
                            w_scales: shared::dynamic(W_SCALES),
                        };
                        group.turns((&mut ring, part.mine, 1), staged, &mut totals);
                        turn += 1;
                    }
                    sync();
                    let words = TILES as u32 * 8 * N_TILE;
                    unroll!(S < 4; {
                        if (S as u32) < group.n_tiles(part.mine) {
                            let n_tile = 2 * S as u32 + group.half;
                            let to = shared::dynamic::<f32>(SCRATCH).at((n_tile * words) as usize);
                            unroll!(R < TILES of 2; {
                                let row = group.lane / N_TILE + 8 * R as u32;
                                if row < count {
                                    to.store(slot(row, group.lane % N_TILE) as usize, totals[S][R]);
                                }
                            });
                        }
                    });
                    self.put_sums::<1>(&part, words, 1.0, old);
                }
                if part.is_last() {
                    break;
                }
                part = self.part(part.index, part.end);
                old = self.first_addends(&part);
            }
            self.ring = ring;
        }
    }
}
