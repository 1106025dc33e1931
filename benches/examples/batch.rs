//! What a batch reaches on a card, with random weights, compared with what the card could do.
//!
//! `batch [SIZE] [PART …]`: by default `8B` and every part. On the emulator: `batch small`. The parts:
//!
//! - `decode`: steps of 1 to 256 sequences that have 1,024 tokens each, against weights and cache at the card's read
//!   bandwidth;
//! - `swap`: pages from the host tier, against the copy engine;
//! - `mixed`: 2,000 requests, prompts log-normal around 400 tokens, answers of 16 to 512;
//! - `prefix`: 1,000 requests that share 4,096 tokens, against 100 that do not (per request).
//!
//! With `plain` among the words no pages are packed. With `launches`, decode steps and prompts take the unfused path,
//! as on cards other than Hopper. With `sequences=512` or another number, that many sequences run at once, if there are
//! enough.
//!
//! Prints a table, then a line of JSON with the names of docs/benchmarks.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use benches::cases::ceilings;
use benches::{Arguments, Bench, Event};
use gpu_kernels::gemm::{Gemm, SPAN};
use gpu_kernels::norm::Norm;
use gpu_kernels::sample::random;
use gpu_kernels::stream::StreamMatrix;
use half::bf16;
use host::batch::plan::{Plan, SequenceId, Slot, Started, SwapIn, TableEntry, Work};
use host::batch::{BatchBackend, BatchOptions, Counts, GpuBatch, PAGE_TOKENS, Queue, Sequences, Start, Steps};
use host::device::Device;
use host::gemm::{self, Epilogue};
use host::stream::{Source, Stream};
use model::{Config, Sampling};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The sizes of the measurements.
struct Scale {
    context: usize,
    options: BatchOptions,
    /// Numbers of sequences in a decode step, and how many tokens each sequence has.
    decode: Vec<u32>,
    decode_context: usize,
    steps: usize,
    requests: usize,
    /// Median length of prompts, and the longest.
    prompt: f64,
    longest_prompt: usize,
    answers: (usize, usize),
    prefix: usize,
    /// Number of requests that share the prefix, and of requests that do not.
    sharing: (usize, usize),
}

impl Scale {
    fn published() -> Self {
        Self {
            context: 8192,
            options: BatchOptions::default(),
            decode: vec![1, 2, 4, 8, 16, 64, 256],
            decode_context: 1024,
            steps: 20,
            requests: 2000,
            prompt: 400.0,
            longest_prompt: 4096,
            answers: (16, 512),
            prefix: 4096,
            sharing: (1000, 100),
        }
    }

    /// Small sizes, for the emulator.
    fn small() -> Self {
        let options = BatchOptions { sequences: Some(4), rows: Some(100), ..BatchOptions::default() };
        Self {
            context: 300,
            options,
            decode: vec![1, 4],
            decode_context: 100,
            steps: 1,
            requests: 4,
            prompt: 20.0,
            longest_prompt: 60,
            answers: (1, 4),
            prefix: 130,
            sharing: (3, 2),
        }
    }
}

/// What is measured, with the card's limits in bytes and operations a second.
struct Bencher {
    backend: GpuBatch,
    config: Config,
    scale: Scale,
    read: f64,
    to_device: f64,
    /// Rates of GEMMs: on a rested card, and after two seconds of nothing else.
    products: [f64; 2],
    /// Names and values.
    figures: Vec<(String, f64)>,
}

