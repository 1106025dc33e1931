//! In which format a device keeps a model's matrices.

use model::{Checkpoint, Config};

use crate::Error;
use crate::device::{Capabilities, Device};
use crate::lossless::PackedSize;
use crate::quantized::Coding;
use crate::stream::Stream;

/// How a device keeps a model's matrices, where that is not as bf16 alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightStorage {
    /// The format that decode steps read.
    pub format: MatrixFormat,
    /// Whether the bf16 weights of all layers are kept beside it. If not, a layer's bf16 weights are made again
    /// whenever a pass reads them.
    pub plain: bool,
    /// The packed size of the output head, if a packed head is kept beside the head's bf16 weights. Steps of one
    /// row read it, and of several rows those beside codes. Never set where all matrices are packed.
    pub head: Option<PackedSize>,
}

/// The format of a model's matrices that decode steps read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixFormat {
    /// bf16. What differs from keeping bf16 alone is the packed head beside it.
    Plain,
    /// The layers' matrices as codes of quantised weights.
    Coded(Coding),
    /// All matrices, the head's included, packed without loss to this size.
    Packed(PackedSize),
}

impl WeightStorage {
    /// How `device` is to keep the matrices of `checkpoint`, by its [options](crate::device::DeviceOptions) and its
    /// free memory. None: as bf16 alone.
    ///
    /// # Errors
    /// An error of reading the checkpoint; a driver error.
    pub fn of(checkpoint: &Checkpoint, device: &Device) -> Result<Option<Self>, Error> {
        if let Some(coded) = Self::coded(checkpoint, device)? {
            return Ok(Some(coded));
        }
        if let Some(packed) = Self::packed(checkpoint, device)? {
            return Ok(Some(packed));
        }
        if !Self::packs_head_alone(device) {
            return Ok(None);
        }
        let size = PackedSize::of_head(checkpoint, PackedSize::SPARSELY)?;
        let kept = Self::only(MatrixFormat::Plain).with_head(device, size)?;
        Ok(kept.head.map(|_| kept))
    }

    /// As [`of`](Self::of), for a checkpoint whose layers have codes. None if they have none, or none that `device` is
    /// to read.
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

    /// As [`of`](Self::of), for weights that are [packed](Self::packs) without loss. None if they are not to be packed,
    /// or cannot be.
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

    /// Keeps a model in this `format`. The options and the free memory of `device` decide whether bf16 weights stay
    /// beside it.
    ///
    /// # Errors
    /// A driver error.
    pub fn on(device: &Device, config: &Config, format: MatrixFormat) -> Result<Self, Error> {
        let plain = match device.options().plain_beside {
            _ if format == MatrixFormat::Plain => true,
            _ if format.in_e4m3() => false,
            Some(plain) => plain,
            None => device.free_memory()?.is_some_and(|free| Stream::bytes(config, false) <= free / 4),
        };
        Ok(Self { format, plain, head: None })
    }

    /// Adds a head that is packed to this size, if there is a `size`, kernels of `device` read it, and it takes a small
    /// part of the free memory.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn with_head(self, device: &Device, size: Option<PackedSize>) -> Result<Self, Error> {
        /// A packed head takes at most one part in this many of the free memory.
        const SHARE: u64 = 32;
        let free = device.free_memory()?;
        let fits = |size: &PackedSize| free.is_none_or(|free| size.packed <= free / SHARE);
        Ok(Self { head: size.filter(|size| device.has_full_ring() && fits(size)), ..self })
    }

    /// Whether weights are packed without loss on `device`: if its options ask for it; or by default, if layers are
    /// large enough for it to be faster. Not by default under the emulator, which has no memory of its own to save.
    pub(crate) fn packs(device: &Device, config: &Config) -> bool {
        let pays = || Self::packing_pays(config, device.capabilities()) && !device.is_emulator();
        device.has_full_ring() && device.options().lossless.unwrap_or_else(pays)
    }

    /// Whether the head is packed where no other matrix is. It is the largest matrix of a small model, whose layers are
    /// too small for packing to pay. Not under the emulator, as in [`packs`](Self::packs).
    pub(crate) fn packs_head_alone(device: &Device) -> bool {
        device.has_full_ring() && !device.is_emulator() && device.options().lossless != Some(false)
    }

    /// Whether decode steps on such a card are quicker with weights packed without loss.
    pub fn packing_pays(config: &Config, card: &Capabilities) -> bool {
        let of_layer = Stream::bytes(config, false) / config.num_hidden_layers as u64;
        card.has_full_ring() && of_layer >= card.tuning().lossless_from
    }

    /// This format alone: no bf16 weights beside another format, and no packed head.
    #[must_use]
    pub const fn only(format: MatrixFormat) -> Self {
        Self { format, plain: matches!(format, MatrixFormat::Plain), head: None }
    }

    /// Keeps the format alone: drops bf16 weights and a packed head.
    #[must_use]
    pub fn alone(self) -> Self {
        Self::only(self.format)
    }

    /// Whether GEMMs multiply the codes themselves, which are then e4m3 in blocks.
    pub fn in_e4m3(self) -> bool {
        self.format.in_e4m3()
    }

    /// The kind of the codes, if matrices are kept as codes.
    pub fn coding(self) -> Option<Coding> {
        match self.format {
            MatrixFormat::Coded(coding) => Some(coding),
            MatrixFormat::Plain | MatrixFormat::Packed(_) => None,
        }
    }

    /// Bytes of a model's matrices on the device: in the format, as a packed head, and in bf16.
    pub fn bytes(self, config: &Config) -> u64 {
        let of_format = match self.format {
            MatrixFormat::Plain => 0,
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
