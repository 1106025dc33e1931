//! The pass of an EAGLE-3 head on a device. Its rows are made from hidden states; its layer is like a model's.

use cuda_std::{Global, GlobalMut};
use gpu_kernels::eagle::{self, GatherStates, KeepState, MakePairs, STATES, States};
use gpu_kernels::linear::{Linear, N_TILE};
use gpu_kernels::norm::Norm;
use gpu_kernels::step::{MAX_DECODE_ROWS, MAX_ROWS};
use gpu_kernels::stream::StreamMatrix;
use half::bf16;
use model::plan::{Epilogue, Matrix};
use model::{Config, EagleHead, Tensor};

use super::{Capacity, Footprint, Forward, Pass, RowOutput, RowsOf, pages};
use crate::Error;
use crate::decode::Decode;
use crate::device::{Buffer, Device};
use crate::lossless::{Packed, PackedSize, Sample};
use crate::prefill;
use crate::stream::{Source, Stream, n_tiles};
use crate::weights::{Compact, DeviceLayer, DeviceWeights, check_size};

/// The number of the matrix that makes one hidden state from three. It comes after the layer's matrices and the output
/// head.
const FC: usize = Matrix::Head.number(1) + 1;
/// Rows of a matrix from which its packed size is estimated.
const SAMPLED: usize = 4 * N_TILE as usize;

/// An EAGLE-3 head's weights on a device.
pub struct HeadWeights {
    /// The sizes of the layer; the vocabulary is the head's own.
    pub(crate) config: Config,
    /// As the weights of a model of one layer, except that the QKV projections read twice the hidden size, and that
    /// there is one more matrix, which makes one hidden state from three.
    weights: DeviceWeights,
    /// After how many of the model's layers each hidden state is taken.
    pub(crate) taps: [usize; 3],
    /// `[draft_vocab]` the model's token for each token of the head.
    pub(crate) targets: Buffer<u32>,
    /// Parameters that a pass reads.
    pub(crate) pass_parameters: usize,
    /// Vocabulary size of the model.
    vocab: u32,
    inputs: Inputs,
}

/// The weights from which the rows of a head are made.
struct Inputs {
    /// `[hidden]`.
    hidden_norm: Buffer<bf16>,
    /// `[vocab, hidden]`, if the head has an embedding of its own. Otherwise it uses the model's.
    embed: Option<Buffer<bf16>>,
    norm_before_residual: bool,
}

/// The memory in which the rows of a head are made.
pub(super) struct Pairs {
    inputs: Inputs,
    /// `[vocab, hidden]` the embedding, the model's or the head's own.
    table: Global<bf16>,
    vocab: u32,
    /// `[rows, 3 · hidden]` the model's hidden states of the rows.
    gathered: Buffer<bf16>,
    /// `[rows, hidden]` one hidden state made from these three.
    fused: Buffer<f32>,
    /// `[rows, 2 · hidden]` the input of the QKV projections.
    pairs: Buffer<bf16>,
    /// `[sequences, hidden]` the head's own hidden state after each sequence's last row.
    own: Buffer<f32>,
}

impl Pairs {
    /// The input of the QKV projections.
    pub(super) fn rows(&self) -> Global<bf16> {
        self.pairs.ptr()
    }

    /// Where the head's own hidden states of a pass's last rows go.
    pub(super) fn own(&self) -> GlobalMut<f32> {
        self.own.ptr_mut()
    }
}

/// The hidden states from which the rows of a head's pass are made.
#[derive(Clone, Copy)]
pub(crate) enum Begin {
    /// The model's hidden states at the rows' positions.
    OfModel(States),
    /// The head's own hidden state after the last row of each sequence. The pass then has one row for each sequence.
    Own,
}

impl HeadWeights {
    /// The config of a head's layer, as [`Forward`] takes it. The vocabulary is the head's, and the output head stands
    /// in for the embedding.
    pub(crate) fn config_of(head: &EagleHead) -> Config {
        Config { vocab_size: head.draft_vocab_size, tie_word_embeddings: true, ..head.config.clone() }
    }

