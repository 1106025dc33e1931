//! The GPU backend: the loop that lives on the device.
//!
//! A step is enqueued as a fixed list of launches: forward, sample, accept, and for the next step draft and plan. Each reads what the one before left in
//! device memory, down to the number of rows, so the host enqueues steps ahead of the device without knowing what they will accept,
//! and reads finished tokens from a ring in mapped memory. Once the sequence is finished, steps already enqueued run no rows.

use std::time::{Duration, Instant};

use cuda_std::{Global, Kernel};
use gpu_kernels::drafting::{self, DraftScript};
use gpu_kernels::ngram::{self, NgramMatchMixed, Sequences};
use gpu_kernels::sample::{PROMPTED, Sample, Settings, Split};
use gpu_kernels::step::{
    self, Accept, AcceptAndDraft, DraftState, MAX_DECODE_ROWS, MAX_ROWS, NO_TOKEN, PlanDecode, PlanPrompt, Report,
    Rows, STATE_WORDS, SequenceState,
};
use model::{Checkpoint, Config, Place, Sampling};

use crate::backend::{Backend, PromptProgress, Sequence, Step, common_prefix};
use crate::device::{Buffer, Device, Mapped};
use crate::draft::{NO_THRESHOLD, NgramDraft};
use crate::forward::{Footprint, Forward, RowOutput};
use crate::prefill::Prefill;
use crate::profile::Phase;
use crate::sampler::Sampler;
use crate::weights::DeviceWeights;
use crate::{Error, Progress};

/// Reports in the ring; more than steps are ever in flight.
const RING: u32 = 8;
/// Steps enqueued beyond the one waited for, where nothing else is said.
const RUN_AHEAD: u32 = 2;
/// What drafts add to a decode step: of the streamed 8B shape, 8 rows take 1.09 times as long as one, and 16 rows 1.23 times
/// (`docs/reference/kernels/decode.md`).
pub(crate) const DRAFT_COST: drafting::Cost = drafting::Cost { any: 0, each: drafting::ONE / 64 };
/// A prompt's progress is told after as many of its tokens: the device is waited for then, which is felt by small passes.
const TOLD_AFTER: usize = 512;
/// Most tokens that can end a sequence.
const MOST_STOP_TOKENS: usize = 32;
/// Without a report for this long the device counts as hung. The longest step, a chunk of a prompt, takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Tokens that are proposed position by position, and [`Device::launch`] of the kernel that proposes them.
struct Script {
    tokens: Buffer<i32>,
    launch: unsafe fn(&Device, u32, u32, DraftScript) -> Result<(), Error>,
}

/// Runs sequences on a device.
pub struct Gpu {
    forward: Forward,
    history: Buffer<i32>,
    words: Buffer<u32>,
    sampler: Sampler,
    sampled: Buffer<u32>,
    stop_tokens: Buffer<u32>,
    uses: Buffer<u32>,
    ring: Mapped,
    drafting: Drafting,
    /// Proposed instead of what the n-gram match finds.
    script: Option<Script>,
    run_ahead: u32,
    run: Run,
    /// Tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    /// How many of them, from the first on, came there as part of a prompt.
    prompted: usize,
}

/// The drafting operator's arrays, for a batch of one.
struct Drafting {
    step_idx: Buffer<i64>,
    rows: Buffer<i32>,
    tokens: Buffer<i32>,
    max_length: Buffer<i64>,
    prompt_len: Buffer<i64>,
    decoding: Buffer<i32>,
    workspace: Buffer<u64>,
}

/// The sequence that is running, as far as the host knows.
struct Run {
    sampling: Sampling,
    draft: Option<NgramDraft>,
    max_length: usize,
    stop_count: u32,
    /// Tokens of the history, as of the last report read.
    length: usize,
    /// Most tokens that a step can bring.
    step_rows: u32,
    enqueued: u32,
    read: u32,
    /// The newest token, not in the cache yet.
    newest: Option<u32>,
}

