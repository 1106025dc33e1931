//! The passes of an EAGLE-3 head on the CPU.
//!
//! Row `i` of a head combines two tokens of the text: the model's hidden states of token `i`, and the embedding of
//! token `i + 1`. So the row of the newest token can run at once, as the model has just run the token before it. Rows
//! of drafts use the head's own hidden states instead. They leave the cache once the model's hidden states are known.

use gpu_kernels::step::MAX_DECODE_ROWS;
use model::sampling::argmax;
use model::{Checkpoint, CpuEagle, EagleHead, HiddenStates, KvCache};

use super::passes_on_host::Passes;
use crate::Error;

/// While the model reads a prompt, the head reads along as soon as this many hidden states wait.
const MOST_WAITING: usize = 64;

/// A head with its cache.
pub(super) struct EagleOnHost {
    head: CpuEagle,
    taps: [usize; 3],
    cache: KvCache,
    /// The text up to the second token of the last cached row that was made from the model's hidden states.
    text: Vec<u32>,
    /// The model's hidden states that no row has used yet, from the last token of `text` on, `[tokens, 3, hidden]`.
    waiting: Vec<f32>,
    /// The head's own hidden state after its last row, `[hidden]`.
    own: Vec<f32>,
    /// Whether a pass over this sequence gave numbers that are not finite. There are no more drafts then.
    failed: bool,
    logits: Vec<f32>,
}

impl EagleOnHost {
    /// A drafter that uses `head` to draft for `model`, in sequences of up to `capacity` tokens.
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

    /// Cached rows that were made from the model's hidden states.
    fn rows(&self) -> usize {
        self.text.len().saturating_sub(1)
    }

    /// Elements in the hidden states of one token.
    fn states_len(&self) -> usize {
        3 * self.head.head().config.plan.hidden
    }

    /// Tokens whose hidden states no row has used yet.
    fn waiting(&self) -> usize {
        self.waiting.len() / self.states_len()
    }

    /// Runs the next `rows` rows of `history`, whose hidden states wait. `logits`: whether to compute them after the
    /// last row.
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

    /// The head's best token, as the model numbers it.
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
        // Tokens that the model had to run again are skipped: their hidden states are here already.
        let here = self.rows() + self.waiting();
        let skipped = here.saturating_sub(first) * self.states_len();
        self.waiting.extend_from_slice(states.get(skipped..).unwrap_or_default());
        if self.waiting() >= MOST_WAITING {
            self.cache.truncate(self.rows());
            // A row needs the token after its hidden states, and the newest token has none after it.
            let rows = self.waiting().min(history.len() - 1 - self.rows());
            self.read(history, rows, false);
        }
    }
}
