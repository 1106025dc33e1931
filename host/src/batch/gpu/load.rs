//! Loads a batch on a device, with a model or head that drafts for it if there is one.

use gpu_kernels::step::MAX_DECODE_ROWS;
use model::{Checkpoint, Config};

use super::GpuBatch;
use super::head::HeadBatch;
use super::sizes::{BatchSizes, SPARE};
use crate::batch::backend::BatchBackend;
use crate::batch::cpu::check_memory;
use crate::batch::draft::head::HeadSizes;
use crate::batch::draft::{ModelDrafter, WINDOW};
use crate::batch::{BatchOptions, PAGE_TOKENS};
use crate::cache::KvCache;
use crate::device::Device;
use crate::draft::DraftCheckpoint;
use crate::forward::{Footprint, Forward, HeadWeights};
use crate::tuning::layer_bytes;
use crate::weight_storage::WeightStorage;
use crate::weights::DeviceWeights;
use crate::{Error, Progress};

/// A draft model's cache takes at most one part in this many of the memory that the weights leave, but holds at least
/// one sequence.
const DRAFTER_SHARE: u64 = 8;

/// A context longer than the shortest is taken only if what it needs beside the cache is at most one part in this many
/// of the free memory.
const CONTEXT_SHARE: u64 = 32;

/// The least memory that a draft model or a head takes, with its batch.
#[derive(Clone, Copy)]
struct LeastDrafter {
    weights: u64,
    working: u64,
}

impl LeastDrafter {
    /// For a batch with sequences of up to `context` tokens.
    fn of(draft: &DraftCheckpoint, device: &Device, context: usize, options: &BatchOptions) -> Result<Self, Error> {
        let of_draft = |error| Error::DraftModel(Box::new(error));
        draft.check_shapes().map_err(of_draft)?;
        let of_drafter = options.of_drafter(None);
        let sizes = BatchSizes::new(device, context, &of_drafter);
        let room = |config| Footprint::of_room(config, &sizes.room(context.div_ceil(PAGE_TOKENS)), sizes.prompt_rows());
        let Footprint { weights, working, .. } = match draft {
            DraftCheckpoint::Model(draft) => {
                let kept = WeightStorage::of(draft, device).map_err(of_draft)?;
                room(&draft.config).keeping(&draft.config, kept)
            }
            DraftCheckpoint::Eagle3(head) => {
                let states = Forward::states_bytes(sizes.generating * WINDOW, head.config.plan.hidden);
                let Footprint { weights, working, .. } = HeadWeights::footprint(head, context, false);
                Footprint { weights, working: working + states, of_e4m3: 0 }
            }
        };
        Ok(Self { weights, working })
    }

    fn bytes(self) -> u64 {
        self.weights + self.working
    }

    /// Checks that it fits in the `left` bytes that the model leaves, if these are known.
    fn fits(self, device: &Device, context: usize, left: Option<u64>) -> Result<(), Error> {
        let Self { weights, working: cache } = self;
        match left {
            Some(left) if self.bytes() > left => {
                Err(Error::DraftModelTooLarge { device: device.name().into(), weights, cache, context, left })
            }
            _ => Ok(()),
        }
    }
}

/// The options of a batch that `draft` drafts for. For a head, steps with drafts have few rows: those with more leave
/// no hidden states.
fn with_draft_rows_for(draft: Option<&DraftCheckpoint>, options: BatchOptions) -> BatchOptions {
    match draft {
        Some(DraftCheckpoint::Eagle3(_)) => {
            BatchOptions { draft_rows: options.draft_rows.min(MAX_DECODE_ROWS), ..options }
        }
        Some(DraftCheckpoint::Model(_)) | None => options,
    }
}

/// What is asked of a card's memory, before anything is loaded.
struct MemoryPlan<'a> {
    config: &'a Config,
    draft: Option<&'a DraftCheckpoint>,
    device: &'a Device,
    options: &'a BatchOptions,
    /// The shortest of the possible contexts.
    shortest: usize,
}

