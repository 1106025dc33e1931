//! Waiting that is bounded: a launch that cannot make progress ends with an error.
//!
//! # Safety
//! What is unsafe here is called by one lane, or by all lanes of a warp where they ask together. What it waits for
//! comes from others, which do not wait for the caller. A barrier was made before the block synchronised; a counter is
//! live, and others only count on it meanwhile, by atomics.

use cuda_std::atomic::{self, Ordering, Scope};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
use cuda_std::bulk::Barrier;
use cuda_std::{GlobalMut, thread};

/// Polls before the launch is given up: seconds, where a step takes milliseconds.
const PATIENCE: u32 = 1 << 23;

/// Polls until it is so.
///
/// # Safety
/// `is_so` may be called as often as it takes, by all lanes that call this.
#[inline(always)]
pub(crate) unsafe fn until(mut is_so: impl FnMut() -> bool) {
    let mut polls = 0;
    while !is_so() {
        // New to the compiler, which would write the loop out.
        polls = thread::opaque(polls) + 1;
        if polls == PATIENCE {
            thread::trap();
        }
    }
}

/// Waits for the end of the phase of this parity.
///
/// # Safety
/// The barrier was made, and is at most one phase ahead.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[inline(always)]
pub(crate) unsafe fn for_phase(barrier: Barrier, parity: u32) {
    // SAFETY: the caller's word.
    unsafe { until(|| barrier.try_wait(parity)) }
}

/// Waits until the `i`-th of the counters is at least this, and sees what those who counted wrote before.
///
/// # Safety
/// There is such a counter, which others change by atomics alone meanwhile.
#[inline(always)]
pub(crate) unsafe fn for_count(counters: GlobalMut<u32>, i: usize, least: u32) {
    // SAFETY: the caller's word.
    unsafe { until(|| atomic::load(counters, i, Ordering::Acquire, Scope::Device) >= least) }
}

/// The same for a wait that is long, as at a grid barrier: a load that acquires empties the SM's L1, so only the last
/// one does.
///
/// # Safety
/// As for [`for_count`].
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[inline(always)]
pub(crate) unsafe fn long_for_count(counters: GlobalMut<u32>, i: usize, least: u32) {
    // SAFETY: the caller's word.
    unsafe {
        until(|| atomic::load(counters, i, Ordering::Relaxed, Scope::Device) >= least);
        atomic::load(counters, i, Ordering::Acquire, Scope::Device);
    }
}
