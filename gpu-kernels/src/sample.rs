//! Choosing the token after each row: the largest logit, or a draw from the model's distribution.
//!
//! Penalties, temperature, top-k, top-p and min-p are applied in this order. The token is drawn from what is left by
//! inverting the cumulative distribution in vocabulary order. Logits are read, never changed.
//!
//! ```text
//! best logit ─┬─ greedy ─► token
//!             ├─ top-k ─► the k-th best of all threads' best logits ─► candidates at least as good
//!             │            ─► one CTA ranks them, and draws
//!             └─ top-p, min-p, none ─► (histograms ─►) least logit kept ─► masses of slices
//!                          ─► the slice that the draw falls into
//! ```
//!
//! A row's logits are split over a [`team`] of CTAs that wait for each other, as many as it takes to leave none of the
//! card idle; with many rows each CTA has rows of its own. What a large top-k keeps, or a top-p without top-k, is found
//! by a radix select over all logits ([`select`]), so any setting is exact.
//!
//! # Order
//! A token's mass is the integer `⌊exp(logit − max) · 2⁴⁰⌋`. Integer sums are associative, so histograms and totals
//! come out the same however the threads interleave and however many CTAs there are. The random number is a function of
//! the seed and of the token's position, so a draw depends on the row's own history alone.
//!
//! # Why accepting a draft is a comparison
//! Rejection sampling accepts a draft `d` with probability `min(1, p(d) / q(d))`, and on refusal draws from the
//! normalised excess of `p` over `q` (Leviathan et al., 2023). An n-gram draft is proposed with certainty: `q(d) = 1`.
//! Then it is accepted with probability `p(d)`, and on refusal the draw is from `p` without `d`. Drawing from `p` and
//! comparing does the same in one stroke. And since the draw is the same with or without the draft, drafting does not
//! change sampled output either.
//!
//! # Safety
//! Functions that are not kernels are parts of `sample`, `sample_each` or what notes logits: whole CTAs call them, and
//! for a row all CTAs of its [`team`], which take the same branches, since they wait for each other. So launches are
//! cooperative. Inputs are as the launch's parameter block says. A CTA has [`SHARED_BYTES`] of dynamic shared memory to
//! itself. The choice that is being made lies there from when `choose` begins until the CTA has synchronised after it.

mod mass;
mod row;
mod select;
mod team;

use core::marker::PhantomData;

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, device, kernel, math, thread, warp};

pub(crate) use mass::key;
pub(crate) use mass::masses_of;
use mass::{REACH, logit, share};
pub use mass::{UNIT_MASS, best_token, mass, mass_of, random, rank, ranked_logit, ranked_token};
use row::{Change, Penalised};
pub(crate) use row::{Inputs, Raw, Row, SIDE_BY_SIDE};
pub use select::MOST_VOCAB;
pub(crate) use select::{All, Count, Question, select};
use select::{BINS, Mass, One};
pub(crate) use team::block_max;
pub(crate) use team::{MOST_CANDIDATES, Team};
pub use team::{MOST_SPLITS, SCRATCH_WORDS, ZEROED_WORDS, splits};
use team::{block_total, block_totals};

use crate::step::{NO_TOKEN, Rows};

/// In the word of a token's uses: the token occurs in the prompt.
pub const PROMPTED: u32 = 1;
/// In the word of a token's uses: each time that the token occurs in the output adds this.
pub const GENERATED: u32 = 2;

pub(crate) const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// CTAs that an SM holds at once, of the kernels that work on rows of logits.
pub const CTAS_PER_SM: u32 = 2;

