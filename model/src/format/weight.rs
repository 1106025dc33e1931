//! A weight of an open checkpoint, whatever its format.

use std::ops::Range;
use std::sync::Arc;

use super::{CheckpointFormat, Code, Codes};
use crate::checkpoint::{Tensor, TensorId};
use crate::{Checkpoint, Error};

/// Codes that are converted at a time. With the weights that they become, they stay in a core's own cache.
const CODES: usize = 64 << 10;

/// A weight: a matrix `[outputs, inputs]`, row-major as PyTorch stores a `Linear`, or a vector.
#[derive(Debug, Clone)]
pub struct Weight<'a> {
    checkpoint: &'a Checkpoint,
    stored: Stored<'a>,
}

#[derive(Debug, Clone)]
enum Stored<'a> {
    Plain(Tensor<'a>),
    Quantized(QuantizedMatrix<'a>),
}

/// A matrix that a file holds as codes, or that is quantised while it is read.
#[derive(Debug, Clone)]
pub struct QuantizedMatrix<'a> {
    checkpoint: &'a Checkpoint,
    id: Arc<QuantizedId>,
    parts: Vec<Option<Tensor<'a>>>,
}

/// Handle of a weight within its checkpoint.
#[derive(Debug, Clone)]
pub(crate) enum WeightId {
    /// A tensor of floats.
    Plain(TensorId),
    /// A matrix of codes.
    Quantized(Arc<QuantizedId>),
}

/// Handle of a quantised matrix.
#[derive(Debug)]
pub(crate) struct QuantizedId {
    /// The layer's name, with `.weight`.
    pub(crate) name: String,
    pub(crate) shape: [usize; 2],
    pub(crate) format: Arc<dyn CheckpointFormat>,
    /// In the order of [`CheckpointFormat::parts`]; `None` for a part that is left out.
    pub(crate) parts: Vec<Option<TensorId>>,
}

impl<'a> Weight<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint, id: &WeightId) -> Self {
        let stored = match id {
            WeightId::Plain(id) => Stored::Plain(checkpoint.tensor_by_id(*id)),
            WeightId::Quantized(id) => {
                let parts = id.parts.iter().map(|part| part.map(|part| checkpoint.tensor_by_id(part))).collect();
                Stored::Quantized(QuantizedMatrix { checkpoint, id: id.clone(), parts })
            }
        };
        Self { checkpoint, stored }
    }

    /// The weight's name: that of the layer, with `.weight` or `.bias`.
    pub fn name(&self) -> &str {
        match &self.stored {
            Stored::Plain(tensor) => tensor.name,
            Stored::Quantized(matrix) => &matrix.id.name,
        }
    }

    /// Sizes: `[outputs, inputs]`, or `[n]`.
    pub fn shape(&self) -> &[usize] {
        match &self.stored {
            Stored::Plain(tensor) => tensor.shape,
            Stored::Quantized(matrix) => &matrix.id.shape,
        }
    }

    /// Number of weights in it.
    pub fn elements(&self) -> usize {
        self.shape().iter().product()
    }

    /// The tensor, if it is not quantised.
    pub fn plain(&self) -> Option<Tensor<'a>> {
        match &self.stored {
            Stored::Plain(tensor) => Some(*tensor),
            Stored::Quantized(_) => None,
        }
    }

    /// The matrix, if it is quantised.
    pub fn quantized(&self) -> Option<&QuantizedMatrix<'a>> {
        match &self.stored {
            Stored::Plain(_) => None,
            Stored::Quantized(matrix) => Some(matrix),
        }
    }

    /// Weights that are best read together: reads that begin and end at multiples of this do no work twice.
    pub fn unit(&self) -> usize {
        self.quantized().map_or(1, |matrix| matrix.format().unit() * matrix.shape()[1])
    }

    /// Reads weights from element `first` on, row-major, as little-endian bf16, and fills `out` with them. All of them
    /// are finite.
    ///
    /// # Errors
    /// If a weight is NaN or infinite, or would be in bf16, or if a file cannot be read or has become shorter.
    ///
    /// # Panics
    /// If the weight has fewer elements: a bug of the caller.
    pub fn read_bf16(&self, first: usize, out: &mut [u8]) -> Result<(), Error> {
        self.read_bf16_and(first, out, &mut |_, _| {})
    }

    /// As [`read_bf16`](Self::read_bf16). If the weight is quantised, `seen` is also called with the rows that were
    /// read and their codes; it may see a row more than once.
    ///
    /// # Errors
    /// As [`read_bf16`](Self::read_bf16).
    ///
    /// # Panics
    /// As [`read_bf16`](Self::read_bf16).
    pub fn read_bf16_and(
        &self,
        first: usize,
        out: &mut [u8],
        seen: &mut dyn FnMut(Range<usize>, &Codes),
    ) -> Result<(), Error> {
        match &self.stored {
            Stored::Plain(tensor) => self.checkpoint.read_bf16(tensor, first, out),
            Stored::Quantized(matrix) => matrix.read_bf16(first, out, seen),
        }
    }
}

impl<'a> QuantizedMatrix<'a> {
    /// `[outputs, inputs]`.
    pub fn shape(&self) -> [usize; 2] {
        self.id.shape
    }

