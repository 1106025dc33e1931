//! Which nodes of a drafter's tree a step runs.
//!
//! A chain of drafts is the trunk: the likeliest token after each pass, then the tokens that an n-gram match adds. The
//! next likeliest tokens after each pass are leaves beside the trunk. A node is right with the probability of its path:
//! the product of the probabilities that the drafter gives the path's tokens. Each of these is corrected by how often
//! the drafter's likeliest tokens were right of late, relative to what it had said of them. The step runs the nodes
//! that are best by that (Li et al., 2024, "EAGLE-2", section 4.2), as many as are worth their rows as in
//! [`drafting`](crate::drafting).
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses are as it says, and notes are of passes that are done. One whole
//! warp calls these functions, each lane with its own number.

use cuda_std::{Global, GlobalMut, device, kernel, thread, warp};

use super::Path;
use crate::attention::SPLIT;
use crate::draft_model::DraftWords;
use crate::drafting::{Cost, ONE};
use crate::logprobs::Note;
use crate::sample::UNIT_MASS;
use crate::step::{Counters, MAX_DECODE_ROWS, NO_TOKEN, Rows, SequenceState};

/// Most tokens after a pass that may become nodes.
pub const MOST_BRANCHES: u32 = 4;

/// The likeliest tokens after each pass of a drafter, with their probabilities.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Likeliest {
    /// `[MAX_DECODE_ROWS, Note::WORDS]` what [`note_logits`](crate::logprobs::note_logits) noted of each pass.
    pub notes: Global<u32>,
    /// `[target_count]` the model's token that each token of a head stands for; null if they are the same.
    pub targets: Global<u32>,
    /// Entries of `targets`.
    pub target_count: u32,
    /// Size of the vocabulary of the model that is drafted for: only its tokens are proposed.
    pub vocab: u32,
}

impl Likeliest {
    /// The `i`-th likeliest token after a pass; [`NO_TOKEN`] if the model does not have it, or logits are not finite.
    ///
    /// # Safety
    /// The pass was noted, with more than `i` tokens.
    #[device]
    pub(crate) unsafe fn token(&self, pass: u32, i: u32) -> u32 {
        // SAFETY: the caller's word.
        unsafe {
            let note = self.notes.at(pass as usize * Note::WORDS);
            let mut token = note.load(Note::TOP + 2 * i as usize);
            if !self.targets.is_null() && token < self.target_count {
                token = self.targets.load(token as usize);
            }
            if f32::from_bits(note.load(Note::MAX)).is_finite() && token < self.vocab { token } else { NO_TOKEN }
        }
    }

    /// The probability of the `i`-th likeliest token after a pass; 0 if nothing was noted.
    ///
    /// # Safety
    /// As [`token`](Self::token).
    #[device]
    pub(crate) unsafe fn probability(&self, pass: u32, i: u32) -> f32 {
        // SAFETY: the caller's word.
        unsafe {
            let note = self.notes.at(pass as usize * Note::WORDS);
            let logit = |word: usize| f32::from_bits(note.load(word));
            let total = note.load(Note::TOTAL) as u64 | (note.load(Note::TOTAL + 1) as u64) << 32;
            let below = logit(Note::TOP + 2 * i as usize + 1) - logit(Note::MAX);
            let mass = cuda_std::math::exp2(below * core::f32::consts::LOG2_E) * UNIT_MASS as f32;
            // The total is 0 if nothing was noted.
            if total == 0 { 0.0 } else { mass / total as f32 }
        }
    }
}

/// What the host is told of a proposal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftReport {
    /// Nodes that are the draft model's.
    pub by_model: u32,
    /// Tokens of the draft model's chain.
    pub chained: u32,
    /// [`Choice::wanted`](crate::draft_model::Choice::wanted).
    pub wanted: u32,
    /// [`DraftWords::AGREED`].
    pub agreed: u32,
    /// [`DraftWords::BEHIND`], or [`MOST_BEHIND`](Self::MOST_BEHIND) if it is more.
    pub behind: u32,
}

impl DraftReport {
    /// The largest value of [`behind`](Self::behind).
    pub const MOST_BEHIND: u32 = u16::MAX as u32;