impl MemoryPlan<'_> {
    fn sizes(&self, context: usize) -> BatchSizes {
        BatchSizes::new(self.device, context, self.options)
    }

    /// The least that the drafter takes.
    fn drafter(&self, context: usize) -> Result<Option<LeastDrafter>, Error> {
        self.draft.map(|draft| LeastDrafter::of(draft, self.device, context, self.options)).transpose()
    }

    /// The pages that the cache has beside all else.
    ///
    /// # Errors
    /// Too little memory.
    fn pages(&self, context: usize, kept: Option<WeightStorage>) -> Result<usize, Error> {
        let Self { config, device, options, .. } = *self;
        let (sizes, drafter) = (self.sizes(context), self.drafter(context)?);
        let least = Footprint::of_room(config, &sizes.room(context.div_ceil(PAGE_TOKENS)), sizes.prompt_rows())
            .keeping(config, kept);
        let least = Footprint { working: least.working + SPARE, ..least };
        let left = least.left_on(device, context)?;
        drafter.map_or(Ok(()), |drafter| drafter.fits(device, context, left))?;
        // A drafter may take more than the least. A longer context must leave room for that.
        let free = device.free_memory()?.filter(|_| self.draft.is_some() && context > self.shortest);
        let of_drafter = drafter.map_or(0, LeastDrafter::bytes) + free.map_or(0, |free| free / DRAFTER_SHARE);
        let coming = least.weights + of_drafter + GpuBatch::decode_bytes(device);
        let in_e4m3 = kept.is_some_and(WeightStorage::in_e4m3);
        let pages = sizes.pages(config, device, options, in_e4m3, coming)?;
        let tier = sizes.host_pages(config, options, pages)?;
        if device.is_emulator() {
            // The emulator also tracks which memory was written, with 2 bytes for 16.
            let page = KvCache::page_bytes(config) * 9 / 8;
            check_memory(page, pages + tier, least.working + coming)?;
        }
        Ok(pages)
    }

    /// Bytes that a drafter may take for its cache once the weights are loaded: its share of what is free, but not of
    /// the memory for a cache that was asked for. `pages` is the size of that cache. None for the emulator.
    fn drafters_share(&self, context: usize, kept: Option<WeightStorage>, pages: usize) -> Result<Option<u64>, Error> {
        let Self { config, device, options, .. } = *self;
        let Some(free) = device.free_memory()? else { return Ok(None) };
        let share = free / DRAFTER_SHARE;
        if options.cache_tokens.is_none() {
            return Ok(Some(share));
        }
        let (sizes, in_e4m3) = (self.sizes(context), kept.is_some_and(WeightStorage::in_e4m3));
        let besides = GpuBatch::decode_bytes(device) + self.drafter(context)?.map_or(0, |drafter| drafter.working);
        let left = free.saturating_sub(sizes.bytes(config, pages, in_e4m3) + besides);
        Ok(Some(share.min(left)))
    }

    /// The longest of these contexts that there is memory for and that takes little of it beside the cache, else the
    /// shortest.
    fn context(&self, contexts: &[usize], kept: Option<WeightStorage>) -> Result<usize, Error> {
        let working = |context| {
            let sizes = self.sizes(context);
            Footprint::of_room(self.config, &sizes.room(0), sizes.prompt_rows()).working
        };
        let free = self.device.free_memory()?;
        let most = free.map_or(u64::MAX, |free| working(self.shortest) + free / CONTEXT_SHARE);
        let fits = |&&context: &&usize| working(context) <= most && self.pages(context, kept).is_ok();
        Ok(contexts.iter().find(fits).copied().unwrap_or(self.shortest))
    }
}

