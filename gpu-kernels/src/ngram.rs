//! Drafting by n-gram match: finds where the newest tokens stood before, and guesses that what followed there follows
//! again.
//!
//! There are two batch operators, those published in FastDeploy (`ngram_match` and `hybrid_mtp_ngram`), with the same
//! results as their serial algorithm, element for element. [`mod@reference`] is that algorithm, as a loop over the
//! batch. In short, for each sequence: the pattern is the sequence's last `n` tokens. A match is the leftmost window of
//! the prompt, or else of the generated tokens, that equals the pattern and has a token after it. The largest `n` that
//! has a match counts. Up to `want` of the tokens that follow the match become drafts, as far as a budget of rows for
//! the whole batch allows.
//!
//! # Shape of the work
//! There is one launch. All CTAs search, one or more for each sequence; the last CTA to finish shares out the budget
//! and copies the drafts. If there is little to read, or a sequence for every SM, each CTA has a sequence to itself
//! instead, and takes its part of the budget itself: [`mod@together`].
//!
//! *Search.* A thread examines ends of windows, not windows: from each end it counts backwards how many tokens agree
//! with the pattern's end. So one reading of the text answers for every `n`. The best end is that with the smallest key
//!
//! ```text
//! 63                                     32 31                                                0
//! longest possible agreement − agreement  | place: prompt ends first, then generated, each from the left
//! ```
//!
//! A 64-bit compare-and-swap keeps the smallest key in device memory. A CTA stops once no key to come can be smaller.
//!
//! *The window does not depend on the budget.* `want` enters the serial search in one place: a window is passed over
//! when `start >= min(start + want, len)`. For `want >= 1` that is `start >= len`, whatever `want` is; for `want <= 0`
//! it holds for every window, which is the same as cutting the chosen window's drafts to `want.max(0)` tokens. So the
//! search needs no budget.
//!
//! *Budget.* When a sequence's turn comes, its room is `R = threshold − used − active`: `used` is the rows so far, its
//! own included, and `active` a row for each active sequence after it. It gets `d = min(cap, R)` drafts if `R >= 2`,
//! and none otherwise, where `cap` is the smallest of its own `want`, the tokens that follow its window, and the places
//! in its row. From one sequence to the next `R` falls by `d` and by `fixed`, the rows apart from drafts for which
//! `active` had not accounted. A sequence that is handled with `r` rows adds `r` to `used` and takes 1 from `active`,
//! so its `fixed` is `r − 1`; for one that is not handled, `fixed` is all of its rows. Let `U` be `R` with `cap` in
//! place of every earlier `d`. As long as no `fixed` is negative, `d = min(cap, U)` if `U >= 2`, and none otherwise:
//! - While every earlier sequence got its `cap`, `U = R`.
//! - Once one did not because its `cap` was larger than its room, that room is used up: `R <= 0` from there on, and
//!   `U < 0`.
//! - Once one did not because its room was below 2, `R` stays below 2, and so does `U`, which falls by at least as
//!   much.
//!
//! `U` is a prefix sum, which threads compute together. If some `fixed` is negative (row counts below 0 came in), the
//! last CTA walks the batch in order instead.
//!
//! # Ladder
//! 1. Serial: [`mod@reference`].
//! 2. `bench_kernels::ngram::peers`, after the published kernels: a CTA a sequence, a pass for each `n`, a second
//!    launch for the budget, serial or by block scan.
//! 3. This: each token read once for all `n`, any number of CTAs a sequence, budget by block scan, one launch.
//! 4. [`mod@together`]: a CTA a sequence, which waits for little and tells the others one thing.
//!
//! # Safety
//! An operator is a launch's parameter block, whose arrays are as it says, and sequence `b` is below its batch. While
//! the launch runs nobody else writes these arrays, and nobody else uses the workspace.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{Global, GlobalMut, async_copy, device, kernel, thread};

#[cfg(not(target_arch = "nvptx64"))]
pub mod reference;
pub mod search;
pub mod share;
pub mod together;

use search::Keys;
use together::Drafted;

