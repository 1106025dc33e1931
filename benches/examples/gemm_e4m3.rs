//! GEMMs of e4m3 on card 0, in the shapes of Qwen3-8B's layers: compared with a plain reference, then timed next to
//! GEMMs of bf16.
//!
//! `cargo run --release --package benches --example gemm_e4m3` prints TFLOP/s of both: the best of four measurements of
//! 20 launches each.

use std::error::Error;

use bench_kernels::gemm::gemm_plain_e4m3;
use benches::gemm::PLAIN;
use gpu_kernels::gemm::{E4m3, Gemm, GemmE4m3, SCALED_INPUTS, TILE_ROWS};
use gpu_kernels::linear::{N_TILE, slot};
use gpu_kernels::norm::{Norm, Residual};
use half::bf16;
use host::device::{Buffer, Device, TensorMaps};
use host::gemm;
use host::stream::{Source, Stream};
use model::format::e4m3;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A GEMM of random codes and scales.
struct Case {
    sizes: [usize; 3],
    /// Pairs of codes, each in the place of a bf16: `[m, k]` and `[n, k]` codes.
    codes: [Vec<bf16>; 2],
    /// Scales, laid out as in [`E4m3`].
    scales: [Vec<f32>; 2],
    out: Buffer<bf16>,
    weights: Stream,
    maps: TensorMaps,
    of_scales: [Buffer<f32>; 2],
    _x: Buffer<bf16>,
}

/// SplitMix64's words.
fn word(i: usize) -> u64 {
    gpu_kernels::sample::random(1, i as u64)
}

impl Case {
    fn new(device: &Device, [m, n, k]: [usize; 3]) -> Result<Self> {
        let (pairs, groups) = (k / 2, k / SCALED_INPUTS as usize);
        // All magnitudes are below 4.
        let codes = [m, n]
            .map(|rows| (0..rows * pairs).map(|i| bf16::from_bits(word(i + rows) as u16 & 0xc7c7)).collect::<Vec<_>>());
        let scale = |i: usize| (word(i) >> 40) as f32 / (1 << 24) as f32 / 64.0;
        let scales = [groups * m, n / 128 * groups * 4].map(|len| (0..len).map(scale).collect::<Vec<_>>());
        let in_slots = |row: &[bf16]| {
            let mut out = vec![bf16::ZERO; row.len()];
            row.iter().enumerate().for_each(|(i, pair)| out[slot(i as u32) as usize] = *pair);
            out
        };
        let x = device.upload(&codes[0].chunks(pairs).flat_map(in_slots).collect::<Vec<_>>())?;
        let w = device.upload(&codes[1])?;
        let out = device.zeroed(m * n)?;
        let weights = Stream::new(device, [(n as u32 / N_TILE, pairs as u32)])?;
        // SAFETY: the matrix is as it says.
        unsafe { weights.lay_out(device, 0, Source::new(&w, n, None))? };
        let maps = device.tensor_maps(&[gemm::rows(x.ptr(), m, pairs), gemm::out(out.ptr(), m, n)])?;
        let of_scales = [device.upload(&scales[0])?, device.upload(&scales[1])?];
        Ok(Self { sizes: [m, n, k], codes, scales, out, weights, maps, of_scales, _x: x })
    }

    /// Parameters for the kernel of bf16, to which each pair of codes is one number.
    fn of_pairs(&self) -> Gemm {
        let [m, n, _] = self.sizes.map(|size| size as u32);
        let matrix = self.weights.matrices()[0];
        Gemm {
            x: self.maps.ptr(0),
            stream: matrix.stream,
            base: matrix.base,
            blocks: matrix.blocks,
            n_tiles: matrix.n_tiles,
            out: self.maps.ptr(1),
            y: Default::default(),
            norm: Norm::default(),
            bias: Default::default(),
            heads: Default::default(),
            residual: Residual::default(),
            next_norm: Default::default(),
            codes: Default::default(),
            first_row: 0,
            m,
            first_feature: 0,
            n,
            k: matrix.k,
            // Blocks that run at the same time share rows of this many tiles in L2.
            band: 8,
            beside: Default::default(),
        }
    }

