//! The forward pass of an EAGLE-3 head, in f32 on the CPU; exact in the same sense as the model's own pass.
//!
//! A row of a head stands for a token of the text and the token after it. From three of the model's hidden states at
//! the first token (of a low, a middle and a high layer) and the embedding of the second, it predicts what comes after
//! both.
//!
//! ```text
//! h = fc·[low, middle, high]        of what follows a draft: h is the head's own h' of the row before
//! qkv = W·[norm(embedding), norm(h)]
//! h' = h + o·attention(qkv)         or norm(h) + …, if the head's residual stream begins there
//! h' += down·(silu(gate·norm(h')) ∘ up·norm(h'))
//! logits = head·norm(h')            of the head's own tokens
//! ```

use super::cache::{KvCache, KvPages};
use super::dot::Simd;
use super::matmul::{Matrix, Output, matmul};
use super::{BLOCK, Row, add, attention, norm_in_place, swiglu};
use crate::checkpoint::Tensor;
use crate::rope::{self, Frequencies};
use crate::{Checkpoint, Config, EagleHead, EagleWeights, Error};

/// An EAGLE-3 head made ready to run on the CPU. Weights stay in place, as they are stored.
#[derive(Debug, Clone)]
pub struct CpuEagle {
    head: EagleHead,
    /// The model that it drafts for; its embedding is used if the head has none of its own.
    model: Checkpoint,
    norms: Norms,
    frequencies: Frequencies,
    simd: Simd,
}

/// Weights of norms, widened once.
#[derive(Debug, Clone)]
struct Norms {
    input: Vec<f32>,
    hidden: Vec<f32>,
    post_attention: Vec<f32>,
    last: Vec<f32>,
}

