//! Codes of quantised weights on a device (see `gpu_kernels::weights::quantized`).
//!
//! While a checkpoint is copied to the device, every weight is decoded to bf16, and [`Collector`] keeps the scales.
//! From both, the device finds a matrix's codes again, and checks that they decode to exactly the same weights. Unless
//! there is much memory, only the codes are kept. A layer's bf16 weights are then made again before kernels that read
//! bf16 run.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use cuda_std::Global;
use cuda_std::tensor::Array;
use gpu_kernels::linear::N_TILE;
use gpu_kernels::stream::{CHUNK_FEATURES, GROUP_N_TILES, StreamMatrix};
use gpu_kernels::weights::quantized::{CodeKernels, Dequantize, GROUP, GROUPS, Quantize, Scale};
use model::checkpoint::MatrixOutline;
use model::format::{Code, Codes};
use model::plan::{Gemm, Matrix};
use model::{Config, Weight, Weights};

use crate::Error;
use crate::device::{Buffer, Device};
use crate::e4m3::{BLOCK, E4m3};
use crate::stream::{Stream, bases, chunks, n_tiles};
use crate::weights::check_bases;

/// The kind of codes that a model's layers have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coding {
    /// The code of a weight.
    pub code: Code,
    /// Int4 only: whether a scale is stored as a sum of two bf16. Scales in f16 need that, and so do scales whose
    /// products with their zeros are no bf16.
    pub is_fine: bool,
    /// E4m3 only: whether each block of 128 × 128 weights has one scale. GEMMs then multiply the codes themselves.
    pub in_blocks: bool,
}

/// An expression in which `$code` is the type that kernels have for the codes.
macro_rules! by_code {
    ($coding:expr, $code:ident => $what:expr) => {{
        use gpu_kernels::weights::quantized;
        match $coding {
            $crate::quantized::Coding { code: model::format::Code::E4m3, .. } => {
                type $code = quantized::Fp8;
                $what
            }
            $crate::quantized::Coding { code: model::format::Code::Int4, is_fine: false, .. } => {
                type $code = quantized::Int4<1>;
                $what
            }
            $crate::quantized::Coding { code: model::format::Code::Int4, is_fine: true, .. } => {
                type $code = quantized::Int4<2>;
                $what
            }
        }
    }};
}
pub(crate) use by_code;

impl Coding {
    /// The coding of a checkpoint's layers. None if some matrix has no codes or another code than the first, or if a
    /// group of inputs is smaller than the kernels read.
    pub fn of(weights: &Weights<Weight<'_>>) -> Option<Self> {
        let mut all: Option<Self> = None;
        for weight in weights.layers.iter().flat_map(|layer| Matrix::OF_LAYER.map(|kind| layer.parts(kind))).flatten() {
            let matrix = weight.quantized()?;
            let (shape, code) = (matrix.shape(), matrix.code());
            let (inputs, block) = (shape[1], matrix.block());
            let group = block[1].min(inputs);
            let fits = group.is_multiple_of(GROUP as usize) || group == inputs;
            let all = all.get_or_insert(Self { code, is_fine: false, in_blocks: true });
            if all.code != code || !fits {
                return None;
            }
            all.in_blocks &= Self::is_block(code, block) && shape.iter().all(|size| size.is_multiple_of(BLOCK));
            all.is_fine |= code == Code::Int4 && !matrix.has_bf16_zeros();
        }
        all
    }

    /// As [`of`](Self::of), by what a checkpoint's headers tell of its matrices. They do not tell whether scales are
    /// fine: [`is_fine`](Self::is_fine) is false.
    pub fn of_outline(matrices: &[MatrixOutline]) -> Option<Self> {
        let of_layers = matrices.iter().filter(|of| ["qkv", "output", "gate_up", "down"].contains(&of.kind));
        let codes = of_layers.map(|of| of.codes.filter(|(_, [_, inputs])| inputs.is_multiple_of(GROUP as usize)));
        let codes: Vec<_> = codes.collect::<Option<_>>()?;
        let &(code, _) = codes.first()?;
        let in_blocks = codes.iter().all(|&(code, block)| Self::is_block(code, block));
        codes.iter().all(|(other, _)| *other == code).then_some(Self { code, is_fine: false, in_blocks })
    }

