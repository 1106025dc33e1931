//! compressed-tensors' `pack-quantized` int4 (W4A16): eight inputs in a word, row by row.
//!
//! ```text
//! weight_packed       I32    [outputs, inputs / 8]         nibble k of word w: input 8w + k, plus 8
//! weight_scale        float  [outputs, groups]
//! weight_zero_point   I32    [outputs / 8, groups]         nibble k of word (w, g): output 8w + k, plus 8; none if
//!                                                          weights are symmetric
//! weight_g_idx        I32    [inputs]                      the group of each input, where `actorder` is "group"
//! ```
//!
//! `weight_shape` is not read, as it repeats what the config says.

use std::ops::Range;

use super::{CheckpointFormat, Code, Codes, Part, QuantizedMatrix, nibbles, unpack};
use crate::{Dtype, Error};

/// The code that stands for zero if weights are symmetric.
const MIDDLE: u8 = 8;

/// compressed-tensors' packed int4.
#[derive(Debug, Clone, PartialEq)]
pub struct PackQuantized {
    /// Inputs that share a scale; `None` for all.
    pub group: Option<usize>,
    /// Whether no zeros are stored.
    pub symmetric: bool,
    /// Whether `weight_g_idx` lists the group of each input.
    pub listed: bool,
}

impl CheckpointFormat for PackQuantized {
    fn name(&self) -> String {
        let groups = self.group.map_or("a scale for each output".to_owned(), |group| format!("groups of {group}"));
        let zeros = if self.symmetric { "" } else { " with zeros" };
        format!("pack-quantized int4, {groups}{zeros}{}", if self.listed { ", in any order" } else { "" })
    }

    fn code(&self) -> Code {
        Code::Int4
    }

    fn parts(&self, [outputs, inputs]: [usize; 2]) -> Vec<Part> {
        let groups = inputs.div_ceil(self.group(inputs));
        let zeros = Part::new("weight_zero_point", &[Dtype::I32], [outputs.div_ceil(8), groups]);
        let listed = Part::new("weight_g_idx", &[Dtype::I32], [inputs]);
        vec![
            Part::new("weight_packed", &[Dtype::I32], [outputs, inputs.div_ceil(8)]),
            Part::new("weight_scale", &Dtype::FLOATS, [outputs, groups]),
            Part { optional: self.symmetric, ..zeros },
            Part { optional: !self.listed, ..listed },
        ]
    }

    fn group(&self, inputs: usize) -> usize {
        self.group.unwrap_or(inputs)
    }

    fn scale_part(&self) -> usize {
        1
    }

    fn has_bf16_zeros(&self, matrix: &QuantizedMatrix<'_>) -> bool {
        self.symmetric && matrix.part(self.scale_part()).dtype == Dtype::Bf16
    }

    fn read(&self, matrix: &QuantizedMatrix<'_>, rows: Range<usize>, out: &mut Codes) -> Result<(), Error> {
        let [_, inputs] = matrix.shape();
        let groups = inputs.div_ceil(self.group(inputs));
        let stride = inputs.div_ceil(8) * 4;
        let mut words = vec![0; stride * rows.len()];
        matrix.read_part(0, rows.start * stride, &mut words)?;
        for (words, codes) in words.chunks_exact(stride).zip(out.codes.chunks_exact_mut(inputs)) {
            unpack(words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)), codes);
        }
        let (scales, zeros) = (matrix.part(1), (!self.symmetric).then(|| matrix.part(2)));
        for (i, row) in rows.enumerate() {
            for group in 0..groups {
                let zero = zeros.map_or(MIDDLE, |zeros| {
                    let word = zeros.data.as_chunks().0.get(row / 8 * groups + group).copied().unwrap_or_default();
                    nibbles(u32::from_le_bytes(word))[row % 8]
                });
                out.zeros[i * groups + group] = zero;
                out.scales[i * groups + group] = scales.get(row * groups + group).unwrap_or(f32::NAN);
            }
        }
        out.group_of = if self.listed { Some(matrix.group_list(3, groups)?) } else { None };
        Ok(())
    }
}
