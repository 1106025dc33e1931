//! What executes the scheduler's plans.

use std::cmp::Reverse;
use std::time::Duration;

use gpu_kernels::sample;
use model::{Fault, Form, Sampling};

use super::limits::{Costs, Limits};
use super::plan::{Plan, Slot};
use crate::Error;
use crate::backend::Drafted;

/// What a backend needs to know of a sequence that takes a slot.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// Prompt and what was generated before a preemption.
    pub tokens: &'a [u32],
    /// How many of them are the prompt: penalties tell them apart.
    pub prompt: usize,
    /// Most tokens of prompt and answer together.
    pub max_length: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the sequence; drafts behind one are not confirmed.
    pub stop_tokens: &'a [u32],
    /// Log-probabilities of each chosen token and of so many likeliest ones; none: none.
    pub logprobs: Option<u32>,
    /// What the answer has to look like, if that is said.
    pub form: Option<&'a Form>,
}

/// What a sequence's rows brought.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Whose.
    pub slot: Slot,
    /// The next tokens: one, and one more for each draft that was right. They end at `max_length` and with a stop
    /// token.
    pub tokens: Vec<u32>,
    /// For each of them, if they were asked for.
    pub logprobs: Vec<Logprobs>,
    /// Drafts that were tried.
    pub drafted: usize,
    /// Those of them that a model has proposed.
    pub by_model: Drafted,
    /// What was NaN or infinite in the rows that decided; then the tokens mean nothing, and the sequence has failed.
    pub fault: Option<Fault>,
    /// Why its form cannot be followed any further; then likewise.
    pub lost: Option<String>,
}

/// Log-probabilities (natural) of a token and of the likeliest ones in its place, by the model's logits before
/// penalties and temperature.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// Of the token that was chosen.
    pub chosen: f32,
    /// The likeliest, in falling order.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// For `token`, by a row of logits, `[vocab]`, with the `count` likeliest; of equal ones the lower id comes first.
    pub fn of(logits: &[f32], token: u32, count: u32) -> Self {
        let mut ranks: Vec<u64> = logits.iter().zip(0..).map(|(&logit, token)| sample::rank(logit, token)).collect();
        let max = sample::ranked_logit(ranks.iter().copied().max().unwrap_or(0));
        let total = logits.iter().map(|&logit| sample::mass(logit, max)).sum();
        let count = (count as usize).min(ranks.len());
        if count < ranks.len() {
            ranks.select_nth_unstable_by_key(count, |&rank| Reverse(rank));
            ranks.truncate(count);
        }
        ranks.sort_unstable_by_key(|&rank| Reverse(rank));
        let top = ranks.into_iter().map(|rank| (sample::ranked_token(rank), sample::ranked_logit(rank)));
        Self::new(max, total, logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY), top)
    }

    /// Of the logit of the chosen token and those of the likeliest, where `max` is the largest and `total` the sum of
    /// all masses.
    pub(super) fn new(max: f32, total: u64, chosen: f32, top: impl Iterator<Item = (u32, f32)>) -> Self {
        let all = (total as f64 / sample::UNIT_MASS as f64).ln();
        let log = |logit: f32| (f64::from(logit - max) - all) as f32;
        Self { chosen: log(chosen), top: top.map(|(token, logit)| (token, log(logit))).collect() }
    }
}

/// Runs batches of sequences, a step at a time.
///
/// A sequence's tokens depend on itself alone, and on its form: not on its company, nor on how its rows were scheduled
/// over steps, nor on where its pages are, nor on whether they were away.
///
/// A step with drafts shares [`Plan::draft_threshold`] among its sequences as the n-gram operator shares its threshold,
/// with [`Work::most_drafts`](super::plan::Work) as each sequence's bound.
pub trait BatchBackend: Send {
    /// What it runs on, for a person.
    fn device(&self) -> String;

    /// What it has room for.
    fn limits(&self) -> Limits;

