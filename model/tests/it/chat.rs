//! Chat templates give what transformers' `apply_chat_template` gives.

use std::collections::BTreeMap;

use model::{ChatTemplate, Error, Message, Role};
use serde::Deserialize;
use serde_json::json;

use crate::fixture::Fixture;

#[derive(Deserialize)]
struct Golden {
    template: String,
    eos_token: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Message>,
    enable_thinking: bool,
    add_generation_prompt: bool,
    text: String,
}

fn golden() -> Golden {
    // Made by scripts/make_golden.py.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/chat.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn template(source: &str) -> Result<ChatTemplate, Error> {
    ChatTemplate::new(source.to_owned(), BTreeMap::new(), "chat_template.jinja".as_ref())
}

#[test]
fn matches_transformers() {
    let golden = golden();
    let tokens = BTreeMap::from([("eos_token".to_owned(), golden.eos_token)]);
    let template = ChatTemplate::new(golden.template, tokens, "chat.json".as_ref()).unwrap();
    assert_eq!(golden.cases.len(), 24);
    for case in golden.cases {
        let text = template.render(&case.messages, case.enable_thinking, case.add_generation_prompt).unwrap();
        assert_eq!(text, case.text);
    }
}

#[test]
fn raise_exception_is_an_error_in_the_templates_words() {
    let template = template(&golden().template).unwrap();
    let error = template.render(&[Message::new(Role::User, "refuse")], true, true).unwrap_err();
    assert!(
        matches!(&error, Error::ChatTemplate { reason, .. } if reason.contains("This conversation is refused.")),
        "{error}"
    );
}

#[test]
fn an_empty_conversation_is_an_error_or_a_prompt_but_no_panic() {
    let _ = template(&golden().template).unwrap().render(&[], false, true);
}

#[test]
fn strftime_now_and_the_python_way_with_strings() {
    let rendered =
        template("{{ strftime_now('%Y')|int > 2000 }} {{ 'a-b'.split('-')[-1].upper() }} {{ 'xyz'[::-1] }}").unwrap();
    assert_eq!(rendered.render(&[], true, true).unwrap(), "True B zyx");
}

#[test]
fn the_template_is_found_in_either_file() {
    let mut fixture = Fixture::new("F32", true);
    let text = |fixture: &Fixture| {
        let template = fixture.open().chat_template;
        template.map(|t| t.render(&[Message::new(Role::User, "x")], true, true).unwrap())
    };
    assert_eq!(text(&fixture), None);
    fixture.tokenizer_config["chat_template"] = json!("one {{ messages[0].content }} {{ eos_token }}");
    assert_eq!(text(&fixture).unwrap(), "one x <|im_end|>");
    fixture.tokenizer_config["chat_template"] =
        json!([{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]);
    fixture.tokenizer_config["eos_token"] = json!({"content": "<|endoftext|>", "special": true});
    assert_eq!(text(&fixture).unwrap(), "two");
    assert_eq!(fixture.open().generation.eos_token_ids, [265]);
    let dir = fixture.write();
    dir.put("chat_template.jinja", b"file {{ messages[0].role }}");
    let template = dir.open().unwrap().chat_template.unwrap();
    assert_eq!(template.render(&[Message::new(Role::System, "x")], true, true).unwrap(), "file system");
    dir.put("chat_template.jinja", &[0xff]);
    dir.error("not UTF-8");
}
