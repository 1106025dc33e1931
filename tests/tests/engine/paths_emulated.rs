//! Every path that a card can take, through the engine and under the emulator: the unfused path, the kernels of
//! other cards than Hopper, and prompts in passes by Hopper's own, alone and in batches with batched steps.

use std::ops::ControlFlow;

use benches::cases::decode::{self, DecodeSizes};
use benches::{Bench, Event};
use cuda_std::Kernel;
use cuda_std::emulator::{self, LeftOut, MissingWait};
use gpu_kernels::attention::SPLIT;
use gpu_kernels::decode::{DecodeStep, decode_1, decode_8_sequences};
use host::batch::{Batch, BatchOptions, Job};
use host::device::{Device, DeviceOptions, Level};
use host::forward::{Forward, Row, RowOutput};
use host::{Coding, DeviceChoice, Engine, Gpu, LoadOptions, NgramDraft, Request};
use integration_tests::{
    GoldenCase, answer, check_decode_calls, engine_with, format_cases, golden_cases, greedy, relative_error, run,
    uploaded,
};
use model::format::Code;
use model::plan::FeedForward;
use model::{Checkpoint, Sampling};

/// As in `golden_emulated.rs`.
const TOLERANCE: f32 = 0.02;
const CONTEXT: usize = 128;
const EAGER: NgramDraft = NgramDraft { tokens: 15, max: 3, min: 1, adaptive: false };

fn unfused() -> DeviceOptions {
    DeviceOptions { unfused: true, ..DeviceOptions::default() }
}

/// The kernels for cards after Hopper.
fn after_hopper() -> DeviceOptions {
    DeviceOptions { level: Some(Level::Sm90), ..DeviceOptions::default() }
}

/// The same for those with 99 KiB of shared memory.
fn short_ring() -> DeviceOptions {
    DeviceOptions { shared_bytes: Some(99 << 10), ..after_hopper() }
}

fn portable() -> DeviceOptions {
    DeviceOptions { level: Some(Level::Sm80), ..DeviceOptions::default() }
}

fn prefill() -> DeviceOptions {
    DeviceOptions { prefill: Some(true), ..DeviceOptions::default() }
}

fn lossless() -> DeviceOptions {
    DeviceOptions { lossless: Some(true), ..DeviceOptions::default() }
}

fn golden() -> (GoldenCase, Checkpoint) {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap_or_else(|e| panic!("{e}"));
    (case, checkpoint)
}

/// Longer than a chunk of the launches, and repetitive enough to draft from.
fn prompt(case: &GoldenCase, length: usize) -> Vec<u32> {
    case.prompt.iter().copied().cycle().take(length).collect()
}

fn gpu(checkpoint: &Checkpoint, options: &DeviceOptions) -> (Device, Gpu) {
    let device = Device::emulator_with(3, options);
    let gpu = Gpu::new(checkpoint, &device, CONTEXT, &mut |_, _| ControlFlow::Continue(()));
    (device, gpu.unwrap_or_else(|e| panic!("{e}")))
}

#[test]
fn steps_in_launches_give_the_bits_of_the_step_in_one() {
    let (case, checkpoint) = golden();
    let prompt = prompt(&case, 70);
    let engine = |options: &DeviceOptions| engine_with(&checkpoint, DeviceChoice::Emulator, options, CONTEXT);
    let mut fused = engine(&DeviceOptions::default());
    let (logits, whole) = (fused.score(&prompt).unwrap(), answer(&mut fused, &greedy(&prompt, 12, None)).tokens);
    for options in [unfused(), after_hopper(), short_ring(), portable()] {
        let mut other = engine(&options);
        assert!(other.score(&prompt).unwrap() == logits, "{options:?}");
        for draft in [None, Some(EAGER)] {
            assert_eq!(answer(&mut other, &greedy(&prompt, 12, draft)).tokens, whole, "{options:?} {draft:?}");
        }
    }
}

#[test]
fn steps_of_any_rows_give_the_bits_of_the_unfused_path() {
    compare_steps(false);
}

#[test]
fn steps_of_trees_of_any_rows_give_the_bits_of_the_unfused_path() {
    compare_steps(true);
}

