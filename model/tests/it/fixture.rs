//! A tiny checkpoint in a temporary directory, for tests to run or to spoil.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use model::{Checkpoint, Error};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Bytes of one tensor with what its header entry says.
#[derive(Clone)]
pub struct Stored {
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// What a checkpoint directory will hold; change it, then [`write`](Self::write).
#[derive(Clone)]
pub struct Fixture {
    pub config: Value,
    pub tokenizer: Value,
    pub tokenizer_config: Value,
    /// Tensors by name, by the name of their shard's file.
    pub shards: BTreeMap<String, BTreeMap<String, Stored>>,
}

/// Number formats of fixtures.
pub const DTYPES: [&str; 3] = ["BF16", "F16", "F32"];

/// Sizes of a fixture. None is a multiple of the dot product's 32 lanes, on purpose.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub vocab: usize,
    pub hidden: usize,
    pub inner: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub layers: usize,
}

/// The sizes of [`Fixture::new`].
pub const USUAL: Sizes = Sizes { vocab: 270, hidden: 48, inner: 40, heads: 4, kv_heads: 2, head_dim: 16, layers: 2 };

/// So small that Miri runs a token in a few seconds.
pub const SMALL: Sizes = Sizes { vocab: 16, hidden: 40, inner: 16, heads: 2, kv_heads: 1, head_dim: 8, layers: 1 };

/// Number of random numbers that are drawn for a tensor; they are then repeated. Under Miri a number takes
/// milliseconds.
const DRAWN: usize = if cfg!(miri) { 61 } else { 1 << 20 };

impl Fixture {
    /// A checkpoint of the usual sizes, in one shard.
    pub fn new(dtype: &'static str, tied: bool) -> Self {
        Self::of(dtype, tied, USUAL)
    }

    /// A checkpoint of any sizes, in one shard.
    pub fn of(dtype: &'static str, tied: bool, sizes: Sizes) -> Self {
        let Sizes { vocab, hidden, inner, heads, kv_heads, head_dim, layers } = sizes;
        let config = json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
            "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": null,
            "tie_word_embeddings": tied, "hidden_act": "silu", "attention_bias": false, "use_sliding_window": false,
        });
        let mut seed = 1;
        let mut tensor = |shape: &[usize], mean: f32, spread: f32| {
            let n: usize = shape.iter().product();
            let drawn: Vec<_> = (0..n.min(DRAWN)).map(|_| encode(dtype, mean + spread * unit(&mut seed))).collect();
            let mut data = drawn.concat().repeat(n.div_ceil(drawn.len()));
            data.truncate(n * drawn[0].len());
            Stored { dtype, shape: shape.to_vec(), data }
        };
        let mut tensors = BTreeMap::new();
        tensors.insert("model.embed_tokens.weight".to_owned(), tensor(&[vocab, hidden], 0.0, 1.0));
        tensors.insert("model.norm.weight".to_owned(), tensor(&[hidden], 1.0, 0.3));
        if !tied {
            tensors.insert("lm_head.weight".to_owned(), tensor(&[vocab, hidden], 0.0, 0.5));
        }
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        for layer in 0..layers {
            for (name, shape) in [
                ("self_attn.q_proj", vec![q, hidden]),
                ("self_attn.k_proj", vec![kv, hidden]),
                ("self_attn.v_proj", vec![kv, hidden]),
                ("self_attn.o_proj", vec![hidden, q]),
                ("mlp.gate_proj", vec![inner, hidden]),
                ("mlp.up_proj", vec![inner, hidden]),
                ("mlp.down_proj", vec![hidden, inner]),
            ] {
                tensors.insert(format!("model.layers.{layer}.{name}.weight"), tensor(&shape, 0.0, 0.3));
            }
            for (name, n) in [
                ("input_layernorm", hidden),
                ("post_attention_layernorm", hidden),
                ("self_attn.q_norm", head_dim),
                ("self_attn.k_norm", head_dim),
            ] {
                tensors.insert(format!("model.layers.{layer}.{name}.weight"), tensor(&[n], 1.0, 0.3));
            }
        }
        Fixture {
            config,
            tokenizer: if vocab < USUAL.vocab { byte_level(vocab - SPECIAL.len(), &[]) } else { tokenizer_json() },
            tokenizer_config: json!({"eos_token": "<|im_end|>"}),
            shards: BTreeMap::from([("model.safetensors".to_owned(), tensors)]),
        }
    }

    /// Deals the tensors over two shards, so that an index is written.
    pub fn sharded(mut self) -> Self {
        let all = self.shards.remove("model.safetensors").unwrap();
        let (mut one, mut two) = (BTreeMap::new(), BTreeMap::new());
        for (i, (name, tensor)) in all.into_iter().enumerate() {
            if i % 2 == 0 { &mut one } else { &mut two }.insert(name, tensor);
        }
        self.shards = BTreeMap::from([(SHARDS[0].to_owned(), one), (SHARDS[1].to_owned(), two)]);
        self
    }

    /// The tensors of the only shard.
    pub fn tensors(&mut self) -> &mut BTreeMap<String, Stored> {
        self.shards.get_mut("model.safetensors").unwrap()
    }

    /// Writes everything to a new directory.
    pub fn write(&self) -> Dir {
        let dir = Dir(TempDir::new().unwrap());
        dir.put_json("config.json", &self.config);
        dir.put_json("tokenizer.json", &self.tokenizer);
        dir.put_json("tokenizer_config.json", &self.tokenizer_config);
        let mut weight_map = BTreeMap::new();
        for (file, tensors) in &self.shards {
            dir.put(file, &safetensors_bytes(tensors));
            weight_map.extend(tensors.keys().map(|name| (name, file)));
        }
        if self.shards.len() > 1 {
            dir.put_json("model.safetensors.index.json", &json!({"metadata": {}, "weight_map": weight_map}));
        }
        dir
    }

    /// Writes the fixture and opens it; for fixtures without faults.
    pub fn open(&self) -> Checkpoint {
        // The weights stay mapped after the directory is removed.
        self.write().open().unwrap()
    }
}

