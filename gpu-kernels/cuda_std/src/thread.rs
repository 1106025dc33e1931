//! Indices of lanes and blocks, barriers and fences, and hints to the compiler.

use crate::atomic::Scope;
use crate::target;

macro_rules! index {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            #[must_use]
            pub fn $name() -> u32 {
                target::$name()
            }
        )*
    };
}

index! {
    /// The lane's index in its block (`%tid.x`). Blocks are one-dimensional.
    thread_idx_x;
    /// The block's index in the grid, along x (`%ctaid.x`).
    block_idx_x;
    /// The block's index in the grid, along y (`%ctaid.y`).
    block_idx_y;
    /// The block's index in the grid, along z (`%ctaid.z`).
    block_idx_z;
    /// Lanes in a block (`%ntid.x`).
    block_dim_x;
    /// Blocks in the grid, along x (`%nctaid.x`).
    grid_dim_x;
    /// Blocks in the grid, along y (`%nctaid.y`).
    grid_dim_y;
    /// Blocks in the grid, along z (`%nctaid.z`).
    grid_dim_z;
}

/// Zero, in a form that the assembler cannot fold: a constant that is combined with it stays in a register. It is zero
/// as long as the grid has fewer than 2^24 blocks along x, which the assembler does not know.
#[inline(always)]
#[must_use]
pub fn unknown_zero() -> u32 {
    grid_dim_x() >> 24
}

/// The lane's index in its warp, 0 to 31.
#[inline(always)]
#[must_use]
pub fn lane_id() -> u32 {
    thread_idx_x() % 32
}

/// The warp's index in its block.
#[inline(always)]
#[must_use]
pub fn warp_id() -> u32 {
    thread_idx_x() / 32
}

/// Waits until every lane of the block has arrived, and orders their memory accesses (`bar.sync 0`).
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    target::sync_threads();
}

/// Waits until `count` lanes of the block have arrived at barrier `id`, and orders their memory accesses
/// (`bar.sync id, count`).
///
/// `id` is 1 to 15; 0 is the barrier of [`sync_threads`]. `count` is a multiple of 32, the same for all lanes that
/// meet.
#[inline(always)]
#[track_caller]
pub fn sync_named(id: u32, count: u32) {
    target::sync_named(id, count);
}

/// Orders this lane's earlier memory accesses before its later ones, as the block's lanes observe them
/// (`fence.acq_rel.cta`).
#[inline(always)]
pub fn fence_block() {
    target::fence(Scope::Block);
}

/// Orders this lane's earlier memory accesses before its later ones, as all lanes of the device observe them
/// (`fence.acq_rel.gpu`).
#[inline(always)]
pub fn fence_device() {
    target::fence(Scope::Device);
}

/// Orders this lane's earlier memory accesses before its later ones, as the device and the host observe them
/// (`fence.acq_rel.sys`).
#[inline(always)]
pub fn fence_system() {
    target::fence(Scope::System);
}

/// Suspends the lane for about `ns` nanoseconds, at most a millisecond (`nanosleep.u32`).
#[inline(always)]
#[track_caller]
pub fn nanosleep(ns: u32) {
    target::nanosleep(ns);
}

/// Returns `value`, but hides from the compiler that it is the same (`mov.b32`). What a loop computes from the result
/// is computed inside the loop, instead of before it and then kept in a register throughout.
#[inline(always)]
#[must_use]
pub fn opaque(value: u32) -> u32 {
    target::opaque(value)
}

/// Placed at the head of a loop, tells the assembler not to unroll it (`.pragma "nounroll"`).
#[inline(always)]
pub fn keep_rolled() {
    target::keep_rolled();
}

/// Nanoseconds on a clock that all SMs share (`%globaltimer`). Under the emulator, the number of scheduling steps so
/// far.
#[inline(always)]
#[must_use]
pub fn global_timer() -> u64 {
    target::global_timer()
}

/// Ends the launch with an error (`trap`).
#[inline(always)]
#[track_caller]
pub fn trap() -> ! {
    target::trap()
}
