//! Forms: what may come next, regardless of what was asked or taken back before; and what cannot be followed.

use model::form::{Tool, is_allowed, mask_words};
use model::sampling::random;
use model::{Checkpoint, Form, Forms, Matcher, Shape};
use serde_json::json;

/// The demo model's tokens: its tokenizer has Qwen3's tags.
fn demo() -> Checkpoint {
    Checkpoint::demo().unwrap()
}

fn mask(matcher: &mut Matcher, form: &Form) -> Vec<u32> {
    let mut mask = vec![0; mask_words(form.vocab_size())];
    matcher.mask(&mut mask);
    mask
}

fn allowed(mask: &[u32], vocab_size: usize) -> Vec<u32> {
    (0..vocab_size as u32).filter(|&token| is_allowed(mask, token)).collect()
}

/// A random answer of the form, up to an end token, with the mask before each token.
fn walk(form: &Form, ends: &[u32], seed: u64) -> (Vec<u32>, Vec<Vec<u32>>) {
    let (mut matcher, mut tokens, mut masks) = (form.matcher(), Vec::new(), Vec::new());
    while tokens.len() < 400 {
        let mask = mask(&mut matcher, form);
        let choices = allowed(&mask, form.vocab_size());
        let token = choices[(random(seed, tokens.len() as u64) % choices.len() as u64) as usize];
        matcher.accept(&[token]);
        matcher.check().unwrap();
        tokens.push(token);
        masks.push(mask);
        if ends.contains(&token) {
            break;
        }
    }
    (tokens, masks)
}

fn shapes() -> Vec<Shape> {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["a", "bc", "bcd"]},
            "many": {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 1200}, "maxItems": 3},
            "of": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
        },
        "required": ["name", "kind", "many", "of"],
        "additionalProperties": false,
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                            "additionalProperties": false}},
    });
    let tool = Tool { name: "look_up".into(), parameters: schema.clone() };
    let nothing = json!({"type": "object", "additionalProperties": false});
    vec![
        Shape::JsonSchema(schema),
        Shape::Regex("[0-9]{4}-[0-9]{2}(/[a-z]+)?".into()),
        Shape::Choice(vec!["yes".into(), "yes, but".into(), "no (1+1)".into(), "<|im_end|>".into()]),
        Shape::Lark("start: word (\", \" word)*\nword: /[a-z]{2,5}/\n".into()),
        Shape::Call(vec![tool, Tool { name: "stop \"now\"".into(), parameters: nothing }]),
    ]
}

#[test]
fn a_mask_depends_on_the_tokens_alone() {
    let checkpoint = demo();
    let (forms, ends) = (Forms::new(&checkpoint).unwrap(), &checkpoint.generation.eos_token_ids);
    for (number, shape) in shapes().iter().enumerate() {
        let form = forms.compile(shape).unwrap();
        for form in [form.clone(), form.after_thought(false).unwrap(), form.after_thought(true).unwrap()] {
            for seed in 0..8 {
                let (tokens, masks) = walk(&form, ends, seed);
                let text = checkpoint.tokenizer.decode(&tokens);
                assert!(tokens.len() == 400 || ends.contains(tokens.last().unwrap()), "{text}");
                // The same in leaps, with guesses that are taken back, and with questions in between.
                let (mut matcher, mut at) = (form.matcher(), 0);
                while at < tokens.len() {
                    let ahead = (random(seed ^ 77, at as u64) % 6) as usize;
                    let drafts = &tokens[at..(at + ahead).min(tokens.len())];
                    let mut along = vec![0; (drafts.len() + 1) * masks[0].len()];
                    matcher.masks_along(drafts, along.chunks_exact_mut(masks[0].len()));
                    let rows = along.chunks_exact(masks[0].len()).zip(&masks[at..]);
                    assert!(rows.into_iter().all(|(a, b)| a == b), "shape {number}, seed {seed}, at {at}: {text}");
                    let forced = matcher.forced(9);
                    assert!(tokens[at..].starts_with(&forced[..forced.len().min(1)]), "{forced:?} in {text}");
                    assert!(matcher.possible(&tokens[at..]) > 0 || ends.contains(&tokens[at]), "at {at} in {text}");
                    let leap = (1 + random(seed ^ 99, at as u64) as usize % 4).min(tokens.len() - at);
                    matcher.accept(&tokens[at..at + leap]);
                    at += leap;
                }
                matcher.check().unwrap();
                assert_eq!(matcher.is_at_end(), tokens.len() < 400);
            }
        }
    }
}

