//! A request gives the same answer alone and in any batch: the path of a card, under the emulator.

use gpu_kernels::step::{self, PlanPrompt, STATE_WORDS, SequenceState};
use host::batch::plan::{PageCopy, Plan, Started, SwapIn, SwapOut, TableEntry, Work};
use host::batch::{BatchBackend, BatchOptions, GpuBatch, Logprobs, Outcome, Start};
use host::device::{Device, DeviceOptions, Level};
use host::forward::{Forward, RowOutput};
use host::{DeviceChoice, NgramDraft, Request};
use integration_tests::batch::{Arranged, Happened, together, with_penalties};
use integration_tests::{answer, emulator, engine, golden_cases, greedy, uploaded};
use model::{Checkpoint, Sampling};
use rayon::prelude::*;

const CONTEXT: usize = 200;

fn golden() -> Checkpoint {
    let case = golden_cases().into_iter().find(|case| case.name == "tied_bf16").expect("it is part of the repository");
    Checkpoint::open(&case.dir).unwrap_or_else(|e| panic!("{e}"))
}

/// A text that repeats itself now and then.
fn text(checkpoint: &Checkpoint, seed: u64, length: usize) -> Vec<u32> {
    let vocab = checkpoint.config.vocab_size as u64;
    (0..length).map(|at| (model::sampling::random(seed, (at % 23) as u64) % vocab) as u32).collect()
}

/// Requests that soon need a second page, and two that begin alike and part within their second page, one of them in
/// two tiles of a pass over prompts.
fn requests(checkpoint: &Checkpoint) -> Vec<Request> {
    let sampling = with_penalties(3);
    let short = (0..4).map(|i| (text(checkpoint, i, 58 + i as usize), 14 + i as usize));
    let long = [text(checkpoint, 9, 140), [text(checkpoint, 9, 80), text(checkpoint, 10, 8)].concat()];
    let all = short.chain(long.into_iter().zip([9, 6]));
    let request = |(i, (prompt, most)): (usize, (Vec<u32>, usize))| Request {
        sampling: if i % 2 == 0 { sampling } else { Sampling::default() },
        ignore_end: i != 3,
        form: None,
        ..greedy(&prompt, most, None)
    };
    all.enumerate().map(request).collect()
}

fn backend(checkpoint: &Checkpoint, seed: u64, options: BatchOptions, prompts_apart: bool) -> Box<dyn BatchBackend> {
    let device = emulator(seed, prompts_apart);
    Arranged::frugal(on(&device, checkpoint, options), device)
}

fn on(device: &Device, checkpoint: &Checkpoint, options: BatchOptions) -> Box<GpuBatch> {
    let weights = uploaded(device, checkpoint);
    let batch = GpuBatch::with_weights(device, &checkpoint.config, weights, CONTEXT, options);
    Box::new(batch.unwrap_or_else(|e| panic!("{e}")))
}

/// Sequences, rows of a step, pages of the cache and of the host tier, and drafts.
fn options(sequences: u32, rows: u32, pages: usize, host_pages: usize, draft: Option<NgramDraft>) -> BatchOptions {
    BatchOptions {
        sequences: Some(sequences),
        rows: Some(rows),
        cache_tokens: Some(pages * 64),
        swap_tokens: Some(host_pages * 64),
        draft: draft.map(Into::into),
        draft_rows: 16,
        packed_pages: Some(0),
        mask_wait: None,
    }
}

/// Company of several kinds: with so few pages that sequences are put aside, or computed again; with drafts and little
/// room in a step, or with so many that a step has more than 64 rows.
fn companies() -> [(BatchOptions, bool); 5] {
    let drafting = Some(NgramDraft { tokens: 7, max: 3, min: 1, adaptive: false });
    let many = drafting.map(|draft| NgramDraft { tokens: 15, ..draft });
    [
        (options(4, 300, 5, 16, None), true),
        (options(3, 20, 12, 0, drafting), true),
        (options(4, 300, 5, 16, drafting), true),
        (BatchOptions { draft_rows: 96, ..options(10, 300, 24, 0, many) }, true),
        (options(4, 300, 5, 16, None), false),
    ]
}

