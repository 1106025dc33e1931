//! `config.json` and `generation_config.json`: the sizes of a dense model and its default sampling.

mod rope;

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::Error;
use crate::family::{Family, Fields};
use crate::format::Quantization;
use crate::plan::{Attention, FeedForward, LayerPlan, Traits};
use crate::rope::Scaling;
use crate::sampling::Sampling;

/// Sizes and constants of a dense model, checked: every size is positive, heads divide evenly.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The model's family, for messages alone.
    pub family: &'static Family,
    /// What each layer computes, with all its sizes.
    pub plan: LayerPlan,
    /// Rows of the embedding; token ids are below this.
    pub vocab_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Longest sequence that the model was made for, in tokens. With YaRN, the length that the scaling extends it to.
    pub max_position_embeddings: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary position embedding.
    pub rope_theta: f64,
    /// How the rotary embedding is scaled, if it is.
    pub rope_scaling: Option<Scaling>,
    /// Whether the head is the embedding itself.
    pub tie_word_embeddings: bool,
    /// The formats of quantised matrices, if `quantization_config` names any.
    pub quantization: Option<Arc<Quantization>>,
    /// End-of-sequence ids that `config.json` itself names (often overruled by `generation_config.json`).
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Reads and checks the text of a `config.json`; `path` is for error messages.
    ///
    /// # Errors
    /// [`Error::Json`], [`Error::UnsupportedArchitecture`], [`Error::UnsupportedSetting`] or [`Error::InvalidSetting`].
    pub fn parse(json: &[u8], path: &Path) -> Result<Self, Error> {
        // The architecture first: another model's config may lack fields that `RawConfig` requires.
        let which: Architecture = parse_json(json, path)?;
        let family = Family::of(which.architectures.as_deref(), which.model_type.as_deref(), path)?;
        let raw: RawConfig = parse_json(json, path)?;
        raw.check_supported(path)?;
        let fields: Map<String, Value> = parse_json(json, path)?;
        let traits = (family.read)(&Fields { all: &fields, path })?;
        let positions = raw.max_position_embeddings.unwrap_or(family.max_position_embeddings);
        let rope = rope::read(&fields, positions, path)?;
        let head_dim = raw.head_dim.or(family.head_dim);
        let scaled = rope.scaling.map_or(0, |scaling| scaling.positions());
        let config = Config {
            family,
            plan: LayerPlan {
                hidden: raw.hidden_size,
                attention: Attention {
                    query_heads: raw.num_attention_heads,
                    key_value_heads: raw.num_key_value_heads.unwrap_or(raw.num_attention_heads),
                    // Zero heads must not divide by zero; `check` below reports them.
                    head_dim: head_dim.unwrap_or(raw.hidden_size / raw.num_attention_heads.max(1)),
                    traits,
                },
                feed_forward: FeedForward::SwiGlu { intermediate: raw.intermediate_size },
            },
            vocab_size: raw.vocab_size,
            num_hidden_layers: raw.num_hidden_layers,
            max_position_embeddings: positions.max(scaled),
            rms_norm_eps: raw.rms_norm_eps,
            rope_theta: rope.theta,
            rope_scaling: rope.scaling,
            tie_word_embeddings: raw.tie_word_embeddings,
            quantization: match raw.quantization_config.as_ref() {
                None | Some(Value::Null) => None,
                Some(value) => Some(Arc::new(Quantization::parse(value, path)?)),
            },
            eos_token_ids: raw.eos_token_id.map(OneOrMany::into_vec).unwrap_or_default(),
        };
        config.check(path)?;
        Ok(config)
    }

    /// The published dense Qwen3 models, by what their names end in.
    pub const PUBLISHED: [&'static str; 6] = ["0.6B", "1.7B", "4B", "8B", "14B", "32B"];

    /// The config of a [published](Self::PUBLISHED) model, as in its `config.json`; `None` for other names.
    pub fn published(name: &str) -> Option<Self> {
        let (hidden, intermediate, layers, heads, tied) = match name {
            "0.6B" => (1024, 3072, 28, 16, true),
            "1.7B" => (2048, 6144, 28, 16, true),
            "4B" => (2560, 9728, 36, 32, true),
            "8B" => (4096, 12_288, 36, 32, false),
            "14B" => (5120, 17_408, 40, 40, false),
            "32B" => (5120, 25_600, 64, 64, false),
            _ => return None,
        };
        Some(Self {
            family: Family::QWEN3,
            plan: LayerPlan {
                hidden,
                attention: Attention {
                    query_heads: heads,
                    key_value_heads: 8,
                    head_dim: 128,
                    traits: Traits { head_norm: true, qkv_bias: false },
                },
                feed_forward: FeedForward::SwiGlu { intermediate },
            },
            vocab_size: 151_936,
            num_hidden_layers: layers,
            max_position_embeddings: 40_960,
            rms_norm_eps: 1e-6,
            rope_theta: 1e6,
            rope_scaling: None,
            tie_word_embeddings: tied,
            quantization: None,
            eos_token_ids: vec![151_645],
        })
    }

    /// Parameters of the whole model, a tied head counted once.
    pub fn parameter_count(&self) -> usize {
        let embeddings = self.vocab_size * self.plan.hidden * if self.tie_word_embeddings { 1 } else { 2 };
        let matrices: usize = self.plan.gemms().map(|gemm| gemm.weights()).sum();
        embeddings + self.num_hidden_layers * (matrices + self.plan.vector_parameters()) + self.plan.hidden
    }

    /// Bytes of all weights when each takes `bytes_per_weight` (2 for bf16).
    pub fn weight_bytes(&self, bytes_per_weight: usize) -> usize {
        self.parameter_count() * bytes_per_weight
    }

    /// Bytes of the weights that a decode step reads: all but an untied embedding, of which it reads a row.
    pub fn step_weight_bytes(&self, bytes_per_weight: usize) -> usize {
        let rows_alone = if self.tie_word_embeddings { 0 } else { self.vocab_size * self.plan.hidden };
        (self.parameter_count() - rows_alone) * bytes_per_weight
    }

    /// Bytes of keys and values that one token adds to the cache, over all layers, at `bytes_per_element` (2 for bf16).
    pub fn kv_bytes_per_token(&self, bytes_per_element: usize) -> usize {
        2 * self.num_hidden_layers * self.plan.attention.key_value_size() * bytes_per_element
    }

    fn check(&self, path: &Path) -> Result<(), Error> {
        let invalid =
            |field, value: String, reason| Error::InvalidSetting { path: path.to_owned(), field, value, reason };
        // The upper bound keeps every product of sizes far from overflow; the largest real dimension is 151,936.
        const LARGEST: usize = 1 << 24;
        let Attention { query_heads, key_value_heads, head_dim, .. } = self.plan.attention;
        for (field, size) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.plan.hidden),
            ("intermediate_size", self.plan.activation_size()),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", query_heads),
            ("num_key_value_heads", key_value_heads),
            ("head_dim", head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            let limit =
                if matches!(field, "num_hidden_layers" | "num_attention_heads" | "num_key_value_heads" | "head_dim") {
                    1 << 12
                } else {
                    LARGEST
                };
            if size == 0 || size > limit {
                return Err(invalid(field, size.to_string(), "it must be positive and of a sensible size"));
            }
        }
        if !query_heads.is_multiple_of(key_value_heads) {
            return Err(invalid(
                "num_key_value_heads",
                key_value_heads.to_string(),
                "it must divide num_attention_heads",
            ));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(invalid(
                "head_dim",
                head_dim.to_string(),
                "it must be even, since rotary embedding turns pairs",
            ));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Err(invalid("rms_norm_eps", self.rms_norm_eps.to_string(), "it must lie between 0 and 1"));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return Err(invalid("rope_theta", self.rope_theta.to_string(), "it must be a number above 1"));
        }
        Ok(())
    }
}

