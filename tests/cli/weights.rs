//! Quantised checkpoints, and `--weights`.

use predicates::prelude::*;
use serde_json::Value;

use crate::hub_server::{Hub, files_of};
use crate::{golden, json_of, stdout_of, warpdraft};

/// The kind of weights of that name.
fn kind<'a>(json: &'a Value, name: &str) -> &'a Value {
    let kinds = json["weights"]["kinds"].as_array().unwrap();
    kinds.iter().find(|kind| kind["kind"] == name).unwrap_or_else(|| panic!("no {name} in {kinds:?}"))
}

#[test]
fn inspect_tells_formats_and_bytes() {
    for (name, format, method, bits) in [
        ("awq", "AWQ int4, groups of 128", "awq", 4.156_25),
        ("gptq_qwen2", "GPTQ int4, groups of 128", "gptq", 4.406_25),
        ("w4a16", "pack-quantized int4, groups of 128", "compressed-tensors", 4.125),
        ("fp8_blocks", "FP8 (e4m3), blocks of 128 × 128", "fp8", 8.000_976_562_5),
    ] {
        let dir = golden("formats").join(name);
        let text = stdout_of(warpdraft(&["inspect", "--model"]).arg(&dir));
        assert!(text.contains(&format!("{bits:.2} bits: {format}")), "{text}");
        assert!(text.contains("a step reads"), "{text}");
        let json = json_of(warpdraft(&["inspect", "--json"]).arg(&dir));
        let weights = &json["weights"];
        assert_eq!((&weights["mode"], &weights["quantization"]), (&"plain".into(), &method.into()));
        let qkv = kind(&json, "qkv");
        assert_eq!((&qkv["format"], &qkv["weights"]), (&format.into(), &(3 * 128 * 128).into()));
        assert_eq!(qkv["bits_per_weight"], bits, "{name}");
        assert_eq!(qkv["stored_bytes"], qkv["format_bytes"]);
        // A tied head is the embedding: all is read, as bf16.
        assert_eq!(weights["step_bytes"], 2 * json["parameters"].as_u64().unwrap());
        assert!(weights["step_format_bytes"].as_u64() < weights["step_bytes"].as_u64());
    }
}

#[test]
fn inspect_tells_what_rounding_comes_to() {
    let dir = golden("tied_bf16");
    for (mode, format, bits) in [
        ("plain", "BF16", 16.0),
        ("fp8", "FP8 (e4m3), blocks of 128 × 128, rounded while loading", 8.001_953_125),
        ("int4", "int4, groups of 128, rounded to nearest while loading", 4.156_25),
    ] {
        let json = json_of(warpdraft(&["inspect", "--json", "--weights", mode]).arg(&dir));
        assert_eq!(json["weights"]["mode"], mode);
        let down = kind(&json, "down");
        assert_eq!((&down["format"], &down["bits_per_weight"]), (&format.into(), &bits.into()));
        assert_eq!(down["stored_bytes"], 2 * down["weights"].as_u64().unwrap());
        assert_eq!(kind(&json, "embedding")["format"], "BF16");
    }
}

/// Every format runs, and rounding gives another text than what is stored.
#[test]
fn quantised_weights_and_rounded_ones_run() {
    let generate = |dir: &std::path::Path, more: &[&str]| {
        let mut run = warpdraft(&["generate", "--quiet", "--json", "--temperature", "0", "--ignore-eos", "-n", "24"]);
        json_of(run.args(more).arg("--model").arg(dir).arg("the sea"))["tokens"].clone()
    };
    for name in ["fp8_channels", "gptq_desc_act", "w4a16_zeros"] {
        let dir = golden("formats").join(name);
        let tokens = generate(&dir, &[]);
        assert_eq!(tokens.as_array().unwrap().len(), 24);
        assert_eq!(generate(&dir, &["--draft", "none"]), tokens, "{name}");
    }
    let dir = golden("tied_bf16");
    let [plain, named, int4] =
        [&[][..], &["--weights", "plain"], &["--weights", "int4"]].map(|more| generate(&dir, more));
    assert_eq!(plain, named);
    assert_ne!(plain, int4);
}

#[test]
fn what_is_quantised_is_not_quantised_again() {
    let run = warpdraft(&["generate", "--weights", "int4", "x", "--model"]).arg(golden("formats/awq")).assert();
    let sentence = predicate::str::contains("--weights int4").and(predicate::str::contains("leave --weights out"));
    run.code(1).stdout("").stderr(sentence);
    let run = warpdraft(&["generate", "--weights", "int3", "x"]).assert();
    run.code(2).stderr(predicate::str::contains("auto, plain, packed, fp8, int4"));
}

/// Results of rounded weights are not taken for those of others when a batch goes on.
#[test]
fn a_batch_does_not_go_on_with_other_weights() {
    let folder = tempfile::TempDir::new().unwrap();
    let (requests, results) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    std::fs::write(&requests, "{\"prompt\": \"the sea\", \"max_tokens\": 3}\n").unwrap();
    let batch = |more: &[&str]| {
        let mut run = warpdraft(&["batch", "--quiet"]);
        run.args(more).arg(&requests).arg("-o").arg(&results);
        run
    };
    batch(&["--weights", "fp8"]).assert().success();
    batch(&["--weights", "fp8"]).assert().success();
    batch(&[]).assert().code(1).stderr(predicate::str::contains("out.jsonl"));
}

/// The hub's files are enough, with biases of zeros among them that nobody can look at there.
#[test]
fn a_quantised_model_on_the_hub_is_described() {
    let files = files_of(&golden("formats/gptq_qwen2"));
    let (_hub, address) = Hub { files, has_parts: true, lists_siblings: true, ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    let mut run = warpdraft(&["inspect", "some/model", "--json"]);
    run.env_remove("HF_HUB_OFFLINE").env_remove("TRANSFORMERS_OFFLINE").env("NO_PROXY", "127.0.0.1");
    run.env("HF_ENDPOINT", format!("http://{address}")).env("HF_HOME", cache.path());
    let local = json_of(warpdraft(&["inspect", "--json"]).arg(golden("formats/gptq_qwen2")));
    assert_eq!(json_of(&mut run)["weights"], local["weights"]);
}
