//! Single cases, step by step.

use host::batch::pages::{NOTHING, PageLocation, Pages, Put};
use host::batch::plan::PageCopy;
use host::batch::tier::Tier;
use host::batch::{Advance, Costs, Limits, Plan, Scheduler};

/// Pages of 4 tokens. All that a case may ask for is off.
pub const PLAIN: Limits = Limits {
    context: 64,
    sequences: 8,
    generating: 8,
    rows: 64,
    page_tokens: 4,
    pages: 128,
    host_pages: 0,
    drafts: 0,
    draft_rows: 0,
    prompt_rows: 0,
    prompt_share: 0,
    prompts_apart: true,
    tiles: &[],
};

/// Costs where saving a page and bringing it back takes as long as so many rows.
fn cost(swap_page: f64) -> Costs {
    Costs { swap_page, row: 1.0 }
}

/// Runs a step that brings a token to every sequence that samples. It finishes none.
fn step(scheduler: &mut Scheduler) -> Plan {
    let plan = scheduler.plan();
    let sampling = plan.work.iter().filter(|work| work.samples);
    scheduler.advance(&sampling.map(|work| Advance { slot: work.slot, tokens: vec![1] }).collect::<Vec<_>>());
    plan
}

/// Runs a step. Returns how many sequences start in it.
fn starting(scheduler: &mut Scheduler) -> usize {
    step(scheduler).started.len()
}

/// Runs a prompt, whose answer is of one token, from its start to its end. The scheduler has nothing else to do.
fn run_alone(scheduler: &mut Scheduler, prompt: &[u32]) -> Plan {
    let id = scheduler.add(prompt.to_vec(), prompt.len() + 1);
    let plan = step(scheduler);
    assert_eq!(plan.started.len(), 1);
    scheduler.finish(id);
    plan
}

#[test]
fn a_long_one_starts_in_an_endless_stream_of_short_ones() {
    let limits = Limits { context: 32, sequences: 4, pages: 8, ..PLAIN };
    let mut scheduler = Scheduler::new(limits, cost(1.0));
    // Answers of 4 tokens: a sequence that runs ends within 4 steps.
    let mut short = (100..).map(|i| vec![i; 3]);
    let mut add_short = |scheduler: &mut Scheduler| scheduler.add(short.next().expect("endless"), 7);
    let mut running = vec![add_short(&mut scheduler), add_short(&mut scheduler)];
    step(&mut scheduler);
    let long = scheduler.add((0..31).collect(), 32);
    let mut steps = 0;
    while scheduler.tokens(long).is_some_and(|tokens| tokens.len() < 32) {
        running.push(add_short(&mut scheduler));
        step(&mut scheduler);
        let is_done = |id: &u64| scheduler.tokens(*id).is_some_and(|tokens| tokens.len() == 7);
        let (done, rest) = running.into_iter().partition::<Vec<_>, _>(is_done);
        done.into_iter().for_each(|id| scheduler.finish(id));
        running = rest;
        steps += 1;
        assert!(steps <= 4, "it still waits");
    }
}

/// Two sequences have room until both have 8 tokens.
const CROWDED: Limits = Limits { context: 20, pages: 5, ..PLAIN };

/// Runs two sequences, of which the second is preempted after 8 tokens. Returns the position at which it goes on when
/// there is room again.
fn preempted(scheduler: &mut Scheduler, prompts: [[u32; 6]; 2]) -> u32 {
    let [first, _] = prompts.map(|prompt| scheduler.add(prompt.to_vec(), 20));
    assert_eq!(starting(scheduler), 2);
    // The first takes the fifth page, and later one of those that the second had.
    while scheduler.tokens(first).is_some_and(|tokens| tokens.len() < 20) {
        step(scheduler);
    }
    assert_eq!((scheduler.running(), scheduler.waiting()), (1, 1));
    scheduler.finish(first);
    step(scheduler).work[0].start
}

#[test]
fn who_is_preempted_is_saved_if_that_is_cheaper_than_to_run_it_again() {
    let saved = |costs, host_pages| {
        let mut scheduler = Scheduler::new(Limits { host_pages, ..CROWDED }, costs);
        let start = preempted(&mut scheduler, [[5; 6], [6; 6]]);
        (scheduler.counts().swapped, scheduler.counts().dropped, start)
    };
    // The preempted sequence has 8 tokens in 2 pages.
    assert_eq!(saved(cost(3.9), 2), (1, 0, 8));
    assert_eq!(saved(cost(4.1), 2), (0, 1, 0));
    // It is saved only if the host tier has room.
    assert_eq!(saved(cost(3.9), 1), (0, 1, 0));
}