/// A token id: what a text is made of.
pub trait Token: Copy + PartialEq {
    /// Token ids in a unit of 16 bytes.
    const IN_UNIT: u32;
    /// Some id, as a placeholder.
    const NONE: Self;

    /// Which ids of a unit equal this one: a bit for each, the lowest for the first.
    fn equal(self, unit: [u32; 4]) -> u32;
}

impl Token for i32 {
    const IN_UNIT: u32 = 4;
    const NONE: Self = 0;

    #[device]
    fn equal(self, [a, b, c, d]: [u32; 4]) -> u32 {
        let bit = |word: u32, i: u32| ((word == self as u32) as u32) << i;
        bit(a, 0) | bit(b, 1) | bit(c, 2) | bit(d, 3)
    }
}

impl Token for i64 {
    const IN_UNIT: u32 = 2;
    const NONE: Self = 0;

    #[device]
    fn equal(self, [a, b, c, d]: [u32; 4]) -> u32 {
        let bit = |low: u32, high: u32, i: u32| ((low as u64 | (high as u64) << 32 == self as u64) as u32) << i;
        bit(a, b, 0) | bit(c, d, 1)
    }
}

/// Threads of a CTA.
pub const THREADS: u32 = 1024;
const WARPS: u32 = THREADS / 32;
/// Dynamic shared memory of a CTA, in bytes.
pub const SHARED_BYTES: u32 = shared_layout::END;

/// Byte offsets in shared memory.
mod shared_layout {
    use super::{THREADS, WARPS};
    /// `[1] u32`: is this the last CTA?
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
    /// `[THREADS] u64`: where each sequence's drafts come from.
    pub const FROM: u32 = FIXED + THREADS * 8;
    /// `[THREADS] u32`: each sequence's cap, then how many drafts it gets.
    pub const COUNT: u32 = FROM + THREADS * 8;
    /// `[THREADS] i32`: the row of each sequence's first draft.
    pub const ROW: u32 = COUNT + THREADS * 4;
    /// `[THREADS] u64`: the keys of a launch of one CTA.
    pub const KEYS: u32 = ROW + THREADS * 4;
    pub const END: u32 = KEYS + THREADS * 8;
}

/// Every byte of the workspace has this value before the first launch.
pub const WORKSPACE_FILL: u8 = 0xFF;

/// Most sequences of a launch of [`mod@together`].
pub const MOST_SEQUENCES: u32 = 128;

/// The first slot and the first key of a workspace. Before them: how many CTAs have finished.
const SLOTS: usize = 2;
const KEYS: usize = SLOTS + 2 * MOST_SEQUENCES as usize;

/// Elements (`u64`) of the workspace of a batch of up to `batch` sequences: how many CTAs have finished,
/// [`MOST_SEQUENCES`] slots of two words, and a key for each sequence.
pub const fn workspace_len(batch: u32) -> usize {
    KEYS + batch as usize
}

/// Whether a workspace is as the next launch needs it: as it was filled at first, except for the slots, which need only
/// have equal tags.
#[cfg(not(target_arch = "nvptx64"))]
pub fn is_ready(workspace: &[u64]) -> bool {
    let (slots, others) = (&workspace[SLOTS..KEYS], workspace[..SLOTS].iter().chain(&workspace[KEYS..]));
    slots.iter().all(|word| word >> 63 == slots[0] >> 63)
        && others.into_iter().all(|&word| word == u64::from_ne_bytes([WORKSPACE_FILL; 8]))
}

/// CTAs for a batch whose longest text has `longest` tokens, on a device with `sms`. Results do not depend on it.
///
/// Each CTA gets a tile or two, so that as many SMs as possible read: a CTA that reads for many warps is held up by its
/// own instructions. While there is little to read, only half of the SMs take part, because then the arrivals of CTAs
/// are what costs, the more the more CTAs there are. The smallest batches have a single CTA, which waits for no other.
pub const fn blocks<T: Token>(batch: u32, longest: u32, sms: u32) -> u32 {
    let tiles = tiles::<T>(longest) * batch as u64;
    let (all, half) = (sms as u64, sms.div_ceil(2) as u64);
    let wanted = tiles.div_ceil(2);
    if tiles <= ALONE_TILES {
        1
    } else if tiles > MANY_TILES * all {
        sms
    } else if wanted < half {
        wanted as u32
    } else {
        half as u32
    }
}

