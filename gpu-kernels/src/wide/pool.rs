//! The end of attention: items that nobody has until somebody asks for them.
//!
//! Memory does not serve all blocks alike, and not the same ones first in every layer: with all pages shared out evenly, blocks were done 6 µs
//! before the last one in the mean with 64 sequences, and 10 with 256. So the [last runs](super::deal) are given out item by item to whoever is done with its own. The warp that loads pages
//! asks, and tells the one that makes queries. Whichever block is the last with a split of a run combines it.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{thread, warp};

use super::attention::Item;
use super::deal::{self, Deal};
use super::{Memory, WideStep};
use crate::ring::{Ring, Shape};
use crate::waiting;

/// Bytes of a message, an item's [words](Item::words).
const MESSAGE_BYTES: u32 = 16;

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

    /// The next item, and the indices of its pages.
    #[inline(always)]
    pub unsafe fn next(&mut self, p: &WideStep, phase: u32, deal: &Deal) -> Option<[[u32; 4]; 2]> {
        let mut words = [[0; 4]; 2];
        unsafe {
            if thread::fresh(thread::lane_id()) == 0 {
                let grid = thread::grid_dim_x();
                if self.phases <= phase {
                    // All have been told that there was no more in the turn before.
                    waiting::for_count(p.meetings(), 0, phase * grid);
                    if self.turns == 0 {
                        waiting::for_count(p.pool_words(), 1, grid);
                    }
                }
                // A turn gives out all items, and tells every block once that there is none.
                let turn = self.turns * (deal.pool_count + grid);
                let number = atomic::fetch_add(p.pool_words(), 0, 1, Ordering::Relaxed, Scope::Device) - turn;
                if number < deal.pool_count {
                    words = deal::load(p, deal.pool_first + number);
                }
                self.messages.wait_empty();
                self.messages.slot().cast::<u32>().store16(0, words[0]);
                self.messages.full().arrive();
            }
            warp::sync_warp();
        }
        self.phases = phase + 1;
        self.messages = self.messages.ahead(1);
        words = words.map(|words| words.map(|word| warp::shuffle_idx(word, 0)));
        let is_item = Item::new(words[0]).rows > 0;
        if !is_item {
            self.turns += 1;
        }
        is_item.then_some(words)
    }
}

/// The end of the warp that is told.
pub struct Told(Ring);

impl Told {
    #[inline(always)]
    pub fn new<const ROWS: u32>() -> Self {
        Self(Ring::consumer(Memory::<ROWS>::MESSAGES))
    }

    /// The next item.
    #[inline(always)]
    pub unsafe fn next(&mut self) -> Option<[[u32; 4]; 1]> {
        unsafe {
            self.0.wait_full();
            let words = self.0.slot().cast::<u32>().load16(0);
            warp::sync_warp();
            self.0.empty().arrive_if(thread::fresh(thread::lane_id()) == 0);
            self.0 = self.0.ahead(1);
            (Item::new(words).rows > 0).then_some([words])
        }
    }
}
