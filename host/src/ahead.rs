//! Devices that are opened while something else is done. To start the driver and load kernels takes as long as to read a
//! tokenizer, and neither needs the other.

use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;

use crate::device::Device;
use crate::{DeviceChoice, Error};

type Opened = Result<Option<Device>, Error>;

/// What is being opened, for [`DeviceChoice::open`] to fetch.
static BEGUN: Mutex<Vec<(DeviceChoice, JoinHandle<Opened>)>> = Mutex::new(Vec::new());

fn begun() -> MutexGuard<'static, Vec<(DeviceChoice, JoinHandle<Opened>)>> {
    BEGUN.lock().unwrap_or_else(|e| e.into_inner())
}

/// A device that is being opened. Dropped, it waits for that: a program must not end while the driver starts.
#[must_use = "what was not fetched by the time that this is dropped is closed again"]
#[derive(Debug)]
pub struct Opening(DeviceChoice);

impl DeviceChoice {
    /// Begins to open the device, on another thread. [`open`](Self::open) then waits for it, and has its outcome.
    pub fn open_ahead(self) -> Opening {
        if self != Self::Cpu {
            begun().push((self, std::thread::spawn(move || self.open_now())));
        }
        Opening(self)
    }
}

/// The device of this choice, if it was begun.
pub(crate) fn fetch(choice: DeviceChoice) -> Option<Opened> {
    let thread = {
        let mut begun = begun();
        let at = begun.iter().position(|(begun, _)| *begun == choice)?;
        begun.swap_remove(at).1
    };
    Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

impl Drop for Opening {
    fn drop(&mut self) {
        drop(fetch(self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_begun_is_what_is_opened() {
        // No other test opens this card.
        let choice = DeviceChoice::Cuda(9999);
        let opening = choice.open_ahead();
        assert_eq!(begun().iter().filter(|(begun, _)| *begun == choice).count(), 1);
        assert!(matches!(choice.open(), Err(Error::NoCuda { .. })));
        assert!(!begun().iter().any(|(begun, _)| *begun == choice));
        // Nothing is left to wait for.
        drop(opening);
        let unused = choice.open_ahead();
        drop(unused);
        assert!(!begun().iter().any(|(begun, _)| *begun == choice));
        assert!(matches!(DeviceChoice::Cpu.open_ahead(), Opening(DeviceChoice::Cpu)));
        assert!(fetch(DeviceChoice::Cpu).is_none());
    }
}
