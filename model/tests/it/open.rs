//! Checkpoints without faults open, and say what is in them.

use model::plan::Traits;
use model::rope::Scaling;
use model::{Config, Dtype};
use serde_json::json;

use crate::fixture::{DTYPES, Fixture};

/// Loaders read what is stored, rounded to bf16: any part of any tensor, in any format.
#[test]
fn elements_are_read_as_bf16() {
    for dtype in ["BF16", "F16", "F32"] {
        let checkpoint = Fixture::new(dtype, false).sharded().open();
        for tensor in checkpoint.tensors() {
            let count: usize = tensor.shape.iter().product();
            for (first, count) in [(0, count), (count / 3, count / 2), (count, 0)] {
                let mut read = vec![0xaa; count * 2];
                checkpoint.read_bf16(&tensor, first, &mut read).unwrap();
                for (i, word) in read.chunks(2).enumerate() {
                    let stored = half::bf16::from_f32(tensor.get(first + i).unwrap());
                    assert_eq!(word, stored.to_le_bytes(), "{} {dtype} {}", tensor.name, first + i);
                }
            }
        }
    }
}

#[test]
fn every_dtype_tied_or_not_sharded_or_not() {
    for dtype in DTYPES {
        for tied in [true, false] {
            let whole = Fixture::new(dtype, tied).open();
            let parts = Fixture::new(dtype, tied).sharded().open();
            assert_eq!(whole.config, parts.config);
            assert_eq!(whole.config.tie_word_embeddings, tied);
            assert_eq!(whole.tensors().len(), 2 * 11 + 2 + usize::from(!tied));
            assert_eq!(
                whole.stored_bytes() as usize,
                whole.config.weight_bytes(whole.tensor("model.norm.weight").unwrap().dtype.size())
            );
            for tensor in whole.tensors() {
                let part = parts.tensor(tensor.name).unwrap();
                assert_eq!((tensor.dtype, tensor.shape, tensor.data), (part.dtype, part.shape, part.data));
            }
            let weights = whole.weights().unwrap();
            assert_eq!((weights.layers.len(), weights.layers[1].down.shape()), (2, &[48, 40][..]));
            assert_eq!(weights.head.name(), if tied { "model.embed_tokens.weight" } else { "lm_head.weight" });
        }
    }
}

/// transformers ties the two only if they are equal.
#[test]
fn a_head_of_its_own_is_used_although_the_config_ties() {
    let mut fixture = Fixture::new("F32", false);
    fixture.config["tie_word_embeddings"] = json!(true);
    let checkpoint = fixture.open();
    assert_eq!(checkpoint.weights().unwrap().head.name(), "lm_head.weight");
    assert!(!checkpoint.config.tie_word_embeddings);
    assert!(matches!(&checkpoint.warnings[..], [warning] if warning.contains("tie_word_embeddings")));

    // If the config says so, the same model has no warning.
    fixture.config["tie_word_embeddings"] = json!(false);
    let untied = fixture.open();
    assert_eq!((untied.warnings.len(), &untied.config), (0, &checkpoint.config));

    fixture.config["tie_word_embeddings"] = json!(true);
    let embedding = fixture.tensors()["model.embed_tokens.weight"].clone();
    fixture.tensors().insert("lm_head.weight".into(), embedding);
    let tied = fixture.open();
    assert!(tied.config.tie_word_embeddings && tied.warnings.is_empty());
    // Tied weights may be stored under either name.
    fixture.tensors().remove("model.embed_tokens.weight");
    let weights = fixture.open();
    let weights = weights.weights().unwrap();
    assert_eq!((weights.embed.name(), weights.head.name()), ("lm_head.weight", "lm_head.weight"));
}

/// transformers looks for the single file first.
#[test]
fn a_single_file_goes_before_an_index() {
    let mut fixture = Fixture::new("F32", true);
    let dir = fixture.clone().sharded().write();
    let norm = fixture.tensors().get_mut("model.norm.weight").unwrap();
    norm.data[..4].copy_from_slice(&7f32.to_le_bytes());
    dir.put("model.safetensors", &fixture.write().get("model.safetensors"));
    let checkpoint = dir.open().unwrap();
    assert_eq!(checkpoint.tensor("model.norm.weight").unwrap().get(0), Some(7.0));
    assert!(matches!(&checkpoint.warnings[..], [warning] if warning.contains("model.safetensors.index.json")));

    // An index of this very file contradicts nothing.
    let map: serde_json::Map<_, _> =
        fixture.tensors().keys().map(|name| (name.clone(), json!("model.safetensors"))).collect();
    dir.put_json("model.safetensors.index.json", &json!({"weight_map": map}));
    assert!(dir.open().unwrap().warnings.is_empty());
}

#[test]
fn elements_are_widened_exactly() {
    let mut fixture = Fixture::new("F16", true);
    let norm = fixture.tensors().get_mut("model.norm.weight").unwrap();
    // The least subnormal, the largest finite number, and a negative.
    norm.data[..6].copy_from_slice(&[0x01, 0x00, 0xff, 0x7b, 0x00, 0xb8]);
    let checkpoint = fixture.open();
    let norm = checkpoint.tensor("model.norm.weight").unwrap();
    assert_eq!(norm.dtype, Dtype::F16);
    assert_eq!([0, 1, 2].map(|i| norm.get(i).unwrap()), [2f32.powi(-24), 65504.0, -0.5]);
    assert_eq!((norm.get(48), norm.get(usize::MAX)), (None, None));
}

