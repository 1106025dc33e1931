//! Checked accesses to memory, atomics and fences.

use std::ops::Range;
use std::rc::Rc;

use super::memory::{self, Hold};
use super::race::Mode;
use super::world::{Region, Released, SHARED_BASE, Site, State, World, fail, misuse, suspend, world};
use crate::atomic::{Ordering, Scope};

/// An address in one of the two memories.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Address {
    Global(u64),
    Shared(u32),
    /// In the shared memory of the block in this slot.
    SharedOf(usize, u32),
}

/// Where an access lands: its bytes within a region.
pub struct Landing {
    pub region: usize,
    pub bytes: Range<usize>,
    pub pointer: *mut u8,
}

impl World {
    /// The index in `regions` of the region that holds a global address.
    #[inline]
    fn region_of(&mut self, address: u64) -> Result<usize, String> {
        let within = |region: &Region| address.wrapping_sub(region.start) < region.memory.len() as u64;
        if self.regions.get(self.last_region).is_some_and(within) {
            return Ok(self.last_region);
        }
        let at = self.regions.partition_point(|region| region.start <= address);
        if at > 0 && within(&self.regions[at - 1]) {
            self.last_region = at - 1;
            return Ok(at - 1);
        }
        // This launch has not used the allocation yet, or there is none.
        let memory = memory::find(address).map_err(|nearest| {
            let null = if address < 4096 { " (null)" } else { "" };
            format!("global address {address:#x}{null} is out of bounds: {nearest}")
        })?;
        let memory = Hold::read(memory)?;
        self.regions.insert(at, Region::new(memory.start() as u64, memory));
        self.last_region = at;
        Ok(at)
    }

    /// The region of an address, from the index that [`locate`](Self::locate) found.
    #[inline]
    pub fn region(&mut self, address: Address, index: usize) -> &mut Region {
        match address {
            Address::Global(_) => &mut self.regions[index],
            Address::Shared(_) | Address::SharedOf(..) => &mut self.blocks[index].shared,
        }
    }

    /// Finds the bytes of an access that must be aligned to `align`.
    #[inline]
    pub fn locate(&mut self, address: Address, len: usize, align: usize) -> Result<Landing, String> {
        let (region, start) = match address {
            Address::Global(address) => {
                let region = self.region_of(address)?;
                (region, (address - self.regions[region].start) as usize)
            }
            Address::Shared(offset) | Address::SharedOf(_, offset) => {
                let size = self.launch.shared_bytes as usize;
                let start = offset.wrapping_sub(SHARED_BASE) as usize;
                if start >= size {
                    return Err(format!(
                        "shared offset {} is out of bounds: the launch has {size} bytes of shared memory",
                        i64::from(offset) - i64::from(SHARED_BASE),
                    ));
                }
                let slot = if let Address::SharedOf(slot, _) = address { slot } else { self.slot() };
                (slot, start)
            }
        };
        let memory = &self.region(address, region).memory;
        if start + len > memory.len() || !(memory.start() as usize + start).is_multiple_of(align) {
            return Err(wrong(address, start, len, align, memory));
        }
        // SAFETY: the offset is within the allocation.
        let pointer = unsafe { memory.start().add(start) };
        Ok(Landing { region, bytes: start..start + len, pointer })
    }