#[test]
fn answers_have_the_form() {
    let checkpoint = demo();
    let (forms, ends) = (Forms::new(&checkpoint).unwrap(), &checkpoint.generation.eos_token_ids);
    let text = |shape: &Shape, seed| checkpoint.tokenizer.decode(&walk(&forms.compile(shape).unwrap(), ends, seed).0);
    let [schema, date, choice, words, call] = &shapes()[..] else { panic!("five") };
    let mut chosen = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let json = text(schema, seed);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{e}: {json}"));
        assert!(value["name"].is_string() && json.starts_with("{\"name\": \""), "{json}");
        let date = text(date, seed);
        assert!(date.as_bytes()[..4].iter().all(u8::is_ascii_digit) && &date[4..5] == "-", "{date}");
        chosen.insert(text(choice, seed));
        let words = text(words, seed);
        assert!(words.split(", ").all(|word| (2..=5).contains(&word.len())), "{words}");
        let call = text(call, seed);
        let answer = model::chat::Splitter::new("", true).answer(&call);
        let Ok([called]) = <[_; 1]>::try_from(answer.tool_calls) else { panic!("no call: {call}") };
        assert!(["look_up", "stop \"now\""].contains(&called.name.as_str()), "{call}");
        assert!(answer.content.is_empty(), "{call}");
    }
    let texts = ["<|im_end|>", "no (1+1)", "yes", "yes, but"];
    assert_eq!(chosen.iter().map(String::as_str).collect::<Vec<_>>(), texts);
}

#[test]
fn a_thought_is_free_and_the_form_begins_behind_it() {
    let checkpoint = demo();
    let id = |text: &str| checkpoint.tokenizer.encode(text).unwrap()[0];
    let form = Forms::new(&checkpoint).unwrap().compile(&Shape::Choice(vec!["yes".into()])).unwrap();
    let form = form.after_thought(false).unwrap();
    let mut matcher = form.matcher();
    let vocab = form.vocab_size();
    assert_eq!(allowed(&mask(&mut matcher, &form), vocab), [id("<think>")]);
    matcher.accept(&[id("<think>"), id("a")]);
    // All but the end tokens.
    let ends = &checkpoint.generation.eos_token_ids;
    let free = allowed(&mask(&mut matcher, &form), vocab);
    assert_eq!(free.len(), vocab - ends.len());
    assert!(ends.iter().all(|end| !free.contains(end)));
    assert_eq!(matcher.possible(&[id("b"), id("</think>"), id("c")]), 2);
    assert_eq!(matcher.possible(&[id("b"), ends[0]]), 1);
    matcher.accept(&[id("</think>")]);
    let behind = checkpoint.tokenizer.encode("\n\n").unwrap();
    assert_eq!(matcher.forced(9), behind);
    matcher.accept(&behind);
    let forced = matcher.forced(9);
    assert_eq!(checkpoint.tokenizer.decode(&forced), "yes");
    matcher.accept(&forced);
    assert!(allowed(&mask(&mut matcher, &form), vocab).iter().all(|token| ends.contains(token)));
    // Back into the thought, and out of it again.
    matcher.take_back(forced.len() + behind.len() + 1);
    assert_eq!(allowed(&mask(&mut matcher, &form), vocab).len(), free.len());
    matcher.accept(&[id("x"), id("</think>")]);
    assert_eq!(matcher.forced(9), behind);
}

/// An embedding may have more rows than the tokenizer has tokens, and drafts may be their ids.
#[test]
fn drafts_without_a_token_are_no_part_of_a_form() {
    let Checkpoint { tokenizer, generation, .. } = demo();
    let known = tokenizer.vocab_size();
    let forms = Forms::of(&tokenizer, known + 100, &generation.eos_token_ids).unwrap();
    let form = forms.compile(&Shape::Regex("[a-z]( [a-z])*".into())).unwrap();
    let tokens = tokenizer.encode("a b").unwrap();
    let mut matcher = form.matcher();
    for unknown in [known, known + 1, known + 99] {
        let drafts = [&tokens[..], &[unknown as u32], &tokens[1..]].concat();
        assert_eq!(matcher.possible(&drafts), tokens.len());
        assert_eq!(matcher.possible(&drafts[tokens.len()..]), 0);
    }
    matcher.accept(&tokens);
    let next = allowed(&mask(&mut matcher, &form), form.vocab_size());
    matcher.check().unwrap();
    assert!(next.contains(&tokens[1]) && next.iter().all(|&token| (token as usize) < known), "{next:?}");
}

