//! What can be wrong with what a user gives: each is a sentence on standard error that names the thing, and an exit
//! code that is not 0, and nothing on standard output.

use assert_cmd::assert::Assert;
use predicates::prelude::*;
use serde_json::{Value, json};

use crate::broken::Broken;
use crate::eagle::Head;
use crate::{golden, json_of, warpdraft};

const SHARD: &str = "model.safetensors";

/// A failed run with every one of `parts` in its one sentence.
fn refused(run: Assert, code: i32, parts: &[&str]) {
    let run = run.code(code).stdout("");
    let stderr = String::from_utf8_lossy(&run.get_output().stderr).into_owned();
    for part in parts {
        assert!(stderr.contains(part), "no {part:?} in: {stderr}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
    if code == 1 {
        assert!(
            stderr.starts_with("warpdraft: ") && stderr.trim_end().lines().count() == 1,
            "not a sentence: {stderr}"
        );
    }
}

/// `generate` with the checkpoint fails, and says all of `parts`.
fn model_refused(broken: &Broken, parts: &[&str]) {
    refused(warpdraft(&["generate", "--model", broken.path(), "abc"]).assert(), 1, parts);
}

/// `generate` with these arguments is not understood.
fn usage_refused(args: &[&str], parts: &[&str]) {
    refused(warpdraft(&["generate"]).args(args).arg("abc").assert(), 2, parts);
}

#[test]
fn kernels_for_a_card_where_there_is_none() {
    let file = golden("tied_bf16").join("config.json");
    for device in ["cpu", "emulator"] {
        let run = warpdraft(&["generate", "abc", "--device", device, "--kernels"]).arg(&file).assert();
        refused(run, 1, &["--kernels", "config.json", "CUDA card"]);
    }
}

// Checkpoints.

#[test]
fn unknown_model() {
    let run = warpdraft(&["generate", "--model", "./no/such/dir", "abc"]).assert();
    refused(run, 1, &["no model at `./no/such/dir`", "hub id", "`demo`"]);
}

#[test]
fn model_that_is_a_file() {
    let file = golden("tied_bf16").join("config.json");
    let parts = ["no model at", "which is a file", "config.json", "GGUF"];
    refused(warpdraft(&["generate", "abc", "--model"]).arg(file).assert(), 1, &parts);
}

#[test]
fn empty_directory() {
    let dir = tempfile::tempdir().unwrap();
    let run = warpdraft(&["inspect", "--model"]).arg(dir.path()).assert();
    refused(run, 1, &["config.json is missing"]);
}

#[test]
fn model_that_must_not_be_downloaded() {
    let cache = tempfile::tempdir().unwrap();
    let run = warpdraft(&["generate", "--model", "nobody/nothing", "abc"]).env("HF_HUB_CACHE", cache.path()).assert();
    refused(run, 1, &["nobody/nothing", "HF_HUB_OFFLINE"]);
    // Whatever Hugging Face's tools take for yes, and their older variable.
    for (name, value) in [("HF_HUB_OFFLINE", "true"), ("HF_HUB_OFFLINE", "YES"), ("TRANSFORMERS_OFFLINE", "On")] {
        let mut run = warpdraft(&["generate", "--model", "nobody/nothing", "abc"]);
        let run = run.env_remove("HF_HUB_OFFLINE").env("HF_ENDPOINT", "http://127.0.0.1:9").env(name, value);
        refused(run.env("HF_HUB_CACHE", cache.path()).assert(), 1, &["nobody/nothing", "off limits"]);
    }
    // Without a home, never in a folder that anyone may write.
    let mut run = warpdraft(&["generate", "--model", "nobody/nothing", "abc"]);
    for name in ["HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"] {
        run.env_remove(name);
    }
    let output = run.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains(std::env::temp_dir().to_str().unwrap()), "{said}");
}

#[test]
fn missing_shard() {
    let broken = Broken::copy_of("separate_f16_sharded");
    std::fs::remove_file(broken.file("model-00003-of-00004.safetensors")).unwrap();
    model_refused(&broken, &["model-00003-of-00004.safetensors is missing"]);
}

#[test]
fn truncated_shard() {
    let broken = Broken::copy_of("separate_f16_sharded");
    broken.edit("model-00002-of-00004.safetensors", |bytes| bytes.truncate(bytes.len() - 1000));
    model_refused(&broken, &["model-00002-of-00004.safetensors", "cut short"]);
}

#[test]
fn empty_shard() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit(SHARD, Vec::clear);
    model_refused(&broken, &[SHARD, "header"]);
}

