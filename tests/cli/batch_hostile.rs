//! `warpdraft batch` and others, given what was made to end, hang or deceive them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use predicates::prelude::*;
use serde_json::{Value, json};

use crate::batch::{Folder, short, text_of};
use crate::{golden, json_of, warpdraft};

/// A copy of a model in `folder`, with this chat template.
fn with_template(folder: &Folder, name: &str, template: &str) -> PathBuf {
    let copy = folder.path(name);
    std::fs::create_dir(&copy).unwrap();
    for file in std::fs::read_dir(golden("tied_bf16")).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), copy.join(file.file_name())).unwrap();
    }
    std::fs::write(copy.join("chat_template.jinja"), template).unwrap();
    copy
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Far too long to be tokenised: neither in time nor in memory.
#[test]
fn a_text_that_is_far_too_long_is_refused_at_once() {
    let folder = Folder::with("");
    let mut requests = String::new();
    let mixed = |count: usize| (0..count).map(|i| format!("{i:x} é{} ", i % 7)).collect::<String>();
    for prompt in ["a".repeat(25 << 20), "word ".repeat(10 << 20), " ".repeat(60 << 20), mixed(2 << 20)] {
        requests += &(json!({"prompt": prompt}).to_string() + "\n");
        requests += &(json!({"messages": [{"role": "user", "content": prompt}]}).to_string() + "\n");
    }
    requests += &(json!({"prompt": "fn main", "max_tokens": 3}).to_string() + "\n");
    std::fs::write(folder.path("requests.jsonl"), requests).unwrap();
    let start = Instant::now();
    let summary = json_of(&mut folder.batch("results.jsonl", &["--json"]));
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert_eq!(summary["requests"], json!({"answered": 1, "refused": 8, "done_before": 0}));
    assert_eq!(summary["refused_by_code"], json!({"context_length_exceeded": 8}));
    let results = folder.results("results.jsonl");
    for line in 1..=8 {
        let message = results[&line]["error"]["message"].as_str().unwrap();
        assert!(message.contains("tokens or more and the context holds 4096"), "{message}");
    }
    let peak = summary["peak_memory_bytes"].as_u64().unwrap() >> 20;
    assert!(peak < 1500, "{peak} MiB");

    std::fs::write(folder.path("prompt.txt"), "some words ".repeat(1 << 20)).unwrap();
    let start = Instant::now();
    let run = warpdraft(&["generate", "--file", path(&folder.path("prompt.txt")), "-q"]).assert().code(1);
    run.stderr(predicate::str::contains("tokens or more and the context holds 4096"));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_template_that_would_end_or_hang_the_program_is_an_error() {
    let folder = Folder::with(&(json!({"messages": [{"role": "user", "content": "x"}]}).to_string() + "\n"));
    let doubling = "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    let cases = [
        ("itself", "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", false, "namespace"),
        ("terms", &format!("{{{{ {} }}}}", vec!["x"; 20_000].join("+")), true, "within each other"),
        ("indent", "{{ 'x'|indent(99999999999) }}", false, "indent"),
        ("doubling", doubling, false, "MiB"),
        ("ranges", &"{% for i in range(99999) %}".repeat(3), true, "unexpected end"),
        (
            "loops",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            false,
            "more steps than any prompt needs",
        ),
        ("raises", "{{ raise_exception('\\x1b[31mno\\x07') }}", false, "\\u{1b}[31mno\\u{7} (line 1)"),
    ];
    for (name, template, on_opening, part) in cases {
        let model = with_template(&folder, name, template);
        let model = ["--model", path(&model), "--device", "cpu"];
        let start = Instant::now();
        let said = || predicate::str::contains(part).and(predicate::str::contains("panicked").not());
        warpdraft(&["generate", "--chat", "hi", "-q"]).args(model).assert().code(1).stderr(said());
        let output = format!("{name}.jsonl");
        if on_opening {
            warpdraft(&["inspect"]).args(&model[..2]).assert().code(1).stderr(said());
            folder.batch(&output, &model).assert().code(1).stderr(said());
        } else {
            warpdraft(&["inspect"]).args(&model[..2]).assert().success();
            folder.batch(&output, &model).assert().success();
            let results = folder.results(&output);
            let error = &results[&1]["error"];
            let message = error["message"].as_str().unwrap();
            assert!(error["code"] == "invalid_request" && message.contains(part), "{name}: {message}");
            // Results are the same wherever the model is.
            assert!(!message.contains(".jinja"), "{message}");
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{name}: {:?}", start.elapsed());
    }
}

/// The engine of forms recurses into them: far enough to overflow an ordinary stack.
#[test]
fn a_form_that_is_nested_deeply_ends_no_run() {
    let rules = |count: usize| -> String {
        let name = |i: usize| i.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect::<String>();
        let rule = |i: usize| format!("r{}: \"a\" r{}\n", name(i), name(i + 1));
        format!("start: ra\n{}r{}: \"b\"\n", (0..count).map(rule).collect::<String>(), name(count))
    };
    let condition = |count: usize| {
        let (not, end) = ("not(".repeat(count), ")".repeat(count));
        format!("start: r::0\nr::_: \"a\" %if {not}true{end}\n  | \"b\" r::incr(_)\n")
    };
    let schema = |count: usize| {
        let definition = |i: usize| (i.to_string(), json!({"$ref": format!("#/$defs/{}", i + 1)}));
        let last = (count.to_string(), json!({"type": "null"}));
        let definitions: serde_json::Map<_, _> = (0..count).map(definition).chain([last]).collect();
        json!({"$ref": "#/$defs/0", "$defs": definitions})
    };
    let cases = [
        ("guided_grammar", json!(rules(10_000)), ""),
        ("guided_grammar", json!(rules(60_000)), "60002 rules and brackets, and the most is 50000"),
        ("guided_grammar", json!(condition(500)), ""),
        ("guided_grammar", json!(condition(10_000)), "10000 brackets in its conditions"),
        ("guided_json", schema(10_000), ""),
        ("guided_json", schema(60_000), "60003 objects and arrays, and the most is 50000"),
    ];
    let request = |(field, form, _): &(&str, Value, &str)| {
        let mut body = json!({"prompt": "x", "max_tokens": 2});
        body[*field] = form.clone();
        body.to_string() + "\n"
    };
    let folder = Folder::with(&cases.iter().map(request).collect::<String>());
    folder.batch("results.jsonl", &[]).assert().success();
    let results = folder.results("results.jsonl");
    assert_eq!(results.len(), cases.len());
    for ((_, form, refused), result) in cases.iter().zip(results.values()) {
        let error = &result["error"];
        assert_eq!(error.is_null(), refused.is_empty(), "{error}");
        if !refused.is_empty() {
            assert_eq!(error["code"], "unsupported_form");
            assert!(error["message"].as_str().unwrap().contains(refused), "{error}");
        }
        let (flag, text) = match form {
            Value::String(text) => ("--grammar", text.clone()),
            schema => ("--json-schema", schema.to_string()),
        };
        std::fs::write(folder.path("form"), text).unwrap();
        let generate = ["generate", "x", "-n", "2", "-q", flag, "form"];
        let run = warpdraft(&generate).current_dir(folder.path("")).assert();
        let run = if refused.is_empty() { run.success() } else { run.code(1) };
        run.stderr(predicate::str::contains(*refused).and(predicate::str::contains("overflow").not()));
    }
}

/// `-` is a stream, whatever files there are.
#[test]
fn a_file_that_is_called_as_the_streams_are_is_not_read_for_them() {
    let folder = Folder::with("");
    std::fs::write(folder.path("-"), short(9)).unwrap();
    let run = |from: &str, to: &str, requests: String| {
        let mut command = warpdraft(&["batch", from, "-o", to, "-q"]);
        command.current_dir(folder.path("")).write_stdin(requests).assert().success()
    };
    run("-", "results.jsonl", short(3));
    assert_eq!(folder.results("results.jsonl").len(), 3);
    // There is something to go on behind.
    run("-", "results.jsonl", short(5));
    assert_eq!(folder.results("results.jsonl").len(), 5);
    let printed = run("./-", "-", String::new());
    assert_eq!(printed.get_output().stdout.iter().filter(|byte| **byte == b'\n').count(), 9);
    assert_eq!(folder.read("-"), short(9));
}

/// A result may be longer than a request may be: log-probabilities of a long answer are.
#[test]
fn a_long_result_is_merged() {
    let folder = Folder::with("");
    let error = json!({"code": "x", "message": "x".repeat(65 << 20), "line": 1});
    let line = json!({"id": "batch_req_1_0000000000000001", "custom_id": null, "response": null, "error": error});
    std::fs::write(folder.path("part.jsonl"), line.to_string() + "\n").unwrap();
    let mut merge = warpdraft(&["batch", "merge", "part.jsonl", "-o", "all.jsonl"]);
    let run = merge.current_dir(folder.path("")).assert().success();
    run.stderr(predicate::str::contains("1 results of 1 files"));
    assert!(folder.read("all.jsonl") == folder.read("part.jsonl"));
}

#[cfg(unix)]
#[test]
fn the_umask_decides_who_may_read_what_is_written() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Folder::with(&short(1));
    folder.batch("part.jsonl", &[]).assert().success();
    for (umask, mode) in [("027", 0o640), ("002", 0o664), ("077", 0o600)] {
        let run = |arguments: &str| {
            let script = format!("umask {umask}; exec \"$0\" {arguments}");
            let mut bash = assert_cmd::Command::new("bash");
            bash.args(["-c", &script]).arg(crate::binary()).current_dir(folder.path("")).assert().success();
        };
        run(&format!("batch merge part.jsonl -o all-{umask}.jsonl -q"));
        run(&format!("generate x -n 1 -q --device cpu --profile profile-{umask}.json"));
        for name in [format!("all-{umask}.jsonl"), format!("profile-{umask}.json")] {
            let found = std::fs::metadata(folder.path(&name)).unwrap().permissions().mode() & 0o777;
            assert_eq!(found, mode, "{name}");
        }
    }
}

