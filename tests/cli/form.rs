//! Answers of a given form, as a user asks for them.

use predicates::prelude::*;
use serde_json::{Value, json};

use crate::batch::{Folder, text_of};
use crate::batch_again::{finish, start, unpacked, wait_until};
use crate::{golden, stdout_of, warpdraft};

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["cat", "dog"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": false,
    })
}

fn is_of_schema(text: &str) -> bool {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    value["name"].is_string() && value["age"].as_u64().is_some_and(|age| age <= 120) && value["kind"].is_string()
}

#[test]
fn generate_and_chat_answer_in_the_form() {
    let dir = tempfile::tempdir().unwrap();
    let (schema_file, grammar) = (dir.path().join("person.json"), dir.path().join("list.lark"));
    std::fs::write(&schema_file, schema().to_string()).unwrap();
    std::fs::write(&grammar, "start: word (\"; \" word){2}\nword: /[a-z]{3}/\n").unwrap();
    let run = |more: &[&str]| stdout_of(warpdraft(&["generate", "--quiet", "--seed", "5", "A person: "]).args(more));
    for more in [&[][..], &["--temperature", "1.5"], &["--temperature", "0", "--draft", "none"]] {
        let path = schema_file.to_str().unwrap();
        let text = run(&[&["--json-schema", path], more].concat());
        assert!(is_of_schema(&text), "{text}");
    }
    let text = run(&["--json-schema", &schema().to_string()]);
    assert!(is_of_schema(&text), "{text}");
    let date = run(&["--regex", "[0-9]{4}-(0[1-9]|1[0-2])"]);
    assert!(date.len() == 7 && date.as_bytes()[4] == b'-', "{date}");
    assert!(["yes", "no"].contains(&run(&["--choice", "yes,no"]).as_str()));
    assert_eq!(run(&["--grammar", grammar.to_str().unwrap()]).split("; ").count(), 3);
    // A limit cuts it off.
    assert_eq!(run(&["--choice", "abcdefghijklmnopqrstuvwxyz", "-n", "1"]).find("abcdefghijklmnopqrstuvwxyz"), None);

    // In a conversation, at once or behind a thought.
    let chat = ["chat", "--quiet", "--seed", "3", "--choice", "yes,no"];
    let answers = stdout_of(warpdraft(&chat).arg("--no-think").write_stdin("Is it?\nAnd now?\n"));
    assert!(answers.lines().count() == 2 && answers.lines().all(|line| ["yes", "no"].contains(&line)), "{answers}");
}

#[test]
fn what_is_wrong_with_a_form_is_said_before_the_model_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let unique = file("unique.json", r#"{"type": "array", "uniqueItems": true}"#);
    let torn = file("torn.json", "{\"type\": ");
    let grammar = file("a.lark", "begin: \"a\"\n");
    for (arguments, code, part) in [
        (vec!["--json-schema", &unique], 1, "the schema's keyword `uniqueItems` is not supported; leave it out"),
        (vec!["--json-schema", &torn], 1, "is no JSON"),
        (vec!["--json-schema", "none.json"], 1, "cannot read the JSON Schema from none.json"),
        (vec!["--regex", "[a-"], 1, "unclosed character class"),
        (vec!["--grammar", &grammar], 1, "start"),
        (vec!["--choice", "a,,b"], 1, "none of them empty"),
        (vec!["--regex", "a", "--choice", "b"], 2, "cannot be used with"),
        (vec!["--regex", "a", "--ignore-eos"], 2, "cannot be used with"),
    ] {
        let run = warpdraft(&["generate", "--quiet", "x"]).args(&arguments).assert().code(code);
        run.stderr(predicate::str::contains(part)).stdout("");
    }
}

/// A line of each way to ask for a form, and some without.
fn requests() -> String {
    let messages = json!([{"role": "user", "content": "A person?"}]);
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": schema()}});
    let no_think = json!({"enable_thinking": false});
    let chat = |more: Value| {
        let mut body = json!({"messages": messages, "max_tokens": 200, "chat_template_kwargs": no_think});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.to_string() + "\n"
    };
    let prompt = |more: Value| {
        let mut body = json!({"prompt": "A person: ", "max_tokens": 200, "temperature": 1.2});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body.to_string() + "\n"
    };
    let strict = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema()}});
    [
        chat(json!({"response_format": strict})),
        prompt(json!({"guided_json": schema()})),
        prompt(json!({"structured_outputs": {"choice": ["cat", "dog"]}})),
        prompt(json!({"guided_regex": "[0-9]{3}-[a-f]{2}"})),
        prompt(json!({"guided_grammar": "start: \"a\" /[xyz]{4}/"})),
        chat(json!({"tools": [tool("make"), tool("keep")], "tool_choice": "required"})),
        chat(json!({"tools": [tool("make"), tool("keep")],
                    "tool_choice": {"type": "function", "function": {"name": "keep"}}})),
        prompt(json!({"max_tokens": 9})),
        // Behind a thought, which the limit may cut off.
        chat(json!({"guided_choice": ["cat", "dog"], "chat_template_kwargs": {"enable_thinking": true}, "max_tokens": 60})),
        prompt(json!({"guided_choice": ["abcdefghijklmnopqrstuvwxyz"], "max_tokens": 2})),
        prompt(json!({"guided_json": {"type": "array", "uniqueItems": true}})),
        prompt(json!({"guided_regex": "a", "tool_choice": "required"})),
        prompt(json!({"response_format": {"type": "json_object"}, "ignore_eos": true})),
        // Empty, and yet forms: any JSON, and a choice of nothing.
        prompt(json!({"guided_json": {}, "max_tokens": 3})),
        prompt(json!({"guided_choice": []})),
    ]
    .concat()
}

