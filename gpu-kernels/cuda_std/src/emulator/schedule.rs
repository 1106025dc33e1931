//! The scheduler: which lane runs next is drawn from the seed, or read from a schedule.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

use corosensei::CoroutineResult;

use super::clock::Base;
use super::collective::{self, Warp};
use super::copies::{self, Groups};
use super::error::EmulatorError;
use super::memory::{Allocation, Hold};
use super::order::Order;
use super::stack::LaneStack;
use super::wgmma::Wgmmas;
use super::world::{Block, Entered, Fiber, Lane, Region, SHARED_BASE, State, Turn, World, world};
use super::{Launch, Report};

/// The most clusters that are resident at once, unless the launch is cooperative.
const RESIDENT: usize = 4;
/// The most moments of a recorded run that are kept.
const MOMENTS: usize = 4096;

impl World {
    pub fn new(kernel: &'static str, launch: Launch, cluster: u32, mut order: Order, entry: Rc<dyn Fn()>) -> Self {
        let clusters: u32 = launch.grid.iter().product::<u32>() / cluster;
        // Clusters start from the end of this list.
        let mut waiting: Vec<u32> = (0..clusters).rev().collect();
        for i in (1..waiting.len()).rev() {
            waiting.swap(i, i - order.swap(i));
        }
        let together = if launch.cooperative { clusters } else { clusters.min(1 + order.resident(RESIDENT)) };
        let resident = together * cluster;
        let threads = launch.threads as usize;
        let mut world = Self {
            kernel,
            cluster,
            at_cluster_barrier: vec![Vec::new(); together as usize],
            entry,
            order,
            report: Report::default(),
            blocks: Vec::new(),
            warps: (0..resident as usize * threads / 32).map(|_| Warp::new()).collect(),
            lanes: Vec::with_capacity(resident as usize * threads),
            fibers: (0..resident as usize * threads).map(|_| None).collect(),
            ready: Vec::new(),
            current: 0,
            regions: Vec::new(),
            last_region: 0,
            released: HashMap::new(),
            learned: None,
            flights: Vec::new(),
            waiting,
            phases_awaited: 0,
            error: None,
            idle: 0,
            given_up: 0,
            polls: false,
            last_warp: 0,
            moment: None,
            moments: Vec::new(),
            turns: Vec::new(),
            launch,
        };
        for slot in 0..resident as usize {
            let name = "shared memory".to_string();
            let memory = Arc::new(Allocation::new(launch.shared_bytes as usize, false, name));
            let memory = Hold::write(memory).expect("nobody else knows of it");
            world.blocks.push(Block {
                index: [0; 3],
                linear: 0,
                shared: Region::new(u64::from(SHARED_BASE), memory),
                barriers: Default::default(),
                mbarriers: HashMap::new(),
                engine: 0,
                exited: 0,
                proxied: vec![Vec::new(); threads],
                registers: vec![None; threads / 32],
            });
            let base = Rc::new(Base::new(launch.threads));
            for thread in 0..launch.threads {
                let clock = world.new_clock(0, thread, &base);
                world.lanes.push(Lane {
                    yielder: ptr::null(),
                    state: State::Exited,
                    clock,
                    steps: 0,
                    flights: 0,
                    released: [None, None],
                    seen: Vec::new(),
                    proxied: None,
                    made: None,
                    async_copies: Groups::default(),
                    bulk_stores: Groups::default(),
                    products: Wgmmas::default(),
                });
            }
            debug_assert_eq!(world.lanes.len(), (slot + 1) * threads);
        }
        world
    }

    /// Starts the next cluster in the slots of one that has ended, or does nothing if none is left.
    fn start_cluster(&mut self, slots: Range<usize>) {
        let Some(number) = self.waiting.pop() else { return };
        for (rank, slot) in slots.enumerate() {
            if !self.start_block(slot, number * self.cluster + rank as u32) {
                return;
            }
        }
    }

    /// Starts a block in `slot`. False if there is no memory for it.
    fn start_block(&mut self, slot: usize, linear: u32) -> bool {
        let index = self.block_index(linear);
        let block = &mut self.blocks[slot];
        (block.index, block.linear, block.engine, block.exited) = (index, linear, 0, 0);
        block.mbarriers.clear();
        block.proxied.iter_mut().for_each(Vec::clear);
        block.registers.fill(None);
        block.shared.shadow.clear();
        block.shared.memory.poison();
        let threads = self.threads();
        let base = Rc::new(Base::new(self.launch.threads));
        for warp in &mut self.warps[slot * threads / 32..(slot + 1) * threads / 32] {
            warp.reset();
        }
        for lane in slot * threads..(slot + 1) * threads {
            let stack = match LaneStack::take(self.launch.stack_bytes) {
                Ok(stack) => stack,
                Err(error) => {
                    let reason = format!("no stack for a lane: {error}");
                    self.error = Some(EmulatorError::Launch { kernel: self.kernel, reason });
                    return false;
                }
            };
            let entry = self.entry.clone();
            let fiber = Fiber::with_stack(stack, move |yielder, ()| {
                world().lanes[lane].yielder = yielder;
                entry();
            });
            let clock = self.new_clock(linear, (lane % threads) as u32, &base);
            self.fibers[lane] = Some(fiber);
            let place = &mut self.lanes[lane];
            place.clock = clock;
            (place.steps, place.flights) = (0, 0);
            place.released = [None, None];
            place.seen.clear();
            (place.proxied, place.made) = (None, None);
            place.async_copies = Groups::default();
            place.bulk_stores = Groups::default();
            place.products = Wgmmas::default();
            self.wake(lane);
        }
        true
    }
}

