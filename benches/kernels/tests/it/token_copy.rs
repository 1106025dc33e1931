//! The record copies against a plain copy, byte for byte, with lanes in every order that a seed gives.

use bench_kernels::token_copy::{
    self, GROUPED_THREADS, Index, MLA_RECORD_BYTES, NARROW_THREADS, PAGE_RECORD_BYTES, Pairs, Regions, SCAN_CHUNK,
    SCAN_SHARED_BYTES, SORT_THREADS, Scan, Sort, SortedCopy, THREADS, TokenCopy, UNIT_BYTES,
};
use cuda_std::emulator::{Buffer, Launch, Plain, launch};
use cuda_std::{GlobalMut, Kernel};
use proptest::prelude::*;

/// The value of a byte that nobody wrote.
const POISON: u8 = 0xA5;
/// The value of a slot that nobody noted.
const UNMAPPED: i64 = -7;

/// 16 bytes that are aligned as records must be.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Unit([u8; 16]);

// SAFETY: its 16 bytes are all of it.
unsafe impl Plain for Unit {}

fn units(bytes: &[u8]) -> Vec<Unit> {
    bytes.chunks_exact(16).map(|chunk| Unit(chunk.try_into().unwrap())).collect()
}

/// A copy that a test asks for.
#[derive(Clone, Debug)]
struct Case {
    record_bytes: u32,
    src_records: usize,
    dst_records: usize,
    pairs: Vec<(i64, i64)>,
    blocks: u32,
    seed: u64,
}

/// What a copy wrote.
#[derive(Debug)]
struct Outcome {
    destination: Vec<u8>,
    map: Vec<i64>,
    refused: u32,
}

/// A case in the emulator's memory, with indices of type `I`.
struct Memory<I: Plain> {
    src: Buffer<Unit>,
    dst: Buffer<Unit>,
    map: Buffer<I>,
    src_index: Buffer<I>,
    dst_index: Buffer<I>,
    refused: Buffer<u32>,
    pairs: Pairs<I>,
    regions: Regions<I>,
}

impl<I: Index + Plain + TryFrom<i64> + Into<i64>> Memory<I> {
    fn new(case: &Case) -> Self {
        let narrow = |record: i64| I::try_from(record).unwrap_or_else(|_| panic!("{record} is no index"));
        let src = Buffer::from_slice(&units(&case.source()));
        let dst = Buffer::from_slice(&units(&vec![POISON; case.dst_records * case.record_bytes as usize]));
        let map = Buffer::from_slice(&vec![narrow(UNMAPPED); case.src_records]);
        let src_index = Buffer::from_slice(&case.pairs.iter().map(|&(src, _)| narrow(src)).collect::<Vec<_>>());
        let dst_index = Buffer::from_slice(&case.pairs.iter().map(|&(_, dst)| narrow(dst)).collect::<Vec<_>>());
        let refused = Buffer::from_slice(&[0u32]);
        let pairs = Pairs {
            src: src_index.ptr(),
            dst: dst_index.ptr(),
            count: case.pairs.len() as u64,
            src_records: case.src_records as u64,
            dst_records: case.dst_records as u64,
            refused: refused.ptr_mut(),
        };
        let regions = Regions {
            src: src.ptr().cast(),
            dst: dst.ptr_mut().cast(),
            map: map.ptr_mut(),
            record_bytes: case.record_bytes,
        };
        Self { src, dst, map, src_index, dst_index, refused, pairs, regions }
    }

    fn outcome(&self) -> Outcome {
        Outcome {
            destination: self.dst.to_vec().into_iter().flat_map(|unit| unit.0).collect(),
            map: self.map.to_vec().into_iter().map(|slot| slot.into()).collect(),
            refused: self.refused.to_vec()[0],
        }
    }
}

fn run<K: Kernel>(on: Launch, params: K::Params) {
    if let Err(error) = launch::<K>(&on, params) {
        panic!("{error}");
    }
}

impl Case {
    fn source(&self) -> Vec<u8> {
        // Every byte of a record differs from its neighbours', and records from each other.
        let bytes = self.src_records * self.record_bytes as usize;
        (0..bytes).map(|i| (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0]).collect()
    }

    fn good(&self) -> impl Iterator<Item = (usize, usize)> {
        let inside = |record: i64, records: usize| record >= 0 && (record as u64) < records as u64;
        self.pairs
            .iter()
            .filter(move |pair| inside(pair.0, self.src_records) && inside(pair.1, self.dst_records))
            .map(|&(src, dst)| (src as usize, dst as usize))
    }

    fn refused(&self) -> u32 {
        (self.pairs.len() - self.good().count()) as u32
    }

