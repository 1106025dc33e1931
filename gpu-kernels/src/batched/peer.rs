//! The exchange between the two CTAs of a cluster that have the two parts of a tile. Each sends the other its sums of
//! the rows that the other finishes. A warp sends straight into shared memory, to the other CTA's warp with the same
//! features. The sums come where activations were. The other CTA says when it needs these no more; the next activations
//! are loaded when all CTAs are done with the phase. The two CTAs' producers also [keep step](keep_step).
//!
//! # Safety
//! Both CTAs of the cluster call what is unsafe here, equally often and in the same order, in kernels of the same
//! `ROWS`; neither ends before the other is done. They have synchronised behind [`init`]. The eight consumer warps
//! exchange, all of their lanes; one other lane of each CTA [keeps step](keep_step).

use cuda_std::bulk::{self, Barrier};
use cuda_std::cluster::{self, PeerBarrier, PeerShared};
use cuda_std::shared::{self, Shared};
use cuda_std::{device, thread, wgmma};

use super::{Memory, WARPS};
use crate::waiting;

/// One barrier for the other CTA to say that its activations may be overwritten, one for the sums of each warp, and one
/// for the lanes that [keep step](keep_step).
pub const BARRIERS: u32 = 2 + WARPS;
const STEP: u32 = 1 + WARPS;
/// Bytes of the sums of eight rows, from all lanes of a warp.
const GROUP_BYTES: u32 = 32 * 16;

/// A barrier of this CTA.
///
/// # Safety
/// `number` is below [`BARRIERS`], of a kernel of `ROWS` rows a tile.
#[device]
unsafe fn barrier<const ROWS: u32>(number: u32) -> Barrier {
    // SAFETY: the caller's word.
    unsafe { Barrier::at(shared::dynamic(Memory::<ROWS>::PEER + number * 8)) }
}

/// The other CTA's rank.
#[device]
fn other() -> u32 {
    cluster::rank() ^ 1
}

/// Makes the barriers.
///
/// # Safety
/// One lane of the CTA calls it, before the cluster synchronises, and [fences](bulk::fence_init) the barriers.
#[device]
pub unsafe fn init<const ROWS: u32>() {
    // SAFETY: the caller's word.
    unsafe {
        barrier::<ROWS>(0).init(WARPS);
        let mut warp = 0;
        while warp < WARPS {
            barrier::<ROWS>(1 + warp).init(1);
            warp += 1;
        }
        // The two lanes that keep step.
        barrier::<ROWS>(STEP).init(2);
    }
}

/// One lane of each CTA waits for the other CTA's. Called now and then where both CTAs read the same weights, so that
/// L2 reads these from memory once. `parity` is 1 after an odd number of calls.
///
/// # Safety
/// One lane of each CTA calls it, always the same, as often as the other's.
#[device]
pub unsafe fn keep_step<const ROWS: u32>(parity: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let own = barrier::<ROWS>(STEP);
        PeerBarrier::new(own, other()).arrive();
        // Its own arrival counts, too: otherwise the other lane's next arrival could come before this lane has waited.
        own.arrive();
        waiting::for_phase(own, parity);
    }
}

/// A warp's side of the exchange.
#[derive(Clone, Copy)]
pub struct Peer<const ROWS: u32> {
    warp: u32,
    lane: u32,
    /// Parity of the phase that ends with this exchange, of all barriers of the exchange.
    parity: u32,
}

impl<const ROWS: u32> Peer<ROWS> {
    const GROUPS: u32 = ROWS / 8 / 2;

    #[device]
    pub fn new(parity: u32) -> Self {
        Self { warp: thread::opaque(thread::warp_id()), lane: thread::opaque(thread::lane_id()), parity }
    }

