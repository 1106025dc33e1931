//! Lists that a step takes to the device, all in one copy.
//!
//! Steps have two pieces of pinned memory in turn, so that one is filled while the step before is still under way.

use cuda_std::{Global, GlobalMut};

use crate::Error;
use crate::device::{Buffer, Device, Marker, Pinned};

/// Lists of words start at multiples of so many: 16 bytes.
const ALIGNMENT: usize = 4;

/// Lists of words on their way.
pub struct Upload {
    words: Vec<u32>,
    host: [Pinned<u32>; 2],
    /// Behind the last copy from each.
    sent: [Marker; 2],
    /// Which of them is next.
    turn: usize,
    there: Buffer<u32>,
}

/// A list of an [`Upload`].
#[derive(Clone, Copy, Debug, Default)]
pub struct List {
    at: usize,
    /// Words.
    len: usize,
}

impl List {
    /// Words.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Upload {
    /// With room for `words` words.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &Device, words: usize) -> Result<Self, Error> {
        Ok(Self {
            words: Vec::with_capacity(words),
            host: [device.pinned(words)?, device.pinned(words)?],
            sent: [device.marker()?, device.marker()?],
            turn: 0,
            there: device.zeroed(words)?,
        })
    }

    /// Begins anew.
    pub fn clear(&mut self) {
        self.words.clear();
    }

    /// Appends a list.
    pub fn push(&mut self, words: impl IntoIterator<Item = u32>) -> List {
        let at = self.words.len().next_multiple_of(ALIGNMENT);
        self.words.resize(at, 0);
        self.words.extend(words);
        List { at, len: self.words.len() - at }
    }

    /// Enqueues the copy. Waits for the one before the last.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If there are more words than there is room for: a bug of the caller.
    pub fn send(&mut self) -> Result<(), Error> {
        let (len, host, sent) = (self.words.len(), &mut self.host[self.turn], &self.sent[self.turn]);
        self.turn = 1 - self.turn;
        sent.wait()?;
        // SAFETY: the copy before the last one, which was from this piece, has been waited for.
        unsafe { host.as_mut_slice_now()[..len].copy_from_slice(&self.words) };
        // SAFETY: both live with self; what reads `there` was enqueued before, and the host's side is written above
        // alone.
        unsafe { self.there.copy_start_from_pinned(host, len)? };
        sent.set()
    }

    /// Where a list will be on the device, once it was sent.
    pub fn ptr(&self, list: List) -> Global<u32> {
        self.ptr_mut(list).read()
    }

    /// The same, for kernels that take what they could also write.
    pub fn ptr_mut(&self, list: List) -> GlobalMut<u32> {
        assert!(list.at + list.len <= self.there.len());
        // SAFETY: within the buffer.
        unsafe { self.there.ptr_mut().at(list.at) }
    }
}
