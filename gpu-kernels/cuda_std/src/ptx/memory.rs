//! Loads, stores and `cp.async`.

use core::arch::{asm, global_asm};
use core::mem::transmute_copy;

// The launch's dynamic shared memory: one symbol for the whole module.
global_asm!(".extern .shared .align 1024 .b8 dynamic_shared[];");

#[inline(always)]
pub fn dynamic_shared() -> u32 {
    let address: u32;
    // SAFETY: takes an address.
    unsafe {
        asm!("{{ .reg .u64 t; mov.u64 t, dynamic_shared; cvt.u32.u64 {address}, t; }}", address = out(reg32) address,
            options(pure, nomem, nostack));
    }
    address
}

/// Loads of one element of 1, 2, 4 or 8 bytes, and of 16 bytes as four words.
macro_rules! loads {
    ($($name:ident $name16:ident $address:ident $reg:ident $space:literal ($($options:ident),*);)*) => {
        $(
            #[inline(always)]
            pub unsafe fn $name<T: Copy>(address: $address) -> T {
                const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "an element has 1, 2, 4 or 8 bytes") };
                // SAFETY: the caller vouches for the address; the bits are those of a T.
                unsafe {
                    match size_of::<T>() {
                        1 => {
                            let v: u16;
                            asm!(concat!("ld.", $space, ".u8 {v}, [{a}];"), v = out(reg16) v, a = in($reg) address,
                                options($($options),*));
                            transmute_copy(&(v as u8))
                        }
                        2 => {
                            let v: u16;
                            asm!(concat!("ld.", $space, ".b16 {v}, [{a}];"), v = out(reg16) v, a = in($reg) address,
                                options($($options),*));
                            transmute_copy(&v)
                        }
                        4 => {
                            let v: u32;
                            asm!(concat!("ld.", $space, ".b32 {v}, [{a}];"), v = out(reg32) v, a = in($reg) address,
                                options($($options),*));
                            transmute_copy(&v)
                        }
                        _ => {
                            let v: u64;
                            asm!(concat!("ld.", $space, ".b64 {v}, [{a}];"), v = out(reg64) v, a = in($reg) address,
                                options($($options),*));
                            transmute_copy(&v)
                        }
                    }
                }
            }

            loads!(vector $name16 $address $reg $space ($($options),*));
        )*
    };
    (vector $name16:ident $address:ident $reg:ident $space:literal ($($options:ident),*)) => {
        #[inline(always)]
        pub unsafe fn $name16(address: $address) -> [u32; 4] {
            let (a, b, c, d): (u32, u32, u32, u32);
            // SAFETY: the caller vouches for the address.
            unsafe {
                asm!(concat!("ld.", $space, ".v4.b32 {{{a}, {b}, {c}, {d}}}, [{address}];"), a = out(reg32) a,
                    b = out(reg32) b, c = out(reg32) c, d = out(reg32) d, address = in($reg) address,
                    options($($options),*));
            }
            [a, b, c, d]
        }
    };
}

// `readonly` keeps a load behind the stores and barriers that precede it; `nomem` lets loads of constant data move.
loads! {
    load_global load_global16 u64 reg64 "global" (pure, readonly, nostack);
    load_global_nc load_global16_nc u64 reg64 "global.nc" (pure, nomem, nostack);
    load_global_stream load_global16_stream u64 reg64 "global.nc.L1::no_allocate.L2::256B" (pure, nomem, nostack);
    load_shared load_shared16 u32 reg32 "shared" (pure, readonly, nostack);
}

