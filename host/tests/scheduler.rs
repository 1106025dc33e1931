//! The scheduler against a model of what it schedules: a device that knows, for every place in every page, which text it holds.
//!
//! The device executes plans literally. Before a row runs, every place before it must hold its own sequence's text; a plan may
//! not go over its limits; and when all is done, no page is in use. Some steps are planned while the one before is under way.

use std::collections::{BTreeMap, HashMap};

use host::batch::plan::{Page, SequenceId, Slot};
use host::batch::{Advance, Costs, Limits, Plan, Scheduler};
use proptest::prelude::*;
use proptest::strategy::ValueTree;

/// What a place holds: everything up to and with its token, as a hash.
type Text = u64;
const NOTHING: Text = 0;

fn then(text: Text, token: u32) -> Text {
    model::sampling::random(text, token.into())
}

/// The token that follows `tokens`: the device's "model". The alphabet is small, so that texts meet again.
fn next(tokens: &[u32]) -> u32 {
    (tokens.iter().fold(7, |text, &token| then(text, token)) % 3) as u32
}

struct Device {
    limits: Limits,
    pages: Vec<Vec<Text>>,
    host: Vec<Vec<Text>>,
    slots: HashMap<Slot, (SequenceId, Vec<Page>)>,
}

impl Device {
    fn new(limits: Limits) -> Self {
        let store = |pages: u32| vec![vec![NOTHING; limits.page_tokens]; pages as usize];
        Self { pages: store(limits.pages), host: store(limits.host_pages), limits, slots: HashMap::new() }
    }

    /// Executes the plan's moves, as a launch for each part would: all reads of a part before its writes.
    fn prepare(&mut self, plan: &Plan) {
        for slot in &plan.freed {
            assert!(self.slots.remove(slot).is_some(), "slot {slot} was not taken");
        }
        let mut targets = Vec::new();
        for swap in &plan.swap_out {
            self.host[swap.to as usize] = self.pages[swap.from as usize].clone();
            targets.push(swap.to);
        }
        let distinct = |mut targets: Vec<u32>| {
            let count = targets.len();
            targets.sort_unstable();
            targets.dedup();
            assert_eq!(targets.len(), count, "a page is the target of two: {plan:?}");
        };
        distinct(targets);
        let sources: Vec<Vec<Text>> = plan.copies.iter().map(|copy| self.pages[copy.from as usize].clone()).collect();
        for (copy, source) in plan.copies.iter().zip(sources) {
            assert!(plan.copies.iter().all(|other| other.from != copy.to), "a source is a target: {plan:?}");
            self.pages[copy.to as usize] = source;
        }
        for swap in &plan.swap_in {
            self.pages[swap.to as usize] = self.host[swap.from as usize].clone();
        }
        let copied = plan.copies.iter().map(|c| c.to);
        distinct(copied.chain(plan.swap_in.iter().map(|s| s.to)).collect());
        for started in &plan.started {
            assert!(started.slot < self.limits.sequences);
            let before = self.slots.insert(started.slot, (started.sequence, Vec::new()));
            assert!(before.is_none(), "slot {} is taken", started.slot);
        }
        for entry in &plan.tables {
            let (_, table) = self.slots.get_mut(&entry.slot).expect("a table of a running sequence");
            table.resize(table.len().max(entry.index as usize + 1), Page::MAX);
            table[entry.index as usize] = entry.page;
        }
    }

    /// Runs a row; everything before it must be in place. The first `prompt` tokens are the prompt.
    fn row(&mut self, slot: Slot, tokens: &[u32], prompt: usize, position: usize) {
        let size = self.limits.page_tokens;
        let table = &self.slots[&slot].1;
        let mut text = NOTHING;
        // What was generated leaves other bits, where the limits say so.
        let apart = self.limits.prompts_apart;
        let place = |at: usize| tokens[at] + if apart && at >= prompt { 1000 } else { 0 };
        for at in 0..position {
            text = then(text, place(at));
            let page = table[at / size] as usize;
            assert_eq!(self.pages[page][at % size], text, "slot {slot}: position {at} of {tokens:?} is lost");
        }
        let page = table[position / size] as usize;
        self.pages[page][position % size] = then(text, place(position));
    }
}

