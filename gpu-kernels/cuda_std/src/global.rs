//! Addresses of device memory as plain data, and the loads and stores through them.

use core::fmt;
use core::marker::PhantomData;

use crate::target;

macro_rules! address {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[repr(transparent)]
        pub struct $name<T> {
            address: u64,
            element: PhantomData<*const T>,
        }

        impl<T> Clone for $name<T> {
            #[inline(always)]
            fn clone(&self) -> Self {
                *self
            }
        }
        impl<T> Copy for $name<T> {}
        // SAFETY: an address is a number; what is done through it is unsafe at the place of use.
        unsafe impl<T> Send for $name<T> {}
        // SAFETY: an address is a number; what is done through it is unsafe at the place of use.
        unsafe impl<T> Sync for $name<T> {}

        impl<T> Default for $name<T> {
            /// The null address.
            #[inline(always)]
            fn default() -> Self {
                Self::new(0)
            }
        }
        impl<T> PartialEq for $name<T> {
            #[inline(always)]
            fn eq(&self, other: &Self) -> bool {
                self.address == other.address
            }
        }
        impl<T> Eq for $name<T> {}
        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.address)
            }
        }

        impl<T> $name<T> {
            /// Makes an address of elements from a raw device address.
            ///
            /// # Safety
            /// `address` is that of an element of an allocation, or of the end of one, or 0. (What may be read or
            /// written there is a condition of each load and store.)
            #[inline(always)]
            #[must_use]
            pub const unsafe fn from_raw(address: u64) -> Self {
                Self::new(address)
            }

            #[inline(always)]
            const fn new(address: u64) -> Self {
                Self { address, element: PhantomData }
            }

            /// The raw address.
            #[inline(always)]
            #[must_use]
            pub const fn addr(self) -> u64 {
                self.address
            }

            /// Whether this is the null address.
            #[inline(always)]
            #[must_use]
            pub const fn is_null(self) -> bool {
                self.address == 0
            }

            /// The same address, holding elements of another type.
            #[inline(always)]
            #[must_use]
            pub const fn cast<U>(self) -> $name<U> {
                $name::new(self.address)
            }

            #[inline(always)]
            const fn element(self, i: usize) -> u64 {
                self.address.wrapping_add((i * size_of::<T>()) as u64)
            }

            /// The address of element `i`.
            ///
            /// # Safety
            /// The element belongs to the same allocation, or the address is the end of that allocation.
            #[inline(always)]
            #[must_use]
            pub const unsafe fn at(self, i: usize) -> Self {
                Self::new(self.element(i))
            }
        }

        impl<T: Copy> $name<T> {
            /// Reads element `i`. `T` has 1, 2, 4 or 8 bytes; other sizes do not compile (`ld.global`).
            ///
            /// # Safety
            /// The element is in a live allocation, aligned to its size, initialised, and nobody writes it meanwhile.
            #[inline(always)]
            #[must_use]
            #[track_caller]
            pub unsafe fn load(self, i: usize) -> T {
                // SAFETY: the caller's.
                unsafe { target::load_global(self.element(i)) }
            }

            /// Reads the 16 bytes from element `i` on, as four words (`ld.global.v4.b32`).
            ///
            /// # Safety
            /// As for [`load`](Self::load), for 16 bytes at an address that is a multiple of 16.
            #[inline(always)]
            #[must_use]
            #[track_caller]
            pub unsafe fn load16(self, i: usize) -> [u32; 4] {
                // SAFETY: the caller's.
                unsafe { target::load_global16(self.element(i)) }
            }

            /// [`load16`](Self::load16) for data that is read once, such as weights. It takes no room in L1 and fetches
            /// 256 bytes into L2 (`ld.global.nc.L1::no_allocate.L2::256B.v4.b32`).
            ///
            /// # Safety
            /// As for [`load16`](Self::load16); and nobody writes the bytes during the whole launch.
            #[inline(always)]
            #[must_use]
            #[track_caller]
            pub unsafe fn load16_stream(self, i: usize) -> [u32; 4] {
                // SAFETY: the caller's.
                unsafe { target::load_global16_stream(self.element(i)) }
            }
        }
    };
}