#[test]
fn who_is_preempted_is_saved_by_the_newest_measurements() {
    let mut scheduler = Scheduler::new(Limits { host_pages: 2, ..CROWDED }, cost(4.1));
    scheduler.set_costs(cost(3.9));
    assert_eq!(preempted(&mut scheduler, [[5; 6], [6; 6]]), 8);
}

#[test]
fn what_was_saved_comes_back_rather_than_a_copy_of_less() {
    let mut scheduler = Scheduler::new(Limits { host_pages: 2, ..CROWDED }, cost(1.0));
    // The first sequence's first page is still on the device, and begins like the second's.
    assert_eq!(preempted(&mut scheduler, [[6, 5, 5, 5, 5, 5], [6; 6]]), 8);
}

#[test]
fn who_is_preempted_is_saved_once_the_host_tier_is_there() {
    for grown in [None, Some(2)] {
        let mut scheduler = Scheduler::new(CROWDED, cost(1.0));
        assert!(!scheduler.may_want_host_pages());
        grown.into_iter().for_each(|pages| scheduler.set_host_pages(pages));
        assert_eq!(scheduler.free_host_pages(), grown.unwrap_or(0) as usize);
        preempted(&mut scheduler, [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]]);
        let is_there = u64::from(grown.is_some());
        assert_eq!((scheduler.counts().swapped, scheduler.counts().dropped), (is_there, 1 - is_there));
    }
    // 15 of the 16 pages are in use.
    let mut scheduler = Scheduler::new(Limits { pages: 16, ..PLAIN }, cost(1.0));
    scheduler.add(vec![1; 59], 64);
    step(&mut scheduler);
    assert!(scheduler.may_want_host_pages());
}

#[test]
fn who_is_preempted_is_saved_in_place_of_what_is_only_kept() {
    let mut scheduler = Scheduler::new(Limits { host_pages: 2, ..CROWDED }, cost(1.0));
    // The host tier's two pages keep the two full pages of a prompt that two sequences have had.
    (0..2).for_each(|_| _ = run_alone(&mut scheduler, &[2, 2, 2, 2, 3, 3, 3, 3, 4]));
    assert_eq!(run_alone(&mut scheduler, &[7; 19]).swap_out.len(), 2);
    assert_eq!(preempted(&mut scheduler, [[5; 6], [6; 6]]), 8);
}

#[test]
fn who_was_saved_does_not_wait_for_a_prompt_with_less_than_that() {
    let limits = Limits { context: 32, pages: 8, host_pages: 3, prompts_apart: false, ..PLAIN };
    let mut scheduler = Scheduler::new(limits, cost(1.0));
    // The last two sequences have the same text, and both are preempted for the first. The host tier has room for the
    // pages of one.
    let first = scheduler.add(vec![5; 10], 32);
    (0..2).for_each(|_| _ = scheduler.add(vec![6; 6], 32));
    while scheduler.tokens(first).is_some_and(|tokens| tokens.len() < 32) {
        step(&mut scheduler);
    }
    assert_eq!((scheduler.counts().swapped, scheduler.counts().dropped), (1, 1));
    scheduler.finish(first);
    assert_eq!(starting(&mut scheduler), 2);
}

/// Returns how many tokens come back from the host tier, of two pages that several sequences have had and that the
/// device needed for others.
fn restored(costs: Costs) -> u64 {
    let limits = Limits { context: 24, pages: 6, host_pages: 4, ..PLAIN };
    let mut scheduler = Scheduler::new(limits, costs);
    let prompt: Vec<u32> = (0..9).collect();
    run_alone(&mut scheduler, &prompt);
    run_alone(&mut scheduler, &prompt);
    run_alone(&mut scheduler, &[7; 23]);
    run_alone(&mut scheduler, &prompt);
    scheduler.counts().restored_tokens
}

#[test]
fn what_several_had_comes_back_if_that_is_cheaper_than_to_run_it_again() {
    assert_eq!(restored(cost(3.9)), 8);
    assert_eq!(restored(cost(4.1)), 0);
}

