//! Vector clocks: what each lane knows to have happened.
//!
//! Each lane counts its own epochs; a new one begins whenever others may have learned of what it did. A lane's
//! knowledge is its own count, and a `Base` with the counts of all others, which lanes that met at a barrier share. An
//! access by lane L in epoch e happened before what lane M does now if and only if M knows that L's count is e or more.

use std::rc::Rc;

/// The name of a lane: its block and its slot. The slot is the thread index; a block's TMA has the block's number of
/// threads as its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Name(u32);

const SLOT_BITS: u32 = 11;

impl Name {
    /// More blocks than this cannot be told apart.
    pub const MAX_BLOCKS: u64 = 1 << 20;
    /// The name in a record that stands for no access.
    pub const NOBODY: Self = Self(u32::MAX);

    pub fn new(block: u32, slot: u32) -> Self {
        Self(block << SLOT_BITS | slot)
    }
    pub fn block(self) -> u32 {
        self.0 >> SLOT_BITS
    }
    pub fn slot(self) -> u32 {
        self.0 & ((1 << SLOT_BITS) - 1)
    }
}

/// The counts of the lanes of some blocks, sorted by block.
#[derive(Clone, Default, Debug)]
pub struct Counts(Vec<(u32, Rc<[u32]>)>);

impl Counts {
    /// The count of one lane, in a block of which `lanes` are counted.
    pub fn of(name: Name, count: u32, lanes: usize) -> Self {
        let mut counts = vec![0; lanes];
        counts[name.slot() as usize] = count;
        Self(vec![(name.block(), counts.into())])
    }

    pub fn get(&self, name: Name) -> u32 {
        self.part(name.block()).map_or(0, |counts| counts[name.slot() as usize])
    }

    fn part(&self, block: u32) -> Option<&Rc<[u32]>> {
        self.0.binary_search_by_key(&block, |part| part.0).ok().map(|at| &self.0[at].1)
    }

    /// Joins the counts of one block into these.
    fn join_block(&mut self, block: u32, counts: &Rc<[u32]>) {
        match self.0.binary_search_by_key(&block, |part| part.0) {
            Ok(at) => join_slice(&mut self.0[at].1, counts),
            Err(at) => self.0.insert(at, (block, counts.clone())),
        }
    }

    pub fn join(&mut self, other: &Counts) {
        for (block, counts) in &other.0 {
            self.join_block(*block, counts);
        }
    }
}

/// Whether none of the counts `from` is higher than that of `known`.
fn has_all(known: &Rc<[u32]>, from: &Rc<[u32]>) -> bool {
    Rc::ptr_eq(known, from) || known.iter().zip(from.iter()).all(|(a, b)| a >= b)
}

/// The elementwise maximum, in place, without a copy where nothing changes.
fn join_slice(into: &mut Rc<[u32]>, from: &Rc<[u32]>) {
    if has_all(into, from) {
        return;
    }
    *into = into.iter().zip(from.iter()).map(|(a, b)| *a.max(b)).collect();
}

/// What lanes that met know of others: of their own block, and of other blocks if anything.
#[derive(Clone, Debug)]
pub struct Base {
    own: Rc<[u32]>,
    foreign: Option<Rc<Counts>>,
}

impl Base {
    pub fn new(threads: u32) -> Self {
        Self { own: vec![0; threads as usize + 1].into(), foreign: None }
    }

    /// The count of lane `name` that a lane of `block` knows with this base.
    #[inline]
    pub fn known(&self, block: u32, name: Name) -> u32 {
        if name.block() == block {
            self.own[name.slot() as usize]
        } else {
            self.foreign.as_ref().map_or(0, |counts| counts.get(name))
        }
    }

    /// Whether nothing in the counts of block `theirs` is news to a lane of `block`.
    fn covers(&self, block: u32, theirs: u32, counts: &Rc<[u32]>) -> bool {
        let known = if theirs == block { Some(&self.own) } else { self.foreign.as_ref().and_then(|f| f.part(theirs)) };
        known.is_some_and(|known| has_all(known, counts))
    }
}

/// A lane's knowledge.
#[derive(Clone, Debug)]
pub struct Clock {
    pub name: Name,
    /// The epoch that the lane is in.
    pub count: u32,
    pub base: Rc<Base>,
}

impl Clock {
    pub fn new(name: Name, base: Rc<Base>) -> Self {
        Self { name, count: 1, base }
    }

    #[inline]
    pub fn knows(&self, name: Name, count: u32) -> bool {
        self.base.known(self.name.block(), name) >= count
    }

    /// Adds all this lane knows, itself included, to `counts`.
    pub fn publish(&self, counts: &mut Counts) {
        if let Some(foreign) = &self.base.foreign {
            counts.join(foreign);
        }
        let mut own: Vec<u32> = self.base.own.to_vec();
        own[self.name.slot() as usize] = self.count;
        counts.join_block(self.name.block(), &own.into());
    }

    /// Adds `counts` to what the lane knows.
    pub fn learn(&mut self, counts: &Counts) {
        let block = self.name.block();
        if counts.0.iter().all(|(theirs, part)| self.base.covers(block, *theirs, part)) {
            return;
        }
        let mut base = Base::clone(&self.base);
        let mut foreign = base.foreign.as_deref().cloned().unwrap_or_default();
        for (theirs, part) in &counts.0 {
            if *theirs == block {
                join_slice(&mut base.own, part);
            } else {
                foreign.join_block(*theirs, part);
            }
        }
        base.foreign = (!foreign.0.is_empty()).then(|| Rc::new(foreign));
        self.base = Rc::new(base);
    }
}

/// Lanes of one block meet: afterwards each knows what any knew, and starts a new epoch.
pub fn join_all<'a>(clocks: impl Iterator<Item = &'a mut Clock>) {
    let mut clocks: Vec<_> = clocks.collect();
    let Some(first) = clocks.first() else { return };
    // Lanes that met before share a base, so most neighbours need not be joined.
    let mut last = first.base.clone();
    let mut own = last.own.to_vec();
    let mut foreign = last.foreign.clone();
    for clock in &clocks {
        if !Rc::ptr_eq(&clock.base, &last) {
            last = clock.base.clone();
            own.iter_mut().zip(last.own.iter()).for_each(|(a, b)| *a = (*a).max(*b));
            join_foreign(&mut foreign, &last.foreign);
        }
    }
    for clock in &clocks {
        own[clock.name.slot() as usize] = clock.count;
    }
    let base = Rc::new(Base { own: own.into(), foreign });
    for clock in &mut clocks {
        clock.base = base.clone();
        clock.count += 1;
    }
}

fn join_foreign(into: &mut Option<Rc<Counts>>, from: &Option<Rc<Counts>>) {
    match (into, from) {
        (_, None) => {}
        (into @ None, Some(from)) => *into = Some(from.clone()),
        (Some(into), Some(from)) if Rc::ptr_eq(into, from) => {}
        (Some(into), Some(from)) => Rc::make_mut(into).join(from),
    }
}
