//! Matrix products of a warpgroup, four warps together, from shared memory (`wgmma`, sm_90a).
//!
//! A warpgroup is four consecutive warps, the first a multiple of four. A product adds A · Bᵀ to accumulators: A is 64
//! rows, B is `n` rows, both 16 deep and bf16 (or 32 and e4m3), C is 64 × `n` in f32. It runs beside what the warps do
//! next:
//!
//! ```text
//! fence()            before the first product on accumulators or registers that ordinary code wrote
//! mma_…()            any number
//! commit()           closes a group
//! wait::<PENDING>()  until all but the newest groups are done
//! ```
//!
//! # Accumulators
//! A lane has [`ACCUMULATORS`] of them, by number. With `group = lane / 4` and `pair = lane % 4`, warp `w` of the
//! warpgroup has rows `16 w + group` (the first of two) and that plus 8:
//!
//! | number | holds |
//! |---|---|
//! | `4 j`, `4 j + 1` | C\[group\]\[8 j + 2 pair\] and the next column |
//! | `4 j + 2`, `4 j + 3` | C\[group + 8\]\[8 j + 2 pair\] and the next column |
//!
//! They are PTX registers that [`declare`] names and these functions use by name, as are the fragments of A. Operands
//! of `asm!` would do, but rustc keeps an array of 128 partly in local memory, and computes fragments while products
//! are under way; the assembler then runs products one after another (its warnings C7514 and C7513).
//!
//! Every function but [`get`], [`set`] and [`set_fragment`] is collective: all lanes of the warpgroup call it together.
//! The emulator does a product when it is waited for.

use crate::shared::Shared;
use crate::target;

/// Accumulators of a lane. No product uses those from [`SPARE`] on: they hold what is kept beside products.
pub const ACCUMULATORS: usize = 224;
/// The first accumulator that no product uses.
pub const SPARE: usize = 128;
/// Words of A that a lane can hold: 128 along the sum.
pub const FRAGMENTS: usize = 32;

/// Rows of 128 bytes (64 bf16 along the sum) in shared memory, in the swizzle of [`tensor`](crate::tensor).
#[derive(Clone, Copy, Debug)]
pub struct Operand(u32);

impl Operand {
    /// Rows that begin at `rows`, a multiple of 1,024.
    #[inline(always)]
    #[must_use]
    pub const fn at<T>(rows: Shared<T>) -> Self {
        // In units of 16 bytes; the distance of groups of eight rows and the swizzle are in the upper word, always the
        // same. Swizzled, nothing looks at this word's upper half, where a cluster's addresses say which block's they
        // are.
        Self(1 << 16 | rows.addr() >> 4)
    }

    /// The same rows, `bytes` further: 32 for the next 16 of the sum, a multiple of 1,024 for other rows.
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, bytes: u32) -> Self {
        Self(self.0 + bytes / 16)
    }

    /// The lower word of the matrix descriptor.
    #[inline(always)]
    #[must_use]
    pub const fn word(self) -> u32 {
        self.0
    }
}

/// The lower word of a matrix descriptor whose leading distance counts.
const fn descriptor(address: u32, leading: u32) -> u32 {
    // In a cluster an address says which block's it is, too, in bits that are another field's here.
    (leading / 16) << 16 | (address & 0x3_ffff) >> 4
}

/// A matrix with the sum down its columns: rows of 128 bytes in shared memory, 64 columns of one of the sum, in the
/// swizzle of [`tensor`](crate::tensor) (MN-major, to PTX a transposed matrix).
#[derive(Clone, Copy, Debug)]
pub struct Columns(u32);

impl Columns {
    /// Columns whose first 64 begin at `rows`, a multiple of 1,024, and every next 64 `apart` bytes further, likewise.
    #[inline(always)]
    #[must_use]
    pub const fn at<T>(rows: Shared<T>, apart: u32) -> Self {
        Self(descriptor(rows.addr(), apart))
    }

    /// The same columns, `bytes` further: 2,048 for the next 16 of the sum.
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, bytes: u32) -> Self {
        Self(self.0 + bytes / 16)
    }
}

