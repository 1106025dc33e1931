//! Launches of the GEMMs for many rows: the choice of the kernel of `gpu_kernels::gemm` and of its grid, and what its
//! tensor maps describe.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_std::tensor::Matrix;
use cuda_std::{Global, Kernel};
use gpu_kernels::gemm::{self, Gemm, GemmE4m3, TILE_ROWS};
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::stream::StreamMatrix;
use half::bf16;
use model::plan;

use crate::Error;
use crate::device::{Buffer, Device};
use crate::weights::DeviceWeights;

/// What a GEMM does with its sums. A row's *factor* is that of its RMS norm, which is applied to the sums (see
/// `gpu_kernels::norm`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// Multiplies each row by its factor, and makes queries, keys and values of it.
    Qkv,
    /// Multiplies each row by its factor, and writes it in f32.
    Write,
    /// Multiplies each row by its factor, and writes SwiGLU of gate and up.
    SwiGlu,
    /// Adds the sums to the residual stream and prepares the norm that follows.
    Add,
    /// Something else, by kernels of another crate.
    Other(&'static Family),
}

/// The kernels of an epilogue from outside this crate, one for each [`Cut`]. Families with the same name compare equal.
pub struct Family {
    name: &'static str,
    launch: [Launch; Cut::ALL.len()],
    launch_early: [Launch; Cut::ALL.len()],
    clusters_at_once: [fn(&Device, u32) -> u32; Cut::ALL.len()],
}

type Launch = unsafe fn(&Device, u32, u32, Gemm) -> Result<(), Error>;

impl Family {
    /// A family of these kernels, in the order of [`Cut::ALL`]. Messages call it `name`.
    pub const fn of<N128, N192, N256, Cluster2x1, Cluster4x2>(name: &'static str) -> Self
    where
        N128: Kernel<Params = Gemm>,
        N192: Kernel<Params = Gemm>,
        N256: Kernel<Params = Gemm>,
        Cluster2x1: Kernel<Params = Gemm>,
        Cluster4x2: Kernel<Params = Gemm>,
    {
        Self {
            name,
            launch: [
                Device::launch::<N128>,
                Device::launch::<N192>,
                Device::launch::<N256>,
                Device::launch::<Cluster2x1>,
                Device::launch::<Cluster4x2>,
            ],
            launch_early: [
                Device::launch_early::<N128>,
                Device::launch_early::<N192>,
                Device::launch_early::<N256>,
                Device::launch_early::<Cluster2x1>,
                Device::launch_early::<Cluster4x2>,
            ],
            clusters_at_once: [
                Device::clusters_at_once::<N128>,
                Device::clusters_at_once::<N192>,
                Device::clusters_at_once::<N256>,
                Device::clusters_at_once::<Cluster2x1>,
                Device::clusters_at_once::<Cluster4x2>,
            ],
        }
    }

    /// # Safety
    /// As [`Device::launch`].
    unsafe fn launch(&self, device: &Device, cut: Cut, blocks: u32, shared: u32, p: Gemm) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.launch[cut as usize](device, blocks, shared, p) }
    }

    /// # Safety
    /// As [`Device::launch_early`].
    unsafe fn launch_early(&self, device: &Device, cut: Cut, blocks: u32, shared: u32, p: Gemm) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.launch_early[cut as usize](device, blocks, shared, p) }
    }

    fn clusters_at_once(&self, device: &Device, cut: Cut, shared: u32) -> u32 {
        self.clusters_at_once[cut as usize](device, shared)
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// How a GEMM is cut into tiles. Every cut gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// 128 rows × 128 weight rows. Not for SwiGLU.
    N128,
    /// 128 rows × 192 weight rows. Two neighbouring CTAs cover 384 weight rows: each has 128 of its own, and of the
    /// 128 that they share each computes half of the rows. Not for SwiGLU, not for [`Add`](Epilogue::Add), and not with
    /// a bias.
    N192,
    /// 128 rows × 256 weight rows.
    N256,
    /// As [`N256`](Self::N256), in clusters of 2 × 1 CTAs that share the weights.
    Cluster2x1,
    /// As [`N256`](Self::N256), in clusters of 4 × 2 CTAs: the four above each other share weights, the two side by
    /// side share rows. SMs that such clusters do not fit run clusters of 2 × 1 in a second launch.
    Cluster4x2,
}

