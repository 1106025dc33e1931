//! The batch of an EAGLE-3 head that drafts on a device. Its rows are made from the hidden states that passes over the
//! model leave ([`States`]). Its sequences have the slots of the model's.
//!
//! The rows of a plan are either all known tokens, which use the model's hidden states, or all tokens that the head
//! drafted before, which use the head's own. A sequence's first row uses the hidden states of a position that is a
//! multiple of the ring's length. So the position of a row in the head's text and that of its hidden states in the
//! model's text have the same place in the ring.

use cuda_std::GlobalMut;
use gpu_kernels::batch::{self as kernels, Put, TakeBest};
use gpu_kernels::eagle::States;
use gpu_kernels::sample::Choice;
use gpu_kernels::step::{MAX_DECODE_ROWS, MAX_ROWS, NO_TOKEN, Rows};
use model::sampling::argmax;

use super::passes::{RowPass, SequenceRows, Widths, cut};
use super::upload::{List, Upload};
use crate::Error;
use crate::batch::PAGE_TOKENS;
use crate::batch::backend::{BatchBackend, Outcome, Start};
use crate::batch::draft::head::{HeadSizes, Text, limits};
use crate::batch::limits::Limits;
use crate::batch::plan::{Plan, Slot, Work};
use crate::cache::KvCache;
use crate::device::{Device, Mapped, Marker};
use crate::forward::{Begin, Capacity, Forward, HeadWeights, Pass, RowOutput, Tiles};

/// Most rows of a plan.
const ROWS: usize = 8 * MAX_ROWS as usize;

/// Runs a head.
pub struct HeadBatch {
    forward: Forward,
    /// The model's hidden states.
    states: States,
    /// The model's token for each token of the head.
    targets: Vec<u32>,
    limits: Limits,
    slots: Vec<Text>,
    upload: Upload,
    /// The best token after each row that samples, from passes that find it themselves.
    said: Mapped,
    /// The best tokens of passes that do not find them, computed from their logits.
    read: Vec<u32>,
    done: Marker,
    /// The works that sample, in the step under way.
    sampling: Vec<Work>,
}

/// A pass with its lists.
struct Listed {
    pass: RowPass,
    count: List,
    tokens: List,
    positions: List,
    slots: List,
    tiles: List,
    choices: List,
}

impl HeadBatch {
    /// A batch of these sizes for `head`, which drafts for `model`. The model must keep hidden states and live as long.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(head: HeadWeights, model: &Forward, sizes: HeadSizes) -> Result<Self, Error> {
        let HeadSizes { context, sequences, pages } = sizes;
        let device: Device = model.device().clone();
        let mut targets = vec![0; head.targets.len()];
        head.targets.read(0, &mut targets)?;
        let room = Capacity::batch(context, sequences, pages, MAX_ROWS as usize);
        let mut forward = Forward::of_head(head, model, room)?;
        forward.prepare_decode()?;
        let limits = limits(sizes, ROWS as u32);
        let words = 32 * ROWS + 2 * sequences * context.div_ceil(PAGE_TOKENS) + 4096;
        Ok(Self {
            states: model.kept_states().expect("a model that leaves hidden states"),
            targets,
            limits,
            slots: vec![Text::default(); sequences],
            upload: Upload::new(&device, words)?,
            said: device.mapped(sequences)?,
            read: Vec::new(),
            done: device.marker()?,
            sampling: Vec::new(),
            forward,
        })
    }

    /// The number of pages for `sequences` full contexts, within `bytes`, but at least for one.
    pub fn pages(head: &HeadWeights, context: usize, sequences: usize, bytes: Option<u64>) -> usize {
        let one = context.div_ceil(PAGE_TOKENS);
        let room = bytes.map_or(usize::MAX, |bytes| bytes as usize / KvCache::page_bytes(&head.config));
        (one * sequences).min(room).max(one)
    }

    fn list(&mut self, pass: RowPass) -> Listed {
        let upload = &mut self.upload;
        let choices = pass.chosen.iter().flat_map(|chosen| {
            let mut words = [0; Choice::WORDS];
            words[0] = chosen.row as u32;
            words
        });
        Listed {
            count: upload.push([pass.len() as u32]),
            tokens: upload.push(pass.tokens.iter().copied()),
            positions: upload.push(pass.positions.iter().copied()),
            slots: upload.push(pass.slots.iter().copied()),
            tiles: upload.push(pass.tiles.iter().flatten().copied()),
            choices: upload.push(choices.collect::<Vec<_>>()),
            pass,
        }
    }

    /// Enqueues a pass. Its best tokens go to `self.said`, from index `said` on.
    fn enqueue(&mut self, listed: &Listed, begin: Begin, said: usize) -> Result<(), Error> {
        let (upload, pass) = (&self.upload, &listed.pass);
        let rows = Rows {
            count: upload.ptr_mut(listed.count),
            tokens: upload.ptr_mut(listed.tokens),
            positions: upload.ptr_mut(listed.positions),
            sequences: upload.ptr_mut(listed.slots),
            paths: Default::default(),
        };
        let chosen = pass.chosen.len();
        let all = Pass {
            rows,
            most_rows: pass.len() as u32,
            end: pass.end(),
            tiles: Some(Tiles { list: upload.ptr(listed.tiles), count: pass.tiles.len() as u32 }),
            output: if chosen > 0 { RowOutput::LogitsFrom(0) } else { RowOutput::None },
        };
        let best = self.forward.begin_decode()?;
        // SAFETY: the lists are of rows that were checked, and live with self. The counters were cleared. If a hidden
        // state is gone from the ring, another's is read in its place.
        unsafe { self.forward.enqueue_head_pass(begin, &all, pass.rows_of())? };
        let Some(best) = best else { return self.read_best(&listed.pass) };
        if chosen == 0 {
            return Ok(());
        }
        // SAFETY: within the words, which have room for every sequence.
        let sampled: GlobalMut<u32> = unsafe { self.said.ptr_mut().at(said) };
        let take = TakeBest { best, choices: upload.ptr(listed.choices), sampled, count: chosen as u32 };
        // SAFETY: the list is of the size said, and names rows of this pass.
        unsafe { self.forward.device().launch::<kernels::take_best>(kernels::blocks(chosen), 0, take) }
    }

    /// For passes that do not find the best tokens: waits for their logits and finds the best tokens in them.
    fn read_best(&mut self, pass: &RowPass) -> Result<(), Error> {
        let mut logits = vec![0.0; self.targets.len()];
        for chosen in &pass.chosen {
            self.forward.logits().read(chosen.row * logits.len(), &mut logits)?;
            let finite = logits.iter().all(|logit| logit.is_finite());
            self.read.push(if finite { argmax(&logits) } else { NO_TOKEN });
        }
        Ok(())
    }
}

