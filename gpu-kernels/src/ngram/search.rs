//! The search: for each sequence the best window end, as a key.
//!
//! # Safety
//! An operator, or `s`, is of a launch's parameter block, whose arrays are as it says; sequence `b` and key `k` are
//! among its. While texts are searched nobody writes them. The keys are the launch's own, in shared memory or in the
//! workspace, and who lowers one or reads it has waited until it was made ready.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::Shared;
use cuda_std::{Global, GlobalMut, async_copy, device, shared, thread, warp};

use super::{Operator, Sequences, THREADS, Token, WARPS, early, shared_layout};

/// 16-byte loads that a lane has in flight.
const IN_FLIGHT: u32 = 4;
/// 16-byte units that a warp takes at a time.
const TILE: u32 = 32 * IN_FLIGHT;
/// Bytes of such a tile.
pub(super) const TILE_BYTES: u32 = TILE * 16;

/// No window end has this number.
const NO_END: u32 = u32::MAX;
/// The key of a sequence in which nothing was found.
pub const NOTHING: u64 = u64::MAX;

/// The key of a window end: see the picture in the module above.
#[device]
pub fn key(missing: u32, place: u32) -> u64 {
    (missing as u64) << 32 | place as u64
}

/// The best key of each sequence so far: in device memory, or in shared memory when there is one CTA.
#[derive(Clone, Copy)]
pub struct Keys {
    global: GlobalMut<u64>,
    shared: Shared<u64>,
    /// The launch is one CTA, and the batch has room in its shared memory.
    pub(super) alone: bool,
}

impl Keys {
    /// The keys of this launch. All threads of the CTA must call it.
    ///
    /// # Safety
    /// All threads of the CTA call it, [`THREADS`] of them, with the operators' shared memory.
    #[device]
    pub(super) unsafe fn new<T: Token>(s: &Sequences<T>) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let alone = thread::grid_dim_x() * thread::grid_dim_y() == 1 && s.batch <= THREADS;
            let keys = Self { global: s.keys(), shared: shared::dynamic(shared_layout::KEYS), alone };
            if alone {
                keys.shared.store(thread::thread_idx_x() as usize, NOTHING);
                thread::sync_threads();
            }
            keys
        }
    }

    /// The key of a CTA that has a sequence to itself: number 0, in the first word of shared memory. All threads that
    /// search must call it; they synchronise in `sync`.
    ///
    /// # Safety
    /// All threads that search call it, thread 0 among them. The first 8 bytes of dynamic shared memory are theirs.
    #[device]
    pub(super) unsafe fn of_block<T: Token>(s: &Sequences<T>, sync: impl Fn()) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let keys = Self { global: s.keys(), shared: shared::dynamic(0), alone: true };
            if thread::thread_idx_x() == 0 {
                keys.shared.store(0, NOTHING);
            }
            sync();
            keys
        }
    }

    /// The keys in device memory that another launch left.
    ///
    /// # Safety
    /// The workspace is live, and a CTA has its shared memory.
    #[device]
    pub unsafe fn left_behind<T: Token>(s: &Sequences<T>) -> Self {
        // SAFETY: the caller's word.
        unsafe { Self { global: s.keys(), shared: shared::dynamic(shared_layout::KEYS), alone: false } }
    }

    /// # Safety
    /// There is such a key.
    #[device]
    pub(super) unsafe fn load(&self, b: usize) -> u64 {
        // SAFETY: the caller's word.
        unsafe {
            if self.alone {
                atomic::load(self.shared, b, Ordering::Relaxed, Scope::Block)
            } else {
                atomic::load(self.global, b, Ordering::Relaxed, Scope::Device)
            }
        }
    }

    /// Makes key `b` ready for the next launch.
    ///
    /// # Safety
    /// There is such a key. One lane calls it, when nobody reads or lowers the key any more.
    #[device]
    pub(super) unsafe fn put_back(&self, b: usize) {
        if !self.alone {
            // SAFETY: the caller's word.
            unsafe { self.global.store(b, NOTHING) }
        }
    }

    /// Lowers key `b` to `key`. `seen` is a value that it had at some time.
    ///
    /// # Safety
    /// There is such a key.
    #[device]
    unsafe fn lower(&self, b: usize, key: u64, mut seen: u64) {
        while key < seen {
            // SAFETY: the caller's word.
            let old = unsafe {
                if self.alone {
                    atomic::compare_exchange(self.shared, b, seen, key, Ordering::Relaxed, Scope::Block)
                } else {
                    atomic::compare_exchange(self.global, b, seen, key, Ordering::Relaxed, Scope::Device)
                }
            };
            if old == seen {
                return;
            }
            seen = old;
        }
    }
}

