//! A request gives the same answer alone and in any batch: the demo model on the CPU.

use host::batch::{Batch, CpuBatch, Job, Limits};
use host::{DeviceChoice, NgramDraft, Request};
use integration_tests::batch::{Arranged, Happened, requests, together};
use integration_tests::{answer, demo, demo_prompts, engine, greedy};

const CONTEXT: usize = 160;

/// Room for all, and for as few as can be.
fn limits(page_tokens: usize, pages: u32, host_pages: u32, draft: Option<NgramDraft>) -> Limits {
    Limits {
        context: CONTEXT,
        sequences: 8,
        generating: 8,
        rows: 24,
        page_tokens,
        pages,
        host_pages,
        drafts: draft.map_or(0, |draft| draft.tokens),
        draft_rows: 16,
        prompt_rows: 0,
        prompt_share: 0,
        prompts_apart: false,
        tiles: &[],
    }
}

#[test]
fn a_request_gives_the_same_tokens_in_any_company() {
    let checkpoint = demo();
    let requests = requests(&demo_prompts(&checkpoint, 20, 100), 100, 60);
    let mut alone = engine(&checkpoint, DeviceChoice::Cpu, CONTEXT);
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut alone, request)).collect();

    let mut jobs: Vec<(usize, Request)> = requests.into_iter().enumerate().collect();
    let drafting = Some(NgramDraft { tokens: 7, max: 3, min: 1, adaptive: false });
    let mut seen = Happened::default();
    for (limits, draft) in [
        (limits(64, 24, 0, None), None),
        (limits(16, 80, 0, drafting), drafting),
        // So few pages that sequences are put aside, or computed again.
        (limits(8, 24, 60, drafting), drafting),
        (limits(8, 24, 0, drafting), drafting),
        (limits(5, 32, 10, None), None),
    ] {
        let backend = CpuBatch::new(&checkpoint, limits, draft.map(Into::into)).unwrap_or_else(|e| panic!("{e}"));
        let (answers, happened) = together(&checkpoint, Arranged::priced(Box::new(backend), true), &jobs, None);
        println!("{happened:?}");
        for (id, answer) in &answers {
            let alone = &expected[*id];
            assert_eq!(answer.tokens, alone.tokens, "request {id} with {limits:?}");
            assert_eq!((&answer.text, answer.finish), (&alone.text, alone.finish), "request {id} with {limits:?}");
        }
        seen.add(happened);
        // In another order the next time.
        jobs.rotate_left(7);
        jobs.reverse();
    }
    // Otherwise the test has shown nothing.
    println!("{seen:?}");
    assert!(
        seen.swapped > 3 && seen.dropped > 3 && seen.shared > 200 && seen.restored > 50 && seen.accepted > 20,
        "{seen:?}"
    );
}

#[test]
fn a_request_for_no_token_gets_none() {
    let checkpoint = demo();
    let prompt = demo_prompts(&checkpoint, 1, 20).remove(0);
    let backend = CpuBatch::new(&checkpoint, limits(16, 40, 0, None), None).unwrap_or_else(|e| panic!("{e}"));
    let mut batch = Batch::with_backend(checkpoint, Box::new(backend));
    for (id, tokens) in [(7, 0), (8, 2)] {
        batch.submit(Job { id, request: greedy(&prompt, tokens, None), logprobs: None }).unwrap();
    }
    let mut counts = Vec::new();
    while !batch.is_idle() {
        let done = batch.step().unwrap();
        counts.extend(done.into_iter().map(|done| (done.id, done.answer.unwrap().tokens.len())));
    }
    assert_eq!(counts, [(7, 0), (8, 2)]);
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let checkpoint = demo();
    let prompt = demo_prompts(&checkpoint, 1, 40).remove(0);
    let backend = CpuBatch::new(&checkpoint, limits(64, 24, 0, None), None).unwrap_or_else(|e| panic!("{e}"));
    let jobs = [(1, greedy(&prompt, 9, None))];
    let (answers, _) = together(&checkpoint, Box::new(backend), &jobs, Some(3));
    let answer = &answers[0].1;
    assert_eq!((answer.tokens.len(), answer.logprobs.len()), (9, 9));
    let all = [prompt.as_slice(), &answer.tokens].concat();
    let logits = engine(&checkpoint, DeviceChoice::Cpu, CONTEXT).score(&all).unwrap_or_else(|e| panic!("{e}"));
    let vocab = checkpoint.config.vocab_size;
    for (i, (&token, logprobs)) in answer.tokens.iter().zip(&answer.logprobs).enumerate() {
        let row = &logits[(prompt.len() + i - 1) * vocab..][..vocab];
        let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        let exact = (f64::from(row[token as usize]).exp() / sum).ln();
        assert!((f64::from(logprobs.chosen) - exact).abs() < 1e-5, "token {i}");
        // Greedy: the chosen one is the likeliest.
        assert_eq!((logprobs.top.len(), logprobs.top[0]), (3, (token, logprobs.chosen)));
    }
}
