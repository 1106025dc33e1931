//! A batch on the CPU: `model`'s reference forward pass over shared pages.

mod head;

use std::collections::HashSet;
use std::time::Instant;

use model::{Checkpoint, Config, CpuModel, Fault, KvPages, Row, Taps};
use rayon::prelude::*;

use self::head::{HeadBatch, KeptStates};
use super::backend::{BatchBackend, Logprobs, Outcome, Rate, Start};
use super::draft::{Drafters, Drafting, Drafts, ModelDrafter};
use super::limits::{Costs, Limits};
use super::plan::{self, Page, Plan, Work};
use super::run::BatchOptions;
use super::running::Running;
use crate::Error;
use crate::cpu::{DRAFT_COST, decoded_bytes, memory};
use crate::draft::{Draft, DraftCheckpoint, DraftTokens, masks, plain_pass_bytes};

/// Runs batches on the CPU.
pub struct CpuBatch {
    model: CpuModel,
    limits: Limits,
    drafters: Drafters,
    /// If a head drafts: after how many layers its hidden states are taken, and where they are kept.
    states: Option<([usize; 3], KeptStates)>,
    pages: KvPages,
    host: KvPages,
    slots: Vec<Slot>,
    logits: Vec<f32>,
    swaps: Rate,
    rows: Rate,
    /// The outcomes of the step that was begun.
    outcomes: Vec<Outcome>,
}

/// A running sequence, with its page table.
#[derive(Clone, Default)]
struct Slot {
    running: Running,
    table: Vec<Page>,
    /// A number that was not finite in a row from which no token is chosen.
    fault: Option<Fault>,
}

/// What the next tokens of a sequence are chosen from.
struct Choice<'a> {
    number: u32,
    slot: &'a mut Slot,
    drafts: Drafts,
    /// The logits of its newest token's row and of its drafts' rows.
    logits: &'a [f32],
    /// The faults of its rows.
    faults: &'a [Fault],
    /// The number of the row after its newest token's. This is the row of the first draft.
    known: usize,
}

impl Choice<'_> {
    /// Chooses the tokens. A row has `vocab` logits.
    fn decide(self, vocab: usize) -> Outcome {
        let Self { number, slot, drafts, logits, faults, known } = self;
        let Running { prompt, sampling, logprobs, .. } = slot.running;
        let row = |i: usize| &logits[i * vocab..][..vocab];
        let masks = slot.running.matcher().map(|mut matcher| masks(&mut matcher, drafts.run(), vocab));
        let tokens = slot.running.confirm(&drafts, |i, history| {
            let (prompt, output) = history.split_at(prompt);
            let mask = masks.as_ref().map(|masks| masks[i].as_slice());
            sampling.sample_allowed(row(i), mask, prompt, output)
        });
        let of = |top| tokens.iter().enumerate().map(|(i, &token)| Logprobs::of(row(i), token, top)).collect();
        let logprobs = logprobs.map_or(Vec::new(), of);
        // Rows after a wrong draft decide nothing, so only faults before them count.
        let decisive = faults.iter().filter(|fault| fault.row < known + tokens.len() - 1);
        let fault = slot.fault.or(decisive.min().copied());
        let lost = slot.running.lost();
        let by_model = drafts.by_model(&tokens);
        Outcome { slot: number, tokens, logprobs, drafted: drafts.count, by_model, fault, lost }
    }
}

impl CpuBatch {
    /// A batch within `limits`, with drafts as `draft` says. If a model is to draft, `drafted_by`
    /// adds it.
    ///
    /// # Errors
    /// A checkpoint that lacks a weight, or has one that is NaN or infinite; a cache larger than memory.
    pub fn new(checkpoint: &Checkpoint, limits: Limits, draft: Option<Draft>) -> Result<Self, Error> {
        Self::beside(0, checkpoint, limits, draft)
    }

