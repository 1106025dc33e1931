//! Drafting by n-gram match: guess that what followed the newest tokens where they stood before follows again.
//!
//! Two batch operators, those published in FastDeploy (`ngram_match` and `hybrid_mtp_ngram`), with the same results as
//! their serial algorithm, element for element. [`mod@reference`] is that algorithm, as a loop over the batch. In short,
//! per sequence: the pattern is its last `n` tokens; the leftmost window of the prompt, or else of the generated
//! tokens, that equals it and has a token after it is found, for the largest `n` that has one; and up to `want` of the
//! tokens that follow are the drafts, as far as a budget of rows for the whole batch reaches.
//!
//! # Shape of the work
//! One launch. The blocks search, one or more for each sequence; the last to finish shares out the budget and copies
//! the drafts.
//!
//! *Search.* A thread takes ends of windows, not windows: at each end it counts how many tokens, backwards, agree with
//! the pattern's end, and so answers for every `n` with one reading. The best end is the smallest key
//!
//! ```text
//! 63                                     32 31                                                0
//! longest possible agreement − agreement  | place: prompt ends first, then generated, each from the left
//! ```
//!
//! kept in device memory by a 64-bit compare-and-swap minimum. A block stops once no key to come can be smaller.
//!
//! *Which window does not depend on the budget.* `want` enters the serial search in one place: a window is passed over
//! when `start >= min(start + want, len)`. For `want >= 1` that is `start >= len`, whatever `want` is; for `want <= 0`
//! it holds for every window, which is the same as cutting the chosen window's drafts to `want.max(0)` tokens. So the
//! search needs no budget.
//!
//! *Budget.* The room of a sequence, when its turn comes, is `R = threshold − used − active`: the rows so far, its own
//! included, and a row for each active sequence after it, are spoken for. It gets `d = min(cap, R)` drafts if
//! `R >= 2`, and none otherwise, where `cap` is the smallest of its own `want`, the tokens that follow its window, and
//! the places in its row. From one sequence to the next `R` falls by `d`, and by the rows that take part in `used`
//! without being owed (`fixed`): a sequence handled with `r` rows adds `r` to `used` and takes 1 from `active`, so
//! `r − 1`; one not handled, all of its rows. Let `U` be `R` with `cap` in place of every earlier `d`. As long as no
//! `fixed` is negative, `d = min(cap, U)` if `U >= 2`, and none otherwise:
//! - While every earlier sequence got its `cap`, `U = R`.
//! - Once one did not because its `cap` was larger than its room, that room is used up: `R <= 0` from there on, and
//!   `U < 0`.
//! - Once one did not because its room was below 2, `R` stays below 2, and so does `U`, which falls by at least as much.
//!
//! `U` is a prefix sum. Should some `fixed` be negative (row counts below 0 came in), the same last block walks the
//! batch in order instead.
//!
//! # Ladder
//! 1. Serial: [`mod@reference`].
//! 2. The published kernels (not kept here): a block a sequence, a pass for each `n`, a second launch for the budget.
//! 3. This: each token read once for all `n`, any number of blocks a sequence, budget by block scan, one launch.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, kernel, shared, thread, warp};

#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;

/// A token id: what a text is made of.
pub trait Token: Copy + PartialEq {}
impl Token for i32 {}
impl Token for i64 {}

/// Rows that a batch may put into a forward pass under [`NgramMatch`], as published.
pub const THRESHOLD: i32 = 128;
/// The same under [`NgramMatchMixed`].
pub const THRESHOLD_MIXED: i32 = 1024;

/// Threads of a block.
pub const THREADS: u32 = 1024;
const WARPS: u32 = THREADS / 32;
/// Window ends that a thread has in flight.
const IN_FLIGHT: u32 = 4;
/// Window ends that a block takes at a time.
const TILE: u32 = THREADS * IN_FLIGHT;

/// The key of a sequence in which nothing was found.
const NOTHING: u64 = u64::MAX;

/// Dynamic shared memory of a block, in bytes.
pub const SHARED_BYTES: u32 = shared_layout::END;