address! {
    /// An address of device memory that is read. It is plain data, laid out alike on host and device, so it can be a
    /// field of a parameter block.
    Global
}

address! {
    /// An address of device memory that is read and written. It is plain data, laid out alike on host and device, so it
    /// can be a field of a parameter block.
    GlobalMut
}

impl<T: Copy> Global<T> {
    /// [`load`](Self::load) through the read-only cache (`ld.global.nc`).
    ///
    /// # Safety
    /// As for [`load`](Self::load); and nobody writes the element during the whole launch.
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn load_nc(self, i: usize) -> T {
        // SAFETY: the caller's.
        unsafe { target::load_global_nc(self.element(i)) }
    }

    /// [`load_nc`](Self::load_nc) for data that is read once, such as weights. It takes no room in L1 and fetches 256
    /// bytes into L2 (`ld.global.nc.L1::no_allocate.L2::256B`).
    ///
    /// # Safety
    /// As for [`load_nc`](Self::load_nc).
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn load_stream(self, i: usize) -> T {
        // SAFETY: the caller's.
        unsafe { target::load_global_stream(self.element(i)) }
    }

    /// [`load16`](Self::load16) through the read-only cache (`ld.global.nc.v4.b32`).
    ///
    /// # Safety
    /// As for [`load16`](Self::load16); and nobody writes the bytes during the whole launch.
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn load16_nc(self, i: usize) -> [u32; 4] {
        // SAFETY: the caller's.
        unsafe { target::load_global16_nc(self.element(i)) }
    }
}

impl<T: Copy> GlobalMut<T> {
    /// The same address for reading only.
    #[inline(always)]
    #[must_use]
    pub const fn read(self) -> Global<T> {
        Global::new(self.address)
    }

    /// Writes element `i`. `T` has 1, 2, 4 or 8 bytes; other sizes do not compile (`st.global`).
    ///
    /// # Safety
    /// The element is in a live allocation, aligned to its size, and nobody else uses it meanwhile.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, i: usize, value: T) {
        // SAFETY: the caller's.
        unsafe { target::store_global(self.element(i), value) }
    }

    /// [`store`](Self::store) of 4 or 8 bytes, if `condition` holds. The instruction is predicated: behind a branch,
    /// the code that follows would wait for the lanes to reconverge.
    ///
    /// # Safety
    /// As for [`store`](Self::store), if `condition`.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store_if(self, condition: bool, i: usize, value: T) {
        // SAFETY: the caller's.
        unsafe { target::store_global_if(condition, self.element(i), value) }
    }

    /// [`load`](Global::load) of 4 bytes if `condition` holds, else `otherwise`. The instruction is predicated, as in
    /// [`store_if`](Self::store_if): behind a branch, the value would have to be there when the lanes reconverge, not
    /// only when it is used.
    ///
    /// # Safety
    /// As for [`load`](Global::load), if `condition`.
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn load_if(self, condition: bool, i: usize, otherwise: T) -> T {
        // SAFETY: the caller's.
        unsafe { target::load_global_if(condition, self.element(i), otherwise) }
    }

    /// Writes the 16 bytes from element `i` on (`st.global.v4.b32`).
    ///
    /// # Safety
    /// As for [`store`](Self::store), for 16 bytes at an address that is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store16(self, i: usize, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe { target::store_global16(self.element(i), value) }
    }

    /// [`store16`](Self::store16) for data that is read soon, and overwritten not much later. It is the last to be
    /// evicted from L2, so it need never be written to memory (`st.global.L2::cache_hint.v4.b32`, with the policy
    /// `evict_last`).
    ///
    /// # Safety
    /// As for [`store16`](Self::store16).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store16_kept(self, i: usize, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe { target::store_global16_kept(self.element(i), value) }
    }

    /// [`store16`](Self::store16) for data that is not read again soon (`st.global.cs.v4.b32`).
    ///
    /// # Safety
    /// As for [`store16`](Self::store16).
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store16_stream(self, i: usize, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe { target::store_global16_stream(self.element(i), value) }
    }
}
