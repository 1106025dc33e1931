//! The weights laid out for the streaming step, and its launch (see `gpu_kernels::stream`).

use cuda_std::{Global, GlobalMut};
use gpu_kernels::linear::STRIP;
use gpu_kernels::stream::{self, CHUNK_BYTES, Exchange, LayOut, StreamStep, Walk};
use gpu_kernels::weights::Lossless;
use half::bf16;
use model::Config;
use model::plan::{Gemm, Matrix};

use crate::Error;
use crate::cache::KvCache;
use crate::device::{Buffer, Device, TensorMaps};
use crate::lossless::Packed;
use crate::timed::timed;
use crate::weights::DeviceWeights;

/// A second copy of the weights, in the order in which the step consumes them.
pub struct Stream {
    weights: Buffer<bf16>,
    /// The same, packed, where steps read them so.
    packed: Option<Packed>,
    /// Its maps.
    maps: Option<TensorMaps>,
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

/// Strips and input features of the matrix of a product.
pub fn strips(gemm: &Gemm) -> (u32, u32) {
    ((gemm.weight_rows() as u32).div_ceil(STRIP), gemm.k as u32)
}

/// The matrices of a model in the order of the stream: strips and input features of each.
fn matrices(config: &Config) -> impl Iterator<Item = (u32, u32)> + use<> {
    config.gemms().map(|gemm| strips(&gemm))
}

/// Elements of a stream of matrices of so many strips and input features each, for `grid` blocks.
pub fn elements(matrices: impl IntoIterator<Item = (u32, u32)>, grid: u32) -> usize {
    let mut walk = Walk::new(grid);
    for (strips, k) in matrices {
        let mut left = strips;
        while left > 0 {
            left -= walk.pass(left, k).strips;
        }
    }
    walk.chunks as usize * CHUNK_BYTES as usize / 2
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
    /// Strips that it takes.
    pub const fn strips(&self) -> u32 {
        (if self.up.is_null() { self.n } else { 2 * self.n }).div_ceil(STRIP)
    }

    /// Enqueues that it is laid out in `stream`, where `walk` stands. Returns the chunk at which it begins.
    ///
    /// # Safety
    /// The matrices are what is said, and the stream has room for every pass of the walk.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn lay_out(&self, device: &Device, stream: GlobalMut<bf16>, walk: &mut Walk) -> Result<u64, Error> {
        let (base, strips) = (walk.chunks, self.strips());
        let Self { weight, up, n, k } = *self;
        let mut first_strip = 0;
        while first_strip < strips {
            let pass = walk.pass(strips - first_strip, k);
            let params = LayOut { weight, up, stream, base: pass.base, n, k, first_strip, strips: pass.strips };
            // SAFETY: the caller's word.
            unsafe { device.launch::<stream::lay_out>((pass.strips, pass.depth), 0, params)? };
            first_strip += pass.strips;
        }
        Ok(base)
    }
}

