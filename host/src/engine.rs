//! The engine: runs a checkpoint on a device and returns text.

use std::collections::BTreeMap;
use std::iter;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use model::{Checkpoint, Config, Form, Sampling, TokenStream};

use crate::ahead;
use crate::backend::{Backend, Drafted, Sequence, Step};
use crate::device::{self, Device, DeviceOptions};
use crate::draft::{Draft, DraftCheckpoint};
use crate::profile::Profile;
use crate::{Cpu, Error, Gpu, Progress};

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first CUDA card if there is one, otherwise the CPU.
    Auto,
    /// The CPU reference.
    Cpu,
    /// The CUDA card with this number.
    Cuda(u32),
    /// The GPU path, run lane by lane on the CPU, for checking.
    Emulator,
}

impl DeviceChoice {
    /// Opens the device; none for the CPU. If opening was [begun](Self::open_ahead) with the same options, waits for
    /// that.
    ///
    /// # Errors
    /// The CUDA driver or the chosen card is missing, or the card is too old; a file of kernels was given without a
    /// card.
    pub fn open(self, options: &DeviceOptions) -> Result<Option<Device>, Error> {
        ahead::fetch(self, options).unwrap_or_else(|| self.open_now(options))
    }

    pub(crate) fn open_now(self, options: &DeviceOptions) -> Result<Option<Device>, Error> {
        let cuda = match self {
            Self::Auto => !device::cards()?.is_empty(),
            Self::Cpu | Self::Emulator => false,
            Self::Cuda(_) => true,
        };
        if let (false, Some(file)) = (cuda, &options.kernels) {
            return Err(Error::KernelsWithoutCard { path: file.path().display().to_string() });
        }
        match self {
            Self::Auto if !cuda => Ok(None),
            Self::Cpu => Ok(None),
            Self::Auto => Device::cuda_with(0, options).map(Some),
            Self::Cuda(ordinal) => Device::cuda_with(ordinal, options).map(Some),
            Self::Emulator => Ok(Some(Device::emulator_with(0, options))),
        }
    }
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            None if text == "emulator" => Ok(Self::Emulator),
            Some(("cuda", n)) => n.parse().map(Self::Cuda).map_err(|_| format!("{n} is not the number of a card")),
            _ => Err(format!("{text} is none of auto, cpu, cuda, cuda:N, emulator")),
        }
    }
}

/// What [`Engine::load`] needs besides the checkpoint.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where to run.
    pub device: DeviceChoice,
    /// The options to open the device with.
    pub options: DeviceOptions,
    /// Most tokens of prompt and answer together. Without it, the smaller of [`LoadOptions::DEFAULT_CONTEXT`] and what
    /// the model allows. In a batch on a card, without it, as much as the model allows and memory holds.
    pub context: Option<usize>,
    /// A model or head that drafts for the checkpoint, if any.
    pub draft_model: Option<DraftCheckpoint>,
}

impl LoadOptions {
    /// Options for this device, with no context given and no draft model.
    pub fn on(device: DeviceChoice) -> Self {
        Self { device, options: DeviceOptions::default(), context: None, draft_model: None }
    }

    /// The context if none is given, in tokens.
    pub const DEFAULT_CONTEXT: usize = 8192;

    /// Most tokens of prompt and answer together, for a model of this config.
    ///
    /// # Errors
    /// [`Error::ContextTooLong`] if the given context is more than the model allows; [`Error::ContextTooShort`].
    pub fn context_for(&self, config: &Config) -> Result<usize, Error> {
        let most = config.max_position_embeddings;
        let context = self.context.unwrap_or(Self::DEFAULT_CONTEXT.min(most));
        match context {
            0 | 1 => Err(Error::ContextTooShort { context }),
            _ if context > most => Err(Error::ContextTooLong { context, most }),
            _ => Ok(context),
        }
    }

