//! What only a GPU can show. Without one every test here reports itself as ignored; `make gpu-check` packs this program
//! for a machine that has one.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use host::batch::{Batch, BatchOptions, GpuBatch};
use host::device::{self, Device, DeviceOptions, IMAGES, Image, KernelFile, Level, MAIN};
use host::forward::Footprint;
use host::weights::DeviceWeights;
use host::{
    DeviceChoice, Draft, DraftCheckpoint, DraftWeights, Engine, Gpu, LoadOptions, ModelDraft, NgramDraft, Ngrams,
    Request,
};
use integration_tests::batch::{Arranged, Happened, requests, together};
use integration_tests::distribution::check_demo;
use integration_tests::{
    Shallow, answer, check_decode_calls, decode_calls, decode_unfused_and_batched, demo, demo_prompts, engine,
    engine_with, format_cases, golden_cases, greedy, prefilled, prefilled_to_the_end, relative_error, repository, run,
    tolerance, uploaded,
};
use libtest_mimic::{Arguments, Failed, Trial};
use model::sampling::argmax;
use model::{Config, EagleHead, Sampling};

/// As many drafts as there can be, however few of them are right.
const EAGER: NgramDraft = NgramDraft { tokens: 15, max: 3, min: 1, adaptive: false };

const GPU: DeviceChoice = DeviceChoice::Cuda(0);

/// A test on a card that is opened so.
type Test = fn(&DeviceOptions) -> Result<(), Failed>;

/// A test of how a card is opened.
type OpeningTest = fn() -> Result<(), Failed>;

