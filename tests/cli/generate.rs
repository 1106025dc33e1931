//! `warpdraft generate`.

use predicates::prelude::*;

use crate::eagle::{Head, Model};
use crate::{golden, json_of, stdout_of, warpdraft};

const GREEDY: &[&str] = &["generate", "--temperature", "0", "--max-tokens", "24"];
const PROMPT: &str = "impl Iterator for Counter {";

#[test]
fn greedy_text_is_the_same_every_time_and_alone_on_standard_output() {
    let run = || stdout_of(warpdraft(GREEDY).arg(PROMPT));
    let text = run();
    assert!(!text.trim().is_empty());
    assert!(!text.contains("tokens/s"), "the summary strayed into the text: {text}");
    assert_eq!(run(), text);
}

#[test]
fn the_last_of_a_flags_values_counts() {
    let json = json_of(warpdraft(GREEDY).args(["--max-tokens", "3", "--max-tokens", "5", "--json", PROMPT]));
    assert_eq!(json["statistics"]["generated_tokens"], 5);
}

#[test]
fn a_dash_is_standard_input_also_as_a_file() {
    let text = stdout_of(warpdraft(GREEDY).arg(PROMPT));
    let read = |args: &[&str]| stdout_of(warpdraft(GREEDY).args(args).write_stdin(format!("{PROMPT}\n")));
    assert_eq!([read(&["--file", "-"]), read(&["-"]), read(&[])], [(); 3].map(|()| text.clone()));
}

#[test]
fn drafting_does_not_change_the_text() {
    let text = |draft: &[&str]| stdout_of(warpdraft(GREEDY).args(draft).arg(PROMPT));
    let plain = text(&["--draft", "none"]);
    assert_eq!(text(&["--draft", "ngram"]), plain);
    assert_eq!(text(&["--draft-always", "--draft-tokens", "15", "--ngram-max", "3", "--ngram-min", "1"]), plain);
}

#[test]
fn drafting_does_not_change_sampled_text_either() {
    let text = |draft| {
        let sampled = ["generate", "--temperature", "0.8", "--seed", "11", "--max-tokens", "24", "--draft", draft];
        stdout_of(warpdraft(&sampled).arg(PROMPT))
    };
    assert_eq!(text("ngram"), text("none"));
}

#[test]
fn a_model_drafts_and_the_summary_tells_whose_drafts_were_right() {
    let plain = stdout_of(warpdraft(GREEDY).args(["--draft", "none", PROMPT]));
    // The model that drafts for itself is always right.
    let model = ["--draft", "model-only:demo", "--draft-always", "--draft-tokens", "5"];
    let json = json_of(warpdraft(GREEDY).args(model).args(["--json", PROMPT]));
    assert_eq!(json["text"], plain.as_str());
    let drafts = &json["statistics"]["drafts"];
    assert_eq!(drafts["ngram"], serde_json::json!({ "drafted": 0, "accepted": 0 }));
    assert!(drafts["model"]["drafted"].as_u64().unwrap() > 10, "{drafts}");
    assert_eq!(drafts["model"]["drafted"], drafts["model"]["accepted"]);
    let output = warpdraft(GREEDY).args(["--draft", "model:demo", "--verbose", PROMPT]).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), plain);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("drafts  by model: ") && told.contains("drafts  by n-gram: "), "{told}");
}

#[test]
fn a_head_drafts_and_the_text_is_the_same() {
    let ((model, _), head) = (Model::of_bigrams(0.0), Head::BIGRAMS.write());
    let run = |device: &str, draft: &str| {
        let mut run = warpdraft(GREEDY);
        run.args(["--device", device, "--ignore-eos", "--draft", draft, "--draft-always", "--json", PROMPT, "--model"]);
        json_of(run.arg(model.path()))
    };
    for device in ["cpu", "emulator"] {
        let plain = run(device, "none");
        for how in ["eagle3", "eagle3-only"] {
            let json = run(device, &format!("{how}:{}", head.path().display()));
            assert_eq!(json["tokens"], plain["tokens"], "{how} on the {device}");
            let drafts = &json["statistics"]["drafts"];
            let [by_ngram, by_head] = ["ngram", "model"].map(|source| drafts[source]["accepted"].as_u64().unwrap());
            assert!(by_head > 3 && (by_ngram == 0 || how == "eagle3"), "{how} on the {device}: {drafts}");
        }
    }
}

