//! The loop of a batch. A backend executes the scheduler's plans; each step is planned and begun while the one before
//! runs.

use std::time::Instant;

use super::backend::{BatchBackend, Outcome, Start};
use super::plan::{Plan, SequenceId};
use super::scheduler::{Advance, Scheduler};
use crate::Error;

/// Knows the requests behind the sequences.
pub trait Sequences {
    /// What a backend needs to know about sequence `id`, which gets a slot and has these tokens so far.
    fn start<'a>(&'a self, id: SequenceId, tokens: &'a [u32]) -> Start<'a>;

    /// Called with each plan before it is begun.
    fn planned(&mut self, _plan: &Plan) {}
}

/// A scheduler, with the step that is under way.
pub struct Steps {
    scheduler: Scheduler,
    /// A step that was begun and has not ended.
    under_way: Option<Begun>,
    /// When the last step ended.
    ended: Instant,
}

/// A step that was begun.
struct Begun {
    /// The sequences whose outcomes it will bring, in order.
    sequences: Vec<SequenceId>,
    /// How many rows it has, if its time is to be noted: the rows are of generating sequences alone, and the step
    /// before had not ended when this one was begun. So it takes from that end to its own.
    rows: Option<u32>,
}

impl Steps {
    /// Makes a scheduler with the limits and costs of `backend`.
    pub fn new(backend: &dyn BatchBackend) -> Self {
        Self { scheduler: Scheduler::new(backend.limits(), backend.costs()), under_way: None, ended: Instant::now() }
    }

    /// As [`Scheduler::expect_more`].
    pub fn expect_more(&mut self, more: bool) {
        self.scheduler.expect_more(more);
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Adds a sequence, as [`Scheduler::add`].
    pub fn add(&mut self, prompt: Vec<u32>, max_length: usize) -> SequenceId {
        self.scheduler.add(prompt, max_length)
    }

    /// Ends a sequence that has failed, as [`Scheduler::fail`].
    pub fn fail(&mut self, id: SequenceId) {
        self.scheduler.fail(id);
    }

    /// Ends a sequence, as [`Scheduler::finish`]. Must be called for each sequence that a step has brought to its end.
    pub fn finish(&mut self, id: SequenceId) {
        self.scheduler.finish(id);
    }

    /// Whether no sequence runs or waits and no step is under way.
    pub fn is_idle(&self) -> bool {
        self.has_nothing() && self.under_way.is_none()
    }

    fn has_nothing(&self) -> bool {
        self.scheduler.running() + self.scheduler.waiting() == 0
    }

    /// Runs a step and returns the outcomes with their sequences. If the backend can, the next step is planned and
    /// begun before this one has ended, from what is foreseen of it. So the device does not wait for the host. A
    /// sequence that turns out to have ended has then run one row in vain, whose outcome the next call returns.
    ///
    /// # Errors
    /// A device error. The backend and this loop cannot be used afterwards.
    pub fn step(
        &mut self,
        backend: &mut dyn BatchBackend,
        sequences: &mut dyn Sequences,
    ) -> Result<Vec<(SequenceId, Outcome)>, Error> {
        let begun = match self.under_way.take() {
            Some(begun) => begun,
            None => self.begin(backend, sequences, false)?,
        };
        self.scheduler.set_drafting(backend.may_draft());
        if backend.runs_ahead() && self.scheduler.foresee() && !self.has_nothing() {
            self.under_way = Some(self.begin(backend, sequences, true)?);
        }
        let outcomes = backend.end()?;
        let before = std::mem::replace(&mut self.ended, Instant::now());
        if let Some(rows) = begun.rows {
            self.scheduler.took(rows, (self.ended - before).as_secs_f64());
        }
        let advance = |o: &Outcome| Advance { slot: o.slot, tokens: o.tokens.clone() };
        self.scheduler.advance(&outcomes.iter().map(advance).collect::<Vec<_>>());
        if let Some(mut next) = self.under_way.take() {
            next.sequences = self.sampling(backend);
            self.under_way = Some(next);
        }
        Ok(begun.sequences.into_iter().zip(outcomes).collect())
    }

    /// Plans a step and begins it. `follows` says whether the step before is still under way.
    fn begin(
        &mut self,
        backend: &mut dyn BatchBackend,
        sequences: &mut dyn Sequences,
        follows: bool,
    ) -> Result<Begun, Error> {
        self.scheduler.set_costs(backend.costs());
        self.scheduler.set_host_pages(backend.host_pages(self.scheduler.may_want_host_pages()));
        self.scheduler.set_drafting(backend.may_draft());
        let plan = self.scheduler.plan();
        sequences.planned(&plan);
        let start = |id| sequences.start(id, self.scheduler.tokens(id).expect("who starts has not ended"));
        let starts: Vec<Start<'_>> = plan.started.iter().map(|started| start(started.sequence)).collect();
        backend.begin(&plan, &starts)?;
        let rows = (follows && plan.only_generates()).then_some(plan.work.len() as u32);
        Ok(Begun { sequences: self.sampling(backend), rows })
    }

    /// The sequences whose outcomes the last begun step will bring, in order, without those that the backend puts off.
    fn sampling(&mut self, backend: &mut dyn BatchBackend) -> Vec<SequenceId> {
        self.scheduler.put_off(&backend.put_off());
        self.scheduler.sampling().collect()
    }
}
