//! A model on disk or in the program: config, tokenizer, chat template and weights. Weights are mapped, not read.

mod dtype;
mod eagle;
mod files;
mod finite;
mod header;
mod outline;
mod weights;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rayon::prelude::*;
use serde::Deserialize;
use xxhash_rust::xxh3::Xxh3;

pub use dtype::Dtype;
pub use eagle::{EagleHead, EagleWeights};
pub use weights::{LayerWeights, Weights};

use crate::Error;
use crate::chat::{ChatTemplate, TokenizerConfig};
use crate::config::{Config, GenerationConfig, parse_json};
use crate::format::WeightsMode;
use crate::tokenizer::Tokenizer;
pub(crate) use files::read_regular;
use files::{Bytes, Files};
#[cfg(feature = "hub")]
pub(crate) use files::{Header, RemoteFiles};
#[cfg(feature = "hub")]
pub(crate) use header::LARGEST_HEADER;
pub use outline::{MatrixOutline, Outline, OutlineTensor};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// The linear layer that has `HEAD` as its weight.
const HEAD_LAYER: &str = "lm_head";
/// The files beside the weights that say what the model does.
const TEXTS: [&str; 5] =
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// A model: everything that its files say. Cloning shares the weights and the tokenizer.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Sizes and constants.
    pub config: Config,
    /// Default sampling, and the ids that end a reply.
    pub generation: GenerationConfig,
    /// Text to token ids and back.
    pub tokenizer: Tokenizer,
    /// How a conversation becomes a prompt, if the checkpoint says.
    pub chat_template: Option<ChatTemplate>,
    /// Contradictions between its files, and how each was resolved: sentences for the user.
    pub warnings: Vec<String>,
    /// What the matrices of the layers become while they are read.
    pub mode: WeightsMode,
    /// Digest of the files beside the weights.
    text_digest: u64,
    store: Arc<Store>,
}

/// What [`Checkpoint::open_with`] checks, and how it reads weights.
#[derive(Debug, Clone, Copy)]
pub struct OpenOptions {
    /// Whether every weight is read once to find NaN and infinity. On by default: it costs one pass over the file at
    /// the disk's speed, which loading pays anyway.
    pub check_finite: bool,
    /// What the matrices of the layers become while they are read.
    pub weights: WeightsMode,
}

impl Default for OpenOptions {
    fn default() -> Self {
        OpenOptions { check_finite: true, weights: WeightsMode::Plain }
    }
}

/// One tensor, in place.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// Name in the checkpoint.
    pub name: &'a str,
    /// Number format.
    pub dtype: Dtype,
    /// Sizes, slowest first.
    pub shape: &'a [usize],
    /// Elements, row-major, little-endian. They may start at any address, aligned or not.
    pub data: &'a [u8],
}

/// Handle of a tensor within its checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorId(usize);

/// The weights' bytes and where each tensor lies in them.
#[derive(Debug)]
struct Store {
    /// The file that lists the tensors, for messages: the index or the only shard.
    listing: PathBuf,
    shards: Vec<Shard>,
    tensors: Vec<Stored>,
    by_name: HashMap<String, TensorId>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
struct Stored {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    shard: usize,
    bytes: Range<usize>,
}

impl Checkpoint {
    /// Opens the checkpoint in a directory and checks it: header, names, shapes, tokenizer, and that every weight is
    /// finite.
    ///
    /// # Errors
    /// Any [`Error`] about files and their content.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        Self::open_with(dir, OpenOptions::default())
    }

    /// As [`open`](Self::open), with options.
    ///
    /// # Errors
    /// Any [`Error`] about files and their content.
    pub fn open_with(dir: &Path, options: OpenOptions) -> Result<Self, Error> {
        Self::from_files(&Files::Dir(dir.to_owned()), options)
    }

    /// The demo model: part of the program, or the source folder `model/demo` if built without `bundled-demo`.
    ///
    /// # Errors
    /// None in a released program. Any [`Error`] about files and their content while the demo's own files are being
    /// worked on.
    pub fn demo() -> Result<Self, Error> {
        Self::demo_with(OpenOptions::default())
    }

