//! Much data to the device at the rate of the bus: several threads fill pinned memory, and copies from it are enqueued
//! as soon as a piece is complete.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex, PoisonError};

use bytemuck::Pod;

use super::{Buffer, Device, Marker, Pinned, is_within};
use crate::Error;

/// Bytes that a thread fills at a time, or a unit of its region if that is more: a copy costs the driver microseconds,
/// whatever its size.
const PIECE_BYTES: usize = 2 << 20;
/// Pieces of a thread: one travels while the other is filled.
const SLOTS: usize = 2;
/// Most threads; beyond so many the bus does not keep up.
const MOST_THREADS: usize = 16;

/// Writes the bytes of region `i`, counted over all groups, from byte `at` on: `fill(i, at, out)`.
pub type Fill<'a> = dyn Fn(usize, usize, &mut [u8]) -> Result<(), Error> + Sync + 'a;

/// What regions are filled with.
pub struct Filling<'a> {
    /// Their bytes.
    pub fill: &'a Fill<'a>,
    /// Enqueues what comes behind the copies of a group.
    pub then: &'a (dyn Fn(usize) -> Result<(), Error> + Sync),
}

/// Regions that something comes behind.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// The regions.
    pub regions: Vec<Region>,
    /// The group before it whose memory it takes: it is filled behind what comes behind that one.
    pub after: Option<usize>,
}

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

    /// Bytes of all of it.
    pub fn bytes(&self) -> usize {
        self.bytes
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
        assert!(is_within(at, len, self.len), "region of {len} at {at} in {}", self.len);
        Region { address: self.address + (at * size_of::<T>()) as u64, bytes: len * size_of::<T>(), unit: 1 }
    }
}

/// What is to be filled, and how it is cut.
struct Work<'a> {
    device: &'a Device,
    groups: &'a [Group],
    filling: &'a Filling<'a>,
    pieces: Vec<Piece>,
    /// Of the largest piece.
    slot_bytes: usize,
    next: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

/// What a thread fills at a time.
#[derive(Clone, Copy)]
struct Piece {
    group: usize,
    region: Region,
    /// The region's number among all.
    number: usize,
    /// The first byte.
    at: usize,
}

struct State {
    /// Pieces of each group whose copies are not enqueued yet, and one more until what comes behind them is.
    left: Vec<usize>,
    stopped: bool,
}

impl Device {
    /// Fills the regions of `groups` in their order, on several threads. It all has arrived when this returns.
    /// `progress` hears the bytes of each piece that was sent.
    ///
    /// # Errors
    /// Of the pieces that `filling` failed with, the first one's error; [`Error::Interrupted`] when `progress` breaks;
    /// a driver error.
    ///
    /// # Safety
    /// The regions' buffers are alive, and nothing else touches the regions but what comes behind them; regions that
    /// share memory are of groups of which one is [after](Group::after) the other.
    pub unsafe fn fill_regions(
        &self,
        groups: &[Group],
        filling: &Filling<'_>,
        progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<(), Error> {
        let work = Work::new(self, groups, filling);
        for (group, &left) in work.state().left.clone().iter().enumerate() {
            if left == 1 {
                // Nothing is in front of it.
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

    /// Nobody panics while it is held.
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No more pieces are begun.
    fn stop(&self) {
        self.state().stopped = true;
        self.changed.notify_all();
    }

    /// Waits until a piece may be filled; says whether it is to be.
    fn may_fill(&self, piece: &Piece) -> bool {
        let after = self.groups[piece.group].after;
        let waits = |state: &mut State| !state.stopped && after.is_some_and(|after| state.left[after] > 0);
        let state = self.changed.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        !state.stopped
    }

    /// Enqueues what comes behind a group.
    fn end(&self, group: usize) -> Result<(), Error> {
        (self.filling.then)(group)?;
        self.state().left[group] = 0;
        self.changed.notify_all();
        Ok(())
    }

    /// Takes pieces until there is none left, and waits for their copies. Gives the piece that failed, and why.
    ///
    /// # Safety
    /// As for [`Device::fill_regions`].
    unsafe fn run(&self, mut slots: Slots, sent: &Sender<usize>) -> Option<(usize, Error)> {
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
                // Nobody hears it where the caller is past caring.
                Ok(bytes) => drop(sent.send(bytes)),
                Err(error) => {
                    self.stop();
                    break Some((i, error));
                }
            }
        };
        // The memory is given back after this.
        let ended = slots.iter().try_for_each(|(_, done)| done.wait());
        failed.or(ended.err().map(|error| (usize::MAX, error)))
    }

    /// Fills a slot with a piece once its last copy is done, and enqueues the copy; and what comes behind the piece's
    /// group, if it is the last one.
    ///
    /// # Safety
    /// As for [`Device::fill_regions`].
    unsafe fn send(&self, (pinned, done): &mut (Pinned<u8>, Marker), piece: &Piece) -> Result<usize, Error> {
        done.wait()?;
        let Piece { group, region, number, at } = *piece;
        let bytes = region.piece_bytes().min(region.bytes - at);
        // SAFETY: the copy out of it is done, and nothing else uses it.
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

    /// With nothing behind them.
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

    /// Pieces of a region with units begin at a multiple of them, whether many fit into a piece or not one.
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
            // The first to fail is the last to say so.
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
    /// Ten groups take turns in two buffers: behind each its bytes are all there, and nobody else's yet.
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
        // SAFETY: the buffers outlive the call, and are this test's.
        let filled = unsafe {
            device.fill_regions(&groups, &Filling { fill: &write, then: &then }, &mut |_| ControlFlow::Continue(()))
        };
        filled.unwrap();
        let mut ended = ended.into_inner().unwrap();
        ended.sort_unstable();
        assert_eq!(ended, (0..10).collect::<Vec<_>>());
        // What fails there is told, and nobody waits for it for ever.
        let then = |i: usize| if i == 3 { Err(Error::Emulator("behind group 3".into())) } else { Ok(()) };
        // SAFETY: as above.
        let filled = unsafe {
            device.fill_regions(&groups, &Filling { fill: &write, then: &then }, &mut |_| ControlFlow::Continue(()))
        };
        assert!(filled.unwrap_err().to_string().contains("behind group 3"));
    }
}