    /// The contexts to try for a batch on a card, the longest first. The batch takes the first that memory has room
    /// for. If a context was given, it is the only one. Otherwise the list begins with the model's most, goes on with
    /// halves of it, and ends with [`context_for`](Self::context_for). `cache_tokens`, if given, bounds them, since the
    /// cache is not enlarged for a longer context.
    pub(crate) fn batch_contexts(&self, config: &Config, cache_tokens: Option<usize>) -> Result<Vec<usize>, Error> {
        let least = self.context_for(config)?;
        let most = match self.context {
            Some(_) => least,
            None => config.max_position_embeddings.min(cache_tokens.unwrap_or(usize::MAX)).max(least),
        };
        let shorter = |&context: &usize| (context > least).then(|| (context / 2).max(least));
        Ok(iter::successors(Some(most), shorter).collect())
    }
}

/// A prompt to answer, and how.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate. `usize::MAX` means up to the end of the context.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// How drafts are made. None: no drafts.
    pub draft: Option<Draft>,
    /// Texts that end the answer. The answer does not include them.
    pub stop: Vec<String>,
    /// Whether to go on past end tokens. Not allowed with a form, which ends with such a token.
    pub ignore_end: bool,
    /// The form that the answer must have, if any. Compiled by [`Forms`](model::Forms) for this model.
    pub form: Option<Form>,
}

impl Request {
    /// Checks everything but the prompt's length, for a model with a vocabulary of this size.
    pub(crate) fn check(&self, vocab_size: usize) -> Result<(), Error> {
        check_tokens(&self.prompt, vocab_size)?;
        self.sampling.check()?;
        match &self.form {
            Some(_) if self.ignore_end => Err(Error::FormWithoutEnd),
            Some(form) if form.vocab_size() != vocab_size => Err(Error::FormOfAnother),
            _ => Ok(()),
        }
    }
}

/// Checks that all tokens are of a vocabulary of this size.
fn check_tokens(tokens: &[u32], vocab_size: usize) -> Result<(), Error> {
    match tokens.iter().find(|token| **token as usize >= vocab_size) {
        Some(&token) => Err(model::Error::TokenOutOfRange { token, vocab_size }.into()),
        None => Ok(()),
    }
}

/// Follows an answer while it is made, and may stop it.
pub trait Listener {
    /// Called when `done` of the prompt's `total` uncached tokens were read. Not called for a prompt that is read in
    /// one piece.
    fn prompt(&mut self, done: usize, total: usize) -> ControlFlow<()> {
        let _ = (done, total);
        ControlFlow::Continue(())
    }

    /// Called after every token with the text that became certain by it, which may be empty.
    fn text(&mut self, text: &str) -> ControlFlow<()>;
}

/// A listener that passes only the text to a function.
struct OnText<'a>(&'a mut dyn FnMut(&str) -> ControlFlow<()>);

impl Listener for OnText<'_> {
    fn text(&mut self, text: &str) -> ControlFlow<()> {
        (self.0)(text)
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model chose an end token, or a stop text was found.
    Stop,
    /// The answer reached the most tokens.
    Length,
    /// The caller asked to stop.
    Interrupted,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Generation {
    /// The text, without end tokens and stop texts.
    pub text: String,
    /// All generated tokens, an end token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Counts and times.
    pub statistics: Statistics,
}

/// How an answer was made.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were in the cache already.
    pub cached_tokens: usize,
    /// Time from the request to the first token. This is the time for the prompt.
    pub first_token: Duration,
    /// Time from the first token to the end.
    pub decode: Duration,
    /// Tokens generated.
    pub tokens: usize,
    /// Decode steps. The step that gives the first token is not counted.
    pub steps: usize,
    /// Drafts that were tried.
    pub drafted: usize,
    /// Drafts that the model confirmed.
    pub accepted: usize,
    /// The drafts among them that a draft model or head proposed. The others came from n-gram matches.
    pub by_model: Drafted,
    /// For each number of tokens, how many decode steps gave that many.
    pub step_lengths: BTreeMap<usize, usize>,
}

