//! What a model is, without its weights: the config, and which tensors there are.

use super::files::{Files, RemoteFiles};
use super::{Checkpoint, Dtype, Store};
use crate::{Config, Error};

/// A model as far as `config.json` and the headers of its weights tell.
#[derive(Debug, Clone)]
pub struct Outline {
    /// Sizes and constants.
    pub config: Config,
    /// All tensors, shard by shard in file order.
    pub tensors: Vec<OutlineTensor>,
    /// As [`Checkpoint::warnings`].
    pub warnings: Vec<String>,
}

/// A tensor by its header.
#[derive(Debug, Clone)]
pub struct OutlineTensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Number format.
    pub dtype: Dtype,
    /// Sizes, slowest first.
    pub shape: Vec<usize>,
    /// Bytes that it takes.
    pub bytes: usize,
    /// Name of the file that holds it.
    pub file: String,
}

impl Outline {
    /// Reads the outline of files that are elsewhere, with every check that needs no weight.
    #[cfg_attr(not(feature = "hub"), allow(dead_code))]
    pub(crate) fn read(files: &dyn RemoteFiles) -> Result<Self, Error> {
        let files = Files::Remote(files);
        let mend = "the repository holds no checkpoint in the format of transformers; choose another";
        let config = Config::parse(&files.require("config.json", mend)?, &files.path("config.json"))?;
        let mut warnings = Vec::new();
        let store = Store::open(&files, &mut warnings)?;
        store.weight_ids(&config)?;
        Ok(Self { config, tensors: store.outline(), warnings })
    }
}

impl Checkpoint {
    /// What of this model its config and headers tell.
    pub fn outline(&self) -> Outline {
        Outline { config: self.config.clone(), tensors: self.store.outline(), warnings: self.warnings.clone() }
    }
}

impl Store {
    fn outline(&self) -> Vec<OutlineTensor> {
        let tensor = |stored: &super::Stored| OutlineTensor {
            name: stored.name.clone(),
            dtype: stored.dtype,
            shape: stored.shape.clone(),
            bytes: stored.bytes.len(),
            file: self.file_name(stored.shard),
        };
        self.tensors.iter().map(tensor).collect()
    }

    fn file_name(&self, shard: usize) -> String {
        let name = self.shards[shard].path.file_name();
        name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }
}
