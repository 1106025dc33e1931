//! Attention of a step in a launch of its own, where each sequence has one row: every warp by itself.
//!
//! A warp takes an [item](super::attention) alone, a *piece* of 32 keys after the other, and copies its own pieces
//! ahead of itself into a ring of its own. So no warp waits for another, and a short item costs no more than its bytes.
//! What the 8 warps of [`attend`](crate::attention::attend) find side by side, it finds piece by piece, and adds in the
//! same order:
//!
//! ```text
//! S_w = Q · K_wᵀ, its weights P_w, maximum m_w and normaliser      for each piece of keys
//! O   = Σ_w exp2(m_w − max m) · (P_w · V_w)                        for each piece of values
//! ```
//!
//! Queries, and the row's own key and value, are made by the warp that wants them: it puts those into the piece that it
//! has of their page, and into the cache. Nobody else reads that row.

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, dependent_launch, kernel, math, thread, warp};

use super::attention::{Item, PACKED, are_there, find_forms};
use super::tile_scheduler::{Assignment, Pool, assign, load};
use super::{BatchedStep, Phase};
use crate::attention::{
    Attend, Divisor, SPLIT, SoftmaxWeights, TILE_KEYS, Tile, WARP_KEYS, add_values_each, combine_by_warp, key_of,
    score_keys, values_from, weigh_some, weight,
};
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS, place};
use crate::packed::{Form, HALF_BYTES, Half};
use crate::qkv::{Factors, HeadVector};
use crate::ring::{Ring, Shape};

/// Warps of a CTA.
pub const WARPS: u32 = 8;
/// Query heads of a key-value head, at most: half of the tensor core's rows.
pub const PAIRS: u32 = 8;
/// Pieces of an item, at most.
const PIECES: usize = (SPLIT / WARP_KEYS) as usize;
/// Splits that [`combine_by_warp`] adds one by one.
const OWN_SPLITS: u32 = 8;
const PIECE_BYTES: u32 = WARP_KEYS * HEAD_DIM * 2;
const STAGES: u32 = 3;
/// Items that a warp has looked up. Those of a half are looked up when the half is done with, and copies are never
/// further ahead than the other half.
const SLOTS: u32 = 16;
/// Of an item: its [words](Item::words), its pages' blocks, and their forms.
const SLOT_BYTES: u32 = 48;
const _: () = assert!(STAGES < SLOTS / 2);

/// The memory of a warp: stages, then queries, then items, then barriers.
const QUERIES: u32 = STAGES * PIECE_BYTES;
const ITEMS: u32 = QUERIES + PAIRS * HEAD_DIM * 2;
const BARRIERS: u32 = ITEMS + SLOTS * SLOT_BYTES;
const WARP_BYTES: u32 = (BARRIERS + 2 * STAGES * 8).next_multiple_of(128);
/// Dynamic shared memory of a CTA.
pub const SHARED_BYTES: u32 = WARPS * WARP_BYTES;
// What a block of an H100 may have.
const _: () = assert!(SHARED_BYTES <= 232_448);

/// One phase, [`PhaseKind::Attend`](super::PhaseKind::Attend), of tiles of one row and at most
/// [`BatchedStep::ATTEND_PAIRS`] query heads a key-value head. All CTAs of the grid are resident at once, and
/// [`assignments`](BatchedStep::assignments) are of [`BatchedStep::ATTEND_WARPS`] a CTA. Shared memory:
/// [`BatchedStep::ATTEND_SHARED_BYTES`]. It may be launched early ([`dependent_launch`]).
/// [`arrivals`](BatchedStep::arrivals) are zero before and after.
#[kernel(threads = 256)]
pub unsafe fn attend_batch(p: BatchedStep) {
    const { assert!(WARPS == 8) };
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let warp_id = thread::opaque(thread::warp_id());
        let start = warp_id * WARP_BYTES;
        let shape = Shape { start, stages: STAGES, bytes: PIECE_BYTES, barriers: start + BARRIERS };
        if thread::lane_id() == 0 {
            Ring::init(shape, 1);
            bulk::fence_init();
        }
        warp::sync_warp();
        dependent_launch::wait();
        dependent_launch::allow_next();
        let number = thread::block_idx_x() * WARPS + warp_id;
        let assigned = p.assignments.at(4 * number as usize);
        let assignment = if p.is_scheduled == 0 {
            let assignment = assign(&p, &Pool::none(&p), (number, thread::grid_dim_x() * WARPS), 0);
            if thread::opaque(thread::lane_id()) == 0 {
                assigned.store16(0, assignment.words());
            }
            assignment
        } else {
            Assignment::new(assigned.load16(0))
        };
        let Assignment { first, count, .. } = assignment;
        let pages = field!(p.phases, pages: GlobalMut<bf16>);
        let warp = Warp {
            p: &p,
            a: p.work.attend(),
            cache: p.work.cache(pages),
            group: Divisor::new(p.work.group()),
            lane: thread::opaque(thread::lane_id()),
            start,
            first,
            count,
        };
        warp.attend(shape);
    }
}

