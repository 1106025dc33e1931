//! GEMMs of e4m3 on card 0: TFLOP/s of every way of cutting them, beside bf16's.
use std::time::Instant;

use bench_kernels::gemm as kernels;
use cuda_std::Kernel;
use gpu_kernels::gemm::{E4m3, Gemm, GemmE4m3, TILE_ROWS};
use gpu_kernels::linear::N_TILE;
use gpu_kernels::norm::{Norm, Residual};
use half::bf16;
use host::device::{Buffer, Device};
use host::gemm;
use host::stream::{Source, Stream};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn time(device: &Device, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    for _ in 0..3 {
        run()?;
    }
    device.synchronize()?;
    let mut best = f64::MAX;
    for _ in 0..3 {
        let begin = Instant::now();
        for _ in 0..20 {
            run()?;
        }
        device.synchronize()?;
        best = best.min(begin.elapsed().as_secs_f64() / 20.0);
    }
    Ok(best)
}

fn launch<K: Kernel<Params = GemmE4m3>>(device: &Device, [down, across]: [u32; 2], p: GemmE4m3) -> Result<()> {
    let tiles = p.gemm.m.div_ceil(down * TILE_ROWS) * p.gemm.n.div_ceil(across * 128);
    let shared = Gemm::shared_bytes(128);
    let at_once = if down * across > 1 { device.clusters_at_once::<K>(shared) } else { device.sms() };
    let band = (1024 / (TILE_ROWS * down)).max(1);
    let p = GemmE4m3 { gemm: Gemm { band, ..p.gemm }, ..p };
    // SAFETY: buffers as large as the parameter block says.
    unsafe { device.launch::<K>(tiles.min(at_once) * down * across, shared, p)? };
    Ok(())
}

fn main() -> Result<()> {
    let device = benches::device(0)?;
    println!("{:>6} {:>6} {:>6}  bf16   1x1   2x1   1x2   2x2   4x2", "M", "N", "K");
    let beside = gemm::Beside::new(&device)?;
    for m in [128usize, 256, 512, 1024, 2048, 4096, 8192] {
        for (n, k) in [(6144usize, 4096usize), (4096, 4096), (24576, 4096), (4096, 12288)] {
            let rows = m.next_multiple_of(128);
            let flops = 2.0 * (m * n * k) as f64;
            let codes = |len: usize| -> Vec<bf16> {
                (0..len)
                    .map(|i| {
                        let h = (i as u32).wrapping_mul(2654435761) >> 8;
                        bf16::from_bits((h & 0xbfbf) as u16)
                    })
                    .collect()
            };
            let x: Buffer<bf16> = device.upload(&codes(rows * k))?;
            let w = device.upload(&codes(n * k))?;
            let out: Buffer<bf16> = device.zeroed(rows * n)?;
            let weights = Stream::new(&device, [(n as u32 / N_TILE, k as u32), (n as u32 / N_TILE, k as u32 / 2)])?;
            // SAFETY: the matrix is as it says.
            unsafe {
                weights.lay_out(&device, 0, Source::new(&w, n, None))?;
                weights.lay_out(&device, 1, Source::new(&w, n, None))?;
            }
            let maps = device.tensor_maps(&[
                gemm::rows(x.ptr(), m, k),
                gemm::rows(x.ptr(), m, k / 2),
                gemm::out(out.ptr(), rows, n),
            ])?;
            let ones = device.upload(&vec![1f32; (k / 128) * rows.max(n / 128 * 4)])?;
            let params = |i: usize| {
                let of = weights.matrices()[i];
                Gemm {
                    x: maps.ptr(i),
                    stream: of.stream,
                    base: of.base,
                    blocks: of.blocks,
                    n_tiles: of.n_tiles,
                    out: maps.ptr(2),
                    y: Default::default(),
                    norm: Norm::default(),
                    bias: Default::default(),
                    // SAFETY: not read.
                    heads: unsafe { std::mem::zeroed() },
                    residual: Residual {
                        x: Default::default(),
                        scaled: Default::default(),
                        squares: Default::default(),
                        spans: Default::default(),
                        dim: n as u32,
                    },
                    next_norm: Default::default(),
                    first_row: 0,
                    m: m as u32,
                    first_feature: 0,
                    n: n as u32,
                    k: of.k,
                    band: 0,
                    beside: Default::default(),
                }
            };
            let p = GemmE4m3 {
                gemm: params(1),
                scales: E4m3 {
                    x_scales: ones.ptr(),
                    w_scales: ones.ptr(),
                    x_rows: rows as u32,
                    groups: k as u32 / 128,
                },
            };
            let tf = |t: f64| flops / t / 1e12;
            // SAFETY: as above.
            let base =
                time(&device, || unsafe { Ok(gemm::enqueue(&device, &beside, benches::gemm::PLAIN, params(0))?) })?;
            let times = [
                time(&device, || launch::<kernels::gemm_plain_e4m3>(&device, [1, 1], p))?,
                time(&device, || launch::<kernels::gemm_plain_e4m3_2x1>(&device, [2, 1], p))?,
                time(&device, || launch::<kernels::gemm_plain_e4m3_1x2>(&device, [1, 2], p))?,
                time(&device, || launch::<kernels::gemm_plain_e4m3_2x2>(&device, [2, 2], p))?,
                time(&device, || launch::<kernels::gemm_plain_e4m3_4x2>(&device, [4, 2], p))?,
            ];
            print!("{m:>6} {n:>6} {k:>6} {:>5.0}", tf(base));
            times.iter().for_each(|&t| print!(" {:>5.0}", tf(t)));
            println!("   best {:.1} us, bf16 {:.1}", times.iter().copied().fold(f64::MAX, f64::min) * 1e6, base * 1e6);
        }
    }
    Ok(())
}
