//! Weights packed without loss for the decode kernels (see `gpu_kernels::weights::lossless`).
//!
//! A checkpoint's [size](PackedSize) says how long lists of escapes are, by some of its tiles. So every matrix is
//! packed as soon as it is laid out, without the host, and what does not fit after all is found out at the end.

mod sampled;

use cuda_std::tensor::Array;
use gpu_kernels::linear::K_PARTIALS;
use gpu_kernels::stream::{CHUNK_BYTES, StreamMatrix, TOGETHER};
use gpu_kernels::weights::lossless::{self, Lossless, MOST_BEYOND, PACKED_SLICE, Pack, TILE_WEIGHTS, Unpack};
use model::Config;
use model::plan::{Gemm, Matrix};

use crate::Error;
use crate::device::{Buffer, Device};
use crate::stream::{Stream, bases, n_tiles};

pub use self::sampled::{PackedSize, Sample};

/// The weights of a model, packed: of all layers, and the head; or the head alone.
pub struct Packed {
    tiles: Buffer<u8>,
    more: Buffer<u16>,
    /// `[matrices]`
    scales: Buffer<f32>,
    /// What is in it, once all are packed.
    factors: Vec<f32>,
    /// `[matrices][2][2]`: as [`Pack::counts`].
    counts: Buffer<u32>,
    /// As [`Pack::notes`].
    notes: Buffer<u32>,
    list_bytes: u32,
    /// The chunk at which each matrix begins; and the last one's end.
    bases: Vec<u64>,
}

/// The most that packing may leave of bf16's bytes for it to be worth its work.
const WORTH: f64 = 0.85;
/// Bytes by which lists differ.
const LIST_STEP: u32 = 16;
/// The longest lists: with a slice they are a row of a box, of which TMA takes at most 256 words.
const LONGEST_LIST: u32 = 256 * 8 - PACKED_SLICE;
/// One in so many tiles may have more escapes than its list has room for: the others are waited for.
const SELDOM: u64 = 200;

/// Launches over so many chunks at a time: a grid has no more in its second dimension.
const MOST_CHUNKS: u32 = 65_535;

impl Packed {
    /// Memory for matrices of so many N-tiles and input features each, that have this size packed.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, sizes: impl IntoIterator<Item = (u32, u32)>, size: PackedSize) -> Result<Self, Error> {
        let bases = bases(sizes, device.sms());
        let matrices = bases.len() - 1;
        Ok(Self {
            tiles: device.zeroed((bases[matrices] * chunk_bytes(size.list_bytes)) as usize)?,
            more: device.zeroed(more_room(size.plain, size.beyond) as usize)?,
            scales: device.zeroed(matrices)?,
            factors: vec![1.0; matrices],
            counts: device.zeroed(4 * matrices)?,
            notes: device.zeroed(2)?,
            list_bytes: size.list_bytes,
            bases,
        })
    }

    /// Memory for the head of a model alone, that has this size packed.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn of_head(device: &Device, config: &Config, size: PackedSize) -> Result<Self, Error> {
        let of_head = |gemm: Gemm| {
            let (n_tiles, k) = n_tiles(&gemm);
            if gemm.matrix == Matrix::Head { (n_tiles, k) } else { (0, k) }
        };
        Self::new(device, config.gemms().map(of_head), size)
    }

    /// Enqueues that matrix `number` is packed, which is `from` by then.
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
            // SAFETY: likewise, and every one of them has its tiles.
            unsafe { device.launch::<lossless::pack_weights>((K_PARTIALS, chunks), 0, Pack { first, ..pack })? };
        }
        Ok(())
    }

    /// Once all matrices are packed, whether they are what they were: no tile was beyond packing, and every escape had
    /// room. Waits for the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn finish(&mut self) -> Result<bool, Error> {
        self.scales.read(0, &mut self.factors)?;
        let [beyond, unfit] = self.read_notes()?;
        Ok(unfit == 0 && beyond as usize <= self.more.len())
    }

    /// Enqueues that `stream` has a layer's weights again.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no such layer: a bug of the caller.
    pub(crate) fn make_layer(&self, device: &Device, layer: usize, stream: &Stream) -> Result<(), Error> {
        let matrix = Matrix::OF_LAYER[0].number(layer);
        let [first, second, third, fourth, end] =
            [0, 1, 2, 3, 4].map(|i| (self.bases[matrix + i] / u64::from(TOGETHER)) as u32);
        let chunks = end - first;
        assert!(u64::from(chunks * TOGETHER) <= stream.layer_chunks() && chunks <= MOST_CHUNKS, "{chunks} chunks");
        let unpack = Unpack {
            weights: self.parts(),
            stream: stream.weights().ptr_mut(),
            first,
            matrix: matrix as u32,
            bounds: [second, third, fourth].map(|bound| bound - first),
        };
        let shared = TOGETHER * Lossless::tile_bytes(self.list_bytes);
        // SAFETY: the layer has so many chunks, here and in the stream.
        unsafe { device.launch_whole::<lossless::unpack_weights>((K_PARTIALS, chunks), shared, unpack) }
    }

    /// The chunks of 8 N-tiles of a matrix, as the first ones and the numbers of launches over all of them.
    fn grids(&self, number: usize) -> impl Iterator<Item = (u32, u32)> {
        let chunks = ((self.bases[number + 1] - self.bases[number]) / u64::from(TOGETHER)) as u32;
        let firsts = (0..chunks).step_by(MOST_CHUNKS as usize);
        firsts.map(move |first| (first, (chunks - first).min(MOST_CHUNKS)))
    }

    /// Where a matrix begins, in bytes.
    fn tiles_at(&self, number: usize) -> usize {
        (self.bases[number] * chunk_bytes(self.list_bytes)) as usize
    }

    /// Where they are.
    pub fn parts(&self) -> Lossless {
        Lossless {
            tiles: self.tiles.ptr(),
            more: self.more.ptr(),
            scales: self.scales.ptr(),
            list_bytes: self.list_bytes,
        }
    }

    /// How the step of many sequences reads them.
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

    /// What the sums of a layer's matrix are multiplied with.
    pub fn scale(&self, layer: usize, matrix: Matrix) -> f32 {
        self.factors[matrix.number(layer)]
    }

    /// How many escapes found no room in lists, and how many tiles cannot be packed. Waits for the device.
    fn read_notes(&self) -> Result<[u32; 2], Error> {
        let mut notes = [0; 2];
        self.notes.read(0, &mut notes)?;
        Ok(notes)
    }

    /// Where they are.
    pub(crate) fn device(&self) -> &Device {
        self.tiles.device()
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        (self.tiles.len() + 2 * self.more.len() + 4 * self.scales.len()) as u64
    }
}

