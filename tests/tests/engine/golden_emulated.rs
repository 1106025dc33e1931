//! The GPU path under the emulator: every kernel and every launch of the forward pass and the decode loop, lane by
//! lane, checked for races and stray accesses on the way.

use std::ops::{ControlFlow, Range};

use host::device::{Device, DeviceOptions, Level};
use host::weights::DeviceWeights;
use host::{DeviceChoice, MatrixFormat, NgramDraft, PackedSize, WeightStorage};
use integration_tests::{
    GoldenCase, answer, decode_unfused_and_batched, engine, format_cases, golden_cases, greedy, prefilled,
    prefilled_to_the_end, relative_error, run, tolerance, unfused_and_batched, unfused_and_decode_kernel, uploaded,
};
use model::format::Code;
use model::plan::Traits;
use model::{Checkpoint, Config, Sampling};

/// Activations are rounded to bf16 before each product, as on a GPU, and so are f16 and f32 weights.
const TOLERANCE: f32 = 0.02;

#[test]
fn logits_match_transformers() {
    for case in golden_cases().into_iter().chain(format_cases()) {
        let checkpoint = case.open();
        let most = tolerance(&checkpoint);
        let mut engine = engine(&checkpoint, DeviceChoice::Emulator, case.prompt.len() + 1);
        let logits = engine.score(&case.prompt).unwrap();
        for (row, (found, expected)) in logits.chunks(case.vocab).zip(case.logits.chunks(case.vocab)).enumerate() {
            let error = relative_error(found, expected);
            println!("{} row {row}: {error:.1e}", case.name);
            assert!(error < most, "{} row {row}: {error:.1e}", case.name);
        }
    }
}

#[test]
fn drafts_chunks_and_company_change_nothing() {
    for (i, case) in golden_cases().into_iter().enumerate() {
        let checkpoint = Checkpoint::open(&case.dir).unwrap();
        let mut engine = engine(&checkpoint, DeviceChoice::Emulator, 128);
        // Longer than one chunk of a prompt, and repetitive enough to draft from.
        let prompt: Vec<u32> = case.prompt.iter().copied().cycle().take(70).collect();
        let sampling = Sampling { temperature: 0.7, top_k: 8, seed: 3, ..Sampling::default() };
        let sampling = if i % 2 == 0 { sampling } else { Sampling::default() };
        let request = |draft| host::Request { sampling, ..greedy(&prompt, 12, draft) };
        let plain = answer(&mut engine, &request(None));
        // The second time all but the last token of the prompt is in the cache.
        let again = answer(&mut engine, &request(Some(NgramDraft { tokens: 15, max: 3, min: 1, adaptive: false })));
        assert_eq!(again.statistics.cached_tokens, prompt.len() - 1);
        assert_eq!(plain.tokens, again.tokens, "{}", case.name);
    }
}

#[test]
fn the_decode_and_the_batched_kernel_give_the_bits_of_the_unfused_path() {
    for (i, case) in golden_cases().into_iter().enumerate() {
        let checkpoint = Checkpoint::open(&case.dir).unwrap();
        // Over a page's end, over a split's end, and for 16 rows over several tiles of attention.
        let steps = [(70, 7), (264, 16), (70, 1), (264, 1), (70, 16)];
        for &(length, rows) in &steps[..if i == 0 { steps.len() } else { 2 }] {
            let tokens: Vec<u32> = case.prompt.iter().copied().cycle().take(length).collect();
            let device = Device::emulator(i as u64 * 100);
            let [fused, unfused, batched] =
                decode_unfused_and_batched(&device, &checkpoint.config, uploaded(&device, &checkpoint), &tokens, rows);
            assert_eq!(fused, unfused, "{} with {rows} rows of {length}", case.name);
            assert_eq!(batched, unfused, "{} with {rows} rows of {length}, batched", case.name);
        }
    }
}

#[test]
fn a_packed_head_beside_plain_layers_gives_the_bits_of_the_unfused_path() {
    for case in golden_cases() {
        let checkpoint = Checkpoint::open(&case.dir).unwrap();
        let tokens: Vec<u32> = case.prompt.iter().copied().cycle().take(20).collect();
        let device = Device::emulator(7);
        let size = PackedSize::of_head(&checkpoint, 1).unwrap();
        assert!(size.is_some(), "the head of {} can be packed", case.name);
        let kept = WeightStorage { head: size, ..WeightStorage::only(MatrixFormat::Plain) };
        let go_on = &mut |_, _| ControlFlow::Continue(());
        let weights = DeviceWeights::upload(&checkpoint, &device, Some(kept), || Ok(()), go_on).unwrap();
        assert!(weights.packed_head.is_some(), "the packed head of {} is exact", case.name);
        let [fused, unfused, _] = decode_unfused_and_batched(&device, &checkpoint.config, weights, &tokens, 1);
        assert_eq!(fused, unfused, "{}", case.name);
    }
}

