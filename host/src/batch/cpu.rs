//! A batch on the CPU: `model`'s reference over shared pages.

use std::time::Instant;

use gpu_kernels::drafting;
use model::{Checkpoint, CpuModel, KvPages, Row, Sampling};
use rayon::prelude::*;

use super::backend::{BatchBackend, Logprobs, Outcome, Start};
use super::plan::{Page, Plan, Work};
use super::scheduler::{Costs, Limits};
use crate::Error;
use crate::cpu::{DRAFT_COST, confirm};
use crate::draft::{NgramDraft, learned};

/// Runs batches on the CPU.
pub struct CpuBatch {
    model: CpuModel,
    limits: Limits,
    draft: Option<NgramDraft>,
    pages: KvPages,
    host: KvPages,
    slots: Vec<Slot>,
    logits: Vec<f32>,
    swaps: Rate,
    rows: Rate,
}

/// A running sequence.
#[derive(Clone, Default)]
struct Slot {
    history: Vec<u32>,
    prompt: usize,
    max_length: usize,
    sampling: Sampling,
    stop_tokens: Vec<u32>,
    logprobs: Option<u32>,
    table: Vec<Page>,
    /// What proposals were worth of late.
    acceptance: u32,
}

/// Drafts for a work.
#[derive(Clone, Default)]
struct Drafts {
    proposed: Vec<u32>,
    /// How many of them, from the first on, run.
    count: usize,
}

impl Drafts {
    fn run(&self) -> &[u32] {
        &self.proposed[..self.count]
    }
}

/// Seconds for each of many like things.
#[derive(Clone, Copy)]
struct Rate {
    seconds: f64,
    count: f64,
}

impl Rate {
    fn add(&mut self, start: Instant, count: usize) {
        if count > 0 {
            self.seconds += start.elapsed().as_secs_f64();
            self.count += count as f64;
        }
    }

    fn each(&self) -> f64 {
        self.seconds / self.count
    }
}

impl CpuBatch {
    /// Within `limits`; `draft` proposes, if anyone.
    ///
    /// # Errors
    /// A checkpoint that lacks a weight, or has one that is NaN or infinite.
    pub fn new(checkpoint: &Checkpoint, limits: Limits, draft: Option<NgramDraft>) -> Result<Self, Error> {
        checkpoint.check_finite(&|_| {})?;
        let model = CpuModel::new(checkpoint)?;
        let store = |pages: u32| KvPages::new(model.config(), pages as usize, limits.page_tokens);
        let page = (checkpoint.config.kv_bytes_per_token(size_of::<f32>()) * limits.page_tokens) as f64;
        Ok(Self {
            pages: store(limits.pages),
            host: store(limits.host_pages),
            slots: vec![Slot::default(); limits.sequences as usize],
            logits: Vec::new(),
            // Until there are measurements: copies at 5 GB/s, out and back, and a row for a reading of the weights at 10 GB/s.
            swaps: Rate { seconds: 2.0 * page / 5e9, count: 1.0 },
            rows: Rate { seconds: checkpoint.stored_bytes() as f64 / 10e9, count: 1.0 },
            model,
            limits,
            draft,
        })
    }