/// Bytes of an N-tile's chunk with lists of so many bytes.
fn chunk_bytes(list_bytes: u32) -> u64 {
    u64::from(K_PARTIALS * Lossless::tile_bytes(list_bytes))
}

/// Room for escapes beyond lists' room, of matrices of so many bytes in bf16 that have so many by a sample: for twice
/// as many, and for one in 16 tiles and some, should the sample have met few.
fn more_room(plain: u64, sampled: u64) -> u64 {
    let tiles = plain / u64::from(2 * TILE_WEIGHTS);
    (2 * sampled + tiles / 16 + (1 << 14)).min(MOST_BEYOND)
}

/// How many escapes there are in all.
fn escapes_of<T: Copy + Into<u64>>(tiles_by_escapes: &[T]) -> u64 {
    (0..).zip(tiles_by_escapes).map(|(n, &tiles): (u64, _)| n * tiles.into()).sum()
}

/// Escapes for which lists of so many bytes have no room.
fn beyond(tiles_by_escapes: &[u64], list_bytes: u32) -> u64 {
    let room = u64::from(Lossless::room(list_bytes));
    (0..).zip(tiles_by_escapes).map(|(n, tiles): (u64, _)| n.saturating_sub(room) * tiles).sum()
}

/// The smallest lists that have room in nearly all tiles; none if the weights would take too much with them.
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
        // Of 80 bytes 8 are the header's.
        assert_eq!(list_bytes(&counts(&[(36, 995), (90, 5)])), Some(80));
        assert_eq!(list_bytes(&counts(&[(37, 995), (90, 5)])), Some(96));
        assert_eq!(list_bytes(&counts(&[(36, 900), (90, 100)])), Some(192));
        assert_eq!(list_bytes(&counts(&[(4, 10)])), Some(16));
        assert_eq!(beyond(&counts(&[(36, 900), (37, 2), (90, 3)]), 80), 2 + 3 * 54);
    }

    #[test]
    fn what_has_too_many_escapes_is_not_packed() {
        assert_eq!(list_bytes(&counts(&[(1000, 10)])), None);
        // One escape more, and a slice and its list are no row of a box.
        assert_eq!(list_bytes(&counts(&[(316, 10)])), Some(640));
        assert_eq!(list_bytes(&counts(&[(317, 10)])), None);
    }
}
