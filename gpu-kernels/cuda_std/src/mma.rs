//! Matrix products on the tensor cores, by one warp. Every function is collective: all lanes of the warp must call it
//! together.
//!
//! Fragments are laid out as PTX defines them. A word of A or B holds two bf16, the one of the lower column (of A) or
//! row (of B) in the low half. With `group = lane / 4` and `pair = lane % 4`:
//!
//! | word | holds |
//! |---|---|
//! | `a[0]` | A\[group\]\[2 pair, 2 pair + 1\] |
//! | `a[1]` | A\[group + 8\]\[2 pair, 2 pair + 1\] |
//! | `a[2]` | A\[group\]\[2 pair + 8, 2 pair + 9\] |
//! | `a[3]` | A\[group + 8\]\[2 pair + 8, 2 pair + 9\] |
//! | `b[0]` | B\[2 pair, 2 pair + 1\]\[group\] |
//! | `b[1]` | B\[2 pair + 8, 2 pair + 9\]\[group\] |
//! | `c[0]`, `c[1]` | C\[group\]\[2 pair\], C\[group\]\[2 pair + 1\] |
//! | `c[2]`, `c[3]` | C\[group + 8\]\[2 pair\], C\[group + 8\]\[2 pair + 1\] |

use crate::shared::Shared;
use crate::target;

/// `C + A * B` for A of 16 x 16 and B of 16 x 8 bf16, C of 16 x 8 f32
/// (`mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32`).
///
/// The products are exact. The order and the precision in which they are summed are up to the hardware, but the same
/// each time.
///
/// All lanes of the warp must execute this together, which LLVM does not know. If only some lanes use the result, LLVM
/// may move the instruction into their branch, where the card hangs. The emulator does not notice that. Pass such a
/// result through [`thread::opaque`](crate::thread::opaque) first.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn m16n8k16_bf16(c: [f32; 4], a: [u32; 4], b: [u32; 2]) -> [f32; 4] {
    target::mma_m16n8k16_bf16(c, a, b)
}

/// Loads four 8 x 8 matrices of 16-bit elements (`ldmatrix.sync.aligned.m8n8.x4.shared.b16`).
///
/// In lane `l`, `row` is the address of row `l % 8` of matrix `l / 8`; a row has 16 bytes. Word `m` of the result holds
/// two elements of matrix `m`: row `lane / 4`, columns `2 (lane % 4)` and the next.
///
/// # Safety
/// As for [`Shared::load16`], for every lane.
#[inline(always)]
#[must_use]
#[track_caller]
pub unsafe fn ldmatrix_x4<T>(row: Shared<T>) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { target::ldmatrix_x4(row.addr()) }
}

/// [`ldmatrix_x4`] with each matrix transposed (`ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16`).
///
/// # Safety
/// As for [`ldmatrix_x4`].
#[inline(always)]
#[must_use]
#[track_caller]
pub unsafe fn ldmatrix_x4_trans<T>(row: Shared<T>) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { target::ldmatrix_x4_trans(row.addr()) }
}

/// Transposes an 8 x 8 matrix of 16-bit elements (`movmatrix.sync.aligned.m8n8.trans.b16`). In the argument and in the
/// result alike, a lane's word holds the elements in row `lane / 4`, columns `2 (lane % 4)` and the next.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn transpose(word: u32) -> u32 {
    target::movmatrix(word)
}

/// Stores four 8 x 8 matrices of 16-bit elements (`stmatrix.sync.aligned.m8n8.x4.shared::cta.b16`, sm_90 on). It is the
/// inverse of [`ldmatrix_x4`]: `row` and the words have the same meaning.
///
/// # Safety
/// As for [`Shared::store16`], for every lane.
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90"))]
#[inline(always)]
#[track_caller]
pub unsafe fn stmatrix_x4<T>(row: Shared<T>, words: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { target::stmatrix_x4(row.addr(), words) }
}
