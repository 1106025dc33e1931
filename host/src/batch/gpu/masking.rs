//! Masks of sequences whose answers have a form: made on other threads, so that nobody else waits for them.
//!
//! A pass is under way on the device while its masks are made. Those that are not there when it has ended are left to
//! go on: their choices are put off, the row that they follow runs again in the next step, and the others' choices are
//! enqueued. Only a step in which every sequence has a form waits for all of its masks.

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

/// How often it is looked whether a pass has ended.
const LOOK: Duration = Duration::from_micros(50);

/// Masks that are being made or were made, for the newest token of each slot.
pub struct MaskJobs {
    slots: Vec<Option<MaskJob>>,
    /// Words of a mask.
    words: usize,
    /// How long to wait beyond a pass, if that is limited.
    wait: Option<Duration>,
    /// Behind the pass whose masks are waited for.
    passed: Marker,
    /// Hears of each job that is done.
    done: (Sender<()>, Receiver<()>),
}

/// Masks of a sequence: for the choice after its newest token, and after each of these drafts.
struct MaskJob {
    drafts: Vec<u32>,
    /// `[1 + drafts, words]`.
    made: Arc<OnceLock<Vec<u32>>>,
}

impl MaskJobs {
    /// None yet, for so many slots, with [`BatchOptions::mask_wait`](crate::batch::BatchOptions::mask_wait).
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

    /// The slot's newest token is another one now.
    pub fn forget(&mut self, slot: Slot) {
        self.slots[slot as usize] = None;
    }

    /// Begins to make masks along `drafts`, unless these are being made or are there.
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
            // Nobody else sets it, and the listener may be gone.
            let _ = made.set(masks);
            let _ = done.send(());
        });
    }

    /// Whether masks of the slot are being made: then its matcher is taken.
    pub fn are_pending(&self, slot: Slot) -> bool {
        self.slots[slot as usize].as_ref().is_some_and(|job| job.made.get().is_none())
    }

    /// The masks of the slot, if they are there.
    fn get(&self, slot: Slot) -> Option<&[u32]> {
        self.slots[slot as usize].as_ref()?.made.get().map(Vec::as_slice)
    }

    /// How long a step waits for what is made for sequences with a form, beyond what it waits for anyway. None: until
    /// that is there, since there is nobody to whom it matters.
    pub fn patience(&self, only_forms: bool) -> Option<Duration> {
        self.wait.filter(|_| !only_forms)
    }

    /// Waits for the masks of a pass, which is enqueued; no longer than it takes, unless there is nobody to whom that
    /// matters.
    fn wait_for(&self, masked: &[Masked], only_forms: bool) -> Result<(), Error> {
        self.passed.set()?;
        let mut over: Option<Instant> = None;
        while masked.iter().any(|one| self.are_pending(one.slot)) {
            if let Some(wait) = self.patience(only_forms)
                && self.passed.is_passed()?
                && over.get_or_insert_with(Instant::now).elapsed() >= wait
            {
                break;
            }
            // Woken by whichever is done first; one may have been done long ago.
            let _ = self.done.1.recv_timeout(LOOK);
        }
        Ok(())
    }
}

impl GpuBatch {
    /// Begins to make the masks of a pass, whose tokens are known.
    pub(super) fn begin_masks(&mut self, ready: &Ready) {
        for one in &ready.masked {
            if let Some(form) = &self.slots[one.slot as usize].form {
                self.mask_jobs.begin(one.slot, form, &one.drafts);
            }
        }
    }

    /// Enqueues that the masks of a pass, which is enqueued, are applied to its logits. Choices whose masks are not
    /// made in time are put off, unless in this step `only_forms` have rows.
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
        // SAFETY: there are logits of all rows with a choice, each of which has one.
        unsafe { self.masks.enqueue(self.forward.logits().ptr_mut(), made.len(), fill) }
    }
}
