//! The pages of the cache: a count of users for each, and an index of full pages by content.
//!
//! A full page is identified by its tokens, by how many of them are of the prompt, and by the page before it. This
//! covers everything up to the page's end and where the prompt ended, which is all that its keys and values depend on.
//! The index is a hash table that compares whole keys, so sharing is exact.
//!
//! A page that no sequence uses stays in the index until its memory is needed. Then the page that was unused longest is
//! taken first. If several sequences have used it, more may; so it is kept in the [host tier](super::tier), from where
//! it comes back sooner than it could be computed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::plan::{HostPage, Page, SwapOut};
use super::tier::Tier;

/// The number of a page's content, which means everything up to its end. Numbers are never reused.
pub type Content = u64;

/// The content before the first page.
pub const NOTHING: Content = 0;

/// The key of a page in the index: the content before it, its tokens, and how many of them are of the prompt.
pub type Key = (Content, Arc<[u32]>, usize);

/// The pages of the device.
#[derive(Clone, Debug)]
pub struct Pages {
    page_tokens: usize,
    entries: Vec<Entry>,
    /// Pages without useful content.
    free: Vec<Page>,
    /// Unused pages that are in the index, by the time of their last use.
    unused: BTreeMap<u64, Page>,
    index: HashMap<Key, Page>,
    /// For each content, the pages in the index that follow it.
    next: HashMap<Content, Vec<Page>>,
    clock: u64,
    contents: Content,
    /// The pages of the host tier.
    pub tier: Tier,
    /// Whether pages that several sequences have used are kept in the host tier.
    pub keeps: bool,
    /// Whether there ever was such a page.
    has_shared: bool,
    /// The pages that the plan in the making must save in the host tier.
    saves: Vec<SwapOut>,
}

#[derive(Clone, Debug, Default)]
struct Entry {
    users: u32,
    /// The page's key in `unused`.
    since: u64,
    indexed: Option<Indexed>,
}

#[derive(Clone, Debug)]
struct Indexed {
    key: Key,
    content: Content,
    /// Whether a sequence other than the one that filled it has used it.
    shared: bool,
}

/// Where a page with some content is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageLocation {
    /// On the device.
    Device(Page),
    /// Only in the host tier.
    Host(Key),
}

/// What the index has of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Full pages from the start on, each with the content up to its end.
    pub pages: Vec<(PageLocation, Content)>,
    /// A page whose first tokens are the next ones of the text, and how many those are.
    pub partial: Option<(Page, usize)>,
}

impl PrefixMatch {
    /// The full pages that are on the device.
    pub fn on_device(&self) -> impl Iterator<Item = Page> {
        self.pages.iter().filter_map(|(place, _)| match place {
            PageLocation::Device(page) => Some(*page),
            PageLocation::Host(_) => None,
        })
    }
}

/// The result of [`Pages::index`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The page was added to the index, with this content.
    New(Content),
    /// Another page already has the same content, and can be used instead.
    Same(Page, Content),
}

impl Pages {
    /// `count` pages of `page_tokens` tokens on the device, and `host_count` pages in the host tier.
    pub fn new(count: u32, host_count: u32, page_tokens: usize) -> Self {
        Self {
            page_tokens,
            entries: vec![Entry::default(); count as usize],
            free: (0..count).rev().collect(),
            unused: BTreeMap::new(),
            index: HashMap::new(),
            next: HashMap::new(),
            clock: 0,
            contents: NOTHING,
            has_shared: false,
            tier: Tier::new(host_count),
            keeps: false,
            saves: Vec::new(),
        }
    }

    /// Number of pages on the device.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// Pages that [`take`](Self::take) can still give.
    pub fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Whether pages that are worth keeping may soon have to leave the device: few pages are available, or few are free
    /// while there are pages that several have used.
    pub fn may_want_tier(&self) -> bool {
        let few = self.entries.len() / 8;
        self.available() < few || self.has_shared && self.free.len() < few
    }

    /// Number of users of a page.
    pub fn users(&self, page: Page) -> u32 {
        self.entries[page as usize].users
    }

    /// Finds what there is of `tokens`. The first `prompt` of them are of the prompt.
    pub fn find(&self, tokens: &[u32], prompt: usize) -> PrefixMatch {
        let mut found = PrefixMatch::default();
        let (mut before, mut prompt) = (NOTHING, prompt);
        let mut chunks = tokens.chunks_exact(self.page_tokens);
        for chunk in chunks.by_ref() {
            let key = (before, Arc::from(chunk), prompt.min(self.page_tokens));
            if let Some(&page) = self.index.get(&key) {
                before = self.content(page);
                found.pages.push((PageLocation::Device(page), before));
            } else if let Some(content) = self.tier.content(&key) {
                before = content;
                found.pages.push((PageLocation::Host(key), before));
            } else {
                return PrefixMatch { partial: self.begins_like(before, chunk, prompt), ..found };
            }
            prompt = prompt.saturating_sub(self.page_tokens);
        }
        found.partial = self.begins_like(before, chunks.remainder(), prompt);
        found
    }

