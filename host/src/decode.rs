//! The weights laid out for the decode kernel, and its launch (see `gpu_kernels::decode`).

use cuda_std::{Global, GlobalMut};
use gpu_kernels::decode::{self, CHUNK_BYTES, DecodeStep, Exchange, LayOut, Walk};
use gpu_kernels::linear::N_TILE;
use gpu_kernels::weights::Lossless;
use half::bf16;
use model::Config;
use model::format::Code;
use model::plan::{Gemm, Matrix};

use crate::Error;
use crate::cache::KvCache;
use crate::device::{Buffer, Device, TensorMaps};
use crate::lossless::Packed;
use crate::quantized::{self, Quantized};
use crate::timed::timed;
use crate::weights::DeviceWeights;

/// A second copy of the weights, in the order in which the step consumes them.
pub struct Decode {
    weights: Buffer<bf16>,
    /// The same in fewer bytes, where steps read them so.
    compact: Compact,
    norms: Buffer<bf16>,
    /// None where there are none.
    biases: Option<Buffer<bf16>>,
    pages: Buffer<u64>,
    counters: Buffer<u32>,
    /// The words of the exchange.
    words: Buffer<u64>,
    exchange: Exchange,
    /// Where each matrix begins, in chunks.
    bases: Vec<u64>,
    grid: u32,
}

/// Weights in fewer bytes.
enum Compact {
    /// There are none.
    None,
    /// Packed without loss, with their maps.
    Lossless(Packed, TensorMaps),
    /// The codes of the layers' matrices.
    Quantized(Quantized),
}

/// N-tiles and input features of the matrix of a GEMM.
pub fn n_tiles(gemm: &Gemm) -> (u32, u32) {
    ((gemm.weight_rows() as u32).div_ceil(N_TILE), gemm.k as u32)
}

/// The matrices of a model in the order of the stream: N-tiles and input features of each.
fn matrices(config: &Config) -> impl Iterator<Item = (u32, u32)> + use<> {
    config.gemms().map(|gemm| n_tiles(&gemm))
}

/// Elements of a stream of matrices of so many N-tiles and input features each, for `grid` blocks.
pub fn elements(matrices: impl IntoIterator<Item = (u32, u32)>, grid: u32) -> usize {
    chunks(matrices, grid) as usize * CHUNK_BYTES as usize / 2
}

/// Its chunks.
pub fn chunks(matrices: impl IntoIterator<Item = (u32, u32)>, grid: u32) -> u64 {
    let mut walk = Walk::new(grid);
    for (n_tiles, k) in matrices {
        let mut left = n_tiles;
        while left > 0 {
            left -= walk.wave(left, k).n_tiles;
        }
    }
    walk.chunks
}

/// A matrix as a checkpoint has it.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// `[n, k]`; the gate's, where there is an up projection.
    pub weight: Global<bf16>,
    /// `[n, k]` the up projection's; null otherwise.
    pub up: Global<bf16>,
    /// Output features, of each.
    pub n: u32,
    /// Input features.
    pub k: u32,
}

impl Source {
    /// N-tiles that it takes.
    pub const fn n_tiles(&self) -> u32 {
        (if self.up.is_null() { self.n } else { 2 * self.n }).div_ceil(N_TILE)
    }

    /// Enqueues that it is laid out in `stream`, where `walk` stands. Returns the chunk at which it begins.
    ///
    /// # Safety
    /// The matrices are what is said, and the stream has room for every wave of the walk.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn lay_out(&self, device: &Device, stream: GlobalMut<bf16>, walk: &mut Walk) -> Result<u64, Error> {
        let (base, n_tiles) = (walk.chunks, self.n_tiles());
        let Self { weight, up, n, k } = *self;
        let mut first_n_tile = 0;
        while first_n_tile < n_tiles {
            let wave = walk.wave(n_tiles - first_n_tile, k);
            let params = LayOut { weight, up, stream, base: wave.base, n, k, first_n_tile, n_tiles: wave.n_tiles };
            // SAFETY: the caller's word.
            unsafe { device.launch::<decode::lay_out>((wave.n_tiles, wave.depth), 0, params)? };
            first_n_tile += wave.n_tiles;
        }
        Ok(base)
    }
}

