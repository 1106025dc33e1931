//! Matrix products by the tensor cores, one warp together. Every function is collective.
//!
//! Fragments are PTX's. With `group = lane / 4` and `pair = lane % 4`, and two bf16 to a word, the lower column (of A)
//! or row (of B) in the low half:
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
/// The products are exact; in what order and precision they are summed is up to the hardware, but the same each time.
///
/// A warp does this together. LLVM does not know that: a product whose result only some lanes use it may move into
/// their branch, where the card waits for ever. The emulator does not see it. Pass such a result through
/// [`thread::opaque`](crate::thread::opaque) first.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn m16n8k16_bf16(c: [f32; 4], a: [u32; 4], b: [u32; 2]) -> [f32; 4] {
    target::mma_m16n8k16_bf16(c, a, b)
}

/// Loads four 8 x 8 matrices of 16-bit elements (`ldmatrix.sync.aligned.m8n8.x4.shared.b16`).
///
/// `row` of lane `l` is the address of row `l % 8` of matrix `l / 8`, 16 bytes. Word `m` of the result is the pair of
/// elements of matrix `m` in row `lane / 4`, columns `2 (lane % 4)` and the next.
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

/// An 8 x 8 matrix of 16-bit elements, transposed (`movmatrix.sync.aligned.m8n8.trans.b16`): a lane's word is the pair
/// of elements in row `lane / 4`, columns `2 (lane % 4)` and the next, of what it gives and of what it gets.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn transpose(word: u32) -> u32 {
    target::movmatrix(word)
}

/// Stores four 8 x 8 matrices of 16-bit elements: [`ldmatrix_x4`] the other way, with the same meaning of `row` and of
/// the words (`stmatrix.sync.aligned.m8n8.x4.shared::cta.b16`, sm_90 on).
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
