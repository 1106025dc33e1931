//! EAGLE-3 draft heads on disk, in two forms: that of the original and of SpecForge (`LlamaForCausalLMEagle3`), and
//! that of `speculators`.
//!
//! A head is one layer that drafts for a model from the model's own hidden states (Li et al., 2025, "EAGLE-3: Scaling
//! up Inference Acceleration of Large Language Models via Training-Time Test"; tensors and settings as in
//! `eagle/model/cnets.py` of github.com/SafeAILab/EAGLE and `models/eagle3` of github.com/vllm-project/speculators).
//! [`CpuEagle`](crate::CpuEagle) computes it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::files::Files;
use super::{Checkpoint, Dtype, EMBEDDING, HEAD, INDEX, SINGLE, Store, Tensor, TensorId};
use crate::config::{brief, parse_json};
use crate::plan::LayerPlan;
use crate::{Config, Error};

/// Names of the original form in `architectures`; different programs write different ones.
const ARCHITECTURES: [&str; 2] = ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];
const SPECULATORS: &str = "speculators_model_type";
const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";
const LAYER: &str = "transformer_layer_config";
const OWN_EMBEDDING: &str = "embed_tokens.weight";

/// An EAGLE-3 head, checked. Cloning shares the weights.
#[derive(Debug, Clone)]
pub struct EagleHead {
    /// Sizes and constants of the head's layer. The vocabulary is that of the model that the head drafts for.
    pub config: Config,
    /// Number of tokens that the head can draft: rows of its output head.
    pub draft_vocab_size: usize,
    /// Whether the layer's residual stream begins with the normed hidden state (as in many heads of `speculators`)
    /// instead of the hidden state itself.
    pub norm_before_residual: bool,
    /// After how many layers of the model each hidden state is taken; `None` for the original's choice.
    taps: Option<[usize; 3]>,
    /// The model's token for each token of the head.
    targets: Arc<[u32]>,
    path: PathBuf,
    store: Arc<Store>,
    weights: EagleWeights<TensorId>,
}

/// The weights of a head. Matrices are `[outputs, inputs]`, as PyTorch stores a `Linear`.
#[derive(Debug, Clone, Copy)]
pub struct EagleWeights<T> {
    /// Token embedding, `[vocab, hidden]`; `None` if the head uses the model's.
    pub embed: Option<T>,
    /// Projection of three hidden states to one, `[hidden, 3 × hidden]`.
    pub fc: T,
    /// RMS norm of the embedding, `[hidden]`.
    pub input_norm: T,
    /// RMS norm of the hidden state, `[hidden]`.
    pub hidden_norm: T,
    /// Query, key and value projections of the embedding and the hidden state together,
    /// `[heads × head_dim, 2 × hidden]`. The embedding's columns come first.
    pub qkv: [T; 3],
    /// Output projection, `[hidden, heads × head_dim]`.
    pub o: T,
    /// RMS norm before the MLP, `[hidden]`.
    pub post_attention_norm: T,
    /// SwiGLU gate and up, `[intermediate, hidden]` each.
    pub gate_up: [T; 2],
    /// SwiGLU down, `[hidden, intermediate]`.
    pub down: T,
    /// Final RMS norm, `[hidden]`.
    pub norm: T,
    /// Output head, `[draft_vocab, hidden]`.
    pub head: T,
}

