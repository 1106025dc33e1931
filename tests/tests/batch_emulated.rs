//! A request gives the same answer alone and in any batch: the path of a card, under the emulator.

use host::batch::{BatchBackend, BatchOptions, GpuBatch};
use host::device::Device;
use host::weights::DeviceWeights;
use host::{DeviceChoice, NgramDraft, Request};
use integration_tests::batch::{Happened, Priced, together};
use integration_tests::{answer, engine, golden_cases, greedy};
use model::{Checkpoint, Sampling};

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

/// Requests that soon need a second page, and two that begin alike and part within their second page.
fn requests(checkpoint: &Checkpoint) -> Vec<Request> {
    let sampling = Sampling {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        seed: 3,
        ..Sampling::default()
    };
    let short = (0..4).map(|i| (text(checkpoint, i, 58 + i as usize), 14 + i as usize));
    let long = [text(checkpoint, 9, 100), [text(checkpoint, 9, 80), text(checkpoint, 10, 8)].concat()];
    let all = short.chain(long.into_iter().zip([9, 6]));
    let request = |(i, (prompt, most)): (usize, (Vec<u32>, usize))| Request {
        sampling: if i % 2 == 0 { sampling } else { Sampling::default() },
        ignore_end: i != 3,
        ..greedy(&prompt, most, None)
    };
    all.enumerate().map(request).collect()
}

fn backend(checkpoint: &Checkpoint, seed: u64, options: BatchOptions, prompts_apart: bool) -> Box<dyn BatchBackend> {
    let device = Device::emulator(seed);
    let weights = DeviceWeights::upload(checkpoint, &device, &mut |_, _| std::ops::ControlFlow::Continue(()));
    let weights = weights.unwrap_or_else(|e| panic!("{e}"));
    let batch = GpuBatch::with_weights(&device, &checkpoint.config, weights, CONTEXT, options, prompts_apart);
    Box::new(batch.unwrap_or_else(|e| panic!("{e}")))
}

/// Sequences, rows of a step, pages of the cache and of the host tier, and drafts.
fn options(sequences: u32, rows: u32, pages: usize, host_pages: usize, draft: Option<NgramDraft>) -> BatchOptions {
    BatchOptions {
        sequences: Some(sequences),
        rows: Some(rows),
        cache_tokens: Some(pages * 64),
        swap_tokens: Some(host_pages * 64),
        draft,
        draft_rows: 16,
    }
}

/// Company of several kinds: with room for all; with drafts; with so few pages that sequences are put aside, or computed again.
fn companies() -> [(BatchOptions, bool); 4] {
    let drafting = Some(NgramDraft { tokens: 7, max: 3, min: 1 });
    [
        (options(8, 64, 40, 0, None), true),
        (options(3, 20, 12, 0, drafting), true),
        (options(4, 300, 5, 16, drafting), true),
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
        let backend = Priced::boxed(backend(&checkpoint, seed as u64, options, false), to_host);
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
    let mut expected: Vec<_> = requests.iter().map(alone).collect();
    let longer = [requests[1].prompt.as_slice(), &expected[1].tokens].concat();
    requests.push(greedy(&longer, 5, None));
    expected.push(alone(&requests[6]));
    let jobs: Vec<(usize, Request)> = requests.into_iter().enumerate().collect();
    let mut seen = Happened::default();
    for (seed, (options, to_host)) in companies().into_iter().enumerate() {
        let backend = Priced::boxed(backend(&checkpoint, seed as u64, options, true), to_host);
        let (answers, happened) = together(&checkpoint, backend, &jobs, Some(2));
        for (id, answer) in &answers {
            assert_eq!(answer, &expected[*id], "request {id} with {options:?}");
        }
        println!("{happened:?}");
        seen.add(happened);
    }
    assert!(seen.swapped > 0 && seen.dropped > 0 && seen.shared > 100 && seen.accepted > 10, "{seen:?}");
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
            assert_eq!(found, &host::batch::Logprobs::of(row, token, 3));
        }
    }
}