fn main() -> Result<()> {
    let mut arguments = Arguments::read()?;
    let [launches, plain] = ["launches", "plain"].map(|way| arguments.words.iter().any(|a| a == way));
    arguments.options.unfused |= launches;
    arguments.options.prefill = Some(!launches);
    let (config, device) = arguments.subject(arguments.word(0).unwrap_or("8B"))?;
    let scale = if device.is_emulator() { Scale::small() } else { Scale::published() };
    let words = &arguments.words;
    let sequences = words.iter().find_map(|a| a.strip_prefix("sequences=")).map(str::parse).transpose()?;
    let names = words.iter().skip(1).map(String::as_str);
    let parts: Vec<&str> =
        names.filter(|a| !["launches", "plain"].contains(a) && !a.starts_with("sequences=")).collect();
    let wants = |part: &str| parts.is_empty() || parts.contains(&part);

    let sizes = if device.is_emulator() { ceilings::CeilingSizes::SMALL } else { ceilings::CeilingSizes::PUBLISHED };
    let mut watch = |_: Event<'_>| ();
    let mut bench = Bench::new(&device, 20, &mut watch)?;
    ceilings::run(&mut bench, sizes)?;
    let limits = *bench.limits();
    let products = products(&device, &config)?;
    println!(
        "{}: reads {:.0} GB/s, copies {:.1} GiB/s to the device, multiplies {:.0} TFLOP/s ({:.0} for seconds)",
        device.name(),
        limits.read / 1e9,
        gib(limits.to_device),
        products[0] / 1e12,
        products[1] / 1e12
    );
    let begun = Instant::now();
    let weights = arguments.weights(&config, &device)?;
    let options = BatchOptions {
        sequences: sequences.or(scale.options.sequences),
        packed_pages: plain.then_some(usize::MAX).or(device.is_emulator().then_some(0)),
        ..scale.options
    };
    let backend = GpuBatch::with_weights(&device, &config, weights, scale.context, options)?;
    let room = backend.limits();
    println!(
        "loaded in {:.1} s: {} pages, {} in the host tier",
        begun.elapsed().as_secs_f64(),
        room.pages,
        room.host_pages
    );
    let (read, to_device) = (limits.read, limits.to_device);
    let mut bencher = Bencher { backend, config, scale, read, to_device, products, figures: Vec::new() };
    for (part, run) in [
        ("swap", Bencher::swap as fn(&mut Bencher) -> Result<()>),
        ("decode", Bencher::decode),
        ("prefix", Bencher::prefix),
        ("mixed", Bencher::mixed),
    ] {
        if wants(part) {
            run(&mut bencher)?;
        }
    }
    let figures: Vec<String> = bencher.figures.iter().map(|(name, value)| format!("\"{name}\": {value:.4}")).collect();
    println!("{{{}}}", figures.join(", "));
    Ok(())
}

fn gib(bytes: f64) -> f64 {
    bytes / (1u64 << 30) as f64
}

/// The rates of a prompt's GEMMs in operations a second: gate and up over 8,192 rows, on a rested card and after two
/// seconds of nothing else.
fn products(device: &Device, config: &Config) -> Result<[f64; 2]> {
    let m = if device.is_emulator() { 128 } else { 8192 };
    let (n, k) = (config.plan.activation_size(), config.plan.hidden);
    let numbers: Vec<bf16> =
        (0..1 << 20).map(|i| bf16::from_f32((random(1, i) >> 40) as f32 / 2f32.powi(23) - 1.0)).collect();
    let filled = |len: usize| -> Result<_> {
        let mut buffer = device.zeroed::<bf16>(len)?;
        buffer.repeat(&numbers, 0)?;
        Ok(buffer)
    };
    let (x, gate, up, out) = (filled(m * k)?, filled(n * k)?, filled(n * k)?, device.zeroed::<bf16>(m * n)?);
    let source = Source { weight: gate.ptr(), up: up.ptr(), n: n as u32, first_n_tile: 0 };
    let weights = Stream::new(device, [(source.n_tiles(), k as u32)])?;
    // SAFETY: the matrices are as it says.
    unsafe { weights.lay_out(device, 0, source)? };
    let StreamMatrix { stream, base, blocks, n_tiles, .. } = weights.matrices()[0];
    // Sums of squares of rows whose mean square is 1.
    let squares = device.upload(&vec![SPAN as f32; m * k / SPAN as usize])?;
    let maps = device.tensor_maps(&[gemm::rows(x.ptr(), m, k), gemm::out(out.ptr(), m, n)])?;
    let product = Gemm {
        x: maps.ptr(0),
        stream,
        base,
        blocks,
        n_tiles,
        out: maps.ptr(1),
        y: Default::default(),
        norm: Norm { squares: squares.ptr(), dim: k as u32, eps: config.rms_norm_eps },
        bias: Default::default(),
        heads: Default::default(),
        residual: Default::default(),
        next_norm: Default::default(),
        codes: Default::default(),
        first_row: 0,
        m: m as u32,
        first_feature: 0,
        n: n as u32,
        k: k as u32,
        band: 0,
        beside: Default::default(),
    };
    let beside = gemm::Beside::new(device)?;
    let timer = device.timer()?;
    let time = |count: u32| {
        // SAFETY: the maps describe the buffers, which live until the timer has waited.
        timer.time(|| (0..count).try_for_each(|_| unsafe { gemm::enqueue(device, &beside, Epilogue::SwiGlu, product) }))
    };
    let mut times = Vec::new();
    for _ in 0..if device.is_emulator() { 1 } else { 10 } {
        times.push(time(1)? / 1e3);
    }
    let rested = median(times);
    let mut kept_up = rested;
    let begun = Instant::now();
    while !device.is_emulator() && begun.elapsed() < Duration::from_secs(2) {
        kept_up = time(50)? / 50e3;
    }
    Ok([rested, kept_up].map(|time| (4 * m * n * k) as f64 / time))
}

