//! EAGLE-3 heads: their numbers against the golden ones, what is refused, and that they never change the output.

use std::ops::ControlFlow;

use host::batch::{Batch, BatchOptions};
use host::device::{Calls, Device, DeviceOptions, Level};
use host::forward::HeadWeights;
use host::{DeviceChoice, Draft, DraftCheckpoint, Drafted, Engine, Gpu, LoadOptions, ModelDraft, Ngrams, Request};
use integration_tests::batch::{crowded, drafted_batch};
use integration_tests::eagle::{DRAFT_VOCAB, Folder, Head, Model};
use integration_tests::{answer, decode_calls, demo, demo_prompts, golden_dir, greedy, relative_error, repository};
use model::{Checkpoint, CpuEagle, CpuModel, EagleHead, HiddenStates, Sampling, Taps};
use rayon::prelude::*;
use serde::Deserialize;

/// Both sides round in f32 and differ in the order of sums only. Measured: below 2e-6.
const TOLERANCE: f32 = 1e-5;

const ALONE: ModelDraft = ModelDraft { tokens: 5, depth: 15, branches: 1, adaptive: false, ngram: None };
const EVERY: [ModelDraft; 7] = [
    ALONE,
    ModelDraft { tokens: 15, branches: 4, depth: 5, ..ALONE },
    ModelDraft { tokens: 7, branches: 2, depth: 5, adaptive: true, ngram: Some(Ngrams { max: 4, min: 2 }) },
    ModelDraft { tokens: 15, ..ALONE },
    ModelDraft { tokens: 7, adaptive: true, ngram: Some(Ngrams { max: 4, min: 2 }), ..ALONE },
    ModelDraft { tokens: 7, adaptive: true, ..ALONE },
    ModelDraft { tokens: 7, ngram: Some(Ngrams { max: 3, min: 1 }), ..ALONE },
];

fn tied() -> Checkpoint {
    Checkpoint::open(&golden_dir().join("tied_bf16")).unwrap_or_else(|e| panic!("{e}"))
}

#[derive(Deserialize)]
struct Golden {
    prompt: Vec<u32>,
    cases: Vec<GoldenHead>,
}

#[derive(Deserialize)]
struct GoldenHead {
    name: String,
    drafts: Vec<u32>,
}

