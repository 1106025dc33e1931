//! JSON that a user writes: requests and schemas. No field may be there twice: of two, some readers take the first and
//! some the last.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// What is wrong with a text that should be JSON. Whoever shows it says whose text it is.
#[derive(Debug, PartialEq, Eq)]
pub enum Wrong {
    /// An object has this field twice.
    Twice(String),
    /// It is not JSON: what is wrong, and where.
    Syntax(String),
}

/// Parses `text`.
pub fn parse(text: &str) -> Result<Value, Wrong> {
    let mut twice = None;
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = Strict { twice: &mut twice }.deserialize(&mut reader);
    value.and_then(|value| reader.end().map(|()| value)).map_err(|error| match twice {
        Some(name) => Wrong::Twice(name),
        None => Wrong::Syntax(what_is_wrong(&error)),
    })
}

/// A parser's error, in words for a person.
fn what_is_wrong(error: &serde_json::Error) -> String {
    let (said, column) = (error.to_string(), format!("column {}", error.column()));
    let place = if error.line() > 1 { format!("line {} {column}", error.line()) } else { column };
    if error.is_eof() {
        return "it ends too soon".into();
    }
    let words = [
        ("recursion limit", "it has more than 127 arrays and objects within each other, at"),
        (
            "control character",
            "a line break or another control character stands in a text (write it as \\n, \\t or \\u…), at",
        ),
        ("surrogate", "a text has half of a character that is written as two \\u…, at"),
        ("hex escape", "a text has half of a character that is written as two \\u…, at"),
        ("invalid escape", "a text has a backslash before what it cannot stand before, at"),
        ("trailing comma", "there is a comma too many, at"),
        ("trailing characters", "something stands behind its end, at"),
        ("key must be a string", "the name of a field must be in double quotes, at"),
        ("number", "a number is not one, or too large, at"),
        ("expected `:`", "a colon is missing, at"),
        ("expected `,`", "a comma or a closing bracket is missing, at"),
    ];
    let word = words.iter().find(|(theirs, _)| said.contains(theirs));
    format!("{} {place}", word.map_or("something stands there that does not belong there, at", |(_, ours)| ours))
}

/// The last `custom_id` of an object, if it is a text; `None` if the line is not JSON.
pub fn custom_id(line: &[u8]) -> Option<String> {
    struct Ids;
    impl<'de> Visitor<'de> for Ids {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut id = None;
            while let Some(is_id) = map.next_key_seed(IsId)? {
                if !is_id {
                    map.next_value::<IgnoredAny>()?;
                } else if let Value::String(text) = map.next_value()? {
                    id = Some(text);
                }
            }
            Ok(id)
        }
    }
    let mut reader = serde_json::Deserializer::from_slice(line);
    let id = reader.deserialize_any(Ids).ok()?;
    reader.end().ok().and(id)
}

/// Whether a name is `custom_id`.
struct IsId;

impl<'de> DeserializeSeed<'de> for IsId {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, name: D) -> Result<bool, D::Error> {
        name.deserialize_str(self)
    }
}

impl Visitor<'_> for IsId {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<bool, E> {
        Ok(name == "custom_id")
    }
}

/// Parses a value, and notes the first name that an object has twice.
struct Strict<'n> {
    twice: &'n mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Value, D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = array.next_element_seed(Strict { twice: self.twice })? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(name) = object.next_key::<String>()? {
            if values.contains_key(&name) {
                *self.twice = Some(name);
                return Err(A::Error::custom("twice"));
            }
            let value = object.next_value_seed(Strict { twice: self.twice })?;
            values.insert(name, value);
        }
        Ok(values.into())
    }
}

#[cfg(test)]
mod tests {
    use super::{Wrong, custom_id, parse};

    #[test]
    fn a_field_that_is_there_twice_is_refused_wherever_it_is() {
        let text = r#"{"b": [1, -2, 2.5, "é\n", null, true], "a": {"x": {}}}"#;
        assert_eq!(parse(text).unwrap(), serde_json::from_str::<serde_json::Value>(text).unwrap());
        assert!(parse(text).unwrap().to_string().starts_with("{\"b\":"), "the order of fields is kept");
        for text in [r#"{"a": 1, "b": 2, "a": 1}"#, r#"{"x": [{"a": 1, "\u0061": null}]}"#] {
            assert_eq!(parse(text).unwrap_err(), Wrong::Twice("a".into()));
        }
    }

    #[test]
    fn what_is_wrong_is_said_without_the_parser_s_words() {
        for (text, said) in [
            ("not json", "something stands there that does not belong there, at column 2"),
            ("{\"a\": 1", "it ends too soon"),
            ("{\"a\": 1} x", "something stands behind its end, at column 10"),
            ("{\"a\": 1,}", "a comma too many, at column 9"),
            ("{a: 1}", "the name of a field must be in double quotes, at column 2"),
            ("{\"a\" 1}", "a colon is missing, at column 6"),
            ("[1 2]", "a comma or a closing bracket is missing, at column 4"),
            ("\"\\ud800\"", "half of a character"),
            ("\"a\tb\"", "control character"),
            ("\"\\x\"", "a backslash before what it cannot stand before"),
            ("01", "a number is not one"),
            ("1e999", "too large"),
            ("{\n\"a\": 1,\n}", "a comma too many, at line 3 column 1"),
            (&"[".repeat(200), "within each other, at column 128"),
        ] {
            let found = parse(text).unwrap_err();
            assert!(matches!(&found, Wrong::Syntax(what) if what.contains(said)), "{text}: {found:?}");
        }
    }

    #[test]
    fn of_two_ids_the_last_counts() {
        assert_eq!(custom_id(br#"{"custom_id": "a", "b": [{}], "custom_id": "\u0062"}"#).as_deref(), Some("b"));
        for line in
            ["{}", "not json", "[1]", r#"{"custom_id": 4}"#, r#"{"custom_id": null}"#, r#"{"custom_id": "a"} x"#]
        {
            assert_eq!(custom_id(line.as_bytes()), None, "{line}");
        }
    }
}
