//! What a JSON Schema needs before the engine gets it, so that answers follow its every word. The engine is laxer than
//! the standards of some formats: it takes 29 February in every year, a 60th second in every minute, and names that are
//! too long for the domain name system. It rounds whole numbers to 64-bit floats. And it refuses some keywords even
//! where they ask for nothing.

use std::cmp::Ordering;

use serde_json::{Map, Number, Value, json};

/// Keywords whose value is a schema.
const ONE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
/// Keywords whose value maps names to schemas.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Keywords whose value is a list of schemas.
const MANY: [&str; 5] = ["anyOf", "oneOf", "allOf", "prefixItems", "items"];

/// The greatest number that the engine keeps exactly: the greatest 64-bit float below 2^63. The least is its negative.
const GREATEST: f64 = 9_223_372_036_854_774_784.0;

/// Makes the schema, and the schemas in it, ready for the engine: adds what each `format` demands beyond what the
/// engine checks, moves bounds that a float cannot hold inwards to the next one that it can, and removes keywords that
/// ask for nothing.
///
/// # Errors
/// A sentence, if the schema has a number that the engine would change.
pub fn prepare(schema: &mut Value) -> Result<(), String> {
    let mut places = Vec::new();
    note_places(schema, &mut places);
    part(schema)?;
    places.iter().try_for_each(|place| schema.pointer_mut(place).map_or(Ok(()), part))
}

/// Notes the places in a document that a `$ref` in `value` names. They may be anywhere in it.
fn note_places(value: &Value, places: &mut Vec<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| note_places(value, places)),
        Value::Object(fields) => {
            let place = fields.get("$ref").and_then(Value::as_str).and_then(|text| text.strip_prefix('#'));
            places.extend(place.filter(|place| place.starts_with('/')).map(str::to_owned));
            fields.values().for_each(|value| note_places(value, places));
        }
        _ => {}
    }
}

/// Makes a schema ready, and those under its keywords. Doing so twice changes nothing more.
fn part(schema: &mut Value) -> Result<(), String> {
    let Value::Object(fields) = schema else { return Ok(()) };
    remove_idle(fields);
    for (name, value) in fields.iter_mut() {
        match (name.as_str(), &mut *value) {
            (name, Value::Object(inner)) if NAMED.contains(&name) => inner.values_mut().try_for_each(part)?,
            (name, Value::Object(_)) if ONE.contains(&name) => part(value)?,
            (name, Value::Array(inner)) if MANY.contains(&name) => inner.iter_mut().try_for_each(part)?,
            ("const" | "enum", value) => only_exact_numbers(value)?,
            ("maximum" | "exclusiveMaximum", Value::Number(bound)) => *bound = at_most(bound)?,
            ("minimum" | "exclusiveMinimum", Value::Number(bound)) => *bound = at_least(bound)?,
            _ => {}
        }
    }
    hold_to_standard(fields);
    Ok(())
}

/// Removes keywords that say nothing by themselves, or with the value that they have.
fn remove_idle(fields: &mut Map<String, Value>) {
    let has = |name| fields.contains_key(name);
    let (condition, contains, branches) = (has("if"), has("contains"), has("then") || has("else"));
    fields.retain(|name, value| match name.as_str() {
        "uniqueItems" => *value != json!(false),
        "unevaluatedItems" | "unevaluatedProperties" | "propertyNames" => *value != json!(true),
        "if" => branches,
        "then" | "else" => condition,
        "minContains" | "maxContains" => contains,
        "dependentRequired" | "dependentSchemas" | "dependencies" => *value != json!({}),
        _ => true,
    });
}

/// A number as a float, and whether that lies above or below the number. `None` if no float is near.
fn rounded(number: &Number) -> Option<(f64, Ordering)> {
    let float = number.as_f64()?;
    let whole = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
    Some((float, whole.map_or(Ordering::Equal, |whole| (float as i128).cmp(&whole))))
}

/// Whether the engine keeps a number as it is.
fn is_exact(number: &Number) -> bool {
    rounded(number).is_some_and(|(float, error)| error.is_eq() && float.abs() <= GREATEST)
}

/// Refuses a value with a number that the engine would change.
fn only_exact_numbers(value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number) if !is_exact(number) => Err(not_exact(number)),
        Value::Array(values) => values.iter().try_for_each(only_exact_numbers),
        Value::Object(fields) => fields.values().try_for_each(only_exact_numbers),
        _ => Ok(()),
    }
}

fn not_exact(number: &Number) -> String {
    format!("the schema has the number {number}, which a 64-bit float below 2^63 cannot hold; make it a text")
}

/// The greatest number that the engine keeps and that is not above an upper bound.
fn at_most(bound: &Number) -> Result<Number, String> {
    match rounded(bound) {
        Some(_) if is_exact(bound) => Ok(bound.clone()),
        Some((float, error)) if float >= -GREATEST => {
            Ok(whole(if error.is_gt() { float.next_down() } else { float }.min(GREATEST)))
        }
        _ => Err(not_exact(bound)),
    }
}

/// The least number that the engine keeps and that is not below a lower bound.
fn at_least(bound: &Number) -> Result<Number, String> {
    match rounded(bound) {
        Some(_) if is_exact(bound) => Ok(bound.clone()),
        Some((float, error)) if float <= GREATEST => {
            Ok(whole(if error.is_lt() { float.next_up() } else { float }.max(-GREATEST)))
        }
        _ => Err(not_exact(bound)),
    }
}

