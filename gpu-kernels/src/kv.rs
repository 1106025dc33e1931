//! Where a key and a value lie in the paged cache.
//!
//! A layer's cache is an array of pages; a page holds [`PAGE_TOKENS`] tokens of one sequence for every key-value head:
//!
//! ```text
//! [page][kv_head][ keys: token, dim | values: dim, token ]      bf16
//! ```
//!
//! Values are stored transposed, so that both products of attention read 16 contiguous bytes a lane, and need no
//! shared memory (see `attention`). A sequence's pages are listed in its page table; table `s` starts at `s * stride`.

use cuda_std::{Global, GlobalMut, bf16};

/// Size of an attention head; the Qwen3 family has no other.
pub const HEAD_DIM: u32 = 128;
/// Tokens in a page.
pub const PAGE_TOKENS: u32 = 64;
/// Elements of one kind (keys or values) that a page holds for one head.
const BLOCK: u32 = PAGE_TOKENS * HEAD_DIM;

/// Elements of a page over `kv_heads` heads: keys and values.
pub const fn page_elements(kv_heads: u32) -> usize {
    2 * BLOCK as usize * kv_heads as usize
}

/// One layer's cache and the page tables of the sequences in it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Cache {
    /// The layer's pages. Everything in it is finite: it starts zeroed.
    pub pages: GlobalMut<bf16>,
    /// `[sequences, table_stride]` page numbers.
    pub tables: Global<u32>,
    /// Entries of a sequence's table.
    pub table_stride: u32,
    /// Key-value heads.
    pub kv_heads: u32,
}

impl Cache {
    /// The number of page `index` of `sequence` for `kv_head`, among the pages of all heads: its keys begin at element
    /// 2 · [`PAGE_TOKENS`] · [`HEAD_DIM`] times that, and its values follow.
    ///
    /// # Safety
    /// The table has that entry.
    #[inline(always)]
    pub unsafe fn block_index(&self, sequence: u32, index: u32, kv_head: u32) -> u32 {
        let entry = sequence as usize * self.table_stride as usize + index as usize;
        unsafe { self.tables.load(entry) * self.kv_heads + kv_head }
    }

    /// Where page `index` of `sequence` begins, for `kv_head`.
    ///
    /// # Safety
    /// The table has that entry.
    #[inline(always)]
    unsafe fn block(&self, sequence: u32, index: u32, kv_head: u32) -> GlobalMut<bf16> {
        let block = unsafe { self.block_index(sequence, index, kv_head) };
        unsafe { self.pages.at(block as usize * 2 * BLOCK as usize) }
    }

    /// The key of `position`: [`HEAD_DIM`] contiguous elements.
    ///
    /// # Safety
    /// The sequence has a page for the position.
    #[inline(always)]
    pub unsafe fn key(&self, sequence: u32, position: u32, kv_head: u32) -> GlobalMut<bf16> {
        unsafe { self.key_in(self.block_index(sequence, position / PAGE_TOKENS, kv_head), position) }
    }

    /// The key of `position`, where the page and head have this [`block_index`](Self::block_index).
    ///
    /// # Safety
    /// There is such a page.
    #[inline(always)]
    pub unsafe fn key_in(&self, block: u32, position: u32) -> GlobalMut<bf16> {
        unsafe { self.pages.at(block as usize * 2 * BLOCK as usize + (position % PAGE_TOKENS * HEAD_DIM) as usize) }
    }

    /// Dimension 0 of the value of `position`; dimension `d` is `d * PAGE_TOKENS` elements on, and the values of the
    /// following tokens of the page come right after it.
    ///
    /// # Safety
    /// The sequence has a page for the position.
    #[inline(always)]
    pub unsafe fn value(&self, sequence: u32, position: u32, kv_head: u32) -> GlobalMut<bf16> {
        let block = unsafe { self.block(sequence, position / PAGE_TOKENS, kv_head) };
        unsafe { block.at((BLOCK + position % PAGE_TOKENS) as usize) }
    }
}
