//! `warpdraft inspect`.

use predicates::prelude::*;
use serde_json::Value;

use crate::hub_server::{Hub, files_of};
use crate::{golden, json_of, stdout_of, warpdraft};

#[test]
fn the_demo_is_described() {
    let text = stdout_of(&mut warpdraft(&["inspect"]));
    for part in [
        "Qwen3ForCausalLM",
        "layers             6",
        "4 query, 2 key-value, of size 128",
        "temperature 0.7",
        "memory on the CPU, for as many tokens: ",
        "of weights, mapped from the files; 48.0 MiB of keys and values, 12 KiB a token)",
        "cards",
        "at most 16 query heads",
    ] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
}

#[test]
fn json_has_the_figures() {
    let json = json_of(&mut warpdraft(&["inspect", "demo", "--context", "1000", "--json"]));
    assert_eq!(json["architecture"]["layers"], 6);
    assert_eq!(json["chat_template"], true);
    let memory = &json["memory"];
    let (weights, working) = (memory["weight_bytes"].as_u64().unwrap(), memory["working_bytes"].as_u64().unwrap());
    // 6 layers of 384 and 896 features with inputs in whole chunks of 512; the head, which is the embedding too; norms.
    let layer = (1024 + 384 + 1792) * 512 + 384 * 1024;
    let all = 6 * layer + 4096 * 512 + 4096 * 384 + 6 * (2 * 384 + 2 * 128) + 384;
    assert_eq!(weights, 2 * all, "bf16, laid out");
    assert_eq!(memory["kv_bytes_per_token"], 2 * 6 * 2 * 128 * 2, "keys and values, 6 layers, 2 heads of 128, bf16");
    assert_eq!(memory["context"], 1000);
    assert!(working > 1000 * 6144);
    assert_eq!(memory["total_bytes"], weights + working);
    assert_eq!(json.get("tensors"), None);
    let cpu = &json["cpu"];
    assert_eq!(cpu["weight_bytes"], json["stored_bytes"], "as they are stored");
    assert_eq!(cpu["kv_bytes_per_token"], 2 * 6144, "f32");
    assert_eq!(cpu["total_bytes"], json["stored_bytes"].as_u64().unwrap() + 1000 * 2 * 6144);
}

#[test]
fn shards_and_tensors_are_listed() {
    let dir = golden("separate_f16_sharded");
    let text = stdout_of(warpdraft(&["inspect", "--tensors", "--model"]).arg(&dir));
    for part in ["model-00004-of-00004.safetensors", "lm_head.weight", "[272, 128]", "F16", "its own"] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    let json = json_of(warpdraft(&["inspect", "--tensors", "--json"]).arg(&dir));
    assert_eq!(json["files"].as_array().unwrap().len(), 4);
    assert_eq!(json["tensors"].as_array().unwrap().len(), 14);
}

#[test]
fn a_scaled_rotation_is_said() {
    let dir = golden("yarn_bf16");
    let text = stdout_of(warpdraft(&["inspect", "--model"]).arg(&dir));
    assert!(text.contains("YaRN, 4 × 32 positions"), "{text}");
    let json = json_of(warpdraft(&["inspect", "--json"]).arg(&dir));
    let scaling = serde_json::json!({"kind": "yarn", "factor": 4.0, "original_positions": 32});
    assert_eq!(json["architecture"]["rope_scaling"], scaling);
}

#[test]
fn families_are_told() {
    for (name, parts) in [
        ("tied_bf16", ["Qwen3ForCausalLM", "of size 128, with norms"]),
        ("tied_qwen2_bf16", ["Qwen2ForCausalLM", "of size 128, with biases"]),
        ("separate_llama_bf16", ["LlamaForCausalLM", "Llama 3's, 4 × 32 positions"]),
    ] {
        let text = stdout_of(warpdraft(&["inspect", "--model"]).arg(golden(name)));
        for part in parts {
            assert!(text.contains(part), "no {part:?} in:\n{text}");
        }
    }
    let json = json_of(warpdraft(&["inspect", "--json"]).arg(golden("tied_qwen2_bf16")));
    let architecture = &json["architecture"];
    assert_eq!(architecture["name"], "Qwen2ForCausalLM");
    assert_eq!((&architecture["head_norms"], &architecture["query_key_value_biases"]), (&false.into(), &true.into()));
    // Each bias counts once: 2 layers of 512.
    let weights = 272 * 128 + 2 * (512 * 128 + 128 * 256 + 3 * 128 * 128 + 2 * 128 + 512) + 128;
    assert_eq!(json["parameters"], weights);
}

