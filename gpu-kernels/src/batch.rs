//! What a step of many sequences needs besides the kernels of the forward pass: updates of page tables and of counts of
//! token uses, the gathering of rows whose logits are wanted, and moves of pages.
//!
//! The host writes what changes from step to step into one piece of memory, as lists. Each of these kernels takes one
//! of the lists. In the order of a step (`host/src/batch/gpu/enqueue.rs`):
//!
//! ```text
//! changes    list_records   records of pages that move to or from the host tier, for `token_copy`
//!            put_words      entries of page tables; then which pages are packed
//!            clear_rows     counts of token uses, of sequences that begin anew
//!            put_words      single counts
//! each pass  take_tokens    tokens that the step before has chosen, into the pass's rows
//!            …              the forward pass
//!            pick_rows      prompts: the rows whose logits are wanted; then the head
//!            take_best      if the pass has left ranks of the best tokens; otherwise the sampler chooses
//! ```
//!
//! A kernel without entries is not launched. A drafting head's passes use `put_words` and `take_best`, too. Where
//! GEMMs are of e4m3 and the head is not, `pick_rows` puts the elements of consecutive rows into natural order for it.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, bf16, device, kernel, thread};

use crate::linear::{N_TILE, slot};
use crate::norm::Residual;
use crate::sample::{Choice, GENERATED, best_token};
use crate::step::NO_TOKEN;

const THREADS: u32 = 256;

/// The number of CTAs that gives each of `items` a thread.
pub const fn blocks(items: usize) -> u32 {
    (items as u32).div_ceil(THREADS)
}

/// The number of this thread in its grid.
#[device]
fn index() -> u32 {
    thread::block_idx_x() * THREADS + thread::thread_idx_x()
}

/// Parameters of [`put_words`]. Grid: [`blocks`] of `count`.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Put {
    /// `[count, 2]`: an index into `to`, and the word to store there. No index occurs twice.
    pub entries: Global<u32>,
    /// Changed.
    pub to: GlobalMut<u32>,
    /// Entries.
    pub count: u32,
}

/// Stores words at the given indices of a page table or of the counts of token uses.
#[kernel(threads = 256)]
pub unsafe fn put_words(p: Put) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let i = index();
        if i < p.count {
            let entry = p.entries.at(2 * i as usize);
            p.to.store(entry.load(0) as usize, entry.load(1));
        }
    }
}

/// Parameters of [`clear_rows`]. Grid: ([`blocks`] of `len`, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct ClearRows {
    /// `[rows]` indices of the rows to clear, each once.
    pub rows: Global<u32>,
    /// `[any, len]`.
    pub of: GlobalMut<u32>,
    /// Words of a row.
    pub len: u32,
}

/// Zeroes rows of words.
#[kernel(threads = 256)]
pub unsafe fn clear_rows(p: ClearRows) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let i = index();
        if i < p.len {
            let row = p.rows.load(thread::block_idx_y() as usize);
            p.of.store(row as usize * p.len as usize + i as usize, 0);
        }
    }
}

/// Parameters of [`take_tokens`]. Grid: [`blocks`] of `count`.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct TakeTokens {
    /// `[count, 3]`: a row; the index in `sampled` of its token; and the row of `uses` that counts the token, or
    /// [`TakeTokens::NOWHERE`]. No row occurs twice.
    pub entries: Global<u32>,
    /// `[choices]` the tokens that the step before has chosen.
    pub sampled: Global<u32>,
    /// `[rows]`, changed.
    pub tokens: GlobalMut<u32>,
    /// As [`SampleEach::uses`](crate::sample::SampleEach::uses), changed.
    pub uses: GlobalMut<u32>,
    /// Tokens.
    pub vocab: u32,
    /// Entries.
    pub count: u32,
}

impl TakeTokens {
    /// In place of a row of `uses`: the token is not counted.
    pub const NOWHERE: u32 = u32::MAX;
}

/// Fills in the tokens of rows whose token the host does not know yet: the step before has chosen it.
#[kernel(threads = 256)]
pub unsafe fn take_tokens(p: TakeTokens) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let i = index();
        if i < p.count {
            let entry = p.entries.at(3 * i as usize);
            let token = p.sampled.load(entry.load(1) as usize);
            // If there is no token, the row runs for nothing: the host ends its sequence as soon as it knows.
            p.tokens.store(entry.load(0) as usize, if token == NO_TOKEN { 0 } else { token });
            let slot = entry.load(2);
            if slot != TakeTokens::NOWHERE && token != NO_TOKEN {
                let place = slot as usize * p.vocab as usize + token as usize;
                atomic::fetch_add(p.uses, place, GENERATED, Ordering::Relaxed, Scope::Device);
            }
        }
    }
}

