//! The kernels for prompts on card 0: products and attention.
//!
//! `cargo run --release --package host --example gemm -- check` compares them with plain references, into poisoned outputs, and all ways of cutting
//! the work bit for bit; `check-small` leaves the large ones out, for compute-sanitizer. `… -- serve` times what it is asked for on standard input, a line at a time, and answers with microseconds:
//!
//! ```text
//! gemm qkv|swiglu|add|plain auto|n128|n192|n256|pair|eight M N K REPEATS
//! attention TOKENS Q_HEADS KV_HEADS REPEATS
//! prefill TOKENS REPEATS                          a prompt of Qwen3-8B's shape with random weights, to the logits after it
//! ```
//!
//! `scripts/prefill_bench.py` asks, and times cuBLAS, PyTorch's attention and transformers in turns with it.

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};

use cuda_std::tensor::Matrix;
use gpu_kernels::gemm::{Gemm, SPAN, TILE_ROWS};
use gpu_kernels::kv::{self, Cache, HEAD_DIM, PAGE_TOKENS};
use gpu_kernels::linear::STRIP;
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::prefill_attention::{self, PrefillAttention};
use gpu_kernels::qkv::SplitHeads;
use gpu_kernels::step::{self, PlanPrompt, Rows, STATE_WORDS, SequenceState};
use half::bf16;
use host::device::{Buffer, Device, TensorMaps};
use host::forward::{Forward, RowOutput};
use host::gemm::{self, Cut, Epilogue};
use host::prefill::{self, Prefill};
use host::weights::{DeviceLayer, DeviceWeights};
use model::Config;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const D: usize = HEAD_DIM as usize;
/// Weights of a timed product, together: more than a cache holds.
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

fn scaled(values: Vec<bf16>, by: f32) -> Vec<bf16> {
    values.into_iter().map(|v| bf16::from_f32(v.to_f32() * by)).collect()
}

/// The buffers of a product.
struct Product {
    epilogue: Epilogue,
    m: usize,
    n: usize,
    k: usize,
    x: Buffer<bf16>,
    weights: Vec<Buffer<bf16>>,
    /// Of the rows that are multiplied, as `add` leaves them.
    before: Buffer<f32>,
    norm: Buffer<bf16>,
    y: Buffer<f32>,
    out: Buffer<bf16>,
    squares: Buffer<f32>,
    maps: TensorMaps,
    heads: Heads,
    beside: gemm::Beside,
}

/// What heads are made with, and where they go.
struct Heads {
    q_heads: usize,
    kv_heads: usize,
    /// Of every row: the count, tokens, positions, sequences.
    rows: [Buffer<u32>; 4],
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    q: Buffer<bf16>,
    pages: Buffer<bf16>,
    table: Buffer<u32>,
}

impl Heads {
    /// For `m` rows of `heads` heads, two of every six for keys and values; none for none.
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
        }
    }
}

/// What a product left, each row whole.
struct Left {
    y: Vec<f32>,
    out: Vec<bf16>,
    squares: Vec<f32>,
    q: Vec<bf16>,
    pages: Vec<bf16>,
}

impl Left {
    fn bits(&self) -> impl Iterator<Item = u32> {
        let floats = self.y.iter().chain(&self.squares).map(|v| v.to_bits());
        floats.chain(self.out.iter().chain(&self.q).chain(&self.pages).map(|v| u32::from(v.to_bits())))
    }
}

