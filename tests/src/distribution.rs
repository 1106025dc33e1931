//! Whether sampled tokens have the model's distribution: Pearson's chi-square test over the first tokens of many
//! answers to one prompt.

use std::collections::BTreeMap;

use host::{Engine, NgramDraft, Request};
use model::Sampling;

use crate::{answer, greedy};

/// Tokens of an answer that are looked at. One more is generated, so that a step has room to confirm drafts for all but
/// the first.
const TOKENS: usize = 3;
/// Cells that expect fewer answers than this are put together (Cochran, 1954).
const LEAST: f64 = 5.0;

/// Deviations that no distribution shows by chance: one in 30,000 times. The seeds are fixed.
const FAR: f64 = 4.0;

/// Answers to one prompt with seeds 0, 1, …
pub struct Answers {
    prompt: Vec<u32>,
    sampling: Sampling,
    tokens: Vec<Vec<u32>>,
    /// Drafts that were tried, and confirmed.
    pub drafts: (usize, usize),
}

/// How answers compare with a distribution.
#[derive(Clone, Copy, Debug)]
struct ChiSquare {
    /// The sum of squares over the cells.
    #[expect(dead_code, reason = "printed")]
    sum: f64,
    /// Cells less one.
    freedom: usize,
    /// As many standard deviations above its mean would a normal variable be, if it were as improbable (Wilson and
    /// Hilferty, 1931).
    deviations: f64,
}

impl Answers {
    /// Has `engine` answer `count` times.
    pub fn new(engine: &mut Engine, prompt: &[u32], sampling: Sampling, draft: Option<NgramDraft>, count: u64) -> Self {
        let mut drafts = (0, 0);
        let mut one = |seed| {
            let sampling = Sampling { seed, ..sampling };
            let generation = answer(engine, &Request { sampling, ..greedy(prompt, TOKENS + 1, draft) });
            drafts.0 += generation.statistics.drafted;
            drafts.1 += generation.statistics.accepted;
            generation.tokens[..TOKENS].to_vec()
        };
        let tokens = (0..count).map(&mut one).collect();
        Self { prompt: prompt.to_vec(), sampling, tokens, drafts }
    }

    /// Compares them with what the model gives each sequence of tokens, as `sampling` has it.
    fn compare(&self, model: &mut NextLogits<'_>, sampling: &Sampling) -> ChiSquare {
        let mut cells = Cells { answers: self.tokens.len() as f64, expected: BTreeMap::new(), rest: 0.0 };
        cells.expect(model, sampling, &[], 1.0);
        let mut found: BTreeMap<&[u32], f64> = BTreeMap::new();
        let mut rest = 0.0;
        for tokens in &self.tokens {
            let longest = (0..=TOKENS).rev().find_map(|len| cells.expected.get_key_value(&tokens[..len]));
            match longest {
                Some((cell, expected)) if *expected > 0.0 => *found.entry(cell).or_default() += 1.0,
                _ => rest += 1.0,
            }
        }
        let used = || cells.expected.iter().filter(|(_, expected)| **expected > 0.0);
        let of = |found: f64, expected: f64| (found - expected).powi(2) / expected;
        let mut sum: f64 = used().map(|(cell, e)| of(found.get(&cell[..]).copied().unwrap_or(0.0), *e)).sum();
        let mut count = used().count();
        if cells.rest > 0.0 || rest > 0.0 {
            // However little is expected here, finding it must count.
            sum += of(rest, cells.rest.max(1e-3));
            count += 1;
        }
        let freedom = count - 1;
        let k = freedom as f64;
        let deviations = ((sum / k).cbrt() - (1.0 - 2.0 / (9.0 * k))) / (2.0 / (9.0 * k)).sqrt();
        ChiSquare { sum, freedom, deviations }
    }

    /// Checks that they have the model's distribution, and that the test would have noticed another temperature.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self, engine: &mut Engine) -> Result<(), String> {
        let mut model = NextLogits { engine, prompt: &self.prompt, known: BTreeMap::new() };
        let right = self.compare(&mut model, &self.sampling);
        let temperature = self.sampling.temperature * 2.0;
        let wrong = self.compare(&mut model, &Sampling { temperature, ..self.sampling });
        println!("{:?}, drafts {:?}: {right:?}; at temperature {temperature} {wrong:?}", self.sampling, self.drafts);
        if right.freedom < 3 {
            return Err(format!("too few cells to show anything: {right:?}"));
        }
        if right.deviations > FAR {
            return Err(format!("not the model's distribution: {right:?} with {:?}", self.sampling));
        }
        if wrong.deviations < FAR {
            return Err(format!("too few answers to tell temperatures apart: {wrong:?} with {:?}", self.sampling));
        }
        Ok(())
    }
}

