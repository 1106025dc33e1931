//! Drafts for the sequences of a batch by a model or a head. This drafter runs a batch of its own, with pages of its
//! own. Its sequences follow the text of the sequences that they draft for.
//!
//! A proposal is a chain of tokens for each sequence. Each place in the chains takes one pass over the draft model. The
//! first pass runs the rows that a sequence's cache lacks, usually one or two; every later pass runs one row for each
//! sequence. All sequences share the passes, so their number is chosen for all together: the number that makes the most
//! tokens in a time, by the formula of [`drafting`] summed over the sequences.
//!
//! If the model's drafts are hopeless, it is asked for one token every [`REST`] steps. Each time this changes nothing,
//! the rest becomes twice as long. Such a trial costs no row in the step. A sequence gets no drafts by the model if
//! there is no room for it, or if it has a token that the draft model does not know. None of this changes the text.
//!
//! A head's rows are made from hidden states, which the model's passes leave for the last [`WINDOW`] positions of a
//! sequence, as long as each step leaves them. So a head knows a sequence's text only from some place on.

use std::collections::HashMap;
use std::ops::Range;

use gpu_kernels::drafting::{self, Cost, ONE};
use gpu_kernels::step::MAX_DECODE_ROWS;
use model::{Config, Sampling};

use crate::Error;
use crate::backend::common_prefix;
use crate::batch::PAGE_TOKENS;
use crate::batch::backend::{BatchBackend, Start};
use crate::batch::plan::{Page, Plan, Slot, Started, TableEntry, Work};
use crate::batch::running::Running;
use crate::draft::{DraftCheckpoint, ModelDraft, learned, pass_share};
use crate::drafter::Backoff;

/// Steps without a pass, if none is worth it, before a trial.
const REST: u32 = 16;
/// The longest rest.
const MOST_REST: u32 = 16 * REST;
/// Rows that a sequence's cache may lack and still run in the shared first pass. If it lacks more, they are read as a
/// prompt.
const MOST_LAG: usize = MAX_DECODE_ROWS as usize;

/// A sequence that may get drafts.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Its slot in the batch that is drafted for.
    pub slot: Slot,
    /// Its state.
    pub running: &'a Running,
    /// Most drafts that it may get.
    pub most: u32,
}

impl<'a> Wanted<'a> {
    /// The sequence in a slot, with at most `most` drafts.
    pub(crate) const fn of(slot: Slot, running: &'a Running, most: u32) -> Self {
        Self { slot, running, most }
    }
}

/// For how many of a sequence's last positions hidden states are kept for a head.
pub(crate) const WINDOW: usize = 128;

/// A draft model or a head, with the batch that it runs.
pub(crate) struct ModelDrafter {
    backend: Box<dyn BatchBackend>,
    /// Tokens below this number are known to both models.
    vocab: u32,
    /// The cost of a pass, as a share of a one-row step of the model that is drafted for.
    pass: u32,
    /// For a head: the positions whose hidden states are there, by slot.
    states: Option<HashMap<Slot, Range<usize>>>,
    /// Not used for a head, whose sequences have the slots of the model's.
    free_slots: Vec<Slot>,
    free_pages: Vec<Page>,
    /// The followed sequences, by slot in the batch that is drafted for.
    followers: HashMap<Slot, Follower>,
    /// The estimate over all sequences of what drafts are worth. A new sequence starts with it.
    usual: u32,
    /// Steps until the next trial.
    rest: u32,
    /// The length of a rest.
    rests: Backoff,
}

/// The draft model's sequence for one sequence of the batch.
struct Follower {
    slot: Slot,
    pages: Vec<Page>,
    /// How many tokens at the start of the followed sequence are not in this one's text. The counts below are within
    /// this text.
    skipped: usize,
    /// Tokens of the text when drafts were last proposed.
    known: usize,
    /// The drafts that were last proposed.
    chain: Vec<u32>,
    /// Whether the last of these drafts has not been run as a row.
    is_behind: bool,
    /// Tokens of the text, from the first on, whose keys and values are in the cache.
    cached: usize,
    /// The estimate of what drafts are worth.
    acceptance: u32,
}

/// A chain in the making.
struct Chain<'a> {
    /// The index of its sequence among those that are wanted.
    of: usize,
    wanted: Wanted<'a>,
    slot: Slot,
    /// The text that the draft model's sequence has to follow.
    text: &'a [u32],
    /// Whether the draft model has to start its sequence.
    starts: bool,
    /// Entries of the page table that the backend does not know yet.
    tables: Vec<TableEntry>,
    /// Tokens of the text and the chain whose rows have run or are under way.
    cached: usize,
    /// The drafts so far.
    tokens: Vec<u32>,
    /// The number of drafts to make.
    length: usize,
}

