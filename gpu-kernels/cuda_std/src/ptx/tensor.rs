//! Tensor maps, clusters, and launches that begin early.

use core::arch::asm;

#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.barrier.cluster.arrive"]
    fn cluster_arrive();
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.relaxed"]
    fn cluster_arrive_relaxed();
    #[link_name = "llvm.nvvm.barrier.cluster.wait"]
    fn cluster_wait();
}

#[inline(always)]
pub unsafe fn tensor_acquire(map: u64) {
    // SAFETY: the caller's.
    unsafe { asm!("fence.proxy.tensormap::generic.acquire.gpu [{m}], 128;", m = in(reg64) map, options(nostack)) }
}

#[inline(always)]
pub unsafe fn tensor_load(destination: u32, map: u64, x: u32, y: u32, barrier: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{m}, {{{x}, {y}}}], [{b}];",
            d = in(reg32) destination, m = in(reg64) map, x = in(reg32) x, y = in(reg32) y, b = in(reg32) barrier,
            options(nostack));
    }
}

#[inline(always)]
pub unsafe fn tensor_load_box(destination: u32, map: u64, [x, y, z, w]: [u32; 4], barrier: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes \
            [{d}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}];",
            d = in(reg32) destination, m = in(reg64) map, x = in(reg32) x, y = in(reg32) y, z = in(reg32) z,
            w = in(reg32) w, b = in(reg32) barrier, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn tensor_load_box_once(destination: u32, map: u64, [x, y, z, w]: [u32; 4], barrier: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("{{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;",
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint \
            [{d}], [{m}, {{{x}, {y}, {z}, {w}}}], [{b}], first; }}",
            d = in(reg32) destination, m = in(reg64) map, x = in(reg32) x, y = in(reg32) y, z = in(reg32) z,
            w = in(reg32) w, b = in(reg32) barrier, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn tensor_load_multicast(destination: u32, map: u64, x: u32, y: u32, barrier: u32, blocks: u16) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster \
            [{d}], [{m}, {{{x}, {y}}}], [{b}], {k};",
            d = in(reg32) destination, m = in(reg64) map, x = in(reg32) x, y = in(reg32) y, b = in(reg32) barrier,
            k = in(reg16) blocks, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn tensor_store_if(condition: bool, map: u64, x: u32, y: u32, source: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0;",
            "@p cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [{m}, {{{x}, {y}}}], [{s}]; }}",
            c = in(reg32) u32::from(condition), m = in(reg64) map, x = in(reg32) x, y = in(reg32) y,
            s = in(reg32) source, options(nostack));
    }
}

#[inline(always)]
pub fn cluster_rank() -> u32 {
    let rank: u32;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u32 {r}, %cluster_ctarank;", r = out(reg32) rank, options(pure, nomem, nostack)) }
    rank
}

#[inline(always)]
pub fn wait_for_launches() {
    // SAFETY: waits.
    unsafe { asm!("griddepcontrol.wait;", options(nostack)) }
}

#[inline(always)]
pub fn allow_next_launch() {
    // SAFETY: touches no memory.
    unsafe { asm!("griddepcontrol.launch_dependents;", options(nostack)) }
}

#[inline(always)]
pub fn cluster_sync() {
    // SAFETY: a barrier touches no memory.
    unsafe {
        cluster_arrive();
        cluster_wait();
    }
}

#[inline(always)]
pub fn cluster_sync_made() {
    // SAFETY: a barrier touches no memory.
    unsafe {
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

#[inline(always)]
pub fn cluster_map(address: u32, rank: u32) -> u32 {
    let mapped: u32;
    // SAFETY: arithmetic on addresses.
    unsafe {
        asm!("mapa.shared::cluster.u32 {d}, {a}, {r};", d = out(reg32) mapped, a = in(reg32) address, r = in(reg32) rank,
            options(pure, nomem, nostack));
    }
    mapped
}

#[inline(always)]
pub unsafe fn cluster_send16(destination: u32, [a, b, c, d]: [u32; 4], barrier: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{to}], {{{a}, {b}, {c}, {d}}}, [{m}];",
            to = in(reg32) destination, a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d,
            m = in(reg32) barrier, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn cluster_arrive_if(barrier: u32, condition: bool) {
    // SAFETY: the caller's.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p mbarrier.arrive.shared::cluster.b64 _, [{b}]; }}",
            c = in(reg32) u32::from(condition), b = in(reg32) barrier, options(nostack));
    }
}
