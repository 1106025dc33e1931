//! Proposals of sequences whose answers have a form: made on other threads, since a matcher is asked, and begun as soon
//! as a step has brought tokens. What is not there when the next step is planned is not waited for, as long as that has
//! rows of sequences without a form.

use std::sync::{Arc, OnceLock, PoisonError};

use crate::batch::plan::Slot;
use crate::batch::running::Running;
use crate::draft::{NgramDraft, Proposal};

/// Proposals that are being made or were made, for the newest token of each slot.
pub struct ProposalJobs {
    slots: Vec<Option<Arc<OnceLock<Proposal>>>>,
    /// Whether they are waited for in any step.
    waits: bool,
}

impl ProposalJobs {
    /// None yet, for so many slots.
    pub fn new(slots: usize, waits: bool) -> Self {
        Self { slots: vec![None; slots], waits }
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
                let _ = made.set(Proposal::of(&draft, &history, max_length, Some(&mut *matcher)));
            }
        });
    }

    /// A slot's proposal, as far as there is one by now: nothing otherwise. In a step in which `only_forms` have rows
    /// it is waited for.
    pub fn take(&self, slot: Slot, only_forms: bool) -> Proposal {
        let made = self.slots[slot as usize].as_ref();
        if self.waits || only_forms { made.map(|made| made.wait()) } else { made.and_then(|made| made.get()) }
            .cloned()
            .unwrap_or_default()
    }
}