impl EagleHead {
    /// Opens the head in a directory: its `config.json` and `model.safetensors` (or shards). Checks names, shapes, the
    /// token map, and that every weight is finite.
    ///
    /// # Errors
    /// Any [`Error`] about files and their content; [`Error::NotAHead`] if the config describes something else.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        const FETCH: &str = "an EAGLE-3 head is a directory with config.json and model.safetensors; fetch the file, or \
                             name another directory";
        let files = Files::Dir(dir.to_owned());
        let path = files.path("config.json");
        let settings = Settings::parse(&files.require("config.json", FETCH)?, &path)?;
        if !files.has(SINGLE) && !files.has(INDEX) {
            const CONVERT: &str = "the weights of a head are read as safetensors; where there is a pytorch_model.bin \
                                   alone, convert it, or name a head that has them";
            return Err(Error::MissingFile { path: files.path(SINGLE), mend: CONVERT });
        }
        let store = Store::open(&files, &mut Vec::new())?;
        let weights = store.head_weights(&settings)?;
        store.check_finite(&|_| {})?;
        let targets = store.targets(&settings)?.into();
        let Settings { config, draft_vocab_size, norm_before_residual, taps } = settings;
        let store = Arc::new(store);
        Ok(Self { config, draft_vocab_size, norm_before_residual, taps, targets, path, store, weights })
    }

    /// After how many of the model's layers the head takes the residual stream as a hidden state; 0 would be the
    /// embedding. In the config's order, which is lowest first. Also checks that the head fits the model.
    ///
    /// If the head's config does not say, these are the original's: 2, n / 2 and n − 3 of n layers.
    ///
    /// # Errors
    /// [`Error::HeadDoesNotFit`] if sizes differ, or the model has too few layers.
    pub fn taps(&self, model: &Config) -> Result<[usize; 3], Error> {
        let unfit = |what, head: usize, model: usize| {
            Err(Error::HeadDoesNotFit {
                path: self.path.clone(),
                what,
                head: head.to_string(),
                model: model.to_string(),
            })
        };
        if self.config.vocab_size != model.vocab_size {
            return unfit("vocab_size", self.config.vocab_size, model.vocab_size);
        }
        if self.config.plan.hidden != model.plan.hidden {
            return unfit("hidden_size", self.config.plan.hidden, model.plan.hidden);
        }
        let layers = model.num_hidden_layers;
        match self.taps {
            Some(taps) => match taps.iter().max() {
                Some(&last) if last > layers => unfit("number of layers (at least)", last, layers),
                _ => Ok(taps),
            },
            None if layers < 7 => unfit("number of layers (at least)", 7, layers),
            None => Ok([2, layers / 2, layers - 3]),
        }
    }

    /// The model's token for each token of the head, `[draft_vocab]`.
    pub fn targets(&self) -> &[u32] {
        &self.targets
    }

    /// The head's weights, in place: nothing is copied.
    pub fn weights(&self) -> EagleWeights<Tensor<'_>> {
        self.weights.map(|id| self.store.tensor(id))
    }

    /// Parameters of the matrices that a pass reads. The embedding, of which a pass reads one row, and the norms do not
    /// count.
    pub fn pass_parameters(&self) -> usize {
        let EagleWeights { fc, qkv, o, gate_up, down, head, .. } = self.weights();
        let matrices = qkv.into_iter().chain(gate_up).chain([fc, o, down, head]);
        matrices.map(|tensor| tensor.shape.iter().product::<usize>()).sum()
    }
}

impl<T> EagleWeights<T> {
    /// The same weights with `f` applied to each.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> EagleWeights<U> {
        EagleWeights {
            embed: self.embed.map(&mut f),
            fc: f(self.fc),
            input_norm: f(self.input_norm),
            hidden_norm: f(self.hidden_norm),
            qkv: self.qkv.map(&mut f),
            o: f(self.o),
            post_attention_norm: f(self.post_attention_norm),
            gate_up: self.gate_up.map(&mut f),
            down: f(self.down),
            norm: f(self.norm),
            head: f(self.head),
        }
    }
}

impl Checkpoint {
    /// The embedding, `[vocab, hidden]`, which is never quantised.
    ///
    /// # Errors
    /// [`Error::MissingTensor`], but not after a successful [`Checkpoint::open`].
    pub(crate) fn embedding(&self) -> Result<Tensor<'_>, Error> {
        // Tied weights may be stored under either name.
        let name = if self.store.has(EMBEDDING) { EMBEDDING } else { HEAD };
        self.tensor(name)
    }
}

/// What a head's config says.
struct Settings {
    config: Config,
    draft_vocab_size: usize,
    norm_before_residual: bool,
    taps: Option<[usize; 3]>,
}

impl Settings {
    fn parse(json: &[u8], path: &Path) -> Result<Self, Error> {
        let fields: Map<String, Value> = parse_json(json, path)?;
        let text = |name: &str| fields.get(name).and_then(Value::as_str);
        let architectures = fields.get("architectures").and_then(Value::as_array);
        let named = architectures.and_then(|all| all.first()).and_then(Value::as_str);
        let layer = match (text(SPECULATORS), named) {
            (Some("eagle3"), _) => layer_of_speculators(&fields, path)?,
            (None, Some(name)) if ARCHITECTURES.contains(&name) => fields.clone(),
            (kind, name) => {
                let found = kind.or(name).or(text("model_type")).unwrap_or("nameless").to_owned();
                return Err(Error::NotAHead { path: path.to_owned(), found });
            }
        };
        let config = layer_config(layer, path)?;
        let draft_vocab_size = match fields.get("draft_vocab_size").filter(|value| !value.is_null()) {
            None => config.vocab_size,
            Some(value) => {
                let size =
                    value.as_u64().map(|size| size as usize).filter(|size| (1..=config.vocab_size).contains(size));
                size.ok_or_else(|| invalid("draft_vocab_size", value, "it must be from 1 to vocab_size", path))?
            }
        };
        let target_hidden = fields.get("target_hidden_size").filter(|value| !value.is_null());
        if let Some(size) = target_hidden.filter(|size| size.as_u64() != Some(config.plan.hidden as u64)) {
            const MEND: &str = "a head's hidden size must be its model's; use a head with the same";
            return Err(unsupported("target_hidden_size", size, MEND, path));
        }
        let switch = |name| fields.get(name).and_then(Value::as_bool).unwrap_or(false);
        if switch("norm_before_fc") {
            const MEND: &str = "no norm comes before fc here; use a head without one";
            return Err(unsupported("norm_before_fc", &Value::Bool(true), MEND, path));
        }
        Ok(Self {
            config,
            draft_vocab_size,
            norm_before_residual: switch("norm_before_residual"),
            taps: taps(&fields, path)?,
        })
    }
}