/// One case: what is asked for, and how lucky drafts are.
#[derive(Debug, Clone)]
struct Case {
    limits: Limits,
    costs: Costs,
    /// Prompt, most tokens, where the caller ends it early, and the step before which it comes.
    requests: Vec<(Vec<u32>, usize, usize, usize)>,
    /// Of 4 steps, so many are foreseen, as far as they can be.
    foreseen: usize,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let tier = (0..14u32, 0..5u32, 0..12u32);
    let starts = (0..40u32, 0..7u32, any::<bool>());
    let limits = (1..7u32, 0..12u32, 1..6usize, 2..40usize, 0..5u32, tier, starts);
    let request = (prop::collection::vec(0..2u32, 1..24), 1..30usize, 1..40usize, 0..20usize);
    let others = (any::<u64>(), 0..3u32, 0..5usize);
    (limits, prop::collection::vec(request, 1..14), others).prop_map(|(limits, requests, (seed, cost, foreseen))| {
        let (sequences, rows, page_tokens, context, pages, tier, starts) = limits;
        let (host_pages, drafts, draft_rows) = tier;
        let (prompt_rows, prompt_share, prompts_apart) = starts;
        let limits = Limits {
            context,
            sequences,
            rows: sequences + rows,
            page_tokens,
            pages: context.div_ceil(page_tokens) as u32 + pages,
            host_pages,
            drafts,
            draft_rows,
            prompt_rows,
            prompt_share,
            prompts_apart,
        };
        let requests = requests.into_iter().map(|(mut prompt, most, early, step)| {
            prompt.truncate(context - 1);
            let length = (prompt.len() + most).min(context);
            (prompt, length, early, step)
        });
        let costs = Costs { swap_page: [0.0, 1.0, 2.0][cost as usize], row: 1.0 };
        Case { limits, costs, requests: requests.collect(), foreseen, seed }
    })
}

/// What happened in a case.
#[derive(Debug, Default, PartialEq)]
struct Happened {
    preempted: u64,
    /// Tokens found, and brought back.
    shared: u64,
    restored: u64,
    /// Steps planned while another was under way, and rows that ran in them for nobody.
    foreseen: u64,
    wasted: u64,
}

