//! Answers of a given form: they have it, and are the same alone, in any company, and with drafts.

use std::collections::HashMap;
use std::time::Duration;

use benches::forms::{fields, schemas};
use host::batch::{Batch, BatchBackend, BatchOptions, CpuBatch, GpuBatch, Job, Limits};
use host::device::Device;
use host::{DeviceChoice, Finish, NgramDraft, Request};
use integration_tests::batch::{Arranged, Happened, together};
use integration_tests::{answer, demo, demo_prompts, emulator, engine, golden_cases, greedy, uploaded};
use model::form::{Tool, is_allowed, mask_words};
use model::sampling::random;
use model::{Checkpoint, Form, Forms, Sampling, Shape};
use rayon::prelude::*;
use serde_json::{Value, json};

const CONTEXT: usize = 200;

/// Draws from nearly all tokens.
fn hot() -> Sampling {
    Sampling { temperature: 1.5, ..Sampling::default() }
}

/// Its tokenizer has Qwen3's tags, and a token for each byte.
fn golden() -> Checkpoint {
    let case = golden_cases().into_iter().find(|case| case.name == "tied_bf16").expect("it is part of the repository");
    Checkpoint::open(&case.dir).unwrap_or_else(|e| panic!("{e}"))
}

fn compile(checkpoint: &Checkpoint, shapes: &[Shape]) -> Vec<Form> {
    let forms = Forms::new(checkpoint).unwrap_or_else(|e| panic!("{e}"));
    shapes.iter().map(|shape| forms.compile(shape).unwrap_or_else(|e| panic!("{shape:?}: {e}"))).collect()
}

/// What is wrong with an answer to a schema, if anything.
fn fault(validator: &jsonschema::Validator, text: &str) -> Option<String> {
    match serde_json::from_str::<Value>(text) {
        Ok(value) => validator.validate(&value).err().map(|error| format!("{error} in {text}")),
        Err(error) => Some(format!("{error} in {text}")),
    }
}

fn validator(schema: &Value) -> jsonschema::Validator {
    let options = jsonschema::options().should_validate_formats(true);
    options.build(schema).unwrap_or_else(|e| panic!("{e} in {schema}"))
}

/// By a model that gives every allowed token the same chance: nobody tries more of what a form allows.
#[test]
fn whatever_a_form_allows_follows_its_schema() {
    const ANSWERS: u64 = 40;
    let checkpoint = demo();
    let (vocab, ends) = (checkpoint.config.vocab_size, &checkpoint.generation.eos_token_ids);
    let forms = Forms::new(&checkpoint).unwrap_or_else(|e| panic!("{e}"));
    let walk = |form: &Form, seed: u64| {
        let (mut matcher, mut tokens, mut mask) = (form.matcher(), Vec::new(), vec![0; mask_words(vocab)]);
        while tokens.len() < 1000 {
            matcher.mask(&mut mask);
            let allowed: Vec<u32> = (0..vocab as u32).filter(|&token| is_allowed(&mask, token)).collect();
            let token = allowed[(random(seed, tokens.len() as u64) % allowed.len() as u64) as usize];
            if ends.contains(&token) {
                return Some(checkpoint.tokenizer.decode(&tokens));
            }
            matcher.accept(&[token]);
            matcher.check().unwrap_or_else(|e| panic!("{e}"));
            tokens.push(token);
        }
        None
    };
    let counts = schemas().into_par_iter().enumerate().map(|(number, schema)| {
        let shape = Shape::JsonSchema(schema.clone());
        let form = forms.compile(&shape).unwrap_or_else(|e| panic!("{schema}: {e}"));
        let validator = validator(&schema);
        let whole = (0..ANSWERS).filter_map(|i| walk(&form, (number as u64) << 32 | i));
        let faults: Vec<Option<String>> = whole.map(|text| fault(&validator, &text)).collect();
        if let Some(fault) = faults.iter().flatten().next() {
            panic!("schema {number}: {fault}");
        }
        faults.len()
    });
    let counts: Vec<usize> = counts.collect();
    println!("{} of {} answers are whole: {counts:?}", counts.iter().sum::<usize>(), 50 * ANSWERS);
    assert_eq!(counts.len(), 50);
    // Only what may go on for ever is cut off.
    assert!(counts.iter().all(|&count| count as u64 > ANSWERS / 2), "{counts:?}");
}

