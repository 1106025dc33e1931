//! GEMMs that make each fragment when they multiply it, for two N-tiles side by side: one N-tile's MMAs fill the waits
//! of the other's. A stage has several chunks. A pair of N-tiles goes through its two stages before the next pair
//! begins: so few stages are held at a time, and the others are under way.
//!
//! # Safety
//! As for [`duty`](super::duty). The format is [multiplied by pairs](FragmentFormat::BY_PAIRS).

use core::ops::Range;

use cuda_std::{device, mma, thread};

use super::Part;
use super::duty::{Columns, Duty, Ready, columns_of};
use crate::decode::{CHUNK_BYTES, DecodeStep, N_TILES, STAGES};
use crate::ring::Ring;
use crate::weights::FragmentFormat;

/// A warp's sums, as [`Duty`] has them.
type Sums = [[f32; 4]; N_TILES as usize];

/// The codes of two N-tiles; if there is only one, the second's may be anything.
type Pair<F> = [<F as FragmentFormat>::Chunk; 2];

impl<F: FragmentFormat, const TILES: usize, const SHORT: bool> Duty<F, TILES, SHORT> {
    /// Waits for the stages of a part's first pair, and loads the codes of their first chunk.
    ///
    /// # Safety
    /// `ring` is where the part's first turn begins, of which the warp has `own` N-tiles, one at least.
    #[device]
    pub(super) unsafe fn first_codes(&self, ring: &Ring, own: u32) -> Pair<F> {
        let stages = self.stages_of_pair(ring, 0, own);
        // SAFETY: the caller's word.
        unsafe {
            stages[0].wait_full_beside(&stages[1]);
            self.load_pair(&stages, 0, true)
        }
    }

    /// [`costly`](Self::costly), for formats that are multiplied by pairs: `columns` may be called twice for a turn.
    ///
    /// # Safety
    /// As for [`costly`](Self::costly); `own` is the warp's N-tiles.
    #[device]
    pub(super) unsafe fn by_pairs(
        &self,
        p: &DecodeStep,
        acc: &mut Sums,
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        own: u32,
        mut columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready<F>,
    ) {
        // A warp waits for stages up to five after the last one that it has seen to be full. This bound keeps it from
        // mistaking one fill of a stage for the next: the producer's module documentation has the argument.
        const {
            let most = F::UNDER_WAY * F::UNDER_WAY_OF_ONE[1];
            assert!(!F::BY_PAIRS || most + 5 <= STAGES * CHUNK_BYTES / F::STAGE_BYTES);
        }
        // SAFETY: the caller's word.
        unsafe {
            match own {
                0 => {
                    let mut turn = turns.start;
                    while turn < turns.end {
                        // Called as in the other arms, though in a step of one row it has no effect.
                        columns(turn);
                        turn += 1;
                    }
                    *ring = ring.ahead((turns.end - turns.start).div_ceil(F::CHUNKS) * part.mine);
                }
                1 => self.single(p, acc, (ring, part, turns), columns, ready),
                2 => self.pairs::<2>(acc, (ring, part, turns), columns, ready),
                3 => self.pairs::<3>(acc, (ring, part, turns), columns, ready),
                _ => self.pairs::<4>(acc, (ring, part, turns), columns, ready),
            }
        }
    }

