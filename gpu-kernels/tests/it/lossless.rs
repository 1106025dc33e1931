//! Weights packed without loss: a plain reading of the layout gives the same bits back, whatever they are.

use crate::common::{Random, run};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::linear::K_PARTIALS;
use gpu_kernels::stream::{CHUNK_BYTES, GROUP_N_TILES, SLICE_BYTES, SLICES_APART};
use gpu_kernels::weights::lossless::{Lossless, PACKED_SLICE, Pack, TILE_WEIGHTS, Unpack};
use gpu_kernels::weights::lossless::{count_escapes, pack_weights, unpack_weights};
use proptest::prelude::*;

/// Chunks of 8 N-tiles in a stream.
const CHUNKS: usize = 2;
const CHUNK_ELEMENTS: usize = (GROUP_N_TILES * CHUNK_BYTES / 2) as usize;

/// A packed stream.
struct Packed {
    tiles: Vec<u8>,
    more: Vec<u16>,
    list_bytes: u32,
    doubled: bool,
    escapes: u32,
}

/// What packing a stream leaves on a device.
struct Launched {
    counts: Buffer<u32>,
    tiles: Buffer<u8>,
    more: Buffer<u16>,
    notes: Buffer<u32>,
    scales: Buffer<f32>,
}

const GRID: [u32; 3] = [K_PARTIALS, CHUNKS as u32, 1];

/// Launches the kernels that pack a stream, with lists of `list_bytes` bytes and room for `more_room` escapes beyond
/// them.
fn launch(stream: &[u16], list_bytes: u32, more_room: usize, seed: u64) -> Launched {
    let elements: Vec<bf16> = stream.iter().map(|&bits| bf16::from_bits(bits)).collect();
    let memory = Buffer::from_slice(&elements);
    let launched = Launched {
        counts: Buffer::from_slice(&[0; 4]),
        tiles: Buffer::zeroed(CHUNKS * (GROUP_N_TILES * K_PARTIALS * Lossless::tile_bytes(list_bytes)) as usize),
        more: Buffer::new_poisoned(more_room),
        notes: Buffer::from_slice(&[0; 2]),
        scales: Buffer::new_poisoned(1),
    };
    let params = Pack {
        stream: memory.ptr(),
        counts: launched.counts.ptr_mut(),
        tiles: launched.tiles.ptr_mut(),
        more: launched.more.ptr_mut(),
        notes: launched.notes.ptr_mut(),
        scale: launched.scales.ptr_mut(),
        more_room: more_room as u32,
        list_bytes,
        first: 0,
    };
    run::<count_escapes>(GRID, 0, seed, params);
    run::<pack_weights>(GRID, 0, seed + 1, params);
    launched
}

/// Packs a stream with lists of `list_bytes` bytes, and checks that unpacking gives the stream again. None if some tile
/// cannot be packed.
fn pack(stream: &[u16], list_bytes: u32, seed: u64) -> Option<Packed> {
    let Launched { counts, tiles, more, notes, scales } = launch(stream, list_bytes, stream.len(), seed);
    let (counts, notes) = (counts.to_vec(), notes.to_vec());
    let ([as_it_is, unfit, doubled, unfit_doubled], [beyond, left]) = (&counts[..], &notes[..]) else {
        unreachable!("so many")
    };
    let doubles = (unfit_doubled, doubled) < (unfit, as_it_is);
    assert_eq!(scales.to_vec(), [if doubles { 0.5 } else { 1.0 }]);
    assert_eq!(left, unfit.min(unfit_doubled));
    let packed = Packed {
        tiles: tiles.to_vec(),
        more: more.to_vec()[..*beyond as usize].to_vec(),
        list_bytes,
        doubled: doubles,
        escapes: *as_it_is.min(doubled),
    };
    if *left > 0 {
        return None;
    }
    let weights = Lossless { tiles: tiles.ptr(), more: more.ptr(), scales: scales.ptr(), list_bytes };
    let again = Buffer::<bf16>::new_poisoned(stream.len());
    let unpack = Unpack { weights, stream: again.ptr_mut(), first: 0, matrix: 0, bounds: [CHUNKS as u32; 3] };
    run::<unpack_weights>(GRID, GROUP_N_TILES * Lossless::tile_bytes(list_bytes), seed + 2, unpack);
    let again: Vec<u16> = again.to_vec().into_iter().map(|weight| weight.to_bits()).collect();
    assert!(again == stream, "unpacked, lists of {list_bytes}");
    Some(packed)
}

