//! Attention of the rows of many sequences: the bits of [`attention`](crate::attention), with keys and values streamed
//! through shared memory.
//!
//! An *item* is the work of one CTA of [`attend`](crate::attention::attend): a tile of rows of one sequence, a
//! key-value head, a split of 256 keys. A CTA takes its [items](super::tile_scheduler) in turn, and releases a page as
//! soon as the page's two warps have used it. The ends of contexts make small items, which cost the warps more time
//! than memory. Large items lie between them.
//!
//! # Queries, keys and values of a step
//! Queries, keys and values are made from the projection's output where they are needed. The warp that describes an
//! item makes its queries, and the key of its last row. The warp that has a new key among its own puts the key and its
//! value into their pages in shared memory. So pages are loaded without waiting for anybody. Keys and values are
//! written to the cache when attention is over.
//!
//! # Combining
//! Where one CTA has all splits of a tile and head, it keeps their sums in shared memory, behind the queries, and
//! combines them at once. Sums that have no room there, or that come from several CTAs, go to memory. Each CTA counts
//! the splits that it has put there, and the CTA that finds all of them counted combines them. Nobody waits.
//!
//! # Safety
//! `p` is a launch's parameter block, and `phase` one of attention. All lanes of the warps that are named call what is
//! unsafe here: the one that loads pages, the one that describes items, or the eight consumers, which synchronise. All
//! three have the same items in the same order. A producer waits for a stage before it fills it. Consumers wait for a
//! stage before they read it, and release it once; a page's two warps release it for all. An item's rows are the
//! step's, its pages are in the tables, and nobody writes these pages before all CTAs are done with the phase.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, bulk, device, thread, warp};

use super::newest::Newest;
use super::{ALL, BatchedStep, CONSUMERS, Memory, Phase, Rings, WARPS};
use crate::attention::{
    Attend, Divisor, PAIRS, QUARTER, SPLIT, Tile, WarpAttention, add_values, combine_by_warp, keys_from, reduce,
    reduce_few, score_keys, values_from, weigh,
};
use crate::kv::{Cache, HEAD_DIM, PAGE_TOKENS, PageLayout};
use crate::packed::{Form, Half, PACKED_BYTES, bring_rest, is_cut};
use crate::qkv::{Factors, Weight};
use crate::ring::{Ring, Shape};

const QUERY: u32 = HEAD_DIM * 2;
/// Bytes of a page of a head's keys, or of its values.
const PAGE_BYTES: u32 = PAGE_TOKENS * QUERY;
/// A flag of an item's page beside its [index](Cache::block_index): the page is [packed](BatchedStep::packed).
pub const PACKED: u32 = 1 << 31;
/// Where a stage of the items' ring has the item's description: behind its queries.
const DESCRIPTION: u32 = PAIRS * QUERY;

/// Where it has the forms of the item's pages: behind the description.
const FORMS: u32 = DESCRIPTION + 16;

/// Where its room for *parts* begins: behind the forms, to the end of the stage. A part is the sums of a split for a
/// pair, with their maximum and normaliser.
const PART: u32 = FORMS + 16;
/// Bytes of a part: 8 more than it needs, so that accesses of 16 bytes are aligned.
const PART_BYTES: u32 = HEAD_DIM * 4 + 16;

/// Parts that a stage has room for.
const fn parts_of(ring: Shape) -> u32 {
    (ring.bytes - PART) / PART_BYTES
}

/// Parts that the ring has room for.
pub const fn parts<const ROWS: u32>() -> u32 {
    parts_of(Memory::<ROWS>::ITEM_RING) * Memory::<ROWS>::ITEM_RING.stages
}

const _: () = assert!(PAGE_BYTES == super::WEIGHT_BYTES);
const _: () = assert!(parts::<64>() == 35 && parts::<96>() == 90 && parts::<128>() == 92);

