//! Drafts by a model on the CPU: the loop of `gpu_kernels::draft_model`, step by step.

use gpu_kernels::draft_model::{Economy, Prospect, tried};
use gpu_kernels::drafting;
use gpu_kernels::step::MAX_DECODE_ROWS;
use model::{Checkpoint, CpuModel, KvCache, Sampling};

use super::{Drafter, OnHost, Proposal, Text};
use crate::Error;
use crate::backend::{Sequence, Step, common_prefix};
use crate::cpu;
use crate::draft::{Draft, ModelDraft, pass_cost};

/// A draft model on the CPU.
pub(crate) struct ModelOnHost {
    model: CpuModel,
    cache: KvCache,
    /// The tokens whose keys and values are in the cache.
    cached: Vec<u32>,
    /// Tokens that there are in the model that is drafted for.
    vocab: u32,
    /// What a pass takes beside one of that model.
    pass: u32,
    draft: ModelDraft,
    /// What drafts by the model, and by n-gram match, were worth of late.
    acceptance: [u32; 2],
    chain: Vec<u32>,
    guess: Vec<u32>,
    logits: Vec<f32>,
}

impl ModelOnHost {
    /// For a model of checkpoint `model`, with room for sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// As [`Cpu::new`](crate::Cpu::new).
    pub(crate) fn new(model: &Checkpoint, draft: &Checkpoint, capacity: usize) -> Result<Self, Error> {
        draft.check_finite(&|_| {})?;
        let pass = pass_cost(&model.config, &draft.config, 0);
        let vocab = model.config.vocab_size as u32;
        let model = CpuModel::new(draft)?;
        Ok(Self {
            cache: model.new_cache(capacity),
            cached: Vec::new(),
            vocab,
            pass,
            draft: ModelDraft::default(),
            acceptance: [drafting::UNTRIED; 2],
            chain: Vec::new(),
            guess: Vec::new(),
            logits: vec![0.0; model.config().vocab_size],
            model,
        })
    }

    /// Runs these tokens after those in the cache, and gives the best one after the last; none if there is no telling.
    fn run(&mut self, tokens: &[u32]) -> Option<u32> {
        // A token of the model's padding, or logits that are not finite: there is just no draft then.
        self.model.forward(tokens, &mut self.cache, 1, &mut self.logits).ok()?;
        self.cached.extend_from_slice(tokens);
        let best = Sampling::default().sample(&self.logits, &[], &[]);
        (best < self.vocab).then_some(best)
    }

    fn economy(&self) -> Economy {
        let ModelDraft { tokens, adaptive, .. } = self.draft;
        let (row, pass) = if adaptive { (cpu::DRAFT_COST, self.pass) } else { Default::default() };
        Economy { row, pass, most: tokens, room: MAX_DECODE_ROWS }
    }
}

impl Drafter<OnHost> for ModelOnHost {
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error> {
        if let Some(Draft::Model(draft)) = sequence.draft {
            self.draft = draft;
        }
        self.acceptance = [drafting::UNTRIED; 2];
        self.chain.clear();
        self.guess.clear();
        Ok(())
    }

    fn propose(&mut self, at: Text<'_>) -> Result<Proposal, Error> {
        let Text { history, max_length } = at;
        let valid = common_prefix(&self.cached, history);
        self.cache.truncate(valid);
        self.cached.truncate(valid);
        let ngram = self.draft.ngram.map(|_| self.draft.match_settings());
        let found = |text: &[u32]| ngram.map(|ngram| ngram.propose(bytemuck::cast_slice(text), max_length));
        self.guess = found(history).unwrap_or_default();
        let economy = self.economy();
        let mut lag = history.len() - valid;
        if lag > MAX_DECODE_ROWS as usize {
            // The prompt, which all goes through at once here.
            let all_but_newest = &history[valid..history.len() - 1];
            if self.model.forward(all_but_newest, &mut self.cache, 0, &mut []).is_ok() {
                self.cached.extend_from_slice(all_but_newest);
                lag = 1;
            }
        }
        let choice = economy.choose(self.prospect(at, lag));
        self.chain.clear();
        if choice.rows > 0 {
            let first = self.cached.len();
            let mut next = self.run(&history[first..first + choice.rows as usize]);
            while let Some(token) = next.filter(|_| self.chain.len() < choice.chain as usize) {
                self.chain.push(token);
                next = if self.chain.len() < choice.chain as usize { self.run(&[token]) } else { None };
            }
        }
        let mut tokens = if choice.by_guess { self.guess.clone() } else { self.chain.clone() };
        if tokens.len() < self.draft.tokens as usize {
            let text = [history, &tokens].concat();
            let most = self.draft.tokens as usize - tokens.len();
            tokens.extend(found(&text).unwrap_or_default().into_iter().take(most));
        }
        let cost = if self.draft.adaptive { cpu::DRAFT_COST } else { drafting::Cost::default() };
        let acceptance = self.acceptance[usize::from(choice.by_guess)];
        let count = drafting::worthwhile(acceptance, cost, 0, tokens.len() as u32) as usize;
        Ok(Proposal { tokens, count })
    }

    fn hear(&mut self, step: &mut Step) {
        for (acceptance, proposed) in self.acceptance.iter_mut().zip([&mut self.chain, &mut self.guess]) {
            let trials = proposed.len().min(step.tokens.len());
            let right = proposed.iter().zip(&step.tokens).take_while(|(draft, token)| draft == token).count();
            *acceptance = tried(*acceptance, right as u32, trials as u32);
        }
        step.drafted_by_model = self.chain.len().min(step.drafted);
        self.chain.clear();
        self.guess.clear();
    }
}

impl ModelOnHost {
    fn prospect(&self, at: Text<'_>, lag: usize) -> Prospect {
        Prospect {
            model: self.acceptance[0],
            ngram: self.acceptance[1],
            lag: lag as u32,
            left: at.max_length.saturating_sub(at.history.len() + 1) as u32,
            guessed: self.guess.len() as u32,
        }
    }
}