/// A float without a fraction, not beyond [`GREATEST`], as JSON's whole number.
fn whole(float: f64) -> Number {
    (float as i64).into()
}

/// Adds what a `format` demands beyond what the engine checks.
fn hold_to_standard(fields: &mut Map<String, Value>) {
    let Some(pattern) = fields.get("format").and_then(Value::as_str).and_then(pattern).map(Value::from) else { return };
    // With no type, since a pattern says nothing of a value that is no text.
    let more = json!({ "pattern": pattern });
    match fields.get("pattern") {
        None => drop(fields.insert("pattern".into(), pattern)),
        Some(own) if *own == pattern => {}
        Some(_) => match fields.entry("allOf").or_insert_with(|| json!([])) {
            Value::Array(all) if !all.contains(&more) => all.push(more),
            _ => {}
        },
    }
}

/// The pattern that a text of `format` must match beyond what the engine checks, if there is one.
fn pattern(format: &str) -> Option<String> {
    const LEAP_YEAR: &str = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)";
    let date = || {
        let other = "[0-9]{4}-(0[13-9]|1[0-2])-[0-9]{2}|[0-9]{4}-02-([01][0-9]|2[0-8])";
        format!("({other}|{LEAP_YEAR}-02-29)")
    };
    let time = "[0-9]{2}:[0-9]{2}:[0-5]";
    Some(match format {
        "date" => format!("^{}$", date()),
        "time" => format!("^{time}"),
        "date-time" => format!("^{}[tT]{time}", date()),
        "email" => "^[^@]{1,64}@([^.]{1,40}\\.){0,3}[^.]{1,40}$".into(),
        "hostname" => "^.{1,253}$".into(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::prepare;

    fn prepared(mut schema: Value) -> Value {
        prepare(&mut schema).unwrap();
        schema
    }

    #[test]
    fn only_schemas_are_changed() {
        let held = |format: &str| prepared(json!({"format": format}));
        let (date, time) = (held("date"), held("time"));
        assert!(date["pattern"].is_string() && time["pattern"].is_string() && held("uuid").get("pattern").is_none());
        let schema = prepared(json!({
            "properties": {"format": {"format": "date"}, "const": {"const": {"format": "date"}}},
            "items": [{"format": "time"}, true],
            "anyOf": [{"additionalProperties": {"format": "time", "pattern": "^1"}}],
            "default": {"format": "date"},
        }));
        assert_eq!(
            schema,
            json!({
                "properties": {"format": date, "const": {"const": {"format": "date"}}},
                "items": [time, true],
                "anyOf": [{"additionalProperties": {"format": "time", "pattern": "^1",
                    "allOf": [{"pattern": time["pattern"]}]}}],
                "default": {"format": "date"},
            })
        );
    }

    #[test]
    fn schemas_that_only_a_reference_names_are_prepared() {
        let schema = json!({
            "anyOf": [{"$ref": "#/components/schemas/D"}, {"$ref": "#/$defs/a~1b"}, {"$ref": "#"}, {"$ref": "#/none"}],
            "components": {"schemas": {"D": {"format": "date", "uniqueItems": false, "pattern": "^2"}}},
            "$defs": {"a/b": {"format": "date", "pattern": "^2"}},
        });
        let ready = prepared(schema);
        assert_eq!(ready["components"]["schemas"]["D"], ready["$defs"]["a/b"]);
        assert_eq!(ready["$defs"]["a/b"]["allOf"].as_array().map(Vec::len), Some(1));
    }

    #[test]
    fn keywords_that_ask_for_nothing_are_removed() {
        let idle =
            json!({"type": "array", "uniqueItems": false, "then": {}, "maxContains": 2, "dependentRequired": {}});
        assert_eq!(prepared(json!({"items": idle})), json!({"items": {"type": "array"}}));
        for asks in [
            json!({"uniqueItems": true}),
            json!({"if": {"minimum": 2}, "then": {"maximum": 1}}),
            json!({"contains": {}, "minContains": 2}),
            json!({"properties": {"then": {"type": "null"}}}),
        ] {
            assert_eq!(prepared(asks.clone()), asks);
        }
    }

    #[test]
    fn bounds_move_inwards_and_other_numbers_are_kept_or_refused() {
        let (odd, greatest) = ((1i64 << 53) + 1, super::GREATEST as i64);
        let at = |keyword: &str, bound: Value| prepared(json!({ keyword: bound }))[keyword].clone();
        assert_eq!(at("maximum", json!(odd)), json!(odd - 1));
        assert_eq!(at("minimum", json!(odd)), json!(odd + 1));
        assert_eq!(at("exclusiveMaximum", json!(-odd)), json!(-odd - 1));
        for far in [json!(i64::MAX), json!(u64::MAX), json!(1e300)] {
            assert_eq!(at("maximum", far), json!(greatest));
        }
        for far in [json!(i64::MIN), json!(-1e300)] {
            assert_eq!(at("minimum", far), json!(-greatest));
        }
        for kept in [json!(1_000_000_000_000_000_000u64), json!(-0.5), json!(odd - 1)] {
            assert_eq!(at("maximum", kept.clone()), kept);
            assert_eq!(at("const", kept.clone()), kept);
        }
        for schema in [
            json!({"enum": [1, {"x": [odd]}]}),
            json!({"properties": {"a": {"const": odd}}}),
            json!({"const": 1e20}),
            json!({"minimum": 1e19}),
        ] {
            let said = prepare(&mut schema.clone()).unwrap_err();
            assert!(said.starts_with("the schema has the number "), "{schema}: {said}");
        }
    }
}
