//! The producer that keeps the ring of chunks full.
//!
//! One warp of each CTA, [`produce`], fills the ring from the first layer to the head. It waits only for room in the
//! ring and for copies, never for another CTA or at a grid barrier. A stage has an N-tile's chunk of a matrix (or up to
//! [`CHUNKS`](WeightFormat::CHUNKS) of them, one behind another), or the keys or values of a page for one head. In each
//! layer:
//!
//! ```text
//! QKV        pages: for each share of the CTA                     output     gate-up    down       QKV of the next …
//! q i        keys 0 1 … pages − 1 │ values 0 1 … pages − 1        q i        q i        q i
//! ```
//!
//! `q i` is the order within a [wave](crate::stream::Wave): for each chunk `q` of the inputs, one stage for each of the
//! CTA's N-tiles `i`. Consumers call the chunks of one `q` a turn. Pages come before the output projection, since
//! attention comes there. The step's own keys and values are not in the pages that come; consumers add them in the
//! ring.
//!
//! # Copies under way
//! Before each fill the producer waits until the fill `n` stages back has arrived ([`Ring::wait_under_way`]), where `n`
//! is what [`under_way`] says, and until the stage is free. `n` by what has been filled of this matrix, or of this
//! layer's pages:
//!
//! | | until the ring was filled once | then |
//! |---|---|---|
//! | several rows | 2 | 4 |
//! | one row, waves of at most [`FEW`] chunks | 2 | second of [`UNDER_WAY_OF_ONE`](WeightFormat::UNDER_WAY_OF_ONE) |
//! | one row otherwise | first of these | second of these |
//!
//! For weights `n` is multiplied by the format's [`UNDER_WAY`](WeightFormat::UNDER_WAY). If that is more than 1, the
//! product is at most the ring's stages less [`NOT_UNDER_WAY`]. A short ring has no such stages: there a warp reads
//! every stage.
//!
//! # Phases of full barriers
//! A full barrier tells only two successive fills of its stage apart. So before a warp asks for the fill at place `q`
//! of the stream, the fill before it in the same stage, at place `q − stages`, must have arrived. A warp that reads
//! every stage has waited for that one itself. This is so with a short ring, and for pages. But in other GEMMs each
//! half of the consumers may read only every other N-tile. Then the bound on `n` takes the place of the wait:
//!
//! ```text
//! place   q − 12            q − 3              q
//!         arrived? ◄─ 9 ──► seen to be full    asked for         12 stages
//! ```
//!
//! - In a part a warp's next N-tile is at most three places behind its last one. (Its N-tiles are two places apart.
//!   From the last of a turn to the first of the next it is one place, two or three.) So it has seen place `q − 3` or a
//!   later one to be full. The producer filled that place only when the fill `n` places back had arrived.
//! - Within a part `n` does not fall. So all fills of the part up to that one have arrived, and `n + 3 ≤ stages` is
//!   enough. That is what [`NOT_UNDER_WAY`] keeps where [`under_way`] alone would not.
//! - At the first places of a part the place `q − stages` is in an earlier part. But all consumers have synchronised
//!   since, and by then the fills of that part, each of which some warp had to read, have all arrived.
//! - Formats that are multiplied [by pairs](super::consumer) ask for two N-tiles at once, up to five places behind the
//!   last one seen. For these, `by_pairs` asserts `n + 5 ≤ stages`.
//!
//! # Safety
//! `p` is a launch's parameter block. One thread makes and stores [`Units`], before the CTA synchronises. After that
//! one whole warp calls [`produce`], and so what [`produce`] calls. Nobody else fills the ring, and consumers take the
//! stages of the same matrices and units in the same order. Nobody writes weights during the launch. Consumers put the
//! step's own keys and values into pages when no copy reads these any more.

use core::ops::Range;

use cuda_std::tensor::TensorMap;
use cuda_std::{Global, device, shared, tensor, thread, warp};

use super::{CHUNK_BYTES, DecodeStep, Matrix, SEQUENCES, SPLIT_PAGES, TREE, UNITS, WGMMA, Walk, ring, sequences};
use crate::attention::{ALL_PAIRS, Attend, Divisor, PAIRS, QUARTER, SPLIT};
use crate::kv::{HEAD_DIM, PAGE_TOKENS};
use crate::ring::Ring;
use crate::weights::{Lossless, Plain, WeightFormat};

