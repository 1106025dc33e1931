//! The interface to what executes the scheduler's plans.

use std::cmp::Reverse;
use std::time::Duration;

use gpu_kernels::sample;
use model::{Fault, Form, Sampling};

use super::limits::{Costs, Limits};
use super::plan::{Plan, Slot};
use crate::Error;
use crate::backend::Drafted;

/// What a backend needs to know about a sequence that gets a slot.
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    /// The prompt, and what was generated before a preemption.
    pub tokens: &'a [u32],
    /// How many of these tokens are the prompt. Penalties treat the two kinds differently.
    pub prompt: usize,
    /// Most tokens of prompt and answer together.
    pub max_length: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the sequence. Drafts after one are not confirmed.
    pub stop_tokens: &'a [u32],
    /// How many of the likeliest tokens are wanted with log-probabilities, beside the chosen one. None: no
    /// log-probabilities.
    pub logprobs: Option<u32>,
    /// The form that the answer must have, if any.
    pub form: Option<&'a Form>,
}

/// The result of a step for one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The slot of the sequence.
    pub slot: Slot,
    /// The next tokens: one, and one more for each right draft. They end at `max_length` or with a stop token.
    pub tokens: Vec<u32>,
    /// The log-probabilities for each of these tokens, if they were asked for.
    pub logprobs: Vec<Logprobs>,
    /// Drafts that were tried.
    pub drafted: usize,
    /// The share of a model or head in these drafts.
    pub by_model: Drafted,
    /// If a number was NaN or infinite in a row that mattered: where. The tokens then mean nothing, and the sequence
    /// has failed.
    pub fault: Option<Fault>,
    /// If the form cannot be followed any further: why. The sequence has then failed as well.
    pub lost: Option<String>,
}

/// Natural log-probabilities of the chosen token and of the likeliest tokens at its position. They come from the
/// model's logits before penalties and temperature.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    /// That of the chosen token.
    pub chosen: f32,
    /// The likeliest tokens with theirs, in falling order.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Computes them for `token` and the `count` likeliest tokens from a row of logits, `[vocab]`. Among equals, the
    /// lower id comes first.
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

    /// Computes them from the logits of the chosen and the likeliest tokens. `max` is the largest logit of the row, and
    /// `total` the sum of all masses.
    pub(super) fn new(max: f32, total: u64, chosen: f32, top: impl Iterator<Item = (u32, f32)>) -> Self {
        let all = (total as f64 / sample::UNIT_MASS as f64).ln();
        let log = |logit: f32| (f64::from(logit - max) - all) as f32;
        Self { chosen: log(chosen), top: top.map(|(token, logit)| (token, log(logit))).collect() }
    }
}

/// Runs batches of sequences, a step at a time.
///
/// The tokens of a sequence depend only on the sequence and its form. They do not depend on the other sequences in a
/// batch, on how rows are scheduled over steps, on where pages are, or on whether pages were away in the host tier.
///
/// In a step with drafts, the sequences share [`Plan::draft_threshold`] as they share the n-gram operator's threshold,
/// and [`Work::most_drafts`](super::plan::Work) bounds each sequence's drafts.
pub trait BatchBackend: Send {
    /// The name of the device, for a person to read.
    fn device(&self) -> String;

    /// The limits within which plans must stay.
    fn limits(&self) -> Limits;

    /// Number of host-tier pages that can be used so far. If they `are_wanted`, there may be more later, never fewer.
    fn host_pages(&mut self, _are_wanted: bool) -> u32 {
        self.limits().host_pages
    }

    /// The measured costs of resuming a preempted sequence. By default they count as nothing.
    fn costs(&self) -> Costs {
        Costs::default()
    }

    /// How long the device has had nothing to do between steps in all, while the host worked or no requests were there.
    fn idle(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether the step after a [foreseen](super::Scheduler::foresee) step may begin before that has ended.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Whether drafts of the next step are likely to be worth their rows. If so, it is better to wait for the tokens
    /// that they would follow.
    fn may_draft(&self) -> bool {
        false
    }

    /// Begins to execute a plan. `starts` has an entry for each of `plan.started`. One other step may be under way, if
    /// it was foreseen. A row whose token that step still has to choose is at the position after the last known token.
    ///
    /// # Errors
    /// A device error. The backend cannot be used afterwards.
    ///
    /// # Panics
    /// If two steps are under way, or the plan names slots, pages, positions or tokens that do not exist: a bug of the
    /// caller.
    fn begin(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<(), Error>;

    /// Slots for which the last begun step will not choose tokens after all, because their masks were not ready in
    /// time. Each slot is returned once. Call this after [`begin`](Self::begin), and again after the [`end`](Self::end)
    /// of the step before, and pass the result to [`Scheduler::put_off`](super::Scheduler).
    fn put_off(&mut self) -> Vec<Slot> {
        Vec::new()
    }

    /// Replaces the tokens of the sequence in a slot from position `at` on by `tokens`. The rows from there on must
    /// then run again.
    ///
    /// # Panics
    /// If a step is under way, or the sequence has fewer than `at` tokens: a bug of the caller.
    fn rewrite(&mut self, slot: Slot, at: usize, tokens: &[u32]);

    /// Waits for the oldest step under way. Returns the outcome of each [`Work`](super::plan::Work) that samples and
    /// was not [put off](Self::put_off), in order. This includes sequences that have left their slot since.
    ///
    /// # Errors
    /// A device error. The backend cannot be used afterwards.
    ///
    /// # Panics
    /// If no step is under way: a bug of the caller.
    fn end(&mut self) -> Result<Vec<Outcome>, Error>;

    /// Executes a plan to its end: [`begin`](Self::begin), then [`end`](Self::end).
    ///
    /// # Errors
    /// A device error. The backend cannot be used afterwards.
    fn step(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<Vec<Outcome>, Error> {
        self.begin(plan, starts)?;
        self.end()
    }
}

/// The mean time that things of a kind take, in seconds, as measured so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    seconds: f64,
    count: f64,
}

impl Rate {
    /// Starts with a guess, which counts as one measurement.
    pub fn guess(seconds: f64) -> Self {
        Self { seconds, count: 1.0 }
    }

    /// Adds a measurement: `count` of them took `seconds`.
    pub fn add(&mut self, seconds: f64, count: usize) {
        if count > 0 {
            self.seconds += seconds;
            self.count += count as f64;
        }
    }

    /// Seconds for one of them.
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
