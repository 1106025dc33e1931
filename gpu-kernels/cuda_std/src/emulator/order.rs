//! The order of lanes, warps, blocks and copies: drawn from a seed, or read from a schedule that was written down.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::str::FromStr;

use super::world::World;

/// SplitMix64: small, fast, and any seed is a good one.
pub struct Rng(u64);

impl Rng {
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    #[inline]
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }
}

/// A lane, by the number of its block and its index in the block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Who {
    pub block: u32,
    pub thread: u32,
}

/// A moment of a run: the lane that made the last step, and how many steps it has made. None before the first step.
pub type Moment = Option<(Who, u64)>;

/// What happens at a moment instead of what the plain order has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// This lane runs next.
    Run(Who),
    /// The copy of this number, among those that the lane started, lands.
    Land(Who, u32),
}

/// One way in which a schedule differs from the plain order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// This many clusters more than one are resident at once.
    Resident(u32),
    /// In the shuffle of the clusters, this step swaps with the place so many below its own.
    Swap(u32, u32),
    At(Moment, Action),
}

/// An order of lanes, warps, blocks and copies, written as the choices in which it differs from the plain order.
///
/// In the plain order a lane runs until it waits, polls or ends. Then the next lane of its warp runs, then the next
/// warp. A copy lands only when all lanes wait or poll, the oldest first. Blocks start in the order of their numbers,
/// one cluster at a time. A choice names its moment by the steps that a lane has made, so it means the same whatever
/// other choices are made:
///
/// | choice | meaning |
/// |---|---|
/// | `0.40@12>0.7` | after step 12 of lane 40 of block 0, lane 7 of block 0 runs |
/// | `0.40@12+0.64#3` | at the same moment, copy number 3 (from 0) of those that lane 64 of block 0 started lands |
/// | `begin>0.7` | lane 7 of block 0 runs first |
/// | `resident:2` | two more clusters than one are resident at once |
/// | `swap:5:3` | in the shuffle of the clusters, number 5 changes places with the third below it |
///
/// Choices are separated by spaces; the plain order itself is `plain`.
///
/// ```
/// use cuda_std::emulator::Schedule;
///
/// let schedule: Schedule = "resident:2 0.40@12>0.7".parse().unwrap();
/// assert_eq!(schedule.len(), 2);
/// assert_eq!(schedule.to_string(), "resident:2 0.40@12>0.7");
/// assert_eq!(Schedule::default().to_string(), "plain");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule(pub(super) Vec<Choice>);