    /// The device memory that a head takes for sequences of up to `capacity` tokens. `has_prefill` says whether prompts
    /// run in passes of many rows.
    pub(crate) fn footprint(head: &EagleHead, capacity: usize, has_prefill: bool) -> Footprint {
        let (config, hidden) = (Self::config_of(head), head.config.plan.hidden);
        let Footprint { weights, working, .. } = Footprint::of(&config, capacity, false);
        let own = if head.weights().embed.is_some() { head.config.vocab_size * hidden } else { 0 };
        let more = STATES as usize * hidden * hidden + config.plan.attention.qkv_size() * hidden + own;
        let prompt_rows = if has_prefill { prefill::rows(capacity) } else { MAX_ROWS as usize };
        let rows = (MAX_ROWS as usize * hidden * 14) as u64 + Forward::states_bytes(prompt_rows, hidden);
        Footprint { weights: weights + 2 * more as u64, working: working + rows, of_e4m3: 0 }
    }

    /// Bytes beside its weights that a batch takes with these sequences, of up to `context` tokens each, and pages.
    pub(crate) fn batch_bytes(&self, context: usize, sequences: usize, pages: usize) -> u64 {
        let room = Capacity::batch(context, sequences, pages, MAX_ROWS as usize);
        let of_rows = (room.rows * 14 + sequences * 4) * self.config.plan.hidden;
        Footprint::of_room(&self.config, &room, None).working + of_rows as u64
    }

    /// Allocates the memory for the matrices of a head with this config.
    fn stream(config: &Config, device: &Device) -> Result<Stream, Error> {
        let of_layer = config.gemms().map(|gemm| {
            let (n_tiles, k) = n_tiles(&gemm);
            (n_tiles, if gemm.matrix == Matrix::Qkv { 2 * k } else { k })
        });
        let hidden = config.plan.hidden as u32;
        Stream::new(device, of_layer.chain([(hidden.div_ceil(N_TILE), STATES * hidden)]))
    }

    /// Copies a head's weights to a device, to draft for a model of this config. f16 and f32 weights are rounded to
    /// bf16.
    ///
    /// # Errors
    /// A head that was made for another model, or of a shape that the kernels do not [cover](Forward::check); too
    /// little memory, or a driver error.
    pub fn upload(head: &EagleHead, model: &Config, device: &Device) -> Result<Self, Error> {
        let (taps, config) = (head.taps(model)?, Self::config_of(head));
        Forward::check(&config)?;
        let copy = |what, tensors: &[Tensor<'_>], expected: usize| {
            let elements: Vec<bf16> = tensors.iter().flat_map(Tensor::to_bf16).collect();
            check_size(what, (device, device), elements.len(), expected)?;
            device.upload(&elements)
        };
        let (hidden, inner) = (config.plan.hidden, config.plan.activation_size());
        let norm = |what, tensor| copy(what, &[tensor], hidden);
        let w = head.weights();
        let ones = || device.upload(&vec![bf16::ONE; head.config.plan.attention.head_dim]);
        let layer = DeviceLayer {
            input_norm: norm("norm of the embedding", w.input_norm)?,
            qkv_bias: None,
            q_norm: ones()?,
            k_norm: ones()?,
            post_attention_norm: norm("post-attention norm", w.post_attention_norm)?,
        };
        let embed_of_head = copy("output head", &[w.head], config.vocab_size * hidden)?;
        let stream = Self::stream(&config, device)?;
        let matrices: [(&'static str, &[Tensor<'_>], usize); 5] = [
            ("projection of queries, keys and values", &w.qkv, config.plan.attention.qkv_size()),
            ("output projection", &[w.o], hidden),
            ("gate and up projections", &w.gate_up, inner),
            ("down projection", &[w.down], hidden),
            ("projection of three hidden states", &[w.fc], hidden),
        ];
        let packs = Self::packs(device, &stream)?;
        let mut samples = Vec::new();
        let mut sample = |number: usize, weights: &Buffer<bf16>| {
            if !packs || number == FC {
                return Ok::<_, Error>(());
            }
            let StreamMatrix { n_tiles, k, .. } = stream.matrices()[number];
            let mut rows = vec![bf16::ZERO; weights.len().min(SAMPLED * k as usize)];
            weights.read(0, &mut rows)?;
            samples.push(Sample::new(n_tiles, k, &rows));
            Ok(())
        };
        // The layer's four matrices and the one for three hidden states. The output head follows below.
        for (number, (what, tensors, n)) in [0, 1, 2, 3, FC].into_iter().zip(matrices) {
            let is_gated = number == Matrix::GateUp.number(0);
            let rows = if is_gated { 2 * n } else { n };
            let weights = copy(what, tensors, rows * stream.matrices()[number].k as usize)?;
            let up = is_gated.then_some(weights.len() / 2);
            sample(number, &weights)?;
            // SAFETY: the matrices are `[n, k]`, as was checked, one after another; each is freed after its layout.
            unsafe { stream.lay_out(device, number, Source::new(&weights, n, up))? };
        }
        sample(Matrix::Head.number(1), &embed_of_head)?;
        // SAFETY: the same holds for the output head, which is not freed.
        unsafe {
            stream.lay_out(device, Matrix::Head.number(1), Source::new(&embed_of_head, config.vocab_size, None))?
        };
        let packed = if packs { Self::packed(device, &stream, &samples)? } else { None };
        let compact = packed.map_or(Compact::None, Compact::Packed);
        Ok(Self {
            config,
            weights: DeviceWeights {
                embed: embed_of_head,
                layers: vec![layer],
                norm: norm("final norm", w.norm)?,
                stream,
                compact,
                packed_head: None,
            },
            taps,
            targets: device.upload(head.targets())?,
            pass_parameters: head.pass_parameters(),
            vocab: model.vocab_size as u32,
            inputs: Inputs {
                hidden_norm: norm("norm of the hidden state", w.hidden_norm)?,
                embed: w.embed.map(|embed| copy("embedding", &[embed], model.vocab_size * hidden)).transpose()?,
                norm_before_residual: head.norm_before_residual,
            },
        })
    }
}