/// Runs the launch to its end, or to its first error.
pub fn run(world: &mut World) -> Result<Report, EmulatorError> {
    let world: *mut World = world;
    let Some(_entered) = Entered::new(world) else {
        // SAFETY: no lane runs.
        let kernel = unsafe { (*world).kernel };
        return Err(EmulatorError::Launch { kernel, reason: "a launch from within a kernel".to_string() });
    };
    // From here on the world is reached only through `world()`, as the lanes reach it.
    let (blocks, cluster) = (self::world().blocks.len(), self::world().cluster as usize);
    for first in (0..blocks).step_by(cluster) {
        self::world().start_cluster(first..first + cluster);
    }
    while self::world().error.is_none() && turn() {}
    let world = self::world();
    let fibers: Vec<Fiber> = world.fibers.iter_mut().filter_map(Option::take).collect();
    // Lanes that did not end are unwound, so that whatever their kernel holds is dropped.
    for mut fiber in fibers {
        fiber.force_unwind();
    }
    let world = self::world();
    match world.error.take() {
        Some(error) => Err(error),
        None => Ok(world.report.clone()),
    }
}

/// One turn: some lanes of one warp run. False when nothing is left to do.
fn turn() -> bool {
    let world = world();
    world.land_chosen();
    if world.ready.is_empty() {
        let count = world.flights.len();
        if count > 0 {
            let chosen = world.order.rng().map_or(0, |rng| rng.below(count));
            world.land(chosen, chosen == 0);
            return true;
        }
        let gave_up = world.give_up();
        if gave_up > 0 {
            world.given_up += gave_up as u64;
            return world.given_up <= world.launch.idle_steps || livelock(world, only_polls(world));
        }
        let left = world.lanes.iter().any(|lane| lane.state != State::Exited);
        if left {
            let lanes = world.describe(0..world.lanes.len());
            world.error = Some(EmulatorError::Deadlock { kernel: world.kernel, lanes });
        }
        return false;
    }
    let first = world.first_lane();
    let warp = first / 32;
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| run_warp(warp, first))) {
        let world = self::world();
        let lane = world.who(world.current);
        let current = world.current;
        world.fibers[current] = None;
        world.error = Some(EmulatorError::Panic { kernel: world.kernel, lane, message: message(&*payload) });
        return false;
    }
    let world = self::world();
    if world.warps[warp].runnable == 0 {
        if let Some(place) = world.ready.iter().position(|&ready| ready as usize == warp) {
            world.ready.swap_remove(place);
        }
        world.warps[warp].listed = false;
    }
    true
}

/// Runs lanes of a warp, `lane` first, until none can run or the order ends the turn.
fn run_warp(warp: usize, mut lane: usize) {
    let world = world();
    world.last_warp = warp;
    loop {
        let world = self::world();
        world.report.steps += 1;
        world.report.trace = (world.report.trace.rotate_left(7) ^ lane as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        world.note_step(lane);
        if world.order.records() {
            world.note_turn(warp);
        }
        world.current = lane;
        world.polls = false;
        let fiber: *mut Option<Fiber> = &mut world.fibers[lane];
        // SAFETY: lanes do not touch the fibers, and no block starts while one runs, so the place stays where it is.
        let running = unsafe { &mut *fiber };
        let result = running.as_mut().expect("a lane that can run has a fiber").resume(());
        let world = self::world();
        world.warps[warp].last = lane as u32 % 32 + u32::from(world.polls);
        if let CoroutineResult::Return(()) = result {
            let ended = world.fibers[lane].take().map(Fiber::into_stack);
            ended.into_iter().for_each(|stack| stack.give(world.launch.stack_bytes));
            finish(world);
        }
        if !limits(world) || world.error.is_some() {
            return;
        }
        match world.next_lane(warp) {
            Some(next) => lane = next,
            None => return,
        }
    }
}

impl World {
    /// Records a step of the warp's lanes, in a run that is recorded.
    fn note_turn(&mut self, warp: usize) {
        if self.moments.len() < MOMENTS {
            self.moments.push(self.moment);
        }
        let (slot, within) = (warp * 32 / self.threads(), (warp * 32 % self.threads() / 32) as u32);
        let number = self.blocks[slot].linear;
        match self.turns.last_mut() {
            Some(Turn::Ran { block, warp, steps }) if (*block, *warp) == (number, within) => *steps += 1,
            _ => self.turns.push(Turn::Ran { block: number, warp: within, steps: 1 }),
        }
    }
}

/// Counts a step against the limits. False if one is reached.
#[inline]
fn limits(world: &mut World) -> bool {
    world.idle = if world.polls { world.idle + 1 } else { 0 };
    if world.idle > world.launch.idle_steps {
        livelock(world, only_polls(world))
    } else if world.report.steps > world.launch.steps {
        livelock(world, format!("not done after {} steps", world.launch.steps))
    } else {
        true
    }
}

fn only_polls(world: &World) -> String {
    format!("for {} steps lanes did nothing but poll", world.launch.idle_steps)
}

/// Ends the launch, and returns false.
#[cold]
fn livelock(world: &mut World, reason: String) -> bool {
    let lanes = world.describe(0..world.lanes.len());
    world.error.get_or_insert(EmulatorError::Livelock { kernel: world.kernel, reason, lanes });
    false
}

/// The current lane returned from the kernel.
fn finish(world: &mut World) {
    let lane = world.who(world.current);
    collective::exit(world);
    let slot = world.slot();
    let unfinished = copies::unfinished(world, slot);
    if let Some((site, what)) = unfinished {
        let what = format!("{what} was started here and never waited for");
        world.error.get_or_insert(EmulatorError::Misuse { kernel: world.kernel, lane, site, what });
        return;
    }
    let slots = world.cluster_of(slot);
    if world.blocks[slots.clone()].iter().all(|block| block.exited == world.launch.threads) {
        world.start_cluster(slots);
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_string())
}