/// The ways to open a card that tests run in, with what their names begin with.
fn ways() -> [(&'static str, DeviceOptions); 5] {
    let after_hopper = DeviceOptions { level: Some(Level::Sm90), ..DeviceOptions::default() };
    [
        ("", DeviceOptions::default()),
        ("unfused::", DeviceOptions { unfused: true, ..DeviceOptions::default() }),
        ("after_hopper::", after_hopper.clone()),
        ("short_ring::", DeviceOptions { shared_bytes: Some(99 << 10), ..after_hopper }),
        ("portable::", DeviceOptions { level: Some(Level::Sm80), ..DeviceOptions::default() }),
    ]
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Calls of the driver are counted for the whole program.
    arguments.test_threads = Some(1);
    let cards = device::cards().unwrap_or_default();
    match cards.first() {
        Some(card) => println!("on {}", card.name),
        None => println!("ignored: there is no CUDA card (these tests need one)"),
    }
    let tests: [(&str, Test); 14] = [
        ("golden_logits", golden_logits),
        ("demo_logits_match_the_cpu", demo_logits_match_the_cpu),
        ("greedy_output_is_the_same_with_drafts", greedy_output_is_the_same_with_drafts),
        ("sampled_output_is_the_same_with_drafts", sampled_output_is_the_same_with_drafts),
        ("drafts_by_a_model_change_nothing", drafts_by_a_model_change_nothing),
        ("sampled_output_has_the_distribution_of_the_model", sampled_output_has_the_distribution_of_the_model),
        ("drafts_and_pieces_change_nothing_at_published_shapes", drafts_and_pieces_change_nothing_at_published_shapes),
        ("the_prompt_may_come_in_any_pieces", the_prompt_may_come_in_any_pieces),
        (
            "a_pass_over_a_prompt_gives_the_same_bits_in_any_pieces",
            a_pass_over_a_prompt_gives_the_same_bits_in_any_pieces,
        ),
        (
            "the_decode_and_the_batched_kernel_give_the_bits_of_the_unfused_path",
            decode_and_batched_kernels_give_the_bits_of_the_unfused_path,
        ),
        ("a_token_takes_launches_and_nothing_else", a_token_takes_launches_and_nothing_else),
        ("a_request_gives_the_tokens_in_any_batch_that_it_gives_alone", a_request_gives_the_tokens_in_any_batch),
        ("a_card_that_others_fill_does_not_end_a_batch", a_card_that_others_fill_does_not_end_a_batch),
        ("a_card_too_small_is_said_before_loading", a_card_too_small_is_said_before_loading),
    ];
    let of_opening: [(&str, OpeningTest); 5] = [
        ("a_thousand_prompts_give_the_same_tokens_whoever_drafts", a_thousand_prompts_give_the_same_tokens),
        ("a_card_that_is_not_there_is_named", a_card_that_is_not_there_is_named),
        ("a_file_of_kernels_that_is_not_there_is_named", a_file_of_kernels_that_is_not_there_is_named),
        ("a_file_of_kernels_with_other_parameters_is_refused", a_file_of_kernels_with_other_parameters_is_refused),
        ("machine_code_that_is_built_in_is_what_is_loaded", machine_code_that_is_built_in_is_what_is_loaded),
    ];
    let in_each_way = ways().into_iter().flat_map(|(way, options)| {
        tests.map(|(name, test)| {
            let options = options.clone();
            Trial::test(format!("{way}{name}"), move || test(&options))
        })
    });
    let trials = in_each_way.chain(of_opening.map(|(name, test)| Trial::test(name, test)));
    libtest_mimic::run(&arguments, trials.map(|trial| trial.with_ignored_flag(cards.is_empty())).collect()).exit_code()
}

fn golden_logits(options: &DeviceOptions) -> Result<(), Failed> {
    for case in golden_cases().into_iter().chain(format_cases()) {
        let checkpoint = case.open();
        let logits = engine_with(&checkpoint, GPU, options, case.prompt.len() + 1).score(&case.prompt)?;
        let error = relative_error(&logits, &case.logits);
        println!("{}: {error:.1e}", case.name);
        if error > tolerance(&checkpoint) {
            return Err(format!("{}: relative error {error}", case.name).into());
        }
    }
    Ok(())
}

fn demo_logits_match_the_cpu(options: &DeviceOptions) -> Result<(), Failed> {
    let checkpoint = demo();
    let (mut gpu, mut cpu) =
        (engine_with(&checkpoint, GPU, options, 1024), engine(&checkpoint, DeviceChoice::Cpu, 1024));
    let vocab = checkpoint.config.vocab_size;
    for prompt in demo_prompts(&checkpoint, 4, 1000) {
        let (found, expected) = (gpu.score(&prompt)?, cpu.score(&prompt)?);
        let error = relative_error(&found, &expected);
        let differ = found
            .chunks(vocab)
            .zip(expected.chunks(vocab))
            .filter(|(f, e)| {
                let (f, e) = (argmax(f) as usize, e);
                // A token that the reference prefers by more than the error allows.
                e[argmax(e) as usize] - e[f] > 2.0 * error * e.iter().fold(0.0, |m: f32, x| m.max(x.abs()))
            })
            .count();
        println!("relative error {error:.1e}, {differ} of 1000 choices differ by more than it");
        if error > 0.03 || differ > 0 {
            return Err(format!("relative error {error}, {differ} choices differ").into());
        }
    }
    Ok(())
}

fn greedy_output_is_the_same_with_drafts(options: &DeviceOptions) -> Result<(), Failed> {
    let checkpoint = demo();
    let mut engine = engine_with(&checkpoint, GPU, options, 512);
    let mut accepted = 0;
    for prompt in demo_prompts(&checkpoint, 1000, 48) {
        let plain = answer(&mut engine, &greedy(&prompt, 128, None));
        for draft in [NgramDraft::default(), EAGER] {
            let drafted = answer(&mut engine, &greedy(&prompt, 128, Some(draft)));
            if plain.tokens != drafted.tokens {
                return Err(format!("differs with {draft:?} for {prompt:?}").into());
            }
            accepted += drafted.statistics.accepted;
        }
    }
    println!("{accepted} drafts accepted");
    if accepted < 1000 { Err("too few drafts were accepted to show anything".into()) } else { Ok(()) }
}

fn sampled_output_is_the_same_with_drafts(options: &DeviceOptions) -> Result<(), Failed> {
    let checkpoint = demo();
    let mut engine = engine_with(&checkpoint, GPU, options, 512);
    for prompt in demo_prompts(&checkpoint, 20, 48) {
        let sampling = Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.01,
            repetition_penalty: 1.05,
            presence_penalty: 0.1,
            frequency_penalty: 0.3,
            seed: prompt[0] as u64,
        };
        let mut run = |draft| answer(&mut engine, &host::Request { sampling, ..greedy(&prompt, 200, draft) }).tokens;
        if run(None) != run(Some(EAGER)) {
            return Err(format!("differs for {prompt:?}").into());
        }
    }
    Ok(())
}

