//! Masks of rows whose answers have a form, on their way to a device: what may come next, a bit a token.
//!
//! A pass needs its masks only when its logits are there. So the host enqueues the pass, makes the masks while it runs,
//! and then enqueues that they are taken to the device and applied, before anything is chosen.

use cuda_std::GlobalMut;
use gpu_kernels::mask::{self, MaskLogits};

use crate::Error;
use crate::device::{Buffer, Device, Marker, Pinned};

/// Room for the masks of a pass, on both sides of the bus.
pub struct Masks {
    device: Device,
    vocab: usize,
    /// `[room, MaskLogits::words]`, in turn: one is filled while the copy from the other may be under way.
    host: [Pinned<u32>; 2],
    /// Behind the last copy from each.
    sent: [Marker; 2],
    turn: usize,
    there: Buffer<u32>,
}

/// A row's mask, to be filled.
pub struct Entry<'m>(&'m mut [u32]);

impl<'m> Entry<'m> {
    /// The mask, for this row of the logits.
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

    /// Enqueues that `count` masks, which `fill` makes now, are applied to `logits`, `[rows, vocab]`. `fill` gives each
    /// entry a row that there is, no two the same.
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
        // SAFETY: the copy before the last one, which was from this piece, has been waited for.
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
