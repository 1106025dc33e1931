//! Codes of quantised weights: they mean what the definition says, to the bit, and are found again from the weights
//! that they made.

use crate::common::{Random, e4m3, run};
use cuda_std::Global;
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::linear::N_TILE;
use gpu_kernels::stream::{CHUNK_BYTES, CHUNK_FEATURES, GROUP_N_TILES, LayOut, StreamMatrix, Walk, Wave, lay_out};
use gpu_kernels::weights::quantized::{
    Code, Dequantize, Fp8, GROUP, GROUPS, Int4, Quantize, Scale, dequantize_fp8, dequantize_int4, dequantize_int4_f16,
    quantize_fp8, quantize_int4, quantize_int4_f16,
};

/// The bits of the weight that a code means.
fn meaning(bits: u32, code: u32, scale: f32, zero: u8) -> u16 {
    let value = if bits == 4 { code as f32 - f32::from(zero) } else { e4m3(code as u8) };
    bf16::from_f32(value * scale).to_bits()
}

/// A scale as checkpoints have it: in bf16, or in f16, which has three bits more.
fn scale(random: &mut Random, half: bool) -> f32 {
    let scale = (random.uniform().abs() + 0.01) * 2f32.powi(-(random.below(9) as i32));
    if half { half::f16::from_f32(scale).to_f32() } else { bf16::from_f32(scale).to_f32() }
}

/// A scale for the zero point `zero`, and that zero point.
fn scale_and_zero<C: Code>(random: &mut Random, half: bool, zero: u8) -> (f32, u8) {
    let zero = if C::BITS == 4 { zero } else { 0 };
    let scale = scale(random, C::PARTS == 2 && half);
    // With four significant bits, a scale times any zero point is a bf16.
    let is_bf16 = bf16::from_f32(scale * f32::from(zero)).to_f32() == scale * f32::from(zero);
    let few = f32::from_bits(scale.to_bits() >> 20 << 20);
    (if C::PARTS == 2 || is_bf16 { scale } else { few }, zero)
}

/// All codes but NaN.
fn codes(bits: u32) -> impl Iterator<Item = u32> {
    (0..1 << bits).filter(move |code| bits == 4 || code & 0x7f != 0x7f)
}

fn every_code_is_exact<C: Code>() {
    let mut random = Random::new(1);
    for i in 0..400 {
        let (value, zero) = scale_and_zero::<C>(&mut random, i % 2 == 0, (i % 17) as u8);
        let stored = Scale::new::<C>(value, zero).unwrap_or_else(|| panic!("no scale {value}"));
        let other = Scale::new::<C>(0.5, 3 * u8::from(C::BITS == 4)).unwrap();
        for code in codes(C::BITS) {
            // Lower rows have registers 0 and 2, upper ones 1 and 3.
            let fragment = C::decode_whole(
                C::join([[code, 1], [1, code], [1, code], [code, 1]]),
                &[stored.factors::<C>(false), other.factors::<C>(true)],
            );
            let expected = meaning(C::BITS, code, value, zero);
            assert_eq!(fragment[0] as u16, expected, "code {code} × {value}, zero {zero}");
            assert_eq!((fragment[2] >> 16) as u16, expected, "code {code} × {value}, zero {zero}");
            let upper = C::decode_whole(
                C::join([[1, code], [code, 1], [code, 1], [1, code]]),
                &[other.factors::<C>(false), stored.factors::<C>(true)],
            );
            assert_eq!([upper[1] as u16, (upper[3] >> 16) as u16], [expected; 2], "code {code} × {value}, zero {zero}");
            let of_other = meaning(C::BITS, code, 0.5, 3 * u8::from(C::BITS == 4));
            assert_eq!([(fragment[1] >> 16) as u16, fragment[3] as u16], [of_other; 2], "code {code}");
            // The weight is encoded again: as the same code, or as one with the same meaning.
            let weight = bf16::from_bits(expected).to_f32();
            let found = C::encode(weight, stored);
            assert_eq!(meaning(C::BITS, found, value, zero), expected, "code {code} × {value}, zero {zero}: {found}");
        }
    }
}

#[test]
fn every_code_of_int4_is_exact() {
    every_code_is_exact::<Int4<1>>();
    every_code_is_exact::<Int4<2>>();
}

#[test]
fn every_code_of_fp8_is_exact() {
    every_code_is_exact::<Fp8>();
}

