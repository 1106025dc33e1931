//! Rows of logits on their way to the host, for log-probabilities: copied while the device goes on, and waited for many at a time.

use std::collections::HashMap;

use crate::Error;
use crate::device::{Buffer, Device, Pinned};

/// Rows under way at most.
const UNDER_WAY: usize = 16;

/// The rows of a step that are wanted on the host, each by the choice after it.
pub struct Wanted {
    /// Each `[vocab]`.
    rows: Vec<Pinned<f32>>,
    /// Whose the first of them are.
    under_way: Vec<usize>,
    arrived: HashMap<usize, Vec<f32>>,
}

impl Wanted {
    /// For rows of `vocab` logits.
    ///
    /// # Errors
    /// Too little memory that can be pinned.
    pub fn new(device: &Device, vocab: usize) -> Result<Self, Error> {
        let rows = (0..UNDER_WAY).map(|_| device.pinned(vocab)).collect::<Result<_, _>>()?;
        Ok(Self { rows, under_way: Vec::new(), arrived: HashMap::new() })
    }

    /// Enqueues the copy of row `row` of `logits`, `[rows, vocab]`, which the choice `choice` is made by.
    ///
    /// # Errors
    /// A driver error.
    pub fn enqueue(&mut self, logits: &Buffer<f32>, row: usize, choice: usize) -> Result<(), Error> {
        if self.under_way.len() == self.rows.len() {
            self.arrive()?;
        }
        let to = &mut self.rows[self.under_way.len()];
        let at = row * to.len();
        // SAFETY: both live as long as the backend; what the device writes to the logits next comes after the copy in its queue, and the host
        // reads the copy once it has waited.
        unsafe { logits.copy_to_pinned(at, to)? };
        self.under_way.push(choice);
        Ok(())
    }

    /// Waits for what is under way.
    ///
    /// # Errors
    /// Whatever a kernel failed with.
    pub fn arrive(&mut self) -> Result<(), Error> {
        for (choice, row) in self.under_way.drain(..).zip(&self.rows) {
            self.arrived.insert(choice, row.as_slice()?.to_vec());
        }
        Ok(())
    }

    /// The row of a choice, if it was enqueued and has arrived.
    pub fn take(&mut self, choice: usize) -> Option<Vec<f32>> {
        self.arrived.remove(&choice)
    }
}
