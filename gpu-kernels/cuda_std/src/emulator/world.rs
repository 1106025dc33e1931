//! The state of one launch: its lanes, warps and resident blocks, and the errors they stop with.

use std::cell::Cell;
use std::collections::HashMap;
use std::panic::Location;
use std::ptr;
use std::rc::Rc;

use corosensei::{Coroutine, Yielder};

use super::clock::{Base, Clock, Counts, Name};
use super::collective::{Collective, NamedBarrier, PLACES, Warp};
use super::copies::{Flight, Groups, Mbarrier};
use super::error::{self, Access, EmulatorError};
use super::memory::Hold;
use super::order::{Moment, Order};
use super::race::{Mode, Past, Shadow};
use super::stack::LaneStack;
use super::wgmma::Wgmmas;
use super::{Launch, Report};

pub type Site = &'static Location<'static>;
pub type Fiber = Coroutine<(), (), (), LaneStack>;

/// The start of dynamic shared memory: not 0, so that a kernel that takes addresses for offsets is noticed.
pub const SHARED_BASE: u32 = 1024;

thread_local! {
    /// The launch that runs on this thread, if any.
    static CURRENT: Cell<*mut World> = const { Cell::new(ptr::null_mut()) };
}

/// What a lane is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It can run.
    Ready,
    /// It polls memory, and found nothing new.
    Polling(Site),
    /// It waits for its warp.
    Collective(Collective, Site),
    /// It waits at a barrier of the block.
    Barrier(u32, Site),
    /// It waits at the barrier of the cluster.
    Cluster(Site),
    /// It waits for a phase of an mbarrier.
    Phase {
        barrier: u32,
        parity: u32,
        /// Whether it gives up some time.
        tries: bool,
        site: Site,
    },
    Exited,
}

pub struct Lane {
    pub yielder: *const Yielder<(), ()>,
    pub state: State,
    pub clock: Clock,
    /// Steps that it has made.
    pub steps: u64,
    /// How many copies that complete on an mbarrier it has started.
    pub flights: u32,
    /// What it knew at its last fence of block scope, and of device scope or wider. A later relaxed atomic publishes
    /// this.
    pub released: [Option<Clock>; 2],
    /// What its relaxed atomics have seen and its next fence learns; whether that came at device scope, and whether
    /// from this block.
    pub seen: Vec<(Rc<Counts>, bool, bool)>,
    /// What it knew at its last `fence_proxy_async`.
    pub proxied: Option<Clock>,
    /// What it knew when it last fenced the mbarriers that it had made.
    pub made: Option<Clock>,
    pub async_copies: Groups,
    pub bulk_stores: Groups,
    pub products: Wgmmas,
}

/// A resident block.
pub struct Block {
    pub index: [u32; 3],
    pub linear: u32,
    pub shared: Region,
    pub barriers: [NamedBarrier; PLACES],
    pub mbarriers: HashMap<u32, Mbarrier>,
    /// Epoch of the block's TMA.
    pub engine: u32,
    pub exited: u32,
    /// For each lane, the epochs that ended with a `fence_proxy_async` of its own, in ascending order.
    pub proxied: Vec<Vec<u32>>,
    /// For each warp, the registers for each lane that it has asked for.
    pub registers: Vec<Option<u32>>,
}

/// Memory that this launch uses, with its shadow.
pub struct Region {
    /// The device's address of the first byte.
    pub start: u64,
    /// Held until the launch ends.
    pub memory: Hold,
    pub shadow: Shadow,
}

impl Region {
    pub fn new(start: u64, memory: Hold) -> Self {
        let shadow = Shadow::new(memory.len());
        Self { start, memory, shadow }
    }
}

/// A part of a run: a warp's lanes took some steps, or a copy landed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    Ran {
        /// The block, by its number.
        block: u32,
        warp: u32,
        steps: u64,
    },
    Landed {
        /// Where the copy was started.
        site: Site,
    },
}

/// What has been released through one atomic location.
pub struct Released {
    pub counts: Rc<Counts>,
    /// The block that released here; none if several did.
    pub block: Option<u32>,
    /// Whether all releases were at device scope or wider.
    pub device: bool,
}