/// Byte offsets in shared memory.
mod shared_layout {
    use super::{THREADS, WARPS};
    /// `[1] u32`: is this the last block?
    pub const LAST: u32 = 0;
    /// `[1] u32`: sequences with work.
    pub const ACTIVE: u32 = 4;
    /// `[1] u32`: sequences with negative `fixed`.
    pub const NEGATIVE: u32 = 8;
    /// `[1] i64`: room at the next chunk of the serial walk.
    pub const ROOM: u32 = 16;
    /// `[WARPS] i64`: sums of warps.
    pub const TOTALS: u32 = 24;
    /// `[THREADS] i64`: `fixed` of each sequence of a chunk.
    pub const FIXED: u32 = TOTALS + WARPS * 8;
    /// `[THREADS] u64`: where its drafts come from.
    pub const FROM: u32 = FIXED + THREADS * 8;
    /// `[THREADS] u32`: its cap, then how many drafts it gets.
    pub const COUNT: u32 = FROM + THREADS * 8;
    /// `[THREADS] i32`: the row of its first draft.
    pub const ROW: u32 = COUNT + THREADS * 4;
    pub const END: u32 = ROW + THREADS * 4;
}

/// Every byte of the workspace has this value before the first launch; each launch leaves it so.
pub const WORKSPACE_FILL: u8 = 0xFF;

/// Elements (`u64`) of the workspace of a batch of up to `batch` sequences: how many blocks have finished, and a key
/// for each sequence.
pub const fn workspace_len(batch: u32) -> usize {
    1 + batch as usize
}

/// Blocks to give each sequence, at least 1, when the longest text has `longest` tokens and the device
/// `multiprocessors`: one for each tile, as long as all can run at once. Results do not depend on it.
pub const fn blocks_per_sequence(batch: u32, longest: u32, multiprocessors: u32) -> u32 {
    let wanted = longest.div_ceil(TILE);
    let share = multiprocessors / if batch == 0 { 1 } else { batch };
    let blocks = if wanted < share { wanted } else { share };
    if blocks == 0 { 1 } else { blocks }
}

/// What both operators take: the sequences of a batch. Row `b` of a matrix starts at `b * stride`, and strides are
/// below 2³¹.
///
/// Tokens beyond a row's end do not exist: a longer `input_ids_len` is cut to the stride, and a `step_idx` outside its
/// row finds nothing. No region may overlap one that is written.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Sequences<T> {
    /// `[batch, input_ids_stride]` the prompts.
    pub input_ids: Global<T>,
    /// `[batch]` tokens of each prompt.
    pub input_ids_len: Global<i64>,
    /// `[batch, pre_ids_stride]` the generated tokens.
    pub pre_ids: Global<T>,
    /// `[batch]` index of the newest generated token.
    pub step_idx: Global<i64>,
    /// `[batch]` most tokens that may be generated.
    pub max_dec_len: Global<i64>,
    /// `[batch]` above 0 while decoding.
    pub seq_lens_decoder: Global<i32>,
    /// `[batch]` rows that each sequence puts into the next forward pass. Out; in and out for the mixed operator.
    pub seq_lens_this_time: GlobalMut<i32>,
    /// `[batch, draft_tokens_stride]` row 0 is the newest token, drafts follow; no more than fit. Out.
    pub draft_tokens: GlobalMut<T>,
    /// [`workspace_len`]`(batch)` elements, filled with [`WORKSPACE_FILL`] once. One launch at a time may use it.
    pub workspace: GlobalMut<u64>,
    /// Elements from one prompt to the next.
    pub input_ids_stride: u32,
    /// Elements from one sequence's generated tokens to the next's.
    pub pre_ids_stride: u32,
    /// Elements from one sequence's drafts to the next's.
    pub draft_tokens_stride: u32,
    /// Sequences.
    pub batch: u32,
    /// Longest pattern.
    pub max_ngram_size: u32,
    /// Rows that the batch may put into the next forward pass.
    pub threshold: i32,
}

/// Parameters of `ngram_match_i64` and `ngram_match_i32`. Grid: (batch, [`blocks_per_sequence`]); an empty batch needs
/// no launch. Shared memory: [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NgramMatch<T> {
    /// The batch.
    pub sequences: Sequences<T>,
    /// `[batch]` above 0 while prefilling; such a sequence is left alone.
    pub seq_lens_encoder: Global<i32>,
    /// `[batch]` most drafts wanted.
    pub draft_token_num: Global<i32>,
}

