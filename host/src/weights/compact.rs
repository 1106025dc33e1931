//! A model's matrices in fewer bytes than bf16 takes, in any of the formats.

use model::Config;

use crate::Error;
use crate::device::Device;
use crate::e4m3::E4m3;
use crate::kept::{Kept, MatrixFormat};
use crate::lossless::Packed;
use crate::quantized::Quantized;
use crate::stream::{Stream, chunks, n_tiles};

/// A model's matrices in fewer bytes than bf16 takes.
pub enum Compact {
    /// None: bf16 alone.
    None,
    /// The layers' codes, which kernels decode to bf16.
    Quantized(Quantized),
    /// The layers' codes, which GEMMs multiply themselves. No bf16 weights of the layers are kept beside them.
    E4m3(E4m3),
    /// All matrices, packed without loss.
    Packed(Packed),
}

impl Compact {
    /// Allocates memory for a model's matrices in the format that `kept` says.
    pub(super) fn new(device: &Device, config: &Config, kept: Option<Kept>) -> Result<Self, Error> {
        Ok(match kept.map(|kept| kept.format) {
            None | Some(MatrixFormat::Plain) => Self::None,
            Some(MatrixFormat::Coded(coding)) if coding.in_blocks => Self::E4m3(E4m3::new(device, config)?),
            Some(MatrixFormat::Coded(coding)) => Self::Quantized(Quantized::new(device, config, coding)?),
            Some(MatrixFormat::Packed(size)) => {
                Self::Packed(Packed::new(device, config.gemms().map(|gemm| n_tiles(&gemm)), size)?)
            }
        })
    }

    /// Once all matrices are there: whether they are exactly the checkpoint's. Waits for the device.
    pub(super) fn finish(&mut self) -> Result<bool, Error> {
        match self {
            Self::None => Ok(true),
            Self::Quantized(codes) => codes.is_exact(),
            Self::E4m3(codes) => codes.is_exact(),
            Self::Packed(packed) => packed.finish(),
        }
    }

    /// Bytes of the matrices in this format; none if there is no format.
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Self::None => None,
            Self::Quantized(codes) => Some(codes.bytes()),
            Self::E4m3(codes) => Some(codes.bytes()),
            Self::Packed(packed) => Some(packed.bytes()),
        }
    }

    /// Enqueues that a layer's matrices are made in `stream` from what is kept. E4m3 has nothing to make: its GEMMs
    /// read no bf16.
    ///
    /// # Errors
    /// A refused launch.
    pub(super) fn make_layer(&self, device: &Device, layer: usize, stream: &Stream) -> Result<(), Error> {
        match self {
            Self::Quantized(codes) => codes.make_layer(device, layer, stream),
            Self::Packed(packed) => packed.make_layer(device, layer, stream),
            Self::None | Self::E4m3(_) => Ok(()),
        }
    }

    /// Checks that the matrices are on `device`, laid out for it, and as large as those of a model of this config.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub(crate) fn check(&self, device: &Device, config: &Config, stream: &Stream) -> Result<(), Error> {
        let (what, owner, found, expected) = match self {
            Self::None => return Ok(()),
            Self::Quantized(codes) => {
                ("codes", codes.device(), codes.bytes(), codes.coding().bytes_of(config, device.sms()))
            }
            Self::E4m3(codes) => ("codes in e4m3", codes.device(), codes.bytes(), E4m3::bytes_of(config, device.sms())),
            Self::Packed(packed) => {
                let matrices = stream.matrices().iter().take(config.gemms().count());
                let expected = chunks(matrices.map(|matrix| (matrix.n_tiles, matrix.k)), device.sms());
                ("chunks of packed matrices", packed.device(), packed.chunks(), expected)
            }
        };
        check_size(what, (owner, device), found as usize, expected as usize)
    }
}

/// Checks that as much of a weight is `found` on `device` as is `expected`, and that its `owner` is that device.
///
/// # Errors
/// [`Error::Weights`].
pub(crate) fn check_size(
    what: &'static str,
    (owner, device): (&Device, &Device),
    found: usize,
    expected: usize,
) -> Result<(), Error> {
    let found = if owner.is_same_card(device) { found } else { 0 };
    if found == expected { Ok(()) } else { Err(Error::Weights { what, found, expected }) }
}
