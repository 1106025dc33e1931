//! AWQ (version "gemm"): int4 with zeros, eight outputs in a word.
//!
//! ```text
//! qweight   I32    [inputs, outputs / 8]      nibble k of word w: output 8w + (0, 2, 4, 6, 1, 3, 5, 7)[k]
//! qzeros    I32    [inputs / 128, outputs / 8]   in the same order
//! scales    F16    [inputs / 128, outputs]
//! ```
//!
//! The matrix is stored transposed, so words are transposed tile by tile.

use std::ops::Range;

use super::{CheckpointFormat, Code, Codes, Part, QuantizedMatrix, nibble};
use crate::{Dtype, Error};

/// Which of a word's eight outputs each nibble belongs to.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Words in a line of a tile: half a cache line.
const WORDS: usize = 8;
/// Inputs of a tile.
const INPUTS: usize = 128;

/// AutoAWQ's int4.
#[derive(Debug, Clone, PartialEq)]
pub struct Awq {
    /// Inputs that share a scale; `None` for all.
    pub group: Option<usize>,
}

impl CheckpointFormat for Awq {
    fn name(&self) -> String {
        self.group
            .map_or("AWQ int4, a scale for each output".to_owned(), |group| format!("AWQ int4, groups of {group}"))
    }

    fn code(&self) -> Code {
        Code::Int4
    }

    fn parts(&self, [outputs, inputs]: [usize; 2]) -> Vec<Part> {
        let groups = inputs.div_ceil(self.group(inputs));
        vec![
            Part::new("qweight", &[Dtype::I32], [inputs, outputs.div_ceil(8)]),
            Part::new("qzeros", &[Dtype::I32], [groups, outputs.div_ceil(8)]),
            Part::new("scales", &Dtype::FLOATS, [groups, outputs]),
        ]
    }

    fn group(&self, inputs: usize) -> usize {
        self.group.unwrap_or(inputs)
    }

    fn unit(&self) -> usize {
        8 * WORDS
    }

    fn scale_part(&self) -> usize {
        2
    }

    fn read(&self, matrix: &QuantizedMatrix<'_>, rows: Range<usize>, out: &mut Codes) -> Result<(), Error> {
        let [outputs, inputs] = matrix.shape();
        let groups = inputs.div_ceil(self.group(inputs));
        let (words, _) = matrix.part(0).data.as_chunks::<4>();
        let stride = outputs.div_ceil(8);
        for first in rows.clone().step_by(8 * WORDS) {
            let count = WORDS.min(stride - first / 8);
            for from in (0..inputs).step_by(INPUTS) {
                let length = INPUTS.min(inputs - from);
                let mut tile = [[0u32; INPUTS]; WORDS];
                for i in 0..length {
                    let line = &words[(from + i) * stride + first / 8..][..count];
                    for (tile, &word) in tile.iter_mut().zip(line) {
                        tile[i] = u32::from_le_bytes(word);
                    }
                }
                for (w, tile) in tile.iter().take(count).enumerate() {
                    for (k, output) in ORDER.into_iter().enumerate() {
                        let row = first + 8 * w + output;
                        if row >= rows.end {
                            continue;
                        }
                        let codes = &mut out.codes[(row - rows.start) * inputs + from..][..length];
                        for (code, &word) in codes.iter_mut().zip(tile) {
                            *code = (word >> (4 * k)) as u8 & 15;
                        }
                    }
                }
            }
        }
        let place: [usize; 8] = std::array::from_fn(|output| ORDER.iter().position(|&o| o == output).unwrap_or(0));
        let (zeros, scales) = (matrix.part(1), matrix.part(2));
        for (i, row) in rows.enumerate() {
            for group in 0..groups {
                let word = group * stride + row / 8;
                out.zeros[i * groups + group] = nibble(zeros.data, word * 8 + place[row % 8]);
                out.scales[i * groups + group] = scales.get(group * outputs + row).unwrap_or(f32::NAN);
            }
        }
        Ok(())
    }
}
