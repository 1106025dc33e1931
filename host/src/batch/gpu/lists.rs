//! The lists of words that a step takes to the device.

use std::collections::HashMap;

use gpu_kernels::batch::TakeTokens;
use gpu_kernels::logprobs::Wanted;
use gpu_kernels::sample::Choice;

use super::moves::Way;
use super::packing::Orders;
use super::passes::{self, RowPass, SequenceRows};
use super::upload::List;
use super::uses::Uses;
use super::{GpuBatch, notes};
use crate::Error;
use crate::batch::PAGE_TOKENS;
use crate::batch::plan::{Plan, Slot, Work};
use crate::gpu::settings;

/// A pass with its lists.
pub struct Ready {
    pub pass: RowPass,
    /// Rows whose tokens the step under way chooses: see [`TakeTokens::entries`].
    pub taken: List,
    pub count: List,
    pub tokens: List,
    pub positions: List,
    pub slots: List,
    pub tiles: List,
    /// If tokens are chosen: the rows of a pass over prompts whose logits are needed.
    pub picks: List,
    /// The number of picks.
    pub pick_count: List,
    /// The [`Choice`]s.
    pub choices: List,
    /// Whether all choices are simply the best tokens, and nothing else is wanted.
    pub plain: bool,
    /// The choices of sequences whose answers have a form.
    pub masked: Vec<Masked>,
    /// Whether one of these follows a token that is not known yet. Its mask is then not known either.
    pub waits: bool,
    /// The number of the first choice, counted over the step.
    pub first: usize,
    /// The rows to note for log-probabilities.
    pub wanted: Vec<[u32; Wanted::WORDS]>,
    pub notes: List,
    /// The number of the first note, counted over the step.
    pub first_note: usize,
}

/// The choices of a sequence whose answer has a form.
pub struct Masked {
    pub slot: Slot,
    /// The rows of its logits: for the newest token, and for each draft.
    pub rows: Vec<u32>,
    pub drafts: Vec<u32>,
}

/// The lists of a step that do not belong to a pass.
pub struct Changes {
    /// Pages to unpack, before anything else is done.
    pub unpack: List,
    /// Pages to pack, after the moves and before the passes.
    pub pack: List,
    /// Pages, each with the flag whether it is then packed.
    pub packed: List,
    pub moves: [(Way, List); 3],
    pub tables: List,
    pub uses: Uses,
}

impl GpuBatch {
    /// Whether the token of a row is one that the step under way chooses. (Only if a step is under way; there are no
    /// drafts then.)
    pub(super) fn is_unknown(&self, slot: Slot, position: usize) -> bool {
        !self.under_way.is_empty() && position >= self.slots[slot as usize].history.len()
    }

    /// The rows of a work, its drafts included.
    pub(super) fn rows_of(&self, work: &Work, drafts: &[u32]) -> SequenceRows {
        let running = &self.slots[work.slot as usize];
        let (start, count) = (work.start as usize, work.rows as usize);
        let known = start + count - usize::from(self.is_unknown(work.slot, start + count - 1));
        let mut tokens = Vec::with_capacity(count + drafts.len());
        tokens.extend_from_slice(&running.history[start..known]);
        // A placeholder for the unknown token.
        tokens.resize(count, 0);
        tokens.extend_from_slice(drafts);
        SequenceRows {
            slot: work.slot,
            start,
            tokens,
            chosen_from: if work.samples { count - 1 } else { count },
            prompt: if self.limits.prompts_apart { running.prompt } else { 0 },
        }
    }

    /// Lists all changes of a step besides its rows, which run in these passes. If there are too many changes of uses,
    /// the first of them are sent and enqueued at once.
    pub(super) fn list_changes(&mut self, plan: &Plan, passes: &[RowPass]) -> Result<Changes, Error> {
        let penalised = |slot: &Slot| self.slots[*slot as usize].is_penalised();
        let mut cleared: Vec<Slot> = plan.started.iter().map(|started| started.slot).filter(penalised).collect();
        while self.uses.are_too_many() {
            self.upload.clear();
            let uses = self.uses.list(&mut self.upload, cleared.drain(..));
            self.upload.send()?;
            self.uses.enqueue(&self.upload, &uses)?;
        }
        self.upload.clear();
        let out = plan.swap_out.iter().flat_map(|m| [m.from, m.to]);
        let within = plan.copies.iter().flat_map(|m| [m.from, m.to]);
        let back = plan.swap_in.iter().flat_map(|m| [m.from, m.to]);
        let moves = [
            (Way::Out, self.upload.push(out)),
            (Way::Within, self.upload.push(within)),
            (Way::In, self.upload.push(back)),
        ];
        let stride = self.limits.context.div_ceil(PAGE_TOKENS) as u32;
        // If an entry changes twice, the last change counts.
        let tables: HashMap<u32, u32> = plan.tables.iter().map(|t| (t.slot * stride + t.index, t.page)).collect();
        let tables = self.upload.push(tables.into_iter().flat_map(|(place, page)| [place, page]));
        let Orders { unpack, pack, changed } =
            self.packing.as_mut().map_or_else(Orders::default, |packing| packing.order(plan, passes));
        let packed = changed.into_iter().flat_map(|(page, is_packed)| [page, is_packed.into()]);
        Ok(Changes {
            unpack: self.upload.push(unpack),
            pack: self.upload.push(pack),
            packed: self.upload.push(packed),
            moves,
            tables,
            uses: self.uses.list(&mut self.upload, cleared),
        })
    }

