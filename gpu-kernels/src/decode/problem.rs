//! The sizes and inputs of a step's GEMMs, which are the same in all layers. A CTA finds them once, at the start: other
//! CTAs would wait for what it finds between two GEMMs.
//!
//! # Safety
//! `p` is a launch's parameter block. A CTA stores its problems before it synchronises, and loads them after that;
//! nobody else writes there.

use cuda_std::{Global, GlobalMut, bf16, device, shared};

use super::{DecodeStep, Matrix, N_TILES, PROBLEMS};
use crate::exchange::{WordKind, Words};
use crate::stream::CHUNK_FEATURES;
use crate::weights::{Plain, WeightFormat};

/// The size of a matrix's GEMM, where its input is, and how its N-tiles fall to CTAs.
#[derive(Clone, Copy)]
pub struct Problem {
    /// The input in a step of one row: words that hold two elements each.
    words: GlobalMut<u64>,
    /// The input in a step of several rows.
    pub x: Global<bf16>,
    /// Input features.
    pub k: u32,
    /// N-tiles.
    pub n_tiles: u32,
    /// Chunks of an N-tile.
    pub depth: u32,
    /// Whether the input has yet to be divided by its norm.
    pub is_normed: bool,
    /// N-tiles that every CTA has in the last wave.
    pub each: u32,
    /// How many CTAs, the first in the rotation, have one more.
    pub more: u32,
}

impl Problem {
    /// Bytes of a problem in shared memory.
    pub const BYTES: u32 = 48;

    /// The problem of a matrix, in a step by `grid` CTAs.
    #[device]
    fn new<F: WeightFormat>(p: &DecodeStep, matrix: Matrix, grid: u32) -> Self {
        let wave = N_TILES * grid;
        // SAFETY: a grid has CTAs, and no card has room for 2²⁹.
        unsafe { cuda_std::assume(grid > 0 && wave > 0) };
        // Each arm finds its own words: if the kind were found first, places would be looked up in memory.
        let words = |kind| p.exchange.words(kind, 0).first();
        let (words, x) = match matrix {
            Matrix::Output => (words(WordKind::Attended), p.work.attended.read()),
            Matrix::Down => (words(WordKind::Activation), p.work.activation.read()),
            Matrix::Qkv if p.eagle.is_wanted() => (words(WordKind::Pairs), p.eagle.pairs),
            Matrix::Qkv | Matrix::GateUp | Matrix::Head => (words(WordKind::Scaled), p.work.residual.scaled.read()),
        };
        let (n_tiles, k) = p.shape(matrix);
        let inputs = if F::PLAIN_HEAD && matrix == Matrix::Head { 1 } else { F::INPUTS };
        let depth = k.div_ceil(inputs).div_ceil(CHUNK_FEATURES);
        let last = if n_tiles > 0 { n_tiles - (n_tiles - 1) / wave * wave } else { 0 };
        let is_normed = p.is_normed(matrix);
        Self { words, x, k, n_tiles, depth, is_normed, each: last / grid, more: last % grid }
    }

    /// Stores the problems of all matrices where [`load`](Self::load) finds them, a thread each.
    ///
    /// # Safety
    /// `thread` counts the threads that call it from 0 on, each once: the first five write, and the CTA has not
    /// synchronised yet. `grid` is the launch's CTAs.
    #[device]
    pub unsafe fn store_all<F: WeightFormat>(p: &DecodeStep, thread: u32, grid: u32) {
        if thread < Matrix::COUNT {
            let matrix = Matrix::numbered(thread);
            let Self { words, x, k, n_tiles, depth, is_normed, each, more } = Self::new::<F>(p, matrix, grid);
            // SAFETY: the CTA's place for them.
            unsafe {
                let place = shared::dynamic::<u64>(PROBLEMS + thread * Self::BYTES);
                place.store(0, words.addr());
                place.store(1, x.addr());
                place.cast::<u32>().store16(4, [k, n_tiles, depth, is_normed.into()]);
                place.cast::<[u32; 2]>().store(4, [each, more]);
            }
        }
    }

    /// The problem of a matrix.
    ///
    /// # Safety
    /// The CTA has synchronised behind [`store_all`](Self::store_all).
    #[device]
    pub unsafe fn load(matrix: Matrix) -> Self {
        // SAFETY: written before the roles part.
        unsafe {
            let place = shared::dynamic::<u64>(PROBLEMS + matrix as u32 * Self::BYTES);
            let (words, x) = (GlobalMut::from_raw(place.load(0)), Global::from_raw(place.load(1)));
            let [k, n_tiles, depth, is_normed] = place.cast::<u32>().load16(4);
            let [each, more] = place.cast::<[u32; 2]>().load(4);
            Self { words, x, k, n_tiles, depth, is_normed: is_normed != 0, each, more }
        }
    }

    /// The input of one row, with this sequence flag.
    #[device]
    pub const fn input(&self, flag: u32) -> Words {
        Words::at(self.words, self.k / 2, flag)
    }
}

impl DecodeStep {
    /// How many N-tiles of a matrix's last wave each CTA has, and how many CTAs, the first in its rotation, have one
    /// more: [`Wave::mine`](crate::stream::Wave::mine) of all CTAs at once.
    pub fn shares(&self, matrix: Matrix, grid: u32) -> (u32, u32) {
        let Problem { each, more, .. } = Problem::new::<Plain>(self, matrix, grid);
        (each, more)
    }
}
