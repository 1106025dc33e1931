//! Compares the kernels with plain references, and with themselves when the work is cut in other ways.

use benches::gemm::PLAIN;
use gpu_kernels::gemm::SPAN;
use gpu_kernels::kv;
use gpu_kernels::linear::{N_TILE, slot};
use gpu_kernels::prefill_attention;
use half::bf16;
use host::device::Device;
use host::gemm::{Cut, Epilogue};

use super::{Attention, D, GemmCase, Heads, Result, random, scaled};

/// `‖found − wanted‖ / ‖wanted‖`.
fn distance(pairs: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    for (found, wanted) in pairs {
        difference += (found - wanted).powi(2);
        size += wanted.powi(2);
    }
    (difference / size).sqrt()
}

/// About `count` numbers below `end`, its ends among them.
fn spread(end: usize, count: usize) -> Vec<usize> {
    if end <= count {
        return (0..end).collect();
    }
    (0..count).map(|i| i * (end - 1) / (count - 1)).collect()
}

/// The index of dimension `d` of what is stored for `position`. `kind` is 0 for the key and 1 for the value; `block` is
/// that of the page and the key-value head.
fn in_page(block: usize, kind: usize, position: usize, d: usize) -> usize {
    ((block * 2 + kind) * 64 + position % 64) * D + kv::place(position as u32, d as u32) as usize
}