/// Calls a method of the device for the kernel of an epilogue and a cut.
macro_rules! of_kernel {
    ($epilogue:expr, $cut:expr, $device:ident.$method:ident($($argument:expr),*)) => {
        match ($epilogue, $cut) {
            (Epilogue::Qkv, Cut::N128) => $device.$method::<gemm::gemm_qkv_n128>($($argument),*),
            (Epilogue::Qkv, Cut::N192) => $device.$method::<gemm::gemm_qkv_n192>($($argument),*),
            (Epilogue::Qkv, Cut::N256) => $device.$method::<gemm::gemm_qkv_n256>($($argument),*),
            (Epilogue::Qkv, Cut::Cluster2x1) => $device.$method::<gemm::gemm_qkv_2x1>($($argument),*),
            (Epilogue::Qkv, Cut::Cluster4x2) => $device.$method::<gemm::gemm_qkv_4x2>($($argument),*),
            (Epilogue::Write, Cut::N128) => $device.$method::<gemm::gemm_write_n128>($($argument),*),
            (Epilogue::Write, Cut::N192) => $device.$method::<gemm::gemm_write_n192>($($argument),*),
            (Epilogue::Write, Cut::N256 | Cut::Cluster2x1 | Cut::Cluster4x2) => $device.$method::<gemm::gemm_write_n256>($($argument),*),
            (Epilogue::SwiGlu, Cut::N128 | Cut::N192 | Cut::N256) => $device.$method::<gemm::gemm_swiglu_n256>($($argument),*),
            (Epilogue::SwiGlu, Cut::Cluster2x1) => $device.$method::<gemm::gemm_swiglu_2x1>($($argument),*),
            (Epilogue::SwiGlu, Cut::Cluster4x2) => $device.$method::<gemm::gemm_swiglu_4x2>($($argument),*),
            (Epilogue::Add, Cut::N128) => $device.$method::<gemm::gemm_add_n128>($($argument),*),
            (Epilogue::Add, Cut::N192 | Cut::N256) => $device.$method::<gemm::gemm_add_n256>($($argument),*),
            (Epilogue::Add, Cut::Cluster2x1) => $device.$method::<gemm::gemm_add_2x1>($($argument),*),
            (Epilogue::Add, Cut::Cluster4x2) => $device.$method::<gemm::gemm_add_4x2>($($argument),*),
            (Epilogue::Other(family), cut) => family.$method($device, cut, $($argument),*),
        }
    };
}

impl Cut {
    /// Every cut.
    pub const ALL: [Self; 5] = [Self::N128, Self::N192, Self::N256, Self::Cluster2x1, Self::Cluster4x2];

    /// CTAs that take tiles together: how many above each other, and how many side by side.
    const fn together(self) -> [u32; 2] {
        match self {
            Self::N128 | Self::N256 => [1, 1],
            Self::N192 => [1, 2],
            Self::Cluster2x1 => [2, 1],
            Self::Cluster4x2 => [4, 2],
        }
    }

    /// The number of CTAs that take tiles together.
    const fn blocks(self) -> u32 {
        self.together()[0] * self.together()[1]
    }

    /// Rows and weight rows that such a group of CTAs covers at a time.
    const fn size(self) -> [u32; 2] {
        let [down, across] = self.together();
        [down * TILE_ROWS, if matches!(self, Self::N192) { 384 } else { across * self.weight_rows() }]
    }

    /// The number of tiles in `m` rows × `n` weight rows. Tiles that are taken together count as one.
    const fn tiles(self, m: u32, n: u32) -> u32 {
        let [rows, weight_rows] = self.size();
        m.div_ceil(rows) * n.div_ceil(weight_rows)
    }

    /// Weight rows of a tile, as [`Gemm::shared_bytes`] takes them.
    const fn weight_rows(self) -> u32 {
        match self {
            Self::N128 => 128,
            Self::N192 => 192,
            _ => 256,
        }
    }

