//! The batch engine: takes requests and returns answers, step by step.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use model::{Checkpoint, Config};

use super::backend::{BatchBackend, Logprobs, Start};
use super::cpu::CpuBatch;
use super::gpu::GpuBatch;
use super::limits::{Counts, Limits};
use super::plan::SequenceId;
use super::steps::{Sequences, Steps};
use super::{Outcome, PAGE_TOKENS};
use crate::backend::Drafted;
use crate::draft::Draft;
use crate::engine::Text;
use crate::forward::MOST_PASS_ROWS;
use crate::{Error, Finish, LoadOptions, Progress, Request};

/// How a batch runs. The device decides what is none here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchOptions {
    /// Most sequences that generate at the same time.
    pub sequences: Option<u32>,
    /// Most rows of a step.
    pub rows: Option<u32>,
    /// Tokens that the cache holds, for all sequences together.
    pub cache_tokens: Option<usize>,
    /// Tokens that the host tier holds.
    pub swap_tokens: Option<usize>,
    /// How drafts are made. None: no drafts.
    pub draft: Option<Draft>,
    /// A step has drafts only while it has fewer rows than this.
    pub draft_rows: u32,
    /// [Packing](gpu_kernels::packed) of pages begins when a step has to read this many full pages, however long its
    /// sequences are. 0: always; `usize::MAX`: never. None: as is fastest on the card.
    pub packed_pages: Option<usize>,
    /// How long a step waits for masks after the pass that they are for has ended. Then it goes on without the missing
    /// ones. By default a card does not wait. The emulator waits for all masks, because the same threads make them and
    /// run its passes.
    pub mask_wait: Option<Duration>,
}

impl BatchOptions {
    /// The default for the rows of a step below which it has drafts. A decode step of this many rows costs the same as
    /// one of a single row.
    pub const DRAFT_ROWS: u32 = gpu_kernels::step::MAX_DECODE_ROWS;
    /// Most sequences that a step has room for on any device.
    pub const MOST_SEQUENCES: u32 = MOST_PASS_ROWS;
    /// Default for sequences at the same time, on the CPU.
    const CPU_SEQUENCES: u32 = 32;
    /// Default for rows of a step, on the CPU, whose GEMMs are in blocks of 64.
    const CPU_ROWS: u32 = 128;
    /// Rows of a step of a draft model, which is how much of a text it reads at once.
    const DRAFTER_ROWS: u32 = 2048;
    /// Default for bytes of the cache, on the CPU.
    const CPU_CACHE: usize = 1 << 30;

    /// The options for the batch of a draft model, which follows every sequence that may draft at the same time. Its
    /// cache holds `cache_tokens` tokens.
    pub(super) fn of_drafter(&self, cache_tokens: Option<usize>) -> Self {
        Self {
            sequences: Some(self.draft_rows.min(self.sequences.unwrap_or(u32::MAX)).clamp(1, Self::MOST_SEQUENCES)),
            rows: Some(Self::DRAFTER_ROWS),
            cache_tokens,
            swap_tokens: Some(0),
            draft: None,
            draft_rows: 0,
            packed_pages: Some(usize::MAX),
            mask_wait: None,
        }
    }

    /// The limits of a batch on the CPU.
    pub(super) fn cpu_limits(&self, config: &Config, context: usize) -> Limits {
        let sequences = self.sequences.unwrap_or(Self::CPU_SEQUENCES).clamp(1, Self::MOST_SEQUENCES);
        let one = context.div_ceil(PAGE_TOKENS);
        let room = Self::CPU_CACHE / (config.kv_bytes_per_token(size_of::<f32>()) * PAGE_TOKENS).max(1);
        let pages = self.cache_tokens.map_or(room.min(one * sequences as usize), |tokens| tokens / PAGE_TOKENS);
        let pages = pages.max(one);
        let host_pages = self.swap_tokens.map_or(pages, |tokens| tokens / PAGE_TOKENS);
        Limits {
            context,
            sequences,
            generating: sequences,
            rows: self.rows.unwrap_or(Self::CPU_ROWS).max(sequences),
            page_tokens: PAGE_TOKENS,
            pages: u32::try_from(pages).unwrap_or(u32::MAX),
            host_pages: u32::try_from(host_pages).unwrap_or(u32::MAX),
            drafts: self.draft.map_or(0, |draft| draft.tokens()),
            draft_rows: self.draft_rows,
            prompt_rows: 0,
            prompt_share: 0,
            prompts_apart: false,
            tiles: &[],
        }
    }
}