    /// As [`new`](Self::new), where other models take so many bytes of memory.
    fn beside(others: u64, checkpoint: &Checkpoint, limits: Limits, draft: Option<Draft>) -> Result<Self, Error> {
        checkpoint.check_finite(&|_| {})?;
        let model = CpuModel::new(checkpoint)?;
        let store = |pages: u32| KvPages::new(model.config(), pages as usize, limits.page_tokens);
        let page = checkpoint.config.kv_bytes_per_token(size_of::<f32>()) * limits.page_tokens;
        check_memory(page, limits.pages as usize + limits.host_pages as usize, others + decoded_bytes(checkpoint))?;
        let page = page as f64;
        Ok(Self {
            pages: store(limits.pages),
            host: store(limits.host_pages),
            slots: vec![Slot::default(); limits.sequences as usize],
            logits: Vec::new(),
            // Guesses, until there are measurements: copies at 5 GB/s, there and back; and for a row, reading all
            // weights at 10 GB/s.
            swaps: Rate::guess(2.0 * page / 5e9),
            rows: Rate::guess(checkpoint.cpu_bytes() as f64 / 10e9),
            model,
            limits,
            drafters: Drafters::new(draft),
            states: None,
            outcomes: Vec::new(),
        })
    }

    /// Adds a model or a head that drafts for `checkpoint` where the settings say so.
    ///
    /// # Errors
    /// As [`new`](Self::new), for the model that drafts. Also if a head was made for another model.
    pub(super) fn drafted_by(
        mut self,
        checkpoint: &Checkpoint,
        draft: &DraftCheckpoint,
        options: &BatchOptions,
    ) -> Result<Self, Error> {
        let limits = options.of_drafter(None).cpu_limits(draft.config(), self.limits.context);
        let of_draft = |error| Error::DraftModel(Box::new(error));
        let others = decoded_bytes(checkpoint) + self.cache_bytes(&checkpoint.config);
        let backend: Box<dyn BatchBackend> = match draft {
            DraftCheckpoint::Model(draft) => Box::new(Self::beside(others, draft, limits, None).map_err(of_draft)?),
            DraftCheckpoint::Eagle3(head) => {
                let states = KeptStates::default();
                self.states = Some((head.taps(&checkpoint.config)?, states.clone()));
                let (context, sequences) = (limits.context, limits.sequences as usize);
                Box::new(HeadBatch::new(head, checkpoint, states, context, sequences).map_err(of_draft)?)
            }
        };
        let config = &checkpoint.config;
        self.drafters.model = Some(ModelDrafter::new(backend, config, draft, (plain_pass_bytes(config, 0), 0)));
        Ok(self)
    }

    /// Bytes of the cache and what is kept aside of it.
    fn cache_bytes(&self, config: &Config) -> u64 {
        let pages = u64::from(self.limits.pages) + u64::from(self.limits.host_pages);
        pages * (config.kv_bytes_per_token(size_of::<f32>()) * self.limits.page_tokens) as u64
    }

