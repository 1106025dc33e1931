//! What a scheduler may use, what that costs, and how it went.

/// What the scheduler may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of a sequence.
    pub context: usize,
    /// Most sequences that run at once.
    pub sequences: u32,
    /// Most of them that generate in a step; the newest of the others are read in already, and take the places of those
    /// that end.
    pub generating: u32,
    /// Most rows of a step, drafts included; at least `sequences`.
    pub rows: u32,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Pages on the device, at least enough for one sequence as long as the context.
    pub pages: u32,
    /// Pages in the host tier.
    pub host_pages: u32,
    /// Most drafts of a sequence in a step; 0: nothing drafts.
    pub drafts: u32,
    /// Drafts are tried while a step has fewer rows than this.
    pub draft_rows: u32,
    /// Most rows of prompts in a step. And while others generate, waiting sequences that have room start, and prompts
    /// that are being read in go on, once they have so many rows together, or have missed a token for each
    /// `prompt_share` that generate: where a pass over fewer rows takes hardly less time. 0: as many as there is room
    /// for, at once.
    pub prompt_rows: u32,
    /// See `prompt_rows`.
    pub prompt_share: u32,
    /// Whether the device computes prompts otherwise than what it generates, to other bits: then sequences share a page
    /// only if the same of its tokens are of their prompts.
    pub prompts_apart: bool,
}

/// What it costs to take up a preempted sequence again, in seconds; from measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// To save a page and bring it back.
    pub swap_page: f64,
    /// To run a row of a prompt.
    pub row: f64,
}

/// How a run went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Steps planned.
    pub steps: u64,
    /// Rows of known tokens.
    pub rows: u64,
    /// Tokens of prompts that were found in the page index.
    pub shared_tokens: u64,
    /// Of these, tokens that came back from the host tier.
    pub restored_tokens: u64,
    /// Preemptions to the host tier.
    pub swapped: u64,
    /// Preemptions to be computed again.
    pub dropped: u64,
    /// Choices that were put off, as their masks were not made in time.
    pub put_off: u64,
    /// Most sequences that ran at once.
    pub most_running: u32,
    /// Most pages that were in use at once.
    pub most_pages: u32,
}
