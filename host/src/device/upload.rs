//! Much data to the device at the rate of the bus: several threads fill pinned memory, and copies from it are enqueued
//! as soon as a piece is complete.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use bytemuck::Pod;

use super::{Buffer, Device, Marker, Pinned};
use crate::Error;

/// Bytes that a thread fills at a time, or a unit of its region if that is more: a copy costs the driver microseconds,
/// whatever its size.
const PIECE_BYTES: usize = 2 << 20;
/// Pieces of a thread: one travels while the other is filled.
const SLOTS: usize = 2;
/// Most threads; beyond so many the bus does not keep up.
const MOST_THREADS: usize = 16;

/// Writes the bytes of region `i` from byte `at` on: `fill(i, at, out)`.
pub type Fill<'a> = dyn Fn(usize, usize, &mut [u8]) -> Result<(), Error> + Sync + 'a;

/// Device memory that is to be filled: elements of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    address: u64,
    bytes: usize,
    /// Bytes that are filled together.
    unit: usize,
}

impl Region {
    /// The same, filled in pieces that begin and end at a multiple of so many bf16 elements (or at its end).
    ///
    /// # Panics
    /// If it is none: a bug of the caller.
    pub fn in_units(self, elements: usize) -> Self {
        assert!(elements > 0, "units of nothing");
        Self { unit: 2 * elements, ..self }
    }

    /// Bytes of a piece: as many units as fit into [`PIECE_BYTES`], or one.
    fn piece_bytes(&self) -> usize {
        (PIECE_BYTES / self.unit).max(1) * self.unit
    }
}

impl<T: Pod> Buffer<T> {
    /// So many elements from `at` on.
    ///
    /// # Panics
    /// If the range does not fit: a bug of the caller.
    pub fn region(&self, at: usize, len: usize) -> Region {
        assert!(at + len <= self.len, "region of {len} at {at} in {}", self.len);
        Region { address: self.address + (at * size_of::<T>()) as u64, bytes: len * size_of::<T>(), unit: 1 }
    }
}

/// What is to be filled, and how it is cut.
struct Work<'a> {
    device: &'a Device,
    regions: &'a [Region],
    /// Region and first byte of each piece.
    pieces: Vec<(usize, usize)>,
    /// Of the largest piece.
    slot_bytes: usize,
    next: AtomicUsize,
    stopped: AtomicBool,
}

impl Device {
    /// Fills `regions`, on several threads. It all has arrived when this returns. `progress` hears the bytes of each
    /// piece that was sent.
    ///
    /// # Errors
    /// Of the pieces that `fill` failed with, the first one's error; [`Error::Interrupted`] when `progress` breaks; a
    /// driver error.
    ///
    /// # Safety
    /// The regions' buffers are alive, and nothing else touches the regions.
    pub unsafe fn fill_regions(
        &self,
        regions: &[Region],
        fill: &Fill<'_>,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let largest = regions.iter().map(|region| region.bytes.min(region.piece_bytes())).max().unwrap_or(0);
        let slot_bytes = largest.next_multiple_of(16).max(16);
        let cut =
            |(i, region): (usize, &Region)| (0..region.bytes).step_by(region.piece_bytes()).map(move |at| (i, at));
        let work = Work {
            device: self,
            regions,
            pieces: regions.iter().enumerate().flat_map(cut).collect(),
            slot_bytes,
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(MOST_THREADS).min(work.pieces.len());
        let slots: Vec<Slots> = (0..threads).map(|_| work.slots()).collect::<Result<_, _>>()?;
        let (sent, received) = channel();
        let mut interrupted = false;
        let failed = std::thread::scope(|scope| {
            let run = |slots| {
                let (work, sent) = (&work, sent.clone());
                // SAFETY: the caller's word.
                scope.spawn(move || unsafe { work.run(slots, fill, &sent) })
            };
            let threads: Vec<_> = slots.into_iter().map(run).collect();
            drop(sent);
            for bytes in received {
                if !interrupted && progress(bytes).is_break() {
                    interrupted = true;
                    work.stopped.store(true, Ordering::Relaxed);
                }
            }
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            // Pieces are begun in their order: all before the first that failed were tried.
            threads.into_iter().filter_map(join).min_by_key(|(piece, _)| *piece)
        });
        match failed {
            Some((_, error)) => Err(error),
            None if interrupted => Err(Error::Interrupted),
            None => Ok(()),
        }
    }
}

/// A thread's pinned memory, each part with the point at which its copy is done.
type Slots = [(Pinned<u8>, Marker); SLOTS];

impl Work<'_> {
    fn slots(&self) -> Result<Slots, Error> {
        let slot = || Ok::<_, Error>((self.device.pinned(self.slot_bytes)?, self.device.marker()?));
        Ok([slot()?, slot()?])
    }

