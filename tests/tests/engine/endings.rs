//! End tokens, length limits and stop texts take effect at their token, also in the middle of a step's confirmed
//! drafts, and nothing behind them is seen.

use std::ops::ControlFlow;

use host::device::Device;
use host::{Backend, DeviceChoice, Engine, Finish, Generation, Gpu, NgramDraft, Request, Sequence};
use integration_tests::{answer, demo, demo_prompts, engine, golden_cases, greedy, run};
use model::Checkpoint;

const EAGER: Option<NgramDraft> = Some(NgramDraft { tokens: 15, max: 3, min: 1, adaptive: false });

/// A checkpoint, a prompt after which much is drafted and confirmed, and what follows without drafts.
fn repetitive() -> (Checkpoint, Vec<u32>, Generation) {
    let checkpoint = demo();
    let text = demo_prompts(&checkpoint, 8, 40).remove(0);
    let prompt = [&text[..], &text[..20]].concat();
    let plain = answer(&mut engine(&checkpoint, DeviceChoice::Cpu, 256), &greedy(&prompt, 40, None));
    let drafted = answer(&mut engine(&checkpoint, DeviceChoice::Cpu, 256), &greedy(&prompt, 40, EAGER));
    assert!(drafted.statistics.mean_accepted_length() > 1.5, "{:?}", drafted.statistics);
    (checkpoint, prompt, plain)
}

/// An answer, which is the same with drafts and without, and what was seen of it.
fn seen(engine: &mut Engine, request: &Request) -> (Generation, String) {
    let mut run = |draft: Option<NgramDraft>| {
        let mut seen = String::new();
        let request = Request { draft: draft.map(Into::into), ..request.clone() };
        let generation = engine.generate(&request, &mut |text| {
            seen.push_str(text);
            ControlFlow::Continue(())
        });
        (generation.unwrap(), seen)
    };
    let (plain, drafted) = (run(None), run(EAGER));
    assert_eq!(
        (&plain.0.tokens, &plain.0.text, plain.0.finish),
        (&drafted.0.tokens, &drafted.0.text, drafted.0.finish)
    );
    assert_eq!((&plain.0.text, &drafted.0.text), (&plain.1, &drafted.1), "all of the text is seen, and nothing else");
    assert_eq!(drafted.0.statistics.tokens, drafted.0.tokens.len());
    drafted
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    let checkpoint = demo();
    let unknown = checkpoint.config.vocab_size as u32;
    for device in [DeviceChoice::Cpu, DeviceChoice::Emulator] {
        let mut engine = engine(&checkpoint, device, 64);
        let scored = engine.score(&[0, unknown]).map(drop);
        let generated = engine.generate(&greedy(&[0, unknown], 3, None), &mut |_| ControlFlow::Continue(())).map(drop);
        for result in [scored, generated] {
            let error = result.expect_err("there is no such token").to_string();
            assert!(error.contains(&unknown.to_string()), "{error}");
        }
    }
}

#[test]
fn a_length_limit_is_met_exactly() {
    let (checkpoint, prompt, plain) = repetitive();
    let mut engine = engine(&checkpoint, DeviceChoice::Cpu, 256);
    for most in 1..plain.tokens.len() {
        let (generation, _) = seen(&mut engine, &greedy(&prompt, most, None));
        assert_eq!((&generation.tokens[..], generation.finish), (&plain.tokens[..most], Finish::Length));
    }
}

#[test]
fn an_end_token_ends_the_answer_unseen() {
    let (mut checkpoint, prompt, plain) = repetitive();
    for &end in &plain.tokens {
        let at = plain.tokens.iter().position(|&token| token == end).unwrap();
        checkpoint.generation.eos_token_ids = vec![end];
        let mut engine = engine(&checkpoint, DeviceChoice::Cpu, 256);
        let (generation, text) = seen(&mut engine, &Request { ignore_end: false, ..greedy(&prompt, 40, None) });
        assert_eq!((&generation.tokens[..], generation.finish), (&plain.tokens[..=at], Finish::Stop));
        assert!(plain.text.starts_with(&text));
        assert_eq!(text, answer(&mut engine, &greedy(&prompt, at, None)).text, "the end token is part of no text");
    }
}