    /// As [`demo`](Self::demo), with options.
    ///
    /// # Errors
    /// As [`demo`](Self::demo).
    pub fn demo_with(options: OpenOptions) -> Result<Self, Error> {
        #[cfg(feature = "bundled-demo")]
        let files = Files::Embedded(crate::source::DEMO_FILES);
        #[cfg(not(feature = "bundled-demo"))]
        let files = Files::Dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("demo"));
        Self::from_files(&files, options)
    }

    fn from_files(files: &Files<'_>, options: OpenOptions) -> Result<Self, Error> {
        const FETCH: &str = "a checkpoint directory holds config.json, tokenizer.json and the safetensors; fetch the file, or name another directory";
        let config_path = files.path("config.json");
        let mut config = Config::parse(&files.require("config.json", FETCH)?, &config_path)?;

        let tokenizer_path = files.path("tokenizer.json");
        let tokenizer = Tokenizer::parse(&files.require("tokenizer.json", FETCH)?, &tokenizer_path)?;
        tokenizer.check_fits(config.vocab_size, &tokenizer_path)?;

        let tokenizer_config_path = files.path("tokenizer_config.json");
        let tokenizer_config = match files.read("tokenizer_config.json")? {
            Some(json) => TokenizerConfig::parse(&json, &tokenizer_config_path)?,
            None => TokenizerConfig::default(),
        };
        let eos_token = tokenizer_config.special_tokens.get("eos_token").cloned();
        let chat_template = Self::find_template(files, tokenizer_config, &tokenizer_config_path)?;

        let mut eos_path = files.path("generation_config.json");
        let mut generation = match files.read("generation_config.json")? {
            Some(json) => GenerationConfig::parse(&json, &eos_path)?,
            None => GenerationConfig::default(),
        };
        if generation.eos_token_ids.is_empty() {
            generation.eos_token_ids = config.eos_token_ids.clone();
            eos_path = config_path;
        }
        if generation.eos_token_ids.is_empty() {
            // The tokenizer's own ids are in range: `check_fits` made sure.
            generation.eos_token_ids = eos_token.and_then(|token| tokenizer.token_to_id(&token)).into_iter().collect();
        }
        if let Some(id) = generation.eos_token_ids.iter().find(|id| **id as usize >= config.vocab_size) {
            return Err(Error::InvalidSetting {
                path: eos_path,
                field: "eos_token_id",
                value: id.to_string(),
                reason: "it must be below config.json's vocab_size",
            });
        }

        check_mode(&config, options.weights, &files.path("config.json"))?;
        let mut text_digest = Xxh3::new();
        for name in TEXTS {
            let text = files.read(name)?;
            // The length says where each text ends; `u64::MAX` stands for a file that is not there.
            text_digest.update(&text.as_ref().map_or(u64::MAX, |text| text.len() as u64).to_le_bytes());
            text_digest.update(text.as_deref().unwrap_or_default());
        }
        let text_digest = text_digest.digest();
        let mut warnings = Vec::new();
        let store = Arc::new(Store::open(files, &mut warnings)?);
        if config.tie_word_embeddings && store.head_differs() {
            config.tie_word_embeddings = false;
            warnings.push(format!(
                "{} ties the head to the embedding, and the weights hold a head of their own that differs from it: \
                 the head is used, as \
                 transformers does; set tie_word_embeddings to false if that is right",
                files.path("config.json").display()
            ));
        }
        warnings.extend(store.unused_layers(&config));
        let mode = options.weights;
        let checkpoint =
            Checkpoint { config, generation, tokenizer, chat_template, warnings, mode, text_digest, store };
        checkpoint.weight_ids()?;
        if options.check_finite {
            checkpoint.check_finite(&|_| {})?;
        }
        Ok(checkpoint)
    }

    /// The chat template: `chat_template.jinja` if there is one, else the field of `tokenizer_config.json`.
    fn find_template(
        files: &Files<'_>,
        tokenizer_config: TokenizerConfig,
        tokenizer_config_path: &Path,
    ) -> Result<Option<ChatTemplate>, Error> {
        let jinja_path = files.path("chat_template.jinja");
        let (source, path) = match files.read("chat_template.jinja")? {
            Some(text) => {
                let text = String::from_utf8(text.into_owned()).map_err(|_| Error::ChatTemplate {
                    path: jinja_path.clone(),
                    reason: "the file is not UTF-8 text; fetch it again".to_owned(),
                })?;
                (Some(text.into()), jinja_path.as_path())
            }
            None => (tokenizer_config.chat_template, tokenizer_config_path),
        };
        source.map(|source| ChatTemplate::new(source, tokenizer_config.special_tokens, path)).transpose()
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// [`Error::MissingTensor`].
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, Error> {
        Ok(self.tensor_by_id(self.store.lookup(name)?))
    }

    /// All tensors, shard by shard in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        self.store.tensors()
    }

    /// A digest (XXH3) that tells models apart, wherever they are stored. It covers how weights are rounded while
    /// loading, all files beside the weights, and the name, number format, shape and a sample of the bytes of each
    /// tensor. So it takes little time, but may miss a few weights that were changed by hand.
    pub fn digest(&self) -> u64 {
        const PIECES: usize = 8;
        const PIECE_BYTES: usize = 64;
        let mut tensors: Vec<Tensor<'_>> = self.tensors().collect();
        tensors.sort_by_key(|tensor| tensor.name);
        let mut digest = Xxh3::new();
        digest.update(&self.text_digest.to_le_bytes());
        if self.mode.rounding().is_some() {
            // Rounding makes other weights of the same files.
            digest.update(self.mode.to_string().as_bytes());
        }
        for Tensor { name, dtype, shape, data } in tensors {
            digest.update(format!("{name} {dtype:?} {shape:?}\n").as_bytes());
            let last = data.len().saturating_sub(PIECE_BYTES);
            for i in 0..PIECES {
                let start = last * i / (PIECES - 1);
                digest.update(&data[start..data.len().min(start + PIECE_BYTES)]);
            }
        }
        digest.digest()
    }

    /// Bytes of all tensors as they are stored.
    pub fn stored_bytes(&self) -> u64 {
        self.store.tensors.iter().map(|t| t.bytes.len() as u64).sum()
    }

    /// Bytes of the weights in the form that the CPU multiplies with: as stored, or bf16 if they are quantised.
    pub fn cpu_bytes(&self) -> u64 {
        if self.config.quantization.is_none() && self.mode.rounding().is_none() {
            return self.stored_bytes();
        }
        // Weights that are not quantised are few beside the rest, or bf16 as well.
        self.config.weight_bytes(2) as u64
    }

    /// The file that holds a tensor, for messages; `None` if there is no such tensor.
    pub fn tensor_file(&self, name: &str) -> Option<&Path> {
        let id = self.store.by_name.get(name)?;
        Some(&self.store.shards[self.store.tensors[id.0].shard].path)
    }

    /// Copies the stored bytes of a tensor, from byte `at` on, to `out`.
    pub(crate) fn read_stored(&self, name: &str, at: usize, out: &mut [u8]) -> Result<(), Error> {
        let stored = &self.store.tensors[self.store.lookup(name)?.0];
        let shard = &self.store.shards[stored.shard];
        let read = shard.bytes.read(stored.bytes.start + at, out);
        read.map_err(|source| Error::Io { path: shard.path.clone(), source })
    }

    pub(crate) fn tensor_by_id(&self, id: TensorId) -> Tensor<'_> {
        self.store.tensor(id)
    }
}

