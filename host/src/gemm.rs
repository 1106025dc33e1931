//! Products for many rows: which kernel of `gpu_kernels::gemm` and which grid, and what its tensor maps describe.

use cuda_std::{Global, GlobalMut};
use cuda_std::tensor::Matrix;
use gpu_kernels::gemm::{self, DEPTH, Gemm, TILE_ROWS, WEIGHT_ROWS};
use half::bf16;

use crate::Error;
use crate::device::{Buffer, Device};

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
    /// 128 rows × 256 weight rows.
    N256,
    /// As [`N256`](Self::N256), with blocks in pairs that share the weights.
    Pair,
}

impl Cut {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::N128, Self::N256, Self::Pair];

    const fn weight_rows(self) -> u32 {
        if matches!(self, Self::N128) { 128 } else { 256 }
    }

    /// Blocks that take tiles together.
    const fn cluster(self) -> u32 {
        if matches!(self, Self::Pair) { 2 } else { 1 }
    }

    /// Tiles (or pairs of tiles) of so many rows and weight rows.
    const fn tiles(self, m: u32, n: u32) -> u32 {
        m.div_ceil(TILE_ROWS * self.cluster()) * n.div_ceil(self.weight_rows())
    }

    /// Groups of blocks that take so many tiles.
    fn groups(self, tiles: u32, device: &Device) -> u32 {
        tiles.min(device.multiprocessors() / self.cluster())
    }

    /// The one that is done first, and whether the tiles of the last turn are shared: slots of input features of the block that has most, times what a slot
    /// takes (with 128 weight rows it is somewhat more than half the work of one with 256; measured).
    fn best(epilogue: Epilogue, m: u32, n: u32, k: u32, device: &Device) -> (Self, bool) {
        /// What it takes to leave sums in memory and to take them up again, in slots.
        const HANDING_OVER: u32 = 6;
        let cost = |(cut, shared): &(Self, bool)| {
            let tiles = cut.tiles(m, n);
            let groups = cut.groups(tiles, device);
            let slots = if *shared {
                tiles / groups * (k / DEPTH) + Gemm::share(tiles, groups, k) / DEPTH + HANDING_OVER
            } else {
                tiles.div_ceil(groups) * (k / DEPTH)
            };
            slots
                * match cut {
                    Self::N128 => 56,
                    Self::N256 => 100,
                    Self::Pair => 99,
                }
        };
        let can = |(cut, shared): &(Self, bool)| {
            let tiles = cut.tiles(m, n);
            (match cut {
                Self::N128 => epilogue != Epilogue::SwiGlu,
                Self::N256 => true,
                // Sharing weights pays with many rows; the emulator has no clusters.
                Self::Pair => m >= 2048 && !device.is_emulator(),
                // Nor do its blocks all run at once.
            }) && (!shared || !device.is_emulator() && Gemm::share(tiles, cut.groups(tiles, device), k) > 0)
        };
        let all = [false, true].into_iter().flat_map(|shared| Self::ALL.map(|cut| (cut, shared)));
        all.filter(can).min_by_key(cost).unwrap_or((Self::N256, false))
    }
}

/// Memory by which blocks share tiles: one launch at a time uses it.
pub struct Shared {
    sums: Buffer<f32>,
    progress: Buffer<u32>,
}

impl Shared {
    /// Bytes of it.
    pub fn bytes(device: &Device) -> u64 {
        u64::from(device.multiprocessors()) * u64::from(Gemm::sums(256) * 4 + 8)
    }

    /// For every product on the device.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let tiles = device.multiprocessors() as usize;
        Ok(Self { sums: device.zeroed(tiles * Gemm::sums(256) as usize)?, progress: device.zeroed(2 * tiles)? })
    }

    /// Of [`Gemm::sums`] and [`Gemm::progress`].
    pub fn ptrs(&self) -> (GlobalMut<f32>, GlobalMut<u32>) {
        (self.sums.ptr_mut(), self.progress.ptr_mut())
    }
}

