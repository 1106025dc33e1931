//! Attention over the paged cache: how fast keys and values stream through `attend`, with `combine` after it.

use gpu_kernels::attention::{self, Attend, PAIRS, SPLIT};
use gpu_kernels::kv::{self, Cache, HEAD_DIM, PAGE_TOKENS, place};
use gpu_kernels::step::MAX_ROWS;
use half::bf16;

use super::linear::RowList;
use crate::harness::{compare, spread_over};
use crate::random::random;
use crate::{Bench, BenchError, Case, Label, Path, Pool, Unit, Work};

/// Bytes of keys and values that a case rotates over: many times what a cache holds.
const ROTATED_BYTES: usize = 1 << 30;
/// Most sets of keys and values.
const MOST_SETS: usize = 64;
/// Pairs of a row and a head that are compared with the plain result.
const PROBES: usize = 8;

/// The contexts, rows and heads to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionSizes {
    /// Query heads.
    pub q_heads: u32,
    /// Key-value heads.
    pub kv_heads: u32,
    /// Tokens in the cache: each number is a case for each of `rows`.
    pub contexts: Vec<u32>,
    /// Query rows, the last tokens of the context.
    pub rows: Vec<u32>,
}

impl AttentionSizes {
    /// The heads of Qwen3-8B.
    pub fn published() -> Self {
        Self { q_heads: 32, kv_heads: 8, contexts: vec![1024, 8192, 32_768], rows: vec![1, 16] }
    }

    /// Small sizes, for checks on the emulator: a whole split and a part of one.
    pub fn small() -> Self {
        Self { q_heads: 4, kv_heads: 2, contexts: vec![300], rows: vec![1, 5] }
    }

    /// Number of cases of [`run`].
    pub fn cases(&self) -> usize {
        self.contexts.len() * self.rows.len()
    }

    fn check(&self) -> Result<(), BenchError> {
        let Self { q_heads, kv_heads, .. } = *self;
        if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) || q_heads / kv_heads > PAIRS {
            return Err(BenchError::Size(format!(
                "--query-heads {q_heads} --kv-heads {kv_heads}: 1 to {PAIRS} query heads share a key-value head"
            )));
        }
        for &rows in &self.rows {
            if rows == 0 || rows > MAX_ROWS {
                return Err(BenchError::Size(format!("--rows {rows}: a step has 1 to {MAX_ROWS} rows")));
            }
            if let Some(context) = self.contexts.iter().find(|&&context| context < rows) {
                return Err(BenchError::Size(format!("--context {context} is less than --rows {rows}")));
            }
        }
        Ok(())
    }

    /// Elements of a cache for `context` tokens.
    fn cache_len(&self, context: u32) -> usize {
        context.div_ceil(PAGE_TOKENS) as usize * kv::page_elements(self.kv_heads)
    }
}

/// Measures every context with every number of rows.
///
/// # Errors
/// If the kernels cannot take the sizes, there is too little memory, the device fails, or a result is wrong.
pub fn run(bench: &mut Bench<'_>, sizes: &AttentionSizes) -> Result<(), BenchError> {
    sizes.check()?;
    let timed = bench.is_timed();
    let sets = |context: u32| {
        if timed { (ROTATED_BYTES / (2 * sizes.cache_len(context))).clamp(2, MOST_SETS) } else { 1 }
    };
    let elements = sizes.contexts.iter().map(|&c| sets(c) * sizes.cache_len(c)).max().unwrap_or(0);
    bench.room_for(2 * elements as u64, "--context")?;
    let pool = Pool::new(bench.device(), elements)?;
    for &context in &sizes.contexts {
        for &rows in &sizes.rows {
            heads(bench, &pool, sizes, context, rows, sets(context))?;
        }
    }
    Ok(())
}

