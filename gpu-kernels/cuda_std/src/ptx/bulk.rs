//! Bulk copies and mbarriers, from sm_90 on.

use core::arch::asm;

#[inline(always)]
pub unsafe fn mbarrier_init(barrier: u32, count: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("mbarrier.init.shared::cta.b64 [{b}], {n};", b = in(reg32) barrier, n = in(reg32) count, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive(barrier: u32) {
    // SAFETY: the caller's.
    unsafe { asm!("mbarrier.arrive.shared::cta.b64 _, [{b}];", b = in(reg32) barrier, options(nostack)) }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive_if(barrier: u32, condition: bool) {
    // SAFETY: the caller's.
    unsafe {
        asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p mbarrier.arrive.shared::cta.b64 _, [{b}]; }}",
            c = in(reg32) u32::from(condition), b = in(reg32) barrier, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_arrive_expect_tx(barrier: u32, bytes: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{b}], {n};", b = in(reg32) barrier, n = in(reg32) bytes,
            options(nostack));
    }
}

#[inline(always)]
pub unsafe fn mbarrier_wait(barrier: u32, parity: u32) {
    // SAFETY: the caller's. The braces make the label local to each copy of the block.
    unsafe {
        asm!(
            "{{ .reg .pred p;",
            "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [{b}], {parity};",
            "@!p bra WAIT; }}",
            b = in(reg32) barrier, parity = in(reg32) parity, options(nostack)
        );
    }
}

/// Whether a barrier's phase of this parity is over, asked by the instruction `$how`.
macro_rules! ask {
    ($how:literal, $barrier:ident, $parity:ident) => {{
        let done: u32;
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "{{ .reg .pred p;",
                concat!("mbarrier.", $how, ".parity.shared::cta.b64 p, [{b}], {parity};"),
                "selp.u32 {done}, 1, 0, p; }}",
                b = in(reg32) $barrier, parity = in(reg32) $parity, done = out(reg32) done, options(nostack)
            );
        }
        done != 0
    }};
}

#[inline(always)]
pub unsafe fn mbarrier_try_wait(barrier: u32, parity: u32) -> bool {
    ask!("try_wait", barrier, parity)
}

#[inline(always)]
pub unsafe fn mbarrier_test_wait(barrier: u32, parity: u32) -> bool {
    ask!("test_wait", barrier, parity)
}

#[inline(always)]
pub fn fence_mbarrier_init() {
    // SAFETY: a fence has no operands.
    unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) }
}

#[inline(always)]
pub fn fence_proxy_async() {
    // SAFETY: a fence has no operands.
    unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) }
}

#[inline(always)]
pub fn fence_proxy_async_global() {
    // SAFETY: a fence has no operands.
    unsafe { asm!("fence.proxy.async.global;", options(nostack)) }
}

#[inline(always)]
pub unsafe fn bulk_to_shared(destination: u32, source: u64, bytes: u32, barrier: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{s}], {n}, [{b}];",
            d = in(reg32) destination, s = in(reg64) source, n = in(reg32) bytes, b = in(reg32) barrier,
            options(nostack));
    }
}

#[inline(always)]
pub unsafe fn bulk_to_shared_once(destination: u32, source: u64, bytes: u32, barrier: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("{{ .reg .b64 first; createpolicy.fractional.L2::evict_first.b64 first, 1.0;",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [{d}], [{s}], {n}, [{b}], first; }}",
            d = in(reg32) destination, s = in(reg64) source, n = in(reg32) bytes, b = in(reg32) barrier,
            options(nostack));
    }
}

#[inline(always)]
pub unsafe fn bulk_to_shared_multicast(destination: u32, source: u64, bytes: u32, barrier: u32, blocks: u16) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [{d}], [{s}], {n}, [{b}], {m};",
            d = in(reg32) destination, s = in(reg64) source, n = in(reg32) bytes, b = in(reg32) barrier,
            m = in(reg16) blocks, options(nostack));
    }
}

#[inline(always)]
pub unsafe fn bulk_to_global(destination: u64, source: u32, bytes: u32) {
    // SAFETY: the caller's.
    unsafe {
        asm!("cp.async.bulk.global.shared::cta.bulk_group [{d}], [{s}], {n};", d = in(reg64) destination,
            s = in(reg32) source, n = in(reg32) bytes, options(nostack));
    }
}

#[inline(always)]
pub fn bulk_commit() {
    // SAFETY: closes a group.
    unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) }
}

#[inline(always)]
pub fn bulk_wait_read<const PENDING: usize>() {
    // SAFETY: waits.
    unsafe { asm!("cp.async.bulk.wait_group.read {n};", n = const PENDING, options(nostack)) }
}

#[inline(always)]
pub fn bulk_wait<const PENDING: usize>() {
    // SAFETY: waits.
    unsafe { asm!("cp.async.bulk.wait_group {n};", n = const PENDING, options(nostack)) }
}
