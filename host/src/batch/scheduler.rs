//! Which rows run in a step, and where every page is: continuous batching that knows no device.
//!
//! Sequences are served in the order in which they came:
//!
//! 1. Each running sequence that has only its newest token to run gets one row. If it needs a page and there is none,
//!    the running sequence that came last is preempted: its pages go to the host tier, or are given up and computed
//!    again later, whichever is cheaper by the backend's [`Costs`]. It keeps its place in the order of arrival.
//! 2. The rows that are left go to prompts, in chunks of whatever fits (chunked prefill: Agrawal et al., 2024, "Taming
//!    Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve").
//! 3. If nobody was preempted, waiting sequences start while there are slots, rows, and pages for all their tokens and
//!    one more page for each running sequence. What the page index has of their text is shared (Kwon et al., 2023,
//!    "Efficient Memory Management for Large Language Model Serving with PagedAttention"); of a page that matches only
//!    in part, a copy is made. A sequence whose prompt begins like one that is being read in waits for it. Where the
//!    limits say so, a few, and what is left of one, wait for more, to be read in together; and some start before they
//!    may generate, if there are pages for all at their greatest length. Pages that several have used come back from
//!    the host tier, if they had to leave the device.
//! 4. Drafts get what is left of the draft budget, and no page that another sequence would be preempted for.
//!
//! The next step may be planned while one is under way, see [`Scheduler::foresee`]: then its outcome is known but for
//! the tokens themselves, which nothing here depends on before their pages are full.
//!
//! Nothing starves: the sequence that came first among the running ones is never preempted, so it ends; nobody who came
//! later starts while the first in line waits for pages; with nothing running, the first in line fits; and whoever
//! waits for others waits until then at most.

mod admission;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::limits::{Costs, Counts, Limits};
use super::pages::{Content, NOTHING, Pages, Put};
use super::plan::{HostPage, Page, Plan, SequenceId, Slot, SwapOut, TableEntry, Work};

/// What a sequence's rows of a step brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    /// Whose: of a [`Work`] that samples.
    pub slot: Slot,
    /// The next tokens, at least one.
    pub tokens: Vec<u32>,
}

/// A sequence that has a slot.
#[derive(Clone, Debug)]
struct Placed {
    known: Known,
    slot: Slot,
    pages: Vec<Page>,
    /// The content up to the end of each page that is in the index, from the first.
    contents: Vec<Content>,
}

/// A sequence that has none: new, or preempted.
#[derive(Clone, Debug)]
struct Waiting {
    known: Known,
    /// Saved pages, which hold the first `known.computed` tokens.
    saved: Vec<HostPage>,
}

/// What is known of a sequence wherever it is.
#[derive(Clone, Debug)]
struct Known {
    tokens: Vec<u32>,
    /// How many of them are the prompt; where that makes no difference, more than there will ever be.
    prompt: usize,
    max_length: usize,
    /// Tokens whose keys and values are in its pages.
    computed: usize,
}

impl Known {
    /// Tokens to run before the next one can be chosen, the newest included.
    fn left(&self) -> usize {
        self.tokens.len() - self.computed
    }
}

/// In place of a token that is being chosen.
const UNKNOWN: u32 = u32::MAX;

/// The scheduler.
#[derive(Clone, Debug)]
pub struct Scheduler {
    limits: Limits,
    costs: Costs,
    pages: Pages,
    slots: BTreeSet<Slot>,
    waiting: BTreeMap<SequenceId, Waiting>,
    running: BTreeMap<SequenceId, Placed>,
    arrivals: SequenceId,
    /// What the next plan begins with: slots that were given up since the last one.
    freed: Vec<Slot>,
    /// Tables that changed since the last plan.
    tables: Vec<TableEntry>,
    /// The last plan's work, with whose it is.
    work: Vec<(SequenceId, Work)>,
    /// Of a foreseen step: the sequences whose newest token is [`UNKNOWN`], and their slots in it.
    foreseen: Option<Vec<(SequenceId, Slot)>>,
    /// Whether drafts are likely to be worth their rows.
    drafting: bool,
    /// Tokens that sequences would have had, had they not waited for others since prompts last went on.
    missed: usize,
    counts: Counts,
}

