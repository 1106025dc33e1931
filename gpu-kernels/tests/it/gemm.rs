//! GEMMs for many rows against a plain triple loop, under the emulator: tiles, edges, epilogues.

use crate::common::{
    CodeBuffers, Random, RowBuffers, e4m3, laid_out, relative_error, reordered, run, run_resident, widen,
};
use cuda_std::emulator::{self, Buffer, Launch, MissingWait};
use cuda_std::tensor::{Matrix, TensorMap};
use cuda_std::{GlobalMut, Kernel, bf16, kernel, thread};
use gpu_kernels::e4m3::CodedRows;
use gpu_kernels::gemm::{self, Beside, E4m3, Gemm, GemmE4m3, SPAN, TILE_ROWS};
use gpu_kernels::kv::{self, Cache};
use gpu_kernels::linear::{self, Linear, N_TILE};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::qkv::{self, SplitHeads};
use gpu_kernels::stream::Walk;

/// The product `[rows, n]` in f64, with each row multiplied by its factor.
fn reference(x: &[bf16], w: &[bf16], k: usize, scales: &[f32]) -> Vec<f32> {
    let dot = |x: &[bf16], w: &[bf16]| x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum::<f64>();
    x.chunks(k).zip(scales).flat_map(|(x, s)| w.chunks(k).map(move |w| (dot(x, w) * f64::from(*s)) as f32)).collect()
}

/// Number of sums of squares of a row: more than lanes add at a time.
const SPANS: usize = 37;
const EPS: f32 = 1e-6;

/// Pages of the cache.
const PAGES: usize = 5;

/// Number of blocks that weights are laid out for.
const BLOCKS: u32 = 3;

#[derive(Clone)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    x: Vec<bf16>,
    /// `[n, k]`.
    w: Vec<bf16>,
    up: Vec<bf16>,
    /// Sums of squares: `[m, SPANS]`.
    squares: Vec<f32>,
    /// The factors of the rows' sums, which follow from `squares`.
    scales: Vec<f32>,
    norm: Vec<bf16>,
    before: Vec<f32>,
    /// Query heads and key-value heads, for `qkv` alone. `n` is then the 128 features of all heads together.
    heads: (usize, usize),
    /// Position of each row.
    positions: Vec<u32>,
    /// The first row and feature that are computed.
    first: [usize; 2],
    /// Whether gate and up are multiplied.
    gated: bool,
    /// Elements of a row whose squares are added up.
    dim: u32,
    /// `[n]`, or empty.
    bias: Vec<bf16>,
    /// Whether heads have a norm.
    head_norm: bool,
}

/// The inputs for making heads, and the memory that heads go to, which is poisoned.
struct HeadMemory {
    rows: RowBuffers,
    norm: Buffer<bf16>,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    q: Buffer<bf16>,
    pages: Buffer<bf16>,
    table: Buffer<u32>,
}

impl HeadMemory {
    fn new(case: &Case) -> Self {
        let (q_heads, kv_heads) = case.heads;
        let rows = RowBuffers::new(&case.positions.iter().map(|p| (0, *p, 0)).collect::<Vec<_>>());
        let angles =
            |phase: f32| -> Vec<f32> { (0..PAGES * 64 * 64).map(|i| (i as f32 * 0.37 + phase).sin()).collect() };
        let [cos, sin] = [0.0, 1.0].map(|phase| Buffer::from_slice(&angles(phase)));
        Self {
            rows,
            norm: if case.head_norm { Buffer::from_slice(&case.norm) } else { Buffer::from_slice(&[bf16::ONE; 128]) },
            cos,
            sin,
            q: Buffer::new_poisoned(case.m * q_heads * 128).named("q"),
            pages: Buffer::new_poisoned(PAGES * kv::page_elements(kv_heads as u32)).named("pages"),
            // Pages lie in reverse order.
            table: Buffer::from_slice(&(0..PAGES as u32).rev().collect::<Vec<_>>()),
        }
    }

    fn params(&self, case: &Case) -> SplitHeads {
        let (q_heads, kv_heads) = case.heads;
        SplitHeads {
            rows: self.rows.rows(),
            qkv: Default::default(),
            q_norm: self.norm.ptr(),
            k_norm: self.norm.ptr(),
            cos: self.cos.ptr(),
            sin: self.sin.ptr(),
            q: self.q.ptr_mut(),
            cache: Cache {
                pages: self.pages.ptr_mut(),
                tables: self.table.ptr(),
                table_stride: PAGES as u32,
                kv_heads: kv_heads as u32,
            },
            q_heads: q_heads as u32,
            eps: 1e-6,
            head_norm: case.head_norm.into(),
        }
    }
}

struct Results {
    y: Vec<f32>,
    out: Vec<bf16>,
    scaled: Vec<bf16>,
    squares: Vec<f32>,
    spans: Vec<f32>,
    q: Vec<bf16>,
    pages: Vec<bf16>,
}