    /// What `--weights fp8` and `--weights int4` make: e4m3 in blocks, and int4 with scales in bf16.
    pub fn rounded(code: Code) -> Self {
        Self { code, is_fine: false, in_blocks: code == Code::E4m3 }
    }

    /// Whether a device keeps such codes. E4m3 in blocks only needs the GEMMs of e4m3, whatever runs a decode step.
    /// Other codes are read by the decode kernel.
    pub fn is_for(self, device: &Device) -> bool {
        if self.in_blocks { device.capabilities().has_gemms() } else { device.has_decode_kernel() }
    }

    /// Whether GEMMs of e4m3 multiply codes whose scales are of such blocks.
    fn is_block(code: Code, block: [usize; 2]) -> bool {
        code == Code::E4m3 && block == [BLOCK; 2]
    }

    /// A scale and a zero as the word that kernels read. None if they do not fit one.
    fn word(self, scale: f32, zero: u8) -> Option<u32> {
        by_code!(self, C => Scale::new::<C>(scale, zero)).map(|Scale(word)| word)
    }

    /// Bytes of the codes and scales of so many chunks.
    const fn bytes(self, chunks: u64) -> u64 {
        chunks * by_code!(self, C => <C as quantized::Code>::BYTES) as u64
    }

    /// Bytes of the codes of a model's layers, with scales, laid out for `blocks` CTAs.
    pub fn bytes_of(self, config: &Config, blocks: u32) -> u64 {
        if self.in_blocks {
            return E4m3::bytes_of(config, blocks);
        }
        self.bytes(chunks(layers(config).map(|gemm| n_tiles(&gemm)), blocks))
    }
}

/// The codes of a model's layers, on a device.
pub struct Quantized {
    coding: Coding,
    codes: Buffer<u8>,
    /// The chunk at which each matrix begins; and the last one's end.
    bases: Vec<u64>,
    /// `[1]`: above 0 if some weight is not exactly what its code and its scale decode to.
    strange: Buffer<u32>,
    /// The scales of the matrix whose codes are being found.
    scales: Mutex<Buffer<u32>>,
}

