//! Embedding, RMSNorm, and what lies between the QKV projection and attention, each against a plain definition.

mod common;

use common::{Random, RowBuffers, relative_error, run, widen};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::embedding::{self, Embed};
use gpu_kernels::kv::{self, Cache, PAGE_TOKENS};
use gpu_kernels::norm::{self, RmsNorm};
use gpu_kernels::qkv::{self, SplitHeads};
use proptest::prelude::*;

const D: usize = 128;

/// RMSNorm of one vector, in f64.
fn rms_norm(x: &[f32], weight: &[bf16], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + eps as f64).sqrt();
    x.iter().zip(weight).map(|(&v, w)| v as f64 * scale * w.to_f64()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn embedding_gathers_rows(rows in 1usize..6, dim in prop::sample::select(vec![128usize, 384, 2560]), seed: u64) {
        let mut random = Random::new(seed);
        let vocab = 50;
        let table = random.bf16s(vocab * dim);
        let tokens: Vec<u32> = (0..rows).map(|_| random.below(vocab) as u32).collect();
        let row_buffers = RowBuffers::new(&tokens.iter().map(|&t| (t, 0, 0)).collect::<Vec<_>>());
        let device_table = Buffer::from_slice(&table);
        let out = Buffer::<f32>::new_poisoned(rows * dim);
        let params = Embed {
            rows: row_buffers.rows(),
            table: device_table.ptr(),
            out: out.ptr_mut(),
            dim: dim as u32,
            vocab: vocab as u32,
        };
        run::<embedding::embed>([1, rows as u32 + 2, 1], 0, seed, params);
        let want: Vec<f32> = tokens.iter().flat_map(|&t| widen(&table[t as usize * dim..][..dim])).collect();
        prop_assert_eq!(out.as_slice(), want);
    }

    #[test]
    fn rms_norm_normalises(rows in 1usize..6, dim in prop::sample::select(vec![128usize, 384, 1024, 5120]), seed: u64) {
        let mut random = Random::new(seed);
        let x: Vec<f32> = random.floats(rows * dim).into_iter().map(|v| v * 100.0).collect();
        let weight = random.bf16s(dim);
        let row_buffers = RowBuffers::sequence(0, rows as u32);
        let (device_x, device_weight) = (Buffer::from_slice(&x), Buffer::from_slice(&weight));
        let out = Buffer::<bf16>::new_poisoned(rows * dim);
        let params = RmsNorm {
            rows: row_buffers.rows(),
            x: device_x.ptr(),
            weight: device_weight.ptr(),
            out: out.ptr_mut(),
            dim: dim as u32,
            eps: 1e-6,
        };
        run::<norm::rms_norm>([1, rows as u32 + 1, 1], 0, seed, params);
        let want: Vec<f32> =
            x.chunks(dim).flat_map(|x| rms_norm(x, &weight, 1e-6)).map(|v| v as f32).collect();
        prop_assert!(relative_error(widen(out.as_slice()), &want) < 1.0 / 256.0);
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
        };
        let blocks = (heads as u32).div_ceil(qkv::HEADS_PER_BLOCK);
        run::<qkv::split_heads>([blocks, rows as u32 + 1, 1], 0, seed, params);

        let (q, pages) = (q.as_slice(), pages.as_slice());
        for r in 0..rows {
            let position = start + r;
            for h in 0..heads {
                let x = &x[(r * heads + h) * D..][..D];
                let (p, t) = (table[position / 64] as usize, position % 64);
                let block = |kv: usize| p * page + kv * 2 * 64 * D;
                let got: Vec<f32> = if h < q_heads {
                    widen(&q[(r * q_heads + h) * D..][..D])
                } else if h < q_heads + kv_heads {
                    widen(&pages[block(h - q_heads) + t * D..][..D])
                } else {
                    let base = block(h - q_heads - kv_heads) + 64 * D + t;
                    (0..D).map(|d| pages[base + d * 64].to_f32()).collect()
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