/// A format and a pattern restrict texts, and nothing else.
#[test]
fn a_format_with_a_pattern_leaves_other_types_alone() {
    let checkpoint = demo();
    let forms = Forms::new(&checkpoint).unwrap();
    let nullable = json!({"type": ["string", "null"], "format": "date", "pattern": "^2"});
    let parts = json!({"anyOf": [{"type": "string"}, {"type": "null"}], "format": "date", "pattern": "^2"});
    let text = json!({"type": "string", "format": "date", "pattern": "^2"});
    for (schema, is_nullable) in [(nullable, true), (parts, true), (text, false)] {
        let form = forms.compile(&Shape::JsonSchema(schema.clone())).unwrap();
        for (text, is_possible) in [
            ("null", is_nullable),
            ("\"2024-02-29\"", true),
            ("\"2023-02-29\"", false),
            ("\"1996-02-29\"", false),
            ("7", false),
        ] {
            let tokens = checkpoint.tokenizer.encode(text).unwrap();
            assert_eq!(form.matcher().possible(&tokens) == tokens.len(), is_possible, "{text} as {schema}");
        }
    }
}

/// The engine has bounds as floats. Those that a float cannot hold are tightened.
#[test]
fn bounds_that_no_float_holds_are_not_overstepped() {
    let checkpoint = demo();
    let forms = Forms::new(&checkpoint).unwrap();
    let odd = (1i64 << 53) + 1;
    for (schema, texts) in [
        (json!({"type": "integer", "maximum": odd}), [(odd - 1, true), (odd + 1, false)]),
        (json!({"type": "integer", "minimum": -odd}), [(1 - odd, true), (-1 - odd, false)]),
        (json!({"type": "integer", "minimum": odd, "maximum": odd + 3}), [(odd + 1, true), (odd - 1, false)]),
        (json!({"type": "integer", "maximum": u64::MAX}), [(i64::MAX - 1023, true), (i64::MAX, false)]),
        (json!({"type": "integer", "minimum": i64::MIN}), [(-i64::MAX + 1023, true), (i64::MIN, false)]),
    ] {
        let form = forms.compile(&Shape::JsonSchema(schema.clone())).unwrap();
        for (number, is_possible) in texts {
            let tokens = checkpoint.tokenizer.encode(&number.to_string()).unwrap();
            assert_eq!(form.matcher().possible(&tokens) == tokens.len(), is_possible, "{number} as {schema}");
        }
    }
}

#[test]
fn what_cannot_be_followed_is_refused_by_its_name() {
    let forms = Forms::new(&demo()).unwrap();
    for (shape, part) in [
        (Shape::JsonSchema(json!({"type": "array", "uniqueItems": true})), "keyword `uniqueItems`"),
        (
            Shape::JsonSchema(json!({"properties": {"a": {"if": {}, "then": {}, "not": {}}}})),
            "keywords `if`, `not`, `then`",
        ),
        (Shape::JsonSchema(json!({"type": "string", "format": "colour"})), "`format` has the value colour"),
        (Shape::JsonSchema(json!({"type": "string", "minLength": 3, "maxLength": 2})), "minLength"),
        (Shape::JsonSchema(json!([1])), "a JSON Schema is an object"),
        (Shape::JsonSchema(json!({"$ref": "#/$defs/none"})), "#/$defs/none"),
        (Shape::JsonSchema(json!({"type": "strng"})), "strng"),
        (Shape::Regex("[a-".into()), "[a-"),
        (Shape::Choice(Vec::new()), "one text or more"),
        (Shape::JsonSchema(json!({"const": 9_007_199_254_740_993u64})), "the number 9007199254740993"),
        (Shape::JsonSchema(json!({"$ref": "#"})), "no text follows it"),
        (Shape::Regex("[a&&b]".into()), "no text follows it"),
        (Shape::Lark("root ::= \"a\"".into()), "Lark"),
        (Shape::Lark("  <root>::=\"a\"".into()), "Lark"),
        (Shape::Lark("start: a\na: a \"b\"\n".into()), "no text follows it"),
        (Shape::Lark("begin: \"a\"".into()), "start"),
    ] {
        let error = forms.compile(&shape).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{shape:?}: {error}");
    }
}

/// `start`, and behind it a chain of `count` rules or tokens whose names begin with `name`. `link` is the text of each,
/// in which `{}` is the name of the next.
fn chain(count: usize, name: &str, link: &str) -> Shape {
    let named = |i: usize| {
        let digits = i.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect::<String>();
        format!("{name}{}", if name == "R" { digits.to_uppercase() } else { digits })
    };
    let links = (0..count).map(|i| format!("{}: {}\n", named(i), link.replace("{}", &named(i + 1))));
    Shape::Lark(format!("start: {}\n{}{}: \"b\"\n", named(0), links.collect::<String>(), named(count)))
}

