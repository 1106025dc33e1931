//! Uploads much data at the rate of the bus. Several threads fill pinned memory, and the copy of each piece is enqueued
//! as soon as the piece is filled.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex, PoisonError};

use bytemuck::Pod;

use super::buffer::is_within;
use super::{Buffer, Device, Marker, Pinned};
use crate::Error;

/// Bytes that a thread fills at a time; one unit of the region, if that is more. Larger pieces mean fewer copies, each
/// of which costs the driver the same time.
const PIECE_BYTES: usize = 2 << 20;
/// Pieces that a thread has in memory: one is copied while the other is filled.
const SLOTS: usize = 2;
/// Most threads. More would not be faster, since the bus is the limit then.
const MOST_THREADS: usize = 16;

/// `fill(i, at, out)` writes the bytes of region `i` from byte `at` on to `out`. Regions are counted over all groups.
pub type Fill<'a> = dyn Fn(usize, usize, &mut [u8]) -> Result<(), Error> + Sync + 'a;

/// Where the data comes from, and what happens after it has arrived.
pub struct Filling<'a> {
    /// Supplies the bytes of the regions.
    pub fill: &'a Fill<'a>,
    /// Called with a group's number when all its copies are enqueued. Enqueues the work that follows them.
    pub then: &'a (dyn Fn(usize) -> Result<(), Error> + Sync),
}

/// Regions whose data some work needs together.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// The regions to fill.
    pub regions: Vec<Region>,
    /// An earlier group that uses the same memory, if any. This group is filled only after that group's work was
    /// enqueued.
    pub after: Option<usize>,
}

/// Device memory to fill: a range of elements of a buffer.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    address: u64,
    bytes: usize,
    /// Bytes that must be filled together.
    unit: usize,
}

impl Region {
    /// The same region, cut only at multiples of `elements` bf16 elements (and at its end).
    ///
    /// # Panics
    /// If `elements` is 0: a bug of the caller.
    pub fn in_units(self, elements: usize) -> Self {
        assert!(elements > 0, "units of nothing");
        Self { unit: 2 * elements, ..self }
    }

    /// Bytes of the region.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of a piece: as many units as fit in [`PIECE_BYTES`], but at least one.
    fn piece_bytes(&self) -> usize {
        (PIECE_BYTES / self.unit).max(1) * self.unit
    }
}

impl<T: Pod> Buffer<T> {
    /// The region of `len` elements from `at` on, for [`Device::fill_regions`].
    ///
    /// # Panics
    /// If the range does not fit: a bug of the caller.
    pub fn region(&self, at: usize, len: usize) -> Region {
        assert!(is_within(at, len, self.len), "region of {len} at {at} in {}", self.len);
        Region { address: self.address + (at * size_of::<T>()) as u64, bytes: len * size_of::<T>(), unit: 1 }
    }
}

/// The whole upload, cut into pieces.
struct Work<'a> {
    device: &'a Device,
    groups: &'a [Group],
    filling: &'a Filling<'a>,
    pieces: Vec<Piece>,
    /// Bytes of the largest piece.
    slot_bytes: usize,
    next: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

/// The part of a region that a thread fills at a time.
#[derive(Clone, Copy)]
struct Piece {
    group: usize,
    region: Region,
    /// The region's number, counted over all groups.
    number: usize,
    /// The first byte in the region.
    at: usize,
}

struct State {
    /// For each group, the pieces whose copies are not enqueued yet; plus one until the work after the group is
    /// enqueued.
    left: Vec<usize>,
    stopped: bool,
}

