//! The pool of attention: items at the end of the line that belong to no CTA until a CTA asks for them.
//!
//! Memory does not serve all CTAs equally fast, and the order changes from layer to layer. With all pages shared out
//! evenly, most CTAs would wait for the last one. So the [last runs](super::tile_scheduler) are given out item by item
//! to CTAs that have done their own. The warp that loads pages asks, and passes the answer to the warp that makes
//! queries. The CTA that is last to finish a split of a run combines the run.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of the warp that loads pages [ask](Asking), all lanes of the warp that
//! makes queries [listen](PoolMessages), each for every phase of attention and as often as the other. The CTA has
//! synchronised behind the messages' barriers, and its share is known.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{device, thread, warp};

use super::tile_scheduler::Assignment;
use super::{BatchedStep, Memory};
use crate::ring::{Ring, Shape};
use crate::waiting;

/// Bytes of a message. One word of it is used: an item's number in the line.
const MESSAGE_BYTES: u32 = 16;
/// The message that there are no more items.
const END: u32 = u32::MAX;

/// The ring of messages from one warp to the other.
pub const fn messages(start: u32) -> Shape {
    Shape::new(start, 2, MESSAGE_BYTES)
}

/// The side of the warp that asks.
pub struct Asking {
    messages: Ring,
    /// How often the whole pool has been given out.
    turns: u32,
    /// Number of phases up to and including the one in which this warp last asked.
    phases: u32,
}

impl Asking {
    #[device]
    pub fn new<const ROWS: u32>() -> Self {
        Self { messages: Ring::producer(Memory::<ROWS>::MESSAGES), turns: 0, phases: 0 }
    }

    /// Asks for the pool's next item. Returns its number in the line, and sends it to the other warp; `None` when there
    /// are no more.
    ///
    /// # Safety
    /// All lanes of the warp call it, in each phase of attention until it gives none. `assignment` is the CTA's, and
    /// there is a pool.
    #[device]
    pub unsafe fn next(&mut self, p: &BatchedStep, phase: u32, assignment: &Assignment) -> Option<u32> {
        let mut next = END;
        // SAFETY: the caller's word.
        unsafe {
            if thread::opaque(thread::lane_id()) == 0 {
                let grid = thread::grid_dim_x();
                if self.phases <= phase {
                    // By then every CTA has been told that the pool was empty in the turn before.
                    waiting::long_for_count(p.grid_barriers(), 0, phase * grid);
                    if self.turns == 0 {
                        waiting::for_count(p.pool_words(), 1, grid);
                    }
                }
                // In a turn the counter gives out all items, and then tells every CTA once that there are no more.
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

/// The side of the warp that is told.
pub struct PoolMessages(Ring);

impl PoolMessages {
    #[device]
    pub fn new<const ROWS: u32>() -> Self {
        Self(Ring::consumer(Memory::<ROWS>::MESSAGES))
    }

    /// The number of the pool's next item in the line; `None` when there are no more.
    ///
    /// # Safety
    /// All lanes of the warp call it, as often as the other warp [asks](Asking::next).
    #[device]
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