/// Parameters of [`take_best`]. Grid: [`blocks`] of `count`.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct TakeBest {
    /// `[rows]` the [rank](crate::sample::rank) of the best token after each row.
    pub best: Global<u64>,
    /// `[count, Choice::WORDS]`: the choices, of which only the row is read.
    pub choices: Global<u32>,
    /// `[count]` the best tokens, or [`NO_TOKEN`].
    pub sampled: GlobalMut<u32>,
    /// Choices.
    pub count: u32,
}

/// Stores the best token of each choice, for a pass that has left the ranks of the best tokens.
#[kernel(threads = 256)]
pub unsafe fn take_best(p: TakeBest) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let i = index() as usize;
        if i < p.count as usize {
            let row = p.choices.load(i * Choice::WORDS);
            p.sampled.store(i, best_token(p.best.load(row as usize)));
        }
    }
}

/// Parameters of [`pick_rows`]. Grid: (1, picks).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PickRows {
    /// `[picks]` rows of the source; null for consecutive rows from `first` on.
    pub rows: Global<u32>,
    /// The first row, where there is no list.
    pub first: u32,
    /// `[any, dim]`: the source's [`Residual::scaled`], in the order of [`slot`](crate::linear::slot).
    pub scaled: Global<bf16>,
    /// `[any, dim / N_TILE]`: the source's [`Residual::squares`].
    pub squares: Global<f32>,
    /// Its rows from 0 on receive what is picked. [`Residual::x`] is not written.
    pub to: Residual,
}

/// Gathers what the head reads of some rows of a larger pass, and puts their elements into natural order.
#[kernel(threads = 256)]
pub unsafe fn pick_rows(p: PickRows) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let pick = thread::block_idx_y() as usize;
        let row = if p.rows.is_null() { p.first as usize + pick } else { p.rows.load(pick) as usize };
        let (dim, n_tiles) = (p.to.dim, p.to.dim / N_TILE);
        let (from, to) = (p.scaled.at(row * dim as usize).cast::<u32>(), p.to.scaled.at(pick * dim as usize).cast());
        // Two elements at a time.
        let mut i = thread::thread_idx_x();
        while i < dim / 2 {
            to.store(i as usize, from.load(slot(2 * i) as usize / 2));
            i += THREADS;
        }
        let mut i = thread::thread_idx_x();
        while i < n_tiles {
            let square = p.squares.load(row * n_tiles as usize + i as usize);
            p.to.squares.store(pick * n_tiles as usize + i as usize, square);
            i += THREADS;
        }
    }
}

/// Where the records of a page are: record `r` of layer `l` of page `p` is number `p · page + l · layer + r`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, cuda_std::Layout)]
pub struct PageRecords {
    /// Records from a page to the next.
    pub page: u32,
    /// Records from a layer to the next.
    pub layer: u32,
}

/// Parameters of [`list_records`]. Grid: [`blocks`] of `moves · layers · records`.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct ListRecords {
    /// `[moves, 2]`: a source page, and the destination page that it becomes.
    pub moves: Global<u32>,
    /// Where the records of source pages are.
    pub from: PageRecords,
    /// Where the records of destination pages are.
    pub to: PageRecords,
    /// `[moves · layers · records]` numbers of the records that [`token_copy`](crate::token_copy) reads.
    pub src: GlobalMut<i32>,
    /// As long: numbers of the records that it writes.
    pub dst: GlobalMut<i32>,
    /// Pages that move.
    pub moves_count: u32,
    /// Layers.
    pub layers: u32,
    /// Records of a page in one layer.
    pub records: u32,
}

/// Lists the records of pages that move, page by page.
#[kernel(threads = 256)]
pub unsafe fn list_records(p: ListRecords) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        cuda_std::assume(p.layers > 0 && p.records > 0);
        let i = index();
        let (record, page_layer) = (i % p.records, i / p.records);
        let (layer, number) = (page_layer % p.layers, page_layer / p.layers);
        if number < p.moves_count {
            let pages = p.moves.at(2 * number as usize);
            let place = |page: u32, at: PageRecords| (page * at.page + layer * at.layer + record) as i32;
            p.src.store(i as usize, place(pages.load(0), p.from));
            p.dst.store(i as usize, place(pages.load(1), p.to));
        }
    }
}
