//! The layout of the paged KV cache.
//!
//! A layer's cache is an array of pages; a page holds [`PAGE_TOKENS`] tokens of one sequence for every key-value head:
//!
//! ```text
//! [page][kv_head][ keys: token, dim | values: token, dim ]      bf16
//! ```
//!
//! The 16-byte chunks of a token's row are swizzled: chunk `c` lies at `c ^ (token % 8)` ([`place`]). So whichever way
//! a page is copied into shared memory, `wgmma` and `ldmatrix` read its rows there without bank conflicts. The keys, or
//! values, of a page's first tokens are contiguous.
//!
//! A batch's full pages may be [packed](crate::packed); only attention of `batched` reads those.
//!
//! A sequence's pages are listed in its page table; table `s` starts at `s * stride`.

use cuda_std::{Global, GlobalMut, bf16, device};

/// Size of an attention head. Models with another are refused.
pub const HEAD_DIM: u32 = 128;
/// Tokens in a page.
pub const PAGE_TOKENS: u32 = 64;
/// Elements of one kind (keys or values) that a page holds for one head.
const BLOCK: u32 = PAGE_TOKENS * HEAD_DIM;

/// Where dimension `d` of a key or a value lies in the row of `position`. Chunks of eight dimensions, 16 bytes, stay
/// together.
#[device]
#[must_use]
pub const fn place(position: u32, d: u32) -> u32 {
    d ^ (position % 8 * 8)
}

/// How a page's keys, or values, of one head lie in shared memory. Each token has a row of two halves of 128 bytes. The
/// 16-byte chunks of a half are at their [`place`].
#[derive(Clone, Copy)]
pub(crate) struct PageLayout {
    /// Bytes from one token to the next.
    row: u32,
    /// Bytes from the first half of a row to the second.
    half: u32,
}

impl PageLayout {
    /// The layout of the cache.
    pub const CACHE: Self = Self { row: HEAD_DIM * 2, half: HEAD_DIM };
    /// All first halves, then all second halves: as `wgmma` reads them.
    pub const HALVES: Self = Self { row: HEAD_DIM, half: PAGE_TOKENS * HEAD_DIM };

    /// Where the first half of a token's row begins, in bytes.
    #[device]
    pub const fn row(self, token: u32) -> u32 {
        token * self.row
    }

    /// The byte at which a token's chunk number `chunk` lies: its eight dimensions from `8 · chunk` on.
    #[device]
    pub const fn chunk(self, token: u32, chunk: u32) -> u32 {
        self.row(token) + chunk / 8 * self.half + (chunk ^ token) % 8 * 16
    }
}

/// Elements of a page over `kv_heads` heads: keys and values.
pub const fn page_elements(kv_heads: u32) -> usize {
    2 * BLOCK as usize * kv_heads as usize
}

/// One layer's cache and the page tables of the sequences in it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
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
    /// The block of page `index` of `sequence` for `kv_head`: not a CTA, but what a page has of one head. The keys of
    /// block `b` begin at row `2 · PAGE_TOKENS · b`, in rows of [`HEAD_DIM`] elements, and its values follow.
    ///
    /// # Safety
    /// The table has that entry.
    #[device]
    pub unsafe fn block_index(&self, sequence: u32, index: u32, kv_head: u32) -> u32 {
        // SAFETY: the caller's word.
        unsafe { self.page(sequence, index) * self.kv_heads + kv_head }
    }

    /// The number of page `index` of `sequence`.
    ///
    /// # Safety
    /// The table has that entry.
    #[device]
    pub unsafe fn page(&self, sequence: u32, index: u32) -> u32 {
        let entry = sequence as usize * self.table_stride as usize + index as usize;
        // SAFETY: the caller's word.
        unsafe { self.tables.load(entry) }
    }

    /// The key of `position`: [`HEAD_DIM`] elements, each at its [`place`].
    ///
    /// # Safety
    /// The sequence has a page for the position.
    #[device]
    pub unsafe fn key(&self, sequence: u32, position: u32, kv_head: u32) -> GlobalMut<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.key_in(self.block_index(sequence, position / PAGE_TOKENS, kv_head), position) }
    }

    /// The key of `position` in the block with this [`block_index`](Self::block_index).
    ///
    /// # Safety
    /// There is such a page.
    #[device]
    pub unsafe fn key_in(&self, block: u32, position: u32) -> GlobalMut<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.pages.at(block as usize * 2 * BLOCK as usize + (position % PAGE_TOKENS * HEAD_DIM) as usize) }
    }

    /// The value of `position`: [`HEAD_DIM`] elements, each at its [`place`].
    ///
    /// # Safety
    /// The sequence has a page for the position.
    #[device]
    pub unsafe fn value(&self, sequence: u32, position: u32, kv_head: u32) -> GlobalMut<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.value_in(self.block_index(sequence, position / PAGE_TOKENS, kv_head), position) }
    }

    /// The value of `position` in the block with this [`block_index`](Self::block_index).
    ///
    /// # Safety
    /// There is such a page.
    #[device]
    pub unsafe fn value_in(&self, block: u32, position: u32) -> GlobalMut<bf16> {
        // SAFETY: the caller's word.
        unsafe { self.key_in(block, position).at(BLOCK as usize) }
    }
}