/// A request for a batch.
#[derive(Clone, Debug)]
pub struct Job {
    /// The caller's number for the job.
    pub id: u64,
    /// The request. Its `draft` is ignored, because drafting is set for the whole batch.
    pub request: Request,
    /// How many of the likeliest tokens are wanted with log-probabilities, beside each chosen token. None: no
    /// log-probabilities.
    pub logprobs: Option<u32>,
}

/// A finished job.
#[derive(Debug)]
pub struct Done {
    /// The caller's number for the job.
    pub id: u64,
    /// Its answer. An error concerns only this job.
    pub answer: Result<Answer, Error>,
}

impl Done {
    /// The result of a job that wants no token.
    fn empty(job: &Job) -> Self {
        let prompt_tokens = job.request.prompt.len();
        let (text, tokens, logprobs, finish) = (String::new(), Vec::new(), Vec::new(), Finish::Length);
        Self { id: job.id, answer: Ok(Answer { text, tokens, logprobs, finish, prompt_tokens }) }
    }
}

/// The answer to a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The text, without end tokens and stop texts.
    pub text: String,
    /// All generated tokens, an end token included.
    pub tokens: Vec<u32>,
    /// The log-probabilities for each of `tokens`, if they were asked for.
    pub logprobs: Vec<Logprobs>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

/// What a batch has done so far, and its present state.
#[derive(Clone, Copy, Debug, Default)]
pub struct Metrics {
    /// Tokens of the prompts of finished jobs.
    pub prompt_tokens: u64,
    /// Tokens generated, in jobs finished and unfinished.
    pub generated_tokens: u64,
    /// Drafts that were tried.
    pub drafted: u64,
    /// Drafts that were confirmed.
    pub accepted: u64,
    /// The share of a draft model or head in these drafts.
    pub by_model: Drafted,
    /// Times that a sequence's next tokens were chosen. Each gives one token, and one more for each right draft.
    pub choices: u64,
    /// Sequences that run at present.
    pub running: usize,
    /// Pages of the cache that are in use at present.
    pub pages_in_use: usize,
    /// Pages of the cache in all.
    pub pages: u32,
    /// What the scheduler counted.
    pub counts: Counts,
    /// Time spent in [`Batch::step`].
    pub busy: Duration,
    /// Time in which the device had nothing to do between steps.
    pub idle: Duration,
}

impl Metrics {
    /// The sums of these and those of another device.
    pub fn and(self, other: Self) -> Self {
        let (a, b) = (self.counts, other.counts);
        Self {
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            generated_tokens: self.generated_tokens + other.generated_tokens,
            drafted: self.drafted + other.drafted,
            accepted: self.accepted + other.accepted,
            by_model: self.by_model + other.by_model,
            choices: self.choices + other.choices,
            running: self.running + other.running,
            pages_in_use: self.pages_in_use + other.pages_in_use,
            pages: self.pages + other.pages,
            counts: Counts {
                steps: a.steps + b.steps,
                rows: a.rows + b.rows,
                shared_tokens: a.shared_tokens + b.shared_tokens,
                restored_tokens: a.restored_tokens + b.restored_tokens,
                swapped: a.swapped + b.swapped,
                dropped: a.dropped + b.dropped,
                put_off: a.put_off + b.put_off,
                most_running: a.most_running + b.most_running,
                most_pages: a.most_pages + b.most_pages,
            },
            busy: self.busy + other.busy,
            idle: self.idle + other.idle,
        }
    }
}