impl Product {
    fn new(device: &Device, epilogue: Epilogue, m: usize, n: usize, k: usize, sets: usize) -> Result<Self> {
        let rows = m.next_multiple_of(TILE_ROWS as usize);
        let x = device.upload(&random(m * k, 1))?;
        // Gate and up are `n` features together.
        let gated = epilogue == Epilogue::SwiGlu;
        let columns = if gated { n / 2 } else { n };
        let w = scaled(random(n * k, 2), 0.1);
        let weights = (0..sets).map(|_| device.upload(&w)).collect::<std::result::Result<Vec<_>, _>>()?;
        let writes = |yes: bool, len: usize| if yes { len } else { 0 };
        let y = device.zeroed(writes(epilogue == Epilogue::Add, rows * n))?;
        let out = device.zeroed(writes(epilogue != Epilogue::Qkv, rows * columns))?;
        let heads = Heads::new(device, m, if epilogue == Epilogue::Qkv { n / D } else { 0 })?;
        let squares = device.zeroed(writes(epilogue == Epilogue::Add, rows * n / STRIP as usize))?;
        let mut tensors = vec![gemm::rows(x.ptr(), m, k), gemm::out(out.ptr(), rows, columns)];
        for w in &weights {
            // SAFETY: within the buffer, whose upper half are the up projection's weights.
            let up = unsafe { w.ptr().at((n - columns) * k) };
            tensors.extend([gemm::weight(w.ptr(), columns, k), gemm::weight(up, columns, k)]);
        }
        let maps = device.tensor_maps(&tensors)?;
        let strips = (k / STRIP as usize).max(1);
        // What lies behind a row's first sums is not to be read.
        let square =
            |i: usize| if i % strips < k.div_ceil(SPAN as usize) { Self::square(i / strips) } else { f32::NAN };
        let before = device.upload(&(0..m * strips).map(square).collect::<Vec<_>>())?;
        let norm = device.upload(&random(n, 3))?;
        let beside = gemm::Beside::new(device)?;
        Ok(Self { epilogue, m, n, k, x, weights, before, norm, y, out, squares, maps, heads, beside })
    }

    /// A sum of squares over a span of a row.
    fn square(row: usize) -> f32 {
        SPAN as f32 * (0.5 + (row % 7) as f32 / 8.0)
    }

    /// What the row's sums are multiplied by.
    fn scale(&self, row: usize) -> f64 {
        let spans = self.k.div_ceil(SPAN as usize) as f64;
        1.0 / (f64::from(Self::square(row)) * spans / self.k as f64 + 1e-6).sqrt()
    }