#[test]
fn of_a_text_that_is_of_use_no_more_the_end_is_forgotten_first() {
    let limits = Limits { context: 16, pages: 4, ..PLAIN };
    let mut scheduler = Scheduler::new(limits, cost(1.0));
    let prompt: Vec<u32> = (0..13).collect();
    run_alone(&mut scheduler, &prompt);
    // It takes two pages. One is the last page, which was not full, so it is not in the index. The other has to leave
    // the index.
    run_alone(&mut scheduler, &[7; 5]);
    assert_eq!(run_alone(&mut scheduler, &prompt).work[0].start, 8);
}

#[test]
fn a_page_is_not_taken_in_the_step_that_copies_from_it() {
    let limits = Limits { context: 24, pages: 7, ..PLAIN };
    let mut scheduler = Scheduler::new(limits, cost(1.0));
    let ended = [scheduler.add((10..19).collect(), 20), scheduler.add((20..29).collect(), 20)];
    assert_eq!(starting(&mut scheduler), 2);
    ended.iter().for_each(|id| scheduler.finish(*id));
    // The new sequence takes the pages that are not in the index. Of the others, the next to go is the second page of
    // the tokens 10 to 18.
    scheduler.add((30..39).collect(), 20);
    assert_eq!(starting(&mut scheduler), 1);
    scheduler.add(vec![10, 11, 12, 13, 14, 15, 16, 99], 20);
    let plan = step(&mut scheduler);
    assert_eq!((plan.started.len(), plan.work[1].start), (1, 7));
    let &[PageCopy { from, to }] = plan.copies.as_slice() else { panic!("{plan:?}") };
    assert_ne!(from, to);
}

#[test]
fn who_has_room_without_a_copy_starts() {
    let begins_alike = |len: u32| [10, 11, 12].into_iter().chain(20..).take(len as usize).collect::<Vec<u32>>();
    // A sequence alone takes all pages, also the one that it could copy from.
    let mut scheduler = Scheduler::new(Limits { context: 12, pages: 3, ..PLAIN }, cost(1.0));
    run_alone(&mut scheduler, &[10, 11, 12, 13, 14]);
    let plan = run_alone(&mut scheduler, &begins_alike(11));
    assert_eq!((plan.copies.len(), plan.work[0].start), (0, 0));
    // Beside another sequence, it has two pages and one that it copies from. After the step, the other sequence can
    // have that page.
    let mut scheduler = Scheduler::new(Limits { context: 12, pages: 4, ..PLAIN }, cost(1.0));
    run_alone(&mut scheduler, &[10, 11, 12, 13, 14]);
    scheduler.add(vec![5, 6], 12);
    assert_eq!(starting(&mut scheduler), 1);
    scheduler.add(begins_alike(8), 12);
    let plan = step(&mut scheduler);
    assert_eq!((plan.copies.len(), plan.work[1].start), (1, 3));
}

#[test]
fn a_copy_is_made_of_the_page_that_begins_most_alike() {
    let mut scheduler = Scheduler::new(PLAIN, cost(1.0));
    run_alone(&mut scheduler, &[10, 11, 12, 13, 14]);
    run_alone(&mut scheduler, &[10, 21, 22, 23, 24]);
    assert_eq!(run_alone(&mut scheduler, &[10, 11, 12, 99]).work[0].start, 3);
    assert_eq!(run_alone(&mut scheduler, &[10, 21, 22, 99]).work[0].start, 3);
}

#[test]
fn a_page_that_others_only_copied_from_is_not_kept_in_the_host_tier() {
    let mut scheduler = Scheduler::new(Limits { context: 24, pages: 6, host_pages: 4, ..PLAIN }, cost(1.0));
    run_alone(&mut scheduler, &[10, 11, 12, 13, 14]);
    assert_eq!(run_alone(&mut scheduler, &[10, 11, 12, 99, 98]).copies.len(), 1);
    assert_eq!(run_alone(&mut scheduler, &[7; 23]).swap_out, []);
}

#[test]
fn a_page_that_two_have_filled_with_the_same_is_kept_in_the_host_tier() {
    let mut scheduler = Scheduler::new(Limits { context: 24, pages: 6, host_pages: 4, ..PLAIN }, cost(1.0));
    // Both start in the same step, so neither finds anything of the other.
    let ids = [scheduler.add(vec![5; 3], 20), scheduler.add(vec![5; 3], 20)];
    (0..3).for_each(|_| _ = step(&mut scheduler));
    ids.iter().for_each(|id| scheduler.finish(*id));
    assert_eq!(run_alone(&mut scheduler, &[7; 23]).swap_out.len(), 1);
}

