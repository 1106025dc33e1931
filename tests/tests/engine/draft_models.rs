//! Drafts by a model never change the output, on the CPU and under the emulator, whichever model drafts, alone or
//! beside n-gram match.

use std::ops::ControlFlow;

use host::device::{Calls, Device, DeviceOptions, Level};
use host::{DeviceChoice, Draft, Drafted, Engine, Error, Gpu, LoadOptions, ModelDraft, Ngrams, Request};
use integration_tests::batch::{crowded, drafted_batch};
use integration_tests::{Shallow, answer, decode_calls, demo, demo_prompts, engine, golden_dir, greedy};
use model::{Checkpoint, Sampling};
use rayon::prelude::*;

const ALONE: ModelDraft = ModelDraft { tokens: 5, depth: 15, branches: 1, adaptive: false, ngram: None };
const HYBRID: ModelDraft = ModelDraft { tokens: 7, ngram: Some(Ngrams { max: 3, min: 1 }), ..ALONE };
const EVERY: [ModelDraft; 7] = [
    ALONE,
    ModelDraft { tokens: 15, branches: 3, depth: 4, ..ALONE },
    ModelDraft { tokens: 7, branches: 4, depth: 4, adaptive: true, ..HYBRID },
    ModelDraft { tokens: 15, ..ALONE },
    ModelDraft { adaptive: true, ngram: Some(Ngrams { max: 4, min: 2 }), ..HYBRID },
    ModelDraft { tokens: 15, ..HYBRID },
    HYBRID,
];

fn golden(name: &str) -> Checkpoint {
    Checkpoint::open(&golden_dir().join(name)).unwrap_or_else(|e| panic!("{e}"))
}