/// The texts of one sequence and the pattern's end.
#[derive(Clone, Copy)]
pub struct Texts<T> {
    /// The prompt.
    pub prompt: Global<T>,
    /// The generated tokens.
    pub generated: Global<T>,
    /// Window ends in the prompt: every token but the last, which nothing follows.
    pub prompt_ends: u32,
    /// Window ends in the generated tokens. The newest counts as not yet part of the text.
    pub generated_ends: u32,
    /// Index of the newest token in `generated`: the pattern's last.
    pub newest: u32,
    /// Most tokens of a pattern.
    pub longest: u32,
}

/// The texts of sequence `b`; empty ones where no pattern exists. Arrays are loaded here and now if `NOW`.
///
/// # Safety
/// There is such a sequence, and the arrays are live.
#[device]
pub unsafe fn texts<const NOW: bool, T: Token, O: Operator<T>>(operator: &O, b: usize) -> Texts<T> {
    // SAFETY: the caller's word.
    unsafe {
        let s = operator.sequences();
        let step = early::<NOW, _>(s.step_idx, b);
        let prompt = early::<NOW, _>(s.input_ids_len, b).max(0).min(s.input_ids_stride as i64) as u32;
        let exists = step >= 0 && step < s.pre_ids_stride as i64;
        let newest = if exists { step as u32 } else { 0 };
        // A pattern of n tokens needs n <= step_idx.
        let longest = s.max_ngram_size.min(newest);
        let searched = longest >= operator.shortest();
        Texts {
            prompt: s.input_ids.at(b * s.input_ids_stride as usize),
            generated: s.pre_ids.at(b * s.pre_ids_stride as usize),
            prompt_ends: if searched { prompt.saturating_sub(1) } else { 0 },
            generated_ends: if searched { newest.saturating_sub(1) } else { 0 },
            newest,
            longest,
        }
    }
}

impl<T> Texts<T> {
    /// How many window ends there are.
    #[device]
    pub(super) fn ends(&self) -> u32 {
        self.prompt_ends + self.generated_ends
    }
}

/// How the window ends `0..ends` of a text lie in memory: a few before the first multiple of 16 bytes, whole units of
/// 16 bytes, and a few more.
#[derive(Clone, Copy)]
struct Span<T> {
    /// The first unit.
    first: Global<T>,
    /// Ends before it: at most 3.
    head: u32,
    units: u32,
    ends: u32,
}

impl<T: Token> Span<T> {
    #[device]
    fn new(text: Global<T>, ends: u32) -> Self {
        let to_boundary = (text.addr().wrapping_neg() % 16) as u32 / size_of::<T>() as u32;
        let head = to_boundary.min(ends);
        // SAFETY: within the text, or its end.
        let first = unsafe { text.at(head as usize) };
        Self { first, head, units: (ends - head) / T::IN_UNIT, ends }
    }

    /// Where the token of end `end` is.
    #[device]
    fn at(&self, end: u32) -> Global<T> {
        let from_first = (end as i64 - self.head as i64) * size_of::<T>() as i64;
        // SAFETY: a token of the text.
        unsafe { Global::from_raw(self.first.addr().wrapping_add_signed(from_first)) }
    }

    /// A tile: `TILE` units from unit `first` on, of which a lane reads every 32nd. Unit `first` exists; instead of
    /// units beyond the last one, the last is read again.
    ///
    /// # Safety
    /// Unit `first` exists, and the text's tokens are in memory.
    #[device]
    unsafe fn tile(&self, first: u32) -> [[u32; 4]; IN_FLIGHT as usize] {
        let mut tile = [[0u32; 4]; IN_FLIGHT as usize];
        unroll!(j < IN_FLIGHT; {
            let unit = (first + 32 * j as u32 + thread::lane_id()).min(self.units - 1);
            // SAFETY: the caller's word.
            tile[j] = unsafe { self.first.at((unit * T::IN_UNIT) as usize).load16(0) };
        });
        tile
    }

    /// Window ends outside of whole units have 8 slots: 4 for those before the units, 4 for those behind. Returns the
    /// end that `slot` has, or [`NO_END`].
    #[device]
    fn outside(&self, slot: u32) -> u32 {
        let behind = self.head + self.units * T::IN_UNIT;
        let (end, limit) = if slot < 4 { (slot, self.head) } else { (behind + slot - 4, self.ends) };
        if end < limit { end } else { NO_END }
    }
}