/// The demo model drafts for itself, greedily, and is always right; a model of the 0.6B shape drafts for one of the 8B
/// shape.
fn drafts_by_a_model_change_nothing(options: &DeviceOptions) -> Result<(), Failed> {
    let alone = ModelDraft { tokens: 5, depth: 15, branches: 1, adaptive: false, ngram: None };
    let tree = ModelDraft { tokens: 15, depth: 5, branches: 4, ..alone };
    let hybrid = ModelDraft { tokens: 15, ngram: Some(Ngrams { max: 3, min: 1 }), ..alone };
    let settings = [alone, tree, ModelDraft { tokens: 15, ..alone }, hybrid, ModelDraft::default()];
    let checkpoint = demo();
    let load = host::LoadOptions {
        options: options.clone(),
        context: Some(512),
        draft_model: Some(checkpoint.clone().into()),
        ..host::LoadOptions::on(GPU)
    };
    let mut engine = host::Engine::load(checkpoint.clone(), load, &mut |_, _| ControlFlow::Continue(()))?;
    for prompt in demo_prompts(&checkpoint, 50, 48) {
        let hot = Sampling { temperature: 0.8, top_k: 40, seed: prompt[0].into(), ..Sampling::default() };
        for sampling in [Sampling::default(), hot] {
            let plain = answer(&mut engine, &Request { sampling, ..greedy(&prompt, 96, None) }).tokens;
            for draft in settings {
                let request = Request { sampling, draft: Some(draft.into()), ..greedy(&prompt, 96, None) };
                let found = answer(&mut engine, &request);
                if found.tokens != plain {
                    return Err(format!("differs with {draft:?} for {prompt:?}").into());
                }
                let by_model = found.statistics.by_model;
                if sampling.is_greedy() && draft == alone && by_model.drafted != by_model.accepted {
                    return Err(format!("the model was wrong about itself: {by_model:?} for {prompt:?}").into());
                }
            }
        }
    }
    let device = Device::cuda_with(0, options)?;
    let [large, small] = ["8B", "0.6B"].map(|name| Config::published(name).ok_or("no such shape"));
    let (large, small) = (large?, small?);
    let needed = [&large, &small].map(|config| Footprint::of(config, 1024, device.has_prefill()));
    let needed: u64 = needed.iter().map(|of| 2 * of.weights + of.working).sum();
    if device.free_memory()?.is_some_and(|free| free < needed) {
        println!("the large shape not on this card: it has too little memory");
        return Ok(());
    }
    let weights = DeviceWeights::random(&large, &device)?;
    let draft = DraftWeights::Model(small.clone(), Box::new(DeviceWeights::random(&small, &device)?));
    let mut gpu = Gpu::with_all_weights(&device, &large, weights, Some(draft), 1024)?;
    let prompt: Vec<u32> =
        (0..600).map(|i| (model::sampling::random(11, i) % large.vocab_size as u64) as u32).collect();
    let plain = run(&mut gpu, &greedy(&prompt, 96, None)).0;
    for draft in settings {
        let request = Request { draft: Some(draft.into()), ..greedy(&prompt, 96, None) };
        if run(&mut gpu, &request).0 != plain {
            return Err(format!("differs with {draft:?}").into());
        }
    }
    Ok(())
}

