//! Blocks that run side by side on neighbouring SMs and reach each other's shared memory (sm_90a).
//!
//! The cluster's size is the kernel's, `#[kernel(threads = …, cluster = 2)]`: neighbours in x.

use crate::bulk::Barrier;
use crate::shared::Shared;
use crate::target;

/// The block's number in its cluster (`%cluster_ctarank`).
#[inline(always)]
#[must_use]
pub fn rank() -> u32 {
    target::cluster_rank()
}

/// Waits until every lane of the cluster is here, or has ended (`barrier.cluster`). What lanes did to memory before,
/// arrivals at barriers of other blocks among it, is done then: the assembler puts a fence of the whole device before
/// it.
#[inline(always)]
#[track_caller]
pub fn sync() {
    target::cluster_sync();
}

/// As [`sync`], but of what was done before only barriers that were made and fenced
/// ([`bulk::fence_init`](crate::bulk::fence_init)) are sure to be seen: without the fence of the device
/// (`barrier.cluster.arrive.relaxed`).
#[inline(always)]
#[track_caller]
pub fn sync_made() {
    target::cluster_sync_made();
}

/// Starts a store of 16 bytes into the shared memory of block `rank`, at the place of `destination`; they count towards
/// the barrier at the place of `barrier` there (`st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32`).
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

/// A place in the shared memory of some block of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerShared(u32);

impl PeerShared {
    /// The place of `place` in block `rank` (`mapa.shared::cluster`).
    #[inline(always)]
    #[must_use]
    pub fn new<T>(place: Shared<T>, rank: u32) -> Self {
        Self(target::cluster_map(place.addr(), rank))
    }

    /// `bytes` further.
    #[inline(always)]
    #[must_use]
    pub const fn at(self, bytes: u32) -> Self {
        Self(self.0 + bytes)
    }
}

/// An mbarrier of some block of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerBarrier(u32);

impl PeerBarrier {
    /// The barrier at the place of `barrier` in block `rank` (`mapa.shared::cluster`).
    #[inline(always)]
    #[must_use]
    pub fn new(barrier: Barrier, rank: u32) -> Self {
        Self(target::cluster_map(barrier.place().addr(), rank))
    }

    /// The barrier `index` places of 8 bytes further.
    #[inline(always)]
    #[must_use]
    pub const fn at(self, index: u32) -> Self {
        Self(self.0 + index * 8)
    }

    /// One arrival (`mbarrier.arrive.shared::cluster.b64`).
    ///
    /// # Safety
    /// As [`arrive_if`](Self::arrive_if).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn arrive(self) {
        // SAFETY: the caller's.
        unsafe { self.arrive_if(true) }
    }

    /// One arrival, if `condition` (`mbarrier.arrive.shared::cluster.b64`, predicated: no branch that the compiler
    /// could grow). It has the default semantics: with `.release.cluster` written out, the assembler puts a fence of
    /// the whole device before it.
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