pub struct World {
    pub kernel: &'static str,
    pub launch: Launch,
    /// Blocks in a cluster. They are neighbours among the resident blocks, too.
    pub cluster: u32,
    /// For each resident cluster, the lanes that wait at its barrier, and whether each publishes only the mbarriers
    /// that it made.
    pub at_cluster_barrier: Vec<Vec<(usize, bool)>>,
    pub entry: Rc<dyn Fn()>,
    pub order: Order,
    pub report: Report,
    /// Resident blocks. Each has `threads / 32` of the warps and `threads` of the lanes.
    pub blocks: Vec<Block>,
    pub warps: Vec<Warp>,
    pub lanes: Vec<Lane>,
    /// The coroutines of the lanes that have not ended.
    pub fibers: Vec<Option<Fiber>>,
    /// The warps with a lane that can run.
    pub ready: Vec<u32>,
    /// The lane that runs.
    pub current: usize,
    pub regions: Vec<Region>,
    pub last_region: usize,
    pub released: HashMap<u64, Released>,
    /// What a lane knew, what it learned then, and what it knew afterwards: of the lane that learned last.
    pub learned: Option<(Rc<Base>, Rc<Counts>, Rc<Base>)>,
    pub flights: Vec<Flight>,
    /// Clusters still to start, the next one last.
    pub waiting: Vec<u32>,
    /// How many phases of mbarriers some lane has had to wait for. They are counted only if one is to be left out.
    pub phases_awaited: u64,
    pub error: Option<EmulatorError>,
    /// Steps since a lane last made progress.
    pub idle: u64,
    /// How often a lane has given up waiting since then.
    pub given_up: u64,
    /// Whether the lane that runs only polls.
    pub polls: bool,
    /// The warp that ran last.
    pub last_warp: usize,
    pub moment: Moment,
    /// The first moments, while the order is recorded.
    pub moments: Vec<Moment>,
    /// What happened, while the order is recorded.
    pub turns: Vec<Turn>,
}

/// Makes a launch the thread's current one, until dropped.
pub struct Entered;

impl Entered {
    pub fn new(world: *mut World) -> Option<Self> {
        CURRENT.with(|current| {
            let free = current.get().is_null();
            if free {
                current.set(world);
            }
            free.then_some(Self)
        })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.with(|current| current.set(ptr::null_mut()));
    }
}

/// The running launch.
///
/// The reference must not be held over [`suspend`]: the lanes that run meanwhile take references of their own.
#[inline]
pub fn world() -> &'static mut World {
    let world = CURRENT.with(Cell::get);
    assert!(!world.is_null(), "device code runs on the host only under `emulator::launch`");
    // SAFETY: the launch outlives its lanes; one thread runs it, and its parts never hold a reference while another
    // runs.
    unsafe { &mut *world }
}

/// Lets others run until the scheduler chooses this lane again.
#[inline]
pub fn suspend() {
    let world = world();
    let yielder = world.lanes[world.current].yielder;
    // SAFETY: the yielder lives on the stack of this very lane.
    unsafe { (*yielder).suspend(()) };
}

/// Stops the launch. The lane never runs again.
#[cold]
pub fn fail(error: EmulatorError) -> ! {
    let world = world();
    world.error.get_or_insert(error);
    loop {
        suspend();
    }
}

/// Stops the launch because of what the current lane does at `site`.
#[cold]
pub fn misuse(site: Site, what: String) -> ! {
    let world = world();
    fail(EmulatorError::Misuse { kernel: world.kernel, lane: world.who(world.current), site, what })
}

impl World {
    #[inline]
    pub fn threads(&self) -> usize {
        self.launch.threads as usize
    }

    #[inline]
    pub fn lane(&mut self) -> &mut Lane {
        &mut self.lanes[self.current]
    }

    /// The slot of the current lane's block.
    #[inline]
    pub fn slot(&self) -> usize {
        self.current / self.threads()
    }

    #[inline]
    pub fn block(&mut self) -> &mut Block {
        let slot = self.slot();
        &mut self.blocks[slot]
    }

    /// The slots of the blocks of a cluster, from the slot of one of them.
    pub fn cluster_of(&self, slot: usize) -> std::ops::Range<usize> {
        let cluster = self.cluster as usize;
        let first = slot / cluster * cluster;
        first..first + cluster
    }

    /// The rank of the current lane's block in its cluster.
    pub fn rank(&self) -> u32 {
        self.slot() as u32 % self.cluster
    }

    /// The slot of the block of this rank in the current lane's cluster, which must not have ended.
    pub fn peer(&self, rank: u32, site: Site) -> usize {
        if rank >= self.cluster {
            misuse(site, format!("block {rank} of a cluster of {}", self.cluster));
        }
        let slot = self.cluster_of(self.slot()).start + rank as usize;
        if self.blocks[slot].exited == self.launch.threads {
            let [x, y, z] = self.blocks[slot].index;
            misuse(site, format!("block ({x}, {y}, {z}) of the cluster has ended, and its shared memory with it"));
        }
        slot
    }

    #[inline]
    pub fn thread(&self) -> u32 {
        (self.current % self.threads()) as u32
    }

    /// The description of a lane, by its index among the resident ones.
    pub fn who(&self, lane: usize) -> error::Lane {
        error::Lane { block: self.blocks[lane / self.threads()].index, thread: (lane % self.threads()) as u32 }
    }

    /// The description of a lane, by its name, whether it is resident or not.
    pub fn named(&self, name: Name) -> error::Lane {
        let thread = if name.slot() == self.launch.threads { error::Lane::TMA } else { name.slot() };
        error::Lane { block: self.block_index(name.block()), thread }
    }

    pub fn block_index(&self, linear: u32) -> [u32; 3] {
        let [x, y, _] = self.launch.grid;
        [linear % x, linear / x % y, linear / x / y]
    }