#[test]
fn swapped_shards() {
    let broken = Broken::copy_of("separate_f16_sharded");
    let (one, two) = ("model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors");
    let aside = broken.file("aside");
    std::fs::rename(broken.file(one), &aside).unwrap();
    std::fs::rename(broken.file(two), broken.file(one)).unwrap();
    std::fs::rename(aside, broken.file(two)).unwrap();
    model_refused(&broken, &["by the index", "swapped", "model-0000"]);
}

#[test]
fn header_that_lies_about_offsets() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_header(SHARD, |header| {
        let end = &mut header["model.norm.weight"]["data_offsets"][1];
        *end = json!(end.as_u64().unwrap() + 64);
    });
    model_refused(&broken, &[SHARD, "model.norm.weight"]);
}

#[test]
fn header_that_lies_about_shapes() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_header(SHARD, |header| {
        let shape = header["model.norm.weight"]["shape"].as_array_mut().unwrap();
        shape[0] = json!(shape[0].as_u64().unwrap() * 2);
    });
    model_refused(&broken, &[SHARD, "model.norm.weight"]);
}

#[test]
fn weights_of_another_config() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_json("config.json", |config| config["intermediate_size"] = json!(640));
    model_refused(&broken, &["mlp.", "shape", "640"]);
}

#[test]
fn fewer_layers_in_the_file_than_in_the_config() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_json("config.json", |config| {
        let layers = config["num_hidden_layers"].as_u64().unwrap() + 1;
        config["num_hidden_layers"] = json!(layers);
        config.as_object_mut().unwrap().remove("layer_types");
    });
    model_refused(&broken, &["lacks the tensor `model.layers."]);
}

#[test]
fn header_that_is_no_json() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit(SHARD, |bytes| bytes[8..40].fill(b'?'));
    model_refused(&broken, &[SHARD, "header"]);
}

#[test]
fn unknown_dtype() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_header(SHARD, |header| header["model.norm.weight"]["dtype"] = json!("I16"));
    model_refused(&broken, &["`model.norm.weight`", "I16", "BF16"]);
}

#[test]
fn unknown_architecture() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_json("config.json", |config| config["architectures"] = json!(["GemmaForCausalLM"]));
    model_refused(&broken, &["config.json", "`GemmaForCausalLM`", "Qwen3ForCausalLM", "LlamaForCausalLM"]);
}

#[test]
fn mixture_of_experts() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_json("config.json", |config| config["architectures"] = json!(["Qwen3MoeForCausalLM"]));
    model_refused(&broken, &["`Qwen3MoeForCausalLM`", "mixture-of-experts"]);
}

#[test]
fn config_that_is_cut_short() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit("config.json", |bytes| bytes.truncate(100));
    model_refused(&broken, &["config.json", "fetch the file again"]);
}

#[test]
fn tokenizer_that_does_not_fit_the_vocabulary() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_json("tokenizer.json", |tokenizer| {
        let token = json!({ "id": 5000, "content": "<|stray|>", "single_word": false, "lstrip": false, "rstrip": false,
                            "normalized": false, "special": true });
        tokenizer["model"]["vocab"]["<|stray|>"] = json!(5000);
        tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    });
    model_refused(&broken, &["tokenizer.json", "5000", "vocabulary of 288"]);
}

#[test]
fn tokenizer_that_is_no_tokenizer() {
    let broken = Broken::copy_of("tied_bf16");
    broken.edit_json("tokenizer.json", |tokenizer| *tokenizer = Value::Null);
    model_refused(&broken, &["tokenizer.json"]);
}

#[test]
fn nan_in_the_weights() {
    let broken = Broken::copy_of("tied_bf16");
    broken.overwrite(SHARD, "model.layers.0.mlp.up_proj.weight", &0x7fc0u16.to_le_bytes());
    model_refused(&broken, &["element 0", "`model.layers.0.mlp.up_proj.weight`", SHARD, "NaN"]);
}