/// One tile, key-value head and split.
#[derive(Clone, Copy)]
pub struct Item {
    pub kv_head: u32,
    pub split: u32,
    /// The first split of the tile and head that this CTA has.
    pub first_split: u32,
    pub first_row: u32,
    /// Number of rows; 0 marks the end of the items.
    pub rows: u32,
    /// Rows of this step before them, of the same sequence.
    pub rows_before: u32,
    /// The position of the tile's last row.
    pub last: u32,
    /// Whether its sums stay in shared memory. Then the CTA has all splits of the tile and head.
    pub on_chip: bool,
    /// Whether the CTA has all splits of the tile and head.
    pub is_whole: bool,
    /// Whether this is the CTA's last split of a tile and head that has several splits.
    pub is_last: bool,
    /// Whether this step adds to the item's keys.
    pub is_fresh: bool,
}

impl Item {
    /// The words that mark the end of the items.
    const END: [u32; 4] = [0; 4];

    /// As four words.
    #[device]
    pub const fn words(&self) -> [u32; 4] {
        let flags = (self.on_chip as u32) << 24
            | (self.is_last as u32) << 25
            | (self.is_fresh as u32) << 26
            | (self.is_whole as u32) << 27;
        let rows = self.rows_before << 20 | self.first_row << 8 | self.rows;
        [self.kv_head | flags, self.first_split << 16 | self.split, rows, self.last]
    }

    /// From its [words](Self::words).
    #[device]
    pub const fn new([head, splits, rows, last]: [u32; 4]) -> Self {
        Self {
            kv_head: head & 0xff_ffff,
            split: splits & 0xffff,
            first_split: splits >> 16,
            first_row: rows >> 8 & 0xfff,
            rows: rows & 0xff,
            rows_before: rows >> 20,
            last,
            on_chip: head >> 24 & 1 != 0,
            is_last: head >> 25 & 1 != 0,
            is_fresh: head >> 26 & 1 != 0,
            is_whole: head >> 27 & 1 != 0,
        }
    }

    /// The position of one of its rows. That of the last row, and so of a single one, needs no load.
    ///
    /// # Safety
    /// The row is one of the item's.
    #[device]
    pub unsafe fn position(&self, p: &BatchedStep, row: u32) -> u32 {
        if row + 1 == self.first_row + self.rows {
            self.last
        } else {
            // SAFETY: the caller's word: one of the step's rows.
            unsafe { p.work.rows.positions.load(row as usize) }
        }
    }

    /// Whether the key of its last row comes with its queries.
    #[device]
    pub const fn brings_key(&self, group: u32) -> bool {
        self.last / SPLIT == self.split && self.rows * group < PAIRS
    }

    /// Number of its first page among its sequence's pages.
    #[device]
    pub const fn first_page(&self) -> u32 {
        self.split * (SPLIT / PAGE_TOKENS)
    }

    /// How many pages it has.
    #[device]
    pub fn pages(&self) -> u32 {
        (self.last / PAGE_TOKENS + 1 - self.first_page()).min(SPLIT / PAGE_TOKENS)
    }
}

/// One lane loads an item's existing pages, keys first. Before the `i`-th copy it waits until at most `under_way(i)`
/// are under way. `blocks` are the pages' [indices](Cache::block_index), with [`PACKED`]. All lanes return the ring's
/// next position.
///
/// # Safety
/// All lanes of the warp that loads pages call it. `blocks` are those of the item's pages in `cache`, with [`PACKED`]
/// for pages that are packed; `under_way` gives numbers from 1 to the ring's stages.
#[device]
pub unsafe fn load_pages(
    cache: &Cache,
    ring: Ring,
    item: &Item,
    blocks: [u32; 4],
    under_way: impl Fn(u32) -> u32,
) -> Ring {
    // SAFETY: the caller's word.
    unsafe {
        let pages = item.pages();
        if thread::opaque(thread::lane_id()) == 0 {
            let (mut ring, mut kind) = (ring, 0);
            while kind < 2 {
                unroll!(I < 4; {
                    if (I as u32) < pages {
                        ring.wait_under_way(under_way(kind * pages + I as u32));
                        ring.wait_empty();
                        let tokens = item.last + 1 - (item.first_page() + I as u32) * PAGE_TOKENS;
                        let is_packed = blocks[I] & PACKED != 0;
                        let bytes = if is_packed { PACKED_BYTES } else { tokens.min(PAGE_TOKENS) * QUERY };
                        ring.full().arrive_expect_tx(bytes);
                        let from = (blocks[I] & !PACKED) as usize * 2 + kind as usize;
                        let from = from * (PAGE_TOKENS * HEAD_DIM) as usize;
                        bulk::copy_to_shared_once(ring.stage_buffer(), cache.pages.read().at(from).cast(), bytes, ring.full());
                        ring = ring.ahead(1);
                    }
                });
                kind += 1;
            }
        }
        warp::sync_warp();
        ring.ahead(2 * pages)
    }
}