/// A schema whose definitions refer to each other in a row.
fn references(count: usize) -> serde_json::Value {
    let definition = |i: usize| (i.to_string(), json!({"$ref": format!("#/$defs/{}", i + 1)}));
    let last = (count.to_string(), json!({"type": "null"}));
    let definitions: serde_json::Map<_, _> = (0..count).map(definition).chain([last]).collect();
    json!({"$ref": "#/$defs/0", "$defs": definitions})
}

/// A rule with a condition within `count` others.
fn condition(count: usize) -> Shape {
    let (not, end) = ("not(".repeat(count), ")".repeat(count));
    Shape::Lark(format!("start: r::0\nr::_: \"a\" %if {not}eq(_, 0){end}\n  | \"b\" r::incr(_)\n"))
}

/// The engine recurses. What is deep has the stack for that, and what is too deep is refused. Masks are computed, and
/// matchers dropped, by threads with less stack than any of ours.
#[test]
fn a_form_overflows_no_stack() {
    let checkpoint = demo();
    let forms = Forms::new(&checkpoint).unwrap();
    let tool = |parameters| Shape::Call(vec![Tool { name: "f".into(), parameters }]);
    let tokens = |count| chain(count, "R", "/[ac]/ (\"b\" | \"c\" {})");
    let all_but = |shape| match shape {
        Shape::Lark(grammar) => Shape::Lark(grammar.replacen("start: ", "start: S\nS: /(?s:.)*/ & ~", 1)),
        other => other,
    };
    for (shape, refused) in [
        (chain(10_000, "r", "\"a\" {}"), None),
        (chain(1_700, "r", &format!("{}{{}}{}", "(".repeat(27), ")".repeat(27))), None),
        (chain(50_000, "r", "\"a\" {}"), Some("the grammar has 50002 rules and brackets, and the most is 50000")),
        (chain(40_000, "r", "(({}))"), Some("rules and brackets")),
        (condition(998), None),
        (condition(10_000), Some("a line of the grammar has 10001 brackets in its conditions (`%if`)")),
        (Shape::JsonSchema(references(40_000)), None),
        (Shape::JsonSchema(references(60_000)), Some("the schema has 60003 objects and arrays, and the most is 50000")),
        (tool(references(40_000)), None),
        (tool(references(60_000)), Some("rules and brackets")),
        (tokens(990), None),
        (tokens(1_100), Some("its tokens are nested 1100 deep, and the most is 1000")),
        (all_but(tokens(990)), None),
    ] {
        let form = match (forms.compile(&shape), refused) {
            (Ok(form), None) => form,
            (Err(error), Some(part)) if error.to_string().contains(part) => continue,
            (found, _) => panic!("{found:?}, not {refused:?}"),
        };
        let tokens = checkpoint.tokenizer.encode("acacac").unwrap();
        let follow = move || {
            let mut matcher = form.matcher();
            for token in tokens {
                mask(&mut matcher, &form);
                matcher.forced(4);
                matcher.accept(&[token]);
            }
        };
        std::thread::Builder::new().stack_size(1 << 20).spawn(follow).unwrap().join().unwrap();
    }
}

#[test]
fn no_ordinary_token_is_nested_deeply() {
    let forms = Forms::new(&demo()).unwrap();
    let words: Vec<String> = (0..20_000).map(|i| format!("word {} of many", i * 7919)).collect();
    let long = Shape::Choice(vec!["a long text. ".repeat(5_000), "another".into()]);
    let list = Shape::Regex(format!("({})", ["[a-z]+", "[0-9]{1,3}", "(yes|no)"].repeat(500).join(", ")));
    for shape in [Shape::Choice(words), long, list] {
        forms.compile(&shape).unwrap();
    }
}

#[test]
fn a_choice_among_allowed_tokens_is_one_of_them() {
    let logits: Vec<f32> = (0..100).map(|i| (i % 7) as f32).collect();
    let mut mask = vec![0; mask_words(100)];
    for token in [3, 40, 64] {
        mask[token / 32] |= 1 << (token % 32);
    }
    let greedy = model::Sampling::default();
    assert_eq!(greedy.sample_allowed(&logits, Some(&mask), &[], &[]), 40);
    let hot = model::Sampling { temperature: 1.5, top_k: 50, top_p: 0.99, ..greedy };
    let mut seen = [0; 100];
    for seed in 0..300 {
        seen[model::Sampling { seed, ..hot }.sample_allowed(&logits, Some(&mask), &[], &[]) as usize] += 1;
    }
    assert_eq!(seen.iter().sum::<i32>(), seen[3] + seen[40] + seen[64]);
    assert!(seen[3] > 30 && seen[40] > seen[3]);
    assert_eq!(hot.sample_allowed(&logits, None, &[1], &[]), hot.sample(&logits, &[1], &[]));
}
