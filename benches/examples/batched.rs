//! Where the time of a step of many sequences goes: `batched [--weights HOW] [SIZE[/LAYERS]
//! [SEQUENCES[xROWS][@FROM-TO][:plain|:TOKENS] …]]`, such as `batched 8B 64 4x4
//! 256@32-1200`. Each sequence has 1,040 tokens; with `@FROM-TO`, the sequences have FROM to TO tokens, in random
//! order. Each sequence has one row, or ROWS. Full pages are packed, with `:plain` none, with `:TOKENS` those of
//! sequences of at least so many tokens. Up to 16 rows the decode kernel is timed too.
//!
//! Weights, keys and values are random. A step's logits are compared with those of the unfused path bit for bit, and
//! its best tokens with the logits. Then a step that finds best tokens is timed, with its phases. A phase lasts from
//! when the last block finishes the phase before until the last block finishes this one. For each phase the mean over
//! layers is printed, with the time that its bytes take at the card's read bandwidth, and with how long before the last
//! block the blocks finish on average. With fewer layers, such as `8B/12`, the bandwidth is not measured: that is for
//! comparing builds of the kernels in seconds (docs/guide/profile.md).

use benches::cases::ceilings;
use benches::{Arguments, Bench, shape};
use gpu_kernels::batch::{self, Put};
use gpu_kernels::batched::PhaseKind;
use gpu_kernels::kv::PAGE_TOKENS;
use gpu_kernels::sample::rank;
use gpu_kernels::step::MAX_DECODE_ROWS;
use half::bf16;
use host::device::Device;
use host::forward::{Capacity, Forward, Row, RowOutput};
use model::Config;

const CONTEXT: usize = 1040;

/// How many sequences, and how long they are.
struct Case {
    name: String,
    contexts: Vec<usize>,
    /// Rows of each sequence.
    rows: usize,
    /// From how many tokens on a sequence's full pages are packed.
    packed_from: usize,
}

impl Case {
    fn new(name: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let parsed = || {
            let (sequences, packed_from) = match name.split_once(':') {
                None => (name, 0),
                Some((sequences, "plain")) => (sequences, usize::MAX),
                Some((sequences, tokens)) => (sequences, tokens.parse().ok()?),
            };
            let (counts, [from, to]) = match sequences.split_once('@') {
                None => (sequences, [CONTEXT, CONTEXT]),
                Some((counts, range)) => {
                    let (from, to) = range.split_once('-')?;
                    (counts, [from.parse().ok()?, to.parse().ok()?])
                }
            };
            let (count, rows) = counts.split_once('x').unwrap_or((counts, "1"));
            let (count, rows): (usize, usize) = (count.parse().ok()?, rows.parse().ok()?);
            (count > 0 && rows > 0 && rows <= from && from <= to).then_some((count, rows, from, to, packed_from))
        };
        let (count, rows, from, to, packed_from) = parsed().ok_or_else(|| {
            format!(
                "{name} is no number of sequences; give one, such as 64, 4x4 of four rows each, or 64@32-1200 with \
                 tokens from and to"
            )
        })?;
        let mut contexts: Vec<usize> = (0..count).map(|i| from + (to - from) * i / count).collect();
        shuffle(&mut contexts, 3);
        Ok(Self { name: name.into(), contexts, rows, packed_from })
    }

    /// Rows of the newest tokens of each sequence, drawn at random.
    fn rows(&self, config: &Config) -> Vec<Row> {
        let places = (0..).zip(&self.contexts).flat_map(|(sequence, &tokens)| {
            (tokens - self.rows..tokens).map(move |position| (sequence, position as u32))
        });
        let row = |((sequence, position), random): ((u32, u32), u64)| Row {
            token: random as u32 % config.vocab_size as u32,
            position,
            sequence,
        };
        places.zip(random(self.contexts.len() * self.rows, 2)).map(row).collect()
    }
}

fn random(len: usize, mut seed: u64) -> Vec<u64> {
    let mut next = || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        seed >> 33
    };
    (0..len).map(|_| next()).collect()
}

fn shuffle<T>(items: &mut [T], seed: u64) {
    for (i, r) in random(items.len(), seed).into_iter().enumerate() {
        items.swap(i, r as usize % items.len());
    }
}

