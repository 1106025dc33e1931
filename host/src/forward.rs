//! The Qwen3 forward pass on a device: which kernels, over which memory, in which order.

use gpu_kernels::attention::{self, Attend};
use gpu_kernels::embedding::{self, Embed};
use gpu_kernels::kv::{self, Cache, HEAD_DIM};
use gpu_kernels::linear::{self, Linear, STRIP};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::qkv::{self, SplitHeads};
use gpu_kernels::step::{MAX_ROWS, Rows};
use gpu_kernels::stream::{Mark, StreamStep};
use half::bf16;
use model::{Config, rope::RopeTable};

use crate::Error;
use crate::device::{Buffer, Device};
use crate::prefill::{Parts, Prefill};
use crate::stream::Stream;
use crate::weights::DeviceWeights;

/// A model on a device with the memory of one sequence: cache, activations, logits. Everything is allocated here, and nothing
/// while it runs.
pub struct Forward {
    device: Device,
    config: Config,
    weights: DeviceWeights,
    capacity: usize,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    caches: Vec<Buffer<bf16>>,
    page_table: Buffer<u32>,
    row_count: Buffer<u32>,
    row_tokens: Buffer<u32>,
    row_positions: Buffer<u32>,
    row_sequences: Buffer<u32>,
    residual: Buffer<f32>,
    scaled: Buffer<bf16>,
    squares: Buffer<f32>,
    qkv: Buffer<f32>,
    q: Buffer<bf16>,
    sums: Buffer<f32>,
    scales: Buffer<f32>,
    attended: Buffer<bf16>,
    activation: Buffer<bf16>,
    logits: Buffer<f32>,
    stream: Option<Stream>,
    trace: Option<Buffer<u64>>,
    prefill: Option<Prefill>,
}

/// Which of a step's rows want logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a chunk of a prompt that is not its last.
    None,
    /// Those from this row on.
    From(u32),
}

/// What a model takes on a device.
#[derive(Clone, Copy, Debug)]
pub struct Footprint {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of cache, tables and activations.
    pub working: u64,
}

/// Rounds a context up to whole pages.
fn pages(capacity: usize) -> usize {
    capacity.div_ceil(kv::PAGE_TOKENS as usize)
}

impl Footprint {
    /// For `config` with room for `capacity` tokens, on a card that is a Hopper or not.
    pub fn of(config: &Config, capacity: usize, hopper: bool) -> Self {
        let tokens = pages(capacity) * kv::PAGE_TOKENS as usize;
        let splits = capacity.div_ceil(attention::SPLIT as usize);
        let rows = MAX_ROWS as usize;
        let q = config.query_size();
        let activations =
            rows * (config.hidden_size * 6 + config.hidden_size / 4 + (q + 2 * config.key_value_size()) * 4 + q * 4);
        let partial = rows * config.num_attention_heads * splits * (HEAD_DIM as usize + 2) * 4;
        let working = tokens * config.kv_bytes_per_token(2)
            + capacity * HEAD_DIM as usize * 4
            + partial
            + activations
            + rows * (config.intermediate_size * 2 + config.vocab_size * 4);
        let prefill = if hopper { Prefill::bytes(config, capacity) } else { 0 };
        Self { weights: config.weight_bytes(2) as u64, working: working as u64 + prefill }
    }
}

