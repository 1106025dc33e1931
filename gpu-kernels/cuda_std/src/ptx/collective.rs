//! Barriers, warp collectives and `mma`.

use core::arch::asm;

const FULL: u32 = u32::MAX;

/// LLVM's struct of four floats, which `mma` returns.
#[repr(C)]
#[derive(Clone, Copy)]
struct Four(f32, f32, f32, f32);

#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    fn barrier_all(id: u32);
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn barrier_count(id: u32, count: u32);
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn warp_barrier(mask: u32);
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_bfly(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn shfl_up(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn shfl_down(mask: u32, value: u32, delta: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot(mask: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn vote_any(mask: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    fn vote_all(mask: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    fn redux_umax(value: u32, mask: u32) -> u32;
    #[cfg(cuda_arch = "sm_90")]
    #[link_name = "llvm.nvvm.elect.sync"]
    fn elect_sync(mask: u32) -> (u32, bool);
    #[link_name = "llvm.nvvm.mma.m16n8k16.row.col.bf16"]
    fn mma_bf16(a0: u32, a1: u32, a2: u32, a3: u32, b0: u32, b1: u32, c0: f32, c1: f32, c2: f32, c3: f32) -> Four;
}

#[inline(always)]
pub fn sync_threads() {
    // SAFETY: a barrier touches no memory.
    unsafe { barrier_all(0) }
}

#[inline(always)]
pub fn sync_named(id: u32, count: u32) {
    // SAFETY: a barrier touches no memory.
    unsafe { barrier_count(id, count) }
}

#[inline(always)]
pub fn sync_warp() {
    // SAFETY: a barrier touches no memory.
    unsafe { warp_barrier(FULL) }
}

macro_rules! shuffle {
    ($($name:ident $intrinsic:ident $clamp:literal;)*) => {
        $(
            #[inline(always)]
            pub fn $name(value: u32, argument: u32) -> u32 {
                // SAFETY: exchanges registers.
                unsafe { $intrinsic(FULL, value, argument, $clamp) }
            }
        )*
    };
}

shuffle! {
    shuffle_xor shfl_bfly 31;
    shuffle_idx shfl_idx 31;
    shuffle_up shfl_up 0;
    shuffle_down shfl_down 31;
}

#[inline(always)]
pub fn ballot(predicate: bool) -> u32 {
    // SAFETY: exchanges predicates.
    unsafe { vote_ballot(FULL, predicate) }
}

#[inline(always)]
pub fn any(predicate: bool) -> bool {
    // SAFETY: exchanges predicates.
    unsafe { vote_any(FULL, predicate) }
}

#[inline(always)]
pub fn all(predicate: bool) -> bool {
    // SAFETY: exchanges predicates.
    unsafe { vote_all(FULL, predicate) }
}

#[inline(always)]
pub fn max_of_warp(value: u32) -> u32 {
    // SAFETY: exchanges registers.
    unsafe { redux_umax(value, FULL) }
}

#[cfg(cuda_arch = "sm_90")]
#[inline(always)]
pub fn elect() -> bool {
    // SAFETY: chooses a lane.
    unsafe { elect_sync(FULL).1 }
}

#[cfg(not(cuda_arch = "sm_90"))]
#[inline(always)]
pub fn elect() -> bool {
    crate::thread::lane_id() == 0
}

#[inline(always)]
pub fn mma_m16n8k16_bf16(c: [f32; 4], a: [u32; 4], b: [u32; 2]) -> [f32; 4] {
    // SAFETY: arithmetic on registers.
    let Four(d0, d1, d2, d3) = unsafe { mma_bf16(a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], c[2], c[3]) };
    [d0, d1, d2, d3]
}

macro_rules! ldmatrix {
    ($($name:ident $instruction:literal;)*) => {
        $(
            // This is `asm!` because LLVM's intrinsic wants a pointer in the shared address space, which Rust cannot
            // name. LLVM does not know that the block is convergent; but it is volatile, and so at least never moved
            // into a branch.
            #[inline(always)]
            pub unsafe fn $name(row: u32) -> [u32; 4] {
                let (a, b, c, d): (u32, u32, u32, u32);
                // SAFETY: the caller's.
                unsafe {
                    asm!(concat!($instruction, " {{{a}, {b}, {c}, {d}}}, [{row}];"), a = out(reg32) a, b = out(reg32) b,
                        c = out(reg32) c, d = out(reg32) d, row = in(reg32) row, options(nostack));
                }
                [a, b, c, d]
            }
        )*
    };
}

ldmatrix! {
    ldmatrix_x4 "ldmatrix.sync.aligned.m8n8.x4.shared.b16";
    ldmatrix_x4_trans "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16";
}

#[inline(always)]
pub fn movmatrix(word: u32) -> u32 {
    let transposed: u32;
    // SAFETY: exchanges registers. Volatile, for the same reason as `ldmatrix`.
    unsafe {
        asm!("movmatrix.sync.aligned.m8n8.trans.b16 {d}, {a};", d = out(reg32) transposed, a = in(reg32) word, options(nostack));
    }
    transposed
}

#[cfg(cuda_arch = "sm_90")]
#[inline(always)]
pub unsafe fn stmatrix_x4(row: u32, [a, b, c, d]: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe {
        asm!("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [{row}], {{{a}, {b}, {c}, {d}}};", row = in(reg32) row,
            a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d, options(nostack));
    }
}
