//! The sizes that a forward pass has memory for, and how many bytes these take.

use gpu_kernels::attention;
use gpu_kernels::kv::{self, HEAD_DIM};
use gpu_kernels::step::MAX_ROWS;
use model::Config;
use model::plan::LayerPlan;

use super::coded::Coded;
use crate::Error;
use crate::cache::KvCache;
use crate::device::Device;
use crate::e4m3::StepInputs;
use crate::prefill::Prefill;
use crate::weight_storage::WeightStorage;
use crate::weights::DeviceWeights;

/// The sizes that memory is allocated for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Most tokens of a sequence.
    pub context: usize,
    /// Sequences at a time. Each has a page table.
    pub sequences: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Most rows of a pass.
    pub rows: usize,
}

impl Capacity {
    /// For one sequence of up to `capacity` tokens.
    pub fn single(capacity: usize) -> Self {
        Self { context: capacity, sequences: 1, pages: pages(capacity), rows: MAX_ROWS as usize }
    }

    /// Checks that kernels can count these sizes, which they do in 32 bits.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { context, sequences, pages, rows } = *self;
        for (what, size) in [
            ("the context", context),
            ("the page tables", sequences),
            ("the cache", pages),
            ("the logits of a pass", rows),
        ] {
            if size >= 1 << 31 {
                return Err(Error::TooLarge { what });
            }
        }
        Ok(())
    }

    /// Splits of attention for a sequence that fills the context.
    pub(crate) fn splits(&self) -> usize {
        self.context.div_ceil(attention::SPLIT as usize)
    }
}

/// The memory that a model takes on a device.
#[derive(Clone, Copy, Debug)]
pub struct Footprint {
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of cache, tables and activations.
    pub working: u64,
    /// Bytes that a model in e4m3 takes in addition.
    pub(crate) of_e4m3: u64,
}

/// The number of pages of a context of `capacity` tokens, rounded up.
pub(super) fn pages(capacity: usize) -> usize {
    capacity.div_ceil(kv::PAGE_TOKENS as usize)
}

impl Footprint {
    /// The footprint of `config` with bf16 matrices and room for one sequence of `capacity` tokens. `has_prefill` says
    /// whether prompts run in passes of many rows on the device.
    pub fn of(config: &Config, capacity: usize, has_prefill: bool) -> Self {
        Self::of_room(config, &Capacity::single(capacity), has_prefill.then_some(capacity))
    }

    /// The same footprint, with matrices kept as `kept` says; none means only bf16.
    #[must_use]
    pub fn keeping(self, config: &Config, kept: Option<WeightStorage>) -> Self {
        let in_e4m3 = kept.is_some_and(WeightStorage::in_e4m3);
        Self { weights: DeviceWeights::bytes(config, kept), ..self }.with_activations(in_e4m3)
    }

    /// The same footprint, with the memory for activations as codes added if the model is in e4m3.
    #[must_use]
    pub(crate) fn with_activations(self, in_e4m3: bool) -> Self {
        if in_e4m3 { Self { working: self.working + self.of_e4m3, of_e4m3: 0, ..self } } else { self }
    }

    /// Bytes of the device's free memory that remain beside this footprint. `context` is for the error message. None
    /// for the emulator.
    ///
    /// # Errors
    /// [`Error::ModelTooLarge`], or a driver error.
    pub fn left_on(self, device: &Device, context: usize) -> Result<Option<u64>, Error> {
        let Some(free) = device.free_memory()? else { return Ok(None) };
        let Self { weights, working: cache, .. } = self;
        let too_large = || Error::ModelTooLarge { device: device.name().into(), weights, cache, context, free };
        free.checked_sub(weights + cache).map(Some).ok_or_else(too_large)
    }

    /// The footprint of `config` with this `room` and, if prompts have passes of their own, for up to `prefill` rows in
    /// such a pass.
    pub fn of_room(config: &Config, room: &Capacity, prefill: Option<usize>) -> Self {
        let rows = room.rows;
        let LayerPlan { hidden, attention, .. } = config.plan;
        let activations = rows * (hidden * 6 + hidden / 4 + attention.qkv_size() * 4 + attention.query_size() * 4);
        // Each row has sums of four-byte elements. A single row is also exchanged in eight-byte words.
        let partial = (rows * 4 + 8) * attention.query_heads * room.splits() * (HEAD_DIM as usize + 2);
        let working = room.pages * KvCache::page_bytes(config)
            + room.context * HEAD_DIM as usize * 4
            + room.sequences * pages(room.context) * 4
            + partial
            + activations
            + rows * (config.plan.activation_size() * 2 + config.vocab_size * 4);
        let of_prompts = prefill.map_or(0, |rows| Prefill::bytes(config, rows));
        let codes = prefill.map_or(0, |rows| Prefill::code_bytes(config, rows));
        Self {
            weights: DeviceWeights::bytes(config, None),
            working: working as u64 + of_prompts,
            of_e4m3: Coded::bytes(config, rows) + StepInputs::bytes(config) + codes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::Forward;

    /// Products of these wrap around to small numbers.
    #[test]
    fn sizes_that_no_memory_could_hold_are_refused() {
        let shape = Config::published("0.6B").unwrap();
        let mut config = Config { vocab_size: 64, num_hidden_layers: 2, ..shape };
        config.plan.resize(128, 256, (2, 1));
        let device = Device::emulator(0);
        let room = Capacity { context: 128, sequences: 1, pages: 2, rows: 64 };
        let refusal = |room| {
            let weights = DeviceWeights::random(&config, &device).unwrap();
            let forward = Forward::with_room(&device, &config, weights, room);
            forward.err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refusal(room), "");
        // A page of a layer has 2^14 elements.
        let pages = (1 << 49) + 1;
        for (room, what) in [
            (Capacity { pages, ..room }, "the cache would be larger than any memory"),
            (Capacity { sequences: (1 << 63) + 1, ..room }, "the page tables would be"),
            (Capacity { rows: (1 << 60) + 1, ..room }, "the logits of a pass would be"),
            (Capacity { context: 1 << 40, ..room }, "the context would be"),
        ] {
            let error = refusal(room);
            assert!(error.contains(what), "{error:?}");
        }
        let error = KvCache::new(&device, &config, pages).err().unwrap().to_string();
        assert!(error.contains("the cache would be larger than any memory"), "{error}");
    }
}