#[test]
fn the_prompt_may_come_from_a_file_or_standard_input() {
    let expected = stdout_of(warpdraft(GREEDY).arg(PROMPT));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    // The newline that editors leave at the end is not part of the prompt.
    std::fs::write(&file, format!("{PROMPT}\n")).unwrap();
    assert_eq!(stdout_of(warpdraft(GREEDY).arg("--file").arg(&file)), expected);
    assert_eq!(stdout_of(warpdraft(GREEDY).write_stdin(PROMPT)), expected);
    assert_eq!(stdout_of(warpdraft(GREEDY).arg("-").write_stdin(format!("{PROMPT}\n"))), expected);
}

#[test]
fn json_holds_text_tokens_and_statistics() {
    let text = stdout_of(warpdraft(GREEDY).arg(PROMPT));
    let json = json_of(warpdraft(GREEDY).args(["--json", PROMPT]));
    assert_eq!(json["text"], text.as_str());
    assert_eq!(json["device"], "CPU");
    assert_eq!(json["model"], "demo");
    assert_eq!(json["finish"], "length");
    assert_eq!(json["seed"], serde_json::Value::Null, "greedy text has no seed");
    assert_eq!(json["tokens"].as_array().unwrap().len(), 24);
    let statistics = &json["statistics"];
    assert_eq!(statistics["generated_tokens"], 24);
    assert!(statistics["prompt_tokens"].as_u64().unwrap() > 0);
    assert!(statistics["accepted"].as_u64() <= statistics["drafted"].as_u64());
    let lengths = statistics["step_lengths"].as_object().unwrap();
    let tokens: u64 = lengths.iter().map(|(n, count)| n.parse::<u64>().unwrap() * count.as_u64().unwrap()).sum();
    assert_eq!(tokens, 23, "every token but the first came from a decode step");
}

#[test]
fn an_answer_that_a_limit_cut_off_is_said_to_be_with_what_to_do() {
    let output = warpdraft(GREEDY).args(["--json", PROMPT]).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["cut_off"]["by"], &json["cut_off"]["limit"]), (&"max_tokens".into(), &24.into()));
    assert!(json["cut_off"]["advice"].as_str().unwrap().contains("--max-tokens"));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("cut off at 24 tokens: a larger --max-tokens"), "{told}");
    let ended = json_of(warpdraft(GREEDY).args(["--json", "--stop", "e", PROMPT]));
    assert_eq!((&ended["finish"], &ended["cut_off"]), (&"stop".into(), &serde_json::Value::Null));
}

#[test]
fn an_answer_in_a_chat_template_is_as_long_as_the_context_allows() {
    let chat = ["generate", "--temperature", "0", "--ignore-eos", "--context", "400", "--chat", "--json", "Hello"];
    let json = json_of(&mut warpdraft(&chat));
    let statistics = &json["statistics"];
    let total = statistics["prompt_tokens"].as_u64().unwrap() + statistics["generated_tokens"].as_u64().unwrap();
    assert_eq!((total, &json["cut_off"]["by"]), (400, &"context".into()));
}

#[test]
fn echo_prints_the_prompt_before_its_continuation() {
    let text = stdout_of(warpdraft(GREEDY).arg(PROMPT));
    assert_eq!(stdout_of(warpdraft(GREEDY).args(["--echo", PROMPT])), format!("{PROMPT}{text}"));
    warpdraft(GREEDY).args(["--echo", "--json", PROMPT]).assert().code(2);
}

#[test]
fn the_demos_prompt_shows_what_its_model_can_do() {
    let prompt = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/demo/prompt.txt");
    let run = ["generate", "--model", "demo", "--temperature", "0", "--max-tokens", "86", "--file", prompt];
    let text = stdout_of(&mut warpdraft(&run));
    assert!(text.contains("Self { x: self.x - other.x, y: self.y - other.y }"), "{text}");
    assert!(text.trim_end().ends_with("\n}"), "it ends where an item does: {text}");
}