#[test]
fn the_host_tier_gives_up_what_was_unused_longest() {
    let mut tier = Tier::new(2);
    let keys = [1, 2].map(|token| (NOTHING, vec![token; 4].into(), 4));
    for (key, content) in keys.iter().zip(1..) {
        assert!(tier.keep(key, content).is_some());
        tier.end_plan();
    }
    assert!(tier.read(&keys[0]).is_some());
    tier.end_plan();
    let mut other = tier.clone();
    assert!(tier.take().is_some());
    assert_eq!(keys.each_ref().map(|key| tier.content(key)), [Some(1), None]);
    // A page that leaves the device once more, and is in the tier already, counts as used then.
    assert!(other.keep(&keys[1], 2).is_none());
    other.end_plan();
    assert!(other.take().is_some());
    assert_eq!(keys.each_ref().map(|key| other.content(key)), [None, Some(2)]);
}

#[test]
fn what_came_back_from_the_host_tier_is_kept_there_again() {
    let mut pages = Pages::new(1, 1, 4);
    pages.keeps = true;
    let text = [1, 2, 3, 4];
    let page = pages.take().expect("free");
    pages.index(page, NOTHING, &text, 4);
    pages.share(page);
    (0..2).for_each(|_| pages.release(page));
    assert_eq!(pages.take(), Some(page));
    assert_eq!(pages.end_plan().len(), 1);
    // It comes back to its page on the device. Meanwhile, its page in the host tier is taken for something else.
    let [(place, content)] = &pages.find(&text, 4).pages[..] else { panic!("it was kept") };
    let from = pages.read(place);
    let PageLocation::Host(key) = place else { panic!("{place:?}") };
    pages.restore(page, key.clone(), *content);
    pages.end_plan();
    assert_eq!(pages.tier.take(), from);
    pages.tier.release(from.into_iter().collect());
    pages.end_plan();
    pages.release(page);
    assert_eq!(pages.take(), Some(page));
    assert_eq!(pages.end_plan().len(), 1);
}

#[test]
fn what_was_generated_is_shared_as_a_prompt_where_the_device_computes_both_alike() {
    let start = |prompts_apart| {
        let mut scheduler = Scheduler::new(Limits { prompts_apart, ..PLAIN }, cost(1.0));
        let id = scheduler.add(vec![5; 4], 20);
        (0..5).for_each(|_| _ = step(&mut scheduler));
        // The sequence has a page of its prompt, a page that was generated, and its newest token.
        let tokens = scheduler.tokens(id).expect("it runs").to_vec();
        scheduler.finish(id);
        run_alone(&mut scheduler, &tokens).work[0].start
    };
    assert_eq!([true, false].map(start), [4, 8]);
}

#[test]
fn a_prompt_waits_for_what_was_generated_where_that_is_shared() {
    let started = |prompts_apart| {
        let mut scheduler = Scheduler::new(Limits { prompts_apart, ..CROWDED }, cost(1.0));
        let first = scheduler.add(vec![5; 11], 20);
        let second = scheduler.add(vec![6; 3], 20);
        // The second is preempted when it has generated the last token of its first page, and one more.
        while scheduler.tokens(first).is_some_and(|tokens| tokens.len() < 20) {
            step(&mut scheduler);
        }
        scheduler.finish(first);
        // The second is computed again. The new request's prompt is all the tokens that the second has.
        scheduler.add(scheduler.tokens(second).expect("it waits").to_vec(), 20);
        starting(&mut scheduler)
    };
    assert_eq!([true, false].map(started), [2, 1]);
}

#[test]
fn there_is_room_for_all_slots_and_for_those_that_are_free_after_a_step() {
    let mut scheduler = Scheduler::new(PLAIN, cost(1.0));
    let mut count = 0;
    while scheduler.has_room() {
        scheduler.add(vec![5; 3], 20);
        count += 1;
    }
    assert_eq!((count, starting(&mut scheduler)), (9, 8));
    assert!(!scheduler.has_room());
    scheduler.finish(0);
    assert!(scheduler.has_room());
}

#[test]
fn what_a_step_brings_is_not_foreseen_where_sequences_may_draft_next() {
    let mut scheduler = Scheduler::new(Limits { drafts: 3, draft_rows: 2, ..PLAIN }, cost(1.0));
    scheduler.add(vec![5; 3], 20);
    let plan = scheduler.plan();
    assert_eq!((plan.work[0].most_drafts, scheduler.foresee()), (0, false));
    scheduler.advance(&[Advance { slot: plan.work[0].slot, tokens: vec![1] }]);
    // Two sequences leave no row for drafts.
    scheduler.add(vec![6; 3], 20);
    scheduler.plan();
    assert!(scheduler.foresee());
}

