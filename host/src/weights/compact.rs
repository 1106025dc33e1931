//! A model's matrices in fewer bytes than bf16 takes, in any of the formats.

use model::Config;

use crate::Error;
use crate::device::Device;
use crate::e4m3::E4m3;
use crate::lossless::Packed;
use crate::quantized::Quantized;
use crate::stream::{Stream, n_tiles};
use crate::weight_storage::{MatrixFormat, WeightStorage};

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
    pub(super) fn new(device: &Device, config: &Config, kept: Option<WeightStorage>) -> Result<Self, Error> {
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

    /// Checks that the matrices are on `device`, laid out for it, and as large as those of a model of this config. If
    /// there are none, checks that `stream` has all matrices in bf16.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub(crate) fn check(&self, device: &Device, config: &Config, stream: &Stream) -> Result<(), Error> {
        match self {
            Self::None if stream.is_of_layer() => {
                Err(Error::Weights { what: "layers in bf16", found: 1, expected: config.num_hidden_layers })
            }
            Self::None => Ok(()),
            Self::Quantized(codes) => codes.check(device, config),
            Self::E4m3(codes) => codes.check(device, config),
            Self::Packed(packed) => {
                let matrices = stream.matrices().iter().take(config.gemms().count());
                let sizes = matrices.map(|matrix| (matrix.n_tiles, matrix.k));
                packed.check("chunks of packed matrices", device, sizes)
            }
        }
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

/// Checks that the matrices on `device` begin at the `expected` chunks, that there are no more, and that their `owner`
/// is that device.
///
/// # Errors
/// [`Error::Weights`].
pub(crate) fn check_bases(
    what: &'static str,
    (owner, device): (&Device, &Device),
    found: &[u64],
    expected: &[u64],
) -> Result<(), Error> {
    let differ = |i: &usize| found.get(*i) != expected.get(*i);
    let chunks = |bases: &[u64], i: usize| bases.get(i).copied().unwrap_or_default() as usize;
    match (0..found.len().max(expected.len())).find(differ) {
        // The first matrix that differs ends there.
        Some(i) => Err(Error::Weights { what, found: chunks(found, i), expected: chunks(expected, i) }),
        None => {
            let all = chunks(expected, expected.len() - 1);
            check_size(what, (owner, device), all, all)
        }
    }
}