/// Every prompt, greedy and sampled: with drafts of every kind alone, and in a batch of 64 sequences.
fn a_thousand_prompts_give_the_same_tokens() -> Result<(), Failed> {
    const PROMPTS: usize = 1000;
    let alone = ModelDraft { tokens: 7, depth: 7, branches: 1, adaptive: false, ngram: None };
    let ngrams = Some(Ngrams { max: 3, min: 1 });
    let tree = ModelDraft { tokens: 15, depth: 7, branches: 4, ..alone };
    let checkpoint = demo();
    let head = EagleHead::open(&repository().join("model/demo/eagle3"))?;
    let (_folder, shallow) = Shallow::new(3);
    let load = |draft: DraftCheckpoint| {
        let options = LoadOptions { context: Some(256), draft_model: Some(draft), ..LoadOptions::on(GPU) };
        Engine::load(checkpoint.clone(), options, &mut |_, _| ControlFlow::Continue(()))
    };
    let prompts = demo_prompts(&checkpoint, PROMPTS, 48);
    let hot = |i: usize| Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, seed: i as u64, ..Sampling::default() };
    let both = prompts.iter().enumerate().flat_map(|(i, prompt)| {
        [Sampling::default(), hot(i)].map(|sampling| Request { sampling, ignore_end: true, ..greedy(prompt, 48, None) })
    });
    let requests: Vec<Request> = both.collect();

    let mut engine = load(head.clone().into())?;
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut engine, request).tokens).collect();
    let compare = |engine: &mut Engine, name: &str, draft: Draft| {
        let mut accepted = 0;
        for (request, expected) in requests.iter().zip(&expected) {
            let found = answer(engine, &Request { draft: Some(draft), ..request.clone() });
            if found.tokens != *expected {
                return Err(Failed::from(format!("{name} changes the answer to {:?}", request.prompt)));
            }
            accepted += found.statistics.accepted;
        }
        println!("{name}: {accepted} drafts accepted, and all {} answers are the same", requests.len());
        // Otherwise nothing was shown.
        if accepted < PROMPTS { Err(format!("{name}: {accepted} drafts accepted").into()) } else { Ok(()) }
    };
    compare(&mut engine, "n-grams", EAGER.into())?;
    compare(&mut engine, "EAGLE-3", alone.into())?;
    compare(&mut engine, "EAGLE-3 and n-grams", ModelDraft { ngram: ngrams, ..alone }.into())?;
    compare(&mut engine, "a tree by EAGLE-3", tree.into())?;
    compare(
        &mut engine,
        "a tree by EAGLE-3, and n-grams",
        ModelDraft { ngram: ngrams, adaptive: true, ..tree }.into(),
    )?;
    drop(engine);
    let mut engine = load(shallow.clone().into())?;
    compare(&mut engine, "a model", alone.into())?;
    compare(&mut engine, "a tree by a model, and n-grams", ModelDraft { ngram: ngrams, ..tree }.into())?;
    drop(engine);

    let jobs: Vec<(usize, Request)> = requests.into_iter().enumerate().collect();
    let (model, head) = (DraftCheckpoint::from(shallow), DraftCheckpoint::from(head));
    let hybrid = Draft::from(ModelDraft { ngram: ngrams, ..alone });
    for (draft, by, sequences) in [
        (None, None, 64),
        (Some(EAGER.into()), None, 64),
        (Some(alone.into()), Some(&model), 64),
        (Some(hybrid), Some(&model), 64),
        // With more rows a head has no hidden states.
        (Some(alone.into()), Some(&head), 5),
        (Some(hybrid), Some(&head), 12),
    ] {
        // Four rows a sequence, on the average.
        let options =
            BatchOptions { sequences: Some(sequences), draft, draft_rows: 4 * sequences, ..BatchOptions::default() };
        let progress = &mut |_, _| ControlFlow::Continue(());
        let backend = GpuBatch::load(&checkpoint, by, &Device::cuda(0)?, &[256], options, progress)?;
        let (answers, happened) = together(&checkpoint, Arranged::priced(Box::new(backend), true), &jobs, None);
        if let Some((id, _)) = answers.iter().find(|(id, answer)| answer.tokens != expected[*id]) {
            return Err(format!("request {id} differs in a batch with {draft:?}").into());
        }
        println!("a batch with {draft:?}: {happened:?}");
        if draft.is_some() && happened.accepted < PROMPTS as u64 {
            return Err(format!("too few drafts were right to show anything: {happened:?}").into());
        }
    }
    Ok(())
}

