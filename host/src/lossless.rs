//! Weights packed without loss for the decode kernels (see `gpu_kernels::weights::lossless`).
//!
//! How long tiles' lists of escapes are is decided beforehand, from a sample of the checkpoint's tiles
//! ([`PackedSize`]). So every matrix is packed as soon as it is laid out, without waiting for the host. Whether
//! everything found room is checked once, at the end.

mod sampled;

use cuda_std::tensor::Array;
use gpu_kernels::linear::K_PARTIALS;
use gpu_kernels::stream::{CHUNK_BYTES, GROUP_N_TILES, StreamMatrix};
use gpu_kernels::weights::lossless::{self, Lossless, MOST_BEYOND, PACKED_SLICE, Pack, TILE_WEIGHTS, Unpack};
use model::Config;
use model::plan::{Gemm, Matrix};

use crate::Error;
use crate::device::{Buffer, Device};
use crate::stream::{Stream, bases, n_tiles};
use crate::weights::check_bases;

pub use self::sampled::{PackedSize, Sample};

/// A model's matrices, packed without loss: those of all layers and the head, or the head alone.
pub struct Packed {
    tiles: Buffer<u8>,
    more: Buffer<u16>,
    /// `[matrices]`
    scales: Buffer<f32>,
    /// The host's copy of `scales`, once all matrices are packed.
    factors: Vec<f32>,
    /// `[matrices][2][2]`: as [`Pack::counts`].
    counts: Buffer<u32>,
    /// As [`Pack::notes`].
    notes: Buffer<u32>,
    list_bytes: u32,
    /// The chunk at which each matrix begins; and the last one's end.
    bases: Vec<u64>,
}

/// Packing is worth its work if it leaves at most this share of bf16's bytes.
const WORTH: f64 = 0.85;
/// The bytes of a list are a multiple of this.
const LIST_STEP: u32 = 16;
/// Most bytes of a list. A slice and the list are a row of a TMA box, which has at most 256 words of 8 bytes.
const LONGEST_LIST: u32 = 256 * 8 - PACKED_SLICE;
/// At most one in this many tiles may have more escapes than its list has room for. Kernels have to wait for those
/// escapes, which are in the model's list.
const SELDOM: u64 = 200;

/// Most chunks of a launch: a grid has no more in its second dimension.
const MOST_CHUNKS: u32 = 65_535;

impl Packed {
    /// Allocates memory for matrices of these `sizes` (N-tiles and input features of each), which take `size` when
    /// packed.
    ///
    /// # Errors
    /// [`Error::PackedSize`], too little memory, or a driver error.
    pub fn new(device: &Device, sizes: impl IntoIterator<Item = (u32, u32)>, size: PackedSize) -> Result<Self, Error> {
        let list_bytes = size.list_bytes;
        if !(LIST_STEP..=LONGEST_LIST).contains(&list_bytes) || !list_bytes.is_multiple_of(LIST_STEP) {
            return Err(Error::PackedSize { list_bytes, most: LONGEST_LIST });
        }
        let bases = bases(sizes, device.sms());
        let matrices = bases.len() - 1;
        let tiles = [bases[matrices] as usize, chunk_bytes(list_bytes) as usize];
        Ok(Self {
            tiles: device.zeroed_array("the packed weights", &tiles)?,
            more: device.zeroed(more_room(size.plain, size.beyond) as usize)?,
            scales: device.zeroed(matrices)?,
            factors: vec![1.0; matrices],
            counts: device.zeroed(4 * matrices)?,
            notes: device.zeroed(2)?,
            list_bytes,
            bases,
        })
    }