impl HeadWeights {
    /// Whether to pack the matrices without loss: if that is quicker and there is memory for it, or if packing was
    /// asked for. An option not to pack is for the model only: drafts never show in the output's bits.
    fn packs(device: &Device, stream: &Stream) -> Result<bool, Error> {
        let bytes = 2 * stream.weights().len() as u64;
        let pays = bytes >= device.capabilities().tuning().lossless_from
            && device.free_memory()?.is_some_and(|free| free / 4 > bytes);
        Ok(device.has_full_ring() && (pays || device.options().lossless == Some(true)))
    }

    /// Packs the matrices of a pass, if they can be packed. `samples` are samples of their rows, which tell the size.
    fn packed(device: &Device, stream: &Stream, samples: &[Sample]) -> Result<Option<Packed>, Error> {
        let Some(size) = PackedSize::of_samples(samples) else { return Ok(None) };
        let mut packed = Packed::new(device, samples.iter().map(Sample::size), size)?;
        for (number, &from) in stream.matrices()[..FC].iter().enumerate() {
            packed.pack(device, number, from)?;
        }
        Ok(packed.finish()?.then_some(packed))
    }
}

impl Forward {
    /// Allocates everything for a head that drafts for `model`. `model` must live as long, since the head reads its
    /// embedding unless it has its own. With one sequence, page `i` of the sequence is page `i` of the cache. With
    /// several, the caller fills in the page tables.
    ///
    /// # Errors
    /// As [`with_room`](Self::with_room); [`Error::Weights`] if the head is for another model.
    pub(crate) fn of_head(head: HeadWeights, model: &Self, room: Capacity) -> Result<Self, Error> {
        let HeadWeights { config, weights, vocab, inputs, .. } = head;
        let (device, hidden, rows) = (model.device.clone(), config.plan.hidden, room.rows);
        for (what, found, expected) in [
            ("hidden state of the head's model", hidden, model.config.plan.hidden),
            ("vocabulary of the head's model", vocab as usize, model.config.vocab_size),
        ] {
            if found != expected {
                return Err(Error::Weights { what, found, expected });
            }
        }
        let pairs = Pairs {
            table: inputs.embed.as_ref().unwrap_or(&model.weights.embed).ptr(),
            vocab,
            gathered: device.zeroed(rows * STATES as usize * hidden)?,
            fused: device.zeroed(rows * hidden)?,
            pairs: device.zeroed(rows * 2 * hidden)?,
            own: device.zeroed(room.sequences * hidden)?,
            inputs,
        };
        let mut forward = Self::with_inputs(&device, &config, weights, room, Some(pairs))?;
        if room.sequences == 1 {
            let tables: Vec<u32> = (0..pages(room.context) as u32).collect();
            forward.set_page_tables(&tables)?;
        }
        Ok(forward)
    }