/// Queries that a warp makes at a time.
const QUERIES_AT_ONCE: usize = 4;

/// A warp makes the queries of a row for a key-value head, `[group, 128]`, from the projection's output.
///
/// # Safety
/// All lanes of a warp call it. The projection's results were waited for; `row` and `kv_head` are below their numbers.
/// From `to` on there is room in shared memory, which nobody else uses before the warp has synchronised.
#[device]
pub unsafe fn make_row_queries(p: &BatchedStep, factors: Factors, row: u32, kv_head: u32, to: Shared<bf16>) {
    // SAFETY: the caller's word.
    unsafe {
        let (group, heads) = (p.work.group(), p.work.heads());
        let mut first = 0;
        while first < group {
            // Numbers beyond the last head take the last one.
            let head = |i: u32| kv_head * group + (first + i).min(group - 1);
            let x = [0, 1, 2, 3].map(|i| heads.load(row, head(i)));
            unroll!(H < 2; {
                let x = [x[2 * H], x[2 * H + 1]];
                let scales = heads.scales(&x);
                unroll!(I < 2; {
                    let number = first + (2 * H + I) as u32;
                    if number < group {
                        let to = to.at((number * HEAD_DIM) as usize);
                        heads.vector(0, x[I], scales[I], || factors).store_for_words(to);
                    }
                });
            });
            first += QUERIES_AT_ONCE as u32;
        }
    }
}

/// A warp describes an item to the consumers, and makes its queries from the projection's output. Behind them it puts
/// the key of the item's last row, if the split has that key and the stage has room. `weight` is a lane's part of the
/// weights of the queries' norm; `forms` are those of the item's pages.
///
/// # Safety
/// All lanes of the warp that describes items call it, when all CTAs have shown the projection's results. `ring` is
/// that of items, at the next stage, and from `forms` on are four words.
#[device]
pub unsafe fn make_queries(p: &BatchedStep, phase: u32, weight: Weight, ring: &Ring, item: &Item, forms: Shared<u32>) {
    // SAFETY: the caller's word.
    unsafe {
        let (group, heads) = (p.work.group(), p.work.heads());
        ring.wait_empty();
        let mut row = 0;
        while row < item.rows {
            let factors = Factors::of(weight, p.work.cos, p.work.sin, item.position(p, item.first_row + row));
            let to = ring.stage_buffer().at((row * group * QUERY) as usize);
            make_row_queries(p, factors, item.first_row + row, item.kv_head, to.cast());
            row += 1;
        }
        if item.brings_key(group) {
            let head = heads.q_heads + item.kv_head;
            let x = heads.load(item.first_row + item.rows - 1, head);
            let norm = field!(p.phases.at(phase as usize), key_norm: Global<bf16>);
            let factors = Factors::load(norm, p.work.cos, p.work.sin, item.last);
            let [scale] = heads.scales(&[x]);
            let to = ring.stage_buffer().at((item.rows * group * QUERY) as usize);
            heads.vector(head, x, scale, || factors).store_shared(to.cast(), item.last);
        }
        let lane = thread::opaque(thread::lane_id());
        if lane == 0 {
            ring.stage_buffer().at(DESCRIPTION as usize).cast::<u32>().store16(0, item.words());
        }
        if lane < 4 {
            ring.stage_buffer().at(FORMS as usize).cast().store(lane as usize, forms.load(lane as usize));
        }
        warp::sync_warp();
        ring.full().arrive_if(lane == 0);
    }
}

