//! Where lanes meet: warp collectives and the barriers of a block.

use std::rc::Rc;

use super::clock::{self, Counts};
use super::error::EmulatorError;
use super::world::{Site, State, World, fail, misuse, suspend, world};

/// The kinds of warp collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Collective {
    ShuffleXor,
    ShuffleIdx,
    ShuffleUp,
    ShuffleDown,
    Ballot,
    Any,
    All,
    Max,
    SyncWarp,
    Elect,
    Mma,
    Ldmatrix,
    Stmatrix,
    Movmatrix,
    Wgmma,
}

impl Collective {
    pub fn name(self) -> &'static str {
        match self {
            Collective::ShuffleXor => "shuffle_xor",
            Collective::ShuffleIdx => "shuffle_idx",
            Collective::ShuffleUp => "shuffle_up",
            Collective::ShuffleDown => "shuffle_down",
            Collective::Ballot => "ballot",
            Collective::Any => "any",
            Collective::All => "all",
            Collective::Max => "max",
            Collective::SyncWarp => "sync_warp",
            Collective::Elect => "elect",
            Collective::Mma => "mma",
            Collective::Ldmatrix => "ldmatrix",
            Collective::Stmatrix => "stmatrix",
            Collective::Movmatrix => "movmatrix",
            Collective::Wgmma => "wgmma",
        }
    }
}

/// The most words that a lane can bring to a collective: those of `mma`, C first.
pub const WORDS: usize = 10;
/// The words that the lanes of a warp brought.
pub type Table = [[u32; WORDS]; 32];

pub struct Warp {
    /// Lanes that can run.
    pub runnable: u32,
    /// Whether the scheduler's list of ready warps contains it.
    pub listed: bool,
    /// The lane that ran last, or the next one if that lane polled.
    pub last: u32,
    exited: u32,
    arrived: u32,
    kind: Option<Collective>,
    /// Collectives alternate between two tables: a lane may bring its words to the next one while others still have to
    /// read the last one's, but no lane can be two ahead.
    tables: [Table; 2],
    turn: usize,
}

impl Warp {
    pub fn new() -> Self {
        Self {
            runnable: 0,
            listed: false,
            last: 0,
            exited: 0,
            arrived: 0,
            kind: None,
            tables: [[[0; WORDS]; 32]; 2],
            turn: 0,
        }
    }

    /// Resets the warp for a new block.
    pub fn reset(&mut self) {
        (self.runnable, self.exited, self.arrived, self.last) = (0, 0, 0, 0);
    }
}

/// Brings `words` to a collective of the warp; returns the table of what all lanes brought.
#[inline]
pub fn gather_warp<const N: usize>(kind: Collective, words: [u32; N], site: Site) -> &'static Table {
    let world = world();
    let lane = world.current;
    let warp = &mut world.warps[lane / 32];
    let turn = warp.turn;
    warp.tables[turn][lane % 32][..N].copy_from_slice(&words);
    if warp.arrived == 0 {
        warp.kind = Some(kind);
    }
    if warp.exited != 0 || warp.kind != Some(kind) {
        world.lane().state = State::Collective(kind, site);
        diverged(world, lane / 32 * 32..lane / 32 * 32 + 32);
    }
    warp.arrived |= 1 << (lane % 32);
    if warp.arrived == u32::MAX {
        complete(world, lane / 32, kind);
    } else {
        warp.runnable &= !(1 << (lane % 32));
        world.lanes[lane].state = State::Collective(kind, site);
        suspend();
    }
    &self::world().warps[lane / 32].tables[turn]
}

/// Completes a collective, as all lanes of the warp have arrived.
fn complete(world: &mut World, index: usize, kind: Collective) {
    let warp = &mut world.warps[index];
    match kind {
        Collective::Mma => super::mma::multiply(&mut warp.tables[warp.turn]),
        Collective::SyncWarp => {
            clock::join_all(world.lanes[index * 32..index * 32 + 32].iter_mut().map(|lane| &mut lane.clock))
        }
        _ => {}
    }
    warp.arrived = 0;
    warp.turn ^= 1;
    warp.runnable = u32::MAX;
    for lane in &mut world.lanes[index * 32..index * 32 + 32] {
        lane.state = State::Ready;
    }
    world.progress();
}

#[cold]
fn diverged(world: &World, lanes: std::ops::Range<usize>) -> ! {
    let block = world.blocks[lanes.start / world.threads()].index;
    fail(EmulatorError::Divergence { kernel: world.kernel, block, lanes: world.describe(lanes) })
}

/// A barrier of the block.
#[derive(Default)]
pub struct NamedBarrier {
    /// How many lanes meet, as the first to arrive says.
    count: u32,
    arrived: Vec<usize>,
}

