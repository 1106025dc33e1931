//! Drafts of a step's sequences: by n-gram match, on the host, as the n-gram operator makes them on a device, budget
//! and all; and by a [model](model) beside it.

pub(crate) mod head;
mod model;

use gpu_kernels::drafting;
use rayon::prelude::*;

pub(crate) use self::model::{ModelDrafter, WINDOW, Wanted};
use super::plan::{Plan, Slot, Work};
use super::running::Running;
use crate::Error;
use crate::backend::Drafted;
use crate::draft::{Draft, DraftTokens, NgramDraft};

/// Drafts for a work.
#[derive(Clone, Default)]
pub struct Drafts {
    /// What was found.
    pub proposal: DraftTokens,
    /// How many of them, from the first on, run.
    pub count: usize,
    /// How many of them, from the first on, a model has said.
    pub by_model: usize,
}

impl Drafts {
    /// Those that run.
    pub fn run(&self) -> &[u32] {
        &self.proposal.tokens[..self.count]
    }

    /// Those of the model among them, in a step that has brought `tokens`.
    pub fn by_model(&self, tokens: &[u32]) -> Drafted {
        let drafted = self.by_model.min(self.count);
        Drafted { drafted, accepted: drafted.min(tokens.len() - 1) }
    }
}

/// Whether a work's sequence may draft, and who makes its proposal.
pub enum Drafting<'a> {
    /// It may not.
    No,
    /// It is [there](Running::guess), or a model makes it here.
    Here(&'a Running),
    /// Somebody else makes it meanwhile.
    Elsewhere(&'a Running),
}

impl<'a> Drafting<'a> {
    /// The sequence, if it may draft.
    const fn sequence(&self) -> Option<&'a Running> {
        match self {
            Self::No => None,
            Self::Here(running) | Self::Elsewhere(running) => Some(*running),
        }
    }
}

/// Who drafts for the sequences of a batch.
#[derive(Default)]
pub struct Drafters {
    /// How, if at all.
    pub settings: Option<Draft>,
    /// The draft model, if there is one.
    pub model: Option<ModelDrafter>,
    /// Whether the next step's drafts are likely to be worth their rows, by what the last one has brought.
    are_worthwhile: bool,
}

impl Drafters {
    /// Without a model: then drafts are those of an n-gram match.
    pub fn new(settings: Option<Draft>) -> Self {
        Self { settings, model: None, are_worthwhile: false }
    }

    /// The settings of the n-gram match.
    pub fn match_settings(&self) -> Option<NgramDraft> {
        self.settings.map(|draft| draft.match_settings())
    }

    /// Forgets the sequences in the slots that `plan` frees or gives to others.
    pub fn forget_left(&mut self, plan: &Plan) {
        let Some(model) = &mut self.model else { return };
        let started = plan.started.iter().map(|started| &started.slot);
        plan.freed.iter().chain(started).for_each(|slot| model.forget(*slot));
    }

    /// Whether to wait for tokens that are being chosen, for drafts that follow them.
    pub const fn are_worthwhile(&self) -> bool {
        self.are_worthwhile
    }

    /// Looks for what may follow the newest tokens of sequences that may draft, none of a form, and whether that would
    /// be worth their rows. `others` are rows of sequences whose proposals are made elsewhere.
    pub fn look(&mut self, mut sequences: Vec<(Slot, &mut Running)>, others: usize, cost: drafting::Cost) {
        self.are_worthwhile = false;
        let Some(settings) = self.settings else { return };
        let draft = settings.match_settings();
        if settings.matches_ngrams() {
            sequences.par_iter_mut().for_each(|(_, running)| running.look(&draft));
        }
        let rows = (sequences.len() + others) as u32;
        let is_worthwhile = |running: &Running| {
            let acceptance = if running.guess.forced { drafting::ONE } else { running.acceptance };
            let most = running.guess.tokens.len() as u32;
            drafting::worthwhile(acceptance, draft.cost(cost), rows.saturating_sub(1), most) > 0
        };
        self.are_worthwhile = others > 0 || sequences.iter().any(|(_, running)| is_worthwhile(running));
        if let (Some(model), Draft::Model(settings)) = (&mut self.model, settings) {
            let wanted: Vec<_> =
                sequences.iter().map(|(slot, running)| Wanted::of(*slot, running, draft.tokens)).collect();
            self.are_worthwhile |= model.is_worthwhile(&settings, cost, rows, &wanted);
        }
    }

