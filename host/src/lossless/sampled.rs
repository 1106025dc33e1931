//! How many bytes matrices take when packed without loss, estimated on the host from some of their tiles.

use gpu_kernels::linear::{K_PARTIALS, N_TILE, SLICE};
use gpu_kernels::stream::{CHUNK_BYTES, CHUNK_FEATURES};
use gpu_kernels::weights::lossless::{FURTHEST, MOST_BEYOND, MOST_ESCAPES};
use half::bf16;
use model::plan::Matrix;
use model::{Checkpoint, Weight};
use rayon::prelude::*;

use super::{beyond, chunk_bytes, escapes_of, list_bytes, more_room};
use crate::Error;
use crate::stream;

/// How many bytes the matrices that a decode step reads take, as bf16 and packed without loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedSize {
    /// Bytes in bf16.
    pub plain: u64,
    /// Bytes when packed without loss.
    pub packed: u64,
    /// Bytes of a tile's list of escapes.
    pub list_bytes: u32,
    /// Escapes for which lists have no room, as estimated from the sample.
    pub beyond: u64,
}

/// Some rows of a matrix, from which its packed size is estimated.
pub struct Sample {
    n_tiles: u32,
    k: u32,
    rows: Vec<Vec<u16>>,
}

impl Sample {
    /// A sample of a matrix of `n_tiles` N-tiles and `k` input features: some of its `rows`, `k` elements each, one
    /// after another. Their number is best a multiple of 16, an N-tile's rows.
    pub fn new(n_tiles: u32, k: u32, rows: &[bf16]) -> Self {
        let rows = rows.chunks(k as usize).map(|row| row.iter().map(|weight| weight.to_bits()).collect());
        Self { n_tiles, k, rows: rows.collect() }
    }

    /// A sample of the matrix made of `parts`, which lie one after another or, if `beside`, alternate in groups of
    /// eight rows. It takes one N-tile in `every`, and `first` decides with which it begins.
    fn of(first: usize, parts: &[&Weight<'_>], beside: bool, every: usize) -> Result<Self, Error> {
        let n_tiles = parts.iter().map(|part| part.shape()[0]).sum::<usize>().div_ceil(N_TILE as usize);
        let sampled = (first % every.min(n_tiles)..n_tiles).step_by(every);
        let rows = sampled.map(|n_tile| rows_of(parts, n_tile, beside)).collect::<Result<Vec<_>, _>>()?.concat();
        Ok(Self { n_tiles: n_tiles as u32, k: parts[0].shape()[1] as u32, rows })
    }

    /// How many of the matrix's tiles have `n` escapes, for each `n`, if all tiles are like the sample's. None if some
    /// tile cannot be packed.
    fn counts(&self) -> Option<Vec<u64>> {
        let mut counts = [(); 2].map(|()| vec![0; MOST_ESCAPES as usize + 1]);
        self.rows.chunks(N_TILE as usize).for_each(|rows| count_n_tile(rows, &mut counts));
        // With weights as they are or doubled, whichever has fewer escapes.
        let fits = |counts: &Vec<u64>| counts[MOST_ESCAPES as usize] == 0;
        let best = counts.into_iter().filter(fits).min_by_key(|counts| escapes_of(counts))?;
        let tiles = u64::from(self.n_tiles * self.k.div_ceil(CHUNK_FEATURES) * K_PARTIALS);
        let sampled: u64 = best.iter().sum();
        Some(best.into_iter().map(|count| (count * tiles).div_ceil(sampled)).collect())
    }

    /// The matrix's N-tiles and input features.
    pub const fn size(&self) -> (u32, u32) {
        (self.n_tiles, self.k)
    }
}

/// How many tiles have `n` escapes, for each `n`: with weights as they are, and doubled.
type Counts = [Vec<u64>; 2];

impl PackedSize {
    /// One N-tile in this many is looked at to tell how many bytes packing saves.
    pub const SAMPLED: usize = 64;
    /// One N-tile in this many is looked at to tell how much memory packed weights take.
    pub const SPARSELY: usize = 512;

