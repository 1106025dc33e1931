//! A batch on a device as it is loaded, with whatever drafts for it.

use model::{Checkpoint, Config};

use super::GpuBatch;
use super::sizes::{BatchSizes, SPARE};
use crate::batch::cpu::check_memory;
use crate::batch::draft::ModelDrafter;
use crate::batch::{BatchOptions, PAGE_TOKENS};
use crate::cache::KvCache;
use crate::device::Device;
use crate::forward::{Footprint, Forward};
use crate::quantized::Kept;
use crate::tuning::DRAFT_LAYER_BYTES;
use crate::weights::DeviceWeights;
use crate::{Error, Progress};

/// A draft model's cache takes at most one part in so many of the memory that the weights leave, or holds one sequence.
const DRAFTER_SHARE: u64 = 8;

/// The least that a draft model with its batch takes.
#[derive(Clone, Copy)]
struct LeastDrafter {
    weights: u64,
    working: u64,
}

impl LeastDrafter {
    /// In a batch of sequences of up to `context` tokens.
    fn of(draft: &Checkpoint, device: &Device, context: usize, options: &BatchOptions) -> Result<Self, Error> {
        let of_draft = |error| Error::DraftModel(Box::new(error));
        Forward::check(&draft.config).map_err(of_draft)?;
        let sizes = BatchSizes::new(device, context, &options.of_drafter(None), device.has_prefill());
        let kept = DeviceWeights::kept(draft, device).map_err(of_draft)?;
        let Footprint { weights, working, .. } =
            Footprint::of_room(&draft.config, &sizes.room(context.div_ceil(PAGE_TOKENS)), sizes.prompt_rows())
                .coded(&draft.config, kept);
        Ok(Self { weights, working })
    }

    fn bytes(self) -> u64 {
        self.weights + self.working
    }

    /// Checks that it fits into the bytes that the model leaves, if it is known how many these are.
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

impl GpuBatch {
    /// Uploads `checkpoint` to `device`, for sequences of up to `context` tokens; what `options` leave open is as much
    /// as there is memory for. With a model that drafts for it, if there is one.
    ///
    /// # Errors
    /// As [`Gpu::with_draft_model`](crate::Gpu::with_draft_model); a cache larger than the memory.
    pub fn load(
        checkpoint: &Checkpoint,
        draft: Option<&Checkpoint>,
        device: &Device,
        context: usize,
        options: BatchOptions,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        let config = &checkpoint.config;
        Forward::check(config)?;
        let prompts_apart = device.has_prefill();
        let sizes = BatchSizes::new(device, context, &options, prompts_apart);
        let kept = DeviceWeights::kept(checkpoint, device)?;
        let beside = draft.map(|draft| LeastDrafter::of(draft, device, context, &options)).transpose()?;
        // Said before anything is loaded.
        let fits = |kept| {
            let least = Footprint::of_room(config, &sizes.room(context.div_ceil(PAGE_TOKENS)), sizes.prompt_rows())
                .coded(config, kept);
            let least = Footprint { working: least.working + SPARE, ..least };
            let left = least.left_on(device, context)?;
            beside.map_or(Ok(()), |beside: LeastDrafter| beside.fits(device, context, left))?;
            let coming = least.weights + beside.map_or(0, LeastDrafter::bytes);
            let in_e4m3 = kept.is_some_and(|kept: Kept| kept.coding.in_blocks);
            let pages = sizes.pages(config, device, &options, in_e4m3, coming)?;
            let tier = sizes.host_pages(config, &options, pages)?;
            if device.is_emulator() {
                // It keeps note of what was written, 2 bytes for 16.
                let page = KvCache::page_bytes(config) * 9 / 8;
                check_memory(page, pages + tier, least.working + coming)?;
            }
            Ok(())
        };
        fits(kept)?;
        let of_model = DeviceWeights::bytes(config, kept);
        let all = of_model + beside.map_or(0, |beside| beside.weights);
        let told = &mut |done: u64, _: u64| progress(done.min(of_model), all);
        let weights = DeviceWeights::upload(checkpoint, device, kept, || fits(None), told)?;
        let load_drafter = |draft| {
            let told = &mut |done: u64, _: u64| progress((of_model + done).min(all), all);
            Self::load_drafter(draft, config, device, context, &options, told)
                .map_err(|error| Error::DraftModel(Box::new(error)))
        };
        let drafter = draft.map(load_drafter).transpose()?;
        let mut batch = Self::with_weights(device, config, weights, context, options, prompts_apart)?;
        batch.drafters.model = drafter;
        Ok(batch)
    }

    /// Uploads a model that drafts for one of this config, with a batch of its own.
    fn load_drafter(
        draft: &Checkpoint,
        model: &Config,
        device: &Device,
        context: usize,
        options: &BatchOptions,
        progress: &mut Progress<'_>,
    ) -> Result<ModelDrafter, Error> {
        let config = &draft.config;
        let kept = DeviceWeights::kept(draft, device)?;
        let weights = DeviceWeights::upload(draft, device, kept, || Ok(()), progress)?;
        let sequences = options.of_drafter(None).sequences.unwrap_or(1) as usize;
        let room = device.free_memory()?.map_or(usize::MAX, |free| {
            let token = KvCache::page_bytes(config) / PAGE_TOKENS;
            (free / DRAFTER_SHARE) as usize / token
        });
        let tokens = (sequences * context).min(room).max(context.next_multiple_of(PAGE_TOKENS));
        let options = options.of_drafter(Some(tokens));
        let batch = Self::with_weights(device, config, weights, context, options, device.has_prefill())?;
        Ok(ModelDrafter::new(Box::new(batch), model, draft, DRAFT_LAYER_BYTES))
    }
}
