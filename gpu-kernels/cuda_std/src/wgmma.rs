//! Matrix products of a warpgroup, with B in shared memory and A there or in registers (`wgmma`, sm_90a).
//!
//! A warpgroup is four consecutive warps; the first one's number is a multiple of four. A product adds A · Bᵀ to
//! accumulators C. A has 64 rows and B has `n`; both have 16 columns along K in bf16, or 32 in e4m3. C is 64 × `n` in
//! f32. Products are asynchronous: they run while the warps go on.
//!
//! ```text
//! fence()            before the first product on accumulators or registers that ordinary code wrote
//! mma_…()            any number
//! commit()           closes a group
//! wait::<PENDING>()  until all but the newest groups are done
//! ```
//!
//! # Accumulators
//! A lane has [`ACCUMULATORS`] accumulators, which are named by number. Warp `w` of the warpgroup has rows `16 w` to
//! `16 w + 15` of C. In this table rows count from `16 w`, numbers from the product's first accumulator,
//! `group = lane / 4` and `pair = lane % 4`:
//!
//! | number | holds |
//! |---|---|
//! | `4 j`, `4 j + 1` | C\[group\]\[8 j + 2 pair\] and the next column |
//! | `4 j + 2`, `4 j + 3` | C\[group + 8\]\[8 j + 2 pair\] and the next column |
//!
//! Accumulators and the fragments of A are PTX registers. [`declare`] declares them, and these functions use them by
//! name. As operands of `asm!` they would be slow: rustc keeps an array of 128 partly in local memory, and computes
//! fragments while products are under way. The assembler then serialises all products (its warnings C7514 and C7513).
//!
//! Every function but [`get`], [`set`], [`set_fragment`] and [`put_fragment`] is collective: all lanes of the warpgroup
//! call it together. The emulator computes a product when it is waited for.

use crate::shared::Shared;
use crate::target;

/// Accumulators of a lane. Products use those below [`SPARE`]; from [`SPARE`] on they hold values that a kernel keeps
/// beside products.
pub const ACCUMULATORS: usize = 224;
/// The first accumulator that no product uses.
pub const SPARE: usize = 128;
/// Words of A that a lane can hold in registers: enough for 128 columns along K.
pub const FRAGMENTS: usize = 32;

/// A K-major operand in shared memory: rows of 128 bytes (64 bf16 along K), in the swizzle of
/// [`tensor`](crate::tensor).
#[derive(Clone, Copy, Debug)]
pub struct Operand(u32);

impl Operand {
    /// The operand whose rows begin at `rows`, a multiple of 1,024 bytes.
    #[inline(always)]
    #[must_use]
    pub const fn at<T>(rows: Shared<T>) -> Self {
        // The address is in units of 16 bytes. The upper word of the descriptor is always the same: it holds the stride
        // between groups of eight rows, and the swizzle. With a swizzle the hardware ignores this word's upper half, so
        // it does no harm that addresses in a cluster have the block's rank there.
        Self(1 << 16 | rows.addr() >> 4)
    }

    /// The same operand, `bytes` further: 32 for the next 16 bf16 along K, a multiple of 1,024 for other rows.
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

/// The lower word of a matrix descriptor whose leading byte offset counts.
const fn descriptor(address: u32, leading: u32) -> u32 {
    // In a cluster an address has the block's rank in bits that belong to the leading byte offset here: they are
    // masked.
    (leading / 16) << 16 | (address & 0x3_ffff) >> 4
}

/// An MN-major operand in shared memory, which PTX calls transposed: each row of 128 bytes holds 64 columns at one
/// index along K. Rows are in the swizzle of [`tensor`](crate::tensor).
#[derive(Clone, Copy, Debug)]
pub struct Columns(u32);

impl Columns {
    /// The operand whose first 64 columns begin at `rows`, and each further 64 columns `apart` bytes behind those
    /// before. Both are multiples of 1,024 bytes.
    #[inline(always)]
    #[must_use]
    pub const fn at<T>(rows: Shared<T>, apart: u32) -> Self {
        Self(descriptor(rows.addr(), apart))
    }

