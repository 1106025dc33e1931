//! What one step of a batch does: decided by the [scheduler](super::Scheduler), executed by a
//! [backend](super::BatchBackend).
//!
//! The parts of a [`Plan`] are executed in the order of its fields. Within a part, entries are independent of each
//! other, so that one launch may do them all: no page is the target of two, and no source of one is the target of
//! another.

/// A page of the device's cache.
pub type Page = u32;
/// A page of the host tier.
pub type HostPage = u32;
/// Where a running sequence keeps its state on the device: its row of the page tables, its history.
pub type Slot = u32;
/// A sequence, for as long as the scheduler knows it. Rising with arrival.
pub type SequenceId = u64;

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Slots whose sequences left: finished, or preempted.
    pub freed: Vec<Slot>,
    /// Pages to save in the host tier.
    pub swap_out: Vec<SwapOut>,
    /// Pages to copy on the device: a sequence goes on from a shared page that it will change.
    pub copies: Vec<PageCopy>,
    /// Pages to bring back from the host tier: the index pairs of the token-record gather.
    pub swap_in: Vec<SwapIn>,
    /// Sequences that take a slot; their page tables follow in `tables`.
    pub started: Vec<Started>,
    /// Changes of page tables.
    pub tables: Vec<TableEntry>,
    /// The rows to run, a sequence after the other, each at rising positions.
    pub work: Vec<Work>,
    /// Most rows of the step's decoding sequences with their drafts: the operator's threshold (`gpu_kernels::ngram`).
    /// 0: nothing drafts.
    pub draft_threshold: u32,
}

/// Save `from` as `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapOut {
    /// On the device.
    pub from: Page,
    /// In the host tier.
    pub to: HostPage,
}

/// Copy `from` over `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// Holds what is wanted.
    pub from: Page,
    /// Belongs to one sequence alone.
    pub to: Page,
}

/// Bring `from` back as `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwapIn {
    /// In the host tier.
    pub from: HostPage,
    /// On the device.
    pub to: Page,
}

/// A sequence takes a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Which.
    pub slot: Slot,
    /// Whose.
    pub sequence: SequenceId,
}

/// Entry `index` of the slot's page table becomes `page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableEntry {
    /// Whose table.
    pub slot: Slot,
    /// Tokens `index * page_tokens` and on.
    pub index: u32,
    /// Where they are.
    pub page: Page,
}

/// Rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Whose.
    pub slot: Slot,
    /// Position of the first row.
    pub start: u32,
    /// Rows of known tokens: a chunk of the prompt, or the newest token.
    pub rows: u32,
    /// Whether the last of them is the newest token, so that the token after it is chosen.
    pub samples: bool,
    /// Most drafts that may follow the newest token; the page table covers their positions.
    pub most_drafts: u32,
}