impl Statistics {
    /// Counts a decode step.
    fn add(&mut self, step: &Step) {
        self.steps += 1;
        self.drafted += step.drafted;
        self.accepted += step.tokens.len() - 1;
        self.by_model.drafted += step.by_model.drafted;
        self.by_model.accepted += step.by_model.accepted;
        *self.step_lengths.entry(step.tokens.len()).or_default() += 1;
    }

    /// The drafts that n-gram matches proposed.
    pub fn drafted_by_ngram(&self) -> Drafted {
        let Drafted { drafted, accepted } = self.by_model;
        Drafted { drafted: self.drafted - drafted, accepted: self.accepted - accepted }
    }

    /// Prompt tokens read per second, without those that were cached.
    pub fn prompt_rate(&self) -> f64 {
        rate(self.prompt_tokens - self.cached_tokens, self.first_token)
    }

    /// Generated tokens per second, without the first token and its time.
    pub fn decode_rate(&self) -> f64 {
        rate(self.tokens.saturating_sub(1), self.decode)
    }

    /// Mean tokens per decode step: 1 without drafts, 0 if there were no steps.
    pub fn mean_accepted_length(&self) -> f64 {
        let tokens: usize = self.step_lengths.iter().map(|(length, count)| length * count).sum();
        if self.steps == 0 { 0.0 } else { tokens as f64 / self.steps as f64 }
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { tokens as f64 / time.as_secs_f64() }
}

/// A checkpoint loaded on a device.
pub struct Engine {
    checkpoint: Checkpoint,
    backend: Box<dyn Backend>,
    profile: Option<Profile>,
}

impl Engine {
    /// Loads `checkpoint`. `progress` is called with the bytes loaded so far and in all. Every weight is checked to be
    /// finite, so the checkpoint may have been opened without that check.
    ///
    /// # Errors
    /// There is no such device; it has too little memory (found out before anything is loaded) or does not cover the
    /// model's shapes; the draft model does not suit; or [`Error::Interrupted`] if `progress` broke.
    pub fn load(checkpoint: Checkpoint, options: LoadOptions, progress: &mut Progress<'_>) -> Result<Self, Error> {
        let context = options.context_for(&checkpoint.config)?;
        let draft = options.draft_model.as_ref();
        let backend: Box<dyn Backend> = match options.device.open(&options.options)? {
            Some(device) => Box::new(Gpu::with_draft_model(&checkpoint, draft, &device, context, progress)?),
            None => Box::new(Cpu::with_draft_model(&checkpoint, draft, context)?),
        };
        Ok(Self { checkpoint, backend, profile: None })
    }

    /// The loaded checkpoint.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The name of the device, for a person to read.
    pub fn device(&self) -> String {
        self.backend.device()
    }

    /// Most tokens of prompt and answer together.
    pub fn context(&self) -> usize {
        self.backend.capacity()
    }

    /// Adds all further work to `profile`. If the device records phases, each step is then waited for.
    ///
    /// # Errors
    /// A device error.
    pub fn begin_profile(&mut self, profile: Profile) -> Result<(), Error> {
        self.profile = Some(profile);
        self.backend.note_phases(true)
    }

    /// Ends the profile and returns it. None if no profile was begun.
    ///
    /// # Errors
    /// A device error.
    pub fn take_profile(&mut self) -> Result<Option<Profile>, Error> {
        self.backend.note_phases(false)?;
        Ok(self.profile.take())
    }

