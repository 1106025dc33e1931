//! The GPU backend: the loop that lives on the device.
//!
//! A step is enqueued as a fixed list of launches: forward, sample, accept, and for the next step draft and plan. Each
//! launch reads what the one before it left in device memory, even the number of rows. So the host can enqueue steps
//! ahead of the device without knowing what they will accept. It reads the tokens from a ring in mapped memory. Steps
//! that are enqueued beyond the end of a sequence run no rows. A sequence whose answer has a form is run otherwise: see
//! [`form`].

mod draft_weights;
mod form;
mod prompt;

use std::time::{Duration, Instant};

use cuda_std::{Global, Kernel};
use gpu_kernels::drafting::DraftScript;
use gpu_kernels::sample::{Sample, Settings, Split};
use gpu_kernels::step::{
    Accept, DraftState, MAX_DECODE_ROWS, MAX_ROWS, NO_TOKEN, PlanDecode, Report, Rows, STATE_WORDS, SequenceState,
};
use model::{Checkpoint, Config, Place, Sampling};

use crate::backend::{Backend, Drafted, PromptProgress, Sequence, Step};
use crate::device::{Buffer, Device, Mapped, Pinned};
use crate::draft::{Draft, DraftCheckpoint};
use crate::drafter::{Between, Drafter, ModelDrafter, NgramDrafter, OnDevice, Passes, Proposals, ScriptDrafter};
use crate::forward::{Footprint, Forward, RowOutput};
use crate::masks::Masks;
use crate::prefill::Prefill;
use crate::profile::Phase;
use crate::sampler::Sampler;
use crate::weight_storage::WeightStorage;
use crate::weights::DeviceWeights;
use crate::{Error, Progress};

pub use self::draft_weights::DraftWeights;

/// Reports that the ring holds: more than there are ever steps in flight.
pub(crate) const RING: u32 = 8;
/// Steps that are enqueued beyond the one that the host waits for, by default.
const RUN_AHEAD: u32 = 2;
/// Tokens of a prompt between two reports of its progress. The host waits for the device before each report, which
/// costs small passes noticeable time.
const TOLD_AFTER: usize = 512;
/// Most stop tokens of a sequence: a lane of a warp compares with each.
const MOST_STOP_TOKENS: usize = 32;
/// The device counts as hung if it reports nothing for this long. The longest step, a chunk of a prompt, takes
/// milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs sequences on a device, one at a time.
pub struct Gpu {
    forward: Forward,
    history: Buffer<i32>,
    words: Buffer<u32>,
    sampler: Sampler,
    sampled: Buffer<u32>,
    stop_tokens: Buffer<u32>,
    uses: Buffer<u32>,
    ring: Mapped,
    masks: Masks,
    /// `[MAX_DECODE_ROWS]`: for the next step under a form, how many rows it has, then its drafts.
    form_drafts: Pinned<i32>,
    proposals: Proposals,
    ngram: NgramDrafter,
    /// If it is set, it proposes in place of every other drafter.
    script: Option<ScriptDrafter>,
    model: Option<ModelDrafter>,
    run_ahead: u32,
    run: Run,
    /// Whether `run` can go on: whatever was enqueued last ended with a plan for its next step.
    can_step: bool,
    /// Tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    /// How many of `cached`, from the first on, were read as part of a prompt.
    prompted: usize,
}

/// The sequence that is running, as far as the host knows.
struct Run {
    sampling: Sampling,
    draft: Option<Draft>,
    max_length: usize,
    stop_count: u32,
    /// Tokens of the history after the last report that was read.
    length: usize,
    /// Most rows of a step, and so most tokens that it can bring.
    step_rows: u32,
    enqueued: u32,
    read: u32,
    /// The newest token, which is not in the cache yet.
    newest: Option<u32>,
    /// Set if the answer has a form.
    form: Option<form::Following>,
}

