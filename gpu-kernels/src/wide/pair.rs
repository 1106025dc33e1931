//! What the two blocks of a cluster send each other of a tile that is theirs: sums of the rows that the other finishes, from a warp to the one that has the same features there,
//! straight into shared memory. They come where activations did: the other block says when it has no more use for these, and the next are asked for when all
//! blocks are done with the phase.

use cuda_std::bulk::{self, Barrier};
use cuda_std::cluster::{self, PeerBarrier, PeerShared};
use cuda_std::{shared, thread, wgmma};

use super::{Memory, WARPS};
use crate::waiting;

/// One that says that the other block's activations may be overwritten, and one for each warp's sums.
pub const BARRIERS: u32 = 1 + WARPS;
/// Of eight rows, from all lanes of a warp.
const GROUP_BYTES: u32 = 32 * 16;

/// A barrier of this block.
#[inline(always)]
unsafe fn barrier<const ROWS: u32>(number: u32) -> Barrier {
    unsafe { Barrier::at(shared::dynamic(Memory::<ROWS>::PAIR + number * 8)) }
}

/// Makes the barriers.
#[inline(always)]
pub unsafe fn init<const ROWS: u32>() {
    unsafe {
        barrier::<ROWS>(0).init(WARPS);
        let mut warp = 0;
        while warp < WARPS {
            barrier::<ROWS>(1 + warp).init(1);
            warp += 1;
        }
    }
}

/// A warp's end of the exchange.
#[derive(Clone, Copy)]
pub struct Pair<const ROWS: u32> {
    warp: u32,
    lane: u32,
}

impl<const ROWS: u32> Pair<ROWS> {
    const GROUPS: u32 = ROWS / 8 / 2;

    #[inline(always)]
    pub fn new() -> Self {
        Self { warp: thread::fresh(thread::warp_id()), lane: thread::fresh(thread::lane_id()) }
    }

    #[inline(always)]
    fn other() -> u32 {
        cluster::rank() ^ 1
    }

    /// Where group `group` of a chain's rows is, for this lane.
    #[inline(always)]
    const fn place(&self, chain: u32, group: u32) -> u32 {
        Memory::<ROWS>::ROW_RING.start
            + ((chain * Self::GROUPS + group) * WARPS + self.warp) * GROUP_BYTES
            + self.lane * 16
    }

    /// This warp has multiplied all activations that it had; waits until all of the other block have, and so may be sent to. `chains` will come.
    #[inline(always)]
    pub unsafe fn open(&self, chains: u32, parity: u32) {
        unsafe {
            PeerBarrier::new(barrier::<ROWS>(0), Self::other()).arrive_if(self.lane == 0);
            if self.lane == 0 {
                barrier::<ROWS>(1 + self.warp).arrive_expect_tx(chains * Self::GROUPS * GROUP_BYTES);
            }
            waiting::for_phase(barrier::<ROWS>(0), parity);
        }
    }

    /// Sends the lane's sums of a group of rows.
    #[inline(always)]
    unsafe fn send(&self, chain: u32, group: u32, sums: [f32; 4]) {
        unsafe {
            let to = PeerShared::new(shared::dynamic::<u8>(self.place(chain, group)), Self::other());
            let barrier = PeerBarrier::new(barrier::<ROWS>(1 + self.warp), Self::other());
            cluster::send16(to, sums.map(f32::to_bits), barrier);
        }
    }

    /// What came of a group of rows.
    #[inline(always)]
    unsafe fn received(&self, chain: u32, group: u32) -> [f32; 4] {
        unsafe { shared::dynamic::<u32>(self.place(chain, group)).load16(0).map(f32::from_bits) }
    }

    /// Sends what this part of a tile has of the other's rows, and adds what comes to what it has of its own: sums are in the first of the lower accumulators then. The first part has a total in the
    /// lower ones, the second a chain in the lower ones and one in the upper.
    #[inline(always)]
    pub unsafe fn exchange<const TILES: usize>(&self, part: u32, parity: u32) {
        macro_rules! exchange {
            ($groups:tt) => {
                if TILES == 2 * $groups {
                    if part == 0 {
                        unroll!(J < $groups; {
                            unsafe { self.send(0, J as u32, accumulators!(4 * J + 4 * $groups)) };
                        });
                    } else {
                        unroll!(J < $groups; {
                            unsafe { self.send(0, J as u32, accumulators!(4 * J)) };
                            unsafe { self.send(1, J as u32, accumulators!(64 + 4 * J)) };
                        });
                    }
                    unsafe { waiting::for_phase(barrier::<ROWS>(1 + self.warp), parity) };
                    if part == 0 {
                        unroll!(J < $groups; {
                            let total = accumulators!(4 * J);
                            let chains = [0, 1].map(|chain| unsafe { self.received(chain, J as u32) });
                            accumulators!(4 * J, [0, 1, 2, 3].map(|e| total[e] + chains[0][e] + chains[1][e]));
                        });
                    } else {
                        unroll!(J < $groups; {
                            let total = unsafe { self.received(0, J as u32) };
                            let chains = [accumulators!(4 * J + 4 * $groups), accumulators!(64 + 4 * J + 4 * $groups)];
                            accumulators!(4 * J, [0, 1, 2, 3].map(|e| total[e] + chains[0][e] + chains[1][e]));
                        });
                    }
                }
            };
        }
        exchange!(4);
        exchange!(8);
        // The copy engine will write there.
        bulk::fence_proxy_async();
    }
}
