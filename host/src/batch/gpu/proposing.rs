//! Proposals for sequences whose answers have a form. They need the matcher, so they are made on other threads,
//! beginning as soon as a step has brought tokens. A proposal that is not ready when the next step is planned is not
//! waited for, unless all sequences of that step have a form.

use std::sync::{Arc, OnceLock, PoisonError};

use crate::batch::plan::Slot;
use crate::batch::running::Running;
use crate::draft::{Draft, DraftTokens};

/// For each slot, the proposal for its newest token, made or in the making.
pub struct ProposalJobs {
    slots: Vec<Option<Arc<OnceLock<DraftTokens>>>>,
}

impl ProposalJobs {
    /// No proposals yet, for `slots` slots.
    pub fn new(slots: usize) -> Self {
        Self { slots: vec![None; slots] }
    }

    /// Drops the slot's proposal, since its newest token changes. Must be called before the matcher is advanced.
    pub fn forget(&mut self, slot: Slot) {
        self.slots[slot as usize] = None;
    }

    /// Begins to make a slot's proposal, if its sequence has a form. The result is the one that [`Running::look`]
    /// finds.
    pub fn begin(&mut self, slot: Slot, running: &Running, draft: Draft) {
        let Some(form) = &running.form else { return };
        let made = Arc::new(OnceLock::new());
        let (form, wanted) = (form.clone(), Arc::downgrade(&made));
        let (history, max_length) = (running.history.clone(), running.max_length);
        self.slots[slot as usize] = Some(made);
        rayon::spawn(move || {
            let mut matcher = form.lock().unwrap_or_else(PoisonError::into_inner);
            // If the proposal was dropped, the matcher has been advanced, or is about to be.
            if let Some(made) = wanted.upgrade() {
                // Only this thread sets it, so this cannot fail.
                let _ = made.set(DraftTokens::of(draft, &history, max_length, Some(&mut *matcher)));
            }
        });
    }

    /// A slot's proposal. Empty if none was begun, or if it is not ready and `waits` is false.
    pub fn take(&self, slot: Slot, waits: bool) -> DraftTokens {
        let Some(made) = &self.slots[slot as usize] else { return DraftTokens::default() };
        let made = if waits { Some(made.wait()) } else { made.get() };
        made.cloned().unwrap_or_default()
    }
}