/// Compares decode steps, also with a short ring, with the unfused path. Three of the contexts are long: where every
/// CTA has a whole split, 16 rows have a kernel of their own. At 648 tokens the step's own positions lie in two pages,
/// which the kernel's two warpgroups have, and at 520 in two splits, where what would be a tree is a chain.
fn compare_steps(tree: bool) {
    let (hopper, short) = (&Device::emulator(5), &Device::emulator_with(5, &short_ring()));
    let int4 = Some(Code::Int4);
    for (device, code) in [(hopper, None), (short, None), (short, int4)] {
        let mut sizes =
            DecodeSizes { contexts: vec![40, 600, 648], rows: vec![1, 5, 16], tree, code, ..DecodeSizes::small() };
        if std::ptr::eq(device, hopper) {
            sizes.contexts.push(520);
        }
        if code.is_some() {
            sizes.contexts = vec![600];
            sizes.config.plan.feed_forward = FeedForward::SwiGlu { intermediate: 1280 };
        }
        let (heads, context) = (sizes.config.plan.attention.key_value_heads as u32, 600u32);
        assert!(DecodeStep::is_long(heads, context.div_ceil(SPLIT), device.capabilities().sms));
        let mut watch = |_: Event<'_>| {};
        let mut bench = Bench::new(device, 1, &mut watch).unwrap_or_else(|e| panic!("{e}"));
        decode::run(&mut bench, &sizes).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn packed_weights_give_the_bits_of_plain_ones() {
    let (case, checkpoint) = golden();
    let prompt = prompt(&case, 20);
    let engine = |options: &DeviceOptions| engine_with(&checkpoint, DeviceChoice::Emulator, options, CONTEXT);
    let (mut plain, mut alone) = (engine(&DeviceOptions::default()), engine(&lossless()));
    assert!(alone.score(&prompt).unwrap() == plain.score(&prompt).unwrap());
    let mut beside = engine(&DeviceOptions { plain_beside: Some(true), ..lossless() });
    for draft in [None, Some(EAGER)] {
        let tokens = |engine: &mut Engine| answer(engine, &greedy(&prompt, 12, draft)).tokens;
        let expected = tokens(&mut plain);
        assert_eq!(tokens(&mut alone), expected, "{draft:?}");
        assert_eq!(tokens(&mut beside), expected, "{draft:?}, plain ones beside");
    }
}

/// That the option does something, at shapes whose last chunk is not whole.
#[test]
fn weights_are_packed_where_that_is_asked_for() {
    for case in golden_cases() {
        let checkpoint = Checkpoint::open(&case.dir).unwrap_or_else(|e| panic!("{e}"));
        let packed = |options: &DeviceOptions| {
            let device = Device::emulator_with(1, options);
            let mut forward =
                Forward::new(&device, &checkpoint.config, uploaded(&device, &checkpoint), CONTEXT).unwrap();
            assert!(forward.prepare_decode().unwrap());
            forward.compact_bytes()
        };
        assert_eq!(packed(&DeviceOptions::default()), None);
        let bytes = packed(&lossless()).unwrap_or_else(|| panic!("{} is not packed", case.dir.display()));
        assert!(bytes > 0);
    }
}

/// Their codes are read where their groups have 128 inputs or more, one after another, and give the bits of what they
/// mean; or of what multiplies codes. Others are the bf16 that they mean.
#[test]
fn quantised_weights_are_read_as_codes() {
    for case in format_cases() {
        let checkpoint = case.open();
        let prompt = prompt(&case, 20);
        let compact = |options: &DeviceOptions| {
            let device = Device::emulator_with(1, options);
            let mut forward =
                Forward::new(&device, &checkpoint.config, uploaded(&device, &checkpoint), CONTEXT).unwrap();
            assert!(forward.prepare_decode().unwrap());
            // Of one row the head is read packed; the short ring has no such kernel.
            let has_packed_head = forward.packed_head_bytes().is_some();
            assert_eq!(has_packed_head, forward.compact_bytes().is_some() && device.has_full_ring(), "{}", case.name);
            forward.compact_bytes()
        };
        // The engine keeps it as well, whatever else it keeps.
        let device = Device::emulator(1);
        let gpu = Gpu::new(&checkpoint, &device, CONTEXT, &mut |_, _| ControlFlow::Continue(())).unwrap();
        assert_eq!(gpu.forward().packed_head_bytes().is_some(), gpu.forward().compact_bytes().is_some());
        let plain = DeviceOptions { lossless: Some(false), ..DeviceOptions::default() };
        assert_eq!(compact(&plain), None, "{}", case.name);
        let smaller = !["gptq_desc_act", "w4a16_zeros"].contains(&case.name.as_str());
        let bytes = compact(&DeviceOptions::default());
        assert_eq!(bytes.is_some(), smaller, "{}", case.name);
        if !smaller {
            continue;
        }
        let beside = DeviceOptions { plain_beside: Some(true), ..DeviceOptions::default() };
        assert_eq!(compact(&beside), bytes, "{}", case.name);
        let engine = |options: &DeviceOptions| engine_with(&checkpoint, DeviceChoice::Emulator, options, CONTEXT);
        // FP8 in blocks is multiplied as such, in one launch or in many; all others are the bf16 that they mean.
        let in_e4m3 = Coding::of(&checkpoint.weights().unwrap()).is_some_and(|coding| coding.in_blocks);
        let same = if in_e4m3 { unfused() } else { plain };
        let (mut plain, mut codes) = (engine(&same), engine(&DeviceOptions::default()));
        assert!(codes.score(&prompt).unwrap() == plain.score(&prompt).unwrap(), "{}", case.name);
        let tokens = |engine: &mut Engine, draft| answer(engine, &greedy(&prompt, 8, draft)).tokens;
        for draft in [None, Some(EAGER)] {
            let expected = tokens(&mut plain, draft);
            assert_eq!(tokens(&mut codes, draft), expected, "{} {draft:?}", case.name);
            if !in_e4m3 {
                assert_eq!(tokens(&mut engine(&short_ring()), draft), expected, "{}, a short ring", case.name);
            }
            if draft.is_none() {
                assert_eq!(tokens(&mut engine(&beside), draft), expected, "{}, bf16 beside", case.name);
            }
        }
        if !in_e4m3 {
            assert_eq!(compact(&short_ring()), bytes, "{}, a short ring", case.name);
        }
    }
}

/// That the options do something: an embedding, six launches a layer, the head, a choice, acceptance and a plan.
#[test]
fn steps_in_launches_are_as_many_as_there_are_operators() {
    let (case, checkpoint) = golden();
    let operators = 5 + 6 * checkpoint.config.num_hidden_layers as u64;
    let steps = [
        (DeviceOptions::default(), 3),
        (after_hopper(), 3),
        (short_ring(), 3),
        (unfused(), operators),
        (portable(), operators),
    ];
    for (options, launches) in steps {
        let (device, mut gpu) = gpu(&checkpoint, &options);
        check_decode_calls(&mut gpu, &device, &greedy(&case.prompt[..4], 5, None), launches)
            .unwrap_or_else(|what| panic!("{options:?}: {what}"));
    }
}

/// Waits of a decode step for mbarriers, left out: for weights, keys and values that are not there yet, and for stages
/// that are still read.
#[test]
fn a_missing_wait_of_a_decode_step_is_found() {
    let (_, checkpoint) = golden();
    let several = missing_waits::<decode_8_sequences>(&checkpoint, 5, 3);
    assert!(several.found >= 15 && several.unfound.is_empty(), "{several:?}");
    // Of one row, a warp of each CTA finds a norm's factor, and waits until others want it. That saves requests for it;
    // to ask too early does no harm. Neither does a producer that does not hold copies back, as one does in the head.
    let one = missing_waits::<decode_1>(&checkpoint, 1, 1);
    let factors = Device::emulator(1).sms() as usize * (2 * checkpoint.config.num_hidden_layers + 1);
    assert!(
        one.found >= 40 && one.unfound.len() <= factors + 1,
        "{one:?}, and {factors} waits for factors to be wanted"
    );
}

/// Every `nth` wait of a step of so many rows, left out.
fn missing_waits<K: Kernel>(checkpoint: &Checkpoint, rows: u32, nth: usize) -> LeftOut {
    // Behind others, so that pages are read.
    let rows: Vec<Row> = (40..40 + rows).map(|position| Row { token: position, position, sequence: 0 }).collect();
    let step = |wait| {
        let device = Device::emulator(1);
        device.leave_out::<K>(wait);
        let mut forward = Forward::new(&device, &checkpoint.config, uploaded(&device, checkpoint), 64).unwrap();
        assert!(forward.prepare_decode().unwrap());
        let listed = forward.list_rows(&rows).unwrap();
        forward.enqueue_sequences(&listed, RowOutput::LogitsFrom(0)).map(|_| device.has_left_out())
    };
    emulator::leave_out_each((0..2000).step_by(nth).map(MissingWait::Phase), step)
}

/// Launches that a prompt of so many tokens takes, and the choice after it.
fn launches_of_prompt(checkpoint: &Checkpoint, options: &DeviceOptions, prompt: &[u32]) -> u64 {
    let (device, mut gpu) = gpu(checkpoint, options);
    let before = device.calls();
    run(&mut gpu, &greedy(prompt, 1, None));
    device.calls().since(before).launches
}

#[test]
fn a_prompt_takes_one_pass_of_many_rows() {
    let (case, checkpoint) = golden();
    let launches = |options: &DeviceOptions| {
        [60, 70].map(|length| launches_of_prompt(&checkpoint, options, &prompt(&case, length)))
    };
    let [short, long] = launches(&prefill());
    assert_eq!(short, long);
    let [short, long] = launches(&DeviceOptions::default());
    assert!(short < long, "chunks of 64 rows: {short} and {long} launches");
    // Without Hopper's kernels there are no such passes.
    let neither = DeviceOptions { level: Some(Level::Sm80), ..prefill() };
    assert_eq!(launches(&neither), launches(&portable()));
}

#[test]
fn prompts_in_passes_match_transformers_and_drafts_change_nothing() {
    let (case, checkpoint) = golden();
    let prompt = prompt(&case, 70);
    let sampling = Sampling { temperature: 0.7, top_k: 8, seed: 3, ..Sampling::default() };
    for options in [prefill(), DeviceOptions { unfused: true, ..prefill() }] {
        let mut engine = engine_with(&checkpoint, DeviceChoice::Emulator, &options, CONTEXT);
        let error = relative_error(&engine.score(&case.prompt).unwrap(), &case.logits);
        assert!(error < TOLERANCE, "{options:?}: {error:.1e}");
        let request = |draft| Request { sampling, ..greedy(&prompt, 12, draft) };
        let plain = answer(&mut engine, &request(None));
        // All but the last token of the prompt are in the cache, and the last goes through a pass all the same.
        let again = answer(&mut engine, &request(Some(EAGER)));
        assert_eq!(again.statistics.cached_tokens, prompt.len() - 1, "{options:?}");
        assert_eq!(plain.tokens, again.tokens, "{options:?}");
    }
}

#[test]
fn a_batch_with_passes_and_batched_steps_gives_what_each_request_gets_alone() {
    let (case, checkpoint) = golden();
    let sampling = Sampling { temperature: 0.8, top_k: 40, seed: 5, ..Sampling::default() };
    let requests: Vec<Request> = [70, 9, 65]
        .into_iter()
        .enumerate()
        .map(|(i, length)| {
            let sampling = if i == 1 { sampling } else { Sampling::default() };
            Request { sampling, ..greedy(&prompt(&case, length), 6 + i, None) }
        })
        .collect();
    // Decode steps of a batch in one launch, or by the unfused path, after prompts in passes; of packed weights; and on
    // other cards.
    let packed = DeviceOptions { lossless: Some(true), ..prefill() };
    for options in [prefill(), DeviceOptions { unfused: true, ..prefill() }, packed, after_hopper(), short_ring()] {
        let mut alone = engine_with(&checkpoint, DeviceChoice::Emulator, &options, CONTEXT);
        let load =
            LoadOptions { options: options.clone(), context: Some(CONTEXT), ..LoadOptions::on(DeviceChoice::Emulator) };
        let sizes = BatchOptions {
            sequences: Some(3),
            rows: Some(256),
            cache_tokens: Some(10 * 64),
            swap_tokens: Some(0),
            packed_pages: Some(0),
            ..BatchOptions::default()
        };
        let mut batch = Batch::load(checkpoint.clone(), load, sizes, &mut |_, _| ControlFlow::Continue(())).unwrap();
        for (id, request) in requests.iter().enumerate() {
            batch.submit(Job { id: id as u64, request: request.clone(), logprobs: None }).unwrap();
        }
        let mut answered = 0;
        while !batch.is_idle() {
            for done in batch.step().unwrap() {
                let expected = answer(&mut alone, &requests[done.id as usize]);
                assert_eq!(done.answer.unwrap().tokens, expected.tokens, "request {} with {options:?}", done.id);
                answered += 1;
            }
        }
        assert_eq!(answered, requests.len());
        assert_eq!(batch.metrics().counts.most_running, 3, "they met");
    }
}
