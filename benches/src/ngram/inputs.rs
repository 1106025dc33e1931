//! Batches on the host: arrays in the operators' layout, those of the published benchmark, and random ones.

use gpu_kernels::ngram::reference;

use super::TokenId;
use crate::Random;

/// Which operator, with the parameters that only it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// `ngram_match`.
    Match,
    /// `ngram_match_mixed`.
    Mixed {
        /// Most drafts of a sequence, those that came in included.
        max_draft_tokens: i32,
        /// Shortest pattern.
        min_ngram_size: u32,
    },
}

/// The arrays of a batch, as [`gpu_kernels::ngram::Sequences`] describes them.
#[derive(Clone, Debug)]
pub struct Inputs<T> {
    /// Sequences.
    pub batch: usize,
    /// `[batch, input_ids_stride]` the prompts.
    pub input_ids: Vec<T>,
    /// Elements from one prompt to the next.
    pub input_ids_stride: usize,
    /// `[batch]` tokens of each prompt.
    pub input_ids_len: Vec<i64>,
    /// `[batch, pre_ids_stride]` the generated tokens.
    pub pre_ids: Vec<T>,
    /// Elements from one sequence's generated tokens to the next's.
    pub pre_ids_stride: usize,
    /// `[batch]` index of the newest generated token.
    pub step_idx: Vec<i64>,
    /// `[batch]` most tokens that may be generated.
    pub max_dec_len: Vec<i64>,
    /// `[batch]` most drafts wanted.
    pub draft_token_num: Vec<i32>,
    /// `[batch]` above 0 while prefilling.
    pub encoder: Vec<i32>,
    /// `[batch]` above 0 while decoding.
    pub decoder: Vec<i32>,
    /// `[batch]` rows before the launch.
    pub rows: Vec<i32>,
    /// Elements from one sequence's drafts to the next's.
    pub draft_tokens_stride: usize,
    /// Longest pattern.
    pub max_ngram_size: u32,
    /// Rows that the batch may put into the next forward pass.
    pub threshold: i32,
    /// The operator.
    pub operator: Operator,
}

/// What an operator writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome<T> {
    /// `[batch]` rows of each sequence.
    pub rows: Vec<i32>,
    /// `[batch, draft_tokens_stride]`.
    pub drafts: Vec<T>,
}

/// Where the pattern occurs a second time, in a batch of the published benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hit {
    /// Near the start of the prompt.
    PromptEarly,
    /// Near the end of the prompt.
    PromptLate,
    /// Near the start of the generated tokens.
    GeneratedEarly,
    /// Near the end of the generated tokens.
    GeneratedLate,
    /// Nowhere.
    None,
}

impl Hit {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::PromptEarly, Self::GeneratedEarly, Self::PromptLate, Self::GeneratedLate, Self::None];

    /// A short name.
    pub fn name(self) -> &'static str {
        match self {
            Self::PromptEarly => "prompt, early",
            Self::PromptLate => "prompt, late",
            Self::GeneratedEarly => "generated, early",
            Self::GeneratedLate => "generated, late",
            Self::None => "none",
        }
    }
}

/// A case of the published benchmark: prompts of one length, 20 generated tokens before the newest, patterns of up to 3
/// tokens, up to 10 drafts, ids drawn from 490. The pattern's ids occur nowhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each prompt.
    pub length: usize,
    /// Rows that the batch may put into the next forward pass.
    pub threshold: i32,
    /// Where the match is.
    pub hit: Hit,
}

const PATTERN: [i32; 3] = [1001, 1002, 1003];
const NEWEST: usize = 20;
const DRAFTS: usize = 10;

impl Published {
    /// Bytes of 64-bit ids that the search must read if there is no match.
    pub fn bytes(&self) -> u64 {
        (self.batch * (self.length + NEWEST + 1) * 8) as u64
    }

