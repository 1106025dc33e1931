//! Products for many rows: which kernel of `gpu_kernels::gemm` and which grid, and what its tensor maps describe.

use cuda_std::Global;
use cuda_std::tensor::Matrix;
use gpu_kernels::gemm::{self, Gemm, TILE_ROWS, WEIGHT_ROWS};
use half::bf16;

use crate::Error;
use crate::device::Device;

/// What a layer does with its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// Makes them queries, keys and values, each row times its factor.
    Qkv,
    /// SwiGLU of gate and up, each row times its factor.
    SwiGlu,
    /// Adds them to the residual stream and prepares the norm that follows.
    Add,
    /// Rounds them to bf16, as others' products do: to be compared with them.
    Plain,
}

/// How a product is cut into tiles; all give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// 128 rows × 128 weight rows; not for SwiGLU.
    N128,
    /// 128 rows × 192 weight rows, in twos: two neighbours share 128, of which each takes half of the rows. Not for SwiGLU, nor to add.
    N192,
    /// 128 rows × 256 weight rows.
    N256,
    /// As [`N256`](Self::N256), with blocks in pairs that share the weights.
    Pair,
}

impl Cut {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::N128, Self::N192, Self::N256, Self::Pair];

    /// Blocks that take tiles together.
    const fn together(self) -> u32 {
        if matches!(self, Self::Pair | Self::N192) { 2 } else { 1 }
    }

    /// Tiles (or twos that are taken together) of so many rows and weight rows.
    const fn tiles(self, m: u32, n: u32) -> u32 {
        let [rows, weight_rows] = match self {
            Self::N128 => [TILE_ROWS, 128],
            Self::N192 => [TILE_ROWS, 384],
            Self::N256 => [TILE_ROWS, 256],
            Self::Pair => [2 * TILE_ROWS, 256],
        };
        m.div_ceil(rows) * n.div_ceil(weight_rows)
    }

    /// Weight rows of a tile, as [`Gemm::shared_bytes`] has them.
    const fn weight_rows(self) -> u32 {
        match self {
            Self::N128 => 128,
            Self::N192 => 192,
            Self::N256 | Self::Pair => 256,
        }
    }

    /// The one that is done first on `multiprocessors`: rounds of tiles, times what a round takes (a tile of 128 weight rows is
    /// somewhat more than half the work of one of 256; measured).
    fn best(epilogue: Epilogue, m: u32, n: u32, device: &Device) -> Self {
        let cost = |cut: &Self| {
            let rounds = cut.tiles(m, n).div_ceil(device.multiprocessors() / cut.together());
            rounds
                * match cut {
                    Self::N128 => 56,
                    Self::N192 => 95,
                    Self::N256 => 100,
                    Self::Pair => 99,
                }
        };
        let can = |cut: &Self| match cut {
            Self::N128 => epilogue != Epilogue::SwiGlu,
            Self::N192 => matches!(epilogue, Epilogue::Qkv | Epilogue::Plain),
            Self::N256 => true,
            // Sharing pays with many rows.
            Self::Pair => m >= 2048,
        };
        Self::ALL.into_iter().filter(can).min_by_key(cost).unwrap_or(Self::N256)
    }
}

/// Rows and weight rows of a product.
fn size(epilogue: Epilogue, p: &Gemm) -> (u32, u32) {
    let n = p.n - p.first_feature;
    (p.m - p.first_row, if epilogue == Epilogue::SwiGlu { 2 * n } else { n })
}

fn matrix(at: Global<bf16>, rows: usize, columns: usize, tile_rows: u32) -> Matrix {
    Matrix::dense(at.addr(), rows as u64, columns as u64, tile_rows)
}

/// Rows of bf16 `[rows, columns]` that a product reads.
pub fn rows(x: Global<bf16>, rows: usize, columns: usize) -> Matrix {
    matrix(x, rows, columns, TILE_ROWS)
}

