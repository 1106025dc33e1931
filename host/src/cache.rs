//! The KV cache: keys and values of every layer, in pages. It is one allocation, so that a page can be moved as a list
//! of records of one region.

use cuda_std::{Global, GlobalMut};
use gpu_kernels::kv::{self, Cache};
use half::bf16;
use model::Config;

use crate::Error;
use crate::device::{Buffer, Device};

/// A KV cache of shape `[layers, pages, page]`. The layout of a page is in `gpu_kernels::kv`.
pub struct KvCache {
    elements: Buffer<bf16>,
    layers: usize,
    pages: usize,
    kv_heads: u32,
}

impl KvCache {
    /// A cache of `pages` pages, all zero.
    ///
    /// # Errors
    /// Too little memory; [`Error::TooLarge`] for a cache that no memory could hold.
    pub fn new(device: &Device, config: &Config, pages: usize) -> Result<Self, Error> {
        let layers = config.num_hidden_layers;
        let elements = device.zeroed_array("the cache", &[layers, pages, Self::page_len(config)])?;
        Ok(Self { elements, layers, pages, kv_heads: config.plan.attention.key_value_heads as u32 })
    }

    /// Elements of a page in one layer: keys and values of all key-value heads.
    pub fn page_len(config: &Config) -> usize {
        kv::page_elements(config.plan.attention.key_value_heads as u32)
    }

    /// Bytes of a page in all layers.
    pub fn page_bytes(config: &Config) -> usize {
        config.num_hidden_layers * Self::page_len(config) * size_of::<bf16>()
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Elements of one layer, over all pages.
    pub fn layer_len(&self) -> usize {
        self.elements.len() / self.layers
    }

    /// The address of a layer's pages.
    ///
    /// # Panics
    /// If there is no such layer: a bug of the caller.
    pub fn layer(&self, layer: usize) -> GlobalMut<bf16> {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        // SAFETY: within the allocation.
        unsafe { self.elements.ptr_mut().at(layer * self.layer_len()) }
    }

    /// The kernel parameters for a layer. `tables` holds page tables of `table_stride` entries each.
    ///
    /// # Panics
    /// As [`layer`](Self::layer).
    pub fn params(&self, layer: usize, tables: Global<u32>, table_stride: u32) -> Cache {
        Cache { pages: self.layer(layer), tables, table_stride, kv_heads: self.kv_heads }
    }

    /// The whole allocation.
    pub fn elements(&self) -> &Buffer<bf16> {
        &self.elements
    }

    /// Fills these pages with zeros in all layers, after everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If there is no such page: a bug of the caller.
    pub fn clear(&mut self, pages: impl IntoIterator<Item = u32>) -> Result<(), Error> {
        let page_len = self.layer_len() / self.pages.max(1);
        let zeros = vec![bf16::ZERO; page_len];
        for page in pages {
            for layer in 0..self.layers {
                self.elements.write((layer * self.pages + page as usize) * page_len, &zeros)?;
            }
        }
        Ok(())
    }

    /// Fills the cache with repetitions of `pattern`, for measurements.
    ///
    /// # Errors
    /// A driver error.
    pub fn fill(&mut self, pattern: &[bf16]) -> Result<(), Error> {
        self.elements.repeat(pattern, 0)
    }
}
