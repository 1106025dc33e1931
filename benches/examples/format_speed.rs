//! How fast weights of each format become bf16, on one thread: a gate of Qwen3-8B's shape, read as a device reads it,
//! in pieces of 2 MiB.
//!
//!     cargo run --release --package benches --example format_speed

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use model::{Checkpoint, OpenOptions, WeightsMode};
use serde_json::{Value, json};

const HIDDEN: usize = 4096;
const INNER: usize = 12_288;
const VOCAB: usize = 4096;

/// A tensor by its type, shape and bytes.
type Tensor = (&'static str, Vec<usize>, Vec<u8>);

fn main() {
    let compressed = |format: &str, weights: Value| {
        let groups = json!({"group_0": {"weights": weights}});
        json!({"quant_method": "compressed-tensors", "format": format, "config_groups": groups})
    };
    let int4 = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128});
    let formats = [
        ("bf16", Value::Null, WeightsMode::Plain),
        ("fp8", json!({"quant_method": "fp8", "weight_block_size": [128, 128]}), WeightsMode::Plain),
        ("awq", json!({"quant_method": "awq", "bits": 4, "group_size": 128}), WeightsMode::Plain),
        ("gptq", json!({"quant_method": "gptq", "bits": 4, "group_size": 128}), WeightsMode::Plain),
        ("w4a16", compressed("pack-quantized", int4), WeightsMode::Plain),
        ("bf16", Value::Null, WeightsMode::Fp8),
        ("bf16", Value::Null, WeightsMode::Int4),
    ];
    for (name, quantization, weights) in formats {
        let dir = std::env::temp_dir().join(format!("warpdraft-format-{}", std::process::id()));
        write(&dir, name, &quantization);
        let options = OpenOptions { check_finite: false, weights };
        let checkpoint = Checkpoint::open_with(&dir, options).unwrap_or_else(|e| panic!("{e}"));
        std::fs::remove_dir_all(&dir).unwrap_or_else(|e| panic!("{e}"));
        let all = checkpoint.weights().unwrap_or_else(|e| panic!("{e}"));
        let gate = &all.layers[0].gate;
        let mut out = vec![0; 2 * (gate.unit() * ((1 << 20) / gate.unit()).max(1))];
        let seconds = (0..3).map(|_| {
            let start = Instant::now();
            for first in (0..gate.elements()).step_by(out.len() / 2) {
                let count = out.len().min(2 * (gate.elements() - first));
                gate.read_bf16(first, &mut out[..count]).unwrap_or_else(|e| panic!("{e}"));
            }
            start.elapsed().as_secs_f64()
        });
        let seconds = seconds.fold(f64::INFINITY, f64::min);
        let rate = 2.0 * gate.elements() as f64 / seconds / 1e9;
        println!("{name:<6} --weights {weights:<6} {rate:.2} GB/s of bf16");
    }
}

/// Writes a model of one layer.
fn write(dir: &Path, name: &str, quantization: &Value) {
    let mut seed = 1;
    let mut bytes = |n: usize| -> Vec<u8> {
        let mut next = || {
            seed += 1;
            // Bit 6 of a byte is clear: no e4m3 is NaN, no bf16 is large.
            model::sampling::random(3, seed) & 0xbfbf_bfbf_bfbf_bfbf
        };
        (0..n.div_ceil(8)).flat_map(|_| next().to_le_bytes()).take(n).collect()
    };
    let ones = |n: usize| 0x3f80u16.to_le_bytes().repeat(n);
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut vector = |name: &str, shape: &[usize]| {
        tensors.insert(name.to_owned(), ("BF16", shape.to_vec(), ones(shape.iter().product())));
    };
    vector("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
    vector("model.norm.weight", &[HIDDEN]);
    vector("model.layers.0.input_layernorm.weight", &[HIDDEN]);
    vector("model.layers.0.post_attention_layernorm.weight", &[HIDDEN]);
    vector("model.layers.0.self_attn.q_norm.weight", &[128]);
    vector("model.layers.0.self_attn.k_norm.weight", &[128]);
    for (layer, o, i) in [
        ("self_attn.q_proj", 128, HIDDEN),
        ("self_attn.k_proj", 128, HIDDEN),
        ("self_attn.v_proj", 128, HIDDEN),
        ("self_attn.o_proj", HIDDEN, 128),
        ("mlp.gate_proj", INNER, HIDDEN),
        ("mlp.up_proj", INNER, HIDDEN),
        ("mlp.down_proj", HIDDEN, INNER),
    ] {
        let g = i / 128;
        let parts: Vec<(&str, &str, [usize; 2])> = match name {
            "bf16" => vec![("weight", "BF16", [o, i])],
            "fp8" => vec![("weight", "F8_E4M3", [o, i]), ("weight_scale_inv", "BF16", [o / 128, g])],
            "awq" => vec![("qweight", "I32", [i, o / 8]), ("qzeros", "I32", [g, o / 8]), ("scales", "BF16", [g, o])],
            "gptq" => vec![("qweight", "I32", [i / 8, o]), ("qzeros", "I32", [g, o / 8]), ("scales", "BF16", [g, o])],
            _ => vec![("weight_packed", "I32", [o, i / 8]), ("weight_scale", "BF16", [o, g])],
        };
        for (part, dtype, shape) in parts {
            let n = shape[0] * shape[1];
            let (dtype, data) = match dtype {
                "I32" => ("I32", bytes(4 * n)),
                "F8_E4M3" => ("F8_E4M3", bytes(n)),
                _ if part == "weight" => ("BF16", bytes(2 * n)),
                _ => ("BF16", ones(n)),
            };
            tensors.insert(format!("model.layers.0.{layer}.{part}"), (dtype, shape.to_vec(), data));
        }
    }
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, (dtype, shape, data)) in &tensors {
        let span = [at, at + data.len()];
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": span}));
        at += data.len();
    }
    let header = Value::Object(header).to_string();
    let mut file = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    tensors.values().for_each(|(_, _, data)| file.extend_from_slice(data));
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 128, "tie_word_embeddings": true, "rope_theta": 1e6, "quantization_config": quantization,
    });
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    let files = [("config.json", config.to_string().into_bytes()), ("model.safetensors", file)];
    std::fs::create_dir_all(dir).unwrap_or_else(|e| panic!("{e}"));
    for (name, bytes) in files {
        std::fs::write(dir.join(name), bytes).unwrap_or_else(|e| panic!("{e}"));
    }
    std::fs::copy(demo.join("tokenizer.json"), dir.join("tokenizer.json")).unwrap_or_else(|e| panic!("{e}"));
}
