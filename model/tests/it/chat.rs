//! Chat templates render what transformers' `apply_chat_template` renders.

use std::collections::BTreeMap;

use model::{ChatTemplate, Conversation, Error, Message, Role};
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
    tools: Vec<serde_json::Value>,
    enable_thinking: bool,
    add_generation_prompt: bool,
    text: String,
}

fn golden() -> Golden {
    // Made by scripts/make_golden.py.
    golden_of(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/chat.json"))
}

fn golden_of(path: &str) -> Golden {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn template(source: &str) -> Result<ChatTemplate, Error> {
    ChatTemplate::new(source.to_owned(), BTreeMap::new(), "chat_template.jinja".as_ref())
}

#[test]
fn matches_transformers() {
    // The same comparison for prompts of another template, made by the same script.
    let others = std::env::var("WARPDRAFT_CHAT_GOLDEN").ok().map(|path| golden_of(&path));
    for golden in [golden()].into_iter().chain(others) {
        let tokens = BTreeMap::from([("eos_token".to_owned(), golden.eos_token)]);
        let template = ChatTemplate::new(golden.template, tokens, "chat.json".as_ref()).unwrap();
        assert_eq!(golden.cases.len(), 48);
        for Case { messages, tools, enable_thinking, add_generation_prompt, text } in &golden.cases {
            let (enable_thinking, add_generation_prompt) = (*enable_thinking, *add_generation_prompt);
            let conversation = Conversation { messages, tools, enable_thinking, add_generation_prompt };
            assert_eq!(template.render_conversation(conversation).unwrap(), *text);
        }
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

#[test]
fn a_template_for_tools_is_used_where_there_are_tools() {
    let mut fixture = Fixture::new("F32", true);
    fixture.tokenizer_config["chat_template"] = json!([
        {"name": "default", "template": "chat"},
        {"name": "tool_use", "template": "{{ tools|length }} tools"},
    ]);
    let template = fixture.open().chat_template.unwrap();
    let tools = [json!({"type": "function", "function": {"name": "f"}})];
    let messages = [Message::new(Role::User, "x")];
    let conversation = Conversation::plain(&messages, true);
    assert_eq!(template.render_conversation(conversation).unwrap(), "chat");
    assert_eq!(template.render_conversation(Conversation { tools: &tools, ..conversation }).unwrap(), "1 tools");
    fixture.tokenizer_config["chat_template"][1]["template"] = json!("{{ unclosed");
    fixture.write().error("tokenizer_config.json");
}

/// OpenAI's clients send the arguments of earlier calls as a text of JSON. Some templates expect that, some an object.
#[test]
fn arguments_of_calls_come_as_the_template_takes_them() {
    let call = |arguments| json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
    for (source, rendered) in [
        ("arguments | tojson", r#"{"b": 1, "a": [2]}"#),
        ("arguments", r#"{"b":1,"a":[2]}"#),
        (
            "arguments if message.tool_calls[0].function.arguments is string else message.tool_calls[0] | tojson",
            r#"{"b":1,"a":[2]}"#,
        ),
    ] {
        let template = template(&format!(
            "{{% for message in messages if message.tool_calls %}}\
             {{{{ message.tool_calls[0].function.{source} }}}}{{% endfor %}}"
        ));
        let messages =
            [Message { tool_calls: vec![call(json!(r#"{"b":1,"a":[2]}"#))], ..Message::new(Role::Assistant, "") }];
        assert_eq!(template.unwrap().render(&messages, true, true).unwrap(), rendered, "{source}");
    }
    let template = template("{{ messages[-1].tool_calls[0].function.arguments | tojson }}").unwrap();
    let messages = [Message { tool_calls: vec![call(json!("no JSON"))], ..Message::new(Role::Assistant, "") }];
    assert_eq!(template.render(&messages, true, true).unwrap(), "\"no JSON\"");
}

/// The reason with which the template fails.
fn refused(source: &str) -> String {
    let messages = [Message::new(Role::User, "hello")];
    let result = template(source).and_then(|template| template.render(&messages, true, true));
    match result {
        Err(Error::ChatTemplate { reason, .. }) => reason,
        other => panic!("{:.200}: {:.200}", source, format!("{other:?}")),
    }
}

/// A template comes with a model: whatever it asks for, it must neither end the program nor hang it.
#[test]
fn what_would_abort_or_hang_is_refused() {
    let terms = |operator: &str| format!("{{{{ {} }}}}", vec!["1"; 20_000].join(operator));
    let of_variable = |operator: &str| format!("{{{{ {} }}}}", vec!["x"; 20_000].join(operator));
    let itself = |use_it: &str| format!("{{% set ns = namespace() %}}{{% set ns.x = {use_it} %}}{{{{ ns }}}}");
    let nested = "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let doubled = |start: &str, double: &str| {
        let ns = format!("{{% set ns = namespace(s={start}) %}}");
        format!("{ns}{{% for i in range(100) %}}{double}{{% endfor %}}{{{{ ns.s|length }}}}")
    };
    let cases = [
        (terms("+"), "within each other"),
        (terms("~"), "within each other"),
        (of_variable("|"), ""),
        (of_variable("."), "within each other"),
        (of_variable(" and "), "within each other"),
        (format!("{{{{ {}1{} }}}}", "(".repeat(20_000), ")".repeat(20_000)), "recursion"),
        (format!("{{{{ {} 1 }}}}", "not ".repeat(20_000)), ""),
        (format!("{{{{ {} 1 }}}}", "-".repeat(20_000)), ""),
        (format!("{}{}", "{% if x %}".repeat(5_000), "{% endif %}".repeat(5_000)), "recursion"),
        (format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(5_000)), "within each other"),
        (" ".repeat(1 << 20), "KiB"),
        (itself("ns"), "namespace into a namespace"),
        (itself("[1, {'a': ns}]"), "namespace into a namespace"),
        (nested.to_owned(), "within each other"),
        ("{{ 'x'|indent(99999999999) }}".to_owned(), "indent"),
        ("{{ 'x'|indent(width=99999999999) }}".to_owned(), "indent"),
        ("{{ ['x\\n'*1000]|map('indent', 99999999999)|list }}".to_owned(), "indent"),
        ("{{ ('x\\n'*100000)|indent(10000) }}".to_owned(), "MiB"),
        ("{{ 'x' * 99999999999 }}".to_owned(), ""),
        ("{{ ('x' * 90000000) ~ 'y' }}".to_owned(), "MiB"),
        (doubled("'ab'", "{% set ns.s = ns.s ~ ns.s %}"), "MiB"),
        (doubled("'ab'", "{% set ns.s = ns.s + ns.s %}"), "MiB"),
        (doubled("'ab'", "{% set ns.s = ns.s * 2 %}"), "large"),
        (doubled("'ab'", "{% set ns.s = ns.s.replace('a', 'aa') %}"), "MiB"),
        (doubled("'ab'", "{% set ns.s = ns.s|replace('a', 'aa') %}"), "MiB"),
        (doubled("'ab'", "{% set ns.s = [ns.s, ns.s]|join %}"), "MiB"),
        (doubled("'ab'", "{% set ns.s = '%s%s'|format(ns.s, ns.s) %}"), "MiB"),
        (doubled("'ab'", "{% set ns.s = '{}{}'.format(ns.s, ns.s) %}"), "MiB"),
        (doubled("'ab'", "{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}"), "MiB"),
        (doubled("[1]", "{% set ns.s = [ns.s, ns.s] %}"), "MiB"),
        (doubled("[1]", "{% set ns.s = ns.s + ns.s %}"), "MiB"),
        ("{% set a = 'x' * 9000000 %}{{ a.replace('x', a) }}".to_owned(), "MiB"),
        ("{% set a = 'x' * 9000000 %}{{ a.join(a|list) }}".to_owned(), "MiB"),
        ("{{ '%9999999999d'|format(1) }}".to_owned(), "MiB"),
        ("{{ '{:9999999999}'.format(1) }}".to_owned(), "MiB"),
        ("{{ [1]|batch(9999999999, 0) }}".to_owned(), "batch"),
        ("{{ [1]|slice(9999999999) }}".to_owned(), "slice"),
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}".to_owned(), "steps"),
        ("{% for i in range(99999) %}{{ range(99999)|list }}{% endfor %}".to_owned(), "MiB"),
        ("{% for i in range(99999) %}some of the text that it writes {% endfor %}".repeat(30), "steps"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".to_owned(), ""),
        ("{% macro m(n) %}{{ m(n+1) }}{{ m(n+1) }}{% endmacro %}{{ m(1) }}".to_owned(), ""),
        ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_owned(), ""),
        ("{% include 'other' %}".to_owned(), "several templates"),
        ("{% extends 'other' %}".to_owned(), "several templates"),
    ];
    for (source, part) in cases {
        let start = std::time::Instant::now();
        let reason = refused(&source);
        assert!(reason.contains(part), "{source:.200}: {reason}");
        assert!(start.elapsed().as_secs() < 20, "{source:.200} took {:?}", start.elapsed());
    }
}

/// Ordinary templates that use what the guard examines are not refused.
#[test]
fn ordinary_use_of_what_is_guarded() {
    let cases = [
        (
            "{% set ns = namespace(n=0, l=[]) %}{% for c in 'abc' %}{% set ns.n = ns.n + 1 %}{% set ns.l = ns.l + [c] %}{% endfor %}{{ ns.n }}{{ ns.l|join('-') }}",
            "3a-b-c",
        ),
        (
            "{% macro greet(who, sign='!') %}hi {{ who ~ sign }}{% endmacro %}{{ greet('you') }} {{ greet('me', sign='?') }}",
            "hi you! hi me?",
        ),
        ("{{ 'a\nb'|indent(2) }} {{ 'a\nb'|indent(width=1, first=true) }}", "a\n  b  a\n b"),
        ("{{ '%s-%05d'|format('a', 42) }} {{ '{:>4}'.format(7) }}", "a-00042    7"),
        ("{{ [3, 1, 2]|sort|map('string')|join(',') }} {{ {'b': 1, 'a': 2}|dictsort }}", "1,2,3 [('a', 2), ('b', 1)]"),
        (
            "{% for x in [1, 2, 3] if x is odd %}{{ loop.index }}{{ x }}{% if not loop.last %},{% endif %}{% endfor %}",
            "11,23",
        ),
        (
            "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x > 3 %}{% break %}{% endif %}{{ x }}{% endfor %}",
            "013",
        ),
        (
            "{% set x %}a{{ 1 }}{% endset %}{{ x|upper }}{% filter lower %}B{% endfilter %}{% with y = 2 %}{{ y }}{% endwith %}",
            "A1b2",
        ),
        (
            "{{ messages[-1]['content'][1:3] }} {{ 'e' in messages[0].content }} {{ 1 < 2 <= 2 }} {{ 2 ** 3 }}",
            "el True True 8",
        ),
        (
            "{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ nothing is defined }}",
            "True True True False",
        ),
        ("{{ (1, 2)[0] }} {{ {'a': [1]}.a[0] }} {{ 'x' if false else 'y' }} {{ 'a,b'.split(',')|last }}", "1 1 y b"),
    ];
    for (source, expected) in cases {
        let text = template(source).unwrap().render(&[Message::new(Role::User, "hello")], true, true);
        assert_eq!(text.unwrap(), expected, "{source}");
    }
}

/// A long conversation does not run into the limits.
#[test]
fn a_long_conversation_stays_within_limits() {
    let template = template(&golden().template).unwrap();
    let turns = (0..2000).flat_map(|i| {
        let said = format!("{i} {}", "what is said ".repeat(200));
        [Message::new(Role::User, said.as_str()), Message::new(Role::Assistant, said.as_str())]
    });
    let messages: Vec<Message> = turns.collect();
    let text = template.render(&messages, true, true).unwrap();
    assert!(text.len() > 4000 * 2600, "{}", text.len());
    let one = Message::new(Role::User, "word ".repeat(10 << 20));
    assert!(template.render(&[one], true, true).unwrap().len() > 50 << 20);
}

#[test]
fn a_template_s_words_are_fit_to_be_shown() {
    let reason = refused("{{ raise_exception('\\x1b[31mred\\n' ~ 'x' * 50000000) }}");
    assert!(reason.contains("\\u{1b}[31mred\\nxxx") && reason.len() < 1000, "{reason:.2000}");
}
