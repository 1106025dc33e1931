//! The end of attention: items that nobody has until somebody asks for them.
//!
//! Memory does not serve all blocks alike, and not the same ones first in every layer: with all pages shared out
//! evenly, most blocks would wait for the last one. So the [last runs](super::tile_scheduler) are given out item by
//! item to blocks that have done their own. The warp that loads pages asks, and tells the one that makes queries.
//! Whichever block is the last with a split of a run combines it.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of the warp that loads pages [ask](Asking), all lanes of the warp that
//! makes queries [listen](PoolMessages), each for every phase of attention and as often as the other. The block has
//! synchronised behind the messages' barriers, and its share is known.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{thread, warp};

use super::tile_scheduler::Assignment;
use super::{BatchedStep, Memory};
use crate::ring::{Ring, Shape};
use crate::waiting;

/// Bytes of a message, of which a word is used: an item's number in the line.
const MESSAGE_BYTES: u32 = 16;
/// Instead: there are no more.
const END: u32 = u32::MAX;

/// What goes from one warp to the other.
pub const fn messages(start: u32) -> Shape {
    Shape::new(start, 2, MESSAGE_BYTES)
}

/// The end of the warp that asks.
pub struct Asking {
    messages: Ring,
    /// How often all have been given out.
    turns: u32,
    /// Phases up to that in which this warp last asked.
    phases: u32,
}

impl Asking {
    #[inline(always)]
    pub fn new<const ROWS: u32>() -> Self {
        Self { messages: Ring::producer(Memory::<ROWS>::MESSAGES), turns: 0, phases: 0 }
    }

    /// The next item's number.
    ///
    /// # Safety
    /// All lanes of the warp call it, in each phase of attention until it gives none. `assignment` is the block's, and
    /// there is a pool.
    #[inline(always)]
    pub unsafe fn next(&mut self, p: &BatchedStep, phase: u32, assignment: &Assignment) -> Option<u32> {
        let mut next = END;
        // SAFETY: the caller's word.
        unsafe {
            if thread::opaque(thread::lane_id()) == 0 {
                let grid = thread::grid_dim_x();
                if self.phases <= phase {
                    // All have been told that there was no more in the turn before.
                    waiting::long_for_count(p.grid_barriers(), 0, phase * grid);
                    if self.turns == 0 {
                        waiting::for_count(p.pool_words(), 1, grid);
                    }
                }
                // A turn gives out all items, and tells every block once that there is none.
                let turn = self.turns * (assignment.pool_count + grid);
                let number = atomic::fetch_add(p.pool_words(), 0, 1, Ordering::Relaxed, Scope::Device) - turn;
                if number < assignment.pool_count {
                    next = assignment.pool_first + number;
                }
                self.messages.wait_empty();
                self.messages.stage_buffer().cast().store(0, next);
                self.messages.full().arrive();
            }
            warp::sync_warp();
        }
        self.phases = phase + 1;
        self.messages = self.messages.ahead(1);
        next = warp::shuffle_idx(next, 0);
        if next == END {
            self.turns += 1;
        }
        (next != END).then_some(next)
    }
}

/// The receiving end of these messages.
pub struct PoolMessages(Ring);

impl PoolMessages {
    #[inline(always)]
    pub fn new<const ROWS: u32>() -> Self {
        Self(Ring::consumer(Memory::<ROWS>::MESSAGES))
    }

    /// The next item's number.
    ///
    /// # Safety
    /// All lanes of the warp call it, as often as the other warp [asks](Asking::next).
    #[inline(always)]
    pub unsafe fn next(&mut self) -> Option<u32> {
        // SAFETY: the caller's word.
        unsafe {
            self.0.wait_full();
            let next = self.0.stage_buffer().cast::<u32>().load(0);
            self.0.release_unfenced();
            self.0 = self.0.ahead(1);
            (next != END).then_some(next)
        }
    }
}
