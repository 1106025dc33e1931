//! Drafts by a model: the kernels between the passes of the draft model, so that a chain of drafts needs no host.
//!
//! The draft model is a second model with a KV cache of its own. Its chain is greedy: the best token after the newest
//! one, the best token after that, and so on. Each token is proposed with certainty, so acceptance is the comparison
//! that `sample` describes, and drafts do not change sampled text either.
//!
//! ```text
//! accept ─► (n-gram match) ─► plan_draft ─► pass ─► next_draft ─► pass ─► … ─► (n-gram match) ─► plan_tree
//!                               │ rows that the cache lacks   │ a row: the draft before
//!                               └ none: nobody drafts         └ none: the chain ends
//! ```
//!
//! The host enqueues as many passes as the longest chain has tokens. The device decides how many of them have rows; a
//! pass without rows costs only its launch.
//!
//! # Which keys and values the cache has
//! The first pass of a chain runs the tokens of the history that the cache lacks, up to the newest one. Each later pass
//! runs one draft, so in the end the cache has the keys and values of all drafts but the last. The next plan counts how
//! many drafts the history agrees with. These stay in the cache, and the next chain begins behind them; the other
//! drafts are overwritten. After a chain whose every draft was accepted the cache lacks two tokens, after any other
//! chain one. That one may be there already, if the step had no rows for the chain's end: then it runs again, with the
//! same bits. After steps without a chain the cache lacks as many tokens as they brought. What the host has read as a
//! prompt is in the cache, too: it says how much that is ([`PlanDraft::read`]).
//!
//! # A head instead of a model
//! An [EAGLE-3 head](crate::eagle) uses the same two kernels. Its row `i` is made of the tokens `i` and `i + 1`, so a
//! row's token lies one further than its position ([`PlanDraft::shift`]). Rows of drafts start from the head's own
//! hidden states, and are overwritten later by rows that start from the model's. So only what the first pass of a chain
//! has run stays in the cache.
//!
//! # Whether to draft, and from where
//! [`Economy::choose`] takes the source from which [`drafting`] expects most. Where drafts are hopeless, a chain is not
//! worth its passes; but without chains nothing would be learnt. So the cache follows the text at a distance of some
//! [`Economy::due`] tokens, and the pass with which it catches up proposes one token. The host chooses the distance,
//! and makes it longer each time that this token was wrong.

use cuda_std::{Global, GlobalMut, device, kernel, thread, warp};

use crate::drafting::{self, Cost, ONE, Record};
use crate::logprobs::{self, NoteLogits, Wanted};
use crate::sample::THREADS;
use crate::step::{Counters, MAX_DECODE_ROWS, NO_TOKEN, Rows, SequenceState, allow_next_launch};
use crate::tree::Likeliest;

/// What drafts cost, and how many there can be.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, cuda_std::Layout)]
pub struct Economy {
    /// What drafts add to a step of the model. If they cost nothing, as many as possible are proposed.
    pub row: Cost,
    /// The time of a pass of the draft model, as a share of a step of one row of the model.
    pub pass: u32,
    /// Most tokens of a chain, less than [`MAX_DECODE_ROWS`].
    pub most: u32,
    /// Most rows of the first pass of a chain, at most [`MAX_DECODE_ROWS`].
    pub room: u32,
    /// When the cache lacks this many tokens, it catches up even without a chain. At most `room`; or a number that is
    /// never reached, if it is not to catch up.
    pub due: u32,
}

/// The situation in which drafts are planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prospect {
    /// The recent acceptance of drafts by the model, as [`drafting`] estimates it.
    pub model: u32,
    /// The recent acceptance of drafts by n-gram match.
    pub ngram: u32,
    /// Tokens of the history that the draft model's cache lacks, at least 1.
    pub lag: u32,
    /// Drafts that the sequence has room for.
    pub left: u32,
    /// Drafts that the n-gram match has found.
    pub guessed: u32,
}

/// What to propose, and what the draft model runs for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Rows of the draft model's first pass: tokens of the history, from the first that its cache lacks on.
    pub rows: u32,
    /// Tokens of the chain.
    pub chain: u32,
    /// Whether the n-gram match's tokens are proposed.
    pub by_guess: bool,
    /// How many tokens of a chain would be worth their passes if there were no n-gram match.
    pub wanted: u32,
}

/// The expected tokens of a step with `drafts` drafts, and its time as a multiple of a step of one row, both in `ONE`s.
#[device]
fn expected(acceptance: u32, cost: Cost, drafts: u32) -> (u64, u64) {
    let (mut tokens, mut more, mut i) = (ONE as u64, acceptance as u64, 0);
    while i < drafts {
        tokens += more;
        more = (more * acceptance as u64) >> 16;
        i += 1;
    }
    (tokens, ONE as u64 + if drafts > 0 { cost.any as u64 } else { 0 } + drafts as u64 * cost.each as u64)
}

