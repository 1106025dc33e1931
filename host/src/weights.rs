//! A checkpoint's weights in device memory, as bf16.

use std::f32::consts::TAU;

use cuda_std::Global;
use gpu_kernels::embedding::Embed;
use gpu_kernels::kv::HEAD_DIM;
use gpu_kernels::norm::Residual;
use gpu_kernels::step::Rows;
use half::bf16;
use model::format::{Code, e4m3};
use model::plan::{Epilogue, Gemm, Matrix};
use model::{Checkpoint, Config, Weight, Weights};

use crate::decode::Source;
use crate::device::{Buffer, Device, Region};
use crate::quantized::{Collector, Scales};
use crate::timed::timed;
use crate::{Error, Progress, gib};

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
    /// Of quantised weights, what makes their codes.
    pub scales: Option<Scales>,
}

/// One layer's weights.
pub struct DeviceLayer {
    /// `[hidden]`.
    pub input_norm: Buffer<bf16>,
    /// `[(q_heads + 2 · kv_heads) · 128, hidden]`: the query, key and value projections, one after another.
    pub qkv: Buffer<bf16>,
    /// The biases of these, `[(q_heads + 2 · kv_heads) · 128]`; none where the plan has none.
    pub qkv_bias: Option<Buffer<bf16>>,
    /// `[128]`; ones where the plan has no norms of heads.
    pub q_norm: Buffer<bf16>,
    /// `[128]`, likewise.
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
    /// Copies `checkpoint` to `device`. f16 and f32 weights are rounded to bf16, and quantised ones become the bf16
    /// that they mean. Every weight is checked on the way.
    ///
    /// # Errors
    /// A weight that is NaN or infinite, or would be in bf16; too little memory, a driver error, or
    /// [`Error::Interrupted`] when `progress` breaks.
    pub fn upload(checkpoint: &Checkpoint, device: &Device, progress: &mut Progress<'_>) -> Result<Self, Error> {
        let of_checkpoint = checkpoint.weights()?;
        let mut plan = Plan { device, weights: Vec::new(), regions: Vec::new() };
        let tied = checkpoint.config.tie_word_embeddings;
        let mut this = timed("memory for the weights", || Self::planned(&of_checkpoint, tied, &mut plan))?;
        let Plan { weights, regions, .. } = plan;
        let bytes: u64 = weights.iter().map(|weight| 2 * weight.elements() as u64).sum();
        let mut done = 0;
        let wanted = device.has_decode_kernel() && device.options().lossless != Some(false);
        let collector = if wanted { Collector::new(&of_checkpoint) } else { None };
        let fill = |i: usize, at: usize, out: &mut [u8]| match &collector {
            None => Ok(weights[i].read_bf16(at / 2, out)?),
            Some(collector) => {
                Ok(weights[i].read_bf16_and(at / 2, out, &mut |rows, codes| collector.take(weights[i], rows, codes))?)
            }
        };
        let mut progress = |sent: usize| {
            done += sent as u64;
            progress(done, bytes)
        };
        // SAFETY: the regions are those of `this`, which nobody else knows yet.
        let filled = || unsafe { device.fill_regions(&regions, &fill, &mut progress) };
        timed(&format!("{} of weights to the device", gib(bytes)), filled)?;
        this.scales = collector.and_then(Collector::finish);
        Ok(this)
    }

