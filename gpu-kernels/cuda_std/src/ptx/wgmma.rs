//! `wgmma`, and how registers are shared between warpgroups.

use core::arch::asm;

#[allow(improper_ctypes)]
unsafe extern "unadjusted" {
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn commit();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn wait(pending: u64);
    #[link_name = "llvm.nvvm.setmaxnreg.inc.sync.aligned.u32"]
    fn more_registers(count: u32);
    #[link_name = "llvm.nvvm.setmaxnreg.dec.sync.aligned.u32"]
    fn fewer_registers(count: u32);
}

#[inline(always)]
pub fn wgmma_declare() {
    // SAFETY: a declaration.
    unsafe { asm!(".reg .f32 acc<224>; .reg .b32 fragment<32>;", options(nomem, nostack)) }
}

#[inline(always)]
pub fn wgmma_fence() {
    // SAFETY: touches no memory.
    unsafe { fence() }
}

#[inline(always)]
pub fn wgmma_commit() {
    // SAFETY: closes a group.
    unsafe { commit() }
}

#[inline(always)]
pub fn wgmma_wait<const PENDING: u64>() {
    // SAFETY: waits.
    unsafe { wait(PENDING) }
}

#[inline(always)]
pub fn take_registers<const COUNT: u32>() {
    // SAFETY: touches no memory.
    unsafe { more_registers(COUNT) }
}

#[inline(always)]
pub fn give_registers<const COUNT: u32>() {
    // SAFETY: touches no memory.
    unsafe { fewer_registers(COUNT) }
}

/// The names of accumulators, in braces.
macro_rules! accumulators {
    ($first:tt $($i:tt)*) => { concat!("{{acc", $first $(, ",acc", $i)*, "}}") };
}

/// A product whose A is swizzled rows, by descriptors. Their upper words are `swizzled` (1,024 bytes between groups of
/// eight rows, or for columns between groups of eight along K; 128-byte swizzle) and `plain` (core matrices: the same
/// distance, no swizzle). `$rows` says which of the two B has. `$transposed` is 1 if B is columns.
macro_rules! product {
    ($shape:literal, ($($i:tt)*), $a:ident, $b:ident $rows:literal, $keep:ident) => {
        product!($shape, ($($i)*), $a, $b $rows, $keep, 0)
    };
    ($shape:literal, ($($i:tt)*), $a:ident, $b:ident $rows:literal, $keep:ident, $transposed:literal) => {
        asm!(
            "{{ .reg .pred keep; .reg .b32 swizzled, plain; .reg .b64 a, b; setp.ne.b32 keep, {keep}, 0; mov.b32 swizzled, 0x40000040;",
            concat!("mov.b32 plain, 0x40; mov.b64 a, {{{a}, swizzled}}; mov.b64 b, {{{b}, ", $rows, "}};"),
            concat!("wgmma.mma_async.sync.aligned.", $shape, ".f32.bf16.bf16 ", accumulators!($($i)*), ", a, b, keep, 1, 1, 0, ", $transposed, "; }}"),
            a = in(reg32) $a, b = in(reg32) $b, keep = in(reg32) u32::from($keep), options(nostack))
    };
}

#[inline(always)]
pub unsafe fn wgmma_n256(a: u32, b: u32, keep: bool) {
    // SAFETY: the caller's.
    unsafe {
        product!("m64n256k16", (0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
            64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
            96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119
            120 121 122 123 124 125 126 127), a, b "plain", keep);
    }
}

#[inline(always)]
pub unsafe fn wgmma_n128(a: u32, b: u32, keep: bool) {
    // SAFETY: the caller's.
    unsafe {
        product!("m64n128k16", (0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63), a, b "swizzled", keep);
    }
}

#[inline(always)]
pub unsafe fn wgmma_n128_by_cores(a: u32, b: u32, keep: bool) {
    // SAFETY: the caller's.
    unsafe {
        product!("m64n128k16", (0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63), a, b "plain", keep);
    }
}

