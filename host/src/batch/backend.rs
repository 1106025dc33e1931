//! What executes the scheduler's plans.

use model::Sampling;

use super::plan::{Plan, Slot};
use super::scheduler::{Costs, Limits};
use crate::Error;

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
}

/// What a sequence's rows brought.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Whose.
    pub slot: Slot,
    /// The next tokens: one, and one more for each draft that was right. They end at `max_length` and with a stop token.
    pub tokens: Vec<u32>,
    /// For each of them, if they were asked for.
    pub logprobs: Vec<Logprobs>,
    /// Drafts that were tried.
    pub drafted: usize,
}

/// Log-probabilities (natural) of a token and of the likeliest ones in its place, by the model's logits before penalties and temperature.
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
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
        let log = |logit: f32| (f64::from(logit - max) - sum.ln()) as f32;
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let count = (count as usize).min(ids.len());
        let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        if count < ids.len() {
            ids.select_nth_unstable_by(count, order);
            ids.truncate(count);
        }
        ids.sort_unstable_by(order);
        let top = ids.into_iter().map(|id| (id, log(logits[id as usize]))).collect();
        Self { chosen: logits.get(token as usize).map_or(f32::NEG_INFINITY, |&l| log(l)), top }
    }
}

/// Runs batches of sequences, a step at a time.
///
/// A sequence's tokens depend on itself alone: not on its company, nor on how its rows were dealt over steps, nor on where its pages
/// are, nor on whether they were away.
///
/// A step with drafts shares [`Plan::draft_threshold`] among its sequences as the n-gram operator shares its threshold, with
/// [`Work::most_drafts`](super::plan::Work) as each sequence's bound.
pub trait BatchBackend: Send {
    /// What it runs on, for a person.
    fn device(&self) -> String;

    /// What it has room for.
    fn limits(&self) -> Limits;

    /// What it was measured to cost to take up a preempted sequence.
    fn costs(&self) -> Costs;

    /// Executes a plan. `starts` has an entry for each of `plan.started`. Returns the outcome of each work that samples, in order.
    ///
    /// # Errors
    /// A device error, after which the backend is of no more use.
    fn step(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<Vec<Outcome>, Error>;
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