/// The shards' names of a sharded fixture.
pub const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// A checkpoint directory that is removed when this is dropped.
pub struct Dir(TempDir);

impl Dir {
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn put(&self, name: &str, bytes: &[u8]) {
        fs::write(self.file(name), bytes).unwrap();
    }

    pub fn put_json(&self, name: &str, value: &Value) {
        self.put(name, value.to_string().as_bytes());
    }

    pub fn get(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).unwrap()
    }

    pub fn open(&self) -> Result<Checkpoint, Error> {
        Checkpoint::open(self.path())
    }

    /// The error of opening; it must be a sentence about one line long that names `part`.
    #[track_caller]
    pub fn error(&self, part: &str) -> Error {
        let error = self.open().expect_err("opened a bad checkpoint");
        let text = error.to_string();
        assert!(text.contains(part), "{part:?} is not in {text:?}");
        assert!(!text.contains('\n') && text.len() < 500, "{text:?}");
        error
    }
}

/// A safetensors file, written by hand so that tests can also write wrong ones.
pub fn safetensors_bytes(tensors: &BTreeMap<String, Stored>) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, t) in tensors {
        let start = data.len();
        data.extend_from_slice(&t.data);
        header.insert(name.clone(), json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [start, data.len()]}));
    }
    with_header(&Value::Object(header), &data)
}

/// A safetensors file with this header, whether or not it is true.
pub fn with_header(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The header of a safetensors file, and its data.
pub fn split_header(file: &[u8]) -> (Value, Vec<u8>) {
    let n = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..8 + n]).unwrap(), file[8 + n..].to_vec())
}

/// Some of Qwen3's control tokens, and whether they are special.
const SPECIAL: [(&str, bool); 5] =
    [("<|endoftext|>", true), ("<|im_start|>", true), ("<|im_end|>", true), ("<think>", false), ("</think>", false)];

/// A byte-level BPE of 256 bytes, some merges that end inside characters, and Qwen3's control tokens; 270 ids.
pub fn tokenizer_json() -> Value {
    let merges =
        [["t", "h"], ["th", "e"], ["Ġ", "the"], ["i", "n"], ["Ġ", "a"], ["e", "r"], ["Ã", "©"], ["ð", "Ł"], ["â", "Ĥ"]];
    byte_level(256, &merges)
}

/// A byte-level BPE of `bytes` bytes, with these merges and Qwen3's control tokens.
fn byte_level(bytes: usize, merges: &[[&str; 2]]) -> Value {
    let chars = ('!'..='~').chain('\u{a1}'..='\u{ac}').chain('\u{ae}'..='\u{ff}').chain('\u{100}'..'\u{144}');
    let mut vocab = serde_json::Map::new();
    for (id, c) in chars.take(bytes).enumerate() {
        vocab.insert(c.to_string(), json!(id));
    }
    for [a, b] in merges {
        vocab.insert(format!("{a}{b}"), json!(vocab.len()));
    }
    let special = |(id, (content, special)): (usize, (&str, bool))| {
        json!({
            "id": id, "content": content, "special": special,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    let added: Vec<Value> = (vocab.len()..).zip(SPECIAL).map(special).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges},
    })
}

/// One number as it is stored.
pub fn encode(dtype: &str, x: f32) -> Vec<u8> {
    match dtype {
        "BF16" => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        "F16" => half::f16::from_f32(x).to_le_bytes().to_vec(),
        "F32" => x.to_le_bytes().to_vec(),
        other => panic!("{other}"),
    }
}

/// The next of a series of numbers between -1 and 1.
fn unit(seed: &mut u64) -> f32 {
    *seed += 1;
    (model::sampling::random(7, *seed) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}
