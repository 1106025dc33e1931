//! Who has which page: a count of users for each, and an index of whole pages by content.
//!
//! A full page is known by the tokens in it, by how many of them are of the prompt, and by the page before it: so by everything up to its end and
//! by where the prompt ended, which is all that its keys and values depend on. The index is a hash table over (page before, tokens) that compares
//! what it finds, so sharing is exact. A page that nobody uses stays in the index until its memory is wanted; then the one unused longest goes first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::plan::Page;

/// A full page's content: everything up to its end. Never reused.
pub type Content = u64;

/// The content before the first page.
pub const NOTHING: Content = 0;

/// What the index knows a page by: the content before it, its tokens, and how many of them are of the prompt.
type Key = (Content, Arc<[u32]>, usize);

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

    /// What is there of `tokens`, the first `prompt` of which are a prompt.
    pub fn find(&self, tokens: &[u32], prompt: usize) -> Found {
        let mut found = Found::default();
        let (mut before, mut prompt) = (NOTHING, prompt);
        let mut chunks = tokens.chunks_exact(self.page_tokens);
        for chunk in chunks.by_ref() {
            match self.index.get(&(before, Arc::from(chunk), prompt.min(self.page_tokens))) {
                Some(&page) => {
                    before = self.content(page);
                    found.pages.push((page, before));
                }
                None => return Found { partial: self.begins_like(before, chunk, prompt), ..found },
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
        if let Some(Indexed { key, .. }) = self.entries[page as usize].indexed.take() {
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

    /// Puts a page, which its user has filled with `tokens` after `before`, into the index; the first `prompt` of them are of its prompt.
    pub fn index(&mut self, page: Page, before: Content, tokens: &[u32], prompt: usize) -> Put {
        debug_assert_eq!(tokens.len(), self.page_tokens);
        let key = (before, tokens.into(), prompt);
        if let Some(&same) = self.index.get(&key) {
            return Put::Same(same, self.content(same));
        }
        self.contents += 1;
        self.index.insert(key.clone(), page);
        self.next.entry(before).or_default().push(page);
        self.entries[page as usize].indexed = Some(Indexed { key, content: self.contents });
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
        assert_eq!(found.pages.iter().map(|p| p.0).collect::<Vec<_>>(), used[..1]);
        assert_eq!(found.partial, Some((used[1], 2)));
        // The same tokens elsewhere are another content.
        assert_eq!(pages.find(&[5, 6, 7, 8], 99), Found::default());
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
        let mut pages = Pages::new(4, 4);
        let page = pages.take().unwrap();
        assert!(matches!(pages.index(page, NOTHING, &[1, 2, 3, 4], 3), Put::New(_)));
        assert_eq!(pages.find(&[1, 2, 3, 4, 5], 3).pages.len(), 1);
        // The fourth token was generated: as a prompt's it is another.
        assert_eq!(pages.find(&[1, 2, 3, 4, 5], 4), Found { pages: vec![], partial: Some((page, 3)) });
        assert_eq!(pages.find(&[1, 2, 3, 4, 5], 2), Found { pages: vec![], partial: Some((page, 2)) });
        assert_eq!(pages.find(&[1, 2, 3, 9], 3).partial, Some((page, 3)));
        let other = pages.take().unwrap();
        assert!(matches!(pages.index(other, NOTHING, &[1, 2, 3, 4], 4), Put::New(_)));
    }
}
