//! Clusters: kernels whose blocks share what they copy pass under every seed, and their mistakes are found.

mod common;

use common::{Io, fails, passes, run};
use cuda_std::bulk::{self, Barrier};
use cuda_std::cluster::{self, PeerBarrier, PeerShared};
use cuda_std::emulator::Launch;
use cuda_std::{kernel, shared, thread, warp};

/// Bytes of a slot of the ring below, and how many there are.
const SLOT: u32 = 256;
const SLOTS: u32 = 3;

/// Both blocks of a pair read the same chunks of 64 words. One lane of each block copies half of every chunk into the
/// rings of both blocks, and the second warp of each block adds up what comes.
///
/// - `$fence` and `$meet` make the barriers known.
/// - `$free` says which block a warp tells that a slot is free: from `(rank, lane)`, for its first two lanes.
/// - `$end` comes before the kernel's end.
macro_rules! shared_ring {
    ($(#[$doc:meta])* $name:ident, $fence:expr, $meet:expr, $free:expr, $end:expr) => {
        $(#[$doc])*
        #[kernel(threads = 64, cluster = 2)]
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
                    $fence;
                }
                $meet;
                let (rank, lane) = (cluster::rank(), thread::lane_id());
                let free: fn(u32, u32) -> u32 = $free;
                let mut sum = 0;
                for chunk in 0..p.n / 64 {
                    let (slot, parity) = (chunk % SLOTS, chunk / SLOTS % 2);
                    if thread::warp_id() == 1 {
                        full(slot).wait(parity);
                        let words = shared::dynamic::<u32>(slot * SLOT).at(lane as usize);
                        sum += words.load(0) + words.load(32);
                        warp::sync_warp();
                        if lane < 2 {
                            PeerBarrier::new(empty(slot), free(rank, lane)).arrive();
                        }
                    } else if lane == 0 {
                        empty(slot).wait(parity ^ 1);
                        full(slot).arrive_expect_tx(SLOT);
                        let half = rank * SLOT / 2;
                        let source = p.input.cast::<u8>().at((chunk * SLOT + half) as usize);
                        let to = shared::dynamic(slot * SLOT + half);
                        bulk::copy_to_shared_multicast(to, source, SLOT / 2, full(slot), 0b11);
                    }
                }
                if thread::warp_id() == 1 {
                    p.output.store((thread::block_idx_x() * 32 + lane) as usize, sum);
                }
                $end;
            }
        }
    };
}

shared_ring!(
    /// As it should be.
    pairs_in_order, bulk::fence_init(), cluster::sync_made(), |_, lane| lane, cluster::sync()
);
shared_ring!(
    /// A cluster barrier that orders everything needs no fence.
    pairs_that_meet, {}, cluster::sync(), |_, lane| lane, cluster::sync()
);
shared_ring!(
    /// Nobody fenced the barriers.
    pairs_without_fence, {}, cluster::sync_made(), |_, lane| lane, cluster::sync()
);
shared_ring!(
    /// The blocks do not meet, so only the block itself knows of its barriers.
    pairs_that_begin_early, bulk::fence_init(), thread::sync_threads(), |_, lane| lane, cluster::sync()
);
shared_ring!(
    /// A slot counts as free when the block itself is done with it, whether or not the other is.
    pairs_that_write_early, bulk::fence_init(), cluster::sync_made(), |rank, _| rank, cluster::sync()
);
shared_ring!(
    /// A block ends while the other still tells it of slots.
    pairs_that_end_early, bulk::fence_init(), cluster::sync_made(), |_, lane| lane, {}
);
shared_ring!(
    /// There is no third block.
    pairs_of_three, bulk::fence_init(), cluster::sync_made(), |_, lane| lane + 1, cluster::sync()
);

const PAIRS: fn() -> Launch = || Launch::new(8, 64);

#[test]
fn pairs_share_what_they_copy() {
    let sum = |i: usize| (0..4).map(|chunk| 2 * (chunk * 64 + i as u32 % 32) + 32).sum();
    passes::<pairs_in_order>(PAIRS(), 256, sum);
    passes::<pairs_that_meet>(PAIRS(), 256, sum);
    passes::<pairs_in_order>(Launch { cooperative: true, ..PAIRS() }, 256, sum);
}