/// As the sampler has them.
pub(crate) fn settings(s: &Sampling) -> Settings {
    Settings {
        seed: s.seed,
        // To the kernels, 0 alone is greedy.
        temperature: if s.is_greedy() { 0.0 } else { s.temperature },
        top_k: s.top_k,
        top_p: s.top_p,
        min_p: s.min_p,
        repetition_penalty: s.repetition_penalty,
        presence_penalty: s.presence_penalty,
        frequency_penalty: s.frequency_penalty,
    }
}

impl Gpu {
    /// Uploads `checkpoint` to `device`, with room for sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// Shapes that the kernels do not cover, a card too small (before anything is loaded), or a driver error.
    pub fn new(
        checkpoint: &Checkpoint,
        device: &Device,
        capacity: usize,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        let config = &checkpoint.config;
        Forward::check(config)?;
        let footprint = Footprint::of(config, capacity, device.has_prefill());
        if let Some(free) = device.free_memory()?
            && footprint.weights + footprint.working > free
        {
            return Err(Error::ModelTooLarge {
                device: device.name().into(),
                weights: footprint.weights,
                cache: footprint.working,
                context: capacity,
                free,
            });
        }
        let weights = DeviceWeights::upload(checkpoint, device, progress)?;
        Self::with_weights(device, config, weights, capacity)
    }

    /// With `weights` that are there already.
    ///
    /// # Errors
    /// As [`Forward::with_room`].
    pub fn with_weights(
        device: &Device,
        config: &Config,
        weights: DeviceWeights,
        capacity: usize,
    ) -> Result<Self, Error> {
        let mut forward = Forward::new(device, config, weights, capacity)?;
        // Where the hardware and the memory are there; otherwise the launches do the same.
        forward.lay_out_stream()?;
        if device.has_prefill() {
            forward.lay_out_prefill()?;
        }
        let workspace = vec![u64::from_ne_bytes([ngram::WORKSPACE_FILL; 8]); ngram::workspace_len(1)];
        Ok(Self {
            history: device.zeroed(capacity)?,
            words: device.zeroed(STATE_WORDS)?,
            sampler: Sampler::new(device, config)?,
            sampled: device.zeroed(MAX_ROWS as usize)?,
            stop_tokens: device.zeroed(MOST_STOP_TOKENS)?,
            uses: device.zeroed(config.vocab_size)?,
            ring: device.mapped(RING as usize * Report::WORDS)?,
            drafting: Drafting {
                step_idx: device.zeroed(1)?,
                rows: device.zeroed(1)?,
                tokens: device.zeroed(MAX_DECODE_ROWS as usize)?,
                max_length: device.zeroed(1)?,
                prompt_len: device.zeroed(1)?,
                decoding: device.upload(&[1])?,
                workspace: device.upload(&workspace)?,
            },
            script: None,
            run_ahead: RUN_AHEAD,
            run: Run {
                sampling: Sampling::default(),
                draft: None,
                max_length: 0,
                stop_count: 0,
                length: 0,
                step_rows: 1,
                enqueued: 0,
                read: 0,
                newest: None,
            },
            cached: Vec::new(),
            prompted: 0,
            forward,
        })
    }

