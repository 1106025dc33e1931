//! One row: its input comes as words, and each CTA makes their codes. A turn's codes in shared memory:
//!
//! ```text
//! [16 bytes of a slice][slice of eight][byte]
//! ```
//!
//! The columns of slices 4 to 7 begin 64 bytes after those of slices 0 to 3. Of the eight columns from either start
//! only the first four are wanted.
//!
//! # Safety
//! As for [both](super). The step has one row.

use cuda_std::{bulk, device, shared, thread, warp};

use super::{OWN, Staged, WEIGHT_SCALES, Warpgroup, larger};
use crate::decode::attention::QUERY_BYTES;
use crate::decode::consumer::one::{sync_with_factor, want_factor};
use crate::decode::consumer::{Consumer, Part, sync};
use crate::decode::{Mark, SCRATCH};
use crate::e4m3::{self, CHUNK_INPUTS, GROUP};
use crate::exchange::Word;
use crate::linear::N_TILE;
use crate::stream::{N_TILES, SLICES};

/// Turns of one row whose input is asked for at a time.
const ASKED: usize = 4;
/// Scratch memory has, in this order: outputs, `[n_tile][feature]`; two buffers of codes, each with the columns that
/// are not wanted behind it; two of the codes' scales, `[turn][slice]`; two of the weights' scales, `[turn]`; inner
/// sums.
const TOTALS: u32 = N_TILES * N_TILE * 4;
const CODES: u32 = SCRATCH + TOTALS;
const CODES_BYTES: u32 = ASKED as u32 * CHUNK_INPUTS + SECOND;
const SCALES: u32 = CODES + 2 * CODES_BYTES;
const SCALES_BYTES: u32 = ASKED as u32 * SLICES * 4;
const W_SCALES: u32 = SCALES + 2 * SCALES_BYTES;
const W_SCALES_BYTES: u32 = ASKED as u32 * WEIGHT_SCALES * 4;
pub const SUMS: u32 = W_SCALES + 2 * W_SCALES_BYTES;
pub const SUMS_BYTES: u32 = SLICES * N_TILE * 4;
// The same bound as for `ONE_BYTES` of GEMMs by fragments.
const _: () = assert!(SUMS + 2 * SUMS_BYTES <= SCRATCH + QUERY_BYTES);
/// Bytes from the columns of slices 0 to 3 to those of slices 4 to 7.
pub const SECOND: u32 = SLICES / 2 * 16;

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// Runs the GEMM of one row, and its epilogue. The input comes as words: a warp asks for a slice of each turn's
    /// input, and makes its codes.
    ///
    /// # Safety
    /// As for [`of_one`](crate::decode::Products::of_one).
    #[device]
    pub unsafe fn e4m3_of_one(&mut self, mut part: Part) {
        // SAFETY: the caller's word.
        unsafe {
            let group = Warpgroup::<8>::new(self.p, part.index, 1);
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let input = part.problem.input(self.flag + part.index);
            // A lane asks for two words of each turn, which become neighbours as codes.
            let first_word = warp_id * (GROUP / 2) + lane / 4 * 8 + lane % 4;
            let mut ring = self.ring;
            loop {
                let normed = part.problem.is_normed && part.first_n_tile == 0;
                if part.mine > 0 {
                    self.begin_part();
                    // Opaque to the compiler, which would keep these addresses in registers from wave to wave.
                    let mut own = input.from(thread::opaque(first_word));
                    let mut words: [Word; 2 * ASKED] = own.ask_for(place);
                    if normed {
                        want_factor();
                    }
                    let first = self.first_of_one(&part);
                    let w_scales = |turn: u32| [0, 2].map(|more| group.weight_scale(&part, turn + group.half + more));
                    let mut next_scales = w_scales(0);
                    let mut totals = [[0f32; 2]; OWN];
                    let (mut turn, mut buffer) = (0, 0);
                    while turn < part.problem.depth {
                        own.settle(&mut words, place);
                        if turn == 0 && part.first_n_tile == 0 {
                            self.mark(Mark::GridBarrier);
                        }
                        let staged = Staged {
                            codes: shared::dynamic(CODES + buffer * CODES_BYTES),
                            scales: shared::dynamic(SCALES + buffer * SCALES_BYTES),
                            w_scales: shared::dynamic(W_SCALES + buffer * W_SCALES_BYTES),
                        };
                        stage_words(&words, &staged, lane, warp_id);
                        unroll!(I < 2; {
                            let i = group.lane + (group.half + 2 * I as u32) * WEIGHT_SCALES;
                            staged.w_scales.store(i as usize, next_scales[I]);
                        });
                        // Two buffers take turns: when one is written again, all have synchronised since they read it.
                        buffer ^= 1;
                        bulk::fence_proxy_async();
                        sync();
                        let end = part.problem.depth.min(turn + ASKED as u32);
                        if end < part.problem.depth {
                            own = own.from(ASKED as u32 * (CHUNK_INPUTS / 2));
                            words = own.ask_for(place);
                            next_scales = w_scales(end);
                        }
                        group.turns((&mut ring, part.mine, end - turn), staged, &mut totals);
                        turn = end;
                    }
                    let partial = shared::dynamic::<f32>(SCRATCH);
                    if group.lane < N_TILE {
                        unroll!(S < 4; {
                            if (S as u32) < group.n_tiles(part.mine) {
                                let n_tile = 2 * S as u32 + group.half;
                                partial.store((n_tile * N_TILE + group.lane) as usize, totals[S][0]);
                            }
                        });
                    }
                    if normed {
                        sync_with_factor();
                    } else {
                        sync();
                    }
                    self.put_sums_of_one::<1>(&part, partial, 1.0, first);
                } else {
                    self.pass_by(&input, normed);
                }
                if part.is_last() {
                    break;
                }
                part = self.part(part.index, part.end);
            }
            self.ring = ring;
        }
    }
}

