//! A sequence whose answer has a form, on the GPU backend.
//!
//! The host makes the sequence's masks, so its steps cannot be enqueued before the tokens ahead of them are known. But
//! only the choice needs a mask. So the pass itself is enqueued ahead. While it runs, the host takes the newest token
//! out of the ring, moves the matcher on, and enqueues the choice behind the pass. With drafts, the pass too waits for
//! the newest token: the host proposes what the form forces, or what an n-gram match finds and the form allows.

use gpu_kernels::drafting;
use gpu_kernels::step::{self, Accept, PlanDecode};
use model::Matcher;

use super::Gpu;
use crate::Error;
use crate::backend::Step;
use crate::cpu::followed;
use crate::draft::{DraftTokens, learned};

/// A sequence's progress through its form.
pub(super) struct Following {
    matcher: Matcher,
    history: Vec<u32>,
    /// The estimated acceptance of proposals from the text, from how recent ones fared.
    acceptance: u32,
    proposed: Vec<u32>,
    /// Whether the form forces the `proposed` tokens.
    forced: bool,
    /// How many of the `proposed` tokens run in the step that is under way.
    drafts: usize,
    /// Whether the next step is still to be enqueued.
    is_behind: bool,
}

impl Following {
    /// A sequence at the beginning of its form.
    pub fn new(matcher: Matcher, prompt: &[u32]) -> Self {
        Self {
            matcher,
            history: prompt.to_vec(),
            acceptance: drafting::UNTRIED,
            proposed: Vec::new(),
            forced: false,
            drafts: 0,
            is_behind: false,
        }
    }
}

impl Gpu {
    /// Whether passes are enqueued before the host knows the newest token.
    fn passes_ahead(&self) -> bool {
        self.run.draft.is_none() && self.run_ahead > 0
    }

    /// Makes the masks of the rows from `first_row` on, and enqueues their application to the logits, which a pass that
    /// is enqueued already computes. Does nothing without a form.
    pub(super) fn enqueue_masks(&mut self, first_row: u32) -> Result<(), Error> {
        let Some(form) = &mut self.run.form else { return Ok(()) };
        let drafts = &form.proposed[..form.drafts];
        let vocab = self.forward.config().vocab_size;
        let matcher = &mut form.matcher;
        let fill = |entries: Vec<crate::masks::Entry<'_>>| {
            let rows = entries.into_iter().zip(first_row..).map(|(entry, row)| entry.of_row(row, vocab));
            matcher.masks_along(drafts, rows);
        };
        // SAFETY: there are logits of all rows of a step.
        unsafe { self.masks.enqueue(self.forward.logits().ptr_mut(), 1 + drafts.len(), fill) }
    }

    /// Enqueues what follows a choice under a form: its acceptance, and the next pass if passes go ahead.
    pub(super) fn enqueue_behind(&mut self, accept: Accept, length: usize) -> Result<(), Error> {
        // SAFETY: buffers of self, sized as the parameter block says.
        unsafe { self.forward.device().launch::<step::accept>(1, 0, accept)? };
        if self.passes_ahead() { self.enqueue_form_pass(0, length) } else { Ok(()) }
    }

    /// Enqueues the plan and the pass of a step with so many `drafts`. The history then has at most `length` tokens.
    fn enqueue_form_pass(&self, drafts: usize, length: usize) -> Result<(), Error> {
        let plan = PlanDecode {
            rows: self.forward.rows(),
            state: self.state(),
            drafts: self.form_drafts.ptr(),
            draft_rows: if drafts > 0 { self.form_drafts.ptr() } else { Default::default() },
            cost: drafting::Cost::default(),
            counters: self.forward.counters(),
        };
        // SAFETY: buffers of self, sized as the parameter block says; proposals stay as they are until the step has
        // reported.
        unsafe { self.forward.device().launch::<step::plan_decode>(1, 0, plan)? };
        let end = (length + drafts).min(self.forward.capacity());
        // SAFETY: the plan zeroes the counters.
        unsafe { self.forward.enqueue_decode(1 + drafts as u32, end as u32) }
    }

    /// Proposes drafts for the next step. Returns how many are worth running.
    fn propose(&mut self) -> Result<usize, Error> {
        let Some((form, draft)) = self.run.form.as_mut().zip(self.run.draft) else { return Ok(0) };
        let proposal = DraftTokens::of(draft, &form.history, self.run.max_length, Some(&mut form.matcher));
        (form.proposed, form.forced) = (proposal.tokens, proposal.forced);
        let acceptance = if form.forced { drafting::ONE } else { form.acceptance };
        let cost = draft.match_settings().cost(self.forward.draft_cost());
        form.drafts = drafting::worthwhile(acceptance, cost, 0, form.proposed.len() as u32) as usize;
        // SAFETY: the step that read the ones before has reported.
        let words = unsafe { self.form_drafts.as_mut_slice_now() };
        words[0] = 1 + form.drafts as i32;
        words[1..].iter_mut().zip(&form.proposed[..form.drafts]).for_each(|(word, token)| *word = *token as i32);
        Ok(form.drafts)
    }

    /// Takes in what a step has brought, and enqueues what comes next.
    pub(super) fn follow(&mut self, step: &Step) -> Result<(), Error> {
        let Some(form) = &mut self.run.form else { return Ok(()) };
        form.matcher.accept(&step.tokens);
        followed(&form.matcher)?;
        form.history.extend(&step.tokens);
        if !form.forced {
            form.acceptance = learned(form.acceptance, &form.proposed, &step.tokens);
        }
        form.proposed.clear();
        form.drafts = 0;
        form.is_behind = !step.finished;
        // If the host waits for each step, the next one is enqueued only when it is asked for.
        if self.run_ahead > 0 { self.catch_up() } else { Ok(()) }
    }

    /// Enqueues what is missing of the next step under a form.
    pub(super) fn catch_up(&mut self) -> Result<(), Error> {
        let length = self.run.length;
        match &mut self.run.form {
            Some(form) if form.is_behind => form.is_behind = false,
            _ => return Ok(()),
        }
        let drafts = self.propose()?;
        if !self.passes_ahead() {
            self.enqueue_form_pass(drafts, length)?;
        }
        self.enqueue_choice(1 + drafts as u32, 0, true, length)
    }
}
