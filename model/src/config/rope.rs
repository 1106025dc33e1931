//! What `config.json` says about the rotary position embedding, read as transformers 5 reads it.
//!
//! There are three places: `rope_parameters` (transformers 5), `rope_scaling` (transformers 4), and fields of the
//! config itself. `rope_scaling` takes precedence over `rope_parameters`, and both over the config's own fields. Where
//! transformers ignores a setting with a warning, or uses one of two values that differ, the config is refused: no
//! model runs with a setting that is not understood.

use std::path::Path;

use serde_json::{Map, Value};

use crate::Error;
use crate::rope::{Llama3, Scaling, Yarn};

/// The base of the rotation and its scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rope {
    pub(super) theta: f64,
    pub(super) scaling: Option<Scaling>,
}

/// Most positions that scaling may extend a model to.
const MOST_POSITIONS: f64 = (1 << 24) as f64;
/// The base of a config that names none, as in transformers.
const DEFAULT_THETA: f64 = 10_000.0;
const SCALING: &str = "rope_scaling";
const PARAMETERS: &str = "rope_parameters";
const ORIGINAL: &str = "original_max_position_embeddings";
/// Settings that every type of rotation may have.
const COMMON: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
/// Further settings of YaRN.
const YARN: [&str; 8] =
    ["factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"];

/// Further settings of Llama 3.1's scaling. All are required, but the original positions may stand elsewhere.
const LLAMA3: [&str; 4] = ["factor", ORIGINAL, "low_freq_factor", "high_freq_factor"];

/// Reads the rotation of `config`, the fields of a `config.json`. `positions` is the length that the model was made
/// for, in tokens.
pub(super) fn read(config: &Map<String, Value>, positions: usize, path: &Path) -> Result<Rope, Error> {
    let fields = Fields { config, positions, path };
    fields.check_partial("partial_rotary_factor", config)?;
    // transformers treats an empty object as absent.
    let given = |name| config.get(name).filter(|value| !value.is_null() && *value != &Value::Object(Map::new()));
    let scaling = given(SCALING).map(|value| fields.section(SCALING, value)).transpose()?;
    let parameters = given(PARAMETERS).map(|value| fields.section(PARAMETERS, value)).transpose()?;
    match (scaling, parameters) {
        (None, None) => Ok(Rope { theta: fields.theta()?.unwrap_or(DEFAULT_THETA), scaling: None }),
        (Some(rope), None) | (None, Some(rope)) => Ok(rope),
        // The meaning is plain if both say the same, or if `rope_scaling` adds a scaling to an unscaled rotation in
        // `rope_parameters`.
        (Some(scaling), Some(parameters)) => {
            if scaling == parameters || (scaling.theta == parameters.theta && parameters.scaling.is_none()) {
                return Ok(scaling);
            }
            const MEND: &str = "rope_parameters beside it says something else; keep the one that the model was \
            trained with, \
                                with its rope_theta";
            Err(fields.unsupported(SCALING, &config[SCALING], MEND))
        }
    }
}

/// The config's fields, and what error messages need.
struct Fields<'a> {
    config: &'a Map<String, Value>,
    positions: usize,
    path: &'a Path,
}