/// Whether a step of `count` rows is better with attention by `wgmma`: if its pairs are more than one tile and at most
/// [`ALL_PAIRS`], and each CTA would have at least one whole split.
///
/// # Safety
/// `count` is the step's rows, at least 1, which are of one sequence.
#[device]
pub unsafe fn wants_wgmma(p: &DecodeStep, count: u32) -> bool {
    // SAFETY: the caller's word: a step has rows, and a workspace.
    let (last, pairs) = unsafe { (p.work.rows.positions.load(0) + count - 1, count * p.work.group()) };
    let splits = last / SPLIT + 1;
    PAIRS < pairs && pairs <= ALL_PAIRS && DecodeStep::is_long(p.work.kv_heads, splits, thread::grid_dim_x())
}

/// A CTA's units of attention. A unit is a tile of pairs against one split of a key-value head's keys. A CTA takes
/// consecutive units. With attention by `wgmma` a unit has all pairs, and a CTA takes its units from last to first.
#[derive(Clone, Copy)]
pub struct Units {
    /// Query heads of a key-value head.
    pub group: Divisor,
    /// Rows of a tile.
    pub tile_rows: u32,
    /// Splits of the context. With several sequences it has another meaning: 1 if a CTA takes all splits of a head,
    /// else 0.
    splits: u32,
    /// Units of a split.
    tiles: u32,
    /// The first unit that is left, `(kv_head · splits + split) · tiles + tile`. In shared memory, for one sequence:
    /// how many units every CTA has at least.
    next: u32,
    /// One beyond the last unit that is left. In shared memory, for one sequence: how many CTAs have one unit more than
    /// that.
    end: u32,
    /// The last position; of a tree, the last slot.
    last: u32,
}

/// Units of a CTA that share their keys and values.
pub struct Share {
    pub kv_head: u32,
    pub split: u32,
    /// Pages of the split.
    pub pages: u32,
    /// The numbers of its tiles among all tiles of the step.
    pub tiles: Range<u32>,
    /// The first row of its sequence.
    pub first_row: u32,
    /// The number of that row's tile.
    pub first_tile: u32,
}

impl Units {
    /// The units of all CTAs in a step of `count` rows, to be stored.
    ///
    /// # Safety
    /// `count` is the step's rows, at least 1, which are of one sequence.
    #[device]
    pub unsafe fn new<const ATTENTION: u8>(p: &DecodeStep, count: u32) -> Self {
        // SAFETY: the caller's word: a step has so many rows.
        let last = unsafe { p.work.rows.positions.load(0) } + count - 1;
        let grid = thread::grid_dim_x();
        // SAFETY: a grid has CTAs. The workspace is the step's.
        let group = unsafe {
            cuda_std::assume(grid > 0);
            Divisor::new(p.work.group())
        };
        let splits = last / SPLIT + 1;
        let (mut tile_rows, mut tiles) = (group.divide(PAIRS).0, Attend::tiles(count, group.value));
        // Tiles may have any size, since pairs do not mix: they are smaller where that keeps more CTAs busy.
        while tile_rows > 1 {
            let half = tile_rows / 2;
            let more = count.div_ceil(half);
            if p.work.kv_heads * splits * more > grid {
                break;
            }
            (tile_rows, tiles) = (half, more);
        }
        // With attention by `wgmma` all tiles of a split are one unit.
        let tiles = if ATTENTION == WGMMA { 1 } else { tiles };
        let all = p.work.kv_heads * splits * tiles;
        Self { group, tile_rows, splits, tiles, next: all / grid, end: all % grid, last }
    }

    /// The units of this CTA in a step of `count` rows of several sequences. `last` is the largest position. The rows
    /// are [in place](sequences::bring).
    ///
    /// # Safety
    /// `count` is the step's rows, at least 1. The caller is a lane of the warp that [brought](sequences::bring) them.
    #[device]
    pub unsafe fn of_sequences(p: &DecodeStep, count: u32, last: u32) -> Self {
        let (block, grid) = (thread::block_idx_x(), thread::grid_dim_x());
        // SAFETY: a grid has CTAs. The workspace is the step's.
        let group = unsafe {
            cuda_std::assume(grid > 0);
            Divisor::new(p.work.group())
        };
        // SAFETY: the caller's word.
        let units = |tile_rows: u32| unsafe { sequences::units(count, p.work.kv_heads, tile_rows) };
        let mut tile_rows = group.divide(PAIRS).0;
        let mut all = units(tile_rows);
        // Tiles are halved as for one sequence, and also where that gives no more units: then no tile has more rows
        // than the half.
        while tile_rows > 1 {
            let more = units(tile_rows / 2);
            if more > grid && more > all {
                break;
            }
            (tile_rows, all) = (tile_rows / 2, more);
        }
        // SAFETY: the caller's word.
        let (heads, most) = unsafe { sequences::heads(count, p.work.kv_heads, tile_rows) };
        // CTAs take whole heads if no CTA has more units for that: then nobody waits for another CTA's splits.
        let whole = heads.div_ceil(grid) * most <= all.div_ceil(grid);
        let [next, end] = [block, block + 1].map(|block| {
            if !whole {
                return block * all / grid;
            }
            // SAFETY: the caller's word.
            unsafe { sequences::first_unit(block * heads / grid, count, p.work.kv_heads, tile_rows) }
        });
        Self { group, tile_rows, splits: whole.into(), tiles: 0, next, end, last }
    }