impl Case {
    fn new(m: usize, n: usize, k: usize) -> Self {
        let mut random = Random::new((m * 1_000_003 + n * 1009 + k) as u64);
        let [x, w, up, norm] = [m * k, n * k, n * k, n].map(|len| random.bf16s(len));
        let squares: Vec<f32> = random.floats(m * SPANS).into_iter().map(|s| 30.0 * (s + 1.5)).collect();
        let factor = |row: &[f32]| {
            let sum: f64 = row.iter().map(|s| f64::from(*s)).sum();
            (1.0 / (sum / (SPANS * SPAN as usize) as f64 + f64::from(EPS)).sqrt()) as f32
        };
        let scales = squares.chunks(SPANS).map(factor).collect();
        let before = random.floats(m.next_multiple_of(TILE_ROWS as usize) * n);
        let positions = (0..m as u32).collect();
        Self {
            m,
            n,
            k,
            x,
            w,
            up,
            squares,
            scales,
            norm,
            before,
            heads: (0, 0),
            positions,
            first: [0; 2],
            gated: false,
            dim: SPANS as u32 * SPAN,
            bias: Vec::new(),
            head_norm: true,
        }
    }

    fn map(address: u64, rows: usize, columns: usize, tile_rows: u32) -> Buffer<TensorMap> {
        let matrix = Matrix::dense(address, rows as u64, columns as u64, tile_rows);
        Buffer::from_slice(&[TensorMap::emulated(&matrix)])
    }

    /// Runs `K` with tiles of `width` weight rows on `blocks` blocks.
    fn run<K: Kernel<Params = Gemm>>(&self, width: u32, blocks: u32) -> Results {
        self.launch(|params, seed| run::<K>([blocks, 1, 1], Gemm::shared_bytes(width), seed, params))
    }

    /// Runs `K` on `blocks` blocks for the features below `border`, and `P` on pairs of blocks for the others.
    fn run_beside<K: Kernel<Params = Gemm>, P: Kernel<Params = Gemm>>(&self, blocks: u32, border: u32) -> Results {
        self.launch(|params, seed| {
            // The word still holds the number of the GEMM before this one, 6.
            let word = Buffer::from_slice(&[6u32]).named("word");
            let [first, second] = [0, 1].map(|second| Beside { word: word.ptr_mut(), number: 7, second });
            let shared = Gemm::shared_bytes(256);
            run::<K>([blocks, 1, 1], shared, seed, Gemm { n: border, beside: first, ..params });
            assert_eq!(word.to_vec(), [7], "the first launch says that the second may go on");
            run::<P>([4, 1, 1], shared, seed + 1, Gemm { first_feature: border, beside: second, ..params });
        })
    }

    /// Makes what a launch reads and writes, and calls `launch` with its parameters and a seed.
    fn launch(&self, launch: impl FnOnce(Gemm, u64)) -> Results {
        let Self { m, n, k, .. } = *self;
        let rows = m.next_multiple_of(TILE_ROWS as usize);
        let [x, norm] = [&reordered(&self.x, k, false), &self.norm].map(|v| Buffer::from_slice(v));
        // The matrix does not begin the stream, and takes several passes of it.
        let (walk, gated) = (Walk { chunks: 3, ..Walk::new(BLOCKS) }, self.gated);
        let (_stream, weights) = laid_out(&self.w, gated.then_some(&self.up), k as u32, walk);
        let factors = Buffer::from_slice(&self.squares);
        let y = Buffer::from_slice(&self.before).named("y");
        let out = Buffer::<bf16>::new_poisoned(rows * n).named("out");
        let scaled = Buffer::<bf16>::new_poisoned(rows * n).named("scaled");
        let n_tiles = n / N_TILE as usize;
        let squares = Buffer::<f32>::new_poisoned(rows * n_tiles).named("squares");
        let x_map = Self::map(x.ptr().addr(), m, k, TILE_ROWS);
        // The map has one row fewer than whole tiles: the last row must not be written through it.
        let out_map = Self::map(out.ptr().addr(), rows - 1, n, 64);
        let heads = HeadMemory::new(self);
        let bias = Buffer::from_slice(&self.bias);
        let spans = Buffer::<f32>::new_poisoned(rows * n / SPAN as usize).named("spans");
        let residual = Residual {
            x: y.ptr_mut(),
            scaled: scaled.ptr_mut(),
            squares: squares.ptr_mut(),
            spans: spans.ptr_mut(),
            dim: n as u32,
        };
        let params = Gemm {
            x: x_map.ptr(),
            stream: weights.stream,
            base: weights.base,
            blocks: weights.blocks,
            n_tiles: weights.n_tiles,
            out: out_map.ptr(),
            y: y.ptr_mut(),
            norm: Norm { squares: factors.ptr(), dim: self.dim, eps: EPS },
            bias: if self.bias.is_empty() { Default::default() } else { bias.ptr() },
            heads: heads.params(self),
            residual,
            next_norm: norm.ptr(),
            codes: Default::default(),
            first_row: self.first[0] as u32,
            m: m as u32,
            first_feature: self.first[1] as u32,
            n: n as u32,
            k: k as u32,
            band: 2,
            beside: Beside::default(),
        };
        launch(params, (m + n) as u64);
        let out = out.to_vec();
        let last = &out[(rows - 1) * n..];
        assert!(last.iter().all(|v| v.to_bits() == u16::MAX), "what lies beyond the output is not written");
        let out = &out[..m * n];
        Results {
            y: y.to_vec()[..m * n].to_vec(),
            out: if gated { reordered(out, n, true) } else { out.to_vec() },
            scaled: reordered(&scaled.to_vec()[..m * n], n, true),
            squares: squares.to_vec()[..m * n_tiles].to_vec(),
            spans: spans.to_vec()[..m * n / SPAN as usize].to_vec(),
            q: heads.q.to_vec(),
            pages: heads.pages.to_vec(),
        }
    }
}

