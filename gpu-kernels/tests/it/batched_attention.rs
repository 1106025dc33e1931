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
    fn check(self, grid: u32, seed: u64) {
        let group = self.q_heads / self.kv_heads;
        let has_one_row_each = self.sequences.iter().all(|&(_, rows)| rows == 1);
        let set_up = SetUp::new(self, seed);
        let written = [0, 1].map(|layer| set_up.split_heads(layer));
        let want = set_up.attend(&written[1]);
        assert!(want == set_up.attend_in_tiles(&written[1]), "{:?}, in tiles", set_up.case.sequences);
        for tile_rows in [64, 96, 128] {
            set_up.check_layers(&written, &want, |params| run_batched(tile_rows, grid, seed, params), grid);
        }
        if group <= BatchedStep::ATTEND_PAIRS as usize && has_one_row_each {
            set_up.check_layers(&written, &want, |params| launch_each(grid, seed, params), grid);
        }
    }
}

/// Attention of each layer in a launch of its own.
fn launch_each(grid: u32, seed: u64, params: BatchedStep) {
    let assignments = Buffer::<u32>::new_poisoned(4 * (BatchedStep::ATTEND_WARPS * grid) as usize);
    for layer in 0..2 {
        // SAFETY: one of the two phases.
        let phases = unsafe { params.phases.at(layer) };
        let (assignments, is_scheduled) = (assignments.ptr_mut(), layer as u32);
        let params = BatchedStep { phases, phase_count: 1, assignments, is_scheduled, ..params };
        run::<batched::attend_batch>([grid, 1, 1], BatchedStep::ATTEND_SHARED_BYTES, seed, params);
    }
}

/// What attention works in and what it gives.
struct Memory {
    sums: Buffer<f32>,
    scales: Buffer<f32>,
    out: Buffer<bf16>,
}

/// A case's inputs: a projection, and a cache of two layers that holds what is before the rows.
struct SetUp {
    case: Case,
    seed: u64,
    stride: usize,
    splits: u32,
    tables: Buffer<u32>,
    /// Of each layer.
    pages: [Vec<bf16>; 2],
    /// The pages that are packed.
    listed: Vec<u32>,
    row_list: Vec<(u32, u32, u32)>,
    rows: RowBuffers,
    tiles: Vec<[u32; 2]>,
    qkv: Buffer<f32>,
    norms: [Buffer<bf16>; 2],
    /// Cosines and sines.
    angles: [Buffer<f32>; 2],
}

impl SetUp {
    fn new(case: Case, seed: u64) -> Self {
        let Case { q_heads, kv_heads, ref sequences } = case;
        let mut random = Random::new(seed);
        let longest = sequences.iter().map(|(start, rows)| start + rows).max().unwrap_or(1);
        let stride = longest.div_ceil(PAGE_TOKENS as usize);
        // Every sequence has pages of its own, from one pool in a scrambled order.
        let count = stride * sequences.len();
        let mut tables: Vec<u32> = (0..count as u32).collect();
        for i in 0..count {
            tables.swap(i, random.below(count));
        }
        let page_len = kv::page_elements(kv_heads as u32);
        let mut pages = [(); 2].map(|()| random.bf16s(count * page_len));
        // Some of the full pages, to which nobody writes, are packed. Some of these have a key or a value that is too
        // small for packing.
        let full = |(number, &(start, _)): (usize, &(usize, usize))| {
            (0..start / PAGE_TOKENS as usize).map(move |index| number * stride + index)
        };
        let full: Vec<u32> = sequences.iter().enumerate().flat_map(full).map(|entry| tables[entry]).collect();
        let listed: Vec<u32> = full.into_iter().filter(|_| random.below(4) > 0).collect();
        for &page in listed.iter().filter(|page| **page % 5 == 0) {
            pages[page as usize % 2][page as usize * page_len + random.below(page_len)] = bf16::from_f32(1e-30);
        }
        let tile_rows = Attend::tile_rows((q_heads / kv_heads) as u32) as usize;
        let (mut row_list, mut tiles) = (Vec::new(), Vec::new());
        for (number, &(start, count)) in sequences.iter().enumerate() {
            for first in (0..count).step_by(tile_rows) {
                tiles.push([(row_list.len() + first) as u32, tile_rows.min(count - first) as u32]);
            }
            row_list.extend((start..start + count).map(|position| (0, position as u32, number as u32)));
        }
        Self {
            seed,
            stride,
            splits: (longest as u32).div_ceil(SPLIT),
            tables: Buffer::from_slice(&tables),
            pages,
            listed,
            rows: RowBuffers::new(&row_list),
            tiles,
            qkv: Buffer::from_slice(&random.floats(row_list.len() * (q_heads + 2 * kv_heads) * D)),
            row_list,
            norms: [(); 2].map(|()| Buffer::from_slice(&random.bf16s(D))),
            angles: [(); 2].map(|()| Buffer::from_slice(&random.floats(longest * D / 2))),
            case,
        }
    }

