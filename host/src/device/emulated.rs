//! The emulator of `cuda_std` as a device. Its memory is the host's, and every launch has ended when the call returns.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_std::Kernel;
use cuda_std::emulator::{self, Launch, MissingWait};

use super::recording::Recording;
use super::{Begin, Calls, Capabilities, DeviceOptions, Grid};
use crate::Error;

pub(super) struct Emulator {
    seed: AtomicU64,
    options: DeviceOptions,
    capabilities: Capabilities,
    memory: Mutex<HashMap<u64, emulator::Buffer<u8>>>,
    calls: Mutex<Calls>,
    recording: Recording,
    /// Held by each launch and copy, so that one is done before the next begins.
    turn: Mutex<()>,
    /// The wait that launches of a kernel [leave out](super::Device::leave_out), and whether one of them did.
    missing: Mutex<Option<(&'static str, MissingWait, bool)>>,
}

impl Emulator {
    pub(super) fn new(seed: u64, options: DeviceOptions) -> Self {
        Self {
            seed: AtomicU64::new(seed),
            capabilities: Capabilities::emulated(&options),
            options,
            memory: Mutex::default(),
            calls: Mutex::default(),
            recording: Recording::default(),
            turn: Mutex::default(),
            missing: Mutex::default(),
        }
    }

    pub(super) fn recording(&self) -> &Recording {
        &self.recording
    }

    /// Whoever touches memory holds this.
    fn turn(&self) -> std::sync::MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub(super) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    pub(super) fn options(&self) -> &DeviceOptions {
        &self.options
    }

    fn memory(&self) -> std::sync::MutexGuard<'_, HashMap<u64, emulator::Buffer<u8>>> {
        self.memory.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The calls so far, roughly as a card's driver would have counted them.
    pub(super) fn calls(&self) -> Calls {
        *self.calls.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn count(&self, add: impl FnOnce(&mut Calls)) {
        add(&mut self.calls.lock().unwrap_or_else(|e| e.into_inner()));
    }

    pub(super) fn leave_out(&self, kernel: &'static str, wait: MissingWait) {
        *self.missing.lock().unwrap_or_else(|e| e.into_inner()) = Some((kernel, wait, false));
    }

    pub(super) fn has_left_out(&self) -> bool {
        self.missing.lock().unwrap_or_else(|e| e.into_inner()).is_some_and(|(.., left_out)| left_out)
    }

    /// Nothing to wait for: launches are synchronous.
    pub(super) fn synchronize(&self) {
        self.count(|calls| calls.waits += 1);
    }

    pub(super) fn allocate(&self, bytes: usize) -> u64 {
        self.count(|calls| calls.allocations += 1);
        let buffer = emulator::Buffer::<u8>::zeroed(bytes);
        let address = buffer.ptr().addr();
        self.memory().insert(address, buffer);
        address
    }

    pub(super) fn free(&self, address: u64) {
        self.count(|calls| {
            calls.allocations += 1;
            calls.waits += 1;
        });
        self.memory().remove(&address);
    }

    /// # Panics
    /// If the range is not within a live buffer.
    pub(super) fn write(&self, to: u64, data: &[u8]) {
        self.count(|calls| calls.copies += 1);
        let _turn = self.turn();
        emulator::write(to, data);
    }

    /// # Panics
    /// As for [`write`](Self::write).
    pub(super) fn read(&self, from: u64, out: &mut [u8]) {
        self.count(|calls| {
            calls.copies += 1;
            calls.waits += 1;
        });
        let _turn = self.turn();
        emulator::read(from, out);
    }

    /// Reads one word. Not counted: on a card, the host reads mapped memory without the driver.
    ///
    /// # Panics
    /// As for [`write`](Self::write).
    pub(super) fn load(&self, from: u64) -> u32 {
        let _turn = self.turn();
        let mut word = [0; 4];
        emulator::read(from, &mut word);
        u32::from_le_bytes(word)
    }

    /// Copies `bytes` bytes from one address to another.
    ///
    /// # Panics
    /// As for [`write`](Self::write), of either range.
    pub(super) fn copy(&self, to: u64, from: u64, bytes: usize) {
        let _turn = self.turn();
        let mut copied = vec![0; bytes];
        emulator::read(from, &mut copied);
        emulator::write(to, &copied);
    }

    /// # Safety
    /// As for [`super::Device::launch`]; what the emulator can check, it checks.
    pub(super) unsafe fn launch<K: Kernel>(
        &self,
        grid: Grid,
        shared_bytes: u32,
        begin: Begin,
        params: K::Params,
    ) -> Result<(), Error> {
        self.count(|calls| calls.launches += 1);
        // Each launch gets its own schedule.
        let seed = self.seed.fetch_add(1, Ordering::Relaxed);
        let launch = Launch {
            grid: [grid.0, grid.1, grid.2],
            threads: K::THREADS,
            shared_bytes,
            cooperative: matches!(begin, Begin::Together | Begin::Early),
            seed,
            ..Launch::default()
        };
        let _turn = self.turn();
        let mut missing = self.missing.lock().unwrap_or_else(|e| e.into_inner());
        let missing = missing.as_mut().filter(|(kernel, ..)| *kernel == K::NAME);
        let launch = Launch { missing: missing.as_ref().map(|(_, wait, _)| *wait), ..launch };
        let report = emulator::launch::<K>(&launch, params)
            .map_err(|error| Error::Emulator(format!("{error} (the launch's seed: {seed})")))?;
        if let Some((.., left_out)) = missing {
            *left_out |= report.left_out;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use cuda_std::GlobalMut;
    use gpu_kernels::step::{PlanPrompt, Rows, SequenceState, plan_prompt};

    use super::*;
    use crate::device::Device;

    #[test]
    fn an_error_tells_the_seed_with_which_the_launch_can_be_repeated() {
        let device = Device::emulator(40);
        let state = SequenceState { history: GlobalMut::default(), words: GlobalMut::default() };
        let params = PlanPrompt { rows: Rows::default(), state, start: 0, count: 1 };
        for seed in [40, 41] {
            // SAFETY: the emulator reports what the kernel does with null pointers.
            let error = unsafe { device.launch::<plan_prompt>(1, 0, params) }.unwrap_err();
            let launch = Launch { seed, ..Launch::new(1, plan_prompt::THREADS) };
            let again = emulator::launch::<plan_prompt>(&launch, params).unwrap_err();
            assert_eq!(error.to_string(), format!("under the emulator, {again} (the launch's seed: {seed})"));
        }
    }
}