fn check_gemm(device: &Device, epilogue: Epilogue, m: usize, n: usize, k: usize) -> Result<()> {
    let mut product = GemmCase::new(device, epilogue, m, n, k, 1)?;
    let left = product.run(device, Cut::N128)?;
    for cut in Cut::ALL.into_iter().chain(Cut::ALL) {
        let other = product.run(device, cut)?;
        if !left.bits().eq(other.bits()) {
            return Err(format!("{epilogue:?} {m} x {n} x {k}: {cut:?} differs from N128").into());
        }
    }
    if epilogue == Epilogue::Add {
        let row = m / 2;
        let before: Vec<f32> = (row * n..(row + 1) * n).map(GemmCase::before).collect();
        if product.run_row(device, row, &before)? != left.y[row * n..][..n] {
            return Err(format!("add {m} x {n} x {k}: row {row} alone differs").into());
        }
    }
    let (x, w, norm) = (random(m * k, 1), scaled(random(n * k, 2), 0.1), random(n, 3));
    let dot = |row: usize, feature: usize| -> f64 {
        x[row * k..][..k].iter().zip(&w[feature * k..][..k]).map(|(x, w)| x.to_f64() * w.to_f64()).sum()
    };
    let mut pairs = Vec::new();
    let rope = model::rope::RopeTable::new(D, 1e6, m);
    for row in spread(m, if epilogue == Epilogue::Qkv { 6 } else { 40 }) {
        let scale = product.scale(row);
        match epilogue {
            Epilogue::Qkv => {
                let Heads { q_heads, kv_heads, .. } = product.heads;
                let page = m.div_ceil(64) - 1 - row / 64;
                // One query head, one key head and one value head.
                for head in [q_heads / 2, q_heads, q_heads + 2 * kv_heads - 1] {
                    let x: Vec<f64> = (0..D).map(|d| dot(row, head * D + d) * scale).collect();
                    let rms = (x.iter().map(|x| x * x).sum::<f64>() / D as f64 + 1e-6).sqrt();
                    let normed = |d: usize| x[d] / rms * norm[d].to_f64();
                    for (d, own) in x.iter().enumerate() {
                        let (cos, sin) = (rope.cos[row * 64 + d % 64], rope.sin[row * 64 + d % 64]);
                        let (cos, sin) = (f64::from(cos), f64::from(sin));
                        let partner = if d < 64 { -normed(d + 64) } else { normed(d - 64) };
                        let turned = normed(d) * cos + partner * sin;
                        let stored = |kind: usize, kv_head: usize| {
                            left.pages[in_page(page * kv_heads + kv_head, kind, row, d)].to_f64()
                        };
                        pairs.push(if head < q_heads {
                            (left.q[(row * q_heads + head) * D + d].to_f64(), turned)
                        } else if head < q_heads + kv_heads {
                            (stored(0, head - q_heads), turned)
                        } else {
                            (stored(1, head - q_heads - kv_heads) / rms, own / rms)
                        });
                    }
                }
            }
            Epilogue::SwiGlu => {
                for f in spread(n / 2, 70) {
                    let (gate, up) = (dot(row, f) * scale, dot(row, n / 2 + f) * scale);
                    pairs.push((
                        left.out[row * n / 2 + slot(f as u32) as usize].to_f64(),
                        gate / (1.0 + (-gate).exp()) * up,
                    ));
                }
            }
            Epilogue::Write => {
                let found = |f: usize| f64::from(left.y[row * n + f]);
                pairs.extend(spread(n, 70).into_iter().map(|f| (found(f), dot(row, f) * scale)));
            }
            Epilogue::Other(_) => {
                let found = |f: usize| left.out[row * n + f].to_f64();
                pairs.extend(spread(n, 70).into_iter().map(|f| (found(f), dot(row, f))));
            }
            Epilogue::Add => {
                for f in spread(n, 70) {
                    let i = row * n + f;
                    let new = dot(row, f) + f64::from(GemmCase::before(i));
                    pairs.push((f64::from(left.y[i]), new));
                    // Each written value is checked to its last bit against the f32 that it comes from.
                    let xw = bf16::from_f32(left.y[i] * norm[f].to_f32());
                    let square = |len: usize| left.y[i / len * len..][..len].iter().map(|v| v * v).sum::<f32>();
                    let (span, n_tile) = (SPAN as usize, N_TILE as usize);
                    let wrong = |found: f32, square: f32| (found - square).abs() > square * 1e-5;
                    if left.out[row * n + slot(f as u32) as usize] != xw
                        || wrong(left.spans[(row * n + f) / span], square(span))
                        || wrong(left.squares[(row * n + f) / n_tile], square(n_tile))
                    {
                        return Err(format!("add {m} x {n} x {k}: row {row}, feature {f}").into());
                    }
                }
            }
        }
    }
    let error = distance(pairs.into_iter());
    // The error of rounding to bf16; or the accumulators' own, which grows with `k`.
    let limit = if matches!(epilogue, Epilogue::Add | Epilogue::Write) { 2e-6 + 2e-9 * k as f64 } else { 4e-3 };
    println!("{epilogue:?} {m} x {n} x {k}: error {error:.2e}, all cuts agree");
    if error.is_nan() || error >= limit {
        return Err(format!("{epilogue:?} {m} x {n} x {k}: error {error:e}").into());
    }
    Ok(())
}

/// GEMMs in clusters on two queues at once, which take SMs from each other. No cluster may wait for one that has no
/// room.
fn check_two_queues(device: &Device) -> Result<()> {
    let (m, n, k) = (1000, 8192, 1024);
    let devices = [device.clone(), device.beside()?];
    let mut products =
        devices.iter().map(|device| GemmCase::new(device, PLAIN, m, n, k, 1)).collect::<Result<Vec<_>>>()?;
    let want = products[0].run(device, Cut::N256)?;
    for product in &mut products {
        product.out.write(0, &vec![bf16::NAN; product.out.len()])?;
    }
    for _ in 0..40 {
        for (product, device) in products.iter().zip(&devices) {
            product.enqueue(device, Some(Cut::Cluster4x2), 0)?;
        }
    }
    for product in &products {
        let mut out = vec![bf16::ZERO; want.out.len()];
        product.out.read(0, &mut out)?;
        if out != want.out {
            return Err(format!("plain {m} x {n} x {k}: clusters of 4 x 2 on two queues differ").into());
        }
    }
    println!("two queues at once: all products agree");
    Ok(())
}

