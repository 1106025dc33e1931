//! Planted races are found, and programs that order their accesses pass under every seed.

mod common;

use common::{Io, fails, passes};
use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::emulator::Launch;
use cuda_std::{kernel, shared, thread, warp};

/// Each lane writes a word and reads its neighbour's, in shared memory.
macro_rules! exchange {
    ($(#[$doc:meta])* $name:ident, $distance:expr, $between:expr, $after:expr) => {
        $(#[$doc])*
        #[kernel(threads = 128)]
        pub unsafe fn $name(p: Io) {
            // SAFETY: a word for each lane; what is missing between is what the tests are about.
            unsafe {
                let thread = thread::thread_idx_x();
                let words = shared::dynamic::<u32>(0);
                words.store(thread as usize, thread);
                $between;
                for round in 0..4 {
                    let read = words.load((thread ^ $distance) as usize);
                    $after;
                    words.store(thread as usize, read);
                    $between;
                    if round == 3 {
                        p.output.store(thread as usize, read);
                    }
                }
            }
        }
    };
}

exchange!(
    /// With all barriers.
    with_barriers, 64, thread::sync_threads(), thread::sync_threads()
);
exchange!(
    /// No barrier between the reads and the next writes.
    without_a_barrier, 64, thread::sync_threads(), {}
);
exchange!(
    /// Within a warp, with its barriers.
    with_sync_warp, 1, warp::sync_warp(), warp::sync_warp()
);
exchange!(
    /// Within a warp, with a shuffle in place of the barrier.
    without_sync_warp, 1, warp::sync_warp(), warp::shuffle_xor(0u32, 1)
);
exchange!(
    /// Across warps, with only the barrier of the warp.
    with_too_little, 64, thread::sync_threads(), warp::sync_warp()
);
exchange!(
    /// Within pairs of warps, with their named barriers.
    with_named_barriers,
    32,
    thread::sync_named(1 + thread::thread_idx_x() / 64, 64),
    thread::sync_named(1 + thread::thread_idx_x() / 64, 64)
);
exchange!(
    /// Across pairs of warps, with the named barriers of the pairs.
    with_the_wrong_barriers,
    64,
    thread::sync_named(1 + thread::thread_idx_x() / 64, 64),
    thread::sync_named(1 + thread::thread_idx_x() / 64, 64)
);

/// One block: the lanes' words travel back and forth.
const BLOCK: fn() -> Launch = || Launch::new(1, 128);

#[test]
fn barriers_order_shared_memory() {
    passes::<with_barriers>(BLOCK(), 128, |i| i as u32);
    passes::<with_sync_warp>(BLOCK(), 128, |i| i as u32);
    passes::<with_named_barriers>(BLOCK(), 128, |i| i as u32);
}

#[test]
fn missing_barriers_are_races() {
    let text = fails::<without_a_barrier>(BLOCK(), 128, &["race on shared offset"]);
    assert!(text.contains("of block (0, 0, 0) wrote it at"), "{text}");
    fails::<without_sync_warp>(BLOCK(), 128, &["race on shared offset"]);
    fails::<with_too_little>(BLOCK(), 128, &["race on shared offset"]);
    fails::<with_the_wrong_barriers>(BLOCK(), 128, &["race on shared offset", "not initialised"]);
}

/// All lanes write the same word.
#[kernel(threads = 32)]
pub unsafe fn same_value(p: Io) {
    // SAFETY: there is a word; that all write it is what the test is about.
    unsafe { p.output.store(0, 7) }
}

#[test]
fn writing_the_same_value_is_a_race() {
    let text = fails::<same_value>(Launch::new(1, 32), 1, &["race on byte 0 of buffer `output` ([u32; 1])"]);
    assert!(text.contains("races.rs"), "{text}");
}

/// Neighbouring lanes write neighbouring bytes, and pairs of lanes the halves of words.
#[kernel(threads = 32)]
pub unsafe fn neighbours(p: Io) {
    // SAFETY: 48 words: bytes 0 to 127, halves from 128 on.
    unsafe {
        let lane = thread::lane_id();
        p.output.cast::<u8>().store(lane as usize, lane as u8);
        p.output.cast::<u16>().store(16 + lane as usize, lane as u16);
    }
}

#[test]
fn neighbouring_bytes_do_not_race() {
    passes::<neighbours>(Launch::new(1, 32), 24, |i| {
        let i = i as u32;
        if i < 8 { 0x0302_0100 + i * 0x0404_0404 } else { 0x0001_0000 + (i - 8) * 0x0002_0002 }
    });
}

/// Each block writes a word that its neighbour reads, and nothing orders the two.
#[kernel(threads = 32)]
pub unsafe fn across_blocks(p: Io) {
    // SAFETY: a word for each block.
    unsafe {
        if thread::thread_idx_x() == 0 {
            let block = thread::block_idx_x() as usize;
            p.zeros.store(block, 1);
            p.output.store(block, p.zeros.load((block + 1) % 8));
        }
    }
}

#[test]
fn blocks_race() {
    let text = fails::<across_blocks>(Launch::new(8, 32), 8, &["race on byte"]);
    assert!(text.contains("buffer `zeros` ([u32; 64])"), "{text}");
}

/// Reads through the constant path what another lane writes.
#[kernel(threads = 64)]
pub unsafe fn constant(p: Io) {
    // SAFETY: there are 64 words; that one is written is what the test is about.
    unsafe {
        let thread = thread::thread_idx_x() as usize;
        if thread == 40 {
            p.zeros.store(3, 1);
        }
        thread::sync_threads();
        p.output.store(thread, p.zeros.read().load_nc(3 + thread % 2));
    }
}

#[test]
fn constant_loads_of_what_is_written_are_races_even_when_ordered() {
    let text = fails::<constant>(Launch::new(1, 64), 64, &["read (as constant for the launch)"]);
    assert!(text.contains("lane 40 of block (0, 0, 0) wrote it"), "{text}");
}

/// The last block to finish adds up what all wrote.
macro_rules! last_block {
    ($(#[$doc:meta])* $name:ident, $before:expr, $ordering:expr, $scope:expr, $after:expr) => {
        $(#[$doc])*
        #[kernel(threads = 64)]
        pub unsafe fn $name(p: Io) {
            // SAFETY: a word for each lane of the grid, and zeros for the counter.
            unsafe {
                let (thread, block) = (thread::thread_idx_x(), thread::block_idx_x());
                let counter = p.zeros;
                let words = p.output.at(1);
                words.store((block * 64 + thread) as usize, block);
                thread::sync_threads();
                let last = shared::dynamic::<u32>(0);
                if thread == 0 {
                    $before;
                    let before = atomic::fetch_add(counter, 0, 1, $ordering, $scope);
                    $after;
                    last.store(0, (before == thread::grid_dim_x() - 1) as u32);
                }
                thread::sync_threads();
                if last.load(0) != 0 && thread == 17 {
                    let mut sum = 0;
                    for i in 0..thread::grid_dim_x() * 64 {
                        sum += words.load(i as usize);
                    }
                    p.output.store(0, sum);
                }
            }
        }
    };
}

last_block!(
    /// With fences around a relaxed counter.
    last_block_fences, thread::fence_device(), Ordering::Relaxed, Scope::Device, thread::fence_device()
);
last_block!(
    /// With a counter that acquires and releases.
    last_block_orders, {}, Ordering::AcqRel, Scope::Device, {}
);
last_block!(
    /// With a relaxed counter alone.
    last_block_relaxed, {}, Ordering::Relaxed, Scope::Device, {}
);
last_block!(
    /// With the first of the two fences.
    last_block_half, thread::fence_device(), Ordering::Relaxed, Scope::Device, {}
);
last_block!(
    /// With the scope of a block.
    last_block_narrow, {}, Ordering::AcqRel, Scope::Block, {}
);
last_block!(
    /// With fences for the block.
    last_block_narrow_fences, thread::fence_block(), Ordering::Relaxed, Scope::Device, thread::fence_block()
);

#[test]
fn the_last_block_sees_what_all_wrote() {
    let expected = |i: usize| if i == 0 { 64 * 28 } else { (i as u32 - 1) / 64 };
    passes::<last_block_fences>(Launch::new(8, 64), 513, expected);
    passes::<last_block_orders>(Launch::new(8, 64), 513, expected);
}

#[test]
fn the_last_block_needs_its_fences() {
    fails::<last_block_relaxed>(Launch::new(8, 64), 513, &["race on byte"]);
    fails::<last_block_half>(Launch::new(8, 64), 513, &["race on byte"]);
    fails::<last_block_narrow>(Launch::new(8, 64), 513, &["race on byte"]);
    fails::<last_block_narrow_fences>(Launch::new(8, 64), 513, &["race on byte"]);
}

/// One warp hands words to another through a flag in shared memory.
macro_rules! flag {
    ($(#[$doc:meta])* $name:ident, $release:expr, $acquire:expr) => {
        $(#[$doc])*
        #[kernel(threads = 64)]
        pub unsafe fn $name(p: Io) {
            // SAFETY: a word for each lane, after that of the flag.
            unsafe {
                let (flag, words) = (shared::dynamic::<u32>(0), shared::dynamic::<u32>(16));
                let lane = thread::lane_id() as usize;
                if thread::thread_idx_x() == 0 {
                    atomic::store(flag, 0, 0, Ordering::Relaxed, Scope::Block);
                }
                thread::sync_threads();
                if thread::warp_id() == 0 {
                    words.store(lane, lane as u32 * 3);
                    warp::sync_warp();
                    if lane == 0 {
                        atomic::store(flag, 0, 1, $release, Scope::Block);
                    }
                } else {
                    while atomic::load(flag, 0, $acquire, Scope::Block) == 0 {}
                    p.output.store(lane, words.load(lane));
                }
            }
        }
    };
}

flag!(
    /// As it should be.
    flag_ordered, Ordering::Release, Ordering::Acquire
);
flag!(
    /// Nobody acquires.
    flag_relaxed_load, Ordering::Release, Ordering::Relaxed
);
flag!(
    /// Nobody releases.
    flag_relaxed_store, Ordering::Relaxed, Ordering::Acquire
);

#[test]
fn a_flag_orders_if_released_and_acquired() {
    passes::<flag_ordered>(Launch::new(1, 64), 32, |i| i as u32 * 3);
    fails::<flag_relaxed_load>(Launch::new(1, 64), 32, &["race on shared offset"]);
    fails::<flag_relaxed_store>(Launch::new(1, 64), 32, &["race on shared offset"]);
}

/// Polls a flag with plain loads.
#[kernel(threads = 64)]
pub unsafe fn plain_flag(p: Io) {
    // SAFETY: there are 64 words; how the flag is read is what the test is about.
    unsafe {
        if thread::thread_idx_x() == 0 {
            atomic::store(p.zeros, 0, 1, Ordering::Release, Scope::Device);
        } else if thread::thread_idx_x() == 40 {
            p.output.store(0, p.zeros.load(0));
        }
    }
}

#[test]
fn plain_loads_race_with_atomics() {
    fails::<plain_flag>(Launch::new(1, 64), 1, &["atomically wrote"]);
}

/// A barrier of the whole grid: a counter that all blocks raise and wait for.
#[kernel(threads = 64)]
pub unsafe fn grid_barrier(p: Io) {
    // SAFETY: a word for each lane of the grid.
    unsafe {
        let (thread, block, blocks) = (thread::thread_idx_x(), thread::block_idx_x(), thread::grid_dim_x());
        let mut value = block * 64 + thread;
        for round in 0..3 {
            p.output.store((block * 64 + thread) as usize, value);
            for side in 0..2 {
                thread::sync_threads();
                if thread == 0 {
                    atomic::fetch_add(p.zeros, 0, 1, Ordering::Release, Scope::Device);
                    let wanted = (round * 2 + side + 1) * blocks;
                    while atomic::load(p.zeros, 0, Ordering::Acquire, Scope::Device) < wanted {}
                }
                thread::sync_threads();
                if side == 0 {
                    value = p.output.load(((block + 1) % blocks * 64 + thread) as usize);
                }
            }
        }
        p.output.store((block * 64 + thread) as usize, value);
    }
}

#[test]
fn a_grid_barrier_orders_blocks() {
    let how = Launch { cooperative: true, ..Launch::new(6, 64) };
    passes::<grid_barrier>(how, 384, |i| (i as u32 + 3 * 64) % 384);
}