impl Forward {
    /// Checks that the kernels cover `config`'s shapes.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub fn check(config: &Config) -> Result<(), Error> {
        let group = config.num_attention_heads / config.num_key_value_heads;
        let chunk = 2 * linear::SLICE as usize;
        for (ok, what, found) in [
            (config.head_dim == HEAD_DIM as usize, "a head size of 128", config.head_dim),
            (config.hidden_size.is_multiple_of(chunk), "a hidden size that is a multiple of 128", config.hidden_size),
            (
                config.intermediate_size.is_multiple_of(chunk),
                "an intermediate size that is a multiple of 128",
                config.intermediate_size,
            ),
            (group <= attention::PAIRS as usize, "at most 16 query heads for a key-value head", group),
        ] {
            if !ok {
                return Err(Error::Unsupported { what, found });
            }
        }
        Ok(())
    }

    /// Allocates everything for one sequence of up to `capacity` tokens.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, config: &Config, weights: DeviceWeights, capacity: usize) -> Result<Self, Error> {
        let rows = MAX_ROWS as usize;
        let pages = pages(capacity);
        let splits = capacity.div_ceil(attention::SPLIT as usize);
        let q = config.query_size();
        let rope = RopeTable::new(config.head_dim, config.rope_theta, capacity);
        let table: Vec<u32> = (0..pages as u32).collect();
        let page = kv::page_elements(config.num_key_value_heads as u32);
        let caches =
            (0..config.num_hidden_layers).map(|_| device.zeroed(pages * page)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            cos: device.upload(&rope.cos)?,
            sin: device.upload(&rope.sin)?,
            caches,
            stream: None,
            trace: None,
            prefill: None,
            page_table: device.upload(&table)?,
            row_count: device.zeroed(1)?,
            row_tokens: device.zeroed(rows)?,
            row_positions: device.zeroed(rows)?,
            row_sequences: device.zeroed(rows)?,
            residual: device.zeroed(rows * config.hidden_size)?,
            scaled: device.zeroed(rows * config.hidden_size)?,
            squares: device.zeroed(rows * config.hidden_size / STRIP as usize)?,
            qkv: device.zeroed(rows * (q + 2 * config.key_value_size()))?,
            q: device.zeroed(rows * q)?,
            sums: device.zeroed(rows * config.num_attention_heads * splits * HEAD_DIM as usize)?,
            scales: device.zeroed(rows * config.num_attention_heads * splits * 2)?,
            attended: device.zeroed(rows * q)?,
            activation: device.zeroed(rows * config.intermediate_size)?,
            logits: device.zeroed(rows * config.vocab_size)?,
            device: device.clone(),
            config: config.clone(),
            weights,
            capacity,
        })
    }

    /// Lays the weights out for the step in one launch, if the device has the hardware and the memory; says whether.
    ///
    /// # Errors
    /// A driver error.
    pub fn lay_out_stream(&mut self) -> Result<bool, Error> {
        self.stream = Stream::new(&self.device, &self.config, &self.weights, &self.caches)?;
        Ok(self.stream.is_some())
    }

    /// The step in one launch, if it was laid out; its counters must be zero when it begins.
    pub fn stream(&self) -> Option<&Stream> {
        self.stream.as_ref()
    }

    /// From the next streamed step on, notes when each block passed each point of it.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn begin_trace(&mut self) -> Result<(), Error> {
        let words = self.device.multiprocessors() * StreamStep::trace_len(self.config.num_hidden_layers as u32);
        self.trace = Some(self.device.zeroed(words as usize)?);
        Ok(())
    }

    /// What was noted since the last call: for each block, the points that it passed and when, in nanoseconds. Waits for the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn take_trace(&mut self) -> Result<Vec<Vec<(Mark, u64)>>, Error> {
        let Some(trace) = &mut self.trace else { return Ok(Vec::new()) };
        let mut words = vec![0; trace.len()];
        trace.read(0, &mut words)?;
        trace.clear()?;
        let point = |&word: &u64| {
            let mark = Mark::ALL.get((word >> 56) as usize - 1).copied();
            mark.map(|mark| (mark, word & (!0 >> 8)))
        };
        let len = StreamStep::trace_len(self.config.num_hidden_layers as u32) as usize;
        Ok(words.chunks(len).map(|block| block[1..=block[0] as usize].iter().filter_map(point).collect()).collect())
    }

    /// Fills every layer's cache with `pattern`, over and over: for measuring.
    ///
    /// # Errors
    /// A driver error.
    pub fn fill_cache(&mut self, pattern: &[bf16]) -> Result<(), Error> {
        for cache in &mut self.caches {
            for at in (0..cache.len()).step_by(pattern.len().max(1)) {
                let piece = pattern.len().min(cache.len() - at);
                cache.write(at, &pattern[..piece])?;
            }
        }
        Ok(())
    }

    /// Allocates what passes over many rows of a prompt need, on a device that has the hardware.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn lay_out_prefill(&mut self) -> Result<(), Error> {
        if self.device.is_hopper() {
            let prefill = Prefill::new(&self.device, &self.config, &self.weights, &self.caches, self.capacity)?;
            self.prefill = Some(prefill);
        }
        Ok(())
    }

    /// The pass over many rows of a prompt, if it was laid out: every row of a prompt goes through it then.
    pub fn prefill(&self) -> Option<&Prefill> {
        self.prefill.as_ref()
    }

    /// Enqueues a pass over `count` rows of a prompt from position `start` on, which the [prefill](Self::prefill)'s rows hold by then.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If it was not laid out, or has no room for so many rows: a bug of the caller.
    pub fn enqueue_prefill(&mut self, start: usize, count: usize) -> Result<(), Error> {
        let Self { device, config, weights, caches, page_table, cos, sin, prefill, .. } = self;
        let parts = Parts { device, config, weights, caches, page_table, cos, sin };
        prefill.as_mut().expect("laid out").enqueue(&parts, start, count)
    }

    /// Enqueues the logits of `count` rows of the last prefill from its row `first` on: row 0 of [`logits`](Self::logits) is the first.
    /// [`rows`](Self::rows) hold the same rows by then.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there was none: a bug of the caller.
    pub fn enqueue_head(&self, first: usize, count: u32) -> Result<(), Error> {
        let (x, norm) = self.prefill().expect("laid out").result(&self.config, first);
        let weight = self.weights.head.as_ref().unwrap_or(&self.weights.embed);
        let head = Linear {
            rows: self.rows(),
            x,
            weight: weight.ptr(),
            up: weight.ptr(),
            norm,
            y: self.logits.ptr_mut(),
            activation: self.activation.ptr_mut(),
            residual: self.residual(),
            next_norm: self.weights.norm.ptr(),
            n: self.config.vocab_size as u32,
            k: self.config.hidden_size as u32,
            first_row: 0,
        };
        // SAFETY: buffers of self, of the sizes that the parameter block states.
        unsafe { self.launch_linear(Kind::Write, count, head) }
    }

    fn residual(&self) -> Residual {
        Residual {
            x: self.residual.ptr_mut(),
            scaled: self.scaled.ptr_mut(),
            squares: self.squares.ptr_mut(),
            dim: self.config.hidden_size as u32,
        }
    }

    /// Tokens that the cache holds.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The model's sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The rows that the next pass runs; a planning kernel fills them in.
    pub fn rows(&self) -> Rows {
        Rows {
            count: self.row_count.ptr_mut(),
            tokens: self.row_tokens.ptr_mut(),
            positions: self.row_positions.ptr_mut(),
            sequences: self.row_sequences.ptr_mut(),
        }
    }

    /// `[MAX_ROWS, vocab]`, written by a pass for the rows that were asked for.
    pub fn logits(&self) -> &Buffer<f32> {
        &self.logits
    }

    /// Enqueues a pass over the rows that [`rows`](Self::rows) will hold by then: at most `most_rows` of them, at positions
    /// below `end`.
    ///
    /// # Errors
    /// A refused launch.
    pub fn enqueue(&self, most_rows: u32, end: u32, logits: LogitRows) -> Result<(), Error> {
        let (c, w, rows) = (&self.config, &self.weights, self.rows());
        let hidden = c.hidden_size as u32;
        let inner = c.intermediate_size as u32;
        let q_heads = c.num_attention_heads as u32;
        let kv_heads = c.num_key_value_heads as u32;
        let heads = q_heads + 2 * kv_heads;
        let q_size = q_heads * HEAD_DIM;
        let splits = self.capacity.div_ceil(attention::SPLIT as usize) as u32;
        let eps = c.rms_norm_eps;

        let residual = self.residual();
        let norm = Norm { squares: self.squares.ptr(), dim: hidden, eps };
        let linear = |weight: &Buffer<bf16>, x: &Buffer<bf16>, n: u32, k: u32| Linear {
            rows,
            x: x.ptr(),
            weight: weight.ptr(),
            up: weight.ptr(),
            norm: Norm::default(),
            y: self.logits.ptr_mut(),
            activation: self.activation.ptr_mut(),
            residual,
            next_norm: w.norm.ptr(),
            n,
            k,
            first_row: 0,
        };

        // SAFETY: every address is a buffer of self, of the size that its kernel's parameter block states; self outlives the work because
        // freeing device memory waits for it.
        unsafe {
            let d = &self.device;
            let embed = Embed {
                rows,
                table: w.embed.ptr(),
                residual,
                norm: w.layers[0].input_norm.ptr(),
                vocab: c.vocab_size as u32,
            };
            d.launch::<embedding::embed>((1, most_rows), 0, embed)?;
            for ((layer, cache), next_norm) in w.layers.iter().zip(&self.caches).zip(w.next_norms()) {
                let cache = Cache {
                    pages: cache.ptr_mut(),
                    tables: self.page_table.ptr(),
                    table_stride: self.page_table.len() as u32,
                    kv_heads,
                };
                let project = linear(&layer.qkv, &self.scaled, heads * HEAD_DIM, hidden);
                let project = Linear { norm, y: self.qkv.ptr_mut(), ..project };
                self.launch_linear(Kind::Write, most_rows, project)?;
                let split = SplitHeads {
                    rows,
                    qkv: self.qkv.ptr(),
                    q_norm: layer.q_norm.ptr(),
                    k_norm: layer.k_norm.ptr(),
                    cos: self.cos.ptr(),
                    sin: self.sin.ptr(),
                    q: self.q.ptr_mut(),
                    cache,
                    q_heads,
                    eps,
                };
                d.launch::<qkv::split_heads>((heads.div_ceil(qkv::HEADS_PER_BLOCK), most_rows), 0, split)?;
                let attend = Attend {
                    rows,
                    q: self.q.ptr(),
                    cache,
                    sums: self.sums.ptr_mut(),
                    scales: self.scales.ptr_mut(),
                    out: self.attended.ptr_mut(),
                    splits,
                    q_heads,
                    scale: 1.0 / (HEAD_DIM as f32).sqrt(),
                };
                let splits = end.div_ceil(attention::SPLIT);
                let grid = (kv_heads, splits, Attend::tiles(most_rows, q_heads / kv_heads));
                d.launch::<attention::attend>(grid, Attend::SHARED_BYTES, attend)?;
                if splits > 1 {
                    d.launch::<attention::combine>((q_heads, most_rows), Attend::COMBINE_SHARED_BYTES, attend)?;
                }
                let output = linear(&layer.output, &self.attended, hidden, q_size);
                let output = Linear { next_norm: layer.post_attention_norm.ptr(), ..output };
                self.launch_linear(Kind::Add, most_rows, output)?;
                let gate_up = linear(&layer.gate, &self.scaled, inner, hidden);
                self.launch_linear(Kind::SwiGlu, most_rows, Linear { norm, up: layer.up.ptr(), ..gate_up })?;
                let down = linear(&layer.down, &self.activation, hidden, inner);
                self.launch_linear(Kind::Add, most_rows, Linear { next_norm: next_norm.ptr(), ..down })?;
            }
            if let LogitRows::From(first_row) = logits {
                let head = w.head.as_ref().unwrap_or(&w.embed);
                let head = linear(head, &self.scaled, c.vocab_size as u32, hidden);
                self.launch_linear(Kind::Write, most_rows - first_row, Linear { norm, first_row, ..head })?;
            }
        }
        Ok(())
    }

    /// Enqueues a pass over at most [`MAX_DECODE_ROWS`](gpu_kernels::step::MAX_DECODE_ROWS) rows with the logits of all of them: in one launch
    /// where there is a stream, and otherwise as [`enqueue`](Self::enqueue). Both give the same bits.
    ///
    /// # Errors
    /// A refused launch.
    pub fn enqueue_decode(&self, most_rows: u32, end: u32) -> Result<(), Error> {
        let Some(stream) = &self.stream else {
            return self.enqueue(most_rows, end, LogitRows::From(0));
        };
        let c = &self.config;
        let step = StreamStep {
            rows: self.rows(),
            stream: Default::default(),
            norms: Default::default(),
            pages: Default::default(),
            counters: Default::default(),
            embed: self.weights.embed.ptr(),
            cos: self.cos.ptr(),
            sin: self.sin.ptr(),
            tables: self.page_table.ptr(),
            residual: self.residual(),
            qkv: self.qkv.ptr_mut(),
            sums: self.sums.ptr_mut(),
            scales: self.scales.ptr_mut(),
            attended: self.attended.ptr_mut(),
            activation: self.activation.ptr_mut(),
            logits: self.logits.ptr_mut(),
            trace: self.trace.as_ref().map_or(Default::default(), |trace| trace.ptr_mut()),
            layer_count: c.num_hidden_layers as u32,
            intermediate: c.intermediate_size as u32,
            q_heads: c.num_attention_heads as u32,
            kv_heads: c.num_key_value_heads as u32,
            vocab: c.vocab_size as u32,
            table_stride: self.page_table.len() as u32,
            splits: self.capacity.div_ceil(attention::SPLIT as usize) as u32,
            eps: c.rms_norm_eps,
        };
        // SAFETY: buffers of self, sized as the parameter block says; the planning kernel zeroes the counters.
        unsafe { stream.enqueue(&self.device, most_rows, step) }
    }

    /// Picks the width of a linear kernel; all widths give the same bits.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn launch_linear(&self, kind: Kind, most_rows: u32, p: Linear) -> Result<(), Error> {
        let width = match most_rows {
            0..=8 => 8,
            9..=16 => 16,
            _ => 64,
        };
        let shared = Linear::shared_bytes(width);
        let strips = if kind == Kind::SwiGlu { Linear::swiglu_strips(p.n) } else { Linear::strips(p.n) };
        let d = &self.device;
        // SAFETY: the caller's word.
        unsafe {
            match (kind, width) {
                (Kind::Write, 8) => d.launch::<linear::linear_8>(strips, shared, p),
                (Kind::Write, 16) => d.launch::<linear::linear_16>(strips, shared, p),
                (Kind::Write, _) => d.launch::<linear::linear_64>(strips, shared, p),
                (Kind::Add, 8) => d.launch::<linear::linear_add_8>(strips, shared, p),
                (Kind::Add, 16) => d.launch::<linear::linear_add_16>(strips, shared, p),
                (Kind::Add, _) => d.launch::<linear::linear_add_64>(strips, shared, p),
                (Kind::SwiGlu, 8) => d.launch::<linear::swiglu_8>(strips, shared, p),
                (Kind::SwiGlu, 16) => d.launch::<linear::swiglu_16>(strips, shared, p),
                (Kind::SwiGlu, _) => d.launch::<linear::swiglu_64>(strips, shared, p),
            }
        }
    }
}

/// What a linear layer does with its sums.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Add,
    SwiGlu,
}