/// Parameters of `ngram_match_mixed_i64` and `ngram_match_mixed_i32`: drafts are added after those that the rows
/// already hold. A sequence that comes in with `seq_lens_this_time` 0, or that wants none, is left alone; whether it is
/// prefilling is not asked. Grid: (batch, [`blocks_per_sequence`]); an empty batch needs no launch. Shared memory:
/// [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NgramMatchMixed<T> {
    /// The batch.
    pub sequences: Sequences<T>,
    /// Most drafts of a sequence, those that came in included.
    pub max_draft_tokens: i32,
    /// Shortest pattern; 0 counts as 1.
    pub min_ngram_size: u32,
}

/// What a sequence asks for before the budget is known.
#[derive(Clone, Copy)]
struct Claim {
    /// `seq_lens_this_time` is to be written.
    written: bool,
    /// Its rows before drafts are added: where drafts go.
    base: i32,
    /// Drafts that it wants and has places for.
    want: i64,
    /// By how much it lessens the room, drafts apart.
    fixed: i64,
}

/// How the two operators differ.
trait Operator<T: Token>: Copy {
    fn sequences(&self) -> &Sequences<T>;
    /// Shortest pattern, at least 1.
    fn shortest(&self) -> u32;
    /// Whether sequence `b` counts in `active`.
    unsafe fn works(&self, b: usize) -> bool;
    unsafe fn claim(&self, b: usize) -> Claim;
}

impl<T: Token> Sequences<T> {
    /// How many more tokens may be generated after the next one. Saturation only meets values that no 32-bit want
    /// reaches.
    #[inline(always)]
    unsafe fn left(&self, b: usize) -> i64 {
        unsafe { self.max_dec_len.load(b).saturating_sub(self.step_idx.load(b)).saturating_sub(1) }
    }

    /// Places for drafts in a row of `draft_tokens` that holds `base` tokens.
    #[inline(always)]
    fn places(&self, base: i32) -> i64 {
        if base < 0 { 0 } else { self.draft_tokens_stride as i64 - base as i64 }
    }

    #[inline(always)]
    fn finished_blocks(&self) -> GlobalMut<u32> {
        self.workspace.cast()
    }

    #[inline(always)]
    unsafe fn keys(&self) -> GlobalMut<u64> {
        unsafe { self.workspace.at(1) }
    }
}

impl<T: Token> Operator<T> for NgramMatch<T> {
    #[inline(always)]
    fn sequences(&self) -> &Sequences<T> {
        &self.sequences
    }

    #[inline(always)]
    fn shortest(&self) -> u32 {
        1
    }

    #[inline(always)]
    unsafe fn works(&self, b: usize) -> bool {
        unsafe { self.seq_lens_encoder.load(b) > 0 || self.sequences.seq_lens_decoder.load(b) > 0 }
    }

    #[inline(always)]
    unsafe fn claim(&self, b: usize) -> Claim {
        unsafe {
            let s = &self.sequences;
            if self.seq_lens_encoder.load(b) > 0 {
                let rows = s.seq_lens_this_time.load(b);
                Claim { written: false, base: rows, want: 0, fixed: rows as i64 }
            } else if s.seq_lens_decoder.load(b) == 0 {
                Claim { written: true, base: 0, want: 0, fixed: 0 }
            } else {
                let want = s.left(b).min(self.draft_token_num.load(b) as i64).min(s.places(1));
                Claim { written: true, base: 1, want, fixed: 0 }
            }
        }
    }
}

impl<T: Token> Operator<T> for NgramMatchMixed<T> {
    #[inline(always)]
    fn sequences(&self) -> &Sequences<T> {
        &self.sequences
    }

    #[inline(always)]
    fn shortest(&self) -> u32 {
        self.min_ngram_size.max(1)
    }

    #[inline(always)]
    unsafe fn works(&self, b: usize) -> bool {
        unsafe { self.sequences.seq_lens_decoder.load(b) > 0 }
    }