#[test]
fn sampled_answers_of_a_model_follow_their_schemas() {
    let checkpoint = demo();
    let schemas: Vec<Value> = schemas().into_iter().step_by(3).chain([fields(20)]).collect();
    let forms = compile(&checkpoint, &schemas.iter().cloned().map(Shape::JsonSchema).collect::<Vec<_>>());
    let prompts = demo_prompts(&checkpoint, forms.len(), 12);
    let request = |(i, (form, prompt)): (usize, (&Form, &Vec<u32>))| {
        let sampling = Sampling { seed: i as u64, ..hot() };
        let request = Request { sampling, form: Some(form.clone()), ignore_end: false, ..greedy(prompt, 400, None) };
        (i, request)
    };
    let jobs: Vec<(usize, Request)> = forms.iter().zip(&prompts).enumerate().map(request).collect();
    let limits = Limits { context: 500, rows: 64, sequences: 24, generating: 24, pages: 400, ..limits(0) };
    let backend = CpuBatch::new(&checkpoint, limits, None).unwrap_or_else(|e| panic!("{e}"));
    let (answers, _) = together(&checkpoint, Box::new(backend), &jobs, None);
    let whole: Vec<_> = answers.iter().filter(|(_, answer)| answer.finish == Finish::Stop).collect();
    println!("{} of {} are whole", whole.len(), answers.len());
    assert!(whole.len() > answers.len() / 2);
    for (i, answer) in whole {
        assert_eq!(fault(&validator(&schemas[*i]), &answer.text), None, "schema {i}");
    }
}

/// Requests with a form of each kind, with thoughts before some, and others without any among them.
fn requests(checkpoint: &Checkpoint) -> Vec<Request> {
    let tool = Tool { name: "go".into(), parameters: json!({"properties": {"to": {"enum": ["a", "b"]}}}) };
    let shapes = [
        Shape::JsonSchema(json!({"type": "object", "properties": {"a": {"type": "string", "maxLength": 4},
            "list": {"type": "array", "items": {"type": "integer", "maximum": 50}, "maxItems": 3}},
            "required": ["a", "list"], "additionalProperties": false})),
        Shape::Regex("[a-c]{3,9}(xyzzy){2}[0-9]?".into()),
        Shape::Choice(vec!["a longer choice".into(), "a longer one".into()]),
        Shape::Lark("start: (\"ab\" | \"cd\" tail)+\ntail: /[0-9]{2}/ \"-end-\"\n".into()),
        Shape::Call(vec![tool]),
    ];
    let forms = compile(checkpoint, &shapes);
    let vocab = checkpoint.config.vocab_size as u64;
    let penalised = Sampling { temperature: 0.9, top_k: 30, top_p: 0.95, repetition_penalty: 1.2, ..hot() };
    let request = |i: usize| {
        // A text that repeats itself, so that there is something to draft.
        let prompt: Vec<u32> =
            (0..20 + 7 * i).map(|at| (random(3 + i as u64, at as u64 % 9) % vocab.min(260)) as u32).collect();
        let sampling = [Sampling::default(), hot(), penalised][i % 3];
        let form = match i % 7 {
            // None.
            5 | 6 => None,
            n if i % 4 == 1 => Some(forms[n].after_thought(i % 8 == 1).unwrap_or_else(|e| panic!("{e}"))),
            n => Some(forms[n].clone()),
        };
        let sampling = Sampling { seed: i as u64, ..sampling };
        Request { sampling, ignore_end: form.is_none(), form, ..greedy(&prompt, 24 + i, None) }
    };
    (0..14).map(request).collect()
}

/// As many as the emulator runs in a minute or two: one with each form, and one without any.
fn few(checkpoint: &Checkpoint) -> Vec<Request> {
    requests(checkpoint).into_iter().take(6).map(|request| Request { max_tokens: 12, ..request }).collect()
}