    /// Allocates memory for a model's head alone, which takes `size` when packed. The layers' matrices keep their
    /// numbers, and have no tiles.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn of_head(device: &Device, config: &Config, size: PackedSize) -> Result<Self, Error> {
        Self::new(device, Self::head_sizes(config), size)
    }

    /// N-tiles and input features of each matrix where the head alone is packed.
    pub(crate) fn head_sizes(config: &Config) -> impl Iterator<Item = (u32, u32)> {
        config.gemms().map(|gemm: Gemm| {
            let (n_tiles, k) = n_tiles(&gemm);
            if gemm.matrix == Matrix::Head { (n_tiles, k) } else { (0, k) }
        })
    }

    /// Checks that the packed weights are on `device`, laid out for it, and of matrices of these `sizes`. `what` names
    /// them in the error.
    ///
    /// # Errors
    /// [`Error::Weights`].
    pub(crate) fn check(
        &self,
        what: &'static str,
        device: &Device,
        sizes: impl IntoIterator<Item = (u32, u32)>,
    ) -> Result<(), Error> {
        check_bases(what, (self.tiles.device(), device), &self.bases, &bases(sizes, device.sms()))
    }

    /// Enqueues the packing of matrix `number` from `from`: its bf16 weights in a stream, which are laid out by then.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no such matrix: a bug of the caller.
    pub(crate) fn pack(&self, device: &Device, number: usize, from: StreamMatrix) -> Result<(), Error> {
        // SAFETY: within the buffers; the matrix begins there in its stream.
        let pack = unsafe {
            Pack {
                stream: from.stream.at(from.base as usize * CHUNK_BYTES as usize / 2),
                counts: self.counts.ptr_mut().at(4 * number),
                tiles: self.tiles.ptr_mut().at(self.tiles_at(number)),
                more: self.more.ptr_mut(),
                notes: self.notes.ptr_mut(),
                scale: self.scales.ptr_mut().at(number),
                more_room: self.more.len() as u32,
                list_bytes: self.list_bytes,
                first: 0,
            }
        };
        for (first, chunks) in self.grids(number) {
            // SAFETY: the chunks are the matrix's.
            unsafe { device.launch::<lossless::count_escapes>((K_PARTIALS, chunks), 0, Pack { first, ..pack })? };
        }
        for (first, chunks) in self.grids(number) {
            // SAFETY: the chunks are the matrix's, and every one of them has its tiles.
            unsafe { device.launch::<lossless::pack_weights>((K_PARTIALS, chunks), 0, Pack { first, ..pack })? };
        }
        Ok(())
    }

    /// Once all matrices are packed: whether nothing was lost, which is so if every tile could be packed and every
    /// escape had room. Waits for the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn finish(&mut self) -> Result<bool, Error> {
        self.scales.read(0, &mut self.factors)?;
        let [beyond, unfit] = self.read_notes()?;
        Ok(unfit == 0 && beyond as usize <= self.more.len())
    }

    /// Enqueues the unpacking of a layer's weights into `stream`.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no such layer: a bug of the caller.
    pub(crate) fn make_layer(&self, device: &Device, layer: usize, stream: &Stream) -> Result<(), Error> {
        let matrix = Matrix::OF_LAYER[0].number(layer);
        let [first, second, third, fourth, end] =
            [0, 1, 2, 3, 4].map(|i| (self.bases[matrix + i] / u64::from(GROUP_N_TILES)) as u32);
        let chunks = end - first;
        assert!(u64::from(chunks * GROUP_N_TILES) <= stream.layer_chunks() && chunks <= MOST_CHUNKS, "{chunks} chunks");
        let unpack = Unpack {
            weights: self.parts(),
            stream: stream.weights().ptr_mut(),
            first,
            matrix: matrix as u32,
            bounds: [second, third, fourth].map(|bound| bound - first),
        };
        let shared = GROUP_N_TILES * Lossless::tile_bytes(self.list_bytes);
        // SAFETY: the layer has so many chunks, here and in the stream.
        unsafe { device.launch_whole::<lossless::unpack_weights>((K_PARTIALS, chunks), shared, unpack) }
    }

    /// The launches over a matrix's chunks of 8 N-tiles: for each its first chunk, and how many chunks it takes.
    fn grids(&self, number: usize) -> impl Iterator<Item = (u32, u32)> {
        let chunks = ((self.bases[number + 1] - self.bases[number]) / u64::from(GROUP_N_TILES)) as u32;
        let firsts = (0..chunks).step_by(MOST_CHUNKS as usize);
        firsts.map(move |first| (first, (chunks - first).min(MOST_CHUNKS)))
    }

    /// The byte of `tiles` at which a matrix begins.
    fn tiles_at(&self, number: usize) -> usize {
        (self.bases[number] * chunk_bytes(self.list_bytes)) as usize
    }

    /// Where the packed weights are, as kernels take them.
    pub fn parts(&self) -> Lossless {
        Lossless {
            tiles: self.tiles.ptr(),
            more: self.more.ptr(),
            scales: self.scales.ptr(),
            list_bytes: self.list_bytes,
        }
    }

    /// The array by which the step of many sequences reads the packed weights, with TMA.
    pub fn stages(&self) -> Array {
        Lossless::stages(self.tiles.ptr().addr(), self.chunks(), self.list_bytes)
    }

    /// The chunk at which a layer's matrix begins.
    pub fn base(&self, layer: usize, matrix: Matrix) -> u64 {
        self.bases[matrix.number(layer)]
    }

    /// Chunks of all matrices.
    pub fn chunks(&self) -> u64 {
        self.bases[self.bases.len() - 1]
    }

    /// What the sums of a layer's matrix are multiplied with: 1, or 0.5 if it is stored doubled.
    pub fn scale(&self, layer: usize, matrix: Matrix) -> f32 {
        self.factors[matrix.number(layer)]
    }

    /// How many escapes found no room in lists, and how many tiles cannot be packed. Waits for the device.
    fn read_notes(&self) -> Result<[u32; 2], Error> {
        let mut notes = [0; 2];
        self.notes.read(0, &mut notes)?;
        Ok(notes)
    }

    /// Bytes of the packed weights: tiles, escapes beyond their lists, and scales.
    pub fn bytes(&self) -> u64 {
        (self.tiles.len() + 2 * self.more.len() + 4 * self.scales.len()) as u64
    }
}

