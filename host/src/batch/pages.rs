//! Who has which page: a count of users for each, and an index of whole pages by content.
//!
//! A full page is known by the tokens in it and by the page before it, so by everything up to its end, which is all that its keys and
//! values depend on. The index is a hash table over (page before, tokens) that compares what it finds, so sharing is exact. A
//! page that nobody uses stays in the index until its memory is wanted; then the one unused longest goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::plan::Page;

/// A full page's content: everything up to its end. Never reused.
pub type Content = u64;

/// The content before the first page.
pub const NOTHING: Content = 0;

/// The device's pages.
#[derive(Clone, Debug)]
pub struct Pages {
    page_tokens: usize,
    entries: Vec<Entry>,
    /// Pages that hold nothing of use.
    free: Vec<Page>,
    /// Unused pages in the index, by when they were last used.
    unused: BTreeMap<u64, Page>,
    index: HashMap<(Content, Arc<[u32]>), Page>,
    /// The pages that follow a content.
    next: HashMap<Content, Vec<Page>>,
    clock: u64,
    contents: Content,
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
    before: Content,
    tokens: Arc<[u32]>,
    content: Content,
}

/// What the index has of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Full pages from the start, and the content up to the end of each.
    pub pages: Vec<(Page, Content)>,
    /// A page whose first tokens, so many, are the ones that follow.
    pub partial: Option<(Page, usize)>,
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
    /// `count` pages of `page_tokens` tokens.
    pub fn new(count: u32, page_tokens: usize) -> Self {
        Self {
            page_tokens,
            entries: vec![Entry::default(); count as usize],
            free: (0..count).rev().collect(),
            unused: BTreeMap::new(),
            index: HashMap::new(),
            next: HashMap::new(),
            clock: 0,
            contents: NOTHING,
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

    /// How many use a page.
    pub fn users(&self, page: Page) -> u32 {
        self.entries[page as usize].users
    }

    /// What is there of `tokens`.
    pub fn find(&self, tokens: &[u32]) -> Found {
        let mut found = Found::default();
        let mut before = NOTHING;
        let mut chunks = tokens.chunks_exact(self.page_tokens);
        for chunk in chunks.by_ref() {
            match self.index.get(&(before, Arc::from(chunk))) {
                Some(&page) => {
                    before = self.content(page);
                    found.pages.push((page, before));
                }
                None => return Found { partial: self.begins_like(before, chunk), ..found },
            }
        }
        found.partial = self.begins_like(before, chunks.remainder());
        found
    }

    /// The page after `before` that begins most like `tokens`.
    fn begins_like(&self, before: Content, tokens: &[u32]) -> Option<(Page, usize)> {
        let same = |page: &Page| {
            let there = self.entries[*page as usize].indexed.as_ref().map_or(&[][..], |i| &i.tokens);
            there.iter().zip(tokens).take_while(|(a, b)| a == b).count()
        };
        let best = self.next.get(&before)?.iter().map(|page| (*page, same(page))).max_by_key(|(_, same)| *same)?;
        (best.1 > 0).then_some(best)
    }

    fn content(&self, page: Page) -> Content {
        self.entries[page as usize].indexed.as_ref().map_or(NOTHING, |i| i.content)
    }

    /// Another user for a page that is in use or in the index.
    pub fn share(&mut self, page: Page) {
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

    /// Takes a page out of the index.
    fn forget(&mut self, page: Page) {
        if let Some(Indexed { before, tokens, .. }) = self.entries[page as usize].indexed.take() {
            self.index.remove(&(before, tokens));
            if let Some(pages) = self.next.get_mut(&before) {
                pages.retain(|p| *p != page);
                if pages.is_empty() {
                    self.next.remove(&before);
                }
            }
        }
    }

    /// One user less. Release a sequence's pages from last to first: then what follows a page is forgotten before the page is.
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

    /// Puts a page, which its user has filled with `tokens` after `before`, into the index.
    pub fn index(&mut self, page: Page, before: Content, tokens: &[u32]) -> Put {
        debug_assert_eq!(tokens.len(), self.page_tokens);
        let tokens: Arc<[u32]> = tokens.into();
        let key = (before, tokens.clone());
        if let Some(&same) = self.index.get(&key) {
            return Put::Same(same, self.content(same));
        }
        self.contents += 1;
        self.index.insert(key, page);
        self.next.entry(before).or_default().push(page);
        self.entries[page as usize].indexed = Some(Indexed { before, tokens, content: self.contents });
        Put::New(self.contents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `count` pages of 4 tokens, with `text` in the first ones.
    fn with(count: u32, text: &[u32]) -> (Pages, Vec<Page>) {
        let mut pages = Pages::new(count, 4);
        let mut before = NOTHING;
        let mut used = Vec::new();
        for chunk in text.chunks_exact(4) {
            let page = pages.take().unwrap();
            before = match pages.index(page, before, chunk) {
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
        let found = pages.find(&[1, 2, 3, 4, 5, 6, 9, 9, 9]);
        assert_eq!(found.pages.iter().map(|p| p.0).collect::<Vec<_>>(), used[..1]);
        assert_eq!(found.partial, Some((used[1], 2)));
        // The same tokens elsewhere are another content.
        assert_eq!(pages.find(&[5, 6, 7, 8]), Found::default());
        // A page that is matched in full is shared, one short of that is begun alike.
        assert_eq!(pages.find(&[1, 2, 3]).partial, Some((used[0], 3)));
    }

    #[test]
    fn what_nobody_uses_is_kept_until_its_memory_is_wanted_leaves_first() {
        let (mut pages, used) = with(2, &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(pages.available(), 0);
        for page in used.iter().rev() {
            pages.release(*page);
        }
        assert_eq!(pages.available(), 2);
        assert_eq!(pages.find(&[1, 2, 3, 4, 5, 6, 7, 8]).pages.len(), 2);
        assert_eq!(pages.take(), Some(used[1]));
        assert_eq!(pages.find(&[1, 2, 3, 4, 5, 6, 7, 8]).pages.len(), 1);
        pages.share(used[0]);
        assert_eq!(pages.take(), None);
    }

    #[test]
    fn the_same_content_twice_is_told() {
        let (mut pages, used) = with(4, &[1, 2, 3, 4]);
        let other = pages.take().unwrap();
        assert!(matches!(pages.index(other, NOTHING, &[1, 2, 3, 4]), Put::Same(page, _) if page == used[0]));
        assert!(matches!(pages.index(other, NOTHING, &[1, 2, 3, 5]), Put::New(_)));
    }
}
