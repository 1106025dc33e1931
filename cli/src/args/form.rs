//! The form of an answer, as it is typed.

use std::path::PathBuf;

use clap::ValueHint;

/// What the answer has to look like: one of these, if any.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Form of the answer (with thinking, of what comes behind the thought)")]
#[group(multiple = false, conflicts_with = "ignore_eos")]
pub struct FormArgs {
    /// Answer with JSON that follows the JSON Schema in this file; the schema itself, if it begins with `{`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub json_schema: Option<PathBuf>,
    /// Answer with a text that this regular expression matches as a whole
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    pub regex: Option<String>,
    /// Answer with one of these texts, which commas part; or a JSON array of texts, which may hold commas
    #[arg(long, value_name = "A,B,…", value_parser = choices, allow_hyphen_values = true)]
    pub choice: Option<Vec<Choices>>,
    /// Answer with a text of the grammar in this file, in Lark's notation
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub grammar: Option<PathBuf>,
}

/// The texts of one `--choice`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices(pub Vec<String>);

fn choices(text: &str) -> Result<Choices, String> {
    if !text.starts_with('[') {
        return Ok(Choices(text.split(',').map(str::to_owned).collect()));
    }
    let error = |error| format!("{error}; what begins with `[` must be a JSON array of texts, as in [\"yes\", \"no\"]");
    serde_json::from_str(text).map(Choices).map_err(error)
}

#[cfg(test)]
mod tests {
    use super::choices;

    #[test]
    fn choices_are_parted_by_commas_or_are_json() {
        let texts = |text| choices(text).map(|choices| choices.0);
        assert_eq!(texts("yes,no"), Ok(vec!["yes".into(), "no".into()]));
        assert_eq!(texts("yes"), Ok(vec!["yes".into()]));
        assert_eq!(texts(r#"["yes, sir", "no"]"#), Ok(vec!["yes, sir".into(), "no".into()]));
        for wrong in ["[yes,no]", r#"["yes", 1]"#, r#"["yes""#] {
            let error = texts(wrong).unwrap_err();
            assert!(error.contains("must be a JSON array of texts"), "{wrong}: {error}");
        }
    }
}
