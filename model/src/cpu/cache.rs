//! Keys and values: of many sequences in pages (`KvPages`), or of one sequence alone (`KvCache`).

use crate::Config;

/// Keys and values of many sequences, in f32, for every layer, in pages of equal size.
///
/// The caller decides which pages belong to which sequence: a [`Row`](super::Row) names the pages of its sequence. The
/// system provides memory only as tokens are written.
#[derive(Debug, Clone)]
pub struct KvPages {
    layers: Vec<LayerPages>,
    pages: usize,
    page_tokens: usize,
}

/// Keys and values of one layer, each `[pages, kv_heads, page_tokens, head_dim]`, so that one head's keys are
/// contiguous.
#[derive(Debug, Clone)]
pub(super) struct LayerPages {
    keys: Vec<f32>,
    values: Vec<f32>,
    kv_heads: usize,
    page_tokens: usize,
    head_dim: usize,
}

impl KvPages {
    /// `pages` pages of `page_tokens` tokens.
    pub fn new(config: &Config, pages: usize, page_tokens: usize) -> Self {
        let size = config.plan.attention.key_value_size() * pages * page_tokens;
        let layer = || LayerPages {
            keys: vec![0.0; size],
            values: vec![0.0; size],
            kv_heads: config.plan.attention.key_value_heads,
            page_tokens,
            head_dim: config.plan.attention.head_dim,
        };
        KvPages { layers: (0..config.num_hidden_layers).map(|_| layer()).collect(), pages, page_tokens }
    }

    /// How many pages there are.
    pub fn len(&self) -> usize {
        self.pages
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Copies page `from` over page `to`.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn copy_page(&mut self, from: usize, to: usize) {
        for layer in &mut self.layers {
            let size = layer.page_size();
            layer.keys.copy_within(from * size..(from + 1) * size, to * size);
            layer.values.copy_within(from * size..(from + 1) * size, to * size);
        }
    }

    /// Copies page `from` of `other` over page `to` of these pages. `other` must be made for the same config and page
    /// size.
    ///
    /// # Panics
    /// If there is no such page.
    pub fn copy_page_from(&mut self, other: &KvPages, from: usize, to: usize) {
        for (layer, other) in self.layers.iter_mut().zip(&other.layers) {
            let size = layer.page_size();
            layer.keys[to * size..][..size].copy_from_slice(&other.keys[from * size..(from + 1) * size]);
            layer.values[to * size..][..size].copy_from_slice(&other.values[from * size..(from + 1) * size]);
        }
    }

    /// Writes the key and value of `position` of the sequence whose pages are `table`; both are `[kv_heads, head_dim]`.
    pub(super) fn write(&mut self, layer: usize, table: &[u32], position: usize, key: &[f32], value: &[f32]) {
        let layer = &mut self.layers[layer];
        let (page, token) = (table[position / layer.page_tokens] as usize, position % layer.page_tokens);
        for (head, (key, value)) in key.chunks_exact(layer.head_dim).zip(value.chunks_exact(layer.head_dim)).enumerate()
        {
            let at = layer.at(page, head) + token * layer.head_dim;
            layer.keys[at..][..layer.head_dim].copy_from_slice(key);
            layer.values[at..][..layer.head_dim].copy_from_slice(value);
        }
    }

    pub(super) fn layer(&self, layer: usize) -> &LayerPages {
        &self.layers[layer]
    }
}

impl LayerPages {
    fn page_size(&self) -> usize {
        self.kv_heads * self.page_tokens * self.head_dim
    }

    fn at(&self, page: usize, head: usize) -> usize {
        (page * self.kv_heads + head) * self.page_tokens * self.head_dim
    }

    /// The first `length` keys and values of one head of the sequence whose pages are `table`, a page at a time, each
    /// `[tokens, head_dim]`.
    pub(super) fn head<'a>(
        &'a self,
        table: &'a [u32],
        head: usize,
        length: usize,
    ) -> impl Iterator<Item = (&'a [f32], &'a [f32])> {
        table.iter().take(length.div_ceil(self.page_tokens)).enumerate().map(move |(i, &page)| {
            let tokens = (length - i * self.page_tokens).min(self.page_tokens);
            let at = self.at(page as usize, head);
            let range = at..at + tokens * self.head_dim;
            (&self.keys[range.clone()], &self.values[range])
        })
    }
}

/// Keys and values of one sequence, in one page that is as long as the sequence may get.
#[derive(Debug, Clone)]
pub struct KvCache {
    pub(super) pages: KvPages,
    length: usize,
}

impl KvCache {
    /// An empty cache for up to `capacity` tokens.
    pub fn new(config: &Config, capacity: usize) -> Self {
        KvCache { pages: KvPages::new(config, 1, capacity), length: 0 }
    }

    /// Tokens in the cache.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the cache holds no tokens.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Tokens that the cache has room for.
    pub fn capacity(&self) -> usize {
        self.pages.page_tokens
    }

    /// Forgets all but the first `length` tokens, for example rejected drafts. Changes nothing if there are no more
    /// than `length`.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    pub(super) fn advance(&mut self, tokens: usize) {
        self.length += tokens;
    }
}