/// The settings of the layer of a `speculators` head. `speculators` leaves out settings that have the default of
/// transformers' `LlamaConfig`: they are filled in.
fn layer_of_speculators(fields: &Map<String, Value>, path: &Path) -> Result<Map<String, Value>, Error> {
    let layer = fields.get(LAYER).unwrap_or(&Value::Null);
    let Some(object) = layer.as_object() else {
        return Err(invalid(LAYER, layer, "it must be an object, the config of the head's layer", path));
    };
    let mut all = Map::new();
    for (name, default) in [
        ("vocab_size", 32_000),
        ("hidden_size", 4096),
        ("intermediate_size", 11_008),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
    ] {
        all.insert(name.to_owned(), json!(default));
    }
    all.extend(object.clone());
    Ok(all)
}

/// The config of a head's layer, parsed as that of a Llama with one layer.
fn layer_config(mut layer: Map<String, Value>, path: &Path) -> Result<Config, Error> {
    let known = |name: &str, value: &Value| match name {
        "model_type" => value == "llama",
        "num_hidden_layers" => value == 1,
        _ => value.is_null(),
    };
    for (name, mend) in [
        ("model_type", "heads with a layer of Llama are run; use one of these"),
        ("num_hidden_layers", "heads of one layer are run; use one of these"),
        ("quantization_config", "heads in bf16, f16 or f32 are run; use one of these"),
    ] {
        if let Some(value) = layer.get(name).filter(|value| !known(name, value)) {
            return Err(unsupported(name, value, mend, path));
        }
    }
    layer.insert("architectures".to_owned(), json!(["LlamaForCausalLM"]));
    layer.insert("model_type".to_owned(), json!("llama"));
    Config::parse(Value::Object(layer).to_string().as_bytes(), path)
}

/// After how many layers hidden states are taken, if the config says.
fn taps(fields: &Map<String, Value>, path: &Path) -> Result<Option<[usize; 3]>, Error> {
    let eagle = fields.get("eagle_config").and_then(Value::as_object);
    if let Some(used) = eagle.and_then(|eagle| eagle.get("use_aux_hidden_state")).filter(|used| **used == json!(false))
    {
        return Err(unsupported(
            "use_aux_hidden_state",
            used,
            "EAGLE-3 takes three hidden states; use such a head",
            path,
        ));
    }
    // SpecForge lists the layers whose outputs are taken, counted from 0: one more is the number of layers before the
    // state. `speculators` lists the layer that comes next, which is that number.
    let listed = [(eagle.and_then(|eagle| eagle.get(LAYER_IDS)), 1), (fields.get(LAYER_IDS), 0)];
    let Some((ids, behind)) = listed.into_iter().find_map(|(ids, behind)| Some((ids?, behind))) else {
        return Ok(None);
    };
    if ids.is_null() {
        return Ok(None);
    }
    let numbers = ids.as_array().map(|ids| ids.iter().map(|id| id.as_u64().filter(|&id| id < 1 << 12)));
    let taps: Option<Vec<usize>> = numbers.and_then(|ids| ids.map(|id| Some(id? as usize + behind)).collect());
    match taps.and_then(|taps| taps.try_into().ok()) {
        Some(taps) => Ok(Some(taps)),
        None => Err(invalid(LAYER_IDS, ids, "it must list three layers", path)),
    }
}

fn invalid(field: &'static str, value: &Value, reason: &'static str, path: &Path) -> Error {
    Error::InvalidSetting { path: path.to_owned(), field, value: brief(value), reason }
}

