//! Everything that can be wrong with a model that a user names. Each error is a sentence that says what to do about it.

use std::path::PathBuf;

use crate::{Dtype, WeightsMode};

/// What went wrong; [`Display`](std::fmt::Display) is a sentence that names the file, tensor or setting and says what
/// to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `--model` names nothing: not a directory, not a hub id, not `demo`.
    #[error(
        "there is no model at `{given}`: give a directory that holds config.json, a hub id such as Qwen/Qwen3-8B, or `demo`"
    )]
    NoSuchModel {
        /// What the user wrote.
        given: String,
    },
    /// `--model` names a file.
    #[error(
        "there is no model at `{given}`, which is a file: give the directory that holds config.json and .safetensors \
         files; GGUF files are not read"
    )]
    ModelIsFile {
        /// What the user wrote.
        given: String,
    },
    /// A file that every checkpoint has is not there.
    #[error("{} is missing: {mend}", path.display())]
    MissingFile {
        /// The file looked for.
        path: PathBuf,
        /// What to do about it.
        mend: &'static str,
    },
    /// The operating system refused to read a file.
    #[error("cannot read {}: {source}; check that it is a file and that you may read it", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A FIFO, a device or the like has the name of one of a checkpoint's files. (A directory is `Error::Io`.)
    #[error(
        "{} is not a regular file, as all of a checkpoint are: put the file itself there, or a link to it",
        path.display()
    )]
    NotAFile {
        /// What is there.
        path: PathBuf,
    },
    /// A JSON file does not parse, or a field has the wrong type.
    #[error("{} is not what it should be: {reason}; fetch the file again", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason, with line and column.
        reason: String,
    },
    /// The config names an architecture that [`family`](crate::family) does not have.
    #[error("{} describes a `{found}` model{hint}; warpdraft runs {supported}: choose one of these", path.display())]
    UnsupportedArchitecture {
        /// `config.json`.
        path: PathBuf,
        /// The architecture that it names.
        found: String,
        /// The architectures that are supported, with models of each.
        supported: String,
        /// A further clause for a near miss such as mixture-of-experts Qwen3, or nothing.
        hint: &'static str,
    },
    /// An EAGLE-3 head was asked for, and the config describes something else.
    #[error(
        "{} describes a `{found}`, which is no EAGLE-3 head: heads of LlamaForCausalLMEagle3, and of speculators with \
         speculators_model_type eagle3, are run; name one of these, or a whole model with --draft model:MODEL",
        path.display()
    )]
    NotAHead {
        /// `config.json`.
        path: PathBuf,
        /// The architecture or type that it names.
        found: String,
    },
    /// An EAGLE-3 head is made for another model.
    #[error(
        "the EAGLE-3 head of {} is made for another model: its {what} is {head}, and the model's is {model}; choose the \
         head that was made for this model",
        path.display()
    )]
    HeadDoesNotFit {
        /// `config.json`.
        path: PathBuf,
        /// The setting that differs.
        what: &'static str,
        /// Its value in the head.
        head: String,
        /// Its value in the model.
        model: String,
    },
    /// A token of an EAGLE-3 head stands for no token of the model.
    #[error(
        "`d2t` in {} puts token {token} of the head {offset} further on, where there is no token by `t2d` and a \
         vocabulary of {vocab}: the weights are damaged; fetch the file again", path.display()
    )]
    HeadToken {
        /// The weights file or the index.
        path: PathBuf,
        /// The head's token.
        token: usize,
        /// Its entry in `d2t`, which is added to the head's token to get the model's.
        offset: i64,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
    /// A setting of `config.json` that this implementation does not compute.
    #[error("{} sets `{field}` to {value}, which warpdraft does not support: {mend}", path.display())]
    UnsupportedSetting {
        /// `config.json`.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value, as JSON.
        value: String,
        /// What to do about it.
        mend: &'static str,
    },
    /// A setting has a value that no model can have.
    #[error("{} gives `{field}` the impossible value {value}: {reason}; fetch the file again", path.display())]
    InvalidSetting {
        /// The config file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        reason: &'static str,
    },
    /// A safetensors file is not as long as its header says.
    #[error("{} holds {actual} bytes where its header describes {expected}: the file is cut short or has been overwritten; fetch it again", path.display())]
    WrongLength {
        /// The shard.
        path: PathBuf,
        /// Bytes that the header accounts for.
        expected: u64,
        /// Bytes in the file.
        actual: u64,
    },
    /// The header of a safetensors file cannot be read at all.
    #[error("{} has no readable safetensors header: {reason}; fetch the file again", path.display())]
    Header {
        /// The shard.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A header entry contradicts itself or its neighbours.
    #[error("the header of {} lies about `{tensor}`: {reason}; fetch the file again", path.display())]
    HeaderEntry {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What does not add up.
        reason: String,
    },
    /// A tensor is stored in a number format that warpdraft does not read.
    #[error("`{tensor}` in {} is stored as {dtype}, and warpdraft reads BF16, F16, F32, of quantised weights F8_E4M3, I32 and I64, and BOOL: use another checkpoint, such as the one in bf16", path.display())]
    UnsupportedDtype {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The format's name in the header.
        dtype: String,
    },
    /// A tensor's number format is not one that config.json allows, such as codes where weights are expected.
    #[error("`{tensor}` in {} is stored as {found}, and {wanted}: the weights and config.json are of different models; fetch both again", path.display())]
    WrongDtype {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its format.
        found: Dtype,
        /// What it should be, and according to what: `it should be F16 by …`.
        wanted: String,
    },
    /// A scale of a quantised matrix is not a finite number, or makes a weight that bf16 cannot hold.
    #[error(
        "`{tensor}` in {} gives row {row} of the matrix, group {group} (counted from 0), the scale {value}, of which no weight can be made: the weights are damaged; fetch the file again",
        path.display()
    )]
    BadScale {
        /// The shard.
        path: PathBuf,
        /// The tensor of scales.
        tensor: String,
        /// The output (row of the matrix), counted from 0.
        row: usize,
        /// The group of inputs, counted from 0.
        group: usize,
        /// The scale.
        value: f32,
    },
    /// An input of a quantised matrix is assigned to a group that does not exist.
    #[error("element {index} of `{tensor}` in {} is {value}, and there are {groups} groups: the weights are damaged; fetch the file again", path.display())]
    GroupOutOfRange {
        /// The shard.
        path: PathBuf,
        /// The tensor that lists the groups.
        tensor: String,
        /// The input, counted from 0.
        index: usize,
        /// The group that is named.
        value: i32,
        /// How many groups there are.
        groups: usize,
    },
    /// Weights are to be quantised while loading, but are quantised already.
    #[error("--weights {asked}: the weights in {} are quantised already ({format}); leave --weights out, or take the checkpoint in bf16", path.display())]
    AlreadyQuantized {
        /// `config.json`.
        path: PathBuf,
        /// What was asked for.
        asked: WeightsMode,
        /// How the weights are stored.
        format: String,
    },
    /// The index names a tensor that the shard does not hold.
    #[error("{} should hold `{tensor}` by the index, and does not{}: the shard belongs elsewhere or was swapped; fetch it again", path.display(),
        found_in.as_ref().map(|f| format!(" (it is in {f})")).unwrap_or_default())]
    TensorNotInShard {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shard that does hold it, if one does.
        found_in: Option<String>,
    },
    /// No file holds a tensor that the config calls for.
    #[error("{} lacks the tensor `{tensor}` that config.json calls for: the weights and config.json are of different models, or a shard is missing from the index; fetch both again", path.display())]
    MissingTensor {
        /// The weights file or the index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor's shape is not the one that the config calls for.
    #[error("`{tensor}` in {} has shape {found:?} where config.json calls for {expected:?}: the weights and config.json are of different models; fetch both again", path.display())]
    Shape {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape by the config.
        expected: Vec<usize>,
    },
    /// The weights hold a tensor, such as a norm or a bias, that the model should not have by its config.
    #[error("`{tensor}` in {} is no weight of a {architecture} as config.json describes it: the weights and config.json are of different models; fetch both again", path.display())]
    UnexpectedTensor {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The architecture.
        architecture: &'static str,
    },
    /// A weight is NaN or infinite.
    #[error("element {index} of `{tensor}` in {} is {value}: the weights are damaged; fetch the file again", path.display())]
    NotFinite {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Which element, counted from 0 in row-major order.
        index: usize,
        /// The value: NaN, inf or -inf.
        value: f32,
    },
    /// A weight is finite as stored, but would not be in bf16.
    #[error(
        "element {index} of `{tensor}` in {} is {value}, which bf16, the format that weights are computed with, cannot hold \
         (its largest number is 3.39e38): the weights are damaged; fetch the file again", path.display()
    )]
    TooLargeForBf16 {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Which element, counted from 0 in row-major order.
        index: usize,
        /// The value.
        value: f32,
    },
    /// `tokenizer.json` does not load.
    #[error("{} is not a tokenizer that warpdraft can use: {reason}; fetch the file again", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A token id lies outside the embedding.
    #[error("{} gives {token:?} the id {id}, and config.json has a vocabulary of {vocab_size}: the tokenizer and the weights are of different models; fetch both again", path.display())]
    TokenizerDoesNotFit {
        /// The file.
        path: PathBuf,
        /// The token.
        token: String,
        /// Its id.
        id: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer cannot encode this text: {reason}")]
    Encode {
        /// Why.
        reason: String,
    },
    /// The chat template does not compile or does not render.
    #[error("the chat template in {} fails: {reason}", path.display())]
    ChatTemplate {
        /// The file that holds it.
        path: PathBuf,
        /// The engine's reason, with the line.
        reason: String,
    },
    /// The download from the hub failed.
    #[error("cannot fetch `{id}` (revision {revision}) from the hub: {reason}; {mend}")]
    Download {
        /// Hub id.
        id: String,
        /// Branch, tag or commit.
        revision: String,
        /// The client's reason.
        reason: String,
        /// What to do about it.
        mend: &'static str,
    },
    /// There is nowhere to look for downloads, or to keep them.
    #[error(
        "there is no home directory to keep downloads in: set HF_HOME to a folder for them, or name a model's directory"
    )]
    NoHome,
    /// A token outside the vocabulary was given to the forward pass.
    #[error(
        "token id {token} is outside the vocabulary of {vocab_size}: encode the prompt with this model's own tokenizer"
    )]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The forward pass gave NaN or infinity, although every weight is finite.
    #[error(
        "the model's {what} for position {position} are not finite numbers (NaN or infinity): the weights or the \
         config do not fit \
         each other, or are damaged; compare the files with their source"
    )]
    OutputNotFinite {
        /// A layer's outputs, or the logits.
        what: String,
        /// The position, counted from 0, of the token that went into the layer, or that the logits are to choose.
        position: usize,
    },
    /// The KV cache is full.
    #[error(
        "the KV cache has room for {capacity} tokens and {needed} are needed: shorten the prompt or ask for a longer context"
    )]
    CacheFull {
        /// Positions in the cache.
        capacity: usize,
        /// Positions that would be filled after the call.
        needed: usize,
    },
    /// A row's page table ends before its position, or names a page that is not there.
    #[error("a row at position {position} has no page for it or one before it among {pages} pages")]
    PageMissing {
        /// The row's position in its sequence.
        position: usize,
        /// Pages that there are.
        pages: usize,
    },
    /// An output buffer has the wrong length.
    #[error("the logits buffer holds {found} numbers and {expected} are needed ({rows} rows of {vocab_size})")]
    LogitsBuffer {
        /// Length given.
        found: usize,
        /// Length needed.
        expected: usize,
        /// Rows of logits asked for.
        rows: usize,
        /// Columns of a row.
        vocab_size: usize,
    },
    /// A sampling setting outside its range.
    #[error("`{setting}` is {value}, and {reason}")]
    SamplingRange {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: f32,
        /// What it must be.
        reason: &'static str,
    },
    /// The form that an answer should have cannot be followed.
    #[error("the form of the answer cannot be followed: {reason}")]
    Form {
        /// Which part of it, and what to change.
        reason: String,
    },
    /// The model's answers cannot be held to any form.
    #[error("this model's answers cannot be held to a form: {reason}; ask for none, or name another model")]
    NoForms {
        /// What is missing.
        reason: String,
    },
}
