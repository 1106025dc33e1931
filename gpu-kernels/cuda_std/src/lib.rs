//! What a kernel may use, with two bodies for each intrinsic: PTX on `nvptx64`, an emulation on the host.
//!
//! A kernel crate depends on nothing else, so the same source runs on a GPU and, lane by lane, on a CPU. The modules
//! below are the interface; they hold no PTX. Each forwards to `target`, which is the module `ptx` when the crate is
//! compiled for the device, and `emulator::target` otherwise: two sets of functions with the same signatures.
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

pub use cuda_std_macros::{Layout, kernel};
pub use global::{Global, GlobalMut};
pub use half::{bf16, f16};
pub use layout::Layout;

/// The code of README.md is tested.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

// What the macros write names this crate, also within it.
extern crate self as cuda_std;

/// Tells the compiler that `condition` holds, so that it need not provide for the contrary, such as a division by zero.
/// The emulator asks whether it does.
///
/// # Safety
/// It holds.
///
/// # Panics
/// Under the emulator, if it does not.
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

/// Implemented by the marker type that [`kernel`](macro@kernel) makes, so that a launch can name its kernel as a type.
pub trait Kernel {
    /// The parameter block, laid out as the device reads it.
    type Params: Copy + Layout + 'static;
    /// The name of the entry point in the PTX module.
    const NAME: &'static str;
    /// The PTX module that it is in: `"main"`, or what the attribute names.
    const MODULE: &'static str;
    /// The digest of the parameter block, which the PTX module holds too.
    const LAYOUT: u64 = Self::Params::DIGEST;
    /// The block size.
    const THREADS: u32;
    /// Blocks of a cluster, neighbours in x.
    const CLUSTER: u32;

    /// What one lane runs when the grid is emulated.
    ///
    /// # Safety
    /// The kernel's own contract.
    #[cfg(not(target_arch = "nvptx64"))]
    unsafe fn lane(params: Self::Params);
}
