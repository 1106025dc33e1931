//! Embedding, the norm fused into its neighbours, and what lies between the QKV projection and attention, each against
//! a plain definition.

use crate::common::{Random, RowBuffers, laid_out, relative_error, run, widen};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::embedding::{self, Embed};
use gpu_kernels::kv::{self, Cache, PAGE_TOKENS};
use gpu_kernels::linear::{self, Linear};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::qkv::{self, SplitHeads};
use gpu_kernels::stream::Walk;
use proptest::prelude::*;

const D: usize = 128;

/// The root of the mean of a vector's squares, in f64.
fn rms(x: &[f32], eps: f32) -> f64 {
    let mean = x.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / x.len() as f64;
    (mean + eps as f64).sqrt()
}

/// RMSNorm of one vector, in f64.
fn rms_norm(x: &[f32], weight: &[bf16], eps: f32) -> Vec<f64> {
    let rms = rms(x, eps);
    x.iter().zip(weight).map(|(&v, w)| v as f64 / rms * w.to_f64()).collect()
}

/// Rows gathered from a table, and what is written beside them for the next norm.
struct Embedded {
    rows: RowBuffers,
    tokens: Vec<u32>,
    table: Vec<bf16>,
    norm: Vec<bf16>,
    dim: usize,
    x: Buffer<f32>,
    scaled: Buffer<bf16>,
    squares: Buffer<f32>,
}

impl Embedded {
    fn new(rows: usize, dim: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let vocab = 50;
        let tokens: Vec<u32> = (0..rows).map(|_| random.below(vocab) as u32).collect();
        let embedded = Self {
            rows: RowBuffers::new(&tokens.iter().map(|&t| (t, 0, 0)).collect::<Vec<_>>()),
            tokens,
            table: random.bf16s(vocab * dim),
            norm: random.bf16s(dim),
            dim,
            x: Buffer::new_poisoned(rows * dim),
            scaled: Buffer::new_poisoned(rows * dim),
            squares: Buffer::new_poisoned(rows * dim / 16),
        };
        let (table, norm) = (Buffer::from_slice(&embedded.table), Buffer::from_slice(&embedded.norm));
        let params = Embed {
            rows: embedded.rows.rows(),
            table: table.ptr(),
            residual: Residual {
                x: embedded.x.ptr_mut(),
                scaled: embedded.scaled.ptr_mut(),
                squares: embedded.squares.ptr_mut(),
                spans: Default::default(),
                dim: dim as u32,
            },
            norm: norm.ptr(),
            vocab: vocab as u32,
        };
        run::<embedding::embed>([1, rows as u32 + 2, 1], 0, seed, params);
        embedded
    }

