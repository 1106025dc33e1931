//! FP8: e4m3 codes in place of the weights, and a scale for each block of them.
//!
//! ```text
//! weight             F8_E4M3  [outputs, inputs]
//! weight_scale_inv   float    [outputs / 128, inputs / 128]      Qwen's and DeepSeek's (`quant_method` "fp8")
//! weight_scale       float    [outputs, 1], [outputs / a, inputs / b], [outputs, inputs / b], [1] or []
//!                                                                compressed-tensors: channel, block, group, tensor
//! ```
//!
//! A code is multiplied with its scale in both forms, whatever the name says. Scales of activations, if there are any,
//! are ignored: code that rounds activations to FP8 finds its own scales.

use std::ops::Range;

use super::{CheckpointFormat, Code, Codes, Part, QuantizedMatrix, e4m3};
use crate::{Dtype, Error};

/// E4M3 codes with a scale for each block.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp8 {
    /// Name of the tensor of scales.
    pub scale: &'static str,
    /// Outputs of a block; `None` for all.
    pub outputs: Option<usize>,
    /// Inputs of a block; `None` for all.
    pub inputs: Option<usize>,
}

impl Fp8 {
    /// The number of scales of a matrix in each direction.
    fn scales(&self, [outputs, inputs]: [usize; 2]) -> [usize; 2] {
        [self.outputs.map_or(1, |block| outputs.div_ceil(block)), self.inputs.map_or(1, |block| inputs.div_ceil(block))]
    }
}

impl CheckpointFormat for Fp8 {
    fn name(&self) -> String {
        match (self.outputs, self.inputs) {
            (Some(1), None) => "FP8 (e4m3), a scale for each output".to_owned(),
            (Some(1), Some(inputs)) => format!("FP8 (e4m3), groups of {inputs}"),
            (Some(outputs), Some(inputs)) => format!("FP8 (e4m3), blocks of {outputs} × {inputs}"),
            _ => "FP8 (e4m3), a scale for each matrix".to_owned(),
        }
    }

    fn code(&self) -> Code {
        Code::E4m3
    }

    fn parts(&self, shape: [usize; 2]) -> Vec<Part> {
        let [rows, columns] = self.scales(shape);
        let mut scale = Part::new(self.scale, &Dtype::FLOATS, [rows, columns]);
        if columns == 1 {
            scale.shapes.push(vec![rows]);
        }
        if (rows, columns) == (1, 1) {
            scale.shapes.push(Vec::new());
        }
        vec![Part::new("weight", &[Dtype::F8E4m3], shape), scale]
    }

    fn group(&self, inputs: usize) -> usize {
        self.inputs.unwrap_or(inputs)
    }

    fn outputs_of_scale(&self, outputs: usize) -> usize {
        self.outputs.unwrap_or(outputs)
    }

    fn scale_part(&self) -> usize {
        1
    }

    fn read(&self, matrix: &QuantizedMatrix<'_>, rows: Range<usize>, out: &mut Codes) -> Result<(), Error> {
        let inputs = matrix.shape()[1];
        matrix.read_part(0, rows.start * inputs, &mut out.codes)?;
        if out.codes.iter().fold(false, |any, &code| any | e4m3::is_nan(code)) {
            let at = out.codes.iter().position(|&code| e4m3::is_nan(code)).unwrap_or(0);
            return Err(matrix.not_finite(0, rows.start * inputs + at, f32::NAN));
        }
        let scale = matrix.part(1);
        let [_, columns] = self.scales(matrix.shape());
        for (row, scales) in rows.zip(out.scales.chunks_exact_mut(columns)) {
            let block = self.outputs.map_or(0, |outputs| row / outputs);
            for (i, value) in scales.iter_mut().enumerate() {
                *value = scale.get(block * columns + i).unwrap_or(f32::NAN);
            }
        }
        Ok(())
    }
}
