//! A model without its weights: the config, and which tensors there are.

use super::files::{Files, RemoteFiles};
use super::{Checkpoint, Dtype, Store, check_mode};
use crate::format::{Code, WeightId, WeightsMode};
use crate::{Config, Error};

/// What `config.json` and the headers of the weights tell about a model.
#[derive(Debug, Clone)]
pub struct Outline {
    /// Sizes and constants.
    pub config: Config,
    /// All tensors, shard by shard in file order.
    pub tensors: Vec<OutlineTensor>,
    /// Every kind of weight, in the order of the forward pass.
    pub matrices: Vec<MatrixOutline>,
    /// As [`Checkpoint::warnings`].
    pub warnings: Vec<String>,
}

/// A tensor, as its header describes it.
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

/// All weights of one kind, over all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixOutline {
    /// What they are, as a name for JSON and for people: `qkv`, `output`, `gate_up`, `down`, `embedding`, `head`, or
    /// `norms and biases`.
    pub kind: &'static str,
    /// Their format, as people call it; several formats are joined by `; `.
    pub format: String,
    /// Number of weights (parameters).
    pub weights: u64,
    /// Bytes of their tensors in the files.
    pub stored_bytes: u64,
    /// Bytes of them in their format, with scales and zeros. Differs from `stored_bytes` where loading rounds.
    pub format_bytes: u64,
    /// Whether they are quantised, in the files or while loading.
    pub quantized: bool,
    /// The codes that all of them have, and the fewest outputs and inputs that share a scale. `None` if they have
    /// different codes, or some are not quantised.
    pub codes: Option<(Code, [usize; 2])>,
}

impl Outline {
    /// Reads the outline of remote files, for loading in `mode`. Makes every check that needs no weights.
    #[cfg_attr(not(feature = "hub"), allow(dead_code))]
    pub(crate) fn read(files: &dyn RemoteFiles, mode: WeightsMode) -> Result<Self, Error> {
        let files = Files::Remote(files);
        let mend = "the repository holds no checkpoint in the format of transformers; choose another";
        let config = Config::parse(&files.require("config.json", mend)?, &files.path("config.json"))?;
        check_mode(&config, mode, &files.path("config.json"))?;
        let mut warnings = Vec::new();
        let store = Store::open(&files, &mut warnings)?;
        warnings.extend(store.unused_layers(&config));
        let matrices = store.matrices(&config, mode)?;
        Ok(Self { config, tensors: store.outline(), matrices, warnings })
    }
}

impl Checkpoint {
    /// What the config and the headers of this model tell.
    ///
    /// # Errors
    /// As [`weights`](Self::weights).
    pub fn outline(&self) -> Result<Outline, Error> {
        let matrices = self.store.matrices(&self.config, self.mode)?;
        let (config, warnings) = (self.config.clone(), self.warnings.clone());
        Ok(Outline { config, tensors: self.store.outline(), matrices, warnings })
    }
}

impl Store {
    /// Every kind of weight.
    fn matrices(&self, config: &Config, mode: WeightsMode) -> Result<Vec<MatrixOutline>, Error> {
        let weights = self.weight_ids(config, mode)?;
        let mut kinds = ["qkv", "output", "gate_up", "down", "embedding", "head", "norms and biases"].map(|kind| {
            let format = String::new();
            MatrixOutline { kind, format, weights: 0, stored_bytes: 0, format_bytes: 0, quantized: false, codes: None }
        });
        let [qkv, output, gate_up, down, embedding, head, others] = &mut kinds;
        for layer in &weights.layers {
            [&layer.q, &layer.k, &layer.v].iter().for_each(|id| self.count(id, qkv));
            self.count(&layer.o, output);
            [&layer.gate, &layer.up].iter().for_each(|id| self.count(id, gate_up));
            self.count(&layer.down, down);
            let vectors = [&layer.input_norm, &layer.post_attention_norm].into_iter();
            let vectors = vectors.chain(layer.qkv_bias.iter().flatten()).chain(layer.head_norms.iter().flatten());
            vectors.for_each(|id| self.count(id, others));
        }
        self.count(&weights.norm, others);
        self.count(&weights.embed, embedding);
        if !config.tie_word_embeddings {
            self.count(&weights.head, head);
        }
        Ok(kinds.into_iter().filter(|kind| kind.weights > 0).collect())
    }

    /// Adds a weight to its kind.
    fn count(&self, id: &WeightId, kind: &mut MatrixOutline) {
        let stored = self.bytes_of(id);
        let (format, weights, bytes): (_, usize, _) = match id {
            WeightId::Plain(id) => {
                let tensor = &self.tensors[id.0];
                (tensor.dtype.to_string(), tensor.shape.iter().product(), stored)
            }
            WeightId::Quantized(id) => {
                kind.quantized = true;
                (id.format.name(), id.shape.iter().product(), id.format.compact_bytes(id.shape, stored))
            }
        };
        let codes = match id {
            WeightId::Quantized(id) => {
                let [outputs, inputs] = id.shape;
                Some((id.format.code(), [id.format.outputs_of_scale(outputs), id.format.group(inputs)]))
            }
            WeightId::Plain(_) => None,
        };
        kind.codes = match (kind.codes, codes) {
            (_, codes) if kind.weights == 0 => codes,
            (Some((a, [outputs, inputs])), Some((b, other))) if a == b => {
                Some((a, [outputs.min(other[0]), inputs.min(other[1])]))
            }
            _ => None,
        };
        if !kind.format.split("; ").any(|known| known == format) {
            let between = if kind.format.is_empty() { "" } else { "; " };
            kind.format += &format!("{between}{format}");
        }
        kind.weights += weights as u64;
        kind.stored_bytes += stored;
        kind.format_bytes += bytes;
    }

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