// Shared memory: a total for each warp, a few words of results, the choice that is made, and a histogram or candidates.
const TOTALS: u32 = 0;
const RESULT: u32 = TOTALS + WARPS * 8;
const CHOICE: u32 = RESULT + 4 * 8;
const HISTOGRAM: u32 = CHOICE + 16 * 4;
pub(crate) const RANKS: u32 = HISTOGRAM;
const WEIGHTS: u32 = RANKS + MOST_CANDIDATES * 8;
/// Dynamic shared memory of the kernels that work on rows of logits in teams.
pub const SHARED_BYTES: u32 = HISTOGRAM + 3 * BINS * 4;
const _: () = assert!(WEIGHTS + MOST_CANDIDATES * 8 <= SHARED_BYTES);

/// How rows of logits are split over CTAs, and the memory through which the CTAs of a row synchronise. Cooperative
/// launches; grid: teams of [`splits`](Self::splits) CTAs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Split {
    /// `[teams, SCRATCH_WORDS]`. The first [`ZEROED_WORDS`] of each team must be zero before the first launch; each
    /// launch leaves them zero.
    pub scratch: GlobalMut<u64>,
    /// CTAs of a row: [`splits`].
    pub splits: u32,
}

impl Split {
    /// The number of this CTA's team, how many teams there are, and the team.
    ///
    /// # Safety
    /// The CTA is of the launch that this is a part of the parameters of: [`splits`](Self::splits) is not 0, and there
    /// is scratch for every team.
    #[device]
    pub(crate) unsafe fn team(&self) -> (u32, u32, Team) {
        // SAFETY: the caller's word.
        unsafe {
            cuda_std::assume(self.splits > 0);
            let (number, rank) = (thread::block_idx_x() / self.splits, thread::block_idx_x() % self.splits);
            let team = Team::new(self.splits, rank, self.scratch.at(number as usize * SCRATCH_WORDS));
            (number, thread::grid_dim_x() / self.splits, team)
        }
    }
}

/// Parameters of [`sample`]. Cooperative; grid: a [`Split`]'s, with as many teams as rows from `first_row` on, or with
/// fewer teams of one CTA each, which take turns. Shared memory: [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Sample {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[vocab]` uses of tokens: [`PROMPTED`], [`GENERATED`].
    pub uses: Global<u32>,
    /// `[rows]` the chosen tokens; [`NO_TOKEN`] if the largest logit is not finite.
    pub sampled: GlobalMut<u32>,
    /// How the token is chosen.
    pub settings: Settings,
    /// How rows are split.
    pub split: Split,
    /// Tokens, at most [`MOST_VOCAB`].
    pub vocab: u32,
    /// First row that needs a token.
    pub first_row: u32,
}

impl Sample {
    #[device]
    const fn inputs(&self) -> Inputs {
        Inputs { rows: self.rows, logits: self.logits, uses: self.uses, vocab: self.vocab }
    }
}

/// How a token is chosen.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, cuda_std::Layout)]
pub struct Settings {
    /// Chooses the random numbers.
    pub seed: u64,
    /// 0 takes the largest logit.
    pub temperature: f32,
    /// Keep the tokens whose logit is at least the k-th largest; 0 keeps all.
    pub top_k: u32,
    /// Keep the likeliest tokens that together have this share; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of seen tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of generated tokens; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time that it was generated; 0 is off.
    pub frequency_penalty: f32,
}

impl Settings {
    /// Takes the likeliest token, whatever came before.
    pub const GREEDY: Self = Self {
        seed: 0,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
    };

    /// Whether what came before changes logits.
    #[device]
    const fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// The settings in the last nine of [`Choice::words`].
    ///
    /// # Safety
    /// There are nine words, which nobody writes meanwhile.
    #[device]
    unsafe fn load(words: Shared<u32>) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            Self {
                seed: words.load(0) as u64 | (words.load(1) as u64) << 32,
                temperature: f32::from_bits(words.load(2)),
                top_k: words.load(3),
                top_p: f32::from_bits(words.load(4)),
                min_p: f32::from_bits(words.load(5)),
                repetition_penalty: f32::from_bits(words.load(6)),
                presence_penalty: f32::from_bits(words.load(7)),
                frequency_penalty: f32::from_bits(words.load(8)),
            }
        }
    }
}

