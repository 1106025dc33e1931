//! A checkpoint's weights in device memory: as bf16, as codes, or packed without loss.

mod compact;
mod random;
mod staging;

use std::ops::Range;

use cuda_std::Global;
use gpu_kernels::embedding::Embed;
use gpu_kernels::norm::Residual;
use gpu_kernels::step::Rows;
use half::bf16;
use model::format::Codes;
use model::plan::{Epilogue, Gemm, Matrix};
use model::{Checkpoint, Config, LayerWeights, Weight, Weights};

pub use self::compact::Compact;
pub(crate) use self::compact::{check_bases, check_size};
use self::staging::{Plan, Staging, rows_together};
use crate::device::{Buffer, Device, Filling};
use crate::e4m3::{self, E4m3};
use crate::forward::Forward;
use crate::lossless::Packed;
use crate::quantized::{self, Coding, Quantized};
use crate::stream::{Source, Stream};
use crate::timed::timed;
use crate::weight_storage::WeightStorage;
use crate::{Error, Progress, gib};

/// Every weight of a model, on a device.
pub struct DeviceWeights {
    /// `[vocab, hidden]`.
    pub embed: Buffer<bf16>,
    /// One for each layer.
    pub layers: Vec<DeviceLayer>,
    /// `[hidden]`: the final norm.
    pub norm: Buffer<bf16>,
    /// The matrices of all layers and the head, in bf16. Where the layers are kept [compact](Self::compact) alone, it
    /// holds one layer's matrices at a time, and the head.
    pub stream: Stream,
    /// The matrices in fewer bytes than bf16 takes, if they are kept so.
    pub compact: Compact,
    /// The head packed without loss, for the decode kernel, if the other matrices are not.
    pub packed_head: Option<Packed>,
}

/// One layer's weights, apart from its matrices.
pub struct DeviceLayer {
    /// `[hidden]`: the norm before attention.
    pub input_norm: Buffer<bf16>,
    /// `[(q_heads + 2 · kv_heads) · 128]`: the biases of queries, keys and values; none where the plan has none.
    pub qkv_bias: Option<Buffer<bf16>>,
    /// `[128]`; ones where the plan has no norms of heads.
    pub q_norm: Buffer<bf16>,
    /// `[128]`; ones where the plan has no norms of heads.
    pub k_norm: Buffer<bf16>,
    /// `[hidden]`: the norm before the feed-forward.
    pub post_attention_norm: Buffer<bf16>,
}

impl DeviceWeights {
    /// Copies `checkpoint` to `device`, checks every weight and lays the matrices out. f16 and f32 weights are rounded
    /// to bf16, and quantised ones are decoded to bf16. Then the matrices are kept as `kept` says. If they turn out not
    /// to fit that format, `plain_fits` is asked, and everything is loaded again as bf16.
    ///
    /// # Errors
    /// A shape that the kernels do not [cover](Forward::check); a weight that is NaN or infinite, or would be in bf16;
    /// too little memory, a driver error, the error of `plain_fits`, or [`Error::Interrupted`] when `progress` breaks.
    pub fn upload(
        checkpoint: &Checkpoint,
        device: &Device,
        kept: Option<WeightStorage>,
        plain_fits: impl FnOnce() -> Result<(), Error>,
        progress: &mut Progress<'_>,
    ) -> Result<Self, Error> {
        Forward::check(&checkpoint.config)?;
        if let Some(kept) = Self::upload_as(checkpoint, device, kept, progress)? {
            return Ok(kept);
        }
        // The kernels' codes lack some scale or weight, or there are too many escapes. So the weights are kept as bf16.
        plain_fits()?;
        let plain = Self::upload_as(checkpoint, device, None, progress)?;
        Ok(plain.expect("weights in bf16 have no codes that could not do"))
    }