/// Bytes of a core matrix: 8 rows × 8 bf16, each row's 16 bytes behind the one before.
pub const CORE_BYTES: u32 = 128;
/// Bytes from one group of eight rows to the next, of [`Cores`].
pub const CORE_ROWS_APART: u32 = 1024;

/// Rows in shared memory as core matrices, without a swizzle: the two halves of an instruction's 16 of the sum behind
/// each other, groups of eight rows [`CORE_ROWS_APART`].
#[derive(Clone, Copy, Debug)]
pub struct Cores(u32);

impl Cores {
    /// Rows whose first core matrix begins at `first`, a multiple of 16.
    #[inline(always)]
    #[must_use]
    pub const fn at<T>(first: Shared<T>) -> Self {
        Self(descriptor(first.addr(), CORE_BYTES))
    }

    /// The core matrices `bytes` further: [`CORE_BYTES`] twice for the next 16 of the sum, where these follow.
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, bytes: u32) -> Self {
        Self(self.0 + bytes / 16)
    }
}

/// Names the accumulators and fragments: once in a kernel, at its start, outside every loop and branch.
#[inline(always)]
pub fn declare() {
    target::wgmma_declare();
}

/// Orders the warpgroup's accesses to accumulators and operands in registers with the products that follow
/// (`wgmma.fence.sync.aligned`).
#[inline(always)]
pub fn fence() {
    target::wgmma_fence();
}

/// Closes the products since the last call into a group (`wgmma.commit_group.sync.aligned`).
#[inline(always)]
pub fn commit() {
    target::wgmma_commit();
}

/// Waits until all but the `PENDING` newest groups are done (`wgmma.wait_group.sync.aligned`).
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: u64>() {
    target::wgmma_wait::<PENDING>();
}

/// `C = A · Bᵀ`, plus C if `keep`, in the accumulators below [`SPARE`]: B has 256 rows in core matrices
/// (`wgmma.mma_async.sync.aligned.m64n256k16`).
///
/// # Safety
/// Both operands are complete in shared memory, and not written before the product was waited for.
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n256(a: Operand, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n256(a.0, b.0, keep) }
}

/// As [`mma_n256`] for B of 128 rows, in the lower 64 accumulators.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128_by_cores(a: Operand, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128_by_cores(a.0, b.0, keep) }
}

/// As [`mma_n256`] for B of 128 swizzled rows, in the lower 64 accumulators.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128(a: Operand, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128(a.0, b.0, keep) }
}

/// `C = A · B` for B of 128 columns, plus C if `keep`, in the accumulators 64 to 127, with A in registers: the
/// fragments `4 STEP` to `4 STEP + 3`.
///
/// # Safety
/// As [`mma_n256`], for B.
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128_columns<const STEP: usize>(b: Columns, keep: bool) {
    const { assert!(4 * STEP < FRAGMENTS) };
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128_columns::<STEP>(b.0, keep) }
}

/// As [`mma_n256`] for A in core matrices and B of 128 swizzled rows, in the accumulators 64 to 127.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128_cores(a: Cores, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128_cores(a.0, b.0, keep) }
}

/// As [`mma_n256`] for B of 64 swizzled rows, in the accumulators 64 to 95 or, the `SECOND`, 96 to 127.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n64<const SECOND: bool>(a: Operand, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n64::<SECOND>(a.0, b.0, keep) }
}

/// As [`mma_n64`] for B of 64 columns.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n64_columns<const SECOND: bool>(a: Operand, b: Columns, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n64_columns::<SECOND>(a.0, b.0, keep) }
}

/// As [`mma_n128_cores`] for B of 96 rows, in the accumulators 64 to 111.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n96_cores(a: Cores, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n96_cores(a.0, b.0, keep) }
}

/// `C = A · Bᵀ` for B of 64 swizzled rows, plus C if `keep`, in the accumulators 64 to 95, with A in registers: the
/// fragments `4 STEP` to `4 STEP + 3`.
///
/// # Safety
/// As [`mma_n256`], for B.
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n64_upper<const STEP: usize>(b: Operand, keep: bool) {
    const { assert!(4 * STEP < FRAGMENTS) };
    // SAFETY: the caller's.
    unsafe { target::wgmma_n64_upper::<STEP>(b.0, keep) }
}