/// Chooses the token after each row from `first_row` on.
#[kernel(threads = THREADS, min_blocks = 2)]
pub unsafe fn sample(p: Sample) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (number, teams, _) = p.split.team();
        let (mut row, count) = (p.first_row + number, p.rows.count.load(0));
        while row < count {
            let (_, _, team) = p.split.team();
            // Earlier drafts of this step are part of this row's history.
            let (drafts, position) = (p.first_row + 1, p.rows.positions.load(row as usize));
            // The whole CTA is done with the choice before, whose place is overwritten.
            thread::sync_threads();
            if thread::thread_idx_x() == 0 {
                Choice { row, drafts, slot: 0, position, settings: p.settings }.store(shared::dynamic(CHOICE));
            }
            choose(team, p.inputs(), p.sampled.at(row as usize));
            row += teams;
        }
    }
}

/// How the token after one row of a batch is chosen: the words of a row of [`SampleEach::choices`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Which row of the logits.
    pub row: u32,
    /// From this row of the step on, up to `row`, the tokens are drafts; `row + 1` if that of `row` is no draft.
    pub drafts: u32,
    /// Which row of `uses`.
    pub slot: u32,
    /// Position of the row's token.
    pub position: u32,
    /// How the token is chosen.
    pub settings: Settings,
}

impl Choice {
    /// Words of a choice.
    pub const WORDS: usize = 13;

    /// The choice in these [`words`](Self::words).
    ///
    /// # Safety
    /// There are [`WORDS`](Self::WORDS), which nobody writes meanwhile.
    #[device]
    unsafe fn load(words: Shared<u32>) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let settings = Settings::load(words.at(4));
            Self { row: words.load(0), drafts: words.load(1), slot: words.load(2), position: words.load(3), settings }
        }
    }

    /// Puts its [words](Self::words) there.
    ///
    /// # Safety
    /// There is room for [`WORDS`](Self::WORDS), and nobody else uses it meanwhile. One lane calls it.
    #[device]
    unsafe fn store(&self, to: Shared<u32>) {
        let words = self.words();
        // SAFETY: the caller's word.
        unsafe {
            unroll!(I < 13 of 16; {
                to.store(I, words[I]);
            });
        }
    }

    /// As the device reads it.
    #[device]
    pub const fn words(&self) -> [u32; Self::WORDS] {
        let s = &self.settings;
        [
            self.row,
            self.drafts,
            self.slot,
            self.position,
            s.seed as u32,
            (s.seed >> 32) as u32,
            s.temperature.to_bits(),
            s.top_k,
            s.top_p.to_bits(),
            s.min_p.to_bits(),
            s.repetition_penalty.to_bits(),
            s.presence_penalty.to_bits(),
            s.frequency_penalty.to_bits(),
        ]
    }
}