const EAGER: NgramDraft = NgramDraft { tokens: 7, max: 3, min: 1, adaptive: false };

fn limits(drafts: u32) -> Limits {
    Limits {
        context: CONTEXT,
        sequences: 8,
        generating: 8,
        rows: 24,
        page_tokens: 16,
        // So few that sequences are put aside.
        pages: 24,
        host_pages: 8,
        drafts,
        draft_rows: 20,
        prompt_rows: 0,
        prompt_share: 0,
        prompts_apart: false,
        tiles: &[],
    }
}

/// The answers alone, with drafts and without, and those of `batches`: all the same.
fn are_the_same(
    checkpoint: &Checkpoint,
    device: DeviceChoice,
    requests: &[Request],
    batches: Vec<Box<dyn BatchBackend>>,
) -> Happened {
    let mut alone = engine(checkpoint, device, CONTEXT);
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut alone, request)).collect();
    let mut forced = 0;
    for (i, (request, expected)) in requests.iter().zip(&expected).enumerate() {
        for draft in [EAGER, NgramDraft::default()] {
            let drafted = answer(&mut alone, &Request { draft: Some(draft.into()), ..request.clone() });
            assert_eq!(drafted.tokens, expected.tokens, "request {i} with {draft:?}");
            forced += if request.form.is_some() { drafted.statistics.accepted } else { 0 };
        }
    }
    assert!(forced > 5, "{forced} drafts of forms were right");
    let mut jobs: Vec<(usize, Request)> = requests.iter().cloned().enumerate().collect();
    let mut seen = Happened::default();
    for (number, batch) in batches.into_iter().enumerate() {
        let (answers, happened) = together(checkpoint, Arranged::priced(batch, number % 2 == 0), &jobs, None);
        for (i, answer) in &answers {
            let expected = &expected[*i];
            assert_eq!(answer.tokens, expected.tokens, "request {i} in batch {number}");
            assert_eq!((&answer.text, answer.finish), (&expected.text, expected.finish), "request {i}, batch {number}");
        }
        println!("{happened:?}");
        seen.add(happened);
        jobs.rotate_left(5);
        jobs.reverse();
    }
    seen
}

#[test]
fn forms_change_nothing_about_company_and_drafts_on_the_cpu() {
    let checkpoint = golden();
    let cpu = |drafts: Option<NgramDraft>| -> Box<dyn BatchBackend> {
        let limits = limits(drafts.map_or(0, |draft| draft.tokens));
        Box::new(CpuBatch::new(&checkpoint, limits, drafts.map(Into::into)).unwrap_or_else(|e| panic!("{e}")))
    };
    let batches = vec![cpu(None), cpu(None), cpu(Some(EAGER)), cpu(Some(EAGER))];
    let seen = are_the_same(&checkpoint, DeviceChoice::Cpu, &requests(&checkpoint), batches);
    assert!(seen.swapped + seen.dropped > 0 && seen.accepted > 10, "{seen:?}");
}

#[test]
fn forms_change_nothing_about_company_and_drafts_on_a_device() {
    let checkpoint = golden();
    let requests = few(&checkpoint);
    let options = |sequences, pages: usize, draft: Option<NgramDraft>| BatchOptions {
        sequences: Some(sequences),
        rows: Some(300),
        cache_tokens: Some(pages * 64),
        swap_tokens: Some(6 * 64),
        draft: draft.map(Into::into),
        draft_rows: 20,
        packed_pages: Some(0),
        mask_wait: None,
    };
    let gpu = |seed, options| -> Box<dyn BatchBackend> {
        let device = emulator(seed, false);
        let weights = uploaded(&device, &checkpoint);
        let batch = GpuBatch::with_weights(&device, &checkpoint.config, weights, CONTEXT, options);
        // What a step needs was taken when the batch was made.
        Arranged::frugal(Box::new(batch.unwrap_or_else(|e| panic!("{e}"))), device)
    };
    let batches = vec![gpu(1, options(6, 8, None)), gpu(2, options(4, 5, Some(EAGER))), gpu(3, options(8, 40, None))];
    let seen = are_the_same(&checkpoint, DeviceChoice::Emulator, &requests, batches);
    assert!(seen.accepted > 0, "{seen:?}");
}

