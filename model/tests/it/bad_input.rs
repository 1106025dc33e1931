//! Every kind of bad checkpoint gives a typed error whose message names what is wrong, and never a panic.

use std::fs;

use model::{Checkpoint, Error};
use proptest::prelude::*;
use serde_json::json;

use crate::fixture::{DTYPES, Fixture, SHARDS, Stored, encode, split_header, tokenizer_json, with_header};

#[test]
fn missing_files() {
    for (name, part) in [("config.json", "config.json is missing"), ("tokenizer.json", "tokenizer.json is missing")] {
        let dir = Fixture::new("F32", true).write();
        fs::remove_file(dir.file(name)).unwrap();
        assert!(matches!(dir.error(part), Error::MissingFile { .. }));
    }
}

#[test]
fn missing_shard() {
    let dir = Fixture::new("F32", true).write();
    fs::remove_file(dir.file("model.safetensors")).unwrap();
    assert!(matches!(dir.error("model.safetensors is missing"), Error::MissingFile { .. }));

    let dir = Fixture::new("BF16", false).sharded().write();
    fs::remove_file(dir.file(SHARDS[1])).unwrap();
    assert!(matches!(dir.error(SHARDS[1]), Error::MissingFile { .. }));
}

#[test]
fn a_directory_in_place_of_a_file() {
    let dir = Fixture::new("F32", true).write();
    fs::remove_file(dir.file("config.json")).unwrap();
    fs::create_dir(dir.file("config.json")).unwrap();
    assert!(matches!(dir.error("cannot read"), Error::Io { .. }));
}

#[test]
fn truncated_shard() {
    let dir = Fixture::new("BF16", true).sharded().write();
    let bytes = dir.get(SHARDS[0]);
    dir.put(SHARDS[0], &bytes[..bytes.len() - 1]);
    assert!(matches!(dir.error(SHARDS[0]), Error::WrongLength { .. }));
    // Cut within the header, within the header's length, and to nothing.
    dir.put(SHARDS[0], &bytes[..100]);
    assert!(matches!(dir.error(SHARDS[0]), Error::WrongLength { .. }));
    for n in [0, 7] {
        dir.put(SHARDS[0], &bytes[..n]);
        assert!(matches!(dir.error(SHARDS[0]), Error::Header { .. }));
    }
    dir.put(SHARDS[0], &[bytes.as_slice(), &[0]].concat());
    assert!(matches!(dir.error("overwritten"), Error::WrongLength { .. }));
}

#[test]
fn swapped_shards() {
    let dir = Fixture::new("BF16", true).sharded().write();
    let (one, two) = (dir.get(SHARDS[0]), dir.get(SHARDS[1]));
    dir.put(SHARDS[0], &two);
    dir.put(SHARDS[1], &one);
    match dir.error("it is in model-0000") {
        Error::TensorNotInShard { found_in: Some(_), .. } => {}
        other => panic!("{other:?}"),
    }
    // The same shard twice.
    dir.put(SHARDS[0], &one);
    assert!(matches!(dir.error("another shard holds"), Error::HeaderEntry { .. }));
}

#[test]
fn a_shard_of_another_model() {
    let mut fixture = Fixture::new("BF16", true).sharded();
    let dir = fixture.write();
    let index = dir.get("model.safetensors.index.json");
    let (name, tensor) = fixture.shards.get_mut(SHARDS[1]).unwrap().pop_first().unwrap();
    fixture.shards.get_mut(SHARDS[1]).unwrap().insert("other.weight".into(), tensor);
    let dir = fixture.write();
    dir.put("model.safetensors.index.json", &index);
    assert!(matches!(dir.error(&name), Error::TensorNotInShard { found_in: None, .. }));
}

