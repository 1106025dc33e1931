//! Codes of quantised weights for the decode kernel (see `gpu_kernels::weights::quantized`).
//!
//! On the way of a checkpoint to the device every weight becomes the bf16 that it means, and [`Collector`] keeps the
//! scales. From both the device finds the codes again, and checks that they make the very weights.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use cuda_std::Global;
use gpu_kernels::linear::N_TILE;
use gpu_kernels::stream::{CHUNK_FEATURES, Walk};
use gpu_kernels::weights::quantized::{self, Code as _, GROUP, Quantize, Scale};
use half::bf16;
use model::format::{Code, Codes};
use model::plan::Matrix;
use model::{Config, Weight, Weights};

use crate::Error;
use crate::device::{Buffer, Device};
use crate::stream::{chunks, n_tiles};

/// The scales of all layers' matrices.
pub struct Scales {
    pub code: Code,
    /// Whether they have two parts: those of int4 in f16.
    pub fine: bool,
    /// Of each layer's matrices in the order of the plan: `[n_tiles, chunks · 4, 16]` words as [`Scale`].
    pub matrices: Vec<Vec<u32>>,
}

/// The codes of a model, on a device.
pub struct Quantized {
    code: Code,
    fine: bool,
    codes: Buffer<u8>,
}

impl Quantized {
    /// Finds the codes of the layers' matrices, which lie in `stream` one after another. None if some weight is none
    /// that its scale makes.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(
        device: &Device,
        config: &Config,
        stream: &Buffer<bf16>,
        scales: &Scales,
    ) -> Result<Option<Self>, Error> {
        let codes = device.zeroed(bytes(config, scales.code, device.sms()) as usize)?;
        let strange: Buffer<u32> = device.zeroed(1)?;
        let largest = scales.matrices.iter().map(Vec::len).max().unwrap_or(0);
        let mut words: Buffer<u32> = device.zeroed(largest)?;
        let mut walk = Walk::new(device.sms());
        for (gemm, matrix) in config.gemms().zip(&scales.matrices) {
            words.write(0, matrix)?;
            let (mut first, k) = (0, gemm.k as u32);
            let (all, _) = n_tiles(&gemm);
            while first < all {
                let wave = walk.wave(all - first, k);
                let of_n_tile = (wave.depth * CHUNK_FEATURES / GROUP * N_TILE) as usize;
                let quantize = Quantize {
                    stream: stream.ptr(),
                    // SAFETY: the matrix has so many N-tiles.
                    scales: unsafe { words.ptr().at(first as usize * of_n_tile) },
                    codes: codes.ptr_mut(),
                    strange: strange.ptr_mut(),
                    base: wave.base,
                    n_tiles: wave.n_tiles,
                    depth: wave.depth,
                };
                let grid = (wave.n_tiles, wave.depth);
                // SAFETY: the stream holds the wave, there are scales for it, and the codes have room for its chunks.
                unsafe {
                    match (scales.code, scales.fine) {
                        (Code::E4m3, _) => device.launch::<quantized::quantize_fp8>(grid, 0, quantize)?,
                        (Code::Int4, false) => device.launch::<quantized::quantize_int4>(grid, 0, quantize)?,
                        (Code::Int4, true) => device.launch::<quantized::quantize_int4_f16>(grid, 0, quantize)?,
                    }
                }
                first += wave.n_tiles;
            }
        }
        let mut found = [0];
        strange.read(0, &mut found)?;
        Ok((found == [0]).then_some(Self { code: scales.code, fine: scales.fine, codes }))
    }

    /// What they are, and whether scales have two parts.
    pub fn code(&self) -> (Code, bool) {
        (self.code, self.fine)
    }

    /// Where they are.
    pub fn codes(&self) -> Global<u8> {
        self.codes.ptr()
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        self.codes.len() as u64
    }
}

/// Bytes of the codes of a model's layers, with scales, laid out for `grid` blocks.
pub fn bytes(config: &Config, code: Code, grid: u32) -> u64 {
    let layers = config.gemms().filter(|gemm| gemm.matrix != Matrix::Head);
    let chunk = match code {
        Code::E4m3 => quantized::Fp8::BYTES,
        Code::Int4 => quantized::Int4::<1>::BYTES,
    };
    chunks(layers.map(|gemm| n_tiles(&gemm)), grid) * u64::from(chunk)
}

/// Words of the scales of a matrix of so many weight rows and inputs.
fn words([rows, k]: [usize; 2]) -> usize {
    let of_n_tile = k.div_ceil(CHUNK_FEATURES as usize) * (CHUNK_FEATURES / GROUP * N_TILE) as usize;
    rows.div_ceil(N_TILE as usize) * of_n_tile
}

