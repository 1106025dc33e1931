//! Causal attention of a block of query rows over the cache.

use rayon::prelude::*;

use super::Row;
use super::cache::LayerPages;
use super::dot::{self, Simd};
use crate::plan::Attention;

/// Multiply-adds below which threads cost more than they save.
const SERIAL: usize = 1 << 16;

/// `softmax(q k^T / sqrt(head_dim)) v` for each row and head.
///
/// A row attends to the keys of its sequence up to its own position, which are in the cache already. Each pair of a row
/// and a head is one task, which goes over the keys in order.
pub(super) fn attention(
    simd: Simd,
    plan: &Attention,
    q: &[f32],
    cache: &LayerPages,
    rows: &[Row<'_>],
    out: &mut [f32],
) {
    let Attention { query_heads: heads, head_dim, .. } = *plan;
    let group = plan.group();
    let scale = 1.0 / (head_dim as f32).sqrt();
    let one = |scores: &mut Vec<f32>, (i, (out, q)): (usize, (&mut [f32], &[f32]))| {
        let (row, head) = (&rows[i / heads], i % heads);
        let pages = || cache.head(row.pages, head / group, row.position + 1);
        scores.clear();
        for (keys, _) in pages() {
            dot::scores(simd, q, keys, scale, scores);
        }
        softmax(scores);
        out.fill(0.0);
        let mut weights = scores.as_slice();
        for (_, values) in pages() {
            let (here, rest) = weights.split_at(values.len() / head_dim);
            dot::add_weighted(simd, here, values, out);
            weights = rest;
        }
    };
    let work = 2 * heads * head_dim * rows.iter().map(|row| row.position + 1).sum::<usize>();
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

/// Softmax in place. The sum is taken from first to last.
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
