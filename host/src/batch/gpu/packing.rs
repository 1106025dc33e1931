//! Which pages are [packed](gpu_kernels::packed): the full ones of sequences that generate, of which passes over many
//! sequences then read fewer bytes.
//!
//! All others that read pages want them as they were: passes over prompts, the step for one sequence, and moves. So a
//! page is unpacked before one of these meets it. One that a prompt shares stays unpacked from then on: prompts like it
//! may come, and what several sequences read is in the cache.

use std::collections::{HashMap, HashSet};

use super::passes::RowPass;
use crate::batch::PAGE_TOKENS;
use crate::batch::plan::{Page, Plan, Slot, TableEntry};
use crate::forward;

/// Pages are packed once there is one for so many sequences of a step: a launch is worth it.
const SEQUENCES: usize = 8;

/// How a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// As it was written.
    Plain,
    /// Packed.
    Packed,
    /// As it was written, and to stay so.
    KeptPlain,
}

/// What is known of all pages, and of the slots' page tables.
pub struct Packing {
    pages: Vec<State>,
    tables: Vec<Vec<Page>>,
    /// As [`BatchOptions::packed_pages`](crate::batch::BatchOptions::packed_pages).
    least: usize,
    /// Of each slot, how many pages from the first on are not plain: fewer, perhaps, where others share them.
    settled: Vec<usize>,
}

/// What a step does about it.
#[derive(Debug, Default)]
pub struct Orders {
    /// Pages to unpack before all else.
    pub unpack: Vec<Page>,
    /// Pages to pack before the passes.
    pub pack: Vec<Page>,
    /// Whether pages are packed then, as far as that has changed.
    pub changed: HashMap<Page, bool>,
}

impl Packing {
    /// Of so many pages, and sequences at once, for steps that read at least so many full pages.
    pub fn new(pages: usize, sequences: usize, least: usize) -> Self {
        let (pages, tables) = (vec![State::Plain; pages], vec![Vec::new(); sequences]);
        Self { pages, tables, least, settled: vec![0; sequences] }
    }

    /// The same, with all pages as they were written.
    pub fn afresh(self) -> Self {
        Self::new(self.pages.len(), self.tables.len(), self.least)
    }

    /// Takes a plan in, which is run in these passes.
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
                // Behind what is written there stays what is finite: some kernels read it, with weights of zero.
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
        if generating().map(|work| work.start as usize / PAGE_TOKENS).sum::<usize>() < self.least {
            return orders;
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

    /// The full pages of a slot, whose next row has this position, of which it is not known that they are not plain.
    fn full(&self, slot: Slot, position: u32) -> impl Iterator<Item = Page> {
        let full = position as usize / PAGE_TOKENS;
        self.tables[slot as usize][..full].iter().copied().skip(self.settled[slot as usize])
    }

    /// An entry of a page table changes.
    fn put(&mut self, &TableEntry { slot, index, page }: &TableEntry) {
        let (table, settled, index) =
            (&mut self.tables[slot as usize], &mut self.settled[slot as usize], index as usize);
        table.resize(table.len().max(index + 1), 0);
        table[index] = page;
        *settled = index.min(*settled);
    }

    /// A page is wanted as it was.
    fn unpack(&mut self, page: Page, then: State, orders: &mut Orders) {
        let state = &mut self.pages[page as usize];
        if *state == State::Packed {
            *state = then;
            orders.unpack.push(page);
            orders.changed.insert(page, false);
        }
    }

    /// A page is written anew.
    fn renew(&mut self, page: Page, orders: &mut Orders) {
        let state = &mut self.pages[page as usize];
        if *state == State::Packed {
            orders.changed.insert(page, false);
        }
        *state = State::Plain;
    }
}

/// Whether a pass is for the kernel that reads packed pages.
fn reads_packed(pass: &RowPass) -> bool {
    !(pass.prompt || forward::is_for_few(pass.len() as u32))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::batch::plan::{PageCopy, SwapIn, SwapOut, Work};

    const SLOTS: u32 = 5;
    const PAGES: u32 = 24;

    /// What a device would have done: how each page is, and what its owner believes.
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
                    // All of it.
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

    /// Random plans, with sequences that come, share pages, leave and are moved: nobody meets a packed page who cannot
    /// read it.
    #[test]
    fn whoever_cannot_read_a_packed_page_meets_none() {
        let mut packs = 0;
        for seed in 0..400u64 {
            let mut count = 0;
            let mut random = |n: u32| {
                count += 1;
                (model::sampling::random(seed, count) % u64::from(n)) as u32
            };
            let mut packing = Packing::new(PAGES as usize, SLOTS as usize, random(6) as usize);
            let mut model = Model::default();
            let mut tables: Vec<Vec<Page>> = vec![Vec::new(); SLOTS as usize];
            // The next position of each slot, and where its prompt ends.
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
                        // It begins like another one, by full pages, or comes back from the host, or anew.
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
