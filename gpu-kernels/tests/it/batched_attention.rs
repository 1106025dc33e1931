//! Attention of many sequences at once, from the projection on: for each row the same bits as from `split_heads`,
//! `attend` and `combine`, over pages as they are and over packed ones.

use crate::common::{Random, RowBuffers, run, run_batched};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::attention::{self, Attend, AttendTiles, SPLIT};
use gpu_kernels::batched::{self, BatchedStep, Phase, PhaseKind};
use gpu_kernels::kv::{self, Cache, HEAD_DIM, PAGE_TOKENS};
use gpu_kernels::linear::slot;
use gpu_kernels::packed::{self, PackPages};
use gpu_kernels::qkv::{self, SplitHeads};
use gpu_kernels::workspace::Workspace;
use proptest::prelude::*;

const D: usize = HEAD_DIM as usize;
const EPS: f32 = 1e-6;

/// Sequences, each with a number of positions before its rows and a number of rows.
struct Case {
    q_heads: usize,
    kv_heads: usize,
    sequences: Vec<(usize, usize)>,
}

impl Case {
    fn check(&self, grid: u32, seed: u64) {
        let &Self { q_heads, kv_heads, ref sequences } = self;
        let mut random = Random::new(seed);
        let longest = sequences.iter().map(|(start, rows)| start + rows).max().unwrap_or(1);
        let stride = longest.div_ceil(PAGE_TOKENS as usize);
        // Every sequence has pages of its own, from one pool in a scrambled order.
        let count = stride * sequences.len();
        let mut tables: Vec<u32> = (0..count as u32).collect();
        for i in 0..count {
            tables.swap(i, random.below(count));
        }
        // The pages of two layers.
        let mut pages = [(); 2].map(|()| random.bf16s(count * kv::page_elements(kv_heads as u32)));
        // Some of the full pages, to which nobody writes, are packed. Some of these have a key or a value that is too
        // small for packing.
        let full = |(number, &(start, _)): (usize, &(usize, usize))| {
            (0..start / PAGE_TOKENS as usize).map(move |index| number * stride + index)
        };
        let full: Vec<u32> = sequences.iter().enumerate().flat_map(full).map(|entry| tables[entry]).collect();
        let listed: Vec<u32> = full.into_iter().filter(|_| random.below(4) > 0).collect();
        for &page in listed.iter().filter(|page| **page % 5 == 0) {
            let len = kv::page_elements(kv_heads as u32);
            pages[page as usize % 2][page as usize * len + random.below(len)] = bf16::from_f32(1e-30);
        }
        let tables = Buffer::from_slice(&tables);
        let group = q_heads / kv_heads;
        let tile_rows = Attend::tile_rows(group as u32) as usize;
        let (mut rows, mut tiles) = (Vec::new(), Vec::new());
        for (number, &(start, count)) in sequences.iter().enumerate() {
            for first in (0..count).step_by(tile_rows) {
                tiles.push([(rows.len() + first) as u32, tile_rows.min(count - first) as u32]);
            }
            rows.extend((start..start + count).map(|position| (0, position as u32, number as u32)));
        }
        let splits = (longest as u32).div_ceil(SPLIT);
        let all = RowBuffers::new(&rows);
        let qkv = Buffer::from_slice(&random.floats(rows.len() * (q_heads + 2 * kv_heads) * D));
        let [q_norm, k_norm] = [(); 2].map(|()| Buffer::from_slice(&random.bf16s(D)));
        let [cos, sin] = [(); 2].map(|()| Buffer::from_slice(&random.floats(longest * D / 2)));
        let cache = |pages: &Buffer<bf16>| Cache {
            pages: pages.ptr_mut(),
            tables: tables.ptr(),
            table_stride: stride as u32,
            kv_heads: kv_heads as u32,
        };
        let q = Buffer::<bf16>::new_poisoned(rows.len() * q_heads * D);
        let [want_first, want_second] = pages.each_ref().map(|pages| {
            let pages = Buffer::from_slice(pages);
            let params = SplitHeads {
                rows: all.rows(),
                qkv: qkv.ptr(),
                q_norm: q_norm.ptr(),
                k_norm: k_norm.ptr(),
                cos: cos.ptr(),
                sin: sin.ptr(),
                q: q.ptr_mut(),
                cache: cache(&pages),
                q_heads: q_heads as u32,
                eps: EPS,
                head_norm: 1,
            };
            let blocks = params.heads().div_ceil(qkv::HEADS_PER_BLOCK);
            run::<qkv::split_heads>([blocks, rows.len() as u32, 1], 0, seed, params);
            pages
        });
        let attend = |rows: &RowBuffers, q: &Buffer<bf16>, memory: &(Buffer<f32>, Buffer<f32>, Buffer<bf16>)| Attend {
            rows: rows.rows(),
            q: q.ptr(),
            cache: cache(&want_second),
            sums: memory.0.ptr_mut(),
            scales: memory.1.ptr_mut(),
            out: memory.2.ptr_mut(),
            splits,
            q_heads: q_heads as u32,
            scale: 1.0 / (D as f32).sqrt(),
        };
        let memory_of = |rows: usize| {
            let partial = rows * q_heads * splits as usize;
            let out = Buffer::<bf16>::new_poisoned(rows * q_heads * D);
            (Buffer::<f32>::new_poisoned(partial * D), Buffer::<f32>::new_poisoned(partial * 2), out)
        };

        let all_queries = q.to_vec();
        let mut want = Vec::new();
        let mut first = 0;
        for &(_, count) in sequences {
            let own = RowBuffers::new(&rows[first..first + count]);
            let queries = Buffer::from_slice(&all_queries[first * q_heads * D..][..count * q_heads * D]);
            let memory = memory_of(count);
            let params = attend(&own, &queries, &memory);
            let tiles = Attend::tiles(count as u32, group as u32);
            run::<attention::attend>([kv_heads as u32, splits, tiles], Attend::SHARED_BYTES, seed, params);
            let grid = [q_heads as u32, count as u32, 1];
            run::<attention::combine>(grid, Attend::COMBINE_SHARED_BYTES, seed, params);
            want.extend(memory.2.to_vec());
            first += count;
        }

        let words = Buffer::from_slice(&tiles.concat());
        // The kernel for other devices must give the same.
        let portable = memory_of(rows.len());
        let tiled = AttendTiles { attend: attend(&all, &q, &portable), tiles: words.ptr() };
        let blocks = [kv_heads as u32, splits, tiles.len() as u32];
        run::<attention::attend_tiles>(blocks, Attend::SHARED_BYTES, seed, tiled);
        let heads = [q_heads as u32, rows.len() as u32, 1];
        run::<attention::combine>(heads, Attend::COMBINE_SHARED_BYTES, seed, tiled.attend);
        assert!(want == portable.2.to_vec(), "{q_heads} and {kv_heads} heads, {sequences:?}, in tiles");
        // Attention in whole steps and, where that is possible, in launches of its own.
        let is_alone = group <= BatchedStep::ATTEND_PAIRS as usize && sequences.iter().all(|&(_, rows)| rows == 1);
        let alone = is_alone.then_some(None);
        for tile_rows in [Some(64), Some(96), Some(128)].into_iter().chain(alone) {
            let memory = memory_of(rows.len());
            let arrivals = Buffer::from_slice(&vec![0; BatchedStep::arrivals_len(grid, q_heads as u32)]);
            let items = Buffer::<u32>::new_poisoned(BatchedStep::items_len(tiles.len(), kv_heads, splits as usize));
            // The layers lie one behind the other.
            let (cache, len) = (Buffer::from_slice(&pages.concat()), pages[0].len());
            let (list, forms) = (Buffer::from_slice(&listed), Buffer::<u32>::new_poisoned(2 * count * kv_heads));
            let pack = PackPages {
                list: list.ptr(),
                pages: cache.ptr_mut(),
                forms: forms.ptr_mut(),
                page_count: count as u32,
            };
            let blocks = [kv_heads as u32, 2, listed.len() as u32];
            if !listed.is_empty() {
                run::<packed::pack_pages>(blocks, PackPages::SHARED_BYTES, seed, pack);
            }
            let is_packed: Vec<u32> = (0..count as u32).map(|page| listed.contains(&page).into()).collect();
            let is_packed = Buffer::from_slice(&is_packed);
            let layer = |number: usize| Phase {
                // SAFETY: within the buffer.
                pages: unsafe { cache.ptr_mut().cast().at(number * len) },
                // SAFETY: within the buffer.
                forms: unsafe { forms.ptr().at(number * count * kv_heads) },
                norm: q_norm.ptr(),
                key_norm: k_norm.ptr(),
                ..Phase::new(PhaseKind::Attend)
            };
            let phases = [0, 1].map(layer);
            let phases = Buffer::from_slice(Phase::words(&phases));
            let work = Workspace {
                rows: all.rows(),
                cos: cos.ptr(),
                sin: sin.ptr(),
                tables: tables.ptr(),
                qkv: qkv.ptr_mut(),
                sums: memory.0.ptr_mut(),
                scales: memory.1.ptr_mut(),
                attended: memory.2.ptr_mut(),
                q_heads: q_heads as u32,
                kv_heads: kv_heads as u32,
                table_stride: stride as u32,
                splits,
                eps: EPS,
                head_norm: 1,
                ..Workspace::default()
            };
            let params = BatchedStep {
                work,
                phases: phases.ptr().cast(),
                phase_count: 2,
                tiles: words.ptr(),
                packed: is_packed.ptr(),
                items: items.ptr_mut(),
                arrivals: arrivals.ptr_mut(),
                tile_count: tiles.len() as u32,
                ..BatchedStep::default()
            };
            if let Some(tile_rows) = tile_rows {
                run_batched(tile_rows, grid, seed, params);
            } else {
                let assignments = Buffer::<u32>::new_poisoned(4 * (BatchedStep::ATTEND_WARPS * grid) as usize);
                for layer in 0..2 {
                    // SAFETY: one of the two phases.
                    let phases = unsafe { params.phases.at(layer) };
                    let (assignments, is_scheduled) = (assignments.ptr_mut(), layer as u32);
                    let params = BatchedStep { phases, phase_count: 1, assignments, is_scheduled, ..params };
                    run::<batched::attend_batch>([grid, 1, 1], BatchedStep::ATTEND_SHARED_BYTES, seed, params);
                }
            }
            if !listed.is_empty() {
                run::<packed::unpack_pages>(blocks, PackPages::SHARED_BYTES, seed, pack);
            }
            for (got, want) in cache.to_vec().chunks(len).zip([&want_first, &want_second]) {
                assert!(got == want.to_vec(), "keys and values of {sequences:?}, {grid} blocks");
            }
            assert!(arrivals.to_vec().iter().all(|&left| left == 0));
            let got = memory.2.to_vec();
            let got: Vec<bf16> = (0..got.len()).map(|i| got[i / D * D + slot((i % D) as u32) as usize]).collect();
            assert!(want == got, "{q_heads} and {kv_heads} heads, {sequences:?}, {grid} blocks");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn bits_of_attend(
        sequences in prop::collection::vec((0usize..600, 1usize..7), 1..5),
        heads in prop::sample::select(vec![(4, 2), (2, 2), (8, 1), (5, 1)]),
        pairs in 1u32..4,
        seed: u64,
    ) {
        Case { q_heads: heads.0, kv_heads: heads.1, sequences }.check(2 * pairs, seed);
    }
}

/// More items for a block than a warp has lanes.
#[test]
fn many_items_for_a_block() {
    let sequences = (0..60).map(|i| (i * 7, 1 + i % 3)).collect();
    Case { q_heads: 4, kv_heads: 2, sequences }.check(2, 5);
}

/// With one row for each sequence, attention may have launches of its own.
#[test]
fn each_sequence_has_one_row() {
    let contexts = [[0, 1, 30, 31, 32, 63, 64, 65, 100], [700, 255, 256, 257, 511, 512, 513, 40, 320]];
    for (seed, contexts) in (7..).zip(contexts) {
        for (q_heads, kv_heads) in [(4, 1), (4, 2), (2, 2), (5, 1), (8, 1)] {
            let sequences = contexts.map(|start| (start, 1)).to_vec();
            Case { q_heads, kv_heads, sequences }.check(2 + q_heads as u32 % 2 * 2, seed);
        }
    }
}

/// One context has more splits than a warp that combines takes at a time.
#[test]
fn a_long_context_beside_short_ones() {
    Case { q_heads: 2, kv_heads: 1, sequences: vec![(2400, 1), (3, 2), (700, 1)] }.check(4, 9);
}

/// Sequences that end at, before and after the border of a split, of a page and of a warp's keys; their rows lie on
/// both sides of it.
#[test]
fn contexts_on_borders() {
    let ends = [1, 32, 33, 64, 65, 256, 257, 512, 513, 1024, 1025];
    let sequences =
        ends.into_iter().flat_map(|end| (1..4).filter(move |&rows| rows <= end).map(move |rows| (end - rows, rows)));
    Case { q_heads: 8, kv_heads: 2, sequences: sequences.collect() }.check(4, 3);
}

/// From one cluster for everything to more blocks than there are pages: one block has a tile's head, or two share it,
/// or many.
#[test]
fn heads_are_cut_between_blocks() {
    for grid in [2, 6, 24] {
        let sequences = vec![(1039, 1), (2300, 2), (4, 1), (254, 4)];
        Case { q_heads: 4, kv_heads: 2, sequences }.check(grid, grid.into());
        Case { q_heads: 2, kv_heads: 1, sequences: vec![(600, 1), (4, 2)] }.check(grid, grid.into());
    }
}

/// The sums of the splits fit beside the queries in both kernels, in one of them, and in neither.
#[test]
fn more_splits_than_fit() {
    for (start, rows) in [(255, 1), (1000, 1), (1900, 1), (600, 4), (1400, 4), (1900, 7)] {
        Case { q_heads: 8, kv_heads: 2, sequences: vec![(start, rows); 3] }.check(2, 11);
    }
}

/// More rows of a sequence than a warp has lanes, in tiles that begin in one split and end in another.
#[test]
fn many_rows_of_a_sequence() {
    Case { q_heads: 2, kv_heads: 1, sequences: vec![(230, 70), (9, 1)] }.check(4, 2);
}