    /// Takes pieces until there is none left, and waits for their copies. Gives the piece that failed, and why.
    ///
    /// # Safety
    /// As for [`Device::fill_regions`].
    unsafe fn run(&self, mut slots: Slots, fill: &Fill<'_>, sent: &Sender<usize>) -> Option<(usize, Error)> {
        let mut turn = 0;
        let failed = loop {
            if self.stopped.load(Ordering::Relaxed) {
                break None;
            }
            let piece = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(&(i, at)) = self.pieces.get(piece) else { break None };
            let slot = &mut slots[turn % SLOTS];
            turn += 1;
            // SAFETY: the caller's word.
            match unsafe { self.send(slot, i, at, fill) } {
                // Nobody hears it where the caller is past caring.
                Ok(bytes) => drop(sent.send(bytes)),
                Err(error) => {
                    self.stopped.store(true, Ordering::Relaxed);
                    break Some((piece, error));
                }
            }
        };
        // The memory is given back after this.
        let ended = slots.iter().try_for_each(|(_, done)| done.wait());
        failed.or(ended.err().map(|error| (usize::MAX, error)))
    }

    /// Fills a slot with a piece of region `i` once its last copy is done, and enqueues the copy.
    ///
    /// # Safety
    /// As for [`Device::fill_regions`].
    unsafe fn send(
        &self,
        (pinned, done): &mut (Pinned<u8>, Marker),
        i: usize,
        at: usize,
        fill: &Fill<'_>,
    ) -> Result<usize, Error> {
        done.wait()?;
        let region = self.regions[i];
        let bytes = region.piece_bytes().min(region.bytes - at);
        // SAFETY: the copy out of it is done, and nothing else uses it.
        let out = unsafe { &mut pinned.as_mut_slice_now()[..bytes] };
        fill(i, at, out)?;
        // SAFETY: the piece is within its region, which is alive by the caller's word; the slot lives until the marker.
        unsafe { self.device.copy(region.address + at as u64, pinned.ptr().addr(), bytes)? };
        done.set()?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What byte `at` of region `i` is to be.
    fn byte(i: usize, at: usize) -> u8 {
        (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i as u64 * 77).to_le_bytes()[5]
    }

    fn write(i: usize, at: usize, out: &mut [u8]) -> Result<(), Error> {
        out.iter_mut().enumerate().for_each(|(k, out)| *out = byte(i, at + k));
        Ok(())
    }

    const LENGTHS: [usize; 5] = [3, PIECE_BYTES, 0, 2 * PIECE_BYTES + 5, 7];

    fn regions(buffers: &[Buffer<u8>]) -> Vec<Region> {
        // The first byte of each is nobody's.
        buffers.iter().map(|buffer| buffer.region(1, buffer.len() - 1)).collect()
    }

    #[test]
    fn every_byte_arrives_where_it_belongs() {
        let device = Device::emulator(0);
        let buffers: Vec<Buffer<u8>> = LENGTHS.iter().map(|n| device.zeroed(n + 1).unwrap()).collect();
        let mut told = 0;
        let mut progress = |bytes| {
            told += bytes;
            ControlFlow::Continue(())
        };
        // SAFETY: the buffers outlive the call, and are this test's.
        unsafe { device.fill_regions(&regions(&buffers), &write, &mut progress).unwrap() };
        assert_eq!(told, LENGTHS.iter().sum::<usize>());
        for (i, (buffer, length)) in buffers.iter().zip(LENGTHS).enumerate() {
            let mut read = vec![0; length + 1];
            buffer.read(0, &mut read).unwrap();
            assert_eq!(read[0], 0);
            let wrong = read[1..].iter().enumerate().find(|&(at, &found)| found != byte(i, at));
            assert_eq!(wrong, None, "region {i}");
        }
    }

    /// Pieces of a region with units begin at a multiple of them, whether many fit into a piece or not one.
    #[test]
    fn units_are_not_cut() {
        let device = Device::emulator(0);
        for unit in [1000, PIECE_BYTES / 4 + 3, PIECE_BYTES] {
            let elements = 5 * PIECE_BYTES / 4 + 1;
            let buffer: Buffer<half::bf16> = device.zeroed(elements).unwrap();
            let region = [buffer.region(0, elements).in_units(unit)];
            let filled = std::sync::Mutex::new(Vec::new());
            let fill = |i: usize, at: usize, out: &mut [u8]| {
                assert!(at.is_multiple_of(2 * unit), "{at} in units of {unit}");
                filled.lock().unwrap().push((at, out.len()));
                write(i, at, out)
            };
            // SAFETY: as above.
            unsafe { device.fill_regions(&region, &fill, &mut |_| ControlFlow::Continue(())).unwrap() };
            let mut filled = filled.into_inner().unwrap();
            filled.sort_unstable();
            let end = filled.iter().fold(0, |end, &(at, length)| if at == end { at + length } else { panic!("{at}") });
            assert_eq!(end, 2 * elements);
            let mut read = vec![half::bf16::ZERO; elements];
            buffer.read(0, &mut read).unwrap();
            let right = |i: usize| read[i].to_le_bytes() == [byte(0, 2 * i), byte(0, 2 * i + 1)];
            assert!((0..elements).all(right), "units of {unit}");
        }
    }

    #[test]
    fn the_first_error_in_order_is_told() {
        let device = Device::emulator(0);
        let buffers: Vec<Buffer<u8>> = (0..40).map(|_| device.zeroed(64).unwrap()).collect();
        let fail = |i: usize, _: usize, _: &mut [u8]| {
            // The first to fail is the last to say so.
            std::thread::sleep(std::time::Duration::from_millis(if i == 3 { 20 } else { 0 }));
            if i >= 3 { Err(Error::Emulator(format!("region {i}"))) } else { Ok(()) }
        };
        // SAFETY: as above.
        let failed = unsafe { device.fill_regions(&regions(&buffers), &fail, &mut |_| ControlFlow::Continue(())) };
        assert!(failed.unwrap_err().to_string().contains("region 3"));
    }

    #[test]
    fn an_interrupt_ends_it_before_the_rest_is_read() {
        let device = Device::emulator(0);
        let buffers: Vec<Buffer<u8>> = (0..2000).map(|_| device.zeroed(64).unwrap()).collect();
        let filled = AtomicUsize::new(0);
        let slow = |i: usize, at: usize, out: &mut [u8]| {
            std::thread::sleep(std::time::Duration::from_micros(200));
            filled.fetch_add(1, Ordering::Relaxed);
            write(i, at, out)
        };
        // SAFETY: as above.
        let ended = unsafe { device.fill_regions(&regions(&buffers), &slow, &mut |_| ControlFlow::Break(())) };
        assert!(matches!(ended, Err(Error::Interrupted)));
        assert!(filled.into_inner() < buffers.len());
    }
}
