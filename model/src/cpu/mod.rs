//! The reference forward pass, in f32 on the CPU.
//!
//! It is written to be read, and fast enough to serve a small model. Its numbers are *exact* in one sense that the rest
//! of the project builds on: the logits of a token depend on the tokens before it and on nothing else. They do not
//! depend on how many tokens share a call, how earlier tokens were split over calls, or the number of threads. Every
//! output element is one dot product with fixed partial sums, added in a fixed order (module `dot`). Threads only
//! divide the outputs among them.

mod attention;
mod cache;
mod dot;
mod eagle;
mod matmul;

pub use cache::{KvCache, KvPages};
pub use eagle::{CpuEagle, HiddenStates};

use std::sync::Arc;

use crate::checkpoint::{TensorId, Weights};
use crate::format::WeightId;
use crate::plan::{self, Epilogue, Gemm, Input, Operator};
use crate::rope::{self, Frequencies};
use crate::{Checkpoint, Config, Error, Weight};
use dot::Simd;
use matmul::{Converted, Matrix, Output, matmul};

/// A token to run: where it stands in its sequence, and where that sequence's keys and values are.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Its id.
    pub token: u32,
    /// How many tokens come before it in its sequence.
    pub position: usize,
    /// The pages of its sequence, first to last, at least up to this position.
    pub pages: &'a [u32],
    /// Whether the logits after this token are wanted.
    pub logits: bool,
}

/// Asks a pass to record hidden states, for a head that drafts from them.
#[derive(Debug)]
pub struct Taps<'a> {
    /// After how many layers the residual stream is recorded, in rising order; 0 is the embedding.
    pub after: &'a [usize],
    /// Receives the hidden states of every row, `[rows, after.len(), hidden]`, appended to what is there.
    pub states: &'a mut Vec<f32>,
}

impl Taps<'_> {
    /// Makes room for the states of `rows` more rows.
    fn extend(&mut self, rows: usize, hidden: usize) {
        self.states.resize(self.states.len() + rows * self.after.len() * hidden, 0.0);
    }

    /// Records the residual stream `x` after `layers` layers, for the rows that `extend` last made room for.
    fn take(&mut self, layers: usize, x: &[f32], hidden: usize) {
        let first = self.states.len() - x.len() * self.after.len();
        for (i, _) in self.after.iter().enumerate().filter(|(_, after)| **after == layers) {
            let rows = self.states[first..].chunks_exact_mut(self.after.len() * hidden);
            for (states, x) in rows.zip(x.chunks_exact(hidden)) {
                states[i * hidden..][..hidden].copy_from_slice(x);
            }
        }
    }
}

/// The first place at which a row's numbers are NaN or infinite. All that is computed from them means nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// What is not finite.
    pub place: Place,
    /// The row's position in its sequence.
    pub position: usize,
    /// The row's index in the call.
    pub row: usize,
}

/// Something that a forward pass computes, in the order of the pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The residual stream after this layer, counted from 0.
    Layer(usize),
    /// The logits.
    Logits,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Layer(index) => write!(f, "outputs of layer {index} (counted from 0)"),
            Place::Logits => f.write_str("logits"),
        }
    }
}

/// Tokens that go through the layers together; longer calls are cut into blocks of this many. It bounds the
/// scratch memory, and has no influence on results.
const BLOCK: usize = 64;

/// A checkpoint made ready to run on the CPU. Weights stay in place, as they are stored, and are widened as they are
/// read; quantised matrices are converted to bf16 once.
#[derive(Debug, Clone)]
pub struct CpuModel {
    checkpoint: Checkpoint,
    weights: Weights<Slot>,
    /// The quantised matrices, converted to bf16.
    converted: Arc<Vec<Converted>>,
    vectors: Vectors,
    frequencies: Frequencies,
    simd: Simd,
}

/// Where a weight is.
#[derive(Debug, Clone, Copy)]
enum Slot {
    /// In the checkpoint.
    Stored(TensorId),
    /// Among the converted matrices, by index.
    Converted(usize),
}

/// Weights of norms, and biases, widened once: they are small and used with every token.
#[derive(Debug, Clone)]
struct Vectors {
    layers: Vec<LayerVectors>,
    last_norm: Vec<f32>,
}

