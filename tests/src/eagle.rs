//! EAGLE-3 heads for tests, made as `scripts/make_golden_eagle.py` makes them, and models that are easy to draft for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::bf16;
use model::{Checkpoint, EagleHead};
use serde_json::{Value, json};

use super::golden_dir;

const VOCAB: usize = 288;
const HIDDEN: usize = 128;
const INNER: usize = 128;
const HEADS: usize = 2;
const HEAD_DIM: usize = 128;
/// Tokens that the random heads know: of every three of the model's the first.
pub const DRAFT_VOCAB: usize = 96;

/// What a head's weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyntheticWeights {
    /// Pseudo-random numbers, those of the golden cases: what it drafts is mostly wrong.
    Random {
        /// Of the numbers.
        seed: u32,
    },
    /// Those with which it says what the [model](Model) says that has no layers.
    Bigrams,
}

/// A head for a [`Model`], in one of the two forms.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// Its weights.
    pub weights: SyntheticWeights,
    /// Whether it is in the form of `speculators`.
    pub speculators: bool,
    /// As in its config.
    pub norm_before_residual: bool,
    /// Whether it has an embedding of its own.
    pub own_embedding: bool,
    /// After how many layers it takes hidden states.
    pub taps: [usize; 3],
}

impl Head {
    /// The golden case `original`.
    pub const ORIGINAL: Self = Self {
        weights: SyntheticWeights::Random { seed: 1 },
        speculators: false,
        norm_before_residual: false,
        own_embedding: false,
        taps: [1, 2, 2],
    };
    /// The golden case `speculators`.
    pub const SPECULATORS: Self = Self {
        weights: SyntheticWeights::Random { seed: 2 },
        speculators: true,
        norm_before_residual: true,
        own_embedding: true,
        taps: [0, 1, 2],
    };
    /// One that is right wherever the layers of a model do not matter: the residual stream begins at zero, and gets
    /// the embedding alone.
    pub const BIGRAMS: Self = Self { weights: SyntheticWeights::Bigrams, norm_before_residual: true, ..Self::ORIGINAL };
}

/// Tensors by name: shape and bf16 numbers.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<bf16>)>;

