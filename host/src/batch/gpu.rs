//! A batch on a device: the rows of many sequences in each pass, over shared pages.
//!
//! The host makes everything for a step: rows, tiles, choices, changed page tables. All of it goes to the device in one
//! copy ([`upload`]). The device moves pages, runs the passes ([`passes`]) and chooses tokens, which come back through
//! mapped memory. While a step runs, the host makes the next one; if a row's token is not chosen yet, the device itself
//! puts it into the row. So the host waits once for each step, and the device does not wait for the host.
//!
//! To know which tokens a form allows, the host needs the token before. So the choices of a pass over such rows are
//! enqueued later, when the step before has ended, while the pass already runs.

mod checked;
mod enqueue;
mod head;
mod lists;
mod load;
mod masking;
mod moves;
mod notes;
mod packing;
mod passes;
mod proposing;
mod sizes;
mod upload;
mod uses;

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use gpu_kernels::drafting::Cost;
use gpu_kernels::logprobs::Wanted;
use gpu_kernels::step::NO_TOKEN;
use half::bf16;
use model::{Config, Fault, Place};

use self::lists::Ready;
use self::masking::MaskJobs;
use self::moves::Mover;
use self::notes::Notes;
use self::packing::Packing;
use self::passes::{RowPass, SequenceRows, Widths, cut};
use self::proposing::ProposalJobs;
use self::sizes::{BatchSizes, LEAST_ROWS};
use self::upload::Upload;
use self::uses::TokenUses;
use super::backend::{BatchBackend, Outcome, Rate, Start};
use super::draft::{Drafters, Drafting, Drafts};
use super::limits::{Costs, Limits};
use super::plan::{Plan, Slot, Work};
use super::run::BatchOptions;
use super::running::Running;
use crate::Error;
use crate::device::{Device, Mapped, Marker, Timer};
use crate::forward::Forward;
use crate::masks::Masks;
use crate::sampler::Sampler;
use crate::tuning::{DRAFT_COST, PackedFrom, first_guess};
use crate::weights::DeviceWeights;

/// Bytes to leave for the kernels of many sequences, in addition to weights and activations.
const DECODE_BYTES: u64 = 512 << 20;

/// Runs batches on a device.
pub struct GpuBatch {
    forward: Forward,
    limits: Limits,
    widths: Widths,
    drafters: Drafters,
    slots: Vec<Running>,
    mover: Mover,
    /// Only if there are passes that read packed pages.
    packing: Option<Packing>,
    upload: Upload,
    uses: TokenUses,
    notes: Notes,
    masks: Masks,
    mask_jobs: MaskJobs,
    proposals: ProposalJobs,
    /// Slots of the last begun step whose choices are put off: see [`BatchBackend::put_off`].
    put_off: Vec<Slot>,
    sampler: Sampler,
    sampled: Mapped,
    /// Choices, and notes, that one step has room for. There is room for two steps, which they use in turn.
    choices: usize,
    /// For each slot, the number of its newest choice in the last begun step.
    newest: Vec<u32>,
    /// Steps that were begun and have not ended, two at most.
    under_way: VecDeque<UnderWay>,
    /// Which of the two rooms the next step uses.
    turn: usize,
    /// One for each of the two rooms.
    clocks: [Clocks; 2],
    swaps: Rate,
    rows: Rate,
    /// When the last step was done, if none was begun since.
    done: Option<Instant>,
    /// How long the device has had nothing to do between steps in all.
    idle: Duration,
}

/// The timers of a step, and the marker of its end.
struct Clocks {
    moves: Timer,
    rows: Timer,
    done: Marker,
}

impl Clocks {
    fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { moves: device.timer()?, rows: device.timer()?, done: device.marker()? })
    }
}

/// A step that was begun.
struct UnderWay {
    work: Vec<Work>,
    drafts: Vec<Drafts>,
    passes: Vec<Ready>,
    turn: usize,
    /// Pages that move from or to the host tier.
    moved: usize,
    /// Rows that the timer covers.
    timed_rows: usize,
    /// Slots that other sequences have taken since.
    left: Vec<Slot>,
    /// The pass that was enqueued without its choices, if any. No later pass of the step is enqueued then.
    halted: Option<usize>,
    /// Whether every sequence with rows has a form.
    only_forms: bool,
    /// Whether the step had room for drafts.
    drafts_fit: bool,
    /// Slots whose choices were put off.
    put_off: Vec<Slot>,
}

