//! Rules out tokens that may not come next: their logits become minus infinity before a token is chosen.
//!
//! A sequence whose answer must have a given form has a mask for each of its rows: one bit for each token, set if the
//! token is allowed. The host makes the masks while the rows run. Rows without a mask are not touched. The
//! [sampler](crate::sample) gives a logit of minus infinity no mass, and looks for the largest logit among the others.
//! So a choice is what it would be in a vocabulary of only the allowed tokens.

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
    /// `[masks, MaskLogits::words(vocab)]` entries. Word 0 is the row of the logits, and the mask begins at word
    /// [`MaskLogits::BITS`]. No row occurs twice.
    pub masks: Global<u32>,
    /// Tokens.
    pub vocab: u32,
}

impl MaskLogits {
    /// The word of an entry at which the mask begins.
    pub const BITS: usize = 4;

    /// Words of an entry for a vocabulary of `vocab` tokens.
    pub const fn words(vocab: u32) -> usize {
        Self::BITS + (vocab.div_ceil(32) as usize).next_multiple_of(4)
    }

    /// CTAs for each mask.
    pub const fn blocks(vocab: u32) -> u32 {
        vocab.div_ceil(THREADS * OWN)
    }
}

/// Applies the masks. A logit that is NaN or plus infinity stays as it is: it must not go unnoticed.
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