impl Fields<'_> {
    /// The config's own `rope_theta`, if it has one.
    fn theta(&self) -> Result<Option<f64>, Error> {
        self.theta_in(self.config)
    }

    fn theta_in(&self, object: &Map<String, Value>) -> Result<Option<f64>, Error> {
        let Some(theta) = object.get("rope_theta") else { return Ok(None) };
        match theta.as_f64() {
            Some(theta) => Ok(Some(theta)),
            None => Err(self.invalid("rope_theta", theta, "it must be a number")),
        }
    }

    /// Reads the object under `field`.
    fn section(&self, field: &'static str, value: &Value) -> Result<Rope, Error> {
        let Some(object) = value.as_object() else {
            return Err(self.invalid(field, value, "it must be an object"));
        };
        let kind = self.kind(field, value, object)?;
        let own: &[&str] = match kind {
            "yarn" => &YARN,
            "llama3" => &LLAMA3,
            _ => &[],
        };
        let known = |key: &str| COMMON.contains(&key) || own.contains(&key);
        if object.values().any(Value::is_object) {
            const MEND: &str = "transformers does not run these models with a rotation for each type of layer \
                                either; use a checkpoint that says one for all layers";
            return Err(self.unsupported(field, value, MEND));
        }
        let is_strange = |(key, value): &(&String, &Value)| !value.is_null() && !known(key);
        let strange: Map<String, Value> =
            object.iter().filter(is_strange).map(|(key, value)| (key.clone(), value.clone())).collect();
        if !strange.is_empty() {
            const MEND: &str = "these of its settings are none of a rotation of its type; use a checkpoint that \
                                transformers reads without a warning";
            return Err(self.unsupported(field, &Value::Object(strange), MEND));
        }
        self.check_partial(field, object)?;
        let theta = match self.theta_in(object)? {
            Some(theta) => theta,
            None => self.theta()?.unwrap_or(DEFAULT_THETA),
        };
        let scaling = match kind {
            "yarn" => Some(Scaling::Yarn(self.yarn(field, value)?)),
            "llama3" => Some(Scaling::Llama3(self.llama3(field, value)?)),
            _ => None,
        };
        Ok(Rope { theta, scaling })
    }

    /// The type of a rotation: `default`, `yarn` or `llama3`.
    fn kind<'v>(&self, field: &'static str, value: &Value, object: &'v Map<String, Value>) -> Result<&'v str, Error> {
        let named = |key: &str| object.get(key).filter(|kind| !kind.is_null());
        let kind = match (named("rope_type"), named("type")) {
            (Some(kind), Some(old)) if kind != old => {
                return Err(self.unsupported(field, value, "its rope_type and its type differ; keep the right one"));
            }
            (Some(kind), _) | (None, Some(kind)) => kind.as_str(),
            (None, None) => Some("default"),
        };
        match kind {
            Some(kind @ ("default" | "yarn" | "llama3")) => Ok(kind),
            _ => Err(self.unsupported(
                field,
                value,
                "of scaled rotary embeddings YaRN and llama3 are implemented, and without its scaling the model \
                 would be another; use a checkpoint with one of these or a plain one",
            )),
        }
    }

    /// Refuses to rotate a part of each head: only whole heads are rotated.
    fn check_partial(&self, field: &'static str, object: &Map<String, Value>) -> Result<(), Error> {
        match object.get("partial_rotary_factor").filter(|part| !part.is_null()) {
            Some(part) if part.as_f64() != Some(1.0) => {
                Err(self.unsupported(field, part, "warpdraft turns all of a head; use a checkpoint that does"))
            }
            _ => Ok(()),
        }
    }

    fn yarn(&self, field: &'static str, scaling: &Value) -> Result<Yarn, Error> {
        let number = |name: &str| self.positive(scaling.get(name), field, scaling);
        let original = self.original(field, scaling)?;
        // transformers fails without the key. If the key is null, it derives the factor from the positions.
        let factor = match (number("factor")?, scaling.get("factor")) {
            (Some(factor), _) => factor,
            (None, Some(_)) => self.positions as f64 / original,
            (None, None) => return Err(self.invalid(field, scaling, "it lacks YaRN's `factor`")),
        };
        let (fast, slow) = (number("beta_fast")?.unwrap_or(32.0), number("beta_slow")?.unwrap_or(1.0));
        if factor < 1.0 || original < 1.0 || factor * original > MOST_POSITIONS {
            const REASON: &str =
                "its `factor` must be 1 or more, and what it makes of the positions of a sensible size";
            return Err(self.invalid(field, scaling, REASON));
        }
        if fast < slow {
            return Err(self.invalid(field, scaling, "its `beta_fast` must not be below its `beta_slow`"));
        }
        let ratio = number("mscale")?.zip(number("mscale_all_dim")?);
        let length =
            ratio.map_or(Yarn::length(factor, 1.0), |(a, b)| Yarn::length(factor, a) / Yarn::length(factor, b));
        let truncate = match scaling.get("truncate") {
            None => true,
            Some(Value::Bool(truncate)) => *truncate,
            Some(_) => return Err(self.invalid(field, scaling, "its `truncate` must be true or false")),
        };
        Ok(Yarn {
            factor,
            original_positions: original as usize,
            beta_fast: fast,
            beta_slow: slow,
            attention_factor: number("attention_factor")?.unwrap_or(length),
            truncate,
        })
    }

    fn llama3(&self, field: &'static str, scaling: &Value) -> Result<Llama3, Error> {
        let number = |name: &str, missing| match self.positive(scaling.get(name), field, scaling)? {
            Some(number) => Ok(number),
            None => Err(self.invalid(field, scaling, missing)),
        };
        let factor = number("factor", "it lacks llama3's `factor`")?;
        let low = number("low_freq_factor", "it lacks llama3's `low_freq_factor`")?;
        let high = number("high_freq_factor", "it lacks llama3's `high_freq_factor`")?;
        let original = self.original(field, scaling)?;
        if factor < 1.0 || original < 1.0 {
            return Err(self.invalid(field, scaling, "its `factor` and its original positions must be 1 or more"));
        }
        if low >= high {
            const REASON: &str = "its `low_freq_factor` must be below its `high_freq_factor`";
            return Err(self.invalid(field, scaling, REASON));
        }
        let original_positions = original as usize;
        Ok(Llama3 { factor, original_positions, low_freq_factor: low, high_freq_factor: high })
    }

    /// Length of the longest text in training, in tokens. From the scaling or the config itself, else the model's
    /// positions.
    fn original(&self, field: &'static str, scaling: &Value) -> Result<f64, Error> {
        let inner = self.positive(scaling.get(ORIGINAL), field, scaling)?;
        let outer_value = self.config.get(ORIGINAL);
        let outer = self.positive(outer_value, ORIGINAL, outer_value.unwrap_or(&Value::Null))?;
        let original = match (inner, outer) {
            (Some(inner), Some(outer)) if inner != outer => {
                return Err(self.unsupported(
                    field,
                    scaling,
                    "the config's own original_max_position_embeddings differs from its; keep the right one",
                ));
            }
            (Some(original), _) | (None, Some(original)) => original,
            (None, None) => self.positions as f64,
        };
        if original.fract() == 0.0 {
            return Ok(original);
        }
        Err(self.invalid(field, scaling, "its `original_max_position_embeddings` must be a whole number"))
    }

    /// `number`, a member of `object` (the value of `field`), if it is there. It must be above 0.
    fn positive(&self, number: Option<&Value>, field: &'static str, object: &Value) -> Result<Option<f64>, Error> {
        match number.filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|n| n.is_finite() && *n > 0.0) {
                Some(number) => Ok(Some(number)),
                None => Err(self.invalid(field, object, "its numbers must be above 0")),
            },
        }
    }

    fn invalid(&self, field: &'static str, value: &Value, reason: &'static str) -> Error {
        Error::InvalidSetting { path: self.path.to_owned(), field, value: super::brief(value), reason }
    }

    fn unsupported(&self, field: &'static str, value: &Value, mend: &'static str) -> Error {
        Error::UnsupportedSetting { path: self.path.to_owned(), field, value: super::brief(value), mend }
    }
}
