//! A warpgroup's product of tiles that tensor maps describe, emulated: the right numbers, and what it must find.

mod common;

use common::Io;
use common::kernels::{WARPGROUP_SHARED, warpgroup};
use cuda_std::bf16;
use cuda_std::emulator::{Buffer, Launch, launch};
use cuda_std::tensor::{Matrix, TensorMap};

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
    // Rows beyond the 50th of A are beyond its edge: zeros.
    let a = Buffer::from_slice(&(0..50 * 64).map(value).collect::<Vec<_>>());
    let b = Buffer::from_slice(&(0..128 * 64).map(|i| value(i + 5)).collect::<Vec<_>>());
    for seed in 0..20 {
        let c = Buffer::<bf16>::new_poisoned(60 * 64);
        run(&[map(&a, 50, 64), map(&b, 128, 128), map(&c, 60, 64)], seed).unwrap();
        for (i, found) in c.as_slice().iter().enumerate() {
            let (row, column) = (i / 64, i % 64);
            let products =
                (0..64).map(|k| a.as_slice()[row.min(49) * 64 + k].to_f32() * b.as_slice()[column * 64 + k].to_f32());
            let sum: f32 = if row < 50 && column < 16 { products.sum() } else { 0.0 };
            assert!((found.to_f32() - sum).abs() <= sum.abs() / 128.0, "{row}, {column}: {found} for {sum}");
        }
    }
}

#[test]
fn a_map_that_is_none_is_named() {
    let error = run(&[TensorMap([7; 16]); 3], 1).unwrap_err();
    assert!(error.contains("not that of a tensor map"), "{error}");
}
