//! Continuous batching: decides which rows run in a step and where every page is. Knows nothing of the device.
//!
//! Sequences are served in the order in which they came:
//!
//! 1. Each running sequence with only its newest token to run gets one row, or as many of them as fill the tiles of the
//!    step's GEMMs, in turns, if that is faster (`pace.rs`). If a sequence needs a page and there is none, the
//!    running sequence that came last is preempted. The pages of that sequence go to the host tier, or are given up and
//!    computed again later, whichever is cheaper by the backend's [`Costs`]. The preempted sequence keeps its place in
//!    the order of arrival.
//! 2. The remaining rows go to prompts, in chunks of whatever fits (chunked prefill: Agrawal et al., 2024, "Taming
//!    Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve").
//! 3. If no sequence was preempted, waiting sequences start while there are slots, rows, and pages for all their tokens
//!    and one more page for each running sequence.
//!    - Pages that the page index has for their text are shared (Kwon et al., 2023, "Efficient Memory Management for
//!      Large Language Model Serving with PagedAttention"). If a page matches only in part, it is copied. Pages that
//!      several sequences have used come back from the host tier, if they had to leave the device.
//!    - A sequence whose prompt begins like one that is being read waits for that.
//!    - If the limits say so, few waiting prompts, and what is left of a prompt, wait for more, to be read together.
//!      While there are many, sequences that generate wait instead, so that later steps have more of them. And some
//!      sequences start before they may generate, if there are pages for all sequences at their greatest length.
//! 4. Drafts get the rest of the draft budget, but no page for which another sequence would be preempted.
//!
//! The next step may be planned while one is under way: see [`Scheduler::foresee`]. All of that step's outcome is then
//! known except the tokens themselves, and the scheduler needs a token's value only when its page is full.
//!
//! No sequence starves. The running sequence that came first is never preempted, so it ends. While the first in line
//! waits for pages, no later one starts. If nothing runs, the first in line fits. And a sequence that waits for others
//! waits at most until then.

mod admission;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use super::limits::{Costs, Counts, Limits};
use super::pace::Pace;
use super::pages::{Content, NOTHING, Pages, Put};
use super::plan::{HostPage, Page, Plan, SequenceId, Slot, SwapOut, TableEntry, Work};

/// The result of a step for one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advance {
    /// The slot of the sequence. It had a [`Work`] that samples.
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
    /// For each page that is in the index, from the first on: the content up to its end.
    contents: Vec<Content>,
}

/// A sequence without a slot: new, or preempted.
#[derive(Clone, Debug)]
struct Waiting {
    known: Known,
    /// Pages saved in the host tier. They hold the first `known.computed` tokens.
    saved: Vec<HostPage>,
}

/// The part of a sequence's state that does not depend on whether it runs.
#[derive(Clone, Debug)]
struct Known {
    tokens: Vec<u32>,
    /// How many of these tokens are the prompt. If prompts are not computed differently, `usize::MAX`.
    prompt: usize,
    max_length: usize,
    /// Tokens whose keys and values are in the pages of the sequence.
    computed: usize,
}

impl Known {
    /// Tokens to run before the next token can be chosen, the newest token included.
    fn left(&self) -> usize {
        self.tokens.len() - self.computed
    }
}

/// Stands for a token that is still being chosen.
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
    /// Slots that were given up since the last plan. The next plan begins with them.
    freed: Vec<Slot>,
    /// Pages to [clear](Plan::cleared) with the next plan.
    cleared: Vec<Page>,
    /// Tables that changed since the last plan.
    tables: Vec<TableEntry>,
    /// The work of the last plan, with its sequences.
    work: Vec<(SequenceId, Work)>,
    /// If a step was foreseen: the sequences whose newest token is [`UNKNOWN`], and their slots in that step.
    foreseen: Option<Vec<(SequenceId, Slot)>>,
    /// Whether drafts are likely to be worth their rows.
    drafting: bool,
    /// Whether more sequences may be added.
    expects_more: bool,
    /// How many sequences generate in a step.
    pace: Pace,
    /// The last sequence that a step left out, although it was ready. The next step leaves out those after it.
    left_out: SequenceId,
    /// Tokens that sequences have missed, since prompts last went on, by waiting for others.
    missed: usize,
    /// Whether the last plan had sequences that generate wait for prompts (`better_after`), and whether a sequence
    /// has ended since.
    waited: bool,
    has_ended: bool,
    counts: Counts,
}

