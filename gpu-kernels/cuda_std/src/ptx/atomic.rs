//! Atomic accesses: one module for each memory and type, with a function for each operation.

use core::arch::asm;

use crate::atomic::{Ordering, Scope};

/// Chooses the instruction for an ordering and a scope, which are constants once this is inlined.
macro_rules! choose {
    ($ordering:expr, $scope:expr, $acquire:literal, $release:literal, $both:literal, $m:ident!($($a:tt)*)) => {
        match ($ordering, $scope) {
            (Ordering::Relaxed, Scope::Block) => $m!("relaxed.cta", $($a)*),
            (Ordering::Relaxed, Scope::Device) => $m!("relaxed.gpu", $($a)*),
            (Ordering::Relaxed, Scope::System) => $m!("relaxed.sys", $($a)*),
            (Ordering::Acquire, Scope::Block) => $m!(concat!($acquire, ".cta"), $($a)*),
            (Ordering::Acquire, Scope::Device) => $m!(concat!($acquire, ".gpu"), $($a)*),
            (Ordering::Acquire, Scope::System) => $m!(concat!($acquire, ".sys"), $($a)*),
            (Ordering::Release, Scope::Block) => $m!(concat!($release, ".cta"), $($a)*),
            (Ordering::Release, Scope::Device) => $m!(concat!($release, ".gpu"), $($a)*),
            (Ordering::Release, Scope::System) => $m!(concat!($release, ".sys"), $($a)*),
            (Ordering::AcqRel, Scope::Block) => $m!(concat!($both, ".cta"), $($a)*),
            (Ordering::AcqRel, Scope::Device) => $m!(concat!($both, ".gpu"), $($a)*),
            (Ordering::AcqRel, Scope::System) => $m!(concat!($both, ".sys"), $($a)*),
        }
    };
}

macro_rules! load {
    ($order:expr, $space:literal, $areg:ident, $reg:ident, $bits:literal, $address:ident, $old:ident) => {
        asm!(concat!("ld.", $order, ".", $space, ".b", $bits, " {v}, [{a}];"), v = out($reg) $old, a = in($areg) $address,
            options(nostack))
    };
}

macro_rules! store {
    ($order:expr, $space:literal, $areg:ident, $reg:ident, $bits:literal, $address:ident, $value:ident) => {
        asm!(concat!("st.", $order, ".", $space, ".b", $bits, " [{a}], {v};"), a = in($areg) $address, v = in($reg) $value,
            options(nostack))
    };
}

macro_rules! update {
    ($order:expr, $space:literal, $areg:ident, $reg:ident, $op:expr, $address:ident, $old:ident, $value:ident) => {
        asm!(concat!("atom.", $order, ".", $space, ".", $op, " {o}, [{a}], {v};"), o = out($reg) $old,
            a = in($areg) $address, v = in($reg) $value, options(nostack))
    };
}

macro_rules! compare {
    ($order:expr, $space:literal, $areg:ident, $reg:ident, $bits:literal, $address:ident, $old:ident, $e:ident, $n:ident) => {
        asm!(concat!("atom.", $order, ".", $space, ".cas.b", $bits, " {o}, [{a}], {e}, {n};"), o = out($reg) $old,
            a = in($areg) $address, e = in($reg) $e, n = in($reg) $n, options(nostack))
    };
}

macro_rules! space {
    ($module:ident $space:literal $address:ident $areg:ident) => {
        pub mod $module {
            space!(value u32 $space $address $areg reg32 "32" "u32" "u32");
            space!(value i32 $space $address $areg reg32 "32" "u32" "s32");
            space!(value u64 $space $address $areg reg64 "64" "u64" "u64");
            space!(value i64 $space $address $areg reg64 "64" "u64" "s64");
        }
    };
    (value $t:ident $space:literal $address:ident $areg:ident $reg:ident $bits:literal $add:literal $order:literal) => {
        pub mod $t {
            use super::super::*;

            #[inline(always)]
            pub unsafe fn load(address: $address, ordering: Ordering, scope: Scope) -> $t {
                let old: $t;
                // SAFETY: the caller's.
                unsafe {
                    choose!(ordering, scope, "acquire", "relaxed", "acquire", load!($space, $areg, $reg, $bits, address, old));
                }
                old
            }

            #[inline(always)]
            pub unsafe fn store(address: $address, value: $t, ordering: Ordering, scope: Scope) {
                // SAFETY: the caller's.
                unsafe {
                    choose!(ordering, scope, "relaxed", "release", "release",
                        store!($space, $areg, $reg, $bits, address, value));
                }
            }

            space!(update fetch_add concat!("add.", $add), $t $space $address $areg $reg);
            space!(update fetch_min concat!("min.", $order), $t $space $address $areg $reg);
            space!(update fetch_max concat!("max.", $order), $t $space $address $areg $reg);
            space!(update exchange concat!("exch.b", $bits), $t $space $address $areg $reg);

            #[inline(always)]
            pub unsafe fn compare_exchange(
                address: $address,
                expected: $t,
                new: $t,
                ordering: Ordering,
                scope: Scope,
            ) -> $t {
                let old: $t;
                // SAFETY: the caller's.
                unsafe {
                    choose!(ordering, scope, "acquire", "release", "acq_rel",
                        compare!($space, $areg, $reg, $bits, address, old, expected, new));
                }
                old
            }
        }
    };
    (update $name:ident $op:expr, $t:ident $space:literal $address:ident $areg:ident $reg:ident) => {
        #[inline(always)]
        pub unsafe fn $name(address: $address, value: $t, ordering: Ordering, scope: Scope) -> $t {
            let old: $t;
            // SAFETY: the caller's.
            unsafe {
                choose!(ordering, scope, "acquire", "release", "acq_rel",
                    update!($space, $areg, $reg, $op, address, old, value));
            }
            old
        }
    };
}

space!(global "global" u64 reg64);
space!(shared "shared" u32 reg32);