    /// Whether a CTA takes all splits of its heads.
    #[device]
    pub const fn are_whole(&self) -> bool {
        self.splits == 1
    }

    /// Stores the units where [`load`](Self::load) finds them.
    ///
    /// # Safety
    /// One thread does it, and the CTA synchronises behind it.
    #[device]
    pub unsafe fn store(&self) {
        // SAFETY: the CTA's place for them.
        unsafe {
            let place = shared::dynamic::<[u32; 2]>(UNITS);
            place.cast::<Divisor>().store(0, self.group);
            place.store(1, [self.tile_rows, self.splits]);
            place.store(2, [self.tiles, self.next]);
            place.store(3, [self.end, self.last]);
        }
    }

    /// The units of this CTA in a layer where its place in the rotation of the output projection's N-tiles is `place`.
    /// CTAs with fewer N-tiles get the surplus units: a unit's keys and values occupy a CTA's ring as long as an N-tile
    /// does, and all others would wait for a CTA that has more of both. With several sequences a CTA has the same units
    /// in every layer.
    ///
    /// # Safety
    /// The CTA has synchronised behind [`store`](Self::store). `place` is below the grid's CTAs.
    #[device]
    pub unsafe fn load<const ROWS: u8>(place: u32) -> Self {
        // SAFETY: the CTA's place for them, written before the roles part.
        unsafe {
            let stored = shared::dynamic::<[u32; 2]>(UNITS);
            let group = stored.cast::<Divisor>().load(0);
            let ([tile_rows, splits], [tiles, mut next], [mut end, last]) =
                (stored.load(1), stored.load(2), stored.load(3));
            if ROWS != SEQUENCES {
                let (each, more, rank) = (next, end, thread::grid_dim_x() - 1 - place);
                next = rank * each + rank.min(more);
                end = next + each + u32::from(rank < more);
            }
            Self { group, tile_rows, splits, tiles, next, end, last }
        }
    }

    /// The last position of the step, or the last slot of a tree, as it was stored.
    #[device]
    pub unsafe fn last() -> u32 {
        // SAFETY: the CTA's place for them, written before the roles part.
        unsafe { shared::dynamic::<[u32; 2]>(UNITS).load(3)[1] }
    }

    /// Whether no units are left.
    #[device]
    pub const fn is_empty(&self) -> bool {
        self.next == self.end
    }

    /// Takes the next units that share keys and values; there are `kv_heads` key-value heads. Keys leave a
    /// [short](super::short) ring before the values come, so there only tiles that are scored together share them.
    #[device]
    pub fn take<const ROWS: u8, const ATTENTION: u8, const SHORT: bool>(&mut self, kv_heads: u32) -> Option<Share> {
        let most = if are_few::<ROWS>(self.tile_rows, self.group) { 1 } else { 2 };
        let most = |left: u32| if SHORT { left.min(most) } else { left };
        if ROWS == SEQUENCES {
            let (number, most) = (self.next, most(self.end - self.next));
            if self.is_empty() {
                return None;
            }
            // SAFETY: the step has that unit, and its rows were brought before units were made.
            let share = unsafe { sequences::share(number, most, kv_heads, self.tile_rows) };
            self.next += share.tiles.end - share.tiles.start;
            return Some(share);
        }
        // A division by 1 is skipped: a step of one row would feel its time.
        let divide = |n: u32, by: u32| {
            if by == 1 {
                return (n, 0);
            }
            // SAFETY: a context has splits, and a step has rows.
            unsafe { cuda_std::assume(by > 0) };
            (n / by, n % by)
        };
        if self.is_empty() {
            return None;
        }
        let (item, tile, end);
        if ATTENTION == WGMMA {
            // Backwards: a head's last split or two are those that the step adds keys and values to, and these are made
            // together with the head's queries.
            self.end -= 1;
            (item, tile, end) = (self.end, 0, 1);
        } else {
            (item, tile) = divide(self.next, self.tiles);
            end = self.tiles.min(tile + most(self.end - self.next));
            self.next += end - tile;
        }
        let (kv_head, split) = divide(item, self.splits);
        let pages = ((self.last - split * SPLIT) / PAGE_TOKENS + 1).min(SPLIT_PAGES);
        Some(Share { kv_head, split, pages, tiles: tile..end, first_row: 0, first_tile: 0 })
    }
}

