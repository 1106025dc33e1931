//! The kernels for prompts, GEMMs and attention, on card 0.
//!
//! `cargo run --release --package benches --example gemm -- check` compares them with plain references, with poisoned
//! outputs, and compares all ways of cutting the work bit for bit. `check-small` leaves out the large cases, for
//! compute-sanitizer. `check-emulated` runs the smallest, on the emulator. `… -- serve` reads jobs from standard input,
//! one a line, times each and answers with microseconds:
//!
//! ```text
//! gemm qkv|write|swiglu|add|plain auto|n128|n192|n256|2x1|4x2 M N K REPEATS
//! attention TOKENS Q_HEADS KV_HEADS REPEATS
//! prefill TOKENS REPEATS [ROWS]                   a prompt of Qwen3-8B's shape, random weights, to its logits, in
//!                                                 passes of so many rows at most
//! prefill_fp8 TOKENS REPEATS [ROWS]               the same, with layers in FP8
//! ```
//!
//! `benches/scripts/prefill_bench.py` sends the jobs, and times cuBLAS, PyTorch's attention and transformers in turns
//! with them.

mod check;

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};

use benches::Arguments;
use benches::gemm::PLAIN;
use check::Extent;
use cuda_std::tensor::Matrix;
use gpu_kernels::gemm::{Gemm, SPAN, TILE_ROWS};
use gpu_kernels::kv::{self, Cache, HEAD_DIM, PAGE_TOKENS};
use gpu_kernels::linear::{N_TILE, slot};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::prefill_attention::{self, PrefillAttention};
use gpu_kernels::qkv::SplitHeads;
use gpu_kernels::step::{self, PlanPrompt, Rows, STATE_WORDS, SequenceState};
use gpu_kernels::stream::StreamMatrix;
use half::bf16;
use host::device::{Buffer, Device, TensorMaps};
use host::forward::{Forward, RowOutput};
use host::gemm::{self, Cut, Epilogue};
use host::prefill::{self, Prefill};
use host::stream::{Source, Stream};
use host::weights::DeviceWeights;
use model::Config;
use model::format::Code;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const D: usize = HEAD_DIM as usize;
/// Bytes of a timed GEMM's weights, all sets together: more than a cache holds.
const ROTATED_BYTES: usize = 256 << 20;

/// Uniform in -1..1, the same for the same seed: a long random piece, repeated.
fn random(len: usize, seed: u64) -> Vec<bf16> {
    const PIECE: usize = 4_194_301;
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let piece: Vec<bf16> = (0..len.min(PIECE))
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
        })
        .collect();
    piece.iter().copied().cycle().take(len).collect()
}

/// The values of rows, in the order in which GEMMs read them.
fn in_slots(values: &[bf16]) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; values.len()];
    for (i, v) in values.iter().enumerate() {
        out[slot(i as u32) as usize] = *v;
    }
    out
}

fn scaled(values: Vec<bf16>, by: f32) -> Vec<bf16> {
    values.into_iter().map(|v| bf16::from_f32(v.to_f32() * by)).collect()
}

/// The buffers of a GEMM.
struct GemmCase {
    epilogue: Epilogue,
    m: usize,
    n: usize,
    k: usize,
    x: Buffer<bf16>,
    /// Several copies of the same weights.
    weights: Stream,
    /// Sums of squares of the rows that are multiplied, as the GEMM `add` leaves them.
    before: Buffer<f32>,
    norm: Buffer<bf16>,
    y: Buffer<f32>,
    out: Buffer<bf16>,
    squares: Buffer<f32>,
    spans: Buffer<f32>,
    maps: TensorMaps,
    heads: Heads,
    beside: gemm::Beside,
}

/// What heads are made with, and where they are written.
struct Heads {
    q_heads: usize,
    kv_heads: usize,
    /// Of the rows: their count, and the token, position and sequence of each.
    rows: [Buffer<u32>; 4],
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    q: Buffer<bf16>,
    pages: Buffer<bf16>,
    table: Buffer<u32>,
}