impl Scheduler {
    /// An empty one.
    ///
    /// # Panics
    /// If `limits` contradict each other: that is a mistake in the caller's code.
    pub fn new(limits: Limits, costs: Costs) -> Self {
        assert!(limits.sequences > 0 && limits.rows >= limits.sequences, "a row for each sequence: {limits:?}");
        assert!(limits.page_tokens > 0, "empty pages: {limits:?}");
        assert!(limits.pages as usize >= limits.context.div_ceil(limits.page_tokens), "one sequence fits: {limits:?}");
        let mut scheduler = Self {
            limits,
            costs,
            pages: Pages::new(limits.pages, limits.host_pages, limits.page_tokens),
            slots: (0..limits.sequences).collect(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            arrivals: 0,
            freed: Vec::new(),
            tables: Vec::new(),
            work: Vec::new(),
            foreseen: None,
            drafting: true,
            missed: 0,
            counts: Counts::default(),
        };
        scheduler.set_costs(costs);
        scheduler
    }

    /// A sequence joins the line: to be continued after `prompt`, to at most `max_length` tokens in all.
    ///
    /// # Panics
    /// If the prompt is empty or longer than `max_length - 1`, or `max_length` than the context.
    pub fn add(&mut self, prompt: Vec<u32>, max_length: usize) -> SequenceId {
        assert!(!prompt.is_empty() && prompt.len() < max_length && max_length <= self.limits.context);
        let id = self.arrivals;
        self.arrivals += 1;
        let prompt_len = if self.limits.prompts_apart { prompt.len() } else { usize::MAX };
        let known = Known { tokens: prompt, prompt: prompt_len, max_length, computed: 0 };
        self.waiting.insert(id, Waiting { known, saved: Vec::new() });
        id
    }

    /// Sequences that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether to add more, so that no step has less to do than it could: for all slots, and for those that are free
    /// after a step. What waits here beyond that, another device might have begun.
    pub fn has_room(&self) -> bool {
        let slots = self.limits.sequences as usize;
        self.running.len() + self.waiting.len() < slots + slots.div_ceil(8)
    }

    /// Pages that sequences use.
    pub fn pages_in_use(&self) -> usize {
        self.pages.count() - self.pages.available()
    }

    /// Pages of the host tier that no preempted sequence has saved anything in.
    pub fn free_host_pages(&self) -> usize {
        self.pages.tier.unsaved()
    }

    /// Who gets tokens by the last plan, in order, until that is [foreseen](Self::foresee) or
    /// [advanced](Self::advance).
    pub fn sampling(&self) -> impl Iterator<Item = SequenceId> {
        self.work.iter().filter(|(_, work)| work.samples).map(|(id, _)| *id)
    }

    /// How it went so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// New measurements.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
        // Out and back against running its tokens.
        self.pages.keeps = costs.swap_page <= costs.row * self.limits.page_tokens as f64;
    }

    /// Whether drafts of the steps that follow are likely to be worth their rows, where there is room for them.
    pub fn set_drafting(&mut self, drafting: bool) {
        self.drafting = drafting;
    }

    /// Whether pages of the host tier may be wanted before long.
    pub fn may_want_host_pages(&self) -> bool {
        self.pages.may_want_tier()
    }

    /// The host tier has so many pages by now, no fewer than before.
    pub fn set_host_pages(&mut self, count: u32) {
        self.pages.tier.grow(count);
    }

    fn known(&self, id: SequenceId) -> Option<&Known> {
        self.running.get(&id).map(|r| &r.known).or_else(|| self.waiting.get(&id).map(|w| &w.known))
    }

    /// The tokens of a sequence, prompt and answer; of a foreseen one that is not known yet, any.
    pub fn tokens(&self, id: SequenceId) -> Option<&[u32]> {
        self.known(id).map(|known| known.tokens.as_slice())
    }