#[test]
fn what_a_request_holds_is_cut_in_its_error_and_written_out() {
    let long = "x".repeat(40 << 20);
    let requests = [
        json!({"prompt": "x", "temperature": long}),
        json!({"prompt": "x", "seed": format!("\u{1b}[31m{}", "y".repeat(1000))}),
        json!({"prompt": "x", "\u{1b}[31m": 1}),
        json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"\u{1b}": 1}}),
        json!({"custom_id": ["\u{7}"], "prompt": "x"}),
    ];
    let folder = Folder::with(&requests.map(|request| request.to_string() + "\n").concat());
    folder.batch("results.jsonl", &[]).assert().success();
    for (line, result) in folder.results("results.jsonl") {
        let message = result["error"]["message"].as_str().unwrap();
        assert!(message.len() < 500, "{line}: {message:.600}");
        assert!(!message.chars().any(char::is_control), "{line}: {message:?}");
    }
}

#[test]
fn a_custom_id_that_is_there_twice_is_refused_under_its_name() {
    let folder = Folder::with("{\"custom_id\": \"a\", \"custom_id\": \"b\", \"prompt\": \"x\"}\n");
    let summary = json_of(&mut folder.batch("results.jsonl", &["--json"]));
    assert_eq!(summary["refused_by_code"], json!({"invalid_request": 1}));
    let result = &folder.results("results.jsonl")[&1];
    assert_eq!((&result["custom_id"], &result["response"]), (&json!("b"), &Value::Null));
    assert_eq!(result["error"]["message"], "`custom_id` is there twice");
}

