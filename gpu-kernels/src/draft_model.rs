//! Drafts by a model: what stands between the passes of the draft model, so that a chain of drafts needs no host.
//!
//! The draft model is a second model with a KV cache of its own. Its chain is greedy: the best token after the newest
//! one, the best token after that, and so on. Each is proposed with certainty, so acceptance is the comparison of
//! `sample`, and drafts leave sampled text as it is, too.
//!
//! ```text
//! accept ─► (n-gram match) ─► plan_draft ─► pass ─► next_draft ─► pass ─► … ─► (n-gram match) ─► plan_tree
//!                               │ rows that the cache lacks   │ a row: the draft before
//!                               └ none: nobody drafts         └ none: the chain ends
//! ```
//!
//! The host enqueues as many passes as a chain may be long. How many of them have rows is the device's affair; a pass
//! without rows costs its launch.
//!
//! # Which keys and values the cache has
//! The first pass of a chain runs what the cache lacks of the history, up to the newest token. Each later pass runs a
//! draft, so the cache then holds keys and values of all drafts but the last. Those that were accepted stay: the next
//! plan counts how many drafts the history agrees with, and begins behind them. Those that were not are overwritten.
//! After a chain whose every draft was accepted the cache lacks two tokens, otherwise one; after steps without a chain,
//! as many as they brought. What the host has read as a prompt is, it tells ([`PlanDraft::read`]).
//!
//! # A head instead of a model
//! An [EAGLE-3 head](crate::eagle) goes through the same two kernels. Its row `i` is of the tokens `i` and `i + 1`, so
//! that its tokens lie one further than its positions ([`PlanDraft::shift`]). Rows of drafts begin with its own hidden
//! states, and are overwritten by rows with the model's: only what the first pass of a chain has run stays.
//!
//! # Whether to draft, and from where
//! [`Economy::choose`]: the source for which [`drafting`] expects most. A chain is not worth its passes where
//! drafts are hopeless, but then nothing would be learnt. So the cache follows the text at a distance of some
//! [`Economy::due`] tokens, and the pass with which it catches up proposes one token. The host chooses the distance:
//! longer, each time that the token was wrong.

use cuda_std::{Global, GlobalMut, kernel, thread, warp};

use crate::drafting::{self, Cost, ONE};
use crate::logprobs::{self, NoteLogits, Wanted};
use crate::sample::THREADS;
use crate::step::{Counters, MAX_DECODE_ROWS, NO_TOKEN, Rows, SequenceState, allow_next_launch};
use crate::tree::Likeliest;

/// What drafts cost, and how many there can be.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, cuda_std::Layout)]
pub struct Economy {
    /// What drafts add to a step of the model. Where they cost nothing, all that can be is proposed.
    pub row: Cost,
    /// What a pass of the draft model takes, as a share of a step of one row.
    pub pass: u32,
    /// Most tokens of a chain, less than [`MAX_DECODE_ROWS`].
    pub most: u32,
    /// Most rows of the first pass of a chain, at most [`MAX_DECODE_ROWS`].
    pub room: u32,
    /// Tokens that the cache lacks when it catches up all the same, at most `room`; more than there ever are, where
    /// no pass comes.
    pub due: u32,
}

/// Where things stand when drafts are planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prospect {
    /// What drafts by the model were worth of late, as [`drafting`] estimates it.
    pub model: u32,
    /// What those by n-gram match were.
    pub ngram: u32,
    /// Tokens of the history that the draft model's cache lacks, at least 1.
    pub lag: u32,
    /// Drafts that the sequence has room for.
    pub left: u32,
    /// Drafts by n-gram match that there are.
    pub guessed: u32,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Rows of the draft model's first pass, from the first that its cache lacks on.
    pub rows: u32,
    /// Tokens of the chain.
    pub chain: u32,
    /// Whether the n-gram match's tokens are proposed.
    pub by_guess: bool,
    /// Tokens of a chain that would be worth their passes, were there no n-gram match.
    pub wanted: u32,
}

/// Tokens that a step with so many drafts is expected to bring, and how long it takes.
#[inline(always)]
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
    #[inline(always)]
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

/// An estimate after a proposal of which the first `right` were, of `tried` that met a token of the text.
#[inline(always)]
pub fn tried(mut acceptance: u32, right: u32, tried: u32) -> u32 {
    let mut i = 0;
    while i < right {
        acceptance = drafting::learned(acceptance, true);
        i += 1;
    }
    if right < tried { drafting::learned(acceptance, false) } else { acceptance }
}

/// Words that a draft model's sequence has on the device, beside its cache.
pub struct DraftWords;

impl DraftWords {
    /// Words.
    pub const COUNT: usize = Self::AGREED + 1;
    /// Word: tokens of the history when the last proposal was made.
    pub const LENGTH: usize = 0;
    /// Word: those of them, from the first on, whose keys and values are in the draft model's cache.
    pub const CACHED: usize = 1;
    /// Word: tokens of the last chain.
    pub const CHAINED: usize = 2;
    /// Word: what drafts by the model were worth of late.
    pub const MODEL: usize = 3;
    /// Word: what drafts by n-gram match were.
    pub const NGRAM: usize = 4;
    /// Word: tokens that the last n-gram match found.
    pub const GUESSED: usize = 5;
    /// Word: what the model said of late that drafts by it were worth.
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

