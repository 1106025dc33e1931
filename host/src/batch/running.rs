//! A running sequence, as every backend keeps it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_kernels::drafting;
use gpu_kernels::sample::{GENERATED, PROMPTED};
use model::{Matcher, Sampling};

use super::backend::Start;
use super::draft::Drafts;
use crate::draft::{DraftTokens, NgramDraft, confirm, learned};

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
    /// What n-gram matches were worth of late.
    pub acceptance: u32,
    /// What was found to follow the newest token, if it was looked for.
    pub guess: DraftTokens,
    /// If its answer has a form: where in it the newest token is.
    pub form: Option<Arc<Mutex<Matcher>>>,
}

impl Running {
    /// At its start.
    pub fn new(start: &Start<'_>) -> Self {
        // Whoever was put aside has an answer already.
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

    /// Whether its tokens are the best ones of all, and no log-probabilities are wanted.
    pub fn is_plain(&self) -> bool {
        self.sampling.takes_best() && self.logprobs.is_none() && self.form.is_none()
    }

    /// Its matcher, if its answer has a form.
    pub fn matcher(&self) -> Option<MutexGuard<'_, Matcher>> {
        self.form.as_ref().map(|form| form.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Why its form cannot be followed any further, if that is so.
    pub fn lost(&self) -> Option<String> {
        self.matcher()?.check().err().map(|error| error.to_string())
    }

    /// Looks for what may follow the newest token, as far as it can be told without a model.
    pub fn look(&mut self, draft: &NgramDraft) {
        let guess = DraftTokens::of(draft, &self.history, self.max_length, self.matcher().as_deref_mut());
        self.guess = guess;
    }

    /// From position `at` on, it says `tokens` instead.
    ///
    /// # Panics
    /// If it has less than so many.
    pub fn rewrite(&mut self, at: usize, tokens: &[u32]) {
        assert!(at <= self.history.len(), "position {at} of {}", self.history.len());
        self.history.truncate(at);
        self.history.extend_from_slice(tokens);
    }

    /// Appends the tokens after the newest: one, and one more for each draft that was right; notes what the drafts were
    /// worth. `choose` gives the token of a row, knowing its history.
    pub fn confirm(&mut self, drafts: &Drafts, choose: impl FnMut(usize, &[u32]) -> u32) -> Vec<u32> {
        let tokens = confirm(&mut self.history, self.max_length, &self.stop_tokens, drafts.run(), choose);
        if let Some(mut matcher) = self.matcher() {
            matcher.accept(&tokens);
        }
        let mut guess = std::mem::take(&mut self.guess);
        if guess.tokens.is_empty() && drafts.by_model == 0 {
            // It was looked for elsewhere.
            guess.clone_from(&drafts.proposal);
        }
        if !guess.forced {
            self.acceptance = learned(self.acceptance, &guess.tokens, &tokens);
        }
        tokens
    }
}
