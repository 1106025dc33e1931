//! Exchange between the 32 lanes of a warp. Every function is collective: all lanes of the warp must call it together.
//!
//! Only [`sync_warp`] orders memory accesses. Shuffles and votes exchange their values and order nothing.

use crate::target;

/// A value that a shuffle can carry: one or two 32-bit words.
pub trait Word: Copy + sealed::Sealed {
    /// Whether the value takes both words.
    #[doc(hidden)]
    const WIDE: bool;
    /// Splits the value into its low and its high word; the high word is 0 if one word is enough.
    #[doc(hidden)]
    fn split(self) -> (u32, u32);
    /// The value that these words make up.
    #[doc(hidden)]
    fn join(low: u32, high: u32) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! words {
    ($($t:ty, $wide:literal, |$value:ident| $split:expr, |$low:ident, $high:ident| $join:expr;)*) => {
        $(
            impl sealed::Sealed for $t {}
            impl Word for $t {
                const WIDE: bool = $wide;
                #[inline(always)]
                fn split(self) -> (u32, u32) {
                    let $value = self;
                    $split
                }
                #[inline(always)]
                fn join($low: u32, $high: u32) -> Self {
                    $join
                }
            }
        )*
    };
}

words! {
    u32, false, |value| (value, 0), |low, _high| low;
    i32, false, |value| (value as u32, 0), |low, _high| low as i32;
    f32, false, |value| (value.to_bits(), 0), |low, _high| f32::from_bits(low);
    u64, true, |value| (value as u32, (value >> 32) as u32), |low, high| u64::from(high) << 32 | u64::from(low);
    i64, true, |value| (value as u64).split(), |low, high| u64::join(low, high) as i64;
}

macro_rules! shuffles {
    ($($(#[$doc:meta])* $name:ident($argument:ident);)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            #[track_caller]
            pub fn $name<T: Word>(value: T, $argument: u32) -> T {
                let (low, high) = value.split();
                let low = target::$name(low, $argument);
                let high = if T::WIDE { target::$name(high, $argument) } else { 0 };
                T::join(low, high)
            }
        )*
    };
}

shuffles! {
    /// The `value` of the lane whose index is this lane's XOR `lane_mask` (`shfl.sync.bfly.b32`).
    shuffle_xor(lane_mask);
    /// The `value` of lane `lane` modulo 32 (`shfl.sync.idx.b32`).
    shuffle_idx(lane);
    /// The `value` of the lane `delta` below, or this lane's own if there is none (`shfl.sync.up.b32`).
    shuffle_up(delta);
    /// The `value` of the lane `delta` above, or this lane's own if there is none (`shfl.sync.down.b32`).
    shuffle_down(delta);
}

/// One bit for each lane, bit 0 for lane 0: whether the lane's `predicate` holds (`vote.sync.ballot.b32`).
#[inline(always)]
#[must_use]
#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    target::ballot(predicate)
}

/// Whether `predicate` holds for some lane (`vote.sync.any.pred`).
#[inline(always)]
#[must_use]
#[track_caller]
pub fn any(predicate: bool) -> bool {
    target::any(predicate)
}

/// Whether `predicate` holds for every lane (`vote.sync.all.pred`).
#[inline(always)]
#[must_use]
#[track_caller]
pub fn all(predicate: bool) -> bool {
    target::all(predicate)
}

/// The largest `value` of all lanes (`redux.sync.max.u32`).
#[inline(always)]
#[must_use]
#[track_caller]
pub fn max(value: u32) -> u32 {
    target::max_of_warp(value)
}

/// The sum of `value` over the lanes up to and including this one. Every lane of the warp takes part. Integers alone:
/// of floats the order of the sum would matter.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn inclusive_sum<T: Word + core::ops::AddAssign + Ord>(mut value: T) -> T {
    let mut delta = 1;
    while delta < 32 {
        let before = shuffle_up(value, delta);
        if crate::thread::lane_id() >= delta {
            value += before;
        }
        delta *= 2;
    }
    value
}

/// Waits for all lanes of the warp, and orders their memory accesses (`bar.warp.sync`).
#[inline(always)]
#[track_caller]
pub fn sync_warp() {
    target::sync_warp();
}

/// True for exactly one lane of the warp. From sm_90 on this is `elect.sync`, which tells the assembler that only one
/// lane goes on; before sm_90 it is a comparison of the lane's index with 0.
#[inline(always)]
#[must_use]
#[track_caller]
pub fn elect() -> bool {
    target::elect()
}
