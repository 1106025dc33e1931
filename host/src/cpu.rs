//! The CPU backend: the reference forward pass of `model`, one step at a time.

use gpu_kernels::drafting;
use model::{Checkpoint, Config, CpuModel, KvCache, Matcher, Sampling, Taps};

use crate::Error;
use crate::backend::{Backend, Drafted, PromptProgress, Sequence, Step, common_prefix};
use crate::draft::{Draft, DraftCheckpoint, DraftTokens, confirm, learned, masks};
use crate::drafter::{Drafter, ModelOnHost, NgramOnHost, OnHost, Proposal, Text};

/// What drafts add to a step, as `benches/examples/cpu_speed.rs` measures it. Steps of several rows widen the weights
/// first.
pub(crate) const DRAFT_COST: drafting::Cost =
    drafting::Cost { any: drafting::ONE * 13 / 8, each: drafting::ONE * 5 / 16 };

/// Bytes of memory that decoded weights take. Weights that are multiplied as they are stored are mapped, and take none.
pub(crate) fn decoded_bytes(checkpoint: &Checkpoint) -> u64 {
    let bytes = checkpoint.cpu_bytes();
    if bytes == checkpoint.stored_bytes() { 0 } else { bytes }
}

/// Fails if the form could not be followed up to here.
pub(crate) fn followed(matcher: &Matcher) -> Result<(), Error> {
    matcher.check().map_err(|error| Error::FormLost { reason: error.to_string() })
}

/// Prompt tokens per piece: as many as the forward pass takes through the layers at once.
const PIECE: usize = 64;

/// Runs sequences on the CPU.
pub struct Cpu {
    model: CpuModel,
    cache: KvCache,
    /// The sequence so far. The last token's keys and values are not in the cache yet.
    history: Vec<u32>,
    prompt_len: usize,
    max_length: usize,
    sampling: Sampling,
    draft: Option<Draft>,
    /// The [`drafting`] estimate for proposals under a form.
    acceptance: u32,
    ngram: NgramOnHost,
    model_drafter: Option<ModelOnHost>,
    stop_tokens: Vec<u32>,
    /// The matcher of the answer's form, if it has one.
    form: Option<Matcher>,
    logits: Vec<f32>,
}

impl Cpu {
    /// A backend for sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// A checkpoint that lacks a weight, or has one that is NaN or infinite; a cache larger than memory.
    pub fn new(checkpoint: &Checkpoint, capacity: usize) -> Result<Self, Error> {
        Self::with_draft_model(checkpoint, None, capacity)
    }

    /// As [`new`](Self::new), with a draft model or head if there is one.
    ///
    /// # Errors
    /// As [`new`](Self::new). Also if a draft model has another vocabulary, or a head was made for another model.
    pub fn with_draft_model(
        checkpoint: &Checkpoint,
        draft: Option<&DraftCheckpoint>,
        capacity: usize,
    ) -> Result<Self, Error> {
        if let Some(draft) = draft {
            draft.check_for(checkpoint)?;
        }
        let of_token = |config: &Config| config.kv_bytes_per_token(size_of::<f32>()) as u64;
        let of_draft = draft.map_or(0, |draft| of_token(draft.config()));
        let wanted = (of_token(&checkpoint.config) + of_draft).saturating_mul(capacity as u64);
        let memory = memory().saturating_sub(decoded_bytes(checkpoint));
        if wanted > memory {
            return Err(Error::CpuContextTooLarge { context: capacity, wanted, memory });
        }
        checkpoint.check_finite(&|_| {})?;
        let model = CpuModel::new(checkpoint)?;
        let load_draft = |draft| ModelOnHost::new(checkpoint, draft, capacity);
        let model_drafter = draft.map(load_draft).transpose().map_err(|error| Error::DraftModel(Box::new(error)))?;
        Ok(Self {
            cache: model.new_cache(capacity),
            model,
            history: Vec::new(),
            prompt_len: 0,
            max_length: 0,
            sampling: Sampling::default(),
            draft: None,
            acceptance: drafting::UNTRIED,
            ngram: NgramOnHost::default(),
            model_drafter,
            stop_tokens: Vec::new(),
            form: None,
            logits: Vec::new(),
        })
    }

