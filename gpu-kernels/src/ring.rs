//! A ring of pipeline stages in shared memory, which producer warps fill by TMA and consumer warps read.
//!
//! Stages lie in the CTA's dynamic shared memory. Each has a full barrier and an empty barrier. The ring's [`Shape`]
//! says where the full barriers begin; the empty barriers follow them.
//!
//! # Handshake
//! ```text
//! producer                                                  consumers
//! wait_empty    the empty barrier's phase has ended         wait_full     the full barrier's phase has ended
//! full          one arrival, which announces the bytes      read the stage
//! copies        bring the bytes; then the phase ends        release_*     arrivals; after the last the phase ends
//! ahead(1)                                                  ahead(1)
//! ```
//!
//! Each trip around the ring ends one phase of each barrier. A wait names the parity of the phase that is to end. Both
//! sides flip theirs when they pass the last stage. A consumer begins with parity 0, so it waits for the first fill. A
//! producer begins with parity 1: that counts as ended on a fresh barrier, so the first trip finds every stage free.
//!
//! A phase of a full barrier takes one arrival, and the bytes that the arrival announces (none where the producer
//! itself writes the stage). A phase of an empty barrier takes as many arrivals as [`init`](Ring::init) was told:
//!
//! | ring | arrivals that free a stage |
//! |---|---|
//! | [decode](crate::decode) | 8: one of each consumer warp, or two of each of the four warps that read a chunk |
//! | `batched`: weights and pages | 8: one of each consumer warp, or four of each of the two warps that read a page |
//! | `batched`: activations, items; messages | 8: one of each consumer warp; 1 |
//! | `gemm` in bf16 | 2 of this CTA and of each that shares rows or weights with it: one of each warpgroup |
//! | `gemm` in e4m3 | 8: one of each warp that multiplies |
//! | `attend_batch` | none: the warp that fills its ring is the one that reads it |
//!
//! # Which release
//! TMA's writes are not ordered behind a warp's ordinary loads. So whoever releases a stage sees to it that no load
//! from it is still under way:
//!
//! | the stage was read | release by |
//! |---|---|
//! | by ordinary loads | [`release`](Ring::release), or [`release_pair`](Ring::release_pair) for two |
//! | by such loads, whose values all went into products | [`release_behind`](Ring::release_behind) a sum of these |
//! | by such loads, with a word that depends on each of them | [`release_loaded`](Ring::release_loaded) |
//! | by `wgmma` alone, which was waited for | an arrival at [`empty`](Ring::empty), by each warp or warpgroup |
//! | by loads whose values were used already; or TMA does not fill it | [`release_unfenced`](Ring::release_unfenced) |
//!
//! Only [`release`](Ring::release) and [`release_pair`](Ring::release_pair) pay for a fence.
//!
//! # Safety
//! [`Ring`] says what all that is unsafe here asks. Beyond that, a producer fills only a stage that it has waited for,
//! and tells the stage's full barrier of as many bytes as the copies bring. A consumer is never more than one phase
//! behind a barrier that it asks: a parity tells a phase from the next one, and no more. One lane may call what waits;
//! all lanes of a warp call what releases.

use cuda_std::bulk::{self, Barrier};
use cuda_std::shared::{self, Shared};
use cuda_std::{device, thread, warp};

use crate::waiting;

/// The shape of a ring: offsets are in bytes from the start of dynamic shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Where the stages begin.
    pub start: u32,
    pub stages: u32,
    /// Bytes of a stage.
    pub bytes: u32,
    /// Where the barriers begin.
    pub barriers: u32,
}

impl Shape {
    /// A ring whose barriers lie behind its stages.
    pub const fn new(start: u32, stages: u32, bytes: u32) -> Self {
        Self { start, stages, bytes, barriers: start + stages * bytes }
    }

    /// Where the barriers end.
    pub const fn end(self) -> u32 {
        self.barriers + 2 * self.stages * 8
    }
}

/// The position of a producer or a consumer in a ring: a stage, and the parity of its barriers' phase.
///
/// # Safety
/// What is unsafe here asks that the CTA has shared memory for the ring's [shape](Shape); that [`init`](Self::init)
/// made the barriers before the CTA synchronised; and that producers and consumers take stages in the same order.
/// Whoever reads a stage has waited for it, or has synchronised with a thread that has, and releases it once.
#[derive(Clone, Copy)]
pub(crate) struct Ring {
    /// Where dynamic shared memory begins. Kept, since it takes a special register to find out.
    base: u32,
    shape: Shape,
    stage: u32,
    parity: u32,
}