impl Device {
    /// Fills the regions of `groups` in order, on several threads, and returns when all data has arrived. `progress` is
    /// called with the bytes of each piece that was sent; breaking stops the upload.
    ///
    /// # Errors
    /// If pieces failed, the error of the first one in order; [`Error::Interrupted`] if `progress` broke; a driver
    /// error.
    ///
    /// # Safety
    /// The regions' buffers are alive, and nothing else touches the regions but the work that follows them. If regions
    /// share memory, one of their groups is [after](Group::after) the other.
    pub unsafe fn fill_regions(
        &self,
        groups: &[Group],
        filling: &Filling<'_>,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let work = Work::new(self, groups, filling);
        for (group, &left) in work.state().left.clone().iter().enumerate() {
            if left == 1 {
                // The group has no pieces to wait for.
                work.end(group)?;
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(MOST_THREADS).min(work.pieces.len());
        let slots: Vec<Slots> = (0..threads).map(|_| work.slots()).collect::<Result<_, _>>()?;
        let (sent, received) = channel();
        let mut interrupted = false;
        let failed = std::thread::scope(|scope| {
            let run = |slots| {
                let (work, sent) = (&work, sent.clone());
                // SAFETY: the caller's word.
                scope.spawn(move || unsafe { work.run(slots, &sent) })
            };
            let threads: Vec<_> = slots.into_iter().map(run).collect();
            drop(sent);
            for bytes in received {
                if !interrupted && progress(bytes).is_break() {
                    interrupted = true;
                    work.stop();
                }
            }
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            // Threads take pieces in order, so every piece before the first failed one was tried.
            threads.into_iter().filter_map(join).min_by_key(|(piece, _)| *piece)
        });
        match failed {
            Some((_, error)) => Err(error),
            None if interrupted => Err(Error::Interrupted),
            None => Ok(()),
        }
    }
}

/// A thread's pinned buffers, each with a marker for the end of its last copy.
type Slots = [(Pinned<u8>, Marker); SLOTS];

impl<'a> Work<'a> {
    fn new(device: &'a Device, groups: &'a [Group], filling: &'a Filling<'a>) -> Self {
        let regions = groups.iter().enumerate().flat_map(|(i, group)| group.regions.iter().map(move |&r| (i, r)));
        let cut = |(number, (group, region)): (usize, (usize, Region))| {
            let pieces = (0..region.bytes).step_by(region.piece_bytes());
            pieces.map(move |at| Piece { group, region, number, at })
        };
        let pieces: Vec<_> = regions.enumerate().flat_map(cut).collect();
        let largest = pieces.iter().map(|piece| piece.region.bytes.min(piece.region.piece_bytes())).max().unwrap_or(0);
        let mut left = vec![1; groups.len()];
        pieces.iter().for_each(|piece| left[piece.group] += 1);
        Self {
            device,
            groups,
            filling,
            pieces,
            slot_bytes: largest.next_multiple_of(16).max(16),
            next: AtomicUsize::new(0),
            state: Mutex::new(State { left, stopped: false }),
            changed: Condvar::new(),
        }
    }

    fn slots(&self) -> Result<Slots, Error> {
        let slot = || Ok::<_, Error>((self.device.pinned(self.slot_bytes)?, self.device.marker()?));
        Ok([slot()?, slot()?])
    }

    /// Locks the state. No thread panics while it holds the lock.
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the upload: no more pieces are begun.
    fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_all();
    }

    /// Waits until a piece may be filled. Returns whether to fill it: not if the upload was stopped.
    fn may_fill(&self, piece: &Piece) -> bool {
        let after = self.groups[piece.group].after;
        let waits = |state: &mut State| !state.stopped && after.is_some_and(|after| state.left[after] > 0);
        let state = self.changed.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        !state.stopped
    }

    /// Enqueues the work that follows a group.
    fn end(&self, group: usize) -> Result<(), Error> {
        (self.filling.then)(group)?;
        self.state().left[group] = 0;
        self.changed.notify_all();
        Ok(())
    }

    /// Fills pieces until none is left, then waits for their copies. Returns the number of the piece that failed, and
    /// its error.
    ///
    /// # Safety
    /// As for [`Device::fill_regions`].
    unsafe fn run(&self, mut slots: Slots, sent: &Sender<usize>) -> Option<(usize, Error)> {
        // If `fill` panics, other threads may wait for what this one would have filled.
        let _stops = StopsOnPanic(self);
        let mut turn = 0;
        let failed = loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = self.pieces.get(i) else { break None };
            if !self.may_fill(piece) {
                break None;
            }
            let slot = &mut slots[turn % SLOTS];
            turn += 1;
            // SAFETY: the caller's word.
            match unsafe { self.send(slot, piece) } {
                // The receiver may be gone; then the number is not needed.
                Ok(bytes) => drop(sent.send(bytes)),
                Err(error) => {
                    self.stop();
                    break Some((i, error));
                }
            }
        };
        // The slots' memory is freed when this returns.
        let ended = slots.iter().try_for_each(|(_, done)| done.wait());
        failed.or(ended.err().map(|error| (usize::MAX, error)))
    }

    /// Fills a slot with a piece, once the slot's last copy is done, and enqueues the copy. If the piece is the last of
    /// its group, also enqueues the work that follows the group.
    ///
    /// # Safety
    /// As for [`Device::fill_regions`].
    unsafe fn send(&self, (pinned, done): &mut (Pinned<u8>, Marker), piece: &Piece) -> Result<usize, Error> {
        done.wait()?;
        let Piece { group, region, number, at } = *piece;
        let bytes = region.piece_bytes().min(region.bytes - at);
        // SAFETY: the last copy out of the slot is done, and nothing else uses it.
        let out = unsafe { &mut pinned.as_mut_slice_now()[..bytes] };
        (self.filling.fill)(number, at, out)?;
        // SAFETY: the piece is within its region, which is alive by the caller's word; the slot lives until the marker.
        unsafe { self.device.copy(region.address + at as u64, pinned.ptr().addr(), bytes)? };
        done.set()?;
        let is_last = {
            let left = &mut self.state().left[group];
            *left -= 1;
            *left == 1
        };
        if is_last {
            self.end(group)?;
        }
        Ok(bytes)
    }
}

/// Stops the upload if its thread panics.
struct StopsOnPanic<'a, 'w>(&'a Work<'w>);

