//! Shadow memory: who used which bytes when.
//!
//! A page of the shadow has one cell for each granule of memory. The whole page is one granule until a part of it is
//! accessed. Then the page is refined: each cell is split into equal copies, which loses nothing. So a page of
//! weights that is only read by bulk copies of whole pages has one cell. A cell knows the last writer and the last two
//! readers. That it forgets a third reader can hide a race under one seed, but never invents one.

use std::ops::Range;
use std::panic::Location;

use super::clock::{Clock, Name};

/// log2 of the granule with which a page starts: the whole page.
const COARSEST: u32 = 12;
/// Bytes of memory that a page of the shadow covers.
const PAGE: usize = 1 << COARSEST;
/// The epoch of a copy in flight, which no lane can know.
const IN_FLIGHT: u32 = u32::MAX;

/// How memory is accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Read,
    /// A read of bytes that nobody writes during the launch.
    ReadConstant,
    Write,
    AtomicRead,
    AtomicWrite,
    /// A read by a copy that was started and not yet waited for.
    CopyRead,
    /// A write by such a copy.
    CopyWrite,
}

impl Mode {
    pub fn writes(self) -> bool {
        matches!(self, Mode::Write | Mode::AtomicWrite | Mode::CopyWrite)
    }
    pub fn atomic(self) -> bool {
        matches!(self, Mode::AtomicRead | Mode::AtomicWrite)
    }
    /// The mode as an error describes it.
    pub fn verb(self) -> &'static str {
        match self {
            Mode::Read => "read",
            Mode::ReadConstant => "read (as constant for the launch)",
            Mode::Write => "wrote",
            Mode::AtomicRead => "atomically read",
            Mode::AtomicWrite => "atomically wrote",
            Mode::CopyRead => "read, by a copy that is not known to be done,",
            Mode::CopyWrite => "wrote, by a copy that is not known to be done,",
        }
    }
}

static ANCHOR: &Location<'static> = Location::caller();

/// A place in the source, in 32 bits: its distance from a fixed place in the same binary.
#[derive(Clone, Copy, Default)]
struct Site(i32);