#[test]
fn an_index_that_points_elsewhere() {
    let dir = Fixture::new("BF16", true).sharded().write();
    dir.put_json(
        "model.safetensors.index.json",
        &json!({"weight_map": {"model.norm.weight": "../secret.safetensors"}}),
    );
    assert!(matches!(dir.error("not a plain file name"), Error::Json { .. }));
    dir.put_json("model.safetensors.index.json", &json!({"weight_map": 3}));
    assert!(matches!(dir.error("index.json"), Error::Json { .. }));
    dir.put_json("model.safetensors.index.json", &json!({"weight_map": {}}));
    assert!(matches!(dir.error("index.json lacks the tensor"), Error::MissingTensor { .. }));
}

#[test]
fn a_header_that_lies() {
    let dir = Fixture::new("F32", true).write();
    let (header, data) = split_header(&dir.get("model.safetensors"));
    const NAME: &str = "model.layers.0.mlp.up_proj.weight";
    let offsets = |i: usize| header[NAME]["data_offsets"][i].as_u64().unwrap();
    let (start, end) = (offsets(0), offsets(1));
    for (field, value) in [
        ("shape", json!([40, 49])),
        ("shape", json!([u64::MAX, u64::MAX])),
        ("shape", json!([1u64 << 62, 8])),
        ("data_offsets", json!([start, end + 4])),
        ("data_offsets", json!([start + 4, end])),
        ("data_offsets", json!([end, start])),
        ("data_offsets", json!([start, u64::MAX])),
    ] {
        let mut header = header.clone();
        header[NAME][field] = value.clone();
        dir.put("model.safetensors", &with_header(&header, &data));
        assert!(matches!(dir.error("model.safetensors lies about"), Error::HeaderEntry { .. }), "{field} {value}");
    }
    for header in [json!([]), json!({"a": 1}), json!({"a": {"dtype": "F32"}})] {
        dir.put("model.safetensors", &with_header(&header, &data));
        assert!(matches!(dir.error("no readable safetensors header"), Error::Header { .. }));
    }
    dir.put("model.safetensors", &u64::MAX.to_le_bytes());
    assert!(matches!(dir.error("announce"), Error::Header { .. }));
}