impl Drop for StopsOnPanic<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected byte `at` of region `i`.
    fn byte(i: usize, at: usize) -> u8 {
        (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(i as u64 * 77).to_le_bytes()[5]
    }

    fn write(i: usize, at: usize, out: &mut [u8]) -> Result<(), Error> {
        out.iter_mut().enumerate().for_each(|(k, out)| *out = byte(i, at + k));
        Ok(())
    }

    const LENGTHS: [usize; 5] = [3, PIECE_BYTES, 0, 2 * PIECE_BYTES + 5, 7];

    /// Fills the regions as one group, with no work after them.
    fn fill_all(
        device: &Device,
        regions: Vec<Region>,
        fill: &Fill<'_>,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let groups = [Group { regions, after: None }];
        // SAFETY: the tests' buffers outlive the call, and nobody else uses them.
        unsafe { device.fill_regions(&groups, &Filling { fill, then: &|_| Ok(()) }, progress) }
    }

    fn regions(buffers: &[Buffer<u8>]) -> Vec<Region> {
        // The first byte of each buffer belongs to no region.
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
        fill_all(&device, regions(&buffers), &write, &mut progress).unwrap();
        assert_eq!(told, LENGTHS.iter().sum::<usize>());
        for (i, (buffer, length)) in buffers.iter().zip(LENGTHS).enumerate() {
            let mut read = vec![0; length + 1];
            buffer.read(0, &mut read).unwrap();
            assert_eq!(read[0], 0);
            let wrong = read[1..].iter().enumerate().find(|&(at, &found)| found != byte(i, at));
            assert_eq!(wrong, None, "region {i}");
        }
    }

    /// Pieces of a region begin at a multiple of its unit, whether many units fit in a piece or not even one.
    #[test]
    fn units_are_not_cut() {
        let device = Device::emulator(0);
        for unit in [1000, PIECE_BYTES / 4 + 3, PIECE_BYTES] {
            let elements = 5 * PIECE_BYTES / 4 + 1;
            let buffer: Buffer<half::bf16> = device.zeroed(elements).unwrap();
            let region = vec![buffer.region(0, elements).in_units(unit)];
            let filled = std::sync::Mutex::new(Vec::new());
            let fill = |i: usize, at: usize, out: &mut [u8]| {
                assert!(at.is_multiple_of(2 * unit), "{at} in units of {unit}");
                filled.lock().unwrap().push((at, out.len()));
                write(i, at, out)
            };
            fill_all(&device, region, &fill, &mut |_| ControlFlow::Continue(())).unwrap();
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
            // The first piece that fails is the last to report it.
            std::thread::sleep(std::time::Duration::from_millis(if i == 3 { 20 } else { 0 }));
            if i >= 3 { Err(Error::Emulator(format!("region {i}"))) } else { Ok(()) }
        };
        let failed = fill_all(&device, regions(&buffers), &fail, &mut |_| ControlFlow::Continue(()));
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
        let ended = fill_all(&device, regions(&buffers), &slow, &mut |_| ControlFlow::Break(()));
        assert!(matches!(ended, Err(Error::Interrupted)));
        assert!(filled.into_inner() < buffers.len());
    }
    /// Ten groups take turns in two buffers. When a group's work runs, all of its bytes have arrived, and the next
    /// group's have not.
    #[test]
    fn memory_is_filled_anew_behind_what_reads_it() {
        const BYTES: usize = 3 * PIECE_BYTES + 100;
        let device = Device::emulator(0);
        let buffers: [Buffer<u8>; 2] = [device.zeroed(BYTES).unwrap(), device.zeroed(BYTES).unwrap()];
        let group = |i: usize| {
            let buffer = &buffers[i % 2];
            let regions = vec![buffer.region(0, PIECE_BYTES / 2), buffer.region(PIECE_BYTES, BYTES - PIECE_BYTES)];
            Group { regions, after: i.checked_sub(2) }
        };
        let ended = Mutex::new(Vec::new());
        let then = |i: usize| {
            let mut read = vec![0; BYTES];
            buffers[i % 2].read(0, &mut read)?;
            assert!((0..PIECE_BYTES / 2).all(|at| read[at] == byte(2 * i, at)), "group {i}");
            assert!((PIECE_BYTES..BYTES).all(|at| read[at] == byte(2 * i + 1, at - PIECE_BYTES)), "group {i}");
            ended.lock().unwrap().push(i);
            Ok(())
        };
        let groups: Vec<Group> = (0..10).map(group).collect();
        // SAFETY: the buffers outlive the call, and only this test uses them.
        let filled = unsafe {
            device.fill_regions(&groups, &Filling { fill: &write, then: &then }, &mut |_| ControlFlow::Continue(()))
        };
        filled.unwrap();
        let mut ended = ended.into_inner().unwrap();
        ended.sort_unstable();
        assert_eq!(ended, (0..10).collect::<Vec<_>>());
        // An error in that work is reported, and no thread waits for ever.
        let then = |i: usize| if i == 3 { Err(Error::Emulator("behind group 3".into())) } else { Ok(()) };
        // SAFETY: the buffers outlive the call, and only this test uses them.
        let filled = unsafe {
            device.fill_regions(&groups, &Filling { fill: &write, then: &then }, &mut |_| ControlFlow::Continue(()))
        };
        assert!(filled.unwrap_err().to_string().contains("behind group 3"));
    }
}