    /// The choices of a pass that need masks, and whether the mask of one of them cannot be made yet.
    fn masked(&self, pass: &RowPass) -> (Vec<Masked>, bool) {
        let (mut masked, mut waits) = (Vec::new(), false);
        let mut choices = (0..).zip(&pass.chosen).peekable();
        while let Some((i, chosen)) = choices.next() {
            let slot = pass.slots[chosen.row];
            let logits = |i: u32, chosen: &passes::Chosen| if pass.prompt { i } else { chosen.row as u32 };
            let mut one = Masked { slot, rows: vec![logits(i, chosen)], drafts: Vec::new() };
            while let Some((i, draft)) = choices.next_if(|(_, next)| next.of == chosen.of) {
                one.rows.push(logits(i, draft));
                one.drafts.push(pass.tokens[draft.row]);
            }
            if self.slots[slot as usize].form.is_some() {
                waits |= self.is_unknown(slot, pass.positions[chosen.row] as usize);
                masked.push(one);
            }
        }
        (masked, waits)
    }

    /// Lists a pass. `first` is the number of its first choice, and `first_note` that of its first note.
    pub(super) fn list_pass(&mut self, pass: RowPass, first: usize, first_note: usize) -> Ready {
        let choice = |(i, chosen): (usize, &passes::Chosen)| {
            let (row, slot) = (chosen.row, pass.slots[chosen.row]);
            // In a pass over prompts, the picked rows become the first rows of the logits, and there are no drafts.
            let choice = Choice {
                row: if pass.prompt { i as u32 } else { row as u32 },
                drafts: if pass.prompt { i as u32 + 1 } else { chosen.drafts as u32 },
                slot,
                position: pass.positions[row],
                settings: settings(&self.slots[slot as usize].sampling),
            };
            choice.words()
        };
        let choices: Vec<u32> = pass.chosen.iter().enumerate().flat_map(choice).collect();
        let wanted = |(i, chosen): (usize, &passes::Chosen)| {
            let top = self.slots[pass.slots[chosen.row] as usize].logprobs?;
            Some(notes::wanted(if pass.prompt { i } else { chosen.row }, top, i))
        };
        let wanted: Vec<_> = pass.chosen.iter().enumerate().filter_map(wanted).collect();
        let slot_of = |row: usize| pass.slots[row];
        let plain = |chosen: &passes::Chosen| self.slots[slot_of(chosen.row) as usize].is_plain();
        let plain = pass.chosen.iter().all(plain);
        let (masked, waits) = self.masked(&pass);
        let unknown = (0..pass.len()).filter(|&row| self.is_unknown(slot_of(row), pass.positions[row] as usize));
        let entry = |row: usize| {
            let slot = slot_of(row) as usize;
            let counted = if self.slots[slot].is_penalised() { slot as u32 } else { TakeTokens::NOWHERE };
            [row as u32, self.newest[slot], counted]
        };
        let taken: Vec<_> = unknown.map(entry).collect();
        for (i, chosen) in pass.chosen.iter().enumerate() {
            self.newest[slot_of(chosen.row) as usize] = (first + i) as u32;
        }
        let upload = &mut self.upload;
        Ready {
            taken: upload.push(taken.into_iter().flatten()),
            count: upload.push([pass.len() as u32]),
            tokens: upload.push(pass.tokens.iter().copied()),
            positions: upload.push(pass.positions.iter().copied()),
            slots: upload.push(pass.slots.iter().copied()),
            tiles: upload.push(pass.tiles.iter().flatten().copied()),
            picks: upload.push(pass.chosen.iter().map(|chosen| chosen.row as u32)),
            pick_count: upload.push([pass.chosen.len() as u32]),
            choices: upload.push(choices),
            plain,
            masked,
            waits,
            notes: upload.push(wanted.iter().flatten().copied()),
            wanted,
            first,
            first_note,
            pass,
        }
    }
}