    fn params(&self, set: usize) -> Gemm {
        Gemm {
            x: self.maps.ptr(0),
            weight: self.maps.ptr(2 + 2 * set),
            up: self.maps.ptr(3 + 2 * set),
            out: self.maps.ptr(1),
            norm: Norm { squares: self.before.ptr(), dim: self.k as u32, eps: 1e-6 },
            spans: (self.k as u32).div_ceil(SPAN),
            heads: self.heads.params(&self.norm),
            residual: Residual {
                x: self.y.ptr_mut(),
                scaled: self.out.ptr_mut(),
                squares: self.squares.ptr_mut(),
                dim: self.n as u32,
            },
            next_norm: self.norm.ptr(),
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
        // SAFETY: buffers and maps of self, as large as the parameter block says, alive until the device is synchronised.
        unsafe {
            match cut {
                Some(cut) => gemm::enqueue_cut(device, &self.beside, self.epilogue, cut, self.params(set)),
                None => gemm::enqueue(device, &self.beside, self.epilogue, self.params(set)),
            }
        }
    }

    /// Runs it on poisoned outputs.
    fn run(&mut self, device: &Device, cut: Cut) -> Result<Left> {
        self.y.write(0, &(0..self.y.len()).map(Self::before).collect::<Vec<_>>())?;
        for poisoned in [&mut self.heads.q, &mut self.heads.pages] {
            poisoned.write(0, &vec![bf16::NAN; poisoned.len()])?;
        }
        self.out.write(0, &vec![bf16::NAN; self.out.len()])?;
        // Not all of them are written.
        self.squares.write(0, &vec![-1.0; self.squares.len()])?;
        self.enqueue(device, Some(cut), 0)?;
        let rows = self.m.next_multiple_of(TILE_ROWS as usize);
        let mut left = Left {
            y: vec![0.0; self.y.len() / rows * self.m],
            out: vec![bf16::ZERO; self.out.len() / rows * self.m],
            squares: vec![0.0; self.squares.len() / rows * self.m],
            q: vec![bf16::ZERO; self.heads.q.len()],
            pages: vec![bf16::ZERO; self.heads.pages.len()],
        };
        self.heads.q.read(0, &mut left.q)?;
        self.heads.pages.read(0, &mut left.pages)?;
        self.y.read(0, &mut left.y)?;
        self.out.read(0, &mut left.out)?;
        self.squares.read(0, &mut left.squares)?;
        Ok(left)
    }

    /// Adds to one row alone, as if it were the first.
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

/// `‖found − wanted‖ / ‖wanted‖`.
fn distance(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    for (found, wanted) in pairs {
        difference += (found - wanted).powi(2);
        size += wanted.powi(2);
    }
    (difference / size).sqrt()
}

/// About `count` numbers below `end`, its ends among them.
fn spread(end: usize, count: usize) -> Vec<usize> {
    if end <= count {
        return (0..end).collect();
    }
    (0..count).map(|i| i * (end - 1) / (count - 1)).collect()
}

fn check_product(device: &Device, epilogue: Epilogue, m: usize, n: usize, k: usize) -> Result<()> {
    let mut product = Product::new(device, epilogue, m, n, k, 1)?;
    let left = product.run(device, Cut::N128)?;
    for cut in Cut::ALL.into_iter().chain(Cut::ALL) {
        let other = product.run(device, cut)?;
        if !left.bits().eq(other.bits()) {
            return Err(format!("{epilogue:?} {m} x {n} x {k}: {cut:?} differs from N128").into());
        }
    }
    if epilogue == Epilogue::Add {
        let row = m / 2;
        let before: Vec<f32> = (row * n..(row + 1) * n).map(Product::before).collect();
        if product.run_row(device, row, &before)? != left.y[row * n..][..n] {
            return Err(format!("add {m} x {n} x {k}: row {row} alone differs").into());
        }
    }
    let (x, w, norm) = (random(m * k, 1), scaled(random(n * k, 2), 0.1), random(n, 3));
    let dot = |row: usize, feature: usize| -> f64 {
        x[row * k..][..k].iter().zip(&w[feature * k..][..k]).map(|(x, w)| x.to_f64() * w.to_f64()).sum()
    };
    let mut pairs = Vec::new();
    let rope = model::rope::RopeTable::new(D, 1e6, m);
    for row in spread(m, if epilogue == Epilogue::Qkv { 6 } else { 40 }) {
        let scale = product.scale(row);
        match epilogue {
            Epilogue::Qkv => {
                let Heads { q_heads, kv_heads, .. } = product.heads;
                let page = m.div_ceil(64) - 1 - row / 64;
                // A query, a key and a value.
                for head in [q_heads / 2, q_heads, q_heads + 2 * kv_heads - 1] {
                    let x: Vec<f64> = (0..D).map(|d| dot(row, head * D + d) * scale).collect();
                    let rms = (x.iter().map(|x| x * x).sum::<f64>() / D as f64 + 1e-6).sqrt();
                    let normed = |d: usize| x[d] / rms * norm[d].to_f64();
                    let block = |kv_head: usize| (page * kv_heads + kv_head) * 2 * 64 * D;
                    for (d, own) in x.iter().enumerate() {
                        let (cos, sin) = (rope.cos[row * 64 + d % 64], rope.sin[row * 64 + d % 64]);
                        let (cos, sin) = (f64::from(cos), f64::from(sin));
                        let partner = if d < 64 { -normed(d + 64) } else { normed(d - 64) };
                        let turned = normed(d) * cos + partner * sin;
                        pairs.push(if head < q_heads {
                            (left.q[(row * q_heads + head) * D + d].to_f64(), turned)
                        } else if head < q_heads + kv_heads {
                            (left.pages[block(head - q_heads) + row % 64 * D + d].to_f64(), turned)
                        } else {
                            let at = block(head - q_heads - kv_heads) + (D + d) * 64 + row % 64;
                            (left.pages[at].to_f64() / rms, own / rms)
                        });
                    }
                }
            }
            Epilogue::SwiGlu => {
                for f in spread(n / 2, 70) {
                    let (gate, up) = (dot(row, f) * scale, dot(row, n / 2 + f) * scale);
                    pairs.push((left.out[row * n / 2 + f].to_f64(), gate / (1.0 + (-gate).exp()) * up));
                }
            }
            Epilogue::Plain => {
                let found = |f: usize| left.out[row * n + f].to_f64();
                pairs.extend(spread(n, 70).into_iter().map(|f| (found(f), dot(row, f))));
            }
            Epilogue::Add => {
                for f in spread(n, 70) {
                    let i = row * n + f;
                    let new = dot(row, f) + f64::from(Product::before(i));
                    pairs.push((f64::from(left.y[i]), new));
                    // Each written value is checked to its last bit against the f32 that it comes from.
                    let xw = bf16::from_f32(left.y[i] * norm[f].to_f32());
                    let span = SPAN as usize;
                    let square: f32 = left.y[i / span * span..][..span].iter().map(|v| v * v).sum();
                    let found = left.squares[row * n / STRIP as usize + f / span];
                    if left.out[i] != xw || (found - square).abs() > square * 1e-5 {
                        return Err(format!("add {m} x {n} x {k}: row {row}, feature {f}").into());
                    }
                }
            }
        }
    }
    let error = distance(pairs.into_iter());
    // Rounding to bf16; or the accumulators' own, which grows with the chain.
    let limit = if epilogue == Epilogue::Add { 2e-6 + 2e-9 * k as f64 } else { 4e-3 };
    println!("{epilogue:?} {m} x {n} x {k}: error {error:.2e}, all cuts agree");
    if error.is_nan() || error >= limit {
        return Err(format!("{epilogue:?} {m} x {n} x {k}: error {error:e}").into());
    }
    Ok(())
}

/// Products in clusters on two queues at once, which take each other's multiprocessors: nobody waits for who has no room.
fn check_two_queues(device: &Device) -> Result<()> {
    let (m, n, k) = (1000, 8192, 1024);
    let devices = [device.clone(), device.beside()?];
    let mut products =
        devices.iter().map(|device| Product::new(device, Epilogue::Plain, m, n, k, 1)).collect::<Result<Vec<_>>>()?;
    let want = products[0].run(device, Cut::N256)?;
    for product in &mut products {
        product.out.write(0, &vec![bf16::NAN; product.out.len()])?;
    }
    for _ in 0..40 {
        for (product, device) in products.iter().zip(&devices) {
            product.enqueue(device, Some(Cut::Eight), 0)?;
        }
    }
    for product in &products {
        let mut out = vec![bf16::ZERO; want.out.len()];
        product.out.read(0, &mut out)?;
        if out != want.out {
            return Err(format!("plain {m} x {n} x {k}: eights on two queues differ").into());
        }
    }
    println!("two queues at once: all products agree");
    Ok(())
}

/// All of a buffer as rows of `columns`.
fn matrix(buffer: &Buffer<bf16>, columns: usize, tile_rows: u32) -> Matrix {
    let rows = (buffer.len() / columns) as u64;
    Matrix::dense(buffer.ptr().addr(), rows, columns as u64, tile_rows)
}

/// Rows of one sequence and its cache.
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
        // Pages lie backwards.
        let table = device.upload(&(0..count as u32).rev().collect::<Vec<_>>())?;
        let out = device.zeroed(tokens * q_heads * D)?;
        let [keys, values] = [(D, PAGE_TOKENS), (PAGE_TOKENS as usize, HEAD_DIM)]
            .map(|(columns, height)| matrix(&pages, columns, height));
        let maps = device.tensor_maps(&[matrix(&q, q_heads * D, 64), keys, values])?;
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
            keys: self.maps.ptr(1),
            values: self.maps.ptr(2),
            cache: Cache {
                pages: self.pages.ptr_mut(),
                tables: self.table.ptr(),
                table_stride: self.table.len() as u32,
                kv_heads: self.kv_heads as u32,
            },
            out: self.out.ptr_mut(),
            q_heads: self.q_heads as u32,
            scale: 1.0 / (D as f32).sqrt(),
        };
        // SAFETY: buffers and maps of self, as large as the parameter block says, alive until the device is synchronised.
        unsafe { prefill::enqueue_attention(device, params, tiles.len() as u32 / 4, pairs) }
    }

    /// Runs it into a poisoned output.
    fn run(&mut self, device: &Device, tiles: &[[u32; 4]], pairs: bool) -> Result<Vec<bf16>> {
        let tiles = device.upload(&tiles.concat())?;
        self.out.write(0, &vec![bf16::NAN; self.out.len()])?;
        self.enqueue(device, &tiles, Some(pairs))?;
        let mut out = vec![bf16::ZERO; self.out.len()];
        self.out.read(0, &mut out)?;
        Ok(out)
    }
}

