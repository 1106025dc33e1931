//! Asynchronous copies and mbarriers: kernels that wait for them pass, kernels that do not are races.

mod common;

use common::{Io, fails, passes};
use cuda_std::bulk::{self, Barrier};
use cuda_std::emulator::Launch;
use cuda_std::{async_copy, kernel, shared, thread, warp};

/// Each lane copies 16 bytes into shared memory, in two groups, and reads what its neighbour copied.
macro_rules! copy16 {
    ($(#[$doc:meta])* $name:ident, $wait:expr, $sync:expr) => {
        $(#[$doc])*
        #[kernel(threads = 64)]
        pub unsafe fn $name(p: Io) {
            // SAFETY: 128 times 16 bytes, in both memories.
            unsafe {
                let thread = thread::thread_idx_x() as usize;
                for group in 0..2 {
                    let at = (group * 64 + thread) * 16;
                    async_copy::copy16(shared::dynamic::<u8>(0).at(at), p.input.cast::<u8>().at(at));
                    async_copy::commit();
                }
                $wait;
                $sync;
                let first = shared::dynamic::<u32>(0).load16((thread ^ 33) * 4);
                async_copy::wait::<0>();
                p.output.store16(thread * 4, first);
            }
        }
    };
}

copy16!(
    /// Waits for the first group, then for the other lanes.
    copies_waited_for, async_copy::wait::<1>(), thread::sync_threads()
);
copy16!(
    /// Does not wait for the first group.
    copies_not_waited_for, async_copy::wait::<2>(), thread::sync_threads()
);
copy16!(
    /// Waits for the first group, but not for the other lanes.
    copies_without_barrier, async_copy::wait::<1>(), {}
);

#[test]
fn asynchronous_copies_arrive_once_waited_for() {
    passes::<copies_waited_for>(Launch::new(1, 64), 512, |i| if i < 256 { (i as u32) ^ (33 << 2) } else { u32::MAX });
    let text = fails::<copies_not_waited_for>(Launch::new(1, 64), 512, &["race on shared offset"]);
    assert!(text.contains("by a copy that is not known to be done"), "{text}");
    fails::<copies_without_barrier>(Launch::new(1, 64), 512, &["race on shared offset", "not initialised"]);
}

/// Bytes of a slot of the ring below, and how many there are.
const SLOT: u32 = 256;
const SLOTS: u32 = 3;

/// A producer warp fills a ring with bulk copies; two consumer warps add up what comes. `$full` says whether the
/// consumers wait for the producer, `$empty` whether it waits for them.
macro_rules! ring {
    ($(#[$doc:meta])* $name:ident, $full:literal, $empty:literal) => {
        $(#[$doc])*
        #[kernel(threads = 96)]
        pub unsafe fn $name(p: Io) {
            // SAFETY: `n / 64` chunks of 256 bytes, and as many slots in shared memory as the ring has.
            unsafe {
                let barriers = shared::dynamic::<u64>(SLOT * SLOTS);
                let full = |slot: u32| Barrier::at(barriers.at(slot as usize));
                let empty = |slot: u32| Barrier::at(barriers.at((SLOTS + slot) as usize));
                if thread::thread_idx_x() == 0 {
                    for slot in 0..SLOTS {
                        full(slot).init(1);
                        empty(slot).init(2);
                    }
                    bulk::fence_init();
                }
                thread::sync_threads();
                let (lane, warp) = (thread::lane_id(), thread::warp_id());
                let mut sum = 0;
                for chunk in 0..p.n / 64 {
                    let (slot, parity) = (chunk % SLOTS, chunk / SLOTS % 2);
                    if warp == 0 {
                        if lane == 0 {
                            if $empty {
                                empty(slot).wait(parity ^ 1);
                            }
                            full(slot).arrive_expect_tx(SLOT);
                            let source = p.input.cast::<u8>().at((chunk * SLOT) as usize);
                            bulk::copy_to_shared(shared::dynamic(slot * SLOT), source, SLOT, full(slot));
                        }
                    } else {
                        if $full {
                            full(slot).wait(parity);
                        } else {
                            full(0).wait(0);
                        }
                        sum += shared::dynamic::<u32>(slot * SLOT).load(((warp - 1) * 32 + lane) as usize);
                        warp::sync_warp();
                        if lane == 0 {
                            empty(slot).arrive();
                        }
                    }
                }
                thread::sync_threads();
                if warp != 0 {
                    p.output.store(((warp - 1) * 32 + lane) as usize, sum);
                }
            }
        }
    };
}

ring!(
    /// As it should be.
    ring_in_order, true, true
);
ring!(
    /// Consumers wait for the first chunk only.
    ring_reads_early, false, true
);
ring!(
    /// The producer does not wait for its consumers.
    ring_writes_early, true, false
);

#[test]
fn a_ring_of_bulk_copies_runs() {
    passes::<ring_in_order>(Launch::new(1, 96), 640, |i| {
        if i < 64 { (0..10).map(|chunk| chunk * 64 + i as u32).sum() } else { u32::MAX }
    });
}

#[test]
fn a_ring_without_its_waits_races() {
    // A consumer that comes two phases late waits for a phase that nobody ends.
    let text = fails::<ring_reads_early>(Launch::new(1, 96), 640, &["race on shared offset", "deadlock"]);
    assert!(text.contains("copies.rs"), "{text}");
    fails::<ring_writes_early>(Launch::new(1, 96), 640, &["race on shared offset", "expects"]);
}

/// Copies shared memory to global memory in bulk, then overwrites the source and reads the destination.
macro_rules! store {
    ($(#[$doc:meta])* $name:ident, $wait_read:expr, $wait:expr) => {
        store!($(#[$doc])* $name, bulk::fence_proxy_async(), $wait_read, $wait);
    };
    ($(#[$doc:meta])* $name:ident, $fence:expr, $wait_read:expr, $wait:expr) => {
        $(#[$doc])*
        #[kernel(threads = 32)]
        pub unsafe fn $name(p: Io) {
            // SAFETY: 32 words in both memories.
            unsafe {
                let (lane, words) = (thread::lane_id(), shared::dynamic::<u32>(0));
                words.store(lane as usize, lane + 5);
                $fence;
                warp::sync_warp();
                if lane == 0 {
                    bulk::copy_to_global(p.output.cast(), words.cast(), 128);
                    bulk::commit();
                    $wait_read;
                }
                warp::sync_warp();
                words.store(lane as usize, 0);
                if lane == 0 {
                    $wait;
                }
                warp::sync_warp();
                p.zeros.store(lane as usize, p.output.load(lane as usize));
            }
        }
    };
}

store!(
    /// As it should be.
    store_in_order, bulk::wait_read::<0>(), bulk::wait::<0>()
);
store!(
    /// Overwrites the source too early.
    store_overwritten, {}, bulk::wait::<0>()
);
store!(
    /// Reads the destination too early.
    store_read_early, bulk::wait_read::<0>(), {}
);
store!(
    /// Waits for nothing before its end.
    store_unfinished, bulk::wait_read::<1>(), {}
);

store!(
    /// A fence of the block is no proxy fence: TMA may not see what was written.
    store_without_proxy_fence, thread::fence_block(), bulk::wait_read::<0>(), bulk::wait::<0>()
);

#[test]
fn bulk_stores_are_waited_for() {
    passes::<store_in_order>(Launch::new(1, 32), 32, |i| i as u32 + 5);
    fails::<store_overwritten>(Launch::new(1, 32), 32, &["race on shared offset"]);
    fails::<store_read_early>(Launch::new(1, 32), 32, &["race on byte"]);
    fails::<store_without_proxy_fence>(Launch::new(1, 32), 32, &["no fence_proxy_async stands between"]);
    fails::<store_unfinished>(Launch::new(1, 32), 32, &["race on shared offset"]);
}

/// Ends without waiting for its copy.
#[kernel(threads = 32)]
pub unsafe fn abandoned(p: Io) {
    // SAFETY: 16 bytes in both memories; that it is not waited for is what the test is about.
    unsafe {
        if thread::lane_id() == 3 {
            async_copy::copy16(shared::dynamic(0), p.input.cast());
        }
    }
}

#[test]
fn a_copy_must_be_waited_for() {
    fails::<abandoned>(Launch::new(1, 32), 32, &["lane 3 of block (0, 0, 0)"]);
}

/// One warp tries to wait for a phase that ends only after it has given up.
#[kernel(threads = 64)]
pub unsafe fn tries_twice(p: Io) {
    // SAFETY: a word for each lane, and a barrier in shared memory.
    unsafe {
        let (thread, barrier) = (thread::thread_idx_x(), Barrier::at(shared::dynamic(0)));
        if thread == 0 {
            barrier.init(1);
            bulk::fence_init();
        }
        thread::sync_threads();
        let came = thread::warp_id() == 0 && barrier.try_wait(0);
        thread::sync_threads();
        if thread == 40 {
            barrier.arrive();
        }
        p.output.store(thread as usize, u32::from(came) * 2 + u32::from(barrier.try_wait(0)));
    }
}

/// Tries for ever.
#[kernel(threads = 32)]
pub unsafe fn tries_on(_p: Io) {
    // SAFETY: a barrier in shared memory.
    unsafe {
        let barrier = Barrier::at(shared::dynamic(0));
        if thread::thread_idx_x() == 0 {
            barrier.init(1);
            bulk::fence_init();
        }
        thread::sync_threads();
        while !barrier.try_wait(0) {}
    }
}

#[test]
fn who_tries_to_wait_gives_up_when_nothing_else_can_happen() {
    passes::<tries_twice>(Launch::new(1, 64), 64, |_| 1);
    let how = Launch { idle_steps: 10_000, ..Launch::new(1, 32) };
    let text = fails::<tries_on>(how, 32, &["livelock: for 10000 steps lanes did nothing but poll"]);
    assert!(text.contains("lanes 0-31 of block (0, 0, 0) wait for parity 0 of the mbarrier"), "{text}");
}