impl Quantized {
    /// Allocates memory for the codes of a model's layers.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, config: &Config, coding: Coding) -> Result<Self, Error> {
        let bases = bases(layers(config).map(|gemm| n_tiles(&gemm)), device.sms());
        let largest = layers(config).map(|gemm| words([gemm.weight_rows(), gemm.k])).max().unwrap_or(0);
        Ok(Self {
            coding,
            codes: device.zeroed(coding.bytes(bases[bases.len() - 1]) as usize)?,
            bases,
            strange: device.zeroed(1)?,
            scales: Mutex::new(device.zeroed(largest)?),
        })
    }

    /// Enqueues the search for the codes of matrix `number`, from its bf16 weights `from`, which are laid out by then,
    /// and from its scales: `[n_tiles, chunks · 4, 16]` words as [`Scale`].
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If there is no such matrix, or there are not so many scales: a bug of the caller.
    pub(crate) fn find(&self, device: &Device, number: usize, from: StreamMatrix, scales: &[u32]) -> Result<(), Error> {
        let chunks = from.k.div_ceil(CHUNK_FEATURES);
        assert_eq!(scales.len(), (from.n_tiles * chunks * GROUPS * N_TILE) as usize, "scales of matrix {number}");
        // Locked until the launch is enqueued, so that the next matrix's scales are written behind it.
        let mut words = self.scales.lock().unwrap_or_else(PoisonError::into_inner);
        words.write(0, scales)?;
        let (scales, codes, strange) = (words.ptr(), self.codes.ptr_mut(), self.strange.ptr_mut());
        let quantize = Quantize { from, scales, codes, strange, base: self.bases[number] };
        let grid = (from.n_tiles, chunks);
        // SAFETY: the stream holds the matrix, there are scales for it, and the codes have room for its chunks.
        unsafe { by_code!(self.coding, C => device.launch::<<C as CodeKernels>::Quantize>(grid, 0, quantize)) }
    }

    /// Whether all codes that were found decode to exactly the weights that they are from. Waits for the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn is_exact(&self) -> Result<bool, Error> {
        let mut found = [0];
        self.strange.read(0, &mut found)?;
        Ok(found == [0])
    }

    /// Enqueues the decoding of a layer's codes to bf16 weights in `stream`.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no such layer, or it has no room in the stream: a bug of the caller.
    pub(crate) fn make_layer(&self, device: &Device, layer: usize, stream: &Stream) -> Result<(), Error> {
        let first = Matrix::OF_LAYER[0].number(layer);
        let chunks = self.bases[first + Matrix::OF_LAYER.len()] - self.bases[first];
        assert!(chunks <= stream.layer_chunks(), "a layer of {chunks} chunks");
        let at = self.coding.bytes(self.bases[first]) as usize;
        // SAFETY: the layer begins there.
        let codes = unsafe { self.codes.ptr().at(at) };
        let dequantize = Dequantize { codes, stream: stream.weights().ptr_mut() };
        let grid = (GROUPS, (chunks / u64::from(GROUP_N_TILES)) as u32);
        // SAFETY: there are codes of so many chunks, and room for what they mean.
        unsafe {
            by_code!(self.coding, C => device.launch_whole::<<C as CodeKernels>::Dequantize>(grid, 0, dequantize))
        }
    }

    /// The kind of the codes.
    pub fn coding(&self) -> Coding {
        self.coding
    }

    /// Where the codes are, with their scales.
    pub fn codes(&self) -> Global<u8> {
        self.codes.ptr()
    }

    /// The chunk at which a layer's matrix begins.
    pub fn base(&self, layer: usize, matrix: Matrix) -> u64 {
        self.bases[matrix.number(layer)]
    }

    /// The factor for sums that kernels make with decoded weights.
    pub fn unit(&self) -> f32 {
        by_code!(self.coding, C => <C as quantized::Code>::UNIT)
    }

    /// The array by which the step of many sequences reads the codes, with TMA.
    pub fn stages(&self) -> Array {
        let (address, chunks) = (self.codes.ptr().addr(), self.bases[self.bases.len() - 1]);
        by_code!(self.coding, C => quantized::stages::<C>(address, chunks))
    }

    /// Checks that the codes are on `device`, laid out for it, and of the layers of a model of this config.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub(crate) fn check(&self, device: &Device, config: &Config) -> Result<(), Error> {
        let expected = bases(layers(config).map(|gemm| n_tiles(&gemm)), device.sms());
        check_bases("chunks of codes", (self.codes.device(), device), &self.bases, &expected)
    }

    /// Bytes of the codes, with their scales.
    pub fn bytes(&self) -> u64 {
        self.codes.len() as u64
    }
}

/// The GEMMs of a model's layers.
fn layers(config: &Config) -> impl Iterator<Item = Gemm> {
    config.gemms().filter(|gemm| gemm.matrix != Matrix::Head)
}

/// Words of the scales of a matrix of so many weight rows and inputs.
fn words([rows, k]: [usize; 2]) -> usize {
    let of_n_tile = k.div_ceil(CHUNK_FEATURES as usize) * (CHUNK_FEATURES / GROUP * N_TILE) as usize;
    rows.div_ceil(N_TILE as usize) * of_n_tile
}

/// The scales of a matrix of `shape` (weight rows and inputs) all of whose weights have this `scale` and this `zero`.
///
/// # Panics
/// If the kernels have no such scale: a bug of the caller.
pub fn uniform_scales(coding: Coding, shape: [usize; 2], scale: f32, zero: u8) -> Vec<u32> {
    vec![coding.word(scale, zero).expect("a scale of few bits"); words(shape)]
}