    /// As [`upload`](Self::upload), in the format that `kept` says, or as bf16. None if the weights turn out not to fit
    /// the format.
    fn upload_as(
        checkpoint: &Checkpoint,
        device: &Device,
        kept: Option<WeightStorage>,
        progress: &mut Progress<'_>,
    ) -> Result<Option<Self>, Error> {
        let of_checkpoint = checkpoint.weights()?;
        let mut plan = Plan::new(device);
        let planned = || Self::planned(&of_checkpoint, &checkpoint.config, kept, &mut plan);
        // The staging buffers live until everything has been laid out.
        let (this, _staging) = timed("memory for the weights", planned)?;
        let Plan { weights, groups, behind, .. } = plan;
        let bytes: u64 = groups.iter().flat_map(|group| &group.regions).map(|region| region.bytes() as u64).sum();
        let mut done = 0;
        let collector = kept.and_then(WeightStorage::coding).map(|coding| Scales::new(&of_checkpoint, coding));
        let is_unfit = || collector.as_ref().is_some_and(Scales::is_unfit);
        let fill = |i: usize, at: usize, out: &mut [u8]| match &collector {
            None => Ok(weights[i].0.read_bf16(weights[i].1 + at / 2, out)?),
            Some(collector) => {
                let (weight, first) = weights[i];
                let mut take = |rows, codes: &_| collector.take(weight, rows, codes);
                weight.read_bf16_and(first + at / 2, out, &mut take)?;
                // Stops here: all is loaded again as bf16.
                if collector.is_unfit() { Err(Error::Interrupted) } else { Ok(()) }
            }
        };
        let lay_out = |group: usize| {
            let Some((number, source)) = behind[group] else { return Ok(()) };
            // SAFETY: the copies of the matrix are enqueued, and its memory is filled anew behind this alone.
            unsafe { this.stream.lay_out(device, number, source)? };
            // The head comes in parts and stays as bf16. If it is packed too, that is enqueued at the end.
            if number >= this.layers.len() * Matrix::OF_LAYER.len() {
                return Ok(());
            }
            let from = this.stream.matrices()[number];
            match (&this.compact, &collector) {
                (Compact::Quantized(codes), Some(Scales::Words(of))) => {
                    codes.find(device, number, from, &of.scales(number))
                }
                (Compact::E4m3(codes), Some(Scales::Blocks(of))) => {
                    codes.find(device, number, from, &of.scales(number))
                }
                (Compact::Packed(packed), _) => packed.pack(device, number, from),
                _ => Ok(()),
            }
        };
        let mut progress = |sent: usize| {
            done += sent as u64;
            progress(done, bytes)
        };
        // SAFETY: the regions are those of `this` and of the staging memory, which nobody else knows yet.
        let filled =
            || unsafe { device.fill_regions(&groups, &Filling { fill: &fill, then: &lay_out }, &mut progress) };
        let filled = timed(&format!("{} of weights to the device", gib(bytes)), filled);
        if is_unfit() {
            return Ok(None);
        }
        filled?;
        if let Some(packed) = this.packed().or(this.packed_head.as_ref()) {
            let head = Matrix::Head.number(this.layers.len());
            packed.pack(device, head, this.stream.matrices()[head])?;
        }
        this.finish()
    }

    /// Once all matrices are there: checks that they are exactly the checkpoint's. None if not; a packed head is
    /// dropped if it alone is not. Waits for the device.
    fn finish(mut self) -> Result<Option<Self>, Error> {
        if let Some(head) = &mut self.packed_head
            && !head.finish()?
        {
            self.packed_head = None;
        }
        Ok(self.compact.finish()?.then_some(self))
    }

