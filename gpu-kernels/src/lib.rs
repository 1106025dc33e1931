//! All device code of warpdraft: one module for each family of kernels.
//!
//! The crate is compiled twice: to PTX for the device, and as an ordinary library for the host. Parameter blocks,
//! constants and memory layouts are defined here once and serve both sides. Kernels use nothing but [`cuda_std`], so
//! they also run on a CPU, lane by lane, under `cuda_std::emulator`. That is how the tests beside this crate compare
//! each kernel with a plain reference.
//!
//! The forward pass of one step, in order: [`embedding`]; for each layer [`linear`] (query, key and value), [`qkv`]
//! (per-head norm, rotary embedding, cache append), [`attention`], [`linear`] (output, into the residual), [`linear`]
//! (gate and up with SwiGLU) and [`linear`] (down, into the residual); then [`linear`] (the head), [`mask`] if an
//! answer must have a given form, and [`sample`]. [`norm`] is fused into its neighbours. From Hopper on, `decode` does
//! all of that in one launch. On Hopper, the rows of a prompt run [`gemm`] and [`prefill_attention`].
//!
//! Drafts come from [`ngram`], [`draft_model`] and [`eagle`]. [`kv`], [`weights`], [`e4m3`] and [`activations`] are
//! layouts. [`ring`] and [`exchange`] are the ways in which warps and CTAs hand over data, and [`token_copy`] moves
//! pages to and from the host.
//!
//! [`step`] has what one step hands to the next: the rows to run, and the accepted tokens. [`drafting`] decides how
//! many of the proposed drafts a step runs, and [`tree`] which nodes of a drafter's tree. [`batch`] has what a step of
//! many sequences needs besides, and [`logprobs`] the log-probabilities that its sequences may ask for. On Hopper
//! `batched` does such a step in one launch, and reads KV pages that [`packed`] made smaller.
//!
//! All kernels read weights in one layout, [`stream`]. They know no model: sizes and strides are parameters.
//!
//! Kernels that only benchmarks launch are in the crate `bench-kernels`, beside the benchmarks: ceilings, ladders,
//! peers, and separate versions of kernels that are fused here. They are built from this crate's functions.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch, stdarch_nvptx), allow(unused_features))]
// As a dependency of another kernel crate, this one has no kernels, and what only kernels call is dead code.
#![cfg_attr(target_arch = "nvptx64", allow(dead_code))]
// A kernel's body is unsafe throughout, since it trusts every address that the launcher passes. The parameter block
// says once what makes the kernel sound: which regions the launcher must pass.
#![warn(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

#[cfg(not(target_arch = "nvptx64"))]
extern crate alloc;

#[macro_use]
mod entry_points;
#[macro_use]
mod unroll;

/// Most dynamic shared memory of a CTA on Hopper, in bytes.
pub const HOPPER_SHARED_BYTES: u32 = 227 << 10;

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
