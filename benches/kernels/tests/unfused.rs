//! What was fused into its neighbours since, each against a plain definition.

#[path = "../../../gpu-kernels/tests/common/mod.rs"]
mod common;

use bench_kernels::unfused;
use common::{Random, RowBuffers, relative_error, run, widen};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::gate::SiluMul;
use gpu_kernels::norm::RmsNorm;
use proptest::prelude::*;

/// RMSNorm of one vector, in f64.
fn rms_norm(x: &[f32], weight: &[bf16], eps: f32) -> Vec<f64> {
    let mean = x.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + eps as f64).sqrt();
    x.iter().zip(weight).map(|(&v, w)| v as f64 * scale * w.to_f64()).collect()
}

proptest! {
    #[test]
    fn a_norm_in_a_launch_of_its_own(rows in 1usize..4, dim in prop::sample::select(vec![128usize, 384, 2560]), seed: u64) {
        let mut random = Random::new(seed);
        let (x, weight) = (random.floats(rows * dim), random.bf16s(dim));
        let row_buffers = RowBuffers::sequence(0, rows as u32);
        let (device_x, device_weight) = (Buffer::from_slice(&x), Buffer::from_slice(&weight));
        let y = Buffer::<bf16>::new_poisoned(rows * dim);
        let params = RmsNorm {
            rows: row_buffers.rows(),
            x: device_x.ptr(),
            weight: device_weight.ptr(),
            y: y.ptr_mut(),
            dim: dim as u32,
            eps: 1e-6,
        };
        run::<unfused::rms_norm>([1, rows as u32 + 1, 1], RmsNorm::SHARED_BYTES, seed, params);
        let want: Vec<f32> = x.chunks(dim).flat_map(|x| rms_norm(x, &weight, 1e-6)).map(|v| v as f32).collect();
        prop_assert!(relative_error(widen(&y.to_vec()), &want) < 1.0 / 256.0);
    }

    #[test]
    fn silu_in_a_launch_of_its_own(rows in 1usize..4, n in 1usize..600, seed: u64) {
        let mut random = Random::new(seed);
        let (gate, up) = (random.floats(rows * n), random.floats(rows * n));
        let row_buffers = RowBuffers::sequence(0, rows as u32);
        let width = n.div_ceil(8) * 16;
        let mut both = vec![f32::NAN; rows * width];
        for i in 0..rows * n {
            let at = i / n * width + i % n / 8 * 16 + i % n % 8;
            (both[at], both[at + 8]) = (gate[i], up[i]);
        }
        let x = Buffer::from_slice(&both);
        let y = Buffer::<bf16>::new_poisoned(rows * n);
        let params = SiluMul {
            rows: row_buffers.rows(),
            x: x.ptr(),
            y: y.ptr_mut(),
            n: n as u32,
        };
        run::<unfused::silu_mul>([(n as u32).div_ceil(256), rows as u32 + 1, 1], 0, seed, params);
        let silu = |(&g, &u): (&f32, &f32)| (g as f64 / (1.0 + (-g as f64).exp()) * u as f64) as f32;
        let want: Vec<f32> = gate.iter().zip(&up).map(silu).collect();
        prop_assert!(relative_error(widen(&y.to_vec()), &want) < 1.0 / 200.0);
    }
}
