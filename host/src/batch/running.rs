//! The state of a running sequence, as every backend keeps it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_kernels::drafting;
use gpu_kernels::sample::{GENERATED, PROMPTED};
use model::{Matcher, Sampling};

use super::backend::Start;
use super::draft::Drafts;
use crate::draft::{Draft, DraftTokens, confirm, learned};

/// A running sequence.
#[derive(Clone, Default)]
pub struct Running {
    /// All tokens so far, prompt and answer.
    pub history: Vec<u32>,
    /// How many of these tokens are the prompt.
    pub prompt: usize,
    /// Most tokens of prompt and answer together.
    pub max_length: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// See [`Start::logprobs`].
    pub logprobs: Option<u32>,
    /// The [`drafting`] estimate for drafts by n-gram match.
    pub acceptance: u32,
    /// What was found to follow the newest token. Empty if nobody looked for it here.
    pub guess: DraftTokens,
    /// If the answer has a form: its matcher, advanced to the newest token.
    pub form: Option<Arc<Mutex<Matcher>>>,
}

impl Running {
    /// The state at the start. If the sequence was preempted before, its answer so far is among the tokens.
    pub fn new(start: &Start<'_>) -> Self {
        // A preempted sequence has part of its answer already, which the matcher must follow.
        let follow = |form: &model::Form| {
            let mut matcher = form.matcher();
            matcher.accept(&start.tokens[start.prompt..]);
            Arc::new(Mutex::new(matcher))
        };
        Self {
            form: start.form.map(follow),
            history: start.tokens.to_vec(),
            prompt: start.prompt,
            max_length: start.max_length,
            sampling: start.sampling,
            stop_tokens: start.stop_tokens.to_vec(),
            logprobs: start.logprobs,
            acceptance: drafting::UNTRIED,
            guess: DraftTokens::default(),
        }
    }

    /// Whether its sampling has penalties, by which tokens that occurred are chosen less often.
    pub fn is_penalised(&self) -> bool {
        self.sampling.has_penalties()
    }

    /// How `token` was used so far, in the sampler's encoding: [`PROMPTED`] and [`GENERATED`].
    pub fn uses(&self, token: u32) -> u32 {
        let (prompt, output) = self.history.split_at(self.prompt);
        let times = output.iter().filter(|t| **t == token).count() as u32;
        GENERATED * times + if prompt.contains(&token) { PROMPTED } else { 0 }
    }

    /// Whether each token is simply the best of all tokens, and no log-probabilities are wanted.
    pub fn is_plain(&self) -> bool {
        self.sampling.takes_best() && self.logprobs.is_none() && self.form.is_none()
    }

    /// The matcher of the answer's form, if it has one.
    pub fn matcher(&self) -> Option<MutexGuard<'_, Matcher>> {
        self.form.as_ref().map(|form| form.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Why its form cannot be followed any further; none if it can.
    pub fn lost(&self) -> Option<String> {
        self.matcher()?.check().err().map(|error| error.to_string())
    }

    /// Finds what may follow the newest token, without a model: what the form forces, or an n-gram match.
    pub fn look(&mut self, draft: Draft) {
        let guess = DraftTokens::of(draft, &self.history, self.max_length, self.matcher().as_deref_mut());
        self.guess = guess;
    }

    /// Replaces the tokens from position `at` on by `tokens`.
    ///
    /// # Panics
    /// If the sequence has fewer than `at` tokens.
    pub fn rewrite(&mut self, at: usize, tokens: &[u32]) {
        assert!(at <= self.history.len(), "position {at} of {}", self.history.len());
        self.history.truncate(at);
        self.history.extend_from_slice(tokens);
    }

    /// Appends the next tokens, and returns them: one, and one more for each right draft. Also updates the estimate of
    /// what drafts are worth. `choose` gives the token of a row, from the history up to that row.
    pub fn confirm(&mut self, drafts: &Drafts, choose: impl FnMut(usize, &[u32]) -> u32) -> Vec<u32> {
        let tokens = confirm(&mut self.history, self.max_length, &self.stop_tokens, drafts.run(), choose);
        if let Some(mut matcher) = self.matcher() {
            matcher.accept(&tokens);
        }
        let mut guess = std::mem::take(&mut self.guess);
        if guess.tokens.is_empty() && drafts.by_model == 0 {
            // Another thread found it, without storing it here.
            guess.clone_from(&drafts.proposal);
        }
        if !guess.forced {
            self.acceptance = learned(self.acceptance, &guess.tokens, &tokens);
        }
        tokens
    }
}
