//! Runs a grid on a CPU, lane by lane, and reports mistakes that a GPU would hide.
//!
//! Each lane is a coroutine, and one thread runs the whole launch. The thread switches from one lane to another at
//! shuffles, barriers and atomics. Which lane comes next is drawn from a seed: the same seed gives the same run,
//! another seed another order of lanes, warps and blocks. [`shrink`] makes a failing run as short as it can be, and
//! [`replay`] runs the [`Schedule`] that it found.
//!
//! A launch stops at the first of
//!
//! - a race: two lanes use the same bytes, one writes, and no barrier, no released and acquired atomic, no waited-for
//!   copy orders them, in this run (`clock` and `race`);
//! - an access out of bounds, misaligned, or to bytes that nobody has written (`memory`, `access`);
//! - lanes that should meet and do not: different collectives in one warp, a barrier that some never reach
//!   (`collective`);
//! - an asynchronous copy that is used before it was waited for, or that reads shared memory without the fence of its
//!   proxy (`copies`);
//! - a copy or an arrival into the shared memory of a block of the cluster that has ended, or may not have begun;
//! - warps that ask for more registers than their block can be launched with (`wgmma`);
//! - a deadlock or a livelock, a panic, or a trap (`schedule`).
//!
//! What differs from a GPU: `mma` sums in its own fixed order; approximate functions of [`math`](crate::math) are
//! exact; memory is sequentially consistent, though relying on it is reported as a race; clocks count steps.

mod access;
#[cfg(test)]
mod bookkeeping;
mod clock;
mod collective;
mod copies;
mod e4m3;
mod error;
mod memory;
mod mma;
mod order;
mod race;
mod schedule;
mod shrink;
mod stack;
pub(crate) mod target;
mod tensor;
mod wgmma;
mod world;

use std::rc::Rc;

use crate::Kernel;

pub use error::{Access, EmulatorError, Lane};
pub use memory::{Buffer, Lock, Plain, read, write};
pub use order::{ParseScheduleError, Schedule};
pub use shrink::{Failure, Length, replay, shrink, shrink_if};

/// The most shared memory that a block can have on Hopper, in bytes.
pub const MAX_SHARED_BYTES: u32 = 227 * 1024;

/// How to run a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Lanes in a block: whole warps, and no more than the kernel's block size.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Whether all blocks are resident at once, so that they can wait for each other. Then every lane of the grid has a
    /// stack at the same time: Linux grants a process about 32,000.
    pub cooperative: bool,
    /// The seed from which the order of lanes, warps and blocks is drawn.
    pub seed: u64,
    /// How many times lanes may be resumed in all. Beyond that, the launch counts as a livelock.
    pub steps: u64,
    /// How many times in a row lanes may be resumed that only poll. Beyond that, the launch counts as a livelock.
    pub idle_steps: u64,
    /// The size of a lane's stack, in bytes.
    pub stack_bytes: usize,
    /// A wait to leave out.
    pub missing: Option<MissingWait>,
}

/// A wait that a launch leaves out, as if the kernel lacked it. Tests use it to show that a missing wait is found.
/// Waits are numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingWait {
    /// The phase of this number, among the phases of mbarriers that some lane of the launch has to wait for. No lane
    /// waits for it.
    Phase(u64),
    /// In each lane, the wait of this number among its waits for MMAs of its warpgroup that are under way. The lane
    /// waits for these MMAs only at its next such wait, which is too late.
    Mmas(u64),
}

impl Launch {
    /// A launch of `blocks` blocks of `threads` lanes, in one dimension, without shared memory, with seed 0.
    #[must_use]
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], threads, ..Self::default() }
    }
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            grid: [1; 3],
            threads: 32,
            shared_bytes: 0,
            cooperative: false,
            seed: 0,
            steps: 1 << 40,
            idle_steps: 1 << 20,
            stack_bytes: 128 << 10,
            missing: None,
        }
    }
}