#[test]
fn a_request_gives_the_tokens_that_it_gives_alone() {
    let checkpoint = golden();
    let requests = requests(&checkpoint);
    let mut alone = engine(&checkpoint, DeviceChoice::Emulator, CONTEXT);
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut alone, request)).collect();
    let mut jobs: Vec<(usize, Request)> = requests.into_iter().enumerate().collect();
    let mut seen = Happened::default();
    for (seed, (options, to_host)) in companies().into_iter().enumerate() {
        let backend = Arranged::priced(backend(&checkpoint, seed as u64, options, false), to_host);
        let (answers, happened) = together(&checkpoint, backend, &jobs, None);
        for (id, answer) in &answers {
            let alone = &expected[*id];
            assert_eq!(answer.tokens, alone.tokens, "request {id} with {options:?}");
            assert_eq!((&answer.text, answer.finish), (&alone.text, alone.finish), "request {id} with {options:?}");
        }
        println!("{happened:?}");
        seen.add(happened);
        jobs.rotate_left(3);
        jobs.reverse();
    }
    // Otherwise the test has shown nothing.
    assert!(seen.swapped > 0 && seen.dropped > 0 && seen.shared > 100 && seen.accepted > 10, "{seen:?}");
}

#[test]
fn prompts_in_passes_of_their_own_give_the_same_in_any_company() {
    let checkpoint = golden();
    // The last goes on from what another generates: its bits are a prompt's nevertheless.
    let mut requests = requests(&checkpoint);
    let alone = |request: &Request| {
        let backend = backend(&checkpoint, 77, options(1, 256, 4, 0, None), true);
        together(&checkpoint, backend, &[(0, request.clone())], Some(2)).0.remove(0).1
    };
    let mut expected: Vec<_> = requests.par_iter().map(alone).collect();
    let longer = [requests[1].prompt.as_slice(), &expected[1].tokens].concat();
    requests.push(greedy(&longer, 5, None));
    expected.push(alone(&requests[6]));
    let jobs: Vec<(usize, Request)> = requests.into_iter().enumerate().collect();
    // The first is the third without drafts.
    let happened = companies().into_par_iter().enumerate().skip(1).map(|(seed, (options, to_host))| {
        let backend = Arranged::priced(backend(&checkpoint, seed as u64, options, true), to_host);
        let (answers, happened) = together(&checkpoint, backend, &jobs, Some(2));
        for (id, answer) in &answers {
            assert_eq!(answer, &expected[*id], "request {id} with {options:?}");
        }
        println!("{happened:?}");
        happened
    });
    let mut seen = Happened::default();
    happened.collect::<Vec<_>>().into_iter().for_each(|happened| seen.add(happened));
    assert!(seen.swapped > 0 && seen.dropped > 0 && seen.shared > 100 && seen.accepted > 10, "{seen:?}");
}

#[test]
fn a_prefix_that_had_to_leave_comes_back_from_the_host_tier() {
    let checkpoint = golden();
    let prefix = text(&checkpoint, 20, 64);
    let begun = |more: usize| [prefix.as_slice(), &text(&checkpoint, more as u64, more)].concat();
    // The first two share the prefix, the third needs every page, the last begins like the first two.
    let prompts = [begun(3), begun(5), text(&checkpoint, 9, 193), begun(4)];
    let jobs: Vec<_> = prompts.iter().enumerate().map(|(i, prompt)| (i, greedy(prompt, 3, None))).collect();
    for apart in [false, true] {
        let run = |pages, tier| {
            let backend = backend(&checkpoint, 11, options(1, 256, pages, tier, None), apart);
            together(&checkpoint, Arranged::priced(backend, true), &jobs, Some(2))
        };
        let (expected, Happened { shared, restored, .. }) = run(16, 0);
        assert_eq!((shared, restored), (128, 0));
        let (found, Happened { shared, restored, .. }) = run(4, 4);
        assert_eq!((shared, restored), (128, 64));
        assert_eq!(found, expected);
    }
}

