//! Who has which page: a count of users for each, and an index of whole pages by content.
//!
//! A full page is known by the tokens in it, by how many of them are of the prompt, and by the page before it: so by
//! everything up to its end and by where the prompt ended, which is all that its keys and values depend on. The index
//! is a hash table over (page before, tokens) that compares what it finds, so sharing is exact. A page that nobody uses
//! stays in the index until its memory is wanted; then the one unused longest goes first. If several sequences have
//! used it, others may yet: then it is kept in the [host tier](super::tier), from where it comes back sooner than it
//! would be computed.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::plan::{HostPage, Page, SwapOut};
use super::tier::Tier;

/// A full page's content: everything up to its end. Never reused.
pub type Content = u64;

/// The content before the first page.
pub const NOTHING: Content = 0;

/// What the index knows a page by: the content before it, its tokens, and how many of them are of the prompt.
pub type Key = (Content, Arc<[u32]>, usize);

/// The device's pages.
#[derive(Clone, Debug)]
pub struct Pages {
    page_tokens: usize,
    entries: Vec<Entry>,
    /// Pages that hold nothing of use.
    free: Vec<Page>,
    /// Unused pages in the index, by when they were last used.
    unused: BTreeMap<u64, Page>,
    index: HashMap<Key, Page>,
    /// The pages that follow a content.
    next: HashMap<Content, Vec<Page>>,
    clock: u64,
    contents: Content,
    /// The host's pages.
    pub tier: Tier,
    /// Whether pages that several have used are kept there.
    pub keeps: bool,
    /// Whether there were such pages.
    has_shared: bool,
    /// What the plan in the making has to save for that.
    saves: Vec<SwapOut>,
}

#[derive(Clone, Debug, Default)]
struct Entry {
    users: u32,
    /// Its key in `unused`.
    since: u64,
    indexed: Option<Indexed>,
}

#[derive(Clone, Debug)]
struct Indexed {
    key: Key,
    content: Content,
    /// Whether more than the sequence that filled it has used it.
    shared: bool,
}

/// Where a page with some content is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PageLocation {
    /// On the device.
    Device(Page),
    /// In the host tier alone.
    Host(Key),
}

/// What the index has of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Full pages from the start, and the content up to the end of each.
    pub pages: Vec<(PageLocation, Content)>,
    /// A page whose first tokens, so many, are the ones that follow.
    pub partial: Option<(Page, usize)>,
}

impl PrefixMatch {
    /// Its full pages that are on the device.
    pub fn on_device(&self) -> impl Iterator<Item = Page> {
        self.pages.iter().filter_map(|(place, _)| match place {
            PageLocation::Device(page) => Some(*page),
            PageLocation::Host(_) => None,
        })
    }
}

/// What [`Pages::index`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The page is in the index now, as this content.
    New(Content),
    /// Another page holds the same; it can be used instead.
    Same(Page, Content),
}

impl Pages {
    /// `count` pages of `page_tokens` tokens, and `host_count` in the host tier.
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

    /// All there are.
    pub fn count(&self) -> usize {
        self.entries.len()
    }

    /// Pages that [`take`](Self::take) could give one after the other.
    pub fn available(&self) -> usize {
        self.free.len() + self.unused.len()
    }

    /// Whether pages may soon have to leave the device that are worth keeping: few are left for those who run, or for
    /// what several have used.
    pub fn may_want_tier(&self) -> bool {
        let few = self.entries.len() / 8;
        self.available() < few || self.has_shared && self.free.len() < few
    }

    /// How many use a page.
    pub fn users(&self, page: Page) -> u32 {
        self.entries[page as usize].users
    }

    /// What is there of `tokens`, the first `prompt` of which are a prompt.
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

    /// The page after `before` that begins most like `tokens`, the first `prompt` of which are of a prompt.
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

    /// Another user for a page that is in use or in the index.
    pub fn share(&mut self, page: Page) {
        self.pin(page);
        if let Some(indexed) = &mut self.entries[page as usize].indexed {
            indexed.shared = true;
            self.has_shared = true;
        }
    }

    /// The same for who only copies from it: that is no reason to keep it in the host tier, where only whole pages are
    /// found.
    pub fn pin(&mut self, page: Page) {
        let entry = &mut self.entries[page as usize];
        if entry.users == 0 {
            self.unused.remove(&entry.since);
        }
        entry.users += 1;
    }