    /// Runs the tokens from index `from` on, with `drafts` after them, and confirms the drafts that the model agrees
    /// with.
    fn run(&mut self, from: usize, drafts: &[u32]) -> Result<Step, Error> {
        let vocab = self.model.config().vocab_size;
        let tokens: Vec<u32> = self.history[from..].iter().chain(drafts).copied().collect();
        let rows = drafts.len() + 1;
        self.logits.resize(rows * vocab, 0.0);
        let (taps, mut states) = (self.taps(), Vec::new());
        let wanted = taps.as_ref().map(|after| Taps { after, states: &mut states });
        let logits = &mut self.logits[..rows * vocab];
        let faults = self.model.forward_tapped(&tokens, &mut self.cache, rows, logits, wanted)?;
        let Self { history, prompt_len, max_length, sampling, stop_tokens, form, .. } = self;
        let logits = &self.logits;
        let masks = form.as_mut().map(|matcher| masks(matcher, drafts, vocab));
        let choose = |row: usize, history: &[u32]| {
            let (prompt, output) = history.split_at(*prompt_len);
            let mask = masks.as_ref().map(|masks| masks[row].as_slice());
            sampling.sample_allowed(&logits[row * vocab..][..vocab], mask, prompt, output)
        };
        let tokens = confirm(history, *max_length, stop_tokens, drafts, choose);
        if let Some(matcher) = form {
            matcher.accept(&tokens);
        }
        // Rows after a wrong draft decide nothing, so only faults before them count.
        let known = history.len() - tokens.len() - from;
        if let Some(&fault) = faults.iter().filter(|fault| fault.row < known + tokens.len() - 1).min() {
            self.cache.truncate(0);
            self.history.clear();
            return Err(fault.into());
        }
        let stopped = tokens.last().is_some_and(|token| stop_tokens.contains(token));
        let finished = stopped || history.len() >= *max_length;
        // Drafts that were not confirmed are removed from the cache.
        let kept = self.history.len() - 1;
        self.cache.truncate(kept);
        states.truncate(states.len() / (drafts.len() + known) * (kept - from));
        self.tell_states(from, &states);
        self.form.as_ref().map_or(Ok(()), followed)?;
        Ok(Step { drafted: drafts.len(), by_model: Drafted::default(), finished, tokens })
    }

    /// A step under a form. Proposes the tokens that the form forces; if it forces none, what an n-gram match finds and
    /// the form allows.
    fn step_in_form(&mut self, cached: usize) -> Result<Step, Error> {
        let Some(draft) = self.draft else { return self.run(cached, &[]) };
        let settings = draft.match_settings();
        let form = self.form.as_mut();
        let DraftTokens { tokens: proposed, forced } = DraftTokens::of(draft, &self.history, self.max_length, form);
        let acceptance = if forced { drafting::ONE } else { self.acceptance };
        let drafts = drafting::worthwhile(acceptance, settings.cost(DRAFT_COST), 0, proposed.len() as u32);
        let step = self.run(cached, &proposed[..drafts as usize])?;
        if !forced {
            self.acceptance = learned(self.acceptance, &proposed, &step.tokens);
        }
        Ok(step)
    }

    /// The draft model or head, if it drafts for the sequence.
    fn model_drafter(&mut self) -> Option<&mut ModelOnHost> {
        match self.draft {
            Some(Draft::Model(_)) if self.form.is_none() => self.model_drafter.as_mut(),
            _ => None,
        }
    }

    /// The layers whose hidden states the drafter needs, if it is a head.
    fn taps(&mut self) -> Option<[usize; 3]> {
        self.model_drafter()?.taps()
    }

    /// Gives the drafter the hidden states of the tokens from index `from` on, if it asked for them.
    fn tell_states(&mut self, from: usize, states: &[f32]) {
        let history = std::mem::take(&mut self.history);
        if let Some(drafter) = self.model_drafter().filter(|_| !states.is_empty()) {
            drafter.take_states(&history, from, states);
        }
        self.history = history;
    }

