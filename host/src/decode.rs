//! The launch of the decode kernel (`gpu_kernels::decode`), and the device memory that only this kernel needs.

use cuda_std::{Global, GlobalMut};
use gpu_kernels::decode::{self, DecodeKernels, DecodeStep, SHARED_BYTES, SHORT_SHARED_BYTES, Short};
use gpu_kernels::e4m3;
use gpu_kernels::exchange::{Exchange, ExchangeSizes};
use gpu_kernels::weights;
use half::bf16;
use model::Config;
use model::plan::{Attention, Epilogue, Input, LayerPlan, Matrix, Operator};

use crate::Error;
use crate::cache::KvCache;
use crate::device::{Buffer, Device, TensorMaps};
use crate::e4m3::StepInputs;
use crate::forward::RowsOf;
use crate::lossless::Packed;
use crate::quantized::{Coding, by_code};
use crate::weights::{Compact, DeviceWeights};

/// The decode kernel with its weights and buffers: it runs a whole step of a model in one launch.
pub struct Decode {
    weights: StepWeights,
    /// The head packed without loss, if it was packed alone.
    packed_head: Option<weights::Lossless>,
    norms: Buffer<bf16>,
    /// None if the projections have no biases.
    biases: Option<Buffer<bf16>>,
    pages: Buffer<u64>,
    page_map: TensorMaps,
    counters: Buffer<u32>,
    /// The memory of the exchange between CTAs.
    words: Buffer<u64>,
    exchange: Exchange,
    /// The value of [`DecodeStep::qkv_inputs`].
    qkv_inputs: u32,
    grid: u32,
    /// Whether long contexts also need the kernels with attention by `wgmma`: see [`DecodeStep::has_wgmma_attention`].
    has_wgmma_attention: bool,
    /// Whether the kernels with the short ring are used, because shared memory has no room for the full ring.
    has_short_ring: bool,
}

/// The variants of the kernel, by the rows that each runs.
#[derive(Clone, Copy)]
enum DecodeKernel {
    /// One row.
    One,
    /// Up to 8 rows of one sequence, at consecutive positions.
    Few,
    /// More than 8 rows of one sequence, at consecutive positions.
    Many,
    /// Rows of one sequence that may be a tree.
    Tree,
    /// Up to 8 rows of several sequences.
    FewSequences,
    /// More than 8 rows of several sequences.
    Sequences,
    /// As [`Many`](Self::Many), for long contexts, with attention by `wgmma`.
    ManyLong,
    /// As [`Tree`](Self::Tree), for long contexts, with attention by `wgmma`.
    TreeLong,
}

/// The weights that a step reads, by their format.
enum StepWeights {
    /// The plain bf16 stream.
    Plain,
    /// Packed without loss.
    Lossless(weights::Lossless),
    /// The codes of the layers' matrices, and the chunk of the stream at which the bf16 head begins.
    Quantized(Coding, Global<u8>, u64),
    /// FP8 codes that are multiplied as FP8, buffers for their inputs, and the chunk of the stream at which the head
    /// begins.
    E4m3(e4m3::Weights, StepInputs, u64),
}

impl StepWeights {
    /// The most compact form that the weights have.
    fn new(device: &Device, config: &Config, weights: &DeviceWeights) -> Result<Self, Error> {
        let head = weights.stream.layer_chunks();
        Ok(match &weights.compact {
            Compact::None => Self::Plain,
            Compact::Packed(packed) => Self::Lossless(packed.parts()),
            Compact::Quantized(codes) => Self::Quantized(codes.coding(), codes.codes(), head),
            Compact::E4m3(codes) => Self::E4m3(codes.weights(), StepInputs::new(device, config)?, head),
        })
    }
}

/// Evaluates an expression with `$format` as the kernels' type for the weights' format. A short ring has types of its
/// own.
macro_rules! by_format {
    ($weights:expr, $has_short_ring:expr, $format:ident => $what:expr) => {
        match ($weights, $has_short_ring) {
            (StepWeights::Plain, false) => {
                type $format = weights::Plain;
                $what
            }
            (StepWeights::Plain, true) => {
                type $format = Short<weights::Plain>;
                $what
            }
            (StepWeights::Lossless(..), _) => {
                type $format = weights::Lossless;
                $what
            }
            (StepWeights::E4m3(..), _) => {
                type $format = weights::E4m3;
                $what
            }
            (StepWeights::Quantized(coding, ..), false) => by_code!(coding, C => {
                type $format = weights::Quantized<C>;
                $what
            }),
            (StepWeights::Quantized(coding, ..), true) => by_code!(coding, C => {
                type $format = Short<weights::Quantized<C>>;
                $what
            }),
        }
    };
}

