//! What a request says about the form of its answer, in OpenAI's fields and in vLLM's.

use model::Shape;
use serde_json::{Map, Value};

use super::request::{Refusal, quoted};
use crate::json::{self, Wrong};

/// Fields that each ask for a form.
const GUIDED: [&str; 4] = ["guided_json", "guided_regex", "guided_choice", "guided_grammar"];
/// Fields of `structured_outputs` that change nothing here, each with the only value that is accepted; `None` accepts
/// both.
const IDLE: [(&str, Option<bool>); 3] =
    [("disable_any_whitespace", None), ("disable_fallback", None), ("disable_additional_properties", Some(false))];

/// The shape that a request's fields ask for, with the name of the field. `get` returns a field if it is there and not
/// null.
///
/// # Errors
/// If more than one form is asked for, or a field does not describe a form.
pub fn shape<'v>(get: impl Fn(&str) -> Option<&'v Value>) -> Result<Option<(&'static str, Shape)>, Refusal> {
    let mut found: Vec<(&'static str, Shape)> = Vec::new();
    if let Some(format) = get("response_format") {
        found.extend(response_format(format)?.map(|shape| ("response_format", shape)));
    }
    // An empty object names no form. Elsewhere something empty can be one: any JSON follows the schema `{}`.
    let names_some = |outputs: &&Value| outputs.as_object().is_none_or(|fields| !fields.is_empty());
    if let Some(outputs) = get("structured_outputs").filter(names_some) {
        found.push(("structured_outputs", structured_outputs(outputs)?));
    }
    for name in GUIDED {
        if let Some(value) = get(name) {
            let kind = name.trim_start_matches("guided_");
            found.push((name, of_kind(kind, value, name)?));
        }
    }
    if let [(one, _), (other, _), ..] = found.as_slice() {
        return Err(Refusal::invalid(format!("`{one}` and `{other}` both say the form of the answer; give one")));
    }
    Ok(found.pop())
}

fn response_format(format: &Value) -> Result<Option<Shape>, Refusal> {
    let fields = object(format, "response_format")?;
    match fields.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Shape::JsonObject)),
        Some("json_schema") => {
            let schema = object(fields.get("json_schema").unwrap_or(&Value::Null), "json_schema")?;
            let known = |name: &str| ["name", "description", "schema", "strict"].contains(&name);
            if let Some(name) = schema.keys().find(|name| !known(name)) {
                let name = quoted(&Value::from(name.as_str()));
                return Err(Refusal::unsupported(format!("{name} in `json_schema` is no known field; leave it out")));
            }
            let strict = schema.get("strict").filter(|strict| !strict.is_boolean() && !strict.is_null());
            if let Some(strict) = strict {
                let strict = quoted(strict);
                return Err(Refusal::invalid(format!("`strict` must be true or false, and is {strict}")));
            }
            let wrong = || Refusal::invalid("`json_schema` must have a `schema`");
            // The schema is followed strictly even if `strict` is not set.
            Ok(Some(Shape::JsonSchema(schema.get("schema").ok_or_else(wrong)?.clone())))
        }
        _ => {
            let kind = quoted(fields.get("type").unwrap_or(&Value::Null));
            Err(Refusal::unsupported(format!(
                "`response_format` must have the `type` \"text\", \"json_object\" or \"json_schema\", and has {kind}"
            )))
        }
    }
}

fn structured_outputs(outputs: &Value) -> Result<Shape, Refusal> {
    const KINDS: [&str; 5] = ["json", "regex", "choice", "grammar", "json_object"];
    let fields = object(outputs, "structured_outputs")?;
    let mut found = None;
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        let idle = IDLE.iter().find(|(idle, _)| idle == name);
        match idle {
            Some((_, None)) if value.is_boolean() => continue,
            Some((_, Some(only))) if value.as_bool() == Some(*only) => continue,
            _ => {}
        }
        let shown = quoted(&Value::from(name.as_str()));
        if !KINDS.contains(&name.as_str()) {
            let message = format!("{shown} in `structured_outputs` is not supported; leave it out");
            return Err(Refusal::unsupported(message));
        }
        if name == "json_object" && value == false {
            continue;
        }
        if found.is_some() {
            return Err(Refusal::invalid("`structured_outputs` must say one form; give a request for each"));
        }
        found = Some(of_kind(name, value, name)?);
    }
    found.ok_or_else(|| {
        Refusal::invalid("`structured_outputs` must have `json`, `regex`, `choice`, `grammar` or `json_object`")
    })
}