    /// Where a sequence drafts, `tokens[i]` is proposed for its position `i` from now on, whatever its text, by a kernel that the caller brings: for measuring
    /// at a given acceptance.
    ///
    /// # Safety
    /// The kernel keeps to what [`DraftScript`] says of its parameters.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub unsafe fn set_script<K: Kernel<Params = DraftScript>>(&mut self, tokens: &[u32]) -> Result<(), Error> {
        let tokens = self.forward.device().upload(bytemuck::cast_slice::<u32, i32>(tokens))?;
        self.script = Some(Script { tokens, launch: Device::launch::<K> });
        Ok(())
    }

    /// Drafts from the text again.
    pub fn clear_script(&mut self) {
        self.script = None;
    }

    /// How many steps are enqueued beyond the one waited for, at most 2: with 0 the host waits for every step before it enqueues the next. For
    /// measuring.
    pub fn set_run_ahead(&mut self, steps: u32) {
        self.run_ahead = steps.min(RUN_AHEAD);
    }

    fn state(&self) -> SequenceState {
        SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() }
    }

    /// Where the drafting operator puts its proposal; null when nothing drafts.
    fn proposed(&self) -> Global<i32> {
        if self.run.draft.is_some() { self.drafting.tokens.ptr() } else { Default::default() }
    }

    /// Enqueues the prompt from `start` on, in chunks, with the choice of the token after it. Before the last chunk the device is
    /// waited for now and then, so that `progress` is told what is done.
    fn enqueue_prompt(&mut self, start: usize, prompt: &[u32], progress: &mut PromptProgress<'_>) -> Result<(), Error> {
        let prompt_len = prompt.len();
        let mut told = start;
        let chunk = self.forward.prefill().map_or(MAX_ROWS as usize, Prefill::capacity);
        let mut at = start;
        while at < prompt_len {
            let count = (prompt_len - at).min(chunk);
            let last = at + count == prompt_len;
            let output = if last { RowOutput::LogitsFrom(count as u32 - 1) } else { RowOutput::None };
            if self.forward.prefill().is_some() {
                self.enqueue_prefill(at, count, output)?;
                if last {
                    self.enqueue_head(at, count - 1, 1)?;
                    self.enqueue_choice(1, 0, false, prompt_len)?;
                }
            } else {
                self.enqueue_chunk(at, count, output)?;
                if last {
                    self.enqueue_choice(count as u32, count as u32 - 1, false, prompt_len)?;
                }
            }
            at += count;
            self.cached.extend_from_slice(&prompt[self.cached.len()..at]);
            self.prompted = at;
            if !last && at - told >= TOLD_AFTER {
                told = at;
                self.forward.device().synchronize()?;
                if progress(at - start, prompt_len - start).is_break() {
                    return Err(Error::Interrupted);
                }
            }
        }
        Ok(())
    }

    /// Makes `count` tokens of the history the `rows` of a pass.
    fn plan(&self, rows: Rows, at: usize, count: usize) -> Result<(), Error> {
        let plan = PlanPrompt { rows, state: self.state(), start: at as u32, count: count as u32 };
        // SAFETY: the history holds the prompt, and callers' rows have room.
        unsafe { self.forward.device().launch::<step::plan_prompt>(1, 0, plan) }
    }

    /// Enqueues a pass over at most [`MAX_ROWS`] tokens of the history.
    fn enqueue_chunk(&self, at: usize, count: usize, output: RowOutput) -> Result<(), Error> {
        self.plan(self.forward.rows(), at, count)?;
        self.forward.enqueue(count as u32, (at + count) as u32, output)
    }

    /// Enqueues a pass over up to [`Prefill::capacity`] tokens of the history.
    fn enqueue_prefill(&mut self, at: usize, count: usize, output: RowOutput) -> Result<(), Error> {
        if let Some(prefill) = self.forward.prefill() {
            self.plan(prefill.rows(), at, count)?;
        }
        self.forward.enqueue_prefill(at, count, output)
    }

    /// Enqueues the logits of at most [`MAX_ROWS`] rows of the prefill that began at position `at`, from its row `first` on.
    fn enqueue_head(&self, at: usize, first: usize, count: usize) -> Result<(), Error> {
        self.plan(self.forward.rows(), at + first, count)?;
        self.forward.enqueue_head(first, count as u32)
    }

    /// Enqueues the sampler over the rows from `first_row` on, the acceptance of what it chose for a history of at most `length` tokens, and the plan of the
    /// next step. After a decode step in one launch the best tokens are known, and a greedy choice needs no sampler.
    fn enqueue_choice(&mut self, most_rows: u32, first_row: u32, decoded: bool, length: usize) -> Result<(), Error> {
        let rows = self.forward.rows();
        let s = &self.run.sampling;
        let best = self.forward.stream().filter(|_| decoded && s.takes_best());
        let sample = Sample {
            rows,
            logits: self.forward.logits().ptr(),
            uses: self.uses.ptr(),
            sampled: self.sampled.ptr_mut(),
            settings: settings(s),
            split: Split::default(),
            vocab: self.forward.config().vocab_size as u32,
            first_row,
        };
        // SAFETY: buffers of self, sized as the parameter block says.
        unsafe {
            if best.is_none() {
                self.sampler.enqueue(most_rows - first_row, sample)?;
            }
        }
        let best = best.map_or(Default::default(), |stream| stream.best());
        let length = (length + (most_rows - first_row) as usize).min(self.run.max_length);
        self.enqueue_next(self.accept(best, first_row, decoded), length)?;
        self.run.enqueued += 1;
        Ok(())
    }

    /// The acceptance of what was chosen: of the `best` tokens, or where that is null of the sampled ones.
    fn accept(&self, best: Global<u64>, first_row: u32, decoded: bool) -> Accept {
        Accept {
            rows: self.forward.rows(),
            state: self.state(),
            sampled: self.sampled.ptr(),
            best,
            stop_tokens: self.stop_tokens.ptr(),
            uses: self.uses.ptr_mut(),
            draft: DraftState {
                step_idx: self.drafting.step_idx.ptr_mut(),
                rows: self.drafting.rows.ptr_mut(),
                proposed: if decoded { self.proposed() } else { Default::default() },
            },
            ring: self.ring.ptr_mut(),
            ring_reports: RING,
            stop_count: self.run.stop_count,
            max_length: self.run.max_length as u32,
            first_row,
        }
    }

    /// Enqueues one decode step, which was planned: forward, sample, accept, and draft and plan for the next.
    fn enqueue_decode(&mut self) -> Result<(), Error> {
        let most_rows = self.run.step_rows;
        // Tokens that the history may have by then.
        let in_flight = (self.run.enqueued - self.run.read) * most_rows;
        let length = (self.run.length + in_flight as usize).min(self.run.max_length);
        // The newest token is the last of at most `length`; drafts follow it.
        let end = (length + most_rows as usize - 1).min(self.forward.capacity());
        // SAFETY: whatever was enqueued last ended with a plan, which zeroes the counters.
        unsafe { self.forward.enqueue_decode(most_rows, end as u32)? };
        self.enqueue_choice(most_rows, 0, true, length)
    }

    /// Enqueues what stands between two steps: acceptance, the proposal of drafts for a history of then at most `length` tokens, and the planning of the
    /// next rows.
    fn enqueue_next(&self, accept: Accept, length: usize) -> Result<(), Error> {
        let device = self.forward.device();
        let drafting = &self.drafting;
        let counters = self.forward.stream().map(|stream| stream.counters());
        let plan = PlanDecode {
            rows: self.forward.rows(),
            state: self.state(),
            drafts: self.proposed(),
            draft_rows: if self.run.draft.is_some() { drafting.rows.ptr() } else { Default::default() },
            cost: self.run.draft.map_or(Default::default(), |draft| draft.cost(DRAFT_COST)),
            counters: counters.map_or(Default::default(), |c| c.ptr_mut()),
            counter_count: counters.map_or(0, |c| c.len() as u32),
        };
        let (length, multiprocessors) = (length as u32, device.multiprocessors());
        // SAFETY: buffers of self, sized as the parameter blocks say, for a batch of one; a workspace that only this stream uses; the history has room for
        // `max_length` tokens.
        unsafe {
            if let (Some(draft), None) = (self.run.draft, &self.script)
                && ngram::together::<i32>(1, length, multiprocessors)
            {
                // What the host has seen, or has put there, is older than the launches that are under way.
                let all = AcceptAndDraft { accept, draft: self.ngram(draft), plan, settled: self.run.length as u32 };
                return if device.capabilities().early_launches {
                    device.launch_early::<step::accept_and_draft>(1, AcceptAndDraft::SHARED_BYTES, all)
                } else {
                    device.launch::<step::accept_and_draft>(1, AcceptAndDraft::SHARED_BYTES, all)
                };
            }
            device.launch::<step::accept>(1, 0, accept)?;
            match (self.run.draft, &self.script) {
                (None, _) => {}
                (Some(draft), Some(script)) => {
                    let proposal = DraftScript {
                        state: self.state(),
                        script: script.tokens.ptr(),
                        drafts: drafting.tokens.ptr_mut(),
                        rows: drafting.rows.ptr_mut(),
                        script_len: script.tokens.len() as u32,
                        most: draft.tokens,
                        max_length: self.run.max_length as u32,
                    };
                    (script.launch)(device, 1, 0, proposal)?;
                }
                (Some(draft), None) => {
                    let blocks = ngram::blocks::<i32>(1, length, multiprocessors);
                    device.launch::<ngram::ngram_match_mixed_i32>(blocks, ngram::SHARED_BYTES, self.ngram(draft))?;
                }
            }
            device.launch::<step::plan_decode>(1, 0, plan)
        }
    }

    /// The n-gram match over the history.
    fn ngram(&self, draft: NgramDraft) -> NgramMatchMixed<i32> {
        let drafting = &self.drafting;
        NgramMatchMixed {
            sequences: Sequences {
                input_ids: self.history.ptr(),
                input_ids_len: drafting.prompt_len.ptr(),
                pre_ids: self.history.ptr(),
                step_idx: drafting.step_idx.ptr(),
                max_dec_len: drafting.max_length.ptr(),
                seq_lens_decoder: drafting.decoding.ptr(),
                seq_lens_this_time: drafting.rows.ptr_mut(),
                draft_tokens: drafting.tokens.ptr_mut(),
                workspace: drafting.workspace.ptr_mut(),
                input_ids_stride: 0,
                pre_ids_stride: self.history.len() as u32,
                draft_tokens_stride: MAX_DECODE_ROWS,
                batch: 1,
                max_ngram_size: draft.max,
                threshold: NO_THRESHOLD,
            },
            max_draft_tokens: draft.tokens as i32,
            min_ngram_size: draft.min,
        }
    }

    /// Microseconds that drafting, planning and acceptance take beside a step, the mean of `repeats`: they run without steps between them, on the
    /// sequence that was begun, which is of no more use then.
    ///
    /// # Errors
    /// A driver error.
    pub fn time_around_step(&self, repeats: u32) -> Result<f64, Error> {
        let timer = self.forward.device().timer()?;
        let device = self.forward.device().clone();
        let next = || self.enqueue_next(self.accept(Default::default(), 0, true), self.run.length);
        // Each launch once before they are recorded.
        next()?;
        let mut graph = device.capture(|| (0..repeats).try_for_each(|_| next()))?;
        // The first launch of a graph takes it to the device.
        graph.launch()?;
        Ok(timer.time(|| graph.launch())? * 1e3 / f64::from(repeats))
    }

    /// Waits for the next report in the ring.
    fn wait(&self) -> Result<usize, Error> {
        let at = (self.run.read % RING) as usize * Report::WORDS;
        let start = Instant::now();
        let mut spins = 0u32;
        while self.ring.load(at + Report::STAMP) != self.run.read + 1 {
            std::hint::spin_loop();
            spins = spins.wrapping_add(1);
            // A failed kernel would never report; ask the driver now and then.
            if spins.is_multiple_of(1 << 14) {
                self.forward.device().check()?;
                if start.elapsed() > PATIENCE {
                    return Err(Error::Stalled { seconds: PATIENCE.as_secs() });
                }
            }
        }
        Ok(at)
    }
}