    /// Drafts of each work: as many as the shared budget leaves and as are worthwhile where a row costs `cost`.
    /// `drafting` tells of a work's sequence; proposals that are not made here are asked of `elsewhere` when the others
    /// are there.
    ///
    /// # Errors
    /// A device error of the draft model.
    pub fn propose<'a>(
        &mut self,
        plan: &Plan,
        cost: drafting::Cost,
        drafting: impl Fn(&Work) -> Drafting<'a>,
        mut elsewhere: impl FnMut(&Work) -> DraftTokens,
    ) -> Result<Vec<Drafts>, Error> {
        let Some(settings) = self.settings.filter(|_| plan.draft_threshold > 0) else {
            return Ok(vec![Drafts::default(); plan.work.len()]);
        };
        let draft = settings.match_settings();
        let sequences: Vec<_> =
            plan.work.iter().map(|work| if work.samples { drafting(work) } else { Drafting::No }).collect();
        let most = |work: &Work| work.most_drafts.min(draft.tokens);
        // Which drafts there are does not depend on the budget, only how many of them are tried.
        let guess = |(work, sequence): (&Work, &Drafting<'_>)| {
            let Drafting::Here(running) = sequence else { return DraftTokens::default() };
            let mut guess = running.guess.clone();
            guess.tokens.truncate(most(work) as usize);
            guess
        };
        let mut found: Vec<DraftTokens> = plan.work.iter().zip(&sequences).map(guess).collect();
        for ((work, sequence), found) in plan.work.iter().zip(&sequences).zip(&mut found) {
            if matches!(sequence, Drafting::Elsewhere(_)) && work.most_drafts > 0 {
                *found = elsewhere(work);
                found.tokens.truncate(most(work) as usize);
            }
        }
        let chains = match (&mut self.model, settings) {
            (Some(model), Draft::Model(settings)) => {
                let wanted = plan.work.iter().zip(&sequences).map(|(work, sequence)| match sequence {
                    // What the form leaves needs no model.
                    Drafting::Here(running) if !running.guess.forced => {
                        Some(Wanted::of(work.slot, running, most(work)))
                    }
                    _ => None,
                });
                let rows = plan.work.iter().map(|work| work.rows).sum();
                model.propose(&settings, cost, rows, &wanted.collect::<Vec<_>>())?
            }
            _ => vec![Vec::new(); plan.work.len()],
        };

        // Whoever has a row in the budget is owed it, also who may not draft.
        let active = plan.work.iter().filter(|work| work.samples && work.rows == 1).count() as i64;
        let others = plan.work.iter().map(|work| work.rows).sum::<u32>().saturating_sub(1);
        let mut budget = DraftBudget { threshold: plan.draft_threshold.into(), active, used: 0 };
        let mut drafts = Vec::with_capacity(plan.work.len());
        for (((work, sequence), found), chain) in plan.work.iter().zip(&sequences).zip(found).zip(chains) {
            let Some(sequence) = sequence.sequence() else {
                drafts.push(Drafts::default());
                continue;
            };
            let room = budget.next();
            let (mut proposal, by_model) = (found, chain.len());
            let mut acceptance = if proposal.forced { drafting::ONE } else { sequence.acceptance };
            if by_model > 0 {
                acceptance = self.model.as_ref().map_or(acceptance, |model| model.acceptance(work.slot));
                proposal = DraftTokens { tokens: extended(&settings, sequence, chain, most(work)), forced: false };
            }
            proposal.tokens.truncate(room as usize);
            let count = drafting::worthwhile(acceptance, draft.cost(cost), others, proposal.tokens.len() as u32);
            budget.used += i64::from(count);
            drafts.push(Drafts { proposal, count: count as usize, by_model });
        }
        Ok(drafts)
    }
}

/// A model's chain with what an n-gram match finds after it, `most` drafts in all.
fn extended(settings: &Draft, sequence: &Running, mut chain: Vec<u32>, most: u32) -> Vec<u32> {
    let left = most.saturating_sub(chain.len() as u32);
    if left > 0 && settings.matches_ngrams() {
        let text = [sequence.history.as_slice(), &chain].concat();
        let draft = NgramDraft { tokens: left, ..settings.match_settings() };
        chain.extend(draft.propose(bytemuck::cast_slice(&text), sequence.max_length));
    }
    chain
}

