//! `quantization_config` of `config.json`: which weight formats a checkpoint has.
//!
//! Lists of names (`modules_to_not_convert`, `ignore`, `targets`) are not read, as their rules differ from program to
//! program. The tensors in the file say which matrices are quantised, and which of several formats a matrix has.

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::{Awq, CheckpointFormat, Fp8, Gptq, PackQuantized};
use crate::Error;
use crate::config::brief;

/// The end of every refusal.
const MEND: &str = "use the checkpoint in bf16, or one in FP8 (e4m3), AWQ (gemm, 4 bits), GPTQ (4 bits, symmetric), or \
                    compressed-tensors' W4A16 or FP8";

/// The weight formats of a checkpoint.
#[derive(Debug, Clone)]
pub struct Quantization {
    /// `quant_method`.
    pub method: String,
    formats: Vec<Arc<dyn CheckpointFormat>>,
}

/// Two are equal if they name the same formats.
impl PartialEq for Quantization {
    fn eq(&self, other: &Self) -> bool {
        self.method == other.method && self.name() == other.name()
    }
}

impl Quantization {
    /// Reads the value of `quantization_config`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::UnsupportedSetting`], which names what is not supported, or [`Error::Json`].
    pub fn parse(value: &Value, path: &Path) -> Result<Self, Error> {
        let fields = Fields { value, path };
        let Some(method) = value.get("quant_method").and_then(Value::as_str) else {
            return Err(fields.refuse_as("quantization_config", value));
        };
        let formats: Vec<Arc<dyn CheckpointFormat>> = match method {
            "fp8" => vec![Arc::new(fp8(&fields)?)],
            "awq" => vec![Arc::new(awq(&fields)?)],
            "gptq" => vec![Arc::new(gptq(&fields)?)],
            "compressed-tensors" => compressed_tensors(&fields)?,
            _ => return Err(fields.refuse("quantization_config.quant_method", "quant_method")),
        };
        Ok(Self { method: method.to_owned(), formats })
    }

    /// The formats that matrices may have. A matrix that several of them fit has the first.
    pub fn formats(&self) -> &[Arc<dyn CheckpointFormat>] {
        &self.formats
    }

    /// What people call it.
    pub fn name(&self) -> String {
        let mut names: Vec<String> = self.formats.iter().map(|format| format.name()).collect();
        names.dedup();
        names.join("; ")
    }
}

/// An object of the config, and what it takes to refuse its fields.
struct Fields<'a> {
    value: &'a Value,
    path: &'a Path,
}

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> &'a Value {
        self.value.get(field).unwrap_or(&Value::Null)
    }

    fn read<T: Deserialize<'a>>(&self) -> Result<T, Error> {
        T::deserialize(self.value)
            .map_err(|e| Error::Json { path: self.path.to_owned(), reason: format!("quantization_config: {e}") })
    }

    fn refuse(&self, name: &'static str, field: &str) -> Error {
        self.refuse_as(name, self.get(field))
    }

    fn refuse_as(&self, field: &'static str, value: &Value) -> Error {
        Error::UnsupportedSetting { path: self.path.to_owned(), field, value: brief(value), mend: MEND }
    }

    /// Refuses a field unless it is absent, null, or one of these values.
    fn only(&self, name: &'static str, field: &str, allowed: &[Value]) -> Result<(), Error> {
        let value = self.get(field);
        if value.is_null() || allowed.contains(value) { Ok(()) } else { Err(self.refuse(name, field)) }
    }

    /// The group size: a number, or -1 for all inputs.
    fn group_size(&self, name: &'static str) -> Result<Option<usize>, Error> {
        match self.get("group_size").as_i64() {
            Some(-1) => Ok(None),
            Some(size) if size > 0 => Ok(Some(size as usize)),
            _ => Err(self.refuse(name, "group_size")),
        }
    }
}

fn fp8(fields: &Fields<'_>) -> Result<Fp8, Error> {
    fields.only("quantization_config.fmt", "fmt", &["e4m3".into(), "float8_e4m3fn".into()])?;
    fields.only("quantization_config.scale_fmt", "scale_fmt", &["float".into()])?;
    let block: Option<[usize; 2]> = match fields.get("weight_block_size") {
        Value::Null => None,
        value => <[usize; 2]>::deserialize(value).ok().filter(|block| !block.contains(&0)),
    };
    match (block, fields.get("weight_block_size")) {
        (Some([outputs, inputs]), _) => {
            Ok(Fp8 { scale: "weight_scale_inv", outputs: Some(outputs), inputs: Some(inputs) })
        }
        (None, Value::Null) => Ok(Fp8 { scale: "weight_scale", outputs: None, inputs: None }),
        _ => Err(fields.refuse("quantization_config.weight_block_size", "weight_block_size")),
    }
}

fn awq(fields: &Fields<'_>) -> Result<Awq, Error> {
    // Some exporters write the version in capitals.
    fields.only("quantization_config.version", "version", &["gemm".into(), "GEMM".into()])?;
    // Older files of AutoAWQ name it `w_bit`.
    let bits = if fields.get("bits").is_null() { "w_bit" } else { "bits" };
    fields.only("quantization_config.bits", bits, &[4.into()])?;
    fields.only("quantization_config.zero_point", "zero_point", &[true.into()])?;
    let group = match fields.get("q_group_size").as_u64() {
        Some(size) if size > 0 => Some(size as usize),
        _ => fields.group_size("quantization_config.group_size")?,
    };
    Ok(Awq { group })
}

