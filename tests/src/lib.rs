//! What the integration tests share: the golden checkpoints of `tests/golden`, made by `scripts/make_golden.py`, and
//! ways to run them.

pub mod batch;

pub mod distribution;

pub mod docs;

pub mod eagle;

mod shallow;

use std::ops::Range;
use std::path::{Path, PathBuf};

use host::device::{Device, DeviceOptions};
use model::WeightsMode;
use serde::Deserialize;

pub use shallow::Shallow;

/// A small checkpoint with the logits that Hugging Face transformers computes for a prompt, in f32.
#[derive(Debug, Clone)]
pub struct GoldenCase {
    /// Name of the case and of its directory.
    pub name: String,
    /// The checkpoint's directory.
    pub dir: PathBuf,
    /// What its matrices are made of while they are loaded.
    pub weights: WeightsMode,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Logits at every position of the prompt, `[prompt.len(), vocab]`.
    pub logits: Vec<f32>,
    /// Columns of `logits`.
    pub vocab: usize,
    /// Texts with the ids that transformers gives them; none in older files.
    pub texts: Vec<(String, Vec<u32>)>,
    /// A conversation, if there is a template.
    pub chat: Option<GoldenChat>,
}

/// A conversation and what transformers makes of it.
#[derive(Debug, Clone, Deserialize)]
pub struct GoldenChat {
    /// The messages.
    pub messages: Vec<model::Message>,
    /// The prompt, with the assistant's turn opened.
    pub text: String,
    /// Its ids.
    pub ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Description {
    prompt: Vec<u32>,
    rows: usize,
    vocab: usize,
    #[serde(default)]
    texts: Vec<(String, Vec<u32>)>,
    chat: Option<GoldenChat>,
    /// The golden checkpoint whose weights are rounded while loading, where it has none of its own.
    checkpoint: Option<String>,
    /// How they are rounded.
    weights: Option<String>,
}

impl GoldenCase {
    /// Opens the checkpoint.
    ///
    /// # Panics
    /// If it does not open: it is part of the repository.
    pub fn open(&self) -> model::Checkpoint {
        let options = model::OpenOptions { weights: self.weights, ..model::OpenOptions::default() };
        model::Checkpoint::open_with(&self.dir, options).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }
}

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

/// The folder with the golden files.
pub fn golden_dir() -> PathBuf {
    repository().join("tests/golden")
}

/// Every golden checkpoint, by name.
///
/// # Panics
/// If the files are not in order: they are part of the repository.
pub fn golden_cases() -> Vec<GoldenCase> {
    golden_cases_in(&golden_dir())
}

/// A golden checkpoint for each weight format, and for each rounding while loading, by name: made by
/// `scripts/make_golden_formats.py`. On a device most are bf16 like others; FP8 in blocks has GEMMs of
/// its own on Hopper.
///
/// # Panics
/// If the files are not in order: they are part of the repository.
pub fn format_cases() -> Vec<GoldenCase> {
    golden_cases_in(&golden_dir().join("formats"))
}

fn golden_cases_in(folder: &Path) -> Vec<GoldenCase> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths = entries.map(|e| e.expect("the golden files list").path());
    let mut dirs: Vec<PathBuf> = paths.filter(|path| path.join("golden.json").is_file()).collect();
    dirs.sort();
    dirs.into_iter().map(golden_case).collect()
}

