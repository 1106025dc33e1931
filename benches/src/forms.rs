//! Forms to measure and test with: schemas of every kind in use, of any size, and a vocabulary of any size.

use std::collections::HashSet;
use std::path::Path;

use model::{Checkpoint, Config, Tokenizer};
use serde_json::{Map, Value, json};

/// A text of bounded length, so that no answer goes on for ever.
fn text(most: usize) -> Value {
    json!({"type": "string", "maxLength": most})
}

/// An object with these properties, all of them required and no others allowed.
fn object(properties: &[(&str, Value)]) -> Value {
    let required: Vec<&str> = properties.iter().map(|(name, _)| *name).collect();
    let properties: Map<String, Value> =
        properties.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// A schema of `count` fields of the usual types.
pub fn fields(count: usize) -> Value {
    let kinds = |i: usize| match i % 5 {
        0 => text(12),
        1 => json!({"type": "integer", "minimum": 0, "maximum": 99_999}),
        2 => json!({"type": "boolean"}),
        3 => json!({"enum": ["small", "medium", "large", "other"]}),
        _ => json!({"type": ["number", "null"], "minimum": -10, "maximum": 10}),
    };
    let names: Vec<String> = (0..count).map(|i| format!("field_number_{i}")).collect();
    let properties: Vec<(&str, Value)> = names.iter().zip(0..).map(|(name, i)| (name.as_str(), kinds(i))).collect();
    object(&properties)
}

/// Fifty schemas, five of each kind: nesting, arrays with bounds, enumerations, `anyOf`, patterns, formats, `$ref`,
/// numbers with limits, and what else JSON Schema has.
pub fn schemas() -> Vec<Value> {
    (0..5).flat_map(kinds).collect()
}

fn kinds(n: usize) -> [Value; 10] {
    let point =
        object(&[("x", json!({"type": "integer", "minimum": -9, "maximum": 9})), ("y", json!({"type": "null"}))]);
    let nested = (0..=n).fold(object(&[("leaf", text(8))]), |inner, depth| {
        object(&[("depth", json!({"const": depth})), ("inner", inner)])
    });
    let array = json!({"type": "array", "items": text(5 + n), "minItems": n, "maxItems": n + 3});
    let letters: Vec<String> = (0..n + 2).map(|i| format!("value {}", char::from(b'a' + i as u8))).collect();
    let any_of =
        json!({"anyOf": [{"type": "null"}, point, {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}]});
    let patterns =
        ["^[A-Z]{2}-[0-9]{4}$", "^(ab|cd)+x?$", "^[^\"\\\\]{3,9}$", "^\\d{3}(-\\d{2}){1,3}$", "^#[0-9a-f]{6}$"];
    let formats = ["date-time", "uuid", "ipv4", "email", "date"];
    let tree = json!({
        "$defs": {"node": object(&[
            ("name", text(6)),
            ("next", json!({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})),
            ("at", json!({"$ref": "#/$defs/point"})),
        ]), "point": point},
        "$ref": "#/$defs/node",
    });
    let limits = object(&[
        ("whole", json!({"type": "integer", "minimum": -(10_i64.pow(n as u32)), "exclusiveMaximum": 37 + n})),
        ("part", json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1.5 + n as f64})),
        ("step", json!({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 10_000})),
    ]);
    let mut optional = json!({
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9999}, "note": text(10), "tags": array},
        "required": ["id"],
        "additionalProperties": false,
    });
    if n % 2 == 1 {
        optional["patternProperties"] = json!({"^[a-z]{1,4}$": {"type": "integer", "minimum": 0, "maximum": 9}});
    }
    let tuple = json!({
        "type": "array",
        "prefixItems": [{"type": "boolean"}, text(4), {"type": "integer", "minimum": 0, "maximum": n}],
        "items": false,
        "minItems": 3,
    });
    [
        nested,
        object(&[("list", array), ("count", json!({"type": "integer", "minimum": 0, "maximum": 255}))]),
        object(&[("kind", json!({"enum": letters})), ("of", json!({"enum": [1, 2.5, null, true, "x"]}))]),
        object(&[("first", any_of.clone()), ("second", any_of)]),
        object(&[("code", json!({"type": "string", "pattern": patterns[n]}))]),
        object(&[("flag", json!({"type": "string", "format": formats[n]})), ("ok", json!({"type": "boolean"}))]),
        tree,
        limits,
        optional,
        object(&[("tuple", tuple), ("either", json!({"type": ["string", "boolean"], "minLength": 1, "maxLength": 7}))]),
    ]
}

/// The demo model's checkpoint, given another shape and a vocabulary to match, for uses that need no weights.
///
/// # Errors
/// If the vocabulary is smaller than the demo's.
pub fn checkpoint(config: &Config) -> Result<Checkpoint, Box<dyn std::error::Error>> {
    let mut demo = crate::demo();
    if config.vocab_size < demo.config.vocab_size {
        return Err(format!("a vocabulary of {} tokens is less than the demo's", config.vocab_size).into());
    }
    demo.tokenizer = tokenizer(&demo, config.vocab_size)?;
    demo.config = config.clone();
    Ok(demo)
}

/// The demo's tokenizer, to which pairs of its tokens are added as tokens until there are `vocab_size`. They are as
/// long as those of a large vocabulary, and as much alike.
fn tokenizer(demo: &Checkpoint, vocab_size: usize) -> Result<Tokenizer, Box<dyn std::error::Error>> {
    let path = crate::repository().join("model/demo/tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    let vocab = file["model"]["vocab"].as_object().ok_or("the demo's tokenizer has no vocabulary")?.clone();
    let tokens: Vec<&String> = vocab.keys().collect();
    let mut taken: HashSet<String> = vocab.keys().cloned().collect();
    let (mut more, mut merges) = (vocab.clone(), file["model"]["merges"].as_array().cloned().unwrap_or_default());
    let mut next = demo.config.vocab_size;
    let mut draw = 0;
    while next < vocab_size {
        let [a, b] = [0, 1].map(|i| tokens[(gpu_kernels::sample::random(9, draw + i) % tokens.len() as u64) as usize]);
        draw += 2;
        let pair = format!("{a}{b}");
        if taken.insert(pair.clone()) {
            more.insert(pair, next.into());
            merges.push(json!([a, b]));
            next += 1;
        }
    }
    file["model"]["vocab"] = more.into();
    file["model"]["merges"] = merges.into();
    Ok(Tokenizer::parse(&serde_json::to_vec(&file)?, Path::new("tokenizer.json"))?)
}