    fn cache(&self, pages: &Buffer<bf16>) -> Cache {
        Cache {
            pages: pages.ptr_mut(),
            tables: self.tables.ptr(),
            table_stride: self.stride as u32,
            kv_heads: self.case.kv_heads as u32,
        }
    }

    fn memory(&self, rows: usize) -> Memory {
        let partials = rows * self.case.q_heads * self.splits as usize;
        Memory {
            sums: Buffer::new_poisoned(partials * D),
            scales: Buffer::new_poisoned(partials * 2),
            out: Buffer::new_poisoned(rows * self.case.q_heads * D),
        }
    }

    /// A layer's queries and pages after `split_heads`.
    fn split_heads(&self, layer: usize) -> (Buffer<bf16>, Buffer<bf16>) {
        let q_heads = self.case.q_heads;
        let q = Buffer::new_poisoned(self.row_list.len() * q_heads * D);
        let pages = Buffer::from_slice(&self.pages[layer]);
        let params = SplitHeads {
            rows: self.rows.rows(),
            qkv: self.qkv.ptr(),
            q_norm: self.norms[0].ptr(),
            k_norm: self.norms[1].ptr(),
            cos: self.angles[0].ptr(),
            sin: self.angles[1].ptr(),
            q: q.ptr_mut(),
            cache: self.cache(&pages),
            q_heads: q_heads as u32,
            eps: EPS,
            head_norm: 1,
        };
        let blocks = params.heads().div_ceil(qkv::HEADS_PER_BLOCK);
        run::<qkv::split_heads>([blocks, self.row_list.len() as u32, 1], 0, self.seed, params);
        (q, pages)
    }

    fn attend_params(&self, rows: &RowBuffers, q: &Buffer<bf16>, pages: &Buffer<bf16>, memory: &Memory) -> Attend {
        Attend {
            rows: rows.rows(),
            q: q.ptr(),
            cache: self.cache(pages),
            sums: memory.sums.ptr_mut(),
            scales: memory.scales.ptr_mut(),
            out: memory.out.ptr_mut(),
            splits: self.splits,
            q_heads: self.case.q_heads as u32,
            scale: 1.0 / (D as f32).sqrt(),
        }
    }

    /// Attention of one sequence after another.
    fn attend(&self, (q, pages): &(Buffer<bf16>, Buffer<bf16>)) -> Vec<bf16> {
        let Case { q_heads, kv_heads, ref sequences } = self.case;
        let (queries, row_len) = (q.to_vec(), q_heads * D);
        let (mut all, mut first) = (Vec::new(), 0);
        for &(_, count) in sequences {
            let own = RowBuffers::new(&self.row_list[first..first + count]);
            let queries = Buffer::from_slice(&queries[first * row_len..][..count * row_len]);
            let memory = self.memory(count);
            let params = self.attend_params(&own, &queries, pages, &memory);
            let tiles = Attend::tiles(count as u32, (q_heads / kv_heads) as u32);
            let grid = [kv_heads as u32, self.splits, tiles];
            run::<attention::attend>(grid, Attend::SHARED_BYTES, self.seed, params);
            let grid = [q_heads as u32, count as u32, 1];
            run::<attention::combine>(grid, Attend::COMBINE_SHARED_BYTES, self.seed, params);
            all.extend(memory.out.to_vec());
            first += count;
        }
        all
    }

    /// Attention of all rows by the kernel of devices before Hopper.
    fn attend_in_tiles(&self, (q, pages): &(Buffer<bf16>, Buffer<bf16>)) -> Vec<bf16> {
        let memory = self.memory(self.row_list.len());
        let tiles = Buffer::from_slice(&self.tiles.concat());
        let params = AttendTiles { attend: self.attend_params(&self.rows, q, pages, &memory), tiles: tiles.ptr() };
        let grid = [self.case.kv_heads as u32, self.splits, self.tiles.len() as u32];
        run::<attention::attend_tiles>(grid, Attend::SHARED_BYTES, self.seed, params);
        let grid = [self.case.q_heads as u32, self.row_list.len() as u32, 1];
        run::<attention::combine>(grid, Attend::COMBINE_SHARED_BYTES, self.seed, params.attend);
        memory.out.to_vec()
    }