    fn compare(&self, name: &str, found: &Outcome) {
        let size = self.record_bytes as usize;
        let source = self.source();
        let mut destination = vec![POISON; self.dst_records * size];
        for (src, dst) in self.good() {
            destination[dst * size..][..size].copy_from_slice(&source[src * size..][..size]);
        }
        assert!(found.destination == destination, "{name}: other bytes");
        assert_eq!(found.refused, self.refused(), "{name}: refused");
        for (src, &slot) in found.map.iter().enumerate() {
            let mut places = self.good().filter(|pair| pair.0 == src).map(|pair| pair.1 as i64).peekable();
            let right = if places.peek().is_none() { slot == UNMAPPED } else { places.any(|place| place == slot) };
            assert!(right, "{name}: slot {src} is mapped to {slot}");
        }
    }

    fn launch(&self, blocks: u32, threads: u32) -> Launch {
        Launch { seed: self.seed, ..Launch::new(blocks, threads) }
    }

    /// Runs a kernel of the ladder.
    fn check<K, I>(&self, threads: u32)
    where
        K: Kernel<Params = TokenCopy<I>>,
        I: Index + Plain + TryFrom<i64> + Into<i64>,
    {
        let memory = Memory::<I>::new(self);
        run::<K>(self.launch(self.blocks, threads), TokenCopy { pairs: memory.pairs, regions: memory.regions });
        self.compare(K::NAME, &memory.outcome());
    }

    /// Sorts the pairs and checks their order, then runs a copy of sorted pairs.
    fn check_sorted<C, S, K, I>(&self, threads: u32, shift: u32, by_destination: bool)
    where
        C: Kernel<Params = Sort<I>>,
        S: Kernel<Params = Sort<I>>,
        K: Kernel<Params = SortedCopy<I>>,
        I: Index + Plain + TryFrom<i64> + Into<i64>,
    {
        let memory = Memory::<I>::new(self);
        let keys = if by_destination { self.dst_records } else { self.src_records };
        let chunks = ((keys >> shift) as u32 + 1).div_ceil(SCAN_CHUNK);
        let counts = Buffer::from_slice(&vec![0u32; (chunks * SCAN_CHUNK) as usize + 1]);
        // SAFETY: the element after the counts.
        let total = unsafe { counts.ptr_mut().at((chunks * SCAN_CHUNK) as usize) };
        let ranks = Buffer::new_poisoned(self.pairs.len());
        let sorted = Buffer::<u64>::from_slice(&vec![u64::MAX; self.pairs.len()]);
        let sort = Sort {
            pairs: memory.pairs,
            counts: counts.ptr_mut(),
            ranks: ranks.ptr_mut(),
            sorted: sorted.ptr_mut(),
            shift,
            by_destination: by_destination.into(),
        };
        run::<C>(self.launch(self.blocks, SORT_THREADS), sort);
        let scan = Launch { shared_bytes: SCAN_SHARED_BYTES, ..self.launch(self.blocks, SORT_THREADS) };
        run::<token_copy::token_copy_scan>(scan, Scan { counts: counts.ptr_mut(), total, chunks });
        run::<S>(self.launch(self.blocks, SORT_THREADS), sort);

        let pairs: Vec<_> = sorted.to_vec()[..*counts.to_vec().last().unwrap() as usize].to_vec();
        let mut found: Vec<_> = pairs.iter().map(|&pair| (pair as u32 as usize, (pair >> 32) as usize)).collect();
        let key = |pair: &(usize, usize)| (if by_destination { pair.1 } else { pair.0 }) >> shift;
        for two in found.windows(2) {
            // Buckets of one chunk are in order.
            let (left, right) = (key(&two[0]), key(&two[1]));
            assert!(left <= right || left / SCAN_CHUNK as usize != right / SCAN_CHUNK as usize, "{two:?}");
        }
        let mut expected: Vec<_> = self.good().collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);