/// Half of a number that may be subnormal: what a weight was before it was doubled.
fn halved(bits: u16) -> u16 {
    let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
    sign | if rest < 0x100 { rest >> 1 } else { rest - 0x80 }
}

/// Unpacks the stream as the layout's documentation says.
fn unpack(packed: &Packed) -> Vec<u16> {
    let mut stream = vec![0; CHUNKS * CHUNK_ELEMENTS];
    let list_bytes = packed.list_bytes as usize;
    let (slice_bytes, n_tiles) = (PACKED_SLICE as usize, GROUP_N_TILES as usize);
    for (t, tile) in packed.tiles.chunks(Lossless::tile_bytes(packed.list_bytes) as usize).enumerate() {
        let (chunk, n_tile, chain) = (t / (4 * n_tiles), t / 4 % n_tiles, t % 4);
        let list = &tile[slice_bytes..][..list_bytes];
        let word = |i: usize| u32::from_le_bytes(list[4 * i..][..4].try_into().unwrap());
        let (escapes, of_first) = ((word(0) & 0x3ff) as usize, (word(0) >> 10 & 0x3ff) as usize);
        let bases = [word(0) >> 20 & 0x7f, word(1) >> 18 & 0x7f];
        let (top, place) = (word(1) >> 25, (word(0) >> 27 << 18 | word(1) & 0x3ffff) as usize);
        let room = (list_bytes - 8) / 2;
        for half in 0..2 {
            let slice = &tile[half * (slice_bytes + list_bytes)..][..slice_bytes];
            let mut high = [0u8; 1024];
            for (at, high) in high.iter_mut().enumerate() {
                let (k, lane, byte) = (at / 512, at / 16 % 32, at % 16);
                let (fragment, nibble) = (2 * k + byte / 8, byte % 8);
                let word = |w: usize| {
                    let at = 1024 + (w * 32 + lane) * 4;
                    u32::from_le_bytes(slice[at..][..4].try_into().unwrap()) >> (4 * nibble)
                };
                let code = match fragment {
                    3 => (0..3).map(|w| (word(w) >> 3 & 1) << w).sum(),
                    f => word(f) & 7,
                };
                *high = ((code >> 2) << 7 | (bases[half] + (code & 3))) as u8;
            }
            for i in if half == 0 { 0..of_first } else { of_first..escapes } {
                let entry = match i.checked_sub(room) {
                    None => u16::from_le_bytes(list[8 + 2 * i..][..2].try_into().unwrap()),
                    Some(beyond) => packed.more[place + beyond],
                };
                let below = u32::from(entry >> 11);
                let upper = if below == 31 { 0 } else { top - below };
                high[usize::from(entry & 0x3ff)] = (upper | u32::from(entry >> 10 & 1) << 7) as u8;
            }
            // The slice's core matrices: a lane's fragments, register by register.
            let plain = (chain + half * K_PARTIALS as usize) * SLICES_APART as usize + n_tile * SLICE_BYTES as usize;
            for (at, &high) in high.iter().enumerate() {
                let (k, lane, byte) = (at / 512, at / 16 % 32, at % 16);
                let (fragment, register, element) = (2 * k + byte / 8, byte / 2 % 4, byte % 2);
                let element =
                    plain / 2 + fragment * 128 + (register % 2) * 512 + register / 2 * 64 + lane * 2 + element;
                let bits = u16::from(high) << 8 | u16::from(slice[at]);
                stream[chunk * CHUNK_ELEMENTS + element] = if packed.doubled { halved(bits) } else { bits };
            }
        }
    }
    stream
}

fn stream(random: &mut Random, bits: impl Fn(&mut Random, usize) -> u16) -> Vec<u16> {
    (0..CHUNKS * CHUNK_ELEMENTS).map(|i| bits(random, i)).collect()
}

