//! Tracks which pages are [packed](gpu_kernels::packed). The full pages of generating sequences are packed, so that
//! passes over many sequences read fewer bytes.
//!
//! Everything else that reads pages needs them plain: passes over prompts, the decode kernel, and moves. So a page is
//! unpacked before one of these reads it. A page that a prompt's pass reads stays plain from then on, since more such
//! prompts may come, and pages that several sequences read are in the L2 cache anyway.
//!
//! Where memory is fast, packed pages pay in some steps only ([`PackedFrom`]). In steps that are far from these, pages
//! are unpacked.

use std::collections::{HashMap, HashSet};

use super::passes::RowPass;
use crate::batch::PAGE_TOKENS;
use crate::batch::plan::{Page, Plan, Slot, TableEntry, Work};
use crate::forward;
use crate::tuning::PackedFrom;

/// Packing waits until a step has one page to pack for this many of its sequences. Then a launch is worth it.
const SEQUENCES: usize = 8;

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not packed.
    Plain,
    /// Packed.
    Packed,
    /// Not packed, and not to be packed.
    KeptPlain,
}

/// The state of all pages, and the page tables of the slots.
pub struct Packing {
    pages: Vec<State>,
    tables: Vec<Vec<Page>>,
    from: PackedFrom,
    /// As `Forward::single_warps_from`.
    single_warps: usize,
    /// For each slot, how many pages from the first on need not be looked at, because none of them is `Plain`. This is
    /// a lower bound if others share these pages.
    settled: Vec<usize>,
}

/// How a step's pages should be.
enum Wants {
    /// Packed, if they are full.
    Packed,
    /// Plain, even if they have to be unpacked.
    Plain,
    /// As they are. Between the other two, so that pages do not change to and fro.
    Same,
}

/// The changes that a step makes.
#[derive(Debug, Default)]
pub struct Orders {
    /// Pages to unpack before all else.
    pub unpack: Vec<Page>,
    /// Pages to pack before the passes.
    pub pack: Vec<Page>,
    /// The pages whose state changes, and whether each is packed then.
    pub changed: HashMap<Page, bool>,
}

impl Packing {
    /// For `pages` pages, all of them plain, and `sequences` slots. `single_warps` is what `Forward::single_warps_from`
    /// says.
    pub fn new(pages: usize, sequences: usize, from: PackedFrom, single_warps: usize) -> Self {
        let (pages, tables) = (vec![State::Plain; pages], vec![Vec::new(); sequences]);
        Self { pages, tables, from, single_warps, settled: vec![0; sequences] }
    }

    /// The same with all pages plain again.
    pub fn afresh(self) -> Self {
        Self::new(self.pages.len(), self.tables.len(), self.from, self.single_warps)
    }

