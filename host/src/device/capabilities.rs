//! What a device can do, as one value. Which paths it takes follows from this and from [`DeviceOptions`], never from a
//! card's name.

use gpu_kernels::decode;

use super::DeviceOptions;
use crate::tuning::Tuning;

/// What a device can do with the kernels that are loaded for it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capabilities {
    /// The level of those kernels: `sm_80`, or `sm_90a`.
    pub level: &'static str,
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
    /// The least compute capability of a card that is of use.
    pub const LEAST: (i32, i32) = (8, 0);

    /// Of a card; none if it is too old.
    pub(super) fn of(hardware: &Hardware, options: &DeviceOptions) -> Option<Self> {
        let Hardware { capability, shared_bytes, l2_bytes, sms, bytes_per_cycle } = *hardware;
        let level = Self::level(capability, options)?;
        let bytes_per_cycle = Some(bytes_per_cycle);
        Some(Self { shared_bytes, l2_bytes, sms, bytes_per_cycle, ..Self::of_level(level) })
    }

    /// Of the emulator, which takes after a small H100.
    pub(super) fn emulated(options: &DeviceOptions) -> Self {
        let level = if options.portable { "sm_80" } else { "sm_90a" };
        Self {
            shared_bytes: cuda_std::emulator::MAX_SHARED_BYTES,
            l2_bytes: 50 << 20,
            // Enough for grids of more than one CTA.
            sms: 4,
            bytes_per_cycle: None,
            ..Self::of_level(level)
        }
    }

    /// The level of kernels for a card of this compute capability. Those of `sm_90a` run on nothing else.
    fn level(capability: (i32, i32), options: &DeviceOptions) -> Option<&'static str> {
        match capability {
            (9, 0) if !options.portable => Some("sm_90a"),
            _ if capability >= Self::LEAST => Some("sm_80"),
            _ => None,
        }
    }

    /// What the kernels of a level use; the rest is the card's.
    fn of_level(level: &'static str) -> Self {
        let has = level == "sm_90a";
        Self {
            level,
            bulk_copies: has,
            clusters: has,
            wgmma: has,
            early_launches: has,
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
        self.bulk_copies && self.shared_bytes >= decode::SHARED_BYTES
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
        let of = |capability, kib, portable| {
            let options = DeviceOptions { portable, ..DeviceOptions::default() };
            let found = Capabilities::of(&card(capability, kib), &options)?;
            Some((found.level, found.has_gemms(), found.has_decode_kernel()))
        };
        let (hopper, other) = (Some(("sm_90a", true, true)), Some(("sm_80", false, false)));
        assert_eq!(of((9, 0), 227, false), hopper);
        assert_eq!(of((9, 0), 227, true), other);
        assert_eq!(of((8, 0), 163, false), other);
        // Kernels for one level of 9.0 do not run on the next.
        assert_eq!(of((10, 0), 227, false), other);
        assert_eq!(of((12, 0), 99, false), other);
        assert_eq!(of((7, 5), 64, false), None);
        // The ring of the decode kernel would not fit.
        assert_eq!(of((9, 0), 99, false), Some(("sm_90a", true, false)));
    }

    #[test]
    fn the_emulator_has_what_it_emulates() {
        let all = Capabilities::emulated(&DeviceOptions::default());
        assert!(all.has_gemms() && all.has_decode_kernel() && all.early_launches);
        let portable = Capabilities::emulated(&DeviceOptions { portable: true, ..DeviceOptions::default() });
        assert!(!portable.has_gemms() && !portable.has_decode_kernel() && !portable.early_launches);
    }
}
