//! What a device can do, as one value. Which paths it takes follows from this and from [`DeviceOptions`], never from a
//! card's name.

use gpu_kernels::decode;

use super::{DeviceOptions, Level};
use crate::Error;
use crate::tuning::Tuning;

/// What a device can do with the kernels that are loaded for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capabilities {
    /// The level of those kernels.
    pub level: Level,
    /// Bulk copies to shared memory, with the barriers that count their bytes.
    pub bulk_copies: bool,
    /// Clusters of CTAs that reach each other's shared memory.
    pub clusters: bool,
    /// GEMMs of warpgroups, from shared memory.
    pub wgmma: bool,
    /// Launches that begin before those ahead have ended, and wait for them themselves.
    pub early_launches: bool,
    /// Bytes of shared memory that a CTA can have.
    pub shared_bytes: u32,
    /// Bytes of L2.
    pub l2_bytes: u32,
    /// SMs.
    pub sms: u32,
    /// Bytes that memory moves, at its clock, while an SM has a cycle, for each SM: how much work a byte leaves time
    /// for. None for the emulator.
    pub bytes_per_cycle: Option<f64>,
}

/// A card, as its driver describes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hardware {
    pub capability: (i32, i32),
    pub shared_bytes: u32,
    pub l2_bytes: u32,
    pub sms: u32,
    pub bytes_per_cycle: f64,
}

impl Capabilities {
    /// Of a card, which `name` is for messages.
    ///
    /// # Errors
    /// It is too old, or does not run the level that is asked for.
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

    /// Of the emulator, which takes after a small H100.
    pub(super) fn emulated(options: &DeviceOptions) -> Self {
        let level = options.level.unwrap_or(Level::Sm90a);
        Self {
            shared_bytes: Self::shared_bytes(cuda_std::emulator::MAX_SHARED_BYTES, level, options),
            l2_bytes: 50 << 20,
            // Enough for grids of more than one CTA.
            sms: 4,
            bytes_per_cycle: None,
            ..Self::of_level(level)
        }
    }

    /// Shared memory of a CTA, of what there is.
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

    /// What the kernels of a level use; the rest is the card's.
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

    /// Whether the GEMMs and the attention of passes over many rows run on it.
    pub const fn has_gemms(&self) -> bool {
        self.bulk_copies && self.clusters && self.wgmma
    }

    /// Whether a decode step can run in one launch: it streams weights through shared memory by bulk copies.
    pub const fn has_decode_kernel(&self) -> bool {
        self.bulk_copies && self.shared_bytes >= decode::SHORT_SHARED_BYTES
    }

    /// Whether that launch reads packed weights too, and has a kernel of its own for one row: with less shared memory
    /// its ring is short.
    pub const fn has_full_ring(&self) -> bool {
        self.has_decode_kernel() && self.shared_bytes >= decode::SHARED_BYTES
    }

    /// The numbers that are good for it.
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
        // Kernels for one level of 9.0 do not run on the next.
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