#[test]
fn chat_template_that_does_not_compile() {
    let broken = Broken::copy_of("tied_bf16");
    std::fs::write(broken.file("chat_template.jinja"), "{% for %}").unwrap();
    model_refused(&broken, &["chat_template.jinja", "line 1"]);
}

// Devices.

/// There is a driver where there is a GPU, and then this says nothing.
#[test]
fn cuda_without_a_driver() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let run = warpdraft(&["generate", "--device", "cuda", "abc"]).assert();
    refused(run, 1, &["no usable CUDA card", "--device cpu"]);
}

/// Said before anything is loaded: a cache of some 400 GiB, for many layers and a context that no published model has.
#[test]
#[ignore = "needs a GPU: asks for more memory than it has"]
fn card_with_too_little_memory() {
    let broken = too_large();
    let huge = ["generate", "--device", "cuda", "--context", "16777216", "--model", broken.path(), "abc"];
    refused(
        warpdraft(&huge).assert(),
        1,
        &["this model needs", "GiB of cache for 16777216 tokens", "are free", "--context"],
    );
}

fn too_large() -> Broken {
    let broken = Broken::copy_of("tied_bf16");
    broken.repeat_layer(48);
    broken.edit_json("config.json", |config| config["max_position_embeddings"] = json!(16_777_216));
    broken
}

/// That the checkpoint above is refused for its size alone.
#[test]
fn a_huge_context_is_reckoned_without_a_gpu() {
    let inspect = ["inspect", "--context", "16777216", "--json"];
    let json = json_of(warpdraft(&inspect).arg(too_large().path()));
    assert!(json["memory"]["total_bytes"].as_u64().unwrap() > 256 << 30);
    assert_eq!(json["gpu_unsupported"], Value::Null);
}

/// The CPU's keys and values are f32: twice as many bytes as a card's, and more than any machine has.
#[test]
fn a_context_that_memory_does_not_hold() {
    let broken = too_large();
    let huge = ["generate", "--context", "16777216", "--model", broken.path(), "abc"];
    refused(warpdraft(&huge).assert(), 1, &["--context 16777216 needs", "GiB of memory", "use a shorter --context"]);
    let requests = broken.file("requests.jsonl");
    std::fs::write(&requests, "{\"prompt\": \"abc\"}\n").unwrap();
    let (requests, results) = (requests.to_str().unwrap(), broken.file("results.jsonl"));
    let batch = ["batch", requests, "--context", "16777216", "--model", broken.path(), "-o", results.to_str().unwrap()];
    refused(warpdraft(&batch).assert(), 1, &["GiB", "shorter --context"]);
}

/// Makes the first MLP's output infinite for the token `Z` alone, to which feature 0 belongs then. The model has 128
/// features; `bytes` are those of an element.
fn overflow_at_z<const BYTES: usize>(broken: &Broken, bytes: impl Fn(f32) -> [u8; BYTES]) {
    let put = |row: &mut [u8], number: f32| row[..BYTES].copy_from_slice(&bytes(number));
    broken.edit_tensor("model.safetensors", "model.embed_tokens.weight", |data| {
        let rows = data.chunks_exact_mut(128 * BYTES).zip(0..);
        rows.for_each(|(row, token)| put(row, if token == 57 { 9.0 } else { 0.0 }));
    });
    broken.edit_tensor("model.safetensors", "model.layers.0.self_attn.o_proj.weight", |data| {
        let inputs = data.len() / 128;
        data[..inputs].fill(0);
    });
    broken.edit_tensor("model.safetensors", "model.layers.0.mlp.up_proj.weight", |data| {
        data.chunks_exact_mut(128 * BYTES).for_each(|row| put(row, 3e38));
    });
}