/// Prompts in passes of their own: the first token of an answer is chosen beside the next ones of others.
#[test]
fn forms_change_nothing_about_company_where_prompts_are_apart() {
    let checkpoint = golden();
    let jobs: Vec<(usize, Request)> = few(&checkpoint).into_iter().enumerate().collect();
    let run = |sequences, jobs: &[(usize, Request)]| {
        let device = emulator(7, true);
        let options = BatchOptions { sequences: Some(sequences), rows: Some(200), ..BatchOptions::default() };
        let weights = uploaded(&device, &checkpoint);
        let batch = GpuBatch::with_weights(&device, &checkpoint.config, weights, CONTEXT, options);
        let batch = Arranged::priced(Box::new(batch.unwrap_or_else(|e| panic!("{e}"))), true);
        together(&checkpoint, batch, jobs, Some(1)).0
    };
    let company = run(6, &jobs);
    for job in jobs.iter().take(3) {
        let alone = run(1, std::slice::from_ref(job)).remove(0).1;
        assert_eq!(company[job.0].1, alone, "request {}", job.0);
    }
}

/// Requests that all have a form, with prompts of `prompt` tokens and answers of `most`, or a few less.
fn formed(checkpoint: &Checkpoint, prompt: usize, most: usize) -> Vec<Request> {
    let shapes = [
        Shape::Regex(format!("([a-c]{{3}}-){{{}}}[0-9]{{4}}", most / 4 - 1)),
        Shape::Lark("start: (\"ab\" | \"c\" tail)+\ntail: /[0-9]{2}/ \"-\"\n".into()),
        Shape::JsonSchema(json!({"type": "array", "items": {"type": "integer", "maximum": 50}, "minItems": most / 3})),
    ];
    let request = |(i, form): (usize, Form)| {
        let prompt: Vec<u32> = (0..prompt).map(|at| (random(i as u64, at as u64) % 250) as u32).collect();
        let sampling = if i % 2 == 0 { Sampling::default() } else { Sampling { seed: i as u64, ..hot() } };
        Request { sampling, ignore_end: false, form: Some(form), ..greedy(&prompt, most, None) }
    };
    compile(checkpoint, &[&shapes[..], &shapes[..2]].concat()).into_iter().enumerate().map(request).collect()
}

/// Whoever is preempted makes its matcher anew of its answer so far; here everyone has a form, so one that has is.
#[test]
fn a_preempted_answer_goes_on_in_its_form() {
    let checkpoint = golden();
    let go_on = |device, requests: &[Request], batch: &dyn Fn() -> Box<dyn BatchBackend>| {
        let mut alone = engine(&checkpoint, device, CONTEXT);
        let expected: Vec<_> = requests.iter().map(|request| answer(&mut alone, request).tokens).collect();
        let jobs: Vec<(usize, Request)> = requests.iter().cloned().enumerate().collect();
        for to_host in [true, false] {
            let (answers, happened) = together(&checkpoint, Arranged::priced(batch(), to_host), &jobs, None);
            for (i, answer) in &answers {
                assert_eq!(answer.tokens, expected[*i], "request {i} on {device:?}, kept on the host: {to_host}");
            }
            let Happened { swapped, dropped, .. } = happened;
            assert!(if to_host { swapped > 0 } else { dropped > 0 }, "{happened:?} on {device:?}");
        }
    };
    // Of 14 pages, each answer wants 6.
    let cpu = || -> Box<dyn BatchBackend> {
        let limits = Limits { pages: 14, host_pages: 40, ..limits(0) };
        Box::new(CpuBatch::new(&checkpoint, limits, None).unwrap_or_else(|e| panic!("{e}")))
    };
    go_on(DeviceChoice::Cpu, &formed(&checkpoint, 10, 80), &cpu);
    // Of 5 pages, each wants a second one after 6 tokens.
    let emulated = || -> Box<dyn BatchBackend> {
        let options = BatchOptions {
            sequences: Some(4),
            rows: Some(300),
            cache_tokens: Some(5 * 64),
            swap_tokens: Some(16 * 64),
            ..BatchOptions::default()
        };
        on_emulator(&checkpoint, 11, options)
    };
    go_on(DeviceChoice::Emulator, &formed(&checkpoint, 58, 12), &emulated);
}

