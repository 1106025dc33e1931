//! What each part of the decode loop gains: a loop on the host with a launch for each operator, then one change at a
//! time.
//!
//! `ablation SIZE`, such as `ablation 8B`. Random weights, one sequence, a prompt of 64 tokens. Prints a line for each.

use std::time::{Duration, Instant};

use benches::{Arguments, Run, tokens};
use gpu_kernels::kv::PAGE_TOKENS;
use gpu_kernels::step::{self, PlanDecode, STATE_WORDS, SequenceState};
use host::device::{Buffer, Device};
use host::forward::{Forward, RowOutput};
use host::weights::DeviceWeights;
use host::{Gpu, NgramDraft};
use model::Config;
use model::sampling::argmax;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tokens of the prompt.
const PROMPT: usize = 64;
/// Tokens of an answer.
const TOKENS: usize = 181;
/// Tokens that steps with the script give, in turn: 3 on average.
const LENGTHS: [usize; 3] = [1, 3, 5];

fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    let size = arguments.word(0).ok_or("usage: ablation SIZE")?;
    let (config, device) = arguments.subject(size)?;
    Forward::check(&config)?;
    let capacity = (PROMPT + TOKENS).next_multiple_of(PAGE_TOKENS as usize);
    let prompt = tokens(&config, PROMPT);
    let bytes = config.step_weight_bytes(2) + (PROMPT + TOKENS / 2) * config.kv_bytes_per_token(2);
    println!("{size}: {bytes} bytes a token");
    let mut before = None;
    let mut tell = |what: &str, times: &[Duration], tokens: usize| {
        let seconds = times.iter().sum::<Duration>().as_secs_f64() / tokens as f64;
        let gain = before.replace(seconds).map_or(1.0, |before: f64| before / seconds);
        println!(
            "{what:40} {:8.1} tokens/s {:8.1} µs {:7.1} GB/s  x {gain:.3}",
            1.0 / seconds,
            seconds * 1e6,
            bytes as f64 / seconds / 1e9
        );
    };

    // The host chooses each token, and waits for it.
    let mut host = HostLoop::new(&device, &config, capacity)?;
    for (what, graph) in [("a launch an operator", false), ("launches recorded in a graph", true)] {
        let times = host.run(&prompt, graph)?;
        tell(what, &times, times.len());
    }
    if host.forward.prepare_decode()? {
        let times = host.run(&prompt, false)?;
        tell("the decode kernel, one launch a step", &times, times.len());
    }
    drop(host);

    // The device chooses. The host waits for each token at first, then for none.
    let mut gpu = Gpu::with_weights(&device, &config, DeviceWeights::random(&config, &device)?, capacity)?;
    gpu.set_run_ahead(0);
    let times = Run::of(&mut gpu, &prompt, TOKENS, None)?.steps;
    tell("tokens chosen on the device", &times, TOKENS - 1);
    gpu.set_run_ahead(2);
    let Run { tokens: plain, steps: times, .. } = Run::of(&mut gpu, &prompt, TOKENS, None)?;
    tell("the loop on the device", &times, TOKENS - 1);
    benches::draft_by_script(&mut gpu, &prompt, &plain, &LENGTHS)?;
    let draft = Some(NgramDraft::default().into());
    let Run { tokens: drafted, steps: times, .. } = Run::of(&mut gpu, &prompt, TOKENS, draft)?;
    if drafted != plain {
        return Err("drafts have changed the tokens".into());
    }
    tell("drafts, 3 tokens a step", &times, TOKENS - 1);
    Ok(())
}

/// A loop on the host: it runs a step, copies the logits back, finds the best token and sends it for the next step.
struct HostLoop {
    device: Device,
    forward: Forward,
    history: Buffer<i32>,
    words: Buffer<u32>,
    logits: Vec<f32>,
    capacity: usize,
}

impl HostLoop {
    fn new(device: &Device, config: &Config, capacity: usize) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            forward: Forward::new(device, config, DeviceWeights::random(config, device)?, capacity)?,
            history: device.zeroed(capacity)?,
            words: device.zeroed(STATE_WORDS)?,
            logits: vec![0.0; config.vocab_size],
            capacity,
        })
    }

    /// The time of each token after the prompt. The prompt runs token by token as well.
    fn run(&mut self, prompt: &[u32], graph: bool) -> Result<Vec<Duration>> {
        let Self { device, forward, history, words, logits, capacity } = self;
        let plan = PlanDecode {
            rows: forward.rows(),
            state: SequenceState { history: history.ptr_mut(), words: words.ptr_mut() },
            drafts: Default::default(),
            draft_rows: Default::default(),
            counters: forward.counters(),
            cost: Default::default(),
        };
        let end = *capacity as u32;
        let step = || {
            // SAFETY: the history has the tokens, and rows have room for a step.
            unsafe { device.launch::<step::plan_decode>(1, 0, plan)? };
            if forward.decode().is_some() {
                // SAFETY: the plan zeroes the counters.
                unsafe { forward.enqueue_decode(1, end) }
            } else {
                forward.enqueue(1, end, RowOutput::LogitsFrom(0))
            }
        };
        words.write(0, &[1, 0, 0, 0])?;
        step()?;
        let mut recorded = if graph { Some(device.capture(step)?) } else { None };
        let mut times = Vec::new();
        let mut token = prompt[0];
        for length in 1..PROMPT + TOKENS {
            let start = Instant::now();
            history.write(length - 1, &[token as i32])?;
            words.write(0, &[length as u32, 0, 0, 0])?;
            match &mut recorded {
                Some(graph) => graph.launch()?,
                None => step()?,
            }
            forward.logits().read(0, logits)?;
            token = prompt.get(length).copied().unwrap_or_else(|| argmax(logits));
            if length > PROMPT {
                times.push(start.elapsed());
            }
        }
        Ok(times)
    }
}
