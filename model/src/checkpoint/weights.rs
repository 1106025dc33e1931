//! The typed view of a checkpoint: every weight of a model by its role, shapes checked.

use std::sync::Arc;

use super::{Checkpoint, EMBEDDING, HEAD, HEAD_LAYER, Store, TensorId};
use crate::format::{CheckpointFormat, Part, Quantization, QuantizedId, Weight, WeightId, WeightsMode};
use crate::plan::{LayerPlan, Matrix, Traits};
use crate::{Config, Dtype, Error};

/// Every weight of the model. Matrices are `[outputs, inputs]`, row-major, as PyTorch stores a `Linear`.
///
/// `T` is [`Weight`] for readers. An owner of the checkpoint that looks weights up later uses a handle.
#[derive(Debug, Clone)]
pub struct Weights<T> {
    /// Token embedding, `[vocab, hidden]`.
    pub embed: T,
    /// Decoder layers, first to last.
    pub layers: Vec<LayerWeights<T>>,
    /// Final RMS norm, `[hidden]`.
    pub norm: T,
    /// Output head, `[vocab, hidden]`; the embedding itself when they are tied.
    pub head: T,
}

/// Weights of one decoder layer.
#[derive(Debug, Clone)]
pub struct LayerWeights<T> {
    /// RMS norm before attention, `[hidden]`.
    pub input_norm: T,
    /// Query projection, `[heads × head_dim, hidden]`.
    pub q: T,
    /// Key projection, `[kv_heads × head_dim, hidden]`.
    pub k: T,
    /// Value projection, `[kv_heads × head_dim, hidden]`.
    pub v: T,
    /// Output projection, `[hidden, heads × head_dim]`.
    pub o: T,
    /// Biases of the query, key and value projections, each as long as its outputs; `None` if the plan has none.
    pub qkv_bias: Option<[T; 3]>,
    /// RMS norms of each query head and each key head, both `[head_dim]`; `None` if the plan has none.
    pub head_norms: Option<[T; 2]>,
    /// RMS norm before the MLP, `[hidden]`.
    pub post_attention_norm: T,
    /// SwiGLU gate, `[intermediate, hidden]`.
    pub gate: T,
    /// SwiGLU up, `[intermediate, hidden]`.
    pub up: T,
    /// SwiGLU down, `[hidden, intermediate]`.
    pub down: T,
}

impl<T> LayerWeights<T> {
    /// The weights that a matrix of the plan consists of, in the order of its output features. None for the head, which
    /// belongs to no layer.
    pub fn parts(&self, matrix: Matrix) -> Vec<&T> {
        match matrix {
            Matrix::Qkv => vec![&self.q, &self.k, &self.v],
            Matrix::Output => vec![&self.o],
            Matrix::GateUp => vec![&self.gate, &self.up],
            Matrix::Down => vec![&self.down],
            Matrix::Head => Vec::new(),
        }
    }
}

impl Checkpoint {
    /// Every weight by its role, in place (nothing is copied), with shapes checked against the config.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], [`Error::Shape`] or [`Error::WrongDtype`], but not after a successful
    /// [`Checkpoint::open`], which checks them.
    pub fn weights(&self) -> Result<Weights<Weight<'_>>, Error> {
        Ok(self.weight_ids()?.map(&mut |id| Weight::new(self, &id)))
    }

    /// As [`weights`](Self::weights), but returns handles, which borrow nothing.
    pub(crate) fn weight_ids(&self) -> Result<Weights<WeightId>, Error> {
        self.store.weight_ids(&self.config, self.mode)
    }
}