impl ModelDrafter {
    /// A drafter for a model of this `config`, whose steps take as long as reading `of_model` bytes. `backend` runs
    /// `draft`, without drafts of its own. `layer_bytes` is the time that a layer of a step of one row takes beside its
    /// weights, as bytes that could be read in it.
    pub(crate) fn new(
        backend: Box<dyn BatchBackend>,
        config: &Config,
        draft: &DraftCheckpoint,
        (of_model, layer_bytes): (u64, u64),
    ) -> Self {
        let limits = backend.limits();
        // In a pass of several rows, a grid barrier follows each matrix, which makes layers slower.
        let bytes = draft.pass_bytes(2 * layer_bytes);
        Self {
            states: draft.is_head().then(HashMap::new),
            free_slots: (0..limits.sequences).rev().collect(),
            free_pages: (0..limits.pages).rev().collect(),
            followers: HashMap::new(),
            usual: drafting::UNTRIED,
            rest: 0,
            rests: Backoff::new(REST, MOST_REST),
            vocab: draft.vocab_size(config) as u32,
            pass: pass_share(of_model, bytes),
            backend,
        }
    }

    /// Whether this is a head, which drafts from the model's hidden states.
    pub(crate) const fn is_head(&self) -> bool {
        self.states.is_some()
    }

    /// Notes that rows at these positions of the sequence in a slot have run, and whether they left their hidden
    /// states.
    pub(crate) fn note_states(&mut self, slot: Slot, positions: Range<usize>, are_left: bool) {
        let Some(states) = &mut self.states else { return };
        if !are_left {
            states.remove(&slot);
            return;
        }
        let there = states.entry(slot).or_insert(positions.start..positions.start);
        if positions.start > there.end || positions.start < there.start {
            there.start = positions.start;
        }
        there.end = positions.end;
        there.start = there.start.max(there.end.saturating_sub(WINDOW));
    }