    /// Checks an access, records it for the race detector, and returns a pointer to its bytes. With `initialised` it
    /// also checks that the bytes have been written.
    #[inline]
    pub fn access(
        &mut self,
        address: Address,
        len: usize,
        align: usize,
        mode: Mode,
        initialised: bool,
        site: Site,
    ) -> *mut u8 {
        let landing = match self.locate(address, len, align) {
            Ok(landing) => landing,
            Err(what) => misuse(site, what),
        };
        let global = matches!(address, Address::Global(_));
        let lane = self.current;
        let Self { regions, blocks, lanes, report, .. } = self;
        let region = if global { &mut regions[landing.region] } else { &mut blocks[landing.region].shared };
        if mode.writes()
            && !region.memory.writes()
            && let Err(busy) = region.memory.begin_to_write()
        {
            misuse(site, busy);
        }
        let map = &region.memory.initialised;
        // Races first: bytes are often uninitialised only because a write that races with this read has not run yet.
        let raced = region.shadow.access(landing.bytes.clone(), mode, &lanes[lane].clock, site);
        if let Err(past) = raced {
            let place = place(address, landing.bytes.start, &region.memory);
            fail(self.race(&past, mode, site, place));
        }
        if initialised && !map.covers(landing.bytes.clone()) {
            let place = place(address, landing.bytes.start, &region.memory);
            misuse(site, format!("{len} bytes at {place} are read but not initialised"));
        }
        if mode.writes() && mode != Mode::CopyWrite {
            map.add(landing.bytes);
            if global {
                report.bytes_stored += len as u64;
            }
        } else if global && !mode.writes() {
            report.bytes_loaded += len as u64;
        }
        landing.pointer
    }
}

#[cold]
fn wrong(address: Address, start: usize, len: usize, align: usize, memory: &memory::Allocation) -> String {
    let place = place(address, start, memory);
    if start + len > memory.len() {
        format!("{len} bytes at {place} run past its {} bytes: out of bounds", memory.len())
    } else {
        format!("{place} is misaligned: {len} bytes need a multiple of {align}")
    }
}

/// An address as errors describe it.
#[cold]
fn place(address: Address, start: usize, memory: &memory::Allocation) -> String {
    match address {
        Address::Global(address) => format!("byte {start} of {} (address {address:#x})", memory.name()),
        Address::Shared(_) => format!("shared offset {start}"),
        Address::SharedOf(..) => format!("shared offset {start} of a block of the cluster"),
    }
}

/// Reads a `T`, aligned to its size.
#[inline]
pub fn load<T: Copy>(address: Address, mode: Mode, site: Site) -> T {
    let pointer = world().access(address, size_of::<T>(), size_of::<T>(), mode, true, site);
    // SAFETY: checked just now: live, aligned, initialised.
    unsafe { pointer.cast::<T>().read_unaligned() }
}

/// Writes a `T`, aligned to its size.
#[inline]
pub fn store<T: Copy>(address: Address, value: T, site: Site) {
    let pointer = world().access(address, size_of::<T>(), size_of::<T>(), Mode::Write, false, site);
    // SAFETY: checked just now: live and aligned.
    unsafe { pointer.cast::<T>().write_unaligned(value) }
}

/// Reads a `T` atomically, then writes what `update` makes of it, if anything. Returns what was read.
pub fn update<T: Copy + PartialEq>(
    address: Address,
    ordering: Ordering,
    scope: Scope,
    site: Site,
    update: impl FnOnce(T) -> Option<T>,
) -> T {
    // Other lanes may come first.
    suspend();
    let world = world();
    world.report.atomics += 1;
    let pointer = world.access(address, size_of::<T>(), size_of::<T>(), Mode::AtomicWrite, true, site).cast::<T>();
    // SAFETY: checked just now.
    let old = unsafe { pointer.read() };
    let new = update(old);
    acquire(world, address, ordering, scope);
    if let Some(new) = new {
        // SAFETY: checked just now.
        unsafe { pointer.write(new) };
        release(world, address, ordering, scope, false);
    }
    poll(world, new.is_none_or(|new| new == old), site);
    old
}

/// Reads a `T` atomically.
pub fn atomic_load<T: Copy>(address: Address, ordering: Ordering, scope: Scope, site: Site) -> T {
    // A lane that waits for a value in a loop must let the others run.
    poll(world(), true, site);
    suspend();
    let world = world();
    world.lane().state = State::Ready;
    world.report.atomics += 1;
    let pointer = world.access(address, size_of::<T>(), size_of::<T>(), Mode::AtomicRead, true, site);
    // SAFETY: checked just now.
    let value = unsafe { pointer.cast::<T>().read() };
    acquire(world, address, ordering, scope);
    value
}