    /// Memory for the weights, with a plan of what belongs where.
    fn planned<'w>(weights: &'w Weights<Weight<'w>>, tied: bool, plan: &mut Plan<'w>) -> Result<Self, Error> {
        Ok(Self {
            embed: plan.buffer(&[&weights.embed])?,
            layers: weights
                .layers
                .iter()
                .map(|layer| {
                    Ok(DeviceLayer {
                        input_norm: plan.buffer(&[&layer.input_norm])?,
                        qkv: plan.buffer(&[&layer.q, &layer.k, &layer.v])?,
                        qkv_bias: layer.qkv_bias.as_ref().map(|biases| plan.buffer(&biases.each_ref())).transpose()?,
                        q_norm: plan.head_norm(layer.head_norms.as_ref().map(|[q, _]| q))?,
                        k_norm: plan.head_norm(layer.head_norms.as_ref().map(|[_, k]| k))?,
                        output: plan.buffer(&[&layer.o])?,
                        post_attention_norm: plan.buffer(&[&layer.post_attention_norm])?,
                        gate: plan.buffer(&[&layer.gate])?,
                        up: plan.buffer(&[&layer.up])?,
                        down: plan.buffer(&[&layer.down])?,
                    })
                })
                .collect::<Result<_, Error>>()?,
            norm: plan.buffer(&[&weights.norm])?,
            head: if tied { None } else { Some(plan.buffer(&[&weights.head])?) },
            scales: None,
        })
    }
}

impl DeviceWeights {
    /// Random weights of the shape of `config`, for measuring: normally distributed around 0, as trained ones nearly
    /// are, with standard deviation 0.02; norms are 1.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn random(config: &Config, device: &Device) -> Result<Self, Error> {
        Self::random_as(config, device, None)
    }

    /// The same, the layers' matrices as quantised ones, if so.
    ///
    /// # Errors
    /// As [`random`](Self::random).
    pub fn random_as(config: &Config, device: &Device, code: Option<Code>) -> Result<Self, Error> {
        // SplitMix64; a pattern of 32 MiB, from a place of its own for each matrix.
        const PATTERN: usize = 16 << 20;
        const SIGMA: f32 = 0.02;
        // In (0, 1); two make a pair of normally distributed ones (Box and Muller, 1958).
        let uniform = |i: usize| ((gpu_kernels::sample::random(0, i as u64) >> 40) as f32 + 0.5) / (1 << 24) as f32;
        let pair = |i: usize| {
            let (radius, angle) = (SIGMA * (-2.0 * uniform(2 * i).ln()).sqrt(), TAU * uniform(2 * i + 1));
            [radius * angle.cos(), radius * angle.sin()]
        };
        let drawn: Vec<f32> = (0..PATTERN / 2).flat_map(pair).collect();
        let pattern: Vec<bf16> = drawn.iter().map(|&x| bf16::from_f32(x)).collect();
        // One scale for all, with which codes reach to some three standard deviations.
        let quantized = code.map(|code| {
            let scale = bf16::from_f32(3.0 * SIGMA / if code == Code::Int4 { 8.0 } else { e4m3::LARGEST }).to_f32();
            let value = |x: f32| match code {
                Code::Int4 => (x / scale).round().clamp(-8.0, 7.0) * scale,
                Code::E4m3 => e4m3::value(e4m3::nearest(x / scale)) * scale,
            };
            let pattern: Vec<bf16> = drawn.iter().map(|&x| bf16::from_f32(value(x))).collect();
            (pattern, Scales::uniform(config, code, scale, if code == Code::Int4 { 8 } else { 0 }))
        });
        let mut matrices = 0;
        let mut fill = |elements: usize, pattern: &[bf16]| {
            matrices += 1;
            let mut buffer = device.zeroed(elements)?;
            buffer.repeat(pattern, matrices * 1_234_567 % PATTERN)?;
            Ok::<_, Error>(buffer)
        };
        let of_layers = quantized.as_ref().map_or(&pattern, |(pattern, _)| pattern);
        let (hidden, inner, q) = (config.hidden_size, config.intermediate_size, config.query_size());
        let ones = |elements: usize| device.upload(&vec![bf16::ONE; elements]);
        Ok(Self {
            embed: fill(config.vocab_size * hidden, &pattern)?,
            layers: (0..config.num_hidden_layers)
                .map(|_| {
                    Ok(DeviceLayer {
                        input_norm: ones(hidden)?,
                        qkv: fill(config.qkv_size() * hidden, of_layers)?,
                        qkv_bias: match config.traits.qkv_bias {
                            true => Some(fill(config.qkv_size(), &pattern)?),
                            false => None,
                        },
                        q_norm: ones(config.head_dim)?,
                        k_norm: ones(config.head_dim)?,
                        output: fill(hidden * q, of_layers)?,
                        post_attention_norm: ones(hidden)?,
                        gate: fill(inner * hidden, of_layers)?,
                        up: fill(inner * hidden, of_layers)?,
                        down: fill(hidden * inner, of_layers)?,
                    })
                })
                .collect::<Result<_, Error>>()?,
            norm: ones(hidden)?,
            head: if config.tie_word_embeddings { None } else { Some(fill(config.vocab_size * hidden, &pattern)?) },
            scales: quantized.map(|(_, scales)| scales),
        })
    }
}

