//! `warpdraft batch`, stopped and taken up again: killed, out of room, with other requests, beside another run.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::assert::OutputAssertExt;
use predicates::prelude::*;
use serde_json::{Value, json};

use crate::batch::{Folder, results, short};
use crate::{binary, golden, json_of, warpdraft};

#[test]
fn a_second_run_on_an_output_is_refused() {
    let folder = Folder::with(&short(4));
    // It waits for requests as long as its input is open.
    let mut first = Command::new(binary())
        .args(["batch", "-", "-o", "results.jsonl", "--device", "cpu", "--quiet"])
        .current_dir(folder.path(""))
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
    // A model is what it holds, not what it is called.
    let copy = |name: &str, changed: bool| {
        std::fs::create_dir(folder.path(name)).unwrap();
        for file in std::fs::read_dir(golden("tied_bf16")).unwrap().map(Result::unwrap) {
            let mut bytes = std::fs::read(file.path()).unwrap();
            if changed && file.file_name() == "model.safetensors" {
                *bytes.last_mut().unwrap() ^= 1;
            }
            std::fs::write(folder.path(name).join(file.file_name()), bytes).unwrap();
        }
    };
    copy("one", false);
    copy("two", false);
    copy("three", true);
    folder.batch("small.jsonl", &["--model", "one"]).assert().success();
    folder.batch("small.jsonl", &["--model", "two"]).assert().success();
    let run = folder.batch("small.jsonl", &["--model", "three"]).assert().code(1);
    run.stderr(predicate::str::contains("another model"));
    // Settings that change the speed alone are free to differ.
    folder.batch("results.jsonl", &["--draft", "none", "--sequences", "2"]).assert().success();
    // Before anything is written: also where what has changed comes behind new requests, or is not there any more.
    let with = |requests: &str| std::fs::write(folder.path("requests.jsonl"), requests).unwrap();
    with(&short(4).replace("number_1(", "nummer_1("));
    refused(&[], "line 2 of the requests is not the one");
    with(&short(2));
    refused(&[], "1 results of lines that are not among the requests");
    with(&short(3));
    std::fs::write(folder.path("last.jsonl"), before.split_inclusive('\n').next_back().unwrap()).unwrap();
    with(&short(3).replace("number_2(", "nummer_2("));
    let run = folder.batch("last.jsonl", &[]).assert().code(1);
    run.stderr(predicate::str::contains("line 3 of the requests is not the one"));
    assert_eq!(folder.results("last.jsonl").len(), 1);
    // By a pipe that is seen in the end.
    let run = warpdraft(&["batch", "-", "-o", "results.jsonl", "-q"])
        .current_dir(folder.path(""))
        .write_stdin(short(2))
        .assert();
    run.code(1).stderr(predicate::str::contains("1 results of lines that are not among the requests"));
    assert_eq!(folder.read("results.jsonl"), before);
    std::fs::write(folder.path("notes.txt"), "do not lose me").unwrap();
    folder.batch("notes.txt", &[]).assert().code(1).stderr(predicate::str::contains("something else"));
    assert_eq!(folder.read("notes.txt"), "do not lose me");
    folder.batch("requests.jsonl", &[]).assert().code(1).stderr(predicate::str::contains("another output"));
}

#[test]
fn results_that_are_out_of_order_are_not_gone_on_behind_in_order() {
    let folder = Folder::with(&short(4));
    folder.batch("results.jsonl", &["--ordered"]).assert().success();
    let lines: Vec<String> = folder.read("results.jsonl").split_inclusive('\n').map(str::to_owned).collect();
    for left in [&[1, 0][..], &[0, 2]] {
        let left: String = left.iter().map(|i| lines[*i].as_str()).collect();
        std::fs::write(folder.path("some.jsonl"), &left).unwrap();
        let run = folder.batch("some.jsonl", &["--ordered"]).assert().code(1);
        run.stderr(predicate::str::contains("not in the order of the requests"));
        assert_eq!(folder.read("some.jsonl"), left);
        // Requests from a pipe cannot be looked through before.
        let mut piped = warpdraft(&["batch", "-", "-o", "some.jsonl", "--quiet", "--ordered"]);
        let run = piped.current_dir(folder.path("")).write_stdin(short(4)).assert().code(1);
        run.stderr(predicate::str::contains("not in the order of the requests"));
        assert_eq!(folder.read("some.jsonl"), left);
        folder.batch("some.jsonl", &[]).assert().success();
        assert_eq!(folder.results("some.jsonl").len(), 4);
    }
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

pub fn wait_until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(120), "it does not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A run that a signal will end.
pub fn start(folder: &Folder, output: &str, more: &[&str]) -> Child {
    Command::new(binary())
        .args(["batch", "requests.jsonl", "-o", output, "--device", "cpu", "--quiet", "--sequences", "4"])
        .args(more)
        .env_remove("WARPDRAFT_MODEL")
        .current_dir(folder.path(""))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts")
}

/// Requests of all kinds: greedy, sampled with seeds of their own or made, with bad lines and names that are there
/// twice.
fn mixed(count: usize) -> String {
    let line = |(i, line): (usize, &str)| match i % 8 {
        3 => line.replace("\"temperature\":0", "\"temperature\":0.9"),
        5 => line.replace("\"temperature\":0", "\"temperature\":0.9,\"seed\":7"),
        6 => line.replace(&format!("request-{i}"), "request-0"),
        7 => format!("bad line {i}"),
        _ => line.to_owned(),
    };
    short(count).lines().enumerate().map(|numbered| line(numbered) + "\n").collect()
}

#[test]
fn killed_at_a_hundred_moments_it_loses_doubles_and_tears_nothing() {
    const KILLS: usize = 100;
    let folder = Folder::with(&mixed(160));
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
        let there = results(whole_lines(&unpacked(&folder.path(name)))).len();
        let summary = json_of(folder.batch(name, more).args(["--sequences", "4", "--json"]));
        // At most a torn member is done again.
        let kept = summary["requests"]["done_before"].as_u64().unwrap() as usize;
        let packed = !name.ends_with("jsonl");
        assert!(if packed { kept <= there } else { kept == there }, "{name}: {kept} of {there}");
        finish(&folder, name, more, &expected);
    }
    println!("{halfway} of {kills} kills were halfway, {} runs came to their end", again.iter().sum::<u64>());
    assert!(halfway > 20, "only {halfway} kills were halfway");
}

