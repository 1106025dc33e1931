//! The weights of what drafts beside the text, on a device.

use model::Config;

use crate::device::Device;
use crate::draft::DraftCheckpoint;
use crate::drafter::Passes;
use crate::forward::{Footprint, Forward, HeadWeights};
use crate::kept::Kept;
use crate::weights::DeviceWeights;
use crate::{Error, Progress};

/// A draft model's or a head's weights.
pub enum DraftWeights {
    /// A draft model's, with its sizes.
    Model(Config, Box<DeviceWeights>),
    /// An EAGLE-3 head's.
    Eagle3(Box<HeadWeights>),
}

impl DraftWeights {
    /// Uploads `draft` to `device`, to draft for a model of this config, for sequences of up to `capacity` tokens;
    /// `fits` says whether there is room for another footprint than its own, and `progress` is told the bytes.
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
                let kept = Kept::of(draft, device)?;
                let plain_fits = || fits(Footprint::of(&draft.config, capacity, device.has_prefill()));
                let weights = DeviceWeights::upload(draft, device, kept, plain_fits, progress)?;
                Ok(Self::Model(draft.config.clone(), Box::new(weights)))
            }
            DraftCheckpoint::Eagle3(head) => {
                let weights = HeadWeights::upload(head, model, device)?;
                // All of it: a head is small.
                if progress(u64::MAX, u64::MAX).is_break() {
                    return Err(Error::Interrupted);
                }
                Ok(Self::Eagle3(Box::new(weights)))
            }
        }
    }

    /// After how many layers of the model the residual stream is a hidden state that it drafts from, if it does.
    pub(super) fn taps(&self) -> Option<[usize; 3]> {
        match self {
            Self::Model(..) => None,
            Self::Eagle3(head) => Some(head.taps),
        }
    }

    /// With memory for sequences of up to `capacity` tokens, to draft for `model`, which is to live as long.
    pub(super) fn passes(self, model: &Forward, capacity: usize) -> Result<Passes, Error> {
        match self {
            Self::Model(config, weights) => {
                Ok(Passes::Model(Forward::new(model.device(), &config, *weights, capacity)?))
            }
            Self::Eagle3(head) => Passes::of_head(*head, model),
        }
    }
}
