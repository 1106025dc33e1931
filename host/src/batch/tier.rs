//! The pages of the host tier: those that preempted sequences have saved, and those that are kept by content.
//!
//! A kept page is a copy of a full page that several sequences have used and that the device had no more room for. When
//! its place is needed, the page that was unused longest is given up. While a plan is being made, pages that the plan
//! reads or writes are not given to anyone else.

use std::collections::{BTreeMap, HashMap};

use super::pages::{Content, Key};
use super::plan::HostPage;

/// The pages of the host tier.
#[derive(Clone, Debug)]
pub struct Tier {
    /// Number of pages in the tier.
    count: u32,
    free: Vec<HostPage>,
    kept: HashMap<Key, TierEntry>,
    /// Kept pages that the plan in the making does not touch, by the time of their last use.
    idle: BTreeMap<u64, Key>,
    /// Kept pages that the plan in the making reads or writes.
    touched: Vec<Key>,
    /// Pages that the plan in the making reads and that are free after it.
    leaving: Vec<HostPage>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct TierEntry {
    page: HostPage,
    content: Content,
    /// The page's key in `idle`, if it is there.
    since: u64,
}

impl Tier {
    /// A tier of `count` pages, all free.
    pub fn new(count: u32) -> Self {
        Self {
            count,
            free: (0..count).rev().collect(),
            kept: HashMap::new(),
            idle: BTreeMap::new(),
            touched: Vec::new(),
            leaving: Vec::new(),
            clock: 0,
        }
    }

    /// Raises the number of pages to `count`, if that is more than there are.
    pub fn grow(&mut self, count: u32) {
        self.free.extend((self.count..count).rev());
        self.count = self.count.max(count);
    }

    /// Pages that [`take`](Self::take) can still give.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Pages in which no sequence has saved anything.
    pub fn unsaved(&self) -> usize {
        self.free.len() + self.kept.len() + self.leaving.len()
    }

    /// Takes a page to save something in. Gives up a kept page if none is free.
    pub fn take(&mut self) -> Option<HostPage> {
        self.free.pop().or_else(|| {
            let (_, key) = self.idle.pop_first()?;
            self.kept.remove(&key).map(|kept| kept.page)
        })
    }

    /// Frees pages in which a sequence had saved something, once the plan in the making is executed.
    pub fn release(&mut self, pages: Vec<HostPage>) {
        self.leaving.extend(pages);
    }

    /// The content of a kept page, if it is kept.
    pub fn content(&self, key: &Key) -> Option<Content> {
        self.kept.get(key).map(|kept| kept.content)
    }

    /// The place of a kept page, which the plan in the making reads.
    pub fn read(&mut self, key: &Key) -> Option<HostPage> {
        let kept = *self.kept.get(key)?;
        self.touch(kept.since, key);
        Some(kept.page)
    }

    /// Keeps the content of a page that leaves the device. Returns where the plan in the making must save it; none if
    /// it is in the tier already, or there is no room.
    pub fn keep(&mut self, key: &Key, content: Content) -> Option<HostPage> {
        if let Some(&TierEntry { since, .. }) = self.kept.get(key) {
            self.touch(since, key);
            return None;
        }
        let page = self.take()?;
        // The clock never gives 0, so the page is not in `idle`.
        self.kept.insert(key.clone(), TierEntry { page, content, since: 0 });
        self.touched.push(key.clone());
        Some(page)
    }

    fn touch(&mut self, since: u64, key: &Key) {
        self.touched.extend(self.idle.remove(&since).map(|_| key.clone()));
    }

    /// Ends the plan in the making. Plans are executed in order, so the next one may use the pages that this one frees.
    pub fn end_plan(&mut self) {
        self.free.append(&mut self.leaving);
        for key in self.touched.drain(..) {
            self.clock += 1;
            if let Some(kept) = self.kept.get_mut(&key) {
                kept.since = self.clock;
                self.idle.insert(self.clock, key);
            }
        }
    }
}
