//! Weight formats: how a matrix of weights is stored in a file, and which bf16 numbers it stands for.
//!
//! A plain weight is bf16, f16 or f32. A *quantised* matrix has a code for each weight and a scale for each group of
//! weights. With int4, each group also has a whole number that stands for zero:
//!
//! ```text
//! FP8    weight = bf16(f32(e4m3 code) × f32(scale))
//! int4   weight = bf16(f32(code − zero) × f32(scale))
//! ```
//!
//! The result is rounded once. Every format and every path uses this arithmetic, so a token is the same on the CPU,
//! under the emulator and on a card, whatever shares its step. The arithmetic is written once, in [`Codes::to_bf16`]; a
//! format only finds codes, scales and zeros in its file.
//!
//! ```text
//! fp8         e4m3 codes, a scale for each block, row or matrix: Qwen's FP8, and compressed-tensors' float-quantized
//! awq         int4 with zeros, columns packed in AWQ's order
//! gptq        int4, symmetric, rows packed; groups in any order (`desc_act`)
//! packed      int4 of compressed-tensors (`pack-quantized`), with or without zeros
//! rounded     what `--weights fp8` and `int4` make of bf16 weights while they are loaded
//! config      which of these `quantization_config` of `config.json` names
//! weight      a weight of an open checkpoint: any of its rows as bf16, or as codes
//! e4m3        the number format
//! ```
//!
//! # Adding a format
//! 1. A file with a type that implements [`CheckpointFormat`]: which tensors a matrix has, and how rows become
//!    [`Codes`].
//! 2. In `config`, the words of `quantization_config` that name it, and those that it refuses.
//! 3. A case in `scripts/make_golden_formats.py`: every path is then tested with it.
//!
//! A number format that no file had before needs a variant of [`Dtype`], too.

/// Defines `fn $name(…)`, which runs `$body(…)`, compiled for AVX2 if the machine has it. The body must always be
/// inlined. Both versions do the same operations, so their results are the same.
macro_rules! widest {
    ($(#[$doc:meta])* $name:ident = $body:ident ( $($arg:ident : $type:ty),* )) => {
        $(#[$doc])*
        #[inline]
        fn $name($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) {
                    $body($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the machine has it.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}

mod awq;
mod config;
pub mod e4m3;
mod fp8;
mod gptq;
mod packed;
mod rounded;
mod weight;

use std::fmt;
use std::ops::Range;

use crate::{Dtype, Error};

pub use awq::Awq;
pub use config::Quantization;
pub use fp8::Fp8;
pub use gptq::Gptq;
pub use packed::PackQuantized;
pub use rounded::Rounded;
pub(crate) use weight::{QuantizedId, WeightId};
pub use weight::{QuantizedMatrix, Weight};

/// What matrices of the layers become while a checkpoint is loaded. Embedding, head, norms and biases stay as they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WeightsMode {
    /// As they are stored.
    #[default]
    Plain,
    /// Rounded to FP8, with a scale for each block of 128 × 128.
    Fp8,
    /// Rounded to int4, with a scale and a zero for each 128 inputs of an output.
    Int4,
}

impl WeightsMode {
    /// What it rounds matrices to, if it rounds.
    pub fn rounding(self) -> Option<Rounded> {
        match self {
            Self::Plain => None,
            Self::Fp8 => Some(Rounded::Fp8),
            Self::Int4 => Some(Rounded::Int4),
        }
    }
}

impl fmt::Display for WeightsMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Plain => "plain",
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
        })
    }
}

/// A way in which files hold quantised matrices.
pub trait CheckpointFormat: fmt::Debug + Send + Sync {
    /// The name that people use, with the format's settings.
    fn name(&self) -> String;

    /// What the format's codes are.
    fn code(&self) -> Code;

    /// The tensors of a matrix of shape `[outputs, inputs]`, in an order that the format chooses.
    fn parts(&self, shape: [usize; 2]) -> Vec<Part>;

    /// Inputs that share a scale, of a matrix with `inputs` of them; the last group may be shorter.
    fn group(&self, inputs: usize) -> usize;

    /// Outputs that share a scale, of a matrix with `outputs` of them; the last group may be smaller.
    fn outputs_of_scale(&self, _outputs: usize) -> usize {
        1
    }

    /// Outputs that are read together: the ranges that [`read`](Self::read) is given begin at a multiple of this.
    fn unit(&self) -> usize {
        1
    }

    /// Whether exporters add biases of zeros to matrices that have none.
    fn adds_zero_biases(&self) -> bool {
        false
    }