fn check_attention(device: &Device, tokens: usize, q_heads: usize, kv_heads: usize) -> Result<()> {
    let mut attention = Attention::new(device, tokens, q_heads, kv_heads)?;
    let whole = attention.run(device, &prefill_attention::tiles(0, tokens as u32, 0, 0, 128), false)?;
    for (height, pairs) in [(128, false), (64, false), (128, true), (100, true), (128, true)] {
        if attention.run(device, &prefill_attention::tiles(0, tokens as u32, 0, 0, height), pairs)? != whole {
            let what = if pairs { ", blocks in pairs" } else { "" };
            return Err(format!("attention of {tokens} tokens: tiles of {height} rows differ{what}").into());
        }
    }
    let (mut q, mut pages) = (vec![bf16::ZERO; attention.q.len()], vec![bf16::ZERO; attention.pages.len()]);
    attention.q.read(0, &mut q)?;
    attention.pages.read(0, &mut pages)?;
    let last = tokens.div_ceil(64) - 1;
    let mut pairs = Vec::new();
    for row in spread(tokens, 24) {
        for head in spread(q_heads, 3) {
            let kv_head = head / (q_heads / kv_heads);
            let query = &q[(row * q_heads + head) * D..][..D];
            let stored = |kind: usize, p: usize, d: usize| {
                pages[in_page((last - p / 64) * kv_heads + kv_head, kind, p, d)].to_f64()
            };
            let scores: Vec<f64> = (0..=row)
                .map(|p| {
                    let product = |(d, q): (usize, &bf16)| q.to_f64() * stored(0, p, d);
                    query.iter().enumerate().map(product).sum::<f64>() / (D as f64).sqrt()
                })
                .collect();
            let top = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..D {
                let sum: f64 = weights.iter().enumerate().map(|(p, w)| w * stored(1, p, d)).sum();
                pairs.push((whole[(row * q_heads + head) * D + slot(d as u32) as usize].to_f64(), sum / total));
            }
        }
    }
    let error = distance(pairs.into_iter());
    println!("attention {tokens} tokens, {q_heads} / {kv_heads} heads: error {error:.2e}, all tiles agree");
    if error.is_nan() || error >= 5e-3 {
        return Err(format!("attention of {tokens} tokens: error {error:e}").into());
    }
    Ok(())
}

/// How large the checked cases may be.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// For the emulator.
    Tiny,
    /// For compute-sanitizer.
    Small,
    Whole,
}

pub fn check(device: &Device, extent: Extent) -> Result<()> {
    let (most_shapes, most_tokens) = match extent {
        Extent::Tiny => (2, 70),
        Extent::Small => (5, 1025),
        Extent::Whole => (5, usize::MAX),
    };
    for epilogue in [Epilogue::Qkv, Epilogue::Write, Epilogue::SwiGlu, Epilogue::Add, PLAIN] {
        let shapes = [(1, 384, 64), (77, 384, 320), (64, 768, 64), (129, 640, 192), (300, 1152, 4160)];
        for (m, n, k) in shapes.into_iter().take(most_shapes) {
            check_gemm(device, epilogue, m, n, k)?;
        }
    }
    if extent > Extent::Tiny {
        check_two_queues(device)?;
    }
    for (tokens, q_heads, kv_heads) in [(1, 1, 1), (70, 2, 1), (300, 4, 2), (1025, 5, 1), (2048, 32, 8), (8192, 4, 1)] {
        if tokens <= most_tokens {
            check_attention(device, tokens, q_heads, kv_heads)?;
        }
    }
    if extent < Extent::Whole {
        return Ok(());
    }
    for (epilogue, m, n, k) in [
        (Epilogue::Qkv, 512, 6144, 4096),
        (Epilogue::Add, 2048, 4096, 12288),
        (Epilogue::SwiGlu, 2048, 24576, 4096),
        (Epilogue::Add, 8192, 4096, 4096),
        (PLAIN, 2048, 4096, 4096),
    ] {
        check_gemm(device, epilogue, m, n, k)?;
    }
    Ok(())
}