fn gptq(fields: &Fields<'_>) -> Result<Gptq, Error> {
    fields.only("quantization_config.bits", "bits", &[4.into()])?;
    fields.only("quantization_config.sym", "sym", &[true.into()])?;
    let formats = ["gptq".into(), "gptq_v2".into()];
    fields.only("quantization_config.checkpoint_format", "checkpoint_format", &formats)?;
    let zero_offset = if *fields.get("checkpoint_format") == "gptq_v2" { 0 } else { 1 };
    let listed = *fields.get("desc_act") == true;
    Ok(Gptq { group: fields.group_size("quantization_config.group_size")?, listed, zero_offset })
}

fn compressed_tensors(fields: &Fields<'_>) -> Result<Vec<Arc<dyn CheckpointFormat>>, Error> {
    #[derive(Deserialize)]
    struct Raw {
        config_groups: serde_json::Map<String, Value>,
    }
    for (name, field) in [
        ("quantization_config.sparsity_config", "sparsity_config"),
        ("quantization_config.transform_config", "transform_config"),
    ] {
        let value = fields.get(field);
        let is_none = match value {
            Value::Object(map) => map.is_empty() || map.get("format").is_some_and(|format| *format == "dense"),
            value => value.is_null(),
        };
        if !is_none {
            return Err(fields.refuse(name, field));
        }
    }
    let raw: Raw = fields.read()?;
    let mut formats = Vec::new();
    for group in raw.config_groups.values() {
        let group = Fields { value: group, path: fields.path };
        let format = group.value.get("format").filter(|format| !format.is_null()).unwrap_or(fields.get("format"));
        formats.push(scheme(&group, format)?);
    }
    if formats.is_empty() {
        return Err(fields.refuse("quantization_config.config_groups", "config_groups"));
    }
    // A format also fits a matrix that has more tensors than it needs. So the most demanding one comes first.
    let needed = |format: &dyn CheckpointFormat| format.parts([1, 1]).iter().filter(|part| !part.optional).count();
    formats.sort_by_key(|format| std::cmp::Reverse(needed(&**format)));
    Ok(formats)
}

/// The format of a group of compressed-tensors, from its settings for weights and the name of the packing (`format`).
fn scheme(group: &Fields<'_>, format: &Value) -> Result<Arc<dyn CheckpointFormat>, Error> {
    const WEIGHTS: &str = "quantization_config.config_groups";
    #[derive(Deserialize)]
    struct QuantizationArgs {
        num_bits: u32,
        r#type: String,
        strategy: Option<String>,
        group_size: Option<i64>,
        block_structure: Option<Value>,
        #[serde(default = "yes")]
        symmetric: bool,
        actorder: Option<Value>,
    }
    fn yes() -> bool {
        true
    }
    let weights = Fields { value: group.get("weights"), path: group.path };
    if weights.value.is_null() {
        return Err(group.refuse_as(WEIGHTS, group.value));
    }
    let raw: QuantizationArgs = weights.read()?;
    let group_size = raw.group_size.filter(|size| *size > 0).map(|size| size as usize);
    let format = format.as_str().unwrap_or("pack-quantized");
    match (raw.r#type.as_str(), raw.num_bits, format) {
        ("float", 8, "float-quantized" | "naive-quantized") if raw.symmetric => {
            let block = match &raw.block_structure {
                Some(Value::String(text)) => {
                    text.split_once('x').and_then(|(a, b)| Some([a.trim().parse().ok()?, b.trim().parse().ok()?]))
                }
                Some(value) => <[usize; 2]>::deserialize(value).ok(),
                None => None,
            };
            let (outputs, inputs) = match (raw.strategy.as_deref(), block, group_size) {
                (Some("tensor") | None, ..) => (None, None),
                (Some("channel"), ..) => (Some(1), None),
                (Some("group"), _, Some(size)) => (Some(1), Some(size)),
                (Some("block"), Some([outputs, inputs]), _) if outputs > 0 && inputs > 0 => {
                    (Some(outputs), Some(inputs))
                }
                _ => return Err(group.refuse_as(WEIGHTS, weights.value)),
            };
            Ok(Arc::new(Fp8 { scale: "weight_scale", outputs, inputs }))
        }
        ("int", 4, "pack-quantized") => {
            let group = match (raw.strategy.as_deref(), group_size) {
                (Some("channel"), _) => None,
                (Some("group"), Some(size)) => Some(size),
                _ => return Err(group.refuse_as(WEIGHTS, weights.value)),
            };
            let listed = raw.actorder.is_some_and(|order| order == "group" || order == "dynamic");
            Ok(Arc::new(PackQuantized { group, symmetric: raw.symmetric, listed }))
        }
        _ => {
            let what = format!("{} of {} bits as {format}", raw.r#type, raw.num_bits);
            Err(group.refuse_as(WEIGHTS, &what.into()))
        }
    }
}
