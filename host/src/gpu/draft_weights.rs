//! The weights of a draft model or an EAGLE-3 head, on a device.

use model::Config;

use crate::device::Device;
use crate::draft::DraftCheckpoint;
use crate::drafter::Passes;
use crate::forward::{Footprint, Forward, HeadWeights};
use crate::weight_storage::WeightStorage;
use crate::weights::DeviceWeights;
use crate::{Error, Progress};

/// The weights of a draft model or of a head.
pub enum DraftWeights {
    /// A draft model's, with its config.
    Model(Config, Box<DeviceWeights>),
    /// An EAGLE-3 head's.
    Eagle3(Box<HeadWeights>),
}

impl DraftWeights {
    /// Uploads `draft` to `device`, to draft for a model with the config `model`, for sequences of up to `capacity`
    /// tokens. If the weights of a draft model turn out to be kept as bf16, `fits` is asked whether there is room for
    /// that footprint. `progress` is told the bytes.
    pub(super) fn upload(
        draft: &DraftCheckpoint,
        model: &Config,
        device: &Device,
        capacity: usize,
        fits: &dyn Fn(Footprint) -> Result<(), Error>,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        match draft {
            DraftCheckpoint::Model(draft) => {
                let kept = WeightStorage::of(draft, device)?;
                let plain_fits = || fits(Footprint::of(&draft.config, capacity, device.has_prefill()));
                let weights = DeviceWeights::upload(draft, device, kept, plain_fits, progress)?;
                Ok(Self::Model(draft.config.clone(), Box::new(weights)))
            }
            DraftCheckpoint::Eagle3(head) => {
                let weights = HeadWeights::upload(head, model, device)?;
                // A head is small: it is uploaded whole before progress is told.
                if progress(u64::MAX, u64::MAX).is_break() {
                    return Err(Error::Interrupted);
                }
                Ok(Self::Eagle3(Box::new(weights)))
            }
        }
    }

    /// Which hidden states of the model a head drafts from: the residual stream after each of these numbers of layers.
    /// None for a draft model.
    pub(super) fn taps(&self) -> Option<[usize; 3]> {
        match self {
            Self::Model(..) => None,
            Self::Eagle3(head) => Some(head.taps),
        }
    }

    /// Allocates the memory of its passes, for sequences of up to `capacity` tokens, to draft for `model`, which is to
    /// live as long.
    pub(super) fn passes(self, model: &Forward, capacity: usize) -> Result<Passes, Error> {
        match self {
            Self::Model(config, weights) => {
                Ok(Passes::Model(Forward::new(model.device(), &config, *weights, capacity)?))
            }
            Self::Eagle3(head) => Passes::of_head(*head, model),
        }
    }
}
