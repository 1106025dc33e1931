//! Drafts by a model or a head on a device. Its passes run in the decode loop's own queue, and the host waits for none.
//!
//! If drafts are hopeless, the host enqueues no passes until the draft cache lacks [`REST`] tokens. Then one draft is
//! tried. Each time this draft is wrong, the next rest of a model is twice as long. The tokens that a long rest leaves
//! unread are read as a prompt is.

use std::ops::Range;

use cuda_std::Global;
use gpu_kernels::draft_model::{self, DraftWords, Economy, NextDraft, PlanDraft};
use gpu_kernels::drafting::Cost;
use gpu_kernels::eagle::States;
use gpu_kernels::logprobs::{Note, NoteLogits, Wanted};
use gpu_kernels::step::{self, MAX_DECODE_ROWS, MAX_ROWS, PlanPrompt, Rows, SequenceState};
use gpu_kernels::tree::{self, DraftReport, Likeliest, PlanTree};

use super::ngram::NgramOperator;
use super::{Backoff, Between, Drafter, OnDevice, Proposals};
use crate::Error;
use crate::backend::{Drafted, Sequence, Step, common_prefix};
use crate::device::{Buffer, Device, Mapped};
use crate::draft::{Draft, ModelDraft, head_pass_bytes, pass_share};
use crate::forward::{Begin, Capacity, Forward, HeadWeights, Pass, RowOutput, RowsOf};
use crate::gpu::RING;
use crate::prefill::Prefill;
use crate::sampler::Sampler;
use crate::tuning::layer_bytes;

/// The cache catches up when the first pass of a chain still has room for this many tokens more. The margin is about as
/// many tokens as steps of one row bring between the enqueuing of a pass and its run.
const EARLY: u32 = 4;
/// The first rest: how many tokens the cache lacks before a draft is tried although none is worth its pass. All rests
/// of a head are this long, because hidden states have few slots.
const REST: u32 = MAX_DECODE_ROWS - 2 * EARLY;
/// The longest rest of a model.
const MOST_REST: u32 = 16 * REST;
/// Most rows that the decode kernel for few rows runs.
const FEW_ROWS: u32 = 8;

/// What the passes of a drafter run.
pub(crate) enum Passes {
    /// A whole model.
    Model(Forward),
    /// An EAGLE-3 head.
    Head(Head),
}

/// An EAGLE-3 head.
pub(crate) struct Head {
    forward: Forward,
    /// `[draft_vocab]` the model's number for each token of the head.
    targets: Buffer<u32>,
    /// Parameters that a pass reads.
    parameters: usize,
}

impl Head {
    /// As [`Forward::prepare_decode`].
    pub(crate) fn prepare(&mut self) -> Result<(), Error> {
        self.forward.prepare_decode()?;
        Ok(())
    }
}

impl Passes {
    /// The passes of `head`, which drafts for `model`. `model` must live as long.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn of_head(mut head: HeadWeights, model: &Forward) -> Result<Self, Error> {
        let targets = std::mem::replace(&mut head.targets, model.device().zeroed(0)?);
        let parameters = head.pass_parameters;
        let room = Capacity::single(model.capacity());
        Ok(Self::Head(Head { targets, parameters, forward: Forward::of_head(head, model, room)? }))
    }

    /// The draft model, if these are the passes of one.
    pub(crate) fn model(&mut self) -> Option<&mut Forward> {
        match self {
            Self::Model(forward) => Some(forward),
            Self::Head(_) => None,
        }
    }
}

