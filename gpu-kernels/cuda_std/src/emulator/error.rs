//! Errors of an emulated launch.

use std::fmt;
use std::panic::Location;

/// A lane of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The index of its block in the grid.
    pub block: [u32; 3],
    /// Its index in the block, or [`TMA`](Self::TMA).
    pub thread: u32,
}

impl Lane {
    /// The index that stands for the block's TMA. Copies that have landed count as its accesses.
    pub const TMA: u32 = u32::MAX;
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        if self.thread == Self::TMA {
            return write!(f, "TMA of block ({x}, {y}, {z})");
        }
        write!(f, "lane {} of block ({x}, {y}, {z})", self.thread)
    }
}

/// One side of a race.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The lane that made the access.
    pub lane: Lane,
    /// What the lane did: "read", "wrote", "atomically wrote" and so on.
    pub what: &'static str,
    /// Where in the source.
    pub site: &'static Location<'static>,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} it at {}", self.lane, self.what, self.site)
    }
}

/// Why an emulated launch stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EmulatorError {
    /// The launch itself is impossible.
    #[error("kernel `{kernel}` cannot be launched: {reason}")]
    Launch {
        /// The kernel.
        kernel: &'static str,
        /// Why not.
        reason: String,
    },
    /// Two lanes used the same bytes, at least one wrote, and nothing orders them.
    #[error("kernel `{kernel}`: race on {place}: {first}; {second}; nothing orders the two")]
    Race {
        /// The kernel.
        kernel: &'static str,
        /// Which bytes.
        place: String,
        /// The access that the emulator ran first.
        first: Box<Access>,
        /// The access that ran into it.
        second: Box<Access>,
    },
    /// An access to memory that is not there, misaligned, not initialised, or in use on another thread; an intrinsic
    /// that is misused; or a trap.
    #[error("kernel `{kernel}`: {lane} at {site}: {what}")]
    Misuse {
        /// The kernel.
        kernel: &'static str,
        /// The lane that made the mistake.
        lane: Lane,
        /// Where in the source.
        site: &'static Location<'static>,
        /// What is wrong, with the address.
        what: String,
    },
    /// Lanes that must meet took different paths.
    #[error("kernel `{kernel}`: lanes of block {block:?} diverged: {lanes}")]
    Divergence {
        /// The kernel.
        kernel: &'static str,
        /// Their block.
        block: [u32; 3],
        /// Which lanes are where.
        lanes: String,
    },
    /// No lane can run, but some have not ended.
    #[error("kernel `{kernel}`: deadlock: {lanes}")]
    Deadlock {
        /// The kernel.
        kernel: &'static str,
        /// Which lanes wait for what.
        lanes: String,
    },
    /// The launch ran for too long, or its lanes only waited in loops.
    #[error("kernel `{kernel}`: livelock: {reason}: {lanes}")]
    Livelock {
        /// The kernel.
        kernel: &'static str,
        /// Which limit it ran into.
        reason: String,
        /// What the lanes are doing.
        lanes: String,
    },
    /// A panic in the kernel.
    #[error("kernel `{kernel}`: {lane} panicked: {message}")]
    Panic {
        /// The kernel.
        kernel: &'static str,
        /// The lane that panicked.
        lane: Lane,
        /// The panic's message.
        message: String,
    },
}