    /// The next step. It has work unless nothing runs and nothing waits.
    pub fn plan(&mut self) -> Plan {
        let mut plan = Plan {
            freed: std::mem::take(&mut self.freed),
            tables: std::mem::take(&mut self.tables),
            ..Plan::default()
        };
        let Limits { rows, prompt_rows, .. } = self.limits;
        let prompt_rows_left = if prompt_rows > 0 { prompt_rows } else { rows };
        let mut step = Step { rows_left: rows, prompt_rows_left, ..Step::default() };
        self.decode(&mut plan, &mut step);
        let missed = self.better_together();
        self.missed = missed.map_or(0, |missed| self.missed + missed);
        if missed.is_none() {
            self.prefill(&mut step);
            if !step.preempted {
                self.start(&mut plan, &mut step);
            }
        }
        self.draft(&mut plan, &mut step);
        for page in step.sources {
            self.pages.release(page);
        }
        plan.swap_out.extend(self.pages.end_plan());
        plan.work = step.work.iter().map(|(_, work)| *work).collect();
        self.work = step.work;
        self.counts.steps += 1;
        self.counts.rows += plan.work.iter().map(|w| w.rows as u64).sum::<u64>();
        self.counts.most_running = self.counts.most_running.max(self.running.len() as u32);
        self.counts.most_pages = self.counts.most_pages.max(self.pages_in_use() as u32);
        plan
    }

    /// A row for each sequence that has but its newest token to run, and a page for it.
    fn decode(&mut self, plan: &mut Plan, step: &mut Step) {
        let ids: Vec<SequenceId> = self.running.keys().copied().collect();
        for id in ids {
            // Preempted for one before it, or still reading its prompt.
            if self.running.get(&id).is_none_or(|r| r.known.left() > 1) {
                continue;
            }
            if step.work.len() as u32 == self.limits.generating {
                break;
            }
            while !self.cover(id, 1, plan) {
                let after = (Bound::Excluded(id), Bound::Unbounded);
                let last = self.running.range(after).next_back().map_or(id, |(last, _)| *last);
                self.preempt(last, plan);
                step.preempted = true;
                if last == id {
                    break;
                }
            }
            if let Some(sequence) = self.running.get(&id) {
                step.push(id, sequence, 1);
            }
        }
    }

    /// Makes the page table reach over the first `rows` tokens that are not computed. False if a page is lacking.
    fn cover(&mut self, id: SequenceId, rows: usize, plan: &mut Plan) -> bool {
        let Some(sequence) = self.running.get_mut(&id) else { return false };
        let wanted = (sequence.known.computed + rows).div_ceil(self.limits.page_tokens);
        while sequence.pages.len() < wanted {
            let Some(page) = self.pages.take() else { return false };
            plan.tables.push(TableEntry { slot: sequence.slot, index: sequence.pages.len() as u32, page });
            sequence.pages.push(page);
        }
        true
    }

    /// Takes a running sequence's slot and pages.
    fn preempt(&mut self, id: SequenceId, plan: &mut Plan) {
        let Placed { mut known, slot, pages, .. } = self.running.remove(&id).expect("only who runs is preempted");
        let used = known.computed.div_ceil(self.limits.page_tokens);
        let swap = used as f64 * self.costs.swap_page;
        let again = known.computed as f64 * self.costs.row;
        let mut saved = Vec::new();
        if used > 0 && used <= self.pages.tier.available() && swap <= again {
            saved = (0..used).map(|_| self.pages.tier.take().expect("counted above")).collect();
            plan.swap_out.extend(pages.iter().zip(&saved).map(|(&from, &to)| SwapOut { from, to }));
            self.counts.swapped += 1;
        } else {
            known.computed = 0;
            self.counts.dropped += 1;
        }
        // Entries of this plan that the backend need not see.
        plan.tables.retain(|entry| entry.slot != slot);
        plan.freed.push(slot);
        self.give_up(slot, &pages);
        self.waiting.insert(id, Waiting { known, saved });
    }

    fn give_up(&mut self, slot: Slot, pages: &[Page]) {
        self.slots.insert(slot);
        for &page in pages.iter().rev() {
            self.pages.release(page);
        }
    }

    /// Chunks for the prompts that are being read in.
    fn prefill(&mut self, step: &mut Step) {
        for (&id, sequence) in &self.running {
            if sequence.known.left() > 1 && step.reads() {
                step.read(id, sequence);
            }
        }
    }