/// Runs to the end; then all is there as it would be without kills.
pub fn finish(folder: &Folder, name: &str, more: &[&str], expected: &str) {
    folder.batch(name, more).args(["--sequences", "4"]).assert().success();
    let text = unpacked(&folder.path(name));
    if more.contains(&"--ordered") {
        assert_eq!(text, expected, "{name}");
    }
    assert_eq!(results(&text), results(expected), "{name}");
}

/// What of a text is whole lines.
fn whole_lines(text: &str) -> &str {
    &text[..text.rfind('\n').map_or(0, |end| end + 1)]
}

/// What can be read of a file that may be torn.
pub fn unpacked(path: &Path) -> String {
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

/// A pipe holds nothing that a run could go on behind.
#[cfg(unix)]
#[test]
fn a_run_is_said_to_go_on_only_where_it_can() {
    let folder = Folder::with(&short(200));
    let made = Command::new("mkfifo").arg(folder.path("pipe")).status();
    assert!(made.expect("mkfifo runs").success());
    for (name, goes_on) in [("pipe", false), ("results.jsonl", true)] {
        let child = Command::new(binary())
            .args(["batch", "requests.jsonl", "-o", name, "--device", "cpu", "--sequences", "4"])
            .env_remove("WARPDRAFT_MODEL")
            .current_dir(folder.path(""))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        // A pipe opens once the run does, and has bytes once there is a result.
        let mut reader = None;
        if goes_on {
            wait_until(|| std::fs::metadata(folder.path(name)).is_ok_and(|m| m.len() > 0));
        } else {
            let mut pipe = std::fs::File::open(folder.path(name)).unwrap();
            pipe.read_exact(&mut [0]).unwrap();
            reader = Some(std::thread::spawn(move || std::io::copy(&mut pipe, &mut std::io::sink())));
        }
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(130) && told.contains(" answered, 0 refused"), "{told}");
        assert_eq!(told.contains("the same command goes on"), goes_on, "{name}: {told}");
        reader.map(|reader| reader.join().unwrap().unwrap());
    }
}

#[test]
fn a_full_disk_is_said_and_it_goes_on() {
    let folder = Folder::with(&short(60));
    // The shell's limit on file sizes (in blocks of 512 or 1024 bytes) stands for a disk; unlike one, it can be had
    // anywhere.
    for name in ["results.jsonl", "results.jsonl.gz"] {
        let blocks = if name.ends_with("gz") { 1 } else { 8 };
        let script = format!(
            "trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" batch requests.jsonl -o {name} --device cpu -q --json"
        );
        let run =
            Command::new("bash").args(["-c", &script]).arg(binary()).current_dir(folder.path("")).assert().code(1);
        let run = run.stderr(
            predicate::str::contains(format!("cannot write to {name}"))
                .and(predicate::str::contains("make room, and the same command goes on")),
        );
        let done = results(&unpacked(&folder.path(name))).len();
        assert!(done < 60, "the limit was not met");
        // What could not be written is not said to be there.
        let summary: Value = serde_json::from_slice(&run.get_output().stdout).unwrap();
        assert_eq!(summary["requests"], json!({"answered": done, "refused": 0, "done_before": 0}));
        assert!(summary["not_written"].as_u64().unwrap() > 0, "{summary}");
        let summary = json_of(&mut folder.batch(name, &["--json"]));
        assert_eq!(summary["requests"], json!({"answered": 60 - done, "refused": 0, "done_before": done}));
        assert_eq!(results(&unpacked(&folder.path(name))).len(), 60);
    }
    let run = folder.batch("/dev/full", &[]).assert().code(1);
    run.stderr(predicate::str::contains("cannot write to /dev/full"));
}