#[test]
fn scales_of_many_bits_are_refused() {
    assert_eq!(Scale::new::<Int4<2>>(1.0 + 2f32.powi(-9) + 2f32.powi(-14), 8), None);
    assert_eq!(Scale::new::<Int4<2>>(0.1, 8), None);
    assert_eq!(Scale::new::<Fp8>(1e30, 0), None);
    assert_eq!(Scale::new::<Int4<2>>(1.0, 17), None);
    assert_eq!(Scale::new::<Int4<1>>(1.0 + 2f32.powi(-10), 16), None);
    assert!(Scale::new::<Int4<2>>(1.0 + 2f32.powi(-10), 16).is_some());
    // For a scale of one part, the product with the zero point has to be a bf16, and the scale within bounds.
    assert!(Scale::new::<Int4<1>>(1.0 + 2f32.powi(-7), 8).is_some());
    assert_eq!(Scale::new::<Int4<1>>(1.0 + 2f32.powi(-7), 7), None);
    assert!(Scale::new::<Int4<2>>(1.0 + 2f32.powi(-7), 7).is_some());
    assert_eq!(Scale::new::<Int4<1>>(8.0, 8), None);
    assert_eq!(Scale::new::<Int4<1>>(2f32.powi(-101), 8), None);
}

const BLOCKS: u32 = 3;
/// More N-tiles than a wave of three blocks has. The inputs are three chunks, of which the last is partial.
const ROWS: usize = 27 * 16 - 5;
const INPUTS: usize = 2 * 512 + 256;

/// The code of a weight, by what the layout says of where it is.
fn code_at<C: Code>(codes: &[u8], waves: &[(u32, Wave)], row: usize, k: usize) -> u32 {
    let (tile, q) = (row / 16, k / 512);
    let (first, wave) = waves.iter().rev().find(|(first, _)| *first as usize <= tile).unwrap();
    let place = tile - *first as usize;
    let chunk = wave.group(place as u32, q as u32) as usize;
    let (slice, within) = (k % 512 / 64, k % 64);
    // `lay_out` gives a lane eight inputs in a row of each half of a slice: a fragment is four of them.
    let (half, t, pair) = (within / 32, within / 8 % 4, within % 8);
    let fragment = half * 2 + pair / 4;
    let register = row % 16 / 8 + pair % 4 / 2 * 2;
    let (lane, element) = (row % 8 * 4 + t, pair % 2);
    let words_of_fragment = C::BITS as usize / 4;
    let word = fragment * words_of_fragment + if C::BITS == 8 { register / 2 } else { 0 };
    let group = ((chunk * 8 + place % 8) * 4 + slice / 2) * C::GROUP_BYTES as usize;
    // The scales lie between the slices.
    let second = slice % 2 * (C::SLICE_BYTES as usize + 64);
    let at = group + second + word / 4 * 512 + lane * 16 + word % 4 * 4;
    let word = u32::from_le_bytes(codes[at..][..4].try_into().unwrap());
    if C::BITS == 4 {
        word >> (16 * element + 4 * register) & 15
    } else {
        word >> (16 * element + 8 * (register % 2)) & 0xff
    }
}

/// Checks that two streams have the same weights.
fn same_weights(waves: &[(u32, Wave)], stream: &[bf16], back: &[bf16]) {
    // Nothing is laid out in the room behind the last N-tile.
    let slices = |wave: Wave| (0..wave.n_tiles).flat_map(move |n| (0..8 * wave.depth).map(move |s| wave.slice(n, s)));
    let starts = waves.iter().flat_map(|&(_, wave)| slices(wave));
    let written: Vec<usize> = starts.flat_map(|at| (at as usize / 2..).take(1024)).collect();
    // Where there is no weight, zeros have no defined sign.
    let is_same = |(a, b): (&bf16, &bf16)| a.to_bits() == b.to_bits() || a.to_f32() == 0.0 && b.to_f32() == 0.0;
    assert_eq!(written.iter().position(|&i| !is_same((&stream[i], &back[i]))), None);
}