    /// The arrays of the case.
    pub fn inputs<T: TokenId>(&self) -> Inputs<T> {
        let Self { batch, length, threshold, hit } = *self;
        let pre_ids_stride = length + 64;
        let mut random = Random(42);
        let mut some =
            |len: usize| -> Vec<T> { (0..len).map(|_| T::from_small(10 + random.below(490) as i32)).collect() };
        let (mut input_ids, mut pre_ids) = (some(batch * length), some(batch * pre_ids_stride));
        let pattern = PATTERN.map(T::from_small);
        let pattern_at = NEWEST + 1 - PATTERN.len();
        let place = match hit {
            Hit::PromptEarly => Some((true, 5)),
            Hit::PromptLate => length.checked_sub(PATTERN.len() + DRAFTS + 5).map(|at| (true, at)),
            Hit::GeneratedEarly => Some((false, 1)),
            Hit::GeneratedLate => Some((false, pattern_at - PATTERN.len() - DRAFTS)),
            Hit::None => None,
        };
        for b in 0..batch {
            let prompt = &mut input_ids[b * length..][..length];
            let generated = &mut pre_ids[b * pre_ids_stride..][..pre_ids_stride];
            generated[pattern_at..=NEWEST].copy_from_slice(&pattern);
            if let Some((in_prompt, at)) = place {
                let text = if in_prompt { prompt } else { generated };
                let after = (0..DRAFTS).map(|i| T::from_small(2001 + i as i32));
                for (to, token) in text[at..].iter_mut().zip(pattern.into_iter().chain(after)) {
                    *to = token;
                }
            }
        }
        Inputs {
            batch,
            input_ids,
            input_ids_stride: length,
            input_ids_len: vec![length as i64; batch],
            pre_ids,
            pre_ids_stride,
            step_idx: vec![NEWEST as i64; batch],
            max_dec_len: vec![1 << 20; batch],
            draft_token_num: vec![DRAFTS as i32; batch],
            encoder: vec![0; batch],
            decoder: vec![1; batch],
            rows: vec![1; batch],
            draft_tokens_stride: DRAFTS + 1,
            max_ngram_size: PATTERN.len() as u32,
            threshold,
            operator: Operator::Match,
        }
    }
}

impl<T: TokenId> Inputs<T> {
    /// A random batch of `batch` sequences with prompts of up to `longest` tokens: few ids or many, matches planted or
    /// left to chance, budgets that bind or do not, and now and then a hostile value.
    pub fn random(batch: usize, longest: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let ids = random.of(&[2, 3, 20, 500, 150_000]);
        let hostile = random.once_in(3);
        let longest_generated = if random.once_in(2) { 64 } else { longest.max(2) };
        // Odd strides too, so that rows begin anywhere.
        let input_ids_stride = longest + random.below(3) as usize;
        let pre_ids_stride = longest_generated + random.below(3) as usize;
        let some = |len: usize, random: &mut Random| -> Vec<T> {
            (0..len).map(|_| T::from_small(random.below(ids) as i32 - 1)).collect()
        };
        let mut input_ids = some(batch * input_ids_stride, &mut random);
        let pre_ids = some(batch * pre_ids_stride, &mut random);
        let max_ngram_size = random.of(&[1, 2, 3, 3, 5, 12]);
        let mut case = Self {
            batch,
            input_ids_stride,
            input_ids_len: Vec::new(),
            pre_ids,
            pre_ids_stride,
            step_idx: Vec::new(),
            max_dec_len: Vec::new(),
            draft_token_num: Vec::new(),
            encoder: Vec::new(),
            decoder: Vec::new(),
            rows: Vec::new(),
            draft_tokens_stride: random.of(&[11, 16, 33]),
            max_ngram_size,
            threshold: random.of(&[i32::MAX, 8192, 1024, 128, 7 * batch as i32, 3 * batch as i32, 0]),
            operator: if random.once_in(2) {
                Operator::Match
            } else {
                Operator::Mixed { max_draft_tokens: random.of(&[4, 10, 15]), min_ngram_size: random.of(&[0, 1, 2]) }
            },
            input_ids: Vec::new(),
        };
        for b in 0..batch {
            // Short texts are as common as long ones.
            let mut length = |longest: usize| {
                let bits = random.below(usize::BITS.saturating_sub(longest.leading_zeros()).into()) + 1;
                if random.once_in(2) { longest } else { random.below((1u64 << bits).min(longest as u64 + 1)) as usize }
            };
            let len = length(longest);
            let step = length(longest_generated).saturating_sub(1);
            let pattern = step.min(max_ngram_size as usize);
            if random.once_in(2) && len > pattern {
                let at = random.below((len - pattern) as u64) as usize;
                let from = b * pre_ids_stride + step + 1 - pattern;
                input_ids[b * input_ids_stride + at..][..pattern].copy_from_slice(&case.pre_ids[from..from + pattern]);
            }
            let extreme = |random: &mut Random, value: i64| -> i64 {
                if hostile && random.once_in(8) {
                    random.of(&[i64::MIN, -1, 0, 1, value + 1, longest as i64, 1 << 31, 1 << 40, i64::MAX])
                } else {
                    value
                }
            };
            case.input_ids_len.push(extreme(&mut random, len as i64));
            let step = extreme(&mut random, step as i64);
            case.step_idx.push(step);
            let left = random.below(40) as i64 - 4;
            case.max_dec_len.push(extreme(&mut random, step.saturating_add(1 + left)));
            let small = |random: &mut Random, value: i32| {
                if hostile && random.once_in(8) { random.of(&[i32::MIN, -1, 0, 40, i32::MAX]) } else { value }
            };
            let wanted = random.below(12) as i32;
            case.draft_token_num.push(small(&mut random, wanted));
            let (encoder, decoder) = if random.once_in(8) { random.of(&[(5, 0), (0, 0)]) } else { (0, 7) };
            case.encoder.push(small(&mut random, encoder));
            case.decoder.push(small(&mut random, decoder));
            let rows = random.below(5) as i32;
            case.rows.push(small(&mut random, rows));
        }
        case.input_ids = input_ids;
        case
    }

