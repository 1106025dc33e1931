//! Layout of the weights in device memory. All kernels read this one layout.
//!
//! An *N-tile* is 16 output features. A *chunk* is an N-tile's 512 input features, 16 KiB: 8
//! [slices](crate::linear::SLICE) of 2 KiB. A slice is core matrices, as `wgmma` takes them from shared memory. A core
//! matrix has eight features, and half of the 16 inputs of one instruction: with `mma`, one register of all lanes of a
//! warp holds it.
//!
//! A *wave* is a matrix or a part of one: up to [`N_TILES`] N-tiles for each CTA of the decode kernel. N-tiles go to
//! CTAs in rotation. The rotation continues from wave to wave, so that CTAs get equal totals. Memory holds a wave in
//! the order in which the whole grid consumes it: by input chunk, then by N-tile. In each group of 8 N-tiles, slices
//! with the same number are contiguous: 16 KiB, which the batched decode kernel copies at once:
//!
//! ```text
//! [512 inputs][8 N-tiles][slice][N-tile of 8][8 features of 16][instruction of 4][half][feature of the 8][16 bytes]
//! ```
//!
//! Within a gate-up N-tile, rows 0 to 7 are gate features and rows 8 to 15 their up features, so that a gate and its up
//! stay in one CTA, and with `mma` in one lane. [`lay_out`] makes this order from a checkpoint's.
//!
//! # Safety
//! Apart from [`lay_out`], what is unsafe here computes places, and reads and writes nothing. The matrix is laid out
//! for at least one CTA, and has the N-tile.

use cuda_std::{Global, GlobalMut, bf16, device, kernel, thread};

use crate::linear::{N_TILE, SLICE};

/// Bytes of a chunk.
pub const CHUNK_BYTES: u32 = 16384;
/// Input features of a chunk.
pub const CHUNK_FEATURES: u32 = SLICES * SLICE;
/// Bytes of an N-tile's slice.
pub const SLICE_BYTES: u32 = SLICE * N_TILE * 2;
/// Bytes of a core matrix.
const CORE_BYTES: u32 = 128;
/// Bytes from a core matrix to that of the next eight features, with the same inputs.
const CORE_ROWS_APART: u32 = 4 * 2 * CORE_BYTES;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
const _: () = {
    use cuda_std::wgmma;
    assert!(CORE_BYTES == wgmma::CORE_BYTES && CORE_ROWS_APART == wgmma::CORE_ROWS_APART);
};
/// Bytes from the core matrices of one instruction to those of the next, within a slice.
pub(crate) const STEP_BYTES: u32 = 2 * CORE_BYTES;
/// N-tiles whose slices lie together: a group.
pub const GROUP_N_TILES: u32 = 8;
/// Bytes from one slice of a chunk to the next: those of a group's other N-tiles lie between.
pub const SLICES_APART: u32 = GROUP_N_TILES * SLICE_BYTES;
/// Most N-tiles of a CTA in a wave: the accumulators have room for no more.
pub const N_TILES: u32 = 8;
/// Slices of a chunk.
pub(crate) const SLICES: u32 = 8;

/// Assigns the N-tiles of one matrix after another to CTAs and to places in memory. The producer and the host walk the
/// same way. Consumers of the decode kernel know their shares from the start.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    /// CTAs.
    pub grid: u32,
    /// Chunks passed so far, which is where the next wave begins. Padding after a wave's last N-tile counts, too.
    pub chunks: u64,
    /// The CTA that gets the next wave's first N-tile.
    pub rotation: u32,
}

/// One wave of a [`Walk`].
#[derive(Clone, Copy, Debug)]
pub struct Wave {
    /// Where it begins in the stream, in chunks.
    pub base: u64,
    /// The CTA that gets its first N-tile.
    pub rotation: u32,
    /// N-tiles.
    pub n_tiles: u32,
    /// Chunks of each N-tile.
    pub depth: u32,
}

impl Walk {
    /// A walk that begins at the start of the stream.
    pub const fn new(grid: u32) -> Self {
        Self { grid, chunks: 0, rotation: 0 }
    }