/// Products of several groups of turns and several N-tiles a block, whose inputs end within a chunk; and in attention
/// two key-value heads, with five query heads each, whose tiles are scheduled to four blocks.
#[test]
fn the_decode_and_the_batched_kernel_give_the_bits_of_the_unfused_path_in_wider_shapes() {
    for (length, rows) in [(4, 1), (70, 16), (258, 3)] {
        wider_shapes_agree(length, rows, None);
    }
}

/// Of inputs whose chunks do not fill the last stage, too.
#[test]
fn so_do_the_kernels_that_read_codes() {
    for (rows, code) in [(1, Code::Int4), (16, Code::Int4), (1, Code::E4m3), (16, Code::E4m3)] {
        wider_shapes_agree(rows as u32 + 3, rows, Some(code));
    }
}

fn wider_shapes_agree(length: u32, rows: usize, code: Option<Code>) {
    let mut config = Config { vocab_size: 300, num_hidden_layers: 1, ..Config::published("8B").unwrap() };
    config.plan.resize(640, 2432, (10, 2));
    let tokens: Vec<u32> = (0..length).map(|i| i * 7919 % 300).collect();
    let device = Device::emulator(u64::from(length));
    let weights = DeviceWeights::random_as(&config, &device, code).unwrap();
    let [fused, unfused, batched] = decode_unfused_and_batched(&device, &config, weights, &tokens, rows);
    assert_eq!(fused, unfused, "{rows} rows of {length}, {code:?}");
    assert_eq!(batched, unfused, "{rows} rows of {length}, {code:?}, batched");
}

/// With few SMs a CTA has many N-tiles, or all of them: more than there are stages, where the ring is short.
#[test]
fn few_sms_give_the_bits_of_the_unfused_path() {
    let mut config = Config { vocab_size: 300, num_hidden_layers: 1, ..Config::published("8B").unwrap() };
    // Of two chunks.
    config.plan.resize(640, 640, (2, 1));
    let short = DeviceOptions { level: Some(Level::Sm90), shared_bytes: Some(99 << 10), ..DeviceOptions::default() };
    let packed = DeviceOptions { lossless: Some(true), ..DeviceOptions::default() };
    for (sms, code, options, positions) in [
        (1, Some(Code::Int4), short, one_row_at([3, 300])),
        (1, Some(Code::Int4), DeviceOptions::default(), one_row_at([70])),
        (2, Some(Code::E4m3), DeviceOptions::default(), one_row_at([3, 300])),
        (3, None, packed, one_row_at([70])),
    ] {
        let device = Device::emulator_with(u64::from(sms), &DeviceOptions { sms: Some(sms), ..options });
        let weights = DeviceWeights::random_as(&config, &device, code).unwrap();
        let [unfused, few] = unfused_and_decode_kernel(&device, &config, weights, &positions);
        assert!(unfused.iter().all(|logit| logit.is_finite()));
        assert!(few == unfused, "{sms} SMs, {code:?}, {positions:?}");
    }
}

/// One tile of 96 rows and of 128, and two of each; of codes, whose tiles have 64 rows and 128; and of packed weights,
/// in tiles of 64, or unpacked a layer at a time.
#[test]
fn a_batched_step_of_many_sequences_gives_the_bits_of_the_unfused_path() {
    let published = Config { vocab_size: 300, ..Config::published("8B").unwrap() };
    // Of every other number with biases in place of norms of heads.
    let (int4, fp8) = (Some(Code::Int4), Some(Code::E4m3));
    // Of codes, those that are all that is kept, and such with bf16 beside them.
    let plain = [70, 100, 131, 200].map(|sequences| (sequences, None, false, Some(false)));
    let coded = [(40, fp8, false), (70, int4, false), (131, fp8, false), (70, fp8, true), (131, int4, true)];
    let coded = coded.map(|(sequences, code, beside)| (sequences, code, beside, None));
    let packed = [40, 70].map(|sequences| (sequences, None, false, Some(true)));
    for (i, (sequences, code, beside, lossless)) in plain.into_iter().chain(coded).chain(packed).enumerate() {
        let has_bias = i % 2 == 1;
        // One layer prepares the next where weights are packed, or plain.
        let mut config = Config { num_hidden_layers: if code.is_some() { 1 } else { 2 }, ..published.clone() };
        // Packed stages are unpacked in pairs: some split-K partials have three.
        config.plan.resize(384, if lossless == Some(true) { 640 } else { 384 }, (2, 1));
        config.plan.attention.traits = Traits { head_norm: !has_bias, qkv_bias: has_bias };
        let positions = (0..sequences).map(|i| i * 13 % 67 + if i == 5 { 300 } else { 0 });
        let options = DeviceOptions { plain_beside: Some(beside), lossless, ..DeviceOptions::default() };
        let device = Device::emulator_with(u64::from(sequences), &options);
        let weights = DeviceWeights::random_as(&config, &device, code).unwrap();
        assert_eq!(weights.packed().is_some(), lossless == Some(true));
        let [unfused, batched, by_gemm] = unfused_and_batched(&device, &config, weights, &one_row_at(positions));
        assert!(unfused.iter().all(|logit| logit.is_finite()));
        assert!(batched == unfused, "{sequences} sequences, {code:?}, packed: {lossless:?}");
        assert!(by_gemm == unfused, "{sequences} sequences, {code:?}, GEMMs as launches");
    }
}

