//! What a model computes, as data: the operators of a layer in order, with their sizes.
//!
//! Every way of running a model lowers this one list. The CPU path and the unfused path lower one operator at a time,
//! the fused paths several at a time. None of them asks for the model's name.
//!
//! ```text
//! Gemm Qkv      qkv = W·norm(x) [+ bias]     one matrix: queries, keys and values, one after another
//! Heads         q, k = rope([norm](q, k)), each head by itself; keys and values go to the cache
//! Attention     attended = softmax(q·kᵀ / √head_dim)·v
//! Gemm Output   x += W·attended
//! Gemm GateUp   activation = silu(G·norm(x)) ∘ U·norm(x)
//! Gemm Down     x += W·activation
//! ```
//!
//! # Adding a family
//! A family of models is a file of `family/`: the architecture's name in `config.json`, the defaults of its config in
//! transformers, the settings that it refuses, and its [`Traits`]. Put it into [`family::ALL`](crate::family::ALL),
//! add a case to `scripts/make_golden.py`, and every path is tested with it. A model that needs another operator needs
//! a variant of [`Operator`] or of [`FeedForward`] too, and each `match` on these then asks for its lowering.

use crate::Config;

/// What families differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traits {
    /// Whether each head of queries and keys has an RMS norm.
    pub head_norm: bool,
    /// Whether the projections of queries, keys and values have a bias.
    pub qkv_bias: bool,
}

/// A weight matrix of the model. The variants of a layer are in the order of the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// Queries, keys and values: `[qkv_size, hidden]`.
    Qkv,
    /// Attention's output: `[hidden, query_size]`.
    Output,
    /// Gates and ups of the feed-forward, two matrices of `[intermediate, hidden]`.
    GateUp,
    /// The feed-forward's output: `[hidden, intermediate]`.
    Down,
    /// The output head: `[vocab, hidden]`.
    Head,
}

impl Matrix {
    /// The matrices of a layer, in order.
    pub const OF_LAYER: [Self; 4] = [Self::Qkv, Self::Output, Self::GateUp, Self::Down];

    /// The matrix's number in the order of the forward pass. `layer` is the matrix's layer; for the head, the number of
    /// layers.
    pub const fn number(self, layer: usize) -> usize {
        let place = match self {
            Self::Qkv | Self::Head => 0,
            Self::Output => 1,
            Self::GateUp => 2,
            Self::Down => 3,
        };
        Self::OF_LAYER.len() * layer + place
    }
}

/// What a GEMM reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// The residual stream after an RMS norm: the layer's first or second norm, or the final one, whichever comes next.
    Normed,
    /// The output of attention.
    Attended,
    /// The activations of the feed-forward.
    Activation,
}

/// What a GEMM does with its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// Writes them, after adding a bias if there is one.
    Write {
        /// Whether there is a bias.
        bias: bool,
    },
    /// Adds them to the residual stream.
    Add,
    /// Writes `silu(gate) × up`.
    SwiGlu,
}

/// A GEMM with a weight matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gemm {
    /// The matrix.
    pub matrix: Matrix,
    /// What it is multiplied with.
    pub input: Input,
    /// What is done with the results.
    pub epilogue: Epilogue,
    /// Output features. With SwiGLU, those of the gates (or of the ups) alone.
    pub n: usize,
    /// Input features.
    pub k: usize,
}

impl Gemm {
    /// Rows of the weight matrix; with SwiGLU, of both matrices.
    pub const fn weight_rows(&self) -> usize {
        if matches!(self.epilogue, Epilogue::SwiGlu) { 2 * self.n } else { self.n }
    }

    /// Number of weights.
    pub const fn weights(&self) -> usize {
        self.weight_rows() * self.k
    }
}

/// One step of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operator {
    /// A GEMM with a weight matrix.
    Gemm(Gemm),
    /// Makes heads of the projections' outputs: applies norms to queries and keys if there are any, then the rotary
    /// embedding, and appends keys and values to the cache.
    Heads(Attention),
    /// Causal attention over the cache.
    Attention(Attention),
}

/// The heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention {
    /// Query heads.
    pub query_heads: usize,
    /// Key and value heads; divides the query heads.
    pub key_value_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Norms and biases.
    pub traits: Traits,
}