fn golden_case(dir: PathBuf) -> GoldenCase {
    let read =
        |name: &str| std::fs::read(dir.join(name)).unwrap_or_else(|e| panic!("{name} in {}: {e}", dir.display()));
    let description: Description =
        serde_json::from_slice(&read("golden.json")).expect("golden.json describes the case");
    let logits: Vec<f32> = read("logits.f32").as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(logits.len(), description.rows * description.vocab);
    assert_eq!(description.rows, description.prompt.len());
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Description { prompt, vocab, texts, chat, checkpoint, weights, .. } = description;
    let dir = checkpoint.map_or(dir, |checkpoint| golden_dir().join(checkpoint));
    let weights = match weights.as_deref() {
        None => WeightsMode::Plain,
        Some("fp8") => WeightsMode::Fp8,
        Some("int4") => WeightsMode::Int4,
        Some(other) => panic!("{name}: no mode {other}"),
    };
    GoldenCase { name, prompt, logits, vocab, dir, weights, texts, chat }
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

/// The logits of the last `rows` tokens, `[rows, vocab]` each, with made-up keys and values of those before them: by the
/// decode kernel, by the unfused path, and by the kernels for many sequences.
///
/// # Panics
/// If anything fails, or the device has no decode kernel.
pub fn decode_unfused_and_batched(
    device: &host::device::Device,
    config: &model::Config,
    weights: host::weights::DeviceWeights,
    tokens: &[u32],
    rows: usize,
) -> [Vec<f32>; 3] {
    use gpu_kernels::step::{self, PlanPrompt, STATE_WORDS, SequenceState};
    use host::forward::{Forward, Pass, Row, RowOutput, RowsOf};

    let run = move || -> Result<[Vec<f32>; 3], host::Error> {
        let quantised = weights.compact.bytes().is_some();
        let mut forward = Forward::new(device, config, weights, tokens.len())?;
        assert!(forward.prepare_decode()? && forward.prepare_batched()?, "the device has no decode kernels");
        let codes = forward.compact_bytes();
        assert_eq!(codes.is_some(), quantised, "quantised weights are read as codes");
        let history: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let history = device.upload(&history)?;
        let words = device.zeroed::<u32>(STATE_WORDS)?;
        let state = SequenceState { history: history.ptr_mut(), words: words.ptr_mut() };
        let step_rows = forward.rows();
        let plan = |start: usize, count: usize| {
            let plan = PlanPrompt { rows: step_rows, state, start: start as u32, count: count as u32 };
            // SAFETY: the history has the tokens, and steps have room for the rows.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        let prompt = tokens.len() - rows;
        forward.fill_cache(&cache_pattern())?;
        let logits = |forward: &Forward| {
            let mut out = vec![0.0; rows * config.vocab_size];
            forward.logits().read(0, &mut out).map(|()| out)
        };
        plan(prompt, rows)?;
        // SAFETY: no step was run yet: the counters are as they were made.
        unsafe { forward.enqueue_decode(rows as u32, tokens.len() as u32)? };
        let fused = logits(&forward)?;
        // The same rows once more: they append the same keys and values again.
        if rows == 1 {
            // Before the sequence flags of what blocks exchange begin anew, and after it.
            forward.use_up_flags()?;
        }
        for _ in 0..2 {
            plan(prompt, rows)?;
            let (most_rows, end) = (rows as u32, tokens.len() as u32);
            let pass = Pass { rows: step_rows, most_rows, end, tiles: None, output: RowOutput::LogitsFrom(0) };
            // SAFETY: the plan's rows, all of the one sequence.
            unsafe { forward.enqueue_quickest(&pass, RowsOf::OneSequence)? };
            assert_eq!(logits(&forward)?, fused);
        }
        plan(prompt, rows)?;
        forward.enqueue(rows as u32, tokens.len() as u32, RowOutput::LogitsFrom(0))?;
        let unfused = logits(&forward)?;
        let row = |position: usize| Row { token: tokens[position], position: position as u32, sequence: 0 };
        let listed = forward.list_rows(&(prompt..tokens.len()).map(row).collect::<Vec<_>>())?;
        forward.enqueue_listed(&listed, RowOutput::LogitsFrom(0))?;
        Ok([fused, unfused, logits(&forward)?])
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

/// Made-up keys and values: no page of them is like another.
fn cache_pattern() -> Vec<half::bf16> {
    (0..4101).map(|i| half::bf16::from_f32((i * 7919 % 2003) as f32 / 1e3 - 1.0)).collect()
}

/// Rows of many sequences with made-up keys and values before them.
struct Company {
    forward: host::forward::Forward,
    listed: host::forward::ListedRows,
    /// Of the sequences in the opposite order.
    reversed: host::forward::ListedRows,
    count: usize,
    vocab: usize,
    in_e4m3: bool,
}

impl Company {
    /// `positions` are those of each sequence's rows. With the logits of a step by the unfused path; from now on steps
    /// take the quickest one.
    fn new(
        device: &host::device::Device,
        config: &model::Config,
        weights: host::weights::DeviceWeights,
        positions: &[Range<u32>],
    ) -> Result<(Self, Vec<f32>), host::Error> {
        use host::forward::{Capacity, Forward, Row};

        let (sequences, in_e4m3) = (positions.len(), weights.e4m3().is_some());
        let count = positions.iter().map(Range::len).sum::<usize>();
        let context = positions.iter().map(|positions| positions.end as usize).max().unwrap_or(0);
        let stride = context.div_ceil(gpu_kernels::kv::PAGE_TOKENS as usize);
        let room = Capacity::batch(context, sequences, sequences * stride, count.max(65));
        let mut forward = Forward::with_room(device, config, weights, room)?;
        forward.fill_cache(&cache_pattern())?;
        // Every sequence has pages of its own, far from each other.
        let page = |i: u32| i % stride as u32 * sequences as u32 + i / stride as u32;
        forward.set_page_tables(&(0..room.pages as u32).map(page).collect::<Vec<_>>())?;
        let rows = |(sequence, positions): (u32, &Range<u32>)| {
            let token = move |i: u32| (sequence + i * 31) * 7919 % config.vocab_size as u32;
            positions.clone().zip(0..).map(move |(position, i)| Row { token: token(i), position, sequence })
        };
        let listed = forward.list_rows(&(0..).zip(positions).flat_map(rows).collect::<Vec<_>>())?;
        let reversed: Vec<_> = (0..sequences as u32).zip(positions).rev().flat_map(rows).collect();
        let reversed = forward.list_rows(&reversed)?;
        let mut company = Self { forward, listed, reversed, count, vocab: config.vocab_size, in_e4m3 };
        let unfused = company.step()?;
        let forward = &mut company.forward;
        assert!(forward.prepare_decode()? && forward.prepare_batched()?, "the device has no decode kernels");
        Ok((company, unfused))
    }

    /// The logits of the last step.
    fn read(&self) -> Result<Vec<f32>, host::Error> {
        let mut out = vec![0.0; self.count * self.vocab];
        self.forward.logits().read(0, &mut out).map(|()| out)
    }

    /// The logits of a step of many sequences.
    fn step(&self) -> Result<Vec<f32>, host::Error> {
        self.forward.enqueue_listed(&self.listed, host::forward::RowOutput::LogitsFrom(0))?;
        self.read()
    }

    /// That a step of many sequences finds the best tokens of these logits. Only where the head is a launch of its own,
    /// in e4m3 and with more rows than a launch takes: what the rows before had found must count no more.
    fn check_best(&self, logits: &[f32]) -> Result<(), host::Error> {
        if !self.in_e4m3 && self.count <= gpu_kernels::batched::MAX_BATCHED_ROWS as usize {
            return Ok(());
        }
        for rows in [&self.reversed, &self.listed] {
            self.forward.enqueue_listed(rows, host::forward::RowOutput::Best)?;
        }
        for (found, logits) in self.forward.best_tokens(self.count)?.into_iter().zip(logits.chunks(self.vocab)) {
            let ranks = logits.iter().zip(0..).map(|(&logit, token)| gpu_kernels::sample::rank(logit, token));
            assert_eq!(Some(found), ranks.max());
        }
        Ok(())
    }
}

/// The logits of rows of many sequences, `[rows, vocab]`: by the unfused path, by the kernels for many sequences, and
/// by those with GEMMs as launches. `positions` are those of each sequence's rows; keys and values before them are made
/// up.
///
/// # Panics
/// If anything fails, or the device has no such kernels.
pub fn unfused_and_batched(
    device: &host::device::Device,
    config: &model::Config,
    weights: host::weights::DeviceWeights,
    positions: &[Range<u32>],
) -> [Vec<f32>; 3] {
    let run = move || -> Result<[Vec<f32>; 3], host::Error> {
        let (mut company, unfused) = Company::new(device, config, weights, positions)?;
        let batched = company.step()?;
        company.forward.use_gemm_from(1);
        let by_gemm = company.step()?;
        company.check_best(&by_gemm)?;
        Ok([unfused, batched, by_gemm])
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

/// The same of few rows, by the unfused path and by the decode kernel.
///
/// # Panics
/// As [`unfused_and_batched`].
pub fn unfused_and_decode_kernel(
    device: &host::device::Device,
    config: &model::Config,
    weights: host::weights::DeviceWeights,
    positions: &[Range<u32>],
) -> [Vec<f32>; 2] {
    use host::forward::RowOutput::LogitsFrom;

    let run = move || -> Result<[Vec<f32>; 2], host::Error> {
        let (mut company, unfused) = Company::new(device, config, weights, positions)?;
        // Twice: what one step leaves is read by the next. Other logits lie there until then.
        company.forward.enqueue_listed(&company.reversed, LogitsFrom(0))?;
        company.forward.enqueue_sequences(&company.listed, LogitsFrom(0))?;
        let once = company.read()?;
        company.forward.enqueue_sequences(&company.reversed, LogitsFrom(0))?;
        company.forward.enqueue_sequences(&company.listed, LogitsFrom(0))?;
        let again = company.read()?;
        assert!(once == again, "the second step of the decode kernel has other logits");
        company.forward.use_gemm_from(1);
        company.check_best(&again)?;
        Ok([unfused, again])
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

/// The logits of every token by the pass for prompts, run in pieces of `piece` tokens, `[tokens, vocab]`.
///
/// # Panics
/// If anything fails, or the device has no such pass.
pub fn prefilled(
    device: &host::device::Device,
    checkpoint: &model::Checkpoint,
    tokens: &[u32],
    piece: usize,
) -> Vec<f32> {
    prefilled_in_pieces(device, checkpoint, tokens, piece, 0)
}

/// The logits of the last token alone, the only ones that the pieces are asked for.
///
/// # Panics
/// As [`prefilled`].
pub fn prefilled_to_the_end(
    device: &host::device::Device,
    checkpoint: &model::Checkpoint,
    tokens: &[u32],
    piece: usize,
) -> Vec<f32> {
    prefilled_in_pieces(device, checkpoint, tokens, piece, tokens.len() - 1)
}

/// The logits of the tokens from `wanted` on.
fn prefilled_in_pieces(
    device: &host::device::Device,
    checkpoint: &model::Checkpoint,
    tokens: &[u32],
    piece: usize,
    wanted: usize,
) -> Vec<f32> {
    use gpu_kernels::step::{self, PlanPrompt, Rows, STATE_WORDS, SequenceState};
    use host::forward::{Forward, RowOutput};

    let run = || -> Result<Vec<f32>, host::Error> {
        let mut forward = Forward::new(device, &checkpoint.config, uploaded(device, checkpoint), tokens.len())?;
        forward.prepare_prefill()?;
        let history: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let history = device.upload(&history)?;
        let words = device.zeroed::<u32>(STATE_WORDS)?;
        let state = SequenceState { history: history.ptr_mut(), words: words.ptr_mut() };
        let plan = |rows: Rows, start: usize, count: usize| {
            let plan = PlanPrompt { rows, state, start: start as u32, count: count as u32 };
            // SAFETY: the history has the tokens, and rows have room for a piece.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        let vocab = checkpoint.config.vocab_size;
        let mut logits = vec![0.0; (tokens.len() - wanted) * vocab];
        for at in (0..tokens.len()).step_by(piece) {
            let end = tokens.len().min(at + piece);
            plan(forward.prefill().expect("the device has no pass for prompts").rows(), at, end - at)?;
            let from = wanted.max(at);
            let rows = if from < end { RowOutput::LogitsFrom((from - at) as u32) } else { RowOutput::None };
            forward.enqueue_prefill(at, end - at, rows)?;
            for first in (from..end).step_by(64) {
                let rows = (end - first).min(64);
                plan(forward.rows(), first, rows)?;
                forward.enqueue_head(first - at, rows as u32)?;
                forward.logits().read(0, &mut logits[(first - wanted) * vocab..][..rows * vocab])?;
            }
        }
        Ok(logits)
    };
    run().unwrap_or_else(|e| panic!("{e}"))
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
