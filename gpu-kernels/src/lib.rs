//! Every device routine of warpdraft, one family of kernels a module.
//!
//! The crate is compiled twice: to PTX for the device, and as an ordinary library for the host. Parameter blocks,
//! constants and memory layouts are defined here once and serve both sides. A kernel speaks [`cuda_std`] alone, so that
//! it also runs on a CPU, lane by lane, under `cuda_std::emulator`; the tests beside this crate compare each with a
//! plain reference that way.
//!
//! The forward pass of one step, in order: [`embedding`], then for each layer [`linear`] (query, key and value),
//! [`qkv`] (per-head norm, rotary embedding, cache append), [`attention`], [`linear`] (output, into the residual),
//! [`linear`] (gate and up with SwiGLU), [`linear`] (down, into the residual), then [`linear`] (the head), [`mask`]
//! where an answer has a form, and [`sample`]; [`norm`] is fused into its neighbours. On Hopper `decode` is all of that
//! in one launch, and the rows of a prompt run [`gemm`] and [`prefill_attention`]. [`step`] holds what the steps hand
//! to each other: the rows to run, and what was accepted; [`drafting`] how many of the proposed drafts a step runs, and
//! [`tree`] which of a drafter's tree; [`batch`] what a step of many sequences needs besides, [`logprobs`] what they
//! may ask for. `batched` is all of such a step in one launch on Hopper, and reads pages of keys and values that
//! [`packed`] made smaller.
//!
//! All of them read weights in one layout, [`stream`]. Kernels know no model: sizes and strides are parameters.
//!
//! What only measurements launch is the crate `bench-kernels` beside the benchmarks: ceilings, ladders, peers, and what
//! was fused since. It is made of this crate's functions.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch, stdarch_nvptx), allow(unused_features))]
// As a dependency of another kernel crate it has no kernels, and what they alone call is nobody's.
#![cfg_attr(target_arch = "nvptx64", allow(dead_code))]
// A kernel's body is unsafe throughout: every address is the launcher's word. What makes one sound is said once, in its
// parameter block: which regions the launcher must pass.
#![warn(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

#[cfg(not(target_arch = "nvptx64"))]
extern crate alloc;

#[macro_use]
mod entry_points;
#[macro_use]
mod unroll;

pub(crate) mod activations;
pub mod attention;
pub mod batch;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod batched;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
pub mod decode;
pub mod draft_model;
pub mod drafting;
pub mod e4m3;
pub mod eagle;
pub mod embedding;
pub mod exchange;
pub mod gate;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod gemm;
pub mod kv;
pub mod linear;
pub mod logprobs;
pub mod mask;
pub mod ngram;
pub mod norm;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod packed;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod prefill_attention;
pub mod qkv;
mod quad;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
mod ring;
pub mod sample;
pub mod step;
pub mod stream;
pub mod token_copy;
pub mod tree;
mod waiting;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
pub mod weights;
pub mod workspace;

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    cuda_std::thread::trap()
}
