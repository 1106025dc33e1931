//! Atomic accesses to global and shared memory.
//!
//! Every function takes an [`Ordering`] and a [`Scope`], which are part of the PTX instruction: pass constants. In
//! PTX's terms `fetch_add(p, i, 1, Ordering::AcqRel, Scope::Device)` is `atom.acq_rel.gpu.global.add.u32`.

use crate::GlobalMut;
use crate::shared::Shared;
use crate::target;

/// How an atomic access orders the lane's other accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// Not at all (`relaxed`).
    Relaxed,
    /// Accesses that come after it stay after it (`acquire`). A store with this ordering is relaxed.
    Acquire,
    /// Accesses that come before it stay before it (`release`). A load with this ordering is relaxed.
    Release,
    /// Both (`acq_rel`). A load with this ordering acquires, a store releases.
    AcqRel,
}

/// The threads among which an atomic access is atomic and ordered, or a fence orders accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The lanes of the block (`cta`).
    Block,
    /// The lanes of the device (`gpu`).
    Device,
    /// The device and the host (`sys`).
    System,
}

pub(crate) mod place {
    use crate::atomic::{Ordering, Scope};

    /// The operations on one memory and one type of element. The module's functions forward to them, and they to
    /// `target`.
    pub trait Operations: Copy {
        type Value: Copy;

        unsafe fn load(self, i: usize, ordering: Ordering, scope: Scope) -> Self::Value;
        unsafe fn store(self, i: usize, value: Self::Value, ordering: Ordering, scope: Scope);
        unsafe fn fetch_add(self, i: usize, value: Self::Value, ordering: Ordering, scope: Scope) -> Self::Value;
        unsafe fn fetch_min(self, i: usize, value: Self::Value, ordering: Ordering, scope: Scope) -> Self::Value;
        unsafe fn fetch_max(self, i: usize, value: Self::Value, ordering: Ordering, scope: Scope) -> Self::Value;
        unsafe fn exchange(self, i: usize, value: Self::Value, ordering: Ordering, scope: Scope) -> Self::Value;
        unsafe fn compare_exchange(
            self,
            i: usize,
            expected: Self::Value,
            new: Self::Value,
            ordering: Ordering,
            scope: Scope,
        ) -> Self::Value;
    }
}

/// Memory that the functions of this module take: [`GlobalMut`] and [`Shared`] of `u32`, `i32`, `u64` and `i64`.
pub trait Place: place::Operations {}
impl<P: place::Operations> Place for P {}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident($($argument:ident),*) $(-> $value:ident)?;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// The element is in live memory, aligned to its size, and initialised unless this is a store; others use
            /// it meanwhile only through this module.
            #[inline(always)]
            #[track_caller]
            pub unsafe fn $name<P: Place>(
                place: P,
                i: usize,
                $($argument: P::Value,)*
                ordering: Ordering,
                scope: Scope,
            ) $(-> P::$value)? {
                // SAFETY: the caller's.
                unsafe { place::Operations::$name(place, i, $($argument,)* ordering, scope) }
            }
        )*
    };
}

operations! {
    /// Reads element `i` (`ld.relaxed` or `ld.acquire`).
    load() -> Value;
    /// Writes element `i` (`st.relaxed` or `st.release`).
    store(value);
    /// Adds to element `i`, wrapping around, and returns what was there (`atom.add`).
    fetch_add(value) -> Value;
    /// Lowers element `i` to `value` if that is less, and returns what was there (`atom.min`).
    fetch_min(value) -> Value;
    /// Raises element `i` to `value` if that is greater, and returns what was there (`atom.max`).
    fetch_max(value) -> Value;
    /// Writes element `i` and returns what was there (`atom.exch`).
    exchange(value) -> Value;
    /// Writes `new` to element `i` if `expected` is there, and returns what was there (`atom.cas`).
    compare_exchange(expected, new) -> Value;
}

macro_rules! places {
    ($($value:ident)*) => {
        $(
            impl place::Operations for GlobalMut<$value> {
                places!(body $value, self, i, global, self.at(i).addr());
            }
            impl place::Operations for Shared<$value> {
                places!(body $value, self, i, shared, self.at(i).addr());
            }
        )*
    };
    (body $value:ident, $self:ident, $i:ident, $space:ident, $address:expr) => {
        type Value = $value;
        places!(one $value, $self, $i, $space, $address, load() -> $value);
        places!(one $value, $self, $i, $space, $address, store(value) -> ());
        places!(one $value, $self, $i, $space, $address, fetch_add(value) -> $value);
        places!(one $value, $self, $i, $space, $address, fetch_min(value) -> $value);
        places!(one $value, $self, $i, $space, $address, fetch_max(value) -> $value);
        places!(one $value, $self, $i, $space, $address, exchange(value) -> $value);
        places!(one $value, $self, $i, $space, $address, compare_exchange(expected, new) -> $value);
    };
    (one $value:ident, $self:ident, $i:ident, $space:ident, $address:expr, $op:ident($($argument:ident),*) -> $out:ty) => {
        #[inline(always)]
        #[track_caller]
        unsafe fn $op($self, $i: usize, $($argument: $value,)* ordering: Ordering, scope: Scope) -> $out {
            // SAFETY: the caller's.
            unsafe { target::atomic::$space::$value::$op($address, $($argument,)* ordering, scope) }
        }
    };
}

places!(u32 i32 u64 i64);
