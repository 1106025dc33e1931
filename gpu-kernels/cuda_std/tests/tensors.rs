//! A warpgroup's products of tiles that tensor maps describe, emulated: the right numbers, and mistakes that are found.

mod common;

use common::Io;
use common::kernels::{CORES_SHARED, WARPGROUP_SHARED, cores, warpgroup};
use cuda_std::bf16;
use cuda_std::emulator::{Buffer, Launch, launch};
use cuda_std::tensor::{Array, Matrix, TensorMap};

fn run(maps: &[TensorMap], seed: u64) -> Result<(), String> {
    let maps = Buffer::from_slice(maps);
    let none = Buffer::from_slice(&[0u32]);
    let params = Io { input: maps.ptr().cast(), output: none.ptr_mut(), zeros: none.ptr_mut(), n: 0 };
    let how = Launch { shared_bytes: WARPGROUP_SHARED, seed, ..Launch::new(1, 128) };
    launch::<warpgroup>(&how, params).map(drop).map_err(|error| error.to_string())
}

fn map(buffer: &Buffer<bf16>, rows: u64, tile_rows: u32) -> TensorMap {
    TensorMap::emulated(&Matrix::dense(buffer.ptr().addr(), rows, 64, tile_rows))
}

#[test]
fn a_product_of_tiles() {
    let value = |i: usize| bf16::from_f32((i * 7919 % 257) as f32 / 64.0 - 2.0);
    // A has 50 rows. The other rows of its tile are beyond the edge: zeros.
    let a = Buffer::from_slice(&(0..50 * 64).map(value).collect::<Vec<_>>());
    let b = Buffer::from_slice(&(0..128 * 64).map(|i| value(i + 5)).collect::<Vec<_>>());
    let (of_a, of_b) = (a.to_vec(), b.to_vec());
    for seed in 0..20 {
        let c = Buffer::<bf16>::new_poisoned(60 * 64);
        run(&[map(&a, 50, 64), map(&b, 128, 128), map(&c, 60, 64)], seed).unwrap();
        for (i, found) in c.to_vec().into_iter().enumerate() {
            let (row, column) = (i / 64, i % 64);
            let products = (0..64).map(|k| of_a[row.min(49) * 64 + k].to_f32() * of_b[column * 64 + k].to_f32());
            let sum: f32 = if row < 50 && column < 16 { products.sum() } else { 0.0 };
            assert!((found.to_f32() - sum).abs() <= sum.abs() / 128.0, "{row}, {column}: {found} for {sum}");
        }
    }
}

#[test]
fn a_product_of_core_matrices() {
    let value = |i: usize| bf16::from_f32((i * 7919 % 257) as f32 / 64.0 - 2.0);
    let a = |row: usize, k: usize| value(row * 64 + k).to_f32();
    let b = |row: usize, k: usize| value(row * 64 + k + 5).to_f32();
    // The order of core matrices: groups of eight rows, eighths of K, rows.
    let places = (0..64 * 64).map(|i| (i / 512 * 8 + i % 64 / 8, i / 64 % 8 * 8 + i % 8));
    let first = Buffer::from_slice(&places.map(|(row, k)| bf16::from_f32(a(row, k))).collect::<Vec<_>>());
    let second = Buffer::from_slice(&(0..128 * 64).map(|i| value(i + 5)).collect::<Vec<_>>());
    let maps = Buffer::from_slice(&[map(&second, 128, 128)]);
    for seed in 0..20 {
        let out = Buffer::<u32>::new_poisoned(128 * 164);
        let params = Io { input: first.ptr().cast(), output: out.ptr_mut(), zeros: maps.ptr_mut().cast(), n: 0 };
        launch::<cores>(&Launch { shared_bytes: CORES_SHARED, seed, ..Launch::new(1, 128) }, params).unwrap();
        for (lane, words) in out.to_vec().chunks(164).enumerate() {
            let (warp, group, pair) = (lane / 32, lane % 32 / 4, lane % 4 * 2);
            // Checks sums against the definition. `b(column, k)` is the element of B that is multiplied by column `k`
            // of A.
            let check = |words: &[u32], b: &dyn Fn(usize, usize) -> f32| {
                for (i, &word) in words.iter().enumerate() {
                    let (row, column) = (warp * 16 + group + i / 2 % 2 * 8, i / 4 * 8 + pair + i % 2);
                    let sum: f32 = (0..64).map(|k| a(row, k) * b(column, k)).sum();
                    let found = f32::from_bits(word);
                    assert!((found - sum).abs() <= 1e-3, "{row}, {column}: {found} for {sum}");
                }
            };
            check(&words[..32], &b);
            check(&words[32..96], &b);
            check(&words[100..], &|column, k| b(column / 64 * 64 + k, column % 64));
            for (i, &word) in words[96..100].iter().enumerate() {
                let (row, k) = (group + i % 2 * 8, pair + i / 2 * 8);
                let wanted = [a(row, k), a(row, k + 1)].map(|x| u32::from(bf16::from_f32(x).to_bits()));
                assert_eq!(word, wanted[1] << 16 | wanted[0], "lane {lane}, word {i}");
            }
        }
    }
}

#[test]
fn a_map_that_is_none_is_named() {
    let error = run(&[TensorMap([7; 16]); 3], 1).unwrap_err();
    assert!(error.contains("not that of a tensor map"), "{error}");
}

#[test]
fn what_tma_cannot_address_has_no_map() {
    let matrix = Matrix::dense(1 << 20, 50, 64, 64);
    let array = Array { address: 1 << 20, sizes: [32, 4, 4, 4], strides: [256, 1024, 4096], extent: [16, 4, 1, 1] };
    assert_eq!((matrix.check(), array.check()), (Ok(()), Ok(())));
    let address = matrix.address + 8;
    for (matrix, what) in [
        (Matrix { address, ..matrix }, "address"),
        (Matrix { rows: 0, ..matrix }, "size"),
        (Matrix { columns: 60, ..matrix }, "stride is a multiple"),
        (Matrix { columns: 1 << 33, ..matrix }, "size"),
        (Matrix { tile_rows: 257, ..matrix }, "extent"),
    ] {
        let found = matrix.check().unwrap_err();
        assert!(found.contains(what), "{found}");
    }
    for (array, what) in [
        (Array { address, ..array }, "address"),
        (Array { sizes: [32, 4, 0, 4], ..array }, "size"),
        (Array { strides: [256, 1024, 8], ..array }, "stride is a multiple"),
        (Array { strides: [256, 1024, 1 << 40], ..array }, "below 2^40"),
        (Array { extent: [16, 4, 1, 0], ..array }, "extent"),
        (Array { extent: [15, 4, 1, 1], ..array }, "row of a box"),
    ] {
        let found = array.check().unwrap_err();
        assert!(found.contains(what), "{found}");
    }
}