fn on_emulator(checkpoint: &Checkpoint, seed: u64, options: BatchOptions) -> Box<dyn BatchBackend> {
    let device = Device::emulator(seed);
    let weights = uploaded(&device, checkpoint);
    let batch = GpuBatch::with_weights(&device, &checkpoint.config, weights, CONTEXT, options);
    Box::new(batch.unwrap_or_else(|e| panic!("{e}")))
}

/// Passes of the emulator have ended when they are enqueued: whose mask is not made then is put off, and whose proposal
/// is not made has no drafts.
#[test]
fn a_sequence_without_a_form_waits_for_no_mask_and_no_proposal() {
    let checkpoint = golden();
    let free = (9, greedy(&[7, 8, 9], 8, None));
    let mut jobs: Vec<(usize, Request)> = formed(&checkpoint, 5, 12).into_iter().take(2).enumerate().collect();
    let mut alone = engine(&checkpoint, DeviceChoice::Emulator, CONTEXT);
    let expected: Vec<_> = jobs.iter().map(|(_, request)| answer(&mut alone, request).tokens).collect();
    let run = |jobs: &[(usize, Request)], draft| {
        let (sequences, mask_wait) = (Some(3), Some(Duration::ZERO));
        let options = BatchOptions { sequences, mask_wait, draft, draft_rows: 20, ..BatchOptions::default() };
        let mut batch = Batch::with_backend(checkpoint.clone(), on_emulator(&checkpoint, 12, options));
        for (id, request) in jobs {
            let job = Job { id: *id as u64, request: request.clone(), logprobs: None };
            batch.submit(job).unwrap_or_else(|e| panic!("{e}"));
        }
        let mut answers = HashMap::new();
        for step in 1.. {
            for done in batch.step().unwrap_or_else(|e| panic!("{e}")) {
                answers.insert(done.id as usize, (step, done.answer.unwrap_or_else(|e| panic!("{e}")).tokens));
            }
            if batch.is_idle() {
                break;
            }
        }
        (answers, batch.metrics().counts.put_off)
    };
    jobs.push(free);
    for draft in [None, Some(EAGER.into())] {
        let (without, none) = run(&jobs[2..], draft);
        let (with, put_off) = run(&jobs, draft);
        assert_eq!(with[&9].1, without[&9].1);
        if draft.is_none() {
            // In the same step as alone. (With drafts tokens are known before a pass, which gives masks time.)
            assert_eq!(with[&9].0, without[&9].0);
            assert!(none == 0 && put_off > 3, "{none}, {put_off}");
        }
        // Nor does it change those that were put off.
        for (i, expected) in expected.iter().enumerate() {
            assert_eq!(with[&i].1, *expected, "request {i}");
        }
    }
}

#[test]
fn a_form_of_another_model_or_without_an_end_is_refused() {
    let checkpoint = golden();
    let mut engine = engine(&checkpoint, DeviceChoice::Cpu, CONTEXT);
    let shape = [Shape::Choice(vec!["a".into()])];
    let own = compile(&checkpoint, &shape).remove(0);
    let other = compile(&demo(), &shape).remove(0);
    let mut refused = |form, ignore_end| {
        let request = Request { form: Some(form), ignore_end, ..greedy(&[1, 2], 4, None) };
        engine.generate(&request, &mut |_| std::ops::ControlFlow::Continue(())).expect_err("it is refused").to_string()
    };
    assert!(refused(own, true).contains("--ignore-eos"));
    assert!(refused(other, false).contains("another model"));
}