    /// The report as a word: four bits for each field, and sixteen for [`behind`](Self::behind).
    #[device]
    pub const fn word(self) -> u32 {
        let behind = if self.behind < Self::MOST_BEHIND { self.behind } else { Self::MOST_BEHIND };
        self.by_model | self.chained << 4 | self.wanted << 8 | self.agreed << 12 | behind << 16
    }

    /// The report in such a word.
    pub const fn from_word(word: u32) -> Self {
        Self {
            by_model: word & 15,
            chained: word >> 4 & 15,
            wanted: word >> 8 & 15,
            agreed: word >> 12 & 15,
            behind: word >> 16,
        }
    }
}

/// Parameters of [`plan_tree`]. Grid: 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PlanTree {
    /// Filled in: with a chain if they have no paths.
    pub rows: Rows,
    /// The sequence to continue.
    pub state: SequenceState,
    /// The [`DraftWords`] of this proposal.
    pub words: Global<u32>,
    /// `[MAX_DECODE_ROWS]` row 0 is not read, the trunk follows.
    pub drafts: Global<i32>,
    /// `[1]` the rows of `drafts`, the newest token's included.
    pub draft_rows: Global<i32>,
    /// The likeliest tokens that the drafter's passes noted.
    pub likeliest: Likeliest,
    /// To be zeroed for the step.
    pub counters: Counters,
    /// `[told_reports]` in host memory: the [report](DraftReport) of the step that is planned.
    pub told: GlobalMut<u32>,
    /// Entries of `told`.
    pub told_reports: u32,
    /// What rows cost; if nothing, as many nodes run as there is room for.
    pub cost: Cost,
    /// Most nodes, less than [`MAX_DECODE_ROWS`].
    pub most: u32,
    /// How many tokens after a pass may be nodes, at most [`MOST_BRANCHES`].
    pub branches: u32,
    /// The history may not grow beyond this.
    pub max_length: u32,
}

/// Candidates of a lane: one token after each of two passes, and one that an n-gram match added.
const SLOTS: usize = 3;
/// The number of the first candidate that an n-gram match added.
const FIRST_GUESS: u32 = 64;

/// The candidates as a warp holds them: lane `c % 32` has number `c`, at index `c / 32`. Token `j` after pass `i` is
/// number `4 i + j`; the tokens that an n-gram match added come behind them.
struct Candidates {
    tokens: [u32; SLOTS],
    /// Probabilities of their paths; below zero where there is no candidate.
    worth: [f32; SLOTS],
}

impl Candidates {
    /// # Safety
    /// Each pass of the last chain was noted with at least `branches` tokens, 4 at most.
    #[device]
    unsafe fn look(p: &PlanTree, branches: u32, lane: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let word = |i: usize| p.words.load(i);
            let chained = word(DraftWords::CHAINED).min(MAX_DECODE_ROWS - 1);
            let (said, was) = (word(DraftWords::CONFIDENCE), word(DraftWords::MODEL));
            let by_match = word(DraftWords::NGRAM) as f32 / ONE as f32;
            let trunk = (p.draft_rows.load(0).clamp(1, MAX_DECODE_ROWS as i32) - 1) as u32;
            let scale = was as f32 / said.max(1) as f32;
            let (mut tokens, mut worth) = ([NO_TOKEN; SLOTS], [-1f32; SLOTS]);
            unroll!(S < 2; {
                let (pass, i) = (lane / 4 + 8 * S as u32, lane % 4);
                if pass < chained && i < branches {
                    let next = p.drafts.load(1 + pass as usize) as u32;
                    let token = if i == 0 { next } else { p.likeliest.token(pass, i) };
                    tokens[S] = token;
                    if i == 0 || token != NO_TOKEN && token != next {
                        worth[S] = (p.likeliest.probability(pass, i) * scale).min(1.0);
                    }
                }
            });
            if lane < trunk.saturating_sub(chained) {
                tokens[2] = p.drafts.load(1 + (chained + lane) as usize) as u32;
                worth[2] = by_match;
            }
            // Multiplies in the probabilities of the trunk's tokens before each.
            let after_parent = worth;
            let mut pass = 0;
            while pass < chained {
                let own = if pass < 8 { after_parent[0] } else { after_parent[1] };
                let before = warp::shuffle_idx(own, pass * 4 % 32);
                unroll!(S < 3; {
                    if worth[S] > 0.0 && (S == 2 || lane / 4 + 8 * S as u32 > pass) {
                        worth[S] *= before;
                    }
                });
                pass += 1;
            }
            let mut i = 0;
            while worth[2] > 0.0 && i < lane {
                worth[2] *= by_match;
                i += 1;
            }
            Self { tokens, worth }
        }
    }

    /// Takes out the best candidate, the first of equally good ones, and returns its number, token and probability;
    /// `None` if none is left.
    #[device]
    fn take_best(&mut self, lane: u32) -> Option<(u32, u32, f32)> {
        let mut best = 0;
        unroll!(S < 3; {
            if self.worth[S] >= 0.0 {
                // The candidate's number takes the last bits of the probability, which are too small to matter.
                best = best.max((self.worth[S].to_bits() & !127) | (127 - 32 * S as u32 - lane));
            }
        });
        best = warp::max(best);
        if best == 0 {
            return None;
        }
        let number = 127 - best % 128;
        let mut token = 0;
        unroll!(S < 3; {
            if number / 32 == S as u32 {
                token = self.tokens[S];
                if number % 32 == lane {
                    self.worth[S] = -1.0;
                }
            }
        });
        Some((number, warp::shuffle_idx(token, number % 32), f32::from_bits(best & !127)))
    }
}

