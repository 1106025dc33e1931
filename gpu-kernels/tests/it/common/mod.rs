//! What the kernel tests share: rows, random data, launches.
#![allow(dead_code)]

use std::ops::Range;

use cuda_std::emulator::{self, Buffer, Launch};
use cuda_std::{Global, Kernel, bf16};
use gpu_kernels::batched::{self, BatchedStep};
use gpu_kernels::e4m3::{self, CodedRows, QuantizeRows, quantize_rows};
use gpu_kernels::linear::{N_TILE, slot};
use gpu_kernels::sample::{self, Split};
use gpu_kernels::step::Rows;
use gpu_kernels::stream::{CHUNK_BYTES, CHUNK_FEATURES, LayOut, StreamMatrix, Walk, lay_out};

/// The value of a code of e4m3.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let value =
        if exponent == 0 { mantissa / 8.0 * 2f32.powi(-6) } else { (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { value } else { -value }
}

/// A small deterministic generator: its seed is all that is needed to repeat a failure.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        gpu_kernels::sample::random(0x5EED, self.0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in -1..1.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.uniform()).collect()
    }

    pub fn bf16s(&mut self, len: usize) -> Vec<bf16> {
        (0..len).map(|_| bf16::from_f32(self.uniform())).collect()
    }
}

/// Device memory behind a [`CodedRows`]. Its codes are poison until they are written.
pub struct CodeBuffers {
    pub codes: Buffer<u8>,
    pub scales: Buffer<f32>,
    rows: usize,
    k: usize,
}

impl CodeBuffers {
    /// Memory for `rows` rows of `k` elements. Scales are `unwritten` until they are written.
    pub fn new(rows: usize, k: usize, unwritten: f32) -> Self {
        let scales = vec![unwritten; rows * e4m3::groups(k as u32) as usize];
        let codes = vec![0xff; rows * k];
        Self { codes: Buffer::from_slice(&codes), scales: Buffer::from_slice(&scales), rows, k }
    }

    pub fn rows(&self) -> CodedRows {
        CodedRows { codes: self.codes.ptr_mut(), scales: self.scales.ptr_mut(), x_rows: self.rows as u32 }
    }

    /// Quantises these rows of `x` with [`quantize_rows`].
    pub fn quantize(&self, x: Global<bf16>, rows: Range<usize>, in_order: bool) {
        let (first_row, m, k) = (rows.start as u32, rows.end as u32, self.k as u32);
        let params = QuantizeRows { x, to: self.rows(), first_row, m, k, in_order: in_order.into() };
        run::<quantize_rows>([e4m3::groups(k), (m - first_row).div_ceil(QuantizeRows::ROWS), 1], 0, 3, params);
    }
}

/// Device memory behind a [`Rows`].
pub struct RowBuffers {
    count: Buffer<u32>,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    sequences: Buffer<u32>,
}

impl RowBuffers {
    /// Rows from their (token, position, sequence).
    pub fn new(rows: &[(u32, u32, u32)]) -> Self {
        let column = |f: fn(&(u32, u32, u32)) -> u32| {
            Buffer::from_slice(&rows.iter().map(f).chain(std::iter::once(0)).collect::<Vec<u32>>())
        };
        Self {
            count: Buffer::from_slice(&[rows.len() as u32]),
            tokens: column(|r| r.0),
            positions: column(|r| r.1),
            sequences: column(|r| r.2),
        }
    }

    /// `count` rows of sequence 0 from position `start` on.
    pub fn sequence(start: u32, count: u32) -> Self {
        Self::new(&(0..count).map(|r| (r, start + r, 0)).collect::<Vec<_>>())
    }

    pub fn rows(&self) -> Rows {
        Rows {
            count: self.count.ptr_mut(),
            tokens: self.tokens.ptr_mut(),
            positions: self.positions.ptr_mut(),
            sequences: self.sequences.ptr_mut(),
            paths: Default::default(),
        }
    }
}

/// Teams of CTAs for rows of logits, with their scratch memory.
pub struct Teams {
    scratch: Buffer<u64>,
    teams: u32,
    splits: u32,
}

