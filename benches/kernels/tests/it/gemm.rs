//! The GEMM that rounds to bf16 against a plain triple loop, under the emulator, with the work cut in every way.

use crate::common::{Random, RowBuffers, laid_out, relative_error, reordered, run, widen};
use bench_kernels::gemm as kernels;
use cuda_std::emulator::Buffer;
use cuda_std::tensor::{Matrix, TensorMap};
use cuda_std::{Kernel, bf16};
use gpu_kernels::gemm::{Beside, Gemm, TILE_ROWS};
use gpu_kernels::kv::Cache;
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::qkv::SplitHeads;
use gpu_kernels::stream::Walk;

/// Blocks that weights are laid out for.
const BLOCKS: u32 = 3;

struct Case {
    m: usize,
    n: usize,
    k: usize,
    x: Vec<bf16>,
    /// `[n, k]`.
    w: Vec<bf16>,
}

impl Case {
    fn new(m: usize, n: usize, k: usize) -> Self {
        let mut random = Random::new((m * 1_000_003 + n * 1009 + k) as u64);
        Self { m, n, k, x: random.bf16s(m * k), w: random.bf16s(n * k) }
    }

    fn reference(&self) -> Vec<f32> {
        let dot = |x: &[bf16], w: &[bf16]| x.iter().zip(w).map(|(x, w)| x.to_f64() * w.to_f64()).sum::<f64>();
        self.x.chunks(self.k).flat_map(|x| self.w.chunks(self.k).map(move |w| dot(x, w) as f32)).collect()
    }

    /// Runs `K` with tiles of `width` weight rows on `blocks` blocks.
    fn run<K: Kernel<Params = Gemm>>(&self, width: u32, blocks: u32) -> Vec<bf16> {
        self.launch(|params, seed| run::<K>([blocks, 1, 1], Gemm::shared_bytes(width), seed, params))
    }

    /// Clusters of 4 × 2 on `blocks` blocks for the features up to `border`, and of 2 × 1 for the others.
    fn run_beside(&self, blocks: u32, border: u32) -> Vec<bf16> {
        self.launch(|params, seed| {
            // The GEMM before this one had number 6.
            let word = Buffer::from_slice(&[6u32]).named("word");
            let [first, second] = [0, 1].map(|second| Beside { word: word.ptr_mut(), number: 7, second });
            let (shared, features) = (Gemm::shared_bytes(256), Gemm { n: border, beside: first, ..params });
            run::<kernels::gemm_plain_4x2>([blocks, 1, 1], shared, seed, features);
            let others = Gemm { first_feature: border, beside: second, ..params };
            run::<kernels::gemm_plain_2x1>([4, 1, 1], shared, seed + 1, others);
        })
    }

    /// Makes the buffers of a launch, and calls `launch` with its parameters and a seed.
    fn launch(&self, launch: impl FnOnce(Gemm, u64)) -> Vec<bf16> {
        let Self { m, n, k, .. } = *self;
        let rows = m.next_multiple_of(TILE_ROWS as usize);
        let map = |address: u64, rows: usize, columns: usize, tile_rows: u32| {
            let matrix = Matrix::dense(address, rows as u64, columns as u64, tile_rows);
            Buffer::from_slice(&[TensorMap::emulated(&matrix)])
        };
        let x = Buffer::from_slice(&reordered(&self.x, k, false));
        let (_stream, weights) = laid_out(&self.w, None, k as u32, Walk { chunks: 3, ..Walk::new(BLOCKS) });
        let out = Buffer::<bf16>::new_poisoned(rows * n).named("out");
        let x_map = map(x.ptr().addr(), m, k, TILE_ROWS);
        // One row less than whole tiles: the last row must not be written through the map.
        let out_map = map(out.ptr().addr(), rows - 1, n, 64);
        let none = RowBuffers::new(&[]);
        // Pointers that this epilogue does not use are null.
        let heads = SplitHeads {
            rows: none.rows(),
            qkv: Default::default(),
            q_norm: Default::default(),
            k_norm: Default::default(),
            cos: Default::default(),
            sin: Default::default(),
            q: Default::default(),
            cache: Cache { pages: Default::default(), tables: Default::default(), table_stride: 0, kv_heads: 0 },
            q_heads: 0,
            head_norm: 0,
            eps: 0.0,
        };
        let params = Gemm {
            x: x_map.ptr(),
            stream: weights.stream,
            base: weights.base,
            blocks: weights.blocks,
            n_tiles: weights.n_tiles,
            out: out_map.ptr(),
            y: Default::default(),
            norm: Norm::default(),
            bias: Default::default(),
            heads,
            residual: Residual::default(),
            next_norm: Default::default(),
            codes: Default::default(),
            first_row: 0,
            m: m as u32,
            first_feature: 0,
            n: n as u32,
            k: k as u32,
            band: 2,
            beside: Beside::default(),
        };
        launch(params, (m + n) as u64);
        let out = out.to_vec();
        let (out, last) = out.split_at((rows - 1) * n);
        assert!(last.iter().all(|v| v.to_bits() == u16::MAX), "what lies beyond the output is not written");
        out[..m * n].to_vec()
    }
}

#[test]
fn rounds_to_bf16() {
    for (m, n, k, blocks) in [(5, 64, 64, 1), (150, 320, 192, 2), (130, 832, 448, 1)] {
        let case = Case::new(m, n, k);
        let small = case.run::<kernels::gemm_plain_n128>(128, blocks);
        assert!(relative_error(widen(&small), &case.reference()) < 1.0 / 256.0, "{m} {n} {k}");
        let large = case.run::<kernels::gemm_plain_n256>(256, blocks);
        assert_eq!(widen(&small), widen(&large), "{m} {n} {k}");
        let of_192 = (m.div_ceil(TILE_ROWS as usize) * n.div_ceil(384) * 2) as u32;
        let shared = case.run::<kernels::gemm_plain_n192>(192, of_192);
        assert_eq!(widen(&small), widen(&shared), "{m} {n} {k}, 192 weight rows");
    }
}

#[test]
fn clusters_4x2_beside_2x1_multiply() {
    // Several tiles for each block, and more stages than the ring has.
    let case = Case::new(560, 832, 320);
    let want = case.run::<kernels::gemm_plain_n128>(128, 2);
    for (blocks, border) in [(8, 512), (16, 512), (8, 832)] {
        assert_eq!(widen(&case.run_beside(blocks, border)), widen(&want), "{border}");
    }
}
