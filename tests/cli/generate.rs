//! `warpdraft generate`.

use predicates::prelude::*;

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
    assert!(summary(&["--verbose"]).contains("steps of  1"));
    assert_eq!(summary(&["--quiet"]), "");
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
    let run = |device| {
        let short =
            ["generate", "--temperature", "0", "--max-tokens", "3", "--context", "64", "--device", device, "abc"];
        let dir = golden("tied_bf16");
        stdout_of(warpdraft(&short).arg("--model").arg(dir))
    };
    assert_eq!(run("emulator"), run("cpu"));
}

#[test]
fn help_has_examples() {
    for command in ["generate", "chat", "inspect", "batch", "completions"] {
        warpdraft(&[command, "--help"]).assert().success().stdout(predicate::str::contains("Examples:"));
    }
}
