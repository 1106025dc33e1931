//! Runs models on a device: PTX loading, typed launches, memory, the KV cache and the decode loop.
//!
//! Start with [`Engine`]: it loads a checkpoint on a device and generates text. [`batch::Batch`] answers many requests
//! at once. The folder `examples` has a short program for each, and one that launches a kernel by hand. Under an
//! engine, a [`Backend`] runs one sequence at a time: [`Gpu`] on a [`device::Device`] (a CUDA card, or the emulator),
//! [`Cpu`] with the reference implementation of `model`.

mod ahead;
pub mod backend;
pub mod batch;
pub mod cache;
mod cpu;
pub mod decode;
pub mod device;
mod draft;
pub mod drafter;
mod e4m3;
mod engine;
mod error;
pub mod forward;
pub mod gemm;
mod gpu;
mod lossless;
mod masks;
pub mod prefill;
pub mod profile;
mod prompt;
mod quantized;
mod row_buffers;
mod sampler;
pub mod stream;
mod timed;
pub mod tuning;
mod weight_storage;
pub mod weights;

pub use ahead::Opening;
pub use backend::{Backend, Drafted, PromptProgress, Sequence, Step};
pub use cpu::Cpu;
pub use draft::{Draft, DraftCheckpoint, ModelDraft, NgramDraft, Ngrams};
pub use engine::{DeviceChoice, Engine, Finish, Generation, Listener, LoadOptions, Request, Statistics};
pub use error::{Error, gib};
pub use gpu::{DraftWeights, Gpu};
pub use lossless::PackedSize;
pub use profile::Profile;
pub use prompt::encode_prompt;
pub use quantized::Coding;
pub use weight_storage::{MatrixFormat, WeightStorage};

/// A callback of loading: it is told the bytes loaded so far and the bytes in all, and stops the load by returning
/// `Break`.
pub type Progress<'a> = dyn FnMut(u64, u64) -> std::ops::ControlFlow<()> + 'a;
