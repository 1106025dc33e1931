//! The settings of drafting, and the rules that decide which drafts count. The drafters themselves are in
//! [`drafter`](crate::drafter).

use gpu_kernels::step::MAX_DECODE_ROWS;
use gpu_kernels::tree::MOST_BRANCHES;
use gpu_kernels::{drafting, ngram};
use model::form::mask_words;
use model::{Checkpoint, Config, EagleHead, Matcher, Tokenizer};

use crate::Error;
use crate::device::Device;
use crate::forward::{Footprint, Forward, HeadWeights};
use crate::tuning::{draft_permille, layer_bytes};
use crate::weight_storage::WeightStorage;
use crate::weights::Compact;

/// A budget threshold that never binds: one sequence may use every row.
pub(crate) const NO_THRESHOLD: i32 = i32::MAX / 2;

/// The weights of a model or head that drafts for another model. Drafts by n-gram match need none.
#[derive(Clone, Debug)]
pub enum DraftCheckpoint {
    /// A smaller model with the same vocabulary: `--draft model:MODEL`.
    Model(Checkpoint),
    /// A head that drafts from the model's hidden states: `--draft eagle3:HEAD`.
    Eagle3(EagleHead),
}

impl From<Checkpoint> for DraftCheckpoint {
    fn from(checkpoint: Checkpoint) -> Self {
        Self::Model(checkpoint)
    }
}

impl From<EagleHead> for DraftCheckpoint {
    fn from(head: EagleHead) -> Self {
        Self::Eagle3(head)
    }
}

impl DraftCheckpoint {
    /// Checks that this can draft for `model`.
    ///
    /// # Errors
    /// [`Error::DraftVocabulary`] if the vocabularies differ; an error if a head was made for another model.
    pub(crate) fn check_for(&self, model: &Checkpoint) -> Result<(), Error> {
        match self {
            Self::Model(draft) => check_vocabularies(&model.tokenizer, &draft.tokenizer),
            Self::Eagle3(head) => Ok(head.taps(&model.config).map(drop)?),
        }
    }

    /// The config of the draft model, or of the head's layer.
    pub(crate) fn config(&self) -> &Config {
        match self {
            Self::Model(draft) => &draft.config,
            Self::Eagle3(head) => &head.config,
        }
    }

    /// Checks that the kernels cover these shapes.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(crate) fn check_shapes(&self) -> Result<(), Error> {
        match self {
            Self::Model(draft) => Forward::check(&draft.config),
            Self::Eagle3(head) => Forward::check(&HeadWeights::config_of(head)),
        }
    }

    /// The device memory that it needs for sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// As [`Checkpoint::weights`].
    pub(crate) fn footprint(&self, capacity: usize, device: &Device) -> Result<Footprint, Error> {
        let has_prefill = device.has_prefill();
        Ok(match self {
            Self::Model(draft) => Footprint::of(&draft.config, capacity, has_prefill)
                .keeping(&draft.config, WeightStorage::of(draft, device)?),
            Self::Eagle3(head) => HeadWeights::footprint(head, capacity, has_prefill),
        })
    }

    /// Every token that it can propose to `model` is below this number.
    pub(crate) fn vocab_size(&self, model: &Config) -> usize {
        match self {
            Self::Model(draft) => draft.config.vocab_size.min(model.vocab_size),
            // A head knows only some of the model's tokens and maps its own numbers to theirs, which may be any.
            Self::Eagle3(_) => model.vocab_size,
        }
    }

    /// Whether it drafts from the model's hidden states.
    pub(crate) const fn is_head(&self) -> bool {
        matches!(self, Self::Eagle3(_))
    }

    /// The cost of a pass over one row with weights in bf16: see [`pass_bytes`].
    pub(crate) fn pass_bytes(&self, layer_bytes: u64) -> u64 {
        match self {
            Self::Model(draft) => plain_pass_bytes(&draft.config, layer_bytes),
            Self::Eagle3(head) => head_pass_bytes(head.pass_parameters(), layer_bytes),
        }
    }
}

