//! Layout of the weights in device memory: one, which all kernels read.
//!
//! An *N-tile* is 16 output features; a *chunk* is an N-tile's 512 input features, 16 KiB: 8
//! [slices](crate::linear::SLICE) of 2 KiB. A slice is core matrices, as `wgmma` takes them from shared memory: eight
//! features' bytes of half an instruction's inputs, which are what a register of a warp's lanes holds of them where
//! `mma` has them. A *wave* is a matrix or a part of one: up to [`N_TILES`] N-tiles a block of the decode kernel,
//! assigned in a rotation that continues from wave to wave, so that totals match. Memory holds a wave in the order in
//! which the whole grid consumes it, by input chunk, then by N-tile; of every 8 N-tiles a slice of each lies together,
//! 16 KiB that the step of many sequences takes at once:
//!
//! ```text
//! [512 inputs][8 N-tiles][slice][N-tile of 8][8 features of 16][instruction of 4][half][feature of the 8][16 bytes]
//! ```
//!
//! Within a gate-up N-tile rows 0 to 7 are gate features and rows 8 to 15 their up features, so that SwiGLU stays in
//! the lane's block. [`lay_out`] makes this order from a checkpoint's.
//!
//! # Safety
//! Apart from [`lay_out`], what is unsafe here finds places, and reads and writes nothing. The matrix is laid out for
//! at least one block, and has the N-tile.

use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

use crate::linear::{N_TILE, SLICE};

/// Bytes of a chunk.
pub const CHUNK_BYTES: u32 = 16384;
/// Input features of a chunk.
pub const CHUNK_FEATURES: u32 = SLICES * SLICE;
/// Bytes of an N-tile's slice.
pub const SLICE_BYTES: u32 = SLICE * N_TILE * 2;
/// Bytes of a core matrix.
const CORE_BYTES: u32 = 128;
/// Bytes from a core matrix to that of the next eight features.
const CORE_ROWS_APART: u32 = 4 * 2 * CORE_BYTES;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
const _: () = {
    use cuda_std::wgmma;
    assert!(CORE_BYTES == wgmma::CORE_BYTES && CORE_ROWS_APART == wgmma::CORE_ROWS_APART);
};
/// From a slice's core matrices of an instruction to those of the next.
pub(crate) const STEP_BYTES: u32 = 2 * CORE_BYTES;
/// N-tiles whose slices lie together.
pub const TOGETHER: u32 = 8;
/// Bytes from a slice of an N-tile's chunk to the next.
pub const SLICES_APART: u32 = TOGETHER * SLICE_BYTES;
/// Most N-tiles of a block in a wave: what the accumulators have room for.
pub const N_TILES: u32 = 8;
/// Slices of a chunk.
pub(crate) const SLICES: u32 = 8;

/// How a matrix's N-tiles fall to blocks and memory: the same for the producer and the host, which puts matrices one
/// after another. Consumers of the decode kernel know their shares from the start.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    /// Blocks.
    pub grid: u32,
    /// Chunks passed so far, holes behind a wave's last N-tile included: where the next wave begins.
    pub chunks: u64,
    /// The block that gets the next wave's first N-tile.
    pub rotation: u32,
}

/// One wave of a [`Walk`].
#[derive(Clone, Copy, Debug)]
pub struct Wave {
    /// Where it begins in memory, in chunks.
    pub base: u64,
    /// The block that gets its first N-tile.
    pub rotation: u32,
    /// N-tiles.
    pub n_tiles: u32,
    /// Chunks of an N-tile.
    pub depth: u32,
}

impl Walk {
    /// At the start.
    pub const fn new(grid: u32) -> Self {
        Self { grid, chunks: 0, rotation: 0 }
    }

    /// A block's place in the next wave's rotation, as [`Wave::place`] has it.
    #[inline(always)]
    pub(crate) const fn place(&self, block: u32) -> u32 {
        if block >= self.rotation { block - self.rotation } else { block + self.grid - self.rotation }
    }

    /// The next wave: as many of the `left` N-tiles as a wave takes, of `k` input features.
    #[inline(always)]
    pub fn wave(&mut self, left: u32, k: u32) -> Wave {
        // SAFETY: a grid has blocks.
        unsafe { cuda_std::assume(self.grid > 0) };
        let n_tiles = left.min(N_TILES * self.grid);
        let depth = k.div_ceil(CHUNK_FEATURES);
        let wave = Wave { base: self.chunks, rotation: self.rotation, n_tiles, depth };
        self.chunks += u64::from(wave.room()) * u64::from(depth);
        self.rotation = (self.rotation + n_tiles) % self.grid;
        wave
    }

