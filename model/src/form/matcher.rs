//! The progress of one sequence through a form.

use std::fmt;
use std::sync::Arc;

use super::compile::{Compiled, Form, Thought, Tokens, first_line};
use crate::Error;

/// Follows a form along an answer: says which tokens may come next, and which must.
///
/// An answer ends with an end token, or where the form leaves nothing else. Tokens after the end are run in vain: the
/// matcher accepts any of them, and ignores them.
#[derive(Clone)]
pub struct Matcher {
    compiled: Arc<Compiled>,
    thought: Thought,
    engine: llguidance::Matcher,
    /// Number of tokens taken so far.
    taken: usize,
    /// Number of tokens before the first of the form; `None` while a thought has not ended.
    before: Option<usize>,
    /// Number of tokens of the form taken so far, up to its end.
    followed: usize,
    /// Why the form cannot be followed any further, if it cannot.
    failed: Option<String>,
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { thought, taken, before, failed, .. } = self;
        f.debug_struct("Matcher")
            .field("thought", thought)
            .field("taken", taken)
            .field("before", before)
            .field("failed", failed)
            .finish_non_exhaustive()
    }
}

impl Matcher {
    pub(super) fn new(form: &Form) -> Self {
        let Form { compiled, thought } = form;
        Self {
            // A deep clone has the engine's cache to itself, so that sequences do not wait for each other.
            engine: compiled.engine.deep_clone(),
            compiled: compiled.clone(),
            thought: *thought,
            taken: 0,
            before: (*thought == Thought::None).then_some(0),
            followed: 0,
            failed: None,
        }
    }

