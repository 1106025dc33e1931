//! `warpdraft chat`.

use predicates::prelude::*;
use serde_json::Value;

use crate::{golden, stdout_of, warpdraft};

const CHAT: &[&str] = &["chat", "--temperature", "0", "--max-tokens", "8"];

/// The answers of a conversation, one JSON object a turn.
fn turns(lines: &str) -> Vec<Value> {
    let output = stdout_of(warpdraft(CHAT).arg("--json").write_stdin(lines));
    output.lines().map(|line| serde_json::from_str(line).expect("a line is a JSON object")).collect()
}

fn count(turn: &Value, what: &str) -> u64 {
    turn["statistics"][what].as_u64().unwrap()
}

#[test]
fn a_line_is_a_turn() {
    let turns = turns("What is a vector?\n\nAnd a slice?\n");
    assert_eq!(turns.len(), 2, "an empty line is no turn");
}

#[test]
fn later_turns_reuse_what_is_in_the_cache() {
    let turns = turns("What is a vector?\nAnd a slice?\n");
    assert_eq!(count(&turns[0], "cached_tokens"), 0);
    // All of the first turn but, at most, the end of its answer.
    assert!(count(&turns[1], "cached_tokens") >= count(&turns[0], "prompt_tokens"));
    assert!(count(&turns[1], "prompt_tokens") > count(&turns[0], "prompt_tokens") + 8);
}

#[test]
fn reuse_does_not_change_the_answer() {
    let together = turns("What is a vector?\n/reset\nWhat is a slice?\n");
    let alone = turns("What is a slice?\n");
    assert_eq!(together[1]["text"], alone[0]["text"]);
}

#[test]
fn reset_forgets_the_conversation() {
    let turns = turns("What is a vector?\n/reset\nWhat is a vector?\n");
    assert_eq!(count(&turns[0], "prompt_tokens"), count(&turns[1], "prompt_tokens"));
    assert_eq!(turns[0]["text"], turns[1]["text"]);
}

#[test]
fn quit_leaves() {
    assert_eq!(turns("Hello\n/quit\nHello again\n").len(), 1);
    assert_eq!(turns("/quit\n").len(), 0);
}

#[test]
fn answers_end_with_a_newline_and_no_prompt_is_shown_to_a_pipe() {
    let both = warpdraft(CHAT).write_stdin("Hello\n").assert().success();
    both.stdout(predicate::str::ends_with("\n").and(predicate::str::starts_with("> ").not()))
        .stderr(predicate::str::contains("tokens/s").and(predicate::str::contains("> ").not()));
}

#[test]
fn quiet_leaves_standard_error_empty() {
    warpdraft(CHAT).arg("--quiet").write_stdin("Hello\n").assert().success().stderr("");
}

#[test]
fn a_model_without_a_template_is_refused() {
    let run = warpdraft(CHAT).arg("--model").arg(golden("tied_f32")).write_stdin("Hello\n").assert();
    run.code(1).stdout("").stderr(predicate::str::contains("has no chat template"));
}

#[test]
fn a_line_that_is_no_text_is_left_out_and_the_others_are_answered() {
    let lines: &[u8] = b"What is a vector?\nbroken \xff\nAnd a slice?\n";
    let run = warpdraft(CHAT).arg("--json").write_stdin(lines).assert().code(1);
    run.stdout(predicate::function(|out: &str| out.lines().count() == 2))
        .stderr(predicate::str::contains("line 2 of standard input is not UTF-8 text from byte 8 on"));
}

#[test]
fn blanks_are_the_users_own() {
    let tokens = |line: &str| count(&turns(line)[0], "prompt_tokens");
    assert!(tokens("    indented  \n") > tokens("indented\n"));
    assert_eq!(tokens("indented\r\n"), tokens("indented\n"));
    // A blank before the slash makes it text.
    assert_eq!(turns(" /quit\nHello\n").len(), 2);
}

#[test]
fn a_command_that_there_is_not_is_refused_with_the_list() {
    let run = warpdraft(CHAT).write_stdin("/rest\nHello\n").assert().code(1).stdout("");
    run.stderr(predicate::str::contains("/rest").and(predicate::str::contains("/help, /clear, /think")));
}

#[test]
fn thinking_is_switched_within_a_conversation() {
    let turns = turns("Hello\n/clear\n/no-think\nHello\n/clear\n/think\nHello\n");
    let tokens: Vec<u64> = turns.iter().map(|turn| count(turn, "prompt_tokens")).collect();
    assert!(tokens[1] > tokens[0] && tokens[2] == tokens[0], "an empty thought is part of the prompt: {tokens:?}");
}

#[test]
fn an_answer_may_run_to_the_end_of_the_context() {
    let args = ["chat", "--temperature", "0", "--ignore-eos", "--context", "400"];
    let output = warpdraft(&args).arg("--json").write_stdin("Hello\n").output().unwrap();
    let turn: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(count(&turn, "prompt_tokens") + count(&turn, "generated_tokens"), 400);
    assert_eq!((&turn["cut_off"]["by"], &turn["cut_off"]["limit"]), (&"context".into(), &400.into()));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("cut off at 400 tokens of context") && told.contains("a larger --context"), "{told}");
}

#[test]
fn a_turn_that_does_not_fit_ends_a_script() {
    let long = "word ".repeat(100);
    let run = warpdraft(CHAT).args(["--context", "32"]).write_stdin(long).assert();
    run.code(1).stdout("").stderr(predicate::str::contains("the context holds 32"));
}