        let copy = SortedCopy { sorted: sorted.ptr(), total: total.read(), regions: memory.regions };
        run::<K>(self.launch(self.blocks, threads), copy);
        self.compare(K::NAME, &memory.outcome());
    }

    /// Runs every kernel that takes these records: with 64-bit indices, and with 32-bit indices if the record numbers
    /// fit.
    fn check_all(&self) {
        use token_copy::*;
        macro_rules! all {
            ($($bytewise:ident $vectors:ident $warp:ident $any:ident $mla:ident $page:ident $count:ident $scatter:ident
              $sorted:ident $sorted_mla:ident $sorted_page:ident $grouped:ident;)*) => { $(
                self.check::<$bytewise, _>(NARROW_THREADS);
                self.check::<$vectors, _>(NARROW_THREADS);
                self.check::<$warp, _>(NARROW_THREADS);
                self.check::<$any, _>(THREADS);
                self.check_sorted::<$count, $scatter, $sorted, _>(THREADS, 0, false);
                self.check_sorted::<$count, $scatter, $sorted, _>(THREADS, 2, true);
                if self.record_bytes == MLA_RECORD_BYTES {
                    self.check::<$mla, _>(THREADS);
                    self.check_sorted::<$count, $scatter, $sorted_mla, _>(THREADS, 0, false);
                    for shift in [0, GROUP_SHIFT, 5] {
                        self.check_sorted::<$count, $scatter, $grouped, _>(GROUPED_THREADS, shift, false);
                    }
                    self.check_sorted::<$count, $scatter, $grouped, _>(GROUPED_THREADS, 0, true);
                }
                if self.record_bytes == PAGE_RECORD_BYTES {
                    self.check::<$page, _>(THREADS);
                    self.check_sorted::<$count, $scatter, $sorted_page, _>(THREADS, 0, false);
                }
            )* };
        }
        if self.pairs.iter().all(|&(src, dst)| i32::try_from(src).is_ok() && i32::try_from(dst).is_ok()) {
            all! {
                token_copy_bytewise_i32 token_copy_vectors_i32 token_copy_warp_i32 token_copy_i32 token_copy_656_i32
                token_copy_4096_i32 token_copy_count_i32 token_copy_scatter_i32 token_copy_sorted_i32
                token_copy_sorted_656_i32 token_copy_sorted_4096_i32 token_copy_grouped_656_i32;
            }
        }
        all! {
            token_copy_bytewise_i64 token_copy_vectors_i64 token_copy_warp_i64 token_copy_i64 token_copy_656_i64
            token_copy_4096_i64 token_copy_count_i64 token_copy_scatter_i64 token_copy_sorted_i64
            token_copy_sorted_656_i64 token_copy_sorted_4096_i64 token_copy_grouped_656_i64;
        }
        let memory = Memory::<i64>::new(self);
        run::<token_copy_check_i64>(self.launch(self.blocks, SORT_THREADS), Check { pairs: memory.pairs });
        assert_eq!(memory.outcome().refused, self.refused());
    }
}

#[test]
fn mla_record_is_41_units() {
    assert_eq!(MLA_RECORD_BYTES, 656);
    assert_eq!(MLA_RECORD_BYTES / UNIT_BYTES, 41);
    assert_eq!(MLA_RECORD_BYTES * token_copy::GROUP % 128, 0);
}

#[test]
fn copies_one_record() {
    for record_bytes in [16, 496, 512, 528, MLA_RECORD_BYTES, 1024, 2048, 2064, 4096, 4112] {
        Case { record_bytes, src_records: 2, dst_records: 3, pairs: vec![(1, 1)], blocks: 1, seed: 3 }.check_all();
    }
}

#[test]
fn copies_nothing() {
    Case { record_bytes: 656, src_records: 1, dst_records: 1, pairs: vec![], blocks: 2, seed: 1 }.check_all();
    // Records without bytes are all alike.
    let case =
        Case { record_bytes: 0, src_records: 4, dst_records: 4, pairs: vec![(0, 1), (9, 0)], blocks: 1, seed: 1 };
    assert_eq!(case.refused(), 1);
    case.check_all();
}

#[test]
fn one_record_goes_everywhere() {
    let pairs: Vec<_> = (0..200).map(|i| (5, (i * 77) % 200)).collect();
    Case { record_bytes: 656, src_records: 9, dst_records: 200, pairs, blocks: 2, seed: 4 }.check_all();
}

#[test]
fn every_record_goes_once() {
    // Two chunks of counts, sources in a scattered order, and more pairs than the grid takes at once.
    let records = 4100;
    let pairs: Vec<_> = (0..records).map(|i| ((i * 1237) % records, i)).collect();
    Case { record_bytes: 16, src_records: 4100, dst_records: 4100, pairs: pairs.clone(), blocks: 2, seed: 6 }
        .check_all();
    let pairs = pairs.into_iter().filter(|pair| pair.0 < 600 && pair.1 % 8 != 3).collect();
    Case { record_bytes: 656, src_records: 600, dst_records: 4100, pairs, blocks: 1, seed: 7 }.check_all();
}

#[test]
fn refuses_extreme_record_numbers() {
    let pairs = vec![(0, 0), (-1, 1), (1, -1), (3, 2), (2, 3), (i32::MIN as i64, 1), (1, i32::MAX as i64), (2, 2)];
    let case = Case { record_bytes: 656, src_records: 3, dst_records: 3, pairs, blocks: 1, seed: 5 };
    case.check_all();
    let mut wide = case;
    wide.pairs = vec![(i64::MIN, 0), (0, i64::MAX), (i64::MAX / 656 + 1, 1), (1 << 32, 1), (2, 1)];
    assert_eq!(wide.refused(), 4);
    wide.check_all();
}

