//! Asynchronous copies and mbarriers.
//!
//! A copy is checked when it starts, and done as late as it may be: when its lane waits for its group or, for a copy
//! that completes on an mbarrier, when the scheduler lands it. In between its bytes are marked as in flight, so that
//! any access to them races with the copy.

use std::rc::Rc;

use super::MissingWait;
use super::access::Address;
use super::clock::{Clock, Counts, Name};
use super::order::Who;
use super::race::Mode;
use super::world::{Block, Lane, SHARED_BASE, Site, State, Turn, World, misuse, suspend, world};

/// A copy in flight.
#[derive(Clone, Copy)]
pub struct Copy {
    destination: Address,
    source: Source,
    bytes: usize,
    site: Site,
}

/// What is copied.
#[derive(Clone, Copy)]
enum Source {
    At(Address),
    /// From registers.
    Words([u32; 4]),
}

/// The copies of a lane in groups: those still open, and those committed and not waited for, oldest first.
#[derive(Default)]
pub struct Groups {
    open: Vec<Copy>,
    committed: Vec<Group>,
}

#[derive(Default)]
struct Group {
    copies: Vec<Copy>,
    /// Whether its bytes have been moved, because a wait for its sources came first.
    moved: bool,
}

/// What completes on an mbarrier at one moment: a copy, or all pieces of a tile.
pub struct Flight {
    copies: Vec<Copy>,
    /// The slot of the block that it lands in.
    slot: usize,
    barrier: u32,
    /// What its lane knew when it started it.
    counts: Counts,
    /// The lane that started it, and its number among that lane's copies.
    name: (Who, u32),
    /// Shared with the copies of the same bytes into other blocks. The source counts as read when the last of them
    /// lands.
    reading: Rc<()>,
}

impl Flight {
    pub fn name(&self) -> (Who, u32) {
        self.name
    }
}

/// An mbarrier. Its state is kept here; the emulated memory holds only its place.
pub struct Mbarrier {
    count: u32,
    pending: u32,
    bytes: i64,
    parity: u32,
    /// What those know that have arrived in this phase; below, what those of the phase before knew.
    arriving: Counts,
    arrived: Rc<Counts>,
    waiting: Vec<(usize, u32)>,
    /// The number of this phase among those that some lane had to wait for, if they are counted and it is one.
    awaited: Option<u64>,
    /// The thread that initialised it, and where.
    maker: (u32, Site),
    /// Whether that thread has fenced it for TMA.
    fenced: bool,
}

/// What a lane knew when it started an operation that runs on without it.
pub struct Known {
    pub clock: Clock,
    /// What it knew at its last `fence_proxy_async`.
    fence: Option<Clock>,
}

/// Checks a copy, and marks its bytes as in flight.
pub fn start(destination: Address, source: Address, bytes: u32, site: Site) -> Copy {
    let len = bytes as usize;
    let world = world();
    if len == 0 || !len.is_multiple_of(16) {
        misuse(site, format!("an asynchronous copy moves a multiple of 16 bytes, not {len}"));
    }
    world.access(source, len, 16, Mode::CopyRead, true, site);
    if let Address::Shared(_) = source {
        let known = world.known();
        world.check_proxy(source, len, &known, site);
    }
    world.access(destination, len, 16, Mode::CopyWrite, false, site);
    Copy { destination, source: Source::At(source), bytes: len, site }
}

/// Makes visible to TMA what the lane wrote to shared memory, and what it knows others to have written.
pub fn fence_proxy_async() {
    let world = world();
    let thread = world.thread() as usize;
    let lane = world.lane();
    let epoch = lane.clock.count;
    lane.proxied = Some(lane.clock.clone());
    lane.clock.count += 1;
    world.block().proxied[thread].push(epoch);
    world.fence_barriers_of(world.current);
}

/// Makes the mbarriers that the lane initialised known to the lanes that meet it at the barrier of the cluster
/// ([`cluster_barrier`](super::collective::cluster_barrier)).
pub fn fence_mbarrier_init() {
    let world = world();
    let lane = world.lane();
    lane.made = Some(lane.clock.clone());
    lane.clock.count += 1;
    world.fence_barriers_of(world.current);
}

