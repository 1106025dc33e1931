//! Which [words](crate::exchange) the matrices of a step of one row read and write.
//!
//! # Safety
//! As for all [consumers](super::consumer), of a step of one row.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::device;
use cuda_std::thread;

use super::DecodeStep;
use super::consumer::Consumer;
use crate::exchange::{WordKind, Words};

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// The words of `kind` that the matrix at `index` writes, or attention after it.
    #[device]
    pub fn put_out(&self, kind: WordKind, index: u32) -> Words {
        self.words(kind, 1 + index)
    }

    /// The words of `kind` that the matrix at `index` takes in, from the one before it.
    #[device]
    pub fn taken_in(&self, kind: WordKind, index: u32) -> Words {
        self.words(kind, index)
    }

    /// The elements of the residual that the outputs of the matrix at `index` are added to. The matrix two before it
    /// wrote them, or the embedding.
    #[device]
    pub fn added_to(&self, index: u32) -> Words {
        self.words(WordKind::Residual, index - 1)
    }

    /// The words of `kind` with the sequence flag of what the first `matrices` matrices leave; 0 is the embedding.
    #[device]
    fn words(&self, kind: WordKind, matrices: u32) -> Words {
        self.p.exchange.words(kind, self.flag + matrices)
    }

    /// Says that the CTA is done with the step. The last CTA to say so uses up the step's sequence flags, so that the
    /// next step has others. The CTA's consumers have synchronised.
    ///
    /// # Safety
    /// All consumers of the CTA call it, at the end of the step, when they have synchronised and neither they nor the
    /// warps beside them have anything to read or write in the exchange any more.
    #[device]
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