/// An engine for `checkpoint` that `draft` drafts for.
fn drafted(checkpoint: &Checkpoint, draft: &Checkpoint, device: DeviceChoice, context: usize) -> Engine {
    let options =
        LoadOptions { context: Some(context), draft_model: Some(draft.clone().into()), ..LoadOptions::on(device) };
    Engine::load(checkpoint.clone(), options, &mut |_, _| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

fn request(prompt: &[u32], tokens: usize, sampling: Sampling, draft: Option<ModelDraft>) -> Request {
    Request { sampling, draft: draft.map(Draft::Model), ..greedy(prompt, tokens, None) }
}

fn sampled(seed: u64) -> Sampling {
    Sampling {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.05,
        frequency_penalty: 0.2,
        seed,
        ..Sampling::default()
    }
}

/// The shallow model is wrong now and then; the model itself, drafting for itself, never is.
#[test]
fn output_on_the_cpu_is_the_same_whichever_model_drafts() {
    let checkpoint = demo();
    let (_folder, shallow) = Shallow::new(3);
    let prompts = demo_prompts(&checkpoint, 2, 48);
    let drafts = prompts.par_iter().map(|prompt| {
        let mut plain = engine(&checkpoint, DeviceChoice::Cpu, 128);
        let mut by_shallow = drafted(&checkpoint, &shallow, DeviceChoice::Cpu, 128);
        let mut by_itself = drafted(&checkpoint, &checkpoint, DeviceChoice::Cpu, 128);
        let mut all = Drafted::default();
        for sampling in [Sampling::default(), sampled(prompt[0].into())] {
            let expected = answer(&mut plain, &request(prompt, 64, sampling, None)).tokens;
            for draft in EVERY {
                let found = answer(&mut by_shallow, &request(prompt, 64, sampling, Some(draft)));
                assert_eq!(found.tokens, expected, "{draft:?}, prompt {prompt:?}");
                all.drafted += found.statistics.by_model.drafted;
                all.accepted += found.statistics.by_model.accepted;
            }
            let found = answer(&mut by_itself, &request(prompt, 64, sampling, Some(ALONE)));
            assert_eq!(found.tokens, expected, "prompt {prompt:?}");
            let Drafted { drafted, accepted } = found.statistics.by_model;
            if sampling.is_greedy() {
                assert_eq!(drafted, accepted, "prompt {prompt:?}");
                assert!(found.statistics.mean_accepted_length() > 5.0, "{:?}", found.statistics);
            }
        }
        all
    });
    let Drafted { drafted, accepted } = drafts.reduce(Drafted::default, |a, b| a + b);
    println!("{accepted} of {drafted} drafts by the shallow model accepted");
    // Some are right, and some are wrong; otherwise the test has shown little.
    assert!(accepted > 50 && accepted < drafted, "{accepted} of {drafted}");
}

/// An engine under the emulator, opened so, that `draft` drafts for, if there is one.
fn emulated(checkpoint: &Checkpoint, draft: Option<Checkpoint>, options: &DeviceOptions) -> Engine {
    let options = LoadOptions {
        options: options.clone(),
        context: Some(128),
        draft_model: draft.map(Into::into),
        ..LoadOptions::on(DeviceChoice::Emulator)
    };
    Engine::load(checkpoint.clone(), options, &mut |_, _| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

/// A model drafts for itself, one of another family with fewer rows in its embedding, and one of f16 weights and fewer
/// layers; by the decode kernel, by the unfused path with prompts in passes, and by the kernels of other cards.
#[test]
fn output_under_the_emulator_is_the_same_whichever_model_drafts() {
    let checkpoint = golden("tied_bf16");
    let prompt: Vec<u32> = (0..70).map(|i| i * 37 % 250).collect();
    let sampling = Sampling { temperature: 0.7, top_k: 8, seed: 3, ..Sampling::default() };
    let unfused = DeviceOptions { unfused: true, prefill: Some(true), ..DeviceOptions::default() };
    let portable = DeviceOptions { level: Some(Level::Sm80), ..DeviceOptions::default() };
    for (name, options, settings) in [
        ("tied_bf16", DeviceOptions::default(), &EVERY[..]),
        ("tied_qwen2_bf16", unfused, &EVERY[5..]),
        ("separate_f16_sharded", portable, &EVERY[..1]),
    ] {
        let mut plain = emulated(&checkpoint, None, &options);
        let mut engine = emulated(&checkpoint, Some(golden(name)), &options);
        // Drawn tokens follow the same plans: one of the settings will do.
        for (sampling, settings) in [(Sampling::default(), settings), (sampling, &settings[settings.len() - 1..])] {
            let expected = answer(&mut plain, &request(&prompt, 16, sampling, None)).tokens;
            for &draft in settings {
                let found = answer(&mut engine, &request(&prompt, 16, sampling, Some(draft)));
                assert_eq!(found.tokens, expected, "{name} {draft:?}");
                let by_model = found.statistics.by_model;
                println!("{name} {draft:?}: {by_model:?}, {:?} by n-gram", found.statistics.drafted_by_ngram());
                if name == "tied_bf16" && draft.ngram.is_none() && sampling.is_greedy() {
                    // Of a tree, leaves are alternatives to what is right.
                    let accepted = if draft.branches > 1 { 10 } else { by_model.drafted };
                    assert!(by_model.drafted > 10 && by_model.accepted >= accepted, "{by_model:?}");
                }
            }
        }
    }
}

/// Turns of a conversation, and a request without drafts between them: what the draft model has read stays read.
#[test]
fn a_draft_model_keeps_what_it_has_read() {
    let checkpoint = golden("tied_bf16");
    let mut plain = emulated(&checkpoint, None, &DeviceOptions::default());
    let mut engine = emulated(&checkpoint, Some(checkpoint.clone()), &DeviceOptions::default());
    let mut text: Vec<u32> = (0..20).map(|i| i * 37 % 250).collect();
    for draft in [Some(ALONE), None, Some(HYBRID), Some(ALONE)] {
        let request = |draft| request(&text, 10, Sampling::default(), draft);
        let expected = answer(&mut plain, &request(None)).tokens;
        let found = answer(&mut engine, &request(draft));
        assert_eq!(found.tokens, expected);
        let Drafted { drafted, accepted } = found.statistics.by_model;
        assert!(draft.is_none_or(|draft| draft.ngram.is_some()) || drafted > 0 && drafted == accepted);
        text.extend_from_slice(&expected);
        text.extend([1, 2, 3]);
    }
}

/// Drawn text that nobody foresees: drafts are tried ever more seldom, and what is read meanwhile is read right, as the
/// drafts of the next turn show.
#[test]
fn a_hopeless_draft_model_rests_and_reads_on() {
    let checkpoint = golden("tied_bf16");
    let mut engine = emulated(&checkpoint, Some(checkpoint.clone()), &DeviceOptions::default());
    let prompt: Vec<u32> = (0..12).map(|i| i * 37 % 250).collect();
    let adaptive = ModelDraft { adaptive: true, ..ALONE };
    let hot = Sampling { temperature: 50.0, seed: 1, ..Sampling::default() };
    let found = answer(&mut engine, &request(&prompt, 64, hot, Some(adaptive)));
    let Drafted { drafted, .. } = found.statistics.by_model;
    println!("{drafted} drafts in {} steps", found.statistics.steps);
    assert!(drafted < 16, "{:?}", found.statistics);

    let next = [&prompt[..], &found.tokens, &[1, 2, 3]].concat();
    let Drafted { drafted, accepted } =
        answer(&mut engine, &request(&next, 16, Sampling::default(), Some(ALONE))).statistics.by_model;
    assert!(drafted > 10 && drafted == accepted, "{accepted} of {drafted}");
}

/// A batch there.
fn on(device: DeviceChoice) -> LoadOptions {
    LoadOptions { context: Some(128), ..LoadOptions::on(device) }
}

#[test]
fn a_batch_on_the_cpu_is_the_same_whichever_model_drafts() {
    let checkpoint = demo();
    let (_folder, shallow) = Shallow::new(3);
    let prompts = demo_prompts(&checkpoint, 7, 48);
    let requests: Vec<Request> = (0..)
        .zip(&prompts)
        .map(|(i, prompt)| {
            let sampling = if i % 2 == 0 { Sampling::default() } else { sampled(i) };
            request(prompt, 30 + 7 * i as usize, sampling, None)
        })
        .collect();
    let mut plain = engine(&checkpoint, DeviceChoice::Cpu, 128);
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut plain, request).tokens).collect();
    let settings = [ALONE, HYBRID, EVERY[4]];
    let found = settings.par_iter().map(|&draft| {
        let draft_model = &shallow.clone().into();
        let (answers, drafts) =
            drafted_batch(&checkpoint, draft_model, on(DeviceChoice::Cpu), crowded(draft), &requests);
        assert_eq!(answers, expected, "{draft:?}");
        drafts
    });
    let drafts = found.reduce(Drafted::default, |a, b| a + b);
    assert!(drafts.accepted > 100 && drafts.accepted < drafts.drafted, "{drafts:?}");
    // Greedily, a model that drafts for itself is never wrong.
    let greedy: Vec<Request> = requests.iter().step_by(2).cloned().collect();
    let itself = &checkpoint.clone().into();
    let (answers, drafts) = drafted_batch(&checkpoint, itself, on(DeviceChoice::Cpu), crowded(ALONE), &greedy);
    assert_eq!(answers, expected.iter().step_by(2).cloned().collect::<Vec<_>>());
    assert!(drafts.drafted > 0 && drafts.drafted == drafts.accepted, "{drafts:?}");
}

#[test]
fn a_batch_under_the_emulator_is_the_same_whichever_model_drafts() {
    let checkpoint = golden("tied_bf16");
    let requests: Vec<Request> = [70, 3, 31, 70]
        .iter()
        .zip(0..)
        .map(|(&length, i)| {
            let prompt: Vec<u32> = (0..length).map(|j| (j * 37 + i / 2) % 250).collect();
            let sampling = if i == 2 { sampled(i.into()) } else { Sampling::default() };
            request(&prompt, 8 + i as usize, sampling, None)
        })
        .collect();
    let mut plain = emulated(&checkpoint, None, &DeviceOptions::default());
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut plain, request).tokens).collect();
    for (name, draft) in [("tied_bf16", ALONE), ("tied_qwen2_bf16", HYBRID)] {
        let model = &golden(name).into();
        let (answers, drafts) =
            drafted_batch(&checkpoint, model, on(DeviceChoice::Emulator), crowded(draft), &requests);
        assert_eq!(answers, expected, "{name}");
        assert!(drafts.drafted > 0, "{name}");
        // Only the drawn tokens of one may be none that the model itself would have said.
        assert!(name != "tied_bf16" || drafts.accepted * 2 > drafts.drafted, "{drafts:?}");
    }
}

