//! Linear layers: how fast weights stream through the kernels of `gpu_kernels::linear`.

use gpu_kernels::linear::{self, Linear, N_TILE, SLICE};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::step::{MAX_ROWS, Rows};
use gpu_kernels::stream::CHUNK_BYTES;
use half::bf16;

use crate::harness::{compare, spread_over};
use crate::random::random;
use crate::{Bench, BenchError, Case, Label, Path, Pool, Unit, Work};
use host::Error;
use host::device::{Buffer, Device};
use host::stream::{Source, Stream};

/// Bytes of weights that a case rotates over: many times what a cache holds.
const ROTATED_BYTES: usize = 1 << 30;
/// Most sets of weights.
const MOST_SETS: usize = 64;
/// Output features that are compared with the reference.
const PROBES: usize = 64;

/// What a layer does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearEpilogue {
    /// Writes them.
    Write,
    /// Adds them to what is there: the layer projects into the residual stream.
    Add,
    /// Takes them as gate and up of SwiGLU; each has half of the `n` features.
    SwiGlu,
}

/// A layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The layer's name.
    pub name: String,
    /// Input features.
    pub k: usize,
    /// Output features; for gate and up, those of both together.
    pub n: usize,
    /// What is done with the sums.
    pub kind: LinearEpilogue,
}

impl Shape {
    /// A layer that writes its sums.
    pub fn plain(k: usize, n: usize) -> Self {
        Self { name: "linear".into(), k, n, kind: LinearEpilogue::Write }
    }
}

/// The layers and rows to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSizes {
    /// The layers.
    pub shapes: Vec<Shape>,
    /// Token rows: each number is a case.
    pub rows: Vec<u32>,
}

impl LinearSizes {
    /// The layers of Qwen3-8B.
    pub fn published() -> Self {
        let shape = |name: &str, k, n, kind| Shape { name: name.into(), k, n, kind };
        Self {
            shapes: vec![
                shape("qkv", 4096, 6144, LinearEpilogue::Write),
                shape("o", 4096, 4096, LinearEpilogue::Add),
                shape("gate, up", 4096, 24576, LinearEpilogue::SwiGlu),
                shape("down", 12288, 4096, LinearEpilogue::Add),
                shape("head", 4096, 151_936, LinearEpilogue::Write),
            ],
            rows: vec![1, 8, 16, 64],
        }
    }

    /// Small sizes, for checks on the emulator: one layer of each kind, and N-tiles that are not full.
    pub fn small() -> Self {
        let shape = |name: &str, k, n, kind| Shape { name: name.into(), k, n, kind };
        Self {
            shapes: vec![
                shape("qkv", 128, 40, LinearEpilogue::Write),
                shape("o", 256, 32, LinearEpilogue::Add),
                shape("gate, up", 128, 48, LinearEpilogue::SwiGlu),
            ],
            rows: vec![1, 9, 20],
        }
    }

    /// Number of cases of [`run`].
    pub fn cases(&self) -> usize {
        self.shapes.len() * self.rows.len()
    }

    fn check(&self) -> Result<(), BenchError> {
        for &rows in &self.rows {
            if rows == 0 || rows > MAX_ROWS {
                return Err(BenchError::Size(format!("--rows {rows}: a step has 1 to {MAX_ROWS} rows")));
            }
        }
        for shape in &self.shapes {
            let Shape { k, n, .. } = *shape;
            if k == 0 || n == 0 || !k.is_multiple_of(2 * SLICE as usize) {
                return Err(BenchError::Size(format!(
                    "--shape {k}x{n}: K must be a multiple of {}, and N at least 1",
                    2 * SLICE
                )));
            }
            if shape.kind == LinearEpilogue::Add && !n.is_multiple_of(N_TILE as usize) {
                return Err(BenchError::Size(format!("--shape {k}x{n}: N must be a multiple of {N_TILE}")));
            }
            if k.saturating_mul(n) > u32::MAX as usize {
                return Err(BenchError::Size(format!("--shape {k}x{n}: at most {} weights", u32::MAX)));
            }
        }
        Ok(())
    }
}