/// Gathers the scales of a checkpoint while it is read.
pub struct Collector {
    coding: Coding,
    matrices: Vec<Vec<AtomicU32>>,
    /// The place of each weight, by the weight's address on the host.
    places: HashMap<usize, RowPlacement>,
    unfit: AtomicBool,
}

/// Where in a matrix the rows of a weight are.
#[derive(Clone, Copy)]
pub(crate) struct RowPlacement {
    pub matrix: usize,
    /// The matrix's row that is the weight's first, where weights lie one after another.
    pub first: usize,
    /// For gate (0) and up (1), which of the two it is. Their rows alternate: an N-tile has eight of each.
    pub half: Option<usize>,
    pub inputs: usize,
}

/// The places of the layers' weights, by the weights' addresses; and each matrix's weight rows and inputs.
pub(crate) fn places(weights: &Weights<Weight<'_>>) -> (HashMap<usize, RowPlacement>, Vec<[usize; 2]>) {
    let (mut places, mut shapes) = (HashMap::new(), Vec::new());
    for (layer, kind) in weights.layers.iter().flat_map(|layer| Matrix::OF_LAYER.map(|kind| (layer, kind))) {
        let [mut first, mut inputs] = [0; 2];
        for (part, weight) in layer.parts(kind).into_iter().enumerate() {
            inputs = weight.shape()[1];
            let half = (kind == Matrix::GateUp).then_some(part);
            let place = RowPlacement { matrix: shapes.len(), first, half, inputs };
            places.insert(std::ptr::from_ref(weight).addr(), place);
            first += weight.shape()[0];
        }
        shapes.push([first, inputs]);
    }
    (places, shapes)
}

impl RowPlacement {
    /// The matrix's row that is row `i` of the weight.
    fn row(&self, i: usize) -> usize {
        let eight = N_TILE as usize / 2;
        self.half.map_or(self.first + i, |half| i / eight * N_TILE as usize + half * eight + i % eight)
    }
}

impl Collector {
    /// For a checkpoint's weights, whose codes are of this kind.
    pub fn new(weights: &Weights<Weight<'_>>, coding: Coding) -> Self {
        let (places, shapes) = places(weights);
        let matrices = shapes.into_iter().map(|shape| (0..words(shape)).map(|_| AtomicU32::new(0)).collect()).collect();
        Self { coding, matrices, places, unfit: AtomicBool::new(false) }
    }

    /// Takes the scales of some rows of a weight. Weights that are not the layers' are ignored.
    pub fn take(&self, weight: &Weight<'_>, rows: Range<usize>, codes: &Codes) {
        let Some(place) = self.places.get(&std::ptr::from_ref(weight).addr()) else { return };
        if codes.group_of.is_some() {
            self.unfit.store(true, Ordering::Relaxed);
            return;
        }
        let shared = weight.quantized().map_or(place.inputs, |matrix| matrix.group().min(place.inputs));
        let (all, groups) = (place.inputs.div_ceil(GROUP as usize), place.inputs.div_ceil(shared));
        let of_n_tile = words([N_TILE as usize, place.inputs]);
        for (i, row) in rows.enumerate() {
            let row = place.row(row);
            let to = &self.matrices[place.matrix][row / N_TILE as usize * of_n_tile + row % N_TILE as usize..];
            for group in 0..all {
                let from = i * groups + group * GROUP as usize / shared;
                let zero = codes.zeros.get(from).copied().unwrap_or(0);
                match self.coding.word(codes.scales[from], zero) {
                    Some(word) => to[group * N_TILE as usize].store(word, Ordering::Relaxed),
                    None => self.unfit.store(true, Ordering::Relaxed),
                }
            }
        }
    }

    /// Whether the kernels cannot read the codes: they cannot represent some scale, or groups are not runs of inputs.
    pub fn is_unfit(&self) -> bool {
        self.unfit.load(Ordering::Relaxed)
    }

    /// The scales of a matrix, once all of its rows were read.
    pub fn scales(&self, number: usize) -> Vec<u32> {
        self.matrices[number].iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }
}