    /// Attention of both layers, which `launch` runs: `want` is the second layer's, and `written` what the pages are
    /// to hold then.
    fn check_layers(
        &self,
        written: &[(Buffer<bf16>, Buffer<bf16>); 2],
        want: &[bf16],
        launch: impl Fn(BatchedStep),
        grid: u32,
    ) {
        let Case { q_heads, kv_heads, ref sequences } = self.case;
        let (count, page_len) = (self.tables.to_vec().len(), self.pages[0].len());
        // The layers lie one behind the other.
        let cache = Buffer::from_slice(&self.pages.concat());
        let (list, forms) = (Buffer::from_slice(&self.listed), Buffer::<u32>::new_poisoned(2 * count * kv_heads));
        let pack =
            PackPages { list: list.ptr(), pages: cache.ptr_mut(), forms: forms.ptr_mut(), page_count: count as u32 };
        let blocks = [kv_heads as u32, 2, self.listed.len() as u32];
        if !self.listed.is_empty() {
            run::<packed::pack_pages>(blocks, PackPages::SHARED_BYTES, self.seed, pack);
        }
        let is_packed: Vec<u32> = (0..count as u32).map(|page| self.listed.contains(&page).into()).collect();
        let is_packed = Buffer::from_slice(&is_packed);
        let layer = |number: usize| Phase {
            // SAFETY: within the buffer.
            pages: unsafe { cache.ptr_mut().cast().at(number * page_len) },
            // SAFETY: within the buffer.
            forms: unsafe { forms.ptr().at(number * count * kv_heads) },
            norm: self.norms[0].ptr(),
            key_norm: self.norms[1].ptr(),
            ..Phase::new(PhaseKind::Attend)
        };
        let phases = [0, 1].map(layer);
        let phases = Buffer::from_slice(Phase::words(&phases));
        let (memory, tiles) = (self.memory(self.row_list.len()), Buffer::from_slice(&self.tiles.concat()));
        let rows = self.row_list.len() as u32;
        let arrivals = Buffer::from_slice(&vec![0; BatchedStep::arrivals_len(grid, rows, q_heads as u32)]);
        let items = BatchedStep::items_len(self.tiles.len(), kv_heads, self.splits as usize);
        let items = Buffer::<u32>::new_poisoned(items);
        launch(BatchedStep {
            work: self.workspace(&memory),
            phases: phases.ptr().cast(),
            phase_count: 2,
            tiles: tiles.ptr(),
            packed: is_packed.ptr(),
            items: items.ptr_mut(),
            arrivals: arrivals.ptr_mut(),
            tile_count: self.tiles.len() as u32,
            ..BatchedStep::default()
        });
        if !self.listed.is_empty() {
            run::<packed::unpack_pages>(blocks, PackPages::SHARED_BYTES, self.seed, pack);
        }
        for (got, (_, pages)) in cache.to_vec().chunks(page_len).zip(written) {
            assert!(got == pages.to_vec(), "keys and values of {sequences:?}, {grid} blocks");
        }
        assert!(arrivals.to_vec().iter().all(|&left| left == 0));
        let got = memory.out.to_vec();
        let got: Vec<bf16> = (0..got.len()).map(|i| got[i / D * D + slot((i % D) as u32) as usize]).collect();
        assert!(want == got, "{q_heads} and {kv_heads} heads, {sequences:?}, {grid} blocks");
    }

    fn workspace(&self, memory: &Memory) -> Workspace {
        Workspace {
            rows: self.rows.rows(),
            cos: self.angles[0].ptr(),
            sin: self.angles[1].ptr(),
            tables: self.tables.ptr(),
            qkv: self.qkv.ptr_mut(),
            sums: memory.sums.ptr_mut(),
            scales: memory.scales.ptr_mut(),
            attended: memory.out.ptr_mut(),
            q_heads: self.case.q_heads as u32,
            kv_heads: self.case.kv_heads as u32,
            table_stride: self.stride as u32,
            splits: self.splits,
            eps: EPS,
            head_norm: 1,
            ..Workspace::default()
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