/// One of two spans, chosen field by field: otherwise the compiler would choose between addresses in local memory.
#[device]
fn either<T: Token>(first: bool, a: Span<T>, b: Span<T>) -> Span<T> {
    let at = |span: Span<T>| span.first.addr();
    Span {
        // SAFETY: the address of one of them.
        first: unsafe { Global::from_raw(if first { at(a) } else { at(b) }) },
        head: if first { a.head } else { b.head },
        units: if first { a.units } else { b.units },
        ends: if first { a.ends } else { b.ends },
    }
}

/// The smallest `v` over the warp, known to every lane.
///
/// # Safety
/// All lanes of the warp call it.
#[device]
unsafe fn warp_min(mut v: u64) -> u64 {
    let mut mask = 16;
    while mask > 0 {
        v = v.min(warp::shuffle_xor(v, mask));
        mask /= 2;
    }
    v
}

/// The pattern of a sequence.
#[derive(Clone, Copy)]
struct Pattern<T> {
    /// The pattern's last token.
    last: Global<T>,
    longest: u32,
    shortest: u32,
}

impl<T: Token> Pattern<T> {
    /// The key of a window end, token `end` of its text, which lies at `at` and equals the pattern's last token.
    /// [`NOTHING`] if fewer tokens agree than the shortest pattern has.
    ///
    /// # Safety
    /// `end` is one of the text's, with its token at `at`; all tokens before it and before the pattern's last are in
    /// memory, the longest pattern's at least.
    #[device]
    unsafe fn agreement(&self, at: Global<T>, end: u32, place: u32) -> u64 {
        let reach = self.longest.min(end + 1);
        let before = |token: Global<T>, n: u32| {
            let address = token.addr() - n as u64 * size_of::<T>() as u64;
            // SAFETY: the caller's word.
            unsafe { Global::<T>::from_raw(address).load(0) }
        };
        let mut agreed = 1;
        while agreed < reach && before(at, agreed) == before(self.last, agreed) {
            agreed += 1;
        }
        if agreed >= self.shortest { key(self.longest - agreed, place) } else { NOTHING }
    }
}

/// A lane's part of a tile.
pub(super) type Units = [[u32; 4]; IN_FLIGHT as usize];

/// A tile that is on its way before anything is known of its sequence.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    tile: Units,
    in_prompt: bool,
    /// The tile's first unit; without a tile, one that does not exist.
    first: u32,
}

impl Ahead {
    /// Loads what is tile `tile` of sequence `b` if both of its texts fill their rows. If the texts are shorter, the
    /// loaded tile is still a tile of the same text, or lies beyond its end.
    ///
    /// # Safety
    /// There is such a sequence.
    #[device]
    pub(super) unsafe fn load<T: Token>(s: &Sequences<T>, b: usize, tile: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let text = |ids: Global<T>, stride: u32| Span::new(ids.at(b * stride as usize), stride);
            let (prompt, generated) = (text(s.input_ids, s.input_ids_stride), text(s.pre_ids, s.pre_ids_stride));
            let prompt_tiles = prompt.units.div_ceil(TILE);
            let in_prompt = tile < prompt_tiles;
            let span = either(in_prompt, prompt, generated);
            let tile = tile - if in_prompt { 0 } else { prompt_tiles };
            let first = tile * TILE;
            if first >= span.units {
                return Self { tile: [[0; 4]; IN_FLIGHT as usize], in_prompt, first: u32::MAX };
            }
            Self { tile: span.tile(first), in_prompt, first }
        }
    }

    /// The tile, if it is the one that begins with unit `first` of that text.
    #[device]
    pub(super) fn get(&self, first: u32, in_prompt: bool) -> Option<Units> {
        (self.first == first && self.in_prompt == in_prompt).then_some(self.tile)
    }
}

/// Whole tiles of a sequence's generated tokens, on their way to shared memory. Each is for the lanes that have asked
/// for it.
#[derive(Clone, Copy)]
pub(super) struct AheadShared {
    place: Shared<u32>,
    /// Units from here on are not there.
    end: u32,
    parts: u32,
}

impl AheadShared {
    /// Most tiles of a warp.
    const MOST: u32 = 4;
    /// Bytes of shared memory for `warps` warps.
    pub(super) const fn bytes(warps: u32) -> u32 {
        warps * Self::MOST * TILE_BYTES
    }

