//! Bulk asynchronous copies, and the mbarriers in shared memory that they complete on (sm_90 on).
//!
//! TMA accesses shared memory through a proxy of its own, the async proxy. So [`fence_proxy_async`] must stand
//! - between ordinary writes to shared memory and a [`copy_to_global`] or a `wgmma` that reads them;
//! - between ordinary accesses and a copy that overwrites what they accessed, unless what was read had been used before
//!   the arrival that lets the copy start.

use crate::shared::Shared;
use crate::target;
use crate::{Global, GlobalMut};

/// A barrier in shared memory (`mbarrier`). A phase ends when the arrivals and the bytes that it expects have come.
///
/// Phases alternate in parity, starting with 0. [`wait`](Self::wait) with a parity returns when the phase of that
/// parity has ended. On a fresh barrier it returns at once for parity 1, so a ring's producer starts with 1 and its
/// consumers with 0.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Barrier(Shared<u64>);

impl Barrier {
    /// The barrier that is, or will be, at `place`: 8 bytes, aligned to 8.
    #[inline(always)]
    #[must_use]
    pub const fn at(place: Shared<u64>) -> Self {
        Self(place)
    }

    /// The address of the barrier.
    #[inline(always)]
    #[must_use]
    pub const fn place(self) -> Shared<u64> {
        self.0
    }

    /// Initialises the barrier for `count` arrivals a phase (`mbarrier.init.shared::cta.b64`). Others may use it after
    /// [`fence_init`] and a barrier of the block.
    ///
    /// # Safety
    /// The place is within the block's shared memory and holds nothing in use; `count` is 1 to 2^20 - 1.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn init(self, count: u32) {
        // SAFETY: the caller's.
        unsafe { target::mbarrier_init(self.0.addr(), count) }
    }

    /// Arrives once (`mbarrier.arrive.shared::cta.b64`). What the lane did before is ordered before what follows a wait
    /// for this phase.
    ///
    /// # Safety
    /// The barrier was made, and this phase expects the arrival.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn arrive(self) {
        // SAFETY: the caller's.
        unsafe { target::mbarrier_arrive(self.0.addr()) }
    }

    /// Arrives once, if `condition` holds. The instruction is predicated: into a branch that depends on the lane, the
    /// compiler could move operations that the whole warp must do together.
    ///
    /// # Safety
    /// As for [`arrive`](Self::arrive).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn arrive_if(self, condition: bool) {
        // SAFETY: the caller's.
        unsafe { target::mbarrier_arrive_if(self.0.addr(), condition) }
    }

    /// Arrives once, and makes the phase wait for `bytes` more bytes to be copied
    /// (`mbarrier.arrive.expect_tx.shared::cta.b64`).
    ///
    /// # Safety
    /// As for [`arrive`](Self::arrive); `bytes` is below 2^20.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn arrive_expect_tx(self, bytes: u32) {
        // SAFETY: the caller's.
        unsafe { target::mbarrier_arrive_expect_tx(self.0.addr(), bytes) }
    }

    /// Waits until the phase of this parity has ended (`mbarrier.try_wait.parity.shared::cta.b64` in a loop).
    ///
    /// # Safety
    /// The barrier was made, and is at most one phase ahead of the phase waited for.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn wait(self, parity: u32) {
        // SAFETY: the caller's.
        unsafe { target::mbarrier_wait(self.0.addr(), parity) }
    }

    /// Whether the phase of this parity has ended. May wait a little for it
    /// (`mbarrier.try_wait.parity.shared::cta.b64`).
    ///
    /// # Safety
    /// As for [`wait`](Self::wait).
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn try_wait(self, parity: u32) -> bool {
        // SAFETY: the caller's.
        unsafe { target::mbarrier_try_wait(self.0.addr(), parity) }
    }

    /// Whether the phase of this parity has ended. Does not wait (`mbarrier.test_wait.parity.shared::cta.b64`).
    ///
    /// # Safety
    /// As for [`wait`](Self::wait).
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn test_wait(self, parity: u32) -> bool {
        // SAFETY: the caller's.
        unsafe { target::mbarrier_test_wait(self.0.addr(), parity) }
    }
}