/// Runs jobs on one device.
pub struct Batch {
    checkpoint: Checkpoint,
    backend: Box<dyn BatchBackend>,
    steps: Steps,
    /// The jobs that have not ended.
    jobs: HashMap<SequenceId, Active>,
    /// Results of jobs that wanted no token, until the next step.
    empty: Vec<Done>,
    metrics: Metrics,
}

struct Active {
    job: Job,
    /// Most tokens of prompt and answer together.
    max_length: usize,
    text: Text,
    tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
}

impl Batch {
    /// Loads `checkpoint` for a batch. `progress` is called with the bytes loaded so far and in all.
    ///
    /// # Errors
    /// As [`crate::Engine::load`].
    pub fn load(
        checkpoint: Checkpoint,
        load: LoadOptions,
        options: BatchOptions,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        if let Some(draft) = &options.draft {
            draft.check()?;
        }
        let draft = load.draft_model.as_ref();
        if let Some(draft) = draft {
            draft.check_for(&checkpoint)?;
        }
        let contexts = load.batch_contexts(&checkpoint.config, options.cache_tokens)?;
        let backend: Box<dyn BatchBackend> = match load.device.open(&load.options)? {
            Some(device) => {
                // The emulator would take all of the host's memory for a long context, so it gets the shortest.
                let contexts = if device.is_emulator() { &contexts[contexts.len() - 1..] } else { &contexts };
                Box::new(GpuBatch::load(&checkpoint, draft, &device, contexts, options, progress)?)
            }
            None => {
                let limits = options.cpu_limits(&checkpoint.config, load.context_for(&checkpoint.config)?);
                let backend = CpuBatch::new(&checkpoint, limits, options.draft)?;
                match draft {
                    None => Box::new(backend),
                    Some(draft) => Box::new(backend.drafted_by(&checkpoint, draft, &options)?),
                }
            }
        };
        Ok(Self::with_backend(checkpoint, backend))
    }

    /// Makes a batch that runs on `backend`, which must have been made for `checkpoint`.
    pub fn with_backend(checkpoint: Checkpoint, backend: Box<dyn BatchBackend>) -> Self {
        Self {
            checkpoint,
            steps: Steps::new(&*backend),
            jobs: HashMap::new(),
            empty: Vec::new(),
            metrics: Metrics { pages: backend.limits().pages, ..Metrics::default() },
            backend,
        }
    }

    /// The name of the device, for a person to read.
    pub fn device(&self) -> String {
        self.backend.device()
    }

    /// Most tokens of prompt and answer together.
    pub fn context(&self) -> usize {
        self.backend.limits().context
    }

    /// Whether more jobs should be submitted, so that no step has less to do than it could.
    pub fn has_room(&self) -> bool {
        self.steps.scheduler().has_room()
    }

    /// Says whether more jobs may come; at first they may. If not, the last prompts do not wait for others to be read
    /// together with.
    pub fn expect_more(&mut self, more: bool) {
        self.steps.expect_more(more);
    }

