//! Drafting: where proposed tokens come from.

use gpu_kernels::step::MAX_DECODE_ROWS;
use gpu_kernels::{drafting, ngram};
use model::Matcher;
use model::form::mask_words;

use crate::Error;

/// No budget: one sequence may use every row.
pub(crate) const NO_THRESHOLD: i32 = i32::MAX / 2;

/// Drafts from the sequence itself: the tokens that followed an earlier occurrence of its last `n`, longest `n` first.
///
/// `--draft ngram`; the operator is `gpu_kernels::ngram::ngram_match_mixed_i32` over the whole history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramDraft {
    /// Most drafts of a step, 1 to 15.
    pub tokens: u32,
    /// Longest pattern.
    pub max: u32,
    /// Shortest pattern, at least 1.
    pub min: u32,
    /// Whether to run only as many drafts as recent ones make worthwhile ([`drafting`]); otherwise all that are proposed.
    pub adaptive: bool,
}

impl Default for NgramDraft {
    fn default() -> Self {
        Self { tokens: 7, max: 4, min: 2, adaptive: true }
    }
}

impl NgramDraft {
    /// Most drafts that a step has room for.
    pub const MOST_TOKENS: u32 = MAX_DECODE_ROWS - 1;

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Draft`], which names the flag.
    pub fn check(&self) -> Result<(), Error> {
        let what = if !(1..=Self::MOST_TOKENS).contains(&self.tokens) {
            format!("--draft-tokens {} is not between 1 and {}", self.tokens, Self::MOST_TOKENS)
        } else if self.min == 0 {
            "--ngram-min 0 would match anything; give 1 or more".into()
        } else if self.max < self.min {
            format!("--ngram-max {} is less than --ngram-min {}", self.max, self.min)
        } else {
            return Ok(());
        };
        Err(Error::Draft { what })
    }

    /// What drafts are taken to cost on a backend where they cost `cost`.
    pub(crate) fn cost(&self, cost: drafting::Cost) -> drafting::Cost {
        if self.adaptive { cost } else { drafting::Cost::default() }
    }

    /// Drafts to follow `history`, on the CPU; `most_length` as [`Sequence::max_length`](crate::Sequence::max_length).
    pub(crate) fn propose(&self, history: &[i32], most_length: usize) -> Vec<u32> {
        let newest = history.len() as i64 - 1;
        let batch = ngram::reference::Batch {
            input_ids: &[],
            input_ids_stride: 0,
            input_ids_len: &[0],
            pre_ids: history,
            pre_ids_stride: history.len(),
            step_idx: &[newest],
            max_dec_len: &[most_length as i64],
            seq_lens_decoder: &[1],
        };
        let mut rows = [1];
        let mut drafts = [0; MAX_DECODE_ROWS as usize];
        let mut out = ngram::reference::Drafts {
            seq_lens_this_time: &mut rows,
            draft_tokens: &mut drafts,
            draft_tokens_stride: MAX_DECODE_ROWS as usize,
        };
        ngram::reference::ngram_match_mixed(&batch, self.tokens as i32, self.max, self.min, NO_THRESHOLD, &mut out);
        drafts[1..rows[0] as usize].iter().map(|&t| t as u32).collect()
    }
}

/// What is proposed to follow a history.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proposal {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Whether the answer's form leaves no others.
    pub forced: bool,
}

impl Proposal {
    /// What the form forces after `history`, if it does, or else what `draft` finds in it that the form allows.
    pub fn of(draft: &NgramDraft, history: &[u32], max_length: usize, form: Option<&mut Matcher>) -> Self {
        let from_text = || draft.propose(bytemuck::cast_slice(history), max_length);
        let Some(matcher) = form else { return Self { tokens: from_text(), forced: false } };
        // The last token that there is room for is nobody's draft.
        let most = max_length.saturating_sub(history.len() + 1).min(draft.tokens as usize);
        let forced = matcher.forced(most);
        if !forced.is_empty() {
            return Self { tokens: forced, forced: true };
        }
        let mut tokens = from_text();
        tokens.truncate(matcher.possible(&tokens));
        Self { tokens, forced: false }
    }
}

/// What may come after the newest token and after each of its drafts.
pub(crate) fn masks(matcher: &mut Matcher, drafts: &[u32], vocab_size: usize) -> Vec<Vec<u32>> {
    let mut masks = vec![vec![0; mask_words(vocab_size)]; drafts.len() + 1];
    matcher.masks_along(drafts, masks.iter_mut().map(Vec::as_mut_slice));
    masks
}

/// Appends the tokens after `history`: one, and one more for each draft that was right, as long as neither `max_length` nor a stop token is met.
/// `choose` gives the token of a row, 0 to `drafts.len()`, knowing the history up to it.
pub(crate) fn confirm(
    history: &mut Vec<u32>,
    max_length: usize,
    stop_tokens: &[u32],
    drafts: &[u32],
    mut choose: impl FnMut(usize, &[u32]) -> u32,
) -> Vec<u32> {
    let mut tokens = Vec::new();
    for row in 0..=drafts.len() {
        let token = choose(row, history);
        history.push(token);
        tokens.push(token);
        let finished = history.len() >= max_length || stop_tokens.contains(&token);
        if finished || drafts.get(row) != Some(&token) {
            break;
        }
    }
    tokens
}

/// What `proposed` was worth, as [`drafting`] estimates it, after a step that confirmed `tokens`.
pub(crate) fn learned(acceptance: u32, proposed: &[u32], tokens: &[u32]) -> u32 {
    proposed.iter().zip(tokens).fold(acceptance, |acceptance, (a, b)| drafting::learned(acceptance, a == b))
}
