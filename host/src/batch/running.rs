//! A running sequence, as every backend keeps it.

use gpu_kernels::drafting;
use gpu_kernels::sample::{GENERATED, PROMPTED};
use model::Sampling;

use super::backend::Start;
use super::draft::Drafts;
use crate::draft::{confirm, learned};

/// A running sequence.
#[derive(Clone, Default)]
pub struct Running {
    /// Every token so far.
    pub history: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt: usize,
    /// Most tokens of prompt and answer together.
    pub max_length: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end it.
    pub stop_tokens: Vec<u32>,
    /// As [`Start::logprobs`].
    pub logprobs: Option<u32>,
    /// What proposals were worth of late.
    pub acceptance: u32,
}

impl Running {
    /// At its start.
    pub fn new(start: &Start<'_>) -> Self {
        Self {
            history: start.tokens.to_vec(),
            prompt: start.prompt,
            max_length: start.max_length,
            sampling: start.sampling,
            stop_tokens: start.stop_tokens.to_vec(),
            logprobs: start.logprobs,
            acceptance: drafting::UNTRIED,
        }
    }

    /// Whether tokens that it has had are chosen less often.
    pub fn is_penalised(&self) -> bool {
        self.sampling.has_penalties()
    }

    /// How `token` was used so far, as the sampler has it: [`PROMPTED`], [`GENERATED`].
    pub fn uses(&self, token: u32) -> u32 {
        let (prompt, output) = self.history.split_at(self.prompt);
        let times = output.iter().filter(|t| **t == token).count() as u32;
        GENERATED * times + if prompt.contains(&token) { PROMPTED } else { 0 }
    }

    /// Whether its tokens are the best ones, and no log-probabilities are wanted.
    pub fn is_plain(&self) -> bool {
        self.sampling.takes_best() && self.logprobs.is_none()
    }

    /// Appends the tokens after the newest: one, and one more for each draft that was right; notes what the drafts were worth. `choose` gives the
    /// token of a row, knowing its history.
    pub fn confirm(&mut self, drafts: &Drafts, choose: impl FnMut(usize, &[u32]) -> u32) -> Vec<u32> {
        let tokens = confirm(&mut self.history, self.max_length, &self.stop_tokens, drafts.run(), choose);
        self.acceptance = learned(self.acceptance, &drafts.proposed, &tokens);
        tokens
    }
}