#[test]
fn one_step_is_foreseen_at_a_time() {
    let mut scheduler = Scheduler::new(PLAIN, cost(1.0));
    scheduler.add(vec![5; 3], 20);
    let slot = scheduler.plan().work[0].slot;
    assert!(scheduler.foresee());
    scheduler.plan();
    assert!(!scheduler.foresee());
    scheduler.advance(&[Advance { slot, tokens: vec![1] }]);
    assert!(scheduler.foresee());
}

#[test]
fn a_choice_that_is_put_off_runs_its_row_again() {
    let mut scheduler = Scheduler::new(PLAIN, cost(1.0));
    let (late, other) = (scheduler.add(vec![5; 3], 20), scheduler.add(vec![6; 3], 20));
    let plan = scheduler.plan();
    scheduler.put_off(&[plan.work[0].slot]);
    assert_eq!(scheduler.sampling().collect::<Vec<_>>(), [other]);
    scheduler.advance(&[Advance { slot: plan.work[1].slot, tokens: vec![1] }]);
    assert_eq!((scheduler.tokens(late), scheduler.tokens(other)), (Some(&[5; 3][..]), Some(&[6, 6, 6, 1][..])));
    let next = scheduler.plan();
    let rows: Vec<_> = next.work.iter().map(|work| (work.start, work.rows, work.samples)).collect();
    assert_eq!(rows, [(2, 1, true), (3, 1, true)]);
}

#[test]
fn nothing_is_drafted_beyond_the_end() {
    let mut scheduler = Scheduler::new(Limits { drafts: 5, draft_rows: 8, ..PLAIN }, cost(1.0));
    scheduler.add(vec![5; 3], 8);
    // A step brings one token more than it has drafts.
    let drafts: Vec<u32> = (0..5).map(|_| step(&mut scheduler).work[0].most_drafts).collect();
    assert_eq!(drafts, [0, 3, 2, 1, 0]);
}

#[test]
fn what_is_run_again_while_the_host_tier_has_it_is_the_same_text() {
    let mut pages = Pages::new(2, 2, 4);
    pages.keeps = true;
    let text = [1, 2, 3, 4, 5, 6, 7, 8];
    let put = |pages: &mut Pages, page, before, chunk| match pages.index(page, before, chunk, 4) {
        Put::New(content) => content,
        Put::Same(..) => panic!("the index has it"),
    };
    let used = [pages.take().expect("free"), pages.take().expect("free")];
    let first = put(&mut pages, used[0], NOTHING, &text[..4]);
    put(&mut pages, used[1], first, &text[4..]);
    // Two sequences have used both pages. Then others want the memory.
    used.iter().for_each(|page| pages.share(*page));
    used.iter().chain(&used).rev().for_each(|page| pages.release(*page));
    let other = pages.take().expect("unused");
    pages.take().expect("unused");
    assert_eq!(pages.end_plan().len(), 2);
    // The first page has the same content as before, so the page that follows it is found.
    assert_eq!(put(&mut pages, other, NOTHING, &text[..4]), first);
    let found: Vec<PageLocation> = pages.find(&text, 8).pages.into_iter().map(|(place, _)| place).collect();
    assert!(matches!(found[..], [PageLocation::Device(page), PageLocation::Host(_)] if page == other), "{found:?}");
}

#[test]
fn who_is_read_in_ahead_takes_the_place_of_who_ends() {
    let mut scheduler = Scheduler::new(Limits { generating: 2, ..PLAIN }, cost(1.0));
    (0..3).for_each(|i| _ = scheduler.add(vec![2 + i; 3], 60));
    assert_eq!(rows(&step(&mut scheduler)), [3; 3]);
    let slots = |plan: &Plan| plan.work.iter().map(|work| work.slot).collect::<Vec<_>>();
    assert_eq!(slots(&step(&mut scheduler)), [0, 1]);
    scheduler.finish(0);
    assert_eq!(slots(&step(&mut scheduler)), [1, 2]);
}

#[test]
fn nobody_is_read_in_ahead_who_would_take_the_pages_of_others() {
    // With pages of 4 tokens, two sequences of 16 tokens will fill 8, and the third may fill 4.
    let started = |length| {
        let mut scheduler = Scheduler::new(Limits { generating: 2, pages: 12, context: 20, ..PLAIN }, cost(1.0));
        (0..2).for_each(|i| _ = scheduler.add(vec![2 + i; 3], 16));
        scheduler.add(vec![4; 3], length);
        starting(&mut scheduler)
    };
    assert_eq!([16, 17].map(started), [3, 2]);
}

