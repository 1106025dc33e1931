//! Which [words](crate::exchange) the matrices of a step of one row take in and put out.
//!
//! # Safety
//! The same as for all [consumers](super::consumer), of a step of one row.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::thread;

use super::DecodeStep;
use super::consumer::Consumer;
use crate::exchange::{WordKind, Words};

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// The words of `kind` that the matrix at `index` puts out, or attention after it.
    #[inline(always)]
    pub fn put_out(&self, kind: WordKind, index: u32) -> Words {
        self.words(kind, 1 + index)
    }

    /// The words of `kind` that the matrix at `index` takes in, from the one before it.
    #[inline(always)]
    pub fn taken_in(&self, kind: WordKind, index: u32) -> Words {
        self.words(kind, index)
    }

    /// The elements of the residual that those of the matrix at `index` are added to: from the matrix two before it.
    #[inline(always)]
    pub fn added_to(&self, index: u32) -> Words {
        self.words(WordKind::Residual, index - 1)
    }

    /// With the sequence flag of what the first `matrices` leave.
    #[inline(always)]
    fn words(&self, kind: WordKind, matrices: u32) -> Words {
        self.p.exchange.words(kind, self.flag + matrices)
    }

    /// The step is done: the last block to say so sees to it that the next one has sequence flags of its own. The
    /// block's consumers have synchronised.
    ///
    /// # Safety
    /// All consumers of the block call it, at the end of the step, when they have synchronised and neither they nor the
    /// warps beside them have anything to read or write in the exchange any more.
    #[inline(always)]
    pub unsafe fn use_up_flags(&self) {
        // SAFETY: the caller's word.
        unsafe {
            let (p, grid) = (self.p, thread::grid_dim_x());
            if thread::thread_idx_x() > 0
                || atomic::fetch_add(p.counters, DecodeStep::DONE, 1, Ordering::AcqRel, Scope::Device) + 1 < grid
            {
                return;
            }
            p.exchange.use_up(self.flag, DecodeStep::flags(p.layer_count));
        }
    }
}
