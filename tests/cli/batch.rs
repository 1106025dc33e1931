//! `warpdraft batch`: formats, shares and devices, and what it does under stress.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use assert_cmd::assert::OutputAssertExt;
use model::chat::Splitter;
use predicates::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::batch_again::wait_until;
use crate::{binary, golden, json_of, stdout_of, warpdraft};

/// A folder with requests in it.
pub struct Folder(TempDir);

impl Folder {
    pub fn with(requests: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("requests.jsonl"), requests).expect("it writes");
        Folder(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// `warpdraft batch requests.jsonl -o OUTPUT` in the folder.
    pub fn batch(&self, output: &str, more: &[&str]) -> assert_cmd::Command {
        let mut command = warpdraft(&["batch", "requests.jsonl", "-o", output, "--quiet"]);
        command.current_dir(self.0.path()).args(more);
        command
    }

    /// The results in a file, by line of the request.
    pub fn results(&self, name: &str) -> BTreeMap<u64, Value> {
        results(&self.read(name))
    }
}

/// Results by line of the request; none twice.
pub fn results(text: &str) -> BTreeMap<u64, Value> {
    assert!(text.is_empty() || text.ends_with('\n'), "torn: {text:?}");
    let mut results = BTreeMap::new();
    for line in text.lines() {
        let result: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        let number = result["id"].as_str().unwrap().split('_').nth(2).unwrap().parse().unwrap();
        assert!(results.insert(number, result).is_none(), "line {number} is there twice");
    }
    results
}

pub fn text_of(result: &Value) -> &str {
    let choice = &result["response"]["body"]["choices"][0];
    choice["text"].as_str().or_else(|| choice["message"]["content"].as_str()).unwrap_or_else(|| panic!("{result}"))
}

/// `count` short requests that differ, as lines.
pub fn short(count: usize) -> String {
    (0..count)
        .map(|i| {
            let body = json!({"prompt": format!("fn number_{i}() -> "), "max_tokens": 3 + i % 5, "temperature": 0});
            json!({"custom_id": format!("request-{i}"), "method": "POST", "url": "/v1/completions", "body": body})
                .to_string()
                + "\n"
        })
        .collect()
}

#[test]
fn answers_are_those_of_generate() {
    let prompts = ["impl Iterator for Counter {", "fn main() {\n    let", "The quick"];
    let mut requests = String::new();
    for (i, prompt) in prompts.iter().enumerate() {
        for temperature in [0.0, 0.9] {
            requests +=
                &json!({"prompt": prompt, "max_tokens": 20 + i, "temperature": temperature, "seed": 5}).to_string();
            requests += "\n";
        }
        let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]);
        requests += &json!({"messages": messages, "max_tokens": 20, "temperature": 0}).to_string();
        requests += "\n";
    }
    let folder = Folder::with(&requests);
    folder.batch("results.jsonl", &[]).assert().success().stdout("");
    let results = folder.results("results.jsonl");
    assert_eq!(results.len(), 9);
    let generate = |prompt: &str, max: usize, more: &[&str]| {
        let max = max.to_string();
        json_of(warpdraft(&["generate", "--json", "--max-tokens", &max, prompt]).args(more))
    };
    for (i, prompt) in prompts.iter().enumerate() {
        let line = 3 * i as u64 + 1;
        let expected = [
            generate(prompt, 20 + i, &["--temperature", "0"]),
            generate(prompt, 20 + i, &["--temperature", "0.9", "--seed", "5"]),
            generate(prompt, 20, &["--temperature", "0", "--chat", "--system", "Be brief."]),
        ];
        for (k, expected) in expected.iter().enumerate() {
            let result = &results[&(line + k as u64)];
            // What the model thinks is apart from what it says.
            let said = Splitter::new("", false).answer(expected["text"].as_str().unwrap()).content;
            let expected_text = if k == 2 { &said } else { expected["text"].as_str().unwrap() };
            assert_eq!(text_of(result), expected_text, "{result}");
            let body = &result["response"]["body"];
            assert_eq!(body["choices"][0]["finish_reason"], expected["finish"]);
            assert_eq!(body["usage"]["prompt_tokens"], expected["statistics"]["prompt_tokens"]);
            assert_eq!(body["usage"]["completion_tokens"], expected["statistics"]["generated_tokens"]);
            assert_eq!(body["seed"], expected["seed"]);
        }
    }
}