/// Bytes of a token's keys and values.
fn kv_bytes(config: &Config) -> f64 {
    config.kv_bytes_per_token(2) as f64
}

/// Whether rows belong to a prompt: there is more than one. (A step with only a prompt's last row is rare.)
fn is_of_prompt(work: &Work) -> bool {
    work.rows > 1
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The start of a sequence, with the settings that every sequence here has.
fn start(tokens: &[u32], prompt: usize, max_length: usize) -> Start<'_> {
    Start { tokens, prompt, max_length, sampling: Sampling::default(), stop_tokens: &[], logprobs: None, form: None }
}

/// A batch that was run to its end.
#[derive(Default)]
struct Ran {
    seconds: f64,
    prompts: usize,
    answers: usize,
    counts: Counts,
    /// Steps with rows of answers alone, and steps with rows of prompts too.
    parts: [Part; 2],
}

/// Steps of one kind.
#[derive(Clone, Copy, Default)]
struct Part {
    steps: usize,
    /// Rows of answers, and rows of prompts.
    rows: [usize; 2],
    seconds: f64,
    /// The least time that the card could take, summed over the steps. For each step it is bytes by bandwidth or
    /// operations by rate, whichever is more. The first two are for the two rates of GEMMs. The third is for the first
    /// rate, with rows of prompts and of answers in passes of their own: they do not share one reading of the weights.
    bounds: [f64; 3],
}

/// What the least time of a step is computed from.
struct Bound<'a> {
    config: &'a Config,
    /// As [`Bencher::read`] and [`Bencher::products`].
    read: f64,
    products: [f64; 2],
}

impl Bound<'_> {
    /// The bytes (without those of the weights) and the operations that a sequence's rows need. In the last layer, a
    /// row after which nothing is chosen needs only keys and values.
    fn needs(&self, work: &Work) -> [f64; 2] {
        let c = self.config;
        let (start, rows, chosen) = (f64::from(work.start), f64::from(work.rows), f64::from(u8::from(work.samples)));
        // Two operations and two bytes a weight.
        let head = (2 * c.vocab_size * c.plan.hidden) as f64;
        let layers = c.num_hidden_layers as f64;
        let layer = (c.step_weight_bytes(2) as f64 - head) / layers;
        let keys_and_values = (2 * 2 * c.plan.attention.key_value_size() * c.plan.hidden) as f64;
        let attends = |tokens: f64| 4.0 * tokens * c.plan.attention.query_size() as f64;
        let all = rows * layer + attends(rows * (start + (rows + 1.0) / 2.0));
        let last = rows * keys_and_values + chosen * (layer - keys_and_values + attends(start + rows));
        [(start + rows) * kv_bytes(c), (layers - 1.0) * all + last + chosen * head]
    }

    /// The least seconds of a step, in the order of [`Part::bounds`].
    fn of(&self, plan: &Plan) -> [f64; 3] {
        let weights = self.config.step_weight_bytes(2) as f64;
        let least = |rate: f64, of: &dyn Fn(&&Work) -> bool| {
            let needs = plan.work.iter().filter(of).map(|work| self.needs(work));
            let all = needs.reduce(|a, b| [a[0] + b[0], a[1] + b[1]]);
            all.map_or(0.0, |[bytes, operations]| ((weights + bytes) / self.read).max(operations / rate))
        };
        let [rested, kept_up] = self.products;
        let apart = least(rested, &|work| is_of_prompt(work)) + least(rested, &|work| !is_of_prompt(work));
        [least(rested, &|_| true), least(kept_up, &|_| true), apart]
    }
}