    /// Takes note of a plan that is run in these passes, and returns what to pack and unpack.
    pub fn order(&mut self, plan: &Plan, passes: &[RowPass]) -> Orders {
        let mut orders = Orders::default();
        for entry in &plan.tables {
            self.put(entry);
        }
        let (mut busy, mut plain) = (HashSet::new(), HashSet::new());
        for page in plan.swap_out.iter().map(|out| out.from).chain(plan.copies.iter().map(|copy| copy.from)) {
            plain.insert(page);
            self.unpack(page, State::KeptPlain, &mut orders);
        }
        for page in plan.swap_in.iter().map(|back| back.to).chain(plan.copies.iter().map(|copy| copy.to)) {
            self.renew(page, &mut orders);
        }
        for pass in passes {
            let mut rows: HashMap<Page, usize> = HashMap::new();
            for (&slot, &position) in pass.slots.iter().zip(&pass.positions) {
                *rows.entry(self.tables[slot as usize][position as usize / PAGE_TOKENS]).or_default() += 1;
            }
            for (page, rows) in rows {
                // The rest of a page that is written in part must be finite, since some kernels read it with weights of
                // zero. So it is unpacked.
                if rows < PAGE_TOKENS {
                    self.unpack(page, State::Plain, &mut orders);
                }
                self.renew(page, &mut orders);
            }
        }
        for pass in passes.iter().filter(|pass| !reads_packed(pass)) {
            for (&slot, &position) in pass.slots.iter().zip(&pass.positions) {
                let end = position as usize / PAGE_TOKENS + 1;
                let then = if pass.prompt { State::KeptPlain } else { State::Plain };
                let is_first = busy.insert(slot);
                let first = if is_first { 0 } else { end - 1 };
                for index in first..end {
                    let page = self.tables[slot as usize][index];
                    plain.insert(page);
                    self.unpack(page, then, &mut orders);
                }
                if then == State::Plain {
                    self.settled[slot as usize] = 0;
                }
            }
        }
        let generating = || plan.work.iter().filter(|work| !busy.contains(&work.slot));
        match self.wants(generating(), passes) {
            Wants::Packed => {}
            Wants::Same => return orders,
            Wants::Plain => {
                for work in generating() {
                    self.unpack_all(work.slot, &mut orders);
                }
                return orders;
            }
        }
        for work in generating() {
            let settled =
                self.full(work.slot, work.start).take_while(|&page| self.pages[page as usize] != State::Plain);
            self.settled[work.slot as usize] += settled.count();
        }
        let wanted = |page: &Page| self.pages[*page as usize] == State::Plain && !plain.contains(page);
        let mut found: Vec<Page> =
            generating().flat_map(|work| self.full(work.slot, work.start)).filter(wanted).collect();
        found.sort_unstable();
        found.dedup();
        if found.len() * SEQUENCES < plan.work.len() {
            return orders;
        }
        for &page in &found {
            self.pages[page as usize] = State::Packed;
            orders.changed.insert(page, true);
        }
        orders.pack = found;
        orders
    }

    /// How the pages should be of the sequences that are `generating`.
    fn wants<'a>(&self, generating: impl Iterator<Item = &'a Work>, passes: &[RowPass]) -> Wants {
        let (full, count) =
            generating.fold((0, 0), |(full, count), work| (full + work.start as usize / PAGE_TOKENS, count + 1));
        let rows = passes.iter().filter(|pass| reads_packed(pass)).map(RowPass::len).max().unwrap_or(0);
        let PackedFrom { pages, mean } = self.from;
        if full >= pages && (rows >= self.single_warps || full >= mean * count) {
            Wants::Packed
        } else if rows > 0 && 4 * rows < 3 * self.single_warps && 4 * full < 3 * mean * count {
            Wants::Plain
        } else {
            Wants::Same
        }
    }

    /// Unpacks all pages of a slot.
    fn unpack_all(&mut self, slot: Slot, orders: &mut Orders) {
        for index in 0..self.tables[slot as usize].len() {
            self.unpack(self.tables[slot as usize][index], State::Plain, orders);
        }
        self.settled[slot as usize] = 0;
    }

    /// The full pages of a slot whose next row has this position, without those that are known not to be `Plain`.
    fn full(&self, slot: Slot, position: u32) -> impl Iterator<Item = Page> {
        let full = position as usize / PAGE_TOKENS;
        self.tables[slot as usize][..full].iter().copied().skip(self.settled[slot as usize])
    }

    /// Takes note of a changed entry of a page table.
    fn put(&mut self, &TableEntry { slot, index, page }: &TableEntry) {
        let (table, settled, index) =
            (&mut self.tables[slot as usize], &mut self.settled[slot as usize], index as usize);
        table.resize(table.len().max(index + 1), 0);
        table[index] = page;
        *settled = index.min(*settled);
    }

    /// Unpacks a page that is needed plain. `then` is its state afterwards.
    fn unpack(&mut self, page: Page, then: State, orders: &mut Orders) {
        let state = &mut self.pages[page as usize];
        if *state == State::Packed {
            *state = then;
            orders.unpack.push(page);
            orders.changed.insert(page, false);
        }
    }

    /// Takes note that a page is overwritten as a whole, so that it is plain without being unpacked.
    fn renew(&mut self, page: Page, orders: &mut Orders) {
        let state = &mut self.pages[page as usize];
        if *state == State::Packed {
            orders.changed.insert(page, false);
        }
        *state = State::Plain;
    }
}