    /// The cut with the least estimated time: rounds of tiles, times [the time of a
    /// round](crate::tuning::GemmTuning::rounds).
    fn best(device: &Device, epilogue: Epilogue, m: u32, n: u32, has_bias: bool) -> Self {
        let tuning = &device.capabilities().tuning().gemm;
        let cost = |cut: &Self| cut.cost(device, epilogue, m, n);
        let can = |cut: &Self| match cut {
            Self::N128 => epilogue != Epilogue::SwiGlu,
            Self::N192 => !has_bias && matches!(epilogue, Epilogue::Qkv | Epilogue::Write | Epilogue::Other(_)),
            Self::N256 => true,
            // `Write` has no kernels in clusters. For the others, sharing tiles pays with many rows.
            Self::Cluster2x1 | Self::Cluster4x2 if epilogue == Epilogue::Write => false,
            Self::Cluster2x1 => m >= tuning.cluster_rows,
            Self::Cluster4x2 => m >= tuning.cluster_rows || m.is_multiple_of(tuning.whole_cluster_rows),
        };
        Self::ALL.into_iter().filter(can).min_by_key(cost).unwrap_or(Self::N256)
    }

    /// The estimated time of a GEMM in this cut, in the units of
    /// [`GemmTuning::rounds`](crate::tuning::GemmTuning::rounds).
    fn cost(self, device: &Device, epilogue: Epilogue, m: u32, n: u32) -> u32 {
        let tuning = &device.capabilities().tuning().gemm;
        // 4 × 2 clusters need a second launch. In a GEMM of a single round it costs all that they gain.
        let launches = if self == Self::Cluster4x2 { tuning.second_launch } else { 0 };
        TileSchedule::new(device, epilogue, self, m, n).rounds * tuning.rounds[self as usize] + launches
    }
}

/// The host's part of the tile scheduler: how a GEMM's weight rows are divided between the clusters (or CTAs) of a
/// cut, and 2 × 1 clusters beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TileSchedule {
    /// The cut's clusters (or CTAs) that run at once.
    clusters: u32,
    /// The weight rows that those compute, from the first on. The 2 × 1 clusters compute the others.
    weight_rows: u32,
    /// 2 × 1 clusters that run beside them.
    clusters_2x1: u32,
    /// Tiles that a CTA takes, one after another.
    rounds: u32,
}

impl TileSchedule {
    /// The schedule of a GEMM of `m` rows and `n` weight rows.
    fn new(device: &Device, epilogue: Epilogue, cut: Cut, m: u32, n: u32) -> Self {
        let sms = device.sms();
        let shared = Gemm::shared_bytes(cut.weight_rows());
        let clusters = match cut {
            Cut::Cluster4x2 => of_kernel!(epilogue, cut, device.clusters_at_once(shared)),
            _ => sms / cut.blocks(),
        };
        Self::of(cut, clusters, sms, m, n)
    }

    /// The same schedule where `most` of the cut's clusters fit on `sms` SMs. With 4 × 2 clusters, as many of them run
    /// as possible, and 2 × 1 clusters on the SMs that remain, as long as that takes no more rounds than 2 × 1 clusters
    /// alone would.
    fn of(cut: Cut, most: u32, sms: u32, m: u32, n: u32) -> Self {
        if cut != Cut::Cluster4x2 {
            return Self { clusters: most, weight_rows: n, clusters_2x1: 0, rounds: cut.tiles(m, n).div_ceil(most) };
        }
        let [rows, width] = cut.size();
        let rounds = Cut::Cluster2x1.tiles(m, n).div_ceil(sms / 2);
        let schedule = |clusters: u32| Self {
            clusters,
            weight_rows: (rounds * clusters / m.div_ceil(rows) * width).min(n),
            clusters_2x1: sms.saturating_sub(clusters * cut.blocks()) / 2,
            rounds,
        };
        let fits =
            |schedule: &Self| Cut::Cluster2x1.tiles(m, n - schedule.weight_rows) <= rounds * schedule.clusters_2x1;
        (1..=most).rev().map(schedule).find(fits).unwrap_or(schedule(0))
    }
}

/// Orders the two launches of a GEMM in [4 × 2 clusters](Cut::Cluster4x2). Each queue needs one of its own.
pub struct Beside {
    word: Buffer<u32>,
    gemms: AtomicU32,
}