/// The sequences of a batch, and what is recorded about its steps.
struct Observed<'a> {
    bound: Bound<'a>,
    parts: [Part; 2],
    /// For each step that was planned and has not ended, the part that it belongs to.
    planned: VecDeque<usize>,
    /// For each sequence, tokens of the prompt and tokens in all.
    sequences: HashMap<SequenceId, (usize, usize)>,
}

impl Sequences for Observed<'_> {
    fn start<'a>(&'a self, id: SequenceId, tokens: &'a [u32]) -> Start<'a> {
        let (prompt, max_length) = self.sequences[&id];
        start(tokens, prompt, max_length)
    }

    fn planned(&mut self, plan: &Plan) {
        let rows = |of: &dyn Fn(&&Work) -> bool| plan.work.iter().filter(of).map(|work| work.rows as usize).sum();
        let rows: [usize; 2] = [rows(&|work| !is_of_prompt(work)), rows(&|work| is_of_prompt(work))];
        let number = usize::from(rows[1] > 0);
        let (part, bounds) = (&mut self.parts[number], self.bound.of(plan));
        part.steps += 1;
        part.rows = [part.rows[0] + rows[0], part.rows[1] + rows[1]];
        part.bounds = std::array::from_fn(|i| part.bounds[i] + bounds[i]);
        self.planned.push_back(number);
    }
}

impl Bencher {
    fn note(&mut self, name: &str, value: f64) {
        self.figures.push((name.into(), value));
    }

    fn tokens(&self, seed: u64, count: usize) -> Vec<u32> {
        let vocab = self.config.vocab_size as u64;
        (0..count).map(|i| (random(seed, i as u64) % vocab) as u32).collect()
    }

    /// Seconds of a step that chooses nothing.
    fn time_of(&mut self, plan: &Plan) -> Result<f64> {
        let begun = Instant::now();
        self.backend.step(plan, &[])?;
        Ok(begun.elapsed().as_secs_f64())
    }

    fn swap(&mut self) -> Result<()> {
        let limits = self.backend.limits();
        let pages = limits.host_pages.min(limits.pages).min(400);
        // Neither side goes in order: multiples of a prime (211, 89) scatter the pages.
        let swap_in = (0..pages).map(|i| SwapIn { from: i * 211 % pages, to: i * 89 % pages }).collect();
        let plan = Plan { swap_in, ..Plan::default() };
        self.time_of(&plan)?;
        let times = (0..self.scale.steps.min(7)).map(|_| self.time_of(&plan)).collect::<Result<Vec<_>>>()?;
        let rate = f64::from(pages) * PAGE_TOKENS as f64 * kv_bytes(&self.config) / median(times);
        println!("swap: {pages} pages in at {:.1} GiB/s, {:.3} of the copy engine", gib(rate), rate / self.to_device);
        self.note("batch.swap_in.gib_s", gib(rate));
        self.note("batch.swap_in.ratio_copy", rate / self.to_device);
        Ok(())
    }

