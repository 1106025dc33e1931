//! A row of logits as the sampler sees it, and a CTA's walk over its slice.
//!
//! # Safety
//! Whole CTAs call these functions, or whole warps where warps have slices of their own. Inputs are as the launch's
//! parameter block says, a row's logits are one row of them, and its slice is within the vocabulary. Where logits are
//! changed, the [choice](Choice) lies in shared memory, the CTA has synchronised since, and nobody writes it meanwhile.

use cuda_std::{Global, device, shared, thread};

use super::mass::{rank, ranked_logit};
use super::team::warp_total;
use super::{CHOICE, Choice, GENERATED, THREADS, WARPS};
use crate::step::Rows;

/// Logits that a thread asks for at a time.
pub(crate) const AT_ONCE: usize = 8;
/// Logits whose weights are made side by side.
pub(crate) const SIDE_BY_SIDE: usize = 4;

/// What tokens are chosen by.
#[derive(Clone, Copy)]
pub(crate) struct Inputs {
    /// The step's rows.
    pub rows: Rows,
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[slots, vocab]`.
    pub uses: Global<u32>,
    pub vocab: u32,
}

/// A change of logits before they are compared, by the [choice](Choice) that lies in shared memory. Each pass reads the
/// choice again, because registers are short between passes.
pub(crate) trait Change: Sized {
    /// Reads what a pass needs to know.
    ///
    /// # Safety
    /// The choice's row and slot are among the inputs'.
    unsafe fn new(inputs: &Inputs) -> Self;

    /// Changes a thread's logits: those of every 32nd token from `first` on, below `end`.
    ///
    /// # Safety
    /// `end` is at most the vocabulary.
    unsafe fn change(&self, logits: &mut [f32; AT_ONCE], first: u32, end: u32);
}

/// Logits as they are.
pub(crate) struct Raw;

impl Change for Raw {
    #[device]
    unsafe fn new(_: &Inputs) -> Self {
        Self
    }

    #[device]
    unsafe fn change(&self, _: &mut [f32; AT_ONCE], _: u32, _: u32) {}
}

/// Logits penalised for the uses of their tokens.
pub(super) struct Penalised {
    choice: Choice,
    uses: Global<u32>,
    tokens: Global<u32>,
    /// In a tree, the rows on the path to this one, as bits.
    way: Option<u32>,
}

impl Penalised {
    #[device]
    fn of(&self, logit: f32, uses: u32) -> f32 {
        let (s, mut l) = (&self.choice.settings, logit);
        l = if l > 0.0 { l / s.repetition_penalty } else { l * s.repetition_penalty };
        let times = uses / GENERATED;
        if times != 0 {
            l -= s.presence_penalty;
            l -= s.frequency_penalty * times as f32;
        }
        l
    }
}

impl Change for Penalised {
    #[device]
    unsafe fn new(inputs: &Inputs) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let choice = Choice::load(shared::dynamic(CHOICE));
            let uses = inputs.uses.at(choice.slot as usize * inputs.vocab as usize);
            let rows = inputs.rows;
            let way = if rows.paths.is_null() { None } else { Some(rows.path(choice.row).rows()) };
            Self { choice, uses, tokens: rows.tokens.read(), way }
        }
    }

    #[device]
    unsafe fn change(&self, logits: &mut [f32; AT_ONCE], first: u32, end: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let mut uses = [0; AT_ONCE];
            unroll!(I < AT_ONCE of 8; {
                let token = first + 32 * I as u32;
                if token < end {
                    uses[I] = self.uses.load(token as usize);
                }
            });
            let mut r = self.choice.drafts;
            while r <= self.choice.row {
                thread::keep_rolled();
                let mut distance = self.tokens.load(r as usize).wrapping_sub(first);
                if self.way.is_some_and(|way| (way >> (r % 32)) & 1 == 0) {
                    distance = u32::MAX;
                }
                unroll!(I < AT_ONCE of 8; {
                    uses[I] += if distance == 32 * I as u32 { GENERATED } else { 0 };
                });
                r += 1;
            }
            let mut used = 0;
            unroll!(I < AT_ONCE of 8; {
                used |= u32::from(uses[I] != 0) << I;
            });
            while used != 0 {
                thread::keep_rolled();
                let i = used.trailing_zeros();
                let changed = self.of(pick(logits, i), pick(&uses, i));
                unroll!(I < AT_ONCE of 8; {
                    logits[I] = if i == I as u32 { changed } else { logits[I] };
                });
                used &= used - 1;
            }
        }
    }
}

/// An element of an array, by selects, so that the array stays in registers.
#[device]
fn pick<T: Copy>(of: &[T; AT_ONCE], i: u32) -> T {
    let mut picked = of[0];
    unroll!(I < AT_ONCE of 8; {
        picked = if i == I as u32 { of[I] } else { picked };
    });
    picked
}

/// A CTA's slice of a row, or a part of it.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub inputs: Inputs,
    /// `[vocab]`.
    pub logits: Global<f32>,
    /// The first token, and the one after the last.
    pub slice: (u32, u32),
}

impl Row {
    /// Calls `f` with the logits of the slice, [`AT_ONCE`] of a thread at a time. `f` gets the token of the first one,
    /// the end of the warp's part, and the logits, which are those of every 32nd token. Entries for tokens from that
    /// end on are not logits. A warp has a contiguous part of the slice.
    #[device]
    unsafe fn some_each<C: Change>(&self, mut f: impl FnMut(u32, u32, &[f32; AT_ONCE])) {
        // SAFETY: the caller's word.
        unsafe {
            let change = C::new(&self.inputs);
            let (first, end) = part(self.slice, thread::warp_id());
            let mut token = first + thread::lane_id();
            while token < end {
                let mut logits = [f32::NEG_INFINITY; AT_ONCE];
                unroll!(I < AT_ONCE of 8; {
                    let token = token + 32 * I as u32;
                    if token < end {
                        logits[I] = self.logits.load(token as usize);
                    }
                });
                change.change(&mut logits, token, end);
                f(token, end, &logits);
                token += 32 * AT_ONCE as u32;
            }
        }
    }

    /// Calls `f` with those logits of the slice for which `wanted` holds, each with its token. `wanted` should cost
    /// little; `f` may cost more.
    #[device]
    pub unsafe fn each<C: Change>(&self, wanted: impl Fn(f32) -> bool, mut f: impl FnMut(u32, f32)) {
        // SAFETY: the caller's word.
        unsafe {
            self.some_each::<C>(|first, end, logits| {
                let mut left = 0;
                unroll!(I < AT_ONCE of 8; {
                    left |= u32::from(wanted(logits[I]) && first + 32 * (I as u32) < end) << I;
                });
                while left != 0 {
                    thread::keep_rolled();
                    let i = left.trailing_zeros();
                    f(first + 32 * i, pick(logits, i));
                    left &= left - 1;
                }
            });
        }
    }

    /// As [`each`](Self::each), with a weight for each logit. Weights are made for [`SIDE_BY_SIDE`] logits at a time,
    /// so that the latencies of their operations overlap. `f` may also get logits that are not wanted: they weigh
    /// nothing.
    #[device]
    pub unsafe fn each_weighed<C: Change>(
        &self,
        wanted: impl Fn(f32) -> bool,
        weigh: impl Fn(&[f32; SIDE_BY_SIDE]) -> [u64; SIDE_BY_SIDE],
        mut f: impl FnMut(u32, f32, u64),
    ) {
        // SAFETY: the caller's word.
        unsafe {
            self.some_each::<C>(|first, end, logits| {
                let (mut logits, mut first) = (*logits, first);
                let mut turn = 0;
                while turn < AT_ONCE / SIDE_BY_SIDE {
                    thread::keep_rolled();
                    let some: [f32; SIDE_BY_SIDE] = [logits[0], logits[1], logits[2], logits[3]];
                    let mut are_wanted = 0;
                    unroll!(I < SIDE_BY_SIDE of 4; {
                        are_wanted |= u32::from(wanted(some[I]) && first + 32 * (I as u32) < end) << I;
                    });
                    if are_wanted != 0 {
                        let weights = weigh(&some);
                        // Without a branch, behind which the compiler would make each weight on its own.
                        unroll!(I < SIDE_BY_SIDE of 4; {
                            let weight = if are_wanted >> I & 1 == 1 { weights[I] } else { 0 };
                            f(first + 32 * I as u32, some[I], weight);
                        });
                    }
                    // Moves the next ones to where these are.
                    unroll!(I < SIDE_BY_SIDE of 4; {
                        (logits[I], logits[I + SIDE_BY_SIDE]) = (logits[I + SIDE_BY_SIDE], logits[I]);
                    });
                    first += 32 * SIDE_BY_SIDE as u32;
                    turn = thread::opaque(turn as u32) as usize + 1;
                }
            });
        }
    }

    /// The best rank of this thread's logits in the slice; 0 if there are none.
    #[device]
    pub unsafe fn best<C: Change>(&self) -> u64 {
        // SAFETY: the caller's word.
        unsafe {
            let (mut best, mut token, mut any, mut nan) = (f32::NEG_INFINITY, 0, false, false);
            self.some_each::<C>(|first, _, logits| {
                if !any {
                    (any, token) = (true, first);
                }
                // Of equal logits the first stays.
                unroll!(I < AT_ONCE of 8; {
                    nan |= logits[I].is_nan();
                    if logits[I] > best {
                        (best, token) = (logits[I], first + 32 * I as u32);
                    }
                });
            });
            match (any, nan) {
                (false, _) => 0,
                (true, false) => rank(best, token),
                (true, true) => rank(f32::NAN, token),
            }
        }
    }

    /// The best rank of this thread's logits in the slice that is below `limit`; 0 if there is none.
    #[device]
    pub unsafe fn best_below<C: Change>(&self, limit: u64) -> u64 {
        let (mut best, most) = (0, ranked_logit(limit));
        // SAFETY: the caller's word.
        unsafe {
            self.each::<C>(
                |logit| logit <= most,
                |token, logit| {
                    let rank = rank(logit, token);
                    best = if rank < limit { rank.max(best) } else { best };
                },
            );
        }
        best
    }

    /// Calls `f` with one logit in each of a warp's first lanes, of a slice that has no more tokens than a warp has
    /// lanes.
    ///
    /// # Safety
    /// The slice has at most 32 tokens. A whole warp calls it.
    #[device]
    pub unsafe fn one_each<C: Change>(&self, mut f: impl FnMut(f32)) {
        // SAFETY: the caller's word.
        unsafe {
            let (token, end) = (self.slice.0 + thread::lane_id(), self.slice.1);
            if token < end {
                let mut logits = [self.logits.load(token as usize); AT_ONCE];
                C::new(&self.inputs).change(&mut logits, token, end);
                f(logits[0]);
            }
        }
    }

    /// The total weight of the logits in this warp's part of the slice, known to each of its lanes. Logits below
    /// `least` weigh nothing.
    ///
    /// # Safety
    /// All lanes of the warp call it.
    #[device]
    pub unsafe fn warp_weight<C: Change>(
        &self,
        least: f32,
        weigh: impl Fn(&[f32; SIDE_BY_SIDE]) -> [u64; SIDE_BY_SIDE],
    ) -> u64 {
        // SAFETY: the caller's word.
        unsafe {
            let mut own = 0;
            self.each_weighed::<C>(|logit| logit >= least, weigh, |_, _, weight| own += weight);
            warp_total(own)
        }
    }

    /// The same row, its slice narrowed to one warp's part.
    #[device]
    pub fn narrowed(&self, warp: u32) -> Self {
        Self { slice: part(self.slice, warp), ..*self }
    }
}

/// A warp's part of a slice.
#[device]
fn part(slice: (u32, u32), warp: u32) -> (u32, u32) {
    let (first, end) = slice;
    let len = (end - first).div_ceil(WARPS);
    let from = first + warp * len;
    (from.min(end), (from + len).min(end))
}

const _: () = assert!(WARPS * 32 == THREADS);
