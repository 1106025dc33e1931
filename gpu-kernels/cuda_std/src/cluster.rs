//! Clusters: blocks that run side by side on neighbouring SMs and reach each other's shared memory (sm_90 on).
//!
//! The kernel fixes its clusters' size, as in `#[kernel(threads = …, cluster = 2)]`. The blocks of a cluster are
//! neighbours in x.

use crate::bulk::Barrier;
use crate::shared::Shared;
use crate::target;

/// The block's rank in its cluster (`%cluster_ctarank`).
#[inline(always)]
#[must_use]
pub fn rank() -> u32 {
    target::cluster_rank()
}

/// Waits until every lane of the cluster has arrived or ended (`barrier.cluster`). All that lanes did to memory before
/// is done then, arrivals at barriers of other blocks included. For this the assembler puts a device-wide fence before
/// the barrier.
#[inline(always)]
#[track_caller]
pub fn sync() {
    target::cluster_sync();
}

/// As [`sync`], but without the device-wide fence (`barrier.cluster.arrive.relaxed`). Of what lanes did before, the
/// others are sure to see only the barriers that were initialised and fenced
/// ([`bulk::fence_init`](crate::bulk::fence_init)).
#[inline(always)]
#[track_caller]
pub fn sync_made() {
    target::cluster_sync_made();
}

/// Starts a store of 16 bytes to `destination`, in the shared memory of a block of the cluster. The bytes count towards
/// `barrier`, which must be in the same block (`st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32`).
///
/// # Safety
/// The destination is within the block's shared memory and a multiple of 16, and nobody else uses it before the
/// barrier's phase has ended; the barrier was made, and the block has not ended.
#[inline(always)]
#[track_caller]
pub unsafe fn send16(destination: PeerShared, words: [u32; 4], barrier: PeerBarrier) {
    // SAFETY: the caller's.
    unsafe { target::cluster_send16(destination.0, words, barrier.0) }
}

/// An address in the shared memory of a block of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerShared(u32);

impl PeerShared {
    /// The address in block `rank` that corresponds to `place` in this block (`mapa.shared::cluster`).
    #[inline(always)]
    #[must_use]
    pub fn new<T>(place: Shared<T>, rank: u32) -> Self {
        Self(target::cluster_map(place.addr(), rank))
    }

    /// The address `bytes` bytes further.
    #[inline(always)]
    #[must_use]
    pub const fn at(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}

/// An mbarrier in the shared memory of a block of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerBarrier(u32);

impl PeerBarrier {
    /// The mbarrier in block `rank` at the address of `barrier` in this block (`mapa.shared::cluster`).
    #[inline(always)]
    #[must_use]
    pub fn new(barrier: Barrier, rank: u32) -> Self {
        Self(target::cluster_map(barrier.place().addr(), rank))
    }

    /// The mbarrier `index` places of 8 bytes further.
    #[inline(always)]
    #[must_use]
    pub const fn at(self, index: u32) -> Self {
        Self(self.0 + index * 8)
    }

    /// Arrives once (`mbarrier.arrive.shared::cluster.b64`).
    ///
    /// # Safety
    /// As [`arrive_if`](Self::arrive_if).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn arrive(self) {
        // SAFETY: the caller's.
        unsafe { self.arrive_if(true) }
    }

    /// Arrives once, if `condition` holds (`mbarrier.arrive.shared::cluster.b64`, predicated). Predication leaves no
    /// branch into which the compiler could move more code. The instruction has its default semantics, which release to
    /// the own block alone: with `.release.cluster` written out, the assembler would put a device-wide fence before it.
    /// So it says that reads are done, or keeps step. To show writes to the other block, use [`send16`] or [`sync`].
    ///
    /// # Safety
    /// The barrier was made, its block has not ended, and the phase expects the arrival.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn arrive_if(self, condition: bool) {
        // SAFETY: the caller's.
        unsafe { target::cluster_arrive_if(self.0, condition) }
    }
}