/// Weights that are finite, and a product of them that is not: never a token.
#[test]
fn numbers_out_of_range_are_an_error_and_of_their_request_alone() {
    let broken = Broken::copy_of("tied_f32");
    overflow_at_z(&broken, f32::to_le_bytes);
    let run = warpdraft(&["generate", "--model", broken.path(), "abZ"]).assert();
    refused(run, 1, &["outputs of layer 0", "for position 2", "NaN or infinity"]);
    warpdraft(&["generate", "--max-tokens", "1", "--model", broken.path(), "abc"]).assert().success();

    let requests = broken.file("requests.jsonl");
    std::fs::write(
        &requests,
        ["abc", "abZ", "bcd"].map(|prompt| format!("{{\"prompt\": \"{prompt}\", \"max_tokens\": 1}}\n")).concat(),
    )
    .unwrap();
    let results = broken.file("results.jsonl");
    let batch = ["batch", requests.to_str().unwrap(), "--model", broken.path(), "-o", results.to_str().unwrap()];
    warpdraft(&batch).output().unwrap();
    let text = std::fs::read_to_string(&results).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    let failed: Vec<&Value> = lines.iter().filter(|line| line.to_string().contains("NaN or infinity")).collect();
    assert_eq!(failed.len(), 1, "{text}");
}

/// The first layer makes infinity of one token, and the second NaN of its key and value. They lie behind the end of the
/// shorter text that has their page next, and kernels multiply what lies there by zero.
#[test]
fn numbers_out_of_range_are_not_met_by_who_has_their_page_next() {
    let broken = Broken::copy_of("tied_bf16");
    overflow_at_z(&broken, |number| ((number.to_bits() >> 16) as u16).to_le_bytes());
    let requests = broken.file("requests.jsonl");
    let texts = ["abc", "abZ", "bc", "b"];
    let lines = texts.map(|text| format!("{{\"prompt\": \"{text}\", \"max_tokens\": 3}}\n"));
    std::fs::write(&requests, lines.concat()).unwrap();
    for device in ["cpu", "emulator"] {
        let results = broken.file(&format!("{device}.jsonl"));
        let batch = ["batch", requests.to_str().unwrap(), "--model", broken.path(), "-o", results.to_str().unwrap()];
        warpdraft(&batch).args(["--device", device, "--sequences", "1", "--context", "64"]).output().unwrap();
        let text = std::fs::read_to_string(&results).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let failed: Vec<bool> = lines.iter().map(|line| line.to_string().contains("NaN or infinity")).collect();
        assert_eq!(failed, [false, true, false, false], "{device}: {text}");
    }
}

/// Said once, in a pipe without colours, whatever is logged.
#[test]
fn a_hub_that_does_not_answer_is_said_once() {
    let cache = tempfile::TempDir::new().unwrap();
    let mut run = warpdraft(&["generate", "--model", "nobody/nothing", "abc"]);
    run.env_remove("HF_HUB_OFFLINE").env_remove("TRANSFORMERS_OFFLINE").env("NO_PROXY", "127.0.0.1");
    run.env("HF_ENDPOINT", "http://127.0.0.1:9").env("HF_HOME", cache.path());
    let said = |run: &mut assert_cmd::Command| String::from_utf8(run.output().unwrap().stderr).unwrap();
    let quiet = said(&mut run);
    assert_eq!((quiet.lines().count(), quiet.matches("nobody/nothing").count()), (1, 1), "{quiet}");
    assert!(quiet.contains("check the network"), "{quiet}");
    let logged = said(run.env("RUST_LOG", "trace"));
    assert!(logged.lines().count() > 1 && !logged.contains('\u{1b}'), "{logged}");
}

/// An empty variable is not set.
#[test]
fn an_empty_variable_names_no_model() {
    let mut run = warpdraft(&["inspect"]);
    run.env("WARPDRAFT_MODEL", "").env("WARPDRAFT_DEVICE", "").assert().success();
}