impl Site {
    #[inline]
    fn new(location: &'static Location<'static>) -> Self {
        let distance = (location as *const _ as isize).wrapping_sub(ANCHOR as *const _ as isize);
        Self(i32::try_from(distance).unwrap_or(0))
    }
    fn location(self) -> &'static Location<'static> {
        let address = (ANCHOR as *const _ as isize).wrapping_add(self.0 as isize);
        // SAFETY: `new` made the distance from a reference that lives as long as the program, or it is the anchor's
        // own.
        unsafe { &*(address as *const Location<'static>) }
    }
}

/// An access, remembered.
#[derive(Clone, Copy)]
struct Record {
    name: Name,
    /// 0 if there was none.
    epoch: u32,
    site: Site,
    mode: Mode,
}

impl Record {
    const NONE: Self = Self { name: Name::NOBODY, epoch: 0, site: Site(0), mode: Mode::Read };

    /// Whether the access happened before what `clock`'s lane does now.
    #[inline]
    fn before(&self, clock: &Clock) -> bool {
        if self.epoch == IN_FLIGHT {
            return false;
        }
        self.name == clock.name || self.epoch == 0 || clock.knows(self.name, self.epoch)
    }

    fn access(&self) -> Past {
        Past { name: self.name, mode: self.mode, site: self.site.location() }
    }
}

/// The earlier of two accesses that race.
pub struct Past {
    pub name: Name,
    pub mode: Mode,
    pub site: &'static Location<'static>,
}

/// The first of the `past` accesses that races with `record`, an access by the lane of `clock`.
#[inline]
fn conflict(past: &[Record], record: &Record, clock: &Clock) -> Option<Past> {
    // Neighbours were mostly accessed together.
    let mut known = (Name::NOBODY, 0);
    for past in past {
        if (past.name, past.epoch) == known {
            continue;
        }
        if past.before(clock) {
            known = (past.name, past.epoch);
        } else if !(past.mode.atomic() && record.mode.atomic()) {
            return Some(past.access());
        }
    }
    None
}

/// A bit for each byte of a page.
type Bits = Box<[u16; PAGE / 16]>;

fn any_bits(bits: &Bits, range: Range<usize>) -> bool {
    range.into_iter().any(|byte| bits[byte / 16] & 1 << (byte % 16) != 0)
}

fn set_bits(bits: &mut Bits, range: Range<usize>) {
    let (mut at, end) = (range.start, range.end);
    while at < end {
        let stop = end.min((at | 15) + 1);
        bits[at / 16] |= (((1u32 << (stop - at)) - 1) << (at & 15)) as u16;
        at = stop;
    }
}

#[derive(Default)]
struct Page {
    /// log2 of the granule.
    grain: u32,
    /// The last writer of each cell. Empty until an access needs cells. Writers and readers lie apart, since a read of
    /// many small cells looks at all their writers.
    writers: Vec<Record>,
    /// The last reader of each cell, and the last one before it that was another.
    readers: [Vec<Record>; 2],
    /// Bytes that were read as constant, and the last lane that did so and where.
    constant: Option<(Bits, Name, Site)>,
    /// Bytes that were written. None of them may be among those of `constant`.
    written: Option<Bits>,
}

impl Page {
    /// The cells of these bytes, a part of a cell counted as all of it.
    fn cells(&self, range: &Range<usize>) -> Range<usize> {
        range.start >> self.grain..range.end.div_ceil(1 << self.grain)
    }

    fn refine(&mut self, grain: u32) {
        let are_new = self.writers.is_empty();
        let copies = if are_new { PAGE >> grain } else { 1 << (self.grain - grain) };
        for records in std::iter::once(&mut self.writers).chain(&mut self.readers) {
            *records = if are_new {
                vec![Record::NONE; copies]
            } else {
                records.iter().flat_map(|record| std::iter::repeat_n(*record, copies)).collect()
            };
        }
        self.grain = grain;
    }

    #[inline]
    fn access(&mut self, range: Range<usize>, record: Record, clock: &Clock) -> Result<(), Past> {
        if record.mode == Mode::ReadConstant {
            return self.read_constant(range, record);
        }
        if record.mode.writes() {
            self.note_written(range.clone())?;
        }
        let grain = ((range.start | range.end) as u32 | 1 << COARSEST).trailing_zeros();
        if self.writers.is_empty() || grain < self.grain {
            self.refine(grain);
        }
        let cells = self.cells(&range);
        let writers = &mut self.writers[cells.clone()];
        if let Some(writer) = conflict(writers, &record, clock) {
            return Err(writer);
        }
        let [last, before] = &mut self.readers;
        let (last, before) = (&mut last[cells.clone()], &mut before[cells]);
        if !record.mode.writes() {
            for (last, before) in last.iter_mut().zip(before) {
                if last.name != record.name {
                    *before = *last;
                }
                *last = record;
            }
            return Ok(());
        }
        if let Some(reader) = conflict(last, &record, clock).or_else(|| conflict(before, &record, clock)) {
            return Err(reader);
        }
        writers.fill(record);
        last.fill(Record::NONE);
        before.fill(Record::NONE);
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn constant_reader(&self) -> Past {
        let (name, site) = self.constant.as_ref().map_or((Name::NOBODY, Site(0)), |(_, name, site)| (*name, *site));
        Past { name, mode: Mode::ReadConstant, site: site.location() }
    }

    fn note_written(&mut self, range: Range<usize>) -> Result<(), Past> {
        if self.constant.as_ref().is_some_and(|(bits, ..)| any_bits(bits, range.clone())) {
            return Err(self.constant_reader());
        }
        set_bits(self.written.get_or_insert_with(|| Box::new([0; PAGE / 16])), range);
        Ok(())
    }

    fn read_constant(&mut self, range: Range<usize>, record: Record) -> Result<(), Past> {
        if self.written.as_ref().is_some_and(|bits| any_bits(bits, range.clone())) {
            let writer = self.writers.get(range.start >> self.grain);
            return Err(writer.map_or_else(|| self.constant_reader(), Record::access));
        }
        let (bits, name, site) =
            self.constant.get_or_insert_with(|| (Box::new([0; PAGE / 16]), record.name, record.site));
        (*name, *site) = (record.name, record.site);
        set_bits(bits, range);
        Ok(())
    }

    /// Replaces the marks that a copy in flight left by `record`, the access as which it ends.
    fn land(&mut self, range: Range<usize>, flight: Mode, record: Record) {
        let cells = self.cells(&range);
        for records in std::iter::once(&mut self.writers).chain(&mut self.readers) {
            for past in &mut records[cells.clone()] {
                if past.epoch == IN_FLIGHT && past.mode == flight {
                    *past = record;
                }
            }
        }
    }
}

/// The shadow of an allocation during one launch.
#[derive(Default)]
pub struct Shadow {
    pages: Vec<Option<Box<Page>>>,
}

impl Shadow {
    pub fn new(bytes: usize) -> Self {
        Self { pages: (0..bytes.div_ceil(PAGE)).map(|_| None).collect() }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.pages.iter_mut().for_each(|page| *page = None);
    }

    #[inline]
    fn pages(
        &mut self,
        bytes: Range<usize>,
        mut visit: impl FnMut(&mut Page, Range<usize>) -> Result<(), Past>,
    ) -> Result<(), Past> {
        let mut at = bytes.start;
        while at < bytes.end {
            let stop = bytes.end.min((at | (PAGE - 1)) + 1);
            let page =
                self.pages[at / PAGE].get_or_insert_with(|| Box::new(Page { grain: COARSEST, ..Page::default() }));
            let offset = at % PAGE;
            visit(page, offset..offset + stop - at)?;
            at = stop;
        }
        Ok(())
    }

    /// Records an access by the lane of `clock`, or returns the earlier one that it races with.
    #[inline]
    pub fn access(
        &mut self,
        bytes: Range<usize>,
        mode: Mode,
        clock: &Clock,
        site: &'static Location<'static>,
    ) -> Result<(), Past> {
        let in_flight = matches!(mode, Mode::CopyRead | Mode::CopyWrite);
        let epoch = if in_flight { IN_FLIGHT } else { clock.count };
        let record = Record { name: clock.name, epoch, site: Site::new(site), mode };
        self.pages(bytes, |page, range| page.access(range, record, clock))
    }

    /// Visits the last write of each granule of the bytes until `wanted` accepts one, and returns that.
    pub fn find_writer(&mut self, bytes: Range<usize>, mut wanted: impl FnMut(Name, u32) -> bool) -> Option<Past> {
        let search = self.pages(bytes, |page, range| {
            let mut writers = page.writers.get(page.cells(&range)).unwrap_or_default().iter();
            let found = writers.find(|writer| writer.epoch != 0 && wanted(writer.name, writer.epoch));
            found.map_or(Ok(()), |writer| Err(writer.access()))
        });
        search.err()
    }

    /// A copy is done: from now on it counts as an ordinary access in epoch `epoch` of `name`.
    pub fn land(
        &mut self,
        bytes: Range<usize>,
        flight: Mode,
        name: Name,
        epoch: u32,
        site: &'static Location<'static>,
    ) {
        let mode = if flight == Mode::CopyWrite { Mode::Write } else { Mode::Read };
        let record = Record { name, epoch, site: Site::new(site), mode };
        let landed = self.pages(bytes, |page, range| {
            page.land(range, flight, record);
            Ok(())
        });
        debug_assert!(landed.is_ok());
    }
}