fn check_attention(device: &Device, tokens: usize, q_heads: usize, kv_heads: usize) -> Result<()> {
    let mut attention = Attention::new(device, tokens, q_heads, kv_heads)?;
    let whole = attention.run(device, &prefill_attention::tiles(0, tokens as u32, 0, 0, 128), false)?;
    for (height, pairs) in [(128, false), (64, false), (128, true), (100, true), (128, true)] {
        if attention.run(device, &prefill_attention::tiles(0, tokens as u32, 0, 0, height), pairs)? != whole {
            let what = if pairs { ", blocks in pairs" } else { "" };
            return Err(format!("attention of {tokens} tokens: tiles of {height} rows differ{what}").into());
        }
    }
    let (mut q, mut pages) = (vec![bf16::ZERO; attention.q.len()], vec![bf16::ZERO; attention.pages.len()]);
    attention.q.read(0, &mut q)?;
    attention.pages.read(0, &mut pages)?;
    let last = tokens.div_ceil(64) - 1;
    let block = |position: usize, head: usize| ((last - position / 64) * kv_heads + head) * 2 * 64 * D;
    let mut pairs = Vec::new();
    for row in spread(tokens, 24) {
        for head in spread(q_heads, 3) {
            let kv_head = head / (q_heads / kv_heads);
            let query = &q[(row * q_heads + head) * D..][..D];
            let scores: Vec<f64> = (0..=row)
                .map(|p| {
                    let key = &pages[block(p, kv_head) + p % 64 * D..][..D];
                    query.iter().zip(key).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>() / (D as f64).sqrt()
                })
                .collect();
            let top = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..D {
                let value = |p: usize| pages[block(p, kv_head) + (D + d) * 64 + p % 64].to_f64();
                let sum: f64 = weights.iter().enumerate().map(|(p, w)| w * value(p)).sum();
                pairs.push((whole[(row * q_heads + head) * D + d].to_f64(), sum / total));
            }
        }
    }
    let error = distance(pairs.into_iter());
    println!("attention {tokens} tokens, {q_heads} / {kv_heads} heads: error {error:.2e}, all tiles agree");
    if error.is_nan() || error >= 5e-3 {
        return Err(format!("attention of {tokens} tokens: error {error:e}").into());
    }
    Ok(())
}

