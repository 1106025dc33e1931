//! What one step hands to the next, all of it in device memory: the rows to run, the tokens so far, and the accepted
//! tokens on their way to the host.
//!
//! A sequence's history is its prompt and everything generated. The newest token has no key or value in the cache yet:
//! a decode step runs it as row 0, and its drafts as the rows after it. Row `r` predicts the token after its own, so
//! the tokens of rows `0..=r` are confirmed as long as each prediction equals the draft in the next row (Leviathan et
//! al., 2023, "Fast Inference from Transformers via Speculative Decoding"; drafts by n-gram match propose with
//! certainty, and then rejection sampling is this comparison: see `sample`).
//!
//! # Safety
//! Functions that are not kernels are called in a launch whose parameter block is `p`, with addresses as that says. One
//! whole warp plans, and one accepts; its lanes have numbers from 0 on. Nobody else uses what they write before the
//! launch ends, except for the host, which waits for a report's flag.

use cuda_std::atomic::{self, Ordering, Scope};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
use cuda_std::dependent_launch;
use cuda_std::{Global, GlobalMut, device, kernel, thread, warp};

use crate::drafting;
use crate::ngram::{self, NgramMatchMixed, together};
use crate::sample::GENERATED;
use crate::tree::Path;

/// Most rows of a decode step: the newest token and 15 drafts.
pub const MAX_DECODE_ROWS: u32 = 16;
/// Most rows of a pass by the kernels of the unfused path.
pub const MAX_ROWS: u32 = 64;

/// In place of a token: there is none, because the row's logits are not finite.
pub const NO_TOKEN: u32 = u32::MAX;

/// The rows of a step: each a token of a sequence at a position.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Rows {
    /// `[1]`, how many rows there are; 0 when nothing is left to do.
    pub count: GlobalMut<u32>,
    /// `[rows]` token ids; here and below, as many as a pass may have.
    pub tokens: GlobalMut<u32>,
    /// `[rows]` positions in their sequences.
    pub positions: GlobalMut<u32>,
    /// `[rows]` sequence numbers: which page table.
    pub sequences: GlobalMut<u32>,
    /// `[MAX_DECODE_ROWS]` the words of the rows' [paths](Path), if these are a tree of one sequence; null if the rows
    /// of each sequence are a chain.
    pub paths: GlobalMut<u64>,
}

/// Words of a sequence's [state](SequenceState).
pub const STATE_WORDS: usize = 6;

/// A sequence as the device keeps it: pointers to its history and to [`STATE_WORDS`] words.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct SequenceState {
    /// `[capacity]` every token so far.
    pub history: GlobalMut<i32>,
    /// The words [`LENGTH`](Self::LENGTH), [`FINISHED`](Self::FINISHED), [`STEP`](Self::STEP),
    /// [`ACCEPTANCE`](Self::ACCEPTANCE) and [`PATH`](Self::PATH).
    pub words: GlobalMut<u32>,
}

impl SequenceState {
    /// Word: tokens in the history.
    pub const LENGTH: usize = 0;
    /// Word: 1 once an end token or the length limit was met.
    pub const FINISHED: usize = 1;
    /// Word: steps that have reported to the host.
    pub const STEP: usize = 2;
    /// Word: the recent acceptance of proposals, as [`drafting`] estimates it.
    pub const ACCEPTANCE: usize = 3;
    /// Two words, the low one first: the [path](Path) of the rows that the last step has confirmed.
    pub const PATH: usize = 4;
}

/// Parameters of [`plan_prompt`]. Grid: 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PlanPrompt {
    /// Filled in.
    pub rows: Rows,
    /// The sequence whose history holds the prompt.
    pub state: SequenceState,
    /// Position of the first row.
    pub start: u32,
    /// Rows, at most as many as `rows` has room for.
    pub count: u32,
}

/// Makes a chunk of the prompt the rows of the step.
#[kernel(threads = 64)]
pub unsafe fn plan_prompt(p: PlanPrompt) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let mut r = thread::thread_idx_x();
        if r == 0 {
            p.rows.count.store(0, p.count);
        }
        while r < p.count {
            let position = p.start + r;
            p.rows.tokens.store(r as usize, p.state.history.load(position as usize) as u32);
            p.rows.positions.store(r as usize, position);
            p.rows.sequences.store(r as usize, 0);
            r += 64;
        }
    }
}

/// Counters of a decode kernel, which have to be zero when a step begins. Where there is no such kernel, there are
/// none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Counters {
    /// `[count]`; may be null when that is 0.
    pub words: GlobalMut<u32>,
    /// How many.
    pub count: u32,
}