/// Most tiles that one CTA reads alone.
const ALONE_TILES: u64 = 8;
/// With more tiles than this for each SM, reading is what costs.
const MANY_TILES: u64 = 16;

/// Whether [`mod@together`] is better for a batch whose longest text has `longest` tokens. Its results are the same.
///
/// There, SMs without a sequence do not help to read. That costs nothing if every SM has a sequence, and little if
/// there is little to read.
pub const fn together<T: Token>(batch: u32, longest: u32, sms: u32) -> bool {
    batch <= MOST_SEQUENCES && batch <= sms && tiles::<T>(longest) * (sms - batch) as u64 <= WAITED_TILES * sms as u64
}

/// Tiles that a CTA reads in the time that the other launch's arrivals take longer.
const WAITED_TILES: u64 = 66;

/// Tiles of a text of `longest` tokens.
const fn tiles<T: Token>(longest: u32) -> u64 {
    (longest as u64 * size_of::<T>() as u64).div_ceil(search::TILE_BYTES as u64)
}

/// What both operators take: the sequences of a batch. Row `b` of a matrix starts at `b * stride`, and strides are
/// below 2³¹.
///
/// Tokens beyond a row's end do not exist: a longer `input_ids_len` is cut to the stride, and a `step_idx` outside its
/// row finds nothing. No region may overlap one that is written.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
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
    /// [`workspace_len`] elements for this batch or a larger one, filled with [`WORKSPACE_FILL`] once. One launch at a
    /// time may use it.
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

/// Parameters of `ngram_match_i64` and `ngram_match_i32`. Grid: any, see [`blocks`]; an empty batch needs no launch.
/// Shared memory: [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
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
/// prefilling is not asked. Grid: any, see [`blocks`]; an empty batch needs no launch. Shared memory: [`SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct NgramMatchMixed<T> {
    /// The batch.
    pub sequences: Sequences<T>,
    /// Most drafts of a sequence, those that came in included.
    pub max_draft_tokens: i32,
    /// Shortest pattern; 0 counts as 1.
    pub min_ngram_size: u32,
}

/// Element `i` of an array with an element for each sequence. With `NOW` it is loaded here and now: the compiler would
/// move a plain load behind the first branch that does not need it, and so make two waits of one. Such a load bypasses
/// L1. The peers, in which one thread goes from sequence to sequence, ask for `NOW = false`, a plain load.
///
/// # Safety
/// The array has element `i`, and nobody writes it meanwhile.
#[device]
unsafe fn early<const NOW: bool, E: Early>(array: Global<E>, i: usize) -> E {
    // SAFETY: the caller's word.
    unsafe { if NOW { E::load(GlobalMut::from_raw(array.addr()), i) } else { array.load(i) } }
}

/// What [`early`] can load.
trait Early: Copy {
    /// # Safety
    /// As for [`early`].
    unsafe fn load(array: GlobalMut<Self>, i: usize) -> Self;
}
impl Early for i32 {
    #[device]
    unsafe fn load(array: GlobalMut<Self>, i: usize) -> Self {
        // SAFETY: the caller's word.
        unsafe { atomic::load(array, i, Ordering::Relaxed, Scope::Device) }
    }
}
impl Early for i64 {
    #[device]
    unsafe fn load(array: GlobalMut<Self>, i: usize) -> Self {
        // SAFETY: the caller's word.
        unsafe { atomic::load(array, i, Ordering::Relaxed, Scope::Device) }
    }
}

/// What a sequence asks for before the budget is known.
#[derive(Clone, Copy)]
pub struct Claim {
    /// The sequence counts in `active`.
    pub works: bool,
    /// `seq_lens_this_time` is to be written.
    pub written: bool,
    /// The sequence's rows before drafts are added: where drafts go.
    pub base: i32,
    /// Drafts that the sequence wants and has places for.
    pub want: i64,
    /// By how much the sequence lessens the room, drafts apart.
    pub fixed: i64,
}