/// A draft model or a head on a device, with its own cache.
pub(crate) struct ModelDrafter {
    forward: Forward,
    /// For a head: [`Head::targets`].
    targets: Option<Buffer<u32>>,
    sampler: Sampler,
    /// The notes of the passes, as [`Likeliest::notes`].
    notes: Buffer<u32>,
    /// What the next pass is to note: [`Wanted`].
    noted: Buffer<u32>,
    /// The words of the draft kernels: [`DraftWords`].
    words: Buffer<u32>,
    /// The reports of the plans, as [`PlanTree::told`].
    told: Mapped,
    ngram: NgramOperator,
    guess: Buffer<i32>,
    guess_rows: Buffer<i32>,
    /// Vocabulary size of the model that is drafted for.
    vocab: u32,
    /// The cost of a pass, as a share of a step of the model that is drafted for.
    pass: u32,
    draft: ModelDraft,
    /// Passes to enqueue for the next proposal. The host chooses their number by how long a chain was worth its passes
    /// a few steps ago, as newer reports have not arrived.
    passes: u32,
    /// Proposals enqueued for this sequence.
    proposed: u32,
    /// Reports heard about this sequence: first that of the prompt, then one for each proposal.
    heard: u32,
    /// The number of the proposal that ended the last rest; 0 before the first.
    woken: u32,
    /// How many tokens the cache lacks when the next rest ends.
    rest: Backoff,
    /// The sequence as far as the host knows it.
    text: Vec<u32>,
    /// The tokens of `text` that a draft model reads as a prompt before the next proposal.
    unread: Range<usize>,
    /// How many tokens of `text` were read as a prompt.
    read: usize,
    /// The tokens that were read as a prompt: their keys and values are in the cache. For a head, they include the
    /// second token of the last row.
    cached: Vec<u32>,
}