/// Rows and weight rows of a product.
fn size(epilogue: Epilogue, p: &Gemm) -> (u32, u32) {
    let n = p.n - p.first_feature;
    (p.m - p.first_row, if epilogue == Epilogue::SwiGlu { 2 * n } else { n })
}

fn matrix(at: Global<bf16>, rows: usize, columns: usize, tile_rows: u32) -> Matrix {
    Matrix { address: at.addr(), rows: rows as u64, columns: columns as u64, tile_rows }
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

/// Enqueues a product, cut as is best; `p.band` and `p.share` are chosen here.
///
/// # Safety
/// As [`Device::launch`]: addresses and maps as [`Gemm`] says.
///
/// # Errors
/// A refused launch.
pub unsafe fn enqueue(device: &Device, epilogue: Epilogue, p: Gemm) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p);
    let (cut, shared) = Cut::best(epilogue, m, n, p.k, device);
    // SAFETY: the caller's word.
    unsafe { enqueue_cut(device, epilogue, cut, shared, p) }
}

/// As [`enqueue`], cut as is said (SwiGLU has no [`Cut::N128`], and takes [`Cut::N256`]), with the tiles of the last turn shared or whole.
///
/// # Safety
/// As [`enqueue`].
///
/// # Errors
/// As [`enqueue`].
pub unsafe fn enqueue_cut(
    device: &Device,
    epilogue: Epilogue,
    cut: Cut,
    shared: bool,
    p: Gemm,
) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p);
    if m == 0 || n == 0 {
        return Ok(());
    }
    let cut = if epilogue == Epilogue::SwiGlu && cut == Cut::N128 { Cut::N256 } else { cut };
    let tiles = cut.tiles(m, n);
    let groups = cut.groups(tiles, device);
    // Bands of 8 were good at every size.
    let p = Gemm { band: 8, share: if shared { Gemm::share(tiles, groups, p.k) } else { 0 }, ..p };
    let blocks = groups * cut.cluster();
    let bytes = Gemm::shared_bytes(cut.weight_rows());
    // Tiles of 128 begin in turn: early most took 5 % to 16 % longer, presumably because blocks then get whatever multiprocessor is free, and those
    // that share tiles no longer ask L2 for them together. The others gain 1 % to 5 %.
    // SAFETY: the caller's word.
    unsafe {
        match (epilogue, cut) {
            (Epilogue::Qkv, Cut::N128) => device.launch::<gemm::gemm_qkv_n128>(blocks, bytes, p),
            (Epilogue::Qkv, Cut::N256) => device.launch_early::<gemm::gemm_qkv_n256>(blocks, bytes, p),
            (Epilogue::Qkv, Cut::Pair) => device.launch_early::<gemm::gemm_qkv_pair>(blocks, bytes, p),
            (Epilogue::SwiGlu, Cut::N128 | Cut::N256) => {
                device.launch_early::<gemm::gemm_swiglu_n256>(blocks, bytes, p)
            }
            (Epilogue::SwiGlu, Cut::Pair) => device.launch_early::<gemm::gemm_swiglu_pair>(blocks, bytes, p),
            (Epilogue::Add, Cut::N128) => device.launch::<gemm::gemm_add_n128>(blocks, bytes, p),
            (Epilogue::Add, Cut::N256) => device.launch_early::<gemm::gemm_add_n256>(blocks, bytes, p),
            (Epilogue::Add, Cut::Pair) => device.launch_early::<gemm::gemm_add_pair>(blocks, bytes, p),
            (Epilogue::Plain, Cut::N128) => device.launch::<gemm::gemm_plain_n128>(blocks, bytes, p),
            (Epilogue::Plain, Cut::N256) => device.launch_early::<gemm::gemm_plain_n256>(blocks, bytes, p),
            (Epilogue::Plain, Cut::Pair) => device.launch_early::<gemm::gemm_plain_pair>(blocks, bytes, p),
        }
    }
}