/// A checkpoint in a folder of its own, which goes when this is dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("warpdraft-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        Self(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Replaces the file of this name.
    pub fn put(&self, name: &str, content: impl AsRef<[u8]>) {
        std::fs::write(self.0.join(name), content).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A pseudo-random number from `mean - spread` to `mean + spread`: a hash of its place in its tensor.
fn number(seed: u32, tensor: u32, place: u32, mean: f32, spread: f32) -> bf16 {
    let start = seed.wrapping_mul(0x85EB_CA6B).wrapping_add(tensor.wrapping_mul(0xC2B2_AE35));
    let mut h = place.wrapping_mul(0x9E37_79B9).wrapping_add(start);
    h = (h ^ h >> 16).wrapping_mul(0x7FEB_352D);
    h = (h ^ h >> 15).wrapping_mul(0x846C_A68B);
    h ^= h >> 16;
    let unit = (h >> 8) as f32 / (1 << 23) as f32 - 1.0;
    bf16::from_f32(mean + spread * unit)
}

impl Head {
    /// The tokens of the model that it knows.
    fn targets(&self) -> Vec<usize> {
        match self.weights {
            SyntheticWeights::Random { .. } => (0..DRAFT_VOCAB).map(|i| 3 * i).collect(),
            SyntheticWeights::Bigrams => (0..VOCAB).collect(),
        }
    }

    /// Its weights by the names of the original, in the order of their numbers.
    fn shapes(&self) -> Vec<(&'static str, Vec<usize>)> {
        let (q, kv) = (HEADS * HEAD_DIM, HEAD_DIM);
        vec![
            ("fc", vec![HIDDEN, 3 * HIDDEN]),
            ("midlayer.self_attn.q_proj", vec![q, 2 * HIDDEN]),
            ("midlayer.self_attn.k_proj", vec![kv, 2 * HIDDEN]),
            ("midlayer.self_attn.v_proj", vec![kv, 2 * HIDDEN]),
            ("midlayer.self_attn.o_proj", vec![HIDDEN, q]),
            ("midlayer.mlp.gate_proj", vec![INNER, HIDDEN]),
            ("midlayer.mlp.up_proj", vec![INNER, HIDDEN]),
            ("midlayer.mlp.down_proj", vec![HIDDEN, INNER]),
            ("lm_head", vec![self.targets().len(), HIDDEN]),
            ("midlayer.input_layernorm", vec![HIDDEN]),
            ("midlayer.hidden_norm", vec![HIDDEN]),
            ("midlayer.post_attention_layernorm", vec![HIDDEN]),
            ("norm", vec![HIDDEN]),
            ("embed_tokens", vec![VOCAB, HIDDEN]),
        ]
    }

    fn tensors(&self) -> Tensors {
        let model = Model::tensors();
        let tensor = |(i, (name, shape)): (usize, (&str, Vec<usize>))| {
            let (len, k) = (shape.iter().product::<usize>(), shape[shape.len() - 1]);
            let (mean, spread) = if shape.len() == 1 { (1.0, 0.3) } else { (0.0, (3.0 / k as f64).sqrt() as f32) };
            let numbers = match self.weights {
                SyntheticWeights::Random { seed } => {
                    (0..len as u32).map(|place| number(seed, i as u32, place, mean, spread)).collect()
                }
                // The first query head finds the row itself, whose value is the normed embedding.
                SyntheticWeights::Bigrams => match name {
                    "lm_head" => model["model.embed_tokens.weight"].1.clone(),
                    "norm" => Model::last_norm(),
                    "midlayer.hidden_norm" => vec![bf16::ZERO; len],
                    _ if shape.len() == 1 => vec![bf16::ONE; len],
                    "midlayer.self_attn.q_proj" | "midlayer.self_attn.k_proj" => diagonal(&shape, 2.0),
                    "midlayer.self_attn.v_proj" | "midlayer.self_attn.o_proj" => diagonal(&shape, 1.0),
                    _ => vec![bf16::ZERO; len],
                },
            };
            let name = if self.speculators { name.replace("midlayer", "layers.0") } else { name.to_owned() };
            (format!("{name}.weight"), (shape, numbers))
        };
        let mut tensors: Tensors = self.shapes().into_iter().enumerate().map(tensor).collect();
        if !self.own_embedding {
            tensors.remove("embed_tokens.weight");
        }
        tensors
    }

    /// Its `config.json`.
    pub fn config(&self) -> Value {
        let layer = json!({
            "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
            "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "hidden_act": "silu",
        });
        let sizes =
            json!({"draft_vocab_size": self.targets().len(), "norm_before_residual": self.norm_before_residual});
        let (mut config, sizes) = match self.speculators {
            true => {
                let mut layer = layer;
                // What transformers has by itself is left out.
                layer.as_object_mut().expect("an object").remove("rms_norm_eps");
                let own = json!({
                    "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
                    "transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": self.taps,
                });
                (own, sizes)
            }
            false => {
                let mut own = layer;
                own["architectures"] = json!(["LlamaForCausalLMEagle3"]);
                let ids = self.taps.map(|tap| tap - 1);
                own["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": true});
                (own, sizes)
            }
        };
        config.as_object_mut().expect("an object").extend(sizes.as_object().expect("an object").clone());
        config
    }

    /// Writes it to a folder.
    ///
    /// # Panics
    /// If there is no room.
    pub fn write(&self) -> Folder {
        let folder = Folder::new("head");
        folder.put("config.json", self.config().to_string());
        let targets = self.targets();
        let offsets = targets.iter().enumerate().flat_map(|(i, &target)| (target as i64 - i as i64).to_le_bytes());
        let known = (0..VOCAB).map(|token| u8::from(targets.contains(&token)));
        let lists = [
            ("d2t", "I64", vec![targets.len()], offsets.collect::<Vec<u8>>()),
            ("t2d", "BOOL", vec![VOCAB], known.collect()),
        ];
        folder.put("model.safetensors", safetensors(&self.tensors(), &lists));
        folder
    }

    /// Writes it, and opens it.
    ///
    /// # Panics
    /// If it does not open.
    pub fn open(&self) -> (Folder, EagleHead) {
        let folder = self.write();
        let head = EagleHead::open(folder.path()).unwrap_or_else(|e| panic!("{e}"));
        (folder, head)
    }
}

