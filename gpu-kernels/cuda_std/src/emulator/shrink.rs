//! Makes failing schedules short, in three stages.
//!
//! The first searches, by halves, for the shortest prefix of the failing run's choices that still fails when the plain
//! order follows it. The second replaces choices in this prefix by the plain order's, in ever smaller parts, until no
//! single choice can be replaced (Zeller's delta debugging). What is left may still be a chain in which each choice
//! only serves the next. So the third tries the actions of that chain alone, at each moment of the plain order's run.

use std::fmt;

use super::error::EmulatorError;
use super::order::{Choice, Moment, Order, Schedule};
use super::world::{Site, Turn};
use super::{Launch, Ran, Report, run};
use crate::Kernel;

/// The most runs that are spent on one failure, and the most steps in them.
const RUNS: u32 = 10_000;
const STEPS: u64 = 1 << 28;
/// The most of these runs that try actions alone.
const RUNS_ALONE: u32 = 1000;

/// How long a run was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Length {
    /// Choices that differ from the plain order's.
    pub choices: usize,
    /// How often the run changed from one warp to another.
    pub switches: usize,
    /// How often a lane was resumed.
    pub steps: u64,
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { choices, switches, steps } = self;
        write!(f, "{choices} choices, {switches} changes of warp, {steps} steps")
    }
}

/// A failing run, made as short as could be.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The schedule that fails, for [`replay`].
    pub schedule: Schedule,
    /// What that schedule leads to.
    pub result: Result<Report, EmulatorError>,
    /// The seed whose run it was made from.
    pub seed: u64,
    /// The length of that seed's run.
    pub before: Length,
    /// The length of the short run.
    pub after: Length,
    /// How many runs were needed.
    pub runs: u32,
    turns: Vec<Turn>,
}

/// How many turns a failure shows, the last ones.
const SHOWN: usize = 24;

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.result {
            Ok(_) => f.write_str("the launch ended, with wrong results")?,
            Err(error) => write!(f, "{error}")?,
        }
        let Self { seed, before, after, runs, schedule, .. } = self;
        write!(f, "\nseed {seed}: {before}; after {runs} runs: {after}\nschedule: {schedule}")?;
        let hidden = self.turns.len().saturating_sub(SHOWN);
        if hidden > 0 {
            write!(f, "\n  … {hidden} turns before")?;
        }
        for turn in &self.turns[hidden..] {
            match turn {
                Turn::Ran { block, warp, steps } => write!(f, "\n  warp {warp} of block {block}: {steps} steps")?,
                Turn::Landed { site } => write!(f, "\n  the copy of {site} lands")?,
            }
        }
        Ok(())
    }
}

/// One run, recorded.
struct Attempt<M> {
    memory: M,
    result: Result<Report, EmulatorError>,
    schedule: Schedule,
    turns: Vec<Turn>,
    moments: Vec<Moment>,
    steps: u64,
}

impl<M> Attempt<M> {
    fn length(&self) -> Length {
        let switches = self.turns.iter().filter(|turn| matches!(turn, Turn::Ran { .. })).count();
        Length { choices: self.schedule.len(), switches: switches.saturating_sub(1), steps: self.steps }
    }
}

fn attempt<K: Kernel, M>(launch: &Launch, order: Order, memory: (M, K::Params)) -> Attempt<M> {
    let (memory, params) = memory;
    let Ran { result, schedule, turns, moments, steps } = run::<K>(launch, order.recorded(), params);
    Attempt { memory, result, schedule, turns, moments, steps }
}

/// Runs a grid as [`launch`](super::launch) does, in the order of a schedule instead of the seed's.
///
/// # Errors
/// As [`launch`](super::launch).
pub fn replay<K: Kernel>(launch: &Launch, schedule: &Schedule, params: K::Params) -> Result<Report, EmulatorError> {
    run::<K>(launch, Order::written(schedule), params).result
}

/// Runs a grid in the order of the launch's seed. If that fails, looks for the shortest schedule that fails alike: with
/// an error of the same kind, at the same places in the source. Returns `None` if the seed's run does not fail.
///
/// Each run needs memory of its own: `memory` makes it, with the parameters that point to it.
///
/// ```
/// use cuda_std::emulator::{Buffer, Launch, replay, shrink};
/// use cuda_std::{GlobalMut, kernel, shared, thread};
///
/// /// Hands a word from the last lane to the first: the barrier is missing.
/// #[kernel(threads = 64)]
/// pub unsafe fn hand(output: GlobalMut<u32>) {
///     // SAFETY: there is a word.
///     unsafe {
///         let word = shared::dynamic::<u32>(0);
///         if thread::thread_idx_x() == 63 {
///             word.store(0, 7);
///         }
///         if thread::thread_idx_x() == 0 {
///             output.store(0, word.load(0));
///         }
///     }
/// }
///
/// let memory = || {
///     let output = Buffer::<u32>::new_poisoned(1);
///     let at = output.ptr_mut();
///     (output, at)
/// };
/// let how = Launch { shared_bytes: 4, seed: 3, ..Launch::new(1, 64) };
/// let failure = shrink::<hand, _>(&how, memory).expect("a barrier is missing");
/// assert!(failure.schedule.len() <= 1);
/// let (_output, at) = memory();
/// assert_eq!(replay::<hand>(&how, &failure.schedule, at), failure.result);
/// ```
pub fn shrink<K: Kernel, M>(launch: &Launch, memory: impl FnMut() -> (M, K::Params)) -> Option<Failure> {
    let mut first: Option<EmulatorError> = None;
    shrink_if::<K, M>(launch, memory, |result, _| match (result, &first) {
        (Ok(_), _) => false,
        (Err(error), None) => {
            first = Some(error.clone());
            true
        }
        (Err(error), Some(first)) => error.is_like(first),
    })
}