    /// Starts copying those of the tiles `part`, `part + parts` and so on of sequence 0 that lie before token `end`, to
    /// shared memory from `offset` on.
    ///
    /// # Safety
    /// A whole warp calls it, `part` is below `parts`, and no other warp has the same. There is shared memory for
    /// [`bytes`](Self::bytes) of so many parts from `offset` on, a multiple of 16, which is the warps' own. Nobody
    /// writes the tokens before `end` any more.
    #[device]
    pub(super) unsafe fn load<T: Token>(s: &Sequences<T>, part: u32, parts: u32, end: u32, offset: u32) -> Self {
        // SAFETY: the caller's word.
        unsafe {
            let span = Span::new(s.pre_ids, end.min(s.pre_ids_stride));
            let place = shared::dynamic::<u32>(offset + part * Self::MOST * TILE_BYTES);
            let end = span.units.min(parts * Self::MOST * TILE) / TILE * TILE;
            let mut first = part * TILE;
            let mut to = thread::lane_id() * 16;
            while first < end {
                unroll!(j < IN_FLIGHT; {
                    let unit = first + 32 * j as u32 + thread::lane_id();
                    let from = span.first.at((unit * T::IN_UNIT) as usize);
                    async_copy::copy16(place.cast().at((to + 512 * j as u32) as usize), from.cast());
                });
                to += TILE_BYTES;
                first += parts * TILE;
            }
            async_copy::commit();
            Self { place, end, parts }
        }
    }

    /// The tile that begins with unit `first` of the generated tokens, if it was copied. It is one of this warp's
    /// tiles, and the copies have been waited for.
    ///
    /// # Safety
    /// Each lane calls it that has called [`load`](Self::load), and has waited for its copies. If the unit is there, it
    /// begins a tile of the warp's part.
    #[device]
    pub(super) unsafe fn get(&self, first: u32, in_prompt: bool) -> Option<Units> {
        if in_prompt || first >= self.end {
            return None;
        }
        let mut units = [[0; 4]; IN_FLIGHT as usize];
        unroll!(j < IN_FLIGHT; {
            let at = first / (self.parts * TILE) * (TILE * 4) + 128 * j as u32 + thread::lane_id() * 4;
            // SAFETY: the caller's word.
            units[j] = unsafe { self.place.load16(at as usize) };
        });
        Some(units)
    }
}