impl DeviceWeights {
    /// The matrix of a GEMM of the plan; `layer` is the layer's number, of the head any.
    pub fn source(&self, layer: usize, gemm: &Gemm) -> Source {
        let of_layer = || &self.layers[layer];
        let (weight, up) = match gemm.matrix {
            Matrix::Qkv => (&of_layer().qkv, None),
            Matrix::Output => (&of_layer().output, None),
            Matrix::GateUp => (&of_layer().gate, Some(&of_layer().up)),
            Matrix::Down => (&of_layer().down, None),
            Matrix::Head => (self.head.as_ref().unwrap_or(&self.embed), None),
        };
        let up = up.map_or(Global::default(), Buffer::ptr);
        Source { weight: weight.ptr(), up, n: gemm.n as u32, k: gemm.k as u32 }
    }

    /// The bias of a GEMM of the plan, likewise; null where it has none.
    pub fn bias(&self, layer: usize, gemm: &Gemm) -> Global<bf16> {
        match gemm.epilogue {
            Epilogue::Write { bias: true } => {
                self.layers[layer].qkv_bias.as_ref().map_or(Global::default(), Buffer::ptr)
            }
            _ => Global::default(),
        }
    }

    /// The norm of what a GEMM of the plan reads, where that is the residual stream.
    pub fn norm_before(&self, layer: usize, gemm: &Gemm) -> &Buffer<bf16> {
        match gemm.matrix {
            Matrix::Head => &self.norm,
            Matrix::Qkv => self.layers.get(layer).map_or(&self.norm, |layer| &layer.input_norm),
            _ => &self.layers[layer].post_attention_norm,
        }
    }

    /// The norm that comes next where a GEMM of the plan adds to the residual stream: the layer's second, the next
    /// layer's first, or the final one.
    pub fn norm_after(&self, layer: usize, gemm: &Gemm) -> &Buffer<bf16> {
        match gemm.matrix {
            Matrix::Output => &self.layers[layer].post_attention_norm,
            _ => self.layers.get(layer + 1).map_or(&self.norm, |next| &next.input_norm),
        }
    }

    /// The embedding of `rows` as a `residual` stream, prepared for the first layer.
    pub fn embedding(&self, rows: Rows, residual: Residual) -> Embed {
        let vocab = self.embed.len() / residual.dim as usize;
        Embed { rows, table: self.embed.ptr(), residual, norm: self.layers[0].input_norm.ptr(), vocab: vocab as u32 }
    }
}

/// Where weights are to go.
struct Plan<'a> {
    device: &'a Device,
    weights: Vec<&'a Weight<'a>>,
    /// Of each weight.
    regions: Vec<Region>,
}

impl<'a> Plan<'a> {
    /// The norm of a kind of heads; ones without it.
    fn head_norm(&mut self, norm: Option<&'a Weight<'a>>) -> Result<Buffer<bf16>, Error> {
        match norm {
            Some(norm) => self.buffer(&[norm]),
            None => self.device.upload(&[bf16::ONE; HEAD_DIM as usize]),
        }
    }

