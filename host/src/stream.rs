//! The matrices of a model in device memory, one after another, in the one layout that all kernels read (see
//! `gpu_kernels::stream`).

use cuda_std::Global;
use gpu_kernels::linear::N_TILE;
use gpu_kernels::stream::{CHUNK_BYTES, CHUNK_FEATURES, LayOut, StreamMatrix, Walk, lay_out};
use half::bf16;
use model::Config;
use model::plan::{Gemm, Matrix};

use crate::Error;
use crate::device::{Buffer, Device};

/// A model's matrices, one after another; or the matrices of one layer, whose memory all layers share in turn, and the
/// head.
pub struct Stream {
    weights: Buffer<bf16>,
    matrices: Vec<StreamMatrix>,
    /// Chunks before the head: of all layers, or of one if they share its memory.
    layer_chunks: u64,
}

/// A matrix as a checkpoint has it, or a part of its output features.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// `[n, k]`; the gate's, where there is an up projection.
    pub weight: Global<bf16>,
    /// `[n, k]` the up projection's; null otherwise.
    pub up: Global<bf16>,
    /// Output features; of gate and up each.
    pub n: u32,
    /// The N-tile of the whole matrix at which this part begins.
    pub first_n_tile: u32,
}

impl Source {
    /// The matrix of `n` output features at the start of `weights`; where there is an up projection, that begins at
    /// element `up`.
    ///
    /// # Panics
    /// If there is no such element: a bug of the caller.
    pub fn new(weights: &Buffer<bf16>, n: usize, up: Option<usize>) -> Self {
        let up = up.map_or(Global::default(), |at| weights.part(at));
        Self { weight: weights.ptr(), up, n: n as u32, first_n_tile: 0 }
    }

    /// N-tiles that it takes.
    pub const fn n_tiles(&self) -> u32 {
        (if self.up.is_null() { self.n } else { 2 * self.n }).div_ceil(N_TILE)
    }
}

/// N-tiles and input features of the matrix of a GEMM.
pub fn n_tiles(gemm: &Gemm) -> (u32, u32) {
    ((gemm.weight_rows() as u32).div_ceil(N_TILE), gemm.k as u32)
}

/// The chunk at which each matrix begins, and the last one's end. `matrices` are the N-tiles and input features of
/// each. They lie one after another, laid out for `blocks` CTAs.
pub fn bases(matrices: impl IntoIterator<Item = (u32, u32)>, blocks: u32) -> Vec<u64> {
    let mut walk = Walk::new(blocks);
    let mut end_of = |(n_tiles, k)| {
        walk.pass(n_tiles, k);
        walk.chunks
    };
    std::iter::once(0).chain(matrices.into_iter().map(&mut end_of)).collect()
}

/// Chunks of all these matrices, which are as for [`bases`].
pub fn chunks(matrices: impl IntoIterator<Item = (u32, u32)>, blocks: u32) -> u64 {
    bases(matrices, blocks).last().copied().unwrap_or_default()
}