/// A model's logits of the token after a prompt and some more tokens. Each is computed once.
struct NextLogits<'e> {
    engine: &'e mut Engine,
    prompt: &'e [u32],
    known: BTreeMap<Vec<u32>, Vec<f32>>,
}

impl NextLogits<'_> {
    fn after(&mut self, tokens: &[u32]) -> &[f32] {
        self.known.entry(tokens.to_vec()).or_insert_with(|| {
            let logits = self.engine.score(&[self.prompt, tokens].concat()).unwrap_or_else(|e| panic!("{e}"));
            let vocab = self.engine.checkpoint().config.vocab_size;
            logits[logits.len() - vocab..].to_vec()
        })
    }
}

struct Cells {
    answers: f64,
    /// Beginnings of answers, with how many answers are expected to begin so and in no longer way that is here; 0 where
    /// they are too few for a cell.
    expected: BTreeMap<Vec<u32>, f64>,
    /// How many are expected to be in no cell.
    rest: f64,
}

impl Cells {
    /// Shares out the answers that begin with `tokens`, which have this `probability`.
    fn expect(&mut self, model: &mut NextLogits<'_>, sampling: &Sampling, tokens: &[u32], probability: f64) {
        if tokens.len() == TOKENS {
            self.expected.insert(tokens.to_vec(), self.answers * probability);
            return;
        }
        let mut others = 0.0;
        for (token, share) in probabilities(model.after(tokens), sampling).into_iter().enumerate() {
            if self.answers * probability * share >= LEAST {
                self.expect(model, sampling, &[tokens, &[token as u32]].concat(), probability * share);
            } else {
                others += self.answers * probability * share;
            }
        }
        let own = if others >= LEAST { others } else { 0.0 };
        self.expected.insert(tokens.to_vec(), own);
        self.rest += others - own;
    }
}

/// The probability of each token: softmax at the temperature, cut to the `top_k` likeliest, and of those to the
/// likeliest that together reach `top_p`.
fn probabilities(logits: &[f32], sampling: &Sampling) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|&l| f64::from(l) / f64::from(sampling.temperature)).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| scaled[b].total_cmp(&scaled[a]));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let mass = |token: usize| (scaled[token] - max).exp();
    let wanted = f64::from(sampling.top_p) * order.iter().map(|&token| mass(token)).sum::<f64>();
    let mut reached = 0.0;
    order.retain(|&token| {
        let kept = reached < wanted;
        reached += mass(token);
        kept
    });
    let total: f64 = order.iter().map(|&token| mass(token)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    order.into_iter().for_each(|token| probabilities[token] = mass(token) / total);
    probabilities
}

/// Checks the demo model on `engine`'s device, at several temperatures and shares, with as many drafts as there can be,
/// `count` answers each.
///
/// # Errors
/// What is wrong.
pub fn check_demo(engine: &mut Engine, count: u64) -> Result<(), String> {
    let text = crate::demo_prompts(engine.checkpoint(), 8, 40).remove(1);
    // It says again what it said before, up to the middle of it: there is something to propose, and several tokens are
    // likely.
    let prompt = [&text[..], &text[..20]].concat();
    let draft = NgramDraft { tokens: 3, max: 3, min: 1, adaptive: false };
    for (temperature, top_p) in [(1.0, 1.0), (0.7, 1.0), (1.4, 0.9), (1.0, 0.7)] {
        let sampling = Sampling { temperature, top_p, ..Sampling::default() };
        let answers = Answers::new(engine, &prompt, sampling, Some(draft), count);
        let (drafted, accepted) = answers.drafts;
        if drafted < count as usize / 4 || accepted < count as usize / 20 || accepted == drafted {
            return Err(format!("{drafted} drafts, {accepted} of them confirmed: too few to show anything"));
        }
        answers.check(engine)?;
    }
    Ok(())
}
