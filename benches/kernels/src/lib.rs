//! The device routines that only measurements launch, and those that results are compared with.
//!
//! - [`ceilings`]: what the card itself can do.
//! - [`token_copy`]: the ladder of the token-record gather, and its kernels for other records than pages.
//! - [`ngram`]: the n-gram operators for other token ids than the decode loop's, and slower designs.
//! - `gemm`: the GEMM of prompts as other libraries have it, rounded to bf16.
//! - [`script`]: drafts at a known acceptance.
//!
//! They consist of functions of `gpu_kernels`, and go into a PTX module of their own, `bench`. The crate `benches`
//! builds that module and hands it to a device; a program that measures nothing does not contain it.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch, stdarch_nvptx), allow(unused_features))]
// As in `gpu_kernels`: every address rests on the launcher's word, and each parameter block says what makes its kernel
// sound.
#![warn(clippy::missing_safety_doc, clippy::undocumented_unsafe_blocks)]

pub mod ceilings;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod gemm;
pub mod ngram;
pub mod script;
pub mod token_copy;