    /// The format in which it is stored.
    pub fn format(&self) -> &dyn CheckpointFormat {
        &*self.id.format
    }

    /// What its codes are.
    pub fn code(&self) -> Code {
        self.format().code()
    }

    /// Inputs that share a scale.
    pub fn group(&self) -> usize {
        self.format().group(self.shape()[1])
    }

    /// Outputs and inputs that share a scale.
    pub fn block(&self) -> [usize; 2] {
        [self.format().outputs_of_scale(self.shape()[0]), self.group()]
    }

    /// Whether its scales are bf16, and so is each zero times its scale: the product needs no rounding.
    pub fn has_bf16_zeros(&self) -> bool {
        self.format().has_bf16_zeros(self)
    }

    /// Reads codes, scales and zeros of the outputs `rows`, which must begin at a multiple of the format's
    /// [unit](CheckpointFormat::unit). The scales are then within [bounds](Codes::first_bad_scale), and no code is NaN.
    ///
    /// # Errors
    /// If a scale or a code means no number, or a file cannot be read.
    ///
    /// # Panics
    /// If the matrix has no such rows, or they begin elsewhere: a bug of the caller.
    pub fn read_codes(&self, rows: Range<usize>, out: &mut Codes) -> Result<(), Error> {
        let [outputs, inputs] = self.shape();
        assert!(rows.end <= outputs && rows.start.is_multiple_of(self.format().unit()), "rows {rows:?} of {outputs}");
        out.resize(self.code(), rows.len(), inputs, self.group());
        self.format().read(self, rows.clone(), out)?;
        let Some(bad) = out.first_bad_scale(self.code()) else { return Ok(()) };
        let groups = inputs.div_ceil(self.group());
        let tensor = self.part(self.format().scale_part());
        Err(Error::BadScale {
            path: self.path(tensor.name),
            tensor: tensor.name.to_owned(),
            row: rows.start + bad / groups,
            group: bad % groups,
            value: out.scales[bad],
        })
    }

    fn read_bf16(&self, first: usize, out: &mut [u8], seen: &mut dyn FnMut(Range<usize>, &Codes)) -> Result<(), Error> {
        let [outputs, inputs] = self.shape();
        let last = first + out.len() / 2;
        assert!(last <= outputs * inputs, "weights {first} to {last} of {outputs} × {inputs}");
        let unit = self.format().unit();
        let step = unit * (CODES / (unit * inputs)).max(1);
        let end = last.div_ceil(inputs).next_multiple_of(unit).min(outputs);
        let (mut codes, mut whole) = (Codes::default(), Vec::new());
        for row in (first / inputs / unit * unit..end).step_by(step) {
            let rows = row..end.min(row + step);
            self.read_codes(rows.clone(), &mut codes)?;
            seen(rows.clone(), &codes);
            // The part of these rows that was asked for.
            let found = rows.start * inputs..rows.end * inputs;
            let wanted = found.start.max(first)..found.end.min(last);
            let here = &mut out[2 * (wanted.start - first)..2 * (wanted.end - first)];
            if wanted == found {
                codes.to_bf16(self.code(), inputs, self.group(), here);
            } else {
                whole.resize(2 * found.len(), 0);
                codes.to_bf16(self.code(), inputs, self.group(), &mut whole);
                here.copy_from_slice(&whole[2 * (wanted.start - found.start)..][..here.len()]);
            }
        }
        Ok(())
    }

    /// One of the matrix's tensors, by its index among the format's parts.
    ///
    /// # Panics
    /// If this part is left out: a bug of the format.
    pub fn part(&self, index: usize) -> Tensor<'a> {
        self.parts[index].unwrap_or_else(|| panic!("{} has no part {index}", self.id.name))
    }

    /// Reads stored bytes of a part, from byte `at` on.
    pub(super) fn read_part(&self, index: usize, at: usize, out: &mut [u8]) -> Result<(), Error> {
        self.checkpoint.read_stored(self.part(index).name, at, out)
    }

    /// Reads weights as bf16, from element `first` on, of the only part, which is not quantised.
    pub(super) fn read_plain(&self, first: usize, out: &mut [u8]) -> Result<(), Error> {
        self.checkpoint.read_bf16(&self.part(0), first, out)
    }

    /// The group of each input, from the part that lists them.
    pub(super) fn group_list(&self, index: usize, groups: usize) -> Result<Vec<u32>, Error> {
        let tensor = self.part(index);
        let list: Vec<u32> = tensor.data.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        match list.iter().position(|&group| group as usize >= groups) {
            None => Ok(list),
            Some(at) => Err(Error::GroupOutOfRange {
                path: self.path(tensor.name),
                tensor: tensor.name.to_owned(),
                index: at,
                value: list[at] as i32,
                groups,
            }),
        }
    }

    /// The error for an element of a tensor that means no number.
    pub(super) fn not_finite(&self, index: usize, element: usize, value: f32) -> Error {
        let tensor = self.part(index).name;
        Error::NotFinite { path: self.path(tensor), tensor: tensor.to_owned(), index: element, value }
    }

    fn path(&self, tensor: &str) -> std::path::PathBuf {
        self.checkpoint.tensor_file(tensor).map(Into::into).unwrap_or_default()
    }
}