impl Economy {
    /// What to propose, and which rows the draft model runs for it.
    #[device]
    pub fn choose(&self, p: Prospect) -> Choice {
        let with_pass = Cost { any: self.row.any, each: self.row.each + self.pass };
        let most = if p.left < self.most { p.left } else { self.most };
        let wanted = drafting::worthwhile(p.model, with_pass, 0, most);
        let mut by_guess = p.guessed > 0;
        if by_guess && wanted > 0 && with_pass.each > 0 {
            let guesses = drafting::worthwhile(p.ngram, self.row, 0, p.guessed);
            let (tokens, time) = expected(p.model, with_pass, wanted);
            let (guess_tokens, guess_time) = expected(p.ngram, self.row, guesses);
            by_guess = guess_tokens * time >= tokens * guess_time;
        }
        let due = p.lag >= self.due;
        let mut chain = if by_guess { 0 } else { wanted };
        if due && chain == 0 && !by_guess && most > 0 {
            chain = 1;
        }
        let rows = if chain == 0 && !due {
            0
        } else if p.lag > self.room {
            // The chain begins when the cache has caught up.
            chain = 0;
            self.room
        } else {
            p.lag
        };
        Choice { rows, chain, by_guess, wanted }
    }
}

/// The words of a draft model's sequence on the device, beside its cache.
pub struct DraftWords;

impl DraftWords {
    /// How many words there are.
    pub const COUNT: usize = Self::TRIALS + 2;
    /// Word: tokens of the history when the last proposal was made.
    pub const LENGTH: usize = 0;
    /// Word: how many tokens of the history, from the first on, have their keys and values in the draft model's cache.
    pub const CACHED: usize = 1;
    /// Word: tokens of the last chain.
    pub const CHAINED: usize = 2;
    /// Word: the recent acceptance of drafts by the model.
    pub const MODEL: usize = 3;
    /// Word: the recent acceptance of drafts by n-gram match.
    pub const NGRAM: usize = 4;
    /// Word: tokens that the last n-gram match found.
    pub const GUESSED: usize = 5;
    /// Word: the recent mean of the probabilities that the draft model itself gave its drafts.
    pub const CONFIDENCE: usize = 6;
    /// Word: [`Choice::wanted`] of the last proposal.
    pub const WANTED: usize = 7;
    /// `[MAX_DECODE_ROWS]` the last chain.
    pub const CHAIN: usize = 8;
    /// `[MAX_DECODE_ROWS]` what the last n-gram match found.
    pub const GUESS: usize = Self::CHAIN + MAX_DECODE_ROWS as usize;
    /// Word: tokens of the history that the draft model's cache still lacks after the first pass.
    pub const BEHIND: usize = Self::GUESS + MAX_DECODE_ROWS as usize;
    /// Word: tokens of the chain before the last that the text agreed with.
    pub const AGREED: usize = Self::BEHIND + 1;
    /// Two words: the trials behind [`MODEL`](Self::MODEL) and [`NGRAM`](Self::NGRAM).
    pub const TRIALS: usize = Self::AGREED + 1;

    /// The words after both models have read a prompt of `length` tokens.
    pub fn after_prompt(length: u32) -> [u32; Self::COUNT] {
        let mut words = [0; Self::COUNT];
        words[Self::LENGTH] = length;
        words[Self::CACHED] = length;
        words[Self::MODEL] = drafting::UNTRIED;
        words[Self::NGRAM] = drafting::UNTRIED;
        words[Self::CONFIDENCE] = drafting::UNTRIED;
        words
    }
}

/// A proposal in the making: n-gram match extends it, and the plan of the next step takes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Proposal {
    /// `[MAX_DECODE_ROWS]` row 0 is the newest token's, drafts follow.
    pub drafts: GlobalMut<i32>,
    /// `[1]` rows, the newest token's included.
    pub rows: GlobalMut<i32>,
    /// `[1]` index in the history of the last token, proposed ones included.
    pub last: GlobalMut<i64>,
}

