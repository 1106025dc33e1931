//! The batch of an EAGLE-3 head that drafts on the CPU, one sequence after another. Its rows are made from the hidden
//! states that passes over the model leave. Its sequences have the slots of the model's.
//!
//! A sequence's first row uses the hidden states of a position that is a multiple of [`WINDOW`]. So the position of a
//! row in the head's text and that of its hidden states in the model's text have the same place in the ring.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::sampling::argmax;
use model::{Checkpoint, CpuEagle, EagleHead, HiddenStates, KvCache};

use crate::Error;
use crate::batch::PAGE_TOKENS;
use crate::batch::backend::{BatchBackend, Outcome, Start};
use crate::batch::draft::WINDOW;
use crate::batch::draft::head::{HeadSizes, Text, limits};
use crate::batch::limits::Limits;
use crate::batch::plan::{Plan, Slot, Work};

/// The model's hidden states at the last positions of each sequence, by slot: `[WINDOW, 3, hidden]`. Those of position
/// `p` are at `p % WINDOW`.
#[derive(Clone, Default)]
pub struct KeptStates(Arc<Mutex<HashMap<Slot, Vec<f32>>>>);

impl KeptStates {
    fn lock(&self) -> MutexGuard<'_, HashMap<Slot, Vec<f32>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the hidden states `[3, hidden]` at a position of the sequence in a slot.
    pub fn put(&self, slot: Slot, position: usize, states: &[f32]) {
        let mut kept = self.lock();
        let of_slot = kept.entry(slot).or_insert_with(|| vec![0.0; WINDOW * states.len()]);
        of_slot[position % WINDOW * states.len()..][..states.len()].copy_from_slice(states);
    }

    /// The hidden states at these positions, `[positions, 3, hidden]`. `each` is the number of elements at a position.
    fn gather(&self, slot: Slot, positions: std::ops::Range<usize>, each: usize) -> Vec<f32> {
        let kept = self.lock();
        let of_slot = &kept[&slot];
        positions.flat_map(|position| &of_slot[position % WINDOW * each..][..each]).copied().collect()
    }
}

/// Runs a head.
pub struct HeadBatch {
    head: CpuEagle,
    states: KeptStates,
    limits: Limits,
    slots: Vec<Sequence>,
    outcomes: Vec<Outcome>,
}

/// A sequence.
#[derive(Default)]
struct Sequence {
    text: Text,
    cache: Option<KvCache>,
    /// The head's own hidden state after its last row.
    own: Vec<f32>,
}

impl HeadBatch {
    /// A batch for `head`, which drafts for `model`. The model's hidden states will be in `states`. There is room for
    /// `sequences` sequences of up to `context` tokens.
    ///
    /// # Errors
    /// A head that was made for another model.
    pub fn new(
        head: &EagleHead,
        model: &Checkpoint,
        states: KeptStates,
        context: usize,
        sequences: usize,
    ) -> Result<Self, Error> {
        // Each sequence has a cache of its own, so pages do not limit it.
        let pages = sequences * context.div_ceil(PAGE_TOKENS);
        let limits = limits(HeadSizes { context, sequences, pages }, u32::MAX);
        let slots = (0..sequences).map(|_| Sequence::default()).collect();
        Ok(Self { head: CpuEagle::new(head, model)?, states, limits, slots, outcomes: Vec::new() })
    }

    /// Runs the rows of a work. If it samples, returns the best next token, as the model numbers it. None also if a
    /// number is not finite.
    fn run(&mut self, work: &Work) -> Option<u32> {
        let (start, rows) = (work.start as usize, work.rows as usize);
        let each = 3 * self.head.head().config.plan.hidden;
        let Sequence { text, cache, own } = &mut self.slots[work.slot as usize];
        let cache = cache.as_mut()?;
        cache.truncate(start);
        let mut logits = vec![0.0; if work.samples { self.head.head().draft_vocab_size } else { 0 }];
        let of_model;
        let states = if start >= text.known {
            if own.is_empty() {
                // The row before failed.
                return None;
            }
            HiddenStates::Own(own)
        } else {
            of_model = self.states.gather(work.slot, start..start + rows, each);
            HiddenStates::OfModel(&of_model)
        };
        let left = self.head.forward(&text.tokens[start..start + rows], states, cache, &mut logits);
        *own = left.unwrap_or_default();
        if own.is_empty() {
            return None;
        }
        work.samples.then(|| self.head.head().targets()[argmax(&logits) as usize])
    }
}

impl BatchBackend for HeadBatch {
    fn device(&self) -> String {
        "CPU".into()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn begin(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<(), Error> {
        for (started, start) in plan.started.iter().zip(starts) {
            let Sequence { text, cache, .. } = &mut self.slots[started.slot as usize];
            // If the sequence goes on, what was read of it stays in the cache.
            let has_room = cache.as_ref().is_some_and(|cache| cache.capacity() >= start.max_length);
            if !has_room || text.tokens.get(..text.known) != start.tokens.get(..text.known) {
                *cache = Some(self.head.new_cache(start.max_length));
            }
            *text = Text::new(start.tokens);
        }
        for work in &plan.work {
            let token = self.run(work);
            if work.samples {
                self.outcomes.push(self.slots[work.slot as usize].text.say(work, token));
            }
        }
        Ok(())
    }

    fn rewrite(&mut self, slot: Slot, at: usize, tokens: &[u32]) {
        self.slots[slot as usize].text.rewrite(at, tokens);
    }

    fn end(&mut self) -> Result<Vec<Outcome>, Error> {
        Ok(std::mem::take(&mut self.outcomes))
    }
}