/// Refuses to quantise weights that are quantised already.
fn check_mode(config: &Config, asked: WeightsMode, path: &Path) -> Result<(), Error> {
    match &config.quantization {
        Some(quantization) if asked.rounding().is_some() => {
            Err(Error::AlreadyQuantized { path: path.to_owned(), asked, format: quantization.name() })
        }
        _ => Ok(()),
    }
}

/// `model.safetensors.index.json`: which shard holds which tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Store {
    fn tensors(&self) -> impl ExactSizeIterator<Item = Tensor<'_>> {
        (0..self.tensors.len()).map(|i| self.tensor(TensorId(i)))
    }

    fn tensor(&self, id: TensorId) -> Tensor<'_> {
        let stored = &self.tensors[id.0];
        Tensor {
            name: &stored.name,
            dtype: stored.dtype,
            shape: &stored.shape,
            data: &self.shards[stored.shard].bytes[stored.bytes.clone()],
        }
    }

    /// Handle of a tensor of floats, its shape checked.
    fn tensor_id(&self, name: &str, shape: &[usize]) -> Result<TensorId, Error> {
        let id = self.lookup(name)?;
        let stored = &self.tensors[id.0];
        if stored.shape != shape {
            return Err(self.wrong_shape(id, shape));
        }
        if !stored.dtype.is_float() {
            let wanted = "it should hold weights by themselves (BF16, F16 or F32), by config.json".to_owned();
            return Err(self.wrong_dtype(id, wanted));
        }
        Ok(id)
    }

    fn wrong_shape(&self, id: TensorId, expected: &[usize]) -> Error {
        let Stored { name, shape, .. } = &self.tensors[id.0];
        let (tensor, found) = (name.clone(), shape.clone());
        Error::Shape { path: self.path(id).to_owned(), tensor, found, expected: expected.to_vec() }
    }

    fn wrong_dtype(&self, id: TensorId, wanted: String) -> Error {
        let Stored { name, dtype, .. } = &self.tensors[id.0];
        Error::WrongDtype { path: self.path(id).to_owned(), tensor: name.clone(), found: *dtype, wanted }
    }

    /// The file that holds a tensor.
    fn path(&self, id: TensorId) -> &Path {
        &self.shards[self.tensors[id.0].shard].path
    }

    fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    fn lookup(&self, name: &str) -> Result<TensorId, Error> {
        let missing = || Error::MissingTensor { path: self.listing.clone(), tensor: name.to_owned() };
        self.by_name.get(name).copied().ok_or_else(missing)
    }

    /// Maps the only file or all shards, and reads their headers.
    fn open(files: &Files<'_>, warnings: &mut Vec<String>) -> Result<Self, Error> {
        let index_path = files.path(INDEX);
        // transformers looks for the single file first.
        let single = files.has(SINGLE);
        let json = if single && !files.has(INDEX) { None } else { files.read(INDEX)? };
        let Some(json) = json else {
            return Self::from_shards(files, &[SINGLE.to_owned()], files.path(SINGLE));
        };
        let index: Result<Index, Error> = parse_json(&json, &index_path);
        if single {
            let of_it = index.is_ok_and(|index| index.weight_map.values().all(|shard| shard == SINGLE));
            if !of_it {
                warnings.push(format!(
                    "{} lies beside {INDEX}, which names other files: the single file is loaded, as transformers \
                     does; remove \
                     whichever is out of date",
                    files.path(SINGLE).display()
                ));
            }
            return Self::from_shards(files, &[SINGLE.to_owned()], files.path(SINGLE));
        }
        let index = index?;
        let mut names: Vec<String> = index.weight_map.values().cloned().collect();
        names.sort();
        names.dedup();
        for name in &names {
            // A shard lies beside its index; anything else would read files that the user did not name.
            if name.contains(['/', '\\']) || name == ".." {
                let reason = format!("the shard name {name:?} is not a plain file name");
                return Err(Error::Json { path: index_path, reason });
            }
        }
        let store = Self::from_shards(files, &names, index_path)?;
        for (tensor, shard) in &index.weight_map {
            let holder = store.by_name.get(tensor).map(|id| &names[store.tensors[id.0].shard]);
            if holder != Some(shard) {
                return Err(Error::TensorNotInShard {
                    path: files.path(shard),
                    tensor: tensor.clone(),
                    found_in: holder.cloned(),
                });
            }
        }
        Ok(store)
    }

    /// Whether the files hold both a head and an embedding, and the two differ.
    fn head_differs(&self) -> bool {
        let tensor = |name| {
            let stored = &self.tensors[self.by_name.get(name)?.0];
            Some((stored.dtype, &stored.shape, &self.shards[stored.shard].bytes[stored.bytes.clone()]))
        };
        let (Some(head), Some(embedding)) = (tensor(HEAD), tensor(EMBEDDING)) else { return false };
        if (head.0, head.1) != (embedding.0, embedding.1) {
            return true;
        }
        const TASK: usize = 1 << 20;
        !head.2.par_chunks(TASK).zip(embedding.2.par_chunks(TASK)).all(|(head, embedding)| head == embedding)
    }

    fn from_shards(files: &Files<'_>, names: &[String], listing: PathBuf) -> Result<Self, Error> {
        let mut store = Store { listing, shards: Vec::new(), tensors: Vec::new(), by_name: HashMap::new() };
        for (shard, name) in names.iter().enumerate() {
            let path = files.path(name);
            let Some((bytes, entries)) = files.shard(name)? else {
                let mend = "the weights are incomplete; fetch the file, or name another directory";
                return Err(Error::MissingFile { path, mend });
            };
            for entry in entries {
                let id = TensorId(store.tensors.len());
                if store.by_name.insert(entry.name.clone(), id).is_some() {
                    let reason = "another shard holds a tensor of that name too".to_owned();
                    return Err(Error::HeaderEntry { path, tensor: entry.name, reason });
                }
                let header::Entry { name, dtype, shape, bytes } = entry;
                store.tensors.push(Stored { name, dtype, shape, shard, bytes });
            }
            store.shards.push(Shard { path, bytes });
        }
        Ok(store)
    }
}
