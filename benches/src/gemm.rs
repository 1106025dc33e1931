//! The GEMM of prompts as others have it, to be compared with them.

use bench_kernels::gemm as kernels;
use host::gemm::{Epilogue, Family};

/// Rounds sums to bf16. The device was [opened](crate::options) with the kernels for it.
pub const PLAIN: Epilogue = Epilogue::Other(&Family::of::<
    kernels::gemm_plain_n128,
    kernels::gemm_plain_n192,
    kernels::gemm_plain_n256,
    kernels::gemm_plain_2x1,
    kernels::gemm_plain_4x2,
>("plain"));