/// The drafter for a sequence with the setting `draft`. A script comes before all others.
fn drafter<'a>(
    draft: Option<Draft>,
    script: &'a mut Option<ScriptDrafter>,
    model: &'a mut Option<ModelDrafter>,
    ngram: &'a mut NgramDrafter,
) -> Option<&'a mut dyn Drafter<OnDevice>> {
    match (draft?, script) {
        (_, Some(script)) => Some(script),
        (Draft::Model(_), _) => model.as_mut().map(|model| model as _),
        (Draft::Ngram(_), _) => Some(ngram),
    }
}

/// The sampler's settings for `s`.
pub(crate) fn settings(s: &Sampling) -> Settings {
    Settings {
        seed: s.seed,
        // To the kernels, only a temperature of 0 is greedy.
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
        Self::with_draft_model(checkpoint, None, device, capacity, progress)
    }

    /// The model on the device.
    pub fn forward(&self) -> &Forward {
        &self.forward
    }

    /// As [`new`](Self::new), also with a draft model or head, if there is one.
    ///
    /// # Errors
    /// As [`new`](Self::new); a draft model with another vocabulary, or a head that was made for another model.
    pub fn with_draft_model(
        checkpoint: &Checkpoint,
        draft: Option<&DraftCheckpoint>,
        device: &Device,
        capacity: usize,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        let config = &checkpoint.config;
        Forward::check(config)?;
        if let Some(draft) = draft {
            draft.check_for(checkpoint)?;
            draft.check_shapes().map_err(|error| Error::DraftModel(Box::new(error)))?;
        }
        let plain = Footprint::of(config, capacity, device.has_prefill());
        let beside = draft.map(|draft| draft.footprint(capacity, device)).transpose()?;
        let fits = |of_model: Footprint, beside: Option<Footprint>| {
            let Some(left) = of_model.left_on(device, capacity)? else { return Ok(()) };
            match beside {
                Some(Footprint { weights, working: cache, .. }) if weights + cache > left => {
                    let device = device.name().into();
                    Err(Error::DraftModelTooLarge { device, weights, cache, context: capacity, left })
                }
                _ => Ok(()),
            }
        };
        let kept = WeightStorage::of(checkpoint, device)?;
        let all_of_it = kept.filter(|kept| fits(plain.keeping(config, Some(*kept)), beside).is_ok());
        let kept = all_of_it.or(kept.map(WeightStorage::alone));
        let footprint = plain.keeping(config, kept);
        fits(footprint, beside)?;
        let (of_model, of_draft) = (footprint.weights, beside.map_or(0, |of| of.weights));
        let all = of_model + of_draft;
        let told = &mut |done: u64, _: u64| progress(done.min(of_model), all);
        let weights = DeviceWeights::upload(checkpoint, device, kept, || fits(plain, beside), told)?;
        let load_draft = |draft| {
            let told = &mut |done: u64, _: u64| progress(of_model + done.min(of_draft), all);
            // By then the model's weights are on the device, and its cache is not allocated yet.
            let fits = |of_draft| fits(Footprint { weights: 0, ..footprint }, Some(of_draft));
            DraftWeights::upload(draft, config, device, capacity, &fits, told).map_err(|error| match error {
                Error::DraftModelTooLarge { .. } => error,
                error => Error::DraftModel(Box::new(error)),
            })
        };
        let draft = draft.map(load_draft).transpose()?;
        Self::with_all_weights(device, config, weights, draft, capacity)
    }

    /// As [`new`](Self::new), with `weights` that are on the device already.
    ///
    /// # Errors
    /// As [`Forward::with_room`].
    pub fn with_weights(
        device: &Device,
        config: &Config,
        weights: DeviceWeights,
        capacity: usize,
    ) -> Result<Self, Error> {
        Self::with_all_weights(device, config, weights, None, capacity)
    }

    /// As [`with_weights`](Self::with_weights), also with the weights of a draft model or head, which are on the device
    /// already too. Its tokens must be the model's.
    ///
    /// # Errors
    /// As [`with_weights`](Self::with_weights).
    pub fn with_all_weights(
        device: &Device,
        config: &Config,
        weights: DeviceWeights,
        draft: Option<DraftWeights>,
        capacity: usize,
    ) -> Result<Self, Error> {
        let mut forward = Forward::new(device, config, weights, capacity)?;
        let taps = draft.as_ref().and_then(DraftWeights::taps);
        let mut draft = draft.map(|draft| draft.passes(&forward, capacity)).transpose()?;
        // What must have memory has it. Now for what makes passes faster, if the hardware can do it and there is memory
        // left. Without it, the unfused path computes the same.
        for forward in std::iter::once(&mut forward).chain(draft.as_mut().and_then(Passes::model)) {
            forward.prepare_decode()?;
            forward.prepare_tree()?;
            if device.has_prefill() {
                forward.prepare_prefill()?;
            }
        }
        if let Some(Passes::Head(head)) = &mut draft {
            head.prepare()?;
        }
        if let Some(taps) = taps {
            forward.keep_states(taps)?;
        }
        Ok(Self {
            history: device.zeroed(capacity)?,
            words: device.zeroed(STATE_WORDS)?,
            sampler: Sampler::new(device, config)?,
            sampled: device.zeroed(MAX_ROWS as usize)?,
            stop_tokens: device.zeroed(MOST_STOP_TOKENS)?,
            uses: device.zeroed(config.vocab_size)?,
            ring: device.mapped(RING as usize * Report::WORDS)?,
            masks: Masks::new(device, config.vocab_size, MAX_DECODE_ROWS as usize)?,
            form_drafts: device.pinned(MAX_DECODE_ROWS as usize)?,
            proposals: Proposals::new(device)?,
            ngram: NgramDrafter::new(device)?,
            script: None,
            model: draft.map(|draft| ModelDrafter::new(draft, &forward)).transpose()?,
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
                form: None,
            },
            can_step: false,
            cached: Vec::new(),
            prompted: 0,
            forward,
        })
    }

    /// From now on, `tokens[i]` is proposed for position `i` of every sequence that drafts, whatever its text. The
    /// caller's kernel `K` proposes it. For measuring at a given acceptance.
    ///
    /// # Safety
    /// The kernel keeps to what [`DraftScript`] says of its parameters.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub unsafe fn set_script<K: Kernel<Params = DraftScript>>(&mut self, tokens: &[u32]) -> Result<(), Error> {
        self.script = Some(ScriptDrafter::new::<K>(self.forward.device(), tokens)?);
        Ok(())
    }

    /// Removes the script, so that the other drafters propose again.
    pub fn clear_script(&mut self) {
        self.script = None;
    }

    /// Sets how many steps are enqueued beyond the one that the host waits for, at most 2. With 0 the host waits for
    /// every step before it enqueues the next. For measuring.
    pub fn set_run_ahead(&mut self, steps: u32) {
        self.run_ahead = steps.min(RUN_AHEAD);
    }

    fn state(&self) -> SequenceState {
        SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() }
    }

    /// Where the drafting operator puts its proposal; null when nothing drafts.
    fn proposed(&self) -> Global<i32> {
        if self.run.draft.is_some() { self.proposals.tokens.ptr() } else { Default::default() }
    }

    /// The rows of a decode step, which may be a tree, if `decoded`. Otherwise those of a pass over a prompt, which
    /// follow each other.
    fn rows_of(&self, decoded: bool) -> Rows {
        if decoded { self.forward.step_rows() } else { self.forward.rows() }
    }

    /// Enqueues what follows a pass: the sampler over the rows from `first_row` on, the acceptance of what it chose,
    /// for a history of at most `length` tokens, and the plan of the next step. A decode step in one launch leaves the
    /// best token of each row, so a greedy choice after it needs no sampler.
    fn enqueue_choice(&mut self, most_rows: u32, first_row: u32, decoded: bool, length: usize) -> Result<(), Error> {
        self.enqueue_masks(first_row)?;
        let rows = self.rows_of(decoded);
        let s = &self.run.sampling;
        let takes_best = decoded && s.takes_best() && self.run.form.is_none();
        let best = self.forward.decode().filter(|_| takes_best);
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
        let best = best.map_or(Default::default(), |decode| decode.best());
        let length = (length + (most_rows - first_row) as usize).min(self.run.max_length);
        let accept = self.accept(best, first_row, decoded);
        self.run.enqueued += 1;
        if self.run.form.is_some() {
            return self.enqueue_behind(accept, length);
        }
        self.enqueue_next(accept, length)?;
        Ok(())
    }

    /// Parameters of the acceptance: of the `best` tokens, or of the sampled ones if `best` is null.
    fn accept(&self, best: Global<u64>, first_row: u32, decoded: bool) -> Accept {
        Accept {
            rows: self.rows_of(decoded),
            state: self.state(),
            sampled: self.sampled.ptr(),
            best,
            stop_tokens: self.stop_tokens.ptr(),
            uses: self.uses.ptr_mut(),
            draft: DraftState {
                step_idx: self.proposals.last.ptr_mut(),
                rows: self.proposals.rows.ptr_mut(),
                proposed: if decoded && self.run.form.is_none() { self.proposed() } else { Default::default() },
            },
            ring: self.ring.ptr_mut(),
            ring_reports: RING,
            stop_count: self.run.stop_count,
            max_length: self.run.max_length as u32,
            first_row,
        }
    }

    /// Enqueues one decode step, whose rows are planned by then: forward, sample, accept, and draft and plan for the
    /// next step.
    fn enqueue_decode(&mut self) -> Result<(), Error> {
        let most_rows = self.run.step_rows;
        // The history's length by then, if each step in flight brings all the tokens that it can.
        let in_flight = (self.run.enqueued - self.run.read) * most_rows;
        let length = (self.run.length + in_flight as usize).min(self.run.max_length);
        // The newest token is the last of at most `length`; drafts follow it.
        let end = (length + most_rows as usize - 1).min(self.forward.capacity());
        // SAFETY: whatever was enqueued last ended with a plan, which zeroes the counters: `can_step` says so.
        unsafe { self.forward.enqueue_decode(most_rows, end as u32)? };
        self.enqueue_choice(most_rows, 0, true, length)
    }

    /// Enqueues what comes between two steps: acceptance, the proposal of drafts, and the plan of the next rows. The
    /// history then has at most `length` tokens.
    fn enqueue_next(&mut self, accept: Accept, length: usize) -> Result<(), Error> {
        let plan = PlanDecode {
            rows: self.forward.step_rows(),
            state: self.state(),
            drafts: self.proposed(),
            draft_rows: if self.run.draft.is_some() { self.proposals.rows.ptr() } else { Default::default() },
            cost: Default::default(),
            counters: self.forward.counters(),
        };
        let Self { forward, proposals, ngram, script, model, run, history, .. } = self;
        // The addresses in `accept` and `plan` are of buffers of self, sized as their parameter blocks say, for a batch
        // of one; the history has room for `max_length` tokens.
        let between = Between {
            forward,
            accept,
            plan,
            proposals,
            capacity: history.len() as u32,
            length: length as u32,
            // What the host has read in reports, or has written itself, is older than the launches that are under way.
            settled: run.length as u32,
        };
        match drafter(run.draft, script, model, ngram) {
            Some(drafter) => drafter.propose(between),
            None => {
                between.enqueue_accept()?;
                between.enqueue_plan(Default::default())
            }
        }
    }

    /// The drafter for the running sequence.
    fn drafter(&mut self) -> Option<&mut dyn Drafter<OnDevice>> {
        drafter(self.run.draft, &mut self.script, &mut self.model, &mut self.ngram)
    }

    /// Measures what runs around a step: the mean time of acceptance, drafting and planning, in microseconds, over
    /// `repeats`. They run without steps between them, on the sequence that was begun, which cannot go on afterwards.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If no sequence was begun: a bug of the caller.
    pub fn time_around_step(&mut self, repeats: u32) -> Result<f64, Error> {
        assert!(std::mem::take(&mut self.can_step), "drafts for no sequence");
        let timer = self.forward.device().timer()?;
        let device = self.forward.device().clone();
        let mut next = || self.enqueue_next(self.accept(Default::default(), 0, true), self.run.length);
        // Everything is launched once before it is recorded: a kernel's first launch may have to load it.
        next()?;
        let mut graph = device.capture(|| (0..repeats).try_for_each(|_| next()))?;
        // The first launch of a graph uploads it to the device.
        graph.launch()?;
        Ok(timer.time(|| graph.launch())? * 1e3 / f64::from(repeats))
    }

    /// Waits for the next report in the ring.
    fn wait(&self) -> Result<usize, Error> {
        let at = (self.run.read % RING) as usize * Report::WORDS;
        let start = Instant::now();
        let mut spins = 0u32;
        while self.ring.load(at + Report::FLAG) != self.run.read + 1 {
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

    /// Runs the next step of the sequence that was begun.
    fn step_of_run(&mut self) -> Result<Step, Error> {
        self.catch_up()?;
        while self.run.form.is_none() && self.run.enqueued <= self.run.read + self.run_ahead {
            self.enqueue_decode()?;
        }
        let at = self.wait()?;
        let word = |i: usize| self.ring.load(at + i);
        let count = word(Report::COUNT) as usize;
        let tokens: Vec<u32> = (0..count).map(|i| word(Report::TOKENS + i)).collect();
        if tokens.contains(&NO_TOKEN) {
            // No other sequence may reuse this one's cache, nor meet its numbers behind its own end.
            self.cached.clear();
            self.forward.clear_cache()?;
            // The position of the newest token, after which none could be chosen.
            let position = self.run.length + tokens.len() - 2;
            return Err(Error::NotFinite { what: Place::Logits.to_string(), position });
        }
        let (drafted, finished) = (word(Report::DRAFTED) as usize, word(Report::FINISHED) != 0);
        let mut step = Step { tokens, drafted, by_model: Drafted::default(), finished };
        if let Some(drafter) = self.drafter() {
            drafter.hear(&mut step);
        }
        self.run.read += 1;
        self.run.length += step.tokens.len();
        for &token in &step.tokens {
            self.cached.extend(self.run.newest.replace(token));
        }
        self.follow(&step)?;
        Ok(step)
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
        if let Some(draft) = &sequence.draft {
            draft.check_for(self.model.is_some())?;
        }
        sequence.check(self.forward.capacity(), self.forward.config().vocab_size)?;
        let stops = sequence.stop_tokens;
        if stops.len() > MOST_STOP_TOKENS {
            return Err(Error::StopTokens { count: stops.len(), most: MOST_STOP_TOKENS });
        }
        self.can_step = false;
        let reused = self.begin_checked(sequence, progress)?;
        self.can_step = true;
        Ok(reused)
    }

    fn step(&mut self) -> Result<Step, Error> {
        // After a failure too, it stays false.
        assert!(std::mem::take(&mut self.can_step), "a step of no sequence");
        let step = self.step_of_run()?;
        self.can_step = true;
        Ok(step)
    }

    fn note_phases(&mut self, noted: bool) -> Result<(), Error> {
        if !noted {
            self.run_ahead = RUN_AHEAD;
            self.forward.end_trace();
            return Ok(());
        }
        // A trace holds one step, so steps are waited for one by one.
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
        // A sequence cannot go on: its history and its planned rows are overwritten.
        self.can_step = false;
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
