//! The n-gram operators for other token ids than the decode loop's, and in other ways: [`gpu_kernels::ngram`] says what
//! they do, and has the functions that they are made of. [`peers`] are the slower designs.

use cuda_std::kernel;
use gpu_kernels::ngram::{NgramMatch, NgramMatchMixed, THREADS, draft, together};

pub mod peers;

// `min_blocks = 1` tells the assembler that a second block on the SM is not worth a spill.
macro_rules! kernels {
    ($($token:ty: $plain:ident, $plain_together:ident $mixed_together:ident;)*) => { $(
        #[doc = concat!("Proposes drafts for a batch, with `", stringify!($token), "` token ids.")]
        #[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
        pub unsafe fn $plain(p: NgramMatch<$token>) {
            unsafe { draft(&p) }
        }
        #[doc = concat!("[`", stringify!($plain), "`] with a block a sequence, see [`mod@together`].")]
        #[kernel(threads = together::THREADS, min_blocks = 1, module = "bench")]
        pub unsafe fn $plain_together(p: NgramMatch<$token>) {
            unsafe { together::draft(&p) }
        }
        #[doc = concat!("Extends drafts that another proposer has put there, with `", stringify!($token), "` token ids and a block a sequence.")]
        #[kernel(threads = together::THREADS, min_blocks = 1, module = "bench")]
        pub unsafe fn $mixed_together(p: NgramMatchMixed<$token>) {
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
    unsafe { draft(&p) }
}
