//! In which format a device keeps a model's matrices.

use model::{Checkpoint, Config};

use crate::Error;
use crate::device::{Capabilities, Device};
use crate::lossless::PackedSize;
use crate::quantized::Coding;
use crate::stream::Stream;

/// What is kept of a model's matrices that is not bf16 alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What decode steps read.
    pub format: MatrixFormat,
    /// Whether bf16 weights are beside that: otherwise they are made again, a layer at a time, for passes that read
    /// them.
    pub plain: bool,
    /// What the head is packed to for steps of one row, if it is, beside codes and its bf16 weights.
    pub head: Option<PackedSize>,
}

/// What matrices are, if not bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixFormat {
    /// The codes of quantised weights, of the layers.
    Coded(Coding),
    /// Packed without loss to this size, with the head.
    Packed(PackedSize),
}

impl Kept {
    /// What is kept of `checkpoint` on `device`, as its [options](crate::device::DeviceOptions) and its free memory
    /// have it; none if it is bf16 alone.
    ///
    /// # Errors
    /// Of reading the checkpoint; a driver error.
    pub fn of(checkpoint: &Checkpoint, device: &Device) -> Result<Option<Self>, Error> {
        Self::coded(checkpoint, device)?.map_or_else(|| Self::packed(checkpoint, device), |coded| Ok(Some(coded)))
    }

    /// The same of a checkpoint whose layers have codes that kernels read; none of others.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(crate) fn coded(checkpoint: &Checkpoint, device: &Device) -> Result<Option<Self>, Error> {
        if !device.capabilities().has_decode_kernel() || device.options().lossless == Some(false) {
            return Ok(None);
        }
        let Some(coding) = Coding::of(&checkpoint.weights()?).filter(|coding| coding.is_for(device)) else {
            return Ok(None);
        };
        let kept = Self::on(device, &checkpoint.config, MatrixFormat::Coded(coding))?;
        kept.with_head(device, PackedSize::of_head(checkpoint, PackedSize::SPARSELY)?).map(Some)
    }

    /// The same where weights are [packed](Self::packs); none if they cannot be.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub(crate) fn packed(checkpoint: &Checkpoint, device: &Device) -> Result<Option<Self>, Error> {
        let config = &checkpoint.config;
        if !Self::packs(device, config) {
            return Ok(None);
        }
        let size = PackedSize::of(checkpoint, PackedSize::SPARSELY)?;
        size.map(|size| Self::on(device, config, MatrixFormat::Packed(size))).transpose()
    }

    /// What is kept of a model in such a format, likewise.
    ///
    /// # Errors
    /// A driver error.
    pub fn on(device: &Device, config: &Config, format: MatrixFormat) -> Result<Self, Error> {
        let plain = match device.options().plain_beside {
            _ if format.in_e4m3() => false,
            Some(plain) => plain,
            None => device.free_memory()?.is_some_and(|free| Stream::bytes(config, false) <= free / 4),
        };
        Ok(Self { format, plain, head: None })
    }

    /// With a head that is packed to this size, if it can be and memory does not miss it.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn with_head(self, device: &Device, size: Option<PackedSize>) -> Result<Self, Error> {
        /// At most one part in so many of the free memory.
        const SHARE: u64 = 32;
        let free = device.free_memory()?;
        let fits = |size: &PackedSize| free.is_none_or(|free| size.packed <= free / SHARE);
        Ok(Self { head: size.filter(|size| device.has_full_ring() && fits(size)), ..self })
    }

    /// Whether weights are packed without loss on a device: where that is asked for, or layers have enough bytes for it
    /// to be quicker. The emulator has no memory of its own that would be saved.
    pub(crate) fn packs(device: &Device, config: &Config) -> bool {
        let pays = || Self::packing_pays(config, device.capabilities()) && !device.is_emulator();
        device.has_full_ring() && device.options().lossless.unwrap_or_else(pays)
    }

    /// Whether decode steps on such a card are quicker with weights packed without loss.
    pub fn packing_pays(config: &Config, card: &Capabilities) -> bool {
        let of_layer = Stream::bytes(config, false) / config.num_hidden_layers as u64;
        card.has_full_ring() && of_layer >= card.tuning().lossless_from
    }

    /// This format, with nothing beside.
    #[must_use]
    pub const fn only(format: MatrixFormat) -> Self {
        Self { format, plain: false, head: None }
    }

    /// The same with nothing beside: neither bf16 weights, nor a packed head.
    #[must_use]
    pub fn alone(self) -> Self {
        Self::only(self.format)
    }

    /// Whether codes are what is multiplied.
    pub fn in_e4m3(self) -> bool {
        self.format.in_e4m3()
    }

    /// The codes' kind, if there are codes.
    pub fn coding(self) -> Option<Coding> {
        match self.format {
            MatrixFormat::Coded(coding) => Some(coding),
            MatrixFormat::Packed(_) => None,
        }
    }

    /// Bytes of a model's matrices, those in bf16 with them.
    pub fn bytes(self, config: &Config) -> u64 {
        let of_format = match self.format {
            MatrixFormat::Coded(coding) => coding.bytes_of(config, 1),
            MatrixFormat::Packed(size) => size.packed,
        };
        of_format + self.head.map_or(0, |head| head.packed) + Stream::bytes(config, !self.plain)
    }
}

impl MatrixFormat {
    fn in_e4m3(self) -> bool {
        matches!(self, Self::Coded(coding) if coding.in_blocks)
    }
}
