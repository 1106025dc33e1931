//! A checkpoint's weights in device memory, as bf16.

use std::ops::ControlFlow;

use gpu_kernels::embedding::Embed;
use gpu_kernels::norm::Residual;
use gpu_kernels::step::Rows;
use half::bf16;
use model::{Checkpoint, Config, Dtype, Tensor};

use crate::device::{Buffer, Device};
use crate::{Error, Progress};

/// Every weight of a model, on a device.
pub struct DeviceWeights {
    /// `[vocab, hidden]`.
    pub embed: Buffer<bf16>,
    /// One for each layer.
    pub layers: Vec<DeviceLayer>,
    /// `[hidden]`.
    pub norm: Buffer<bf16>,
    /// `[vocab, hidden]`; none when it is the embedding.
    pub head: Option<Buffer<bf16>>,
}

/// One layer's weights.
pub struct DeviceLayer {
    /// `[hidden]`.
    pub input_norm: Buffer<bf16>,
    /// `[(q_heads + 2 · kv_heads) · 128, hidden]`: the query, key and value projections, one after another.
    pub qkv: Buffer<bf16>,
    /// `[128]`.
    pub q_norm: Buffer<bf16>,
    /// `[128]`.
    pub k_norm: Buffer<bf16>,
    /// `[hidden, q_heads · 128]`.
    pub output: Buffer<bf16>,
    /// `[hidden]`.
    pub post_attention_norm: Buffer<bf16>,
    /// `[intermediate, hidden]`.
    pub gate: Buffer<bf16>,
    /// `[intermediate, hidden]`.
    pub up: Buffer<bf16>,
    /// `[hidden, intermediate]`.
    pub down: Buffer<bf16>,
}

impl DeviceWeights {
    /// Copies `checkpoint` to `device`. f16 and f32 weights are rounded to bf16. Every weight is checked on the way.
    ///
    /// # Errors
    /// A weight that is NaN or infinite, too little memory, a driver error, or [`Error::Interrupted`] when `progress` breaks.
    pub fn upload(checkpoint: &Checkpoint, device: &Device, progress: &mut Progress<'_>) -> Result<Self, Error> {
        let weights = checkpoint.weights()?;
        let mut upload =
            Upload { checkpoint, device, progress, done: 0, total: 2 * checkpoint.config.parameter_count() as u64 };
        let tied = checkpoint.config.tie_word_embeddings;
        Ok(Self {
            embed: upload.tensors(&[&weights.embed])?,
            layers: weights
                .layers
                .iter()
                .map(|layer| {
                    Ok(DeviceLayer {
                        input_norm: upload.tensors(&[&layer.input_norm])?,
                        qkv: upload.tensors(&[&layer.q, &layer.k, &layer.v])?,
                        q_norm: upload.tensors(&[&layer.q_norm])?,
                        k_norm: upload.tensors(&[&layer.k_norm])?,
                        output: upload.tensors(&[&layer.o])?,
                        post_attention_norm: upload.tensors(&[&layer.post_attention_norm])?,
                        gate: upload.tensors(&[&layer.gate])?,
                        up: upload.tensors(&[&layer.up])?,
                        down: upload.tensors(&[&layer.down])?,
                    })
                })
                .collect::<Result<_, Error>>()?,
            norm: upload.tensors(&[&weights.norm])?,
            head: if tied { None } else { Some(upload.tensors(&[&weights.head])?) },
        })
    }
}

