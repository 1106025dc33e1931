//! Proposals of sequences whose answers have a form: made on other threads, since a matcher is asked, and begun as soon
//! as a step has brought tokens. What is not there when the next step is planned is not waited for, as long as that has
//! rows of sequences without a form.

use std::sync::{Arc, OnceLock, PoisonError};

use crate::batch::plan::Slot;
use crate::batch::running::Running;
use crate::draft::{DraftTokens, NgramDraft};

/// Proposals that are being made or were made, for the newest token of each slot.
pub struct ProposalJobs {
    slots: Vec<Option<Arc<OnceLock<DraftTokens>>>>,
}

impl ProposalJobs {
    /// None yet, for so many slots.
    pub fn new(slots: usize) -> Self {
        Self { slots: vec![None; slots] }
    }

    /// The slot's newest token is to be another one: said before its matcher is told.
    pub fn forget(&mut self, slot: Slot) {
        self.slots[slot as usize] = None;
    }

    /// Begins to make a slot's proposal, if its sequence has a form: the same that [`Running::propose`] makes.
    pub fn begin(&mut self, slot: Slot, running: &Running, draft: NgramDraft) {
        let Some(form) = &running.form else { return };
        let made = Arc::new(OnceLock::new());
        let (form, wanted) = (form.clone(), Arc::downgrade(&made));
        let (history, max_length) = (running.history.clone(), running.max_length);
        self.slots[slot as usize] = Some(made);
        rayon::spawn(move || {
            let mut matcher = form.lock().unwrap_or_else(PoisonError::into_inner);
            // Forgotten, the matcher is or soon will be elsewhere.
            if let Some(made) = wanted.upgrade() {
                // Nobody else sets it.
                let _ = made.set(DraftTokens::of(&draft, &history, max_length, Some(&mut *matcher)));
            }
        });
    }

    /// A slot's proposal; nothing if it was not begun, or is not there by now and the step does not wait.
    pub fn take(&self, slot: Slot, waits: bool) -> DraftTokens {
        let Some(made) = &self.slots[slot as usize] else { return DraftTokens::default() };
        let made = if waits { Some(made.wait()) } else { made.get() };
        made.cloned().unwrap_or_default()
    }
}