    /// Executes all of a plan but its rows: moves pages, starts sequences, changes page tables.
    fn prepare(&mut self, plan: &Plan, starts: &[Start<'_>]) {
        self.drafters.forget_left(plan);
        let start = Instant::now();
        for swap in &plan.swap_out {
            self.host.copy_page_from(&self.pages, swap.from as usize, swap.to as usize);
        }
        for copy in &plan.copies {
            self.pages.copy_page(copy.from as usize, copy.to as usize);
        }
        for swap in &plan.swap_in {
            self.pages.copy_page_from(&self.host, swap.from as usize, swap.to as usize);
        }
        // The rate is for saving a page and bringing it back, so one direction counts half.
        self.swaps.add(
            start.elapsed().as_secs_f64(),
            (plan.swap_out.len() + plan.copies.len() + plan.swap_in.len()).div_ceil(2),
        );
        for (started, start) in plan.started.iter().zip(starts) {
            self.slots[started.slot as usize] = Slot { running: Running::new(start), ..Slot::default() };
        }
        for entry in &plan.tables {
            let table = &mut self.slots[entry.slot as usize].table;
            let index = entry.index as usize;
            table.resize(table.len().max(index + 1), Page::MAX);
            table[index] = entry.page;
        }
    }
}

impl BatchBackend for CpuBatch {
    fn device(&self) -> String {
        "CPU".into()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn costs(&self) -> Costs {
        Costs { swap_page: self.swaps.each(), row: self.rows.each() }
    }

    fn may_draft(&self) -> bool {
        self.drafters.are_worthwhile()
    }

    fn begin(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<(), Error> {
        self.prepare(plan, starts);
        let start = Instant::now();
        let drafting = |work: &Work| match work.rows {
            1 => Drafting::Here(&self.slots[work.slot as usize].running),
            _ => Drafting::No,
        };
        let drafts = self.drafters.propose(plan, DRAFT_COST, drafting, |_| DraftTokens::default())?;
        let mut rows = Vec::new();
        for (work, drafts) in plan.work.iter().zip(&drafts) {
            let slot = &self.slots[work.slot as usize];
            let (first, count) = (work.start as usize, work.rows as usize);
            let known = slot.running.history[first..first + count].iter();
            rows.extend(known.chain(drafts.run()).enumerate().map(|(i, &token)| Row {
                token,
                position: first + i,
                pages: &slot.table,
                logits: work.samples && i + 1 >= count,
            }));
        }
        let vocab = self.model.config().vocab_size;
        let wanted = rows.iter().filter(|row| row.logits).count();
        self.logits.resize(self.logits.len().max(wanted * vocab), 0.0);
        let logits = &mut self.logits[..wanted * vocab];
        let are_kept = plan.work.len() < self.limits.draft_rows as usize;
        let kept = self.states.as_ref().filter(|_| are_kept);
        let mut states = Vec::new();
        let taps = kept.map(|(after, _)| Taps { after, states: &mut states });
        let faults = self.model.forward_rows(&rows, &mut self.pages, logits, taps)?;
        let (count, mut row) = (rows.len(), 0);
        drop(rows);
        let each = states.len() / count.max(1);
        for (work, drafts) in plan.work.iter().zip(&drafts) {
            let positions = work.start as usize..(work.start + work.rows) as usize + drafts.count;
            if let Some((_, kept)) = kept {
                for position in positions.clone() {
                    kept.put(work.slot, position, &states[row * each..][..each]);
                    row += 1;
                }
            }
            if let Some(model) = &mut self.drafters.model {
                model.note_states(work.slot, positions, kept.is_some());
            }
        }

        // Pairs each sequence's slot with its drafts, logits and faults.
        let mut slots: Vec<Option<&mut Slot>> = self.slots.iter_mut().map(Some).collect();
        let mut logits = &*logits;
        let mut choices = Vec::new();
        let mut faults = faults.as_slice();
        let mut first_row = 0;
        for (work, drafts) in plan.work.iter().zip(drafts) {
            let known = work.rows as usize;
            let next_row = first_row + known + drafts.count;
            let (faults_here, later) = faults.split_at(faults.partition_point(|fault| fault.row < next_row));
            faults = later;
            let known = first_row + known;
            first_row = next_row;
            let Some(slot) = slots[work.slot as usize].take() else { continue };
            if !work.samples {
                slot.fault = slot.fault.or(faults_here.iter().min().copied());
                continue;
            }
            let (here, rest) = logits.split_at((1 + drafts.count) * vocab);
            logits = rest;
            choices.push(Choice { number: work.slot, slot, drafts, logits: here, faults: faults_here, known });
        }
        self.outcomes = choices.into_par_iter().map(|choice| choice.decide(vocab)).collect();
        let sampled: HashSet<u32> = self.outcomes.iter().map(|outcome| outcome.slot).collect();
        let slots = (0..).zip(&mut self.slots).filter(|(slot, _)| sampled.contains(slot));
        let sequences = slots.map(|(number, slot)| (number, &mut slot.running)).collect();
        self.drafters.look(sequences, 0, DRAFT_COST);
        self.rows.add(start.elapsed().as_secs_f64(), count);
        Ok(())
    }

    fn rewrite(&mut self, slot: plan::Slot, at: usize, tokens: &[u32]) {
        self.slots[slot as usize].running.rewrite(at, tokens);
    }

    fn end(&mut self) -> Result<Vec<Outcome>, Error> {
        Ok(std::mem::take(&mut self.outcomes))
    }
}

/// Checks that the machine has memory for `pages` pages of `page_bytes` bytes, in addition to `besides` bytes for other
/// things. Asking for more memory than there is would end the program.
///
/// # Errors
/// [`Error::CpuCacheTooLarge`].
pub(super) fn check_memory(page_bytes: usize, pages: usize, besides: u64) -> Result<(), Error> {
    let (wanted, memory) = ((page_bytes as u64).saturating_mul(pages as u64), memory().saturating_sub(besides));
    if wanted > memory { Err(Error::CpuCacheTooLarge { wanted, memory }) } else { Ok(()) }
}
