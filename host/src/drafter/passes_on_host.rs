//! The passes of a drafter on the CPU, as the [loop](super::ModelOnHost) sees them, and their implementation for a
//! whole model.

use gpu_kernels::step::MAX_DECODE_ROWS;
use model::{Checkpoint, CpuModel, KvCache, Sampling};

use crate::Error;
use crate::backend::common_prefix;

/// Predicts the next token, one token a pass, with a cache of its own that follows the text.
pub(super) trait Passes: Send {
    /// Removes from the cache the drafts and everything else that is not in `history`. If much of `history` is missing,
    /// reads all but the end. Returns how many rows of `history` are still missing, at least one.
    fn lag(&mut self, history: &[u32]) -> usize;

    /// Runs the next `rows` missing rows of `history` and returns the best token after the last. None if there is no
    /// usable prediction.
    fn catch_up(&mut self, history: &[u32], rows: usize) -> Option<u32>;

    /// Runs `draft`, the token that the last pass returned, and returns the best token after it.
    fn follow(&mut self, draft: u32) -> Option<u32>;

    /// Of a head: after how many of the model's layers each of the hidden states is taken that it drafts from.
    fn taps(&self) -> Option<[usize; 3]> {
        None
    }

    /// Begins a prompt. Returns how many of its first tokens need no more hidden states. If there are hidden states to
    /// [take](Self::take_states), the first ones begin at this token or earlier.
    fn known(&mut self, prompt: &[u32]) -> usize {
        prompt.len()
    }

    /// Takes the model's hidden states of the tokens of `history` from index `first` on, `[tokens, 3, hidden]`.
    fn take_states(&mut self, history: &[u32], first: usize, states: &[f32]) {
        let _ = (history, first, states);
    }
}

/// A whole draft model. Its rows are the tokens of the text.
pub(super) struct WholeModel {
    model: CpuModel,
    cache: KvCache,
    /// The tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    /// Vocabulary size of the model that is drafted for.
    vocab: u32,
    logits: Vec<f32>,
}

impl WholeModel {
    /// The draft model of `draft`. The model that it drafts for has `vocab` tokens; sequences have up to `capacity`
    /// tokens.
    ///
    /// # Errors
    /// A weight that is NaN or infinite, and the errors of [`Cpu::new`](crate::Cpu::new).
    pub(super) fn new(draft: &Checkpoint, vocab: usize, capacity: usize) -> Result<Self, Error> {
        draft.check_finite(&|_| {})?;
        let model = CpuModel::new(draft)?;
        let logits = vec![0.0; model.config().vocab_size];
        Ok(Self { cache: model.new_cache(capacity), cached: Vec::new(), vocab: vocab as u32, logits, model })
    }

    /// Runs these tokens after those in the cache, and returns the best next token.
    fn run(&mut self, tokens: &[u32]) -> Option<u32> {
        // Fails if a token is outside the draft model's vocabulary, or if logits are not finite: then there is no
        // draft.
        self.model.forward(tokens, &mut self.cache, 1, &mut self.logits).ok()?;
        self.cached.extend_from_slice(tokens);
        let best = Sampling::default().sample(&self.logits, &[], &[]);
        (best < self.vocab).then_some(best)
    }
}

impl Passes for WholeModel {
    fn lag(&mut self, history: &[u32]) -> usize {
        // At least the newest token runs, though it may be a draft that was foreseen and is there already.
        let valid = common_prefix(&self.cached, history).min(history.len().saturating_sub(1));
        self.cache.truncate(valid);
        self.cached.truncate(valid);
        let lag = history.len() - valid;
        if lag > MAX_DECODE_ROWS as usize {
            // A prompt: read it in one pass.
            let all_but_newest = &history[valid..history.len() - 1];
            if self.model.forward(all_but_newest, &mut self.cache, 0, &mut []).is_ok() {
                self.cached.extend_from_slice(all_but_newest);
                return 1;
            }
        }
        lag
    }

    fn catch_up(&mut self, history: &[u32], rows: usize) -> Option<u32> {
        let first = self.cached.len();
        self.run(&history[first..first + rows])
    }

    fn follow(&mut self, draft: u32) -> Option<u32> {
        self.run(&[draft])
    }
}
