//! The copies that take the pairs in the order in which they come.

use cuda_std::{Global, GlobalMut, kernel, thread};

use super::{Index, MLA_UNITS, PAGE_UNITS, Pairs, Regions, UNIT_BYTES};

/// Threads of a block of the kernels that give a record to a thread, or to a warp without more ado.
pub const NARROW_THREADS: u32 = 256;
/// Threads of a block of the kernels that load first: as many as a block can have, so that few blocks, and with them
/// few multiprocessors, keep enough loads under way.
pub const THREADS: u32 = 1024;

/// Parameters of the kernels of this module. Grid: any, as they stride; see [`blocks`]. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct TokenCopy<I> {
    /// What to copy.
    pub pairs: Pairs<I>,
    /// From where to where.
    pub regions: Regions<I>,
}

/// Blocks of `threads` that give each of `pairs` pairs a warp, or at most `most`.
pub const fn blocks(pairs: u64, threads: u32, most: u32) -> u32 {
    let wanted = pairs.div_ceil((threads / 32) as u64);
    let blocks = if wanted < most as u64 { wanted } else { most as u64 };
    if blocks == 0 { 1 } else { blocks as u32 }
}

/// One warp's copy of a record of `units` units, `ROUNDS` units a lane at a time.
#[inline(always)]
pub(super) unsafe fn copy_record<const ROUNDS: usize>(from: Global<u8>, to: GlobalMut<u8>, units: u32) {
    let mut first = thread::lane_id();
    while first < units {
        let mut data = [[0u32; 4]; ROUNDS];
        unroll!(R < ROUNDS; {
            let unit = first + 32 * R as u32;
            if unit < units {
                data[R] = unsafe { from.load16((unit * UNIT_BYTES) as usize) };
            }
        });
        unroll!(R < ROUNDS; {
            let unit = first + 32 * R as u32;
            if unit < units {
                unsafe { to.store16((unit * UNIT_BYTES) as usize, data[R]) };
            }
        });
        first += 32 * ROUNDS as u32;
    }
}

/// A warp a record, each load stored before the next.
#[inline(always)]
unsafe fn copy_by_warps<I: Index>(p: &TokenCopy<I>) {
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

/// A warp a record, which reads its next pair while this one is under way. `UNITS` is the size of a record, or 0 for any.
#[inline(always)]
unsafe fn copy<I: Index, const UNITS: u32, const ROUNDS: usize>(p: &TokenCopy<I>) {
    unsafe {
        if !p.regions.fit(UNITS) {
            p.pairs.refuse_all();
            return;
        }
        let warps = THREADS / 32;
        let step = thread::grid_dim_x() as u64 * warps as u64;
        let mut i = thread::block_idx_x() as u64 * warps as u64 + thread::warp_id() as u64;
        let mut pair = p.pairs.get(i);
        while i < p.pairs.count {
            let next = p.pairs.get(i + step);
            if p.pairs.has(pair) {
                let (from, to) = p.regions.records(pair, UNITS);
                copy_record::<ROUNDS>(from, to, p.regions.units(UNITS));
                if thread::lane_id() == 0 {
                    p.regions.note(pair);
                }
            } else if thread::lane_id() == 0 {
                p.pairs.refuse(1);
            }
            pair = next;
            i += step;
        }
    }
}

/// A thread a record, 16 bytes at a time, or one.
#[inline(always)]
unsafe fn copy_by_threads<I: Index, const BYTES: u32>(p: &TokenCopy<I>) {
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

// Batches move pages by `i32` pairs; the others are for measuring, and for those who copy something else.
macro_rules! kernels {
    ($($index:ty: $bytewise:ident $vectors:ident $warp:ident $any:ident $mla:ident $page:ident in $home:literal;)*) => { $(
        #[doc = concat!("Copies records by `", stringify!($index), "` pairs, a thread a record, a byte at a time.")]
        #[kernel(threads = 256, module = "bench")]
        pub unsafe fn $bytewise(p: TokenCopy<$index>) {
            unsafe { copy_by_threads::<_, 1>(&p) }
        }
        #[doc = concat!("Copies records by `", stringify!($index), "` pairs, a thread a record, 16 bytes at a time.")]
        #[kernel(threads = 256, module = "bench")]
        pub unsafe fn $vectors(p: TokenCopy<$index>) {
            unsafe { copy_by_threads::<_, UNIT_BYTES>(&p) }
        }
        #[doc = concat!("Copies records by `", stringify!($index), "` pairs, a warp a record, each load stored before the next.")]
        #[kernel(threads = 256, module = "bench")]
        pub unsafe fn $warp(p: TokenCopy<$index>) {
            unsafe { copy_by_warps(&p) }
        }
        #[doc = concat!("Copies records of any size by `", stringify!($index), "` pairs, a warp a record, loads first.")]
        #[kernel(threads = 1024, module = "bench")]
        pub unsafe fn $any(p: TokenCopy<$index>) {
            unsafe { copy::<_, 0, 4>(&p) }
        }
        #[doc = concat!("Copies records of 656 bytes by `", stringify!($index), "` pairs, a warp a record, loads first.")]
        #[kernel(threads = 1024, module = "bench")]
        pub unsafe fn $mla(p: TokenCopy<$index>) {
            unsafe { copy::<_, MLA_UNITS, 2>(&p) }
        }
        #[doc = concat!("Copies records of 4,096 bytes by `", stringify!($index), "` pairs, a warp a record, loads first.")]
        #[kernel(threads = 1024, module = $home)]
        pub unsafe fn $page(p: TokenCopy<$index>) {
            unsafe { copy::<_, PAGE_UNITS, 8>(&p) }
        }
    )* };
}

kernels! {
    i32: token_copy_bytewise_i32 token_copy_vectors_i32 token_copy_warp_i32 token_copy_i32 token_copy_656_i32 token_copy_4096_i32 in "main";
    i64: token_copy_bytewise_i64 token_copy_vectors_i64 token_copy_warp_i64 token_copy_i64 token_copy_656_i64 token_copy_4096_i64 in "bench";
}
