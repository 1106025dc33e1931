//! Products of at most eight pairs of a row and a query head with a warp's keys and values.
//!
//! [`score_keys`](super::score_keys) and [`add_values`](super::add_values) have the pairs as rows of the tensor core's
//! operand A, which has 16. Here keys and values are these rows, and the pairs are the eight columns of operand B. That
//! takes half as many instructions. Each sum has the same products in the same order, so the bits are the same. The
//! scores are transposed to be [weighed](super::weigh_some) as others are.
//!
//! A *quad* is a lane's part of operand A: four words that the assembler wants in neighbouring registers.

use cuda_std::{device, math, mma, shared};

use super::SoftmaxWeights;
use crate::kv::PageLayout;

/// Transposes a matrix of 8 × 8, of which a lane has row `lane / 4`, columns `2 (lane % 4)` and the next. All lanes of
/// a warp call it.
#[device]
fn transpose([a, b]: [f32; 2]) -> [f32; 2] {
    let (a, b) = (a.to_bits(), b.to_bits());
    // `movmatrix` moves halves of words.
    let low = mma::transpose(math::permute(a, b, 0x5410));
    let high = mma::transpose(math::permute(a, b, 0x7632));
    [math::permute(low, high, 0x5410), math::permute(low, high, 0x7632)].map(f32::from_bits)
}

/// The quads of keys or values from the words that [`keys_from`](super::keys_from) or
/// [`values_from`](super::values_from) give.
#[device]
pub(crate) fn quads_of(words: [[u32; 4]; 4]) -> [[u32; 4]; 4] {
    let quad = |[a, b]: [[u32; 4]; 2], from: usize| [a[from], b[from], a[from + 1], b[from + 1]];
    let [a, b, c, d] = words;
    [quad([a, b], 0), quad([a, b], 2), quad([c, d], 0), quad([c, d], 2)]
}

/// [`quads_of`] a warp's keys in shared memory: see [`keys_from`](super::keys_from).
///
/// # Safety
/// As for [`keys_from`](super::keys_from).
#[device]
pub(crate) unsafe fn key_quads_from(
    layout: PageLayout,
    first: u32,
    last: u32,
    lane: u32,
) -> impl Fn(usize) -> [[u32; 4]; 4] {
    let keys = [0, 16].map(|tiles| (tiles + lane % 16).min(last));
    move |i| {
        let quad = |key, half: u32| {
            let chunk = layout.chunk(key, 4 * i as u32 + 2 * half + lane / 16);
            // SAFETY: the caller's word.
            unsafe { mma::ldmatrix_x4(shared::dynamic::<u8>(first + chunk)) }
        };
        [quad(keys[0], 0), quad(keys[0], 1), quad(keys[1], 0), quad(keys[1], 1)]
    }
}

/// [`quads_of`] a warp's values in shared memory: see [`values_from`](super::values_from).
///
/// # Safety
/// As for [`keys_from`](super::keys_from).
#[device]
pub(crate) unsafe fn value_quads_from(
    layout: PageLayout,
    first: u32,
    last: u32,
    lane: u32,
) -> impl Fn(usize) -> [[u32; 4]; 4] {
    // Matrices 0 and 1 of a quad are dimensions of the first eight keys, 2 and 3 those of the next.
    let key = lane / 16 * 8 + lane % 8;
    let keys = [key.min(last), (16 + key).min(last)];
    move |i| {
        let quad = |pair: u32, key| {
            let chunk = layout.chunk(key, 4 * i as u32 + 2 * pair + lane / 8 % 2);
            // SAFETY: the caller's word.
            unsafe { mma::ldmatrix_x4_trans(shared::dynamic::<u8>(first + chunk)) }
        };
        [quad(0, keys[0]), quad(0, keys[1]), quad(1, keys[0]), quad(1, keys[1])]
    }
}

/// [`score_keys`](super::score_keys) of pairs `g` below 8. `query(i)` gives four words of pair `g`, as there; `keys(i)`
/// gives [quads](quads_of).
#[device]
pub(crate) fn score_few(query: impl Fn(usize) -> [u32; 4], keys: impl Fn(usize) -> [[u32; 4]; 4]) -> [[f32; 4]; 4] {
    let mut s = [[0f32; 4]; 2];
    unroll!(I < 4; {
        let (query, keys) = (query(I), keys(I));
        unroll!(P < 2; {
            s[P] = mma::m16n8k16_bf16(s[P], keys[2 * P], [query[0], query[1]]);
            s[P] = mma::m16n8k16_bf16(s[P], keys[2 * P + 1], [query[2], query[3]]);
        });
    });
    let mut scores = [[0f32; 4]; 4];
    unroll!(J < 4; {
        let [a, b] = transpose([s[J / 2][J % 2 * 2], s[J / 2][J % 2 * 2 + 1]]);
        scores[J] = [a, b, 0.0, 0.0];
    });
    scores
}

/// Weighted sums of values of pairs below 8: a lane's dimensions `16 s + g`, of pairs `2 t` and `2 t + 1`, and then
/// `16 s + 8 + g` of both.
pub(crate) type FewSums = [[f32; 4]; 8];

/// Adds the weighted sums of a warp's values, each times its pair's factor. `values(i)` gives [quads](quads_of);
/// `factors` are those of pairs `2 t` and `2 t + 1`.
#[device]
pub(crate) fn add_few(
    weights: &SoftmaxWeights,
    values: impl Fn(usize) -> [[u32; 4]; 4],
    factors: [f32; 2],
    sums: &mut FewSums,
) {
    let words = weights.words.map(|words| [words[0], words[2]]);
    unroll!(I < 4; {
        let values = values(I);
        unroll!(P < 2; {
            let o = mma::m16n8k16_bf16([0.0; 4], values[2 * P], words[0]);
            let o = mma::m16n8k16_bf16(o, values[2 * P + 1], words[1]);
            let to = &mut sums[2 * I + P];
            unroll!(N < 4; {
                to[N] = math::fma(o[N], factors[N % 2], to[N]);
            });
        });
    });
}

/// The sums as [`add_values`](super::add_values) leaves them: of pair `g`, dimensions `8 n + 2 t` and the next. All
/// lanes of a warp call it.
#[device]
pub(crate) fn by_pair(sums: &FewSums) -> [[f32; 2]; 16] {
    let mut all = [[0f32; 2]; 16];
    unroll!(N < 16; {
        all[N] = transpose([sums[N / 2][N % 2 * 2], sums[N / 2][N % 2 * 2 + 1]]);
    });
    all
}
