//! The log-probabilities of a step's choices, from what the device notes of their rows (`gpu_kernels::logprobs`).

use cuda_std::{Global, GlobalMut};
use gpu_kernels::logprobs::{self, Note, NoteLogits, Wanted};
use gpu_kernels::sample::Split;

use crate::Error;
use crate::batch::Logprobs;
use crate::device::{Buffer, Device, Mapped};
use crate::sampler::Sampler;

/// The notes of the steps under way.
pub struct Notes {
    device: Device,
    /// `[choices, Note::WORDS]`.
    notes: Mapped,
    vocab: usize,
}

/// Rows that are noted in one launch.
#[derive(Clone, Copy)]
pub struct Group {
    /// `[noted, Wanted::WORDS]` the rows.
    pub wanted: Global<u32>,
    /// The chosen tokens. The rows' choices are indices into these.
    pub sampled: GlobalMut<u32>,
    /// The number of the first note.
    pub first: usize,
    /// Number of rows.
    pub noted: usize,
}

impl Notes {
    /// Room for `choices` notes.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &Device, vocab: usize, choices: usize) -> Result<Self, Error> {
        Ok(Self { device: device.clone(), notes: device.mapped(choices * Note::WORDS)?, vocab })
    }

    fn params(&self, logits: &Buffer<f32>, group: Group) -> NoteLogits {
        NoteLogits {
            logits: logits.ptr(),
            wanted: group.wanted,
            sampled: group.sampled.read(),
            // SAFETY: there is a note for each choice of a step.
            notes: unsafe { self.notes.ptr_mut().at(group.first * Note::WORDS) },
            split: Split::default(),
            vocab: self.vocab as u32,
            noted: group.noted as u32,
        }
    }

    /// Enqueues the noting of rows of `logits`.
    ///
    /// # Safety
    /// When it runs, the group's lists are what [`Group`] says, of rows of `logits`, and there is room for its notes.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue(&self, sampler: &Sampler, logits: &Buffer<f32>, group: Group) -> Result<(), Error> {
        if group.noted == 0 {
            return Ok(());
        }
        // SAFETY: buffers of self and of the caller's, of the sizes that the parameter block states.
        unsafe { sampler.enqueue_notes(self.params(logits, group)) }
    }

    /// Enqueues the noting of the chosen tokens of these rows. The choices must be enqueued before.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue).
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue_chosen(&self, logits: &Buffer<f32>, group: Group) -> Result<(), Error> {
        if group.noted == 0 {
            return Ok(());
        }
        // SAFETY: as in `enqueue`.
        unsafe { self.device.launch::<logprobs::note_chosen>(1, 0, self.params(logits, group)) }
    }

    /// Reads a note with the `top` likeliest tokens. The device must be done with it.
    pub fn read(&self, note: usize, top: u32) -> Logprobs {
        let word = |i: usize| self.notes.load(note * Note::WORDS + i);
        let logit = |i: usize| f32::from_bits(word(i));
        let total = u64::from(word(Note::TOTAL)) | u64::from(word(Note::TOTAL + 1)) << 32;
        let count = (top as usize).min(self.vocab).min(logprobs::MOST);
        let top = (0..count).map(|n| (word(Note::TOP + 2 * n), logit(Note::TOP + 2 * n + 1)));
        Logprobs::new(logit(Note::MAX), total, logit(Note::CHOSEN), top)
    }
}

/// An entry of the list of rows to note: notes the `top` likeliest tokens of `row`, and the token of choice `choice`.
pub fn wanted(row: usize, top: u32, choice: usize) -> [u32; Wanted::WORDS] {
    let mut entry = [0; Wanted::WORDS];
    entry[Wanted::ROW] = row as u32;
    entry[Wanted::TOP] = top.min(logprobs::MOST as u32);
    entry[Wanted::CHOICE] = choice as u32;
    entry
}