impl Store {
    /// Every weight that `c` calls for, its shape checked. The matrices of the layers are as `mode` makes them.
    pub(super) fn weight_ids(&self, c: &Config, mode: WeightsMode) -> Result<Weights<WeightId>, Error> {
        self.check_unexpected(c)?;
        let (LayerPlan { hidden, attention, .. }, inner) = (c.plan, c.plan.activation_size());
        let [q, kv, _] = attention.projections();
        let tied = c.tie_word_embeddings;
        // Tied weights may be stored under either name.
        let embedding = if tied && !self.has(EMBEDDING) && self.has(HEAD) { HEAD } else { EMBEDDING };
        let embed = WeightId::Plain(self.tensor_id(embedding, &[c.vocab_size, hidden])?);
        let layers = (0..c.num_hidden_layers)
            .map(|i| {
                let tensor = |name: &str, shape: &[usize]| {
                    self.tensor_id(&format!("model.layers.{i}.{name}"), shape).map(WeightId::Plain)
                };
                let get = |name: &str, shape: &[usize]| tensor(&format!("{name}.weight"), shape);
                let matrix = |name: &str, shape| self.matrix(c, mode, &format!("model.layers.{i}.{name}"), shape);
                let bias = |name: &str, n: usize| tensor(&format!("self_attn.{name}.bias"), &[n]);
                let norm = |name: &str| get(name, &[attention.head_dim]);
                Ok(LayerWeights {
                    input_norm: get("input_layernorm", &[hidden])?,
                    q: matrix("self_attn.q_proj", [q, hidden])?,
                    k: matrix("self_attn.k_proj", [kv, hidden])?,
                    v: matrix("self_attn.v_proj", [kv, hidden])?,
                    o: matrix("self_attn.o_proj", [hidden, q])?,
                    qkv_bias: match attention.traits.qkv_bias {
                        true => Some([bias("q_proj", q)?, bias("k_proj", kv)?, bias("v_proj", kv)?]),
                        false => None,
                    },
                    head_norms: match attention.traits.head_norm {
                        true => Some([norm("self_attn.q_norm")?, norm("self_attn.k_norm")?]),
                        false => None,
                    },
                    post_attention_norm: get("post_attention_layernorm", &[hidden])?,
                    gate: matrix("mlp.gate_proj", [inner, hidden])?,
                    up: matrix("mlp.up_proj", [inner, hidden])?,
                    down: matrix("mlp.down_proj", [hidden, inner])?,
                })
            })
            .collect::<Result<_, Error>>()?;
        let norm = WeightId::Plain(self.tensor_id("model.norm.weight", &[hidden])?);
        let head = match tied {
            true => embed.clone(),
            // A checkpoint may quantise the head; rounding while loading never does.
            false => self.matrix(c, WeightsMode::Plain, HEAD_LAYER, [c.vocab_size, hidden])?,
        };
        Ok(Weights { embed, layers, norm, head })
    }

    /// The matrix of a linear layer. The file decides whether the checkpoint has it quantised: a weight stored as
    /// floats is not, whatever the config names.
    fn matrix(&self, c: &Config, mode: WeightsMode, layer: &str, shape: [usize; 2]) -> Result<WeightId, Error> {
        let name = format!("{layer}.weight");
        let plain = self.by_name.get(&name).is_some_and(|id| self.tensors[id.0].dtype.is_float());
        if let (Some(quantization), false) = (&c.quantization, plain) {
            let mut first = None;
            for format in quantization.formats() {
                match self.quantized(layer, shape, format.clone()) {
                    Ok(id) => return Ok(id),
                    // If no format fits, the first one's error is reported.
                    Err(error) => first = first.or(Some(error)),
                }
            }
            if let Some(error) = first {
                return Err(error);
            }
        }
        match mode.rounding() {
            Some(rounded) => self.quantized(layer, shape, Arc::new(rounded)),
            None => self.tensor_id(&name, &shape).map(WeightId::Plain),
        }
    }

    /// The matrix of a linear layer in `format`. Checks that the format's tensors are there, with its number formats
    /// and shapes.
    fn quantized(&self, layer: &str, shape: [usize; 2], format: Arc<dyn CheckpointFormat>) -> Result<WeightId, Error> {
        let part = |part: Part| {
            let name = format!("{layer}.{}", part.suffix);
            if part.optional && !self.has(&name) {
                return Ok(None);
            }
            let id = self.lookup(&name)?;
            let stored = &self.tensors[id.0];
            if !part.dtypes.contains(&stored.dtype) {
                let dtypes: Vec<&str> = part.dtypes.iter().copied().map(Dtype::name).collect();
                let wanted = format!("it should be {} ({})", dtypes.join(" or "), format.name());
                return Err(self.wrong_dtype(id, wanted));
            }
            if !part.shapes.contains(&stored.shape) {
                return Err(self.wrong_shape(id, &part.shapes[0]));
            }
            Ok(Some(id))
        };
        let parts = format.parts(shape).into_iter().map(part).collect::<Result<_, Error>>()?;
        Ok(WeightId::Quantized(Arc::new(QuantizedId { name: format!("{layer}.weight"), shape, format, parts })))
    }

