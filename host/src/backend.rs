//! What runs a sequence: the interface that the decode loop sees.

use std::ops::ControlFlow;

use model::{Form, Sampling};

use crate::Error;
use crate::draft::Draft;
use crate::profile::Phase;

/// One sequence to continue.
#[derive(Clone, Debug)]
pub struct Sequence<'a> {
    /// At least one token.
    pub prompt: &'a [u32],
    /// Most tokens of prompt and answer together.
    pub max_length: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Who proposes drafts, if anyone.
    pub draft: Option<Draft>,
    /// Tokens that end the sequence.
    pub stop_tokens: &'a [u32],
    /// What the answer has to look like, if that is said.
    pub form: Option<&'a Form>,
}

impl Sequence<'_> {
    /// Checks that it fits a backend with room for `capacity` tokens, of a model with `vocab` different ones: the
    /// device is told no more than this.
    ///
    /// # Errors
    /// [`Error::Draft`], from `Draft::check`.
    ///
    /// # Panics
    /// If it does not fit: a bug of the caller.
    pub fn check(&self, capacity: usize, vocab: usize) -> Result<(), Error> {
        let Self { prompt, max_length, draft, .. } = self;
        assert!(!prompt.is_empty(), "a sequence without a prompt");
        assert!(*max_length <= capacity, "a sequence of {max_length} tokens, and room for {capacity}");
        assert!(prompt.len() < *max_length, "a prompt of {} tokens in a sequence of {max_length}", prompt.len());
        let unknown = prompt.iter().find(|&&token| token as usize >= vocab);
        assert!(unknown.is_none(), "token {unknown:?} of {vocab}");
        draft.map_or(Ok(()), |draft| draft.check())
    }
}

/// Drafts of one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafted {
    /// Tried.
    pub drafted: usize,
    /// Confirmed.
    pub accepted: usize,
}

impl std::ops::Add for Drafted {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { drafted: self.drafted + other.drafted, accepted: self.accepted + other.accepted }
    }
}

/// What one step brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The next tokens: one, and one more for each draft that was right.
    pub tokens: Vec<u32>,
    /// Drafts that were tried.
    pub drafted: usize,
    /// Those of them that a draft model proposed.
    pub by_model: Drafted,
    /// Whether the sequence has met a stop token or its length.
    pub finished: bool,
}

/// Told how many of a prompt's tokens were read, and of how many, the cached ones left out; breaking stops there.
pub type PromptProgress<'a> = dyn FnMut(usize, usize) -> ControlFlow<()> + 'a;

/// Runs one sequence at a time.
///
/// A sequence's tokens depend on itself alone, and on its form: not on drafting, and not on how much of its prompt was
/// still cached.
pub trait Backend: Send {
    /// What it runs on, for a person.
    fn device(&self) -> String;

    /// Most tokens of a sequence.
    fn capacity(&self) -> usize;

    /// Takes up a sequence and starts on its prompt, at least up to its last piece; `progress` is told after a piece,
    /// and not at all of a prompt that is one piece. Tokens that it has in common with the one before are not run
    /// again; returns how many.
    ///
    /// # Errors
    /// A device error, or [`Error::Interrupted`] if `progress` broke: then there is nothing to step.
    ///
    /// # Panics
    /// If there is no room for the sequence ([`Sequence::check`]): a bug of the caller.
    fn begin(&mut self, sequence: &Sequence<'_>, progress: &mut PromptProgress<'_>) -> Result<usize, Error>;

    /// The next step; the first brings the token after the prompt. Not after a finished one.
    ///
    /// # Errors
    /// A device error.
    ///
    /// # Panics
    /// If no sequence was begun: a bug of the caller.
    fn step(&mut self) -> Result<Step, Error>;

    /// Whether from now on the [phases](Self::take_phases) of every step are noted, where they can be; steps then take
    /// longer, as each is waited for.
    ///
    /// # Errors
    /// A device error.
    fn note_phases(&mut self, _noted: bool) -> Result<(), Error> {
        Ok(())
    }

    /// The phases of the last step, in order; the first is where it began. None where they are not noted.
    ///
    /// # Errors
    /// A device error.
    fn take_phases(&mut self) -> Result<Vec<Phase>, Error> {
        Ok(Vec::new())
    }

    /// The logits after each of `tokens`, `[tokens, vocab]`, as one sequence by itself.
    ///
    /// # Errors
    /// A device error.
    fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error>;
}

/// How many tokens of `prompt` are in the cache already; at least the last is always run, for its logits.
pub(crate) fn common_prefix(cached: &[u32], prompt: &[u32]) -> usize {
    let same = cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    same.min(prompt.len().saturating_sub(1))
}
