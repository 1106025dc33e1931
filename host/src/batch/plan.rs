//! The plan of one step of a batch. The [scheduler](super::Scheduler) makes it; a [backend](super::BatchBackend)
//! executes it.
//!
//! The parts of a [`Plan`] are executed in the order of its fields. The entries of a part are independent of each
//! other, so one launch may do them all: no page is the target of two entries, and no entry's source is another's
//! target.

/// A page of the device's cache.
pub type Page = u32;
/// A page of the host tier.
pub type HostPage = u32;
/// The number of a running sequence's place on the device, with its page table and history.
pub type Slot = u32;
/// The number of a sequence, for as long as the scheduler knows it. Numbers rise in the order of arrival.
pub type SequenceId = u64;

/// The plan of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Slots whose sequences have finished or were preempted.
    pub freed: Vec<Slot>,
    /// Pages to fill with zeros, since a sequence left numbers there that are not finite. Kernels multiply what lies
    /// behind a sequence's end by zero, and that would make NaN of them.
    pub cleared: Vec<Page>,
    /// Pages to save in the host tier.
    pub swap_out: Vec<SwapOut>,
    /// Pages to copy on the device, for sequences that continue from a shared page and will change it.
    pub copies: Vec<PageCopy>,
    /// Pages to bring back from the host tier. These are the index pairs of the token-record gather.
    pub swap_in: Vec<SwapIn>,
    /// Sequences that get a slot. Their page tables are in `tables`.
    pub started: Vec<Started>,
    /// Changes to page tables.
    pub tables: Vec<TableEntry>,
    /// The rows to run, sequence by sequence. A sequence's rows are at consecutive positions.
    pub work: Vec<Work>,
    /// Most rows of the step's decoding sequences, drafts included: the threshold of the n-gram operator
    /// (`gpu_kernels::ngram`). 0: no drafts.
    pub draft_threshold: u32,
}

impl Plan {
    /// Whether the step does nothing but generate one token for each sequence that it has rows of.
    pub fn only_generates(&self) -> bool {
        let moves = self.cleared.len() + self.swap_out.len() + self.copies.len() + self.swap_in.len();
        moves + self.started.len() == 0
            && self.work.iter().all(|work| work.rows == 1 && work.samples && work.most_drafts == 0)
    }
}

/// Saves page `from` as page `to` of the host tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapOut {
    /// A page on the device.
    pub from: Page,
    /// A page in the host tier.
    pub to: HostPage,
}

/// Copies page `from` over page `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The page with the wanted content.
    pub from: Page,
    /// A page that belongs to one sequence only.
    pub to: Page,
}

/// Brings page `from` of the host tier back as page `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapIn {
    /// A page in the host tier.
    pub from: HostPage,
    /// A page on the device.
    pub to: Page,
}

/// A sequence that gets a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// The slot.
    pub slot: Slot,
    /// The sequence.
    pub sequence: SequenceId,
}

/// Sets entry `index` of a slot's page table to `page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableEntry {
    /// The slot of the table.
    pub slot: Slot,
    /// The entry for the tokens from `index * page_tokens` on.
    pub index: u32,
    /// The page with these tokens.
    pub page: Page,
}

/// The rows of one sequence in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The slot of the sequence.
    pub slot: Slot,
    /// Position of the first row.
    pub start: u32,
    /// Number of rows, without drafts: a chunk of the prompt, or the newest token.
    pub rows: u32,
    /// Whether the last of these rows is the newest token. The next token is then chosen from it.
    pub samples: bool,
    /// Most drafts that may follow the newest token. The page table covers their positions.
    pub most_drafts: u32,
}