/// Parameters of [`plan_draft`]. Grid: 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PlanDraft {
    /// The sequence to draft for, whose last step has just been accepted. What is proposed is written behind the end of
    /// its history.
    pub state: SequenceState,
    /// [`DraftWords`], changed.
    pub words: GlobalMut<u32>,
    /// The draft model's rows; filled in.
    pub rows: Rows,
    /// Gets the n-gram match's tokens, if these are proposed.
    pub proposal: Proposal,
    /// `[MAX_DECODE_ROWS]` what n-gram match has found, as [`Proposal::drafts`]; null without one.
    pub guess: Global<i32>,
    /// `[1]` the rows of `guess`, the newest token's included; overwritten with the rows with which the next match
    /// begins.
    pub guess_rows: GlobalMut<i32>,
    /// The likeliest tokens that the passes of the last chain noted.
    pub likeliest: Likeliest,
    /// The entry of [`Wanted`] for the first pass.
    pub noted: GlobalMut<u32>,
    /// The counters of the draft model's decode kernel, to be zeroed.
    pub counters: Counters,
    /// The history may not grow beyond this.
    pub max_length: u32,
    /// How many tokens of the history, from the first on, were read as a prompt is: their keys and values are in the
    /// cache, whatever `words` says.
    pub read: u32,
    /// How much further in the history a row's token lies than its position: 0 for a model, 1 for a head. A head's
    /// cache keeps no drafts.
    pub shift: u32,
    /// What drafts cost, and how many there can be.
    pub economy: Economy,
}

/// Learns how the last proposal fared, and plans the next: whether there is a chain, and which rows the draft model
/// runs first.
#[kernel(threads = 32)]
pub unsafe fn plan_draft(p: PlanDraft) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let lane = thread::thread_idx_x();
        let word = |i: usize| p.words.load(i);
        let (of_sequence, history) = (p.state.words, p.state.history);
        let length = of_sequence.load(SequenceState::LENGTH);
        let finished = of_sequence.load(SequenceState::FINISHED) != 0;
        let (before, cached, chained) = (word(DraftWords::LENGTH), word(DraftWords::CACHED), word(DraftWords::CHAINED));
        let record =
            |of: usize, trials: usize| Record { acceptance: word(of), trials: word(DraftWords::TRIALS + trials) };
        let (model, ngram) = (record(DraftWords::MODEL, 0), record(DraftWords::NGRAM, 1));
        let (guessed_before, mut confidence) = (word(DraftWords::GUESSED), word(DraftWords::CONFIDENCE));
        let slot = (lane % MAX_DECODE_ROWS) as usize;
        let (chain, guess_before) = (word(DraftWords::CHAIN + slot), word(DraftWords::GUESS + slot));
        let (mut guess, mut guessed) = (0, 0);
        if !p.guess.is_null() {
            guessed = (p.guess_rows.load(0) - 1).clamp(0, MAX_DECODE_ROWS as i32 - 1) as u32;
            if lane < guessed {
                guess = p.guess.load(1 + lane as usize);
            }
        }
        // A step brings at most `MAX_DECODE_ROWS` tokens, and a lane looks at each.
        let new = length.saturating_sub(before).min(MAX_DECODE_ROWS);
        let token = if lane < new { history.load((before + lane) as usize) as u32 } else { 0 };
        let mut said = 0;
        if lane < chained {
            said = (p.likeliest.probability(lane, 0) * ONE as f32) as u32;
        }
        warp::sync_warp();

        let (chain_tried, guess_tried) = (chained.min(new), guessed_before.min(new));
        let agreed = warp::ballot(lane < chain_tried && chain == token).trailing_ones();
        let guess_agreed = warp::ballot(lane < guess_tried && guess_before == token).trailing_ones();
        let (model, ngram) = (model.after(agreed, chain_tried), ngram.after(guess_agreed, guess_tried));
        let mut i = 0;
        while i < chain_tried && i <= agreed {
            confidence = drafting::mean(confidence, warp::shuffle_idx(said, i).min(ONE));
            i += 1;
        }
        // The passes of a chain have run all of its drafts but the last.
        let valid = if chained > 0 && p.shift == 0 { before + agreed.min(chained - 1) } else { cached };
        // At least the newest token runs, since a chain begins with its logits. It is in the cache already where a step
        // had no rows for the end of a chain, and the chain had foreseen what came next.
        let valid = valid.max(p.read).min(length.saturating_sub(1 + p.shift));
        let left = p.max_length.saturating_sub(length + 1);
        let lag = length.saturating_sub(valid + p.shift);
        let mut choice = Choice::default();
        if !finished {
            let (model, ngram) = (model.acceptance, ngram.acceptance);
            choice = p.economy.choose(Prospect { model, ngram, lag, left, guessed });
        }

        p.counters.clear(lane);
        if lane < choice.rows {
            let position = valid + lane;
            p.rows.tokens.store(lane as usize, history.load((position + p.shift) as usize) as u32);
            p.rows.positions.store(lane as usize, position);
            p.rows.sequences.store(lane as usize, 0);
        }
        if choice.by_guess && lane < guessed {
            p.proposal.drafts.store(1 + lane as usize, guess);
            history.store((length + lane) as usize, guess);
        }
        if lane < guessed {
            p.words.store(DraftWords::GUESS + lane as usize, guess as u32);
        }
        if lane == 0 {
            p.rows.count.store(0, choice.rows);
            if choice.by_guess {
                p.proposal.rows.store(0, 1 + guessed as i32);
                p.proposal.last.store(0, (length + guessed) as i64 - 1);
            }
            if !p.guess.is_null() {
                p.guess_rows.store(0, !finished as i32);
            }
            p.words.store(DraftWords::LENGTH, length);
            p.words.store(DraftWords::CACHED, valid + choice.rows);
            p.words.store(DraftWords::CHAINED, choice.chain);
            p.words.store(DraftWords::MODEL, model.acceptance);
            p.words.store(DraftWords::NGRAM, ngram.acceptance);
            p.words.store(DraftWords::TRIALS, model.trials);
            p.words.store(DraftWords::TRIALS + 1, ngram.trials);
            p.words.store(DraftWords::GUESSED, guessed);
            p.words.store(DraftWords::CONFIDENCE, confidence);
            p.words.store(DraftWords::WANTED, choice.wanted);
            p.words.store(DraftWords::BEHIND, lag - choice.rows);
            p.words.store(DraftWords::AGREED, agreed);
            of_sequence.store(SequenceState::ACCEPTANCE, if choice.by_guess { ngram } else { model }.acceptance);
            p.noted.store(Wanted::ROW, choice.rows.wrapping_sub(1));
        }
    }
}

