//! Waiting that is bounded: a launch that cannot make progress ends with an error.

use cuda_std::atomic::{self, Ordering, Scope};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
use cuda_std::bulk::Barrier;
use cuda_std::{GlobalMut, thread};

/// Polls before the launch is given up: seconds, where a step takes milliseconds.
const PATIENCE: u32 = 1 << 23;

/// Polls until it is so.
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
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[inline(always)]
pub(crate) unsafe fn for_phase(barrier: Barrier, parity: u32) {
    // SAFETY: the caller's word.
    unsafe { until(|| barrier.try_wait(parity)) }
}

/// Waits until the `i`-th of the counters is at least this, and sees what those who counted wrote before.
#[inline(always)]
pub(crate) unsafe fn for_count(counters: GlobalMut<u32>, i: usize, least: u32) {
    // SAFETY: the caller's word.
    unsafe { until(|| atomic::load(counters, i, Ordering::Acquire, Scope::Device) >= least) }
}