impl Beside {
    /// For GEMMs on the queue of `device`.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self { word: device.zeroed(1)?, gemms: AtomicU32::new(0) })
    }

    /// Parameters of the next GEMM's two launches.
    fn next(&self) -> [gemm::Beside; 2] {
        let number = self.gemms.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        [0, 1].map(|second| gemm::Beside { word: self.word.ptr_mut(), number, second })
    }
}

/// The estimated cost of a GEMM of `m` rows and `n` weight rows of `k` input features, for comparison with other GEMMs'
/// costs: it has no unit. It counts rounds of tiles, of which the last may leave SMs idle.
pub fn cost(device: &Device, epilogue: Epilogue, [m, n, k]: [u32; 3]) -> u64 {
    u64::from(Cut::best(device, epilogue, m, n, false).cost(device, epilogue, m, n)) * u64::from(k)
}

/// Rows and weight rows that the GEMM computes.
fn size(epilogue: Epilogue, p: &Gemm) -> (u32, u32) {
    let n = p.n - p.first_feature;
    (p.m - p.first_row, if epilogue == Epilogue::SwiGlu { 2 * n } else { n })
}

fn matrix(at: Global<bf16>, rows: usize, columns: usize, tile_rows: u32) -> Matrix {
    Matrix::dense(at.addr(), rows as u64, columns as u64, tile_rows)
}

/// The parameters of a layer's GEMM of `m` rows, without its input, the heads and where it writes. `residual` is the
/// residual stream, with spans. `eps` is that of its norms.
pub fn of_layer(weights: &DeviceWeights, layer: usize, of: &plan::Gemm, m: u32, residual: Residual, eps: f32) -> Gemm {
    let StreamMatrix { stream, base, blocks, n_tiles, k } = weights.stream.matrix(layer, of.matrix);
    Gemm {
        x: Default::default(),
        stream,
        base,
        blocks,
        n_tiles,
        out: Default::default(),
        y: Default::default(),
        norm: Norm { squares: residual.spans.read(), dim: residual.dim, eps },
        bias: weights.bias(layer, of),
        heads: Default::default(),
        residual,
        next_norm: weights.norm_after(layer, of).ptr(),
        codes: Default::default(),
        first_row: 0,
        m,
        first_feature: 0,
        n: of.n as u32,
        k,
        band: 0,
        beside: Default::default(),
    }
}

/// Describes bf16 `[rows, columns]` at `x` as what a GEMM reads.
pub fn rows(x: Global<bf16>, rows: usize, columns: usize) -> Matrix {
    matrix(x, rows, columns, TILE_ROWS)
}

/// Describes bf16 `[rows, columns]` at `y` as what a GEMM writes.
pub fn out(y: Global<bf16>, rows: usize, columns: usize) -> Matrix {
    matrix(y, rows, columns, gemm::BOX)
}

/// Enqueues a GEMM in the cut with the least estimated time. Chooses `p.band` and `p.beside` itself. Nobody else uses
/// `beside` meanwhile.
///
/// # Safety
/// As [`Device::launch`]: addresses and maps as [`Gemm`] says.
///
/// # Errors
/// A refused launch; [`Error::Recording`] if work is being recorded and the GEMM would take two launches.
pub unsafe fn enqueue(device: &Device, beside: &Beside, epilogue: Epilogue, p: Gemm) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p);
    if m == 0 || n == 0 {
        return Ok(());
    }
    let cut = Cut::best(device, epilogue, m, n, !p.bias.is_null());
    // SAFETY: the caller's word.
    unsafe { enqueue_cut(device, beside, epilogue, cut, p) }
}