fn floats(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(golden_dir().join("eagle3").join(name)).unwrap();
    bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// Hidden states of the model, and logits of the head row by row, in a prompt and along a chain of drafts.
#[test]
fn numbers_are_those_of_the_definition() {
    let golden: Golden =
        serde_json::from_slice(&std::fs::read(golden_dir().join("eagle3/cases.json")).unwrap()).unwrap();
    let (states, logits) = (floats("states.f32"), floats("logits.f32"));
    let (prompt, cases) = (&golden.prompt, golden.cases.len());
    let checkpoint = tied();
    let model = CpuModel::new(&checkpoint).unwrap();
    for (i, case) in golden.cases.iter().enumerate() {
        let (_folder, head) = match case.name.as_str() {
            "original" => Head::ORIGINAL.open(),
            "speculators" => Head::SPECULATORS.open(),
            other => panic!("no head {other}"),
        };
        let expected_states = &states[i * states.len() / cases..][..states.len() / cases];
        let taps = head.taps(&checkpoint.config).unwrap();
        let mut found = Vec::new();
        let wanted = Taps { after: &taps, states: &mut found };
        model.forward_tapped(prompt, &mut model.new_cache(prompt.len()), 0, &mut [], Some(wanted)).unwrap();
        assert!(relative_error(&found, expected_states) < TOLERANCE, "{}", case.name);

        let runner = CpuEagle::new(&head, &checkpoint).unwrap();
        let (mut cache, mut row) = (runner.new_cache(32), vec![0.0; DRAFT_VOCAB]);
        let mut expected = logits[i * logits.len() / cases..][..logits.len() / cases].chunks_exact(DRAFT_VOCAB);
        let mut own = Vec::new();
        for (&token, states) in prompt[1..].iter().zip(found.chunks_exact(3 * checkpoint.config.plan.hidden)) {
            own = runner.forward(&[token], HiddenStates::OfModel(states), &mut cache, &mut row).unwrap();
            let error = relative_error(&row, expected.next().unwrap());
            assert!(error < TOLERANCE, "{} row {}: {error:.1e}", case.name, cache.len());
        }
        // All at once they are the same bits.
        let mut at_once = vec![0.0; DRAFT_VOCAB];
        let states = HiddenStates::OfModel(&found[..found.len() / prompt.len() * (prompt.len() - 1)]);
        let last = runner.forward(&prompt[1..], states, &mut runner.new_cache(32), &mut at_once).unwrap();
        assert!(at_once == row && last == own, "{}", case.name);
        for &draft in &case.drafts {
            assert_eq!(head.targets()[model::sampling::argmax(&row) as usize], draft, "{}", case.name);
            own = runner.forward(&[draft], HiddenStates::Own(&own), &mut cache, &mut row).unwrap();
            let error = relative_error(&row, expected.next().unwrap());
            assert!(error < TOLERANCE, "{} row {}: {error:.1e}", case.name, cache.len());
        }
        assert!(expected.next().is_none(), "{}", case.name);
    }
}

/// Where an engine runs: on the CPU, or under the emulator that is opened so.
type EngineDevice = Option<DeviceOptions>;

/// An engine for `checkpoint` that `head` drafts for, if there is one.
fn loaded(checkpoint: &Checkpoint, head: Option<&EagleHead>, place: &EngineDevice) -> Engine {
    let device = if place.is_some() { DeviceChoice::Emulator } else { DeviceChoice::Cpu };
    let options = LoadOptions {
        options: place.clone().unwrap_or_default(),
        context: Some(256),
        draft_model: head.cloned().map(DraftCheckpoint::Eagle3),
        ..LoadOptions::on(device)
    };
    Engine::load(checkpoint.clone(), options, &mut |_, _| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

fn request(prompt: &[u32], tokens: usize, sampling: Sampling, draft: Option<ModelDraft>) -> Request {
    Request { sampling, draft: draft.map(Draft::Model), ignore_end: true, ..greedy(prompt, tokens, None) }
}

fn sampled(seed: u64) -> Sampling {
    Sampling { temperature: 0.7, top_k: 8, repetition_penalty: 1.05, seed, ..Sampling::default() }
}

/// A model with a head: the folders stay for as long as it is in use.
struct Pair {
    _folders: Vec<Folder>,
    checkpoint: Checkpoint,
    head: EagleHead,
}

impl Pair {
    /// A head that is always right, but for where two tokens are as good.
    fn right() -> Self {
        Self::new(Some(Model::of_bigrams(0.0)), Head::BIGRAMS)
    }

    /// One that is right now and then.
    fn now_and_then() -> Self {
        Self::new(Some(Model::of_bigrams(0.2)), Head::BIGRAMS)
    }

    /// One of random numbers, in either form.
    fn wrong(head: Head) -> Self {
        Self::new(None, head)
    }

    fn new(model: Option<(Folder, Checkpoint)>, head: Head) -> Self {
        let (of_head, head) = head.open();
        let (of_model, checkpoint) = model.map_or_else(|| (None, tied()), |(folder, model)| (Some(folder), model));
        Self { _folders: of_model.into_iter().chain([of_head]).collect(), checkpoint, head }
    }

    /// What drafts by the head came to, with the same text as without them.
    fn check(&self, place: &EngineDevice, prompt: &[u32], tokens: usize, settings: &[ModelDraft]) -> Vec<Drafted> {
        let mut plain = loaded(&self.checkpoint, None, place);
        let mut by_head = loaded(&self.checkpoint, Some(&self.head), place);
        let mut found = Vec::new();
        for sampling in [Sampling::default(), sampled(prompt[0].into())] {
            let expected = answer(&mut plain, &request(prompt, tokens, sampling, None)).tokens;
            for &draft in settings {
                let generation = answer(&mut by_head, &request(prompt, tokens, sampling, Some(draft)));
                assert_eq!(generation.tokens, expected, "{draft:?}, {sampling:?}");
                println!(
                    "{draft:?}: {:?}, {:?} by all",
                    generation.statistics.by_model, generation.statistics.accepted
                );
                found.push(generation.statistics.by_model);
            }
        }
        found
    }
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|i| i * 37 % 250).collect()
}

#[test]
fn output_on_the_cpu_is_the_same_whatever_the_head_says() {
    // Longer than a piece of a prompt, and than what waits to be read.
    let found = Pair::right().check(&None, &prompt(150), 48, &EVERY);
    let Drafted { drafted, accepted } = found[0];
    assert!(drafted > 30 && accepted * 10 > drafted * 9, "{accepted} of {drafted}");
    let found = Pair::now_and_then().check(&None, &prompt(20), 48, &EVERY);
    let Drafted { drafted, accepted } = found[0];
    assert!(accepted > 5 && accepted < drafted, "{accepted} of {drafted}");
    for head in [Head::ORIGINAL, Head::SPECULATORS] {
        let found = Pair::wrong(head).check(&None, &prompt(3), 48, &EVERY);
        let Drafted { drafted, accepted } = found[0];
        assert!(drafted > 100 && accepted * 4 < drafted, "{accepted} of {drafted}");
    }
}

/// Drafts by the head of a batch's sequences, with the same answers as without them.
fn in_a_batch(pair: &Pair, place: &EngineDevice, settings: ModelDraft, lengths: &[u32]) -> Drafted {
    let requests: Vec<Request> = lengths
        .iter()
        .zip(0..)
        .map(|(&length, i)| {
            let sampling = if i == 3 { sampled(7) } else { Sampling::default() };
            // As many as two sequences have room for, with what is read of them.
            let tokens = if place.is_some() { 10 + i } else { 40 + 9 * i };
            request(&prompt(length + i)[i as usize..], tokens as usize, sampling, None)
        })
        .collect();
    let mut plain = loaded(&pair.checkpoint, None, place);
    let expected: Vec<_> = requests.iter().map(|request| answer(&mut plain, request).tokens).collect();
    let device = if place.is_some() { DeviceChoice::Emulator } else { DeviceChoice::Cpu };
    let load =
        LoadOptions { options: place.clone().unwrap_or_default(), context: Some(256), ..LoadOptions::on(device) };
    let head = pair.head.clone().into();
    let (answers, drafts) = drafted_batch(&pair.checkpoint, &head, load, crowded(settings), &requests);
    assert_eq!(answers, expected, "{settings:?}");
    println!("{settings:?}: {drafts:?}");
    drafts
}

#[test]
fn a_batch_on_the_cpu_is_the_same_whatever_the_head_says() {
    let lengths = [150, 20, 190, 3, 70];
    for settings in [ALONE, EVERY[4], EVERY[6]] {
        let Drafted { drafted, accepted } = in_a_batch(&Pair::right(), &None, settings, &lengths);
        assert!(settings != ALONE || drafted > 100 && accepted * 10 > drafted * 7, "{accepted} of {drafted}");
    }
    let Drafted { drafted, accepted } = in_a_batch(&Pair::now_and_then(), &None, ALONE, &lengths);
    assert!(accepted > 20 && accepted < drafted, "{accepted} of {drafted}");
    in_a_batch(&Pair::wrong(Head::SPECULATORS), &None, ALONE, &lengths);
}

#[test]
fn a_batch_under_the_emulator_is_the_same_whatever_the_head_says() {
    let portable = DeviceOptions { level: Some(Level::Sm80), ..DeviceOptions::default() };
    for (options, settings, lengths) in [
        (DeviceOptions::default(), ALONE, &[140, 20, 3, 70][..]),
        (DeviceOptions::default(), EVERY[4], &[20, 31]),
        (portable, ALONE, &[70, 5]),
    ] {
        let Drafted { drafted, accepted } = in_a_batch(&Pair::right(), &Some(options), settings, lengths);
        assert!(settings != ALONE || drafted > 8 && accepted * 10 > drafted * 7, "{accepted} of {drafted}");
    }
}

/// However many rows steps with drafts may have, a head drafts for few sequences: there is memory for those.
#[test]
fn a_batch_of_a_head_takes_memory_for_the_rows_that_it_can_draft_for() {
    let pair = Pair::right();
    let load = LoadOptions { context: Some(256), ..LoadOptions::on(DeviceChoice::Emulator) };
    let load = LoadOptions { draft_model: Some(pair.head.clone().into()), ..load };
    let options = BatchOptions { sequences: None, draft_rows: u32::MAX, ..crowded(ALONE) };
    let go_on = &mut |_, _| ControlFlow::Continue(());
    let batch = Batch::load(pair.checkpoint.clone(), load, options, go_on);
    assert!(batch.is_ok(), "{:?}", batch.err());
}

/// Whose config was changed after it was opened.
#[test]
fn a_head_with_other_sizes_than_its_weights_is_refused() {
    let (_folder, head) = Head::ORIGINAL.open();
    let (device, model) = (Device::emulator(0), tied().config);
    let refused = |head: &EagleHead| {
        HeadWeights::upload(head, &model, &device).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(refused(&head), "");
    for (inner, heads, what) in [
        (64, (2, 1), "an intermediate size that is a multiple of 128"),
        (256, (2, 1), "gate and up projections has 32768 elements there, and 65536"),
        (128, (4, 2), "projection of queries, keys and values has"),
    ] {
        let mut other = head.clone();
        other.config.plan.resize(128, inner, heads);
        let error = refused(&other);
        assert!(error.contains(what), "{error}");
    }
    let mut other = head.clone();
    other.draft_vocab_size = DRAFT_VOCAB + 1;
    let error = refused(&other);
    assert!(error.contains("output head has 12288 elements there, and 12416"), "{error}");
}

/// It was trained for that model, so it is right more often than not; and held-out text is none that it has seen.
#[test]
fn the_demo_models_head_knows_what_the_model_says() {
    let checkpoint = demo();
    let head = EagleHead::open(&repository().join("model/demo/eagle3")).unwrap_or_else(|e| panic!("{e}"));
    let prompt = demo_prompts(&checkpoint, 1, 150).remove(0);
    let pair = Pair { _folders: Vec::new(), checkpoint, head };
    let found = pair.check(&None, &prompt, 80, &[ModelDraft { tokens: 3, ..ALONE }, EVERY[4]]);
    let Drafted { drafted, accepted } = found[0];
    assert!(accepted * 2 > drafted && drafted > 60, "{accepted} of {drafted}");
}

/// By the decode kernel, by the unfused path with prompts in passes, and by the kernels of other cards.
#[test]
fn output_under_the_emulator_is_the_same_whatever_the_head_says() {
    let unfused = DeviceOptions { unfused: true, prefill: Some(true), ..DeviceOptions::default() };
    let portable = DeviceOptions { level: Some(Level::Sm80), ..DeviceOptions::default() };
    let places = [(DeviceOptions::default(), 70, &EVERY[..]), (unfused, 20, &EVERY[6..]), (portable, 20, &EVERY[..1])];
    places.into_par_iter().for_each(|(options, tokens, settings)| {
        let found = Pair::right().check(&Some(options.clone()), &prompt(tokens), 12, settings);
        let Drafted { drafted, accepted } = found[0];
        let is_alone = settings[0].ngram.is_none();
        assert!(!is_alone || drafted > 8 && accepted * 10 > drafted * 8, "{accepted} of {drafted}");
        Pair::wrong(Head::SPECULATORS).check(&Some(options), &prompt(3), 8, &settings[..1]);
    });
}

#[test]
fn a_head_that_is_right_now_and_then_is_so_wherever_it_runs() {
    // What is drafted is the same.
    let pair = Pair::now_and_then();
    let [on_cpu, emulated] =
        [None, Some(DeviceOptions::default())].map(|place| pair.check(&place, &prompt(20), 16, &EVERY[..1])[0]);
    assert_eq!(on_cpu, emulated);
    assert!(emulated.accepted > 1 && emulated.accepted < emulated.drafted, "{emulated:?}");
}

#[test]
fn drafting_by_a_head_waits_for_nothing() {
    let pair = Pair::now_and_then();
    let device = Device::emulator(0);
    let go_on = &mut |_, _| ControlFlow::Continue(());
    let head = DraftCheckpoint::Eagle3(pair.head.clone());
    let mut gpu = Gpu::with_draft_model(&pair.checkpoint, Some(&head), &device, 64, go_on).unwrap();
    for draft in [ALONE, EVERY[1], EVERY[6]] {
        let request = request(&[3, 5, 8], 24, Sampling::default(), Some(draft));
        let calls = decode_calls(&mut gpu, &device, &request);
        assert!(calls.launches > 0);
        assert_eq!(calls, Calls { launches: calls.launches, ..Calls::default() });
    }
}

#[test]
fn a_head_reads_what_it_has_missed() {
    conversation(&None);
}

#[test]
fn a_head_on_a_device_reads_what_it_has_missed() {
    conversation(&Some(DeviceOptions::default()));
}

/// Turns of a conversation, and requests without drafts between them, of which the head knows nothing.
fn conversation(place: &EngineDevice) {
    let pair = Pair::right();
    let mut plain = loaded(&pair.checkpoint, None, place);
    let mut by_head = loaded(&pair.checkpoint, Some(&pair.head), place);
    let mut text = prompt(20);
    for draft in [Some(ALONE), None, Some(EVERY[6]), Some(EVERY[1]), Some(ALONE), None, Some(ALONE)] {
        let request = |draft| request(&text, 10, Sampling::default(), draft);
        let expected = answer(&mut plain, &request(None)).tokens;
        let found = answer(&mut by_head, &request(draft));
        assert_eq!(found.tokens, expected);
        let Drafted { drafted, accepted } = found.statistics.by_model;
        if draft == Some(ALONE) {
            assert!(drafted > 4 && accepted * 10 > drafted * 8, "{accepted} of {drafted}");
        }
        text.extend_from_slice(&expected);
        text.extend([1, 2, 3]);
    }
}

/// What the error says of a head that was spoiled.
fn refusal(spoil: impl FnOnce(&mut serde_json::Value)) -> String {
    refusal_of(Head::ORIGINAL, spoil)
}

fn refusal_of(head: Head, spoil: impl FnOnce(&mut serde_json::Value)) -> String {
    let folder = head.write();
    let mut config = head.config();
    spoil(&mut config);
    folder.put("config.json", config.to_string());
    match EagleHead::open(folder.path()) {
        Ok(_) => panic!("it was taken"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_is_no_head_or_another_is_refused() {
    let says = |said: String, parts: &[&str]| {
        for part in parts {
            assert!(said.contains(part), "{said}");
        }
    };
    says(refusal(|c| c["architectures"] = "x".into()), &["config.json", "`llama`", "no EAGLE-3 head"]);
    says(refusal(|c| c["architectures"][0] = "LlamaForCausalLMEagle".into()), &["`LlamaForCausalLMEagle`", "eagle3"]);
    says(refusal_of(Head::SPECULATORS, |c| c["speculators_model_type"] = "eagle".into()), &["`eagle`"]);
    says(refusal(|c| c["num_hidden_layers"] = 2.into()), &["num_hidden_layers", "one layer"]);
    says(refusal(|c| c["target_hidden_size"] = 256.into()), &["target_hidden_size", "256"]);
    says(refusal(|c| c["draft_vocab_size"] = 95.into()), &["lm_head.weight", "[95, 128]"]);
    says(refusal(|c| c["draft_vocab_size"] = 1000.into()), &["draft_vocab_size", "1000"]);
    says(refusal(|c| c["vocab_size"] = 270.into()), &["t2d", "[270]"]);
    says(refusal(|c| c["norm_before_fc"] = true.into()), &["norm_before_fc"]);
    says(refusal(|c| c["attention_bias"] = true.into()), &["attention_bias"]);
    says(refusal(|c| c["eagle_config"]["use_aux_hidden_state"] = false.into()), &["use_aux_hidden_state"]);
    let ids = |c: &mut serde_json::Value| c["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = 3.into();
    says(refusal(ids), &["eagle_aux_hidden_state_layer_ids", "three layers"]);
    let layer = |c: &mut serde_json::Value| c["transformer_layer_config"]["model_type"] = "qwen3".into();
    says(refusal_of(Head::SPECULATORS, layer), &["model_type", "qwen3"]);
    // A file with what belongs to another model.
    let folder = Head::ORIGINAL.write();
    folder.put("model.safetensors", std::fs::read(golden_dir().join("tied_bf16/model.safetensors")).unwrap());
    says(EagleHead::open(folder.path()).unwrap_err().to_string(), &["lacks the tensor `midlayer."]);
    std::fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    says(
        EagleHead::open(folder.path()).unwrap_err().to_string(),
        &["model.safetensors is missing", "pytorch_model.bin"],
    );
}

#[test]
fn a_head_for_another_model_is_refused() {
    let (_folder, head) = Head::ORIGINAL.open();
    for device in [DeviceChoice::Cpu, DeviceChoice::Emulator] {
        let options = LoadOptions { draft_model: Some(head.clone().into()), ..LoadOptions::on(device) };
        let error = match Engine::load(demo(), options, &mut |_, _| ControlFlow::Continue(())) {
            Ok(_) => panic!("it was taken"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains("made for another model: its vocab_size is 288, and the model's is 4096"), "{error}");
    }
    // Without a word in the config the layers are 2, n / 2 and n - 3, of which a model of two layers has none.
    let folder = Head::ORIGINAL.write();
    let mut config = Head::ORIGINAL.config();
    config["eagle_config"] = serde_json::Value::Null;
    folder.put("config.json", config.to_string());
    let head = EagleHead::open(folder.path()).unwrap();
    assert!(head.taps(&tied().config).unwrap_err().to_string().contains("number of layers"));
    let deep = model::Config { num_hidden_layers: 36, ..tied().config };
    assert_eq!(head.taps(&deep).unwrap(), [2, 18, 33]);
}