    /// The length of the longest text of either kind, in tokens; it determines the size of a launch.
    pub fn longest(&self) -> u32 {
        let prompt = self.input_ids_len.iter().map(|&len| len.clamp(0, self.input_ids_stride as i64)).max();
        let generated = self.step_idx.iter().map(|&step| step.clamp(0, self.pre_ids_stride as i64)).max();
        prompt.max(generated).unwrap_or(0) as u32
    }

    /// The outputs before a launch. All drafts are one id, which stays where nothing is written.
    pub fn before(&self) -> Outcome<T> {
        let drafts = vec![T::from_small(-77_777); self.batch * self.draft_tokens_stride];
        Outcome { rows: self.rows.clone(), drafts }
    }

    /// The outputs after the serial algorithm.
    pub fn expected(&self) -> Outcome<T> {
        let mut outcome = self.before();
        self.run_serial(&mut outcome);
        outcome
    }

    /// Runs the serial algorithm on existing outputs.
    pub fn run_serial(&self, outcome: &mut Outcome<T>) {
        let batch = reference::Batch {
            input_ids: &self.input_ids,
            input_ids_stride: self.input_ids_stride,
            input_ids_len: &self.input_ids_len,
            pre_ids: &self.pre_ids,
            pre_ids_stride: self.pre_ids_stride,
            step_idx: &self.step_idx,
            max_dec_len: &self.max_dec_len,
            seq_lens_decoder: &self.decoder,
        };
        let mut out = reference::Drafts {
            seq_lens_this_time: &mut outcome.rows,
            draft_tokens: &mut outcome.drafts,
            draft_tokens_stride: self.draft_tokens_stride,
        };
        let (n, threshold) = (self.max_ngram_size, self.threshold);
        match self.operator {
            Operator::Match => {
                reference::ngram_match(&batch, &self.encoder, &self.draft_token_num, n, threshold, &mut out);
            }
            Operator::Mixed { max_draft_tokens, min_ngram_size } => {
                reference::ngram_match_mixed(&batch, max_draft_tokens, n, min_ngram_size, threshold, &mut out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Batch, Peer};
    use super::*;
    use host::device::Device;

    #[test]
    fn published_batches_match_where_they_say() {
        for hit in Hit::ALL {
            let inputs = Published { batch: 3, length: 100, threshold: 512, hit }.inputs::<i64>();
            let outcome = inputs.expected();
            let rows = if hit == Hit::None { 1 } else { 1 + DRAFTS as i32 };
            assert_eq!(outcome.rows, [rows; 3], "{}", hit.name());
        }
    }

    #[test]
    fn batches_on_the_emulator_are_as_the_serial_algorithm_says() {
        let device = Device::emulator(1);
        for seed in 0..30 {
            let inputs = Inputs::<i32>::random(1 + seed as usize % 7, 40 << (seed % 4), seed);
            let batch = Batch::new(&device, &inputs, 2).unwrap();
            batch.launch(1).unwrap();
            assert_eq!(batch.check(1, &inputs.expected()).unwrap(), None, "seed {seed}");
            assert_eq!(batch.outcome(0).unwrap(), inputs.before(), "the other copy was touched");
        }
        let inputs = Published { batch: 3, length: 100, threshold: 20, hit: Hit::PromptLate }.inputs();
        for peer in [Peer::Plain, Peer::BlockScan] {
            let batch = Batch::new(&device, &inputs, 1).unwrap();
            batch.launch_peer(0, peer).unwrap();
            assert_eq!(batch.check(0, &inputs.expected()).unwrap(), None, "{peer:?}");
        }
    }
}
