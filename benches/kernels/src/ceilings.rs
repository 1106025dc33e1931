//! What the card itself can do, measured by kernels that do nothing else. The benchmarks compare their figures with
//! these limits.
//!
//! - [`ceiling_read`] reads memory in 16-byte loads, eight in flight per lane. Its checksum keeps the compiler from
//!   dropping the loads, and lets the kernel be checked.
//! - [`ceiling_read_bulk`] reads memory by bulk copies into a ring in shared memory, as the decode kernel does. Only on
//!   Hopper.
//! - [`ceiling_copy`] reads and writes.
//! - [`ceiling_mma`] multiplies fragments that stay in registers, with eight independent MMAs a warp, so that it waits
//!   for nothing but the tensor cores. It measures `mma.sync`, which every kernel here uses; Hopper's `wgmma` is
//!   faster.
//! - [`ceiling_launch`] does nothing: it measures what a launch costs.
//!
//! # Safety
//! A launch has memory, a grid and shared memory as its parameter block says. While it runs nobody else writes what it
//! reads, or uses what it writes.

#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
use cuda_std::bulk::{self, Barrier};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
use cuda_std::shared;
use cuda_std::{Global, GlobalMut, device, kernel, mma, thread, warp};
use gpu_kernels::unroll;

/// Threads of a CTA of [`ceiling_read`] and [`ceiling_copy`].
pub const THREADS: u32 = 1024;
/// Bytes of a load.
pub const UNIT_BYTES: usize = 16;
/// Threads of a CTA of [`ceiling_read_bulk`]: a warp that starts copies, and the threads that read what has arrived.
pub const BULK_THREADS: u32 = 32 + READERS;
const READERS: u32 = 256;
/// Bytes of a stage of the ring, and of the copies that fill it, one by each lane: a single large copy is slower.
const STAGE_BYTES: u32 = 16384;
const PIECE_BYTES: u32 = 2048;
/// Stages of the ring, and the most that are being filled at a time: with more, memory is slower.
const STAGES: u32 = 12;
const UNDER_WAY: u32 = 5;
/// Dynamic shared memory of a CTA of [`ceiling_read_bulk`]: the stages, then two barriers for each.
pub const BULK_SHARED_BYTES: u32 = STAGES * (STAGE_BYTES + 16);
/// Threads of a CTA of [`ceiling_mma`].
pub const MMA_THREADS: u32 = 256;

/// Parameters of [`ceiling_read`] and [`ceiling_read_bulk`]. Grid: any; one CTA an SM fills the card. Shared memory:
/// none, and [`BULK_SHARED_BYTES`], respectively.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct ReadAll {
    /// `units * 16` bytes, 16-byte aligned.
    pub from: Global<u8>,
    /// `[blocks, 32]` (`[blocks, 8]` with bulk copies): for each warp that reads, the exclusive or of all words that it
    /// reads. Out.
    pub sums: GlobalMut<u32>,
    /// Loads to make, of [`UNIT_BYTES`].
    pub units: u64,
}

/// Parameters of [`ceiling_copy`]. Grid: any. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct CopyAll {
    /// `units * 16` bytes, 16-byte aligned.
    pub from: Global<u8>,
    /// As many bytes, elsewhere. Out.
    pub to: GlobalMut<u8>,
    /// Loads to make, of [`UNIT_BYTES`].
    pub units: u64,
}

/// Parameters of [`ceiling_mma`]. Grid: any; four CTAs an SM fill the card. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Multiply {
    /// `[32 lanes, 16]` words, 16-byte aligned: two A fragments and four B fragments of every lane.
    pub operands: Global<u32>,
    /// `[blocks, 256]`: the sum of each lane's accumulators. Out.
    pub sums: GlobalMut<f32>,
    /// How often to multiply the two A fragments by the four B fragments.
    pub rounds: u32,
}

impl Multiply {
    /// Multiplications and additions of a launch of `blocks` CTAs: 2 × 16 × 8 × 16 an MMA, and eight MMAs a round and
    /// warp.
    pub const fn operations(blocks: u32, rounds: u32) -> u64 {
        blocks as u64 * (MMA_THREADS as u64 / 32) * rounds as u64 * 8 * (2 * 16 * 8 * 16)
    }
}

