//! The interface between the engine and whatever runs a sequence.

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
    /// Most tokens in the prompt and the answer together.
    pub max_length: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How drafts are made. None: the sequence runs without drafts.
    pub draft: Option<Draft>,
    /// Tokens that end the sequence.
    pub stop_tokens: &'a [u32],
    /// The form that the answer must have, if any.
    pub form: Option<&'a Form>,
}

impl Sequence<'_> {
    /// Checks that the sequence fits a backend with room for `capacity` tokens and a model with a vocabulary of `vocab`
    /// tokens. Kernels trust these numbers, so they are checked here.
    ///
    /// # Errors
    /// [`Error::Draft`] if the draft settings are invalid.
    ///
    /// # Panics
    /// If the prompt is empty or leaves no room for an answer, if `max_length` exceeds `capacity`, or if a prompt token
    /// is not below `vocab`. Each is a bug of the caller.
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

/// How the drafts of one source fared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drafted {
    /// Drafts that were tried.
    pub drafted: usize,
    /// Drafts among them that the model confirmed.
    pub accepted: usize,
}

impl std::ops::Add for Drafted {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { drafted: self.drafted + other.drafted, accepted: self.accepted + other.accepted }
    }
}

/// The result of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// The next tokens: one, and one more for each right draft.
    pub tokens: Vec<u32>,
    /// Drafts that were tried.
    pub drafted: usize,
    /// The share of a draft model or head in these drafts.
    pub by_model: Drafted,
    /// Whether the sequence has reached a stop token or its maximal length.
    pub finished: bool,
}

/// Called with the number of prompt tokens read so far, and the number to read in all. Tokens that were cached count in
/// neither. Breaking stops the reading.
pub type PromptProgress<'a> = dyn FnMut(usize, usize) -> ControlFlow<()> + 'a;

/// Runs one sequence at a time.
///
/// The tokens of a sequence depend only on the sequence and its form. They do not depend on drafting, or on how much of
/// the prompt was still cached.
pub trait Backend: Send {
    /// The name of the device, for a person to read.
    fn device(&self) -> String;

    /// The most tokens that a sequence may have.
    fn capacity(&self) -> usize;

    /// Begins a sequence and reads its prompt, except perhaps the last piece, which the first [`step`](Self::step)
    /// reads. Calls `progress` after each piece; a prompt of a single piece gives no call. Tokens that the prompt
    /// shares with the start of the previous sequence are not run again. Returns how many those are.
    ///
    /// # Errors
    /// A device error, [`Error::StopTokens`] if a GPU cannot compare with so many, or [`Error::Interrupted`] if
    /// `progress` broke. After an interruption there is no sequence to step.
    ///
    /// # Panics
    /// If there is no room for the sequence ([`Sequence::check`]): a bug of the caller.
    fn begin(&mut self, sequence: &Sequence<'_>, progress: &mut PromptProgress<'_>) -> Result<usize, Error>;

    /// Runs the next step. The first step gives the token after the prompt. Must not be called after a step that
    /// finished the sequence.
    ///
    /// # Errors
    /// A device error.
    ///
    /// # Panics
    /// If no sequence was begun, or its last step failed: a bug of the caller.
    fn step(&mut self) -> Result<Step, Error>;

    /// Sets whether the [phases](Self::take_phases) of each further step are recorded, on backends that can. Steps then
    /// take longer, because each is waited for.
    ///
    /// # Errors
    /// A device error.
    fn note_phases(&mut self, _noted: bool) -> Result<(), Error> {
        Ok(())
    }

    /// The phases of the last step, in order. The first marks where the step began. Empty if phases are not recorded.
    ///
    /// # Errors
    /// A device error.
    fn take_phases(&mut self) -> Result<Vec<Phase>, Error> {
        Ok(Vec::new())
    }

    /// The logits after each of `tokens`, `[tokens, vocab]`. The tokens are run as a sequence of their own.
    ///
    /// # Errors
    /// A device error.
    fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error>;
}

/// How many leading tokens of `prompt` are already in the cache. Excludes the prompt's last token, which is always run
/// for its logits.
pub(crate) fn common_prefix(cached: &[u32], prompt: &[u32]) -> usize {
    let same = cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
    same.min(prompt.len().saturating_sub(1))
}
