//! What a device can do. The paths that it takes follow from this and from [`DeviceOptions`], never from a card's name.

use gpu_kernels::decode;

use super::{DeviceOptions, Level};
use crate::Error;
use crate::tuning::Tuning;

/// What a device can do with the kernels that are loaded for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capabilities {
    /// The level of the loaded kernels.
    pub level: Level,
    /// Whether there are bulk copies to shared memory, with barriers that count their bytes.
    pub bulk_copies: bool,
    /// Whether CTAs in a cluster can reach each other's shared memory.
    pub clusters: bool,
    /// Whether there is `wgmma`: a warpgroup's MMAs on operands in shared memory.
    pub wgmma: bool,
    /// Whether a launch can begin before the launches ahead of it have ended, and wait for them in the kernel.
    pub early_launches: bool,
    /// Bytes of shared memory that a CTA can have at most.
    pub shared_bytes: u32,
    /// Bytes of the L2 cache.
    pub l2_bytes: u32,
    /// Number of SMs.
    pub sms: u32,
    /// Memory bandwidth for each SM, in bytes per SM clock cycle. It tells how much computation fits in the time that a
    /// byte takes. None for the emulator.
    pub bytes_per_cycle: Option<f64>,
}

/// A card's properties, as the driver states them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hardware {
    pub capability: (i32, i32),
    pub shared_bytes: u32,
    pub l2_bytes: u32,
    pub sms: u32,
    pub bytes_per_cycle: f64,
}

impl Capabilities {
    /// The capabilities of a card. `name` is for error messages.
    ///
    /// # Errors
    /// The card is too old, or does not run the level that was asked for.
    pub(super) fn of(name: &str, hardware: &Hardware, options: &DeviceOptions) -> Result<Self, Error> {
        let Hardware { capability, shared_bytes, l2_bytes, sms, bytes_per_cycle } = *hardware;
        let level = Self::level(capability, options).map_err(|why| {
            let (major, minor) = capability;
            Error::NoCuda { reason: format!("{name} has compute capability {major}.{minor}, {why}") }
        })?;
        let bytes_per_cycle = Some(bytes_per_cycle);
        let shared_bytes = Self::shared_bytes(shared_bytes, level, options);
        Ok(Self { shared_bytes, l2_bytes, sms, bytes_per_cycle, ..Self::of_level(level) })
    }

    /// The capabilities of the emulator, which resemble those of a small H100.
    pub(super) fn emulated(options: &DeviceOptions) -> Self {
        let level = options.level.unwrap_or(Level::Sm90a);
        Self {
            shared_bytes: Self::shared_bytes(cuda_std::emulator::MAX_SHARED_BYTES, level, options),
            l2_bytes: 50 << 20,
            // By default enough for grids of several CTAs.
            sms: options.sms.unwrap_or(4).max(1),
            bytes_per_cycle: None,
            ..Self::of_level(level)
        }
    }

    /// The shared memory that a CTA may use, of the `most` that there is.
    fn shared_bytes(most: u32, level: Level, options: &DeviceOptions) -> u32 {
        options.shared_bytes.filter(|_| level < Level::Sm90a).map_or(most, |bytes| bytes.min(most))
    }

    /// The level of kernels for a card of this compute capability, or why there is none.
    fn level(capability: (i32, i32), options: &DeviceOptions) -> Result<Level, String> {
        let runs = |level: &Level| level.runs_on(capability);
        let best = Level::ALL.into_iter().rfind(runs).ok_or("and 8.0 is the least that will do")?;
        let level = options.level.unwrap_or(best);
        if runs(&level) { Ok(level) } else { Err(format!("and runs no kernels of {level}: its own are of {best}")) }
    }

    /// The features that a level's kernels use. What depends on the card is left zero.
    fn of_level(level: Level) -> Self {
        let from_90 = level >= Level::Sm90;
        Self {
            level,
            bulk_copies: from_90,
            clusters: from_90,
            wgmma: level == Level::Sm90a,
            early_launches: from_90,
            shared_bytes: 0,
            l2_bytes: 0,
            sms: 0,
            bytes_per_cycle: None,
        }
    }