/// Parameters of [`ceiling_launch`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Nothing {
    /// Not used.
    pub nothing: u32,
}

/// Reads memory.
#[kernel(threads = 1024, module = "bench")]
pub unsafe fn ceiling_read(p: ReadAll) {
    let step = thread::grid_dim_x() as u64 * THREADS as u64;
    let mut i = thread::block_idx_x() as u64 * THREADS as u64 + thread::thread_idx_x() as u64;
    let mut sum = 0;
    while i + 7 * step < p.units {
        let mut data = [[0u32; 4]; 8];
        unroll!(J < 8; {
            // SAFETY: the launcher's word; there is such a unit.
            data[J] = unsafe { p.from.load16_stream((i + J as u64 * step) as usize * UNIT_BYTES) };
        });
        unroll!(J < 8; {
            sum ^= data[J][0] ^ data[J][1] ^ data[J][2] ^ data[J][3];
        });
        i += 8 * step;
    }
    while i < p.units {
        // SAFETY: the launcher's word; there is such a unit.
        let data = unsafe { p.from.load16_stream(i as usize * UNIT_BYTES) };
        sum ^= data[0] ^ data[1] ^ data[2] ^ data[3];
        i += step;
    }
    // SAFETY: the launcher's word; all warps of the CTA come here.
    unsafe { store_sum(&p, THREADS / 32, sum) };
}

/// Stores the exclusive or of what a warp has read. The warp is one of the first `many` of its CTA.
///
/// # Safety
/// All lanes of such a warp call it, once. There is a sum for each such warp of each CTA.
#[device]
unsafe fn store_sum(p: &ReadAll, many: u32, mut sum: u32) {
    let mut distance = 16;
    while distance > 0 {
        sum ^= warp::shuffle_xor(sum, distance);
        distance /= 2;
    }
    if thread::lane_id() == 0 {
        // SAFETY: the caller's word; the sum is this warp's own.
        unsafe { p.sums.store((thread::block_idx_x() * many + thread::warp_id()) as usize, sum) };
    }
}

/// The full barrier and the empty barrier of a stage.
///
/// # Safety
/// There is such a stage, and the CTA has [`BULK_SHARED_BYTES`].
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[device]
unsafe fn barriers(stage: u32) -> [Barrier; 2] {
    // SAFETY: the caller's word; all barriers lie behind the stages.
    [0, 8].map(|which| unsafe { Barrier::at(shared::dynamic(STAGES * STAGE_BYTES + stage * 16 + which)) })
}

