//! The ladder of the token-record gather, [`gpu_kernels::token_copy`], and its kernels for other records than pages.
//!
//! Each of these kernels copies the same pairs. [`ladder`] has the first five, [`sorted`] the others. `_i32` and `_i64`
//! name the type of the indices.
//! 1. `token_copy_bytewise`: one thread a record, one byte at a time; every byte is a request of its own.
//! 2. `token_copy_vectors`: one thread a record, 16 bytes at a time.
//! 3. `token_copy_warp`: one warp a record, 16 bytes a lane. A warp's loads are neighbours, and travel as whole lines.
//! 4. `token_copy` (any size), `token_copy_656`, `token_copy_4096`: all of a lane's loads come before its first store.
//!    A load from host memory takes over a microsecond; this way the waits of a lane's loads overlap.
//! 5. As 4, with a grid of a few CTAs that stride over the pairs: the bus is slow enough for sixteen SMs to fill it.
//! 6. `token_copy_sorted`, `…_656`, `…_4096`: the pairs are sorted by source ([`sort`]), so that repeated records are
//!    read once, and the lines that neighbours share are still in L1.
//! 7. `token_copy_grouped_656`: eight neighbouring records are 41 whole lines. A warp reads these lines, each once, and
//!    writes each record to every place that wants it.

pub mod ladder;
pub mod sort;
pub mod sorted;

pub use gpu_kernels::token_copy::*;
pub use ladder::*;
pub use sort::*;
pub use sorted::*;

/// Stands for no record: regions have fewer records than this.
const NONE: u32 = u32::MAX;
