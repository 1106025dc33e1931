//! Quantising while loading: what `--weights fp8` and `--weights int4` make of plain weights. Weights in f16 and f32
//! are rounded to bf16 first.
//!
//! - FP8: blocks of 128 × 128, as in the official checkpoints. The scale is the largest magnitude divided by 448, in
//!   bf16.
//! - int4, round to nearest: groups of 128 inputs. The 16 steps reach from the least weight to the greatest, and zero
//!   is one of them. The scale is rounded first, to the nearest bf16 whose product with the zero is a bf16 too. Then
//!   one instruction makes two weights of their codes; the squared error of a normal distribution grows by 0.1 %. Each
//!   group has a zero of its own, since a group whose weights reach further to one side would otherwise waste steps on
//!   the other. AWQ and GPTQ, which look at activations, lose less.

use std::ops::Range;

use half::bf16;

use super::{CheckpointFormat, Code, Codes, Part, QuantizedMatrix, e4m3};
use crate::{Dtype, Error};

/// Outputs and inputs of a block of FP8; inputs of a group of int4.
const BLOCK: usize = 128;
/// Adding this to a float and subtracting it again rounds to the nearest whole number, and to the even one of two.
const WHOLE: f32 = 12_582_912.0;
/// Magnitudes below this become zero: their scale would have no finite reciprocal.
const LEAST: f32 = 1e-30;

/// Weights rounded while they are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounded {
    /// To FP8.
    Fp8,
    /// To int4.
    Int4,
}

impl CheckpointFormat for Rounded {
    fn name(&self) -> String {
        match self {
            Self::Fp8 => "FP8 (e4m3), blocks of 128 × 128, rounded while loading".to_owned(),
            Self::Int4 => "int4, groups of 128, rounded to nearest while loading".to_owned(),
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::Fp8 => Code::E4m3,
            Self::Int4 => Code::Int4,
        }
    }

    fn parts(&self, shape: [usize; 2]) -> Vec<Part> {
        vec![Part::new("weight", &Dtype::FLOATS, shape)]
    }

    fn group(&self, _inputs: usize) -> usize {
        BLOCK
    }

    fn outputs_of_scale(&self, _outputs: usize) -> usize {
        match self {
            Self::Fp8 => BLOCK,
            Self::Int4 => 1,
        }
    }

    fn unit(&self) -> usize {
        match self {
            Self::Fp8 => BLOCK,
            Self::Int4 => 1,
        }
    }

    fn scale_part(&self) -> usize {
        0
    }

    fn has_bf16_zeros(&self, _matrix: &QuantizedMatrix<'_>) -> bool {
        true
    }

    fn compact_bytes(&self, [outputs, inputs]: [usize; 2], _stored: u64) -> u64 {
        let groups = inputs.div_ceil(BLOCK);
        let bytes = match self {
            Self::Fp8 => outputs * inputs + 4 * outputs.div_ceil(BLOCK) * groups,
            // A scale of two bytes, and a zero of half a byte.
            Self::Int4 => outputs * inputs.div_ceil(2) + outputs * groups * 5 / 2,
        };
        bytes as u64
    }

    fn read(&self, matrix: &QuantizedMatrix<'_>, rows: Range<usize>, out: &mut Codes) -> Result<(), Error> {
        let [_, inputs] = matrix.shape();
        let mut bytes = vec![0; 2 * inputs * rows.len().min(BLOCK)];
        let groups = inputs.div_ceil(BLOCK);
        for first in rows.clone().step_by(BLOCK) {
            let count = BLOCK.min(rows.end - first);
            let bytes = &mut bytes[..2 * inputs * count];
            matrix.read_plain(first * inputs, bytes)?;
            let at = first - rows.start;
            let codes = &mut out.codes[at * inputs..][..count * inputs];
            let scales = &mut out.scales[at * groups..][..count * groups];
            match self {
                Self::Fp8 => fp8(bytes.as_chunks().0, inputs, codes, scales),
                Self::Int4 => {
                    let zeros = &mut out.zeros[at * groups..][..count * groups];
                    int4(bytes.as_chunks().0, inputs, codes, scales, zeros);
                }
            }
        }
        Ok(())
    }
}