/// Rows of bf16 `[rows, columns]` that a product writes.
pub fn out(y: Global<bf16>, rows: usize, columns: usize) -> Matrix {
    matrix(y, rows, columns, gemm::BOX)
}

/// Weights `[n, k]`.
pub fn weight(w: Global<bf16>, n: usize, k: usize) -> Matrix {
    matrix(w, n, k, WEIGHT_ROWS)
}

/// Enqueues a product, cut as is best; `p.band` is chosen here.
///
/// # Safety
/// As [`Device::launch`]: addresses and maps as [`Gemm`] says.
///
/// # Errors
/// A refused launch.
pub unsafe fn enqueue(device: &Device, epilogue: Epilogue, p: Gemm) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p);
    let cut = Cut::best(epilogue, m, n, device);
    // SAFETY: the caller's word.
    unsafe { enqueue_cut(device, epilogue, cut, p) }
}

/// As [`enqueue`], cut as is said (what has no such kernel takes [`Cut::N256`]).
///
/// # Safety
/// As [`enqueue`].
///
/// # Errors
/// As [`enqueue`].
pub unsafe fn enqueue_cut(device: &Device, epilogue: Epilogue, cut: Cut, p: Gemm) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p);
    if m == 0 || n == 0 {
        return Ok(());
    }
    // Bands of 8 were good at every size.
    let p = Gemm { band: 8, ..p };
    let cut = match (epilogue, cut) {
        (Epilogue::SwiGlu, Cut::N128) | (Epilogue::SwiGlu | Epilogue::Add, Cut::N192) => Cut::N256,
        _ => cut,
    };
    let at_once = if cut == Cut::N192 { u32::MAX } else { device.multiprocessors() / cut.together() };
    let blocks = cut.tiles(m, n).min(at_once) * cut.together();
    let shared = Gemm::shared_bytes(cut.weight_rows());
    // Tiles of 128 begin in turn: early most took 5 % to 16 % longer, presumably because blocks then get whatever multiprocessor is free, and those
    // that share tiles no longer ask L2 for them together. The others gain 1 % to 5 %.
    // SAFETY: the caller's word.
    unsafe {
        match (epilogue, cut) {
            (Epilogue::Qkv, Cut::N128) => device.launch::<gemm::gemm_qkv_n128>(blocks, shared, p),
            (Epilogue::Qkv, Cut::N192) => device.launch_early::<gemm::gemm_qkv_n192>(blocks, shared, p),
            (Epilogue::Qkv, Cut::N256) => device.launch_early::<gemm::gemm_qkv_n256>(blocks, shared, p),
            (Epilogue::Qkv, Cut::Pair) => device.launch_early::<gemm::gemm_qkv_pair>(blocks, shared, p),
            (Epilogue::SwiGlu, Cut::N128 | Cut::N192 | Cut::N256) => {
                device.launch_early::<gemm::gemm_swiglu_n256>(blocks, shared, p)
            }
            (Epilogue::SwiGlu, Cut::Pair) => device.launch_early::<gemm::gemm_swiglu_pair>(blocks, shared, p),
            (Epilogue::Add, Cut::N128) => device.launch::<gemm::gemm_add_n128>(blocks, shared, p),
            (Epilogue::Add, Cut::N192 | Cut::N256) => device.launch_early::<gemm::gemm_add_n256>(blocks, shared, p),
            (Epilogue::Add, Cut::Pair) => device.launch_early::<gemm::gemm_add_pair>(blocks, shared, p),
            (Epilogue::Plain, Cut::N128) => device.launch::<gemm::gemm_plain_n128>(blocks, shared, p),
            (Epilogue::Plain, Cut::N192) => device.launch_early::<gemm::gemm_plain_n192>(blocks, shared, p),
            (Epilogue::Plain, Cut::N256) => device.launch_early::<gemm::gemm_plain_n256>(blocks, shared, p),
            (Epilogue::Plain, Cut::Pair) => device.launch_early::<gemm::gemm_plain_pair>(blocks, shared, p),
        }
    }
}
