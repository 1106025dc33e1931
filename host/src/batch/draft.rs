//! Drafts for the sequences of a step. The host makes them: by n-gram match, with the same shared budget as the n-gram
//! operator on a device, and by a [model](model) or a head.

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

/// The drafts for one work.
#[derive(Clone, Default)]
pub struct Drafts {
    /// The proposed tokens.
    pub proposal: DraftTokens,
    /// How many of them, counted from the first, run.
    pub count: usize,
    /// How many of them, counted from the first, come from the model or head.
    pub by_model: usize,
}

impl Drafts {
    /// The drafts that run.
    pub fn run(&self) -> &[u32] {
        &self.proposal.tokens[..self.count]
    }

    /// The model's share in the drafts of a step that has brought `tokens`.
    pub fn by_model(&self, tokens: &[u32]) -> Drafted {
        let drafted = self.by_model.min(self.count);
        Drafted { drafted, accepted: drafted.min(tokens.len() - 1) }
    }
}

/// Whether the sequence of a work may draft, and where its proposal comes from.
pub enum Drafting<'a> {
    /// The sequence may not draft.
    No,
    /// The proposal is in [`Running::guess`], or a model makes it.
    Here(&'a Running),
    /// Other threads make the proposal.
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

/// The drafters of a batch.
#[derive(Default)]
pub struct Drafters {
    /// The settings. None: no drafts.
    pub settings: Option<Draft>,
    /// The draft model or head, if there is one.
    pub model: Option<ModelDrafter>,
    /// Whether the next step's drafts are likely to be worth their rows, judged by the last step.
    are_worthwhile: bool,
}

impl Drafters {
    /// Drafters without a model: drafts then come from n-gram matches.
    pub fn new(settings: Option<Draft>) -> Self {
        Self { settings, model: None, are_worthwhile: false }
    }

    /// The settings of the drafts; none if there are none.
    pub const fn settings(&self) -> Option<Draft> {
        self.settings
    }

    /// Forgets the sequences in the slots that `plan` frees or gives to others.
    pub fn forget_left(&mut self, plan: &Plan) {
        let Some(model) = &mut self.model else { return };
        let started = plan.started.iter().map(|started| &started.slot);
        plan.freed.iter().chain(started).for_each(|slot| model.forget(*slot));
    }

    /// Whether the tokens that are being chosen should be waited for, because drafts that follow them are likely to be
    /// worth it.
    pub const fn are_worthwhile(&self) -> bool {
        self.are_worthwhile
    }

    /// Looks for what may follow the newest tokens of these sequences, which may draft, and judges whether drafts would
    /// be worth their rows. `others` is the number of sequences whose proposals other threads make.
    pub fn look(&mut self, mut sequences: Vec<(Slot, &mut Running)>, others: usize, cost: drafting::Cost) {
        self.are_worthwhile = false;
        let Some(settings) = self.settings else { return };
        let draft = settings.match_settings();
        let may_find = |running: &Running| settings.matches_ngrams() || running.form.is_some();
        sequences
            .par_iter_mut()
            .filter(|(_, running)| may_find(running))
            .for_each(|(_, running)| running.look(settings));
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

    /// The drafts of each work: as many as the shared budget leaves, and as are worth it at `cost` for a row.
    /// `drafting` says whether and how the sequence of a work drafts. `elsewhere` returns the proposals that other
    /// threads make; it is called after the other proposals have been taken.
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
        // The budget does not change which tokens are proposed, only how many of them are tried.
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
                    // A model knows nothing of forms.
                    Drafting::Here(running) if running.form.is_none() => {
                        Some(Wanted::of(work.slot, running, most(work)))
                    }
                    _ => None,
                });
                let rows = plan.work.iter().map(|work| work.rows).sum();
                model.propose(&settings, cost, rows, &wanted.collect::<Vec<_>>())?
            }
            _ => vec![Vec::new(); plan.work.len()],
        };

        // Every sequence that samples with one row is owed that row in the budget, even if it may not draft.
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

/// A model's chain, extended by what an n-gram match finds after it, up to `most` drafts in all.
fn extended(settings: &Draft, sequence: &Running, mut chain: Vec<u32>, most: u32) -> Vec<u32> {
    let left = most.saturating_sub(chain.len() as u32);
    if left > 0 && settings.matches_ngrams() {
        let text = [sequence.history.as_slice(), &chain].concat();
        let draft = NgramDraft { tokens: left, ..settings.match_settings() };
        chain.extend(draft.propose(bytemuck::cast_slice(&text), sequence.max_length));
    }
    chain
}

/// The shared budget of the n-gram operator (`gpu_kernels::ngram`), which decoding sequences draw on one after another.
struct DraftBudget {
    threshold: i64,
    /// Sequences that have not got their own row from it yet.
    active: i64,
    used: i64,
}

impl DraftBudget {
    /// Most drafts that the next sequence may have.
    fn next(&mut self) -> u32 {
        self.active -= 1;
        self.used += 1;
        let room = self.threshold - self.used - self.active;
        // The operator does not use room for a single row.
        if room <= 1 { 0 } else { room as u32 }
    }
}

#[cfg(test)]
mod tests {
    use gpu_kernels::drafting::Cost;
    use gpu_kernels::ngram::reference;

    use super::{Draft, DraftBudget, DraftTokens, Drafters, Drafting, NgramDraft, Plan, Running, Work};

    #[test]
    fn a_row_that_ends_a_prompt_is_owed_its_place_in_the_budget() {
        let mut running = Running { history: vec![1; 20], prompt: 20, max_length: 100, ..Running::default() };
        let work = |slot| Work { slot, start: 19, rows: 1, samples: true, most_drafts: 7 };
        let plan = Plan { work: (0..3).map(work).collect(), draft_threshold: 7, ..Plan::default() };
        let draft = NgramDraft { tokens: 7, max: 3, min: 1, adaptive: false };
        running.look(Draft::Ngram(NgramDraft { tokens: 9, ..draft }));
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
            // A running sequence may have at least one more token.
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
