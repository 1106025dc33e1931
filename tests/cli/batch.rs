//! `warpdraft batch`: formats, and what it does under stress.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::assert::OutputAssertExt;
use predicates::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{binary, golden, json_of, stdout_of, warpdraft};

/// A folder with requests in it.
struct Folder(TempDir);

impl Folder {
    fn with(requests: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join("requests.jsonl"), requests).expect("it writes");
        Folder(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// `warpdraft batch requests.jsonl -o OUTPUT` in the folder.
    fn batch(&self, output: &str, more: &[&str]) -> assert_cmd::Command {
        let mut command = warpdraft(&["batch", "requests.jsonl", "-o", output, "--quiet"]);
        command.current_dir(self.0.path()).args(more);
        command
    }

    /// The results in a file, by line of the request.
    fn results(&self, name: &str) -> BTreeMap<u64, Value> {
        results(&self.read(name))
    }
}

/// Results by line of the request; none twice.
fn results(text: &str) -> BTreeMap<u64, Value> {
    assert!(text.is_empty() || text.ends_with('\n'), "torn: {text:?}");
    let mut results = BTreeMap::new();
    for line in text.lines() {
        let result: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        let number = result["id"].as_str().unwrap().split('_').nth(2).unwrap().parse().unwrap();
        assert!(results.insert(number, result).is_none(), "line {number} is there twice");
    }
    results
}

fn text_of(result: &Value) -> &str {
    let choice = &result["response"]["body"]["choices"][0];
    choice["text"].as_str().or_else(|| choice["message"]["content"].as_str()).unwrap_or_else(|| panic!("{result}"))
}

/// `count` short requests that differ, as lines.
fn short(count: usize) -> String {
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
            assert_eq!(text_of(result), expected["text"], "{result}");
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
    let requests = [
        json!({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        json!({"prompt": "fn main", "max_tokens": 3, "logprobs": 1, "temperature": 0}),
        // The ids of "fn main" may be given in its place.
        json!({"prompt": [1, 2, 3], "max_tokens": 3}),
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
    assert_eq!(String::from_utf8(bytes.collect()).unwrap().trim_start_matches("<|im_start|>"), text_of(a));
    assert_eq!((&b["custom_id"], &b["response"]["body"]["object"]), (&Value::Null, &json!("text_completion")));
    let logprobs = &b["response"]["body"]["choices"][0]["logprobs"];
    for field in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[field].as_array().unwrap().len(), 3, "{field}");
    }
    let tokens: String = logprobs["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(tokens, text_of(b));
    assert_eq!(results[&3]["response"]["body"]["usage"]["prompt_tokens"], 3);
}

#[test]
fn what_is_wrong_with_a_line_is_said_and_the_rest_runs() {
    let long = json!({"prompt": "word ".repeat(5000)}).to_string();
    let cases: &[(&[u8], &str, &str)] = &[
        (b"not json", "invalid_json", "not JSON"),
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
        (long.as_bytes(), "context_length_exceeded", "context holds 128"),
        (br#"{"prompt": "x", "temperature": "hot"}"#, "invalid_request", "`temperature`"),
        (br#"{"prompt": "x", "temperature": -1}"#, "invalid_request", "temperature"),
        (br#"{"prompt": "x", "max_tokens": 0}"#, "invalid_request", "`max_tokens`"),
        (br#"{"prompt": "x", "stop": [""]}"#, "invalid_request", "`stop`"),
        (br#"{"prompt": "x", "n": 2}"#, "unsupported", "`n`"),
        (br#"{"prompt": "x", "stream": true}"#, "unsupported", "`stream`"),
        (br#"{"prompt": "x", "logit_bias": {"5": 1}}"#, "unsupported", "`logit_bias`"),
        (br#"{"prompt": "x", "logprobs": 50}"#, "invalid_request", "20"),
        (br#"{"custom_id": 7, "prompt": "x"}"#, "invalid_request", "`custom_id`"),
        (br#"{"method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}"#, "invalid_request", "POST"),
        (br#"{"method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}"#, "unsupported", "`url`"),
        (
            br#"{"method": "POST", "url": "/v1/chat/completions", "body": {"prompt": "x"}}"#,
            "invalid_request",
            "`messages`",
        ),
        (br#"{"custom_id": "twice", "prompt": "y"}"#, "duplicate_custom_id", "line 2"),
    ];
    let good =
        br#"{"custom_id": "twice", "prompt": "x", "max_tokens": 2, "frequency_penalty": 0, "tools": [], "user": "me"}"#;
    // A blank line at the start: numbers are those of the file.
    let mut requests = [b"\n", &good[..], b"\n"].concat();
    for (line, ..) in cases {
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
    warpdraft(&["batch", "requests.jsonl", "-o", "x", "--shard", "3/3"]).assert().code(2);
}

#[test]
fn a_second_run_on_an_output_is_refused() {
    let folder = Folder::with(&short(4));
    // It waits for requests as long as its input is open.
    let mut first = Command::new(binary())
        .args(["batch", "-", "-o", "results.jsonl", "--device", "cpu", "--quiet"])
        .current_dir(folder.0.path())
        .stdin(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = first.stdin.take().unwrap();
    stdin.write_all(short(4).as_bytes()).unwrap();
    wait_until(|| std::fs::read_to_string(folder.path("results.jsonl")).is_ok_and(|text| text.lines().count() == 4));
    let second = folder.batch("results.jsonl", &[]).assert().code(1);
    second.stderr(predicate::str::contains("another run is writing results.jsonl"));
    drop(stdin);
    assert!(first.wait().unwrap().success());
    assert_eq!(folder.results("results.jsonl").len(), 4);
}

#[test]
fn another_input_model_or_output_is_not_mixed_in() {
    let folder = Folder::with(&short(3));
    folder.batch("results.jsonl", &[]).assert().success();
    let before = folder.read("results.jsonl");
    let refused = |more: &[&str], part: &str| {
        let run = folder.batch("results.jsonl", more).assert().code(1);
        run.stderr(predicate::str::contains(part));
        assert_eq!(folder.read("results.jsonl"), before);
    };
    refused(&["--max-tokens", "7"], "other settings");
    refused(&["--model", golden("tied_bf16").to_str().unwrap()], "another model");
    // Settings that change the speed alone are free to differ.
    folder.batch("results.jsonl", &["--draft", "none", "--sequences", "2"]).assert().success();
    std::fs::write(folder.path("requests.jsonl"), short(4).replace("number_1(", "nummer_1(")).unwrap();
    refused(&[], "line 2 is not the one");
    std::fs::write(folder.path("notes.txt"), "do not lose me").unwrap();
    folder.batch("notes.txt", &[]).assert().code(1).stderr(predicate::str::contains("something else"));
    assert_eq!(folder.read("notes.txt"), "do not lose me");
    folder.batch("requests.jsonl", &[]).assert().code(1).stderr(predicate::str::contains("another output"));
}

#[test]
fn a_growing_input_is_taken_up() {
    let folder = Folder::with(&short(3));
    folder.batch("results.jsonl", &["--ordered"]).assert().success();
    std::fs::write(folder.path("requests.jsonl"), short(6)).unwrap();
    let summary = json_of(folder.batch("results.jsonl", &["--ordered", "--json"]).arg("--draft=none"));
    assert_eq!(summary["requests"], json!({"answered": 3, "refused": 0, "done_before": 3}));
    assert_eq!(folder.results("results.jsonl").len(), 6);
}

fn wait_until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "it does not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A run that a signal will end.
fn start(folder: &Folder, output: &str, more: &[&str]) -> Child {
    Command::new(binary())
        .args(["batch", "requests.jsonl", "-o", output, "--device", "cpu", "--quiet", "--sequences", "4"])
        .args(more)
        .env_remove("WARPDRAFT_MODEL")
        .current_dir(folder.0.path())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts")
}

#[test]
fn killed_at_a_hundred_moments_it_loses_doubles_and_tears_nothing() {
    const KILLS: usize = 100;
    let folder = Folder::with(&short(160));
    let whole = folder.batch("whole.jsonl", &["--ordered"]).assert().success();
    drop(whole);
    let expected = folder.read("whole.jsonl");
    // With nothing left to do, a run is its start alone.
    let begin = Instant::now();
    folder.batch("whole.jsonl", &["--ordered"]).assert().success();
    let start_up = begin.elapsed().as_micros() as u64;
    assert_eq!(folder.read("whole.jsonl"), expected);

    let ways: [(&str, &[&str]); 4] =
        [("a.jsonl", &["--ordered"]), ("b.jsonl", &[]), ("c.jsonl.gz", &[]), ("d.jsonl.zst", &[])];
    let (mut kills, mut halfway) = (0, 0);
    let mut again = [0; 4];
    while kills < KILLS {
        let way = kills % ways.len();
        let (name, more) = ways[way];
        let mut child = start(&folder, name, more);
        // From before the output is open to well within the work; packed results are written every now and then only.
        let most = start_up + if way < 2 { 150_000 } else { 500_000 };
        let moment = model::sampling::random(kills as u64, again[way]) % most;
        std::thread::sleep(Duration::from_micros(moment));
        child.kill().expect("it can be killed");
        let status = child.wait().unwrap();
        kills += 1;
        let done = unpacked(&folder.path(name)).lines().count();
        halfway += usize::from(done > 0 && done < 160);
        if status.success() {
            finish(&folder, name, more, &expected);
            std::fs::remove_file(folder.path(name)).unwrap();
            again[way] += 1;
        }
    }
    for (name, more) in ways {
        finish(&folder, name, more, &expected);
    }
    println!("{halfway} of {kills} kills were halfway, {} runs came to their end", again.iter().sum::<u64>());
    assert!(halfway > 20, "only {halfway} kills were halfway");
}

/// Runs to the end; then all is there as it would be without kills.
fn finish(folder: &Folder, name: &str, more: &[&str], expected: &str) {
    folder.batch(name, more).args(["--sequences", "4"]).assert().success();
    let text = unpacked(&folder.path(name));
    if more.contains(&"--ordered") {
        assert_eq!(text, expected, "{name}");
    }
    assert_eq!(results(&text), results(expected), "{name}");
}

/// What can be read of a file that may be torn.
fn unpacked(path: &Path) -> String {
    let Ok(bytes) = std::fs::read(path) else { return String::new() };
    let mut text = Vec::new();
    let _ = match path.extension().and_then(|e| e.to_str()) {
        Some("gz") => flate2::read::MultiGzDecoder::new(&bytes[..]).read_to_end(&mut text),
        Some("zst") => zstd::stream::read::Decoder::new(&bytes[..]).and_then(|mut d| d.read_to_end(&mut text)),
        _ => (&bytes[..]).read_to_end(&mut text),
    };
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn ctrl_c_ends_it_whole_and_it_goes_on() {
    let folder = Folder::with(&short(200));
    let child = start(&folder, "results.jsonl", &[]);
    wait_until(|| std::fs::metadata(folder.path("results.jsonl")).is_ok_and(|m| m.len() > 0));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), &*String::from_utf8_lossy(&output.stderr)),
        (Some(130), "warpdraft: interrupted\n")
    );
    let done = folder.results("results.jsonl").len();
    let summary = json_of(&mut folder.batch("results.jsonl", &["--json"]));
    assert_eq!(summary["requests"], json!({"answered": 200 - done, "refused": 0, "done_before": done}));
    assert_eq!(folder.results("results.jsonl").len(), 200);
}

#[test]
fn a_full_disk_is_said_and_it_goes_on() {
    let folder = Folder::with(&short(60));
    // The shell's limit on file sizes (in blocks of 512 or 1024 bytes) stands for a disk; unlike one, it can be had anywhere.
    for name in ["results.jsonl", "results.jsonl.gz"] {
        let blocks = if name.ends_with("gz") { 1 } else { 8 };
        let script =
            format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" batch requests.jsonl -o {name} --device cpu -q");
        let run =
            Command::new("bash").args(["-c", &script]).arg(binary()).current_dir(folder.0.path()).assert().code(1);
        run.stderr(
            predicate::str::contains(format!("cannot write to {name}"))
                .and(predicate::str::contains("make room, and the same command goes on")),
        );
        let done = results(&unpacked(&folder.path(name))).len();
        assert!(done < 60, "the limit was not met");
        let summary = json_of(&mut folder.batch(name, &["--json"]));
        assert_eq!(summary["requests"], json!({"answered": 60 - done, "refused": 0, "done_before": done}));
        assert_eq!(results(&unpacked(&folder.path(name))).len(), 60);
    }
    let run = folder.batch("/dev/full", &[]).assert().code(1);
    run.stderr(predicate::str::contains("cannot write to /dev/full"));
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
    folder.batch("x.jsonl", &["--devices", "cpu,gpu"]).assert().code(2);
    if host::device::cards().expect("the driver answers").is_empty() {
        let run = folder.batch("x.jsonl", &["--devices", "all"]).assert().code(1);
        run.stderr(predicate::str::contains("no CUDA card"));
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