    /// Adds the time since `start` to the profile, if there is one.
    fn note(&mut self, name: &'static str, start: Instant, numbers: &[(&'static str, u64)]) {
        if let Some(profile) = &mut self.profile {
            profile.span(name, start, numbers);
        }
    }

    /// Adds a decode step to the profile, if there is one, with the phases that the device recorded.
    fn note_step(&mut self, start: Instant, step: &Step) -> Result<(), Error> {
        let Some(profile) = &mut self.profile else { return Ok(()) };
        let (seen, drafted, tokens) = (Instant::now(), step.drafted as u64, step.tokens.len() as u64);
        let accepted = tokens.saturating_sub(1);
        profile.span(
            "step",
            start,
            &[("rows", 1 + drafted), ("drafted", drafted), ("accepted", accepted), ("tokens", tokens)],
        );
        profile.phases(&self.backend.take_phases()?, seen);
        Ok(())
    }

    /// The logits after each of `tokens`, `[tokens, vocab]`.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::PromptTooLong`], a token outside the vocabulary, or a device error.
    pub fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        self.check_length(tokens.len(), self.context())?;
        check_tokens(tokens, self.checkpoint.config.vocab_size)?;
        self.backend.score(tokens)
    }

    fn check_length(&self, tokens: usize, most: usize) -> Result<(), Error> {
        if tokens == 0 {
            return Err(Error::EmptyPrompt);
        }
        if tokens > most {
            let most = self.checkpoint.config.max_position_embeddings;
            return Err(Error::PromptTooLong { prompt: tokens, context: self.context(), most });
        }
        Ok(())
    }

    /// Answers `request`. Calls `on_text` after every token but an end token, with the text that became certain by that
    /// token, which may be empty. Calls it once more at the end if text was held back. Breaking stops the answer.
    ///
    /// # Errors
    /// A prompt that is empty, does not fit or has a token outside the vocabulary; a setting out of range; a device
    /// error.
    pub fn generate(
        &mut self,
        request: &Request,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Generation, Error> {
        self.generate_for(request, &mut OnText(on_text))
    }

    /// As [`generate`](Self::generate), but `listener` also hears how much of the prompt was read. If it breaks there,
    /// the answer is empty.
    ///
    /// # Errors
    /// As [`generate`](Self::generate).
    pub fn generate_for(&mut self, request: &Request, listener: &mut dyn Listener) -> Result<Generation, Error> {
        self.check_length(request.prompt.len(), self.context() - 1)?;
        request.check(self.checkpoint.config.vocab_size)?;
        if let Some(draft) = &request.draft {
            draft.check()?;
        }
        let end_tokens = if request.ignore_end { Vec::new() } else { self.checkpoint.generation.eos_token_ids.clone() };
        let mut text = Text::new(self.checkpoint.tokenizer.stream(), &request.stop);
        let mut statistics = Statistics { prompt_tokens: request.prompt.len(), ..Statistics::default() };
        let mut tokens = Vec::new();
        let mut finish = Finish::Length;
        if request.max_tokens == 0 {
            return Ok(Generation { text: text.all, tokens, finish, statistics });
        }

        let start = Instant::now();
        let sequence = Sequence {
            prompt: &request.prompt,
            max_length: self.context().min(request.prompt.len().saturating_add(request.max_tokens)),
            sampling: request.sampling,
            draft: request.draft,
            stop_tokens: &end_tokens,
            form: request.form.as_ref(),
        };
        statistics.cached_tokens = match self.backend.begin(&sequence, &mut |done, total| listener.prompt(done, total))
        {
            // Stopped before the first token.
            Err(Error::Interrupted) => {
                return Ok(Generation { text: text.all, tokens, finish: Finish::Interrupted, statistics });
            }
            cached => cached?,
        };
        'steps: loop {
            let began = Instant::now();
            let step = self.backend.step()?;
            if tokens.is_empty() {
                statistics.first_token = start.elapsed();
                let cached = statistics.cached_tokens as u64;
                self.note("prompt", start, &[("tokens", request.prompt.len() as u64 - cached), ("cached", cached)]);
            } else {
                self.note_step(began, &step)?;
                statistics.add(&step);
            }
            for token in step.tokens {
                tokens.push(token);
                if end_tokens.contains(&token) {
                    finish = Finish::Stop;
                    break 'steps;
                }
                let began = Instant::now();
                let certain = text.push(token);
                self.note("detokenise", began, &[]);
                if listener.text(certain).is_break() {
                    finish = Finish::Interrupted;
                    break 'steps;
                }
                if text.stopped {
                    finish = Finish::Stop;
                    break 'steps;
                }
            }
            if step.finished {
                break;
            }
        }
        statistics.decode = start.elapsed() - statistics.first_token;
        statistics.tokens = tokens.len();
        let rest = text.finish();
        self.note("generate", start, &[("tokens", tokens.len() as u64), ("steps", statistics.steps as u64)]);
        if !rest.is_empty() && finish != Finish::Interrupted && listener.text(rest).is_break() {
            finish = Finish::Interrupted;
        }
        Ok(Generation { text: text.all, tokens, finish, statistics })
    }
}