/// Default sampling of a checkpoint. What the files do not say is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids that end a reply; from `generation_config.json`, else `config.json`, else the tokenizer's `eos_token`.
    pub eos_token_ids: Vec<u32>,
    /// Whether the checkpoint wants sampling at all (`false` is greedy).
    pub do_sample: Option<bool>,
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Number of most likely tokens kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Share of the probability kept (nucleus sampling).
    pub top_p: Option<f32>,
    /// Least probability kept, as a share of the greatest probability.
    pub min_p: Option<f32>,
    /// Hugging Face's repetition penalty.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads the text of a `generation_config.json`; `path` is for error messages.
    ///
    /// # Errors
    /// [`Error::Json`] or [`Error::InvalidSetting`].
    pub fn parse(json: &[u8], path: &Path) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Raw {
            eos_token_id: Option<OneOrMany>,
            do_sample: Option<bool>,
            temperature: Option<f32>,
            top_k: Option<i64>,
            top_p: Option<f32>,
            min_p: Option<f32>,
            repetition_penalty: Option<f32>,
        }
        let raw: Raw = parse_json(json, path)?;
        // -1 keeps all tokens, as in requests; so does 0.
        let top_k = raw.top_k.map(|k| if k == -1 { Ok(0) } else { u32::try_from(k) }).transpose();
        let top_k = top_k.map_err(|_| Error::InvalidSetting {
            path: path.to_owned(),
            field: "top_k",
            value: raw.top_k.unwrap_or_default().to_string(),
            reason: "it must be a number of tokens, or 0 or -1 for all",
        })?;
        let neutral = Sampling::default();
        let sampling = Sampling {
            temperature: raw.temperature.unwrap_or(neutral.temperature),
            top_p: raw.top_p.unwrap_or(neutral.top_p),
            min_p: raw.min_p.unwrap_or(neutral.min_p),
            repetition_penalty: raw.repetition_penalty.unwrap_or(neutral.repetition_penalty),
            ..neutral
        };
        sampling.check().map_err(|error| match error {
            Error::SamplingRange { setting, value, reason } => {
                Error::InvalidSetting { path: path.to_owned(), field: setting, value: value.to_string(), reason }
            }
            other => other,
        })?;
        Ok(GenerationConfig {
            eos_token_ids: raw.eos_token_id.map(OneOrMany::into_vec).unwrap_or_default(),
            do_sample: raw.do_sample,
            temperature: raw.temperature,
            top_k,
            top_p: raw.top_p,
            min_p: raw.min_p,
            repetition_penalty: raw.repetition_penalty,
        })
    }
}