impl Decode {
    /// A decode kernel for `weights`, which must live as long, and for contexts of at most `splits` splits. None if the
    /// device or the model's plan does not suit the kernel, or if there is only a short ring and no such kernel for the
    /// format.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn new(
        device: &Device,
        config: &Config,
        weights: &DeviceWeights,
        cache: &KvCache,
        splits: usize,
    ) -> Result<Option<Self>, Error> {
        if !device.has_decode_kernel() || !is_in_order(&config.plan) {
            return Ok(None);
        }
        let has_short_ring = !device.has_full_ring();
        if has_short_ring && matches!(weights.compact, Compact::Packed(_) | Compact::E4m3(_)) {
            return Ok(None);
        }
        let norms = weights.layers.iter().flat_map(|layer| {
            // In the order of `DecodeStep::norms`.
            [&layer.input_norm, &layer.post_attention_norm, &layer.q_norm, &layer.k_norm]
        });
        let norms = concatenated(device, norms.chain([&weights.norm]))?;
        let biases: Vec<_> = weights.layers.iter().filter_map(|layer| layer.qkv_bias.as_ref()).collect();
        let biases = if biases.is_empty() { None } else { Some(concatenated(device, biases)?) };
        let Attention { query_heads, key_value_heads, .. } = config.plan.attention;
        let inputs = qkv_inputs(weights);
        let sizes = ExchangeSizes {
            hidden: config.plan.hidden as u32,
            intermediate: config.plan.activation_size() as u32,
            q_heads: query_heads as u32,
            kv_heads: key_value_heads as u32,
            pairs: if is_head(config, weights) { inputs / 2 } else { 0 },
            splits: splits as u32,
        };
        let words = device.zeroed(Exchange::new(GlobalMut::default(), sizes).1)?;
        let pages: Vec<u64> = (0..cache.layers()).map(|layer| cache.layer(layer).addr()).collect();
        let (step_weights, grid) = (StepWeights::new(device, config, weights)?, weights.stream.blocks());
        let has_wgmma_attention = device.capabilities().wgmma
            && by_format!(&step_weights, has_short_ring, F => <F as DecodeKernels>::HAS_LONG)
            && DecodeStep::is_long(sizes.kv_heads, sizes.splits, grid);
        Ok(Some(Self {
            weights: step_weights,
            packed_head: weights.packed_head.as_ref().filter(|_| !has_short_ring).map(Packed::parts),
            norms,
            biases,
            pages: device.upload(&pages)?,
            page_map: device.array_maps(&[decode::page_array(
                cache.elements().ptr().addr(),
                cache.layers(),
                cache.layer_len(),
            )])?,
            counters: device.zeroed(DecodeStep::COUNTERS)?,
            exchange: Exchange::new(words.ptr_mut(), sizes).0,
            words,
            qkv_inputs: inputs,
            grid,
            has_wgmma_attention,
            has_short_ring,
        }))
    }

    /// The counters that must be zero when a step begins.
    pub fn counters(&self) -> &Buffer<u32> {
        &self.counters
    }

    /// Enqueues the zeroing of the counters. Needed before a step that no kernel plans: a kernel that plans a step
    /// zeroes them itself.
    ///
    /// # Errors
    /// A driver error.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.counters.clear()
    }

    /// Sets the [exchange](gpu_kernels::exchange::Exchange) so that only as many sequence flags are left as one step of
    /// one row takes. The second such step then wraps around to the first flags, which otherwise takes ten million
    /// steps. For tests.
    ///
    /// # Errors
    /// A driver error.
    pub fn use_up_flags(&mut self, config: &Config) -> Result<(), Error> {
        self.words.write(0, &[u64::from(u32::MAX - DecodeStep::flags(config.num_hidden_layers as u32))])
    }

    /// The exchange for a single row, for a launch that writes what the first matrix reads. None with a short ring,
    /// where a single row takes the path of several rows.
    pub(crate) fn exchange(&self) -> Option<Exchange> {
        (!self.has_short_ring).then_some(self.exchange)
    }

    /// For each row, the rank (`gpu_kernels::sample::rank`) of its best token. Valid once a step is done.
    pub fn best(&self) -> Global<u64> {
        // SAFETY: within the counters.
        unsafe { self.counters.ptr().at(DecodeStep::BEST).cast() }
    }

    /// Enqueues a step. `most` is the largest possible number of rows, or the exact number if they are of several
    /// sequences. The fields of `step` that belong to this type are filled in here.
    ///
    /// # Safety
    /// The addresses in `step` are as its documentation says, and the counters are zero when the step runs. The rows
    /// relate to each other as `most` says.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue(&self, device: &Device, most: (u32, RowsOf), step: DecodeStep) -> Result<(), Error> {
        let step = match &self.weights {
            StepWeights::Plain => step,
            StepWeights::Lossless(packed) => DecodeStep { lossless: *packed, ..step },
            StepWeights::Quantized(_, codes, head_base) => DecodeStep { codes: *codes, head_base: *head_base, ..step },
            StepWeights::E4m3(weights, inputs, head_base) => {
                DecodeStep { e4m3: *weights, inputs: inputs.parts(), head_base: *head_base, ..step }
            }
        };
        let step = match self.packed_head {
            Some(lossless) => DecodeStep { lossless, ..step },
            None => step,
        };
        let step = DecodeStep {
            norms: self.norms.ptr(),
            biases: self.biases.as_ref().map_or(Global::default(), Buffer::ptr),
            pages: self.pages.ptr(),
            page_map: self.page_map.ptr(0),
            counters: self.counters.ptr_mut(),
            exchange: self.exchange,
            qkv_inputs: self.qkv_inputs,
            has_wgmma_attention: self.has_wgmma_attention.into(),
            ..step
        };
        let several = match most {
            (0 | 1, _) => None,
            (2..=8, RowsOf::Sequences) => Some(DecodeKernel::FewSequences),
            (_, RowsOf::Sequences) => Some(DecodeKernel::Sequences),
            _ if !step.work.rows.paths.is_null() => Some(DecodeKernel::Tree),
            (2..=8, _) => Some(DecodeKernel::Few),
            _ => Some(DecodeKernel::Many),
        };
        // Only the device knows how many rows of one sequence there are and how long their context is. So every kernel
        // that may be needed is enqueued. One of them finds work; the others end at once.
        let by_wgmma = match several {
            Some(DecodeKernel::Many) => Some(DecodeKernel::ManyLong),
            Some(DecodeKernel::Tree) => Some(DecodeKernel::TreeLong),
            _ => None,
        };
        let by_wgmma = by_wgmma.filter(|_| self.has_wgmma_attention);
        // With a short ring, the kernels for several rows also run a single row.
        let has_own = !self.has_short_ring && most.1 != RowsOf::Sequences;
        let one = (several.is_none() || has_own).then_some(DecodeKernel::One);
        for kernel in [one, several, by_wgmma].into_iter().flatten() {
            // SAFETY: the caller's word.
            unsafe { self.launch(device, kernel, step)? };
        }
        Ok(())
    }

    /// Enqueues this variant of the kernel.
    ///
    /// # Safety
    /// As for [`enqueue`](Self::enqueue), with every field of `step` filled in.
    unsafe fn launch(&self, device: &Device, kernel: DecodeKernel, step: DecodeStep) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { by_format!(&self.weights, self.has_short_ring, F => self.launch_of::<F>(device, kernel, step)) }
    }

    /// Enqueues this variant for the weight format `F`.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); the weights have this format.
    unsafe fn launch_of<F: DecodeKernels>(
        &self,
        device: &Device,
        kernel: DecodeKernel,
        step: DecodeStep,
    ) -> Result<(), Error> {
        let shared_bytes = if self.has_short_ring { SHORT_SHARED_BYTES } else { SHARED_BYTES };
        macro_rules! launch {
            ($kernel:ident) => {
                device.launch_cooperative::<F::$kernel>(self.grid, shared_bytes, step)
            };
        }
        // SAFETY: the caller's word.
        unsafe {
            match kernel {
                DecodeKernel::One if self.packed_head.is_some() => {
                    let step = DecodeStep { head_base: 0, ..step };
                    device.launch_cooperative::<F::OneLosslessHead>(self.grid, shared_bytes, step)
                }
                DecodeKernel::One => launch!(One),
                DecodeKernel::Few => launch!(Few),
                DecodeKernel::Many => launch!(Many),
                DecodeKernel::Tree => launch!(Tree),
                DecodeKernel::FewSequences => launch!(FewSequences),
                DecodeKernel::Sequences => launch!(Sequences),
                DecodeKernel::ManyLong => launch!(ManyLong),
                DecodeKernel::TreeLong => launch!(TreeLong),
            }
        }
    }
}