/// Makes the rows of the step: the newest token and the best nodes. There are no rows once the sequence is finished.
#[kernel(threads = 32)]
pub unsafe fn plan_tree(p: PlanTree) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        cuda_std::assume(p.told_reports > 0);
        let lane = thread::thread_idx_x();
        let newest = p.state.words.load(SequenceState::LENGTH) - 1;
        let finished = p.state.words.load(SequenceState::FINISHED) != 0;
        let step = p.state.words.load(SequenceState::STEP);
        let first = p.state.history.load(newest as usize) as u32;
        let chained = p.words.load(DraftWords::CHAINED);
        let (wanted, agreed) = (p.words.load(DraftWords::WANTED), p.words.load(DraftWords::AGREED));
        let behind = p.words.load(DraftWords::BEHIND);
        p.counters.clear(lane);
        // The last token that the history has room for is never drafted, and every node takes a slot.
        let room = p.most.min(MAX_DECODE_ROWS - 1).min(p.max_length.saturating_sub(newest + 2));
        let is_tree = !p.rows.paths.is_null() && newest % SPLIT + room < SPLIT;
        let mut candidates = Candidates::look(&p, if is_tree { p.branches.min(MOST_BRANCHES) } else { 1 }, lane);

        let (mut token, mut path, mut trunk) = (first, Path::ROOT, Path::ROOT);
        let (any, each) = (p.cost.any as f32 / ONE as f32, p.cost.each as f32 / ONE as f32);
        let (mut tokens, mut best_tokens, mut best_time) = (1f32, 1f32, 1f32);
        let (mut row, mut nodes, mut by_model, mut best_by_model) = (1, 0, 0, 0);
        while row <= room {
            let Some((number, drafted, worth)) = candidates.take_best(lane) else { break };
            let is_trunk = number >= FIRST_GUESS || number % 4 == 0;
            let parent = if is_trunk { trunk } else { trunk.until(number / 4) };
            let node = parent.child(row);
            if is_trunk {
                trunk = node;
            }
            if lane == row {
                (token, path) = (drafted, node);
            }
            by_model += u32::from(number < FIRST_GUESS);
            tokens += worth;
            let time = 1.0 + any + each * row as f32;
            if tokens * best_time >= best_tokens * time {
                (best_tokens, best_time, nodes, best_by_model) = (tokens, time, row, by_model);
            }
            row += 1;
        }

        let count = if finished { 0 } else { 1 + nodes };
        if lane < count {
            p.rows.tokens.store(lane as usize, token);
            p.rows.positions.store(lane as usize, newest + path.depth());
            p.rows.sequences.store(lane as usize, 0);
            if !p.rows.paths.is_null() {
                p.rows.paths.store(lane as usize, path.word());
            }
        }
        if lane == 0 {
            p.rows.count.store(0, count);
            let by_model = if chained > 0 { best_by_model } else { 0 };
            let report = DraftReport { by_model, chained, wanted, agreed, behind };
            p.told.store((step % p.told_reports) as usize, report.word());
        }
    }
}