macro_rules! stores {
    ($($name:ident $name16:ident $address:ident $reg:ident $space:literal;)*) => {
        $(
            #[inline(always)]
            pub unsafe fn $name<T: Copy>(address: $address, value: T) {
                const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "an element has 1, 2, 4 or 8 bytes") };
                // SAFETY: the caller vouches for the address; the sizes agree.
                unsafe {
                    match size_of::<T>() {
                        1 => {
                            let v = u16::from(transmute_copy::<T, u8>(&value));
                            asm!(concat!("st.", $space, ".u8 [{a}], {v};"), a = in($reg) address, v = in(reg16) v,
                                options(nostack));
                        }
                        2 => {
                            let v = transmute_copy::<T, u16>(&value);
                            asm!(concat!("st.", $space, ".b16 [{a}], {v};"), a = in($reg) address, v = in(reg16) v,
                                options(nostack));
                        }
                        4 => {
                            let v = transmute_copy::<T, u32>(&value);
                            asm!(concat!("st.", $space, ".b32 [{a}], {v};"), a = in($reg) address, v = in(reg32) v,
                                options(nostack));
                        }
                        _ => {
                            let v = transmute_copy::<T, u64>(&value);
                            asm!(concat!("st.", $space, ".b64 [{a}], {v};"), a = in($reg) address, v = in(reg64) v,
                                options(nostack));
                        }
                    }
                }
            }

            stores!(vector $name16 $address $reg $space);
        )*
    };
    (vector $name16:ident $address:ident $reg:ident $space:literal) => {
        stores!(vector $name16 $address $reg $space "" ";");
    };
    // With text before and after the instruction.
    (vector $name16:ident $address:ident $reg:ident $space:literal $before:literal $after:literal) => {
        #[inline(always)]
        pub unsafe fn $name16(address: $address, [a, b, c, d]: [u32; 4]) {
            // SAFETY: the caller vouches for the address.
            unsafe {
                asm!(concat!($before, "st.", $space, ".v4.b32 [{address}], {{{a}, {b}, {c}, {d}}}", $after),
                    address = in($reg) address, a = in(reg32) a, b = in(reg32) b, c = in(reg32) c, d = in(reg32) d, options(nostack));
            }
        }
    };
}

stores! {
    store_global store_global16 u64 reg64 "global";
    store_shared store_shared16 u32 reg32 "shared";
}
stores!(vector store_global16_stream u64 reg64 "global.cs");
stores!(vector store_global16_kept u64 reg64 "global.L2::cache_hint"
    "{{ .reg .b64 last; createpolicy.fractional.L2::evict_last.b64 last, 1.0; " ", last; }}");

#[inline(always)]
pub unsafe fn store_global_if<T: Copy>(condition: bool, address: u64, value: T) {
    const { assert!(matches!(size_of::<T>(), 4 | 8), "an element has 4 or 8 bytes") };
    // SAFETY: the caller vouches for the address, if the condition holds; the sizes agree.
    unsafe {
        if size_of::<T>() == 4 {
            asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p st.global.b32 [{a}], {v}; }}", c = in(reg32) u32::from(condition),
                a = in(reg64) address, v = in(reg32) transmute_copy::<T, u32>(&value), options(nostack));
        } else {
            asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p st.global.b64 [{a}], {v}; }}", c = in(reg32) u32::from(condition),
                a = in(reg64) address, v = in(reg64) transmute_copy::<T, u64>(&value), options(nostack));
        }
    }
}

#[inline(always)]
#[must_use]
pub unsafe fn load_global_if<T: Copy>(condition: bool, address: u64, otherwise: T) -> T {
    const { assert!(size_of::<T>() == 4, "an element has 4 bytes") };
    // SAFETY: the caller vouches for the address, if the condition holds; the sizes agree.
    unsafe {
        let mut bits = transmute_copy::<T, u32>(&otherwise);
        asm!("{{ .reg .pred p; setp.ne.u32 p, {c}, 0; @p ld.global.b32 {v}, [{a}]; }}", c = in(reg32) u32::from(condition),
            a = in(reg64) address, v = inout(reg32) bits, options(nostack));
        transmute_copy(&bits)
    }
}

#[inline(always)]
pub unsafe fn async_copy16(destination: u32, source: u64) {
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        asm!("cp.async.cg.shared.global [{d}], [{s}], 16;", d = in(reg32) destination, s = in(reg64) source,
            options(nostack));
    }
}

#[inline(always)]
pub fn async_commit() {
    // SAFETY: closes a group.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) }
}

#[inline(always)]
pub fn async_wait<const PENDING: usize>() {
    // SAFETY: waits. The block clobbers memory, so that loads of what was copied stay behind it.
    unsafe { asm!("cp.async.wait_group {n};", n = const PENDING, options(nostack)) }
}
