//! Batches: any number of requests at once, in steps of many rows.
//!
//! [`Batch`] takes requests and gives answers. Its loop is [`Steps`]. In it, the [`Scheduler`] decides what each step
//! runs and where every page of the cache is, without knowledge of the device, and a [`BatchBackend`] executes the
//! resulting [`Plan`]s. The answers are those that [`Engine`](crate::Engine) gives to the same requests one by one.

mod backend;
mod cpu;
mod draft;
mod gpu;
mod limits;
mod pace;
pub mod pages;
pub mod plan;
mod queue;
mod run;
mod running;
mod scheduler;
mod steps;
pub mod tier;

pub use backend::{BatchBackend, Logprobs, Outcome, Start};
pub use cpu::CpuBatch;
pub use gpu::GpuBatch;
pub use limits::{Costs, Counts, Limits};
pub use plan::Plan;
pub use queue::Queue;
pub use run::{Answer, Batch, BatchOptions, Done, Job, Metrics};
pub use scheduler::{Advance, Scheduler};
pub use steps::{Sequences, Steps};

/// Tokens of a page of the cache, on every device.
pub const PAGE_TOKENS: usize = gpu_kernels::kv::PAGE_TOKENS as usize;