    /// Takes the next tokens of the answer.
    pub fn accept(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.take(token));
    }

    fn take(&mut self, token: u32) {
        let at = self.taken;
        self.taken += 1;
        match self.before {
            None => {
                let closes = self.compiled.tokens.tags.as_ref().filter(|(tags, _)| token == tags[1]);
                // A closing tag in the place of the opening one ends nothing.
                if let Some((_, behind)) = closes.filter(|_| at >= self.opening().len()) {
                    self.before = Some(at + 1 + behind.len());
                }
            }
            Some(before) if at < before => {}
            Some(_) if self.engine.is_stopped() => {}
            Some(_) => {
                self.followed += 1;
                if let Err(error) = self.engine.consume_token(token) {
                    self.fail(&error.to_string());
                }
            }
        }
    }

    /// Takes back the last `count` tokens.
    pub fn take_back(&mut self, count: usize) {
        let left = self.taken - count.min(self.taken);
        self.taken = left;
        let Some(before) = self.before else { return };
        let followed = left.saturating_sub(before).min(self.followed);
        if followed < self.followed
            && let Err(error) = self.engine.rollback(self.followed - followed)
        {
            self.fail(&error.to_string());
        }
        self.followed = followed;
        let behind = self.compiled.tokens.tags.as_ref().map_or(0, |(_, behind)| behind.len());
        // The token that ends the thought was taken back too.
        if self.thought != Thought::None && left + behind < before {
            self.before = None;
        }
    }

    fn fail(&mut self, error: &str) {
        if self.failed.is_none() {
            self.failed = Some(first_line(error));
        }
    }

    /// The tokens that open the thought, if the answer opens it.
    fn opening(&self) -> &[u32] {
        match (&self.compiled.tokens.tags, self.thought) {
            (Some((tags, _)), Thought::Whole) => &tags[..1],
            _ => &[],
        }
    }

    /// The tokens outside the form that must come next.
    fn sure(&self) -> &[u32] {
        match (self.before, &self.compiled.tokens.tags) {
            (None, _) => self.opening().get(self.taken..).unwrap_or_default(),
            (Some(before), Some((_, behind))) if self.taken < before => &behind[behind.len() - (before - self.taken)..],
            _ => &[],
        }
    }

    /// Fills `mask`, of [`mask_words`](super::mask_words) words, with the tokens that may come next: at least one.
    pub fn mask(&mut self, mask: &mut [u32]) {
        if let Some(&sure) = self.sure().first() {
            mask.fill(0);
            mask[sure as usize / 32] = 1 << (sure % 32);
            return;
        }
        if self.before.is_none() {
            mask.copy_from_slice(&self.compiled.tokens.thought);
            return;
        }
        if self.followed == 0 && self.failed.is_none() {
            mask.copy_from_slice(&self.compiled.first);
            return;
        }
        if self.failed.is_none() {
            match self.engine.compute_mask_or_eos() {
                Ok(allowed) => return self.compiled.tokens.take(allowed.as_slice(), mask),
                Err(error) => self.fail(&error.to_string()),
            }
        }
        mask.fill(u32::MAX);
    }

    /// Fills `masks`, one more than there are `drafts`: the first with what may come after the newest token, each of
    /// the others with what may come after a draft. After a draft that is not allowed, the masks allow everything:
    /// those rows decide nothing.
    pub fn masks_along<'m>(&mut self, drafts: &[u32], masks: impl IntoIterator<Item = &'m mut [u32]>) {
        let mut masks = masks.into_iter();
        let mut count = 0;
        for (mask, draft) in masks.by_ref().zip(drafts.iter().map(Some).chain([None])) {
            self.mask(mask);
            match draft {
                Some(&draft) if super::is_allowed(mask, draft) => {
                    self.take(draft);
                    count += 1;
                }
                _ => break,
            }
        }
        masks.for_each(|mask| mask.fill(u32::MAX));
        self.take_back(count);
    }

    /// The tokens that must come next, at most `most`: those that the form, or the end of a thought, leaves no choice
    /// about.
    pub fn forced(&mut self, most: usize) -> Vec<u32> {
        if self.failed.is_some() || most == 0 {
            return Vec::new();
        }
        let mut tokens = self.sure().to_vec();
        if tokens.is_empty() && self.before.is_some() && !self.engine.is_stopped() {
            tokens = self.engine.compute_ff_tokens();
        }
        tokens.truncate(most);
        tokens
    }

    /// How many of `tokens`, from the first on, may come next one after the other.
    pub fn possible(&mut self, tokens: &[u32]) -> usize {
        if self.failed.is_some() {
            return 0;
        }
        match self.before {
            None if self.sure().is_empty() => {
                // In a thought, anything but an end token may come. Counting stops after the closing tag, where the
                // form begins.
                let close = self.compiled.tokens.tags.as_ref().map(|(tags, _)| tags[1]);
                let may = |token: &u32| super::is_allowed(&self.compiled.tokens.thought, *token);
                let free = tokens.iter().take_while(|token| may(token) && Some(**token) != close).count();
                free + usize::from(tokens.get(free).is_some_and(|token| Some(*token) == close))
            }
            Some(before) if self.taken >= before && !self.engine.is_stopped() => {
                // An end token is no draft, since nothing runs after it. The engine gives up when it is asked about an
                // id that the tokenizer does not know. The embedding may have rows for such ids, so drafts may be some.
                let Tokens { known, thought, .. } = &*self.compiled.tokens;
                let goes_on = |&&token: &&u32| (token as usize) < *known && super::is_allowed(thought, token);
                let count = tokens.iter().take_while(goes_on).count();
                self.engine.validate_tokens(&tokens[..count]).unwrap_or_else(|error| {
                    self.fail(&error.to_string());
                    0
                })
            }
            _ => self.sure().iter().zip(tokens).take_while(|(a, b)| a == b).count(),
        }
    }

    /// Fails if the form could not be followed up to here.
    ///
    /// # Errors
    /// [`Error::Form`] if the engine has given up, which no form should lead to.
    pub fn check(&self) -> Result<(), Error> {
        match &self.failed {
            None => Ok(()),
            Some(reason) => {
                Err(Error::Form { reason: format!("it was followed up to token {}: {reason}", self.taken) })
            }
        }
    }

    /// Whether the form has reached its end: an end token came, or nothing else can come.
    pub fn is_at_end(&self) -> bool {
        self.before.is_some_and(|before| self.taken >= before) && self.engine.is_stopped()
    }
}