impl Schedule {
    /// How many choices differ from the plain order.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it is the plain order.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.block, self.thread)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Resident(more) => return write!(f, "resident:{more}"),
            Self::Swap(step, below) => return write!(f, "swap:{step}:{below}"),
            Self::At(None, _) => f.write_str("begin")?,
            Self::At(Some((who, step)), _) => write!(f, "{who}@{step}")?,
        }
        match self {
            Self::At(_, Action::Run(who)) => write!(f, ">{who}"),
            Self::At(_, Action::Land(who, number)) => write!(f, "+{who}#{number}"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("plain");
        }
        for (i, choice) in self.0.iter().enumerate() {
            write!(f, "{}{choice}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

/// Why a text is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{part}` is no choice of a schedule: those are like `0.40@12>0.7`, or `plain` alone")]
pub struct ParseScheduleError {
    /// The part that is wrong.
    part: String,
}

fn parse_who(text: &str) -> Option<Who> {
    let (block, thread) = text.split_once('.')?;
    Some(Who { block: block.parse().ok()?, thread: thread.parse().ok()? })
}

fn parse_choice(text: &str) -> Option<Choice> {
    if let Some(more) = text.strip_prefix("resident:") {
        return more.parse().ok().map(Choice::Resident);
    }
    if let Some(swap) = text.strip_prefix("swap:") {
        let (step, below) = swap.split_once(':')?;
        return Some(Choice::Swap(step.parse().ok()?, below.parse().ok()?));
    }
    let (moment, action) = text.split_at(text.find(['>', '+'])?);
    let moment = if moment == "begin" {
        None
    } else {
        let (who, step) = moment.split_once('@')?;
        Some((parse_who(who)?, step.parse().ok()?))
    };
    let action = if let Some(who) = action.strip_prefix('>') {
        Action::Run(parse_who(who)?)
    } else {
        let (who, number) = action.strip_prefix('+')?.split_once('#')?;
        Action::Land(parse_who(who)?, number.parse().ok()?)
    };
    Some(Choice::At(moment, action))
}

impl FromStr for Schedule {
    type Err = ParseScheduleError;

    fn from_str(text: &str) -> Result<Self, ParseScheduleError> {
        match text.trim() {
            "plain" => return Ok(Self::default()),
            "" => return Err(ParseScheduleError { part: text.to_string() }),
            _ => {}
        }
        let choice = |part: &str| parse_choice(part).ok_or_else(|| ParseScheduleError { part: part.to_string() });
        text.split_whitespace().map(choice).collect::<Result<_, _>>().map(Self)
    }
}

/// A schedule, arranged for look-ups.
struct Written {
    resident: u32,
    swaps: HashMap<u32, u32>,
    actions: HashMap<Moment, VecDeque<Action>>,
}

/// Where the order comes from, and the record of it.
pub struct Order {
    source: Result<Rng, Written>,
    record: Option<Vec<Choice>>,
    /// Copies that the plain order, too, has landed since the last step. They are recorded only if another choice
    /// follows at the same moment.
    landed: Vec<Action>,
}

impl Order {
    pub fn seeded(seed: u64) -> Self {
        Self { source: Ok(Rng(seed)), record: None, landed: Vec::new() }
    }

    pub fn written(schedule: &Schedule) -> Self {
        let mut written = Written { resident: 0, swaps: HashMap::new(), actions: HashMap::new() };
        for &choice in &schedule.0 {
            match choice {
                Choice::Resident(more) => written.resident = more,
                Choice::Swap(step, below) => drop(written.swaps.insert(step, below)),
                Choice::At(moment, action) => written.actions.entry(moment).or_default().push_back(action),
            }
        }
        Self { source: Err(written), record: None, landed: Vec::new() }
    }

    pub fn recorded(self) -> Self {
        Self { record: Some(Vec::new()), ..self }
    }

    #[inline]
    pub fn records(&self) -> bool {
        self.record.is_some()
    }

    /// The record: the choices that differ from the plain order.
    pub fn take_record(&mut self) -> Schedule {
        Schedule(self.record.take().unwrap_or_default())
    }

    fn note(&mut self, choice: Choice) {
        if let Some(record) = &mut self.record {
            record.push(choice);
        }
    }

    /// The generator, if the order is drawn.
    #[inline]
    pub fn rng(&mut self) -> Option<&mut Rng> {
        self.source.as_mut().ok()
    }

    /// How many clusters more than one are resident, fewer than `most`.
    pub fn resident(&mut self, most: usize) -> u32 {
        let more = match &mut self.source {
            Ok(rng) => rng.below(most) as u32,
            Err(written) => written.resident % most as u32,
        };
        if more > 0 {
            self.note(Choice::Resident(more));
        }
        more
    }

    /// How many places below its own a step of the shuffle swaps with.
    pub fn swap(&mut self, step: usize) -> usize {
        let below = match &mut self.source {
            Ok(rng) => rng.below(step + 1),
            Err(written) => written.swaps.get(&(step as u32)).map_or(0, |&below| below as usize % (step + 1)),
        };
        if below > 0 {
            self.note(Choice::Swap(step as u32, below as u32));
        }
        below
    }

    /// Whether the schedule has an action left at a moment.
    #[inline]
    pub fn acts(&self, moment: Moment) -> bool {
        let actions = self.source.as_ref().err().and_then(|written| written.actions.get(&moment));
        actions.is_some_and(|actions| !actions.is_empty())
    }

    /// Takes the schedule's next action at a moment, if `takes` accepts it.
    fn action<T>(&mut self, moment: Moment, takes: impl Fn(Action) -> Option<T>) -> Option<T> {
        let actions = self.source.as_mut().err()?.actions.get_mut(&moment)?;
        let taken = takes(*actions.front()?)?;
        actions.pop_front();
        Some(taken)
    }
}

/// The chances of leaving a warp early, and of landing a copy: one in so many.
const LEAVE_WARP: u64 = 16;
const COMPLETE_COPY: u64 = 4;

impl World {
    /// Notes that a lane makes a step.
    #[inline]
    pub fn note_step(&mut self, lane: usize) {
        let place = &mut self.lanes[lane];
        place.steps += 1;
        let name = place.clock.name;
        self.moment = Some((Who { block: name.block(), thread: name.slot() }, place.steps));
        self.order.landed.clear();
    }

    /// The lane of a warp that goes on in the plain order, if one of its lanes can run.
    #[inline]
    fn plain_of_warp(&self, warp: usize) -> Option<usize> {
        let (runnable, last) = (self.warps[warp].runnable, self.warps[warp].last & 31);
        let next = (runnable.rotate_right(last).trailing_zeros() + last) & 31;
        (runnable != 0).then_some(warp * 32 + next as usize)
    }

    /// The lane that the plain order runs next: one of the warp that ran last, or of the next one if that warp polled
    /// or cannot run.
    fn plain(&self) -> Option<usize> {
        let (count, first) = (self.warps.len(), self.last_warp + usize::from(self.polls));
        let distance = |warp: usize| (warp + count - first % count) % count;
        let ready = self.ready.iter().map(|&warp| warp as usize).filter(|&warp| self.warps[warp].runnable != 0);
        self.plain_of_warp(ready.min_by_key(|&warp| distance(warp))?)
    }

    /// Records that `lane` runs next, if the plain order would have had another.
    #[inline]
    fn note_run(&mut self, lane: usize) {
        if self.order.records() && self.plain() != Some(lane) {
            let name = self.lanes[lane].clock.name;
            self.note_action(Action::Run(Who { block: name.block(), thread: name.slot() }));
        }
    }

    fn note_action(&mut self, action: Action) {
        let moment = self.moment;
        for landed in std::mem::take(&mut self.order.landed) {
            self.order.note(Choice::At(moment, landed));
        }
        self.order.note(Choice::At(moment, action));
    }

    /// Lands a copy in flight. `plain` says that the plain order lands it now, too.
    pub fn land(&mut self, nth: usize, plain: bool) {
        if self.order.records() {
            let (who, number) = self.flights[nth].name();
            match plain {
                true => self.order.landed.push(Action::Land(who, number)),
                false => self.note_action(Action::Land(who, number)),
            }
        }
        self.complete_flight(nth);
    }

    /// Lands copies that the order chooses to land now.
    pub fn land_chosen(&mut self) {
        let moment = self.moment;
        if let Some(rng) = self.order.rng() {
            if !self.ready.is_empty() && !self.flights.is_empty() && rng.next().is_multiple_of(COMPLETE_COPY) {
                let nth = rng.below(self.flights.len());
                return self.land(nth, false);
            }
        } else {
            let land = |action| if let Action::Land(who, number) = action { Some((who, number)) } else { None };
            let mut landed = false;
            while let Some(name) = self.order.action(moment, land) {
                if let Some(nth) = self.flights.iter().position(|flight| flight.name() == name) {
                    self.land(nth, false);
                    landed = true;
                }
            }
            if landed {
                return;
            }
        }
        // If lanes only poll, there may be nothing left to wait for but a copy.
        if !self.flights.is_empty() && self.idle > 0 && self.idle.is_multiple_of(self.lanes.len() as u64) {
            self.land(0, true);
        }
    }

    /// The lane that starts a turn. At least one lane can run.
    pub fn first_lane(&mut self) -> usize {
        let moment = self.moment;
        let lane = match self.order.rng() {
            Some(rng) => {
                let warp = self.ready[rng.below(self.ready.len())] as usize;
                let rotation = (rng.next() & 31) as u32;
                let runnable = self.warps[warp].runnable;
                warp * 32 + ((runnable.rotate_right(rotation).trailing_zeros() + rotation) & 31) as usize
            }
            None => {
                let run = |action| if let Action::Run(who) = action { Some(who) } else { None };
                let wanted = self.order.action(moment, run).and_then(|who| self.runnable(who));
                wanted.or_else(|| self.plain()).expect("a lane can run")
            }
        };
        self.note_run(lane);
        lane
    }

    /// The index of a lane, if it can run.
    fn runnable(&self, who: Who) -> Option<usize> {
        let running = |block: &super::world::Block| block.linear == who.block && block.exited < self.launch.threads;
        let slot = self.blocks.iter().position(running)?;
        let thread = (who.thread < self.launch.threads).then_some(who.thread as usize)?;
        let lane = slot * self.threads() + thread;
        (self.warps[lane / 32].runnable >> (lane % 32) & 1 != 0).then_some(lane)
    }

    /// The lane that continues the turn of a warp, if the turn continues.
    #[inline]
    pub fn next_lane(&mut self, warp: usize) -> Option<usize> {
        let runnable = self.warps[warp].runnable;
        if self.polls || runnable == 0 {
            return None;
        }
        let lane = match self.order.rng() {
            Some(rng) => {
                let draw = rng.next();
                if (draw >> 32).is_multiple_of(LEAVE_WARP) {
                    return None;
                }
                let rotation = (draw & 31) as u32;
                warp * 32 + ((runnable.rotate_right(rotation).trailing_zeros() + rotation) & 31) as usize
            }
            None => {
                if self.order.acts(self.moment) {
                    return None;
                }
                self.plain_of_warp(warp)?
            }
        };
        self.note_run(lane);
        Some(lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_are_read_as_they_are_written() {
        for text in ["plain", "begin>0.3", "resident:2 swap:5:1 0.40@12>0.7 3.0@9+0.64#3 begin+0.1#0"] {
            assert_eq!(text.parse::<Schedule>().unwrap().to_string(), text);
        }
        for text in
            ["", "3", "0.4@5", "0.4@5>", "0.4@5>3", "0.4>0.3", "0.4@5+0.3", "swap:3", "resident:", "plain 0.4@5>0.3"]
        {
            let error = text.parse::<Schedule>().unwrap_err().to_string();
            assert!(error.contains("is no choice of a schedule"), "{text}: {error}");
        }
    }
}