/// Runs the case to its end.
fn run(case: &Case) -> Happened {
    let Case { limits, costs, requests, foreseen, seed } = case.clone();
    let mut device = Device::new(limits);
    let mut scheduler = Scheduler::new(limits, costs);
    let mut coming: Vec<_> = requests.into_iter().collect();
    coming.sort_by_key(|request| std::cmp::Reverse(request.3));
    // What each sequence is, the most it may become, where it ends, and its prompt's length.
    let mut texts: BTreeMap<SequenceId, (Vec<u32>, usize, usize, usize)> = BTreeMap::new();
    let mut random = (0..).map(|i| model::sampling::random(seed, i));
    let mut random = move |n: usize| (random.next().unwrap_or(0) % n as u64) as usize;
    let all: usize = coming.iter().map(|request| request.1).sum();
    // Each step brings at least a row of the first in line; a preempted one may be computed again for each before it.
    let patience = 30 + all * (coming.len() + 1);
    // Of a foreseen step, what it brings.
    let mut under_way: Option<Brought> = None;
    let mut happened = Happened::default();
    for step in 0.. {
        while coming.last().is_some_and(|request| request.3 <= step) {
            let (prompt, length, early, _) = coming.pop().expect("there is one");
            let id = scheduler.add(prompt.clone(), length);
            let end = length.min(prompt.len() + early);
            let prompt_len = prompt.len();
            texts.insert(id, (prompt, length, end, prompt_len));
        }
        if texts.is_empty() && coming.is_empty() {
            break;
        }
        assert!(step < patience, "no end after {step} steps");
        // What runs and is not at its end, as far as that can be foreseen.
        let goes_on = |id: &SequenceId| texts.get(id).is_some_and(|(tokens, length, ..)| tokens.len() < *length);
        let first = device.slots.values().map(|(id, _)| *id).filter(goes_on).min();
        let plan = scheduler.plan();
        device.prepare(&plan);
        if let Some(first) = first {
            assert!(device.slots.values().any(|(id, _)| *id == first), "the first in line was preempted");
        }
        assert!(!texts.keys().any(goes_on) || !plan.work.is_empty(), "nothing to do for {texts:?}");

        let (mut rows, mut decoding) = (0, 0);
        let mut advances = Vec::new();
        let mut worked = Vec::new();
        let owed = plan.work.iter().filter(|work| work.samples && work.rows == 1).count() as u32;
        for work in &plan.work {
            let id = device.slots[&work.slot].0;
            assert!(!worked.contains(&id), "{id} works twice");
            worked.push(id);
            let (mut tokens, length, end, prompt) = texts[&id].clone();
            for position in work.start..work.start + work.rows {
                device.row(work.slot, &tokens, prompt, position as usize);
            }
            rows += work.rows;
            assert_eq!(work.samples, (work.start + work.rows) as usize == tokens.len());
            if !work.samples {
                assert_eq!(work.most_drafts, 0);
                continue;
            }
            let mut drafts = 0;
            if work.rows == 1 {
                decoding += 1;
                // As the operator hands out its budget: each of the others is owed a row.
                let left = plan.draft_threshold.saturating_sub(rows_of(&advances) + 1 + (owed - decoding));
                drafts = random(1 + work.most_drafts.min(left) as usize);
            }
            // Drafts: right up to a point, then wrong.
            let right = random(1 + drafts);
            let known = tokens.len();
            for draft in 0..drafts {
                let token = next(&tokens);
                tokens.push(if draft < right { token } else { token + 5 });
                device.row(work.slot, &tokens, prompt, known + draft);
            }
            tokens.truncate(known + right);
            tokens.push(next(&tokens));
            tokens.truncate(length);
            let brought = tokens[known..].to_vec();
            advances.push((work.rows == 1, drafts, Advance { slot: work.slot, tokens: brought }));
            texts.insert(id, (tokens, length, end, prompt));
        }
        let drafts: u32 = advances.iter().map(|advance| advance.1 as u32).sum();
        assert!(rows + drafts <= limits.rows, "{rows} + {drafts} rows");
        assert!(drafts == 0 || rows + drafts <= limits.draft_rows, "{rows} rows and {drafts} drafts");
        assert!(drafts == 0 || under_way.is_none(), "drafts behind tokens that are not known");
        let lengths = worked.into_iter().map(|id| (id, texts[&id].0.len())).collect();
        let brought = Brought { advances: advances.into_iter().map(|advance| advance.2).collect(), lengths };
        if let Some(before) = under_way.take() {
            happened.foreseen += 1;
            happened.wasted += before.arrive(&mut scheduler, &mut texts, false);
        }
        if random(4) < foreseen && scheduler.foresee() {
            under_way = Some(brought);
        } else {
            happened.wasted += brought.arrive(&mut scheduler, &mut texts, true);
        }
    }
    assert_eq!((scheduler.pages_in_use(), scheduler.running(), scheduler.waiting()), (0, 0, 0));
    assert_eq!(scheduler.free_host_pages(), limits.host_pages as usize);
    let counts = scheduler.counts();
    Happened {
        preempted: counts.swapped + counts.dropped,
        shared: counts.shared_tokens,
        restored: counts.restored_tokens,
        ..happened
    }
}

/// What a step brings.
struct Brought {
    advances: Vec<Advance>,
    /// Of each sequence with rows, its tokens after the step.
    lengths: Vec<(SequenceId, usize)>,
}