impl World {
    /// Notes that TMA sees the mbarriers that a lane initialised: the lane has fenced them, or has met its cluster at a
    /// barrier that orders everything.
    pub fn fence_barriers_of(&mut self, lane: usize) {
        let (slot, thread) = (lane / self.threads(), (lane % self.threads()) as u32);
        let barriers = self.blocks[slot].mbarriers.values_mut();
        barriers.filter(|barrier| barrier.maker.0 == thread).for_each(|barrier| barrier.fenced = true);
    }

    /// What the current lane knows now.
    pub fn known(&mut self) -> Known {
        let lane = self.lane();
        Known { clock: lane.clock.clone(), fence: lane.proxied.clone() }
    }

    /// Checks that TMA or `wgmma` sees what it reads from shared memory. For each write, either the writer must have
    /// fenced it before it told the lane that starts the read, or that lane must have fenced after it learned of the
    /// write.
    pub fn check_proxy(&mut self, source: Address, len: usize, known: &Known, site: Site) {
        let (slot, engine) = (self.slot(), self.launch.threads);
        let Block { shared, proxied, .. } = &mut self.blocks[slot];
        let Known { clock, fence } = known;
        let Address::Shared(address) = source else { return };
        let start = (address - SHARED_BASE) as usize;
        let unseen = shared.shadow.find_writer(start..start + len, |name, epoch| {
            let fenced = |name: Name| {
                let fences = &proxied[name.slot() as usize];
                let first = fences.get(fences.partition_point(|&fence| fence < epoch));
                first.is_some_and(
                    |&fence| if name == clock.name { fence < clock.count } else { clock.knows(name, fence) },
                )
            };
            let by_writer = name.slot() == engine || fenced(name);
            !(by_writer || fence.as_ref().is_some_and(|clock| clock.knows(name, epoch)))
        });
        if let Some(past) = unseen {
            let lane = self.named(past.name);
            misuse(
                site,
                format!("no fence_proxy_async stands between this read and what {lane} wrote at {}", past.site),
            );
        }
    }

    fn move_bytes(&mut self, copy: &Copy, slot: usize) {
        let source = match &copy.source {
            Source::At(address) => self.pointer(*address, slot),
            Source::Words(words) => words.as_ptr().cast(),
        };
        let destination = self.pointer(copy.destination, slot);
        // SAFETY: both were checked when the copy started; a launch keeps its memory alive, and global memory and
        // shared memory do not overlap.
        unsafe { destination.copy_from_nonoverlapping(source, copy.bytes) };
        let (bytes, region) = self.range(copy.destination, slot, copy.bytes);
        region.memory.initialised.add(bytes);
        if let Address::Global(_) = copy.destination {
            self.report.bytes_stored += copy.bytes as u64;
        }
    }

    /// Turns the marks of a copy in flight into ordinary accesses of `name` in `epoch`.
    fn settle(&mut self, copy: &Copy, slot: usize, flight: Mode, name: Name, epoch: u32) {
        let address = match copy.source {
            _ if flight == Mode::CopyWrite => copy.destination,
            Source::At(source) => source,
            Source::Words(_) => return,
        };
        let (bytes, region) = self.range(address, slot, copy.bytes);
        region.shadow.land(bytes, flight, name, epoch, copy.site);
    }

    fn range(
        &mut self,
        address: Address,
        slot: usize,
        len: usize,
    ) -> (std::ops::Range<usize>, &mut super::world::Region) {
        let region = match address {
            Address::Global(address) => {
                let at = self.regions.partition_point(|region| region.start <= address);
                &mut self.regions[at - 1]
            }
            Address::Shared(_) => &mut self.blocks[slot].shared,
            Address::SharedOf(slot, _) => &mut self.blocks[slot].shared,
        };
        let start = match address {
            Address::Global(address) => (address - region.start) as usize,
            Address::Shared(address) | Address::SharedOf(_, address) => (address - SHARED_BASE) as usize,
        };
        (start..start + len, region)
    }

    fn pointer(&mut self, address: Address, slot: usize) -> *mut u8 {
        let (bytes, region) = self.range(address, slot, 0);
        // SAFETY: the address was checked when the copy started.
        unsafe { region.memory.start().add(bytes.start) }
    }

