//! [`gpu_kernels::gemm`] as other libraries do it, to be compared with them: sums are rounded to bf16, and not scaled.
//!
//! # Safety
//! As for [all GEMMs](gpu_kernels::gemm) and [epilogues](gpu_kernels::gemm::epilogue).

use cuda_std::{device, kernel, math, thread, wgmma};
use gpu_kernels::gemm::epilogue::{BoxWords, Epilogue, Half, Next};
use gpu_kernels::gemm::{BOX, GROUP, Gemm, GemmE4m3, THREADS, gemm, gemm_e4m3};
use gpu_kernels::unroll;

/// The four sums of the lane in half an N-tile: 8 columns of two rows.
macro_rules! sums {
    ($first:expr) => {
        [
            [wgmma::get::<{ $first }>(), wgmma::get::<{ $first + 1 }>()],
            [wgmma::get::<{ $first + 2 }>(), wgmma::get::<{ $first + 3 }>()],
        ]
    };
}

/// Box `$b` of the sums, rounded to bf16.
macro_rules! rounded {
    ($b:expr) => {{
        let mut words: BoxWords = [[0; 4]; 4];
        unroll!(Q < 4; {
            let (low, high) = (sums!($b * 32 + Q * 8), sums!($b * 32 + Q * 8 + 4));
            words[Q] = [low[0], low[1], high[0], high[1]].map(|s| math::pack_bf16(s[0], s[1]));
        });
        words
    }};
}

/// The sums, rounded to bf16.
pub struct Plain;

impl Epilogue for Plain {
    const GATED: bool = false;
    type Early = ();
    type Ahead = ();

    #[device]
    unsafe fn early(_: &Gemm, _: &Half) {}

    #[device]
    unsafe fn ahead<const N: u32>(_: &Gemm, _: &Half, _: bool, (): ()) {}

    #[device]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, (): (), next: &mut impl Next) {
        let mut boxes = [rounded!(0), rounded!(1), [[0; 4]; 4], [[0; 4]; 4]];
        if N > 128 {
            (boxes[2], boxes[3]) = (rounded!(2), rounded!(3));
        }
        // SAFETY: the caller's word. All sums have left the accumulators. All lanes of the warpgroup come here.
        unsafe {
            next.begin();
            // Other lanes had totals where the boxes are.
            thread::sync_named(half.barrier, GROUP);
            unroll!(B < 4; {
                if (B as u32) * BOX < N {
                    half.put_box::<false>(p, B, boxes[B]);
                    next.step();
                }
            });
        }
    }
}

macro_rules! kernels {
    ($($n:literal $name:ident)* $(cluster $blocks:literal = $down:literal x $across:literal $cluster:ident)*) => {
        $(
            #[doc = concat!("`out = x · wᵀ`. Tiles of ", $n, " weight rows.")]
            #[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
            pub unsafe fn $name(p: Gemm) {
                // SAFETY: the launcher's word: memory is as the parameter block says.
                unsafe { gemm::<Plain, $n, 1, 1>(&p) }
            }
        )*
        $(
            #[doc = concat!("`out = x · wᵀ`. Tiles of 256 weight rows; clusters of ", $down, " one above the other, ", $across, " side by side.")]
            #[kernel(threads = THREADS, min_blocks = 1, cluster = $blocks, module = "bench")]
            pub unsafe fn $cluster(p: Gemm) {
                // SAFETY: the launcher's word: memory is as the parameter block says.
                unsafe { gemm::<Plain, 256, $down, $across>(&p) }
            }
        )*
    };
}

kernels! {
    128 gemm_plain_n128 192 gemm_plain_n192 256 gemm_plain_n256
    cluster 2 = 2 x 1 gemm_plain_2x1 cluster 8 = 4 x 2 gemm_plain_4x2
}

/// `out = x · wᵀ` of e4m3. Tiles of 128 weight rows.
#[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
pub unsafe fn gemm_plain_e4m3(p: GemmE4m3) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { gemm_e4m3::<Plain, 1>(&p) }
}