/// Packs the full pages that no row writes to, of the sequences that are long enough. Each sequence has an equal part
/// of `tables`.
fn pack(device: &Device, forward: &Forward, case: &Case, tables: &[u32]) -> Result<(), host::Error> {
    let &Case { ref contexts, rows, packed_from, .. } = case;
    let of_sequences = contexts.iter().zip(tables.chunks(tables.len() / contexts.len()));
    let of_sequences = of_sequences.filter(|(tokens, _)| **tokens >= packed_from);
    let full = |(tokens, pages): (&usize, &[u32])| pages[..(tokens - rows) / PAGE_TOKENS as usize].to_vec();
    let full: Vec<u32> = of_sequences.flat_map(full).collect();
    // A grid must have at least one block.
    if full.is_empty() {
        return Ok(());
    }
    let list = device.upload(&full)?;
    // SAFETY: the list names pages, each once, and none is packed yet.
    unsafe { forward.enqueue_pack(list.ptr(), full.len())? };
    let packed = device.upload(&full.iter().flat_map(|&page| [page, 1]).collect::<Vec<_>>())?;
    let to = forward.packed_pages().unwrap_or_default();
    let put = Put { entries: packed.ptr(), to, count: full.len() as u32 };
    // SAFETY: the list names pages, each once.
    unsafe { device.launch::<batch::put_words>(batch::blocks(full.len()), 0, put) }
}

fn step(
    arguments: &Arguments,
    device: &Device,
    size: &str,
    layers: Option<usize>,
    case: &Case,
    bandwidth: Option<f64>,
) -> Result<(), Box<dyn std::error::Error>> {
    let (_, mut config) = shape(size)?;
    config.num_hidden_layers = layers.unwrap_or(config.num_hidden_layers);
    let sequences = case.contexts.len();
    let context = case.contexts.iter().max().copied().unwrap_or(CONTEXT);
    let stride = context.div_ceil(PAGE_TOKENS as usize);
    let rows = sequences * case.rows;
    let room = Capacity::batch(context, sequences, sequences * stride, rows);
    let mut forward = Forward::with_room(device, &config, arguments.weights(&config, device)?, room)?;
    let pattern: Vec<bf16> =
        random(1 << 20, 5).iter().map(|&r| bf16::from_f32(r as f32 / (1u64 << 30) as f32 - 1.0)).collect();
    forward.fill_cache(&pattern)?;
    let mut tables: Vec<u32> = (0..room.pages as u32).collect();
    shuffle(&mut tables, 1);
    forward.set_page_tables(&tables)?;
    let listed = forward.list_rows(&case.rows(&config))?;
    let logits = |forward: &Forward| -> Result<Vec<f32>, host::Error> {
        forward.enqueue_listed(&listed, RowOutput::LogitsFrom(0))?;
        let mut out = vec![0.0; rows * config.vocab_size];
        forward.logits().read(0, &mut out)?;
        Ok(out)
    };
    let unfused = logits(&forward)?;
    if !(forward.prepare_decode()? && forward.prepare_batched()?) {
        return Err("this card cannot stream".into());
    }
    let timer = device.timer()?;
    if rows <= MAX_DECODE_ROWS as usize {
        let mut time = f64::MAX;
        for _ in 0..4 {
            let steps = || (0..8).try_for_each(|_| forward.enqueue_sequences(&listed, RowOutput::Best).map(drop));
            time = time.min(timer.time(steps)? / 8.0);
        }
        forward.enqueue_sequences(&listed, RowOutput::LogitsFrom(0))?;
        let mut few = vec![0.0; rows * config.vocab_size];
        forward.logits().read(0, &mut few)?;
        let differ = few.iter().zip(&unfused).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        println!("{size}, {} sequences by the decode kernel: {time:.3} ms; {differ} logits differ", case.name);
    }
    pack(device, &forward, case, &tables)?;
    forward.use_gemm_from(1);
    let by_gemm = logits(&forward)?;
    forward.use_gemm_from(u32::MAX);
    let batched = logits(&forward)?;
    if by_gemm.iter().zip(&batched).any(|(a, b)| a.to_bits() != b.to_bits()) {
        return Err("with products as launches there are other logits".into());
    }
    let differ = batched.iter().zip(&unfused).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let strange = batched.iter().filter(|v| !v.is_finite()).count();
    // The timed step finds the best tokens, as a greedy batch does.
    let greedy = |forward: &Forward| forward.enqueue_listed(&listed, RowOutput::Best).map(drop);
    greedy(&forward)?;
    let wrong = (forward.best_tokens(rows)?.into_iter())
        .zip(batched.chunks(config.vocab_size))
        .filter(|(best, row)| row.iter().zip(0..).map(|(&logit, token)| rank(logit, token)).max() != Some(*best))
        .count();
    let mut times = [f64::MAX; 2];
    for _ in 0..4 {
        for (time, from) in times.iter_mut().zip([u32::MAX, 1]) {
            forward.use_gemm_from(from);
            *time = time.min(timer.time(|| (0..8).try_for_each(|_| greedy(&forward)))? / 8.0);
        }
    }
    forward.use_gemm_from(u32::MAX);
    let [best, by_gemm] = times;
    let kv = (case.contexts.iter().sum::<usize>() * config.kv_bytes_per_token(2)) as f64;
    let bytes = config.step_weight_bytes(2) as f64 + kv;
    let share = bandwidth.map_or(String::new(), |b| format!(", {:.3} of the bound", bytes / b * 1e3 / best));
    println!(
        "{size}, {} sequences: {best:.3} ms{share}, {by_gemm:.3} ms with products as launches; {differ} of {} logits differ, {strange} strange, {wrong} best tokens wrong",
        case.name,
        batched.len()
    );
    forward.begin_batched_trace()?;
    greedy(&forward)?;
    greedy(&forward)?;
    print_phases(&forward.take_batched_trace()?, &config, kv, bandwidth);
    Ok(())
}

