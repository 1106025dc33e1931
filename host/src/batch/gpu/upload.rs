//! The upload of a step: all of its lists go to the device in one copy.
//!
//! There are two buffers of pinned memory, which steps use in turn. So one can be filled while the step before is still
//! under way.

use cuda_std::{Global, GlobalMut};

use crate::Error;
use crate::device::{Buffer, Device, Marker, Pinned};

/// Lists begin at a multiple of this many words, which is 16 bytes.
const ALIGNMENT: usize = 4;

/// The lists of a step, on the host and on the device.
pub struct Upload {
    words: Vec<u32>,
    host: [Pinned<u32>; 2],
    /// For each host buffer, a marker behind the last copy from it.
    sent: [Marker; 2],
    /// Which host buffer is next.
    turn: usize,
    there: Buffer<u32>,
}

/// A list of an [`Upload`].
#[derive(Clone, Copy, Debug, Default)]
pub struct List {
    at: usize,
    /// Its length in words.
    len: usize,
}

impl List {
    /// Its length in words.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Upload {
    /// An upload with room for `words` words.
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

    /// Removes all lists.
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

    /// Enqueues the copy of all lists. First waits for the last copy from the same host buffer.
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
        // SAFETY: the last copy from this buffer has been waited for.
        unsafe { host.as_mut_slice_now()[..len].copy_from_slice(&self.words) };
        // SAFETY: both buffers live with self. Work that reads `there` was enqueued before, and the host buffer is
        // written only above.
        unsafe { self.there.copy_start_from_pinned(host, len)? };
        sent.set()
    }

    /// The address that a list has on the device after it is sent.
    pub fn ptr(&self, list: List) -> Global<u32> {
        self.ptr_mut(list).read()
    }

    /// The same address, for kernels that take mutable ones.
    pub fn ptr_mut(&self, list: List) -> GlobalMut<u32> {
        assert!(list.at + list.len <= self.there.len());
        // SAFETY: within the buffer.
        unsafe { self.there.ptr_mut().at(list.at) }
    }
}