#[test]
fn results_have_openai_s_form() {
    let chat = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_completion_tokens": 3,
                      "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let ids = model::Checkpoint::demo().unwrap().tokenizer.encode("fn main").unwrap();
    let requests = [
        json!({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        json!({"prompt": "fn main", "max_tokens": 3, "logprobs": 1, "temperature": 0}),
        // The ids of "fn main" may be given in its place.
        json!({"prompt": ids, "max_tokens": 3, "temperature": 0}),
    ];
    let folder = Folder::with(&requests.map(|r| r.to_string() + "\n").concat());
    folder.batch("results.jsonl", &[]).assert().success();
    let results = folder.results("results.jsonl");
    let (a, b) = (&results[&1], &results[&2]);
    assert_eq!((&a["custom_id"], &a["error"], &a["response"]["status_code"]), (&json!("a"), &Value::Null, &json!(200)));
    let body = &a["response"]["body"];
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("demo")));
    assert_eq!(body["usage"]["total_tokens"], body["usage"]["prompt_tokens"].as_u64().unwrap() + 3);
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 3);
    for token in content {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        // Greedy.
        assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
        assert!(token["bytes"].is_array());
    }
    let bytes = content.iter().flat_map(|t| t["bytes"].as_array().unwrap()).map(|b| b.as_u64().unwrap() as u8);
    let text = String::from_utf8(bytes.collect()).unwrap();
    assert_eq!(Splitter::new("", false).answer(&text).content, text_of(a));
    assert_eq!((&b["custom_id"], &b["response"]["body"]["object"]), (&Value::Null, &json!("text_completion")));
    let logprobs = &b["response"]["body"]["choices"][0]["logprobs"];
    for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[field].as_array().unwrap().len(), 3, "{field}");
    }
    let tokens: String = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens, text_of(b));
    let by_ids = &results[&3];
    assert_eq!(text_of(by_ids), text_of(b));
    assert_eq!(by_ids["response"]["body"]["usage"], b["response"]["body"]["usage"]);
}