#[test]
fn without_drafts_every_step_brings_one_token() {
    let json = json_of(warpdraft(GREEDY).args(["--draft", "none", "--json", PROMPT]));
    assert_eq!(json["statistics"]["drafted"], 0);
    assert_eq!(json["statistics"]["mean_accepted_length"], 1.0);
}

#[test]
fn a_seed_repeats_a_sample_and_the_summary_names_it() {
    let sampled = ["generate", "--temperature", "1", "--max-tokens", "16", PROMPT];
    let first = json_of(warpdraft(&sampled).arg("--json"));
    let seed = first["seed"].to_string();
    let again = warpdraft(&sampled).args(["--seed", &seed]).assert().success();
    again.stdout(first["text"].as_str().unwrap().to_owned()).stderr(predicate::str::contains(format!("seed {seed}")));
}

#[test]
fn defaults_come_from_the_checkpoint() {
    // The demo's generation config asks for sampling at temperature 0.7.
    let json = json_of(warpdraft(&["generate", "--max-tokens", "1"]).args(["--json", PROMPT]));
    assert!((json["temperature"].as_f64().unwrap() - 0.7).abs() < 1e-6);
    assert!(json["seed"].is_u64());
}

#[test]
fn a_stop_text_ends_the_answer_before_it() {
    let text = stdout_of(warpdraft(GREEDY).arg(PROMPT));
    // Somewhere in the middle, at character boundaries.
    let chars: Vec<(usize, char)> = text.char_indices().collect();
    let (from, to) = (chars[chars.len() / 2].0, chars[chars.len() / 2 + 3].0);
    let stop = &text[from..to];
    let stopped = json_of(warpdraft(GREEDY).args(["--json", "--stop", "never to be seen", "--stop", stop, PROMPT]));
    assert_eq!(stopped["text"], &text[..text.find(stop).unwrap()]);
    assert_eq!(stopped["finish"], "stop");
}

