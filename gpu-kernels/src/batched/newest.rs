//! The keys and values that a step adds, for a warp of [attention](super::attention) that has them among its own keys.
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of a consumer warp call what is unsafe here, each with its own number
//! as `lane`, for an item that the CTA has, and keys from `first_key` on that are the warp's. The projection's results
//! were waited for. Nobody else writes the warp's rows of the page, and the warp alone reads them.

use cuda_std::shared::Shared;
use cuda_std::{bf16, device, warp};

use super::BatchedStep;
use super::attention::Item;
use crate::attention::WARP_KEYS;
use crate::kv::{HEAD_DIM, PAGE_TOKENS, place};
use crate::qkv::{Factors, Weight, pack_value};

/// This step's keys and values, for a warp that has them among its own.
pub struct Newest {
    /// A lane's part of the weights of the keys' norm.
    weight: Weight,
    /// The finished key of the tile's last row, if it [came](Item::brings_key) with the queries.
    key: Option<Shared<bf16>>,
    /// The lane's four dimensions of that row's value, if the warp has its key. Loaded before anything is waited for.
    value: [f32; 4],
}

impl Newest {
    /// Loads ahead what the warp needs.
    ///
    /// # Safety
    /// `queries` are the item's, complete; their stage is not released before the keys were put.
    #[device]
    pub unsafe fn load(
        p: &BatchedStep,
        weight: Weight,
        item: &Item,
        first_key: u32,
        lane: u32,
        queries: Shared<bf16>,
    ) -> Self {
        let mut newest = Self { weight, key: None, value: [0.0; 4] };
        // SAFETY: the caller's word.
        unsafe {
            let group = p.work.group();
            if item.brings_key(group) {
                newest.key = Some(queries.at((item.rows * group * HEAD_DIM) as usize));
            }
            if (first_key..first_key + WARP_KEYS).contains(&item.last) {
                newest.value = p.work.heads().load_value(item.first_row + item.rows - 1, item.kv_head, lane * 4);
            }
        }
        newest
    }

    /// Calls `visit(row, position)` for the step's rows whose keys are among the warp's. Walks back from the tile's
    /// last row, over rows whose keys lie behind the warp's.
    #[device]
    unsafe fn rows(p: &BatchedStep, item: &Item, first_key: u32, mut visit: impl FnMut(u32, u32)) {
        let (mut row, mut position) = (item.first_row + item.rows - 1, item.last);
        while first_key <= position {
            if position < first_key + WARP_KEYS {
                visit(row, position);
            }
            if row + item.rows_before == item.first_row {
                break;
            }
            row -= 1;
            // SAFETY: a row of the tile's sequence.
            position = unsafe { p.work.rows.positions.load(row as usize) };
        }
        warp::sync_warp();
    }

    /// A warp puts those of this step's keys that it has, from `first_key` on, into their page in shared memory. They
    /// come into the cache later.
    ///
    /// # Safety
    /// The stage with the page's keys was waited for, and is not released yet. `self` is of the same item and keys.
    #[device]
    pub unsafe fn put_keys(&self, p: &BatchedStep, item: &Item, first_key: u32, page: Shared<bf16>, lane: u32) {
        let heads = p.work.heads();
        // SAFETY: the caller's word.
        unsafe {
            Self::rows(p, item, first_key, |row, position| {
                let to = page.at((position % PAGE_TOKENS * HEAD_DIM) as usize);
                if position == item.last
                    && let Some(key) = self.key
                {
                    // Both are in the order of the row of this position.
                    let words = key.cast::<[u32; 2]>().load(lane as usize);
                    to.cast().store(lane as usize, words);
                } else {
                    let head = heads.q_heads + item.kv_head;
                    let x = heads.load(row, head);
                    let [scale] = heads.scales(&[x]);
                    let factors = || Factors::of(self.weight, p.work.cos, p.work.sin, position);
                    heads.vector(head, x, scale, factors).store_shared(to, position);
                }
            });
        }
    }

    /// As [`put_keys`](Self::put_keys), for the values.
    ///
    /// # Safety
    /// As for [`put_keys`](Self::put_keys), of the stage with the page's values.
    #[device]
    pub unsafe fn put_values(&self, p: &BatchedStep, item: &Item, first_key: u32, page: Shared<bf16>, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            Self::rows(p, item, first_key, |row, position| {
                let value = if position == item.last {
                    self.value
                } else {
                    p.work.heads().load_value(row, item.kv_head, lane * 4)
                };
                let words = pack_value(value);
                let at = position % PAGE_TOKENS * HEAD_DIM + place(position, lane * 4);
                page.cast().store(at as usize / 4, words);
            });
        }
    }
}