/// The accumulators from 64 on.
macro_rules! upper {
    () => {
        accumulators!(
            64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
            96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119
            120 121 122 123 124 125 126 127)
    };
}

/// A product whose A is core matrices: its upper word says 1,024 bytes between groups of eight rows, no swizzle. B is
/// swizzled rows.
macro_rules! cores {
    ($a:ident, $b:ident, $keep:ident, $shape:literal, $($accumulators:tt)*) => {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "{{ .reg .pred keep; .reg .b32 high, plain; .reg .b64 a, b; setp.ne.b32 keep, {keep}, 0; mov.b32 high, 0x40000040;",
                "mov.b32 plain, 0x40; mov.b64 a, {{{a}, plain}}; mov.b64 b, {{{b}, high}};",
                concat!("wgmma.mma_async.sync.aligned.", $shape, ".f32.bf16.bf16 ", $($accumulators)*, ", a, b, keep, 1, 1, 0, 0; }}"),
                a = in(reg32) $a, b = in(reg32) $b, keep = in(reg32) u32::from($keep), options(nostack));
        }
    };
}

/// A product of 64 columns of C, in 32 accumulators. A is swizzled rows; so is B, or B is columns (`$transposed` 1).
macro_rules! n64 {
    ($a:ident, $b:ident, $keep:ident, $transposed:literal, $second:ident) => {
        // SAFETY: the caller's.
        unsafe {
            if $second {
                product!("m64n64k16", (96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116
                    117 118 119 120 121 122 123 124 125 126 127), $a, $b "swizzled", $keep, $transposed);
            } else {
                product!("m64n64k16", (64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90
                    91 92 93 94 95), $a, $b "swizzled", $keep, $transposed);
            }
        }
    };
}

#[inline(always)]
pub unsafe fn wgmma_n64<const SECOND: bool>(a: u32, b: u32, keep: bool) {
    n64!(a, b, keep, 0, SECOND);
}

#[inline(always)]
pub unsafe fn wgmma_n64_columns<const SECOND: bool>(a: u32, b: u32, keep: bool) {
    n64!(a, b, keep, 1, SECOND);
}

/// A product whose A is four fragments. B's upper word says 1,024 bytes between groups of eight rows, 128-byte swizzle.
macro_rules! fragments {
    ($step:ident, $b:ident, $keep:ident, $shape:literal, $transposed:literal, $($accumulators:tt)*) => {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "{{ .reg .pred keep; .reg .b32 high; .reg .b64 b; setp.ne.b32 keep, {keep}, 0; mov.b32 high, 0x40000040;",
                "mov.b64 b, {{{b}, high}};",
                concat!("wgmma.mma_async.sync.aligned.", $shape, ".f32.bf16.bf16 ", $($accumulators)*,
                    ", {{fragment{a0}, fragment{a1}, fragment{a2}, fragment{a3}}}, b, keep, 1, 1, ", $transposed, "; }}"),
                a0 = const 4 * $step, a1 = const 4 * $step + 1, a2 = const 4 * $step + 2, a3 = const 4 * $step + 3,
                b = in(reg32) $b, keep = in(reg32) u32::from($keep), options(nostack));
        }
    };
}

#[inline(always)]
pub unsafe fn wgmma_n128_columns<const STEP: usize>(b: u32, keep: bool) {
    fragments!(STEP, b, keep, "m64n128k16", 1, upper!());
}

#[inline(always)]
pub unsafe fn wgmma_n128_cores(a: u32, b: u32, keep: bool) {
    cores!(a, b, keep, "m64n128k16", upper!());
}

#[inline(always)]
pub unsafe fn wgmma_n96_cores(a: u32, b: u32, keep: bool) {
    cores!(
        a,
        b,
        keep,
        "m64n96k16",
        accumulators!(
        64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
        96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111)
    );
}

