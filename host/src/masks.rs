//! The masks of rows whose answers have a form, on their way to a device. A mask says which tokens may come next, with
//! one bit for each token.
//!
//! A pass needs its masks only when it has made its logits. So the host enqueues the pass, makes the masks while it
//! runs, and then enqueues their copy to the device and their application, ahead of the choice.

use cuda_std::GlobalMut;
use gpu_kernels::mask::{self, MaskLogits};

use crate::Error;
use crate::device::{Buffer, Device, Marker, Pinned};

/// Memory for the masks of a pass, on the host and on the device.
pub struct Masks {
    device: Device,
    vocab: usize,
    /// `[room, MaskLogits::words]` each, used in turn: one is filled while the copy from the other may be under way.
    host: [Pinned<u32>; 2],
    /// A marker behind the last copy from each of `host`.
    sent: [Marker; 2],
    turn: usize,
    there: Buffer<u32>,
}

/// An entry for a row, to be filled with its mask.
pub struct Entry<'m>(&'m mut [u32]);

impl<'m> Entry<'m> {
    /// Assigns the entry to `row` of the logits. Returns the words of its mask, to be filled in.
    pub fn of_row(self, row: u32, vocab: usize) -> &'m mut [u32] {
        self.0[0] = row;
        &mut self.0[MaskLogits::BITS..][..model::form::mask_words(vocab)]
    }
}

impl Masks {
    /// For passes with up to `room` masked rows.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &Device, vocab: usize, room: usize) -> Result<Self, Error> {
        let words = room * MaskLogits::words(vocab as u32);
        Ok(Self {
            device: device.clone(),
            vocab,
            host: [device.pinned(words)?, device.pinned(words)?],
            sent: [device.marker()?, device.marker()?],
            turn: 0,
            there: device.zeroed(words)?,
        })
    }

    /// Calls `fill` to make `count` masks, and enqueues their application to `logits`, `[rows, vocab]`. `fill` assigns
    /// each entry to a row that exists, no two to the same.
    ///
    /// # Safety
    /// `logits` has all rows that `fill` names, and is live until the launch is done.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If there is no room for so many: a bug of the caller.
    pub unsafe fn enqueue(
        &mut self,
        logits: GlobalMut<f32>,
        count: usize,
        fill: impl FnOnce(Vec<Entry<'_>>),
    ) -> Result<(), Error> {
        if count == 0 {
            return Ok(());
        }
        let words = MaskLogits::words(self.vocab as u32);
        let (host, sent) = (&mut self.host[self.turn], &self.sent[self.turn]);
        self.turn = 1 - self.turn;
        sent.wait()?;
        // SAFETY: the copy before the last one, which was from this buffer, has been waited for.
        let entries = unsafe { &mut host.as_mut_slice_now()[..count * words] };
        fill(entries.chunks_exact_mut(words).map(Entry).collect());
        // SAFETY: both live with self; what reads `there` was enqueued before, and the host's side is written above
        // alone.
        unsafe { self.there.copy_start_from_pinned(host, count * words)? };
        sent.set()?;
        let params = MaskLogits { logits, masks: self.there.ptr(), vocab: self.vocab as u32 };
        let grid = (MaskLogits::blocks(params.vocab), count as u32);
        // SAFETY: entries for all of the grid; the caller's word for the logits.
        unsafe { self.device.launch::<mask::mask_logits>(grid, 0, params) }
    }
}
