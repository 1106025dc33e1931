//! The kernels that make codes of weights, and weights of codes.
//!
//! # Safety
//! `p` is a launch's parameter block, and memory, grid and threads are as that and the kernel say. Nobody else writes
//! the codes or the stream that are made.

#[cfg(not(target_arch = "nvptx64"))]
use cuda_std::Kernel;
use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, thread, warp};

use super::{
    Code, Fp8, GROUP, GROUPS, Int4, Scale, both_factors, chunk_at, parts, put_words, second_at, slice_at, words,
};
use crate::linear::{K_PARTIALS, N_TILE, SLICE};
use crate::stream::{
    CHUNK_BYTES, CHUNK_FEATURES, GROUP_N_TILES, SLICE_BYTES, SLICES, SLICES_APART, STEP_BYTES, StreamMatrix, core_word,
};

/// Parameters of [`quantize_int4`], [`quantize_int4_f16`] and [`quantize_fp8`]. Grid: (N-tiles, chunks of the inputs).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Quantize {
    /// The weights, as [`lay_out`](crate::stream::lay_out) left them.
    pub from: StreamMatrix,
    /// `[n_tiles, chunks · 4, 16]`: the scales by groups of 128 inputs and by rows. Zero beyond the matrix.
    pub scales: Global<u32>,
    /// All chunks.
    pub codes: GlobalMut<u8>,
    /// A counter, to which each warp adds 1 that has found a weight which is no code times its scale.
    pub strange: GlobalMut<u32>,
    /// The chunk at which the matrix begins among the codes.
    pub base: u64,
}

/// Finds the codes of weights from the scales that made them. A code is the quotient of weight and scale, rounded to
/// the nearest: rounding to bf16 has moved a weight by at most 2^-9 of it, too little to change the code.
///
/// # Safety
/// All threads of a CTA of 128 call it: a warp has a split-K partial.
#[device]
unsafe fn quantize<C: Code>(p: &Quantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (lane, k_partial) = (thread::lane_id(), thread::warp_id());
        let (n_tile, q) = (thread::block_idx_x(), thread::block_idx_y());
        let (slices, own) = p.from.slices(n_tile);
        let from = p.from.stream.cast::<u8>().at(own as usize);
        let depth = p.from.k.div_ceil(CHUNK_FEATURES);
        let (wave, place) = StreamMatrix { base: p.base, ..p.from }.wave(n_tile);
        let to = p.codes.at(chunk_at::<C>(wave.group(place, q), place) as usize);
        let scales = p.scales.at(((n_tile * depth + q) * GROUPS * N_TILE) as usize);
        let mut strange = false;
        unroll!(S < 2; {
            let slice = k_partial + S as u32 * K_PARTIALS;
            let group = slice * SLICE / GROUP;
            let scale = [0, 8].map(|half| Scale(scales.load_nc((group * N_TILE + lane / 4 + half) as usize)));
            let factors = both_factors::<C>(scale);
            let from = from.at(slices.at(q * SLICES + slice) as usize).cast::<u32>();
            let mut codes = [[0; 4]; 2];
            unroll!(F < 4; {
                let mut words = [0; 4];
                let mut found = [[0; 2]; 4];
                unroll!(R < 4; {
                    let word = F as u32 * STEP_BYTES / 4 + core_word(R as u32) + lane;
                    words[R] = from.load_nc(word as usize);
                    found[R] = math::unpack_bf16(words[R]).map(|w| C::encode(w, scale[R % 2]));
                });
                let joined = C::join(found);
                let again = C::decode_whole(joined, &factors);
                unroll!(R < 4; {
                    strange |= again[R] != words[R];
                });
                put_words::<C, F>(&mut codes, joined);
            });
            let to = to.at(slice_at::<C>(slice)[0] as usize);
            unroll!(I < 2; {
                if (I as u32) < parts::<C>() {
                    to.at((I as u32 * 512 + lane * 16) as usize).cast::<u32>().store16(0, codes[I]);
                }
            });
        });
        let thread = thread::thread_idx_x();
        if thread < GROUPS * N_TILE {
            let [_, of_group] = slice_at::<C>(2 * (thread / N_TILE));
            let to = to.at((of_group + thread % N_TILE * 4) as usize).cast::<u32>();
            to.store(0, scales.load_nc(thread as usize));
        }
        if warp::any(strange) && lane == 0 {
            atomic::fetch_add(p.strange, 0, 1, Ordering::Relaxed, Scope::Device);
        }
    }
}

