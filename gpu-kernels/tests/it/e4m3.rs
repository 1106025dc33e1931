//! Activations and weights as codes of e4m3: the codes are the nearest ones, and lie where the layout says.

use crate::common::{CodeBuffers, Random, e4m3, laid_out, reordered, run};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::e4m3::{EncodeE4m3, GROUP, encode_e4m3, groups, scale_of, scales_len};
use gpu_kernels::linear::{N_TILE, slot};
use gpu_kernels::stream::{CHUNK_BYTES, CHUNK_FEATURES, StreamMatrix, Walk, Wave};

/// How far `x` is from the value of the nearest code; beyond the largest value, that value is the nearest.
fn distance(x: f32) -> f32 {
    let codes = (0..=255u8).filter(|code| code & 0x7f != 0x7f);
    codes.map(|code| (e4m3(code) - x).abs()).fold(f32::INFINITY, f32::min)
}

/// The codes and scales of rows from `first` on, whose elements lie in the order of slots or, if `in_order`, as they
/// come. Poison is left where nothing is written.
fn quantized(x: &[bf16], k: usize, first: usize, in_order: bool) -> (Vec<u8>, Vec<f32>) {
    let rows = x.len() / k;
    let x = Buffer::from_slice(&if in_order { x.to_vec() } else { reordered(x, k, false) });
    let to = CodeBuffers::new(rows.next_multiple_of(128), k, -1.0);
    to.quantize(x.ptr(), first..rows, in_order);
    (to.codes.to_vec()[..rows * k].to_vec(), to.scales.to_vec())
}

#[test]
fn rows_become_the_nearest_codes() {
    for (rows, k, first) in [(5, 384, 0), (70, 256, 0), (140, 128, 128)] {
        let mut random = Random::new((rows + k) as u64);
        let mut x = random.bf16s(rows * k);
        // Groups of different magnitudes; one group is zeros, and one is hardly more.
        let factors: Vec<f32> = (0..rows * k / 128).map(|_| 2f32.powi(random.below(40) as i32 - 20)).collect();
        x.iter_mut().enumerate().for_each(|(i, x)| *x = bf16::from_f32(x.to_f32() * factors[i / 128]));
        let last = rows * k - 128;
        x[last..].fill(bf16::ZERO);
        x[last - 128..last].fill(bf16::from_f32(1e-31));
        let (codes, scales) = quantized(&x, k, first, false);
        for row in first..rows {
            for group in 0..groups(k as u32) as usize {
                let scale = scales[group * rows.next_multiple_of(128) + row];
                let elements = x[row * k..][..k].get(group * 128..(group + 1) * 128).unwrap_or_default();
                let most = elements.iter().fold(0f32, |most, x| most.max(x.to_f32().abs()));
                let [expected, inverse] = scale_of(most);
                assert_eq!(scale, expected, "row {row}, group {group}");
                for (i, x) in elements.iter().enumerate() {
                    // The byte of the code is the element's slot in its slice of 64.
                    let code = codes[row * k + group * 128 + i / 64 * 64 + slot(i as u32 % 64) as usize];
                    let x = x.to_f32() * inverse;
                    assert_eq!((e4m3(code) - x).abs(), distance(x), "row {row}, group {group}: {code} for {x}");
                }
            }
        }
        assert!(codes[..first * k].iter().all(|&code| code == 0xff), "rows before are left as they were");
        assert_eq!(quantized(&x, k, first, true), (codes, scales), "rows in their own order");
    }
}

const BLOCKS: u32 = 2;
/// Enough weight rows for more N-tiles than a wave of two blocks has.
const ROWS: usize = 3 * 128;