impl Brought {
    /// The scheduler hears of it. Unless it is the last step that was planned, sequences may have run on since. Returns how many had rows for nothing.
    fn arrive(
        self,
        scheduler: &mut Scheduler,
        texts: &mut BTreeMap<SequenceId, (Vec<u32>, usize, usize, usize)>,
        is_last: bool,
    ) -> u64 {
        scheduler.advance(&self.advances);
        let mut wasted = 0;
        for (id, known) in self.lengths {
            // Ended before.
            let Some((tokens, length, end, _)) = texts.get(&id) else {
                wasted += 1;
                continue;
            };
            let finished = !is_last && known == *length;
            assert_eq!(scheduler.tokens(id), (!finished).then_some(&tokens[..known]));
            if known >= *end {
                scheduler.finish(id);
                texts.remove(&id);
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
fn the_cases_preempt_and_share_and_run_ahead() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut preempting, mut sharing, mut restoring, mut foreseen, mut wasted) = (0, 0, 0, 0, 0);
    for _ in 0..300 {
        let case = case().new_tree(&mut runner).expect("cases can be made").current();
        let happened = run(&case);
        preempting += (happened.preempted > 0) as u32;
        sharing += (happened.shared > 0) as u32;
        restoring += (happened.restored > 0) as u32;
        foreseen += happened.foreseen;
        wasted += happened.wasted;
    }
    println!(
        "{preempting} preempt, {sharing} share, {restoring} bring back; {foreseen} steps foreseen, {wasted} rows for nothing"
    );
    assert!(preempting > 30 && sharing > 100 && restoring > 10, "{preempting}, {sharing}, {restoring}");
    assert!(foreseen > 1000 && wasted > 20, "{foreseen}, {wasted}");
}

#[test]
fn sequences_that_begin_alike_compute_it_once() {
    let limits = Limits {
        context: 200,
        sequences: 8,
        rows: 32,
        page_tokens: 4,
        pages: 100,
        host_pages: 0,
        drafts: 0,
        draft_rows: 0,
        prompt_rows: 0,
        prompt_share: 0,
        prompts_apart: true,
    };
    let prefix: Vec<u32> = (0..101).collect();
    let requests = (0..8).map(|i| ([prefix.as_slice(), &[500 + i]].concat(), 104, 9, 0)).collect();
    let case = Case { limits, costs: Costs { swap_page: 1.0, row: 1.0 }, requests, foreseen: 0, seed: 1 };
    // All but the first find the 25 full pages of the prefix.
    assert_eq!(run(&case), Happened { shared: 7 * 100, ..Happened::default() });
}

/// One whose prompts wait until they have 20 rows, or are one for one that runs.
fn patient(pages: u32) -> Scheduler {
    let limits = Limits {
        context: 64,
        sequences: 8,
        rows: 64,
        page_tokens: 4,
        pages,
        host_pages: 0,
        drafts: 0,
        draft_rows: 0,
        prompt_rows: 20,
        prompt_share: 1,
        prompts_apart: true,
    };
    Scheduler::new(limits, Costs { swap_page: 1.0, row: 1.0 })
}

/// A step that brings a token to whoever samples. How many start in it.
fn step(scheduler: &mut Scheduler) -> usize {
    let plan = scheduler.plan();
    let sampling = plan.work.iter().filter(|work| work.samples);
    scheduler.advance(&sampling.map(|work| Advance { slot: work.slot, tokens: vec![1] }).collect::<Vec<_>>());
    plan.started.len()
}

#[test]
fn a_few_prompts_wait_for_more_while_others_run() {
    let mut scheduler = patient(128);
    // Alone, at once; a second is one for one that runs, and does not wait either; a third does, until there are 20 rows.
    scheduler.add(vec![2; 9], 60);
    assert_eq!(step(&mut scheduler), 1);
    scheduler.add(vec![3; 9], 60);
    assert_eq!(step(&mut scheduler), 1);
    scheduler.add(vec![4; 10], 60);
    assert_eq!((step(&mut scheduler), step(&mut scheduler)), (0, 0));
    scheduler.add(vec![5; 10], 60);
    assert_eq!(step(&mut scheduler), 2);
    // When nothing runs any more, nothing is waited for.
    scheduler.add(vec![6; 3], 60);
    assert_eq!(step(&mut scheduler), 0);
    (0..4).for_each(|id| scheduler.finish(id));
    assert_eq!(step(&mut scheduler), 1);
}

#[test]
fn who_has_no_room_is_not_waited_for_together() {
    let mut scheduler = patient(20);
    (0..2).for_each(|i| _ = scheduler.add(vec![2 + i; 10], 60));
    assert_eq!(step(&mut scheduler), 2);
    // Together they would have 66 rows, but there are pages for the first alone.
    scheduler.add(vec![4; 10], 60);
    scheduler.add(vec![5; 56], 60);
    assert_eq!((step(&mut scheduler), step(&mut scheduler)), (0, 0));
    scheduler.finish(0);
    // Now it is one for one that runs.
    assert_eq!(step(&mut scheduler), 1);
}
