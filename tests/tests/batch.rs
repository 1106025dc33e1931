//! A request gives the same answer alone and in any batch: the demo model on the CPU.

use host::batch::{Answer, Batch, BatchBackend, CpuBatch, Job, Limits};
use host::{DeviceChoice, NgramDraft, Request};
use integration_tests::{answer, demo, demo_prompts, engine, greedy};
use model::{Checkpoint, Sampling};

const CONTEXT: usize = 160;

/// Requests of many lengths, greedy and sampled, some that begin alike, some with stop texts.
fn requests(checkpoint: &Checkpoint) -> Vec<Request> {
    let prompts = demo_prompts(checkpoint, 20, 90);
    let request = |(i, prompt): (usize, &Vec<u32>)| {
        // Every third begins like the first.
        let own = &prompt[..8 + 4 * i];
        let prompt = if i % 3 == 0 { [&prompts[0][..40], own].concat() } else { own.to_vec() };
        let sampling = Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            repetition_penalty: 1.1,
            presence_penalty: 0.2,
            seed: i as u64,
            ..Sampling::default()
        };
        Request {
            sampling: if i % 2 == 0 { sampling } else { Sampling::default() },
            stop: if i % 4 == 1 { vec![";\n".into(), "self".into()] } else { Vec::new() },
            ignore_end: i % 5 != 0,
            ..greedy(&prompt, 12 + 5 * (i % 7), None)
        }
    };
    prompts.iter().enumerate().map(request).collect()
}

/// Room for all, and for as few as can be.
fn limits(page_tokens: usize, pages: u32, host_pages: u32, draft: Option<NgramDraft>) -> Limits {
    Limits {
        context: CONTEXT,
        sequences: 8,
        rows: 24,
        page_tokens,
        pages,
        host_pages,
        drafts: draft.map_or(0, |draft| draft.tokens),
        draft_rows: 16,
    }
}

/// The answers of a batch, in the order of `jobs`, and how often something was put aside, computed again, shared and drafted.
fn together(
    checkpoint: &Checkpoint,
    limits: Limits,
    draft: Option<NgramDraft>,
    jobs: &[(usize, Request)],
) -> (Vec<(usize, Answer)>, [u64; 4]) {
    let backend = CpuBatch::new(checkpoint, limits, draft).unwrap_or_else(|e| panic!("{e}"));
    let backend: Box<dyn BatchBackend> = Box::new(backend);
    let mut batch = Batch::with_backend(checkpoint.clone(), backend);
    let mut coming = jobs.iter();
    let mut answers = Vec::new();
    loop {
        while batch.has_room()
            && let Some((id, request)) = coming.next()
        {
            let job = Job { id: *id as u64, request: request.clone(), logprobs: None };
            batch.submit(job).unwrap_or_else(|e| panic!("{e}"));
        }
        if batch.is_idle() {
            break;
        }
        let done = batch.step(&mut || false).unwrap_or_else(|e| panic!("{e}"));
        answers.extend(done.into_iter().map(|done| (done.id as usize, done.answer)));
    }
    answers.sort_by_key(|answer| answer.0);
    let metrics = batch.metrics();
    let counts = metrics.counts;
    (answers, [counts.swapped, counts.dropped, counts.shared_tokens, metrics.accepted])
}

#[test]
fn a_request_gives_the_same_tokens_in_any_company() {
    let checkpoint = demo();
    let requests = requests(&checkpoint);
    let mut alone = engine(&checkpoint, DeviceChoice::Cpu, CONTEXT);
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut alone, request)).collect();

    let mut jobs: Vec<(usize, Request)> = requests.into_iter().enumerate().collect();
    let drafting = Some(NgramDraft { tokens: 7, max: 3, min: 1, adaptive: false });
    let mut seen = [0; 4];
    for (limits, draft) in [
        (limits(64, 24, 0, None), None),
        (limits(16, 80, 0, drafting), drafting),
        // So few pages that sequences are put aside, or computed again.
        (limits(8, 24, 60, drafting), drafting),
        (limits(8, 24, 0, drafting), drafting),
        (limits(5, 32, 10, None), None),
    ] {
        let (answers, counts) = together(&checkpoint, limits, draft, &jobs);
        assert_eq!(answers.len(), expected.len());
        for (id, answer) in &answers {
            let alone = &expected[*id];
            assert_eq!(answer.tokens, alone.tokens, "request {id} with {limits:?}");
            assert_eq!((&answer.text, answer.finish), (&alone.text, alone.finish), "request {id} with {limits:?}");
        }
        seen.iter_mut().zip(counts).for_each(|(seen, count)| *seen += count);
        // In another order the next time.
        jobs.rotate_left(7);
        jobs.reverse();
    }
    // Otherwise the test has shown nothing.
    let [swapped, dropped, shared, accepted] = seen;
    println!("{swapped} put aside, {dropped} computed again, {shared} tokens shared, {accepted} drafts accepted");
    assert!(swapped > 3 && dropped > 3 && shared > 200 && accepted > 20, "{seen:?}");
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let checkpoint = demo();
    let prompt = demo_prompts(&checkpoint, 1, 40).remove(0);
    let backend = CpuBatch::new(&checkpoint, limits(64, 24, 0, None), None).unwrap_or_else(|e| panic!("{e}"));
    let mut batch = Batch::with_backend(checkpoint.clone(), Box::new(backend));
    batch.submit(Job { id: 1, request: greedy(&prompt, 9, None), logprobs: Some(3) }).unwrap_or_else(|e| panic!("{e}"));
    let mut answers = Vec::new();
    while answers.is_empty() {
        answers = batch.step(&mut || false).unwrap_or_else(|e| panic!("{e}"));
    }
    let answer = &answers[0].answer;
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