impl ModelDrafter {
    /// A drafter with the weights and memory of `passes`, which drafts for `model`. All that makes the model's passes
    /// faster has been prepared.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn new(passes: Passes, model: &Forward) -> Result<Self, Error> {
        let (forward, targets, bytes) = match passes {
            Passes::Model(forward) => {
                let bytes = forward.pass_bytes();
                (forward, None, bytes)
            }
            Passes::Head(Head { forward, targets, parameters }) => {
                (forward, Some(targets), head_pass_bytes(parameters, layer_bytes::ONE_ROW))
            }
        };
        let device = forward.device().clone();
        let draft_config = forward.config();
        let most_rest = if targets.is_some() { REST } else { MOST_REST };
        Ok(Self {
            targets,
            sampler: Sampler::new(&device, draft_config)?,
            notes: device.zeroed(MAX_DECODE_ROWS as usize * Note::WORDS)?,
            noted: device.zeroed(Wanted::WORDS)?,
            words: device.zeroed(DraftWords::COUNT)?,
            told: device.mapped(RING as usize)?,
            ngram: NgramOperator::new(&device)?,
            guess: device.zeroed(MAX_DECODE_ROWS as usize)?,
            guess_rows: device.zeroed(1)?,
            vocab: model.config().vocab_size as u32,
            pass: pass_share(model.pass_bytes(), bytes),
            draft: ModelDraft::default(),
            passes: 1,
            proposed: 0,
            heard: 0,
            woken: 0,
            rest: Backoff::new(REST, most_rest),
            text: Vec::new(),
            unread: 0..0,
            read: 0,
            cached: Vec::new(),
            forward,
        })
    }

    /// The cost of a draft's row. Zero if all drafts are to run.
    fn row_cost(&self, at: &Between<'_>) -> Cost {
        self.draft.match_settings().cost(at.forward.draft_cost())
    }

    /// Where the likeliest tokens of the passes are.
    fn likeliest(&self) -> Likeliest {
        Likeliest {
            notes: self.notes.ptr(),
            targets: self.targets.as_ref().map_or(Global::default(), Buffer::ptr),
            target_count: self.targets.as_ref().map_or(0, |targets| targets.len() as u32),
            vocab: self.vocab,
        }
    }

    /// The offset from a row's position to its token's index in the history: 1 for a head, 0 for a model.
    fn shift(&self) -> u32 {
        self.targets.is_some().into()
    }

    /// Whether it drafts from the model's hidden states.
    pub(crate) fn is_head(&self) -> bool {
        self.targets.is_some()
    }

    /// For a head: how many of the first tokens of a new prompt need no more hidden states.
    pub(crate) fn known(&self, prompt: &[u32]) -> usize {
        let same = self.cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        same.saturating_sub(1)
    }

    /// For a head: enqueues passes over the rows of `count` tokens of `prompt`, from index `at` on. The prompt's last
    /// token has no row yet.
    ///
    /// # Safety
    /// When they run, the state's history holds the prompt, and `states` the hidden states of these tokens.
    ///
    /// # Errors
    /// A refused launch.
    pub(crate) unsafe fn read_along(
        &mut self,
        state: SequenceState,
        states: States,
        prompt: &[u32],
        at: usize,
        count: usize,
    ) -> Result<(), Error> {
        let end = (at + count).min(prompt.len() - 1);
        // SAFETY: the caller's word: the history has a token more than there are rows.
        let history = unsafe { state.history.at(1) };
        // A row at position `i` reads the token at index `i + 1`.
        let state = SequenceState { history, ..state };
        for start in (at..end).step_by(MAX_ROWS as usize) {
            let count = (end - start).min(MAX_ROWS as usize);
            let plan = PlanPrompt { rows: self.forward.rows(), state, start: start as u32, count: count as u32 };
            // SAFETY: the caller's word for history and states; the rows have room.
            unsafe {
                self.forward.device().launch::<step::plan_prompt>(1, 0, plan)?;
                let pass = self.pass(count as u32, (start + count) as u32, RowOutput::None);
                self.forward.enqueue_head_pass(Begin::OfModel(states), &pass, RowsOf::OneSequence)?;
            }
        }
        self.cached = prompt[..=end].to_vec();
        Ok(())
    }

    /// A pass over the rows that are planned when it runs: at most `most_rows`, at positions below `end`.
    fn pass(&self, most_rows: u32, end: u32, output: RowOutput) -> Pass {
        Pass { rows: self.forward.rows(), most_rows, end, tiles: None, output }
    }

    /// Enqueues passes over the `unread` tokens, if there are any.
    fn enqueue_unread(&mut self, device: &Device, state: SequenceState) -> Result<(), Error> {
        let unread = std::mem::take(&mut self.unread);
        if unread.is_empty() {
            return Ok(());
        }
        let chunk = self.forward.prefill().map_or(MAX_ROWS as usize, Prefill::capacity);
        let plan = |rows: Rows, at: usize, count: usize| {
            let plan = PlanPrompt { rows, state, start: at as u32, count: count as u32 };
            // SAFETY: the history holds what the host knows, and the rows have room for a chunk.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        for at in unread.clone().step_by(chunk) {
            let count = (unread.end - at).min(chunk);
            if let Some(prefill) = self.forward.prefill() {
                plan(prefill.rows(), at, count)?;
                self.forward.enqueue_prefill(at, count, RowOutput::None)?;
            } else {
                plan(self.forward.rows(), at, count)?;
                self.forward.enqueue(count as u32, (at + count) as u32, RowOutput::None)?;
            }
        }
        self.read = unread.end;
        self.cached.clear();
        self.cached.extend_from_slice(&self.text[..self.read]);
        Ok(())
    }

    /// Enqueues an n-gram match that appends to the drafts in `to`, if the settings have one.
    fn enqueue_match(&self, at: &Between<'_>, to: (&Buffer<i32>, &Buffer<i32>), length: u32) -> Result<(), Error> {
        if self.draft.ngram.is_none() {
            return Ok(());
        }
        let params = self.ngram.params(at, self.draft.match_settings(), to);
        // SAFETY: the history is as `Between` says. The other addresses are of buffers of self and of the proposals.
        unsafe { self.ngram.enqueue(at.device(), length, params) }
    }

    /// Enqueues the kernel that decides whether to draft and plans the rows of the first pass, at most `room`.
    fn enqueue_plan(&self, at: &Between<'_>, room: u32) -> Result<(), Error> {
        let matches = self.draft.ngram.is_some();
        let plan = PlanDraft {
            state: at.state(),
            words: self.words.ptr_mut(),
            rows: self.forward.rows(),
            proposal: at.proposals.proposal(),
            guess: if matches { self.guess.ptr() } else { Global::default() },
            guess_rows: self.guess_rows.ptr_mut(),
            likeliest: self.likeliest(),
            noted: self.noted.ptr_mut(),
            counters: self.forward.counters(),
            max_length: at.accept.max_length,
            read: self.read as u32,
            shift: self.shift(),
            economy: Economy {
                row: self.row_cost(at),
                pass: if self.draft.adaptive { self.pass } else { 0 },
                most: self.passes,
                room,
                due: match self.passes {
                    0 => u32::MAX,
                    _ if self.proposed == self.woken => 1,
                    _ => room - EARLY,
                },
            },
        };
        // SAFETY: the state is as `Between` says. The other addresses are of buffers, sized as the parameter block
        // says.
        unsafe { at.device().launch::<draft_model::plan_draft>(1, 0, plan) }
    }

    /// The number of passes for the next proposal. `told` is the report of the proposal that was made at a text of
    /// `length` tokens.
    fn passes_after(&mut self, told: DraftReport, length: usize) -> u32 {
        if told.wanted > 0 {
            self.rest.reset();
            // One more than was worthwhile, so that chains can grow again.
            return (told.wanted + 1).min(self.draft.depth());
        }
        // The report of the next proposal tells how a trial fared.
        if self.heard == self.woken + 1 && self.woken > 0 {
            if told.agreed > 0 { self.rest.reset() } else { self.rest.lengthen() }
        }
        if self.heard <= self.woken || told.behind < self.rest.length() {
            return 0;
        }
        self.woken = self.proposed + 1;
        let cached = if told.behind < DraftReport::MOST_BEHIND { length - told.behind as usize } else { 0 };
        let unread = cached.max(self.read)..self.text.len();
        if !self.is_head() && unread.len() > (MAX_DECODE_ROWS - EARLY) as usize {
            self.unread = unread;
        }
        1
    }

    /// Enqueues the plan of the next step, whose rows are the best nodes of the proposal.
    fn enqueue_tree(&self, at: &Between<'_>) -> Result<(), Error> {
        let plan = PlanTree {
            rows: at.plan.rows,
            state: at.state(),
            words: self.words.ptr(),
            drafts: at.plan.drafts,
            draft_rows: at.plan.draft_rows,
            likeliest: self.likeliest(),
            counters: at.plan.counters,
            told: self.told.ptr_mut(),
            told_reports: RING,
            cost: self.row_cost(at),
            most: self.draft.tokens,
            branches: self.draft.branches,
            max_length: at.accept.max_length,
        };
        // SAFETY: the plan's addresses are as `Between` says. The others are of buffers of self.
        unsafe { at.device().launch::<tree::plan_tree>(1, 0, plan) }
    }

    /// Enqueues pass `number` of a chain, over at most `most_rows` rows at positions below `end`, and the kernel that
    /// makes the next draft from its last row.
    fn enqueue_pass(&self, at: &Between<'_>, number: u32, most_rows: u32, end: u32) -> Result<(), Error> {
        // SAFETY: the first pass is behind `plan_draft`, every other behind `next_draft`, and both kernels zero the
        // counters. A head's first pass is over rows whose hidden states are there: the head is never so far behind
        // that they are gone.
        unsafe {
            match at.forward.states() {
                Some(states) if self.is_head() => {
                    let begin = if number == 0 { Begin::OfModel(states) } else { Begin::Own };
                    let pass = self.pass(most_rows, end, RowOutput::LogitsFrom(0));
                    self.forward.enqueue_head_pass(begin, &pass, RowsOf::OneSequence)?;
                }
                _ => self.forward.enqueue_decode(most_rows, end)?,
            }
        }
        let note = NoteLogits {
            logits: self.forward.logits().ptr(),
            wanted: self.noted.ptr(),
            sampled: Global::default(),
            // SAFETY: there is a note for each pass.
            notes: unsafe { self.notes.ptr_mut().at(number as usize * Note::WORDS) },
            split: Default::default(),
            vocab: self.forward.config().vocab_size as u32,
            noted: 1,
        };
        let next = NextDraft {
            note,
            state: at.state(),
            words: self.words.ptr_mut(),
            rows: self.forward.rows(),
            likeliest: self.likeliest(),
            noted: self.noted.ptr_mut(),
            proposal: at.proposals.proposal(),
            counters: self.forward.counters(),
            number,
            shift: self.shift(),
        };
        // SAFETY: as for the plan.
        unsafe { self.sampler.enqueue_draft(next) }
    }
}