#[test]
fn a_shape_that_is_not_the_configs() {
    let mut fixture = Fixture::new("F32", true);
    fixture.config["intermediate_size"] = json!(41);
    match fixture.write().error("model.layers.0.mlp.gate_proj.weight") {
        Error::Shape { found, expected, .. } => assert_eq!((found, expected), (vec![40, 48], vec![41, 48])),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_tensor() {
    let mut fixture = Fixture::new("F32", false);
    fixture.tensors().remove("lm_head.weight").unwrap();
    assert!(matches!(fixture.write().error("`lm_head.weight`"), Error::MissingTensor { .. }));
    fixture.config["num_hidden_layers"] = json!(3);
    fixture.config["tie_word_embeddings"] = json!(true);
    assert!(matches!(fixture.write().error("model.layers.2.input_layernorm.weight"), Error::MissingTensor { .. }));
}

#[test]
fn an_unknown_dtype() {
    for dtype in ["F8_E5M2", "I8", "Q4_K"] {
        let mut fixture = Fixture::new("F32", true);
        let odd = Stored { dtype, shape: vec![4], data: vec![0; 4] };
        fixture.tensors().insert("model.norm.weight_scale".into(), odd);
        assert!(matches!(fixture.write().error(dtype), Error::UnsupportedDtype { .. }));
    }
}

#[test]
fn another_architecture() {
    for (architecture, model_type, part) in [
        ("Qwen3MoeForCausalLM", "qwen3_moe", "mixture-of-experts"),
        ("GemmaForCausalLM", "gemma", "`GemmaForCausalLM` model; warpdraft runs Qwen3ForCausalLM"),
        ("GemmaForCausalLM", "llama", "Qwen2ForCausalLM (Qwen2.5-0.5B to Qwen2.5-72B) and LlamaForCausalLM"),
        ("Qwen3ForCausalLM", "qwen3_next", "qwen3_next"),
        ("LlamaForCausalLM", "mllama", "mllama"),
    ] {
        let mut fixture = Fixture::new("F32", true);
        fixture.config = json!({"architectures": [architecture], "model_type": model_type});
        assert!(matches!(fixture.write().error(part), Error::UnsupportedArchitecture { .. }));
    }
    let mut fixture = Fixture::new("F32", true);
    fixture.config = json!({});
    assert!(matches!(fixture.write().error("nameless"), Error::UnsupportedArchitecture { .. }));
}

#[test]
fn settings_that_are_not_supported() {
    for (field, value) in [
        ("attention_bias", json!(true)),
        ("use_sliding_window", json!(true)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("hidden_act", json!("gelu")),
        ("quantization_config", json!({"note": "é".repeat(200)})),
        ("rope_scaling", json!({"type": "linear", "factor": 4.0})),
        ("rope_scaling", json!({"factor": 4.0})),
        ("rope_parameters", json!({"rope_type": "longrope", "rope_theta": 1e6})),
    ] {
        let mut fixture = Fixture::new("F32", true);
        fixture.config[field] = value;
        assert!(matches!(fixture.write().error(field), Error::UnsupportedSetting { .. }));
    }
}

#[test]
fn settings_that_another_family_does_not_support() {
    for (architecture, model_type, field, value) in [
        ("Qwen2ForCausalLM", "qwen2", "use_sliding_window", json!(true)),
        ("Qwen2ForCausalLM", "qwen2", "layer_types", json!(["sliding_attention", "full_attention"])),
        ("LlamaForCausalLM", "llama", "attention_bias", json!(true)),
        ("LlamaForCausalLM", "llama", "mlp_bias", json!(true)),
    ] {
        let mut fixture = Fixture::new("F32", true);
        fixture.config["architectures"] = json!([architecture]);
        fixture.config["model_type"] = json!(model_type);
        fixture.config[field] = value;
        assert!(matches!(fixture.write().error(field), Error::UnsupportedSetting { .. }));
    }
}

/// A family's own weights are required, and its own sizes are used if the config gives none.
#[test]
fn weights_and_sizes_of_another_family() {
    let mut fixture = Fixture::new("F32", true);
    fixture.config["architectures"] = json!(["Qwen2ForCausalLM"]);
    fixture.config["model_type"] = json!("qwen2");
    let error = fixture.write().error("`model.layers.0.self_attn.q_norm.weight`");
    assert!(matches!(error, Error::UnexpectedTensor { architecture: "Qwen2ForCausalLM", .. }));
    fixture.tensors().retain(|name, _| !name.contains("q_norm") && !name.contains("k_norm"));
    let error = fixture.write().error("model.layers.0.self_attn.q_proj.bias");
    assert!(matches!(error, Error::MissingTensor { .. }));
    // 48 over 4 heads, but the weights are those of heads of 16.
    fixture.config.as_object_mut().unwrap().remove("head_dim");
    fixture.config["architectures"] = json!(["LlamaForCausalLM"]);
    fixture.config["model_type"] = json!("llama");
    assert!(matches!(fixture.write().error("q_proj.weight"), Error::Shape { expected, .. } if expected == [48, 48]));
    fixture.config["head_dim"] = json!(16);
    fixture.open();
    let bias = Stored { dtype: "F32", shape: vec![48], data: vec![0; 4 * 48] };
    fixture.tensors().insert("model.layers.1.self_attn.o_proj.bias".into(), bias);
    assert!(matches!(fixture.write().error("layers.1.self_attn.o_proj.bias"), Error::UnexpectedTensor { .. }));
}

#[test]
fn settings_that_are_impossible() {
    for (field, value) in [
        ("hidden_size", json!(0)),
        ("vocab_size", json!(u64::MAX)),
        ("num_hidden_layers", json!(1_000_000)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(15)),
        ("rms_norm_eps", json!(-1.0)),
        ("rope_theta", json!(0.0)),
        ("rope_parameters", json!({"rope_theta": "big"})),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 0.5})),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": "four"})),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 1e9})),
        ("rope_parameters", json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": -1})),
        ("rope_parameters", json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2})),
    ] {
        let mut fixture = Fixture::new("F32", true);
        fixture.config[field] = value;
        let error = fixture.write().error("config.json");
        assert!(matches!(error, Error::InvalidSetting { .. }), "{error:?}");
    }
    for (field, value) in [
        ("temperature", json!(-1)),
        ("top_k", json!(-2)),
        ("top_p", json!(2)),
        ("min_p", json!(-0.1)),
        ("repetition_penalty", json!(0)),
    ] {
        let dir = Fixture::new("F32", true).write();
        dir.put_json("generation_config.json", &json!({ field: value }));
        assert!(matches!(dir.error(field), Error::InvalidSetting { .. }));
    }
    let mut fixture = Fixture::new("F32", true);
    fixture.config["eos_token_id"] = json!(270);
    assert!(matches!(fixture.write().error("eos_token_id"), Error::InvalidSetting { .. }));
    fixture.config["eos_token_id"] = json!("end");
    let error = fixture.write().error("an id or a list of ids");
    assert!(!error.to_string().contains("OneOrMany"));
    fixture.config["eos_token_id"] = json!(265);
    fixture.config["hidden_size"] = json!("wide");
    assert!(matches!(fixture.write().error("wide"), Error::Json { .. }));
}

