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
//!
//! # Safety
//! `p` is the parameter block of a launch of [`attend_batch`]. All lanes of one warp call what is unsafe here: each
//! warp for its own items, in its own part of shared memory, which nobody else uses. Each tile has one row, and each
//! item's last split alone has the row's own key and value: nobody else reads or writes these in the cache.

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, dependent_launch, kernel, math, thread, warp};

use super::attention::{Item, PACKED, are_there, find_forms, make_row_queries};
use super::tile_scheduler::{Assignment, Pool, assign, count_all, load};
use super::{BatchedStep, Phase};
use crate::attention::{
    Attend, Divisor, SPLIT, SoftmaxWeights, Tile, WARP_KEYS, add_values_each, combine_by_warp, keys_from, score_keys,
    values_from, weigh_some, weight,
};
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS, PageLayout};
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
/// [`BatchedStep::ATTEND_PAIRS`] query heads a key-value head. The grid is any, and the same in all layers of a step;
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
        if !p.best.is_null() {
            p.zero_best(WARPS * 32);
        }
        let number = thread::block_idx_x() * WARPS + warp_id;
        let assigned = p.assignments.at(4 * number as usize);
        let assignment = if p.is_scheduled == 0 {
            let lane = thread::opaque(thread::lane_id());
            let (all, sharers) = (count_all(&p, lane), thread::grid_dim_x() * WARPS);
            let assignment = assign(&p, all, &Pool::none(&p), (number, sharers), 0);
            if lane == 0 {
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

/// Where a warp stands in its ring: the stage of the piece in hand, and what is copied next.
struct Stream {
    ring: Ring,
    /// The stage of the next copy.
    ahead: Ring,
    /// Which of the warp's items, whether of its values, and which piece.
    item: u32,
    kind: u32,
    piece: u32,
}

/// The item that a warp has in hand.
struct InHand {
    item: Item,
    /// Where it is described.
    slot: Shared<u32>,
    /// The tile of its first piece.
    tile: Tile,
    /// The key and the value of its row, if it is the one that has them.
    newest: [HeadVector; 2],
}

/// What has to be known of a piece.
struct Piece {
    /// Of its page.
    block: u32,
    form: Form,
    /// The last of its keys that was copied, or more: it stands for those beyond, whose weight is 0.
    last: u32,
    /// Whether that is the row's own, which has yet to come there.
    has_newest: bool,
}

impl InHand {
    /// One of the item's pieces.
    ///
    /// # Safety
    /// `piece` is below the item's [pieces](Item::pieces).
    #[inline(always)]
    unsafe fn piece(&self, piece: u32) -> Piece {
        let page = piece as usize / 2;
        // SAFETY: the caller's word.
        let (block, form) = unsafe { (self.slot.load(4 + page), Form(self.slot.load(8 + page))) };
        let last = (self.item.last - self.item.piece_key(piece)).min(WARP_KEYS);
        Piece { block, form, last, has_newest: self.item.is_fresh && last < WARP_KEYS }
    }

    /// The tile as a warp of [`attend`](crate::attention::attend) has it that takes this piece.
    #[inline(always)]
    const fn tile(&self, piece: u32) -> Tile {
        Tile { warp_id: piece, ..self.tile }
    }
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
    /// Where an item of the warp's is described.
    ///
    /// # Safety
    /// The block has shared memory for the warp. The item is [looked up](Self::look_up) before the slot is read.
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
    ///
    /// # Safety
    /// `count` is at most [`SLOTS`], and the items that lay there are done with. The warp's items are in the line.
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
    ///
    /// # Safety
    /// The ring has this `shape`, is the warp's, and was made.
    #[inline(always)]
    unsafe fn attend(&self, shape: Shape) {
        // SAFETY: the caller's word.
        unsafe {
            self.look_up(0, SLOTS);
            let ring = Ring::consumer(shape);
            let mut stream = Stream { ring, ahead: ring, item: 0, kind: 0, piece: 0 };
            unroll!(_S < STAGES of 3; {
                self.copy(&mut stream);
            });
            let mut number = 0;
            while number < self.count {
                let item = Item::new(self.slot(number).load16(0));
                if item.split == item.first_split {
                    self.make_queries(&item);
                }
                self.find(number, item, &mut stream);
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
    ///
    /// # Safety
    /// All lanes of the warp call it, and have read what lay in the stage that comes next: their reading is fenced. The
    /// next piece's item was looked up.
    #[inline(always)]
    unsafe fn copy(&self, stream: &mut Stream) {
        if stream.item < self.count {
            // SAFETY: the caller's word.
            unsafe {
                let slot = self.slot(stream.item);
                let item = Item::new(slot.load16(0));
                let page = (stream.piece / 2) as usize;
                let (block, form) = (slot.load(4 + page) & !PACKED, Form(slot.load(8 + page)));
                let tokens = (item.last + 1 - item.piece_key(stream.piece)).min(WARP_KEYS);
                let [bytes, apart] =
                    if form.is_packed() { [HALF_BYTES, HALF_BYTES] } else { [tokens * HEAD_DIM * 2, PIECE_BYTES] };
                if self.lane == 0 {
                    let from = (block * 2 + stream.kind) as usize * (PAGE_TOKENS * HEAD_DIM) as usize;
                    let from = self.cache.pages.read().at(from).cast::<u8>().at((stream.piece % 2 * apart) as usize);
                    let full = stream.ahead.full();
                    full.arrive_expect_tx(bytes);
                    bulk::copy_to_shared_once(stream.ahead.stage_buffer(), from, bytes, full);
                }
                stream.ahead = stream.ahead.ahead(1);
                stream.piece += 1;
                if stream.piece == item.pieces() {
                    stream.piece = 0;
                    stream.item += stream.kind;
                    stream.kind ^= 1;
                }
            }
        }
    }

    /// Makes the queries of an item's row for its key-value head.
    ///
    /// # Safety
    /// All lanes have read the queries of the item before, and synchronised since.
    #[inline(always)]
    unsafe fn make_queries(&self, item: &Item) {
        // SAFETY: the caller's word.
        unsafe {
            let norm = field!(self.p.phases, norm: Global<bf16>);
            let factors = Factors::load(norm, self.p.work.cos, self.p.work.sin, item.last);
            make_row_queries(self.p, factors, item.first_row, item.kv_head, self.queries());
            warp::sync_warp();
        }
    }

    /// The key and the value of an item's row.
    ///
    /// # Safety
    /// `item` is the last split of its row.
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
    ///
    /// # Safety
    /// `kind` is 0 or 1; the `stage` has the piece with the row's own, and was waited for; `block` is its page's.
    #[inline(always)]
    unsafe fn put_newest(&self, of: &InHand, kind: usize, block: u32, stage: &Ring) {
        let (vector, position) = (of.newest[kind], of.item.last);
        // SAFETY: the caller's word.
        unsafe {
            let row = (position % WARP_KEYS * HEAD_DIM) as usize;
            vector.store_shared(stage.stage_buffer().cast::<bf16>().at(row), position);
            let to = if kind == 0 { self.cache.key_in(block, position) } else { self.cache.value_in(block, position) };
            vector.store(to, position);
            warp::sync_warp();
        }
    }

    /// What an item's keys and values give, to where it belongs.
    ///
    /// # Safety
    /// `number` is the item's. It is the next in the stream, and the queries of its row are there.
    #[inline(always)]
    unsafe fn find(&self, number: u32, item: Item, stream: &mut Stream) {
        // SAFETY: the caller's word.
        unsafe {
            let Item { kv_head, split, first_row, .. } = item;
            let (lane, group) = (self.lane, self.group);
            let tile = Tile { kv_head, split, group, first_row, pairs: group.value, lane, warp_id: 0 };
            let newest = if item.is_fresh { self.newest(&item) } else { [HeadVector::default(); 2] };
            let of = InHand { item, slot: self.slot(number), tile, newest };
            let weights = self.weigh_keys(&of, stream);
            let mut top = f32::NEG_INFINITY;
            unroll!(W < 8; {
                top = math::max(top, weights[W].top[0]);
            });
            let (sums, norm) = self.add_values(&of, weights, top, stream);
            self.leave(&of.item, &of.tile, sums, [top, norm]);
        }
    }

    /// What each piece's values are weighed by.
    ///
    /// # Safety
    /// The item's keys are the next in the stream.
    #[inline(always)]
    unsafe fn weigh_keys(&self, of: &InHand, stream: &mut Stream) -> [SoftmaxWeights; PIECES] {
        // SAFETY: the caller's word.
        unsafe {
            let (pair, t) = (self.lane / 4, self.lane % 4);
            let mut loaded = [[0; 4]; 4];
            unroll!(J < 4; {
                if pair < self.group.value {
                    loaded[J] = self.queries().load16((pair * HEAD_DIM + 8 * t) as usize + 32 * J);
                }
            });
            let query = |i: usize, j: usize| if i == 0 { loaded[j] } else { [0; 4] };
            let mut found = [SoftmaxWeights::NOTHING; PIECES];
            let mut number = 0;
            while number < PIECES as u32 {
                let mut weights = SoftmaxWeights::NOTHING;
                if number < of.item.pieces() {
                    let piece = of.piece(number);
                    stream.ring.wait_full();
                    let stage = stream.ring.offset();
                    let scores = if piece.form.is_packed() {
                        score_keys(query, |i| Half::load_fragments(stage, 0, self.lane, i, piece.form.base(0)))
                    } else {
                        if piece.has_newest {
                            self.put_newest(of, 0, piece.block, &stream.ring);
                        }
                        score_keys(query, keys_from(PageLayout::CACHE, stage, piece.last.min(WARP_KEYS - 1), self.lane))
                    };
                    self.next(stream);
                    weights = weigh_some::<1>(&self.a, &of.tile(number), |_| of.item.last, scores);
                }
                push(&mut found, weights);
                number = thread::opaque(number) + 1;
            }
            found
        }
    }

    /// The values, so weighed, where `top` is the largest score of all: a lane's sums of dimensions `8n + 2t` and one
    /// on, and their normaliser.
    ///
    /// # Safety
    /// The item's values are the next in the stream, and `weights` are those of its keys.
    #[inline(always)]
    unsafe fn add_values(
        &self,
        of: &InHand,
        mut weights: [SoftmaxWeights; PIECES],
        top: f32,
        stream: &mut Stream,
    ) -> ([[f32; 2]; 16], f32) {
        // SAFETY: the caller's word.
        unsafe {
            let (mut norm, mut sums) = (0f32, [[0f32; 2]; 16]);
            let mut number = 0;
            while number < PIECES as u32 {
                let own = weights[0];
                push(&mut weights, SoftmaxWeights::NOTHING);
                if number < of.item.pieces() {
                    let piece = of.piece(number);
                    let factor = weight(own.top[0], top);
                    norm = math::fma(own.norm[0], factor, norm);
                    let add = |n: usize, o: [f32; 4]| {
                        sums[n] = [math::fma(o[0], factor, sums[n][0]), math::fma(o[1], factor, sums[n][1])];
                    };
                    stream.ring.wait_full();
                    let stage = stream.ring.offset();
                    if piece.form.is_packed() {
                        let base = piece.form.base(1);
                        add_values_each(&own, |i| Half::load_fragments(stage, 0, self.lane, i, base), add);
                    } else {
                        if piece.has_newest {
                            self.put_newest(of, 1, piece.block, &stream.ring);
                        }
                        add_values_each(
                            &own,
                            values_from(PageLayout::CACHE, stage, piece.last.min(WARP_KEYS - 1), self.lane),
                            add,
                        );
                    }
                    self.next(stream);
                }
                number = thread::opaque(number) + 1;
            }
            (sums, norm)
        }
    }

    /// The stage has been read: the next piece may come there.
    ///
    /// # Safety
    /// All lanes of the warp have read the stage.
    #[inline(always)]
    unsafe fn next(&self, stream: &mut Stream) {
        // SAFETY: the caller's word.
        unsafe {
            bulk::fence_proxy_async();
            warp::sync_warp();
            self.copy(stream);
            stream.ring = stream.ring.ahead(1);
        }
    }

    /// Leaves what a lane has of an item: the result, where the warp has all splits; the split's part, where another
    /// follows or somebody else has one.
    ///
    /// # Safety
    /// `sums` and the two scales are what the lane found of the whole item.
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
    /// reads its own sums again, and their scale, which the first of the pair's lanes left; the warp has synchronised
    /// since.
    ///
    /// # Safety
    /// The lane left all splits before the item's, and the warp has synchronised since.
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
    ///
    /// # Safety
    /// The item is the warp's last of its row and head, and all lanes have left what they found.
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