    /// Forgets the sequence in a slot, which has left it.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.leave(slot);
        if let Some(states) = &mut self.states {
            states.remove(&slot);
        }
    }

    /// Stops following the sequence in a slot.
    fn leave(&mut self, slot: Slot) {
        if let Some(follower) = self.followers.remove(&slot) {
            if !self.is_head() {
                self.free_slots.push(follower.slot);
            }
            self.free_pages.extend(follower.pages);
        }
    }

    /// The estimate of what drafts for the sequence in a slot are worth.
    pub(crate) fn acceptance(&self, slot: Slot) -> u32 {
        self.followers.get(&slot).map_or(self.usual, |follower| follower.acceptance)
    }

    /// Makes a chain for each of `wanted`. The chain is empty if another source of drafts, or none at all, is better.
    /// `rows` is the number of rows of the step without drafts, and `cost` what a draft's row costs.
    ///
    /// # Errors
    /// A device error.
    pub(crate) fn propose(
        &mut self,
        settings: &ModelDraft,
        cost: Cost,
        rows: u32,
        wanted: &[Option<Wanted<'_>>],
    ) -> Result<Vec<Vec<u32>>, Error> {
        wanted.iter().flatten().for_each(|wanted| self.follow(wanted));
        let mut chains = vec![Vec::new(); wanted.len()];
        let candidates: Vec<Wanted<'_>> = self.candidates(wanted.iter().flatten());
        let mut depth = self.depth(settings, cost, rows, &candidates);
        if depth > 0 {
            self.rests.reset();
        } else if self.rest == 0 && !candidates.is_empty() {
            self.rests.lengthen();
            depth = 1;
        } else {
            return Ok(chains);
        }
        self.rest = self.rests.length();
        let is_candidate = |wanted: &Wanted<'_>| candidates.iter().any(|candidate| candidate.slot == wanted.slot);
        let of_candidates = (0..).zip(wanted).filter_map(|(of, wanted)| Some((of, wanted.filter(is_candidate)?)));
        let mut begun: Vec<Chain<'_>> =
            of_candidates.filter_map(|(of, wanted)| self.begin(of, wanted, depth)).collect();
        self.read(&mut begun)?;
        self.run(&mut begun)?;
        for chain in begun {
            if let Some(follower) = self.followers.get_mut(&chain.wanted.slot) {
                follower.known = chain.text.len();
                follower.cached = follower.known;
                follower.is_behind = chain.tokens.len() == chain.length;
                follower.chain.clone_from(&chain.tokens);
            }
            chains[chain.of] = chain.tokens;
        }
        Ok(chains)
    }

    /// Learns how a sequence's last drafts fared, and which of their rows may stay in the cache.
    fn follow(&mut self, wanted: &Wanted<'_>) {
        let Some(follower) = self.followers.get_mut(&wanted.slot) else { return };
        let chain = std::mem::take(&mut follower.chain);
        if chain.is_empty() {
            return;
        }
        let new = &wanted.running.history[follower.skipped + follower.known..];
        follower.acceptance = learned(follower.acceptance, &chain, new);
        self.usual = drafting::mean(self.usual, follower.acceptance);
        let ran = &chain[..chain.len() - usize::from(follower.is_behind)];
        follower.cached = follower.known + common_prefix(ran, new);
    }

    /// Whether to wait for tokens and run passes before the next step: chains are likely to be worth it, or a trial is
    /// due to see whether this has changed.
    pub(crate) fn is_worthwhile(
        &mut self,
        settings: &ModelDraft,
        cost: Cost,
        rows: u32,
        wanted: &[Wanted<'_>],
    ) -> bool {
        wanted.iter().for_each(|wanted| self.follow(wanted));
        let candidates = self.candidates(wanted);
        if self.depth(settings, cost, rows, &candidates) > 0 {
            return true;
        }
        self.rest = self.rest.saturating_sub(1);
        self.rest == 0 && !candidates.is_empty()
    }

    /// Those of `wanted` for which no other drafts were found that are likelier to be right than the model's.
    fn candidates<'w, 'a: 'w>(&self, wanted: impl IntoIterator<Item = &'w Wanted<'a>>) -> Vec<Wanted<'a>> {
        let found = |running: &Running| !running.guess.tokens.is_empty();
        let prefers = |w: &Wanted<'_>| found(w.running) && w.running.acceptance >= self.acceptance(w.slot);
        wanted.into_iter().filter(|wanted| wanted.most > 0 && !prefers(wanted)).copied().collect()
    }

    /// How many passes for all `candidates` together make the most tokens in a time. `rows` is the number of rows of
    /// the step without drafts.
    fn depth(&self, settings: &ModelDraft, cost: Cost, rows: u32, candidates: &[Wanted<'_>]) -> u32 {
        let most = candidates.iter().map(|wanted| wanted.most).max().unwrap_or(0).min(settings.depth());
        if !settings.adaptive {
            return most;
        }
        let (each, mut tokens) = (u64::from(cost.each), u64::from(ONE) * u64::from(rows));
        let mut time = u64::from(ONE) + each * u64::from(rows.saturating_sub(1));
        let (mut best, mut best_tokens, mut best_time) = (0, tokens, time);
        if rows == 1 {
            time += u64::from(cost.any);
        }
        let acceptances: Vec<u64> = candidates.iter().map(|wanted| self.acceptance(wanted.slot).into()).collect();
        // The tokens that the next draft of each sequence is expected to bring.
        let mut more = acceptances.clone();
        for depth in 1..=most {
            time += u64::from(self.pass);
            for ((acceptance, more), wanted) in acceptances.iter().zip(&mut more).zip(candidates) {
                if depth <= wanted.most {
                    (tokens, time) = (tokens + *more, time + each);
                    *more = (*more * acceptance) >> 16;
                }
            }
            if u128::from(tokens) * u128::from(best_time) >= u128::from(best_tokens) * u128::from(time) {
                (best, best_tokens, best_time) = (depth, tokens, time);
            }
        }
        best
    }

    /// For a sequence that is not followed yet: where its text begins, and its slot. None if there is no room.
    fn place(&mut self, slot: Slot, length: usize) -> Option<(usize, Slot)> {
        let Some(states) = &self.states else { return Some((0, self.free_slots.pop()?)) };
        // A row's position in this text must find its hidden states in the ring, so the first ones must be those of a
        // multiple of the window.
        let first = states.get(&slot)?.start.next_multiple_of(WINDOW);
        (first + 2 <= length && slot < self.backend.limits().sequences).then_some((first + 1, slot))
    }

    /// Whether the hidden states of the rows that a follower's cache lacks are there. Always true for a model.
    fn can_go_on(&self, slot: Slot) -> bool {
        let (Some(states), Some(follower)) = (&self.states, self.followers.get(&slot)) else { return true };
        states.get(&slot).is_some_and(|there| there.start < follower.skipped + follower.cached)
    }

    /// Begins a sequence's chain of at most `depth` drafts. None if there is no room, or if the sequence has a token
    /// that the draft model does not know.
    fn begin<'a>(&mut self, of: usize, wanted: Wanted<'a>, depth: u32) -> Option<Chain<'a>> {
        let history = &wanted.running.history;
        if !self.can_go_on(wanted.slot) {
            self.leave(wanted.slot);
        }
        let is_new = !self.followers.contains_key(&wanted.slot);
        if is_new {
            let ((skipped, slot), acceptance) = (self.place(wanted.slot, history.len())?, self.usual);
            let (pages, chain) = (Vec::new(), Vec::new());
            let follower = Follower { slot, pages, skipped, known: 0, chain, is_behind: false, cached: 0, acceptance };
            self.followers.insert(wanted.slot, follower);
        }
        let length = depth.min(wanted.most) as usize;
        let follower = self.followers.get_mut(&wanted.slot)?;
        let text = &history[follower.skipped..];
        let lacks = (text.len() + length - 1).div_ceil(PAGE_TOKENS).saturating_sub(follower.pages.len());
        let is_known = text[follower.cached..].iter().all(|&token| token < self.vocab);
        let Some(left) = self.free_pages.len().checked_sub(lacks).filter(|_| is_known) else {
            self.leave(wanted.slot);
            return None;
        };
        let starts = is_new || text.len() - follower.cached > MOST_LAG;
        let first_page = if starts { 0 } else { follower.pages.len() };
        follower.pages.extend(self.free_pages.drain(left..));
        let entry = |(index, &page): (usize, &Page)| TableEntry { slot: follower.slot, index: index as u32, page };
        let tables = follower.pages.iter().enumerate().skip(first_page).map(entry).collect();
        if !starts {
            self.backend.rewrite(follower.slot, follower.known, &text[follower.known..]);
        }
        let (slot, cached) = (follower.slot, follower.cached);
        Some(Chain { of, wanted, slot, text, cached, starts, tables, length, tokens: Vec::new() })
    }

    /// Tells the backend the pages of `chains` and the sequences that start. Reads what these sequences' caches lack,
    /// except the newest token.
    fn read(&mut self, chains: &mut [Chain<'_>]) -> Result<(), Error> {
        let most = self.backend.limits().rows as usize;
        let mut plan = Plan::default();
        let mut starts = Vec::new();
        for chain in &mut *chains {
            plan.tables.append(&mut chain.tables);
            if chain.starts {
                plan.started.push(Started { slot: chain.slot, sequence: chain.slot.into() });
                starts.push(chain.start());
            }
        }
        let mut rows = 0;
        for chain in chains.iter_mut().filter(|chain| chain.starts) {
            let newest = chain.text.len() - 1;
            while chain.cached < newest {
                let count = (newest - chain.cached).min(most - rows);
                plan.work.push(chain.work(count, false));
                chain.cached += count;
                rows += count;
                if rows == most {
                    self.backend.step(&std::mem::take(&mut plan), &std::mem::take(&mut starts))?;
                    rows = 0;
                }
            }
        }
        if plan != Plan::default() {
            self.backend.step(&plan, &starts)?;
        }
        Ok(())
    }

    /// Runs the passes of `chains`. If the backend can, each pass is begun before the one before has ended.
    fn run(&mut self, chains: &mut [Chain<'_>]) -> Result<(), Error> {
        let passes = chains.iter().map(|chain| chain.length).max().unwrap_or(0);
        let most_under_way = if self.backend.runs_ahead() { 2 } else { 1 };
        let (mut begun, mut ended) = (0, 0);
        while ended < passes {
            while begun < passes && begun - ended < most_under_way {
                let work = chains.iter_mut().filter(|chain| chain.length > begun).map(Chain::next);
                self.backend.begin(&Plan { work: work.collect(), ..Plan::default() }, &[])?;
                begun += 1;
            }
            let outcomes = self.backend.end()?;
            let going_on = chains.iter_mut().filter(|chain| chain.length > ended);
            for (chain, outcome) in going_on.zip(outcomes) {
                // A chain ends at a token that the other model does not know, or at a fault; later tokens of it do not
                // count.
                let said = outcome.tokens.first().filter(|&&token| outcome.fault.is_none() && token < self.vocab);
                if let Some(&token) = said.filter(|_| chain.tokens.len() == ended) {
                    chain.tokens.push(token);
                }
            }
            ended += 1;
        }
        Ok(())
    }
}

impl<'a> Chain<'a> {
    /// How its sequence starts. All tokens before the newest are read as a prompt.
    fn start(&self) -> Start<'a> {
        Start {
            tokens: self.text,
            prompt: self.text.len() - 1,
            max_length: self.wanted.running.max_length,
            sampling: Sampling::default(),
            stop_tokens: &[],
            logprobs: None,
            form: None,
        }
    }

    /// Its next `rows` rows.
    fn work(&self, rows: usize, samples: bool) -> Work {
        Work { slot: self.slot, start: self.cached as u32, rows: rows as u32, samples, most_drafts: 0 }
    }

    /// The rows of its next pass. The first pass runs all rows up to the newest token, every later pass one row.
    fn next(&mut self) -> Work {
        let work = self.work(self.text.len().saturating_sub(self.cached).max(1), true);
        self.cached += work.rows as usize;
        work
    }
}