impl Teams {
    pub fn new(teams: u32, splits: u32) -> Self {
        // Only the first words must be zero; a kernel must not count on the others.
        let mut words = vec![0xDEAD_BEEF_DEAD_BEEF; teams as usize * sample::SCRATCH_WORDS];
        words.chunks_mut(sample::SCRATCH_WORDS).for_each(|team| team[..sample::ZEROED_WORDS].fill(0));
        Self { scratch: Buffer::from_slice(&words), teams, splits }
    }

    pub fn split(&self) -> Split {
        Split { scratch: self.scratch.ptr_mut(), splits: self.splits }
    }

    pub fn grid(&self) -> [u32; 3] {
        [self.teams * self.splits, 1, 1]
    }
}

/// Runs a kernel under the emulator; any misuse fails the test.
pub fn run<K: Kernel>(grid: [u32; 3], shared_bytes: u32, seed: u64, params: K::Params) {
    run_launch::<K>(&Launch { grid, threads: K::THREADS, shared_bytes, seed, ..Launch::default() }, params);
}

/// As [`run`], with all blocks resident at once, for kernels whose blocks wait for each other.
pub fn run_resident<K: Kernel>(grid: [u32; 3], shared_bytes: u32, seed: u64, params: K::Params) {
    let launch = Launch { grid, threads: K::THREADS, shared_bytes, seed, cooperative: true, ..Launch::default() };
    run_launch::<K>(&launch, params);
}

/// Runs a batched step with tiles of `tile_rows` rows.
pub fn run_batched(tile_rows: u32, grid: u32, seed: u64, params: BatchedStep) {
    let (grid, shared) = ([grid, 1, 1], BatchedStep::shared_bytes(tile_rows));
    match tile_rows {
        64 => run_resident::<batched::batched_64>(grid, shared, seed, params),
        96 => run_resident::<batched::batched_96>(grid, shared, seed, params),
        _ => run_resident::<batched::batched_128>(grid, shared, seed, params),
    }
}

fn run_launch<K: Kernel>(launch: &Launch, params: K::Params) {
    if let Err(error) = emulator::launch::<K>(launch, params) {
        panic!("{error}");
    }
}

/// The largest difference, relative to the largest expected magnitude.
pub fn relative_error(got: impl IntoIterator<Item = f32>, want: &[f32]) -> f32 {
    let scale = want.iter().fold(1e-30f32, |m, w| m.max(w.abs()));
    let mut count = 0;
    let worst = got.into_iter().zip(want).fold(0f32, |m, (g, w)| {
        count += 1;
        // NaN counts as infinitely wrong.
        let error = (g - w).abs();
        if error.is_nan() { f32::INFINITY } else { m.max(error) }
    });
    assert_eq!(count, want.len());
    worst / scale
}

pub fn widen(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

/// Rows of `width` elements in the order of [`slot`], or back.
pub fn reordered(rows: &[bf16], width: usize, back: bool) -> Vec<bf16> {
    let mut out = vec![bf16::ZERO; rows.len()];
    for i in 0..rows.len() {
        let there = i / width * width + slot((i % width) as u32) as usize;
        if back { out[i] = rows[there] } else { out[there] = rows[i] }
    }
    out
}

/// Lays out one matrix `[n, k]` in a stream, from where `walk` stands. With `up` the matrix is a gate projection, and
/// the up projection lies beside it. Returns the stream, and where the matrix is in it.
pub fn laid_out(weight: &[bf16], up: Option<&[bf16]>, k: u32, mut walk: Walk) -> (Buffer<bf16>, StreamMatrix) {
    let n = weight.len() as u32 / k;
    let n_tiles = (if up.is_some() { 2 * n } else { n }).div_ceil(N_TILE);
    let (base, blocks) = (walk.chunks, walk.grid);
    walk.pass(n_tiles, k);
    let stream = Buffer::from_slice(&vec![bf16::ZERO; walk.chunks as usize * CHUNK_BYTES as usize / 2]);
    let weight = Buffer::from_slice(weight);
    let up = up.map(Buffer::from_slice);
    let to = StreamMatrix { stream: stream.ptr(), base, blocks, n_tiles, k };
    let lay_out = LayOut {
        weight: weight.ptr(),
        up: up.as_ref().map_or(Global::default(), |up| up.ptr()),
        to,
        stream: stream.ptr_mut(),
        first_n_tile: 0,
        n,
    };
    run::<lay_out>([n_tiles, k.div_ceil(CHUNK_FEATURES), 1], 0, 2, lay_out);
    (stream, to)
}