/// What a warp knows all along.
struct Warp<'a> {
    p: &'a BatchedStep,
    a: Attend,
    cache: Cache,
    group: Divisor,
    lane: u32,
    /// Where its memory begins.
    start: u32,
    /// Its items' numbers in the line begin here.
    first: u32,
    count: u32,
}

/// The piece that is copied next.
struct Ahead {
    ring: Ring,
    /// Which of the warp's items, whether of its values, and which piece.
    item: u32,
    kind: u32,
    piece: u32,
}

impl Item {
    /// The first key of a piece.
    #[inline(always)]
    const fn piece_key(&self, piece: u32) -> u32 {
        self.split * SPLIT + piece * WARP_KEYS
    }

    /// Of its row and head.
    #[inline(always)]
    const fn splits(&self) -> u32 {
        self.last / SPLIT + 1
    }

    /// Whether the warp has all of them, and each lane adds up its own: so few that each would have been another's.
    #[inline(always)]
    const fn is_own(&self) -> bool {
        self.is_whole && self.splits() <= OWN_SPLITS
    }

    /// Its pieces.
    #[inline(always)]
    fn pieces(&self) -> u32 {
        (self.last / WARP_KEYS + 1 - self.piece_key(0) / WARP_KEYS).min(PIECES as u32)
    }
}

