//! Products for many rows: which kernel of `gpu_kernels::gemm` and which grid, and what its tensor maps describe.

use cuda_std::Global;
use cuda_std::tensor::Tensor;
use gpu_kernels::gemm::{self, GATED_TILE, Gemm, STRIP, TILE_ROWS, WEIGHT_ROWS};
use half::bf16;

use crate::Error;
use crate::device::Device;

/// What a layer does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// Writes them, each row times its factor.
    Write,
    /// SwiGLU of gate and up, each row times its factor.
    SwiGlu,
    /// Adds them to the residual stream and prepares the norm that follows.
    Add,
}

/// How a product is cut into tiles; all give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// 128 rows × 128 features.
    N128,
    /// 128 rows × 256 features.
    N256,
    /// As [`N256`](Self::N256), with blocks in pairs that share the features.
    Pair,
}

impl Cut {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::N128, Self::N256, Self::Pair];

    const fn features(self) -> u32 {
        if matches!(self, Self::N128) { 128 } else { 256 }
    }

    /// Blocks that take tiles together.
    const fn cluster(self) -> u32 {
        if matches!(self, Self::Pair) { 2 } else { 1 }
    }

    /// Tiles (or pairs of tiles) of an `m` × `n` output.
    const fn tiles(self, m: u32, n: u32) -> u32 {
        m.div_ceil(TILE_ROWS * self.cluster()) * n.div_ceil(self.features())
    }

    /// The one that is done first on `multiprocessors`: rounds of tiles, times what a round takes (a tile of 128 features is
    /// somewhat more than half the work of one of 256; measured).
    pub fn best(m: u32, n: u32, multiprocessors: u32) -> Self {
        let cost = |cut: &Self| {
            let rounds = cut.tiles(m, n).div_ceil(multiprocessors / cut.cluster());
            rounds
                * match cut {
                    Self::N128 => 56,
                    Self::N256 => 100,
                    Self::Pair => 99,
                }
        };
        Self::ALL.into_iter().min_by_key(cost).unwrap_or(Self::N256)
    }
}

/// Rows of bf16 `[rows, columns]` that a product reads.
pub fn rows(x: Global<bf16>, rows: usize, columns: usize) -> Tensor {
    Tensor::matrix(x.addr(), rows, columns, TILE_ROWS)
}

/// Rows of bf16 `[rows, columns]` that a product writes.
pub fn out(y: Global<bf16>, rows: usize, columns: usize) -> Tensor {
    Tensor::matrix(y.addr(), rows, columns, gemm::BOX)
}

/// Weights `[n, k]`.
pub fn weight(w: Global<bf16>, n: usize, k: usize) -> Tensor {
    Tensor::matrix(w.addr(), n, k, WEIGHT_ROWS)
}

/// Weights of a gated layer, `[gate, up][n / 2, k]` one after the other, as strips of both.
pub fn gated_weight(w: Global<bf16>, n: usize, k: usize) -> Tensor {
    let row = k as u64 * 2;
    let strip = u64::from(STRIP);
    Tensor {
        address: w.addr(),
        sizes: [k as u64, strip / 2, 2, n as u64 / strip],
        strides: [row, row * n as u64 / 2, row * strip / 2],
        tile: GATED_TILE,
        rank: 4,
    }
}

/// Enqueues a product, cut as is best; `p.band` is chosen here.
///
/// # Safety
/// As [`Device::launch`]: addresses and maps as [`Gemm`] says.
///
/// # Errors
/// A refused launch.
pub unsafe fn enqueue(device: &Device, epilogue: Epilogue, p: Gemm) -> Result<(), Error> {
    // The emulator has no clusters.
    let best = Cut::best(p.m, p.n, device.multiprocessors());
    let cut = if best == Cut::Pair && device.is_emulator() { Cut::N256 } else { best };
    // SAFETY: the caller's word.
    unsafe { enqueue_cut(device, epilogue, cut, p) }
}

/// As [`enqueue`], cut as is said.
///
/// # Safety
/// As [`enqueue`].
///
/// # Errors
/// As [`enqueue`].
pub unsafe fn enqueue_cut(device: &Device, epilogue: Epilogue, cut: Cut, p: Gemm) -> Result<(), Error> {
    if p.m == 0 {
        return Ok(());
    }
    // Bands of 8 were good at every size.
    let p = Gemm { band: 8, ..p };
    let blocks = cut.tiles(p.m, p.n).min(device.multiprocessors() / cut.cluster()) * cut.cluster();
    let shared = Gemm::shared_bytes(cut.features());
    // SAFETY: the caller's word.
    unsafe {
        match (epilogue, cut) {
            (Epilogue::Write, Cut::N128) => device.launch::<gemm::gemm_write_n128>(blocks, shared, p),
            (Epilogue::Write, Cut::N256) => device.launch::<gemm::gemm_write_n256>(blocks, shared, p),
            (Epilogue::Write, Cut::Pair) => device.launch::<gemm::gemm_write_pair>(blocks, shared, p),
            (Epilogue::SwiGlu, Cut::N128) => device.launch::<gemm::gemm_swiglu_n128>(blocks, shared, p),
            (Epilogue::SwiGlu, Cut::N256) => device.launch::<gemm::gemm_swiglu_n256>(blocks, shared, p),
            (Epilogue::SwiGlu, Cut::Pair) => device.launch::<gemm::gemm_swiglu_pair>(blocks, shared, p),
            (Epilogue::Add, Cut::N128) => device.launch::<gemm::gemm_add_n128>(blocks, shared, p),
            (Epilogue::Add, Cut::N256) => device.launch::<gemm::gemm_add_n256>(blocks, shared, p),
            (Epilogue::Add, Cut::Pair) => device.launch::<gemm::gemm_add_pair>(blocks, shared, p),
        }
    }
}
