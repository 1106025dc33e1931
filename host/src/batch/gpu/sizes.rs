//! The sizes of a batch on a device.

use gpu_kernels::batched::{BatchedStep, MAX_BATCHED_ROWS};
use gpu_kernels::step;
use gpu_kernels::token_copy::PAGE_RECORD_BYTES;
use model::Config;

use crate::batch::{BatchOptions, Limits, PAGE_TOKENS};
use crate::cache::KvCache;
use crate::cpu::memory;
use crate::device::Device;
use crate::forward::{Capacity, FULL_ROWS, Footprint, MOST_PASS_ROWS};
use crate::prefill;
use crate::tuning::PASS_ROWS;
use crate::{Error, LoadOptions};

/// If prompts have passes of their own: for this many sequences that generate, the prompt of one more is read ahead, to
/// take the place of one that ends.
const AHEAD: usize = 10;
/// More sequences than this generate at once only if the cache has [`TOKENS_EACH`] for each of them, unless a number is
/// asked for. With less, many would be preempted.
const SEQUENCES_AT_LEAST: usize = 512;
const TOKENS_EACH: usize = 640;
/// Most rows of a step, for which lists have room.
const MOST_ROWS: usize = 1 << 16;
/// Bytes of device memory that are left to other programs.
pub const SPARE: u64 = 1 << 30;
/// Least rows that a pass has room for.
pub const LEAST_ROWS: usize = step::MAX_ROWS as usize;
/// Default for bytes of the host tier, but at most one part in so many of the memory that the program may use: several
/// cards have a tier each, and pinned memory cannot be swapped out.
const HOST_TIER: u64 = 4 << 30;
const HOST_TIER_SHARE: u64 = 32;

/// The sizes of a batch, without its pages.
pub struct BatchSizes {
    context: usize,
    /// Sequences that generate at the same time.
    pub generating: usize,
    /// Sequences that generate or are read ahead.
    pub sequences: usize,
    /// Most rows of a step.
    pub rows: usize,
    prompts_apart: bool,
}

impl BatchSizes {
    /// The sizes that `options` give; for those that they leave open, what is good on `device`.
    pub fn new(device: &Device, context: usize, options: &BatchOptions) -> Self {
        let prompts_apart = device.has_prefill();
        let tuning = device.capabilities().tuning();
        let generating = options.sequences.unwrap_or(tuning.sequences).clamp(1, BatchOptions::MOST_SEQUENCES) as usize;
        let sequences = generating + if prompts_apart { generating / AHEAD } else { 0 };
        let rows = options.rows.unwrap_or(if prompts_apart { PASS_ROWS as u32 } else { tuning.step_rows }) as usize;
        Self { context, generating, sequences, rows: rows.clamp(sequences, MOST_ROWS), prompts_apart }
    }

    /// The options for a cache of `pages` pages: with fewer sequences, if these would be too many for it and were not
    /// asked for.
    pub fn with_sequences_for(&self, pages: usize, options: BatchOptions) -> BatchOptions {
        if options.sequences.is_some() || self.generating <= SEQUENCES_AT_LEAST {
            return options;
        }
        let fit = pages * PAGE_TOKENS / TOKENS_EACH.min(self.context);
        BatchOptions { sequences: Some(fit.clamp(SEQUENCES_AT_LEAST, self.generating) as u32), ..options }
    }

    /// Rows of a pass over prompts. None if there are no such passes.
    pub fn prompt_rows(&self) -> Option<usize> {
        self.prompts_apart.then_some(self.rows)
    }

    /// Most rows of a pass over generated rows. The [room](Self::room) is larger, because a sequence that is read ahead
    /// may have its first token chosen in the same step as all others.
    pub fn decode_rows(&self) -> usize {
        self.room(0).rows.min(if self.prompts_apart { MOST_PASS_ROWS } else { MAX_BATCHED_ROWS } as usize)
    }

    /// Whether every step over generated rows is small enough for the decode kernel.
    pub fn are_few(&self) -> bool {
        self.generating <= step::MAX_DECODE_ROWS as usize
    }

    /// Whether a cache of `pages` pages suffices: for what the `options` ask for, or else for what sequences are likely
    /// to use.
    pub fn are_enough(&self, pages: usize, options: &BatchOptions) -> bool {
        let likely = self.context.min(LoadOptions::DEFAULT_CONTEXT).div_ceil(PAGE_TOKENS) * self.sequences;
        options.cache_tokens.is_some() || pages >= likely
    }

    /// The pages of all sequences at their greatest length.
    fn most_pages(&self) -> usize {
        self.context.div_ceil(PAGE_TOKENS) * self.sequences
    }

    /// The capacity for these sizes and `pages` pages.
    pub fn room(&self, pages: usize) -> Capacity {
        Capacity::batch(self.context, self.sequences, pages, self.sequences.max(LEAST_ROWS))
    }

    /// The number of pages of the cache. `coming` is the number of bytes that will still be allocated beside it.
    pub fn pages(
        &self,
        config: &Config,
        device: &Device,
        options: &BatchOptions,
        in_e4m3: bool,
        coming: u64,
    ) -> Result<usize, Error> {
        let one = self.context.div_ceil(PAGE_TOKENS);
        let wanted = options.cache_tokens.map(|tokens| (tokens / PAGE_TOKENS).max(one));
        let Some(free) = device.free_memory()? else {
            return Ok(wanted.unwrap_or(self.most_pages()).min(Self::numbered_pages(config)));
        };
        let besides = self.bytes(config, 0, in_e4m3) + coming;
        let page = KvCache::page_bytes(config) as u64;
        let room = ((free.saturating_sub(besides) / page) as usize).min(Self::numbered_pages(config));
        let pages = wanted.unwrap_or(room.min(self.most_pages()));
        if pages > room || pages < one {
            let tokens = pages.max(one) * PAGE_TOKENS;
            let wanted = (tokens as u64 / PAGE_TOKENS as u64).saturating_mul(page);
            return Err(Error::CacheTooLarge { tokens, wanted, free: free.saturating_sub(besides) });
        }
        Ok(pages)
    }

