//! Where a lane is in its grid, barriers and fences.

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
    /// The lane's index in its block (`%tid.x`). Blocks have one dimension.
    thread_idx_x;
    /// The block's index in the grid (`%ctaid.x`).
    block_idx_x;
    /// The block's index in the grid (`%ctaid.y`).
    block_idx_y;
    /// The block's index in the grid (`%ctaid.z`).
    block_idx_z;
    /// Lanes in a block (`%ntid.x`).
    block_dim_x;
    /// Blocks in the grid (`%nctaid.x`).
    grid_dim_x;
    /// Blocks in the grid (`%nctaid.y`).
    grid_dim_y;
    /// Blocks in the grid (`%nctaid.z`).
    grid_dim_z;
}

/// Zero, as long as a grid has less than 2^24 blocks along x, which the assembler cannot know. A constant that is
/// combined with it stays in a register.
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

/// Waits until every lane of the block is here, and orders their memory accesses (`bar.sync 0`).
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    target::sync_threads();
}

/// Waits until `count` lanes of the block are at barrier `id`, and orders their memory accesses (`bar.sync id, count`).
///
/// `id` is 1 to 15 (0 is the barrier of [`sync_threads`]); `count` is a multiple of 32, the same for all that meet.
#[inline(always)]
#[track_caller]
pub fn sync_named(id: u32, count: u32) {
    target::sync_named(id, count);
}

/// Orders this lane's accesses before the fence with those after it, as the block sees them (`fence.acq_rel.cta`).
#[inline(always)]
pub fn fence_block() {
    target::fence(Scope::Block);
}

/// Orders this lane's accesses before the fence with those after it, as the device sees them (`fence.acq_rel.gpu`).
#[inline(always)]
pub fn fence_device() {
    target::fence(Scope::Device);
}

/// Orders this lane's accesses before the fence with those after it, as the host sees them too (`fence.acq_rel.sys`).
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

/// The same value, but new to the compiler (`mov.b32`): what is computed from it inside a loop is computed there, and
/// not before the loop to be kept in a register throughout.
#[inline(always)]
#[must_use]
pub fn opaque(value: u32) -> u32 {
    target::opaque(value)
}

/// At the head of a loop: the assembler writes its body out once (`.pragma "nounroll"`).
#[inline(always)]
pub fn keep_rolled() {
    target::keep_rolled();
}

/// Nanoseconds on a clock that all SMs share (`%globaltimer`). The emulator counts its scheduling steps.
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