/// The shape of a form of this `kind`. `field` is the name of the field that holds `value`, for messages.
fn of_kind(kind: &str, value: &Value, field: &str) -> Result<Shape, Refusal> {
    let wrong = |what: &str| Refusal::invalid(format!("`{field}` must be {what}, and is {}", quoted(value)));
    let text = || value.as_str().map(str::to_owned).ok_or_else(|| wrong("a text"));
    match kind {
        "json" => match value {
            Value::String(text) => match json::parse(text) {
                Ok(schema) => Ok(Shape::JsonSchema(schema)),
                Err(Wrong::Twice(name)) => {
                    let name = quoted(&Value::from(name));
                    Err(Refusal::invalid(format!("`{field}` is a text of JSON in which {name} is there twice")))
                }
                Err(Wrong::Syntax(what)) => {
                    Err(Refusal::invalid(format!("`{field}` is a text that is no JSON: {what}")))
                }
            },
            Value::Object(_) => Ok(Shape::JsonSchema(value.clone())),
            _ => Err(wrong("a JSON Schema")),
        },
        "regex" => Ok(Shape::Regex(text()?)),
        "grammar" => Ok(Shape::Lark(text()?)),
        "choice" => {
            let texts = value.as_array().ok_or_else(|| wrong("an array of texts"))?;
            let texts: Option<Vec<String>> = texts.iter().map(|text| text.as_str().map(str::to_owned)).collect();
            texts.map(Shape::Choice).ok_or_else(|| wrong("an array of texts"))
        }
        _ => match value {
            Value::Bool(true) => Ok(Shape::JsonObject),
            _ => Err(wrong("true or false")),
        },
    }
}

fn object<'v>(value: &'v Value, name: &str) -> Result<&'v Map<String, Value>, Refusal> {
    value.as_object().ok_or_else(|| Refusal::invalid(format!("`{name}` must be an object, and is {}", quoted(value))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(body: &Value) -> Result<Option<Shape>, String> {
        let shape = shape(|name| body.get(name).filter(|value| !value.is_null()));
        shape.map(|found| found.map(|(_, shape)| shape)).map_err(|refusal| refusal.message)
    }

    #[test]
    fn forms_are_taken_as_openai_s_and_vllm_s_clients_send_them() {
        let schema = json!({"type": "object"});
        let of_schema = Some(Shape::JsonSchema(schema.clone()));
        let strict = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
        for (body, expected) in [
            (json!({}), None),
            (json!({"response_format": {"type": "text"}, "guided_json": null, "structured_outputs": {}}), None),
            (json!({"response_format": {"type": "json_object"}}), Some(Shape::JsonObject)),
            (json!({"response_format": strict}), of_schema.clone()),
            (json!({"guided_json": schema}), of_schema.clone()),
            (json!({"guided_json": {}}), Some(Shape::JsonSchema(json!({})))),
            (json!({"guided_regex": ""}), Some(Shape::Regex(String::new()))),
            // What has no text is refused when it is compiled.
            (json!({"guided_choice": []}), Some(Shape::Choice(Vec::new()))),
            (json!({"guided_grammar": ""}), Some(Shape::Lark(String::new()))),
            (json!({"guided_json": schema.to_string()}), of_schema.clone()),
            (json!({"structured_outputs": {"json": schema, "disable_any_whitespace": true}}), of_schema),
            (json!({"structured_outputs": {"json_object": true, "regex": null}}), Some(Shape::JsonObject)),
            (json!({"guided_regex": "a+"}), Some(Shape::Regex("a+".into()))),
            (json!({"guided_choice": ["a", "b"]}), Some(Shape::Choice(vec!["a".into(), "b".into()]))),
            (json!({"structured_outputs": {"grammar": "start: \"a\""}}), Some(Shape::Lark("start: \"a\"".into()))),
        ] {
            assert_eq!(of(&body), Ok(expected), "{body}");
        }
    }

    #[test]
    fn what_is_no_form_is_refused() {
        for (body, part) in [
            (json!({"response_format": "json"}), "`response_format` must be an object"),
            (json!({"response_format": {"type": "structural_tag"}}), "has \"structural_tag\""),
            (json!({"response_format": {}}), "\"json_schema\", and has null"),
            (json!({"structured_outputs": []}), "`structured_outputs` must be an object"),
            (json!({"guided_json": ""}), "`guided_json` is a text that is no JSON"),
            (json!({"guided_json": {}, "guided_regex": "a"}), "`guided_json` and `guided_regex` both"),
            (json!({"response_format": {"type": "json_schema"}}), "`json_schema` must be an object"),
            (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}), "must have a `schema`"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}),
                "`strict` must be true or false",
            ),
            (json!({"guided_json": "{"}), "`guided_json` is a text that is no JSON: it ends too soon"),
            (
                json!({"guided_json": "{\"a\": 1, \"a\": 2}"}),
                "`guided_json` is a text of JSON in which \"a\" is there twice",
            ),
            (json!({"guided_choice": "a"}), "`guided_choice` must be an array of texts"),
            (json!({"guided_regex": 1}), "`guided_regex` must be a text"),
            (json!({"guided_regex": "a", "guided_choice": ["a"]}), "`guided_regex` and `guided_choice` both"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "must say one form"),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "\"structural_tag\" in `structured_outputs`"),
            (json!({"structured_outputs": {"disable_any_whitespace": true}}), "must have `json`"),
        ] {
            let refusal = of(&body).unwrap_err();
            assert!(refusal.contains(part), "{body}: {refusal}");
        }
    }
}
