//! What sampling and log-probabilities cost compared with greedy decoding, on a card.
//!
//! `sampled SIZE`, such as `sampled 8B`; `sampled small` runs on the emulator. Random weights. Prints a line for each
//! measurement, and the figures as JSON.

use std::time::Instant;

use benches::{Arguments, tokens};
use gpu_kernels::sample::random;
use host::batch::plan::{Plan, Started, TableEntry, Work};
use host::batch::{BatchBackend, BatchOptions, GpuBatch, PAGE_TOKENS, Start};
use host::device::Device;
use host::weights::DeviceWeights;
use host::{Backend, Gpu, NgramDraft, Sequence};
use model::{Config, Sampling};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The sizes of the measurements.
struct Scale {
    prompt: usize,
    tokens: usize,
    repeats: usize,
    /// Numbers of sequences in a batch, tokens of each sequence, and timed steps.
    batches: &'static [u32],
    context: usize,
    steps: usize,
}

/// Tokens that steps with the script give, in turn: 3 on average.
const LENGTHS: [usize; 3] = [1, 3, 5];

/// Settings that users ask for, with their names.
fn settings() -> [(&'static str, Sampling); 6] {
    let plain = Sampling { seed: 7, ..Sampling::default() };
    let qwen = Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, ..plain };
    [
        ("0.6, top-k 20, top-p 0.95", qwen),
        ("1, top-k 50", Sampling { temperature: 1.0, top_k: 50, ..plain }),
        ("0.6, top-p 0.95", Sampling { top_k: 0, ..qwen }),
        ("1, min-p 0.05", Sampling { temperature: 1.0, min_p: 0.05, ..plain }),
        ("0.6, top-k 20, top-p 0.95, presence 1.5", Sampling { presence_penalty: 1.5, ..qwen }),
        ("greedy, repetition 1.1", Sampling { repetition_penalty: 1.1, ..plain }),
    ]
}

fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    let (config, device) = arguments.subject(arguments.word(0).ok_or("usage: sampled SIZE")?)?;
    let scale = if device.is_emulator() {
        Scale { prompt: 5, tokens: 4, repeats: 1, batches: &[3], context: 40, steps: 3 }
    } else {
        Scale { prompt: 64, tokens: 361, repeats: 3, batches: &[64, 256], context: 1024, steps: 40 }
    };
    let mut figures = Vec::new();
    if arguments.word(1).is_none_or(|part| part == "one") {
        one(&device, &config, &scale, &mut figures)?;
    }
    if arguments.word(1).is_none_or(|part| part == "batch") {
        batch(&device, &config, &scale, &mut figures)?;
    }
    let figures: Vec<String> = figures.iter().map(|(name, value)| format!("\"{name}\": {value:.4}")).collect();
    println!("{{{}}}", figures.join(", "));
    Ok(())
}

type Figures = Vec<(String, f64)>;

/// One sequence: the rate of each setting, divided by the greedy rate measured next to it.
fn one(device: &Device, config: &Config, scale: &Scale, figures: &mut Figures) -> Result<()> {
    let weights = DeviceWeights::random(config, device)?;
    let mut gpu = Gpu::with_weights(device, config, weights, scale.prompt + scale.tokens)?;
    let prompt = tokens(config, scale.prompt);
    let mut best = |sampling: Sampling, drafted: bool| -> Result<f64> {
        gpu.clear_script();
        let (tokens, mut rate) = answer(&mut gpu, &prompt, scale, sampling, None)?;
        if drafted {
            benches::draft_by_script(&mut gpu, &prompt, &tokens, &LENGTHS)?;
            rate = 0.0;
        }
        for _ in 0..scale.repeats {
            let (again, other) = answer(&mut gpu, &prompt, scale, sampling, drafted.then(NgramDraft::default))?;
            if again != tokens {
                return Err("the same request was answered with other tokens".into());
            }
            rate = rate.max(other);
        }
        Ok(rate)
    };
    for (drafted, figure) in [(false, "sample.m1.ratio"), (true, "sample.drafted.ratio")] {
        let mut worst = f64::INFINITY;
        for (name, sampling) in settings() {
            let (greedy, sampled) = (best(Sampling::default(), drafted)?, best(sampling, drafted)?);
            worst = worst.min(sampled / greedy);
            let how = if drafted { "drafting, " } else { "" };
            println!(
                "one sequence, {how}{name}: {sampled:.1} tokens/s, {:.4} of greedy's {greedy:.1}",
                sampled / greedy
            );
        }
        figures.push((figure.into(), worst));
    }
    Ok(())
}

