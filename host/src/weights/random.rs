//! Random weights, for measuring.

use std::f32::consts::TAU;

use gpu_kernels::linear::N_TILE;
use half::bf16;
use model::Config;
use model::format::{Code, e4m3 as numbers};
use model::plan::{Gemm, Matrix};

use super::{Compact, DeviceLayer, DeviceWeights};
use crate::device::Device;
use crate::forward::Forward;
use crate::lossless::{PackedSize, Sample};
use crate::quantized::{self, Coding};
use crate::stream::{Source, n_tiles};
use crate::weight_storage::{MatrixFormat, WeightStorage};
use crate::{Error, e4m3};

impl DeviceWeights {
    /// Random weights of the shape of `config`, for measuring: normally distributed around 0, as trained ones nearly
    /// are, with standard deviation 0.02; norms are 1.
    ///
    /// # Errors
    /// A shape that the kernels do not [cover](Forward::check), too little memory, or a driver error.
    pub fn random(config: &Config, device: &Device) -> Result<Self, Error> {
        Self::random_as(config, device, None)
    }

    /// As [`random`](Self::random). With a `code`, the layers' matrices are quantised weights of such codes.
    ///
    /// # Errors
    /// As [`random`](Self::random).
    pub fn random_as(config: &Config, device: &Device, code: Option<Code>) -> Result<Self, Error> {
        Forward::check(config)?;
        let drawn = normal();
        let pattern: Vec<bf16> = drawn.iter().map(|&x| bf16::from_f32(x)).collect();
        let quantized = code.map(|code| QuantizedPattern::new(code, &drawn));
        let kept = kept(config, device, code, &pattern)?;
        let mut filled = 0;
        let mut fill = |elements: usize, pattern: &[bf16]| {
            filled += 1;
            let mut buffer = device.zeroed(elements)?;
            buffer.repeat(pattern, filled * 1_234_567 % PATTERN)?;
            Ok::<_, Error>(buffer)
        };
        let of_layers = quantized.as_ref().map_or(&pattern, |quantized| &quantized.pattern);
        let hidden = config.plan.hidden;
        let ones = |elements: usize| device.upload(&vec![bf16::ONE; elements]);
        let embed = fill(config.vocab_size * hidden, &pattern)?;
        let (stream, compact) = (Self::memory(device, config, kept)?, Compact::new(device, config, kept)?);
        let packed_head = Self::memory_of_head(device, config, kept)?;
        for (number, gemm) in config.gemms().enumerate() {
            let is_head = gemm.matrix == Matrix::Head;
            let weights = match is_head {
                true if config.tie_word_embeddings => None,
                true => Some(fill(gemm.weights(), &pattern)?),
                false => Some(fill(gemm.weights(), of_layers)?),
            };
            let weights = weights.as_ref().unwrap_or(&embed);
            let up = (gemm.matrix == Matrix::GateUp).then_some(weights.len() / 2);
            // SAFETY: the matrices are `[n, k]`, one after another; they are freed when they are laid out.
            unsafe { stream.lay_out(device, number, Source::new(weights, gemm.n, up))? };
            let (from, shape) = (stream.matrices()[number], [gemm.weight_rows(), gemm.k]);
            match (&compact, &quantized) {
                (Compact::Packed(packed), _) => packed.pack(device, number, from)?,
                _ if is_head => packed_head.iter().try_for_each(|packed| packed.pack(device, number, from))?,
                (Compact::Quantized(codes), Some(QuantizedPattern { scale, zero, .. })) => {
                    let scales = quantized::uniform_scales(codes.coding(), shape, *scale, *zero);
                    codes.find(device, number, from, &scales)?;
                }
                (Compact::E4m3(codes), Some(QuantizedPattern { scale, .. })) => {
                    codes.find(device, number, from, &e4m3::uniform_scales(shape, *scale))?;
                }
                _ => {}
            }
        }
        let layer = |_| {
            Ok(DeviceLayer {
                input_norm: ones(hidden)?,
                qkv_bias: match config.plan.attention.traits.qkv_bias {
                    true => Some(fill(config.plan.attention.qkv_size(), &pattern)?),
                    false => None,
                },
                q_norm: ones(config.plan.attention.head_dim)?,
                k_norm: ones(config.plan.attention.head_dim)?,
                post_attention_norm: ones(hidden)?,
            })
        };
        let all = Self {
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_, Error>>()?,
            norm: ones(hidden)?,
            embed,
            stream,
            compact,
            packed_head,
        };
        Ok(all.finish()?.expect("weights that are normally distributed can be what they are to be"))
    }
}

