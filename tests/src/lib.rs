//! What the integration tests share: checkpoints, and ways to run them.

pub mod batch;
pub mod distribution;
pub mod docs;
pub mod eagle;
mod golden;
mod paths;
mod shallow;

use std::path::{Path, PathBuf};

use host::device::{Device, DeviceOptions};

pub use golden::{GoldenCase, GoldenChat, format_cases, golden_cases, golden_dir};
pub use paths::{
    decode_unfused_and_batched, prefilled, prefilled_to_the_end, unfused_and_batched, unfused_and_decode_kernel,
};
pub use shallow::Shallow;

/// The repository: where this was built, or `WARPDRAFT_REPOSITORY` when the tests were carried to another machine.
pub fn repository() -> PathBuf {
    match std::env::var_os("WARPDRAFT_REPOSITORY") {
        Some(path) => path.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
    }
}

/// The demo model, from the repository.
///
/// # Panics
/// If it does not load: it is part of the repository.
pub fn demo() -> model::Checkpoint {
    model::Checkpoint::open(&repository().join("model/demo")).unwrap_or_else(|e| panic!("{e}"))
}

/// The largest difference of two rows of numbers, as a share of the largest magnitude in `expected`.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let worst = found.iter().zip(expected).fold(0.0f32, |m, (a, b)| {
        // NaN must not vanish in a maximum.
        if (a - b).is_nan() { f32::INFINITY } else { m.max((a - b).abs()) }
    });
    worst / scale
}

/// How far logits of the kernels may be from those of transformers, as [`relative_error`] has it: activations are
/// rounded to bf16 before each product, and where layers are FP8 in blocks, on Hopper, to e4m3 in groups.
///
/// # Panics
/// If the checkpoint has no such weights as its config says.
pub fn tolerance(checkpoint: &model::Checkpoint) -> f32 {
    let coding = host::Coding::of(&checkpoint.weights().unwrap_or_else(|e| panic!("{e}")));
    if coding.is_some_and(|coding| coding.in_blocks) { 0.08 } else { 0.02 }
}

/// `count` prompts of `tokens` tokens each, spread over the demo model's held-out text.
///
/// # Panics
/// If the file is not in order: it is part of the repository.
pub fn demo_prompts(checkpoint: &model::Checkpoint, count: usize, tokens: usize) -> Vec<Vec<u32>> {
    let path = repository().join("model/demo/heldout.txt");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let ids = checkpoint.tokenizer.encode(&text).expect("the held-out text encodes");
    let stride = (ids.len() - tokens) / count;
    (0..count).map(|i| ids[i * stride..][..tokens].to_vec()).collect()
}

/// An engine on `device` for a checkpoint, with room for `context` tokens.
///
/// # Panics
/// If it does not load.
pub fn engine(checkpoint: &model::Checkpoint, device: host::DeviceChoice, context: usize) -> host::Engine {
    engine_with(checkpoint, device, &host::device::DeviceOptions::default(), context)
}

/// As [`engine`], on a device that is opened with `options`.
///
/// # Panics
/// If it does not load.
pub fn engine_with(
    checkpoint: &model::Checkpoint,
    device: host::DeviceChoice,
    options: &host::device::DeviceOptions,
    context: usize,
) -> host::Engine {
    let options =
        host::LoadOptions { options: options.clone(), context: Some(context), ..host::LoadOptions::on(device) };
    host::Engine::load(checkpoint.clone(), options, &mut |_, _| std::ops::ControlFlow::Continue(()))
        .unwrap_or_else(|e| panic!("{e}"))
}

/// A greedy request for `max_tokens` tokens that goes on past end tokens.
pub fn greedy(prompt: &[u32], max_tokens: usize, draft: Option<host::NgramDraft>) -> host::Request {
    host::Request {
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: model::Sampling::default(),
        draft: draft.map(Into::into),
        stop: Vec::new(),
        ignore_end: true,
        form: None,
    }
}

/// The tokens that `engine` answers with.
///
/// # Panics
/// If it fails.
pub fn answer(engine: &mut host::Engine, request: &host::Request) -> host::Generation {
    engine.generate(request, &mut |_| std::ops::ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}

/// A checkpoint's weights on a device.
///
/// # Panics
/// If they do not fit.
pub fn uploaded(device: &host::device::Device, checkpoint: &model::Checkpoint) -> host::weights::DeviceWeights {
    let upload = || {
        let kept = host::WeightStorage::of(checkpoint, device)?;
        let go_on = &mut |_, _| std::ops::ControlFlow::Continue(());
        host::weights::DeviceWeights::upload(checkpoint, device, kept, || Ok(()), go_on)
    };
    upload().unwrap_or_else(|e| panic!("{e}"))
}

/// The emulator, with the kernels for prompts or without.
pub fn emulator(seed: u64, prefill: bool) -> Device {
    Device::emulator_with(seed, &DeviceOptions { prefill: Some(prefill), ..DeviceOptions::default() })
}

/// The tokens that a sequence by itself answers `request` with, and in how many decode steps; there are no end tokens.
///
/// # Panics
/// If anything fails.
pub fn run(gpu: &mut host::Gpu, request: &host::Request) -> (Vec<u32>, usize) {
    use host::Backend;

    let mut run = || -> Result<(Vec<u32>, usize), host::Error> {
        gpu.begin(&sequence(request), &mut |_, _| std::ops::ControlFlow::Continue(()))?;
        let (mut tokens, mut steps) = (Vec::new(), 0);
        loop {
            let step = gpu.step()?;
            tokens.extend(step.tokens);
            if step.finished {
                return Ok((tokens, steps));
            }
            steps += 1;
        }
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

fn sequence(request: &host::Request) -> host::Sequence<'_> {
    host::Sequence {
        prompt: &request.prompt,
        max_length: request.prompt.len() + request.max_tokens,
        sampling: request.sampling,
        draft: request.draft,
        stop_tokens: &[],
        form: None,
    }
}

/// The driver's calls from the first token of an answer until its last.
///
/// # Panics
/// If anything fails.
pub fn decode_calls(
    gpu: &mut host::Gpu,
    device: &host::device::Device,
    request: &host::Request,
) -> host::device::Calls {
    use host::Backend;

    let mut run = || -> Result<host::device::Calls, host::Error> {
        gpu.begin(&sequence(request), &mut |_, _| std::ops::ControlFlow::Continue(()))?;
        assert!(!gpu.step()?.finished);
        let before = device.calls();
        while !gpu.step()?.finished {}
        Ok(device.calls().since(before))
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

/// Checks that the decode loop never waits: the calls of an answer of 2 `tokens` and of one of `tokens` differ by
/// `launches` for each token, and by nothing else.
///
/// # Errors
/// What was counted instead.
pub fn check_decode_calls(
    gpu: &mut host::Gpu,
    device: &host::device::Device,
    request: &host::Request,
    launches: u64,
) -> Result<(), String> {
    let tokens = request.max_tokens;
    let [short, long] = [tokens, 2 * tokens]
        .map(|max_tokens| decode_calls(gpu, device, &host::Request { max_tokens, ..request.clone() }));
    let expected =
        host::device::Calls { launches: short.launches + launches * tokens as u64, ..host::device::Calls::default() };
    if long == expected && short.launches > 0 {
        Ok(())
    } else {
        Err(format!("{tokens} tokens: {short:?}, twice as many: {long:?}; {launches} launches a token were expected"))
    }
}
