//! How many of the proposed drafts a step runs: as many as are worth their rows, judged by how recent proposals fared.
//!
//! If each draft is right with probability `a`, a step with `n` drafts brings `1 + a + … + aⁿ` tokens, and takes
//! `1 + b + n·c` times as long as one without, where `b` and `c` are the shares in [`Cost`]. The ratio of both is the
//! speed-up (Leviathan et al., 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 3.8, with a
//! draft that costs a row and no model of its own), and [`worthwhile`] takes the `n` for which it is largest.
//!
//! The [estimate](learned) of `a` does not need drafts to run. The token chosen after row `r` is the token that draft
//! `r` of the proposal had to be, whether or not that draft had a row of its own. So every step tries at least one
//! draft at no cost. Text in which proposals are hopeless runs one row a step, and drafts come back by themselves when
//! the text turns repetitive.
//!
//! Arithmetic is fixed point throughout, so the device, the emulator and the CPU compute the same numbers. How many
//! drafts run never changes the output, only the number of steps that it takes.

use cuda_std::{Global, GlobalMut, device};

use crate::step::SequenceState;

/// The number 1.
pub const ONE: u32 = 1 << 16;
/// The acceptance that is assumed before any proposal was tried.
pub const UNTRIED: u32 = ONE / 2;
/// A trial has the weight `1 / 2^WEIGHT` in the estimate.
const WEIGHT: u32 = 3;
/// As how many trials [`UNTRIED`] counts in a [`Record`].
const PRIOR: u32 = 2;

/// The estimate after one more trial.
#[device]
pub fn learned(acceptance: u32, right: bool) -> u32 {
    mean(acceptance, if right { ONE } else { 0 })
}

/// An exponentially weighted mean after one more value.
#[device]
pub fn mean(before: u32, value: u32) -> u32 {
    if value >= before { before + ((value - before) >> WEIGHT) } else { before - ((before - value) >> WEIGHT) }
}

/// How a source of drafts has fared. At first the estimate is the mean of all trials: a few trials show that a source
/// is hopeless, which matters where its drafts cost passes. Later, recent trials count most, as in [`learned`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The estimate of the probability that a draft is right.
    pub acceptance: u32,
    /// How many trials it was made from.
    pub trials: u32,
}

impl Record {
    /// Before the first trial.
    pub const NEW: Self = Self { acceptance: UNTRIED, trials: 0 };

    /// After one more trial.
    #[device]
    pub fn learned(self, right: bool) -> Self {
        let (value, trials) = (if right { ONE } else { 0 }, self.trials.saturating_add(1));
        let counted = PRIOR as u64 + trials as u64;
        let acceptance = if counted < 1 << WEIGHT {
            ((self.acceptance as u64 * (counted - 1) + value as u64) / counted) as u32
        } else {
            mean(self.acceptance, value)
        };
        Self { acceptance, trials }
    }

    /// After a proposal. `tried` of its drafts met a token of the text, and the first `right` of these were right.
    #[device]
    pub fn after(mut self, right: u32, tried: u32) -> Self {
        let mut i = 0;
        while i < right {
            self = self.learned(true);
            i += 1;
        }
        if right < tried { self.learned(false) } else { self }
    }
}

/// What drafts add to the time of a step of one row, as shares of that time.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, cuda_std::Layout)]
pub struct Cost {
    /// Added once if there are any drafts: a step of several rows may run in another way than a step of one.
    pub any: u32,
    /// Added for each draft.
    pub each: u32,
}

/// How many drafts of at most `most` a sequence should run, if each is right with probability `acceptance`; all of them
/// if they [cost](Cost) nothing. `others` are the rows of other sequences in the same step; each brings one token.
#[device]
pub fn worthwhile(acceptance: u32, cost: Cost, others: u32, most: u32) -> u32 {
    let each = cost.each as u64;
    let mut tokens = ONE as u64 * (1 + others as u64);
    let mut time = ONE as u64 + each * others as u64;
    let (mut best_tokens, mut best_time, mut best) = (tokens, time, 0);
    if others == 0 {
        time += cost.any as u64;
    }
    // The expected number of tokens that the next draft brings.
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

/// Parameters of `draft_script` of `bench-kernels`, a kernel that proposes what a script has at the next positions.
/// Grid: 1.
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
