//! What a step of many sequences needs besides the kernels of the forward pass: page tables and uses of tokens that
//! change, rows whose logits are wanted, and pages that move.
//!
//! What changes from step to step comes in one piece of memory, written by the host: lists, of which these kernels take
//! one each.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

use crate::linear::{N_TILE, slot};
use crate::norm::Residual;
use crate::sample::{Choice, GENERATED, best_token};
use crate::step::NO_TOKEN;

const THREADS: u32 = 256;

/// Blocks that give each of `items` a thread.
pub const fn blocks(items: usize) -> u32 {
    (items as u32).div_ceil(THREADS)
}

/// The number of this thread in its grid.
#[inline(always)]
fn index() -> u32 {
    thread::block_idx_x() * THREADS + thread::thread_idx_x()
}

/// Parameters of [`put_words`]. Grid: [`blocks`] of `count`.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct Put {
    /// `[count, 2]`: a place in `to`, and what to put there. No place twice.
    pub entries: Global<u32>,
    /// Changed.
    pub to: GlobalMut<u32>,
    /// Entries.
    pub count: u32,
}

/// Puts words in their places: page tables, uses of tokens.
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
    /// `[rows]` which, each once.
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
    /// `[count, 3]`: a row, the choice of the step before that is its token, and which row of `uses` counts it, or
    /// [`TakeTokens::NOWHERE`]. No row twice.
    pub entries: Global<u32>,
    /// `[choices]` of the step before.
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
    /// Nobody counts it.
    pub const NOWHERE: u32 = u32::MAX;
}

/// Rows of tokens that the host does not know yet.
#[kernel(threads = 256)]
pub unsafe fn take_tokens(p: TakeTokens) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let i = index();
        if i < p.count {
            let entry = p.entries.at(3 * i as usize);
            let token = p.sampled.load(entry.load(1) as usize);
            // A row without a token runs for nothing: the host ends its sequence as soon as it knows.
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
    /// `[count, Choice::WORDS]`: whose rows count.
    pub choices: Global<u32>,
    /// `[count]` the best tokens, or [`NO_TOKEN`].
    pub sampled: GlobalMut<u32>,
    /// Choices.
    pub count: u32,
}

/// Chooses the best tokens, where a pass has found them.
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
    /// `[picks]` rows of the source; null for those from `first` on.
    pub rows: Global<u32>,
    /// The first row, where there is no list.
    pub first: u32,
    /// `[any, dim]`: the source's [`Residual::scaled`], in the order of [`slot`](crate::linear::slot).
    pub scaled: Global<bf16>,
    /// `[any, dim / N_TILE]`: the source's [`Residual::squares`].
    pub squares: Global<f32>,
    /// Its rows from 0 on are what was picked, without [`Residual::x`].
    pub to: Residual,
}

/// Gathers what the head reads of some rows of a pass over many, each element where it belongs.
#[kernel(threads = 256)]
pub unsafe fn pick_rows(p: PickRows) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let pick = thread::block_idx_y() as usize;
        let row = if p.rows.is_null() { p.first as usize + pick } else { p.rows.load(pick) as usize };
        let (dim, n_tiles) = (p.to.dim, p.to.dim / N_TILE);
        let (from, to) = (p.scaled.at(row * dim as usize).cast::<u32>(), p.to.scaled.at(pick * dim as usize).cast());
        // In pairs.
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
    /// `[moves, 2]`: a page, and the page that it becomes.
    pub moves: Global<u32>,
    /// Where pages come from.
    pub from: PageRecords,
    /// Where they go.
    pub to: PageRecords,
    /// `[moves · layers · records]` numbers of records: what [`token_copy`](crate::token_copy) reads.
    pub src: GlobalMut<i32>,
    /// As long: and where it writes.
    pub dst: GlobalMut<i32>,
    /// Pages.
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
