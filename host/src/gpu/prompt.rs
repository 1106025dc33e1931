//! How a sequence is begun, and its prompt read: in passes of many rows or in chunks of few, with a head that drafts
//! reading along.

use gpu_kernels::drafting;
use gpu_kernels::sample::PROMPTED;
use gpu_kernels::step::{self, MAX_ROWS, PlanPrompt, Rows, STATE_WORDS, SequenceState};

use super::{Gpu, Run, TOLD_AFTER, form};
use crate::Error;
use crate::backend::{PromptProgress, Sequence, common_prefix};
use crate::draft::Draft;
use crate::forward::RowOutput;
use crate::prefill::Prefill;

impl Gpu {
    /// Begins a sequence that was checked.
    pub(super) fn begin_checked(
        &mut self,
        sequence: &Sequence<'_>,
        progress: &mut PromptProgress<'_>,
    ) -> Result<usize, Error> {
        let stops = sequence.stop_tokens;
        self.forward.device().synchronize()?;
        let prompt = sequence.prompt;
        let mut reused = common_prefix(&self.cached, prompt);
        if self.forward.prefill().is_some() {
            // A prompt's passes and decode steps leave different bits in the cache. Tokens that were generated are part
            // of a prompt here, so they are read again as such.
            reused = reused.min(self.prompted);
        }
        // Under a form only the host drafts.
        let by_model = match sequence.draft {
            Some(Draft::Model(draft)) if sequence.form.is_none() && self.script.is_none() => Some(draft),
            _ => None,
        };
        let head = self.model.as_ref().filter(|model| model.is_head() && by_model.is_some());
        self.forward.want_states(head.is_some());
        self.forward.want_tree(by_model.is_some_and(|draft| draft.branches > 1));
        if let Some(head) = head {
            // A head lacks the hidden states of tokens that were read without it.
            reused = reused.min(head.known(prompt));
        }
        self.cached.truncate(reused);
        let tokens: Vec<i32> = prompt.iter().map(|&t| t as i32).collect();
        self.history.write(0, &tokens)?;
        let mut words = [0; STATE_WORDS];
        words[SequenceState::LENGTH] = prompt.len() as u32;
        words[SequenceState::ACCEPTANCE] = drafting::UNTRIED;
        self.words.write(0, &words)?;
        let mut uses = vec![0; self.uses.len()];
        for &token in prompt {
            uses[token as usize] = PROMPTED;
        }
        self.uses.write(0, &uses)?;
        self.stop_tokens.write(0, stops)?;
        self.ring.clear();
        self.run = Run {
            sampling: sequence.sampling,
            draft: sequence.draft,
            max_length: sequence.max_length,
            stop_count: stops.len() as u32,
            length: prompt.len(),
            step_rows: 1 + sequence.draft.map_or(0, |draft| draft.tokens()),
            enqueued: 0,
            read: 0,
            newest: None,
            form: sequence.form.map(|form| form::Following::new(form.matcher(), prompt)),
        };
        if let Some(drafter) = self.drafter() {
            drafter.begin(sequence)?;
        }
        self.enqueue_prompt(reused, prompt, progress)?;
        Ok(reused)
    }

    /// Enqueues the prompt from `start` on, in chunks, with the choice of the token after it. Before the last chunk,
    /// the host waits for the device now and then and tells `progress` what is done.
    pub(super) fn enqueue_prompt(
        &mut self,
        start: usize,
        prompt: &[u32],
        progress: &mut PromptProgress<'_>,
    ) -> Result<(), Error> {
        let prompt_len = prompt.len();
        let mut told = start;
        let chunk = self.forward.prefill().map_or(MAX_ROWS as usize, Prefill::capacity);
        let mut at = start;
        while at < prompt_len {
            let count = (prompt_len - at).min(chunk);
            let last = at + count == prompt_len;
            let output = match last {
                // A head that reads the last layer's hidden states needs those of all rows.
                _ if self.forward.wants_last_layer() => RowOutput::LogitsFrom(0),
                true => RowOutput::LogitsFrom(count as u32 - 1),
                false => RowOutput::None,
            };
            if self.forward.prefill().is_some() {
                self.enqueue_prefill(at, count, output)?;
                self.read_along(prompt, at, count)?;
                if last {
                    self.enqueue_head(at, count - 1, 1)?;
                    self.enqueue_choice(1, 0, false, prompt_len)?;
                }
            } else {
                self.enqueue_chunk(at, count, output)?;
                self.read_along(prompt, at, count)?;
                if last {
                    self.enqueue_choice(count as u32, count as u32 - 1, false, prompt_len)?;
                }
            }
            at += count;
            self.cached.extend_from_slice(&prompt[self.cached.len()..at]);
            self.prompted = at;
            if !last && at - told >= TOLD_AFTER {
                told = at;
                self.forward.device().synchronize()?;
                if progress(at - start, prompt_len - start).is_break() {
                    return Err(Error::Interrupted);
                }
            }
        }
        Ok(())
    }

    /// If a head drafts, enqueues its passes over the hidden states that the pass over these tokens leaves.
    fn read_along(&mut self, prompt: &[u32], at: usize, count: usize) -> Result<(), Error> {
        let state = self.state();
        match (&mut self.model, self.forward.states()) {
            // SAFETY: the history holds the prompt since it was begun; the pass before this leaves the states.
            (Some(head), Some(states)) => unsafe { head.read_along(state, states, prompt, at, count) },
            _ => Ok(()),
        }
    }

    /// Enqueues the plan of a pass whose `rows` are `count` tokens of the history from `at` on. There is room for
    /// `most` rows.
    fn plan(&self, (rows, most): (Rows, usize), at: usize, count: usize) -> Result<(), Error> {
        assert!(count <= most && at + count <= self.history.len(), "{count} rows from {at} on, of {most}");
        let plan = PlanPrompt { rows, state: self.state(), start: at as u32, count: count as u32 };
        // SAFETY: the history has so many tokens, and the rows room for them.
        unsafe { self.forward.device().launch::<step::plan_prompt>(1, 0, plan) }
    }

    /// Enqueues a pass over at most [`MAX_ROWS`] tokens of the history.
    pub(super) fn enqueue_chunk(&self, at: usize, count: usize, output: RowOutput) -> Result<(), Error> {
        self.plan((self.forward.rows(), MAX_ROWS as usize), at, count)?;
        self.forward.enqueue(count as u32, (at + count) as u32, output)
    }

    /// Enqueues a pass over up to [`Prefill::capacity`] tokens of the history.
    pub(super) fn enqueue_prefill(&mut self, at: usize, count: usize, output: RowOutput) -> Result<(), Error> {
        if let Some(prefill) = self.forward.prefill() {
            self.plan((prefill.rows(), prefill.capacity()), at, count)?;
        }
        self.forward.enqueue_prefill(at, count, output)
    }

    /// Enqueues the logits of at most [`MAX_ROWS`] rows of the prefill that began at position `at`, from its row
    /// `first` on.
    pub(super) fn enqueue_head(&self, at: usize, first: usize, count: usize) -> Result<(), Error> {
        self.plan((self.forward.rows(), MAX_ROWS as usize), at + first, count)?;
        self.forward.enqueue_head(first, count as u32)
    }
}
