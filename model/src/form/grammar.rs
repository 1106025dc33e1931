//! What a user asks for, and its translation to a grammar of the engine.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use super::{CALL, bounds, schema};

/// What an answer has to look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Shape {
    /// Any JSON object.
    JsonObject,
    /// JSON that follows a JSON Schema, on one line with `", "` and `": "`, as models write it; properties come in the
    /// schema's order.
    JsonSchema(Value),
    /// A text that a regular expression of the crate `regex` matches from its beginning to its end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of a grammar in Lark's notation, whose first rule is `start`.
    Lark(String),
    /// A call of one of these tools, as Qwen3 writes it.
    Call(Vec<Tool>),
}

/// A tool that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON Schema of its arguments.
    pub parameters: Value,
}

impl Shape {
    /// A text that differs between shapes.
    pub(super) fn key(&self) -> String {
        match self {
            Self::JsonObject => "object".into(),
            Self::JsonSchema(schema) => format!("schema {schema}"),
            Self::Regex(regex) => format!("regex {regex}"),
            Self::Choice(texts) => format!("choice {}", json!(texts)),
            Self::Lark(grammar) => format!("lark {grammar}"),
            Self::Call(tools) => {
                let tools: Vec<Value> = tools.iter().map(|tool| json!([tool.name, tool.parameters])).collect();
                format!("call {}", json!(tools))
            }
        }
    }

    /// The shape as a grammar of the engine. If that plainly cannot be, or is too large, the reason.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar, String> {
        Ok(match self {
            Self::JsonObject => TopLevelGrammar::from_json_schema(on_one_line(&json!({"type": "object"}))?),
            Self::JsonSchema(schema) => {
                bounds::schema(schema)?;
                TopLevelGrammar::from_json_schema(on_one_line(schema)?)
            }
            Self::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Self::Choice(texts) => {
                if texts.is_empty() || texts.iter().any(String::is_empty) {
                    return Err("a choice needs one text or more, none of them empty".into());
                }
                let texts: Vec<String> = texts.iter().map(|text| escaped(text)).collect();
                TopLevelGrammar::from_regex(&texts.join("|"))
            }
            Self::Lark(grammar) => {
                if grammar.lines().any(is_bnf) {
                    return Err("a grammar is written in Lark's notation, with `start: …`, not with `::=`".into());
                }
                bounds::lark(grammar)?;
                TopLevelGrammar::from_lark(grammar.clone())
            }
            Self::Call(tools) => {
                let grammar = calls(tools)?;
                bounds::lark(&grammar)?;
                TopLevelGrammar::from_lark(grammar)
            }
        })
    }
}

/// A schema, ready for the engine, that also says which blanks its text has. A schema may choose other blanks itself:
/// `x-guidance` is a keyword of llguidance.
fn on_one_line(given: &Value) -> Result<Value, String> {
    let mut fields = match given {
        Value::Object(schema) => schema.clone(),
        // `true` allows anything, which an empty object says too. `false` allows nothing, so there would be no answer.
        Value::Bool(true) => serde_json::Map::new(),
        _ => return Err("a JSON Schema is an object".into()),
    };
    fields
        .entry("x-guidance")
        .or_insert_with(|| json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}));
    let mut ready = Value::from(fields);
    schema::prepare(&mut ready)?;
    Ok(ready)
}

/// Whether a line begins a rule as BNF does, `name ::= …`.
fn is_bnf(line: &str) -> bool {
    let name = |c: char| c.is_alphanumeric() || "_-<>".contains(c);
    let behind = line.trim_start().trim_start_matches(name);
    behind.len() < line.trim_start().len() && behind.trim_start().starts_with("::=")
}

/// A regular expression that matches only this text.
fn escaped(text: &str) -> String {
    let mut regex = String::new();
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(c) {
            regex.push('\\');
        }
        regex.push(c);
    }
    regex
}

/// A grammar of calls between their tags. Each tool's schema is a grammar of its own, so that its `$ref`s keep their
/// meaning.
fn calls(tools: &[Tool]) -> Result<String, String> {
    let text = |text: &str| Value::from(text).to_string();
    let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
    let mut grammar = format!("start: {} ({}) {}\n", text(CALL[0]), names.join(" | "), text(CALL[1]));
    for (i, Tool { name, parameters }) in tools.iter().enumerate() {
        let begin = format!("{{\"name\": {}, \"arguments\": ", Value::from(name.as_str()));
        grammar += &format!("call_{i}: {} arguments_{i} \"}}\"\n", text(&begin));
        grammar += &format!("arguments_{i}: %json {}\n", on_one_line(parameters)?);
    }
    Ok(grammar)
}