/// Makes a matrix of random codes with `k` inputs and different scales for every block, and encodes its weights as
/// those of a checkpoint are. Returns the codes, the codes that a plain reading of the layout finds, and how many warps
/// found a weight that no code makes. `spoil` changes one weight.
fn found(k: usize, is_gated: bool, spoil: bool) -> (Vec<u8>, Vec<u8>, u32) {
    let mut random = Random::new(k as u64);
    let all: Vec<u8> = (0..=255u8).filter(|code| code & 0x7f != 0x7f).collect();
    let matrix: Vec<u8> = (0..ROWS * k).map(|_| all[random.below(all.len())]).collect();
    let of_group = groups(k as u32) as usize;
    // Laid out as `Weights::scales` says: of two matrices, the second's scales are the ups'.
    let mut scales = vec![0f32; scales_len((ROWS as u32).div_ceil(N_TILE), k as u32) as usize];
    for (i, scale) in scales.iter_mut().enumerate() {
        // Scales may have any bits.
        *scale = if i % 4 < 2 { (random.uniform() * 0.3).abs() + 0.001 } else { f32::NAN };
        if !is_gated && i % 4 == 1 || i / 4 % of_group >= k / 128 {
            *scale = 0.0;
        }
    }
    if !is_gated {
        (0..scales.len()).filter(|i| i % 4 == 1).for_each(|i| scales[i] = scales[i - 1]);
    }
    let upper = |row: usize| row % 16 / 8;
    let scale = |row: usize, k: usize| scales[(row / 128 * of_group + k / 128) * 4 + upper(row)];
    let mut weights: Vec<bf16> = (0..ROWS * k).map(|i| bf16::from_f32(e4m3(matrix[i]) * scale(i / k, i % k))).collect();
    if spoil {
        weights[12_345] = bf16::from_bits(weights[12_345].to_bits() ^ 1);
    }
    // In both streams something lies before the matrix.
    let (_stream, from) = laid_out(&weights, None, k as u32, Walk { chunks: 8, ..Walk::new(BLOCKS) });
    let n_tiles = from.n_tiles;
    let (mut walk, mut waves, mut first) = (Walk { chunks: 16, ..Walk::new(BLOCKS) }, Vec::new(), 0);
    while first < n_tiles {
        let wave = walk.wave(n_tiles - first, k as u32 / 2);
        waves.push((first, wave));
        first += wave.n_tiles;
    }
    assert!(waves.len() > 1);
    let codes = Buffer::<bf16>::new_poisoned(walk.chunks as usize * CHUNK_BYTES as usize / 2);
    let (scales, strange) = (Buffer::from_slice(&scales), Buffer::from_slice(&[0u32]));
    let to = StreamMatrix { stream: codes.ptr(), base: 16, k: k as u32 / 2, ..from };
    let params = EncodeE4m3 { from, to, codes: codes.ptr_mut(), scales: scales.ptr(), strange: strange.ptr_mut() };
    run::<encode_e4m3>([n_tiles, (k as u32 / 2).div_ceil(CHUNK_FEATURES), 1], 0, 1, params);
    let bytes: Vec<u8> = codes.to_vec().into_iter().flat_map(|pair| pair.to_bits().to_le_bytes()).collect();
    let at = |row: usize, group: usize, byte: usize| {
        let tile = row as u32 / N_TILE;
        let (first, wave): &(u32, Wave) = waves.iter().rev().find(|(first, _)| *first <= tile).unwrap();
        // A core matrix is 16 bytes of eight features, so 32 bytes of a group take two of them.
        let core = row % 16 / 8 * 8 + byte / 16;
        bytes[wave.slice(tile - first, group as u32) as usize + core * 128 + row % 8 * 16 + byte % 16]
    };
    // Codes beyond the inputs in the last chunk are zero.
    let whole = k.next_multiple_of(2 * CHUNK_FEATURES as usize) / GROUP as usize;
    assert!((k / 128..whole).all(|group| (0..ROWS).all(|row| (0..128).all(|byte| at(row, group, byte) == 0))));
    let of_element = |i: usize| {
        let (row, k) = (i / k, i % k);
        at(row, k / 128, k % 128 / 64 * 64 + slot(k as u32 % 64) as usize)
    };
    (matrix, (0..ROWS * k).map(of_element).collect(), strange.to_vec()[0])
}

#[test]
fn codes_are_found_again() {
    // A partial chunk; more than one chunk; gates beside ups.
    for (k, is_gated) in [(384, false), (1024 + 256, false), (256, true)] {
        let (codes, found, strange) = found(k, is_gated, false);
        let differ = codes.iter().zip(&found).position(|(a, b)| a != b);
        assert_eq!(differ.map(|i| (i / k, i % k, codes[i], found[i])), None, "{k} inputs");
        assert_eq!(strange, 0);
    }
}

#[test]
fn a_weight_that_no_code_makes_is_noticed() {
    assert_eq!(found(384, false, true).2, 1);
}
