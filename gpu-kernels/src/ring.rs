//! A ring of pipeline stages in shared memory, which producer warps fill by TMA and consumer warps read.
//!
//! Stages lie in the block's dynamic shared memory; a barrier for each says that it is full, and then one for each that
//! it is free.
//!
//! # Safety
//! [`Ring`] says what all that is unsafe here asks. Beyond that, a producer fills a stage that it has waited for, and
//! tells its full barrier of as many bytes as the copies bring. A consumer is never more than one phase behind a
//! barrier that it asks, which tells a phase from the next alone. One lane may call what waits; all lanes of a warp
//! call what releases.

use cuda_std::bulk::{self, Barrier};
use cuda_std::shared::{self, Shared};
use cuda_std::{thread, warp};

use crate::waiting;

/// The shape of a ring.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Where it begins.
    pub start: u32,
    pub stages: u32,
    /// Of a stage.
    pub bytes: u32,
    /// Where its barriers begin.
    pub barriers: u32,
}

impl Shape {
    /// A ring whose barriers lie behind its stages.
    pub const fn new(start: u32, stages: u32, bytes: u32) -> Self {
        Self { start, stages, bytes, barriers: start + stages * bytes }
    }

    /// Where its barriers end.
    pub const fn end(self) -> u32 {
        self.barriers + 2 * self.stages * 8
    }
}

/// Where a role stands in a ring.
///
/// # Safety
/// What is unsafe here asks that the block has shared memory for the ring's [shape](Shape), of which the barriers were
/// made by [`init`](Self::init) before the block synchronised; and that producers and consumers take stages in the same
/// order. Who reads a stage has waited for it, or has synchronised with one who has, and releases it once.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    /// Where dynamic shared memory begins, found once: a special register says so.
    base: u32,
    shape: Shape,
    stage: u32,
    parity: u32,
}

impl Ring {
    /// The start, for those who use what comes.
    #[inline(always)]
    pub fn consumer(shape: Shape) -> Self {
        Self { base: Self::base(), shape, stage: 0, parity: 0 }
    }

    /// The start, for those who fill it: the first turn finds every stage free.
    #[inline(always)]
    pub fn producer(shape: Shape) -> Self {
        Self { base: Self::base(), shape, stage: 0, parity: 1 }
    }

    /// Makes all barriers: a stage is full after one arrival and its bytes, and free after `consumers`. One lane does
    /// it, before anyone waits.
    ///
    /// # Safety
    /// The block has shared memory for the barriers, of which nothing is in use; `consumers` is at least 1. The lane
    /// [fences](bulk::fence_init) them afterwards, and then the block synchronises.
    #[inline(always)]
    pub unsafe fn init(shape: Shape, consumers: u32) {
        let mut stage = 0;
        while stage < shape.stages {
            let ring = Self { base: Self::base(), shape, stage, parity: 0 };
            // SAFETY: the caller's word.
            unsafe {
                ring.full().init(1);
                ring.empty().init(consumers);
            }
            stage += 1;
        }
    }

    /// The same, from a shuffle: so the assembler knows that a warp's lanes agree on it, and makes what is found from
    /// it in uniform registers.
    #[inline(always)]
    pub fn agreed(&self) -> Self {
        let [base, stage, parity] = [self.base, self.stage, self.parity].map(|word| warp::shuffle_idx(word, 0));
        Self { base, stage, parity, ..*self }
    }

    #[inline(always)]
    fn base() -> u32 {
        // SAFETY: an address, from which nothing is read here.
        thread::opaque(unsafe { shared::dynamic::<u8>(0) }.addr())
    }

    #[inline(always)]
    pub unsafe fn full(&self) -> Barrier {
        self.barrier(self.stage)
    }

    #[inline(always)]
    pub unsafe fn empty(&self) -> Barrier {
        self.barrier(self.shape.stages + self.stage)
    }

    #[inline(always)]
    fn barrier(&self, number: u32) -> Barrier {
        Barrier::at(Shared::from_raw(self.base + self.shape.barriers + number * 8))
    }

    /// A consumer waits until the stage is full.
    #[inline(always)]
    pub unsafe fn wait_full(&self) {
        // SAFETY: the caller's word.
        unsafe { waiting::for_phase(self.full(), self.parity) }
    }

    /// A consumer waits until the stage is full, as it likely is. The first look is outside of a loop: at the head of
    /// one that waits the assembler has the warp yield, which takes longer than a barrier's answer.
    #[inline(always)]
    pub unsafe fn wait_likely_full(&self) {
        // SAFETY: the caller's word.
        unsafe {
            if !self.full().try_wait(self.parity) {
                self.wait_full();
            }
        }
    }

    /// Whether the stage is full: for a consumer that asks before it needs it, since an answer takes its time.
    #[inline(always)]
    pub unsafe fn is_full(&self) -> bool {
        // SAFETY: the caller's word.
        unsafe { self.full().test_wait(self.parity) }
    }

    /// A consumer waits until this stage and another one are full. Both are asked at once, as an answer takes its time.
    ///
    /// # Safety
    /// As for [`wait_full`](Self::wait_full), of both.
    #[inline(always)]
    pub unsafe fn wait_full_beside(&self, other: &Self) {
        // SAFETY: the caller's word.
        unsafe {
            if !(self.full().try_wait(self.parity) & other.full().try_wait(other.parity)) {
                self.wait_full();
                other.wait_full();
            }
        }
    }

