//! What a step of the whole model works with, in one launch or many: the rows, the model's tables and shape, and the
//! memory in which one operator leaves its results for the next. Methods derive the parameters of single operators.

use cuda_std::{Global, GlobalMut, bf16, device, math};

use crate::attention::{Attend, PAIRS};
use crate::embedding::Embed;
use crate::kv::{Cache, HEAD_DIM};
use crate::norm::{Norm, Residual};
use crate::qkv::{Heads, SplitHeads};
use crate::step::Rows;

/// A part of the parameters of [`decode`](crate::decode::DecodeStep) and [`batched`](crate::batched::BatchedStep).
/// Activations lie in the order that the kernel's own GEMMs read them in. The decode kernel's step of one row writes
/// none of this: its activations are [words](crate::exchange).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Workspace {
    /// The rows of this step. Launches ahead or the host write them.
    pub rows: Rows,
    /// `[vocab, hidden]`, as in the checkpoint.
    pub embed: Global<bf16>,
    /// `[positions, 64]` cosines.
    pub cos: Global<f32>,
    /// `[positions, 64]` sines.
    pub sin: Global<f32>,
    /// Page tables, as [`Cache::tables`].
    pub tables: Global<u32>,
    /// The residual stream of every row. The embedding begins it; the output and down projections add to it.
    pub residual: Residual,
    /// `[rows, (q_heads + 2 · kv_heads) · 128]`. The projections of queries, keys and values write it.
    pub qkv: GlobalMut<f32>,
    /// As [`Attend::sums`]. Attention writes the splits that are combined by way of memory.
    pub sums: GlobalMut<f32>,
    /// As [`Attend::scales`]. Written with [`sums`](Self::sums).
    pub scales: GlobalMut<f32>,
    /// `[rows, q_heads · 128]`. Attention writes it, or what combines its splits.
    pub attended: GlobalMut<bf16>,
    /// `[rows, intermediate]`. The gate and up projections write it.
    pub activation: GlobalMut<bf16>,
    /// Query heads.
    pub q_heads: u32,
    /// Key-value heads.
    pub kv_heads: u32,
    /// Tokens.
    pub vocab: u32,
    /// Entries of a page table.
    pub table_stride: u32,
    /// As [`Attend::splits`].
    pub splits: u32,
    /// Added to the mean of squares.
    pub eps: f32,
    /// As [`SplitHeads::head_norm`].
    pub head_norm: u32,
}

impl Workspace {
    /// The parameters of the embedding, for a first layer with this norm.
    #[device]
    pub(crate) fn embed(&self, norm: Global<bf16>) -> Embed {
        Embed { rows: self.rows, table: self.embed, residual: self.residual, norm, vocab: self.vocab }
    }

    /// The norm that a GEMM's input has yet to be divided by.
    #[device]
    pub(crate) fn norm(&self) -> Norm {
        self.residual.norm(self.eps)
    }

    /// The heads, as the projection of queries, keys and values has left them.
    #[device]
    pub(crate) const fn heads(&self) -> Heads {
        let Self { q_heads, kv_heads, eps, head_norm, .. } = *self;
        Heads { qkv: self.qkv.read(), q_heads, kv_heads, eps, head_norm }
    }

    /// The cache of the layer with these pages.
    #[device]
    pub(crate) const fn cache(&self, pages: GlobalMut<bf16>) -> Cache {
        Cache { pages, tables: self.tables, table_stride: self.table_stride, kv_heads: self.kv_heads }
    }

    /// The parameters that make a layer's heads, with its norm of keys and its cache. The norm of queries and the place
    /// where queries go are not set.
    #[device]
    pub fn split_heads(&self, k_norm: Global<bf16>, cache: Cache) -> SplitHeads {
        SplitHeads {
            rows: self.rows,
            qkv: self.qkv.read(),
            k_norm,
            cos: self.cos,
            sin: self.sin,
            cache,
            q_heads: self.q_heads,
            eps: self.eps,
            head_norm: self.head_norm,
            ..SplitHeads::default()
        }
    }

    /// How many query heads share a key-value head: at least one, at most [`PAIRS`].
    ///
    /// # Safety
    /// The workspace is a launch's: the model has heads, at most [`PAIRS`] to a key-value head.
    #[device]
    pub(crate) unsafe fn group(&self) -> u32 {
        // SAFETY: the caller's word.
        unsafe {
            cuda_std::assume(self.kv_heads > 0);
            let group = self.q_heads / self.kv_heads;
            cuda_std::assume(group > 0 && group <= PAIRS);
            group
        }
    }

    /// The parameters of a layer's attention, without queries and cache.
    #[device]
    pub fn attend(&self) -> Attend {
        Attend {
            rows: self.rows,
            q: Default::default(),
            cache: Default::default(),
            sums: self.sums,
            scales: self.scales,
            out: self.attended,
            splits: self.splits,
            q_heads: self.q_heads,
            scale: 1.0 / math::sqrt(HEAD_DIM as f32),
        }
    }
}
