//! Runs two launches of one GEMM side by side.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, bulk, dependent_launch, device, thread};

use crate::waiting;

/// Orders two launches of one GEMM that run side by side, each with features of its own. The first launch waits for the
/// launches ahead; its first CTA then writes a word to memory. The second launch is enqueued behind the first, but
/// begins early: it waits for that word instead of the first launch's end. It ends after the first.
///
/// No CTA waits for one that may have no SM yet. The second launch begins when all CTAs of the first run; the launches
/// after it begin when all CTAs of the second run.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Beside {
    /// The word; null for a launch alone.
    pub word: GlobalMut<u32>,
    /// The value of the word once the launches ahead of this GEMM are done: another number than for the GEMM before.
    pub number: u32,
    /// 0 for the first launch, 1 for the second.
    pub second: u32,
}

impl Beside {
    /// Waits until what the launches ahead of the GEMM wrote can be read, by TMA too. All lanes that read it call this.
    ///
    /// # Safety
    /// There is such a word, and its first launch was enqueued before its second.
    #[device]
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

    /// The first launch lets the second go on. One lane of each CTA calls it, after it has waited.
    ///
    /// # Safety
    /// As [`wait`](Self::wait).
    #[device]
    pub unsafe fn go_on(&self) {
        if !self.word.is_null() && self.second == 0 && thread::block_idx_x() == 0 {
            // SAFETY: the caller's word.
            unsafe { atomic::store(self.word, 0, self.number, Ordering::Release, Scope::Device) };
        }
    }

    /// The second launch waits for the end of the first. One lane of each CTA calls it, at the CTA's own end.
    #[device]
    pub fn end(&self) {
        if self.second != 0 {
            dependent_launch::wait();
        }
    }
}