/// How a sequence drafts, and with which settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draft {
    /// By n-gram match: `--draft ngram`.
    Ngram(NgramDraft),
    /// By the draft model or head that was loaded: `--draft model:WHICH`, `--draft eagle3:WHICH`.
    Model(ModelDraft),
}

impl From<NgramDraft> for Draft {
    fn from(draft: NgramDraft) -> Self {
        Self::Ngram(draft)
    }
}

impl From<ModelDraft> for Draft {
    fn from(draft: ModelDraft) -> Self {
        Self::Model(draft)
    }
}

impl Draft {
    /// Most drafts per step.
    pub fn tokens(&self) -> u32 {
        match self {
            Self::Ngram(draft) => draft.tokens,
            Self::Model(draft) => draft.tokens,
        }
    }

    /// Whether n-gram matches are proposed.
    pub(crate) fn matches_ngrams(&self) -> bool {
        match self {
            Self::Ngram(_) => true,
            Self::Model(draft) => draft.ngram.is_some(),
        }
    }

    /// Checks the settings, and that a draft model is loaded (`is_model`) if they need one.
    pub(crate) fn check_for(&self, is_model: bool) -> Result<(), Error> {
        self.check()?;
        match self {
            Self::Model(_) if !is_model => Err(Error::Draft { what: "no draft model was loaded".into() }),
            _ => Ok(()),
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Draft`], which names the flag at fault.
    pub fn check(&self) -> Result<(), Error> {
        match self {
            Self::Ngram(draft) => draft.check(),
            Self::Model(draft) => draft.check(),
        }
    }
}

/// Drafts from a model or a head: a chain of tokens, each the likeliest after those before it.
///
/// `--draft model:WHICH` and `--draft eagle3:WHICH`. `gpu_kernels::draft_model` has the kernels between the passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelDraft {
    /// Most drafts per step, 1 to 15.
    pub tokens: u32,
    /// Most drafts in a chain, at least 1. Each takes a pass.
    pub depth: u32,
    /// How many of the likeliest tokens after a pass may become drafts, 1 to 4. With more than 1, drafts are a
    /// [tree](gpu_kernels::tree) wherever the decode kernel runs.
    pub branches: u32,
    /// Whether to run only as many passes and drafts as recent ones make worthwhile ([`drafting`]). Otherwise all that
    /// the settings allow are run.
    pub adaptive: bool,
    /// The n-gram match that drafts beside the model: it may come first, and it extends what the model proposes. None:
    /// only the model drafts.
    pub ngram: Option<Ngrams>,
}

impl Default for ModelDraft {
    fn default() -> Self {
        let NgramDraft { tokens, max, min, adaptive } = NgramDraft::default();
        Self { tokens: NgramDraft::MOST_TOKENS, depth: tokens, branches: 4, adaptive, ngram: Some(Ngrams { max, min }) }
    }
}

impl Draft {
    /// The settings of the n-gram match of such a sequence.
    pub(crate) fn match_settings(&self) -> NgramDraft {
        match self {
            Self::Ngram(draft) => *draft,
            Self::Model(draft) => draft.match_settings(),
        }
    }
}

impl ModelDraft {
    /// Most tokens after one pass that may become drafts.
    pub const MOST_BRANCHES: u32 = MOST_BRANCHES;

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Draft`], which names the flag at fault.
    fn check(&self) -> Result<(), Error> {
        self.match_settings().check()?;
        let what = if self.depth == 0 {
            "--draft-depth 0 leaves nothing to draft; give 1 or more".into()
        } else if !(1..=MOST_BRANCHES).contains(&self.branches) {
            format!("--draft-branches {} is not between 1 and {MOST_BRANCHES}", self.branches)
        } else {
            return Ok(());
        };
        Err(Error::Draft { what })
    }

    /// Most drafts in a chain, within the drafts of a step.
    pub(crate) fn depth(&self) -> u32 {
        self.depth.min(self.tokens)
    }

    /// The settings of the n-gram match beside the model. Without a match, settings that pass every check.
    pub(crate) fn match_settings(&self) -> NgramDraft {
        let Ngrams { max, min } = self.ngram.unwrap_or(Ngrams { max: 1, min: 1 });
        NgramDraft { tokens: self.tokens, max, min, adaptive: self.adaptive }
    }
}

/// The lengths of the runs of tokens that an n-gram match looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ngrams {
    /// The longest run.
    pub max: u32,
    /// The shortest run, at least 1.
    pub min: u32,
}

