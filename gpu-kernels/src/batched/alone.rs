//! Attention of a step in a launch of its own, where each sequence has one row and every warp works by itself.
//!
//! A warp takes an [item](super::attention) alone, one *piece* of 32 keys after another. It has a ring of its own, into
//! which it copies its pieces ahead. So no warp waits for another, and a short item costs no more than its bytes. The
//! warp computes one after another what the 8 warps of [`attend`](crate::attention::attend) compute side by side, and
//! adds in the same order:
//!
//! ```text
//! S_w = Q · K_wᵀ, its weights P_w, maximum m_w and normaliser      for each piece of keys
//! O   = Σ_w exp2(m_w − max m) · (P_w · V_w)                        for each piece of values
//! ```
//!
//! The warp that needs the queries, and the row's own key and value, makes them. It puts that key and value into the
//! piece that it has of their page, and into the cache. Nobody else reads that row.
//!
//! # Safety
//! `p` is the parameter block of a launch of [`attend_batch`]. All lanes of one warp call what is unsafe here: each
//! warp for its own items, in its own part of shared memory, which nobody else uses. Each tile has one row, and only an
//! item that is its row's last split has the row's own key and value: nobody else reads or writes these in the cache.

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, dependent_launch, device, kernel, math, thread, warp};

use super::attention::{Item, PACKED, are_there, find_forms, make_row_queries};
use super::tile_scheduler::{Assignment, Pool, assign, count_all, load};
use super::{BatchedStep, Phase};
use crate::attention::{
    Attend, Divisor, FewSums, SPLIT, SoftmaxWeights, Tile, WARP_KEYS, add_few, by_pair, combine_by_warp,
    key_quads_from, quads_of, score_few, value_quads_from, weigh_some, weight,
};
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS, PageLayout};
use crate::packed::{Form, HALF_BYTES, Half};
use crate::qkv::{Factors, HeadVector};
use crate::ring::{Ring, Shape};

/// Warps of a CTA.
pub const WARPS: u32 = 8;
/// Most query heads of a key-value head: the columns of operand B.
pub const PAIRS: u32 = 8;
/// Most pieces of an item.
const PIECES: usize = (SPLIT / WARP_KEYS) as usize;
/// As long as there are no more splits than this, [`combine_by_warp`] adds them one after another.
const OWN_SPLITS: u32 = 8;
const PIECE_BYTES: u32 = WARP_KEYS * HEAD_DIM * 2;
const STAGES: u32 = 3;
/// Items that a warp has looked up ahead, in two halves. It looks up a half again when it is done with that half's
/// items. Copies never run further ahead than into the other half.
const SLOTS: u32 = 16;
/// Bytes of an item: its [words](Item::words), its pages' blocks, and their forms.
const SLOT_BYTES: u32 = 48;
const _: () = assert!(STAGES < SLOTS / 2);

/// A warp's shared memory: stages, then queries, then items, then barriers.
const QUERIES: u32 = STAGES * PIECE_BYTES;
const ITEMS: u32 = QUERIES + PAIRS * HEAD_DIM * 2;
const BARRIERS: u32 = ITEMS + SLOTS * SLOT_BYTES;
const WARP_BYTES: u32 = (BARRIERS + 2 * STAGES * 8).next_multiple_of(128);
/// Dynamic shared memory of a CTA.
pub const SHARED_BYTES: u32 = WARPS * WARP_BYTES;
const _: () = assert!(SHARED_BYTES <= crate::HOPPER_SHARED_BYTES);

/// Attention of one phase, [`PhaseKind::Attend`](super::PhaseKind::Attend), for tiles of one row and at most
/// [`BatchedStep::ATTEND_PAIRS`] query heads a key-value head. The grid may have any size, but the same in all layers
/// of a step. [`assignments`](BatchedStep::assignments) has [`BatchedStep::ATTEND_WARPS`] entries a CTA. Shared memory:
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

/// What stays the same for a warp over the whole launch.
struct Warp<'a> {
    p: &'a BatchedStep,
    a: Attend,
    cache: Cache,
    group: Divisor,
    lane: u32,
    /// Where the warp's shared memory begins.
    start: u32,
    /// Number in the line of the warp's first item, and how many items follow.
    first: u32,
    count: u32,
}

/// A warp's position in its ring: the stage of the piece in hand, and the next copy.
struct Stream {
    ring: Ring,
    /// The stage of the next copy.
    ahead: Ring,
    /// The next piece to copy: which of the warp's items, keys (0) or values (1), and which piece.
    item: u32,
    kind: u32,
    piece: u32,
}

/// The item that a warp is working on.
struct InHand {
    item: Item,
    /// The item's slot, where it was looked up.
    slot: Shared<u32>,
    /// The tile, as the warp of its first piece has it.
    tile: Tile,
    /// The key and the value of its row, if this item has them.
    newest: [HeadVector; 2],
}