    fn decode(&mut self) -> Result<()> {
        let pattern: Vec<bf16> =
            (0..1 << 20).map(|i| bf16::from_f32((random(5, i) >> 40) as f32 / 2f32.powi(23) - 1.0)).collect();
        self.backend.fill_cache(&pattern)?;
        let (context, steps) = (self.scale.decode_context, self.scale.steps);
        for count in self.scale.decode.clone() {
            let each = (context + steps + 3).div_ceil(PAGE_TOKENS) as u32;
            let limits = self.backend.limits();
            if count * each > limits.pages || count > limits.sequences {
                println!("decode: no room for {count} sequences");
                continue;
            }
            let history = self.tokens(9, context);
            let table = |slot: Slot| (0..each).map(move |index| TableEntry { slot, index, page: slot * each + index });
            let work = |i: usize| {
                move |slot: Slot| Work { slot, start: (context - 1 + i) as u32, rows: 1, samples: true, most_drafts: 0 }
            };
            let (mut times, mut idle) = (Vec::new(), Vec::new());
            let (mut begun, mut before) = (Instant::now(), self.backend.idle());
            for i in 0..steps + 3 {
                let mut plan = Plan { work: (0..count).map(work(i)).collect(), ..Plan::default() };
                let mut starts = Vec::new();
                if i == 0 {
                    plan.started = (0..count).map(|slot| Started { slot, sequence: slot.into() }).collect();
                    plan.tables = (0..count).flat_map(table).collect();
                    starts = vec![start(&history, 1, context + steps + 4); count as usize];
                }
                // Each step begins while the one before is under way, as in a batch.
                self.backend.begin(&plan, &starts)?;
                if i > 0 {
                    self.backend.end()?;
                    times.push(std::mem::replace(&mut begun, Instant::now()).elapsed().as_secs_f64());
                    let so_far = self.backend.idle();
                    idle.push((so_far - std::mem::replace(&mut before, so_far)).as_secs_f64());
                }
            }
            self.backend.end()?;
            let late = |mut times: Vec<f64>| median(times.split_off(3.min(times.len() - 1)));
            let (time, idle) = (late(times), late(idle));
            let bytes =
                self.config.step_weight_bytes(2) as f64 + f64::from(count) * context as f64 * kv_bytes(&self.config);
            let share = bytes / self.read / time;
            println!(
                "decode: {count} sequences of {context}: {:.2} ms a step, {:.0} tok/s, {share:.3} of the bound; {:.0} µs between steps",
                time * 1e3,
                f64::from(count) / time,
                idle * 1e6
            );
            self.note(&format!("batch.b{count}.bound_share"), share);
            self.note(&format!("batch.b{count}.tok_s"), f64::from(count) / time);
        }
        Ok(())
    }

    /// Answers requests, each of a prompt and a number of tokens.
    fn run(&mut self, requests: Vec<(Vec<u32>, usize)>) -> Result<Ran> {
        let mut ran = Ran { prompts: requests.iter().map(|request| request.0.len()).sum(), ..Ran::default() };
        let bound = Bound { config: &self.config, read: self.read, products: self.products };
        let mut running =
            Observed { bound, parts: [Part::default(); 2], planned: VecDeque::new(), sequences: HashMap::new() };
        let mut steps = Steps::new(&self.backend);
        // Queued as in the command: all requests are there before the first is answered.
        let (send, coming) = channel();
        requests.into_iter().try_for_each(|request| send.send(request))?;
        drop(send);
        let mut line = Queue::new(coming, |(_, most)| *most);
        let begun = Instant::now();
        let (mut last, mut more) = (begun, true);
        loop {
            while more && steps.scheduler().has_room() {
                match line.next(Duration::ZERO) {
                    Ok((prompt, most)) => {
                        let length = prompt.len();
                        running.sequences.insert(steps.add(prompt, length + most), (length, length + most));
                    }
                    Err(_) => more = false,
                }
            }
            steps.expect_more(more);
            if steps.is_idle() {
                break;
            }
            let outcomes = steps.step(&mut self.backend, &mut running)?;
            let part = running.planned.pop_front().ok_or("a step that was not planned")?;
            running.parts[part].seconds += std::mem::replace(&mut last, Instant::now()).elapsed().as_secs_f64();
            for (id, outcome) in outcomes {
                ran.answers += outcome.tokens.len();
                if steps.scheduler().tokens(id).map(<[u32]>::len) >= Some(running.sequences[&id].1) {
                    steps.finish(id);
                }
            }
        }
        ran.seconds = begun.elapsed().as_secs_f64();
        ran.counts = steps.scheduler().counts();
        ran.parts = running.parts;
        Ok(ran)
    }