/// Whether the layer's operators come in the order that is fixed in the decode kernel's code.
fn is_in_order(plan: &LayerPlan) -> bool {
    let gemm = |operator: &Operator| match operator {
        Operator::Gemm(gemm) => Some((gemm.matrix, gemm.input, gemm.epilogue)),
        Operator::Heads(_) | Operator::Attention(_) => None,
    };
    let operators: Vec<_> = plan.operators().collect();
    let [qkv, Operator::Heads(_), Operator::Attention(_), output, gate_up, down] = &operators[..] else { return false };
    matches!(gemm(qkv), Some((Matrix::Qkv, Input::Normed, Epilogue::Write { .. })))
        && gemm(output) == Some((Matrix::Output, Input::Attended, Epilogue::Add))
        && gemm(gate_up) == Some((Matrix::GateUp, Input::Normed, Epilogue::SwiGlu))
        && gemm(down) == Some((Matrix::Down, Input::Activation, Epilogue::Add))
}

/// Input features of the QKV projection.
fn qkv_inputs(weights: &DeviceWeights) -> u32 {
    weights.stream.matrix(0, Matrix::Qkv).k
}

/// Whether the weights are an EAGLE-3 head's. Its QKV projection reads two hidden sizes.
fn is_head(config: &Config, weights: &DeviceWeights) -> bool {
    qkv_inputs(weights) as usize != config.plan.hidden
}

/// The contents of `parts`, one after another, in a new buffer.
fn concatenated<'a>(device: &Device, parts: impl IntoIterator<Item = &'a Buffer<bf16>>) -> Result<Buffer<bf16>, Error> {
    let parts: Vec<_> = parts.into_iter().collect();
    let mut all = device.zeroed(parts.iter().map(|part| part.len()).sum())?;
    let mut at = 0;
    for part in parts {
        all.copy_from(at, part)?;
        at += part.len();
    }
    Ok(all)
}