#[test]
fn check_reads_every_weight() {
    let broken = crate::broken::Broken::copy_of("tied_bf16");
    broken.overwrite("model.safetensors", "model.norm.weight", &0x7fc0u16.to_le_bytes());
    warpdraft(&["inspect", broken.path()]).assert().success();
    let check = warpdraft(&["inspect", "--check", broken.path()]).assert();
    check.code(1).stderr(predicate::str::contains("`model.norm.weight`").and(predicate::str::contains("NaN")));
}

#[test]
fn a_context_beyond_the_model_is_refused() {
    let run = warpdraft(&["inspect", "--context", "100000"]).assert();
    run.code(1).stdout("").stderr(predicate::str::contains("more than the 4096 positions"));
}

/// Config and headers are enough: the rest of the model stays where it is.
#[test]
fn a_model_on_the_hub_is_described_without_its_weights() {
    let files = files_of(&golden("separate_f16_sharded"));
    let (hub, address) = Hub { files, has_parts: true, lists_siblings: true, ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    let inspect = |args: &[&str]| {
        let mut run = warpdraft(&["inspect", "some/model"]);
        run.args(args).env_remove("HF_HUB_OFFLINE").env_remove("TRANSFORMERS_OFFLINE").env("NO_PROXY", "127.0.0.1");
        run.env("HF_ENDPOINT", format!("http://{address}")).env("HF_HOME", cache.path());
        run
    };
    let json = json_of(&mut inspect(&["--json"]));
    assert_eq!(json["files"].as_array().unwrap().len(), 4);
    assert_eq!((&json["tokenizer_tokens"], &json["chat_template"]), (&Value::Null, &Value::Null));
    let local = json_of(warpdraft(&["inspect", "--json"]).arg(golden("separate_f16_sharded")));
    for field in ["parameters", "stored_bytes", "architecture", "files"] {
        assert_eq!(json[field], local[field], "{field}");
    }
    // What weights pack to, they alone can tell.
    let mut memory = local["memory"].clone();
    for field in ["packed_bytes", "packed_from_bytes", "packed_alone_bytes"] {
        assert!(memory[field].take().as_u64().is_some_and(|bytes| bytes > 0), "{field}");
    }
    assert_eq!(json["memory"], memory);
    assert!(stdout_of(&mut inspect(&[])).contains("the model is not on this machine"));
    assert!(hub.asked("tokenizer.json").is_empty());
    let sent: usize = hub.log.lock().unwrap().iter().map(|request| request.sent).sum();
    let stored = json["stored_bytes"].as_u64().unwrap() as usize;
    assert!(sent < stored / 2, "{sent} bytes came of a model of {stored}");

    // To read every weight, all is fetched; then it is there.
    let checked = json_of(&mut inspect(&["--check", "--json"]));
    assert_eq!(
        (&checked["weights_checked"], &checked["tokenizer_tokens"]),
        (&Value::Bool(true), &local["tokenizer_tokens"])
    );
    assert_eq!(json_of(&mut inspect(&["--json"]))["chat_template"], local["chat_template"]);
}

/// What contradicts itself is said, and what was made of it.
#[test]
fn contradictions_are_warned_of() {
    let broken = crate::broken::Broken::copy_of("separate_f16_sharded");
    broken.edit_json("config.json", |config| config["tie_word_embeddings"] = Value::Bool(true));
    let output = warpdraft(&["inspect", "--json", broken.path()]).output().unwrap();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["warnings"].as_array().unwrap().len(), 1);
    assert_eq!(json["architecture"]["tied_embeddings"], false);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.matches("tie_word_embeddings").count(), 1, "{said}");
    assert!(said.starts_with("warpdraft: warning: "), "{said}");
}