/// A weight from a nearly normal distribution.
fn weight(random: &mut Random, sigma: f32) -> u16 {
    let sum: f32 = (0..12).map(|_| random.uniform()).sum();
    bf16::from_f32(sum / 2.0 * sigma).to_bits()
}

fn comes_back(weights: &[u16], list_bytes: u32, seed: u64) -> Packed {
    let packed = pack(weights, list_bytes, seed).expect("packed");
    let back = unpack(&packed);
    let differ = weights.iter().zip(&back).position(|(a, b)| a != b);
    assert_eq!(differ.map(|at| (at, weights[at], back[at])), None, "lists of {list_bytes}");
    packed
}

#[test]
fn weights_of_a_model_come_back_whether_lists_have_room_or_not() {
    let mut random = Random::new(1);
    let mut doubled = 0;
    for sigma in [0.02, 0.003, 0.7] {
        let weights = stream(&mut random, |random, _| weight(random, sigma));
        for list_bytes in [16, 48, 96] {
            let packed = comes_back(&weights, list_bytes, 3);
            let share = f64::from(packed.escapes) / weights.len() as f64;
            assert!(share < 0.03, "{share} with sigma {sigma}");
            assert_eq!(list_bytes == 16, packed.more.len() > 900, "lists of {list_bytes}: {}", packed.more.len());
            doubled += u32::from(packed.doubled);
        }
    }
    assert!(0 < doubled && doubled < 9, "{doubled}: some, not all");
}

#[test]
fn slices_of_other_scales_and_of_zeros_come_back() {
    let mut random = Random::new(2);
    // A matrix that ends within a chunk has zeros behind it; and a zero among others is an escape.
    for scale in [1.0, 2.0] {
        let weights = stream(&mut random, |random, i| match i / 1024 % 8 {
            _ if i * 2 / SLICES_APART as usize % 8 >= 5 => 0,
            0 => (random.below(2) << 15) as u16,
            n_tile if random.below(100) > 0 => weight(random, scale * 2f32.powi(n_tile as i32 * 3 - 9)),
            _ => (random.below(2) << 15 | random.below(3)) as u16,
        });
        comes_back(&weights, 64, 5);
    }
}

#[test]
fn what_is_too_far_apart_is_not_packed() {
    let mut random = Random::new(3);
    let usual = stream(&mut random, |random, _| weight(random, 0.02));
    let mut apart = usual.clone();
    (apart[5], apart[70]) = (0x0180, 0x7000);
    assert!(pack(&apart, 64, 7).is_none());
    // Three of four weights are zeros.
    let sparse = stream(&mut random, |random, _| if random.below(4) > 0 { 0 } else { weight(random, 0.02) });
    assert!(pack(&sparse, 64, 8).is_none());
    // Weights that are too large to be doubled.
    let mut large = usual;
    large.iter_mut().for_each(|bits| *bits = *bits & 0x807f | 0x7f00);
    assert!(!comes_back(&large, 64, 9).doubled);
}

#[test]
fn escapes_that_find_no_room_are_counted_and_not_written() {
    let mut random = Random::new(4);
    let weights = stream(&mut random, |random, _| weight(random, 0.02));
    // The emulator would report the first escape beyond the room.
    let Launched { notes, .. } = launch(&weights, 16, 10, 1);
    let notes = notes.to_vec();
    assert!(notes[0] > 900 && notes[1] == 0, "{notes:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn any_bits_that_are_near_each_other_come_back(seed: u64, base in 0u32..200, span in 1u32..14, list in 1u32..20) {
        let mut random = Random::new(seed);
        let weights = stream(&mut random, |random, _| {
            let exponent = base + random.below(span as usize) as u32;
            ((random.below(2) as u32) << 15 | exponent << 7 | random.below(128) as u32) as u16
        });
        if let Some(packed) = pack(&weights, list * 16, seed) {
            prop_assert!(unpack(&packed) == weights);
        }
    }
}

const _: () = assert!(TILE_WEIGHTS == 2 * SLICE_BYTES / 2);