    /// Reads codes, scales and zeros of the outputs `rows` into `out`, which has room for them.
    ///
    /// # Errors
    /// If a file cannot be read, or a code means no number. The caller checks the scales.
    fn read(&self, matrix: &QuantizedMatrix<'_>, rows: Range<usize>, out: &mut Codes) -> Result<(), Error>;

    /// The tensor that holds the scales: its index among the [parts](Self::parts).
    fn scale_part(&self) -> usize;

    /// Whether a matrix's scales are bf16, and so is each zero times its scale: the product needs no rounding.
    fn has_bf16_zeros(&self, matrix: &QuantizedMatrix<'_>) -> bool {
        matrix.part(self.scale_part()).dtype == Dtype::Bf16
    }

    /// Bytes of a matrix's codes, scales and zeros, packed as tightly as the format allows. `stored` is the bytes of
    /// its parts.
    fn compact_bytes(&self, _shape: [usize; 2], stored: u64) -> u64 {
        stored
    }
}

/// What a code is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// A number of FP8.
    E4m3,
    /// A whole number from 0 to 15, from which the zero is subtracted.
    Int4,
}

impl Code {
    /// The largest magnitude of a code before its scale.
    const fn largest(self) -> f32 {
        match self {
            Self::E4m3 => e4m3::LARGEST,
            // A zero may be 16 (a stored 15 with GPTQ's offset).
            Self::Int4 => 16.0,
        }
    }
}

/// A tensor of a quantised matrix.
#[derive(Debug, Clone)]
pub struct Part {
    /// What comes after the layer's name: `qweight` of `model.layers.0.mlp.up_proj.qweight`.
    pub suffix: &'static str,
    /// The number formats that it may have.
    pub dtypes: &'static [Dtype],
    /// Its shape, or one of several that mean the same.
    pub shapes: Vec<Vec<usize>>,
    /// Whether it may be left out.
    pub optional: bool,
}

impl Part {
    /// A part that must be there, with this shape.
    fn new(suffix: &'static str, dtypes: &'static [Dtype], shape: impl Into<Vec<usize>>) -> Self {
        Self { suffix, dtypes, shapes: vec![shape.into()], optional: false }
    }
}

/// Codes of some outputs of a matrix.
#[derive(Debug, Clone, Default)]
pub struct Codes {
    /// A code for each weight: `[rows, inputs]`.
    pub codes: Vec<u8>,
    /// Scales, `[rows, groups]`. Rows of the same block repeat its scales.
    pub scales: Vec<f32>,
    /// Zeros, `[rows, groups]`; empty for FP8.
    pub zeros: Vec<u8>,
    /// The group of each input, `[inputs]`; `None` if groups are runs of equal length.
    pub group_of: Option<Vec<u32>>,
}

impl Codes {
    /// Makes room for `rows` outputs of `inputs` codes each, in groups of `group`.
    fn resize(&mut self, code: Code, rows: usize, inputs: usize, group: usize) {
        let scales = rows * inputs.div_ceil(group);
        self.codes.resize(rows * inputs, 0);
        self.scales.resize(scales, 0.0);
        self.zeros.resize(if code == Code::Int4 { scales } else { 0 }, 0);
        self.group_of = None;
    }

    /// The weights that these codes stand for, as little-endian bf16, `[rows, inputs]`. Scales must be within
    /// [bounds](Self::first_bad_scale).
    pub fn to_bf16(&self, code: Code, inputs: usize, group: usize, out: &mut [u8]) {
        let groups = inputs.div_ceil(group);
        let rows = self.codes.chunks_exact(inputs).zip(out.chunks_exact_mut(2 * inputs)).enumerate();
        for (row, (codes, out)) in rows {
            let (out, _) = out.as_chunks_mut::<2>();
            let scales = &self.scales[row * groups..][..groups];
            let zeros = self.zeros.get(row * groups..).unwrap_or_default();
            if let Some(group_of) = &self.group_of {
                for ((out, &code), &group) in out.iter_mut().zip(codes).zip(group_of) {
                    let (zero, scale) = (zeros[group as usize], scales[group as usize]);
                    *out = int4(code, zero, scale);
                }
                continue;
            }
            match code {
                Code::E4m3 => fp8_row(codes, group, scales, out),
                Code::Int4 => int4_row(codes, group, scales, zeros, out),
            }
        }
    }

    /// The index in `scales` of the first scale that is not finite, or makes a weight that bf16 cannot hold.
    pub fn first_bad_scale(&self, code: Code) -> Option<usize> {
        let most = f32::from(half::bf16::MAX) / code.largest();
        // NaN is in no range, so it is found as well.
        self.scales.iter().position(|scale| !(0.0..=most).contains(&scale.abs()))
    }
}

widest! {
    /// Weights of a row of FP8 codes.
    fp8_row = fp8_row_body(codes: &[u8], group: usize, scales: &[f32], out: &mut [[u8; 2]])
}

widest! {
    /// Weights of a row of int4 codes.
    int4_row = int4_row_body(codes: &[u8], group: usize, scales: &[f32], zeros: &[u8], out: &mut [[u8; 2]])
}

#[inline(always)]
fn fp8_row_body(codes: &[u8], group: usize, scales: &[f32], out: &mut [[u8; 2]]) {
    for ((codes, out), &scale) in codes.chunks(group).zip(out.chunks_mut(group)).zip(scales) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = rounded_bf16(e4m3::value(code) * scale);
        }
    }
}