/// Queries and pages, made by the separate kernel that splits a GEMM's output in f32 into heads.
fn split(case: &Case, qkv: &[f32]) -> (Vec<bf16>, Vec<bf16>) {
    let memory = HeadMemory::new(case);
    let qkv = Buffer::from_slice(qkv);
    let params = SplitHeads { qkv: qkv.ptr(), ..memory.params(case) };
    let blocks = params.heads().div_ceil(qkv::HEADS_PER_BLOCK);
    run::<qkv::split_heads>([blocks, case.m as u32, 1], 0, 3, params);
    (memory.q.to_vec(), memory.pages.to_vec())
}

/// Compares two outputs where they were written, and checks that both were written in the same places.
fn same_but_for_rounding(found: &[bf16], expected: &[bf16]) {
    for (f, e) in found.iter().zip(expected) {
        let unwritten = |v: &bf16| v.to_bits() == u16::MAX;
        assert_eq!(unwritten(f), unwritten(e));
    }
    let written = |v: &[bf16]| v.iter().filter(|v| v.to_bits() != u16::MAX).map(|v| v.to_f32()).collect::<Vec<_>>();
    assert!(relative_error(written(found), &written(expected)) < 1.0 / 128.0);
}

/// Number of blocks for the kernels with 192 weight rows a tile, whose blocks take one tile each.
fn blocks_of_192(case: &Case) -> u32 {
    (case.m.div_ceil(TILE_ROWS as usize) * case.n.div_ceil(384) * 2) as u32
}

/// Leaves out each wait of the kernel in turn. What is then used before it is there, or overwritten while it is used,
/// must be found.
#[test]
fn a_missing_wait_is_found() {
    let case = Case::new(140, 128, 640);
    let run = |missing: MissingWait| {
        let mut found = Ok(false);
        case.launch(|params, seed| {
            let (shared_bytes, missing) = (Gemm::shared_bytes(128), Some(missing));
            let launch = Launch { threads: gemm::THREADS, shared_bytes, seed, missing, ..Launch::default() };
            found = emulator::launch::<gemm::gemm_write_n128>(&launch, params).map(|report| report.left_out);
        });
        found
    };
    let phases = emulator::leave_out_each((0..99).map(MissingWait::Phase), run);
    assert!((12..99).contains(&phases.found) && phases.unfound.is_empty(), "{phases:?}");
    // Nobody fills the last six stages again, so it does no harm to release them too early: waits 14, 16 and 18 only
    // release a stage. The waits between them end split-K partials, and are needed for the sums. Wait 20 is for the
    // MMAs after the last tile, whose sums nobody uses.
    let mmas = emulator::leave_out_each((0..99).map(MissingWait::Mmas), run);
    assert_eq!(mmas.unfound, [14, 16, 18, 20].map(MissingWait::Mmas));
    assert_eq!(mmas.found, 17);
}

