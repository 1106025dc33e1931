//! What batches of a head have in common, wherever they run.

use model::{Fault, Place};

use crate::backend::Drafted;
use crate::batch::PAGE_TOKENS;
use crate::batch::backend::Outcome;
use crate::batch::limits::Limits;
use crate::batch::plan::Work;

/// A sequence's tokens, as a head knows them.
#[derive(Clone, Default)]
pub(crate) struct Text {
    /// All of them.
    pub tokens: Vec<u32>,
    /// Those of them that are not the head's, from the first on.
    pub known: usize,
}

impl Text {
    /// Of tokens that are not the head's.
    pub(crate) fn new(tokens: &[u32]) -> Self {
        Self { tokens: tokens.to_vec(), known: tokens.len() }
    }

    /// From position `at` on, they are `tokens`, which are not the head's.
    ///
    /// # Panics
    /// If there are less than so many.
    pub(crate) fn rewrite(&mut self, at: usize, tokens: &[u32]) {
        assert!(at <= self.tokens.len(), "position {at} of {}", self.tokens.len());
        self.tokens.truncate(at);
        self.tokens.extend_from_slice(tokens);
        self.known = self.tokens.len();
    }

    /// Appends what the head says after the rows of a work, and gives that as its outcome; none if its numbers are not
    /// finite.
    pub(crate) fn say(&mut self, work: &Work, token: Option<u32>) -> Outcome {
        let position = (work.start + work.rows) as usize - 1;
        let fault = token.is_none().then_some(Fault { place: Place::Logits, position, row: 0 });
        self.tokens.push(token.unwrap_or(0));
        let (tokens, logprobs, by_model) = (token.into_iter().collect(), Vec::new(), Drafted::default());
        Outcome { slot: work.slot, tokens, logprobs, drafted: 0, by_model, fault, lost: None }
    }
}

/// What a head's batch has room for: `sequences` of up to `context` tokens, and so many pages and rows of a plan.
pub(crate) fn limits([context, sequences, pages]: [usize; 3], rows: u32) -> Limits {
    Limits {
        context,
        sequences: sequences as u32,
        generating: sequences as u32,
        rows,
        page_tokens: PAGE_TOKENS,
        pages: pages as u32,
        host_pages: 0,
        drafts: 0,
        draft_rows: 0,
        prompt_rows: 0,
        prompt_share: 0,
        prompts_apart: false,
    }
}
