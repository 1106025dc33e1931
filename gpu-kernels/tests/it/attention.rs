//! Attention against softmax written out; and the bits of a row do not depend on the rows beside it.

use crate::common::{CodeBuffers, Random, RowBuffers, relative_error, reordered, run, widen};
use cuda_std::bf16;
use cuda_std::emulator::{self, Buffer, Launch, MissingWait};
use cuda_std::tensor::{Matrix, TensorMap};
use gpu_kernels::attention::{self, Attend, SPLIT};
use gpu_kernels::kv::{self, Cache, HEAD_DIM, PAGE_TOKENS, place};
use gpu_kernels::prefill_attention::{self, PrefillAttention};
use proptest::prelude::*;

const D: usize = HEAD_DIM as usize;

struct Case {
    q_heads: usize,
    kv_heads: usize,
    /// `[positions, kv_heads, 128]`.
    keys: Vec<bf16>,
    values: Vec<bf16>,
    pages: Vec<bf16>,
    table: Vec<u32>,
}

impl Case {
    fn new(q_heads: usize, kv_heads: usize, length: usize, random: &mut Random) -> Self {
        let keys = random.bf16s(length * kv_heads * D);
        let values = random.bf16s(length * kv_heads * D);
        let count = length.div_ceil(PAGE_TOKENS as usize).div_ceil(4) * 4;
        // Pages in a scrambled order, filled as the layout's documentation says.
        let mut table: Vec<u32> = (0..count as u32).collect();
        for i in 0..count {
            table.swap(i, random.below(count));
        }
        let page = kv::page_elements(kv_heads as u32);
        let block = PAGE_TOKENS as usize * D;
        let mut pages = vec![bf16::ZERO; count * page];
        for position in 0..length {
            let (p, t) = (table[position / PAGE_TOKENS as usize] as usize, position % PAGE_TOKENS as usize);
            for head in 0..kv_heads {
                for d in 0..D {
                    let from = (position * kv_heads + head) * D + d;
                    let to = p * page + head * 2 * block;
                    let at = to + t * D + place(t as u32, d as u32) as usize;
                    pages[at] = keys[from];
                    pages[at + block] = values[from];
                }
            }
        }
        Self { q_heads, kv_heads, keys, values, pages, table }
    }