fn sampled_output_has_the_distribution_of_the_model(options: &DeviceOptions) -> Result<(), Failed> {
    Ok(check_demo(&mut engine_with(&demo(), GPU, options, 512), 4000)?)
}

/// Qwen3-8B as it is, and models of the other families with less layers.
fn drafts_and_pieces_change_nothing_at_published_shapes(options: &DeviceOptions) -> Result<(), Failed> {
    drafts_and_pieces_change_nothing(&benches::shape("8B")?.1, options)?;
    for name in ["Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.2-3B"] {
        println!("{name}, 8 layers");
        let file = repository().join(format!("tests/shapes/{name}.json"));
        let (_, shape) = benches::shape(&file.display().to_string())?;
        let config = Config { num_hidden_layers: 8, ..shape };
        drafts_and_pieces_change_nothing(&config, options)
            .map_err(|failed| Failed::from(format!("{name}: {}", failed.message().unwrap_or("failed"))))?;
    }
    Ok(())
}

fn drafts_and_pieces_change_nothing(config: &Config, options: &DeviceOptions) -> Result<(), Failed> {
    // Scripts are drafted by a kernel of the benchmarks.
    let options = DeviceOptions { modules: benches::MODULES, ..options.clone() };
    let device = Device::cuda_with(0, &options)?;
    let (length, tokens) = (600, 96);
    // The weights, once more in the order of the stream, and the cache.
    let needed = Footprint::of(config, 1024, device.capabilities().has_gemms());
    if device.free_memory()?.is_some_and(|free| free < 2 * needed.weights + needed.working) {
        println!("not on this card: it has too little memory");
        return Ok(());
    }
    let mut gpu = Gpu::with_weights(&device, config, DeviceWeights::random(config, &device)?, 1024)?;
    let vocab = config.vocab_size as u64;
    let prompt: Vec<u32> = (0..length).map(|i| (model::sampling::random(11, i) % vocab) as u32).collect();
    let (plain, steps) = run(&mut gpu, &greedy(&prompt, tokens, None));
    // Not text of a token or two.
    let distinct: std::collections::BTreeSet<_> = plain.iter().collect();
    println!("{} distinct tokens of {tokens}", distinct.len());
    assert_eq!(steps, tokens - 1);
    // Steps of 8 and of 16 rows, with drafts that are right for a while.
    for (drafts, lengths) in [(7, [1, 3, 5]), (7, [8, 1, 2]), (15, [1, 3, 5]), (15, [16, 1, 9])] {
        benches::draft_by_script(&mut gpu, &prompt, &plain, &lengths)?;
        let draft = Some(NgramDraft { tokens: drafts, adaptive: false, ..NgramDraft::default() });
        let (found, steps) = run(&mut gpu, &greedy(&prompt, tokens, draft));
        println!("{drafts} drafts, right for {lengths:?}: {:.2} tokens a step", (tokens - 1) as f64 / steps as f64);
        if found != plain {
            return Err(format!("differs with {drafts} drafts that are right for {lengths:?}").into());
        }
        assert!(steps <= tokens / 2, "the drafts were not confirmed");
    }
    gpu.clear_script();
    for draft in [NgramDraft::default(), EAGER] {
        if run(&mut gpu, &greedy(&prompt, tokens, Some(draft))).0 != plain {
            return Err(format!("differs with {draft:?}").into());
        }
    }
    // The first part of the prompt stays in the cache.
    for cut in [1, 64, 257, 599] {
        run(&mut gpu, &greedy(&prompt[..cut], 1, None));
        if run(&mut gpu, &greedy(&prompt, tokens, None)).0 != plain {
            return Err(format!("differs when {cut} tokens came first").into());
        }
    }
    Ok(())
}

fn the_prompt_may_come_in_any_pieces(options: &DeviceOptions) -> Result<(), Failed> {
    let checkpoint = demo();
    let prompt = demo_prompts(&checkpoint, 1, 700).remove(0);
    let whole = answer(&mut engine_with(&checkpoint, GPU, options, 1024), &greedy(&prompt, 64, None)).tokens;
    let mut engine = engine_with(&checkpoint, GPU, options, 1024);
    for cut in [1, 63, 64, 65, 256, 511, 699] {
        // The first part stays in the cache, and the rest is run in chunks that begin there.
        answer(&mut engine, &greedy(&prompt[..cut], 1, None));
        let pieces = answer(&mut engine, &greedy(&prompt, 64, None));
        if pieces.tokens != whole {
            return Err(format!("differs when {cut} tokens came first").into());
        }
    }
    Ok(())
}