impl Counters {
    /// Zeroes them, by the lanes of a warp.
    ///
    /// # Safety
    /// There are so many words, which nobody else uses meanwhile.
    #[device]
    pub(crate) unsafe fn clear(self, lane: u32) {
        let mut i = lane;
        while i < self.count {
            // SAFETY: the caller's word.
            unsafe { self.words.store(i as usize, 0) };
            i += 32;
        }
    }
}

/// Parameters of [`plan_decode`]. Grid: 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PlanDecode {
    /// Filled in.
    pub rows: Rows,
    /// The sequence to continue.
    pub state: SequenceState,
    /// `[MAX_DECODE_ROWS]` from the drafting operator: row 0 is not read, drafts follow.
    pub drafts: Global<i32>,
    /// `[1]` from the drafting operator: rows, the newest token's included; null when nothing drafts.
    pub draft_rows: Global<i32>,
    /// To be zeroed for the step.
    pub counters: Counters,
    /// What drafts cost; if nothing, every one that is proposed runs.
    pub cost: drafting::Cost,
}

/// Makes the rows of the step: the newest token and as many of its drafts as are worth it. There are no rows once the
/// sequence is finished.
#[kernel(threads = 32)]
pub unsafe fn plan_decode(p: PlanDecode) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (r, before) = (thread::thread_idx_x(), Before::look(&p));
        let rows = if p.draft_rows.is_null() { 1 } else { p.draft_rows.load(0) };
        let draft = if r > 0 && (r as i32) < rows { p.drafts.load(r as usize) } else { 0 };
        before.plan(&p, r, rows, draft);
    }
}

/// Waits for the launches ahead, on devices where this one may have begun before they were done.
#[device]
pub(crate) fn wait_for_launches() {
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
    dependent_launch::wait();
}

/// Lets the next launch begin early, on devices where it may.
#[device]
pub(crate) fn allow_next_launch() {
    #[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
    dependent_launch::allow_next();
}

/// What a plan needs to know of a sequence apart from its drafts.
struct Before {
    newest: u32,
    token: i32,
    finished: bool,
    acceptance: u32,
}

impl Before {
    /// # Safety
    /// What was accepted before is there: the history has a token.
    #[device]
    unsafe fn look(p: &PlanDecode) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let newest = p.state.words.load(SequenceState::LENGTH) - 1;
            Self {
                newest,
                token: p.state.history.load(newest as usize),
                finished: p.state.words.load(SequenceState::FINISHED) != 0,
                acceptance: p.state.words.load(SequenceState::ACCEPTANCE),
            }
        }
    }

    /// Plans the step, by the lanes `r` of a warp. `rows` rows are proposed, and `draft` is the draft of row `r`.
    ///
    /// # Safety
    /// All lanes of one warp call it, once. There is room for as many rows as are worth it, at most
    /// [`MAX_DECODE_ROWS`].
    #[device]
    unsafe fn plan(self, p: &PlanDecode, r: u32, rows: i32, draft: i32) {
        // SAFETY: the caller's word.
        unsafe {
            p.counters.clear(r);
            let proposed = rows.max(1) as u32;
            let drafts = drafting::worthwhile(self.acceptance, p.cost, 0, proposed.min(MAX_DECODE_ROWS) - 1);
            let count = if self.finished { 0 } else { 1 + drafts };
            if r == 0 {
                p.rows.count.store(0, count);
            }
            if r < count {
                let token = if r == 0 { self.token } else { draft };
                p.rows.tokens.store(r as usize, token as u32);
                p.rows.positions.store(r as usize, self.newest + r);
                p.rows.sequences.store(r as usize, 0);
            }
        }
    }
}

/// One step's report to the host, in mapped memory, as `u32` words.
pub struct Report;

impl Report {
    /// Words of a report: 128 bytes, one PCIe packet.
    pub const WORDS: usize = 32;
    /// Word: the step's number plus one, written last.
    pub const FLAG: usize = 0;
    /// Word: tokens that follow.
    pub const COUNT: usize = 1;
    /// Word: drafts that were tried.
    pub const DRAFTED: usize = 2;
    /// Word: 1 when the sequence is finished.
    pub const FINISHED: usize = 3;
    /// Word: the first token. One that is [`NO_TOKEN`], because logits are not finite, is the last.
    pub const TOKENS: usize = 4;
}