    /// Whether the GEMMs and the attention of passes over many rows run on this device. Their clusters have two CTAs or
    /// more, each with an SM of its own.
    pub const fn has_gemms(&self) -> bool {
        self.bulk_copies && self.clusters && self.wgmma && self.sms > 1
    }

    /// Whether a decode step can run in one launch. This needs bulk copies, which stream weights through shared memory.
    pub const fn has_decode_kernel(&self) -> bool {
        self.bulk_copies && self.shared_bytes >= decode::SHORT_SHARED_BYTES
    }

    /// Whether the decode kernel has its full ring. Only then does it read packed weights and have a variant of its own
    /// for one row.
    pub const fn has_full_ring(&self) -> bool {
        self.has_decode_kernel() && self.shared_bytes >= decode::SHARED_BYTES
    }

    /// The tuning parameters for this device.
    pub fn tuning(&self) -> &'static Tuning {
        Tuning::of(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(capability: (i32, i32), shared_kib: u32) -> Hardware {
        Hardware { capability, shared_bytes: shared_kib << 10, l2_bytes: 50 << 20, sms: 132, bytes_per_cycle: 12.8 }
    }

    #[test]
    fn paths_follow_from_what_a_card_has() {
        let of = |capability, kib, level| {
            let options = DeviceOptions { level, ..DeviceOptions::default() };
            let found = Capabilities::of("a card", &card(capability, kib), &options).map_err(|e| e.to_string())?;
            Ok::<_, String>((found.level, found.has_gemms(), found.has_decode_kernel(), found.has_full_ring()))
        };
        let hopper = Ok((Level::Sm90a, true, true, true));
        let after = Ok((Level::Sm90, false, true, true));
        let before = Ok((Level::Sm80, false, false, false));
        assert_eq!(of((9, 0), 227, None), hopper);
        assert_eq!(of((9, 0), 227, Some(Level::Sm90)), after);
        assert_eq!(of((9, 0), 227, Some(Level::Sm80)), before);
        assert_eq!(of((8, 0), 163, None), before);
        // Kernels of level `sm_90a` run only on compute capability 9.0.
        assert_eq!(of((10, 0), 227, None), after);
        assert!(of((10, 0), 227, Some(Level::Sm90a)).unwrap_err().contains("no kernels of sm_90a"));
        assert!(of((8, 9), 99, Some(Level::Sm90)).unwrap_err().contains("8.9"));
        assert!(of((7, 5), 64, None).unwrap_err().contains("8.0 is the least"));
        // Only the short ring of the decode kernel fits.
        assert_eq!(of((12, 0), 99, None), Ok((Level::Sm90, false, true, false)));
        assert_eq!(of((12, 1), 98, None), Ok((Level::Sm90, false, false, false)));
    }

    #[test]
    fn the_emulator_has_what_it_emulates() {
        let all = Capabilities::emulated(&DeviceOptions::default());
        assert!(all.has_gemms() && all.has_decode_kernel() && all.early_launches);
        let of = |level| Capabilities::emulated(&DeviceOptions { level: Some(level), ..DeviceOptions::default() });
        let (first, second) = (of(Level::Sm80), of(Level::Sm90));
        assert!(!first.has_gemms() && !first.has_decode_kernel() && !first.early_launches);
        assert!(!second.has_gemms() && second.has_full_ring() && second.early_launches);
        let of = |level| {
            let options =
                DeviceOptions { level: Some(level), shared_bytes: Some(99 << 10), ..DeviceOptions::default() };
            Capabilities::emulated(&options)
        };
        assert!(of(Level::Sm90).has_decode_kernel() && !of(Level::Sm90).has_full_ring());
        assert!(of(Level::Sm90a).has_full_ring());
    }
}