/// As [`mma_n64_upper`] for B of 128 rows, in the accumulators 64 to 127.
///
/// # Safety
/// As [`mma_n256`], for B.
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128_upper<const STEP: usize>(b: Operand, keep: bool) {
    const { assert!(4 * STEP < FRAGMENTS) };
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128_upper::<STEP>(b.0, keep) }
}

/// As [`mma_n128_by_cores`] of e4m3, each a byte: 32 of the sum where there are 16 bf16, in the lower 64 accumulators
/// or, the `SECOND`, from 64 on (`wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3`). Hopper's tensor cores add
/// such products with some 14 bits of mantissa: sums of many are better added in f32.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_e4m3_n128<const SECOND: bool>(a: Operand, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_e4m3_n128::<SECOND>(a.0, b.0, keep) }
}

/// The same of both in core matrices, B of 8 rows, in the accumulators 64 to 67. They are not those of
/// [`mma_e4m3_n64_cores`]: of a kernel with both, ptxas would look for registers that suit either place, may find none,
/// and then runs all products one after another.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_e4m3_n8_cores(a: Cores, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_e4m3_n8_cores(a.0, b.0, keep) }
}

/// As [`mma_e4m3_n8_cores`] for B of 64 rows, in the accumulators 0 to 31.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_e4m3_n64_cores(a: Cores, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_e4m3_n64_cores(a.0, b.0, keep) }
}

/// Gives the four fragments of step `STEP` what [`ldmatrix_x4`](crate::mma::ldmatrix_x4) loads. No product that uses
/// them is under way.
///
/// # Safety
/// As [`ldmatrix_x4`](crate::mma::ldmatrix_x4).
#[inline(always)]
#[track_caller]
pub unsafe fn load_fragments<const STEP: usize, T>(row: Shared<T>) {
    const { assert!(4 * STEP < FRAGMENTS) };
    // SAFETY: the caller's.
    unsafe { target::wgmma_load_fragments::<STEP>(row.addr()) }
}

/// Gives fragment `I` a pair of bf16, rounded to nearest even: word `I % 4` of the 16 × 16 part of A that is the warp's
/// in step `I / 4`, as [`mma`](crate::mma) has it. No product that uses it is under way.
#[inline(always)]
#[track_caller]
pub fn set_fragment<const I: usize>(low: f32, high: f32) {
    const { assert!(I < FRAGMENTS) };
    target::wgmma_set_fragment::<I>(low, high);
}

/// Gives fragment `I` a pair of bf16 as they are; otherwise as [`set_fragment`].
#[inline(always)]
#[track_caller]
pub fn put_fragment<const I: usize>(word: u32) {
    const { assert!(I < FRAGMENTS) };
    target::wgmma_put_fragment::<I>(word);
}

/// Accumulator `I`. No product that uses it is under way.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn get<const I: usize>() -> f32 {
    const { assert!(I < ACCUMULATORS) };
    target::wgmma_get::<I>()
}

/// Gives accumulator `I` a value. No product that uses it is under way.
#[inline(always)]
#[track_caller]
pub fn set<const I: usize>(value: f32) {
    const { assert!(I < ACCUMULATORS) };
    target::wgmma_set::<I>(value);
}

/// Gives the warps of this warpgroup up to `COUNT` registers a lane, once others gave theirs up (`setmaxnreg.inc`).
#[inline(always)]
#[track_caller]
pub fn take_registers<const COUNT: u32>() {
    const { assert!(COUNT >= 24 && COUNT <= 256 && COUNT.is_multiple_of(8), "24 to 256 registers, in eights") };
    target::take_registers::<COUNT>();
}

/// Leaves the warps of this warpgroup `COUNT` registers a lane (`setmaxnreg.dec`).
#[inline(always)]
#[track_caller]
pub fn give_registers<const COUNT: u32>() {
    const { assert!(COUNT >= 24 && COUNT <= 256 && COUNT.is_multiple_of(8), "24 to 256 registers, in eights") };
    target::give_registers::<COUNT>();
}
