//! Admission: which waiting sequences start, when, and with which pages.

use std::collections::BTreeSet;
use std::ops::Bound;

use super::{Known, Placed, Scheduler, Step, Waiting};
use crate::batch::limits::Limits;
use crate::batch::pages::{PageLocation, PrefixMatch};
use crate::batch::plan::{HostPage, Page, PageCopy, Plan, SequenceId, Started, SwapIn, TableEntry};

impl Scheduler {
    /// Decides whether prompts should wait to be read together with more of them. This concerns the prompts that are
    /// partly read, and the waiting sequences that have room. If they should wait, returns their number; if not, none.
    ///
    /// They wait until the tokens that they miss are worth a pass of their own. This is the ski-rental rule: rent until
    /// the rent paid equals the price. If none are left that could join them, they do not wait.
    pub(super) fn better_together(&self) -> Option<usize> {
        let Limits { prompt_rows, prompt_share, .. } = self.limits;
        if !self.gathers_prompts() {
            return None;
        }
        let generating = self.ready().count();
        let (count, waiting) = self.prompts_at_hand(|rows, count| {
            rows >= prompt_rows as usize || (self.missed + count) * prompt_share as usize >= generating
        })?;
        let may_join = self.expects_more || waiting < self.waiting.len();
        (count > 0 && may_join).then_some(count)
    }

    /// Whether sequences that generate should wait until more prompts are read: while two whole passes over prompts can
    /// run at once. Since reading the weights is most of a step's time, it is better shared by more sequences. This
    /// ends soon, since each pass takes slots. But if a sequence has ended while others waited, they go on: it might
    /// never end where answers are short.
    pub(super) fn better_after(&self) -> bool {
        let overtaken = self.waited && self.has_ended;
        !overtaken
            && self.gathers_prompts()
            && self.prompts_at_hand(|rows, _| rows >= 2 * self.limits.prompt_rows as usize).is_none()
    }

    /// Whether it matters how many prompts are read together. A sequence with saved pages has little to run, so it does
    /// not wait for others.
    fn gathers_prompts(&self) -> bool {
        self.limits.prompt_rows > 0 && self.waiting.values().next().is_none_or(|first| first.saved.is_empty())
    }

    /// Counts the prompts that can be read now: those that are partly read, then waiting sequences that have room.
    /// Returns how many they are, and how many of them wait. None as soon as `enough` is true of their rows and their
    /// number.
    fn prompts_at_hand(&self, enough: impl Fn(usize, usize) -> bool) -> Option<(usize, usize)> {
        let reading = self.running.values().map(|sequence| sequence.known.left()).filter(|&left| left > 1);
        let (mut rows, mut count) = reading.fold((0, 0), |(rows, count), left| (rows + left, count + 1));
        if count > 0 && enough(rows, count) {
            return None;
        }
        let partly_read = count;
        let mut room = self.pages.available().saturating_sub(self.running.len());
        // If several waiting sequences share an unused page, only the first of them takes it from the available ones.
        let mut idle = BTreeSet::new();
        let mut whole = 0;
        for (more, Waiting { known, .. }) in (1..).zip(self.waiting.values().take(self.slots.len())) {
            whole += self.whole(known);
            if !self.may_start(more, whole) {
                break;
            }
            let found = self.pages.find(known.without_newest(), known.prompt);
            let taken = self.takes(known, &found, |page| self.pages.users(page) > 0 || !idle.insert(page));
            if taken > room {
                break;
            }
            // One page more is left for each sequence that runs.
            room = room.saturating_sub(taken + 1);
            rows += known.tokens.len() - known.computed.max(found.pages.len() * self.limits.page_tokens);
            count += 1;
            if enough(rows, count) {
                return None;
            }
        }
        Some((count, count - partly_read))
    }

    /// Starts waiting sequences, in the order of arrival.
    pub(super) fn start(&mut self, plan: &mut Plan, step: &mut Step) {
        let mut passed = Bound::Unbounded;
        while step.reads() && !self.slots.is_empty() {
            let Some((&id, waiting)) = self.waiting.range((passed, Bound::Unbounded)).next() else { break };
            passed = Bound::Excluded(id);
            if self.better_later(waiting) {
                continue;
            }
            if !self.may_start(1, self.whole(&waiting.known)) || !self.take_up(id, plan, step) {
                break;
            }
            if let Some(sequence) = self.running.get(&id) {
                step.read(id, sequence);
            }
        }
    }

    /// Whether `more` sequences may start, which take `pages` pages at their greatest length. A sequence that is read
    /// before it may generate must not take a page that others will need.
    fn may_start(&self, more: usize, pages: usize) -> bool {
        let to_come = || self.running.values().map(|sequence| self.whole(&sequence.known) - sequence.pages.len());
        let is_ahead = self.running.len() + more > self.limits.generating as usize;
        !is_ahead || to_come().sum::<usize>() + pages <= self.pages.available()
    }