/// Drafts from the sequence's own text. The match looks for an earlier occurrence of the last `n` tokens, the longest
/// `n` first, and proposes the tokens that followed it.
///
/// `--draft ngram`. The operator is `gpu_kernels::ngram::ngram_match_mixed_i32` over the whole history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramDraft {
    /// Most drafts per step, 1 to 15.
    pub tokens: u32,
    /// Longest pattern, in tokens.
    pub max: u32,
    /// Shortest pattern, in tokens, at least 1.
    pub min: u32,
    /// Whether to run only as many drafts as recent ones make worthwhile ([`drafting`]). Otherwise all proposed drafts
    /// run.
    pub adaptive: bool,
}

impl Default for NgramDraft {
    fn default() -> Self {
        Self { tokens: 7, max: 4, min: 2, adaptive: true }
    }
}

impl NgramDraft {
    /// Most drafts that fit in a step.
    pub const MOST_TOKENS: u32 = MAX_DECODE_ROWS - 1;

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Draft`], which names the flag at fault.
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

    /// What drafts count as costing, on a backend where they cost `cost`. Nothing if all proposals are to run.
    pub(crate) fn cost(&self, cost: drafting::Cost) -> drafting::Cost {
        if self.adaptive { cost } else { drafting::Cost::default() }
    }

    /// Proposes drafts that follow `history`, on the CPU. `most_length` is
    /// [`Sequence::max_length`](crate::Sequence::max_length).
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

/// Tokens that are proposed to follow a history.
#[derive(Clone, Debug, Default)]
pub(crate) struct DraftTokens {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// Whether the answer's form forces them: it allows no others.
    pub forced: bool,
}

impl DraftTokens {
    /// The tokens that the form forces after `history`. If it forces none, the tokens that the n-gram match of `draft`
    /// finds, up to the first that the form does not allow; none where `draft` has no match.
    pub fn of(draft: Draft, history: &[u32], max_length: usize, form: Option<&mut Matcher>) -> Self {
        let from_text = || {
            let history = bytemuck::cast_slice(history);
            if draft.matches_ngrams() { draft.match_settings().propose(history, max_length) } else { Vec::new() }
        };
        let Some(matcher) = form else { return Self { tokens: from_text(), forced: false } };
        // The last token that fits is always chosen by the model, so it is never a draft.
        let most = max_length.saturating_sub(history.len() + 1).min(draft.tokens() as usize);
        let forced = matcher.forced(most);
        if !forced.is_empty() {
            return Self { tokens: forced, forced: true };
        }
        let mut tokens = from_text();
        tokens.truncate(matcher.possible(&tokens));
        Self { tokens, forced: false }
    }
}

/// The masks of tokens that the form allows, one after the newest token and one after each draft. A bit for each token.
pub(crate) fn masks(matcher: &mut Matcher, drafts: &[u32], vocab_size: usize) -> Vec<Vec<u32>> {
    let mut masks = vec![vec![0; mask_words(vocab_size)]; drafts.len() + 1];
    matcher.masks_along(drafts, masks.iter_mut().map(Vec::as_mut_slice));
    masks
}

/// Checks that a draft model has the same vocabulary as the model that it drafts for.
///
/// # Errors
/// [`Error::DraftVocabulary`], with the first token that differs.
fn check_vocabularies(model: &Tokenizer, draft: &Tokenizer) -> Result<(), Error> {
    let Some(id) = model.first_difference(draft) else { return Ok(()) };
    let name = |tokenizer: &Tokenizer| match tokenizer.decode_with_special(&[id]) {
        text if text.is_empty() => "nothing".into(),
        text => format!("{text:?}"),
    };
    Err(Error::DraftVocabulary { id, model: name(model), draft: name(draft) })
}

/// The cost of a pass over one row, as the bytes that could be read from memory in that time: `weights` bytes, and
/// `layer_bytes` for each layer's other work.
pub(crate) const fn pass_bytes(weights: u64, layers: usize, layer_bytes: u64) -> u64 {
    weights + layers as u64 * layer_bytes
}

/// As [`pass_bytes`], for a model whose weights are in bf16.
pub(crate) fn plain_pass_bytes(config: &Config, layer_bytes: u64) -> u64 {
    pass_bytes(config.step_weight_bytes(2) as u64, config.num_hidden_layers, layer_bytes)
}

/// As [`pass_bytes`], for a head. It is one layer, and a pass reads `parameters` parameters in bf16.
pub(crate) const fn head_pass_bytes(parameters: usize, layer_bytes: u64) -> u64 {
    pass_bytes(2 * parameters as u64, 1, layer_bytes)
}

/// A pass that takes as long as reading `bytes`, as a share of a pass that takes as long as reading `of_model` (in
/// units of 1 / [`drafting::ONE`]).
pub(crate) fn pass_share(of_model: u64, bytes: u64) -> u32 {
    let share = u128::from(bytes) * u128::from(drafting::ONE) / u128::from(of_model.max(1));
    // Bounded: a draft model that is far too slow is never worth it, however slow it is.
    share.clamp(1, 16 * u128::from(drafting::ONE)) as u32
}

/// What drafts add to a step of the decode kernel over a model of so many `layers`, with these `matrices`. A step of
/// one row takes as long as reading `of_model` bytes.
pub(crate) fn decode_cost(matrices: &Compact, layers: usize, of_model: u64) -> drafting::Cost {
    let drafting::Cost { any, each } = draft_permille(matrices);
    let cost =
        |of_layer: u64, permille: u32| pass_share(of_model, layers as u64 * of_layer) + permille * drafting::ONE / 1000;
    drafting::Cost { any: cost(layer_bytes::SEVERAL_ROWS, any), each: cost(layer_bytes::EACH_ROW, each) }
}

/// Appends the tokens after `history`, and returns them: one, and one more for each right draft. Stops at `max_length`
/// or after a stop token. `choose` gives the token of a row, 0 to `drafts.len()`, from the history up to that row.
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

/// The updated [`drafting`] estimate after a step that confirmed `tokens` when `proposed` was proposed.
pub(crate) fn learned(acceptance: u32, proposed: &[u32], tokens: &[u32]) -> u32 {
    proposed.iter().zip(tokens).fold(acceptance, |acceptance, (a, b)| drafting::learned(acceptance, a == b))
}

#[cfg(test)]
mod tests {
    use gpu_kernels::drafting::ONE;
    use model::Config;

    use super::{decode_cost, pass_share, plain_pass_bytes};
    use crate::weights::Compact;

    #[test]
    fn a_pass_costs_what_its_weights_and_layers_take() {
        let [small, large] = ["0.6B", "8B"].map(|name| Config::published(name).unwrap());
        let cost = |model, draft, layer| pass_share(plain_pass_bytes(model, layer), plain_pass_bytes(draft, layer));
        assert_eq!(cost(&large, &large, 1 << 25), ONE);
        let (weights, with_layers) = (cost(&large, &small, 0), cost(&large, &small, 1 << 25));
        assert!(weights > ONE / 15 && with_layers > weights && with_layers < ONE / 7, "{weights}, {with_layers}");
        assert!(cost(&small, &large, 0) > 10 * ONE);
    }

    #[test]
    fn drafts_cost_a_small_model_a_larger_share_of_its_step() {
        let [small, large] = ["0.6B", "8B"].map(|name| {
            let config = Config::published(name).unwrap();
            decode_cost(&Compact::None, config.num_hidden_layers, plain_pass_bytes(&config, 1 << 25))
        });
        assert!(small.any > 4 * large.any && small.each > 4 * large.each, "{small:?}, {large:?}");
        assert!((ONE / 25..ONE / 15).contains(&large.any) && large.each < ONE / 100, "{large:?}");
    }
}