impl Decode {
    /// Lays out `weights` once more, if the device has the hardware and the memory for it.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn new(
        device: &Device,
        config: &Config,
        weights: &DeviceWeights,
        cache: &KvCache,
    ) -> Result<Option<Self>, Error> {
        let grid = device.sms();
        let elements = elements(matrices(config), grid);
        if !device.has_decode_kernel() || device.free_memory()?.is_some_and(|free| 2 * elements as u64 + SPARE > free) {
            return Ok(None);
        }
        let stream: Buffer<bf16> = device.zeroed(elements)?;
        let (mut walk, mut bases) = (Walk::new(grid), Vec::new());
        for (i, gemm) in config.gemms().enumerate() {
            let source = weights.source(i / Matrix::OF_LAYER.len(), &gemm);
            // SAFETY: the matrix is `[n, k]`, and the stream has room for every wave of the walk.
            bases.push(unsafe { source.lay_out(device, stream.ptr_mut(), &mut walk)? });
        }
        let bounds: Vec<_> = bases.iter().copied().chain([walk.chunks]).collect();
        let compact = Self::compact(device, config, weights, &stream, &bounds)?;
        let norms = weights.layers.iter().flat_map(|layer| {
            // As `DecodeStep::norms` has them.
            [&layer.input_norm, &layer.post_attention_norm, &layer.q_norm, &layer.k_norm]
        });
        let norms = concatenated(device, norms.chain([&weights.norm]))?;
        let biases: Vec<_> = weights.layers.iter().filter_map(|layer| layer.qkv_bias.as_ref()).collect();
        let biases = if biases.is_empty() { None } else { Some(concatenated(device, biases)?) };
        let sizes =
            [config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads];
        let sizes = sizes.map(|size| size as u32);
        let words = device.zeroed(Exchange::new(GlobalMut::default(), sizes).1)?;
        let pages: Vec<u64> = (0..cache.layers()).map(|layer| cache.layer(layer).addr()).collect();
        Ok(Some(Self {
            weights: stream,
            compact,
            norms,
            biases,
            pages: device.upload(&pages)?,
            counters: device.zeroed(DecodeStep::COUNTERS)?,
            exchange: Exchange::new(words.ptr_mut(), sizes).0,
            words,
            bases,
            grid,
        }))
    }

    /// What the `stream` becomes in fewer bytes, whose matrices begin at these `bounds`: codes, if its weights are
    /// quantised, or packed without loss where that pays; as long as it leaves most of the memory to the cache.
    fn compact(
        device: &Device,
        config: &Config,
        weights: &DeviceWeights,
        stream: &Buffer<bf16>,
        bounds: &[u64],
    ) -> Result<Compact, Error> {
        let wanted = device.options().lossless;
        let fits = |bytes: u64| Ok::<_, Error>(device.free_memory()?.is_none_or(|free| free / 4 > bytes));
        if wanted == Some(false) {
            return Ok(Compact::None);
        }
        if let Some(scales) = &weights.scales
            && fits(quantized::bytes(config, scales.code, device.sms()))?
            && let Some(codes) = timed("finding the codes", || Quantized::new(device, config, stream, scales))?
        {
            return Ok(Compact::Quantized(codes));
        }
        let bytes = 2 * stream.len() as u64;
        // The emulator has no memory of its own that would be saved.
        let pays = bytes >= device.capabilities().tuning().lossless_from && device.free_memory()?.is_some();
        if wanted == Some(true) || pays && fits(bytes)? {
            let packed = timed("packing the weights", || Packed::new(device, stream, bounds))?;
            let with_maps = |packed: Packed| {
                let maps = device.array_maps(&packed.arrays())?;
                Ok(Compact::Lossless(packed, maps))
            };
            return packed.map_or(Ok(Compact::None), with_maps);
        }
        Ok(Compact::None)
    }

    /// Bytes that it takes on a device with `grid` SMs.
    pub fn bytes(config: &Config, grid: u32) -> u64 {
        2 * elements(matrices(config), grid) as u64
    }

    /// The weights, and how many blocks they were laid out for.
    pub fn weights(&self) -> (Global<bf16>, u32) {
        (self.weights.ptr(), self.grid)
    }

    /// Bytes of the weights in fewer bytes, if there are such.
    pub fn compact_bytes(&self) -> Option<u64> {
        match &self.compact {
            Compact::None => None,
            Compact::Lossless(packed, _) => Some(packed.bytes()),
            Compact::Quantized(codes) => Some(codes.bytes()),
        }
    }

    /// What the weights packed without loss are, if they are packed.
    fn packed(&self) -> Option<&Packed> {
        match &self.compact {
            Compact::Lossless(packed, _) => Some(packed),
            Compact::None | Compact::Quantized(_) => None,
        }
    }

    /// Where the packed weights are, if they are packed.
    pub fn lossless(&self) -> Option<Lossless> {
        self.packed().map(Packed::parts)
    }

    /// What the sums of a matrix are multiplied with, by the kernels that read packed weights.
    pub fn scale(&self, layer: usize, matrix: Matrix) -> f32 {
        self.packed().map_or(1.0, |packed| packed.scale(matrix.number(layer)))
    }

    /// The chunk at which a matrix of a layer begins; [`Matrix::number`] says what the layer of the head is.
    ///
    /// # Panics
    /// If there is no such matrix: a bug of the caller.
    pub fn base(&self, layer: usize, matrix: Matrix) -> u64 {
        self.bases[matrix.number(layer)]
    }

    /// Counters that must be zero when a step begins.
    pub fn counters(&self) -> &Buffer<u32> {
        &self.counters
    }

    /// Zeroes the counters, after everything enqueued so far: for steps that no kernel plans.
    ///
    /// # Errors
    /// A driver error.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.counters.clear()
    }

    /// Leaves as many sequence flags of [words](gpu_kernels::decode::Exchange) as one step takes: the second step of
    /// one row from now on begins with the first ones again, where otherwise ten million would come before it. For
    /// tests.
    ///
    /// # Errors
    /// A driver error.
    pub fn use_up_flags(&mut self, config: &Config) -> Result<(), Error> {
        self.words.write(0, &[u64::from(u32::MAX - DecodeStep::flags(config.num_hidden_layers as u32))])
    }

    /// The rank of the best token after each row, once a step is done.
    pub fn best(&self) -> Global<u64> {
        // SAFETY: within the counters.
        unsafe { self.counters.ptr().at(DecodeStep::BEST).cast() }
    }

    /// Enqueues a step of at most `most_rows` rows; `step` holds all but what is the stream's own.
    ///
    /// # Safety
    /// The addresses in `step` are as its documentation says, and its counters are zero by then.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue(&self, device: &Device, most_rows: u32, step: DecodeStep) -> Result<(), Error> {
        let step = match &self.compact {
            Compact::None => step,
            Compact::Lossless(packed, maps) => DecodeStep { lossless: packed.parts(), maps: maps.ptr(0), ..step },
            Compact::Quantized(codes) => DecodeStep { codes: codes.codes(), ..step },
        };
        let step = DecodeStep {
            stream: self.weights.ptr(),
            norms: self.norms.ptr(),
            biases: self.biases.as_ref().map_or(Global::default(), Buffer::ptr),
            pages: self.pages.ptr(),
            counters: self.counters.ptr_mut(),
            exchange: self.exchange,
            ..step
        };
        // SAFETY: the caller's word.
        unsafe {
            let (grid, shared) = (self.grid, decode::SHARED_BYTES);
            let few = most_rows <= 8;
            macro_rules! launch {
                ($of_8:ident $of_16:ident) => {
                    if few {
                        device.launch_cooperative::<decode::$of_8>(grid, shared, step)
                    } else {
                        device.launch_cooperative::<decode::$of_16>(grid, shared, step)
                    }
                };
            }
            match &self.compact {
                Compact::None => launch!(decode_8 decode_16),
                Compact::Lossless(..) => launch!(decode_8_lossless decode_16_lossless),
                Compact::Quantized(codes) => match codes.code() {
                    (Code::E4m3, _) => launch!(decode_8_fp8 decode_16_fp8),
                    (Code::Int4, false) => launch!(decode_8_int4 decode_16_int4),
                    (Code::Int4, true) => launch!(decode_8_int4_f16 decode_16_int4_f16),
                },
            }
        }
    }
}

/// What these hold, one after another, in memory of its own.
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

/// Memory left for others when the stream is laid out.
const SPARE: u64 = 1 << 30;