impl GpuBatch {
    /// A batch with weights that are on the device. Prompts run in passes of their own if the device
    /// [has](Device::has_prefill) kernels for them. The bits with and without such passes differ, as they do between
    /// cards.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn with_weights(
        device: &Device,
        config: &Config,
        weights: DeviceWeights,
        context: usize,
        options: BatchOptions,
    ) -> Result<Self, Error> {
        let sizes = BatchSizes::new(device, context, &options);
        let prompts_apart = sizes.prompt_rows().is_some();
        let has_decode = Self::has_decode(device);
        let pages = sizes.pages(config, device, &options, weights.e4m3().is_some(), Self::decode_bytes(device))?;
        let mut forward = Forward::with_room(device, config, weights, sizes.room(pages))?;
        if has_decode && forward.prepare_decode()? && prompts_apart {
            forward.prepare_batched()?;
        }
        if let Some(rows) = sizes.prompt_rows() {
            forward.prepare_prefill_of(rows)?;
        }
        let widths = Widths {
            prompt: forward.prefill().map_or(0, |prefill| prefill.capacity()),
            decode: sizes.decode_rows(),
            tile: forward.tile_rows(),
        };
        let tier = sizes.host_pages(config, &options, pages)?;
        let tuned = device.capabilities().tuning().packed_from;
        let packed_from = options.packed_pages.map_or(tuned, |pages| PackedFrom { pages, mean: 0 });
        let single_warps = forward.single_warps_from() as usize;
        // If the user asks for a host tier, it is pinned at once. So it is on the emulator, so that every run is the
        // same.
        let is_there = options.swap_tokens.is_some() || device.is_emulator();
        let mut mover = Mover::new(device, forward.cache(), tier, is_there)
            .map_err(|error| BatchSizes::no_tier(config, tier, error.to_string()))?;
        let limits = sizes.limits(config, device, &options, [pages, mover.host_pages(false)]);
        // Guesses until there are measurements.
        let row = first_guess::row(config.weight_bytes(2) as f64, prompts_apart);
        let swap = first_guess::swap(mover.page_bytes() as f64);
        let choices = sizes.rows + sizes.sequences;
        Ok(Self {
            limits,
            widths,
            drafters: Drafters::new(options.draft),
            slots: vec![Running::default(); sizes.sequences],
            packing: forward.packed_pages().map(|_| Packing::new(pages, sizes.sequences, packed_from, single_warps)),
            upload: Upload::new(device, sizes.upload_words(pages, tier))?,
            uses: TokenUses::new(device, sizes.sequences, config.vocab_size, sizes.use_changes())?,
            notes: Notes::new(device, config.vocab_size, 2 * choices)?,
            masks: Masks::new(device, config.vocab_size, sizes.decode_rows().max(sizes.sequences))?,
            mask_jobs: MaskJobs::new(device, sizes.sequences, config.vocab_size, options.mask_wait)?,
            proposals: ProposalJobs::new(sizes.sequences),
            put_off: Vec::new(),
            sampler: Sampler::new(device, config)?,
            sampled: device.mapped(2 * choices)?,
            choices,
            newest: vec![0; sizes.sequences],
            under_way: VecDeque::new(),
            turn: 0,
            clocks: [Clocks::new(device)?, Clocks::new(device)?],
            swaps: Rate::guess(swap),
            rows: Rate::guess(row),
            done: None,
            idle: Duration::ZERO,
            mover,
            forward,
        })
    }

    /// Whether the decode kernel runs steps of few rows. On Hopper it does so only if prompts have passes of their own;
    /// on other devices all passes have the same bits.
    fn has_decode(device: &Device) -> bool {
        device.has_decode_kernel() && (device.has_prefill() || !device.capabilities().has_gemms())
    }

    /// Bytes that the decode kernel takes beside the weights.
    fn decode_bytes(device: &Device) -> u64 {
        if Self::has_decode(device) { DECODE_BYTES } else { 0 }
    }

    /// The model on the device.
    pub fn forward(&self) -> &Forward {
        &self.forward
    }

    /// Fills the cache with repetitions of `pattern`, for measurements.
    ///
    /// # Errors
    /// A driver error.
    pub fn fill_cache(&mut self, pattern: &[bf16]) -> Result<(), Error> {
        self.packing = self.packing.take().map(Packing::afresh);
        self.forward.fill_cache(pattern)
    }

    fn vocab(&self) -> usize {
        self.forward.config().vocab_size
    }

    /// Makes the passes of a step leave hidden states if a head may draft from them, and notes the rows that leave
    /// them.
    fn note_states(&mut self, plan: &Plan, passes: &[RowPass]) {
        let Some(model) = self.drafters.model.as_mut().filter(|model| model.is_head()) else { return };
        let wanted = plan.work.len() < self.limits.draft_rows as usize;
        self.forward.want_states(wanted);
        for pass in passes {
            let are_left = wanted && (pass.prompt || self.forward.leaves_states(pass.len() as u32));
            for (slot, positions) in pass.runs() {
                model.note_states(slot, positions, are_left);
            }
        }
    }

    /// Looks for drafts for the sequences that got tokens in a step, if the next step may have room for drafts.
    fn look_for_drafts(&mut self, step: &UnderWay) {
        let fit = step.work.len() < self.limits.draft_rows as usize;
        let sampled: HashSet<Slot> = step.work.iter().filter(|work| work.samples).map(|work| work.slot).collect();
        let is_there = |slot: &Slot| fit && sampled.contains(slot) && !step.left.contains(slot);
        let there = (0..).zip(&mut self.slots).filter(|(slot, _)| is_there(slot));
        let (with_form, without): (Vec<_>, Vec<_>) = there.partition(|(_, running)| running.form.is_some());
        self.drafters.look(without, with_form.len(), draft_cost(&self.forward));
    }

    /// Takes note of the sequences that start. What was kept for the sequences that had these slots before is dropped.
    fn take_up(&mut self, plan: &Plan, starts: &[Start<'_>]) {
        self.drafters.forget_left(plan);
        for step in &mut self.under_way {
            step.left.extend(plan.started.iter().map(|started| started.slot));
        }
        for (started, start) in plan.started.iter().zip(starts) {
            let running = Running::new(start);
            self.uses.begin(started.slot, start, &running);
            self.slots[started.slot as usize] = running;
            self.mask_jobs.forget(started.slot);
            self.proposals.forget(started.slot);
        }
    }

    /// How many passes come first that are over prompts, and how many rows they have. If prompts have no passes of
    /// their own, all passes count.
    fn prompts_of(&self, passes: &[Ready]) -> (usize, usize) {
        let of_prompts = passes.iter().take_while(|ready| ready.pass.prompt || !self.limits.prompts_apart);
        of_prompts.fold((0, 0), |(passes, rows), ready| (passes + 1, rows + ready.pass.len()))
    }
}