/// Prompts wait until they have 20 rows, or have missed a token for each sequence that runs.
const PATIENT: Limits = Limits { prompt_rows: 20, prompt_share: 1, ..PLAIN };

/// Starts two sequences with prompts of 10 tokens.
fn two_run(scheduler: &mut Scheduler) {
    (0..2).for_each(|i| _ = scheduler.add(vec![2 + i; 10], 60));
    assert_eq!(starting(scheduler), 2);
}

#[test]
fn a_few_prompts_wait_for_more_while_others_run() {
    let mut scheduler = Scheduler::new(PATIENT, cost(1.0));
    // The first is alone and starts at once. By waiting, the second would miss a token, which is enough where one
    // sequence runs: it starts too. The third waits until there are 20 rows.
    scheduler.add(vec![2; 9], 60);
    assert_eq!(starting(&mut scheduler), 1);
    scheduler.add(vec![3; 9], 60);
    assert_eq!(starting(&mut scheduler), 1);
    scheduler.add(vec![4; 10], 60);
    assert_eq!(starting(&mut scheduler), 0);
    scheduler.add(vec![5; 10], 60);
    assert_eq!(starting(&mut scheduler), 2);
    // A prompt waits only while others run.
    scheduler.add(vec![6; 3], 60);
    assert_eq!(starting(&mut scheduler), 0);
    (0..4).for_each(|id| scheduler.finish(id));
    assert_eq!(starting(&mut scheduler), 1);
}

#[test]
fn a_prompt_waits_no_longer_than_a_pass_for_it_is_worth() {
    let mut scheduler = Scheduler::new(PATIENT, cost(1.0));
    (0..2).for_each(|i| _ = scheduler.add(vec![2 + i; 10], 60));
    assert_eq!(starting(&mut scheduler), 2);
    // A waiting prompt misses a token a step, and starts when these are as many as the sequences that run: two, then
    // three.
    let steps = |scheduler: &mut Scheduler, token| {
        scheduler.add(vec![token; 5], 60);
        (1..10).find(|_| starting(scheduler) == 1)
    };
    assert_eq!([5, 6].map(|token| steps(&mut scheduler, token)), [Some(2), Some(3)]);
}

/// Rows of a step's work.
fn rows(plan: &Plan) -> Vec<u32> {
    plan.work.iter().map(|work| work.rows).collect()
}

#[test]
fn a_step_reads_no_more_rows_than_prompts_wait_for_and_the_rest_waits_too() {
    let mut scheduler = Scheduler::new(PATIENT, cost(1.0));
    two_run(&mut scheduler);
    (0..3).for_each(|i| _ = scheduler.add(vec![4 + i; 9], 60));
    assert_eq!(rows(&step(&mut scheduler)), [1, 1, 9, 9, 2]);
    // Seven rows of the last prompt are left. They wait until there are 20.
    assert_eq!(rows(&step(&mut scheduler)), [1; 4]);
    scheduler.add(vec![7; 12], 60);
    assert_eq!(rows(&step(&mut scheduler)), [1; 4]);
    scheduler.add(vec![8; 9], 60);
    assert_eq!(rows(&step(&mut scheduler)), [1, 1, 1, 1, 7, 12, 1]);
    // Eight rows are left, and six sequences generate, so they wait. When only one generates, enough tokens have been
    // missed.
    assert_eq!(rows(&step(&mut scheduler)), [1; 6]);
    (0..5).for_each(|id| scheduler.finish(id));
    assert_eq!(rows(&step(&mut scheduler)), [1, 8]);
}

#[test]
fn the_last_prompts_wait_for_no_others() {
    let mut scheduler = Scheduler::new(PATIENT, cost(1.0));
    two_run(&mut scheduler);
    scheduler.add(vec![4; 10], 60);
    scheduler.expect_more(false);
    assert_eq!(rows(&step(&mut scheduler)), [1, 1, 10]);
    // Seven run in eight slots. The next has room, and the one after it may join it when another ends.
    (0..4).for_each(|i| _ = scheduler.add(vec![5 + i; 3], 60));
    assert_eq!(starting(&mut scheduler), 4);
    (0..2).for_each(|i| _ = scheduler.add(vec![9 + i; 3], 60));
    assert_eq!(starting(&mut scheduler), 0);
    scheduler.finish(0);
    assert_eq!(starting(&mut scheduler), 2);
}