    /// Where this lane receives the first group of rows of the first split-K partial.
    #[device]
    unsafe fn first(&self) -> Shared<u8> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(Memory::<ROWS>::ROW_RING.start + self.warp * GROUP_BYTES + self.lane * 16) }
    }

    /// Bytes from there to group `group` of split-K partial `k_partial`.
    #[device]
    const fn offset(k_partial: u32, group: u32) -> u32 {
        (k_partial * Self::GROUPS + group) * WARPS * GROUP_BYTES
    }

    /// Says that this warp has multiplied all activations of its unit, and waits until all warps of the other CTA have:
    /// then they can be sent to. `k_partials` split-K partials will come.
    ///
    /// # Safety
    /// All consumer warps call it, once for each exchange. They have waited for all products of the unit, no
    /// activations are under way, and the other CTA sends `k_partials` to each warp.
    #[device]
    pub unsafe fn open(&self, k_partials: u32) {
        // SAFETY: the caller's word.
        unsafe {
            PeerBarrier::new(barrier::<ROWS>(0), other()).arrive_if(self.lane == 0);
            if self.lane == 0 {
                barrier::<ROWS>(1 + self.warp).arrive_expect_tx(k_partials * Self::GROUPS * GROUP_BYTES);
            }
            waiting::for_phase(barrier::<ROWS>(0), self.parity);
        }
    }

    /// Sends this part's sums of the rows that the other part finishes, and adds what arrives to its sums of its own
    /// rows. The results are in the first of the lower accumulators. Before, the first part has a total in the lower
    /// accumulators; the second part has one split-K partial in the lower and one in the upper ones.
    ///
    /// # Safety
    /// All consumer warps call it, behind [`open`](Self::open). `part` is 0 in the one CTA and 1 in the other, and the
    /// accumulators are as said.
    #[device]
    pub unsafe fn exchange<const TILES: usize>(&self, part: u32) {
        // This CTA's receiving memory and barrier, and the other CTA's.
        // SAFETY: the caller's word.
        let (from, own) = unsafe { (self.first(), barrier::<ROWS>(1 + self.warp)) };
        let (to, arrived) = (PeerShared::new(from, other()), PeerBarrier::new(own, other()));
        // SAFETY: the caller's word.
        let send = |k_partial, group, sums: [f32; 4]| unsafe {
            cluster::send16(to.at(Self::offset(k_partial, group)), sums.map(f32::to_bits), arrived);
        };
        // SAFETY: the caller's word.
        let received = |k_partial, group| unsafe {
            from.at(Self::offset(k_partial, group) as usize).cast::<u32>().load16(0).map(f32::from_bits)
        };
        macro_rules! exchange {
            ($groups:tt) => {
                if TILES == 2 * $groups {
                    if part == 0 {
                        unroll!(J < $groups; {
                            send(0, J as u32, accumulators!(4 * J + 4 * $groups));
                        });
                    } else {
                        unroll!(J < $groups; {
                            send(0, J as u32, accumulators!(4 * J));
                            send(1, J as u32, accumulators!(64 + 4 * J));
                        });
                    }
                    // SAFETY: the caller's word.
                    unsafe { waiting::for_phase(own, self.parity) };
                    if part == 0 {
                        unroll!(J < $groups; {
                            let total = accumulators!(4 * J);
                            let k_partials = [0, 1].map(|k_partial| received(k_partial, J as u32));
                            accumulators!(4 * J, [0, 1, 2, 3].map(|e| total[e] + k_partials[0][e] + k_partials[1][e]));
                        });
                    } else {
                        unroll!(J < $groups; {
                            let total = received(0, J as u32);
                            let k_partials = [accumulators!(4 * J + 4 * $groups), accumulators!(64 + 4 * J + 4 * $groups)];
                            accumulators!(4 * J, [0, 1, 2, 3].map(|e| total[e] + k_partials[0][e] + k_partials[1][e]));
                        });
                    }
                }
            };
        }
        exchange!(4);
        exchange!(6);
        exchange!(8);
        // TMA will write activations there.
        bulk::fence_proxy_async();
    }
}