    /// The rows of the table.
    fn want(&self) -> Vec<f32> {
        self.tokens.iter().flat_map(|&t| widen(&self.table[t as usize * self.dim..][..self.dim])).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn embedding_gathers_rows(rows in 1usize..6, dim in prop::sample::select(vec![128usize, 384, 2560]), seed: u64) {
        let embedded = Embedded::new(rows, dim, seed);
        prop_assert_eq!(embedded.x.to_vec(), embedded.want());
    }

    /// The norm comes in two halves: its weight is applied to what is written beside the residual, its factor at the
    /// end of the product.
    #[test]
    fn a_product_of_the_norm(rows in 1usize..6, dim in prop::sample::select(vec![128usize, 384, 1024, 5120]), seed: u64) {
        let embedded = Embedded::new(rows, dim, seed);
        let n = 24;
        let w = Random::new(seed ^ 2).bf16s(n * dim);
        let (_stream, weights) = laid_out(&w, None, dim as u32, Walk::new(1));
        let y = Buffer::<f32>::new_poisoned(rows * n);
        let params = Linear {
            rows: embedded.rows.rows(),
            x: embedded.scaled.ptr(),
            weights,
            norm: Norm { squares: embedded.squares.ptr(), dim: dim as u32, eps: 1e-6 },
            y: y.ptr_mut(),
            activation: Default::default(),
            residual: Residual::default(),
            next_norm: Default::default(),
            bias: Default::default(),
            n: n as u32,
            first_row: 0,
        };
        run::<linear::linear_8>([weights.n_tiles, 1, 1], Linear::shared_bytes(8), seed, params);
        // The reference rounds where the kernels round. What is left is the error of sums in f32, which has a bound for
        // all seeds.
        let want: Vec<f32> = embedded
            .want()
            .chunks(dim)
            .flat_map(|x| {
                let scaled: Vec<f64> =
                    x.iter().zip(&embedded.norm).map(|(x, w)| bf16::from_f32(x * w.to_f32()).to_f64()).collect();
                let factor = 1.0 / rms(x, 1e-6);
                w.chunks(dim)
                    .map(|w| (scaled.iter().zip(w).map(|(x, w)| x * w.to_f64()).sum::<f64>() * factor) as f32)
                    .collect::<Vec<_>>()
            })
            .collect();
        prop_assert!(relative_error(y.to_vec(), &want) < 1e-5);
    }

    #[test]
    fn heads_are_normalised_rotated_and_placed(
        (q_heads, kv_heads) in prop::sample::select(vec![(2usize, 1usize), (4, 2), (5, 1), (8, 8)]),
        start in 0usize..200,
        rows in 1usize..5,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let heads = q_heads + 2 * kv_heads;
        let x = random.floats(rows * heads * D);
        let (q_norm, k_norm) = (random.bf16s(D), random.bf16s(D));
        let positions = start + rows;
        let angles: Vec<f32> =
            (0..positions * 64).map(|i| (i / 64) as f32 / 10_000f32.powf((i % 64) as f32 / 64.0)).collect();
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        let count = positions.div_ceil(PAGE_TOKENS as usize);
        let table: Vec<u32> = (0..count as u32).rev().collect();
        let page = kv::page_elements(kv_heads as u32);

        let row_buffers = RowBuffers::sequence(start as u32, rows as u32);
        let pages = Buffer::from_slice(&vec![bf16::ZERO; count * page]);
        let q = Buffer::<bf16>::new_poisoned(rows * q_heads * D);
        let [device_x, device_cos, device_sin] = [&x, &cos, &sin].map(|v| Buffer::from_slice(v));
        let [device_q_norm, device_k_norm] = [&q_norm, &k_norm].map(|v| Buffer::from_slice(v));
        let device_table = Buffer::from_slice(&table);
        let params = SplitHeads {
            rows: row_buffers.rows(),
            qkv: device_x.ptr(),
            q_norm: device_q_norm.ptr(),
            k_norm: device_k_norm.ptr(),
            cos: device_cos.ptr(),
            sin: device_sin.ptr(),
            q: q.ptr_mut(),
            cache: Cache {
                pages: pages.ptr_mut(),
                tables: device_table.ptr(),
                table_stride: count as u32,
                kv_heads: kv_heads as u32,
            },
            q_heads: q_heads as u32,
            eps: 1e-6,
            head_norm: 1,
        };
        let blocks = (heads as u32).div_ceil(qkv::HEADS_PER_BLOCK);
        run::<qkv::split_heads>([blocks, rows as u32 + 1, 1], 0, seed, params);

        let (q, pages) = (q.to_vec(), pages.to_vec());
        for r in 0..rows {
            let position = start + r;
            for h in 0..heads {
                let x = &x[(r * heads + h) * D..][..D];
                let (p, t) = (table[position / 64] as usize, position % 64);
                let got: Vec<f32> = if h < q_heads {
                    widen(&q[(r * q_heads + h) * D..][..D])
                } else {
                    let (kind, kv_head) = ((h - q_heads) / kv_heads, (h - q_heads) % kv_heads);
                    let row = &pages[p * page + ((kv_head * 2 + kind) * 64 + t) * D..][..D];
                    // Chunks of eight elements lie in a swizzle.
                    widen(&(0..D).map(|d| row[((d / 8) ^ (t % 8)) * 8 + d % 8]).collect::<Vec<_>>())
                };
                let want: Vec<f32> = if h < q_heads + kv_heads {
                    let n = rms_norm(x, if h < q_heads { &q_norm } else { &k_norm }, 1e-6);
                    let angle = |d: usize| (cos[position * 64 + d % 64] as f64, sin[position * 64 + d % 64] as f64);
                    (0..D)
                        .map(|d| {
                            let (c, s) = angle(d);
                            let rotated = if d < 64 { n[d] * c - n[d + 64] * s } else { n[d] * c + n[d - 64] * s };
                            rotated as f32
                        })
                        .collect()
                } else {
                    x.to_vec()
                };
                prop_assert!(relative_error(got, &want) < 1.0 / 200.0, "row {} head {}", r, h);
            }
        }
    }
}
