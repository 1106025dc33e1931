//! Loads and stores.

use std::panic::Location;

use crate::emulator::access::{self, Address};
use crate::emulator::race::Mode;
use crate::emulator::world::SHARED_BASE;

pub fn dynamic_shared() -> u32 {
    SHARED_BASE
}

/// Sixteen bytes with the alignment that [`access::load`] asks for.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Vector([u32; 4]);

macro_rules! memory {
    ($($load:ident $load16:ident $address:ident $space:ident $mode:ident;)*) => {
        $(
            #[inline]
            #[track_caller]
            pub unsafe fn $load<T: Copy>(address: $address) -> T {
                const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "an element has 1, 2, 4 or 8 bytes") };
                access::load(Address::$space(address), Mode::$mode, Location::caller())
            }

            #[inline]
            #[track_caller]
            pub unsafe fn $load16(address: $address) -> [u32; 4] {
                access::load::<Vector>(Address::$space(address), Mode::$mode, Location::caller()).0
            }
        )*
    };
    (stores $($store:ident $store16:ident $address:ident $space:ident;)*) => {
        $(
            #[inline]
            #[track_caller]
            pub unsafe fn $store<T: Copy>(address: $address, value: T) {
                const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "an element has 1, 2, 4 or 8 bytes") };
                access::store(Address::$space(address), value, Location::caller());
            }

            #[inline]
            #[track_caller]
            pub unsafe fn $store16(address: $address, value: [u32; 4]) {
                access::store(Address::$space(address), Vector(value), Location::caller());
            }
        )*
    };
}

memory! {
    load_global load_global16 u64 Global Read;
    load_global_nc load_global16_nc u64 Global ReadConstant;
    load_shared load_shared16 u32 Shared Read;
}
memory! { stores
    store_global store_global16 u64 Global;
    store_shared store_shared16 u32 Shared;
}

#[inline]
#[track_caller]
pub unsafe fn load_global_stream<T: Copy>(address: u64) -> T {
    // SAFETY: the caller's.
    unsafe { load_global_nc(address) }
}

#[inline]
#[track_caller]
pub unsafe fn load_global16_stream(address: u64) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load_global16_nc(address) }
}

#[inline]
#[track_caller]
pub unsafe fn store_global_if<T: Copy>(condition: bool, address: u64, value: T) {
    if condition {
        // SAFETY: the caller's.
        unsafe { store_global(address, value) }
    }
}

#[inline]
#[track_caller]
pub unsafe fn load_global_if<T: Copy>(condition: bool, address: u64, otherwise: T) -> T {
    // SAFETY: the caller's.
    if condition { unsafe { load_global(address) } } else { otherwise }
}

#[inline]
#[track_caller]
pub unsafe fn store_global16_stream(address: u64, value: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { store_global16(address, value) }
}

#[inline]
#[track_caller]
pub unsafe fn store_global16_kept(address: u64, value: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { store_global16(address, value) }
}