    /// The page after content `before` that has the most leading tokens in common with `tokens`. The first `prompt` of
    /// these are of the prompt.
    fn begins_like(&self, before: Content, tokens: &[u32], prompt: usize) -> Option<(Page, usize)> {
        let prompt = prompt.min(self.page_tokens);
        let same = |page: &Page| {
            let Some(Indexed { key: (_, there, theirs), .. }) = &self.entries[*page as usize].indexed else { return 0 };
            let same = there.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            if *theirs == prompt { same } else { same.min(prompt).min(*theirs) }
        };
        let best = self.next.get(&before)?.iter().map(|page| (*page, same(page))).max_by_key(|(_, same)| *same)?;
        (best.1 > 0).then_some(best)
    }

    fn content(&self, page: Page) -> Content {
        self.entries[page as usize].indexed.as_ref().map_or(NOTHING, |i| i.content)
    }

    /// Adds a user to a page that is in use or in the index.
    pub fn share(&mut self, page: Page) {
        self.pin(page);
        if let Some(indexed) = &mut self.entries[page as usize].indexed {
            indexed.shared = true;
            self.has_shared = true;
        }
    }

    /// As [`share`](Self::share), for a user that only copies from the page. Such use is no reason to keep the page in
    /// the host tier, where only full pages are looked for.
    pub fn pin(&mut self, page: Page) {
        let entry = &mut self.entries[page as usize];
        if entry.users == 0 {
            self.unused.remove(&entry.since);
        }
        entry.users += 1;
    }