    /// One buffer for `weights` one after another.
    fn buffer(&mut self, weights: &[&'a Weight<'a>]) -> Result<Buffer<bf16>, Error> {
        let buffer = self.device.zeroed(weights.iter().map(|weight| weight.elements()).sum())?;
        let mut at = 0;
        for weight in weights {
            self.weights.push(weight);
            // Rows that a format reads together are not cut apart.
            self.regions.push(buffer.region(at, weight.elements()).in_units(weight.unit()));
            at += weight.elements();
        }
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::path::{Path, PathBuf};

    use model::{Checkpoint, Dtype, OpenOptions};

    use super::*;

    fn read(buffer: &Buffer<bf16>) -> Vec<bf16> {
        let mut elements = vec![bf16::ZERO; buffer.len()];
        buffer.read(0, &mut elements).unwrap();
        elements
    }

    fn stored<'t>(weights: impl IntoIterator<Item = &'t Weight<'t>>) -> Vec<bf16> {
        let of = |weight: &Weight<'t>| {
            let tensor = weight.plain().expect("weights by themselves");
            (0..weight.elements()).map(move |i| bf16::from_f32(tensor.get(i).expect("an element"))).collect::<Vec<_>>()
        };
        weights.into_iter().flat_map(of).collect()
    }

    #[test]
    fn the_device_gets_what_is_stored() {
        let checkpoint = Checkpoint::demo().unwrap();
        let device = Device::emulator(0);
        let (mut last, mut total) = (0, 0);
        let uploaded = DeviceWeights::upload(&checkpoint, &device, &mut |done, of| {
            assert!(last < done && done <= of, "{done} of {of} after {last}");
            (last, total) = (done, of);
            ControlFlow::Continue(())
        });
        let uploaded = uploaded.unwrap();
        assert_eq!(last, total);
        let weights = checkpoint.weights().unwrap();
        assert!(read(&uploaded.embed) == stored([&weights.embed]));
        assert!(read(&uploaded.norm) == stored([&weights.norm]));
        for (found, layer) in uploaded.layers.iter().zip(&weights.layers) {
            assert!(read(&found.qkv) == stored([&layer.q, &layer.k, &layer.v]));
            assert!(read(&found.input_norm) == stored([&layer.input_norm]));
            assert!(read(&found.down) == stored([&layer.down]));
        }
    }

    /// The demo model in a folder of its own, with one element of a tensor changed to this.
    fn damaged(tensor: &str, index: usize, value: bf16) -> PathBuf {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/demo");
        let name = format!("warpdraft-upload-{}-{}", std::process::id(), value.to_bits());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            std::fs::copy(demo.join(name), folder.join(name)).unwrap();
        }
        let mut bytes = std::fs::read(demo.join("model.safetensors")).unwrap();
        let checkpoint = Checkpoint::open(&demo).unwrap();
        let tensor = checkpoint.tensor(tensor).unwrap();
        assert_eq!(tensor.dtype, Dtype::Bf16);
        let start = &tensor.data[..256];
        let at = bytes.windows(start.len()).position(|window| window == start).unwrap();
        bytes[at + 2 * index..][..2].copy_from_slice(&value.to_le_bytes());
        std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
        folder
    }

    #[test]
    fn a_weight_that_is_not_finite_is_named() {
        const TENSOR: &str = "model.layers.3.mlp.up_proj.weight";
        for value in [bf16::NAN, bf16::NEG_INFINITY] {
            let folder = damaged(TENSOR, 77_777, value);
            let checkpoint =
                Checkpoint::open_with(&folder, OpenOptions { check_finite: false, ..OpenOptions::default() }).unwrap();
            let mut progress = |_, _| ControlFlow::Continue(());
            let uploaded = DeviceWeights::upload(&checkpoint, &Device::emulator(0), &mut progress);
            std::fs::remove_dir_all(&folder).unwrap();
            match uploaded.err() {
                Some(Error::Model(model::Error::NotFinite { tensor, index, .. })) => {
                    assert_eq!((tensor.as_str(), index), (TENSOR, 77_777));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn an_interrupt_ends_the_upload() {
        let checkpoint = Checkpoint::demo().unwrap();
        let ended = DeviceWeights::upload(&checkpoint, &Device::emulator(0), &mut |_, _| ControlFlow::Break(()));
        assert!(matches!(ended, Err(Error::Interrupted)));
    }
}
