//! Checks plan after plan against what the scheduler promises: which sequences start, which are preempted for which,
//! and that none starves.

use std::collections::{BTreeMap, HashMap};

use host::batch::plan::{SequenceId, Slot};
use host::batch::{Costs, Counts, Limits, Plan, Scheduler};

/// A sequence that has not ended.
#[derive(Debug, Clone)]
pub struct Sequence {
    /// Its tokens, those of a step under way included.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt: usize,
    /// Most tokens.
    pub length: usize,
    /// Where the caller ends it.
    pub end: usize,
    /// Tokens whose rows have run, and that were not given up since.
    pub computed: usize,
}

impl Sequence {
    /// Whether it has more to run, as far as that can be foreseen.
    pub fn goes_on(&self) -> bool {
        self.tokens.len() < self.length
    }

    /// How many of the pages that `other` begins with `self` will have filled, when its own prompt has been read in.
    fn leaves(&self, other: &Self, limits: &Limits) -> usize {
        let others = &other.tokens[..other.tokens.len() - 1];
        let mut same = self.tokens.iter().zip(others).take_while(|(a, b)| a == b).count();
        if limits.prompts_apart && self.prompt != other.prompt {
            same = same.min(self.prompt).min(other.prompt);
        }
        same / limits.page_tokens
    }
}

/// A plan, and what it was made from.
pub struct Planned<'a> {
    pub plan: &'a Plan,
    /// The sequences that ran before it, by slot, without those that have ended.
    pub ran: &'a BTreeMap<Slot, SequenceId>,
    /// All sequences that go on, each as the plan found it. Those that start are as the plan takes them up.
    pub sequences: &'a BTreeMap<SequenceId, &'a Sequence>,
    /// The scheduler, after the plan.
    pub scheduler: &'a Scheduler,
}

/// What the plans so far did.
pub struct Rules {
    limits: Limits,
    costs: Costs,
    counts: Counts,
    /// Of the sequences that go on, the one that came first, and for how many steps it has been that one.
    first: (SequenceId, usize),
    /// How many steps preempted a sequence; and how many pages each sequence can fill.
    preempting: usize,
    pages: HashMap<SequenceId, usize>,
    /// How often a sequence started before another that had come earlier.
    pub overtakings: u64,
}

impl Rules {
    pub fn new(limits: Limits, costs: Costs) -> Self {
        let (counts, pages) = (Counts::default(), HashMap::new());
        Self { limits, costs, counts, first: (0, 0), preempting: 0, pages, overtakings: 0 }
    }

    /// Checks a step's plan.
    pub fn check(&mut self, planned: &Planned<'_>) {
        let Planned { plan, ran, sequences, scheduler } = planned;
        let preempted: Vec<SequenceId> = plan.freed.iter().filter_map(|slot| ran.get(slot).copied()).collect();
        self.first_ends(sequences);
        self.last_is_preempted(planned, &preempted);
        if preempted.is_empty() {
            self.starts(planned);
        } else {
            assert!(plan.started.is_empty(), "{preempted:?} had to leave, and others come: {plan:?}");
        }

        // Whether a page is taken for drafts: one beyond the newest token's.
        let drafts = plan.work.iter().filter(|work| work.most_drafts > 0).any(|work| {
            let beyond = (work.start + work.rows).div_ceil(self.limits.page_tokens as u32);
            plan.tables.iter().any(|entry| entry.slot == work.slot && entry.index >= beyond)
        });
        let is_known = |work: &&host::batch::plan::Work| {
            let sequence = ran.get(&work.slot).map(|id| sequences[id]);
            sequence.is_some_and(|sequence| sequence.computed + 1 == sequence.tokens.len())
        };
        let generating = plan.work.iter().filter(is_known).count();
        assert!(generating <= self.limits.generating as usize, "{generating} generate: {plan:?}");

        let (free, running) = (self.free_pages(scheduler), scheduler.running());
        assert!(!drafts || free >= running, "{free} pages are left of drafts, for {running}: {plan:?}");
    }

    fn free_pages(&self, scheduler: &Scheduler) -> usize {
        self.limits.pages as usize - scheduler.pages_in_use()
    }

    /// The sequence that came first ends within a bounded number of steps. While it waits for pages, no other starts,
    /// and each step brings a row to the first of those that run, so that they end one after another; then it starts
    /// itself. If it waits for a prompt that is being read in, that takes no more rows than they would. Each choice
    /// that is put off takes a step more; of 8 choices at most two are put off.
    fn first_ends(&mut self, sequences: &BTreeMap<SequenceId, &Sequence>) {
        let Some((&first, _)) = sequences.first_key_value() else { return };
        let steps = if self.first.0 == first { self.first.1 + 1 } else { 0 };
        self.first = (first, steps);
        let most = 2 * (self.limits.sequences as usize + 1) * self.limits.context;
        assert!(steps <= most, "{first} has been the first for {steps} steps");
    }

