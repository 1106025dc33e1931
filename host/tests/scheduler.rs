//! Tests the scheduler against a model of the device, which knows for every place in every page which text it holds.
//!
//! The device executes plans literally. Before a row runs, every place before it must hold its own sequence's text. No
//! plan may exceed its limits. Which sequences start and which are preempted must be as promised. When all is done, no
//! page may be in use. Some steps are planned while the one before is under way. Some requests come into a stream of
//! others that does not end before they do. Some choices are put off to the next step.

use std::collections::{BTreeMap, BTreeSet};

use host::batch::plan::{Plan, SequenceId, Slot};
use host::batch::{Advance, Costs, Limits, Scheduler};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

#[path = "scheduler/by_hand.rs"]
mod by_hand;
#[path = "scheduler/device.rs"]
mod device;
#[path = "scheduler/rules.rs"]
mod rules;

use device::{Device, next};
use rules::{Planned, Rules, Sequence};

/// A request of a case.
#[derive(Debug, Clone)]
struct Request {
    prompt: Vec<u32>,
    /// Most tokens, the prompt's included.
    length: usize,
    /// After how many generated tokens the caller ends it early.
    early: usize,
    /// The step before which it arrives.
    step: usize,
}

/// One case: limits, requests, and how likely what else may happen is.
#[derive(Debug, Clone)]
struct Case {
    limits: Limits,
    costs: Costs,
    requests: Vec<Request>,
    /// In this many of 4 steps, on average, another short request comes, until all of `requests` have ended.
    stream: usize,
    /// This many of 4 steps, on average, are foreseen, as far as they can be.
    foreseen: usize,
    /// This many of 8 choices, on average, are put off.
    late: usize,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let tier = (0..14u32, 0..5u32, 0..12u32);
    let starts = (0..40u32, 0..7u32, any::<bool>(), any::<bool>());
    let limits = ((1..7u32, 0..3u32), 0..12u32, 1..6usize, 2..40usize, 0..5u32, tier, starts);
    let request = (prop::collection::vec(0..2u32, 1..24), 1..30usize, 1..40usize, 0..20usize);
    let others = (any::<u64>(), 0..3u32, 0..5usize, prop_oneof![Just(0), 1..5usize], 0..3usize);
    (limits, prop::collection::vec(request, 1..14), others).prop_map(|(limits, requests, others)| {
        let ((sequences, ahead), rows, page_tokens, context, pages, tier, starts) = limits;
        let (host_pages, drafts, draft_rows) = tier;
        let (prompt_rows, prompt_share, prompts_apart, has_tiles) = starts;
        let (seed, cost, foreseen, stream, late) = others;
        let limits = Limits {
            context,
            sequences,
            generating: sequences.saturating_sub(ahead).max(1),
            rows: sequences + rows,
            page_tokens,
            pages: context.div_ceil(page_tokens) as u32 + pages,
            host_pages,
            drafts,
            draft_rows,
            // From 20 on it stands for 0: prompts start at once.
            prompt_rows: if prompt_rows < 20 { prompt_rows } else { 0 },
            prompt_share,
            prompts_apart,
            tiles: if has_tiles { &[1, 3, 4] } else { &[] },
        };
        let requests = requests.into_iter().map(|(mut prompt, most, early, step)| {
            prompt.truncate(context - 1);
            let length = (prompt.len() + most).min(context);
            Request { prompt, length, early, step }
        });
        let costs = Costs { swap_page: [0.0, 1.0, 2.0][cost as usize], row: 1.0 };
        Case { limits, costs, requests: requests.collect(), stream, foreseen, late, seed }
    })
}

/// What happened in a case.
#[derive(Debug, Default, PartialEq)]
struct Happened {
    swapped: u64,
    dropped: u64,
    /// Tokens of prompts that the page index had; and those of them that came back from the host tier.
    shared: u64,
    restored: u64,
    /// How often a sequence started before another that had come earlier.
    overtakings: u64,
    /// Drafts that were tried.
    drafted: u64,
    /// Steps planned while another was under way; and how many sequences had rows in them although they had ended.
    foreseen: u64,
    wasted: u64,
    /// Choices that were put off.
    put_off: u64,
}

