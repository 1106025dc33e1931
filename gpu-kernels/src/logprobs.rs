//! What log-probabilities of tokens are made of: the largest logit of a row, the mass of all, the likeliest tokens, and the logit of the
//! token that is chosen.
//!
//! The sampler changes logits where they are. So rows are copied before ([`note_logits`]), and the chosen token's logit is read from the copy
//! ([`note_chosen`]). Masses are the sampler's integers: their sum has no order, and is the same on the CPU.

use cuda_std::{Global, GlobalMut, kernel, shared, thread};

use crate::sample::{self, WARPS, block_max, block_total, mass, rank, ranked_token};

/// Most likeliest tokens of a row.
pub const MOST: usize = 20;

/// Where in a note the parts are, in words.
pub struct Note;

impl Note {
    /// The chosen token's logit.
    pub const CHOSEN: usize = 0;
    /// The largest logit.
    pub const MAX: usize = 1;
    /// The mass of all tokens, the low half first: the largest logit's is [`UNIT_MASS`](sample::UNIT_MASS).
    pub const TOTAL: usize = 2;
    /// `[MOST, 2]` tokens with their logits, as many as were asked for: the likeliest first, of equal ones the lower token.
    pub const TOP: usize = 4;
    /// Words of a note.
    pub const WORDS: usize = Self::TOP + 2 * MOST;
}

/// Where in an entry of [`NoteLogits::wanted`] the parts are, in words.
pub struct Wanted;

impl Wanted {
    /// The row of the logits.
    pub const ROW: usize = 0;
    /// How many likeliest tokens, at most [`MOST`].
    pub const TOP: usize = 1;
    /// Which of the chosen tokens follows the row.
    pub const CHOICE: usize = 2;
    /// Words of an entry.
    pub const WORDS: usize = 3;
}

/// Parameters of [`note_logits`] and [`note_chosen`]. Grids: rows noted; 1. Shared memory of the first: [`NoteLogits::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct NoteLogits {
    /// `[any, vocab]`.
    pub logits: Global<f32>,
    /// `[noted, Wanted::WORDS]`.
    pub wanted: Global<u32>,
    /// `[noted, vocab]`.
    pub copies: GlobalMut<f32>,
    /// `[choices]` the chosen tokens, for [`note_chosen`].
    pub sampled: Global<u32>,
    /// `[noted, Note::WORDS]`; words of tokens that were not asked for stay as they are.
    pub notes: GlobalMut<u32>,
    /// Tokens.
    pub vocab: u32,
    /// Rows.
    pub noted: u32,
}

impl NoteLogits {
    /// A word of 64 bits for each warp.
    pub const SHARED_BYTES: u32 = WARPS * 8;
}

/// Copies rows and notes all but the chosen token's logit. A block a row, which is read once for each of the likeliest tokens.
#[kernel(threads = 1024, min_blocks = 1)]
pub unsafe fn note_logits(p: NoteLogits) {
    unsafe {
        let (noted, tid) = (thread::block_idx_x() as usize, thread::thread_idx_x());
        let wanted = p.wanted.at(noted * Wanted::WORDS);
        let row = p.logits.at(wanted.load(Wanted::ROW) as usize * p.vocab as usize);
        let copy = p.copies.at(noted * p.vocab as usize);
        let note = p.notes.at(noted * Note::WORDS);
        let scratch = shared::dynamic(0);

        let mut best = 0;
        let mut i = tid;
        while i < p.vocab {
            let logit = row.load(i as usize);
            copy.store(i as usize, logit);
            best = best.max(rank(logit, i));
            i += sample::THREADS;
        }
        best = block_max(best, scratch);
        let max = sample::ranked_logit(best);
        let mut total = 0;
        let mut i = tid;
        while i < p.vocab {
            total += mass(row.load(i as usize), max);
            i += sample::THREADS;
        }
        let total = block_total(total, scratch);
        if tid == 0 {
            note.store(Note::MAX, max.to_bits());
            note.store(Note::TOTAL, total as u32);
            note.store(Note::TOTAL + 1, (total >> 32) as u32);
        }

        let (mut n, top) = (0, wanted.load(Wanted::TOP) as usize);
        while n < top {
            if tid == 0 {
                note.store(Note::TOP + 2 * n, ranked_token(best));
                note.store(Note::TOP + 2 * n + 1, sample::ranked_logit(best).to_bits());
            }
            n += 1;
            if n == top {
                break;
            }
            let mut next = 0;
            let mut i = tid;
            while i < p.vocab {
                let rank = rank(row.load(i as usize), i);
                if rank < best {
                    next = next.max(rank);
                }
                i += sample::THREADS;
            }
            best = block_max(next, scratch);
        }
    }
}

/// Notes the logits of the chosen tokens.
#[kernel(threads = 256)]
pub unsafe fn note_chosen(p: NoteLogits) {
    unsafe {
        let mut noted = thread::thread_idx_x();
        while noted < p.noted {
            let choice = p.wanted.load(noted as usize * Wanted::WORDS + Wanted::CHOICE);
            let token = p.sampled.load(choice as usize);
            let logit = p.copies.load(noted as usize * p.vocab as usize + token as usize);
            p.notes.store(noted as usize * Note::WORDS + Note::CHOSEN, logit.to_bits());
            noted += 256;
        }
    }
}
