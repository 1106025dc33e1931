//! Drafts by a model or a head on the CPU. This is the loop of `gpu_kernels::draft_model`, step by step.

use gpu_kernels::draft_model::{Economy, Prospect};
use gpu_kernels::drafting::{self, Record};
use gpu_kernels::step::MAX_DECODE_ROWS;
use model::Checkpoint;

use super::eagle_on_host::EagleOnHost;
use super::passes_on_host::{Passes, WholeModel};
use super::{Drafter, OnHost, Proposal, Text};
use crate::Error;
use crate::backend::{Drafted, Sequence, Step};
use crate::cpu;
use crate::draft::{Draft, DraftCheckpoint, ModelDraft, pass_share, plain_pass_bytes};

/// A draft model or a head on the CPU.
pub(crate) struct ModelOnHost {
    passes: Box<dyn Passes>,
    /// The cost of a pass, as a share of a pass of the model that is drafted for.
    pass: u32,
    draft: ModelDraft,
    /// The [`drafting`] estimates of drafts by the model and by n-gram match.
    records: [Record; 2],
    chain: Vec<u32>,
    guess: Vec<u32>,
}

impl ModelOnHost {
    /// A drafter for `model`, with room for sequences of up to `capacity` tokens.
    ///
    /// # Errors
    /// As [`Cpu::new`](crate::Cpu::new); also if a head was made for another model.
    pub(crate) fn new(model: &Checkpoint, draft: &DraftCheckpoint, capacity: usize) -> Result<Self, Error> {
        let vocab = model.config.vocab_size;
        let passes: Box<dyn Passes> = match draft {
            DraftCheckpoint::Model(draft) => Box::new(WholeModel::new(draft, vocab, capacity)?),
            DraftCheckpoint::Eagle3(head) => Box::new(EagleOnHost::new(head, model, capacity)?),
        };
        Ok(Self {
            passes,
            pass: pass_share(plain_pass_bytes(&model.config, 0), draft.pass_bytes(0)),
            draft: ModelDraft::default(),
            records: [Record::NEW; 2],
            chain: Vec::new(),
            guess: Vec::new(),
        })
    }

    /// Of a head: after how many of the model's layers each of the hidden states is taken that it drafts from.
    pub(crate) fn taps(&self) -> Option<[usize; 3]> {
        self.passes.taps()
    }

    /// Begins a prompt. Returns how many of its first tokens need no more hidden states.
    pub(crate) fn known(&mut self, prompt: &[u32]) -> usize {
        self.passes.known(prompt)
    }

    /// Takes the model's hidden states of the tokens of `history` from index `first` on, `[tokens, 3, hidden]`.
    /// Together, the calls cover all tokens after the [known](Self::known) ones, in order.
    pub(crate) fn take_states(&mut self, history: &[u32], first: usize, states: &[f32]) {
        self.passes.take_states(history, first, states);
    }

    fn economy(&self) -> Economy {
        let adaptive = self.draft.adaptive;
        let (row, pass) = if adaptive { (cpu::DRAFT_COST, self.pass) } else { Default::default() };
        Economy { row, pass, most: self.draft.depth(), room: MAX_DECODE_ROWS, due: MAX_DECODE_ROWS }
    }
}

impl Drafter<OnHost> for ModelOnHost {
    fn begin(&mut self, sequence: &Sequence<'_>) -> Result<(), Error> {
        if let Some(Draft::Model(draft)) = sequence.draft {
            self.draft = draft;
        }
        self.records = [Record::NEW; 2];
        self.chain.clear();
        self.guess.clear();
        Ok(())
    }

    fn propose(&mut self, at: Text<'_>) -> Result<Proposal, Error> {
        let Text { history, max_length } = at;
        let ngram = self.draft.ngram.map(|_| self.draft.match_settings());
        let found = |text: &[u32]| ngram.map(|ngram| ngram.propose(bytemuck::cast_slice(text), max_length));
        self.guess = found(history).unwrap_or_default();
        let economy = self.economy();
        let lag = self.passes.lag(history);
        let choice = economy.choose(self.prospect(at, lag));
        self.chain.clear();
        if choice.rows > 0 {
            let mut next = self.passes.catch_up(history, choice.rows as usize);
            while let Some(token) = next.filter(|_| self.chain.len() < choice.chain as usize) {
                self.chain.push(token);
                next = if self.chain.len() < choice.chain as usize { self.passes.follow(token) } else { None };
            }
        }
        let mut tokens = if choice.by_guess { self.guess.clone() } else { self.chain.clone() };
        if tokens.len() < self.draft.tokens as usize {
            let text = [history, &tokens].concat();
            let most = self.draft.tokens as usize - tokens.len();
            tokens.extend(found(&text).unwrap_or_default().into_iter().take(most));
        }
        let acceptance = self.records[usize::from(choice.by_guess)].acceptance;
        let count = drafting::worthwhile(acceptance, economy.row, 0, tokens.len() as u32) as usize;
        Ok(Proposal { tokens, count })
    }

    fn hear(&mut self, step: &mut Step) {
        for (record, proposed) in self.records.iter_mut().zip([&mut self.chain, &mut self.guess]) {
            let trials = proposed.len().min(step.tokens.len());
            let right = proposed.iter().zip(&step.tokens).take_while(|(draft, token)| draft == token).count();
            *record = record.after(right as u32, trials as u32);
        }
        let drafted = self.chain.len().min(step.drafted);
        step.by_model = Drafted { drafted, accepted: drafted.min(step.tokens.len() - 1) };
        self.chain.clear();
        self.guess.clear();
    }
}

impl ModelOnHost {
    fn prospect(&self, at: Text<'_>, lag: usize) -> Prospect {
        Prospect {
            model: self.records[0].acceptance,
            ngram: self.records[1].acceptance,
            lag: lag as u32,
            left: at.max_length.saturating_sub(at.history.len() + 1) as u32,
            guessed: self.guess.len() as u32,
        }
    }
}
