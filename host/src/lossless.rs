//! Weights packed without loss for the decode kernels (see `gpu_kernels::weights::lossless`).

mod sampled;

use cuda_std::GlobalMut;
use cuda_std::tensor::Array;
use gpu_kernels::stream::TOGETHER;
use gpu_kernels::weights::lossless::{self, Lossless, MOST_BEYOND, MOST_ESCAPES, Pack, TILE_WEIGHTS};
use half::bf16;

use crate::Error;
use crate::device::{Buffer, Device};

pub use self::sampled::PackedSize;

/// The weights of a model, packed.
pub struct Packed {
    regions: Buffer<u8>,
    more: Buffer<u16>,
    scales: Buffer<f32>,
    /// What is in it.
    factors: Vec<f32>,
    list_bytes: u32,
}

/// The most that packing may leave of bf16's bytes for it to be worth its work.
const WORTH: f64 = 0.85;
/// Bytes by which lists differ.
const LIST_STEP: u32 = 16;
/// One in so many tiles may have more escapes than its list has room for: the others are waited for.
const SELDOM: u64 = 200;

/// How many tiles have so many escapes.
type Counts = Vec<u32>;

/// How one matrix is packed.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    /// Its first chunk of 8 N-tiles, and one beyond its last.
    chunks: [u32; 2],
    double: bool,
}

/// Launches over so many chunks at a time: a grid has no more in its second dimension.
const MOST_CHUNKS: u32 = 65_535;

impl Packed {
    /// Packs the `stream`, whose matrices begin at these `bounds`, in chunks, the last of which is the end. None if it
    /// would not be smaller enough, or if some weights are too far apart.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, stream: &Buffer<bf16>, bounds: &[u64]) -> Result<Option<Self>, Error> {
        let mut counts: Buffer<u32> = device.zeroed(MOST_ESCAPES as usize + 1)?;
        let mut all = vec![0u64; MOST_ESCAPES as usize + 1];
        let mut matrices = Vec::new();
        for bounds in bounds.windows(2) {
            let chunks = [bounds[0], bounds[1]].map(|chunk| (chunk / u64::from(TOGETHER)) as u32);
            let mut best: Option<(u64, Matrix, Counts)> = None;
            for double in [false, true] {
                counts.clear()?;
                let matrix = Matrix { chunks, double };
                let pack = Pack { counts: counts.ptr_mut(), ..pack(stream, &matrix) };
                let count = |pack, chunks| {
                    // SAFETY: the chunks are the stream's, and there is a count for every number of escapes.
                    unsafe { device.launch::<lossless::count_escapes>((4, chunks), 0, pack) }
                };
                matrix.each(count, pack)?;
                let mut found = vec![0; counts.len()];
                counts.read(0, &mut found)?;
                let escapes = escapes_of(&found);
                let unfit = found[MOST_ESCAPES as usize] > 0;
                if !unfit && best.as_ref().is_none_or(|(fewest, ..)| escapes < *fewest) {
                    best = Some((escapes, matrix, found));
                }
            }
            let Some((_, matrix, found)) = best else { return Ok(None) };
            all.iter_mut().zip(found).for_each(|(all, tiles)| *all += u64::from(tiles));
            matrices.push(matrix);
        }
        let Some(list_bytes) = list_bytes(&all).filter(|&bytes| beyond(&all, bytes) <= MOST_BEYOND) else {
            return Ok(None);
        };
        let regions = bounds.last().unwrap_or(&0) / u64::from(TOGETHER) * u64::from(lossless::REGIONS);
        let factors: Vec<f32> = matrices.iter().map(|matrix| if matrix.double { 0.5 } else { 1.0 }).collect();
        let packed = Self {
            regions: device.zeroed((regions * u64::from(Lossless::region_bytes(list_bytes))) as usize)?,
            more: device.zeroed(beyond(&all, list_bytes) as usize)?,
            scales: device.upload(&factors)?,
            factors,
            list_bytes,
        };
        let more_count: Buffer<u32> = device.zeroed(1)?;
        for matrix in &matrices {
            let pack = Pack {
                regions: packed.regions.ptr_mut(),
                more: packed.more.ptr_mut(),
                more_count: more_count.ptr_mut(),
                list_bytes,
                ..pack(stream, matrix)
            };
            let pack_all = |pack, chunks| {
                // SAFETY: the chunks are the stream's, every one of them has its regions, and every escape has room.
                unsafe { device.launch::<lossless::pack_weights>((4, chunks), 0, pack) }
            };
            matrix.each(pack_all, pack)?;
        }
        // What counts them goes when the kernels are done.
        device.synchronize()?;
        Ok(Some(packed))
    }

    /// Where they are.
    pub fn parts(&self) -> Lossless {
        Lossless {
            regions: self.regions.ptr(),
            more: self.more.ptr(),
            scales: self.scales.ptr(),
            list_bytes: self.list_bytes,
        }
    }

    /// How TMA reads them.
    pub fn arrays(&self) -> [Array; 2] {
        let regions = self.regions.len() / Lossless::region_bytes(self.list_bytes) as usize;
        Lossless::maps(self.regions.ptr().addr(), regions as u64, self.list_bytes)
    }

    /// What the sums of the matrix with this index are multiplied with.
    pub fn scale(&self, matrix: usize) -> f32 {
        self.factors[matrix]
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        (self.regions.len() + 2 * self.more.len() + 4 * self.scales.len()) as u64
    }
}

impl Matrix {
    /// Calls `launch` for all of the matrix's chunks, with its parameters and how many they are.
    fn each(&self, mut launch: impl FnMut(Pack, u32) -> Result<(), Error>, pack: Pack) -> Result<(), Error> {
        let [mut first, end] = self.chunks;
        while first < end {
            let chunks = (end - first).min(MOST_CHUNKS);
            launch(Pack { first, ..pack }, chunks)?;
            first += chunks;
        }
        Ok(())
    }
}

/// What both kernels are told of a matrix.
fn pack(stream: &Buffer<bf16>, matrix: &Matrix) -> Pack {
    Pack {
        stream: stream.ptr(),
        counts: GlobalMut::default(),
        regions: GlobalMut::default(),
        more: GlobalMut::default(),
        more_count: GlobalMut::default(),
        list_bytes: LIST_STEP,
        first: matrix.chunks[0],
        double: matrix.double.into(),
    }
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
    let most = |list_bytes: u32| f64::from(Lossless::region_bytes(list_bytes) / TOGETHER) <= WORTH * plain;
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
    }
}