impl Backend for Gpu {
    fn device(&self) -> String {
        self.forward.device().name().into()
    }

    fn capacity(&self) -> usize {
        self.forward.capacity()
    }

    fn begin(&mut self, sequence: &Sequence<'_>, progress: &mut PromptProgress<'_>) -> Result<usize, Error> {
        sequence.check(self.forward.capacity(), self.forward.config().vocab_size)?;
        self.forward.device().synchronize()?;
        let prompt = sequence.prompt;
        let mut reused = common_prefix(&self.cached, prompt);
        if self.forward.prefill().is_some() {
            // What was generated is part of a prompt now, and its bits must be those of one.
            reused = reused.min(self.prompted);
        }
        self.cached.truncate(reused);
        let tokens: Vec<i32> = prompt.iter().map(|&t| t as i32).collect();
        self.history.write(0, &tokens)?;
        let mut words = [0; STATE_WORDS];
        words[SequenceState::LENGTH] = prompt.len() as u32;
        words[SequenceState::ACCEPTANCE] = drafting::UNTRIED;
        self.words.write(0, &words)?;
        let mut uses = vec![0; self.uses.len()];
        for &token in prompt {
            uses[token as usize] = PROMPTED;
        }
        self.uses.write(0, &uses)?;
        let stops = &sequence.stop_tokens[..sequence.stop_tokens.len().min(MOST_STOP_TOKENS)];
        self.stop_tokens.write(0, stops)?;
        self.drafting.max_length.write(0, &[sequence.max_length as i64])?;
        self.ring.clear();
        self.run = Run {
            sampling: sequence.sampling,
            draft: sequence.draft,
            max_length: sequence.max_length,
            stop_count: stops.len() as u32,
            length: prompt.len(),
            step_rows: 1 + sequence.draft.map_or(0, |draft| draft.tokens),
            enqueued: 0,
            read: 0,
            newest: None,
        };
        self.enqueue_prompt(reused, prompt, progress)?;
        Ok(reused)
    }

