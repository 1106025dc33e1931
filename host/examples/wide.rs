//! Kernels for the rows of many sequences, at Qwen3-8B's shapes: compared with those for few rows bit for bit, then timed.
//!
//! `wide ROWS …`, such as `wide 64 128 256`. Random weights, keys and values.

use cuda_std::tensor::Matrix;
use gpu_kernels::attention::{self, Attend, SPLIT};
use gpu_kernels::kv::{self, Cache, HEAD_DIM, PAGE_TOKENS};
use gpu_kernels::linear::{self, Linear, STRIP, slot};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::step::Rows;
use gpu_kernels::stream::{self, CHUNK_BYTES, LayOut, Walk};
use gpu_kernels::wide::{self, MAX_WIDE_ROWS, Share, Wide, WideAttend};
use half::bf16;
use host::Error;
use host::device::{Buffer, Device};

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Write,
    Add,
    SwiGlu,
}

fn random(len: usize, mut seed: u64) -> Vec<bf16> {
    (0..len)
        .map(|_| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            bf16::from_f32((seed >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
        })
        .collect()
}

fn fill(device: &Device, len: usize, seed: u64) -> Result<Buffer<bf16>, Error> {
    let pattern = random(len.min(8 << 20), seed);
    let mut buffer = device.zeroed(len)?;
    for at in (0..len).step_by(pattern.len().max(1)) {
        let piece = pattern.len().min(len - at);
        buffer.write(at, &pattern[..piece])?;
    }
    Ok(buffer)
}

struct RowList([Buffer<u32>; 4]);

impl RowList {
    fn new(device: &Device, positions: &[u32], sequences: &[u32]) -> Result<Self, Error> {
        let rows = positions.len();
        let list = [
            device.upload(&[rows as u32])?,
            device.zeroed(rows)?,
            device.upload(positions)?,
            device.upload(sequences)?,
        ];
        Ok(Self(list))
    }

    fn rows(&self) -> Rows {
        let [count, tokens, positions, sequences] = self.0.each_ref().map(|b| b.ptr_mut());
        Rows { count, tokens, positions, sequences }
    }
}

fn read<T: bytemuck::Pod>(buffer: &Buffer<T>) -> Result<Vec<T>, Error> {
    let mut data = vec![T::zeroed(); buffer.len()];
    buffer.read(0, &mut data)?;
    Ok(data)
}

fn product(
    device: &Device,
    name: &str,
    k: usize,
    n: usize,
    kind: Kind,
    m: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let grid = device.multiprocessors();
    let features = if kind == Kind::SwiGlu { n / 2 } else { n };
    let weight = fill(device, n * k, 1)?;
    // SAFETY: the second half of the weights.
    let up = if kind == Kind::SwiGlu { unsafe { weight.ptr().at(features * k) } } else { Default::default() };
    // The stream, several times over.
    let strips = n.div_ceil(STRIP as usize) as u32;
    let sets = ((1usize << 30) / (2 * n * k)).clamp(2, 64);
    let mut walk = Walk::new(grid);
    let (mut bases, mut passes) = (Vec::new(), Vec::new());
    for _ in 0..sets {
        bases.push(walk.chunks);
        let mut first = 0;
        while first < strips {
            let pass = walk.pass(strips - first, k as u32);
            passes.push((first, pass));
            first += pass.strips;
        }
    }
    let stream = device.zeroed::<bf16>(walk.chunks as usize * CHUNK_BYTES as usize / 2)?;
    for (first_strip, pass) in passes {
        let p = LayOut {
            weight: weight.ptr(),
            up,
            stream: stream.ptr_mut(),
            base: pass.base,
            n: features as u32,
            k: k as u32,
            first_strip,
            strips: pass.strips,
            blocks: grid,
        };
        // SAFETY: the matrix is `[n, k]`, and the stream has room for every pass of the walk.
        unsafe { device.launch::<stream::lay_out>((pass.strips, pass.depth), 0, p)? };
    }
    let inputs = random(m * k, 3);
    let mut there = vec![bf16::ZERO; m * k];
    for i in 0..m * k {
        there[i / k * k + slot((i % k) as u32) as usize] = inputs[i];
    }
    let (plain, x) = (device.upload(&inputs)?, device.upload(&there)?);
    let squares = device.upload(&vec![16.0f32; m * k / 16])?;
    let normed = kind != Kind::Add;
    let norm = if normed { Norm { squares: squares.ptr(), dim: k as u32, eps: 1e-6 } } else { Norm::default() };
    let next = fill(device, features, 9)?;
    let outputs = || -> Result<_, Error> {
        Ok((
            device.zeroed::<f32>(m * n)?,
            device.zeroed::<bf16>(m * features)?,
            device.zeroed::<bf16>(m * features)?,
            device.zeroed::<f32>(m * n / 16)?,
        ))
    };
    let (want, got) = (outputs()?, outputs()?);
    let list = RowList::new(device, &vec![0; m], &vec![0; m])?;
    for first in (0..m).step_by(64) {
        let count = 64.min(m - first);
        let own = RowList::new(device, &vec![0; count], &vec![0; count])?;
        // SAFETY: the group's rows are within each buffer.
        let p = unsafe {
            Linear {
                rows: own.rows(),
                x: plain.ptr().at(first * k),
                weight: weight.ptr(),
                up,
                norm: Norm {
                    squares: if normed { squares.ptr().at(first * k / 16) } else { Default::default() },
                    ..norm
                },
                y: want.0.ptr_mut().at(first * n),
                activation: want.1.ptr_mut().at(first * features),
                residual: Residual {
                    x: want.0.ptr_mut().at(first * n),
                    scaled: want.2.ptr_mut().at(first * features),
                    squares: want.3.ptr_mut().at(first * n / 16),
                    dim: features as u32,
                },
                next_norm: next.ptr(),
                n: features as u32,
                k: k as u32,
                first_row: 0,
            }
        };
        let (strips, shared) = (strips, Linear::shared_bytes(64));
        // SAFETY: buffers as large as the parameter block says.
        unsafe {
            match kind {
                Kind::Write => device.launch::<linear::linear_64>(strips, shared, p)?,
                Kind::Add => device.launch::<linear::linear_add_64>(strips, shared, p)?,
                Kind::SwiGlu => device.launch::<linear::swiglu_64>(strips, shared, p)?,
            }
        }
        device.synchronize()?;
    }
    let tile_rows = if m <= 64 { 64 } else { 128 };
    let map =
        device.tensor_maps(&[Matrix { address: x.ptr().addr(), rows: m as u64, columns: k as u64, tile_rows }])?;
    let row_tiles = (m as u32).div_ceil(tile_rows);
    let partials = device.zeroed::<f32>(Wide::partial_len(tile_rows, grid))?;
    let arrivals = device.zeroed::<u32>(Wide::arrivals_len(grid))?;
    let launch = |set: usize| -> Result<(), Error> {
        let p = Wide {
            rows: list.rows(),
            x: map.ptr(0),
            stream: stream.ptr(),
            base: bases[set % sets],
            blocks: grid,
            strips,
            row_tiles,
            share: Share::new(Wide::tiles(strips, row_tiles), grid),
            n: features as u32,
            k: k as u32,
            norm,
            y: got.0.ptr_mut(),
            activation: got.1.ptr_mut(),
            residual: Residual {
                x: got.0.ptr_mut(),
                scaled: got.2.ptr_mut(),
                squares: got.3.ptr_mut(),
                dim: features as u32,
            },
            next_norm: next.ptr(),
            partials: partials.ptr_mut(),
            arrivals: arrivals.ptr_mut(),
        };
        let shared = Wide::shared_bytes(tile_rows);
        // SAFETY: buffers as large as the parameter block says; the launch before wrote none of the weights.
        unsafe {
            match (kind, tile_rows) {
                (Kind::Write, 64) => device.launch_early::<wide::wide_linear_64>(grid, shared, p),
                (Kind::Write, _) => device.launch_early::<wide::wide_linear_128>(grid, shared, p),
                (Kind::Add, 64) => device.launch_early::<wide::wide_add_64>(grid, shared, p),
                (Kind::Add, _) => device.launch_early::<wide::wide_add_128>(grid, shared, p),
                (Kind::SwiGlu, 64) => device.launch_early::<wide::wide_swiglu_64>(grid, shared, p),
                (Kind::SwiGlu, _) => device.launch_early::<wide::wide_swiglu_128>(grid, shared, p),
            }
        }
    };
    launch(0)?;
    let back = |v: Vec<bf16>| -> Vec<bf16> {
        (0..v.len()).map(|i| v[i / features * features + slot((i % features) as u32) as usize]).collect()
    };
    let same = match kind {
        Kind::Write => read(&want.0)? == read(&got.0)?,
        Kind::Add => {
            read(&want.0)? == read(&got.0)? && read(&want.2)? == back(read(&got.2)?) && read(&want.3)? == read(&got.3)?
        }
        Kind::SwiGlu => read(&want.1)? == back(read(&got.1)?),
    };
    let timer = device.timer()?;
    let repeats = 60;
    let mut best = f64::MAX;
    for _ in 0..4 {
        let ms = timer.time(|| (0..repeats).try_for_each(launch))?;
        best = best.min(ms / repeats as f64 * 1e3);
    }
    println!(
        "{name:8} {k:6} x {n:6} rows {m:4}: {best:8.1} us, {:6.0} GB/s of weights  bits {}",
        (2 * n * k) as f64 / best / 1e3,
        if same { "equal" } else { "DIFFER" }
    );
    Ok(())
}

fn attend(device: &Device, sequences: usize, context: usize) -> Result<(), Box<dyn std::error::Error>> {
    let (q_heads, kv_heads, dim) = (32u32, 8u32, HEAD_DIM as usize);
    let stride = context.div_ceil(PAGE_TOKENS as usize);
    let page = kv::page_elements(kv_heads);
    let layers = ((2usize << 30) / (2 * sequences * stride * page)).max(2);
    let pages = fill(device, layers * sequences * stride * page, 5)?;
    let mut tables: Vec<u32> = (0..(sequences * stride) as u32).collect();
    let mut seed = 1u64;
    for i in 0..tables.len() {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let j = (seed >> 33) as usize % tables.len();
        tables.swap(i, j);
    }
    let tables = device.upload(&tables)?;
    let q = fill(device, sequences * q_heads as usize * dim, 6)?;
    let splits = (context as u32).div_ceil(SPLIT);
    let list = RowList::new(device, &vec![context as u32 - 1; sequences], &(0..sequences as u32).collect::<Vec<_>>())?;
    let tiles: Vec<u32> = (0..sequences as u32).flat_map(|i| [i, 1]).collect();
    let tiles = device.upload(&tiles)?;
    let pairs = sequences * q_heads as usize;
    let sums = device.zeroed::<f32>(pairs * splits as usize * dim)?;
    let scales = device.zeroed::<f32>(pairs * splits as usize * 2)?;
    let (out, want) = (device.zeroed::<bf16>(pairs * dim)?, device.zeroed::<bf16>(pairs * dim)?);
    let arrivals = device.zeroed::<u32>(sequences * kv_heads as usize)?;
    let params = |layer: usize| Attend {
        rows: list.rows(),
        q: q.ptr(),
        cache: Cache {
            // SAFETY: a layer of the pages.
            pages: unsafe { pages.ptr_mut().at(layer * sequences * stride * page) },
            tables: tables.ptr(),
            table_stride: stride as u32,
            kv_heads,
        },
        sums: sums.ptr_mut(),
        scales: scales.ptr_mut(),
        out: out.ptr_mut(),
        splits,
        q_heads,
        scale: 1.0 / (HEAD_DIM as f32).sqrt(),
    };
    for i in 0..sequences {
        let own = RowList::new(device, &[context as u32 - 1], &[i as u32])?;
        let at = i * q_heads as usize * dim;
        // SAFETY: the sequence's row is within both buffers.
        let p = unsafe { Attend { rows: own.rows(), q: q.ptr().at(at), out: want.ptr_mut().at(at), ..params(0) } };
        // SAFETY: buffers as large as the parameter block says.
        unsafe {
            device.launch::<attention::attend>((kv_heads, splits, 1), Attend::SHARED_BYTES, p)?;
            device.launch::<attention::combine>((q_heads, 1), Attend::COMBINE_SHARED_BYTES, p)?;
        }
        device.synchronize()?;
    }
    let launch = |layer: usize| -> Result<(), Error> {
        let p = WideAttend {
            attend: params(layer % layers),
            tiles: tiles.ptr(),
            tile_count: sequences as u32,
            arrivals: arrivals.ptr_mut(),
            splits,
        };
        // SAFETY: buffers as large as the parameter block says.
        unsafe { device.launch_early::<wide::wide_attend>(device.multiprocessors(), WideAttend::SHARED_BYTES, p) }
    };
    launch(0)?;
    let got = read(&out)?;
    let got: Vec<bf16> = (0..got.len()).map(|i| got[i / dim * dim + slot((i % dim) as u32) as usize]).collect();
    let same = got == read(&want)?;
    let timer = device.timer()?;
    let repeats = 40;
    let mut best = f64::MAX;
    for _ in 0..4 {
        best = best.min(timer.time(|| (0..repeats).try_for_each(launch))? / repeats as f64 * 1e3);
    }
    let bytes = (sequences * context * kv_heads as usize * dim * 4) as f64;
    println!(
        "attend {sequences} x {context}: {best:8.1} us, {:6.0} GB/s  bits {}",
        bytes / best / 1e3,
        if same { "equal" } else { "DIFFER" }
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::cuda(0)?;
    for argument in std::env::args().skip(1) {
        let m: usize = argument.parse()?;
        assert!(m as u32 <= MAX_WIDE_ROWS);
        for (name, k, n, kind) in [
            ("qkv", 4096, 6144, Kind::Write),
            ("o", 4096, 4096, Kind::Add),
            ("gate-up", 4096, 24576, Kind::SwiGlu),
            ("down", 12288, 4096, Kind::Add),
            ("head", 4096, 151_936, Kind::Write),
        ] {
            product(&device, name, k, n, kind, m)?;
        }
        attend(&device, m, 1040)?;
    }
    Ok(())
}