fn unsupported(field: &'static str, value: &Value, mend: &'static str, path: &Path) -> Error {
    Error::UnsupportedSetting { path: path.to_owned(), field, value: brief(value), mend }
}

impl Store {
    /// Every weight of a head, its shape checked. Refuses tensors that a head does not have.
    fn head_weights(&self, settings: &Settings) -> Result<EagleWeights<TensorId>, Error> {
        let c = &settings.config;
        let (LayerPlan { hidden, attention, .. }, inner) = (c.plan, c.plan.activation_size());
        let [q, kv, _] = attention.projections();
        let layer = if self.has("layers.0.hidden_norm.weight") { "layers.0" } else { "midlayer" };
        let mut known = Vec::new();
        let mut get = |name: String, shape: &[usize]| {
            let id = self.tensor_id(&name, shape);
            known.push(name);
            id
        };
        let of_layer = |name: &str| format!("{layer}.{name}.weight");
        let mut project = |name: &str, outputs| get(of_layer(&format!("self_attn.{name}")), &[outputs, 2 * hidden]);
        let qkv = [project("q_proj", q)?, project("k_proj", kv)?, project("v_proj", kv)?];
        let weights = EagleWeights {
            embed: match self.has(OWN_EMBEDDING) {
                true => Some(get(OWN_EMBEDDING.to_owned(), &[c.vocab_size, hidden])?),
                false => None,
            },
            fc: get("fc.weight".to_owned(), &[hidden, 3 * hidden])?,
            input_norm: get(of_layer("input_layernorm"), &[hidden])?,
            hidden_norm: get(of_layer("hidden_norm"), &[hidden])?,
            qkv,
            o: get(of_layer("self_attn.o_proj"), &[hidden, q])?,
            post_attention_norm: get(of_layer("post_attention_layernorm"), &[hidden])?,
            gate_up: [
                get(of_layer("mlp.gate_proj"), &[inner, hidden])?,
                get(of_layer("mlp.up_proj"), &[inner, hidden])?,
            ],
            down: get(of_layer("mlp.down_proj"), &[hidden, inner])?,
            norm: get("norm.weight".to_owned(), &[hidden])?,
            head: get(HEAD.to_owned(), &[settings.draft_vocab_size, hidden])?,
        };
        // Some files also hold `inv_freq`, from which the rotary embedding is computed.
        let is_known = |name: &str| {
            known.iter().any(|k| k == name) || ["d2t", "t2d"].contains(&name) || name.ends_with("rotary_emb.inv_freq")
        };
        match self.tensors().find(|tensor| !is_known(tensor.name)) {
            None => Ok(weights),
            Some(tensor) => Err(Error::UnexpectedTensor {
                path: self.listing.clone(),
                tensor: tensor.name.to_owned(),
                architecture: ARCHITECTURES[0],
            }),
        }
    }

    /// The model's token for each token of the head: the head's token plus its entry in `d2t`. Without `d2t` the tokens
    /// are the same.
    fn targets(&self, settings: &Settings) -> Result<Vec<u32>, Error> {
        let (tokens, vocab) = (settings.draft_vocab_size, settings.config.vocab_size);
        if !self.has("d2t") && tokens == vocab {
            return Ok((0..tokens as u32).collect());
        }
        let offsets = self.list("d2t", tokens, Dtype::I64)?;
        let known = if self.has("t2d") { Some(self.list("t2d", vocab, Dtype::Bool)?.data) } else { None };
        let words = offsets.data.as_chunks().0;
        let target = |(token, word): (usize, &[u8; 8])| {
            let target = i64::from_le_bytes(*word).checked_add(token as i64).and_then(|id| usize::try_from(id).ok());
            let target = target.filter(|&id| id < vocab && known.is_none_or(|known| known[id] != 0));
            target.map(|id| id as u32).ok_or_else(|| Error::HeadToken {
                path: self.listing.clone(),
                token,
                offset: i64::from_le_bytes(*word),
                vocab,
            })
        };
        words.iter().enumerate().map(target).collect()
    }

    /// The vector `name`, checked to have `len` elements of `dtype`.
    fn list(&self, name: &str, len: usize, dtype: Dtype) -> Result<Tensor<'_>, Error> {
        let id = self.lookup(name)?;
        let tensor = self.tensor(id);
        if tensor.shape != [len] {
            return Err(self.wrong_shape(id, &[len]));
        }
        if tensor.dtype != dtype {
            return Err(self.wrong_dtype(id, format!("it should be {dtype}")));
        }
        Ok(tensor)
    }
}