    /// As they are when a prompt of so many tokens was read by both models.
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

/// A proposal in the making: what n-gram match extends, and what the plan of the next step takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Proposal {
    /// `[MAX_DECODE_ROWS]` row 0 is the newest token's, drafts follow.
    pub drafts: GlobalMut<i32>,
    /// `[1]` rows, the newest token's included.
    pub rows: GlobalMut<i32>,
    /// `[1]` index in the history of the last token that is there or proposed.
    pub last: GlobalMut<i64>,
}

/// Parameters of [`plan_draft`]. Grid: 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PlanDraft {
    /// The sequence to draft for, which a step has just been accepted of. Its history gets what is proposed, behind its
    /// end.
    pub state: SequenceState,
    /// [`DraftWords`], changed.
    pub words: GlobalMut<u32>,
    /// The draft model's rows; filled in.
    pub rows: Rows,
    /// Begun, where the n-gram match's tokens are proposed.
    pub proposal: Proposal,
    /// `[MAX_DECODE_ROWS]` what n-gram match has found, as [`Proposal::drafts`]; null without one.
    pub guess: Global<i32>,
    /// `[1]` its rows; then those with which the next match begins.
    pub guess_rows: GlobalMut<i32>,
    /// What the passes of the last chain said.
    pub likeliest: Likeliest,
    /// [`Wanted`], for the first pass.
    pub noted: GlobalMut<u32>,
    /// Of the draft model's decode kernel, to be zeroed.
    pub counters: Counters,
    /// The history may not grow beyond this.
    pub max_length: u32,
    /// Tokens of the history, from the first on, that were read as a prompt is: whatever `words` says, their keys and
    /// values are in the cache.
    pub read: u32,
    /// How much further in the history a row's token lies than its position: 0 of a model, 1 of a head, whose cache
    /// keeps no drafts.
    pub shift: u32,
    /// What to go by.
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
        let (mut model, mut ngram) = (word(DraftWords::MODEL), word(DraftWords::NGRAM));
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
        // A step brings at most as many tokens as there are lanes to look at them.
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
        model = tried(model, agreed, chain_tried);
        ngram = tried(ngram, guess_agreed, guess_tried);
        let mut i = 0;
        while i < chain_tried && i <= agreed {
            confidence = drafting::mean(confidence, warp::shuffle_idx(said, i).min(ONE));
            i += 1;
        }
        // Of a chain, all drafts but the last were run.
        let valid = if chained > 0 && p.shift == 0 { before + agreed.min(chained - 1) } else { cached };
        let valid = valid.max(p.read);
        let left = p.max_length.saturating_sub(length + 1);
        let lag = length.saturating_sub(valid + p.shift);
        let mut choice = Choice::default();
        if !finished {
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
            p.words.store(DraftWords::MODEL, model);
            p.words.store(DraftWords::NGRAM, ngram);
            p.words.store(DraftWords::GUESSED, guessed);
            p.words.store(DraftWords::CONFIDENCE, confidence);
            p.words.store(DraftWords::WANTED, choice.wanted);
            p.words.store(DraftWords::BEHIND, lag - choice.rows);
            p.words.store(DraftWords::AGREED, agreed);
            of_sequence.store(SequenceState::ACCEPTANCE, if choice.by_guess { ngram } else { model });
            p.noted.store(Wanted::ROW, choice.rows.wrapping_sub(1));
        }
    }
}

/// Parameters of [`next_draft`]. Cooperative; grid and shared memory: as [`note_logits`](logprobs::note_logits)'s, of
/// one row.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct NextDraft {
    /// What is noted of the pass: for [`likeliest`](Self::likeliest).
    pub note: NoteLogits,
    /// The sequence to draft for. Its history gets the draft, behind its end.
    pub state: SequenceState,
    /// [`DraftWords`], changed.
    pub words: GlobalMut<u32>,
    /// The rows of the pass that has run, and those of the next.
    pub rows: Rows,
    /// What the pass said.
    pub likeliest: Likeliest,
    /// [`Wanted`], for the next pass.
    pub noted: GlobalMut<u32>,
    /// Gets the draft.
    pub proposal: Proposal,
    /// As [`PlanDraft::counters`].
    pub counters: Counters,
    /// Which pass of the chain this was, from 0 on.
    pub number: u32,
    /// As [`PlanDraft::shift`].
    pub shift: u32,
}

/// Notes what a pass says behind its last row, if it has rows, proposes the best token there, and makes it the row of
/// the next. A token that the model does not have, or none for want of finite logits, ends the chain.
#[kernel(threads = THREADS, min_blocks = 2)]
pub unsafe fn next_draft(p: NextDraft) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        allow_next_launch();
        let has_rows = p.note.wanted.load(Wanted::ROW) != Wanted::NO_ROW;
        // When the last CTA goes on, all have read that.
        let goes_on = if has_rows { logprobs::note_rows(&p.note) } else { thread::block_idx_x() == 0 };
        if !goes_on || thread::warp_id() > 0 {
            return;
        }
        let lane = thread::lane_id();
        let (chained, length) = (p.words.load(DraftWords::CHAINED), p.words.load(DraftWords::LENGTH));
        let rows = p.rows.count.load(0).min(MAX_DECODE_ROWS);
        let continues = p.number < chained && rows > 0;
        let token = if continues { p.likeliest.token(p.number, 0) } else { NO_TOKEN };
        // What is zeroed has been read.
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