/// How the two operators differ.
pub trait Operator<T: Token>: Copy {
    /// The batch.
    fn sequences(&self) -> &Sequences<T>;
    /// Shortest pattern, at least 1.
    fn shortest(&self) -> u32;
    /// Whether sequence `b` counts in `active`.
    ///
    /// # Safety
    /// There is such a sequence, and the arrays are live.
    unsafe fn works(&self, b: usize) -> bool;
    /// What sequence `b` asks for; its arrays are loaded here and now if `NOW`.
    ///
    /// # Safety
    /// As [`works`](Self::works).
    unsafe fn claim<const NOW: bool>(&self, b: usize) -> Claim;
}

impl<T: Token> Sequences<T> {
    /// How many more tokens may be generated after the next one. Subtraction saturates only at values that are beyond
    /// every 32-bit `want`.
    #[device]
    unsafe fn left<const NOW: bool>(&self, b: usize) -> i64 {
        // SAFETY: the caller's word.
        unsafe {
            early::<NOW, _>(self.max_dec_len, b).saturating_sub(early::<NOW, _>(self.step_idx, b)).saturating_sub(1)
        }
    }

    /// Places for drafts in a row of `draft_tokens` that holds `base` tokens.
    #[device]
    fn places(&self, base: i32) -> i64 {
        if base < 0 { 0 } else { self.draft_tokens_stride as i64 - base as i64 }
    }

    #[device]
    fn finished_blocks(&self) -> GlobalMut<u32> {
        self.workspace.cast()
    }

    #[device]
    unsafe fn slots(&self) -> GlobalMut<u64> {
        // SAFETY: the caller's word.
        unsafe { self.workspace.at(SLOTS) }
    }

    /// The key of each sequence.
    ///
    /// # Safety
    /// The workspace is live.
    #[device]
    pub unsafe fn keys(&self) -> GlobalMut<u64> {
        // SAFETY: the caller's word.
        unsafe { self.workspace.at(KEYS) }
    }
}

impl<T: Token> Operator<T> for NgramMatch<T> {
    #[device]
    fn sequences(&self) -> &Sequences<T> {
        &self.sequences
    }

    #[device]
    fn shortest(&self) -> u32 {
        1
    }

    #[device]
    unsafe fn works(&self, b: usize) -> bool {
        // SAFETY: the caller's word.
        unsafe {
            let (encoder, decoder) =
                (early::<true, _>(self.seq_lens_encoder, b), early::<true, _>(self.sequences.seq_lens_decoder, b));
            encoder > 0 || decoder > 0
        }
    }

    #[device]
    unsafe fn claim<const NOW: bool>(&self, b: usize) -> Claim {
        // SAFETY: the caller's word.
        unsafe {
            let s = &self.sequences;
            let (encoder, decoder) =
                (early::<NOW, _>(self.seq_lens_encoder, b), early::<NOW, _>(s.seq_lens_decoder, b));
            let (left, wanted) = (s.left::<NOW>(b), early::<NOW, _>(self.draft_token_num, b));
            let works = encoder > 0 || decoder > 0;
            if encoder > 0 {
                let rows = s.seq_lens_this_time.load(b);
                Claim { works, written: false, base: rows, want: 0, fixed: rows as i64 }
            } else if decoder == 0 {
                Claim { works, written: true, base: 0, want: 0, fixed: 0 }
            } else {
                let want = left.min(wanted as i64).min(s.places(1));
                Claim { works, written: true, base: 1, want, fixed: 0 }
            }
        }
    }
}

impl<T: Token> Operator<T> for NgramMatchMixed<T> {
    #[device]
    fn sequences(&self) -> &Sequences<T> {
        &self.sequences
    }

    #[device]
    fn shortest(&self) -> u32 {
        self.min_ngram_size.max(1)
    }

