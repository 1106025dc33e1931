//! The copies that take the pairs in the order in which they are given.
//!
//! # Safety
//! A launch has memory as its parameter block says. Lanes may store to one record at once, where pairs share a
//! destination; nobody reads it meanwhile. (Each unit of that record then comes from any one of these pairs; each byte,
//! if `token_copy_bytewise` wrote it.)

use cuda_std::{device, kernel, thread};
use gpu_kernels::token_copy::{Index, MLA_UNITS, PAGE_UNITS, TokenCopy, UNIT_BYTES, copy, copy_record};

/// Threads of a CTA of the kernels that give each record to one thread, or to one warp that stores each load before the
/// next.
pub const NARROW_THREADS: u32 = 256;

/// One warp a record; each load is stored before the next.
///
/// # Safety
/// As the parameter block says. Whole CTAs of [`NARROW_THREADS`] call it.
#[device]
unsafe fn copy_by_warps<I: Index>(p: &TokenCopy<I>) {
    // SAFETY: the caller's word. A pair is copied if both of its records are in their regions, whose units are aligned
    // then.
    unsafe {
        if !p.regions.fit(0) {
            p.pairs.refuse_all();
            return;
        }
        let warps = NARROW_THREADS / 32;
        let step = thread::grid_dim_x() as u64 * warps as u64;
        let mut i = thread::block_idx_x() as u64 * warps as u64 + thread::warp_id() as u64;
        while i < p.pairs.count {
            let pair = p.pairs.get(i);
            if p.pairs.has(pair) {
                let (from, to) = p.regions.records(pair, 0);
                copy_record::<1>(from, to, p.regions.units(0));
                if thread::lane_id() == 0 {
                    p.regions.note(pair);
                }
            } else if thread::lane_id() == 0 {
                p.pairs.refuse(1);
            }
            i += step;
        }
    }
}

/// One thread a record, 16 bytes or one byte at a time.
///
/// # Safety
/// As the parameter block says. CTAs of [`NARROW_THREADS`] call it. `BYTES` is 1 or [`UNIT_BYTES`].
#[device]
unsafe fn copy_by_threads<I: Index, const BYTES: u32>(p: &TokenCopy<I>) {
    // SAFETY: the caller's word. A pair is copied if both of its records are in their regions, whose units are aligned
    // then; a record is whole units.
    unsafe {
        if !p.regions.fit(0) {
            p.pairs.refuse_all();
            return;
        }
        let step = thread::grid_dim_x() as u64 * NARROW_THREADS as u64;
        let mut i = thread::block_idx_x() as u64 * NARROW_THREADS as u64 + thread::thread_idx_x() as u64;
        while i < p.pairs.count {
            let pair = p.pairs.get(i);
            if p.pairs.has(pair) {
                let (from, to) = p.regions.records(pair, 0);
                let mut at = 0;
                while at < p.regions.record_bytes as usize {
                    if BYTES == 1 {
                        to.store(at, from.load(at));
                    } else {
                        to.store16(at, from.load16(at));
                    }
                    at += BYTES as usize;
                }
                p.regions.note(pair);
            } else {
                p.pairs.refuse(1);
            }
            i += step;
        }
    }
}

// `gpu_kernels` has the copy of pages by `i32` pairs, since batches use it.
macro_rules! kernels {
    ($($index:ty: $bytewise:ident $vectors:ident $warp:ident $any:ident $mla:ident;)*) => { $(
        #[doc = concat!("Copies records by `", stringify!($index), "` pairs, a thread a record, a byte at a time.")]
        #[kernel(threads = 256, module = "bench")]
        pub unsafe fn $bytewise(p: TokenCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy_by_threads::<_, 1>(&p) }
        }
        #[doc = concat!("Copies records by `", stringify!($index), "` pairs, a thread a record, 16 bytes at a time.")]
        #[kernel(threads = 256, module = "bench")]
        pub unsafe fn $vectors(p: TokenCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy_by_threads::<_, UNIT_BYTES>(&p) }
        }
        #[doc = concat!("Copies records by `", stringify!($index), "` pairs, a warp a record, each load stored before the next.")]
        #[kernel(threads = 256, module = "bench")]
        pub unsafe fn $warp(p: TokenCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy_by_warps(&p) }
        }
        #[doc = concat!("Copies records of any size by `", stringify!($index), "` pairs, a warp a record, loads first.")]
        #[kernel(threads = 1024, module = "bench")]
        pub unsafe fn $any(p: TokenCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy::<_, 0, 4>(&p) }
        }
        #[doc = concat!("Copies records of 656 bytes by `", stringify!($index), "` pairs, a warp a record, loads first.")]
        #[kernel(threads = 1024, module = "bench")]
        pub unsafe fn $mla(p: TokenCopy<$index>) {
            // SAFETY: the launcher's word: memory is as the parameter block says.
            unsafe { copy::<_, MLA_UNITS, 2>(&p) }
        }
    )* };
}

kernels! {
    i32: token_copy_bytewise_i32 token_copy_vectors_i32 token_copy_warp_i32 token_copy_i32 token_copy_656_i32;
    i64: token_copy_bytewise_i64 token_copy_vectors_i64 token_copy_warp_i64 token_copy_i64 token_copy_656_i64;
}

/// Copies records of 4,096 bytes by `i64` pairs, a warp a record, loads first.
#[kernel(threads = 1024, module = "bench")]
pub unsafe fn token_copy_4096_i64(p: TokenCopy<i64>) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { copy::<_, PAGE_UNITS, 8>(&p) }
}