    /// Pages of the host tier that are there by now. Where they `are_wanted`, they may become more later, never fewer.
    fn host_pages(&mut self, _are_wanted: bool) -> u32 {
        self.limits().host_pages
    }

    /// What it was measured to cost to take up a preempted sequence.
    fn costs(&self) -> Costs;

    /// How long a device had nothing to do between steps: for the host's part in them, and for requests to come.
    fn idle(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether a [foreseen](super::Scheduler::foresee) step's successor may begin before it has ended.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Whether drafts of the next step are likely to be worth their rows, so that tokens which they would follow had
    /// better be waited for.
    fn may_draft(&self) -> bool {
        false
    }

    /// Begins to execute a plan. `starts` has an entry for each of `plan.started`. At most one step may be under way,
    /// which was foreseen: a row whose token that one chooses is at the position after the last known one.
    ///
    /// # Errors
    /// A device error, after which the backend is of no more use.
    ///
    /// # Panics
    /// If two steps are under way, or the plan names slots, pages, positions or tokens that there are not: a bug of the
    /// caller.
    fn begin(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<(), Error>;

    /// Slots whose tokens the step that was begun last does not choose after all, since what their forms allow was not
    /// known in time: each is said once. To be asked for, and told to [`Scheduler::put_off`](super::Scheduler), behind
    /// [`begin`](Self::begin), and behind the [`end`](Self::end) of the step before.
    fn put_off(&mut self) -> Vec<Slot> {
        Vec::new()
    }

    /// From position `at` on, what the sequence in a slot says is `tokens` instead of what was chosen. Its rows from
    /// there on are to run again.
    ///
    /// # Panics
    /// If a step is under way, or the sequence has less than so many tokens: a bug of the caller.
    fn rewrite(&mut self, slot: Slot, at: usize, tokens: &[u32]);

    /// Waits for the step that was begun first. Returns the outcome of each work that samples and was not
    /// [put off](Self::put_off), in order, also of a sequence that has left its slot.
    ///
    /// # Errors
    /// A device error, after which the backend is of no more use.
    ///
    /// # Panics
    /// If no step is under way: a bug of the caller.
    fn end(&mut self) -> Result<Vec<Outcome>, Error>;

    /// Executes a plan: [`begin`](Self::begin) and [`end`](Self::end).
    ///
    /// # Errors
    /// A device error, after which the backend is of no more use.
    fn step(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<Vec<Outcome>, Error> {
        self.begin(plan, starts)?;
        self.end()
    }
}

/// Seconds for each of many like things, as far as they were measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    seconds: f64,
    count: f64,
}

impl Rate {
    /// What one is expected to take.
    pub fn guess(seconds: f64) -> Self {
        Self { seconds, count: 1.0 }
    }

    /// Takes in that `count` took so long.
    pub fn add(&mut self, seconds: f64, count: usize) {
        if count > 0 {
            self.seconds += seconds;
            self.count += count as f64;
        }
    }

    /// Seconds for one.
    pub fn each(&self) -> f64 {
        self.seconds / self.count
    }
}

#[cfg(test)]
mod tests {
    use super::Logprobs;

    #[test]
    fn log_probabilities_are_those_of_softmax() {
        let logits = [1.0, 3.0, 2.0, 3.0];
        let sum: f64 = logits.iter().map(|&l: &f32| f64::from(l).exp()).sum();
        let exact = |l: f32| (f64::from(l).exp() / sum).ln() as f32;
        let found = Logprobs::of(&logits, 0, 3);
        let close = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert!(close(found.chosen, exact(1.0)));
        assert_eq!(found.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 3, 2]);
        assert!(found.top.iter().all(|&(id, l)| close(l, exact(logits[id as usize]))));
        assert_eq!(Logprobs::of(&logits, 1, 9).top.len(), 4);
        assert!(Logprobs::of(&logits, 1, 0).top.is_empty());
    }
}
