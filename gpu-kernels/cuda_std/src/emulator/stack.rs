//! The stacks of lanes, which are kept for the thread's next launch.

use std::cell::RefCell;
use std::io;

use corosensei::stack::{DefaultStack, Stack, StackPointer};

/// Cache lines in a page, and so the number of different offsets at which stacks start.
const COLOURS: usize = 64;
const CACHE_LINE: usize = 64;

thread_local! {
    /// Stacks of lanes that ended, all of one size, and how many were ever made.
    static POOL: RefCell<Pool> = const { RefCell::new(Pool { size: 0, made: 0, stacks: Vec::new() }) };
}

struct Pool {
    size: usize,
    made: usize,
    stacks: Vec<LaneStack>,
}

/// A stack that starts some cache lines below its highest address.
///
/// Every mapping ends on a page boundary. If all stacks began there, those of all lanes would compete for the same few
/// sets of the cache.
pub struct LaneStack {
    mapping: DefaultStack,
    shift: usize,
}

impl LaneStack {
    pub fn take(size: usize) -> io::Result<Self> {
        POOL.with_borrow_mut(|pool| {
            if pool.size != size {
                *pool = Pool { size, made: 0, stacks: Vec::new() };
            }
            if let Some(stack) = pool.stacks.pop() {
                return Ok(stack);
            }
            pool.made += 1;
            // A lane touches a few lines, so an odd stride spreads neighbours over all offsets.
            let shift = pool.made * 5 % COLOURS * CACHE_LINE;
            Ok(Self { mapping: DefaultStack::new(size + COLOURS * CACHE_LINE)?, shift })
        })
    }

    /// Returns the stack to the pool.
    pub fn give(self, size: usize) {
        POOL.with_borrow_mut(|pool| {
            if pool.size == size {
                pool.stacks.push(self);
            }
        });
    }
}

// SAFETY: the mapping has a guard page at its limit, and is longer by the greatest shift than what was asked for; the
// shift keeps the alignment.
unsafe impl Stack for LaneStack {
    fn base(&self) -> StackPointer {
        StackPointer::new(self.mapping.base().get() - self.shift).expect("a stack is not at address 0")
    }

    fn limit(&self) -> StackPointer {
        self.mapping.limit()
    }

    #[cfg(windows)]
    fn teb_fields(&self) -> corosensei::stack::StackTebFields {
        self.mapping.teb_fields()
    }

    #[cfg(windows)]
    fn update_teb_fields(&mut self, stack_limit: usize, guaranteed_stack_bytes: usize) {
        self.mapping.update_teb_fields(stack_limit, guaranteed_stack_bytes);
    }
}