/// What the drafting operator is told about the sequence: its per-batch arrays, of length 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct DraftState {
    /// Index of the newest token in the history; null when nothing drafts.
    pub step_idx: GlobalMut<i64>,
    /// In: the rows proposed for this step, drafts included. Out: the rows before drafting, 1, or 0 once finished.
    pub rows: GlobalMut<i32>,
    /// `[MAX_DECODE_ROWS]` what was proposed for this step, as [`PlanDecode::drafts`]; null when nothing was.
    pub proposed: Global<i32>,
}

/// Parameters of [`accept`]. Grid: 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Accept {
    /// The rows that ran.
    pub rows: Rows,
    /// The sequence to extend.
    pub state: SequenceState,
    /// `[MAX_ROWS]` the token chosen after each row, or [`NO_TOKEN`], which ends the sequence.
    pub sampled: Global<u32>,
    /// `[MAX_DECODE_ROWS]` the [rank](crate::sample::rank) of the best token after each row, taken instead of `sampled`
    /// unless null.
    pub best: Global<u64>,
    /// `[stop_count]` tokens that end the sequence, at most 32.
    pub stop_tokens: Global<u32>,
    /// As [`Sample::uses`](crate::sample::Sample::uses).
    pub uses: GlobalMut<u32>,
    /// Told about the new state.
    pub draft: DraftState,
    /// `[reports, Report::WORDS]` in host memory.
    pub ring: GlobalMut<u32>,
    /// Reports in the ring.
    pub ring_reports: u32,
    /// Entries of `stop_tokens`.
    pub stop_count: u32,
    /// The history may not grow beyond this.
    pub max_length: u32,
    /// The first row whose prediction counts: 0 when decoding, the last when a prompt ends.
    pub first_row: u32,
}

/// Appends the confirmed tokens to the history, reports them, and records how the proposal fared. Each lane has a row.
/// Nearly all of the time is memory latency, so everything is loaded at once, even for rows that turn out not to run.
#[kernel(threads = 32)]
pub unsafe fn accept(p: Accept) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { Accepted::new(&p, thread::thread_idx_x()).tell() }
}

/// A report that is complete except for its flag.
struct Accepted {
    report: GlobalMut<u32>,
    step: u32,
    lane: u32,
}