    /// `[rows, q_heads, 128]` by the definition of attention, in f64.
    fn reference(&self, q: &[bf16], start: usize, rows: usize) -> Vec<f32> {
        let group = self.q_heads / self.kv_heads;
        let mut out = Vec::new();
        for r in 0..rows {
            for h in 0..self.q_heads {
                let query = &q[(r * self.q_heads + h) * D..][..D];
                let at = |p: usize| (p * self.kv_heads + h / group) * D;
                let scores: Vec<f64> = (0..=start + r)
                    .map(|p| {
                        let key = &self.keys[at(p)..][..D];
                        query.iter().zip(key).map(|(a, b)| a.to_f64() * b.to_f64()).sum::<f64>() / (D as f64).sqrt()
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                out.extend((0..D).map(|d| {
                    let sum: f64 =
                        scores.iter().enumerate().map(|(p, s)| (s - top).exp() * self.values[at(p) + d].to_f64()).sum();
                    (sum / total) as f32
                }));
            }
        }
        out
    }

    fn attend(&self, q: &[bf16], start: usize, rows: usize, seed: u64) -> Vec<bf16> {
        let row_buffers = RowBuffers::sequence(start as u32, rows as u32);
        let length = (start + rows) as u32;
        // Room for more splits than there are, as when steps are enqueued ahead.
        let splits = length.div_ceil(SPLIT) + 1;
        let q = Buffer::from_slice(q);
        let pages = Buffer::from_slice(&self.pages);
        let table = Buffer::from_slice(&self.table);
        let sums = Buffer::<f32>::new_poisoned(rows * self.q_heads * splits as usize * D);
        let scales = Buffer::<f32>::new_poisoned(rows * self.q_heads * splits as usize * 2);
        let out = Buffer::<bf16>::new_poisoned(rows * self.q_heads * D);
        let cache = Cache {
            pages: pages.ptr_mut(),
            tables: table.ptr(),
            table_stride: self.table.len() as u32,
            kv_heads: self.kv_heads as u32,
        };
        let attend = Attend {
            rows: row_buffers.rows(),
            q: q.ptr(),
            cache,
            sums: sums.ptr_mut(),
            scales: scales.ptr_mut(),
            out: out.ptr_mut(),
            splits,
            q_heads: self.q_heads as u32,
            scale: 1.0 / (D as f32).sqrt(),
        };
        let tiles = Attend::tiles(rows as u32, (self.q_heads / self.kv_heads) as u32);
        run::<attention::attend>([self.kv_heads as u32, splits, tiles], Attend::SHARED_BYTES, seed, attend);
        run::<attention::combine>([self.q_heads as u32, rows as u32, 1], Attend::COMBINE_SHARED_BYTES, seed, attend);
        out.to_vec()
    }

    /// Runs the kernel for prompts over rows that are cut into tiles of these heights.
    fn prefill(&self, q: &[bf16], start: usize, heights: &[usize], seed: u64) -> Vec<bf16> {
        self.prefill_by(q, start, heights, |grid, out, params| self.run_prefill(heights, seed, grid, out, params))
    }

    /// Makes what the kernel for prompts reads and writes, and calls `launch` with it.
    fn prefill_by<R>(
        &self,
        q: &[bf16],
        start: usize,
        heights: &[usize],
        launch: impl FnOnce([u32; 3], &Buffer<bf16>, PrefillAttention) -> R,
    ) -> R {
        let rows: usize = heights.iter().sum();
        let mut tiles = Vec::new();
        let mut row = 0;
        for height in heights {
            let height = *height as u32;
            tiles.extend(prefill_attention::tiles(row, height, 0, start as u32 + row, height));
            row += height;
        }
        let q_buffer = Buffer::from_slice(q);
        let pages = Buffer::from_slice(&self.pages);
        let table = Buffer::from_slice(&self.table);
        let out = Buffer::<bf16>::new_poisoned(rows * self.q_heads * D);
        let words = Buffer::from_slice(&tiles.concat());
        let map = |matrix: Matrix| Buffer::from_slice(&[TensorMap::emulated(&matrix)]);
        let q_map = map(Matrix::dense(q_buffer.ptr().addr(), rows as u64, (self.q_heads * D) as u64, 64));
        let page_map = map(prefill_attention::pages(pages.ptr().addr(), self.pages.len()));
        let params = PrefillAttention {
            tiles: words.ptr(),
            q: q_map.ptr(),
            pages: page_map.ptr(),
            cache: Cache {
                pages: pages.ptr_mut(),
                tables: table.ptr(),
                table_stride: self.table.len() as u32,
                kv_heads: self.kv_heads as u32,
            },
            out: out.ptr_mut(),
            codes: Default::default(),
            q_heads: self.q_heads as u32,
            scale: 1.0 / (D as f32).sqrt(),
        };
        launch([self.q_heads as u32, tiles.len() as u32, 1], &out, params)
    }

    /// Launches the kernel for prompts by single blocks, by pairs of blocks, and with codes as outputs.
    fn run_prefill(
        &self,
        heights: &[usize],
        seed: u64,
        grid: [u32; 3],
        out: &Buffer<bf16>,
        params: PrefillAttention,
    ) -> Vec<bf16> {
        let rows: usize = heights.iter().sum();
        run::<prefill_attention::prefill_attention>(grid, prefill_attention::SHARED_BYTES, seed, params);
        if (self.q_heads / self.kv_heads).is_multiple_of(2) {
            let paired = Buffer::<bf16>::new_poisoned(rows * self.q_heads * D);
            let params = PrefillAttention { out: paired.ptr_mut(), ..params };
            run::<prefill_attention::prefill_attention_2x1>(grid, prefill_attention::SHARED_BYTES, seed, params);
            assert!(paired.to_vec() == out.to_vec(), "in pairs");
        }
        // With codes as outputs: they are those that a separate launch makes of the rows.
        let [found, apart] = [0; 2].map(|_| CodeBuffers::new(rows, self.q_heads * D, 0.0));
        let params = PrefillAttention { out: Default::default(), codes: found.rows(), ..params };
        run::<prefill_attention::prefill_attention>(grid, prefill_attention::SHARED_BYTES, seed, params);
        apart.quantize(out.ptr(), 0..rows, false);
        assert!(found.codes.to_vec() == apart.codes.to_vec(), "codes");
        assert_eq!(found.scales.to_vec(), apart.scales.to_vec());
        out.to_vec()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]

    #[test]
    fn prompts_equal_softmax_written_out(
        group in prop::sample::select(vec![1usize, 2, 4]),
        start in prop::sample::select(vec![0usize, 1, 63, 64, 128, 190, 300]),
        heights in prop::collection::vec(1usize..=128, 1..3),
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let rows: usize = heights.iter().sum();
        let case = Case::new(group, 1, start + rows, &mut random);
        let q: Vec<bf16> = random.floats(rows * case.q_heads * D).into_iter().map(|v| bf16::from_f32(v * 3.0)).collect();
        let got = case.prefill(&q, start, &heights, seed);
        let got = reordered(&got, D, true);
        prop_assert!(relative_error(widen(&got), &case.reference(&q, start, rows)) < 1.0 / 128.0);
    }

    #[test]
    fn a_row_of_a_prompt_is_the_same_bits_in_any_tile(start in 0usize..300, rows in 2usize..128, seed: u64) {
        let mut random = Random::new(seed);
        let case = Case::new(2, 2, start + rows, &mut random);
        let q = random.bf16s(rows * 2 * D);
        let all = case.prefill(&q, start, &[rows], seed);
        let cut = 1 + random.below(rows - 1);
        prop_assert_eq!(&case.prefill(&q, start, &[cut, rows - cut], seed ^ 1), &all);
        // The last rows as a chunk of their own.
        let last = case.prefill(&q[cut * 2 * D..], start + cut, &[rows - cut], seed ^ 2);
        prop_assert_eq!(&last[..], &all[cut * 2 * D..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10))]

    #[test]
    fn equals_softmax_written_out(
        group in prop::sample::select(vec![1usize, 2, 4, 5, 8, 16]),
        kv_heads in 1usize..3,
        start in prop::sample::select(vec![0usize, 1, 31, 32, 63, 64, 255, 256, 257, 300, 511, 600]),
        rows in 1usize..18,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let case = Case::new(group * kv_heads, kv_heads, start + rows, &mut random);
        let q: Vec<bf16> = random.floats(rows * case.q_heads * D).into_iter().map(|v| bf16::from_f32(v * 3.0)).collect();
        let got = case.attend(&q, start, rows, seed);
        // Weights and results are rounded to bf16.
        prop_assert!(relative_error(widen(&got), &case.reference(&q, start, rows)) < 1.0 / 128.0);
    }

    #[test]
    fn a_row_is_the_same_bits_in_any_company(start in 0usize..300, rows in 2usize..16, seed: u64) {
        let mut random = Random::new(seed);
        let case = Case::new(4, 2, start + rows, &mut random);
        let q = random.bf16s(rows * 4 * D);
        let all = case.attend(&q, start, rows, seed);
        let pick = random.below(rows);
        let one = case.attend(&q[pick * 4 * D..][..4 * D], start + pick, 1, seed ^ 1);
        prop_assert_eq!(&one[..], &all[pick * 4 * D..][..4 * D]);
    }
}

/// Leaves out each wait of the kernel for prompts in turn. Keys and values that are used before they are there must be
/// found, and stages that are overwritten while they are read.
#[test]
fn a_missing_wait_is_found() {
    let mut random = Random::new(1);
    let case = Case::new(1, 1, 1000, &mut random);
    let q = random.bf16s(100 * D);
    // Not every order of the lanes shows each of them.
    let run = |missing| {
        case.prefill_by(&q, 900, &[100], |grid, _, params| {
            let (threads, shared_bytes) = (prefill_attention::THREADS, prefill_attention::SHARED_BYTES);
            let launch = Launch { grid, threads, shared_bytes, missing: Some(missing), ..Launch::default() };
            let run = |seed| {
                let launch = Launch { seed, ..launch };
                emulator::launch::<prefill_attention::prefill_attention>(&launch, params).map(|report| report.left_out)
            };
            (0..4).map(run).try_fold(false, |before, one| one.map(|is_left_out| before | is_left_out))
        })
    };
    for missing in [MissingWait::Phase as fn(u64) -> MissingWait, MissingWait::Mmas] {
        let waits = emulator::leave_out_each((0..99).map(missing), run);
        assert!((12..99).contains(&waits.found) && waits.unfound.is_empty(), "{waits:?}");
    }
}

/// A tile whose rows end in different splits. The first split finishes the earlier rows, and the second leaves them
/// alone.
#[test]
fn rows_of_a_tile_may_end_in_different_splits() {
    let mut random = Random::new(4);
    let (start, rows) = (SPLIT as usize - 6, 13);
    let case = Case::new(4, 2, start + rows, &mut random);
    let q = random.bf16s(rows * 4 * D);
    let got = case.attend(&q, start, rows, 9);
    assert!(relative_error(widen(&got), &case.reference(&q, start, rows)) < 1.0 / 128.0);
}