    /// The same operand, `bytes` further: 2,048 for the next 16 along K.
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, bytes: u32) -> Self {
        Self(self.0 + bytes / 16)
    }
}

/// Bytes of a core matrix: 8 rows of 16 bytes (8 bf16), one right behind another.
pub const CORE_BYTES: u32 = 128;
/// Bytes from one group of eight rows of [`Cores`] to the next.
pub const CORE_ROWS_APART: u32 = 1024;

/// A K-major operand in shared memory as core matrices, without a swizzle. The two core matrices that an instruction
/// takes along K lie one right behind the other. Groups of eight rows are [`CORE_ROWS_APART`] bytes apart.
#[derive(Clone, Copy, Debug)]
pub struct Cores(u32);

impl Cores {
    /// The operand whose first core matrix begins at `first`, a multiple of 16 bytes.
    #[inline(always)]
    #[must_use]
    pub const fn at<T>(first: Shared<T>) -> Self {
        Self(descriptor(first.addr(), CORE_BYTES))
    }

    /// The same operand, `bytes` further: twice [`CORE_BYTES`] for the next 16 bf16 along K, if they lie right behind
    /// these.
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, bytes: u32) -> Self {
        Self(self.0 + bytes / 16)
    }
}

/// Declares the registers of the accumulators and fragments. A kernel calls it once, at its start, outside every loop
/// and branch.
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
///
/// A group is the warpgroup's, not the warp's: when it is done, no warp's products of it read shared memory any more.
/// So one lane may then release a stage, and a warp may overwrite an operand. This is no barrier: it does not order
/// what other warps load or store themselves.
#[inline(always)]
#[track_caller]
pub fn wait<const PENDING: u64>() {
    target::wgmma_wait::<PENDING>();
}

/// Starts `C = A · Bᵀ`, or `C += A · Bᵀ` if `keep` (`wgmma.mma_async.sync.aligned.m64n256k16`). A is swizzled, and B
/// has 256 rows in core matrices. C is in the accumulators below [`SPARE`].
///
/// # Safety
/// Both operands are complete in shared memory, and not written before the product was waited for.
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n256(a: Operand, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n256(a.0, b.0, keep) }
}

/// As [`mma_n256`], but B has 128 rows; C is in the accumulators 0 to 63.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128_by_cores(a: Operand, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128_by_cores(a.0, b.0, keep) }
}

/// As [`mma_n256`], but B has 128 swizzled rows; C is in the accumulators 0 to 63.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128(a: Operand, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128(a.0, b.0, keep) }
}

/// Starts `C = A · B`, or `C += A · B` if `keep`, with A in registers: the fragments `4 STEP` to `4 STEP + 3`. B has
/// 128 columns; C is in the accumulators 64 to 127.
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

/// As [`mma_n256`], but A is in core matrices and B has 128 swizzled rows; C is in the accumulators 64 to 127.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n128_cores(a: Cores, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n128_cores(a.0, b.0, keep) }
}

/// As [`mma_n256`], but B has 64 swizzled rows; C is in the accumulators 64 to 95, or 96 to 127 if `SECOND`.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n64<const SECOND: bool>(a: Operand, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n64::<SECOND>(a.0, b.0, keep) }
}

/// As [`mma_n64`], but B has 64 columns: it computes `A · B`.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n64_columns<const SECOND: bool>(a: Operand, b: Columns, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n64_columns::<SECOND>(a.0, b.0, keep) }
}

/// As [`mma_n128_cores`], but B has 96 rows; C is in the accumulators 64 to 111.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_n96_cores(a: Cores, b: Operand, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_n96_cores(a.0, b.0, keep) }
}

/// Starts `C = A · Bᵀ`, or `C += A · Bᵀ` if `keep`, with A in registers: the fragments `4 STEP` to `4 STEP + 3`. B has
/// 64 swizzled rows; C is in the accumulators 64 to 95.
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

