//! Asynchronous copies from global to shared memory, 16 bytes a lane (`cp.async`, sm_80 on).
//!
//! A lane starts copies with [`copy16`], closes them into a group with [`commit`], and waits for its groups with
//! [`wait`]. The copied bytes are then visible to the lane itself, and to others after a barrier.

use crate::Global;
use crate::shared::Shared;
use crate::target;

/// Starts a copy of 16 bytes (`cp.async.cg.shared.global`).
///
/// # Safety
/// Both addresses are multiples of 16 in live memory; the source is not written, nor the destination used, until the
/// copy was waited for.
#[inline(always)]
#[track_caller]
pub unsafe fn copy16(destination: Shared<u8>, source: Global<u8>) {
    // SAFETY: the caller's.
    unsafe { target::async_copy16(destination.addr(), source.addr()) }
}

/// Closes the copies started since the last call into a group (`cp.async.commit_group`).
#[inline(always)]
pub fn commit() {
    target::async_commit();
}

/// Waits until all but the `PENDING` newest groups are done (`cp.async.wait_group`).
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: usize>() {
    target::async_wait::<PENDING>();
}
