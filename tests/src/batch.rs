//! Batches for tests: requests that meet, backends arranged for a test, and answers to compare.

use std::ops::ControlFlow;

use host::batch::plan::{Plan, Slot};
use host::batch::{Answer, Batch, BatchBackend, BatchOptions, Costs, Job, Limits, Outcome, Start};
use host::device::Device;
use host::{DraftCheckpoint, Drafted, Error, LoadOptions, ModelDraft, Request};
use model::{Checkpoint, Sampling};

use crate::greedy;

/// Drawn tokens, with every cut and every penalty.
#[must_use]
pub fn with_penalties(seed: u64) -> Sampling {
    Sampling {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.1,
        presence_penalty: 0.2,
        frequency_penalty: 0.3,
        seed,
        ..Sampling::default()
    }
}

/// Requests of many lengths over `prompts`, greedy and sampled, some that begin alike, some with stop texts; the
/// longest prompt has `longest` tokens, and the longest answer `most`.
pub fn requests(prompts: &[Vec<u32>], longest: usize, most: usize) -> Vec<Request> {
    let count = prompts.len();
    let request = |(i, prompt): (usize, &Vec<u32>)| {
        let length = (longest * (i + 1) / count).max(1);
        // Every third begins like the first.
        let shared = if i % 3 == 0 { (longest / 2).min(length - 1) } else { 0 };
        let prompt = [&prompts[0][..shared], &prompt[..length - shared]].concat();
        let sampling = with_penalties(i as u64);
        Request {
            sampling: if i % 2 == 0 { sampling } else { Sampling::default() },
            stop: if i % 4 == 1 { vec![";\n".into(), "self".into()] } else { Vec::new() },
            ignore_end: i % 5 != 0,
            form: None,
            ..greedy(&prompt, (most * (1 + i % 7)).div_ceil(7), None)
        }
    };
    prompts.iter().enumerate().map(request).collect()
}

/// A backend under test.
pub struct Arranged {
    backend: Box<dyn BatchBackend>,
    /// Taken for its own, unless there are none.
    costs: Option<Costs>,
    /// Whose memory its steps may not take.
    watched: Option<Device>,
}

impl Arranged {
    /// With costs that do not depend on a clock: preempted sequences go to the host tier as long as it has room, or are
    /// always computed again.
    pub fn priced(backend: Box<dyn BatchBackend>, to_host: bool) -> Box<dyn BatchBackend> {
        let swap_page = if to_host { 0.0 } else { f64::INFINITY };
        Box::new(Self { backend, costs: Some(Costs { swap_page, row: 1.0 }), watched: None })
    }

    /// One whose steps take no memory of this device: what is not taken then cannot be lacking then.
    pub fn frugal(backend: Box<dyn BatchBackend>, device: Device) -> Box<dyn BatchBackend> {
        Box::new(Self { backend, costs: None, watched: Some(device) })
    }

    fn frugally<T>(&mut self, run: impl FnOnce(&mut dyn BatchBackend) -> Result<T, Error>) -> Result<T, Error> {
        let allocations = |device: &Device| device.calls().allocations;
        let before = self.watched.as_ref().map(allocations);
        let result = run(&mut *self.backend);
        let after = self.watched.as_ref().map(allocations);
        assert_eq!(after, before, "a step has taken memory or given it back");
        result
    }
}

impl BatchBackend for Arranged {
    fn device(&self) -> String {
        self.backend.device()
    }

    /// With tiles of few rows, so that some steps leave sequences out.
    fn limits(&self) -> Limits {
        Limits { tiles: &[2, 5], ..self.backend.limits() }
    }

    fn host_pages(&mut self, are_wanted: bool) -> u32 {
        self.backend.host_pages(are_wanted)
    }

    fn costs(&self) -> Costs {
        self.costs.unwrap_or_else(|| self.backend.costs())
    }

    fn runs_ahead(&self) -> bool {
        self.backend.runs_ahead()
    }

    fn may_draft(&self) -> bool {
        self.backend.may_draft()
    }