#[test]
fn a_result_that_was_changed_is_noticed() {
    let folder = Folder::with(&short(3));
    folder.batch("results.jsonl", &[]).assert().success();
    let whole = folder.read("results.jsonl");
    let run = |text: &str| {
        std::fs::write(folder.path("results.jsonl"), text).unwrap();
        let mut command = warpdraft(&["batch", "requests.jsonl", "-o", "results.jsonl"]);
        let run = command.current_dir(folder.path("")).assert();
        // Nothing is lost by that.
        assert!(folder.read("results.jsonl").starts_with(text));
        run
    };
    let changed = whole.replacen("\"total_tokens\":", "\"total_tokens\":1", 1);
    assert_ne!(changed, whole);
    let said = "of results.jsonl is a result that was changed since it was written";
    run(&changed).code(1).stderr(predicate::str::contains(said).and(predicate::str::contains("answered again")));
    // Results of an older version have no digest: they are taken, and that is said.
    let old: String =
        whole.lines().map(|line| line.rsplit_once(",\"digest\":").unwrap().0.to_owned() + "}\n").collect();
    run(&old).success().stderr(predicate::str::contains("warning: 3 results have no digest"));
    run(&whole).success().stderr(predicate::str::contains("warning").not());
}

#[test]
fn thoughts_tools_and_what_was_cut_off_are_told() {
    let tool = json!({"type": "function", "function": {"name": "clock", "parameters": {}}});
    let call = json!({"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "How late?"}], "name": "me"},
        {"role": "assistant", "content": null, "reasoning_content": "look", "tool_calls": [call]},
        {"role": "tool", "content": "12", "tool_call_id": "1"},
    ]);
    let mut requests = json!({"messages": messages, "tools": [tool], "max_tokens": 6}).to_string() + "\n";
    requests += &(json!({"messages": messages, "tools": [tool], "tool_choice": "none"}).to_string() + "\n");
    let folder = Folder::with(&requests);
    // The thought is opened in the prompt, so that the answer could only end it.
    let template = "{{ tools|tojson if tools else '' }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.name }}\
                    {{ m.reasoning_content }}{{ m.tool_calls|tojson if m.tool_calls else '' }}{% endfor %}<think>\n";
    let model = with_template(&folder, "thinks", template);
    let more = ["--model", path(&model), "--ignore-eos", "--temperature", "0", "--json"];
    let summary = json_of(&mut folder.batch("results.jsonl", &more));
    let results = folder.results("results.jsonl");
    let choice = |line: u64| &results[&line]["response"]["body"]["choices"][0];
    let message = &choice(1)["message"];
    assert!(message["reasoning_content"].is_string() && message["content"] == "", "{message}");
    assert!(message.get("tool_calls").is_none(), "{message}");
    let usage = |line: u64| &results[&line]["response"]["body"]["usage"];
    let prompt = |line: u64| usage(line)["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(1) > prompt(2) + 20, "the tools are in the first prompt alone");
    // Without a limit of its own, an answer goes on to the end of the context.
    assert_eq!(usage(1)["completion_tokens"], 6);
    assert_eq!(usage(2)["total_tokens"], 256);
    assert_eq!((choice(2)["finish_reason"].as_str(), &summary["cut_off"]), (Some("length"), &json!(2)));
    folder.batch("said.jsonl", &more[..5]).args(["--max-tokens", "2"]).assert().success();
    let mut told = warpdraft(&["batch", "requests.jsonl", "-o", "told.jsonl", "--device", "cpu"]);
    let told = told.args(&more[..5]).current_dir(folder.path("")).assert().success();
    told.stderr(predicate::str::contains("2 of the answered were cut off by max_tokens or the end of the context"));
}

#[test]
fn log_probabilities_are_of_the_answer_s_tokens() {
    let folder =
        Folder::with(&(json!({"prompt": "impl Iterator for", "max_tokens": 24, "temperature": 0}).to_string() + "\n"));
    folder.batch("plain.jsonl", &[]).assert().success();
    let text = text_of(&folder.results("plain.jsonl")[&1]).to_owned();
    let stop: String = text.chars().skip(12).take(5).collect();
    let request =
        json!({"prompt": "impl Iterator for", "max_tokens": 24, "temperature": 0, "logprobs": 3, "stop": [stop]});
    std::fs::write(folder.path("requests.jsonl"), request.to_string() + "\n").unwrap();
    folder.batch("stopped.jsonl", &[]).assert().success();
    let results = folder.results("stopped.jsonl");
    let logprobs = &results[&1]["response"]["body"]["choices"][0]["logprobs"];
    let said = text_of(&results[&1]);
    let tokens: Vec<&str> = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    let joined = tokens.concat();
    // The last may hold the end of the answer and the beginning of the stop text.
    assert!(
        joined.starts_with(said) && joined.len() - tokens.last().unwrap().len() < said.len(),
        "{joined:?} {said:?}"
    );
    let mut at = 0;
    for (token, offset) in tokens.iter().zip(logprobs["text_offset"].as_array().unwrap()) {
        assert_eq!(offset, at);
        at += token.chars().count();
    }
    for field in ["token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[field].as_array().unwrap().len(), tokens.len(), "{field}");
    }
    assert!(logprobs["top_logprobs"].as_array().unwrap().iter().all(|top| top.as_object().unwrap().len() == 3));
}

#[test]
fn nothing_is_said_of_temporary_files() {
    let folder = Folder::with(&short(1));
    folder.batch("results.jsonl", &[]).assert().success();
    let mut merge = warpdraft(&["batch", "merge", "results.jsonl", "-o", "nowhere/all.jsonl"]);
    let run = merge.current_dir(folder.path("")).assert().code(1);
    run.stderr(predicate::str::contains("cannot write to nowhere").and(predicate::str::contains(".tmp").not()));
}

#[test]
fn help_files_flags_under_what_they_are() {
    let help = crate::stdout_of(&mut warpdraft(&["batch", "--help"]));
    let (before, behind) = help.split_once("Batch (changes the speed, never the text):").expect("the heading");
    for flag in ["--model", "--revision", "--devices", "--max-tokens", "--json"] {
        assert!(before.contains(&format!("{flag} ")) || before.contains(&format!("{flag}\n")), "{flag}: {help}");
        assert!(!behind.contains(&format!("      {flag} ")), "{flag}: {help}");
    }
    assert!(behind.contains("--sequences"), "{help}");
}

/// A request whose numbers overflow fails by itself: its line says so, and the run goes on.
#[test]
fn numbers_that_are_not_finite_are_an_error_of_the_request() {
    let folder = Folder::with(&short(3));
    let model = with_template(&folder, "overflows", "");
    let weights = model.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let [from, to] = [0, 1].map(|i| start + header["model.norm.weight"]["data_offsets"][i].as_u64().unwrap() as usize);
    // The largest that bf16 has.
    bytes[from..to].chunks_exact_mut(2).for_each(|weight| weight.copy_from_slice(&0x7f7f_u16.to_le_bytes()));
    std::fs::write(weights, bytes).unwrap();
    let summary = json_of(&mut folder.batch("results.jsonl", &["--model", path(&model), "--json"]));
    assert_eq!(summary["requests"], json!({"answered": 0, "refused": 3, "done_before": 0}));
    assert_eq!(summary["refused_by_code"], json!({"not_finite": 3}));
    for result in folder.results("results.jsonl").values() {
        let message = result["error"]["message"].as_str().unwrap();
        assert!(message.contains("logits") && message.contains("NaN or infinity"), "{message}");
        assert!(result["custom_id"].is_string());
    }
}