impl Drafter<OnDevice> for ModelDrafter {
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error> {
        if let Some(Draft::Model(draft)) = sequence.draft {
            self.draft = draft;
        }
        self.passes = self.draft.depth();
        self.noted.write(Wanted::TOP, &[self.draft.branches])?;
        (self.proposed, self.heard, self.woken) = (0, 0, 0);
        self.rest.reset();
        (self.unread, self.read) = (0..0, 0);
        self.text.clear();
        self.text.extend_from_slice(sequence.prompt);
        self.told.clear();
        self.ngram.begin(sequence)?;
        let prompt = sequence.prompt;
        let mut words = DraftWords::after_prompt(prompt.len() as u32);
        words[DraftWords::CACHED] -= self.shift();
        self.words.write(0, &words)?;
        self.guess_rows.write(0, &[1])?;
        if self.is_head() {
            return Ok(());
        }
        let reused = common_prefix(&self.cached, prompt);
        self.cached.truncate(reused);
        // If there is room for only one token after the prompt, drafts are not needed.
        if sequence.max_length > prompt.len() + 1 {
            self.unread = reused..prompt.len();
        }
        Ok(())
    }

    fn propose(&mut self, at: Between<'_>) -> Result<(), Error> {
        self.proposed += 1;
        at.enqueue_accept()?;
        self.enqueue_unread(at.device(), at.state())?;
        self.enqueue_match(&at, (&self.guess, &self.guess_rows), at.length)?;
        // A step brings at most as many tokens as it has rows. So after chains, the cache lacks the tokens of at most
        // two steps. If passes are left out, it lacks those of the steps under way as well: some 70 tokens, for which
        // hidden states have slots.
        let follows = self.draft.adaptive && self.passes <= 1;
        let few = self.draft.tokens < FEW_ROWS && !follows;
        let room = if few { FEW_ROWS } else { MAX_DECODE_ROWS };
        self.enqueue_plan(&at, room)?;
        for number in 0..self.passes {
            let end = (at.length + number).min(at.capacity);
            self.enqueue_pass(&at, number, if number == 0 { room } else { 1 }, end)?;
        }
        let Proposals { tokens, rows, .. } = at.proposals;
        self.enqueue_match(&at, (tokens, rows), at.length + self.passes)?;
        self.enqueue_tree(&at)
    }

    fn hear(&mut self, step: &mut Step) {
        let length = self.text.len();
        self.text.extend_from_slice(&step.tokens);
        // The first report is the prompt's.
        if self.heard > 0 {
            let told = DraftReport::from_word(self.told.load((self.heard % RING) as usize));
            // Tokens after the chain were not proposed by the model.
            let accepted = (step.tokens.len() - 1).min(told.chained as usize);
            step.by_model = Drafted { drafted: told.by_model as usize, accepted };
            if self.draft.adaptive {
                self.passes = self.passes_after(told, length);
            }
        }
        self.heard += 1;
    }
}
