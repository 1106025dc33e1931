//! Tokens that may not come next: their logits become minus infinity, before anything is chosen.
//!
//! A sequence whose answer has a form has a mask for each of its rows, a bit a token, which the host makes while the
//! rows run. Rows without one are not touched. The [sampler](crate::sample) gives a logit of minus infinity no mass,
//! and the largest is sought among the others: so a choice is what it would be in a vocabulary of the allowed tokens.

use cuda_std::{Global, GlobalMut, kernel, thread};

const THREADS: u32 = 256;
/// Logits of a thread.
const OWN: u32 = 8;

/// Parameters of [`mask_logits`]. Grid: ([`blocks`](MaskLogits::blocks), masks).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct MaskLogits {
    /// `[rows, vocab]`, changed.
    pub logits: GlobalMut<f32>,
    /// `[masks, MaskLogits::words(vocab)]`: a row of the logits, no row twice, and from [`MaskLogits::BITS`] on the
    /// mask.
    pub masks: Global<u32>,
    /// Tokens.
    pub vocab: u32,
}

impl MaskLogits {
    /// Where in an entry the bits begin.
    pub const BITS: usize = 4;

    /// Words of an entry for so many tokens.
    pub const fn words(vocab: u32) -> usize {
        Self::BITS + (vocab.div_ceil(32) as usize).next_multiple_of(4)
    }

    /// Blocks for each mask.
    pub const fn blocks(vocab: u32) -> u32 {
        vocab.div_ceil(THREADS * OWN)
    }
}

/// Rules tokens out. What is NaN or infinite stays: it must not go unnoticed.
#[kernel(threads = 256)]
pub unsafe fn mask_logits(p: MaskLogits) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let entry = p.masks.at(thread::block_idx_y() as usize * MaskLogits::words(p.vocab));
        let logits = p.logits.at(entry.load(0) as usize * p.vocab as usize);
        let first = thread::block_idx_x() * THREADS * OWN + thread::thread_idx_x();
        let mut i = 0;
        while i < OWN {
            let token = first + i * THREADS;
            if token < p.vocab {
                let word = entry.load(MaskLogits::BITS + (token / 32) as usize);
                if word >> (token % 32) & 1 == 0 && logits.load(token as usize) < f32::INFINITY {
                    logits.store(token as usize, f32::NEG_INFINITY);
                }
            }
            i += 1;
        }
    }
}