/// Runs the case to its end.
fn run(case: &Case) -> Happened {
    let mut run = Run::new(case);
    for step in 0.. {
        run.add_those_of(step);
        if run.asked.is_empty() && run.coming.is_empty() {
            break;
        }
        let plan = run.plan();
        let (brought, put_off) = run.execute(&plan);
        run.tell(brought, &put_off);
    }
    run.end()
}

/// A case that runs.
struct Run {
    case: Case,
    device: Device,
    scheduler: Scheduler,
    rules: Rules,
    /// The requests that have not come yet, the last one first.
    coming: Vec<Request>,
    sequences: BTreeMap<SequenceId, Sequence>,
    /// The sequences of requests that have come and have not ended.
    asked: BTreeSet<SequenceId>,
    /// How many random numbers were drawn.
    drawn: u64,
    /// What a foreseen step brings.
    under_way: Option<Brought>,
    happened: Happened,
}

impl Run {
    fn new(case: &Case) -> Self {
        let Case { limits, costs, .. } = *case;
        let mut coming = case.requests.clone();
        coming.sort_by_key(|request| std::cmp::Reverse(request.step));
        Self {
            case: case.clone(),
            device: Device::new(limits),
            scheduler: Scheduler::new(limits, costs),
            rules: Rules::new(limits, costs),
            coming,
            sequences: BTreeMap::new(),
            asked: BTreeSet::new(),
            drawn: 0,
            under_way: None,
            happened: Happened::default(),
        }
    }

    /// A random number below `n`.
    fn random(&mut self, n: usize) -> usize {
        self.drawn += 1;
        (model::sampling::random(self.case.seed, self.drawn - 1) % n as u64) as usize
    }

    fn add(&mut self, Request { prompt, length, early, .. }: Request) -> SequenceId {
        let id = self.scheduler.add(prompt.clone(), length);
        let end = length.min(prompt.len() + early);
        self.sequences.insert(id, Sequence { prompt: prompt.len(), tokens: prompt, length, end, computed: 0 });
        id
    }

    /// Adds the sequences that come before a step.
    fn add_those_of(&mut self, step: usize) {
        while let Some(request) = self.coming.pop_if(|request| request.step <= step) {
            let id = self.add(request);
            self.asked.insert(id);
        }
        if self.random(4) < self.case.stream {
            let context = self.case.limits.context;
            let tokens = (1 + self.random(4)).min(context - 1);
            let prompt: Vec<u32> = (0..tokens).map(|_| self.random(3) as u32).collect();
            let length = (tokens + 1 + self.random(6)).min(context);
            self.add(Request { prompt, length, early: length, step });
        }
        self.asked.retain(|id| self.sequences.contains_key(id));
    }

    /// Plans a step, and checks the plan.
    fn plan(&mut self) -> Plan {
        // The sequences that run and are not at their end, as far as that can be foreseen.
        let goes_on = |id: &SequenceId| self.sequences.get(id).is_some_and(Sequence::goes_on);
        let slots = self.device.slots.iter().map(|(slot, (id, _))| (*slot, *id));
        let ran: BTreeMap<Slot, SequenceId> = slots.filter(|(_, id)| goes_on(id)).collect();
        let plan = self.scheduler.plan();
        self.device.prepare(&plan);
        if let Some(first) = ran.values().min() {
            assert!(self.device.slots.values().any(|(id, _)| id == first), "the first in line was preempted");
        }
        let has_none = plan.work.is_empty() && self.sequences.keys().any(goes_on);
        assert!(!has_none, "nothing to do for {:?}", self.sequences);
        for work in &plan.work {
            let id = self.device.slots[&work.slot].0;
            let sequence = self.sequences.get_mut(&id).expect("who works has not ended");
            let starts = plan.started.iter().any(|started| started.slot == work.slot);
            assert!(starts || sequence.computed == work.start as usize, "{work:?} of {sequence:?}");
            sequence.computed = work.start as usize;
        }
        let known = self.sequences.iter().map(|(id, sequence)| (*id, sequence));
        let known = known.filter(|(_, sequence)| sequence.goes_on()).collect();
        self.rules.check(&Planned { plan: &plan, ran: &ran, sequences: &known, scheduler: &self.scheduler });
        plan
    }