/// Measures every layer with every number of rows.
///
/// # Errors
/// If the kernels cannot take the sizes, there is too little memory, the device fails, or a result is wrong.
pub fn run(bench: &mut Bench<'_>, sizes: &LinearSizes) -> Result<(), BenchError> {
    sizes.check()?;
    let rotated = if bench.is_timed() { ROTATED_BYTES } else { 0 };
    let sets = |shape: &Shape| (rotated / (shape.k * shape.n * 2)).clamp(if rotated > 0 { 2 } else { 1 }, MOST_SETS);
    let weights = sizes.shapes.iter().map(|s| s.k * s.n).max().unwrap_or(0);
    let laid_out = |s: &Shape| {
        let all = std::iter::repeat_n((s.n.div_ceil(N_TILE as usize) as u32, s.k as u32), sets(s));
        host::stream::chunks(all, 1) * u64::from(CHUNK_BYTES)
    };
    let most = sizes.shapes.iter().map(laid_out).max().unwrap_or(0);
    bench.room_for(2 * weights as u64 + most, "--shape")?;
    let pool = Pool::new(bench.device(), weights)?;
    for shape in &sizes.shapes {
        for &rows in &sizes.rows {
            layer(bench, &pool, shape, rows, sets(shape))?;
        }
    }
    Ok(())
}

fn layer(bench: &mut Bench<'_>, pool: &Pool, shape: &Shape, rows: u32, sets: usize) -> Result<(), BenchError> {
    let device = bench.device();
    let Shape { k, n, kind, .. } = *shape;
    let m = rows as usize;
    let inputs = random(m * k, 7);
    let x = device.upload(&inputs)?;
    // Features of an output row: a gate and an up together give one.
    let features = if kind == LinearEpilogue::SwiGlu { n / 2 } else { n };
    let y = device.zeroed::<f32>(m * n)?;
    let activation = device.zeroed::<bf16>(if kind == LinearEpilogue::SwiGlu { m * features } else { 0 })?;
    // For a layer that adds: what it leaves for the norm after it.
    let adds = if kind == LinearEpilogue::Add { n } else { 0 };
    let (scaled, norm) = (device.zeroed::<bf16>(m * adds)?, device.zeroed::<bf16>(adds)?);
    let squares = device.zeroed::<f32>(m * adds / N_TILE as usize)?;
    let list = RowList::new(device, rows)?;
    // The gate's matrix, then the up's.
    let up = (kind == LinearEpilogue::SwiGlu).then_some(features * k);
    let source = Source::new(pool.buffer(), features, up);
    let weights = Stream::new(device, (0..sets).map(|_| (source.n_tiles(), k as u32)))?;
    for set in 0..sets {
        // SAFETY: the pool holds the matrices.
        unsafe { weights.lay_out(device, set, source)? };
    }
    let launch = |set: usize| {
        let p = Linear {
            rows: list.rows(),
            x: x.ptr(),
            weights: weights.matrices()[set],
            norm: Norm::default(),
            y: y.ptr_mut(),
            activation: activation.ptr_mut(),
            residual: Residual {
                x: y.ptr_mut(),
                scaled: scaled.ptr_mut(),
                squares: squares.ptr_mut(),
                spans: Default::default(),
                dim: features as u32,
            },
            next_norm: norm.ptr(),
            bias: Default::default(),
            n: features as u32,
            first_row: 0,
        };
        // SAFETY: buffers as large as the parameter block says.
        unsafe { enqueue(device, kind, rows, p) }
    };
    let case = Case {
        label: Label { bench: "linear", name: format!("{} {k} × {n}", shape.name), size: format!("M = {rows}") },
        unit: Unit::GigabytesPerSecond,
        work: Work { bytes: 2 * (k * n) as u64, operations: 2 * (m * k * n) as u64 },
        path: Path::Read,
        sets,
    };
    let check = || {
        let probes = spread_over(features, PROBES);
        let product = |row: usize, feature: usize| -> f64 {
            inputs[row * k..][..k].iter().zip(pool.from(feature * k)).map(|(x, w)| x.to_f64() * w).sum()
        };
        let (mut found, mut expected) = (Vec::new(), Vec::new());
        let (mut sums, mut activations) = (vec![0.0; features], vec![bf16::ZERO; features]);
        for row in 0..m {
            if kind == LinearEpilogue::SwiGlu {
                activation.read(row * features, &mut activations)?;
            } else {
                y.read(row * features, &mut sums)?;
            }
            for &feature in &probes {
                if kind == LinearEpilogue::SwiGlu {
                    let gate = product(row, feature);
                    found.push(activations[feature].to_f32());
                    expected.push(gate / (1.0 + (-gate).exp()) * product(row, features + feature));
                } else {
                    found.push(sums[feature]);
                    expected.push(product(row, feature));
                }
            }
        }
        // Activations are rounded to bf16.
        Ok(compare(&found, &expected, if kind == LinearEpilogue::SwiGlu { 6e-3 } else { 1e-4 }))
    };
    bench.case(case, launch, check)?;
    Ok(())
}