#[test]
fn heads_are_what_the_separate_kernel_makes() {
    // Positions that begin at a multiple of eight, that begin elsewhere, and that have a gap.
    let gap = |i: u32| if i < 70 { i } else { i + 13 };
    for (m, start, heads) in [(150, 0, (2, 1)), (70, 93, (1, 1)), (130, 8, (3, 2))] {
        let mut case = Case::new(m, (heads.0 + 2 * heads.1) * 128, 64);
        case.heads = heads;
        case.positions = (0..m as u32).map(|i| start + if start == 8 { gap(i) } else { i }).collect();
        let small = case.run::<gemm::gemm_qkv_n128>(128, 2);
        let (q, pages) = split(&case, &reference(&case.x, &case.w, case.k, &case.scales));
        same_but_for_rounding(&small.q, &q);
        same_but_for_rounding(&small.pages, &pages);
        let large = case.run::<gemm::gemm_qkv_n256>(256, 2);
        let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!((bits(&small.q), bits(&small.pages)), (bits(&large.q), bits(&large.pages)));
        let pairs = case.run::<gemm::gemm_qkv_2x1>(256, 2);
        assert_eq!((bits(&small.q), bits(&small.pages)), (bits(&pairs.q), bits(&pairs.pages)));
        let shared = case.run::<gemm::gemm_qkv_n192>(192, blocks_of_192(&case));
        assert_eq!((bits(&small.q), bits(&small.pages)), (bits(&shared.q), bits(&shared.pages)));
    }
}

/// A bias is added to sums before heads are made of them. Without norms the results are bit for bit those of the
/// separate kernel.
#[test]
fn heads_with_biases_and_without_norms() {
    let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for (m, heads, head_norm) in [(150, (2, 1), false), (70, (3, 2), false), (20, (1, 1), true)] {
        let n = (heads.0 + 2 * heads.1) * 128;
        let mut case = Case::new(m, n, 64);
        (case.heads, case.head_norm) = (heads, head_norm);
        let plain = case.run::<gemm::gemm_write_n128>(128, 2);
        case.bias = Random::new(m as u64).bf16s(n);
        let written = case.run::<gemm::gemm_write_n128>(128, 2);
        for (i, (with, without)) in written.y.iter().zip(&plain.y).enumerate() {
            assert_eq!(*with, without + case.bias[i % n].to_f32(), "element {i}");
        }
        assert_eq!(case.run::<gemm::gemm_write_n256>(256, 2).y, written.y);
        let (q, pages) = split(&case, &written.y);
        for found in [
            case.run::<gemm::gemm_qkv_n128>(128, 2),
            case.run::<gemm::gemm_qkv_n256>(256, 2),
            case.run::<gemm::gemm_qkv_2x1>(256, 2),
        ] {
            same_but_for_rounding(&found.q, &q);
            same_but_for_rounding(&found.pages, &pages);
            if !head_norm {
                assert_eq!((bits(&found.q), bits(&found.pages)), (bits(&q), bits(&pages)));
            }
        }
    }
}

#[test]
fn gates() {
    for (m, n, k, blocks) in [(5, 64, 64, 1), (150, 192, 128, 2), (140, 192, 448, 1)] {
        let case = Case { gated: true, ..Case::new(m, n, k) };
        let [gate, up] = [&case.w, &case.up].map(|w| reference(&case.x, w, k, &case.scales));
        let want: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let got = case.run::<gemm::gemm_swiglu_n256>(256, blocks);
        assert!(relative_error(widen(&got.out), &want) < 1.0 / 256.0, "{m} {n} {k}");
        let pairs = case.run::<gemm::gemm_swiglu_2x1>(256, 2 * blocks);
        assert_eq!(pairs.out, got.out, "{m} {n} {k} in pairs");
    }
}

#[test]
fn adds_and_prepares_the_norm() {
    for (m, n, k, blocks) in [(3, 128, 64, 1), (140, 384, 192, 2), (150, 384, 576, 1), (140, 640, 64, 1)] {
        let case = Case::new(m, n, k);
        let mut want = reference(&case.x, &case.w, k, &vec![1.0; m]);
        want.iter_mut().zip(&case.before).for_each(|(w, b)| *w += b);
        let small = case.run::<gemm::gemm_add_n128>(128, blocks);
        assert!(relative_error(small.y.clone(), &want) < 1e-5, "{m} {n} {k}");
        let xw: Vec<bf16> =
            small.y.iter().enumerate().map(|(i, v)| bf16::from_f32(v * case.norm[i % n].to_f32())).collect();
        assert_eq!(small.scaled, xw, "{m} {n} {k}");
        for (found, len) in [(&small.squares, N_TILE), (&small.spans, SPAN)] {
            let squares: Vec<f32> = small.y.chunks(len as usize).map(|s| s.iter().map(|v| v * v).sum()).collect();
            assert!(relative_error(found.clone(), &squares) < 1e-6, "{m} {n} {k}");
        }
        let large = case.run::<gemm::gemm_add_n256>(256, blocks);
        let pairs = case.run::<gemm::gemm_add_2x1>(256, 2 * blocks);
        for other in [large, pairs] {
            assert_eq!(
                (&small.y, &small.scaled, &small.squares, &small.spans),
                (&other.y, &other.scaled, &other.squares, &other.spans),
                "{m} {n} {k}"
            );
        }
    }
}