fn check(device: &Device, small: bool) -> Result<()> {
    for epilogue in [Epilogue::Qkv, Epilogue::SwiGlu, Epilogue::Add, Epilogue::Plain] {
        for (m, n, k) in [(1, 384, 64), (64, 768, 64), (77, 384, 320), (129, 640, 192), (300, 1152, 4160)] {
            check_product(device, epilogue, m, n, k)?;
        }
    }
    check_two_queues(device)?;
    for (tokens, q_heads, kv_heads) in [(1, 1, 1), (70, 2, 1), (300, 4, 2), (1025, 5, 1), (2048, 32, 8), (8192, 4, 1)] {
        if tokens <= 1025 || !small {
            check_attention(device, tokens, q_heads, kv_heads)?;
        }
    }
    if small {
        return Ok(());
    }
    for (epilogue, m, n, k) in [
        (Epilogue::Qkv, 512, 6144, 4096),
        (Epilogue::Add, 2048, 4096, 12288),
        (Epilogue::SwiGlu, 2048, 24576, 4096),
        (Epilogue::Add, 8192, 4096, 4096),
        (Epilogue::Plain, 2048, 4096, 4096),
    ] {
        check_product(device, epilogue, m, n, k)?;
    }
    Ok(())
}

/// Prompts of up to this many tokens are timed.
const LONGEST_PROMPT: usize = 8192;

/// A model of Qwen3-8B's shape with random weights, and a random prompt.
struct Prompt {
    forward: Forward,
    history: Buffer<i32>,
    words: Buffer<u32>,
}

