//! Recording of a queue's work: refuses what must not happen meanwhile, and keeps memory while the work can be launched
//! again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Device, DeviceKind};
use crate::Error;

/// The recordings of one queue.
#[derive(Default)]
pub(super) struct Recording {
    under_way: AtomicBool,
    deferred: Mutex<DeferredFrees>,
}

/// Memory that is freed later, because recorded work may still use it.
#[derive(Default)]
struct DeferredFrees {
    /// Recordings that are under way or whose graph can be launched.
    recordings: usize,
    /// Memory that was freed since the first of them began.
    addresses: Vec<u64>,
}

/// A recording that is under way. Dropping this ends it.
pub(super) struct UnderWay<'a>(&'a Recording);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.store(false, Ordering::Release);
    }
}

impl Recording {
    fn deferred(&self) -> MutexGuard<'_, DeferredFrees> {
        self.deferred.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Begins a recording. Until it ends, the queue refuses what cannot be recorded.
    ///
    /// # Errors
    /// [`Error::Recording`], if another recording is under way.
    pub(super) fn begin(&self) -> Result<UnderWay<'_>, Error> {
        if self.under_way.swap(true, Ordering::AcqRel) {
            return Err(Error::Recording { doing: "another recording" });
        }
        Ok(UnderWay(self))
    }

    /// Counts one more recording. While there is any, freed memory is kept.
    pub(super) fn keep(&self) {
        self.deferred().recordings += 1;
    }

    /// Called when memory is freed. Returns whether it is kept for recorded work.
    pub(super) fn keeps(&self, address: u64) -> bool {
        let mut deferred = self.deferred();
        let keeps = deferred.recordings > 0;
        if keeps {
            deferred.addresses.push(address);
        }
        keeps
    }

    /// Counts one recording less: its graph is gone, or could not be made. Returns the memory that can be freed now.
    pub(super) fn let_go(&self) -> Vec<u64> {
        let mut deferred = self.deferred();
        deferred.recordings -= 1;
        if deferred.recordings == 0 { std::mem::take(&mut deferred.addresses) } else { Vec::new() }
    }
}

impl Device {
    /// Refuses an operation that cannot be recorded, if a recording is under way on this queue.
    ///
    /// # Errors
    /// [`Error::Recording`].
    pub(crate) fn refuse_while_recording(&self, doing: &'static str) -> Result<(), Error> {
        if self.recording().under_way.load(Ordering::Acquire) { Err(Error::Recording { doing }) } else { Ok(()) }
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
        refused(launched(&device, || launched(&device, || Ok(()))));
        // The recording has ended.
        buffer.write(0, &[1, 2]).unwrap();
        buffer.read(0, &mut out).unwrap();
        assert_eq!(out, [1, 2, 0, 0]);
    }

    #[test]
    fn memory_is_kept_for_as_long_as_a_recording_may_use_it() {
        let recording = Recording::default();
        assert!(!recording.keeps(1));
        recording.keep();
        assert!(recording.keeps(2));
        recording.keep();
        assert!(recording.keeps(3));
        assert!(recording.let_go().is_empty());
        assert!(recording.keeps(4));
        assert_eq!(recording.let_go(), [2, 3, 4]);
        assert!(!recording.keeps(5));
    }
}