    /// As [`by_pairs`](Self::by_pairs), for a single N-tile: it makes the next chunk's fragments while this chunk's are
    /// multiplied.
    ///
    /// # Safety
    /// As for [`by_pairs`](Self::by_pairs), of one N-tile. `turns` begins with a stage.
    #[device]
    unsafe fn single(
        &self,
        p: &DecodeStep,
        acc: &mut Sums,
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        mut columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready<F>,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let (depth, mut turn) = (part.problem.depth, turns.start);
            if turn == 0 {
                unroll!(I < 8; {
                    ready.weights[I] = F::fragment(&ready.codes[0], I);
                });
            }
            // Whether the next stage has been seen to be full: asked a chunk ahead, since an answer takes its time.
            let mut is_full = false;
            while turn < turns.end {
                let chunks = F::CHUNKS.min(depth - turn);
                let (stage, then) = (ring.ahead(self.n_tile(0)), ring.ahead(part.mine));
                let (next, is_last) = (then.ahead(self.n_tile(0)), turn + chunks == depth);
                // A macro, since a function would be called.
                macro_rules! step {
                    ($chunk:expr, $ends:expr) => {{
                        let (columns, weights) = (columns(turn + $chunk), ready.weights);
                        let multiply = |i| Self::multiply(acc, &weights, &columns, (0, i));
                        if !$ends {
                            let behind = (&stage, $chunk + 1);
                            ready.weights = F::load(p, behind, self.k_split(), self.lane, multiply);
                            is_full = $chunk + 2 == F::CHUNKS && next.is_full();
                        } else if is_last {
                            unroll!(I < 8; {
                                Self::multiply(acc, &weights, &columns, (0, I));
                            });
                        } else {
                            if !is_full {
                                next.wait_likely_full();
                            }
                            is_full = false;
                            ready.weights = F::load(p, (&next, 0), self.k_split(), self.lane, multiply);
                        }
                    }};
                }
                if chunks == F::CHUNKS {
                    unroll!(C < (F::CHUNKS as usize) of 4; {
                        step!(C as u32, C as u32 + 1 == F::CHUNKS);
                    });
                } else {
                    let mut chunk = 0;
                    while chunk < chunks {
                        thread::keep_rolled();
                        step!(chunk, chunk + 1 == chunks);
                        chunk += 1;
                    }
                }
                stage.release_behind(acc[Self::OWN_TILES - 1][0], self.lane < Self::ARRIVALS);
                (*ring, turn) = (then, turn + chunks);
            }
        }
    }

    /// As [`by_pairs`](Self::by_pairs), for `OWN` N-tiles, at least two.
    ///
    /// # Safety
    /// As for [`by_pairs`](Self::by_pairs). `turns` begins with a stage.
    #[device]
    unsafe fn pairs<const OWN: usize>(
        &self,
        acc: &mut Sums,
        (ring, part, turns): (&mut Ring, &Part, Range<u32>),
        mut columns: impl FnMut(u32) -> [Columns; TILES],
        ready: &mut Ready<F>,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let depth = part.problem.depth;
            let (mut turn, mut codes) = (turns.start, ready.codes);
            while turn < turns.end {
                let chunks = F::CHUNKS.min(depth - turn);
                let then = ring.ahead(part.mine);
                unroll!(P < 2; {
                    if 2 * P < OWN {
                        let s = 2 * P as u32;
                        let stages = self.stages_of_pair(ring, s, OWN as u32);
                        let (next, is_last) = if 2 * P + 2 < OWN {
                            (self.stages_of_pair(ring, s + 2, OWN as u32), false)
                        } else {
                            (self.stages_of_pair(&then, 0, OWN as u32), turn + chunks == depth)
                        };
                        // Asks for the next codes, then multiplies the pair whose codes are there.
                        macro_rules! step {
                            ($chunk:expr, $ends:expr) => {{
                                let (columns, here) = (columns(turn + $chunk), codes);
                                if !$ends {
                                    codes = self.load_pair(&stages, $chunk + 1, 2 * P + 1 < OWN);
                                } else if !is_last {
                                    next[0].wait_full_beside(&next[1]);
                                    codes = self.load_pair(&next, 0, 2 * P + 2 >= OWN || 2 * P + 3 < OWN);
                                }
                                Self::multiply_pair::<{ 2 * P }, OWN>(acc, &here, &columns);
                            }};
                        }
                        if chunks == F::CHUNKS {
                            unroll!(C < (F::CHUNKS as usize) of 4; {
                                step!(C as u32, C as u32 + 1 == F::CHUNKS);
                            });
                        } else {
                            let mut chunk = 0;
                            while chunk < chunks {
                                thread::keep_rolled();
                                step!(chunk, chunk + 1 == chunks);
                                chunk += 1;
                            }
                        }
                        self.release_pair::<{ 2 * P }, OWN>(acc, &stages);
                    }
                });
                (*ring, turn) = (then, turn + chunks);
            }
            ready.codes = codes;
        }
    }

    /// The stages of the warp's `s`-th N-tile and of the next one. If the next is none of its `own`, the `s`-th's
    /// twice.
    #[device]
    fn stages_of_pair(&self, ring: &Ring, s: u32, own: u32) -> [Ring; 2] {
        [ring.ahead(self.n_tile(s)), ring.ahead(self.n_tile(if s + 1 < own { s + 1 } else { s }))]
    }

    /// The codes of a chunk, of a pair if `both`, or of its first N-tile alone.
    ///
    /// # Safety
    /// The stages are full, and the warp has not released them.
    #[device]
    unsafe fn load_pair(&self, stages: &[Ring; 2], chunk: u32, both: bool) -> Pair<F> {
        // SAFETY: the caller's word.
        let load = |stage: &Ring| unsafe { F::load_chunk((stage, chunk), self.k_split(), self.lane) };
        let first = load(&stages[0]);
        [first, if both { load(&stages[1]) } else { first }]
    }

    /// Multiplies a pair's codes of a turn into the sums of the warp's `S`-th N-tile, and of the next if that is one of
    /// `OWN`.
    #[device]
    fn multiply_pair<const S: usize, const OWN: usize>(acc: &mut Sums, codes: &Pair<F>, columns: &[Columns; TILES]) {
        unroll!(I < 8; {
            unroll!(N < 2; {
                if S + N < OWN {
                    let fragment = F::fragment(&codes[N], I);
                    unroll!(T < (Self::OWN_TILES) of 2; {
                        let sum = &mut acc[(S + N) * Self::OWN_TILES + T];
                        *sum = mma::m16n8k16_bf16(*sum, fragment, columns_of(&columns[T], I));
                    });
                }
            });
        });
    }

    /// Releases a pair's stages, once all their chunks are multiplied.
    ///
    /// # Safety
    /// The stages are those of the `S`-th N-tile, and of the next if that is one of `OWN`. Their chunks were multiplied
    /// into these sums, and they are yet to be released.
    #[device]
    unsafe fn release_pair<const S: usize, const OWN: usize>(&self, acc: &Sums, stages: &[Ring; 2]) {
        let last = |n: usize| acc[(S + n + 1) * Self::OWN_TILES - 1][0];
        // SAFETY: the caller's word.
        unsafe {
            if S + 1 < OWN {
                let stage = if self.lane < Self::ARRIVALS { stages[0] } else { stages[1] };
                let both = f32::from_bits(last(0).to_bits() | last(1).to_bits());
                stage.release_behind(both, self.lane < 2 * Self::ARRIVALS);
            } else {
                stages[0].release_behind(last(0), self.lane < Self::ARRIVALS);
            }
        }
    }
}