    /// Lets decoding sequences draft, if the step has rows to spare.
    fn draft(&mut self, plan: &mut Plan, step: &mut Step) {
        let decoding = step.work.iter().filter(|(_, work)| work.samples && work.rows == 1).count() as u32;
        let others: u32 = step.work.iter().map(|(_, work)| work.rows).sum::<u32>() - decoding;
        let threshold = self.limits.draft_rows.min(self.limits.rows).saturating_sub(others);
        // Drafts continue tokens, which have to be known.
        if self.limits.drafts == 0
            || !self.drafting
            || self.foreseen.is_some()
            || decoding == 0
            || threshold <= decoding
        {
            return;
        }
        plan.draft_threshold = threshold;
        let mut spare = self.pages.available().saturating_sub(self.running.len());
        for (id, work) in step.work.iter_mut().filter(|(_, work)| work.samples && work.rows == 1) {
            let Some(sequence) = self.running.get(id) else { continue };
            let known = &sequence.known;
            // One token comes without a draft.
            let most = (known.max_length - known.tokens.len() - 1).min((threshold - decoding) as usize);
            let most = most.min(self.limits.drafts as usize);
            let room = (sequence.pages.len() + spare) * self.limits.page_tokens - known.tokens.len();
            let most = most.min(room);
            let there = sequence.pages.len();
            if self.cover(*id, 1 + most, plan) {
                work.most_drafts = most as u32;
            }
            spare -= self.running.get(id).map_or(0, |sequence| sequence.pages.len() - there);
        }
    }

    /// Takes in what a step brought, the oldest one that was planned and not advanced: an [`Advance`] for each [`Work`]
    /// that samples, in order. Then [`finish`](Self::finish) what has ended: a sequence of `max_length` tokens must be,
    /// unless the step was foreseen.
    ///
    /// # Panics
    /// If an advance is missing or is not of the plan: that is a mistake in the caller's code.
    pub fn advance(&mut self, advances: &[Advance]) {
        let mut advances = advances.iter();
        let mut tokens_of = |slot: Slot| {
            let advance = advances.next().filter(|advance| advance.slot == slot);
            advance.unwrap_or_else(|| panic!("nothing of slot {slot}")).tokens.as_slice()
        };
        if let Some(foreseen) = self.foreseen.take() {
            for (id, slot) in foreseen {
                let &[token] = tokens_of(slot) else { panic!("slot {slot} brought more than was foreseen") };
                let running = self.running.get_mut(&id).map(|r| &mut r.known);
                let known = running.or_else(|| self.waiting.get_mut(&id).map(|w| &mut w.known));
                if let Some(newest) = known.and_then(|known| known.tokens.last_mut()) {
                    assert_eq!(*newest, UNKNOWN, "the newest token of {id} is known");
                    *newest = token;
                }
            }
            return;
        }
        for (id, work) in std::mem::take(&mut self.work) {
            let tokens = if work.samples { tokens_of(work.slot) } else { &[] };
            assert!(
                !work.samples || (1..=1 + work.most_drafts as usize).contains(&tokens.len()),
                "{work:?}: {tokens:?}"
            );
            self.take_in(id, work, tokens);
        }
    }

    /// Takes in that the last planned step brings nothing to these slots, whose tokens could not be chosen in time: the
    /// row that each would have been chosen from runs again in the next step. Comes before that plan is
    /// [foreseen](Self::foresee) or [advanced](Self::advance).
    pub fn put_off(&mut self, slots: &[Slot]) {
        for (_, work) in self.work.iter_mut().filter(|(_, work)| work.samples && slots.contains(&work.slot)) {
            (work.rows, work.samples) = (work.rows - 1, false);
            self.counts.put_off += 1;
        }
    }