    /// Enqueues a pass of a head. If all logits are wanted and the decode kernel was [prepared](Self::prepare_decode),
    /// the pass is a run of it.
    ///
    /// # Safety
    /// As [`enqueue_rows`](Self::enqueue_rows), and the rows relate to each other as `rows` says. This is a head, and
    /// [its counters](Self::counters) are zero when the pass runs if all logits are wanted. If `begin` is the model's
    /// hidden states, those of the rows' positions are there.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// As [`enqueue`](Self::enqueue).
    pub(crate) unsafe fn enqueue_head_pass(&self, begin: Begin, pass: &Pass, rows: RowsOf) -> Result<(), Error> {
        let &Pass { most_rows, output, .. } = pass;
        self.check_room(most_rows as usize, pass.end as usize);
        output.check(most_rows as usize);
        let pairs = self.pairs.as_ref().expect("a head");
        let (c, dim) = (&self.config, self.config.plan.hidden as u32);
        let is_whole = most_rows <= MAX_DECODE_ROWS && output == RowOutput::LogitsFrom(0);
        let decode = self.decode().filter(|_| is_whole);
        // SAFETY: every address is a buffer of self or of the model, of the size that its kernel's parameter block
        // states; the caller's word for the states.
        unsafe {
            let hidden = match begin {
                Begin::OfModel(states) => self.enqueue_fc(pairs, pass, states)?,
                Begin::Own => pairs.own.ptr(),
            };
            let make = MakePairs {
                rows: pass.rows,
                hidden,
                embed: pairs.table,
                input_norm: self.weights.layers[0].input_norm.ptr(),
                hidden_norm: pairs.inputs.hidden_norm.ptr(),
                pairs: pairs.pairs.ptr_mut(),
                x: self.residual.ptr_mut(),
                exchange: decode.and_then(Decode::exchange).unwrap_or_default(),
                vocab: pairs.vocab,
                dim,
                eps: c.rms_norm_eps,
                norm_before_residual: pairs.inputs.norm_before_residual.into(),
                own: matches!(begin, Begin::Own).into(),
                for_decode: decode.is_some().into(),
            };
            let (grid, shared) = ((1, most_rows), MakePairs::SHARED_BYTES);
            if most_rows <= MAX_DECODE_ROWS {
                self.device.launch_early::<eagle::make_pairs>(grid, shared, make)?;
            } else {
                // The CTAs of a launch that begins early must all be resident together, and these may be too many.
                self.device.launch::<eagle::make_pairs>(grid, shared, make)?;
            }
            if let Some(decode) = decode {
                return self.enqueue_decode_kernel(decode, pass.rows, (most_rows, rows));
            }
            self.enqueue_layers(pass)?;
            let keep = KeepState { rows: pass.rows, x: self.residual.ptr(), to: pairs.own(), dim };
            self.device.launch::<eagle::keep_state>((1, most_rows), 0, keep)
        }
    }

    /// Enqueues the GEMM that makes one hidden state from the model's three. Returns where its result will be.
    ///
    /// # Safety
    /// As [`enqueue_head_pass`](Self::enqueue_head_pass).
    unsafe fn enqueue_fc(&self, pairs: &Pairs, pass: &Pass, from: States) -> Result<Global<f32>, Error> {
        let gather = GatherStates { rows: pass.rows, from, to: pairs.gathered.ptr_mut() };
        let n = self.config.plan.hidden as u32;
        let fc = Linear {
            rows: pass.rows,
            x: pairs.gathered.ptr(),
            weights: self.weights.stream.matrices()[FC],
            norm: Norm::default(),
            y: pairs.fused.ptr_mut(),
            activation: GlobalMut::default(),
            residual: self.residual(),
            next_norm: Global::default(),
            bias: Global::default(),
            n,
            first_row: 0,
        };
        // SAFETY: the caller's word.
        unsafe {
            self.device.launch::<eagle::gather_states>((GatherStates::blocks(n), pass.most_rows), 0, gather)?;
            self.launch_linear(Epilogue::Write { bias: false }, pass.most_rows, fc)?;
        }
        Ok(pairs.fused.ptr())
    }
}