/// Waits at barrier `id` for `count` lanes, or for all lanes of the block.
pub fn barrier(id: u32, count: Option<u32>, site: Site) {
    let world = world();
    let lane = world.current;
    let threads = world.launch.threads;
    let wanted = count.unwrap_or(threads);
    if count.is_some() && !(1..16).contains(&id) {
        misuse(site, format!("named barriers are 1 to 15, not {id}"));
    }
    if wanted == 0 || !wanted.is_multiple_of(32) || wanted > threads {
        misuse(site, format!("{wanted} lanes cannot meet at a barrier: whole warps, at most {threads} lanes"));
    }
    world.report.barriers += 1;
    world.lanes[lane].state = State::Barrier(id, site);
    let block = world.block();
    let first = lane / threads as usize * threads as usize;
    if count.is_none() && block.exited > 0 {
        diverged(world, first..first + threads as usize);
    }
    gather(id as usize, wanted, site);
}

/// The place where the block's first warpgroup meets. It and those of the other warpgroups come after the barriers that
/// a kernel can name.
const WARPGROUPS: usize = 16;
/// Places where lanes of a block can meet.
pub const PLACES: usize = WARPGROUPS + 8;

/// Waits until all lanes of the warpgroup have done their share of the products that they began together. Afterwards
/// each lane knows of the others' shares.
pub fn warpgroup_barrier(site: Site) {
    let world = world();
    let lane = world.current;
    world.lanes[lane].state = State::Collective(Collective::Wgmma, site);
    gather(WARPGROUPS + world.thread() as usize / 128, 128, site);
}

/// Waits for `wanted` lanes at one of the places of the block.
fn gather(place: usize, wanted: u32, site: Site) {
    let world = world();
    let lane = world.current;
    let barrier = &mut world.block().barriers[place];
    if barrier.arrived.is_empty() {
        barrier.count = wanted;
    } else if barrier.count != wanted {
        let others = barrier.count;
        misuse(site, format!("barrier {place} is for {wanted} lanes here, but {others} for those that wait at it"));
    }
    barrier.arrived.push(lane);
    if barrier.arrived.len() < wanted as usize {
        world.warps[lane / 32].runnable &= !(1 << (lane % 32));
        return suspend();
    }
    let mut met = std::mem::take(&mut barrier.arrived);
    met.sort_unstable();
    // The lanes are in ascending order, so each can be split off the rest.
    let (mut rest, mut base) = (&mut world.lanes[..], 0);
    clock::join_all(met.iter().map(|lane| {
        let (head, tail) = std::mem::take(&mut rest).split_at_mut(lane - base + 1);
        (rest, base) = (tail, lane + 1);
        &mut head[head.len() - 1].clock
    }));
    for lane in met {
        world.wake(lane);
    }
    world.progress();
}

/// Waits at the barrier of the cluster for all of its lanes that have not ended. Afterwards every lane knows what the
/// others knew. Of those that arrived with `made` it knows only what they knew when they last fenced the mbarriers that
/// they had made.
pub fn cluster_barrier(made: bool, site: Site) {
    let world = world();
    let lane = world.current;
    world.report.barriers += 1;
    world.lanes[lane].state = State::Cluster(site);
    world.warps[lane / 32].runnable &= !(1 << (lane % 32));
    let number = world.slot() / world.cluster as usize;
    world.at_cluster_barrier[number].push((lane, made));
    if !end_cluster_barrier(world, number) {
        suspend();
    }
}

/// Ends the barrier of a cluster if all its lanes have arrived; returns whether it did.
fn end_cluster_barrier(world: &mut World, number: usize) -> bool {
    let cluster = world.cluster as usize;
    let blocks = &world.blocks[number * cluster..(number + 1) * cluster];
    let missing: u32 = blocks.iter().map(|block| world.launch.threads - block.exited).sum();
    if world.at_cluster_barrier[number].len() < missing as usize {
        return false;
    }
    let met = std::mem::take(&mut world.at_cluster_barrier[number]);
    let mut counts = Counts::default();
    for &(lane, made) in &met {
        if !made {
            world.fence_barriers_of(lane);
        }
        let lane = &mut world.lanes[lane];
        if let Some(clock) = if made { lane.made.as_ref() } else { Some(&lane.clock) } {
            clock.publish(&mut counts);
        }
        lane.clock.count += 1;
    }
    let counts = Rc::new(counts);
    for &(lane, _) in &met {
        world.learn(lane, &counts);
        world.wake(lane);
    }
    world.progress();
    true
}

/// The current lane returned from the kernel.
pub fn exit(world: &mut World) {
    let lane = world.current;
    let (threads, warp) = (world.threads(), lane / 32);
    world.lanes[lane].state = State::Exited;
    world.warps[warp].runnable &= !(1 << (lane % 32));
    world.warps[warp].exited |= 1 << (lane % 32);
    world.block().exited += 1;
    world.progress();
    let first = lane / threads * threads;
    let stranded = if world.warps[warp].arrived != 0 {
        Some(warp * 32..warp * 32 + 32)
    } else if !world.block().barriers[0].arrived.is_empty() {
        Some(first..first + threads)
    } else {
        None
    };
    if let Some(lanes) = stranded {
        let block = world.block().index;
        let lanes = world.describe(lanes);
        world.error.get_or_insert(EmulatorError::Divergence { kernel: world.kernel, block, lanes });
    }
    let number = world.slot() / world.cluster as usize;
    if !world.at_cluster_barrier[number].is_empty() {
        end_cluster_barrier(world, number);
    }
}
