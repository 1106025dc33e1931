//! Who drafts: whoever proposes tokens ahead of the model, as the decode loops see it.
//!
//! A [`Drafter`] works where the loop does ([`DrafterSide`]): [`OnHost`] it gives a [`Proposal`], [`OnDevice`] it
//! enqueues launches that leave one in device memory, and the host never sees it. What is proposed decides how many
//! steps an answer takes, never what it says: `accept` and `confirm` compare it with the tokens that the model chooses.
//!
//! To add a drafter: a file here, an arm of [`Draft`](crate::Draft), and what it does for a batch in `batch/draft.rs`.

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
    /// Takes up a sequence, whose prompt comes first.
    ///
    /// # Errors
    /// A device error, or one of its own.
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error>;

    /// Proposes what comes after the newest token.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    fn propose(&mut self, at: S::At<'_>) -> Result<S::Proposal, Error>;

    /// Hears what each step brought, the prompt's among them, in order; notes in it whose drafts it tried.
    fn hear(&mut self, step: &mut Step);
}

/// The side that a drafter works on: the host, or a device.
pub trait DrafterSide {
    /// What it is told when it is to propose.
    type At<'a>;
    /// What it gives.
    type Proposal;
}

/// On the host, between two steps.
pub struct OnHost;

/// A sequence that is waiting for its next step.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Every token so far.
    pub history: &'a [u32],
    /// Most tokens that there may be.
    pub max_length: usize,
}

/// Drafts for a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proposal {
    /// What was found.
    pub tokens: Vec<u32>,
    /// How many of them, from the first on, are worth a row.
    pub count: usize,
}

impl DrafterSide for OnHost {
    type At<'a> = Text<'a>;
    type Proposal = Proposal;
}

/// On a device, in its queue.
pub struct OnDevice;

/// What stands between two steps on a device: a drafter enqueues [acceptance](Self::enqueue_accept), its own launches,
/// and [the plan](Self::enqueue_plan).
#[derive(Clone, Copy)]
pub struct Between<'a> {
    /// The model.
    pub forward: &'a Forward,
    /// The acceptance of what the last step chose. Its addresses and the plan's are of buffers that live as long, sized
    /// as the parameter blocks say: this crate alone makes them.
    pub(crate) accept: Accept,
    /// The plan of the next step, but for [its cost](PlanDecode::cost).
    pub(crate) plan: PlanDecode,
    /// Where proposals are made.
    pub proposals: &'a Proposals,
    /// Elements of the history.
    pub capacity: u32,
    /// Most tokens that the history has when the launches run.
    pub length: u32,
    /// Tokens at its beginning that were there before the launches that are under way.
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

    /// The sequence.
    pub fn state(&self) -> SequenceState {
        self.plan.state
    }

    /// Enqueues acceptance; if rows are a tree, what the accepted ones have left goes to its place.
    ///
    /// # Errors
    /// A refused launch.
    pub fn enqueue_accept(&self) -> Result<(), Error> {
        // SAFETY: as the field says.
        unsafe { self.device().launch::<step::accept>(1, 0, self.accept)? };
        self.forward.enqueue_keep_path(self.state())
    }

    /// Enqueues the plan, where drafts cost so much.
    ///
    /// # Errors
    /// A refused launch.
    pub fn enqueue_plan(&self, cost: gpu_kernels::drafting::Cost) -> Result<(), Error> {
        // SAFETY: as above.
        unsafe { self.device().launch::<step::plan_decode>(1, 0, PlanDecode { cost, ..self.plan }) }
    }
}

/// The memory of proposals on a device, for a batch of one: what the n-gram operator writes, and acceptance and plans
/// read.
pub struct Proposals {
    /// `[1]` index of the newest token in the history, or of the last that is proposed.
    pub last: Buffer<i64>,
    /// `[1]` rows, the newest token's included.
    pub rows: Buffer<i32>,
    /// `[MAX_DECODE_ROWS]` row 0 is the newest token's, drafts follow.
    pub tokens: Buffer<i32>,
}

impl Proposals {
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { last: device.zeroed(1)?, rows: device.zeroed(1)?, tokens: device.zeroed(MAX_DECODE_ROWS as usize)? })
    }

    /// As a draft model's kernels take it.
    fn proposal(&self) -> draft_model::Proposal {
        draft_model::Proposal { drafts: self.tokens.ptr_mut(), rows: self.rows.ptr_mut(), last: self.last.ptr_mut() }
    }
}