/// Prints how long the phases of a traced step took. `kv` is the bytes of keys and values in all layers.
fn print_phases(trace: &[(PhaseKind, Vec<u64>)], config: &Config, kv: f64, bandwidth: Option<f64>) {
    let (hidden, inner) = (config.plan.hidden, config.plan.activation_size());
    let heads = config.plan.attention.qkv_size();
    let mut phases: Vec<(String, f64, f64, f64, usize)> = Vec::new();
    let mut before: Option<u64> = None;
    for (i, (kind, times)) in trace.iter().enumerate() {
        let last = times.iter().max().copied().unwrap_or(0);
        let (name, elements) = match kind {
            PhaseKind::Embed => ("embed", 0),
            PhaseKind::Best => ("head", config.vocab_size * hidden),
            PhaseKind::Write => ("QKV", heads * hidden),
            PhaseKind::Attend => ("attend", 0),
            PhaseKind::Add if trace[i - 1].0 == PhaseKind::SwiGlu => ("down", inner * hidden),
            PhaseKind::Add => ("output", hidden * config.plan.attention.query_size()),
            PhaseKind::SwiGlu => ("gate, up", 2 * inner * hidden),
        };
        let bytes =
            if *kind == PhaseKind::Attend { kv / config.num_hidden_layers as f64 } else { 2.0 * elements as f64 };
        if let Some(before) = before {
            let sum: u64 = times.iter().map(|time| last - time).sum();
            let early = sum as f64 / times.len() as f64 / 1e3;
            let time = (last - before) as f64 / 1e3;
            match phases.iter_mut().find(|phase| phase.0 == name) {
                Some(phase) => {
                    (phase.1, phase.3, phase.4) = (phase.1 + time, phase.3 + early, phase.4 + 1);
                }
                None => phases.push((name.into(), time, bytes, early, 1)),
            }
        }
        before = Some(last);
    }
    for (name, sum, bytes, early, count) in phases {
        let each = count as f64;
        let least = bandwidth.map_or(String::new(), |b| format!(" bytes alone {:7.2},", bytes / b * 1e6));
        println!("{name:>9} {:8.2} µs,{least} blocks done {:5.2} before", sum / each, early / each);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::read()?;
    let size = arguments.word(0).unwrap_or("8B");
    // The path of a file may have slashes too.
    let (size, layers) = match size.rsplit_once('/').map(|(size, layers)| (size, layers.parse())) {
        Some((size, Ok(layers))) => (size, Some(layers)),
        _ => (size, None),
    };
    let device = arguments.device()?;
    let mut bandwidth = None;
    if layers.is_none() {
        let mut watch = |_: benches::Event<'_>| {};
        let mut bench = Bench::new(&device, 20, &mut watch)?;
        ceilings::run(&mut bench, ceilings::CeilingSizes::PUBLISHED)?;
        let read = bench.limits().read;
        println!("reads {:.0} GB/s", read / 1e9);
        bandwidth = Some(read);
    }
    let counts =
        if arguments.words.len() > 1 { arguments.words[1..].to_vec() } else { vec!["64".into(), "256".into()] };
    for sequences in counts {
        step(&arguments, &device, size, layers, &Case::new(&sequences)?, bandwidth)?;
    }
    Ok(())
}