impl Heads {
    /// For `m` rows of `heads` heads, of which two in six are for keys and values. Without heads there are no pages.
    fn new(device: &Device, m: usize, heads: usize) -> Result<Self> {
        let kv_heads = (heads / 6).max(1);
        let q_heads = heads.saturating_sub(2 * kv_heads);
        let pages = if heads == 0 { 0 } else { m.div_ceil(PAGE_TOKENS as usize) };
        let positions: Vec<u32> = (0..m as u32).collect();
        let rope = model::rope::RopeTable::new(D, 1e6, m);
        Ok(Self {
            q_heads,
            kv_heads,
            rows: [device.upload(&[m as u32])?, device.zeroed(m)?, device.upload(&positions)?, device.zeroed(m)?],
            cos: device.upload(&rope.cos)?,
            sin: device.upload(&rope.sin)?,
            q: device.zeroed(m * q_heads * D)?,
            pages: device.zeroed(pages * kv::page_elements(kv_heads as u32))?,
            table: device.upload(&(0..pages as u32).rev().collect::<Vec<_>>())?,
        })
    }

    fn params(&self, norm: &Buffer<bf16>) -> SplitHeads {
        let [count, tokens, positions, sequences] = &self.rows;
        SplitHeads {
            rows: Rows {
                count: count.ptr_mut(),
                tokens: tokens.ptr_mut(),
                positions: positions.ptr_mut(),
                sequences: sequences.ptr_mut(),
                paths: Default::default(),
            },
            qkv: Default::default(),
            q_norm: norm.ptr(),
            k_norm: norm.ptr(),
            cos: self.cos.ptr(),
            sin: self.sin.ptr(),
            q: self.q.ptr_mut(),
            cache: Cache {
                pages: self.pages.ptr_mut(),
                tables: self.table.ptr(),
                table_stride: self.table.len() as u32,
                kv_heads: self.kv_heads as u32,
            },
            q_heads: self.q_heads as u32,
            eps: 1e-6,
            head_norm: 1,
        }
    }
}

/// What a GEMM wrote, with each row in one piece.
struct Left {
    y: Vec<f32>,
    out: Vec<bf16>,
    squares: Vec<f32>,
    spans: Vec<f32>,
    q: Vec<bf16>,
    pages: Vec<bf16>,
}

impl Left {
    fn bits(&self) -> impl Iterator<Item = u32> {
        let floats = self.y.iter().chain(&self.squares).chain(&self.spans).map(|v| v.to_bits());
        floats.chain(self.out.iter().chain(&self.q).chain(&self.pages).map(|v| u32::from(v.to_bits())))
    }
}

impl GemmCase {
    fn new(device: &Device, epilogue: Epilogue, m: usize, n: usize, k: usize, sets: usize) -> Result<Self> {
        let rows = m.next_multiple_of(TILE_ROWS as usize);
        let x = device.upload(&in_slots(&random(m * k, 1)))?;
        // Gate and up are `n` features together.
        let gated = epilogue == Epilogue::SwiGlu;
        let columns = if gated { n / 2 } else { n };
        let w = device.upload(&scaled(random(n * k, 2), 0.1))?;
        let source = Source::new(&w, columns, gated.then_some(columns * k));
        let weights = Stream::new(device, (0..sets).map(|_| (source.n_tiles(), k as u32)))?;
        for set in 0..sets {
            // SAFETY: the matrix is as it says.
            unsafe { weights.lay_out(device, set, source)? };
        }
        let writes = |yes: bool, len: usize| if yes { len } else { 0 };
        let y = device.zeroed(writes(matches!(epilogue, Epilogue::Add | Epilogue::Write), rows * n))?;
        let out = device.zeroed(writes(!matches!(epilogue, Epilogue::Qkv | Epilogue::Write), rows * columns))?;
        let heads = Heads::new(device, m, if epilogue == Epilogue::Qkv { n / D } else { 0 })?;
        let squares = device.zeroed(writes(epilogue == Epilogue::Add, rows * n / N_TILE as usize))?;
        let spans = device.zeroed(writes(epilogue == Epilogue::Add, rows * n / SPAN as usize))?;
        let mut tensors = vec![gemm::rows(x.ptr(), m, k)];
        if !out.is_empty() {
            tensors.push(gemm::out(out.ptr(), rows, columns));
        }
        let maps = device.tensor_maps(&tensors)?;
        let per_row = k.div_ceil(SPAN as usize);
        let before = device.upload(&(0..m * per_row).map(|i| Self::square(i / per_row)).collect::<Vec<_>>())?;
        let norm = device.upload(&random(n, 3))?;
        let beside = gemm::Beside::new(device)?;
        Ok(Self { epilogue, m, n, k, x, weights, before, norm, y, out, squares, spans, maps, heads, beside })
    }

    /// The sum of squares over a span of row `row`.
    fn square(row: usize) -> f32 {
        SPAN as f32 * (0.5 + (row % 7) as f32 / 8.0)
    }