/// Launches the kernel of the width that serves `rows`, as the forward pass chooses it.
unsafe fn enqueue(device: &Device, kind: LinearEpilogue, rows: u32, p: Linear) -> Result<(), Error> {
    let width = match rows {
        0..=8 => 8,
        9..=16 => 16,
        _ => 64,
    };
    let shared = Linear::shared_bytes(width);
    let n_tiles = p.weights.n_tiles;
    // SAFETY: the caller's word.
    unsafe {
        match (kind, width) {
            (LinearEpilogue::Write, 8) => device.launch::<linear::linear_8>(n_tiles, shared, p),
            (LinearEpilogue::Write, 16) => device.launch::<linear::linear_16>(n_tiles, shared, p),
            (LinearEpilogue::Write, _) => device.launch::<linear::linear_64>(n_tiles, shared, p),
            (LinearEpilogue::Add, 8) => device.launch::<linear::linear_add_8>(n_tiles, shared, p),
            (LinearEpilogue::Add, 16) => device.launch::<linear::linear_add_16>(n_tiles, shared, p),
            (LinearEpilogue::Add, _) => device.launch::<linear::linear_add_64>(n_tiles, shared, p),
            (LinearEpilogue::SwiGlu, 8) => device.launch::<linear::swiglu_8>(n_tiles, shared, p),
            (LinearEpilogue::SwiGlu, 16) => device.launch::<linear::swiglu_16>(n_tiles, shared, p),
            (LinearEpilogue::SwiGlu, _) => device.launch::<linear::swiglu_64>(n_tiles, shared, p),
        }
    }
}

/// The rows of a step of one sequence.
pub(super) struct RowList {
    count: Buffer<u32>,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    sequences: Buffer<u32>,
}

impl RowList {
    /// `rows` rows at positions 0 and up.
    fn new(device: &Device, rows: u32) -> Result<Self, Error> {
        Self::ending_at(device, rows, rows)
    }

    /// `rows` rows, the last at position `end` − 1.
    pub(super) fn ending_at(device: &Device, rows: u32, end: u32) -> Result<Self, Error> {
        let positions: Vec<u32> = (end - rows..end).collect();
        Ok(Self {
            count: device.upload(&[rows])?,
            tokens: device.zeroed(rows as usize)?,
            positions: device.upload(&positions)?,
            sequences: device.zeroed(rows as usize)?,
        })
    }

    pub(super) fn rows(&self) -> Rows {
        Rows {
            count: self.count.ptr_mut(),
            tokens: self.tokens.ptr_mut(),
            positions: self.positions.ptr_mut(),
            sequences: self.sequences.ptr_mut(),
            paths: Default::default(),
        }
    }
}