/// The hidden states that rows of a head begin with.
#[derive(Debug, Clone, Copy)]
pub enum HiddenStates<'a> {
    /// The model's, at each row's first token, `[rows, 3, hidden]`.
    OfModel(&'a [f32]),
    /// The head's own, of the row before each row, `[rows, hidden]`.
    Own(&'a [f32]),
}

impl<'a> HiddenStates<'a> {
    /// The states of `count` rows, from row `first` on, for a head of this hidden size.
    fn of_rows(self, first: usize, count: usize, hidden: usize) -> Self {
        let part = |all: &'a [f32], size: usize| &all[first * size..][..count * size];
        match self {
            Self::OfModel(all) => Self::OfModel(part(all, 3 * hidden)),
            Self::Own(all) => Self::Own(part(all, hidden)),
        }
    }
}

impl CpuEagle {
    /// Prepares `head` to draft for `model`. Copies only the norms.
    ///
    /// # Errors
    /// [`Error::HeadDoesNotFit`].
    pub fn new(head: &EagleHead, model: &Checkpoint) -> Result<Self, Error> {
        head.taps(&model.config)?;
        model.embedding()?;
        let weights = head.weights();
        let wide = |tensor: Tensor<'_>| Matrix::new(&tensor).row_f32(0);
        let norms = Norms {
            input: wide(weights.input_norm),
            hidden: wide(weights.hidden_norm),
            post_attention: wide(weights.post_attention_norm),
            last: wide(weights.norm),
        };
        let frequencies = Frequencies::of(&head.config);
        Ok(Self { head: head.clone(), model: model.clone(), norms, frequencies, simd: Simd::detect() })
    }

    /// The head that this runs.
    pub fn head(&self) -> &EagleHead {
        &self.head
    }

    /// An empty cache for one sequence of up to `capacity` rows.
    pub fn new_cache(&self, capacity: usize) -> KvCache {
        KvCache::new(&self.head.config, capacity)
    }

    /// Runs rows after those in `cache`, and adds them to it. `tokens` holds each row's second token, `states` what
    /// each row begins with.
    ///
    /// `logits` receives the logits after the last row, `[draft_vocab]`; an empty slice asks for none. Returns the last
    /// row's own hidden state, `[hidden]`, with which the next row may begin. On an error the cache is as before.
    ///
    /// # Errors
    /// [`Error::TokenOutOfRange`], [`Error::CacheFull`], [`Error::LogitsBuffer`] for `logits` of another size, or
    /// [`Error::OutputNotFinite`].
    ///
    /// # Panics
    /// If there are no rows, or too few hidden states for them: a bug of the caller.
    pub fn forward(
        &self,
        tokens: &[u32],
        states: HiddenStates<'_>,
        cache: &mut KvCache,
        logits: &mut [f32],
    ) -> Result<Vec<f32>, Error> {
        let c = &self.head.config;
        let (start, vocab_size, hidden) = (cache.len(), self.head.draft_vocab_size, c.plan.hidden);
        if let Some(&token) = tokens.iter().find(|token| **token as usize >= c.vocab_size) {
            return Err(Error::TokenOutOfRange { token, vocab_size: c.vocab_size });
        }
        let needed = start + tokens.len();
        if needed > cache.capacity() {
            return Err(Error::CacheFull { capacity: cache.capacity(), needed });
        }
        if !logits.is_empty() && logits.len() != vocab_size {
            return Err(Error::LogitsBuffer { found: logits.len(), expected: vocab_size, rows: 1, vocab_size });
        }
        let mut last = Vec::new();
        for (block, tokens) in tokens.chunks(BLOCK).enumerate() {
            let first = block * BLOCK;
            let row = |(i, &token)| Row { token, position: start + first + i, pages: &[0], logits: false };
            let rows: Vec<Row<'_>> = tokens.iter().enumerate().map(row).collect();
            last = self.layer(&rows, states.of_rows(first, rows.len(), hidden), &mut cache.pages);
        }
        let last = last.split_off(last.len() - hidden);
        if !logits.is_empty() {
            let normed = self.normed(&last, &self.norms.last);
            self.project(&normed, 1, vec![(self.head.weights().head, logits)]);
        }
        if !last.iter().chain(logits.iter()).all(|x| x.is_finite()) {
            let what = "hidden states or logits of the EAGLE-3 head".to_owned();
            return Err(Error::OutputNotFinite { what, position: needed });
        }
        cache.advance(tokens.len());
        Ok(last)
    }

    /// Runs the layer over a block of rows. Returns the residual stream, `[rows, hidden]`.
    fn layer(&self, block: &[Row<'_>], states: HiddenStates<'_>, pages: &mut KvPages) -> Vec<f32> {
        let (c, w, rows) = (&self.head.config, self.head.weights(), block.len());
        let zeros = |columns: usize| vec![0.0; rows * columns];
        let mut x = match states {
            HiddenStates::Own(states) => states.to_vec(),
            HiddenStates::OfModel(states) => {
                let mut x = zeros(c.plan.hidden);
                self.project(states, rows, vec![(w.fc, &mut x)]);
                x
            }
        };
        let hidden = self.normed(&x, &self.norms.hidden);
        let pairs = self.pairs(block, &hidden, &w);
        if self.head.norm_before_residual {
            x = hidden;
        }
        let heads = c.plan.attention;
        let [mut q, mut k, mut v] = heads.projections().map(zeros);
        let outputs = w.qkv.into_iter().zip([&mut *q, &mut *k, &mut *v]);
        self.project(&pairs, rows, outputs.collect());
        self.heads(block, [&mut q, &mut k], &v, pages);
        let mut attended = zeros(heads.query_size());
        attention::attention(self.simd, &heads, &q, pages.layer(0), block, &mut attended);
        let mut delta = zeros(c.plan.hidden);
        self.project(&attended, rows, vec![(w.o, &mut delta)]);
        add(&mut x, &delta);
        let normed = self.normed(&x, &self.norms.post_attention);
        let [mut gate, mut up, mut activation] = [(); 3].map(|()| zeros(c.plan.activation_size()));
        self.project(&normed, rows, w.gate_up.into_iter().zip([&mut *gate, &mut *up]).collect());
        swiglu(&gate, &up, &mut activation);
        self.project(&activation, rows, vec![(w.down, &mut delta)]);
        add(&mut x, &delta);
        x
    }

    /// The input of the query, key and value projections: each row's normed embedding and normed hidden state,
    /// `[rows, 2 × hidden]`.
    fn pairs(&self, block: &[Row<'_>], hidden: &[f32], weights: &EagleWeights<Tensor<'_>>) -> Vec<f32> {
        let embed = weights.embed.or_else(|| self.model.embedding().ok()).expect("one or the other was checked");
        let embed = Matrix::new(&embed);
        let pair = |(row, hidden): (&Row<'_>, &[f32])| {
            let mut pair = self.normed(&embed.row_f32(row.token as usize), &self.norms.input);
            pair.extend_from_slice(hidden);
            pair
        };
        block.iter().zip(hidden.chunks_exact(self.config().plan.hidden)).flat_map(pair).collect()
    }

    /// Rotates queries and keys, and writes keys and values into the cache.
    fn heads(&self, block: &[Row<'_>], [q, k]: [&mut [f32]; 2], v: &[f32], pages: &mut KvPages) {
        let heads = self.config().plan.attention;
        let (half, size) = (heads.head_dim / 2, heads.key_value_size());
        let (mut cos, mut sin) = (vec![0.0; half], vec![0.0; half]);
        let queries = q.chunks_exact_mut(heads.query_size());
        let keys = k.chunks_exact_mut(size).zip(v.chunks_exact(size));
        for ((row, query), (key, value)) in block.iter().zip(queries).zip(keys) {
            self.frequencies.row(row.position, &mut cos, &mut sin);
            rope::rotate(query, &cos, &sin);
            rope::rotate(key, &cos, &sin);
            pages.write(0, row.pages, row.position, key, value);
        }
    }

    fn config(&self) -> &Config {
        &self.head.config
    }

    /// RMS norm of each row of `x`.
    fn normed(&self, x: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut out = x.to_vec();
        norm_in_place(self.simd, self.config().rms_norm_eps, &mut out, weight);
        out
    }

    /// Several linear maps of the same input: `x` is `[rows, inputs]`, each output `[rows, outputs]`.
    fn project(&self, x: &[f32], rows: usize, outputs: Vec<(Tensor<'_>, &mut [f32])>) {
        let outputs = outputs.into_iter().map(|(weight, out)| Output { weight: Matrix::new(&weight), out });
        matmul(self.simd, x, rows, outputs.collect());
    }
}