#[test]
fn requests_of_a_batch_say_the_form_as_openai_and_vllm_do() {
    let folder = Folder::with(&requests());
    folder.batch("results.jsonl", &[]).assert().success();
    let results = folder.results("results.jsonl");
    let choice = |line: u64| &results[&line]["response"]["body"]["choices"][0];
    for line in [1, 2] {
        assert!(is_of_schema(text_of(&results[&line])), "{}", results[&line]);
        assert_eq!(choice(line)["finish_reason"], "stop");
    }
    assert!(["cat", "dog"].contains(&text_of(&results[&3])));
    assert!(text_of(&results[&4]).len() == 6 && text_of(&results[&5]).starts_with('a'));
    for (line, names) in [(6, &["make", "keep"][..]), (7, &["keep"])] {
        let call = &choice(line)["message"]["tool_calls"][0]["function"];
        assert!(names.contains(&call["name"].as_str().unwrap_or_default()), "{}", results[&line]);
        assert!(is_of_schema(call["arguments"].as_str().unwrap()), "{call}");
        assert_eq!(choice(line)["finish_reason"], "tool_calls");
    }
    // Of a thought, however short, its tags are tokens.
    let tokens = results[&9]["response"]["body"]["usage"]["completion_tokens"].as_u64().unwrap();
    let is_whole = choice(9)["finish_reason"] == "stop";
    assert!(tokens > 5 && (!is_whole || ["cat", "dog"].contains(&text_of(&results[&9]))), "{}", results[&9]);
    assert_eq!(choice(10)["finish_reason"], "length");
    let json = text_of(&results[&14]).trim_start();
    assert!(json.starts_with(['{', '[', '"', '-', 't', 'f', 'n']) || json.starts_with(|c: char| c.is_ascii_digit()));
    for (line, code, part) in [
        (
            11,
            "unsupported_form",
            "`guided_json`: the form of the answer cannot be followed: the schema's keyword `uniqueItems`",
        ),
        (12, "invalid_request", "`tool_choice`"),
        (13, "invalid_request", "ends where the form does"),
        (15, "unsupported_form", "`guided_choice`: the form of the answer cannot be followed: a choice needs one text"),
    ] {
        let error = &results[&line]["error"];
        assert_eq!(error["code"], code, "{error}");
        assert!(error["message"].as_str().unwrap().contains(part), "{error}");
    }
}

#[test]
fn forms_are_the_same_after_a_stop_with_drafts_and_on_another_path() {
    let folder = Folder::with(&requests().replace("\"max_tokens\":200", "\"max_tokens\":90"));
    let small = golden("tied_bf16");
    let run = |output: &str, more: &[&str]| {
        let mut command = folder.batch(output, &["--ordered", "--model", small.to_str().unwrap(), "--context", "256"]);
        command.args(more).assert().success();
        folder.read(output)
    };
    let whole = run("whole.jsonl", &["--draft", "none"]);
    assert_eq!(run("drafted.jsonl", &["--draft-always", "--draft-rows", "100"]), whole);
    assert_eq!(run("alone.jsonl", &["--sequences", "1"]), whole);
    // As if it had been killed in the middle of a line.
    let cut = whole.match_indices('\n').nth(3).unwrap().0 + 40;
    std::fs::write(folder.path("again.jsonl"), &whole[..cut]).unwrap();
    assert_eq!(run("again.jsonl", &[]), whole);
}

#[test]
fn killed_halfway_a_job_with_forms_ends_as_if_it_had_not_been() {
    let lines: String = (0..8).map(|_| requests().replace("\"max_tokens\":200", "\"max_tokens\":90")).collect();
    let (folder, count) = (Folder::with(&lines), lines.lines().count());
    let small = golden("tied_bf16");
    let model = ["--ordered", "--model", small.to_str().unwrap(), "--context", "256"];
    folder.batch("whole.jsonl", &model).args(["--draft", "none"]).assert().success();
    let expected = folder.read("whole.jsonl");
    assert_eq!(expected.lines().count(), count);
    for (name, draft) in
        [("plain.jsonl", &["--draft", "none"][..]), ("drafted.jsonl", &["--draft-always", "--draft-rows", "100"])]
    {
        let more = [&model[..], draft].concat();
        let done = || unpacked(&folder.path(name)).matches('\n').count();
        for kill in 1..=3 {
            let before = done();
            let mut child = start(&folder, name, &more);
            wait_until(|| done() > before);
            child.kill().expect("it can be killed");
            child.wait().unwrap();
            assert!(before < done() && done() < count, "{name}: {before} and {} after kill {kill}", done());
        }
        finish(&folder, name, &more, &expected);
    }
}