    /// Estimates the size of a `checkpoint`'s matrices from one in `every` N-tiles of each. None if their exponents are
    /// too far apart for packing, or if packing would not save enough.
    ///
    /// # Errors
    /// An error of reading the checkpoint.
    pub fn of(checkpoint: &Checkpoint, every: usize) -> Result<Option<Self>, Error> {
        let (config, weights) = (&checkpoint.config, checkpoint.weights()?);
        let layers = weights.layers.iter().enumerate();
        let of_layers = layers.flat_map(|(i, layer)| {
            Matrix::OF_LAYER.map(|matrix| (matrix.number(i), layer.parts(matrix), matrix == Matrix::GateUp))
        });
        let head = (Matrix::Head.number(config.num_hidden_layers), vec![&weights.head], false);
        let matrices: Vec<_> = of_layers.chain([head]).collect();
        // Each sample is counted by the thread that has read it, and then dropped.
        let counted = |(number, parts, beside): &(usize, Vec<_>, bool)| {
            let sample = Sample::of(*number, parts, *beside, every)?;
            Ok::<_, Error>((sample.size(), sample.counts()))
        };
        let counted = matrices.par_iter().map(counted).collect::<Result<Vec<_>, _>>()?;
        let (sizes, counts): (Vec<_>, Vec<_>) = counted.into_iter().unzip();
        let counts = counts.into_iter().collect::<Option<Vec<_>>>();
        Ok(counts.and_then(|counts| Self::of_counts(sizes.into_iter(), &counts)))
    }

    /// As [`of`](Self::of), for the head alone.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub fn of_head(checkpoint: &Checkpoint, every: usize) -> Result<Option<Self>, Error> {
        Ok(Self::of_samples(&[Sample::of(0, &[&checkpoint.weights()?.head], false, every)?]))
    }

    /// Estimates the size of the matrices that these samples are of. None as for [`of`](Self::of).
    pub fn of_samples(samples: &[Sample]) -> Option<Self> {
        let counts = samples.iter().map(Sample::counts).collect::<Option<Vec<_>>>()?;
        Self::of_counts(samples.iter().map(Sample::size), &counts)
    }

    /// The size of matrices of these `sizes` (N-tiles and input features), by how many tiles of each have `n` escapes.
    fn of_counts(sizes: impl Iterator<Item = (u32, u32)>, matrices: &[Vec<u64>]) -> Option<Self> {
        let mut all = vec![0; MOST_ESCAPES as usize + 1];
        matrices.iter().for_each(|counts| all.iter_mut().zip(counts).for_each(|(all, count)| *all += count));
        let list_bytes = list_bytes(&all).filter(|&bytes| beyond(&all, bytes) <= MOST_BEYOND)?;
        let beyond = beyond(&all, list_bytes);
        let chunks = stream::chunks(sizes, 1);
        let plain = chunks * u64::from(CHUNK_BYTES);
        let lists_and_scales = 2 * more_room(plain, beyond) + 4 * matrices.len() as u64;
        Some(Self { plain, packed: chunks * chunk_bytes(list_bytes) + lists_and_scales, list_bytes, beyond })
    }
}

/// The 16 rows of an N-tile of the matrix made of `parts`, which lie one after another or, if `beside`, alternate in
/// groups of eight rows. Rows beyond the matrix are zeros.
fn rows_of(parts: &[&Weight<'_>], n_tile: usize, beside: bool) -> Result<Vec<Vec<u16>>, Error> {
    let row = |part: &Weight<'_>, row: usize| {
        let k = part.shape()[1];
        let mut bytes = vec![0; 2 * k];
        if row < part.shape()[0] {
            part.read_bf16(row * k, &mut bytes)?;
        }
        Ok(bytes.as_chunks().0.iter().map(|bits| u16::from_le_bytes(*bits)).collect())
    };
    let (width, half) = (N_TILE as usize, N_TILE as usize / 2);
    (0..width)
        .map(|i| {
            if beside {
                return row(parts[i / half], n_tile * half + i % half);
            }
            let (mut at, mut part) = (n_tile * width + i, 0);
            while part + 1 < parts.len() && at >= parts[part].shape()[0] {
                at -= parts[part].shape()[0];
                part += 1;
            }
            row(parts[part], at)
        })
        .collect()
}