impl Prompt {
    fn new(device: &Device) -> Result<Self> {
        let config = Config {
            vocab_size: 151_936,
            hidden_size: 4096,
            intermediate_size: 12288,
            num_hidden_layers: 36,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: D,
            max_position_embeddings: 40_960,
            rms_norm_eps: 1e-6,
            rope_theta: 1e6,
            yarn: None,
            tie_word_embeddings: false,
            eos_token_ids: Vec::new(),
        };
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let heads = config.query_size() + 2 * config.key_value_size();
        // Each matrix is a piece of these.
        let values = scaled(random(config.vocab_size * hidden, 6), 0.035);
        let ones = vec![bf16::ONE; hidden];
        let weights = |len: usize, at: usize| device.upload(&values[at % 4093..][..len]);
        let layers = (0..config.num_hidden_layers).map(|i| {
            Ok(DeviceLayer {
                input_norm: device.upload(&ones)?,
                qkv: weights(heads * hidden, 7 * i)?,
                q_norm: device.upload(&ones[..D])?,
                k_norm: device.upload(&ones[..D])?,
                output: weights(hidden * config.query_size(), 7 * i + 1)?,
                post_attention_norm: device.upload(&ones)?,
                gate: weights(inner * hidden, 7 * i + 2)?,
                up: weights(inner * hidden, 7 * i + 3)?,
                down: weights(hidden * inner, 7 * i + 4)?,
            })
        });
        let weights = DeviceWeights {
            embed: device.upload(&values)?,
            layers: layers.collect::<Result<Vec<_>>>()?,
            norm: device.upload(&ones)?,
            head: Some(device.upload(&values)?),
        };
        let mut forward = Forward::new(device, &config, weights, LONGEST_PROMPT)?;
        forward.lay_out_prefill()?;
        let history: Vec<i32> = (0..LONGEST_PROMPT as i32).map(|i| i * 7919 % 151_936).collect();
        Ok(Self { forward, history: device.upload(&history)?, words: device.zeroed(STATE_WORDS)? })
    }

    /// All passes over a prompt, and the logits after it.
    fn enqueue(&mut self, device: &Device, tokens: usize) -> std::result::Result<(), host::Error> {
        let state = SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() };
        let plan = |rows: Rows, start: usize, count: usize| {
            let plan = PlanPrompt { rows, state, start: start as u32, count: count as u32 };
            // SAFETY: the history has the tokens, and rows have room for a chunk.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        let chunk = self.forward.prefill().map_or(1, Prefill::capacity);
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
    Product(Box<Product>),
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
                        "swiglu" => Epilogue::SwiGlu,
                        "add" => Epilogue::Add,
                        "plain" => Epilogue::Plain,
                        other => return Err(format!("{other}: qkv, swiglu, add or plain").into()),
                    };
                    let sets = (ROTATED_BYTES / (n * k * 2)).max(2);
                    let product = Product::new(device, epilogue, m, n, k, sets)?;
                    jobs.insert(name.clone(), Job::Product(Box::new(product)));
                }
                let cut = match cut {
                    "auto" => None,
                    "n128" => Some(Cut::N128),
                    "n192" => Some(Cut::N192),
                    "n256" => Some(Cut::N256),
                    "pair" => Some(Cut::Pair),
                    "eight" => Some(Cut::Eight),
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
            ["prefill", ..] => {
                if !jobs.contains_key("prefill") {
                    jobs.insert("prefill".into(), Job::Prompt(Box::new(Prompt::new(device)?)));
                }
                let tokens = number(1)?;
                if tokens == 0 || tokens > LONGEST_PROMPT {
                    return Err(format!("{line}: 1 to {LONGEST_PROMPT} tokens").into());
                }
                ("prefill".into(), None, number(2)?)
            }
            _ => return Err(format!("{line}: gemm, attention or prefill").into()),
        };
        let tokens = if name == "prefill" { number(1)? } else { 0 };
        let job = jobs.get_mut(&name).ok_or("made above")?;
        let mut run = |i: usize| match job {
            Job::Product(product) => product.enqueue(device, cut, i % product.weights.len()),
            Job::Attention(attention) => attention.enqueue(device, &attention.tiles, None),
            Job::Prompt(prompt) => prompt.enqueue(device, tokens),
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
    let device = Device::cuda(0)?;
    if !device.is_hopper() {
        return Err(format!("{} is no Hopper card, which these kernels are for", device.name()).into());
    }
    match std::env::args().nth(1).as_deref() {
        Some("check") => check(&device, false),
        Some("check-small") => check(&device, true),
        Some("serve") => serve(&device),
        _ => Err("say `check`, `check-small` or `serve`".into()),
    }
}