    /// Moves pages and takes note of who is where.
    fn prepare(&mut self, plan: &Plan, starts: &[Start<'_>]) {
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
        // One way counts half: what is asked for is out and back.
        self.swaps.add(start, (plan.swap_out.len() + plan.copies.len() + plan.swap_in.len()).div_ceil(2));
        for (started, start) in plan.started.iter().zip(starts) {
            self.slots[started.slot as usize] = Slot {
                history: start.tokens.to_vec(),
                prompt: start.prompt,
                max_length: start.max_length,
                sampling: start.sampling,
                stop_tokens: start.stop_tokens.to_vec(),
                logprobs: start.logprobs,
                table: Vec::new(),
                acceptance: drafting::UNTRIED,
            };
        }
        for entry in &plan.tables {
            let table = &mut self.slots[entry.slot as usize].table;
            let index = entry.index as usize;
            table.resize(table.len().max(index + 1), Page::MAX);
            table[index] = entry.page;
        }
    }

    /// Drafts of each work.
    fn drafts(&self, plan: &Plan) -> Vec<Drafts> {
        let Some(draft) = self.draft.filter(|_| plan.draft_threshold > 0) else {
            return vec![Drafts::default(); plan.work.len()];
        };
        let drafts = |work: &Work| work.samples && work.rows == 1;
        let active = plan.work.iter().filter(|work| drafts(work)).count() as i64;
        let mut budget = DraftBudget { threshold: plan.draft_threshold.into(), active, used: 0 };
        let others = plan.work.iter().map(|work| work.rows).sum::<u32>() - 1;
        let mut propose = |work: &Work| {
            if !drafts(work) {
                return Drafts::default();
            }
            let tokens = budget.next().min(work.most_drafts).min(draft.tokens);
            if tokens == 0 {
                return Drafts::default();
            }
            let slot = &self.slots[work.slot as usize];
            let draft = NgramDraft { tokens, ..draft };
            let proposed = draft.propose(bytemuck::cast_slice(&slot.history), slot.max_length);
            let cost = draft.cost(DRAFT_COST);
            let count = drafting::worthwhile(slot.acceptance, cost, others, proposed.len() as u32);
            budget.used += i64::from(count);
            Drafts { proposed, count: count as usize }
        };
        plan.work.iter().map(&mut propose).collect()
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

    fn step(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<Vec<Outcome>, Error> {
        self.prepare(plan, starts);
        let start = Instant::now();
        let drafts = self.drafts(plan);
        let mut rows = Vec::new();
        for (work, drafts) in plan.work.iter().zip(&drafts) {
            let slot = &self.slots[work.slot as usize];
            let (first, count) = (work.start as usize, work.rows as usize);
            let known = slot.history[first..first + count].iter();
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
        self.model.forward_rows(&rows, &mut self.pages, logits)?;
        let count = rows.len();
        drop(rows);

        // Each sequence's slot with its drafts and its rows of logits.
        let mut slots: Vec<Option<&mut Slot>> = self.slots.iter_mut().map(Some).collect();
        let mut logits = &*logits;
        let mut choices = Vec::new();
        for (work, drafts) in plan.work.iter().zip(drafts).filter(|(work, _)| work.samples) {
            let (here, rest) = logits.split_at((1 + drafts.count) * vocab);
            logits = rest;
            if let Some(slot) = slots[work.slot as usize].take() {
                choices.push((work.slot, slot, drafts, here));
            }
        }
        let choose = |(number, slot, drafts, logits): (u32, &mut Slot, Drafts, &[f32])| {
            let Slot { history, prompt, max_length, sampling, stop_tokens, .. } = slot;
            let tokens = confirm(history, *prompt, *max_length, sampling, stop_tokens, drafts.run(), logits);
            slot.acceptance = learned(slot.acceptance, &drafts.proposed, &tokens);
            let rows = tokens.iter().zip(logits.chunks_exact(vocab));
            let logprobs =
                slot.logprobs.map_or(Vec::new(), |top| rows.map(|(&t, row)| Logprobs::of(row, t, top)).collect());
            Outcome { slot: number, tokens, logprobs, drafted: drafts.count }
        };
        let outcomes = choices.into_par_iter().map(choose).collect();
        self.rows.add(start, count);
        Ok(outcomes)
    }
}

/// The n-gram operator's shared budget (`gpu_kernels::ngram`), handed out to one decoding sequence after the other.
struct DraftBudget {
    threshold: i64,
    /// Sequences that are still owed their one row.
    active: i64,
    used: i64,
}

impl DraftBudget {
    /// Drafts that the next sequence may have.
    fn next(&mut self) -> u32 {
        self.active -= 1;
        self.used += 1;
        let room = self.threshold - self.used - self.active;
        // The operator leaves a room of one row unused.
        if room <= 1 { 0 } else { room as u32 }
    }
}

#[cfg(test)]
mod tests {
    use gpu_kernels::ngram::reference;

    use super::{DraftBudget, NgramDraft};

    #[test]
    fn the_shared_budget_is_that_of_the_operator() {
        for seed in 0..500u64 {
            let random = |i: u64, n: u64| model::sampling::random(seed, i) % n;
            let batch = 1 + random(0, 6) as usize;
            let (stride, most) = (24, 1 + random(1, 7) as i32);
            let threshold = random(2, 24) as i32;
            let histories: Vec<i32> = (0..batch * stride).map(|i| random(10 + i as u64, 3) as i32).collect();
            let newest: Vec<i64> = (0..batch).map(|b| random(1000 + b as u64, stride as u64) as i64).collect();
            // A sequence that runs may have one more token at least.
            let limit: Vec<i64> = newest.iter().map(|n| n + 2 + random(2000 + *n as u64, 9) as i64).collect();
            let operator = reference::Batch {
                input_ids: &[],
                input_ids_stride: 0,
                input_ids_len: &vec![0; batch],
                pre_ids: &histories,
                pre_ids_stride: stride,
                step_idx: &newest,
                max_dec_len: &limit,
                seq_lens_decoder: &vec![1; batch],
            };
            let mut rows = vec![1; batch];
            let mut out = reference::Drafts {
                seq_lens_this_time: &mut rows,
                draft_tokens: &mut vec![0; batch * 16],
                draft_tokens_stride: 16,
            };
            reference::ngram_match_mixed(&operator, most, 3, 1, threshold, &mut out);

            let mut budget = DraftBudget { threshold: threshold.into(), active: batch as i64, used: 0 };
            for b in 0..batch {
                let history = &histories[b * stride..][..newest[b] as usize + 1];
                let tokens = budget.next().min(most as u32);
                let draft = NgramDraft { tokens, max: 3, min: 1, adaptive: false };
                let drafts = if tokens > 0 { draft.propose(history, limit[b] as usize).len() } else { 0 };
                budget.used += drafts as i64;
                assert_eq!(rows[b] as usize, 1 + drafts, "seed {seed}, sequence {b}");
            }
        }
    }
}