#[test]
fn drafting_by_a_model_waits_for_nothing() {
    let checkpoint = golden("tied_bf16");
    let device = Device::emulator(0);
    let go_on = &mut |_, _| ControlFlow::Continue(());
    let mut gpu = Gpu::with_draft_model(&checkpoint, Some(&checkpoint.clone().into()), &device, 64, go_on).unwrap();
    for draft in [ALONE, HYBRID] {
        let request = request(&[3, 5, 8], 24, Sampling::default(), Some(draft));
        let calls = decode_calls(&mut gpu, &device, &request);
        assert!(calls.launches > 0);
        assert_eq!(calls, Calls { launches: calls.launches, ..Calls::default() });
    }
}

#[test]
fn a_draft_model_with_other_tokens_is_refused() {
    let refused = |checkpoint: &Checkpoint, draft: &Checkpoint, device| {
        let options =
            LoadOptions { context: Some(64), draft_model: Some(draft.clone().into()), ..LoadOptions::on(device) };
        match Engine::load(checkpoint.clone(), options, &mut |_, _| ControlFlow::Continue(())) {
            Err(error @ Error::DraftVocabulary { .. }) => error.to_string(),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it was taken"),
        }
    };
    let (qwen, llama) = (golden("tied_bf16"), golden("separate_llama_bf16"));
    let id = qwen.tokenizer.first_difference(&llama.tokenizer).unwrap();
    for device in [DeviceChoice::Cpu, DeviceChoice::Emulator] {
        let said = refused(&qwen, &llama, device);
        assert!(said.contains(&format!("token {id} is ")), "{said}");
        // There is no such token in the smaller vocabulary.
        let said = refused(&demo(), &qwen, device);
        assert!(said.contains("the draft model has another vocabulary"), "{said}");
    }
    assert_eq!(qwen.tokenizer.first_difference(&golden("tied_f32").tokenizer), None);
}

#[test]
fn a_draft_model_that_was_not_loaded_is_missed() {
    for device in [DeviceChoice::Cpu, DeviceChoice::Emulator] {
        let mut engine = engine(&golden("tied_bf16"), device, 64);
        let request = request(&[1, 2], 4, Sampling::default(), Some(HYBRID));
        let error = engine.generate(&request, &mut |_| ControlFlow::Continue(())).unwrap_err();
        assert_eq!(error.to_string(), "no draft model was loaded");
    }
}
