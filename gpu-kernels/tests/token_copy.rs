//! The record copies against a plain one, byte for byte.

use cuda_std::emulator::{Buffer, Launch, launch};
use cuda_std::{GlobalMut, Kernel};
use gpu_kernels::token_copy::{self, Index, MLA_RECORD_BYTES, TokenCopy, UNIT_BYTES};
use proptest::prelude::*;

/// What a byte that nobody wrote looks like.
const POISON: u8 = 0xA5;

/// 16 bytes that are aligned as records must be.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Unit([u8; 16]);

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

impl Case {
    fn source(&self) -> Vec<u8> {
        // Every byte of a record differs from its neighbours', and records from each other.
        let bytes = self.src_records * self.record_bytes as usize;
        (0..bytes).map(|i| (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0]).collect()
    }

    /// The destination after the copy, and how many pairs were refused.
    fn expected(&self) -> (Vec<u8>, u32) {
        let size = self.record_bytes as usize;
        let source = self.source();
        let mut destination = vec![POISON; self.dst_records * size];
        let mut refused = 0;
        for &(src, dst) in &self.pairs {
            let inside = |record: i64, records: usize| record >= 0 && (record as u64) < records as u64;
            if inside(src, self.src_records) && inside(dst, self.dst_records) {
                let (src, dst) = (src as usize * size, dst as usize * size);
                destination[dst..dst + size].copy_from_slice(&source[src..src + size]);
            } else {
                refused += 1;
            }
        }
        (destination, refused)
    }

    fn launched<K, I>(&self, counted: bool) -> (Vec<u8>, u32)
    where
        K: Kernel<Params = TokenCopy<I>>,
        I: Index + TryFrom<i64>,
    {
        let narrow = |record: i64| I::try_from(record).unwrap_or_else(|_| panic!("{record} is no index"));
        let src = Buffer::from_slice(&units(&self.source()));
        let dst = Buffer::from_slice(&units(&vec![POISON; self.dst_records * self.record_bytes as usize]));
        let src_index = Buffer::from_slice(&self.pairs.iter().map(|&(src, _)| narrow(src)).collect::<Vec<_>>());
        let dst_index = Buffer::from_slice(&self.pairs.iter().map(|&(_, dst)| narrow(dst)).collect::<Vec<_>>());
        let errors = Buffer::from_slice(&[0u32]);
        let params = TokenCopy {
            src: src.ptr().cast(),
            dst: dst.ptr_mut().cast(),
            src_index: src_index.ptr(),
            dst_index: dst_index.ptr(),
            errors: if counted { errors.ptr_mut() } else { GlobalMut::default() },
            pairs: self.pairs.len() as u64,
            src_records: self.src_records as u64,
            dst_records: self.dst_records as u64,
            record_bytes: self.record_bytes,
        };
        let on = Launch { seed: self.seed, ..Launch::new(self.blocks, token_copy::THREADS) };
        if let Err(error) = launch::<K>(&on, params) {
            panic!("{error}");
        }
        (dst.as_slice().iter().flat_map(|unit| unit.0).collect(), errors.as_slice()[0])
    }

    /// Runs every kernel that takes these records.
    fn check(&self) {
        let expected = self.expected();
        assert!(self.launched::<token_copy::token_copy_i32, _>(true) == expected, "token_copy_i32");
        assert!(self.launched::<token_copy::token_copy_i64, _>(true) == expected, "token_copy_i64");
        assert!(self.launched::<token_copy::token_copy_bytewise_i32, _>(true) == expected, "token_copy_bytewise_i32");
        assert!(self.launched::<token_copy::token_copy_bytewise_i64, _>(true) == expected, "token_copy_bytewise_i64");
        if self.record_bytes == MLA_RECORD_BYTES {
            assert!(self.launched::<token_copy::token_copy_656_i32, _>(true) == expected, "token_copy_656_i32");
            assert!(self.launched::<token_copy::token_copy_656_i64, _>(true) == expected, "token_copy_656_i64");
        }
        assert!(self.launched::<token_copy::token_copy_i32, _>(false) == (expected.0, 0), "no counter");
    }
}

#[test]
fn mla_record_is_41_units() {
    assert_eq!(MLA_RECORD_BYTES, 656);
    assert_eq!(MLA_RECORD_BYTES / UNIT_BYTES, 41);
}