/// Makes a matrix of random codes with different scales for every row and group, lays out its weights, and quantises
/// them. Returns the codes, the codes that a plain reading of the layout finds, and how many warps found a weight that
/// no code makes with its scale. `spoil` changes one weight; otherwise the codes must make the layout of the weights
/// again.
fn found<C: Code>(spoil: bool) -> (Vec<u32>, Vec<u32>, u32) {
    let mut random = Random::new(7);
    let groups = INPUTS / GROUP as usize;
    let scales: Vec<(f32, u8)> = (0..ROWS * groups)
        .map(|_| {
            let zero = random.below(16) as u8;
            scale_and_zero::<C>(&mut random, true, zero)
        })
        .collect();
    let all: Vec<u32> = codes(C::BITS).collect();
    let matrix: Vec<u32> = (0..ROWS * INPUTS).map(|_| all[random.below(all.len())]).collect();
    let of = |i: usize| scales[i / INPUTS * groups + i % INPUTS / GROUP as usize];
    let mut weights: Vec<bf16> =
        matrix.iter().enumerate().map(|(i, &code)| bf16::from_bits(meaning(C::BITS, code, of(i).0, of(i).1))).collect();
    if spoil {
        weights[12_345] = bf16::from_bits(weights[12_345].to_bits() ^ 1);
    }
    let weight = Buffer::from_slice(&weights);
    let n_tiles = (ROWS as u32).div_ceil(N_TILE);
    let (mut walk, mut waves, mut first) = (Walk::new(BLOCKS), Vec::new(), 0);
    while first < n_tiles {
        let wave = walk.wave(n_tiles - first, INPUTS as u32);
        waves.push((first, wave));
        first += wave.n_tiles;
    }
    assert!(waves.len() > 1);
    let stream = Buffer::<bf16>::new_poisoned(walk.chunks as usize * CHUNK_BYTES as usize / 2);
    let codes = Buffer::<u8>::zeroed(walk.chunks as usize * C::BYTES as usize);
    let strange = Buffer::from_slice(&[0u32]);
    let k = INPUTS as u32;
    let lay = LayOut {
        weight: weight.ptr(),
        up: Global::default(),
        to: StreamMatrix { stream: stream.ptr(), base: 0, blocks: BLOCKS, n_tiles, k },
        stream: stream.ptr_mut(),
        first_n_tile: 0,
        n: ROWS as u32,
    };
    run::<lay_out>([n_tiles, k.div_ceil(CHUNK_FEATURES), 1], 0, 1, lay);
    let of_n_tile = k.div_ceil(CHUNK_FEATURES) as usize * GROUPS as usize * 16;
    let mut words = vec![0; n_tiles as usize * of_n_tile];
    for (i, &(value, zero)) in scales.iter().enumerate() {
        let (row, group) = (i / groups, i % groups);
        words[row / 16 * of_n_tile + group * 16 + row % 16] = Scale::new::<C>(value, zero).unwrap().0;
    }
    let words = Buffer::from_slice(&words);
    let grid = [n_tiles, k.div_ceil(CHUNK_FEATURES), 1];
    let params =
        Quantize { from: lay.to, scales: words.ptr(), codes: codes.ptr_mut(), strange: strange.ptr_mut(), base: 0 };
    let back = Buffer::<bf16>::new_poisoned(walk.chunks as usize * CHUNK_BYTES as usize / 2);
    let again = Dequantize { codes: codes.ptr(), stream: back.ptr_mut() };
    let chunks = [GROUPS, (walk.chunks / u64::from(GROUP_N_TILES)) as u32, 1];
    match (C::BITS, C::PARTS) {
        (4, 1) => {
            run::<quantize_int4>(grid, 0, 2, params);
            run::<dequantize_int4>(chunks, 0, 3, again);
        }
        (4, _) => {
            run::<quantize_int4_f16>(grid, 0, 2, params);
            run::<dequantize_int4_f16>(chunks, 0, 3, again);
        }
        _ => {
            run::<quantize_fp8>(grid, 0, 2, params);
            run::<dequantize_fp8>(chunks, 0, 3, again);
        }
    }
    if !spoil {
        same_weights(&waves, &stream.to_vec(), &back.to_vec());
    }
    let bytes = codes.to_vec();
    let found = (0..ROWS * INPUTS).map(|i| code_at::<C>(&bytes, &waves, i / INPUTS, i % INPUTS)).collect();
    (matrix, found, strange.to_vec()[0])
}

fn codes_are_found_again<C: Code>() {
    let (codes, found, strange) = found::<C>(false);
    assert_eq!(strange, 0);
    let differ = codes.iter().zip(&found).position(|(a, b)| a != b);
    assert_eq!(differ.map(|i| (i / INPUTS, i % INPUTS, codes[i], found[i])), None);
}

#[test]
fn codes_of_int4_are_found_again() {
    codes_are_found_again::<Int4<1>>();
    codes_are_found_again::<Int4<2>>();
}

#[test]
fn codes_of_fp8_are_found_again() {
    codes_are_found_again::<Fp8>();
}

#[test]
fn a_weight_that_no_code_makes_is_noticed() {
    assert_eq!(found::<Int4<1>>(true).2, 1);
    assert_eq!(found::<Fp8>(true).2, 1);
}