    /// Whether all submitted jobs are finished.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.empty.is_empty()
    }

    /// What the batch has done so far, and its present state.
    pub fn metrics(&self) -> Metrics {
        let scheduler = self.steps.scheduler();
        Metrics {
            counts: scheduler.counts(),
            running: scheduler.running(),
            pages_in_use: scheduler.pages_in_use(),
            idle: self.backend.idle(),
            ..self.metrics
        }
    }

    /// Adds a job.
    ///
    /// # Errors
    /// The prompt is empty, does not fit or has a token outside the vocabulary, or a setting is out of range. The batch
    /// goes on without the job.
    pub fn submit(&mut self, job: Job) -> Result<(), Error> {
        let request = &job.request;
        if request.prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let context = self.context();
        if request.prompt.len() >= context {
            let most = self.checkpoint.config.max_position_embeddings;
            return Err(Error::PromptTooLong { prompt: request.prompt.len(), context, most });
        }
        request.check(self.checkpoint.config.vocab_size)?;
        if request.max_tokens == 0 {
            self.empty.push(Done::empty(&job));
            return Ok(());
        }
        let max_length = context.min(request.prompt.len().saturating_add(request.max_tokens));
        let id = self.steps.add(request.prompt.clone(), max_length);
        let text = Text::new(self.checkpoint.tokenizer.stream(), &request.stop);
        let active = Active { text, job, max_length, tokens: Vec::new(), logprobs: Vec::new() };
        self.jobs.insert(id, active);
        Ok(())
    }

    /// Runs a [step](Steps::step) and returns the jobs that it finished.
    ///
    /// # Errors
    /// A device error. The batch cannot go on.
    pub fn step(&mut self) -> Result<Vec<Done>, Error> {
        if self.jobs.is_empty() {
            return Ok(std::mem::take(&mut self.empty));
        }
        let begun = Instant::now();
        let end_tokens = self.checkpoint.generation.eos_token_ids.as_slice();
        let outcomes = self.steps.step(&mut *self.backend, &mut Jobs { active: &self.jobs, end_tokens })?;
        // Behind what may fail, so that none of them is lost.
        let mut done = std::mem::take(&mut self.empty);
        for (id, outcome) in outcomes {
            // None if the sequence has ended in the step before.
            let Some(active) = self.jobs.get_mut(&id) else { continue };
            let metrics = &mut self.metrics;
            metrics.generated_tokens += outcome.tokens.len() as u64;
            metrics.drafted += outcome.drafted as u64;
            metrics.accepted += outcome.tokens.len().saturating_sub(1) as u64;
            metrics.by_model = metrics.by_model + outcome.by_model;
            metrics.choices += 1;
            let end = match (outcome.fault, outcome.lost.clone()) {
                (Some(fault), _) => Err(fault.into()),
                (None, Some(reason)) => Err(Error::FormLost { reason }),
                (None, None) => match active.take(outcome, end_tokens) {
                    Some(finish) => Ok(finish),
                    None => continue,
                },
            };
            if matches!(end, Err(Error::NotFinite { .. })) {
                self.steps.fail(id);
            } else {
                self.steps.finish(id);
            }
            let Some(active) = self.jobs.remove(&id) else { continue };
            self.metrics.prompt_tokens += active.job.request.prompt.len() as u64;
            done.push(active.done(end));
        }
        self.metrics.busy += begun.elapsed();
        Ok(done)
    }
}

/// What backends need to know about jobs.
struct Jobs<'j> {
    active: &'j HashMap<SequenceId, Active>,
    end_tokens: &'j [u32],
}

impl Sequences for Jobs<'_> {
    fn start<'a>(&'a self, id: SequenceId, tokens: &'a [u32]) -> Start<'a> {
        let Active { job: Job { request, logprobs, .. }, max_length, .. } = &self.active[&id];
        Start {
            tokens,
            prompt: request.prompt.len(),
            max_length: *max_length,
            sampling: request.sampling,
            stop_tokens: if request.ignore_end { &[] } else { self.end_tokens },
            logprobs: *logprobs,
            form: request.form.as_ref(),
        }
    }
}

impl Active {
    /// Adds the next tokens to the answer. Returns why the answer ends, if it does.
    fn take(&mut self, outcome: Outcome, end_tokens: &[u32]) -> Option<Finish> {
        let mut logprobs = outcome.logprobs.into_iter();
        for token in outcome.tokens {
            self.tokens.push(token);
            self.logprobs.extend(logprobs.next());
            if !self.job.request.ignore_end && end_tokens.contains(&token) {
                return Some(Finish::Stop);
            }
            self.text.push(token);
            if self.text.stopped {
                return Some(Finish::Stop);
            }
        }
        let length = self.job.request.prompt.len() + self.tokens.len();
        (length >= self.max_length).then_some(Finish::Length)
    }

    fn done(mut self, end: Result<Finish, Error>) -> Done {
        self.text.finish();
        let prompt_tokens = self.job.request.prompt.len();
        let (text, tokens, logprobs) = (self.text.all, self.tokens, self.logprobs);
        Done { id: self.job.id, answer: end.map(|finish| Answer { text, tokens, logprobs, finish, prompt_tokens }) }
    }
}