impl Warp<'_> {
    #[inline(always)]
    unsafe fn slot(&self, item: u32) -> Shared<u32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(self.start + ITEMS + item % SLOTS * SLOT_BYTES) }
    }

    /// `[pairs, 128]`.
    #[inline(always)]
    unsafe fn queries(&self) -> Shared<bf16> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(self.start + QUERIES) }
    }

    /// Looks up so many items from the `from`-th on, one a lane.
    #[inline(always)]
    unsafe fn look_up(&self, from: u32, count: u32) {
        let item = from + self.lane;
        if self.lane < count && item < self.count {
            // SAFETY: the caller's word.
            unsafe {
                let [words, blocks] = load(self.p, self.first + item);
                let [_, forms] = find_forms(self.p, 0, [words, blocks]);
                let slot = self.slot(item);
                slot.store16(0, words);
                slot.store16(4, blocks);
                slot.store16(8, forms);
            }
        }
        warp::sync_warp();
    }

    /// All items, one after another.
    #[inline(always)]
    unsafe fn attend(&self, shape: Shape) {
        // SAFETY: the caller's word.
        unsafe {
            self.look_up(0, SLOTS);
            let mut ring = Ring::consumer(shape);
            let mut ahead = Ahead { ring, item: 0, kind: 0, piece: 0 };
            unroll!(_S < STAGES of 3; {
                self.copy(&mut ahead);
            });
            let mut number = 0;
            while number < self.count {
                let item = Item::new(self.slot(number).load16(0));
                if item.split == item.first_split {
                    self.make_queries(&item);
                }
                self.find(number, &item, &mut ring, &mut ahead);
                if item.is_last && !item.is_own() {
                    self.combine(&item);
                }
                number = thread::opaque(number) + 1;
                if number.is_multiple_of(SLOTS / 2) {
                    self.look_up(number + SLOTS / 2, SLOTS / 2);
                }
            }
        }
    }

    /// Asks for the next piece, if there is one: its stage has been read.
    #[inline(always)]
    unsafe fn copy(&self, ahead: &mut Ahead) {
        if ahead.item < self.count {
            // SAFETY: the caller's word.
            unsafe {
                let slot = self.slot(ahead.item);
                let item = Item::new(slot.load16(0));
                let page = (ahead.piece / 2) as usize;
                let (block, form) = (slot.load(4 + page) & !PACKED, Form(slot.load(8 + page)));
                let tokens = (item.last + 1 - item.piece_key(ahead.piece)).min(WARP_KEYS);
                let [bytes, apart] =
                    if form.is_packed() { [HALF_BYTES, HALF_BYTES] } else { [tokens * HEAD_DIM * 2, PIECE_BYTES] };
                if self.lane == 0 {
                    let from = (block * 2 + ahead.kind) as usize * (PAGE_TOKENS * HEAD_DIM) as usize;
                    let from = self.cache.pages.read().at(from).cast::<u8>().at((ahead.piece % 2 * apart) as usize);
                    let full = ahead.ring.full();
                    full.arrive_expect_tx(bytes);
                    bulk::copy_to_shared_once(ahead.ring.stage_buffer(), from, bytes, full);
                }
                ahead.ring = ahead.ring.ahead(1);
                ahead.piece += 1;
                if ahead.piece == item.pieces() {
                    ahead.piece = 0;
                    ahead.item += ahead.kind;
                    ahead.kind ^= 1;
                }
            }
        }
    }

    /// Makes the queries of an item's row for its key-value head.
    #[inline(always)]
    unsafe fn make_queries(&self, item: &Item) {
        // SAFETY: the caller's word.
        unsafe {
            let (p, heads, group) = (self.p, self.p.work.heads(), self.group.value);
            let weight = Factors::load_weight(field!(p.phases, norm: Global<bf16>));
            let factors = Factors::of(weight, p.work.cos, p.work.sin, item.last);
            let mut first = 0;
            while first < group {
                // Beyond the last, the last again.
                let head = |i: u32| item.kv_head * group + (first + i).min(group - 1);
                let x = [0, 1, 2, 3].map(|i| heads.load(item.first_row, head(i)));
                let scales = heads.scales(&x);
                unroll!(I < 4; {
                    let number = first + I as u32;
                    if number < group {
                        let to = self.queries().at((number * HEAD_DIM) as usize);
                        heads.vector(0, x[I], scales[I], || factors).store_shared(to, 0);
                    }
                });
                first = thread::opaque(first) + 4;
            }
            warp::sync_warp();
        }
    }

    /// The key and the value of an item's row.
    #[inline(always)]
    unsafe fn newest(&self, item: &Item) -> [HeadVector; 2] {
        // SAFETY: the caller's word.
        unsafe {
            let (p, heads) = (self.p, self.p.work.heads());
            let key = heads.q_heads + item.kv_head;
            let x = [key, key + heads.kv_heads].map(|head| heads.load(item.first_row, head));
            let norm = field!(p.phases, key_norm: Global<bf16>);
            let factors = Factors::load(norm, p.work.cos, p.work.sin, item.last);
            let [scale] = heads.scales(&[x[0]]);
            [heads.vector(key, x[0], scale, || factors), heads.vector(key + heads.kv_heads, x[1], 1.0, || factors)]
        }
    }

    /// Puts the row's own key (0) or value (1) into the piece that lacks it, and into the cache.
    #[inline(always)]
    unsafe fn put_newest(&self, vector: &HeadVector, kind: u32, item: &Item, block: u32, stage: &Ring) {
        // SAFETY: the caller's word.
        unsafe {
            let row = (item.last % WARP_KEYS * HEAD_DIM) as usize;
            vector.store_shared(stage.stage_buffer().cast::<bf16>().at(row), item.last);
            let to =
                if kind == 0 { self.cache.key_in(block, item.last) } else { self.cache.value_in(block, item.last) };
            vector.store(to, item.last);
            warp::sync_warp();
        }
    }

    /// What an item's keys and values give, to where it belongs.
    #[inline(always)]
    unsafe fn find(&self, number: u32, item: &Item, ring: &mut Ring, ahead: &mut Ahead) {
        // SAFETY: the caller's word.
        unsafe {
            let (a, lane, group) = (&self.a, self.lane, self.group);
            let (pair, t) = (lane / 4, lane % 4);
            let pieces = item.pieces();
            let tile = |piece| Tile {
                kv_head: item.kv_head,
                split: item.split,
                group,
                first_row: item.first_row,
                pairs: group.value,
                lane,
                warp_id: piece,
            };
            let newest = if item.is_fresh { self.newest(item) } else { [HeadVector::default(); 2] };
            let mut query = [[0; 4]; 4];
            unroll!(J < 4; {
                if pair < group.value {
                    query[J] = self.queries().load16((pair * HEAD_DIM + 8 * t) as usize + 32 * J);
                }
            });
            // What a piece has to be known for: whether it is packed, where its page is, its last key, and whether that
            // is the row's own.
            let of_piece = |piece: u32| {
                let slot = self.slot(number);
                let (block, form) = (slot.load(4 + piece as usize / 2), Form(slot.load(8 + piece as usize / 2)));
                // Those beyond the last were not copied: the last instead, whose weight is 0.
                let last = (item.last - item.piece_key(piece)).min(WARP_KEYS);
                (block, form, last, item.is_fresh && last < WARP_KEYS)
            };
            let mut found = [SoftmaxWeights::NOTHING; PIECES];
            let mut piece = 0;
            while piece < PIECES as u32 {
                let mut weights = SoftmaxWeights::NOTHING;
                if piece < pieces {
                    let (block, form, last, is_newest) = of_piece(piece);
                    ring.wait_full();
                    let stage = ring.offset();
                    let query = |i: usize, j: usize| if i == 0 { query[j] } else { [0; 4] };
                    let scores = if form.is_packed() {
                        score_keys(query, |i| Half::load_fragments(stage, 0, lane, i, form.base(0)))
                    } else {
                        if is_newest {
                            self.put_newest(&newest[0], 0, item, block, ring);
                        }
                        let keys = shared::dynamic::<bf16>(stage);
                        let key = |k: u32, d: u32| keys.load16((k * HEAD_DIM + place(k, d)) as usize);
                        score_keys(query, |i| {
                            TILE_KEYS.map(|first| key((first + key_of(pair)).min(last), 8 * t + 32 * i as u32))
                        })
                    };
                    self.next(ring, ahead);
                    weights = weigh_some::<1>(a, &tile(piece), |_| item.last, scores);
                }
                push(&mut found, weights);
                piece = thread::opaque(piece) + 1;
            }
            let mut top = f32::NEG_INFINITY;
            unroll!(W < 8; {
                top = math::max(top, found[W].top[0]);
            });
            let (mut norm, mut sums) = (0f32, [[0f32; 2]; 16]);
            let mut piece = 0;
            while piece < PIECES as u32 {
                let weights = found[0];
                push(&mut found, SoftmaxWeights::NOTHING);
                if piece < pieces {
                    let (block, form, last, is_newest) = of_piece(piece);
                    let factor = weight(weights.top[0], top);
                    norm = math::fma(weights.norm[0], factor, norm);
                    let add = |n: usize, o: [f32; 4]| {
                        sums[n] = [math::fma(o[0], factor, sums[n][0]), math::fma(o[1], factor, sums[n][1])];
                    };
                    ring.wait_full();
                    let stage = ring.offset();
                    if form.is_packed() {
                        add_values_each(&weights, |i| Half::load_fragments(stage, 0, lane, i, form.base(1)), add);
                    } else {
                        if is_newest {
                            self.put_newest(&newest[1], 1, item, block, ring);
                        }
                        add_values_each(&weights, values_from(stage, last.min(WARP_KEYS - 1), lane), add);
                    }
                    self.next(ring, ahead);
                }
                piece = thread::opaque(piece) + 1;
            }
            self.leave(item, &tile(0), sums, [top, norm]);
        }
    }

    /// The stage has been read: the next piece may come there.
    #[inline(always)]
    unsafe fn next(&self, ring: &mut Ring, ahead: &mut Ahead) {
        // SAFETY: the caller's word.
        unsafe {
            bulk::fence_proxy_async();
            warp::sync_warp();
            self.copy(ahead);
            *ring = ring.ahead(1);
        }
    }

    /// Leaves what a lane has of an item: the result, where the warp has all splits; the split's part, where another
    /// follows or somebody else has one.
    #[inline(always)]
    unsafe fn leave(&self, item: &Item, tile: &Tile, mut sums: [[f32; 2]; 16], [top, norm]: [f32; 2]) {
        let (pair, t) = (self.lane / 4, self.lane % 4);
        if pair < self.group.value {
            let (a, place, splits) = (&self.a, tile.place(&self.a, pair), item.splits());
            // SAFETY: the caller's word.
            unsafe {
                // What pieces that are not there would have added: a zero, which counts only beside a negative one.
                unroll!(N < 16; {
                    sums[N] = sums[N].map(|sum| sum + 0.0);
                });
                if !item.is_own() || item.split + 1 < splits {
                    unroll!(N < 16; {
                        a.keep(item.split, place, 8 * N as u32 + 2 * t, sums[N], [top, norm]);
                    });
                    return;
                }
                let mut norm = norm;
                if splits > 1 {
                    (sums, norm) = self.combine_own(item, place, sums, [top, norm]);
                }
                unroll!(N < 16; {
                    let word = math::pack_bf16(sums[N][0] / norm, sums[N][1] / norm);
                    a.put::<true>(place, 8 * N as u32 + 2 * t, word);
                });
            }
        }
    }

    /// What [`combine_by_warp`] makes of a row's splits, eight at most, of which the lane left all but the last: it
    /// reads no more than it wrote.
    #[inline(always)]
    unsafe fn combine_own(
        &self,
        item: &Item,
        place: usize,
        last: [[f32; 2]; 16],
        [last_top, last_norm]: [f32; 2],
    ) -> ([[f32; 2]; 16], f32) {
        let mut top = last_top;
        let mut split = 0;
        while split < item.split {
            // SAFETY: the caller's word.
            top = math::max(top, unsafe { self.a.part_scale(place, split) }[0]);
            split += 1;
        }
        let (mut sums, mut norm) = ([[0f32; 2]; 16], 0f32);
        let mut add = |part: [[f32; 2]; 16], [part_top, part_norm]: [f32; 2]| {
            let factor = weight(part_top, top);
            norm += part_norm * factor;
            unroll!(N < 16; {
                sums[N] = [sums[N][0] + part[N][0] * factor, sums[N][1] + part[N][1] * factor];
            });
        };
        let mut split = 0;
        while split < item.split {
            let mut part = [[0f32; 2]; 16];
            // SAFETY: the caller's word.
            unsafe {
                let from = self.a.part(place, split).cast::<[f32; 2]>();
                unroll!(N < 16; {
                    part[N] = from.load(4 * N + (self.lane % 4) as usize);
                });
                add(part, self.a.part_scale(place, split));
            }
            split = thread::opaque(split) + 1;
        }
        add(last, [last_top, last_norm]);
        (sums, norm)
    }

    /// After the last split of a row and head that the warp has, beside others or too many: combines them, if all are
    /// there now.
    #[inline(always)]
    unsafe fn combine(&self, item: &Item) {
        // SAFETY: the caller's word.
        unsafe {
            // Other lanes' parts are read, and told of.
            warp::sync_warp();
            let (a, group, splits) = (&self.a, self.group.value, item.splits());
            let place = (item.first_row * a.q_heads + item.kv_head * group) as usize;
            if are_there(self.p.split_arrivals().at(place), item, splits) {
                let mut pair = place;
                while pair < place + group as usize {
                    let words = |s| a.part(pair, s).load16(self.lane as usize * 4);
                    let put = |d, word| a.put::<true>(pair, d, word);
                    combine_by_warp(splits, self.lane, words, |s| a.part_scale(pair, s), put);
                    pair += 1;
                }
            }
        }
    }
}

/// Moves all one down, and puts the next behind them: so none is looked for by a number that is not known when this is
/// compiled.
#[inline(always)]
fn push(all: &mut [SoftmaxWeights; PIECES], next: SoftmaxWeights) {
    unroll!(W < 7; {
        all[W] = all[W + 1];
    });
    all[PIECES - 1] = next;
}
