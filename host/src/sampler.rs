//! Launches of the kernels that work on rows of logits: the sampler, and those that note what log-probabilities are
//! computed from.

use gpu_kernels::draft_model::{self, NextDraft};
use gpu_kernels::logprobs::{self, NoteLogits};
use gpu_kernels::sample::{self, CTAS_PER_SM, MOST_VOCAB, SCRATCH_WORDS, SHARED_BYTES, Sample, SampleEach, Split};
use model::Config;

use crate::Error;
use crate::device::{Buffer, Device};
use crate::forward::Forward;

/// Splits rows of logits over a device's CTAs. Has the memory through which a row's CTAs exchange what they
/// find.
pub struct Sampler {
    device: Device,
    /// `[resident, SCRATCH_WORDS]`.
    scratch: Buffer<u64>,
    /// CTAs that run at once.
    resident: u32,
    vocab: u32,
}

impl Sampler {
    /// For the logits of a model with this config. Each queue of launches needs a sampler of its own.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the vocabulary is too large, too little memory, or a driver error.
    pub fn new(device: &Device, config: &Config) -> Result<Self, Error> {
        let vocab = config.vocab_size as u32;
        if vocab > MOST_VOCAB {
            return Err(Error::Unsupported { what: Forward::VOCABULARY, found: config.vocab_size });
        }
        let resident = CTAS_PER_SM * device.sms();
        let scratch = device.zeroed(resident as usize * SCRATCH_WORDS)?;
        Ok(Self { device: device.clone(), scratch, resident, vocab })
    }

    /// The CTAs of a launch over up to `rows` rows, and how these are split.
    fn split(&self, rows: u32) -> (u32, Split) {
        let splits = sample::splits(rows, self.resident, self.vocab);
        let teams = rows.min(self.resident / splits);
        (teams * splits, Split { scratch: self.scratch.ptr_mut(), splits })
    }

    /// Enqueues [`sample`](sample::sample) over up to `rows` rows. Sets `params.split` itself.
    ///
    /// # Safety
    /// The addresses in `params` are as its documentation says.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue(&self, rows: u32, params: Sample) -> Result<(), Error> {
        let (grid, split) = self.split(rows);
        // SAFETY: the caller's word; scratch for every team, that no other launch of this queue uses meanwhile.
        unsafe { self.device.launch_cooperative::<sample::sample>(grid, SHARED_BYTES, Sample { split, ..params }) }
    }

    /// Enqueues [`sample_each`](sample::sample_each) over `params.count` rows. Sets `params.split` itself.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue).
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue_each(&self, params: SampleEach) -> Result<(), Error> {
        let (grid, split) = self.split(params.count);
        let params = SampleEach { split, ..params };
        // SAFETY: as in `enqueue`.
        unsafe { self.device.launch_cooperative::<sample::sample_each>(grid, SHARED_BYTES, params) }
    }

    /// Enqueues [`note_logits`](logprobs::note_logits) over `params.noted` rows. Sets `params.split` itself.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue).
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue_notes(&self, params: NoteLogits) -> Result<(), Error> {
        let (grid, split) = self.split(params.noted);
        let params = NoteLogits { split, ..params };
        // SAFETY: as in `enqueue`.
        unsafe { self.device.launch_cooperative::<logprobs::note_logits>(grid, SHARED_BYTES, params) }
    }

    /// Enqueues [`next_draft`](draft_model::next_draft) over `params.note.noted` rows. Sets `params.note.split` itself.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue).
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue_draft(&self, params: NextDraft) -> Result<(), Error> {
        let (grid, split) = self.split(params.note.noted);
        let params = NextDraft { note: NoteLogits { split, ..params.note }, ..params };
        // SAFETY: as in `enqueue`.
        unsafe { self.device.launch_cooperative::<draft_model::next_draft>(grid, SHARED_BYTES, params) }
    }
}