/// An item's words, and the forms of its pages in the phase's layer.
///
/// # Safety
/// The words and pages are those of one of the step's items.
#[device]
pub unsafe fn find_forms(p: &BatchedStep, phase: u32, [words, pages]: [[u32; 4]; 2]) -> [[u32; 4]; 2] {
    // SAFETY: the caller's word.
    unsafe {
        let forms = field!(p.phases.at(phase as usize), forms: Global<u32>);
        let form = |page| if page & PACKED != 0 { forms.load((page & !PACKED) as usize) } else { Form::RAW.0 };
        [words, pages.map(form)]
    }
}

/// One lane tells the consumers that there are no more items.
///
/// # Safety
/// All lanes of the warp that describes items call it, behind the phase's last item.
#[device]
pub unsafe fn send_end(ring: &Ring) {
    // SAFETY: the caller's word.
    unsafe {
        if thread::opaque(thread::lane_id()) == 0 {
            ring.wait_empty();
            ring.stage_buffer().at(DESCRIPTION as usize).cast::<u32>().store16(0, Item::END);
            ring.full().arrive();
        }
    }
}

/// A warp releases a page's stage. The other warps do not read it: the page's two warps release it for all eight.
///
/// # Safety
/// All lanes of the warp call it, which is one of the page's two, and reads the stage no more.
#[device]
unsafe fn release(stage: &Ring, lane: u32) {
    // SAFETY: the caller's word.
    unsafe { stage.release(lane < WARPS / 2) };
}

/// A warp's attention against its keys of a packed page. The warp loads all its keys, and later all its values, into
/// registers and releases their stage: how long a stage is occupied matters more than the work on it.
///
/// # Safety
/// All lanes of a warp call it that has keys in the page. The page is packed, with this `form`; the keys' stage was
/// waited for, and both stages are yet to be released. `query` gives words of the item's queries.
#[device]
unsafe fn find_in_packed(
    a: &Attend,
    tile: &Tile,
    form: Form,
    [keys_stage, values_stage]: [Ring; 2],
    position: impl Fn(u32) -> u32,
    query: impl Fn(usize, usize) -> [u32; 4],
) -> WarpAttention {
    // SAFETY: the caller's word.
    unsafe {
        let token = tile.first_key() % PAGE_TOKENS;
        let keys = Half::load(keys_stage.offset(), token, tile.lane);
        release(&keys_stage, tile.lane);
        let scores = score_keys(query, |i| keys.fragments(i, form.base(0)));
        let weights = weigh(a, tile, position, scores);
        values_stage.wait_full();
        let values = Half::load(values_stage.offset(), token, tile.lane);
        release(&values_stage, tile.lane);
        add_values(&weights, |i| values.fragments(i, form.base(1)))
    }
}

/// As [`find_in_packed`], for a page that is not packed; this step may add to it. A single function for both kinds of
/// pages would be slower.
///
/// # Safety
/// As for [`find_in_packed`], of a page that is not packed. `newest` is of the same item and keys.
#[device]
#[expect(clippy::too_many_arguments, reason = "a part of one function")]
unsafe fn find_in_plain(
    p: &BatchedStep,
    phase: Global<Phase>,
    a: &Attend,
    (item, tile): (&Item, &Tile),
    form: Form,
    newest: &Newest,
    [keys_stage, values_stage]: [Ring; 2],
    query: impl Fn(usize, usize) -> [u32; 4],
) -> Option<WarpAttention> {
    // SAFETY: the caller's word.
    unsafe {
        let (lane, first_key) = (tile.lane, tile.first_key());
        let token = first_key % PAGE_TOKENS;
        let (first, has_keys) = (token * QUERY, first_key <= item.last);
        // Tokens after the last were not loaded. The last token stands in for them, with weight 0.
        let last = item.last - first_key.min(item.last);
        let bring_rest = |kind: u32, stage: Ring| {
            if let Some(block) = form.beyond()
                && is_cut(token)
            {
                let pages = field!(phase, pages: GlobalMut<bf16>);
                let from = pages.at((block * 2 + kind) as usize * (PAGE_TOKENS * HEAD_DIM) as usize);
                bring_rest(from.read(), stage.offset());
            }
        };
        let mut loaded = [[[0; 4]; 4]; 4];
        if has_keys {
            bring_rest(0, keys_stage);
            if item.is_fresh {
                newest.put_keys(p, item, first_key, shared::dynamic(keys_stage.offset()), lane);
            }
            let keys = keys_from(PageLayout::CACHE, keys_stage.offset() + first, last, lane);
            unroll!(I < 4; {
                loaded[I] = keys(I);
            });
        }
        release(&keys_stage, lane);
        let weights = weigh(a, tile, |row| item.position(p, row), score_keys(query, |i| loaded[i]));
        values_stage.wait_full();
        if has_keys {
            bring_rest(1, values_stage);
            if item.is_fresh {
                newest.put_values(p, item, first_key, shared::dynamic(values_stage.offset()), lane);
            }
            let values = values_from(PageLayout::CACHE, values_stage.offset() + first, last, lane);
            unroll!(I < 4; {
                loaded[I] = values(I);
            });
        }
        release(&values_stage, lane);
        has_keys.then(|| add_values(&weights, |i| loaded[i]))
    }
}

