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
    /// Answer with one of these texts, which commas part
    #[arg(long, value_name = "A,B,…", value_delimiter = ',', allow_hyphen_values = true)]
    pub choice: Option<Vec<String>>,
    /// Answer with a text of the grammar in this file, in Lark's notation
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub grammar: Option<PathBuf>,
}