/// Whether tiles of `tile_rows` rows have few pairs. `ROWS` says [how the rows relate](super::CHAIN): a tree's tiles
/// never count as few.
#[device]
pub const fn are_few<const ROWS: u8>(tile_rows: u32, group: Divisor) -> bool {
    ROWS != TREE && tile_rows * group.value <= QUARTER
}

/// How many chunks may be under way when `filled` chunks of a matrix, or of the CTA's pages, have been asked for. The
/// CTA has `chunks` of them in the wave. For a step of one row `of_one` is [`WeightFormat::UNDER_WAY_OF_ONE`].
///
/// TMA serves all copies at once. With as many under way as the ring has stages, the last chunk before a grid barrier
/// would arrive no earlier than the chunks after it. Then the ring would already be full when the pause at the barrier
/// begins, which it is to bridge. So few chunks are under way until the ring has been filled once after a barrier, and
/// fewer where CTAs exchange more there. After that there are as many as memory is fastest with.
#[device]
const fn under_way(of_one: Option<[u32; 2]>, chunks: u32, filled: u32, stages: u32) -> u32 {
    match (of_one, filled < stages) {
        (Some(_), true) if chunks <= FEW => 2,
        (Some([first, _]), true) => first,
        (Some([_, then]), false) => then,
        (None, true) => 2,
        (None, false) => 4,
    }
}

/// A CTA's wave of so few chunks is over before memory is at full speed. Models of less than a billion parameters have
/// such waves.
const FEW: u32 = 8;

/// Stages of the ring that are never under way. With fewer of them, a consumer that looks at every third stage could
/// take one fill of a stage for the next: see [above](self#phases-of-full-barriers).
const NOT_UNDER_WAY: u32 = 3;

/// Waits for room for the next chunk.
///
/// # Safety
/// `under_way` is at least 1, and at most the ring's stages.
#[device]
unsafe fn wait(ring: &Ring, under_way: u32) {
    // SAFETY: the caller's word.
    unsafe {
        ring.wait_under_way(under_way);
        ring.wait_empty();
    }
}

/// Tokens of a piece, which is what one copy brings of a page: half of the dimensions of these tokens.
pub const PIECE_TOKENS: u32 = 16;
/// Bytes of a piece.
const PIECE_BYTES: u32 = PIECE_TOKENS * HEAD_DIM;
/// Pieces of one half of a page's dimensions.
const PIECES: u32 = PAGE_TOKENS / PIECE_TOKENS;

/// Starts the copies of a page's keys or values of a head, which begin at this `row` of a layer: each lane copies one
/// piece. Few CTAs read them again in this step, so they are the first to leave L2: what CTAs exchange stays there
/// instead.
///
/// # Safety
/// All lanes of the producer's warp call it. The stage is free, a lane has [acquired](tensor::acquire) the map `pages`,
/// and `row` is the first of a page's keys, or values, of a head, in a layer that there is.
#[device]
unsafe fn fill(ring: &Ring, pages: Global<TensorMap>, row: u32, layer: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let lane = thread::opaque(thread::lane_id());
        if lane == 0 {
            ring.full().arrive_expect_tx(CHUNK_BYTES);
        }
        warp::sync_warp();
        if lane < 2 * PIECES {
            let at = [0, row + lane % PIECES * PIECE_TOKENS, lane / PIECES, layer];
            tensor::load_box_once(ring.stage_buffer().at((lane * PIECE_BYTES) as usize), pages, at, ring.full());
        }
    }
}

/// The producer: one warp walks every wave, and before each output projection the CTA's units of attention.
///
/// # Safety
/// All lanes of one warp call it, once, when the CTA has synchronised. `one_row` says whether the step has one row, and
/// consumers run it as `ONE`.
#[device]
pub unsafe fn produce<
    F: WeightFormat,
    const ROWS: u8,
    const PACKED_HEAD: bool,
    const ATTENTION: u8,
    const SHORT: bool,
