//! Chains that go on in another block: accumulators as they are, by way of memory.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, thread, wgmma};

use super::{GROUP, Gemm};
use crate::waiting;

/// Elements from four accumulators of a lane to its next four.
const STRIDE: usize = GROUP as usize * 4;

/// A warpgroup's rows of a shared tile.
#[derive(Clone, Copy)]
pub struct Sums {
    /// The tile's number.
    pub tile: u32,
    /// The warpgroup, and its barrier.
    pub group: u32,
    pub barrier: u32,
}

impl Sums {
    /// Of tiles of `n` features, where the lane's first four accumulators lie; the next four are [`STRIDE`] further.
    #[inline(always)]
    unsafe fn place(&self, p: &Gemm, n: usize) -> GlobalMut<f32> {
        let lane = thread::fresh(thread::thread_idx_x()) % GROUP;
        let half = (self.tile * 2 + self.group) * (Gemm::sums(n as u32) / 2);
        let place = unsafe { p.sums.at((half + lane * 4) as usize) }.addr();
        // One address, and constants beyond it: not an address for every constant, kept in registers throughout.
        GlobalMut::from_raw(u64::from(thread::fresh(place as u32)) | u64::from(thread::fresh((place >> 32) as u32)) << 32)
    }

    #[inline(always)]
    const fn counter(&self) -> usize {
        (self.tile * 2 + self.group) as usize
    }

    #[inline(always)]
    fn is_elected() -> bool {
        thread::fresh(thread::thread_idx_x()).is_multiple_of(GROUP)
    }

    /// Leaves the sums over the input features up to `to`.
    #[inline(always)]
    pub unsafe fn leave<const N: usize>(&self, p: &Gemm, to: u32) {
        unsafe {
            let place = self.place(p, N);
            macro_rules! leave {
                ($i:expr) => {
                    let first = [wgmma::get::<{ 4 * ($i) }>(), wgmma::get::<{ 4 * ($i) + 1 }>()];
                    let second = [wgmma::get::<{ 4 * ($i) + 2 }>(), wgmma::get::<{ 4 * ($i) + 3 }>()];
                    let sums = [first[0], first[1], second[0], second[1]];
                    place.store16(($i) * STRIDE, sums.map(f32::to_bits));
                };
            }
            unroll!(I < 16; {
                leave!(I);
            });
            if N == 256 {
                unroll!(I < 16; {
                    leave!(I + 16);
                });
            }
            thread::sync_named(self.barrier, GROUP);
            if Self::is_elected() {
                atomic::store(p.progress, self.counter(), to, Ordering::Release, Scope::Device);
            }
        }
    }

    /// Waits until the sums over the input features up to `from` are there. The `last` time the counter begins anew.
    #[inline(always)]
    pub unsafe fn wait(&self, p: &Gemm, from: u32, last: bool) {
        unsafe {
            if Self::is_elected() {
                waiting::for_count(p.progress, self.counter(), from);
                if last {
                    atomic::store(p.progress, self.counter(), 0, Ordering::Relaxed, Scope::Device);
                }
            }
            thread::sync_named(self.barrier, GROUP);
        }
    }

    /// Takes up what was left.
    #[inline(always)]
    pub unsafe fn take<const N: usize>(&self, p: &Gemm) {
        unsafe {
            let place = self.place(p, N);
            macro_rules! take {
                ($i:expr) => {
                    let sums = place.load16(($i) * STRIDE).map(f32::from_bits);
                    wgmma::set::<{ 4 * ($i) }>(sums[0]);
                    wgmma::set::<{ 4 * ($i) + 1 }>(sums[1]);
                    wgmma::set::<{ 4 * ($i) + 2 }>(sums[2]);
                    wgmma::set::<{ 4 * ($i) + 3 }>(sums[3]);
                };
            }
            unroll!(I < 16; {
                take!(I);
            });
            if N == 256 {
                unroll!(I < 16; {
                    take!(I + 16);
                });
            }
        }
    }
}