impl Stream {
    /// Allocates memory for matrices of these `sizes` (N-tiles and input features of each), one after another.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, sizes: impl IntoIterator<Item = (u32, u32)>) -> Result<Self, Error> {
        Self::with_layers(device, sizes, 1)
    }

    /// As [`new`](Self::new), but all matrices except the last stand for those of so many `layers`, which share their
    /// memory.
    fn with_layers(device: &Device, sizes: impl IntoIterator<Item = (u32, u32)>, layers: usize) -> Result<Self, Error> {
        let blocks = device.sms();
        let sizes: Vec<_> = sizes.into_iter().collect();
        let bases = bases(sizes.iter().copied(), blocks);
        let elements = [bases[sizes.len()] as usize, CHUNK_BYTES as usize / 2];
        let weights = device.zeroed_array("the weights", &elements)?;
        let stream = weights.ptr();
        let place = |((n_tiles, k), &base)| StreamMatrix { stream, base, blocks, n_tiles, k };
        let mut matrices: Vec<_> = sizes.into_iter().zip(&bases).map(place).collect();
        let layer_chunks = matrices.last().map_or(0, |head| head.base);
        let of_layer = &matrices[..matrices.len().saturating_sub(1)];
        let others: Vec<_> = (1..layers).flat_map(|_| of_layer).copied().collect();
        matrices.splice(0..0, others);
        Ok(Self { weights, matrices, layer_chunks })
    }

    /// Allocates memory for all matrices of a model: each layer's, then the head.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_model(device: &Device, config: &Config) -> Result<Self, Error> {
        Self::new(device, config.gemms().map(|gemm| n_tiles(&gemm)))
    }

    /// Allocates memory for the matrices of one layer of a model, which all its layers share in turn, and the head.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_layer(device: &Device, config: &Config) -> Result<Self, Error> {
        Self::with_layers(device, Self::of_layer_sizes(config), config.num_hidden_layers)
    }

    fn of_layer_sizes(config: &Config) -> impl Iterator<Item = (u32, u32)> {
        let of_layer = Matrix::OF_LAYER.len() * config.num_hidden_layers.saturating_sub(1);
        config.gemms().skip(of_layer).map(|gemm| n_tiles(&gemm))
    }

    /// Bytes of a model's matrices; or of one layer's and the head, if `is_of_layer`. The number of CTAs that they
    /// are laid out for makes no difference.
    pub fn bytes(config: &Config, is_of_layer: bool) -> u64 {
        let chunks = match is_of_layer {
            true => chunks(Self::of_layer_sizes(config), 1),
            false => chunks(config.gemms().map(|gemm| n_tiles(&gemm)), 1),
        };
        chunks * u64::from(CHUNK_BYTES)
    }

    /// Whether all layers share the memory of one.
    pub fn is_of_layer(&self) -> bool {
        self.matrices.len() > Matrix::OF_LAYER.len() + 1
            && self.matrices[0].base == self.matrices[Matrix::OF_LAYER.len()].base
    }

    /// Chunks of the layers' matrices: of one layer, if all share its memory.
    pub fn layer_chunks(&self) -> u64 {
        self.layer_chunks
    }

    /// Enqueues the copy of matrix `number`, or of a part of it, from `source` into the stream's layout.
    ///
    /// # Safety
    /// `source` is what [`Source`] says, with as many input features as the matrix.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no such matrix, or it has no such N-tiles: a bug of the caller.
    pub unsafe fn lay_out(&self, device: &Device, number: usize, source: Source) -> Result<(), Error> {
        let to = self.matrices[number];
        let Source { weight, up, n, first_n_tile } = source;
        assert!(first_n_tile + source.n_tiles() <= to.n_tiles, "N-tiles of matrix {number}");
        let params = LayOut { weight, up, to, stream: self.weights.ptr_mut(), first_n_tile, n };
        // SAFETY: the caller's word; the stream has room for each of its matrices.
        unsafe { device.launch::<lay_out>((source.n_tiles(), to.k.div_ceil(CHUNK_FEATURES)), 0, params) }
    }

    /// A matrix of a layer. For the head, `layer` is how many layers there are: see [`Matrix::number`].
    ///
    /// # Panics
    /// If there is no such matrix: a bug of the caller.
    pub fn matrix(&self, layer: usize, matrix: Matrix) -> StreamMatrix {
        self.matrices[matrix.number(layer)]
    }

    /// All matrices: each layer's in turn, then the head.
    pub fn matrices(&self) -> &[StreamMatrix] {
        &self.matrices
    }

    /// The memory of all matrices.
    pub fn weights(&self) -> &Buffer<bf16> {
        &self.weights
    }

    /// CTAs that the matrices are laid out for.
    pub fn blocks(&self) -> u32 {
        self.weights.device().sms()
    }
}
