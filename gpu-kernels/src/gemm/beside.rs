//! Two launches of one GEMM, side by side.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, bulk, dependent_launch, thread};

use crate::waiting;

/// What orders two launches of one GEMM that run side by side, each with features of its own. The first waits for the
/// launches ahead, and its first block then says so in memory. The second is enqueued behind it to begin early, and
/// waits for that word instead of the first's end; it ends after the first.
///
/// No block waits for one that may have no room: the second begins when all blocks of the first have begun, and those
/// behind it when all of its own have.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Beside {
    /// The word; null for a launch alone.
    pub word: GlobalMut<u32>,
    /// What it says when the launches ahead of this GEMM are done: another number than for the GEMM before.
    pub number: u32,
    /// 0 for the first launch, 1 for the second.
    pub second: u32,
}

impl Beside {
    /// Waits until what the launches ahead of the GEMM left can be read, by TMA too. All lanes that touch it do.
    ///
    /// # Safety
    /// There is such a word, and its first launch was enqueued before its second.
    #[inline(always)]
    pub unsafe fn wait(&self) {
        // SAFETY: the caller's word.
        unsafe {
            if self.second == 0 {
                dependent_launch::wait();
            } else {
                waiting::until(|| atomic::load(self.word, 0, Ordering::Acquire, Scope::Device) == self.number);
                bulk::fence_proxy_async_global();
            }
        }
    }

    /// The first launch lets the second go on: one lane of each block calls it, which has waited.
    ///
    /// # Safety
    /// As [`wait`](Self::wait).
    #[inline(always)]
    pub unsafe fn go_on(&self) {
        if !self.word.is_null() && self.second == 0 && thread::block_idx_x() == 0 {
            // SAFETY: the caller's word.
            unsafe { atomic::store(self.word, 0, self.number, Ordering::Release, Scope::Device) };
        }
    }

    /// The second launch waits for the first's end: one lane of each block calls it, at its own.
    #[inline(always)]
    pub fn end(&self) {
        if self.second != 0 {
            dependent_launch::wait();
        }
    }
}