/// Lines that are wrong, each with the code of its error and a part of the message.
const WRONG: &[(&[u8], &str, &str)] = &[
    (b"not json", "invalid_json", "not JSON: something stands there that does not belong there, at column 2"),
    (b"[1]", "invalid_json", "not a JSON object"),
    (b"{\"prompt\": \"\xff\"}", "invalid_utf8", "byte 12"),
    (b"{}", "invalid_request", "`messages` or `prompt`"),
    (br#"{"prompt": ""}"#, "invalid_request", "prompt is empty"),
    (br#"{"prompt": []}"#, "invalid_request", "prompt is empty"),
    (br#"{"messages": []}"#, "invalid_request", "`messages`"),
    (br#"{"messages": [{"role": "king", "content": "x"}]}"#, "invalid_request", "`role`"),
    (br#"{"prompt": "x", "messages": []}"#, "invalid_request", "not both"),
    (br#"{"prompt": [1, 99999999]}"#, "invalid_request", "99999999"),
    (br#"{"prompt": ["a", "b"]}"#, "invalid_request", "one text"),
    (br#"{"prompt": "x", "temperature": "hot"}"#, "invalid_request", "`temperature`"),
    (br#"{"prompt": "x", "temperature": -1}"#, "invalid_request", "temperature"),
    (br#"{"prompt": "x", "max_tokens": 0}"#, "invalid_request", "`max_tokens`"),
    (br#"{"prompt": "x", "stop": [""]}"#, "invalid_request", "`stop`"),
    (br#"{"prompt": "x", "n": 2}"#, "unsupported", "`n`"),
    (br#"{"prompt": "x", "stream": true}"#, "unsupported", "`stream`"),
    (br#"{"prompt": "x", "logit_bias": {"5": 1}}"#, "unsupported", "`logit_bias`"),
    (br#"{"prompt": "x", "temprature": 0}"#, "unsupported", "`temprature` is no known field"),
    (br#"{"prompt": "x", "frequency_penalty": "much"}"#, "invalid_request", "`frequency_penalty`"),
    (br#"{"prompt": "x", "tool_choice": "required"}"#, "invalid_request", "`tool_choice`"),
    (br#"{"prompt": "x", "tools": {"type": "text"}}"#, "invalid_request", "`tools` must be an array"),
    (
        br#"{"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}"#,
        "unsupported",
        "`tools` are for `messages`",
    ),
    (br#"{"prompt": "x", "temperature": 0, "temperature": 1}"#, "invalid_request", "`temperature` is there twice"),
    (br#"{"prompt": "x", "chat_template_kwargs": {"a": 1, "a": 1}}"#, "invalid_request", "`a` is there twice"),
    (br#"{"prompt": "x", "min_tokens": 2}"#, "unsupported", "`min_tokens`"),
    (br#"{"prompt": "x", "max_tokens": "5", "max_completion_tokens": 5}"#, "invalid_request", "`max_tokens`"),
    (
        br#"{"prompt": "x", "chat_template_kwargs": {}, "max_completion_tokens": 0}"#,
        "invalid_request",
        "`max_completion_tokens`",
    ),
    (br#"{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 5}"#, "invalid_request", "object"),
    (br#"{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}}"#, "unsupported", "`a`"),
    (br#"{"messages": [{"role": "user", "content": "x", "weight": 1}]}"#, "unsupported", "\"weight\" in messages"),
    (br#"{"prompt": "x", "top_logprobs": 2}"#, "invalid_request", "`top_logprobs`"),
    (br#"{"body": {"prompt": "x"}, "max_tokens": 2}"#, "invalid_request", "`max_tokens` stands beside `body`"),
    (br#"{"body": {"prompt": "x", "custom_id": "a"}}"#, "invalid_request", "`custom_id` stands in `body`"),
    (br#"{"prompt": "x", "logprobs": 50}"#, "invalid_request", "20"),
    (br#"{"custom_id": 7, "prompt": "x"}"#, "invalid_request", "`custom_id`"),
    (br#"{"method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}"#, "invalid_request", "POST"),
    (br#"{"method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}"#, "unsupported", "`url`"),
    (br#"{"method": "POST", "url": "/v1/chat/completions", "body": {"prompt": "x"}}"#, "invalid_request", "`messages`"),
    (br#"{"custom_id": "twice", "prompt": "y"}"#, "duplicate_custom_id", "line 2"),
];

#[test]
fn what_is_wrong_with_a_line_is_said_and_the_rest_runs() {
    // Longer than the context of the run.
    let long = json!({"prompt": "word ".repeat(5000)}).to_string();
    let long = (long.as_bytes(), "context_length_exceeded", "context holds 128");
    let cases: Vec<_> = WRONG.iter().copied().chain([long]).collect();
    let good =
        br#"{"custom_id": "twice", "prompt": "x", "max_tokens": 2.0, "frequency_penalty": 0, "tools": [], "user": "me",
        "response_format": {"type": "text"}, "tool_choice": "auto", "stream": false, "temperature": null}"#;
    let good = &String::from_utf8_lossy(good).replace('\n', "").into_bytes();
    // A mark of the encoding and a blank line at the start: numbers are those of the file.
    let mut requests = [b"\xef\xbb\xbf\n", &good[..], b"\n"].concat();
    for (line, ..) in &cases {
        requests.extend_from_slice(line);
        requests.push(b'\n');
    }
    requests.extend_from_slice(br#"{"prompt": "the last has no newline", "max_tokens": 2}"#);
    let folder = Folder::with("");
    std::fs::write(folder.path("requests.jsonl"), requests).unwrap();
    let summary = json_of(folder.batch("results.jsonl", &["--context", "128", "--json"]).arg("--ordered"));
    assert_eq!(summary["requests"], json!({"answered": 2, "refused": cases.len(), "done_before": 0}));
    let results = folder.results("results.jsonl");
    assert_eq!(results.len(), cases.len() + 2);
    for ((line, code, part), number) in cases.iter().zip(3u64..) {
        let line = String::from_utf8_lossy(&line[..line.len().min(60)]);
        let result = &results[&number];
        assert!(result["response"].is_null(), "{line}: {result}");
        assert_eq!((&result["error"]["code"], &result["error"]["line"]), (&json!(code), &json!(number)), "{line}");
        let message = result["error"]["message"].as_str().unwrap();
        assert!(message.contains(part), "{line}: {message}");
    }
    assert_eq!(summary["first_error"], results[&3]["error"]);
    assert_eq!(results[&2]["custom_id"], "twice");
    assert!(results[&2]["error"].is_null() && results[&(3 + cases.len() as u64)]["error"].is_null());
}

#[test]
fn files_and_pipes_may_be_packed() {
    let requests = short(12);
    let folder = Folder::with(&requests);
    folder.batch("plain.jsonl", &["--ordered"]).assert().success();
    let expected = folder.read("plain.jsonl");
    assert_eq!(results(&expected).len(), 12);
    let packed = zstd::stream::encode_all(requests.as_bytes(), 3).unwrap();
    // In by a pipe, packed; out by a pipe.
    let piped = warpdraft(&["batch", "-", "-o", "-", "--ordered", "--quiet"]).write_stdin(packed).output().unwrap();
    assert_eq!(String::from_utf8(piped.stdout).unwrap(), expected);
    folder.batch("packed.jsonl.zst", &["--ordered"]).assert().success();
    let zst = std::fs::read(folder.path("packed.jsonl.zst")).unwrap();
    assert_eq!(zstd::stream::decode_all(&zst[..]).unwrap(), expected.as_bytes());
    // A .gz of results is read back by merge, a .zst by the same.
    folder.batch("packed.jsonl.gz", &[]).assert().success();
    for name in ["packed.jsonl.gz", "packed.jsonl.zst"] {
        let merge = |more: &[&str]| {
            stdout_of(warpdraft(&["batch", "merge", name, "-o", "-", "-q"]).args(more).current_dir(folder.0.path()))
        };
        assert_eq!(merge(&["--requests", "requests.jsonl"]), expected);
    }
}

#[test]
fn a_packed_input_that_is_cut_short_is_said() {
    let folder = Folder::with("");
    let packed = zstd::stream::encode_all(short(400).as_bytes(), 3).unwrap();
    std::fs::write(folder.path("requests.jsonl"), &packed[..packed.len() - 20]).unwrap();
    folder.batch("results.jsonl", &[]).assert().code(1).stderr(predicate::str::contains("cannot read requests.jsonl"));
    // What was answered by then is there, and once the input is whole the rest is done.
    let done = folder.results("results.jsonl").len();
    std::fs::write(folder.path("requests.jsonl"), packed).unwrap();
    let summary = json_of(&mut folder.batch("results.jsonl", &["--json", "--max-tokens", "256"]));
    assert_eq!(summary["requests"], json!({"answered": 400 - done, "refused": 0, "done_before": done}));
}

#[test]
fn shards_are_a_partition_and_merge_to_the_whole() {
    let folder = Folder::with(&(short(20) + "broken\n" + r#"{"prompt": "x", "max_tokens": 2}"#));
    folder.batch("whole.jsonl", &["--ordered"]).assert().success();
    let mut lines = 0;
    for shard in ["0/3", "1/3", "2/3"] {
        let name = format!("part-{}.jsonl.gz", &shard[..1]);
        let summary = json_of(folder.batch(&name, &["--shard", shard, "--json"]).arg("--sequences=2"));
        let done = summary["requests"]["answered"].as_u64().unwrap() + summary["requests"]["refused"].as_u64().unwrap();
        assert!(done > 1, "shard {shard} has {done}");
        lines += done;
    }
    assert_eq!(lines, 22);
    let merge = |parts: &[&str], more: &[&str]| {
        let mut command = warpdraft(&["batch", "merge", "-o", "merged.jsonl"]);
        command.args(parts).args(more).current_dir(folder.0.path());
        command.assert()
    };
    let all = ["part-0.jsonl.gz", "part-1.jsonl.gz", "part-2.jsonl.gz"];
    let missing = merge(&all[1..], &["--requests", "requests.jsonl"]).code(1);
    missing.stderr(predicate::str::contains("have no result"));
    // The same shard twice does no harm.
    let twice = [&all[..], &all[..1]].concat();
    merge(&twice, &["--requests", "requests.jsonl"]).success().stderr(predicate::str::contains("22 results"));
    assert_eq!(folder.read("merged.jsonl"), folder.read("whole.jsonl"));
    merge(&all, &[]).code(1).stderr(predicate::str::contains("there already"));
    std::fs::remove_file(folder.path("merged.jsonl")).unwrap();
    // Answers of other settings do not belong together, nor two that differ, nor what was not finished.
    folder.batch("other.jsonl", &["--shard", "0/3", "--stop", "zzz"]).assert().success();
    let other = ["other.jsonl", all[1], all[2]];
    let parts = predicate::str::contains("other.jsonl and part-1.jsonl.gz were made with different models or settings");
    merge(&other, &["--requests", "requests.jsonl"]).code(1).stderr(parts);
    let (first, rest) = folder.read("whole.jsonl").split_once('\n').map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap();
    let changed = first.replacen("\"text\":\"", "\"text\":\"no ", 1);
    assert_ne!(changed, first);
    std::fs::write(folder.path("changed.jsonl"), format!("{changed}\n")).unwrap();
    let said = predicate::str::contains("line 1 of changed.jsonl is a result that was changed since it was written");
    merge(&["whole.jsonl", "changed.jsonl"], &[]).code(1).stderr(said);
    // As an older version wrote it.
    let (changed, _) = changed.rsplit_once(",\"digest\":").unwrap();
    std::fs::write(folder.path("changed.jsonl"), format!("{changed}}}\n")).unwrap();
    let two = predicate::str::contains(
        "line 1 of the requests has two results that differ, in whole.jsonl and changed.jsonl",
    );
    merge(&["whole.jsonl", "changed.jsonl"], &[]).code(1).stderr(two);
    std::fs::write(folder.path("torn.jsonl"), format!("{first}\n{}", &rest[..40])).unwrap();
    let packed = std::fs::read(folder.path(all[0])).unwrap();
    std::fs::write(folder.path("torn.jsonl.gz"), &packed[..packed.len() - 9]).unwrap();
    for torn in ["torn.jsonl", "torn.jsonl.gz"] {
        let said = predicate::str::contains(format!("{torn} ends in the middle of a result; finish it first"));
        merge(&[torn], &[]).code(1).stderr(said);
    }
    assert!(!folder.path("merged.jsonl").exists());
    warpdraft(&["batch", "requests.jsonl", "-o", "x", "--shard", "3/3"]).assert().code(2);
}

#[test]
fn a_closed_pipe_ends_it_quietly() {
    let folder = Folder::with(&short(60));
    let mut command = Command::new("bash");
    let script = "\"$0\" batch requests.jsonl -o - --device cpu -q | head -n 1 >/dev/null; exit ${PIPESTATUS[0]}";
    let run = command.args(["-c", script]).arg(binary()).current_dir(folder.0.path()).assert();
    run.code(141).stderr("");
}

#[test]
fn a_million_lines_take_bounded_memory() {
    const LINES: usize = 1_000_000;
    let folder = Folder::with("");
    let model = golden("tied_bf16");
    let run = || {
        let mut child = Command::new(binary())
            .args(["batch", "-", "-o", "results.jsonl.zst", "--device", "cpu", "--quiet", "--json", "--model"])
            .arg(&model)
            .current_dir(folder.0.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        // Every thousandth can be answered.
        let mut stdin = std::io::BufWriter::new(child.stdin.take().unwrap());
        for i in 0..LINES {
            let prompt = if i % 1000 == 0 { r#","prompt":"a","max_tokens":1"# } else { "" };
            writeln!(stdin, r#"{{"custom_id":"{i}"{prompt}}}"#).unwrap();
        }
        drop(stdin);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    for (answered, done) in [(1000, 0), (0, LINES)] {
        let summary = run();
        assert_eq!(summary["requests"]["answered"], answered, "{summary}");
        assert_eq!(summary["requests"]["done_before"], done);
        let peak = summary["peak_memory_bytes"].as_u64().unwrap() >> 20;
        println!("{peak} MiB, {} s", summary["seconds"]);
        assert!(peak < 256, "{peak} MiB");
    }
}

#[test]
fn several_devices_share_the_requests() {
    let folder = Folder::with(&(short(60) + "broken\n"));
    folder.batch("one.jsonl", &["--ordered"]).assert().success();
    let two = ["--ordered", "--devices", "cpu,cpu", "--sequences", "3", "--json"];
    let summary = json_of(&mut folder.batch("two.jsonl", &two));
    assert_eq!(folder.read("two.jsonl"), folder.read("one.jsonl"));
    assert_eq!(summary["requests"], json!({"answered": 60, "refused": 1, "done_before": 0}));
    assert_eq!(summary["most_at_once"], 6, "each has its own: {summary}");
    assert_eq!((&summary["ended"], &summary["model"]), (&json!("done"), &json!("demo")));
    assert!(summary["devices"].as_str().is_some_and(|devices| devices.contains(", ")), "{summary}");
    let both = ["--device", "emulator", "--devices", "cpu,cpu", "--json"];
    let summary = json_of(&mut folder.batch("both.jsonl", &both));
    assert_eq!(summary["devices"], "CPU, CPU", "{summary}");
    folder.batch("x.jsonl", &["--devices", "cpu,gpu"]).assert().code(2);
    let run = folder.batch("x.jsonl", &["--devices", "cuda,cuda:0"]).assert().code(2);
    run.stderr(predicate::str::contains("cuda:0 is there twice"));
    if host::device::cards().expect("the driver answers").is_empty() {
        let run = folder.batch("x.jsonl", &["--devices", "all"]).assert().code(1);
        run.stderr(predicate::str::contains("no CUDA card"));
    }
}

/// The head that comes with the demo model is right now and then, and the demo model about itself always.
#[test]
fn whoever_drafts_leaves_the_results_as_they_are() {
    let folder = Folder::with(&short(6));
    let head = format!("eagle3-only:{}", golden("../../model/demo/eagle3").display());
    folder.batch("none.jsonl", &["--draft", "none", "--ordered"]).assert().success();
    for (i, draft) in ["auto", "model-only:demo", &head].iter().enumerate() {
        let output = format!("{i}.jsonl");
        let summary = json_of(&mut folder.batch(&output, &["--draft", draft, "--draft-always", "--ordered", "--json"]));
        let of_model = |what: &str| summary["drafts"]["model"][what].as_u64().unwrap();
        assert_eq!(*draft != "auto", of_model("accepted") > 0, "{draft}: {summary}");
        assert_eq!(*draft == "model-only:demo", of_model("drafted") > 0 && of_model("drafted") == of_model("accepted"));
        let answers = |name: &str| -> Vec<String> {
            folder.results(name).values().map(|result| text_of(result).to_owned()).collect()
        };
        assert_eq!(answers(&output), answers("none.jsonl"), "{draft}");
    }
}

/// One device has a request, and the other waits for one: that takes no time of the first.
#[test]
fn an_idle_device_does_not_hold_up_a_busy_one() {
    let folder = Folder::with("");
    let mut child = Command::new(binary())
        .args(["batch", "-", "-o", "results.jsonl", "--devices", "cpu,cpu", "--draft", "none", "--quiet", "--json"])
        .env_remove("WARPDRAFT_MODEL")
        .current_dir(folder.0.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().unwrap();
    let request = json!({"prompt": "fn main() {", "max_tokens": 400, "ignore_eos": true});
    writeln!(stdin, "{request}").unwrap();
    wait_until(|| std::fs::read_to_string(folder.path("results.jsonl")).is_ok_and(|text| text.ends_with('\n')));
    drop(stdin);
    let summary: Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
    let [steps, seconds, busy] = ["steps", "seconds", "device_seconds"].map(|name| summary[name].as_f64().unwrap());
    // A wait for requests takes 20 ms; between two steps there is next to nothing to do.
    assert!((seconds - busy) / steps < 0.005, "{summary}");
}

/// What stands in line is bounded in tokens: a prompt that cannot be answered does not.
#[test]
fn long_lines_take_bounded_memory() {
    let slow =
        |i| json!({"prompt": format!("fn number_{i}"), "max_tokens": 100, "ignore_eos": true}).to_string() + "\n";
    let long = format!("{{\"prompt\":[{}1]}}\n", "1,".repeat(400_000));
    let folder = Folder::with(&((0..4).map(slow).collect::<String>() + &long.repeat(150)));
    let options = ["--context", "256", "--sequences", "1", "--json"];
    let summary = json_of(&mut folder.batch("results.jsonl", &options));
    assert_eq!(summary["requests"], json!({"answered": 4, "refused": 150, "done_before": 0}));
    let peak = summary["peak_memory_bytes"].as_u64().unwrap() >> 20;
    assert!(peak < 160, "{peak} MiB");
}

#[test]
fn a_cache_larger_than_memory_is_refused() {
    let folder = Folder::with(&short(1));
    let cases =
        ["cpu", "emulator"].into_iter().flat_map(|device| [(device, "--cache-tokens"), (device, "--swap-tokens")]);
    for (device, flag) in cases {
        let run = folder.batch("results.jsonl", &["--device", device, flag, "300000000"]).assert().code(1);
        run.stderr(
            predicate::str::contains(flag).and(predicate::str::contains("of memory for them; use fewer tokens")),
        );
    }
}

#[test]
fn preemption_changes_no_answer() {
    let request =
        |i| json!({"prompt": format!("fn number_{i}"), "max_tokens": 100, "temperature": 0, "ignore_eos": true});
    let folder = Folder::with(&(0..8).map(|i| request(i).to_string() + "\n").collect::<String>());
    let run = |name: &str, more: &[&str]| {
        let summary = json_of(folder.batch(name, &["--ordered", "--context", "128", "--json"]).args(more));
        (folder.read(name), summary)
    };
    let (expected, summary) = run("roomy.jsonl", &[]);
    assert_eq!((&summary["preempted_to_host"], &summary["preempted_to_compute_again"]), (&json!(0), &json!(0)));
    // Five pages of 64 tokens, and each request will want two.
    let tight = ["--cache-tokens", "320", "--draft", "none"];
    let (found, summary) = run("kept.jsonl", &tight);
    assert_eq!(found, expected);
    assert!(summary["preempted_to_host"].as_u64().unwrap() > 0, "{summary}");
    let (found, summary) = run("again.jsonl", &[&tight[..], &["--swap-tokens", "0"]].concat());
    assert_eq!(found, expected);
    assert!(summary["preempted_to_compute_again"].as_u64().unwrap() > 0, "{summary}");
}

#[test]
fn the_emulator_answers_as_the_cpu_does() {
    let requests = [json!({"prompt": "abc", "max_tokens": 3, "temperature": 0}), json!({"prompt": "b", "logprobs": 1})];
    let folder = Folder::with(&requests.map(|r| r.to_string() + "\n").concat());
    let model = golden("tied_bf16");
    let run = |device: &str| {
        let name = format!("{device}.jsonl");
        let more = ["--context", "64", "--max-tokens", "2", "--device", device, "--model", model.to_str().unwrap()];
        folder.batch(&name, &more).assert().success();
        folder.results(&name)
    };
    let (cpu, emulator) = (run("cpu"), run("emulator"));
    assert_eq!(emulator[&1], cpu[&1]);
    assert!(emulator[&2]["response"]["body"]["choices"][0]["logprobs"].is_object(), "{}", emulator[&2]);
}