    /// Completes one of the copies in flight; number 0 is the oldest.
    pub fn complete_flight(&mut self, nth: usize) {
        let flight = self.flights.remove(nth);
        if self.order.records()
            && let Some(copy) = flight.copies.first()
        {
            self.turns.push(Turn::Landed { site: copy.site });
        }
        let block = &mut self.blocks[flight.slot];
        block.engine += 1;
        let (name, epoch) = (Name::new(block.linear, self.launch.threads), block.engine);
        for copy in &flight.copies {
            self.move_bytes(copy, flight.slot);
            if Rc::strong_count(&flight.reading) == 1 {
                self.settle(copy, flight.slot, Mode::CopyRead, name, epoch);
            }
            self.settle(copy, flight.slot, Mode::CopyWrite, name, epoch);
        }
        let threads = self.launch.threads as usize;
        if let Some(barrier) = self.blocks[flight.slot].mbarriers.get_mut(&flight.barrier) {
            barrier.bytes -= flight.copies.iter().map(|copy| copy.bytes as i64).sum::<i64>();
            barrier.arriving.join(&flight.counts);
            barrier.arriving.join(&Counts::of(name, epoch, threads + 1));
        }
        self.end_phase(flight.slot, flight.barrier);
        self.progress();
    }

    /// Ends the phase of a barrier if everything that it waits for has come.
    fn end_phase(&mut self, slot: usize, address: u32) {
        let Some(barrier) = self.blocks[slot].mbarriers.get_mut(&address) else { return };
        if barrier.pending != 0 || barrier.bytes != 0 {
            return;
        }
        barrier.parity ^= 1;
        barrier.awaited = None;
        barrier.pending = barrier.count;
        barrier.arrived = Rc::new(std::mem::take(&mut barrier.arriving));
        let parity = barrier.parity;
        let (woken, still) = std::mem::take(&mut barrier.waiting).into_iter().partition(|waits| waits.1 != parity);
        barrier.waiting = still;
        let woken: Vec<(usize, u32)> = woken;
        for (lane, _) in woken {
            self.wake(lane);
        }
        self.progress();
    }

    /// The barrier at an address of the block in `slot`. Its place in memory is used as an atomic.
    fn mbarrier(&mut self, slot: usize, address: u32, site: Site) -> &mut Mbarrier {
        self.access(Address::SharedOf(slot, address), 8, 8, Mode::AtomicRead, true, site);
        match self.blocks[slot].mbarriers.get_mut(&address) {
            Some(barrier) => barrier,
            None => misuse(site, format!("no mbarrier was made at shared offset {}", address - SHARED_BASE)),
        }
    }

    fn arrive(&mut self, slot: usize, address: u32, bytes: u32, site: Site) {
        let mut counts = Counts::default();
        let lane = self.lane();
        lane.clock.publish(&mut counts);
        lane.clock.count += 1;
        let barrier = self.mbarrier(slot, address, site);
        if barrier.pending == 0 {
            misuse(site, "more lanes arrive at the mbarrier than its phase expects".to_string());
        }
        barrier.bytes += i64::from(bytes);
        barrier.pending -= 1;
        barrier.arriving.join(&counts);
        self.end_phase(slot, address);
    }

    /// Whether the barrier's phase, for which a lane would wait now, is the one that is to be left out.
    fn skips(&mut self, slot: usize, address: u32) -> bool {
        let Some(MissingWait::Phase(number)) = self.launch.missing else { return false };
        let Some(barrier) = self.blocks[slot].mbarriers.get_mut(&address) else { return false };
        let awaited = *barrier.awaited.get_or_insert(self.phases_awaited);
        self.phases_awaited = self.phases_awaited.max(awaited + 1);
        self.report.left_out |= awaited == number;
        awaited == number
    }

    /// Whether the phase of that parity has ended; if so, the lane learns what came with it. A phase that is to be left
    /// out counts as ended, but nothing is learned.
    fn passed(&mut self, address: u32, parity: u32, site: Site) -> bool {
        let barrier = self.mbarrier(self.slot(), address, site);
        if barrier.parity == parity & 1 {
            return self.skips(self.slot(), address);
        }
        let counts = barrier.arrived.clone();
        self.learn(self.current, &counts);
        true
    }

    /// Has the current lane wait for the end of that phase. If it `tries`, it gives up some time.
    fn wait(&mut self, address: u32, parity: u32, tries: bool, site: Site) {
        let (lane, parity) = (self.current, parity & 1);
        self.lane().state = State::Phase { barrier: address, parity, tries, site };
        self.warps[lane / 32].runnable &= !(1 << (lane % 32));
        self.mbarrier(self.slot(), address, site).waiting.push((lane, parity));
    }

