//! Atomic accesses: one module for each memory and type, with a function for each operation.

macro_rules! space {
    ($module:ident $space:ident $address:ident) => {
        pub mod $module {
            space!(value u32 $space $address);
            space!(value i32 $space $address);
            space!(value u64 $space $address);
            space!(value i64 $space $address);
        }
    };
    (value $t:ident $space:ident $address:ident) => {
        pub mod $t {
            use std::panic::Location;

            use crate::atomic::{Ordering, Scope};
            use crate::emulator::access::{self, Address};

            #[track_caller]
            pub unsafe fn load(address: $address, ordering: Ordering, scope: Scope) -> $t {
                access::atomic_load(Address::$space(address), ordering, scope, Location::caller())
            }

            #[track_caller]
            pub unsafe fn store(address: $address, value: $t, ordering: Ordering, scope: Scope) {
                access::atomic_store(Address::$space(address), value, ordering, scope, Location::caller());
            }

            space!(update $t $space $address fetch_add(value) |old| Some(old.wrapping_add(value)));
            space!(update $t $space $address fetch_min(value) |old| Some(old.min(value)));
            space!(update $t $space $address fetch_max(value) |old| Some(old.max(value)));
            space!(update $t $space $address exchange(value) |_old| Some(value));
            space!(update $t $space $address compare_exchange(expected, new)
                |old| (old == expected).then_some(new));
        }
    };
    (update $t:ident $space:ident $address:ident $name:ident($($argument:ident),*) |$old:ident| $new:expr) => {
        #[track_caller]
        pub unsafe fn $name(address: $address, $($argument: $t,)* ordering: Ordering, scope: Scope) -> $t {
            access::update(Address::$space(address), ordering, scope, Location::caller(), |$old: $t| $new)
        }
    };
}

space!(global Global u64);
space!(shared Shared u32);