    /// Makes a waiting lane ready.
    #[inline]
    pub fn wake(&mut self, lane: usize) {
        self.lanes[lane].state = State::Ready;
        let warp = &mut self.warps[lane / 32];
        if warp.runnable == 0 && !warp.listed {
            warp.listed = true;
            self.ready.push((lane / 32) as u32);
        }
        warp.runnable |= 1 << (lane % 32);
    }

    /// Adds `counts` to what a lane knows. Its neighbours often learn the same just before or after it.
    pub fn learn(&mut self, lane: usize, counts: &Rc<Counts>) {
        let clock = &mut self.lanes[lane].clock;
        match &self.learned {
            Some((base, of, then)) if Rc::ptr_eq(base, &clock.base) && Rc::ptr_eq(of, counts) => {
                clock.base = then.clone();
            }
            _ => {
                let base = clock.base.clone();
                clock.learn(counts);
                self.learned = Some((base, counts.clone(), clock.base.clone()));
            }
        }
    }

    /// Something happened that others may have been waiting for.
    #[inline]
    pub fn progress(&mut self) {
        (self.idle, self.given_up) = (0, 0);
    }

    pub fn new_clock(&self, block: u32, thread: u32, base: &Rc<Base>) -> Clock {
        Clock::new(Name::new(block, thread), base.clone())
    }

    /// What lanes are doing, in words. Lanes that do the same are grouped; those that have exited come last.
    pub fn describe(&self, lanes: std::ops::Range<usize>) -> String {
        const SHOWN: usize = 6;
        let mut groups: Vec<(State, Vec<usize>)> = Vec::new();
        let mut exited = Vec::new();
        for lane in lanes {
            match self.lanes[lane].state {
                State::Exited => exited.push(lane),
                state => match groups.iter_mut().find(|group| group.0 == state) {
                    Some(group) => group.1.push(lane),
                    None => groups.push((state, vec![lane])),
                },
            }
        }
        let more = groups.len().saturating_sub(SHOWN);
        let mut parts: Vec<_> = groups
            .iter()
            .take(SHOWN)
            .map(|(state, lanes)| {
                let does = match state {
                    State::Ready => "can run".to_string(),
                    State::Polling(site) => format!("poll memory at {site}"),
                    State::Collective(kind, site) => format!("wait for their warp in {} at {site}", kind.name()),
                    State::Barrier(0, site) => format!("wait at sync_threads at {site}"),
                    State::Barrier(id, site) => format!("wait at named barrier {id} at {site}"),
                    State::Cluster(site) => format!("wait for their cluster at {site}"),
                    State::Phase { barrier, parity, site, .. } => {
                        let offset = barrier.wrapping_sub(SHARED_BASE);
                        format!("wait for parity {parity} of the mbarrier at shared offset {offset} at {site}")
                    }
                    State::Exited => unreachable!("sorted out above"),
                };
                format!("{} {does}", self.list(lanes))
            })
            .collect();
        if more > 0 {
            parts.push(format!("{more} more groups wait elsewhere"));
        }
        if !exited.is_empty() {
            parts.push(format!("{} exited", self.list(&exited)));
        }
        parts.join("; ")
    }

    /// Lanes in words: grouped by block, in ranges.
    fn list(&self, lanes: &[usize]) -> String {
        const SHOWN: usize = 3;
        let mut blocks: Vec<(usize, Vec<(usize, usize)>)> = Vec::new();
        for lane in lanes {
            let (slot, thread) = (lane / self.threads(), lane % self.threads());
            match blocks.last_mut() {
                Some((last, ranges)) if *last == slot => match ranges.last_mut() {
                    Some(range) if range.1 + 1 == thread => range.1 = thread,
                    _ => ranges.push((thread, thread)),
                },
                _ => blocks.push((slot, vec![(thread, thread)])),
            }
        }
        let ranges = |ranges: &[(usize, usize)]| {
            let texts: Vec<_> = ranges
                .iter()
                .map(|(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") })
                .collect();
            texts.join(", ")
        };
        let mut texts: Vec<_> = blocks
            .iter()
            .take(SHOWN)
            .map(|(slot, lanes)| {
                let [x, y, z] = self.blocks[*slot].index;
                format!("lanes {} of block ({x}, {y}, {z})", ranges(lanes))
            })
            .collect();
        if blocks.len() > SHOWN {
            texts.push(format!("{} more blocks", blocks.len() - SHOWN));
        }
        texts.join(" and ")
    }

    /// The error of a race between an earlier access, `past`, and the current lane's access in `mode` at `site`.
    /// `place` says which bytes.
    #[cold]
    pub fn race(&self, past: &Past, mode: Mode, site: Site, place: String) -> EmulatorError {
        let first = Access { lane: self.named(past.name), what: past.mode.verb(), site: past.site };
        let second = Access { lane: self.who(self.current), what: mode.verb(), site };
        EmulatorError::Race { kernel: self.kernel, place, first: Box::new(first), second: Box::new(second) }
    }
}