    /// Goes beyond a matrix of so many N-tiles, of `k` input features.
    pub fn pass(&mut self, n_tiles: u32, k: u32) {
        let mut left = n_tiles;
        while left > 0 {
            left -= self.wave(left, k).n_tiles;
        }
    }
}

impl Wave {
    /// A block's place in the wave's rotation: N-tile `i · grid + place` is its `i`-th.
    #[inline(always)]
    pub(crate) fn place(&self, block: u32, grid: u32) -> u32 {
        if block >= self.rotation { block - self.rotation } else { block + grid - self.rotation }
    }

    /// N-tiles of the block at `place`.
    #[inline(always)]
    pub fn mine(&self, place: u32, grid: u32) -> u32 {
        // SAFETY: a grid has blocks.
        unsafe { cuda_std::assume(grid > 0) };
        if place < self.n_tiles { (self.n_tiles - place).div_ceil(grid) } else { 0 }
    }

    /// N-tiles that there is room for.
    #[inline(always)]
    const fn room(&self) -> u32 {
        self.n_tiles.next_multiple_of(TOGETHER)
    }

    /// Which chunk of [`TOGETHER`] N-tiles has chunk `q` of an N-tile.
    #[inline(always)]
    pub const fn together(&self, n_tile: u32, q: u32) -> u32 {
        (self.base / TOGETHER as u64) as u32 + q * (self.room() / TOGETHER) + n_tile / TOGETHER
    }

    /// The byte of the stream at which an N-tile's slice begins.
    #[inline(always)]
    pub const fn slice(&self, n_tile: u32, slice: u32) -> u64 {
        let chunks = self.base + (slice / SLICES) as u64 * self.room() as u64 + (n_tile / TOGETHER * TOGETHER) as u64;
        chunks * CHUNK_BYTES as u64 + (slice % SLICES * SLICES_APART + n_tile % TOGETHER * SLICE_BYTES) as u64
    }
}

/// Where the slices of [`TOGETHER`] N-tiles lie that are [side by side](crate::stream): 16 KiB
/// each.
#[derive(Clone, Copy)]
pub(crate) struct Slices {
    /// The byte of the stream at which the first begins.
    first: u64,
    /// Bytes from a chunk's to the next chunk's.
    chunk: u64,
}

impl Slices {
    /// Those of `n_tile`, a multiple of [`TOGETHER`], of a matrix of so many `n_tiles` of `k` input features, laid out
    /// for `blocks` blocks from chunk `base` on.
    ///
    /// # Safety
    /// `blocks` is at least 1, and `n_tile` is below `n_tiles`.
    #[inline(always)]
    pub unsafe fn new(base: u64, blocks: u32, n_tiles: u32, k: u32, n_tile: u32) -> Self {
        let matrix = StreamMatrix { stream: Global::default(), base, blocks, n_tiles, k };
        // SAFETY: the caller's word.
        let (wave, place) = unsafe { matrix.wave(n_tile) };
        let first = wave.slice(place, 0);
        Self { first, chunk: wave.slice(place, SLICES) - first }
    }

    /// The byte at which slice number `slice` begins.
    #[inline(always)]
    pub const fn at(&self, slice: u32) -> u64 {
        self.first + (slice / SLICES) as u64 * self.chunk + (slice % SLICES * SLICES_APART) as u64
    }
}

/// Where in a slice the row of core matrices begins that a lane tells `ldmatrix` of, for an instruction's fragment: of
/// the lower and the upper features, then those of the other half of the inputs. [`STEP_BYTES`] on is that for the next
/// instruction.
#[inline(always)]
pub(crate) const fn fragment_row(lane: u32) -> u32 {
    lane / 8 % 2 * CORE_ROWS_APART + lane / 16 * CORE_BYTES + lane % 8 * (CORE_BYTES / 8)
}

/// Where register `r` of an instruction's fragment begins in a slice: words, of which each lane has one.
#[inline(always)]
pub(crate) const fn core_word(r: u32) -> u32 {
    (r % 2 * CORE_ROWS_APART + r / 2 * CORE_BYTES) / 4
}