/// Only flags contradict each other: what is typed comes before a variable.
#[test]
fn a_variable_is_a_default_and_no_more() {
    let inspect = |args: &[&str], model: &str| {
        let mut run = warpdraft(&["inspect", "--json"]);
        run.args(args).env("WARPDRAFT_MODEL", model);
        run
    };
    let small = golden("tied_bf16").display().to_string();
    for (args, model) in [(&["demo"][..], "x"), (&["--model", "demo"], "x"), (&[], "demo")] {
        assert_eq!(json_of(&mut inspect(args, model))["architecture"]["layers"], 6, "{args:?}");
    }
    assert_ne!(json_of(&mut inspect(&[], &small))["architecture"]["layers"], 6);
    refused(inspect(&["demo", "--model", "demo"], "").assert(), 2, &["--model", "cannot be used with"]);
    refused(inspect(&[], "./no/such/dir").assert(), 1, &["no model at", "./no/such/dir"]);
    let device =
        |args: &[&str]| warpdraft(&["generate", "x", "-n", "1"]).args(args).env("WARPDRAFT_DEVICE", "gpu").assert();
    refused(device(&[]), 2, &["the variable WARPDRAFT_DEVICE", "gpu is none of auto, cpu"]);
    device(&["--device", "cpu"]).success();
    // What help and manual say does not depend on the machine.
    let pages = tempfile::tempdir().unwrap();
    for args in [&["inspect", "--help"][..], &["generate", "-h"], &["manual", pages.path().to_str().unwrap()]] {
        let mut run = warpdraft(args);
        let run = run.env("WARPDRAFT_MODEL", "my-secret").env("WARPDRAFT_DEVICE", "emulator-9").assert().success();
        run.stdout(predicate::str::contains("my-secret").or(predicate::str::contains("emulator-9")).not());
    }
    let page = std::fs::read_to_string(pages.path().join("warpdraft-generate.1")).unwrap();
    assert!(page.contains("WARPDRAFT_MODEL") && !page.contains("my-secret") && !page.contains("emulator-9"), "{page}");
}

#[test]
#[ignore = "needs a GPU: asks for a card beyond the last"]
fn card_that_is_not_there() {
    let run = warpdraft(&["generate", "--device", "cuda:99", "abc", "--model"]).arg(golden("tied_bf16")).assert();
    refused(run, 1, &["no card 99"]);
}

// Prompts.

#[test]
fn prompt_longer_than_the_context() {
    let prompt = "word ".repeat(50);
    let run = warpdraft(&["generate", "--context", "16", &prompt]).assert();
    refused(run, 1, &["the context holds 16", "--context", "4096"]);
}

#[test]
fn context_longer_than_the_model() {
    refused(warpdraft(&["generate", "--context", "5000", "abc"]).assert(), 1, &["--context 5000", "4096"]);
}

#[test]
fn empty_prompt() {
    refused(warpdraft(&["generate", ""]).assert(), 1, &["the prompt is empty"]);
    refused(warpdraft(&["generate"]).write_stdin("").assert(), 1, &["the prompt is empty"]);
    refused(warpdraft(&["generate", "-"]).write_stdin("\n").assert(), 1, &["the prompt is empty"]);
}

#[test]
fn prompt_file_that_is_not_utf8() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("latin1.txt");
    std::fs::write(&file, b"caf\xe9").unwrap();
    let run = warpdraft(&["generate", "--file"]).arg(&file).assert();
    refused(run, 1, &["latin1.txt is not UTF-8", "byte 3"]);
    refused(warpdraft(&["generate"]).write_stdin(b"caf\xe9".as_slice()).assert(), 1, &["standard input is not UTF-8"]);
}

#[test]
fn prompt_file_that_is_not_there() {
    let run = warpdraft(&["generate", "--file", "no-such-file.txt"]).assert();
    refused(run, 1, &["no-such-file.txt", "No such file"]);
}

#[test]
fn prompt_file_that_is_a_directory() {
    refused(warpdraft(&["generate", "--file", "."]).assert(), 1, &["cannot read the prompt from .", "directory"]);
}

#[test]
fn draft_model_that_does_not_fit_the_model() {
    let mut run = warpdraft(&["generate", "abc", "--draft", "model:demo", "--model"]);
    refused(
        run.arg(golden("tied_bf16")).assert(),
        1,
        &["the draft model has another vocabulary: token", "same family"],
    );
    let run = warpdraft(&["generate", "abc", "--draft", "model:./no/such/dir"]).assert();
    refused(run, 1, &["no model at", "./no/such/dir"]);
}

#[test]
fn draft_head_that_is_none_or_another_models() {
    let with = |which: &str| warpdraft(&["generate", "abc", "--draft", &format!("eagle3:{which}")]).assert();
    refused(with(&golden("tied_bf16").display().to_string()), 1, &["`Qwen3ForCausalLM`", "no EAGLE-3 head"]);
    refused(with("demo"), 1, &["no EAGLE-3 head"]);
    refused(with("./no/such/dir"), 1, &["no model at", "./no/such/dir"]);
    let head = Head::ORIGINAL.write();
    refused(with(&head.path().display().to_string()), 1, &["made for another model", "vocab_size is 288"]);
    let draft = format!("eagle3:{}", head.path().display());
    let run = warpdraft(&["batch", "-", "-o", "-", "--draft", &draft]).write_stdin("").assert();
    refused(run, 1, &["made for another model", "vocab_size is 288"]);
    usage_refused(&["--draft", "eagle3:"], &["eagle3: lacks the head"]);
    usage_refused(&["--draft", "eagle2:x"], &["eagle2:x is none of none, auto, ngram", "eagle3:HEAD"]);
}