fn a_pass_over_a_prompt_gives_the_same_bits_in_any_pieces(options: &DeviceOptions) -> Result<(), Failed> {
    let device = Device::cuda_with(0, options)?;
    if !device.capabilities().has_gemms() {
        println!("not on this card: it has no products of warpgroups");
        return Ok(());
    }
    let checkpoint = demo();
    let tokens = demo_prompts(&checkpoint, 1, 2500).remove(0);
    let whole = prefilled(&device, &checkpoint, &tokens, tokens.len());
    for piece in [1024, 640, 77] {
        if prefilled(&device, &checkpoint, &tokens, piece) != whole {
            return Err(format!("differs in pieces of {piece}").into());
        }
    }
    let end = &whole[whole.len() - checkpoint.config.vocab_size..];
    for piece in [2500, 1024, 77] {
        if prefilled_to_the_end(&device, &checkpoint, &tokens, piece) != end {
            return Err(format!("the end alone differs in pieces of {piece}").into());
        }
    }
    Ok(())
}

fn decode_and_batched_kernels_give_the_bits_of_the_unfused_path(options: &DeviceOptions) -> Result<(), Failed> {
    let device = Device::cuda_with(0, options)?;
    if !device.has_decode_kernel() || !device.capabilities().has_gemms() {
        println!("not on this card, or not asked for: the step in one launch, and the batched kernel");
        return Ok(());
    }
    let checkpoint = demo();
    for (length, rows) in [(17, 1), (300, 1), (300, 8), (64, 16), (1000, 16)] {
        let tokens = demo_prompts(&checkpoint, 1, length).remove(0);
        let [fused, unfused, batched] =
            decode_unfused_and_batched(&device, &checkpoint.config, uploaded(&device, &checkpoint), &tokens, rows);
        for (found, what) in [(&fused, "fused"), (&batched, "batched")] {
            if *found != unfused {
                let error = relative_error(found, &unfused);
                return Err(format!("{what}, {rows} rows at {length}: relative difference {error}").into());
            }
        }
    }
    Ok(())
}

fn a_token_takes_launches_and_nothing_else(options: &DeviceOptions) -> Result<(), Failed> {
    let (device, checkpoint) = (Device::cuda_with(0, options)?, demo());
    let mut gpu = Gpu::new(&checkpoint, &device, 1024, &mut |_, _| std::ops::ControlFlow::Continue(()))?;
    device.count_calls();
    let prompt = demo_prompts(&checkpoint, 1, 48).remove(0);
    // However many launches a step has, each token takes as many.
    let request = |max_tokens| greedy(&prompt, max_tokens, None);
    let [one, two] = [16, 17].map(|tokens| decode_calls(&mut gpu, &device, &request(tokens)).launches);
    println!("{} launches a token", two - one);
    // Up to 248 tokens: launch by launch, attention to more than one split has another launch to combine them.
    Ok(check_decode_calls(&mut gpu, &device, &request(100), two - one)?)
}

