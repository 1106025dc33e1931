//! Masks for sequences whose answers have a form. Other threads make them, so that sequences without a form do not
//! wait.
//!
//! The masks of a pass are made while the pass runs. If a mask is not ready when the pass has ended, that sequence's
//! choice is put off: its row runs again in the next step, while the mask is still being made. The choices of the other
//! sequences are enqueued. Only a step in which every sequence has a form waits for all of its masks.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use model::Matcher;
use model::form::mask_words;

use super::GpuBatch;
use super::lists::{Masked, Ready};
use crate::Error;
use crate::batch::plan::Slot;
use crate::device::{Device, Marker};
use crate::masks::Entry;

/// The interval at which the end of a pass is checked.
const LOOK: Duration = Duration::from_micros(50);

/// For each slot, the masks for its newest token, made or in the making.
pub struct MaskJobs {
    slots: Vec<Option<MaskJob>>,
    /// Words of a mask.
    words: usize,
    /// How long to wait after a pass has ended. None: until the masks are ready.
    wait: Option<Duration>,
    /// Set behind the pass whose masks are waited for.
    passed: Marker,
    /// Gets a message for each job that is done.
    done: (Sender<()>, Receiver<()>),
}

/// The masks of a sequence: for the choice after its newest token, and for that after each of these drafts.
struct MaskJob {
    drafts: Vec<u32>,
    /// `[1 + drafts, words]`.
    made: Arc<OnceLock<Vec<u32>>>,
}

impl MaskJobs {
    /// No masks yet, for `slots` slots. `wait` is [`BatchOptions::mask_wait`](crate::batch::BatchOptions::mask_wait).
    ///
    /// # Errors
    /// A driver error.
    pub fn new(device: &Device, slots: usize, vocab: usize, wait: Option<Duration>) -> Result<Self, Error> {
        Ok(Self {
            slots: (0..slots).map(|_| None).collect(),
            words: mask_words(vocab),
            wait: wait.or((!device.is_emulator()).then_some(Duration::ZERO)),
            passed: device.marker()?,
            done: channel(),
        })
    }

    /// Drops the slot's masks, because its newest token has changed.
    pub fn forget(&mut self, slot: Slot) {
        self.slots[slot as usize] = None;
    }

    /// Begins to make the masks along `drafts`, unless they are made already or in the making.
    fn begin(&mut self, slot: Slot, form: &Arc<Mutex<Matcher>>, drafts: &[u32]) {
        let job = &mut self.slots[slot as usize];
        if job.as_ref().is_some_and(|job| job.drafts.starts_with(drafts)) {
            return;
        }
        let made = Arc::new(OnceLock::new());
        *job = Some(MaskJob { drafts: drafts.to_vec(), made: made.clone() });
        let (form, drafts, words, done) = (form.clone(), drafts.to_vec(), self.words, self.done.0.clone());
        rayon::spawn(move || {
            let mut masks = vec![0; (1 + drafts.len()) * words];
            let mut matcher = form.lock().unwrap_or_else(PoisonError::into_inner);
            matcher.masks_along(&drafts, masks.chunks_exact_mut(words));
            drop(matcher);
            // Only this thread sets `made`. The receiver may be gone, which does not matter.
            let _ = made.set(masks);
            let _ = done.send(());
        });
    }

    /// Whether masks of the slot are in the making. The matcher is in use then.
    pub fn are_pending(&self, slot: Slot) -> bool {
        self.slots[slot as usize].as_ref().is_some_and(|job| job.made.get().is_none())
    }

    /// The masks of the slot, if they are ready.
    fn get(&self, slot: Slot) -> Option<&[u32]> {
        self.slots[slot as usize].as_ref()?.made.get().map(Vec::as_slice)
    }

    /// How long a step waits after a pass for masks and proposals of sequences with a form. None: until they are ready,
    /// which is so if no sequence without a form would be delayed.
    pub fn patience(&self, only_forms: bool) -> Option<Duration> {
        self.wait.filter(|_| !only_forms)
    }

    /// Waits for the masks of the pass that was enqueued last, but no longer than [`patience`](Self::patience) allows
    /// after the end of that pass.
    fn wait_for(&self, masked: &[Masked], only_forms: bool) -> Result<(), Error> {
        self.passed.set()?;
        // Messages of jobs that nobody had to wait for.
        while self.done.1.try_recv().is_ok() {}
        let mut over: Option<Instant> = None;
        while masked.iter().any(|one| self.are_pending(one.slot)) {
            if let Some(wait) = self.patience(only_forms)
                && self.passed.is_passed()?
                && over.get_or_insert_with(Instant::now).elapsed() >= wait
            {
                break;
            }
            // Any job's message ends this wait, also an old one, so the condition is checked again.
            let _ = self.done.1.recv_timeout(LOOK);
        }
        Ok(())
    }
}

impl GpuBatch {
    /// Begins to make the masks of a pass whose tokens are known.
    pub(super) fn begin_masks(&mut self, ready: &Ready) {
        for one in &ready.masked {
            if let Some(form) = &self.slots[one.slot as usize].form {
                self.mask_jobs.begin(one.slot, form, &one.drafts);
            }
        }
    }

    /// Enqueues the application of the masks to the logits of a pass that is enqueued. Choices whose masks are not
    /// ready in time are put off, unless `only_forms`: then all sequences of the step have a form, and it waits for all
    /// masks.
    pub(super) fn enqueue_masks(&mut self, ready: &Ready, only_forms: bool) -> Result<(), Error> {
        if ready.masked.is_empty() {
            return Ok(());
        }
        self.begin_masks(ready);
        self.mask_jobs.wait_for(&ready.masked, only_forms)?;
        let (vocab, jobs) = (self.forward.config().vocab_size, &self.mask_jobs);
        let mut made = Vec::new();
        for Masked { slot, rows, .. } in &ready.masked {
            match jobs.get(*slot) {
                Some(masks) => made.extend(rows.iter().zip(masks.chunks_exact(jobs.words))),
                None => self.put_off.push(*slot),
            }
        }
        let fill = |entries: Vec<Entry<'_>>| {
            entries.into_iter().zip(&made).for_each(|(entry, (row, mask))| {
                entry.of_row(**row, vocab).copy_from_slice(mask);
            });
        };
        // SAFETY: there are logits for all rows with a choice, and each such row has one mask.
        unsafe { self.masks.enqueue(self.forward.logits().ptr_mut(), made.len(), fill) }
    }
}
