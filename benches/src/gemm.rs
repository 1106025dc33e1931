//! The GEMM of prompts as other libraries have it, for comparison with them.

use bench_kernels::gemm as kernels;
use host::gemm::{Epilogue, Family};

/// Rounds sums to bf16. The device must be [opened](crate::options) with the kernels for measuring.
pub const PLAIN: Epilogue = Epilogue::Other(&Family::of::<
    kernels::gemm_plain_n128,
    kernels::gemm_plain_n192,
    kernels::gemm_plain_n256,
    kernels::gemm_plain_2x1,
    kernels::gemm_plain_4x2,
>("plain"));