    /// A consumer waits until the next `count` stages are full, four at most, likewise.
    ///
    /// # Safety
    /// As for [`wait_full`](Self::wait_full), of all these; `count` is from 1 to 4.
    #[inline(always)]
    pub unsafe fn wait_full_few(&self, count: u32) {
        // Of one that is not wanted the first.
        let stage = |i: usize| self.ahead(if (i as u32) < count { i as u32 } else { 0 });
        // SAFETY: the caller's word.
        unsafe {
            let mut all = true;
            unroll!(I < 4; {
                let stage = stage(I);
                all &= stage.full().try_wait(stage.parity);
            });
            if !all {
                unroll!(I < 4; {
                    stage(I).wait_full();
                });
            }
        }
    }

    /// Whether the stage and the next one are full, likewise.
    #[inline(always)]
    pub unsafe fn is_full_pair(&self) -> bool {
        // SAFETY: the caller's word.
        unsafe { self.is_full() & self.ahead(1).is_full() }
    }

    /// A consumer waits until the stage and the next one are full. Both are asked at once, as an answer takes its time.
    ///
    /// # Safety
    /// As for [`wait_full`](Self::wait_full), of both: the next stage is to be filled, too.
    #[inline(always)]
    pub unsafe fn wait_full_pair(&self) {
        // SAFETY: the caller's word.
        unsafe { self.wait_full_beside(&self.ahead(1)) }
    }

    /// A producer waits until the stage is free.
    #[inline(always)]
    pub unsafe fn wait_empty(&self) {
        // SAFETY: the caller's word.
        unsafe { waiting::for_phase(self.empty(), self.parity) }
    }

    /// A producer waits until no more than `copies` of its stages, this one included, will be under way.
    ///
    /// # Safety
    /// `copies` is at least 1, and at most the ring's stages.
    #[inline(always)]
    pub unsafe fn wait_under_way(&self, copies: u32) {
        // The stage so many places ago, with the parity of its last turn: a fresh barrier has that turn behind it.
        let earlier = self.ahead(self.shape.stages - copies);
        // SAFETY: the caller's word.
        unsafe { waiting::for_phase(earlier.full(), earlier.parity) }
    }

    /// How many stages there are.
    #[inline(always)]
    pub const fn stages(&self) -> u32 {
        self.shape.stages
    }

    /// Where the stage begins, from the start of dynamic shared memory.
    #[inline(always)]
    pub const fn offset(&self) -> u32 {
        self.shape.start + self.stage * self.shape.bytes
    }

    /// The stage's memory.
    #[inline(always)]
    pub unsafe fn stage_buffer(&self) -> Shared<u8> {
        Shared::from_raw(self.base + self.offset())
    }

    /// Releases a stage that a whole warp has read by ordinary loads. Lanes with `arrives` do so, each its own stage.
    /// Without the fence TMA overwrote what was still being read.
    ///
    /// # Safety
    /// All lanes of the warp call it, and have waited for each stage that is released. Of all warps together as many
    /// lanes arrive for a stage as [`init`](Self::init) was told of.
    #[inline(always)]
    pub unsafe fn release(&self, arrives: bool) {
        // SAFETY: the caller's word.
        unsafe {
            bulk::fence_proxy_async();
            warp::sync_warp();
            self.empty().arrive_if(arrives);
        }
    }

    /// The same of a stage whose content went into `sum`. It is read by then, and needs no fence.
    ///
    /// # Safety
    /// As for [`release`](Self::release). `sum` is what the warp's products made of all that its lanes have read of the
    /// stage.
    #[inline(always)]
    pub unsafe fn release_behind(&self, sum: f32, arrives: bool) {
        // The assembler does not know that it is zero.
        let zero = sum.to_bits() & thread::unknown_zero();
        // SAFETY: the caller's word.
        unsafe {
            warp::sync_warp();
            Self { base: self.base + zero, ..*self }.empty().arrive_if(arrives);
        }
    }

    /// The same of a stage of which a part of each load went into `word`: a load ends as a whole.
    ///
    /// # Safety
    /// As for [`release`](Self::release); each lane's `word` depends on each of its loads from the stage.
    #[inline(always)]
    pub unsafe fn release_loaded(&self, word: u32, arrives: bool) {
        // SAFETY: the caller's word.
        unsafe { self.release_behind(f32::from_bits(word), arrives) }
    }

    /// The same of a stage that needs no fence: nothing of it is still being loaded, or no TMA fills it.
    ///
    /// # Safety
    /// All lanes of the warp call it, have waited for the stage, and are done with it. As many warps do as
    /// [`init`](Self::init) was told of.
    #[inline(always)]
    pub unsafe fn release_unfenced(&self) {
        // SAFETY: the caller's word.
        unsafe {
            warp::sync_warp();
            self.empty().arrive_if(thread::opaque(thread::lane_id()) == 0);
        }
    }

    /// Releases the stage and the next one, likewise.
    ///
    /// # Safety
    /// As for [`release`](Self::release), of both stages.
    #[inline(always)]
    pub unsafe fn release_pair(&self, arrives: bool) {
        // SAFETY: the caller's word.
        unsafe {
            self.release(arrives);
            self.ahead(1).empty().arrive_if(arrives);
        }
    }

    /// Where one lane stands, for all lanes of its warp.
    #[inline(always)]
    pub fn of_lane(mut self, lane: u32) -> Self {
        self.stage = warp::shuffle_idx(self.stage, lane);
        self.parity = warp::shuffle_idx(self.parity, lane);
        self
    }

    /// `n` stages on, a turn at most.
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
