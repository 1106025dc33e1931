//! The block's shared memory.

use core::fmt;
use core::marker::PhantomData;

use crate::target;

/// A 32-bit address in the block's shared memory, of elements of type `T`.
#[repr(transparent)]
pub struct Shared<T> {
    address: u32,
    element: PhantomData<*const T>,
}

impl<T> Clone for Shared<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}
impl<T> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shared({:#x})", self.address)
    }
}

/// The address `byte_offset` bytes into the launch's dynamic shared memory, whose start is a multiple of 1,024.
///
/// # Safety
/// The offset is within the shared memory that the launch asked for.
#[inline(always)]
#[must_use]
pub unsafe fn dynamic<T>(byte_offset: u32) -> Shared<T> {
    Shared::from_raw(target::dynamic_shared().wrapping_add(byte_offset))
}

impl<T> Shared<T> {
    /// Makes an address of elements from a raw shared-memory address.
    #[inline(always)]
    #[must_use]
    pub const fn from_raw(address: u32) -> Self {
        Self { address, element: PhantomData }
    }

    /// The raw address.
    #[inline(always)]
    #[must_use]
    pub const fn addr(self) -> u32 {
        self.address
    }

    /// The same address, holding elements of another type.
    #[inline(always)]
    #[must_use]
    pub const fn cast<U>(self) -> Shared<U> {
        Shared::from_raw(self.address)
    }

    #[inline(always)]
    const fn element(self, i: usize) -> u32 {
        self.address.wrapping_add(i as u32 * size_of::<T>() as u32)
    }

    /// The address of element `i`.
    ///
    /// # Safety
    /// The element is within the block's shared memory, or the address is the end of that memory.
    #[inline(always)]
    #[must_use]
    pub const unsafe fn at(self, i: usize) -> Self {
        Self::from_raw(self.element(i))
    }
}

impl<T: Copy> Shared<T> {
    /// Reads element `i`. `T` has 1, 2, 4 or 8 bytes; other sizes do not compile (`ld.shared`).
    ///
    /// # Safety
    /// The element is within the block's shared memory, aligned to its size, initialised, and nobody writes it
    /// meanwhile.
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn load(self, i: usize) -> T {
        // SAFETY: the caller's.
        unsafe { target::load_shared(self.element(i)) }
    }

    /// Writes element `i`. `T` has 1, 2, 4 or 8 bytes; other sizes do not compile (`st.shared`).
    ///
    /// # Safety
    /// The element is within the block's shared memory, aligned to its size, and nobody else uses it meanwhile.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store(self, i: usize, value: T) {
        // SAFETY: the caller's.
        unsafe { target::store_shared(self.element(i), value) }
    }

    /// Reads the 16 bytes from element `i` on, as four words (`ld.shared.v4.b32`).
    ///
    /// # Safety
    /// As for [`load`](Self::load), for 16 bytes at an address that is a multiple of 16.
    #[inline(always)]
    #[must_use]
    #[track_caller]
    pub unsafe fn load16(self, i: usize) -> [u32; 4] {
        // SAFETY: the caller's.
        unsafe { target::load_shared16(self.element(i)) }
    }

    /// Writes the 16 bytes from element `i` on (`st.shared.v4.b32`).
    ///
    /// # Safety
    /// As for [`store`](Self::store), for 16 bytes at an address that is a multiple of 16.
    #[inline(always)]
    #[track_caller]
    pub unsafe fn store16(self, i: usize, value: [u32; 4]) {
        // SAFETY: the caller's.
        unsafe { target::store_shared16(self.element(i), value) }
    }
}