#[inline(always)]
pub unsafe fn wgmma_n64_upper<const STEP: usize>(b: u32, keep: bool) {
    fragments!(
        STEP,
        b,
        keep,
        "m64n64k16",
        0,
        accumulators!(64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95)
    );
}

#[inline(always)]
pub unsafe fn wgmma_n128_upper<const STEP: usize>(b: u32, keep: bool) {
    fragments!(STEP, b, keep, "m64n128k16", 0, upper!());
}

#[inline(always)]
pub unsafe fn wgmma_load_fragments<const STEP: usize>(row: u32) {
    // SAFETY: the caller's. Not pure: the block stays where it is among products and waits.
    unsafe {
        asm!("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{fragment{a0}, fragment{a1}, fragment{a2}, fragment{a3}}}, [{row}];",
            a0 = const 4 * STEP, a1 = const 4 * STEP + 1, a2 = const 4 * STEP + 2, a3 = const 4 * STEP + 3,
            row = in(reg32) row, options(nostack, readonly));
    }
}

#[inline(always)]
pub fn wgmma_get<const I: usize>() -> f32 {
    let value: f32;
    // SAFETY: moves a register that `wgmma_declare` named.
    unsafe { asm!("mov.f32 {v}, acc{i};", v = out(reg32) value, i = const I, options(nostack)) }
    value
}

#[inline(always)]
pub fn wgmma_set<const I: usize>(value: f32) {
    // SAFETY: moves a register that `wgmma_declare` named.
    unsafe { asm!("mov.f32 acc{i}, {v};", v = in(reg32) value, i = const I, options(nostack)) }
}

#[inline(always)]
pub fn wgmma_set_fragment<const I: usize>(low: f32, high: f32) {
    // SAFETY: writes a register that `wgmma_declare` named. Not pure: the block stays where it is among products and
    // waits.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 fragment{i}, {high}, {low};", high = in(reg32) high, low = in(reg32) low, i = const I,
            options(nostack));
    }
}

#[inline(always)]
pub fn wgmma_put_fragment<const I: usize>(word: u32) {
    // SAFETY: writes a register that `wgmma_declare` named. Not pure: the block stays where it is among products and
    // waits.
    unsafe { asm!("mov.b32 fragment{i}, {word};", word = in(reg32) word, i = const I, options(nostack)) }
}

/// A product of e4m3, by descriptors. A's upper word is `$high`; B is core matrices.
macro_rules! e4m3 {
    ($a:ident, $high:literal, $b:ident, $keep:ident, $shape:literal, ($($i:tt)*)) => {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "{{ .reg .pred keep; .reg .b32 high, plain; .reg .b64 a, b; setp.ne.b32 keep, {keep}, 0;",
                concat!("mov.b32 high, ", $high, "; mov.b32 plain, 0x40; mov.b64 a, {{{a}, high}}; mov.b64 b, {{{b}, plain}};"),
                concat!("wgmma.mma_async.sync.aligned.", $shape, ".f32.e4m3.e4m3 ", accumulators!($($i)*), ", a, b, keep, 1, 1; }}"),
                a = in(reg32) $a, b = in(reg32) $b, keep = in(reg32) u32::from($keep), options(nostack));
        }
    };
}

#[inline(always)]
pub unsafe fn wgmma_e4m3_n128<const SECOND: bool>(a: u32, b: u32, keep: bool) {
    if SECOND {
        e4m3!(a, "0x40000040", b, keep, "m64n128k32", (64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79
            80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107
            108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127));
        return;
    }
    e4m3!(a, "0x40000040", b, keep, "m64n128k32",
        (0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
        32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63));
}

#[inline(always)]
pub unsafe fn wgmma_e4m3_n8_cores(a: u32, b: u32, keep: bool) {
    e4m3!(a, "0x40", b, keep, "m64n8k32", (64 65 66 67));
}

#[inline(always)]
pub unsafe fn wgmma_e4m3_n64_cores(a: u32, b: u32, keep: bool) {
    e4m3!(a, "0x40", b, keep, "m64n64k32", (0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
            16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31));
}