/// An answer's tokens, and the rate of those after the first.
fn answer(
    gpu: &mut Gpu,
    prompt: &[u32],
    scale: &Scale,
    sampling: Sampling,
    draft: Option<NgramDraft>,
) -> Result<(Vec<u32>, f64)> {
    let max_length = prompt.len() + scale.tokens;
    gpu.begin(
        &Sequence { prompt, max_length, sampling, draft: draft.map(Into::into), stop_tokens: &[], form: None },
        &mut |_, _| std::ops::ControlFlow::Continue(()),
    )?;
    let mut tokens = gpu.step()?.tokens;
    let begun = Instant::now();
    loop {
        let step = gpu.step()?;
        tokens.extend(step.tokens);
        if step.finished {
            let rate = (tokens.len() - 1) as f64 / begun.elapsed().as_secs_f64();
            return Ok((tokens, rate));
        }
    }
}

/// Many sequences: the time of steps with each setting, and with log-probabilities, divided by that of greedy steps.
fn batch(device: &Device, config: &Config, scale: &Scale, figures: &mut Figures) -> Result<()> {
    let [qwen, _, top_p, min_p, presence, repetition] = settings().map(|(_, sampling)| sampling);
    // The sequences take these settings in turn.
    let mixed = vec![qwen, Sampling::default(), top_p, min_p, presence, repetition];
    let cases = [
        ("sampled", "sample", vec![qwen], None),
        ("top-p alone", "", vec![top_p], None),
        ("any settings", "", mixed, None),
        ("5 log-probabilities", "", vec![Sampling::default()], Some(5)),
        ("sampled, 5 log-probabilities", "", vec![qwen], Some(5)),
        ("sampled, 20 log-probabilities", "logprobs", vec![qwen], Some(20)),
    ];
    let options = BatchOptions {
        sequences: scale.batches.iter().copied().max(),
        packed_pages: device.is_emulator().then_some(0),
        ..BatchOptions::default()
    };
    let weights = DeviceWeights::random(config, device)?;
    let context = scale.context + scale.steps + 8;
    let mut backend = GpuBatch::with_weights(device, config, weights, context, options)?;
    for &count in scale.batches {
        for (name, figure, settings, logprobs) in &cases {
            let greedy = step(&mut backend, config, scale, count, &[Sampling::default()], None)?;
            let time = step(&mut backend, config, scale, count, settings, *logprobs)?;
            println!(
                "{count} sequences of {}, {name}: {:.3} ms a step, {:.4} of greedy's rate ({:.3} ms)",
                scale.context,
                time * 1e3,
                greedy / time,
                greedy * 1e3
            );
            if !figure.is_empty() {
                figures.push((format!("{figure}.batch{count}.ratio"), greedy / time));
            }
        }
    }
    Ok(())
}

/// The median seconds of a step of `count` sequences. Each step begins while the one before is under way, as in a
/// batch.
fn step(
    backend: &mut GpuBatch,
    config: &Config,
    scale: &Scale,
    count: u32,
    settings: &[Sampling],
    logprobs: Option<u32>,
) -> Result<f64> {
    let history: Vec<u32> =
        (0..scale.context as u64).map(|i| (random(9, i) % config.vocab_size as u64) as u32).collect();
    let each = (scale.context + scale.steps + 8).div_ceil(PAGE_TOKENS) as u32;
    let mut times = Vec::new();
    let mut begun = Instant::now();
    for i in 0..scale.steps + 3 {
        let work = |slot| Work { slot, start: (scale.context - 1 + i) as u32, rows: 1, samples: true, most_drafts: 0 };
        let mut plan = Plan { work: (0..count).map(work).collect(), ..Plan::default() };
        let mut starts = Vec::new();
        if i == 0 {
            plan.started = (0..count).map(|slot| Started { slot, sequence: slot.into() }).collect();
            let table = |slot| (0..each).map(move |index| TableEntry { slot, index, page: slot * each + index });
            plan.tables = (0..count).flat_map(table).collect();
            let start = |slot: u32| Start {
                tokens: &history,
                prompt: 1,
                max_length: scale.context + scale.steps + 4,
                sampling: Sampling { seed: slot.into(), ..settings[slot as usize % settings.len()] },
                stop_tokens: &[],
                form: None,
                logprobs,
            };
            starts = (0..count).map(start).collect();
        }
        backend.begin(&plan, &starts)?;
        if i > 0 {
            backend.end()?;
            times.push(std::mem::replace(&mut begun, Instant::now()).elapsed().as_secs_f64());
        }
    }
    backend.end()?;
    let mut late = times.split_off(3.min(times.len() - 1));
    late.sort_by(f64::total_cmp);
    Ok(late[late.len() / 2])
}