impl BatchBackend for GpuBatch {
    fn device(&self) -> String {
        self.forward.device().name().into()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn host_pages(&mut self, are_wanted: bool) -> u32 {
        self.limits.host_pages = self.mover.host_pages(are_wanted) as u32;
        self.limits.host_pages
    }

    fn costs(&self) -> Costs {
        Costs { swap_page: self.swaps.each(), row: self.rows.each() }
    }

    fn idle(&self) -> Duration {
        self.idle
    }

    fn runs_ahead(&self) -> bool {
        true
    }

    fn may_draft(&self) -> bool {
        self.drafters.are_worthwhile()
    }

    fn begin(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<(), Error> {
        assert!(self.under_way.len() < 2, "two steps are under way");
        checked::check_plan(plan, starts, &self.limits, self.vocab());
        self.take_up(plan, starts);
        if !plan.cleared.is_empty() {
            self.forward.clear_pages(&plan.cleared)?;
        }
        let only_forms = plan.work.iter().all(|work| self.slots[work.slot as usize].form.is_some());
        let drafting = |work: &Work| {
            let running = &self.slots[work.slot as usize];
            // A prompt's last token has no drafts, because its row runs in another pass.
            let may_draft = work.rows == 1 && work.start as usize >= running.prompt;
            match running.form {
                _ if !may_draft || self.mask_jobs.are_pending(work.slot) => Drafting::No,
                None => Drafting::Here(running),
                Some(_) => Drafting::Elsewhere(running),
            }
        };
        let waits = self.mask_jobs.patience(only_forms).is_none();
        let made = |work: &Work| self.proposals.take(work.slot, waits);
        let drafts = self.drafters.propose(plan, draft_cost(&self.forward), drafting, made)?;
        let rows_of = |(work, drafts): (&Work, &Drafts)| self.rows_of(work, drafts.run());
        let rows: Vec<SequenceRows> = plan.work.iter().zip(&drafts).map(rows_of).collect();

        checked::check_rows(&rows, &self.limits, self.choices);
        let cut: Vec<RowPass> = cut(&rows, self.widths);
        self.note_states(plan, &cut);
        let changes = self.list_changes(plan, &cut)?;
        let mut passes: Vec<Ready> = Vec::new();
        let turn = self.turn;
        let (mut choices, mut notes) = (turn * self.choices, turn * self.choices);
        for pass in cut {
            let ready = self.list_pass(pass, choices, notes);
            choices += ready.pass.chosen.len();
            notes += ready.wanted.len();
            passes.push(ready);
        }
        let done = self.done.take();
        if self.under_way.is_empty() {
            self.idle += done.map_or(Duration::ZERO, |done| done.elapsed());
        }
        self.upload.send()?;
        self.enqueue_changes(&changes)?;
        // The cost of a prompt's row is measured only if many rows run together.
        let (prompts, prompt_rows) = self.prompts_of(&passes);
        let timed = prompt_rows >= LEAST_ROWS;
        if timed {
            self.clocks[turn].rows.start()?;
        }
        self.put_off.clear();
        let mut halted = self.enqueue_passes(&passes[..prompts], 0, only_forms)?;
        if timed {
            self.clocks[turn].rows.stop()?;
        }
        if halted.is_none() {
            halted = self.enqueue_passes(&passes, prompts, only_forms)?;
        }
        if halted.is_none() {
            self.clocks[turn].done.set()?;
        }
        self.turn = 1 - turn;
        self.under_way.push_back(UnderWay {
            work: plan.work.clone(),
            drafts,
            passes,
            turn,
            moved: plan.swap_out.len() + plan.swap_in.len(),
            // If the device waits for the host among these passes, they are not timed.
            timed_rows: if timed && halted.is_none_or(|pass| pass >= prompts) { prompt_rows } else { 0 },
            left: Vec::new(),
            halted,
            only_forms,
            drafts_fit: plan.draft_threshold > 0,
            put_off: self.put_off.clone(),
        });
        Ok(())
    }

    fn put_off(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.put_off)
    }

    fn rewrite(&mut self, slot: Slot, at: usize, tokens: &[u32]) {
        assert!(self.under_way.is_empty(), "a step is under way");
        self.slots[slot as usize].rewrite(at, tokens);
    }

    fn end(&mut self) -> Result<Vec<Outcome>, Error> {
        let step = self.under_way.pop_front().expect("a step was begun");
        let clocks = &self.clocks[step.turn];
        clocks.done.wait()?;
        self.done = Some(Instant::now());
        // Copies within the device take little time compared with moves from and to the host.
        if step.moved > 0 {
            // The rate is for saving a page and bringing it back, so one direction counts half.
            self.swaps.add(clocks.moves.elapsed_ms()? / 1e3, step.moved.div_ceil(2));
        }
        if step.timed_rows > 0 {
            self.rows.add(clocks.rows.elapsed_ms()? / 1e3, step.timed_rows);
        }

        // The chosen tokens, and the notes, for each work.
        let mut chosen = vec![Vec::new(); step.work.len()];
        let mut notes = vec![Vec::new(); step.work.len()];
        for ready in &step.passes {
            for (i, choice) in ready.pass.chosen.iter().enumerate() {
                chosen[choice.of].push(self.sampled.load(ready.first + i));
            }
            for (i, wanted) in ready.wanted.iter().enumerate() {
                let choice = ready.pass.chosen[wanted[Wanted::CHOICE] as usize];
                notes[choice.of].push(self.notes.read(ready.first_note + i, wanted[Wanted::TOP]));
            }
        }
        let mut outcomes = Vec::new();
        let brings = |work: &Work| work.samples && !step.put_off.contains(&work.slot);
        for (i, (work, drafts)) in step.work.iter().zip(&step.drafts).enumerate().filter(|(_, of)| brings(of.0)) {
            // If no token could be chosen, any token stands for it: the sequence has failed and ends.
            let mut lost = None;
            let missing = chosen[i].iter().position(|&token| token == NO_TOKEN);
            chosen[i].iter_mut().filter(|token| **token == NO_TOKEN).for_each(|token| *token = 0);
            let tokens = if step.left.contains(&work.slot) {
                // The step was foreseen, so there is one token.
                chosen[i].clone()
            } else {
                self.proposals.forget(work.slot);
                let running = &mut self.slots[work.slot as usize];
                let tokens = running.confirm(drafts, |row, _| chosen[i][row]);
                self.uses.take_in(work.slot, running, &tokens);
                // Before other threads look for proposals, as they lock the form meanwhile.
                lost = running.lost();
                self.mask_jobs.forget(work.slot);
                if let Some(draft) = self.drafters.settings().filter(|_| step.drafts_fit) {
                    self.proposals.begin(work.slot, running, draft);
                }
                tokens
            };
            // The notes after a wrong draft are dropped.
            let mut logprobs = std::mem::take(&mut notes[i]);
            logprobs.truncate(tokens.len());
            let fault = missing.filter(|&row| row < tokens.len()).map(|row| Fault {
                place: Place::Logits,
                position: (work.start + work.rows) as usize - 1 + row,
                row,
            });
            let by_model = drafts.by_model(&tokens);
            outcomes.push(Outcome { slot: work.slot, tokens, logprobs, drafted: drafts.count, by_model, fault, lost });
        }
        self.take_up_halted()?;
        self.look_for_drafts(&step);
        Ok(outcomes)
    }
}

/// What drafts add to the time of a step of one row. If sequences share a step, it has several rows anyway.
fn draft_cost(forward: &Forward) -> Cost {
    Cost { any: forward.draft_cost().any, ..DRAFT_COST }
}

impl Drop for GpuBatch {
    fn drop(&mut self) {
        // A step that nobody waited for may still use memory that is freed next.
        let _ = self.forward.device().synchronize();
    }
}