/// Writes a `T` atomically.
pub fn atomic_store<T: Copy>(address: Address, value: T, ordering: Ordering, scope: Scope, site: Site) {
    suspend();
    let world = world();
    world.report.atomics += 1;
    let pointer = world.access(address, size_of::<T>(), size_of::<T>(), Mode::AtomicWrite, false, site);
    // SAFETY: checked just now.
    unsafe { pointer.cast::<T>().write(value) };
    release(world, address, ordering, scope, true);
    world.progress();
}

/// Notes whether the lane made progress or only polled.
pub fn poll(world: &mut World, idle: bool, site: Site) {
    if idle {
        world.polls = true;
        world.lane().state = State::Polling(site);
    } else {
        world.progress();
    }
}

/// A key that tells an atomic location from all others in both memories.
fn key(world: &World, address: Address) -> u64 {
    match address {
        Address::Global(address) => address,
        Address::Shared(address) => shared_key(world, world.slot(), address),
        Address::SharedOf(slot, address) => shared_key(world, slot, address),
    }
}

fn shared_key(world: &World, slot: usize, address: u32) -> u64 {
    1 << 63 | u64::from(world.blocks[slot].linear) << 32 | u64::from(address)
}

/// What an atomic read learns: at once if it acquires, else at the next fence.
fn acquire(world: &mut World, address: Address, ordering: Ordering, scope: Scope) {
    let Some(released) = world.released.get(&key(world, address)) else { return };
    let own = world.lanes[world.current].clock.name.block();
    let block = released.block == Some(own);
    let device = released.device && scope != Scope::Block;
    if !block && !device {
        return;
    }
    let counts = released.counts.clone();
    if matches!(ordering, Ordering::Acquire | Ordering::AcqRel) {
        return world.learn(world.current, &counts);
    }
    let lane = world.lane();
    if !lane.seen.last().is_some_and(|seen| Rc::ptr_eq(&seen.0, &counts)) {
        lane.seen.push((counts, device, block));
    }
}

/// What an atomic write publishes: what the lane knows if it releases, else what it knew at its last fence.
fn release(world: &mut World, address: Address, ordering: Ordering, scope: Scope, store: bool) {
    let key = key(world, address);
    let lane = &mut world.lanes[world.current];
    let releases = matches!(ordering, Ordering::Release | Ordering::AcqRel);
    let (block, device) = (&lane.released[0], &lane.released[1]);
    let (clock, device) = match (releases, scope, device, block) {
        (true, Scope::Block, ..) => (Some(&lane.clock), false),
        (true, ..) => (Some(&lane.clock), true),
        (false, Scope::Device | Scope::System, Some(clock), _) => (Some(clock), true),
        (false, _, _, Some(clock)) | (false, _, Some(clock), None) => (Some(clock), false),
        (false, _, None, None) => (None, true),
    };
    // A store starts anew what is released here; a read-modify-write adds to it.
    if store {
        world.released.remove(&key);
    }
    if let Some(clock) = clock {
        let own = clock.name.block();
        let released = world.released.entry(key).or_insert_with(|| Released {
            counts: Rc::default(),
            block: Some(own),
            device: true,
        });
        clock.publish(Rc::make_mut(&mut released.counts));
        released.device &= device;
        if released.block != Some(own) {
            released.block = None;
        }
    }
    lane.clock.count += 1;
}

/// A fence: the lane learns what its relaxed atomics have seen, and its later ones publish what it knows now.
pub fn fence(scope: Scope) {
    let world = world();
    let wide = scope != Scope::Block;
    for (counts, device, block) in std::mem::take(&mut world.lane().seen) {
        if block || wide && device {
            world.learn(world.current, &counts);
        } else {
            world.lane().seen.push((counts, device, block));
        }
    }
    let lane = world.lane();
    lane.released[0] = Some(lane.clock.clone());
    if wide {
        lane.released[1] = Some(lane.clock.clone());
    }
    lane.clock.count += 1;
}
