//! The form of answers, made from its arguments.

use std::path::Path;

use anyhow::{Context, bail};
use model::Shape;
use model::text::shown;

use super::utf8;
use crate::args::form::{Choices, FormArgs};
use crate::json::{self, Wrong};

/// The form that answers must have, if one is asked for. Reads the file that holds it.
///
/// # Errors
/// If the file cannot be read, or a JSON Schema is not JSON.
pub fn shape(args: FormArgs) -> anyhow::Result<Option<Shape>> {
    let FormArgs { json_schema, regex, choice, grammar } = args;
    if let Some(path) = json_schema {
        let (text, place) = match path.to_str().filter(|text| text.trim_start().starts_with('{')) {
            Some(text) => (text.to_owned(), "--json-schema".to_owned()),
            None => (read(&path, "JSON Schema")?, path.display().to_string()),
        };
        return match json::parse(&text) {
            Ok(schema) => Ok(Some(Shape::JsonSchema(schema))),
            Err(Wrong::Twice(name)) => bail!("in the JSON Schema in {place}, `{}` is there twice", shown(&name)),
            Err(Wrong::Syntax(what)) => bail!("the JSON Schema in {place} is no JSON: {what}"),
        };
    }
    if let Some(path) = grammar {
        return Ok(Some(Shape::Lark(read(&path, "grammar")?)));
    }
    let all = |choices: Vec<Choices>| Shape::Choice(choices.into_iter().flat_map(|choices| choices.0).collect());
    Ok(regex.map(Shape::Regex).or(choice.map(all)))
}

fn read(path: &Path, what: &str) -> anyhow::Result<String> {
    let name = path.display().to_string();
    utf8(std::fs::read(path).with_context(|| format!("cannot read the {what} from {name}"))?, &name)
}