    /// The factor of the row's sums.
    fn scale(&self, row: usize) -> f64 {
        1.0 / (f64::from(Self::square(row)) / f64::from(SPAN) + 1e-6).sqrt()
    }

    fn params(&self, set: usize) -> Gemm {
        let StreamMatrix { stream, base, blocks, n_tiles, .. } = self.weights.matrices()[set];
        Gemm {
            x: self.maps.ptr(0),
            stream,
            base,
            blocks,
            n_tiles,
            out: if self.out.is_empty() { Default::default() } else { self.maps.ptr(1) },
            y: self.y.ptr_mut(),
            norm: Norm { squares: self.before.ptr(), dim: (self.k as u32).next_multiple_of(SPAN), eps: 1e-6 },
            bias: Default::default(),
            heads: self.heads.params(&self.norm),
            residual: Residual {
                x: self.y.ptr_mut(),
                scaled: self.out.ptr_mut(),
                squares: self.squares.ptr_mut(),
                spans: self.spans.ptr_mut(),
                dim: self.n as u32,
            },
            next_norm: self.norm.ptr(),
            codes: Default::default(),
            first_row: 0,
            m: self.m as u32,
            first_feature: 0,
            n: if self.epilogue == Epilogue::SwiGlu { self.n / 2 } else { self.n } as u32,
            k: self.k as u32,
            band: 0,
            beside: Default::default(),
        }
    }

    fn enqueue(&self, device: &Device, cut: Option<Cut>, set: usize) -> std::result::Result<(), host::Error> {
        // SAFETY: buffers and maps of self, as large as the parameter block says, alive until the device is
        // synchronised.
        unsafe {
            match cut {
                Some(cut) => gemm::enqueue_cut(device, &self.beside, self.epilogue, cut, self.params(set)),
                None => gemm::enqueue(device, &self.beside, self.epilogue, self.params(set)),
            }
        }
    }

    /// Runs the GEMM on poisoned outputs.
    fn run(&mut self, device: &Device, cut: Cut) -> Result<Left> {
        self.y.write(0, &(0..self.y.len()).map(Self::before).collect::<Vec<_>>())?;
        for poisoned in [&mut self.heads.q, &mut self.heads.pages] {
            poisoned.write(0, &vec![bf16::NAN; poisoned.len()])?;
        }
        self.out.write(0, &vec![bf16::NAN; self.out.len()])?;
        for poisoned in [&mut self.squares, &mut self.spans] {
            poisoned.write(0, &vec![f32::NAN; poisoned.len()])?;
        }
        self.enqueue(device, Some(cut), 0)?;
        let rows = self.m.next_multiple_of(TILE_ROWS as usize);
        let mut left = Left {
            y: vec![0.0; self.y.len() / rows * self.m],
            out: vec![bf16::ZERO; self.out.len() / rows * self.m],
            squares: vec![0.0; self.squares.len() / rows * self.m],
            spans: vec![0.0; self.spans.len() / rows * self.m],
            q: vec![bf16::ZERO; self.heads.q.len()],
            pages: vec![bf16::ZERO; self.heads.pages.len()],
        };
        self.heads.q.read(0, &mut left.q)?;
        self.heads.pages.read(0, &mut left.pages)?;
        self.y.read(0, &mut left.y)?;
        self.out.read(0, &mut left.out)?;
        self.squares.read(0, &mut left.squares)?;
        self.spans.read(0, &mut left.spans)?;
        Ok(left)
    }

    /// Runs `add` on one row alone, as if it were the first.
    fn run_row(&mut self, device: &Device, row: usize, before: &[f32]) -> Result<Vec<f32>> {
        self.y.write(0, before)?;
        // SAFETY: the row is one of the buffer's.
        let x = unsafe { self.x.ptr().at(row * self.k) };
        let maps = device.tensor_maps(&[gemm::rows(x, 1, self.k)])?;
        let params = Gemm { x: maps.ptr(0), m: 1, ..self.params(0) };
        // SAFETY: buffers and maps of self or above, as large as the parameter block says; the read waits.
        unsafe { gemm::enqueue(device, &self.beside, Epilogue::Add, params)? };
        let mut y = vec![0.0; self.n];
        self.y.read(0, &mut y)?;
        Ok(y)
    }

    fn before(i: usize) -> f32 {
        (i % 1009) as f32 / 1009.0 - 0.5
    }
}

/// The whole buffer, as rows of `columns` elements.
fn matrix(buffer: &Buffer<bf16>, columns: usize, tile_rows: u32) -> Matrix {
    let rows = (buffer.len() / columns) as u64;
    Matrix::dense(buffer.ptr().addr(), rows, columns as u64, tile_rows)
}