/// The consumers' role in a phase: they take one item after another.
///
/// # Safety
/// All consumers of every CTA call it, for the same phase, when all CTAs have done those before. `rings` are where the
/// phase's first page and item come.
#[device]
pub unsafe fn attend<const ROWS: u32>(p: &BatchedStep, phase: Global<Phase>, rings: &mut Rings) {
    // SAFETY: the caller's word.
    unsafe {
        // Loaded once and kept: loaded where it is needed, it would be waited for.
        let weight = Factors::load_weight(field!(phase, key_norm: Global<bf16>));
        let a = &p.work.attend();
        let group = Divisor::new(p.work.group());
        loop {
            let (lane, warp_id) = (thread::opaque(thread::lane_id()), thread::opaque(thread::warp_id()));
            rings.items.wait_full();
            let stage = rings.items.stage_buffer();
            let item = Item::new(stage.at(DESCRIPTION as usize).cast::<u32>().load16(0));
            if item.rows == 0 {
                // After this release, activations may come where warps have reduced, and where sums were kept.
                rings.items.release(lane == 0);
                rings.items = rings.items.ahead(1);
                return;
            }
            let Item { kv_head, split, first_row, rows, .. } = item;
            let position = |row: u32| item.position(p, row);
            let here = Tile { kv_head, split, group, first_row, pairs: rows * group.value, lane, warp_id };
            let pages = item.pages();
            let page = here.first_key() % SPLIT / PAGE_TOKENS;
            let mut found = WarpAttention::NOTHING;
            if page < pages {
                let form = Form(stage.at(FORMS as usize).cast().load(page as usize));
                let newest = Newest::load(p, weight, &item, here.first_key(), lane, stage.cast());
                let stages = [rings.ring.ahead(page), rings.ring.ahead(pages + page)];
                stages[0].wait_full();
                let (g, t) = (lane / 4, lane % 4);
                let queries = stage.cast::<bf16>();
                let query = |i: usize, j: usize| {
                    let pair = g + 8 * i as u32;
                    let from = pair * HEAD_DIM + 8 * t + 32 * j as u32;
                    if pair < here.pairs { queries.load16(from as usize) } else { [0; 4] }
                };
                if form.is_packed() {
                    found = find_in_packed(a, &here, form, stages, position, query);
                } else if let Some(some) = find_in_plain(p, phase, a, (&item, &here), form, &newest, stages, query) {
                    found = some;
                }
            }
            rings.items.release(lane == 0);
            rings.items = rings.items.ahead(1);
            rings.ring = rings.ring.ahead(2 * pages);
            let put = |pair, d, word| a.put::<true>(pair, d, word);
            let keep = |pair, place, d: u32, sum, scale| {
                if item.on_chip {
                    let to = part::<ROWS>(&here, pair, split).cast::<[f32; 2]>();
                    to.store(d as usize / 2, sum);
                    if d == 0 {
                        to.store(HEAD_DIM as usize / 2, scale);
                    }
                } else {
                    a.keep(split, place, d, sum, scale);
                }
            };
            let at = (Memory::<ROWS>::SCRATCH, ALL);
            // Mostly it is the newest row alone.
            if here.pairs <= QUARTER {
                reduce_few(a, &here, &found, position, put, keep, at);
                thread::sync_named(ALL, CONSUMERS);
            } else {
                reduce(a, &here, &found, position, put, keep, at);
            }
            if item.is_last {
                finish::<ROWS>(p, a, &item, &here, position);
            }
        }
    }
}

