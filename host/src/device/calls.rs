//! Counts calls of the driver by what they do, for tests of loops that should not wait.

use super::{Device, DeviceKind};

/// Numbers of driver calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Launches of kernels and graphs.
    pub launches: u64,
    /// Copies and fills, whether enqueued or waited for.
    pub copies: u64,
    /// Calls in which the host waits for the device.
    pub waits: u64,
    /// Allocations and frees of memory.
    pub allocations: u64,
}

impl Calls {
    /// The calls since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            launches: self.launches - before.launches,
            copies: self.copies - before.copies,
            waits: self.waits - before.waits,
            allocations: self.allocations - before.allocations,
        }
    }

    /// Adds `count` calls of the driver's entry point `name`.
    fn add(&mut self, name: &str, count: u64) {
        // A copy without "Async" in its name waits, and so does every call that frees memory.
        let waits = name.contains("Synchronize") || name.starts_with("cuMemFree");
        let waits = waits || (name.starts_with("cuMemcpy") && !name.contains("Async"));
        self.waits += if waits { count } else { 0 };
        match name {
            "cuLaunchKernel" | "cuLaunchKernelEx" | "cuLaunchCooperativeKernel" | "cuGraphLaunch" => {
                self.launches += count
            }
            _ if name.starts_with("cuMemcpy") || name.starts_with("cuMemset") => self.copies += count,
            _ if name.starts_with("cuMemAlloc")
                || name.starts_with("cuMemFree")
                || name.starts_with("cuMemHostAlloc")
                || name.starts_with("cuMemHostRegister") =>
            {
                self.allocations += count;
            }
            _ => {}
        }
    }
}

impl Device {
    /// The calls so far. On a card, these are the calls of the whole program since [`count_calls`](Self::count_calls).
    pub fn calls(&self) -> Calls {
        match &*self.0 {
            DeviceKind::Cuda(_) => {
                let mut calls = Calls::default();
                driver_link::calls().for_each(|(name, count)| calls.add(name, count));
                calls
            }
            DeviceKind::Emulator(emulator) => emulator.calls(),
        }
    }

    /// Begins to count calls of the driver. The emulator always counts.
    pub fn count_calls(&self) {
        if let DeviceKind::Cuda(_) = &*self.0 {
            driver_link::count_calls();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Calls;

    #[test]
    fn entry_points_are_told_apart() {
        let mut calls = Calls::default();
        for name in
            ["cuLaunchKernel", "cuMemcpyDtoH_v2", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize", "cuMemAlloc_v2"]
        {
            assert!(driver_link::calls().any(|(known, _)| known == name), "{name}");
            calls.add(name, 1);
        }
        calls.add("cuMemFree_v2", 1);
        calls.add("cuStreamQuery", 1);
        assert_eq!(calls, Calls { launches: 1, copies: 2, waits: 3, allocations: 2 });
    }
}
