//! The search: for each sequence the best window end, as a key.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::shared::Shared;
use cuda_std::{Global, GlobalMut, shared, thread, warp};

use super::{Operator, Sequences, THREADS, Token, WARPS, early, shared_layout};

/// 16-byte loads that a lane has in flight.
const IN_FLIGHT: u32 = 4;
/// 16-byte units that a warp takes at a time.
const TILE: u32 = 32 * IN_FLIGHT;
/// The same in bytes.
pub(super) const TILE_BYTES: u32 = TILE * 16;

/// No window end has this number.
const NO_END: u32 = u32::MAX;
/// The key of a sequence in which nothing was found.
pub(super) const NOTHING: u64 = u64::MAX;

/// See the module's picture.
#[inline(always)]
pub(super) fn key(missing: u32, place: u32) -> u64 {
    (missing as u64) << 32 | place as u64
}

/// The best key of each sequence so far: in device memory, or in shared memory when there is one block.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    global: GlobalMut<u64>,
    shared: Shared<u64>,
    /// The launch is one block, and the batch has room in its shared memory.
    pub(super) alone: bool,
}

impl Keys {
    /// For this launch. All threads of the block must call it.
    #[inline(always)]
    pub(super) unsafe fn new<T: Token>(s: &Sequences<T>) -> Self {
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

    /// Those in device memory, which another launch left.
    #[inline(always)]
    pub(super) unsafe fn left_behind<T: Token>(s: &Sequences<T>) -> Self {
        unsafe { Self { global: s.keys(), shared: shared::dynamic(shared_layout::KEYS), alone: false } }
    }

    #[inline(always)]
    pub(super) unsafe fn load(&self, b: usize) -> u64 {
        unsafe {
            if self.alone {
                atomic::load(self.shared, b, Ordering::Relaxed, Scope::Block)
            } else {
                atomic::load(self.global, b, Ordering::Relaxed, Scope::Device)
            }
        }
    }

    /// Makes key `b` ready for the next launch.
    #[inline(always)]
    pub(super) unsafe fn put_back(&self, b: usize) {
        if !self.alone {
            unsafe { self.global.store(b, NOTHING) }
        }
    }

    /// Lowers key `b` to `key`. `seen` is a value that it had at some time.
    #[inline(always)]
    unsafe fn lower(&self, b: usize, key: u64, mut seen: u64) {
        while key < seen {
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
pub(super) struct Texts<T> {
    pub(super) prompt: Global<T>,
    pub(super) generated: Global<T>,
    /// Window ends in the prompt: every token but the last, which nothing follows.
    pub(super) prompt_ends: u32,
    /// Window ends in the generated tokens. The newest counts as not yet part of the text.
    pub(super) generated_ends: u32,
    /// Index of the newest token in `generated`: the pattern's last.
    pub(super) newest: u32,
    /// Most tokens of a pattern.
    pub(super) longest: u32,
}

/// The texts of sequence `b`; empty ones where no pattern exists.
#[inline(always)]
pub(super) unsafe fn texts<T: Token, O: Operator<T>>(operator: &O, b: usize) -> Texts<T> {
    unsafe {
        let s = operator.sequences();
        let step = early(s.step_idx, b);
        let prompt = early(s.input_ids_len, b).max(0).min(s.input_ids_stride as i64) as u32;
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

/// How the window ends `0..ends` of a text lie in memory: a few before the first multiple of 16 bytes, whole units of
/// 16 bytes, and a few more.
#[derive(Clone, Copy)]
struct Span {
    /// Ends before the first unit: at most 3.
    head: u32,
    units: u32,
    ends: u32,
}

impl Span {
    #[inline(always)]
    fn new<T: Token>(text: Global<T>, ends: u32) -> Self {
        let to_boundary = (text.addr().wrapping_neg() % 16) as u32 / size_of::<T>() as u32;
        let head = to_boundary.min(ends);
        Self { head, units: (ends - head) / T::IN_UNIT, ends }
    }

    /// The end that slot `slot` of 8 has among those outside of units, 4 slots before and 4 behind, or [`NO_END`].
    #[inline(always)]
    fn outside<T: Token>(&self, slot: u32) -> u32 {
        let behind = self.head + self.units * T::IN_UNIT;
        let (end, limit) = if slot < 4 { (slot, self.head) } else { (behind + slot - 4, self.ends) };
        if end < limit { end } else { NO_END }
    }
}

/// The smallest of a value over the warp, known to every lane.
#[inline(always)]
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
    /// Its last token.
    last: Global<T>,
    longest: u32,
    shortest: u32,
}

impl<T: Token> Pattern<T> {
    /// The key of a window end whose token, at `at`, is the pattern's last and the token `end` of its text, or [`NOTHING`]
    /// if too little agrees.
    #[inline(always)]
    unsafe fn agreement(&self, at: Global<T>, end: u32, place: u32) -> u64 {
        let reach = self.longest.min(end + 1);
        let before = |token: Global<T>, n: u32| {
            let address = token.addr() - n as u64 * size_of::<T>() as u64;
            unsafe { Global::<T>::from_raw(address).load(0) }
        };
        let mut agreed = 1;
        while agreed < reach && before(at, agreed) == before(self.last, agreed) {
            agreed += 1;
        }
        if agreed >= self.shortest { key(self.longest - agreed, place) } else { NOTHING }
    }
}

/// One warp's part of one sequence: of 2^`log_parts` parts, every so many tiles from tile `part` on. Prompt and generated tokens are one row
/// of units; the ends outside of units are the last part's.
#[inline(always)]
unsafe fn search_part<T: Token, O: Operator<T>>(operator: &O, keys: &Keys, b: usize, part: u32, log_parts: u32) {
    unsafe {
        // All that is known of a sequence is on its way before any of it is used.
        let claim = operator.claim(b);
        let t = texts(operator, b);
        if claim.want <= 0 || t.prompt_ends + t.generated_ends == 0 {
            return;
        }
        let lane = thread::lane_id();
        let pattern =
            Pattern { last: t.generated.at(t.newest as usize), longest: t.longest, shortest: operator.shortest() };
        let prompt = Span::new(t.prompt, t.prompt_ends);
        let generated = Span::new(t.generated, t.generated_ends);
        let units = prompt.units + generated.units;
        let mut first = part * TILE;
        let outside = part + 1 == 1 << log_parts;
        if first >= units && !outside {
            return;
        }
        let newest = pattern.last.load(0);

        let in_prompt_units = t.prompt.at(prompt.head as usize).addr();
        // Where unit 0 would be if the generated tokens' units were numbered on from the prompt's.
        let in_generated_units = t.generated.at(generated.head as usize).addr().wrapping_sub(prompt.units as u64 * 16);

        // Lanes 0 to 7 have the prompt's ends outside of units, the next 8 those of the generated tokens.
        let of_prompt = lane < 8;
        let (span, text) = if of_prompt { (prompt, t.prompt) } else { (generated, t.generated) };
        let end_outside = if outside && lane < 16 { span.outside::<T>(lane % 8) } else { NO_END };
        let at_outside = text.at(end_outside as usize);
        let mut token_outside = newest;
        if end_outside != NO_END {
            token_outside = at_outside.load(0);
        }

        let mut best = NOTHING;
        while first < units {
            let mut tile = [[0u32; 4]; IN_FLIGHT as usize];
            unroll!(j < IN_FLIGHT; {
                // Beyond the last unit there is nothing to read: it is read again, and not counted.
                let unit = (first + 32 * j as u32 + lane).min(units - 1);
                let base = if unit < prompt.units { in_prompt_units } else { in_generated_units };
                tile[j] = Global::<u32>::from_raw(base.wrapping_add(unit as u64 * 16)).load16(0);
            });
            if lane == 0 {
                best = keys.load(b);
            }
            let mut candidates = 0u32;
            unroll!(j < IN_FLIGHT; {
                candidates |= newest.equal(tile[j]) << (j as u32 * T::IN_UNIT);
            });
            // How many of this lane's units exist.
            let mine = (units + 31).saturating_sub(first + lane) / 32;
            if mine < IN_FLIGHT {
                candidates &= (1 << (mine * T::IN_UNIT)) - 1;
            }
            // Lanes take lane 0's word for the best, so that the warp leaves the loop as one.
            best = warp::shuffle_idx(best, 0);
            // A place does not count the ends outside of units: those before it make it larger still.
            if best <= key(0, first * T::IN_UNIT) {
                break;
            }
            let mut own = NOTHING;
            while candidates != 0 {
                let bit = candidates.trailing_zeros();
                candidates &= candidates - 1;
                let unit = first + 32 * (bit / T::IN_UNIT) + lane;
                let in_prompt = unit < prompt.units;
                let base = if in_prompt { in_prompt_units } else { in_generated_units };
                let at = Global::<T>::from_raw(base.wrapping_add(unit as u64 * 16)).at((bit % T::IN_UNIT) as usize);
                let (before, place) = if in_prompt { (prompt.head, 0) } else { (generated.head, t.prompt_ends) };
                let unit = if in_prompt { unit } else { unit - prompt.units };
                let end = before + unit * T::IN_UNIT + bit % T::IN_UNIT;
                own = own.min(pattern.agreement(at, end, place + end));
            }
            if warp::any(own < best) {
                let smallest = warp_min(own);
                if lane == 0 {
                    keys.lower(b, smallest, best);
                }
                best = best.min(smallest);
            }
            first += TILE << log_parts;
        }

        if outside {
            let mut own = NOTHING;
            if end_outside != NO_END && token_outside == newest {
                let place = if of_prompt { 0 } else { t.prompt_ends };
                own = pattern.agreement(at_outside, end_outside, place + end_outside);
            }
            if warp::any(own != NOTHING) {
                let smallest = warp_min(own);
                if lane == 0 {
                    keys.lower(b, smallest, keys.load(b));
                }
            }
        }
    }
}

/// The smallest `n` with `v <= 2ⁿ`, for `v` of at least 1.
#[inline(always)]
fn ceil_log2(v: u32) -> u32 {
    32 - v.saturating_sub(1).leading_zeros()
}

/// This block's part of the search: parts of sequences go to the blocks in turn, and in a block to its warps, so that few
/// parts are spread over many multiprocessors.
#[inline(always)]
pub(super) unsafe fn search<T: Token, O: Operator<T>>(operator: &O, keys: &Keys) {
    let s = operator.sequences();
    let batch = s.batch.max(1);
    let blocks = thread::grid_dim_x() * thread::grid_dim_y();
    let block = thread::block_idx_y() * thread::grid_dim_x() + thread::block_idx_x();
    // Parts of a sequence: a power of two, because a division takes longer than all the rest here. No more than a row
    // has tiles: warps without any would only be in the way.
    let tiles = (s.input_ids_stride / T::IN_UNIT).saturating_add(s.pre_ids_stride / T::IN_UNIT) / TILE + 1;
    let for_all = (31 - (blocks * WARPS).max(1).leading_zeros()).saturating_sub(ceil_log2(batch));
    let log_parts = for_all.min(ceil_log2(tiles));
    let mut item = thread::warp_id() * blocks + block;
    // Not a multiplication, which could overflow for batches that no device has memory for.
    while item >> log_parts < batch {
        unsafe { search_part(operator, keys, (item >> log_parts) as usize, item & ((1 << log_parts) - 1), log_parts) };
        item += blocks * WARPS;
    }
}