/// The place of a lane's `i`-th word, from its first word on: each turn has two.
#[device]
const fn place(i: usize) -> u32 {
    i as u32 / 2 * (CHUNK_INPUTS / 2) + i as u32 % 2 * 4
}

/// Makes the codes of a warp's slice of each turn, and puts them where the CTA's consumers find them. It also zeroes
/// the columns behind all turns' codes.
///
/// # Safety
/// All eight consumer warps call it, for the same turns. Nobody reads any more what lay in `staged`, and all fence and
/// synchronise before it is read. `words` are complete.
#[device]
unsafe fn stage_words(words: &[Word; 2 * ASKED], staged: &Staged, lane: u32, warp_id: u32) {
    if warp_id == 0 && lane < SECOND / 4 {
        // SAFETY: the caller's word.
        unsafe { staged.codes.at(ASKED * CHUNK_INPUTS as usize).cast::<u32>().store(lane as usize, 0) };
    }
    unroll!(I < 4; {
        let (low, high) = (words[2 * I].bits(), words[2 * I + 1].bits());
        let mut largest = larger(larger(0, low), high);
        unroll!(M < 5; {
            largest = largest.max(warp::shuffle_xor(largest, 1 << M));
        });
        let [scale, inverse] = e4m3::scale_of(f32::from_bits(largest << 16));
        let core = lane / 8 * 2 + lane / 2 % 2;
        let at = (core * SLICES + warp_id) * 16 + lane % 2 * 8 + lane / 4 % 2 * 4;
        // SAFETY: the caller's word.
        unsafe {
            let to = staged.codes.at(I * CHUNK_INPUTS as usize + at as usize);
            to.cast::<u32>().store(0, e4m3::codes_of_four([low, high], inverse));
            if lane == 0 {
                staged.scales.store(I * SLICES as usize + warp_id as usize, scale);
            }
        }
    });
}
