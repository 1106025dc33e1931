//! Pinned host memory: the device reads and writes it over the bus. The host uses it as a slice, or word by word while
//! the device writes.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use cuda_std::emulator::Lock;
use cuda_std::{Global, GlobalMut};

use super::buffer::{bytes_of, is_within};
use super::recording::Freed;
use super::{Buffer, Device, DeviceKind};
use crate::Error;

/// Pinned host memory of `len` elements, which the device can read and write as well.
///
/// When the host asks for the contents, work that has the address may still run. So [`Pinned::as_slice`] and
/// [`Pinned::as_mut_slice`] first wait for every queue of the card. They are for filling and for checking, not for the
/// inner loop; [`Mapped`] is for that.
pub struct Pinned<T> {
    device: Device,
    host: *mut u32,
    address: u64,
    len: usize,
    element: PhantomData<T>,
}

// SAFETY: owned memory of plain data.
unsafe impl<T: Send> Send for Pinned<T> {}
// SAFETY: shared references only read it.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl Device {
    /// Allocates pinned host memory for `len` elements, with all bytes zero.
    ///
    /// # Errors
    /// Not enough memory that can be pinned; [`Error::Recording`] while the queue's work is recorded.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<Pinned<T>, Error> {
        drop(self.refuse_while_recording("an allocation")?);
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

    /// Allocates pinned host memory of `words` 32-bit words, zeroed, that the device can write while the host reads it.
    ///
    /// # Errors
    /// As [`pinned`](Self::pinned).
    pub fn mapped(&self, words: usize) -> Result<Mapped, Error> {
        Ok(Mapped(self.pinned(words)?))
    }

    /// Waits until every queue of this device is done.
    ///
    /// # Errors
    /// The error of a kernel that failed.
    pub fn synchronize_all(&self) -> Result<(), Error> {
        let _waiting = self.refuse_while_recording("a wait")?;
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.synchronize_card(),
            DeviceKind::Emulator(emulator) => {
                emulator.synchronize();
                Ok(())
            }
        }
    }

    /// Enqueues a copy between two addresses that the device can reach.
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
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it is memory of the emulator, and not empty.
    fn is_emulated(&self) -> bool {
        self.len > 0 && self.device.is_emulator()
    }

    /// The address by which the device reads it.
    pub fn ptr(&self) -> Global<T> {
        // SAFETY: where it starts.
        unsafe { Global::from_raw(self.address) }
    }

    /// The address by which the device writes it.
    pub fn ptr_mut(&self) -> GlobalMut<T> {
        // SAFETY: where it starts.
        unsafe { GlobalMut::from_raw(self.address) }
    }

    /// Waits until the device is done, and returns the contents. On the emulator, nothing can write to them before the
    /// slice is dropped.
    ///
    /// # Errors
    /// The error of a kernel that failed.
    pub fn as_slice(&self) -> Result<PinnedSlice<'_, T>, Error> {
        self.device.synchronize_all()?;
        let lock = self.is_emulated().then(|| Lock::to_read(self.address));
        // SAFETY: live, aligned (to a page, or 16 bytes), initialised; nothing enqueued writes to it any more.
        Ok(PinnedSlice { slice: unsafe { std::slice::from_raw_parts(self.host.cast(), self.len) }, _lock: lock })
    }

    /// Waits until the device is done, and returns the contents for changing. On the emulator, nothing else can use
    /// them before the slice is dropped.
    ///
    /// # Errors
    /// The error of a kernel that failed.
    pub fn as_mut_slice(&mut self) -> Result<PinnedSliceMut<'_, T>, Error> {
        self.device.synchronize_all()?;
        let lock = self.is_emulated().then(|| Lock::to_write(self.address));
        // SAFETY: the device has been waited for.
        Ok(PinnedSliceMut { slice: unsafe { self.as_mut_slice_now() }, _lock: lock })
    }

    /// The contents for changing, without waiting.
    ///
    /// # Safety
    /// No enqueued work that uses the memory is still to be done.
    pub unsafe fn as_mut_slice_now(&mut self) -> &mut [T] {
        // SAFETY: live, aligned (to a page, or 16 bytes), initialised, exclusive; the caller's word for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.host.cast(), self.len) }
    }
}

/// The contents of [`Pinned`] memory, for reading.
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

/// The contents of [`Pinned`] memory, for changing.
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
            DeviceKind::Cuda(cuda) => unsafe { cuda.free(Freed::pinned(self.host)) },
            DeviceKind::Emulator(emulator) => emulator.free(self.address),
        }
    }
}

/// Host memory, in 32-bit words, that the device writes and the host reads, without a copy and without waiting: word by
/// word, with atomic loads.
pub struct Mapped(Pinned<u32>);

impl Mapped {
    /// The address by which the device writes it.
    pub fn ptr_mut(&self) -> GlobalMut<u32> {
        self.0.ptr_mut()
    }

    /// The present value of word `i`. What the device wrote before a system-scope release of this word is visible
    /// afterwards.
    ///
    /// # Panics
    /// If there is no such word: a bug of the caller.
    pub fn load(&self, i: usize) -> u32 {
        let Pinned { device, host, address, len, .. } = &self.0;
        assert!(i < *len);
        if let DeviceKind::Emulator(emulator) = &*device.0 {
            return emulator.load(address + 4 * i as u64);
        }
        // SAFETY: in bounds, aligned, alive as long as self; the device's writes to it are atomic words, and the host
        // has it by these alone.
        let word = unsafe { AtomicU32::from_ptr(host.add(i)) };
        word.load(Ordering::Acquire)
    }

    /// Zeroes all words, one by one. Not ordered with enqueued work that writes to them.
    pub fn clear(&mut self) {
        let Pinned { device, host, address, len, .. } = &self.0;
        if let DeviceKind::Emulator(emulator) = &*device.0 {
            return emulator.write(*address, &vec![0; len * 4]);
        }
        for i in 0..*len {
            // SAFETY: as for `load`.
            let word = unsafe { AtomicU32::from_ptr(host.add(i)) };
            word.store(0, Ordering::Release);
        }
    }
}

impl<T: Pod> Buffer<T> {
    /// Enqueues a copy of all of `from` to the elements from `at` on. The copy engine does it, in the queue of this
    /// buffer's device.
    ///
    /// # Safety
    /// Both stay alive, and nothing else touches either, until the copy is done. If the copy is
    /// [recorded](Device::capture), this holds for as long as the graph exists.
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

    /// Enqueues a copy of the first `len` elements of `from` to the first elements of this buffer, as
    /// [`copy_from_pinned`](Self::copy_from_pinned) does.
    ///
    /// # Safety
    /// As for [`Buffer::copy_from_pinned`].
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If either has fewer elements: a bug of the caller.
    pub unsafe fn copy_start_from_pinned(&mut self, from: &Pinned<T>, len: usize) -> Result<(), Error> {
        assert!(len <= from.len && len <= self.len, "copy of {len} of {} into {}", from.len, self.len);
        // SAFETY: in bounds; the caller's word for the rest.
        unsafe { self.device.copy(self.address, from.address, len * size_of::<T>()) }
    }

    /// Enqueues a copy of the elements from `at` on to all of `to`, as [`copy_from_pinned`](Self::copy_from_pinned)
    /// does.
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