    /// Sequences that came last are preempted. One is saved only where that is cheaper than to compute it again.
    fn last_is_preempted(&mut self, planned: &Planned<'_>, preempted: &[SequenceId]) {
        let Planned { plan, ran, sequences, scheduler } = planned;
        let before = std::mem::replace(&mut self.counts, scheduler.counts());
        let (swapped, dropped) = (self.counts.swapped - before.swapped, self.counts.dropped - before.dropped);
        assert_eq!((swapped + dropped) as usize, preempted.len(), "{plan:?}");
        if let Some(first) = preempted.iter().min() {
            let stays = |id: &&SequenceId| !preempted.contains(id);
            let last = ran.values().filter(stays).max();
            assert!(last < Some(first), "{preempted:?} were preempted, and {last:?} was not");
        }
        let dear = |id: &&SequenceId| {
            let computed = sequences[id].computed;
            let pages = computed.div_ceil(self.limits.page_tokens);
            pages == 0 || pages as f64 * self.costs.swap_page > computed as f64 * self.costs.row
        };
        let dear = preempted.iter().filter(dear).count();
        assert!(dropped as usize >= dear, "{dropped} of {dear} are computed again: {plan:?}");

        // A step preempts only if an earlier sequence needs a page more than it ever had, which happens once for each
        // of its pages.
        let pages = |sequence: &Sequence| sequence.length.div_ceil(self.limits.page_tokens);
        self.pages.extend(sequences.iter().map(|(id, sequence)| (*id, pages(sequence))));
        self.preempting += usize::from(!preempted.is_empty());
        assert!(self.preempting <= self.pages.values().sum(), "{} steps preempt", self.preempting);
    }

    /// The sequences that start are the first in line, and all that have room start. One that waits for a prompt of
    /// another may be overtaken meanwhile.
    fn starts(&mut self, planned: &Planned<'_>) {
        let Planned { plan, ran, sequences, scheduler } = planned;
        let started: Vec<SequenceId> = plan.started.iter().map(|started| started.sequence).collect();
        assert!(started.is_sorted(), "{started:?}");
        let runs = |id: &SequenceId| started.contains(id) || ran.values().any(|other| other == id);
        let waiting: Vec<SequenceId> = sequences.keys().copied().filter(|id| !runs(id)).collect();
        for &id in &waiting {
            let overtaking = started.iter().filter(|other| **other > id).count();
            assert!(overtaking == 0 || Self::waits_for(id, planned, &self.limits), "{started:?} overtake {id}");
            self.overtakings += overtaking as u64;
        }

        let (free, running) = (self.free_pages(scheduler), scheduler.running());
        // When the last one started, each of the others had a page left.
        assert!(started.is_empty() || free + 1 >= running, "{free} pages are left for {running}: {plan:?}");

        let Some(&first) = waiting.first() else { return };
        // Prompts that wait to be read in together are not checked here.
        let at_once = self.limits.prompt_rows == 0 || ran.is_empty();
        let rows: u32 = plan.work.iter().map(|work| work.rows).sum();
        let most = if self.limits.prompt_rows > 0 { self.limits.prompt_rows } else { u32::MAX };
        // A sequence that is only read in ahead needs more room than is counted here.
        let has_slot = running < self.limits.generating as usize && rows < self.limits.rows.min(most);
        if at_once && has_slot && !Self::waits_for(first, planned, &self.limits) {
            // Sources of copies are free only when the plan is made. Pages that the index has of its text are counted
            // as wanted too, since they may not help.
            let wanted = sequences[&first].tokens.len().div_ceil(self.limits.page_tokens);
            assert!(wanted + running + plan.copies.len() > free, "{first} has room, and waits: {plan:?}");
        }
    }

    /// Whether a sequence reads in what `id` begins with, which ran or started before `id` had its turn.
    fn waits_for(id: SequenceId, planned: &Planned<'_>, limits: &Limits) -> bool {
        let Planned { plan, ran, sequences, .. } = planned;
        let will_leave = |other: &SequenceId, there: usize| {
            let reader = sequences[other];
            let is_read = reader.computed + 1 >= reader.tokens.len();
            !is_read && reader.leaves(sequences[&id], limits) * limits.page_tokens > there
        };
        // Of a sequence that starts, even with saved pages, nothing is found before its first step.
        let mut starts = plan.started.iter().map(|started| started.sequence).filter(|other| *other < id);
        ran.values().any(|other| will_leave(other, sequences[other].computed))
            || starts.any(|other| will_leave(&other, 0))
    }
}