/// Bytes of an N-tile's chunk with lists of so many bytes.
fn chunk_bytes(list_bytes: u32) -> u64 {
    u64::from(K_PARTIALS * Lossless::tile_bytes(list_bytes))
}

/// How many escapes beyond lists there is to be room for, in matrices that take `plain` bytes in bf16 and have
/// `sampled` such escapes by a sample. Room for twice as many; and for one in 16 tiles and some more, should the sample
/// have met too few.
fn more_room(plain: u64, sampled: u64) -> u64 {
    let tiles = plain / u64::from(2 * TILE_WEIGHTS);
    sampled.saturating_mul(2).saturating_add(tiles / 16 + (1 << 14)).min(MOST_BEYOND)
}

/// The escapes of all tiles. Entry `n` says how many tiles have `n` escapes.
fn escapes_of<T: Copy + Into<u64>>(tiles_by_escapes: &[T]) -> u64 {
    (0..).zip(tiles_by_escapes).map(|(n, &tiles): (u64, _)| n * tiles.into()).sum()
}

/// Escapes for which lists of so many bytes have no room.
fn beyond(tiles_by_escapes: &[u64], list_bytes: u32) -> u64 {
    let room = u64::from(Lossless::room(list_bytes));
    (0..).zip(tiles_by_escapes).map(|(n, tiles): (u64, _)| n.saturating_sub(room) * tiles).sum()
}

/// The fewest bytes of a list for which nearly all tiles have room for their escapes. None if the weights would not be
/// small enough with such lists.
fn list_bytes(tiles_by_escapes: &[u64]) -> Option<u32> {
    let plain = f64::from(2 * TILE_WEIGHTS);
    let most =
        |list_bytes: u32| list_bytes <= LONGEST_LIST && f64::from(Lossless::tile_bytes(list_bytes)) <= WORTH * plain;
    let tiles: u64 = tiles_by_escapes.iter().sum();
    let enough = |list_bytes: &u32| {
        let room = Lossless::room(*list_bytes) as usize;
        let short: u64 = tiles_by_escapes.iter().skip(room + 1).sum();
        short * SELDOM <= tiles
    };
    (1..).map(|n| n * LIST_STEP).take_while(|&bytes| most(bytes)).find(enough)
}

#[cfg(test)]
mod tests {
    use gpu_kernels::weights::lossless::MOST_ESCAPES;

    use super::*;

    fn counts(tiles: &[(usize, u64)]) -> Vec<u64> {
        let mut counts = vec![0; MOST_ESCAPES as usize + 1];
        tiles.iter().for_each(|&(n, tiles)| counts[n] = tiles);
        counts
    }

    #[test]
    fn lists_have_room_in_all_but_one_tile_in_two_hundred() {
        // Of a list's 80 bytes, 8 are its header.
        assert_eq!(list_bytes(&counts(&[(36, 995), (90, 5)])), Some(80));
        assert_eq!(list_bytes(&counts(&[(37, 995), (90, 5)])), Some(96));
        assert_eq!(list_bytes(&counts(&[(36, 900), (90, 100)])), Some(192));
        assert_eq!(list_bytes(&counts(&[(4, 10)])), Some(16));
        assert_eq!(beyond(&counts(&[(36, 900), (37, 2), (90, 3)]), 80), 2 + 3 * 54);
    }

    #[test]
    fn what_has_too_many_escapes_is_not_packed() {
        assert_eq!(list_bytes(&counts(&[(1000, 10)])), None);
        // With one escape more, a slice and its list are too long for a row of a TMA box.
        assert_eq!(list_bytes(&counts(&[(316, 10)])), Some(640));
        assert_eq!(list_bytes(&counts(&[(317, 10)])), None);
    }
}
