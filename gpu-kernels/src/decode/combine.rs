//! Adds the splits of a context over the grid. With one row it adds the words in which the parts come; with several
//! rows it follows a grid barrier. Both ways give the bits of [`combine`](crate::attention::combine).
//!
//! # Safety
//! As for all [consumers](super::consumer). All units of the layer's attention leave their parts: with one row as
//! words, which are waited for here; with several before the grid barrier that the CTA has waited for. Pairs and splits
//! are the step's.

use cuda_std::{bf16, device, math, shared, thread, warp};

use super::consumer::{Consumer, sync};
use super::producer::{Share, Units};
use super::{SCRATCH, WARPS, barrier};
use crate::activations::element_at;
use crate::attention::{Attend, SPLIT, combine_by_warp, combine_head, weight};
use crate::exchange::{Word, WordKind, Words};
use crate::kv::HEAD_DIM;

/// Dimensions that a CTA adds at a time: half a head's, two a lane.
const HALF: u32 = HEAD_DIM / 2;
/// Splits that a warp takes at a time: each lane has the scale of one.
const SPLITS: u32 = 32;
/// How many of these splits one warp adds.
const OWN: usize = (SPLITS / WARPS) as usize;
/// The place of a word that does not exist.
const NOWHERE: u32 = u32::MAX;

/// A lane's words of [`SPLITS`] splits. Some may not have come yet.
struct Parts {
    /// The maximum and the normaliser of the lane's split; then two dimensions of the first split that the warp adds.
    first: [Word; 4],
    /// Two dimensions of each other split that the warp adds.
    more: [Word; 2 * (OWN - 1)],
}

/// The place of a split's maximum among a head's [parts](WordKind::Parts); its normaliser follows.
#[device]
const fn scale_place(parts: &Words, split: u32) -> u32 {
    parts.len / (HEAD_DIM + 2) * HEAD_DIM + 2 * split
}

/// Half a head of one row, as one lane sees it when it adds the splits.
struct Half {
    /// The head's [parts](WordKind::Parts).
    words: Words,
    splits: u32,
    lane: u32,
    warp_id: u32,
    /// The lane's first dimension; the other is 32 further on, so that a warp's words lie together.
    d: u32,
}

impl Half {
    /// The place of the maximum (`k` = 0) or the normaliser (`k` = 1) of the lane's split among those from `split` on.
    #[device]
    const fn scale(&self, split: u32, k: usize) -> u32 {
        let split = split + self.lane;
        if split < self.splits { scale_place(&self.words, split) + k as u32 } else { NOWHERE }
    }

    /// The place of the `k`-th word of the splits that the warp adds, among those from `split` on: two dimensions of
    /// each.
    #[device]
    const fn own(&self, split: u32, k: usize) -> u32 {
        let split = split + self.warp_id + WARPS * (k as u32 / 2);
        if split < self.splits { split * HEAD_DIM + self.d + k as u32 % 2 * 32 } else { NOWHERE }
    }

    /// The place of the `k`-th word of [`Parts::first`].
    #[device]
    const fn first(&self, split: u32, k: usize) -> u32 {
        if k < 2 { self.scale(split, k) } else { self.own(split, k - 2) }
    }

    /// Asks for the parts of the splits from `split` on.
    #[device]
    unsafe fn ask(&self, split: u32) -> Parts {
        // SAFETY: the caller's word.
        unsafe {
            if split >= self.splits {
                return Parts { first: [self.words.nothing(); 4], more: [self.words.nothing(); 2 * (OWN - 1)] };
            }
            Parts {
                first: self.words.ask_for(|k| self.first(split, k)),
                more: self.words.ask_for(|k| self.own(split, 2 + k)),
            }
        }
    }

    /// Waits for all words of `parts`.
    #[device]
    unsafe fn settle(&self, split: u32, parts: &mut Parts) {
        // SAFETY: the caller's word.
        unsafe {
            self.words.settle(&mut parts.first, |k| self.first(split, k));
            self.words.settle(&mut parts.more, |k| self.own(split, 2 + k));
        }
    }

