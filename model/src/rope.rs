//! Rotary position embedding: the table of cosines and sines that the CPU and the GPU share.
//!
//! Pair `i` of a head, the elements `i` and `i + head_dim / 2`, is rotated by the angle
//! `position × theta^(-2 i / head_dim)`. Angles and their functions are computed in f64 and rounded once to f32, so the
//! table is good to half an f32 ulp at every position.
//!
//! [`Yarn`] lets a model read texts several times longer than those that it was trained on (Peng et al., 2023, "YaRN:
//! Efficient Context Window Extension of Large Language Models"): pairs that turn slowly are slowed down, and every
//! query and key becomes a little longer. [`Llama3`] also slows pairs down, by another rule.

use crate::Config;

/// Cosines and sines for `positions` positions, each `[positions, head_dim / 2]`, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// Cosines, `[positions, head_dim / 2]`.
    pub cos: Vec<f32>,
    /// Sines, `[positions, head_dim / 2]`.
    pub sin: Vec<f32>,
    /// Pairs in a head: `head_dim / 2`.
    pub half: usize,
}

impl RopeTable {
    /// Builds the table for positions `0..positions`, without scaling.
    pub fn new(head_dim: usize, theta: f64, positions: usize) -> Self {
        Self::build(&Frequencies::new(head_dim, theta), positions)
    }

    /// Builds the table of a model for positions `0..positions`.
    pub fn of(config: &Config, positions: usize) -> Self {
        Self::build(&Frequencies::of(config), positions)
    }

    fn build(frequencies: &Frequencies, positions: usize) -> Self {
        let half = frequencies.angles.len();
        let mut cos = vec![0.0; positions * half];
        let mut sin = vec![0.0; positions * half];
        for (position, (cos, sin)) in cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half)).enumerate() {
            frequencies.row(position, cos, sin);
        }
        RopeTable { cos, sin, half }
    }
}

/// Scaling for texts longer than those of training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// YaRN.
    Yarn(Yarn),
    /// Llama 3.1's.
    Llama3(Llama3),
}

impl Scaling {
    /// The value of `rope_type` in a config, and the name that people use.
    pub const fn names(&self) -> (&'static str, &'static str) {
        match self {
            Self::Yarn(_) => ("yarn", "YaRN"),
            Self::Llama3(_) => ("llama3", "Llama 3's"),
        }
    }

    /// The factor by which texts may be longer, and the length of the longest text in training, in tokens.
    pub const fn factor(&self) -> (f64, usize) {
        match self {
            Self::Yarn(yarn) => (yarn.factor, yarn.original_positions),
            Self::Llama3(llama) => (llama.factor, llama.original_positions),
        }
    }

    /// Length of the longest text that the scaling makes possible, in tokens; 0 if the config's own length accounts for
    /// the scaling already.
    pub(crate) fn positions(&self) -> usize {
        match self {
            Self::Yarn(yarn) => (yarn.factor * yarn.original_positions as f64) as usize,
            Self::Llama3(_) => 0,
        }
    }
}

/// Llama 3.1's scaling, by the names of transformers' `rope_parameters`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3 {
    /// How many times slower the pairs turn that turn slowly.
    pub factor: f64,
    /// `original_max_position_embeddings`: length of the longest text in training, in tokens.
    pub original_positions: usize,
    /// Pairs that turn this often or less often within the original positions count as slow.
    pub low_freq_factor: f64,
    /// Pairs that turn this often or more often stay as they are. Pairs between the two bounds change in part.
    pub high_freq_factor: f64,
}

impl Llama3 {
    /// Scales the `angles` of the pairs.
    fn scale(&self, angles: &mut [f64]) {
        let Self { factor, original_positions, low_freq_factor, high_freq_factor } = *self;
        for angle in angles {
            let turns = original_positions as f64 * *angle / std::f64::consts::TAU;
            let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            *angle *= (1.0 - kept) / factor + kept;
        }
    }
}

/// YaRN, by the names of transformers' `rope_parameters`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// The factor by which texts may be longer.
    pub factor: f64,
    /// `original_max_position_embeddings`: length of the longest text in training, in tokens.
    pub original_positions: usize,
    /// Pairs that turn this often or more often within the original positions stay as they are.
    pub beta_fast: f64,
    /// Pairs that turn less often than this turn `factor` times slower. Pairs between the two bounds change in part.
    pub beta_slow: f64,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f64,
    /// Whether the bounds are rounded outwards to whole pairs.
    pub truncate: bool,
}

impl Yarn {
    /// What cosines and sines are multiplied by if the config does not say: 0.1 · `weight` · ln(`factor`) + 1, or 1 if
    /// `factor` is not above 1.
    pub fn length(factor: f64, weight: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
    }

    /// Scales the `angles` of the pairs.
    fn scale(&self, theta: f64, angles: &mut [f64]) {
        let head_dim = 2 * angles.len();
        // The pair that turns this often; it need not be a whole number.
        let pair = |turns: f64| {
            let per_turn = self.original_positions as f64 / (turns * std::f64::consts::TAU);
            head_dim as f64 * per_turn.ln() / (2.0 * theta.ln())
        };
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
        let width = if low == high { 0.001 } else { high - low };
        for (i, angle) in angles.iter_mut().enumerate() {
            let slowed = ((i as f64 - low) / width).clamp(0.0, 1.0);
            *angle *= slowed / self.factor + (1.0 - slowed);
        }
    }
}

