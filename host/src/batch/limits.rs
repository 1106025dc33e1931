//! The limits of a scheduler, the costs that it goes by, and what it counts.

/// What the scheduler may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of a sequence.
    pub context: usize,
    /// Most sequences that run at once.
    pub sequences: u32,
    /// Most sequences that generate in one step. Of the running sequences beyond that, the newest have their prompts
    /// read already, and take the places of those that end.
    pub generating: u32,
    /// Most rows of a step, drafts included; at least `sequences`.
    pub rows: u32,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Pages on the device, at least enough for one sequence as long as the context.
    pub pages: u32,
    /// Pages in the host tier.
    pub host_pages: u32,
    /// Most drafts of a sequence in a step. 0: no drafts.
    pub drafts: u32,
    /// A step has drafts only while it has fewer rows than this.
    pub draft_rows: u32,
    /// Most rows of prompts in a step. If not 0, prompts also wait for each other while sequences generate. Waiting
    /// sequences that have room then start, and prompts that are partly read go on, only when they have this many rows
    /// together, or have missed one token for every `prompt_share` generating sequences. This is for devices on which a
    /// pass over fewer rows takes hardly less time. 0: prompts take all the rows that are left, at once.
    pub prompt_rows: u32,
    /// Generating sequences for one missed token: see `prompt_rows`.
    pub prompt_share: u32,
    /// Whether the device computes the positions of prompts differently from generated ones, with different bits.
    /// Sequences then share a page only if the same of its tokens are of the prompt in both.
    pub prompts_apart: bool,
    /// Numbers of rows that fill the tiles of a step's GEMMs, in rising order. With somewhat more sequences than one of
    /// these, a step may leave some out, if that is measured to be faster. None: all sequences always generate.
    pub tiles: &'static [u32],
}

/// The costs of resuming a preempted sequence, in seconds, as measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// To save a page in the host tier and bring it back.
    pub swap_page: f64,
    /// To compute a row of a prompt.
    pub row: f64,
}

/// What the scheduler has counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Steps planned.
    pub steps: u64,
    /// Rows that ran, without drafts.
    pub rows: u64,
    /// Tokens whose keys and values were found in the page index.
    pub shared_tokens: u64,
    /// Those among them that came back from the host tier.
    pub restored_tokens: u64,
    /// Preemptions that saved the sequence's pages in the host tier.
    pub swapped: u64,
    /// Preemptions that gave the pages up, to be computed again.
    pub dropped: u64,
    /// Choices that were put off because their masks were not ready in time.
    pub put_off: u64,
    /// Most sequences that ran at the same time.
    pub most_running: u32,
    /// Most pages that were in use at the same time.
    pub most_pages: u32,
}
