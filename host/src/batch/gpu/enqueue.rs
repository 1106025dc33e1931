//! Enqueues a step: moves of pages, other changes, passes, and their choices.

use cuda_std::{Global, GlobalMut};
use gpu_kernels::batch::{self as kernels, Put, TakeBest, TakeTokens};
use gpu_kernels::sample::{SampleEach, Split};
use gpu_kernels::step;

use super::GpuBatch;
use super::lists::{Changes, Ready};
use super::notes::Group;
use super::upload::List;
use crate::Error;
use crate::forward::{self, RowOutput, Tiles};

impl GpuBatch {
    /// Enqueues all changes of a step besides its rows.
    pub(super) fn enqueue_changes(&self, changes: &Changes) -> Result<(), Error> {
        let upload = &self.upload;
        // SAFETY: these pages are packed, and the list names each once; it lives with self.
        unsafe { self.forward.enqueue_unpack(upload.ptr(changes.unpack), changes.unpack.len())? };
        let clock = &self.clocks[self.turn].moves;
        clock.start()?;
        for (way, list) in changes.moves {
            // SAFETY: the list has the size said, and its pages were checked with the plan.
            unsafe { self.mover.enqueue(self.forward.cache(), way, upload.ptr(list), list.len() / 2)? };
        }
        clock.stop()?;
        // SAFETY: the lists name entries of page tables and pages of the cache, each once, which were checked with the
        // plan. Pages to pack are not packed.
        unsafe {
            self.put(changes.tables, self.forward.page_tables().ptr_mut())?;
            self.put(changes.packed, self.forward.packed_pages().unwrap_or_default())?;
            self.forward.enqueue_pack(upload.ptr(changes.pack), changes.pack.len())?;
        }
        self.uses.enqueue(upload, &changes.uses)
    }

    /// Enqueues the writing of a list's words to the places that it names.
    ///
    /// # Safety
    /// The list names places of `to`, each once.
    unsafe fn put(&self, list: List, to: GlobalMut<u32>) -> Result<(), Error> {
        let count = list.len() / 2;
        if count == 0 {
            return Ok(());
        }
        let put = Put { entries: self.upload.ptr(list), to, count: count as u32 };
        // SAFETY: the list is of the size said; the caller's word for the rest.
        unsafe { self.forward.device().launch::<kernels::put_words>(kernels::blocks(count), 0, put) }
    }

    /// The lists of a pass's rows, as kernels take them.
    fn rows(&self, ready: &Ready) -> step::Rows {
        let upload = &self.upload;
        step::Rows {
            count: upload.ptr_mut(ready.count),
            tokens: upload.ptr_mut(ready.tokens),
            positions: upload.ptr_mut(ready.positions),
            sequences: upload.ptr_mut(ready.slots),
            paths: Default::default(),
        }
    }

    /// Enqueues a pass without its choices. Returns where the ranks of the best tokens will be, if the pass finds them
    /// itself.
    pub(super) fn enqueue_pass(&mut self, ready: &Ready) -> Result<Option<Global<u64>>, Error> {
        let rows = self.rows(ready);
        let (upload, pass) = (&self.upload, &ready.pass);
        let taken = ready.taken.len() / 3;
        if taken > 0 {
            let take = TakeTokens {
                entries: upload.ptr(ready.taken),
                sampled: self.sampled.ptr_mut().read(),
                tokens: rows.tokens,
                uses: self.uses.all().ptr_mut(),
                vocab: self.vocab() as u32,
                count: taken as u32,
            };
            // SAFETY: the list has the size said. It names rows of this pass, each once; choices of the step before;
            // and slots.
            unsafe { self.forward.device().launch::<kernels::take_tokens>(kernels::blocks(taken), 0, take)? };
        }
        let (tiles, chosen) = (upload.ptr(ready.tiles), pass.chosen.len() as u32);
        let mut best = None;
        if pass.prompt {
            let counted = step::Rows { count: upload.ptr_mut(ready.pick_count), ..rows };
            // SAFETY: lists of this pass, which was cut from rows that were checked; they live with self.
            unsafe {
                self.forward.enqueue_prefill_rows(rows, pass.len(), (tiles, pass.tiles.len()), pass.results)?;
                if chosen > 0 {
                    self.forward.enqueue_picked(upload.ptr(ready.picks), counted, chosen)?;
                }
            }
        } else {
            let output = match pass.chosen.first() {
                None => RowOutput::None,
                Some(_) if ready.plain => RowOutput::Best,
                Some(first) => RowOutput::LogitsFrom(first.row as u32),
            };
            let all = forward::Pass {
                rows,
                most_rows: pass.len() as u32,
                end: pass.end(),
                tiles: Some(Tiles { list: tiles, count: pass.tiles.len() as u32 }),
                output,
            };
            // SAFETY: as for the prompts' lists.
            best = unsafe { self.forward.enqueue_quickest(&all, pass.rows_of())? };
        }
        Ok(best)
    }