impl Attention {
    /// Columns of the query projection's output: query heads × head size.
    pub const fn query_size(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Columns of the key (or value) projection's output: key heads × head size.
    pub const fn key_value_size(&self) -> usize {
        self.key_value_heads * self.head_dim
    }

    /// Columns of the projections of queries, of keys, and of values.
    pub const fn projections(&self) -> [usize; 3] {
        [self.query_size(), self.key_value_size(), self.key_value_size()]
    }

    /// Columns of the projection of queries, keys and values together.
    pub const fn qkv_size(&self) -> usize {
        self.query_size() + 2 * self.key_value_size()
    }

    /// Query heads that share a key and value head.
    pub const fn group(&self) -> usize {
        self.query_heads / self.key_value_heads
    }
}

/// What comes after attention in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// `down(silu(gate(x)) ∘ up(x))`.
    SwiGlu {
        /// Width of the inner layer.
        intermediate: usize,
    },
}

/// What every layer of a model computes, with all sizes of a layer: a [`Config`] does not repeat them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerPlan {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Its heads.
    pub attention: Attention,
    /// What follows attention.
    pub feed_forward: FeedForward,
}

impl LayerPlan {
    /// Keeps the operators but changes the sizes: width of the residual stream, width of the feed-forward, and number
    /// of query heads and of key and value heads.
    pub const fn resize(&mut self, hidden: usize, intermediate: usize, (queries, keys): (usize, usize)) {
        self.hidden = hidden;
        self.feed_forward = FeedForward::SwiGlu { intermediate };
        (self.attention.query_heads, self.attention.key_value_heads) = (queries, keys);
    }

    /// Elements of a row of the feed-forward's activations: what its last GEMM reads.
    pub const fn activation_size(&self) -> usize {
        let FeedForward::SwiGlu { intermediate } = self.feed_forward;
        intermediate
    }

    /// The operators, in order.
    pub fn operators(&self) -> impl Iterator<Item = Operator> + use<> {
        let Self { hidden, attention, feed_forward } = *self;
        let (q, qkv, bias) = (attention.query_size(), attention.qkv_size(), attention.traits.qkv_bias);
        let gemm = |matrix, input, epilogue, [n, k]: [usize; 2]| Operator::Gemm(Gemm { matrix, input, epilogue, n, k });
        let FeedForward::SwiGlu { intermediate: inner } = feed_forward;
        [
            gemm(Matrix::Qkv, Input::Normed, Epilogue::Write { bias }, [qkv, hidden]),
            Operator::Heads(attention),
            Operator::Attention(attention),
            gemm(Matrix::Output, Input::Attended, Epilogue::Add, [hidden, q]),
            gemm(Matrix::GateUp, Input::Normed, Epilogue::SwiGlu, [inner, hidden]),
            gemm(Matrix::Down, Input::Activation, Epilogue::Add, [hidden, inner]),
        ]
        .into_iter()
    }

    /// The GEMMs of a layer, in order.
    pub fn gemms(&self) -> impl Iterator<Item = Gemm> + use<> {
        self.operators().filter_map(|operator| match operator {
            Operator::Gemm(gemm) => Some(gemm),
            Operator::Heads(_) | Operator::Attention(_) => None,
        })
    }

    /// Parameters of a layer beside its matrices: norms and biases.
    pub const fn vector_parameters(&self) -> usize {
        let Traits { head_norm, qkv_bias } = self.attention.traits;
        let heads = if head_norm { 2 * self.attention.head_dim } else { 0 };
        let biases = if qkv_bias { self.attention.qkv_size() } else { 0 };
        2 * self.hidden + heads + biases
    }
}

impl Config {
    /// The GEMM of the output head.
    pub const fn head(&self) -> Gemm {
        Gemm {
            matrix: Matrix::Head,
            input: Input::Normed,
            epilogue: Epilogue::Write { bias: false },
            n: self.vocab_size,
            k: self.plan.hidden,
        }
    }

    /// Every GEMM of a forward pass, in order: those of each layer, then the head.
    pub fn gemms(&self) -> impl Iterator<Item = Gemm> + use<> {
        let (plan, head) = (self.plan, self.head());
        (0..self.num_hidden_layers).flat_map(move |_| plan.gemms()).chain([head])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gemms_are_numbered_in_the_order_of_the_pass() {
        let config = Config::published("0.6B").unwrap();
        let per_layer = Matrix::OF_LAYER.len();
        for (i, gemm) in config.gemms().enumerate() {
            assert_eq!(gemm.matrix.number(i / per_layer), i, "{gemm:?}");
        }
        assert_eq!(config.gemms().count(), per_layer * config.num_hidden_layers + 1);
    }
}
