//! The scheduler: which lane runs next is drawn from the seed.

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
use super::memory::Allocation;
use super::stack::LaneStack;
use super::wgmma::Products;
use super::world::{Block, Entered, Fiber, Lane, Region, Rng, SHARED_BASE, State, World, world};
use super::{Launch, Report};

/// Of the chances below, one in how many.
const LEAVE_WARP: u64 = 16;
const COMPLETE_COPY: u64 = 4;
/// Without a cooperative launch, at most so many clusters of blocks are resident at once.
const RESIDENT: u64 = 4;

impl World {
    pub fn new(kernel: &'static str, launch: Launch, cluster: u32, entry: Rc<dyn Fn()>) -> Self {
        let mut rng = Rng(launch.seed);
        let clusters: u32 = launch.grid.iter().product::<u32>() / cluster;
        let mut waiting: Vec<u32> = (0..clusters).collect();
        for i in (1..waiting.len()).rev() {
            waiting.swap(i, rng.below(i + 1));
        }
        let together =
            if launch.cooperative { clusters } else { clusters.min(1 + rng.below(RESIDENT as usize) as u32) };
        let resident = together * cluster;
        let threads = launch.threads as usize;
        let mut world = Self {
            kernel,
            cluster,
            meeting: vec![Vec::new(); together as usize],
            entry,
            rng,
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
            flights: Vec::new(),
            waiting,
            error: None,
            idle: 0,
            polls: false,
            launch,
        };
        for slot in 0..resident as usize {
            let name = "shared memory".to_string();
            let memory = Arc::new(Allocation::new(launch.shared_bytes as usize, false, name));
            world.blocks.push(Block {
                index: [0; 3],
                linear: 0,
                shared: Region::new(u64::from(SHARED_BASE), memory),
                barriers: Default::default(),
                mbarriers: HashMap::new(),
                engine: 0,
                exited: 0,
                proxied: vec![0; threads],
                registers: vec![None; threads / 32],
            });
            let base = Rc::new(Base::new(launch.threads));
            for thread in 0..launch.threads {
                let clock = world.new_clock(0, thread, &base);
                world.lanes.push(Lane {
                    yielder: ptr::null(),
                    state: State::Exited,
                    clock,
                    released: [None, None],
                    seen: Vec::new(),
                    proxied: None,
                    made: None,
                    async_copies: Groups::default(),
                    bulk_stores: Groups::default(),
                    products: Products::default(),
                });
            }
            debug_assert_eq!(world.lanes.len(), (slot + 1) * threads);
        }
        world
    }

    /// Starts the next cluster in the place of one, or does nothing if none is left.
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
        block.proxied.fill(0);
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
            place.released = [None, None];
            place.seen.clear();
            (place.proxied, place.made) = (None, None);
            place.async_copies = Groups::default();
            place.bulk_stores = Groups::default();
            place.products = Products::default();
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

/// One turn: some lanes of one warp. False when nothing is left to do.
fn turn() -> bool {
    let world = world();
    let draw = world.rng.next();
    if world.ready.is_empty() {
        if world.complete_flight() {
            return true;
        }
        let left = world.lanes.iter().any(|lane| lane.state != State::Exited);
        if left {
            let lanes = world.describe(0..world.lanes.len());
            world.error = Some(EmulatorError::Deadlock { kernel: world.kernel, lanes });
        }
        return false;
    }
    if !world.flights.is_empty() && draw.is_multiple_of(COMPLETE_COPY) {
        world.complete_flight();
    }
    let chosen = world.rng.below(world.ready.len());
    let warp = world.ready[chosen] as usize;
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| run_warp(warp))) {
        let world = self::world();
        let lane = world.who(world.current);
        let current = world.current;
        world.fibers[current] = None;
        world.error = Some(EmulatorError::Panic { kernel: world.kernel, lane, message: message(&*payload) });
        return false;
    }
    let world = self::world();
    if world.warps[warp].runnable == 0 {
        // The list may have grown meanwhile, but only at its end.
        debug_assert_eq!(world.ready[chosen] as usize, warp);
        world.ready.swap_remove(chosen);
        world.warps[warp].listed = false;
    }
    true
}

/// Runs lanes of a warp until none can, or chance has it.
fn run_warp(warp: usize) {
    loop {
        let world = world();
        let runnable = world.warps[warp].runnable;
        if runnable == 0 || world.error.is_some() {
            return;
        }
        let draw = world.rng.next();
        let rotation = (draw & 31) as u32;
        let lane = warp * 32 + ((runnable.rotate_right(rotation).trailing_zeros() + rotation) & 31) as usize;
        world.report.steps += 1;
        world.report.trace = (world.report.trace.rotate_left(7) ^ lane as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        world.current = lane;
        world.polls = false;
        let fiber: *mut Option<Fiber> = &mut world.fibers[lane];
        // SAFETY: lanes do not touch the fibers, and no block starts while one runs, so the place stays where it is.
        let running = unsafe { &mut *fiber };
        let result = running.as_mut().expect("a lane that can run has a fiber").resume(());
        let world = self::world();
        if let CoroutineResult::Return(()) = result {
            let ended = world.fibers[lane].take().map(Fiber::into_stack);
            ended.into_iter().for_each(|stack| stack.give(world.launch.stack_bytes));
            finish(world);
        }
        if !limits(world) || world.polls || (draw >> 32).is_multiple_of(LEAVE_WARP) {
            return;
        }
    }
}

/// Counts a step against the limits. False if one is reached.
#[inline]
fn limits(world: &mut World) -> bool {
    world.idle = if world.polls { world.idle + 1 } else { 0 };
    let reason = if world.idle > world.launch.idle_steps {
        format!("for {} steps lanes did nothing but poll", world.launch.idle_steps)
    } else if world.report.steps > world.launch.steps {
        format!("not done after {} steps", world.launch.steps)
    } else {
        return true;
    };
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
