//! A device that knows, for every place in every page, which text it holds.

use std::collections::HashMap;

use host::batch::plan::{Page, SequenceId, Slot};
use host::batch::{Limits, Plan};

/// What a place holds: a hash of all tokens up to its own, which is included.
pub type Text = u64;
const NOTHING: Text = 0;

fn then(text: Text, token: u32) -> Text {
    model::sampling::random(text, token.into())
}

/// The token that follows `tokens`: the device's "model". The alphabet is small, so that texts meet again.
pub fn next(tokens: &[u32]) -> u32 {
    (tokens.iter().fold(7, |text, &token| then(text, token)) % 3) as u32
}

/// A device that executes plans literally.
pub struct Device {
    limits: Limits,
    pages: Vec<Vec<Text>>,
    host: Vec<Vec<Text>>,
    /// The sequence in each slot, with its page table.
    pub slots: HashMap<Slot, (SequenceId, Vec<Page>)>,
}

impl Device {
    /// A device that holds nothing.
    pub fn new(limits: Limits) -> Self {
        let store = |pages: u32| vec![vec![NOTHING; limits.page_tokens]; pages as usize];
        Self { pages: store(limits.pages), host: store(limits.host_pages), limits, slots: HashMap::new() }
    }

    /// Executes the plan's moves as a launch for each part would: a part does all its reads before its writes.
    pub fn prepare(&mut self, plan: &Plan) {
        for slot in &plan.freed {
            assert!(self.slots.remove(slot).is_some(), "slot {slot} was not taken");
        }
        let mut targets = Vec::new();
        for swap in &plan.swap_out {
            self.host[swap.to as usize] = self.pages[swap.from as usize].clone();
            targets.push(swap.to);
        }
        let distinct = |mut targets: Vec<u32>| {
            let count = targets.len();
            targets.sort_unstable();
            targets.dedup();
            assert_eq!(targets.len(), count, "a page is the target of two: {plan:?}");
        };
        distinct(targets);
        let sources: Vec<Vec<Text>> = plan.copies.iter().map(|copy| self.pages[copy.from as usize].clone()).collect();
        for (copy, source) in plan.copies.iter().zip(sources) {
            assert!(plan.copies.iter().all(|other| other.from != copy.to), "a source is a target: {plan:?}");
            self.pages[copy.to as usize] = source;
        }
        for swap in &plan.swap_in {
            self.pages[swap.to as usize] = self.host[swap.from as usize].clone();
        }
        let copied = plan.copies.iter().map(|c| c.to);
        distinct(copied.chain(plan.swap_in.iter().map(|s| s.to)).collect());
        for started in &plan.started {
            assert!(started.slot < self.limits.sequences);
            let before = self.slots.insert(started.slot, (started.sequence, Vec::new()));
            assert!(before.is_none(), "slot {} is taken", started.slot);
        }
        for entry in &plan.tables {
            let (_, table) = self.slots.get_mut(&entry.slot).expect("a table of a running sequence");
            table.resize(table.len().max(entry.index as usize + 1), Page::MAX);
            table[entry.index as usize] = entry.page;
        }
    }

    /// Runs the row of a position; everything before it must be in place. The first `prompt` tokens are the prompt.
    pub fn row(&mut self, slot: Slot, tokens: &[u32], prompt: usize, position: usize) {
        let size = self.limits.page_tokens;
        let table = &self.slots[&slot].1;
        let mut text = NOTHING;
        // Where `prompts_apart`, generated tokens leave other bits than a prompt's.
        let apart = self.limits.prompts_apart;
        let place = |at: usize| tokens[at] + if apart && at >= prompt { 1000 } else { 0 };
        for at in 0..position {
            text = then(text, place(at));
            let page = table[at / size] as usize;
            assert_eq!(self.pages[page][at % size], text, "slot {slot}: position {at} of {tokens:?} is lost");
        }
        let page = table[position / size] as usize;
        self.pages[page][position % size] = then(text, place(position));
    }
}
