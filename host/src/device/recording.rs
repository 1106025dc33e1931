//! What a queue must not do while its work is recorded, and what it keeps for as long as that can be launched again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::{Device, DeviceKind};
use crate::Error;

/// Of one queue.
#[derive(Default)]
pub(super) struct Recording {
    under_way: AtomicBool,
    deferred: Mutex<DeferredFrees>,
}

/// Memory that is freed later, since recorded work may still use it.
#[derive(Default)]
struct DeferredFrees {
    /// Recordings that are under way or can be launched.
    recordings: usize,
    /// Memory that was given back since.
    addresses: Vec<u64>,
}

/// Recording, until it is dropped.
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

    /// Begins: from now on the queue does nothing that cannot be recorded.
    ///
    /// # Errors
    /// [`Error::Recording`], if it has begun.
    pub(super) fn begin(&self) -> Result<UnderWay<'_>, Error> {
        if self.under_way.swap(true, Ordering::AcqRel) {
            return Err(Error::Recording { doing: "another recording" });
        }
        Ok(UnderWay(self))
    }

    /// From now on memory is kept that is given back.
    pub(super) fn keep(&self) {
        self.deferred().recordings += 1;
    }

    /// Takes memory that is given back: true if it is kept.
    pub(super) fn keeps(&self, address: u64) -> bool {
        let mut deferred = self.deferred();
        let keeps = deferred.recordings > 0;
        if keeps {
            deferred.addresses.push(address);
        }
        keeps
    }

    /// What was recorded last, or could not be, is never launched again. Returns the memory that nobody needs then.
    pub(super) fn let_go(&self) -> Vec<u64> {
        let mut deferred = self.deferred();
        deferred.recordings -= 1;
        if deferred.recordings == 0 { std::mem::take(&mut deferred.addresses) } else { Vec::new() }
    }
}

impl Device {
    /// Refuses what cannot be recorded, on a queue whose work is.
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

    /// Launches work of a graph.
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
        // Its numbers would be read when the graph is launched.
        refused(launched(&device, || buffer.write(0, &[1, 2])));
        refused(launched(&device, || buffer.read(0, &mut out)));
        refused(launched(&device, || device.zeroed::<u32>(4).map(drop)));
        refused(launched(&device, || device.pinned::<u32>(4).map(drop)));
        refused(launched(&device, || device.mapped(4).map(drop)));
        refused(launched(&device, || device.synchronize()));
        refused(launched(&device, || launched(&device, || Ok(()))));
        // It has ended.
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