    /// A CTA's place in the next wave's rotation, as [`Wave::place`] returns it.
    #[device]
    pub(crate) const fn place(&self, block: u32) -> u32 {
        if block >= self.rotation { block - self.rotation } else { block + self.grid - self.rotation }
    }

    /// The next wave: as many of the `left` N-tiles as a wave takes, of `k` input features.
    #[device]
    pub fn wave(&mut self, left: u32, k: u32) -> Wave {
        // SAFETY: a grid has CTAs.
        unsafe { cuda_std::assume(self.grid > 0) };
        let n_tiles = left.min(N_TILES * self.grid);
        let depth = k.div_ceil(CHUNK_FEATURES);
        let wave = Wave { base: self.chunks, rotation: self.rotation, n_tiles, depth };
        self.chunks += u64::from(wave.room()) * u64::from(depth);
        self.rotation = (self.rotation + n_tiles) % self.grid;
        wave
    }

    /// Passes a matrix of `n_tiles` N-tiles and `k` input features.
    pub fn pass(&mut self, n_tiles: u32, k: u32) {
        let mut left = n_tiles;
        while left > 0 {
            left -= self.wave(left, k).n_tiles;
        }
    }
}

impl Wave {
    /// A CTA's place in the wave's rotation: the CTA's `i`-th N-tile is number `i · grid + place` of the wave.
    #[device]
    pub(crate) fn place(&self, block: u32, grid: u32) -> u32 {
        if block >= self.rotation { block - self.rotation } else { block + grid - self.rotation }
    }

    /// How many of the wave's N-tiles the CTA at `place` has.
    #[device]
    pub fn mine(&self, place: u32, grid: u32) -> u32 {
        // SAFETY: a grid has CTAs.
        unsafe { cuda_std::assume(grid > 0) };
        if place < self.n_tiles { (self.n_tiles - place).div_ceil(grid) } else { 0 }
    }

    /// N-tiles that the wave has room for: whole groups.
    #[device]
    const fn room(&self) -> u32 {
        self.n_tiles.next_multiple_of(GROUP_N_TILES)
    }

    /// The group of [`GROUP_N_TILES`] N-tiles' chunks that has chunk `q` of an N-tile. Groups are counted from the
    /// start of the stream.
    #[device]
    pub const fn group(&self, n_tile: u32, q: u32) -> u32 {
        (self.base / GROUP_N_TILES as u64) as u32 + q * (self.room() / GROUP_N_TILES) + n_tile / GROUP_N_TILES
    }

    /// The byte of the stream at which an N-tile's slice begins.
    #[device]
    pub const fn slice(&self, n_tile: u32, slice: u32) -> u64 {
        let chunks =
            self.base + (slice / SLICES) as u64 * self.room() as u64 + (n_tile / GROUP_N_TILES * GROUP_N_TILES) as u64;
        chunks * CHUNK_BYTES as u64 + (slice % SLICES * SLICES_APART + n_tile % GROUP_N_TILES * SLICE_BYTES) as u64
    }
}

/// Where the slices of [`GROUP_N_TILES`] N-tiles lie. Slices with one number lie [side by side](crate::stream), 16 KiB
/// in all.
#[derive(Clone, Copy)]
pub(crate) struct Slices {
    /// The byte of the stream at which slice 0 begins.
    first: u64,
    /// Bytes from slice 0 of one chunk to slice 0 of the next.
    chunk: u64,
}

impl Slices {
    /// The slices of the N-tiles from `n_tile` on, a multiple of [`GROUP_N_TILES`]. The matrix has `n_tiles` N-tiles of
    /// `k` input features, and is laid out for `blocks` CTAs from chunk `base` on.
    ///
    /// # Safety
    /// `blocks` is at least 1, and `n_tile` is below `n_tiles`.
    #[device]
    pub unsafe fn new(base: u64, blocks: u32, n_tiles: u32, k: u32, n_tile: u32) -> Self {
        let matrix = StreamMatrix { stream: Global::default(), base, blocks, n_tiles, k };
        // SAFETY: the caller's word.
        let (wave, place) = unsafe { matrix.wave(n_tile) };
        let first = wave.slice(place, 0);
        Self { first, chunk: wave.slice(place, SLICES) - first }
    }

