//! Causal attention of a block of query rows over the cache.

use rayon::prelude::*;

use super::cache::LayerCache;
use super::dot::{self, Simd};
use crate::Config;

/// Multiply-adds below which threads cost more than they bring.
const SERIAL: usize = 1 << 16;

/// `softmax(q k^T / sqrt(head_dim)) v` for each row and head.
///
/// `q` and `out` are `[rows, heads × head_dim]`. Row `r` stands at position `start + r` and sees the keys up to its own,
/// which are in the cache already. One row and head are one task, and go over the keys in order.
pub(super) fn attention(simd: Simd, config: &Config, q: &[f32], cache: &LayerCache, start: usize, out: &mut [f32]) {
    let (heads, head_dim) = (config.num_attention_heads, config.head_dim);
    let group = heads / config.num_key_value_heads;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let one = |scores: &mut Vec<f32>, (i, (out, q)): (usize, (&mut [f32], &[f32]))| {
        let (row, head) = (i / heads, i % heads);
        let (keys, values) = cache.head(head / group, start + row + 1);
        dot::scores(simd, q, keys, scale, scores);
        softmax(scores);
        dot::weighted_sum(simd, scores, values, out);
    };
    let work = 2 * q.len() * (start + q.len() / (heads * head_dim));
    if work < SERIAL {
        let mut scores = Vec::new();
        out.chunks_exact_mut(head_dim)
            .zip(q.chunks_exact(head_dim))
            .enumerate()
            .for_each(|item| one(&mut scores, item));
    } else {
        let items = out.par_chunks_exact_mut(head_dim).zip(q.par_chunks_exact(head_dim)).enumerate();
        items.for_each_init(Vec::new, one);
    }
}

/// Softmax in place; the sum goes from first to last.
fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    let scale = 1.0 / sum;
    for score in scores {
        *score *= scale;
    }
}
