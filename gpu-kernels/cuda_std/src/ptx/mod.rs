//! The device's bodies of the intrinsics: PTX, and LLVM's intrinsics where there are some.
//!
//! LLVM does not know that an `asm!` block may be convergent, and could move one into a branch that only some lanes
//! take. So whatever a warp or a block does together (barriers, shuffles, votes, mma) goes through LLVM's intrinsics.
//! Memory accesses are `asm!` that names their state space, since Rust's pointers are generic addresses.

use core::arch::asm;
use core::arch::nvptx;

use crate::atomic::Scope;

pub mod atomic;
#[cfg(cuda_arch = "sm_90")]
mod bulk;
mod collective;
mod memory;
#[cfg(cuda_arch = "sm_90")]
mod tensor;
#[cfg(cuda_arch = "sm_90a")]
mod wgmma;

#[cfg(cuda_arch = "sm_90")]
pub use bulk::*;
pub use collective::*;
pub use memory::*;
#[cfg(cuda_arch = "sm_90")]
pub use tensor::*;
#[cfg(cuda_arch = "sm_90a")]
pub use wgmma::*;

macro_rules! index {
    ($($name:ident $intrinsic:ident;)*) => {
        $(
            #[inline(always)]
            pub fn $name() -> u32 {
                // SAFETY: reads a special register.
                unsafe { nvptx::$intrinsic() as u32 }
            }
        )*
    };
}

index! {
    thread_idx_x _thread_idx_x;
    block_idx_x _block_idx_x;
    block_idx_y _block_idx_y;
    block_idx_z _block_idx_z;
    block_dim_x _block_dim_x;
    grid_dim_x _grid_dim_x;
    grid_dim_y _grid_dim_y;
    grid_dim_z _grid_dim_z;
}

#[inline(always)]
pub fn trap() -> ! {
    // SAFETY: ends the launch.
    unsafe { nvptx::trap() }
}

#[inline(always)]
pub fn fence(scope: Scope) {
    // SAFETY: a fence has no operands.
    unsafe {
        match scope {
            Scope::Block => asm!("fence.acq_rel.cta;", options(nostack)),
            Scope::Device => asm!("fence.acq_rel.gpu;", options(nostack)),
            Scope::System => asm!("fence.acq_rel.sys;", options(nostack)),
        }
    }
}

#[inline(always)]
pub fn nanosleep(ns: u32) {
    // SAFETY: touches nothing.
    unsafe { asm!("nanosleep.u32 {ns};", ns = in(reg32) ns, options(nostack)) }
}

#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    let out;
    // SAFETY: moves a register.
    unsafe { asm!("mov.b32 {out}, {value};", out = out(reg32) out, value = in(reg32) value, options(nostack)) }
    out
}

#[inline(always)]
pub fn keep_rolled() {
    // SAFETY: no instruction.
    unsafe { asm!(".pragma \"nounroll\";", options(nostack)) }
}

#[inline(always)]
pub fn global_timer() -> u64 {
    let time: u64;
    // SAFETY: reads a special register. Not pure: it differs each time.
    unsafe { asm!("mov.u64 {time}, %globaltimer;", time = out(reg64) time, options(nomem, nostack)) }
    time
}

macro_rules! unary {
    ($($name:ident $instruction:literal;)*) => {
        $(
            #[inline(always)]
            pub fn $name(x: f32) -> f32 {
                let y: f32;
                // SAFETY: arithmetic.
                unsafe {
                    asm!(concat!($instruction, " {y}, {x};"), y = out(reg32) y, x = in(reg32) x,
                        options(pure, nomem, nostack));
                }
                y
            }
        )*
    };
}

unary! {
    exp2 "ex2.approx.ftz.f32";
    log2 "lg2.approx.ftz.f32";
    rcp "rcp.approx.ftz.f32";
    rsqrt "rsqrt.approx.ftz.f32";
    sqrt "sqrt.rn.f32";
    abs "abs.f32";
}

#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    let d: f32;
    // SAFETY: arithmetic.
    unsafe {
        asm!("fma.rn.f32 {d}, {a}, {b}, {c};", d = out(reg32) d, a = in(reg32) a, b = in(reg32) b, c = in(reg32) c,
            options(pure, nomem, nostack));
    }
    d
}

#[inline(always)]
pub fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    let d: u32;
    // SAFETY: arithmetic.
    unsafe {
        asm!("fma.rn.bf16x2 {d}, {a}, {b}, {c};", d = out(reg32) d, a = in(reg32) a, b = in(reg32) b,
            c = in(reg32) c, options(pure, nomem, nostack));
    }
    d
}

#[inline(always)]
pub fn broadcast_halves(word: u32) -> [u32; 2] {
    let (low, high);
    // SAFETY: moves registers.
    unsafe {
        asm!(
            "{{ .reg .b16 %l, %h; mov.b32 {{%l, %h}}, {word};",
            "mov.b32 {low}, {{%l, %l}}; mov.b32 {high}, {{%h, %h}}; }}",
            word = in(reg32) word, low = out(reg32) low, high = out(reg32) high, options(pure, nomem, nostack));
    }
    [low, high]
}

#[inline(always)]
pub fn permute(low: u32, high: u32, which: u32) -> u32 {
    let word: u32;
    // SAFETY: arithmetic.
    unsafe {
        asm!("prmt.b32 {word}, {low}, {high}, {which};", word = out(reg32) word, low = in(reg32) low,
            high = in(reg32) high, which = in(reg32) which, options(pure, nomem, nostack));
    }
    word
}

#[inline(always)]
pub fn pack_e4m3(x: [f32; 4]) -> u32 {
    let word: u32;
    // SAFETY: arithmetic.
    unsafe {
        asm!("{{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {b}, {a}; cvt.rn.satfinite.e4m3x2.f32 high, {d}, {c};",
            "mov.b32 {word}, {{low, high}}; }}",
            a = in(reg32) x[0], b = in(reg32) x[1], c = in(reg32) x[2], d = in(reg32) x[3], word = out(reg32) word,
            options(pure, nomem, nostack));
    }
    word
}

#[inline(always)]
pub fn pack_bf16(low: f32, high: f32) -> u32 {
    let word: u32;
    // SAFETY: arithmetic.
    unsafe {
        asm!("cvt.rn.bf16x2.f32 {word}, {high}, {low};", word = out(reg32) word, high = in(reg32) high,
            low = in(reg32) low, options(pure, nomem, nostack));
    }
    word
}