/// The results of the kernels for few rows: with the norm whose squares are `n_tiles`, or without a norm.
fn by_linear<K: Kernel<Params = Linear>>(case: &Case, n_tiles: Option<&[f32]>) -> Results {
    let Case { m, n, k, .. } = *case;
    let rows = RowBuffers::sequence(0, m as u32);
    let [x, next] = [&case.x, &case.norm].map(|v| Buffer::from_slice(v));
    let (_stream, weights) = laid_out(&case.w, case.gated.then_some(&case.up), k as u32, Walk::new(BLOCKS));
    let y = Buffer::from_slice(&case.before[..m * n]);
    let [out, scaled] = [(); 2].map(|()| Buffer::<bf16>::new_poisoned(m * n));
    let squares = Buffer::<f32>::new_poisoned(m * n / N_TILE as usize);
    let factors = n_tiles.map(Buffer::from_slice);
    let norm = |squares: &Buffer<f32>| Norm { squares: squares.ptr(), dim: k as u32, eps: EPS };
    let params = Linear {
        rows: rows.rows(),
        x: x.ptr(),
        weights,
        norm: factors.as_ref().map_or(Norm::default(), norm),
        y: y.ptr_mut(),
        activation: out.ptr_mut(),
        residual: Residual {
            x: y.ptr_mut(),
            scaled: scaled.ptr_mut(),
            squares: squares.ptr_mut(),
            spans: Default::default(),
            dim: n as u32,
        },
        next_norm: next.ptr(),
        bias: Default::default(),
        n: n as u32,
        first_row: 0,
    };
    run::<K>([weights.n_tiles, 1, 1], Linear::shared_bytes(64), 1, params);
    let [y, squares] = [y, squares].map(|v| v.to_vec());
    let [out, scaled] = [out, scaled].map(|v| v.to_vec());
    Results { y, out, scaled, squares, spans: vec![], q: vec![], pages: vec![] }
}

#[test]
fn sums_are_those_of_few_rows_to_the_last_bit() {
    // More K-slices than the ring has stages, split-K partials of unequal length, and 40 spans of a row.
    for (m, n, k) in [(50, 384, 640), (64, 128, 5120)] {
        let mut case = Case::new(m, n, k);
        let n_tiles: Vec<f32> =
            Random::new(9).floats(m * k / N_TILE as usize).into_iter().map(|s| 20.0 * (s + 1.5)).collect();
        let spans = |s: &[f32]| ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
        case.squares = n_tiles.chunks(8).map(spans).collect();
        case.dim = k as u32;
        let want = by_linear::<linear::linear_64>(&case, Some(&n_tiles));
        assert!(case.run::<gemm::gemm_write_n128>(128, 2).y == want.y, "{m} {n} {k}");
        assert!(case.run::<gemm::gemm_write_n256>(256, 1).y == want.y, "{m} {n} {k}");
        assert!(case.run::<gemm::gemm_write_n192>(192, blocks_of_192(&case)).y == want.y, "{m} {n} {k}");
        let want = by_linear::<linear::linear_add_64>(&case, None);
        for got in [case.run::<gemm::gemm_add_n128>(128, 2), case.run::<gemm::gemm_add_n256>(256, 1)] {
            assert!((&got.y, &got.scaled, &got.squares) == (&want.y, &want.scaled, &want.squares), "{m} {n} {k}");
            assert_eq!(got.spans, got.squares.chunks(8).map(spans).collect::<Vec<_>>(), "{m} {n} {k}");
        }
        case.gated = true;
        let want = by_linear::<linear::swiglu_64>(&case, Some(&n_tiles));
        assert!(case.run::<gemm::gemm_swiglu_n256>(256, 2).out == want.out, "{m} {n} {k}");
    }
}

#[test]
fn a_row_is_the_same_bits_in_any_company() {
    let case = Case::new(150, 128, 128);
    let all = case.run::<gemm::gemm_add_n128>(128, 2);
    let pick = 131;
    let alone = Case {
        m: 1,
        x: case.x[pick * case.k..][..case.k].to_vec(),
        squares: case.squares[pick * SPANS..][..SPANS].to_vec(),
        scales: vec![case.scales[pick]],
        before: case.before[pick * 128..].iter().copied().cycle().take(TILE_ROWS as usize * 128).collect(),
        positions: vec![0],
        ..case
    };
    let one = alone.run::<gemm::gemm_add_n256>(256, 1);
    assert_eq!(one.y, all.y[pick * 128..][..128]);
}

