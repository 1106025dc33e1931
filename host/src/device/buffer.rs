//! Device memory.

use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::sync::Arc;

use bytemuck::Pod;
use cuda_std::{Global, GlobalMut};

use super::recording::Freed;
use super::{Device, DeviceKind, Filling, Group};
use crate::Error;

/// From so many bytes on, a write is sent in pieces through pinned memory: from pageable memory, the driver copies more
/// slowly than the bus.
const IN_PIECES_FROM: usize = 8 << 20;

/// Device memory of `len` elements.
pub struct Buffer<T> {
    pub(super) device: Device,
    pub(super) address: u64,
    pub(super) len: usize,
    element: PhantomData<T>,
}

impl Device {
    /// Allocates device memory for `len` elements, with all bytes zero.
    ///
    /// # Errors
    /// Not enough device memory, or a driver error; [`Error::Recording`] while the queue's work is recorded.
    pub fn zeroed<T: Pod>(&self, len: usize) -> Result<Buffer<T>, Error> {
        let _enqueuing = self.refuse_while_recording("an allocation")?;
        let bytes = bytes_of::<T>(len);
        let address = match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.allocate(bytes)?,
            DeviceKind::Emulator(emulator) => emulator.allocate(bytes),
        };
        Ok(Buffer { device: self.clone(), address, len, element: PhantomData })
    }

    /// As [`zeroed`](Self::zeroed), for an array of these dimensions. `what` names it in an error.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed); [`Error::TooLarge`] if no memory could hold the array.
    pub(crate) fn zeroed_array<T: Pod>(&self, what: &'static str, dimensions: &[usize]) -> Result<Buffer<T>, Error> {
        let elements = dimensions.iter().try_fold(1usize, |elements, size| elements.checked_mul(*size));
        // So many that their bytes can be counted as well.
        let len = elements.filter(|elements| *elements <= isize::MAX as usize / size_of::<T>().max(1));
        self.zeroed(len.ok_or(Error::TooLarge { what })?)
    }

    /// Allocates device memory with a copy of `data`.
    ///
    /// # Errors
    /// Not enough device memory, or a driver error.
    pub fn upload<T: Pod>(&self, data: &[T]) -> Result<Buffer<T>, Error> {
        let mut buffer = self.zeroed(data.len())?;
        buffer.write(0, data)?;
        Ok(buffer)
    }
}

impl<T: Pod> Buffer<T> {
    /// The device that the memory is on, with the queue that copies are enqueued on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address, for reading.
    pub fn ptr(&self) -> Global<T> {
        // SAFETY: where it starts.
        unsafe { Global::from_raw(self.address) }
    }

    /// The address, for writing.
    pub fn ptr_mut(&self) -> GlobalMut<T> {
        // SAFETY: where it starts.
        unsafe { GlobalMut::from_raw(self.address) }
    }

    /// The address of element `at`, for reading.
    ///
    /// # Panics
    /// If `at` is more than the number of elements: a bug of the caller.
    pub fn part(&self, at: usize) -> Global<T> {
        assert!(at <= self.len, "element {at} of {}", self.len);
        // SAFETY: within it.
        unsafe { self.ptr().at(at) }
    }

    /// Copies `data` to the elements from `at` on, after everything enqueued so far. `data` may be changed once this
    /// returns.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If the range does not fit: a bug of the caller.
    pub fn write(&mut self, at: usize, data: &[T]) -> Result<(), Error> {
        assert!(is_within(at, data.len(), self.len), "write of {} at {at} into {}", data.len(), self.len);
        let enqueuing = self.device.refuse_while_recording("a copy from memory that may be gone by then")?;
        let to = self.address + (at * size_of::<T>()) as u64;
        let bytes: &[u8] = bytemuck::cast_slice(data);
        match &*self.device.0 {
            DeviceKind::Cuda(_) if bytes.len() >= IN_PIECES_FROM => {
                drop(enqueuing);
                let group = Group { regions: vec![self.region(at, data.len())], after: None };
                let fill = |_, at: usize, out: &mut [u8]| {
                    out.copy_from_slice(&bytes[at..][..out.len()]);
                    Ok(())
                };
                let filling = Filling { fill: &fill, then: &|_| Ok(()) };
                // SAFETY: the buffer is alive, and only this function has it now.
                unsafe { self.device.fill_regions(&[group], &filling, &mut |_| ControlFlow::Continue(())) }
            }
            // SAFETY: within the buffer.
            DeviceKind::Cuda(cuda) => unsafe { cuda.write(to, bytes) },
            DeviceKind::Emulator(emulator) => {
                emulator.write(to, bytes);
                Ok(())
            }
        }
    }