/// Parses JSON into `T`, with the file named in the error.
pub(crate) fn parse_json<'a, T: Deserialize<'a>>(json: &'a [u8], path: &Path) -> Result<T, Error> {
    serde_json::from_slice(json).map_err(|e| Error::Json { path: path.to_owned(), reason: e.to_string() })
}

/// A field that is either one id or a list of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "an end token is an id or a list of ids")]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<u32> {
        match self {
            OneOrMany::One(id) => vec![id],
            OneOrMany::Many(ids) => ids,
        }
    }
}

#[derive(Deserialize)]
struct Architecture {
    #[serde(default)]
    architectures: Option<Vec<String>>,
    #[serde(default)]
    model_type: Option<String>,
}

/// The fields of `config.json` that matter, by the names they have there.
#[derive(Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
    eos_token_id: Option<OneOrMany>,
    hidden_act: Option<String>,
    quantization_config: Option<Value>,
}

/// The default of every family in transformers.
fn default_eps() -> f32 {
    1e-6
}

impl RawConfig {
    fn check_supported(&self, path: &Path) -> Result<(), Error> {
        let refuse =
            |field, value: String, mend| Err(Error::UnsupportedSetting { path: path.to_owned(), field, value, mend });
        if let Some(act) = self.hidden_act.as_deref().filter(|a| *a != "silu") {
            return refuse("hidden_act", format!("{act:?}"), "use a checkpoint with silu, as published ones are");
        }
        Ok(())
    }
}

/// A JSON value short enough for a sentence.
pub(crate) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