/// A matrix of zeros with this on its diagonal.
fn diagonal(shape: &[usize], value: f32) -> Vec<bf16> {
    let mut numbers = vec![bf16::ZERO; shape[0] * shape[1]];
    (0..shape[0].min(shape[1])).for_each(|i| numbers[i * shape[1] + i] = bf16::from_f32(value));
    numbers
}

/// The golden model `tied_bf16`, with less of its layers.
#[derive(Clone, Copy, Debug)]
pub struct Model;

impl Model {
    fn tensors() -> Tensors {
        let path = golden_dir().join("tied_bf16/model.safetensors");
        let data = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let (length, rest) = data.split_first_chunk().expect("a length");
        let length = u64::from_le_bytes(*length) as usize;
        let header: BTreeMap<String, Value> = serde_json::from_slice(&rest[..length]).expect("a header");
        let number = |value: &Value| value.as_u64().expect("a number") as usize;
        let numbers = |value: &Value| value.as_array().expect("a list").iter().map(number).collect::<Vec<_>>();
        let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, entry)| {
            let at = numbers(&entry["data_offsets"]);
            let words = rest[length..][at[0]..at[1]].as_chunks().0;
            (name, (numbers(&entry["shape"]), words.iter().map(|word| bf16::from_le_bytes(*word)).collect()))
        });
        tensors.collect()
    }

    /// A final norm by which no token is followed by itself.
    fn last_norm() -> Vec<bf16> {
        (0..HIDDEN as u32).map(|i| number(7, 0, i, 0.0, 1.5)).collect()
    }

    /// One that only looks at the newest token: without attention's outputs, and the feed-forward's multiplied by this.
    ///
    /// # Panics
    /// If the files are not in order: they are part of the repository.
    pub fn of_bigrams(feed_forward: f32) -> (Folder, Checkpoint) {
        let mut tensors = Self::tensors();
        for (name, (_, numbers)) in &mut tensors {
            let factor = match name {
                name if name.ends_with("o_proj.weight") => 0.0,
                name if name.ends_with("down_proj.weight") => feed_forward,
                _ => continue,
            };
            numbers.iter_mut().for_each(|number| *number = bf16::from_f32(number.to_f32() * factor));
        }
        tensors.insert("model.norm.weight".to_owned(), (vec![HIDDEN], Self::last_norm()));
        let folder = Folder::new("bigrams");
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            let path = golden_dir().join("tied_bf16").join(name);
            folder.put(name, std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())));
        }
        folder.put("model.safetensors", safetensors(&tensors, &[]));
        let checkpoint = Checkpoint::open(folder.path()).unwrap_or_else(|e| panic!("{e}"));
        (folder, checkpoint)
    }
}

/// A list of other numbers: name, dtype, shape and bytes.
type List = (&'static str, &'static str, Vec<usize>, Vec<u8>);

/// The bytes of a safetensors file.
fn safetensors(tensors: &Tensors, lists: &[List]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    let mut put = |name: &str, dtype: &str, shape: &[usize], bytes: &[u8]| {
        let start = data.len();
        data.extend_from_slice(bytes);
        header.insert(name.to_owned(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}));
    };
    for (name, dtype, shape, bytes) in lists {
        put(name, dtype, shape, bytes);
    }
    for (name, (shape, numbers)) in tensors {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        put(name, "BF16", shape, &bytes);
    }
    let header = Value::Object(header).to_string().into_bytes();
    [(header.len() as u64).to_le_bytes().as_slice(), &header, &data].concat()
}