    fn mixed(&mut self) -> Result<()> {
        let (least, most) = self.scale.answers;
        let uniform = |seed: u64, i: usize| (random(seed, i as u64) >> 11) as f64 / 2f64.powi(53);
        let request = |i: usize| {
            // Box–Muller: a normal distribution with a standard deviation of 0.6.
            let normal = (-2.0 * (1.0 - uniform(21, i)).ln()).sqrt() * (std::f64::consts::TAU * uniform(22, i)).cos();
            let length = (self.scale.prompt * (0.6 * normal).exp()).round();
            let answer = least + (uniform(23, i) * (most - least + 1) as f64) as usize;
            (self.tokens(1000 + i as u64, (length as usize).clamp(1, self.scale.longest_prompt)), answer)
        };
        let requests = (0..self.scale.requests).map(request).collect();
        let Ran { seconds, prompts, answers, counts, parts } = self.run(requests)?;
        let shares = [0, 1, 2].map(|i| (parts[0].bounds[i] + parts[1].bounds[i]) / seconds);
        println!(
            "mixed: {prompts} + {answers} tokens in {seconds:.1} s and {} steps: {:.0} tok/s out, {:.0} in; {:.3} of the bound, {:.3} with products as kept up, {:.3} of the passes' bounds; {counts:?}",
            counts.steps,
            answers as f64 / seconds,
            prompts as f64 / seconds,
            shares[0],
            shares[1],
            shares[2]
        );
        for (part, name) in parts.iter().zip(["without prompts", "with prompts"]) {
            let mean = |sum: usize| sum as f64 / part.steps.max(1) as f64;
            println!(
                "  {} steps {name}: {:.1} s, {:.2} ms each, {:.0} rows of answers and {:.0} of prompts; {:.3}, {:.3} and {:.3} of their bounds",
                part.steps,
                part.seconds,
                part.seconds * 1e3 / part.steps.max(1) as f64,
                mean(part.rows[0]),
                mean(part.rows[1]),
                part.bounds[0] / part.seconds,
                part.bounds[1] / part.seconds,
                part.bounds[2] / part.seconds
            );
        }
        self.note("batch.mixed.tok_s", answers as f64 / seconds);
        self.note("batch.mixed.bound_share", shares[0]);
        self.note("batch.mixed.bound_share_kept_up", shares[1]);
        self.note("batch.mixed.bound_share_passes", shares[2]);
        Ok(())
    }

    fn prefix(&mut self) -> Result<()> {
        let prefix = self.tokens(31, self.scale.prefix);
        let (shared, apart) = self.scale.sharing;
        let own = |i: usize| self.tokens(2000 + i as u64, 32);
        let answer = self.scale.answers.0;
        let with = (0..shared).map(|i| ([prefix.as_slice(), &own(i)].concat(), answer)).collect();
        // Each begins with a token of its own, so that no prefix is shared.
        let other = |i: usize| [&[i as u32], &prefix[1..], &own(i)].concat();
        let without = (0..apart).map(|i| (other(i), answer)).collect();
        let with = self.run(with)?;
        let without = self.run(without)?;
        let speedup = without.seconds / apart as f64 / (with.seconds / shared as f64);
        println!(
            "prefix: {shared} requests that share {} tokens in {:.2} s, {apart} that do not in {:.2} s: {speedup:.2} × the rate; {} tokens shared",
            prefix.len(),
            with.seconds,
            without.seconds,
            with.counts.shared_tokens
        );
        self.note("batch.prefix.speedup", speedup);
        Ok(())
    }
}