/// The n-gram operator's shared budget (`gpu_kernels::ngram`), handed out to one decoding sequence after the other.
struct DraftBudget {
    threshold: i64,
    /// Sequences that are still owed their one row.
    active: i64,
    used: i64,
}

impl DraftBudget {
    /// Drafts that the next sequence may have.
    fn next(&mut self) -> u32 {
        self.active -= 1;
        self.used += 1;
        let room = self.threshold - self.used - self.active;
        // The operator leaves a room of one row unused.
        if room <= 1 { 0 } else { room as u32 }
    }
}

#[cfg(test)]
mod tests {
    use gpu_kernels::drafting::Cost;
    use gpu_kernels::ngram::reference;

    use super::{DraftBudget, DraftTokens, Drafters, Drafting, NgramDraft, Plan, Running, Work};

    #[test]
    fn a_row_that_ends_a_prompt_is_owed_its_place_in_the_budget() {
        let mut running = Running { history: vec![1; 20], prompt: 20, max_length: 100, ..Running::default() };
        let work = |slot| Work { slot, start: 19, rows: 1, samples: true, most_drafts: 7 };
        let plan = Plan { work: (0..3).map(work).collect(), draft_threshold: 7, ..Plan::default() };
        let draft = NgramDraft { tokens: 7, max: 3, min: 1, adaptive: false };
        running.look(&NgramDraft { tokens: 9, ..draft });
        for may_draft in [vec![0], vec![1], vec![2], vec![0, 2], vec![0, 1, 2]] {
            let made = running.guess.clone();
            for elsewhere in [vec![], vec![1], vec![0, 1, 2]] {
                let drafting = |work: &Work| match may_draft.contains(&work.slot) {
                    false => Drafting::No,
                    true if elsewhere.contains(&work.slot) => Drafting::Elsewhere(&running),
                    true => Drafting::Here(&running),
                };
                let mut drafters = Drafters::new(Some(draft.into()));
                let drafts = drafters.propose(&plan, Cost::default(), drafting, |_| made.clone()).unwrap();
                let count = drafts.iter().map(|drafts| drafts.count).sum::<usize>();
                assert_eq!(count, 4, "{may_draft:?}, {elsewhere:?}");
            }
            let late = |_: &Work| DraftTokens::default();
            let mut drafters = Drafters::new(Some(draft.into()));
            let drafts = drafters.propose(&plan, Cost::default(), |_| Drafting::Elsewhere(&running), late).unwrap();
            assert!(drafts.iter().all(|drafts| drafts.count == 0));
        }
    }

    #[test]
    fn the_shared_budget_is_that_of_the_operator() {
        for seed in 0..500u64 {
            let random = |i: u64, n: u64| model::sampling::random(seed, i) % n;
            let batch = 1 + random(0, 6) as usize;
            let (stride, most) = (24, 1 + random(1, 7) as i32);
            let threshold = random(2, 24) as i32;
            let histories: Vec<i32> = (0..batch * stride).map(|i| random(10 + i as u64, 3) as i32).collect();
            let newest: Vec<i64> = (0..batch).map(|b| random(1000 + b as u64, stride as u64) as i64).collect();
            // A sequence that runs may have one more token at least.
            let limit: Vec<i64> = newest.iter().map(|n| n + 2 + random(2000 + *n as u64, 9) as i64).collect();
            let operator = reference::Batch {
                input_ids: &[],
                input_ids_stride: 0,
                input_ids_len: &vec![0; batch],
                pre_ids: &histories,
                pre_ids_stride: stride,
                step_idx: &newest,
                max_dec_len: &limit,
                seq_lens_decoder: &vec![1; batch],
            };
            let mut rows = vec![1; batch];
            let mut out = reference::Drafts {
                seq_lens_this_time: &mut rows,
                draft_tokens: &mut vec![0; batch * 16],
                draft_tokens_stride: 16,
            };
            reference::ngram_match_mixed(&operator, most, 3, 1, threshold, &mut out);

            let mut budget = DraftBudget { threshold: threshold.into(), active: batch as i64, used: 0 };
            for b in 0..batch {
                let history = &histories[b * stride..][..newest[b] as usize + 1];
                let draft = NgramDraft { tokens: most as u32, max: 3, min: 1, adaptive: false };
                let drafts = draft.propose(history, limit[b] as usize).len().min(budget.next() as usize);
                budget.used += drafts as i64;
                assert_eq!(rows[b] as usize, 1 + drafts, "seed {seed}, sequence {b}");
            }
        }
    }
}
