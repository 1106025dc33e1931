//! Intrinsics for GPU kernels in Rust. Each has two bodies: PTX on `nvptx64`, and an emulation on the host.
//!
//! A kernel crate needs no other dependency, so the same source runs on a GPU and, lane by lane, on a CPU. The modules
//! below are the interface and hold no PTX. Each forwards to `target`: the module `ptx` when the crate is compiled for
//! the device, `emulator::target` otherwise. Both have functions of the same names and signatures.
//!
//! On the device `bulk`, `cluster`, `dependent_launch` and `tensor` exist from sm_90 on, and `wgmma` on sm_90a. On the
//! host all modules exist.
//!
//! ```
//! use cuda_std::emulator::{Buffer, Launch, launch};
//! use cuda_std::{Global, GlobalMut, Layout, kernel, thread};
//!
//! #[repr(C)]
//! #[derive(Clone, Copy, Layout)]
//! pub struct Double {
//!     input: Global<f32>,
//!     output: GlobalMut<f32>,
//! }
//!
//! /// Doubles each element.
//! #[kernel(threads = 32)]
//! pub unsafe fn double(p: Double) {
//!     let i = (thread::block_idx_x() * 32 + thread::thread_idx_x()) as usize;
//!     // SAFETY: both buffers hold one element for each lane of the grid.
//!     unsafe { p.output.store(i, p.input.load(i) * 2.0) }
//! }
//!
//! let input = Buffer::from_slice(&[1.0f32; 64]);
//! let output = Buffer::<f32>::new_poisoned(64);
//! launch::<double>(&Launch::new(2, 32), Double { input: input.ptr(), output: output.ptr_mut() }).unwrap();
//! assert_eq!(output.to_vec(), [2.0; 64]);
//! ```
#![cfg_attr(target_arch = "nvptx64", no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_unadjusted, asm_experimental_arch, link_llvm_intrinsics, stdarch_nvptx)
)]
#![cfg_attr(target_arch = "nvptx64", allow(internal_features, named_asm_labels))]

pub mod async_copy;
pub mod atomic;
mod global;
pub mod layout;
pub mod math;
pub mod mma;
pub mod shared;
pub mod thread;
pub mod warp;

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
pub mod bulk;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
pub mod cluster;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
pub mod dependent_launch;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
pub mod tensor;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub mod wgmma;

#[cfg(not(target_arch = "nvptx64"))]
pub mod emulator;
#[cfg(target_arch = "nvptx64")]
mod ptx;

#[cfg(not(target_arch = "nvptx64"))]
use emulator::target;
#[cfg(target_arch = "nvptx64")]
use ptx as target;

pub use cuda_std_macros::{Layout, device, kernel};
pub use global::{Global, GlobalMut};
pub use half::{bf16, f16};
pub use layout::Layout;

/// Makes the code in README.md run as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

// The macros' output names this crate `cuda_std`; this makes the name valid in the crate itself, too.
extern crate self as cuda_std;

/// Tells the compiler that `condition` holds, so that it can drop the code for the other case, such as the check of a
/// divisor for zero. The emulator checks the condition.
///
/// # Safety
/// `condition` holds.
///
/// # Panics
/// Under the emulator, if `condition` does not hold.
#[inline(always)]
#[track_caller]
pub unsafe fn assume(condition: bool) {
    #[cfg(target_arch = "nvptx64")]
    // SAFETY: the caller's.
    unsafe {
        core::hint::assert_unchecked(condition);
    }
    #[cfg(not(target_arch = "nvptx64"))]
    assert!(condition, "a kernel assumes what does not hold");
}

/// A kernel as a type. The [`kernel`](macro@kernel) attribute implements it for a marker type of the kernel's name, so
/// that a launch can name its kernel as a type.
pub trait Kernel {
    /// The type of the parameter block, which host and device lay out alike.
    type Params: Copy + Layout + 'static;
    /// The name of the entry point in the PTX module.
    const NAME: &'static str;
    /// The PTX module that the kernel is in: `"main"`, unless the attribute names another.
    const MODULE: &'static str;
    /// The digest of the parameter block's layout. The PTX module holds it too, so that whoever loads the module can
    /// compare.
    const LAYOUT: u64 = Self::Params::DIGEST;
    /// The block size: the most lanes that a block of a launch may have.
    const THREADS: u32;
    /// Blocks in a cluster, which are neighbours in x; 1 for a kernel without clusters.
    const CLUSTER: u32;

    /// Runs one lane of an emulated grid.
    ///
    /// # Safety
    /// The kernel's own contract.
    #[cfg(not(target_arch = "nvptx64"))]
    unsafe fn lane(params: Self::Params);
}
