//! Pinned host memory: the host uses it like a slice, and the device reads and writes it over the bus.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;
use cuda_std::emulator::Lock;
use cuda_std::{Global, GlobalMut};

use super::{Buffer, Device, DeviceKind, bytes_of, is_within};
use crate::Error;

/// Pinned host memory of `len` elements that the device reaches too.
///
/// Work that was given its address may be under way when the host asks for its contents. So [`Pinned::as_slice`] and
/// [`Pinned::as_mut_slice`] first wait for every queue of the card: they are for filling and for checking, not for the
/// inner loop ([`super::Mapped`] is for that).
pub struct Pinned<T> {
    device: Device,
    host: *mut u32,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

// SAFETY: owned memory of plain data.
unsafe impl<T: Send> Send for Pinned<T> {}
// SAFETY: through a shared reference it is only read.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl Device {
    /// Pinned host memory for `len` elements, all bytes zero.
    ///
    /// # Errors
    /// Not enough pinnable memory.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<Pinned<T>, Error> {
        self.refuse_while_recording("an allocation")?;
        let bytes = bytes_of::<T>(len);
        let (host, address) = match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.allocate_mapped(bytes)?,
            DeviceKind::Emulator(emulator) => {
                let address = emulator.allocate(bytes);
                (address as *mut u32, address)
            }
        };
        Ok(Pinned { device: self.clone(), host, address, len, element: PhantomData })
    }

    /// Waits until every queue of this device is done.
    ///
    /// # Errors
    /// Whatever a kernel failed with.
    pub fn synchronize_all(&self) -> Result<(), Error> {
        self.refuse_while_recording("a wait")?;
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.synchronize_card(),
            DeviceKind::Emulator(emulator) => {
                emulator.synchronize();
                Ok(())
            }
        }
    }

    /// Enqueues a copy between two places that the device reaches.
    ///
    /// # Safety
    /// Both ranges are live until the copy is done.
    pub(super) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), Error> {
        match &*self.0 {
            // SAFETY: the caller's word.
            DeviceKind::Cuda(cuda) => unsafe { cuda.copy(to, from, bytes) },
            DeviceKind::Emulator(emulator) => {
                emulator.copy(to, from, bytes);
                Ok(())
            }
        }
    }
}

impl<T: Pod> Pinned<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is the emulator's, and there is any.
    fn is_emulated(&self) -> bool {
        self.len > 0 && self.device.is_emulator()
    }

    /// Where the device sees it, to read from.
    pub fn ptr(&self) -> Global<T> {
        // SAFETY: where it starts.
        unsafe { Global::from_raw(self.address) }
    }

    /// Where the device sees it, to write to.
    pub fn ptr_mut(&self) -> GlobalMut<T> {
        // SAFETY: likewise.
        unsafe { GlobalMut::from_raw(self.address) }
    }

    /// Its contents, once the device is done. On the emulator nobody can write them before the slice is dropped.
    ///
    /// # Errors
    /// Whatever a kernel failed with.
    pub fn as_slice(&self) -> Result<PinnedSlice<'_, T>, Error> {
        self.device.synchronize_all()?;
        let lock = self.is_emulated().then(|| Lock::to_read(self.address));
        // SAFETY: live, aligned (to a page, or 16 bytes), initialised; nothing enqueued writes to it any more.
        Ok(PinnedSlice { slice: unsafe { std::slice::from_raw_parts(self.host.cast(), self.len) }, _lock: lock })
    }

    /// Its contents, once the device is done. On the emulator nobody can use them before the slice is dropped.
    ///
    /// # Errors
    /// Whatever a kernel failed with.
    pub fn as_mut_slice(&mut self) -> Result<PinnedSliceMut<'_, T>, Error> {
        self.device.synchronize_all()?;
        let lock = self.is_emulated().then(|| Lock::to_write(self.address));
        // SAFETY: the device has been waited for.
        Ok(PinnedSliceMut { slice: unsafe { self.as_mut_slice_now() }, _lock: lock })
    }

    /// Its contents, without waiting.
    ///
    /// # Safety
    /// Nothing enqueued that uses it is still to be done.
    pub unsafe fn as_mut_slice_now(&mut self) -> &mut [T] {
        // SAFETY: live, aligned (to a page, or 16 bytes), initialised, exclusive; the caller's word for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.host.cast(), self.len) }
    }
}

/// The contents of [`Pinned`] memory.
pub struct PinnedSlice<'a, T> {
    slice: &'a [T],
    _lock: Option<Lock>,
}

impl<T> Deref for PinnedSlice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.slice
    }
}

/// The contents of [`Pinned`] memory, to be changed.
pub struct PinnedSliceMut<'a, T> {
    slice: &'a mut [T],
    _lock: Option<Lock>,
}

impl<T> Deref for PinnedSliceMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.slice
    }
}

impl<T> DerefMut for PinnedSliceMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.slice
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        match &*self.device.0 {
            // SAFETY: from `allocate_mapped`, and nobody has it any more.
            DeviceKind::Cuda(cuda) => unsafe { cuda.free_mapped(self.host) },
            DeviceKind::Emulator(emulator) => emulator.free(self.address),
        }
    }
}

impl<T: Pod> Buffer<T> {
    /// Enqueues a copy of all of `from` to the elements from `at` on, by the copy engine, on the queue of this buffer's
    /// device.
    ///
    /// # Safety
    /// Both stay alive, and nothing else touches either, until the copy is done: where it is
    /// [recorded](Device::capture), for as long as the graph.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If the range does not fit: a bug of the caller.
    pub unsafe fn copy_from_pinned(&mut self, at: usize, from: &Pinned<T>) -> Result<(), Error> {
        assert!(is_within(at, from.len, self.len), "copy of {} at {at} into {}", from.len, self.len);
        let to = self.address + (at * size_of::<T>()) as u64;
        // SAFETY: in bounds; the caller's word for the rest.
        unsafe { self.device.copy(to, from.address, from.len * size_of::<T>()) }
    }

    /// Enqueues a copy of the first `len` elements of `from` to the first ones here, likewise.
    ///
    /// # Safety
    /// As for [`Buffer::copy_from_pinned`].
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If either is shorter: a bug of the caller.
    pub unsafe fn copy_start_from_pinned(&mut self, from: &Pinned<T>, len: usize) -> Result<(), Error> {
        assert!(len <= from.len && len <= self.len, "copy of {len} of {} into {}", from.len, self.len);
        // SAFETY: in bounds; the caller's word for the rest.
        unsafe { self.device.copy(self.address, from.address, len * size_of::<T>()) }
    }

    /// Enqueues a copy of the elements from `at` on to all of `to`, likewise.
    ///
    /// # Safety
    /// As for [`Buffer::copy_from_pinned`].
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If the range does not fit: a bug of the caller.
    pub unsafe fn copy_to_pinned(&self, at: usize, to: &mut Pinned<T>) -> Result<(), Error> {
        assert!(is_within(at, to.len, self.len), "copy of {} at {at} from {}", to.len, self.len);
        let from = self.address + (at * size_of::<T>()) as u64;
        // SAFETY: in bounds; the caller's word for the rest.
        unsafe { self.device.copy(to.address, from, to.len * size_of::<T>()) }
    }
}