#[derive(Debug, Clone)]
struct LayerVectors {
    input_norm: Vec<f32>,
    /// Biases of queries, keys and values, if the plan has any.
    qkv_bias: Option<[Vec<f32>; 3]>,
    /// Norms of query heads and of key heads, if the plan has any.
    head_norms: Option<[Vec<f32>; 2]>,
    post_attention_norm: Vec<f32>,
}

/// Activations of a block of rows.
struct Scratch {
    /// The residual stream, `[rows, hidden]`.
    x: Vec<f32>,
    /// The residual stream after a norm: the input of a GEMM.
    normed: Vec<f32>,
    /// Queries `[rows, query_size]`, then keys and values `[rows, key_value_size]` each.
    qkv: [Vec<f32>; 3],
    /// `[rows, query_size]`.
    attended: Vec<f32>,
    /// Gates and ups of SwiGLU, `[rows, intermediate]` each.
    gate_up: [Vec<f32>; 2],
    /// `silu(gate) × up`, `[rows, intermediate]`.
    activation: Vec<f32>,
    /// What is added to the residual stream, `[rows, hidden]`.
    delta: Vec<f32>,
    /// Cosines and sines of each row's rotation, `[rows, head_dim / 2]` each.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl CpuModel {
    /// Prepares a checkpoint. Copies nothing but norms, biases and quantised matrices.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::Shape`] or [`Error::WrongDtype`], but not for a checkpoint that opened. For a
    /// quantised matrix also a scale or a code that means no number, or a file that cannot be read.
    pub fn new(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let mut quantized = Vec::new();
        let weights = checkpoint.weight_ids()?.map(&mut |id| match id {
            WeightId::Plain(id) => Slot::Stored(id),
            WeightId::Quantized(_) => {
                quantized.push(Weight::new(checkpoint, &id));
                Slot::Converted(quantized.len() - 1)
            }
        });
        let converted: Vec<Converted> = quantized.iter().map(Converted::new).collect::<Result<_, _>>()?;
        let wide = |slot| stored(checkpoint, &converted, slot).row_f32(0);
        let vectors = Vectors {
            layers: weights
                .layers
                .iter()
                .map(|layer| LayerVectors {
                    input_norm: wide(layer.input_norm),
                    qkv_bias: layer.qkv_bias.map(|biases| biases.map(wide)),
                    head_norms: layer.head_norms.map(|norms| norms.map(wide)),
                    post_attention_norm: wide(layer.post_attention_norm),
                })
                .collect(),
            last_norm: wide(weights.norm),
        };
        let frequencies = Frequencies::of(&checkpoint.config);
        let (checkpoint, converted) = (checkpoint.clone(), Arc::new(converted));
        Ok(CpuModel { checkpoint, weights, converted, vectors, frequencies, simd: Simd::detect() })
    }

    /// The checkpoint that this runs.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Sizes and constants.
    pub fn config(&self) -> &Config {
        &self.checkpoint.config
    }

    /// An empty cache for one sequence of up to `capacity` tokens.
    pub fn new_cache(&self, capacity: usize) -> KvCache {
        KvCache::new(self.config(), capacity)
    }

    /// Runs `tokens` after those already in `cache`, and adds them to it.
    ///
    /// `logits` takes the logits of the last `logit_rows` tokens, `[logit_rows, vocab]`; ask for 0 rows with an empty
    /// slice. On an error the cache is as before.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`], [`Error::CacheFull`], [`Error::LogitsBuffer`] if `logits` is not `logit_rows` rows
    /// or more rows are asked for than there are tokens, or [`Error::OutputNotFinite`].
    pub fn forward(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        logit_rows: usize,
        logits: &mut [f32],
    ) -> Result<(), Error> {
        let start = cache.len();
        match self.forward_with_faults(tokens, cache, logit_rows, logits)?.iter().min() {
            None => Ok(()),
            Some(fault) => {
                cache.truncate(start);
                Err(fault.into())
            }
        }
    }

    /// As [`forward`](Self::forward), for a caller that may not need all rows: returns the rows that are not finite
    /// instead of an error.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), except [`Error::OutputNotFinite`].
    pub fn forward_with_faults(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        logit_rows: usize,
        logits: &mut [f32],
    ) -> Result<Vec<Fault>, Error> {
        self.forward_tapped(tokens, cache, logit_rows, logits, None)
    }