#[test]
fn eos_comes_from_generation_config_then_config_then_tokenizer() {
    let mut fixture = Fixture::new("F32", true);
    assert_eq!(fixture.open().generation.eos_token_ids, [267]);
    fixture.config["eos_token_id"] = json!(265);
    let dir = fixture.write();
    assert_eq!(dir.open().unwrap().generation.eos_token_ids, [265]);
    dir.put_json(
        "generation_config.json",
        &json!({"eos_token_id": [267, 265], "temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    );
    let generation = dir.open().unwrap().generation;
    assert_eq!(generation.eos_token_ids, [267, 265]);
    assert_eq!(
        (generation.temperature, generation.top_k, generation.top_p, generation.min_p),
        (Some(0.6), Some(20), Some(0.95), None)
    );
    // -1 keeps all tokens, as in requests.
    dir.put_json("generation_config.json", &json!({"top_k": -1}));
    assert_eq!(dir.open().unwrap().generation.top_k, Some(0));
    dir.put_json("generation_config.json", &json!({"top_k": -2}));
    dir.error("top_k");
}

#[test]
fn published_sizes_count_up() {
    // Qwen3-8B as its config.json gives it, and as transformers 5 writes it.
    let mut json = json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936,
    });
    let parse = |json: &serde_json::Value| Config::parse(json.to_string().as_bytes(), "config.json".as_ref()).unwrap();
    let config = parse(&json);
    assert_eq!(config.parameter_count(), 8_190_735_360);
    assert_eq!(config.kv_bytes_per_token(2), 147_456);
    assert_eq!(config.eos_token_ids, [151645]);

    let fields = json.as_object_mut().unwrap();
    fields.remove("rope_theta");
    fields.remove("rope_scaling");
    fields.insert("rope_parameters".into(), json!({"rope_theta": 1000000, "rope_type": "default"}));
    fields.insert("layer_types".into(), json!(["full_attention"]));
    assert_eq!(parse(&json), config);

    // As Qwen3's model card has it, for texts of up to 131,072 tokens; and in the place where transformers 5 keeps it.
    let card = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    let fields = json.as_object_mut().unwrap();
    fields.remove("rope_parameters");
    fields.insert("rope_theta".into(), json!(1000000));
    fields.insert("rope_scaling".into(), card.clone());
    let scaled = parse(&json);
    let Some(Scaling::Yarn(yarn)) = scaled.rope_scaling else { panic!("{scaled:?}") };
    assert_eq!((yarn.factor, yarn.original_positions, yarn.beta_fast, yarn.beta_slow), (4.0, 32768, 32.0, 1.0));
    assert_eq!(scaled, Config { rope_scaling: Some(Scaling::Yarn(yarn)), max_position_embeddings: 131_072, ..config });
    let fields = json.as_object_mut().unwrap();
    fields.remove("rope_scaling");
    fields.insert("rope_parameters".into(), card);
    fields["rope_parameters"]["rope_theta"] = json!(1000000);
    assert_eq!(parse(&json), scaled);
}

/// As in their config.json files. The numbers of parameters are those that their makers state.
#[test]
fn published_models_of_other_families_are_read() {
    let parse = |json: serde_json::Value| {
        Config::parse(json.to_string().as_bytes(), "config.json".as_ref()).unwrap_or_else(|error| panic!("{error}"))
    };
    let qwen = parse(json!({
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 152064,
    }));
    assert_eq!((qwen.parameter_count(), qwen.plan.attention.head_dim), (7_615_616_512, 128));
    assert_eq!(qwen.plan.attention.traits, Traits { head_norm: false, qkv_bias: true });

    let llama = parse(json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256,
    }));
    assert_eq!((llama.parameter_count(), llama.plan.attention.head_dim), (8_030_261_248, 128));
    assert_eq!((llama.max_position_embeddings, llama.eos_token_ids.len()), (131_072, 3));
    assert_eq!(llama.plan.attention.traits, Traits { head_norm: false, qkv_bias: false });
}

#[cfg(feature = "bundled-demo")]
#[test]
fn the_demo_opens_and_answers() {
    let checkpoint = model::Checkpoint::demo().unwrap();
    let prompt = checkpoint.tokenizer.encode("Once upon a time").unwrap();
    let model = model::CpuModel::new(&checkpoint).unwrap();
    let mut cache = model.new_cache(prompt.len());
    let mut logits = vec![f32::NAN; checkpoint.config.vocab_size];
    model.forward(&prompt, &mut cache, 1, &mut logits).unwrap();
    assert!(logits.iter().all(|l| l.is_finite()));
    assert!(checkpoint.chat_template.is_some() && !checkpoint.generation.eos_token_ids.is_empty());
}

/// A backend may hold the model for as long as it likes, on any thread.
#[test]
fn models_can_be_sent_and_shared() {
    fn check<T: Clone + Send + Sync + 'static>() {}
    check::<model::Checkpoint>();
    check::<model::CpuModel>();
    check::<model::KvCache>();
    check::<model::Tokenizer>();
    check::<model::ChatTemplate>();
}