/// The codes of int4 weights.
#[kernel(threads = 128)]
pub unsafe fn quantize_int4(p: Quantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { quantize::<Int4<1>>(&p) }
}

/// The codes of int4 weights whose scales have two parts.
#[kernel(threads = 128)]
pub unsafe fn quantize_int4_f16(p: Quantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { quantize::<Int4<2>>(&p) }
}

/// The codes of FP8 weights.
#[kernel(threads = 128, min_blocks = 4)]
pub unsafe fn quantize_fp8(p: Quantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { quantize::<Fp8>(&p) }
}

/// Parameters of [`dequantize_int4`], [`dequantize_int4_f16`] and [`dequantize_fp8`]. Grid: (4 groups, chunks of 8
/// N-tiles); a warp for each N-tile.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Dequantize {
    /// The first of the chunks.
    pub codes: Global<u8>,
    /// Where its weights go, as [`lay_out`](crate::stream::lay_out) would leave them.
    pub stream: GlobalMut<bf16>,
}

/// Makes the weights that codes mean.
///
/// # Safety
/// All threads of a CTA of 256 call it: a warp has an N-tile.
#[device]
unsafe fn dequantize<C: Code>(p: &Dequantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (lane, n_tile) = (thread::lane_id(), thread::warp_id());
        let (scales_of, group) = (thread::block_idx_x(), thread::block_idx_y());
        let from = p.codes.at((chunk_at::<C>(group, n_tile) + u64::from(scales_of * C::GROUP_BYTES)) as usize);
        let scales = from.at(C::SLICE_BYTES as usize).cast::<u32>();
        let scales = [0, 8].map(|half| Scale(scales.load_nc((lane / 4 + half) as usize)));
        let mut codes = [[[0; 4]; 2]; 2];
        unroll!(S < 2; {
            let from = from.at((S as u32 * second_at::<C>() + lane * 16) as usize);
            unroll!(I < 2; {
                if (I as u32) < parts::<C>() {
                    codes[S][I] = from.at(I * 512).cast::<u32>().load16_nc(0);
                }
            });
        });
        let factors = both_factors::<C>(scales);
        let to = p.stream.cast::<u8>().at(group as usize * (GROUP_N_TILES * CHUNK_BYTES) as usize);
        unroll!(S < 2; {
            let slice = (2 * scales_of + S as u32) * SLICES_APART + n_tile * SLICE_BYTES;
            let to = to.at(slice as usize).cast::<u32>();
            unroll!(F < 4; {
                let weights = C::decode_whole(words::<C>(&codes[S], F), &factors);
                unroll!(R < 4; {
                    let word = F as u32 * STEP_BYTES / 4 + core_word(R as u32) + lane;
                    to.store(word as usize, weights[R]);
                });
            });
        });
    }
}

/// The weights that codes of int4 mean.
#[kernel(threads = 256)]
pub unsafe fn dequantize_int4(p: Dequantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { dequantize::<Int4<1>>(&p) }
}

/// The weights that codes of int4 mean, if scales have two parts.
#[kernel(threads = 256)]
pub unsafe fn dequantize_int4_f16(p: Dequantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { dequantize::<Int4<2>>(&p) }
}

/// The weights that codes of FP8 mean.
#[kernel(threads = 256)]
pub unsafe fn dequantize_fp8(p: Dequantize) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { dequantize::<Fp8>(&p) }
}

const _: () = assert!(Int4::<1>::CHUNKS * Int4::<1>::BYTES <= CHUNK_BYTES && Fp8::CHUNKS * Fp8::BYTES <= CHUNK_BYTES);

/// The kernels that make codes, and weights of them again.
#[cfg(not(target_arch = "nvptx64"))]
pub trait CodeKernels: Code {
    /// Finds the codes of weights.
    type Quantize: Kernel<Params = Quantize>;
    /// Makes the weights that codes mean.
    type Dequantize: Kernel<Params = Dequantize>;
}

#[cfg(not(target_arch = "nvptx64"))]
impl CodeKernels for Fp8 {
    type Quantize = quantize_fp8;
    type Dequantize = dequantize_fp8;
}

#[cfg(not(target_arch = "nvptx64"))]
impl CodeKernels for Int4<1> {
    type Quantize = quantize_int4;
    type Dequantize = dequantize_int4;
}

#[cfg(not(target_arch = "nvptx64"))]
impl CodeKernels for Int4<2> {
    type Quantize = quantize_int4_f16;
    type Dequantize = dequantize_int4_f16;
}