    /// Enqueues the choices of a pass that is enqueued, and notes of the rows whose log-probabilities are wanted. Waits
    /// for the masks, which are made while the pass runs.
    pub(super) fn enqueue_chosen(
        &mut self,
        ready: &Ready,
        best: Option<Global<u64>>,
        only_forms: bool,
    ) -> Result<(), Error> {
        let (rows, upload, chosen) = (self.rows(ready), &self.upload, ready.pass.chosen.len() as u32);
        if chosen == 0 {
            return Ok(());
        }
        if let Some(best) = best {
            let (choices, sampled) = (upload.ptr(ready.choices), self.sampled_from(ready.first));
            let take = TakeBest { best, choices, sampled, count: chosen };
            // SAFETY: the list has the size said, and names rows of this pass.
            return unsafe {
                self.forward.device().launch::<kernels::take_best>(kernels::blocks(chosen as usize), 0, take)
            };
        }
        let group = Group {
            wanted: upload.ptr(ready.notes),
            sampled: self.sampled_from(ready.first),
            first: ready.first_note,
            noted: ready.wanted.len(),
        };
        // SAFETY: lists of this pass, and places for its choices and notes.
        unsafe { self.notes.enqueue(&self.sampler, self.forward.logits(), group)? };
        self.enqueue_masks(ready, only_forms)?;
        self.enqueue_choices(ready, rows)?;
        // SAFETY: as for the first notes.
        unsafe { self.notes.enqueue_chosen(self.forward.logits(), group) }
    }

    /// Enqueues the passes of a step from pass `first` on, with their choices. Stops after a pass whose choices must
    /// wait for the step before, and returns its number.
    pub(super) fn enqueue_passes(
        &mut self,
        passes: &[Ready],
        first: usize,
        only_forms: bool,
    ) -> Result<Option<usize>, Error> {
        for (i, ready) in passes.iter().enumerate().skip(first) {
            let waits = ready.waits && !self.under_way.is_empty();
            if !waits {
                self.begin_masks(ready);
            }
            let best = self.enqueue_pass(ready)?;
            if waits {
                return Ok(Some(i));
            }
            self.enqueue_chosen(ready, best, only_forms)?;
        }
        Ok(None)
    }

    /// After a step has ended, enqueues what was left out of the step that was begun after it.
    pub(super) fn take_up_halted(&mut self) -> Result<(), Error> {
        let Some(mut step) = self.under_way.pop_front() else { return Ok(()) };
        if let Some(halted) = step.halted.take() {
            // There are no best tokens to take: a pass with masked choices does not find them.
            self.put_off.clear();
            self.enqueue_chosen(&step.passes[halted], None, step.only_forms)?;
            self.enqueue_passes(&step.passes, halted + 1, step.only_forms)?;
            step.put_off.extend(&self.put_off);
            self.clocks[step.turn].done.set()?;
        }
        self.under_way.push_front(step);
        Ok(())
    }

    /// Where the tokens of the step's choices go, from choice number `choice` on.
    fn sampled_from(&self, choice: usize) -> GlobalMut<u32> {
        // SAFETY: within the mapped words, which have room for as many choices as a step has rows and sequences.
        unsafe { self.sampled.ptr_mut().at(choice) }
    }

    /// Enqueues the sampler for a pass's choices.
    fn enqueue_choices(&self, ready: &Ready, rows: step::Rows) -> Result<(), Error> {
        let sample = SampleEach {
            rows,
            logits: self.forward.logits().ptr(),
            uses: self.uses.all().ptr(),
            choices: self.upload.ptr(ready.choices),
            sampled: self.sampled_from(ready.first),
            split: Split::default(),
            vocab: self.vocab() as u32,
            count: ready.pass.chosen.len() as u32,
        };
        // SAFETY: buffers of self, of the sizes that the parameter block states.
        unsafe { self.sampler.enqueue_each(sample) }
    }
}