impl Ring {
    /// The first stage, for a consumer.
    #[device]
    pub fn consumer(shape: Shape) -> Self {
        Self { base: Self::base(), shape, stage: 0, parity: 0 }
    }

    /// The first stage, for a producer: on the first trip it finds every stage free.
    #[device]
    pub fn producer(shape: Shape) -> Self {
        Self { base: Self::base(), shape, stage: 0, parity: 1 }
    }

    /// Makes all barriers. A stage is full after one arrival and its bytes, and free after `consumers` arrivals. One
    /// lane calls it, before anyone waits.
    ///
    /// # Safety
    /// The CTA has shared memory for the barriers, and none of it is in use; `consumers` is at least 1. The lane
    /// [fences](bulk::fence_init) them afterwards, and then the CTA synchronises.
    #[device]
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

    /// This position, passed through a shuffle. It tells the assembler that a warp's lanes agree on it, so what is
    /// computed from it goes to uniform registers.
    #[device]
    pub fn agreed(&self) -> Self {
        let [base, stage, parity] = [self.base, self.stage, self.parity].map(|word| warp::shuffle_idx(word, 0));
        Self { base, stage, parity, ..*self }
    }

    #[device]
    fn base() -> u32 {
        // SAFETY: an address, from which nothing is read here.
        thread::opaque(unsafe { shared::dynamic::<u8>(0) }.addr())
    }

    #[device]
    pub unsafe fn full(&self) -> Barrier {
        self.barrier(self.stage)
    }

    #[device]
    pub unsafe fn empty(&self) -> Barrier {
        self.barrier(self.shape.stages + self.stage)
    }

    #[device]
    fn barrier(&self, number: u32) -> Barrier {
        Barrier::at(Shared::from_raw(self.base + self.shape.barriers + number * 8))
    }

    /// A consumer waits until the stage is full.
    #[device]
    pub unsafe fn wait_full(&self) {
        // SAFETY: the caller's word.
        unsafe { waiting::for_phase(self.full(), self.parity) }
    }

    /// A consumer waits until the stage is full, as it probably is already. The first poll is outside the loop: at the
    /// head of a waiting loop the assembler makes the warp yield, which takes longer than a barrier's answer.
    #[device]
    pub unsafe fn wait_likely_full(&self) {
        // SAFETY: the caller's word.
        unsafe {
            if !self.full().try_wait(self.parity) {
                self.wait_full();
            }
        }
    }

    /// Whether the stage is full. A consumer can ask before it needs the stage, to hide the latency of the answer.
    #[device]
    pub unsafe fn is_full(&self) -> bool {
        // SAFETY: the caller's word.
        unsafe { self.full().test_wait(self.parity) }
    }

    /// A consumer waits until this stage and `other`'s are full. It polls both at once, to hide the latency of the
    /// answers.
    ///
    /// # Safety
    /// As for [`wait_full`](Self::wait_full), of both.
    #[device]
    pub unsafe fn wait_full_beside(&self, other: &Self) {
        // SAFETY: the caller's word.
        unsafe {
            if !(self.full().try_wait(self.parity) & other.full().try_wait(other.parity)) {
                self.wait_full();
                other.wait_full();
            }
        }
    }