    #[device]
    unsafe fn works(&self, b: usize) -> bool {
        // SAFETY: the caller's word.
        unsafe { early::<true, _>(self.sequences.seq_lens_decoder, b) > 0 }
    }

    #[device]
    unsafe fn claim<const NOW: bool>(&self, b: usize) -> Claim {
        // SAFETY: the caller's word.
        unsafe {
            let s = &self.sequences;
            let (base, left) =
                (atomic::load(s.seq_lens_this_time, b, Ordering::Relaxed, Scope::Device), s.left::<NOW>(b));
            let works = early::<NOW, _>(s.seq_lens_decoder, b) > 0;
            let want = left.min(self.max_draft_tokens as i64 - base as i64 + 1);
            if base == 0 || want <= 0 {
                Claim { works, written: false, base, want: 0, fixed: base as i64 }
            } else {
                Claim { works, written: true, base, want: want.min(s.places(base)), fixed: base as i64 - 1 }
            }
        }
    }
}

/// The whole operator: any grid, CTAs of [`THREADS`].
///
/// # Safety
/// As the operator's parameter block says.
#[device]
pub unsafe fn draft<T: Token, O: Operator<T>>(operator: &O) {
    // SAFETY: the caller's word.
    unsafe {
        let keys = Keys::new(operator.sequences());
        search::search(operator, &keys);
        if share::is_last_block(operator, &keys) {
            share::share_out(operator, &keys);
        }
    }
}

/// The mixed operator of [`mod@together`] for one sequence without a prompt, as a part of another kernel, by that
/// kernel's first [`together::THREADS`] threads. This is its beginning, before the last generated tokens are known.
pub(crate) struct HeadStart(search::AheadShared);

impl HeadStart {
    /// Bytes of shared memory, from the first on.
    pub(crate) const SHARED_BYTES: u32 = Self::TILES + search::AheadShared::bytes(together::THREADS / 32);
    /// Where the tiles begin; the key lies before them.
    const TILES: u32 = 16;
    const _KEY: () = assert!(together::SHARED_BYTES <= Self::TILES);

    /// Starts loading the generated tokens before `end`, which nobody writes any more.
    ///
    /// # Safety
    /// The launch's batch is one sequence without a prompt, in a grid of one CTA. The first [`together::THREADS`] lanes
    /// of the CTA call it, whole warps, and have the first [`SHARED_BYTES`](Self::SHARED_BYTES) of dynamic shared
    /// memory to themselves from then on. There are `end` generated tokens.
    #[device]
    pub(crate) unsafe fn look(p: &NgramMatchMixed<i32>, end: u32) -> Self {
        let parts = together::THREADS / 32;
        // SAFETY: the caller's word.
        unsafe { Self(search::AheadShared::load(&p.sequences, thread::warp_id(), parts, end, Self::TILES)) }
    }

    /// The rest of the operator. The threads synchronise at the named barrier `barrier`. Only the first warp goes on,
    /// with what it has drafted; the others get `None`.
    ///
    /// # Safety
    /// The same lanes call it, with what they have [looked](Self::look) at, when the rest of `p` is there; nobody else
    /// uses the barrier meanwhile.
    #[device]
    pub(crate) unsafe fn draft(&self, p: &NgramMatchMixed<i32>, barrier: u32) -> Option<Drafted<i32>> {
        let sync = || thread::sync_named(barrier, together::THREADS);
        async_copy::wait::<0>();
        // SAFETY: the caller's word.
        unsafe {
            let ahead = |first, in_prompt| self.0.get(first, in_prompt);
            together::draft_after(p, ahead, together::THREADS / 32, sync)
        }
    }
}

/// Extends drafts that another proposer has put there, with `i32` token ids. The decode loop uses it. (`bench-kernels`
/// has the operators with other ids and in other variants.)
// `min_blocks = 1` tells the assembler that a second CTA on the SM is not worth a spill.
#[kernel(threads = THREADS, min_blocks = 1)]
pub unsafe fn ngram_match_mixed_i32(p: NgramMatchMixed<i32>) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { draft(&p) }
}
