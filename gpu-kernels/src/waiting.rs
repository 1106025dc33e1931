//! Bounded waits: a launch that cannot make progress ends with an error.
//!
//! # Safety
//! What is unsafe here is called by one lane, or by all lanes of a warp where they ask together. What it waits for
//! comes from other threads, which do not wait for the caller. A barrier was made before the CTA synchronised. A
//! counter is live, and meanwhile others only count it up, by atomics.

use cuda_std::atomic::{self, Ordering, Scope};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
use cuda_std::bulk::Barrier;
use cuda_std::{GlobalMut, device, thread};

/// Polls before the launch traps: seconds, where a step takes milliseconds.
const PATIENCE: u32 = 1 << 23;

/// Polls until `is_so` returns true. Traps after `PATIENCE` polls.
///
/// # Safety
/// `is_so` may be called as often as it takes, by all lanes that call this.
#[device]
pub(crate) unsafe fn until(mut is_so: impl FnMut() -> bool) {
    let mut polls = 0;
    while !is_so() {
        // Opaque, since the compiler would unroll the loop otherwise.
        polls = thread::opaque(polls) + 1;
        if polls == PATIENCE {
            thread::trap();
        }
    }
}

/// Waits until the barrier's phase with this parity has ended.
///
/// # Safety
/// The barrier was made, and is at most one phase ahead.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[device]
pub(crate) unsafe fn for_phase(barrier: Barrier, parity: u32) {
    // SAFETY: the caller's word.
    unsafe { until(|| barrier.try_wait(parity)) }
}

/// Waits until counter `i` is at least `least`. Acquires: the caller then sees what other threads wrote before they
/// counted.
///
/// # Safety
/// There is such a counter, which others change by atomics alone meanwhile.
#[device]
pub(crate) unsafe fn for_count(counters: GlobalMut<u32>, i: usize, least: u32) {
    // SAFETY: the caller's word.
    unsafe { until(|| atomic::load(counters, i, Ordering::Acquire, Scope::Device) >= least) }
}

/// As [`for_count`], for long waits such as those at a grid barrier. An acquiring load invalidates the SM's L1, so the
/// polls are relaxed, and only the last load acquires.
///
/// # Safety
/// As for [`for_count`].
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[device]
pub(crate) unsafe fn long_for_count(counters: GlobalMut<u32>, i: usize, least: u32) {
    // SAFETY: the caller's word.
    unsafe {
        until(|| atomic::load(counters, i, Ordering::Relaxed, Scope::Device) >= least);
        atomic::load(counters, i, Ordering::Acquire, Scope::Device);
    }
}