    /// Does the work of a plan. Returns what it brings, and whose choices are put off.
    fn execute(&mut self, plan: &Plan) -> (Brought, Vec<Slot>) {
        let (mut rows, mut decoding) = (0, 0);
        let mut advances = Vec::new();
        let (mut worked, mut put_off) = (Vec::new(), Vec::new());
        let owed = plan.work.iter().filter(|work| work.samples && work.rows == 1).count() as u32;
        for work in &plan.work {
            let id = self.device.slots[&work.slot].0;
            assert!(!worked.contains(&id), "{id} works twice");
            worked.push(id);
            rows += work.rows;
            let sequence = self.sequences.get_mut(&id).expect("it has not ended");
            for position in work.start..work.start + work.rows {
                self.device.row(work.slot, &sequence.tokens, sequence.prompt, position as usize);
            }
            sequence.computed = (work.start + work.rows) as usize;
            assert_eq!(work.samples, sequence.computed == sequence.tokens.len());
            if !work.samples {
                assert_eq!(work.most_drafts, 0);
                continue;
            }
            if self.random(8) < self.case.late {
                put_off.push(work.slot);
                self.sequences.get_mut(&id).expect("as above").computed -= 1;
                continue;
            }
            let mut drafts = 0;
            if work.rows == 1 {
                decoding += 1;
                // As the drafting operator hands out its budget: each decoding sequence that follows is owed a row.
                let left = plan.draft_threshold.saturating_sub(rows_of(&advances) + 1 + (owed - decoding));
                drafts = self.random(1 + work.most_drafts.min(left) as usize);
            }
            let tokens = self.choose(work.slot, id, drafts);
            advances.push((work.rows == 1, drafts, Advance { slot: work.slot, tokens }));
        }
        let drafts: u32 = advances.iter().map(|advance| advance.1 as u32).sum();
        self.happened.drafted += u64::from(drafts);
        let limits = &self.case.limits;
        assert!(rows + drafts <= limits.rows, "{rows} + {drafts} rows");
        assert!(drafts == 0 || rows + drafts <= limits.draft_rows, "{rows} rows and {drafts} drafts");
        assert!(drafts == 0 || self.under_way.is_none(), "drafts behind tokens that are not known");
        let lengths = worked.into_iter().map(|id| (id, self.sequences[&id].tokens.len())).collect();
        (Brought { advances: advances.into_iter().map(|advance| advance.2).collect(), lengths }, put_off)
    }

    /// Chooses the next tokens of a sequence, with so many drafts: they are right up to a point, then wrong.
    fn choose(&mut self, slot: Slot, id: SequenceId, drafts: usize) -> Vec<u32> {
        let right = self.random(1 + drafts);
        let Sequence { tokens, prompt, length, computed, .. } = self.sequences.get_mut(&id).expect("it has not ended");
        let known = tokens.len();
        for draft in 0..drafts {
            let token = next(tokens);
            tokens.push(if draft < right { token } else { token + 5 });
            self.device.row(slot, tokens, *prompt, known + draft);
        }
        tokens.truncate(known + right);
        tokens.push(next(tokens));
        tokens.truncate(*length);
        *computed = tokens.len() - 1;
        tokens[known..].to_vec()
    }

    /// Tells the scheduler what a step brought, at once or after the next plan.
    fn tell(&mut self, brought: Brought, put_off: &[Slot]) {
        if let Some(before) = self.under_way.take() {
            self.happened.foreseen += 1;
            self.happened.wasted += before.arrive(&mut self.scheduler, &mut self.sequences, false);
        }
        self.scheduler.put_off(put_off);
        if self.random(4) < self.case.foreseen && self.scheduler.foresee() {
            self.under_way = Some(brought);
        } else {
            self.happened.wasted += brought.arrive(&mut self.scheduler, &mut self.sequences, true);
        }
    }