/// As [`mma_n64_upper`], but B has 128 rows; C is in the accumulators 64 to 127.
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

/// As [`mma_n128_by_cores`], but for e4m3: elements are bytes, and there are 32 along K instead of 16
/// (`wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3`). C is in the accumulators 0 to 63, or 64 to 127 if
/// `SECOND`. Hopper's tensor cores add such products with some 14 bits of mantissa, so long sums are better added in
/// f32.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_e4m3_n128<const SECOND: bool>(a: Operand, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_e4m3_n128::<SECOND>(a.0, b.0, keep) }
}

/// As [`mma_e4m3_n128`], but both operands are in core matrices and B has 8 rows; C is in the accumulators 64 to 67.
/// They differ from those of [`mma_e4m3_n64_cores`] for a reason: in a kernel with both instructions, ptxas would look
/// for registers that suit either. It may find none, and then serialises all products.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_e4m3_n8_cores(a: Cores, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_e4m3_n8_cores(a.0, b.0, keep) }
}

/// As [`mma_e4m3_n8_cores`], but B has 64 rows; C is in the accumulators 0 to 31.
///
/// # Safety
/// As [`mma_n256`].
#[inline(always)]
#[track_caller]
pub unsafe fn mma_e4m3_n64_cores(a: Cores, b: Cores, keep: bool) {
    // SAFETY: the caller's.
    unsafe { target::wgmma_e4m3_n64_cores(a.0, b.0, keep) }
}

/// Loads the four fragments of step `STEP` with [`ldmatrix_x4`](crate::mma::ldmatrix_x4). No product that uses them may
/// be under way.
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

/// Sets fragment `I` to a pair of bf16, rounded to nearest even. In step `I / 4` it is word `I % 4` of the warp's 16 ×
/// 16 part of A, laid out as in [`mma`](crate::mma). No product that uses it may be under way.
#[inline(always)]
#[track_caller]
pub fn set_fragment<const I: usize>(low: f32, high: f32) {
    const { assert!(I < FRAGMENTS) };
    target::wgmma_set_fragment::<I>(low, high);
}

/// Sets fragment `I` to a word of two bf16, unchanged; otherwise as [`set_fragment`].
#[inline(always)]
#[track_caller]
pub fn put_fragment<const I: usize>(word: u32) {
    const { assert!(I < FRAGMENTS) };
    target::wgmma_put_fragment::<I>(word);
}

/// The value of accumulator `I`. No product that uses it may be under way.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn get<const I: usize>() -> f32 {
    const { assert!(I < ACCUMULATORS) };
    target::wgmma_get::<I>()
}

/// Sets accumulator `I` to a value. No product that uses it may be under way.
#[inline(always)]
#[track_caller]
pub fn set<const I: usize>(value: f32) {
    const { assert!(I < ACCUMULATORS) };
    target::wgmma_set::<I>(value);
}

/// Raises the registers of this warpgroup's lanes to `COUNT` each (`setmaxnreg.inc`). Waits until other warps have
/// given up enough. `COUNT` is 24 to 256 and a multiple of 8; others do not compile.
#[inline(always)]
#[track_caller]
pub fn take_registers<const COUNT: u32>() {
    const { assert!(COUNT >= 24 && COUNT <= 256 && COUNT.is_multiple_of(8), "24 to 256 registers, in eights") };
    target::take_registers::<COUNT>();
}

/// Lowers the registers of this warpgroup's lanes to `COUNT` each, so that other warps can take the rest
/// (`setmaxnreg.dec`). `COUNT` is 24 to 256 and a multiple of 8; others do not compile.
#[inline(always)]
#[track_caller]
pub fn give_registers<const COUNT: u32>() {
    const { assert!(COUNT >= 24 && COUNT <= 256 && COUNT.is_multiple_of(8), "24 to 256 registers, in eights") };
    target::give_registers::<COUNT>();
}