    /// Runs one piece of the prompt that is not the last.
    fn read_piece(&mut self) -> Result<(), Error> {
        let from = self.cache.len();
        let (taps, mut states) = (self.taps(), Vec::new());
        let wanted = taps.as_ref().map(|after| Taps { after, states: &mut states });
        let tokens = &self.history[from..from + PIECE];
        let faults = self.model.forward_tapped(tokens, &mut self.cache, 0, &mut [], wanted)?;
        if let Some(&fault) = faults.iter().min() {
            self.cache.truncate(from);
            return Err(fault.into());
        }
        self.tell_states(from, &states);
        Ok(())
    }

    /// The drafter of this sequence, if any.
    fn drafter(&mut self) -> Option<&mut dyn Drafter<OnHost>> {
        match self.draft? {
            Draft::Ngram(_) => Some(&mut self.ngram),
            Draft::Model(_) => self.model_drafter.as_mut().map(|model| model as _),
        }
    }

    /// The drafts for the next step: the part of the proposal that is worth its rows.
    fn propose(&mut self) -> Result<Vec<u32>, Error> {
        let history = std::mem::take(&mut self.history);
        let max_length = self.max_length;
        let proposal = self.drafter().map(|drafter| drafter.propose(Text { history: &history, max_length }));
        self.history = history;
        let Proposal { mut tokens, count } = proposal.transpose()?.unwrap_or_default();
        tokens.truncate(count);
        Ok(tokens)
    }
}

/// Bytes of memory that this program may use. If the system does not say, the size of the address space.
pub(crate) fn memory() -> u64 {
    let machine = || {
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib << 10)
    };
    // The limit of the container. Without a limit the file says `max`, which does not parse.
    let group = || std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok()?.trim().parse().ok();
    machine().into_iter().chain(group()).min().unwrap_or(isize::MAX as u64)
}

impl Backend for Cpu {
    fn device(&self) -> String {
        "CPU".into()
    }

    fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    fn begin(&mut self, sequence: &Sequence<'_>, progress: &mut PromptProgress<'_>) -> Result<usize, Error> {
        if let Some(draft) = &sequence.draft {
            draft.check_for(self.model_drafter.is_some())?;
        }
        let cached = &self.history[..self.cache.len().min(self.history.len())];
        let mut reused = common_prefix(cached, sequence.prompt);
        self.history = sequence.prompt.to_vec();
        self.prompt_len = sequence.prompt.len();
        self.max_length = sequence.max_length;
        self.sampling = sequence.sampling;
        self.draft = sequence.draft;
        self.acceptance = drafting::UNTRIED;
        if let Some(drafter) = self.drafter() {
            drafter.begin(sequence)?;
        }
        self.stop_tokens = sequence.stop_tokens.to_vec();
        self.form = sequence.form.map(|form| form.matcher());
        if let Some(drafter) = self.model_drafter().filter(|drafter| drafter.taps().is_some()) {
            // A head lacks the hidden states of tokens that the model read without it, so those are read again.
            reused = reused.min(drafter.known(sequence.prompt));
        }
        self.cache.truncate(reused);
        // The last piece is left for the first step, which needs its logits.
        let total = self.history.len() - reused;
        while self.history.len() - self.cache.len() > PIECE {
            self.read_piece()?;
            if progress(self.cache.len() - reused, total).is_break() {
                return Err(Error::Interrupted);
            }
        }
        Ok(reused)
    }

    fn step(&mut self) -> Result<Step, Error> {
        let cached = self.cache.len();
        let decoding = cached + 1 == self.history.len() && self.history.len() > self.prompt_len;
        if decoding && self.form.is_some() {
            return self.step_in_form(cached);
        }
        let drafts = if decoding { self.propose()? } else { Vec::new() };
        let mut step = self.run(cached, &drafts)?;
        if let Some(drafter) = self.drafter() {
            drafter.hear(&mut step);
        }
        Ok(step)
    }

    fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        self.cache.truncate(0);
        self.history.clear();
        let mut logits = vec![0.0; tokens.len() * self.model.config().vocab_size];
        self.model.forward(tokens, &mut self.cache, tokens.len(), &mut logits)?;
        self.cache.truncate(0);
        Ok(logits)
    }
}