/// What a warp has to know of a piece.
struct Piece {
    /// The block of its page.
    block: u32,
    form: Form,
    /// The index in the piece of the row's last key; 32 if that key lies after the piece. The last key stands in for
    /// those after it, which were not copied and have weight 0.
    last: u32,
    /// Whether that is the row's own key, which was not in the cache when the piece was copied.
    has_newest: bool,
}

impl InHand {
    /// One of the item's pieces.
    ///
    /// # Safety
    /// `piece` is below the item's [pieces](Item::pieces).
    #[device]
    unsafe fn piece(&self, piece: u32) -> Piece {
        let page = piece as usize / 2;
        // SAFETY: the caller's word.
        let (block, form) = unsafe { (self.slot.load(4 + page), Form(self.slot.load(8 + page))) };
        let last = (self.item.last - self.item.piece_key(piece)).min(WARP_KEYS);
        Piece { block, form, last, has_newest: self.item.is_fresh && last < WARP_KEYS }
    }

    /// The tile, as that warp of [`attend`](crate::attention::attend) has it that takes this piece.
    #[device]
    const fn tile(&self, piece: u32) -> Tile {
        Tile { warp_id: piece, ..self.tile }
    }
}

impl Item {
    /// The first key of a piece.
    #[device]
    const fn piece_key(&self, piece: u32) -> u32 {
        self.split * SPLIT + piece * WARP_KEYS
    }

    /// Number of splits of its row and head.
    #[device]
    const fn splits(&self) -> u32 {
        self.last / SPLIT + 1
    }

    /// Whether each lane combines its own dimensions of the row by itself: if the warp has all splits of the row and
    /// head, and few enough that [`combine_by_warp`] would add them one after another.
    #[device]
    const fn is_own(&self) -> bool {
        self.is_whole && self.splits() <= OWN_SPLITS
    }

    /// How many pieces it has.
    #[device]
    fn pieces(&self) -> u32 {
        (self.last / WARP_KEYS + 1 - self.piece_key(0) / WARP_KEYS).min(PIECES as u32)
    }
}

