//! Keys and values of one sequence.

use crate::Config;

/// Keys and values of the tokens of one sequence, in f32, for every layer.
///
/// Memory is reserved for `capacity` tokens and taken by the system only as tokens come.
#[derive(Debug, Clone)]
pub struct KvCache {
    layers: Vec<LayerCache>,
    length: usize,
    capacity: usize,
}

/// Keys and values of one layer, each `[kv_heads, capacity, head_dim]`, so that one head's keys lie in a row.
#[derive(Debug, Clone)]
pub(super) struct LayerCache {
    keys: Vec<f32>,
    values: Vec<f32>,
    capacity: usize,
    head_dim: usize,
}

impl KvCache {
    /// An empty cache for up to `capacity` tokens.
    pub fn new(config: &Config, capacity: usize) -> Self {
        let size = config.key_value_size() * capacity;
        let layer =
            || LayerCache { keys: vec![0.0; size], values: vec![0.0; size], capacity, head_dim: config.head_dim };
        KvCache { layers: (0..config.num_hidden_layers).map(|_| layer()).collect(), length: 0, capacity }
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
        self.capacity
    }

    /// Forgets all but the first `length` tokens, such as drafts that were rejected. More than there are changes nothing.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Writes the keys and values of the tokens from position `start` on; both are `[tokens, kv_heads × head_dim]`.
    pub(super) fn write(&mut self, layer: usize, start: usize, keys: &[f32], values: &[f32]) {
        let layer = &mut self.layers[layer];
        let (capacity, head_dim) = (layer.capacity, layer.head_dim);
        let kv_heads = layer.keys.len() / (capacity * head_dim).max(1);
        for (i, (key, value)) in keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate() {
            let (token, head) = (i / kv_heads, i % kv_heads);
            let at = (head * capacity + start + token) * head_dim;
            layer.keys[at..][..head_dim].copy_from_slice(key);
            layer.values[at..][..head_dim].copy_from_slice(value);
        }
    }

    pub(super) fn layer(&self, layer: usize) -> &LayerCache {
        &self.layers[layer]
    }

    pub(super) fn advance(&mut self, tokens: usize) {
        self.length += tokens;
    }
}

impl LayerCache {
    /// The first `length` keys and values of one head, each `[length, head_dim]`.
    pub(super) fn head(&self, head: usize, length: usize) -> (&[f32], &[f32]) {
        let range = head * self.capacity * self.head_dim..(head * self.capacity + length) * self.head_dim;
        (&self.keys[range.clone()], &self.values[range])
    }
}