/// The text of an answer. It is decoded as tokens come. The end of the text is held back while it may begin a stop
/// text.
pub(crate) struct Text {
    stream: TokenStream,
    stop: Vec<String>,
    /// All text so far, the held-back end included.
    pub(crate) all: String,
    /// Bytes of `all` that were given out.
    told: usize,
    /// Whether a stop text was found. `all` then ends before it.
    pub(crate) stopped: bool,
}

impl Text {
    pub(crate) fn new(stream: TokenStream, stop: &[String]) -> Self {
        Self { stream, stop: stop.to_vec(), all: String::new(), told: 0, stopped: false }
    }

    /// Takes a token and returns the text that is certain now and was not returned before.
    pub(crate) fn push(&mut self, token: u32) -> &str {
        if let Some(piece) = self.stream.push(token) {
            self.all.push_str(&piece);
        }
        self.tell(false)
    }

    /// Ends the answer and returns the text that was held back.
    pub(crate) fn finish(&mut self) -> &str {
        if !self.stopped
            && let Some(piece) = self.stream.flush()
        {
            self.all.push_str(&piece);
        }
        self.tell(true)
    }

    fn tell(&mut self, last: bool) -> &str {
        let pending = &self.all[self.told..];
        let stops = self.stop.iter().filter(|s| !s.is_empty());
        if let Some(at) = stops.clone().filter_map(|s| pending.find(s.as_str())).min() {
            self.all.truncate(self.told + at);
            self.stopped = true;
        }
        let pending = &self.all[self.told..];
        let held = if last || self.stopped { 0 } else { stops.map(|s| overlap(pending, s)).max().unwrap_or(0) };
        let from = self.told;
        self.told = self.all.len() - held;
        &self.all[from..self.told]
    }
}

/// Length of the longest end of `text` that is a beginning of `stop`, but not all of it.
fn overlap(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(i, _)| i).skip(1);
    starts.filter(|&n| text.ends_with(&stop[..n])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use model::Checkpoint;

    use super::{DeviceChoice, LoadOptions, overlap};

    #[test]
    fn a_batch_has_the_longest_context_that_fits() {
        let mut config = Checkpoint::demo().unwrap().config;
        config.max_position_embeddings = 40_960;
        let asked = |context| LoadOptions { context, ..LoadOptions::on(DeviceChoice::Cpu) };
        let contexts = |context, cache_tokens| asked(context).batch_contexts(&config, cache_tokens).unwrap();
        assert_eq!(contexts(None, None), [40_960, 20_480, 10_240, 8192]);
        assert_eq!(contexts(None, Some(20_000)), [20_000, 10_000, 8192]);
        assert_eq!(contexts(None, Some(100)), [8192]);
        assert_eq!(contexts(Some(12_000), Some(100)), [12_000]);
        assert!(asked(Some(50_000)).batch_contexts(&config, None).is_err());
        for context in [0, 1] {
            assert!(matches!(asked(Some(context)).context_for(&config), Err(crate::Error::ContextTooShort { .. })));
        }
    }

    #[test]
    fn a_stop_text_may_be_beginning() {
        assert_eq!(overlap("some text", "xtra"), 2);
        assert_eq!(overlap("aab", "aabb"), 3);
        assert_eq!(overlap("ends é", "éa"), 'é'.len_utf8());
        assert_eq!(overlap("nothing", "stop"), 0);
    }
}