/// Whether a pass is run by the kernel that reads packed pages.
fn reads_packed(pass: &RowPass) -> bool {
    !(pass.prompt || forward::is_for_few(pass.len() as u32))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::batch::plan::{PageCopy, SwapIn, SwapOut};

    const SLOTS: u32 = 5;
    const PAGES: u32 = 24;

    /// A model of the device: which pages are packed, and which the flags say are packed.
    #[derive(Default)]
    struct Model {
        packed: BTreeSet<Page>,
        flags: BTreeSet<Page>,
    }

    impl Model {
        fn run(&mut self, plan: &Plan, passes: &[RowPass], orders: &Orders, tables: &[Vec<Page>]) {
            for page in &orders.unpack {
                assert!(self.packed.remove(page), "{page} is unpacked, and was not packed");
            }
            for page in plan.swap_out.iter().map(|m| m.from).chain(plan.copies.iter().map(|m| m.from)) {
                assert!(!self.packed.contains(&page), "{page} is moved packed");
            }
            for page in plan.copies.iter().map(|m| m.to).chain(plan.swap_in.iter().map(|m| m.to)) {
                self.packed.remove(&page);
            }
            let page_of = |(&slot, &position): (&u32, &u32)| tables[slot as usize][position as usize / PAGE_TOKENS];
            for pass in passes {
                let written: Vec<Page> = pass.slots.iter().zip(&pass.positions).map(page_of).collect();
                for page in &written {
                    // All of the page is overwritten.
                    if written.iter().filter(|other| *other == page).count() == PAGE_TOKENS {
                        self.packed.remove(page);
                    }
                    assert!(!self.packed.contains(page), "a row is put into {page}, which is packed");
                }
            }
            for (&page, &is_packed) in &orders.changed {
                assert!(if is_packed { self.flags.insert(page) } else { self.flags.remove(&page) });
            }
            for page in &orders.pack {
                assert!(self.packed.insert(*page), "{page} is packed twice");
            }
            assert_eq!(self.flags, self.packed);
            for pass in passes {
                for (&slot, &position) in pass.slots.iter().zip(&pass.positions) {
                    let last = position as usize / PAGE_TOKENS;
                    let reads = tables[slot as usize][..=last].iter();
                    assert!(reads_packed(pass) || !reads.clone().any(|page| self.packed.contains(page)));
                }
            }
        }
    }

    fn pass(prompt: bool, rows: &[(Slot, u32, u32)]) -> RowPass {
        let mut pass = RowPass { prompt, ..RowPass::default() };
        for &(slot, start, count) in rows {
            pass.positions.extend(start..start + count);
            pass.slots.extend((0..count).map(|_| slot));
            pass.tokens.extend((0..count).map(|_| 0));
        }
        pass
    }

    #[test]
    fn sequences_that_are_short_in_the_mean_stay_plain() {
        // Each of four sequences has five rows at once, so that no pass is for few. Two have one full page and two have
        // three.
        let starts = [64, 64, 192, 192];
        let entry = |slot: Slot, index: u32| TableEntry { slot, index, page: 4 * slot + index };
        let packed = |mean, single_warps| {
            let mut packing = Packing::new(PAGES as usize, SLOTS as usize, PackedFrom { pages: 0, mean }, single_warps);
            let mut plan = Plan::default();
            let mut rows = Vec::new();
            for (slot, start) in (0..).zip(starts) {
                plan.tables.extend((0..4).map(|index| entry(slot, index)));
                plan.work.push(Work { slot, start, rows: 5, samples: true, most_drafts: 0 });
                rows.push((slot, start, 5));
            }
            let packed = packing.order(&plan, &[pass(false, &rows)]).pack;
            // Half of the sequences end. Those that are left are short.
            plan.work.truncate(2);
            rows.truncate(2);
            rows.iter_mut().for_each(|rows| rows.2 = 9);
            (packed, packing.order(&Plan { tables: Vec::new(), ..plan }, &[pass(false, &rows)]).unpack)
        };
        let full = vec![0, 4, 8, 9, 10, 12, 13, 14];
        assert_eq!(packed(2, 100), (full.clone(), vec![0, 4]));
        assert_eq!(packed(3, 100), (vec![], vec![]));
        // Single warps read pages of short sequences as well. With somewhat fewer rows nothing changes.
        assert_eq!(packed(3, 20), (full.clone(), vec![]));
        assert_eq!(packed(0, 100), (full, vec![]));
    }

    /// Random plans, with sequences that start, share pages, end and are moved. No kernel that cannot read packed pages
    /// meets one.
    #[test]
    fn whoever_cannot_read_a_packed_page_meets_none() {
        let mut packs = 0;
        for seed in 0..400u64 {
            let mut count = 0;
            let mut random = |n: u32| {
                count += 1;
                (model::sampling::random(seed, count) % u64::from(n)) as u32
            };
            let from = PackedFrom { pages: random(6) as usize, mean: random(4) as usize };
            let mut packing = Packing::new(PAGES as usize, SLOTS as usize, from, 16 + random(20) as usize);
            let mut model = Model::default();
            let mut tables: Vec<Vec<Page>> = vec![Vec::new(); SLOTS as usize];
            // For each slot, the next position and the end of its prompt.
            let mut at: Vec<Option<(u32, u32)>> = vec![None; SLOTS as usize];
            for _ in 0..60 {
                let mut plan = Plan::default();
                let (mut prompts, mut answers) = (Vec::new(), Vec::new());
                let mut free: Vec<Page> = (0..PAGES).collect();
                free.retain(|page| !tables.iter().zip(&at).any(|(table, at)| at.is_some() && table.contains(page)));
                for slot in 0..SLOTS {
                    let own = slot as usize;
                    if random(12) == 0 {
                        at[own] = None;
                    }
                    let entry = |(index, &page): (usize, &Page)| TableEntry { slot, index: index as u32, page };
                    if at[own].is_none() {
                        // It shares full pages of another sequence, or comes back from the host, or starts without any.
                        let other = random(SLOTS) as usize;
                        let shared = match at[other] {
                            Some((position, _)) if other != own => position as usize / PAGE_TOKENS,
                            _ => 0,
                        };
                        tables[own] = tables[other][..shared].to_vec();
                        let start = shared as u32 * PAGE_TOKENS as u32;
                        at[own] = Some((start, start + 1 + random(150)));
                        let kind = random(4);
                        if let Some(to) = free.pop().filter(|_| kind < 2) {
                            tables[own].push(to);
                            match (kind, tables[other].first()) {
                                (0, Some(&from)) if from != to && at[other].is_some() => {
                                    plan.copies.push(PageCopy { from, to });
                                }
                                _ => plan.swap_in.push(SwapIn { from: 0, to }),
                            }
                        }
                        plan.tables.extend(tables[own].iter().enumerate().map(entry));
                    }
                    if random(5) == 0 {
                        continue;
                    }
                    let Some((position, prompt)) = at[own] else { continue };
                    let rows = if position < prompt { 1 + random(prompt - position) } else { 1 + random(9) };
                    let wanted = (position + rows).div_ceil(PAGE_TOKENS as u32) as usize;
                    let there = tables[own].len();
                    while tables[own].len() < wanted && !free.is_empty() {
                        tables[own].push(free.swap_remove(random(free.len() as u32) as usize));
                    }
                    plan.tables.extend(tables[own].iter().enumerate().skip(there).map(entry));
                    if tables[own].len() < wanted {
                        at[own] = None;
                        continue;
                    }
                    if random(20) == 0 {
                        plan.swap_out.push(SwapOut { from: tables[own][0], to: 0 });
                    }
                    plan.work.push(Work { slot, start: position, rows, samples: true, most_drafts: 0 });
                    if position < prompt { &mut prompts } else { &mut answers }.push((slot, position, rows));
                    at[own] = Some((position + rows, prompt));
                }
                let passes: Vec<RowPass> =
                    [pass(true, &prompts), pass(false, &answers)].into_iter().filter(|pass| pass.len() > 0).collect();
                let orders = packing.order(&plan, &passes);
                packs += orders.pack.len();
                model.run(&plan, &passes, &orders, &tables);
            }
        }
        assert!(packs > 1000, "{packs}");
    }
}