>(
    p: &DecodeStep,
    one_row: bool,
) {
    let of_one = if one_row { Some(F::UNDER_WAY_OF_ONE) } else { None };
    // SAFETY: the caller's word.
    unsafe {
        if thread::lane_id() == 0 {
            tensor::acquire(p.page_map);
        }
        let mut walk = Walk::new(thread::grid_dim_x());
        let mut ring = Ring::producer(ring::<F>(SHORT));
        let mut index = 0;
        while index < p.matrices() {
            let matrix = p.matrix(index);
            if matrix == Matrix::Output {
                let units = Units::load::<ROWS>(walk.place(thread::block_idx_x()));
                produce_cache::<ROWS, ATTENTION, SHORT>(p, &mut ring, index / 4, units, of_one);
            }
            if (F::PLAIN_HEAD || PACKED_HEAD) && matrix == Matrix::Head {
                walk.chunks = p.head_base;
                if p.packs_head::<F, ROWS, PACKED_HEAD, SHORT>(one_row) {
                    if !one_row {
                        // Nothing is packed but the head. (For one row the host says so: a constant here would move
                        // the consumers' code, and their epilogues would take longer.)
                        walk.chunks = 0;
                    }
                    ring = produce_matrix::<Lossless, SHORT>(p, ring, &mut walk, matrix, of_one);
                } else {
                    ring = produce_matrix::<Plain, SHORT>(p, ring, &mut walk, matrix, of_one);
                }
            } else {
                ring = produce_matrix::<F, SHORT>(p, ring, &mut walk, matrix, of_one);
            }
            index += 1;
        }
    }
}

/// Fills the ring with the CTA's part of a matrix.
///
/// # Safety
/// `walk` has come to the matrix, and the ring is as the matrix before it left it.
#[device]
unsafe fn produce_matrix<F: WeightFormat, const SHORT: bool>(
    p: &DecodeStep,
    mut ring: Ring,
    walk: &mut Walk,
    matrix: Matrix,
    of_one: Option<[u32; 2]>,
) -> Ring {
    // SAFETY: the caller's word.
    unsafe {
        let (block, grid) = (thread::block_idx_x(), thread::grid_dim_x());
        let (mut left, k) = p.shape(matrix);
        let mut filled = 0;
        while left > 0 {
            let wave = walk.wave(left, k.div_ceil(F::INPUTS));
            left -= wave.n_tiles;
            let place = wave.place(block, grid);
            let mine = wave.mine(place, grid);
            let chunks = mine * wave.depth;
            let mut q = 0;
            while q < wave.depth {
                let mut i = 0;
                while i < mine {
                    let most = under_way(of_one, chunks, filled, ring.stages()) * F::UNDER_WAY;
                    let limit = if SHORT { ring.stages() } else { ring.stages() - NOT_UNDER_WAY };
                    wait(&ring, if F::UNDER_WAY > 1 { most.min(limit) } else { most });
                    F::fill(p, &ring, &wave, i * grid + place, q);
                    ring = ring.ahead(1);
                    filled += 1;
                    i += 1;
                }
                q += F::CHUNKS;
            }
        }
        ring
    }
}

/// Fills the ring with the CTA's shares: for each, the keys of the split's pages, then their values. What this step
/// adds is not in the cache yet: consumers put it into the ring.
///
/// # Safety
/// `units` are the CTA's, none of which was taken; `layer` is below the number of layers.
#[device]
unsafe fn produce_cache<const ROWS: u8, const ATTENTION: u8, const SHORT: bool>(
    p: &DecodeStep,
    ring: &mut Ring,
    layer: u32,
    mut units: Units,
    of_one: Option<[u32; 2]>,
) {
    // SAFETY: the caller's word.
    unsafe {
        let cache = p.cache(layer);
        let sequence_of = |row: u32| p.work.rows.sequences.load(row as usize);
        let of_all = sequence_of(0);
        let mut filled = 0;
        while let Some(share) = units.take::<ROWS, ATTENTION, SHORT>(p.work.kv_heads) {
            let Share { kv_head, split, pages, first_row, .. } = share;
            let sequence = if ROWS == SEQUENCES { sequence_of(first_row) } else { of_all };
            let mut i = 0;
            while i < 2 * pages {
                let position = split * SPLIT + i % pages * PAGE_TOKENS;
                let block = cache.block_index(sequence, position / PAGE_TOKENS, kv_head);
                let row = (2 * block + u32::from(i >= pages)) * PAGE_TOKENS;
                wait(ring, under_way(of_one, u32::MAX, filled, ring.stages()));
                fill(ring, p.page_map, row, layer);
                *ring = ring.ahead(1);
                filled += 1;
                i += 1;
            }
        }
    }
}