/// Where shared memory has a split's sums for a pair of the tile.
///
/// # Safety
/// `pair` is one of the tile's; the item [stays on chip](Item::on_chip), and has the split.
#[device]
unsafe fn part<const ROWS: u32>(tile: &Tile, pair: u32, split: u32) -> Shared<f32> {
    let ring = Memory::<ROWS>::ITEM_RING;
    let number = split * tile.pairs + pair;
    let stage = number / parts_of(ring);
    let within = number - stage * parts_of(ring);
    // SAFETY: the caller's word.
    unsafe { shared::dynamic(ring.start + stage * ring.bytes + PART + within * PART_BYTES) }
}

/// Combines splits, after the last one that this CTA has of a tile and head: for those pairs of which all splits are
/// there now, a warp for each pair. All warps of the CTA have written their sums.
///
/// # Safety
/// All consumers call it, for an item that is the last of a run that the CTA has; all have synchronised since sums were
/// kept, and synchronise again before others are kept there.
#[device]
unsafe fn finish<const ROWS: u32>(
    p: &BatchedStep,
    a: &Attend,
    item: &Item,
    tile: &Tile,
    position: impl Fn(u32) -> u32,
) {
    let lane = thread::opaque(thread::lane_id());
    // The first pairs go to the upper warps: their pages of the next item arrive later, so they have more time.
    let mut pair = thread::opaque(thread::warp_id()) ^ (WARPS / 2);
    while pair < tile.pairs {
        // SAFETY: the caller's word.
        unsafe {
            let splits = position(tile.row(pair)) / SPLIT + 1;
            let place = tile.place(a, pair);
            let put = |d, word| a.put::<true>(place, d, word);
            if splits == 1 {
                // Its first split gave the result.
            } else if item.on_chip {
                let part = |s| part::<ROWS>(tile, pair, s);
                let scale = |s| part(s).cast().load(HEAD_DIM as usize / 2);
                combine_by_warp(splits, lane, |s| part(s).load16(lane as usize * 4), scale, put);
            } else if are_there(p.split_arrivals().at(place), item, splits) {
                let words = |s| a.part(place, s).load16(lane as usize * 4);
                combine_by_warp(splits, lane, words, |s| a.part_scale(place, s), put);
            }
        }
        pair += WARPS;
    }
}

/// A warp counts those of a pair's `splits` that this CTA has put into memory. Returns whether all are there now.
///
/// # Safety
/// All lanes of a warp call it, once for a pair and what its CTA, or of [`attend_batch`](super::attend_batch) the warp,
/// has of it. All of that is in memory, for this warp to see. `counter` is zero when the phase begins.
#[device]
pub unsafe fn are_there(counter: GlobalMut<u32>, item: &Item, splits: u32) -> bool {
    // A later row of the tile may have more splits.
    let own = (item.split + 1).min(splits).saturating_sub(item.first_split);
    let mut count = own;
    if own > 0 && own < splits {
        if thread::opaque(thread::lane_id()) == 0 {
            // SAFETY: the caller's word.
            unsafe {
                count += atomic::fetch_add(counter, 0, own, Ordering::AcqRel, Scope::Device);
                if count == splits {
                    // Zero for the next layer, which begins when all CTAs have synchronised.
                    counter.store(0, 0);
                }
            }
        }
        // After this, all lanes see what lane 0 saw.
        warp::sync_warp();
        count = warp::shuffle_idx(count, 0);
    }
    count == splits
}
