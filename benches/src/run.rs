//! An answer of the decode loop, and how long its steps took.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use host::{Backend, Draft, Error, Gpu, Sequence};
use model::Sampling;

/// A greedy answer.
pub struct Run {
    /// The answer's tokens.
    pub tokens: Vec<u32>,
    /// The time of each decode step, from the report of the step before to its own.
    pub steps: Vec<Duration>,
    /// Drafts that were tried.
    pub drafted: usize,
}

impl Run {
    /// The answer of `gpu` to `prompt`, of at most `tokens` tokens.
    ///
    /// # Errors
    /// As [`Backend::begin`] and [`Backend::step`].
    pub fn of(gpu: &mut Gpu, prompt: &[u32], tokens: usize, draft: Option<Draft>) -> Result<Self, Error> {
        let max_length = prompt.len() + tokens;
        let sampling = Sampling::default();
        let sequence = Sequence { prompt, max_length, sampling, draft, stop_tokens: &[], form: None };
        gpu.begin(&sequence, &mut |_, _| ControlFlow::Continue(()))?;
        let mut run = Self { tokens: gpu.step()?.tokens, steps: Vec::new(), drafted: 0 };
        loop {
            let start = Instant::now();
            let step = gpu.step()?;
            run.steps.push(start.elapsed());
            run.tokens.extend(step.tokens);
            run.drafted += step.drafted;
            if step.finished {
                return Ok(run);
            }
        }
    }

    /// Tokens a second, after the first token.
    #[must_use]
    pub fn rate(&self) -> f64 {
        (self.tokens.len() - 1) as f64 / self.steps.iter().sum::<Duration>().as_secs_f64()
    }

    /// Drafts that were right.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.tokens.len() - 1 - self.steps.len()
    }
}
