//! A step whose rows are a tree of drafts: four tokens at each depth, of which the first has children. If its rows
//! would lie in two splits of the keys, they are a chain instead, as in [`plan_tree`](tree::plan_tree).

use gpu_kernels::attention::SPLIT;
use gpu_kernels::draft_model::DraftWords;
use gpu_kernels::drafting::ONE;
use gpu_kernels::logprobs::Note;
use gpu_kernels::sample::UNIT_MASS;
use gpu_kernels::step::{self, MAX_DECODE_ROWS, PlanPrompt, SequenceState};
use gpu_kernels::tree::{self, Likeliest, PlanTree};
use host::Error;
use host::device::{Buffer, Device};
use host::forward::{Forward, RowOutput};

/// Tokens at each depth.
const BRANCHES: u32 = 4;
/// Passes of the drafter: more than a tree is deep. A chain continues after them with drafts that count as an n-gram
/// match's.
const PASSES: u32 = 5;

/// What a drafter would have left for such a tree.
pub(super) struct Tree {
    words: Buffer<u32>,
    drafts: Buffer<i32>,
    draft_rows: Buffer<i32>,
    notes: Buffer<u32>,
    told: Buffer<u32>,
    vocab: u32,
}

/// The token that a pass proposes for a branch.
fn token(pass: u32, branch: u32, vocab: u32) -> u32 {
    (1000 * pass + 77 * branch + 3) % vocab
}

impl Tree {
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, vocab: u32) -> Result<Self, Error> {
        let mut words = [0; DraftWords::COUNT];
        words[DraftWords::CHAINED] = PASSES;
        for word in [DraftWords::MODEL, DraftWords::CONFIDENCE, DraftWords::NGRAM] {
            words[word] = ONE / 2;
        }
        let mut notes = vec![0; MAX_DECODE_ROWS as usize * Note::WORDS];
        let drafts: Vec<i32> = (0..MAX_DECODE_ROWS).map(|row| token(row.max(1) - 1, 0, vocab) as i32).collect();
        for (pass, note) in (0..PASSES).zip(notes.chunks_mut(Note::WORDS)) {
            let total = u64::from(BRANCHES) * UNIT_MASS;
            [note[Note::TOTAL], note[Note::TOTAL + 1]] = [total as u32, (total >> 32) as u32];
            for branch in 0..BRANCHES {
                note[Note::TOP + 2 * branch as usize] = token(pass, branch, vocab);
            }
        }
        Ok(Self {
            words: device.upload(&words)?,
            drafts: device.upload(&drafts)?,
            draft_rows: device.upload(&[MAX_DECODE_ROWS as i32])?,
            notes: device.upload(&notes)?,
            told: device.zeroed(1)?,
            vocab,
        })
    }

    /// Enqueues the plan of a step of `rows` rows of the sequence.
    ///
    /// # Safety
    /// The state is of live buffers, and the history has `context` tokens and room for one more.
    pub unsafe fn enqueue_plan(
        &self,
        forward: &Forward,
        state: SequenceState,
        rows: u32,
        context: u32,
    ) -> Result<(), Error> {
        let plan = PlanTree {
            rows: forward.step_rows(),
            state,
            words: self.words.ptr(),
            drafts: self.drafts.ptr(),
            draft_rows: self.draft_rows.ptr(),
            likeliest: Likeliest {
                notes: self.notes.ptr(),
                targets: Default::default(),
                target_count: 0,
                vocab: self.vocab,
            },
            counters: forward.counters(),
            told: self.told.ptr_mut(),
            told_reports: 1,
            cost: Default::default(),
            most: rows - 1,
            branches: BRANCHES,
            max_length: context + 1,
        };
        // SAFETY: the caller's word for the state; the others are buffers of self and of the model, sized as the
        // parameter block says.
        unsafe { forward.device().launch::<tree::plan_tree>(1, 0, plan) }
    }

    /// How many of `logits` differ from those of separate passes over each row's path, from position `root` on.
    pub fn differing(
        &self,
        forward: &Forward,
        history: &mut Buffer<i32>,
        root: u32,
        logits: &[f32],
    ) -> Result<usize, Error> {
        let mut differing = 0;
        let rows = logits.len() as u32 / self.vocab;
        let branches = if root % SPLIT + rows <= SPLIT { BRANCHES } else { 1 };
        for (row, found) in (0..).zip(logits.chunks(self.vocab as usize)) {
            // Row 0 is the root. After it, each depth has the same number of rows.
            let depth = u32::div_ceil(row, branches);
            let mut path: Vec<i32> = (1..depth).map(|depth| token(depth - 1, 0, self.vocab) as i32).collect();
            if row > 0 {
                path.push(token(depth - 1, (row - 1) % branches, self.vocab) as i32);
            }
            history.write(root as usize + 1, &path)?;
            let state = SequenceState { history: history.ptr_mut(), words: Default::default() };
            let plan = PlanPrompt { rows: forward.rows(), state, start: root, count: depth + 1 };
            // SAFETY: the history has the path, and rows have room for it.
            unsafe { forward.device().launch::<step::plan_prompt>(1, 0, plan)? };
            forward.enqueue(depth + 1, root + depth + 1, RowOutput::LogitsFrom(depth))?;
            let mut alone = vec![0.0; self.vocab as usize];
            forward.logits().read(depth as usize * self.vocab as usize, &mut alone)?;
            differing += found.iter().zip(&alone).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        }
        Ok(differing)
    }
}