    fn enqueue(&self, device: &Device) -> std::result::Result<(), host::Error> {
        let [m, n, k] = self.sizes.map(|size| size as u32);
        let [x_scales, w_scales] = self.of_scales.each_ref().map(Buffer::ptr);
        let scales = E4m3 { x_scales, w_scales, x_rows: m, groups: k / SCALED_INPUTS };
        let blocks = (m.div_ceil(TILE_ROWS) * n.div_ceil(128)).min(device.sms());
        let p = GemmE4m3 { gemm: self.of_pairs(), scales };
        // SAFETY: buffers and maps of self, as large as the parameter block says, alive until the device is
        // synchronised.
        unsafe { device.launch::<gemm_plain_e4m3>(blocks, Gemm::shared_bytes(128), p) }
    }

    /// Compares the whole output with sums in f64.
    fn check(&self, device: &Device) -> Result<()> {
        let [m, n, k] = self.sizes;
        self.enqueue(device)?;
        let mut out = vec![bf16::ZERO; m * n];
        self.out.read(0, &mut out)?;
        let value = |pair: &bf16| pair.to_bits().to_le_bytes().map(|code| f64::from(e4m3::value(code)));
        let [x, w] = self.codes.each_ref().map(|codes| codes.iter().flat_map(value).collect::<Vec<_>>());
        let (groups, inputs) = (k / SCALED_INPUTS as usize, SCALED_INPUTS as usize);
        for (i, found) in out.iter().enumerate() {
            let (row, feature) = (i / n, i % n);
            let (mut sum, mut magnitudes) = (0.0, 0.0);
            for g in 0..groups {
                let scale = self.scales[0][g * m + row] * self.scales[1][(feature / 128 * groups + g) * 4];
                for j in g * inputs..(g + 1) * inputs {
                    let product = x[row * k + j] * w[feature * k + j] * f64::from(scale);
                    (sum, magnitudes) = (sum + product, magnitudes + product.abs());
                }
            }
            // The tensor core keeps fourteen bits of the sums, the result eight.
            if (found.to_f64() - sum).abs() > magnitudes / 1000.0 + sum.abs() / 200.0 {
                return Err(format!("row {row}, feature {feature}: {found}, and {sum} is right").into());
            }
        }
        Ok(())
    }
}

/// The best seconds of a launch.
fn time(device: &Device, run: impl Fn() -> std::result::Result<(), host::Error>) -> Result<f64> {
    const LAUNCHES: u32 = 20;
    let timer = device.timer()?;
    let mut best = f64::MAX;
    for _ in 0..4 {
        best = best.min(timer.time(|| (0..LAUNCHES).try_for_each(|_| run()))?);
    }
    Ok(best / 1e3 / f64::from(LAUNCHES))
}

fn main() -> Result<()> {
    let device = benches::device(0)?;
    if !device.capabilities().has_gemms() {
        return Err(format!("{} is no Hopper card, which these kernels are for", device.name()).into());
    }
    for sizes in [[128, 128, 256], [256, 384, 1536]] {
        Case::new(&device, sizes)?.check(&device)?;
    }
    println!("{} equals the reference", device.name());
    let beside = gemm::Beside::new(&device)?;
    println!("{:>6} {:>6} {:>6} {:>6} {:>6}", "M", "N", "K", "bf16", "e4m3");
    for m in [128, 256, 512, 1024, 2048, 4096, 8192] {
        for [n, k] in [[6144, 4096], [4096, 4096], [24576, 4096], [4096, 12288]] {
            let flop = 2.0 * (m * n * k) as f64;
            let case = Case::new(&device, [m, n, k])?;
            // A GEMM of bf16 with as many inputs takes the bytes of twice as many codes.
            let plain = Case::new(&device, [m, n, 2 * k])?;
            // SAFETY: as above.
            let bf16 = time(&device, || unsafe { gemm::enqueue(&device, &beside, PLAIN, plain.of_pairs()) })?;
            let e4m3 = time(&device, || case.enqueue(&device))?;
            println!("{m:>6} {n:>6} {k:>6} {:>6.0} {:>6.0}", flop / bf16 / 1e12, flop / e4m3 / 1e12);
        }
    }
    Ok(())
}