impl Scheduler {
    /// A scheduler without sequences.
    ///
    /// # Panics
    /// If `limits` contradict each other: a bug of the caller.
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
            cleared: Vec::new(),
            tables: Vec::new(),
            work: Vec::new(),
            foreseen: None,
            drafting: true,
            expects_more: true,
            pace: Pace::new(limits.tiles),
            left_out: 0,
            missed: 0,
            waited: false,
            has_ended: false,
            counts: Counts::default(),
        };
        scheduler.set_costs(costs);
        scheduler
    }

    /// Adds a sequence to the line. It continues `prompt` up to at most `max_length` tokens in all.
    ///
    /// # Panics
    /// If the prompt is empty or has more than `max_length - 1` tokens, or `max_length` exceeds the context: a bug of
    /// the caller.
    pub fn add(&mut self, prompt: Vec<u32>, max_length: usize) -> SequenceId {
        assert!(!prompt.is_empty() && prompt.len() < max_length && max_length <= self.limits.context);
        let id = self.arrivals;
        self.arrivals += 1;
        let prompt_len = if self.limits.prompts_apart { prompt.len() } else { usize::MAX };
        let known = Known { tokens: prompt, prompt: prompt_len, max_length, computed: 0 };
        self.waiting.insert(id, Waiting { known, saved: Vec::new() });
        id
    }

    /// Number of sequences that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Number of sequences that run.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether more sequences should be added, so that no step has less to do than it could: enough for all slots, and
    /// for those that become free after a step. A sequence that waits here beyond that could have begun on another
    /// device.
    pub fn has_room(&self) -> bool {
        let slots = self.limits.sequences as usize;
        self.running.len() + self.waiting.len() < slots + slots.div_ceil(8)
    }

    /// Number of pages that sequences use.
    pub fn pages_in_use(&self) -> usize {
        self.pages.count() - self.pages.available()
    }

    /// Pages of the host tier in which no preempted sequence has saved anything.
    pub fn free_host_pages(&self) -> usize {
        self.pages.tier.unsaved()
    }

    /// The sequences that get tokens by the last plan, in order. Valid until the plan is [foreseen](Self::foresee) or
    /// [advanced](Self::advance).
    pub fn sampling(&self) -> impl Iterator<Item = SequenceId> {
        self.work.iter().filter(|(_, work)| work.samples).map(|(id, _)| *id)
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Sets newly measured costs.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs;
        // A page is worth keeping if saving it and bringing it back costs no more than computing its tokens.
        self.pages.keeps = costs.swap_page <= costs.row * self.limits.page_tokens as f64;
    }

    /// Sets whether drafts of the next steps are likely to be worth their rows, if there is room for them.
    pub fn set_drafting(&mut self, drafting: bool) {
        self.drafting = drafting;
    }

    /// Sets whether more sequences may be added. If not, prompts do not wait for more to be read together.
    pub fn expect_more(&mut self, more: bool) {
        self.expects_more = more;
    }

    /// Whether pages of the host tier may be needed soon.
    pub fn may_want_host_pages(&self) -> bool {
        self.pages.may_want_tier()
    }

    /// Raises the number of host-tier pages to `count`. They never become fewer.
    pub fn set_host_pages(&mut self, count: u32) {
        self.pages.tier.grow(count);
    }

    fn known(&self, id: SequenceId) -> Option<&Known> {
        self.running.get(&id).map(|r| &r.known).or_else(|| self.waiting.get(&id).map(|w| &w.known))
    }

    /// The tokens of a sequence, prompt and answer. A foreseen token whose value is not known yet has any value.
    pub fn tokens(&self, id: SequenceId) -> Option<&[u32]> {
        self.known(id).map(|known| known.tokens.as_slice())
    }

    /// Plans the next step. The plan has work unless no sequence runs or waits.
    pub fn plan(&mut self) -> Plan {
        let mut plan = Plan {
            freed: std::mem::take(&mut self.freed),
            cleared: std::mem::take(&mut self.cleared),
            tables: std::mem::take(&mut self.tables),
            ..Plan::default()
        };
        let Limits { rows, prompt_rows, .. } = self.limits;
        let prompt_rows_left = if prompt_rows > 0 { prompt_rows } else { rows };
        let mut step = Step { rows_left: rows, prompt_rows_left, ..Step::default() };
        let after = self.better_after();
        (self.waited, self.has_ended) = (after, false);
        let missed = if after {
            // Two passes are enough for one.
            None
        } else {
            self.decode(&mut plan, &mut step);
            self.better_together()
        };
        self.missed = missed.map_or(0, |missed| self.missed + missed);
        if missed.is_none() {
            self.prefill(&mut step);
            if !step.preempted {
                self.start(&mut plan, &mut step);
            }
        }
        if after && step.work.is_empty() {
            self.decode(&mut plan, &mut step);
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

    /// The sequences with only their newest token to run, in the order of arrival.
    fn ready(&self) -> impl Iterator<Item = SequenceId> {
        self.running.iter().filter(|(_, sequence)| sequence.known.left() == 1).map(|(id, _)| *id)
    }

    /// The sequences that generate in this step, in the order of arrival. If not all that are ready do, others are left
    /// out than in the step before.
    fn generating(&mut self) -> Vec<SequenceId> {
        let ready: Vec<SequenceId> = self.ready().take(self.limits.generating as usize).collect();
        let count = ready.len();
        let drafts = self.limits.drafts > 0 && self.drafting && count < self.limits.draft_rows as usize;
        // Where pages are short, who came first must not be left out: pages are taken from those who came last.
        let are_short = self.pages.available() < count;
        let rows = if drafts || are_short { count } else { self.pace.rows(count as u32) as usize };
        if rows == count {
            return ready;
        }
        let first = ready.partition_point(|id| *id <= self.left_out) % count;
        self.left_out = ready[(first + count - rows - 1) % count];
        let is_in = |place: usize| (place + count - first) % count >= count - rows;
        ready.into_iter().enumerate().filter(|(place, _)| is_in(*place)).map(|(_, id)| id).collect()
    }

    /// Takes note that a step of `rows` generating sequences, and nothing else, took so many seconds.
    pub fn took(&mut self, rows: u32, seconds: f64) {
        self.pace.took(rows, seconds);
    }

    /// Gives sequences with only their newest token to run a row each, and a page for it.
    fn decode(&mut self, plan: &mut Plan, step: &mut Step) {
        for id in self.generating() {
            // Skipped if it was preempted for an earlier one.
            if !self.running.contains_key(&id) {
                continue;
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

    /// Extends the page table over the first `rows` tokens that are not computed. Returns false if there are too few
    /// pages.
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

    /// Takes the slot and the pages from a running sequence.
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
        // The backend need not see entries of this plan for the slot.
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

    /// Gives rows to the prompts that are partly read.
    fn prefill(&mut self, step: &mut Step) {
        for (&id, sequence) in &self.running {
            if sequence.known.left() > 1 && step.reads() {
                step.read(id, sequence);
            }
        }
    }

    /// Lets decoding sequences draft, if the step has room for more rows.
    fn draft(&mut self, plan: &mut Plan, step: &mut Step) {
        let decoding = step.work.iter().filter(|(_, work)| work.samples && work.rows == 1).count() as u32;
        let others: u32 = step.work.iter().map(|(_, work)| work.rows).sum::<u32>() - decoding;
        let threshold = self.limits.draft_rows.min(self.limits.rows).saturating_sub(others);
        // Drafts follow known tokens only.
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
            // One of the tokens up to `max_length` comes without a draft.
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

    /// Takes the result of the oldest step that was planned and not advanced: an [`Advance`] for each [`Work`] that
    /// samples, in order. Then call [`finish`](Self::finish) for each sequence that has ended. A sequence that has
    /// `max_length` tokens must be finished, unless the step was foreseen.
    ///
    /// # Panics
    /// If an advance is missing or does not belong to the plan: a bug of the caller.
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

    /// Notes that the last planned step brings no tokens to these slots, since they could not be chosen in time. The
    /// row from which each would have been chosen runs again in the next step. Call this before that plan is
    /// [foreseen](Self::foresee) or [advanced](Self::advance).
    pub fn put_off(&mut self, slots: &[Slot]) {
        for (_, work) in self.work.iter_mut().filter(|(_, work)| work.samples && slots.contains(&work.slot)) {
            (work.rows, work.samples) = (work.rows - 1, false);
            self.counts.put_off += 1;
        }
    }

    /// Takes the planned step as under way before its tokens are known, so that the next step can be planned. The
    /// [`advance`](Self::advance) of this step comes after the plan of the next. A foreseen step brings one token for
    /// every work that samples, and a sequence that then has `max_length` tokens is finished here. A sequence that
    /// turns out to have ended earlier may have a row in the next plan, whose result belongs to no sequence.
    ///
    /// Returns false if the step cannot be foreseen: sequences draft or may soon, or the step before has not been
    /// advanced.
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

    /// Takes note that a sequence's rows have run, or are about to, and bring `tokens`.
    fn take_in(&mut self, id: SequenceId, work: Work, tokens: &[u32]) {
        // The sequence may have ended since the step was planned.
        let Some(Placed { known, .. }) = self.running.get_mut(&id) else { return };
        known.computed = (work.start + work.rows) as usize;
        if work.samples {
            known.tokens.extend_from_slice(tokens);
            known.computed = known.tokens.len() - 1;
            assert!(known.tokens.len() <= known.max_length);
        }
        self.index(id);
    }

    /// Puts the pages that a sequence has filled into the index. If the index has a page with the same content, the
    /// sequence uses that page instead.
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

    /// Ends a sequence that has left numbers in its pages which are not finite. Pages that it shares are left alone:
    /// whoever else has them fails as well, or has only what came before.
    pub fn fail(&mut self, id: SequenceId) {
        let pages = self.running.get(&id).map_or(&[][..], |placed| &placed.pages);
        let own: Vec<Page> = pages.iter().rev().copied().filter(|page| self.pages.users(*page) == 1).collect();
        own.iter().for_each(|page| self.pages.discard(*page));
        self.cleared.extend(own);
        self.finish(id);
    }

    /// Ends a sequence, because it is complete or no longer wanted.
    pub fn finish(&mut self, id: SequenceId) {
        if let Some(Placed { slot, pages, .. }) = self.running.remove(&id) {
            self.has_ended = true;
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
    /// How many of these rows may be rows of prompts.
    prompt_rows_left: u32,
    preempted: bool,
    work: Vec<(SequenceId, Work)>,
    /// Sources of copies, which must not be used for anything else in this step.
    sources: Vec<Page>,
}

impl Step {
    /// Whether there are rows left for prompts.
    fn reads(&self) -> bool {
        self.rows_left.min(self.prompt_rows_left) > 0
    }

    /// Adds as many of a sequence's remaining rows as there is room for, as rows of prompts.
    fn read(&mut self, id: SequenceId, sequence: &Placed) {
        let rows = sequence.known.left().min(self.prompt_rows_left as usize);
        self.prompt_rows_left -= self.push(id, sequence, rows);
    }

    /// Adds as many of a sequence's next `rows` rows as there is room for. Returns how many.
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