    /// Fills the buffer with repetitions of `pattern`, beginning with the pattern's element `start`. For measurements.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If the pattern has no such element: a bug of the caller.
    pub fn repeat(&mut self, pattern: &[T], start: usize) -> Result<(), Error> {
        assert!(start < pattern.len() || self.len == 0, "element {start} of a pattern of {}", pattern.len());
        let (mut at, mut rest) = (0, &pattern[start..]);
        while at < self.len {
            let piece = &rest[..rest.len().min(self.len - at)];
            self.write(at, piece)?;
            at += piece.len();
            rest = pattern;
        }
        Ok(())
    }

    /// Copies the elements from `at` on to `out`, after everything enqueued so far. Waits for the copy.
    ///
    /// # Errors
    /// A driver error, or the error of a kernel that failed.
    ///
    /// # Panics
    /// If the range does not fit: a bug of the caller.
    pub fn read(&self, at: usize, out: &mut [T]) -> Result<(), Error> {
        assert!(is_within(at, out.len(), self.len), "read of {} at {at} from {}", out.len(), self.len);
        let _enqueuing = self.device.refuse_while_recording("a copy to memory that may be gone by then")?;
        let from = self.address + (at * size_of::<T>()) as u64;
        let bytes = bytemuck::cast_slice_mut(out);
        match &*self.device.0 {
            // SAFETY: within the buffer.
            DeviceKind::Cuda(cuda) => unsafe { cuda.read(from, bytes) },
            DeviceKind::Emulator(emulator) => {
                emulator.read(from, bytes);
                Ok(())
            }
        }
    }

    /// Enqueues a copy of all of `from` to the elements from `at` on. Both buffers must be of the same queue.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If the range does not fit, or `from` is of another queue: a bug of the caller.
    pub fn copy_from(&mut self, at: usize, from: &Self) -> Result<(), Error> {
        assert!(Arc::ptr_eq(&self.device.0, &from.device.0), "a copy between two queues");
        assert!(is_within(at, from.len, self.len), "copy of {} at {at} into {}", from.len, self.len);
        let to = self.address + (at * size_of::<T>()) as u64;
        // SAFETY: in bounds; freeing either buffer waits for the copy.
        unsafe { self.device.copy(to, from.address, from.len * size_of::<T>()) }
    }

    /// Enqueues the zeroing of all elements.
    ///
    /// # Errors
    /// A driver error.
    pub fn clear(&mut self) -> Result<(), Error> {
        self.enqueue_clear()
    }

    /// As [`clear`](Self::clear), for buffers that only launches touch.
    pub(crate) fn enqueue_clear(&self) -> Result<(), Error> {
        let bytes = self.len * size_of::<T>();
        match &*self.device.0 {
            // SAFETY: all of the buffer.
            DeviceKind::Cuda(cuda) => unsafe { cuda.zero(self.address, bytes) },
            DeviceKind::Emulator(emulator) => {
                emulator.write(self.address, &vec![0; bytes]);
                Ok(())
            }
        }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        match &*self.device.0 {
            // SAFETY: from `allocate`, and nobody has it any more.
            DeviceKind::Cuda(cuda) => unsafe { cuda.free(Freed::Device(self.address)) },
            DeviceKind::Emulator(emulator) => emulator.free(self.address),
        }
    }
}

/// Bytes to allocate for `len` elements; at least 16.
///
/// # Panics
/// If that exceeds the address space: a bug of the caller.
pub(super) fn bytes_of<T>(len: usize) -> usize {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
    bytes.unwrap_or_else(|| panic!("{len} elements of {} bytes", size_of::<T>())).max(16)
}

/// Whether the range of `count` elements from `at` on lies within `len` elements.
pub(super) const fn is_within(at: usize, count: usize, len: usize) -> bool {
    at <= len && count <= len - at
}