/// What a launch did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// How many times a lane was resumed.
    pub steps: u64,
    /// How many times a lane arrived at a barrier of its block or cluster.
    pub barriers: u64,
    /// Bytes read from global memory.
    pub bytes_loaded: u64,
    /// Bytes written to global memory.
    pub bytes_stored: u64,
    /// Number of atomic accesses.
    pub atomics: u64,
    /// A digest of the order in which lanes ran.
    pub trace: u64,
    /// Whether [a wait that was to be left out](Launch::missing) came up.
    pub left_out: bool,
}

/// The result of [leaving out](leave_out_each) waits one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// For how many waits the emulator noticed that they were missing.
    pub found: usize,
    /// The waits for which it did not: they are not needed in this launch, or their absence does not show under its
    /// seed.
    pub unfound: Vec<MissingWait>,
}

/// Calls `run` for each of these waits, and notes which of them were found to be missing. `run` performs one launch
/// without that wait, and returns the error that was found, or whether [the wait came up](Report::left_out). The search
/// ends at the first wait that did not come up, as there is none of a higher number.
pub fn leave_out_each<E>(
    waits: impl IntoIterator<Item = MissingWait>,
    mut run: impl FnMut(MissingWait) -> Result<bool, E>,
) -> LeftOut {
    let mut all = LeftOut::default();
    for wait in waits {
        match run(wait) {
            Ok(false) => break,
            Ok(true) => all.unfound.push(wait),
            // A race, a use too early, or lanes that wait for ever.
            Err(_) => all.found += 1,
        }
    }
    all
}

/// Runs a grid of kernel `K` to its end.
///
/// # Errors
/// The first mistake that was found; memory is then as the lanes left it.
pub fn launch<K: Kernel>(launch: &Launch, params: K::Params) -> Result<Report, EmulatorError> {
    run::<K>(launch, order::Order::seeded(launch.seed), params).result
}

/// The result of a run and, if it was recorded, its order.
struct Ran {
    result: Result<Report, EmulatorError>,
    schedule: Schedule,
    turns: Vec<world::Turn>,
    moments: Vec<order::Moment>,
    steps: u64,
}

fn run<K: Kernel>(launch: &Launch, order: order::Order, params: K::Params) -> Ran {
    if let Some(reason) = impossible::<K>(launch) {
        let result = Err(EmulatorError::Launch { kernel: K::NAME, reason });
        let schedule = Schedule::default();
        return Ran { result, schedule, turns: Vec::new(), moments: Vec::new(), steps: 0 };
    }
    // SAFETY: whoever made the parameters vouches for them; addresses in them are checked at each access.
    let entry = Rc::new(move || unsafe { K::lane(params) });
    let mut world = world::World::new(K::NAME, *launch, K::CLUSTER, order, entry);
    let result = schedule::run(&mut world);
    let schedule = world.order.take_record();
    let world::World { turns, moments, report, .. } = world;
    Ran { result, schedule, turns, moments, steps: report.steps }
}

fn impossible<K: Kernel>(launch: &Launch) -> Option<String> {
    let Launch { grid, threads, shared_bytes, .. } = *launch;
    let blocks: u64 = grid.iter().map(|n| u64::from(*n)).product();
    if threads == 0 || !threads.is_multiple_of(32) || threads > K::THREADS {
        return Some(format!("blocks of {threads} lanes: whole warps, at most {} lanes", K::THREADS));
    }
    if threads > 1024 {
        return Some(format!("blocks of {threads} lanes: at most 1024"));
    }
    if blocks == 0 || blocks > clock::Name::MAX_BLOCKS {
        return Some(format!("a grid of {blocks} blocks: 1 to {}", clock::Name::MAX_BLOCKS));
    }
    if !grid[0].is_multiple_of(K::CLUSTER) {
        return Some(format!("a grid of {} blocks in x: a multiple of {}, a cluster", grid[0], K::CLUSTER));
    }
    if shared_bytes > MAX_SHARED_BYTES {
        return Some(format!("{shared_bytes} bytes of shared memory: at most {MAX_SHARED_BYTES}"));
    }
    None
}