/// The head is a launch for each 512 rows.
#[test]
fn more_rows_than_a_launch_takes_give_the_bits_of_the_unfused_path() {
    let published = Config { vocab_size: 300, num_hidden_layers: 1, ..Config::published("8B").unwrap() };
    for code in [None, Some(Code::E4m3)] {
        let mut config = published.clone();
        config.plan.resize(256, 256, (2, 1));
        let device = Device::emulator(540);
        let weights = DeviceWeights::random_as(&config, &device, code).unwrap();
        let positions = one_row_at((0..540).map(|i| i % 7));
        let [unfused, batched, _] = unfused_and_batched(&device, &config, weights, &positions);
        assert!(unfused.iter().all(|logit| logit.is_finite()));
        assert!(batched == unfused, "{code:?}");
    }
}

/// A row of each sequence.
fn one_row_at(positions: impl IntoIterator<Item = u32>) -> Vec<Range<u32>> {
    positions.into_iter().map(|position| position..position + 1).collect()
}

/// The decode kernel's attention takes each sequence's own pages: of one row or of several, which may lie in two
/// splits; heads that share keys and values are tiles of few pairs, or of many; contexts have one split, or several, of
/// which a block has some, or all that a head has; and weights are in every format.
#[test]
fn few_sequences_by_the_decode_kernel_give_the_bits_of_the_unfused_path() {
    let published = Config { vocab_size: 300, ..Config::published("8B").unwrap() };
    let lossless =
        |lossless| DeviceOptions { lossless: Some(lossless), plain_beside: Some(true), ..DeviceOptions::default() };
    for (positions, heads, code, options) in [
        (one_row_at([3, 300]), (2, 1), None, lossless(false)),
        (one_row_at([255, 256, 0, 64, 63, 513, 700, 5]), (8, 1), None, lossless(true)),
        (one_row_at((0..16).map(|i| i * 53 % 310)), (4, 2), None, lossless(false)),
        (one_row_at((0..9).map(|i| i * 71 % 290)), (2, 1), None, lossless(true)),
        (one_row_at([270, 1, 90]), (2, 1), Some(Code::E4m3), DeviceOptions::default()),
        (one_row_at([1, 270, 90, 127, 128]), (4, 1), Some(Code::Int4), DeviceOptions::default()),
        (one_row_at([270, 300, 511, 400]), (4, 2), None, lossless(false)),
        (vec![254..258, 300..302, 511..513, 270..271], (4, 1), Some(Code::E4m3), DeviceOptions::default()),
        (vec![252..260, 3..4, 0..7], (4, 1), None, lossless(false)),
        (vec![0..1, 511..514, 254..257, 60..61], (8, 1), None, lossless(false)),
        (vec![100..105, 258..261], (2, 1), Some(Code::Int4), DeviceOptions::default()),
        (vec![7..8, 250..259, 30..36], (4, 2), Some(Code::E4m3), DeviceOptions::default()),
    ] {
        // What one layer leaves to the next has nothing to do with the format.
        let mut config = Config { num_hidden_layers: if code.is_some() { 1 } else { 2 }, ..published.clone() };
        config.plan.resize(256, 256, heads);
        let device = Device::emulator_with(positions.len() as u64, &options);
        let weights = DeviceWeights::random_as(&config, &device, code).unwrap();
        let [unfused, few] = unfused_and_decode_kernel(&device, &config, weights, &positions);
        assert!(unfused.iter().all(|logit| logit.is_finite()));
        assert!(few == unfused, "{positions:?}, {heads:?} heads, {code:?}");
    }
}