#[inline(always)]
fn wide(bytes: [u8; 2]) -> f32 {
    // Weights are finite here.
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

widest! {
    /// Quantises the rows of one row of blocks. All of its rows must be there, since they share scales.
    fp8 = fp8_body(weights: &[[u8; 2]], inputs: usize, codes: &mut [u8], scales: &mut [f32])
}

widest! {
    /// Quantises rows, group by group.
    int4 = int4_body(weights: &[[u8; 2]], inputs: usize, codes: &mut [u8], scales: &mut [f32], zeros: &mut [u8])
}

/// An integer that orders as the bf16 does: the magnitude bits of negative numbers are inverted. Comparisons of
/// integers vectorise.
#[inline(always)]
fn ordered(bytes: [u8; 2]) -> i16 {
    let bits = i16::from_le_bytes(bytes);
    bits ^ (bits >> 15 & 0x7fff)
}

/// The bf16 of an integer that `ordered` made.
#[inline(always)]
fn unordered(order: i16) -> f32 {
    bf16::from_bits((order ^ (order >> 15 & 0x7fff)) as u16).to_f32()
}

#[inline(always)]
fn fp8_body(weights: &[[u8; 2]], inputs: usize, codes: &mut [u8], scales: &mut [f32]) {
    let groups = inputs.div_ceil(BLOCK);
    for group in 0..groups {
        let columns = group * BLOCK..inputs.min((group + 1) * BLOCK);
        let mut largest = 0;
        for row in weights.chunks_exact(inputs) {
            for &bytes in &row[columns.clone()] {
                largest = largest.max(i16::from_le_bytes(bytes) & 0x7fff);
            }
        }
        let largest = unordered(largest);
        let scale = if largest < LEAST { 1.0 } else { bf16::from_f32(largest / e4m3::LARGEST).to_f32() };
        let inverse = 1.0 / scale;
        for (row, codes) in weights.chunks_exact(inputs).zip(codes.chunks_exact_mut(inputs)) {
            for (code, &bytes) in codes[columns.clone()].iter_mut().zip(&row[columns.clone()]) {
                *code = e4m3::nearest(wide(bytes) * inverse);
            }
        }
        scales.iter_mut().skip(group).step_by(groups).for_each(|out| *out = scale);
    }
}

/// The bf16 nearest to `scale` whose product with `zero` is a bf16 too. Dropping bits of the scale is enough: the
/// product of two whole numbers has no more bits than both have together.
#[inline(always)]
fn with_room_for(zero: u8, scale: f32) -> f32 {
    let odd = u32::from(zero) >> zero.trailing_zeros().min(7);
    if odd <= 1 {
        return scale;
    }
    let dropped = u32::BITS - odd.leading_zeros() + 16;
    f32::from_bits((scale.to_bits() + (1 << (dropped - 1))) >> dropped << dropped)
}

#[inline(always)]
fn int4_body(weights: &[[u8; 2]], inputs: usize, codes: &mut [u8], scales: &mut [f32], zeros: &mut [u8]) {
    let groups = weights.chunks_exact(inputs).flat_map(|row| row.chunks(BLOCK));
    let codes = codes.chunks_exact_mut(inputs).flat_map(|row| row.chunks_mut(BLOCK));
    for (((weights, codes), scale), zero) in groups.zip(codes).zip(scales).zip(zeros) {
        // Zero is within the range, even if every weight is on one side of it.
        let (mut least, mut most) = (0, 0);
        for &bytes in weights {
            least = least.min(ordered(bytes));
            most = most.max(ordered(bytes));
        }
        let (least, most) = (unordered(least), unordered(most));
        *scale = bf16::from_f32((most - least) / 15.0).to_f32();
        if *scale < LEAST {
            *scale = 1.0;
        }
        let middle = ((-least / *scale + WHOLE) - WHOLE).clamp(0.0, 15.0);
        *zero = middle as u8;
        *scale = with_room_for(*zero, *scale);
        let inverse = 1.0 / *scale;
        let whole = |x: f32| (x * inverse + WHOLE) - WHOLE;
        for (code, &bytes) in codes.iter_mut().zip(weights) {
            let step = (whole(wide(bytes)) + middle).clamp(0.0, 15.0);
            // A small whole number stands in the float's lowest bits once `WHOLE` is added to it.
            *code = (step + WHOLE).to_bits() as u8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stored(values: &[f32]) -> Vec<[u8; 2]> {
        values.iter().map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
    }

    proptest! {
        /// No weight is off by more than about half a step, and zero stays zero.
        #[test]
        fn int4_is_the_nearest_step(values in prop::collection::vec(-3f32..4.0, 260), shift in -5f32..5.0) {
            let value = |(i, x): (usize, &f32)| if i == 7 { 0.0 } else { x + shift };
            let weights = stored(&values.iter().enumerate().map(value).collect::<Vec<_>>());
            let (mut codes, mut scales, mut zeros) = (vec![0; 260], vec![0.0; 4], vec![0; 4]);
            int4(&weights, 130, &mut codes, &mut scales, &mut zeros);
            for (i, &bytes) in weights.iter().enumerate() {
                let group = i / 130 * 2 + i % 130 / BLOCK;
                let found = (f32::from(codes[i]) - f32::from(zeros[group])) * scales[group];
                let (zero, scale) = (zeros[group], scales[group]);
                let of_zero = f32::from(zero) * scale;
                prop_assert_eq!(bf16::from_f32(of_zero).to_f32(), of_zero);
                // The place of zero is rounded, so the ends may be cut off by half a step more. The scale is rounded
                // too, by half of its last place, if the zero is no power of two.
                let odd = zero >> zero.trailing_zeros().min(7);
                let lost = if odd <= 1 { 0.0 } else { 2f32.powi(odd.ilog2() as i32 + 1 - 8) };
                let cut = f32::from(zero.max(15 - zero)) * lost;
                let most = scale * (1.06 + cut);
                prop_assert!((found - wide(bytes)).abs() <= most, "{found} for {}", wide(bytes));
                if i == 7 {
                    prop_assert_eq!(found, 0.0);
                }
            }
        }

        #[test]
        fn fp8_is_within_half_a_step(values in prop::collection::vec(-3f32..3.0, 3 * 130)) {
            let weights = stored(&values);
            let (mut codes, mut scales) = (vec![0; 3 * 130], vec![0.0; 6]);
            fp8(&weights, 130, &mut codes, &mut scales);
            for (i, &bytes) in weights.iter().enumerate() {
                let scale = scales[i / 130 * 2 + i % 130 / BLOCK];
                let (found, x) = (e4m3::VALUES[codes[i] as usize] * scale, wide(bytes));
                prop_assert!((found - x).abs() <= (x.abs() / 16.0).max(scale / 1024.0) * 1.001, "{found} for {x}");
            }
            // The largest of a block is one of its codes.
            prop_assert!(codes.iter().any(|code| code & 0x7f == 0x7e));
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let weights = stored(&[0.0; 128]);
        let (mut codes, mut scales, mut zeros) = (vec![9; 128], vec![0.0], vec![9]);
        int4(&weights, 128, &mut codes, &mut scales, &mut zeros);
        assert!(codes.iter().all(|&code| code == zeros[0]) && scales == [1.0]);
        fp8(&weights, 128, &mut codes, &mut scales);
        assert!(codes.iter().all(|&code| code == 0) && scales == [1.0]);
    }
}