impl GpuBatch {
    /// Uploads `checkpoint` to `device`, with the model or head that drafts for it, if there is one. `contexts` are the
    /// possible contexts, the longest first. The first is taken that there is memory for and that takes little of it
    /// beside the cache. Sizes that `options` leave open become as large as memory allows.
    ///
    /// # Errors
    /// As [`Gpu::with_draft_model`](crate::Gpu::with_draft_model); a cache larger than the memory.
    ///
    /// # Panics
    /// If `contexts` is empty: a bug of the caller.
    pub fn load(
        checkpoint: &Checkpoint,
        draft: Option<&DraftCheckpoint>,
        device: &Device,
        contexts: &[usize],
        options: BatchOptions,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        let config = &checkpoint.config;
        Forward::check(config)?;
        let options = with_draft_rows_for(draft, options);
        let shortest = *contexts.last().expect("a context");
        let memory = MemoryPlan { config, draft, device, options: &options, shortest };
        // The format of the weights is chosen for the shortest context: a longer one is no reason for another format.
        let sizes = BatchSizes::new(device, shortest, &options);
        let kept = Self::kept(checkpoint, device, (&sizes, &options), |kept| memory.pages(shortest, kept))?;
        let options = sizes.with_sequences_for(memory.pages(shortest, kept)?, options);
        let memory = MemoryPlan { options: &options, ..memory };
        let context = memory.context(contexts, kept)?;
        let pages = memory.pages(context, kept)?;
        let share = || memory.drafters_share(context, kept, pages);
        let of_model = DeviceWeights::bytes(config, kept);
        let all = of_model + memory.drafter(context)?.map_or(0, |drafter| drafter.weights);
        let told = &mut |done: u64, _: u64| progress(done.min(of_model), all);
        let fits = || memory.pages(context, None).map(drop);
        let weights = DeviceWeights::upload(checkpoint, device, kept, fits, told)?;
        let of_draft = |error| Error::DraftModel(Box::new(error));
        let told = &mut |done: u64, _: u64| progress((of_model + done).min(all), all);
        let with_model = |weights| Self::with_weights(device, config, weights, context, options);
        let Some(draft) = draft else { return with_model(weights) };
        let (mut batch, drafter): (Self, Box<dyn BatchBackend>) = match draft {
            DraftCheckpoint::Model(draft) => {
                let drafter = Self::load_drafter(draft, device, context, &options, share, told).map_err(of_draft)?;
                (with_model(weights)?, Box::new(drafter))
            }
            DraftCheckpoint::Eagle3(head) => {
                let head = HeadWeights::upload(head, config, device).map_err(of_draft)?;
                let sequences = options.of_drafter(None).sequences.unwrap_or(1) as usize;
                let pages = HeadBatch::pages(&head, context, sequences, share()?);
                // The model's cache takes all memory that is left, so what the head needs afterwards is held back
                // meanwhile.
                let needed = head.batch_bytes(context, sequences, pages)
                    + Forward::states_bytes(sequences * WINDOW, config.plan.hidden);
                let kept_free = device.free_memory()?.map(|_| device.zeroed::<u8>(needed as usize)).transpose()?;
                let mut batch = with_model(weights)?;
                drop(kept_free);
                batch.forward.keep_states_of(head.taps, sequences, WINDOW)?;
                let sizes = HeadSizes { context, sequences, pages };
                let head = HeadBatch::new(head, &batch.forward, sizes).map_err(of_draft)?;
                (batch, Box::new(head))
            }
        };
        let costs = (batch.forward.pass_bytes(), layer_bytes::ONE_ROW);
        batch.drafters.model = Some(ModelDrafter::new(drafter, config, draft, costs));
        Ok(batch)
    }

    /// The format in which the checkpoint's matrices are kept: the quickest for steps of these sizes. `fits` returns
    /// how many pages the cache has with a format.
    fn kept(
        checkpoint: &Checkpoint,
        device: &Device,
        (sizes, options): (&BatchSizes, &BatchOptions),
        fits: impl Fn(Option<WeightStorage>) -> Result<usize, Error>,
    ) -> Result<Option<WeightStorage>, Error> {
        if let Some(coded) = WeightStorage::coded(checkpoint, device)? {
            return Ok(Some(if fits(Some(coded)).is_ok() { coded } else { coded.alone() }));
        }
        // Packed weights are quicker only for few rows.
        let are_wanted = sizes.are_few() || device.options().lossless == Some(true);
        if !are_wanted && fits(None).is_ok() {
            return Ok(None);
        }
        let Some(packed) = WeightStorage::packed(checkpoint, device)? else { return Ok(None) };
        // Prompts are quicker with bf16 weights beside the packed ones, which are kept if both leave enough for the
        // cache.
        let is_beside =
            packed.plain && are_wanted && fits(Some(packed)).is_ok_and(|pages| sizes.are_enough(pages, options));
        Ok(Some(if is_beside { packed } else { packed.alone() }))
    }

    /// Uploads a draft model as a batch of its own. `share` returns the bytes that its cache may take.
    fn load_drafter(
        draft: &Checkpoint,
        device: &Device,
        context: usize,
        options: &BatchOptions,
        share: impl FnOnce() -> Result<Option<u64>, Error>,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        let config = &draft.config;
        let kept = WeightStorage::of(draft, device)?;
        let weights = DeviceWeights::upload(draft, device, kept, || Ok(()), progress)?;
        let sequences = options.of_drafter(None).sequences.unwrap_or(1) as usize;
        let token = KvCache::page_bytes(config) / PAGE_TOKENS;
        let room = share()?.map_or(usize::MAX, |bytes| bytes as usize / token);
        let tokens = (sequences * context).min(room).max(context.next_multiple_of(PAGE_TOKENS));
        let options = options.of_drafter(Some(tokens));
        Self::with_weights(device, config, weights, context, options)
    }
}