    /// The largest maximum of this lane's splits from `split` on. It asks for four of them at a time.
    #[device]
    unsafe fn top(&self, mut split: u32) -> f32 {
        let mut top = f32::NEG_INFINITY;
        while split < self.splits {
            let place = |k: usize| self.scale(split + SPLITS * k as u32, 0);
            // SAFETY: the caller's word.
            let mut found = unsafe { self.words.ask_for::<4>(place) };
            // SAFETY: the caller's word.
            unsafe { self.words.settle(&mut found, place) };
            unroll!(K < 4; {
                if place(K) != NOWHERE {
                    top = math::max(top, f32::from_bits(found[K].bits()));
                }
            });
            split += 4 * SPLITS;
        }
        top
    }
}

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// The words of a head's parts in a layer, of one row.
    #[device]
    unsafe fn parts(&self, layer: u32, head: u32) -> Words {
        let p = self.p;
        // SAFETY: the caller's word.
        unsafe {
            let len = p.work.splits * (HEAD_DIM + 2);
            self.put_out(WordKind::Parts, 4 * layer).slice(head * len, len)
        }
    }

    /// Keeps dimensions `d` and `d + 1` of a split's sums for a pair, as [`Attend::keep`] does, and with `d` = 0 the
    /// maximum and the normaliser. If `ONE`, it keeps them as words.
    ///
    /// # Safety
    /// As for [`Attend::keep`].
    #[device]
    pub(super) unsafe fn keep_part<const ONE: bool>(
        &self,
        attend: &Attend,
        layer: u32,
        (pair, split): (usize, u32),
        (d, sum, scale): (u32, [f32; 2], [f32; 2]),
    ) {
        // SAFETY: the caller's word.
        unsafe {
            if ONE {
                let words = self.parts(layer, pair as u32);
                let put = |first: u32, two: [f32; 2]| {
                    words.put(first, two[0].to_bits());
                    words.put(first + 1, two[1].to_bits());
                };
                put(split * HEAD_DIM + d, sum);
                if d == 0 {
                    put(scale_place(&words, split), scale);
                }
            } else {
                attend.keep(split, pair, d, sum, scale);
            }
        }
    }

    /// Adds the splits of one row. A CTA takes half a head at a time; CTAs without units of attention come first.
    ///
    /// # Safety
    /// All consumers of every CTA call it, after their units of the layer. Nobody uses the queries' place in scratch
    /// memory any more.
    #[device]
    pub(super) unsafe fn combine_of_one(&self, layer: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let splits = Units::last() / SPLIT + 1;
            let items = 2 * thread::opaque(self.p.work.q_heads);
            let mut item = self.place;
            while item < items {
                self.combine_half(layer, splits, item);
                item += thread::grid_dim_x();
                if item < items {
                    sync();
                }
            }
        }
    }

    /// Adds the splits of half a head of one row. Each warp adds its own splits from first to last; then the warps'
    /// sums are added from first to last.
    #[device]
    unsafe fn combine_half(&self, layer: u32, splits: u32, item: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            let (head, first) = (item / 2, item % 2 * HALF);
            let half = Half { words: self.parts(layer, head), splits, lane, warp_id, d: first + lane };
            // The first two groups of splits are asked for before anything is waited for.
            let (mut parts, mut next) = (half.ask(0), half.ask(SPLITS));
            let mut top = half.top(SPLITS);
            half.settle(0, &mut parts);
            if lane < splits {
                top = math::max(top, f32::from_bits(parts.first[0].bits()));
            }
            unroll!(M < 5; {
                top = math::max(top, warp::shuffle_xor(top, 16 >> M));
            });
            let (mut sum, mut norm, mut split) = ([0f32; 2], 0f32, 0);
            loop {
                let then = half.ask(split + 2 * SPLITS);
                let [mut max, mut part] = [0, 1].map(|k: usize| f32::from_bits(parts.first[k].bits()));
                if split + lane >= splits {
                    (max, part) = (f32::NEG_INFINITY, 0.0);
                }
                let factor = weight(max, top);
                unroll!(I < OWN of 4; {
                    let from = warp_id + WARPS * I as u32;
                    let (factor, part) = (warp::shuffle_idx(factor, from), warp::shuffle_idx(part, from));
                    unroll!(D < 2; {
                        let word = if I == 0 { parts.first[2 + D] } else { parts.more[(2 * I + D).saturating_sub(2)] };
                        sum[D] = math::fma(f32::from_bits(word.bits()), factor, sum[D]);
                    });
                    norm = math::fma(part, factor, norm);
                });
                split += SPLITS;
                if split >= splits {
                    break;
                }
                (parts, next) = (next, then);
                half.settle(split, &mut parts);
            }
            let sums = shared::dynamic::<f32>(SCRATCH);
            let norms = sums.at((WARPS * HALF) as usize);
            unroll!(D < 2; {
                sums.store((warp_id * HALF + lane) as usize + 32 * D, sum[D]);
            });
            if lane == 0 {
                norms.store(warp_id as usize, norm);
            }
            sync();
            if warp_id == 0 {
                let (mut sum, mut norm) = ([0f32; 2], 0f32);
                unroll!(W < 8; {
                    let of_warp = sums.cast::<[f32; 2]>().load(W * HALF as usize / 2 + lane as usize);
                    sum = [sum[0] + of_warp[0], sum[1] + of_warp[1]];
                    norm += norms.load(W);
                });
                let word = math::pack_bf16(sum[0] / norm, sum[1] / norm);
                self.put_out(WordKind::Attended, 4 * layer).put((head * HEAD_DIM + first) / 2 + lane, word);
            }
        }
    }

    /// Adds the splits of several rows, after a grid barrier.
    ///
    /// # Safety
    /// All consumers of every CTA call it, after their units of the layer. Scratch memory is free.
    #[device]
    pub(super) unsafe fn combine_of_some(&self, attend: &Attend) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            cuda_std::assume(p.work.q_heads > 0);
            let lane = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            if self.combines_by_warps() {
                self.combine_by_warps(attend, lane);
                return;
            }
            let mut item = thread::block_idx_x();
            while item < self.count * p.work.q_heads {
                let (row, head) = (item / p.work.q_heads, item % p.work.q_heads);
                let put = |_, d: u32, x: bf16| p.work.attended.store(element_at(row, head * HEAD_DIM + d), x);
                combine_head(attend, row, head, self.slot(row), lane, put, (SCRATCH, barrier::CONSUMERS));
                item += thread::grid_dim_x();
            }
        }
    }

    /// Whether a warp should add the splits of a row and head, and not a CTA: where there are many such items and few
    /// splits.
    #[device]
    unsafe fn combines_by_warps(&self) -> bool {
        // SAFETY: the caller's word.
        let (items, last) = unsafe { (self.count * self.p.work.q_heads, Units::last()) };
        // Compares how often each waits for memory. A warp waits once for each 8 splits. A CTA waits twice for an item:
        // for its splits, and again after the item's barrier.
        last / (SPLIT * WARPS) < 2 * ((items - 1) / thread::grid_dim_x())
    }

    /// Adds the splits of each row and head, a warp an item.
    ///
    /// # Safety
    /// All CTAs have arrived at a grid barrier with their parts, and this one has waited for it.
    #[device]
    unsafe fn combine_by_warps(&self, attend: &Attend, (lane, warp_id): (u32, u32)) {
        let q_heads = self.p.work.q_heads;
        let mut item = thread::block_idx_x() + thread::grid_dim_x() * warp_id;
        while item < self.count * q_heads {
            // SAFETY: the caller's word; there are heads.
            unsafe {
                cuda_std::assume(q_heads > 0);
                self.combine_item(attend, item / q_heads, item as usize, lane);
            }
            item += thread::grid_dim_x() * WARPS;
        }
    }

    /// Adds the splits of the rows of a share's sequence, if the share has the last split of its head.
    ///
    /// # Safety
    /// The CTA had all splits of the share's head up to this one.
    #[device]
    pub(super) unsafe fn combine_share(&self, attend: &Attend, share: &Share, group: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let end = self.end_of(share);
            let last = self.slot(end - 1) / SPLIT;
            if last == 0 || share.split < last {
                return;
            }
            // The parts that other warps left are read next.
            sync();
            cuda_std::assume(group > 0);
            let (lane, mut i) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            while i < (end - share.first_row) * group {
                let row = share.first_row + i / group;
                let pair = row * self.p.work.q_heads + share.kv_head * group + i % group;
                self.combine_item(attend, row, pair as usize, lane);
                i += WARPS;
            }
        }
    }

    /// Adds the splits of a row and head, if there are several.
    ///
    /// # Safety
    /// All lanes of a warp call it. `row` is below the step's rows, `pair` one of its pairs, and all splits have left
    /// their parts, for this warp to see; no other warp combines it.
    #[device]
    unsafe fn combine_item(&self, attend: &Attend, row: u32, pair: usize, lane: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let splits = self.slot(row) / SPLIT + 1;
            if splits > 1 {
                let words = |s| attend.part(pair, s).load16(lane as usize * 4);
                let head = pair as u32 - row * self.p.work.q_heads;
                let put = |d, word| self.put_pair(row, head, d, word);
                combine_by_warp(splits, lane, words, |s| attend.part_scale(pair, s), put);
            }
        }
    }
}