    /// As [`forward_with_faults`](Self::forward_with_faults), and also records hidden states of all rows if `taps` asks
    /// for them.
    ///
    /// # Errors
    /// As [`forward_with_faults`](Self::forward_with_faults); `taps` has received nothing then.
    pub fn forward_tapped(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        logit_rows: usize,
        logits: &mut [f32],
        taps: Option<Taps<'_>>,
    ) -> Result<Vec<Fault>, Error> {
        let vocab_size = self.config().vocab_size;
        let start = cache.len();
        let needed = start + tokens.len();
        if needed > cache.capacity() {
            return Err(Error::CacheFull { capacity: cache.capacity(), needed });
        }
        if logit_rows > tokens.len() {
            let expected = tokens.len() * vocab_size;
            return Err(Error::LogitsBuffer { found: logits.len(), expected, rows: logit_rows, vocab_size });
        }
        let without_logits = tokens.len() - logit_rows;
        let row = |(i, &token)| Row { token, position: start + i, pages: &[0], logits: i >= without_logits };
        let rows: Vec<Row<'_>> = tokens.iter().enumerate().map(row).collect();
        let faults = self.rows(&rows, &mut cache.pages, logits, taps)?;
        cache.advance(tokens.len());
        Ok(faults)
    }

    /// Runs rows of any number of sequences, each over its own pages, and writes their keys and values there. Rows of a
    /// sequence come at rising positions. Its pages already hold all that comes before the first of them.
    ///
    /// `logits` receives the logits of the rows that ask for them, in order, `[wanted, vocab]`. A row's result depends
    /// on its own sequence alone. On an error nothing was written. Returns the rows that are not finite, in order. Such
    /// a row affects no other sequence, but all later rows of its own.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`], [`Error::PageMissing`], or [`Error::LogitsBuffer`] if `logits` has another size.
    pub fn forward_rows(
        &self,
        rows: &[Row<'_>],
        pages: &mut KvPages,
        logits: &mut [f32],
        taps: Option<Taps<'_>>,
    ) -> Result<Vec<Fault>, Error> {
        self.rows(rows, pages, logits, taps)
    }

    fn rows(
        &self,
        rows: &[Row<'_>],
        pages: &mut KvPages,
        logits: &mut [f32],
        mut taps: Option<Taps<'_>>,
    ) -> Result<Vec<Fault>, Error> {
        let vocab_size = self.config().vocab_size;
        for row in rows {
            if row.token as usize >= vocab_size {
                return Err(Error::TokenOutOfRange { token: row.token, vocab_size });
            }
            let needed = row.position / pages.page_tokens().max(1) + 1;
            let there = row.pages.get(..needed).is_some_and(|table| table.iter().all(|&p| (p as usize) < pages.len()));
            if !there {
                return Err(Error::PageMissing { position: row.position, pages: pages.len() });
            }
        }
        let wanted = rows.iter().filter(|row| row.logits).count();
        let expected = wanted * vocab_size;
        if logits.len() != expected {
            return Err(Error::LogitsBuffer { found: logits.len(), expected, rows: wanted, vocab_size });
        }
        let size = self.config().plan.hidden;
        let mut logits = logits;
        let mut faults = Vec::new();
        for (block, rows) in rows.chunks(BLOCK).enumerate() {
            let mut places = vec![None; rows.len()];
            let hidden = self.layers(rows, pages, &mut places, taps.as_mut());
            let wanted = rows.iter().zip(hidden.chunks_exact(size)).filter(|(row, _)| row.logits);
            let hidden: Vec<f32> = wanted.flat_map(|(_, hidden)| hidden).copied().collect();
            let (here, later) = logits.split_at_mut(hidden.len() / size * vocab_size);
            self.head(&hidden, here);
            let with_logits = rows.iter().zip(&mut places).filter(|(row, _)| row.logits).map(|(_, place)| place);
            for (place, logits) in with_logits.zip(here.chunks_exact(vocab_size)) {
                note(place, Place::Logits, logits);
            }
            logits = later;
            let found = rows.iter().zip(places).enumerate().filter_map(|(i, (row, place))| {
                Some(Fault { place: place?, position: row.position, row: block * BLOCK + i })
            });
            faults.extend(found);
        }
        Ok(faults)
    }

    /// Runs the embedding and all layers for one block of rows. Returns the residual stream, `[rows, hidden]`. Notes
    /// for each row in `places` the first layer after which it is not finite.
    fn layers(
        &self,
        block: &[Row<'_>],
        pages: &mut KvPages,
        places: &mut [Option<Place>],
        mut taps: Option<&mut Taps<'_>>,
    ) -> Vec<f32> {
        let c = self.config();
        let mut s = self.scratch(block);
        if let Some(taps) = &mut taps {
            taps.extend(block.len(), c.plan.hidden);
            taps.take(0, &s.x, c.plan.hidden);
        }
        for index in 0..c.num_hidden_layers {
            for operator in c.plan.operators() {
                match operator {
                    Operator::Gemm(gemm) => self.gemm(index, gemm, block.len(), &mut s),
                    Operator::Heads(heads) => self.heads(index, &heads, block, &mut s, pages),
                    Operator::Attention(heads) => {
                        attention::attention(self.simd, &heads, &s.qkv[0], pages.layer(index), block, &mut s.attended);
                    }
                }
            }
            if let Some(taps) = &mut taps {
                taps.take(index + 1, &s.x, c.plan.hidden);
            }
            let last = index + 1 == c.num_hidden_layers;
            for ((row, place), x) in block.iter().zip(places.iter_mut()).zip(s.x.chunks_exact(c.plan.hidden)) {
                // Later rows see only a row's keys and values, which the last layer computes before its output. So the
                // last layer's output matters only where logits are wanted.
                if !last || row.logits {
                    note(place, Place::Layer(index), x);
                }
            }
        }
        s.x
    }

    /// The embedding of a block of rows, and room for what is computed from it.
    fn scratch(&self, block: &[Row<'_>]) -> Scratch {
        let (c, rows) = (self.config(), block.len());
        let embed = self.matrix(self.weights.embed);
        let half = c.plan.attention.head_dim / 2;
        let (mut cos, mut sin) = (vec![0.0; rows * half], vec![0.0; rows * half]);
        for (row, (cos, sin)) in block.iter().zip(cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half))) {
            self.frequencies.row(row.position, cos, sin);
        }
        let zeros = |columns: usize| vec![0.0; rows * columns];
        Scratch {
            x: block.iter().flat_map(|row| embed.row_f32(row.token as usize)).collect(),
            normed: zeros(c.plan.hidden),
            qkv: c.plan.attention.projections().map(zeros),
            attended: zeros(c.plan.attention.query_size()),
            gate_up: [(); 2].map(|()| zeros(c.plan.activation_size())),
            activation: zeros(c.plan.activation_size()),
            delta: zeros(c.plan.hidden),
            cos,
            sin,
        }
    }

    /// A GEMM of a layer, with the norm before it and its epilogue.
    fn gemm(&self, index: usize, gemm: Gemm, rows: usize, s: &mut Scratch) {
        let (layer, vectors) = (&self.weights.layers[index], &self.vectors.layers[index]);
        if gemm.input == Input::Normed {
            let norm = match gemm.matrix {
                plan::Matrix::Qkv => &vectors.input_norm,
                plan::Matrix::GateUp => &vectors.post_attention_norm,
                plan::Matrix::Output | plan::Matrix::Down | plan::Matrix::Head => {
                    unreachable!("in a layer {:?} reads no norm", gemm.matrix)
                }
            };
            self.norm(&s.x, norm, &mut s.normed);
        }
        let input = match gemm.input {
            Input::Normed => &s.normed,
            Input::Attended => &s.attended,
            Input::Activation => &s.activation,
        };
        match gemm.epilogue {
            Epilogue::Write { .. } => {
                let [q, k, v] = &mut s.qkv;
                self.project(input, rows, &mut [(layer.q, q), (layer.k, k), (layer.v, v)]);
                for (out, bias) in s.qkv.iter_mut().zip(vectors.qkv_bias.iter().flatten()) {
                    out.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
                }
            }
            Epilogue::Add => {
                let weight = match gemm.matrix {
                    plan::Matrix::Output => layer.o,
                    plan::Matrix::Down => layer.down,
                    plan::Matrix::Qkv | plan::Matrix::GateUp | plan::Matrix::Head => {
                        unreachable!("{:?} is added to nothing", gemm.matrix)
                    }
                };
                self.project(input, rows, &mut [(weight, &mut s.delta)]);
                add(&mut s.x, &s.delta);
            }
            Epilogue::SwiGlu => {
                let [gate, up] = &mut s.gate_up;
                self.project(input, rows, &mut [(layer.gate, gate), (layer.up, up)]);
                swiglu(gate, up, &mut s.activation);
            }
        }
    }

    /// Applies the norms of heads if there are any, rotates queries and keys, and writes keys and values into the
    /// cache.
    fn heads(&self, index: usize, heads: &plan::Attention, block: &[Row<'_>], s: &mut Scratch, pages: &mut KvPages) {
        let (half, size) = (heads.head_dim / 2, heads.key_value_size());
        let [q, k, v] = &mut s.qkv;
        for (x, norm) in [&mut *q, &mut *k].into_iter().zip(self.vectors.layers[index].head_norms.iter().flatten()) {
            self.norm_in_place(x, norm);
        }
        for (x, size) in [(&mut *q, heads.query_size()), (&mut *k, size)] {
            let angles = s.cos.chunks_exact(half).zip(s.sin.chunks_exact(half));
            for (row, (cos, sin)) in x.chunks_exact_mut(size).zip(angles) {
                rope::rotate(row, cos, sin);
            }
        }
        for (row, (key, value)) in block.iter().zip(k.chunks_exact(size).zip(v.chunks_exact(size))) {
            pages.write(index, row.pages, row.position, key, value);
        }
    }

    /// Final norm and head: `hidden` is `[rows, hidden]`, `logits` `[rows, vocab]`.
    fn head(&self, hidden: &[f32], logits: &mut [f32]) {
        let rows = hidden.len() / self.config().plan.hidden;
        if rows == 0 {
            return;
        }
        let mut normed = vec![0.0; hidden.len()];
        self.norm(hidden, &self.vectors.last_norm, &mut normed);
        self.project(&normed, rows, &mut [(self.weights.head, logits)]);
    }

    /// RMS norm of each row of `x`: `x / sqrt(mean(x²) + eps) × weight`. A row is as long as `weight`.
    fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        out.copy_from_slice(x);
        self.norm_in_place(out, weight);
    }

    fn norm_in_place(&self, x: &mut [f32], weight: &[f32]) {
        norm_in_place(self.simd, self.config().rms_norm_eps, x, weight);
    }

    /// Several linear maps of the same input: `x` is `[rows, inputs]`, each output `[rows, outputs]`.
    fn project(&self, x: &[f32], rows: usize, outputs: &mut [(Slot, &mut [f32])]) {
        let outputs = outputs.iter_mut().map(|(id, out)| Output { weight: self.matrix(*id), out });
        matmul(self.simd, x, rows, outputs.collect());
    }

    fn matrix(&self, slot: Slot) -> Matrix<'_> {
        stored(&self.checkpoint, &self.converted, slot)
    }
}

/// RMS norm of each row of `x`, in place. A row is as long as `weight`.
fn norm_in_place(simd: Simd, eps: f32, x: &mut [f32], weight: &[f32]) {
    for row in x.chunks_exact_mut(weight.len()) {
        let mean = dot::dot_f32(simd, row, row) / row.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        for (x, w) in row.iter_mut().zip(weight) {
            *x = *x * scale * w;
        }
    }
}

/// `silu(gate) × up` for each element.
fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *out = g / (1.0 + (-g).exp()) * u;
    }
}

/// The weight that a slot stands for.
fn stored<'a>(checkpoint: &'a Checkpoint, converted: &'a [Converted], slot: Slot) -> Matrix<'a> {
    match slot {
        Slot::Stored(id) => Matrix::new(&checkpoint.tensor_by_id(id)),
        Slot::Converted(index) => converted[index].matrix(),
    }
}

/// Records `place` if numbers of a row are not finite, unless an earlier place is recorded. The sum has no early exit,
/// so it vectorises.
fn note(found: &mut Option<Place>, place: Place, numbers: &[f32]) {
    if found.is_none() && numbers.iter().map(|x| u32::from(!x.is_finite())).sum::<u32>() > 0 {
        *found = Some(place);
    }
}

impl From<&Fault> for Error {
    fn from(fault: &Fault) -> Self {
        // Logits belong to the token that comes next.
        let position = fault.position + usize::from(fault.place == Place::Logits);
        Error::OutputNotFinite { what: fault.place.to_string(), position }
    }
}

fn add(x: &mut [f32], delta: &[f32]) {
    for (x, d) in x.iter_mut().zip(delta) {
        *x += d;
    }
}