    /// Allocates memory for the weights, and staging buffers for the matrices. Adds to `plan` what is copied where.
    fn planned<'w>(
        weights: &'w Weights<Weight<'w>>,
        config: &Config,
        kept: Option<WeightStorage>,
        plan: &mut Plan<'w>,
    ) -> Result<(Self, Staging), Error> {
        let device = plan.device;
        let tied = config.tie_word_embeddings;
        let largest = config.plan.gemms().map(|gemm| gemm.weights()).max().unwrap_or(0);
        let least = if tied { 0 } else { rows_together(&weights.head) * config.plan.hidden };
        let mut staging = Staging::new(device, largest.max(least))?;
        let (stream, compact) = (Self::memory(device, config, kept)?, Compact::new(device, config, kept)?);
        let packed_head = Self::memory_of_head(device, config, kept)?;
        let embed = plan.buffer(&[&weights.embed])?;
        let head = Matrix::Head.number(config.num_hidden_layers);
        // If the head is the embedding, it is laid out from there.
        plan.end_group(None, tied.then(|| (head, Source::new(&embed, config.vocab_size, None))));
        let layer = |(i, layer): (usize, &'w LayerWeights<Weight<'w>>)| {
            let this = DeviceLayer {
                input_norm: plan.buffer(&[&layer.input_norm])?,
                qkv_bias: layer.qkv_bias.as_ref().map(|biases| plan.buffer(&biases.each_ref())).transpose()?,
                q_norm: plan.head_norm(layer.head_norms.as_ref().map(|[q, _]| q))?,
                k_norm: plan.head_norm(layer.head_norms.as_ref().map(|[_, k]| k))?,
                post_attention_norm: plan.buffer(&[&layer.post_attention_norm])?,
            };
            for matrix in Matrix::OF_LAYER {
                staging.stage(plan, matrix.number(i), &layer.parts(matrix), matrix == Matrix::GateUp);
            }
            Ok(this)
        };
        let layers = weights.layers.iter().enumerate().map(layer).collect::<Result<_, Error>>()?;
        let norm = plan.buffer(&[&weights.norm])?;
        if tied {
            plan.end_group(None, None);
        } else {
            staging.stage_in_parts(plan, head, &weights.head);
        }
        Ok((Self { embed, layers, norm, stream, compact, packed_head }, staging))
    }

    /// Memory for a packed head, if one is kept.
    fn memory_of_head(device: &Device, config: &Config, kept: Option<WeightStorage>) -> Result<Option<Packed>, Error> {
        let size = kept.and_then(|kept| kept.head);
        size.map(|size| Packed::of_head(device, config, size)).transpose()
    }

    /// Memory for matrices in bf16: of all layers or of one, and the head.
    fn memory(device: &Device, config: &Config, kept: Option<WeightStorage>) -> Result<Stream, Error> {
        let is_of_layer = kept.is_some_and(|kept| !kept.plain);
        if is_of_layer { Stream::of_layer(device, config) } else { Stream::of_model(device, config) }
    }

    /// Bytes of a model's weights on a device that keeps its matrices as `kept` says. None: as bf16 alone.
    pub fn bytes(config: &Config, kept: Option<WeightStorage>) -> u64 {
        let matrices: usize = config.gemms().map(|gemm| 2 * gemm.weights()).sum();
        let tied = if config.tie_word_embeddings { 2 * config.head().weights() } else { 0 };
        let others = config.weight_bytes(2) as u64 + tied as u64 - matrices as u64;
        others + kept.map_or_else(|| Stream::bytes(config, false), |kept| kept.bytes(config))
    }
}

impl DeviceWeights {
    /// The codes of the layers' matrices, if they are kept so and kernels decode them to bf16.
    pub fn codes(&self) -> Option<&Quantized> {
        if let Compact::Quantized(codes) = &self.compact { Some(codes) } else { None }
    }

    /// The codes of the layers' matrices, if GEMMs multiply the codes themselves.
    pub fn e4m3(&self) -> Option<&E4m3> {
        if let Compact::E4m3(codes) = &self.compact { Some(codes) } else { None }
    }

    /// The matrices packed without loss, if they are kept so.
    pub fn packed(&self) -> Option<&Packed> {
        if let Compact::Packed(packed) = &self.compact { Some(packed) } else { None }
    }

    /// Bytes of the weights that a step of one row reads.
    pub(crate) fn step_bytes(&self, config: &Config) -> u64 {
        let head = 2 * config.head().weights() as u64;
        let all: u64 = config.gemms().map(|gemm| 2 * gemm.weights() as u64).sum();
        let matrices = match self.compact {
            Compact::None => 0,
            Compact::Quantized(_) | Compact::E4m3(_) => all - head,
            Compact::Packed(_) => all,
        };
        let compact = self.compact.bytes().unwrap_or(0);
        let (of_head, packed_head) = self.packed_head.as_ref().map_or((0, 0), |packed| (head, packed.bytes()));
        config.step_weight_bytes(2) as u64 + compact + packed_head - matrices - of_head
    }

    /// Makes the [stream](Self::stream) hold a layer's matrices for the launches that follow. If it has room for one
    /// layer alone, this enqueues that they are made from the [compact](Self::compact) ones.
    ///
    /// # Errors
    /// A refused launch.
    pub(crate) fn make_layer(&self, device: &Device, layer: usize) -> Result<(), Error> {
        if self.stream.is_of_layer() { self.compact.make_layer(device, layer, &self.stream) } else { Ok(()) }
    }

    /// The bias of a GEMM of the plan in a layer; null where it has none.
    pub fn bias(&self, layer: usize, gemm: &Gemm) -> Global<bf16> {
        match gemm.epilogue {
            Epilogue::Write { bias: true } => {
                self.layers[layer].qkv_bias.as_ref().map_or(Global::default(), Buffer::ptr)
            }
            _ => Global::default(),
        }
    }