/// Counts the tiles of an N-tile's rows by their escapes.
fn count_n_tile(rows: &[Vec<u16>], counts: &mut Counts) {
    let slice = SLICE as usize;
    for chunk in 0..rows[0].len().div_ceil(CHUNK_FEATURES as usize) {
        for partial in 0..K_PARTIALS as usize {
            let slices = [0, K_PARTIALS as usize].map(|half| {
                let first = chunk * CHUNK_FEATURES as usize + (partial + half) * slice;
                // Beyond a row's end the stream has zeros.
                rows.iter().flat_map(move |row| (first..first + slice).map(|i| row.get(i).copied().unwrap_or(0)))
            });
            for (counts, double) in counts.iter_mut().zip([false, true]) {
                counts[escapes(slices.clone(), double)] += 1;
            }
        }
    }
}

/// The escapes of a tile, or [`MOST_ESCAPES`] if it cannot be packed: as
/// [`count_escapes`](gpu_kernels::weights::lossless::count_escapes) finds them.
fn escapes(slices: [impl Iterator<Item = u16>; 2], double: bool) -> usize {
    let (mut all, mut top, mut least) = (0, 0, 0x7f);
    for slice in slices {
        // Weights, by the upper seven bits of their exponents.
        let mut found = [0u32; 128];
        for bits in slice {
            let times = if double { 2.0 } else { 1.0 };
            let number = bf16::from_f32(times * bf16::from_bits(bits).to_f32());
            if !number.is_finite() {
                return MOST_ESCAPES as usize;
            }
            found[usize::from(number.to_bits() >> 8 & 0x7f)] += 1;
        }
        let largest = found.iter().rposition(|&count| count > 0).unwrap_or(0);
        let outside = |base: usize| {
            let is_outside = move |&(upper, &count): &(usize, &u32)| count > 0 && !(base..base + 4).contains(&upper);
            found.iter().enumerate().filter(is_outside)
        };
        let bases = (0..8).map(|tried: usize| largest.saturating_sub(3 + tried));
        let counted = bases.map(|base| (outside(base).map(|(_, count)| count).sum::<u32>(), base));
        // Of bases with equally few escapes, the first.
        let (escapes, base) = counted.min_by_key(|&(escapes, _)| escapes).expect("there are eight");
        all += escapes;
        top = outside(base).map(|(upper, _)| upper).max().unwrap_or(0).max(top);
        least = outside(base).map(|(upper, _)| upper).filter(|&upper| upper > 0).min().unwrap_or(0x7f).min(least);
    }
    if top <= least + FURTHEST as usize { all.min(MOST_ESCAPES) as usize } else { MOST_ESCAPES as usize }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::device::Device;
    use crate::weight_storage::{MatrixFormat, WeightStorage};
    use crate::weights::DeviceWeights;

    /// An estimate from every tile is exactly what packing takes.
    #[test]
    fn all_tiles_take_what_packing_takes() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for model in ["model/demo", "tests/golden/tied_bf16", "tests/golden/separate_f16_sharded"] {
            let checkpoint = Checkpoint::open(&root.join(model)).unwrap();
            let device = Device::emulator(0);
            let size = PackedSize::of(&checkpoint, 1).unwrap().expect("packed");
            let kept = WeightStorage { plain: true, ..WeightStorage::only(MatrixFormat::Packed(size)) };
            let go_on = &mut |_, _| std::ops::ControlFlow::Continue(());
            let weights = DeviceWeights::upload(&checkpoint, &device, Some(kept), || Ok(()), go_on).unwrap();
            let packed = weights.packed().expect("packed");
            let [beyond, _] = packed.read_notes().unwrap();
            assert_eq!((size.packed, size.beyond), (packed.bytes(), u64::from(beyond)), "{model}");
        }
    }
}
