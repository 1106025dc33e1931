//! Checkpoints, damaged in one place each.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::golden;

/// A copy of a golden checkpoint, to damage.
pub struct Broken(TempDir);

impl Broken {
    /// An unharmed copy of golden checkpoint `name`.
    pub fn copy_of(name: &str) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        for entry in std::fs::read_dir(golden(name)).expect("the golden checkpoint is there") {
            let path = entry.expect("its directory lists").path();
            let to = dir.path().join(path.file_name().expect("files have names"));
            std::fs::copy(&path, to).expect("it copies");
        }
        Broken(dir)
    }

    /// As an argument.
    pub fn path(&self) -> &str {
        self.0.path().to_str().expect("temporary paths are UTF-8")
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Changes the bytes of a file.
    pub fn edit(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        edit(&self.file(name), change);
    }

    /// Changes a JSON file.
    pub fn edit_json(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.edit(name, |bytes| {
            let mut json = serde_json::from_slice(bytes).expect("golden JSON parses");
            change(&mut json);
            *bytes = serde_json::to_vec(&json).expect("JSON writes");
        });
    }

    /// Changes the header of a safetensors file, and its length with it; the data stays.
    pub fn edit_header(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.edit(name, |bytes| {
            let data = bytes.split_off(header_end(bytes));
            let mut header = serde_json::from_slice(&bytes[8..]).expect("golden headers parse");
            change(&mut header);
            let json = serde_json::to_vec(&header).expect("JSON writes");
            *bytes = [&(json.len() as u64).to_le_bytes(), json.as_slice(), &data].concat();
        });
    }

    /// Makes `layers` layers of the one or few in `model.safetensors`, each a copy of the first.
    pub fn repeat_layer(&self, layers: usize) {
        self.edit("model.safetensors", |bytes| {
            let mut data = bytes.split_off(header_end(bytes));
            let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..]).expect("golden headers parse");
            let first: Vec<(String, Value)> = header
                .iter()
                .filter(|(name, _)| name.contains(".layers.0."))
                .map(|(n, e)| (n.clone(), e.clone()))
                .collect();
            for layer in 1..layers {
                for (name, entry) in &first {
                    let name = name.replace(".layers.0.", &format!(".layers.{layer}."));
                    if header.contains_key(&name) {
                        continue;
                    }
                    let offset = |i: usize| entry["data_offsets"][i].as_u64().expect("an offset") as usize;
                    let (from, to, at) = (offset(0), offset(1), data.len());
                    data.extend_from_within(from..to);
                    let mut entry = entry.clone();
                    entry["data_offsets"] = json!([at, data.len()]);
                    header.insert(name, entry);
                }
            }
            let json = serde_json::to_vec(&header).expect("JSON writes");
            *bytes = [&(json.len() as u64).to_le_bytes(), json.as_slice(), &data].concat();
        });
        self.edit_json("config.json", |config| {
            config["num_hidden_layers"] = json!(layers);
            config["layer_types"] = json!(vec!["full_attention"; layers]);
        });
    }

    /// Writes `value` over the first bytes of a tensor.
    pub fn overwrite(&self, name: &str, tensor: &str, value: &[u8]) {
        self.edit_tensor(name, tensor, |data| data[..value.len()].copy_from_slice(value));
    }

    /// Changes the bytes of a tensor.
    pub fn edit_tensor(&self, name: &str, tensor: &str, change: impl FnOnce(&mut [u8])) {
        self.edit(name, |bytes| {
            let data = header_end(bytes);
            let header: Value = serde_json::from_slice(&bytes[8..data]).expect("golden headers parse");
            let offset =
                |i: usize| data + header[tensor]["data_offsets"][i].as_u64().expect("the tensor is there") as usize;
            change(&mut bytes[offset(0)..offset(1)]);
        });
    }
}

/// Where a safetensors file's header ends: 8 bytes of length, little-endian, and that many of JSON.
fn header_end(bytes: &[u8]) -> usize {
    let (length, _) = bytes.split_first_chunk().expect("a safetensors file has a length");
    8 + u64::from_le_bytes(*length) as usize
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).expect("the file reads");
    change(&mut bytes);
    std::fs::write(path, bytes).expect("the file writes");
}