/// Rows of one sequence, and its cache.
struct Attention {
    q_heads: usize,
    kv_heads: usize,
    q: Buffer<bf16>,
    pages: Buffer<bf16>,
    table: Buffer<u32>,
    out: Buffer<bf16>,
    tiles: Buffer<u32>,
    maps: TensorMaps,
}

impl Attention {
    /// `tokens` rows from position 0 on.
    fn new(device: &Device, tokens: usize, q_heads: usize, kv_heads: usize) -> Result<Self> {
        let count = tokens.div_ceil(PAGE_TOKENS as usize);
        let q = device.upload(&scaled(random(tokens * q_heads * D, 4), 3.0))?;
        let pages = device.upload(&random(count * kv::page_elements(kv_heads as u32), 5))?;
        // Pages are in reverse order.
        let table = device.upload(&(0..count as u32).rev().collect::<Vec<_>>())?;
        let out = device.zeroed(tokens * q_heads * D)?;
        let page_map = prefill_attention::pages(pages.ptr().addr(), pages.len());
        let maps = device.tensor_maps(&[matrix(&q, q_heads * D, 64), page_map])?;
        let tiles = device.upload(&prefill_attention::tiles(0, tokens as u32, 0, 0, 128).concat())?;
        Ok(Self { q_heads, kv_heads, q, pages, table, out, tiles, maps })
    }

    fn enqueue(
        &self,
        device: &Device,
        tiles: &Buffer<u32>,
        pairs: Option<bool>,
    ) -> std::result::Result<(), host::Error> {
        let params = PrefillAttention {
            tiles: tiles.ptr(),
            q: self.maps.ptr(0),
            pages: self.maps.ptr(1),
            cache: Cache {
                pages: self.pages.ptr_mut(),
                tables: self.table.ptr(),
                table_stride: self.table.len() as u32,
                kv_heads: self.kv_heads as u32,
            },
            out: self.out.ptr_mut(),
            codes: Default::default(),
            q_heads: self.q_heads as u32,
            scale: 1.0 / (D as f32).sqrt(),
        };
        // SAFETY: buffers and maps of self, as large as the parameter block says, alive until the device is
        // synchronised.
        unsafe { prefill::enqueue_attention(device, params, tiles.len() as u32 / 4, pairs) }
    }

    /// Runs attention into a poisoned output.
    fn run(&mut self, device: &Device, tiles: &[[u32; 4]], pairs: bool) -> Result<Vec<bf16>> {
        let tiles = device.upload(&tiles.concat())?;
        self.out.write(0, &vec![bf16::NAN; self.out.len()])?;
        self.enqueue(device, &tiles, Some(pairs))?;
        let mut out = vec![bf16::ZERO; self.out.len()];
        self.out.read(0, &mut out)?;
        Ok(out)
    }
}

/// Tokens of the longest prompt that is timed.
const LONGEST_PROMPT: usize = 8192;

/// A model of Qwen3-8B's shape with random weights, and a random prompt.
struct Prompt {
    forward: Forward,
    history: Buffer<i32>,
    words: Buffer<u32>,
}

impl Prompt {
    fn new(device: &Device, code: Option<Code>) -> Result<Self> {
        let config = Config::published("8B").ok_or("no such size")?;
        let weights = DeviceWeights::random_as(&config, device, code)?;
        let mut forward = Forward::new(device, &config, weights, LONGEST_PROMPT)?;
        forward.prepare_prefill()?;
        let history: Vec<i32> = (0..LONGEST_PROMPT as i32).map(|i| i * 7919 % 151_936).collect();
        Ok(Self { forward, history: device.upload(&history)?, words: device.zeroed(STATE_WORDS)? })
    }

    /// Enqueues all passes over a prompt, with at most `rows` rows each, and the logits after it.
    fn enqueue(&mut self, device: &Device, tokens: usize, rows: usize) -> std::result::Result<(), host::Error> {
        let state = SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() };
        let plan = |rows: Rows, start: usize, count: usize| {
            let plan = PlanPrompt { rows, state, start: start as u32, count: count as u32 };
            // SAFETY: the history has the tokens, and rows have room for a chunk.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        let chunk = self.forward.prefill().map_or(1, Prefill::capacity).min(rows);
        for at in (0..tokens).step_by(chunk) {
            let count = (tokens - at).min(chunk);
            if let Some(prefill) = self.forward.prefill() {
                plan(prefill.rows(), at, count)?;
            }
            let last = at + count == tokens;
            let output = if last { RowOutput::LogitsFrom(count as u32 - 1) } else { RowOutput::None };
            self.forward.enqueue_prefill(at, count, output)?;
            if last {
                plan(self.forward.rows(), tokens - 1, 1)?;
                self.forward.enqueue_head(count - 1, 1)?;
            }
        }
        Ok(())
    }
}

