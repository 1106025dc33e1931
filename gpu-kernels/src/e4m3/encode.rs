//! Recovers the e4m3 codes of weights. A checkpoint's codes become bf16 on their way to the device,
//! `bf16(code × scale)`.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, thread, warp};

use super::{GROUP, groups};
use crate::linear::SLICE;
use crate::stream::{CHUNK_FEATURES, GROUP_N_TILES, SLICE_BYTES, SLICES, SLICES_APART, STEP_BYTES, StreamMatrix};

const THREADS: u32 = 256;
/// Bytes of codes that a thread finds at a time: one feature's, for half of an MMA's inputs.
const TOGETHER_BYTES: u32 = 16;
/// Bytes of a core matrix: as many bytes of each of eight features.
const CORE_BYTES: u32 = 8 * TOGETHER_BYTES;
/// Bytes from the core matrices of a slice's lower eight features to those of its upper eight.
const CORE_ROWS_APART: u32 = SLICE_BYTES / 2;
const _: () = assert!(GROUP == 2 * SLICE && STEP_BYTES == 2 * CORE_BYTES && CORE_ROWS_APART == 4 * STEP_BYTES);

/// Parameters of [`encode_e4m3`]. Grid: (N-tiles, chunks of [`to`](Self::to)'s inputs).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct EncodeE4m3 {
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them; inputs are a multiple of [`GROUP`].
    pub from: StreamMatrix,
    /// Where pairs of codes go: a matrix with as many N-tiles, and half as many inputs.
    pub to: StreamMatrix,
    /// The stream of `to`, for writing.
    pub codes: GlobalMut<bf16>,
    /// As [`Weights::scales`](super::Weights::scales), of this matrix.
    pub scales: Global<f32>,
    /// A counter, to which each warp adds 1 that has found a weight which is no code times its scale.
    pub strange: GlobalMut<u32>,
}

/// The value of a code. An f32 with the code's bits, moved to where it has its own exponent and mantissa, is 2^-120 of
/// that.
#[device]
fn value(code: u32) -> f32 {
    const FACTOR: f32 = f32::from_bits((127 + 120) << 23);
    f32::from_bits((code & 0x80) << 24 | (code & 0x7f) << 20) * FACTOR
}

/// Finds the codes of weights from the scales that made them; beyond the inputs codes are zeros. A code is the quotient
/// of weight and scale, rounded to the nearest: rounding to bf16 has moved a weight by at most 2^-9 of it, too little
/// to change the code.
#[kernel(threads = THREADS)]
pub unsafe fn encode_e4m3(p: EncodeE4m3) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (n_tile, q) = (thread::block_idx_x(), thread::block_idx_y());
        let ((from_slices, from_own), (to_slices, to_own)) = (p.from.slices(n_tile), p.to.slices(n_tile));
        let from = p.from.stream.cast::<u8>().at(from_own as usize);
        let to = p.codes.cast::<u8>().at(to_slices.at(q * SLICES) as usize + to_own as usize);
        let scales = p.scales.at((n_tile / GROUP_N_TILES * groups(p.from.k) * 4) as usize);
        let mut strange = false;
        let mut piece = thread::thread_idx_x();
        while piece < SLICES * SLICE_BYTES / TOGETHER_BYTES {
            let slice = piece / (SLICE_BYTES / TOGETHER_BYTES);
            let within = piece % (SLICE_BYTES / TOGETHER_BYTES) * TOGETHER_BYTES;
            let group = q * SLICES + slice;
            let mut codes = [0; 4];
            if group * GROUP < p.from.k {
                let (upper, step) = (within / CORE_ROWS_APART, within % CORE_ROWS_APART / STEP_BYTES);
                let (half, feature) = (within % STEP_BYTES / CORE_BYTES, within % CORE_BYTES);
                let scale = scales.load_nc((group * 4 + upper) as usize);
                // A bf16 MMA has 16 inputs.
                let instruction = step % 2 * 2 + half;
                let place = upper * CORE_ROWS_APART + instruction * STEP_BYTES + feature;
                let from = from.at(from_slices.at(2 * group + step / 2) as usize + place as usize);
                unroll!(H < 2; {
                    let pairs = from.at(H * CORE_BYTES as usize).load16_nc(0);
                    unroll!(I < 2; {
                        let mut quotients = [0.0; 4];
                        let mut weights = [0; 4];
                        unroll!(J < 4; {
                            let pair = pairs[2 * I + J / 2];
                            let w = math::unpack_bf16(pair)[J % 2];
                            weights[J] = pair >> (J % 2 * 16) & 0xffff;
                            quotients[J] = if scale == 0.0 { w } else { w / scale };
                        });
                        let word = math::pack_e4m3(quotients);
                        unroll!(J < 4; {
                            let again = math::to_bf16(value(word >> (8 * J)) * scale);
                            strange |= u32::from(again.to_bits()) != weights[J];
                        });
                        codes[2 * H + I] = word;
                    });
                });
            }
            to.at((slice * SLICES_APART + within) as usize).cast::<u32>().store16(0, codes);
            piece += THREADS;
        }
        if warp::any(strange) && thread::lane_id() == 0 {
            atomic::fetch_add(p.strange, 0, 1, Ordering::Relaxed, Scope::Device);
        }
    }
}

const _: () = assert!(CHUNK_FEATURES == SLICES * SLICE);