/// Opening a FIFO waits for its writer, and a device has no end. Both are refused by name, at once.
#[cfg(unix)]
#[test]
fn files_that_are_none() {
    let names = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ];
    for name in names {
        for kind in ["fifo", "device", "directory"] {
            let dir = Fixture::new("F32", true).write();
            let path = dir.file(name);
            let _ = std::fs::remove_file(&path);
            if name == "model.safetensors.index.json" {
                std::fs::remove_file(dir.file("model.safetensors")).unwrap();
            }
            match kind {
                "fifo" => {
                    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
                }
                "device" => std::os::unix::fs::symlink("/dev/zero", &path).unwrap(),
                _ => std::fs::create_dir(&path).unwrap(),
            }
            let refused = dir.error(name);
            assert!(matches!(refused, Error::NotAFile { .. } | Error::Io { .. }), "{refused:?}");
        }
    }
}

#[test]
fn a_tokenizer_that_does_not_fit() {
    let mut fixture = Fixture::new("F32", true);
    fixture.tokenizer["added_tokens"][4]["id"] = json!(270);
    fixture.tokenizer["model"]["vocab"]["</think>"] = json!(270);
    match fixture.write().error("</think>") {
        Error::TokenizerDoesNotFit { id, vocab_size, .. } => assert_eq!((id, vocab_size), (270, 270)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_tokenizer_that_is_none() {
    let mut fixture = Fixture::new("F32", true);
    fixture.tokenizer["decoder"] = json!(null);
    assert!(matches!(fixture.write().error("byte-level"), Error::Tokenizer { .. }));
    fixture.tokenizer = json!({"version": "1.0"});
    assert!(matches!(fixture.write().error("tokenizer.json"), Error::Tokenizer { .. }));
    fixture.tokenizer = tokenizer_json();
    fixture.tokenizer["model"]["type"] = json!("Unigram");
    assert!(matches!(
        fixture.write().error("its model is Unigram, and warpdraft reads byte-level BPE alone"),
        Error::Tokenizer { .. }
    ));
    // Cut within the decoder, where the library `tokenizers` panics.
    let dir = Fixture::new("F32", true).write();
    let text = String::from_utf8(dir.get("tokenizer.json")).unwrap();
    let at = text.find("\"decoder\"").unwrap();
    dir.put("tokenizer.json", &text.as_bytes()[..at + 20]);
    assert!(matches!(dir.error("tokenizer.json"), Error::Tokenizer { .. }));
}

#[test]
fn a_chat_template_that_does_not_compile() {
    let mut fixture = Fixture::new("F32", true);
    fixture.tokenizer_config["chat_template"] = json!("{% for x in %}");
    assert!(matches!(fixture.write().error("tokenizer_config.json"), Error::ChatTemplate { .. }));
}

#[test]
fn weights_that_are_not_finite() {
    for dtype in DTYPES {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut fixture = Fixture::new(dtype, true);
            let tensor = fixture.tensors().get_mut("model.layers.1.self_attn.k_proj.weight").unwrap();
            let bytes = encode(dtype, value);
            tensor.data[1500 * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
            let dir = fixture.write();
            match dir.error("model.layers.1.self_attn.k_proj.weight") {
                Error::NotFinite { index, value: found, .. } => {
                    assert_eq!(index, 1500);
                    assert!(found == value || (found.is_nan() && value.is_nan()));
                }
                other => panic!("{other:?}"),
            }
            // The caller may leave the check for later.
            let later = Checkpoint::open_with(
                dir.path(),
                model::OpenOptions { check_finite: false, ..model::OpenOptions::default() },
            )
            .unwrap();
            assert!(later.check_finite(&|_| {}).is_err());
        }
    }
}

/// An f32 that rounds to infinity in bf16 is refused wherever weights are read. The largest f32 that does not is
/// accepted.
#[test]
fn weights_that_bf16_cannot_hold() {
    const TENSOR: &str = "model.layers.1.self_attn.k_proj.weight";
    let limit = f32::from_bits(0x7f7f_8000);
    for (value, good) in [(limit.next_down(), true), (limit, false), (-f32::MAX, false)] {
        let mut fixture = Fixture::new("F32", true);
        let tensor = fixture.tensors().get_mut(TENSOR).unwrap();
        tensor.data[1500 * 4..][..4].copy_from_slice(&value.to_le_bytes());
        let dir = fixture.write();
        assert_eq!(dir.open().is_ok(), good, "{value}");
        let later = Checkpoint::open_with(
            dir.path(),
            model::OpenOptions { check_finite: false, ..model::OpenOptions::default() },
        )
        .unwrap();
        let tensor = later.tensor(TENSOR).unwrap();
        let read = later.read_bf16(&tensor, 1490, &mut [0; 40]);
        match read {
            Ok(()) => assert!(good, "{value}"),
            Err(Error::TooLargeForBf16 { tensor, index, value: found, .. }) => {
                assert_eq!((tensor.as_str(), index, found, good), (TENSOR, 1500, value, false));
            }
            Err(other) => panic!("{other:?}"),
        }
        assert!(later.read_bf16(&tensor, 0, &mut [0; 3000]).is_ok());
        assert!(later.read_bf16(&tensor, 1501, &mut [0; 40]).is_ok());
    }
}

#[test]
fn calls_that_do_not_fit_the_model() {
    let checkpoint = Fixture::new("F32", true).open();
    let model = model::CpuModel::new(&checkpoint).unwrap();
    let mut cache = model.new_cache(4);
    let mut logits = vec![0.0; 270];
    assert!(matches!(
        model.forward(&[270], &mut cache, 1, &mut logits),
        Err(Error::TokenOutOfRange { token: 270, .. })
    ));
    assert!(matches!(model.forward(&[0; 5], &mut cache, 1, &mut logits), Err(Error::CacheFull { needed: 5, .. })));
    assert!(matches!(
        model.forward(&[0; 2], &mut cache, 2, &mut logits),
        Err(Error::LogitsBuffer { expected: 540, .. })
    ));
    assert!(matches!(model.forward(&[], &mut cache, 1, &mut logits), Err(Error::LogitsBuffer { .. })));
    assert!(matches!(checkpoint.tensor("none"), Err(Error::MissingTensor { .. })));
    assert_eq!(cache.len(), 0);
    model.forward(&[], &mut cache, 0, &mut []).unwrap();
    model.forward(&[1, 2], &mut cache, 0, &mut []).unwrap();
    assert_eq!(cache.len(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]

    /// Whatever one damaged byte or cut does, opening returns a value or an error.
    #[test]
    fn damage_never_panics(file in 0..4usize, at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>()) {
        let names = ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"];
        let dir = Fixture::new("BF16", true).write();
        let mut bytes = dir.get(names[file]);
        // In the weights, the header is the interesting part.
        let end = if file == 3 { 4096 } else { bytes.len() };
        let at = at.index(end);
        if cut { bytes.truncate(at) } else { bytes[at] = byte }
        dir.put(names[file], &bytes);
        if let Err(error) = dir.open() {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
