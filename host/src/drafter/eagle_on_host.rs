//! The passes of an EAGLE-3 head on the CPU.
//!
//! Row `i` of a head stands for the tokens `i` and `i + 1` of the text: the model's hidden states of the first, and the
//! embedding of the second. So the newest token's row waits for nothing, as the model has just run the one before it.
//! Rows of drafts begin with the head's own hidden states instead; they leave the cache when the model's are there.

use gpu_kernels::step::MAX_DECODE_ROWS;
use model::sampling::argmax;
use model::{Checkpoint, CpuEagle, EagleHead, HiddenStates, KvCache};

use super::passes_on_host::Passes;
use crate::Error;

/// Hidden states that are kept while the model reads a prompt: then the head reads along.
const MOST_WAITING: usize = 64;

/// A head with its cache.
pub(super) struct EagleOnHost {
    head: CpuEagle,
    taps: [usize; 3],
    cache: KvCache,
    /// The text up to the second token of the last row in the cache that began with the model's hidden states.
    text: Vec<u32>,
    /// The model's hidden states of the tokens from the last of `text` on, `[tokens, 3, hidden]`.
    waiting: Vec<f32>,
    /// The head's own of its last row, `[hidden]`.
    own: Vec<f32>,
    /// Whether numbers of this sequence were not finite: there are no more drafts then.
    failed: bool,
    logits: Vec<f32>,
}

impl EagleOnHost {
    /// `head`, to draft for `model` in sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// A head that was made for another model.
    pub(super) fn new(head: &EagleHead, model: &Checkpoint, capacity: usize) -> Result<Self, Error> {
        Ok(Self {
            taps: head.taps(&model.config)?,
            logits: vec![0.0; head.draft_vocab_size],
            head: CpuEagle::new(head, model)?,
            cache: KvCache::new(&head.config, capacity),
            text: Vec::new(),
            waiting: Vec::new(),
            own: Vec::new(),
            failed: false,
        })
    }

    /// Rows in the cache that began with the model's hidden states.
    fn rows(&self) -> usize {
        self.text.len().saturating_sub(1)
    }

    /// Numbers of a token's hidden states.
    fn states_len(&self) -> usize {
        3 * self.head.head().config.plan.hidden
    }

    /// Tokens whose hidden states wait.
    fn waiting(&self) -> usize {
        self.waiting.len() / self.states_len()
    }

    /// Runs so many rows of `history`, whose hidden states wait; with logits after the last, or without.
    fn read(&mut self, history: &[u32], rows: usize, logits: bool) {
        let (first, used) = (self.rows(), rows * self.states_len());
        let states = HiddenStates::OfModel(&self.waiting[..used]);
        let logits = if logits { self.logits.as_mut_slice() } else { &mut [] };
        match self.head.forward(&history[first + 1..][..rows], states, &mut self.cache, logits) {
            Ok(own) => {
                self.own = own;
                self.text.truncate(first);
                self.text.extend_from_slice(&history[first..=first + rows]);
                self.waiting.drain(..used);
            }
            Err(_) => self.failed = true,
        }
    }

    /// The model's token for the head's best.
    fn best(&self) -> u32 {
        self.head.head().targets()[argmax(&self.logits) as usize]
    }
}

impl Passes for EagleOnHost {
    fn lag(&mut self, history: &[u32]) -> usize {
        self.cache.truncate(self.rows());
        let lag = history.len().saturating_sub(1 + self.rows());
        if !self.failed && lag > MAX_DECODE_ROWS as usize && self.waiting() >= lag {
            self.read(history, lag - 1, false);
            return 1;
        }
        lag.max(1)
    }

    fn catch_up(&mut self, history: &[u32], rows: usize) -> Option<u32> {
        if self.failed || rows > self.waiting() {
            return None;
        }
        self.read(history, rows, true);
        (!self.failed).then(|| self.best())
    }

    fn follow(&mut self, draft: u32) -> Option<u32> {
        let states = HiddenStates::Own(&self.own);
        self.own = self.head.forward(&[draft], states, &mut self.cache, &mut self.logits).ok()?;
        Some(self.best())
    }

    fn taps(&self) -> Option<[usize; 3]> {
        Some(self.taps)
    }

    fn known(&mut self, prompt: &[u32]) -> usize {
        let same = self.text.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        self.text.truncate(same);
        self.cache.truncate(self.rows());
        self.waiting.clear();
        self.failed = false;
        self.rows()
    }

    fn take_states(&mut self, history: &[u32], first: usize, states: &[f32]) {
        if self.failed {
            return;
        }
        // What the model had to run again is here already.
        let here = self.rows() + self.waiting();
        let skipped = here.saturating_sub(first) * self.states_len();
        self.waiting.extend_from_slice(states.get(skipped..).unwrap_or_default());
        if self.waiting() >= MOST_WAITING {
            self.cache.truncate(self.rows());
            // The last one's row needs the token after it.
            let rows = self.waiting().min(history.len() - 1 - self.rows());
            self.read(history, rows, false);
        }
    }
}