/// As [`shrink`], for a failure that the caller defines, such as a result that depends on the order of lanes. `wrong`
/// decides from the run's result and the memory that the run left. Returns `None` if the seed's own run is not wrong.
pub fn shrink_if<K: Kernel, M>(
    launch: &Launch,
    mut memory: impl FnMut() -> (M, K::Params),
    mut wrong: impl FnMut(&Result<Report, EmulatorError>, &M) -> bool,
) -> Option<Failure> {
    let first = attempt::<K, M>(launch, Order::seeded(launch.seed), memory());
    if !wrong(&first.result, &first.memory) {
        return None;
    }
    let before = first.length();
    // A schedule under which the run never ends is no help, unless that is what is wrong: so the steps have a limit.
    let endless = matches!(first.result, Err(EmulatorError::Livelock { .. }));
    let steps = if endless { launch.steps } else { launch.steps.min(before.steps * 8 + 100_000) };
    let mut search = Search { spent: first.steps, best: first, moments: Vec::new(), runs: 1 };
    let launch = Launch { steps, ..*launch };
    let mut fails = |search: &mut Search<M>, choices: Vec<Choice>| {
        if !search.goes_on() {
            return false;
        }
        let plain = choices.is_empty();
        let tried = attempt::<K, M>(&launch, Order::written(&Schedule(choices)), memory());
        search.runs += 1;
        search.spent += tried.steps;
        let failed = wrong(&tried.result, &tried.memory);
        if failed {
            search.best = tried;
        } else if plain {
            search.moments = tried.moments;
        }
        failed
    };
    if !fails(&mut search, Vec::new()) {
        search.prefix(&mut fails);
        search.without(&mut fails);
        search.alone(&mut fails);
    }
    let Search { best, runs, .. } = search;
    let after = best.length();
    let Attempt { result, schedule, turns, .. } = best;
    Some(Failure { schedule, result, seed: launch.seed, before, after, runs, turns })
}

/// The shortest failing run so far.
struct Search<M> {
    best: Attempt<M>,
    /// The first moments of the plain order's run, which does not fail.
    moments: Vec<Moment>,
    runs: u32,
    spent: u64,
}

impl<M> Search<M> {
    fn goes_on(&self) -> bool {
        self.runs < RUNS && self.spent < STEPS
    }

    /// Looks for a short prefix of the choices that fails. The empty prefix is known not to.
    fn prefix(&mut self, fails: &mut impl FnMut(&mut Self, Vec<Choice>) -> bool) {
        let whole = self.best.schedule.0.clone();
        let (mut passes, mut failing) = (0, whole.len());
        while failing - passes > 1 {
            let middle = passes + (failing - passes) / 2;
            if fails(self, whole[..middle].to_vec()) {
                failing = middle;
            } else {
                passes = middle;
            }
        }
    }

    /// Leaves out parts of the choices, in ever smaller parts, until none can be left out.
    fn without(&mut self, fails: &mut impl FnMut(&mut Self, Vec<Choice>) -> bool) {
        let mut parts = 2;
        while self.best.schedule.len() > 1 {
            let choices = self.best.schedule.0.clone();
            let size = choices.len().div_ceil(parts);
            let found = (0..choices.len().div_ceil(size)).any(|part| {
                // Late choices first: those before them keep their meaning.
                let end = choices.len() - part * size;
                let rest = choices[..end.saturating_sub(size)].iter().chain(&choices[end..]);
                let rest: Vec<_> = rest.copied().collect();
                fails(self, rest)
            });
            match found {
                true => parts = (parts - 1).max(2),
                false if size == 1 || !self.goes_on() => return,
                false => parts = (parts * 2).min(choices.len()),
            }
        }
    }

    /// Tries each of the actions alone, at each moment.
    fn alone(&mut self, fails: &mut impl FnMut(&mut Self, Vec<Choice>) -> bool) {
        if self.best.schedule.len() < 2 {
            return;
        }
        let action = |choice: &Choice| if let Choice::At(_, action) = choice { Some(*action) } else { None };
        let actions: Vec<_> = self.best.schedule.0.iter().filter_map(action).collect();
        let moments = std::mem::take(&mut self.moments);
        let all = moments.into_iter().flat_map(|moment| actions.iter().map(move |&action| Choice::At(moment, action)));
        for choice in all.take(RUNS_ALONE as usize) {
            if fails(self, vec![choice]) || !self.goes_on() {
                return;
            }
        }
    }
}

impl EmulatorError {
    /// Whether both are of one kind and at the same places in the source.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let both = |first: Site, second: Site| if first < second { [first, second] } else { [second, first] };
        match (self, other) {
            (Self::Race { first: a, second: b, .. }, Self::Race { first: c, second: d, .. }) => {
                both(a.site, b.site) == both(c.site, d.site)
            }
            (Self::Misuse { site, .. }, Self::Misuse { site: other, .. }) => site == other,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}
