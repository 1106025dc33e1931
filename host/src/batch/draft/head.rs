//! What the batches of a head have in common on all devices.

use model::{Fault, Place};

use crate::backend::Drafted;
use crate::batch::PAGE_TOKENS;
use crate::batch::backend::Outcome;
use crate::batch::limits::Limits;
use crate::batch::plan::Work;

/// The text of a sequence in the head's batch.
#[derive(Clone, Default)]
pub(crate) struct Text {
    /// All tokens of the text.
    pub tokens: Vec<u32>,
    /// How many of them, from the first on, came from outside and were not drafted by the head.
    pub known: usize,
}

impl Text {
    /// A text of tokens that the head has not drafted.
    pub(crate) fn new(tokens: &[u32]) -> Self {
        Self { tokens: tokens.to_vec(), known: tokens.len() }
    }

    /// Replaces the tokens from position `at` on by `tokens`, which the head has not drafted.
    ///
    /// # Panics
    /// If the text has fewer than `at` tokens.
    pub(crate) fn rewrite(&mut self, at: usize, tokens: &[u32]) {
        assert!(at <= self.tokens.len(), "position {at} of {}", self.tokens.len());
        self.tokens.truncate(at);
        self.tokens.extend_from_slice(tokens);
        self.known = self.tokens.len();
    }

    /// Appends the token that the head predicts after the rows of a work, and returns it as the work's outcome. None
    /// means that a number was not finite.
    pub(crate) fn say(&mut self, work: &Work, token: Option<u32>) -> Outcome {
        let position = (work.start + work.rows) as usize - 1;
        let fault = token.is_none().then_some(Fault { place: Place::Logits, position, row: 0 });
        self.tokens.push(token.unwrap_or(0));
        let (tokens, logprobs, by_model) = (token.into_iter().collect(), Vec::new(), Drafted::default());
        Outcome { slot: work.slot, tokens, logprobs, drafted: 0, by_model, fault, lost: None }
    }
}

/// The sizes of a head's batch.
#[derive(Clone, Copy)]
pub(crate) struct HeadSizes {
    /// Most tokens of a sequence.
    pub context: usize,
    /// Sequences at a time.
    pub sequences: usize,
    /// Pages of the cache.
    pub pages: usize,
}

/// The limits of a head's batch of these sizes, with up to `rows` rows in a plan.
pub(crate) fn limits(sizes: HeadSizes, rows: u32) -> Limits {
    let HeadSizes { context, sequences, pages } = sizes;
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
        tiles: &[],
    }
}
