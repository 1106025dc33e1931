//! Who has which page of the host tier: what preempted sequences saved, and pages that are worth keeping by content.
//!
//! A kept page is a copy of a whole page that several sequences began with and that the device had no more room for. It
//! is given up, the one unused longest first, when its place is wanted. While a plan is made, nothing that the plan
//! reads or writes there changes hands.

use std::collections::{BTreeMap, HashMap};

use super::pages::{Content, Key};
use super::plan::HostPage;

/// The host tier's pages.
#[derive(Clone, Debug)]
pub struct Tier {
    /// All pages of the tier.
    count: u32,
    free: Vec<HostPage>,
    kept: HashMap<Key, TierEntry>,
    /// Kept pages that the plan in the making does not touch, by when they were last used.
    idle: BTreeMap<u64, Key>,
    /// Kept pages that it does.
    touched: Vec<Key>,
    /// Pages that it reads, and that are free after it.
    leaving: Vec<HostPage>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct TierEntry {
    page: HostPage,
    content: Content,
    /// Its key in `idle`, if it is there.
    since: u64,
}

impl Tier {
    /// Of `count` pages.
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

    /// From now on there are so many pages, no fewer than before.
    pub fn grow(&mut self, count: u32) {
        self.free.extend((self.count..count).rev());
        self.count = self.count.max(count);
    }

    /// Pages that [`take`](Self::take) could give one after the other.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Pages that no sequence has saved anything in.
    pub fn unsaved(&self) -> usize {
        self.free.len() + self.kept.len() + self.leaving.len()
    }

    /// A page to save something in.
    pub fn take(&mut self) -> Option<HostPage> {
        self.free.pop().or_else(|| {
            let (_, key) = self.idle.pop_first()?;
            self.kept.remove(&key).map(|kept| kept.page)
        })
    }

    /// What was saved in these is wanted no longer, once the plan in the making is executed.
    pub fn release(&mut self, pages: Vec<HostPage>) {
        self.leaving.extend(pages);
    }

    /// The content of a kept page.
    pub fn content(&self, key: &Key) -> Option<Content> {
        self.kept.get(key).map(|kept| kept.content)
    }

    /// Where a kept page is, for the plan in the making to read.
    pub fn read(&mut self, key: &Key) -> Option<HostPage> {
        let kept = *self.kept.get(key)?;
        self.touch(kept.since, key);
        Some(kept.page)
    }

    /// Keeps a page that leaves the device. Where the plan in the making has to save it, unless it is there already or
    /// there is no room.
    pub fn keep(&mut self, key: &Key, content: Content) -> Option<HostPage> {
        if let Some(&TierEntry { since, .. }) = self.kept.get(key) {
            self.touch(since, key);
            return None;
        }
        let page = self.take()?;
        // No time has this number.
        self.kept.insert(key.clone(), TierEntry { page, content, since: 0 });
        self.touched.push(key.clone());
        Some(page)
    }

    fn touch(&mut self, since: u64, key: &Key) {
        self.touched.extend(self.idle.remove(&since).map(|_| key.clone()));
    }

    /// The plan is made: by the next one, it is executed.
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