// Flags: exit code 2, as for any mistake in usage.

#[test]
fn flags_out_of_range() {
    usage_refused(&["--draft-tokens", "99"], &["--draft-tokens", "1..=15"]);
    usage_refused(&["--draft-tokens", "0"], &["--draft-tokens"]);
    usage_refused(&["--ngram-min", "0"], &["--ngram-min"]);
    usage_refused(&["--ngram-max", "2", "--ngram-min", "3"], &["--ngram-max 2 is less than --ngram-min 3"]);
    usage_refused(&["--top-p", "2"], &["--top-p", "above 0 and at most 1"]);
    usage_refused(&["--top-p", "0"], &["--top-p"]);
    usage_refused(&["--min-p", "-0.5"], &["--min-p", "at least 0"]);
    usage_refused(&["--temperature", "-1"], &["--temperature", "0 (greedy) or more"]);
    usage_refused(&["--temperature", "nan"], &["--temperature"]);
    usage_refused(&["--temperature", "warm"], &["--temperature", "must be a number"]);
    usage_refused(&["--repetition-penalty", "0"], &["--repetition-penalty", "above 0"]);
    usage_refused(&["--presence-penalty", "inf"], &["--presence-penalty", "finite"]);
    usage_refused(&["--frequency-penalty", "inf"], &["--frequency-penalty", "finite"]);
    usage_refused(&["--max-tokens", "0"], &["--max-tokens", "1 or more"]);
    usage_refused(&["--context", "1"], &["--context", "2 or more"]);
    usage_refused(&["--max-tokens", "-1"], &["--max-tokens", "1 or more"]);
    usage_refused(&["--seed", "-1"], &["--seed", "from 0 to 18446744073709551615"]);
    usage_refused(&["--stop", ""], &["--stop"]);
}

#[test]
fn flags_with_unknown_values() {
    usage_refused(&["--device", "gpu"], &["--device", "none of auto, cpu, cuda, cuda:N, emulator"]);
    usage_refused(&["--device", "cuda:one"], &["--device", "one is not the number of a card"]);
    usage_refused(&["--draft", "eagle"], &["--draft", "none", "ngram", "model:MODEL"]);
    usage_refused(&["--draft", "model:"], &["--draft", "lacks the model"]);
    usage_refused(&["--no-such-flag"], &["--no-such-flag"]);
}

#[test]
fn flags_that_contradict() {
    usage_refused(&["--file", "x.txt"], &["--file"]);
    usage_refused(&["--quiet", "--verbose"], &["--quiet", "--verbose"]);
    usage_refused(&["--system", "Be brief."], &["--chat"]);
    usage_refused(&["--no-think"], &["--chat"]);
    usage_refused(&["--revision", "main"], &["--revision", "demo"]);
}

#[test]
fn no_command() {
    warpdraft(&[]).assert().code(2).stdout("").stderr(predicate::str::contains("Usage: warpdraft"));
}

#[test]
fn a_profile_that_cannot_be_written_is_refused_before_the_model_is_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let to = |path: &std::path::Path| {
        let command = ["generate", "abc", "--model", "nobody/nothing", "--profile"];
        warpdraft(&command).arg(path).assert()
    };
    refused(to(folder.path()), 1, &["cannot write the profile to", "folder", "name a file"]);
    let nowhere = folder.path().join("no/such/folder/profile.json");
    refused(to(&nowhere), 1, &["cannot write the profile to", "no/such/folder"]);
    // A run that fails later leaves nothing behind, and what was there as it was.
    let file = folder.path().join("profile.json");
    std::fs::write(&file, "kept").unwrap();
    to(&file).failure();
    assert_eq!(std::fs::read(&file).unwrap(), b"kept");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
