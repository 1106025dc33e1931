//! A ring of slots in shared memory between warps that fill it by the copy engine and warps that use what came.
//!
//! It begins at the block's dynamic shared memory: the slots, then a barrier for each that says it is full, then one for each that says it is free.

use cuda_std::bulk::Barrier;
use cuda_std::shared::{self, Shared};

/// The shape of a ring.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub stages: u32,
    /// Of a slot.
    pub bytes: u32,
}

impl Shape {
    /// Where the barriers begin.
    pub const fn barriers(self) -> u32 {
        self.stages * self.bytes
    }

    /// Bytes of slots and barriers.
    pub const fn shared_bytes(self) -> u32 {
        self.barriers() + 2 * self.stages * 8
    }
}

/// Where a role stands in a ring.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    shape: Shape,
    stage: u32,
    parity: u32,
}

impl Ring {
    /// The start, for those who use what comes.
    #[inline(always)]
    pub const fn consumer(shape: Shape) -> Self {
        Self { shape, stage: 0, parity: 0 }
    }

    /// A place that [`consumer_place`](Self::consumer_place) told.
    #[inline(always)]
    pub const fn at(shape: Shape, stage: u32, parity: u32) -> Self {
        Self { shape, stage, parity }
    }

    /// For a consumer, where this producer stands: the slot, and what its full barrier is waited for with.
    #[inline(always)]
    pub const fn consumer_place(&self) -> (u32, u32) {
        (self.stage, self.parity ^ 1)
    }

    /// The start, for those who fill it: the first turn finds every slot free.
    #[inline(always)]
    pub const fn producer(shape: Shape) -> Self {
        Self { shape, stage: 0, parity: 1 }
    }

    /// Makes all barriers: a slot is full after `producers` arrivals and their bytes, and free after `consumers`. One lane does it, before anyone waits.
    #[inline(always)]
    pub unsafe fn init(shape: Shape, producers: u32, consumers: u32) {
        let mut stage = 0;
        while stage < shape.stages {
            let ring = Self { shape, stage, parity: 0 };
            unsafe {
                ring.full().init(producers);
                ring.empty().init(consumers);
            }
            stage += 1;
        }
    }

    #[inline(always)]
    pub unsafe fn full(&self) -> Barrier {
        unsafe { Barrier::at(shared::dynamic(self.shape.barriers() + self.stage * 8)) }
    }

    #[inline(always)]
    pub unsafe fn empty(&self) -> Barrier {
        unsafe { Barrier::at(shared::dynamic(self.shape.barriers() + (self.shape.stages + self.stage) * 8)) }
    }

    /// Waits until the slot is full (a consumer) or free (a producer).
    #[inline(always)]
    pub unsafe fn wait_full(&self) {
        unsafe { self.full().wait(self.parity) }
    }

    /// Waits until what a consumer's slot held a turn before was given back by all. A consumer that got to know of its slot before the producer filled it
    /// could be a turn ahead of others, and would take the parity of the turn before the last for its own.
    #[inline(always)]
    pub unsafe fn wait_last_turn(&self) {
        unsafe { self.empty().wait(self.parity ^ 1) }
    }

    /// [`wait_full`](Self::wait_full) for such a consumer.
    #[inline(always)]
    pub unsafe fn wait_full_after_last_turn(&self) {
        unsafe {
            self.wait_last_turn();
            self.wait_full();
        }
    }

    /// A producer's wait until no more than `copies` of its slots, this one included, will be under way.
    #[inline(always)]
    pub unsafe fn wait_under_way(&self, copies: u32) {
        // The slot so many places ago, with the parity of its last turn: a fresh barrier has that turn behind it.
        let earlier = self.ahead(self.shape.stages - copies);
        unsafe { earlier.full().wait(earlier.parity) }
    }

    #[inline(always)]
    pub unsafe fn wait_empty(&self) {
        unsafe { self.empty().wait(self.parity) }
    }

    /// Where the slot begins, from the start of dynamic shared memory.
    #[inline(always)]
    pub const fn offset(&self) -> u32 {
        self.stage * self.shape.bytes
    }

    /// The slot.
    #[inline(always)]
    pub unsafe fn slot(&self) -> Shared<u8> {
        unsafe { shared::dynamic(self.offset()) }
    }

    /// `n` slots on, less than a turn.
    #[inline(always)]
    pub const fn ahead(mut self, n: u32) -> Self {
        self.stage += n;
        if self.stage >= self.shape.stages {
            self.stage -= self.shape.stages;
            self.parity ^= 1;
        }
        self
    }
}