#[test]
fn who_ends_early_runs_a_row_for_nothing() {
    let checkpoint = golden();
    let mut alone = engine(&checkpoint, DeviceChoice::Emulator, CONTEXT);
    // The first ends in the middle of what it would say; the third, whose penalties need every token in time, takes its
    // slot.
    let mut first = greedy(&text(&checkpoint, 1, 20), 14, None);
    let whole = answer(&mut alone, &first).text;
    let middle: Vec<char> = whole.chars().skip(whole.chars().count() / 2).collect();
    first.stop = vec![middle.iter().take(3).collect()];
    let second = greedy(&text(&checkpoint, 2, 61), 17, None);
    let sampling = Sampling {
        temperature: 0.7,
        repetition_penalty: 1.3,
        presence_penalty: 0.4,
        frequency_penalty: 0.2,
        seed: 8,
        ..Sampling::default()
    };
    let third = Request { sampling, ..greedy(&text(&checkpoint, 3, 40), 12, None) };
    let requests = [first, second, third];
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut alone, request)).collect();
    assert!((3..12).contains(&expected[0].tokens.len()), "{:?}", expected[0].tokens);
    let rows = |i: usize| requests[i].prompt.len() + expected[i].tokens.len() - 1;
    let rows = (0..3).map(rows).sum::<usize>() as u64;
    let jobs: Vec<(usize, Request)> = requests.iter().cloned().enumerate().collect();
    let run = |draft| {
        let backend = backend(&checkpoint, 12, options(2, 80, 12, 0, draft), false);
        let (answers, happened) = together(&checkpoint, backend, &jobs, None);
        for (id, answer) in &answers {
            assert_eq!((&answer.tokens, &answer.text), (&expected[*id].tokens, &expected[*id].text), "request {id}");
        }
        happened.rows
    };
    assert_eq!(run(None), rows + 1);
    // Nothing matches: no drafts, and no token is waited for.
    assert_eq!(run(Some(NgramDraft { max: 60, min: 60, ..NgramDraft::default() })), rows + 1);
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let checkpoint = golden();
    let prompt = text(&checkpoint, 1, 70);
    let jobs = [(0, greedy(&prompt, 9, None)), (1, greedy(&prompt[..5], 4, None))];
    let backend = backend(&checkpoint, 5, options(4, 80, 12, 0, None), false);
    let (answers, _) = together(&checkpoint, backend, &jobs, Some(3));
    for ((_, request), (_, answer)) in jobs.iter().zip(&answers) {
        let all = [request.prompt.as_slice(), &answer.tokens].concat();
        let mut alone = engine(&checkpoint, DeviceChoice::Emulator, CONTEXT);
        let logits = alone.score(&all).unwrap_or_else(|e| panic!("{e}"));
        let rows = logits.chunks(checkpoint.config.vocab_size).skip(request.prompt.len() - 1);
        assert_eq!(answer.logprobs.len(), answer.tokens.len());
        for ((&token, found), row) in answer.tokens.iter().zip(&answer.logprobs).zip(rows) {
            assert_eq!(found, &Logprobs::of(row, token, 3));
        }
    }
}

