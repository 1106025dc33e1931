//! Counts how often each sequence with penalties has used each token, for the sampler.

use std::collections::BTreeMap;

use gpu_kernels::batch::{self as kernels, ClearRows, Put};
use gpu_kernels::sample::{GENERATED, PROMPTED};

use super::upload::{List, Upload};
use crate::Error;
use crate::batch::backend::Start;
use crate::batch::plan::Slot;
use crate::batch::running::Running;
use crate::device::{Buffer, Device};

/// The uses of tokens by the sequences in the slots, in the encoding of the [sampler](gpu_kernels::sample).
pub struct TokenUses {
    device: Device,
    /// `[slots, vocab]`. The rows of sequences without penalties mean nothing.
    uses: Buffer<u32>,
    vocab: u32,
    /// Changed counts by their place in `uses`, to be sent before the next choice.
    changed: BTreeMap<u32, u32>,
    /// How many changes are sent at a time.
    room: usize,
}

/// Changes of [`TokenUses`] that are listed for an upload.
pub struct Uses {
    /// Slots whose counts are set to zero first.
    cleared: List,
    /// Places and their new counts.
    put: List,
}

impl TokenUses {
    /// Counts for `slots` slots, with room for `room` changes at a time.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &Device, slots: usize, vocab: usize, room: usize) -> Result<Self, Error> {
        let uses = device.zeroed(slots * vocab)?;
        Ok(Self { device: device.clone(), uses, vocab: vocab as u32, changed: BTreeMap::new(), room })
    }

    /// The counts, `[slots, vocab]`.
    pub fn all(&self) -> &Buffer<u32> {
        &self.uses
    }

    /// Notes the tokens of a sequence that gets a slot. The slot's counts must be [cleared](Self::list).
    pub fn begin(&mut self, slot: Slot, start: &Start<'_>, running: &Running) {
        self.changed.retain(|place, _| place / self.vocab != slot);
        if running.is_penalised() {
            let first = slot * self.vocab;
            let (prompt, output) = start.tokens.split_at(start.prompt);
            self.changed.extend(prompt.iter().map(|token| (first + token, PROMPTED)));
            for &token in output {
                *self.changed.entry(first + token).or_default() += GENERATED;
            }
        }
    }

    /// Notes new tokens of a sequence.
    pub fn take_in(&mut self, slot: Slot, running: &Running, tokens: &[u32]) {
        if running.is_penalised() {
            let first = slot * self.vocab;
            self.changed.extend(tokens.iter().map(|&token| (first + token, running.uses(token))));
        }
    }

    /// Whether there are more changes than are sent at a time.
    pub fn are_too_many(&self) -> bool {
        self.changed.len() > self.room
    }

    /// Lists the slots to clear and the first changes, as many as there is room for.
    pub fn list(&mut self, upload: &mut Upload, cleared: impl IntoIterator<Item = Slot>) -> Uses {
        let cleared = upload.push(cleared);
        let rest = self.changed.keys().nth(self.room).copied().map(|next| self.changed.split_off(&next));
        let now = std::mem::replace(&mut self.changed, rest.unwrap_or_default());
        Uses { cleared, put: upload.push(now.into_iter().flat_map(|(place, uses)| [place, uses])) }
    }

    /// Enqueues changes that were sent.
    ///
    /// # Errors
    /// A refused launch.
    pub fn enqueue(&self, upload: &Upload, changes: &Uses) -> Result<(), Error> {
        let (cleared, put) = (changes.cleared.len(), changes.put.len() / 2);
        // SAFETY: the lists are of the sizes said, and name places in the uses, each once.
        unsafe {
            if cleared > 0 {
                let clear = ClearRows { rows: upload.ptr(changes.cleared), of: self.uses.ptr_mut(), len: self.vocab };
                let blocks = kernels::blocks(self.vocab as usize);
                self.device.launch::<kernels::clear_rows>((blocks, cleared as u32), 0, clear)?;
            }
            if put > 0 {
                let entries = Put { entries: upload.ptr(changes.put), to: self.uses.ptr_mut(), count: put as u32 };
                self.device.launch::<kernels::put_words>(kernels::blocks(put), 0, entries)?;
            }
        }
        Ok(())
    }
}
