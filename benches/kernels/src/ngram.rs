//! The n-gram operators for other token ids than the decode loop's, and with other launches. [`gpu_kernels::ngram`]
//! says what they do, and has the functions that they consist of. [`peers`] are slower designs.
//!
//! # Safety
//! A launch has memory, a grid and shared memory as its parameter block says; of the `together` kernels, a grid and
//! shared memory as [`mod@together`] does.

use cuda_std::kernel;
use gpu_kernels::ngram::{NgramMatch, NgramMatchMixed, THREADS, draft, together};

pub mod peers;

// `min_blocks = 1` tells the assembler that a second CTA on the SM is not worth a spill.
macro_rules! kernels {
    ($($token:ty: $plain:ident, $plain_together:ident $mixed_together:ident;)*) => { $(
        #[doc = concat!("Proposes drafts for a batch, with `", stringify!($token), "` token ids.")]
        #[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
        pub unsafe fn $plain(p: NgramMatch<$token>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { draft(&p) }
        }
        #[doc = concat!("[`", stringify!($plain), "`] with a CTA a sequence, see [`mod@together`].")]
        #[kernel(threads = together::THREADS, min_blocks = 1, module = "bench")]
        pub unsafe fn $plain_together(p: NgramMatch<$token>) {
            // SAFETY: the launcher's word: memory is as the parameter block says, and the grid as `together` does.
            unsafe { together::draft(&p) }
        }
        #[doc = concat!("Extends drafts that another proposer has put there, with `", stringify!($token), "` token ids and a CTA a sequence.")]
        #[kernel(threads = together::THREADS, min_blocks = 1, module = "bench")]
        pub unsafe fn $mixed_together(p: NgramMatchMixed<$token>) {
            // SAFETY: the launcher's word: memory is as the parameter block says, and the grid as `together` does.
            unsafe { together::draft(&p) }
        }
    )* };
}

kernels! {
    i64: ngram_match_i64, ngram_match_together_i64 ngram_match_mixed_together_i64;
    i32: ngram_match_i32, ngram_match_together_i32 ngram_match_mixed_together_i32;
}

/// Extends drafts that another proposer has put there, with `i64` token ids.
#[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
pub unsafe fn ngram_match_mixed_i64(p: NgramMatchMixed<i64>) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { draft(&p) }
}
