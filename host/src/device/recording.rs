//! Recording of a queue's work: refuses what must not happen meanwhile, and keeps memory while the work can be launched
//! again.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use super::{Device, DeviceKind};
use crate::Error;

/// Whether the work of a queue is being recorded.
#[derive(Default)]
pub(super) struct Recording(RwLock<bool>);

/// A recording that is under way. Dropping this ends it.
pub(super) struct UnderWay<'a>(&'a Recording);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        *self.0.0.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// While this lives, no recording begins on the queue. So what is enqueued meanwhile is not recorded.
#[must_use]
pub(crate) struct NoRecording<'a> {
    _lock: RwLockReadGuard<'a, bool>,
}

impl Recording {
    /// Begins a recording, once nobody [refuses](Self::refuse) one. Until it ends, the queue refuses what cannot be
    /// recorded.
    ///
    /// # Errors
    /// [`Error::Recording`], if another recording is under way.
    pub(super) fn begin(&self) -> Result<UnderWay<'_>, Error> {
        let mut under_way = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut *under_way, true) {
            return Err(Error::Recording { doing: "another recording" });
        }
        Ok(UnderWay(self))
    }

    /// Checks that no recording is under way, and lets none begin for as long as the result lives.
    ///
    /// # Errors
    /// [`Error::Recording`], if one is under way.
    fn refuse(&self, doing: &'static str) -> Result<NoRecording<'_>, Error> {
        let lock = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if *lock { Err(Error::Recording { doing }) } else { Ok(NoRecording { _lock: lock }) }
    }
}

/// Memory that nobody owns any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freed {
    /// Device memory, by its address.
    Device(u64),
    /// Pinned host memory, by the host's address.
    Pinned(usize),
}

impl Freed {
    /// Pinned memory at `host`.
    pub(super) fn pinned(host: *mut u32) -> Self {
        Self::Pinned(host.expose_provenance())
    }
}

/// The recordings of a card's queues, and the memory that they keep. Recorded work may use any memory of the card that
/// was there when it was recorded, whatever queue that is of.
#[derive(Default)]
pub(super) struct Recordings(Mutex<HeldMemory>);

#[derive(Default)]
struct HeldMemory {
    /// Recordings that are under way or whose graph can be launched.
    recordings: usize,
    /// Memory that was freed since the first of them began.
    memory: Vec<Freed>,
}

impl Recordings {
    fn lock(&self) -> MutexGuard<'_, HeldMemory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one more recording. While there is any, freed memory is kept.
    pub(super) fn add(&self) {
        self.lock().recordings += 1;
    }

    /// Frees memory by `free`; or, while there are recordings, keeps it for them. No recording begins meanwhile.
    pub(super) fn free(&self, memory: Freed, free: impl FnOnce(Freed)) {
        let mut kept = self.lock();
        if kept.recordings > 0 { kept.memory.push(memory) } else { free(memory) }
    }

    /// Counts one recording less: its graph is gone, or could not be made. If it was the last one, frees what they kept
    /// by `free`.
    pub(super) fn remove(&self, free: impl FnMut(Freed)) {
        let mut kept = self.lock();
        kept.recordings -= 1;
        if kept.recordings == 0 {
            std::mem::take(&mut kept.memory).into_iter().for_each(free);
        }
    }
}

impl Device {
    /// Refuses an operation that cannot be recorded, if a recording is under way on this queue. The result is held
    /// until the operation is enqueued: no recording begins before.
    ///
    /// # Errors
    /// [`Error::Recording`].
    pub(crate) fn refuse_while_recording(&self, doing: &'static str) -> Result<NoRecording<'_>, Error> {
        self.recording().refuse(doing)
    }

    pub(super) fn recording(&self) -> &Recording {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.recording(),
            DeviceKind::Emulator(emulator) => emulator.recording(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    /// Records work and launches its graph.
    fn launched(device: &Device, work: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
        device.capture(work)?.launch()
    }

    #[test]
    fn work_that_cannot_be_recorded_is_refused() {
        let device = Device::emulator(0);
        let mut buffer = device.zeroed::<u32>(4).unwrap();
        assert!(launched(&device, || buffer.clear()).is_ok());
        let mut out = [0; 4];
        let refused = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Recording { .. })));
        // The numbers would be read from host memory only when the graph is launched.
        refused(launched(&device, || buffer.write(0, &[1, 2])));
        refused(launched(&device, || buffer.read(0, &mut out)));
        refused(launched(&device, || device.zeroed::<u32>(4).map(drop)));
        refused(launched(&device, || device.pinned::<u32>(4).map(drop)));
        refused(launched(&device, || device.mapped(4).map(drop)));
        refused(launched(&device, || device.synchronize()));
        // The other queue would be recorded as well, and would not know it.
        refused(launched(&device, || device.beside()?.wait_for(&device)));
        refused(launched(&device, || launched(&device, || Ok(()))));
        // The recording has ended.
        buffer.write(0, &[1, 2]).unwrap();
        buffer.read(0, &mut out).unwrap();
        assert_eq!(out, [1, 2, 0, 0]);
    }

    /// Otherwise what another thread enqueues could become part of the recording.
    #[test]
    fn a_recording_begins_when_nothing_is_being_enqueued() {
        let recording = Recording::default();
        let begun = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let enqueuing = recording.refuse("a copy").unwrap();
            scope.spawn(|| {
                let _under_way = recording.begin().unwrap();
                begun.store(true, Ordering::Release);
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!begun.load(Ordering::Acquire));
            drop(enqueuing);
        });
        assert!(begun.load(Ordering::Acquire));
        assert!(recording.refuse("a copy").is_ok(), "the recording has ended");
    }

    #[test]
    fn memory_is_kept_for_as_long_as_a_recording_may_use_it() {
        let recordings = Recordings::default();
        let freed = RefCell::new(Vec::new());
        let free = |memory| recordings.free(memory, |memory| freed.borrow_mut().push(memory));
        let remove = || recordings.remove(|memory| freed.borrow_mut().push(memory));
        free(Freed::Device(1));
        free(Freed::Pinned(1));
        assert_eq!(freed.take(), [Freed::Device(1), Freed::Pinned(1)]);
        recordings.add();
        free(Freed::Device(2));
        recordings.add();
        free(Freed::Pinned(3));
        remove();
        free(Freed::Device(4));
        assert_eq!(freed.take(), []);
        remove();
        assert_eq!(freed.take(), [Freed::Device(2), Freed::Pinned(3), Freed::Device(4)]);
        free(Freed::Pinned(5));
        assert_eq!(freed.take(), [Freed::Pinned(5)]);
    }
}