impl DeviceWeights {
    /// Random weights of the shape of `config`, for measuring: uniform, with standard deviation 0.02; norms are 1.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn random(config: &Config, device: &Device) -> Result<Self, Error> {
        // SplitMix64; a pattern of 32 MiB, from a place of its own for each matrix.
        const PATTERN: usize = 16 << 20;
        let amplitude = 0.02 * 3f32.sqrt();
        let number = |i: usize| (gpu_kernels::sample::random(0, i as u64) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        let pattern: Vec<bf16> = (0..PATTERN).map(|i| bf16::from_f32(number(i) * amplitude)).collect();
        let mut matrices = 0;
        let mut matrix = |elements: usize| {
            matrices += 1;
            let mut buffer = device.zeroed(elements)?;
            buffer.repeat(&pattern, matrices * 1_234_567 % PATTERN)?;
            Ok::<_, Error>(buffer)
        };
        let (hidden, inner, q) = (config.hidden_size, config.intermediate_size, config.query_size());
        let ones = |elements: usize| device.upload(&vec![bf16::ONE; elements]);
        Ok(Self {
            embed: matrix(config.vocab_size * hidden)?,
            layers: (0..config.num_hidden_layers)
                .map(|_| {
                    Ok(DeviceLayer {
                        input_norm: ones(hidden)?,
                        qkv: matrix(config.qkv_size() * hidden)?,
                        q_norm: ones(config.head_dim)?,
                        k_norm: ones(config.head_dim)?,
                        output: matrix(hidden * q)?,
                        post_attention_norm: ones(hidden)?,
                        gate: matrix(inner * hidden)?,
                        up: matrix(inner * hidden)?,
                        down: matrix(hidden * inner)?,
                    })
                })
                .collect::<Result<_, Error>>()?,
            norm: ones(hidden)?,
            head: if config.tie_word_embeddings { None } else { Some(matrix(config.vocab_size * hidden)?) },
        })
    }
}

impl DeviceWeights {
    /// The norm that comes after each layer: the next layer's first, and the final one.
    pub fn next_norms(&self) -> impl Iterator<Item = &Buffer<bf16>> {
        self.layers.iter().skip(1).map(|layer| &layer.input_norm).chain([&self.norm])
    }

    /// The embedding of `rows` as a `residual` stream, prepared for the first layer.
    pub fn embedding(&self, rows: Rows, residual: Residual) -> Embed {
        let vocab = self.embed.len() / residual.dim as usize;
        Embed { rows, table: self.embed.ptr(), residual, norm: self.layers[0].input_norm.ptr(), vocab: vocab as u32 }
    }
}

struct Upload<'a, 'p> {
    checkpoint: &'a Checkpoint,
    device: &'a Device,
    progress: &'a mut Progress<'p>,
    done: u64,
    total: u64,
}

impl Upload<'_, '_> {
    /// One buffer with `tensors` one after another.
    fn tensors(&mut self, tensors: &[&Tensor<'_>]) -> Result<Buffer<bf16>, Error> {
        let elements = |t: &Tensor<'_>| t.shape.iter().product::<usize>();
        let mut buffer = self.device.zeroed(tensors.iter().map(|t| elements(t)).sum())?;
        let mut at = 0;
        for tensor in tensors {
            self.checkpoint.check_tensor_finite(tensor, &|_| {})?;
            match bytemuck::try_cast_slice(tensor.data) {
                Ok(same) if tensor.dtype == Dtype::Bf16 => buffer.write(at, same)?,
                _ => buffer.write(at, &to_bf16(tensor))?,
            }
            at += elements(tensor);
            self.done += 2 * elements(tensor) as u64;
            if let ControlFlow::Break(()) = (self.progress)(self.done, self.total) {
                return Err(Error::Interrupted);
            }
        }
        Ok(buffer)
    }
}

/// The tensor's elements, rounded to the nearest bf16.
fn to_bf16(tensor: &Tensor<'_>) -> Vec<bf16> {
    let words = tensor.data.chunks_exact(tensor.dtype.size());
    match tensor.dtype {
        Dtype::Bf16 => words.map(|w| bf16::from_le_bytes([w[0], w[1]])).collect(),
        Dtype::F16 => words.map(|w| bf16::from_f32(half::f16::from_le_bytes([w[0], w[1]]).to_f32())).collect(),
        Dtype::F32 => words.map(|w| bf16::from_f32(f32::from_le_bytes([w[0], w[1], w[2], w[3]]))).collect(),
    }
}