    /// Bytes that a batch with `pages` pages takes beside its weights, with those that are left to other programs.
    pub fn bytes(&self, config: &Config, pages: usize, in_e4m3: bool) -> u64 {
        let room = self.room(pages);
        let working = Footprint::of_room(config, &room, self.prompt_rows()).with_activations(in_e4m3).working;
        // How often each sequence has used each token, and the items of attention.
        let items = BatchedStep::items_len(room.rows, config.plan.attention.key_value_heads, room.splits());
        working + 4 * (self.sequences * config.vocab_size + items) as u64 + SPARE
    }

    /// The most pages whose records can be numbered, which is 8 TiB.
    fn numbered_pages(config: &Config) -> usize {
        i32::MAX as usize / (KvCache::page_bytes(config) / PAGE_RECORD_BYTES as usize)
    }

    /// The pages of the host tier for a cache of `pages` pages.
    ///
    /// # Errors
    /// [`Error::HostTier`], for more pages than can be numbered.
    pub fn host_pages(&self, config: &Config, options: &BatchOptions, pages: usize) -> Result<usize, Error> {
        let Some(tokens) = options.swap_tokens else {
            let bytes = HOST_TIER.min(memory() / HOST_TIER_SHARE);
            return Ok(pages.min(bytes as usize / KvCache::page_bytes(config)));
        };
        let tier = tokens / PAGE_TOKENS;
        if tier > Self::numbered_pages(config) {
            return Err(Self::no_tier(config, tier, "8 TiB are the most".into()));
        }
        Ok(tier)
    }

    /// The scheduler's limits, with these numbers of pages on the device and in the host tier.
    pub fn limits(&self, config: &Config, device: &Device, options: &BatchOptions, pages: [usize; 2]) -> Limits {
        let [pages, host_pages] = pages.map(|pages| pages as u32);
        let best_rows = || prefill::best_rows(device, config).min(self.rows as u32);
        Limits {
            context: self.context,
            sequences: self.sequences as u32,
            generating: self.generating as u32,
            rows: self.rows as u32,
            page_tokens: PAGE_TOKENS,
            pages,
            host_pages,
            drafts: options.draft.map_or(0, |draft| draft.tokens()),
            draft_rows: options.draft_rows,
            prompt_rows: if self.prompts_apart { best_rows() } else { 0 },
            prompt_share: device.capabilities().tuning().prompt_share,
            prompts_apart: self.prompts_apart,
            tiles: if self.prompts_apart { &FULL_ROWS } else { &[] },
        }
    }

    /// Changed uses of tokens that a step has room for.
    pub fn use_changes(&self) -> usize {
        4 * self.rows
    }

    /// Most words that a step sends to the device, for these pages on the device and in the host tier.
    pub fn upload_words(&self, pages: usize, tier: usize) -> usize {
        // In order: rows with tiles and choices; entries of page tables; moves of pages, with source and target; pages
        // to pack and unpack, with flags; uses; and the alignment of the lists, which begin at multiples of 4 words.
        32 * self.rows
            + 2 * self.sequences * self.context.div_ceil(PAGE_TOKENS)
            + 2 * (2 * pages + tier)
            + 4 * pages
            + 2 * self.use_changes()
            + 4096
    }

    /// The error that a host tier of `pages` pages cannot be allocated.
    pub fn no_tier(config: &Config, pages: usize, reason: String) -> Error {
        Error::HostTier { wanted: pages.saturating_mul(KvCache::page_bytes(config)) as u64, reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceOptions;

    #[test]
    fn passes_have_no_more_rows_than_kernels() {
        let rows = |sequences, prompts_apart| {
            let device =
                Device::emulator_with(1, &DeviceOptions { prefill: Some(prompts_apart), ..Default::default() });
            let options = BatchOptions { sequences, ..BatchOptions::default() };
            let sizes = BatchSizes::new(&device, 64, &options);
            (sizes.decode_rows(), sizes.room(0).rows, sizes.sequences)
        };
        assert_eq!(rows(None, true), (64, 64, 8));
        assert_eq!(rows(Some(256), true), (384, 384, 281));
        assert_eq!(rows(Some(512), true), (1024, 1024, 563));
        assert_eq!(rows(Some(BatchOptions::MOST_SEQUENCES), true), (1024, 1536, 1126));
        assert_eq!(rows(Some(BatchOptions::MOST_SEQUENCES), false), (512, 1024, 1024));
    }

    #[test]
    fn a_small_cache_has_fewer_sequences() {
        let options = BatchOptions::default();
        let sizes =
            |context| BatchSizes { context, generating: 1024, sequences: 1126, rows: 8192, prompts_apart: true };
        let sequences = |context, pages| sizes(context).with_sequences_for(pages, options).sequences;
        assert_eq!(sequences(8192, 10 * 1024), Some(1024));
        assert_eq!(sequences(8192, 10 * 700), Some(700));
        assert_eq!(sequences(8192, 100), Some(512));
        // Of a short context no sequence needs more.
        assert_eq!(sequences(128, 2 * 800), Some(800));
        let asked = BatchOptions { sequences: Some(900), ..options };
        assert_eq!(sizes(8192).with_sequences_for(100, asked).sequences, Some(900));
        let few = BatchSizes { generating: 512, ..sizes(8192) };
        assert_eq!(few.with_sequences_for(100, options).sequences, None);
    }
}
