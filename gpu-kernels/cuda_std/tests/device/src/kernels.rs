//! One kernel for each family of intrinsics, compiled for the device by `tests/ptx.rs` and emulated by
//! `tests/intrinsics.rs`.

use cuda_std::atomic::{self, Ordering, Scope};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
use cuda_std::bulk::{self, Barrier};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
use cuda_std::cluster::{self, PeerBarrier};
use cuda_std::{Global, GlobalMut, async_copy, bf16, kernel, math, mma, shared, thread, warp};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
use cuda_std::{tensor, wgmma};

/// Parameters of the kernels in these tests.
#[repr(C)]
#[derive(Clone, Copy, cuda_std::Layout)]
pub struct Io {
    /// Initialised words.
    pub input: Global<u32>,
    /// Words that are not initialised.
    pub output: GlobalMut<u32>,
    /// Words that are zero.
    pub zeros: GlobalMut<u32>,
    /// Number of words of input and output.
    pub n: u32,
}

/// A kernel of one warp that stores one word a lane.
macro_rules! lanes {
    ($($(#[$doc:meta])* $name:ident |$p:ident, $lane:ident| $value:expr;)*) => {
        $(
            $(#[$doc])*
            #[kernel(threads = 32)]
            pub unsafe fn $name($p: Io) {
                let $lane = thread::lane_id();
                // SAFETY: a word for each lane.
                #[allow(unused_unsafe)]
                unsafe {
                    let value: u32 = $value;
                    $p.output.store($lane as usize, value);
                }
            }
        )*
    };
}

lanes! {
    /// `shuffle_xor`.
    xor |p, lane| warp::shuffle_xor(lane, 5);
    /// `shuffle_idx`, of another lane for each.
    idx |p, lane| warp::shuffle_idx(lane, lane * 7 + 40);
    /// `shuffle_up`.
    up |p, lane| warp::shuffle_up(lane, 3);
    /// `shuffle_down`.
    down |p, lane| warp::shuffle_down(lane, 3);
    /// Shuffles of two words each, and of a float.
    wide |p, lane| {
        let wide = warp::shuffle_xor(u64::from(lane) << 35 | u64::from(lane), 1);
        let signed = warp::shuffle_down(-(i64::from(lane)), 1);
        let float = warp::shuffle_idx(lane as f32, 31 - lane);
        (wide >> 35) as u32 * 10_000 + wide as u32 * 100 + float as u32 + (signed < 0) as u32 * 1_000_000
    };
    /// `ballot`.
    ballot |p, lane| warp::ballot(lane.is_multiple_of(3));
    /// `any` and `all`.
    votes |p, lane| {
        warp::any(lane == 9) as u32
            + 2 * warp::any(lane == 32) as u32
            + 4 * warp::all(lane < 32) as u32
            + 8 * warp::all(lane != 9) as u32
    };
    /// `max`, of numbers that a signed comparison would order otherwise.
    most |p, lane| warp::max(lane << 27) >> 27;
    /// `mma::transpose`, of the matrix whose elements count up.
    turned |p, lane| mma::transpose((2 * lane) | ((2 * lane + 1) << 16));
    /// `elect`.
    elect |p, lane| warp::elect() as u32;
    /// The lane's indices and the sizes of its block and grid.
    indices |p, lane| {
        thread::thread_idx_x() + thread::block_dim_x() * 100 + thread::warp_id() * 10_000 + thread::grid_dim_x() * 100_000
    };
}

/// Every index of a grid of three dimensions.
#[kernel(threads = 64)]
pub unsafe fn grid(p: Io) {
    // SAFETY: a word for each lane of the grid.
    unsafe {
        let (x, y, z) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
        let block = (z * thread::grid_dim_y() + y) * thread::grid_dim_x() + x;
        let i = block * 64 + thread::thread_idx_x();
        p.output.store(i as usize, x + 10 * y + 100 * z + 1000 * thread::grid_dim_z());
    }
}

/// Loads and stores of each size, through both memories.
#[kernel(threads = 32)]
pub unsafe fn sizes(p: Io) {
    // SAFETY: offsets are within 64 words; one lane does it all.
    unsafe {
        if thread::lane_id() == 0 {
            let s = shared::dynamic::<u32>(128);
            s.store16(0, p.input.load16(4));
            s.cast::<u64>().store(2, p.input.cast::<u64>().load(4));
            s.cast::<u16>().store(12, p.input.cast::<u16>().load_nc(20));
            s.cast::<u16>().store(13, 0xabcd);
            s.cast::<u8>().store(28, p.input.cast::<u8>().load(44));
            for i in 29..32 {
                s.cast::<i8>().store(i, -1);
            }
            p.output.store16(0, s.load16(0));
            p.output.cast::<u64>().store(2, s.cast::<u64>().load(2));
            p.output.cast::<bf16>().store(12, s.cast::<bf16>().load(12));
            p.output.cast::<u16>().store(13, s.cast::<u16>().load(13));
            p.output.at(7).store(0, s.at(7).load(0));
            p.output.store16_stream(8, p.input.load16_nc(0));
            let mut streamed = p.input.load16_stream(16);
            streamed[3] = p.input.load_stream(19);
            p.output.store16(12, streamed);
            p.output.store16_kept(16, streamed);
            p.output.store_if(true, 20, p.output.load_if(true, 16, 1) ^ p.output.load_if(false, 16, 7));
            p.output.store_if(false, 21, 8);
            p.output.cast::<u64>().store_if(true, 11, 9 << 32 | 10);
        }
    }
}

/// Every atomic operation, from all lanes.
#[kernel(threads = 128)]
pub unsafe fn atomics(p: Io) {
    // SAFETY: the counters are initialised, in shared memory by one lane before the barrier.
    unsafe {
        let thread = thread::thread_idx_x();
        let s = shared::dynamic::<i32>(0);
        if thread == 0 {
            s.store(0, 1000);
            s.store(1, -1000);
        }
        thread::sync_threads();
        // On one path the compiler knows that `thread` is zero, and may write the rest of the kernel twice.
        let thread = thread::opaque(thread);
        let (relaxed, device) = (Ordering::Relaxed, Scope::Device);
        atomic::fetch_add(p.zeros, 0, thread, relaxed, device);
        atomic::fetch_max(p.zeros, 1, thread, relaxed, device);
        atomic::fetch_min(s, 0, -(thread as i32), relaxed, Scope::Block);
        atomic::fetch_max(s, 1, thread as i32, relaxed, Scope::Block);
        atomic::fetch_add(p.zeros.cast::<u64>(), 1, 1 << 33, relaxed, device);
        // A lock, taken by every lane in turn.
        while atomic::compare_exchange(p.zeros, 4, 0, 1, Ordering::Acquire, device) != 0 {
            thread::nanosleep(20);
        }
        p.zeros.store(5, p.zeros.load(5) + 1);
        atomic::exchange(p.zeros, 4, 0, Ordering::Release, device);
        thread::sync_threads();
        if thread == 0 {
            let minimum = atomic::load(s, 0, relaxed, Scope::Block);
            p.output.store16(0, [p.zeros.load(0), p.zeros.load(1), minimum as u32, s.load(1) as u32]);
            p.output.store16(4, [p.zeros.load(2), p.zeros.load(3), p.zeros.load(4), p.zeros.load(5)]);
        }
    }
}

/// A product of tiles. A comes from shared memory by `ldmatrix`, and B by `ldmatrix.trans`.
#[kernel(threads = 32)]
pub unsafe fn product(p: Io) {
    // SAFETY: A is the first 128 words, 16 rows of 16 bf16; B the next 64, 16 rows of 8; C and the result 128 words.
    unsafe {
        let lane = thread::lane_id();
        let s = shared::dynamic::<u32>(0);
        for i in 0..6 {
            s.store((i * 32 + lane) as usize, p.input.load((i * 32 + lane) as usize));
        }
        warp::sync_warp();
        // Matrices 0 to 3 of A: rows 0 to 7 and 8 to 15 of columns 0 to 7, then of columns 8 to 15.
        let a = mma::ldmatrix_x4(s.at((lane % 16 * 8 + lane / 16 * 4) as usize));
        // Two matrices of B, each twice.
        let b = mma::ldmatrix_x4_trans(s.at((128 + lane % 16 * 4) as usize));
        let c = [lane as f32, 1.0, 2.0, 3.0];
        p.output.store16(lane as usize * 4, mma::m16n8k16_bf16(c, a, [b[0], b[1]]).map(f32::to_bits));
    }
}

/// Arithmetic, of the numbers 4 and 8 that stand at words 4 and 8.
#[kernel(threads = 32)]
pub unsafe fn arithmetic(p: Io) {
    // SAFETY: there are 64 words; one lane does it all.
    unsafe {
        if thread::lane_id() == 0 {
            let (x, y) = (p.input.load(4) as f32, p.input.load(8) as f32);
            let (out, wide) = (p.output.cast::<f32>(), p.input.cast::<u64>());
            let approximate = [math::exp2(x), math::log2(y), math::rcp(x), math::rsqrt(x)];
            p.output.store16(0, approximate.map(f32::to_bits));
            p.output.store16(4, [math::sqrt(x), math::abs(-x), math::max(x, y), math::min(x, y)].map(f32::to_bits));
            out.store(8, math::fma(x, y, x));
            p.output.store(9, math::pack_bf16(x, y));
            let [low, high] = math::unpack_bf16(p.output.load(9));
            out.store(10, low + high + math::from_bf16(math::to_bf16(x)));
            let word = p.input.load(9);
            p.output.store(11, math::popc(word) + 100 * math::clz(word));
            p.output.store(12, math::brev(word));
            p.output.store(13, math::mul_hi_u64(wide.load(6), wide.load(7)) as u32);
            out.store(14, math::exp(x - 4.0));
        }
    }
}

/// Every fence, a named barrier, `nanosleep` and the timer.
#[kernel(threads = 64)]
pub unsafe fn fences(p: Io) {
    // SAFETY: a word for each lane.
    unsafe {
        thread::fence_block();
        thread::fence_device();
        thread::fence_system();
        thread::nanosleep(20);
        thread::sync_named(1, 64);
        let later = thread::global_timer() >= thread::global_timer();
        p.output.store(thread::thread_idx_x() as usize, later as u32);
    }
}

/// Each lane copies 16 bytes through shared memory, asynchronously.
#[kernel(threads = 64)]
pub unsafe fn async_copies(p: Io) {
    // SAFETY: 64 times 16 bytes, in all memories.
    unsafe {
        let thread = thread::thread_idx_x() as usize;
        let place = shared::dynamic::<u8>(0);
        async_copy::copy16(place.at(thread * 16), p.input.cast::<u8>().at(thread * 16));
        async_copy::commit();
        async_copy::wait::<0>();
        thread::sync_threads();
        p.output.store16(thread * 4, place.load16((63 - thread) * 16));
    }
}

/// Copies 1 KiB through shared memory in bulk, adding one to each word.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
#[kernel(threads = 64, cluster = 1)]
pub unsafe fn bulk_copies(p: Io) {
    // SAFETY: 256 words in all memories, after the barriers in the shared one.
    unsafe {
        let words = shared::dynamic::<u32>(128);
        let (full, all) = (Barrier::at(shared::dynamic(0)), Barrier::at(shared::dynamic(8)));
        if thread::thread_idx_x() == 0 {
            full.init(1);
            all.init(64);
            bulk::fence_init();
        }
        thread::sync_threads();
        if thread::warp_id() == 1 && warp::elect() {
            full.arrive_expect_tx(1024);
            bulk::copy_to_shared(words.cast(), p.input.cast(), 256, full);
            bulk::copy_to_shared_once(words.at(64).cast(), p.input.at(64).cast(), 256, full);
            bulk::copy_to_shared_multicast(words.at(128).cast(), p.input.at(128).cast(), 512, full, 1);
        }
        full.wait(0);
        let mut i = thread::thread_idx_x() as usize;
        while i < 256 {
            words.store(i, words.load(i) + 1);
            i += 64;
        }
        bulk::fence_proxy_async();
        all.arrive();
        while !all.try_wait(0) {}
        if thread::thread_idx_x() == 0 {
            bulk::copy_to_global(p.output.cast(), words.cast(), 1024);
            bulk::commit();
            bulk::wait_read::<0>();
            bulk::wait::<0>();
        }
    }
}

/// Bytes of shared memory for [`warpgroup`]: tiles of A (64 rows) and B (128 rows), a barrier.
pub const WARPGROUP_SHARED: u32 = 64 * 128 + 128 * 128 + 16;

/// `C = A · Bᵀ` of 64 × 64 and 128 × 64 bf16 by one warpgroup. Each warp stores the first 16 columns of its 16 rows of
/// C as bf16, through shared memory; the other columns are stored as zeros. `input` is the address of three maps: A, B,
/// and C, `[64, 64]` in tiles of 64 rows.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
#[kernel(threads = 128, min_blocks = 1, cluster = 1)]
pub unsafe fn warpgroup(p: Io) {
    // SAFETY: the maps are there, and shared memory has room for their tiles.
    unsafe {
        wgmma::declare();
        let maps = p.input.cast::<tensor::TensorMap>();
        let a = shared::dynamic::<u8>(0);
        let (b, barrier) = (a.at(64 * 128), Barrier::at(shared::dynamic(64 * 128 + 128 * 128)));
        let lane = thread::thread_idx_x();
        if lane == 0 {
            barrier.init(1);
            bulk::fence_init();
        }
        cluster::sync_made();
        if lane < 32 && warp::elect() {
            tensor::acquire(maps);
            tensor::acquire(maps.at(1));
            barrier.arrive_expect_tx(64 * 128 + 128 * 128);
            tensor::load(a, maps, [0, 0], barrier);
            tensor::load_multicast(b, maps.at(1), [0, 0], barrier, 1 << cluster::rank());
        }
        barrier.wait(0);
        wgmma::take_registers::<200>();
        let (first, second) = (wgmma::Operand::at(a), wgmma::Operand::at(b));
        wgmma::set::<0>(0.0);
        wgmma::fence();
        wgmma::mma_n128(first, second, false);
        wgmma::mma_n128(first.advance(32), second.advance(32), true);
        wgmma::mma_n128(first.advance(64), second.advance(64), true);
        wgmma::mma_n128(first.advance(96), second.advance(96), true);
        wgmma::commit();
        wgmma::wait::<0>();
        // An arrival in the barrier's next phase, for which nobody waits.
        PeerBarrier::new(barrier, 0).arrive_if(lane == 0);
        let words = [
            math::pack_bf16(wgmma::get::<0>(), wgmma::get::<1>()),
            math::pack_bf16(wgmma::get::<2>(), wgmma::get::<3>()),
            math::pack_bf16(wgmma::get::<4>(), wgmma::get::<5>()),
            math::pack_bf16(wgmma::get::<6>(), wgmma::get::<7>()),
        ];
        // C replaces the tile of A, in its swizzle; the rest of the tile is zeros.
        let mut i = 0;
        while i < 4 {
            a.store16(((lane * 4 + i) * 16) as usize, [0; 4]);
            i += 1;
        }
        thread::sync_threads();
        let (warp, lane) = (lane / 32, lane % 32);
        let offset = tensor::swizzled((warp * 16 + lane % 16) * 128 + lane / 16 * 16);
        mma::stmatrix_x4(a.at(offset as usize), words);
        bulk::fence_proxy_async();
        thread::sync_threads();
        if warp == 0 && lane == 0 {
            tensor::acquire(maps.at(2));
            tensor::store(maps.at(2), [0, 0], a);
            bulk::commit();
            bulk::wait::<0>();
        }
        cluster::sync();
    }
}

/// Bytes of shared memory for [`cores`]: A (64 rows), a tile of B (128 rows), a barrier.
pub const CORES_SHARED: u32 = 64 * 128 + 128 * 128 + 16;

/// `C = A · Bᵀ` of 64 × 64 and 128 × 64 bf16 by one warpgroup, with A in core matrices. `input` is A's address, `zeros`
/// that of a map of B. Each lane stores 164 words:
///
/// - its 32 sums with B's first 64 rows, for which A goes through registers;
/// - its 64 sums with all rows of B;
/// - the four words that `ldmatrix` finds at the beginning of A;
/// - its 64 sums of `A · D`. Columns 0 to 63 of D are B's first 64 rows, read as a matrix of 64 × 64 as they are;
///   columns 64 to 127 are B's other 64 rows.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
#[kernel(threads = 128, min_blocks = 1)]
pub unsafe fn cores(p: Io) {
    // SAFETY: A and the map are there, shared memory has room for both, and the output for what is stored.
    unsafe {
        wgmma::declare();
        let a = shared::dynamic::<u8>(0);
        let (b, barrier) = (a.at(64 * 128), Barrier::at(shared::dynamic(64 * 128 + 128 * 128)));
        let lane = thread::thread_idx_x();
        if lane == 0 {
            barrier.init(1);
            bulk::fence_init();
            let map = p.zeros.read().cast::<tensor::TensorMap>();
            tensor::acquire(map);
            barrier.arrive_expect_tx(64 * 128 + 128 * 128);
            bulk::copy_to_shared(a, p.input.cast(), 64 * 128, barrier);
            tensor::load(b, map, [0, 0], barrier);
        }
        thread::sync_threads();
        barrier.wait(0);
        let (first, second) = (wgmma::Cores::at(a), wgmma::Operand::at(b));
        let output = p.output.at((lane * 164) as usize);
        let place = lane / 8 % 2 * wgmma::CORE_ROWS_APART + lane % 32 / 16 * wgmma::CORE_BYTES + lane % 8 * 16;
        let row = a.at((lane / 32 * 2 * wgmma::CORE_ROWS_APART + place) as usize);
        wgmma::load_fragments::<0, u8>(row);
        wgmma::load_fragments::<1, u8>(row.at(256));
        wgmma::load_fragments::<2, u8>(row.at(512));
        wgmma::load_fragments::<3, u8>(row.at(768));
        wgmma::fence();
        wgmma::mma_n64_upper::<0>(second, false);
        wgmma::mma_n64_upper::<1>(second.advance(32), true);
        wgmma::mma_n64_upper::<2>(second.advance(64), true);
        wgmma::mma_n64_upper::<3>(second.advance(96), true);
        wgmma::commit();
        wgmma::wait::<0>();
        macro_rules! store {
            ($first:literal $($i:literal)*) => {
                $( output.store($first + $i, wgmma::get::<{ 64 + $i }>().to_bits()); )*
            };
        }
        store!(0 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
        wgmma::fence();
        wgmma::mma_n128_cores(first, second, false);
        wgmma::mma_n128_cores(first.advance(256), second.advance(32), true);
        wgmma::mma_n128_cores(first.advance(512), second.advance(64), true);
        wgmma::mma_n128_cores(first.advance(768), second.advance(96), true);
        wgmma::commit();
        wgmma::wait::<0>();
        store!(32 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
        store!(32 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);
        let fragment = mma::ldmatrix_x4(a.at(place as usize));
        let mut i = 0;
        while i < 4 {
            output.store(96 + i, fragment[i]);
            i += 1;
        }
        let columns = wgmma::Columns::at(b, 64 * 128);
        wgmma::fence();
        wgmma::mma_n128_columns::<0>(columns, false);
        wgmma::mma_n128_columns::<1>(columns.advance(2048), true);
        wgmma::mma_n128_columns::<2>(columns.advance(4096), true);
        wgmma::mma_n128_columns::<3>(columns.advance(6144), true);
        wgmma::commit();
        wgmma::wait::<0>();
        store!(100 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
        store!(100 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);
    }
}