    /// Pages of a sequence at its greatest length.
    fn whole(&self, known: &Known) -> usize {
        known.max_length.div_ceil(self.limits.page_tokens)
    }

    /// Whether a prompt that is being read will leave more pages to share with this sequence than there are at present.
    fn better_later(&self, waiting: &Waiting) -> bool {
        let (tokens, prompt) = (waiting.known.without_newest(), waiting.known.prompt);
        let size = self.limits.page_tokens;
        let mut now = None;
        self.running.values().filter(|other| other.known.left() > 1).any(|other| {
            let mut same = other.known.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            if other.known.prompt != prompt {
                same = same.min(prompt).min(other.known.prompt);
            }
            let (same, saved) = (same / size, waiting.known.computed / size);
            same > saved && same > *now.get_or_insert_with(|| self.pages.find(tokens, prompt).pages.len())
        })
    }

    /// How many of the available pages a waiting sequence takes for all its tokens. Pages that it shares and that are
    /// in use do not count.
    fn takes(&self, known: &Known, found: &PrefixMatch, mut is_used: impl FnMut(Page) -> bool) -> usize {
        let used = found.on_device().filter(|page| is_used(*page)).count();
        known.tokens.len().div_ceil(self.limits.page_tokens) - used
    }

    /// Gives a waiting sequence a slot, and pages for all its tokens. Returns false if there are not enough pages.
    fn take_up(&mut self, id: SequenceId, plan: &mut Plan, step: &mut Step) -> bool {
        let Some(waiting) = self.waiting.get(&id) else { return false };
        let size = self.limits.page_tokens;
        let found = self.pages.find(waiting.known.without_newest(), waiting.known.prompt);
        let total = waiting.known.tokens.len().div_ceil(size);
        let shared = found.pages.len();
        let there: Vec<Page> = found.on_device().collect();
        let (available, taken) =
            (self.pages.available(), self.takes(&waiting.known, &found, |page| self.pages.users(page) > 0));
        if taken + self.running.len() > available {
            return false;
        }
        // The source of a copy must be there when the step begins, and must not be reused before the step ends. If a
        // sequence has more tokens saved than the copy would give, it needs no copy.
        let partial = found.partial.filter(|(page, same)| {
            let pinned = (self.pages.users(*page) == 0) as usize;
            let better = shared * size + same > waiting.known.computed;
            better && taken + pinned <= available && plan.swap_in.iter().all(|swap| swap.to != *page)
        });
        let slot = self.slots.pop_first().expect("who starts has a slot");
        let Waiting { mut known, saved } = self.waiting.remove(&id).expect("found above");
        let before = known.computed;
        // Shared pages get their new user first, so that they are not given up when pages are taken below.
        for &page in &there {
            self.pages.share(page);
        }
        if let Some((page, _)) = partial {
            self.pages.pin(page);
            step.sources.push(page);
        }
        let on_host: Vec<Option<HostPage>> = found.pages.iter().map(|(place, _)| self.pages.read(place)).collect();
        let contents = found.pages.iter().map(|(_, content)| *content).collect();
        let mut pages = Vec::with_capacity(total);
        for ((place, content), from) in found.pages.into_iter().zip(on_host) {
            match (place, from) {
                (PageLocation::Device(page), _) => pages.push(page),
                (PageLocation::Host(key), from) => {
                    let from = from.expect("nothing has left the tier since it was found");
                    let to = self.pages.take().expect("counted above");
                    plan.swap_in.push(SwapIn { from, to });
                    self.pages.restore(to, key, content);
                    self.counts.restored_tokens += size as u64;
                    pages.push(to);
                }
            }
        }
        known.computed = known.computed.max(shared * size);
        while pages.len() < total {
            let page = self.pages.take().expect("counted above");
            match partial {
                Some((from, same)) if pages.len() == shared => {
                    plan.copies.push(PageCopy { from, to: page });
                    known.computed = shared * size + same;
                }
                _ => {
                    plan.swap_in.extend(saved.get(pages.len()).map(|&from| SwapIn { from, to: page }));
                }
            }
            pages.push(page);
        }
        self.counts.shared_tokens += (known.computed - before) as u64;
        self.pages.tier.release(saved);
        plan.started.push(Started { slot, sequence: id });
        let entry = |(index, &page): (usize, &Page)| TableEntry { slot, index: index as u32, page };
        plan.tables.extend(pages.iter().enumerate().map(entry));
        self.running.insert(id, Placed { known, slot, pages, contents });
        true
    }
}

impl Known {
    /// The tokens whose keys and values may come from other pages. The newest token must run in any case, for the
    /// choice after it.
    fn without_newest(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - 1]
    }
}