    /// A page for one user alone, with anything in it.
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

    /// Takes a page out of the index; keeps it in the host tier, if it is worth it.
    fn forget(&mut self, page: Page) {
        if let Some(Indexed { key, content, shared }) = self.entries[page as usize].indexed.take() {
            if shared && self.keeps {
                self.saves.extend(self.tier.keep(&key, content).map(|to| SwapOut { from: page, to }));
            }
            let before = key.0;
            self.index.remove(&key);
            if let Some(pages) = self.next.get_mut(&before) {
                pages.retain(|p| *p != page);
                if pages.is_empty() {
                    self.next.remove(&before);
                }
            }
        }
    }

    /// One user less. Release a sequence's pages from last to first: then what follows a page is forgotten before the
    /// page is.
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

    /// Puts a page, which its user has filled with `tokens` after `before`, into the index; the first `prompt` of them
    /// are of its prompt.
    pub fn index(&mut self, page: Page, before: Content, tokens: &[u32], prompt: usize) -> Put {
        debug_assert_eq!(tokens.len(), self.page_tokens);
        let key = (before, tokens.into(), prompt);
        if let Some(&same) = self.index.get(&key) {
            return Put::Same(same, self.content(same));
        }
        // One that is kept in the host tier stays what it is: what follows it is known by it.
        let content = self.tier.content(&key).unwrap_or_else(|| {
            self.contents += 1;
            self.contents
        });
        self.insert(page, key, content, false);
        Put::New(content)
    }

    /// Where in the host tier a page is, for the plan in the making to read; none if it is on the device.
    pub fn read(&mut self, place: &PageLocation) -> Option<HostPage> {
        match place {
            PageLocation::Device(_) => None,
            PageLocation::Host(key) => self.tier.read(key),
        }
    }

    /// Puts a page that comes back from the host tier into the index.
    pub fn restore(&mut self, page: Page, key: Key, content: Content) {
        self.insert(page, key, content, true);
    }

    fn insert(&mut self, page: Page, key: Key, content: Content, shared: bool) {
        self.index.insert(key.clone(), page);
        self.next.entry(key.0).or_default().push(page);
        self.entries[page as usize].indexed = Some(Indexed { key, content, shared });
    }

    /// The plan is made: what it has to save for the host tier to keep.
    pub fn end_plan(&mut self) -> Vec<SwapOut> {
        self.tier.end_plan();
        std::mem::take(&mut self.saves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` pages of 4 tokens, with `text` in the first ones.
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
        // The same tokens elsewhere are another content.
        assert_eq!(pages.find(&[5, 6, 7, 8], 99), PrefixMatch::default());
        // A page that is matched in full is shared, one short of that is begun alike.
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
        // The fourth token was generated: as a prompt's it is another.
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
        // The first two have two users, the third has one.
        used[..2].iter().for_each(|page| pages.share(*page));
        used[..2].iter().chain(used.iter().rev()).for_each(|page| pages.release(*page));
        let taken: Vec<Page> = (0..3).filter_map(|_| pages.take()).collect();
        let saves = pages.end_plan();
        assert_eq!(saves, [SwapOut { from: used[1], to: 0 }, SwapOut { from: used[0], to: 1 }]);
        // What they hold is what it was.
        let found = pages.find(&text, 99);
        assert_eq!(found.pages.iter().map(|p| p.1).collect::<Vec<_>>(), [before.pages[0].1, before.pages[1].1]);
        assert!(found.pages.iter().all(|(place, _)| matches!(place, PageLocation::Host(_))));
        let (PageLocation::Host(key), content) = found.pages[1].clone() else { panic!("{found:?}") };
        assert_eq!(pages.tier.read(&key), Some(0));
        pages.restore(taken[0], key, content);
        // What the plan reads stays; the other place goes to whom wants one.
        assert_eq!((pages.tier.available(), pages.tier.take(), pages.tier.take()), (1, Some(1), None));
        pages.end_plan();
        assert_eq!(pages.find(&text, 99), PrefixMatch::default());
        // The first is computed again, as another content; it was given up everywhere.
        assert!(
            matches!(pages.index(taken[1], NOTHING, &text[..4], 4), Put::New(content) if content > before.pages[2].1)
        );
    }
}