/// Parameters of [`next_draft`]. Cooperative; grid and shared memory: as [`note_logits`](logprobs::note_logits)'s, of
/// one row.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct NextDraft {
    /// What is noted of the pass; [`likeliest`](Self::likeliest) reads it.
    pub note: NoteLogits,
    /// The sequence to draft for. The draft is written behind the end of its history.
    pub state: SequenceState,
    /// [`DraftWords`], changed.
    pub words: GlobalMut<u32>,
    /// The rows of the pass that has run; overwritten with those of the next pass.
    pub rows: Rows,
    /// The likeliest tokens that the pass noted.
    pub likeliest: Likeliest,
    /// The entry of [`Wanted`] for the next pass.
    pub noted: GlobalMut<u32>,
    /// Extended by the draft.
    pub proposal: Proposal,
    /// As [`PlanDraft::counters`].
    pub counters: Counters,
    /// Which pass of the chain this was, from 0 on.
    pub number: u32,
    /// As [`PlanDraft::shift`].
    pub shift: u32,
}

/// If the pass has rows, notes the logits of its last row, proposes the best token there, and makes this token the row
/// of the next pass. The chain ends if the model does not have that token, or logits are not finite.
#[kernel(threads = THREADS, min_blocks = 2)]
pub unsafe fn next_draft(p: NextDraft) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        allow_next_launch();
        let has_rows = p.note.wanted.load(Wanted::ROW) != Wanted::NO_ROW;
        // Only the last CTA goes on: by then all have read the word above.
        let goes_on = if has_rows { logprobs::note_rows(&p.note) } else { thread::block_idx_x() == 0 };
        if !goes_on || thread::warp_id() > 0 {
            return;
        }
        let lane = thread::lane_id();
        let (chained, length) = (p.words.load(DraftWords::CHAINED), p.words.load(DraftWords::LENGTH));
        let rows = p.rows.count.load(0).min(MAX_DECODE_ROWS);
        let continues = p.number < chained && rows > 0;
        let token = if continues { p.likeliest.token(p.number, 0) } else { NO_TOKEN };
        // All lanes have read what is overwritten from here on.
        warp::sync_warp();
        p.counters.clear(lane);
        if lane == 0 {
            let proposes = token != NO_TOKEN;
            let more = proposes && p.number + 1 < chained;
            if proposes {
                let place = (length + p.number) as usize;
                p.proposal.drafts.store(1 + p.number as usize, token as i32);
                p.proposal.rows.store(0, 2 + p.number as i32);
                p.proposal.last.store(0, place as i64);
                p.state.history.store(place, token as i32);
                p.words.store(DraftWords::CHAIN + p.number as usize, token);
            } else if continues {
                p.words.store(DraftWords::CHAINED, p.number);
            }
            p.rows.count.store(0, more as u32);
            if has_rows {
                p.noted.store(Wanted::ROW, if more { 0 } else { Wanted::NO_ROW });
            }
            if more {
                p.rows.tokens.store(0, token);
                p.rows.positions.store(0, length + p.number - p.shift);
                p.rows.sequences.store(0, 0);
            }
        }
    }
}