#[test]
fn who_generates_waits_while_there_are_two_whole_passes_of_prompts() {
    let mut scheduler = Scheduler::new(PATIENT, cost(1.0));
    two_run(&mut scheduler);
    (0..6).for_each(|i| _ = scheduler.add(vec![4 + i; 10], 60));
    // 60 rows of prompts, then 40, then 20.
    let steps = [(); 4].map(|()| rows(&step(&mut scheduler)));
    assert_eq!(steps, [vec![10; 2], vec![10; 2], vec![1, 1, 1, 1, 1, 1, 10, 10], vec![1; 8]]);
}

#[test]
fn who_generates_waits_for_no_stream_of_answers_of_one_token() {
    let mut scheduler = Scheduler::new(PATIENT, cost(1.0));
    two_run(&mut scheduler);
    let (mut token, mut short, mut waited) = (4, Vec::new(), 0);
    for _ in 0..20 {
        while scheduler.waiting() < 6 {
            short.push(scheduler.add(vec![token; 10], 11));
            token += 1;
        }
        waited = if rows(&step(&mut scheduler)).contains(&1) { 0 } else { waited + 1 };
        assert!(waited <= 1, "they wait for a second pass behind which sequences have ended");
        let is_done = |id: &u64| scheduler.tokens(*id).is_some_and(|tokens| tokens.len() == 11);
        let done: Vec<u64> = short.extract_if(.., |id| is_done(id)).collect();
        done.into_iter().for_each(|id| scheduler.finish(id));
    }
}

#[test]
fn who_fails_leaves_nothing_in_the_cache() {
    let mut scheduler = Scheduler::new(PLAIN, cost(1.0));
    let failed = scheduler.add(vec![2; 9], 60);
    step(&mut scheduler);
    scheduler.fail(failed);
    scheduler.add(vec![2; 9], 60);
    let plan = step(&mut scheduler);
    assert_eq!((plan.cleared.len(), rows(&plan)), (3, vec![9]));
}

#[test]
fn who_generates_goes_on_where_prompts_have_no_room() {
    // Two sequences have six pages. Each prompt that waits would take three.
    let mut scheduler = Scheduler::new(Limits { context: 20, pages: 8, ..PATIENT }, cost(1.0));
    (0..8).for_each(|i| _ = scheduler.add(vec![2 + i; 10], 20));
    assert_eq!(starting(&mut scheduler), 2);
    assert_eq!(rows(&step(&mut scheduler)), [1, 1]);
}

#[test]
fn no_prompt_waits_for_others_where_no_rows_are_asked_for() {
    let mut scheduler = Scheduler::new(Limits { prompt_rows: 0, ..PATIENT }, cost(1.0));
    for token in 2..6 {
        scheduler.add(vec![token; 9], 60);
        assert_eq!(starting(&mut scheduler), 1);
    }
}

#[test]
fn who_has_no_room_is_not_waited_for_together() {
    let mut scheduler = Scheduler::new(Limits { pages: 20, ..PATIENT }, cost(1.0));
    two_run(&mut scheduler);
    // Together they would have 66 rows, but there are pages for the first alone.
    scheduler.add(vec![4; 10], 60);
    scheduler.add(vec![5; 56], 60);
    assert_eq!(starting(&mut scheduler), 0);
    scheduler.finish(0);
    // By waiting it would miss a token, which is enough where one sequence runs.
    assert_eq!(starting(&mut scheduler), 1);
}

#[test]
fn who_has_no_page_left_for_those_that_run_is_not_waited_for_together() {
    let started = |tokens| {
        let mut scheduler = Scheduler::new(Limits { pages: 20, ..PATIENT }, cost(1.0));
        two_run(&mut scheduler);
        // 14 pages are left: 3 for the first prompt, a page each for the three sequences that run then, and 8 for the
        // second prompt.
        scheduler.add(vec![4; 10], 60);
        scheduler.add(vec![5; tokens], 60);
        starting(&mut scheduler)
    };
    assert_eq!([32, 33].map(started), [2, 0]);
}

