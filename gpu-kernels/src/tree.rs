//! Trees of drafts: rows of a decode step whose tokens are alternatives to each other.
//!
//! Row 0, the newest token's, is the root. Every other row is a child of a row before it; children of a row have
//! different tokens. The model predicts what comes after each row, so of a row's children at most one is right, and the
//! rows that are right form one [`Path`] from the root (Miao et al., 2024, "SpecInfer"; Cai et al., 2024, "Medusa").
//!
//! # The same bits as without
//! A row's position is the root's plus the row's depth; rotary embedding and random numbers go by that. A row's key and
//! value lie in the cache at its *slot*: the root's position plus the row's number, as in a chain. In attention a row
//! sees only the keys of its own path, each in the column of its position, so sums have the order that they would have
//! in a step of one row. So a tree is as exact as a chain, whatever is in it. All slots are in one
//! [split](crate::attention::SPLIT): whoever plans a tree sees to that.
//!
//! When a path is accepted, [`keep_path`] moves the keys, values and hidden states of its rows from their slots to
//! their positions.
//!
//! # Safety
//! Functions that move something are called by all 256 threads of a CTA, each with its own number as `thread`; their
//! other arguments are the same for all. Both positions have room, in pages of the sequence or among hidden states, and
//! nobody else uses what is at either meanwhile.

mod plan;

use cuda_std::{GlobalMut, bf16, device, kernel, thread, warp};

use crate::eagle::{STATES, States};
use crate::kv::{Cache, HEAD_DIM, place};
use crate::step::{Rows, SequenceState};
pub use plan::{DraftReport, Likeliest, MOST_BRANCHES, PlanTree, plan_tree};

/// The path from the root to a row of a tree: the numbers of the rows on it, by depth.
///
/// The lowest four bits have the row's depth. The four bits from bit `4 · d` on have the number of the row at depth
/// `d`, from 1 on.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path(u64);

impl Path {
    /// The path to the root.
    pub const ROOT: Self = Self(0);

    /// The path in this word.
    #[device]
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// The path as a word.
    #[device]
    pub const fn word(self) -> u64 {
        self.0
    }

    /// The path to a row of a chain, in which every row is the child of the one before.
    #[device]
    pub const fn of_chain(row: u32) -> Self {
        let rows = 0xFEDC_BA98_7654_3210 & (u64::MAX >> (60 - 4 * (row % 16)));
        Self(rows | (row % 16) as u64)
    }

    /// The path to `row`, a child of the row that this path leads to. The parent's depth is below 15.
    #[device]
    #[must_use]
    pub const fn child(self, row: u32) -> Self {
        let depth = self.depth() + 1;
        Self(((self.0 & !15) | depth as u64) | ((row % 16) as u64) << (4 * (depth % 16)))
    }

    /// The row's depth.
    #[device]
    pub const fn depth(self) -> u32 {
        self.0 as u32 % 16
    }

    /// The row on the path at this depth, which is at most the row's own.
    #[device]
    pub const fn row_at(self, depth: u32) -> u32 {
        if depth == 0 { 0 } else { (self.0 >> (4 * (depth % 16))) as u32 % 16 }
    }

    /// The row that this one is a child of; for the root, itself.
    #[device]
    pub const fn parent(self) -> u32 {
        self.row_at(self.depth().saturating_sub(1))
    }

    /// The rows on the path except for the root, as bits.
    #[device]
    pub const fn rows(self) -> u32 {
        let (mut rows, mut depth) = (0, 1);
        while depth <= self.depth() {
            rows |= 1 << self.row_at(depth);
            depth += 1;
        }
        rows
    }

    /// The path that this lane of the warp has.
    #[device]
    pub(crate) fn of_lane(self, lane: u32) -> Self {
        Self(warp::shuffle_idx(self.0, lane))
    }

    /// The part of the path down to this depth.
    #[device]
    #[must_use]
    pub const fn until(self, depth: u32) -> Self {
        if depth >= self.depth() {
            return self;
        }
        Self((self.0 & (u64::MAX >> (60 - 4 * (depth % 16))) & !15) | depth as u64)
    }
}

impl Rows {
    /// The path to a row.
    ///
    /// # Safety
    /// The lists are there, and the step has such a row, at most [`MAX_DECODE_ROWS`](crate::step::MAX_DECODE_ROWS) of
    /// them.
    #[device]
    pub(crate) unsafe fn path(&self, row: u32) -> Path {
        if self.paths.is_null() {
            return Path::of_chain(row);
        }
        // SAFETY: the caller's word.
        Path(unsafe { self.paths.load(row as usize) })
    }
}

/// Parameters of [`keep_path`]. Grid: (layers, and one more if there are `states`; 2: keys and values).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct KeepPath {
    /// The rows that ran, a tree's.
    pub rows: Rows,
    /// The sequence, whose [path](SequenceState::PATH) was accepted.
    pub state: SequenceState,
    /// The first layer's cache; the pages of the other layers follow its pages.
    pub cache: Cache,
    /// Elements of a layer's pages.
    pub layer_len: u64,
    /// Hidden states that the step has left; null if it has left none.
    pub states: States,
    /// Layers.
    pub layer_count: u32,
}

/// Moves keys, values and hidden states of the accepted path from their rows' slots to their positions. A row's number
/// is never below its depth, so nothing is overwritten that is yet to be moved.
#[kernel(threads = 256)]
pub unsafe fn keep_path(p: KeepPath) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        if p.rows.count.load(0) == 0 {
            return;
        }
        let word = |half: usize| p.state.words.load(SequenceState::PATH + half) as u64;
        let path = Path(word(0) | word(1) << 32);
        let (layer, kind, thread) = (thread::block_idx_x(), thread::block_idx_y(), thread::thread_idx_x());
        let root = p.rows.positions.load(0);
        let sequence = p.rows.sequences.load(0);
        let mut depth = 1;
        while depth <= path.depth() {
            let (from, to) = (root + path.row_at(depth), root + depth);
            if from != to {
                if layer < p.layer_count {
                    let cache = Cache { pages: p.cache.pages.at(layer as usize * p.layer_len as usize), ..p.cache };
                    move_vectors(&cache, kind == 1, sequence, (from, to), thread);
                } else {
                    move_states(&p.states, kind, (from, to), thread);
                }
            }
            depth += 1;
        }
    }
}

/// Moves the keys or values of all heads from one position to another, 16 bytes a thread.
#[device]
unsafe fn move_vectors(cache: &Cache, values: bool, sequence: u32, (from, to): (u32, u32), thread: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let of = |position: u32, head: u32| -> GlobalMut<bf16> {
            if values { cache.value(sequence, position, head) } else { cache.key(sequence, position, head) }
        };
        let mut i = thread;
        while i < cache.kv_heads * (HEAD_DIM / 8) {
            let (head, d) = (i / (HEAD_DIM / 8), i % (HEAD_DIM / 8) * 8);
            let words = of(from, head).load16(place(from, d) as usize);
            of(to, head).store16(place(to, d) as usize, words);
            i += 256;
        }
    }
}

/// Moves one half of the hidden states from one position to another.
#[device]
unsafe fn move_states(states: &States, half: u32, (from, to): (u32, u32), thread: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let (from, to) = (states.of(0, from), states.of(0, to));
        let mut i = half * 256 + thread;
        while i < STATES * states.dim {
            to.store(i as usize, from.load(i as usize));
            i += 512;
        }
    }
}
