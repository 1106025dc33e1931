//! The passes of whatever drafts on the CPU, as the [loop](super::ModelOnHost) sees them; and those of a whole model.

use gpu_kernels::step::MAX_DECODE_ROWS;
use model::{Checkpoint, CpuModel, KvCache, Sampling};

use crate::Error;
use crate::backend::common_prefix;

/// Says what comes next, a token a pass, with a cache of its own that follows the text.
pub(super) trait Passes: Send {
    /// Forgets drafts, and whatever else is not of `history`; of a long text, reads all but the end. Gives how many
    /// rows of `history` it lacks then, at least one.
    fn lag(&mut self, history: &[u32]) -> usize;

    /// Runs so many of these rows, and gives the best token after the last; none if there is no telling.
    fn catch_up(&mut self, history: &[u32], rows: usize) -> Option<u32>;

    /// Runs the token that the last pass gave, and gives the best after it.
    fn follow(&mut self, draft: u32) -> Option<u32>;

    /// After how many layers the residual stream of the model is a hidden state that it drafts from, if it does.
    fn taps(&self) -> Option<[usize; 3]> {
        None
    }

    /// How many tokens of a prompt that is begun need no more hidden states: where there are any, those that
    /// [follow](Self::take_states) begin there at the latest.
    fn known(&mut self, prompt: &[u32]) -> usize {
        prompt.len()
    }

    /// Takes the hidden states of tokens of `history` from the `first` on, `[tokens, 3, hidden]`.
    fn take_states(&mut self, history: &[u32], first: usize, states: &[f32]) {
        let _ = (history, first, states);
    }
}

/// A whole model, whose rows are the tokens of the text.
pub(super) struct WholeModel {
    model: CpuModel,
    cache: KvCache,
    /// The tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    /// Tokens that there are in the model that is drafted for.
    vocab: u32,
    logits: Vec<f32>,
}

impl WholeModel {
    /// The model of `draft`, for one with a vocabulary of this size, and sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// A weight that is NaN or infinite, or as [`Cpu::new`](crate::Cpu::new).
    pub(super) fn new(draft: &Checkpoint, vocab: usize, capacity: usize) -> Result<Self, Error> {
        draft.check_finite(&|_| {})?;
        let model = CpuModel::new(draft)?;
        let logits = vec![0.0; model.config().vocab_size];
        Ok(Self { cache: model.new_cache(capacity), cached: Vec::new(), vocab: vocab as u32, logits, model })
    }

    /// Runs these tokens after those in the cache.
    fn run(&mut self, tokens: &[u32]) -> Option<u32> {
        // A token of the model's padding, or logits that are not finite: there is just no draft then.
        self.model.forward(tokens, &mut self.cache, 1, &mut self.logits).ok()?;
        self.cached.extend_from_slice(tokens);
        let best = Sampling::default().sample(&self.logits, &[], &[]);
        (best < self.vocab).then_some(best)
    }
}

impl Passes for WholeModel {
    fn lag(&mut self, history: &[u32]) -> usize {
        let valid = common_prefix(&self.cached, history);
        self.cache.truncate(valid);
        self.cached.truncate(valid);
        let lag = history.len() - valid;
        if lag > MAX_DECODE_ROWS as usize {
            // The prompt, which all goes through at once here.
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