#[test]
fn pages_that_are_shared_are_no_room_for_others_together() {
    let started = |tokens| {
        let mut scheduler = Scheduler::new(Limits { pages: 20, ..PATIENT }, cost(1.0));
        let prompt: Vec<u32> = (100..124).collect();
        run_alone(&mut scheduler, &prompt[..17]);
        two_run(&mut scheduler);
        // 14 pages are left: 2 for the first prompt, 4 more that are found of it and that nobody else uses, a page each
        // for the three sequences that run then, and 5 for the second prompt.
        scheduler.add(prompt, 60);
        scheduler.add(vec![5; tokens], 60);
        starting(&mut scheduler)
    };
    assert_eq!([20, 21].map(started), [2, 0]);
}

#[test]
fn a_page_that_two_share_takes_room_once_together() {
    let mut scheduler = Scheduler::new(Limits { pages: 18, ..PATIENT }, cost(1.0));
    let prompt: Vec<u32> = (100..132).collect();
    run_alone(&mut scheduler, &prompt[..17]);
    two_run(&mut scheduler);
    // 12 pages are left: 4 that both prompts find, 3 for the first, 2 for the second, and a page each for the three
    // sequences that run then.
    scheduler.add(prompt[..28].to_vec(), 60);
    scheduler.add([&prompt[..16], &[7; 8]].concat(), 60);
    assert_eq!(starting(&mut scheduler), 2);
}

#[test]
fn rows_that_are_found_do_not_count_together() {
    let mut scheduler = Scheduler::new(PATIENT, cost(1.0));
    let prompt: Vec<u32> = (100..124).collect();
    run_alone(&mut scheduler, &prompt[..17]);
    two_run(&mut scheduler);
    // 16 of the prompt's tokens are found and 8 rows are left, so it waits for 12 more.
    scheduler.add(prompt, 60);
    assert_eq!(starting(&mut scheduler), 0);
    scheduler.add(vec![4; 12], 60);
    assert_eq!(starting(&mut scheduler), 2);
}

#[test]
fn who_has_no_slot_is_not_waited_for_together() {
    let mut scheduler = Scheduler::new(Limits { sequences: 3, ..PATIENT }, cost(1.0));
    two_run(&mut scheduler);
    (0..2).for_each(|i| _ = scheduler.add(vec![4 + i; 10], 60));
    assert_eq!(starting(&mut scheduler), 0);
}

#[test]
fn who_was_saved_does_not_wait_for_others() {
    let limits = Limits { context: 20, pages: 11, host_pages: 2, prompt_rows: 24, ..PATIENT };
    let mut scheduler = Scheduler::new(limits, cost(1.0));
    (0..4).for_each(|i| _ = scheduler.add(vec![2 + i; 6], 20));
    assert_eq!(starting(&mut scheduler), 4);
    // Three sequences have a third page, the last one has none.
    (0..3).for_each(|_| _ = step(&mut scheduler));
    assert_eq!((scheduler.running(), scheduler.counts().swapped), (3, 1));
    scheduler.finish(0);
    assert_eq!(starting(&mut scheduler), 1);
}

/// Six sequences where four fill a step's tiles: which ones generate, in so many steps that take `seconds(rows)`.
fn six_where_four_are_whole(steps: usize, seconds: impl Fn(u32) -> f64) -> Vec<Vec<u32>> {
    let mut scheduler = Scheduler::new(Limits { tiles: &[4], context: 1024, pages: 2048, ..PLAIN }, cost(1.0));
    for i in 0..6 {
        scheduler.add(vec![i], 1024);
    }
    step(&mut scheduler);
    let generate = |_| {
        let plan = step(&mut scheduler);
        assert!(plan.only_generates(), "{plan:?}");
        scheduler.took(plan.work.len() as u32, seconds(plan.work.len() as u32));
        plan.work.iter().map(|work| work.slot).collect()
    };
    (0..steps).map(generate).collect()
}

#[test]
fn sequences_beyond_whole_tiles_are_left_out_in_turns() {
    // Six take twice as long as four.
    let steps = six_where_four_are_whole(119, |rows| if rows > 4 { 2.0 } else { 1.0 });
    let steps = &steps[23..];
    assert!(steps.iter().all(|slots| slots.len() == 4), "{steps:?}");
    for three in steps.chunks_exact(3) {
        // Each is left out of one step in three.
        let mut slots = three.concat();
        slots.sort_unstable();
        assert_eq!(slots, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
    }
}

#[test]
fn where_a_row_more_costs_nothing_all_generate() {
    let steps = six_where_four_are_whole(1000, |_| 1.0);
    let left_out = steps.iter().filter(|slots| slots.len() < 6).count();
    assert!((1..40).contains(&left_out), "{left_out} of 1000 steps leave some out");
}