#[test]
fn prompts_run_as_prompts_and_answers_as_answers() {
    let checkpoint = golden();
    let prompt = text(&checkpoint, 2, 75);
    let backend = backend(&checkpoint, 6, options(2, 50, 8, 0, None), true);
    let (mut answers, _) = together(&checkpoint, backend, &[(0, greedy(&prompt, 2, None))], Some(4));
    let answer = answers.remove(0).1;

    let device = Device::emulator(9);
    let run = || -> Result<[Vec<f32>; 2], host::Error> {
        let mut forward = Forward::new(&device, &checkpoint.config, uploaded(&device, &checkpoint), CONTEXT)?;
        forward.prepare_prefill()?;
        let all: Vec<i32> = prompt.iter().chain(&answer.tokens).map(|&t| t as i32).collect();
        let (history, words) = (device.upload(&all)?, device.zeroed::<u32>(STATE_WORDS)?);
        let state = SequenceState { history: history.ptr_mut(), words: words.ptr_mut() };
        let plan = |rows, start: usize, count: usize| {
            let plan = PlanPrompt { rows, state, start: start as u32, count: count as u32 };
            // SAFETY: the history has the tokens, and rows have room.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        let mut logits = [vec![0.0; checkpoint.config.vocab_size], vec![0.0; checkpoint.config.vocab_size]];
        plan(forward.prefill().expect("laid out").rows(), 0, prompt.len())?;
        forward.enqueue_prefill(0, prompt.len(), RowOutput::LogitsFrom(prompt.len() as u32 - 1))?;
        plan(forward.rows(), prompt.len() - 1, 1)?;
        forward.enqueue_head(prompt.len() - 1, 1)?;
        forward.logits().read(0, &mut logits[0])?;
        plan(forward.rows(), prompt.len(), 1)?;
        forward.enqueue(1, prompt.len() as u32 + 1, RowOutput::LogitsFrom(0))?;
        forward.logits().read(0, &mut logits[1])?;
        Ok(logits)
    };
    let logits = run().unwrap_or_else(|e| panic!("{e}"));
    for (i, row) in logits.iter().enumerate() {
        assert_eq!(answer.logprobs[i], Logprobs::of(row, answer.tokens[i], 4), "token {i}");
    }
}

#[test]
fn generated_tokens_take_a_step_in_one_launch() {
    // On Hopper, and on cards after it with less shared memory.
    let after = DeviceOptions { level: Some(Level::Sm90), shared_bytes: Some(99 << 10), ..DeviceOptions::default() };
    for device in [emulator(4, true), Device::emulator_with(4, &after)] {
        check_steps_in_one_launch(&device);
    }
}

fn check_steps_in_one_launch(device: &Device) {
    let checkpoint = golden();
    let mut backend = on(device, &checkpoint, options(2, 128, 8, 0, None));
    let tokens = text(&checkpoint, 3, 100);
    let work = |slot, start, rows| Work { slot, start, rows, samples: true, most_drafts: 0 };
    let entry = |slot, index| TableEntry { slot, index, page: 2 * slot + index };
    let begin = Plan {
        started: [0, 1].map(|slot| Started { slot, sequence: slot.into() }).to_vec(),
        tables: [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(slot, index)| entry(slot, index)).to_vec(),
        work: [0, 1].map(|slot| work(slot, 0, 90)).to_vec(),
        ..Plan::default()
    };
    let start = Start { logprobs: None, ..start(&tokens[..90]) };
    backend.step(&begin, &[start, start]).unwrap();
    let mut launches = |work: &[Work]| {
        let before = device.calls();
        backend.step(&Plan { work: work.to_vec(), ..Plan::default() }, &[]).unwrap();
        device.calls().since(before).launches
    };
    // The choice is the other one.
    assert_eq!(launches(&[work(1, 90, 1)]), 2);
    assert_eq!(launches(&[work(0, 90, 1), work(1, 91, 1)]), 2);
    assert_eq!(launches(&[work(0, 91, 1), work(1, 92, 1)]), 2);
}

/// Two passes of a slot would write the same rows.
#[test]
#[should_panic(expected = "slot 1 has work twice")]
fn a_slot_has_work_once() {
    let checkpoint = golden();
    let tokens = text(&checkpoint, 3, 90);
    let mut backend = on(&emulator(4, false), &checkpoint, options(2, 128, 8, 0, None));
    let work = |start| Work { slot: 1, start, rows: 1, samples: true, most_drafts: 0 };
    let plan = Plan {
        started: vec![Started { slot: 1, sequence: 0 }],
        tables: vec![TableEntry { slot: 1, index: 0, page: 0 }],
        work: vec![work(0), work(1)],
        ..Plan::default()
    };
    let _ = backend.begin(&plan, &[start(&tokens)]);
}

/// Of a prompt of 90 tokens.
fn start(tokens: &[u32]) -> Start<'_> {
    Start {
        tokens,
        prompt: 90,
        max_length: 120,
        sampling: Sampling::default(),
        stop_tokens: &[],
        logprobs: Some(5),
        form: None,
    }
}

