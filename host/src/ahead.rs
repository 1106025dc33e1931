//! Opens devices on other threads. Starting the driver and loading kernels takes as long as reading a tokenizer, and
//! neither needs the other, so the two can overlap.

use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;

use crate::device::{Device, DeviceOptions};
use crate::{DeviceChoice, Error};

type Opened = Result<Option<Device>, Error>;

/// Devices that are being opened. [`DeviceChoice::open`] fetches them from here.
static BEGUN: Mutex<Vec<Begun>> = Mutex::new(Vec::new());

/// The device, its options, and the thread that opens it.
type Begun = (DeviceChoice, DeviceOptions, JoinHandle<Opened>);

fn begun() -> MutexGuard<'static, Vec<Begun>> {
    BEGUN.lock().unwrap_or_else(|e| e.into_inner())
}

/// A device that is being opened in the background. Dropping this waits for the thread: a program must not end while
/// the driver starts.
#[must_use = "what was not fetched by the time that this is dropped is closed again"]
#[derive(Debug)]
pub struct Opening(DeviceChoice, DeviceOptions);

impl DeviceChoice {
    /// Begins to open the device, on another thread. [`open`](Self::open) with the same options then waits for that
    /// thread and returns its result.
    pub fn open_ahead(self, options: &DeviceOptions) -> Opening {
        if self != Self::Cpu {
            let opened_with = options.clone();
            let thread = std::thread::spawn(move || self.open_now(&opened_with));
            begun().push((self, options.clone(), thread));
        }
        Opening(self, options.clone())
    }
}

/// The result of opening this device with these options, if [`DeviceChoice::open_ahead`] began it. Waits for the
/// thread.
pub(crate) fn fetch(choice: DeviceChoice, options: &DeviceOptions) -> Option<Opened> {
    let thread = {
        let mut begun = begun();
        let at = begun.iter().position(|(begun, with, _)| (begun, with) == (&choice, options))?;
        begun.swap_remove(at).2
    };
    Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

impl Drop for Opening {
    fn drop(&mut self) {
        drop(fetch(self.0, &self.1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_begun_is_what_is_opened() {
        // No other test opens this card.
        let choice = DeviceChoice::Cuda(9999);
        let options = DeviceOptions::default();
        let opening = choice.open_ahead(&options);
        assert_eq!(begun().iter().filter(|(begun, ..)| *begun == choice).count(), 1);
        // Other options than those that it was begun with.
        assert!(fetch(choice, &DeviceOptions { level: Some(crate::device::Level::Sm80), ..options.clone() }).is_none());
        assert!(matches!(choice.open(&options), Err(Error::NoCuda { .. })));
        assert!(!begun().iter().any(|(begun, ..)| *begun == choice));
        // Nothing is left that dropping would wait for.
        drop(opening);
        let unused = choice.open_ahead(&options);
        drop(unused);
        assert!(!begun().iter().any(|(begun, ..)| *begun == choice));
        assert!(matches!(DeviceChoice::Cpu.open_ahead(&options), Opening(DeviceChoice::Cpu, _)));
        assert!(fetch(DeviceChoice::Cpu, &options).is_none());
    }
}