/// Makes the barriers that this lane initialised visible to TMA (`fence.mbarrier_init.release.cluster`).
#[inline(always)]
pub fn fence_init() {
    target::fence_mbarrier_init();
}

/// Starts a copy from global to shared memory (`cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes`).
/// Its bytes count towards `barrier`. One lane issues it.
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16, in live memory; the source is not written, nor the destination used,
/// before the phase has ended.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_to_shared(destination: Shared<u8>, source: Global<u8>, bytes: u32, barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::bulk_to_shared(destination.addr(), source.addr(), bytes, barrier.0.addr()) }
}

/// [`copy_to_shared`] for data that nobody else will read soon: it is the first to be evicted from L2
/// (`.L2::cache_hint`, with the policy `evict_first`).
///
/// # Safety
/// As [`copy_to_shared`].
#[inline(always)]
#[track_caller]
pub unsafe fn copy_to_shared_once(destination: Shared<u8>, source: Global<u8>, bytes: u32, barrier: Barrier) {
    // SAFETY: the caller's.
    unsafe { target::bulk_to_shared_once(destination.addr(), source.addr(), bytes, barrier.0.addr()) }
}

/// As [`copy_to_shared`], but into every block of the [cluster](crate::cluster) whose bit is set in `blocks`
/// (`.multicast::cluster`). In each block the bytes land at the same address, and count towards the barrier at the same
/// address.
///
/// # Safety
/// As [`copy_to_shared`], for each of the blocks, none of which has ended.
#[inline(always)]
#[track_caller]
pub unsafe fn copy_to_shared_multicast(
    destination: Shared<u8>,
    source: Global<u8>,
    bytes: u32,
    barrier: Barrier,
    blocks: u16,
) {
    // SAFETY: the caller's.
    unsafe { target::bulk_to_shared_multicast(destination.addr(), source.addr(), bytes, barrier.0.addr(), blocks) }
}

/// Starts a copy from shared to global memory, which belongs to the lane's open group
/// (`cp.async.bulk.global.shared::cta.bulk_group`).
///
/// # Safety
/// Both addresses and `bytes` are multiples of 16, in live memory; the source is not written before
/// [`wait_read`], nor the destination used before [`wait`] (by this lane; by others, after they synchronised with it).
#[inline(always)]
#[track_caller]
pub unsafe fn copy_to_global(destination: GlobalMut<u8>, source: Shared<u8>, bytes: u32) {
    // SAFETY: the caller's.
    unsafe { target::bulk_to_global(destination.addr(), source.addr(), bytes) }
}

/// Closes the copies to global memory since the last call into a group (`cp.async.bulk.commit_group`).
#[inline(always)]
pub fn commit() {
    target::bulk_commit();
}

/// Waits until all but the `PENDING` newest groups have read their source (`cp.async.bulk.wait_group.read`).
#[inline(always)]
#[track_caller]
pub fn wait_read<const PENDING: usize>() {
    target::bulk_wait_read::<PENDING>();
}

/// Waits until all but the `PENDING` newest groups have been written (`cp.async.bulk.wait_group`).
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: usize>() {
    target::bulk_wait::<PENDING>();
}

/// Orders this lane's earlier ordinary accesses to shared memory before later ones by TMA and `wgmma`
/// (`fence.proxy.async.shared::cta`).
#[inline(always)]
pub fn fence_proxy_async() {
    target::fence_proxy_async();
}

/// As [`fence_proxy_async`], but for global memory (`fence.proxy.async.global`): it covers the lane's own accesses and
/// those of others that it has synchronised with. It stands between a barrier that waits for the writers and the copy
/// of what they wrote.
#[inline(always)]
pub fn fence_proxy_async_global() {
    target::fence_proxy_async_global();
}