impl Warp<'_> {
    /// The slot of the warp's item number `item`.
    ///
    /// # Safety
    /// The CTA has shared memory for the warp. The item is [looked up](Self::look_up) before the slot is read.
    #[device]
    unsafe fn slot(&self, item: u32) -> Shared<u32> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(self.start + ITEMS + item % SLOTS * SLOT_BYTES) }
    }

    /// The queries, `[pairs, 128]`.
    #[device]
    unsafe fn queries(&self) -> Shared<bf16> {
        // SAFETY: the caller's word.
        unsafe { shared::dynamic(self.start + QUERIES) }
    }

    /// Looks up `count` of the warp's items from number `from` on, one for each lane.
    ///
    /// # Safety
    /// `count` is at most [`SLOTS`], and the items that lay in these slots are done with. The warp's items are in the
    /// line.
    #[device]
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

    /// Attends to all of the warp's items, one after another.
    ///
    /// # Safety
    /// The ring has this `shape`, is the warp's, and was made.
    #[device]
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

    /// Starts the copy of the next piece, if there is one. Its stage has been read.
    ///
    /// # Safety
    /// All lanes of the warp call it, and have read what lay in the stage that comes next; these reads are fenced. The
    /// next piece's item was looked up.
    #[device]
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
    #[device]
    unsafe fn make_queries(&self, item: &Item) {
        // SAFETY: the caller's word.
        unsafe {
            let norm = field!(self.p.phases, norm: Global<bf16>);
            let factors = Factors::load(norm, self.p.work.cos, self.p.work.sin, item.last);
            make_row_queries(self.p, factors, item.first_row, item.kv_head, self.queries());
            warp::sync_warp();
        }
    }

    /// Makes the key and the value of an item's row.
    ///
    /// # Safety
    /// `item` is the last split of its row.
    #[device]
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

    /// Writes the row's own key (`kind` 0) or value (1) to the piece that lacks it, and to the cache.
    ///
    /// # Safety
    /// `kind` is 0 or 1. The `stage` has the piece with the row's own key or value, and was waited for; `block` is the
    /// block of its page.
    #[device]
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

    /// Computes an item's attention, and leaves the result or the split's part.
    ///
    /// # Safety
    /// `number` is the item's. Its pieces are the next in the stream, and the queries of its row are there.
    #[device]
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

    /// Reads the item's keys, and computes the weights of each piece's values.
    ///
    /// # Safety
    /// The item's keys are the next in the stream.
    #[device]
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
            let query = |i: usize| loaded[i];
            let mut found = [SoftmaxWeights::NOTHING; PIECES];
            let mut number = 0;
            while number < PIECES as u32 {
                let mut weights = SoftmaxWeights::NOTHING;
                if number < of.item.pieces() {
                    let piece = of.piece(number);
                    stream.ring.wait_full();
                    let stage = stream.ring.offset();
                    let scores = if piece.form.is_packed() {
                        score_few(query, |i| quads_of(Half::load_fragments(stage, 0, self.lane, i, piece.form.base(0))))
                    } else {
                        if piece.has_newest {
                            self.put_newest(of, 0, piece.block, &stream.ring);
                        }
                        score_few(
                            query,
                            key_quads_from(PageLayout::CACHE, stage, piece.last.min(WARP_KEYS - 1), self.lane),
                        )
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

    /// Reads the item's values and adds them up by their weights. `top` is the largest score of all pieces. Returns the
    /// lane's sums of dimensions `8n + 2t` and `8n + 2t + 1`, and their normaliser.
    ///
    /// # Safety
    /// The item's values are the next in the stream, and `weights` are those of its keys.
    #[device]
    unsafe fn add_values(
        &self,
        of: &InHand,
        mut weights: [SoftmaxWeights; PIECES],
        top: f32,
        stream: &mut Stream,
    ) -> ([[f32; 2]; 16], f32) {
        // SAFETY: the caller's word.
        unsafe {
            let (mut norm, mut sums): (f32, FewSums) = (0.0, [[0.0; 4]; 8]);
            let mut number = 0;
            while number < PIECES as u32 {
                let own = weights[0];
                push(&mut weights, SoftmaxWeights::NOTHING);
                if number < of.item.pieces() {
                    let piece = of.piece(number);
                    let factor = weight(own.top[0], top);
                    norm = math::fma(own.norm[0], factor, norm);
                    // The lane has sums of pairs 2 t and 2 t + 1, and the factor of pair g.
                    let first = self.lane % 4 * 8;
                    let factors = [warp::shuffle_idx(factor, first), warp::shuffle_idx(factor, first + 4)];
                    stream.ring.wait_full();
                    let stage = stream.ring.offset();
                    if piece.form.is_packed() {
                        let base = piece.form.base(1);
                        let values = |i| quads_of(Half::load_fragments(stage, 0, self.lane, i, base));
                        add_few(&own, values, factors, &mut sums);
                    } else {
                        if piece.has_newest {
                            self.put_newest(of, 1, piece.block, &stream.ring);
                        }
                        let last = piece.last.min(WARP_KEYS - 1);
                        let values = value_quads_from(PageLayout::CACHE, stage, last, self.lane);
                        add_few(&own, values, factors, &mut sums);
                    }
                    self.next(stream);
                }
                number = thread::opaque(number) + 1;
            }
            (by_pair(&sums), norm)
        }
    }

    /// Goes on to the next stage, and starts a copy into this one, which has been read.
    ///
    /// # Safety
    /// All lanes of the warp have read the stage.
    #[device]
    unsafe fn next(&self, stream: &mut Stream) {
        // SAFETY: the caller's word.
        unsafe {
            bulk::fence_proxy_async();
            warp::sync_warp();
            self.copy(stream);
            stream.ring = stream.ring.ahead(1);
        }
    }

    /// Writes what a lane has of an item: the result, if the lane combines the row by itself and this is its last
    /// split; otherwise the split's part.
    ///
    /// # Safety
    /// `sums` and the two scales are what the lane found for the whole item.
    #[device]
    unsafe fn leave(&self, item: &Item, tile: &Tile, mut sums: [[f32; 2]; 16], [top, norm]: [f32; 2]) {
        let (pair, t) = (self.lane / 4, self.lane % 4);
        if pair < self.group.value {
            let (a, place, splits) = (&self.a, tile.place(&self.a, pair), item.splits());
            // SAFETY: the caller's word.
            unsafe {
                // Missing pieces would have added a zero. That changes a sum only if it is -0.
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

    /// Combines a row's splits, eight at most, with the bits of [`combine_by_warp`]. The lane has left all splits but
    /// the last in memory. It reads its own sums back, and their scales, which the first of the pair's lanes left.
    ///
    /// # Safety
    /// The lane left all splits before the item's, and the warp has synchronised since.
    #[device]
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

    /// Combines a row and head, after the warp's last split of it, if all splits are in memory now. Called where other
    /// warps have splits too, or where there are too many for `combine_own`.
    ///
    /// # Safety
    /// The item is the warp's last of its row and head, and all lanes have left what they found.
    #[device]
    unsafe fn combine(&self, item: &Item) {
        // SAFETY: the caller's word.
        unsafe {
            // The warp reads other lanes' parts below, and tells other warps of them.
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

/// Moves all elements one place down, and puts `next` behind them. So no element has an index that is unknown at
/// compile time, and all stay in registers.
#[device]
fn push(all: &mut [SoftmaxWeights; PIECES], next: SoftmaxWeights) {
    unroll!(W < 7; {
        all[W] = all[W + 1];
    });
    all[PIECES - 1] = next;
}