    /// Wakes the lanes that give up waiting for a phase, and returns how many.
    pub fn give_up(&mut self) -> usize {
        let tries = |lane: usize, lanes: &[Lane]| matches!(lanes[lane].state, State::Phase { tries: true, .. });
        let mut woken = Vec::new();
        for barrier in self.blocks.iter_mut().flat_map(|block| block.mbarriers.values_mut()) {
            let lanes = &self.lanes;
            woken.extend(barrier.waiting.extract_if(.., |waits| tries(waits.0, lanes)).map(|waits| waits.0));
        }
        // The order of barriers in a map is no order.
        woken.sort_unstable();
        for &lane in &woken {
            // Errors say what it waits for.
            let state = self.lanes[lane].state;
            self.wake(lane);
            self.lanes[lane].state = state;
        }
        woken.len()
    }
}

pub fn mbarrier_init(address: u32, count: u32, site: Site) {
    super::access::store(Address::Shared(address), 0u64, site);
    let barrier = Mbarrier {
        count,
        pending: count,
        bytes: 0,
        parity: 0,
        arriving: Counts::default(),
        arrived: Rc::default(),
        waiting: Vec::new(),
        awaited: None,
        maker: (world().thread(), site),
        fenced: false,
    };
    if count == 0 || count >= 1 << 20 {
        misuse(site, format!("an mbarrier counts 1 to 2^20 - 1 arrivals, not {count}"));
    }
    world().block().mbarriers.insert(address, barrier);
}

pub fn mbarrier_arrive(address: u32, bytes: u32, site: Site) {
    suspend();
    let world = world();
    world.arrive(world.slot(), address, bytes, site);
}

/// The lowest bit of the block's rank plus one in an address that [`map`] made. In other addresses these bits are zero:
/// they are in the lane's own block.
const RANK: u32 = 24;

/// An address of this block's shared memory in block `rank` of the cluster.
pub fn map(address: u32, rank: u32) -> u32 {
    address | (rank + 1) << RANK
}

/// The slot of the block that a mapped address is in, and the address within that block.
fn mapped(address: u32, site: Site) -> (usize, u32) {
    let world = world();
    let slot = if address >> RANK == 0 { world.slot() } else { world.peer((address >> RANK) - 1, site) };
    (slot, address & ((1 << RANK) - 1))
}

/// An arrival at a barrier of some block of the cluster.
pub fn peer_arrive(barrier: u32, site: Site) {
    suspend();
    let (slot, address) = mapped(barrier, site);
    world().arrive(slot, address, 0, site);
}

/// A store into the shared memory of some block of the cluster, which completes on a barrier there.
pub fn send16(destination: u32, words: [u32; 4], barrier: u32, site: Site) {
    let (slot, destination) = mapped(destination, site);
    let (of, barrier) = mapped(barrier, site);
    if slot != of {
        misuse(site, "the barrier of a store into a block of the cluster is that block's own".to_string());
    }
    launch(&[slot], barrier, false, site, |slot| {
        let destination = Address::SharedOf(slot, destination);
        world().access(destination, 16, 16, Mode::CopyWrite, false, site);
        vec![Copy { destination, source: Source::Words(words), bytes: 16, site }]
    });
}

/// The time after which it gives up is over when nothing else can happen.
pub fn mbarrier_try_wait(address: u32, parity: u32, site: Site) -> bool {
    // Others may come first.
    super::access::poll(world(), true, site);
    suspend();
    let mut passed = world().passed(address, parity, site);
    if !passed {
        world().wait(address, parity, true, site);
        suspend();
        passed = world().passed(address, parity, site);
        super::access::poll(world(), !passed, site);
    }
    world().lane().state = State::Ready;
    passed
}

pub fn mbarrier_test_wait(address: u32, parity: u32, site: Site) -> bool {
    world().passed(address, parity, site)
}

pub fn mbarrier_wait(address: u32, parity: u32, site: Site) {
    while !world().passed(address, parity, site) {
        world().wait(address, parity, false, site);
        suspend();
    }
}

pub fn bulk_to_shared(destination: u32, source: u64, bytes: u32, address: u32, site: Site) {
    launch_flights(&[world().slot()], address, site, |slot| {
        vec![start(Address::SharedOf(slot, destination), Address::Global(source), bytes, site)]
    });
}