#[test]
fn the_summary_tells_speed_and_drafts() {
    let summary = |flag: &[&str]| {
        let output = warpdraft(GREEDY).args(flag).arg(PROMPT).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let normal = summary(&[]);
    for part in ["demo on CPU", "first token after", "tokens/s", "tried", "accepted", "mean accepted length"] {
        assert!(normal.contains(part), "no {part:?} in {normal}");
    }
    assert_eq!(summary(&["--quiet"]), "");
}

#[test]
fn verbose_tells_how_many_steps_brought_how_many_tokens() {
    let drafting = ["--draft-always", "--ignore-eos", PROMPT];
    let statistics = json_of(warpdraft(GREEDY).args(drafting).arg("--json"))["statistics"].clone();
    let output = warpdraft(GREEDY).args(drafting).arg("--verbose").output().unwrap();
    let summary = String::from_utf8(output.stderr).unwrap();
    assert!(summary.contains(&format!("{} tried, {} accepted", statistics["drafted"], statistics["accepted"])));
    let lines = summary.lines().filter_map(|line| line.strip_prefix("steps of "));
    let histogram: serde_json::Map<_, _> = lines
        .map(|line| {
            let mut words = line.split_whitespace();
            let (length, count) = (words.next().unwrap(), words.next().unwrap());
            assert!(words.next().unwrap().chars().all(|c| c == '#'), "{line}");
            (length.to_owned(), count.parse::<u64>().unwrap().into())
        })
        .collect();
    assert!(histogram.len() > 1, "{summary}");
    assert_eq!(serde_json::Value::from(histogram), statistics["step_lengths"]);
}

#[test]
fn chat_goes_through_the_template() {
    let run = |args: &[&str]| json_of(warpdraft(GREEDY).args(["--json", "--chat"]).args(args).arg("Hello"));
    let prompt_tokens = |json: serde_json::Value| json["statistics"]["prompt_tokens"].as_u64().unwrap();
    let plain = json_of(warpdraft(GREEDY).args(["--json", "Hello"]));
    let chat = prompt_tokens(run(&[]));
    assert!(chat > prompt_tokens(plain));
    assert!(prompt_tokens(run(&["--system", "Be brief."])) > chat);
    assert!(prompt_tokens(run(&["--no-think"])) > chat, "an empty thought is part of the prompt");
    assert_eq!(prompt_tokens(run(&["--no-think", "--think"])), chat);
}

#[test]
fn a_sharded_f16_checkpoint_runs() {
    let dir = golden("separate_f16_sharded");
    let json = json_of(warpdraft(GREEDY).args(["--json", "--ignore-eos", "abc", "--model"]).arg(dir));
    assert_eq!(json["tokens"].as_array().unwrap().len(), 24);
}

#[test]
fn the_answer_ends_where_the_context_does() {
    let json =
        json_of(warpdraft(GREEDY).args(["--json", "--ignore-eos", "--context", "16", "--draft", "none", "fn main"]));
    let total = json["statistics"]["prompt_tokens"].as_u64().unwrap() + json["tokens"].as_array().unwrap().len() as u64;
    assert_eq!((total, &json["finish"]), (16, &"length".into()));
}

#[test]
fn the_emulator_runs_the_gpu_kernels_to_the_same_greedy_text() {
    let run = |device, flags: &[&str]| {
        let short =
            ["generate", "--temperature", "0", "--max-tokens", "3", "--context", "64", "--device", device, "abc"];
        let dir = golden("tied_bf16");
        stdout_of(warpdraft(&short).args(flags).arg("--model").arg(dir))
    };
    let text = run("cpu", &[]);
    for flags in [&[][..], &["--unfused"], &["--level", "sm_90"], &["--level", "sm_80"]] {
        assert_eq!(run("emulator", flags), text, "{flags:?}");
    }
}

#[test]
fn help_has_examples() {
    for command in ["generate", "chat", "inspect", "batch", "completions"] {
        warpdraft(&[command, "--help"]).assert().success().stdout(predicate::str::contains("Examples:"));
    }
}

/// A span of a trace: track, name, start and end in microseconds, arguments.
type Span = (u64, String, f64, f64, serde_json::Value);

fn spans(trace: &serde_json::Value) -> Vec<Span> {
    let events = trace["traceEvents"].as_array().unwrap();
    let spans = events.iter().filter(|event| event["ph"] == "X");
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let span = |event: &serde_json::Value| {
        let (start, name) = (number(&event["ts"]), event["name"].as_str().unwrap().to_owned());
        (event["tid"].as_u64().unwrap(), name, start, start + number(&event["dur"]), event["args"].clone())
    };
    spans.map(span).collect()
}

/// Runs `generate --profile` and gives its JSON and the trace's spans, after a look at what holds of any trace.
fn profiled(args: &[&str]) -> (serde_json::Value, Vec<Span>) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("profile.json");
    let json = json_of(warpdraft(&["generate", "--json", "--profile"]).arg(&file).args(args));
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(trace["otherData"]["device"], json["device"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left in the folder");

    let spans = spans(&trace);
    const ROUNDING: f64 = 1e-3;
    for (i, (track, name, start, end, _)) in spans.iter().enumerate() {
        assert!(*start >= 0.0 && end >= start, "{name} from {start} to {end}");
        for (_, other, from, to, _) in spans[..i].iter().filter(|other| other.0 == *track) {
            let apart = *to <= start + ROUNDING || *end <= from + ROUNDING;
            let within = |a: (f64, f64), b: (f64, f64)| a.0 >= b.0 - ROUNDING && a.1 <= b.1 + ROUNDING;
            let nested = within((*from, *to), (*start, *end)) || within((*start, *end), (*from, *to));
            assert!(apart || nested, "{name} from {start} to {end} cuts {other} from {from} to {to}");
        }
    }
    let statistics = &json["statistics"];
    let of = |name: &str| spans.iter().filter(|span| span.1 == name).collect::<Vec<_>>();
    let sum = |name: &str, arg: &str| of(name).iter().map(|span| span.4[arg].as_u64().unwrap()).sum::<u64>();
    assert_eq!(of("step").len() as u64, statistics["steps"].as_u64().unwrap());
    assert_eq!(sum("step", "drafted"), statistics["drafted"].as_u64().unwrap());
    assert_eq!(sum("step", "accepted"), statistics["accepted"].as_u64().unwrap());
    assert_eq!(sum("step", "tokens") + 1, statistics["generated_tokens"].as_u64().unwrap());
    assert_eq!(sum("step", "rows"), sum("step", "drafted") + of("step").len() as u64);
    assert_eq!(of("detokenise").len() as u64, statistics["generated_tokens"].as_u64().unwrap());
    assert_eq!(sum("prompt", "tokens"), statistics["prompt_tokens"].as_u64().unwrap());
    for name in ["open", "tokenise", "load", "prompt", "generate"] {
        assert_eq!(of(name).len(), 1, "{name}");
    }
    // All of an answer is in `generate`, and nearly all of that in its parts.
    let generate = of("generate")[0];
    let inside = ["prompt", "step", "detokenise"].map(of).concat();
    let parts: f64 = inside.iter().map(|span| span.3 - span.2).sum();
    assert!(inside.iter().all(|span| span.2 >= generate.2 && span.3 <= generate.3 + ROUNDING));
    assert!(parts <= generate.3 - generate.2 && parts > 0.8 * (generate.3 - generate.2), "{parts} µs of {generate:?}");
    (json, spans)
}

#[test]
fn a_profile_has_a_span_for_each_step() {
    let args = ["--temperature", "0", "--max-tokens", "64", "--ignore-eos", "--draft-always", PROMPT];
    let (json, spans) = profiled(&args);
    assert!(json["statistics"]["accepted"].as_u64() > Some(0));
    assert!(spans.iter().all(|span| span.0 == 1), "a CPU has no track of a device");
    let plain = json_of(warpdraft(&["generate", "--json"]).args(args));
    assert_eq!(json["tokens"], plain["tokens"]);
}

#[test]
fn a_profile_shows_the_phases_of_decode_steps() {
    let dir = golden("tied_bf16");
    let args = ["--temperature", "0", "--max-tokens", "4", "--context", "64", "--device", "emulator", "abc", "--model"];
    let (json, spans) = profiled(&[&args[..], &[dir.to_str().unwrap()]].concat());
    let count = |name: &str| spans.iter().filter(|span| span.0 == 2 && span.1 == name).count() as u64;
    let steps = json["statistics"]["steps"].as_u64().unwrap();
    assert_eq!((count("decode step"), count("embed"), count("head")), (steps, steps, steps));
    // The same number in each layer of each step.
    assert!(count("qkv") > 0 && count("qkv").is_multiple_of(steps) && count("down") == count("qkv"));
    let parts: f64 = spans.iter().filter(|s| s.0 == 2 && s.1 != "decode step").map(|s| s.3 - s.2).sum();
    let whole: f64 = spans.iter().filter(|s| s.1 == "decode step").map(|s| s.3 - s.2).sum();
    assert!((parts - whole).abs() < 1e-6 * whole + 1.0, "{parts} of {whole}");
}

/// There is a card where there is a driver, and then this says nothing.
#[test]
fn the_cpu_is_announced_where_nobody_asked_for_it() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let said = |args: &[&str]| {
        let output = warpdraft(&["generate", "abc", "--max-tokens", "2"]).args(args).output().unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let announced = "no usable CUDA card: running on the CPU";
    assert!(said(&["--device", "auto"]).starts_with(announced));
    for args in [["--device", "cpu"].as_slice(), &["--device", "auto", "--quiet"]] {
        assert!(!said(args).contains(announced), "{args:?}");
    }
}

#[test]
fn verbose_says_something_on_the_cpu_and_the_emulator() {
    for device in ["cpu", "emulator"] {
        let args =
            ["generate", "a", "--max-tokens", "1", "--verbose", "--device", device, "--context", "64", "--model"];
        let output = warpdraft(&args).arg(golden("tied_bf16")).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        for part in ["opened ", "loaded on ", "room for 64 tokens"] {
            assert!(said.contains(part), "no {part:?} in:\n{said}");
        }
    }
}
