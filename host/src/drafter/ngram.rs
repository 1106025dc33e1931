//! Drafts by n-gram match over the history.

use gpu_kernels::drafting;
use gpu_kernels::ngram::{self, NgramMatchMixed, Sequences};
use gpu_kernels::step::{self, AcceptAndDraft, MAX_DECODE_ROWS, PlanDecode};

use super::{Between, Drafter, OnDevice, OnHost, Proposal, Proposals, Text};
use crate::Error;
use crate::backend::{Sequence, Step};
use crate::cpu;
use crate::device::{Buffer, Device};
use crate::draft::{NO_THRESHOLD, NgramDraft, learned};

/// The settings of the sequence's n-gram match.
fn settings(sequence: &Sequence<'_>) -> NgramDraft {
    sequence.draft.map_or_else(NgramDraft::default, |draft| draft.match_settings())
}

/// The n-gram match on the host.
pub(crate) struct NgramOnHost {
    draft: NgramDraft,
    /// The [`drafting`] estimate for proposals.
    acceptance: u32,
    proposed: Vec<u32>,
}

impl Default for NgramOnHost {
    fn default() -> Self {
        Self { draft: NgramDraft::default(), acceptance: drafting::UNTRIED, proposed: Vec::new() }
    }
}

impl Drafter<OnHost> for NgramOnHost {
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error> {
        *self = Self { draft: settings(sequence), ..Self::default() };
        Ok(())
    }

    fn propose(&mut self, at: Text<'_>) -> Result<Proposal, Error> {
        let tokens = self.draft.propose(bytemuck::cast_slice(at.history), at.max_length);
        let cost = self.draft.cost(cpu::DRAFT_COST);
        let count = drafting::worthwhile(self.acceptance, cost, 0, tokens.len() as u32) as usize;
        self.proposed.clone_from(&tokens);
        Ok(Proposal { tokens, count })
    }

    fn hear(&mut self, step: &mut Step) {
        self.acceptance = learned(self.acceptance, &std::mem::take(&mut self.proposed), &step.tokens);
    }
}

/// The arrays that only the n-gram operator uses, for a batch of one.
pub(super) struct NgramOperator {
    max_length: Buffer<i64>,
    prompt_len: Buffer<i64>,
    decoding: Buffer<i32>,
    workspace: Buffer<u64>,
}

impl NgramOperator {
    pub(super) fn new(device: &Device) -> Result<Self, Error> {
        let workspace = vec![u64::from_ne_bytes([ngram::WORKSPACE_FILL; 8]); ngram::workspace_len(1)];
        Ok(Self {
            max_length: device.zeroed(1)?,
            prompt_len: device.zeroed(1)?,
            decoding: device.upload(&[1])?,
            workspace: device.upload(&workspace)?,
        })
    }

    pub(super) fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error> {
        self.max_length.write(0, &[sequence.max_length as i64])
    }

    /// The parameters of a match over the history, up to the token at index `at.proposals.last`. It appends to the
    /// drafts in `tokens`, and counts them in `rows`. The whole history counts as generated text: the operator's prompt
    /// is empty.
    pub(super) fn params(
        &self,
        at: &Between<'_>,
        draft: NgramDraft,
        (tokens, rows): (&Buffer<i32>, &Buffer<i32>),
    ) -> NgramMatchMixed<i32> {
        let history = at.state().history.read();
        NgramMatchMixed {
            sequences: Sequences {
                input_ids: history,
                input_ids_len: self.prompt_len.ptr(),
                pre_ids: history,
                step_idx: at.proposals.last.ptr(),
                max_dec_len: self.max_length.ptr(),
                seq_lens_decoder: self.decoding.ptr(),
                seq_lens_this_time: rows.ptr_mut(),
                draft_tokens: tokens.ptr_mut(),
                workspace: self.workspace.ptr_mut(),
                input_ids_stride: 0,
                pre_ids_stride: at.capacity,
                draft_tokens_stride: MAX_DECODE_ROWS,
                batch: 1,
                max_ngram_size: draft.max,
                threshold: NO_THRESHOLD,
            },
            max_draft_tokens: draft.tokens as i32,
            min_ngram_size: draft.min,
        }
    }

    /// Enqueues the match over a history of at most `length` tokens.
    ///
    /// # Safety
    /// The parameters come from [`params`](Self::params), and their memory is there when the launch runs.
    pub(super) unsafe fn enqueue(
        &self,
        device: &Device,
        length: u32,
        params: NgramMatchMixed<i32>,
    ) -> Result<(), Error> {
        let blocks = ngram::blocks::<i32>(1, length, device.sms());
        // SAFETY: the caller's word; only this queue uses the workspace.
        unsafe { device.launch::<ngram::ngram_match_mixed_i32>(blocks, ngram::SHARED_BYTES, params) }
    }
}

/// The n-gram match on a device.
pub(crate) struct NgramDrafter {
    draft: NgramDraft,
    operator: NgramOperator,
}

impl NgramDrafter {
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { draft: NgramDraft::default(), operator: NgramOperator::new(device)? })
    }
}

impl Drafter<OnDevice> for NgramDrafter {
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error> {
        self.draft = settings(sequence);
        self.operator.begin(sequence)
    }

    fn propose(&mut self, at: Between<'_>) -> Result<(), Error> {
        let Proposals { tokens, rows, .. } = at.proposals;
        let draft = self.operator.params(&at, self.draft, (tokens, rows));
        let cost = self.draft.cost(at.forward.draft_cost());
        let device = at.device();
        // Cards other than data-centre ones have 99 KiB of shared memory for a CTA.
        let fits = device.capabilities().shared_bytes >= AcceptAndDraft::SHARED_BYTES;
        if fits && ngram::together::<i32>(1, at.length, device.sms()) {
            let plan = PlanDecode { cost, ..at.plan };
            let all = AcceptAndDraft { accept: at.accept, draft, plan, settled: at.settled };
            // SAFETY: acceptance and plan are as `Between` says. The other addresses are of buffers of self and of the
            // proposals, sized as the parameter block says.
            return unsafe { device.launch_early::<step::accept_and_draft>(1, AcceptAndDraft::SHARED_BYTES, all) };
        }
        at.enqueue_accept()?;
        // SAFETY: the parameters were made by `params`, of buffers of self and of the proposals.
        unsafe { self.operator.enqueue(device, at.length, draft)? };
        at.enqueue_plan(cost)
    }

    fn hear(&mut self, _step: &mut Step) {
        // Its estimate is in device memory: `accept` keeps it.
    }
}