/// Reads memory by bulk copies.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[kernel(threads = 288, module = "bench")]
pub unsafe fn ceiling_read_bulk(p: ReadAll) {
    let thread = thread::thread_idx_x();
    if thread == 0 {
        let mut stage = 0;
        while stage < STAGES {
            // SAFETY: the launcher's word: shared memory has room for them, and nobody uses it yet.
            unsafe {
                let [full, free] = barriers(stage);
                full.init(1);
                free.init(READERS / 32);
            }
            stage += 1;
        }
        bulk::fence_init();
    }
    thread::sync_threads();
    const UNITS: u32 = STAGE_BYTES / UNIT_BYTES as u32;
    // A CTA's stages are contiguous.
    let stages = p.units.div_ceil(u64::from(UNITS)).div_ceil(u64::from(thread::grid_dim_x()));
    let own = stages * u64::from(UNITS);
    let mut first = u64::from(thread::block_idx_x()) * own;
    let end = p.units.min(first + own);
    let (mut stage, mut parity, mut sum, mut filled) = (0, 0, 0, 0);
    while first < end {
        let units = u64::from(UNITS).min(end - first) as u32;
        // SAFETY: the launcher's word; there is such a stage.
        let ([full, free], place) = unsafe { (barriers(stage), shared::dynamic::<u8>(stage * STAGE_BYTES)) };
        if thread >= READERS {
            let lane = thread - READERS;
            // SAFETY: the launcher's word. The barriers were made before the CTA synchronised. They are at most a phase
            // ahead: this warp alone fills stages, each when all that read it have freed it. The barrier expects as
            // many bytes as the lanes copy, all of them before `end`.
            unsafe {
                if filled >= UNDER_WAY {
                    let back = stage >= UNDER_WAY;
                    let [oldest, _] = barriers(if back { stage - UNDER_WAY } else { stage + STAGES - UNDER_WAY });
                    oldest.wait(if back { parity } else { parity ^ 1 });
                }
                filled += 1;
                free.wait(parity ^ 1);
                let bytes = units * UNIT_BYTES as u32;
                if lane == 0 {
                    full.arrive_expect_tx(bytes);
                }
                warp::sync_warp();
                let piece = lane * PIECE_BYTES;
                if piece < bytes {
                    let from = p.from.at(first as usize * UNIT_BYTES + piece as usize);
                    bulk::copy_to_shared_once(place.at(piece as usize), from, PIECE_BYTES.min(bytes - piece), full);
                }
            }
        } else {
            // SAFETY: the barriers were made before the CTA synchronised. The stage has `units` units once it is full,
            // and is not filled again before all warps that read it have freed it: each once, when its lanes have what
            // they read.
            unsafe {
                full.wait(parity);
                unroll!(I < 4; {
                    let unit = thread + I as u32 * READERS;
                    if unit < units {
                        let data = place.at(unit as usize * UNIT_BYTES).cast::<u32>().load16(0);
                        sum ^= data[0] ^ data[1] ^ data[2] ^ data[3];
                    }
                });
                // The data must have been read when the stage is released.
                sum = thread::opaque(sum);
                warp::sync_warp();
                if thread.is_multiple_of(32) {
                    free.arrive();
                }
            }
        }
        stage += 1;
        if stage == STAGES {
            (stage, parity) = (0, parity ^ 1);
        }
        first += u64::from(UNITS);
    }
    if thread < READERS {
        // SAFETY: the launcher's word; all warps that read come here.
        unsafe { store_sum(&p, READERS / 32, sum) };
    }
}

/// Copies memory.
#[kernel(threads = 1024, module = "bench")]
pub unsafe fn ceiling_copy(p: CopyAll) {
    // SAFETY: the launcher's word: memory is as the parameter block says. Each unit that there is, one lane reads and
    // writes.
    unsafe {
        let step = thread::grid_dim_x() as u64 * THREADS as u64;
        let mut i = thread::block_idx_x() as u64 * THREADS as u64 + thread::thread_idx_x() as u64;
        while i + 7 * step < p.units {
            let mut data = [[0u32; 4]; 8];
            unroll!(J < 8; {
                data[J] = p.from.load16_stream((i + J as u64 * step) as usize * UNIT_BYTES);
            });
            unroll!(J < 8; {
                p.to.store16((i + J as u64 * step) as usize * UNIT_BYTES, data[J]);
            });
            i += 8 * step;
        }
        while i < p.units {
            p.to.store16(i as usize * UNIT_BYTES, p.from.load16_stream(i as usize * UNIT_BYTES));
            i += step;
        }
    }
}

/// Multiplies.
#[kernel(threads = 256, module = "bench")]
pub unsafe fn ceiling_mma(p: Multiply) {
    // SAFETY: the launcher's word; these are the lane's 16 words.
    let [a, b] = unsafe {
        let words = p.operands.at((thread::lane_id() * 16) as usize);
        [[words.load16(0), words.load16(4)], [words.load16(8), words.load16(12)]]
    };
    let b = [[b[0][0], b[0][1]], [b[0][2], b[0][3]], [b[1][0], b[1][1]], [b[1][2], b[1][3]]];
    let mut acc = [[0f32; 4]; 8];
    let mut round = 0;
    while round < p.rounds {
        unroll!(J < 8; {
            acc[J] = mma::m16n8k16_bf16(acc[J], a[J / 4], b[J % 4]);
        });
        round += 1;
    }
    let mut sum = 0.0;
    unroll!(J < 8; {
        sum += (acc[J][0] + acc[J][1]) + (acc[J][2] + acc[J][3]);
    });
    // SAFETY: the launcher's word; the sum is this lane's own.
    unsafe { p.sums.store((thread::block_idx_x() * MMA_THREADS + thread::thread_idx_x()) as usize, sum) };
}

/// Does nothing.
#[kernel(threads = 32, module = "bench")]
pub unsafe fn ceiling_launch(_p: Nothing) {}