    fn step(&mut self) -> Result<Step, Error> {
        assert!(self.run.length > 0, "a step of no sequence");
        while self.run.enqueued <= self.run.read + self.run_ahead {
            self.enqueue_decode()?;
        }
        let at = self.wait()?;
        let word = |i: usize| self.ring.load(at + i);
        let count = word(Report::COUNT) as usize;
        let tokens: Vec<u32> = (0..count).map(|i| word(Report::TOKENS + i)).collect();
        if tokens.contains(&NO_TOKEN) {
            // Nothing of this sequence is of use to another.
            self.cached.clear();
            // Of the newest token that there is.
            let position = self.run.length + tokens.len() - 2;
            return Err(Error::NotFinite { what: Place::Logits.to_string(), position });
        }
        let step = Step { drafted: word(Report::DRAFTED) as usize, finished: word(Report::FINISHED) != 0, tokens };
        self.run.read += 1;
        self.run.length += step.tokens.len();
        for &token in &step.tokens {
            self.cached.extend(self.run.newest.replace(token));
        }
        Ok(step)
    }

    fn note_phases(&mut self) -> Result<(), Error> {
        // A trace has room for a step.
        self.run_ahead = 0;
        self.forward.begin_trace()
    }

    fn take_phases(&mut self) -> Result<Vec<Phase>, Error> {
        let blocks = self.forward.take_trace()?;
        let first = blocks.first().map(Vec::as_slice).unwrap_or_default();
        Ok(first.iter().map(|&(mark, time)| (mark.work(), time)).collect())
    }

    fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        self.forward.device().synchronize()?;
        self.cached.clear();
        let history: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        self.history.write(0, &history)?;
        let vocab = self.forward.config().vocab_size;
        let mut logits = vec![0.0; tokens.len() * vocab];
        let piece = MAX_ROWS as usize;
        let chunk = self.forward.prefill().map_or(piece, Prefill::capacity);
        for (i, out) in logits.chunks_mut(piece * vocab).enumerate() {
            let (at, count) = (i * piece, out.len() / vocab);
            if self.forward.prefill().is_some() {
                let first = at % chunk;
                if first == 0 {
                    self.enqueue_prefill(at, (tokens.len() - at).min(chunk), RowOutput::LogitsFrom(0))?;
                }
                self.enqueue_head(at - first, first, count)?;
            } else {
                self.enqueue_chunk(at, count, RowOutput::LogitsFrom(0))?;
            }
            self.forward.logits().read(0, out)?;
        }
        Ok(logits)
    }
}
