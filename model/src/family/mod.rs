//! Families of models: which configs belong to each, and the plan that they give. See [`plan`](crate::plan) for how to
//! add one.

mod llama;
mod qwen2;
mod qwen3;

use std::path::Path;

use serde_json::{Map, Value};

use crate::Error;
use crate::config::brief;
use crate::plan::Traits;

/// A family of models.
#[derive(Debug)]
pub struct Family {
    /// What `architectures` of `config.json` names.
    pub architecture: &'static str,
    /// What `model_type` says.
    pub model_type: &'static str,
    /// Published models of the family, for messages: `Qwen3-0.6B to Qwen3-32B`.
    pub published: &'static str,
    /// transformers' default of `max_position_embeddings`.
    pub(crate) max_position_embeddings: usize,
    /// transformers' default of `head_dim`; `None` for the hidden size divided by the heads.
    pub(crate) head_dim: Option<usize>,
    /// Reads the traits of the plan from a config. Fails on a setting that is not supported.
    pub(crate) read: fn(&Fields<'_>) -> Result<Traits, Error>,
}

/// Every family that is supported.
pub static ALL: [&Family; 3] = [&qwen3::QWEN3, &qwen2::QWEN2, &llama::LLAMA];

/// Families are equal if they have the same architecture.
impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.architecture == other.architecture
    }
}

impl Family {
    /// Dense Qwen3.
    pub const QWEN3: &'static Self = &qwen3::QWEN3;

    /// Which family a config names.
    ///
    /// # Errors
    /// [`Error::UnsupportedArchitecture`].
    pub(crate) fn of(
        architectures: Option<&[String]>,
        model_type: Option<&str>,
        path: &Path,
    ) -> Result<&'static Self, Error> {
        let named = architectures.and_then(|all| all.first()).map(String::as_str);
        let is = |family: &&&Self| match named {
            Some(name) => name == family.architecture && model_type.is_none_or(|kind| kind == family.model_type),
            None => model_type == Some(family.model_type),
        };
        if let Some(family) = ALL.iter().find(is) {
            return Ok(family);
        }
        let found = match (named, model_type) {
            // The architecture is a family's, so the type is what does not fit.
            (Some(name), Some(kind)) if ALL.iter().any(|family| family.architecture == name) => kind,
            (Some(name), _) => name,
            (None, Some(kind)) => kind,
            (None, None) => "nameless",
        };
        let is_moe = found.to_ascii_lowercase().contains("moe");
        Err(Error::UnsupportedArchitecture {
            path: path.to_owned(),
            found: found.to_owned(),
            supported: supported(),
            hint: if is_moe { "; mixture-of-experts models are not supported" } else { "" },
        })
    }
}

/// The families, for a sentence: `A (Qwen3-0.6B to …), B (…) and C (…)`.
fn supported() -> String {
    let names: Vec<String> =
        ALL.iter().map(|family| format!("{} ({})", family.architecture, family.published)).collect();
    match names.as_slice() {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        _ => names.concat(),
    }
}

/// The fields of a `config.json`, for a family to look at.
pub(crate) struct Fields<'a> {
    pub(crate) all: &'a Map<String, Value>,
    pub(crate) path: &'a Path,
}

impl Fields<'_> {
    /// Refuses a switch that is on.
    fn refuse(&self, field: &'static str, mend: &'static str) -> Result<(), Error> {
        match self.all.get(field) {
            None | Some(Value::Null | Value::Bool(false)) => Ok(()),
            Some(value) => Err(self.unsupported(field, value, mend)),
        }
    }

    fn unsupported(&self, field: &'static str, value: &Value, mend: &'static str) -> Error {
        Error::UnsupportedSetting { path: self.path.to_owned(), field, value: brief(value), mend }
    }

    /// Refuses attention over a window of the latest tokens.
    fn refuse_windows(&self) -> Result<(), Error> {
        self.refuse("use_sliding_window", "use a checkpoint with full attention, as published ones are")?;
        let kinds = self.all.get("layer_types").and_then(Value::as_array);
        match kinds.into_iter().flatten().find(|kind| *kind != "full_attention") {
            None => Ok(()),
            Some(kind) => {
                Err(self.unsupported("layer_types", kind, "use a checkpoint with full attention in every layer"))
            }
        }
    }
}