/// Searches one warp's part of one sequence, whose key is number `k`. Of 2^`log_parts` parts, part `part` has every
/// 2^`log_parts`-th tile from tile `part` on. The prompt's tiles come first, then those of the generated tokens. The
/// last part also has the ends outside of whole units.
///
/// # Safety
/// A whole warp calls it, with the same arguments in all lanes. `t` are the texts of the sequence whose key is number
/// `k`, with at least one window end; `part` is below 2^`log_parts`. What `ahead` gives is the tile that it is asked
/// for.
#[device]
pub(super) unsafe fn search_part<T: Token, O: Operator<T>>(
    operator: &O,
    keys: &Keys,
    k: usize,
    t: &Texts<T>,
    part: u32,
    log_parts: u32,
    ahead: impl Fn(u32, bool) -> Option<Units>,
) {
    // SAFETY: the caller's word.
    unsafe {
        let lane = thread::lane_id();
        let pattern =
            Pattern { last: t.generated.at(t.newest as usize), longest: t.longest, shortest: operator.shortest() };
        let prompt = Span::new(t.prompt, t.prompt_ends);
        let generated = Span::new(t.generated, t.generated_ends);
        let prompt_tiles = prompt.units.div_ceil(TILE);
        let tiles = prompt_tiles + generated.units.div_ceil(TILE);
        let outside = part + 1 == 1 << log_parts;
        if part >= tiles && !outside {
            return;
        }
        let newest = pattern.last.load(0);

        // Lanes 0 to 7 have the prompt's ends outside of units, the next 8 those of the generated tokens.
        let of_prompt = lane < 8;
        let span = either(of_prompt, prompt, generated);
        let end_outside = if outside && lane < 16 { span.outside(lane % 8) } else { NO_END };
        let mut token_outside = newest;
        if end_outside != NO_END {
            token_outside = span.at(end_outside).load(0);
        }

        let mut best = NOTHING;
        // The number of the tile, counted from the text's first.
        let mut tile = part;
        let mut in_prompt = true;
        'texts: loop {
            // Recomputed, so that a span is made where it is used and takes no registers elsewhere.
            let ends = thread::opaque(if in_prompt { t.prompt_ends } else { t.generated_ends });
            let span = Span::new(if in_prompt { t.prompt } else { t.generated }, ends);
            let place = if in_prompt { 0 } else { t.prompt_ends };
            while tile * TILE < span.units {
                let first = tile * TILE;
                let units = match ahead(first, in_prompt) {
                    Some(units) => units,
                    None => span.tile(first),
                };
                if lane == 0 {
                    best = keys.load(k);
                }
                let mut candidates = 0u32;
                unroll!(j < IN_FLIGHT; {
                    candidates |= newest.equal(units[j]) << (j as u32 * T::IN_UNIT);
                });
                // How many of this lane's units exist.
                let mine = (span.units + 31).saturating_sub(first + lane) / 32;
                if mine < IN_FLIGHT {
                    candidates &= (1 << (mine * T::IN_UNIT)) - 1;
                }
                // All lanes take lane 0's best, so that the warp leaves the loop as one.
                best = warp::shuffle_idx(best, 0);
                // No end from here on can have a smaller key.
                if best <= key(0, place + span.head + first * T::IN_UNIT) {
                    break 'texts;
                }
                let mut own = NOTHING;
                while candidates != 0 {
                    let bit = candidates.trailing_zeros();
                    candidates &= candidates - 1;
                    let unit = first + 32 * (bit / T::IN_UNIT) + lane;
                    let end = span.head + unit * T::IN_UNIT + bit % T::IN_UNIT;
                    own = own.min(pattern.agreement(span.at(end), end, place + end));
                }
                if warp::any(own < best) {
                    let smallest = warp_min(own);
                    if lane == 0 {
                        keys.lower(k, smallest, best);
                    }
                    best = best.min(smallest);
                }
                tile += 1 << log_parts;
            }
            if !in_prompt {
                break;
            }
            tile -= span.units.div_ceil(TILE);
            in_prompt = false;
        }

        if outside {
            let mut own = NOTHING;
            if token_outside == newest {
                // The span is recomputed, as above. Lanes without an end come here, too: they hold the newest token.
                let lane = thread::opaque(lane);
                let of_prompt = lane < 8;
                let ends = thread::opaque(if of_prompt { t.prompt_ends } else { t.generated_ends });
                let span = Span::new(if of_prompt { t.prompt } else { t.generated }, ends);
                let end = if lane < 16 { span.outside(lane % 8) } else { NO_END };
                if end != NO_END {
                    let place = if of_prompt { 0 } else { t.prompt_ends };
                    own = pattern.agreement(span.at(end), end, place + end);
                }
            }
            if warp::any(own != NOTHING) {
                let smallest = warp_min(own);
                if lane == 0 {
                    keys.lower(k, smallest, keys.load(k));
                }
            }
        }
    }
}

/// The smallest `n` with `v <= 2ⁿ`, for `v` of at least 1.
#[device]
fn ceil_log2(v: u32) -> u32 {
    32 - v.saturating_sub(1).leading_zeros()
}

/// This CTA's part of the search: parts of sequences go to the CTAs in turn, and in a CTA to its warps, so that few
/// parts are spread over many SMs.
///
/// # Safety
/// The whole grid calls it, CTAs of [`THREADS`]. `keys` is what [`Keys::new`] has made in the CTA.
#[device]
pub(super) unsafe fn search<T: Token, O: Operator<T>>(operator: &O, keys: &Keys) {
    let s = operator.sequences();
    let batch = s.batch.max(1);
    let blocks = thread::grid_dim_x() * thread::grid_dim_y();
    let block = thread::block_idx_y() * thread::grid_dim_x() + thread::block_idx_x();
    // Parts of a sequence: a power of two, because a division takes longer than all the rest here. No more parts than a
    // row has tiles: warps without a tile would only be in the way.
    let tiles = (s.input_ids_stride / T::IN_UNIT).saturating_add(s.pre_ids_stride / T::IN_UNIT) / TILE + 1;
    let for_all = (31 - (blocks * WARPS).max(1).leading_zeros()).saturating_sub(ceil_log2(batch));
    let log_parts = for_all.min(ceil_log2(tiles));
    let mut item = thread::warp_id() * blocks + block;
    // Not multiplied, which could overflow for batches that no device has memory for.
    while item >> log_parts < batch {
        let (b, part) = ((item >> log_parts) as usize, item & ((1 << log_parts) - 1));
        // SAFETY: the caller's word.
        unsafe {
            // All loads of what is known of a sequence are issued before any of it is used.
            let claim = operator.claim::<true>(b);
            let t = texts::<true, _, _>(operator, b);
            if claim.want > 0 && t.ends() > 0 {
                search_part(operator, keys, b, &t, part, log_parts, |_, _| None);
            }
        }
        item += blocks * WARPS;
    }
}