    /// Takes in that the planned step is under way, before it is known which tokens it brings, so that the next one can
    /// be planned; its [`advance`](Self::advance) comes after that plan. Every work that samples brings one token then,
    /// and a sequence that has `max_length` tokens with it is finished. One that turns out to have ended earlier may
    /// have a row in the next plan, and what that brings is nobody's.
    ///
    /// False if it cannot be foreseen: sequences draft, or may soon, or the step before has not been advanced.
    pub fn foresee(&mut self) -> bool {
        let fit = self.limits.drafts > 0 && self.running.len() < self.limits.draft_rows as usize;
        let drafts = self.drafting && fit;
        if drafts || self.foreseen.is_some() || self.work.iter().any(|(_, work)| work.most_drafts > 0) {
            return false;
        }
        let mut foreseen = Vec::new();
        for (id, work) in std::mem::take(&mut self.work) {
            if work.samples {
                foreseen.push((id, work.slot));
            }
            self.take_in(id, work, if work.samples { &[UNKNOWN] } else { &[] });
            if self.running.get(&id).is_some_and(|r| r.known.tokens.len() == r.known.max_length) {
                self.finish(id);
            }
        }
        self.foreseen = Some(foreseen);
        true
    }

    /// A sequence's rows have run, or are about to, and bring `tokens`.
    fn take_in(&mut self, id: SequenceId, work: Work, tokens: &[u32]) {
        // Ended since it was planned.
        let Some(Placed { known, .. }) = self.running.get_mut(&id) else { return };
        known.computed = (work.start + work.rows) as usize;
        if work.samples {
            known.tokens.extend_from_slice(tokens);
            known.computed = known.tokens.len() - 1;
            assert!(known.tokens.len() <= known.max_length);
        }
        self.index(id);
    }

    /// Puts the pages that a sequence has filled into the index. Where the same is there already, that is used instead.
    fn index(&mut self, id: SequenceId) {
        let Some(Placed { known, slot, pages, contents }) = self.running.get_mut(&id) else { return };
        let size = self.limits.page_tokens;
        let full = pages.iter_mut().enumerate().take(known.computed / size).skip(contents.len());
        for (index, own) in full {
            let before = contents.last().copied().unwrap_or(NOTHING);
            let prompt = known.prompt.saturating_sub(index * size).min(size);
            match self.pages.index(*own, before, &known.tokens[index * size..][..size], prompt) {
                Put::New(content) => contents.push(content),
                Put::Same(page, content) => {
                    self.pages.share(page);
                    self.pages.release(*own);
                    *own = page;
                    self.tables.push(TableEntry { slot: *slot, index: index as u32, page });
                    contents.push(content);
                }
            }
        }
    }

    /// A sequence has ended, or is wanted no longer.
    pub fn finish(&mut self, id: SequenceId) {
        if let Some(Placed { slot, pages, .. }) = self.running.remove(&id) {
            self.tables.retain(|entry| entry.slot != slot);
            self.freed.push(slot);
            self.give_up(slot, &pages);
        } else if let Some(waiting) = self.waiting.remove(&id) {
            self.pages.tier.release(waiting.saved);
        }
    }
}

/// A plan in the making.
#[derive(Default)]
struct Step {
    rows_left: u32,
    /// Of these, rows that may be prompts'.
    prompt_rows_left: u32,
    preempted: bool,
    work: Vec<(SequenceId, Work)>,
    /// Sources of copies: not to be used for anything else in this step.
    sources: Vec<Page>,
}

impl Step {
    /// Whether there are rows left for prompts.
    fn reads(&self) -> bool {
        self.rows_left.min(self.prompt_rows_left) > 0
    }

    /// As much of what a sequence has left as there is room for, as rows of prompts.
    fn read(&mut self, id: SequenceId, sequence: &Placed) {
        let rows = sequence.known.left().min(self.prompt_rows_left as usize);
        self.prompt_rows_left -= self.push(id, sequence, rows);
    }

    /// As many of a sequence's next `rows` rows as there is room for: so many.
    fn push(&mut self, id: SequenceId, sequence: &Placed, rows: usize) -> u32 {
        let rows = rows.min(self.rows_left as usize) as u32;
        self.rows_left -= rows;
        let start = sequence.known.computed;
        let samples = start + rows as usize == sequence.known.tokens.len();
        let work = Work { slot: sequence.slot, start: start as u32, rows, samples, most_drafts: 0 };
        self.work.push((id, work));
        rows
    }
}
