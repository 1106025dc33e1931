//! Rotary position embedding: the table of cosines and sines that the CPU and the GPU share.
//!
//! Qwen3 turns pair `i` of a head, the elements `i` and `i + head_dim / 2`, by the angle
//! `position × theta^(-2 i / head_dim)`. Angles and their functions are computed in f64 and rounded once to f32, so
//! the table is good to half an f32 ulp at every position.

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
    /// Builds the table for positions `0..positions`.
    pub fn new(head_dim: usize, theta: f64, positions: usize) -> Self {
        let frequencies = Frequencies::new(head_dim, theta);
        let half = head_dim / 2;
        let mut cos = vec![0.0; positions * half];
        let mut sin = vec![0.0; positions * half];
        for (position, (cos, sin)) in cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half)).enumerate() {
            frequencies.row(position, cos, sin);
        }
        RopeTable { cos, sin, half }
    }
}

/// Angle per position of each pair, in radians, `[head_dim / 2]`.
#[derive(Debug, Clone)]
pub struct Frequencies(Vec<f64>);

impl Frequencies {
    /// `theta^(-2 i / head_dim)` for each pair `i`.
    pub fn new(head_dim: usize, theta: f64) -> Self {
        Frequencies((0..head_dim / 2).map(|i| theta.powf(-2.0 * i as f64 / head_dim as f64)).collect())
    }

    /// Writes the table's row of one position; `cos` and `sin` are `[head_dim / 2]`.
    pub fn row(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((&frequency, cos), sin) in self.0.iter().zip(cos).zip(sin) {
            let (s, c) = (position as f64 * frequency).sin_cos();
            *cos = c as f32;
            *sin = s as f32;
        }
    }
}

/// Turns every head of a row in place. `heads` is `[n, head_dim]`; `cos` and `sin` are `[head_dim / 2]`.
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
}