impl BatchBackend for HeadBatch {
    fn device(&self) -> String {
        self.forward.device().name().into()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn begin(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<(), Error> {
        for (started, start) in plan.started.iter().zip(starts) {
            self.slots[started.slot as usize] = Text::new(start.tokens);
        }
        let rows_of = |work: &Work| {
            let (start, count) = (work.start as usize, work.rows as usize);
            SequenceRows {
                slot: work.slot,
                start,
                tokens: self.slots[work.slot as usize].tokens[start..start + count].to_vec(),
                chosen_from: if work.samples { count - 1 } else { count },
                prompt: 0,
            }
        };
        let rows: Vec<SequenceRows> = plan.work.iter().map(rows_of).collect();
        let is_own = |rows: &SequenceRows| rows.start >= self.slots[rows.slot as usize].known;
        let begin = if rows.iter().any(is_own) { Begin::Own } else { Begin::OfModel(self.states) };
        let samples = plan.work.iter().any(|work| work.samples);
        let widths = Widths {
            prompt: 0,
            decode: if samples { MAX_DECODE_ROWS } else { MAX_ROWS } as usize,
            tile: self.forward.tile_rows(),
        };
        self.upload.clear();
        let stride = self.limits.context.div_ceil(PAGE_TOKENS) as u32;
        let tables = self.upload.push(plan.tables.iter().flat_map(|t| [t.slot * stride + t.index, t.page]));
        let passes: Vec<Listed> = cut(&rows, widths).into_iter().map(|pass| self.list(pass)).collect();
        self.upload.send()?;
        if tables.len() > 0 {
            let count = tables.len() / 2;
            let to = self.forward.page_tables().ptr_mut();
            let put = Put { entries: self.upload.ptr(tables), to, count: count as u32 };
            // SAFETY: entries of page tables, each once, and pages that exist: the drafter gives out their numbers.
            unsafe { self.forward.device().launch::<kernels::put_words>(kernels::blocks(count), 0, put)? };
        }
        let mut said = 0;
        // If all works sample, the passes hold their rows in the order of the works.
        for listed in &passes {
            self.enqueue(listed, begin, said)?;
            said += listed.pass.chosen.len();
        }
        self.sampling = plan.work.iter().filter(|work| work.samples).copied().collect();
        self.done.set()
    }

    fn rewrite(&mut self, slot: Slot, at: usize, tokens: &[u32]) {
        self.slots[slot as usize].rewrite(at, tokens);
    }

    fn end(&mut self) -> Result<Vec<Outcome>, Error> {
        self.done.wait()?;
        let mut outcomes = Vec::new();
        let read = std::mem::take(&mut self.read);
        for (i, work) in std::mem::take(&mut self.sampling).into_iter().enumerate() {
            let said = read.get(i).copied().unwrap_or_else(|| self.said.load(i));
            let token = self.targets.get(said as usize).copied();
            outcomes.push(self.slots[work.slot as usize].say(&work, token));
        }
        Ok(outcomes)
    }
}

impl Drop for HeadBatch {
    fn drop(&mut self) {
        // A step that nobody waited for may still use memory that is freed next.
        let _ = self.forward.device().synchronize();
    }
}
