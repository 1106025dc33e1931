//! GPTQ: int4, eight inputs in a word.
//!
//! ```text
//! qweight   I32    [inputs / 8, outputs]      nibble k of word (w, o): input 8w + k of output o
//! qzeros    I32    [groups, outputs / 8]      nibble k of word (g, w): output 8w + k; one less than the zero
//!                                             (`checkpoint_format` "gptq_v2": the zero itself)
//! scales    F16    [groups, outputs]
//! g_idx     I32    [inputs]                   the group of each input
//! ```
//!
//! With `desc_act`, the inputs of a group may be anywhere. Without it, groups are runs of inputs, and `g_idx` is not
//! needed.

use std::ops::Range;

use super::{CheckpointFormat, Code, Codes, Part, QuantizedMatrix, nibble, unpack};
use crate::{Dtype, Error};

/// Outputs of a tile: a cache line of words.
const OUTPUTS: usize = 16;
/// Words in a column of a tile.
const WORDS: usize = 16;

/// AutoGPTQ's and GPTQModel's int4, symmetric.
#[derive(Debug, Clone, PartialEq)]
pub struct Gptq {
    /// Inputs that share a scale; `None` for all.
    pub group: Option<usize>,
    /// Whether `g_idx` lists the group of each input.
    pub listed: bool,
    /// What is added to a stored zero to make the zero.
    pub zero_offset: u8,
}

impl CheckpointFormat for Gptq {
    fn name(&self) -> String {
        let groups = self.group.map_or("a scale for each output".to_owned(), |group| format!("groups of {group}"));
        format!("GPTQ int4, {groups}{}", if self.listed { " in any order (desc_act)" } else { "" })
    }

    fn code(&self) -> Code {
        Code::Int4
    }

    fn parts(&self, [outputs, inputs]: [usize; 2]) -> Vec<Part> {
        let groups = inputs.div_ceil(self.group(inputs));
        let listed = Part { optional: !self.listed, ..Part::new("g_idx", &[Dtype::I32], [inputs]) };
        vec![
            Part::new("qweight", &[Dtype::I32], [inputs.div_ceil(8), outputs]),
            Part::new("qzeros", &[Dtype::I32], [groups, outputs.div_ceil(8)]),
            Part::new("scales", &Dtype::FLOATS, [groups, outputs]),
            listed,
        ]
    }

    fn group(&self, inputs: usize) -> usize {
        self.group.unwrap_or(inputs)
    }

    fn unit(&self) -> usize {
        OUTPUTS
    }

    fn adds_zero_biases(&self) -> bool {
        true
    }

    fn scale_part(&self) -> usize {
        2
    }

    fn read(&self, matrix: &QuantizedMatrix<'_>, rows: Range<usize>, out: &mut Codes) -> Result<(), Error> {
        let [outputs, inputs] = matrix.shape();
        let groups = inputs.div_ceil(self.group(inputs));
        let (words, _) = matrix.part(0).data.as_chunks::<4>();
        for first in rows.clone().step_by(OUTPUTS) {
            let count = OUTPUTS.min(rows.end - first);
            for from in (0..inputs.div_ceil(8)).step_by(WORDS) {
                let length = WORDS.min(inputs.div_ceil(8) - from);
                let mut tile = [[0u32; WORDS]; OUTPUTS];
                for i in 0..length {
                    let line = &words[(from + i) * outputs + first..][..count];
                    for (tile, &word) in tile.iter_mut().zip(line) {
                        tile[i] = u32::from_le_bytes(word);
                    }
                }
                for (o, tile) in tile.iter().take(count).enumerate() {
                    let codes = &mut out.codes[(first + o - rows.start) * inputs..][..inputs][8 * from..];
                    let there = codes.len().min(8 * length);
                    unpack(tile[..length].iter().copied(), &mut codes[..there]);
                }
            }
        }
        let (zeros, scales) = (matrix.part(1), matrix.part(2));
        let stride = outputs.div_ceil(8) * 8;
        for (i, row) in rows.enumerate() {
            for group in 0..groups {
                out.zeros[i * groups + group] = nibble(zeros.data, group * stride + row) + self.zero_offset;
                out.scales[i * groups + group] = scales.get(group * outputs + row).unwrap_or(f32::NAN);
            }
        }
        out.group_of = if self.listed { Some(matrix.group_list(3, groups)?) } else { None };
        Ok(())
    }
}