/// Parameters of [`sample_each`]. Cooperative; grid: a [`Split`]'s, with as many teams as choices, or with fewer teams
/// of one CTA each, which take turns. Shared memory: [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct SampleEach {
    /// The rows of this step.
    pub rows: Rows,
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[slots, vocab]` uses of tokens: [`PROMPTED`], [`GENERATED`]; read only for choices with penalties.
    pub uses: Global<u32>,
    /// `[count, Choice::WORDS]`.
    pub choices: Global<u32>,
    /// `[count]` the chosen tokens, as [`Sample::sampled`].
    pub sampled: GlobalMut<u32>,
    /// How rows are split.
    pub split: Split,
    /// Tokens, at most [`MOST_VOCAB`].
    pub vocab: u32,
    /// Choices.
    pub count: u32,
}

impl SampleEach {
    #[device]
    const fn inputs(&self) -> Inputs {
        Inputs { rows: self.rows, logits: self.logits, uses: self.uses, vocab: self.vocab }
    }
}

/// Chooses tokens after rows of many sequences, each by its own settings: as [`sample`] would.
#[kernel(threads = THREADS, min_blocks = 2)]
pub unsafe fn sample_each(p: SampleEach) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (mut choice, teams, _) = p.split.team();
        while choice < p.count {
            let (_, _, team) = p.split.team();
            let (words, tid) = (p.choices.at(choice as usize * Choice::WORDS), thread::thread_idx_x() as usize);
            // The whole CTA is done with the choice before, whose place is overwritten.
            thread::sync_threads();
            if tid < Choice::WORDS {
                shared::dynamic::<u32>(CHOICE).store(tid, words.load(tid));
            }
            choose(team, p.inputs(), p.sampled.at(choice as usize));
            choice += teams;
        }
    }
}

/// Makes the choice that lies in shared memory, and stores the token.
///
/// # Safety
/// Threads of the CTA have put the choice there; it need not have synchronised since. The team is fresh, and its row
/// among the inputs. `token` is this choice's, and nobody else's.
#[device]
unsafe fn choose(mut team: Team, inputs: Inputs, token: GlobalMut<u32>) {
    // SAFETY: the caller's word.
    unsafe {
        thread::sync_threads();
        let choice = choice();
        let logits = inputs.logits.at(choice.row as usize * inputs.vocab as usize);
        let mut row = Row { inputs, logits, slice: team.slice(inputs.vocab) };
        let mut among_few = true;
        loop {
            if choice.settings.penalises() {
                choose_from::<Penalised>(&mut team, row, among_few, token);
            } else {
                choose_from::<Raw>(&mut team, row, among_few, token);
            }
            if !team.is_last() {
                return;
            }
            let candidates = team.nominated();
            if candidates > 0 && candidates <= MOST_CANDIDATES {
                draw_from_candidates(&team, candidates, token);
            }
            team.reset();
            if candidates <= MOST_CANDIDATES {
                return;
            }
            // More tokens are about as likely as the k-th than candidates have room: the last CTA takes the row again,
            // alone and without candidates.
            team = team.alone();
            row.slice = (0, inputs.vocab);
            among_few = false;
        }
    }
}

/// The choice that is being made. Callers load it again wherever they need a part of it.
///
/// # Safety
/// The choice lies in shared memory, and the CTA has synchronised since.
#[device]
unsafe fn choice() -> Choice {
    // SAFETY: the caller's word.
    unsafe { Choice::load(shared::dynamic(CHOICE)) }
}

/// The random number of the choice.
///
/// # Safety
/// As for [`choice`].
#[device]
unsafe fn number() -> u64 {
    // SAFETY: the caller's word.
    let choice = unsafe { choice() };
    random(choice.settings.seed, u64::from(choice.position) + 1)
}

/// Stores the token, or nominates candidates for it: these only if `among_few`.
///
/// Which tokens are kept is decided by logits after the temperature. They are found by logits before it, which have the
/// same order and need no division.
///
/// # Safety
/// `row` has this CTA's slice, and the choice's logits. `among_few` is the same for the whole team.
#[device]
unsafe fn choose_from<C: Change>(team: &mut Team, row: Row, among_few: bool, token: GlobalMut<u32>) {
    // SAFETY: the caller's word.
    unsafe {
        let mine = row.best::<C>();
        let best = team.max(mine);
        let likeliest = best_token(best);
        if thread::thread_idx_x() == 0 && team.rank == 0 {
            token.store(0, likeliest);
        }
        let temperature = choice().settings.temperature;
        if temperature == 0.0 || likeliest == NO_TOKEN {
            return;
        }
        let max = ranked_logit(best) / temperature;
        // The least logit that may have mass; ranks from there on are in question.
        let reach = f64::from(max) - REACH - f64::from(max.abs()) * 1e-6;
        let mut least = key((reach * f64::from(temperature)) as f32);
        let top = best | u64::from(u32::MAX);
        let question = |least: u32| Question { low: u64::from(least) << 32, high: top, narrow: 32, enough: 0 };
        let top_k = choice().settings.top_k;
        if top_k > 0 && top_k < row.inputs.vocab {
            if among_few && nominate_best::<C>(team, &row, mine, question(least), top_k, temperature) {
                return;
            }
            let kept = select(team, &All(row, PhantomData::<C>), question(least), Count, |_| top_k.into());
            least = least.max(tied((kept >> 32) as u32, temperature));
        }
        if choice().settings.top_p < 1.0 {
            let weight = Mass { max, temperature };
            let target = |all| share(choice().settings.top_p, all);
            let kept = select(team, &All(row, PhantomData::<C>), question(least), weight, target);
            least = least.max(tied((kept >> 32) as u32, temperature));
        }
        let least_mass = least_mass(choice().settings.min_p);
        draw::<C>(team, row, logit(least), token, |logits| {
            let masses = masses_of(&logits.map(|logit| logit / temperature - max));
            masses.map(|mass| if mass >= least_mass { mass } else { 0 })
        });
    }
}

/// Nominates the `count` best tokens among the ranks in `question`, others that the temperature makes equal to the last
/// of these, and some more. Each thread passes its best rank: the `count`-th best of these is a lower bound of the
/// `count` best tokens. If fewer than `count` threads have a rank in question, it nominates nothing and returns false.
///
/// # Safety
/// `mine` is the thread's best rank in the CTA's slice of the row. `question`, `count`, not 0, and `temperature` are
/// the same for the whole team.
#[device]
pub(crate) unsafe fn nominate_best<C: Change>(
    team: &mut Team,
    row: &Row,
    mine: u64,
    question: Question,
    count: u32,
    temperature: f32,
) -> bool {
    // SAFETY: the caller's word.
    unsafe {
        // A bound that at most `2 · count` threads reach is good enough. Somewhat more logits than threads reach it.
        let question = Question { enough: 2 * u64::from(count), ..question };
        let kept = select(team, &One(mine), question, Count, |_| count.into());
        if kept == 0 {
            return false;
        }
        let least = logit(tied((kept >> 32) as u32, temperature));
        row.each::<C>(|logit| logit >= least, |token, logit| team.nominate(rank(logit, token)));
        true
    }
}

/// The key of the least logit that, divided by the temperature, is not below the logit of `key` divided by it; 0 for 0.
#[device]
fn tied(key: u32, temperature: f32) -> u32 {
    if key == 0 || temperature == 1.0 {
        return key;
    }
    let least = logit(key) / temperature;
    let (mut below, mut at) = (self::key(f32::NEG_INFINITY) - 1, key);
    while at - below > 1 {
        let middle = below + (at - below) / 2;
        if logit(middle) / temperature >= least {
            at = middle;
        } else {
            below = middle;
        }
    }
    at
}

/// The least mass that min-p keeps.
#[device]
fn least_mass(min_p: f32) -> u64 {
    if min_p > 0.0 { share(min_p, UNIT_MASS) } else { 0 }
}

/// Draws a token. Logits from `least` on weigh what `weigh` says, and others nothing. The token is the first in
/// vocabulary order at which the running total of weights exceeds a random share of the total. The CTA that has it in
/// its slice stores it: it narrows its slice to the part of one warp, and that again, until a single warp has the rest.
///
/// # Safety
/// `row` has this CTA's slice, and `least` is the same for the whole team, as `weigh` does the same.
#[device]
unsafe fn draw<C: Change>(
    team: &mut Team,
    mut row: Row,
    least: f32,
    token: GlobalMut<u32>,
    weigh: impl Fn(&[f32; SIDE_BY_SIDE]) -> [u64; SIDE_BY_SIDE],
) {
    // SAFETY: the caller's word.
    unsafe {
        let own = row.warp_weight::<C>(least, &weigh);
        let (before, slice) = block_totals(own);
        let (before_slice, all) = team.totals(slice);
        let drawn = math::mul_hi_u64(number(), all);
        if drawn < before_slice || drawn >= before_slice + slice {
            return;
        }
        // The weight before this warp's share of the slice, and the weight of that share.
        let (mut before, mut own) = (before_slice + before, own);
        let result = shared::dynamic::<u64>(RESULT);
        loop {
            if thread::lane_id() == 0 && before <= drawn && drawn < before + own {
                result.store(0, thread::warp_id().into());
                result.store(1, before);
            }
            thread::sync_threads();
            row = row.narrowed(result.load(0) as u32);
            let start = result.load(1);
            if row.slice.1 - row.slice.0 <= 32 {
                if thread::warp_id() == 0 {
                    let mut weight = 0;
                    row.one_each::<C>(|logit| {
                        weight = if logit >= least { weigh(&[logit; SIDE_BY_SIDE])[0] } else { 0 }
                    });
                    let upto = start + warp::inclusive_sum(weight);
                    if upto - weight <= drawn && drawn < upto {
                        token.store(0, row.slice.0 + thread::lane_id());
                    }
                }
                return;
            }
            own = row.warp_weight::<C>(least, &weigh);
            before = start + block_totals(own).0;
        }
    }
}

/// Draws from the team's candidates, which include all tokens that top-k can keep. A thread has one candidate.
///
/// # Safety
/// This CTA is the team's last, and has not reset it. There are `count` candidates, at most [`MOST_CANDIDATES`].
#[device]
unsafe fn draw_from_candidates(team: &Team, count: u32, token: GlobalMut<u32>) {
    // SAFETY: the caller's word.
    unsafe {
        let (s, tid) = (choice().settings, thread::thread_idx_x());
        let (ranks, weights) = (shared::dynamic::<u64>(RANKS), shared::dynamic::<u64>(WEIGHTS));
        let mut mine = 0;
        if tid < count {
            let nominated = team.candidate(tid);
            mine = rank(ranked_logit(nominated) / s.temperature, ranked_token(nominated));
        }
        ranks.store(tid as usize, mine);
        // The best is a candidate.
        let max = ranked_logit(block_max(mine));
        let is_likelier = |rank: u64| rank >> 32 > mine >> 32;
        let mut kept = tid < count && sum_where(count, is_likelier, |_| 1) < u64::from(s.top_k);
        let mass = if kept { mass(ranked_logit(mine), max) } else { 0 };
        let put = |weight: u64| {
            thread::sync_threads();
            weights.store(tid as usize, weight);
            block_total(weight)
        };
        if s.top_p < 1.0 {
            let all = put(mass);
            kept &= sum_where(count, is_likelier, |i| weights.load(i)) < share(s.top_p, all);
        }
        let weight = if kept && mass >= least_mass(s.min_p) { mass } else { 0 };
        let drawn = math::mul_hi_u64(number(), put(weight));
        let is_before = |rank: u64| ranked_token(rank) < ranked_token(mine);
        let before = sum_where(count, is_before, |i| weights.load(i));
        if before <= drawn && drawn < before + weight {
            token.store(0, ranked_token(mine));
        }
    }
}

/// The total weight of those of the first `count` candidates for whose ranks `condition` holds.
///
/// # Safety
/// The CTA's threads have left `count` ranks in shared memory, and what `weigh` reads, and synchronised.
#[device]
unsafe fn sum_where(count: u32, condition: impl Fn(u64) -> bool, weigh: impl Fn(usize) -> u64) -> u64 {
    // SAFETY: the caller's word.
    unsafe {
        let ranks = shared::dynamic::<u64>(RANKS);
        let (mut sum, mut i) = (0, 0);
        while i < count as usize {
            sum += if condition(ranks.load(i)) { weigh(i) } else { 0 };
            i += 1;
        }
        sum
    }
}
