//! The kernels, run lane by lane under the emulator, against plain references.

mod attention;
mod batch;
mod batched;
mod batched_attention;
mod common;
mod draft_model;
mod e4m3;
mod eagle;
mod gemm;
mod linear;
mod logprobs;
mod lossless;
mod mask;
mod packed;
mod quantized;
mod rows;
mod sample;
mod step;
mod tree;