    /// The byte of the stream at which slice number `slice` of the N-tiles begins.
    #[device]
    pub const fn at(&self, slice: u32) -> u64 {
        self.first + (slice / SLICES) as u64 * self.chunk + (slice % SLICES * SLICES_APART) as u64
    }
}

/// The byte of a slice that a lane gives to `ldmatrix` for an instruction's fragment. Eight lanes give the rows of each
/// core matrix: of the lower eight features, of the upper eight, and then of both for the other half of the inputs. The
/// same row for the next instruction lies [`STEP_BYTES`] further.
#[device]
pub(crate) const fn fragment_row(lane: u32) -> u32 {
    lane / 8 % 2 * CORE_ROWS_APART + lane / 16 * CORE_BYTES + lane % 8 * (CORE_BYTES / 8)
}

/// The word of a slice at which register `r` of an instruction's fragment begins. Each lane has one of the 32 words
/// from there on.
#[device]
pub(crate) const fn core_word(r: u32) -> u32 {
    (r % 2 * CORE_ROWS_APART + r / 2 * CORE_BYTES) / 4
}

/// A matrix in the stream.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct StreamMatrix {
    /// The stream, as [`lay_out`] left it.
    pub stream: Global<bf16>,
    /// The chunk at which the matrix begins.
    pub base: u64,
    /// CTAs that the matrix is laid out for.
    pub blocks: u32,
    /// Its N-tiles.
    pub n_tiles: u32,
    /// Input features.
    pub k: u32,
}

impl StreamMatrix {
    /// The wave that has an N-tile, and the N-tile's place in it.
    #[device]
    pub(crate) unsafe fn wave(&self, n_tile: u32) -> (Wave, u32) {
        let most = N_TILES * self.blocks;
        // SAFETY: weights are laid out for some CTAs.
        unsafe { cuda_std::assume(most > 0) };
        // All waves but a matrix's last have whole groups: there is no padding before this wave.
        let passed = n_tile / most * most;
        let depth = self.k.div_ceil(CHUNK_FEATURES);
        let base = self.base + u64::from(passed) * u64::from(depth);
        (Wave { base, rotation: 0, n_tiles: (self.n_tiles - passed).min(most), depth }, n_tile - passed)
    }

    /// Where the slices of an N-tile's group lie, and the byte within each such slice at which the N-tile's own begins.
    #[device]
    pub(crate) unsafe fn slices(&self, n_tile: u32) -> (Slices, u32) {
        let Self { base, blocks, n_tiles, k, .. } = *self;
        // SAFETY: the caller's word.
        let slices = unsafe { Slices::new(base, blocks, n_tiles, k, n_tile / GROUP_N_TILES * GROUP_N_TILES) };
        (slices, n_tile % GROUP_N_TILES * SLICE_BYTES)
    }
}

/// Parameters of [`lay_out`]. Grid: (N-tiles of the source, [`CHUNK_FEATURES`] in its input features, rounded up).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct LayOut {
    /// `[n, k]` as in the checkpoint. When `up` is not null, the gate projection.
    pub weight: Global<bf16>,
    /// `[n, k]`, the up projection; null for a matrix that is no gate and up.
    pub up: Global<bf16>,
    /// The matrix that is written: a place in the stream.
    pub to: StreamMatrix,
    /// The stream, for writing.
    pub stream: GlobalMut<bf16>,
    /// The N-tile of `to` at which the source begins.
    pub first_n_tile: u32,
    /// Output features of the source: with `up`, of each of the two.
    pub n: u32,
}

/// Copies a matrix, or a part of its output features, into the order of the stream. What lies beyond the source in its
/// last N-tile and in its last chunk becomes zero.
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