fn a_request_gives_the_tokens_in_any_batch(opened: &DeviceOptions) -> Result<(), Failed> {
    const CONTEXT: usize = 400;
    let checkpoint = demo();
    let requests = requests(&demo_prompts(&checkpoint, 40, 100), 100, 290);
    let mut alone = engine_with(&checkpoint, GPU, opened, CONTEXT);
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut alone, request)).collect();
    drop(alone);
    let mut jobs: Vec<(usize, host::Request)> = requests.into_iter().enumerate().collect();
    let mut seen = Happened::default();
    let drafting = Some(NgramDraft { tokens: 7, max: 3, min: 1, adaptive: false });
    // Sequences, rows, pages of the cache and of the host tier: from room for all to as few pages as can be.
    for (sequences, rows, pages, host_pages, draft, to_host) in [
        (256, 8192, 400, 0, None, true),
        (100, 150, 200, 0, drafting, true),
        (12, 300, 11, 60, drafting, true),
        (12, 300, 11, 0, drafting, false),
        (5, 37, 9, 9, None, true),
    ] {
        let options = BatchOptions {
            sequences: Some(sequences),
            rows: Some(rows),
            cache_tokens: Some(pages * 64),
            swap_tokens: Some(host_pages * 64),
            draft: draft.map(Into::into),
            draft_rows: 64,
            packed_pages: Some(0),
            mask_wait: None,
        };
        let progress = &mut |_, _| std::ops::ControlFlow::Continue(());
        let backend = GpuBatch::load(&checkpoint, None, &Device::cuda_with(0, opened)?, &[CONTEXT], options, progress)?;
        let (answers, happened) = together(&checkpoint, Arranged::priced(Box::new(backend), to_host), &jobs, None);
        println!("{happened:?}");
        for (id, answer) in &answers {
            let alone = &expected[*id];
            if (&answer.tokens, &answer.text, answer.finish) != (&alone.tokens, &alone.text, alone.finish) {
                return Err(format!("request {id} differs with {options:?}").into());
            }
        }
        seen.add(happened);
        jobs.rotate_left(7);
        jobs.reverse();
    }
    let Happened { swapped, dropped, shared, accepted, .. } = seen;
    if swapped < 4 || dropped < 4 || shared < 500 || accepted < 100 {
        return Err(format!("too little happened to show anything: {seen:?}").into());
    }
    Ok(())
}

fn a_card_that_others_fill_does_not_end_a_batch(opened: &DeviceOptions) -> Result<(), Failed> {
    let checkpoint = demo();
    let requests = requests(&demo_prompts(&checkpoint, 40, 100), 100, 290);
    let jobs: Vec<(usize, host::Request)> = requests.into_iter().enumerate().collect();
    // So few pages that sequences are put aside.
    let options = BatchOptions {
        sequences: Some(5),
        rows: Some(37),
        cache_tokens: Some(9 * 64),
        swap_tokens: Some(9 * 64),
        draft: None,
        draft_rows: 64,
        packed_pages: Some(0),
        mask_wait: None,
    };
    let run = |filled: bool| -> Result<_, Failed> {
        let others = Device::cuda_with(0, opened)?;
        let progress = &mut |_, _| std::ops::ControlFlow::Continue(());
        let backend = GpuBatch::load(&checkpoint, None, &Device::cuda_with(0, opened)?, &[400], options, progress)?;
        let mut taken = Vec::new();
        for bytes in if filled { &[1 << 30, 32 << 20, 1 << 20, 1 << 12][..] } else { &[] } {
            while let Ok(buffer) = others.zeroed::<u8>(*bytes) {
                taken.push(buffer);
            }
        }
        println!("{:?} bytes free", others.free_memory()?);
        Ok(together(&checkpoint, Arranged::priced(Box::new(backend), true), &jobs, Some(3)))
    };
    let (expected, _) = run(false)?;
    let (found, happened) = run(true)?;
    println!("{happened:?}");
    if happened.swapped == 0 {
        return Err("nothing was put aside".into());
    }
    if found == expected { Ok(()) } else { Err("answers differ on a full card".into()) }
}

fn a_card_too_small_is_said_before_loading(opened: &DeviceOptions) -> Result<(), Failed> {
    let mut checkpoint = demo();
    checkpoint.config.max_position_embeddings = 1 << 30;
    let options = host::LoadOptions { options: opened.clone(), context: Some(1 << 28), ..host::LoadOptions::on(GPU) };
    let mut loaded = false;
    let progress = &mut |_, _| {
        loaded = true;
        std::ops::ControlFlow::Continue(())
    };
    let error = host::Engine::load(checkpoint.clone(), options.clone(), progress).err();
    let Some(error @ host::Error::ModelTooLarge { .. }) = error else { return Err(format!("{error:?}").into()) };
    println!("{error}");
    let error = Batch::load(checkpoint.clone(), options.clone(), BatchOptions::default(), progress).err();
    let Some(error @ host::Error::ModelTooLarge { .. }) = error else { return Err(format!("{error:?}").into()) };
    println!("{error}");
    let options = host::LoadOptions { context: Some(1 << 10), ..options };
    let much = BatchOptions { cache_tokens: Some(1 << 40), ..BatchOptions::default() };
    let error = Batch::load(checkpoint, options, much, progress).err();
    let Some(error @ host::Error::CacheTooLarge { .. }) = error else { return Err(format!("{error:?}").into()) };
    println!("{error}");
    if loaded { Err("loading began".into()) } else { Ok(()) }
}