#[test]
fn a_part_of_the_rows_or_features_is_computed_alone() {
    let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let mut case = Case::new(300, 128, 128);
    let whole = case.run::<gemm::gemm_add_n128>(128, 2);
    case.first = [256, 0];
    let part = case.run::<gemm::gemm_add_n256>(256, 2);
    let from = 256 * case.n;
    assert_eq!(part.y[..from], case.before[..from], "rows before are left as they were");
    assert_eq!((&part.y[from..], &part.scaled[from..]), (&whole.y[from..], &whole.scaled[from..]));

    let mut case = Case::new(150, 5 * 128, 64);
    case.heads = (3, 1);
    let whole = case.run::<gemm::gemm_qkv_n128>(128, 2);
    // Keys and values alone, then the queries of the last rows.
    case.first = [0, 3 * 128];
    let cached = case.run::<gemm::gemm_qkv_n256>(256, 2);
    assert_eq!(bits(&cached.pages), bits(&whole.pages));
    assert!(cached.q.iter().all(|v| v.to_bits() == u16::MAX), "no query is written");
    case.first = [128, 0];
    let last = case.run::<gemm::gemm_qkv_n256>(256, 2);
    let from = 128 * 3 * 128;
    assert_eq!(bits(&last.q[from..]), bits(&whole.q[from..]));
    assert!(last.q[..from].iter().all(|v| v.to_bits() == u16::MAX), "no query before them is written");
}

#[test]
fn clusters_4x2_beside_2x1_make_heads() {
    let mut case = Case::new(300, 7 * 128, 192);
    case.heads = (5, 1);
    let want = case.run::<gemm::gemm_qkv_n128>(128, 2);
    let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for border in [512, 640, 896] {
        let got = case.run_beside::<gemm::gemm_qkv_4x2, gemm::gemm_qkv_2x1>(8, border);
        assert_eq!((bits(&got.q), bits(&got.pages)), (bits(&want.q), bits(&want.pages)), "{border}");
    }
}

#[test]
fn clusters_4x2_beside_2x1_gate() {
    let case = Case { gated: true, ..Case::new(150, 448, 320) };
    let want = case.run::<gemm::gemm_swiglu_n256>(256, 2);
    for border in [256, 448] {
        let got = case.run_beside::<gemm::gemm_swiglu_4x2, gemm::gemm_swiglu_2x1>(8, border);
        assert_eq!(widen(&got.out), widen(&want.out), "{border}");
    }
}

#[test]
fn clusters_4x2_beside_2x1_add() {
    for (m, n, k, border) in [(530, 640, 192, 512), (140, 640, 640, 640)] {
        let case = Case::new(m, n, k);
        let want = case.run::<gemm::gemm_add_n128>(128, 2);
        let got = case.run_beside::<gemm::gemm_add_4x2, gemm::gemm_add_2x1>(8, border);
        assert_eq!(
            (&got.y, &got.scaled, &got.squares, &got.spans),
            (&want.y, &want.scaled, &want.squares, &want.spans),
            "{m} {n} {k}"
        );
    }
}

/// The word between two launches, data that is written before the word, and where the second launch's blocks store the
/// data that they read.
#[repr(C)]
#[derive(Clone, Copy, cuda_std::Layout)]
pub struct InOrder {
    beside: Beside,
    data: GlobalMut<u32>,
    out: GlobalMut<u32>,
}

/// Plays both launches: block 0 is the first, and the other blocks are the second, which reads what block 0 has
/// written.
#[kernel(threads = 32)]
pub unsafe fn second_after_first(p: InOrder) {
    let beside = Beside { second: thread::block_idx_x().min(1), ..p.beside };
    let lane = thread::thread_idx_x();
    // SAFETY: the test's word: there is room for each block, and the word counts these blocks alone.
    unsafe {
        if thread::block_idx_x() == 0 {
            if lane == 0 {
                p.data.store(0, 42);
                beside.wait();
                beside.go_on();
            }
        } else {
            beside.wait();
            p.out.store((thread::block_idx_x() * 32 + lane) as usize, p.data.load(0));
        }
        beside.end();
    }
}

#[test]
fn the_second_launch_waits_for_the_word_of_the_first() {
    for seed in 0..20 {
        // The number that the GEMM before left in the word must not let this one's second launch go on.
        let (word, data) = (Buffer::from_slice(&[6u32]), Buffer::from_slice(&[0u32]));
        let out = Buffer::from_slice(&[0u32; 3 * 32]);
        let beside = Beside { word: word.ptr_mut(), number: 7, second: 0 };
        let params = InOrder { beside, data: data.ptr_mut(), out: out.ptr_mut() };
        run_resident::<second_after_first>([3, 1, 1], 0, seed, params);
        assert_eq!(out.to_vec()[32..], [42; 64]);
    }
}

/// Codes of e4m3, two in the place of a bf16.
struct Codes(Vec<bf16>);

impl Codes {
    fn new(pairs: usize, seed: u64) -> Self {
        // Codes of small numbers, and no NaN.
        let mut random = Random::new(seed);
        let code = |x: f32| (x.abs() * 71.0) as u16 & 0x47 | if x < 0.0 { 0x80 } else { 0 };
        let codes: Vec<u16> = random.floats(2 * pairs).into_iter().map(code).collect();
        Self(codes.chunks(2).map(|pair| bf16::from_bits(pair[0] | pair[1] << 8)).collect())
    }

