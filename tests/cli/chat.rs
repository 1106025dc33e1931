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
fn a_turn_that_does_not_fit_ends_a_script() {
    let long = "word ".repeat(100);
    let run = warpdraft(CHAT).args(["--context", "32"]).write_stdin(long).assert();
    run.code(1).stdout("").stderr(predicate::str::contains("the context holds 32"));
}
