//! Drafters: they propose tokens ahead of the model. This is their interface to the decode loops.
//!
//! A [`Drafter`] works on the side where its loop runs ([`DrafterSide`]). [`OnHost`], it returns a [`Proposal`].
//! [`OnDevice`], it enqueues launches that leave a proposal in device memory, and the host never sees it. A proposal
//! decides how many steps an answer takes, never what the answer says: `accept` and `confirm` compare it with the
//! tokens that the model chooses.
//!
//! To add a drafter, add a file here, an arm of [`Draft`](crate::Draft), and its part in batches in `batch/draft.rs`.

mod backoff;
mod eagle_on_host;
mod model;
mod model_on_host;
mod ngram;
mod passes_on_host;
mod script;

use gpu_kernels::draft_model;
use gpu_kernels::step::{self, Accept, MAX_DECODE_ROWS, PlanDecode, SequenceState};

pub(crate) use self::backoff::Backoff;
pub(crate) use self::model::{ModelDrafter, Passes};
pub(crate) use self::model_on_host::ModelOnHost;
pub(crate) use self::ngram::{NgramDrafter, NgramOnHost};
pub(crate) use self::script::ScriptDrafter;
use crate::Error;
use crate::backend::{Sequence, Step};
use crate::device::{Buffer, Device};
use crate::forward::Forward;

/// Proposes tokens for one sequence at a time.
pub trait Drafter<S: DrafterSide>: Send {
    /// Begins a sequence. Its prompt is run before the first proposal.
    ///
    /// # Errors
    /// A device error, or an error of the drafter.
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error>;

    /// Proposes what comes after the newest token.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    fn propose(&mut self, at: S::At<'_>) -> Result<S::Proposal, Error>;

    /// Called with the result of each step, in order, the prompt's step included. Sets in `step` whose drafts were
    /// tried.
    fn hear(&mut self, step: &mut Step);
}

/// Where a drafter works: on the host or on a device.
pub trait DrafterSide {
    /// What it knows when it proposes.
    type At<'a>;
    /// What it returns.
    type Proposal;
}

/// On the host, between two steps.
pub struct OnHost;

/// A sequence that waits for its next step.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Every token so far.
    pub history: &'a [u32],
    /// Most tokens that the sequence may have.
    pub max_length: usize,
}

/// Drafts for a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proposal {
    /// The proposed tokens.
    pub tokens: Vec<u32>,
    /// How many of them, counted from the first, are worth a row.
    pub count: usize,
}

impl DrafterSide for OnHost {
    type At<'a> = Text<'a>;
    type Proposal = Proposal;
}

/// On a device, by launches in its queue.
pub struct OnDevice;

/// The state between two steps on a device. A drafter enqueues [acceptance](Self::enqueue_accept), its own launches,
/// and [the plan](Self::enqueue_plan), in this order.
#[derive(Clone, Copy)]
pub struct Between<'a> {
    /// The model that is drafted for.
    pub forward: &'a Forward,
    /// The acceptance of the last step's choices. The addresses in it and in `plan` are of buffers that live as long
    /// and are sized as the parameter blocks say; only this crate makes them.
    pub(crate) accept: Accept,
    /// The plan of the next step, without [its cost](PlanDecode::cost).
    pub(crate) plan: PlanDecode,
    /// Where the proposal is written.
    pub proposals: &'a Proposals,
    /// Room of the history, in tokens.
    pub capacity: u32,
    /// Most tokens that the history can have when the launches run.
    pub length: u32,
    /// Tokens at the beginning of the history that were written before any launch that may still be running.
    pub settled: u32,
}

impl DrafterSide for OnDevice {
    type At<'a> = Between<'a>;
    type Proposal = ();
}

impl Between<'_> {
    /// The device.
    pub fn device(&self) -> &Device {
        self.forward.device()
    }

    /// The state of the sequence.
    pub fn state(&self) -> SequenceState {
        self.plan.state
    }

    /// Enqueues acceptance. If the rows are a tree, this also moves the keys, values and hidden states of the accepted
    /// rows to their positions.
    ///
    /// # Errors
    /// A refused launch.
    pub fn enqueue_accept(&self) -> Result<(), Error> {
        // SAFETY: as the field says.
        unsafe { self.device().launch::<step::accept>(1, 0, self.accept)? };
        self.forward.enqueue_keep_path(self.state())
    }

    /// Enqueues the plan of the next step, with `cost` as the cost of drafts.
    ///
    /// # Errors
    /// A refused launch.
    pub fn enqueue_plan(&self, cost: gpu_kernels::drafting::Cost) -> Result<(), Error> {
        // SAFETY: the comment of `accept` covers the plan as well.
        unsafe { self.device().launch::<step::plan_decode>(1, 0, PlanDecode { cost, ..self.plan }) }
    }
}

/// The device memory of a proposal, for a batch of one. The n-gram operator writes it; acceptance and plans read it.
pub struct Proposals {
    /// `[1]` the index in the history of the newest token, or of the last proposed token.
    pub last: Buffer<i64>,
    /// `[1]` the number of rows, the newest token's included.
    pub rows: Buffer<i32>,
    /// `[MAX_DECODE_ROWS]` row 0 is the newest token's; the drafts follow.
    pub tokens: Buffer<i32>,
}

impl Proposals {
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { last: device.zeroed(1)?, rows: device.zeroed(1)?, tokens: device.zeroed(MAX_DECODE_ROWS as usize)? })
    }

    /// The addresses, as the kernels of draft models take them.
    fn proposal(&self) -> draft_model::Proposal {
        draft_model::Proposal { drafts: self.tokens.ptr_mut(), rows: self.rows.ptr_mut(), last: self.last.ptr_mut() }
    }
}