#[test]
fn refuses_records_that_it_is_not_for() {
    // The size of another record, and sizes and addresses that 16-byte accesses cannot serve: all counted, none copied.
    let case =
        Case { record_bytes: 640, src_records: 2, dst_records: 2, pairs: vec![(0, 0), (1, 1)], blocks: 2, seed: 8 };
    let memory = Memory::<i32>::new(&case);
    let (pairs, regions) = (memory.pairs, memory.regions);
    let wide = Launch::new(2, THREADS);
    run::<token_copy::token_copy_656_i32>(wide, TokenCopy { pairs, regions });
    assert_eq!(memory.outcome().refused, 2);
    run::<token_copy::token_copy_i32>(wide, TokenCopy { pairs, regions: Regions { record_bytes: 648, ..regions } });
    assert_eq!(memory.outcome().refused, 4);
    // SAFETY: the address stays inside the buffer; it is only compared.
    let regions = Regions { src: unsafe { regions.src.at(8) }, ..regions };
    run::<token_copy::token_copy_i32>(wide, TokenCopy { pairs, regions });
    run::<token_copy::token_copy_bytewise_i32>(Launch::new(2, NARROW_THREADS), TokenCopy { pairs, regions });
    assert_eq!(memory.outcome().refused, 8);
    let sorted = Buffer::from_slice(&[0u64, 1 | 1 << 32]);
    let total = Buffer::from_slice(&[2u32]);
    let copy = SortedCopy { sorted: sorted.ptr(), total: total.ptr(), regions };
    run::<token_copy::token_copy_sorted_656_i32>(wide, copy);
    run::<token_copy::token_copy_sorted_i32>(wide, copy);
    run::<token_copy::token_copy_grouped_656_i32>(Launch::new(2, GROUPED_THREADS), copy);
    assert!(memory.dst.to_vec().iter().all(|unit| unit.0 == [POISON; 16]));
    drop((memory.src, memory.src_index, memory.dst_index));
}

#[test]
fn works_without_a_map_and_a_counter() {
    let case =
        Case { record_bytes: 656, src_records: 4, dst_records: 4, pairs: vec![(3, 1), (9, 0)], blocks: 1, seed: 2 };
    let memory = Memory::<i32>::new(&case);
    let pairs = Pairs { refused: GlobalMut::default(), ..memory.pairs };
    let regions = Regions { map: GlobalMut::default(), ..memory.regions };
    run::<token_copy::token_copy_656_i32>(Launch::new(1, THREADS), TokenCopy { pairs, regions });
    let found = memory.outcome();
    assert_eq!((found.refused, found.map), (0, vec![UNMAPPED; 4]));
    assert!(found.destination[656..1312] == case.source()[3 * 656..]);
}

#[test]
fn grid_covers_the_pairs() {
    assert_eq!(token_copy::blocks(0, 256, 132), 1);
    assert_eq!(token_copy::blocks(8, 256, 132), 1);
    assert_eq!(token_copy::blocks(9, 256, 132), 2);
    assert_eq!(token_copy::blocks(1 << 40, 1024, 16), 16);
}

fn cases() -> impl Strategy<Value = Case> {
    let size = prop_oneof![
        3 => Just(MLA_RECORD_BYTES),
        1 => Just(PAGE_RECORD_BYTES),
        2 => (1..160u32).prop_map(|units| units * UNIT_BYTES),
    ];
    (size, 1..40usize, 1..90usize, 1..3u32, 0..1000u64).prop_flat_map(
        |(record_bytes, src_records, dst_records, blocks, seed)| {
            // A destination is written once; sources repeat. Some pairs point outside.
            let all: Vec<i64> = (0..dst_records as i64).collect();
            let destinations = prop::sample::subsequence(all, 0..=dst_records).prop_shuffle();
            let source = prop_oneof![8 => 0..src_records as i64, 1 => -3..src_records as i64 + 3];
            let outside = prop::collection::vec(
                (0..src_records as i64, prop_oneof![-4..0i64, dst_records as i64..dst_records as i64 + 4]),
                0..4,
            );
            (destinations, prop::collection::vec(source, dst_records), outside).prop_map(
                move |(destinations, sources, outside)| {
                    let mut pairs: Vec<_> = sources.into_iter().zip(destinations).collect();
                    for (i, pair) in outside.into_iter().enumerate() {
                        pairs.insert(pairs.len() * i / 4, pair);
                    }
                    Case { record_bytes, src_records, dst_records, pairs, blocks, seed }
                },
            )
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_where_it_belongs(case in cases()) {
        case.check_all();
    }
}