    /// Whether a tensor is a bias of zeros that the exporter of a quantised checkpoint added. A remote file's bytes are
    /// not at hand: there, such a bias counts as zeros.
    fn is_zero_bias(&self, c: &Config, id: TensorId) -> bool {
        let stored = &self.tensors[id.0];
        let adds = |quantization: &Quantization| quantization.formats().iter().any(|format| format.adds_zero_biases());
        let bytes = self.shards[stored.shard].bytes.get(stored.bytes.clone()).unwrap_or_default();
        stored.name.ends_with(".bias") && c.quantization.as_deref().is_some_and(adds) && bytes.iter().all(|&b| b == 0)
    }

    /// Bytes of all tensors of a weight.
    pub(super) fn bytes_of(&self, id: &WeightId) -> u64 {
        let bytes = |id: &TensorId| self.tensors[id.0].bytes.len() as u64;
        match id {
            WeightId::Plain(id) => bytes(id),
            WeightId::Quantized(id) => id.parts.iter().flatten().map(bytes).sum(),
        }
    }
}

impl Store {
    /// What to say of layers that the weights hold and the config does not count.
    pub(super) fn unused_layers(&self, c: &Config) -> Option<String> {
        let layer = |name: &String| name.strip_prefix("model.layers.")?.split_once('.')?.0.parse::<usize>().ok();
        let last = self.by_name.keys().filter_map(layer).max().filter(|last| *last >= c.num_hidden_layers)?;
        Some(format!(
            "{} holds a layer {last}, counted from 0, and config.json's num_hidden_layers is {}: the layers beyond are \
             not used; set num_hidden_layers to {} if they should be",
            self.listing.display(),
            c.num_hidden_layers,
            last + 1
        ))
    }

    /// Refuses norms and biases of layers that the plan does not have. To ignore them would compute another model.
    fn check_unexpected(&self, c: &Config) -> Result<(), Error> {
        const QKV_BIASES: [&str; 3] = ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"];
        const BIASES: [&str; 4] =
            ["self_attn.o_proj.bias", "mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"];
        const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"];
        let Traits { head_norm, qkv_bias } = c.plan.attention.traits;
        let kinds: [(bool, &[&str]); 3] = [(qkv_bias, &QKV_BIASES), (false, &BIASES), (head_norm, &HEAD_NORMS)];
        let unexpected = kinds.iter().filter(|(has, _)| !has).flat_map(|(_, names)| *names);
        for name in unexpected {
            for layer in 0..c.num_hidden_layers {
                let tensor = format!("model.layers.{layer}.{name}");
                if let Some(&id) = self.by_name.get(&tensor).filter(|id| !self.is_zero_bias(c, **id)) {
                    let path = self.path(id).to_owned();
                    return Err(Error::UnexpectedTensor { path, tensor, architecture: c.family.architecture });
                }
            }
        }
        Ok(())
    }
}

impl<T> Weights<T> {
    /// The same weights with `f` applied to each, in the order of the forward pass (a tied head comes twice).
    pub fn map<U>(self, f: &mut impl FnMut(T) -> U) -> Weights<U> {
        Weights {
            embed: f(self.embed),
            layers: self.layers.into_iter().map(|layer| layer.map(f)).collect(),
            norm: f(self.norm),
            head: f(self.head),
        }
    }
}

impl<T> LayerWeights<T> {
    fn map<U>(self, f: &mut impl FnMut(T) -> U) -> LayerWeights<U> {
        LayerWeights {
            input_norm: f(self.input_norm),
            q: f(self.q),
            k: f(self.k),
            v: f(self.v),
            o: f(self.o),
            qkv_bias: self.qkv_bias.map(|biases| biases.map(&mut *f)),
            head_norms: self.head_norms.map(|norms| norms.map(&mut *f)),
            post_attention_norm: f(self.post_attention_norm),
            gate: f(self.gate),
            up: f(self.up),
            down: f(self.down),
        }
    }
}