    /// The norm that follows a GEMM of the plan that adds to the residual stream: the layer's second, the next layer's
    /// first, or the final one.
    pub fn norm_after(&self, layer: usize, gemm: &Gemm) -> &Buffer<bf16> {
        match gemm.matrix {
            Matrix::Output => &self.layers[layer].post_attention_norm,
            Matrix::Qkv | Matrix::GateUp | Matrix::Down | Matrix::Head => {
                self.layers.get(layer + 1).map_or(&self.norm, |next| &next.input_norm)
            }
        }
    }

    /// Parameters of the embedding of `rows`: it writes the `residual` stream and prepares the first layer's norm.
    pub fn embedding(&self, rows: Rows, residual: Residual) -> Embed {
        let vocab = self.embed.len() / residual.dim as usize;
        Embed { rows, table: self.embed.ptr(), residual, norm: self.layers[0].input_norm.ptr(), vocab: vocab as u32 }
    }
}

/// Gathers the scales of codes while a checkpoint is read.
enum Scales {
    Words(quantized::Collector),
    Blocks(e4m3::Collector),
}

impl Scales {
    /// For a checkpoint's weights, whose codes are of this kind.
    fn new(weights: &Weights<Weight<'_>>, coding: Coding) -> Self {
        match coding.in_blocks {
            true => Self::Blocks(e4m3::Collector::new(weights)),
            false => Self::Words(quantized::Collector::new(weights, coding)),
        }
    }

    /// Takes the scales of some rows of a weight.
    fn take(&self, weight: &Weight<'_>, rows: Range<usize>, codes: &Codes) {
        match self {
            Self::Words(of) => of.take(weight, rows, codes),
            Self::Blocks(of) => of.take(weight, rows, codes),
        }
    }

    /// Whether the kernels cannot read the codes with these scales.
    fn is_unfit(&self) -> bool {
        matches!(self, Self::Words(of) if of.is_unfit())
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::path::{Path, PathBuf};

    use gpu_kernels::stream::StreamMatrix;
    use model::{Checkpoint, Dtype, OpenOptions};

    use super::*;
    use crate::lossless::PackedSize;
    use crate::weight_storage::MatrixFormat;

    fn upload(checkpoint: &Checkpoint, progress: &mut Progress<'_>) -> Result<DeviceWeights, Error> {
        DeviceWeights::upload(checkpoint, &Device::emulator(0), None, || Ok(()), progress)
    }

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
        // A model whose head is the embedding, and one that has a head of its own.
        stored_arrives(&Checkpoint::demo().unwrap());
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/separate_f16_sharded");
        stored_arrives(&Checkpoint::open(&golden).unwrap());
    }

    fn stored_arrives(checkpoint: &Checkpoint) {
        let (mut last, mut total) = (0, 0);
        let uploaded = upload(checkpoint, &mut |done, of| {
            assert!(last < done && done <= of, "{done} of {of} after {last}");
            (last, total) = (done, of);
            ControlFlow::Continue(())
        });
        let uploaded = uploaded.unwrap();
        assert_eq!(last, total);
        let weights = checkpoint.weights().unwrap();
        assert!(read(&uploaded.embed) == stored([&weights.embed]));
        assert!(read(&uploaded.norm) == stored([&weights.norm]));
        let stream = read(uploaded.stream.weights());
        let inputs = checkpoint.config.plan.hidden;
        for (i, (found, layer)) in uploaded.layers.iter().zip(&weights.layers).enumerate() {
            assert!(read(&found.input_norm) == stored([&layer.input_norm]));
            let of = |matrix| uploaded.stream.matrix(i, matrix);
            let qkv = stored([&layer.q, &layer.k, &layer.v]);
            assert!(
                qkv.iter().enumerate().all(|(at, x)| stream[place(&of(Matrix::Qkv), at / inputs, at % inputs)] == *x)
            );
            let (gate, up) = (stored([&layer.gate]), stored([&layer.up]));
            for (at, both) in gate.iter().zip(&up).enumerate() {
                let (row, k) = (at / inputs, at % inputs);
                let place = |half: usize| place(&of(Matrix::GateUp), row / 8 * 16 + half * 8 + row % 8, k);
                assert_eq!((&stream[place(0)], &stream[place(1)]), both, "layer {i}, row {row}, input {k}");
            }
        }
        let head = uploaded.stream.matrix(checkpoint.config.num_hidden_layers, Matrix::Head);
        let weights = stored([&weights.head]);
        assert!(weights.iter().enumerate().all(|(at, x)| stream[place(&head, at / inputs, at % inputs)] == *x));
    }