    fn values(&self) -> Vec<f64> {
        self.0.iter().flat_map(|pair| pair.to_bits().to_le_bytes()).map(|code| f64::from(e4m3(code))).collect()
    }
}

/// GEMMs of codes. There is one scale for every 128 inputs of a row, and one for every 128 inputs of 128 weight rows.
struct CodedCase {
    case: Case,
    x: Codes,
    w: Codes,
    up: Codes,
    /// `[groups, rows]`, with room for whole tiles of rows.
    x_scales: Vec<f32>,
    /// `[weight rows / 128, groups, 4]`.
    w_scales: Vec<f32>,
    groups: usize,
}

impl CodedCase {
    fn new(m: usize, n: usize, pairs: usize) -> Self {
        let [x, w, up] = [m, n, n].map(|rows| Codes::new(rows * pairs, (rows + pairs) as u64 * 3 + rows as u64));
        let (rows, groups) = (m.next_multiple_of(TILE_ROWS as usize), (pairs / 64).next_multiple_of(2));
        let mut random = Random::new(7);
        let mut x_scales = random.floats(groups * rows);
        let mut w_scales = random.floats(2 * n / 128 * groups * 4);
        // Kernels take an even number of groups: the scales of a group beyond the inputs are zero.
        x_scales[pairs / 64 * rows..].fill(0.0);
        let is_beyond = |i: &usize| i / 4 % groups >= pairs / 64;
        (0..w_scales.len()).filter(is_beyond).for_each(|i| w_scales[i] = 0.0);
        let case = Case { x: x.0.clone(), w: w.0.clone(), up: up.0.clone(), ..Case::new(m, n, pairs) };
        Self { case, x, w, up, x_scales, w_scales, groups }
    }

    /// Runs `K` on `blocks` blocks.
    fn run<K: Kernel<Params = GemmE4m3>>(&self, gated: bool, blocks: u32) -> Results {
        self.run_to::<K>(gated, blocks, CodedRows::default())
    }

    /// As [`run`](Self::run), with the next norm's input as codes.
    fn run_to<K: Kernel<Params = GemmE4m3>>(&self, gated: bool, blocks: u32, codes: CodedRows) -> Results {
        let (x_scales, w_scales) = (Buffer::from_slice(&self.x_scales), Buffer::from_slice(&self.w_scales));
        let (x_rows, groups) = (self.case.m.next_multiple_of(TILE_ROWS as usize) as u32, self.groups as u32);
        let scales = E4m3 { x_scales: x_scales.ptr(), w_scales: w_scales.ptr(), x_rows, groups };
        let case = Case { gated, ..self.case.clone() };
        case.launch(|gemm, seed| {
            let params = GemmE4m3 { gemm: Gemm { k: 64 * groups, codes, ..gemm }, scales };
            run::<K>([blocks, 1, 1], Gemm::shared_bytes(128), seed, params);
        })
    }

    /// Checks that `K` leaves the same codes as a separate launch makes of `in_bf16`, which is its output in bf16.
    fn compare_codes<K: Kernel<Params = GemmE4m3>>(&self, gated: bool, blocks: u32, in_bf16: &[bf16]) {
        let m = self.case.m;
        let (n, rows) = (in_bf16.len() / m, m.next_multiple_of(TILE_ROWS as usize));
        let [found, apart] = [0; 2].map(|_| CodeBuffers::new(rows, n, 0.0));
        let results = self.run_to::<K>(gated, blocks, found.rows());
        let is_unwritten = |v: &bf16| v.to_bits() == u16::MAX;
        assert!(results.scaled.iter().all(is_unwritten) && results.out.iter().all(is_unwritten), "nothing in bf16");
        let x = Buffer::from_slice(&reordered(in_bf16, n, false));
        apart.quantize(x.ptr(), 0..m, false);
        assert!(found.codes.to_vec()[..m * n] == apart.codes.to_vec()[..m * n], "{m} rows of {n}");
        for (found, want) in found.scales.to_vec().chunks(rows).zip(apart.scales.to_vec().chunks(rows)) {
            assert_eq!(found[..m], want[..m], "{m} rows of {n}");
        }
    }

