//! How many of the proposed drafts to run: as many as are worth their rows, by how recent proposals fared.
//!
//! If each draft is right with probability `a`, a step with `n` drafts brings `1 + a + … + aⁿ` tokens, and takes
//! `1 + n·c` times as long as one without, where `c` is what a row adds to it. Their ratio is the speed-up (Leviathan
//! et al., 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.8, with a draft that costs a
//! row and no model of its own), and [`worthwhile`] takes the `n` for which it is largest.
//!
//! The [estimate](learned) of `a` needs no drafts to be run. The choice after row `r` is what the proposal's entry `r`
//! had to be, whether or not that had a row of its own: every step tries at least one, for nothing. So text in which
//! proposals are hopeless runs one row a step, and drafts come back by themselves when the text turns repetitive.
//!
//! Fixed point throughout: the device, the emulator and the CPU come to the same numbers. What is run never changes
//! what is said, only in how many steps.

use cuda_std::{Global, GlobalMut};

use crate::step::SequenceState;

/// The number 1.
pub const ONE: u32 = 1 << 16;
/// What proposals are taken to be worth before any was tried.
pub const UNTRIED: u32 = ONE / 2;
/// A trial's weight in the estimate is one half to this power.
const WEIGHT: u32 = 3;

/// The estimate after one more trial.
#[inline(always)]
pub fn learned(acceptance: u32, right: bool) -> u32 {
    mean(acceptance, if right { ONE } else { 0 })
}

/// An exponentially weighted mean after one more value.
#[inline(always)]
pub fn mean(before: u32, value: u32) -> u32 {
    if value >= before { before + ((value - before) >> WEIGHT) } else { before - ((before - value) >> WEIGHT) }
}

/// What drafts add to the time of a step of one row, as shares of that time.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, cuda_std::Layout)]
pub struct Cost {
    /// That there are any: for steps of several rows that run otherwise than those of one.
    pub any: u32,
    /// Each.
    pub each: u32,
}

/// How many drafts of at most `most` a sequence should run, if each is right with probability `acceptance`; all of them
/// if they [cost](Cost) nothing. `others` are the rows of other sequences in the same step, each good for a token.
#[inline(always)]
pub fn worthwhile(acceptance: u32, cost: Cost, others: u32, most: u32) -> u32 {
    let each = cost.each as u64;
    let mut tokens = ONE as u64 * (1 + others as u64);
    let mut time = ONE as u64 + each * others as u64;
    let (mut best_tokens, mut best_time, mut best) = (tokens, time, 0);
    if others == 0 {
        time += cost.any as u64;
    }
    // What the next draft is expected to bring.
    let mut more = acceptance as u64;
    let mut drafts = 0;
    while drafts < most {
        tokens += more;
        time += each;
        drafts += 1;
        if tokens * best_time >= best_tokens * time {
            (best_tokens, best_time, best) = (tokens, time, drafts);
        }
        more = (more * acceptance as u64) >> 16;
    }
    best
}

/// Parameters of a kernel that proposes what a script has at the positions that come next, `draft_script` of
/// `bench-kernels`. Grid: 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct DraftScript {
    /// The sequence to draft for.
    pub state: SequenceState,
    /// `[script_len]` what is proposed for each position.
    pub script: Global<i32>,
    /// `[1 + most]` row 0 is not written, drafts follow.
    pub drafts: GlobalMut<i32>,
    /// `[1]` rows, the newest token's included.
    pub rows: GlobalMut<i32>,
    /// Positions of the script.
    pub script_len: u32,
    /// Most drafts, less than [`MAX_DECODE_ROWS`](crate::step::MAX_DECODE_ROWS).
    pub most: u32,
    /// The history may not grow beyond this.
    pub max_length: u32,
}