    fn begin(&mut self, plan: &Plan, starts: &[Start<'_>]) -> Result<(), Error> {
        self.frugally(|backend| backend.begin(plan, starts))
    }

    fn put_off(&mut self) -> Vec<Slot> {
        self.backend.put_off()
    }

    fn rewrite(&mut self, slot: Slot, at: usize, tokens: &[u32]) {
        self.backend.rewrite(slot, at, tokens);
    }

    fn end(&mut self) -> Result<Vec<Outcome>, Error> {
        self.frugally(|backend| backend.end())
    }
}

/// How often something happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Happened {
    /// Preemptions to the host tier.
    pub swapped: u64,
    /// Preemptions to be computed again.
    pub dropped: u64,
    /// Tokens found in the cache.
    pub shared: u64,
    /// Of these, tokens that came back from the host tier.
    pub restored: u64,
    /// Drafts confirmed.
    pub accepted: u64,
    /// Rows planned.
    pub rows: u64,
}

impl Happened {
    /// These and those.
    pub fn add(&mut self, other: Self) {
        self.swapped += other.swapped;
        self.dropped += other.dropped;
        self.shared += other.shared;
        self.restored += other.restored;
        self.accepted += other.accepted;
        self.rows += other.rows;
    }
}

/// The answers of a batch to `jobs`, in the order of their numbers.
///
/// # Panics
/// If it fails.
pub fn together(
    checkpoint: &Checkpoint,
    backend: Box<dyn BatchBackend>,
    jobs: &[(usize, Request)],
    logprobs: Option<u32>,
) -> (Vec<(usize, Answer)>, Happened) {
    let mut batch = Batch::with_backend(checkpoint.clone(), backend);
    let mut coming = jobs.iter();
    let mut answers = Vec::new();
    loop {
        while batch.has_room()
            && let Some((id, request)) = coming.next()
        {
            let job = Job { id: *id as u64, request: request.clone(), logprobs };
            batch.submit(job).unwrap_or_else(|e| panic!("{e}"));
        }
        batch.expect_more(coming.len() > 0);
        if batch.is_idle() {
            break;
        }
        let done = batch.step().unwrap_or_else(|e| panic!("{e}"));
        answers.extend(done.into_iter().map(|done| (done.id as usize, done.answer.unwrap_or_else(|e| panic!("{e}")))));
    }
    answers.sort_by_key(|answer| answer.0);
    assert_eq!(answers.len(), jobs.len());
    let metrics = batch.metrics();
    let (counts, accepted) = (metrics.counts, metrics.accepted);
    assert_eq!(metrics.pages_in_use, 0);
    let happened = Happened {
        swapped: counts.swapped,
        dropped: counts.dropped,
        shared: counts.shared_tokens,
        restored: counts.restored_tokens,
        accepted,
        rows: counts.rows,
    };
    (answers, happened)
}

/// Answers of a batch for `checkpoint` that `draft` drafts for, in the order of the requests, and drafts by it.
///
/// # Panics
/// If it fails.
pub fn drafted_batch(
    checkpoint: &Checkpoint,
    draft: &DraftCheckpoint,
    load: LoadOptions,
    options: BatchOptions,
    requests: &[Request],
) -> (Vec<Vec<u32>>, Drafted) {
    let load = LoadOptions { draft_model: Some(draft.clone()), ..load };
    let go_on = &mut |_, _| ControlFlow::Continue(());
    let mut batch = Batch::load(checkpoint.clone(), load, options, go_on).unwrap_or_else(|e| panic!("{e}"));
    for (id, request) in (0..).zip(requests) {
        let job = Job { id, request: request.clone(), logprobs: None };
        batch.submit(job).unwrap_or_else(|e| panic!("{e}"));
    }
    let mut answers = vec![Vec::new(); requests.len()];
    while !batch.is_idle() {
        for done in batch.step().unwrap_or_else(|e| panic!("{e}")) {
            answers[done.id as usize] = done.answer.unwrap_or_else(|e| panic!("{e}")).tokens;
        }
    }
    (answers, batch.metrics().by_model)
}

/// Three sequences at a time, with so little room that some are put aside, and as little for whoever drafts.
pub fn crowded(draft: ModelDraft) -> BatchOptions {
    BatchOptions {
        sequences: Some(3),
        cache_tokens: Some(256),
        draft: Some(draft.into()),
        draft_rows: 16,
        ..BatchOptions::default()
    }
}