    /// The sums with the matrix `w`, each row multiplied by its factor. `together` features share an entry of scales,
    /// of which `which` is taken: a gated matrix has the gates and the ups of 64 features in 128 rows.
    fn sums(&self, w: &Codes, which: usize, together: usize) -> Vec<f32> {
        let Case { m, n, k: pairs, .. } = self.case;
        let (x, w) = (self.x.values(), w.values());
        let mut out = vec![0.0; m * n];
        for (i, out) in out.iter_mut().enumerate() {
            let (row, feature) = (i / n, i % n);
            for g in 0..pairs / 64 {
                let at = |matrix: &[f64], row: usize| matrix[row * 2 * pairs + g * 128..][..128].to_vec();
                let inner: f64 = at(&x, row).iter().zip(at(&w, feature)).map(|(x, w)| x * w).sum();
                let w_scale = self.w_scales[(feature / together * self.groups + g) * 4 + which];
                let x_scale = self.x_scales[g * m.next_multiple_of(TILE_ROWS as usize) + row];
                *out += inner * f64::from(x_scale) * f64::from(w_scale);
            }
            *out *= f64::from(self.case.scales[row]);
        }
        out.into_iter().map(|y| y as f32).collect()
    }
}

#[test]
fn codes_and_their_scales() {
    // The last case has one group less than kernels take.
    let cases = [(5, 128, 64 * 2, 1), (150, 256, 64 * 6, 2), (140, 384, 64 * 10, 1), (130, 128, 64 * 3, 1)];
    for (m, n, pairs, blocks) in cases {
        let mut of = CodedCase::new(m, n, pairs);
        let written = of.run::<gemm::gemm_write_e4m3>(false, blocks);
        assert!(relative_error(written.y.iter().copied(), &of.sums(&of.w, 0, 128)) < 1e-5, "{m} {n} {pairs}");
        let [gate, up] = [(&of.w, 0), (&of.up, 1)].map(|(w, which)| of.sums(w, which, 64));
        let want: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
        let gated = of.run::<gemm::gemm_swiglu_e4m3>(true, blocks);
        assert!(relative_error(widen(&gated.out), &want) < 1.0 / 128.0, "{m} {n} {pairs}");
        let added = of.run::<gemm::gemm_add_e4m3>(false, blocks);
        let case = &of.case;
        let want: Vec<f32> =
            written.y.iter().enumerate().map(|(i, y)| case.before[i] + y / case.scales[i / n]).collect();
        assert!(relative_error(added.y.iter().copied(), &want) < 1e-5, "{m} {n} {pairs}");
        let scaled: Vec<bf16> =
            added.y.iter().enumerate().map(|(i, v)| bf16::from_f32(v * case.norm[i % n].to_f32())).collect();
        assert_eq!(added.scaled, scaled, "{m} {n} {pairs}");
        for (found, len) in [(&added.squares, N_TILE), (&added.spans, SPAN)] {
            let squares: Vec<f32> = added.y.chunks(len as usize).map(|s| s.iter().map(|v| v * v).sum()).collect();
            assert!(relative_error(found.clone(), &squares) < 1e-6, "{m} {n} {pairs}");
        }
        // With two blocks for a tile.
        assert_eq!(of.run::<gemm::gemm_write_shared_e4m3>(false, 2 * blocks).y, written.y);
        let by_two = of.run::<gemm::gemm_add_shared_e4m3>(false, 2 * blocks);
        assert_eq!((by_two.y, by_two.scaled), (added.y.clone(), added.scaled.clone()), "{m} {n} {pairs}");
        of.compare_codes::<gemm::gemm_add_e4m3>(false, blocks, &added.scaled);
        of.compare_codes::<gemm::gemm_swiglu_coded_e4m3>(true, blocks, &gated.out);
        of.case.bias = Random::new(m as u64).bf16s(n);
        let with = of.run::<gemm::gemm_write_e4m3>(false, blocks);
        for (i, (with, without)) in with.y.iter().zip(&written.y).enumerate() {
            assert_eq!(*with, without + of.case.bias[i % n].to_f32(), "element {i}");
        }
    }
}

#[test]
fn heads_of_codes_are_what_the_separate_kernel_makes() {
    let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    for (m, heads, pairs, has_bias) in [(150, (2, 1), 64 * 4, false), (70, (1, 1), 64 * 3, true)] {
        let n = (heads.0 + 2 * heads.1) * 128;
        let mut of = CodedCase::new(m, n, pairs);
        of.case.heads = heads;
        if has_bias {
            (of.case.bias, of.case.head_norm) = (Random::new(m as u64).bf16s(n), false);
        }
        let (q, pages) = split(&of.case, &of.run::<gemm::gemm_write_e4m3>(false, 2).y);
        let found = of.run::<gemm::gemm_qkv_e4m3>(false, 2);
        same_but_for_rounding(&found.q, &q);
        same_but_for_rounding(&found.pages, &pages);
        if has_bias {
            assert_eq!((bits(&found.q), bits(&found.pages)), (bits(&q), bits(&pages)));
        }
        // Keys and values alone, then the queries of the last rows.
        of.case.first = [0, heads.0 * 128];
        let cached = of.run::<gemm::gemm_qkv_e4m3>(false, 2);
        assert_eq!(bits(&cached.pages), bits(&found.pages));
        assert!(cached.q.iter().all(|v| v.to_bits() == u16::MAX), "no query is written");
    }
}