    /// A consumer waits until the next `count` stages are full, this one included. It polls all of them at once.
    ///
    /// # Safety
    /// As for [`wait_full`](Self::wait_full), of all these; `count` is from 1 to 4.
    #[device]
    pub unsafe fn wait_full_few(&self, count: u32) {
        // Beyond `count`, the first stage again.
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

    /// Whether this stage and the next one are full: see `is_full`.
    #[device]
    pub unsafe fn is_full_pair(&self) -> bool {
        // SAFETY: the caller's word.
        unsafe { self.is_full() & self.ahead(1).is_full() }
    }

    /// A consumer waits until this stage and the next one are full. It polls both at once, to hide the latency of the
    /// answers.
    ///
    /// # Safety
    /// As for [`wait_full`](Self::wait_full), of both: the next stage is to be filled, too.
    #[device]
    pub unsafe fn wait_full_pair(&self) {
        // SAFETY: the caller's word.
        unsafe { self.wait_full_beside(&self.ahead(1)) }
    }

    /// A producer waits until the stage is free.
    #[device]
    pub unsafe fn wait_empty(&self) {
        // SAFETY: the caller's word.
        unsafe { waiting::for_phase(self.empty(), self.parity) }
    }

    /// A producer waits until at most `copies` fills of stages will be under way, this stage's included.
    ///
    /// # Safety
    /// `copies` is at least 1, and at most the ring's stages.
    #[device]
    pub unsafe fn wait_under_way(&self, copies: u32) {
        // The stage that was filled `copies` places ago, with the parity of its latest fill. A fresh barrier counts as
        // filled.
        let earlier = self.ahead(self.shape.stages - copies);
        // SAFETY: the caller's word.
        unsafe { waiting::for_phase(earlier.full(), earlier.parity) }
    }

    /// How many stages there are.
    #[device]
    pub const fn stages(&self) -> u32 {
        self.shape.stages
    }

    /// Where the stage begins, from the start of dynamic shared memory.
    #[device]
    pub const fn offset(&self) -> u32 {
        self.shape.start + self.stage * self.shape.bytes
    }

    /// The stage's memory.
    #[device]
    pub unsafe fn stage_buffer(&self) -> Shared<u8> {
        Shared::from_raw(self.base + self.offset())
    }

    /// Releases a stage that the whole warp has read by ordinary loads. Every lane with `arrives` releases its own
    /// stage. The fence keeps TMA from overwriting what is still being read.
    ///
    /// # Safety
    /// All lanes of the warp call it, and have waited for each stage that is released. Over all warps, as many lanes
    /// arrive for a stage as [`init`](Self::init) was told of.
    #[device]
    pub unsafe fn release(&self, arrives: bool) {
        // SAFETY: the caller's word.
        unsafe {
            bulk::fence_proxy_async();
            warp::sync_warp();
            self.empty().arrive_if(arrives);
        }
    }

    /// As [`release`](Self::release), of a stage whose content went into `sum`. The arrival depends on `sum`, so the
    /// stage has been read by then, and no fence is needed.
    ///
    /// # Safety
    /// As for [`release`](Self::release). `sum` is what the warp's products made of all that its lanes have read of the
    /// stage.
    #[device]
    pub unsafe fn release_behind(&self, sum: f32, arrives: bool) {
        // Always zero, but the assembler does not know that.
        let zero = sum.to_bits() & thread::unknown_zero();
        // SAFETY: the caller's word.
        unsafe {
            warp::sync_warp();
            Self { base: self.base + zero, ..*self }.empty().arrive_if(arrives);
        }
    }

    /// As `release_behind`, of a stage of which a part of each load went into `word`: that is
    /// enough, since a load ends as a whole.
    ///
    /// # Safety
    /// As for [`release`](Self::release); each lane's `word` depends on each of its loads from the stage.
    #[device]
    pub unsafe fn release_loaded(&self, word: u32, arrives: bool) {
        // SAFETY: the caller's word.
        unsafe { self.release_behind(f32::from_bits(word), arrives) }
    }

    /// As [`release`](Self::release), of a stage that needs no fence: no load from it is under way any more, or TMA
    /// does not fill it.
    ///
    /// # Safety
    /// All lanes of the warp call it, have waited for the stage, and are done with it. As many warps call it as
    /// [`init`](Self::init) was told of.
    #[device]
    pub unsafe fn release_unfenced(&self) {
        // SAFETY: the caller's word.
        unsafe {
            warp::sync_warp();
            self.empty().arrive_if(thread::opaque(thread::lane_id()) == 0);
        }
    }

    /// As [`release`](Self::release), of this stage and the next one.
    ///
    /// # Safety
    /// As for [`release`](Self::release), of both stages.
    #[device]
    pub unsafe fn release_pair(&self, arrives: bool) {
        // SAFETY: the caller's word.
        unsafe {
            self.release(arrives);
            self.ahead(1).empty().arrive_if(arrives);
        }
    }

    /// The position of `lane`, for all lanes of its warp.
    #[device]
    pub fn of_lane(mut self, lane: u32) -> Self {
        self.stage = warp::shuffle_idx(self.stage, lane);
        self.parity = warp::shuffle_idx(self.parity, lane);
        self
    }

    /// The position `n` stages further, at most once around.
    #[device]
    pub const fn ahead(mut self, n: u32) -> Self {
        self.stage += n;
        if self.stage >= self.shape.stages {
            self.stage -= self.shape.stages;
            self.parity ^= 1;
        }
        self
    }
}