/// Steps of a backend; the last one's outcomes.
type Steps<'a> = dyn Fn(&mut dyn BatchBackend) -> Result<Vec<Outcome>, host::Error> + 'a;

#[test]
fn pages_that_were_away_or_copied_hold_what_they_held() {
    let checkpoint = golden();
    let tokens = text(&checkpoint, 3, 100);
    let work = |slot, start, rows| Work { slot, start, rows, samples: true, most_drafts: 0 };
    let tables =
        |slot, pages: [u32; 2]| [0, 1].map(|i| TableEntry { slot, index: i, page: pages[i as usize] }).to_vec();
    let other = text(&checkpoint, 4, 100);
    let run = |plans: &Steps<'_>, apart| {
        let mut backend = backend(&checkpoint, 8, options(2, 128, 7, 4, None), apart);
        plans(&mut *backend).unwrap_or_else(|e| panic!("{e}"))
    };
    for apart in [false, true] {
        let first = Plan {
            started: vec![Started { slot: 0, sequence: 0 }],
            tables: tables(0, [2, 0]),
            work: vec![work(0, 0, 100)],
            ..Plan::default()
        };
        let next = |slot| Plan { work: vec![work(slot, 100, 1)], ..Plan::default() };
        let stayed = run(
            &|backend| {
                backend.step(&first, &[start(&tokens)])?;
                backend.step(&next(0), &[])
            },
            apart,
        );
        // Saved; then another sequence takes the pages; then they come back elsewhere, and the slot is another, too.
        let away = run(
            &|backend| {
                let newest = backend.step(&first, &[start(&tokens)])?.remove(0).tokens;
                let save = [SwapOut { from: 2, to: 3 }, SwapOut { from: 0, to: 1 }].to_vec();
                backend.step(
                    &Plan {
                        freed: vec![0],
                        swap_out: save,
                        started: vec![Started { slot: 0, sequence: 1 }],
                        tables: tables(0, [0, 2]),
                        work: vec![work(0, 0, 100)],
                        ..Plan::default()
                    },
                    &[start(&other)],
                )?;
                let back = [SwapIn { from: 3, to: 5 }, SwapIn { from: 1, to: 4 }].to_vec();
                let plan = Plan {
                    swap_in: back,
                    started: vec![Started { slot: 1, sequence: 0 }],
                    tables: tables(1, [5, 4]),
                    ..next(1)
                };
                backend.step(&plan, &[start(&[tokens.as_slice(), &newest].concat())])
            },
            apart,
        );
        // Its second page as a copy, and what it was copied from overwritten.
        let copied = run(
            &|backend| {
                let newest = backend.step(&first, &[start(&tokens)])?.remove(0).tokens;
                let copies = vec![PageCopy { from: 0, to: 6 }];
                let started = vec![Started { slot: 1, sequence: 2 }];
                let plan = Plan { copies, started, tables: tables(1, [2, 6]), ..Plan::default() };
                backend.step(&plan, &[start(&[tokens.as_slice(), &newest].concat())])?;
                let plan = Plan {
                    freed: vec![0],
                    started: vec![Started { slot: 0, sequence: 1 }],
                    tables: tables(0, [3, 0]),
                    work: vec![work(0, 0, 100)],
                    ..Plan::default()
                };
                backend.step(&plan, &[start(&other)])?;
                backend.step(&next(1), &[])
            },
            apart,
        );
        for (found, slot) in [(away, 1), (copied, 1)] {
            assert_eq!(found.len(), 1);
            assert_eq!(found[0], Outcome { slot, ..stayed[0].clone() });
        }
    }
}
