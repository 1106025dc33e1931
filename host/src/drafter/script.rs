//! Drafts by a script: the tokens to propose for each position are given beforehand. For measurements.

use cuda_std::Kernel;
use gpu_kernels::drafting::DraftScript;

use super::{Between, Drafter, OnDevice};
use crate::Error;
use crate::backend::{Sequence, Step};
use crate::device::{Buffer, Device};
use crate::draft::NgramDraft;

/// The scripted tokens by position, and the [`Device::launch`] of the kernel that proposes them.
pub(crate) struct ScriptDrafter {
    tokens: Buffer<i32>,
    launch: unsafe fn(&Device, u32, u32, DraftScript) -> Result<(), Error>,
    /// The settings that hold for scripted drafts as for those of a match: most of a step, and whether they cost.
    draft: NgramDraft,
    /// Most tokens that the sequence may have.
    max_length: u32,
}

impl ScriptDrafter {
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn new<K: Kernel<Params = DraftScript>>(device: &Device, tokens: &[u32]) -> Result<Self, Error> {
        let tokens = device.upload(bytemuck::cast_slice::<u32, i32>(tokens))?;
        Ok(Self { tokens, launch: Device::launch::<K>, draft: NgramDraft::default(), max_length: 0 })
    }
}

impl Drafter<OnDevice> for ScriptDrafter {
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error> {
        self.draft = sequence.draft.map_or_else(NgramDraft::default, |draft| draft.match_settings());
        self.max_length = sequence.max_length as u32;
        Ok(())
    }

    fn propose(&mut self, at: Between<'_>) -> Result<(), Error> {
        at.enqueue_accept()?;
        let proposal = DraftScript {
            state: at.state(),
            script: self.tokens.ptr(),
            drafts: at.proposals.tokens.ptr_mut(),
            rows: at.proposals.rows.ptr_mut(),
            script_len: self.tokens.len() as u32,
            most: self.draft.tokens,
            max_length: self.max_length,
        };
        // SAFETY: the state is as `Between` says. The other addresses are of buffers, sized as the parameter block
        // says.
        unsafe { (self.launch)(at.device(), 1, 0, proposal)? };
        at.enqueue_plan(self.draft.cost(at.forward.draft_cost()))
    }

    fn hear(&mut self, _step: &mut Step) {}
}