/// What a line of `serve` asks for.
enum Job {
    GemmCase(Box<GemmCase>),
    Attention(Attention),
    Prompt(Box<Prompt>),
}

fn serve(device: &Device) -> Result<()> {
    let mut jobs: HashMap<String, Job> = HashMap::new();
    let timer = device.timer()?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |i: usize| -> Result<usize> { Ok(words.get(i).ok_or("too few words")?.parse()?) };
        let (name, cut, repeats) = match words[..] {
            ["gemm", epilogue, cut, ..] => {
                let (m, n, k) = (number(3)?, number(4)?, number(5)?);
                let name = format!("{epilogue} {m} {n} {k}");
                if !jobs.contains_key(&name) {
                    let epilogue = match epilogue {
                        "qkv" => Epilogue::Qkv,
                        "write" => Epilogue::Write,
                        "swiglu" => Epilogue::SwiGlu,
                        "add" => Epilogue::Add,
                        "plain" => PLAIN,
                        other => return Err(format!("{other}: qkv, write, swiglu, add or plain").into()),
                    };
                    let sets = (ROTATED_BYTES / (n * k * 2)).max(2);
                    let product = GemmCase::new(device, epilogue, m, n, k, sets)?;
                    jobs.insert(name.clone(), Job::GemmCase(Box::new(product)));
                }
                let cut = match cut {
                    "auto" => None,
                    "n128" => Some(Cut::N128),
                    "n192" => Some(Cut::N192),
                    "n256" => Some(Cut::N256),
                    "2x1" => Some(Cut::Cluster2x1),
                    "4x2" => Some(Cut::Cluster4x2),
                    other => return Err(format!("{other}: auto, n128, n192, n256, pair or eight").into()),
                };
                (name, cut, number(6)?)
            }
            ["attention", tokens, ..] => {
                if !jobs.contains_key(tokens) {
                    let job = Job::Attention(Attention::new(device, number(1)?, number(2)?, number(3)?)?);
                    jobs.insert(tokens.into(), job);
                }
                (tokens.into(), None, number(4)?)
            }
            [prefill @ ("prefill" | "prefill_fp8"), ..] => {
                if !jobs.contains_key(prefill) {
                    let code = (prefill == "prefill_fp8").then_some(Code::E4m3);
                    jobs.insert(prefill.into(), Job::Prompt(Box::new(Prompt::new(device, code)?)));
                }
                let tokens = number(1)?;
                if tokens == 0 || tokens > LONGEST_PROMPT {
                    return Err(format!("{line}: 1 to {LONGEST_PROMPT} tokens").into());
                }
                (prefill.into(), None, number(2)?)
            }
            _ => return Err(format!("{line}: gemm, attention, prefill or prefill_fp8").into()),
        };
        let tokens = if name.starts_with("prefill") { number(1)? } else { 0 };
        let rows = if tokens > 0 && words.len() > 3 { number(3)?.max(1) } else { LONGEST_PROMPT };
        let job = jobs.get_mut(&name).ok_or("made above")?;
        let mut run = |i: usize| match job {
            Job::GemmCase(product) => product.enqueue(device, cut, i % product.weights.matrices().len()),
            Job::Attention(attention) => attention.enqueue(device, &attention.tiles, None),
            Job::Prompt(prompt) => prompt.enqueue(device, tokens, rows),
        };
        for i in 0..2 {
            run(i)?;
        }
        let ms = timer.time(|| (0..repeats).try_for_each(run))?;
        println!("{}", ms * 1e3 / repeats as f64);
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    let job = arguments.word(0);
    if job == Some("check-emulated") {
        return check::check(&arguments.emulator(), Extent::Tiny);
    }
    let device = arguments.device()?;
    if !device.capabilities().has_gemms() {
        return Err(format!("{} is no Hopper card, which these kernels are for", device.name()).into());
    }
    match job {
        Some("check") => check::check(&device, Extent::Whole),
        Some("check-small") => check::check(&device, Extent::Small),
        Some("serve") => serve(&device),
        _ => Err("say `check`, `check-small`, `check-emulated` or `serve`".into()),
    }
}
