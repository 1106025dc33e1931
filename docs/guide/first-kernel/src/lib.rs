//! The kernels, compiled for the device.

pub use kernels::{SHARED_BYTES, Sum, THREADS, sum};

/// The PTX of the crate `kernels`.
pub const PTX: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"));