    /// Takes a page for a single user. Its content is undefined.
    pub fn take(&mut self) -> Option<Page> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let (_, page) = self.unused.pop_first()?;
                self.forget(page);
                page
            }
        };
        self.entries[page as usize].users = 1;
        Some(page)
    }

    /// Removes a page from the index. Keeps its content in the host tier, if that is worth it.
    fn forget(&mut self, page: Page) {
        if let Some(Indexed { key, content, shared }) = &self.entries[page as usize].indexed
            && *shared
            && self.keeps
        {
            self.saves.extend(self.tier.keep(key, *content).map(|to| SwapOut { from: page, to }));
        }
        self.discard(page);
    }

    /// Removes a page from the index, if it is there. Its content is of no use to anyone.
    pub fn discard(&mut self, page: Page) {
        let Some(Indexed { key, .. }) = self.entries[page as usize].indexed.take() else { return };
        self.index.remove(&key);
        if let Some(pages) = self.next.get_mut(&key.0) {
            pages.retain(|p| *p != page);
            if pages.is_empty() {
                self.next.remove(&key.0);
            }
        }
    }

    /// Removes a user from a page. Release a sequence's pages from last to first, so that the pages after a page are
    /// forgotten before it.
    pub fn release(&mut self, page: Page) {
        let entry = &mut self.entries[page as usize];
        debug_assert!(entry.users > 0, "page {page} has no user to lose");
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        if entry.indexed.is_some() {
            self.clock += 1;
            entry.since = self.clock;
            self.unused.insert(self.clock, page);
        } else {
            self.free.push(page);
        }
    }

    /// Adds a page to the index. Its user has filled it with `tokens`, which follow content `before`. The first
    /// `prompt` of these are of the prompt.
    pub fn index(&mut self, page: Page, before: Content, tokens: &[u32], prompt: usize) -> Put {
        debug_assert_eq!(tokens.len(), self.page_tokens);
        let key = (before, tokens.into(), prompt);
        if let Some(&same) = self.index.get(&key) {
            return Put::Same(same, self.content(same));
        }
        // A page that is kept in the host tier keeps its content number, as the keys of the pages after it contain that
        // number.
        let content = self.tier.content(&key).unwrap_or_else(|| {
            self.contents += 1;
            self.contents
        });
        self.insert(page, key, content, false);
        Put::New(content)
    }

    /// The place of a page in the host tier, which the plan in the making reads. None if the page is on the device.
    pub fn read(&mut self, place: &PageLocation) -> Option<HostPage> {
        match place {
            PageLocation::Device(_) => None,
            PageLocation::Host(key) => self.tier.read(key),
        }
    }

    /// Adds a page that comes back from the host tier to the index.
    pub fn restore(&mut self, page: Page, key: Key, content: Content) {
        self.insert(page, key, content, true);
    }

    fn insert(&mut self, page: Page, key: Key, content: Content, shared: bool) {
        self.index.insert(key.clone(), page);
        self.next.entry(key.0).or_default().push(page);
        self.entries[page as usize].indexed = Some(Indexed { key, content, shared });
    }

    /// Ends the plan in the making. Returns the pages that it must save for the host tier to keep.
    pub fn end_plan(&mut self) -> Vec<SwapOut> {
        self.tier.end_plan();
        std::mem::take(&mut self.saves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes `count` pages of 4 tokens, with `text` in the first ones.
    fn with(count: u32, text: &[u32]) -> (Pages, Vec<Page>) {
        let mut pages = Pages::new(count, 2, 4);
        let mut before = NOTHING;
        let mut used = Vec::new();
        for chunk in text.chunks_exact(4) {
            let page = pages.take().unwrap();
            before = match pages.index(page, before, chunk, 4) {
                Put::New(content) => content,
                Put::Same(..) => panic!("the index was empty"),
            };
            used.push(page);
        }
        (pages, used)
    }

    #[test]
    fn a_text_is_found_by_whole_pages_and_the_start_of_one_more() {
        let (pages, used) = with(8, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let found = pages.find(&[1, 2, 3, 4, 5, 6, 9, 9, 9], 99);
        assert_eq!(found.pages.iter().map(|p| p.0.clone()).collect::<Vec<_>>(), [PageLocation::Device(used[0])]);
        assert_eq!(found.partial, Some((used[1], 2)));
        // The same tokens at another place are another content.
        assert_eq!(pages.find(&[5, 6, 7, 8], 99), PrefixMatch::default());
        // A page with one token less to match is not shared, but it begins alike.
        assert_eq!(pages.find(&[1, 2, 3], 99).partial, Some((used[0], 3)));
    }

    #[test]
    fn what_nobody_uses_is_kept_until_its_memory_is_wanted_leaves_first() {
        let (mut pages, used) = with(2, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(pages.available(), 0);
        for page in used.iter().rev() {
            pages.release(*page);
        }
        assert_eq!(pages.available(), 2);
        assert_eq!(pages.find(&[1, 2, 3, 4, 5, 6, 7, 8], 99).pages.len(), 2);
        assert_eq!(pages.take(), Some(used[1]));
        assert_eq!(pages.find(&[1, 2, 3, 4, 5, 6, 7, 8], 99).pages.len(), 1);
        pages.share(used[0]);
        assert_eq!(pages.take(), None);
    }

    #[test]
    fn the_same_content_twice_is_told() {
        let (mut pages, used) = with(4, &[1, 2, 3, 4]);
        let other = pages.take().unwrap();
        assert!(matches!(pages.index(other, NOTHING, &[1, 2, 3, 4], 4), Put::Same(page, _) if page == used[0]));
        assert!(matches!(pages.index(other, NOTHING, &[1, 2, 3, 5], 4), Put::New(_)));
    }

    #[test]
    fn a_page_with_generated_tokens_is_found_where_the_prompt_ended_alike() {
        let mut pages = Pages::new(4, 0, 4);
        let page = pages.take().unwrap();
        assert!(matches!(pages.index(page, NOTHING, &[1, 2, 3, 4], 3), Put::New(_)));
        assert_eq!(pages.find(&[1, 2, 3, 4, 5], 3).pages.len(), 1);
        // The fourth token was generated. As a token of the prompt, it makes another content.
        assert_eq!(pages.find(&[1, 2, 3, 4, 5], 4), PrefixMatch { pages: vec![], partial: Some((page, 3)) });
        assert_eq!(pages.find(&[1, 2, 3, 4, 5], 2), PrefixMatch { pages: vec![], partial: Some((page, 2)) });
        assert_eq!(pages.find(&[1, 2, 3, 9], 3).partial, Some((page, 3)));
        let other = pages.take().unwrap();
        assert!(matches!(pages.index(other, NOTHING, &[1, 2, 3, 4], 4), Put::New(_)));
    }
    #[test]
    fn what_several_have_used_is_kept_in_the_host_tier() {
        let text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let (mut pages, used) = with(3, &text);
        pages.keeps = true;
        let before = pages.find(&text, 99);
        // The first two pages have two users, the third has one.
        used[..2].iter().for_each(|page| pages.share(*page));
        used[..2].iter().chain(used.iter().rev()).for_each(|page| pages.release(*page));
        let taken: Vec<Page> = (0..3).filter_map(|_| pages.take()).collect();
        let saves = pages.end_plan();
        assert_eq!(saves, [SwapOut { from: used[1], to: 0 }, SwapOut { from: used[0], to: 1 }]);
        // They still have the contents that they had.
        let found = pages.find(&text, 99);
        assert_eq!(found.pages.iter().map(|p| p.1).collect::<Vec<_>>(), [before.pages[0].1, before.pages[1].1]);
        assert!(found.pages.iter().all(|(place, _)| matches!(place, PageLocation::Host(_))));
        let (PageLocation::Host(key), content) = found.pages[1].clone() else { panic!("{found:?}") };
        assert_eq!(pages.tier.read(&key), Some(0));
        pages.restore(taken[0], key, content);
        // The page that the plan reads stays; the other can be taken.
        assert_eq!((pages.tier.available(), pages.tier.take(), pages.tier.take()), (1, Some(1), None));
        pages.end_plan();
        assert_eq!(pages.find(&text, 99), PrefixMatch::default());
        // The first page's content is computed again. It gets a new number, as the old one was given up everywhere.
        assert!(
            matches!(pages.index(taken[1], NOTHING, &text[..4], 4), Put::New(content) if content > before.pages[2].1)
        );
    }
}