impl Stream {
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
        let grid = device.multiprocessors();
        let elements = elements(matrices(config), grid);
        if !device.has_decode_kernel() || device.free_memory()?.is_some_and(|free| 2 * elements as u64 + SPARE > free) {
            return Ok(None);
        }
        let stream: Buffer<bf16> = device.zeroed(elements)?;
        let (mut walk, mut bases) = (Walk::new(grid), Vec::new());
        for (i, gemm) in config.gemms().enumerate() {
            let source = weights.source(i / Matrix::OF_LAYER.len(), &gemm);
            // SAFETY: the matrix is `[n, k]`, and the stream has room for every pass of the walk.
            bases.push(unsafe { source.lay_out(device, stream.ptr_mut(), &mut walk)? });
        }
        // As long as it leaves most of the memory to the cache.
        let bytes = 2 * elements as u64;
        let fits = || Ok::<_, Error>(device.free_memory()?.is_some_and(|free| free / 4 > bytes));
        let pays = || Ok::<_, Error>(bytes >= device.capabilities().tuning().lossless_from && fits()?);
        let packed = if device.options().lossless.map_or_else(pays, Ok)? {
            let bounds: Vec<_> = bases.iter().copied().chain([walk.chunks]).collect();
            timed("packing the weights", || Packed::new(device, &stream, &bounds))?
        } else {
            None
        };
        let maps = packed.as_ref().map(|packed| device.array_maps(&packed.arrays())).transpose()?;
        let norms = weights.layers.iter().flat_map(|layer| {
            // As `StreamStep::norms` has them.
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
            packed,
            maps,
            norms,
            biases,
            pages: device.upload(&pages)?,
            counters: device.zeroed(StreamStep::COUNTERS)?,
            exchange: Exchange::new(words.ptr_mut(), sizes).0,
            words,
            bases,
            grid,
        }))
    }

    /// Bytes that it takes on a device with `grid` multiprocessors.
    pub fn bytes(config: &Config, grid: u32) -> u64 {
        2 * elements(matrices(config), grid) as u64
    }

    /// The weights, and how many blocks they were laid out for.
    pub fn weights(&self) -> (Global<bf16>, u32) {
        (self.weights.ptr(), self.grid)
    }

    /// Bytes of the weights packed, if they are.
    pub fn packed_bytes(&self) -> Option<u64> {
        self.packed.as_ref().map(Packed::bytes)
    }

    /// Where the packed weights are, if they are packed.
    pub fn lossless(&self) -> Option<Lossless> {
        self.packed.as_ref().map(Packed::parts)
    }

    /// What the sums of a matrix are multiplied with, by the kernels that read packed weights.
    pub fn scale(&self, layer: usize, matrix: Matrix) -> f32 {
        self.packed.as_ref().map_or(1.0, |packed| packed.scale(matrix.number(layer)))
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

    /// Leaves as many stamps of [words](gpu_kernels::stream::Exchange) as one step takes: the second step of one row from now on begins with the first ones
    /// again, where otherwise ten million would come before it. For tests.
    ///
    /// # Errors
    /// A driver error.
    pub fn use_up_stamps(&mut self, config: &Config) -> Result<(), Error> {
        self.words.write(0, &[u64::from(u32::MAX - StreamStep::stamps(config.num_hidden_layers as u32))])
    }

    /// The rank of the best token after each row, once a step is done.
    pub fn best(&self) -> Global<u64> {
        // SAFETY: within the counters.
        unsafe { self.counters.ptr().at(StreamStep::BEST).cast() }
    }

    /// Enqueues a step of at most `most_rows` rows; `step` holds all but what is the stream's own.
    ///
    /// # Safety
    /// The addresses in `step` are as its documentation says, and its counters are zero by then.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue(&self, device: &Device, most_rows: u32, step: StreamStep) -> Result<(), Error> {
        let step = StreamStep {
            stream: self.weights.ptr(),
            lossless: self.lossless().unwrap_or_default(),
            maps: self.maps.as_ref().map_or(Global::default(), |maps| maps.ptr(0)),
            norms: self.norms.ptr(),
            biases: self.biases.as_ref().map_or(Global::default(), Buffer::ptr),
            pages: self.pages.ptr(),
            counters: self.counters.ptr_mut(),
            exchange: self.exchange,
            ..step
        };
        // SAFETY: the caller's word.
        unsafe {
            let (grid, shared) = (self.grid, stream::SHARED_BYTES);
            match (&self.packed, most_rows <= 8) {
                (None, true) => device.launch_cooperative::<stream::stream_8>(grid, shared, step),
                (None, false) => device.launch_cooperative::<stream::stream_16>(grid, shared, step),
                (Some(_), true) => device.launch_cooperative::<stream::stream_8_lossless>(grid, shared, step),
                (Some(_), false) => device.launch_cooperative::<stream::stream_16_lossless>(grid, shared, step),
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