#[test]
fn copies_one_record() {
    for record_bytes in [16, 496, 512, 528, MLA_RECORD_BYTES, 1024, 2048, 2064, 4112] {
        Case { record_bytes, src_records: 2, dst_records: 3, pairs: vec![(1, 1)], blocks: 1, seed: 3 }.check();
    }
}

#[test]
fn copies_nothing() {
    Case { record_bytes: 656, src_records: 1, dst_records: 1, pairs: vec![], blocks: 2, seed: 1 }.check();
    // Records of no bytes are all alike.
    let case =
        Case { record_bytes: 0, src_records: 4, dst_records: 4, pairs: vec![(0, 1), (9, 0)], blocks: 1, seed: 1 };
    assert_eq!(case.expected(), (vec![], 1));
    case.check();
}

#[test]
fn refuses_extreme_record_numbers() {
    let pairs = vec![(0, 0), (-1, 1), (1, -1), (3, 2), (2, 3), (i32::MIN as i64, 1), (1, i32::MAX as i64), (2, 2)];
    let case = Case { record_bytes: 656, src_records: 3, dst_records: 3, pairs, blocks: 1, seed: 5 };
    case.check();
    let mut wide = case;
    wide.pairs = vec![(i64::MIN, 0), (0, i64::MAX), (i64::MAX / 656 + 1, 1), (1 << 32, 1), (2, 1)];
    assert_eq!(wide.expected().1, 4);
    assert!(wide.launched::<token_copy::token_copy_i64, _>(true) == wide.expected());
    assert!(wide.launched::<token_copy::token_copy_656_i64, _>(true) == wide.expected());
    assert!(wide.launched::<token_copy::token_copy_bytewise_i64, _>(true) == wide.expected());
}

#[test]
fn refuses_records_that_it_is_not_for() {
    // The size of another record, and sizes and addresses that 16-byte accesses cannot serve: all counted, none copied.
    let src = Buffer::from_slice(&[Unit([1; 16]); 90]);
    let dst = Buffer::from_slice(&[Unit([POISON; 16]); 90]);
    let index = Buffer::from_slice(&[0i32, 1]);
    let errors = Buffer::from_slice(&[0u32]);
    let params = TokenCopy {
        src: src.ptr().cast(),
        dst: dst.ptr_mut().cast(),
        src_index: index.ptr(),
        dst_index: index.ptr(),
        errors: errors.ptr_mut(),
        pairs: 2,
        src_records: 2,
        dst_records: 2,
        record_bytes: 640,
    };
    let on = Launch::new(2, token_copy::THREADS);
    launch::<token_copy::token_copy_656_i32>(&on, params).unwrap();
    assert_eq!(errors.as_slice(), [2]);
    launch::<token_copy::token_copy_i32>(&on, TokenCopy { record_bytes: 648, ..params }).unwrap();
    assert_eq!(errors.as_slice(), [4]);
    // SAFETY: the address stays inside the buffer; it is only compared.
    let moved = unsafe { params.src.at(8) };
    launch::<token_copy::token_copy_i32>(&on, TokenCopy { src: moved, ..params }).unwrap();
    launch::<token_copy::token_copy_bytewise_i32>(&on, TokenCopy { src: moved, ..params }).unwrap();
    assert_eq!(errors.as_slice(), [8]);
    assert!(dst.as_slice().iter().all(|unit| unit.0 == [POISON; 16]));
}

#[test]
fn grid_covers_the_pairs() {
    assert_eq!(token_copy::blocks(0, 132), 1);
    assert_eq!(token_copy::blocks(8, 132), 1);
    assert_eq!(token_copy::blocks(9, 132), 2);
    assert_eq!(token_copy::blocks(1 << 40, 132), 132 * 8);
}

fn cases() -> impl Strategy<Value = Case> {
    let size = prop_oneof![2 => Just(MLA_RECORD_BYTES), 3 => (1..160u32).prop_map(|units| units * UNIT_BYTES)];
    (size, 1..30usize, 1..60usize, 1..4u32, 0..1000u64).prop_flat_map(
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
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_where_it_belongs(case in cases()) {
        case.check();
    }
}
