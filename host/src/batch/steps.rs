//! The loop of a batch: the scheduler's plans, executed by a backend, each begun while the one before it is under way.

use super::backend::{BatchBackend, Outcome, Start};
use super::plan::{Plan, SequenceId};
use super::scheduler::{Advance, Scheduler};
use crate::Error;

/// Who knows the sequences that run.
pub trait Sequences {
    /// What a backend needs to know of a sequence that takes a slot with these tokens.
    fn start<'a>(&'a self, id: SequenceId, tokens: &'a [u32]) -> Start<'a>;

    /// Is told each plan before it is begun.
    fn planned(&mut self, _plan: &Plan) {}
}

/// A scheduler with the step that is under way.
pub struct Steps {
    scheduler: Scheduler,
    /// Of a step that was begun and has not ended: whose outcomes it brings, in order.
    under_way: Option<Vec<SequenceId>>,
}

impl Steps {
    /// For `backend`.
    pub fn new(backend: &dyn BatchBackend) -> Self {
        Self { scheduler: Scheduler::new(backend.limits(), backend.costs()), under_way: None }
    }

    /// What is known of the sequences.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// As [`Scheduler::add`].
    pub fn add(&mut self, prompt: Vec<u32>, max_length: usize) -> SequenceId {
        self.scheduler.add(prompt, max_length)
    }

    /// As [`Scheduler::finish`]: a sequence that a step has brought to its end must be.
    pub fn finish(&mut self, id: SequenceId) {
        self.scheduler.finish(id);
    }

    /// Whether nothing runs, waits or is under way.
    pub fn is_idle(&self) -> bool {
        self.has_nothing() && self.under_way.is_none()
    }

    fn has_nothing(&self) -> bool {
        self.scheduler.running() + self.scheduler.waiting() == 0
    }

    /// A step: what it brought, and to whom. Where the backend can, the next one is planned and begun meanwhile, for
    /// what can be foreseen of this one: then the device does not wait for the host, and who ends a sequence early has
    /// run a row for nothing, whose outcome the next call brings.
    ///
    /// # Errors
    /// A device error, after which backend and steps are of no more use.
    pub fn step(
        &mut self,
        backend: &mut dyn BatchBackend,
        sequences: &mut dyn Sequences,
    ) -> Result<Vec<(SequenceId, Outcome)>, Error> {
        let ids = match self.under_way.take() {
            Some(ids) => ids,
            None => self.begin(backend, sequences)?,
        };
        self.scheduler.set_drafting(backend.may_draft());
        if backend.runs_ahead() && self.scheduler.foresee() && !self.has_nothing() {
            self.under_way = Some(self.begin(backend, sequences)?);
        }
        let outcomes = backend.end()?;
        let advance = |o: &Outcome| Advance { slot: o.slot, tokens: o.tokens.clone() };
        self.scheduler.advance(&outcomes.iter().map(advance).collect::<Vec<_>>());
        if self.under_way.is_some() {
            self.under_way = Some(self.sampling(backend));
        }
        Ok(ids.into_iter().zip(outcomes).collect())
    }

    /// Plans a step and begins it. Whose outcomes it brings, in order.
    fn begin(
        &mut self,
        backend: &mut dyn BatchBackend,
        sequences: &mut dyn Sequences,
    ) -> Result<Vec<SequenceId>, Error> {
        self.scheduler.set_costs(backend.costs());
        self.scheduler.set_host_pages(backend.host_pages(self.scheduler.may_want_host_pages()));
        self.scheduler.set_drafting(backend.may_draft());
        let plan = self.scheduler.plan();
        sequences.planned(&plan);
        let start = |id| sequences.start(id, self.scheduler.tokens(id).expect("who starts has not ended"));
        let starts: Vec<Start<'_>> = plan.started.iter().map(|started| start(started.sequence)).collect();
        backend.begin(&plan, &starts)?;
        Ok(self.sampling(backend))
    }

    /// Whose outcomes the step that was begun last brings, in order.
    fn sampling(&mut self, backend: &mut dyn BatchBackend) -> Vec<SequenceId> {
        self.scheduler.put_off(&backend.put_off());
        self.scheduler.sampling().collect()
    }
}