fn heads(
    bench: &mut Bench<'_>,
    pool: &Pool,
    sizes: &AttentionSizes,
    context: u32,
    rows: u32,
    sets: usize,
) -> Result<(), BenchError> {
    let device = bench.device();
    let AttentionSizes { q_heads, kv_heads, .. } = *sizes;
    let dim = HEAD_DIM as usize;
    let pairs = (rows * q_heads) as usize;
    let splits = context.div_ceil(SPLIT);
    let queries = random(pairs * dim, 11);
    let q = device.upload(&queries)?;
    let table: Vec<u32> = (0..context.div_ceil(PAGE_TOKENS)).collect();
    let tables = device.upload(&table)?;
    let sums = device.zeroed::<f32>(pairs * splits as usize * dim)?;
    let scales = device.zeroed::<f32>(pairs * splits as usize * 2)?;
    let out = device.zeroed::<bf16>(pairs * dim)?;
    let list = RowList::ending_at(device, rows, context)?;
    let scale = 1.0 / (HEAD_DIM as f32).sqrt();
    let launch = |set: usize| {
        let cache = Cache {
            // SAFETY: within the pool: it holds as many sets.
            pages: unsafe { pool.buffer().ptr_mut().at(set * sizes.cache_len(context)) },
            tables: tables.ptr(),
            table_stride: tables.len() as u32,
            kv_heads,
        };
        let attend = Attend {
            rows: list.rows(),
            q: q.ptr(),
            cache,
            sums: sums.ptr_mut(),
            scales: scales.ptr_mut(),
            out: out.ptr_mut(),
            splits,
            q_heads,
            scale,
        };
        let grid = (kv_heads, splits, Attend::tiles(rows, q_heads / kv_heads));
        // SAFETY: buffers as large as the parameter blocks say; every position has a page.
        unsafe {
            device.launch::<attention::attend>(grid, Attend::SHARED_BYTES, attend)?;
            if splits > 1 {
                device.launch::<attention::combine>((q_heads, rows), Attend::COMBINE_SHARED_BYTES, attend)?;
            }
        }
        Ok(())
    };
    let kv_bytes = u64::from(context) * u64::from(kv_heads) * u64::from(HEAD_DIM) * 2 * 2;
    let case = Case {
        label: Label {
            bench: "attention",
            name: format!("{q_heads} query, {kv_heads} kv heads, {rows} row{}", if rows == 1 { "" } else { "s" }),
            size: format!("context {context}"),
        },
        unit: Unit::GigabytesPerSecond,
        work: Work {
            bytes: kv_bytes,
            operations: 4 * u64::from(rows * q_heads) * u64::from(context) * u64::from(HEAD_DIM),
        },
        path: Path::Read,
        sets,
    };
    let check = || {
        let mut head = vec![bf16::ZERO; dim];
        for pair in spread_over(pairs, PROBES) {
            out.read(pair * dim, &mut head)?;
            let (row, q_head) = (pair as u32 / q_heads, pair as u32 % q_heads);
            let keys = context - rows + row + 1;
            let expected = plain(
                pool,
                &queries[pair * dim..][..dim],
                keys,
                q_head / (q_heads / kv_heads),
                kv_heads,
                f64::from(scale),
            );
            let found: Vec<f32> = head.iter().map(|v| v.to_f32()).collect();
            // Weights and results are rounded to bf16.
            if let Some(what) = compare(&found, &expected, 2e-2) {
                return Ok(Some(format!("row {row}, head {q_head}: {what}")));
            }
        }
        Ok(None)
    };
    bench.case(case, launch, check)?;
    Ok(())
}

/// Attention of one query over the first `keys` positions of the cache at the pool's start, computed directly.
fn plain(pool: &Pool, query: &[bf16], keys: u32, kv_head: u32, kv_heads: u32, scale: f64) -> Vec<f64> {
    let (dim, page) = (HEAD_DIM as usize, PAGE_TOKENS as usize);
    // Where this head's key of a position is in the pool. The value is further on, by a page's keys.
    let row = |at: usize| ((at / page * kv_heads as usize + kv_head as usize) * 2 * page + at % page) * dim;
    let of_row = |row: usize, at: usize, d: usize| pool.at(row + place(at as u32, d as u32) as usize);
    let scores: Vec<f64> = (0..keys as usize)
        .map(|at| (0..dim).map(|d| query[d].to_f64() * of_row(row(at), at, d)).sum::<f64>() * scale)
        .collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
    let norm: f64 = weights.iter().sum();
    (0..dim)
        .map(|d| {
            let value = |at: usize| of_row(row(at) + page * dim, at, d);
            weights.iter().enumerate().map(|(at, weight)| weight * value(at)).sum::<f64>() / norm
        })
        .collect()
}