#[inline(always)]
fn int4_row_body(codes: &[u8], group: usize, scales: &[f32], zeros: &[u8], out: &mut [[u8; 2]]) {
    let groups = codes.chunks(group).zip(out.chunks_mut(group));
    for ((codes, out), (&scale, &zero)) in groups.zip(scales.iter().zip(zeros)) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = int4(code, zero, scale);
        }
    }
}

#[inline(always)]
fn int4(code: u8, zero: u8, scale: f32) -> [u8; 2] {
    rounded_bf16((i32::from(code) - i32::from(zero)) as f32 * scale)
}

/// `x` rounded to the nearest bf16, and to the even one of two equally near. `x` must be finite. Unlike the conversion
/// of the crate `half`, this vectorises.
#[inline(always)]
fn rounded_bf16(x: f32) -> [u8; 2] {
    let bits = x.to_bits();
    (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes()
}

/// Eight nibbles of a word, the lowest first, as bytes.
#[inline(always)]
const fn nibbles(word: u32) -> [u8; 8] {
    let x = word as u64;
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    ((x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f).to_le_bytes()
}

/// Writes the nibbles of words to `codes`, the lowest nibble of each word first. Of the last word it writes as many as
/// there is room for.
#[inline(always)]
fn unpack(words: impl IntoIterator<Item = u32>, codes: &mut [u8]) {
    let mut words = words.into_iter();
    let (whole, rest) = codes.as_chunks_mut();
    for (codes, word) in whole.iter_mut().zip(&mut words) {
        *codes = nibbles(word);
    }
    if let (false, Some(word)) = (rest.is_empty(), words.next()) {
        rest.copy_from_slice(&nibbles(word)[..rest.len()]);
    }
}

/// Nibble `index` of words in row-major order, as packers count them: eight a word, the lowest first.
fn nibble(words: &[u8], index: usize) -> u8 {
    let byte = words.get(index / 2).copied().unwrap_or(0);
    if index.is_multiple_of(2) { byte & 15 } else { byte >> 4 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    #[test]
    fn nibbles_come_lowest_first() {
        assert_eq!(nibbles(0x8765_4321), [1, 2, 3, 4, 5, 6, 7, 8]);
        let words = 0x8765_4321u32.to_le_bytes();
        assert!((0..8).all(|i| nibble(&words, i) == i as u8 + 1));
        let mut codes = [9; 11];
        unpack([0x8765_4321, 0xedc], &mut codes);
        assert_eq!(codes, [1, 2, 3, 4, 5, 6, 7, 8, 0xc, 0xd, 0xe]);
        unpack([0x11], &mut codes[..8]);
        assert_eq!(codes[..8], [1, 1, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn rounding_is_that_of_the_crate_half(x in any::<f32>().prop_filter("finite", |x| x.is_finite())) {
            prop_assert_eq!(rounded_bf16(x), bf16::from_f32(x).to_le_bytes());
        }
    }

    #[test]
    fn weights_are_what_the_definition_says() {
        // Groups of 3, the last one shorter; a second row.
        let scales = vec![0.5, 0.1, 3.0, 1e-3, 0.7, -2.0];
        let codes = vec![0, 7, 15, 3, 9, 11, 1, 15, 0, 8, 2, 4, 6, 10];
        let zeros = vec![7, 0, 15, 8, 16, 1];
        let int4 = Codes { codes: codes.clone(), scales: scales.clone(), zeros: zeros.clone(), group_of: None };
        let mut out = vec![0; 28];
        int4.to_bf16(Code::Int4, 7, 3, &mut out);
        let group = |i: usize| i / 7 * 3 + i % 7 / 3;
        let expected = |i: usize| (f32::from(codes[i]) - f32::from(zeros[group(i)])) * scales[group(i)];
        let bytes =
            |x: &dyn Fn(usize) -> f32| (0..14).flat_map(|i| bf16::from_f32(x(i)).to_le_bytes()).collect::<Vec<_>>();
        assert_eq!(out, bytes(&expected));
        let listed = Codes { group_of: Some(vec![0, 0, 0, 1, 1, 1, 2]), ..int4.clone() };
        let mut again = vec![0; 28];
        listed.to_bf16(Code::Int4, 7, 3, &mut again);
        assert_eq!(again, out);
        int4.to_bf16(Code::E4m3, 7, 3, &mut out);
        assert_eq!(out, bytes(&|i| e4m3::VALUES[codes[i] as usize] * scales[group(i)]));
    }

    #[test]
    fn scales_that_make_no_bf16_are_found() {
        let with = |scale| Codes { scales: vec![1.0, -7e35, scale], ..Codes::default() };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 7.7e35] {
            assert_eq!(with(bad).first_bad_scale(Code::E4m3), Some(2), "{bad}");
        }
        assert_eq!(with(7e35).first_bad_scale(Code::E4m3), None);
        assert_eq!(with(2e37).first_bad_scale(Code::Int4), None);
    }
}