/// Elements of a pattern. All matrices repeat it, each from a place of its own.
const PATTERN: usize = 16 << 20;
/// The weights' standard deviation.
const SIGMA: f32 = 0.02;

/// A pattern of normally distributed numbers.
fn normal() -> Vec<f32> {
    // Uniform in (0, 1), by SplitMix64. Two of these make two that are normally distributed (Box and Muller, 1958).
    let uniform = |i: usize| ((gpu_kernels::sample::random(0, i as u64) >> 40) as f32 + 0.5) / (1 << 24) as f32;
    let pair = |i: usize| {
        let (radius, angle) = (SIGMA * (-2.0 * uniform(2 * i).ln()).sqrt(), TAU * uniform(2 * i + 1));
        [radius * angle.cos(), radius * angle.sin()]
    };
    (0..PATTERN / 2).flat_map(pair).collect()
}

/// A pattern of quantised weights. All have one scale, with which codes reach to some three standard deviations, and
/// one zero.
struct QuantizedPattern {
    pattern: Vec<bf16>,
    scale: f32,
    zero: u8,
}

impl QuantizedPattern {
    fn new(code: Code, drawn: &[f32]) -> Self {
        let (largest, zero) = match code {
            Code::Int4 => (8.0, 8),
            Code::E4m3 => (numbers::LARGEST, 0),
        };
        let scale = bf16::from_f32(3.0 * SIGMA / largest).to_f32();
        let value = |x: f32| match code {
            // Adding 0 removes the sign of a zero: int4 has no negative zero.
            Code::Int4 => ((x / scale).round().clamp(-8.0, 7.0) + 0.0) * scale,
            Code::E4m3 => numbers::value(numbers::nearest(x / scale)) * scale,
        };
        Self { pattern: drawn.iter().map(|&x| bf16::from_f32(value(x))).collect(), scale, zero }
    }
}

/// What is kept of weights that repeat `pattern`, as if they came from a checkpoint.
fn kept(
    config: &Config,
    device: &Device,
    code: Option<Code>,
    pattern: &[bf16],
) -> Result<Option<WeightStorage>, Error> {
    let sample = |gemm: Gemm, from: usize| {
        let ((n_tiles, k), rows) = (n_tiles(&gemm), N_TILE as usize * gemm.k);
        Sample::new(n_tiles, k, &pattern[from * rows % (PATTERN - rows)..][..rows])
    };
    let format = match code.map(Coding::rounded) {
        Some(coding) => Some(MatrixFormat::Coded(coding)).filter(|_| coding.is_for(device)),
        None if WeightStorage::packs(device, config) => {
            // Each matrix is sampled at another part of the pattern.
            let samples = config.gemms().enumerate().map(|(number, gemm)| sample(gemm, number));
            PackedSize::of_samples(&samples.collect::<Vec<_>>()).map(MatrixFormat::Packed)
        }
        None => Some(MatrixFormat::Plain).filter(|_| WeightStorage::packs_head_alone(device)),
    };
    match format.map(|format| WeightStorage::on(device, config, format)).transpose()? {
        Some(kept) if !matches!(kept.format, MatrixFormat::Packed(_)) => {
            Ok(Some(kept.with_head(device, PackedSize::of_samples(&[sample(config.head(), 0)]))?))
        }
        kept => Ok(kept),
    }
}