/// As [`enqueue`], in this `cut`, or in [`Cut::N256`] if there is no such kernel.
///
/// # Safety
/// As [`enqueue`].
///
/// # Errors
/// As [`enqueue`].
pub unsafe fn enqueue_cut(
    device: &Device,
    beside: &Beside,
    epilogue: Epilogue,
    cut: Cut,
    p: Gemm,
) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p);
    if m == 0 || n == 0 {
        return Ok(());
    }
    let cut = match (epilogue, cut) {
        (Epilogue::SwiGlu, Cut::N128)
        | (Epilogue::SwiGlu | Epilogue::Add, Cut::N192)
        | (Epilogue::Write, Cut::Cluster2x1 | Cut::Cluster4x2) => Cut::N256,
        (_, Cut::N192) if !p.bias.is_null() => Cut::N256,
        _ => cut,
    };
    let schedule = TileSchedule::new(device, epilogue, cut, m, n);
    let border = p.first_feature + schedule.weight_rows / if epilogue == Epilogue::SwiGlu { 2 } else { 1 };
    // SAFETY: the caller's word; each launch has features of its own.
    unsafe {
        if border == p.n {
            return launch(device, epilogue, cut, schedule.clusters, p);
        }
        if border == p.first_feature {
            return launch(device, epilogue, Cut::Cluster2x1, schedule.clusters_2x1, p);
        }
        // A recording that is launched again would repeat the pair's number, and the second launch would not wait.
        let _enqueuing = device.refuse_while_recording("a GEMM in two launches, side by side,")?;
        let [first, second] = beside.next();
        launch(device, epilogue, cut, schedule.clusters, Gemm { n: border, beside: first, ..p })?;
        launch(
            device,
            epilogue,
            Cut::Cluster2x1,
            schedule.clusters_2x1,
            Gemm { first_feature: border, beside: second, ..p },
        )
    }
}

/// A GEMM of e4m3 with at most this many rounds of tiles is launched early. With more rounds, an early launch loses
/// more than it gains, because its CTAs get whatever SM is free.
const EARLY_ROUNDS: u32 = 3;

/// Enqueues a GEMM of e4m3. Chooses `p.gemm.band` itself.
///
/// # Safety
/// As [`Device::launch`]: addresses and maps as [`GemmE4m3`] says.
///
/// # Errors
/// A refused launch.
///
/// # Panics
/// If the epilogue is [another crate's](Epilogue::Other): a bug of the caller.
pub unsafe fn enqueue_e4m3(device: &Device, epilogue: Epilogue, p: GemmE4m3) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p.gemm);
    if m == 0 || n == 0 {
        return Ok(());
    }
    let (tuning, cut) = (&device.capabilities().tuning().gemm, Cut::N128);
    let p = GemmE4m3 { gemm: Gemm { band: tuning.band_rows[0] / TILE_ROWS, ..p.gemm }, ..p };
    let in_pairs = epilogue == Epilogue::SwiGlu && !p.gemm.codes.codes.is_null();
    let tiles = if in_pairs { cut.tiles(m, n) / 2 } else { cut.tiles(m, n) };
    // If there are SMs enough, two CTAs share a tile.
    let has_two = matches!(epilogue, Epilogue::Write | Epilogue::Add);
    let is_shared = has_two && m > TILE_ROWS / 2 && 2 * tiles <= device.sms();
    let blocks = if is_shared { 2 * tiles } else { tiles.min(device.sms()) };
    let shared = Gemm::shared_bytes(cut.weight_rows());
    let begins_early = tiles <= EARLY_ROUNDS * device.sms();
    macro_rules! launch {
        ($kernel:ty) => {
            // SAFETY: the caller's word.
            unsafe {
                match begins_early {
                    true => device.launch_early::<$kernel>(blocks, shared, p),
                    false => device.launch::<$kernel>(blocks, shared, p),
                }
            }
        };
    }
    match epilogue {
        Epilogue::Qkv => launch!(gemm::gemm_qkv_e4m3),
        Epilogue::Write if is_shared => launch!(gemm::gemm_write_shared_e4m3),
        Epilogue::Write => launch!(gemm::gemm_write_e4m3),
        Epilogue::SwiGlu if in_pairs => launch!(gemm::gemm_swiglu_coded_e4m3),
        Epilogue::SwiGlu => launch!(gemm::gemm_swiglu_e4m3),
        Epilogue::Add if is_shared => launch!(gemm::gemm_add_shared_e4m3),
        Epilogue::Add => launch!(gemm::gemm_add_e4m3),
        Epilogue::Other(family) => panic!("no kernel of e4m3 for {family:?}"),
    }
}

/// Whether SwiGLU of e4m3 writes `n` activations for each of `rows` rows as codes. That saves the launch that would
/// quantise them, but CTAs then take tiles in pairs. Where the last round of pairs has little to do, this costs as
/// much as the launch.
pub fn leaves_codes(device: &Device, rows: u32, n: u32) -> bool {
    let rounds = |tiles: u32| tiles.div_ceil(device.sms());
    let tiles = Cut::N128.tiles(rows, 2 * n);
    2 * rounds(tiles / 2) <= rounds(tiles)
}