#[test]
fn what_pairs_forget_is_found() {
    let race = "race on shared offset";
    fails::<pairs_without_fence>(PAIRS(), 256, &[race, "no fence_init stands between"]);
    fails::<pairs_that_begin_early>(PAIRS(), 256, &[race, "not initialised", "no mbarrier was made"]);
    fails::<pairs_that_write_early>(PAIRS(), 256, &[race, "expects"]);
    fails::<pairs_that_end_early>(PAIRS(), 256, &["of the cluster has ended", "was started here and never waited for"]);
    fails::<pairs_of_three>(PAIRS(), 256, &["block 2 of a cluster of 2"]);
}

/// One warp of a pair of blocks ends; the barrier of the cluster waits for those that are left.
#[kernel(threads = 64, cluster = 2)]
pub unsafe fn one_that_stays(p: Io) {
    if cluster::rank() == 0 && thread::warp_id() == 0 {
        return;
    }
    cluster::sync();
    // SAFETY: a word for each lane.
    unsafe { p.output.store((thread::block_idx_x() * 64 + thread::thread_idx_x()) as usize, cluster::rank()) };
}

#[test]
fn lanes_that_ended_are_not_waited_for() {
    for seed in 0..50 {
        let run = run::<one_that_stays>(Launch { seed, ..Launch::new(2, 64) }, 128);
        run.result.unwrap();
        assert_eq!(run.output.to_vec()[32..], [[0; 32], [1; 32], [1; 32]].concat(), "seed {seed}");
    }
}

#[test]
fn a_grid_is_whole_clusters() {
    let error = run::<one_that_stays>(Launch::new(3, 64), 192).result.unwrap_err().to_string();
    assert!(error.contains("a grid of 3 blocks in x: a multiple of 2"), "{error}");
}

/// The lanes of a pair of blocks swap words: each sends its own to the lane of the same number in the other block.
/// `$barrier` says in which block the words complete on a barrier, from the sender's rank. `$wait` says whether lanes
/// wait for what comes.
macro_rules! swap {
    ($(#[$doc:meta])* $name:ident, $barrier:expr, $wait:expr) => {
        $(#[$doc])*
        #[kernel(threads = 32, cluster = 2)]
        pub unsafe fn $name(p: Io) {
            // SAFETY: 16 bytes a lane in shared memory, and behind them a barrier; four words a lane in both blocks'
            // part of the output.
            unsafe {
                let (rank, lane) = (cluster::rank(), thread::lane_id());
                let barrier = Barrier::at(shared::dynamic::<u64>(32 * 16));
                if lane == 0 {
                    barrier.init(1);
                    barrier.arrive_expect_tx(32 * 16);
                }
                cluster::sync();
                let words = [0, 1, 2, 3].map(|i| rank * 1000 + lane * 4 + i);
                let to = PeerShared::new(shared::dynamic::<u8>(0), rank ^ 1).at(lane * 16);
                let told: fn(u32) -> u32 = $barrier;
                cluster::send16(to, words, PeerBarrier::new(barrier, told(rank)));
                if $wait {
                    barrier.wait(0);
                }
                let came = shared::dynamic::<u32>(lane * 16).load16(0);
                p.output.at(((thread::block_idx_x() * 32 + lane) * 4) as usize).store16(0, came);
                cluster::sync();
            }
        }
    };
}

swap!(
    /// As it should be.
    lanes_that_swap, |rank| rank ^ 1, true
);
swap!(
    /// Nobody waits for what comes.
    lanes_that_read_early, |rank| rank ^ 1, false
);
swap!(
    /// The words complete on the sender's own barrier.
    lanes_that_tell_themselves, |rank| rank, true
);

#[test]
fn lanes_send_into_the_other_block() {
    // Two pairs: blocks of even numbers have what rank 1 sent.
    passes::<lanes_that_swap>(Launch::new(4, 32), 512, |i| {
        let (block, word) = (i as u32 / 128, i as u32 % 128);
        ((block % 2) ^ 1) * 1000 + word
    });
    fails::<lanes_that_read_early>(Launch::new(4, 32), 512, &["race on shared offset", "not initialised"]);
    fails::<lanes_that_tell_themselves>(Launch::new(4, 32), 512, &["that block's own"]);
}
