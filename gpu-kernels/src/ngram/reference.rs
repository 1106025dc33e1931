//! The operators as one loop over the batch: what the kernels must equal, and what the CPU backend runs.
//!
//! This is the serial algorithm of the published operators, written for reading. It never panics on values: only on
//! slices that are shorter than `batch` entries or rows, which is a mistake in the caller's code.

use super::Token;

/// The tokens of a batch and where each sequence stands. Row `b` of a matrix starts at `b * stride`; tokens beyond a
/// row's end do not exist: a longer prompt length is cut to the stride, and a newest token outside its row has no
/// drafts.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a, T> {
    /// `[batch, input_ids_stride]` the prompts.
    pub input_ids: &'a [T],
    /// Tokens from one prompt to the next.
    pub input_ids_stride: usize,
    /// `[batch]` tokens of each prompt.
    pub input_ids_len: &'a [i64],
    /// `[batch, pre_ids_stride]` the generated tokens.
    pub pre_ids: &'a [T],
    /// Tokens from one sequence's generated tokens to the next's.
    pub pre_ids_stride: usize,
    /// `[batch]` index of the newest generated token.
    pub step_idx: &'a [i64],
    /// `[batch]` most tokens that may be generated.
    pub max_dec_len: &'a [i64],
    /// `[batch]` above 0 while decoding; 0 when the slot is idle or prefilling.
    pub seq_lens_decoder: &'a [i32],
}

/// What both operators write.
#[derive(Debug)]
pub struct Drafts<'a, T> {
    /// `[batch]` rows that each sequence puts into the next forward pass.
    pub seq_lens_this_time: &'a mut [i32],
    /// `[batch, draft_tokens_stride]`; row 0 of a sequence is its newest token and is left alone.
    pub draft_tokens: &'a mut [T],
    /// Tokens from one sequence's drafts to the next's; a sequence gets no more drafts than fit.
    pub draft_tokens_stride: usize,
}

/// The tokens found for one sequence: what followed the matched window, to the end of its text.
fn find<'a, T: Token>(batch: &Batch<'a, T>, b: usize, longest: u32, shortest: u32) -> &'a [T] {
    let input_ids = &batch.input_ids[b * batch.input_ids_stride..][..batch.input_ids_stride];
    let pre_ids = &batch.pre_ids[b * batch.pre_ids_stride..][..batch.pre_ids_stride];
    let prompt = &input_ids[..batch.input_ids_len[b].clamp(0, batch.input_ids_stride as i64) as usize];
    let step = batch.step_idx[b];
    if step < 0 || step >= batch.pre_ids_stride as i64 {
        return &[];
    }
    let step = step as usize;
    let generated = &pre_ids[..step];
    // An empty pattern says nothing: n stops at 1.
    for n in (shortest.max(1) as usize..=(longest as usize).min(step)).rev() {
        let pattern = &pre_ids[step + 1 - n..=step];
        for text in [prompt, generated] {
            // A window with no token after it is passed over.
            if let Some(i) = text.windows(n).position(|window| window == pattern)
                && i + n < text.len()
            {
                return &text[i + n..];
            }
        }
    }
    &[]
}

/// Writes as many of `found` as `want` and the space of the row allow, from place `base` on, and returns how many.
fn write<T: Token>(out: &mut Drafts<'_, T>, b: usize, base: i32, want: i64, found: &[T]) -> i32 {
    let row = &mut out.draft_tokens[b * out.draft_tokens_stride..][..out.draft_tokens_stride];
    let Ok(base) = usize::try_from(base) else { return 0 };
    let space = row.len().saturating_sub(base).min(i32::MAX as usize);
    let count = found.len().min(space).min(want.max(0) as usize);
    if count > 0 {
        row[base..base + count].copy_from_slice(&found[..count]);
    }
    count as i32
}

fn sum(rows: &[i32]) -> i64 {
    rows.iter().map(|&rows| rows as i64).sum()
}

/// What is left of `want` under the budget; `None` to go on to the next sequence without drafts, since a room of one
/// row is not used.
fn within_budget(want: i64, used: i64, active: i64, threshold: i32) -> Option<i64> {
    let threshold = threshold as i64;
    if used + active >= threshold - 1 {
        return None;
    }
    Some(want.min(threshold - used - active))
}

/// Proposes drafts for a batch: see [`super::NgramMatch`], whose parameters have the same names.
///
/// `draft_token_num` is `[batch]`; so is `seq_lens_encoder`, above 0 while prefilling.
pub fn ngram_match<T: Token>(
    batch: &Batch<'_, T>,
    seq_lens_encoder: &[i32],
    draft_token_num: &[i32],
    max_ngram_size: u32,
    threshold: i32,
    out: &mut Drafts<'_, T>,
) {
    let works = |b: usize| seq_lens_encoder[b] > 0 || batch.seq_lens_decoder[b] > 0;
    let mut active = (0..out.seq_lens_this_time.len()).filter(|&b| works(b)).count() as i64;
    for b in 0..out.seq_lens_this_time.len() {
        let left = batch.max_dec_len[b].saturating_sub(batch.step_idx[b]).saturating_sub(1);
        let want = left.min(draft_token_num[b] as i64);
        if seq_lens_encoder[b] > 0 {
            continue;
        }
        if batch.seq_lens_decoder[b] == 0 {
            out.seq_lens_this_time[b] = 0;
            continue;
        }
        out.seq_lens_this_time[b] = 1;
        active -= 1;
        let used = sum(&out.seq_lens_this_time[..=b]);
        let Some(want) = within_budget(want, used, active, threshold) else { continue };
        let found = find(batch, b, max_ngram_size, 1);
        out.seq_lens_this_time[b] = 1 + write(out, b, 1, want, found);
    }
}

/// Extends drafts that another proposer has put there: see [`super::NgramMatchMixed`].
pub fn ngram_match_mixed<T: Token>(
    batch: &Batch<'_, T>,
    max_draft_tokens: i32,
    max_ngram_size: u32,
    min_ngram_size: u32,
    threshold: i32,
    out: &mut Drafts<'_, T>,
) {
    let mut active = batch.seq_lens_decoder[..out.seq_lens_this_time.len()].iter().filter(|&&n| n > 0).count() as i64;
    for b in 0..out.seq_lens_this_time.len() {
        let base = out.seq_lens_this_time[b];
        let left = batch.max_dec_len[b].saturating_sub(batch.step_idx[b]).saturating_sub(1);
        let want = left.min(max_draft_tokens as i64 - base as i64 + 1);
        if base == 0 || want <= 0 {
            continue;
        }
        active -= 1;
        let used = sum(&out.seq_lens_this_time[..=b]);
        let Some(want) = within_budget(want, used, active, threshold) else { continue };
        let found = find(batch, b, max_ngram_size, min_ngram_size);
        out.seq_lens_this_time[b] = base + write(out, b, base, want, found);
    }
}