    /// The index in the stream of a matrix's element at `row` and input `k`. The layout is the one that
    /// `gpu_kernels::stream` describes in words.
    fn place(of: &StreamMatrix, row: usize, k: usize) -> usize {
        let (tile, wave) = (row / 16, 8 * of.blocks as usize);
        let passed = tile / wave * wave;
        let room = (of.n_tiles as usize - passed).min(wave).next_multiple_of(8);
        let (tile, chunks) = (tile - passed, passed * (of.k as usize).div_ceil(512));
        let chunk = of.base as usize + chunks + k / 512 * room + tile / 8 * 8;
        let (slice, k) = (k % 512 / 64, k % 64);
        let (instruction, half) = (k / 32 * 2 + k % 8 / 4, k % 4 / 2);
        let core = ((slice * 8 + tile % 8) * 2 + row % 16 / 8) * 8 + instruction * 2 + half;
        chunk * 8192 + core * 64 + row % 8 * 8 + k % 32 / 8 * 2 + k % 2
    }

    /// The demo model in a folder of its own, with one element of a tensor changed to `value`.
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
            let uploaded = upload(&checkpoint, &mut progress);
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
        assert!(matches!(upload(&checkpoint, &mut |_, _| ControlFlow::Break(())), Err(Error::Interrupted)));
    }

    #[test]
    fn weights_that_cannot_be_packed_after_all_stay_plain() {
        let demo = Checkpoint::demo().unwrap();
        let format = MatrixFormat::Packed(PackedSize::of(&demo, 1).unwrap().expect("packed"));
        let device = Device::emulator(0);
        // One weight's exponent is far from all others', where a sample would not have met it.
        let folder = damaged("model.layers.2.mlp.up_proj.weight", 4_321, bf16::from_f32(1e30));
        let far = Checkpoint::open(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        for (checkpoint, is_packed, plain) in [(&demo, true, false), (&demo, true, true), (&far.unwrap(), false, false)]
        {
            let (mut asked, kept) = (0, Some(WeightStorage { plain, ..WeightStorage::only(format) }));
            let fits = || {
                asked += 1;
                Ok(())
            };
            let go_on = &mut |_, _| ControlFlow::Continue(());
            let weights = DeviceWeights::upload(checkpoint, &device, kept, fits, go_on).unwrap();
            assert_eq!((weights.packed().is_some(), asked), (is_packed, i32::from(!is_packed)));
            assert_eq!(weights.stream.is_of_layer(), is_packed && !plain);
        }
    }

    #[test]
    fn weights_are_packed_to_sizes_that_there_are() {
        let (demo, device) = (Checkpoint::demo().unwrap(), Device::emulator(0));
        let size = PackedSize::of(&demo, 1).unwrap().expect("packed");
        for list_bytes in [0, 8, size.list_bytes + 8, 656, 1 << 31] {
            let format = MatrixFormat::Packed(PackedSize { list_bytes, ..size });
            let go_on = &mut |_, _| ControlFlow::Continue(());
            let uploaded = DeviceWeights::upload(&demo, &device, Some(WeightStorage::only(format)), || Ok(()), go_on);
            let error = uploaded.err().map(|error| error.to_string()).unwrap_or_default();
            let said = format!("lists of {list_bytes} bytes: lists have a multiple of 16, and at most 640");
            assert!(error.contains(&said), "{error}");
        }
    }

    #[test]
    fn room_is_asked_for_again_where_codes_are_unfit() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/formats/gptq_qwen2");
        let (checkpoint, device) = (Checkpoint::open(&folder).unwrap(), Device::emulator(0));
        let kept = WeightStorage::of(&checkpoint, &device).unwrap().expect("codes");
        let coding = kept.coding().expect("codes");
        assert!(coding.is_fine);
        // The checkpoint's scales are in f16, with more bits than coarse scales have.
        for is_fine in [true, false] {
            let kept = WeightStorage { format: MatrixFormat::Coded(Coding { is_fine, ..coding }), ..kept };
            let full = || Err(Error::OutOfMemory { wanted: 1, free: 0 });
            let mut progress = |_, _| ControlFlow::Continue(());
            match DeviceWeights::upload(&checkpoint, &device, Some(kept), full, &mut progress) {
                Ok(weights) => assert!(is_fine && weights.codes().is_some()),
                Err(error) => assert!(!is_fine && matches!(error, Error::OutOfMemory { .. }), "{error}"),
            }
        }
    }
}