    /// Cancels the sequences that are left of the stream, and checks that nothing else is left.
    fn end(mut self) -> Happened {
        self.sequences.into_keys().for_each(|id| self.scheduler.finish(id));
        let scheduler = &self.scheduler;
        assert_eq!((scheduler.pages_in_use(), scheduler.running(), scheduler.waiting()), (0, 0, 0));
        assert_eq!(scheduler.free_host_pages(), self.case.limits.host_pages as usize);
        let counts = scheduler.counts();
        Happened {
            swapped: counts.swapped,
            dropped: counts.dropped,
            shared: counts.shared_tokens,
            restored: counts.restored_tokens,
            overtakings: self.rules.overtakings,
            put_off: counts.put_off,
            ..self.happened
        }
    }
}

/// What a step brings.
struct Brought {
    advances: Vec<Advance>,
    /// How many tokens each sequence with rows has after the step.
    lengths: Vec<(SequenceId, usize)>,
}

impl Brought {
    /// Tells the scheduler what the step brought. Unless this is the last step that was planned, sequences may have run
    /// on since. Returns how many sequences had rows for nothing.
    fn arrive(self, scheduler: &mut Scheduler, sequences: &mut BTreeMap<SequenceId, Sequence>, is_last: bool) -> u64 {
        scheduler.advance(&self.advances);
        let mut wasted = 0;
        for (id, known) in self.lengths {
            // It had ended before the step.
            let Some(Sequence { tokens, length, end, .. }) = sequences.get(&id) else {
                wasted += 1;
                continue;
            };
            let finished = !is_last && known == *length;
            assert_eq!(scheduler.tokens(id), (!finished).then_some(&tokens[..known]));
            if known >= *end {
                scheduler.finish(id);
                sequences.remove(&id);
            }
        }
        wasted
    }
}

/// Rows that decoding sequences have taken, drafts included.
fn rows_of(advances: &[(bool, usize, Advance)]) -> u32 {
    advances.iter().filter(|advance| advance.0).map(|advance| 1 + advance.1 as u32).sum()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..Default::default() })]

    #[test]
    fn no_page_is_leaked_no_sequence_starves_and_budgets_hold(case in case()) {
        run(&case);
    }
}

#[test]
fn the_cases_preempt_and_share_and_overtake_and_run_ahead() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut all = Vec::new();
    for _ in 0..300 {
        let case = case().new_tree(&mut runner).expect("cases can be made").current();
        all.push(run(&case));
    }
    let cases = |what: fn(&Happened) -> u64| all.iter().filter(|happened| what(happened) > 0).count();
    let steps = |what: fn(&Happened) -> u64| all.iter().map(what).sum::<u64>();
    let (swapping, dropping) = (cases(|h| h.swapped), cases(|h| h.dropped));
    let (sharing, restoring, overtaking) = (cases(|h| h.shared), cases(|h| h.restored), cases(|h| h.overtakings));
    let (drafted, foreseen, wasted) = (steps(|h| h.drafted), steps(|h| h.foreseen), steps(|h| h.wasted));
    println!(
        "{swapping} save, {dropping} compute again, {sharing} share, {restoring} bring back, {overtaking} overtake"
    );
    let put_off = steps(|h| h.put_off);
    println!("{drafted} drafts, {foreseen} steps foreseen, {wasted} rows for nothing, {put_off} choices put off");
    assert!(swapping > 30 && dropping > 30, "{swapping}, {dropping}");
    assert!(sharing > 100 && restoring > 10 && overtaking > 5, "{sharing}, {restoring}, {overtaking}");
    assert!(drafted > 1000 && foreseen > 1000 && wasted > 20, "{drafted}, {foreseen}, {wasted}");
    assert!(put_off > 1000, "{put_off}");
}

#[test]
fn sequences_that_begin_alike_compute_it_once() {
    let limits = Limits { context: 200, rows: 32, pages: 100, ..by_hand::PLAIN };
    let prefix: Vec<u32> = (0..101).collect();
    let request = |i: u32| Request { prompt: [prefix.as_slice(), &[500 + i]].concat(), length: 104, early: 9, step: 0 };
    let requests = (0..8).map(request).collect();
    let case =
        Case { limits, costs: Costs { swap_page: 1.0, row: 1.0 }, requests, stream: 0, foreseen: 0, late: 0, seed: 1 };
    // All but the first find the 25 full pages of the prefix.
    assert_eq!(run(&case), Happened { shared: 7 * 100, ..Happened::default() });
}