    #[inline(always)]
    unsafe fn claim(&self, b: usize) -> Claim {
        unsafe {
            let s = &self.sequences;
            let base = s.seq_lens_this_time.load(b);
            let want = s.left(b).min(self.max_draft_tokens as i64 - base as i64 + 1);
            if base == 0 || want <= 0 {
                Claim { written: false, base, want: 0, fixed: base as i64 }
            } else {
                Claim { written: true, base, want: want.min(s.places(base)), fixed: base as i64 - 1 }
            }
        }
    }
}

/// The texts of one sequence and the pattern's end.
#[derive(Clone, Copy)]
struct Texts<T> {
    prompt: Global<T>,
    generated: Global<T>,
    /// Window ends in the prompt: every token but the last, which nothing follows.
    prompt_ends: u32,
    /// Window ends in the generated tokens. The newest counts as not yet part of the text.
    generated_ends: u32,
    /// Index of the newest token in `generated`: the pattern's last.
    newest: u32,
    /// Most tokens of a pattern.
    longest: u32,
}

/// The texts of sequence `b`; empty ones where no pattern exists.
#[inline(always)]
unsafe fn texts<T: Token, O: Operator<T>>(operator: &O, b: usize) -> Texts<T> {
    unsafe {
        let s = operator.sequences();
        let step = s.step_idx.load(b);
        let exists = step >= 0 && step < s.pre_ids_stride as i64;
        let newest = if exists { step as u32 } else { 0 };
        let prompt = s.input_ids_len.load(b).max(0).min(s.input_ids_stride as i64) as u32;
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

/// See the module's picture.
#[inline(always)]
fn key(missing: u32, place: u32) -> u64 {
    (missing as u64) << 32 | place as u64
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

/// The sum over the lanes up to and including this one.
#[inline(always)]
unsafe fn running_total(mut v: i64) -> i64 {
    let mut delta = 1;
    while delta < 32 {
        let before = warp::shuffle_up(v, delta);
        if thread::lane_id() >= delta {
            v += before;
        }
        delta *= 2;
    }
    v
}

/// Lowers `keys[b]` to `key`. `seen` is a value that it had at some time.
#[inline(always)]
unsafe fn lower(keys: GlobalMut<u64>, b: usize, key: u64, mut seen: u64) {
    while key < seen {
        let old = unsafe { atomic::compare_exchange(keys, b, seen, key, Ordering::Relaxed, Scope::Device) };
        if old == seen {
            return;
        }
        seen = old;
    }
}

/// Searches every `grid_dim_y`-th tile of one text, from tile `part` on, whose window ends are `0..ends`. `place` is
/// the place of end 0.
#[inline(always)]
unsafe fn search_text<T: Token, O: Operator<T>>(
    operator: &O,
    b: usize,
    part: u32,
    t: &Texts<T>,
    text: Global<T>,
    ends: u32,
    place: u32,
) {
    unsafe {
        if ends == 0 {
            return;
        }
        let keys = operator.sequences().keys();
        let newest = t.generated.load(t.newest as usize);
        // A grid has at most 65,535 blocks in y, and a text fewer than 2³¹ tokens: no sum overflows.
        let mut tile = part * TILE;
        while tile < ends {
            let first = tile + thread::thread_idx_x();
            // All loads before any use: four in flight a thread, and the best key so far rides along.
            let mut candidates = 0u32;
            if tile + TILE <= ends {
                let own = text.at(first as usize);
                let mut j = 0;
                while j < IN_FLIGHT {
                    candidates |= ((own.load((j * THREADS) as usize) == newest) as u32) << j;
                    j += 1;
                }
            } else {
                let mut j = 0;
                while first + j * THREADS < ends {
                    candidates |= ((text.load((first + j * THREADS) as usize) == newest) as u32) << j;
                    j += 1;
                }
            }
            let mut best = 0;
            if thread::lane_id() == 0 {
                best = atomic::load(keys, b, Ordering::Relaxed, Scope::Device);
            }
            // Lanes take lane 0's word for it, so that the warp leaves the loop as one.
            let best = warp::shuffle_idx(best, 0);
            if best <= key(0, place + tile) {
                return;
            }
            let mut own = NOTHING;
            while candidates != 0 {
                let end = first + candidates.trailing_zeros() * THREADS;
                candidates &= candidates - 1;
                let reach = t.longest.min(end + 1);
                let mut agreed = 1;
                while agreed < reach
                    && text.load((end - agreed) as usize) == t.generated.load((t.newest - agreed) as usize)
                {
                    agreed += 1;
                }
                if agreed >= operator.shortest() {
                    own = own.min(key(t.longest - agreed, place + end));
                }
            }
            if warp::any(own < best) {
                let smallest = warp_min(own);
                if thread::lane_id() == 0 {
                    lower(keys, b, smallest, best);
                }
            }
            tile += TILE * thread::grid_dim_y();
        }
    }
}

/// This block's part of the search.
#[inline(always)]
unsafe fn search<T: Token, O: Operator<T>>(operator: &O) {
    unsafe {
        let b = thread::block_idx_x() as usize;
        let part = thread::block_idx_y();
        if operator.claim(b).want <= 0 {
            return;
        }
        let t = texts(operator, b);
        search_text(operator, b, part, &t, t.prompt, t.prompt_ends, 0);
        search_text(operator, b, part, &t, t.generated, t.generated_ends, t.prompt_ends);
    }
}

/// Whether this block is the last of the launch to come here. Then all that the others wrote before is visible.
#[inline(always)]
unsafe fn is_last_block<T: Token>(s: &Sequences<T>) -> bool {
    unsafe {
        let last = shared::dynamic::<u32>(shared_layout::LAST);
        thread::sync_threads();
        if thread::thread_idx_x() == 0 {
            // Releases what the block did before the barrier, acquires what the others released. Counts from -1, which
            // is how the workspace is filled.
            let before = atomic::fetch_add(s.finished_blocks(), 0, 1u32, Ordering::AcqRel, Scope::Device);
            last.store(0, (before.wrapping_add(2) == thread::grid_dim_x() * thread::grid_dim_y()) as u32);
            shared::dynamic::<u32>(shared_layout::ACTIVE).store(0, 0);
            shared::dynamic::<u32>(shared_layout::NEGATIVE).store(0, 0);
        }
        thread::sync_threads();
        last.load(0) != 0
    }
}

/// Shares out the budget and copies the drafts: one block.
#[inline(always)]
unsafe fn share_out<T: Token, O: Operator<T>>(operator: &O) {
    unsafe {
        let s = operator.sequences();
        let tid = thread::thread_idx_x();
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let active = shared::dynamic::<u32>(shared_layout::ACTIVE);
        let negative = shared::dynamic::<u32>(shared_layout::NEGATIVE);
        let room = shared::dynamic::<i64>(shared_layout::ROOM);
        let totals = shared::dynamic::<i64>(shared_layout::TOTALS);
        let fixed = shared::dynamic::<i64>(shared_layout::FIXED);
        let from = shared::dynamic::<u64>(shared_layout::FROM);
        let count = shared::dynamic::<u32>(shared_layout::COUNT);
        let row = shared::dynamic::<i32>(shared_layout::ROW);

        // How many sequences have work, and whether any lessens the room by less than nothing.
        let (mut own_active, mut own_negative) = (0u32, 0u32);
        let mut b = tid;
        while b < s.batch {
            own_active += operator.works(b as usize) as u32;
            own_negative += (operator.claim(b as usize).fixed < 0) as u32;
            b += THREADS;
        }
        if own_active > 0 {
            atomic::fetch_add(active, 0, own_active, Ordering::Relaxed, Scope::Block);
        }
        if own_negative > 0 {
            atomic::fetch_add(negative, 0, own_negative, Ordering::Relaxed, Scope::Block);
        }
        thread::sync_threads();
        let in_order = negative.load(0) != 0;
        // U of the module's text, at the start of the chunk.
        let mut chunk_room = s.threshold as i64 - active.load(0) as i64;
        if tid == 0 {
            s.finished_blocks().store(0, u32::MAX);
            room.store(0, chunk_room);
        }

        let mut chunk = 0;
        while chunk < s.batch {
            let b = (chunk + tid) as usize;
            let here = chunk + tid < s.batch;
            let mut claim = Claim { written: false, base: 0, want: 0, fixed: 0 };
            let mut cap = 0;
            if here {
                claim = operator.claim(b);
                let found = atomic::load(s.keys(), b, Ordering::Relaxed, Scope::Device);
                if found != NOTHING {
                    let t = texts(operator, b);
                    let place = found as u32;
                    let in_prompt = place < t.prompt_ends;
                    // Tokens follow an end as far as the last token, which is no end itself.
                    let follow =
                        if in_prompt { t.prompt_ends - place } else { t.prompt_ends + t.generated_ends - place };
                    cap = claim.want.max(0).min(follow as i64) as u32;
                    let start = if in_prompt { place } else { place - t.prompt_ends } as u64 + 1;
                    let stride = if in_prompt { s.input_ids_stride } else { s.pre_ids_stride };
                    from.store(tid as usize, (b as u64 * stride as u64 + start) << 1 | in_prompt as u64);
                    s.keys().store(b, NOTHING);
                }
            }

            let drafts = if in_order {
                fixed.store(tid as usize, claim.fixed);
                count.store(tid as usize, cap);
                thread::sync_threads();
                if tid == 0 {
                    let mut room_left = room.load(0);
                    let mut i = 0;
                    while i < THREADS as usize {
                        room_left -= fixed.load(i);
                        let granted = grant(count.load(i), room_left);
                        count.store(i, granted);
                        room_left -= granted as i64;
                        i += 1;
                    }
                    room.store(0, room_left);
                }
                thread::sync_threads();
                count.load(tid as usize)
            } else {
                let own = claim.fixed + cap as i64;
                let in_warp = running_total(own);
                if lane == 31 {
                    totals.store(warp_id as usize, in_warp);
                }
                thread::sync_threads();
                // Every warp sums the 32 totals for itself.
                let total = totals.load(lane as usize);
                let upto = running_total(total);
                let before_warp = warp::shuffle_idx(upto - total, warp_id);
                let of_chunk = warp::shuffle_idx(upto, 31);
                let before = before_warp + in_warp - own;
                let granted = grant(cap, chunk_room - before - claim.fixed);
                count.store(tid as usize, granted);
                chunk_room -= of_chunk;
                granted
            };
            row.store(tid as usize, claim.base);
            if claim.written {
                s.seq_lens_this_time.store(b, claim.base + drafts as i32);
            }
            thread::sync_threads();

            // A warp copies for one sequence at a time.
            let mut i = warp_id;
            while i < THREADS {
                let granted = count.load(i as usize);
                if granted > 0 {
                    let source = from.load(i as usize);
                    let text = if source & 1 == 1 { s.input_ids } else { s.pre_ids };
                    let text = text.at((source >> 1) as usize);
                    let first = (chunk + i) as usize * s.draft_tokens_stride as usize + row.load(i as usize) as usize;
                    let mut d = lane;
                    while d < granted {
                        s.draft_tokens.store(first + d as usize, text.load(d as usize));
                        d += 32;
                    }
                }
                i += WARPS;
            }
            // The next chunk writes what this one still reads.
            thread::sync_threads();
            chunk += THREADS;
        }
    }
}

/// Drafts for a sequence that could use `cap` and finds `room`.
#[inline(always)]
fn grant(cap: u32, room: i64) -> u32 {
    if room >= 2 { (cap as i64).min(room) as u32 } else { 0 }
}

#[inline(always)]
unsafe fn draft<T: Token, O: Operator<T>>(operator: &O) {
    unsafe {
        search(operator);
        if is_last_block(operator.sequences()) {
            share_out(operator);
        }
    }
}

// `min_blocks = 1` tells the assembler that a second block on the multiprocessor is not worth a spill.
macro_rules! kernels {
    ($($token:ty: $plain:ident $mixed:ident;)*) => { $(
        #[doc = concat!("Proposes drafts for a batch, with `", stringify!($token), "` token ids.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $plain(p: NgramMatch<$token>) {
            unsafe { draft(&p) }
        }
        #[doc = concat!("Extends drafts that another proposer has put there, with `", stringify!($token), "` token ids.")]
        #[kernel(threads = THREADS, min_blocks = 1)]
        pub unsafe fn $mixed(p: NgramMatchMixed<$token>) {
            unsafe { draft(&p) }
        }
    )* };
}

kernels! {
    i64: ngram_match_i64 ngram_match_mixed_i64;
    i32: ngram_match_i32 ngram_match_mixed_i32;
}