/// Each pair's angle per position, and the factor of cosines and sines.
#[derive(Debug, Clone)]
pub struct Frequencies {
    /// Radians, `[head_dim / 2]`.
    angles: Vec<f64>,
    length: f64,
}

impl Frequencies {
    /// `theta^(-2 i / head_dim)` for each pair `i`.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        let angles = (0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect();
        Self { angles, length: 1.0 }
    }

    /// The frequencies of a model, with its scaling.
    pub fn of(config: &Config) -> Self {
        let mut plain = Self::new(config.plan.attention.head_dim, config.rope_theta);
        match &config.rope_scaling {
            None => {}
            Some(Scaling::Yarn(yarn)) => {
                yarn.scale(config.rope_theta, &mut plain.angles);
                plain.length = yarn.attention_factor;
            }
            Some(Scaling::Llama3(llama)) => llama.scale(&mut plain.angles),
        }
        plain
    }

    /// Writes the table's row of one position; `cos` and `sin` are `[head_dim / 2]`.
    pub fn row(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((&angle, cos), sin) in self.angles.iter().zip(cos).zip(sin) {
            let (s, c) = (position as f64 * angle).sin_cos();
            *cos = (c * self.length) as f32;
            *sin = (s * self.length) as f32;
        }
    }
}

/// Rotates every head of a row in place. `heads` is `[n, head_dim]`; `cos` and `sin` are `[head_dim / 2]`.
pub fn rotate(heads: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for head in heads.chunks_exact_mut(2 * half) {
        let (low, high) = head.split_at_mut(half);
        for (((a, b), &c), &s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_is_the_identity_and_a_turn_keeps_length() {
        let table = RopeTable::new(8, 10_000.0, 3);
        assert_eq!((table.cos.len(), &table.cos[..4], &table.sin[..4]), (12, &[1.0; 4][..], &[0.0; 4][..]));
        let mut head = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        rotate(&mut head, &table.cos[8..], &table.sin[8..]);
        let norm: f32 = head.iter().map(|x| x * x).sum();
        assert!((norm - 204.0).abs() < 1e-3, "{norm}");
        // Pair 0 turns by exactly `position` radians.
        assert!((head[0] - (2f32.cos() - 5.0 * 2f32.sin())).abs() < 1e-5);
    }

    /// Angles of some pairs as transformers 5.23's `LlamaRotaryEmbedding` has them for Llama-3.1-8B, in f32: some
    /// unchanged, some in between, some eight times slower.
    #[test]
    fn llama3_is_that_of_transformers() {
        let llama = Llama3 { factor: 8.0, original_positions: 8192, low_freq_factor: 1.0, high_freq_factor: 4.0 };
        let config =
            Config { rope_theta: 5e5, rope_scaling: Some(Scaling::Llama3(llama)), ..Config::published("8B").unwrap() };
        let found = Frequencies::of(&config);
        assert_eq!(found.length, 1.0);
        for (pair, angle) in [
            (0, 1.0),
            (20, 1.656044088e-02),
            (28, 3.211446106e-03),
            (30, 1.371893683e-03),
            (33, 3.126936499e-04),
            (35, 9.556212171e-05),
            (40, 3.428102355e-05),
            (63, 3.068925878e-07),
        ] {
            let error = (found.angles[pair] / angle - 1.0).abs();
            assert!(error < 1e-6, "pair {pair}: {} and {angle}", found.angles[pair]);
        }
    }

    /// Angles of some pairs, and the factor, as transformers 5.23's `Qwen3RotaryEmbedding` has them for Qwen3-8B, in
    /// f32.
    #[test]
    fn yarn_is_that_of_transformers() {
        let yarn = Yarn {
            factor: 4.0,
            original_positions: 32768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: Yarn::length(4.0, 1.0),
            truncate: true,
        };
        let ratio = Yarn::length(4.0, 0.707) / Yarn::length(4.0, 0.5);
        for (yarn, length, pairs) in [
            (yarn, 1.138629436111989, [4.131738096e-03, 1.064360957e-03, 2.462583943e-04]),
            (
                Yarn { beta_fast: 16.0, beta_slow: 2.0, attention_factor: 0.8, ..yarn },
                0.8,
                [4.531583749e-03, 1.119946595e-03, 2.021837427e-04],
            ),
            (
                Yarn { attention_factor: ratio, truncate: false, ..yarn },
                1.0268361529030026,
                [4.234358203e-03, 1.079237671e-03, 2.445188875e-04],
            ),
        ] {
            let config = Config { rope_scaling: Some(Scaling::Yarn(yarn)), ..Config::published("8B").unwrap() };
            let found = Frequencies::of(&config);
            assert!((found.length - length).abs() < 1e-12, "{yarn:?}: {}", found.length);
            // With every setting the first pairs are unchanged and the last four times slower. The pairs in between
            // differ.
            let ends = [(0, 1.0), (20, 1.333521493e-02), (40, 4.445698505e-05), (63, 3.102344408e-07)];
            for (pair, angle) in ends.into_iter().chain([25, 30, 35].into_iter().zip(pairs)) {
                let error = (found.angles[pair] / angle - 1.0).abs();
                assert!(error < 1e-6, "{yarn:?}, pair {pair}: {} and {angle}", found.angles[pair]);
            }
        }
    }
}