impl Accepted {
    /// All of [`accept`] except for the report's flag, by the lanes of a warp.
    ///
    /// # Safety
    /// All lanes of one warp call it, once, when the step is done. Where rows have paths,
    /// [`first_row`](Accept::first_row) is 0.
    #[device]
    unsafe fn new(p: &Accept, lane: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let row = p.first_row + lane;
            let words = p.state.words;
            let rows = p.rows.count.load(0);
            let step = words.load(SequenceState::STEP);
            let length = words.load(SequenceState::LENGTH);
            let mut acceptance = words.load(SequenceState::ACCEPTANCE);
            let was_finished = words.load(SequenceState::FINISHED) != 0;
            let is_row = lane < MAX_DECODE_ROWS;
            let (mut path, is_tree) = (Path::of_chain(lane), !p.rows.paths.is_null());
            if is_tree && is_row {
                path = p.rows.path(row);
            }
            let mut token = 0;
            if p.best.is_null() {
                if row < MAX_ROWS {
                    token = p.sampled.load(row as usize);
                }
            } else if row < MAX_DECODE_ROWS {
                token = crate::sample::best_token(p.best.load(row as usize));
            }
            let draft = if row < MAX_ROWS { p.rows.tokens.load(row as usize) } else { 0 };
            let mut proposed = 0;
            let mut proposal = 0;
            if !p.draft.proposed.is_null() {
                proposed = (p.draft.rows.load(0).max(0) as u32).min(MAX_DECODE_ROWS);
                if row + 1 < MAX_DECODE_ROWS {
                    proposal = p.draft.proposed.load(row as usize + 1) as u32;
                }
            }
            let stop = if lane < p.stop_count { p.stop_tokens.load(lane as usize) } else { 0 };

            let runs = is_row && row < rows && !was_finished;
            let is_right = warp::shuffle_idx(token, path.parent()) == draft;
            let wrong = !warp::ballot(runs && (lane == 0 || is_right));
            let way = if is_tree { path.rows() | 1 } else { (2 << (lane % 16)) - 1 };
            // The confirmed rows are one path, on which a child has a higher number than its parent.
            let confirmed = warp::ballot(runs && way & wrong == 0);
            let path = path.of_lane(31 - (confirmed | 1).leading_zeros());
            let token = warp::shuffle_idx(token, path.row_at(lane.min(path.depth())));
            // This tries the first draft that had no row, too.
            let right = row + 1 < proposed && proposal == token;
            let mut ends = length + lane + 1 >= p.max_length || token == NO_TOKEN;
            let mut i = 0;
            while i < p.stop_count {
                ends |= warp::shuffle_idx(stop, i) == token;
                i += 1;
            }
            // No lane counts if nothing runs.
            let counts = confirmed != 0 && lane <= path.depth();
            let last = warp::ballot(counts && (ends || lane == path.depth())).trailing_zeros();
            let count = if last < 32 { last + 1 } else { 0 };
            let finished = was_finished || (warp::ballot(counts && ends) >> (last % 32)) & 1 == 1;
            let rights = warp::ballot(right);
            let mut i = 0;
            while i < count && p.first_row + i + 1 < proposed {
                acceptance = drafting::learned(acceptance, (rights >> i) & 1 == 1);
                i += 1;
            }

            cuda_std::assume(p.ring_reports > 0);
            let report = p.ring.at((step % p.ring_reports) as usize * Report::WORDS);
            if lane < count {
                p.state.history.store((length + lane) as usize, token as i32);
                report.store(Report::TOKENS + lane as usize, token);
                if token != NO_TOKEN {
                    // Atomic, because a token may come twice.
                    atomic::fetch_add(p.uses, token as usize, GENERATED, Ordering::Relaxed, Scope::Device);
                }
            }
            warp::sync_warp();
            if lane == 0 {
                words.store(SequenceState::LENGTH, length + count);
                words.store(SequenceState::FINISHED, finished as u32);
                words.store(SequenceState::STEP, step + 1);
                words.store(SequenceState::ACCEPTANCE, acceptance);
                if is_tree {
                    let path = path.until(count.saturating_sub(1)).word();
                    words.store(SequenceState::PATH, path as u32);
                    words.store(SequenceState::PATH + 1, (path >> 32) as u32);
                }
                if !p.draft.step_idx.is_null() {
                    p.draft.step_idx.store(0, (length + count) as i64 - 1);
                    p.draft.rows.store(0, !finished as i32);
                }
                report.store(Report::COUNT, count);
                report.store(Report::DRAFTED, rows.saturating_sub(p.first_row + 1));
                report.store(Report::FINISHED, finished as u32);
            }
            warp::sync_warp();
            Self { report, step, lane }
        }
    }

    /// Sets the flag, which shows the host the report.
    ///
    /// # Safety
    /// The lanes of that warp call it, once.
    #[device]
    unsafe fn tell(self) {
        if self.lane == 0 {
            // SAFETY: the caller's word.
            unsafe { atomic::store(self.report, Report::FLAG, self.step + 1, Ordering::Release, Scope::System) };
        }
    }
}

/// Parameters of [`accept_and_draft`]. Grid: 1. Shared memory: [`AcceptAndDraft::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct AcceptAndDraft {
    /// What a step has brought.
    pub accept: Accept,
    /// Drafts for the next step: a batch of the one sequence, whose history counts as generated tokens.
    pub draft: NgramMatchMixed<i32>,
    /// The next step's plan, with those drafts.
    pub plan: PlanDecode,
    /// Tokens at the beginning of the history that were there before the launches ahead of this one. This launch reads
    /// them while those run.
    pub settled: u32,
}

impl AcceptAndDraft {
    /// Dynamic shared memory.
    pub const SHARED_BYTES: u32 = ngram::HeadStart::SHARED_BYTES;
}

/// [`accept`], the mixed operator of [`ngram::together`](crate::ngram::together) and [`plan_decode`] in
/// one launch. The last warp accepts, and waits for the bus to the host while the other warps search. The others load
/// the history before that, on Hopper while the step itself still runs.
#[kernel(threads = together::THREADS + 32, min_blocks = 1)]
pub unsafe fn accept_and_draft(p: AcceptAndDraft) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        allow_next_launch();
        if thread::warp_id() == together::THREADS / 32 {
            wait_for_launches();
            let accepted = Accepted::new(&p.accept, thread::lane_id());
            thread::sync_threads();
            accepted.tell();
            return;
        }
        let search = ngram::HeadStart::look(&p.draft, p.settled);
        wait_for_launches();
        thread::sync_threads();
        let before = Before::look(&p.plan);
        if let Some(drafted) = search.draft(&p.draft, 1) {
            // Row 0 is the newest token's.
            let draft = warp::shuffle_up(drafted.token, 1);
            before.plan(&p.plan, thread::lane_id(), drafted.rows, draft);
        }
    }
}
