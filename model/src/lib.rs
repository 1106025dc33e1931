//! What a model is, with no GPU in it: config and [plan], checkpoint, tokenizer, chat template, sampler and a CPU
//! reference forward pass. [`family`] lists the models that are supported.
//!
//! The way in is [`Source`]: it parses what the user wrote (a directory, a hub id or `demo`) and resolves to a
//! [`Checkpoint`], which owns the weights (memory-mapped, or part of the program) and everything that is read
//! beside them. [`CpuModel`] runs one on the CPU; a GPU backend uploads [`Checkpoint::weights`].
//!
//! Every error is an [`Error`], whose message names the file or tensor at fault and says what to do.

pub mod chat;
pub mod checkpoint;
pub mod config;
pub mod cpu;
mod error;
pub mod family;
pub mod form;
pub mod format;
mod hub;
pub mod plan;
mod quiet;
pub mod rope;
pub mod sampling;
pub mod source;
pub mod text;
pub mod tokenizer;

pub use chat::{ChatTemplate, Conversation, Message, Role};
pub use checkpoint::{Checkpoint, Dtype, EagleHead, EagleWeights, LayerWeights, OpenOptions, Outline, Tensor, Weights};
pub use config::{Config, GenerationConfig};
pub use cpu::{CpuEagle, CpuModel, Fault, HiddenStates, KvCache, KvPages, Place, Row, Taps};
pub use error::Error;
pub use family::Family;
pub use form::{Form, Forms, Matcher, Shape};
pub use format::{CheckpointFormat, Codes, QuantizedMatrix, Weight, WeightsMode};
pub use plan::LayerPlan;
pub use sampling::Sampling;
pub use source::{DownloadProgress, Source};
pub use tokenizer::{TokenStream, Tokenizer};
