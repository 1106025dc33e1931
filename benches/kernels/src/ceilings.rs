//! What the card itself can do, measured by kernels that do nothing else: the limits that the benchmarks set figures
//! beside.
//!
//! - [`ceiling_read`] reads memory in 16-byte loads, eight in flight a lane. Its checksum keeps the compiler honest,
//!   and the check of it the kernel.
//! - [`ceiling_copy`] reads and writes.
//! - [`ceiling_mma`] multiplies fragments that stay in registers, eight independent MMAs a warp, so that nothing but
//!   the tensor cores is waited for. It measures `mma.sync`, which every kernel here uses; Hopper's `wgmma` is faster.
//! - [`ceiling_launch`] does nothing: what a launch costs.

use cuda_std::{Global, GlobalMut, kernel, mma, thread, warp};
use gpu_kernels::unroll;

/// Threads of a block of [`ceiling_read`] and [`ceiling_copy`].
pub const THREADS: u32 = 1024;
/// Bytes of a load.
pub const UNIT_BYTES: usize = 16;
/// Threads of a block of [`ceiling_mma`].
pub const MMA_THREADS: u32 = 256;

/// Parameters of [`ceiling_read`]. Grid: any; one block an SM fills it. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct ReadAll {
    /// `units * 16` bytes, 16-byte aligned.
    pub from: Global<u8>,
    /// `[blocks, 32]` a word for each warp of the grid: all that it read, exclusive-ored. Out.
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
    /// As much, elsewhere. Out.
    pub to: GlobalMut<u8>,
    /// Loads to make, of [`UNIT_BYTES`].
    pub units: u64,
}

/// Parameters of [`ceiling_mma`]. Grid: any; four blocks an SM fill it. No shared memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Multiply {
    /// `[32 lanes, 16]` words, 16-byte aligned: two A fragments and four B fragments of every lane.
    pub operands: Global<u32>,
    /// `[blocks, 256]` the sum of a lane's accumulators. Out.
    pub sums: GlobalMut<f32>,
    /// How often to multiply the two by the four.
    pub rounds: u32,
}

impl Multiply {
    /// Multiplications and additions of a launch of `blocks` blocks: 2 × 16 × 8 × 16 a MMA, eight MMAs a round and
    /// warp.
    pub const fn operations(blocks: u32, rounds: u32) -> u64 {
        blocks as u64 * (MMA_THREADS as u64 / 32) * rounds as u64 * 8 * (2 * 16 * 8 * 16)
    }
}

/// Parameters of [`ceiling_launch`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Nothing {
    /// Not looked at.
    pub nothing: u32,
}

/// Reads memory.
#[kernel(threads = 1024, module = "bench")]
pub unsafe fn ceiling_read(p: ReadAll) {
    unsafe {
        let step = thread::grid_dim_x() as u64 * THREADS as u64;
        let mut i = thread::block_idx_x() as u64 * THREADS as u64 + thread::thread_idx_x() as u64;
        let mut sum = 0;
        while i + 7 * step < p.units {
            let mut data = [[0u32; 4]; 8];
            unroll!(J < 8; {
                data[J] = p.from.load16_stream((i + J as u64 * step) as usize * UNIT_BYTES);
            });
            unroll!(J < 8; {
                sum ^= data[J][0] ^ data[J][1] ^ data[J][2] ^ data[J][3];
            });
            i += 8 * step;
        }
        while i < p.units {
            let data = p.from.load16_stream(i as usize * UNIT_BYTES);
            sum ^= data[0] ^ data[1] ^ data[2] ^ data[3];
            i += step;
        }
        let mut distance = 16;
        while distance > 0 {
            sum ^= warp::shuffle_xor(sum, distance);
            distance /= 2;
        }
        if thread::lane_id() == 0 {
            p.sums.store((thread::block_idx_x() * (THREADS / 32) + thread::warp_id()) as usize, sum);
        }
    }
}

/// Copies memory.
#[kernel(threads = 1024, module = "bench")]
pub unsafe fn ceiling_copy(p: CopyAll) {
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
    unsafe {
        let words = p.operands.at((thread::lane_id() * 16) as usize);
        let a = [words.load16(0), words.load16(4)];
        let b = [words.load16(8), words.load16(12)];
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
        p.sums.store((thread::block_idx_x() * MMA_THREADS + thread::thread_idx_x()) as usize, sum);
    }
}

/// Does nothing.
#[kernel(threads = 32, module = "bench")]
pub unsafe fn ceiling_launch(_p: Nothing) {}