#[test]
fn a_stop_text_ends_the_answer_before_it_with_the_token_that_completes_it() {
    let (checkpoint, prompt, plain) = repetitive();
    let mut engine = engine(&checkpoint, DeviceChoice::Cpu, 256);
    let starts: Vec<usize> = plain.text.char_indices().map(|(i, _)| i).collect();
    for pair in starts.windows(6).step_by(5) {
        let stop = &plain.text[pair[0]..pair[5]];
        let (generation, text) = seen(&mut engine, &Request { stop: vec![stop.into()], ..greedy(&prompt, 40, None) });
        assert_eq!((text.as_str(), generation.finish), (&plain.text[..plain.text.find(stop).unwrap()], Finish::Stop));
        // One token fewer does not have it.
        let tokens = generation.tokens.len();
        assert_eq!(generation.tokens[..], plain.tokens[..tokens]);
        let shorter = |tokens: usize| checkpoint.tokenizer.decode(&plain.tokens[..tokens]);
        assert!(shorter(tokens).contains(stop) && !shorter(tokens - 1).contains(stop), "{stop:?}");
    }
}

#[test]
fn the_gpu_path_ends_in_the_middle_of_a_step() {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap();
    let mut gpu = Gpu::new(&checkpoint, &Device::emulator(0), 64, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let prompt = &case.prompt[..4];
    let (plain, _) = run(&mut gpu, &greedy(prompt, 24, None));
    // Every draft is right: a step brings 16 tokens, if nothing ends it.
    benches::draft_by_script(&mut gpu, prompt, &plain, &[100]).unwrap();
    let mut ends = |max_tokens: usize, stop_tokens: &[u32]| {
        let request = greedy(prompt, max_tokens, EAGER);
        let sequence = Sequence {
            prompt,
            max_length: prompt.len() + max_tokens,
            sampling: request.sampling,
            draft: EAGER.map(Into::into),
            stop_tokens,
            form: None,
        };
        gpu.begin(&sequence, &mut |_, _| ControlFlow::Continue(())).unwrap();
        let (mut tokens, mut steps) = (Vec::new(), 0);
        loop {
            let step = gpu.step().unwrap();
            tokens.extend(step.tokens);
            steps += 1;
            if step.finished {
                return (tokens, steps);
            }
        }
    };
    assert_eq!(ends(24, &[]), (plain.clone(), 3));
    for most in [2, 5, 16, 17, 18, 23] {
        assert_eq!(ends(most, &[]).0, plain[..most]);
    }
    for end in [1, 4, 9, 15, 16, 20] {
        let at = plain.iter().position(|token| *token == plain[end]).unwrap();
        assert_eq!(ends(24, &[plain[end]]).0, plain[..=at]);
    }
    // As many as a warp has lanes, of which the last one ends it; one more is refused.
    let at = plain.iter().position(|token| *token == plain[9]).unwrap();
    let others = (0..).filter(|token| !plain.contains(token));
    let mut stops: Vec<u32> = others.take(31).chain([plain[9]]).collect();
    assert_eq!(ends(24, &stops).0, plain[..=at]);
    stops.push(plain[0]);
    let sequence = Sequence {
        prompt,
        max_length: prompt.len() + 24,
        sampling: greedy(prompt, 24, None).sampling,
        draft: None,
        stop_tokens: &stops,
        form: None,
    };
    let refused = gpu.begin(&sequence, &mut |_, _| ControlFlow::Continue(())).unwrap_err();
    assert!(refused.to_string().contains("33 end tokens"), "{refused}");
}

/// What `backend` told of a prompt, until it was stopped after `stop` tokens, and the first token then of the whole
/// prompt.
fn stopped_and_taken_up(backend: &mut dyn Backend, prompt: &[u32], stop: usize) -> (Vec<(usize, usize)>, usize, u32) {
    let sampling = greedy(prompt, 1, None).sampling;
    let sequence =
        Sequence { prompt, max_length: prompt.len() + 1, sampling, draft: None, stop_tokens: &[], form: None };
    let mut told = Vec::new();
    let begun = backend.begin(&sequence, &mut |done, total| {
        told.push((done, total));
        if done >= stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(begun, Err(host::Error::Interrupted)), "{begun:?}");
    // What was read stays in the cache.
    let reused = backend.begin(&sequence, &mut |_, _| ControlFlow::Continue(())).unwrap();
    (told, reused, backend.step().unwrap().tokens[0])
}

/// Likewise without a stop.
fn at_once(backend: &mut dyn Backend, prompt: &[u32]) -> u32 {
    let sampling = greedy(prompt, 1, None).sampling;
    let sequence =
        Sequence { prompt, max_length: prompt.len() + 1, sampling, draft: None, stop_tokens: &[], form: None };
    backend.begin(&sequence, &mut |_, _| ControlFlow::Continue(())).unwrap();
    backend.step().unwrap().tokens[0]
}

#[test]
fn reading_a_prompt_is_told_and_can_be_stopped() {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap();
    let prompt: Vec<u32> = case.prompt.iter().copied().cycle().take(200).collect();
    let mut cpu = host::Cpu::new(&checkpoint, 256).unwrap();
    let (told, reused, token) = stopped_and_taken_up(&mut cpu, &prompt, 128);
    assert_eq!((told, reused), (vec![(64, 200), (128, 200)], 128));
    assert_eq!(token, at_once(&mut host::Cpu::new(&checkpoint, 256).unwrap(), &prompt));
}

/// What is planned on the device is then no step of the sequence.
#[test]
fn a_sequence_that_was_not_begun_whole_has_no_step() {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap();
    let prompt: Vec<u32> = case.prompt.iter().copied().cycle().take(520).collect();
    let mut gpu = Gpu::new(&checkpoint, &Device::emulator(0), 640, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let sampling = greedy(&prompt, 1, None).sampling;
    let sequence = |prompt| Sequence { prompt, max_length: 640, sampling, draft: None, stop_tokens: &[], form: None };
    let has_no_step = |gpu: &mut Gpu| {
        let stepped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| gpu.step()));
        let panic = stepped.err().and_then(|panic| panic.downcast_ref::<&str>().copied());
        assert_eq!(panic, Some("a step of no sequence"));
    };
    has_no_step(&mut gpu);
    let begun = gpu.begin(&sequence(&prompt), &mut |_, _| ControlFlow::Break(()));
    assert!(matches!(begun, Err(host::Error::Interrupted)), "{begun:?}");
    has_no_step(&mut gpu);
    // Nor has one whose history another has overwritten.
    gpu.begin(&sequence(&prompt[..3]), &mut |_, _| ControlFlow::Continue(())).unwrap();
    gpu.step().unwrap();
    gpu.score(&prompt[..5]).unwrap();
    has_no_step(&mut gpu);
    gpu.begin(&sequence(&prompt[..3]), &mut |_, _| ControlFlow::Continue(())).unwrap();
    gpu.step().unwrap();
}

#[test]
fn reading_a_prompt_on_a_device_is_told_and_can_be_stopped() {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap();
    let prompt: Vec<u32> = case.prompt.iter().copied().cycle().take(520).collect();
    let gpu = || Gpu::new(&checkpoint, &Device::emulator(0), 640, &mut |_, _| ControlFlow::Continue(())).unwrap();
    let (told, reused, token) = stopped_and_taken_up(&mut gpu(), &prompt, 1);
    assert_eq!((told, reused), (vec![(512, 520)], 512));
    assert_eq!(token, at_once(&mut gpu(), &prompt));
}
