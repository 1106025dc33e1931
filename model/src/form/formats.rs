//! Formats of strings for which the engine is laxer than their standards: it takes 29 February in every year, a 60th
//! second in every minute, and names that are too long for the domain name system.

use serde_json::{Value, json};

/// Keywords whose value is a schema.
const ONE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
/// Keywords whose value maps names to schemas.
const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
/// Keywords whose value is a list of schemas.
const MANY: [&str; 5] = ["anyOf", "oneOf", "allOf", "prefixItems", "items"];

/// Adds to a schema, and to the schemas in it, what each `format` demands beyond what the engine checks.
pub fn hold_to_standards(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    for (name, value) in fields.iter_mut() {
        match value {
            Value::Object(inner) if NAMED.contains(&name.as_str()) => inner.values_mut().for_each(hold_to_standards),
            Value::Object(_) if ONE.contains(&name.as_str()) => hold_to_standards(value),
            Value::Array(inner) if MANY.contains(&name.as_str()) => inner.iter_mut().for_each(hold_to_standards),
            _ => {}
        }
    }
    let Some(pattern) = fields.get("format").and_then(Value::as_str).and_then(pattern) else { return };
    if !fields.contains_key("pattern") {
        fields.insert("pattern".into(), pattern.into());
    } else if let Value::Array(all) = fields.entry("allOf").or_insert_with(|| json!([])) {
        // With no type, since a pattern says nothing of a value that is no text.
        all.push(json!({"pattern": pattern}));
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
    use serde_json::json;

    use super::hold_to_standards;

    #[test]
    fn only_schemas_are_changed() {
        let held = |format: &str| {
            let mut schema = json!({"format": format});
            hold_to_standards(&mut schema);
            schema
        };
        let (date, time) = (held("date"), held("time"));
        assert!(date["pattern"].is_string() && time["pattern"].is_string() && held("uuid").get("pattern").is_none());
        let mut schema = json!({
            "properties": {"format": {"format": "date"}, "const": {"const": {"format": "date"}}},
            "items": [{"format": "time"}, true],
            "anyOf": [{"additionalProperties": {"format": "time", "pattern": "^1"}}],
            "default": {"format": "date"},
        });
        hold_to_standards(&mut schema);
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
}