/// The parts of a context's splits come as words: a warp adds one of a few splits, or some of up to 32, or more after
/// these, and then their maxima are found before.
#[test]
fn one_row_of_any_context_gives_the_bits_of_the_unfused_path() {
    let published = Config { vocab_size: 300, ..Config::published("8B").unwrap() };
    // What one layer leaves to the next has nothing to do with the context's length.
    for (position, layers, heads) in
        [(255, 1, (2, 1)), (256, 2, (8, 2)), (2400, 2, (5, 1)), (8200, 1, (4, 1)), (42_000, 1, (2, 1))]
    {
        let mut config = Config { num_hidden_layers: layers, ..published.clone() };
        config.plan.resize(256, 256, heads);
        let device = Device::emulator(u64::from(position));
        let weights = DeviceWeights::random_as(&config, &device, None).unwrap();
        let [unfused, few] = unfused_and_decode_kernel(&device, &config, weights, &one_row_at([position]));
        assert!(unfused.iter().all(|logit| logit.is_finite()));
        assert!(few == unfused, "position {position}, {heads:?} heads");
    }
}

#[test]
fn the_pass_for_prompts_matches_transformers_in_any_pieces() {
    let in_e4m3 = |case: &GoldenCase| tolerance(&case.open()) > TOLERANCE;
    let cases: Vec<_> = golden_cases().into_iter().chain(format_cases().into_iter().filter(in_e4m3)).collect();
    assert!(cases.iter().any(in_e4m3));
    for case in cases {
        let checkpoint = case.open();
        let device = Device::emulator(5);
        let whole = prefilled(&device, &checkpoint, &case.prompt, case.prompt.len());
        let error = relative_error(&whole, &case.logits);
        println!("{}: {error:.1e}", case.name);
        assert!(error < tolerance(&checkpoint), "{}: {error:.1e}", case.name);
        assert_eq!(prefilled(&device, &checkpoint, &case.prompt, 5), whole, "{}", case.name);
    }
}

/// Clusters of eight CTAs fit on few SMs, or on none, and CTAs have one tile, or many.
#[test]
fn the_pass_for_prompts_gives_the_same_bits_on_any_number_of_sms() {
    let checkpoint = golden_cases().remove(0).open();
    let tokens: Vec<u32> = (0..150).map(|i| i * 7 % checkpoint.config.vocab_size as u32).collect();
    let [expected, few, odd] = [16, 2, 5].map(|sms| {
        let device = Device::emulator_with(3, &DeviceOptions { sms: Some(sms), ..DeviceOptions::default() });
        prefilled(&device, &checkpoint, &tokens, tokens.len())
    });
    assert!(few == expected && odd == expected);
}

/// Over several tiles of rows, of which the last layer finishes the last alone; or none of a piece.
#[test]
fn the_end_of_a_prompt_is_the_same_bits_when_nothing_else_is_asked_for() {
    let in_e4m3 = format_cases().into_iter().find(|case| case.name == "fp8_blocks").expect("it is there");
    for case in [golden_cases().remove(0), in_e4m3] {
        let checkpoint = case.open();
        let device = Device::emulator(6);
        let tokens: Vec<u32> = case.prompt.iter().copied().cycle().take(300).collect();
        let vocab = checkpoint.config.vocab_size;
        let all = prefilled(&device, &checkpoint, &tokens, tokens.len());
        for piece in [300, 200, 140] {
            let end = prefilled_to_the_end(&device, &checkpoint, &tokens, piece);
            assert_eq!(end, all[299 * vocab..], "{}, pieces of {piece}", case.name);
        }
    }
}

#[test]
fn a_script_is_confirmed_as_far_as_it_is_right() {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap();
    let device = Device::emulator(0);
    let mut gpu = host::Gpu::new(&checkpoint, &device, 64, &mut |_, _| std::ops::ControlFlow::Continue(())).unwrap();
    let request = |draft| greedy(&case.prompt[..4], 19, draft);
    let (plain, steps) = run(&mut gpu, &request(None));
    assert_eq!((plain.len(), steps), (19, 18));
    let eager = NgramDraft { tokens: 7, adaptive: false, ..NgramDraft::default() };
    benches::draft_by_script(&mut gpu, &case.prompt[..4], &plain, &[1, 3, 5]).unwrap();
    assert_eq!(run(&mut gpu, &request(Some(eager))), (plain.clone(), 6));
    // With more drafts than it has room for, and with as many as are worth it.
    assert_eq!(run(&mut gpu, &request(Some(NgramDraft { tokens: 15, ..eager }))), (plain.clone(), 6));
    assert_eq!(run(&mut gpu, &request(Some(NgramDraft { adaptive: true, ..eager }))).0, plain);
    gpu.clear_script();
    assert_eq!(run(&mut gpu, &request(Some(eager))).0, plain);
}
