//! The keys and values of every layer, in pages, in one allocation: a page can be moved as a list of records of one
//! region.

use cuda_std::{Global, GlobalMut};
use gpu_kernels::kv::{self, Cache};
use half::bf16;
use model::Config;

use crate::Error;
use crate::device::{Buffer, Device};

/// A cache: `[layers, pages, page]`, a page as `gpu_kernels::kv` has it.
pub struct KvCache {
    elements: Buffer<bf16>,
    layers: usize,
    pages: usize,
    kv_heads: u32,
}

impl KvCache {
    /// `pages` pages, all zero.
    ///
    /// # Errors
    /// Too little memory.
    pub fn new(device: &Device, config: &Config, pages: usize) -> Result<Self, Error> {
        let layers = config.num_hidden_layers;
        let elements = device.zeroed(layers * pages * Self::page_len(config))?;
        Ok(Self { elements, layers, pages, kv_heads: config.plan.attention.key_value_heads as u32 })
    }

    /// Elements of a page in one layer.
    pub fn page_len(config: &Config) -> usize {
        kv::page_elements(config.plan.attention.key_value_heads as u32)
    }

    /// Bytes of a page in all layers.
    pub fn page_bytes(config: &Config) -> usize {
        config.num_hidden_layers * Self::page_len(config) * size_of::<bf16>()
    }

    /// Pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Elements of a layer.
    pub fn layer_len(&self) -> usize {
        self.elements.len() / self.layers
    }

    /// Where a layer's pages are.
    ///
    /// # Panics
    /// If there is no such layer: a bug of the caller.
    pub fn layer(&self, layer: usize) -> GlobalMut<bf16> {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        // SAFETY: within the allocation.
        unsafe { self.elements.ptr_mut().at(layer * self.layer_len()) }
    }

    /// A layer for kernels, with page `tables` of `table_stride` entries each.
    ///
    /// # Panics
    /// As [`layer`](Self::layer).
    pub fn params(&self, layer: usize, tables: Global<u32>, table_stride: u32) -> Cache {
        Cache { pages: self.layer(layer), tables, table_stride, kv_heads: self.kv_heads }
    }

    /// All of it.
    pub fn elements(&self) -> &Buffer<bf16> {
        &self.elements
    }

    /// Fills it with `pattern`, over and over: for measuring.
    ///
    /// # Errors
    /// A driver error.
    pub fn fill(&mut self, pattern: &[bf16]) -> Result<(), Error> {
        self.elements.repeat(pattern, 0)
    }
}