/// Whether a GEMM is launched early. All cuts gain by that, except [`Cut::N128`] with several rounds of tiles, or with
/// many input features on more than half of the card. Presumably its CTAs then get whatever SM is free, and CTAs
/// that share rows or weights ask L2 for them at different times.
fn is_early(device: &Device, cut: Cut, m: u32, n: u32, k: u32) -> bool {
    let alone = device.sms() / if k > device.capabilities().tuning().gemm.long_k { 2 } else { 1 };
    cut != Cut::N128 || cut.tiles(m, n) <= alone
}

/// Enqueues one launch, of at most `at_once` CTAs or clusters.
unsafe fn launch(device: &Device, epilogue: Epilogue, cut: Cut, at_once: u32, p: Gemm) -> Result<(), Error> {
    let (m, n) = size(epilogue, &p);
    let (tuning, down) = (&device.capabilities().tuning().gemm, cut.together()[0]);
    let p = Gemm { band: tuning.band_rows[usize::from(down > 1)] / (TILE_ROWS * down), ..p };
    let at_once = if cut == Cut::N192 { u32::MAX } else { at_once };
    let blocks = cut.tiles(m, n).min(at_once) * cut.blocks();
    let shared = Gemm::shared_bytes(cut.weight_rows());
    // SAFETY: the caller's word.
    unsafe {
        if is_early(device, cut, m, n, p.k) {
            of_kernel!(epilogue, cut, device.launch_early(blocks, shared, p))
        } else {
            of_kernel!(epilogue, cut, device.launch(blocks, shared, p))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Cut, TileSchedule};

    /// Rows and weight rows of Qwen3-8B's GEMMs, and some that are no multiples of the tiles.
    const PRODUCTS: [(u32, u32); 7] =
        [(2048, 6144), (2048, 24576), (2048, 4096), (8192, 6144), (8192, 24576), (2100, 1152), (300, 128)];

    #[test]
    fn every_weight_row_is_scheduled_and_no_round_is_wasted() {
        for (m, n) in PRODUCTS {
            for (most, sms) in [(15, 132), (16, 132), (13, 114), (1, 9), (0, 132), (1, 4)] {
                let cut = Cut::Cluster4x2;
                let schedule = TileSchedule::of(cut, most, sms, m, n);
                let of_2x1 = n - schedule.weight_rows;
                assert!(schedule.clusters <= most, "{schedule:?}");
                assert!(of_2x1 == 0 || schedule.weight_rows.is_multiple_of(cut.size()[1]), "{schedule:?}");
                assert!(cut.tiles(m, schedule.weight_rows) <= schedule.rounds * schedule.clusters, "{schedule:?}");
                assert!(Cut::Cluster2x1.tiles(m, of_2x1) <= schedule.rounds * schedule.clusters_2x1, "{schedule:?}");
                assert!(
                    of_2x1 == 0 || schedule.clusters * cut.blocks() + schedule.clusters_2x1 * 2 <= sms,
                    "{schedule:?}"
                );
                let alone = TileSchedule::of(Cut::Cluster2x1, sms / 2, sms, m, n);
                assert_eq!(schedule.rounds, alone.rounds, "{schedule:?}");
            }
        }
    }

    #[test]
    fn most_of_large_gemms_is_done_in_4x2_clusters() {
        for (m, n) in PRODUCTS.into_iter().filter(|(m, _)| m.is_multiple_of(512)) {
            let schedule = TileSchedule::of(Cut::Cluster4x2, 15, 132, m, n);
            assert!(schedule.clusters >= 14 && schedule.weight_rows * 10 > n * 8, "{m} x {n}: {schedule:?}");
        }
    }

    #[test]
    fn without_large_clusters_small_ones_do_all() {
        let schedule = TileSchedule::of(Cut::Cluster4x2, 0, 132, 2048, 4096);
        assert_eq!(schedule, TileSchedule { clusters: 0, weight_rows: 0, clusters_2x1: 66, rounds: 2 });
    }
}