/// A card that has the kernels of a file: whether it opens and agrees with the CPU, or what is wrong.
fn with_kernels(file: &Path) -> Result<(), Failed> {
    // SAFETY: these tests' own kernels, or a file that is refused.
    let kernels = Some(unsafe { KernelFile::trusted(file) });
    let options = DeviceOptions { kernels, ..DeviceOptions::default() };
    drop(Device::cuda_with(0, &options)?);
    demo_logits_match_the_cpu(&options)
}

fn a_file_of_kernels_that_is_not_there_is_named() -> Result<(), Failed> {
    refused(with_kernels(Path::new("/nowhere/kernels.cubin")), &["--kernels /nowhere/kernels.cubin cannot be read"])
}

/// Whether it failed with a message that has these parts.
fn refused(outcome: Result<(), Failed>, parts: &[&str]) -> Result<(), Failed> {
    let message = outcome.err().and_then(|failed| failed.message().map(str::to_owned));
    match message {
        Some(message) if parts.iter().all(|part| message.contains(part)) => Ok(()),
        other => Err(format!("not refused as it should be: {other:?}").into()),
    }
}

/// The main module as it is built in, for this card.
fn main_module() -> Result<&'static Image, Failed> {
    let arch = Device::cuda(0)?.capabilities().level.name();
    IMAGES.iter().find(|image| image.arch == arch && image.module == MAIN).ok_or_else(|| "no such module".into())
}

/// One digit in the table of layouts is all that such a file differs in: as it was, it is loaded.
fn a_file_of_kernels_with_other_parameters_is_refused() -> Result<(), Failed> {
    let image = main_module()?;
    let (mut bytes, needle, digits) = match image.machine_code {
        Some(code) => (code.to_vec(), b"\nsample ".to_vec(), [b"1".to_vec(), b"2".to_vec()]),
        // The text has the table's bytes as numbers.
        None => {
            let numbers = b"\nsample ".map(|byte| format!("{byte}, ")).concat();
            (image.ptx().into(), numbers.into(), [b"49".to_vec(), b"50".to_vec()])
        }
    };
    let path = std::env::temp_dir().join(format!("warpdraft-kernels-{}", std::process::id()));
    std::fs::write(&path, &bytes)?;
    let as_it_was = with_kernels(&path);
    let at = bytes.windows(needle.len()).position(|window| window == needle).ok_or("there is no table")?;
    let digit = &mut bytes[at + needle.len()..][..digits[0].len()];
    let other = &digits[usize::from(*digit == digits[0][..])];
    digit.copy_from_slice(other);
    std::fs::write(&path, &bytes)?;
    let changed = with_kernels(&path);
    std::fs::remove_file(&path)?;
    as_it_was?;
    refused(changed, &["kernel sample of", "other parameters"])
}

/// A driver that refuses it has compiled the text instead, which takes many seconds: with such a driver this fails.
fn machine_code_that_is_built_in_is_what_is_loaded() -> Result<(), Failed> {
    let loaded = Device::cuda(0)?.has_machine_code();
    if loaded == main_module()?.machine_code.is_some() { Ok(()) } else { Err(format!("loaded: {loaded}").into()) }
}

fn a_card_that_is_not_there_is_named() -> Result<(), Failed> {
    match Device::cuda(99) {
        Err(host::Error::NoCuda { reason }) if reason.contains("no card 99") => Ok(()),
        Err(error) => Err(error.to_string().into()),
        Ok(_) => Err("card 99 opened".into()),
    }
}
