//! The forward pass launch by launch, with what is fused today in launches of its own.

use bench_kernels::unfused::{rms_norm, silu_mul};
use host::Error;
use host::forward::Forward;

/// From now on, the unfused path of `forward` runs norms, or SiLU and its product, by themselves: for measuring what it
/// gains that they do not. The results differ in their last bits. The device was [opened](crate::options) with the
/// kernels for it.
///
/// # Errors
/// Too little memory, or a driver error.
pub fn take_apart(forward: &mut Forward, norms: bool, silu: bool) -> Result<(), Error> {
    // SAFETY: the kernels are written for these parameters.
    unsafe { forward.take_apart::<rms_norm, silu_mul>(norms, silu) }
}
