//! A kernel that adds up numbers, 256 a block.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(abi_ptx, asm_experimental_arch))]

use cuda_std::{Global, GlobalMut, Layout, device, kernel, shared, thread};

/// Threads of a block, and numbers that it adds up.
pub const THREADS: u32 = 256;
/// Shared memory of a block.
pub const SHARED_BYTES: u32 = THREADS * 4;

/// What [`sum`] is launched with, the same bytes on both sides.
#[repr(C)]
#[derive(Clone, Copy, Layout)]
pub struct Sum {
    /// The numbers, [`THREADS`] for each block of the grid.
    pub input: Global<f32>,
    /// A sum for each block of the grid.
    pub sums: GlobalMut<f32>,
}

/// Adds up a block's numbers in shared memory: half of the threads add, then a quarter, and so on.
#[kernel(threads = THREADS)]
pub unsafe fn sum(p: Sum) {
    // SAFETY: the launcher passes what `Sum` says, and `SHARED_BYTES` of shared memory.
    unsafe { add_up(p, |_| thread::sync_threads()) }
}

/// The body of [`sum`], with a barrier to be chosen, so that a test can leave it out. The barrier is told how many
/// threads add after it.
///
/// # Safety
/// `p` is what [`Sum`] says, a block has [`SHARED_BYTES`] of shared memory, and `barrier` waits for all its threads.
#[device]
pub unsafe fn add_up(p: Sum, barrier: impl Fn(u32)) {
    let thread = thread::thread_idx_x();
    let block = thread::block_idx_x();
    // SAFETY: the caller's word; each index is below `THREADS`, or a place for this block.
    unsafe {
        let words = shared::dynamic::<f32>(0);
        words.store(thread as usize, p.input.load((block * THREADS + thread) as usize));
        let mut adding = THREADS / 2;
        while adding > 0 {
            // What the other threads have stored must be there before it is read.
            barrier(adding);
            if thread < adding {
                let here = thread as usize;
                words.store(here, words.load(here) + words.load(here + adding as usize));
            }
            adding /= 2;
        }
        if thread == 0 {
            p.sums.store(block as usize, words.load(0));
        }
    }
}

#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    thread::trap()
}