pub fn bulk_multicast(destination: u32, source: u64, bytes: u32, address: u32, blocks: u16, site: Site) {
    launch_flights(&members(blocks, site), address, site, |slot| {
        vec![start(Address::SharedOf(slot, destination), Address::Global(source), bytes, site)]
    });
}

/// The slots of those blocks of the cluster whose bit is set in `blocks`.
pub fn members(blocks: u16, site: Site) -> Vec<usize> {
    let world = world();
    if blocks == 0 {
        misuse(site, "a copy into no block of the cluster".to_string());
    }
    (0..16).filter(|rank| blocks >> rank & 1 != 0).map(|rank| world.peer(rank, site)).collect()
}

/// Starts copies into the blocks in `slots`. In each block they complete on the barrier at `address`, at a moment of
/// their own.
pub fn launch_flights(slots: &[usize], address: u32, site: Site, start: impl Fn(usize) -> Vec<Copy>) {
    launch(slots, address, true, site, start);
}

fn launch(slots: &[usize], address: u32, by_tma: bool, site: Site, start: impl Fn(usize) -> Vec<Copy>) {
    let flights: Vec<_> = slots.iter().map(|&slot| (slot, start(slot))).collect();
    let world = world();
    for &slot in slots {
        let barrier = world.mbarrier(slot, address, site);
        if by_tma && !barrier.fenced {
            let made = barrier.maker.1;
            misuse(site, format!("no fence_init stands between this copy and its mbarrier, made at {made}"));
        }
    }
    let mut counts = Counts::default();
    let lane = world.lane();
    lane.clock.publish(&mut counts);
    lane.clock.count += 1;
    let who = Who { block: lane.clock.name.block(), thread: lane.clock.name.slot() };
    let reading = Rc::new(());
    for (slot, copies) in flights {
        let (counts, reading) = (counts.clone(), reading.clone());
        let lane = world.lane();
        let name = (who, lane.flights);
        lane.flights += 1;
        world.flights.push(Flight { copies, slot, barrier: address, counts, name, reading });
    }
}

/// Selects one kind of a lane's groups.
pub type Select = fn(&mut super::world::Lane) -> &mut Groups;

pub fn start_grouped(select: Select, destination: Address, source: Address, bytes: u32, site: Site) {
    let copy = start(destination, source, bytes, site);
    select(world().lane()).open.push(copy);
}

pub fn commit(select: Select) {
    let groups = select(world().lane());
    let copies = std::mem::take(&mut groups.open);
    groups.committed.push(Group { copies, moved: false });
}

/// Waits for all but the newest `pending` groups: until they are done if `whole`, else until they have read their
/// sources.
pub fn wait(select: Select, pending: usize, whole: bool) {
    let world = world();
    let (slot, lane) = (world.slot(), world.current);
    let (name, epoch) = (world.lane().clock.name, world.lane().clock.count);
    let groups = select(&mut world.lanes[lane]);
    let done = groups.committed.len().saturating_sub(pending);
    let mut waited: Vec<Group> = groups.committed.drain(..done).collect();
    for group in &mut waited {
        for copy in &group.copies {
            if !group.moved {
                world.move_bytes(copy, slot);
                world.settle(copy, slot, Mode::CopyRead, name, epoch);
            }
            if whole {
                world.settle(copy, slot, Mode::CopyWrite, name, epoch);
            }
        }
        group.moved = true;
    }
    if !whole {
        select(&mut world.lanes[lane]).committed.splice(0..0, waited);
    }
}

/// A copy that is still in flight though the current lane has returned from the kernel: one of its own or, if the
/// block's last lane has returned, any copy into the block.
pub fn unfinished(world: &mut World, slot: usize) -> Option<(Site, &'static str)> {
    let lane = &world.lanes[world.current];
    let groups = [(&lane.async_copies, "an asynchronous copy"), (&lane.bulk_stores, "a bulk store")];
    let own = groups.into_iter().find_map(|(groups, what)| {
        let committed = groups.committed.iter().filter(|group| !group.moved).flat_map(|group| &group.copies);
        groups.open.iter().chain(committed).next().map(|copy| (copy.site, what))
    });
    if own.is_some() || world.blocks[slot].exited < world.launch.threads {
        return own;
    }
    let flight = world.flights.iter().find(|flight| flight.slot == slot);
    flight.and_then(|flight| flight.copies.first()).map(|copy| (copy.site, "a bulk copy"))
}