/// A matrix of the stream.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct StreamMatrix {
    /// The stream, as [`lay_out`] left it.
    pub stream: Global<bf16>,
    /// The chunk at which the matrix begins.
    pub base: u64,
    /// Blocks that it is laid out for.
    pub blocks: u32,
    /// Its N-tiles.
    pub n_tiles: u32,
    /// Input features.
    pub k: u32,
}

impl StreamMatrix {
    /// The wave that has an N-tile, and the N-tile's place in it.
    #[inline(always)]
    pub(crate) unsafe fn wave(&self, n_tile: u32) -> (Wave, u32) {
        let most = N_TILES * self.blocks;
        // SAFETY: weights are laid out for some blocks.
        unsafe { cuda_std::assume(most > 0) };
        // A wave has whole groups, all but the last.
        let passed = n_tile / most * most;
        let depth = self.k.div_ceil(CHUNK_FEATURES);
        let base = self.base + u64::from(passed) * u64::from(depth);
        (Wave { base, rotation: 0, n_tiles: (self.n_tiles - passed).min(most), depth }, n_tile - passed)
    }

    /// Where an N-tile's slices lie, and the byte of each slice that is shared by [`TOGETHER`] N-tiles at which its own
    /// begins.
    #[inline(always)]
    pub(crate) unsafe fn slices(&self, n_tile: u32) -> (Slices, u32) {
        let Self { base, blocks, n_tiles, k, .. } = *self;
        // SAFETY: the caller's word.
        let slices = unsafe { Slices::new(base, blocks, n_tiles, k, n_tile / TOGETHER * TOGETHER) };
        (slices, n_tile % TOGETHER * SLICE_BYTES)
    }
}

/// Parameters of [`lay_out`]. Grid: (N-tiles of the source, [`CHUNK_FEATURES`] in its input features, rounded up).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct LayOut {
    /// `[n, k]` as in the checkpoint; the gate's when `up` is not null.
    pub weight: Global<bf16>,
    /// `[n, k]` the up projection's; null otherwise.
    pub up: Global<bf16>,
    /// Where it is to go.
    pub to: StreamMatrix,
    /// The stream, for writing.
    pub stream: GlobalMut<bf16>,
    /// The N-tile that the source begins with.
    pub first_n_tile: u32,
    /// Output features of the source, of each.
    pub n: u32,
}

/// Copies a matrix, or a part of its output features, into the order of the stream; what lies beyond it in its last
/// N-tile and chunk becomes zero.
#[kernel(threads = 256)]
pub unsafe fn lay_out(p: LayOut) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (n_tile, q) = (thread::block_idx_x(), thread::block_idx_y());
        let (slices, own) = p.to.slices(p.first_n_tile + n_tile);
        let (n, k_size) = (p.n, p.to.k);
        let to = p.stream.cast::<u8>().at(slices.at(q * SLICES) as usize + own as usize);
        let mut fragment = thread::thread_idx_x();
        while fragment < CHUNK_BYTES / 16 {
            let lane = fragment % 32;
            let (g, t) = (lane / 4, lane % 4);
            let step = fragment / 32 % 4;
            let slice = fragment / 128;
            let k = q * CHUNK_FEATURES + slice * SLICE + step / 2 * 32 + t * 8 + step % 2 * 4;
            let (low_row, high_row, high) = if p.up.is_null() {
                (n_tile * N_TILE + g, n_tile * N_TILE + 8 + g, p.weight)
            } else {
                (n_tile * (N_TILE / 2) + g, n_tile * (N_TILE / 2) + g, p.up)
            };
            let words = |matrix: Global<bf16>, row: u32| {
                if row < n && k < k_size {
                    let at = matrix.at(row as usize * k_size as usize + k as usize).cast::<u32>();
                    [at.load(0), at.load(1)]
                } else {
                    [0; 2]
                }
            };
            let (l, h) = (words(p.weight, low_row), words(high, high_row));
            let to = to.at((slice * SLICES_APART + step * STEP_BYTES + lane * 4) as usize).cast::<u32>();
            unroll!(H < 2; {
                to.store(H * (CORE_BYTES / 4) as usize, l[H]);
                to.store((CORE_ROWS_APART / 4) as usize + H * (CORE_BYTES / 4) as usize, h[H]);
            });
            fragment += 256;
        }
    }
}