impl Scales {
    /// Checks that there are as many as the matrices of `config` take.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub fn check(&self, config: &Config) -> Result<(), Error> {
        let what = "scales of the layers' matrices";
        let (found, expected) = (self.matrices.len(), Matrix::OF_LAYER.len() * config.num_hidden_layers);
        if found != expected {
            return Err(Error::Weights { what, found, expected });
        }
        for (matrix, gemm) in self.matrices.iter().zip(config.gemms()) {
            let (found, expected) = (matrix.len(), words([gemm.weight_rows(), gemm.k]));
            if found != expected {
                return Err(Error::Weights { what, found, expected });
            }
        }
        Ok(())
    }

    /// One scale and zero for all weights of a model.
    ///
    /// # Panics
    /// If there is no such [`Scale`]: a bug of the caller.
    pub fn uniform(config: &Config, code: Code, scale: f32, zero: u8) -> Self {
        let scale = word(code, scale, zero).and_then(|word| coarse(code, word)).expect("a scale of few bits");
        let matrices = config.gemms().filter(|gemm| gemm.matrix != Matrix::Head);
        let matrices = matrices.map(|gemm| vec![scale; words([gemm.weight_rows(), gemm.k])]).collect();
        Self { code, fine: false, matrices }
    }
}

/// The word of a scale, of int4 with two parts.
fn word(code: Code, scale: f32, zero: u8) -> Option<u32> {
    let scale = match code {
        Code::E4m3 => Scale::new::<quantized::Fp8>(scale, zero),
        Code::Int4 => Scale::new::<quantized::Int4<2>>(scale, zero),
    };
    scale.map(|Scale(word)| word)
}

/// The same with one part, if that is enough.
fn coarse(code: Code, word: u32) -> Option<u32> {
    match code {
        Code::E4m3 => Some(word),
        Code::Int4 => Scale(word).coarse().map(|Scale(word)| word),
    }
}

/// Gathers the scales of a checkpoint while it is read.
pub struct Collector {
    code: Code,
    matrices: Vec<Vec<AtomicU32>>,
    /// Of each weight, by where it is.
    places: HashMap<usize, Place>,
    unfit: AtomicBool,
}

/// Where a weight's rows are among those of its matrix.
#[derive(Clone, Copy)]
struct Place {
    matrix: usize,
    /// The first one, of matrices one after another.
    first: usize,
    /// Of gate and up, which of the two: an N-tile has eight rows of each.
    half: Option<usize>,
    inputs: usize,
    group: usize,
}

impl Place {
    /// The matrix's row that is row `i` of the weight.
    fn row(&self, i: usize) -> usize {
        let eight = N_TILE as usize / 2;
        self.half.map_or(self.first + i, |half| i / eight * N_TILE as usize + half * eight + i % eight)
    }
}

impl Collector {
    /// For a checkpoint's weights; none if some matrix of a layer has no codes, other ones, or smaller groups than the
    /// kernels read.
    pub fn new(weights: &Weights<Weight<'_>>) -> Option<Self> {
        let (mut matrices, mut places) = (Vec::new(), HashMap::new());
        let mut code = None;
        for layer in &weights.layers {
            for kind in Matrix::OF_LAYER {
                let (mut first, mut inputs) = (0, 0);
                for (part, weight) in layer.parts(kind).into_iter().enumerate() {
                    let matrix = weight.quantized()?;
                    let rows = matrix.shape()[0];
                    inputs = matrix.shape()[1];
                    let group = matrix.group().min(inputs);
                    if *code.get_or_insert(matrix.code()) != matrix.code()
                        || !(group.is_multiple_of(GROUP as usize) || group == inputs)
                    {
                        return None;
                    }
                    let half = (kind == Matrix::GateUp).then_some(part);
                    let place = Place { matrix: matrices.len(), first, half, inputs, group };
                    places.insert(std::ptr::from_ref(weight).addr(), place);
                    first += rows;
                }
                matrices.push((0..words([first, inputs])).map(|_| AtomicU32::new(0)).collect());
            }
        }
        Some(Self { code: code?, matrices, places, unfit: AtomicBool::new(false) })
    }

    /// Takes the scales of some rows of a weight; those of others are of no interest.
    pub fn take(&self, weight: &Weight<'_>, rows: Range<usize>, codes: &Codes) {
        let Some(place) = self.places.get(&std::ptr::from_ref(weight).addr()) else { return };
        if codes.group_of.is_some() {
            self.unfit.store(true, Ordering::Relaxed);
            return;
        }
        let (all, groups) = (place.inputs.div_ceil(GROUP as usize), place.inputs.div_ceil(place.group));
        let of_n_tile = words([N_TILE as usize, place.inputs]);
        for (i, row) in rows.enumerate() {
            let row = place.row(row);
            let to = &self.matrices[place.matrix][row / N_TILE as usize * of_n_tile + row % N_TILE as usize..];
            for group in 0..all {
                let from = i * groups + group * GROUP as usize / place.group;
                let zero = codes.zeros.get(from).copied().unwrap_or(0);
                match word(self.code, codes.scales[from], zero) {
                    Some(word) => to[group * N_TILE as usize].store(word, Ordering::Relaxed),
                    None => self.unfit.store(true, Ordering::Relaxed),
                }
            }
        }
    }

    /// All of them; none if some are no scales that the kernels have.
    pub fn finish(self) -> Option<Scales> {
        if self.unfit.into_inner() {
            return None;
        }
        let (code, matrices) = (self.code, self.matrices);
        let mut matrices: Vec<Vec<u32>> =
            matrices.into_iter().map(|m| m.into_iter().map(AtomicU32::into_inner).collect()).collect();
        let fine = matrices.iter().flatten().any(|&word| coarse(code, word).is_none());
        if !fine {
            matrices.iter_mut().flatten().for_each(|word| *word = coarse(code, *word).unwrap_or(*word));
        }
        Some(Scales { code, fine, matrices })
    }
}
